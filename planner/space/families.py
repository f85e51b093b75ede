"""Families of plans that people write by hand: batch only, and Megatron's. They restrict a space;
baselines are the best of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.analysis.axis_roles import REPLICATED, role_named
from planner.analysis.columns_rows import COLUMNS, directions
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.machine.topology import Mesh
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS
from planner.ops.experts import exchanges
from planner.sharding.candidates import candidates
from planner.sharding.rule import PENDING, Limits, Split, legal
from planner.space.variables import Link, Space, Variable

Allowed = dict[int, tuple[Split, ...]]


def batch_only(
    base: GraphFacts, mesh: Iterable[tuple[str, int]], axes: tuple[str, ...] | None = None
) -> Allowed:
    """Per class of nodes the one split that cuts the batch over the axes (as many of them as divide
    it)."""
    sizes = dict(mesh)
    used = [a for a in (tuple(sizes) if axes is None else axes) if sizes[a] > 1]
    allowed: Allowed = {}
    factors = base.batch_factors
    for i in base.times:
        rule, split = base.rules[i], Split()
        for k in range(len(used), 0, -1):
            trial = Split.of({factors[i]: used[:k]}) if factors[i] else Split()
            if legal(rule, trial, sizes, Limits()):
                split = trial
                break
        allowed[i] = (split,)
    return allowed


def as_named(
    base: GraphFacts,
    mesh: Mesh,
    names: Collection[str],
    pinned: Allowed,
    limits: Limits,
    tensor: str = "any",
) -> Allowed:
    """Splits under which the named axes do what they are called: see planner.analysis.axis_roles.
    `pinned`: classes with pins of their own.

    "data" and "sequence" cut that, wherever it can be cut, and nothing else; "expert" nothing else
    where there are experts; "tensor" anything but the batch; "replicated" nothing. tensor:
    "megatron" and "megatron-sp" hold "tensor" to columns, rows, heads and vocabulary wherever there
    are some; the latter lets it cut positions between products. A pin of a node goes before a name:
    of the splits it leaves, a name keeps those that follow it, or all where none does.
    """
    sizes, allowed = dict(mesh.shape), dict(pinned)
    claims = {
        a: claim
        for a in sizes
        if a in names
        and sizes[a] > 1
        and (claim := role_named(a) or (REPLICATED if a.startswith(REPLICATED) else ""))
    }
    if not claims:
        return allowed
    offered = dict[int, tuple[Split, ...]]()  # by kind
    for i in pinned:
        allowed[i] = _following(base, i, pinned[i], claims, tensor, fixed=True)
    claimed = tuple(claims.items()), tensor
    for alike in _alike(base):
        i, *_ = alike.nodes
        if (kind := base.kinds[i]) not in offered:
            offered[kind] = base.reachable(i, candidates(base.rules[i], sizes, limits))
        splits = offered[kind]
        key = id(splits), claimed, alike.reads
        if key not in _FOLLOWING:
            _FOLLOWING[key] = splits, _following(base, i, splits, claims, tensor)
        following = _FOLLOWING[key][1]
        allowed |= {i: following for i in alike.nodes if i not in pinned}
    return allowed


def exchanging(base: GraphFacts, mesh: Mesh, allowed: Allowed, limits: Limits) -> Allowed:
    """Those of the allowed splits under which experts' rows travel. Raises PlanError P025 where
    there are none."""
    sizes, exchanged = dict(mesh.shape), dict(allowed)
    experts = [i for i in base.times if base.graph.nodes[i].op == ROUTED_EXPERTS]
    for i in experts:
        among = allowed.get(i) or base.reachable(i, candidates(base.rules[i], sizes, limits))
        exchanged[i] = tuple(s for s in among if exchanges(base.rules[i], s))
    if not experts or not all(exchanged[i] for i in experts):
        where = " x ".join(f"{a} {n}" for a, n in sizes.items())
        raise PlanError(
            "P025",
            f"pin exchanges = beside: no rows of routed experts travel on the mesh {where}",
            help=["expert=N spreads routed experts over N devices", "exchanges=waiting"],
        )
    return exchanged


_FOLLOWING: dict[tuple[object, ...], tuple[tuple[Split, ...], tuple[Split, ...]]] = {}
"""All that `_following` reads -> the splits, and those that it leaves. Splits are known by
identity: `candidates` has the same object for the same ones on all meshes."""


@dataclass(frozen=True)
class _Alike:
    """Classes of nodes of one kind that are the same to `_following`. reads: what it reads of them
    beside their splits."""

    nodes: tuple[int, ...]
    reads: tuple[object, ...]


def _alike(base: GraphFacts) -> tuple[_Alike, ...]:
    """The classes of a graph's nodes, found once for all meshes."""
    key, memo = ("alike to names", id(base.times)), base.graph.memo
    if key not in memo:
        nodes_of: dict[tuple[int, tuple[object, ...]], list[int]] = {}
        for i in base.times:
            direction = directions(base.graph).get(i, "")
            reads = (
                tuple(base.roles[i].items()),
                _is_held(base, i),
                (direction, base.rules[i].results[0]) if direction else (),
            )
            nodes_of.setdefault((base.kinds[i], reads), []).append(i)
        classes = tuple([_Alike(tuple(nodes), reads) for (_, reads), nodes in nodes_of.items()])
        memo[key] = base.times, classes  # which is kept, so that its id stays unique
    result: tuple[_Alike, ...] = memo[key][1]
    return result


