"""Plans for devices of several kinds in one job: unequal shares, held against equal ones and
against the best kind alone.

    even      one mesh over all devices, which share the work evenly: the search as for one kind
    islands   groups of as many devices of one kind each, on the same mesh; the batch's microbatches
              are shared out so that all islands end together (planner.pricing.islands)
    alone     one kind of them, the others left out

The mesh of an island, and all that is cut on it, is searched for on the devices of each kind by
itself, for the whole batch: what one island would run alone. Its microbatches are then shared out,
with smaller ones too where these share out better. The plan of the shortest step is taken; where
devices of one kind are faster alone, that is the plan, and the answer says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from costmodels.capacity import capacity
from costmodels.hardware.units import show_time
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.graph.findings import Finding
from planner.machine.mesh_choices import divisors, pinned_mesh
from planner.machine.topology import Mesh, Topology, for_devices
from planner.pricing import islands, step_time
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.search.request import Candidate, Progress, Request, SearchResult
from planner.search.search import Search
from planner.sharding.layout import ISLAND
from planner.space.techniques import Techniques
from planner.support.text import percent
from planner.workload.model import Model

FINER = 8
"""Microbatches are shared out in up to so many times the number that an island alone would run."""
FINER_TRIED = 3
"""For so many finer numbers the island's plan is searched again, with these pinned."""
EVEN = "even_shares"
WORTH_A_WORD = 0.02
"""Part by which another batch gets more samples a second, from which on it is named."""


@dataclass(frozen=True)
class _Shared:
    """A plan in unequal shares, and the search of an island that its mesh is from, with its
    request."""

    best: Candidate
    base: GraphFacts
    result: SearchResult
    island: Request
    seconds: tuple[tuple[float, float], ...]
    """Of each island: of a step beside its microbatches, and of each of them."""


def searched(
    model: Model, request: Request, progress: Progress | None = None
) -> tuple[Request, SearchResult]:
    """The best plan for a machine, and the request that it answers: of fewer devices where those of
    several kinds are slower together than one kind alone."""
    even = Search(model, request, progress).run()
    if not request.topology.groups:
        return request, even
    why_not = unfit(model, request)
    if why_not or even.stopped:
        return request, replace(even, findings=(*even.findings, *_refused(why_not)))
    shared = _best_shares(model, request)
    alone = _best_alone(model, request)
    step_s = {
        "even": _step_s(even.best),
        "islands": _step_s(shared.best if shared else None),
        "alone": _step_s(alone[1].best if alone else None),
    }
    best = min(step_s, key=lambda way: step_s[way])
    finding = Finding("devices", _told(request, step_s, best, alone))
    quiet = replace(request, topology=replace(request.topology, notes=()))
    if best == "alone" and alone is not None:
        return alone[0], replace(alone[1], findings=(*alone[1].findings, finding))
    if best == "islands" and shared is not None:
        others = {**even.baselines, **({EVEN: even.best} if even.best else {})}
        return quiet, replace(
            shared.result,
            best=shared.best,
            base=shared.base,
            baselines=others,
            bound_s=0.0,
            bound_of_all_s=0.0,
            covers=(),
            tried=even.tried + shared.result.tried,
            findings=(finding, *_better_batch(model, shared)),
        )
    return quiet, replace(even, findings=(*even.findings, finding))


def unfit(model: Model, request: Request) -> str:
    """Why no unequal shares are planned, "" where they are."""
    pins = request.pins
    technique = next(
        (t for t in ("copies", "offload", "schedule", "virtual") if t in pins.techniques), ""
    )
    reasons = {
        "of inference": model.workload.kind != "train",
        "under a pinned mesh": bool(pins.mesh),
        "under pinned splits": bool(pins.nodes),
        f"with {technique} pinned": bool(technique),
        f"under --mode {request.mode}": request.mode != "auto",
        f"under --objective {request.objective}": request.objective != "step",
        f"under --runtime {request.runtime.name}": request.runtime.name != "jax-shard_map",
        "with tables on hosts": model.workload.tables != "device",
        "in groups that no equal islands of one kind make up": not _island_levels(request.topology),
    }
    return next((why for why, there in reasons.items() if there), "")


def _refused(why_not: str) -> tuple[Finding, ...]:
    return (Finding("devices", f"unequal shares are not planned {why_not}"),) if why_not else ()


