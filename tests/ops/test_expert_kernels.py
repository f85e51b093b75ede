"""Routed experts by one kernel for the rows of all of them: the same numbers as blocks, the same
choice in programs and in plans, and compiled text that is read as it is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from costmodels.expert_tiles import (
    MOSAIC,
    TILES,
    TRITON,
    Tile,
    even_columns,
    most_columns,
    rows_tile,
    weights_tile,
)
from costmodels.hardware.device import device_names, load_device
from planner.emit.runtime.kernels import expert_tiles, experts, fused_attention, grouped_experts
from planner.graph.ir import Node
from planner.ops.expert_kernels import ALIGNED, kernel_of, places
from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.kernels import kernels
from planner.verify.hlo.text import parse

TOKENS, CHOICES, HIDDEN, WIDTH, EXPERTS = 200, 2, 128, 192, 5
ROUTERS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "any": lambda rng: rng.integers(0, EXPERTS, TOKENS * CHOICES),
    "one": lambda rng: np.full(TOKENS * CHOICES, 3),
    "some elsewhere": lambda rng: rng.integers(0, EXPERTS + 1, TOKENS * CHOICES),
    "all elsewhere": lambda rng: np.full(TOKENS * CHOICES, EXPERTS),
}
NVIDIA, TPU = "NVIDIA H100 80GB HBM3", "TPU v5"


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Programs find a device of that name."""
    for module in (expert_tiles, grouped_experts):
        monkeypatch.setattr(module, "device_name", lambda: device)


def operands(turned: bool, gated: bool, biased: bool) -> tuple[Any, ...]:
    """x, shares, stacks and a gradient of the result."""
    import jax.numpy as jnp

    rng = np.random.default_rng(7)

    def made(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32)

    wide, back = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    first, last = (back, wide) if turned else (wide, back)
    stacks = (
        made(*first) if gated else None,
        made(*first),
        made(*last),
        made(EXPERTS, WIDTH) if gated and biased else None,
        made(EXPERTS, WIDTH) if biased else None,
        made(EXPERTS, HIDDEN) if biased else None,
    )
    return made(TOKENS, HIDDEN), abs(made(TOKENS * CHOICES)), stacks, made(TOKENS, HIDDEN)


WAYS = [(False, True, False), (True, True, True), (False, False, True), (True, False, False)]
EACH = [*zip(ROUTERS, WAYS, strict=True)]
"""Every router and every way once."""
CASES = [
    *((NVIDIA, "any", way) for way in WAYS),
    *(
        (device, router, way)
        for device in (NVIDIA, TPU)
        for router, way in EACH[device == NVIDIA :]
    ),
    *(
        pytest.param(NVIDIA, router, way, marks=pytest.mark.slow)
        for router in ROUTERS
        for way in WAYS
        if router != "any" and (router, way) not in EACH
    ),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("device", "router", "way"), CASES)
def test_one_kernel_computes_what_blocks_compute(
    device: str, router: str, way: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and all gradients, in plain operations in place of the device's."""
    import jax
    import jax.numpy as jnp

    turned, gated, biased = way
    monkeypatch.setattr(experts, "takes_grouped", lambda *_: False)
    on(monkeypatch, device)
    x, share, stacks, g = operands(turned, gated, biased)
    ids = jnp.asarray(ROUTERS[router](np.random.default_rng(3)), jnp.int32)
    mix = (lambda g, u: jax.nn.silu(g) * u) if gated else (lambda _, u: jax.nn.gelu(u))
    forms = ("rh,fh->rf", "rf,hf->rh") if turned else ("rh,hf->rf", "rf,fh->rh")
    how = (mix, *forms, 32, 3)
    sums = jax.tree.map(jnp.ones_like, stacks)
    pairs = (
        (
            jax.jit(lambda *v: experts.expert_results(how, *v))(x, ids, share, stacks),
            jax.jit(lambda *v: grouped_experts.grouped_results(how, *v, True))(
                x, ids, share, stacks
            ),
        ),
        (
            jax.jit(lambda *v: experts.expert_gradients(how, *v))(x, ids, share, stacks, g, sums),
            jax.jit(lambda *v: grouped_experts.grouped_gradients(how, *v, True))(
                x, ids, share, stacks, g, sums
            ),
        ),
    )
    for want, found in pairs:
        assert jax.tree.structure(want) == jax.tree.structure(found)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5 * max(1.0, float(jnp.abs(a).max())))


