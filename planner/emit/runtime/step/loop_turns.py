"""What the loops over microbatches go over."""

from __future__ import annotations

import jax

from planner.emit.runtime.files.tables import OVERLAPPED_MICROBATCHES


def turns_of(batch):
    """The batch by turns of the loop over microbatches: one microbatch a turn, or as many as run at
    the same time, along a dim of their own."""
    if OVERLAPPED_MICROBATCHES == 1:
        return batch
    return jax.tree.map(lambda x: x.reshape(-1, OVERLAPPED_MICROBATCHES, *x.shape[1:]), batch)
