"""A saved strategy priced again: on a model as it is now, with today's figures, and the best plan
beside it.

reprice   the recorded decisions on a graph, carried over by node id; nodes of further repeats of a
block follow their block
replan    the search that the strategy answers, once more: its workload, machine, memory limit,
pins, mode and objective
manual    a strategy edited by hand: every decision checked, then priced and written as any other
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from costmodels.capacity import capacity
from costmodels.hardware.units import show_bytes
from costmodels.precision import load_recipe, recipe_names
from costmodels.runtimes import load_runtime, runtime_names
from planner.analysis.facts import GraphFacts
from planner.cache.folder import Cache
from planner.errors import NO_PLAN, PlanError, did_you_mean
from planner.execution.layout_flow import Flow
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import Mesh, Topology, for_devices, from_json
from planner.pins.launcher_space import SPACES, choose_launcher, within
from planner.pins.pins import Pins
from planner.pricing.cost import Cost
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.search.bucketing import runtime_of_buckets
from planner.search.request import Candidate, Request, SearchResult
from planner.search.search import Search
from planner.sharding.rule import Split
from planner.space.techniques import Techniques
from planner.strategy.pins import pins_of
from planner.strategy.reopen import reopen
from planner.strategy.strategy import Strategy
from planner.strategy.validate import check_mesh, check_splits
from planner.support.choices import choose
from planner.whatif.no_plan import no_plan
from planner.workload.model import Model

UNREAD = frozenset({"P070", "P071", "P072", "P101", "P102", "P103", "P104", "P105"})
"""Errors of a file, or of a name of the zoo, that is no model at all."""


@dataclass(frozen=True)
class Priced:
    """The decisions of a strategy on a model, and their price. cost: of the whole plan; table: the
    same as the file's `cost`."""

    strategy: Strategy
    model: Model
    request: Request
    base: GraphFacts
    plan: Plan
    mesh: Mesh
    flow: Flow
    runs: tuple[Any, ...]
    cost: Cost
    pricer: Pricer

    @property
    def table(self) -> dict[str, Any]:
        """The price as in a strategy file."""
        from planner.pricing.host_memory import offloaded_bytes
        from planner.search.cost_table import cost_table

        offloaded = offloaded_bytes(self.base, self.flow, self.pricer, self.runs)
        return cost_table(self.cost, self.request, self.base, self.model, self.plan, offloaded)


def machine_now(strategy: Strategy) -> tuple[Topology, str]:
    """The recorded machine with today's figures where it is a shipped one of the same shape, else
    as recorded; and what changed, "" if nothing."""
    recorded = from_json(strategy.topology)
    if recorded.groups:
        return recorded, ""
    try:
        now = for_devices(recorded.device.source, recorded.devices)
    except PlanError:
        return recorded, ""
    same = [(x.name, x.size, x.kind) for x in now.levels] == [
        (x.name, x.size, x.kind) for x in recorded.levels
    ]
    if not same:
        return recorded, ""
    # Files keep six significant digits.
    pairs = [
        p
        for x, y in zip(now.levels, recorded.levels, strict=True)
        for p in zip(astuple(x), astuple(y), strict=True)
    ]
    if all(a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-5)) for a, b in pairs):
        return now, ""
    return now, "figures of the links of " + recorded.device.name


def request_of(strategy: Strategy, topology: Topology) -> Request:
    """The request a strategy answers: its recipe, runtime, solver and memory limit, on a
    machine."""
    from planner.solvers import SOLVERS

    w, training = strategy.workload, strategy.workload.get("training") or {}
    choose("precision", w["precision"], recipe_names())
    choose("runtime", w["runtime"], runtime_names())
    room = capacity(topology.device, topology.devices)
    # The recorded limit says what the user kept free.
    room = replace(
        room, reserve=room.reserve + room.usable - int(strategy.costs["memory_limit_bytes"])
    )
    solver = strategy.solver["name"] if strategy.solver["name"] in SOLVERS else "auto"
    return Request(
        topology,
        room,
        load_recipe(w["precision"], training.get("optimizer", "adamw"), w["kind"] == "train"),
        load_runtime(w["runtime"]),
        solver,
    )


