"""Helpers that emitted programs carry with them: each program gets the source text of those it uses (planner.emit.source reads this file).

Never imported while planning: it needs jax. Every function sees local shapes; `start` is the global index of the first local element.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def dtype_of(name):
    """The dtype to compute in for an ONNX type: 64-bit integers become 32-bit unless jax runs with x64."""
    return jax.dtypes.canonicalize_dtype(np.dtype(name) if name != "bfloat16" else jnp.bfloat16)


def cut(x, axes, dim):
    """This device's piece of `dim` of a value that is equal over the axes; the gradient is gathered (not summed: all hold the same)."""
    size = x.shape[dim] // lax.axis_size(axes)

    @jax.custom_vjp
    def piece(value):
        return lax.dynamic_slice_in_dim(lax.pcast(value, axes, to="varying"), lax.axis_index(axes) * size, size, dim)

    piece.defvjp(lambda value: (piece(value), None), lambda _, g: (lax.all_gather(g, axes, axis=dim, tiled=True, to="invarying"),))
    return piece(x)


def gather_weight(shard, axes, dim):
    """The weight from its shards; the gradient is reduce-scattered back. Under a checkpoint policy the name keeps it from being saved."""
    return lax.all_gather(shard, axes, axis=dim, tiled=True)


def reduce_gradient(g, sum_axes, scatter_axes, dim):
    """The one reduction of a gradient that is pending over mesh axes: summed, or scattered along `dim` first."""
    if scatter_axes:
        g = lax.psum_scatter(g, scatter_axes, scatter_dimension=dim, tiled=True)
    return lax.psum(g, sum_axes) if sum_axes else g


def local_piece(x, axes, dim):
    """This device's piece of `dim`, without a gradient."""
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(lax.pcast(x, axes, to="varying"), lax.axis_index(axes) * size, size, dim)


def pad_to(x, dim, size):
    """x with `dim` padded by zeros at its end, up to `size`."""
    return jnp.pad(x, [(0, size - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)])


def real_part(x, dim, start, size):
    """x with padding (global index >= size along `dim`) set to zero, so that sums over `dim` are exact."""
    at = start + jnp.arange(x.shape[dim])
    return jnp.where((at < size).reshape((-1,) + (1,) * (x.ndim - dim - 1)), x, 0)


def zeros_for(x):
    """Zeros of x's shape, dtype and mesh type: the start of a sum."""
    axes = tuple(jax.typeof(x).vma)
    zeros = jnp.zeros_like(x)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def truncated_div(a, b):
    """Integer division rounding towards zero, as ONNX and C."""
    return lax.div(*jnp.broadcast_arrays(a, b))


def conv(x, w, strides, pads, dilations, groups):
    """Convolution in ONNX's layout: x [N, C, ...], w [O, C/groups, ...]."""
    return lax.conv_general_dilated(x, w, strides, pads, rhs_dilation=dilations, feature_group_count=groups)


def conv_transpose(x, w, strides, pads, dilations, out, groups):
    """Transposed convolution, x [N, C, ...], w [C, O/groups, ...], to the spatial shape `out`."""
    n = len(strides)
    flipped = jnp.flip(w, tuple(range(2, 2 + n)))
    flipped = flipped.reshape(groups, w.shape[0] // groups, *w.shape[1:]).swapaxes(1, 2).reshape(-1, w.shape[0] // groups, *w.shape[2:])
    padding = []
    for i in range(n):
        reach = dilations[i] * (w.shape[2 + i] - 1)
        low = reach - pads[i]
        padding.append((low, out[i] - ((x.shape[2 + i] - 1) * strides[i] + 1) - low + reach))
    return lax.conv_general_dilated(x, flipped, (1,) * n, padding, lhs_dilation=strides, rhs_dilation=dilations, feature_group_count=groups)


def layer_norm(x, scale, bias, axes, epsilon):
    """Layer normalisation over `axes`, statistics in float32."""
    h = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(h, axes, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), axes, keepdims=True)
    y = ((h - mean) * lax.rsqrt(variance + epsilon)).astype(x.dtype) * scale
    return y if bias is None else y + bias


