"""Matrices in pieces under shard_map."""

from __future__ import annotations

from planner.emit.runtime.step.newton_schulz import orthogonalised


def in_pieces(x, cells):
    """What a device's pieces of matrices become when they are orthogonalised."""
    return orthogonalised(x, cells)
