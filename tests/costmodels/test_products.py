"""Products by their extents: against single kernels of one H100 that nothing was fitted to, against
XLA's choice of pieces, and what must hold of any product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.products import FITTED, SIZES, UNSEEN, alone, by_flops, measured
from costmodels.hardware.device import load_device
from costmodels.hardware.mixed import slowed, slowest
from costmodels.hardware.tiles import Tiles, tiles_of
from costmodels.kernels import roofline_time_s
from costmodels.products import (
    Product,
    chosen,
    kernel_time_s,
    least_time_s,
    pieces_of,
    product_time_s,
)
from planner.calibrate.products import fit_tiles, priced_s

H100 = load_device("h100-sxm")
TPU = load_device("tpu-v5e")
COMPILED = (
    ((512, 768, 768), 4),
    ((512, 768, 3072), 4),
    ((512, 1600, 1600), 2),
    ((64, 14336, 4096), 2),
    ((64, 4096, 4096), 8),
    ((128, 128, 4096), 32),
    ((128, 320, 512), 8),
    ((384, 320, 7168), 16),
    ((1024, 1792, 11008), 2),
    ((256, 256, 256), 4),
    ((2048, 768, 768), 1),
    ((640, 1152, 640), 1),
    ((512, 4096, 14336), 1),
    ((128, 7168, 320), 1),
    ((496, 3120, 3792), 1),
    ((8192, 4096, 4096), 1),
)
"""(rows, columns, sums) -> pieces of the sums, as jax 0.10.2 compiles them for an H100."""


def of(*extents: float) -> Product:
    rows, columns, sums, *batch = (np.array([float(x)]) for x in extents)
    return Product(rows, columns, sums, batch[0] if batch else np.ones(1))


def seconds(product: Product, size: float = 0.0) -> float:
    return float(product_time_s(H100, product, np.array([size]), "bfloat16")[0])


def test_unseen_products_are_nearer_by_extents_than_by_flops() -> None:
    products = measured(UNSEEN)
    flops, took = np.array([x.flops for x in products]), np.array([x.time_s for x in products])
    ours, before = priced_s(alone(H100), products), by_flops(H100, products)
    for (low, high), most in zip(SIZES, (0.04, 0.07, 0.12), strict=True):
        here = (flops >= low) & (flops < high)
        off, was = (np.abs(x[here] / took[here] - 1).mean() for x in (ours, before))
        assert off < most and off < 0.67 * was


def test_the_file_has_what_is_fitted_to_the_record() -> None:
    tiles = fit_tiles(alone(H100), measured(FITTED))
    assert tiles is not None and H100.tiles is not None
    for name in ("efficiency", "start_s", "kernel_s", "sums_bytes_per_s"):
        assert getattr(tiles, name) == pytest.approx(getattr(H100.tiles, name), rel=0.05)


def test_convolutions_take_longer_than_products_of_their_extents() -> None:
    product = of(401408, 64, 576)
    convolution = replace(product, convolution=True)
    assert H100.tiles is not None
    for each, like in (
        (convolution, product),
        (convolution.of_left, product.of_left),
        (convolution.of_right, product.of_right),
    ):
        assert seconds(each, 1e8) == pytest.approx(seconds(like, 1e8) / H100.tiles.convolutions)
    small = replace(of(64, 64, 64), convolution=True)
    assert seconds(small) == H100.launch_s


def test_sums_are_cut_as_the_compiler_cuts_them() -> None:
    assert H100.tiles is not None
    for extents, pieces in COMPILED:
        assert pieces_of(H100.tiles, of(*extents), 2)[0] == pieces, extents


def test_a_product_by_hand() -> None:
    """16,384 x 4,096 x 4,096 is at what long steps sustain, with memory hidden behind it; one wave
    of one tile each, off the power limit, is its loop, its start and the kernel's."""
    large = of(16384, 4096, 4096)
    kernel = 1.96e-6
    assert seconds(large) == pytest.approx(kernel + large.flops[0] / (989e12 * 0.74))
    one = of(12 * 128, 11 * 128, 1024)
    loop = 2 * 128 * 128 * 1024 * 132 / (989e12 * 0.865)
    found = product_time_s(alone(H100), one, np.zeros(1), "bfloat16")[0]
    assert found == pytest.approx(kernel + 0.77e-6 + loop)
    assert chosen(H100, (12 * 128, 11 * 128, 1024, 1), "bfloat16") == ((128, 128), 1, 1)
    assert seconds(one, 1e9) == pytest.approx(kernel + 1e9 / (3350e9 * 0.86))
    assert seconds(of(64, 64, 64)) == H100.launch_s


