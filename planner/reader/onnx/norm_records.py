"""What torch's dynamo exporter records of BatchNormalization.

It writes the layer of a module in training mode as one in evaluation (torch 2.13; its record of the
call says which it was), and its optimiser folds either into the convolution before, whose node
keeps that record.
"""

from __future__ import annotations

import re
from typing import Any

_TAKE_IN = ("Conv", "ConvTranspose", "Gemm")
_KEY = "pkg.torch.onnx.fx_node"
_CALL = re.compile(r"torch\.ops\.aten\._?native_batch_norm\w*\.\w+\]\(args = \((.*)\), kwargs")
_TRAINS = re.compile(r", True, [\d.e+-]+, [\d.e+-]+$")


def _call(node: Any) -> str | None:
    """The operands of the layer's call that a node was made of; None where it is not recorded."""
    for entry in node.metadata_props:
        if entry.key == _KEY:
            match = _CALL.search(entry.value)
            return match[1] if match else None
    return None


def in_training(node: Any) -> bool:
    """Whether the layer was in training mode."""
    return bool(_TRAINS.search(_call(node) or ""))


def folded_norms(graph: Any) -> int | None:
    """How many nodes have taken in a layer of BatchNormalization; None where the file has no
    records."""
    if not any(e.key == _KEY for node in graph.node for e in node.metadata_props):
        return None
    return sum(node.op_type in _TAKE_IN and _call(node) is not None for node in graph.node)
