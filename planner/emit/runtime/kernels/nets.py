"""Operators of convolutional and recurrent nets, on local pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.emit.runtime.collectives.exchange import lean, never


def conv(x, w, strides, pads, dilations, groups):
    """Convolution in ONNX's layout: x [N, C, ...], w [O, C/groups, ...]."""
    return lax.conv_general_dilated(
        x, w, strides, pads, rhs_dilation=dilations, feature_group_count=groups
    )


def conv_step(past, x, w):
    """The last position of a convolution of each channel over earlier rows past [B, C, K-1] and x
    [B, C, 1], by w [C, 1, K]; and the rows but for the first."""
    rows = jnp.concatenate([past.astype(x.dtype), x], 2)
    sums = jnp.sum(rows.astype(jnp.float32) * w[:, 0].astype(jnp.float32), 2, keepdims=True)
    return sums.astype(x.dtype), rows[:, :, 1:]


def conv_transpose(x, w, strides, pads, dilations, out, groups):
    """Transposed convolution, x [N, C, ...], w [C, O/groups, ...], to the spatial shape `out`."""
    n = len(strides)
    flipped = jnp.flip(w, tuple(range(2, 2 + n)))
    flipped = (
        flipped.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        .swapaxes(1, 2)
        .reshape(-1, w.shape[0] // groups, *w.shape[2:])
    )
    padding = []
    for i in range(n):
        reach = dilations[i] * (w.shape[2 + i] - 1)
        low = reach - pads[i]
        padding.append((low, out[i] - ((x.shape[2 + i] - 1) * strides[i] + 1) - low + reach))
    return lax.conv_general_dilated(
        x,
        flipped,
        (1,) * n,
        padding,
        lhs_dilation=strides,
        rhs_dilation=dilations,
        feature_group_count=groups,
    )


def group_norm(x, scale, bias, groups, epsilon):
    """Normalisation of each of `groups` groups of channels over channels and space; x [N, C, ...].
    Kept for the backward pass are its operands."""

    def norm(x, scale, bias):
        h = x.reshape(x.shape[0], groups, -1).astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(h, -1, keepdims=True)
        variance = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
        y = ((h - mean) * lax.rsqrt(variance + epsilon)).astype(x.dtype).reshape(x.shape)
        wide = (-1,) + (1,) * (x.ndim - 2)
        return y * scale.reshape(wide) + bias.reshape(wide)

    return lean(norm)(x, scale, bias)


def batch_norm(x, scale, bias, mean, variance, epsilon):
    """Batch normalisation with given statistics, in float32; x [N, C, ...]."""
    wide = (-1,) + (1,) * (x.ndim - 2)
    mean, variance = mean.astype(jnp.float32), variance.astype(jnp.float32)
    return (
        (x - mean.reshape(wide)) * (scale * lax.rsqrt(variance + epsilon)).reshape(wide)
        + bias.reshape(wide)
    ).astype(x.dtype)


# Many parameters: the operands and attributes of ONNX's BatchNormalization.
def batch_norm_live(x, scale, bias, mean, variance, epsilon, momentum, count, axes):
    """Batch normalisation with the statistics of the global batch, in float32; returns y and the
    running mean and variance."""
    wide, rest = (-1,) + (1,) * (x.ndim - 2), (0, *range(2, x.ndim))
    h = x.astype(jnp.float32)

    def total(t):
        same = checkpoint_name(lax.psum(t, axes), "collective") if axes else t
        return same, lax.pcast(same, axes, to="varying") if axes else same

    now_same, now = total(jnp.sum(h, rest) / count)
    spread_same, spread = total(jnp.sum(jnp.square(h - now.reshape(wide)), rest) / count)
    y = (h - now.reshape(wide)) * (scale * lax.rsqrt(spread + epsilon)).reshape(
        wide
    ) + bias.reshape(wide)
    running = [
        lax.stop_gradient(momentum * old + (1 - momentum) * new).astype(old.dtype)
        for old, new in ((mean, now_same), (variance, spread_same))
    ]
    return y.astype(x.dtype), *running


def max_pool(x, kernel, strides, pads, dilations, out):
    """Max pooling over the spatial dims of x [N, C, ...] to the spatial shape `out`. Of equal
    elements the first of a window gets its gradient.

    Where the largest elements are is looked up when their gradient is there, dim by dim, and
    gradients are put there by padding. Left to themselves, compilers keep an int32 for each dim of
    every result from the forward pass on, and make an array of zeros to write into whenever their
    schedule has time.
    """
    window = _window(x, kernel, strides, pads, dilations, out)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    low = np.array(-np.inf if floating else jnp.iinfo(x.dtype).min, x.dtype)
    along = [
        (2 + i, kernel[i], strides[i], *window[2][2 + i], dilations[i]) for i in range(len(kernel))
    ]

    def largest(x):
        return lax.reduce_window(x, low, lax.max, *window)

    def back(x, g):
        steps, x = [], jnp.where(never(g), low, x)
        for how in along[::-1]:
            size, (taps, x) = x.shape[how[0]], _first_largest(x, low, *how)
            steps.append((taps, size, how))
        for taps, size, how in steps[::-1]:
            g = _put(g, taps, size, *how)
        return (g,)

    pool = jax.custom_vjp(largest)
    pool.defvjp(lambda x: (largest(x), x), back)
    return pool(x) if floating else largest(x)


def _first_largest(x, low, dim, kernel, stride, before, behind, dilation):
    """The first largest element of each window along a dim: which tap it is, and itself."""
    padded = lax.pad(
        x, low, [(before, behind, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    )
    taps = [
        lax.slice_in_dim(
            padded, k * dilation, padded.shape[dim] - (kernel - 1 - k) * dilation, stride, dim
        )
        for k in range(kernel)
    ]
    best, first_tap = taps[0], jnp.zeros_like(taps[0], np.min_scalar_type(kernel - 1))
    for k, tap in enumerate(taps[1:], 1):
        best, first_tap = jnp.maximum(best, tap), jnp.where(tap > best, k, first_tap)
    return first_tap, best


# Many parameters: the attributes of ONNX's MaxPool along one dim.
def _put(g, taps, size, dim, kernel, stride, before, behind, dilation):
    """Gradients of windows along a dim, at their taps, summed up over an array with that size of
    the dim."""
    zero, placed = np.zeros((), g.dtype), []
    for k in range(kernel):
        first = k * dilation - before
        ends = (first, size - first - (g.shape[dim] - 1) * stride - 1, stride - 1)
        placed.append(
            lax.pad(
                jnp.where(taps == k, g, zero),
                zero,
                [ends if d == dim else (0, 0, 0) for d in range(g.ndim)],
            )
        )
    return sum(placed[1:], placed[0])


def average_pool(x, kernel, strides, pads, dilations, out, count_include_pad):
    """Average pooling; padding counts in the divisor only where asked."""
    n, divisor = len(kernel), np.ones((), int)
    for i in range(n):
        counts = divisors(
            x.shape[2 + i],
            out[i],
            kernel[i],
            strides[i],
            pads[i],
            pads[i + n],
            dilations[i],
            count_include_pad,
        )
        divisor = divisor * counts.reshape([-1 if k == i else 1 for k in range(n)])
    return window_sums(x, kernel, strides, pads, dilations, out) / divisor.astype(x.dtype)


def window_sums(x, kernel, strides, pads, dilations, out):
    """Sums of the windows of average pooling."""
    return lax.reduce_window(x, 0.0, lax.add, *_window(x, kernel, strides, pads, dilations, out))


def divisors(size, out, kernel, stride, low, high, dilation, count_include_pad):
    """How many taps of each window along one dim count."""
    positions = np.arange(out)[:, None] * stride - low + np.arange(kernel) * dilation
    least, most = (-low, size + high) if count_include_pad else (0, size)
    return np.sum((positions >= least) & (positions < most), 1)


def _window(x, kernel, strides, pads, dilations, out):
    """Arguments of reduce_window; the end padding is what `out` needs (ceil mode included)."""
    n = len(kernel)
    ends = [
        (out[i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - x.shape[2 + i] - pads[i]
        for i in range(n)
    ]
    padding = [(0, 0), (0, 0)] + [(pads[i], ends[i]) for i in range(n)]
    return (1, 1, *kernel), (1, 1, *strides), padding, None, (1, 1, *dilations)


def resize(x, out, scales, mode, coordinate, nearest, slope=-0.75):
    """Resize of the spatial dims of x [N, C, ...] to `out`, nearest, linear or cubic (Keys, of the
    given slope), dim by dim."""
    for i, (n, s) in enumerate(zip(out, scales, strict=True)):
        size, dim = x.shape[2 + i], 2 + i
        positions = np.arange(n, dtype=np.float64)
        if coordinate == "align_corners":
            positions = positions * (size - 1) / (s * size - 1) if s * size != 1 else positions * 0
        elif coordinate == "asymmetric":
            positions = positions / s
        elif coordinate == "pytorch_half_pixel" and n == 1:
            positions = positions * 0
        else:
            positions = (
                (positions + 0.5) / s
                - 0.5
                + (size / 2 * (1 - n / (s * size)) if coordinate == "half_pixel_symmetric" else 0)
            )
        if mode == "nearest":
            nearby = {
                "floor": np.floor(positions),
                "ceil": np.ceil(positions),
                "round_prefer_ceil": np.floor(positions + 0.5),
            }.get(nearest, np.ceil(positions - 0.5))
            x = jnp.take(x, np.clip(nearby, 0, size - 1).astype(np.int32), axis=dim)
        else:
            low = np.floor(positions).astype(np.int32)
            t = positions - low
            if mode == "cubic":
                near, far = (
                    (lambda d: ((slope + 2) * d - (slope + 3)) * d * d + 1),
                    (lambda d: ((d - 5) * d + 8) * d * slope - 4 * slope),
                )
                taps = {-1: far(t + 1), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
            else:
                taps = {0: 1 - t, 1: t}
            wide = (-1,) + (1,) * (x.ndim - dim - 1)
            x = sum(
                jnp.take(x, np.clip(low + k, 0, size - 1), axis=dim)
                * w.reshape(wide).astype(x.dtype)
                for k, w in taps.items()
            )
    return x


def lstm(x, w, r, b, h0, c0, direction):
    """ONNX LSTM (gates i, o, f, c), x [S, B, I], w [D, 4H, I], r [D, 4H, H]: y [S, D, B, H], y_h
    and y_c [D, B, H]."""
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
    for k, backwards in enumerate(
        {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    ):
        y, h, c = run(k, x[::-1] if backwards else x)
        outs.append((y[::-1] if backwards else y, h, c))
    ys, hs, cs = zip(*outs, strict=True)
    return jnp.stack(ys, 1), jnp.stack(hs), jnp.stack(cs)


def drawn_bits(seed, shape, starts, strides):
    """24 bits for each element, a hash of the seed and of the element's global index (first local
    element at `starts`), so that pieces agree with the whole."""

    def mixed(h):
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    index = jnp.zeros(shape, jnp.uint32)
    for d, (start, stride) in enumerate(zip(starts, strides, strict=True)):
        index = index + (
            jnp.uint32(start) + lax.broadcasted_iota(jnp.uint32, shape, d)
        ) * jnp.uint32(stride)
    return mixed(mixed(index) + jnp.uint32(seed) * jnp.uint32(0x9E3779B9)) >> 8


def dropout(x, seed, ratio, starts, strides):
    """x with a fraction `ratio` of its elements dropped and the rest scaled up; and the next
    seed."""
    chance = drawn_bits(seed, x.shape, starts, strides)
    return jnp.where(chance >= jnp.uint32(ratio * 2**24), x / (1 - ratio), 0), seed + 1


def uniform(seed, low, high, shape, dtype, starts, strides):
    """Numbers from low up to high; and the next seed."""
    share = drawn_bits(seed, shape, starts, strides).astype(jnp.float32) / 2**24
    return (low + (high - low) * share).astype(dtype), seed + 1


def normal(seed, mean, scale, shape, dtype, starts, strides):
    """Numbers of the normal distribution, of two uniform ones each (Box and Muller); and the next
    seed."""
    radius, angle = (
        (drawn_bits(seed ^ salt, shape, starts, strides).astype(jnp.float32) + 0.5) / 2**24
        for salt in (0, 0x5BD1E995)
    )
    drawn = jnp.sqrt(-2 * jnp.log(radius)) * jnp.cos(2 * np.pi * angle)
    return (mean + scale * drawn).astype(dtype), seed + 1
