"""Loss and gradients through pipeline stages that hold several virtual stages each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import pass_on, reduce_gradient
from planner.emit.runtime.files.tables import (
    CARRIED,
    GRADIENTS,
    MESH,
    MICROBATCHES,
    ONLY_BLOCKS,
    ONLY_EPILOGUE,
    PER_VIRTUAL_STAGE,
    VIRTUAL_STAGES,
    WEIGHT_ROWS,
    epilogue,
    prologue,
    stage_blocks,
)
from planner.emit.runtime.pipeline.stages import microbatch_of, pick, zeros_of
from planner.emit.runtime.pipeline.virtual_stages import ring_places, slot_of
from planner.emit.runtime.step.reduce_shard_map import (
    no_gradients,
    reduced_last,
    scattered_each,
    unreduced,
)


def virtual_stage_of(params, virtual):
    """Parameters as the blocks of one virtual stage read them."""
    return {
        key: lax.dynamic_index_in_dim(p, virtual, keepdims=False) if key in PER_VIRTUAL_STAGE else p
        for key, p in params.items()
    }


def add_virtual_stage(total, grads, virtual, real):
    """Gradients of a virtual stage added to those of all, where the slot is real."""
    sums = dict(total)
    for key, d in grads.items():
        d = jnp.where(real, d, 0)
        sums[key] = (
            lax.dynamic_update_index_in_dim(
                total[key],
                lax.dynamic_index_in_dim(total[key], virtual, keepdims=False) + d,
                virtual,
                0,
            )
            if key in PER_VIRTUAL_STAGE
            else total[key] + d
        )
    return sums


# Long: the ticks of one schedule, nested functions that share its microbatches and its ring.
def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches; in every tick a stage runs one virtual stage
    forward and one backward (interleaved 1F1B).

    Virtual stage c of stage i follows virtual stage c of stage i - 1, and where i is 0, virtual
    stage c - 1 of the last stage. Stage i runs slot n forward in tick n + i, and slot n of the
    backward pass in tick n + VIRTUAL_STAGES * stages - 1 + stages - 1 - i. In between, what the
    backward pass reads lies in a ring of stages * (VIRTUAL_STAGES + 1) - 1 places; parameters are
    read where they are. The epilogue follows the last virtual stage of the last stage in the same
    tick: in the last `stages` of every stages * VIRTUAL_STAGES ticks. Slots that do not exist fill
    the bubble, and their results are dropped.
    """
    stages, stage = MESH["stage"], lax.axis_index("stage")
    last, depth, places = (
        stage == stages - 1,
        stages * VIRTUAL_STAGES,
        ring_places(stages * VIRTUAL_STAGES - 1, stages, MICROBATCHES),
    )
    pending = unreduced(params)
    within = {}
    for key in GRADIENTS:
        axes, dim = scattered_each(key)
        within[key] = axes, dim - (key in PER_VIRTUAL_STAGE)
    blocks, ends = (
        {key: p for key, p in pending.items() if key not in other}
        for other in (ONLY_EPILOGUE, ONLY_BLOCKS)
    )
    form: list = (
        []
        # of the residuals, known once a forward pass has been traced: their tree, and which are
        # parameters
    )

    def forward(x, tick):
        """What the stage hands on, and what its backward pass reads beside parameters."""
        m, virtual = slot_of(tick - stage, stages, MICROBATCHES)
        p, frozen_here = virtual_stage_of(blocks, virtual), virtual_stage_of(frozen, virtual)
        y, pull = jax.vjp(
            lambda p, x: stage_blocks(p, frozen_here, microbatch_of(batch, m), x, virtual), p, x
        )
        leaves, tree = jax.tree.flatten(pull)
        known = jax.tree.leaves((p, frozen_here))
        form[:] = (
            tree,
            [next((k for k, p in enumerate(known) if p is leaf), None) for leaf in leaves],
        )
        return y, [leaf for leaf, k in zip(leaves, form[1], strict=True) if k is None]

    def keep(ring, saved, tick):
        here = jnp.array(places)[jnp.clip(tick - stage, 0, MICROBATCHES * VIRTUAL_STAGES)]
        return [
            lax.dynamic_update_index_in_dim(r, s, here, 0) for r, s in zip(ring, saved, strict=True)
        ]

    def backward(g, ring, total, tick):
        """Gradients added up; the gradient of the stage's input goes to the stage before."""
        n = tick - (depth - 1) - (stages - 1) + stage
        turn = slot_of(n, stages, MICROBATCHES)[1]
        virtual = VIRTUAL_STAGES - 1 - turn
        here = jnp.array(places)[
            jnp.clip(n + (virtual - turn) * stages, 0, MICROBATCHES * VIRTUAL_STAGES - 1)
        ]
        saved = iter([lax.dynamic_index_in_dim(r, here, keepdims=False) for r in ring])
        known = jax.tree.leaves([virtual_stage_of(p, virtual) for p in (blocks, frozen)])
        pull = jax.tree.unflatten(
            form[0], [next(saved) if k is None else known[k] for k in form[1]]
        )
        grads, g = pull(g)
        real = (n >= 0) & (n < MICROBATCHES * VIRTUAL_STAGES)
        return pass_on(g, "stage", -1), add_virtual_stage(
            total,
            {key: reduce_gradient(d, (), *within[key]) for key, d in grads.items()},
            virtual,
            real,
        )

    def closing(p, now, y):
        loss, weight = epilogue(p, frozen, now, y)
        return jnp.where(last, loss, 0), weight

    def warm_up(carry, tick):
        x, ring = carry
        y, saved = forward(x, tick)
        return (pass_on(y, "stage"), keep(ring, saved, tick)), None

    def passing(carry, tick, closes=False):
        x, g, ring, total, loss, weight = carry
        y, saved = forward(x, tick)
        ring = keep(ring, saved, tick)
        if closes:
            now = microbatch_of(batch, slot_of(tick - (stages - 1), stages, MICROBATCHES)[0])
            (here, rows_here), (end_gradients, g_y) = jax.value_and_grad(
                lambda p, y: closing(p, now, y), argnums=(0, 1), has_aux=True
            )(ends, y)
            total = total | {
                key: total[key] + reduce_gradient(d, (), *scattered_each(key))
                for key, d in end_gradients.items()
            }
            g, loss, weight = pick(last, g_y, g), loss + here, weight + rows_here
        g, total = backward(g, ring, total, tick)
        return (pass_on(y, "stage"), g, ring, total, loss, weight), None

    def steady(carry, start, ticks, closes):
        return lax.scan(lambda c, tick: passing(c, tick, closes), carry, start + jnp.arange(ticks))[
            0
        ]

    def group(carry, start):
        return (
            steady(
                steady(carry, start, depth - stages, False), start + depth - stages, stages, True
            ),
            None,
        )

    def cool_down(carry, tick):
        return backward(carry[0], ring, carry[1], tick), None

    first_frozen, first = virtual_stage_of(frozen, 0), microbatch_of(batch, 0)
    x = zeros_of(jax.eval_shape(lambda: prologue(pending, first_frozen, first))[:CARRIED])
    ring = zeros_of(
        jax.eval_shape(
            lambda: [jnp.broadcast_to(s, (max(places) + 1, *s.shape)) for s in forward(x, 0)[1]]
        )
    )
    total = no_gradients(pending)
    (y, ring), _ = lax.scan(warm_up, (x, ring), jnp.arange(depth - 1))
    carry = y, x, ring, total, lax.pcast(jnp.zeros(()), "stage", to="varying"), jnp.zeros(())
    carry, begun = steady(carry, depth - 1, stages, True), depth - 1 + stages
    if stages < MICROBATCHES:
        carry, _ = lax.scan(group, carry, begun + depth * jnp.arange(MICROBATCHES // stages - 1))
    _, g, ring, total, loss, weight = carry
    done = MICROBATCHES * VIRTUAL_STAGES + stages - 1
    (_, total), _ = lax.scan(cool_down, (g, total), jnp.arange(done, done + depth - 1))
    weight = jnp.maximum(weight, 1 / WEIGHT_ROWS)
    loss, grads = jax.tree.map(
        lambda t: t / weight.astype(t.dtype), (lax.psum(loss, "stage"), total)
    )
    return loss, {key: reduced_last(key, gradient) for key, gradient in grads.items()}