def rms_norm(x, scale, axes, epsilon):
    """Root-mean-square normalisation over `axes`, statistics in float32."""
    h = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (h * lax.rsqrt(jnp.mean(jnp.square(h), axes, keepdims=True) + epsilon)).astype(x.dtype) * scale


def group_norm(x, scale, bias, groups, epsilon):
    """Normalisation of each of `groups` groups of channels over channels and space; x [N, C, ...]."""
    h = x.reshape(x.shape[0], groups, -1).astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    y = ((h - mean) * lax.rsqrt(variance + epsilon)).astype(x.dtype).reshape(x.shape)
    wide = (-1,) + (1,) * (x.ndim - 2)
    return y * scale.reshape(wide) + bias.reshape(wide)


def batch_norm(x, scale, bias, mean, variance, epsilon):
    """Batch normalisation with given statistics; x [N, C, ...]."""
    wide = (-1,) + (1,) * (x.ndim - 2)
    return (x - mean.reshape(wide)) * (scale * lax.rsqrt(variance + epsilon)).reshape(wide) + bias.reshape(wide)


def batch_norm_live(x, scale, bias, mean, variance, epsilon, momentum, count, axes):
    """Batch normalisation with the statistics of the global batch; returns y and the running mean and variance."""
    wide, rest = (-1,) + (1,) * (x.ndim - 2), (0, *range(2, x.ndim))

    def total(t):
        same = lax.psum(t, axes) if axes else t
        return same, lax.pcast(same, axes, to="varying") if axes else same

    now_same, now = total(jnp.sum(x, rest) / count)
    spread_same, spread = total(jnp.sum(jnp.square(x - now.reshape(wide)), rest) / count)
    y = (x - now.reshape(wide)) * (scale * lax.rsqrt(spread + epsilon)).reshape(wide) + bias.reshape(wide)
    held = [lax.stop_gradient(momentum * old + (1 - momentum) * new) for old, new in ((mean, now_same), (variance, spread_same))]
    return y, *held


def cumsum(x, axis, exclusive, reverse):
    """Running sum along `axis`; exclusive leaves the element itself out; reverse runs from the end."""
    y = lax.cumsum(x, axis, reverse=reverse)
    return y - x if exclusive else y


def top_k(x, k, axis, largest):
    """The k extreme values along `axis`, sorted, and their indices."""
    moved = jnp.moveaxis(x, axis, -1)
    values, indices = lax.top_k(moved if largest else -moved, k)
    return jnp.moveaxis(values if largest else -values, -1, axis), jnp.moveaxis(indices, -1, axis)


def take(table, indices, axis):
    """Rows of `table` along `axis`; negative indices count from the end."""
    size = table.shape[axis]
    return jnp.take(table, jnp.where(indices < 0, indices + size, indices), axis=axis, mode="clip")


def take_shard(table, indices, axis, start, size):
    """Rows of a table of which this device holds those from `start`; zeros for rows held elsewhere, so that a sum over devices is the lookup."""
    local = jnp.where(indices < 0, indices + size, indices) - start
    here = (local >= 0) & (local < table.shape[axis])
    rows = jnp.take(table, jnp.where(here, local, 0), axis=axis, mode="clip")
    wide = (1,) * axis + here.shape + (1,) * (table.ndim - axis - 1)
    return jnp.where(here.reshape(wide), rows, 0)


def gather_nd(data, indices, batch_dims):
    """Slices of `data` at index tuples (the last dim of `indices`), the first `batch_dims` dims shared."""

    def look(d, i):
        sizes = jnp.array(d.shape[: i.shape[-1]], i.dtype)
        i = jnp.where(i < 0, i + sizes, i)
        return d[tuple(jnp.moveaxis(i, -1, 0))]

    for _ in range(batch_dims):
        look = jax.vmap(look)
    return look(data, indices)


def gather_elements(data, indices, axis):
    """Elements of `data` picked along `axis`, other positions as those of `indices`."""
    indices = jnp.where(indices < 0, indices + data.shape[axis], indices)
    cut = data[tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(indices.shape))]
    return jnp.take_along_axis(cut, indices, axis, mode="clip")


