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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from planner.errors import PlanError

Axes = tuple[str, ...]
STAGE = "stage"
"""The mesh axis of pipeline stages: blocks are dealt out along it, no operator is cut over it
(planner.execution.pipeline)."""
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
        """The same cut with nothing pending: how the value can be kept or handed out."""
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
    """One collective (or free local step) of a conversion.

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


class _ReshardState:
    """Mutable state of one conversion: what each dim is cut by now, and the steps so far."""

    def __init__(self, shape: tuple[int, ...], source: Layout, mesh: Mapping[str, int]) -> None:
        self.mesh, self.true = mesh, shape
        self.dims = [list(a) for a in source.dims]
        self.local = list(local_shape(shape, source, mesh))
        self.steps: list[ReshardStep] = []

    @property
    def elements(self) -> int:
        return math.prod(self.local)

    def add(self, kind: StepKind, axes: Sequence[str], dim: int = -1, to_dim: int = -1) -> None:
        axes = tuple(axes)
        n, before = group(axes, self.mesh), self.elements
        if kind in ("reduce-scatter", "slice"):
            self.dims[dim] += axes
            self.local[dim] //= n
        elif kind in ("all-gather", "all-gather-invariant"):
            del self.dims[dim][len(self.dims[dim]) - len(axes) :]
            self.local[dim] *= n
        elif kind == "all-to-all":
            del self.dims[dim][-len(axes) :]
            self.dims[to_dim] += axes
            self.local[dim] *= n
            self.local[to_dim] //= n
        gathered = kind in ("all-gather", "all-gather-invariant")
        payload = self.elements if gathered else before
        forward, backward = (
            payload if _FORWARD.get(kind, kind) else 0,
            (payload if kind in _BACKWARD else 0),
        )
        self.steps.append(ReshardStep(kind, axes, dim, to_dim, 0, forward, backward))

    def resize(self, dim: int, size: int) -> None:
        """Pad or unpad dim `dim`, which no axis cuts, to `size`."""
        if self.local[dim] != size:
            self.steps.append(
                ReshardStep("pad" if size > self.local[dim] else "unpad", (), dim, -1, size)
            )
            self.local[dim] = size


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
    sizes = dict(mesh)
    if any(a not in target.grad_partial for a in source.grad_partial) or any(
        a not in source.partial for a in target.partial
    ):
        return None
    walk = _ReshardState(shape, source, sizes)
    keep: list[int] = []  # per dim: how many leading axes are where they belong
    for d, (old, new) in enumerate(zip(source.dims, target.dims, strict=True)):
        same = 0
        if old and new:
            while same < min(len(old), len(new)) and old[same] == new[same]:
                same += 1
            # A prefix of a padded dim stays in place only if the padded size does.
            if same and padded(shape[d], old, sizes) != padded(shape[d], new, sizes):
                same = 0
        keep.append(same)
    pending = [a for a in source.partial if a not in target.partial]

    def ready(d: int) -> Axes:
        """Axes still to be added to dim d, () while axes must leave it first."""
        return target.dims[d][keep[d] :] if len(walk.dims[d]) == keep[d] else ()

    def cut(kind: StepKind, run: Axes, d: int) -> None:
        """Add axes to dim d, where they stay."""
        if not walk.dims[d]:
            walk.resize(d, padded(shape[d], target.dims[d], sizes))
        walk.add(kind, run, d)
        keep[d] += len(run)

    wanting = [d for d, axes in enumerate(target.dims) if len(axes) > keep[d]]
    for d in wanting if pending else ():  # 1. scatter what is pending
        run = tuple(_leading(ready(d), pending))
        if run:
            cut("reduce-scatter", run, d)
            pending = [a for a in pending if a not in run]
    if pending:  # 2. all-reduce the rest
        walk.add("all-reduce", pending)
    held = {a for axes in source.dims for a in axes} | set(target.partial)
    for d in wanting:  # 3. free cuts that make what follows smaller
        run = tuple(_leading(ready(d), [a for a in target.dims[d] if a not in held]))
        if run:
            cut("slice", run, d)
    for d, axes in enumerate(walk.dims):  # 4. moves of one axis group from a dim to another
        for t in wanting if len(axes) > keep[d] else ():
            leaving, arriving = axes[keep[d] :], ready(t)
            if (
                t != d
                and leaving
                and arriving
                and tuple(leaving) == arriving[: len(leaving)]
                and _even(walk, d, t, leaving, shape, target, sizes)
            ):
                walk.add("all-to-all", leaving, d, t)
                keep[t] += len(leaving)
    for d in range(len(shape)):  # 5. gathers, in runs that become `grad_partial` or stay replicated
        while len(walk.dims[d]) > keep[d]:
            leaving = walk.dims[d][keep[d] :]
            grad_partial = leaving[-1] in target.grad_partial
            run_back = _trailing(leaving, grad_partial, target)
            walk.add("all-gather" if grad_partial else "all-gather-invariant", run_back, d)
        if not walk.dims[d]:
            walk.resize(d, padded(shape[d], target.dims[d], sizes))
    for d in wanting:  # 6. cuts that had to wait
        run = ready(d)
        if run:
            cut("slice", run, d)
    grad_partials = [
        a for a in target.grad_partial if a not in source.grad_partial and a not in held
    ]
    if grad_partials:  # 7. gradients of these axes are summed once, here
        walk.add("pvary", grad_partials)
    return tuple(walk.steps)


def _leading(axes: Sequence[str], allowed: Sequence[str]) -> list[str]:
    run = []
    for a in axes:
        if a not in allowed:
            break
        run.append(a)
    return run


def _trailing(leaving: list[str], grad_partial: bool, target: Layout) -> list[str]:
    run: list[str] = []
    for a in reversed(leaving):
        if (a in target.grad_partial) != grad_partial:
            break
        run.insert(0, a)
    return run


def _even(
    walk: _ReshardState,
    d: int,
    t: int,
    axes: list[str],
    shape: tuple[int, ...],
    target: Layout,
    sizes: Mapping[str, int],
) -> bool:
    """Whether an all-to-all moves whole blocks: neither dim is padded, before or after."""
    n = group(tuple(axes), sizes)
    unpadded = all(
        padded(shape[i], tuple(walk.dims[i]), sizes)
        == shape[i]
        == padded(shape[i], target.dims[i], sizes)
        for i in (d, t)
    )
    return unpadded and walk.local[t] % n == 0


@dataclass(frozen=True)
class ReshardTree:
    """How one value reaches all its consumers: producer -> hub by `trunk`, hub -> each distinct
    target by `branches`.

    Branches that begin with the same steps share them: each distinct beginning is computed once. A
    target equal to the producer's own layout needs no branch.
    """

    shared_layout: Layout
    shared_steps: tuple[ReshardStep, ...]
    reader_steps: Mapping[Layout, tuple[ReshardStep, ...]]

    def path(self, target: Layout) -> tuple[ReshardStep, ...]:
        """All steps from the producer to `target`; none when it is the producer's own layout
        (neither the hub nor a branch)."""
        if target == self.shared_layout:
            return self.shared_steps
        return self.shared_steps + self.reader_steps[target] if target in self.reader_steps else ()

    def paths(self) -> tuple[tuple[ReshardStep, ...], ...]:
        """Every distinct beginning of a way from the producer, each ending in the step it stands
        for; the trunk's first."""
        found: dict[tuple[ReshardStep, ...], None] = {}
        for way in (
            self.shared_steps,
            *(self.shared_steps + steps for steps in self.reader_steps.values()),
        ):
            for end in range(1, len(way) + 1):
                found[way[:end]] = None
        return tuple(found)

    def steps(self) -> tuple[ReshardStep, ...]:
        """Every step that runs, once, trunk first."""
        return tuple(path[-1] for path in self.paths())