def test_zeros_that_loops_write_into_wait_for_their_layer() -> None:
    """Of layers written out one after the other compilers fill zeros that wait for nothing in one
    kernel, before the first layer: an array of all rows for each pass of each layer."""
    import jax
    import jax.numpy as jnp
    from jax.extend.core import Literal

    x, share, stacks, g = operands(turned=False, gated=True, biased=True)
    ids = jnp.asarray(ROUTERS["any"](np.random.default_rng(3)), jnp.int32)
    how = (lambda g, u: jax.nn.silu(g) * u, "rh,hf->rf", "rf,fh->rh", 32, 3)
    for run in (
        lambda x, g: experts.expert_results(how, x, ids, share, stacks),
        lambda x, g: experts.expert_gradients(how, x, ids, share, stacks, g),
    ):
        filled = [
            e.outvars[0].aval.shape
            for e in jax.make_jaxpr(run)(x, g).jaxpr.eqns
            if e.primitive.name == "broadcast_in_dim" and isinstance(e.invars[0], Literal)
        ]
        assert not [shape for shape in filled if np.prod(shape) >= TOKENS]


@pytest.mark.slow
def test_float16_is_not_overflowed_by_experts_that_no_row_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last token would be infinite in an expert that is chosen by others alone."""
    import jax
    import jax.numpy as jnp

    on(monkeypatch, NVIDIA)
    x, share, stacks, g = jax.tree.map(
        lambda v: v.astype(jnp.float16), operands(False, False, False)
    )
    x = x.at[-1].set(jnp.abs(x[-1]) + 200)
    up = stacks[1].at[0].set(jnp.abs(stacks[1][0]) * 200)
    stacks = (None, up, *stacks[2:])
    ids = jnp.ones(TOKENS * CHOICES, jnp.int32).at[: TOKENS // 2].set(0)
    how = (lambda _, u: jnp.square(u), "rh,hf->rf", "rf,fh->rh", 32, 3)
    sums = jax.tree.map(jnp.zeros_like, stacks)
    found = grouped_experts.grouped_gradients(how, x, ids, share, stacks, g, sums, True)
    assert not np.isfinite(np.asarray(jnp.square(x[-1] @ up[0]))).all()
    assert all(
        np.isfinite(np.asarray(v[:1] if v.shape[0] == EXPERTS else v[: TOKENS // 4])).all()
        for v in jax.tree.leaves(found)
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=600),
    st.integers(1, 6),
    st.sampled_from([(NVIDIA, TRITON), (TPU, MOSAIC)]),
)
def test_every_row_has_a_place_in_a_tile_of_its_expert(
    ids: list[int], count: int, device: tuple[str, str]
) -> None:
    """An expert without rows has a tile too."""
    import jax.numpy as jnp

    name, kernel = device
    each, rows = np.minimum(ids, count), TILES[kernel, "rows"].rows
    how = (None, "", "", 1, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        on(monkeypatch, name)
        source, place, first, expert, _ = grouped_experts.tile_places(how, jnp.asarray(each), count)
    assert len(source) == places(kernel, len(ids), count) == len(expert) * rows
    for row, (own, at) in enumerate(zip(each, np.asarray(place), strict=True)):
        if own == count:
            assert at == len(source)
        else:
            assert source[at] == row and expert[at // rows] == own
    used = np.bincount(each, minlength=count + 1)[:count]
    assert np.sum(np.asarray(source) < len(ids)) == used.sum()
    assert np.array_equal(np.diff(first), np.maximum(1, -(-used // rows)))


def test_gpus_that_multiply_float8_are_those_of_their_files() -> None:
    multiplies = dict[str, bool]()
    for device in map(load_device, device_names()):
        if device.attention_kernel == "cudnn":
            names = device.spelled or (device.name.upper(),)
            named = any(part in name for name in names for part in grouped_experts.FLOAT8)
            multiplies[device.name] = "float8_e4m3fn" in device.peak_flops_per_s
            assert named == multiplies[device.name]
    assert {*multiplies.values()} == {True, False}


def test_tiles_of_plans_are_those_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, NVIDIA)
    tiles = TILES[TRITON, "rows"], TILES[TRITON, "weights"]
    assert {tile.rows for tile in tiles} == {expert_tiles.tile_rows(), tiles[1].tall}
    assert {tile.columns for tile in tiles} == {grouped_experts.WIDE}
    assert ALIGNED[TRITON] == grouped_experts.DEEP == grouped_experts.SHORT
    for device in map(load_device, device_names()):
        if device.kind != "tpu":
            assert not device.on_chip_bytes
            continue
        on(monkeypatch, f"{device.spelled[0]} and more")
        assert expert_tiles.tile_rows() == TILES[MOSAIC, "rows"].rows
        for across, wide in ((4096, 14336), (14336, 4096), (2048, 1408), (128, 256), (7168, 2048)):
            most = most_columns(across, device.on_chip_bytes)
            assert most == expert_tiles.most_columns(across)
            if most:
                columns = rows_tile(MOSAIC, device.on_chip_bytes, across, wide).columns
                assert columns == even_columns(wide, most) <= max(128, most)
                assert columns == expert_tiles.even_columns(wide, most)
                assert -(-wide // columns) > 1 or wide <= 128
            sums = weights_tile(MOSAIC, device.on_chip_bytes, across, wide)
            assert (sums.tall, sums.columns) == expert_tiles.gradient_tile(across, wide)


CHIPS = {NVIDIA: ("cudnn", 0), "TPU v5 lite": ("splash", 2**27), "TPU v4": ("splash", 2**24)}
"""Fused attention and a core's own memory, by device."""


