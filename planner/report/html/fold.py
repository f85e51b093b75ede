"""The graph as a list with rails: operators in program order, one line each, and what flows between
them in lanes at their side.

Chains fold into one line where nothing is lost: an operator joins its only reader when the tensor
between them stays where it is and one of the two takes next to no time. Each line has a lane; a
line takes over the leftmost lane that ends in it, so that a residual stream stays a straight rail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.report.html.derive import Detail, Move, Row

LIGHT = 0.002
"""Share of the step below which an operator may join its reader."""
MOST = 160
"""Lines of a plan; beyond, the cheapest join their neighbours."""


@dataclass
class Line:
    """Operators that share a line, in program order."""

    rows: list[Row]
    moves: list[Move]
    own_bytes: float = 0.0
    """What collectives on its weights, inputs and inside its kernels, and what it hands to the next
    pipeline stage, move in a step."""

    @property
    def run(self) -> int:
        """The block it is in, -1 for none."""
        return self.rows[0].run

    @property
    def kernels_s(self) -> float:
        """Seconds of its kernels a step."""
        return sum(r.kernels_s for r in self.rows)

    @property
    def comm_s(self) -> float:
        """Seconds of its exposed collectives a step."""
        return sum(m.exposed_s for m in self.moves)

    @property
    def main(self) -> Row:
        """The operator that names it: the costliest."""
        return max(self.rows, key=lambda r: r.kernels_s)


@dataclass(frozen=True)
class Rail:
    """What a line sends down its lane: reader -> bytes moved on the way (0: it stays put)."""

    lane: int
    last: int
    to: dict[int, float] = field(default_factory=dict)

    def ahead(self, at: int) -> float:
        """The largest of what is still to come from line `at` on."""
        return max((b for t, b in self.to.items() if t >= at), default=0.0)


@dataclass(frozen=True)
class Rails:
    """Lines, the rail that leaves each (None: nobody reads it), and the lane each lies in."""

    lines: tuple[Line, ...]
    rails: tuple[Rail | None, ...]
    lane: tuple[int, ...]
    lanes: int

    @property
    def widest_bytes(self) -> float:
        """The most that any one rail or stub moves."""
        return max(
            [b for r in self.rails if r for b in r.to.values()]
            + [line.own_bytes for line in self.lines],
            default=0.0,
        )


def fold(d: Detail) -> Rails:
    """Fold and lay out the graph of a plan."""
    group = _join(d)
    # Heads are rows that take in from outside their line, and what follows them hands on after
    # them: every producer is above its readers.
    order = sorted(set(group.values()))
    line_of = {g: k for k, g in enumerate(order)}
    lines = [Line([], []) for _ in order]
    for r in d.rows:
        line = lines[line_of[group[r.index]]]
        line.rows.append(r)
        line.moves += d.at.get(r.index, ())
    for line in lines:
        line.own_bytes = float(
            sum(
                m.total_bytes
                for m in line.moves
                if m.stored or m.when == "handed" or m.what in {r.id for r in line.rows}
            )
        )
    to: list[dict[int, float]] = [{} for _ in lines]
    for e in d.edges:
        a, b = line_of[group[e.source]], line_of[group[e.target]]
        if a != b:
            to[a][b] = to[a].get(b, 0.0) + e.total_bytes
    return _lay_out(lines, to)


def _join(d: Detail) -> dict[int, int]:
    """row -> a row of its line. A line has one product at most."""
    rows = {r.index: r for r in d.rows}
    cost = {i: r.kernels_s + sum(m.exposed_s for m in d.at.get(i, ())) for i, r in rows.items()}
    group = {i: i for i in rows}
    sources, readers = _links(d, group)
    for i, row in rows.items():  # what only follows its producer joins it
        neighbours = sources.get(i, {})
        if not row.product and len(neighbours) == 1 and not next(iter(neighbours.values())):
            source = next(iter(neighbours))
            if len(readers[source]) == 1 and rows[source].run == row.run:
                group[i] = group[source]
    _, readers = _links(d, group)
    products = {group[i] for i, r in rows.items() if r.product}
    group_s: dict[int, float] = {}
    for i, g in group.items():
        group_s[g] = group_s.get(g, 0.0) + cost[i]
    joined_to: dict[int, int] = {}
    for g in sorted(group_s, reverse=True):  # what only prepares for its reader joins it
        neighbours = readers.get(g, {})
        if (
            g not in products
            and group_s[g] <= LIGHT * d.step_s
            and len(neighbours) == 1
            and not next(iter(neighbours.values()))
        ):
            target = next(iter(neighbours))
            if rows[target].run == rows[g].run:
                joined_to[g] = joined_to.get(target, target)
    group = {i: joined_to.get(g, g) for i, g in group.items()}
    heads = sorted(set(group.values()))
    if len(heads) > MOST:
        group_s = {}
        for i, g in group.items():
            group_s[g] = group_s.get(g, 0.0) + cost[i]
        heaviest = set(sorted(heads, key=lambda g: (-group_s[g], g))[:MOST])
        head_of: dict[int, int] = {}
        for previous, g in zip([None, *heads], heads, strict=False):
            free = (
                previous is not None
                and g not in heaviest
                and head_of[previous] not in heaviest
                and rows[head_of[previous]].run == rows[g].run
            )
            head_of[g] = head_of[previous] if free and previous is not None else g
        group = {i: head_of[g] for i, g in group.items()}
    return group


def _links(
    d: Detail, group: dict[int, int]
) -> tuple[dict[int, dict[int, float]], dict[int, dict[int, float]]]:
    """Between groups: reader -> its producers, and producer -> its readers, with the bytes that
    move on the way."""
    sources: dict[int, dict[int, float]] = {}
    readers: dict[int, dict[int, float]] = {}
    for e in d.edges:
        a, b = group[e.source], group[e.target]
        if a != b:
            sources.setdefault(b, {})[a] = sources.get(b, {}).get(a, 0.0) + e.total_bytes
            readers.setdefault(a, {})[b] = readers.get(a, {}).get(b, 0.0) + e.total_bytes
    return sources, readers


def _lay_out(lines: Sequence[Line], to: Sequence[dict[int, float]]) -> Rails:
    free: list[bool] = []
    lane_of: list[int] = []
    rails: list[Rail | None] = []
    ends: dict[int, list[int]] = {}
    for k, readers in enumerate(to):
        later = {t: b for t, b in readers.items() if t > k}
        freed = sorted(ends.pop(k, ()))
        if freed:
            lane = freed[0]
        else:
            lane = next((n for n, ok in enumerate(free) if ok), len(free))
        if lane == len(free):
            free.append(True)
        for n in freed:
            free[n] = True
        lane_of.append(lane)
        if later:
            free[lane] = False
            ends.setdefault(max(later), []).append(lane)
            rails.append(Rail(lane, max(later), later))
        else:
            rails.append(None)
    return Rails(tuple(lines), tuple(rails), tuple(lane_of), max(len(free), 1))


def merged(moves: Iterable[Move]) -> list[tuple[Move, int, float, float]]:
    """(the first of them, times a step, bytes a step, exposed seconds a step) per kind, axes and
    phase, the costliest first."""
    groups: dict[tuple, list[Move]] = {}
    for m in moves:
        groups.setdefault((m.kind, m.axes, m.phase), []).append(m)
    rows = [
        (
            same[0],
            sum(m.count for m in same),
            float(sum(m.total_bytes for m in same)),
            sum(m.exposed_s for m in same),
        )
        for same in groups.values()
    ]
    return sorted(rows, key=lambda r: (-r[3], -r[2], r[0].kind))
