"""Loss and gradients of one batch; the compiler places the collectives."""

from __future__ import annotations

import jax

from planner.emit.runtime.files.tables import loss_of


def gradients(params, frozen, batch):
    """(loss, gradients) of a batch."""
    return jax.value_and_grad(loss_of)(params, frozen, batch)
