"""The graph while it is being made: mutable, name-keyed, with every shape known as soon as a tensor
exists.

A tensor is one of: a graph input, a leaf (`values` for known arrays, `refs` for weight bytes not
looked at), or the output of an operation in `ops`. `Draft.add` infers shapes, drops operations that
do nothing, and folds what is constant. `Draft.value` looks a constant up, evaluating small constant
subgraphs on demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import FLOATS, WeightRef
from planner.reader.draft.fold import evaluate
from planner.reader.draft.shapes import ShapeError, Type, infer
from planner.reader.draft.weight_transforms import transformed
from planner.reader.onnx.records import Records

FOLD_ELEMENTS = 65_536
"""Most elements a folded constant may keep in the finished graph."""
LOOK_ELEMENTS = 1 << 23
"""Most elements `value` evaluates when a pattern asks what a constant is."""
MOST_DIMS = 32
"""A tensor with more is refused: there are as many layouts as dims to the power of the mesh's axes,
and pairs of them, and no model needs it."""
MOST_ELEMENTS = 1 << 53
"""A tensor with more elements is refused: counts would no longer be exact, and no memory holds
it."""


@dataclass(slots=True, eq=False)
class Op:
    """One operation of the draft. `id`, `scope` and `members` mean what they mean in
    `planner.graph.ir.Node`."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]
    id: str = ""
    scope: str = ""
    members: tuple[str, ...] = ()
    bodies: tuple[Draft, ...] = ()


