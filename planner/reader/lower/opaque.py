"""Operators without a canonical form: expanded by their ONNX body where there is one, else kept
whole.

A kept operator is planned replicated. Its output shapes come from onnx's shape inference for that
one node, or from the shapes the model declares (custom domains).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from planner.graph.ir import DTYPE_BYTES
from planner.reader.draft.shapes import Type
from planner.reader.lower.call import Call, Unsupported
from planner.reader.onnx.tensors import dtype_name

_NEVER = {
    "NonZero": (
        "its output size depends on data (a boolean index writes it; docs/exporting.md says which"
        " loops over experts are read)"
    ),
    "Unique": "its output size depends on data",
    "Compress": "its output size depends on data",
    "NonMaxSuppression": "its output size depends on data",
}


def keep_or_expand(call: Call, domain: str) -> None:
    """Lowers a node that no table knows. Raises Unsupported."""
    if domain == "" and call.op in _NEVER:
        raise Unsupported(_NEVER[call.op])
    schema = _schema(call, domain)
    if schema is None and domain == "":
        raise Unsupported(f"opset {call.opset} has no such operator")
    if schema is not None and (body := _body(call, schema)) is not None:
        call.lowering.enter(call, body)
        return
    if schema is not None:
        _check_call(call, schema)
    types = (_inferred(call, schema) if schema is not None else None) or _declared(call)
    if types is None:
        raise Unsupported(
            "custom operator without declared output shapes"
            if schema is None
            else "its output shapes are not known before running"
        )
    _keep(call, types)


def _schema(call: Call, domain: str) -> Any:
    return schema_of(call.op, call.opset, domain)


@lru_cache(maxsize=1024)
def schema_of(op: str, opset: int, domain: str) -> Any:
    """onnx's definition of an operator at an opset, None when there is none."""
    from onnx import defs

    try:
        return defs.get_schema(op, opset, domain)
    except Exception:  # onnx raises its own SchemaError, which moved between versions
        return None


def _body(call: Call, schema: Any) -> Any:
    from onnx import FunctionProto, NodeProto

    if schema.has_context_dependent_function:
        from onnx import helper

        types = [
            (
                helper.make_tensor_type_proto(
                    _code(call.dtype(k)), call.shape(k)
                ).SerializeToString()
                if n
                else b""
            )
            for k, n in enumerate(call.inputs)
        ]
        node = NodeProto()
        node.CopyFrom(call.node.proto)
        del node.attribute[:]
        for name, attribute in call.attrs.items():  # references to a function's attributes resolved
            node.attribute.add().CopyFrom(attribute)
            node.attribute[-1].name = name
        for version in reversed(schema.context_dependent_function_opset_versions):
            if version <= call.opset:
                function = schema.get_context_dependent_function_with_opset_version(
                    version, node.SerializeToString(), types
                )
                body = FunctionProto()
                body.ParseFromString(function)
                return _with_defaults(call, schema, body)
    if schema.has_function:
        for version in reversed(schema.function_opset_versions):
            if version <= call.opset:
                body = FunctionProto()
                function = schema.get_function_with_opset_version(version)
                body.ParseFromString(
                    function if isinstance(function, bytes) else function.SerializeToString()
                )
                return _with_defaults(call, schema, body)
    return None


def _with_defaults(call: Call, schema: Any, body: Any) -> Any:
    """Bodies refer to attributes by name; those not given take the schema's defaults."""
    for name, attribute in schema.attributes.items():
        default = attribute.default_value
        if name not in call.attrs and default is not None and default.name:
            call.attrs[name] = default
    return body


def _code(dtype: str) -> int:
    from onnx import TensorProto

    for code in TensorProto.DataType.values():
        if dtype_name(code) == dtype:
            return int(code)
    raise Unsupported(f"type {dtype}")


