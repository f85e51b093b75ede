"""Small ONNX models with control flow, as exporters and people write it: branches by an input,
loops and scans over stored weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

info = helper.make_tensor_value_info
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(3)
W1, W2 = (RNG.normal(0, 0.4, (16, 16)).astype(np.float32) for _ in range(2))


def stored(**arrays: Any) -> list[Any]:
    """Initializers."""
    return [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]


def model(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], arrays: list[Any] = (), opset: int = 19
) -> Any:  # type: ignore[assignment]
    """A ModelProto."""
    graph = helper.make_graph(nodes, "control", inputs, outputs, list(arrays))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = 9
    return made


def _branch(name: str, weight: np.ndarray, kind: str) -> Any:
    nodes = [
        helper.make_node("MatMul", ["x", name], [f"{name}/product"]),
        helper.make_node(kind, [f"{name}/product"], [f"{name}/made"]),
    ]
    return helper.make_graph(
        nodes, name, [], [info(f"{name}/made", FLOAT, [8, 16])], stored(**{name: weight})
    )


def branches() -> Any:
    """y = relu(x W1) at a rate of 16000, tanh(x W2) at others; both weights are stored inside their
    branch."""
    nodes = [
        helper.make_node("Equal", ["rate", "high"], ["is_high"]),
        helper.make_node(
            "If",
            ["is_high"],
            ["chosen"],
            name="choose",
            then_branch=_branch("fine", W1, "Relu"),
            else_branch=_branch("coarse", W2, "Tanh"),
        ),
        helper.make_node("Mul", ["chosen", "scale"], ["y"]),
    ]
    inputs = [info("x", FLOAT, [8, 16]), info("rate", INT, [])]
    return model(
        nodes,
        inputs,
        [info("y", FLOAT, [8, 16])],
        stored(high=np.int64(16000), scale=np.ones(16, np.float32)),
    )


def _cell(*, trip: bool) -> list[Any]:
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["hw"]),
        helper.make_node("Add", ["hw", "x"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next"]),
    ]
    if trip:
        return [
            *nodes,
            helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
            helper.make_node("Add", ["next", "number"], ["row"]),
            helper.make_node("Identity", ["on"], ["still_on"]),
        ]
    return [*nodes, helper.make_node("Identity", ["next"], ["row"])]


def counted_loop(trips: int, rows: bool = True) -> Any:
    """h = tanh(h W + x), `trips` times, W stored in the body, rows h + trip stacked; y = mean of
    the rows + last h."""
    state = [info("i", INT, []), info("on", BOOL, []), info("h", FLOAT, [8, 16])]
    made = [info("still_on", BOOL, []), info("next", FLOAT, [8, 16]), info("row", FLOAT, [8, 16])]
    body = helper.make_graph(_cell(trip=True), "body", state, made, stored(w=W1))
    nodes = [
        helper.make_node("Loop", ["trips", "", "zeros"], ["last", "rows"], name="loop", body=body),
        helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[0], keepdims=0),
        helper.make_node("Add", ["last", "mean"], ["y"]),
    ]
    arrays = stored(trips=np.int64(trips), zeros=np.zeros((8, 16), np.float32))
    return model(nodes, [info("x", FLOAT, [8, 16])], [info("y", FLOAT, [8, 16])], arrays, opset=17)


def scan(reverse: int = 1) -> Any:
    """A recurrence over the middle dim of xs, from its end when `reverse`; the weight is stored
    outside; y = xs' rows + the last state."""
    state = [info("h", FLOAT, [8, 16]), info("x", FLOAT, [8, 16])]
    body = helper.make_graph(
        _cell(trip=False),
        "body",
        state,
        [info("next", FLOAT, [8, 16]), info("row", FLOAT, [8, 16])],
    )
    nodes = [
        helper.make_node(
            "Scan",
            ["zeros", "xs"],
            ["last", "rows"],
            name="scan",
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[1],
            scan_input_directions=[reverse],
            scan_output_axes=[1],
            scan_output_directions=[reverse],
        ),
        helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Add", ["last", "mean"], ["y"]),
    ]
    arrays = stored(w=W1, zeros=np.zeros((8, 16), np.float32))
    return model(
        nodes, [info("xs", FLOAT, [8, 12, 16])], [info("y", FLOAT, [8, 16])], arrays, opset=17
    )