@dataclass
class Draft:
    """Everything the passes share. `types` holds (shape, dtype) of every tensor."""

    name: str = ""
    ops: list[Op] = field(default_factory=list)
    types: dict[str, Type] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    refs: dict[str, WeightRef] = field(default_factory=dict)
    copy_of: dict[str, str] = field(default_factory=dict)
    """Names an exporter gave to the same initializer through Identity: name -> the initializer."""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    maker: dict[str, Op] = field(default_factory=dict)
    keep_floats: set[str] = field(default_factory=set)
    """Float leaves that may be parameters: looked up on demand, never folded away early."""
    records: Records = field(default_factory=Records)
    learned: set[str] = field(default_factory=set)
    """Numbers that training changes (a temperature), and what is made of them alone: no pattern may
    take one for a constant."""
    _ordinals: dict[str, int] = field(
        default_factory=dict
    )  # base -> a number below which `fresh` found all taken
    _looked: dict[int, dict[str, np.ndarray | None]] = field(
        default_factory=dict
    )  # limit -> what `value` found

    def shape(self, name: str) -> tuple[int, ...]:
        """Static shape of a tensor."""
        return self.types[name][0]

    def dtype(self, name: str) -> str:
        """dtype name of a tensor."""
        return self.types[name][1]

    def is_float(self, name: str) -> bool:
        """True for a tensor that a gradient can flow through."""
        return self.types[name][1] in FLOATS

    def fresh(self, base: str) -> str:
        """A tensor name not in use, equal to `base` where possible."""
        if base and base not in self.types:
            return base
        k = self._ordinals.get(base, 1)
        while f"{base}.{k}" in self.types:
            k += 1
        self._ordinals[base] = k
        return f"{base}.{k}"

    def leaf(self, name: str, array: np.ndarray) -> str:
        """Registers a known constant."""
        self.values[name] = array
        self.types[name] = (tuple(array.shape), array.dtype.name)
        return name

    def constant(self, base: str, array: np.ndarray) -> str:
        """A new constant tensor made by the reader."""
        return self.leaf(self.fresh(base), array)

    def is_leaf(self, name: str) -> bool:
        """True for constants and weights."""
        return name in self.values or name in self.refs

    def value(self, name: str, limit: int = LOOK_ELEMENTS) -> np.ndarray | None:
        """The array of a tensor that depends on constants alone, or None when it does not, or is
        too large."""
        known = self.values.get(name)
        if known is not None:
            return known
        if not name or math.prod(self.shape(name)) > limit:
            return None
        looked = self._looked.setdefault(limit, {})
        if name not in looked:
            looked[name] = None
            if name in self.refs:
                looked[name] = ref_array(self.refs[name], name)
            elif name in self.maker:
                self._evaluate(self.maker[name], looked, limit)
        return looked[name]

    def forget(self, name: str | None = None) -> None:
        """Drops remembered values: of one leaf that changed, or all of them to free memory."""
        for looked in self._looked.values():
            looked.pop(name, None) if name is not None else looked.clear()

    def _evaluate(self, op: Op, looked: dict[str, np.ndarray | None], limit: int) -> None:
        """Evaluates constant ancestors, iteratively (chains may be deeper than the recursion
        limit)."""
        stack = [op]
        while stack:
            top = stack[-1]
            below: list[Op] = []
            for i in top.inputs:
                if not i or i in self.values or i in looked:
                    continue
                if i in self.refs and math.prod(self.shape(i)) <= limit:
                    looked[i] = ref_array(self.refs[i], i)
                elif i in self.maker and math.prod(self.shape(i)) <= limit:
                    below.append(self.maker[i])
                else:
                    looked[i] = None
            if below:
                stack.extend(below)
                continue
            stack.pop()
            arrays = [self.values.get(i, looked.get(i)) if i else None for i in top.inputs]
            known = all(a is not None or not i for a, i in zip(arrays, top.inputs, strict=True))
            cheap = all(
                math.prod(self.shape(o)) <= (FOLD_ELEMENTS if top.op == "MatMul" else limit)
                for o in top.outputs
                if o
            )
            results = (
                evaluate(top.op, top.attrs, arrays, [self.types[o] for o in top.outputs if o])
                if known and cheap
                else None
            )
            for k, name in enumerate(o for o in top.outputs if o):
                looked[name] = None if results is None else results[k]

    def scalar(self, name: str) -> float | None:
        """The number a one-element constant holds, or None."""
        if not name or name in self.learned or math.prod(self.shape(name)) != 1:
            return None
        value = self.value(name)
        return None if value is None else float(value.reshape(()))

    def splat(self, name: str) -> float | None:
        """The number that every element of a small constant equals, or None."""
        if not name or name in self.learned or not 0 < math.prod(self.shape(name)) <= FOLD_ELEMENTS:
            return None
        value = self.value(name)
        if value is None or value.dtype.kind in "OSU":
            return None
        first = value.reshape(-1)[0]
        return float(first) if bool((value == first).all()) else None

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any] | None = None,
        *,
        out: str = "",
        shape: Any = None,
    ) -> str:
        """Adds an operation and returns its first output; `shape` gives what inputs do not
        determine.

        The returned name may differ from `out`: nothing is added where the operation does nothing
        or folds. Raises ShapeError.
        """
        attrs = dict(attrs or {})
        if op == "Concat":  # an empty cache adds nothing
            inputs = [i for i in inputs if 0 not in self.shape(i)] or inputs[:1]
        inputs = self._bypass(op, list(inputs), attrs)
        types = infer(op, attrs, [self.types[i] if i else None for i in inputs], shape)
        if len(types) == 1 and (same := self._same(op, inputs, attrs, types[0])):
            return same
        return self._append(op, inputs, attrs, [out], types)[0]

    def add_many(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: dict[str, Any],
        out: Sequence[str],
        shape: Any = None,
    ) -> list[str]:
        """Like `add` for an operation with several outputs; '' marks one that nobody reads. Returns
        their names."""
        return self._append(
            op,
            list(inputs),
            dict(attrs),
            out,
            infer(op, attrs, [self.types[i] if i else None for i in inputs], shape),
        )

    def _append(
        self,
        op: str,
        inputs: list[str],
        attrs: dict[str, Any],
        out: Sequence[str],
        types: list[Type],
    ) -> list[str]:
        for shape, _ in types:
            if len(shape) > MOST_DIMS:
                raise ShapeError(f"a tensor with {len(shape)} dims")
            if min(shape, default=0) < 0:
                raise ShapeError(f"a tensor of shape {list(shape)}")
            if math.prod(shape) > MOST_ELEMENTS:
                raise ShapeError(
                    f"a tensor of shape {list(shape)} has {math.prod(shape)} elements, which no"
                    " device memory holds"
                )
        if all(i in self.values and i not in self.keep_floats for i in inputs if i):
            folded = self._fold(op, inputs, attrs, types)
            if folded is not None:
                return [
                    self.leaf(self.fresh(n or op), a) if n or k == 0 else ""
                    for k, (n, a) in enumerate(zip(out, folded, strict=False))
                ]
        names = [
            self.fresh(n or f"{inputs[0] if inputs else ''}/{op.lower()}") if n or k == 0 else ""
            for k, n in enumerate(out)
        ]
        node = Op(op, inputs, names, attrs)
        for n, t in zip(names, types, strict=False):
            if n:
                self.types[n] = t
                self.maker[n] = node
        if (
            self.learned
            and not self.learned.isdisjoint(inputs)
            and all(not i or math.prod(self.shape(i)) == 1 for i in inputs)
        ):
            self.learned.update(n for n in names if n)
        self.ops.append(node)
        return names

    def _bypass(self, op: str, inputs: list[str], attrs: dict[str, Any]) -> list[str]:
        """Looks through a view that the new operation makes pointless (the old one dies if nothing
        else uses it)."""
        if op not in ("Reshape", "Cast", "Transpose", "Expand"):
            return inputs
        before = self.maker.get(inputs[0])
        if before is None or before.op != op:
            return inputs
        if op == "Transpose":
            old = before.attrs["perm"]
            attrs["perm"] = tuple(old[k] for k in attrs["perm"])
        elif op == "Cast" and not _lossless(self.dtype(before.inputs[0]), str(before.attrs["to"])):
            return inputs
        return list(before.inputs)

    def _fold(
        self, op: str, inputs: Sequence[str], attrs: dict[str, Any], types: list[Type]
    ) -> Sequence[np.ndarray] | None:
        if any(math.prod(s) > FOLD_ELEMENTS for s, _ in types):
            return None
        return evaluate(op, attrs, [self.values[i] if i else None for i in inputs], types)

    def _same(self, op: str, inputs: Sequence[str], attrs: dict[str, Any], type_: Type) -> str:
        """The existing tensor this operation would only copy, or ''. Views of views lose the one
        between."""
        if op in ("Reshape", "Expand", "Cast", "Transpose", "Slice", "Tile", "Concat", "Pad"):
            x = inputs[0]
            if type_ != self.types[x]:
                return ""
            if op == "Transpose":
                return x if tuple(attrs["perm"]) == tuple(range(len(type_[0]))) else ""
            if op == "Slice":
                return x if all(s == 1 for s in attrs["steps"]) else ""
            if op == "Pad":
                return "" if any(attrs["pads"]) else x
            if op == "Concat":
                return x if len(inputs) == 1 else ""
            return x
        if op in ("And", "Or"):
            for x, other in ((inputs[0], inputs[1]), (inputs[1], inputs[0])):
                if (
                    x not in self.values
                    and self.types[x] == type_
                    and self.splat(other) == (op == "And")
                ):
                    return x
        if op in ("Mul", "Div", "Add", "Sub", "Pow") and len(inputs) == 2:
            for x, other in ((inputs[0], inputs[1]), (inputs[1], inputs[0])):
                if other == inputs[0] and op not in ("Mul", "Add"):
                    break
                if (
                    other in self.values
                    and self.types[x] == type_
                    and other not in self.keep_floats
                ):
                    neutral = 0.0 if op in ("Add", "Sub") else 1.0
                    if self.splat(other) == neutral and x not in self.values:
                        return x
        return ""


_WIDER = {
    "bool": "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64",
    "uint8": "uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64",
    "int8": "int16 int32 int64 float16 bfloat16 float32 float64",
    "int16": "int32 int64 float32 float64",
    "int32": "int64 float64",
    "float16": "float32 float64",
    "bfloat16": "float32 float64",
    "float32": "float64",
}


def _lossless(narrow: str, wide: str) -> bool:
    """True when every value of `narrow` is a value of `wide`, so that the cast between may be
    skipped."""
    return wide in _WIDER.get(narrow, "").split()


def ref_array(ref: WeightRef, name: str) -> np.ndarray | None:
    """The array of an inline weight with the reader's rewrites applied; None for external or absent
    bytes."""
    return (
        transformed(proto_array(ref.proto), ref.transform, name) if ref.kind == "inline" else None
    )


def proto_array(proto: Any) -> np.ndarray:
    """An ndarray from a TensorProto (whose bytes were checked) or from an ndarray."""
    if isinstance(proto, np.ndarray):
        return proto
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(proto)
    except (ValueError, TypeError) as error:
        raise PlanError(
            "P131", f"tensor {proto.name!r} cannot be decoded", detail=[str(error)[:200]]
        ) from error
