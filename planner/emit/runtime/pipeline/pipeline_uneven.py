"""Loss and gradients through uneven pipeline stages: they have no block in common."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import reduce_gradient
from planner.emit.runtime.files.frame import labels_of
from planner.emit.runtime.files.tables import (
    FIRST_BACKWARD,
    FROZEN,
    HANDED,
    HANDED_SIZES,
    MICROBATCHES,
    PARAMS,
    PATHS,
    STAGE_BUFFERS,
    VIRTUAL_STAGES,
    WEIGHT_ROWS,
    each_stage,
)
from planner.emit.runtime.pipeline.stages import microbatch_of
from planner.emit.runtime.pipeline.virtual_stages import ring_places, slot_of
from planner.emit.runtime.step.reduce_shard_map import (
    no_gradients,
    reduced_last,
    scattered_each,
    unreduced,
)


def varying(x, axes):
    """x as a value that differs over the axes, and over those it differs over already."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def joined(values, pieces, room):
    """Flat buffers, as `room` says: key -> (elements, dtype, axes they differ over), with values
    one behind the other and zeros around them. pieces: (key, first element, shape) of each."""
    buffers = {}
    for key, (size, dtype, axes) in room.items():
        parts = [
            varying(v.reshape(-1).astype(dtype), axes)
            for v, piece in zip(values, pieces, strict=True)
            if piece[0] == key
        ]
        before = next((first for other, first, _ in pieces if other == key), 0)
        around = [
            varying(jnp.zeros(n, dtype), axes)
            for n in (before, size - before - sum(v.size for v in parts))
        ]
        parts = [v for v in (around[0], *parts, around[1]) if v.size]
        buffers[key] = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return buffers


def apart_in(flat, pieces):
    """The values of flat buffers. Their gradients are joined in one pass, not each put into zeros
    as long as the buffer."""
    room = {
        key: (x.size, x.dtype, jax.typeof(x).manual_axis_type.varying) for key, x in flat.items()
    }

    @jax.custom_vjp
    def cut(flat):
        return [
            lax.slice_in_dim(flat[key], first, first + math.prod(shape)).reshape(shape)
            for key, first, shape in pieces
        ]

    cut.defvjp(
        lambda flat: (cut(flat), None), lambda _, gradients: (joined(gradients, pieces, room),)
    )
    return cut(flat)


def weights_at(k, buffers, table):
    """label -> weight of virtual stage k from a device's part of the buffers. The gradient
    has zeros for weights of other virtual stages. What is no buffer goes along."""
    placed = [
        (key, label, place)
        for key in table
        for label, place in zip(labels_of(key, table[key]), STAGE_BUFFERS[key], strict=True)
        if place[0] == k
    ]
    arrays = apart_in(
        {key: buffers[key].reshape(-1) for key in table},
        [(key, place[1], place[2]) for key, _, place in placed],
    )
    beside = {key: value for key, value in buffers.items() if key not in table}
    return dict(zip((label for _, label, _ in placed), arrays, strict=True)) | beside


def held_at(k):
    """The places along axis "stage" that hold stage k."""
    return sorted({path[k] for path in PATHS})


def own_of(k):
    """Microbatches of a tick that a place with virtual stage k runs."""
    return len(PATHS) // len(held_at(k % len(PATHS[0])))


def stage_here():
    """(the stage of this device's place, the first microbatch of a tick that it runs)."""
    place = lax.axis_index("stage")
    if len(PATHS) == 1:
        return place, 0
    every, holder = (
        range(lax.axis_size("stage")),
        {place: k for path in PATHS for k, place in enumerate(path)},
    )
    first = [min(u for u, path in enumerate(PATHS) if place in path) for place in every]
    return jnp.array([holder[place] for place in every])[place], jnp.array(first)[place]


def along_paths(values, step=1):
    """What was made at the place `step` stages before this one's, for every microbatch of a tick
    (first dim): each goes its path through the stages."""

    def sent(v):
        ways = (
            [(path[j], path[(j + step) % len(path)]) for j in range(len(path))] for path in PATHS
        )
        return jnp.stack([lax.ppermute(v[u], "stage", pairs) for u, pairs in enumerate(ways)])

    return jax.tree.map(sent, values)


