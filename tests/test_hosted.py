"""Tables on hosts and servers: which can be, what a plan of them costs, and the advice."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.hosted import HOST_ROWS_BYTES_PER_S, candidates, hosted, worth
from planner.model import Model, Workload
from planner.report.summary import summary
from planner.topology import device

SPEC = "zoo:dlrm-tiny,rows=5000-7-33-9000"


def graph_of(spec: str, batch: int = 64) -> planner.Graph:
    return Model.open(spec, Workload(batch=batch), 4).plain


def test_tables_with_more_rows_than_ids_are_hosted() -> None:
    graph = graph_of(SPEC)
    found = candidates(graph)
    assert {n: (h.rows, h.ids) for n, h in found.items()} == {"embedding.0.weight": (5000, ("sparse_0",)), "embedding.3.weight": (9000, ("sparse_3",))} and worth(graph)
    pieces = hosted(graph, 1, "host")
    assert pieces.tensors["embedding.3.weight"].shape == (64, 16) and pieces.tensors["embedding.2.weight"].shape == (33, 16)
    assert candidates(graph, 100) == {"embedding.3.weight": found["embedding.3.weight"]}  # 6,400 ids a step
    assert hosted(graph, 4, "host").tensors["embedding.0.weight"].shape == (256, 16)
    assert not worth(graph_of("zoo:gpt-tiny", 4)) and not candidates(replace(graph, trainable=frozenset()))


def test_tables_that_something_else_reads_stay() -> None:
    """A tied head, ids that are data too, and ids that two tables share."""
    rows, ids = numpy_helper.from_array(np.zeros((50, 4), np.float32), "t"), helper.make_tensor_value_info("i", TensorProto.INT64, [8])
    other = numpy_helper.from_array(np.zeros((60, 4), np.float32), "u")
    look = helper.make_node("Gather", ["t", "i"], ["x"], axis=0)

    def read(nodes: list[onnx.NodeProto], out: str, shape: list[int]) -> dict[str, object]:
        y = helper.make_tensor_value_info(out, TensorProto.FLOAT, shape)
        model = helper.make_model(helper.make_graph(nodes, "g", [ids], [y], [rows, other]), opset_imports=[helper.make_opsetid("", 18)])
        return dict(candidates(Model.open(model, Workload(), 1).plain))

    relu = helper.make_node("Relu", ["x"], ["y"])
    assert list(read([look, relu], "y", [8, 4])) == ["t"]
    assert not read([look, helper.make_node("Transpose", ["t"], ["w"], perm=[1, 0]), helper.make_node("MatMul", ["x", "w"], ["y"])], "y", [8, 50])
    as_data = [helper.make_node("Cast", ["i"], ["c"], to=1), helper.make_node("Constant", [], ["o"], value_ints=[1]), helper.make_node("Unsqueeze", ["c", "o"], ["d"])]
    assert not read([look, *as_data, helper.make_node("Mul", ["x", "d"], ["y"])], "y", [8, 4])
    assert not read([look, helper.make_node("Gather", ["u", "i"], ["z"], axis=0), helper.make_node("Add", ["x", "z"], ["y"])], "y", [8, 4])


@pytest.mark.parametrize("place", ["host", "server"])
def test_a_step_adds_pulling_and_pushing(place: str, tmp_path: Path) -> None:
    """By hand: two pieces [64, 16] with two moments in float32, on two nodes of eight."""
    s = planner.plan(SPEC, devices=16, hardware="h100-sxm", batch=64, precision="fp32", tables=place, baselines=False)
    c, chip = s.costs, device("h100-sxm")
    shards = dict(s.mesh_shape)
    local = sum(12 * prod(-(-n // prod([shards[a] for a in axes])) for n, axes in zip(row["shape"], row["layout"], strict=True))
                for row in s.tensors.values() if row.get("label") in s.techniques["hosted"])  # fmt: skip
    into, rate = min(2 * 64 * 16 * 12, 8 * local), 8 * chip.outer.bandwidth_bytes_per_s * chip.outer.efficiency
    network = into * (0.5 if place == "host" else 1) / rate + chip.outer.latency_s
    assert c["tables_time_s"] == pytest.approx(2 * (into / HOST_ROWS_BYTES_PER_S + network + local / chip.host_bytes_per_s), rel=1e-5)
    parts = sum(c[k] for k in ("compute_time_s", "exposed_communication_time_s", "optimizer_time_s", "bubble_time_s", "tables_time_s"))
    assert c["step_time_s"] == pytest.approx(parts, rel=1e-5)
    assert s.techniques["hosted"] == ["embedding.0.weight", "embedding.3.weight"] and c["host_memory_bytes"] == 14_000 * 16 * 12
    s.save(tmp_path / "s.json")
    assert planner.Strategy.load(tmp_path / "s.json").workload["training"]["tables"] == place


def test_the_summary_advises() -> None:
    s = planner.plan(SPEC.replace("5000", "500000"), devices=4, hardware="cpu", batch=64)
    rows = s.baselines
    assert rows["tables_host"]["step_time_s"] < rows["tables_server"]["step_time_s"] < s.costs["step_time_s"]
    text = " ".join(summary(s, 100, False).split())
    ratio = s.costs["step_time_s"] / rows["tables_host"]["step_time_s"]
    assert f"tables on hosts would be {ratio:.2g} times as fast: plan again with --tables host" in text and "tables on hosts" in text.split("relative")[1]
    assert not {"tables_host", "tables_server"} & planner.plan("zoo:gpt-tiny", devices=4, hardware="cpu", batch=4).baselines.keys()


def test_what_cannot_be_hosted_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code in ((["zoo:gpt-tiny", "--tables", "host"], "P029"), ([SPEC, "--tables", "moon"], "P018"), ([SPEC, "--tables", "host", "--workload", "infer"], "P028")):
        assert main([*words, "--devices", "4", "--hardware", "cpu", "--batch", "64"]) == 2
        assert f"error[{code}]" in capsys.readouterr().err


def test_where_nothing_fits_hosting_is_named() -> None:
    with pytest.raises(PlanError, match=r"P021[\s\S]*--tables host fits \(re-priced: "):
        planner.plan("zoo:dlrm-tiny,rows=90000000-7-33-9000", devices=1, hardware="cpu", batch=64)
