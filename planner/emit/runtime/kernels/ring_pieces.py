"""Attention to one piece of all keys, and what such results are together.

A piece gives its result and, of each row of scores, the logarithm of the sum of exponentials, by
which results over other keys are added to it. Given the logarithm over all keys and the whole
result, the gradients that a piece gives are exact (FlashAttention-2: Dao 2023). Pieces without a
mask, and causal ones whose queries and keys are at the same positions, are the device's fused
kernel's: jax's functions for that are not public, so that where they are missing it is the blocks'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import spread
from planner.emit.runtime.kernels.fused_attention import (
    attention_kernel,
    splash_kernel,
    typed,
    untyped,
)
from planner.emit.runtime.kernels.kernels import (
    QUERY_BLOCK,
    attention_scores,
    part_of,
    query_parts,
    same_batch,
)


def joined_results(one, other):
    """(result, logarithms) over the keys of both, of two such pairs over different keys: results
    [.., S, E], logarithms of the sums of exponentials of their rows [.., S], -inf where a row sees
    no key. In float32."""
    (x, of_x), (y, of_y) = one, other
    top = jnp.maximum(of_x, of_y)
    top = jnp.where(top == -jnp.inf, 0, top)  # no key in either
    a, b = jnp.exp(of_x - top), jnp.exp(of_y - top)
    total = jnp.where(a + b == 0, 1, a + b)
    out = x * (a / total)[..., None] + y.astype(jnp.float32) * (b / total)[..., None]
    return out, top + jnp.log(a + b)


def piece_kernel(q, k, v, rows, keys):
    """Which kernel serves pieces of so many rows of q and of k and v: "cudnn", "splash" or
    "blocks"."""
    sizes = (rows, keys, keys)
    shapes = (
        jax.ShapeDtypeStruct((*x.shape[:2], n, x.shape[3]), x.dtype)
        for x, n in zip((q, k, v), sizes, strict=True)
    )
    kernel = attention_kernel(*shapes) if q.shape[3] == v.shape[3] else "blocks"
    if kernel == "cudnn":
        import jax._src.cudnn.fused_attention_stablehlo as fused

        there = hasattr(fused, "_dot_product_attention_bwd_rule")
        return kernel if there and rows % 2 == 0 and keys % 2 == 0 else "blocks"
    if kernel == "splash":
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        return kernel if hasattr(splash_attention_kernel, "_splash_attention_bwd") else "blocks"
    return kernel


def positions_dim(kernel):
    """The dim of positions in what a kernel of pieces takes and gives."""
    return 1 if kernel == "cudnn" else 2


def steps_together(kernel):
    """How many steps of a ring an iteration of its loop has. With one, XLA on GPUs copies what
    arrives to where the next iteration reads it; with two, each step sends into the place of what
    the one before has read. On TPUs sends of two steps overlap less with what is computed."""
    return 2 if kernel == "cudnn" else 1


def turned(x, kernel):
    """x [B, H, S, ..] as a kernel of pieces takes it, and what it gives as [B, H, S, ..]: to cuDNN
    heads come after positions, and to turn what loops carry would be a copy in each step."""
    return jnp.swapaxes(x, 1, 2) if kernel == "cudnn" else x


def piece_result(kernel, operands, scale, causal=False):
    """(result, logarithms in float32) of queries over a piece of keys. operands: q, k and v, each
    `turned`, as are the results [B, H, S, E] and [B, H, S]; causal: the queries are at the keys'
    positions."""
    if kernel == "cudnn":
        return cudnn_piece(operands, scale, causal)
    if kernel == "splash":
        return splash_piece(operands, scale, causal)
    return block_piece(operands, scale, causal=causal)


def piece_gradients(kernel, operands, results, scale, causal=False):
    """What a piece of keys gives to the gradients of q, k and v. results: the result and the
    logarithms over all keys, and the result's gradient, each `turned`."""
    if kernel == "cudnn":
        return cudnn_gradients(operands, results, scale, causal)
    if kernel == "splash":
        return splash_gradients(operands, results, scale, causal)
    return block_gradients(operands, results, scale, causal=causal)


