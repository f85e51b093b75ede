"""A convolution whose operand the plan converts, in both back ends: the partitioner must be told, or it gets a gradient wrong."""

from __future__ import annotations

import numpy as np
import pytest

from planner.flow import Plan
from planner.reader import read_model
from planner.rule import Split
from planner.training import add_loss
from planner.verify.numerics import compare
from tests.reader_models import model, rand


@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_tokens_cut_then_channels_cut(backend: str) -> None:
    text = "(float[8,16,32] x) => (float[a,b,c,d] y) { t = Transpose <perm = [0,2,1]> (x) i = Reshape(t, image) y = Conv <strides = [2,2], pads = [1,1,1,1]> (i, w) }"
    graph = add_loss(read_model(model(text, 18, image=np.array([8, 32, 4, 4]), w=rand(32, 32, 3, 3)), batch=8), "mse")
    ids = {n.op: n.id for n in graph.nodes}
    splits = {n.id: Split() for n in graph.nodes}
    splits[ids["Transpose"]] = Split.of({"d0": ["data"], "d1": ["model"]})
    splits[ids["Reshape"]] = Split.of({"f0": ["data"], "f2": ["model"]})
    splits[ids["Conv"]] = Split.of({"n": ["data"], "c": ["model"]})
    plan = Plan((("data", 2), ("model", 4)), splits)
    values = {graph.labels[name]: rand(*graph.tensors[name].shape) for name in graph.weights}
    result, _ = compare(graph, plan, workload="train", backend=backend, values=values)
    assert result.compared == 1 and result.gradients < 1e-4
