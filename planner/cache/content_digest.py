"""What plans follow from in a model, as digests that no name is part of: of its file, of its
canonical graph, and of the names alone.

An export on another day, of a checkpoint trained further or of layers called otherwise, is the same
model to a search. So tensors are numbered in the order in which they are met, and what says nothing
of plans is left out: names and descriptions of nodes, who exported it, values that lie in other
files, and the values of parameters and of tensors too large to be folded. Where a value or a name
does change what the reader makes of a file (patterns look at small constants, sizes have names), it
is seen in the graph.

Orders are kept (of nodes, tensors and weights), and whatever is rare is taken as it is written,
names included: two models with one digest are the same to a search, not always the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import prod
from typing import Any

from planner.graph.ir import Graph
from planner.graph.value_digest import _hash, value_bytes

TENSOR, GRAPH, GRAPHS, EXTERNAL = 4, 5, 10, 1
"""AttributeProto's types of values, TensorProto's place of values."""


class _Numbers(dict[str, int]):
    """name -> number, by first use. A subgraph's own names stand before those from around it;
    within the file no number is given twice."""

    def __init__(self, around: _Numbers | None = None) -> None:
        super().__init__({} if around is not None else {"": -1})
        self.around = around
        self.used: list[int] = around.used if around is not None else [0]

    def __missing__(self, name: str) -> int:
        if self.around is not None and (number := self.around.known(name)) is not None:
            return number
        return self.own(name)

    def known(self, name: str) -> int | None:
        """The number of a name that was met here or around."""
        if name in self:
            return self[name]
        return self.around.known(name) if self.around is not None else None

    def own(self, name: str) -> int:
        """A new number for what is defined here."""
        self[name] = self.used[0]
        self.used[0] += 1
        return self[name]

    def of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Numbers of names."""
        return tuple([self[n] for n in names])


def file_content(proto: Any, parameters: Collection[str]) -> str:
    """Digest of an ONNX model. parameters: initializers whose values no plan follows from (those
    that training changes)."""
    graph, number, symbols = proto.graph, _Numbers(), dict[str, str | int]()
    inputs = [(number[v.name], _type(v.type, symbols, True)) for v in graph.input]
    rows = [(number[t.name], *_stored(t, t.name in parameters)) for t in graph.initializer]
    nodes = [_node(p, number) for p in graph.node]
    types = [
        (number[v.name], _type(v.type, symbols))
        for messages in (graph.output, graph.value_info)
        for v in messages
    ]
    functions = [_function(f) for f in proto.functions]
    rare = [
        m.SerializeToString(deterministic=True)
        for messages in (graph.sparse_initializer, graph.quantization_annotation)
        for m in messages
    ]
    versions = proto.ir_version, [(o.domain, o.version) for o in proto.opset_import]
    return _digest(inputs, rows, nodes, types, functions, rare, versions)


def graph_content(graph: Graph) -> str:
    """Digest of a canonical graph."""
    number = _Numbers()
    inputs = number.of(graph.inputs)
    nodes = [
        (
            n.op,
            number.of(n.inputs),
            number.of(n.outputs),
            tuple(n.attrs.items()),
            tuple(map(graph_content, n.bodies)),
        )
        for n in graph.nodes
    ]
    tensors = [(number[name], t.shape, t.dtype, t.role) for name, t in graph.tensors.items()]
    constants = [
        (number[name], value.dtype.name, value.shape, _hash(value_bytes(value)))
        for name, value in graph.constants.items()
    ]
    hosted = [
        (number[name], h.rows, number.of(h.ids), h.place) for name, h in graph.host_tables.items()
    ]
    ends = (
        number.of(graph.outputs),
        number.of(graph.weights),
        sorted(number.of(graph.trainable)),
        tuple(graph.dims.items()),
    )
    return _digest(inputs, nodes, tensors, constants, hosted, ends)


def names_of(graph: Graph) -> str:
    """Digest of what nodes and tensors of a graph are called, which pins may choose them by."""
    return _digest(
        [(n.id, n.scope, n.members, n.inputs, n.outputs) for n in graph.nodes],
        tuple(graph.labels.items()),
    )


def _node(proto: Any, number: _Numbers) -> tuple:
    inputs, attributes = (
        number.of(proto.input),
        tuple([_attribute(a, number) for a in proto.attribute]),
    )
    return (
        proto.op_type,
        proto.domain,
        getattr(proto, "overload", ""),
        inputs,
        attributes,
        number.of(proto.output),
    )


def _attribute(a: Any, number: _Numbers) -> tuple:
    if a.type in (GRAPH, GRAPHS):
        return a.name, [_body(g, number) for g in ((a.g,) if a.type == GRAPH else a.graphs)]
    if a.type == TENSOR:
        return a.name, _stored(a.t, False)
    return a.name, a.SerializeToString(deterministic=True)


def _body(graph: Any, around: _Numbers) -> tuple:
    """A subgraph: what it defines hides what is around it and called alike."""
    number = _Numbers(around)
    inputs = [(number.own(v.name), _type(v.type, {}, True)) for v in graph.input]
    rows = [(number.own(t.name), *_stored(t, False)) for t in graph.initializer]
    for name in (o for node in graph.node for o in node.output if o):
        number.own(name)
    nodes, rare = (
        [_node(p, number) for p in graph.node],
        [m.SerializeToString(deterministic=True) for m in graph.sparse_initializer],
    )
    return inputs, rows, nodes, number.of(v.name for v in graph.output), rare


def _function(proto: Any) -> tuple:
    number = _Numbers()
    inputs, nodes = number.of(proto.input), [_node(p, number) for p in proto.node]
    defaults = [a.SerializeToString(deterministic=True) for a in proto.attribute_proto]
    versions = [(o.domain, o.version) for o in proto.opset_import]
    return (
        proto.domain,
        proto.name,
        getattr(proto, "overload", ""),
        inputs,
        nodes,
        number.of(proto.output),
        tuple(proto.attribute),
        defaults,
        versions,
    )


def _stored(tensor: Any, parameter: bool) -> tuple:
    """A tensor's extents and type, and its values where they may be read."""
    from planner.reader.draft.draft import FOLD_ELEMENTS

    head = tuple(tensor.dims), tensor.data_type, tensor.data_location
    if parameter or tensor.data_location == EXTERNAL or prod(tensor.dims) > FOLD_ELEMENTS:
        return head
    plain = type(tensor)()
    plain.CopyFrom(tensor)
    plain.ClearField("name")
    plain.ClearField("doc_string")
    return *head, _hash(plain.SerializeToString(deterministic=True))


def _type(proto: Any, symbols: dict[str, str | int], given: bool = False) -> Any:
    """A type. Sizes have the names that inputs gave them (given), which the user may set; others,
    which exporters make of nodes' names, have numbers."""
    if proto.WhichOneof("value") != "tensor_type":
        return proto.SerializeToString(deterministic=True)
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(_sizes(tensor.shape.dim, symbols, given))


def _sizes(dims: Any, symbols: dict[str, str | int], given: bool) -> Iterator[int | tuple | None]:
    for dim in dims:
        match dim.WhichOneof("value"):
            case "dim_value":
                yield dim.dim_value
            case "dim_param":
                yield (symbols.setdefault(dim.dim_param, dim.dim_param if given else len(symbols)),)
            case _:
                yield None


def _digest(*parts: Any) -> str:
    return _hash(repr(parts).encode())
