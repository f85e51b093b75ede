"""Control flow: subgraphs run as often as the values say."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.onnx_backend.table import Call, Refused, Value, as_array, handles


def _truth(value: Value) -> bool:
    return bool(as_array(value).reshape(-1)[0])


@handles("If")
def if_(call: Call) -> tuple[Value, ...]:
    """One of two subgraphs."""
    return tuple(
        call.machine.subgraph(
            call, call.attr("then_branch" if _truth(call.get(0)) else "else_branch"), ()
        )
    )


@handles("Loop")
def loop(call: Call) -> tuple[Value, ...]:
    """At most M trips while a condition holds: carried values go round, the others are stacked."""
    body: Any = call.attr("body")
    most, condition = call.get(0), call.get(1)
    trips = int(as_array(most).reshape(-1)[0]) if most is not None else None
    goes_on = True if condition is None else _truth(condition)
    carried = list(call.inputs[2:])
    count = len(body.output) - 1 - len(carried)
    stacked: list[list[np.ndarray]] = [[] for _ in range(count)]
    trip = 0
    while goes_on and (trips is None or trip < trips):
        results = call.machine.subgraph(
            call, body, [np.asarray(trip, np.int64), np.asarray(goes_on), *carried]
        )
        goes_on = _truth(results[0])
        carried = results[1 : 1 + len(carried)]
        for rows, row in zip(stacked, results[1 + len(carried) :], strict=True):
            rows.append(as_array(row))
        trip += 1
    outputs = body.output[1 + len(carried) :]
    return (
        *carried,
        *(
            np.stack(rows) if rows else _no_rows(info)
            for rows, info in zip(stacked, outputs, strict=True)
        ),
    )


def _no_rows(info: Any) -> np.ndarray:
    """The stack of no iterations, from what the subgraph declares of one."""
    from onnx import helper

    dims = [max(d.dim_value, 0) for d in info.type.tensor_type.shape.dim]
    return np.zeros((0, *dims), helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))


@handles("Scan", since=9)
def scan(call: Call) -> tuple[Value, ...]:
    """A subgraph along an axis of each scanned input; state goes round, scanned outputs are stacked
    along theirs."""
    body: Any = call.attr("body")
    scanned = int(call.attr("num_scan_inputs"))
    state = list(call.inputs[: len(call.inputs) - scanned])
    inputs = [as_array(v) for v in call.inputs[len(state) :]]
    count = len(body.output) - len(state)
    axes = [
        a % x.ndim for a, x in zip(call.attr("scan_input_axes", [0] * scanned), inputs, strict=True)
    ]
    back_in, back_out = (
        call.attr("scan_input_directions", [0] * scanned),
        call.attr("scan_output_directions", [0] * count),
    )
    length = {x.shape[a] for x, a in zip(inputs, axes, strict=True)}
    if len(length) != 1:
        raise Refused(f"scanned inputs of lengths {sorted(length)}")
    trips = length.pop()
    rows: list[list[np.ndarray]] = [[] for _ in range(count)]
    for trip in range(trips):
        picked = [
            np.take(x, trips - 1 - trip if back else trip, a)
            for x, a, back in zip(inputs, axes, back_in, strict=True)
        ]
        results = call.machine.subgraph(call, body, [*state, *picked])
        state = results[: len(state)]
        for column, row in zip(rows, results[len(state) :], strict=True):
            column.append(as_array(row))
    outputs = []
    for column, info, axis, back in zip(
        rows,
        body.output[len(state) :],
        call.attr("scan_output_axes", [0] * count),
        back_out,
        strict=True,
    ):
        column = column[::-1] if back else column
        outputs.append(
            np.stack(column, axis if axis >= 0 else axis + column[0].ndim + 1)
            if column
            else _no_rows(info)
        )
    return (*state, *outputs)


@handles("Scan", since=8)
def scan_batched(call: Call) -> tuple[Value, ...]:
    """The first version: inputs have a batch dim first, each sample may have a length of its
    own."""
    body: Any = call.attr("body")
    scanned = int(call.attr("num_scan_inputs"))
    lengths, *rest = call.inputs
    values = [as_array(v) for v in rest]
    states, inputs = values[: len(values) - scanned], values[len(values) - scanned :]
    back = call.attr("directions", [0] * scanned)
    samples, longest = inputs[0].shape[:2]
    outputs: list[list[np.ndarray]] = [[] for _ in body.output]
    for b in range(samples):
        n = longest if lengths is None else int(as_array(lengths)[b])
        state: list[Value] = [s[b] for s in states]
        rows: list[list[np.ndarray]] = [[] for _ in range(len(body.output) - len(state))]
        for t in range(n):
            results = call.machine.subgraph(
                call,
                body,
                [*state, *(x[b, n - 1 - t if r else t] for x, r in zip(inputs, back, strict=True))],
            )
            state = results[: len(state)]
            for column, row in zip(rows, results[len(state) :], strict=True):
                column.append(as_array(row))
        padded = [
            np.concatenate([np.stack(r), np.zeros((longest - n, *r[0].shape), r[0].dtype)])
            for r in rows
        ]
        for column, value in zip(outputs, [*(as_array(s) for s in state), *padded], strict=True):
            column.append(value)
    return tuple(np.stack(o) for o in outputs)
