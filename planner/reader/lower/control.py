"""If, Loop and Scan.

    condition known                          the branch that is taken, in place
    few iterations, known, in all a few nodes   unrolled: each iteration in place, its number a
                                                constant
    iterations known                         `Scan`, one body; states of fixed type, slices of
                                             scanned operands in, stacked results out
    iterations are run-time data             `While`, states only: nobody knows how much it would
                                             stack, and it has no gradient
    condition is run-time data               `If`, both branches as bodies

Nodes are counted before anything is unrolled. Canonical attributes of the three are in
planner.graph.ir.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.reader.draft.draft import FOLD_ELEMENTS, MOST_ELEMENTS, proto_array
from planner.reader.draft.shapes import ShapeError, Type
from planner.reader.lower.bodies import Body, add_region, constant_output
from planner.reader.lower.call import Call, Frame, Unsupported
from planner.reader.onnx.check import order_nodes
from planner.reader.onnx.tensors import check_tensor

Rule = Callable[[Call], None]
UNROLLED_NODES = 256
"""A loop that becomes at most so many nodes is unrolled."""
MOST_UNROLLED = 4096
"""One that cannot be a scan, because a state's shape changes, may become so many; all loops of a
model together four times as many."""
MOST_TRIPS = 1 << 24
"""Loops of more iterations are refused."""
COUNTER: Type = ((), "int64")


def _if(call: Call) -> None:
    condition: Any = call.draft.value(call.arg(0))
    if condition is not None:
        call.lowering.branch(
            call, call.attr("then_branch" if bool(condition.reshape(-1)[0]) else "else_branch")
        )
        return
    if math.prod(call.shape(0)) != 1:
        raise ShapeError(f"a condition of shape {list(call.shape(0))}")
    bodies = [
        Body(call, call.attr(f"{which}_branch"), (), {}, f"{which} branch")
        for which in ("then", "else")
    ]
    then, other = (body.types() for body in bodies)
    if len(then) < len(call.node.output) or len(then) != len(other):
        raise TypeError(
            f"branches of {len(then)} and {len(other)} outputs for {len(call.node.output)} results"
        )
    for k, (a, b) in enumerate(zip(then, other, strict=True)):
        if a != b:
            raise Unsupported(
                f"result {k} is {a[1]} {list(a[0])} in one branch and {b[1]} {list(b[0])} in the"
                " other, and the condition is run-time data"
            )
    add_region(call, "If", [call.arg(0)], bodies, then, {"first": 1, "own": 0})


def _loop(call: Call) -> None:
    graph, states = call.attr("body"), list(call.inputs[2:])
    most_iterations = _number(call, 0)
    trips = (
        most_iterations if most_iterations is not None and most_iterations <= MOST_TRIPS else None
    )  # the largest integer stands for no limit
    limited = call.has(0) and most_iterations is None  # by run-time data
    go = True if not call.has(1) else _known(call, 1)
    if go is False or (trips is not None and trips <= 0):
        _no_trips(call, states)
        return
    size = count(call, graph.node)
    if go and not limited and _unrolled(call, graph, states, trips, size, UNROLLED_NODES):
        return
    if not call.lowering.sequences.keys().isdisjoint(states):
        raise Unsupported("a loop that cannot be unrolled appends to a sequence of tensors")
    types = [call.draft.types[s] for s in states]
    body = Body(
        call, graph, [COUNTER, *types], {1: np.ones(_declared_rank(graph, 1) * (1,), bool)}, "body"
    )
    on, result_types = constant_output(body, 0), body.types()[1:]
    if on is not None and not limited:
        trips = trips if bool(on.all()) else 1
        if trips is None:
            raise Unsupported(
                "a loop that never stops"
                if most_iterations is None
                else f"a loop of {most_iterations:,} iterations; the limit is {MOST_TRIPS:,}"
            )
    if [*result_types[: len(types)]] != types:
        if go and trips is not None and _unrolled(call, graph, states, trips, size, MOST_UNROLLED):
            return
        _check_states(call, types, result_types)
    if go and trips is not None and on is not None:
        stacked = [((trips, *shape), dtype) for shape, dtype in result_types[len(types) :]]
        _check_size(stacked)
        body.draft.outputs.pop(0)
        attrs = {
            "first": 0,
            "own": 1,
            "trips": trips,
            "states": len(types),
            "scanned": 0,
            **_axes(0, len(stacked)),
        }
        add_region(call, "Scan", states, [body], [*types, *stacked], attrs)
        return
    if any(call.wants(k) for k in range(len(types), len(result_types))):
        raise Unsupported(
            "a loop whose number of iterations is run-time data stacks results: how many is not"
            " known before running"
        )
    del body.draft.outputs[1 + len(types) :]
    _while(
        call,
        body,
        [call.arg(0) if limited else "", "" if go else call.arg(1), *states],
        types,
        trips,
    )


def _while(
    call: Call, body: Body, operands: list[str], types: list[Type], trips: int | None
) -> None:
    limit = trips if trips is not None else -1
    add_region(
        call,
        "While",
        operands,
        [body],
        types,
        {"first": 2, "own": 1, "limit": limit, "states": len(types)},
    )
    note = (
        f"node {call.id!r} (Loop) runs until its data says stop: it is priced as {max(limit, 1):,}"
        " iteration(s)"
    )
    call.lowering.remark(note)


def _check_states(call: Call, types: Sequence[Type], result_types: Sequence[Type]) -> None:
    for k, (a, b) in enumerate(zip(types, result_types, strict=False)):
        if a != b:
            raise Unsupported(
                f"its state {k} enters as {a[1]} {list(a[0])} and leaves as {b[1]} {list(b[0])}"
            )


def _no_trips(call: Call, states: Sequence[str]) -> None:
    """A loop that does not run hands its states on."""
    if any(call.wants(k) for k in range(len(states), len(call.node.output))):
        raise Unsupported("a loop without iterations stacks results")
    for k, state in enumerate(states):
        call.bind(state, k)


def _unrolled(
    call: Call, graph: Any, states: list[str], trips: int | None, size: int, most_iterations: int
) -> bool:
    """Lowers each iteration in place. False, and nothing changed, where that would be too many
    nodes or the number of iterations is not known."""
    lowering, draft = call.lowering, call.draft
    most_iterations = min(most_iterations, 4 * MOST_UNROLLED - lowering.expanded[0]) // size
    if (
        (trips is not None and trips > most_iterations)
        or most_iterations < 1
        or _inner_weights(graph.node)
    ):
        return False
    start, problems = len(draft.ops), len(lowering.problems)
    shared = _frame_within(call, call.frame, f"{call.id}/")
    for tensor in graph.initializer:
        lowering.add_initializer(shared, tensor, tensor.name)
    nodes = order_nodes(graph.node, None, f"body of node {call.id!r}")
    lowering.run(
        [n for n in nodes if n.op_type == "Constant"], shared
    )  # stored once, whatever the number of iterations
    nodes = [n for n in nodes if n.op_type != "Constant"]
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    if len(inputs) != 2 + len(states) or len(outputs) < 1 + len(states):
        raise TypeError(
            f"a body of {len(inputs)} inputs and {len(outputs)} outputs for {len(states)} states"
        )
    stacked: list[list[str]] = [[] for _ in outputs[1 + len(states) :]]
    trip, state, goes_on = 0, list(states), True
    while goes_on and (trips is None or trip < trips):
        lowering.expanded[0] += size
        frame = _frame_within(call, shared, f"{call.id}/{trip}/")
        counter = draft.constant(f"{call.id}/{trip}/trip", np.asarray(trip, np.int64))
        frame.env.update(
            zip(
                inputs,
                [counter, draft.constant(f"{call.id}/{trip}/go", np.asarray(True)), *state],
                strict=True,
            )
        )
        lowering.run(nodes, frame)
        results = [_made(call, frame, name) for name in outputs]
        if any(not f for f in results):
            raise Unsupported("its body holds what cannot be planned")
        next_, trip = draft.value(results[0]), trip + 1
        if next_ is None or (trips is None and trip >= most_iterations):
            del draft.ops[start:]
            del lowering.problems[problems:]
            return False
        goes_on, state = bool(next_.all()), results[1 : 1 + len(states)]
        for rows, row in zip(stacked, results[1 + len(states) :], strict=True):
            rows.append(row)
    for k, name in enumerate(state):
        call.bind(name, k)
    for k, rows in enumerate(stacked, len(states)):
        if call.wants(k):
            call.bind(_stack(call, rows, k), k)
    return True


def _frame_within(call: Call, outer: Frame, prefix: str) -> Frame:
    """An empty frame for a body of a node, which sees the names of `outer`."""
    frame = call.frame
    return Frame({}, frame.opsets, outer, frame.attrs, prefix, call.scope, frame.depth + 1)


def _stack(call: Call, rows: list[str], k: int) -> str:
    one = (1, *call.draft.shape(rows[0]))
    if any(call.draft.shape(r) != one[1:] for r in rows):
        raise Unsupported(f"result {k} stacks tensors of different shapes")
    return call.emit(
        "Concat",
        [call.emit("Reshape", [r], shape=one) for r in rows],
        {"axis": 0},
        out=call.name(k),
    )


def _made(call: Call, frame: Frame, name: str) -> str:
    try:
        return frame.find(name) or ""
    except KeyError:
        raise PlanError(
            "P113", f"the body of node {call.id!r} never makes its output {name!r}"
        ) from None


def _scan(call: Call) -> None:
    if call.opset < 9:
        raise Unsupported("the Scan of opset 8, whose samples may have lengths of their own")
    graph, scanned = call.attr("body"), int(call.attr("num_scan_inputs"))
    many = len(call.inputs) - scanned
    if not 0 < scanned <= len(call.inputs) or not all(call.inputs):
        raise TypeError(f"{len(call.inputs)} operands, of which {scanned} are scanned")
    types = [call.draft.types[s] for s in call.inputs[:many]]
    shapes = [call.shape(k) for k in range(many, len(call.inputs))]
    axes = tuple(
        call.axis(a, len(s))
        for a, s in zip(_ints(call, "scan_input_axes", scanned), shapes, strict=True)
    )
    lengths = {s[a] if s else -1 for s, a in zip(shapes, axes, strict=True)}
    if len(lengths) != 1 or min(lengths) < 1:
        raise ShapeError(f"scanned operands of lengths {sorted(lengths)}")
    trips = lengths.pop()
    rows = [
        ((*s[:a], *s[a + 1 :]), call.dtype(k))
        for k, (s, a) in enumerate(zip(shapes, axes, strict=True), many)
    ]
    body = Body(call, graph, [*types, *rows], {}, "body")
    result_types = body.types()
    _check_states(call, types, result_types)
    count_ = len(result_types) - many
    out_axes = tuple(
        call.axis(a, len(shape) + 1)
        for a, (shape, _) in zip(
            _ints(call, "scan_output_axes", count_), result_types[many:], strict=True
        )
    )
    stacked = [
        ((*shape[:a], trips, *shape[a:]), dtype)
        for a, (shape, dtype) in zip(out_axes, result_types[many:], strict=True)
    ]
    _check_size(stacked)
    attrs = {
        "first": 0,
        "own": 0,
        "trips": trips,
        "states": many,
        "scanned": scanned,
        "in_axes": axes,
        "in_reverse": _ints(call, "scan_input_directions", scanned),
        "out_axes": out_axes,
        "out_reverse": _ints(call, "scan_output_directions", count_),
    }
    add_region(call, "Scan", call.inputs, [body], [*types, *stacked], attrs)


def _axes(scanned: int, stacked: int) -> dict[str, Any]:
    return {
        "in_axes": (0,) * scanned,
        "in_reverse": (0,) * scanned,
        "out_axes": (0,) * stacked,
        "out_reverse": (0,) * stacked,
    }


def _ints(call: Call, name: str, n: int) -> tuple[int, ...]:
    ints = tuple(call.attr(name, [0] * n))
    if len(ints) != n:
        raise TypeError(f"{name} has {len(ints)} entries, not {n}")
    return ints


def _check_size(types: Sequence[Type]) -> None:
    if any(math.prod(shape) > MOST_ELEMENTS for shape, _ in types):
        raise ShapeError("it stacks more than any device memory holds")


def _number(call: Call, k: int) -> int | None:
    value = call.draft.value(call.arg(k)) if call.has(k) else None
    return None if value is None else int(value.reshape(-1)[0])


def _known(call: Call, k: int) -> bool | None:
    value = call.draft.value(call.arg(k))
    return None if value is None else bool(value.reshape(-1)[0])


def _declared_rank(graph: Any, k: int) -> int:
    """Rank of a body's input as it says; conditions are scalars, or vectors of one."""
    if len(graph.input) <= k:
        raise TypeError(f"its body takes {len(graph.input)} inputs")
    return min(1, len(graph.input[k].type.tensor_type.shape.dim))


