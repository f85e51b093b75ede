"""Attention over keys that stay cut: pieces of keys and values travel around a ring of devices, one neighbour a step.

Softmax is taken as pieces pass by (running maximum and sum in float32: Milakov & Gimelshein 2018; around a ring: Liu, Zaharia & Abbeel 2023). The backward
pass goes around once more, with the gradients of keys and values travelling beside them in float32 until they are home.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.parts.exchange import pass_on
from planner.emit.parts.kernels import QUERY_BLOCK, attention_scores, same_batch


def spread(x, *beside):
    """x with the mesh type of a result made of all of them."""
    axes = frozenset().union(*(jax.typeof(b).manual_axis_type.varying for b in beside))
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def ring_attention(q, k, v, mask, scale, causal, guard, start, axes):
    """`attention` of local queries q [B, H, S, D] with all keys, of which this device holds its piece k [B, G, T, D], v [B, G, T, E].

    mask: [.., S, all keys]. Query 0 here is query `start` of the sequence. Kept for the backward pass beside the operands: the result, and a float32
    a row of scores. Every device meets every piece, masked by `causal` or not.
    """
    n, width = lax.axis_size(axes), k.shape[2]
    rows = QUERY_BLOCK if q.shape[2] > QUERY_BLOCK and q.shape[2] % QUERY_BLOCK == 0 else q.shape[2]
    blocks, batch = q.shape[2] // rows, max(q.shape[0], k.shape[0])
    grouped = (batch, k.shape[1], q.shape[1] // k.shape[1], blocks, rows)

    def piece_of(step):
        return (lax.axis_index(axes) - step) % n

    def rows_of(x, at):  # a block of queries of q, the mask or a result
        return x if x.shape[-2] == 1 else lax.dynamic_slice_in_dim(x, at * rows, rows, x.ndim - 2)

    def mask_of(mask, at, piece):
        if mask is None:
            return None
        return rows_of(mask if mask.shape[-1] == 1 else lax.dynamic_slice_in_dim(mask, piece * width, width, mask.ndim - 1), at)

    def scores(q, k, mask, at, start, piece):
        return attention_scores(q, k, mask, scale, causal, start + at * rows, piece * width)

    def blockwise(function, operands):
        """function(at, operands of the block) for every block of queries, their dim 0."""
        if blocks == 1:
            return jax.tree.map(lambda x: x[None], function(0, jax.tree.map(lambda x: x[0], operands)))
        return lax.map(lambda a: function(*a), (jnp.arange(blocks), operands))

    def joined(x):  # [blocks, B, G, R, rows, ..] -> [B, H, S, ..]
        return jnp.moveaxis(x, 0, 3).reshape(batch, q.shape[1], q.shape[2], *x.shape[5:])

    def parted(x):  # the way back
        return jnp.moveaxis(x.reshape(*grouped, *x.shape[3:]), 3, 0)

    def forward(q, k, v, mask, start):
        def meet(state, k, v, piece):
            def block(at, state):
                total, top, norm = state
                s = scores(rows_of(q, at), k, mask_of(mask, at, piece), at, start, piece)
                higher = jnp.maximum(top, jnp.max(s, -1))
                level = jnp.where(higher == -jnp.inf, 0, higher)  # nothing seen yet
                fade, p = jnp.exp(top - level), jnp.exp(s - level[..., None])
                added = jnp.einsum("bgrst,bgte->bgrse", *same_batch(p.astype(v.dtype), v), preferred_element_type=jnp.float32)
                return total * fade[..., None] + added, higher, norm * fade + jnp.sum(p, -1)

            return blockwise(block, state)

        def step(carry, i):
            state, k, v = carry
            following = pass_on((k, v), axes)
            return (meet(state, k, v, piece_of(i)), *following), None

        empty = jnp.zeros((blocks, *grouped[:3], rows), jnp.float32)
        state = (jnp.zeros((*empty.shape, v.shape[-1]), jnp.float32), jnp.full_like(empty, -jnp.inf), empty)
        state = tuple(spread(x, q, k, v) for x in state)
        (state, k, v), _ = lax.scan(step, (state, k, v), jnp.arange(n - 1))
        total, top, norm = meet(state, k, v, piece_of(n - 1))
        dead = norm == 0 if guard else jnp.zeros_like(norm, bool)
        out = jnp.where(dead[..., None], 0, total / jnp.where(dead, 1, norm)[..., None])
        return joined(out).astype(v.dtype), jnp.where(dead, 0, top + jnp.log(norm))

    @jax.custom_vjp
    def run(*operands):
        return forward(*operands)[0]

    def keep(*operands):
        out, level = forward(*operands)
        return out, (operands, out, level)

    def backward(kept, g):
        (q, k, v, mask, start), out, level = kept
        inner = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
        float_mask = mask is not None and mask.dtype != bool

        def meet(k, v, piece):
            """Gradients that one piece of keys gives: of queries (and mask) by block, of k and v summed over the blocks."""

            def block(total, x):
                at, level, g, inner = x
                own = mask_of(mask, at, piece)

                def weigh(q, k, v, own):
                    p = jnp.exp(scores(q, k, own, at, start, piece) - level[..., None])
                    return jnp.einsum("bgrst,bgte->bgrse", *same_batch(p.astype(v.dtype), v)), jnp.sum(p, -1)

                if float_mask:
                    _, pull = jax.vjp(weigh, rows_of(q, at), k, v, own)
                else:
                    _, pull = jax.vjp(lambda q, k, v: weigh(q, k, v, own), rows_of(q, at), k, v)
                dq, dk, dv, *dmask = pull((g, -inner))
                return (total[0] + dk.astype(jnp.float32), total[1] + dv.astype(jnp.float32)), (dq.astype(jnp.float32), *dmask)

            zero = tuple(spread(jnp.zeros(x.shape, jnp.float32), q, k, v) for x in (k, v))
            operands = (jnp.arange(blocks), level, parted(g), parted(inner))
            if blocks == 1:
                total, own = block(zero, jax.tree.map(lambda x: x[0], operands))
                return total, jax.tree.map(lambda x: x[None], own)
            return lax.scan(block, zero, operands)

        def step(carry, i):
            k, v, dk, dv, dq = carry
            following = pass_on((k, v), axes)
            (k_part, v_part), (q_part, *mask_part) = meet(k, v, piece_of(i))
            return (*following, *pass_on((dk + k_part, dv + v_part), axes), dq + q_part), mask_part

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)] + [jnp.zeros((blocks, *q.shape[:2], rows, q.shape[3]), jnp.float32)]
        (k, v, dk, dv, dq), before = lax.scan(step, (k, v, *(spread(x, q, k, v) for x in zeros)), jnp.arange(n - 1))
        (k_part, v_part), (q_part, *last) = meet(k, v, piece_of(n - 1))
        dk, dv = pass_on((dk + k_part, dv + v_part), axes)
        dq = jnp.moveaxis(dq + q_part, 0, 2).reshape(q.shape)
        dmask = None
        if float_mask:
            dmask = whole_mask(jnp.concatenate([before[0], last[0][None]]), mask)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dmask, None

    def whole_mask(parts, mask):
        """A mask's gradient from its parts [step, block, ..]: by position over the keys, the blocks of queries after each other."""
        if mask.shape[-1] == 1:
            parts = jnp.sum(parts, 0, keepdims=True)
        else:
            parts = jnp.roll(parts[::-1], lax.axis_index(axes) + 1, 0)  # step i met the piece i before its own
        parts = jnp.sum(parts, 1, keepdims=True) if mask.shape[-2] == 1 else parts  # [piece, block, .., rows, width]
        parts = jnp.moveaxis(parts, (0, 1), (-2, -4))  # [.., block, rows, piece, width]
        return parts.reshape(mask.shape).astype(mask.dtype)

    run.defvjp(keep, backward)
    beside = [x for x in (q, k, v, mask) if x is not None]
    q, k, v = (spread(x, *beside) for x in (q, k, v))
    return run(q, k, v, mask if mask is None else spread(mask, *beside), start)
