"""Prices of conversions between layouts, derived once per pair of layouts and evaluated for many at a time.

On a tensor that both layouts cut evenly the collectives between them depend on neither its shape nor the sizes of the axes, and the payload of each is the
whole tensor divided by the sizes of some axes. So `Atlas` numbers layouts and derives a pair once: its collectives, and which axes cut what each moves.
`Conversions` holds for one mesh all pairs met so far as flat arrays,

    seconds of a move = min over lines of  latency + size * (slope / product of the cutting axes)

and prices a table of pairs for a tensor of a given size with a few array operations.

Neither the dims that both layouts leave whole nor the names of axes make a difference, and on evenly cut tensors nor does an axis that keeps its place: it only
divides what moves. Pairs that are alike up to those (`planner.differences`, where something is padded `_form`) share a derivation.

Where a layout pads a dim, the way depends on three facts per dim: whether both layouts pad it to the same extent, and whether each leaves it as it is. What
moves is then a product over dims of the extent padded for one or the other layout, divided by the same axes: one derivation a pair and set of facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.differences import Differences
from planner.layout import Axes, Layout, Step, convert, group
from planner.store import key_of

if TYPE_CHECKING:
    from planner.price import Pricer

NAMES = tuple("abcdefghijklmnopqrstuvwxyz")
"""What axes are called where only how many there are makes a difference."""
Collective = tuple[str, Axes, Axes]
"""Its kind, its axes and those whose sizes divide its payload."""


@dataclass(frozen=True, eq=False)
class Row:
    """Layouts in a row, one per option: the distinct ones, by number, and which of those each option has."""

    layouts: tuple[int, ...]
    of: np.ndarray


class Atlas:
    """Layouts by number, and what does not depend on the sizes of axes: readings of rules and moves between layouts."""

    def __init__(self) -> None:
        self.layouts: list[Layout] = []
        self.axes: dict[str, int] = {}
        """Bit of each axis in `cuts`."""
        self._cuts = np.zeros((64, 4), np.int64)
        self._rows: dict[tuple[int, ...], Row] = {}
        self.memo: dict[tuple, dict] = {}
        """Readings of rules, kept by planner.space: what is read -> split -> layout number."""
        self._number: dict[Layout, int] = {}
        self._plain: dict[int, int] = {}
        self._written: dict[tuple[int, ...], bytes] = {}
        self._derived: dict[tuple, list[tuple] | None] = {}
        """Moves of pairs that are alike: kind, numbers of axes and of cutting axes, and the rest."""
        self._pairs: dict[Axes, Pairs] = {}

    def pairs(self, order: Axes) -> Pairs:
        """The moves of pairs of layouts on meshes of these axes."""
        if order not in self._pairs:
            self._pairs[order] = Pairs(self, order)
        return self._pairs[order]

    def number(self, layout: Layout) -> int:
        """The layout's number."""
        n = self._number.get(layout)
        if n is None:
            n = self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
            room, rank = self._cuts.shape
            if n == room or len(layout.dims) > rank:
                self._cuts = np.pad(self._cuts, ((0, room), (0, max(0, len(layout.dims) - rank))))
            self._cuts[n, : len(layout.dims)] = [sum([self.axes.setdefault(a, 1 << len(self.axes)) for a in axes]) for axes in layout.dims]
        return n

    def row(self, numbers: tuple[int, ...]) -> Row:
        """The same object for the same numbers."""
        row = self._rows.get(numbers)
        if row is None:
            index: dict[int, int] = {}
            of = np.array([index.setdefault(n, len(index)) for n in numbers], np.intp)
            row = self._rows[numbers] = Row(tuple(index), of)
        return row

    def partial(self, row: Row) -> np.ndarray:
        """Whether each option's layout is partial. [options]"""
        return np.array([bool(self.layouts[n].partial) for n in row.layouts])[row.of]

    def cuts(self, layouts: Sequence[int], rank: int) -> np.ndarray:
        """Bits of the axes that cut each dim of layouts of one rank. [layouts, rank]"""
        return self._cuts[list(layouts), :rank]

    def plain(self, number: int) -> int:
        """The same layout without its fans."""
        if number not in self._plain:
            layout = self.layouts[number]
            self._plain[number] = self.number(Layout(layout.dims, layout.partial))
        return self._plain[number]

    def written(self, numbers: tuple[int, ...]) -> bytes:
        """Layouts, written out: the same in any atlas."""
        if numbers not in self._written:
            self._written[numbers] = repr([(x.dims, x.partial, x.fan) for x in map(self.layouts.__getitem__, numbers)]).encode()
        return self._written[numbers]

    def derived(self, key: tuple, axes: Axes, derive: Callable[[], list[tuple] | None]) -> list[Any] | None:
        """What `derive` finds, in the names of `axes`; it is asked once for all pairs of a form (the key)."""
        if key not in self._derived:
            found, number = derive(), {axis: k for k, axis in enumerate(axes)}
            self._derived[key] = None if found is None else [(kind, [number[x] for x in over], [number[x] for x in cut], rest) for kind, over, cut, *rest in found]
        known = self._derived[key]
        return None if known is None else [(kind, tuple([axes[k] for k in over]), tuple([axes[k] for k in cut]), *rest) for kind, over, cut, rest in known]


