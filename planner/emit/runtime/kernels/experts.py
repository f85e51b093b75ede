"""Routed experts: each token goes through the experts its router chose, in blocks of rows sorted by
expert, and none is dropped.

A stack is (gate, up, down, gate's bias, up's, down's), the experts in dim 0 of each, None where
there is none; of weights that are kept in float8 behind them scales of the columns of gate, up and
down. `how` is what the plan and the model fix: mix(gate's product, up's product), the
hidden activation; the products "rows x weight" of the first and of the last layer; rows of a block;
and blocks of an expert at balance, which is what readers of the compiled program count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.emit.runtime.collectives.exchange import after, alike, never, vary
from planner.emit.runtime.kernels.float8 import in_rows8, rows8
from planner.emit.runtime.kernels.grouped_experts import (
    grouped_gradients,
    grouped_results,
    takes_grouped,
)


def routed_experts(x, index, share, stacks, start, how, trained=False):
    """x [.., H], index and share [.., K] -> [.., H]: sum over j of share[j] * expert[index[j]](x),
    for the experts here, which begin at number `start`. trained: whether the stacks are; their
    gradients then come before that of x is used (`after_all`)."""
    x, share, stacks = alike((x, share.astype(x.dtype), stacks))
    count = stacks[1].shape[0]
    local = index.reshape(-1) - start
    ids = jnp.where((local >= 0) & (local < count), local, count)
    run = jax.custom_vjp(lambda *operands: expert_results(how, *operands))

    def backward(kept, g):
        x, ids, share, stacks = kept
        dx, dshare, dstacks = expert_gradients(how, x, ids, share, stacks, g)
        return after_all(dx, dstacks) if trained else dx, None, dshare, dstacks

    run.defvjp(lambda *operands: (expert_results(how, *operands), operands), backward)
    return run(x.reshape(-1, x.shape[-1]), ids, share.reshape(-1), stacks).reshape(x.shape)


def after_all(dx, arrays):
    """`dx`, but computed after all of `arrays`. Where layers are written out one after the
    other, compilers put off the gradients of experts' weights until all layers' rows for them are
    there together."""
    ends = [x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(arrays)]
    return after(dx, sum(ends)[None])


# Long: the forward and the backward pass of one function share what it computes first.
def exchanged_experts(x, index, share, stacks, pieces, joint, slots, how):
    """routed_experts where the mesh axes `joint` cut tokens and experts alike: rows travel to their
    experts' devices and their results back.

    pieces: (axis, size) of all axes that cut the experts, major first. A round carries up to
    `slots` rows from each device to each other; there are as many rounds as the fullest pair of
    devices in the group needs, so that no row is dropped, and one where the router is balanced.
    """
    x, share, stacks = alike((x, share.astype(x.dtype), stacks))
    count, devices = stacks[1].shape[0], lax.axis_size(joint)
    piece = index.reshape(-1) // count
    known, to = piece >= 0, piece * 0
    for k, (axis, size) in enumerate(pieces):
        digit = piece // int(np.prod([n for _, n in pieces[k + 1 :]], dtype=int)) % size
        if axis in joint:
            to = to + digit * int(
                np.prod([n for a, n in pieces if a in joint[joint.index(axis) + 1 :]], dtype=int)
            )
        else:
            known = known & (digit == lax.axis_index(axis))
    to = jnp.where(known, to, devices)
    ids = index.reshape(-1) % count
    order, first = sorted_by(to, devices, slots)
    rounds = lax.pmax(jnp.max((first[1:] - first[:-1] + slots - 1) // slots), joint)
    there = lambda v: lax.all_to_all(v, joint, 0, 0, tiled=True)  # noqa: E731
    choices = ids.shape[0] // (x.size // x.shape[-1])

    def packed(order, first, r):
        position = (first[:-1] + r * slots)[:, None] + jnp.arange(slots)
        real = (position < first[1:, None]).reshape(-1)
        row = order[jnp.minimum(position, order.shape[0] - 1)].reshape(-1)
        return row, row // choices, real

    def results(x, ids, share, stacks, order, first, rounds):
        def one(r, out):
            row, token, real = packed(order, first, r)
            mine = there(jnp.where(real, ids[row], count))
            rows = sent_rows(there, jnp.where(real[:, None], x[token], 0), stacks)
            y = there(expert_results(how, rows, mine, jnp.ones_like(rows[:, 0]), stacks))
            return out.at[token].add(jnp.where(real, share[row], 0)[:, None] * y)

        return over(rounds, 1, one, nothing_before(x, x))

    def backward(kept, g):
        x, ids, share, stacks, order, first, rounds = kept

        def one(r, carry):
            dx, dshare, dstacks = carry
            row, token, real = packed(order, first, r)
            facts = there(
                jnp.where(
                    real[:, None],
                    jnp.stack([ids[row].astype(jnp.float32), share[row].astype(jnp.float32)], 1),
                    jnp.array([count, 0.0]),
                )
            )
            rows, gy = (there(jnp.where(real[:, None], v[token], 0)) for v in (x, g))
            drows, worth, dstacks = expert_gradients(
                how,
                rows,
                facts[:, 0].astype(jnp.int32),
                facts[:, 1].astype(x.dtype),
                stacks,
                gy,
                dstacks,
            )
            drows, worth = there(drows), there(worth)
            dx = dx.at[token].add(jnp.where(real[:, None], drows, 0))
            return dx, dshare.at[row].add(jnp.where(real, worth, 0)), dstacks

        dx, dshare, dstacks = over(
            rounds,
            1,
            one,
            (nothing_before(g, x), nothing_before(g, share), no_gradients_of(stacks, g)),
        )
        return dx, None, dshare, dstacks, None, None, None

    run = jax.custom_vjp(results)
    run.defvjp(lambda *operands: (results(*operands), operands), backward)
    return run(
        x.reshape(-1, x.shape[-1]), ids, share.reshape(-1), stacks, order, first, rounds
    ).reshape(x.shape)


def sent_rows(there, rows, stacks):
    """Rows on their way to experts; those whose weights are kept in float8 make rows float8 in any
    case, and get them so."""
    if len(stacks) == 6 or rows.dtype == jnp.float32:
        return there(rows)
    short, scale = in_rows8(rows)
    return (there(short).astype(jnp.float32) * there(scale)).astype(rows.dtype)


def nothing(v, dtype=None):
    """Zeros like v."""
    return vary(jnp.zeros(v.shape, dtype or v.dtype), jax.typeof(v).manual_axis_type.varying)


def nothing_before(cause, v):
    """Zeros like v, made once `cause` is there: of layers that are written out compilers fill all
    zeros of one shape in one kernel, those of the last backward pass before the first layer."""
    return vary(
        jnp.broadcast_to(never(cause).astype(v.dtype), v.shape),
        jax.typeof(v).manual_axis_type.varying,
    )


def no_gradients_of(stacks, cause):
    """Zeros like stacks, made once `cause` is there."""
    return jax.tree.map(lambda w: nothing_before(cause, w), stacks)


def over(times, planned, step, carry):
    """lax.fori_loop of a length that only the router knows; `planned` is what it is at balance."""
    with jax.named_scope(f"planned_trips_{planned}"):
        return lax.fori_loop(0, times, step, carry)


def sorted_by(ids, count, spare):
    """(order, first): places sorted by id, with `spare` more at the end, and where those of each id
    below `count` begin (count + 1 numbers)."""
    order = jnp.argsort(ids)
    first = jnp.searchsorted(ids[order], jnp.arange(count + 1), method="compare_all").astype(
        jnp.int32
    )
    return jnp.concatenate([order, nothing(order[:1]).repeat(spare)]), first


def expert_block(order, first, e, b, rows, choices):
    """Block b of expert e: places of its rows, their tokens, and which of them are real."""
    start = first[e] + b * rows
    row = lax.dynamic_slice_in_dim(order, start, rows)
    return row, row // choices, (start + jnp.arange(rows) < first[e + 1])[:, None]


def hidden_rows(x, stack, mix, form):
    """Hidden activations of one expert's rows."""
    h = [None if stack[k] is None else expert_rows(x, stack, k, form) for k in (0, 1)]
    return mix(*h)


