"""The loop over microbatches."""

from __future__ import annotations

from jax import lax

from planner.emit.runtime.step.loop_turns import turns_of


def over_microbatches(one, start, batch):
    """What `one` leaves after each turn of the loop over the batch's microbatches."""
    return lax.scan(one, start, turns_of(batch))[0]
