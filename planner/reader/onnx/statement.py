"""A NodeProto taken apart once: protobuf makes a new object of a field whenever it is asked for,
and a model is read at several batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.reader.onnx.scopes import node_scope


class Statement(NamedTuple):
    """One node as it is written in a file. attributes: name, the attribute of the surrounding
    function that it refers to ("" without) and its AttributeProto."""

    name: str
    op_type: str
    domain: str
    overload: str
    input: tuple[str, ...]
    output: tuple[str, ...]
    attributes: tuple[tuple[str, str, Any], ...]
    scope: str
    proto: Any

    @classmethod
    def of(cls, node: Any) -> Statement:
        """The parts of a NodeProto."""
        return cls(
            node.name,
            node.op_type,
            node.domain,
            getattr(node, "overload", ""),
            tuple(node.input),
            tuple(node.output),
            tuple((a.name, a.ref_attr_name, a) for a in node.attribute),
            node_scope(node),
            node,
        )