def expert_rows(x, stack, k, form):
    """One expert's rows times its weight k, with its bias where it has one."""
    if len(stack) > 6:
        y = rows8(x, stack[k], form in ("rh,fh->rf", "rf,hf->rh")) * stack[6 + k]
    else:
        y = jnp.einsum(form, x, stack[k])
    return y if stack[3 + k] is None else y + stack[3 + k]


def expert_results(how, x, ids, share, stacks):
    """Sum of each token's experts, x [T, H], ids and share [T * K]; rows whose id is the number of
    experts here are for others. A block at a time, or where a kernel serves all at once."""
    if takes_grouped(how, x, ids, stacks):
        return grouped_results(how, x, ids, share, stacks)
    mix, into, out_of, rows, planned = how
    choices, count = ids.shape[0] // x.shape[0], stacks[1].shape[0]
    order, first = sorted_by(ids, count, rows)

    def expert(e, out):
        stack = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, e, keepdims=False), stacks)

        def step(b, out):
            row, token, real = expert_block(order, first, e, b, rows, choices)
            h = hidden_rows(jnp.where(real, x[token], 0), stack, mix, into)
            y = expert_rows(h, stack, 2, out_of)
            return out.at[token].add(jnp.where(real, share[row][:, None] * y, 0))

        return over((first[e + 1] - first[e] + rows - 1) // rows, planned, step, out)

    return lax.fori_loop(0, count, expert, nothing_before(x, x))


def expert_gradients(how, x, ids, share, stacks, g, dstacks=None):
    """Gradients of expert_results: of x, of share, and of the stacks, added to `dstacks` where
    there are any. Hidden activations are made again, a block at a time; within an expert a weight's
    gradient is summed in float32."""
    if takes_grouped(how, x, ids, stacks):
        dstacks = jax.tree.map(nothing, stacks) if dstacks is None else dstacks
        return grouped_gradients(how, x, ids, share, stacks, g, dstacks)
    dstacks = no_gradients_of(stacks, g) if dstacks is None else dstacks
    mix, into, out_of, rows, planned = how
    choices, count = ids.shape[0] // x.shape[0], stacks[1].shape[0]
    order, first = sorted_by(ids, count, rows)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def expert(e, carry):
        dx, dshare, dstacks = carry
        stack = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, e, keepdims=False), stacks)

        def step(b, carry):
            dx, dshare, sums = carry
            row, token, real = expert_block(order, first, e, b, rows, choices)
            gy, part = jnp.where(real, g[token], 0), jnp.where(real, share[row][:, None], 0)
            h, pull = jax.vjp(
                lambda v, s: hidden_rows(v, s, mix, into), jnp.where(real, x[token], 0), stack
            )
            dh = jax.vjp(lambda h: jnp.einsum(out_of, h, stack[2]), h)[1](gy)[0]
            ddown = jax.vjp(lambda w: jnp.einsum(out_of, h * part, w), stack[2])[1](gy)[0]
            drows, (dgate, dup, _, dgate_bias, dup_bias, _) = pull(dh * part)
            worth = jnp.sum((dh * h).astype(wide), -1)
            dbias = None
            if stack[5] is not None:
                worth, dbias = (
                    worth + gy.astype(wide) @ stack[5].astype(wide),
                    jnp.sum(gy * part, 0),
                )
            sums = jax.tree.map(
                lambda a, d: a + d.astype(wide),
                sums,
                (dgate, dup, ddown, dgate_bias, dup_bias, dbias),
            )
            dx = dx.at[token].add(jnp.where(real, drows, 0))
            return dx, dshare.at[row].add(jnp.where(real[:, 0], worth, 0).astype(share.dtype)), sums

        sums = jax.tree.map(lambda w: nothing(w, wide), stack)
        dx, dshare, sums = over(
            (first[e + 1] - first[e] + rows - 1) // rows, planned, step, (dx, dshare, sums)
        )
        return dx, dshare, jax.tree.map(lambda d, s: d.at[e].add(s.astype(d.dtype)), dstacks, sums)

    start = nothing_before(g, x), nothing_before(g, share), dstacks
    return lax.fori_loop(0, count, expert, start)
