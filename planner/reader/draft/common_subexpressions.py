"""Identical operations become one: a rotary table, a mask or a position that an exporter wrote anew
in every layer.

Two operations are identical when operator, attributes and operands agree; constants count as equal
when their bytes are. Their results are then equal, unless they draw random numbers. Layers that
read the same table can fold into one block (`planner.graph.repeats`, which moves such tables to the
front); layers with a copy each differ in what they read.

Only what no trained weight enters is merged: it is made before the layers. Anything else would be
made inside the first layer, and set it apart.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from planner.graph.value_digest import value_bytes
from planner.reader.draft.draft import FOLD_ELEMENTS, Draft, Op, ref_array
from planner.reader.draft.simplify import drop_dead, replace_tensor, users
from planner.reader.onnx.params import named

_DRAWS = ("Dropout", "Random", "Bernoulli", "Multinomial")
"""Beginnings of the names of operators whose results differ from call to call."""
_BUFFERS = (".inv_freq",)
"""Ends of names of buffers that models keep in every layer and never train."""


def merge_identical(draft: Draft, trainable: set[str]) -> None:
    """Lets readers of the later of two identical operations read the first, whose members name
    both. What the model gives out keeps its operation.

    trainable: leaves that training changes.
    """
    readers: dict[str, list[Op]] = {}  # looked up once there is something to merge
    outputs = set(draft.outputs)
    heavy = set(trainable or draft.refs)
    seen: dict[tuple[Any, ...], Op] = {}
    merged: dict[int, list[Op]] = {}
    for op in draft.ops:
        if any(i in heavy for i in op.inputs):
            heavy.update(o for o in op.outputs if o)
            continue
        if op.bodies or op.op.startswith(_DRAWS) or any(o in outputs for o in op.outputs):
            continue
        attrs = tuple((k, repr(v)) for k, v in sorted(op.attrs.items()))
        first = seen.setdefault(
            (
                op.op,
                attrs,
                tuple(_operand(draft, i) for i in op.inputs),
                tuple(draft.types.get(o) for o in op.outputs),
            ),
            op,
        )
        if first is op:
            continue
        readers = readers or users(draft)
        for a, b in zip(first.outputs, op.outputs, strict=True):
            if b:
                replace_tensor(readers.get(b, []), b, a)
                readers.setdefault(a, []).extend(readers.get(b, []))
        merged.setdefault(id(first), [first]).append(op)
    for group in merged.values():
        group[0].members = tuple(m for op in group for m in op.members or (op.id,))
    if merged:
        drop_dead(draft)


def _operand(draft: Draft, name: str) -> Any:
    """What an operand is compared by: a digest of a small constant, its name else. A weight with a
    name of its own may be trained on request: it stays itself."""
    value, ref = draft.values.get(name), draft.refs.get(name)
    if (
        ref is not None
        and ref.kind == "inline"
        and math.prod(draft.shape(name)) <= FOLD_ELEMENTS
        and (not named(name) or name.endswith(_BUFFERS))
    ):
        value = ref_array(ref, name)
    return (
        name
        if value is None or value.size > FOLD_ELEMENTS
        else (value.dtype.name, value.shape, hashlib.sha256(value_bytes(value)).digest())
    )
