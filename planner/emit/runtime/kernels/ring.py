"""Attention over keys that stay cut: pieces of keys and values travel around a ring of devices, one
neighbour a step.

Softmax is taken as pieces pass by (running maximum and sum in float32: Milakov & Gimelshein 2018;
around a ring: Liu, Zaharia & Abbeel 2023). The backward pass goes around once more, with the
gradients of keys and values travelling beside them in float32 until they are home.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import after, pass_on
from planner.emit.runtime.kernels.kernels import QUERY_BLOCK, attention_scores, same_batch


def spread(x, *beside):
    """x with the mesh type of a result made of all of them."""
    axes = frozenset().union(*(jax.typeof(b).manual_axis_type.varying for b in beside))
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


# Many parameters: the operands and attributes of attention, and the axes of the ring.
def ring_attention(q, k, v, mask, scale, causal, guard, start, axes, window=0):
    """`attention` of local queries q [B, H, S, D] with all keys, of which this device holds its
    piece k [B, G, T, D], v [B, G, T, E].

    mask: [.., S, all keys]. Query 0 here is query `start` of the sequence. Kept for the backward
    pass beside the operands: the result, and a float32 a row of scores. Every device meets every
    piece, masked by `causal` or not.
    """

    @jax.custom_vjp
    def run(q, k, v, mask, start):
        """The result alone."""
        return ring_forward(q, k, v, mask, start, scale, causal, window, guard, axes)[0]

    def keep(q, k, v, mask, start):
        """The result, and what the backward pass reads."""
        out, level = ring_forward(q, k, v, mask, start, scale, causal, window, guard, axes)
        return out, ((q, k, v, mask, start), out, level)

    def backward(kept, g):
        """Gradients of all operands. Of two devices the loops run once, so that compilers would
        keep the forward pass's scores for this one."""
        operands, out, level = kept
        operands = after(operands, g) if lax.axis_size(axes) == 2 else operands
        return ring_backward(operands, out, level, g, scale, causal, window, axes)

    run.defvjp(keep, backward)
    beside = [x for x in (q, k, v, mask) if x is not None]
    q, k, v = (spread(x, *beside) for x in (q, k, v))
    return run(q, k, v, mask if mask is None else spread(mask, *beside), start)


def ring_blocks(q, k):
    """How queries are taken: [batch, groups, heads of a group, blocks of queries, rows of a
    block]."""
    rows = QUERY_BLOCK if q.shape[2] > QUERY_BLOCK and q.shape[2] % QUERY_BLOCK == 0 else q.shape[2]
    return (
        max(q.shape[0], k.shape[0]),
        k.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2] // rows,
        rows,
    )


def ring_rows(x, at, rows):
    """A block of queries of q or of the mask."""
    return x if x.shape[-2] == 1 else lax.dynamic_slice_in_dim(x, at * rows, rows, x.ndim - 2)


def ring_mask(mask, at, rows, piece, width):
    """The mask of a block of queries and a piece of keys, None without one."""
    if mask is None:
        return None
    return ring_rows(
        (
            mask
            if mask.shape[-1] == 1
            else lax.dynamic_slice_in_dim(mask, piece * width, width, mask.ndim - 1)
        ),
        at,
        rows,
    )


