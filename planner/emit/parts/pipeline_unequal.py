"""Loss and gradients through pipeline stages that have no block in common."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.parts.chunks import piece_of, waiting_places
from planner.emit.parts.exchange import pass_on, pend, reduce_gradient, zeros_like_piece
from planner.emit.parts.frame import labels_of
from planner.emit.parts.stages import microbatch_of
from planner.emit.parts.tables import CHUNKS, FIRST_BACKWARD, FROZEN, GRADIENTS, HANDED, MESH, MICROBATCHES, PACKED, PARAMS, ROOM, SCATTER_EACH_MICROBATCH, each_stage


def varying(x, axes):
    """x as a value that differs over the axes, and over those it differs over already."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def joined(values, pieces, room):
    """Flat buffers, as `room` says: key -> (elements, dtype, axes they differ over), with values one behind the other and zeros around them.
    pieces: (key, first element, shape) of each."""
    out = {}
    for key, (size, dtype, axes) in room.items():
        own = [varying(v.reshape(-1).astype(dtype), axes) for v, piece in zip(values, pieces, strict=True) if piece[0] == key]
        before = next((first for other, first, _ in pieces if other == key), 0)
        around = [varying(jnp.zeros(n, dtype), axes) for n in (before, size - before - sum(v.size for v in own))]
        own = [v for v in (around[0], *own, around[1]) if v.size]
        out[key] = jnp.concatenate(own) if len(own) > 1 else own[0]
    return out


def apart_in(flat, pieces):
    """The values of flat buffers. Their gradients are joined in one pass, not each put into zeros as long as the buffer."""
    room = {key: (x.size, x.dtype, jax.typeof(x).manual_axis_type.varying) for key, x in flat.items()}

    @jax.custom_vjp
    def cut(flat):
        return [lax.slice_in_dim(flat[key], first, first + math.prod(shape)).reshape(shape) for key, first, shape in pieces]

    cut.defvjp(lambda flat: (cut(flat), None), lambda _, gradients: (joined(gradients, pieces, room),))
    return cut(flat)


def weights_at(k, buffers, table):
    """label -> weight of chunk k from a device's part of the buffers; of other chunks' numbers only for the gradient's sake."""
    own = [(key, label, place) for key in buffers for label, place in zip(labels_of(key, table[key]), PACKED[key], strict=True) if place[0] == k]
    arrays = apart_in({key: p.reshape(-1) for key, p in buffers.items()}, [(key, place[1], place[2]) for key, _, place in own])
    return dict(zip((label for _, label, _ in own), arrays, strict=True))


