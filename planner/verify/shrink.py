"""A smaller model of the same kind: what runs when the model itself is too large to run.

    repeats   of each repeated block (planner.graph.repeats.find_runs) the first two are kept; what
              read the last repeat reads the second
    extents   the classes of equal extents (planner.verify.extents) whose division saves most are
              divided by a prime, until parameters and activations are within the goals

The operators, their order inside a block and what is shared stay. The batch stays, and every extent
stays divisible by what it shares with `keep` (or, with a plan, every split stays legal and as even
as it was). Stored values are cropped, stored indices also kept inside their tables. A change after
which a node does not fit its operands (planner.reader.draft.shapes) is not made.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from planner.execution.fewer_repeats import fewer_repeats
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor, WeightRef
from planner.graph.repeats import find_runs
from planner.ops import operator_of
from planner.ops.lookup import rule_of
from planner.ops.ties import sliced, split_up
from planner.reader.draft.shapes import ShapeError, infer
from planner.sharding.rule import Limits, Rule, Split, legal
from planner.verify.extents import Extents, window

KEPT_REPEATS = 2
GOAL_PARAMETERS, GOAL_ELEMENTS = 1_000_000, 20_000_000
"""What a shrunk model may have: parameters, and elements of all activations together."""


def shrink(
    graph: Graph,
    limit_parameters: float = 50e6,
    *,
    keep: int = 8,
    plan: Plan | None = None,
    folder: Path | None = None,
) -> Graph:
    """The graph itself when it has at most `limit_parameters`; else a smaller one (module
    docstring), with a note of what changed.

    keep: device count whose divisors of each extent are kept. plan: instead, the plan whose splits
    stay legal. folder: where external data is, for stored integers (positions, index tables); float
    weights stored there are seeded instead. Where nothing more can be divided, the result may be
    above the goals; node ids of what is left are those of the graph.
    """
    if graph.parameters <= limit_parameters:
        return graph
    small, repeats = _with_fewer_repeats(graph)
    extents = Extents(small, 1 if plan else keep)
    now = dict(extents.extent)
    best = small
    stuck: set[tuple[int, ...]] = set()
    while not within_goals(best):
        for together, trial in steps(extents, now, best, stuck):
            smaller = resized(small, extents, trial, folder)
            if smaller is not None and fits(smaller, small, plan):
                now, best = trial, smaller
                break
            stuck.add(together)
        else:
            break
    changed = dict.fromkeys(
        f"{n} to {now[c]}"
        for c, n in sorted(extents.extent.items(), key=lambda e: (-e[1], e[0]))
        if c in now and now[c] != n
    )
    parts = [
        *(f"repeats {r}" for r in repeats),
        *([f"extents {', '.join(changed)}"] if changed else []),
    ]
    note = (
        f"shrunk from {graph.parameters:,} parameters to {best.parameters:,}:"
        f" {'; '.join(parts) or 'nothing could be made smaller'}"
    )
    return replace(
        best, notes=(*graph.notes, note), dims={k: v for k, v in graph.dims.items() if k == "batch"}
    )


def steps(
    extents: Extents, now: dict[int, int], graph: Graph, stuck: set[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], dict[int, int]]]:
    """Possible next steps, the one that saves most first: (classes to divide, extents after it).

    Classes of equal extent that were equal from the start go together where they can: the width of
    queries stays that of values.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for c in extents.classes():
        groups.setdefault((extents.extent[c], now[c]), []).append(c)
    trials, before = [], excess(graph, extents, now)
    for (_, n), members in sorted(groups.items()):
        by = smallest_prime(n)
        for together in [tuple(members), *((c,) for c in members if len(members) > 1)]:
            trial = extents.divide(together, by, now) if together not in stuck else None
            if trial is None:
                stuck.add(together)
                continue
            remaining = excess(graph, extents, trial)
            if remaining < before:
                trials.append((remaining, -len(together), together, trial))
            break
    return [(together, trial) for _, _, together, trial in sorted(trials, key=lambda f: f[:3])]


def excess(graph: Graph, extents: Extents, now: dict[int, int]) -> float:
    """How far above the goals a graph would be: the product of both ratios, each at least 1."""
    size = {
        name: prod(now[extents.of(name, a)] for a in range(len(t.shape)))
        for name, t in graph.tensors.items()
    }
    parameters = sum(size[n] for n in graph.weights)
    return max(1.0, parameters / GOAL_PARAMETERS) * max(
        1.0, (sum(size.values()) - parameters) / GOAL_ELEMENTS
    )


def within_goals(graph: Graph) -> bool:
    """Small enough to run anywhere."""
    elements = sum(t.elements for n, t in graph.tensors.items() if n not in graph.weights)
    return graph.parameters <= GOAL_PARAMETERS and elements <= GOAL_ELEMENTS


def smallest_prime(n: int) -> int:
    """The smallest prime divisor of n >= 2."""
    return next((p for p in range(2, int(n**0.5) + 1) if n % p == 0), n)


