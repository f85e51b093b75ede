"""Loss and gradients of a step that runs its batch at once."""

from __future__ import annotations

import jax

from planner.emit.runtime.files.tables import loss_of
from planner.emit.runtime.step.reduce_shard_map import reduced, unreduced


def gradients(params, frozen, batch):
    """(loss, gradients) of a batch."""
    loss, grads = jax.value_and_grad(loss_of)(unreduced(params), frozen, batch)
    return loss, reduced(grads)
