"""Loss and gradients accumulated under shard_map over microbatches whose numbers of rows that count
are a part of the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.collectives.exchange import after, pend, reduce_gradient, zeros_like_piece
from planner.emit.runtime.files.tables import (
    EQUAL,
    GATHERED,
    GRADIENTS,
    SCATTER_EACH_MICROBATCH,
    loss_of,
)
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another: sums over rows, divided once by
    the number of rows that count in all of them. Every gradient is reduced once, after the last;
    where its optimizer state is cut (SCATTER_EACH_MICROBATCH) it is scattered in each.
    """
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}
    scatter = {
        key: (axes, dim) if SCATTER_EACH_MICROBATCH else ((), 0)
        for key, (_, _, axes, dim, _) in GRADIENTS.items()
    }

    def one(total, piece):
        held = {
            key: after(p, total[0]) if key in GATHERED else p for key, p in pending.items()
        }  # else gathered once, for all microbatches
        loss, back, rows = jax.vjp(lambda p: loss_of(p, frozen, piece), held, has_aux=True)
        rows = rows.astype(loss.dtype)
        grads = {
            key: reduce_gradient(g, (), *scatter[key]) for key, g in back(rows)[0].items()
        }  # of the sum, not of the mean
        return jax.tree.map(jnp.add, total, (loss * rows, rows, grads)), None

    start = (
        jnp.zeros(()),
        jnp.zeros(()),
        {key: zeros_like_piece(p, *scatter[key]) for key, p in pending.items()},
    )
    loss, rows, grads = over_microbatches(one, start, batch)
    loss, grads = jax.tree.map(lambda t: t / jnp.maximum(rows, 1), (loss, grads))
    for key, (_, rest, axes, dim, _) in GRADIENTS.items():
        if key not in EQUAL:
            grads[key] = reduce_gradient(
                grads[key], rest, () if SCATTER_EACH_MICROBATCH else axes, dim
            )
    return loss, grads | {key: grads[other] for key, other in EQUAL.items()}
