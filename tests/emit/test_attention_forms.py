"""Programs of models whose attention has more than queries, keys and values: numbers are those of
the unsharded program, whatever is cut."""

from __future__ import annotations

import pytest

import planner
from planner.emit.from_strategy import program
from planner.verify.numerics import compare, seeded_values
from planner.whatif.reprice import open_recorded

LLAMA = "zoo:llama-tiny,layers=2,heads=4,kv_heads=2"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pins", ["dp=2,tp=4", "dp=4,sequence=2", "dp=8,recompute=save:context"])
@pytest.mark.parametrize(("form", "text"), [("cap=0.1", ", cap=0.1"), ("packed=1", "segments")])
def test_numbers_are_those_of_the_whole_program(form: str, text: str, pins: str) -> None:
    source = f"{LLAMA},{form}"
    found = planner.plan(
        source,
        devices=8,
        batch=8,
        hardware="cpu",
        precision="fp32",
        pins=pins,
        baselines=False,
        cache=None,
    )
    graph = open_recorded(found, source).graph(found.chosen.microbatches)
    assert sum(node.op == "Attention" for node in graph.nodes) == 2
    written = program(found, source)
    assert text in written.text
    difference, _ = compare(
        graph,
        found.plan_for(graph),
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
        program=written,
    )
    assert difference.outputs < 1e-5 and difference.gradients < 1e-4
