"""Subgraphs that stay subgraphs: the branches of an If and the bodies of loops, each a draft of its
own.

A body sees the names around it. A small value it reads is copied into it, so that shape arithmetic
folds inside as it does outside; anything else it reads is *captured*: an input of the body and an
operand of the node. Weights stored inside a body are moved out and captured too, so that they are
weights of the graph like any other, with a label, a slot that says whether they train, and an
optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import Graph, Node, Tensor
from planner.graph.value_digest import value_bytes
from planner.reader.draft.draft import FOLD_ELEMENTS, Draft, Op
from planner.reader.draft.shapes import Type
from planner.reader.lower.call import Call, Frame, Unsupported
from planner.reader.onnx.check import order_nodes


class Captured(Frame):
    """Names of a body: its own, then those around it, which become captures of its draft."""

    def __init__(self, around: Frame, outer: Draft, inner: Draft, prefix: str, scope: str) -> None:
        super().__init__({}, around.opsets, None, around.attrs, prefix, scope, around.depth + 1)
        self.around, self.outer, self.inner = around, outer, inner
        self.captures: dict[str, str] = {}
        """outer tensor -> input of the body"""

    def find(self, name: str) -> str | None:
        """Draft tensor of an ONNX name. Raises KeyError."""
        if name not in self.env:
            outside = self.around.find(name)
            self.env[name] = self.capture(outside) if outside else outside
        return self.env[name]

    def capture(self, name: str) -> str:
        """The body's name for a tensor around it."""
        value = None if name in self.outer.keep_floats else self.outer.values.get(name)
        if value is None and not self.outer.is_float(name):
            value = self.outer.value(name, FOLD_ELEMENTS)
        if value is not None and value.size <= FOLD_ELEMENTS:
            return self.inner.leaf(self.inner.fresh(name), value)
        if name not in self.captures:
            inner_name = self.captures[name] = self.inner.fresh(name)
            self.inner.types[inner_name] = self.outer.types[name]
        return self.captures[name]


class Body:
    """One subgraph as a draft. own: its leading inputs, which are not captures; captures: outer
    tensor -> its name inside."""

    def __init__(
        self,
        call: Call,
        graph: Any,
        own: Sequence[Type],
        constants: dict[int, np.ndarray],
        what: str,
    ) -> None:
        """Lowers the graph. own: types of its inputs, in order; constants: inputs whose value is
        known. Raises Unsupported and PlanError."""
        if len(graph.input) != len(own) + len(constants):
            raise TypeError(
                f"its {what} takes {len(graph.input)} inputs, not {len(own) + len(constants)}"
            )
        self.draft = Draft(name=graph.name)
        self.frame = Captured(call.frame, call.draft, self.draft, f"{call.id}/", call.scope)
        types = iter(own)
        self.own: list[str] = []
        for k, info in enumerate(graph.input):
            name = self.draft.fresh(info.name or f"input.{k}")
            if k in constants:
                self.draft.leaf(name, constants[k])
            else:
                self.draft.types[name] = next(types)
                self.own.append(name)
            self.frame.env[info.name] = name
        self._lower(call, graph, what)
        self.captures = self.frame.captures
        self._export(call)
        live = {i for op in self.draft.ops for i in op.inputs} | set(self.draft.outputs)
        self.captures = {outer: inner for outer, inner in self.captures.items() if inner in live}

    def _lower(self, call: Call, graph: Any, what: str) -> None:
        from planner.reader.draft.simplify import tidy
        from planner.reader.fuse.fuse import fuse

        outer = call.lowering
        lowering = outer.of_body(self.draft)
        before = len(outer.problems)
        for tensor in graph.initializer:
            lowering.add_initializer(self.frame, tensor, tensor.name)
        lowering.run(order_nodes(graph.node, None, f"{what} of node {call.id!r}"), self.frame)
        if len(outer.problems) > before:
            raise Unsupported(f"its {what} holds what cannot be planned")
        for output in graph.output:
            try:
                output_name = self.frame.find(output.name)
            except KeyError:
                raise PlanError(
                    "P113", f"the {what} of node {call.id!r} never makes its output {output.name!r}"
                ) from None
            if not output_name:
                raise Unsupported(f"its {what} gives {output.name!r}, of which nothing is known")
            self.draft.outputs.append(output_name)
        self.draft.inputs = [*self.own, *self.frame.captures.values()]
        self.draft.forget()
        tidy(self.draft)
        fuse(self.draft)

    def _export(self, call: Call) -> None:
        """Moves stored weights out of the body."""
        inner, outer = self.draft, call.draft
        for name in [*inner.refs, *(n for n in inner.keep_floats if n in inner.values)]:
            outer_name = outer.fresh(name)
            outer.types[outer_name] = inner.types[name]
            if name in inner.refs:
                outer.refs[outer_name] = inner.refs.pop(name)
            else:
                outer.values[outer_name] = inner.values.pop(name)
                outer.keep_floats.add(outer_name)
            self.captures[outer_name] = name

    def settle(self, captures: Sequence[str]) -> None:
        """Fixes the inputs: its own, then one per capture (an unused one where this body does not
        read it)."""
        inner = self.draft
        names = []
        for outer in captures:
            if outer not in self.captures:
                unused = inner.fresh(outer)
                inner.types[unused] = self.frame.outer.types[outer]
                self.captures[outer] = unused
            names.append(self.captures[outer])
        inner.inputs = [*self.own, *names]

    def types(self) -> list[Type]:
        """Types of the outputs."""
        return [self.draft.types[o] for o in self.draft.outputs]


