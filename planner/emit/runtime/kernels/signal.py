"""Operators along one axis, on local pieces: transforms, running products, reversals, caches."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax


def dft(x, axis, length, inverse, onesided):
    """Discrete Fourier transform of pairs (or reals) in the last dim along `axis`, cut or filled
    with zeros to `length`; one-sided: half of the frequencies come out, or, inverse, go in."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    real = x.shape[-1] == 1
    z = wide[..., 0] if real else lax.complex(wide[..., 0], wide[..., 1])
    if inverse:
        spectrum = jnp.fft.irfft(z, length, axis) if onesided else jnp.fft.ifft(z, length, axis)
        if onesided:
            return spectrum[..., None].astype(x.dtype)
    elif real or onesided:
        spectrum = jnp.fft.rfft(wide[..., 0], length, axis)
        if not onesided:  # the other half of a real signal's frequencies mirrors the first
            rest = jnp.conj(jnp.take(spectrum, length - np.arange(length // 2 + 1, length), axis))
            spectrum = jnp.concatenate([spectrum, rest], axis)
    else:
        spectrum = jnp.fft.fft(z, length, axis)
    return jnp.stack([spectrum.real, spectrum.imag], -1).astype(x.dtype)


def cumprod(x, axis, exclusive, reverse):
    """Running product along `axis`; exclusive leaves the element itself out; reverse runs from the
    end."""
    if exclusive:
        one = jnp.ones_like(lax.slice_in_dim(x, 0, 1, axis=axis))
        rest = (
            lax.slice_in_dim(x, 1, None, axis=axis)
            if reverse
            else lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis)
        )
        x = jnp.concatenate([rest, one] if reverse else [one, rest], axis)
    return lax.cumprod(x, axis, reverse=reverse)


def reverse_sequence(x, lengths, time, batch):
    """Per sample, the first `lengths` steps in reverse."""
    n = jnp.expand_dims(lengths, tuple(k for k in range(x.ndim) if k != batch))
    position = lax.broadcasted_iota(n.dtype, x.shape, time)
    return jnp.take_along_axis(x, jnp.where(position < n, n - 1 - position, position), time)


def write_cache(past, update, where, axis, circular):
    """A cache with new rows written per sample from an index on, around the end where it is
    circular."""
    cache, rows = jnp.moveaxis(past, axis, 1), jnp.moveaxis(update, axis, 1)
    slots = jnp.arange(rows.shape[1])[None] + (
        jnp.zeros((cache.shape[0], 1), jnp.int32) if where is None else where[:, None]
    )
    slots = slots % cache.shape[1] if circular else slots
    return jnp.moveaxis(cache.at[jnp.arange(cache.shape[0])[:, None], slots].set(rows), 1, axis)
