"""Fourier transforms; complex numbers are pairs in the last dim."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.table import Call, Value, as_array, handles


def transform(x: np.ndarray, axis: int, length: int | None, inverse: bool, onesided: bool) -> np.ndarray:
    """Discrete Fourier transform of x [..., 1 or 2] along `axis`, cut or filled with zeros to `length`; forward one-sided transforms keep half,
    inverse one-sided ones take half and give real numbers."""
    size = x.shape[axis] if length is None else length
    z = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
    if inverse and onesided:
        return np.fft.irfft(z, size if length is not None else None, axis)[..., None].astype(x.dtype)
    made = np.fft.ifft(z, size, axis) if inverse else np.fft.rfft(z.real, size, axis) if onesided else np.fft.fft(z, size, axis)
    return np.stack([made.real, made.imag], -1).astype(x.dtype)


@handles("DFT", since=20)
def dft(call: Call) -> Value:
    """Fourier transform along the axis given as an input (by default the last before the pairs)."""
    x = as_array(call.get(0))
    axis = -2 if call.get(2) is None else int(as_array(call.get(2)))
    return _dft(call, x, axis)


@handles("DFT", since=17)
def dft_17(call: Call) -> Value:
    """Fourier transform along the axis given as an attribute."""
    return _dft(call, as_array(call.get(0)), int(call.attr("axis", 1)))


def _dft(call: Call, x: np.ndarray, axis: int) -> np.ndarray:
    length = None if call.get(1) is None else int(as_array(call.get(1)))
    return transform(x, axis % x.ndim, length, bool(call.attr("inverse", 0)), bool(call.attr("onesided", 0)))


@handles("STFT")
def stft(call: Call) -> Value:
    """Fourier transforms of frames `step` apart, each weighted by a window: [batch, frames, bins, 2]."""
    x, step = as_array(call.get(0)), int(as_array(call.get(1)))
    window, length = call.get(2), call.get(3)
    size = int(as_array(length)) if length is not None else len(as_array(window))
    weights = np.ones(size, x.dtype) if window is None else as_array(window)
    starts = range(0, x.shape[1] - size + 1, step)
    frames = np.stack([x[:, s : s + size] * weights[:, None] for s in starts], 1)
    return transform(frames, 2, None, False, bool(call.attr("onesided", 1)))