def _check_call(call: Call, schema: Any) -> None:
    """Nobody looks at a kept operator before its kernel does. Raises TypeError for operands and
    attributes that are missing, too many or of another kind."""
    if (
        not schema.min_input <= len(call.inputs) <= schema.max_input
        or not schema.min_output <= len(call.node.output) <= schema.max_output
    ):
        raise TypeError(f"{len(call.inputs)} inputs and {len(call.node.output)} outputs")
    if not all(call.inputs[: schema.min_input]):
        raise TypeError("an operand that is needed is absent")
    for name, wanted in schema.attributes.items():
        value = call.attrs.get(name)
        if value is None and wanted.required:
            raise TypeError(f"attribute {name!r} is missing")
        if value is not None and int(value.type) != int(wanted.type.value):
            raise TypeError(f"attribute {name!r} is of another kind than {wanted.type.name}")


def _declared(call: Call) -> list[Type] | None:
    declared = [call.lowering.declared.get(o) for o in call.node.output if o]
    return (
        None
        if call.frame.prefix or any(t is None for t in declared)
        else [t for t in declared if t is not None]
    )


def _inferred(call: Call, schema: Any) -> list[Type] | None:
    from onnx import helper, numpy_helper, shape_inference

    if any(a.type in (5, 10) for _, _, a in call.node.attributes):
        raise Unsupported("it holds a subgraph")
    types, data = {}, {}
    for name, tensor in zip(call.node.input, call.inputs, strict=True):
        if not name:
            continue
        types[name] = helper.make_tensor_type_proto(
            _code(call.draft.dtype(tensor)), call.draft.shape(tensor)
        )
        value = call.draft.value(tensor, 65_536)
        if value is not None:
            data[name] = numpy_helper.from_array(value, name)
    imports = [helper.make_opsetid(d, v) for d, v in call.frame.opsets.items()]
    try:
        inferred = shape_inference.infer_node_outputs(
            schema, call.node.proto, types, data, opset_imports=imports
        )
    except Exception as error:  # InferenceError, or what the C++ side throws for odd attributes
        raise Unsupported(f"shape inference fails: {str(error)[:160]}") from None
    types_of_results: list[Type] = []
    for name in call.node.output:
        if not name:
            continue
        t = inferred.get(name)
        if t is None or t.WhichOneof("value") != "tensor_type":
            kind = (
                (t.WhichOneof("value") or "").removesuffix("_type").capitalize()
                if t is not None
                else ""
            )
            raise Unsupported(
                f"its output {name!r} has {kind or 'unknown'} type"
                if kind
                else "its output shapes are not known before running"
            )
        dims = t.tensor_type.shape.dim
        dtype = dtype_name(t.tensor_type.elem_type)
        if dtype not in DTYPE_BYTES:
            raise Unsupported(f"its output {name!r} has type {dtype}")
        if not t.tensor_type.HasField("shape") or any(
            d.WhichOneof("value") != "dim_value" for d in dims
        ):
            return None
        types_of_results.append((tuple(d.dim_value for d in dims), dtype))
    return types_of_results


def _keep(call: Call, types: list[Type]) -> None:
    from planner.reader.draft.draft import MOST_ELEMENTS, Op

    if any(math.prod(s) > MOST_ELEMENTS or min(s, default=0) < 0 for s, _ in types):
        raise Unsupported("its declared shapes are negative or too large for any memory")
    attrs: dict[str, Any] = {}
    for name in call.attrs:
        value = call.attr(name)
        if isinstance(value, (int, float, str)):
            attrs[name] = value
        elif isinstance(value, list) and all(isinstance(v, (int, float, str)) for v in value):
            attrs[name] = tuple(value)
        else:
            raise Unsupported(f"attribute {name!r} holds a tensor or graph")
    names, remaining = [], iter(types)
    for k, output in enumerate(call.node.output):
        if output:
            result = call.draft.fresh(call.name(k))
            call.draft.types[result] = next(remaining)
            call.bind(result, k)
        else:
            result = ""
        names.append(result)
    domain = "" if call.node.domain in ("", "ai.onnx") else call.node.domain + "::"
    op = Op(domain + call.op, list(call.inputs), names, attrs)
    for result in names:
        if result:
            call.draft.maker[result] = op
    call.draft.ops.append(op)
