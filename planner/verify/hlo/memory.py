"""The largest buffers that a compiled program makes, by name, from its text.

No liveness: buffers share memory over time, so sizes do not add up to the compiler's temporaries.
What it answers is *which* tensors are big, for instance whether a full weight or a tokens x
vocabulary array is ever materialised. Inside a fusion nothing is stored, so only instructions
outside fusions count; views, parameters, constants and in-place updates by tuples make no buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.verify.hlo.text import Computation, Shape, parse

_NO_BUFFER = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "opt-barrier",
        "optimization-barrier",
        "partition-id",
        "replica-id",
        "domain",
    }
)


@dataclass(frozen=True)
class Buffer:
    """One array made by an instruction; a tuple result gives one per element (`index`)."""

    name: str
    index: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    opcode: str
    computation: str
    op_name: str


def largest_buffers(text: str, count: int = 20) -> tuple[Buffer, ...]:
    """The `count` largest arrays made outside fusions, largest first, ties in program order.

    Raises:
        ValueError: not HLO.
    """
    module = parse(text)
    found = []
    for computation in _outside_fusions(module.computations[module.entry], module.computations):
        for instruction in computation.instructions:
            if instruction.opcode in _NO_BUFFER or instruction.opcode.endswith("-done"):
                continue
            # A -start result begins with its operands when it has more arrays than they: those are
            # no new buffers.
            taken = (
                len(computation.operand_shapes(instruction))
                if instruction.opcode.endswith("-start")
                else 0
            )
            first = taken if len(instruction.shapes) > taken else 0
            for index, shape in list(enumerate(instruction.shapes))[first:]:
                found.append(
                    _buffer(
                        instruction.name,
                        index,
                        shape,
                        instruction.opcode,
                        computation.name,
                        instruction.op_name,
                    )
                )
    return tuple(sorted(found, key=lambda b: -b.size_bytes)[:count])


def _buffer(
    name: str, index: int, shape: Shape, opcode: str, computation: str, op_name: str
) -> Buffer:
    return Buffer(
        name, index, shape.dtype, shape.dims, shape.size_bytes, opcode, computation, op_name
    )


def _outside_fusions(
    entry: Computation, computations: Mapping[str, Computation]
) -> list[Computation]:
    order, todo, seen = [], [entry], {entry.name}
    while todo:
        computation = todo.pop(0)
        order.append(computation)
        for instruction in computation.instructions:
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                for name in instruction.callees:
                    if name not in seen:
                        seen.add(name)
                        todo.append(computations[name])
    return order
