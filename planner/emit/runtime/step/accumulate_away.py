"""Loss and gradients accumulated over microbatches under shard_map, of which those of repeated
blocks are in the host's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planner.emit.runtime.collectives.exchange import pend
from planner.emit.runtime.files.tables import EQUAL, GRADIENTS, MICROBATCHES, loss_of
from planner.emit.runtime.step.away import added, in_turn, nothing_yet, scaled
from planner.emit.runtime.step.loop_scan import over_microbatches


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES batches one after another. Every gradient is reduced once,
    after the last; where its optimizer state is cut (SCATTER_EACH_MICROBATCH) it is scattered in
    each."""
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}

    def one(total, piece):
        held = {key: in_turn(key, p, total[0]) for key, p in pending.items()}
        loss, grads = jax.value_and_grad(loss_of)(held, frozen, piece)
        return (
            total[0] + loss,
            {key: added(key, total[1][key], g) for key, g in grads.items()},
        ), None

    loss, grads = over_microbatches(
        one, (jnp.zeros(()), {key: nothing_yet(key, p) for key, p in pending.items()}), batch
    )
    grads = {key: scaled(key, g, MICROBATCHES) for key, g in grads.items() if key not in EQUAL}
    return loss / MICROBATCHES, grads | {key: grads[other] for key, other in EQUAL.items()}
