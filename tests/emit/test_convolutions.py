"""A convolution whose operand the plan converts, in both back ends: the partitioner must be told,
or it gets a gradient wrong."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from planner.emit.program import emit
from planner.execution.plan import Plan
from planner.reader import read_model
from planner.sharding.rule import Split
from planner.verify.numerics import compare
from planner.workload.loss import add_loss
from tests.reader.reader_models import model, rand


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_tokens_cut_then_channels_cut(backend: str) -> None:
    text = (
        "(float[8,16,32] x) => (float[a,b,c,d] y) { t = Transpose <perm = [0,2,1]> (x) i ="
        " Reshape(t, image) y = Conv <strides = [2,2], pads = [1,1,1,1]> (i, w) }"
    )
    graph = add_loss(
        read_model(model(text, 18, image=np.array([8, 32, 4, 4]), w=rand(32, 32, 3, 3)), batch=8),
        "mse",
    )
    ids = {n.op: n.id for n in graph.nodes}
    splits = {n.id: Split() for n in graph.nodes}
    splits[ids["Transpose"]] = Split.of({"d0": ["data"], "d1": ["model"]})
    splits[ids["Reshape"]] = Split.of({"f0": ["data"], "f2": ["model"]})
    splits[ids["Conv"]] = Split.of({"n": ["data"], "c": ["model"]})
    plan = Plan((("data", 2), ("model", 4)), splits)
    values = {graph.labels[name]: rand(*graph.tensors[name].shape) for name in graph.weights}
    result, _ = compare(graph, plan, workload="train", backend=backend, values=values)
    assert result.compared == 1 and result.gradients < 1e-4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_microbatches_of_convolutions_are_those_of_one_batch(
    backend: Literal["shard_map", "jit"],
) -> None:
    text = "(float[4,2,8,8] x) => (float[a,b,c,d] y) { y = Conv <pads = [1,1,1,1]> (x, w) }"
    graph = add_loss(read_model(model(text, 18, w=rand(4, 2, 3, 3)), batch=4), "mse")
    splits = {n.id: Split.of({"n": ["data"]}) if n.op == "Conv" else Split() for n in graph.nodes}
    plan = Plan((("data", 4), ("model", 2)), splits, microbatches=3)
    assert "platform_dependent" in emit(graph, plan, workload="train", backend=backend).text
    values = {graph.labels[name]: rand(*graph.tensors[name].shape) for name in graph.weights}
    result, _ = compare(graph, plan, workload="train", backend=backend, values=values)
    assert result.compared == 1 and result.gradients < 1e-4


def test_convolutions_are_outside_loops_on_a_cpu_and_inside_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jax = pytest.importorskip("jax")
    from planner.emit.runtime.step import loop_convolutions

    monkeypatch.setattr(loop_convolutions, "MICROBATCHES", 3)

    def sums(w: Any, batch: Any) -> Any:
        return loop_convolutions.over_microbatches(
            lambda total, x: (total + jax.lax.conv(x, w, (1, 1), "SAME").sum(), None), 0.0, batch
        )

    w, batch = rand(4, 2, 3, 3), rand(3, 2, 2, 8, 8)
    traced = jax.jit(sums).trace(w, batch)
    loops = {
        platform: "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert loops == {"cpu": False, "cuda": True, "tpu": True}
    assert float(jax.jit(sums)(w, batch)) == pytest.approx(
        sum(float(jax.lax.conv(x, w, (1, 1), "SAME").sum()) for x in batch), rel=1e-4
    )
