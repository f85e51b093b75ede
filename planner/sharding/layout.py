"""Layouts of tensors over a mesh, and the one deterministic way from a layout to another.

Every mesh axis is, for a given tensor, in exactly one of four states:

    state          forward value               gradient (backward)         jax (check_vma)
    sharded        a dim is cut over the axis  cut alike                   varying
    partial        per-device terms, sum       replicated                  varying
                   pending
    grad_partial   equal on all devices        per-device terms, sum       varying
                                               pending                     (lax.pcast)
    replicated     equal on all devices        equal on all devices        invarying

`partial` and `grad_partial` are each other's transpose: a row-parallel product leaves its result
partial, and the operand of a column-parallel one is replicated with a partial gradient.
`reshard_steps` gives the collectives between two layouts, forward and backward; cost model, emitter
and verification all read it, so that what is priced is what is emitted.

A dim whose size its axes do not divide is padded up to the next multiple (`padded`), which the
emitter masks where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Literal

Axes = tuple[str, ...]
STAGE = "stage"
"""The mesh axis of pipeline stages: blocks are assigned along it, no operator is cut over it
(planner.execution.pipeline)."""
ISLAND = "island"
"""The mesh axis of groups of devices that run microbatches of their own, as many as their speed
allows: no operator is cut over it (planner.pricing.islands)."""
StepKind = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-gather-invariant",
    "slice",
    "all-to-all",
    "pvary",
    "pad",
    "unpad",
]
_FORWARD = {"all-gather-invariant": "all-gather", "slice": "", "pvary": "", "pad": "", "unpad": ""}
"""Collective of a step's forward pass where it is not called as the step is."""
_BACKWARD = {
    "reduce-scatter": "all-gather",
    "all-gather": "reduce-scatter",
    "slice": "all-gather",
    "all-to-all": "all-to-all",
    "pvary": "all-reduce",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Per dim the mesh axes that cut it (major first); the axes over which the value is partial;
    those over which it is replicated and its gradient is partial (both in mesh order)."""

    dims: tuple[Axes, ...]
    partial: Axes = ()
    grad_partial: Axes = ()

    def state(self, axis: str) -> tuple[str, int]:
        """("sharded", dim), ("partial", -1), ("grad_partial", -1) or ("replicated", -1)."""
        for d, axes in enumerate(self.dims):
            if axis in axes:
                return "sharded", d
        if axis in self.partial:
            return "partial", -1
        return ("grad_partial", -1) if axis in self.grad_partial else ("replicated", -1)

    @property
    def stored(self) -> Layout:
        """The layout with the same cuts and nothing pending: how the value can be kept or handed
        out."""
        return Layout(self.dims)

    def spell(self, names: Sequence[str] | None = None) -> str:
        """Plain notation such as `[b/data, d] partial over tensor`."""
        labels = names or ["" for _ in self.dims]
        cells = [
            label + ("/" + "+".join(axes) if axes else "") if label or axes else "·"
            for label, axes in zip(labels, self.dims, strict=True)
        ]
        tail = "".join(
            f" {word} {'+'.join(axes)}"
            for word, axes in (
                ("partial over", self.partial),
                ("gradient partial over", self.grad_partial),
            )
            if axes
        )
        return "[" + ", ".join(cells) + "]" + tail


def replicated(rank: int) -> Layout:
    """Equal on all devices, in value and in gradient."""
    return Layout(((),) * rank)


def group(axes: Axes, mesh: Mapping[str, int]) -> int:
    """Number of devices along the axes together."""
    n = 1
    for a in axes:
        n *= mesh[a]
    return n


def padded(size: int, axes: Axes, mesh: Mapping[str, int]) -> int:
    """The dim's size rounded up to a multiple of its axes."""
    if not axes:
        return size
    n = group(axes, mesh)
    return -(-size // n) * n


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's piece (padding included)."""
    return tuple(
        [-(-s // group(a, mesh)) if a else s for s, a in zip(shape, layout.dims, strict=True)]
    )


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One collective (or free local step) of a reshard.

    kind       forward                              backward                        payload of each,
    in elements of one device
    all-reduce psum                                 free                            operand
    reduce-scatter psum_scatter on `dim`            all-gather                      operand; result
    all-gather all_gather on `dim`, varying         reduce-scatter                  result; operand
    all-gather-invariant all_gather on `dim`        slice, free                     result
    slice      this device's piece of `dim`         all-gather                      (free); result
    all-to-all dim `dim` gathered, `to_dim` cut     the same back                   operand; operand
    pvary      pcast                                all-reduce                      (free); operand
    pad/unpad  of `dim` to `size`                   its transpose, free
    """

    kind: StepKind
    axes: Axes
    dim: int = -1
    to_dim: int = -1
    size: int = 0
    forward_elements: int = 0
    backward_elements: int = 0

    @property
    def forward(self) -> str:
        """Collective of the forward pass, "" when local."""
        return _FORWARD.get(self.kind, self.kind)

    @property
    def backward(self) -> str:
        """Collective of the backward pass, "" when local."""
        return _BACKWARD.get(self.kind, "")


class _Reshard:
    """One reshard on its way: what each dim is cut by now, and the steps so far."""

    def __init__(
        self, shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mapping[str, int]
    ) -> None:
        self.shape, self.source, self.target, self.mesh = shape, source, target, mesh
        self.dims = [list(axes) for axes in source.dims]
        self.local = list(local_shape(shape, source, mesh))
        self.placed = [self._placed(d) for d in range(len(shape))]
        """Per dim how many of its leading axes are where they belong."""
        self.growing = [d for d, axes in enumerate(target.dims) if len(axes) > self.placed[d]]
        """Dims that the target cuts by further axes."""
        self.steps: list[ReshardStep] = []

    def _placed(self, d: int) -> int:
        old, new = self.source.dims[d], self.target.dims[d]
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        # A prefix of a padded dim stays in place only if the padded size does.
        padding_stays = self._padded(d, old) == self._padded(d, new)
        return same if padding_stays else 0

    def _padded(self, d: int, axes: Axes) -> int:
        return padded(self.shape[d], axes, self.mesh)

    def _add(self, kind: StepKind, axes: Sequence[str], dim: int = -1, to_dim: int = -1) -> None:
        """Add a step and take over what it does to the dims."""
        axes = tuple(axes)
        n, before = group(axes, self.mesh), math.prod(self.local)
        gathered = kind in ("all-gather", "all-gather-invariant")
        if kind in ("reduce-scatter", "slice"):
            self.dims[dim] += axes
            self.local[dim] //= n
        elif gathered:
            del self.dims[dim][len(self.dims[dim]) - len(axes) :]
            self.local[dim] *= n
        elif kind == "all-to-all":
            del self.dims[dim][-len(axes) :]
            self.dims[to_dim] += axes
            self.local[dim] *= n
            self.local[to_dim] //= n
        payload = math.prod(self.local) if gathered else before
        forward = payload if _FORWARD.get(kind, kind) else 0
        backward = payload if kind in _BACKWARD else 0
        self.steps.append(
            ReshardStep(
                kind=kind,
                axes=axes,
                dim=dim,
                to_dim=to_dim,
                forward_elements=forward,
                backward_elements=backward,
            )
        )

    def _pad_for_target(self, d: int) -> None:
        """Pad or unpad dim d, which no axis cuts, to its size in the target."""
        size = self._padded(d, self.target.dims[d])
        if self.local[d] != size:
            kind: StepKind = "pad" if size > self.local[d] else "unpad"
            self.steps.append(ReshardStep(kind, (), d, -1, size))
            self.local[d] = size

    def _arriving(self, d: int) -> Axes:
        """Axes that may be added to dim d next; none while others must leave it first."""
        placed = self.placed[d]
        return self.target.dims[d][placed:] if len(self.dims[d]) == placed else ()

    def _cut(self, kind: StepKind, axes: Axes, d: int) -> None:
        """Add axes to dim d, where they stay."""
        if not self.dims[d]:
            self._pad_for_target(d)
        self._add(kind, axes, d)
        self.placed[d] += len(axes)

    def reduce(self) -> None:
        """Scatter what is partial along dims that its axes are to cut, and all-reduce the rest."""
        partial = [a for a in self.source.partial if a not in self.target.partial]
        for d in self.growing if partial else ():
            axes = tuple(takewhile(partial.__contains__, self._arriving(d)))
            if axes:
                self._cut("reduce-scatter", axes, d)
                partial = [a for a in partial if a not in axes]
        if partial:
            self._add("all-reduce", partial)

    def cut_by_free_axes(self) -> None:
        """Cut by axes over which the value is replicated: that makes what follows smaller."""
        used = self._used()
        for d in self.growing:
            axes = tuple(takewhile(lambda a: a not in used, self._arriving(d)))
            if axes:
                self._cut("slice", axes, d)

    def _used(self) -> set[str]:
        """Axes over which the source is cut, and those over which the target is partial."""
        return {a for axes in self.source.dims for a in axes} | set(self.target.partial)

    def exchange(self) -> None:
        """All-to-alls: groups of axes that leave one dim and cut another."""
        for d, axes in enumerate(self.dims):
            for to in self.growing if len(axes) > self.placed[d] else ():
                leaving, arriving = axes[self.placed[d] :], self._arriving(to)
                if (
                    to != d
                    and leaving
                    and arriving
                    and tuple(leaving) == arriving[: len(leaving)]
                    and self._exchanges_whole_blocks(d, to, leaving)
                ):
                    self._add("all-to-all", leaving, d, to)
                    self.placed[to] += len(leaving)

    def _exchanges_whole_blocks(self, d: int, to: int, axes: list[str]) -> bool:
        """Whether neither dim is padded, before or after, and the second divides evenly."""
        unpadded = all(
            self._padded(i, tuple(self.dims[i]))
            == self.shape[i]
            == self._padded(i, self.target.dims[i])
            for i in (d, to)
        )
        return unpadded and self.local[to] % group(tuple(axes), self.mesh) == 0

    def gather(self) -> None:
        """Gather axes that must leave their dim, in groups after which the gradient is partial, or
        replicated."""
        partial = self.target.grad_partial
        for d in range(len(self.shape)):
            while len(self.dims[d]) > self.placed[d]:
                leaving = self.dims[d][self.placed[d] :]
                pending = leaving[-1] in partial
                staying = [k for k, a in enumerate(leaving) if (a in partial) != pending]
                axes = leaving[staying[-1] + 1 :] if staying else leaving
                self._add("all-gather" if pending else "all-gather-invariant", axes, d)
            if not self.dims[d]:
                self._pad_for_target(d)

    def cut_the_rest(self) -> None:
        """Cut by axes that had to wait until others had left."""
        for d in self.growing:
            if axes := self._arriving(d):
                self._cut("slice", axes, d)

    def leave_gradient_partial(self) -> None:
        """Axes over which the gradient is summed here, once."""
        used = self._used() | set(self.source.grad_partial)
        if axes := [a for a in self.target.grad_partial if a not in used]:
            self._add("pvary", axes)


def reshard_steps(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[tuple[str, int], ...]
) -> tuple[ReshardStep, ...] | None:
    """The steps from `source` to `target` for a tensor of global `shape`, or None where there is no
    way.

    There is none out of `grad_partial` (a value enters that state at the last moment and never
    leaves it) and none into new partial axes. Order: partial sums go first where they can scatter
    (smallest payload), then the rest is all-reduced, free cuts, all-to-alls, gathers (minor axes
    first), late cuts, and `pvary` at the end.
    """
    if source == target:
        return ()
    return _reshard_steps(shape, source, target, mesh)


@lru_cache(maxsize=200_000)
def _reshard_steps(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[tuple[str, int], ...]
) -> tuple[ReshardStep, ...] | None:
    if not set(source.grad_partial) <= set(target.grad_partial):
        return None
    if not set(target.partial) <= set(source.partial):
        return None
    reshard = _Reshard(shape, source, target, dict(mesh))
    reshard.reduce()
    reshard.cut_by_free_axes()
    reshard.exchange()
    reshard.gather()
    reshard.cut_the_rest()
    reshard.leave_gradient_partial()
    return tuple(reshard.steps)


@dataclass(frozen=True)
class ReshardTree:
    """How one value reaches all its readers: by `shared_steps` from the layout it is made in to a
    shared one, and from there by `reader_steps` to each distinct layout that is read.

    Steps to readers that begin alike are shared: each distinct beginning runs once. A reader that
    wants the layout of the producer has no steps.
    """

    shared_layout: Layout
    shared_steps: tuple[ReshardStep, ...]
    reader_steps: Mapping[Layout, tuple[ReshardStep, ...]]

    def path(self, target: Layout) -> tuple[ReshardStep, ...]:
        """All steps from the producer to `target`; none when it is the producer's own layout."""
        if target == self.shared_layout:
            return self.shared_steps
        return self.shared_steps + self.reader_steps[target] if target in self.reader_steps else ()

    def paths(self) -> tuple[tuple[ReshardStep, ...], ...]:
        """Every distinct beginning of a path from the producer, each ending in the step it stands
        for; those of the shared steps first."""
        beginnings: dict[tuple[ReshardStep, ...], None] = {}
        for path in (
            self.shared_steps,
            *(self.shared_steps + steps for steps in self.reader_steps.values()),
        ):
            for end in range(1, len(path) + 1):
                beginnings[path[:end]] = None
        return tuple(beginnings)

    def steps(self) -> tuple[ReshardStep, ...]:
        """Every step that runs, once, shared ones first."""
        return tuple(path[-1] for path in self.paths())


def ring_elements(steps: Sequence[ReshardStep], mesh: Mapping[str, int], grad: bool) -> float:
    """Ring bytes per device in elements, forward and (with grad) backward: the yardstick that picks
    shared layouts. Not a time."""
    total = 0.0
    for s in steps:
        n = group(s.axes, mesh)
        for kind, elements in (
            (s.forward, s.forward_elements),
            (s.backward if grad else "", s.backward_elements),
        ):
            if kind:
                total += elements * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    return total


@lru_cache(maxsize=50_000)
def reshard_tree(
    shape: tuple[int, ...],
    source: Layout,
    targets: tuple[Layout, ...],
    mesh: tuple[tuple[str, int], ...],
    grad: bool,
) -> ReshardTree | None:
    """The cheapest tree from `source` to all `targets`: each distinct target is resharded to once,
    by way of one shared layout. grad: whether the backward pass counts too.

    Shared layouts tried: the source, every target, and every target without its partial gradients;
    of equals the first, those without partial sums before those with some, which a loop over
    repeated blocks cannot hand on. None when some target cannot be reached.
    """
    wanted = tuple(dict.fromkeys(targets))
    shared_layouts = sorted(
        dict.fromkeys((source, *wanted, *(Layout(t.dims, t.partial) for t in wanted))),
        key=lambda layout: bool(layout.partial),
    )
    best: tuple[float, ReshardTree] | None = None
    sizes = dict(mesh)
    for shared in shared_layouts:
        tree = tree_over(shape, source, shared, wanted, mesh)
        if tree is None:
            continue
        price = ring_elements(tree.steps(), sizes, grad)
        if best is None or price < best[0] - 1e-9:
            best = price, tree
    return best[1] if best else None


def tree_over(
    shape: tuple[int, ...],
    source: Layout,
    shared: Layout,
    targets: Iterable[Layout],
    mesh: tuple[tuple[str, int], ...],
) -> ReshardTree | None:
    """The tree over a given shared layout; None where a target cannot be reached."""
    shared_steps = reshard_steps(shape, source, shared, mesh)
    if shared_steps is None:
        return None
    reader_steps = {}
    for target in dict.fromkeys(targets):
        if target not in (shared, source):
            steps = reshard_steps(shape, shared, target, mesh)
            if steps is None:
                return None
            reader_steps[target] = steps
    return ReshardTree(shared, shared_steps, reader_steps)
