"""Which tensors of a checkpoint are a graph's parameters, and how they lie in it.

A parameter and a tensor belong together by scope: their names are equal once the words that wrap a
whole model (model., transformer., bert.) are left out, or one follows from the other by a rule
below. How it must be turned follows from the slot: the dim that a product sums over is the last one
of a Linear's weight and the first one of GPT-2's Conv1D (`_sums_last`), so square weights are
turned as surely as others. Shapes must then be equal but for dims of one.

    part      a third of GPT-2's c_attn, a half of an experts.gate_up_proj or of Phi-3's own, the
              queries', keys' or values' rows of a qkv_proj, the rows of one of the parts that a
              state space makes of its in_proj
    stack     experts.0.w1.weight, experts.1.w1.weight ... along a new first dim
    tie       one of two names that a model ties; both, where the graph ties them: then their values
              must be equal
    padding   rows of zeros beyond the vocabulary that config.json gives
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planner.graph.ir import Graph
from planner.interop.checkpoints.names import Want, canonical, ties, ways
from planner.interop.checkpoints.store import FLOATS, Shards, Stored
from planner.ops import operator_of

_CONV1D = re.compile(r".*\b(c_attn|c_proj|c_fc|q_attn)\.weight")


@dataclass(frozen=True, slots=True)
class Take:
    """A tensor of the checkpoint, or the part [start, start + size) of its dim `axis`; flip: its
    last two dims change places on the way. heads: 0, or how many have their part in the first dim,
    from `start` of each on."""

    source: str
    axis: int
    start: int
    size: int
    flip: bool
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter by its label, its shape in the graph, and where its values are: several takes are
    stacked along a new first dim.

    rows: how many the checkpoint has of its dim `axis`, where the graph has more.
    """

    label: str
    shape: tuple[int, ...]
    dtype: str
    takes: tuple[Take, ...]
    stacked: bool = False
    axis: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Matching:
    """Which parameter is made of which tensors. from_model: weights (names in the graph) that only
    the model has; missing: labels without a tensor; misfits: what does not fit, a line each; tied:
    tensor -> the tied one that was read in its place; unread: tensors that are no parameter.
    """

    matches: tuple[Match, ...]
    from_model: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: tuple[str, ...]
    tied: Mapping[str, str]
    unread: tuple[str, ...]


def match(graph: Graph, shards: Shards, buffers: Collection[str] = ()) -> Matching:
    """Every parameter of the graph beside the tensors it is made of; both sides in their own order.
    buffers: weights that a checkpoint may lack."""
    known, misfits = dict[str, str](), list[str]()
    for name in shards.tensors:
        if canonical(name) in known:
            misfits.append(
                f"{known[canonical(name)]} and {name} are one name without their wrappers"
            )
        known.setdefault(canonical(name), name)
    plain = any(
        name.endswith("attn.c_attn.weight") and t.shape[1:] == (3 * t.shape[0],)
        for name, t in shards.tensors.items()
    )
    matches, missing, from_model = list[Match](), list[str](), list[str]()
    shapes = {canonical(graph.labels[name]): graph.tensors[name].shape for name in graph.weights}
    for name in graph.weights:
        wants = next(
            (
                w
                for w in ways(canonical(graph.labels[name]), shapes)
                if all(x.name in known for x in w)
            ),
            None,
        )
        if wants is None and name in buffers:
            from_model.append(name)
            continue
        if wants is None:
            missing.append(graph.labels[name])
            continue
        fitted = _fitted(graph, name, [(known[w.name], w) for w in wants], shards, plain)
        if isinstance(fitted, str):
            misfits.append(fitted)
        else:
            matches.append(fitted)
    read = {take.source for m in matches for take in m.takes}
    tied = dict[str, str]()
    for source in sorted(read):
        tied |= {
            known[other]: source
            for other in ties(canonical(source))
            if other in known and known[other] not in read
        }
    misfits += _gaps(matches, shards)
    unread = tuple(n for n in shards.tensors if n not in read and n not in tied)
    return Matching(
        matches=tuple(matches),
        from_model=tuple(from_model),
        missing=tuple(missing),
        misfits=tuple(misfits),
        tied=tied,
        unread=unread,
    )


def _gaps(matches: Sequence[Match], shards: Shards) -> list[str]:
    """A line for each tensor of queries, keys and values whose rows are not all read once."""
    read = dict[str, list[Take]]()
    for m in matches:
        for take in m.takes:
            if any(f".{word}." in take.source for word in ("qkv_proj", "c_attn", "Wqkv")):
                read.setdefault(take.source, []).append(take)
    gaps = []
    for source, takes in read.items():
        rows, whole = sum(take.size for take in takes), shards.tensors[source].shape[takes[0].axis]
        if len(takes) == 3 and rows != whole:
            gaps.append(f"queries, keys and values have {rows} rows, {source} {whole}")
    return gaps


