"""A model run node by node, for what a static graph cannot hold: sequences, optionals, strings,
loops, sizes that depend on data.

Each node is tried in this order: a function of the model; the kernel that a program would use (the
node as a graph of its own); a handler; the body by which ONNX defines the operator.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.onnx_backend.definitions import schema_body, single_node
from planner.onnx_backend.handlers import handler_of
from planner.onnx_backend.model import Static
from planner.onnx_backend.program import fits
from planner.onnx_backend.table import Call, Refused, Scope, Value
from planner.onnx_backend.values import dense
from planner.ops import OPERATORS
from planner.reader.lower.table import TABLE

MAX_DEPTH = 64
DYNAMIC = frozenset({"Constant", "If", "Loop", "Scan", "Identity"})
"""Operators that are never worth a program of their own, or hold subgraphs."""


class Machine:
    """Runs one model; `ways` counts how nodes were run ("kernel", "handler")."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.functions = {
            (f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions
        }
        self.opsets = _opsets(model.opset_import)
        self.programs: dict[Any, Static] = {}
        self.ways: collections.Counter[str] = collections.Counter()

    def __call__(self, values: Mapping[str, Value]) -> list[Value]:
        """Outputs in the model's order. Raises PlanError P171 when a node cannot be run."""
        scope = Scope(dict(values), opsets=self.opsets)
        try:
            return self.graph(self.model.graph, scope)
        except Refused as reason:
            raise PlanError("P171", f"the model cannot be run: {reason}") from reason

    def graph(self, graph: Any, scope: Scope) -> list[Value]:
        """Outputs of a (sub)graph whose inputs are in the scope."""
        from onnx import numpy_helper

        for tensor in graph.initializer:
            scope.values.setdefault(tensor.name, numpy_helper.to_array(tensor))
        for sparse in graph.sparse_initializer:
            scope.values.setdefault(sparse.values.name, dense(sparse))
        self.nodes(graph.node, scope)
        return [scope.find(o.name) for o in graph.output]

    def nodes(self, nodes: Sequence[Any], scope: Scope) -> None:
        """Runs nodes in their order, which ONNX requires to be topological."""
        if scope.depth > MAX_DEPTH:
            raise Refused(f"subgraphs and functions are nested deeper than {MAX_DEPTH}")
        for node in nodes:
            for name, value in zip(node.output, self.node(node, scope), strict=False):
                if name:
                    scope.values[name] = (
                        np.asarray(value) if isinstance(value, np.generic) else value
                    )

    def node(self, node: Any, scope: Scope) -> list[Value]:
        """Outputs of one node."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        inputs = tuple(scope.find(n) if n else None for n in node.input)
        attributes = _attributes(node, scope.attrs)
        body = self.functions.get((node.domain, node.op_type, getattr(node, "overload", "")))
        if body is not None:
            return self.function(body, inputs, attributes, scope, None)
        opset = scope.opsets.get(domain, 0) or (1 if domain else scope.opsets.get("", 1))
        return self._known(node, domain, opset, inputs, attributes, scope)

    def _known(
        self,
        node: Any,
        domain: str,
        opset: int,
        inputs: tuple[Value, ...],
        attributes: Mapping[str, Any],
        scope: Scope,
    ) -> list[Value]:
        from planner.reader.lower.call import attribute_value

        reason = f"no way to run {node.op_type}"
        if self._planned(node, domain, inputs):
            try:
                outputs = self._kernel(node, inputs, attributes, scope)
                self.ways["kernel"] += 1
                return outputs
            except PlanError as error:
                reason = "; ".join([error.what, *(d.strip() for d in error.detail[:1])])
        handler = handler_of(domain, node.op_type, opset)
        if handler is not None:
            values = {
                n: attribute_value(a) if a.type not in _RAW else a for n, a in attributes.items()
            }
            outputs = handler(Call(node, inputs, values, opset, self, scope))
            self.ways["handler"] += 1
            return list(outputs) if isinstance(outputs, tuple) else [outputs]
        function = schema_body(node, domain, opset, inputs, attributes)
        if function is None:
            raise Refused(reason)
        return self.function(function, inputs, attributes, scope, opset)

    @staticmethod
    def _planned(node: Any, domain: str, inputs: Sequence[Value]) -> bool:
        tensors = [v for v in inputs if v is not None]
        known = (domain, node.op_type) in TABLE or (domain == "" and node.op_type in OPERATORS)
        return (
            known
            and node.op_type not in DYNAMIC
            and bool(tensors)
            and fits(tensors)
            and all(v.size for v in tensors)
        )

    def _kernel(
        self, node: Any, inputs: Sequence[Value], attributes: Mapping[str, Any], scope: Scope
    ) -> list[Value]:
        """The node as a model of its own. Raises PlanError."""
        key = (
            node.SerializeToString(),
            tuple(a.SerializeToString() for a in attributes.values()),
            tuple(sorted(scope.opsets.items())),
            tuple((v.dtype.name, v.ndim) if v is not None else None for v in inputs),
        )
        if key not in self.programs:
            self.programs[key] = Static(single_node(node, inputs, attributes, scope.opsets))
        values = {f"x{k}": v for k, v in enumerate(inputs) if v is not None}
        results = iter(self.programs[key](values))
        return [next(results) if o else None for o in node.output]

    def function(
        self,
        body: Any,
        inputs: Sequence[Value],
        attributes: Mapping[str, Any],
        scope: Scope,
        opset: int | None,
    ) -> list[Value]:
        """Outputs of a function body; `opset` is that of the operator it stands for, if any."""
        values = (*inputs, *[None] * len(body.input))
        attrs = {a.name: a for a in body.attribute_proto} | dict(attributes)
        opsets = _opsets(body.opset_import) or dict(scope.opsets)
        inner = Scope(
            dict(zip(body.input, values, strict=False)), None, opsets, attrs, scope.depth + 1
        )
        self.nodes(body.node, inner)
        return [inner.find(o) for o in body.output]

    def subgraph(self, call: Call, graph: Any, inputs: Sequence[Value]) -> list[Value]:
        """Outputs of a node's subgraph on given inputs."""
        values = [np.asarray(v) if isinstance(v, np.generic) else v for v in inputs]
        return self.graph(
            graph, call.scope.inner(dict(zip((i.name for i in graph.input), values, strict=True)))
        )


_RAW = frozenset({11, 12, 13, 14})  # sparse tensors and types stay protos


def _opsets(imports: Any) -> dict[str, int]:
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in imports}


def _attributes(node: Any, outer: Mapping[str, Any]) -> dict[str, Any]:
    """name -> AttributeProto, references to the function's attributes resolved."""
    attributes = {}
    for a in node.attribute:
        if not a.ref_attr_name:
            attributes[a.name] = a
        elif a.ref_attr_name in outer:
            attributes[a.name] = outer[a.ref_attr_name]
    return attributes
