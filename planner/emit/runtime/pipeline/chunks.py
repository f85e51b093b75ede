"""The order in which a pipeline stage takes the pieces of its work: each a microbatch on one of the
chunks that it holds."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import CHUNKS


def piece_of(n, stages, microbatches):
    """(microbatch, turn) of the n-th piece of a stage's work: groups of as many microbatches as
    stages, each through one chunk after the other. Forward the turn is the chunk, backward the
    chunks come in reverse. Pieces before the first and after the last repeat these.
    """
    n = jnp.clip(n, 0, microbatches * CHUNKS - 1)
    return n // (stages * CHUNKS) * stages + n % stages, n // stages % CHUNKS


def waiting_places(first, stages, microbatches):
    """Where what the backward pass of each piece needs waits, of pieces that do not exist last.
    first: tick of the first backward pass. A place is taken again once its piece's backward pass is
    done, which takes longest on the first stage."""
    busy, places = list[int](), list[int]()
    for n in range(microbatches * CHUNKS + 1):
        place = next((k for k, until in enumerate(busy) if until < n), len(busy))
        busy[place : place + 1] = [
            n + first + stages - 1 + (CHUNKS - 1 - 2 * (n // stages % CHUNKS)) * stages
        ]
        places.append(place)
    return places
