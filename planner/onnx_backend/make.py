"""Operators that make data from little or none, and changes of type that a Graph does not hold."""

from __future__ import annotations

import math

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles
from planner.onnx_backend.values import dense


def element_type(code: int) -> np.dtype:
    """numpy dtype of an ONNX element type; strings are objects."""
    from onnx import TensorProto, helper

    return (
        np.dtype(object)
        if code == TensorProto.STRING
        else np.dtype(helper.tensor_dtype_to_np_dtype(code))
    )


@handles("Constant")
def constant(call: Call) -> Value:
    """The value of whichever attribute is given."""
    from onnx import numpy_helper

    (name,) = call.attrs
    value = call.attrs[name]
    if name == "value":
        return numpy_helper.to_array(value)
    if name == "sparse_value":
        return dense(value.sparse_tensor)
    if name in ("value_string", "value_strings"):
        return np.asarray(value, object)
    return np.asarray(value, {"value_int": np.int64, "value_ints": np.int64}.get(name, np.float32))


@handles("ConstantOfShape")
def filled(call: Call) -> Value:
    """One value, as often as a shape says."""
    from onnx import numpy_helper

    fill = call.attr("value")
    value = np.zeros(1, np.float32) if fill is None else numpy_helper.to_array(fill)
    return np.full(tuple(as_array(call.get(0)).tolist()), value.reshape(-1)[0], value.dtype)


@handles("Shape")
def shape(call: Call) -> Value:
    """Dims of a tensor, or some of them."""
    dims = as_array(call.get(0)).shape
    return np.asarray(dims[slice(call.attr("start", 0), call.attr("end"))], np.int64)


@handles("Size")
def size(call: Call) -> Value:
    """Number of elements."""
    return np.asarray(as_array(call.get(0)).size, np.int64)


@handles("Range")
def steps(call: Call) -> Value:
    """start, start + delta, ... below the limit."""
    start, limit, delta = (as_array(v).reshape(()) for v in call.inputs)
    first, last, step = (
        (v.astype(np.float64) if v.dtype.kind not in "iu" else v).item()
        for v in (start, limit, delta)
    )
    count = max(0, math.ceil((last - first) / step))
    return np.asarray([first + k * step for k in range(count)]).astype(start.dtype)


@handles("EyeLike")
def eye(call: Call) -> Value:
    """Ones on a diagonal of a matrix as large as the operand."""
    x = as_array(call.get(0))
    rows, columns = x.shape
    return np.eye(rows, columns, int(call.attr("k", 0))).astype(
        element_type(call.attr("dtype")) if "dtype" in call.attrs else x.dtype
    )


def cast(x: np.ndarray, to: np.dtype, saturate: bool = True, mode: str = "up") -> np.ndarray:
    """x in another type. Eight-bit floats saturate where asked; strings are decimal numbers."""
    from onnx import numpy_helper

    if to.kind == "O":
        return np.asarray(
            [
                (
                    str(v)
                    if not isinstance(v, float)
                    else np.format_float_positional(v, unique=True, trim="0")
                )
                for v in x.reshape(-1).tolist()
            ],
            object,
        ).reshape(x.shape)
    if x.dtype.kind == "O":
        numbers = np.asarray([float(v) for v in x.reshape(-1)], np.float64).reshape(x.shape)
        return numbers.astype(to)
    if to.name == "float8_e8m0fnu":
        return numpy_helper.to_float8e8m0(x.astype(np.float32), saturate, mode).astype(to)
    if to.name.startswith("float8") and saturate:
        return numpy_helper.saturate_cast(x, to)
    if x.dtype.name.startswith(("int", "uint")) and x.dtype.itemsize == 1 and x.dtype.kind == "V":
        x = x.astype(np.int8)  # sub-byte integers know few conversions
    with np.errstate(all="ignore"):
        return x.astype(to)


@handles("Cast")
def cast_to(call: Call) -> Value:
    """The operand in the type named by `to`."""
    return cast(
        as_array(call.get(0)),
        element_type(call.attr("to")),
        bool(call.attr("saturate", 1)),
        str(call.attr("round_mode", "up")),
    )


@handles("CastLike")
def cast_like(call: Call) -> Value:
    """The operand in another one's type."""
    return cast(
        as_array(call.get(0)),
        as_array(call.get(1)).dtype,
        bool(call.attr("saturate", 1)),
        str(call.attr("round_mode", "up")),
    )


@handles("BitCast")
def bits(call: Call) -> Value:
    """The same bits read as another type of the same width."""
    x, to = as_array(call.get(0)), element_type(call.attr("to"))
    if x.dtype.itemsize != to.itemsize:
        raise Refused(f"the bits of {x.dtype.name} read as {to.name}")
    return np.ascontiguousarray(x).view(to).reshape(x.shape)


def window(n: int, periodic: bool, terms: tuple[float, ...]) -> np.ndarray:
    """A cosine-sum window of n samples: sum of (-1)^k a_k cos(2 pi k i / N)."""
    i = np.arange(n, dtype=np.float64)
    span = n if periodic else max(n - 1, 1)
    samples = np.zeros(n)
    for k, a in enumerate(terms):
        samples += (-1) ** k * a * np.cos(2 * np.pi * k * i / span)
    return samples


_TERMS = {
    "HannWindow": (0.5, 0.5),
    "HammingWindow": (25 / 46, 21 / 46),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@handles(*_TERMS)
def cosine_window(call: Call) -> Value:
    """Hann, Hamming and Blackman windows."""
    weights = window(
        int(as_array(call.get(0))), bool(call.attr("periodic", 1)), _TERMS[call.node.op_type]
    )
    return weights.astype(element_type(call.attr("output_datatype", 1)))


@handles("MelWeightMatrix")
def mel(call: Call) -> Value:
    """Triangular filters, equally spaced on the mel scale, over the bins of a spectrum: [bins,
    bands]."""
    bands, length, rate = (int(as_array(v)) for v in call.inputs[:3])
    low, high = (float(as_array(v)) for v in call.inputs[3:5])
    first_mel, last_mel = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    edges = np.asarray(np.linspace(first_mel, last_mel, bands + 2, endpoint=False))
    bins = np.floor((length + 1) * 700 * (10 ** (edges / 2595) - 1) / rate).astype(int)
    bands_of_bins = np.zeros((length // 2 + 1, bands))
    for band in range(bands):
        first, centre, last = bins[band : band + 3]
        if first == centre:
            bands_of_bins[centre, band] = 1
        else:
            bands_of_bins[first : centre + 1, band] = (np.arange(first, centre + 1) - first) / (
                centre - first
            )
        if last > centre:
            bands_of_bins[centre:last, band] = (last - np.arange(centre, last)) / (last - centre)
    return bands_of_bins.astype(element_type(call.attr("output_datatype", 1)))
