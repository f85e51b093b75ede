"""Layers: convolutions, pools, norms, recurrent nets, dropout and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.reader.draft.draft import FOLD_ELEMENTS
from planner.reader.draft.shapes import ShapeError
from planner.reader.lower.call import Call, Unsupported
from planner.reader.lower.opaque import keep_or_expand
from planner.reader.onnx.norm_records import in_training

Rule = Callable[[Call], None]


def windows(call: Call, kernel: tuple[int, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    """strides, dilations and pads (begins, then ends), with auto_pad worked out."""
    n = len(kernel)
    strides = tuple(call.attr("strides", [1] * n))
    dilations = tuple(call.attr("dilations", [1] * n))
    pads = list(call.attr("pads", [0] * (2 * n)))
    auto = call.attr("auto_pad", "NOTSET")
    if (
        len(strides) != n
        or len(dilations) != n
        or len(pads) != 2 * n
        or min(strides + dilations + kernel, default=1) < 1
    ):
        raise ShapeError(
            f"strides {strides}, dilations {dilations}, pads {pads} do not fit a window {kernel}"
        )
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        for k in range(n):
            extent = -(-sizes[k] // strides[k])
            total = max(
                0, (extent - 1) * strides[k] + dilations[k] * (kernel[k] - 1) + 1 - sizes[k]
            )
            less = total // 2
            pads[k], pads[n + k] = (
                (less, total - less) if auto == "SAME_UPPER" else (total - less, less)
            )
    elif auto == "VALID":
        pads = [0] * (2 * n)
    return {"strides": strides, "pads": tuple(pads), "dilations": dilations}


def add_channel_bias(call: Call, x: str, bias: str) -> str:
    """x + bias[C, 1, ...]; the reshape is done on the stored weight where there is one."""
    draft = call.draft
    shape = (draft.shape(bias)[0], *(1,) * (len(draft.shape(x)) - 2))
    return call.emit("Add", [x, call.emit("Reshape", [bias], shape=shape)], out=call.name(0))


def _conv(call: Call) -> None:
    x, w = call.arg(0), call.arg(1)
    kernel = call.shape(1)[2:]
    attrs = {**windows(call, kernel, call.shape()[2:]), "group": int(call.attr("group", 1))}
    y = call.emit("Conv", [x, w], attrs, out="" if call.has(2) else call.name(0))
    call.bind(add_channel_bias(call, y, call.arg(2)) if call.has(2) else y)


def _conv_transpose(call: Call) -> None:
    x, w = call.arg(0), call.arg(1)
    kernel, sizes = call.shape(1)[2:], call.shape()[2:]
    n = len(kernel)
    auto = call.attr("auto_pad", "NOTSET")
    strides, dilations = list(call.attr("strides", [1] * n)), list(call.attr("dilations", [1] * n))
    extra = list(call.attr("output_padding", [0] * n))
    pads = list(call.attr("pads", [0] * (2 * n)))
    wanted = call.attr("output_shape")
    if wanted is not None or auto.startswith("SAME"):
        goal = (
            list(wanted)[-n:]
            if wanted is not None
            else [s * k for s, k in zip(sizes, strides, strict=True)]
        )
        for k in range(n):
            total = (
                strides[k] * (sizes[k] - 1)
                + extra[k]
                + dilations[k] * (kernel[k] - 1)
                + 1
                - goal[k]
            )
            if total < 0:
                extra[k], total = extra[k] - total, 0
            less = total // 2
            pads[k], pads[n + k] = (
                (total - less, less) if auto == "SAME_LOWER" else (less, total - less)
            )
    attrs: dict[str, Any] = {
        "strides": tuple(strides),
        "pads": tuple(pads),
        "dilations": tuple(dilations),
        "group": int(call.attr("group", 1)),
        "output_padding": tuple(extra),
    }
    y = call.emit("ConvTranspose", [x, w], attrs, out="" if call.has(2) else call.name(0))
    call.bind(add_channel_bias(call, y, call.arg(2)) if call.has(2) else y)


def pool(call: Call) -> None:
    """MaxPool and AveragePool."""
    kernel = tuple(call.attr("kernel_shape"))
    attrs = windows(call, kernel, call.shape()[2:])
    attrs |= {
        "kernel_shape": kernel,
        "ceil_mode": int(call.attr("ceil_mode", 0)),
        "count_include_pad": int(call.attr("count_include_pad", 0)),
    }
    call.result(call.op, [call.arg(0)], attrs)


def _global_pool(call: Call) -> None:
    axes = tuple(range(2, len(call.shape())))
    call.result(
        "ReduceMean" if call.op == "GlobalAveragePool" else "ReduceMax",
        [call.arg(0)],
        {"axes": axes, "keepdims": 1},
    )


def _layer_norm(call: Call) -> None:
    if call.wants(1) or call.wants(2):
        keep_or_expand(call, "")
        return
    axis = call.axis(call.attr("axis", -1), len(call.shape()))
    attrs: dict[str, Any] = {"axis": axis, "epsilon": float(call.attr("epsilon", 1e-5))}
    simple = call.op in ("RMSNormalization", "SimplifiedLayerNormalization")
    operands = [
        _spread(call, i, call.shape()[axis:]) for i in call.inputs[1 : 2 if simple else 3] if i
    ]
    call.result(
        "RMSNormalization" if simple else "LayerNormalization", [call.arg(0), *operands], attrs
    )


def _spread(call: Call, name: str, normal: tuple[int, ...]) -> str:
    """A scale or bias in the shape of the normalised dims; the operators broadcast smaller ones."""
    shape = call.draft.shape(name)
    while len(shape) > len(normal) and shape[0] == 1:
        shape = shape[1:]
    return call.emit("Expand", [call.emit("Reshape", [name], shape=shape)], shape=normal)


def _instance_norm(call: Call) -> None:
    call.result(
        "InstanceNormalization", call.inputs[:3], {"epsilon": float(call.attr("epsilon", 1e-5))}
    )


def _group_norm(call: Call) -> None:
    x, scale, bias = call.inputs[:3]
    channels, groups = call.shape()[1], int(call.attr("num_groups"))
    attrs: dict[str, Any] = {"num_groups": groups, "epsilon": float(call.attr("epsilon", 1e-5))}
    if call.opset < 21 and groups != channels:  # opset 18 gives one scale per group
        repeat = (groups, channels // groups)
        scale, bias = (
            call.emit(
                "Reshape",
                [call.emit("Expand", [call.emit("Reshape", [p], shape=(groups, 1))], shape=repeat)],
                shape=(channels,),
            )
            for p in (scale, bias)
        )
    call.result("GroupNormalization", [x, scale, bias], attrs)


def _batch_norm(call: Call) -> None:
    training = (
        int(call.attr("training_mode", 0))
        if call.opset >= 14
        else int(not call.attr("is_test", 1))
        if call.opset < 7
        else 0
    )
    if call.opset < 14 and any(call.wants(k) for k in range(1, 5)):
        training = 1
    if not training and call.draft.is_leaf(call.arg(3)):  # else the graph computes statistics
        training = int(in_training(call.node.proto))
    if call.attr("spatial", 1) == 0:
        raise Unsupported("statistics per element (spatial = 0)")
    momentum, epsilon = float(call.attr("momentum", 0.9)), float(call.attr("epsilon", 1e-5))
    attrs: dict[str, Any] = {"epsilon": epsilon, "momentum": momentum, "training_mode": training}
    if not training:
        call.result("BatchNormalization", call.inputs[:5], attrs)
        return
    names = [
        call.name(k) or f"{call.name(0)}/{what}"
        for k, what in enumerate(("y", "running_mean", "running_var"))
    ]
    inputs = call.inputs[:5]
    if _of_weights(call) and not any(call.draft.is_leaf(i) for i in inputs[3:]):
        # Filters that are standardised (NFNet): their statistics are computed beside the norm, of
        # a copy of them, for results that nothing reads.
        inputs[3:] = [
            call.constant(np.full(call.shape(1), number, call.dtype(1)), what)
            for number, what in ((0, "mean"), (1, "variance"))
        ]
    for k, result in enumerate(call.draft.add_many("BatchNormalization", inputs, attrs, names)):
        call.bind(result, k)


def _of_weights(call: Call) -> bool:
    """Whether a node's first operand is a view of a stored tensor."""
    name = call.arg(0)
    while (op := call.draft.maker.get(name)) is not None and op.op in ("Reshape", "Transpose"):
        name = op.inputs[0]
    return call.draft.is_leaf(name)


