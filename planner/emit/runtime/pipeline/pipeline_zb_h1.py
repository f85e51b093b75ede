"""Loss and gradients through pipeline stages that put off gradients of weights (zero bubble,
ZB-H1)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import pass_on
from planner.emit.runtime.files.tables import (
    CARRIED,
    MESH,
    MICROBATCHES,
    ONLY_BLOCKS,
    ONLY_EPILOGUE,
    WEIGHT_ROWS,
    WEIGHTS_APART,
    epilogue,
    prologue,
    stage_blocks,
)
from planner.emit.runtime.pipeline.backward_parts import backward_parts
from planner.emit.runtime.pipeline.stages import beside, microbatch_of, pick, zeros_of
from planner.emit.runtime.step.reduce_shard_map import no_gradients, reduced_last, unreduced


# Long: the ticks of one schedule, nested functions that share its microbatches and its rings.
def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches, one forward and one backward pass a tick, the
    gradients of WEIGHTS_APART apart from the backward pass.

    Stage i runs microbatch m forward in tick m + i and backward in tick m + 2 * (stages - 1) - i.
    All stages make these gradients of microbatch m in tick m + 2 * (stages - 1): in MICROBATCHES
    ticks, none of them for nothing. Until then what they read lies in two rings: what the forward
    pass saved in one of 2 * stages - 1 places, what the backward pass hands on in one of `stages`.
    The epilogue follows the last stage's forward pass in the same tick. Forward and backward passes
    of microbatches that do not exist fill the bubble, and their results are dropped.
    """
    stages, stage = MESH["stage"], lax.axis_index("stage")
    last, ends_at = stage == stages - 1, MICROBATCHES + 2 * (stages - 1)
    pending = unreduced(params)
    blocks, ends = (
        {key: p for key, p in pending.items() if key not in other}
        for other in (ONLY_EPILOGUE, ONLY_BLOCKS)
    )
    apart = [key for key in blocks if key in WEIGHTS_APART]
    others = [key for key in blocks if key not in WEIGHTS_APART]
    residuals_of, backward_of = beside(jax.tree.leaves((pending, frozen)))

    def forward(x, tick):
        """What the stage hands on, and what its backward pass reads beside parameters."""
        y, pull = jax.vjp(
            lambda p, x: stage_blocks(p, frozen, microbatch_of(batch, tick - stage), x), blocks, x
        )
        return y, residuals_of(pull)

    def pull(saved, g):
        """Gradients of what is made apart, of other parameters, and of the stage's input."""
        grads, g = backward_of(saved)(g)
        return [*(grads[key] for key in (*apart, *others)), *g]

    def closing(p, now, y):
        loss, weight = epilogue(p, frozen, now, y)
        return jnp.where(last, loss, 0), weight

    def tick_with(passes, carry, tick):
        """One tick of the passes that there are in it."""
        x, g, ring, handed, total, loss, weight = carry
        if "forward" in passes:
            y, saved = forward(x, tick)
            ring, x = keep(ring, saved, tick - stage), pass_on(y, "stage")
        if "forward" in passes and "backward" in passes:
            now = microbatch_of(batch, tick - (stages - 1))
            (here, rows_here), (end_gradients, g_y) = jax.value_and_grad(
                lambda p, y: closing(p, now, y), argnums=(0, 1), has_aux=True
            )(ends, y)
            total = total | {key: total[key] + d for key, d in end_gradients.items()}
            g, loss, weight = pick(last, g_y, g), loss + here, weight + rows_here
        if "backward" in passes:
            m = tick - 2 * (stages - 1) + stage
            real = (m >= 0) & (m < MICROBATCHES)
            grads, handed_on = backward(kept(ring, m), g)
            total = total | {
                key: jnp.where(real, total[key] + d, total[key])
                for key, d in zip(others, grads, strict=False)
            }
            handed, g = (
                keep(handed, handed_on, m),
                pass_on(tuple(grads[len(others) :]), "stage", -1),
            )
        if "weights" in passes:
            m = tick - 2 * (stages - 1)
            grads = late(kept(ring, m), kept(handed, m))
            total = total | {key: total[key] + d for key, d in zip(apart, grads, strict=True)}
        return (x, g, ring, handed, total, loss, weight), None

    x = zeros_of(
        jax.eval_shape(lambda: prologue(pending, frozen, microbatch_of(batch, 0)))[:CARRIED]
    )
    saved = zeros_of(jax.eval_shape(lambda: forward(x, 0)[1]))
    waits = [True] * len(apart) + [False] * (len(others) + CARRIED)
    backward, late = backward_parts(pull, waits, saved, x)
    handed_on = zeros_of(jax.eval_shape(lambda: backward(saved, x)[1]))
    rings = ring_of(saved, 2 * stages - 1), ring_of(handed_on, stages)
    none = lax.pcast(jnp.zeros(()), "stage", to="varying"), jnp.zeros(())
    carry = x, x, *rings, no_gradients(pending), *none
    there = {
        "forward": (0, MICROBATCHES + stages - 1),
        "backward": (stages - 1, ends_at),
        "weights": (ends_at - MICROBATCHES, ends_at),
    }
    turns = sorted({tick for span in there.values() for tick in span})
    for start, stop in zip(turns[:-1], turns[1:], strict=True):
        passes = [name for name, (first, end) in there.items() if first <= start < end]
        carry, _ = lax.scan(functools.partial(tick_with, passes), carry, jnp.arange(start, stop))
    *_, total, loss, weight = carry
    weight = jnp.maximum(weight, 1 / WEIGHT_ROWS)
    loss, grads = jax.tree.map(
        lambda t: t / weight.astype(t.dtype), (lax.psum(loss, "stage"), total)
    )
    return loss, {key: reduced_last(key, gradient) for key, gradient in grads.items()}


def ring_of(values, places):
    """Room for values of so many microbatches, or of all and one that does not exist."""
    places = min(places, MICROBATCHES + 1)
    return zeros_of(
        jax.eval_shape(lambda: [jnp.broadcast_to(v, (places, *v.shape)) for v in values])
    )


def keep(ring, values, m):
    """A ring with values of microbatch m; those of one that does not exist where none needs any."""
    return [
        lax.dynamic_update_index_in_dim(r, v, jnp.clip(m, 0, MICROBATCHES) % r.shape[0], 0)
        for r, v in zip(ring, values, strict=True)
    ]


def kept(ring, m):
    """What a ring has of microbatch m."""
    return [lax.dynamic_index_in_dim(r, m % r.shape[0], keepdims=False) for r in ring]
