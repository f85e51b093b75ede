"""Operators as functions of local pieces; `start` is the global index of the first local
element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.emit.runtime.collectives.exchange import lean, recompute


def truncated_div(a, b):
    """Integer division rounding towards zero, as ONNX and C."""
    return lax.div(*jnp.broadcast_arrays(a, b))


def layer_norm(x, scale, bias, axes, epsilon):
    """Layer normalisation over `axes`, statistics in float32; kept for the backward pass are its
    operands."""

    def norm(x, scale, bias):
        h = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(h, axes, keepdims=True)
        variance = jnp.mean(jnp.square(h - mean), axes, keepdims=True)
        y = ((h - mean) * lax.rsqrt(variance + epsilon)).astype(x.dtype) * scale
        return y if bias is None else y + bias

    return lean(norm)(x, scale, bias)


def rms_norm(x, scale, axes, epsilon):
    """Root-mean-square normalisation over `axes`, statistics in float32; kept for the backward pass
    are its operands."""

    def norm(x, scale):
        h = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (h * lax.rsqrt(jnp.mean(jnp.square(h), axes, keepdims=True) + epsilon)).astype(
            x.dtype
        ) * scale

    return lean(norm)(x, scale)


def gelu(x):
    """0.5 x (1 + erf(x / sqrt 2)); what is kept for the backward pass is x. To compilers erf is one
    instruction; the erfc of jax.nn.gelu is two branches, which they do not fuse. In the type of x:
    written in float32, x itself would be kept in float32 for the layers of a loop."""

    def curve(x):
        return 0.5 * x * (1 + lax.erf(x * 0.5**0.5))

    return lean(curve)(x)


def cumsum(x, axis, exclusive, reverse):
    """Running sum along `axis`; exclusive leaves the element itself out; reverse runs from the
    end."""
    y = lax.cumsum(x, axis, reverse=reverse)
    return y - x if exclusive else y


def top_k(x, k, axis, largest):
    """The k extreme values along `axis`, sorted, and their indices."""
    moved = jnp.moveaxis(x, axis, -1)
    turned = (
        (lambda v: v)
        if largest
        else jnp.negative
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.invert
    )
    values, indices = lax.top_k(turned(moved), k)
    return jnp.moveaxis(turned(values), -1, axis), jnp.moveaxis(indices, -1, axis)


FEW_ROWS, OFTEN = 64, 64
"""A table of at most so many rows, each taken so often on average, is looked up in sums."""


def take(table, indices, axis):
    """Rows of `table` along `axis`; negative indices count from the end.

    Of a table of few rows each result is a sum over all rows of which one counts, so that the
    gradient of a row is one sum in float32. Scattered into few rows, gradients wait for one another
    (T5's biases of positions, on an H100: 976 of 1,052 ms a step).
    """
    size = table.shape[axis]
    row = jnp.where(indices < 0, indices + size, indices)
    few = size <= FEW_ROWS and row.size >= OFTEN * size
    if not few or not jnp.issubdtype(table.dtype, jnp.floating):
        return jnp.take(table, row, axis=axis, mode="clip")
    wide = jnp.promote_types(table.dtype, jnp.float32)
    rows = jnp.moveaxis(table, axis, 0).astype(wide)
    hit = jnp.clip(row, 0, size - 1)[..., None] == jnp.arange(size)
    hit = hit.reshape(*hit.shape, *(1,) * (table.ndim - 1))
    out = jnp.where(hit, rows, 0).sum(row.ndim).astype(table.dtype)
    return jnp.moveaxis(out, range(row.ndim), range(axis, axis + row.ndim))


def take_shard(table, indices, axis, start, size):
    """Rows of a table of `size` rows of which this device holds those from `start`; zeros for rows
    held elsewhere, so that a sum over devices is the lookup."""
    row = jnp.where(indices < 0, indices + size, indices)
    local = row - start
    here = (local >= 0) & (local < table.shape[axis]) & (row < size)
    rows = jnp.take(table, jnp.where(here, local, 0), axis=axis, mode="clip")
    wide = (1,) * axis + here.shape + (1,) * (table.ndim - axis - 1)
    return jnp.where(here.reshape(wide), rows, 0)


def gather_nd(data, indices, batch_dims):
    """Slices of `data` at index tuples (the last dim of `indices`), the first `batch_dims` dims
    shared."""

    def look(d, i):
        sizes = jnp.array(d.shape[: i.shape[-1]], i.dtype)
        i = jnp.where(i < 0, i + sizes, i)
        return d[tuple(jnp.moveaxis(i, -1, 0))]

    for _ in range(batch_dims):
        look = jax.vmap(look)
    return look(data, indices)


def gather_elements(data, indices, axis):
    """Elements of `data` picked along `axis`, other positions as those of `indices`."""
    indices = jnp.where(indices < 0, indices + data.shape[axis], indices)
    within = data[
        tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(indices.shape))
    ]
    return jnp.take_along_axis(within, indices, axis, mode="clip")


def scatter_elements(data, indices, updates, axis, reduction):
    """`data` with `updates` written (or reduced) at `indices` along `axis`."""
    indices = jnp.where(indices < 0, indices + data.shape[axis], indices)
    where = list(jnp.meshgrid(*(jnp.arange(n) for n in indices.shape), indexing="ij"))
    where[axis] = indices
    return written_at(data.at[tuple(where)], updates, reduction)


def written_at(target, updates, reduction):
    """An array with `updates` written (or reduced) where `target`, its `.at[...]`, points."""
    return {
        "none": target.set,
        "add": target.add,
        "mul": target.multiply,
        "max": target.max,
        "min": target.min,
    }[reduction](updates)


QUERY_BLOCK = 1024
CAUSAL_PARTS = 8


# Many parameters: the operands and attributes of attention.
def attention(q, k, v, mask, scale, causal, guard, start, window=0, cap=0.0):
    """attention_rows, a block of queries at a time where the sequence is long: no buffer of queries
    x keys lives beyond one block, and the backward pass makes scores again instead of keeping
    them. Blocks meet the keys that `query_parts` says."""
    rows, keys = q.shape[2], k.shape[2]
    mask = (segments_of(mask, start, rows), mask) if is_of_segments(mask) else mask
    size = QUERY_BLOCK if rows > QUERY_BLOCK and rows % QUERY_BLOCK == 0 else rows
    whole = isinstance(start, int)
    parts = query_parts(rows // size, size, keys, causal, window, whole)
    pieces = lax.split(q, [blocks * size for blocks, _ in parts], 2) if len(parts) > 1 else [q]

    def part(q, first, blocks, width):
        """The result of consecutive blocks of queries from row `first` on. Their keys begin with
        the first one, or move with the blocks and end with a block's own last."""
        moving = width < keys and not (whole and width >= first + blocks * size)

        def near(low, k, v, mask):
            """The keys from `low` on, their values and what masks them."""
            cut = mask if mask is None else of_keys(mask, low, width)
            return part_of(k, low, width, 2), part_of(v, low, width, 2), cut

        def block(q, k, v, mask, offset, start):
            """The result of the block of queries that begins `offset` rows further."""
            low = jnp.clip(start + first + offset + size - width, 0, keys - width) if moving else 0
            own, (k, v, mask) = part_of(q, offset, size, 2), near(low, k, v, mask)
            if mask is not None:
                mask = of_queries(mask, first + offset, size)
            begin = start + first + offset
            return attention_rows(own, k, v, mask, scale, causal, guard, begin, low, window, cap)

        met = (k, v, mask) if moving else near(0, k, v, mask)
        if blocks == 1:
            return recompute(block)(q, *met, 0, start)
        out = lax.map(lambda offset: lean(block)(q, *met, offset, start), jnp.arange(blocks) * size)
        out = jnp.moveaxis(out, 0, 2)
        return out.reshape(*out.shape[:2], blocks * size, out.shape[-1])

    done, first = [], 0
    for piece, (blocks, width) in zip(pieces, parts, strict=True):
        done.append(part(piece, first, blocks, width))
        first += blocks * size
    return jnp.concatenate(done, 2) if len(done) > 1 else done[0]


def part_of(x, start, size, dim):
    """`size` elements of x from `start` on along a dim, of which masks may have only one."""
    if x.shape[dim] in (1, size):
        return x
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def is_of_segments(mask):
    """Whether a mask is of segments: whole numbers [B, 1, 1, T], of which queries see the keys of
    their own."""
    return mask is not None and jnp.issubdtype(mask.dtype, jnp.integer)


def segments_of(segments, start, rows):
    """The segments [B, 1, S, 1] of so many queries from `start` on, of all keys' [B, 1, 1, T]."""
    return jnp.swapaxes(part_of(segments, start, rows, 3), 2, 3)


def same_segment(segments, start, rows):
    """Whether queries see keys, [B, 1, S, T]: so many queries from `start` on."""
    return segments_of(segments, start, rows) == segments


def of_keys(mask, low, width):
    """The part of a mask, or of a pair of queries' and keys' segments, of so many keys."""
    if isinstance(mask, tuple):
        return mask[0], part_of(mask[1], low, width, 3)
    return part_of(mask, low, width, mask.ndim - 1)


def of_queries(mask, start, size):
    """The part of a mask, or of a pair of queries' and keys' segments, of so many queries."""
    if isinstance(mask, tuple):
        return part_of(mask[0], start, size, 2), mask[1]
    return part_of(mask, start, size, mask.ndim - 2)


def query_parts(blocks, size, keys, causal, window, whole):
    """How blocks of `size` queries meet keys: [(how many consecutive blocks, how many keys each)].

    Under a causal mask keys after a block are left out, and in a window those before it. Blocks
    that reach back to the first key come in at most CAUSAL_PARTS parts of as many keys as the last
    block of each sees; those behind them have as many keys as a block's window. whole: the first
    query here is the first of the sequence; where only the running program knows which it is,
    nothing but a window leaves keys out.
    """
    if not causal:
        return [(blocks, keys)]
    width = min(keys, size + -(-(window - 1) // 128) * 128) if window else keys
    growing = min(blocks, width // size) if whole else 0
    many = max(1, -(-growing // CAUSAL_PARTS))
    ends = [min(first + many, growing) for first in range(0, growing, many)]
    parts = [(end - first, end * size) for first, end in zip([0, *ends], ends, strict=False)]
    return parts + ([(blocks - growing, width)] if growing < blocks else [])


# Many parameters: the operands and attributes of attention, and where its rows and keys begin.
def attention_rows(q, k, v, mask, scale, causal, guard, start, first=0, window=0, cap=0.0):
    """Scaled dot-product attention, q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], G dividing H;
    query 0 here is query `start` of the sequence, key 0 here key `first`.

    mask: True = attend, or float terms added to the scores, or a pair of queries' and keys'
    segments. Rows masked everywhere give zeros when
    `guard`. window: under a causal mask query i sees so many keys up to i; 0 for all. cap: what
    scores stay below by a hyperbolic tangent before they are masked; 0 for none.
    """
    scores = attention_scores(q, k, mask, scale, causal, start, first, window, cap)
    if guard:
        dead = jnp.max(scores, -1, keepdims=True) == -jnp.inf
        weights = jnp.where(dead, 0, jax.nn.softmax(jnp.where(dead, 0, scores), -1))
    else:
        weights = jax.nn.softmax(scores, -1)
    out = jnp.einsum("bgrst,bgte->bgrse", *same_batch(weights.astype(v.dtype), v))
    return out.reshape(out.shape[0], q.shape[1], *out.shape[3:])


# Many parameters: the operands and attributes of attention, and the axes of the cache.
def cached_attention(q, k, v, past_k, past_v, mask, scale, axes, cap=0.0):
    """Attention of new tokens, q [B, H, S, D], k [B, G, S, D], v [B, G, S, E], to a cache [B, G, T,
    ..] and, causally, to each other: the cache is read where it lies. mask: of the cache's keys.
    axes: mesh axes over which the cache is cut along T; shares of the sums are then put together in
    float32. A cache in eight bits is read as such, and multiplied in the type of the new keys.
    """
    past_k, past_v = past_k.astype(k.dtype), past_v.astype(v.dtype)
    old, new = (
        attention_scores(q, past_k, mask, scale, False, 0, 0, 0, cap),
        attention_scores(q, k, None, scale, True, 0, 0, 0, cap),
    )
    out = of_old_and_new(old, new, past_v, v, axes)
    return out.reshape(out.shape[0], q.shape[1], *out.shape[3:]).astype(v.dtype)


def of_old_and_new(old, new, past_v, v, axes):
    """Values [B, G, R, S, E] in float32 that scores [B, G, R, S, T] choose among those of a cache,
    past_v [B, G, T, E], and of new tokens. axes: mesh axes over which the cache is cut along T."""
    top = lax.stop_gradient(
        jnp.maximum(jnp.max(old, -1, keepdims=True), jnp.max(new, -1, keepdims=True))
    )
    top = lax.pmax(top, axes) if axes else top
    old, new = (
        jnp.exp(old - top),
        jnp.exp(new - top) * (lax.axis_index(axes) == 0 if axes else 1),
    )  # the new tokens count once
    total, out = (
        jnp.sum(old, -1, keepdims=True) + jnp.sum(new, -1, keepdims=True),
        weighted_values(old, past_v) + weighted_values(new, v),
    )
    return lax.psum(out, axes) / lax.psum(total, axes) if axes else out / total


def weighted_values(weights, v):
    """Sums [B, G, R, S, E] in float32 of values [B, G, T, E] by weights [B, G, R, S, T]."""
    return jnp.einsum(
        "bgrst,bgte->bgrse",
        *same_batch(weights.astype(v.dtype), v),
        preferred_element_type=jnp.float32,
    )


# Many parameters: the operands and attributes of attention, and where its rows and keys begin.
def attention_scores(q, k, mask, scale, causal, start, first, window=0, cap=0.0):
    """Masked scores [B, G, H / G, S, T] in float32; key 0 here is key `first` of the sequence. A
    mask is of these queries and keys."""
    if causal or mask is not None:
        # A mask depends on nothing that a loop carries: jax would make those of all blocks and
        # heads before the loops over blocks and layers, and keep them.
        q, mask, start, first = lax.optimization_barrier((q, mask, start, first))
    group = q.shape[1] // k.shape[1]
    grouped = q.reshape(q.shape[0], k.shape[1], group, *q.shape[2:])
    scores = query_key_products(grouped, k) * scale
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    if isinstance(mask, tuple):
        mask = mask[0] == mask[1]
    if mask is not None:
        mask = jnp.broadcast_to(
            mask,
            (
                mask.shape[0] if mask.ndim == 4 else 1,
                q.shape[1] if mask.ndim > 2 and mask.shape[-3] > 1 else 1,
                *mask.shape[-2:],
            ),
        )
        mask = mask.reshape(
            mask.shape[0], *((k.shape[1], group) if mask.shape[1] > 1 else (1, 1)), *mask.shape[2:]
        )
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    if causal:
        ahead = (first + jnp.arange(k.shape[2])[None, :]) - (
            start + jnp.arange(q.shape[2])[:, None]
        )
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
        scores = jnp.where(hidden, -jnp.inf, scores)
    return scores


def query_key_products(q, k):
    """Products of queries [B, G, R, S, D] and keys [B, G, T, D] in float32. Their gradient is
    rounded to the operands' type, so that the products of the backward pass are of the same type as
    these: a float32 operand would take both out of the matrix units' fast path.
    """

    def products(q, k, dtype=None):
        return jnp.einsum("bgrsd,bgtd->bgrst", *same_batch(q, k), preferred_element_type=dtype)

    run = jax.custom_vjp(lambda q, k: products(q, k, jnp.float32))
    run.defvjp(
        lambda q, k: (run(q, k), (q, k)),
        lambda kept, g: jax.vjp(products, *kept)[1](g.astype(jnp.result_type(*kept))),
    )
    return run(q, k)


def same_batch(a, b):
    """Both operands with the larger batch of the two (dim 0)."""
    n = max(a.shape[0], b.shape[0])
    return jnp.broadcast_to(a, (n, *a.shape[1:])), jnp.broadcast_to(b, (n, *b.shape[1:]))


def rotary(x, cos, sin):
    """Rotary embedding of x [..., D], halves of D rotated into each other; cos and sin broadcast to
    x."""
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


LOSS_ROWS, LOSS_VALUES = 512, 2**26


# Long: the forward and the backward pass of one function share what it computes first.
# Many parameters: the operator's operands and attributes, and how its classes are cut.
def cross_entropy(logits, labels, axis, vocab_axes, start, valid, mask, count, blocked):
    """Sum over local rows of -log softmax(logits)[label], divided by the global `count` of rows.

    With `vocab_axes` the classes are cut: this device holds those from `start`. `valid`: how many
    classes there are, and how many of them a piece holds, where logits of padding stand behind
    them. `mask`: real rows. `blocked`: a block of rows at a
    time, where rows are not cut any further. Float32 in passing: kept for the backward pass are the
    logits as they are, whose place their gradient takes, and one number a row.
    """
    shape, wide = labels.shape, jnp.promote_types(logits.dtype, jnp.float32)
    classes_here = logits.shape[axis]
    size = labels.size // row_blocks(labels.size, classes_here) if blocked else labels.size

    def piece(x, first):
        return lax.dynamic_slice_in_dim(x, first, size, 0) if size < x.shape[0] else x

    def classes(x, start):
        if valid is None:
            return x.astype(wide)
        real = jnp.minimum(valid[0] - start, valid[1])
        return jnp.where(jnp.arange(x.shape[-1]) < real, x.astype(wide), -jnp.inf)

    def picks(labels, first, start):
        local = piece(labels, first) - start
        return local if valid is None else jnp.where(local < valid[1], local, -1)

    def rows(x, labels, start, mask):
        def block(first):
            h, local = classes(piece(x, first), start), picks(labels, first, start)
            top = jnp.max(h, -1)
            here = (local >= 0) & (local < h.shape[-1])
            picked = jnp.take_along_axis(h, jnp.where(here, local, 0)[:, None], -1)[:, 0]
            return (
                top,
                jnp.sum(jnp.exp(h - jnp.where(top == -jnp.inf, 0, top)[:, None]), -1),
                jnp.where(here, picked, 0),
            )

        firsts = jnp.arange(labels.size // size) * size
        top, total, picked = (
            y.reshape(-1) for y in (lax.map(block, firsts) if len(firsts) > 1 else block(0))
        )
        if vocab_axes:
            own_top, top = top, checkpoint_name(lax.pmax(top, vocab_axes), "collective")
            total, picked = checkpoint_name(
                lax.psum(jnp.stack([total * jnp.exp(own_top - top), picked]), vocab_axes),
                "collective",
            )
        norm = jnp.log(total) + top
        loss = norm - picked
        return jnp.sum(loss if mask is None else jnp.where(mask, loss, 0)) / count, norm

    @jax.custom_vjp
    def loss(*operands):
        return rows(*operands)[0]

    def forward(*operands):
        mean, norm = rows(*operands)
        return mean, (*operands, norm)

    def backward(kept, g):
        x, labels, start, mask, norm = kept

        def block(first, x):
            h, hit = (
                classes(piece(x, first), start),
                jnp.arange(x.shape[-1]) == picks(labels, first, start)[:, None],
            )
            d = (jnp.exp(h - piece(norm, first)[:, None]) - hit) * (g / count)
            d = (d if mask is None else jnp.where(piece(mask, first)[:, None], d, 0)).astype(
                x.dtype
            )
            return lax.dynamic_update_slice_in_dim(x, d, first, 0) if size < x.shape[0] else d

        blocks = labels.size // size
        return (
            (
                lax.fori_loop(0, blocks, lambda i, x: block(i * size, x), x)
                if blocks > 1
                else block(0, x)
            ),
            None,
            None,
            None,
        )

    loss.defvjp(forward, backward)
    mask = mask if mask is None else jnp.broadcast_to(mask, shape).reshape(-1)
    x = jnp.moveaxis(logits, axis, -1)
    return loss(x.reshape(-1, x.shape[-1]), labels.reshape(-1), start, mask)


def row_blocks(rows, classes):
    """The least number of equal blocks of at most LOSS_ROWS rows, or, where that is more, of an
    eighth of the rows and of LOSS_VALUES values; one where there is none within reason. A turn of
    the loop over blocks launches a dozen kernels that do next to nothing."""
    least = -(-rows // max(LOSS_ROWS, min(rows // 8, LOSS_VALUES // classes)))
    return next((n for n in range(least, 8 * least) if rows % n == 0), 1)


def mean_of_samples(values, size, mask, count):
    """Sum over the `size` local samples of a loss with the batch first (mean over the rest),
    divided by their global `count`. `mask`: real samples."""
    values = jnp.asarray(values)
    if values.shape[:1] != (size,):
        raise ValueError(
            f"the loss function returns {values.shape} for {size} samples: one value a sample is"
            " expected"
        )
    each = jnp.mean(values.astype(jnp.float32).reshape(size, -1), 1)
    return jnp.sum(each if mask is None else jnp.where(mask, each, 0)) / count
