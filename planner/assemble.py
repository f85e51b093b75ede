"""From a space and a choice of techniques to the one problem every solver sees, and back to splits.

    cost[option]  = times * (microbatches * (forward + backward + recomputed forward + reduction each microbatch) + reduction once)   in picoseconds
    usage[option] = state bytes + kept activations                                                                                     in bytes
Everything that is kept is alive at the end of the last forward pass, so one live interval holds it all; what only lives inside one operator is
reserved apart (planner.memory). Under recompute a repeated block keeps only what is handed from block to block, and one block's activations at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.problem import FORBIDDEN, Problem
from planner.rule import Split
from planner.space import Space

PICO = 1e12


@dataclass(frozen=True)
class Techniques:
    """Structural choices around one solve. recompute: none | block | block-keep (collective results kept)."""

    zero: int = 0
    recompute: str = "none"
    microbatches: int = 1


def assemble(space: Space, techniques: Techniques, limit_bytes: float | None) -> Problem:
    """The problem in integers: picoseconds and bytes; impossible conversions are FORBIDDEN."""
    inside = _inside_runs(space)
    micro, recompute = techniques.microbatches, techniques.recompute
    cost, usage = [], []
    for v in space.variables:
        again = np.zeros(v.count and len(v.forward_s))
        repeated = v.kind == "op" and v.node in inside
        if repeated and recompute != "none":
            again = v.forward_s - (v.replay_s if recompute == "block-keep" else 0)
        each = v.forward_s + v.backward_s + again + v.each_s[techniques.zero]
        seconds = v.count * (micro * each + v.reduce_s[techniques.zero])
        kept = v.kept_bytes * (1 if repeated and recompute != "none" else v.count)
        cost.append(_whole(seconds * PICO))
        usage.append(_whole(v.count * v.state_bytes[techniques.zero] + kept))
    edges: list[tuple[int, int]] = []
    tables: list[np.ndarray] = []
    table_of: list[int] = []
    index: dict[tuple, int] = {}
    for link in space.links:
        a, b = space.variables[link.a], space.variables[link.b]
        twice = recompute == "block" and a.node in inside and b.node in inside and a.kind == b.kind == "op"
        key = (id(link.forward_s), id(link.backward_s), link.count, twice)
        if key not in index:
            index[key] = len(tables)
            tables.append(_whole(PICO * micro * link.count * (link.forward_s * (2 if twice else 1) + link.backward_s)))
        edges.append((link.a, link.b))
        table_of.append(index[key])
    n = len(cost)
    return Problem(
        cost=tuple(cost), edges=np.array(edges, np.int64).reshape(-1, 2), edge_table=np.array(table_of, np.int64), tables=tuple(tables),
        live_node=np.arange(n), live_span=np.tile(np.array([[0, 1]]), (n, 1)), live_usage=tuple(usage),
        usage_limit=None if limit_bytes is None else int(limit_bytes), names=tuple(v.name for v in space.variables),
        axis_choice=axis_choices(space), axis_size=tuple(space.pricer.sizes.values()), weight=np.array([v.flops for v in space.variables]),
    )  # fmt: skip


def _whole(values: np.ndarray) -> np.ndarray:
    finite = np.where(np.isfinite(values), values, 0)
    return np.where(np.isfinite(values), np.rint(finite), FORBIDDEN).astype(np.int64)


def _inside_runs(space: Space) -> frozenset[int]:
    return frozenset(i for first, period, _ in space.base.runs for i in range(first, first + period))


def axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """`_axis_choices`, kept with the space."""
    if "axes" not in space.memo:
        space.memo["axes"] = _axis_choices(space)
    found: tuple[np.ndarray, ...] = space.memo["axes"]
    return found


def _axis_choices(space: Space) -> tuple[np.ndarray, ...]:
    """Per variable [options, axes] which factor (a small integer) each mesh axis cuts, -1 for none: what `recursive` decides level by level."""
    axes = tuple(space.pricer.sizes)
    out = []
    for v in space.variables:
        rows = []
        if v.kind == "op":
            names = {f: k for k, f in enumerate((*space.base.rules[v.node].factors, "+"))}
            for s in v.splits:
                of = {a: names[f] for f, used in s.pairs for a in used}
                rows.append([of.get(a, -1) for a in axes])
        else:
            for hub, branch in v.layouts:
                row = []
                for a in axes:
                    kind, d = hub.state(a)
                    code = d if kind == "sharded" else {"partial": 100, "fan": 101, "replicated": -1}[kind]
                    row.append(code + (200 if branch is not None and a in branch.fan else 0))
                rows.append(row)
        out.append(np.array(rows, np.int64).reshape(len(rows), len(axes)))
    return tuple(out)


def splits_of(space: Space, choice: tuple[int, ...]) -> dict[str, Split]:
    """node id -> split, for every node (repeats take their class's)."""
    base = space.base
    return {node.id: space.variables[space.op_of[base.shared[i]]].splits[choice[space.op_of[base.shared[i]]]] for i, node in enumerate(base.graph.nodes)}