def test_a_compiled_kernel_is_priced_in_the_pieces_that_it_has() -> None:
    whole, cut = of(512, 768, 3072), of(512, 768, 768, 4)
    adding = (4 * 4 + 2) * 512 * 768 / 2740e9
    one = float(kernel_time_s(H100, cut, np.zeros(1), "bfloat16")[0])
    assert seconds(whole) == pytest.approx(one + adding, rel=1e-6)


SIDES = st.integers(1, 20000)


@given(SIDES, SIDES, SIDES, st.integers(1, 64), st.sampled_from(["bfloat16", "float8_e4m3fn"]))
@settings(max_examples=200, deadline=None)
def test_no_product_is_faster_than_the_least(m: int, n: int, k: int, b: int, dtype: str) -> None:
    product = of(m, n, k, b)
    flops = float(product.flops[0])
    found = float(product_time_s(H100, product, np.zeros(1), dtype)[0])
    assert found >= least_time_s(H100, flops, dtype) * (1 - 1e-12)
    assert least_time_s(TPU, flops, "bfloat16") == roofline_time_s(TPU, flops, 0.0, "bfloat16")


@given(SIDES, SIDES, SIDES, st.floats(0.1, 0.9))
@settings(max_examples=100, deadline=None)
def test_devices_together_are_no_faster_than_each(m: int, n: int, k: int, share: float) -> None:
    product, size = of(m, n, k), np.array([2.0 * (m * n + m * k + n * k)])
    slow = slowed(H100, share)
    each = [product_time_s(d, product, size, "bfloat16")[0] for d in (H100, slow)]
    assert each[0] <= each[1] * (1 + 1e-12)
    together = slowest([(H100, 8), (replace(slow, file="slow"), 8)])
    assert together.tiles is not None
    assert product_time_s(together, product, size, "bfloat16")[0] >= max(each) * (1 - 1e-9)


def test_a_device_without_tiles_has_no_price_by_extents() -> None:
    with pytest.raises(ValueError, match=r"tpu-v5e has no \[products\]"):
        product_time_s(TPU, of(1, 1, 1), np.zeros(1), "bfloat16")
    assert slowest([(H100, 8), (load_device("v100-32gb"), 8)]).tiles is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("units", 0, "whole number"),
        ("tiles", [], "needs a tile"),
        ("tiles", [[0, 64]], "whole number"),
        ("efficiency", 1.2, "at most 1"),
        ("efficiency", "x", "a number"),
        ("splitting", [1.0], "two figures"),
        ("sums", "0 GB/s", "above 0"),
        ("convolutions", 0.0, "above 0"),
        ("convolutions", 1.5, "at most 1"),
    ],
)
def test_tables_that_no_device_has(key: str, value: object, said: str) -> None:
    table = {
        "units": 132,
        "tiles": [[128, 128]],
        "efficiency": 0.8,
        "start": "1 us",
        "kernel": "2 us",
        "sums": "2000 GB/s",
        "splitting": [2.0, 4e5],
    }
    assert isinstance(tiles_of(table), Tiles)
    with pytest.raises(ValueError, match=said):
        tiles_of(table | {key: value})