def _following(
    base: GraphFacts,
    i: int,
    splits: tuple[Split, ...],
    claims: Mapping[str, str],
    tensor: str,
    fixed: bool = False,
) -> tuple[Split, ...]:
    """Those of a node's splits under which every claimed axis does what it is called. fixed: where
    none follows an axis, all stay."""
    following, roles = list(splits), base.roles[i]
    for axis, claim in claims.items():
        role_of_split = [_role_of(axis, s, roles) for s in following]
        remaining = following
        if claim == "tensor":
            remaining = [
                s for s, role in zip(following, role_of_split, strict=True) if role != "data"
            ]
            remaining = (
                remaining
                if tensor == "any"
                else _columns_or_rows(base, i, axis, remaining, tensor == "megatron-sp")
            )
        elif claim == REPLICATED:
            remaining = [s for s in following if axis not in s.used]
        elif claim != "expert" or "expert" in roles.values():
            doing_it = [
                s for s, role in zip(following, role_of_split, strict=True) if role == claim
            ]
            remaining = (
                doing_it
                if doing_it and claim != "expert"
                else [
                    s
                    for s, role in zip(following, role_of_split, strict=True)
                    if role in (claim, "")
                ]
            )
        following = remaining if remaining or not fixed else following
    return tuple(following)


def _role_of(axis: str, split: Split, roles: Mapping[str, str]) -> str:
    """What an axis cuts under a split; "" where it is idle, or only pending."""
    for factor, axes in split.pairs:
        if axis in axes:
            return roles.get(factor, "")
    return ""


def _columns_or_rows(
    base: GraphFacts, i: int, axis: str, splits: list[Split], positions: bool
) -> list[Split]:
    """Of a node's splits those of Megatron's tensor parallelism over an axis: products, attention,
    experts, embeddings and the loss are cut wherever they can be and never along positions; other
    nodes along positions only where that is allowed. Products come in pairs of columns and rows
    (planner.analysis.columns_rows)."""
    roles, must_follow = base.roles[i], _is_held(base, i)
    cut = [{roles.get(f, "") for f, axes in s.pairs if axis in axes} for s in splits]
    allowed = [
        (s, c)
        for s, c in zip(splits, cut, strict=True)
        if "sequence" not in c or (positions and not must_follow)
    ]
    full = [s for s, c in allowed if c & {"tensor", "expert"}] if must_follow else []
    if direction := directions(base.graph).get(i):
        results = {f for dim in base.rules[i].results[0] for f in dim}
        paired = [
            s
            for s in full
            if all((f in results) == (direction == COLUMNS) for f, axes in s.pairs if axis in axes)
        ]
        full = paired or full
    return full or [s for s, _ in allowed]


