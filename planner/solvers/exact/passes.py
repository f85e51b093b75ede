"""How the tables of an elimination are filled: forward from children to parents, backward from
parents to children.

A search fills the tables of one tree many times under other costs, so what each table is the sum
of is worked out once per tree (`Step`). Where variables were split
(`planner.solvers.exact.minibucket`) costs are levelled between their parts as tables are filled.

Models repeat layers, and tables repeat with them: which variables have tables made of equal parts
is worked out once per tree (`alike`), and a table whose own costs and messages are also those of
another is not summed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner.solvers.model import INF_INT

LARGE = 4096
"""Entries of a table from which on its parts are added up before they are as large as it."""
SAMPLED = 64
"""Entries of a table that are compared before all of them are."""


class Step(NamedTuple):
    """How one table ("bucket") is filled and what it sends."""

    bucket: int
    own: tuple[int, int, tuple[int, ...]] | None
    """Positions of its variable's own costs, and their shape in the table; None where another part
    of the variable has them."""
    children: tuple[tuple[int, tuple[int, ...]], ...]
    """Buckets whose messages it takes, and the shape in which each is added."""
    in_place: tuple[bool, ...] | None
    """Of a large table, per summand after the first: whether the sum with it is as large as the
    table. None of a small table, to which all is added in place."""
    parent: int
    """The bucket that takes its message, -1 where there is none."""
    away: tuple[int, ...]
    """Axes of the parent's table that this one lacks."""


Group = tuple[int, tuple[Step, ...]]
"""A variable and the steps of all its buckets."""


class Sent:
    """What the buckets of a tree send in one run."""

    def __init__(self, buckets: int) -> None:
        self.messages: list[np.ndarray | None] = [None] * buckets
        self.first = list(range(buckets))
        """As each bucket the one that sent an equal message first."""


def steps_of(
    groups: Iterable[tuple[int, Sequence[int]]],
    offset: Sequence[int],
    owner: Sequence[int],
    scope: Sequence[tuple[int, ...]],
    parent: Sequence[int],
    base: Sequence[Sequence[np.ndarray]],
) -> list[Group]:
    """The steps of each variable, in the order of elimination. groups: variables and their buckets;
    owner: each bucket's variable; base: of each bucket its pair tables, of which only shapes are
    looked at."""
    size = [b - a for a, b in zip(offset, offset[1:], strict=False)]
    children: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in scope]
    groups_of_steps: list[Group] = []
    for v, buckets in groups:
        steps = []
        for b in buckets:
            axes = (v, *scope[b])
            shape = tuple(size[u] for u in axes)
            own_costs = (offset[v], offset[v + 1], (shape[0], *(1,) * (len(shape) - 1)))
            away: tuple[int, ...] = ()
            if (to := parent[b]) >= 0:
                inside, above = set(scope[b]), (owner[to], *scope[to])
                children[to].append((b, tuple(size[u] if u in inside else 1 for u in above)))
                away = tuple(k for k, u in enumerate(above) if u not in inside)
            summands = [t.shape for t in base[b]] + [sent for _, sent in children[b]]
            if b == v:
                summands.insert(1, own_costs[2])
            steps.append(
                Step(
                    b,
                    own_costs if b == v else None,
                    tuple(children[b]),
                    _in_place(shape, summands),
                    to,
                    away,
                )
            )
        groups_of_steps.append((v, tuple(steps)))
    return groups_of_steps


def alike(groups: Sequence[Group], base: Sequence[Sequence[np.ndarray]]) -> list[int | None]:
    """A number for each group, which it shares with those whose tables are sums of equal pair
    tables and of messages of such groups, in the same axes; None of a group that is like no
    other."""
    number: dict[tuple[object, ...], int] = {}
    content = _Contents()
    of_bucket: dict[int, tuple[int, int]] = {}
    kinds = []
    for _, steps in groups:
        key = []
        for bucket, own_costs, children, in_place, _, _ in steps:
            pairs = tuple(content.number(table) for table in base[bucket])
            sent = tuple((of_bucket[c], shape) for c, shape in children)
            key.append((pairs, sent, own_costs and own_costs[2], in_place))
        kind = number.setdefault(tuple(key), len(number))
        of_bucket.update((step.bucket, (kind, k)) for k, step in enumerate(steps))
        kinds.append(kind)
    count = Counter(kinds)
    return [kind if count[kind] > 1 else None for kind in kinds]


