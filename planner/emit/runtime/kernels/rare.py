"""Operators of rarer models, on local pieces."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.kernels.kernels import written_at


def is_inf(x, negative, positive):
    """Whether each element is infinite, of the signs asked for."""
    return (jnp.isneginf(x) if negative else False) | (
        jnp.isposinf(x) if positive else jnp.zeros(x.shape, bool)
    )


def shrink(x, bias, bound):
    """Zero within [-bound, bound], moved towards zero by `bias` outside."""
    return jnp.where(x < -bound, x + bias, jnp.where(x > bound, x - bias, 0)).astype(x.dtype)


def local_response(x, size, alpha, beta, bias):
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels)^beta; x [N, C,
    ...]."""
    low = (size - 1) // 2
    rest = [(0, 0)] * (x.ndim - 2)
    total = lax.reduce_window(
        jnp.square(x),
        0.0,
        lax.add,
        (1, size) + (1,) * (x.ndim - 2),
        (1,) * x.ndim,
        [(0, 0), (low, size - 1 - low), *rest],
    )
    return x / jnp.power(bias + alpha / size * total, beta)


def lp_normalize(x, axis, p):
    """x over its 1- or 2-norm along `axis`; rows of zeros stay zero."""
    power = jnp.sum(jnp.abs(x) if p == 1 else jnp.square(x), axis, keepdims=True)
    norm = power if p == 1 else jnp.sqrt(jnp.where(power == 0, 1, power))
    return jnp.where(power == 0, 0, x / jnp.where(norm == 0, 1, norm)).astype(x.dtype)


def hardmax(x, axis):
    """One where the first maximum along `axis` is, else zero."""
    where = jnp.expand_dims(jnp.argmax(x, axis), axis)
    return (where == lax.broadcasted_iota(where.dtype, x.shape, axis % x.ndim)).astype(x.dtype)


def scatter_nd(data, indices, updates, reduction):
    """`data` with slices written (or reduced) at the index tuples in the last dim of `indices`."""
    sizes = jnp.array(data.shape[: indices.shape[-1]], indices.dtype)
    where = tuple(jnp.moveaxis(jnp.where(indices < 0, indices + sizes, indices), -1, 0))
    return written_at(data.at[where], updates, reduction)
