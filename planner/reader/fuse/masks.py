"""What a mask is, when it depends on constants alone.

A mask of [B, H, S, T] booleans is large, but made by broadcasting small ones. `small` evaluates it
with every dim along which it does not change kept at size 1; `causal` compares what is left with
the lower triangle.
"""

from __future__ import annotations

import math

import numpy as np

from planner.reader.draft.draft import Draft
from planner.reader.draft.fold import evaluate
from planner.reader.draft.shapes import ARITHMETIC, COMPARE, LOGIC

MOST = 1 << 26
MASKED = -6e4
"""A score this low or lower counts as masked: the lowest float16 is -65504."""
_POINTWISE = ARITHMETIC | COMPARE | LOGIC | {"Where", "Cast", "Not", "Neg", "Abs"}


class Masks:
    """Remembers what was found per tensor: all layers share one mask."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.known: dict[str, np.ndarray | None] = {}
        self.kinds: dict[tuple[str, int, int], str] = {}

    def small(self, name: str, depth: int = 0) -> np.ndarray | None:
        """The tensor's value, of its rank, with unchanging dims of size 1; None when unknown or too
        large."""
        if name not in self.known:
            self.known[name] = None
            self.known[name] = self._small(name, depth)
        return self.known[name]

    def _small(self, name: str, depth: int) -> np.ndarray | None:
        draft, op = self.draft, self.draft.maker.get(name)
        rank = len(draft.shape(name))
        if draft.is_leaf(name):
            found = draft.value(name)
            return None if found is None else collapse(found)
        if op is None or depth > 60:
            return None
        if op.op == "Expand":
            inner = self.small(op.inputs[0], depth + 1)
            return (
                None if inner is None else inner.reshape((1,) * (rank - inner.ndim) + inner.shape)
            )
        if op.op == "Transpose":
            inner = self.small(op.inputs[0], depth + 1)
            return None if inner is None else inner.transpose(op.attrs["perm"])
        if op.op == "Reshape":
            moved = self._reshaped(op.inputs[0], draft.shape(name), depth)
            if moved is not None:
                return moved
        if op.op in _POINTWISE:
            parts = [self.small(i, depth + 1) for i in op.inputs]
            if any(p is None for p in parts):
                return None
            arrays = [p.reshape((1,) * (rank - p.ndim) + p.shape) for p in parts if p is not None]
            shape = np.broadcast_shapes(*(a.shape for a in arrays))
            if math.prod(shape) > MOST:
                return None
            made = evaluate(op.op, op.attrs, arrays, [(shape, draft.dtype(name))])
            return None if made is None else made[0]
        found = draft.value(name)
        return None if found is None else collapse(found)

    def _reshaped(self, source: str, target: tuple[int, ...], depth: int) -> np.ndarray | None:
        """A Reshape that only adds or removes dims of 1."""
        shape = self.draft.shape(source)
        if [n for n in shape if n != 1] != [n for n in target if n != 1]:
            return None
        inner = self.small(source, depth + 1)
        if inner is None:
            return None
        kept = iter(k for n, k in zip(shape, inner.shape, strict=True) if n != 1)
        return inner.reshape(tuple(1 if n == 1 else next(kept) for n in target))

    def kind(self, name: str, s: int, t: int) -> str:
        """'all' (masks nothing), 'causal' (exactly the lower triangle), 'some' (another constant),
        or '' (not constant).

        Booleans: True attends. Floats: 0 attends, MASKED or lower does not; other values make it
        'some'.
        """
        key = (name, s, t)
        if key not in self.kinds:
            self.kinds[key] = self._kind(name, s, t)
        return self.kinds[key]

    def _learned(self, name: str) -> bool:
        """Whether a mask is made of a parameter, such as a table of relative positions: zeros in it
        are where training starts."""
        draft, left, seen = self.draft, [name], {name}
        while left:
            top = left.pop()
            if draft.is_leaf(top) and draft.is_float(top) and draft.records.named(top):
                return True
            op = draft.maker.get(top)
            for i in op.inputs if op is not None else ():
                if i and i not in seen:
                    seen.add(i)
                    left.append(i)
        return False

    def _kind(self, name: str, s: int, t: int) -> str:
        if self.draft.is_float(name) and self._learned(name):
            return ""
        if (fast := self._compared(name, s, t)) is not None:
            return fast
        value = self.small(name)
        if value is None:
            return ""
        if value.dtype != np.bool_:
            attend = value == 0
            if not bool((attend | (value.astype(np.float64) <= MASKED)).all()):
                return "some"
            value = attend
        return triangle(collapse(value), s, t)

    def _compared(self, name: str, s: int, t: int) -> str | None:
        """The lower triangle from comparing a row of positions with a column, without making the
        square."""
        op = self.draft.maker.get(name)
        if op is None or op.op not in ("LessOrEqual", "GreaterOrEqual") or s != t:
            return None
        key, query = op.inputs if op.op == "LessOrEqual" else op.inputs[::-1]
        k, q = self.small(key), self.small(query)
        if (
            k is None
            or q is None
            or k.size != t
            or q.size != s
            or s < 2
            or k.shape[-1] != t
            or q.ndim < 2
            or q.shape[-2] != s
        ):
            return None
        k, q = k.reshape(-1), q.reshape(-1)
        if bool((k <= q).all() and (q[:-1] < k[1:]).all() and (np.diff(k) > 0).all()):
            return "causal"
        return None


def triangle(value: np.ndarray, s: int, t: int) -> str:
    """Kind of a boolean mask given with unchanging dims of size 1."""
    if bool(value.all()):
        return "all"
    if (
        s == t
        and math.prod(value.shape[:-2]) == 1
        and value.shape[-2:] == (s, t)
        and bool((value.reshape(s, t) == np.tri(s, dtype=bool)).all())
    ):
        return "causal"
    return "some"


def collapse(array: np.ndarray) -> np.ndarray:
    """The array with every dim along which it does not change reduced to size 1."""
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            first = array.take([0], axis)
            if bool((array == first).all()):
                array = first
    return array
