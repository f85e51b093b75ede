"""Which repeated blocks one function may serve."""

from __future__ import annotations

import pytest

from models_zoo.builder import Net
from models_zoo.layers import linear
from planner.execution.loops import loopable_blocks
from planner.graph.ir import Graph
from planner.graph.repeats import find_runs
from planner.reader import read_model


def four_layers(read: str) -> Graph:
    """Layers that add to what they are given; each reads the first one's operand too, or another
    input."""
    net = Net("layers")
    s = net.root
    x, other = (net.input(name, [net.batch, 8, 16]) for name in ("x", "other"))
    first = h = linear(s.at("embed"), x, 16, 16)
    for i in range(4):
        at = s.at(f"layers.{i}")
        y = at.op("Tanh", linear(at.at("fc"), h, 16, 16))
        h = at.op("Add", at.op("Mul", y, first if read == "first" else other), h)
    s.op("Tanh", h, out="y")
    net.output("y", [net.batch, 8, 16])
    return read_model(net.model(), batch=2)


@pytest.mark.parametrize(("read", "loops"), [("other", 1), ("first", 0)])
def test_what_all_repeats_read_is_not_what_the_first_hands_on(read: str, loops: int) -> None:
    graph = four_layers(read)
    runs = find_runs(graph)
    assert len(runs) == 1 and runs[0][2] == 4
    assert len(loopable_blocks(graph, runs)) == loops
