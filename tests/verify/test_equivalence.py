"""The equivalence benchmark on a few small models, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import equivalence, equivalence_models
from benchmarks.equivalence_models import Case, evaluation, free_dims, in_float32, with_weights
from benchmarks.equivalence_run import Row, attempts, choose, identity, idle_axes, run_case
from planner.execution.plan import Plan
from planner.sharding.rule import Split

SHARED = Path(__file__).parents[3] / "shared" / "data" / "models"
NAMES = ("dp", "tensor-parallel")


def rows(
    case: Case,
    workload: str,
    names: tuple[str, ...] = NAMES,
    backends: tuple[str, ...] = ("shard_map",),
) -> list[Row]:
    return [r for r in run_case(case, workload, names, backends) if isinstance(r, Row)]


def zoo(name: str) -> Case:
    return Case(name, f"zoo:{name},weights=inline", 8, 8, {})


@pytest.mark.slow
def test_an_mlp_trains_and_infers_the_same_everywhere() -> None:
    found = rows(zoo("mlp-tiny"), "train", backends=("shard_map", "jit")) + rows(
        zoo("mlp-tiny"), "infer"
    )
    assert len(found) == 6 and all(r.ok for r in found), found
    assert {r.strategy for r in found} == set(NAMES) and len(
        {r.plan for r in found if r.workload == "train"}
    ) == 2
    assert all(
        (r.gradients is not None) == (r.workload == "train")
        and (r.runtime is not None) == (r.workload == "infer")
        for r in found
    )


@pytest.mark.slow
def test_a_live_batch_norm_is_global() -> None:
    found = rows(zoo("resnet-tiny,training=1"), "train", names=("data-parallel", "tensor-parallel"))
    assert len(found) == 2 and all(r.ok for r in found), found


@pytest.mark.parametrize(
    "file",
    [
        "torch_cnn_bn_dynamo.onnx",
        pytest.param("torch_llama_tiny_op23_static_dynamo.onnx", marks=pytest.mark.slow),
    ],
)
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

    def wrong(
        program, name="emitted", compute="float32"
    ):  # sums become means in the emitted program, not in its twin
        from dataclasses import replace

        changed = (
            program.text.replace("lax.psum(", "lax.pmean(") if name == "emitted" else program.text
        )
        return right(replace(program, text=changed), name, compute)

    monkeypatch.setattr(numerics, "load_program", wrong)
    found = rows(zoo("mlp-tiny"), "train", names=("tensor-parallel",))
    assert len(found) == 1 and not found[0].ok


def test_a_row_passes_only_with_every_error_in_bounds() -> None:
    trained = Row("m", "train", "dp", "jit", "data=8", 1e-7, gradients=1e-6, update=1e-6)
    inferred = Row("m", "infer", "dp", "jit", "data=8", 1e-7, runtime=1e-6)
    nan = float("nan")
    wrong = (
        ("error", 2e-4),
        ("error", None),
        ("gradients", 2e-4),
        ("gradients", nan),
        ("gradients", None),
        ("update", 2e-4),
        ("update", None),
        ("failure", "it broke"),
    )
    for good, bad in (
        (trained, wrong),
        (inferred, (("runtime", 2e-3), ("runtime", None), ("error", nan))),
    ):
        assert good.ok and "ok" in equivalence.table_line(good)
        for field, value in bad:
            row = Row(**{**good.__dict__, field: value})
            assert not row.ok and "FAILED" in equivalence.table_line(row)


def test_rows_left_out_are_noticed() -> None:
    rows = [
        Row("m", w, s, b, "")
        for w in ("infer", "train")
        for s in equivalence.asked(w, False)[0]
        for b in equivalence.asked(w, False)[1]
    ]
    assert len(rows) == 26 and not equivalence.missing_rows(rows, False)
    assert not equivalence.missing_rows(
        [r for r in rows if r.strategy != "exchange"], False
    )  # only of models whose kernels can exchange
    assert equivalence.missing_rows(rows[1:], False) == ["infer data-parallel shard_map"]


def test_gradients_that_are_missing_or_of_another_shape_fail() -> None:
    from planner.verify.numerics import _error, worst_error

    right = {"a": np.ones((2, 3)), "b": np.full(3, 1e-6)}
    assert worst_error(right, right) == (0.0, "a")
    assert worst_error({"a": right["a"]}, right) == (np.inf, "b") and worst_error(
        right, {"a": right["a"]}
    ) == (np.inf, "b")
    assert worst_error({**right, "a": np.ones((1, 3))}, right) == (np.inf, "a")
    assert worst_error({**right, "b": np.full(3, 2e-6)}, right)[0] == pytest.approx(
        1e-3
    )  # against a thousandth of the largest
    assert worst_error({**right, "b": np.full(3, np.nan)}, right) == (np.inf, "b")
    assert _error(np.ones((1,)), np.ones((5,)), 0.0) == np.inf


def test_an_update_that_skips_a_reduction_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own part (gathering updated pieces), which gradients alone do not run."""
    from planner.verify import numerics

    right = numerics.load_program

    def wrong(program, name="emitted", compute="float32"):  # every device updates by half
        from dataclasses import replace

        assert "w = w - learning_rate(count) * (" in program.text or name == "unsharded"
        changed = (
            program.text.replace(
                "w = w - learning_rate(count) * (", "w = w - 0.5 * learning_rate(count) * ("
            )
            if name == "emitted"
            else program.text
        )
        return right(replace(program, text=changed), name, compute)

    monkeypatch.setattr(numerics, "load_program", wrong)
    found = rows(zoo("mlp-tiny"), "train", names=("tensor-parallel",))
    assert (
        len(found) == 1
        and not found[0].ok
        and found[0].gradients < 1e-4
        and found[0].update == pytest.approx(0.5, rel=0.01)
    )


