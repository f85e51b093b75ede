"""What the update of an optimizer that orthogonalises matrices is told of a parameter. Takes the
place of the function of its name."""

from __future__ import annotations

import functools

from planner.emit.runtime.files.tables import GRADIENTS, NO_DECAY, ORTHOGONALISED, PARAMS
from planner.emit.runtime.step.pieces_shard_map import in_pieces


def cells_of(key):
    """The axes that cut each dim of a parameter's state."""
    spec = GRADIENTS[key][-1]
    return *spec, *[None] * (len(PARAMS[key][0]) - len(spec))


def decays(key):
    """Whether weight decay moves a parameter; and of one of ORTHOGONALISED what orthogonalises its
    matrices, and their larger extent, else None."""
    matrices = None
    if key in ORTHOGONALISED:
        matrices = functools.partial(in_pieces, cells=cells_of(key)), max(PARAMS[key][0][-2:])
    return key not in NO_DECAY, matrices
