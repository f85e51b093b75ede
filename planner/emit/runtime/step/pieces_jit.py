"""Matrices in pieces where shardings are stated: each device's are taken as under shard_map, since
a compiler's partitioner would have all devices do the whole work."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from planner.emit.runtime.step.newton_schulz import orthogonalised
from planner.emit.runtime.step.step_jit import by_piece


def in_pieces(x, cells):
    """What matrices become that are orthogonalised, cut as `cells` say."""
    return by_piece(lambda piece: orthogonalised(piece, cells), (P(*cells),), P(*cells))(x)
