"""Reshards between layouts, derived once per pair of layouts: which collectives, and which axes cut
what each moves, whatever the sizes of the axes.

On a tensor that both layouts cut evenly the collectives between them depend on neither its shape
nor the sizes of the axes, and the payload of each is the whole tensor divided by the sizes of some
axes. Neither the dims that neither layout cuts nor the names of axes make a difference, nor
does an axis that keeps its place: it only divides what moves. Pairs that are alike up to those
(`planner.sharding.layout_pairs`) share a derivation.

Where a layout pads a dim, the steps depend on three facts per dim: whether both layouts pad it to
the same extent, and whether each leaves it as it is. What moves is then a product over dims of the
extent padded for one or the other layout, divided by the same axes: one derivation a pair (up to
`_form`) and set of facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from planner.sharding.layout import Axes, Layout, ReshardStep, reshard_steps
from planner.sharding.layout_pairs import UNKNOWN, LayoutDifferences
from planner.sharding.layout_table import LayoutTable

NAMES = tuple("abcdefghijklmnopqrstuvwxyz")
"""What axes are called where only how many there are makes a difference."""
AT_ONCE = 1 << 18
"""Pairs whose differences are looked up together: of tensors with many dims there are millions."""
Collective = tuple[str, Axes, Axes]
"""Its kind, its axes and those whose sizes divide its payload."""


@cache
def _evenly(form: tuple[Axes, ...]) -> list[tuple[Collective, bool]] | None:
    """Collectives of a pair of layouts of evenly cut tensors, and whether each is of the backward
    pass; None where there are no steps. form: what they differ in
    (`planner.sharding.layout_pairs.Rows`), axes by number (of NAMES) in order of appearance."""
    *dims, partial, grad_partial, to_partial, to_grad_partial = form
    mesh = tuple([(name, 2) for name in NAMES[: len({name for row in form for name in row})]])
    shape = (2 ** len(mesh),) * (len(dims) // 2)
    source = Layout(tuple(dims[::2]), partial, grad_partial)
    steps = reshard_steps(
        shape, source, Layout(tuple(dims[1::2]), to_partial, to_grad_partial), mesh
    )
    return (
        None
        if steps is None
        else [
            ((kind, over, cut), back)
            for kind, over, cut, back, _ in _collectives(steps, source, range(len(shape)))
        ]
    )


def _form(source: Layout, target: Layout, order: Axes) -> tuple[tuple, Axes]:
    """Two layouts without the dims that neither cuts, axes by number; and which axes they are.
    order: the mesh's."""
    dims = [pair for pair in zip(source.dims, target.dims, strict=True) if pair[0] or pair[1]]
    rows = [
        *(row for pair in dims for row in pair),
        source.partial,
        source.grad_partial,
        target.partial,
        target.grad_partial,
    ]
    axes = tuple([a for a in order if any(a in row for row in rows)])
    number = {axis: k for k, axis in enumerate(axes)}
    return tuple([tuple([number[a] for a in row]) for row in rows]), axes


def reshard_table(table: LayoutTable, order: Axes) -> ReshardTable:
    """The reshards between pairs of a table's layouts on meshes of these axes; made once."""
    if order not in table.reshard:
        table.reshard[order] = ReshardTable(table, order)
    return table.reshard[order]


