"""Keys and random bits of JAX functions: what they depend on and how large they are.

What a drawn mask leaves out is Dropout. Otherwise a key is a number here, and what is drawn with it
that number over a whole shape. The hashing itself, some twenty integer operations an element, is in
no price, and no values are those of jax.random.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.reader.jax.primitives import PRIMITIVES, as_type, primitive
from planner.reader.jax.trace import Trace, Value

__all__ = ["PRIMITIVES"]

KEY = np.uint32
STEPS = 64
"""Nodes between drawn bits and a mask that is made of them, at most (a dozen in jax.random)."""


def _spread(t: Trace, key: Value, shape: tuple[int, ...]) -> Value:
    """A key over the trailing dims of a shape."""
    result = t.reshape(key, (*key.shape, *(1,) * (len(shape) - len(key.shape))))
    if result.shape == shape:
        return result
    return t.node("Expand", [result, t.constant(np.array(shape, np.int64))], shape, KEY)


@primitive("random_bits")
def _bits(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    if p["bit_width"] not in (8, 16, 32):
        return None
    bits = _spread(t, x[0], tuple(out[0].shape))
    drawn = t.node("Identity", [bits], bits.shape, KEY)
    t.drawn.add(drawn.name)
    return [drawn if p["bit_width"] == 32 else as_type(t, drawn, out[0].dtype)]


_chosen = PRIMITIVES["select_n"]


@primitive("select_n")
def _select(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """Zeros where a drawn mask says so are dropped."""
    if len(x) != 3 or _number(t, x[1]) != 0 or not (keep := _kept(t, x[0])):
        return _chosen(t, p, x, out)
    options = [t.constant(np.asarray(1 - keep, np.float32)), t.constant(np.asarray(True))]
    return [t.node("Dropout", [x[2], *options], out[0].shape, out[0].dtype)]


def _number(t: Trace, v: Value) -> float | None:
    """The number that all elements of a constant are."""
    from onnx import numpy_helper

    name = v.name
    while name not in t.initializers:
        maker = t.makers.get(name)
        if maker is None or maker.op_type not in ("Expand", "Cast", "Reshape"):
            return None
        name = maker.input[0]
    if t.initializers[name].external_data:
        return None
    array = numpy_helper.to_array(t.initializers[name])
    first = array.reshape(-1)[:1]
    return float(first[0]) if first.size and bool((array == first).all()) else None


def _kept(t: Trace, mask: Value) -> float:
    """The share that a mask keeps which is made of drawn bits and constants alone; 0 for any
    other."""
    share, drawn, stack, seen = 0.5, False, [mask.name], 0
    while stack:
        name, seen = stack.pop(), seen + 1
        if name in t.drawn:
            drawn = True
            continue
        if name in t.initializers and not t.initializers[name].external_data:
            continue
        maker = t.makers.get(name)
        if maker is None or seen > STEPS:
            return 0.0
        if maker.op_type == "Less" and maker.input[1] in t.initializers:
            bound = _number(t, Value(maker.input[1], (), np.dtype(np.float32)))
            share = bound if bound is not None and 0 < bound < 1 else share
        stack.extend(maker.input)
    return share if drawn else 0.0


@primitive("random_split", "random_unwrap")
def _split(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [_spread(t, x[0], tuple(out[0].shape))]


@primitive("random_fold_in")
def _fold_in(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    """Another key: what is drawn with it is not what is drawn with the first."""
    return [t.node("BitwiseXor", [x[0], as_type(t, x[1], KEY)], out[0].shape, KEY)]


@primitive("random_seed")
def _seed(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    return [as_type(t, x[0], KEY)]


@primitive("random_wrap")
def _wrap(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value]:
    """The first of a key's words."""
    last = len(x[0].shape) - 1
    cut = [t.constant(np.array([k], np.int64)) for k in (0, 1, last)]
    first = t.node("Slice", [x[0], *cut], (*x[0].shape[:-1], 1), KEY)
    return [t.reshape(first, out[0].shape)]


@primitive("shift_right_logical")
def _shift_right(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    if np.dtype(out[0].dtype).kind != "u":
        return None
    operands = t.bare(x, out[0].shape)
    return [t.node("BitShift", operands, out[0].shape, out[0].dtype, direction="RIGHT")]


@primitive("bitcast_convert_type")
def _bitcast(t: Trace, p: Any, x: list[Value], out: list[Any]) -> list[Value] | None:
    """Of one width: as many bytes as a cast reads and writes."""
    if np.dtype(out[0].dtype).itemsize != np.dtype(x[0].dtype).itemsize:
        return None
    return [as_type(t, x[0], out[0].dtype)]
