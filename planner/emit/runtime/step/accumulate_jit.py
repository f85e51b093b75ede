"""Loss and gradients accumulated over microbatches; the compiler places the collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.tables import MICROBATCHES, loss_of
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another."""

    def one(total, piece):
        return (
            jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, frozen, piece)),
            None,
        )

    total = over_microbatches(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batch)
    return jax.tree.map(lambda t: t / MICROBATCHES, total)