def over_places(x):
    """The sum of what the places of this device's stage hold."""
    total, shared = x, [held_at(k) for k in range(len(PATHS[0]))]
    for step in range(1, len(PATHS)):
        pairs = [
            (places[j], places[(j + step) % len(places)])
            for places in shared
            if step < len(places)
            for j in range(len(places))
        ]
        total = total + lax.ppermute(x, "stage", pairs)
    return total


def each_microbatch(one, count, first, start):
    """Of the `count` microbatches that a place runs in a tick, by one(i): (terms of sums, what it
    makes). Returns the sums, from `start` on, and what was made along a first dim of all
    microbatches of the tick, where the place's are the `first` and those after it, the others'
    zeros.
    """

    def turn(total, i):
        terms, results = one(i)
        return jax.tree.map(jnp.add, total, terms), results

    def among(v):
        if count == len(PATHS):
            return v
        empty = varying(
            jnp.zeros((len(PATHS), *v.shape[1:]), v.dtype), jax.typeof(v).manual_axis_type.varying
        )
        return lax.dynamic_update_slice_in_dim(empty, v, first, 0)

    if count > 1:
        total, results = lax.scan(turn, start, jnp.arange(count))
    else:
        total, results = one(0)
        results = jax.tree.map(lambda v: v[None], results)
    return total, jax.tree.map(among, results)


def one_of(x, place):
    """What is along the first dim of every array at a place."""
    return jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, place, keepdims=False), x)


def averaged(total, loss):
    """(loss, gradients) of a step from a place's sums of gradients, and of loss times weight and
    weight."""
    loss = lax.psum(loss, "stage")
    weight = jnp.maximum(loss[1], 1 / WEIGHT_ROWS)
    grads = {key: t / weight.astype(t.dtype) for key, t in total.items()}
    return loss[0] / weight, {key: over_places(reduced_last(key, g)) for key, g in grads.items()}