@pytest.mark.parametrize("device", ["", "cpu", "Tesla V100", "TPU v3", *CHIPS])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "dtype"),
    [
        (64, 128, 192, "bfloat16"),
        (64, 128, 96, "bfloat16"),
        (64, 128, 256, "float16"),
        (64, 128, 256, "bfloat16"),
        (4096, 128, 256, "bfloat16"),
        (64, 4096, 14336, "bfloat16"),
        (64, 128, 256, "float32"),
    ],
)
def test_programs_choose_as_plans_do(
    device: str, tokens: int, hidden: int, width: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax
    import jax.numpy as jnp

    on(monkeypatch, device)
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    ids = jax.ShapeDtypeStruct((2 * tokens,), jnp.int32)
    stacks = (None, shape(4, hidden, width), shape(4, width, hidden), None, None, None)
    for rows in (2 * tokens // 4, tokens // 8):
        found = grouped_experts.takes_grouped(
            (None, "", "", rows, 1), shape(tokens, hidden), ids, stacks
        )

        class Asked:
            attention_kernel, on_chip = CHIPS.get(device, ("", 0))
            compute = dtype
            partitioned = float8 = False
            programs = True
            node = Node("n", "RoutedExperts", (), ())

        local = {"h": hidden, "f": width, "e": 4}
        chosen = kernel_of(Asked(), local, 2 * tokens, 4 * rows)  # type: ignore[arg-type]
        assert found == bool(chosen)
        if tokens == 4096 and device in CHIPS:  # of few rows a tile each serves wherever they go
            assert found == (rows > tokens // 8)
    assert fused_attention.device_name() != NVIDIA  # what is here


TEXT = """HloModule experts

ENTRY %main (e: s32[6], f: s32[3], x: bf16[768,256], w: bf16[2,256,384], g: bf16[768,384]) -> bf16[2,256,384] {
  %e = s32[6]{0} parameter(0)
  %f = s32[3]{0} parameter(1)
  %x = bf16[768,256]{1,0} parameter(2)
  %w = bf16[2,256,384]{2,1,0} parameter(3)
  %g = bf16[768,384]{1,0} parameter(4)
  %rows = bf16[768,384]{1,0} custom-call(%e, %x, %w), custom_call_target="__gpu$xla.gpu.triton", backend_config={debug = false, grid_x = 6 : i32, ir = "ML\\EF{\\22", name = "expert_rows_600_500", num_stages = 4 : i32}
  ROOT %sums = bf16[2,256,384]{2,1,0} custom-call(%f, %x, %rows), custom_call_target="__gpu$xla.gpu.triton", backend_config={debug = false, grid_x = 2 : i32, name = "expert_weights_600_500", num_stages = 4 : i32}
}
"""


def test_compiled_kernels_are_counted_as_rows_of_a_balanced_router() -> None:
    """600 rows as blocks hold them; time follows the 500 that there are."""
    assert dot_flops(TEXT) == 2 * (2 * 600 * 256 * 384)
    rows, sums = (site.selected for site in kernels(parse(TEXT)))
    assert rows.flops == int(TILES[TRITON, "rows"].rows_flops(500, 2, 256, 384))
    assert sums.flops == int(TILES[TRITON, "weights"].weights_flops(500, 2, 256, 384))
    assert rows.moved_bytes == 4 * 6 + 2 * (768 * 256 + 2 * 256 * 384 + 768 * 384)
    assert rows.dtype == "bf16"


TPU_TEXT = """HloModule experts

ENTRY %main (e: s32[5], f: s32[3], x: bf16[1280,256], w: bf16[2,256,512], g: bf16[1280,512]) -> bf16[2,256,512] {
  %e = s32[5]{0} parameter(0)
  %f = s32[3]{0} parameter(1)
  %x = bf16[1280,256]{1,0} parameter(2)
  %w = bf16[2,256,512]{2,1,0} parameter(3)
  %g = bf16[1280,512]{1,0} parameter(4)
  %expert_rows_600_500_256.1 = bf16[1280,512]{1,0} custom-call(%e, %x, %w), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUz"}}
  ROOT %expert_weights_600_500_128_256 = bf16[2,256,512]{2,1,0} custom-call(%e, %f, %x, %expert_rows_600_500_256.1), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUz"}}
}
"""


def test_compiled_kernels_of_tpus_are_counted_with_what_they_read_again() -> None:
    """Two tiles of columns read rows twice; of a gradient's two by two each operand is read
    twice."""
    assert dot_flops(TPU_TEXT) == 2 * (2 * 600 * 256 * 512)
    rows, sums = (site.selected for site in kernels(parse(TPU_TEXT)))
    tile = replace(TILES[MOSAIC, "rows"], columns=256)
    assert rows.flops == int(tile.rows_flops(500, 2, 256, 512))
    once = 4 * 5 + 2 * (1280 * 256 + 2 * 256 * 512 + 1280 * 512)
    assert rows.moved_bytes == once + 2 * 500 * 256
    tile = replace(TILES[MOSAIC, "weights"], tall=128, columns=256)
    assert sums.flops == int(tile.weights_flops(500, 2, 256, 512))
    assert sums.moved_bytes == once + 4 * 3 + 2 * 500 * (256 + 512)
    assert rows.dtype == sums.dtype == "bf16" and rows.experts and sums.experts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hardware", ["h100-sxm", "tpu-v5p", "tpu-v6e"])
def test_prices_follow_the_kernel_where_a_program_has_it(hardware: str) -> None:
    """A step of small experts on one device is cheaper than by blocks, which float32 keeps, and
    asks for places of all rows."""
    spec, machine = (
        "zoo:deepseek-moe-16b,layers=2,seq=1024",
        {"devices": 1, "batch": 4, "baselines": False, "pins": "recompute=none"},
    )
    kernel = planner.plan(spec, hardware=hardware, **machine)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("planner.ops.experts.kernel_of", lambda *_: "")
    blocks = planner.plan(spec, hardware=hardware, **machine)
    monkey.undo()
    assert kernel.costs["step_time_s"] < 0.9 * blocks.costs["step_time_s"]
    assert kernel.costs["memory_per_device_bytes"] > blocks.costs["memory_per_device_bytes"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("precision", "hardware", "said"),
    [
        ("bf16-mixed", "h100-sxm", "triton"),
        ("fp32", "h100-sxm", "blocks: it computes in float32"),
        ("bf16-mixed", "tpu-v5p", "mosaic"),
        ("fp32", "tpu-v5p", "blocks: it computes in float32"),
        ("bf16-mixed", "mi300x", "blocks: the device has no kernel for the rows of all experts"),
        ("fp32", "cpu", None),
    ],
)
def test_a_plan_says_which_kernel_its_experts_get(
    precision: str, hardware: str, said: str | None
) -> None:
    s = planner.plan(
        "zoo:deepseek-moe-16b,layers=2,seq=128,vocab=1024,ff=1024,hidden=512",
        devices=1,
        batch=1,
        hardware=hardware,
        precision=precision,
        workload="infer",
        baselines=False,
        memory_limit_bytes=2**40,
    )
    (row,) = [row for row in s.nodes.values() if row["op"] == "RoutedExperts"]
    assert row.get("expert_kernel") == said


def test_a_longer_product_takes_longer() -> None:
    for kernel in (TRITON, MOSAIC):
        rows = rows_tile(kernel, 2**26, 512, 512).rows_flops
        assert rows(1000, 8, 512, 512) < rows(1001, 8, 512, 512)
        assert rows(1000, 8, 512, 512) == rows(1000, 8, 512, 257)
        assert rows(1000, 8, 512, 512) > 2.0 * 1000 * 512 * 512
        sums = weights_tile(kernel, 2**26, 512, 512).weights_flops
        assert sums(1000, 8, 512, 512) < sums(1000, 9, 512, 512)


@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (2, 8), (5, 3), (40, 8)])
def test_experts_without_rows_are_not_read(rows: int, experts: int) -> None:
    """Against draws: the kernel has no tile of an expert that no row goes to."""
    drawn = np.random.default_rng(rows).integers(0, experts, (20_000, rows))
    met = np.mean([len(set(row)) for row in drawn.tolist()])
    assert Tile.met(rows, experts) == pytest.approx(met, rel=0.02)
    tile = TILES[TRITON, "rows"]
    moved = tile.rows_moved(rows, experts, 256, 512)
    assert moved == pytest.approx(met * 256 * 512 + rows * (256 + 512), rel=0.02)
    assert Tile.met(64 * experts, experts) == pytest.approx(experts)
