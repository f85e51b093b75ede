"""Attention over keys that stay cut: pieces of keys and values travel around a ring of devices, one
neighbour a step.

Each piece is attended to by itself, and results are put together by the logarithms of their sums of
exponentials (around a ring: Liu, Zaharia & Abbeel 2023). The backward pass goes around once more:
with the logarithm over all keys, what a piece gives to the gradients needs no other piece. The
gradients of keys and values travel beside them in float32, but for the last step home.

Under a causal mask a device would have the less to do the earlier its queries are. Inside a
balanced ring each has an early and a late half of equal work (`balanced`; zigzag: Zhu 2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.emit.runtime.collectives.exchange import after, pass_on, spread
from planner.emit.runtime.kernels.kernels import is_of_segments, same_segment
from planner.emit.runtime.kernels.ring_pieces import (
    block_gradients,
    block_piece,
    joined_results,
    piece_gradients,
    piece_kernel,
    piece_result,
    positions_dim,
    steps_together,
    turned,
)


# Long: the forward and the backward pass of one function share what it decides first.
# Many parameters: the operands and attributes of attention, and the axes of the ring.
def ring_attention(q, k, v, mask, scale, causal, start, axes, window=0, pieces=0, name=""):
    """`attention` of local queries q [B, H, S, D] with all keys, of which this device holds its
    piece k [B, G, T, D], v [B, G, T, E].

    mask: [.., S, all keys]. Query 0 here is query `start` of the sequence. Kept for the backward
    pass beside the operands: the result, and a float32 a row of scores. Every device meets every
    piece, masked by `causal` or not, or the last so many `pieces` up to its own (0 for all), where
    a window leaves out those before; those without any mask are the device's fused kernel's. name:
    what checkpoint policies call the result and the float32, "" for nothing.
    """
    masked = causal or mask is not None
    mask = same_segment(mask, start, q.shape[2]) if is_of_segments(mask) else mask
    kernel = "blocks" if masked else piece_kernel(q, k, v, q.shape[2], k.shape[2])
    steps, unroll = range(pieces or lax.axis_size(axes)), steps_together(kernel)

    def first(width, i):
        """The first key of the piece that is here at a step."""
        return (lax.axis_index(axes) - i) % lax.axis_size(axes) * width

    def forward(q, k, v, mask, start):
        """The result in float32, and the logarithm of the sum of exponentials of each row."""
        q, k, v = (turned(x, kernel) for x in (q, k, v))

        def meet(state, k, v, i):
            if not masked:
                return joined_results(state, piece_result(kernel, (q, k, v), scale))
            first_key = first(k.shape[2], i)
            return joined_results(
                state, block_piece((q, k, v), scale, mask, causal, start, first_key, window)
            )

        rows = max(q.shape[0], k.shape[0]), *q.shape[1:3]
        empty = jnp.zeros((*rows, v.shape[-1]), jnp.float32), jnp.full(rows, -jnp.inf)
        return go_round(meet, tuple(spread(x, q, k, v) for x in empty), (k, v), axes, steps, unroll)

    def backward(kept, g, q, k, v, mask, start):
        """Gradients of the operands, parts of that of the mask by step."""
        out, total = kept
        q, k, v, out, g = (turned(x, kernel) for x in (q, k, v, out, g))

        def meet(gradients, k, v, i):
            if masked:
                first_key = first(k.shape[2], i)
                operands, results = (q, k, v), (out, total, g)
                where = mask, causal, start, first_key, window
                parts = block_gradients(operands, results, scale, *where)
            else:
                parts = piece_gradients(kernel, (q, k, v), (out, total, g), scale)
            added = zip(gradients, parts, strict=False)
            return tuple(x + part.astype(x.dtype) for x, part in added), tuple(parts[3:])

        zeros = [spread(jnp.zeros(x.shape, jnp.float32), q, k, v) for x in (q, k, v)]
        gradients, rest = gradients_round(meet, zeros, (k, v), axes, steps, unroll)
        return [turned(x, kernel) for x in gradients], rest

    @jax.custom_vjp
    def run(q, k, v, mask, start):
        """The result alone."""
        return turned(forward(q, k, v, mask, start)[0].astype(v.dtype), kernel)

    def keep(q, k, v, mask, start):
        """The result, and what the backward pass reads."""
        out, total = forward(q, k, v, mask, start)
        out, total = with_name((turned(out.astype(v.dtype), kernel), total), name)
        return out, ((q, k, v, mask, start), (out, total))

    def pull(kept, g):
        """Gradients of all operands. Of few pieces the loops run once, so that compilers would
        keep the forward pass's scores for this one."""
        operands, results = kept
        operands = after(operands, g) if len(steps) <= unroll + 1 else operands
        (dq, dk, dv), parts = backward(results, g, *operands)
        q, k, v, mask, _ = operands
        return (
            dq.astype(q.dtype),
            dk.astype(k.dtype),
            dv.astype(v.dtype),
            ring_mask_gradient(mask, axes, *parts) if parts else None,
            None,
        )

    run.defvjp(keep, pull)
    beside = [x for x in (q, k, v, mask) if x is not None]
    q, k, v = (spread(x, *beside) for x in (q, k, v))
    return run(q, k, v, mask if mask is None else spread(mask, *beside), start)


