"""Prices of conversions between layouts, derived once per pair of layouts and evaluated for many at a time.

On a tensor that both layouts cut evenly the collectives between them depend on neither its shape nor the sizes of the axes, and the payload of each is the
whole tensor divided by the sizes of some axes. So `Atlas` numbers layouts and derives a pair once, on a tensor whose dims and axes are products of distinct
primes: which axes divide a payload is read off its prime factors. `Conversions` holds for one mesh all pairs met so far as flat arrays,

    seconds of a move = min over lines of  latency + size * (slope / product of the cutting axes)

and prices a table of pairs for a tensor of a given size with a few array operations. Pairs that pad are derived for the smallest
tensor that pads alike: dims that are cut evenly only scale what moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.layout import Axes, Layout, convert, group

if TYPE_CHECKING:
    from planner.price import Pricer

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
Move = tuple[str, Axes, Axes, bool]
"""Collective, its axes, the axes whose sizes divide its payload, and whether it belongs to the backward pass."""


class Atlas:
    """Layouts by number, and what does not depend on the sizes of axes: readings of rules and moves between layouts."""

    def __init__(self) -> None:
        self.layouts: list[Layout] = []
        self.memo: dict[tuple, dict] = {}
        """Readings of rules, kept by planner.space: what is read -> split -> layout number."""
        self._number: dict[Layout, int] = {}
        self._plain: dict[int, int] = {}
        self._moves: dict[tuple[int, int], tuple[Move, ...] | None] = {}
        self._prime: dict[str, int] = {}
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
        return n

    def plain(self, number: int) -> int:
        """The same layout without its fans."""
        if number not in self._plain:
            layout = self.layouts[number]
            self._plain[number] = self.number(Layout(layout.dims, layout.partial))
        return self._plain[number]

    def moves(self, a: int, b: int, order: Axes) -> tuple[Move, ...] | None:
        """Collectives from layout a to layout b on evenly cut tensors, None where there is no way. order: the mesh's axes."""
        key = a, b
        if key not in self._moves:
            for axis in order:
                self._prime.setdefault(axis, PRIMES[len(self._prime)])
            mesh = tuple((axis, self._prime[axis]) for axis in order)
            source, extent = self.layouts[a], prod(n for _, n in mesh)
            whole = extent ** len(source.dims)
            steps = convert((extent,) * len(source.dims), source, self.layouts[b], mesh)
            self._moves[key] = None if steps is None else tuple(
                (kind, s.axes, tuple(axis for axis, n in mesh if (whole // elements) % n == 0), back)
                for s in steps
                for kind, elements, back in ((s.forward, s.forward_elements, False), (s.backward, s.backward_elements, True))
                if kind
            )  # fmt: skip
        return self._moves[key]


class Pairs:
    """The moves of pairs of layouts, in flat arrays that grow: the same for every mesh of the same axes."""

    def __init__(self, atlas: Atlas, order: Axes) -> None:
        self.atlas, self.order = atlas, order
        self._index: dict[tuple[int, int], int] = {}
        self._grids: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        self._terms: dict[tuple[str, Axes, Axes], int] = {}
        self.impossible: list[bool] = []  # [pairs]
        self.pair: list[int] = []  # [moves] whose
        self.back: list[bool] = []  # [moves] of the backward pass
        self.term: list[int] = []  # [moves] which of `terms`

    @property
    def terms(self) -> list[tuple[str, Axes, Axes]]:
        """Kind of collective, its axes, and the axes that cut what it moves; each once."""
        return list(self._terms)

    def grid(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
        """Numbers of pairs [rows, columns]; new pairs are added."""
        key = rows, columns
        grid = self._grids.get(key)
        if grid is None:
            index = self._index
            places = []
            for a in rows:
                for b in columns:
                    k = index.get((a, b))
                    if k is None:
                        k = index[a, b] = len(index)
                        self._add(k, a, b)
                    places.append(k)
            grid = self._grids[key] = np.array(places).reshape(len(rows), len(columns))
        return grid

    def _add(self, k: int, a: int, b: int) -> None:
        moves = self.atlas.moves(a, b, self.order)
        self.impossible.append(moves is None)
        for kind, axes, cut, backward in moves or ():
            self.pair.append(k)
            self.back.append(backward)
            self.term.append(self._terms.setdefault((kind, axes, cut), len(self._terms)))


class Conversions:
    """Tables of conversion seconds on one mesh."""

    def __init__(self, atlas: Atlas, pricer: Pricer) -> None:
        self.atlas, self.pricer = atlas, pricer
        self.sizes = dict(pricer.sizes)
        self.order = tuple(self.sizes)
        self.mesh = tuple(self.sizes.items())
        self.pairs = atlas.pairs(self.order)
        self._priced: dict[float, tuple[int, np.ndarray, np.ndarray]] = {}
        self._lines: tuple[int, np.ndarray, np.ndarray] = 0, np.zeros((0, 1)), np.zeros((0, 1))
        self._cuts: dict[tuple[tuple[int, ...], int], bool] = {}
        self._uneven: dict[tuple, tuple[float, float]] = {}
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}
        self._ways: dict[tuple, tuple[tuple[str, Axes, int, bool], ...] | None] = {}

    def table(self, shape: tuple[int, ...], itemsize: float, rows: Sequence[int], columns: Sequence[int], grad: bool) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds [rows, columns] of converting a tensor from each row's layout to each column's; infinite where there is no way.

        The backward part is 0 where the tensor carries no gradient.
        """
        grid = self.pairs.grid(tuple(rows), tuple(columns))
        forward, backward = self._prices(prod(shape) * itemsize)
        found = forward[grid], backward[grid] if grad else np.zeros(grid.shape)
        bad_rows = [k for k, a in enumerate(rows) if not self._even(shape, a)]
        bad_columns = [k for k, b in enumerate(columns) if not self._even(shape, b)]
        if bad_rows or bad_columns:
            pairs = {(r, c) for r in bad_rows for c in range(len(columns))} | {(r, c) for c in bad_columns for r in range(len(rows))}
            for r, c in sorted(pairs):
                found[0][r, c], found[1][r, c] = self._padding(shape, itemsize, rows[r], columns[c], grad)
        return found

    def _even(self, shape: tuple[int, ...], a: int) -> bool:
        key = shape, a
        even = self._cuts.get(key)
        if even is None:
            even = all(not axes or n % group(axes, self.sizes) == 0 for n, axes in zip(shape, self.atlas.layouts[a].dims, strict=True))
            self._cuts[key] = even
        return even

    def _prices(self, size: float) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) seconds of every pair for a tensor of `size` bytes. [pairs]"""
        pairs = self.pairs
        n = len(pairs.impossible)
        known = self._priced.get(size)
        if known is None or known[0] != n:
            latency, slope = self._of_terms()
            each = (latency + size * slope).min(axis=1) if size and len(latency) else np.zeros(len(latency))
            seconds, whose, back = each[pairs.term] if pairs.term else np.zeros(0), np.array(pairs.pair, np.int64), np.array(pairs.back, bool)
            # Without any moves bincount forgets the type of its weights.
            forward = np.bincount(whose, np.where(back, 0.0, seconds), n).astype(np.float64)
            backward = np.bincount(whose, np.where(back, seconds, 0.0), n).astype(np.float64)
            forward[np.array(pairs.impossible, bool)] = np.inf
            known = self._priced[size] = n, forward, backward
        return known[1], known[2]

    def _of_terms(self) -> tuple[np.ndarray, np.ndarray]:
        """Latency and seconds per byte of the whole tensor of each term: [terms, lines], whose minimum is its time."""
        terms = self.pairs.terms
        if self._lines[0] != len(terms):
            lines = [self.pricer.lines(kind, axes) for kind, axes, _ in terms]
            width = max(map(len, lines))
            table = np.array([[*row, *[row[-1]] * (width - len(row))] for row in lines])
            share = np.array([1 / group(cut, self.sizes) for _, _, cut in terms])
            self._lines = len(terms), table[:, :, 0], table[:, :, 1] * share[:, None]
        return self._lines[1], self._lines[2]

    def _padding(self, shape: tuple[int, ...], itemsize: float, a: int, b: int, grad: bool) -> tuple[float, float]:
        core, times = self._core(shape, a, b)
        key = core, times * itemsize, a, b, grad
        if key not in self._uneven:
            moves, size, price = self._steps(core, a, b), times * itemsize, self.pricer.collective_s
            self._uneven[key] = (np.inf, 0.0) if moves is None else (
                sum(price(kind, axes, elements * size) for kind, axes, elements, back in moves if not back),
                sum(price(kind, axes, elements * size) for kind, axes, elements, back in moves if back) if grad else 0.0,
            )  # fmt: skip
        return self._uneven[key]

    def _core(self, shape: tuple[int, ...], a: int, b: int) -> tuple[tuple[int, ...], int]:
        """The smallest tensor whose way between the layouts is that of `shape`, and how many times its payloads `shape` moves: dims that all axes of both
        layouts cut evenly shrink to one element a piece."""
        if (a, b) not in self._groups:
            dims = zip(self.atlas.layouts[a].dims, self.atlas.layouts[b].dims, strict=True)
            self._groups[a, b] = tuple(group(tuple(dict.fromkeys(x + y)), self.sizes) for x, y in dims)
        core, times = [], 1
        for n, devices in zip(shape, self._groups[a, b], strict=True):
            core.append(n if n % devices else devices)
            times *= 1 if n % devices else n // devices
        return tuple(core), times

    def _steps(self, core: tuple[int, ...], a: int, b: int) -> tuple[tuple[str, Axes, int, bool], ...] | None:
        """Collectives of the way between two layouts: kind, axes, payload in elements, and whether it belongs to the backward pass."""
        key = core, a, b
        if key not in self._ways:
            steps = convert(core, self.atlas.layouts[a], self.atlas.layouts[b], self.mesh)
            self._ways[key] = None if steps is None else tuple(
                (kind, s.axes, elements, back)
                for s in steps
                for kind, elements, back in ((s.forward, s.forward_elements, False), (s.backward, s.backward_elements, True))
                if kind
            )  # fmt: skip
        return self._ways[key]