def cudnn_piece(operands, scale, causal):
    """`piece_result` by cuDNN. jax.nn.dot_product_attention rounds the logarithms to the result's
    type, so that what it calls is called."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    q, k, v = operands
    out, total = fused.dot_product_attention(
        q, k, v, scale=scale, mask_type=mask, return_residual=True
    )
    return out, jnp.swapaxes(total, 1, 2)


def cudnn_gradients(operands, results, scale, causal):
    """`piece_gradients` by cuDNN."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    out, total, g = results
    absent = [jnp.zeros(0, g.dtype)] * 7  # bias, lengths, offsets, pages
    kept = *operands, *absent, jnp.swapaxes(total, 1, 2), out
    mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
    attributes = scale, 42, 0.0, (False, False), mask, fused.AttentionLayout.BTNH.value, None
    return fused._dot_product_attention_bwd_rule(*attributes, True, False, kept, g)[:3]


def splash_piece(operands, scale, causal, interpret=False):
    """`piece_result` by Splash, traced without types as in `splash_attention`. interpret: in plain
    operations, for devices that are no TPUs."""
    from jax._src.config import _check_vma as check_types

    attend = ring_splash(operands, causal, interpret, True)
    q, k, v = splash_operands(operands, scale)
    with check_types(False):
        out, (total,) = jax.vmap(attend)(*(untyped(x) for x in (q, k, v)))
    return typed(out, q), typed(total, q)


def splash_gradients(operands, results, scale, causal, interpret=False):
    """`piece_gradients` by Splash."""
    from jax._src.config import _check_vma as check_types
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    attend, shape = ring_splash(operands, causal, interpret, False), operands[1].shape

    def pull(q, k, v, out, total, g):
        """The gradients of one sequence."""
        kept = q, k, v, None, None, out, total, attend.dq_mask_info, attend.dkv_mask_info
        return splash._splash_attention_bwd(**attend.kwargs, res=kept, do=g)[3:6]

    (q, k, v), (out, total, g) = splash_operands(operands, scale), results
    arguments = q, k, v, out.astype(q.dtype), total, g.astype(q.dtype)
    with check_types(False):
        gradients = jax.vmap(pull)(*(untyped(x) for x in arguments))
    dq, dk, dv = (typed(x, q) for x in gradients)
    return dq * jnp.asarray(scale, dq.dtype), dk.reshape(shape), dv.reshape(shape)