@cache
def _evenly(form: tuple[Axes, ...]) -> list[tuple[Collective, bool]] | None:
    """Collectives of a pair of layouts of evenly cut tensors, and whether each is of the backward pass; None where there is no way. form: what they differ in
    (`planner.differences.Rows`), axes by number (of NAMES) in order of appearance."""
    *dims, partial, fan, to_partial, to_fan = form
    mesh = tuple([(name, 2) for name in NAMES[: len({name for row in form for name in row})]])
    shape = (2 ** len(mesh),) * (len(dims) // 2)
    source = Layout(tuple(dims[::2]), partial, fan)
    steps = convert(shape, source, Layout(tuple(dims[1::2]), to_partial, to_fan), mesh)
    return None if steps is None else [((kind, over, cut), back) for kind, over, cut, back, _ in _moves(steps, source, range(len(shape)))]


def _form(source: Layout, target: Layout, order: Axes) -> tuple[tuple, Axes]:
    """Two layouts without the dims that neither cuts, axes by number; and which axes they are. order: the mesh's."""
    dims = [pair for pair in zip(source.dims, target.dims, strict=True) if pair[0] or pair[1]]
    rows = [*(row for pair in dims for row in pair), source.partial, source.fan, target.partial, target.fan]
    axes = tuple([a for a in order if any(a in row for row in rows)])
    number = {axis: k for k, axis in enumerate(axes)}
    return tuple([tuple([number[a] for a in row]) for row in rows]), axes


class Pairs:
    """The moves of pairs of layouts, in flat arrays that grow: the same for every mesh of the same axes."""

    def __init__(self, atlas: Atlas, order: Axes) -> None:
        self.atlas, self.order = atlas, order
        self.differences = Differences(atlas.layouts, len(order))
        self._number: dict[bytes, int] = {}
        self._grids: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        self._terms: dict[tuple[str, Axes, Axes], int] = {}
        self._term_of: dict[tuple[Collective, Axes, int], int] = {}
        self.impossible: list[bool] = []  # [pairs]
        self.pair: list[int] = []  # [moves] whose
        self.back: list[bool] = []  # [moves] of the backward pass
        self.term: list[int] = []  # [moves] which of `terms`
        self.ways = Ways(self)
        self._flat: tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`impossible`, `pair`, `back` and `term` as arrays."""
        if self._flat is None or self._flat[0] != len(self.impossible):
            flat = np.array(self.impossible, bool), np.array(self.pair, np.int64), np.array(self.back, bool), np.array(self.term, np.int64)
            self._flat = len(self.impossible), *flat
        return self._flat[1:]

    @property
    def terms(self) -> list[tuple[str, Axes, Axes]]:
        """Kind of collective, its axes, and the axes that cut what it moves; each once."""
        return list(self._terms)

    def grid(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
        """Numbers of pairs [rows, columns], of which those with the same moves have one; new pairs are added."""
        key = rows, columns
        grid = self._grids.get(key)
        if grid is None:
            differences = self.differences.between(rows, columns)
            places = list(map(self._number.get, differences))
            if None in places:
                self._derive([k for k in dict.fromkeys(differences) if k not in self._number])
                places = [self._number[k] for k in differences]
            grid = self._grids[key] = np.array(places).reshape(len(rows), len(columns))
        return grid

    def _derive(self, differences: Sequence[bytes]) -> None:
        """Add the moves of pairs, one of each of these differences. None of them is known."""
        for key, (rows, stay) in zip(differences, self.differences.read(differences), strict=True):
            k = self._number[key] = len(self.impossible)
            name: dict[str, str] = {}
            moves = _evenly(tuple([tuple([name.get(a) or name.setdefault(a, NAMES[len(name)]) for a in row]) for row in rows]))
            self.impossible.append(moves is None)
            if not moves:
                continue
            axes = tuple(name)
            for move, backward in moves:
                term = self._term_of.get((move, axes, stay))
                if term is None:
                    of, (kind, over, cut) = dict(zip(NAMES, axes, strict=False)), move
                    each = tuple([of[x] for x in over]), (*[of[x] for x in cut], *self.differences.staying(stay))
                    term = self._term_of[move, axes, stay] = self.number(kind, *each)
                self.pair.append(k)
                self.back.append(backward)
                self.term.append(term)

    def number(self, kind: str, axes: Axes, cut: Axes) -> int:
        """Which of `terms` this is."""
        return self._terms.setdefault((kind, axes, tuple(sorted(cut))), len(self._terms))


class Ways:
    """Ways of pairs of layouts on tensors that one of them pads, in flat arrays that grow."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._index: dict[tuple[int, int, int], int] = {}
        self.first: list[int] = [0]  # [ways + 1] first of its moves
        self.term: list[int] = []  # [moves] which of the pairs' terms
        self.back: list[bool] = []  # [moves] of the backward pass
        self.target: list[int] = []  # [moves] a bit per dim: whether its extent is the one padded for the target
        self._flat: tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`first`, `term`, `back` and `target` as arrays."""
        if self._flat is None or self._flat[0] != len(self.first):
            flat = np.array(self.first), np.array(self.term, np.int64), np.array(self.back, bool), np.array(self.target, np.int64)
            self._flat = len(self.first), *flat
        return self._flat[1:]

    def find(self, a: int, b: int, facts: int, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> int:
        """Number of the way of a pair of layouts under these facts, which hold of `shape` on `mesh`."""
        key = a, b, facts
        n = self._index.get(key)
        if n is None:
            n = self._index[key] = len(self._index)
            atlas = self.pairs.atlas
            source, target = atlas.layouts[a], atlas.layouts[b]
            used = [d for d, axes in enumerate(zip(source.dims, target.dims, strict=True)) if any(axes)]
            form, axes_of = _form(source, target, self.pairs.order)
            padding = form, tuple([facts >> 3 * d & 7 for d in used])
            found = atlas.derived(padding, axes_of, lambda: _moves(convert(shape, source, target, mesh) or (), source, used))
            for kind, axes, cut, back, late in found or ():
                self.term.append(self.pairs.number(kind, axes, cut))
                self.back.append(back)
                self.target.append(sum(1 << d for k, d in enumerate(used) if late >> k & 1))
            self.first.append(len(self.term))
        return n


def _moves(steps: Sequence[Step], source: Layout, used: Sequence[int]) -> list[tuple]:
    """Collectives of a way: kind, axes, the axes that cut the payload, whether of the backward pass, and which of the used dims (bits) are padded for the target
    by then."""
    held, target, found = [list(axes) for axes in source.dims], 0, []
    for s in steps:
        if s.kind in ("pad", "unpad"):
            target |= 1 << used.index(s.dim)
            continue
        before, n = tuple(a for axes in held for a in axes), len(s.axes)
        if s.kind in ("reduce-scatter", "slice"):
            held[s.dim] += s.axes
        elif s.kind in ("all-gather", "all-gather-invariant", "all-to-all"):
            del held[s.dim][len(held[s.dim]) - n :]
            if s.kind == "all-to-all":
                held[s.to_dim] += s.axes
        gathered = s.kind in ("all-gather", "all-gather-invariant")
        cut = tuple(a for axes in held for a in axes) if gathered else before
        for kind, back in ((s.forward, False), (s.backward, True)):
            if kind:
                found.append((kind, s.axes, cut, back, target))
    return found


class Conversions:
    """Tables of conversion seconds on one mesh."""

    def __init__(self, atlas: Atlas, pricer: Pricer) -> None:
        self.atlas, self.pricer = atlas, pricer
        self.sizes = dict(pricer.sizes)
        self.order = tuple(self.sizes)
        self.mesh = tuple(self.sizes.items())
        self.pairs = atlas.pairs(self.order)
        self._priced: dict[float, tuple[int, np.ndarray, np.ndarray]] = {}
        self._tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._lines: tuple[int, np.ndarray, np.ndarray] = 0, np.zeros((0, 1)), np.zeros((0, 1))
        self._devices = np.ones(1, np.int64)  # bits of axes -> devices along them
        self._local: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        self._extents: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def table(self, shape: tuple[int, ...], itemsize: float, rows: Sequence[int], columns: Sequence[int], grad: bool) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds [rows, columns] of converting a tensor from each row's layout to each column's; infinite where there is no way.

        The backward part is 0 where the tensor carries no gradient. The arrays are of all who ask for them.
        """
        asked = shape, itemsize, tuple(rows), tuple(columns), grad
        found = self._tables.get(asked)
        if found is None:
            found = self._tables[asked] = self._kept(*asked)
        return found

    def _kept(self, shape: tuple[int, ...], itemsize: float, rows: tuple[int, ...], columns: tuple[int, ...], grad: bool) -> tuple[np.ndarray, np.ndarray]:
        """`table`, as a search before made it where that is known."""
        kept = self.pricer.kept
        if kept is None:
            return self._made(shape, itemsize, rows, columns, grad)
        key = key_of(self.pricer.place, repr((shape, itemsize, grad)).encode(), self.atlas.written(rows), self.atlas.written(columns))
        found = kept.array(key, 2 * len(rows), len(columns), lambda: np.concatenate(self._made(shape, itemsize, rows, columns, grad)))
        return found[: len(rows)], found[len(rows) :]

    def _made(self, shape: tuple[int, ...], itemsize: float, rows: tuple[int, ...], columns: tuple[int, ...], grad: bool) -> tuple[np.ndarray, np.ndarray]:
        """`table`, worked out."""
        grid = self.pairs.grid(rows, columns)
        forward, backward = self._prices(prod(shape) * itemsize)
        found = forward[grid], backward[grid] if grad else np.zeros(grid.shape)
        (source, over), (target, beyond) = self._padded(shape, tuple(rows)), self._padded(shape, tuple(columns))
        if over.any() or beyond.any():
            at = np.nonzero(over[:, None] | beyond[None, :])
            self._pad(found, at, grid[at], shape, itemsize, rows, columns, source[at[0]], target[at[1]])
            if not grad:
                found[1][at] = 0.0
        return found

    def local(self, shape: tuple[int, ...], row: Row) -> np.ndarray:
        """Elements of one device's piece, padding included, in each distinct layout of a row."""
        key = shape, row.layouts
        found = self._local.get(key)
        if found is None:
            found = self._local[key] = (-(-np.array(shape, np.int64) // self._pieces(row.layouts, len(shape)))).prod(axis=1)
        return found

    def _pieces(self, layouts: Sequence[int], rank: int) -> np.ndarray:
        """Into how many pieces each dim is cut. [layouts, rank]"""
        cuts = self.atlas.cuts(layouts, rank)
        if len(self._devices) != 1 << len(self.atlas.axes):
            self._devices = np.ones(1, np.int64)
            for axis in self.atlas.axes:
                self._devices = np.concatenate([self._devices, self._devices * self.sizes.get(axis, 1)])
        return self._devices[cuts]

    def _padded(self, shape: tuple[int, ...], layouts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The tensor's extents as each layout pads them, and whether it pads any. [layouts, dims], [layouts]"""
        key = shape, layouts
        found = self._extents.get(key)
        if found is None:
            pieces, whole = self._pieces(layouts, len(shape)), np.array(shape, np.int64)
            extents = -(-whole // pieces) * pieces
            found = self._extents[key] = extents, (extents != whole).any(axis=1)
        return found

    def _pad(self, found: tuple[np.ndarray, np.ndarray], at: tuple[np.ndarray, ...], pairs: np.ndarray, shape: tuple[int, ...], itemsize: float,
             rows: Sequence[int], columns: Sequence[int], source: np.ndarray, target: np.ndarray) -> None:  # fmt: skip
        """Fill in the cells `at` of a table, pairs of which a layout pads. source, target: extents as padded for each cell. [cells, dims]"""
        ways = self.pairs.ways
        facts = ((source == target) + 2 * (source == shape) + 4 * (target == shape)) @ 8 ** np.arange(len(shape))
        way = np.array([ways.find(rows[r], columns[c], code, shape, self.mesh) for code, r, c in zip(facts.tolist(), at[0].tolist(), at[1].tolist(), strict=True)])
        first, terms, backs, targets = ways.arrays
        times = (first[1:] - first[:-1])[way]
        cell = np.repeat(np.arange(len(way)), times)
        move = np.arange(len(cell)) - np.repeat(np.cumsum(times) - times, times) + np.repeat(first[way], times)
        late = (targets[move, None] >> np.arange(len(shape))) & 1
        size = np.where(late, target[cell], source[cell]).prod(axis=1) * itemsize
        latency, slope = self._of_terms()
        term, back = terms[move], backs[move]
        seconds = np.where(size, (latency[term] + size[:, None] * slope[term]).min(axis=1), 0.0)
        found[0][at] = np.where(self.pairs.arrays[0][pairs], np.inf, np.bincount(cell, np.where(back, 0.0, seconds), len(way)))
        found[1][at] = np.bincount(cell, np.where(back, seconds, 0.0), len(way))

    def _prices(self, size: float) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds of every pair for a tensor of `size` bytes. [pairs]"""
        pairs = self.pairs
        n = len(pairs.impossible)
        known = self._priced.get(size)
        if known is None or known[0] != n:
            latency, slope = self._of_terms()
            each = (latency + size * slope).min(axis=1) if size and len(latency) else np.zeros(len(latency))
            impossible, whose, back, term = pairs.arrays
            seconds = each[term] if len(term) else np.zeros(0)
            # Without any moves bincount forgets the type of its weights.
            forward = np.bincount(whose, np.where(back, 0.0, seconds), n).astype(np.float64)
            backward = np.bincount(whose, np.where(back, seconds, 0.0), n).astype(np.float64)
            forward[impossible] = np.inf
            known = self._priced[size] = n, forward, backward
        return known[1], known[2]

    def _of_terms(self) -> tuple[np.ndarray, np.ndarray]:
        """Latency and seconds per byte of the whole tensor of each term: [terms, lines], whose minimum is its time."""
        terms = self.pairs.terms
        if self._lines[0] != len(terms):
            lines = [self.pricer.lines(kind, axes, True) for kind, axes, _ in terms]
            width = max(map(len, lines))
            table = np.array([[*row, *[row[-1]] * (width - len(row))] for row in lines])
            share = np.array([1 / group(cut, self.sizes) for _, _, cut in terms])
            self._lines = len(terms), table[:, :, 0], table[:, :, 1] * share[:, None]
        return self._lines[1], self._lines[2]