class ReshardTable:
    """The collectives of pairs of layouts, in flat arrays that grow: the same for every mesh of the
    same axes."""

    def __init__(self, layout_table: LayoutTable, order: Axes) -> None:
        self.layout_table, self.order = layout_table, order
        self.differences = LayoutDifferences(layout_table.layouts, len(order))
        self._number: dict[bytes, int] = {}
        self._place: dict[int, int] = {}  # layout -> its row and column of `_of`
        self._of = np.zeros(
            (0, 0), np.intp
        )  # [layouts, layouts] number of the pair, UNKNOWN until asked
        self._grids: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
        self._renamed: dict[tuple[Axes, Axes], tuple[Axes, Axes]] = {}
        """A row of axes after others -> the same by NAMES in order of appearance, and all that have
        appeared."""
        self._terms: dict[tuple[str, Axes, Axes], int] = {}
        self._term_of: dict[tuple[Collective, Axes, int], int] = {}
        self.impossible: list[bool] = []  # [pairs]
        self.pair: list[int] = []  # [collectives] of which pair
        self.back: list[bool] = []  # [collectives] of the backward pass
        self.term: list[int] = []  # [collectives] which of `terms`
        self.padded = PaddedReshards(self)
        self._flat: tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`impossible`, `pair`, `back` and `term` as arrays."""
        if self._flat is None or self._flat[0] != len(self.impossible):
            flat = (
                np.array(self.impossible, bool),
                np.array(self.pair, np.int64),
                np.array(self.back, bool),
                np.array(self.term, np.int64),
            )
            self._flat = len(self.impossible), *flat
        return self._flat[1:]

    @property
    def terms_met(self) -> int:
        """How many terms there are so far."""
        return len(self._terms)

    @property
    def terms(self) -> list[tuple[str, Axes, Axes]]:
        """Kind of collective, its axes, and the axes that cut what it moves; each once."""
        return list(self._terms)

    def grid(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
        """Numbers of pairs [rows, columns], of which those with the same collectives have one; new
        pairs are added."""
        key = rows, columns
        grid = self._grids.get(key)
        if grid is None:
            r, c = (
                np.array([self._place.setdefault(n, len(self._place)) for n in numbers], np.intp)
                for numbers in key
            )
            if len(self._place) > len(self._of):
                added = 2 * len(self._place) - len(self._of)
                self._of = np.pad(self._of, ((0, added), (0, added)), constant_values=UNKNOWN)
            grid = self._grids[key] = self._of[r[:, None], c]
            a, b = np.nonzero(grid == UNKNOWN)
            if len(a):
                differences = [
                    d
                    for k in range(0, len(a), AT_ONCE)
                    for d in self.differences.between(
                        rows, columns, a[k : k + AT_ONCE], b[k : k + AT_ONCE]
                    )
                ]
                if unknown := [k for k in dict.fromkeys(differences) if k not in self._number]:
                    self._derive(unknown)
                grid[a, b] = self._of[r[a], c[b]] = list(map(self._number.__getitem__, differences))
        return grid

    def _derive(self, differences: Sequence[bytes]) -> None:
        """Add the collectives of pairs, one of each of these differences. None of them is known."""
        renamed = self._renamed
        for key, (rows, stay) in zip(differences, self.differences.read(differences), strict=True):
            k = self._number[key] = len(self.impossible)
            axes, form = Axes(), []
            for row in rows:
                renaming = renamed.get((row, axes))
                if renaming is None:
                    seen = tuple(dict.fromkeys((*axes, *row)))
                    renaming = renamed[row, axes] = tuple([NAMES[seen.index(a)] for a in row]), seen
                form.append(renaming[0])
                axes = renaming[1]
            collectives = _evenly(tuple(form))
            self.impossible.append(collectives is None)
            if not collectives:
                continue
            for collective, backward in collectives:
                term = self._term_of.get((collective, axes, stay))
                if term is None:
                    of, (kind, over, cut) = dict(zip(NAMES, axes, strict=False)), collective
                    parts = (
                        tuple([of[x] for x in over]),
                        (*[of[x] for x in cut], *self.differences.staying(stay)),
                    )
                    term = self._term_of[collective, axes, stay] = self.number(kind, *parts)
                self.pair.append(k)
                self.back.append(backward)
                self.term.append(term)

    def number(self, kind: str, axes: Axes, cut: Axes) -> int:
        """Which of `terms` this is."""
        return self._terms.setdefault((kind, axes, tuple(sorted(cut))), len(self._terms))


class PaddedReshards:
    """Collectives of pairs of layouts on tensors that one of them pads, in flat arrays that
    grow."""

    def __init__(self, pairs: ReshardTable) -> None:
        self.pairs = pairs
        self._index: dict[tuple[int, int, int], int] = {}
        self.first: list[int] = [0]  # [reshards + 1] first of its collectives
        self.term: list[int] = []  # [collectives] which of the pairs' terms
        self.back: list[bool] = []  # [collectives] of the backward pass
        self.target: list[
            int
        ] = []  # [collectives] a bit per dim: whether its extent is the one padded for the target
        self._flat: tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`first`, `term`, `back` and `target` as arrays."""
        if self._flat is None or self._flat[0] != len(self.first):
            flat = (
                np.array(self.first),
                np.array(self.term, np.int64),
                np.array(self.back, bool),
                np.array(self.target, np.int64),
            )
            self._flat = len(self.first), *flat
        return self._flat[1:]

    def find(
        self, a: int, b: int, facts: int, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...]
    ) -> int:
        """Number of the reshard of a pair of layouts under these facts, which hold of `shape` on
        `mesh`."""
        key = a, b, facts
        n = self._index.get(key)
        if n is None:
            n = self._index[key] = len(self._index)
            layout_table = self.pairs.layout_table
            source, target = layout_table.layouts[a], layout_table.layouts[b]
            used = [
                d for d, axes in enumerate(zip(source.dims, target.dims, strict=True)) if any(axes)
            ]
            form, axes_of = _form(source, target, self.pairs.order)
            padding = form, tuple([facts >> 3 * d & 7 for d in used])
            collectives = layout_table.derived(
                padding,
                axes_of,
                lambda: _collectives(
                    reshard_steps(shape, source, target, mesh) or (), source, used
                ),
            )
            for kind, axes, cut, back, padded in collectives or ():
                self.term.append(self.pairs.number(kind, axes, cut))
                self.back.append(back)
                self.target.append(sum(1 << d for k, d in enumerate(used) if padded >> k & 1))
            self.first.append(len(self.term))
        return n


def _collectives(steps: Sequence[ReshardStep], source: Layout, used: Sequence[int]) -> list[tuple]:
    """Collectives of the steps of a reshard: kind, axes, the axes that cut the payload, whether of
    the backward pass, and which of the used dims (bits) are padded for the target by then."""
    cuts, target, collectives = [list(axes) for axes in source.dims], 0, []
    for s in steps:
        if s.kind in ("pad", "unpad"):
            target |= 1 << used.index(s.dim)
            continue
        cut_before, n = tuple(a for axes in cuts for a in axes), len(s.axes)
        if s.kind in ("reduce-scatter", "slice"):
            cuts[s.dim] += s.axes
        elif s.kind in ("all-gather", "all-gather-invariant", "all-to-all"):
            del cuts[s.dim][len(cuts[s.dim]) - n :]
            if s.kind == "all-to-all":
                cuts[s.to_dim] += s.axes
        gathered = s.kind in ("all-gather", "all-gather-invariant")
        cut = tuple(a for axes in cuts for a in axes) if gathered else cut_before
        for kind, back in ((s.forward, False), (s.backward, True)):
            if kind:
                collectives.append((kind, s.axes, cut, back, target))
    return collectives
