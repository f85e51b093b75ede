"""Moves of data in forms, or of types, that a Graph does not hold."""

from __future__ import annotations

import numpy as np

from planner.onnx_backend.table import Call, Value, as_array, handles


@handles("Reshape")
def reshape(call: Call) -> Value:
    """Another shape of the same elements; 0 copies a dim unless `allowzero`."""
    x, wanted = as_array(call.get(0)), [int(n) for n in as_array(call.get(1))]
    if not call.attr("allowzero", 0):
        wanted = [x.shape[k] if n == 0 else n for k, n in enumerate(wanted)]
    return x.reshape(wanted)


@handles("Transpose")
def transpose(call: Call) -> Value:
    """Dims permuted."""
    x = as_array(call.get(0))
    return np.transpose(x, call.attr("perm"))


@handles("Flatten")
def flatten(call: Call) -> Value:
    """Two dims: those before an axis and the rest."""
    x, axis = as_array(call.get(0)), int(call.attr("axis", 1))
    lead = int(np.prod(x.shape[:axis])) if axis else 1
    return x.reshape(lead, -1) if x.size else x.reshape(lead, int(np.prod(x.shape[axis:])))


@handles("Squeeze")
def squeeze(call: Call) -> Value:
    """Dims of one removed."""
    x, axes = as_array(call.get(0)), _axes(call)
    return x.squeeze(None if axes is None else tuple(a % x.ndim for a in axes))


@handles("Unsqueeze")
def unsqueeze(call: Call) -> Value:
    """Dims of one added."""
    return np.expand_dims(as_array(call.get(0)), tuple(_axes(call) or ()))


def _axes(call: Call) -> list[int] | None:
    axes_input = call.get(1)
    if axes_input is not None:
        return [int(a) for a in as_array(axes_input)]
    return call.attr("axes")


@handles("Concat")
def concat(call: Call) -> Value:
    """Tensors joined along an axis."""
    return np.concatenate([as_array(v) for v in call.inputs], int(call.attr("axis", 1)))


@handles("Slice", since=10)
def slice_(call: Call) -> Value:
    """Every step-th element between two bounds, along some axes."""
    x, starts, ends = (as_array(v) for v in call.inputs[:3])
    axes = range(len(starts)) if call.get(3) is None else as_array(call.get(3)).tolist()
    steps = np.ones_like(starts) if call.get(4) is None else as_array(call.get(4))
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(
        axes, starts.tolist(), ends.tolist(), steps.tolist(), strict=True
    ):
        n = x.shape[axis]
        last = None if step < 0 and end < -n else end
        cut[axis] = slice(start, last, step)
    return x[tuple(cut)]


@handles("Gather")
def gather(call: Call) -> Value:
    """Slices of a tensor at indices along an axis."""
    x = as_array(call.get(0))
    return np.take(x, as_array(call.get(1)), axis=call.axis(x.ndim))


@handles("Split", since=13)
def split(call: Call) -> Value:
    """Pieces along an axis, equal (the last may be smaller) or of given lengths."""
    x, sizes = as_array(call.get(0)), call.get(1)
    axis = call.axis(x.ndim)
    if sizes is None:
        count = int(call.attr("num_outputs", len(call.node.output)))
        step = -(-x.shape[axis] // count)
        cuts = [min(k * step, x.shape[axis]) for k in range(1, count)]
    else:
        cuts = np.cumsum(as_array(sizes))[:-1].tolist()
    return tuple(np.split(x, cuts, axis))


@handles("Trilu")
def trilu(call: Call) -> Value:
    """The upper or lower triangle of matrices."""
    x = as_array(call.get(0))
    k = 0 if call.get(1) is None else int(as_array(call.get(1)))
    return np.triu(x, k) if call.attr("upper", 1) else np.tril(x, k)


@handles("Where")
def where(call: Call) -> Value:
    """One of two tensors per element."""
    return np.where(*(as_array(v) for v in call.inputs))


@handles("Equal")
def equal(call: Call) -> Value:
    """Element-wise equality."""
    return np.asarray(as_array(call.get(0)) == as_array(call.get(1)), bool)