def _dropout(call: Call) -> None:
    training = 0
    if call.opset >= 12:
        if call.has(2):
            training = int(bool(call.const(2, "training_mode").reshape(-1)[0]))
        ratio = call.draft.scalar(call.arg(1)) if call.has(1) else 0.5
    else:
        ratio = call.attr("ratio", 0.5)
    if ratio is None:
        raise Unsupported("the ratio is computed from run-time data")
    if training and ratio > 0:
        names = [call.name(0), call.name(1) if call.wants(1) else ""]
        for k, result in enumerate(
            call.draft.add_many(
                "Dropout", [call.arg(0)], {"ratio": float(ratio), "training_mode": 1}, names
            )
        ):
            if result:
                call.bind(result, k)
        return
    call.bind(call.arg(0))
    if (
        call.wants(1) and math.prod(call.shape()) <= FOLD_ELEMENTS
    ):  # a larger mask is left unknown, an error where it is read
        call.bind(call.draft.constant(call.name(1), np.ones(call.shape(), bool)), 1)


def _resize(call: Call) -> None:
    shape, rank = call.shape(), len(call.shape())
    upsample = call.op == "Upsample"
    axes = [call.axis(a, rank) for a in call.attr("axes", range(rank))]
    scales, sizes = [1.0] * rank, list(shape)
    factors: list[float] = []
    if upsample and call.opset < 9:
        factors = list(call.attr("scales"))
    else:
        slot = 1 if upsample or call.opset < 11 else 2
        if call.has(slot):
            factors = [float(v) for v in call.const(slot, "the list of scales").reshape(-1)]
    if factors:
        for axis, s in zip(axes, factors, strict=True):
            scales[axis], sizes[axis] = s, math.floor(shape[axis] * s)
    elif call.has(3):
        if call.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Unsupported("keep_aspect_ratio_policy")
        for axis, n in zip(axes, call.ints(3, "the list of sizes"), strict=True):
            scales[axis], sizes[axis] = n / shape[axis], n
    else:
        raise Unsupported("neither scales nor sizes are given")
    coordinate = (
        "asymmetric"
        if upsample or call.opset < 11
        else call.attr("coordinate_transformation_mode", "half_pixel")
    )
    nearest = (
        "floor" if upsample or call.opset < 11 else call.attr("nearest_mode", "round_prefer_floor")
    )
    mode = call.attr("mode", "nearest")
    if (
        coordinate == "tf_crop_and_resize"
        or call.attr("antialias", 0)
        or call.attr("exclude_outside", 0)
    ):
        raise Unsupported(f"cropping, antialias or exclude_outside ({coordinate})")
    if all(s == 1.0 for s in scales) and sizes == list(shape):
        call.bind(call.arg(0))
        return
    attrs: dict[str, Any] = {
        "mode": mode,
        "coordinate_mode": coordinate,
        "nearest_mode": nearest,
        "scales": tuple(scales),
    }
    if mode == "cubic":
        attrs["cubic_coeff_a"] = float(call.attr("cubic_coeff_a", -0.75))
    call.result("Resize", [call.arg(0)], attrs, shape=tuple(sizes))