def scatter_elements(data, indices, updates, axis, reduction):
    """`data` with `updates` written (or reduced) at `indices` along `axis`."""
    indices = jnp.where(indices < 0, indices + data.shape[axis], indices)
    where = list(jnp.meshgrid(*(jnp.arange(n) for n in indices.shape), indexing="ij"))
    where[axis] = indices
    at = data.at[tuple(where)]
    return {"none": at.set, "add": at.add, "mul": at.multiply, "max": at.max, "min": at.min}[reduction](updates)


def attention(q, k, v, mask, scale, causal, guard, start):
    """Scaled dot-product attention, q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], G dividing H; query 0 here is query `start` of the sequence.

    mask: True = attend, or float terms added to the scores. Rows masked everywhere give zeros when `guard`.
    """
    group = q.shape[1] // k.shape[1]
    grouped = q.reshape(q.shape[0], k.shape[1], group, *q.shape[2:])
    scores = jnp.einsum("bgrsd,bgtd->bgrst", *_same_batch(grouped, k)) * scale
    if mask is not None:
        mask = jnp.broadcast_to(mask, (mask.shape[0] if mask.ndim == 4 else 1, q.shape[1] if mask.ndim > 2 and mask.shape[-3] > 1 else 1, *mask.shape[-2:]))
        mask = mask.reshape(mask.shape[0], *((k.shape[1], group) if mask.shape[1] > 1 else (1, 1)), *mask.shape[2:])
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    if causal:
        ahead = jnp.arange(k.shape[2])[None, :] > start + jnp.arange(q.shape[2])[:, None]
        scores = jnp.where(ahead, -jnp.inf, scores)
    if guard:
        dead = jnp.max(scores, -1, keepdims=True) == -jnp.inf
        weights = jnp.where(dead, 0, jax.nn.softmax(jnp.where(dead, 0, scores), -1))
    else:
        weights = jax.nn.softmax(scores, -1)
    out = jnp.einsum("bgrst,bgte->bgrse", *_same_batch(weights.astype(v.dtype), v))
    return out.reshape(out.shape[0], q.shape[1], *out.shape[3:])


def _same_batch(a, b):
    """Both operands with the larger batch of the two (dim 0)."""
    n = max(a.shape[0], b.shape[0])
    return jnp.broadcast_to(a, (n, *a.shape[1:])), jnp.broadcast_to(b, (n, *b.shape[1:]))


def rotary(x, cos, sin):
    """Rotary embedding of x [..., D], halves of D rotated into each other; cos and sin broadcast to x."""
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


def max_pool(x, kernel, strides, pads, dilations, out):
    """Max pooling over the spatial dims of x [N, C, ...] to the spatial shape `out`."""
    window = _window(x, kernel, strides, pads, dilations, out)
    low = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return lax.reduce_window(x, low, lax.max, *window)


def average_pool(x, kernel, strides, pads, dilations, out, count_include_pad):
    """Average pooling; padding counts in the divisor only where asked."""
    window = _window(x, kernel, strides, pads, dilations, out)
    total = lax.reduce_window(x, 0.0, lax.add, *window)
    if not count_include_pad:
        ones = jnp.ones((1, 1, *x.shape[2:]), x.dtype)
        return total / lax.reduce_window(ones, 0.0, lax.add, *window)
    n = len(kernel)
    inside = jnp.pad(jnp.ones(x.shape[2:], x.dtype), [(pads[i], pads[i + n]) for i in range(n)], constant_values=1)[None, None]
    spare = [(0, 0), (0, 0)] + [(0, w[1] - pads[i + n]) for i, w in enumerate(window[2][2:])]
    return total / lax.reduce_window(inside, 0.0, lax.add, window[0], window[1], spare, None, window[4])


