"""The order in which a pipeline stage with several virtual stages runs its slots: each a microbatch
on one of these."""

from __future__ import annotations

import jax.numpy as jnp

from planner.emit.runtime.files.tables import VIRTUAL_STAGES


def slot_of(n, stages, microbatches):
    """(microbatch, turn) of a stage's n-th slot: groups of as many microbatches as stages, each
    group through one virtual stage after the other. In forward passes the turn is the virtual
    stage, in backward passes they come in reverse. Slots before the first and after the last repeat
    these."""
    n = jnp.clip(n, 0, microbatches * VIRTUAL_STAGES - 1)
    return n // (stages * VIRTUAL_STAGES) * stages + n % stages, n // stages % VIRTUAL_STAGES


def ring_places(first, stages, microbatches):
    """For each slot the place in the ring that holds what its backward pass reads; the last is for
    slots that do not exist. first: tick of the first backward pass. A place is free once the
    backward pass of its slot is done, which takes longest on the first stage."""
    busy, places = list[int](), list[int]()
    for n in range(microbatches * VIRTUAL_STAGES + 1):
        place = next((k for k, until in enumerate(busy) if until < n), len(busy))
        later = VIRTUAL_STAGES - 1 - 2 * (n // stages % VIRTUAL_STAGES)
        busy[place : place + 1] = [n + first + stages - 1 + later * stages]
        places.append(place)
    return places