def _is_held(base: GraphFacts, i: int) -> bool:
    """Whether a tensor axis is held to columns and rows at a node: it reads a matrix of weights, or
    multiplies."""
    node = base.graph.nodes[i]
    matrix = any(
        n in base.graph.weights and len(base.graph.tensors[n].shape) > 1 for n in node.inputs
    )
    return matrix or bool(base.rules[i].flops) or bool(operator_of(node.op).roles)


def megatron_only(base: GraphFacts, mesh: Mesh) -> Allowed:
    """Batch over "data"; over "tensor" anything but the batch (heads, columns, rows, vocabulary),
    nothing left pending."""
    sizes = dict(mesh.shape)
    data = batch_only(base, mesh.shape, tuple(a for a in sizes if a == "data"))
    factors = base.batch_factors
    allowed: Allowed = {}
    for i, (fixed,) in data.items():
        rule = base.rules[i]
        joined_splits = []
        for s in candidates(
            rule,
            {a: n for a, n in sizes.items() if a != "data"},
            Limits(pending=False, spatial=False),
        ):
            axes_of = {f: list(a) for f, a in fixed.pairs}
            if any((f == factors[i] and f) or f in rule.paired for f, _ in s.pairs) or s.axes(
                PENDING
            ):
                continue
            for f, a in s.pairs:
                axes_of[f] = axes_of.get(f, []) + list(a)
            joined = Split.of(axes_of)
            if legal(rule, joined, sizes, Limits()):
                joined_splits.append(joined)
        allowed[i] = tuple(joined_splits) or (fixed,)
    return allowed


def no_split(base: GraphFacts) -> Allowed:
    """Every device does everything."""
    return {i: (Split(),) for i in base.times}


def restrict(space: Space, allowed: Mapping[int, tuple[Split, ...]]) -> Space | None:
    """The space with only the allowed splits of each class of nodes; None where one has none of
    them."""
    keep: dict[int, np.ndarray] = {}
    variables: list[Variable] = []
    for k, v in enumerate(space.variables):
        if v.kind == "op" and v.node in allowed:
            wanted = set(allowed[v.node])
            kept_rows = np.array([j for j, s in enumerate(v.splits) if s in wanted], np.int64)
            if not len(kept_rows):
                return None
            if len(kept_rows) < len(v.splits):
                keep[k] = kept_rows
                v = _pick(v, kept_rows)
        variables.append(v)
    cut: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    links = []
    for link in space.links:
        rows, columns = keep.get(link.a), keep.get(link.b)
        if rows is None and columns is None:
            links.append(link)
            continue
        key = (
            id(link.forward_s),
            None if rows is None else rows.tobytes(),
            None if columns is None else columns.tobytes(),
        )
        if key not in cut:
            place = np.ix_(
                np.arange(link.forward_s.shape[0]) if rows is None else rows,
                np.arange(link.forward_s.shape[1]) if columns is None else columns,
            )
            cut[key] = link.forward_s[place], link.backward_s[place]
        links.append(
            Link(
                link.a,
                link.b,
                *cut[key],
                link.count,
                link.name,
                link.share if columns is None else link.share[columns],
            )
        )
    return Space(space.base, space.pricer, variables, links, space.op_of, space.parts)


def _pick(v: Variable, options: np.ndarray) -> Variable:
    """The variable with some of its options alone."""
    splits = tuple(v.splits[j] for j in options.tolist())
    return replace(v, splits=splits, costs=v.costs.take(options))
