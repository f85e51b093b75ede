"""What a mask is, when it depends on constants alone.

A mask of [B, H, S, T] booleans is large, but made by broadcasting small ones. `small` evaluates it
with every dim along which it does not change kept at size 1; `left` compares what remains with the
lower triangle and with bands along the diagonal.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from planner.ops.attention_pairs import Positions
from planner.reader.draft.draft import Draft
from planner.reader.draft.fold import evaluate
from planner.reader.draft.shapes import ARITHMETIC, COMPARE, LOGIC

MOST = 1 << 26
MASKED = -6e4
"""A score this low or lower counts as masked: the lowest float16 is -65504."""
LOWEST = {"float16": -65504.0, "bfloat16": -3.3895e38, "float32": -3.4028e38}
"""About the lowest number of each type, which exporters write for one that hides a key where torch
has minus infinity."""
_POINTWISE = ARITHMETIC | COMPARE | LOGIC | {"Where", "Cast", "Not", "Neg", "Abs"}


class Masks:
    """Remembers what was found per tensor: all layers share one mask."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.known: dict[str, np.ndarray | None] = {}
        self.kinds: dict[tuple[str, int, int], Positions | None] = {}

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
            value = draft.value(name)
            return None if value is None else collapse(value)
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
            results = evaluate(op.op, op.attrs, arrays, [(shape, draft.dtype(name))])
            return None if results is None else results[0]
        value = draft.value(name)
        return None if value is None else collapse(value)

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

    def left(self, name: str, s: int, t: int) -> Positions | None:
        """What a mask leaves of the keys by positions alone; None where it is another constant, or
        none.

        Booleans: True attends. Floats: 0 attends, MASKED or lower does not.
        """
        key = (name, s, t)
        if key not in self.kinds:
            self.kinds[key] = self._left(name, s, t)
        return self.kinds[key]

    def _learned(self, name: str) -> bool:
        """Whether a mask is made of a parameter, such as a table of relative positions: zeros in it
        are where training starts."""
        draft, stack, seen = self.draft, [name], {name}
        while stack:
            top = stack.pop()
            if draft.is_leaf(top) and draft.is_float(top) and draft.records.named(top):
                return True
            op = draft.maker.get(top)
            for i in op.inputs if op is not None else ():
                if i and i not in seen:
                    seen.add(i)
                    stack.append(i)
        return False

    def _left(self, name: str, s: int, t: int) -> Positions | None:
        if self.draft.is_float(name) and self._learned(name):
            return None
        if (fast := self._compared(name, s, t)) is not None:
            return fast
        value = self.small(name)
        if value is None:
            return None
        if value.dtype != np.bool_:
            attend = value == 0
            if not bool((attend | (value.astype(np.float64) <= MASKED)).all()):
                return None
            value = attend
        return band(collapse(value), s, t)

    def _compared(self, name: str, s: int, t: int) -> Positions | None:
        """What comparing a row of positions with a column leaves, without making the square."""
        op = self.draft.maker.get(name)
        if op is None or op.op not in _TURNED or s != t or s < 2:
            return None
        a, b = (self.small(i) for i in op.inputs)
        relation = op.op
        if a is not None and a.shape[-1:] != (t,):
            a, b, relation = b, a, _TURNED[relation]
        if a is None or b is None or a.size != t or b.size != s:
            return None
        if a.shape[-1] != t or b.ndim < 2 or b.shape[-2] != s:
            return None
        k, q = a.reshape(-1), b.reshape(-1)
        if bool((np.diff(k) == 1).all() and (np.diff(q) == 1).all()):
            return _between(relation, int(q[0] - k[0]), t)
        rising = bool((k <= q).all() and (q[:-1] < k[1:]).all() and (np.diff(k) > 0).all())
        return Positions(causal=True) if relation == "LessOrEqual" and rising else None


_TURNED = {
    "Less": "Greater",
    "LessOrEqual": "GreaterOrEqual",
    "Greater": "Less",
    "GreaterOrEqual": "LessOrEqual",
}
"""Comparisons, and what they are with their operands in the other order."""


def _between(relation: str, offset: int, keys: int) -> Positions | None:
    """What `key j <relation> query i + offset` leaves."""
    if relation in ("Less", "LessOrEqual"):
        return Positions(causal=True) if offset == (relation == "Less") else None
    window = (relation == "GreaterOrEqual") - offset
    if window < 1:
        return None
    return Positions(window=window if window < keys else 0)


def band(value: np.ndarray, s: int, t: int) -> Positions | None:
    """What a boolean mask given with unchanging dims of size 1 leaves by positions alone."""
    if bool(value.all()):
        return Positions()
    if s != t or math.prod(value.shape[:-2]) != 1 or value.shape[-2:] != (s, t):
        return None
    value = value.reshape(s, t)
    causal, before = not value[0, -1], int(value[-1].argmax())
    expected = np.tri(s, dtype=bool) if causal else np.ones((s, t), bool)
    if before:
        expected &= ~np.tri(s, k=before - s, dtype=bool)
    if not bool((value == expected).all()):
        return None
    return Positions(causal, s - before if before else 0)


def collapse(array: np.ndarray) -> np.ndarray:
    """The array with every dim along which it does not change reduced to size 1."""
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            first = array.take([0], axis)
            if bool((array == first).all()):
                array = first
    return array


def without_positions(
    masks: Masks, attrs: dict[str, Any], names: list[str], s: int, t: int
) -> list[str]:
    """The masks that apply together without those that say by positions alone which keys are seen;
    these become attributes where there are attributes for what they leave."""
    positions_of = {name: masks.left(name, s, t) for name in names}
    seen = Positions(bool(attrs["causal"]), attrs.get("window", 0))
    for positions in positions_of.values():
        seen &= positions or Positions()
    if not seen.known:  # a window that goes on after the query
        seen = replace(seen, window=0)
        positions_of = {
            name: None if positions and positions.window else positions
            for name, positions in positions_of.items()
        }
    attrs["causal"] = int(seen.causal)
    if seen.window:
        attrs["window"] = seen.window
    return [name for name, positions in positions_of.items() if positions is None]
