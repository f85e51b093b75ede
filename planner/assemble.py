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
from planner.space import Space, Variable

PICO = 1e12


@dataclass(frozen=True)
class Techniques:
    """Structural choices around one solve. recompute: none | block | block-keep (collective results kept)."""

    zero: int = 0
    recompute: str = "none"
    microbatches: int = 1


def assemble(space: Space, techniques: Techniques, limit_bytes: float | None, *, uncut: bool = False, unit_s: float = 1 / PICO) -> Problem:
    """The problem in integers: `unit_s` (picoseconds) and bytes; impossible conversions are FORBIDDEN.

    uncut: the space is that of the whole batch although there are several microbatches. A microbatch takes at least its share of the whole batch's
    time and of the activations kept (kernels and collectives lose efficiency as they shrink, padding grows), so this problem's optimum is a lower
    bound of the real one's.
    """
    inside = _inside_runs(space)
    micro, recompute = techniques.microbatches, techniques.recompute
    share = 1 if uncut else micro
    cost, usage = [], []
    for v in space.variables:
        repeated = v.kind == "op" and v.node in inside
        each = v.forward_s + v.backward_s
        if repeated and recompute != "none":
            each = each + v.forward_s - (v.replay_s if recompute == "block-keep" else 0)
        seconds = v.count * (share * each + micro * v.each_s[techniques.zero] + v.reduce_s[techniques.zero])
        if uncut:
            seconds = np.where(v.pieces < micro, np.inf, seconds)
        cost.append(_whole(seconds / unit_s))
        usage.append(np.rint(_usage(v, techniques, uncut)).astype(np.int64))
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
            tables.append(_whole(share * link.count / unit_s * (link.forward_s * (2 if twice else 1) + link.backward_s)))
        edges.append((link.a, link.b))
        table_of.append(index[key])
    n = len(cost)
    return Problem(
        cost=tuple(cost), edges=np.array(edges, np.int64).reshape(-1, 2), edge_table=np.array(table_of, np.int64), tables=tuple(tables),
        live_node=np.arange(n), live_span=np.tile(np.array([[0, 1]]), (n, 1)), live_usage=tuple(usage),
        usage_limit=None if limit_bytes is None else int(limit_bytes), names=tuple(v.name for v in space.variables),
        axis_choice=axis_choices(space), axis_size=tuple(space.pricer.sizes.values()), weight=np.array([v.flops for v in space.variables]),
    )  # fmt: skip


def least_usage(space: Space, techniques: Techniques, uncut: bool = False) -> float:
    """Bytes that every plan of the space needs at least: each decision at its smallest, and the largest of the operators' smallest working sets.

    uncut: as in `assemble`.
    """
    flat = _flat(space)
    pieces = techniques.microbatches if uncut else 1
    kept = flat.again if techniques.recompute != "none" else flat.kept
    bytes_ = flat.state[techniques.zero] + kept / pieces
    if uncut:
        bytes_ = np.where(flat.pieces < pieces, np.inf, bytes_)
    return flat.working / pieces + float(np.minimum.reduceat(bytes_, flat.first).sum())


@dataclass(frozen=True)
class _Flat:
    """Usage of all variables' options in a row. [options]"""

    first: np.ndarray  # [variables] first option of each
    state: dict[int, np.ndarray]  # level -> bytes of state
    kept: np.ndarray  # kept activations
    again: np.ndarray  # the same under recomputation
    pieces: np.ndarray  # the most microbatches
    working: float  # the largest of the operators' smallest working sets, gradients included


def _flat(space: Space) -> _Flat:
    if "flat" not in space.memo:
        every = space.variables
        sizes = np.array([len(v.kept_bytes) for v in every])
        count = np.repeat([v.count for v in every], sizes)
        working = max((float(v.work_bytes.min()) for v in every if v.kind == "op"), default=0.0) * _working_times(space)
        state = {z: count * np.concatenate([v.state_bytes[z] for v in every]) for z in every[0].state_bytes}
        space.memo["flat"] = _Flat(np.concatenate([[0], np.cumsum(sizes)[:-1]]), state, np.concatenate([v.kept_bytes for v in every]),
                                   np.concatenate([v.again_bytes for v in every]), np.concatenate([v.pieces for v in every]), working)  # fmt: skip
    found: _Flat = space.memo["flat"]
    return found


def _working_times(space: Space) -> float:
    """An operator's working set counts with its gradients and the allowance for fragmentation."""
    return (2 if space.base.training else 1) * (1 + space.pricer.runtime.memory_slack)


def usage_of(space: Space, techniques: Techniques, choice: tuple[int, ...], uncut: bool = False) -> tuple[float, float]:
    """(state and kept activations, largest working set of an operator) of a choice, in bytes, as in `assemble`."""
    every = list(zip(space.variables, choice, strict=True))
    working = max((float(v.work_bytes[k]) for v, k in every), default=0.0) * _working_times(space)
    return sum(float(_usage(v, techniques, uncut)[k]) for v, k in every), working / (techniques.microbatches if uncut else 1)


def _usage(v: Variable, techniques: Techniques, uncut: bool) -> np.ndarray:
    """Bytes of state and kept activations of a variable's nodes, per option."""
    kept = v.again_bytes if techniques.recompute != "none" else v.kept_bytes
    bytes_: np.ndarray = v.count * v.state_bytes[techniques.zero] + kept / (techniques.microbatches if uncut else 1)
    return bytes_


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
