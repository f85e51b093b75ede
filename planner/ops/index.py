"""Lookups. A table cut along the looked-up dim gives zeros for rows held elsewhere, so the result
is partial (vocabulary-parallel embedding)."""

from __future__ import annotations

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, register
from planner.ops.ties import looked_up, looked_up_in_columns
from planner.sharding.rule import Rule, parse


def _gather_rule(node: Node, graph: Graph) -> Rule:
    data, indices = graph.shapes(node.inputs)
    (out,) = graph.shapes(node.outputs)
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    names = ["v" if i == axis else f"d{i}" for i in range(len(data))]
    if not graph.tensors[node.inputs[0]].is_float:
        names[axis] = "v!"
    ids = [f"i{i}" for i in range(len(indices))]
    left = f"{' '.join(names)}, {' '.join(ids)}"
    return parse(
        f"{left} -> {' '.join([*names[:axis], *ids, *names[axis + 1 :]])}", (data, indices), (out,)
    )


def _gather(call: Call) -> str:
    data, indices = call.args
    axis = call.attr("axis")
    if not call.axes("v"):
        return f"{call.use('take')}({data}, {indices}, {axis})"
    return (
        f"{call.use('take_shard')}({data}, {indices}, {axis}, {call.start('v')},"
        f" {call.rule.sizes['v']})"
    )


def _gather_nd_rule(node: Node, graph: Graph) -> Rule:
    """Indices into the leading dims: one leading dim may be cut (as Gather); the trailing dims pass
    through."""
    data, indices = graph.shapes(node.inputs)
    (out,) = graph.shapes(node.outputs)
    batch, depth = int(node.attrs.get("batch_dims", 0)), indices[-1]  # type: ignore[arg-type]
    batch_names = [f"b{i}" for i in range(batch)]
    ids = [f"i{i}" for i in range(len(indices) - 1 - batch)]
    looked = [
        "v" if depth == 1 and not batch and graph.tensors[node.inputs[0]].is_float else f"v{i}!"
        for i in range(depth)
    ]
    rest = [f"d{i}" for i in range(len(data) - batch - depth)]
    line = (
        f"{' '.join([*batch_names, *looked, *rest])}, {' '.join([*batch_names, *ids, 'z!'])} ->"
        f" {' '.join([*batch_names, *ids, *rest])}"
    )
    return parse(line, (data, indices), (out,))


def _gather_nd(call: Call) -> str:
    data, indices = call.args
    if call.axes("v"):
        return (
            f"{call.use('take_shard')}({data}, {indices}[..., 0], 0, {call.start('v')},"
            f" {call.rule.sizes['v']})"
        )
    return f"{call.use('gather_nd')}({data}, {indices}, {call.attr('batch_dims', 0)})"


def _gather_elements_rule(node: Node, graph: Graph) -> Rule:
    data, indices = graph.shapes(node.inputs)
    axis = int(node.attrs["axis"])  # type: ignore[arg-type]
    data_dims, index_dims = [], []
    for i, (a, b) in enumerate(zip(data, indices, strict=True)):
        if i == axis:
            data_dims.append("v!")
            index_dims.append("j")
        elif a == b:
            data_dims.append(f"d{i}")
            index_dims.append(f"d{i}")
        else:
            data_dims.append(f"v{i}!")
            index_dims.append(f"j{i}!")
    return parse(
        f"{' '.join(data_dims)}, {' '.join(index_dims)} -> {' '.join(index_dims)}",
        (data, indices),
        (indices,),
    )


def _gather_elements(call: Call) -> str:
    return f"{call.use('gather_elements')}({call.args[0]}, {call.args[1]}, {call.attr('axis')})"


def _scatter_rule(node: Node, graph: Graph) -> Rule:
    """ScatterElements: dims beside the axis pass through where all three extents agree."""
    data, indices, updates = graph.shapes(node.inputs)
    axis = int(node.attrs.get("axis", 0)) % len(data)  # type: ignore[arg-type]
    if any(a != b for i, (a, b) in enumerate(zip(data, indices, strict=True)) if i != axis):
        raise NoRule("indices smaller than the data")
    names = [f"d{i}" for i in range(len(data))]
    data_dims = " ".join("v!" if i == axis else n for i, n in enumerate(names))
    upd = " ".join("u!" if i == axis else n for i, n in enumerate(names))
    return parse(f"{data_dims}, {upd}, {upd} -> {data_dims}", (data, indices, updates), (data,))


def _scatter(call: Call) -> str:
    return (
        f"{call.use('scatter_elements')}({', '.join(call.args)}, {call.attr('axis', 0)},"
        f" {call.attr('reduction', 'none')!r})"
    )


def rows_of_table(node: Node, graph: Graph, slot: int) -> int:
    """Exclusive upper bound of indices (slot 1) into the axis of the first operand; of a table in
    the host's memory, all its rows."""
    if slot != 1:
        return 0
    table = graph.host_tables.get(node.inputs[0])
    if table is not None:
        return table.rows
    return graph.tensors[node.inputs[0]].shape[int(node.attrs["axis"])]  # type: ignore[arg-type]


register(
    Operator(
        "Gather",
        _gather_rule,
        _gather,
        saves="in1",
        kind="lookup",
        words={"v": "table rows"},
        index_limit=rows_of_table,
        extents=True,
        ties=looked_up,
    ),
    Operator(
        "GatherND",
        _gather_nd_rule,
        _gather_nd,
        saves="in1",
        kind="lookup",
        extents=True,
        counted="z",
        ties=looked_up_in_columns,
    ),
    Operator(
        "GatherElements",
        _gather_elements_rule,
        _gather_elements,
        saves="in1",
        index_limit=rows_of_table,
    ),
    Operator("ScatterElements", _scatter_rule, _scatter, saves="in1"),
)