def constant_output(body: Body, k: int) -> np.ndarray | None:
    """The value of an output that does not depend on the body's inputs."""
    return body.draft.value(body.draft.outputs[k], FOLD_ELEMENTS)


def add_region(
    call: Call,
    op: str,
    operands: Sequence[str],
    bodies: Sequence[Body],
    outputs: Sequence[Type],
    attrs: dict[str, Any],
) -> None:
    """Adds the node: operands of its own, then what its bodies capture. Output k of the ONNX node
    is result k."""
    draft = call.draft
    captures = list(dict.fromkeys(name for body in bodies for name in body.captures))
    for body in bodies:
        body.settle(captures)
    names = []
    for k, type_ in enumerate(outputs):
        if call.wants(k):
            result = draft.fresh(call.name(k))
            draft.types[result] = type_
            call.bind(result, k)
            names.append(result)
        else:
            names.append("")
    made_by = Op(
        op, [*operands, *captures], names, attrs, bodies=tuple(body.draft for body in bodies)
    )
    for name in names:
        if name:
            draft.maker[name] = made_by
    draft.ops.append(made_by)


def body_graph(draft: Draft) -> Graph:
    """A body as a Graph without weights: what it reads from outside are inputs."""
    from planner.reader.draft.simplify import drop_copies, drop_dead

    drop_copies(draft)
    drop_dead(draft)
    used = {i for op in draft.ops for i in op.inputs if i} | set(draft.outputs)
    constants = {
        name: np.array(value, order="C") for name, value in draft.values.items() if name in used
    }
    tensors = {
        name: Tensor(name, *_plain(draft.types[name]), role="input") for name in draft.inputs
    }
    tensors |= {
        name: Tensor(name, *_plain(draft.types[name]), role="constant") for name in constants
    }
    tensors |= {o: Tensor(o, *_plain(draft.types[o])) for op in draft.ops for o in op.outputs if o}
    return Graph(
        draft.name,
        tuple(map(frozen, draft.ops)),
        tensors,
        tuple(draft.inputs),
        tuple(draft.outputs),
        constants=constants,
    )


def _plain(type_: Type) -> Type:
    return tuple(int(n) for n in type_[0]), type_[1]


def frozen(op: Op) -> Node:
    """An operation as a Node; those with bodies carry a digest of them among their attributes, so
    that equal work is seen to be equal."""
    bodies = tuple(body_graph(b) for b in op.bodies)
    attrs = {**op.attrs, "digest": digest(bodies)} if bodies else op.attrs
    return Node(
        op.id, op.op, tuple(op.inputs), tuple(op.outputs), attrs, op.scope, op.members, bodies
    )


def digest(bodies: Sequence[Graph]) -> str:
    """A hash of what the bodies compute, names aside."""
    hashed = hashlib.sha256()
    for graph in bodies:
        index = {name: f"i{k}" for k, name in enumerate(graph.inputs)}
        for name, value in graph.constants.items():
            index[name] = hashlib.sha256(value_bytes(value)).hexdigest()[:16]
        for node in graph.nodes:
            index.update((o, f"t{len(index)}.{k}") for k, o in enumerate(node.outputs) if o)
            rows = [
                (index[o], graph.tensors[o].shape, graph.tensors[o].dtype)
                for o in node.outputs
                if o
            ]
            hashed.update(
                repr(
                    (
                        node.op,
                        [index.get(i, "") for i in node.inputs],
                        sorted(node.attrs.items()),
                        rows,
                    )
                ).encode()
            )
        hashed.update(repr([(index[o], graph.tensors[o].shape) for o in graph.outputs]).encode())
        hashed.update(
            repr([(graph.tensors[i].shape, graph.tensors[i].dtype) for i in graph.inputs]).encode()
        )
    return hashed.hexdigest()[:16]