def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches, which pass through CHUNKS chunks of the model on every stage: chunk c of stage i is number c * stages + i.

    Stage i runs piece n of its work forward in tick n + i, and piece n of the backward pass in tick FIRST_BACKWARD + n + stages - 1 - i. A stage keeps what each piece is
    given, in a ring, and runs its forward pass again in its backward pass; the last chunk runs both at once. Every device holds the code of all chunks and runs
    those of its own. Pieces that do not exist fill the bubble, and what they give is dropped; once forward passes are through, no microbatch is left for the last
    chunk but under gpipe, and it waits.
    """
    stages, stage, places = MESH["stage"], lax.axis_index("stage"), waiting_places(FIRST_BACKWARD)
    pieces, depth = MICROBATCHES * CHUNKS, stages * CHUNKS
    pending = {key: pend(p, GRADIENTS[key][0]) for key, p in params.items()}
    scatter = {key: (axes, dim) if SCATTER_EACH_MICROBATCH else ((), 0) for key, (_, _, axes, dim, _) in GRADIENTS.items()}
    kind = next((p.dtype for p in pending.values()), jnp.float32)
    room = {axes: (size, kind, ("stage", *axes)) for axes, size in ROOM.items()}

    def run(k, p, x, now):
        return each_stage()[k](weights_at(k, p, PARAMS), weights_at(k, frozen, FROZEN), now, apart_in(x, HANDED[k]))

    def handing_on(k, now):
        return lambda p, x: joined(run(k, p, x, now), HANDED[k + 1], room)

    def forward(x, tick):
        """What the stage hands on; the last chunk has nothing to do."""
        m, chunk = piece_of(tick - stage)
        ways = [*(lambda p, x, now, k=k: handing_on(k, now)(p, x) for k in range(depth - 1)), lambda p, x, now: x]
        return lax.switch(chunk * stages + stage, ways, pending, x, microbatch_of(batch, m))

    def backward(chunk, x, g, now, waits):
        """Gradients of the chunk's weights and of what it was given, and (loss times weight, weight) of the last chunk, where it does not wait."""

        def inner(p, x, g, now, k):
            pull = jax.vjp(handing_on(k, now), p, x)[1]
            return *pull(g), varying(jnp.zeros(2), ("stage",))

        def end(p, x, g, now):
            def total(p, x):
                both = varying(run(depth - 1, p, x, now), ("stage",))
                return both[0], both

            grads, both = jax.grad(total, argnums=(0, 1), has_aux=True)(p, x)
            return *grads, both

        def wait(p, x, g, now):
            return jax.tree.map(lambda w: varying(jnp.zeros_like(w), jax.typeof(w).manual_axis_type.varying), p), g, varying(jnp.zeros(2), ("stage",))

        ways = [*(lambda p, x, g, now, k=k: inner(p, x, g, now, k) for k in range(depth - 1)), wait if waits else end]
        return lax.switch(chunk * stages + stage, ways, pending, x, g, now)

    def ahead(carry, tick):
        x, ring = carry
        here = jnp.array(places)[jnp.clip(tick - stage, 0, pieces)]
        ring = jax.tree.map(lambda r, s: lax.dynamic_update_index_in_dim(r, s, here, 0), ring, x)
        return (pass_on(forward(x, tick), "stage"), ring), None

    def behind(carry, tick, ring, waits=False):
        g, total, loss = carry
        n = tick - FIRST_BACKWARD - (stages - 1) + stage
        m, turn = piece_of(n)
        chunk = CHUNKS - 1 - turn
        here = jnp.array(places)[jnp.clip(n + (chunk - turn) * stages, 0, pieces - 1)]
        x = jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, here, keepdims=False), ring)
        grads, g, both = backward(chunk, x, g, microbatch_of(batch, m), waits)
        real = (n >= 0) & (n < pieces)
        grads = {key: reduce_gradient(d, (), *scatter[key]) for key, d in grads.items()}
        total = {key: jnp.where(real, total[key] + d, total[key]) for key, d in grads.items()}
        return pass_on(g, "stage", -1), total, loss + jnp.where(real, both, 0)

    def steady(carry, tick):
        (x, ring), _ = ahead(carry[:2], tick)
        return (x, ring, *behind(carry[2:], tick, ring)), None

    ticks = pieces + stages - 1
    x = {axes: varying(jnp.zeros(size, dtype), over) for axes, (size, dtype, over) in room.items()}
    ring = {axes: varying(jnp.zeros((max(places) + 1, size), dtype), over) for axes, (size, dtype, over) in room.items()}
    total = {key: zeros_like_piece(p, *scatter[key]) for key, p in pending.items()}
    g, loss = x, varying(jnp.zeros(2), ("stage",))
    (x, ring), _ = lax.scan(ahead, (x, ring), jnp.arange(FIRST_BACKWARD))
    (x, ring, *rest), _ = lax.scan(steady, (x, ring, g, total, loss), jnp.arange(FIRST_BACKWARD, ticks))
    waits = ticks > FIRST_BACKWARD  # under gpipe no backward pass has run yet
    (_, total, loss), _ = lax.scan(lambda c, tick: (behind(c, tick, ring, waits), None), tuple(rest), jnp.arange(ticks, FIRST_BACKWARD + ticks))
    loss = lax.psum(loss, "stage")
    weight = jnp.maximum(loss[1], 1)
    grads = {key: t / weight.astype(t.dtype) for key, t in total.items()}
    for key, (_, rest, axes, dim, _) in GRADIENTS.items():
        grads[key] = reduce_gradient(grads[key], rest, () if SCATTER_EACH_MICROBATCH else axes, dim)
    return loss[0] / weight, grads
