"""Products with weights whose operands are float8, scaled tensor by tensor by the largest value of
now ("current scaling"): e4m3 for values, e5m2, which has the longer range, for gradients. Sums are
float32, the result has the type of the operands.

Each device scales its own pieces. Nothing is sent in float8, so that no two devices need the same
scale: what a device has is its product, or its part of a sum, in any case, and pieces are never
scaled more coarsely than the whole.

Programs that serve keep the weights themselves in float8, with a scale for each column that the
program multiplies results by, and scale rows of activations each by its own largest value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import alike

VALUES, CHANGES = jnp.float8_e4m3fn, jnp.float8_e5m2


def dot8(x, w, transposed=False):
    """x [..., k] times a weight [k, n], or [n, k] transposed, in float8; float32 operands in
    float32. The backward pass keeps the operands, and makes them float8 again."""
    if x.dtype == jnp.float32:
        return jnp.matmul(x, w.T if transposed else w)
    rows, columns = (1, 0) if transposed else (0, 1)

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        scales = scale8(x, VALUES), scale8(w, VALUES)
        y = times8(
            (in_float8(x, scales[0], VALUES), scales[0]),
            (in_float8(w, scales[1], VALUES), scales[1]),
            ((x.ndim - 1,), (rows,)),
        )
        return y.astype(x.dtype), (x, w, scales)

    def backward(saved, g):
        x, w, scales = saved
        scale = scale8(g, CHANGES)
        g8 = in_float8(g, scale, CHANGES), scale
        x8 = in_float8(x, scales[0], VALUES), scales[0]
        w8 = in_float8(w, scales[1], VALUES), scales[1]
        all_rows = tuple(range(x.ndim - 1)), tuple(range(x.ndim - 1))
        dx = times8(g8, w8, ((x.ndim - 1,), (columns,)))
        dw = times8(g8, x8, all_rows) if transposed else times8(x8, g8, all_rows)
        return dx.astype(x.dtype), dw.astype(w.dtype)

    product.defvjp(forward, backward)
    return product(*alike((x, w)))


def scale8(x, dtype):
    """What values of x are divided by, so that the largest is the largest of a float8 type."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return jnp.where(largest == 0, 1.0, largest / float(jnp.finfo(dtype).max))


def in_float8(x, scale, dtype):
    """x / scale in a float8 type."""
    return (x.astype(jnp.float32) / scale).astype(dtype)


def times8(a, b, contracted):
    """The product of two float8 arrays with their scales, summed over the dims `contracted` of
    each, in float32."""
    sums = lax.dot_general(a[0], b[0], (contracted, ((), ())), preferred_element_type=jnp.float32)
    return sums * (a[1] * b[1])


def rows8(x, w, transposed=False):
    """x [..., k] times a weight that is kept in float8, [k, n], or [n, k] transposed, without the
    scales of its columns; x in float8 row by row, where it is not float32."""
    if x.dtype == jnp.float32:
        w = w.astype(jnp.float32)
        return jnp.matmul(x, w.T if transposed else w)
    x8, scale = in_rows8(x)
    contracted = (x.ndim - 1,), (1 if transposed else 0,)
    return times8((x8, scale), (w, 1.0), contracted).astype(x.dtype)


def in_rows8(x):
    """(x [..., k] in float8, what each row was divided by [..., 1])."""
    largest = jnp.max(jnp.abs(x), -1, keepdims=True).astype(jnp.float32)
    scale = jnp.where(largest == 0, 1.0, largest / float(jnp.finfo(VALUES).max))
    return in_float8(x, scale, VALUES), scale