def ring_elements(steps: Sequence[ReshardStep], mesh: Mapping[str, int], grad: bool) -> float:
    """Ring bytes per device in elements, forward and (with grad) backward: the yardstick that picks
    hubs. Not a time."""
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
    """The cheapest tree from `source` to all `targets`: each distinct target is converted to once,
    via one shared hub.

    Hubs tried: the source, every target, and every target without its partial gradients; of equals
    the first, without pending sums before any with some, which a loop over repeated blocks cannot
    hand on. None when some target cannot be reached.
    """
    wanted = tuple(dict.fromkeys(targets))
    hubs = sorted(
        dict.fromkeys((source, *wanted, *(Layout(t.dims, t.partial) for t in wanted))),
        key=lambda hub: bool(hub.partial),
    )
    best: tuple[float, ReshardTree] | None = None
    sizes = dict(mesh)
    for hub in hubs:
        trunk = reshard_steps(shape, source, hub, mesh)
        if trunk is None:
            continue
        branches = {t: reshard_steps(shape, hub, t, mesh) for t in wanted if t not in (hub, source)}
        if any(b is None for b in branches.values()):
            continue
        tree = ReshardTree(hub, trunk, {t: b for t, b in branches.items() if b is not None})
        price = ring_elements(tree.steps(), sizes, grad)
        if best is None or price < best[0] - 1e-9:
            best = (price, tree)
    return best[1] if best else None


def require(steps: tuple[ReshardStep, ...] | None, what: str) -> tuple[ReshardStep, ...]:
    """The steps, or a PlanError naming the tensor whose layouts cannot be joined."""
    if steps is None:
        raise PlanError(
            "P040",
            f"no way between the layouts of {what}",
            help=("let the planner choose: remove the pins of its operators",),
        )
    return steps