def open_recorded(strategy: Strategy, source: str | Path) -> Model:
    """The model under the strategy's workload."""

    model = reopen(strategy, source)
    assert isinstance(model, Model)
    return model


def own_model(strategy: Strategy, source: str | Path) -> Model:
    """The model under the strategy's workload. Raises PlanError P051 where it is another one, or
    has changed."""
    model_name, source_name = (
        str(strategy.model["name"]),
        (str(source) if str(source).startswith("zoo:") else Path(source).name),
    )
    another = f"{source} is another model: this strategy was made for {model_name!r}"
    try:
        model = open_recorded(strategy, source)
        if model.sha256() == strategy.model["sha256"]:
            return model
    except PlanError as e:
        if model_name == source_name or e.code in UNREAD:
            raise
        raise PlanError(
            "P051",
            another,
            detail=[e.what],
            help=[f"--model with the file of {model_name!r}, or plan {source}"],
        ) from e
    if model_name == source_name:
        raise PlanError(
            "P051",
            f"{source} is not the model this strategy was made for (its graph has changed)",
            help=["plan again, or plan check to see what changed"],
        )
    raise PlanError(
        "P051",
        another,
        help=[
            f"--model with the file of {model_name!r}, plan check to see what differs, or plan"
            f" {source}"
        ],
    )


def plan_on(strategy: Strategy, base: GraphFacts) -> Plan:
    """The recorded decisions on a graph. Nodes without one of their own follow their block;
    PlanError P051 when one has none at all."""
    splits, lost = {}, []
    for i, node in enumerate(base.graph.nodes):
        row = strategy.nodes.get(node.id) or strategy.nodes.get(base.graph.nodes[base.shared[i]].id)
        if row is None:
            lost.append(node.id)
        else:
            splits[node.id] = Split.of({f: tuple(a) for f, a in row["split"].items()})
    if lost:
        raise PlanError(
            "P051",
            f"the strategy says nothing of {len(lost)} of {len(base.graph.nodes)} nodes: it was"
            " made for another graph",
            detail=[f"first: {lost[0]}"],
            help=[h for h in (did_you_mean(lost[0], list(strategy.nodes)), "plan again") if h],
        )
    return strategy.plan_with(base.graph, splits, base.runs if strategy.blocks else ())


def reprice(strategy: Strategy, model: Model, topology: Topology) -> Priced:
    """Price the recorded decisions. Raises PlanError: P051 another graph, P06x a decision that is
    not possible."""
    check_mesh(strategy, topology.devices)
    request = request_of(strategy, topology)
    base = GraphFacts.of(
        model.graph(int(strategy.techniques["microbatches"])),
        training=model.workload.kind == "train",
        cut_anywhere="cuts" in strategy.techniques,
    )
    mesh = pinned_mesh(topology, dict(strategy.mesh_shape))
    pricer = Pricer(topology, mesh, request.runtime, request.recipe)
    plan = plan_on(strategy, base)
    check_splits(base.graph, plan, base.rules)
    cost, flow, runs = price_plan(base, plan, pricer)
    return Priced(
        strategy=strategy,
        model=model,
        request=request,
        base=base,
        plan=plan,
        mesh=mesh,
        flow=flow,
        runs=runs,
        cost=cost,
        pricer=pricer,
    )


