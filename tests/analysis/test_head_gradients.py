"""The head's gradients where blocks are written out: made at once, in the place of the logits."""

from __future__ import annotations

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.analysis.passing import puts_off
from planner.workload.model import Model, Workload


@pytest.mark.parametrize("source, biased", [("zoo:gpt-tiny", False), ("zoo:modernbert-tiny", True)])
def test_written_out_blocks_do_not_wait_for_the_head(source: str, biased: bool) -> None:
    """Compilers put off gradients of the head's weight and bias, and kept logits meanwhile."""
    pins = "dp=4,micro=1,blocks=written-out"
    made = planner.plan(source, devices=4, batch=8, hardware="h100", pins=pins, baselines=False)
    program = str(planner.emit(made, source))
    model = program[program.index("def loss_of(") :]
    head = model[: model.index("cross_entropy(")].splitlines()[-3:]
    assert sum("at_once(lambda x0, x1:" in line for line in head) == 1 + biased, head


@pytest.mark.parametrize("source", ["zoo:gpt-tiny", "zoo:modernbert-tiny"])
def test_nor_is_it_priced_so(source: str) -> None:
    """Logits are counted once, and no product behind the blocks is put off, but those inside."""
    model = Model.open(source, Workload("train", batch=8), 4)
    base = GraphFacts.of(model.graph(1), training=True).without_loops
    end = base.end_of_blocks
    assert end is not None
    assert all(i >= end for i in base.handing_back)
    assert len(base.handing_back) == 1
    nodes = range(len(base.graph.nodes))
    assert not any(puts_off(base, i) for i in nodes if i >= end)
    assert any(puts_off(base, i) for i in nodes if i < end)