def _told(
    request: Request,
    step_s: dict[str, float],
    best: str,
    alone: tuple[Request, SearchResult] | None,
) -> str:
    """The three ways beside each other."""
    how = {
        "islands": "in shares by speed",
        "even": "in equal shares",
        "alone": f"{alone[0].topology.devices} x {alone[0].topology.device.name} alone"
        if alone
        else "one kind alone",
    }
    times = {w: show_time(s) if s < float("inf") else "no plan" for w, s in step_s.items()}
    others = ", ".join(f"{how[w]} {times[w]}" for w in how if w != best)
    rest = "; the others are left out: together they take longer" if best == "alone" else ""
    return f"{how[best]} {times[best]} a step, {others}{rest}"


def _better_batch(model: Model, shared: _Shared) -> tuple[Finding, ...]:
    """The batch near the one asked for that is shared out better in microbatches of the same size,
    where it is worth a word."""
    chosen = shared.best.plan.microbatches
    rows = model.batch // chosen

    def samples_per_s(microbatches: int) -> float:
        island_microbatches = shares_by_speed(shared.seconds, microbatches)
        ends = (
            f + n * each_s
            for (f, each_s), n in zip(shared.seconds, island_microbatches, strict=True)
        )
        return microbatches * rows / max(ends)

    nearby = range(max(len(shared.seconds), chosen // 2), 2 * chosen + 1)
    best = max(nearby, key=samples_per_s, default=chosen)
    gain = samples_per_s(best) / samples_per_s(chosen) - 1
    if gain < WORTH_A_WORD:
        return ()
    shares_text = "+".join(map(str, shares_by_speed(shared.seconds, best)))
    return (
        Finding(
            "batch",
            f"--batch {best * rows} is dealt out as {shares_text} microbatches: about"
            f" {percent(gain)} more samples a second",
        ),
    )


def _step_s(best: Candidate | None) -> float:
    return best.cost.step_time_s if best is not None else float("inf")


def _island_levels(topology: Topology) -> tuple[int, ...]:
    """How many of the inner levels islands may be made of, the most first: those that every group
    fills whole."""
    levels, size = [], 1
    for k, level in enumerate(topology.levels[:-1]):
        size *= level.size
        if all(n % size == 0 for _, n in topology.groups):
            levels.append(k + 1)
    return tuple(reversed(levels))


def _best_shares(model: Model, request: Request) -> _Shared | None:
    """The best plan in unequal shares that fits, with room where one does."""
    candidates = [
        shared
        for levels in _island_levels(request.topology)
        for island in _islands_alone(request, levels)
        for shared in _shares_of(model, request, island, _counts(model, request))
    ]
    best = _best(request, candidates)
    if best is None or "microbatches" in request.pins.techniques:
        return best
    # An island's plan is of the microbatches that are best for it alone: with smaller ones another
    # may be better.
    counts, now = divisors(model.batch), best.best.plan.microbatches
    index = counts.index(now)
    for micro in counts[max(index - 1, 0) : index + FINER_TRIED + 1]:
        pins = replace(request.pins, techniques={**request.pins.techniques, "microbatches": micro})
        island = replace(best.island, pins=pins)
        candidates += _shares_of(model, request, island, (micro,))
    return _best(request, candidates)


def _best(request: Request, candidates: Sequence[_Shared]) -> _Shared | None:
    """The fastest that fits with room, else of those that fit."""
    for limit in (request.roomy_bytes, request.limit_bytes):
        fitting = [s for s in candidates if s.best.cost.memory.total <= limit]
        if fitting:
            return min(fitting, key=lambda s: s.best.cost.step_time_s)
    return None


def _islands_alone(request: Request, levels: int) -> Iterator[Request]:
    """The search of one island of so many levels, of each kind of device."""
    for device in dict.fromkeys(d.source for d, _ in request.topology.groups):
        group = next(i for i, (d, _) in enumerate(request.topology.groups) if d.source == device)
        group_machine = request.topology.of_group(group)
        yield replace(
            request,
            topology=Topology(group_machine.device, group_machine.levels[:levels]),
            partitioned=True,  # without stages, overlapped microbatches and offload
            baselines=False,
        )


def _shares_of(
    model: Model, request: Request, island: Request, counts: Sequence[int]
) -> Iterator[_Shared]:
    """The best plan of one island's devices, shared out in several numbers of microbatches: in
    those of `counts` that are no fewer than it has."""
    places = request.topology.devices // island.topology.devices
    try:
        result = Search(model, island).run(how_close=False)
    except PlanError:
        return
    if result.best is None:
        return
    first = max(result.best.plan.microbatches, places + 1)
    for micro in counts:
        if first <= micro <= FINER * first:
            shared = _shared_out(Search(model, island), request, result, places, micro)
            if shared is not None:
                yield shared


def _counts(model: Model, request: Request) -> Sequence[int]:
    """Numbers of microbatches that the batch divides into: as pinned, else all."""
    pinned = request.pins.techniques.get("microbatches")
    return (int(pinned),) if pinned else divisors(model.batch)


def _shared_out(
    search: Search, request: Request, result: SearchResult, places: int, microbatches: int
) -> _Shared | None:
    """The plan of an island's mesh with so many microbatches shared out over all islands; None
    where its splits are not possible on so small ones."""
    alone = result.best
    assert alone is not None
    try:
        base = search.base(microbatches)
        if base is None:
            return None
        mesh = pinned_mesh(request.topology, {ISLAND: places, **dict(alone.plan.mesh)})
        mesh = Mesh(mesh.axes, alone.mesh.group)
        pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)
        in_one_piece = replace(
            alone.plan,
            mesh=mesh.shape,
            microbatches=microbatches,
            islands=(microbatches,),  # until they are shared out
        )
        flow, runs = step_time.derived(base, in_one_piece)
        seconds = _seconds(base, flow, runs, pricer)
        island_microbatches = shares_by_speed(seconds, microbatches)
        if max(island_microbatches) < 2 or not search.confirmed(microbatches):
            return None
        plan = replace(in_one_piece, islands=island_microbatches)
        cost = price_plan(base, plan, pricer)[0]
    except PlanError:
        return None
    best = replace(
        alone,
        label=ISLAND,
        mesh=mesh,
        plan=plan,
        cost=cost,
        techniques=Techniques.of(plan),
        objective_s=cost.step_time_s,
        bound_s=0.0,
        status="feasible",
    )
    return _Shared(best, base, result, search.request, seconds)


def _seconds(
    base: GraphFacts, flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> tuple[tuple[float, float], ...]:
    """(seconds of a step without microbatches, seconds of each) of every island."""
    groups = islands.group_of_each(pricer.topology, dict(flow.plan.mesh)[ISLAND])

    def step_s(group: int, microbatches: int) -> float:
        own_flow, prices = islands.busiest(flow, pricer, group, microbatches)
        return step_time.price(base, own_flow, runs, prices).step_time_s

    lines = {}
    for group in dict.fromkeys(groups):
        two, four = step_s(group, 2), step_s(group, 4)
        each_s = (four - two) / 2
        lines[group] = (two - 2 * each_s, each_s)
    return tuple(lines[group] for group in groups)


def shares_by_speed(seconds: Sequence[tuple[float, float]], microbatches: int) -> tuple[int, ...]:
    """How many microbatches each island runs, at least one, such that the last ends as early as
    possible. seconds: of each island (beside its microbatches, of each of them)."""
    turns = [1] * len(seconds)
    ends = [(fixed + 2 * each_s, i) for i, (fixed, each_s) in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(microbatches - len(seconds)):
        end, i = heapq.heappop(ends)
        turns[i] += 1
        heapq.heappush(ends, (end + seconds[i][1], i))
    return tuple(turns)


def _best_alone(model: Model, request: Request) -> tuple[Request, SearchResult] | None:
    """The fastest plan of one kind of device, the others left out, and its request."""
    topology, plans = request.topology, []
    for device, _ in topology.groups:
        n = sum(k for d, k in topology.groups if d.source == device.source)
        try:
            alone = _only(topology, device.source, n)
            room = capacity(alone.device, n, request.capacity.reserve)
            one = replace(request, topology=alone, capacity=room, baselines=True)
            result: Any = Search(model, one).run(how_close=False)
        except PlanError:
            continue
        if result.best is not None:
            plans.append((one, result))
    return min(plans, key=lambda x: _step_s(x[1].best), default=None)


def _only(topology: Topology, device: str, devices: int) -> Topology:
    """The machine of one kind of device alone: with its own links where they are known, else with
    those of the file as far as they reach."""
    if topology.group_levels:
        return for_devices(device, devices)
    chip = next(d for d, _ in topology.groups if d.source == device)
    k = _island_levels(topology)[0]
    times = devices // prod(level.size for level in topology.levels[:k])
    outer = (replace(topology.levels[k], size=times),) if times > 1 else ()
    return Topology(chip, (*topology.levels[:k], *outer))