def test_an_axis_without_work_is_idle() -> None:
    case = zoo("mlp-tiny")
    model = case.model("infer")
    strategy = choose(case, model, attempts("tensor-parallel", 8, False, 8)[0])
    graph = model.graph(1)
    plan = strategy.plan_for(graph)
    assert idle_axes(graph, plan) == ()
    without = {
        k: Split.of({f: [a for a in axes if a != "tensor"] for f, axes in s.pairs})
        for k, s in plan.splits.items()
    }
    assert idle_axes(graph, Plan(plan.mesh, without)) == ("tensor",)


def test_a_mesh_written_differently_is_the_same_strategy() -> None:
    graph = zoo("mlp-tiny").model("infer").graph(1)
    products = [n.id for n in graph.nodes if n.op == "MatMul"]

    def plan(mesh: dict[str, int], **cuts: list[str]) -> Plan:
        return Plan(tuple(mesh.items()), {i: Split.of(cuts) for i in products})

    one, two = plan({"data": 8}, m=["data"]), plan({"data": 4, "data2": 2}, m=["data", "data2"])
    turned, apart = (
        plan({"data": 4, "data2": 2}, m=["data2", "data"]),
        plan({"data": 4, "data2": 2}, m=["data"], n=["data2"]),
    )
    same = identity(graph, one, 0)
    assert identity(graph, two, 0) == same and identity(graph, two, 1) != identity(graph, one, 1)
    assert identity(graph, turned, 0) != same and identity(graph, apart, 0) != same
    assert identity(graph, plan({"a": 4, "b": 2}, m=["a"], n=["b"]), 0) == identity(graph, apart, 0)


def test_hand_pinned_tensor_parallelism_cuts_weights() -> None:
    """Not the sequence: with links nearly free a solver would rather cut rows than weights."""
    case = zoo("gpt-tiny")
    model = case.model("infer")
    graph = model.graph(1)
    plan = choose(case, model, attempts("tensor-parallel", 8, False, 8)[0]).plan_for(graph)
    products = [
        n for n in graph.nodes if n.op == "MatMul" and any(x in graph.weights for x in n.inputs)
    ]
    assert len(products) > 4
    assert all(
        "tensor" in (*plan.splits[n.id].axes("n"), *plan.splits[n.id].axes("k")) for n in products
    )


def test_missing_weights_are_written_once_for_both_readers(tmp_path: Path) -> None:
    """A zoo model refers to an absent weights.bin: the copy has it, seeded, and onnxruntime agrees
    with the emitted program on its values."""
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
    norms = {k for k in values if k.endswith("LayerNorm.weight")}
    floats = {k: v for k, v in values.items() if v.dtype == np.float32 and v.size > 32}
    assert norms and norms <= set(floats) and all(v.std() > 0.01 for v in floats.values())
    assert {k for k, v in floats.items() if abs(float(v.mean()) - 1) < 0.1} == norms
    assert all(abs(float(v.mean())) < 0.1 for k, v in floats.items() if k not in norms)
    assert with_weights(copy, folder) == copy


def test_evaluation_mode_and_float32() -> None:
    case = zoo("resnet-tiny,training=1")
    model = case.model("infer")
    assert any(
        a.i == 1 for n in model.proto.graph.node for a in n.attribute if a.name == "training_mode"
    )
    assert not any(
        a.i == 1
        for n in evaluation(model.proto).graph.node
        for a in n.attribute
        if a.name == "training_mode"
    )
    assert not any(n.attrs.get("training_mode") for n in model.graph(1).nodes)
    assert {t.dtype for t in in_float32(model.plain).tensors.values() if t.is_float} == {"float32"}


def test_no_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert equivalence.main(["--models", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_shrunk_models_have_the_same_weights_at_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Microbatches of a shrunk model are shrunk too."""
    monkeypatch.setattr(equivalence_models, "LARGE", 1000)
    case = zoo("bert-tiny")
    model = case.model("train")
    assert isinstance(model, equivalence_models.Shrunk) and any(
        n.startswith("shrunk from") for n in model.plain.notes
    )
    assert equivalence_models.weight_shapes(model.graph(2)) == equivalence_models.weight_shapes(
        model.plain
    )
    assert model.graph(2).dims["batch"] == 4


@pytest.mark.slow
def test_virtual_devices_have_threads_to_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 threads for 8 devices, independent collectives of jit programs deadlock: every way to
    start virtual devices asks for more."""
    from planner.emit.program import emit
    from planner.verify.worker import environment

    monkeypatch.delenv("NPROC", raising=False)
    assert (
        int(environment(8)["NPROC"]) >= 64 and int(equivalence.quick_environment(8)["NPROC"]) >= 64
    )
    text = emit(
        zoo("mlp-tiny").model("infer").graph(1), Plan((("data", 8),), {}), workload="infer"
    ).text
    assert text.index('os.environ.setdefault("NPROC"') < text.index(
        'jax.config.update("jax_platforms", "cpu")'
    )
