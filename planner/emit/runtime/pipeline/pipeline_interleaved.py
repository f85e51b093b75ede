"""Loss and gradients through pipeline stages that hold several chunks of blocks each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import pass_on, reduce_gradient
from planner.emit.runtime.files.tables import (
    CARRIED,
    CHUNKS,
    DEALT,
    GRADIENTS,
    IN_FINISH,
    IN_TRUNK,
    MESH,
    MICROBATCHES,
    enter,
    finish,
    trunk,
)
from planner.emit.runtime.pipeline.chunks import piece_of, waiting_places
from planner.emit.runtime.pipeline.stages import microbatch_of, pick, zeros_of
from planner.emit.runtime.step.reduce_shard_map import (
    no_gradients,
    reduced_last,
    scattered_each,
    unreduced,
)


def chunk_of(params, chunk):
    """Parameters as the blocks of one chunk read them."""
    return {
        key: lax.dynamic_index_in_dim(p, chunk, keepdims=False) if key in DEALT else p
        for key, p in params.items()
    }


def add_chunk(total, grads, chunk, real):
    """Gradients of a chunk added to those of all, where they are real."""
    out = dict(total)
    for key, d in grads.items():
        d = jnp.where(real, d, 0)
        out[key] = (
            lax.dynamic_update_index_in_dim(
                total[key],
                lax.dynamic_index_in_dim(total[key], chunk, keepdims=False) + d,
                chunk,
                0,
            )
            if key in DEALT
            else total[key] + d
        )
    return out


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches, of which every stage runs one chunk of its
    blocks forward and one backward a tick (interleaved 1F1B).

    Chunk c of stage i follows chunk c of stage i - 1, and chunk c - 1 of the last stage where i is
    0. Stage i runs piece n forward in tick n + i, and piece n of the backward pass in tick n +
    CHUNKS * stages - 1 + stages - 1 - i. In between, what the backward pass reads waits in a ring
    of stages * (CHUNKS + 1) - 1 places; parameters are read where they are. Head and loss follow
    the last chunk of the last stage in the same tick: in the last `stages` of every stages * CHUNKS
    ticks. Pieces that do not exist fill the bubble, and what they give is dropped.
    """
    stages, stage = MESH["stage"], lax.axis_index("stage")
    last, depth, places = (
        stage == stages - 1,
        stages * CHUNKS,
        waiting_places(stages * CHUNKS - 1, stages, MICROBATCHES),
    )
    pending = unreduced(params)
    within = {}
    for key in GRADIENTS:
        axes, dim = scattered_each(key)
        within[key] = axes, dim - (key in DEALT)
    blocks, ends = (
        {key: p for key, p in pending.items() if key not in other}
        for other in (IN_FINISH, IN_TRUNK)
    )
    form: list = (
        []
        # of the residuals, known once a forward pass has been traced: their tree, and which are
        # parameters
    )

    def forward(x, tick):
        """What the stage hands on, and what its backward pass reads beside parameters."""
        m, chunk = piece_of(tick - stage, stages, MICROBATCHES)
        p, own = chunk_of(blocks, chunk), chunk_of(frozen, chunk)
        y, pull = jax.vjp(lambda p, x: trunk(p, own, microbatch_of(batch, m), x, chunk), p, x)
        leaves, tree = jax.tree.flatten(pull)
        known = jax.tree.leaves((p, own))
        form[:] = (
            tree,
            [next((k for k, p in enumerate(known) if p is leaf), None) for leaf in leaves],
        )
        return y, [leaf for leaf, k in zip(leaves, form[1], strict=True) if k is None]

    def keep(ring, saved, tick):
        here = jnp.array(places)[jnp.clip(tick - stage, 0, MICROBATCHES * CHUNKS)]
        return [
            lax.dynamic_update_index_in_dim(r, s, here, 0) for r, s in zip(ring, saved, strict=True)
        ]

    def backward(g, ring, total, tick):
        """Gradients added up, and that of what the stage was given sent back."""
        n = tick - (depth - 1) - (stages - 1) + stage
        turn = piece_of(n, stages, MICROBATCHES)[1]
        chunk = CHUNKS - 1 - turn
        here = jnp.array(places)[
            jnp.clip(n + (chunk - turn) * stages, 0, MICROBATCHES * CHUNKS - 1)
        ]
        saved = iter([lax.dynamic_index_in_dim(r, here, keepdims=False) for r in ring])
        known = jax.tree.leaves((chunk_of(blocks, chunk), chunk_of(frozen, chunk)))
        pull = jax.tree.unflatten(
            form[0], [next(saved) if k is None else known[k] for k in form[1]]
        )
        grads, g = pull(g)
        real = (n >= 0) & (n < MICROBATCHES * CHUNKS)
        return pass_on(g, "stage", -1), add_chunk(
            total,
            {key: reduce_gradient(d, (), *within[key]) for key, d in grads.items()},
            chunk,
            real,
        )

    def closing(p, now, y):
        loss, weight = finish(p, frozen, now, y)
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
            now = microbatch_of(batch, piece_of(tick - (stages - 1), stages, MICROBATCHES)[0])
            (here, more), (own, g_y) = jax.value_and_grad(
                lambda p, y: closing(p, now, y), argnums=(0, 1), has_aux=True
            )(ends, y)
            total = total | {
                key: total[key] + reduce_gradient(d, (), *scattered_each(key))
                for key, d in own.items()
            }
            g, loss, weight = pick(last, g_y, g), loss + here, weight + more
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

    x = zeros_of(
        jax.eval_shape(lambda: enter(pending, chunk_of(frozen, 0), microbatch_of(batch, 0)))[
            :CARRIED
        ]
    )
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
    done = MICROBATCHES * CHUNKS + stages - 1
    (_, total), _ = lax.scan(cool_down, (g, total), jnp.arange(done, done + depth - 1))
    loss, grads = jax.tree.map(
        lambda t: t / jnp.maximum(weight, 1).astype(t.dtype), (lax.psum(loss, "stage"), total)
    )
    return loss, {key: reduced_last(key, gradient) for key, gradient in grads.items()}
