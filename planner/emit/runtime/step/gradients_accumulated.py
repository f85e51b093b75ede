"""Loss and gradients of a step that adds up microbatches of equal weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.tables import MICROBATCHES, loss_of
from planner.emit.runtime.step.loop_scan import over_microbatches
from planner.emit.runtime.step.reduce_shard_map import (
    add_gradients,
    for_microbatch,
    no_gradients,
    reduced_mean,
    unreduced,
)


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches one after another: the means of theirs."""
    pending = unreduced(params)

    def one(total, microbatch):
        loss, sums = total
        loss_here, grads = jax.value_and_grad(loss_of)(
            for_microbatch(pending, loss), frozen, microbatch
        )
        return (loss + loss_here, add_gradients(sums, grads)), None

    start = jnp.zeros(()), no_gradients(pending)
    loss, sums = over_microbatches(one, start, batch)
    return loss / MICROBATCHES, reduced_mean(sums, MICROBATCHES)
