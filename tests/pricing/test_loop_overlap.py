"""What kernels hide of collectives that the compiler's schedule has beside them: weights of loops
under ZeRO stage 3, new parameters, and what pipeline stages hand to each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import planner
from costmodels.overlap import LoopCollectives, shown_in_loop_s
from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import sent_s
from planner.sharding.layout import STAGE
from planner.solvers import solve
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import PICO, assemble
from planner.space.build import build_space, splits_of
from planner.space.families import batch_only, restrict
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import open_recorded, reprice
from planner.workload.model import Model, Workload

MANY, FEW = "zoo:llama3-8b,layers=3,seq=4096", "zoo:llama3-8b,layers=3,seq=512"
"""A row of so many tokens hides the gathers of a block; a row of so few does not."""


def space_of(source: str, hardware: str = "h100-sxm") -> Space:
    topology = for_devices(hardware, 8)
    pricer = Pricer(
        topology,
        pinned_mesh(topology, {"data": 8}),
        load_runtime("jax-shard_map"),
        load_recipe("bf16-mixed"),
    )
    graph = Model.open(source, Workload(batch=8), 8).graph(1)
    return build_space(GraphFacts.of(graph, training=True), pricer, zero_axes=("data",))


def whole_and_arrays(space: Space, techniques: Techniques) -> tuple[float, float]:
    """Seconds of the best plan of a space: as the whole plan's price has it, and as its arrays
    do."""
    problem = assemble(space, techniques, None)
    choice = solve(problem, "dp", Budget()).choice
    plan = Plan(
        space.pricer.mesh.shape,
        splits_of(space, choice),
        zero_stage=techniques.zero_stage,
        zero_axes=("data",),
        recompute=techniques.recompute,
        microbatches=techniques.microbatches,
        repeated_blocks=space.base.runs,
    )
    cost, _, _ = price_plan(space.base, plan, space.pricer)
    return cost.step_time_s, evaluate(problem, choice).cost / PICO


def planned(pins: str, source: str = MANY, hardware: str = "h100-sxm") -> Strategy:
    return planner.plan(source, devices=8, batch=8, hardware=hardware, pins=pins, baselines=False)


def test_a_loop_hides_shares_of_its_collectives_and_no_more_than_its_kernels_allow() -> None:
    first, second = LoopCollectives(4.0, 0.5, kernel_s=2.0), LoopCollectives(2.0, 0.5, kernel_s=1.0)
    assert shown_in_loop_s([first, second], 20.0, 0.8) == 1.0
    assert shown_in_loop_s([first, second], 5.0, 0.8) == pytest.approx(6 - 0.8 * 5)
    # All but two seconds of the kernels are the first operator's own.
    most = replace(first, kernel_s=6.0)
    assert shown_in_loop_s([most, second], 8.0, 0.8) == pytest.approx(4 - 0.8 * 2)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_arrays_say_what_the_whole_plan_costs(zero: int, recompute: str) -> None:
    whole, arrays = whole_and_arrays(space_of(MANY), Techniques(zero, recompute))
    assert arrays == pytest.approx(whole, rel=1e-6)


def test_the_arrays_are_below_the_price_where_a_loop_cannot_hide_its_share() -> None:
    space = space_of(FEW)
    data = restrict(space, batch_only(space.base, space.pricer.mesh.shape))
    assert data is not None
    whole, arrays = whole_and_arrays(data, Techniques(3))
    assert arrays < whole * 0.95


@pytest.mark.parametrize("hardware", ["tpu-v5p", "cpu"])
def test_nothing_hides_where_no_schedule_showed_it(hardware: str) -> None:
    cost = planned("dp=8,zero=3,micro=1", "zoo:llama-tiny,layers=3", hardware).costs
    assert cost["exposed_communication_time_s"] == cost["communication_time_s"]


def test_gathers_and_scatters_of_loops_hide_by_their_phase() -> None:
    now = reprice(
        s := planned("dp=8,zero=3,micro=1"), open_recorded(s, MANY), for_devices("h100", 8)
    )
    uses = tuple(collectives.collectives(now.flow, now.runs, now.pricer.itemsize))
    rows = sent_s(now.base, now.flow, now.runs, uses, now.pricer)
    shares: dict[str, set[float]] = {}
    for use, seconds, hidden in rows:
        if seconds and ".layers." in use.what and "norm" not in use.what:
            shares.setdefault(use.phase, set()).add(round(hidden / seconds, 9))
    hidden = load_runtime("jax-shard_map").hidden
    assert shares["forward"] == {round(hidden.spared * hidden.gathered[0], 9)}
    assert shares["gradient"] == {round(hidden.spared * hidden.scattered, 9)}
    outside = [row for row in rows if row[0].phase == "forward" and "embed" in row[0].what]
    assert outside and not any(under for _, _, under in outside)


def test_what_stages_hand_to_each_other_hides() -> None:
    now = reprice(
        s := planned("pp=2,dp=4,micro=2,zero=1", "zoo:llama3-8b,layers=4,seq=4096"),
        open_recorded(s, "zoo:llama3-8b,layers=4,seq=4096"),
        for_devices("h100", 8),
    )
    uses = tuple(collectives.collectives(now.flow, now.runs, now.pricer.itemsize))
    handed = [
        under / seconds
        for use, seconds, under in sent_s(now.base, now.flow, now.runs, uses, now.pricer)
        if use.kind == "collective-permute" and use.axes == (STAGE,)
    ]
    hidden = now.pricer.hidden
    assert handed and handed == pytest.approx([hidden.spared * hidden.handed_on] * len(handed))


def test_new_parameters_hide_no_longer_than_the_optimizer_runs() -> None:
    pricer = space_of(FEW).pricer
    elements = np.array([1e6, 2e6])
    update = pricer.optimizer_s(elements, ())
    assert pricer.gathered_beside_updates_s(update * 3, elements, ()).tolist() == update.tolist()
    assert (
        pricer.gathered_beside_updates_s(update / 3, elements, ()).tolist() == (update / 3).tolist()
    )
    assert not pricer.gathered_beside_updates_s(update, elements, ("optimizer",)).any()
    other = replace(pricer, runtime=load_runtime("jax-jit"), memo={})
    assert not other.gathered_beside_updates_s(update, elements, ()).any()
