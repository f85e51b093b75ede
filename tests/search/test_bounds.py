"""What a search proves holds for every plan of its space: those of spaces drawn at random, and
those that pins find."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pins.pins import parse_pins
from planner.pricing.plan_price import price_plan
from planner.search.build_request import make_request
from planner.search.relaxation import Relaxation
from planner.search.saved_collective_bounds import (
    SavedCollectiveRelaxation,
    raised_lower_bound,
    without_limit,
)
from planner.search.search import Search
from planner.search.search_node import SearchNode
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget, evaluate
from planner.space.assemble import PICO, assemble, seconds_of
from planner.space.build import splits_of
from planner.space.families import restrict
from planner.space.stage_shares import slowdown
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload

ROUNDED = 1e-6


def again_at_least(space: Space, at: Techniques) -> float:
    """Seconds that run again at least in plans of a space: its bound where conversions cost next to
    nothing, above that without recomputation."""
    light = replace(
        space,
        variables=[
            replace(v, costs=replace(v.costs, backward_s=v.costs.backward_s * 0))
            if v.kind == "shared_layout"
            else v
            for v in space.variables
        ],
        links=[
            replace(link, forward_s=link.forward_s * 1e-12, backward_s=link.backward_s * 0)
            for link in space.links
        ],
        memo={},
    )
    more, plain = (
        SavedCollectiveRelaxation(Relaxation(light)).free(at, at.microbatches),
        Relaxation(light).free(replace(at, recompute="none"), at.microbatches),
    )
    assert more is not None and plain is not None
    return more[1] - plain[1]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "source, shape",
    [
        ("zoo:gpt-tiny,layers=4", {"data": 2, "model": 4}),
        ("zoo:llama3-8b,layers=4", {"data": 2, "model": 4}),
        ("zoo:t5-tiny", {"data": 4, "model": 2}),
        ("zoo:t5-tiny", {"data": 8}),
        ("zoo:mixtral-tiny", {"data": 2, "model": 4}),
        ("zoo:gpt-tiny,layers=4", {"stage": 2, "model": 4}),
    ],
)
def test_plans_that_keep_results_of_collectives_are_not_below_their_bound(
    source: str, shape: dict[str, int]
) -> None:
    """Drawn by random prices of options, with conversions free (many collectives), cheap and at
    their price (few); those cut along the batch alone among them.

    What is bounded is the plan's own splits: its time, in the memory that it takes, and what of it
    runs again. Some spare what the problem charges; none more than is known.
    """
    search = Search(
        Model.open(source, Workload("train", batch=32), 8),
        make_request(devices=8, hardware=None, topology=None, pins=parse_pins("blocks=looped")),
    )
    mesh, rng, below, told, met = (
        pinned_mesh(search.request.topology, shape),
        random.Random(2),
        0,
        0,
        0,
    )
    micro = 4 if mesh.stages > 1 else 2
    space, at = search.space(mesh, micro, None), Techniques(1, "block-keep", micro)
    assert space is not None
    problem, plain = assemble(space, at, None), assemble(space, replace(at, recompute="none"), None)
    least, _ = without_limit(SavedCollectiveRelaxation(Relaxation(space)), at)
    # Fewer copies of what is saved may make such plans faster, by no more than this.
    fewer_s = Relaxation(space).changes_by_s(replace(at, recompute="none"), at)
    drawn = [splits_of(space, solve(problem, "dp", Budget(work=2_000_000)).choice)]
    for part in (0, 0, 0, 0, 0.1, 0.1, 0.1, 1):
        costs = tuple(
            np.where(
                c >= FORBIDDEN,
                c,
                c + np.array([rng.randrange(int(np.median(c)) + 10**6) for _ in c]),
            )
            for c in problem.cost
        )
        tables = tuple(
            np.where(t >= FORBIDDEN, t, t * part).astype(np.int64) for t in problem.tables
        )
        choice = solve(
            replace(problem, cost=costs, tables=tables), "dp", Budget(work=2_000_000)
        ).choice
        assert evaluate(plain, choice).cost + fewer_s * PICO <= evaluate(problem, choice).cost
        drawn.append(splits_of(space, choice))
    for splits in drawn:
        plan = Plan(
            mesh.shape,
            splits,
            zero_stage=1,
            zero_axes=mesh.zero_axes,
            recompute="block-keep",
            microbatches=micro,
            repeated_blocks=space.base.runs,
            schedule="1f1b" if mesh.stages > 1 else "",
        )
        cost = price_plan(space.base, plan, search.pricer(mesh))[0]
        again = cost.recompute_time_s * slowdown(space, at)  # the bubble is apart
        own = restrict(
            space, {i: (splits[space.base.graph.nodes[i].id],) for i in space.base.times}
        )
        assert own is not None
        known, charged = (
            again_at_least(own, at),
            sum(
                float((seconds_of(own, at) - seconds_of(own, replace(at, recompute="none")))[k])
                for k in first_of(own)
            ),
        )
        assert known <= again * (1 + ROUNDED) + ROUNDED**2
        bounds = []
        for narrow in (True, False):
            sparing = SavedCollectiveRelaxation(Relaxation(own), narrow)
            bound, usage = without_limit(sparing, at)
            bounds += [
                bound,
                (
                    sparing.limited(at, cost.memory.total, (bound, usage))
                    if usage > cost.memory.total
                    else bound
                ),
            ]
        # Equal conversions that compilers merge make the price of a plan less than its bound
        # (docs/how-a-plan-is-chosen.md): by as much as without recomputation.
        whole, unmerged = (
            price_plan(space.base, replace(plan, recompute="none"), search.pricer(mesh))[0],
            Relaxation(own).free(replace(at, recompute="none"), micro),
        )
        assert unmerged is not None
        merged = max(0.0, unmerged[1] - whole.step_time_s)
        assert (
            least <= bounds[2] * (1 + ROUNDED)
            and bounds[0] <= bounds[2] * (1 + ROUNDED)
            and max(bounds) <= cost.step_time_s * (1 + ROUNDED) + merged
        )
        met += not merged
        below += again < charged * (1 - ROUNDED)
        told += known > again / 2 > 0
    assert below or source == "zoo:t5-tiny"
    assert told and met


def first_of(space: Space) -> list[int]:
    """The first option of each variable."""
    return np.cumsum([0, *(v.options for v in space.variables)])[:-1].tolist()  # type: ignore[no-any-return]


PINS: list[str] = [
    "bucket=1MiB",
    "bucket=1GiB",
    "micro=1",
    "micro=4",
    "recompute=block",
    "recompute=block-keep",
    "recompute=none",
    "zero=0",
    "zero=2",
    "zero=3",
    "tp=2",
    "pp=2",
]


@pytest.mark.parametrize(
    "source, machine, batch",
    [
        pytest.param("zoo:gpt-tiny", {"devices": 2}, 32, marks=pytest.mark.slow),
        pytest.param("zoo:gpt-tiny,layers=4", {"devices": 8}, 32, marks=pytest.mark.slow),
        pytest.param(
            "zoo:llama3-8b,layers=2",
            {"devices": 16, "memory_limit_bytes": 10 * 2**30},
            32,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zoo:resnet18", {"devices": 4, "hardware": "tpu-v5e"}, 64, marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:mixtral-tiny", {"devices": 8, "hardware": "tpu-v4"}, 16, marks=pytest.mark.slow
        ),
        ("zoo:mlp-tiny", {"devices": 4, "hardware": "cpu"}, 16),
    ],
)
def test_no_pin_finds_a_plan_below_the_bound(
    source: str, machine: dict[str, Any], batch: int
) -> None:
    """One level, two and a torus; what contradicts a machine is refused."""
    open_ = planner.plan(source, batch=batch, baselines=False, **machine)
    found = 0
    for pin in PINS:
        try:
            pinned = planner.plan(
                source, batch=batch, baselines=False, remedies=False, pins=pin, **machine
            )
        except planner.PlanError:
            continue
        found += 1
        assert pinned.costs["step_time_s"] >= open_.solver["bound_s"] * (1 - ROUNDED), pin
        assert pinned.solver["bound_s"] <= pinned.costs["step_time_s"]
    assert found >= 6 and open_.solver["bound_s"] > 0
    assert open_.costs["step_time_s"] * PICO > 0


TIGHT: dict[str, Any] = {"devices": 16, "memory_limit_bytes": 8 * 2**30}
"""Of a machine for eight layers of Llama-3 8B: most plans that fit keep some results of collectives
in recomputed blocks, or none."""


HALF: dict[str, Any] = {"devices": 8, "memory_limit_bytes": int(6.2 * 2**30)}
"""Of half of its devices, for half of its layers and samples."""


def tight_search(pins: str = "", layers: int = 8, **options: Any) -> Search:
    options = {**TIGHT, **options}
    request = make_request(
        hardware=None, topology=None, baselines=False, pins=parse_pins(pins), **options
    )
    workload, source = Workload("train", batch=8 * layers), f"zoo:llama3-8b,layers={layers}"
    return Search(Model.open(source, workload, options["devices"]), request)


@pytest.mark.slow
def test_a_leafs_own_space_proves_more_of_plans_that_keep_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is proven of such plans in the end, with and without the spaces of their own
    microbatches; and no such plan is below."""
    found: list[tuple[float, float, float]] = []

    def both(
        leaves: Iterable[tuple[float, SearchNode, Relaxation]],
        limit: float,
        bound: float,
        own: Callable[[SearchNode], Space | None] | None,
    ) -> float:
        every = list(leaves)
        if own is None:  # what holds without a memory limit
            return raised_lower_bound(every, limit, bound, own)
        found.append(
            (
                raised_lower_bound(every, limit, bound, None),
                raised_lower_bound(every, limit, bound, own),
                bound,
            )
        )
        return found[-1][1]

    monkeypatch.setattr("planner.search.best_first.raised_lower_bound", both)
    bound = tight_search("recompute=block-keep", layers=4, **HALF).run().bound_s
    assert all(shared <= own <= most for shared, own, most in found) and any(
        1.01 * shared < own for shared, own, _ in found
    )
    assert bound == found[-1][1]
    for pins in ("", ",micro=4", ",zero=3"):
        plan = planner.plan(
            "zoo:llama3-8b,layers=4",
            batch=32,
            baselines=False,
            remedies=False,
            pins=f"recompute=block-keep{pins}",
            **HALF,
        )
        assert plan.costs["step_time_s"] >= bound * (1 - ROUNDED), pins


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        pytest.param("recompute=none", marks=pytest.mark.slow),
        "recompute=block",
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def test_a_bound_under_the_memory_limit_is_worked_out_once(
    pins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, Techniques, float]] = []
    plain = Relaxation.limited

    def counted(
        self: Relaxation,
        techniques: Techniques,
        limit_bytes: float,
        free: tuple[float, float],
        enough_s: float = np.inf,
    ) -> float:
        if type(self) is Relaxation:  # those of named values ask anew with other names settled
            asked.append((id(self), techniques, limit_bytes))
        return plain(self, techniques, limit_bytes, free, enough_s)

    monkeypatch.setattr(Relaxation, "limited", counted)
    search = tight_search(pins)
    assert search.run().best is not None
    assert len(asked) == len(set(asked)) > 10


