"""Loss and gradients of a step that adds up microbatches in which the number of rows that count is
a part of the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.tables import WEIGHT_ROWS, loss_of
from planner.emit.runtime.step.loop_scan import over_microbatches
from planner.emit.runtime.step.reduce_shard_map import (
    add_gradients,
    for_microbatch,
    no_gradients,
    reduced_mean,
    unreduced,
)


def gradients(params, frozen, batch):
    """(loss, gradients) of the microbatches one after another: sums over rows, divided once by the
    number of rows that count in all microbatches."""
    pending = unreduced(params)

    def one(total, microbatch):
        loss, rows, sums = total
        mean, pullback, rows_here = jax.vjp(
            lambda p: loss_of(p, frozen, microbatch), for_microbatch(pending, loss), has_aux=True
        )
        rows_here = rows_here.astype(mean.dtype)
        grads = pullback(rows_here)[0]  # of the sum over rows, not of the mean
        return (loss + mean * rows_here, rows + rows_here, add_gradients(sums, grads)), None

    start = jnp.zeros(()), jnp.zeros(()), no_gradients(pending)
    loss, rows, sums = over_microbatches(one, start, batch)
    rows = jnp.maximum(rows, 1 / WEIGHT_ROWS)
    return loss / rows, reduced_mean(sums, rows)
