"""Loss and gradients of one batch under shard_map: every collective is written out."""

from __future__ import annotations

import jax

from planner.emit.runtime.collectives.exchange import pend, reduce_gradient
from planner.emit.runtime.files.tables import GRADIENTS, loss_of


def gradients(params, frozen, batch):
    """(loss, gradients) of a batch: contributions stay sums per device until the one reduction of
    each parameter."""
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}
    loss, grads = jax.value_and_grad(loss_of)(pending, frozen, batch)
    return loss, {key: reduce_gradient(g, *GRADIENTS[key][1:4]) for key, g in grads.items()}
