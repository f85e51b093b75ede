"""Routed experts on NVIDIA GPUs and TPUs: one kernel multiplies the rows of all experts, where a
loop over blocks (`experts.py`) takes a launch for each product of each block, and on GPUs waits for
the host.

Rows lie sorted by expert in one array, each expert's from a multiple of `tile_rows()` on, with
zeros behind them, so that a tile of the kernel has the weights of one expert; an expert without
rows has a tile of zeros. Kernels are Pallas's: through Triton, bfloat16 or float16 in, sums in
float32; on TPUs those of `expert_tiles.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.kernels.expert_tiles import (
    LANES,
    most_columns,
    pallas_result,
    tile_rows,
    tpu_rows,
    tpu_weight_sums,
)
from planner.emit.runtime.kernels.float8 import in_rows8
from planner.emit.runtime.kernels.fused_attention import WITHOUT_FLASH, device_name

TILE = 128
"""Rows of a GPU's tile."""
WIDE, DEEP, SHORT = 256, 64, 64
"""Columns of a tile; elements that are summed at a time; rows that are, of a weight's gradient."""
WARPS = 8
"""Among how many Triton divides a tile."""
FLOAT8 = (
    "H100",
    "H200",
    "H20",
    "H800",
    "B200",
    "B300",
    "L4",
    "4090",
    "5090",
    "6000 Ada",
    "PRO 6000",
)
"""GPUs that multiply float8, by parts of their names."""
LOADS = {"A100": 3, "A800": 3, "A30": 3, "H100": 4, "H200": 4, "H20": 4, "H800": 4, "B200": 4}
"""How many pieces of operands Triton has under way, by parts of names of GPUs, as many as their
shared memory takes; 2 on others."""


def takes_grouped(how, x, ids, stacks):
    """Whether the kernels serve experts of these operands on the devices of the mesh. Not where
    most places were for rows of experts elsewhere: they are as many as all rows could need."""
    name, count, sizes = device_name(), stacks[1].shape[0], stacks[1].shape[1:]
    gpu = name.startswith("NVIDIA") and not any(old in name for old in WITHOUT_FLASH)
    return (
        (gpu or (name.startswith("TPU") and most_columns(max(sizes)) >= LANES))
        and x.dtype in ((jnp.bfloat16, jnp.float16) if gpu else (jnp.bfloat16,))
        and all(size % (DEEP if gpu else LANES) == 0 for size in sizes)
        and (len(stacks) == 6 or (gpu and any(new in name for new in FLOAT8)))
        and 2 * most_tiles(ids.shape[0], count) <= 3 * most_tiles(how[3] * how[4] * count, count)
    )


