"""The kernel for the rows of all experts in an optimised program: Triton's custom calls, whose
names say how many rows a balanced router sends (planner/emit/runtime/kernels/grouped_experts.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from costmodels.kernels import expert_rows_flops, expert_weights_flops
from planner.verify.hlo.text import Computation, Instruction

_NAMED = re.compile(r'\bname = "expert_(rows|weights)_(\d+)_(\d+)"')


@dataclass(frozen=True)
class ExpertKernel:
    """One kernel. counted_flops: 2 M N K of the rows of a balanced router, as predictions count
    blocks; priced_flops: those of a library's product that takes as long."""

    counted_flops: int
    priced_flops: float


def expert_kernel(instruction: Instruction, computation: Computation) -> ExpertKernel | None:
    """The kernel that an instruction is, None for any other instruction. Operands: the expert of
    each tile, rows [P, K], weights [E, ..]; of gradients of weights tiles before each expert's,
    rows [P, K], rows [P, N]."""
    if instruction.opcode != "custom-call":
        return None
    found = _NAMED.search(instruction.attributes)
    if found is None:
        return None
    counted, rows = int(found.group(2)), int(found.group(3))
    result = instruction.shapes[0].dims
    _, left, weights = (shape.dims for shape in computation.operand_shapes(instruction)[:3])
    across, wide = left[1], result[-1]
    priced = (
        expert_rows_flops(rows, weights[0], across, wide)
        if found.group(1) == "rows"
        else expert_weights_flops(rows, result[0], across, wide)
    )
    return ExpertKernel(2 * counted * across * wide, priced)
