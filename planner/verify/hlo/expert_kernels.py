"""The kernel for the rows of all experts in an optimised program: Triton's and Mosaic's custom
calls, whose names say how many rows a balanced router sends, and Mosaic's the columns of its tiles
(planner/emit/runtime/kernels/grouped_experts.py, expert_tiles.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from costmodels.expert_tiles import MOSAIC, TILES, TRITON
from planner.verify.hlo.text import Computation, Instruction

_TRITON = re.compile(r'\bname = "expert_(rows|weights)_(\d+)_(\d+)"')
_MOSAIC = re.compile(r"^expert_(rows|weights)_(\d+)_(\d+)_(?:(\d+)_)?(\d+)(?:\.|$)")


@dataclass(frozen=True)
class ExpertKernel:
    """One kernel. counted_flops: 2 M N K of the rows of a balanced router, as predictions count
    blocks; priced_flops: those of a library's product that takes as long; again_bytes: those that
    it moves beside its operands and results once each, as tiles read rows again."""

    counted_flops: int
    priced_flops: float
    again_bytes: int = 0


def expert_kernel(instruction: Instruction, computation: Computation) -> ExpertKernel | None:
    """The kernel that an instruction is, None for any other instruction. Operands: the expert of
    each tile, rows [P, K], weights [E, ..]; of gradients of weights what tiles there are, rows
    [P, K], rows [P, N]."""
    if instruction.opcode != "custom-call":
        return None
    triton = _TRITON.search(instruction.attributes)
    match = triton or _MOSAIC.match(instruction.name)
    if match is None:
        return None
    of, counted, rows = match.group(1), int(match.group(2)), int(match.group(3))
    tile = TILES[TRITON if triton else MOSAIC, of]
    if not triton:
        tile = replace(tile, tall=int(match.group(4) or 0), columns=int(match.group(5)))
    result = instruction.shapes[0]
    operands = [x for x in computation.operand_shapes(instruction) if len(x.dims) > 1]
    left, right = operands[0].dims, operands[1].dims
    across, wide = left[1], result.dims[-1]
    if of == "rows":
        priced, moved = (
            work(rows, right[0], across, wide) for work in (tile.rows_flops, tile.rows_moved)
        )
        once = prod(right) + rows * (across + wide)
    else:
        priced, moved = (
            work(rows, result.dims[0], across, wide)
            for work in (tile.weights_flops, tile.weights_moved)
        )
        once = result.elements + rows * (across + wide)
    itemsize = result.size_bytes // result.elements
    return ExpertKernel(2 * counted * across * wide, priced, int(moved - once) * itemsize)
