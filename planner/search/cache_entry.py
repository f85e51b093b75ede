"""What a search found, as an entry of the cache and back.

An entry says what was decided, not what it costs: on the way back the graph is read, the winner and
the baselines are priced anew, the winner's problem is built again from the splits that its space
had, and its choice judged (`planner.solvers.problem.evaluate`). Where anything comes out other than
it was, there is nothing to recall. So an entry can leave work out, but not make a plan look better
than it is. Searches that were cut short, or found nothing, are not kept.

Splits are written once each, as a list that rows of numbers point into; a row goes through the
classes of nodes in order. No name of the model is in it: a model that is called otherwise has the
same entry (planner.cache.content_digest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.techniques import COPIES, STRUCTURAL
from planner.machine.topology import Mesh, MeshAxis, Topology
from planner.pricing.pricer import Pricer
from planner.search.bucketing import price_with_buckets
from planner.search.request import Candidate, Covered, SearchResult
from planner.search.stage_cuts import with_cuts
from planner.sharding.layout import Layout
from planner.sharding.rule import Limits, Split, legal
from planner.solvers.problem import evaluate
from planner.space.assemble import PICO, assemble
from planner.space.build import build_space
from planner.space.techniques import Techniques
from planner.space.variables import Space, Variable

if TYPE_CHECKING:
    from planner.search.solving import Solving


class Stale(Exception):
    """An entry that does not hold."""


UNHELD = (Stale, PlanError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading an entry ends in that was edited, or is of another model."""


def kept(result: SearchResult) -> dict[str, Any] | None:
    """The entry of what a search found; None where that is not worth keeping."""
    best, space = result.best, result.space
    if best is None or space is None or result.problem is None or result.stopped:
        return None
    palette: dict[Split, int] = {}

    def row(splits: Any) -> list[int]:
        return [palette.setdefault(s, len(palette)) for s in splits]

    def candidate(c: Candidate, base: GraphFacts) -> dict[str, Any]:
        nodes = base.graph.nodes
        return {
            "label": c.label,
            "mesh": [[a.name, a.parts] for a in c.mesh.axes],
            "group": c.mesh.group,
            "splits": row(c.plan.splits[nodes[i].id] for i in base.times),
            "techniques": asdict(c.techniques),
            "offload": c.plan.offload,
            "copies": c.plan.overlapped_microbatches,
            "exchanges": c.plan.exchanges,
            "blocks": c.plan.blocks,
            "objective_s": c.objective_s,
            "bound_s": c.bound_s,
            "status": c.status,
            "step_time_s": c.cost.step_time_s,
            "memory_bytes": c.cost.memory.total,
        }

    ops = [v for v in space.variables if v.kind == "op"]
    others = [
        _pair(v, k) for v, k in zip(space.variables, result.choice, strict=True) if v.kind != "op"
    ]
    return {
        "best": candidate(best, result.base),
        "baselines": {label: candidate(c, result.base) for label, c in result.baselines.items()},
        "space": [row(v.splits) for v in ops],
        "layouts": others,
        "offload": space.pricer.offload,
        "cost": evaluate(result.problem, result.choice).cost,
        "bound_s": result.bound_s,
        "bound_bytes": result.bound_bytes,
        "bound_of_all_s": result.bound_of_all_s,
        "covers": [c.to_json() for c in result.covers],
        "tried": result.tried,
        "palette": [s.pairs for s in palette],
    }


def recalled(search: Solving, entry: Any) -> SearchResult | None:
    """What the search would find, from an entry; None where it does not hold."""
    try:
        return _recalled(search, entry)
    except UNHELD:
        return None


