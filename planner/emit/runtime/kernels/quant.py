"""Quantised arithmetic on local pieces: eight-bit operands, 32-bit sums."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def centred(x, zero, axis):
    """x - zero point in 32 bits; the zero point is one number or one per index of `axis`."""
    return x.astype(jnp.int32) - along(zero, x.ndim, axis).astype(jnp.int32)


def along(v, rank, axis):
    """A number or a vector as a tensor of `rank` dims that varies along `axis`."""
    return (
        v.reshape(())
        if v.size == 1
        else v.reshape([-1 if k == axis % rank else 1 for k in range(rank)])
    )


def matmul_integer(a, b, a_zero, b_zero):
    """Product of eight-bit matrices in 32 bits; zero points per row of a and per column of b."""
    left = (
        a.astype(jnp.int32)
        if a_zero is None
        else centred(a, a_zero, a.ndim - 2)
        if a_zero.ndim < 2
        else a.astype(jnp.int32) - a_zero
    )
    right = (
        b.astype(jnp.int32)
        if b_zero is None
        else centred(b, b_zero, b.ndim - 1)
        if b_zero.ndim < 2
        else b.astype(jnp.int32) - b_zero
    )
    return jnp.matmul(left, right, preferred_element_type=jnp.int32)


def conv_integer(x, w, x_zero, w_zero, strides, pads, dilations, groups):
    """Convolution of eight-bit tensors in 32 bits; padding stands for the zero point, w's is one
    per output channel."""
    x = (
        x.astype(jnp.int32)
        if x_zero is None
        else x.astype(jnp.int32) - x_zero.reshape(()).astype(jnp.int32)
    )
    w = w.astype(jnp.int32) if w_zero is None else centred(w, w_zero, 0)
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        pads,
        rhs_dilation=dilations,
        feature_group_count=groups,
        preferred_element_type=jnp.int32,
    )


def requantize(y, scale, zero):
    """Real numbers over a scale, rounded to even, moved by the zero point and held within its
    type."""
    bounds = jnp.iinfo(zero.dtype)
    return jnp.clip(jnp.round(y / scale) + zero.astype(y.dtype), bounds.min, bounds.max).astype(
        zero.dtype
    )


def quantize(x, scale, zero, axis):
    """QuantizeLinear of a tensor with one scale, or one per index of `axis`."""
    return requantize(x, along(scale, x.ndim, axis), along(zero, x.ndim, axis))


def dequantize(x, scale, zero, axis):
    """DequantizeLinear of a tensor with one scale, or one per index of `axis`."""
    whole = x.astype(jnp.int32) if zero is None else centred(x, zero, axis)
    return whole.astype(scale.dtype) * along(scale, x.ndim, axis)


def qlinear_matmul(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    """Product of quantised matrices, quantised again."""
    product = matmul_integer(a, b, a_zero, b_zero).astype(jnp.float32)
    rows = along(a_scale, a.ndim, a.ndim - 2) if a_scale.ndim < 2 else a_scale
    columns = along(b_scale, b.ndim, b.ndim - 1) if b_scale.ndim < 2 else b_scale
    return requantize(
        product * (rows.astype(jnp.float32) * columns.astype(jnp.float32)),
        y_scale.astype(jnp.float32),
        y_zero,
    )


# Many parameters: the operands and attributes of ONNX's QLinearConv.
def qlinear_conv(
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b, strides, pads, dilations, groups
):
    """Convolution of quantised tensors, quantised again; the bias is in units of x_scale *
    w_scale."""
    total = conv_integer(x, w, x_zero, w_zero, strides, pads, dilations, groups)
    total = total if b is None else total + along(b, total.ndim, 1)
    return requantize(
        total.astype(jnp.float32) * (x_scale.reshape(()) * along(w_scale, total.ndim, 1)),
        y_scale.reshape(()),
        y_zero.reshape(()),
    )