def go_round(meet, state, piece, axes, steps, unroll):
    """The state after `meet(state, k, v, step)` with the piece (k, v) of each step, while the next
    one travels. piece: of the first step, which is here; steps: a range; unroll: how many of them
    are in an iteration of the loop."""

    def step(carry, i):
        """Meet the piece that is here while it travels on."""
        state, piece = carry
        following = pass_on(piece, axes)
        return (meet(state, *piece, i), following), None

    *before, last = steps
    if before:
        (state, piece), _ = lax.scan(step, (state, piece), jnp.array(before), unroll=unroll)
    return meet(state, *piece, last)


def gradients_round(meet, gradients, piece, axes, steps, unroll):
    """(gradients of q in float32, of k and v brought home in their types; what else `meet` gives at
    each step, stacked). `meet(gradients, k, v, step)` adds what one piece gives; gradients: what is
    there before the first step; the rest as for `go_round`."""

    def step(carry, i):
        """Meet the piece that is here; it travels on, and its gradients with it."""
        gradients, piece = carry
        following = pass_on(piece, axes)
        (dq, dk, dv), rest = meet(gradients, *piece, i)
        return ((dq, *pass_on((dk, dv), axes)), following), rest

    *before, last = steps
    if before:
        carry = tuple(gradients), piece
        (gradients, piece), earlier = lax.scan(step, carry, jnp.array(before), unroll=unroll)
    (dq, dk, dv), rest = meet(gradients, *piece, last)
    if rest and before:
        rest = [jnp.concatenate([x, y[None]]) for x, y in zip(earlier, rest, strict=True)]
    home = tuple(x.astype(y.dtype) for x, y in zip((dk, dv), piece, strict=True))
    return (dq, *pass_on(home, axes, -last)), rest


def ring_mask_gradient(mask, axes, parts):
    """A mask's gradient from its parts [step, block, ..]: by position over the keys, the blocks of
    queries after each other."""
    if mask.shape[-1] == 1:
        parts = jnp.sum(parts, 0, keepdims=True)
    else:
        parts = jnp.roll(
            parts[::-1], lax.axis_index(axes) + 1, 0
        )  # step i met the piece i before its own
    parts = (
        jnp.sum(parts, 1, keepdims=True) if mask.shape[-2] == 1 else parts
    )  # [piece, block, .., rows, width]
    parts = jnp.moveaxis(parts, (0, 1), (-2, -4))  # [.., block, rows, piece, width]
    return parts.reshape(mask.shape).astype(mask.dtype)


def balanced_ring_attention(q, k, v, scale, axes, name=""):
    """`attention` under a causal mask of local queries q [B, H, S, D] with the keys of all devices,
    of which this one holds those of the same positions, k [B, G, S, D], v [B, G, S, E], S even.

    Kept for the backward pass are the operands, the result, and a float32 a row of scores. Halves
    change places again in the backward pass: to keep them would take the memory of all of these
    twice. name: as for `ring_attention`.
    """
    half = q.shape[2] // 2
    kernel = piece_kernel(q, k, v, half, half)
    dim = positions_dim(kernel)

    def enter(x):
        """x as the kernel takes it, in the order of the ring."""
        return balanced(turned(x, kernel), axes, dim)

    def leave(x):
        """x from the kernel's form and the order of the ring back to the order of positions."""
        return turned(in_order(x, axes, dim), kernel)

    def forward(q, k, v):
        """The result in the order of the ring, and its rows' logarithms."""
        out, total = balanced_forward(kernel, [enter(x) for x in (q, k, v)], scale, axes)
        return out.astype(v.dtype), total

    @jax.custom_vjp
    def run(q, k, v):
        """The result alone."""
        return leave(forward(q, k, v)[0])

    def keep(q, k, v):
        """The result, and what the backward pass reads."""
        out, total = forward(q, k, v)
        out, total = with_name((leave(out), total), name)
        return out, ((q, k, v), out, total)

    def pull(kept, g):
        """Gradients of all operands, which wait for the result's: compilers would make one of the
        exchanges of both passes where both stand in one computation."""
        operands, out, total = kept
        operands, out = after((operands, out), g)
        balanced_operands, results = [enter(x) for x in operands], (enter(out), total, enter(g))
        gradients = balanced_backward(kernel, balanced_operands, results, scale, axes)
        return tuple(leave(x.astype(y.dtype)) for x, y in zip(gradients, operands, strict=True))

    run.defvjp(keep, pull)
    return run(*(spread(x, q, k, v) for x in (q, k, v)))


