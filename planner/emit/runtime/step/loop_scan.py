"""The loop over microbatches."""

from __future__ import annotations

from jax import lax


def over_microbatches(one, start, batch):
    """What `one` leaves after each microbatch of the batch in turn."""
    return lax.scan(one, start, batch)[0]
