"""The loop over microbatches of which several run at the same time."""

from __future__ import annotations

import jax
from jax import lax

from planner.emit.runtime.files.tables import COPIES


def over_microbatches(one, start, batch):
    """What `one` leaves after every COPIES microbatches of the batch in turn."""
    return lax.scan(one, start, jax.tree.map(lambda x: x.reshape(-1, COPIES, *x.shape[1:]), batch))[
        0
    ]