def two_scans() -> Any:
    """Two recurrences over the same rows with the same weight that differ inside alone: tanh(h W +
    x), and its softmax. y = the sum of the last states."""

    def recurrence(k: int, last: str) -> Any:
        state = [info("h", FLOAT, [8, 16]), info("x", FLOAT, [8, 16])]
        cell = [
            helper.make_node("MatMul", ["h", "w"], ["hw"]),
            helper.make_node("Add", ["hw", "x"], ["sum"]),
            helper.make_node(last, ["sum"], ["next"]),
        ]
        body = helper.make_graph(
            [*cell, helper.make_node("Identity", ["next"], ["row"])],
            "body",
            state,
            [info("next", FLOAT, [8, 16]), info("row", FLOAT, [8, 16])],
        )
        return helper.make_node(
            "Scan",
            ["zeros", "xs"],
            [f"last{k}", f"rows{k}"],
            name=f"scan{k}",
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[1],
            scan_output_axes=[1],
        )

    nodes = [
        recurrence(0, "Tanh"),
        recurrence(1, "Softmax"),
        helper.make_node("Add", ["last0", "last1"], ["y"]),
    ]
    return model(
        nodes,
        [info("xs", FLOAT, [8, 12, 16])],
        [info("y", FLOAT, [8, 16])],
        stored(w=W1, zeros=np.zeros((8, 16), np.float32)),
        opset=17,
    )


def until_large(limit: bool = False) -> Any:
    """Doubles x until its sum passes 1000: nobody knows how often before running."""
    nodes = [
        helper.make_node("Mul", ["h", "two"], ["twice"]),
        helper.make_node("ReduceSum", ["twice"], ["all"], keepdims=0),
        helper.make_node("Less", ["all", "bound"], ["still_on"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [info("i", INT, []), info("on", BOOL, []), info("h", FLOAT, [8, 16])],
        [info("still_on", BOOL, []), info("twice", FLOAT, [8, 16])],
    )
    steps = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Abs", ["xw"], ["start"]),
        helper.make_node(
            "Loop", ["most" if limit else "", "", "start"], ["y"], name="loop", body=body
        ),
    ]
    arrays = stored(
        two=np.float32(2), bound=np.float32(1000), w=W1, **({"most": np.int64(2)} if limit else {})
    )
    return model(steps, [info("x", FLOAT, [8, 16])], [info("y", FLOAT, [8, 16])], arrays)


def speech() -> Any:
    """A detector as silero's: samples and a rate in; either rate has its own convolution, then an
    LSTM whose state is handed in and out."""

    def path(name: str, stride: int) -> Any:
        kernel = RNG.normal(0, 0.1, (16, 1, 32)).astype(np.float32)
        w, r = (RNG.normal(0, 0.2, (1, 64, 16)).astype(np.float32) for _ in range(2))
        p = f"{name}/"
        nodes = [
            helper.make_node("Unsqueeze", ["samples", "one"], [p + "wave"]),
            helper.make_node(
                "Conv",
                [p + "wave", p + "kernel"],
                [p + "bands"],
                strides=[stride],
                kernel_shape=[32],
            ),
            helper.make_node("Relu", [p + "bands"], [p + "energy"]),
            helper.make_node("Transpose", [p + "energy"], [p + "steps"], perm=[2, 0, 1]),
            helper.make_node(
                "LSTM",
                [p + "steps", p + "w", p + "r", "", "", "h", "c"],
                [p + "all", p + "h", p + "c"],
                hidden_size=16,
            ),
            helper.make_node("Squeeze", [p + "h", "zero"], [p + "state"]),
            helper.make_node("MatMul", [p + "state", p + "head"], [p + "score"]),
        ]
        outs = [
            info(p + "score", FLOAT, [8, 1]),
            info(p + "h", FLOAT, [1, 8, 16]),
            info(p + "c", FLOAT, [1, 8, 16]),
        ]
        arrays = {
            p + "kernel": kernel,
            p + "w": w,
            p + "r": r,
            p + "head": RNG.normal(size=(16, 1)).astype(np.float32),
        }
        return helper.make_graph(nodes, name, [], outs, stored(**arrays))

    nodes = [
        helper.make_node("Equal", ["sr", "high"], ["is_high"]),
        helper.make_node(
            "If",
            ["is_high"],
            ["score", "hn", "cn"],
            name="by_rate",
            then_branch=path("high_rate", 16),
            else_branch=path("low_rate", 8),
        ),
        helper.make_node("Sigmoid", ["score"], ["speech"]),
    ]
    inputs = [
        info("samples", FLOAT, [8, 128]),
        info("sr", INT, []),
        info("h", FLOAT, [1, 8, 16]),
        info("c", FLOAT, [1, 8, 16]),
    ]
    outputs = [
        info("speech", FLOAT, [8, 1]),
        info("hn", FLOAT, [1, 8, 16]),
        info("cn", FLOAT, [1, 8, 16]),
    ]
    return model(
        nodes,
        inputs,
        outputs,
        stored(high=np.int64(16000), one=np.array([1], np.int64), zero=np.array([0], np.int64)),
        opset=17,
    )