def _window(x, kernel, strides, pads, dilations, out):
    """Arguments of reduce_window; the end padding is what `out` needs (ceil mode included)."""
    n = len(kernel)
    ends = [(out[i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - x.shape[2 + i] - pads[i] for i in range(n)]
    padding = [(0, 0), (0, 0)] + [(pads[i], ends[i]) for i in range(n)]
    return (1, 1, *kernel), (1, 1, *strides), padding, None, (1, 1, *dilations)


def resize(x, out, scales, mode, coordinate, nearest):
    """Resize of the spatial dims of x [N, C, ...] to `out`, nearest or linear, dim by dim."""
    for i, (n, s) in enumerate(zip(out, scales, strict=True)):
        size, dim = x.shape[2 + i], 2 + i
        at = np.arange(n, dtype=np.float64)
        if coordinate == "align_corners":
            at = at * (size - 1) / max(n - 1, 1)
        elif coordinate == "asymmetric":
            at = at / s
        elif coordinate == "pytorch_half_pixel" and n == 1:
            at = at * 0
        else:
            at = (at + 0.5) / s - 0.5
        if mode == "nearest":
            pick = {"floor": np.floor, "ceil": np.ceil, "round_prefer_ceil": lambda v: np.floor(v + 0.5)}.get(nearest, lambda v: np.ceil(v - 0.5))
            x = jnp.take(x, np.clip(pick(at), 0, size - 1).astype(np.int32), axis=dim)
        else:
            low = np.floor(at).astype(np.int32)
            part = (at - low).astype(np.float32).reshape((-1,) + (1,) * (x.ndim - dim - 1))
            a, b = (jnp.take(x, np.clip(low + k, 0, size - 1), axis=dim) for k in (0, 1))
            x = a * (1 - part).astype(x.dtype) + b * part.astype(x.dtype)
    return x


def lstm(x, w, r, b, h0, c0, direction):
    """ONNX LSTM (gates i, o, f, c), x [S, B, I], w [D, 4H, I], r [D, 4H, H]: y [S, D, B, H], y_h and y_c [D, B, H]."""
    hidden = r.shape[2]

    def run(k, sequence):
        bias = 0 if b is None else b[k, : 4 * hidden] + b[k, 4 * hidden :]
        gates = jnp.einsum("sbi,gi->sbg", sequence, w[k]) + bias
        zero = gates[0, :, :hidden] * 0
        first = (zero if h0 is None else h0[k] + zero, zero if c0 is None else c0[k] + zero)

        def tick(carry, g):
            h, c = carry
            i, o, f, n = jnp.split(g + h @ r[k].T, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(n)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        (h, c), y = lax.scan(tick, first, gates)
        return y, h, c

    outs = []
    for k, backwards in enumerate({"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]):
        y, h, c = run(k, x[::-1] if backwards else x)
        outs.append((y[::-1] if backwards else y, h, c))
    ys, hs, cs = zip(*outs, strict=True)
    return jnp.stack(ys, 1), jnp.stack(hs), jnp.stack(cs)


def cross_entropy(logits, labels, axis, vocab_axes, start, valid, mask, count):
    """Sum over local rows of -log softmax(logits)[label], divided by the global `count` of rows.

    With `vocab_axes` the classes are cut: this device holds those from `start`. `valid`: number of real classes when the last piece is
    padded. `mask`: real rows. Float32 throughout.
    """
    h = jnp.moveaxis(logits, axis, -1).astype(jnp.promote_types(logits.dtype, jnp.float32))
    if valid is not None:
        h = jnp.where(start + jnp.arange(h.shape[-1]) < valid, h, -jnp.inf)
    top = lax.stop_gradient(jnp.max(h, -1))
    if vocab_axes:
        top = lax.pmax(top, vocab_axes)
    total = jnp.sum(jnp.exp(h - top[..., None]), -1)
    local = labels - start
    here = (local >= 0) & (local < h.shape[-1])
    picked = jnp.take_along_axis(h, jnp.where(here, local, 0)[..., None], -1)[..., 0]
    picked = jnp.where(here, picked, 0)
    if vocab_axes:
        total, picked = lax.psum(total, vocab_axes), lax.psum(picked, vocab_axes)
    loss = jnp.log(total) + top - picked
    return jnp.sum(loss if mask is None else jnp.where(mask, loss, 0)) / count
