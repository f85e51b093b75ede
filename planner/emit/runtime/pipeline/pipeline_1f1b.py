"""Loss and gradients through pipeline stages, each with one forward and one backward pass in
hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import pass_on, reduce_gradient
from planner.emit.runtime.files.tables import (
    CARRIED,
    MESH,
    MICROBATCHES,
    ONLY_BLOCKS,
    ONLY_EPILOGUE,
    WEIGHT_ROWS,
    epilogue,
    prologue,
    stage_blocks,
)
from planner.emit.runtime.pipeline.stages import beside, microbatch_of, pick, zeros_of
from planner.emit.runtime.step.reduce_shard_map import (
    no_gradients,
    reduced_last,
    scattered_each,
    unreduced,
)


# Long: the ticks of one schedule, nested functions that share its microbatches and its ring.
def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches, one forward and one backward pass a tick
    (1F1B).

    Stage i runs microbatch m forward in tick m + i and backward in tick m + 2 * (stages - 1) - i.
    In between, what its backward pass reads lies in a ring of at most 2 * stages - 1 places, each
    free for another once its microbatch is done; parameters are read where they are. The epilogue
    follows the last stage's forward pass in the same tick. Passes of microbatches that do not exist
    fill the bubble, and their results are dropped.
    """
    stages, stage = MESH["stage"], lax.axis_index("stage")
    last, places = stage == stages - 1, min(2 * stages - 1, MICROBATCHES + 1)
    pending = unreduced(params)
    blocks, ends = (
        {key: p for key, p in pending.items() if key not in other}
        for other in (ONLY_EPILOGUE, ONLY_BLOCKS)
    )
    residuals_of, backward_of = beside(jax.tree.leaves((pending, frozen)))

    def forward(x, tick):
        """What the stage hands on, and what its backward pass reads beside parameters."""
        y, pull = jax.vjp(
            lambda p, x: stage_blocks(p, frozen, microbatch_of(batch, tick - stage), x), blocks, x
        )
        return y, residuals_of(pull)

    def keep(ring, saved, tick):
        here = jnp.clip(tick - stage, 0, MICROBATCHES) % places
        return [
            lax.dynamic_update_index_in_dim(r, s, here, 0) for r, s in zip(ring, saved, strict=True)
        ]

    def backward(g, ring, total, tick):
        """Gradients added up; the gradient of the stage's input goes to the stage before."""
        m = tick - 2 * (stages - 1) + stage
        saved = [lax.dynamic_index_in_dim(r, m % places, keepdims=False) for r in ring]
        grads, g = backward_of(saved)(g)
        real = (m >= 0) & (m < MICROBATCHES)
        grads = {key: reduce_gradient(d, (), *scattered_each(key)) for key, d in grads.items()}
        return pass_on(g, "stage", -1), total | {
            key: jnp.where(real, total[key] + d, total[key]) for key, d in grads.items()
        }

    def closing(p, now, y):
        loss, weight = epilogue(p, frozen, now, y)
        return jnp.where(last, loss, 0), weight

    def warm_up(carry, tick):
        x, ring = carry
        y, saved = forward(x, tick)
        return (pass_on(y, "stage"), keep(ring, saved, tick)), None

    def steady(carry, tick):
        x, g, ring, total, loss, weight = carry
        y, saved = forward(x, tick)
        ring, now = keep(ring, saved, tick), microbatch_of(batch, tick - (stages - 1))
        (here, rows_here), (end_gradients, g_y) = jax.value_and_grad(
            lambda p, y: closing(p, now, y), argnums=(0, 1), has_aux=True
        )(ends, y)
        total |= {
            key: total[key] + reduce_gradient(d, (), *scattered_each(key))
            for key, d in end_gradients.items()
        }
        g, total = backward(pick(last, g_y, g), ring, total, tick)
        return (pass_on(y, "stage"), g, ring, total, loss + here, weight + rows_here), None

    def cool_down(carry, tick):
        return backward(carry[0], ring, carry[1], tick), None

    x = zeros_of(
        jax.eval_shape(lambda: prologue(pending, frozen, microbatch_of(batch, 0)))[:CARRIED]
    )
    ring = zeros_of(
        jax.eval_shape(lambda: [jnp.broadcast_to(s, (places, *s.shape)) for s in forward(x, 0)[1]])
    )
    total = no_gradients(pending)
    (y, ring), _ = lax.scan(warm_up, (x, ring), jnp.arange(stages - 1))
    start = y, x, ring, total, lax.pcast(jnp.zeros(()), "stage", to="varying"), jnp.zeros(())
    (_, g, ring, total, loss, weight), _ = lax.scan(
        steady, start, jnp.arange(stages - 1, stages - 1 + MICROBATCHES)
    )
    (_, total), _ = lax.scan(
        cool_down,
        (g, total),
        jnp.arange(stages - 1 + MICROBATCHES, 2 * (stages - 1) + MICROBATCHES),
    )
    weight = jnp.maximum(weight, 1 / WEIGHT_ROWS)
    loss, grads = jax.tree.map(
        lambda t: t / weight.astype(t.dtype), (lax.psum(loss, "stage"), total)
    )
    return loss, {key: reduced_last(key, gradient) for key, gradient in grads.items()}
