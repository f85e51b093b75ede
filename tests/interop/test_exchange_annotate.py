"""Multi-device annotations: written, held to the IR's rules, read back as the same plan;
onnxruntime runs the file as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.interop.onnx_annotations.read import faults
from planner.interop.onnx_annotations.write import annotate
from planner.strategy.diff import compare, splits
from planner.strategy.strategy import Strategy

DATA = Path(__file__).parents[3] / "shared" / "data" / "models"


def chain(path: Path, batch: int = 8) -> Path:
    """x [B, 16] -> W1 [16, 32] -> Relu -> W2 [32, 12]."""
    rng = np.random.default_rng(0)
    weights = [
        helper.make_tensor(
            n, TensorProto.FLOAT, s, rng.standard_normal(s).astype(np.float32).ravel()
        )
        for n, s in (("w1", (16, 32)), ("w2", (32, 12)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "up"),
        helper.make_node("Relu", ["h"], ["r"], "act"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], "down"),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 12])],
        weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


@pytest.fixture
def cut(tmp_path: Path) -> tuple[Path, Strategy, Any]:
    """The chain planned over data 2 x model 4, and annotated."""
    path = chain(tmp_path / "chain.onnx")
    plan = planner.plan(path, devices=8, pins="dp=2,tp=4,zero=0,tensor=megatron", baselines=False)
    return path, plan, annotate(plan, path).model


def spec(model: Any, node: str, tensor: str) -> Any:
    of = next(n for n in model.graph.node if n.name == node).device_configurations[0]
    return next(s for s in of.sharding_spec if s.tensor_name == tensor)


def test_shards_and_devices_are_those_of_the_plan(cut: tuple[Path, Strategy, Any]) -> None:
    _, plan, model = cut
    assert dict(plan.mesh_shape) == {"data": 2, "tensor": 4} and plan.nodes["up"]["split"] == {
        "m": ["data"],
        "n": ["tensor"],
    }
    assert model.ir_version == 11 and faults(model) == []
    (config,) = model.configuration
    assert config.num_devices == 8 and list(config.device)[:5] == [
        "data=0,tensor=0",
        "data=0,tensor=1",
        "data=0,tensor=2",
        "data=0,tensor=3",
        "data=1,tensor=0",
    ]
    weight = spec(model, "up", "w1")
    assert [
        (d.axis, d.simple_sharding[0].dim_value, d.simple_sharding[0].num_shards)
        for d in weight.sharded_dim
    ] == [(1, 32, 4)]
    assert list(weight.device) == [-1, -2, -3, -4] and [
        list(e.value) for e in weight.index_to_device_group_map
    ] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    both = spec(model, "act", "r")
    assert [(d.axis, d.simple_sharding[0].num_shards) for d in both.sharded_dim] == [
        (0, 2),
        (1, 4),
    ] and list(both.device) == list(range(8))


def test_the_annotated_file_runs_as_before(cut: tuple[Path, Strategy, Any]) -> None:
    ort = pytest.importorskip("onnxruntime")
    path, _, model = cut
    x = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    before, after = (
        ort.InferenceSession(m, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (str(path), model.SerializeToString())
    )
    assert np.array_equal(before, after)
    onnx.checker.check_model(model)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron": (
        "zoo:llama-tiny",
        {"devices": 8, "batch": 16, "pins": "dp=2,tp=4,micro=2,tensor=megatron"},
    ),
    "zero": ("zoo:gpt-tiny", {"devices": 4, "batch": 8, "pins": "dp=4,zero=3,recompute=block"}),
    "stages": (
        "zoo:llama-tiny,layers=4",
        {"devices": 8, "batch": 16, "pins": "pp=2,dp=2,tp=2,micro=4"},
    ),
    "chunks": (
        "zoo:llama-tiny,layers=8",
        {"devices": 4, "batch": 16, "pins": "pp=2,dp=2,micro=4,virtual=2"},
    ),
    "convolutions": ("zoo:resnet-tiny", {"devices": 4, "batch": 8}),
    "inference": ("zoo:bert-tiny", {"devices": 4, "batch": 8, "workload": "infer"}),
    "experts": ("zoo:mixtral-tiny", {"devices": 4, "batch": 8}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_what_is_annotated_is_read_back_as_the_same_plan(case: str, tmp_path: Path) -> None:
    source, options = CASES[case]
    plan = planner.plan(source, baselines=False, **options)
    made = annotate(plan, source)
    path = tmp_path / "annotated.onnx"
    onnx.save(made.model, path)
    assert made.nodes > 10 and faults(made.model) == []
    again = planner.plan(path, baselines=False, **{**options, "pins": "annotated"})
    assert (
        splits(again) == splits(plan)
        and again.mesh == plan.mesh
        and again.techniques == plan.techniques
    )
    assert not compare(plan, again).figures[0].change


def test_a_rebatched_export_keeps_the_files_own_dims(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx", batch=2)
    plan = planner.plan(path, devices=4, batch=16, pins="dp=4", baselines=False)
    model = annotate(plan, path).model
    (dim,) = spec(model, "up", "x").sharded_dim
    assert (
        dim.axis == 0
        and dim.simple_sharding[0].num_shards == 4
        and not dim.simple_sharding[0].HasField("dim_value")
    )
    onnx.save(model, tmp_path / "a.onnx")
    assert splits(
        planner.plan(tmp_path / "a.onnx", devices=4, batch=16, pins="annotated", baselines=False)
    ) == splits(plan)


def test_annotations_of_others_find_their_mesh(
    cut: tuple[Path, Strategy, Any], tmp_path: Path
) -> None:
    """Without names of devices and without our metadata."""
    _, plan, model = cut
    del model.configuration[0].device[:]
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    again = planner.plan(tmp_path / "other.onnx", devices=8, pins="annotated", baselines=False)
    assert dict(again.mesh_shape) == {"data": 2, "tensor": 4}
    assert {n: splits(again)[n] for n in ("up", "act", "down")} == {
        n: splits(plan)[n] for n in ("up", "act", "down")
    }


def test_an_annotated_model_says_so_and_the_verb_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chain(tmp_path / "chain.onnx")
    assert main(["chain.onnx", "--devices", "4", "--quiet", "-o", "s.json"]) == 0
    assert main(["annotate", "s.json", "--model", "chain.onnx"]) == 0
    assert "wrote chain.annotated.onnx: 3 nodes annotated" in capsys.readouterr().err
    assert (
        main(["annotate", "s.json", "--model", "chain.onnx"]) == 2
        and "P053" in capsys.readouterr().err
    )
    assert main(["chain.annotated.onnx", "--devices", "4", "-o", "plain.json"]) == 0
    assert "annotations for 4 devices are not used (--pin annotated)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (
        main(
            [
                "chain.annotated.onnx",
                "--devices",
                "4",
                "--pin",
                "annotated",
                "--mode",
                "semi-auto",
                "-o",
                "same.json",
            ]
        )
        == 0
    )
    assert "are not used" not in capsys.readouterr().out
    assert main(["chain.onnx", "--devices", "4", "--pin", "annotated", "-o", "none.json"]) == 2
    assert "error[P193]" in capsys.readouterr().err


def first(model: Any) -> Any:
    return model.graph.node[0].device_configurations[0]


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "unknown configuration": (
        lambda m: setattr(first(m), "configuration_id", "x"),
        "is unknown or named twice",
    ),
    "nameless": (lambda m: setattr(m.configuration[0], "name", ""), "no name of its own"),
    "names of devices": (
        lambda m: m.configuration[0].device.append("more"),
        "8 devices, 9 of them named",
    ),
    "no tensor of the node": (
        lambda m: setattr(first(m).sharding_spec[0], "tensor_name", "y"),
        "is none of its tensors",
    ),
    "device beyond": (
        lambda m: first(m).sharding_spec[1].index_to_device_group_map[0].value.append(8),
        "are not each one of 8",
    ),
    "device twice": (
        lambda m: first(m).sharding_spec[1].index_to_device_group_map[0].value.append(1),
        "are not each one of 8",
    ),
    "axis beyond": (
        lambda m: setattr(first(m).sharding_spec[1].sharded_dim[0], "axis", 2),
        "axis 2 of rank 2",
    ),
    "another size": (
        lambda m: setattr(
            first(m).sharding_spec[1].sharded_dim[0].simple_sharding[0], "dim_value", 31
        ),
        "of 32 as 31",
    ),
    "shards without devices": (
        lambda m: setattr(
            first(m).sharding_spec[1].sharded_dim[0].simple_sharding[0], "num_shards", 2
        ),
        "2 shards on 4 devices",
    ),
    "no shards": (
        lambda m: setattr(
            first(m).sharding_spec[1].sharded_dim[0].simple_sharding[0], "num_shards", 0
        ),
        "has no number of shards",
    ),
    "an axis twice": (
        lambda m: (
            first(m).sharding_spec[1].sharded_dim.add(axis=-1).simple_sharding.add(num_shards=1)
        ),
        "an axis is sharded twice",
    ),
    "no stage": (lambda m: setattr(first(m), "pipeline_stage", -1), "pipeline stage -1"),
    "old IR": (lambda m: setattr(m, "ir_version", 10), "IR version 10 has no annotations"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds_every_planted_fault(
    fault: str, cut: tuple[Path, Strategy, Any], tmp_path: Path
) -> None:
    _, _, model = cut
    plant, said = FAULTS[fault]
    plant(model)
    found = faults(model)
    assert any(said in x for x in found), found
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(PlanError) as e:
        planner.plan(tmp_path / "bad.onnx", devices=8, pins="annotated", baselines=False)
    assert e.value.code == "P193"


def test_metadata_of_another_kind_is_refused(
    cut: tuple[Path, Strategy, Any], tmp_path: Path
) -> None:
    _, _, model = cut
    model.metadata_props[0].value = '{"splits": {"up": 3}}'
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(PlanError, match="metadata"):
        planner.plan(tmp_path / "bad.onnx", devices=8, pins="annotated", baselines=False)


@pytest.mark.one_in(3)
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the exported models")
@pytest.mark.parametrize(
    "name",
    ["torch_llama_tiny_op23_static_dynamo", "torch_vit_tiny_dynamo", "jax2onnx_flax_gpt_block"],
)
def test_exports_keep_their_plan(name: str, tmp_path: Path) -> None:
    source = DATA / f"{name}.onnx"
    plan = planner.plan(source, devices=4, batch=8, workload="infer", baselines=False)
    made = annotate(plan, source)
    onnx.save(made.model, tmp_path / "a.onnx")
    again = planner.plan(
        tmp_path / "a.onnx", devices=4, batch=8, workload="infer", pins="annotated", baselines=False
    )
    assert splits(again) == splits(plan) and again.cost.step_time_s == plan.cost.step_time_s
