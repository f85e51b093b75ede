"""Images whose rows are cut: windows read rows of the neighbours' pieces, which each device brings
in; statistics are of all pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.emit.runtime.kernels.nets import divisors, window_sums


def halo(x, dim, before, after, axes, fill):
    """x with the last `before` rows of the piece before it and the first `after` rows of the next
    along `dim`; `fill` at the ends of the image."""
    n, size, here = lax.axis_size(axes), x.shape[dim], lax.axis_index(axes)
    parts = [x]
    if before:
        last = lax.ppermute(
            lax.slice_in_dim(x, size - before, size, axis=dim),
            axes,
            [(j, j + 1) for j in range(n - 1)],
        )  # zeros where nothing arrives
        parts.insert(0, last if fill == 0 else jnp.where(here == 0, fill, last))
    if after:
        first = lax.ppermute(
            lax.slice_in_dim(x, 0, after, axis=dim), axes, [(j + 1, j) for j in range(n - 1)]
        )
        parts.append(first if fill == 0 else jnp.where(here == n - 1, fill, first))
    return jnp.concatenate(parts, dim)


# Many parameters: the attributes of ONNX's AveragePool, and where the rows are cut.
def average_pool_rows(
    x, kernel, strides, pads, dilations, out, count_include_pad, dim, low, size, start
):
    """`average_pool` where spatial dim `dim` is cut: x has the neighbours' rows, the image has
    `size` rows and begins with `low` of padding, and the first window here is window `start` of
    it."""
    total = window_sums(x, kernel, strides, pads, dilations, out)
    shapes, n = list(x.shape[2:]), len(kernel)
    for i in range(n):
        if i != dim:
            counts = divisors(
                shapes[i],
                out[i],
                kernel[i],
                strides[i],
                pads[i],
                pads[i + n],
                dilations[i],
                count_include_pad,
            )
        else:
            every = divisors(
                size,
                size // strides[i],
                kernel[i],
                strides[i],
                low,
                pads[i + n],
                dilations[i],
                count_include_pad,
            )
            counts = lax.dynamic_slice_in_dim(jnp.asarray(every), start, out[i])
        total = total / jnp.asarray(counts, x.dtype).reshape(
            [-1 if k == i else 1 for k in range(n)]
        )
    return total


def group_norm_rows(x, scale, bias, groups, epsilon, count, axes):
    """`group_norm` where rows are cut over `axes`: statistics of `count` elements a group, of all
    pieces together. Kept for the backward pass are x, scale and the statistics."""
    wide, shape = (-1,) + (1,) * (x.ndim - 2), (x.shape[0], groups, -1)

    def parted(t):
        return t.reshape(shape).astype(jnp.promote_types(t.dtype, jnp.float32))

    def total(t):
        return checkpoint_name(lax.psum(jnp.sum(t, -1, keepdims=True), axes), "collective") / count

    def statistics(x):
        h = parted(x)
        mean = total(h)
        return mean, lax.rsqrt(total(jnp.square(h - mean)) + epsilon)

    def normal(x, mean, root):
        return ((parted(x) - mean) * root).reshape(x.shape)

    @jax.custom_vjp
    def run(x, scale, bias):
        return forward(x, scale, bias)[0]

    def forward(x, scale, bias):
        known = statistics(x)
        return normal(x, *known).astype(x.dtype) * scale.reshape(wide) + bias.reshape(wide), (
            x,
            scale,
            bias,
            *known,
        )

    def backward(kept, g):
        x, scale, bias, mean, root = kept
        y, rest = normal(x, mean, root), (0, *range(2, x.ndim))
        inner = parted(g * scale.reshape(wide))
        sums = (
            lax.psum(
                jnp.stack(
                    [
                        jnp.sum(inner, -1, keepdims=True),
                        jnp.sum(inner * parted(y), -1, keepdims=True),
                    ]
                ),
                axes,
            )
            / count
        )
        dx = ((inner - sums[0] - parted(y) * sums[1]) * root).reshape(x.shape)
        return (
            dx.astype(x.dtype),
            jnp.sum(g * y, rest).astype(scale.dtype),
            jnp.sum(g, rest).astype(bias.dtype),
        )

    run.defvjp(forward, backward)
    return run(x, scale, bias)
