"""ONNX nodes to canonical operations, one pass in topological order.

Dims are integers by now, so each node's output shapes follow at once from its inputs': shape
arithmetic folds to constants on the way and never reaches the draft. Functions, constant Ifs and
rare operators that ONNX defines by a body are entered through a `Frame` (a name table), never
copied. What cannot be lowered is collected and reported in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import DTYPE_BYTES, WeightRef
from planner.reader.draft.draft import FOLD_ELEMENTS, Draft, proto_array
from planner.reader.draft.shapes import ShapeError, Type
from planner.reader.lower.call import Call, Frame, Unsupported
from planner.reader.lower.guide import Guide
from planner.reader.lower.opaque import keep_or_expand, schema_of
from planner.reader.lower.select import Selected, follow, of_pair
from planner.reader.onnx.check import order_nodes
from planner.reader.onnx.statement import Statement
from planner.reader.onnx.tensors import check_tensor

_OF_SEQUENCES = frozenset(
    {
        "SequenceInsert",
        "SequenceErase",
        "SequenceAt",
        "SequenceLength",
        "ConcatFromSequence",
        "Loop",
        "If",
        "Identity",
    }
)
MAX_DEPTH = 64
"""Nested subgraphs and functions beyond this are refused."""
MOST_NESTED = 128
"""Bodies inside bodies, of a whole model: every plan prices each once for each that it is in, and a
file of a few kilobytes can double them with every level."""


class Lowering:
    """Drives one model through the operator tables; `functions` maps (domain, name, overload) to
    FunctionProtos."""

    def __init__(
        self,
        draft: Draft,
        functions: Mapping[tuple[str, str, str], Any],
        declared: dict[str, Type],
        table: Mapping[tuple[str, str], Callable[[Call], None]],
    ) -> None:
        self.draft, self.functions, self.declared, self.table = draft, functions, declared, table
        self.problems: list[str] = []
        self.notes = draft.notes
        self.bad: dict[str, str] = {}
        self.ids: set[str] = set()
        self.ordinals: dict[str, int] = {}
        self.guide: Guide | None = None
        self.within, self.nested = (
            False,
            [0],
        )  # whether this is a body's; bodies inside bodies, of the whole model
        self.sequences: dict[str, tuple[str, ...]] = {}
        """Sequences of tensors by their names, which are no tensors'
        (planner.reader.lower.sequence)."""
        self.selected: dict[str, Selected] = {}
        self.pairs: set[str] = set()
        self.columns: dict[str, str] = {}
        """Tokens that loops over experts look up (planner.reader.lower.select)."""
        self.expanded = [0]
        """Nodes that unrolled loops became; one list for the model and its bodies."""

    # names and leaves

    def of_body(self, draft: Draft) -> Lowering:
        """The lowering of a body of control flow, which shares what the model has once. Raises
        Unsupported where bodies are nested too often."""
        inner = Lowering(draft, self.functions, {}, self.table)
        inner.problems, inner.bad, inner.ids = self.problems, self.bad, self.ids
        inner.expanded, inner.notes = self.expanded, self.notes
        inner.within, inner.nested = True, self.nested
        self.nested[0] += self.within
        if self.nested[0] > MOST_NESTED:
            raise Unsupported(f"more than {MOST_NESTED} bodies inside bodies of control flow")
        return inner

    def unique_id(self, wanted: str) -> str:
        """`wanted`, or with an ordinal when taken."""
        if wanted in self.ids:
            k = self.ordinals.get(wanted, 0) + 1
            while f"{wanted}.{k}" in self.ids:
                k += 1
            self.ordinals[wanted] = k
            wanted = f"{wanted}.{k}"
        self.ids.add(wanted)
        return wanted

    def add_initializer(self, frame: Frame, tensor: Any, name: str) -> None:
        """Registers a TensorProto of a body as a leaf: small known values, or a reference to bytes
        not looked at."""
        self.add_leaf(frame, name, *check_tensor(tensor, name, None))

    def add_leaf(self, frame: Frame, name: str, type_: Type, ref: WeightRef) -> None:
        """Registers a tensor of a known type as a leaf, by a reference to its bytes."""
        shape, dtype = type_
        if dtype not in DTYPE_BYTES:
            self.bad[name] = f"tensor {name!r} has type {dtype}, which cannot be planned"
            frame.env[name] = None
            return
        leaf = self.draft.fresh(frame.prefix + name)
        self.add_ref(leaf, shape, dtype, ref)
        frame.env[name] = leaf

    def add_ref(self, name: str, shape: tuple[int, ...], dtype: str, ref: WeightRef) -> None:
        """Decides whether a leaf's value is known at once (integers, scalars) or may be a
        parameter."""
        draft, elements = self.draft, int(np.prod(shape, dtype=object)) if shape else 1
        is_float = dtype.startswith(("float", "bfloat"))
        draft.types[name] = (shape, dtype)
        if ref.kind == "inline" and elements <= (1 if is_float else FOLD_ELEMENTS):
            draft.values[name] = proto_array(ref.proto)
            learned = is_float and draft.records.learned(name)
            if is_float and (shape or learned):
                draft.keep_floats.add(name)
            if learned:
                draft.learned.add(name)
        else:
            draft.refs[name] = ref

    # nodes

    def run(self, nodes: Sequence[Statement], frame: Frame) -> None:
        """Lowers nodes in dependency order within a frame. Raises PlanError for contradictions."""
        if frame.depth > MAX_DEPTH:
            raise PlanError("P121", f"subgraphs and functions are nested deeper than {MAX_DEPTH}")
        names: dict[str, int] = {}
        if not frame.prefix:
            for node in nodes:
                names[node.name] = names.get(node.name, 0) + 1
        for node in nodes:
            self._node(node, frame, names)

    def _identify(self, node: Statement, frame: Frame, names: dict[str, int]) -> tuple[str, str]:
        scope = node.scope or frame.scope
        if node.name and (frame.prefix or names.get(node.name) == 1):
            wanted = frame.prefix + node.name
        elif node.name:
            wanted = f"{node.name}.{self.ordinals.setdefault('name:' + node.name, 0)}"
            self.ordinals["name:" + node.name] += 1
        else:
            base = frame.prefix + (
                f"{scope}/{node.op_type}" if scope and not frame.prefix else node.op_type
            )
            k = self.ordinals.get("op:" + base, 0)
            self.ordinals["op:" + base] = k + 1
            wanted = f"{base}.{k}"
        return self.unique_id(wanted), scope

    def _inputs(self, node: Statement, frame: Frame) -> tuple[list[str], str]:
        """The draft's names of a node's inputs ("" where there is none), and why one of them cannot
        be planned: "-" where the reason is reported already, "" where all can be."""
        inputs: list[str] = []
        blocked = ""
        for name in node.input:
            if not name:
                inputs.append("")
                continue
            try:
                tensor = frame.find(name)
            except KeyError:
                raise PlanError(
                    "P111",
                    f"tensor {name!r} is used by node {node.name!r} ({node.op_type}) but nothing"
                    " makes it",
                ) from None
            if tensor is None:
                blocked = self.bad.get(name, "-")
            inputs.append(tensor or "")
        return inputs, blocked

    def _node(self, node: Statement, frame: Frame, names: dict[str, int]) -> None:
        inputs, blocked = self._inputs(node, frame)
        if node.op_type == "Constant" and not node.domain:
            id_, scope = "", ""
        else:
            id_, scope = self._identify(node, frame, names)
        if blocked:
            if blocked != "-":
                self.problems.append(f"{_kind(node)} (node {id_!r}): {blocked}")
            self._unknown(node, frame)
            return
        call = Call(self, node, frame, id_, scope, inputs)
        start = len(self.draft.ops)
        try:
            self._lower_call(call, start)
        except Unsupported as reason:
            within = f" of module {scope!r}" if scope and scope not in id_ else ""
            self.problems.append(f"{_kind(node)} (node {id_!r}{within}): {reason}")
            del self.draft.ops[start:]
            self._unknown(node, frame)
            return
        except ShapeError as reason:
            shapes = ", ".join(f"{i} {list(self.draft.shape(i))}" for i in inputs if i)
            raise PlanError(
                "P115", f"node {id_!r} ({node.op_type}): {reason}", detail=[f"inputs: {shapes}"]
            ) from None
        except (
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            OverflowError,
            ZeroDivisionError,
        ) as error:
            # inputs or attributes that the operator does not have: files are not trusted to be
            # well-formed
            what = f"{type(error).__name__}: {error}"[:200]
            raise PlanError(
                "P116",
                f"node {id_!r} ({_kind(node)}) has wrong inputs or attributes",
                detail=[what],
            ) from error
        for k, output in enumerate(node.output):
            if output and output not in frame.env:
                if k == 0:
                    raise PlanError("P115", f"node {id_!r} ({node.op_type}) makes no {output!r}")
                frame.env[output] = None
                self.bad[output] = f"output {k} of {node.op_type} is not supported"
        self._label(call, start)

    def _lower_call(self, call: Call, start: int) -> None:
        """Adds a node's operations to the draft, from `start` on. Raises Unsupported."""
        pair = bool(self.selected) and of_pair(call)
        if (
            not pair
            and self.sequences
            and call.op not in _OF_SEQUENCES
            and not self.sequences.keys().isdisjoint(call.inputs)
        ):
            raise Unsupported("it works on a sequence of tensors")
        if not pair:
            self._lower(call)
        if self.selected:
            follow(call)
        self._sound(start)
        if self.guide is not None:
            self.guide.step(start)

    def _sound(self, start: int) -> None:
        """What an operator table took over unread must still be of the kinds a Node may hold.
        Raises Unsupported and TypeError."""
        for op in self.draft.ops[start:]:
            for name in op.outputs:
                if name and self.draft.dtype(name) not in DTYPE_BYTES:
                    raise Unsupported(
                        f"its result has type {self.draft.dtype(name)}, which cannot be planned"
                    )
            for key, value in op.attrs.items():
                if not all(
                    isinstance(v, (int, float, str, np.number))
                    for v in (value if isinstance(value, tuple) else (value,))
                ):
                    raise TypeError(
                        f"attribute {key!r} holds {type(value).__name__} {str(value)[:40]!r}"
                    )

    def _unknown(self, node: Statement, frame: Frame) -> None:
        for output in node.output:
            if output:
                frame.env[output] = None

    def _label(self, call: Call, start: int) -> None:
        """Ids of what one node became: its own when it became one operation, else suffixed by the
        operation."""
        unnamed = [op for op in self.draft.ops[start:] if not op.id]
        for op in unnamed:
            if len(unnamed) == 1:
                op.id = call.id
            else:
                op.id, op.members = self.unique_id(f"{call.id}/{op.op.lower()}"), (call.id,)
            op.scope = call.scope

    def _lower(self, call: Call) -> None:
        node = call.node
        domain = "" if node.domain == "ai.onnx" else node.domain
        body = self.functions.get((node.domain, node.op_type, node.overload))
        if body is not None:
            self.enter(call, body)
            return
        rule: Callable[[Call], None] | None = self.table.get((domain, node.op_type))
        if rule is not None:
            schema = schema_of(node.op_type, call.opset, domain)
            if schema is not None and (
                len(node.input) > schema.max_input or len(node.output) > schema.max_output
            ):
                raise TypeError(f"{len(node.input)} inputs and {len(node.output)} outputs")
            rule(call)
            return
        keep_or_expand(call, domain)

    def enter(self, call: Call, function: Any) -> None:
        """Lowers a function body in place of its call."""
        arguments = [*call.inputs, *[""] * len(function.input)]
        env: dict[str, str | None] = dict(zip(function.input, arguments, strict=False))
        attrs = {a.name: a for a in function.attribute_proto} | call.attrs
        opsets = {
            ("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import
        } or call.frame.opsets
        inner = Frame(env, opsets, None, attrs, f"{call.id}/", call.scope, call.frame.depth + 1)
        self.run(order_nodes(function.node, set(env), f"function {function.name!r}"), inner)
        for k, name in enumerate(function.output):
            if k < len(call.node.output) and call.node.output[k]:
                try:
                    call.frame.env[call.node.output[k]] = inner.find(name)
                except KeyError:
                    raise PlanError(
                        "P113", f"function {function.name!r} never makes its output {name!r}"
                    ) from None

    def branch(self, call: Call, graph: Any) -> None:
        """Lowers the taken branch of a constant If in place of it."""
        inner = Frame(
            {},
            call.frame.opsets,
            call.frame,
            call.frame.attrs,
            f"{call.id}/",
            call.scope,
            call.frame.depth + 1,
        )
        for tensor in graph.initializer:
            self.add_initializer(inner, tensor, tensor.name)
        self.run(order_nodes(graph.node, None, f"branch of node {call.id!r}"), inner)
        for k, output in enumerate(graph.output):
            if k < len(call.node.output) and call.node.output[k]:
                try:
                    call.frame.env[call.node.output[k]] = inner.find(output.name)
                except KeyError:
                    raise PlanError(
                        "P113",
                        f"a branch of node {call.id!r} never makes its output {output.name!r}",
                    ) from None

    def remark(self, note: str) -> None:
        """A note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)

    def report(self) -> None:
        """One error that lists everything that cannot be planned. Raises PlanError."""
        if self.problems:
            shown = self.problems[:40]
            rest = [f"... and {len(self.problems) - 40} more"] if len(self.problems) > 40 else []
            looped = any(
                problem.startswith("NonZero") and "expert" in problem for problem in self.problems
            )
            picked = any(
                problem.startswith(("NonZero", "NonMaxSuppression")) for problem in self.problems
            )
            remedy = (
                'set config._experts_implementation = "batched_mm" before the model is made (a loop'
                " depends on data)"
                if looped
                else "what picks boxes or rows by their values has no fixed size: take it off the"
                " model (of a torchvision detector leave backbone and head)"
                if picked
                else "write these parts otherwise"
            )
            what = f"{len(self.problems)} operator(s) of the model cannot be planned"
            raise PlanError(
                "P130",
                what,
                detail=[*shown, *rest],
                help=[f"{remedy}; export again (docs/exporting.md)"],
            )


def _kind(node: Statement) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