_STANDARD = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def _recurrent(call: Call) -> None:
    """LSTM, GRU and RNN, time-major; batch-major ones get transposes around them."""
    direction = call.attr("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    activations = call.attr("activations")
    attrs: dict[str, Any] = {
        "hidden_size": int(call.attr("hidden_size", call.shape(2)[-1])),
        "direction": direction,
    }
    if activations and [a.lower() for a in activations] != [
        a.lower() for a in _STANDARD[call.op] * directions
    ]:
        attrs["activations"] = tuple(activations)
    if "clip" in call.attrs:
        attrs["clip"] = float(call.attr("clip"))
    if call.op == "GRU":
        attrs["linear_before_reset"] = int(call.attr("linear_before_reset", 0))
    if call.attr("input_forget", 0):
        raise Unsupported("input_forget")
    inputs = list(call.inputs)
    batch_major = bool(call.attr("layout", 0))
    if batch_major:
        for k in (0, 5, 6):
            if k < len(inputs) and inputs[k]:
                inputs[k] = call.emit("Transpose", [inputs[k]], {"perm": (1, 0, 2)})
    while inputs and not inputs[-1]:
        inputs.pop()
    count = 3 if call.op == "LSTM" else 2
    if not batch_major:
        names = [call.name(k) if call.wants(k) else "" for k in range(count)]
        for k, result in enumerate(call.draft.add_many(call.op, inputs, attrs, names)):
            if result:
                call.bind(result, k)
        return
    names = [f"{call.name(0)}/{what}" for what in ("y", "h", "c")[:count]]
    names = call.draft.add_many(call.op, inputs, attrs, names)
    for k, (result, perm) in enumerate(
        zip(names, ((2, 0, 1, 3), (1, 0, 2), (1, 0, 2)), strict=False)
    ):
        if call.wants(k):
            call.bind(call.emit("Transpose", [result], {"perm": perm}, out=call.name(k)), k)


NETS: dict[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "AveragePool": pool,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _layer_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "Dropout": _dropout,
    "Resize": _resize,
    "Upsample": _resize,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