@pytest.mark.slow
def test_bounds_of_leaves_that_were_given_up_are_raised_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as they are the least, with a pool of work; what is proven without one is less, and
    what is proven with one is no more than a patient search finds."""
    pins = "recompute=none,offload=none,blocks=looped"
    patient = tight_search(pins, memory_limit_bytes=7 * 2**30).run()
    for name in ("PATIENCE", "LONG_PATIENCE"):
        monkeypatch.setattr(f"planner.search.best_first.{name}", 1)
    hasty = tight_search(pins, memory_limit_bytes=7 * 2**30).run()
    monkeypatch.setattr("planner.search.best_first.SETTLING", 0)
    rough = tight_search(pins, memory_limit_bytes=7 * 2**30).run()
    assert patient.best is not None and hasty.best is not None and rough.best is not None
    assert (
        rough.bound_s
        < hasty.bound_s
        <= patient.best.cost.step_time_s
        <= hasty.best.cost.step_time_s
    )


@pytest.mark.slow
def test_meshes_that_were_never_looked_at_bound_what_was_given_up() -> None:
    """Whatever was seen of the meshes when patience ended, with and without memory for the aim."""
    for objective, patience in itertools.product(("step", "memory"), (0, 8)):
        # Of plans that save by name some are solved whatever the patience.
        search = tight_search("recompute=block", objective=objective)
        explorer = search._main()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("PATIENCE", "LONG_PATIENCE"):
                patch.setattr(f"planner.search.best_first.{name}", patience)
            best = explorer.run()
        value = search.value(best)
        assert explorer.bound() <= value and (best is None) == (patience == 0)


@pytest.mark.slow
def test_a_search_under_another_limit_begins_with_what_the_first_proved_of_meshes() -> None:
    """No plan that the first priced is below that, and a mesh is not looked at again where none can
    be below what is asked for."""
    search = tight_search("recompute=none", layers=4, **HALF)
    first = search._main()
    first.run()
    proven: dict[Any, float] = {}
    for (mesh, pinned, _), seconds in search.least.items():
        assert pinned and seconds > 0
        proven[mesh] = min(seconds, proven.get(mesh, np.inf))
    assert first.priced and all(
        c.cost.step_time_s >= proven[c.mesh] * (1 - ROUNDED) for c in first.priced
    )
    worth = sorted(proven.values())[len(proven) // 2]
    other = search._main(2 * HALF["memory_limit_bytes"])
    other.run(worth)
    seen = {other.meshes[index] for index in other._mesh_spaces}
    assert seen.isdisjoint(m for m, seconds in proven.items() if seconds >= worth)
    assert not seen.isdisjoint(proven)
