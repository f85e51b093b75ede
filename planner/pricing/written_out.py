"""Which programs have their repeated blocks written out instead of looping over them.

A loop copies a block's weights, their gradients and what its backward pass reads out of stacks and
into them (planner.pricing.loop_copies). Written out nothing is copied, but the program is as many
times as long, and takes longer to compile (benchmarks/RESULTS.md, "Blocks written out").
So it is chosen where a program stays short and fits.
"""

from __future__ import annotations

from dataclasses import replace

from planner.analysis.facts import GraphFacts
from planner.execution.plan import Plan
from planner.execution.techniques import LOOPED, WRITTEN_OUT, may_be_written_out
from planner.pricing.pricer import Pricer

LONGEST = 1500
"""Operators of a model whose blocks are written out unasked: a guess at how long people let a
program compile. GPT-2 XL has 1,254."""


def ways_of_blocks(base: GraphFacts, plan: Plan, pricer: Pricer, pinned: str | None) -> list[Plan]:
    """A plan with each way to run its blocks that is to be priced, the better first: the pinned one
    alone, none where the plan cannot have it."""
    if pinned is not None:
        possible = pinned == LOOPED or may_be_written_out(plan)
        return [replace(plan, blocks=pinned)] if possible else []
    if pricer.writes_out(base) and may_be_written_out(plan):
        return [replace(plan, blocks=WRITTEN_OUT), plan]
    return [plan]
