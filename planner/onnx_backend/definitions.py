"""What one node of a model is: a model that holds it alone, and the body by which ONNX defines its
operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.onnx_backend.table import Value
from planner.onnx_backend.values import type_of, value_info


def single_node(
    node: Any, inputs: Sequence[Value], attributes: Mapping[str, Any], opsets: Mapping[str, int]
) -> Any:
    """A model that holds one node; its inputs are x0, x1, ..."""
    from onnx import NodeProto, helper

    one = NodeProto()
    one.CopyFrom(node)
    del one.attribute[:], one.input[:]
    for name, attribute in attributes.items():
        one.attribute.add().CopyFrom(attribute)
        one.attribute[-1].name = name
    one.input.extend(f"x{k}" if v is not None else "" for k, v in enumerate(inputs))
    infos = [value_info(f"x{k}", v) for k, v in enumerate(inputs) if v is not None]
    outputs = [helper.make_empty_tensor_value_info(o) for o in node.output if o]
    graph = helper.make_graph([one], "node", infos, outputs)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()]
    )


def schema_body(
    node: Any,
    domain: str,
    opset: int,
    inputs: Sequence[Value],
    attributes: dict[str, Any] | Mapping[str, Any],
) -> Any:
    """The FunctionProto by which ONNX defines an operator, defaults of its attributes added to
    `attribute_proto`; or None."""
    from onnx import FunctionProto, NodeProto, defs

    try:
        schema: Any = defs.get_schema(node.op_type, opset, domain)
    except defs.SchemaError:
        return None
    body = FunctionProto()
    if schema.has_context_dependent_function:
        concrete = NodeProto()
        concrete.CopyFrom(node)
        del concrete.attribute[:]
        for name, attribute in attributes.items():
            concrete.attribute.add().CopyFrom(attribute)
            concrete.attribute[-1].name = name
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        if versions:
            types = [type_of(v).SerializeToString() if v is not None else b"" for v in inputs]
            body.ParseFromString(
                schema.get_context_dependent_function_with_opset_version(
                    versions[-1], concrete.SerializeToString(), types
                )
            )
    if not body.node and schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        if versions:
            function = schema.get_function_with_opset_version(versions[-1])
            body.ParseFromString(
                function if isinstance(function, bytes) else function.SerializeToString()
            )
    if not body.node:
        return None
    for name, attribute in schema.attributes.items():
        default = attribute.default_value
        if (
            default is not None
            and default.name
            and not any(a.name == name for a in body.attribute_proto)
        ):
            body.attribute_proto.add().CopyFrom(default)
            body.attribute_proto[-1].name = name
    return body