def count(call: Call, nodes: Sequence[Any]) -> int:
    """Nodes that a list of nodes becomes, functions entered and branches included."""
    known: dict[tuple[str, str, str], int] = {}
    functions = call.lowering.functions

    def total(nodes: Sequence[Any]) -> int:
        size = 1
        for node in nodes:
            key = (node.domain, node.op_type, getattr(node, "overload", ""))
            if key in functions:
                if key not in known:
                    known[key] = total(functions[key].node)
                size += known[key]
            size += 1 + sum(
                total(g.node) for a in node.attribute for g in ([a.g] if a.type == 5 else a.graphs)
            )
        return size

    return total(nodes)


def _inner_weights(nodes: Sequence[Any]) -> bool:
    """Whether a subgraph of a body stores float tensors (other than one number again and again):
    unrolled, each iteration would get its own copy."""
    for node in nodes:
        for graph in (g for a in node.attribute for g in ([a.g] if a.type == 5 else a.graphs)):
            stored = [
                *graph.initializer,
                *(
                    a.t
                    for n in graph.node
                    if n.op_type == "Constant"
                    for a in n.attribute
                    if a.type == 4
                ),
            ]
            if any(
                t.data_type in (1, 10, 11, 16) and math.prod(t.dims) > 1 and not _uniform(t)
                for t in stored
            ) or _inner_weights(graph.node):
                return True
    return False


def _uniform(tensor: Any) -> bool:
    """Whether a stored tensor of moderate size holds one number."""
    if (
        math.prod(tensor.dims) > FOLD_ELEMENTS
        or tensor.data_location
        or check_tensor(tensor, tensor.name, None)[1].kind != "inline"
    ):
        return False
    array = proto_array(tensor)
    return bool((array == array.reshape(-1)[:1]).all())


CONTROL: dict[str, Rule] = {"If": _if, "Loop": _loop, "Scan": _scan}
