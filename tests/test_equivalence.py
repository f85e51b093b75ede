"""The equivalence benchmark on a few small models, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import equivalence
from benchmarks.equivalence_models import Case, evaluation, free_dims, in_float32, with_weights
from benchmarks.equivalence_run import Row, attempts, choose, idle_axes, run_case
from planner.flow import Plan
from planner.rule import Split

SHARED = Path(__file__).parents[2] / "shared" / "data" / "models"
NAMES = ("dp", "tensor-parallel")


def rows(case: Case, workload: str, names: tuple[str, ...] = NAMES, backends: tuple[str, ...] = ("shard_map",)) -> list[Row]:
    return [r for r in run_case(case, workload, names, backends) if isinstance(r, Row)]


def zoo(name: str) -> Case:
    return Case(name, f"zoo:{name},weights=inline", 8, 8, {})


def test_an_mlp_trains_and_infers_the_same_everywhere() -> None:
    found = rows(zoo("mlp-tiny"), "train", backends=("shard_map", "jit")) + rows(zoo("mlp-tiny"), "infer")
    assert len(found) == 6 and all(r.ok for r in found), found
    assert {r.strategy for r in found} == set(NAMES) and len({r.plan for r in found if r.workload == "train"}) == 2
    assert all((r.gradients is not None) == (r.workload == "train") and (r.runtime is not None) == (r.workload == "infer") for r in found)


@pytest.mark.slow
def test_a_live_batch_norm_is_global() -> None:
    found = rows(zoo("resnet-tiny,training=1"), "train", names=("data-parallel", "tensor-parallel"))
    assert len(found) == 2 and all(r.ok for r in found), found


@pytest.mark.parametrize("file", ["torch_cnn_bn_dynamo.onnx", pytest.param("torch_llama_tiny_op23_static_dynamo.onnx", marks=pytest.mark.slow)])
def test_exported_files_agree_with_onnxruntime(file: str) -> None:
    source = SHARED / file
    if not source.exists():
        pytest.skip("the exported models are not here")
    case = Case(file, str(source), 8, 8, free_dims(str(source)))
    found = rows(case, "infer") + rows(case, "train")
    assert len(found) == 4 and all(r.ok for r in found), found


def test_a_wrong_collective_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.verify import numerics

    right = numerics.load_program

    def wrong(program, name="emitted", compute="float32"):  # sums become means in the emitted program, not in its twin
        from dataclasses import replace

        changed = program.text.replace("lax.psum(", "lax.pmean(") if name == "emitted" else program.text
        return right(replace(program, text=changed), name, compute)

    monkeypatch.setattr(numerics, "load_program", wrong)
    found = rows(zoo("mlp-tiny"), "train", names=("tensor-parallel",))
    assert len(found) == 1 and not found[0].ok


def test_a_row_passes_only_with_every_error_in_bounds() -> None:
    good = Row("m", "train", "dp", "jit", "data=8", 1e-7, 1e-6)
    assert good.ok and "ok" in equivalence.table_line(good)
    for field, value in (("error", 2e-4), ("gradients", 2e-4), ("runtime", 2e-3), ("failure", "it broke"), ("error", None), ("gradients", float("nan"))):
        bad = Row(**{**good.__dict__, field: value})
        assert not bad.ok and "FAILED" in equivalence.table_line(bad)


def test_an_axis_without_work_is_idle() -> None:
    case = zoo("mlp-tiny")
    model = case.model("infer")
    strategy = choose(case, model, attempts("tensor-parallel", 8, False, 8)[0])
    graph = model.graph(1)
    plan = strategy.plan_for(graph)
    assert idle_axes(graph, plan) == ()
    without = {k: Split.of({f: [a for a in axes if a != "model"] for f, axes in s.pairs}) for k, s in plan.splits.items()}
    assert idle_axes(graph, Plan(plan.mesh, without)) == ("model",)


def test_missing_weights_are_written_once_for_both_readers(tmp_path: Path) -> None:
    """A zoo model refers to an absent weights.bin: the copy has it, seeded, and onnxruntime agrees with the emitted program on its values."""
    import onnx

    import models_zoo

    source = tmp_path / "bert.onnx"
    onnx.save_model(models_zoo.build("zoo:bert-tiny"), str(source))
    folder = tmp_path / "copy"
    folder.mkdir()
    copy = with_weights(str(source), folder)
    assert copy != str(source) and Path(copy).exists()
    proto = onnx.load(copy)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    floats = [v for v in values.values() if v.dtype == np.float32 and v.size > 100]
    assert floats and all(v.std() > 0.01 for v in floats)
    assert any(abs(float(v.mean()) - 1) < 0.1 for v in floats)  # norm scales
    assert with_weights(copy, folder) == copy


def test_evaluation_mode_and_float32() -> None:
    case = zoo("resnet-tiny,training=1")
    model = case.model("infer")
    assert any(a.i == 1 for n in model.proto.graph.node for a in n.attribute if a.name == "training_mode")
    assert not any(a.i == 1 for n in evaluation(model.proto).graph.node for a in n.attribute if a.name == "training_mode")
    assert not any(n.attrs.get("training_mode") for n in model.graph(1).nodes)
    assert {t.dtype for t in in_float32(model.plain).tensors.values() if t.is_float} == {"float32"}


def test_no_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert equivalence.main(["--models", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