def with_name(values, name):
    """Values as checkpoint policies know them, if there is a name."""
    return [checkpoint_name(x, name) for x in values] if name else values


def balanced(x, axes, dim):
    """x with the halves of its positions, along `dim`, as a balanced ring has them, the earlier one
    first. Of all halves, in the order of the sequence, device r of n has 2r and 2r + 1; it gets 2r
    and 2n - 1 - 2r, so that each has as many pairs of a query and a key before it."""
    first, second = jnp.split(x, 2, dim)
    second = mirrored(second, axes)
    early = 2 * lax.axis_index(axes) < lax.axis_size(axes)
    halves = jnp.where(early, first, second), jnp.where(early, second, first)
    return jnp.concatenate(halves, dim)


def in_order(x, axes, dim):
    """x with the halves of its positions where they were before `balanced`."""
    low, high = jnp.split(x, 2, dim)
    early = 2 * lax.axis_index(axes) < lax.axis_size(axes)
    second = mirrored(jnp.where(early, high, low), axes)
    return jnp.concatenate([jnp.where(early, low, high), second], dim)


def mirrored(x, axes):
    """What the device as far from the end as this one is from the beginning holds."""
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(r, n - 1 - r) for r in range(n)])


def halves_met(i, half, axes):
    """Where the halves of queries and of keys begin of which all pairs count at a step, as two
    pairs.

    Of two devices of the ring the early half of one comes first, and its late half last. Queries of
    the other see its early keys alone, and with their late half it sees all keys of the other. So
    late queries see the early keys in either case; beside those, if the piece here is of the device
    before, early queries see them, else late queries the late keys.
    """
    n, r = lax.axis_size(axes), lax.axis_index(axes)
    place, other = (jnp.minimum(2 * d, 2 * n - 1 - 2 * d) for d in (r, (r - i) % n))
    other_half = jnp.where(other < place, 0, half)
    return (half, 0), (other_half, other_half)


def half_of(x, start, dim):
    """The half of its positions that begins there."""
    return lax.dynamic_slice_in_dim(x, start, x.shape[dim] // 2, dim)


def balanced_forward(kernel, operands, scale, axes):
    """(result in float32, logarithms of the sums of exponentials) of q, k and v as `balanced` puts
    them. Each step but the first meets two halves of queries with one of keys each, of which all
    pairs count."""
    q, dim = operands[0], positions_dim(kernel)

    def meet(state, k, v, i):
        """The state with what the piece gives."""
        for rows, keys in halves_met(i, q.shape[dim] // 2, axes):
            halves = half_of(q, rows, dim), half_of(k, keys, dim), half_of(v, keys, dim)
            before = [half_of(x, rows, dim) for x in state]
            whole = joined_results(before, piece_result(kernel, halves, scale))
            state = [
                lax.dynamic_update_slice_in_dim(x, part, rows, dim)
                for x, part in zip(state, whole, strict=True)
            ]
        return tuple(state)

    following = pass_on(tuple(operands[1:]), axes)
    out, total = piece_result(kernel, operands, scale, True)
    state, steps = (out.astype(jnp.float32), total), range(1, lax.axis_size(axes))
    return go_round(meet, state, following, axes, steps, steps_together(kernel))


def balanced_backward(kernel, operands, results, scale, axes):
    """Gradients of q, k and v, all as `balanced` puts them. results: the result, the logarithms of
    its rows, and its gradient."""
    q, dim = operands[0], positions_dim(kernel)

    def meet(gradients, k, v, i):
        """The gradients with what the piece gives."""
        for rows, keys in halves_met(i, q.shape[dim] // 2, axes):
            halves = half_of(q, rows, dim), half_of(k, keys, dim), half_of(v, keys, dim)
            result_halves = [half_of(x, rows, dim) for x in results]
            parts = piece_gradients(kernel, halves, result_halves, scale)
            places = zip(gradients, parts, (rows, keys, keys), strict=True)
            gradients = [
                lax.dynamic_update_slice_in_dim(x, half_of(x, at, dim) + part, at, dim)
                for x, part, at in places
            ]
        return tuple(gradients), ()

    following = pass_on(tuple(operands[1:]), axes)
    parts = piece_gradients(kernel, operands, results, scale, True)
    dq, dk, dv = (x.astype(jnp.float32) for x in parts)
    carried, steps = (dq, *pass_on((dk, dv), axes)), range(1, lax.axis_size(axes))
    return gradients_round(meet, carried, following, axes, steps, steps_together(kernel))[0]
