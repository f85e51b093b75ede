"""Loss and gradients accumulated under shard_map over microbatches whose numbers of rows that count
are a part of the data; gradients of repeated blocks are in the host's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.collectives.exchange import pend
from planner.emit.runtime.files.tables import EQUAL, GRADIENTS, loss_of
from planner.emit.runtime.step.away import added, in_turn, nothing_yet, scaled
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another: sums over rows, divided once by
    the number of rows that count in all of them. Every gradient is reduced once, after the last;
    where its optimizer state is cut (SCATTER_EACH_MICROBATCH) it is scattered in each.
    """
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}

    def one(total, piece):
        held = {key: in_turn(key, p, total[0]) for key, p in pending.items()}
        loss, back, rows = jax.vjp(lambda p: loss_of(p, frozen, piece), held, has_aux=True)
        rows = rows.astype(loss.dtype)
        sums = {
            key: added(key, total[2][key], g) for key, g in back(rows)[0].items()
        }  # of the sum, not of the mean
        return (total[0] + loss * rows, total[1] + rows, sums), None

    start = jnp.zeros(()), jnp.zeros(()), {key: nothing_yet(key, p) for key, p in pending.items()}
    loss, rows, grads = over_microbatches(one, start, batch)
    rows = jnp.maximum(rows, 1)
    grads = {key: scaled(key, g, rows) for key, g in grads.items() if key not in EQUAL}
    return loss / rows, grads | {key: grads[other] for key, other in EQUAL.items()}