def _recalled(search: Solving, entry: Mapping[str, Any]) -> SearchResult:
    palette = _palette(entry)
    best = _candidate(search, entry["best"], palette)
    baselines = {
        _text(label): _candidate(search, row, palette) for label, row in entry["baselines"].items()
    }
    base = search.base(best.plan.microbatches)
    if (
        base is None
        or not search.confirmed(best.plan.microbatches)
        or best.cost.memory.total > search.request.limit_bytes
    ):
        raise Stale
    space = _space(search, base, best, entry, palette)
    choice = _choice(space, best, entry["layouts"])
    problem = assemble(space, best.techniques, search.request.limit_bytes)
    bound, tried, of = _number(entry["bound_s"]), entry["tried"], entry["bound_bytes"]
    if (
        evaluate(problem, choice).cost != entry["cost"]
        or abs(entry["cost"] / PICO - best.objective_s) > 1e-6 * best.objective_s
    ):
        raise Stale
    if (
        not 0 <= bound <= best.cost.step_time_s * (1 + 1e-6)
        or not isinstance(tried, int)
        or tried < 1
        or not (of is None or type(of) is int)
    ):
        raise Stale
    covers = tuple(map(Covered.from_json, entry["covers"]))
    return SearchResult(
        best,
        baselines,
        base.untied,
        space,
        choice,
        problem,
        bound,
        tried,
        bound_bytes=of,
        bound_of_all_s=_number(entry["bound_of_all_s"]),
        covers=covers,
    )


@dataclass(frozen=True)
class Decided:
    """What an entry's plan decided for each class of nodes, in their order, and in what
    circumstances. offload: what its search had in the host's memory."""

    mesh: Mesh
    splits: tuple[Split, ...]
    offload: tuple[str, ...]
    copies: int
    step_time_s: float


def decided(entry: Any, topology: Topology, classes: int) -> Decided | None:
    """The decisions of an entry, of so many classes; None where it does not hold."""
    try:
        mesh = _mesh(entry["best"], topology)
        palette = _palette(entry)
        splits = tuple([palette[k] for k in entry["best"]["splits"]])
        offload, copies, step = (
            tuple(map(_text, entry["offload"])),
            int(entry["best"]["copies"]),
            _number(entry["best"]["step_time_s"]),
        )
    except UNHELD:
        return None
    axes = {a.name for a in mesh.inner}
    return (
        Decided(mesh, splits, offload, copies, step)
        if len(splits) == classes and all(s.used <= axes for s in splits)
        else None
    )


def _palette(entry: Mapping[str, Any]) -> tuple[Split, ...]:
    return tuple(
        Split.of({_text(f): [_text(a) for a in axes] for f, axes in pairs})
        for pairs in entry["palette"]
    )


def _mesh(row: Mapping[str, Any], topology: Topology) -> Mesh:
    """The mesh of a plan. Raises Stale where it is none of the machine."""
    mesh = Mesh(
        tuple(
            MeshAxis(_text(name), tuple((int(at), int(n)) for at, n in parts))
            for name, parts in row["mesh"]
        ),
        tuple(map(_text, row["group"])),
    )
    if not _lies_on(mesh, topology):
        raise Stale
    return mesh