def most_tiles(rows, count):
    """Tiles of so many rows of `count` experts, each expert's from a tile's beginning on."""
    return -(-rows // tile_rows()) + count


def tile_places(how, ids, count):
    """Where rows of ids [R] lie, sorted by id below `count`, each id's from a multiple of the rows
    of a tile on: (source [P], place [R], first [count + 1], expert [tiles], named). source: the row
    of a place, R where there is none; place: the place of a row, P where its id is `count`; first:
    tiles before each id's; expert: the id of a tile, `count` of those that are empty; named: rows
    of a balanced router as blocks hold them, and those of them that there are, for readers of the
    compiled program."""
    rows, height = ids.shape[0], tile_rows()
    tiles = most_tiles(rows, count)
    order = jnp.argsort(ids)
    begin = jnp.searchsorted(ids[order], jnp.arange(count + 1), method="compare_all").astype(
        jnp.int32
    )
    filled = jnp.maximum(1, (begin[1:] - begin[:-1] + height - 1) // height)
    first = jnp.concatenate([0 * filled[:1], jnp.cumsum(filled)]).astype(jnp.int32)
    sorted_ids = ids[order]
    places = jnp.where(
        sorted_ids < count, (height * first - begin)[sorted_ids] + jnp.arange(rows), tiles * height
    )
    source = (0 * order[:1] + rows).repeat(tiles * height).at[places].set(order, mode="drop")
    place = (0 * order).at[order].set(places)
    tile = 0 * order[:1] + jnp.arange(tiles)
    expert = jnp.searchsorted(first[1:], tile, side="right", method="compare_all").astype(jnp.int32)
    block_rows = how[3] * how[4] * count
    return source, place, first, expert, f"{block_rows}_{min(block_rows, rows)}"


def grouped_results(how, x, ids, share, stacks, interpret=False):
    """`expert_results` of experts.py."""
    mix, into, out_of, *_ = how
    source, place, _, expert, named = tile_places(how, ids, stacks[1].shape[0])
    rows = sorted_rows(x, source, ids)
    h = mix(*first_layer(into, rows, stacks, expert, named, interpret))
    y = one_layer(h, stacks, 2, expert, out_of == "rf,hf->rh", named, interpret)
    return token_sums(y, place, share, x)


# Many parameters: as `rows_by_experts`.
def one_layer(rows, stacks, k, expert, turned, named, interpret):
    """Sorted rows times weight k of each tile's expert, with its bias; weights that are kept in
    float8 take rows in float8, and their columns' scales."""
    if len(stacks) == 6:
        y = rows_by_experts(rows, stacks[k], expert, turned, named, interpret)
        return with_bias(y, stacks[3 + k], expert)
    short, scale = in_rows8(rows)
    y = rows_by_experts(short, stacks[k], expert, turned, named, interpret)
    real, per_tile = of_tiles(stacks[6 + k], expert)
    tiles = y.reshape(-1, tile_rows(), y.shape[1]) * jnp.where(real, per_tile, 0)[:, None]
    y = (tiles.reshape(y.shape) * scale).astype(rows.dtype)
    return with_bias(y, stacks[3 + k], expert)


# Long: the gradients of one function, which share what they are made of.
def grouped_gradients(how, x, ids, share, stacks, g, dstacks, interpret=False):
    """`expert_gradients` of experts.py: the hidden activation is made again."""
    mix, into, out_of, *_ = how
    gate, up, down, *biases = stacks
    count, in_turned, out_turned = up.shape[0], into == "rh,fh->rf", out_of == "rf,hf->rh"
    source, place, first, expert, named = tile_places(how, ids, count)
    rows, rows_g = sorted_rows(x, source, ids), sorted_rows(g, source, ids)
    part = jnp.where(source < ids.shape[0], share[source % ids.shape[0]], 0)[:, None]

    def weight(a, b, turned):
        """The gradient of weights from their operand a and their result's gradient b."""
        a, b = (b, a) if turned else (a, b)
        return weight_sums(a, b, expert, first, count, named, interpret)

    h, pull = jax.vjp(mix, *first_layer(into, rows, stacks, expert, named, interpret))
    dh = rows_by_experts(rows_g, down, expert, not out_turned, named, interpret)
    worth = jnp.sum((dh * h).astype(jnp.float32), -1)
    ddown = weight((h * part).astype(h.dtype), rows_g, out_turned)
    dgate, dup = pull((dh * part).astype(h.dtype))
    drows = rows_by_experts(dup, up, expert, not in_turned, named, interpret)
    own_gate = None
    if gate is not None:
        drows += rows_by_experts(dgate, gate, expert, not in_turned, named, interpret)
        own_gate = weight(rows, dgate, in_turned)
    if biases[2] is not None:
        tile_bias = biases[2][jnp.minimum(expert, count - 1)].astype(jnp.float32)[:, None]
        worth += jnp.sum(
            rows_g.reshape(-1, tile_rows(), tile_bias.shape[-1]) * tile_bias, -1
        ).reshape(-1)
    sums = [
        None if bias is None else expert_sums(values, expert, count)
        for bias, values in zip(biases, (dgate, dup, rows_g * part), strict=True)
    ]
    dstacks = jax.tree.map(
        lambda d, w: d + w.astype(d.dtype),
        dstacks,
        (own_gate, weight(rows, dup, in_turned), ddown, *sums),
    )
    dx = token_sums(drows, place, jnp.ones_like(share), x)
    dshare = jnp.where(place < worth.shape[0], worth[jnp.minimum(place, worth.shape[0] - 1)], 0)
    return dx, dshare.astype(share.dtype), dstacks


def first_layer(form, rows, stacks, expert, named, interpret):
    """(gate's product or None, up's product) of sorted rows."""
    turned = form == "rh,fh->rf"
    return tuple(
        None if w is None else one_layer(rows, stacks, k, expert, turned, named, interpret)
        for k, w in enumerate(stacks[:2])
    )


def with_bias(y, bias, expert):
    """Sorted rows with the bias of each tile's expert; empty tiles as they are."""
    if bias is None:
        return y
    real, per_tile = of_tiles(bias, expert)
    added = jnp.where(real, per_tile, 0).astype(y.dtype)[:, None]
    return (y.reshape(-1, tile_rows(), y.shape[1]) + added).reshape(y.shape)


def of_tiles(values, expert):
    """(which tiles have an expert [tiles, 1], values [E, N] of each tile's [tiles, N])."""
    return (expert < values.shape[0])[:, None], values[jnp.minimum(expert, values.shape[0] - 1)]


def expert_sums(values, expert, count):
    """Sums of sorted rows by expert, float32 [count, N]."""
    tiles = jnp.sum(values.reshape(-1, tile_rows(), values.shape[1]).astype(jnp.float32), 1)
    return (0 * tiles[:1]).repeat(count + 1, 0).at[expert].add(tiles)[:count]


def sorted_rows(x, source, ids):
    """Rows of x [T, H] at places; any row where there is none, whose results no row reads and whose
    gradients have a share of zero. In float16 zeros: experts that were not chosen for a row may
    make an infinity of it, and zero times that is none."""
    choices = ids.shape[0] // x.shape[0]
    rows = x[jnp.minimum(source // choices, x.shape[0] - 1)]
    return jnp.where((source < ids.shape[0])[:, None], rows, 0) if x.dtype == jnp.float16 else rows


def token_sums(y, place, share, x):
    """Each token's rows of y [P, H] times their shares, summed: [T, H]. First choices of all tokens
    lie before second ones, as TPUs would lay groups of a token's rows out anew."""
    place, share = (v.reshape(x.shape[0], -1).T for v in (place, share))
    part = jnp.where(place < y.shape[0], share, 0)
    rows = y[jnp.minimum(place, y.shape[0] - 1).reshape(-1)].reshape(-1, *x.shape)
    return jnp.sum((rows * part[..., None]).astype(jnp.float32), 0).astype(x.dtype)


# Many parameters: the operands of a product, how the weights lie, and what readers count.
def rows_by_experts(x, w, expert, turned, named, interpret=False):
    """x [P, K] times the weights w [E, K, N] (turned: [E, N, K]) of each tile's expert: [P, N].
    named: as of `tile_places`."""
    if device_name().startswith("TPU"):
        return tpu_rows(x, w, expert, turned, named, interpret)
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    count, across, wide = w.shape[0], x.shape[1], w.shape[1 if turned else 2]

    def kernel(expert_ref, x_ref, w_ref, o_ref):
        """One tile of the result: TILE rows of one expert by WIDE columns."""
        i, j = pl.program_id(0), pl.program_id(1)
        e, at, to = expert_ref[i], pl.ds(i * TILE, TILE), pl.ds(j * WIDE, WIDE)
        inside = j * WIDE + jnp.arange(WIDE) < wide

        def step(k, total):
            part = pl.ds(k * DEEP, DEEP)
            if turned:
                piece = triton.load(w_ref.at[e, to, part], mask=inside[:, None], other=0.0).T
            else:
                piece = triton.load(w_ref.at[e, part, to], mask=inside[None, :], other=0.0)
            return total + triton.dot(triton.load(x_ref.at[at, part]), piece)

        # An empty tile sums nothing.
        steps = across // DEEP * jnp.int32(e < count)
        total = lax.fori_loop(0, steps, step, jnp.zeros((TILE, WIDE), jnp.float32))
        triton.store(o_ref.at[at, to], total.astype(o_ref.dtype), mask=inside[None, :])

    return triton_call(
        kernel,
        f"expert_rows_{named}",
        (x.shape[0] // TILE, -(-wide // WIDE)),
        (x.shape[0], wide),
        (expert, x, w),
        interpret,
    )


# Many parameters: as `rows_by_experts`.
def weight_sums(a, b, expert, first, count, named, interpret=False):
    """Sums over each expert's rows of a [P, K] times b [P, N]: [count, K, N]."""
    if device_name().startswith("TPU"):
        return tpu_weight_sums(a, b, expert, first, count, named, interpret)
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    across, wide = a.shape[1], b.shape[1]

    def kernel(first_ref, a_ref, b_ref, o_ref):
        """One tile of one expert's sums: TILE by WIDE of its weight's elements."""
        e, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        at, to = pl.ds(i * TILE, TILE), pl.ds(j * WIDE, WIDE)
        tall = i * TILE + jnp.arange(TILE) < across
        inside = j * WIDE + jnp.arange(WIDE) < wide

        def step(r, total):
            part = pl.ds(r * SHORT, SHORT)
            left = triton.load(a_ref.at[part, at], mask=tall[None, :], other=0.0)
            right = triton.load(b_ref.at[part, to], mask=inside[None, :], other=0.0)
            return total + triton.dot(left.T, right)

        times = TILE // SHORT
        total = lax.fori_loop(
            times * first_ref[e],
            times * first_ref[e + 1],
            step,
            jnp.zeros((TILE, WIDE), jnp.float32),
        )
        triton.store(
            o_ref.at[e, at, to], total.astype(o_ref.dtype), mask=tall[:, None] & inside[None, :]
        )

    return triton_call(
        kernel,
        f"expert_weights_{named}",
        (count, -(-across // TILE), -(-wide // WIDE)),
        (count, across, wide),
        (first, a, b),
        interpret,
    )


# Many parameters: a kernel and what it is called with.
def triton_call(kernel, name, grid, shape, operands, interpret):
    """`pallas_result` through Triton."""
    from jax.experimental.pallas import triton

    loads = next((n for part, n in LOADS.items() if part in device_name()), 2)
    how = (
        {"interpret": True}
        if interpret
        else {"compiler_params": triton.CompilerParams(num_warps=WARPS, num_stages=loads)}
    )
    return pallas_result(kernel, name, shape, operands, {"grid": grid} | how)