def recorded_request(strategy: Strategy, topology: Topology, pins: Pins | None = None) -> Request:
    """The request of the search that a strategy answers, with its mode and objective. pins: instead
    of those that it was searched under.

    Raises PlanError P020 for pins that cannot be read, P024 for some that no program follows.
    """
    from planner.search.build_request import refuse_pins

    pins = pins_of(strategy) if pins is None else pins
    workload, runtime, provenance = (
        str(strategy.workload["kind"]),
        str(strategy.workload["runtime"]),
        strategy.provenance,
    )
    if launcher := str(provenance.get("launcher", "")):
        choose_launcher("for", launcher, tuple(SPACES))
        pins = within(SPACES[launcher], pins, topology, workload)
    refuse_pins(pins, topology.device, workload, runtime)
    request = request_of(strategy, topology)
    return replace(
        request,
        pins=pins,
        launcher=SPACES.get(launcher),
        mode=str(provenance.get("mode", "auto")),
        objective=str(provenance.get("objective", "step")),
        offload=pins.techniques.get("offload", ()),
        runtime=runtime_of_buckets(request.runtime, pins.techniques.get("bucket", 0)),
    )


def replan(
    strategy: Strategy, model: Model, topology: Topology, cache: Cache | None = None
) -> Strategy:
    """The best plan for the model now, as the strategy was asked for. cache: where it may be
    recalled from.

    Raises PlanError: exit 3 when nothing fits, P023 or P025 for pins that it has no place for.
    """
    return best_plan(model, replace(recorded_request(strategy, topology), cache=cache))


def unpinned(
    strategy: Strategy, model: Model, topology: Topology, cache: Cache | None = None
) -> Strategy:
    """The best plan were the user to decide nothing: no pins, mode "auto". Raises PlanError (exit
    3) when nothing fits."""
    return best_plan(
        model,
        replace(
            recorded_request(strategy, topology, Pins()), mode="auto", baselines=False, cache=cache
        ),
    )


def best_plan(model: Model, request: Request) -> Strategy:
    """The best plan of a request. Raises PlanError (exit 3) when nothing fits; an interruption is
    handed on."""
    from planner.search.to_strategy import compose
    from planner.whatif.islands import searched

    request, result = searched(model, request)
    if result.stopped:
        raise KeyboardInterrupt
    if result.best is None:
        raise no_plan(request, result)
    return compose(model, request, result, {}, ())


def manual(strategy: Strategy, source: str | Path) -> Strategy:
    """A hand-edited strategy, checked and priced. Raises PlanError: another model, a decision that
    is not possible, or exit 3 when it does not fit."""
    from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION, compose

    started = time.monotonic()
    model = own_model(strategy, source)
    priced = reprice(strategy, model, from_json(strategy.topology))
    known = {n.id for n in priced.base.graph.nodes}
    strange = [n for n in strategy.nodes if n not in known]
    if strange:
        suggestion = did_you_mean(strange[0], sorted(known))
        raise PlanError(
            "P062",
            f"the strategy decides about {strange[0]!r}, which the model has not",
            help=[suggestion] if suggestion else [],
        )
    c, limit = priced.cost, priced.request.limit_bytes
    if c.memory.total > limit:
        raise PlanError(
            "P021",
            f"this plan does not fit: {show_bytes(c.memory.total)} a device, {show_bytes(limit)}"
            " usable",
            exit_code=NO_PLAN,
            help=[
                "a higher zero_stage, recompute or more microbatches in the strategy file, or plan"
                " without --mode manual"
            ],
        )
    best = Candidate(
        label="manual",
        mesh=priced.mesh,
        plan=priced.plan,
        cost=c,
        techniques=Techniques.of(priced.plan),
        objective_s=c.step_time_s,
    )
    baselines = Search(model, priced.request).tuned_baselines() if strategy.baselines else {}
    result = SearchResult(
        best=best,
        baselines=baselines,
        base=priced.base,
        space=None,
        choice=(),
        problem=None,
        bound_s=0.0,
        tried=1,
    )
    provenance: Mapping[str, Any] = {
        "tool": TOOL_VERSION,
        "cost_model": COST_MODEL_VERSION,
        "source": str(source),
        "search_s": round(time.monotonic() - started, 3),
    }
    composed = compose(model, priced.request, result, provenance, tuple(strategy.assumptions))
    return replace(
        composed, solver={**composed.solver, "name": "manual", "bound_s": None, "gap": None}
    )