def ring_piece(step, axes):
    """The piece of keys that is here at a step."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


# Many parameters: the operands and attributes of attention, and the axes of the ring.
def ring_forward(q, k, v, mask, start, scale, causal, window, guard, axes):
    """The result [B, H, S, E], and logarithms of the sums of exponentials of its rows of scores
    [blocks, B, G, R, rows]."""
    n, (batch, groups, heads, blocks, rows) = lax.axis_size(axes), ring_blocks(q, k)

    def step(carry, i):
        """Meet the piece that is here while it travels on."""
        state, k, v = carry
        following = pass_on((k, v), axes)
        return (
            ring_meet(state, q, k, v, mask, start, ring_piece(i, axes), scale, causal, window),
            *following,
        ), None

    empty = jnp.zeros((blocks, batch, groups, heads, rows), jnp.float32)
    state = (
        jnp.zeros((*empty.shape, v.shape[-1]), jnp.float32),
        jnp.full_like(empty, -jnp.inf),
        empty,
    )
    state = tuple(spread(x, q, k, v) for x in state)
    (state, k, v), _ = lax.scan(step, (state, k, v), jnp.arange(n - 1))
    total, top, norm = ring_meet(
        state, q, k, v, mask, start, ring_piece(n - 1, axes), scale, causal, window
    )
    level = top + jnp.log(norm)
    if guard:
        dead = norm == 0
        out, level = (
            jnp.where(dead[..., None], 0, total / jnp.where(dead, 1, norm)[..., None]),
            jnp.where(dead, 0, level),
        )
    else:
        out = total / norm[..., None]
    return jnp.moveaxis(out, 0, 3).reshape(batch, *q.shape[1:3], v.shape[-1]).astype(v.dtype), level


# Many parameters: the operands and attributes of attention, and where the ring stands.
def ring_meet(state, q, k, v, mask, start, piece, scale, causal, window):
    """(weighted sum of values [.., E], largest score, sum of exponentials) of every row, each
    [blocks, B, G, R, rows], after one more piece of keys."""
    blocks, rows, width = len(state[1]), state[1].shape[-1], k.shape[2]

    def block(at, state):
        """The same of one block of queries."""
        total, top, norm = state
        s = attention_scores(
            ring_rows(q, at, rows),
            k,
            ring_mask(mask, at, rows, piece, width),
            scale,
            causal,
            start + at * rows,
            piece * width,
            window,
        )
        higher = jnp.maximum(top, jnp.max(s, -1))
        level = jnp.where(higher == -jnp.inf, 0, higher)  # nothing seen yet
        fade, p = jnp.exp(top - level), jnp.exp(s - level[..., None])
        added = jnp.einsum(
            "bgrst,bgte->bgrse",
            *same_batch(p.astype(v.dtype), v),
            preferred_element_type=jnp.float32,
        )
        return total * fade[..., None] + added, higher, norm * fade + jnp.sum(p, -1)

    if blocks == 1:
        return jax.tree.map(lambda x: x[None], block(0, jax.tree.map(lambda x: x[0], state)))
    return lax.map(lambda a: block(*a), (jnp.arange(blocks), state))


# Many parameters: the operands and attributes of attention, and the axes of the ring.
def ring_backward(operands, out, level, g, scale, causal, window, axes):
    """Gradients of q, k, v and the mask (None where it has none), and None for `start`."""
    q, k, v, mask, start = operands
    n, (_, _, _, blocks, rows) = lax.axis_size(axes), ring_blocks(q, k)
    inner = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)

    def meet(k, v, i):
        """Gradients that the piece here at a step gives."""
        here = ring_piece(i, axes)
        return ring_pull(q, k, v, mask, start, here, level, g, inner, scale, causal, window)

    def step(carry, i):
        """Meet the piece that is here; it travels on, and its gradients with it."""
        k, v, dk, dv, dq = carry
        following = pass_on((k, v), axes)
        (k_part, v_part), (q_part, *mask_part) = meet(k, v, i)
        return (*following, *pass_on((dk + k_part, dv + v_part), axes), dq + q_part), mask_part

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)] + [
        jnp.zeros((blocks, *q.shape[:2], rows, q.shape[3]), jnp.float32)
    ]
    (k, v, dk, dv, dq), before = lax.scan(
        step, (k, v, *(spread(x, q, k, v) for x in zeros)), jnp.arange(n - 1)
    )
    (k_part, v_part), (q_part, *last) = meet(k, v, n - 1)
    dk, dv = pass_on((dk + k_part, dv + v_part), axes)
    dq = jnp.moveaxis(dq + q_part, 0, 2).reshape(q.shape)
    dmask = (
        ring_mask_gradient(jnp.concatenate([before[0], last[0][None]]), mask, axes)
        if last
        else None
    )
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dmask, None


# Many parameters: the operands and attributes of attention, and where the ring stands.
def ring_pull(q, k, v, mask, start, piece, level, g, inner, scale, causal, window):
    """Gradients that one piece of keys gives: of k and v summed over the blocks, of queries (and a
    mask of floats) by block."""
    *grouped, blocks, rows = ring_blocks(q, k)
    width = k.shape[2]

    def parted(x):
        """[B, H, S, ..] as [blocks, B, G, R, rows, ..]."""
        return jnp.moveaxis(x.reshape(*grouped, blocks, rows, *x.shape[3:]), 3, 0)

    def block(total, x):
        """The same of one block of queries, those of k and v added to `total`."""
        at, level, g, inner = x
        own = ring_mask(mask, at, rows, piece, width)

        def weigh(q, k, v, *own_mask):
            """Values weighed by exponentials of scores, and the sums of these."""
            s = attention_scores(
                q,
                k,
                own_mask[0] if own_mask else own,
                scale,
                causal,
                start + at * rows,
                piece * width,
                window,
            )
            p = jnp.exp(s - level[..., None])
            return jnp.einsum("bgrst,bgte->bgrse", *same_batch(p.astype(v.dtype), v)), jnp.sum(
                p, -1
            )

        with_gradient = () if own is None or own.dtype == bool else (own,)
        _, pull = jax.vjp(weigh, ring_rows(q, at, rows), k, v, *with_gradient)
        dq, dk, dv, *dmask = pull((g, -inner))
        return (total[0] + dk.astype(jnp.float32), total[1] + dv.astype(jnp.float32)), (
            dq.astype(jnp.float32),
            *dmask,
        )

    zero = tuple(spread(jnp.zeros(x.shape, jnp.float32), q, k, v) for x in (k, v))
    operands = (jnp.arange(blocks), level, parted(g), parted(inner))
    if blocks == 1:
        total, own = block(zero, jax.tree.map(lambda x: x[0], operands))
        return total, jax.tree.map(lambda x: x[None], own)
    return lax.scan(block, zero, operands)


def ring_mask_gradient(parts, mask, axes):
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
