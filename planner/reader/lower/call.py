"""One ONNX node while it is lowered: its names, attributes and constant inputs, and ways to emit
canonical operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from planner.graph.ir import WeightRef
from planner.reader.draft.draft import Draft
from planner.reader.draft.shapes import ShapeError, Type
from planner.reader.lower.guide import Guide
from planner.reader.onnx.statement import Statement

MOST_INTS = 4096


class Unsupported(Exception):
    """This node cannot be planned; the text says why."""


@dataclass
class Frame:
    """Names visible to a list of nodes: the main graph, a function body or a branch.

    env maps ONNX names to draft tensors; None marks a tensor nothing is known about. Branches see
    their parent's names.
    """

    env: dict[str, str | None]
    opsets: dict[str, int]
    parent: Frame | None = None
    attrs: dict[str, Any] = field(default_factory=dict)  # function attributes, for ref_attr_name
    prefix: str = ""  # of node ids and tensor names
    scope: str = ""
    depth: int = 0

    def find(self, name: str) -> str | None:
        """Draft tensor of an ONNX name. Raises KeyError."""
        if name in self.env:
            return self.env[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent.find(name)


class Driver(Protocol):
    """What rules ask of the lowering that drives them (planner.reader.lower.lowering)."""

    draft: Draft
    functions: Mapping[tuple[str, str, str], Any]
    declared: dict[str, Type]
    problems: list[str]
    bad: dict[str, str]
    guide: Guide | None
    nested: list[int]
    expanded: list[int]
    sequences: dict[str, tuple[str, ...]]
    selected: dict[str, Any]
    pairs: set[str]
    columns: dict[str, str]

    def of_body(self, draft: Draft) -> Driver:
        """The lowering of a body of control flow."""

    def add_initializer(self, frame: Frame, tensor: Any, name: str) -> None:
        """Registers a TensorProto of a body as a leaf."""

    def add_ref(self, name: str, shape: tuple[int, ...], dtype: str, ref: WeightRef) -> None:
        """Decides whether a leaf's value is known at once or may be a parameter."""

    def run(self, nodes: Sequence[Statement], frame: Frame) -> None:
        """Lowers nodes in dependency order within a frame."""

    def enter(self, call: Call, function: Any) -> None:
        """Lowers a function body in place of its call."""

    def branch(self, call: Call, graph: Any) -> None:
        """Lowers the taken branch of a constant If in place of it."""

    def remark(self, note: str) -> None:
        """A note for the user, once."""


class Call:
    """One ONNX node being lowered: resolved inputs, attributes with defaults, and ways to emit."""

    __slots__ = (
        "attrs",
        "draft",
        "frame",
        "id",
        "inputs",
        "lowering",
        "node",
        "op",
        "opset",
        "scope",
    )

    def __init__(
        self,
        lowering: Driver,
        node: Statement,
        frame: Frame,
        id_: str,
        scope: str,
        inputs: list[str],
    ) -> None:
        self.lowering, self.node, self.frame, self.id, self.scope = (
            lowering,
            node,
            frame,
            id_,
            scope,
        )
        self.draft, self.inputs, self.op = lowering.draft, inputs, node.op_type
        domain = "" if node.domain == "ai.onnx" else node.domain
        self.opset = frame.opsets.get(domain, frame.opsets.get("", 0))
        self.attrs = {}
        for name, reference, a in node.attributes:
            if not reference:
                self.attrs[name] = a
            elif reference in frame.attrs:
                self.attrs[name] = frame.attrs[reference]

    def attr(self, name: str, default: Any = None) -> Any:
        """Python value of an attribute, or the default."""
        a = self.attrs.get(name)
        return default if a is None else attribute_value(a)

    def has(self, k: int) -> bool:
        """True when optional input k is given."""
        return k < len(self.inputs) and bool(self.inputs[k])

    def arg(self, k: int) -> str:
        """Draft tensor of input k, '' when absent."""
        return self.inputs[k] if k < len(self.inputs) else ""

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """Shape of input k."""
        return self.draft.shape(self.inputs[k])

    def dtype(self, k: int = 0) -> str:
        """dtype of input k."""
        return self.draft.dtype(self.inputs[k])

    def const(self, k: int, what: str) -> np.ndarray:
        """Value of input k, which must be constant. Raises Unsupported."""
        value = self.draft.value(self.inputs[k])
        if value is None:
            raise Unsupported(f"{what} is computed from run-time data")
        return value

    def ints(self, k: int, what: str) -> list[int]:
        """Input k as a flat list of ints: sizes, axes or bounds. Raises ShapeError for more of them
        than any tensor has dims or pieces."""
        values = self.const(k, what).reshape(-1)
        if values.size > MOST_INTS:
            raise ShapeError(f"{what} holds {values.size} numbers")
        if values.dtype.kind not in "iubf":
            raise ShapeError(f"{what} holds {values.dtype} values")
        return [int(v) for v in values]

    def axis(self, axis: int, rank: int) -> int:
        """A non-negative axis. Raises ShapeError."""
        if not -rank <= axis < max(rank, 1):
            raise ShapeError(f"axis {axis} of a tensor with {rank} dims")
        return axis % rank if rank else 0

    def emit(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any] | None = None,
        *,
        shape: Any = None,
        out: str = "",
    ) -> str:
        """Adds a canonical operation; `out` names the result (default: derived from this node's
        first output)."""
        return self.draft.add(
            op, inputs, attrs, out=out or f"{self.name(0)}/{op.lower()}", shape=shape
        )

    def name(self, k: int = 0) -> str:
        """Draft name for output k."""
        return self.frame.prefix + self.node.output[k] if k < len(self.node.output) else ""

    def bind(self, tensor: str, k: int = 0) -> None:
        """Declares which draft tensor output k is."""
        if k < len(self.node.output) and self.node.output[k]:
            self.frame.env[self.node.output[k]] = tensor

    def result(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any] | None = None,
        *,
        shape: Any = None,
    ) -> None:
        """Emits the operation that makes the (only) output."""
        self.bind(self.draft.add(op, inputs, attrs, out=self.name(0), shape=shape))

    def results(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any] | None = None,
        *,
        shape: Any = None,
    ) -> None:
        """Emits an operation with several outputs, named after this node's."""
        names = [self.frame.prefix + o if o else "" for o in self.node.output]
        for k, result in enumerate(self.draft.add_many(op, inputs, attrs or {}, names, shape)):
            if result:
                self.bind(result, k)

    def wants(self, k: int) -> bool:
        """True when output k has a name."""
        return k < len(self.node.output) and bool(self.node.output[k])

    def constant(self, array: np.ndarray, what: str = "const") -> str:
        """A constant operand made by the reader."""
        return self.draft.constant(f"{self.name(0)}/{what}", np.asarray(array))


def attribute_value(a: Any) -> Any:
    """Python value of an AttributeProto (strings decoded, tensors and graphs as protos)."""
    kind = a.type
    if kind == 1:
        return a.f
    if kind == 2:
        return a.i
    if kind == 3:
        return a.s.decode("utf-8", "replace")
    if kind == 4:
        return a.t
    if kind == 5:
        return a.g
    if kind == 6:
        return list(a.floats)
    if kind == 7:
        return list(a.ints)
    if kind == 8:
        return [s.decode("utf-8", "replace") for s in a.strings]
    raise Unsupported(f"attribute {a.name!r} has a type that is not handled")
