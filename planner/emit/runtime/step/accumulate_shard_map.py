"""Loss and gradients accumulated over microbatches under shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.collectives.exchange import after, pend, reduce_gradient, zeros_like_piece
from planner.emit.runtime.files.tables import (
    EQUAL,
    GATHERED,
    GRADIENTS,
    MICROBATCHES,
    SCATTER_EACH_MICROBATCH,
    loss_of,
)
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another. Every gradient is reduced once,
    after the last; where its optimizer state is cut (SCATTER_EACH_MICROBATCH) it is scattered in
    each."""
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}
    scatter = {
        key: (axes, dim) if SCATTER_EACH_MICROBATCH else ((), 0)
        for key, (_, _, axes, dim, _) in GRADIENTS.items()
    }

    def one(total, piece):
        held = {
            key: after(p, total[0]) if key in GATHERED else p for key, p in pending.items()
        }  # else gathered once, for all microbatches
        loss, grads = jax.value_and_grad(loss_of)(held, frozen, piece)
        grads = {key: reduce_gradient(g, (), *scatter[key]) for key, g in grads.items()}
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    start = jnp.zeros(()), {key: zeros_like_piece(p, *scatter[key]) for key, p in pending.items()}
    loss, grads = over_microbatches(one, start, batch)
    loss, grads = jax.tree.map(lambda t: t / MICROBATCHES, (loss, grads))
    for key, (_, rest, axes, dim, _) in GRADIENTS.items():
        if key not in EQUAL:
            grads[key] = reduce_gradient(
                grads[key], rest, () if SCATTER_EACH_MICROBATCH else axes, dim
            )
    return loss, grads | {key: grads[other] for key, other in EQUAL.items()}
