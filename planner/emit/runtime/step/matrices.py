"""What the update of an optimizer that orthogonalises matrices is told of a parameter. Takes the
place of the function of its name."""

from __future__ import annotations

from planner.emit.runtime.files.tables import GRADIENTS, NO_DECAY, ORTHOGONALISED, PARAMS


def decays(key):
    """Whether weight decay moves a parameter; and of one of ORTHOGONALISED the axes that cut each
    dim of its state, and the larger extent of its matrices, else None."""
    shape, spec = PARAMS[key][0], GRADIENTS[key][-1]
    cells = *spec, *[None] * (len(shape) - len(spec))
    return key not in NO_DECAY, (cells, max(shape[-2:])) if key in ORTHOGONALISED else None
