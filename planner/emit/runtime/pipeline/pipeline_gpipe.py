"""Loss and gradients through pipeline stages, all forward passes before all backward passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import pass_on
from planner.emit.runtime.files.tables import (
    CARRIED,
    MESH,
    MICROBATCHES,
    WEIGHT_ROWS,
    epilogue,
    prologue,
    stage_blocks,
)
from planner.emit.runtime.pipeline.stages import microbatch_of, zeros_of
from planner.emit.runtime.step.reduce_shard_map import reduced, unreduced


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches (GPipe): stage i runs microbatch m in tick m +
    i, and the backward pass of all ticks follows.

    The epilogue is recomputed in the backward pass, so that no tick saves logits. Passes of
    microbatches that do not exist fill the bubble, and their results are dropped.
    """
    stages, stage = MESH["stage"], lax.axis_index("stage")
    pending = unreduced(params)
    tail = jax.checkpoint(lambda p, now, y: epilogue(p, frozen, now, y))

    def mean_loss(pending):
        def tick(carry, t):
            x, total, weight = carry
            y = stage_blocks(pending, frozen, microbatch_of(batch, t - stage), x)
            m = t - (stages - 1)
            loss, rows_here = tail(pending, microbatch_of(batch, m), y)
            return (
                pass_on(y, "stage"),
                total + jnp.where((stage == stages - 1) & (m >= 0), loss, 0),
                weight + jnp.where(m >= 0, rows_here, 0),
            ), None

        x = zeros_of(
            jax.eval_shape(lambda: prologue(pending, frozen, microbatch_of(batch, 0)))[:CARRIED]
        )
        (_, total, weight), _ = lax.scan(
            tick,
            (x, lax.pcast(jnp.zeros(()), "stage", to="varying"), jnp.zeros(())),
            jnp.arange(stages - 1 + MICROBATCHES),
        )
        return lax.psum(total, "stage") / jnp.maximum(weight, 1 / WEIGHT_ROWS)

    loss, grads = jax.value_and_grad(mean_loss)(pending)
    return loss, reduced(grads)
