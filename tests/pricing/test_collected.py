"""Results of collectives that recomputed blocks keep: what a problem counts of them is below what
the priced plan has, and not for nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.analysis.facts import GraphFacts
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import saved_by_blocks_bytes
from planner.pricing.step_time import derived
from planner.search.build_request import make_request
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN
from planner.space.assemble import assemble
from planner.space.build import build_space, splits_of
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload

DRAWN = 12


def space_of(source: str, sizes: dict[str, int]) -> Space:
    request = make_request(devices=8, hardware=None, topology=None)
    base = GraphFacts.of(
        Model.open(source, Workload(kind="train", batch=16), 8).graph(1), training=True
    )
    mesh = pinned_mesh(request.topology, sizes)
    return build_space(
        base,
        Pricer(request.topology, mesh, request.runtime, request.recipe),
        zero_axes=mesh.zero_axes,
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("zoo:llama-tiny,layers=3", {"data": 2, "model": 4}),
        ("zoo:gpt-tiny,layers=3", {"model": 8}),
        ("zoo:t5-tiny", {"data": 2, "model": 4}),
    ],
)
def test_what_a_problem_counts_is_below_what_plans_keep(source: str, sizes: dict[str, int]) -> None:
    """The best choices under drawn costs: at most what the price has, whatever the layouts, and of
    some plans not nothing."""
    space = space_of(source, sizes)
    problem, rng = assemble(space, Techniques(0, "block-keep"), None), np.random.default_rng(0)
    mesh, slack, shares = (
        space.pricer.mesh.shape,
        1 + space.pricer.runtime.memory_slack,
        list[float](),
    )
    top = max(int(t[t < FORBIDDEN].max(initial=0)) for t in problem.tables)
    for turn in range(DRAWN):
        height = (
            4 * top if turn % 2 else 0
        )  # every second time what leaves terms to be added up is free, and nothing drawn
        cost = [
            np.where(
                (v.costs.saved_collective_bytes > 0) & (height == 0),
                0,
                c + rng.integers(0, height + 1, len(c)),
            )
            for v, c in zip(space.variables, problem.cost, strict=True)
        ]
        drawn = replace(problem, cost=tuple(cost))
        choice = solve(drawn).choice
        flow, runs = derived(
            space.base,
            Plan(
                mesh,
                splits_of(space, choice),
                zero_stage=0,
                zero_axes=(),
                recompute="block-keep",
                repeated_blocks=space.base.runs,
            ),
        )
        assert len(runs) == len(space.base.runs)
        saved = saved_by_blocks_bytes(space.base, flow, runs, space.pricer)
        kept = slack * sum(size for _, size in saved)
        counted = sum(
            float(v.costs.saved_collective_bytes[k])
            for v, k in zip(space.variables, choice, strict=True)
        )
        assert counted <= kept * (1 + 1e-9)
        shares.append(counted / kept if kept else 0.0)
    assert max(shares) > 0.02, shares


def test_ways_lead_to_what_a_gradient_reads() -> None:
    """Of a block of Llama: projections reach attention, the first products of the MLP what they are
    put through; the last product is handed on, and is not kept."""
    base = GraphFacts.of(
        Model.open("zoo:llama-tiny,layers=3", Workload(kind="train", batch=16), 8).graph(1),
        training=True,
    )
    found = {
        base.graph.nodes[i].id.split("/")[-2]: ways
        for i, (_, ways) in base.saved_collective_paths.items()
    }
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"} <= set(
        found
    ) and "down_proj" not in found
    assert [len(way) for way in found["gate_proj"]] == [1] and [
        n.split("/")[-1] for n in found["o_proj"][0]
    ] == ["MatMul_output_0", "Add_output_0"]
    used = [n for ways in found.values() for way in ways for n in way]
    assert len(used) == len(set(used)) and {
        repeats for repeats, _ in base.saved_collective_paths.values()
    } == {3}