class _Contents:
    """Numbers of tables, which equal ones share."""

    def __init__(self) -> None:
        self._count = 0
        self._with_sample: dict[tuple[object, ...], list[tuple[np.ndarray, int]]] = {}

    def number(self, table: np.ndarray) -> int:
        """That of a table: it is compared to those alone that some entries of it are equal to."""
        flat = table.reshape(-1)
        sample = table.shape, flat[:: 1 + len(flat) // SAMPLED].tobytes()
        those = self._with_sample.setdefault(sample, [])
        for other, number in those:
            if np.array_equal(table, other):
                return number
        those.append((table, self._count))
        self._count += 1
        return self._count - 1


def _in_place(
    shape: tuple[int, ...], summands: Sequence[tuple[int, ...]]
) -> tuple[bool, ...] | None:
    """Most summands lack an axis of a large table: until one has it, their sum is as small as what
    is in it."""
    if np.prod(shape, dtype=float) < LARGE:
        return None
    first, *others = summands
    total, whole = first, []
    for other in others:
        total = tuple(map(max, total, other))
        whole.append(total == shape)
    return tuple(whole)


def fill(
    groups: Sequence[Group],
    kinds: Sequence[int | None],
    tables: Sequence[np.ndarray],
    base: Sequence[Sequence[np.ndarray]],
    unary: np.ndarray,
    sent: Sent,
    shift: Mapping[int, np.ndarray] | None = None,
    keep: bool = False,
) -> None:
    """Fill the tables of these variables and write what they send into `sent`, which has what all
    other children sent. kinds: of `alike`; shift: per variable that was split the costs that its
    parts have more than they are levelled to [parts, strategies]; keep: messages stay where they
    were read.
    """
    messages, first = sent.messages, sent.first
    filled: dict[tuple[object, ...], tuple[Step, ...]] = {}
    keep = keep or any(kind is not None for kind in kinds)
    for (v, steps), kind in zip(groups, kinds, strict=True):
        shifts = (shift or {}).get(v) if len(steps) > 1 else None
        like = steps
        if kind is not None:
            own_costs = steps[0].own or (0, 0, ())
            costs = (
                unary[own_costs[0] : own_costs[1]].tobytes(),
                None if shifts is None else shifts.tobytes(),
            )
            children = tuple(first[c] for step in steps for c, _ in step.children)
            like = filled.setdefault((kind, costs, children), steps)
        if like is steps:
            for step in steps:
                _fill_one(step, tables[step.bucket], base[step.bucket], unary, messages)
                if not keep:
                    for c, _ in step.children:
                        messages[c] = None
            if len(steps) > 1:
                _level([tables[step.bucket] for step in steps], shifts)
            for step in steps:
                messages[step.bucket] = np.minimum.reduce(tables[step.bucket], axis=0)
        else:
            for step, other in zip(steps, like, strict=True):
                tables[step.bucket][...] = tables[other.bucket]
                messages[step.bucket] = messages[other.bucket]
        for step, other in zip(steps, like, strict=True):
            first[step.bucket] = other.bucket


def _fill_one(
    step: Step,
    table: np.ndarray,
    base: Sequence[np.ndarray],
    unary: np.ndarray,
    messages: Sequence[np.ndarray | None],
) -> None:
    """Add up one table: its pair tables, its variable's own costs, what its children sent."""
    add, (first, *others) = np.add, base
    if step.own is not None:
        others.insert(0, unary[step.own[0] : step.own[1]].reshape(step.own[2]))
    others += [messages[c].reshape(shape) for c, shape in step.children]  # type: ignore[union-attr]
    if table.dtype == np.int64 or step.in_place is not None:
        _add_up(table, first, others, step.in_place)
    elif others:
        add(first, others[0], out=table)
        for part in others[1:]:
            add(table, part, out=table)
    else:
        table[...] = first


def _add_up(
    table: np.ndarray,
    first: np.ndarray,
    others: Sequence[np.ndarray],
    in_place: Sequence[bool] | None,
) -> None:
    """Write a sum into a table, added up in this order; sums of integers end at `INF_INT`."""
    total, whole = first, in_place
    if whole is None:
        table[...] = first
        total, whole = table, [True] * len(others)
    for part, into in zip(others, whole, strict=True):
        total = np.add(total, part, out=table if into else None)
        if table.dtype == np.int64:
            np.minimum(total, INF_INT, out=total)
    if total is not table:
        table[...] = total


def _level(tables: Sequence[np.ndarray], shift: np.ndarray | None) -> None:
    """Shift costs between the parts of a variable so that each finds a strategy equally dear, but
    for what is known to be better: that raises the sum of their minima most where nothing else is
    known of what they send. By whole units, so that integers stay exact. shift: [parts,
    strategies], of no sum.
    """
    least = np.array([_of_strategies(table) for table in tables])
    total = least.sum(axis=0)
    possible, known = np.isfinite(total), np.isfinite(least)
    wanted = np.empty_like(least)
    wanted[:] = np.floor(total / len(tables))
    wanted[0, possible] = total[possible] - (len(tables) - 1) * wanted[0, possible]
    if shift is not None:
        wanted += shift
    added = np.subtract(wanted, least, out=np.zeros_like(least), where=known)
    for table, missing in zip(tables, added, strict=True):
        table += missing.reshape(-1, *(1,) * (table.ndim - 1))


def read_back(
    groups: Sequence[Group],
    tables: Sequence[np.ndarray],
    messages: Sequence[np.ndarray | None],
    value: float,
) -> Iterable[tuple[int, list[np.ndarray]]]:
    """Backward over tables that `fill` filled with what children sent (kept), parents first: add to
    each what all other tables cost at least. Yields each variable and what each of its parts then
    tells of its strategies. value: the sum of all messages that no table takes; float costs only.
    """
    least = np.minimum.reduce
    for v, steps in reversed(groups):
        by_part = []
        for bucket, _, _, _, parent, away in steps:
            table = tables[bucket]
            if parent >= 0:
                sent, rest = messages[bucket], tables[parent]
                assert sent is not None
                if away:
                    rest = least(rest, axis=away)
                known = np.isfinite(sent)
                if known.all():
                    table += rest - sent
                else:
                    table += np.subtract(rest, sent, out=np.zeros_like(sent), where=known)
            else:
                table += value - table.min()
            by_part.append(_of_strategies(table))
        yield v, by_part


def _of_strategies(table: np.ndarray) -> np.ndarray:
    """The least entry of each strategy."""
    least: np.ndarray = np.minimum.reduce(table.reshape(len(table), -1), axis=1)
    return least


def shifted(costs: np.ndarray, step: float, shift: np.ndarray | None) -> np.ndarray:
    """A shift towards parts that all tell the same of each strategy. costs, shift: [parts,
    strategies]"""
    possible = np.isfinite(costs).all(axis=0)
    added = np.zeros_like(costs)
    known = costs[:, possible]
    added[1:, possible] = np.rint(step * (known.mean(axis=0) - known)[1:])
    added[0] = -added[1:].sum(axis=0)
    return added if shift is None else shift + added
