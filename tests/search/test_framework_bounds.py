"""What spaces charge of a plan is no more than its price as a framework runs it: else a plan would
be called the best that is not."""

from __future__ import annotations

import pytest

from planner.search.build_request import build_request
from planner.search.options import MachineOptions, SearchOptions, StepOptions
from planner.search.relaxation import Relaxation
from planner.search.search import Search
from planner.solvers.problem import evaluate
from planner.space.assemble import assemble
from planner.workload.open import open_model


@pytest.mark.parametrize("runtime", ["fsdp", "megatron"])
@pytest.mark.parametrize("source", ["llama3-8b,layers=2", "deepseek-v2-lite,layers=3"])
def test_no_space_charges_more_than_the_price(source: str, runtime: str) -> None:
    """New parameters' gathering hides as gradients' sums do, and what blocks gather is one
    collective a block, beside arithmetic."""
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime=runtime),
        SearchOptions(),
    )
    search = Search(open_model(f"zoo:{source}", 16, batch=32), request)
    assert search.run().best is not None
    stages = set()
    for c, space, _, _ in search.details.values():
        if c.techniques.recompute == "block-keep":  # such nodes are bounded by sums alone
            continue
        _, bound_s = Relaxation(space).free(c.techniques, c.techniques.microbatches)
        assert bound_s <= c.cost.step_time_s * (1 + 1e-9), (c.label, c.mesh.shape, c.techniques)
        stages.add(c.techniques.zero_stage)
    assert {1, 3} <= stages


@pytest.mark.parametrize(
    ("source", "runtime", "pins"),
    [
        ("llama3-8b,layers=8", "megatron", "pp=4,dp=4,vpp=2,zero=1,micro=8"),
        ("llama3-8b,layers=8", "fsdp", "pp=2,dp=8,zero=2,micro=4"),
        ("llama3-8b,layers=4", "megatron", "dp=8,tp=2,zero=1,micro=2"),
        ("llama3-8b,layers=4", "fsdp", "dp=16,zero=3"),
        ("mixtral-8x7b,layers=4,seq=1024", "megatron", "pp=2,dp=2,ep=4,zero=1,micro=4"),
    ],
)
def test_no_space_holds_more_than_the_price(source: str, runtime: str, pins: str) -> None:
    """A framework has one gradient of a weight and no copy of a chunk's weights; its first stage
    has nothing of the head. Nodes that are cut alike save what their place in the block asks for:
    a product that goes into the residual stream leaves nothing."""
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime=runtime),
        SearchOptions(pins=pins, baselines=False),
    )
    search = Search(open_model(f"zoo:{source}", 16, batch=32), request)
    assert search.run().best is not None
    for c, space, choice, _ in search.details.values():
        problem = assemble(space, c.techniques, None)
        held = evaluate(problem, choice).peak_usage
        assert held <= c.cost.memory.total * (1 + 1e-9), (c.mesh.shape, c.techniques)
    assert search.details