def _fitted(
    graph: Graph, name: str, wants: Sequence[tuple[str, Want]], shards: Shards, plain: bool
) -> Match | str:
    """The match, or in words why it is none. plain: the checkpoint's Conv1D weights are [in,
    out]."""
    shape, label, sums_last = graph.tensors[name].shape, graph.labels[name], _sums_last(graph, name)
    sources = [shards.tensors[source] for source, _ in wants]
    stacked = len(shape) > len(sources[0].shape) and (len(wants) > 1 or shape[0] == 1)
    goal = shape[1:] if stacked else shape
    if (
        len({t.dtype for t in sources}) > 1
        or sources[0].dtype not in FLOATS
        or not graph.tensors[name].is_float
    ):
        return f"{label} is {graph.tensors[name].dtype}, {wants[0][0]} {sources[0].dtype}" + (
            " and other types" if len({t.dtype for t in sources}) > 1 else ""
        )
    takes, rows, axis = list[Take](), 0, max(0, len(goal) - (2 if sums_last else 1))
    for (source, want), t in zip(wants, sources, strict=True):
        turned = plain and _CONV1D.fullmatch(source) is not None
        flip = len(t.shape) > 1 and turned == sums_last
        take = (
            Take(source, want.axis, *want.rows[:2], flip)
            if want.rows
            else _rows_of(source, want, t, goal[0 if sums_last and len(goal) > 1 else -1], flip)
            if want.rows_of and goal
            else _take(source, want, t, turned, flip=flip)
        )
        if want.by_head and t.shape:
            heads = _heads(graph, name)
            take = Take(source, 0, want.part * take.size // heads, take.size, flip, heads)
        taken = _taken_shape(t, take)
        if (
            taken != goal
            and shards.vocabulary
            and len(taken) == len(goal)
            and taken[axis] == shards.vocabulary < goal[axis]
            and not stacked
            and want.parts == 1
        ):
            rows, taken = shards.vocabulary, (*taken[:axis], goal[axis], *taken[axis + 1 :])
        whole = want.rows[2] if want.rows else take.size * want.parts
        cut = bool(want.rows_of) or t.shape[take.axis : take.axis + 1] == (
            (whole,) if t.shape else ()
        )
        if _wide(taken) != _wide(goal) or not cut or take.start < 0:
            part = f", part {want.part + 1} of {want.parts}," if want.parts > 1 else ""
            return f"{label} is {list(goal)}, {source}{part} {list(t.shape)}" + (
                " turned" if take.flip else ""
            )
        takes.append(take)
    return Match(
        label=label,
        shape=shape,
        dtype=sources[0].dtype,
        takes=tuple(takes),
        stacked=stacked,
        axis=axis,
        rows=rows,
    )


def _take(source: str, want: Want, t: Stored, turned: bool, flip: bool) -> Take:
    """Parts are of the outputs: the last dim of a Conv1D, the one before the last of a Linear."""
    axis = max(0, len(t.shape) - (1 if turned else 2))
    size = t.shape[axis] // want.parts if t.shape else 1
    return Take(source, axis, want.part * size, size, flip)


def _heads(graph: Graph, name: str) -> int:
    """Heads that the columns of a product by a weight are parted into, or a bias of it; 1 where
    they are not."""
    rank = 0
    while len(users := graph.consumers.get(name, ())) == 1:
        name = graph.nodes[users[0][0]].outputs[0]
        shape = graph.tensors[name].shape
        if rank and len(shape) > rank:
            return shape[-2]
        rank = len(shape)
    return 1


def _rows_of(source: str, want: Want, t: Stored, rows: int, flip: bool) -> Take:
    """So many rows of a Linear's outputs: the queries' are first, the values' last."""
    axis = max(0, len(t.shape) - 2)
    whole = t.shape[axis] if t.shape else 0
    start = {"q": 0, "k": whole - 2 * rows, "v": whole - rows}[want.rows_of]
    return Take(source, axis, start if rows <= whole else -1, rows, flip)


def _taken_shape(t: Stored, take: Take) -> tuple[int, ...]:
    shape = (*t.shape[: take.axis], take.size, *t.shape[take.axis + 1 :]) if t.shape else ()
    return (*shape[:-2], shape[-1], shape[-2]) if take.flip else shape


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dims of one, which readers add to make a bias broadcast: they move no value."""
    return tuple(n for n in shape if n != 1)


def _sums_last(graph: Graph, name: str) -> bool:
    """Whether products sum over a weight's last dim, as over that of a Linear; also true of tables,
    filters and what is in no product."""
    for i, slot in graph.consumers.get(name, ()):
        node = graph.nodes[i]
        operator = operator_of(node.op)
        if operator.sums_last is not None:
            return operator.sums_last(node, slot)
        if operator.kind == "lookup":
            return True
        if operator.rearranges or operator.passes_values:
            perm = node.attrs.get("perm")
            turned = isinstance(perm, tuple) and tuple(perm[-2:]) == (len(perm) - 1, len(perm) - 2)
            if perm or graph.tensors[node.outputs[0]].shape == graph.tensors[name].shape:
                return _sums_last(graph, node.outputs[0]) != turned
    return True