# Long: the ticks of one schedule, nested functions that share its microbatches and its ring.
def gradients(params, frozen, batch):
    """(loss, gradients) of MICROBATCHES microbatches, which pass through VIRTUAL_STAGES virtual
    stages on every stage: virtual stage c of stage i is number c * stages + i in the model's order.

    Stage i runs slot n of its work forward in tick n + i, and slot n of the backward pass in tick
    FIRST_BACKWARD + n + stages - 1 - i. A stage saves what each slot gets, in a ring, and
    recomputes its forward pass in its backward pass; the last virtual stage runs both at once.
    Every device holds the code of all virtual stages and runs those of its own. Slots that do not
    exist fill the bubble, and their results are dropped; once forward passes are through, no
    microbatch is left for the last virtual stage but under gpipe, and it waits. A slot is
    len(PATHS) microbatches: a stage with one place runs them all, one with several shares them out.
    """
    together, stages = len(PATHS), len(PATHS[0])
    stage, first = stage_here()
    groups, depth = MICROBATCHES // together, stages * VIRTUAL_STAGES
    pieces, ticks, ring_at = (
        groups * VIRTUAL_STAGES,
        groups * VIRTUAL_STAGES + stages - 1,
        ring_places(FIRST_BACKWARD, stages, groups),
    )
    pending = unreduced(params)
    kind = next((p.dtype for p in pending.values()), jnp.float32)
    room = {axes: (size, kind, ("stage", *axes)) for axes, size in HANDED_SIZES.items()}

    def run(k, p, x, now):
        return each_stage()[k](
            weights_at(k, p, PARAMS), weights_at(k, frozen, FROZEN), now, apart_in(x, HANDED[k])
        )

    def handing_on(k, now):
        return lambda p, x: joined(run(k, p, x, now), HANDED[k + 1], room)

    def forward(x, tick):
        """What the stage hands on; the last virtual stage has nothing to do."""
        m, virtual = slot_of(tick - stage, stages, groups)

        def inner(p, x, m, k):
            return each_microbatch(
                lambda i: ((), handing_on(k, microbatch_of(batch, m + i))(p, one_of(x, first + i))),
                own_of(k),
                first,
                (),
            )[1]

        ways = [
            *(lambda p, x, m, k=k: inner(p, x, m, k) for k in range(depth - 1)),
            lambda p, x, m: x,
        ]
        return lax.switch(virtual * stages + stage, ways, pending, x, m * together + first)

    def backward(virtual, x, g, m, waits):
        """(gradients of the virtual stage's weights, loss times weight and weight of the last one,
        where it does not wait), gradients of its input."""
        none = (
            jax.tree.map(
                lambda w: varying(jnp.zeros_like(w), jax.typeof(w).manual_axis_type.varying),
                pending,
            ),
            varying(jnp.zeros(2), ("stage",)),
        )

        def inner(p, x, g, m, k):
            def one(i):
                grads, input_grads = jax.vjp(
                    handing_on(k, microbatch_of(batch, m + i)), p, one_of(x, first + i)
                )[1](one_of(g, first + i))
                return (grads, none[1]), input_grads

            return each_microbatch(one, own_of(k), first, none)

        def end(p, x, g, m):
            def one(i):
                def total(p, x):
                    both = varying(run(depth - 1, p, x, microbatch_of(batch, m + i)), ("stage",))
                    return both[0], both

                (grads, input_grads), both = jax.grad(total, argnums=(0, 1), has_aux=True)(
                    p, one_of(x, first + i)
                )
                return (grads, both), input_grads

            return each_microbatch(one, own_of(depth - 1), first, none)

        ways = [
            *(lambda p, x, g, m, k=k: inner(p, x, g, m, k) for k in range(depth - 1)),
            (lambda p, x, g, m: (none, g)) if waits else end,
        ]
        return lax.switch(virtual * stages + stage, ways, pending, x, g, m)

    def ahead(carry, tick):
        x, ring = carry
        here = jnp.array(ring_at)[jnp.clip(tick - stage, 0, pieces)]
        ring = jax.tree.map(lambda r, s: lax.dynamic_update_index_in_dim(r, s, here, 0), ring, x)
        return (along_paths(forward(x, tick)), ring), None

    def behind(carry, tick, ring, waits=False):
        g, total, loss = carry
        n = tick - FIRST_BACKWARD - (stages - 1) + stage
        m, turn = slot_of(n, stages, groups)
        virtual = VIRTUAL_STAGES - 1 - turn
        here = jnp.array(ring_at)[jnp.clip(n + (virtual - turn) * stages, 0, pieces - 1)]
        x = one_of(ring, here)
        (grads, both), g = backward(virtual, x, g, m * together + first, waits)
        real = (n >= 0) & (n < pieces)
        grads = {key: reduce_gradient(d, (), *scattered_each(key)) for key, d in grads.items()}
        total = {key: jnp.where(real, total[key] + d, total[key]) for key, d in grads.items()}
        return along_paths(g, -1), total, loss + jnp.where(real, both, 0)

    def steady(carry, tick):
        (x, ring), _ = ahead(carry[:2], tick)
        return (x, ring, *behind(carry[2:], tick, ring)), None

    x = {
        axes: varying(jnp.zeros((together, size), dtype), over)
        for axes, (size, dtype, over) in room.items()
    }
    ring = {
        axes: varying(jnp.zeros((max(ring_at) + 1, together, size), dtype), over)
        for axes, (size, dtype, over) in room.items()
    }
    total = no_gradients(pending)
    g, loss = x, varying(jnp.zeros(2), ("stage",))
    (x, ring), _ = lax.scan(ahead, (x, ring), jnp.arange(FIRST_BACKWARD))
    (x, ring, *rest), _ = lax.scan(
        steady, (x, ring, g, total, loss), jnp.arange(FIRST_BACKWARD, ticks)
    )
    waits = ticks > FIRST_BACKWARD  # under gpipe no backward pass has run yet
    (_, total, loss), _ = lax.scan(
        lambda c, tick: (behind(c, tick, ring, waits), None),
        tuple(rest),
        jnp.arange(ticks, FIRST_BACKWARD + ticks),
    )
    return averaged(total, loss)
