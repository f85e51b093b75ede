"""Rewrites of stored weights: what `WeightRef.transform` lists, applied after loading.

("reshape", shape)                            the array in another shape
("transpose", perm)                           its dims permuted
("slice", (axis, start, stop, step))          a part of it along one dim
("rebatch", (axis, major, old, minor, new))   lengthened along a dim of major * old * minor
elements, old being a batch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planner.errors import PlanError


def transformed(
    array: np.ndarray, steps: Iterable[tuple[str, tuple[int, ...]]], name: str
) -> np.ndarray:
    """The array after all steps. Raises PlanError for a constant that cannot follow another
    batch."""
    for kind, arg in steps:
        if kind == "reshape":
            array = array.reshape(arg)
        elif kind == "transpose":
            array = array.transpose(arg)
        elif kind == "slice":
            axis, start, stop, step = arg
            array = array[(slice(None),) * axis + (slice(start, stop, step),)]
        else:
            array = lengthen(array, arg, name)
    return array


def lengthen(array: np.ndarray, step: tuple[int, ...], name: str) -> np.ndarray:
    """A constant for another batch: `step` is (axis, major, old, minor, new). Raises PlanError when
    it does not say how it goes on.

    Repeating values repeat; integers that grow by one amount per sample go on growing, each at its
    own rate (index tables hold the sample beside positions). From a batch of 2 only rates of 0 and
    1 are believed.
    """
    axis, major, old, minor, new = step
    shape = array.shape
    parts = array.reshape(*shape[:axis], major, old, minor, *shape[axis + 1 :])
    sample_axis = axis + 1
    first = parts.take([0], sample_axis)
    longer = None
    if bool((parts == first).all()):
        longer = np.repeat(first, new, sample_axis)
    elif array.dtype.kind in "iu":
        delta = parts.take([1], sample_axis) - first
        line = [-1 if k == sample_axis else 1 for k in range(parts.ndim)]
        counts = np.arange(old).reshape(line)
        believed = old > 2 or bool(((delta == 0) | (delta == 1)).all())
        if believed and bool((parts == first + delta * counts).all()):
            longer = first + delta * np.arange(new).reshape(line)
    if longer is None:
        raise PlanError(
            "P146",
            f"cannot change the exported batch of {old}: constant {name!r} of shape {list(shape)}"
            " depends on it",
            detail=[f"its dim {axis} holds the batch, and its values neither repeat nor count"],
            help=[f"plan with --batch {old}, or export with a dynamic batch"],
        )
    return longer.astype(array.dtype).reshape(
        *shape[:axis], major * new * minor, *shape[axis + 1 :]
    )


Axes = tuple[str, ...]


def stored_axes(
    dims: Sequence[Axes], shape: tuple[int, ...], steps: Sequence[tuple[str, tuple[int, ...]]]
) -> list[Axes]:
    """The mesh axes that cut each dim of a weight as it is stored, from those that cut it after all
    steps. shape: as it is stored. A cut that the stored weight cannot have (of a part of what a
    reshape has joined, along a dim that was sliced) is left out: there it is whole."""
    shapes = [shape]
    for kind, arg in steps:
        shapes.append(_shape_after(shapes[-1], kind, arg))
    cuts = list(dims)
    for (kind, arg), before, after in zip(
        reversed(steps), shapes[-2::-1], shapes[::-1], strict=False
    ):
        if kind == "reshape":
            cuts = _before_reshape(cuts, before, after)
        elif kind == "transpose":
            cuts = [cuts[arg.index(d)] for d in range(len(before))]
        else:
            cuts[arg[0]] = ()
    return cuts


def _shape_after(shape: tuple[int, ...], kind: str, arg: tuple[int, ...]) -> tuple[int, ...]:
    if kind == "reshape":
        return arg
    if kind == "transpose":
        return tuple(shape[d] for d in arg)
    axis, long = arg[0], len(range(*arg[1:])) if kind == "slice" else arg[1] * arg[4] * arg[3]
    return (*shape[:axis], long, *shape[axis + 1 :])


def _before_reshape(
    dims: Sequence[Axes], before: tuple[int, ...], after: tuple[int, ...]
) -> list[Axes]:
    """Dims that have as many elements on both sides belong together, and the first of them can be
    cut on either."""
    cuts: list[Axes] = [()] * len(before)
    i = j = 0
    while i < len(before) and j < len(after):
        first, cut, a, b = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        # Dims of one are not cut: the first that can be.
        old = next((d for d in range(first, i) if before[d] > 1), first)
        new = next((d for d in range(cut, j) if after[d] > 1), cut)
        cuts[old] = dims[new]
    return cuts