def ring_splash(operands, causal, interpret, logarithms):
    """Splash's kernel for pieces of that shape, with the logarithms of its rows or without."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    (_, heads, rows, _), (_, groups, keys, _) = (x.shape for x in operands[:2])
    make = splash.make_splash_mha if groups > 1 or heads == 1 else splash.make_splash_mqa
    return splash_kernel(make, heads, rows, keys, causal, 0, interpret, "", logarithms)


def splash_operands(operands, scale):
    """q scaled, and k and v as Splash takes them."""
    q, k, v = operands
    k, v = (k, v) if k.shape[1] > 1 or q.shape[1] == 1 else (k[:, 0], v[:, 0])
    return q * jnp.asarray(scale, q.dtype), k, v


def piece_blocks(q, k, causal):
    """(rows of a block of queries, [(how many consecutive blocks, how many keys each meets)]).
    causal: the queries are at the keys' positions, and blocks leave out keys behind them."""
    n = q.shape[2]
    rows = QUERY_BLOCK if n > QUERY_BLOCK and n % QUERY_BLOCK == 0 else n
    return rows, query_parts(n // rows, rows, k.shape[2], causal, 0, True)


def piece_mask(mask, row, rows, first, width):
    """The mask of a block of queries and a piece of keys, None without one."""
    if mask is None:
        return None
    if mask.shape[-1] != 1:
        mask = lax.dynamic_slice_in_dim(mask, first, width, mask.ndim - 1)
    return part_of(mask, row, rows, mask.ndim - 2)


def block_piece(operands, scale, mask=None, causal=False, start=None, first=0, window=0):
    """`piece_result` in float32, block of queries by block. mask: of all keys, of which key 0 here
    is key `first`. Query 0 is query `start` of the sequence, None: at the position of key 0."""
    q, k, v = operands
    rows, parts = piece_blocks(q, k, causal and start is None)
    heads, outs, totals, done = q.shape[1], [], [], 0

    for blocks, width in parts:
        near = k[:, :, :width], v[:, :, :width]

        def block(begin, near=near, width=width):
            """Result and logarithms of the queries from row `begin` on [B, G, R, rows, ..]."""
            queries, seen = part_of(q, begin, rows, 2), piece_mask(mask, begin, rows, first, width)
            row = begin if start is None else start + begin
            s = attention_scores(queries, near[0], seen, scale, causal, row, first, window)
            top = jnp.max(s, -1)
            top = jnp.where(top == -jnp.inf, 0, top)
            p = jnp.exp(s - top[..., None])
            norm = jnp.sum(p, -1)
            out = jnp.einsum(
                "bgrst,bgte->bgrse",
                *same_batch(p.astype(v.dtype), near[1]),
                preferred_element_type=jnp.float32,
            )
            return out / jnp.where(norm == 0, 1, norm)[..., None], top + jnp.log(norm)

        if blocks == 1:
            results = jax.tree.map(lambda x: x[None], block(done))
        else:
            results = lax.map(block, done + jnp.arange(blocks) * rows)
        out, total = (jnp.moveaxis(x, 0, 3) for x in results)
        outs.append(out.reshape(out.shape[0], heads, blocks * rows, out.shape[-1]))
        totals.append(total.reshape(total.shape[0], heads, blocks * rows))
        done += blocks * rows
    return jnp.concatenate(outs, 2), jnp.concatenate(totals, 2)


# Long: the gradients of one block of queries, and how those of all blocks are added up.
def block_gradients(
    operands, results, scale, mask=None, causal=False, start=None, first=0, window=0
):
    """`piece_gradients` in float32, block of queries by block, and that of a mask of floats by
    block [blocks, ..]. Operands as for `block_piece`."""
    (q, k, v), (out, total, g) = operands, results
    rows, parts = piece_blocks(q, k, causal and start is None)
    inner = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)
    total = jnp.where(total == -jnp.inf, 0, total)  # rows that see no key: their weights are 0
    groups, group_heads = k.shape[1], q.shape[1] // k.shape[1]
    dk, dv = (spread(jnp.zeros(x.shape, jnp.float32), q, k, v) for x in (k, v))
    of_queries, of_mask, done = [], [], 0

    for blocks, width in parts:
        near = k[:, :, :width], v[:, :, :width]

        def block(sums, begin, near=near, width=width):
            """Gradients of the queries from row `begin` on, those of k and v added to `sums`."""
            queries, seen = part_of(q, begin, rows, 2), piece_mask(mask, begin, rows, first, width)
            row = begin if start is None else start + begin

            def grouped(x):
                """The block's rows of x [B, H, S, ..] as [B, G, R, rows, ..]."""
                x = part_of(x, begin, rows, 2)
                return x.reshape(x.shape[0], groups, group_heads, *x.shape[2:])

            def weigh(q, k, v, *own_mask):
                """Values weighed by exponentials of scores, and the sums of these."""
                seen_here = own_mask[0] if own_mask else seen
                s = attention_scores(q, k, seen_here, scale, causal, row, first, window)
                p = jnp.exp(s - grouped(total)[..., None])
                weighed = jnp.einsum("bgrst,bgte->bgrse", *same_batch(p.astype(v.dtype), v))
                return weighed, jnp.sum(p, -1)

            floats = () if seen is None or seen.dtype == bool else (seen,)
            (weighed, _), pull = jax.vjp(weigh, queries, *near, *floats)
            cotangents = grouped(g).astype(weighed.dtype), -grouped(inner)
            dq, dk, dv, *dmask = pull(cotangents)
            added = tuple(x + d.astype(jnp.float32) for x, d in zip(sums, (dk, dv), strict=True))
            return added, (dq.astype(jnp.float32), *dmask)

        sums = dk[:, :, :width], dv[:, :, :width]
        if blocks == 1:
            sums, of_blocks = block(sums, done)
            of_blocks = jax.tree.map(lambda x: x[None], of_blocks)
        else:
            sums, of_blocks = lax.scan(block, sums, done + jnp.arange(blocks) * rows)
        dk, dv = (
            lax.dynamic_update_slice_in_dim(x, part, 0, 2)
            for x, part in zip((dk, dv), sums, strict=True)
        )
        of_queries.append(jnp.moveaxis(of_blocks[0], 0, 2).reshape(*q.shape[:2], -1, q.shape[3]))
        of_mask += of_blocks[1:]
        done += blocks * rows
    return jnp.concatenate(of_queries, 2), dk, dv, *of_mask