def _with_fewer_repeats(graph: Graph) -> tuple[Graph, list[str]]:
    """The graph with at most KEPT_REPEATS of every repeated block, and "32 to 2" per block."""
    runs = [run for run in find_runs(graph) if run[2] > KEPT_REPEATS]
    reductions = [f"{repeats} to {KEPT_REPEATS}" for _, _, repeats in runs]
    return fewer_repeats(graph, runs, KEPT_REPEATS), reductions


def resized(
    graph: Graph, extents: Extents, now: dict[int, int], folder: Path | None = None
) -> Graph | None:
    """The graph with the extents `now`: shapes, Slice bounds, stored values. None when a Slice has
    no bounds."""
    shape = {
        n: tuple(now[extents.of(n, a)] for a in range(len(t.shape)))
        for n, t in graph.tensors.items()
    }
    tensors = {n: Tensor(n, shape[n], t.dtype, t.role) for n, t in graph.tensors.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if operator_of(node.op).ties is sliced:
            source, result = node.inputs[0], node.outputs[0]
            starts, ends = [], []
            for axis, *bounds in zip(
                *(node.attrs[k] for k in ("axes", "starts", "ends", "steps")), strict=True
            ):
                bounds_now = window(
                    tuple(bounds),
                    graph.tensors[source].shape[axis],
                    shape[source][axis],
                    shape[result][axis],
                )
                if bounds_now is None:
                    return None
                starts.append(bounds_now[0])
                ends.append(bounds_now[1])
            node = replace(node, attrs={**node.attrs, "starts": tuple(starts), "ends": tuple(ends)})
        nodes.append(node)
    constants = {n: _stored(n, value, shape, extents) for n, value in graph.constants.items()}
    weights = {n: _reference(n, graph, shape, extents, folder) for n in graph.weights}
    return replace(graph, nodes=tuple(nodes), tensors=tensors, constants=constants, weights=weights)


def _stored(
    name: str, value: np.ndarray, shape: dict[str, tuple[int, ...]], extents: Extents
) -> np.ndarray:
    """Values cropped to the new shape, and indices kept inside what they look up."""
    value = np.ascontiguousarray(value[tuple(slice(0, n) for n in shape[name])])
    for look in extents.lookups:
        if look.leaf == name and value.size:
            where = ... if look.column is None else (..., min(look.column, value.shape[-1] - 1))
            value = value.copy()
            value[where] = np.minimum(value[where], shape[look.table][look.axis] - 1)
    return value


def _reference(
    name: str,
    graph: Graph,
    shape: dict[str, tuple[int, ...]],
    extents: Extents,
    folder: Path | None,
) -> WeightRef:
    ref, tensor = graph.weights[name], graph.tensors[name]
    looked = any(look.leaf == name for look in extents.lookups)
    if ref.kind == "absent" or (ref.kind == "external" and tensor.is_float):
        return ref if shape[name] == tensor.shape else WeightRef("absent")
    if shape[name] == tensor.shape and not looked:
        return ref
    from planner.workload.weights import load_one

    return WeightRef(
        "inline",
        proto=_stored(name, load_one(graph, name, folder, seed_missing=True), shape, extents),
    )


def fits(smaller: Graph, before: Graph, plan: Plan | None) -> bool:
    """Whether every node fits its operands, and every split of the plan is legal and even where it
    was."""

    for node, old in zip(smaller.nodes, before.nodes, strict=True):
        live = [o for o in node.outputs if o]
        types = [
            (smaller.tensors[n].shape, smaller.tensors[n].dtype) if n else None for n in node.inputs
        ]
        shapes = [smaller.tensors[o].shape for o in live]
        try:
            inferred = infer(
                node.op,
                node.attrs,
                types,
                shapes if operator_of(node.op).ties is split_up else shapes[0],
            )
            rule, reason = rule_of(node, smaller)
        except KeyError:
            continue
        except (ShapeError, ValueError):
            return False
        if all(node.outputs[: len(inferred)]) and [s for s, _ in inferred] != shapes:
            return False
        was, reason_before = rule_of(old, before)
        if reason != reason_before or rule.whole != was.whole:
            return False
        split = plan.splits.get(node.id, Split()) if plan else Split()
        if plan and not _still(rule, was, split, dict(plan.mesh)):
            return False
    return True


def _still(rule: Rule, was: Rule, split: Split, mesh: dict[str, int]) -> bool:
    """A split legal before is legal, and cuts evenly what it cut evenly."""
    loose = Limits(waste=0.5)
    if legal(was, split, mesh, loose) and not legal(rule, split, mesh, loose):
        return False
    even = lambda r, f, axes: (  # noqa: E731
        r.sizes.get(f, 1) % int(np.prod([mesh[a] for a in axes], dtype=int)) == 0
    )
    return all(even(rule, f, axes) for f, axes in split.pairs if even(was, f, axes))
