"""What a compiled product multiplies: rows, columns, sums and batch of dots, of calls of cuBLAS and
of cuDNN's convolutions. Sums that the compiler cut into pieces are batches here."""

from __future__ import annotations

import math
import re

from planner.verify.hlo.flops import CUDNN, LABELS, LIBRARY_DOT, dims_in, flops_of
from planner.verify.hlo.text import Computation, Instruction, Shape

Extents = tuple[float, float, float, float]


def extents_of(instruction: Instruction, computation: Computation) -> Extents | None:
    """(rows, columns, sums, batch) of one run; None of what is no such product."""
    flops, text = flops_of(instruction, computation), instruction.attributes
    if not flops:
        return None
    if instruction.opcode == "dot" or LIBRARY_DOT.search(text):
        left = computation.operand_shapes(instruction)[0]
        return _of_dot(instruction, left, flops)
    if match := CUDNN.search(text):
        return _of_convolution(match.group(1), instruction, flops)
    return None


def _of_dot(instruction: Instruction, left: Shape, flops: int) -> Extents:
    elements = instruction.shapes[0].elements
    sums = flops / (2 * elements)
    listed = instruction.attribute(r"\blhs_batch_dims=\{([\d,]*)\}") or instruction.attribute(
        r'"lhs_batch_dimensions":\[([^\]]*)\]'
    )
    batch = math.prod(left.dims[d] for d in dims_in(listed or ""))
    rows = left.elements / (batch * sums)
    return rows, elements / (batch * rows), sums, batch


def _of_convolution(kind: str, instruction: Instruction, flops: int) -> Extents | None:
    """Of one without groups: its result has the features of one side as columns, and a gradient of
    the kernel those of the output."""
    labels, result = LABELS.search(instruction.attributes), instruction.shapes[0]
    groups = re.search(r"feature_group_count=(\d+)", instruction.attributes)
    if labels is None or (groups and int(groups.group(1)) > 1):
        return None
    names, feature = {
        "BackwardInput": (labels.group(1), "f"),
        "BackwardFilter": (labels.group(2), "o"),
    }.get(kind, (labels.group(3), "f"))
    columns = result.dims[names.index(feature)]
    return result.elements / columns, columns, flops / (2 * result.elements), 1