def _candidate(search: Solving, row: Mapping[str, Any], palette: tuple[Split, ...]) -> Candidate:
    """A candidate priced anew. Raises Stale where it is not possible, or no longer at its price."""
    request, t = search.request, _techniques(row["techniques"])
    mesh = _mesh(row, request.topology)
    tied = search.base(t.microbatches)
    if tied is None:
        raise Stale
    base = tied.untied
    if (
        row["copies"] not in COPIES
        or t.microbatches % row["copies"]
        or (row["copies"] > 1 and mesh.stages > 1)
    ):
        raise Stale
    inner, limits = dict(Mesh(mesh.inner).shape), Limits(spatial=True)
    splits = dict(zip(base.times, (palette[k] for k in row["splits"]), strict=True))
    if not all(legal(base.rules[i], s, inner, limits) for i, s in splits.items()):
        raise Stale
    plan = t.plan(
        mesh,
        {node.id: splits[base.shared[i]] for i, node in enumerate(base.graph.nodes)},
        base.runs,
        offload=tuple(map(_text, row["offload"])),
        overlapped_microbatches=row["copies"],
        exchanges=_text(row["exchanges"]),
        blocks=_text(row["blocks"]),
    )
    pricer = Pricer(
        request.topology, mesh, request.runtime, request.recipe, offload=request.offload
    )
    plan, cost = price_with_buckets(
        base,
        with_cuts(base, plan, pricer, (request.limit_bytes, request.roomy_bytes), request.widths),
        pricer,
        request.bucket,
    )
    if (
        cost.step_time_s != row["step_time_s"]
        or cost.memory.total != row["memory_bytes"]
        or row["status"] not in ("optimal", "feasible")
    ):
        raise Stale
    return Candidate(
        _text(row["label"]),
        mesh,
        plan,
        cost,
        t,
        _number(row["objective_s"]),
        _number(row["bound_s"]),
        row["status"],
    )


def _techniques(row: Mapping[str, Any]) -> Techniques:
    """Those of a row. Raises Stale for values that are not possible."""
    if any(type(row[t.field]) is not type(t.neutral) or t.wrong(row[t.field]) for t in STRUCTURAL):
        raise Stale
    return Techniques(**row)


def _lies_on(mesh: Mesh, topology: Topology) -> bool:
    """Whether the axes of a mesh, of different names, take every level of a machine whole."""
    parts, names = [part for a in mesh.axes for part in a.parts], [a.name for a in mesh.axes]
    sizes = [prod(n for at, n in parts if at == i) for i in range(len(topology.levels))]
    return (
        len(set(names)) == len(names)
        and all(0 <= at < len(sizes) and n > 0 for at, n in parts)
        and sizes == [x.size for x in topology.levels]
        and {*mesh.group} <= {a.name for a in mesh.inner}
    )


def _space(
    search: Solving,
    base: GraphFacts,
    best: Candidate,
    entry: Mapping[str, Any],
    palette: tuple[Split, ...],
) -> Space:
    """The winner's space, of the splits that it had."""
    allowed = {
        i: tuple(palette[k] for k in row) for i, row in zip(base.times, entry["space"], strict=True)
    }
    pricer = replace(
        search.space_pricer(best.mesh), offload=tuple(map(_text, entry["offload"])), memo={}
    )
    inner, limits = dict(Mesh(best.mesh.inner).shape), Limits(spatial=True)
    if not all(
        splits and all(legal(base.rules[i], s, inner, limits) for s in splits)
        for i, splits in allowed.items()
    ):
        raise Stale
    return build_space(
        base,
        pricer,
        limits=limits,
        allowed=allowed,
        zero_axes=best.mesh.zero_axes,
        parts=best.plan.microbatches,
    )


def _choice(space: Space, best: Candidate, layouts: Sequence[Any]) -> tuple[int, ...]:
    """Where every variable's decision is among its options. layouts: of shared tensors, in the
    order of the variables."""
    nodes, others = space.base.graph.nodes, [v for v in space.variables if v.kind != "op"]
    at = {
        v.name: [_pair(v, k) for k in range(len(v.layouts))].index(pair)
        for v, pair in zip(others, layouts, strict=True)
    }
    return tuple(
        v.splits.index(best.plan.splits[nodes[v.node].id]) if v.kind == "op" else at[v.name]
        for v in space.variables
    )


def _pair(v: Variable, k: int) -> list[Any]:
    """A shared tensor's layout and the branch made from it, as JSON has them."""
    return [_layout(layout) for layout in v.layouts[k]]


def _layout(layout: Layout | None) -> Any:
    return None if layout is None else _lists((layout.dims, layout.partial, layout.grad_partial))


def _lists(value: Any) -> Any:
    return [_lists(x) for x in value] if isinstance(value, tuple | list) else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Stale
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise Stale
    return value
