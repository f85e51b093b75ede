"""Products of routed experts' rows on TPUs: Pallas's kernels, through Mosaic, in place of those
that `grouped_experts.py` has for NVIDIA GPUs. Rows lie as there, each expert's from a multiple of
`tile_rows()` on; an expert without rows has a tile too, of zeros, so that its gradient is written.

A tile of rows meets the whole depth of its expert's weights, some of their columns at a time, so
that weights stay on the chip while the tiles of an expert go by. bfloat16 in, sums in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from planner.emit.runtime.collectives.exchange import spread
from planner.emit.runtime.kernels.fused_attention import device_name, typed, untyped

ON_CHIP = {
    "TPU v4": 16,
    "TPU v5 lite": 128,
    "TPU v5e": 128,
    "TPU v5": 64,
    "TPU v6": 128,
    "TPU7x": 64,
}
"""MiB of a core's own memory, by how names of TPUs begin."""
LANES = 128
"""Columns that arrays on the chip are stored in whole multiples of."""
LARGEST = ((1024, 2048), (1024, 1024), (512, 1024))
"""Tiles of a weight's gradient, the first that the chip has room for: rows and columns at most."""


def tile_rows():
    """Rows of a tile, all of one expert: those of a TPU fill a side of its matrix units."""
    return 256 if device_name().startswith("TPU") else 128


def chip_room():
    """Bytes of a core's own memory that tiles are cut for, three quarters of it; 0 where it is not
    known. The compiler may take a sixth more."""
    name = device_name()
    return next((n for part, n in ON_CHIP.items() if name.startswith(part)), 0) * 2**20 // 4 * 3


def most_columns(across):
    """Columns of weights so deep that the chip has room for, twice, beside a tile of rows, three
    times, and its result in bfloat16, twice, and float32."""
    free_bytes = chip_room() - 6 * tile_rows() * across
    return max(0, free_bytes // (4 * across + 8 * tile_rows()) // LANES * LANES)


def even_columns(wide, most):
    """Columns of a tile where an even number of tiles, each at most so wide, have so many in all,
    as chips of two cores share them; of narrow tiles the last may have none."""
    return LANES * -(-wide // (LANES * 2 * -(-wide // (2 * most))))


def gradient_tile(across, wide):
    """(rows, columns) of a tile of a weight's gradient, with its sum in float32, its product and
    its result, twice, beside the operands."""
    rows, columns = next(
        (a, b)
        for a, b in LARGEST
        if 12 * a * b + 4 * tile_rows() * (a + b) <= chip_room() or (a, b) == LARGEST[-1]
    )
    return even_columns(across, rows), even_columns(wide, columns)


# Many parameters: as `rows_by_experts`.
def tpu_rows(x, w, expert, turned, named, interpret=False):
    """`rows_by_experts` of grouped_experts.py."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    count, across, wide = w.shape[0], x.shape[1], w.shape[1 if turned else 2]
    rows, columns = tile_rows(), even_columns(wide, most_columns(across))

    def kernel(expert_ref, x_ref, w_ref, o_ref):
        """One tile of the result, zeros where no expert has it."""
        real = expert_ref[pl.program_id(1)] < count
        summed = (((1,), (1 if turned else 0,)), ((), ()))

        @pl.when(real)
        def multiply():
            y = lax.dot_general(x_ref[...], w_ref[...], summed, preferred_element_type=jnp.float32)
            o_ref[...] = y.astype(o_ref.dtype)

        @pl.when(jnp.logical_not(real))
        def clear():
            o_ref[...] = jnp.zeros_like(o_ref)

    def row(j, i, expert_ref):
        """The tile of rows that is read: of empty ones the first, once."""
        return jnp.where(expert_ref[i] < count, i, 0), 0

    def weight(j, i, expert_ref):
        """The part of the weights: empty tiles keep that of the one before."""
        e = jnp.minimum(expert_ref[i], count - 1)
        return (e, j, 0) if turned else (e, 0, j)

    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(wide, columns), x.shape[0] // rows),
        in_specs=[
            pl.BlockSpec((rows, across), row),
            pl.BlockSpec((None, columns, across) if turned else (None, across, columns), weight),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda j, i, expert_ref: (i, j)),
    )
    how = tpu_how(grid, ("parallel", "arbitrary"), interpret)
    named = f"expert_rows_{named}_{columns}"
    return pallas_result(kernel, named, (x.shape[0], wide), (expert, x, w), how)


# Many parameters: as `weight_sums`.
def tpu_weight_sums(a, b, expert, first, count, named, interpret=False):
    """`weight_sums` of grouped_experts.py."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    rows, across, wide = tile_rows(), a.shape[1], b.shape[1]
    tall, columns = gradient_tile(across, wide)

    def kernel(expert_ref, first_ref, a_ref, b_ref, o_ref, sum_ref):
        """What one tile of rows adds to a tile of its expert's sums."""
        i = pl.program_id(2)
        real, e = expert_ref[i] < count, jnp.minimum(expert_ref[i], count - 1)
        summed = (((0,), (0,)), ((), ()))

        def product():
            return lax.dot_general(
                a_ref[...], b_ref[...], summed, preferred_element_type=jnp.float32
            )

        @pl.when(real & (i == first_ref[e]))
        def begin():
            sum_ref[...] = product()

        @pl.when(real & (i > first_ref[e]))
        def add():
            sum_ref[...] += product()

        @pl.when(real & (i == first_ref[e + 1] - 1))
        def end():
            o_ref[...] = sum_ref[...].astype(o_ref.dtype)

    def row(i, expert_ref):
        """The tile of rows that is read: of empty ones the first, once."""
        return jnp.where(expert_ref[i] < count, i, 0)

    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(pl.cdiv(across, tall), pl.cdiv(wide, columns), a.shape[0] // rows),
        in_specs=[
            pl.BlockSpec((rows, tall), lambda k, n, i, expert_ref, _: (row(i, expert_ref), k)),
            pl.BlockSpec((rows, columns), lambda k, n, i, expert_ref, _: (row(i, expert_ref), n)),
        ],
        out_specs=pl.BlockSpec(
            (None, tall, columns),
            lambda k, n, i, expert_ref, _: (jnp.minimum(expert_ref[i], count - 1), k, n),
        ),
        scratch_shapes=[tpu.VMEM((tall, columns), jnp.float32)],
    )
    how = tpu_how(grid, ("parallel", "arbitrary", "arbitrary"), interpret)
    named = f"expert_weights_{named}_{tall}_{columns}"
    return pallas_result(kernel, named, (count, across, wide), (expert, first, a, b), how)


def tpu_how(grid, over, interpret):
    """How a kernel is called. over: whether cores share a dim of the grid (parallel) or not."""
    from jax.experimental.pallas import tpu

    if interpret:
        return {"grid_spec": grid, "interpret": True}
    params = tpu.CompilerParams(dimension_semantics=over, vmem_limit_bytes=chip_room() // 6 * 7)
    return {"grid_spec": grid, "compiler_params": params}


def pallas_result(kernel, named, shape, operands, how):
    """A kernel's result, in the type of its last operand; bfloat16 of float8. Kernels do not say
    over which mesh axes results differ: they are traced without that check, and the result differs
    as operands do."""
    from jax._src.config import _check_vma as check_types
    from jax.experimental import pallas as pl

    last = operands[-1]
    dtype = jnp.bfloat16 if last.dtype.itemsize == 1 else last.dtype
    with check_types(False):
        out = pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype), name=named, **how
        )(*(untyped(x) for x in operands))
    return typed(out, spread(last, *operands))
