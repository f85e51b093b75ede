"""Loss and gradients accumulated over microbatches whose numbers of rows that count are a part of
the data; the compiler places the collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.files.tables import loss_of
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another: sums over rows, divided once by
    the number of rows that count in all of them."""

    def one(total, piece):
        loss, back, rows = jax.vjp(lambda p: loss_of(p, frozen, piece), params, has_aux=True)
        rows = rows.astype(loss.dtype)
        return jax.tree.map(jnp.add, total, (loss * rows, rows, back(rows)[0])), None

    loss, rows, grads = over_microbatches(
        one, (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batch
    )
    return jax.tree.map(lambda t: t / jnp.maximum(rows, 1), (loss, grads))
