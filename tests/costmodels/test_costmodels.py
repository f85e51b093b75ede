"""Prices by hand and by brute force: units, device files, collectives, rooflines, precision,
capacity."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import tomllib
from fractions import Fraction
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Device, DeviceError, aliases, device_names, load_device
from costmodels.capacity import (
    COLLECTIVE_BUFFERS_BYTES,
    Breakdown,
    capacity,
    tiled_image,
    tiled_rows,
)
from costmodels.collectives import (
    KINDS,
    MEMORY,
    Span,
    collective_lines,
    collective_time_s,
    ring_lines,
    wire_bytes,
)
from costmodels.hardware.describe import as_json, describe, figures, origin, overview
from costmodels.hardware.device import DEVICES, device_spelled, from_table
from costmodels.hardware.units import (
    UnitError,
    bandwidth_bytes_per_s,
    rate_flops_per_s,
    show_bytes,
    show_time,
    size_bytes,
    time_s,
)
from costmodels.kernels import optimizer_time_s, roofline_time_s
from costmodels.precision import load_recipe, recipe_names
from costmodels.runtimes import Runtime, kernel_set_names, load_kernels, load_runtime, runtime_names

# --- units
# -----------------------------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            ("kB", 10**3),
            ("MB", 10**6),
            ("GB", 10**9),
            ("KiB", 2**10),
            ("MiB", 2**20),
            ("GiB", 2**30),
        ]
    ),
)
def test_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert (
        size_bytes(f"{number} {unit[0]}") == number * unit[1] == size_bytes(f"  {number}{unit[0]} ")
    )


def test_decimal_and_binary_units_differ() -> None:
    assert size_bytes("80 GB") == 80_000_000_000
    assert size_bytes("80 GiB") == 85_899_345_920 == size_bytes("81920 MiB")
    assert bandwidth_bytes_per_s("400 Gb/s") == bandwidth_bytes_per_s("50 GB/s") == 50e9
    assert time_s("2 us") == pytest.approx(2e-6)
    assert rate_flops_per_s("1.5 PFLOP/s") == rate_flops_per_s("1500 TFLOP/s")


@pytest.mark.parametrize("parse", [size_bytes, bandwidth_bytes_per_s, time_s, rate_flops_per_s])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "80",
        "GB",
        "-1 GB",
        "1e3 GB",
        "80 gb",
        "80 Go",
        "80 GB/h",
        "80 parsecs",
        "8 GB 2",
        80,
        80.0,
        None,
        True,
        ["1 GB"],
    ],
)
def test_unwritten_or_unknown_units_are_refused(parse, text: object) -> None:
    with pytest.raises(UnitError):
        parse(text)


def test_numbers_beyond_floats_are_refused() -> None:
    with pytest.raises(UnitError, match="too large"):
        size_bytes("9" * 400 + " GB")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (size_bytes, "5 GB/s"),
        (size_bytes, "5 Gb"),
        (bandwidth_bytes_per_s, "5 GB"),
        (time_s, "5 GB"),
        (rate_flops_per_s, "5 TFLOP"),
        (rate_flops_per_s, "5 GB/s"),
        (time_s, "5 us/s"),
    ],
)
def test_units_of_another_quantity_are_refused(parse, text: str) -> None:
    with pytest.raises(UnitError, match="one of"):
        parse(text)


def test_shown_quantities_keep_their_unit() -> None:
    assert [show_bytes(x) for x in (0, 1023, 1536, 80 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "80.0 GiB",
    ]
    assert [show_time(x) for x in (2.5e-6, 0.0123, 1.5, 250.0, 106370.0)] == [
        "2.5 us",
        "12.3 ms",
        "1.5 s",
        "250 s",
        "106,370 s",
    ]


# --- collectives: spans and groups
# -----------------------------------------------------------------------------------------------------

SPANS = st.builds(
    Span,
    st.integers(1, 16),
    st.floats(1e8, 1e12),
    st.floats(1e-7, 1e-4),
    st.one_of(st.just(0.0), st.floats(1e8, 1e12)),
    st.sampled_from(["switch", "mesh", "ring", "line"]),
)
GROUPS = st.lists(SPANS, min_size=1, max_size=4).map(tuple)
KIND = st.sampled_from(KINDS)
US, GB = 1e-6, 1e9


def test_ring_and_tree_by_hand() -> None:
    span = Span(8, 100 * GB, 5 * US)
    assert (
        collective_lines("all-gather", (span,))
        == collective_lines("reduce-scatter", (span,))
        == ((7 * 5 * US, pytest.approx(7 / 8 / (100 * GB))),)
    )
    # ring 70 us + 1.75 S/B, tree 30 us + 2 S/B: the tree wins below S = 40 us * 100 GB/s / 0.25 =
    # 16 MB
    assert collective_time_s("all-reduce", 1e6, (span,)) == pytest.approx(
        30 * US + 2e6 / (100 * GB)
    )
    assert collective_time_s("all-reduce", 1e9, (span,)) == pytest.approx(
        70 * US + 1.75e9 / (100 * GB)
    )
    assert collective_time_s("all-reduce", 16e6, (span,)) == pytest.approx(350 * US)
    assert collective_time_s("all-to-all", 1e9, (span,)) == pytest.approx(
        35 * US + 0.875e9 / (100 * GB)
    )
    assert collective_time_s("collective-permute", 1e9, (span,)) == pytest.approx(5 * US + 0.01)


def test_a_shared_memory_by_hand() -> None:
    """Eight virtual devices meet in three steps; a scatter passes its payload twice as often as a
    gather, however many take part."""
    group = (Span(8, 4e9, 25e-6, kind=MEMORY),)
    assert collective_time_s("all-gather", 2**20, group) == pytest.approx(
        3 * 25e-6 + 2 * 2**20 / 4e9
    )
    assert collective_time_s("reduce-scatter", 2**20, group) == pytest.approx(
        3 * 25e-6 + 4 * 2**20 / 4e9
    )
    assert collective_time_s("all-reduce", 2**20, group) == pytest.approx(
        3 * 25e-6 + 3 * 2**20 / 4e9
    )
    pair, whole = (
        collective_lines("all-to-all", (Span(n, 4e9, 25e-6, kind=MEMORY),)) for n in (2, 8)
    )
    assert pair[0][1] == whole[0][1]
    assert 3 * pair[0][0] == pytest.approx(whole[0][0])


def test_in_switch_all_reduce_reaches_its_bus_bandwidth() -> None:
    span = Span(8, 360 * GB, 3 * US, 476 * GB)
    seconds = collective_time_s("all-reduce", 8e9, (span,)) - 6 * US
    assert 2 * 7 / 8 * 8e9 / seconds == pytest.approx(476 * GB)
    assert collective_lines("all-gather", (span,)) == collective_lines(
        "all-gather", (dataclasses.replace(span, bus_bytes_per_s=0.0),)
    )


SWEEP = {
    16: 125.65,
    32: 157.62,
    64: 198.01,
    128: 229.67,
    256: 249.23,
    512: 257.31,
    1024: 264.90,
    2048: 268.10,
    4096: 270.34,
    16384: 275.58,
}
"""MiB -> GB/s of payload: all-reduce on 8 H200, torch 2.9.1, NCCL 2.27.7 (stas00/ml-engineering,
all-reduce-8xH200.md, 2026-08-04)."""


@pytest.mark.parametrize(("mib", "rate"), SWEEP.items())
def test_all_reduce_of_a_node_is_near_a_published_sweep(mib: int, rate: float) -> None:
    link, size = load_device("h200-sxm").inner, mib * 2**20
    span = Span(
        8,
        link.bandwidth_bytes_per_s * link.efficiency,
        link.latency_s,
        link.all_reduce_bytes_per_s,
        bus_latency_s=link.all_reduce_latency_s,
    )
    assert collective_time_s("all-reduce", size, (span,)) == pytest.approx(
        size / (rate * GB), rel=0.1 if mib > 16 else 0.2
    )


def test_two_levels_by_hand() -> None:
    """8 x 4 members: the outer level sees an eighth of the bytes, works at the same time as the
    inner one, and latencies add."""
    inner, outer = Span(8, 400 * GB, 3 * US), Span(4, 40 * GB, 10 * US)
    latency, slope = collective_lines("all-gather", (inner, outer))[0]
    assert latency == pytest.approx(7 * 3 * US + 3 * 10 * US)
    assert slope == pytest.approx(max(7 / 8 / (400 * GB), 1 / 8 * 3 / 4 / (40 * GB)))
    large = collective_lines("all-reduce", (inner, outer))[-1]
    assert large == (pytest.approx(2 * (21 + 30) * US), pytest.approx(2 * slope))
    small = collective_lines("all-reduce", (inner, outer))[0]
    assert small[0] == pytest.approx(2 * 3 * 3 * US + 2 * 2 * 10 * US), "trees: log2 of each level"
    assert small[1] == pytest.approx(2 / (40 * GB)), (
        "without scattering the whole payload crosses the outer level"
    )


def test_a_ring_through_two_nodes_by_hand() -> None:
    """Between two nodes of 8: 15/16 of the payload through eight ports together, beside 1/8 * 1/2
    of it through each where shards are made inside a node first."""
    inner, outer = Span(8, 200 * GB, 3 * US), Span(2, 10 * GB, 10 * US)
    assert ring_lines("all-gather", (inner, outer)) == (
        (pytest.approx((2 * 7 * 3 + 10) * US), pytest.approx(15 / 16 / (80 * GB))),
    )
    assert collective_lines("all-gather", (inner, outer))[0][1] == pytest.approx(1 / 16 / (10 * GB))
    tree, ring = ring_lines("all-reduce", (inner, outer))
    assert ring == (pytest.approx(2 * 52 * US), pytest.approx(2 * 15 / 16 / (80 * GB)))
    assert tree == (pytest.approx(2 * (3 * 3 + 10) * US), pytest.approx(2 / (80 * GB)))
    many = (inner, dataclasses.replace(outer, size=512))
    assert ring_lines("reduce-scatter", many)[0][1] == pytest.approx(
        collective_lines("reduce-scatter", many)[0][1], rel=2e-3
    )
    in_switch = dataclasses.replace(inner, bus_bytes_per_s=400 * GB)
    assert (
        ring_lines("all-reduce", (in_switch, outer))[-1]
        == collective_lines("all-reduce", (in_switch, outer))[-1]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rings_of_one_level_and_of_a_torus_are_those_there_are(kind: str) -> None:
    for group in (
        (Span(8, 200 * GB, 3 * US),),
        (Span(16, 90 * GB, US, kind="ring"), Span(4, 10 * GB, 20 * US)),
    ):
        assert ring_lines(kind, group) == collective_lines(kind, group)


def test_many_nodes_of_h100_reach_what_their_nics_carry() -> None:
    """Reported bus bandwidth over nodes with 8 x 400 Gb/s is near 8 NICs' rate, not NVLink's and
    not their sum in series."""
    group = (Span(8, 360 * GB, 3 * US, 476 * GB), Span(8, 40 * GB, 10 * US))
    size = 64e9
    bus = 2 * 63 / 64 * size / collective_time_s("all-reduce", size, group)
    assert bus == pytest.approx(8 * 40 * GB * (63 / 64) / (7 / 8), rel=1e-2)


def test_all_to_all_across_levels_counts_only_what_leaves() -> None:
    inner, outer = Span(4, 300 * GB, 3 * US), Span(2, 25 * GB, 10 * US)
    lines = collective_lines("all-to-all", (inner, outer))
    # direct: to each of 8; 3/8 stay inside, 4/8 leave. Staged: 3/4 inside, then 1/2 across.
    direct = ((3 * 3 + 4 * 10) * US, max(3 / 8 / (300 * GB), 4 / 8 / (25 * GB)))
    staged = ((3 * 3 + 10) * US, 3 / 4 / (300 * GB) + 1 / 2 / (25 * GB))
    assert lines == (pytest.approx(staged), pytest.approx(direct))


@given(st.integers(2, 16), st.sampled_from(["switch", "mesh", "ring", "line"]))
def test_steps_and_rates_of_kinds(n: int, kind: str) -> None:
    span = Span(n, 60 * GB, US, 0.0, kind)
    links = {"mesh": n - 1, "ring": 2}.get(kind, 1)
    assert collective_time_s("collective-permute", 1e9, (span,)) == pytest.approx(
        US + links * 1e9 / (60 * GB)
    )
    # an all-gather that sends on all its links at once cannot beat what one device must receive
    latency, slope = collective_lines("all-gather", (span,))[0]
    assert slope == pytest.approx((n - 1) / n / (60 * GB))
    hops = {"mesh": [1], "ring": [min(d, n - d) for d in range(n)]}.get(kind, list(range(n)))
    assert latency == pytest.approx(max(hops) * US), "as many steps as the farthest member is away"


# --- collectives: brute force
# ----------------------------------------------------------------------------------------------------------


def _gathered(sizes: tuple[int, ...]) -> list[float]:
    """Shares of the full tensor one device receives per level: outer levels gather first, counted
    by sets of shards."""
    home = tuple(0 for _ in sizes)
    have, received = {home}, [0.0] * len(sizes)
    for level in reversed(range(len(sizes))):
        grown = {(*s[:level], i, *s[level + 1 :]) for s in have for i in range(sizes[level])}
        received[level] = len(grown - have) / math.prod(sizes)
        have = grown
    assert len(have) == math.prod(sizes)
    return received


@pytest.mark.parametrize("sizes", [(2,), (8,), (8, 2), (2, 8), (3, 5), (4, 3, 2)])
def test_hierarchical_gather_moves_what_sets_of_shards_say(sizes: tuple[int, ...]) -> None:
    for slow in range(
        len(sizes)
    ):  # a level slow enough to set the pace shows its bytes as the slope
        group = tuple(Span(n, 1.0 if i == slow else 1e6, US) for i, n in enumerate(sizes))
        assert collective_lines("all-gather", group)[0][1] == pytest.approx(_gathered(sizes)[slow])
        assert collective_lines("all-reduce", group)[-1][1] == pytest.approx(
            2 * _gathered(sizes)[slow]
        )


def _exchanged(sizes: tuple[int, ...]) -> list[float]:
    """Share of its payload one device sends per level in a direct all-to-all: by the outermost
    level at which the receiver differs."""
    sent = [0.0] * len(sizes)
    for other in product(*(range(n) for n in sizes)):
        differs = [i for i, x in enumerate(other) if x]
        if differs:
            sent[max(differs)] += 1 / math.prod(sizes)
    return sent


@pytest.mark.parametrize("sizes", [(2,), (8,), (8, 2), (2, 8), (4, 3, 2)])
def test_direct_all_to_all_moves_what_receivers_say(sizes: tuple[int, ...]) -> None:
    for slow in range(len(sizes)):
        group = tuple(Span(n, 1.0 if i == slow else 1e6, US) for i, n in enumerate(sizes))
        assert collective_lines("all-to-all", group)[-1][1] == pytest.approx(
            _exchanged(sizes)[slow]
        )


def _busiest_link(shape: tuple[int, ...], wrap: bool) -> list[float]:
    """Per dim the largest load of a link and direction when all pairs exchange 1/n of a unit,
    routed dim after dim, ties of direction shared."""
    loads: dict[tuple[int, tuple[int, ...], int], float] = {}
    places = list(product(*(range(n) for n in shape)))
    for source, target in product(places, places):
        at = list(source)
        for dim, n in enumerate(shape):
            forward = (target[dim] - at[dim]) % n
            if not wrap:
                ways = [(1 if target[dim] > at[dim] else -1, abs(target[dim] - at[dim]), 1.0)]
            elif 2 * forward == n:
                ways = [(1, forward, 0.5), (-1, forward, 0.5)]
            else:
                ways = [(1, forward, 1.0)] if 2 * forward < n else [(-1, n - forward, 1.0)]
            for step, hops, share in ways:
                x = list(at)
                for _ in range(hops):
                    key = (dim, tuple(x), step)
                    loads[key] = loads.get(key, 0.0) + share / len(places)
                    x[dim] = (x[dim] + step) % n
            at[dim] = target[dim]
    return [
        max((load for (d, _, _), load in loads.items() if d == dim), default=0.0)
        for dim in range(len(shape))
    ]


@pytest.mark.parametrize(
    ("shape", "wrap"),
    [((2,), False), *product([(3,), (4,), (5,), (8,), (4, 4), (4, 6), (4, 4, 4)], [False, True])],
)
def test_all_to_all_on_a_torus_loads_links_as_routes_say(
    shape: tuple[int, ...], wrap: bool
) -> None:
    loads = _busiest_link(shape, wrap)
    group = tuple(
        Span(n, 2.0 if wrap else 1.0, US, 0.0, "ring" if wrap else "line") for n in shape
    )  # links of 1 byte per second
    assert collective_lines("all-to-all", group)[-1][1] == pytest.approx(max(loads))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 3, 4, 8, 16]), st.sampled_from([1.0, 2.0, 0.25, 0.5, 3.0])),
        min_size=1,
        max_size=3,
    )
)
def test_torus_gather_equals_the_best_mixture_of_dim_orders(dims: list[tuple[int, float]]) -> None:
    """Linear program: share x_o of the payload for every order o of the dims, time = max over dims
    of traffic / bandwidth."""
    from scipy.optimize import linprog

    orders = list(permutations(range(len(dims))))
    total = math.prod(n for n, _ in dims)
    rows = []
    for i, (_, rate) in enumerate(dims):
        row = []
        for order in orders:
            before = math.prod(
                dims[j][0] for j in order[: order.index(i)]
            )  # shards already gathered
            row.append(before * (dims[i][0] - 1) / total / rate)
        rows.append([*row, -1.0])
    best = linprog(
        [0.0] * len(orders) + [1.0], rows, [0.0] * len(dims), [[1.0] * len(orders) + [0.0]], [1.0]
    )
    group = tuple(Span(n, rate, US, 0.0, "line") for n, rate in dims)
    assert collective_lines("all-gather", group)[0][1] == pytest.approx(best.fun, rel=1e-6)


# --- collectives: laws
# -----------------------------------------------------------------------------------------------------------------


@given(KIND, GROUPS, st.floats(1, 1e11), st.floats(1, 4))
def test_time_never_falls_with_payload(
    kind: str, group: tuple[Span, ...], payload: float, factor: float
) -> None:
    small, large = (
        collective_time_s(kind, payload, group),
        collective_time_s(kind, payload * factor, group),
    )
    assert 0 <= small <= large * (1 + 1e-12)
    assert large <= small * factor * (1 + 1e-9), (
        "one large collective never costs more than its parts"
    )


@given(KIND, GROUPS, st.integers(0, 3), st.floats(0.01, 1), st.floats(1, 100), st.floats(1, 1e11))
def test_a_slower_link_is_never_faster(
    kind: str, group: tuple[Span, ...], which: int, slower: float, later: float, payload: float
) -> None:
    i = which % len(group)
    s = group[i]
    worse = dataclasses.replace(
        s,
        bytes_per_s=s.bytes_per_s * slower,
        latency_s=s.latency_s * later,
        bus_bytes_per_s=s.bus_bytes_per_s * slower,
    )
    assert collective_time_s(
        kind, payload, (*group[:i], worse, *group[i + 1 :])
    ) >= collective_time_s(kind, payload, group) * (1 - 1e-12)


@given(KIND, GROUPS, st.integers(0, 4), st.floats(0, 1e10))
def test_levels_with_one_member_change_nothing(
    kind: str, group: tuple[Span, ...], at: int, payload: float
) -> None:
    alone = Span(1, 1.0, 1.0)
    assert collective_time_s(kind, payload, (*group[:at], alone, *group[at:])) == collective_time_s(
        kind, payload, group
    )
    assert collective_time_s(kind, payload, (alone,)) == 0
    assert collective_time_s(kind, 0, group) == 0


@given(GROUPS)
def test_an_all_reduce_is_at_most_a_scatter_and_a_gather(group: tuple[Span, ...]) -> None:
    for payload in (1e3, 1e6, 1e9):
        parts = collective_time_s("reduce-scatter", payload, group) + collective_time_s(
            "all-gather", payload, group
        )
        assert collective_time_s("all-reduce", payload, group) <= parts * (1 + 1e-9)


@given(st.integers(0, 10**15), st.integers(1, 10**5))
def test_wire_bytes_are_exact(payload: int, n: int) -> None:
    gather = wire_bytes("all-gather", payload, n)
    assert isinstance(gather, Fraction) and gather * n == payload * (n - 1)
    assert (
        wire_bytes("reduce-scatter", payload, n) == wire_bytes("all-to-all", payload, n) == gather
    )
    assert wire_bytes("all-reduce", payload, n) == 2 * gather
    assert wire_bytes("collective-permute", payload, n) == payload


def test_unknown_collectives_are_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        collective_lines("broadcast", (Span(2, 1.0, 1.0),))


# --- devices
# ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=device_names())
def shipped(request) -> Device:
    return load_device(request.param)


def test_every_figure_says_where_it_is_from(shipped: Device) -> None:
    keys = {key for key, _ in figures(shipped)}
    assert {
        "memory.capacity",
        "memory.context",
        "memory.bandwidth",
        "memory.efficiency",
        "kernel.launch",
        "matmul.efficiency",
        "inner.bandwidth",
        "inner.efficiency",
        "inner.latency",
        "outer.bandwidth",
        "outer.efficiency",
        "outer.latency",
        "host.bandwidth",
        "node_size",
    } <= keys
    assert keys <= set(shipped.sources) | set(shipped.guessed)
    assert not set(shipped.sources) & set(shipped.guessed)
    assert set(shipped.sources) | set(shipped.guessed) <= keys | {"matmul.flops"}, (
        "a source for a figure that is not there"
    )
    assert all(len(text) > 3 for text in (*shipped.sources.values(), *shipped.guessed.values()))
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", shipped.date)


def test_shipped_devices_are_named_after_their_file_and_sane(shipped: Device) -> None:
    assert load_device(str(DEVICES / f"{shipped.name}.toml")).name == shipped.name
    assert shipped.kind in ("gpu", "tpu", "cpu")
    assert shipped.context_bytes < shipped.memory_bytes / 10
    assert shipped.outer.bandwidth_bytes_per_s < shipped.inner.bandwidth_bytes_per_s
    assert shipped.inner.all_reduce_bytes_per_s < 2 * shipped.inner.bandwidth_bytes_per_s
    if shipped.inner.torus_dims:
        assert shipped.node_size == math.prod(shipped.inner.torus_pod) * shipped.package_size


def test_figures_that_others_publish() -> None:
    a100, h100, v7x = load_device("a100-80gb"), load_device("h100-sxm"), load_device("tpu-v7x")
    assert (a100.memory_bytes, load_device("a100-40gb").memory_bytes) == (80 * 2**30, 40 * 2**30)
    assert (
        h100.peak("bfloat16") == 989e12
        and h100.memory_bytes_per_s == 3350e9
        and h100.inner.bandwidth_bytes_per_s == 450e9
    )
    assert (
        load_device("gb200-nvl72").node_size,
        v7x.package_size,
        load_device("tpu-v5e").inner.torus_dims,
    ) == (72, 2, 2)
    assert v7x.efficiency(2 * 1024**3) * v7x.peak("bfloat16") == pytest.approx(350e12, rel=0.03)
    assert v7x.efficiency(2 * 4096**3) * v7x.peak("bfloat16") == pytest.approx(893e12, rel=0.01)


def test_versions_of_a_chip_are_told_apart_by_what_jax_calls_them() -> None:
    said = {
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA H800": "h800-sxm",
        "NVIDIA L40": "l40",
        "NVIDIA L40S": "l40s",
        "NVIDIA A40": "a40",
        "NVIDIA RTX A4000": "",
        "NVIDIA RTX A6000": "rtx-a6000",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A800-SXM4-80GB": "a800-80gb",
        "Tesla T4": "t4",
    }
    assert {text: device_spelled(text) for text in said} == said


def test_aliases_are_names_of_one_device() -> None:
    listed = [a for name in device_names() for a in load_device(name).aliases]
    assert (
        len(listed) == len(set(listed))
        and not set(listed) & set(device_names())
        and all(a == a.lower() for a in listed)
    )
    assert dict(aliases()) == {
        a: name for name in device_names() for a in load_device(name).aliases
    }
    assert [load_device(a).name for a in ("h100", "A100", "v5e", "gb200", "TPU7x")] == [
        "h100-sxm",
        "a100-80gb",
        "tpu-v5e",
        "gb200-nvl72",
        "tpu-v7x",
    ]


def test_power_and_prices_are_dated_defaults_and_unknown_ones_are_left_out(shipped: Device) -> None:
    for key, value, low, high in (
        ("power.device", shipped.watts, 50, 2000),
        ("price.device", shipped.usd_per_h, 0.5, 50),
    ):
        assert (key in shipped.sources) == (value is not None), (
            "a figure nobody publishes is no guess of ours"
        )
        assert value is None or low < value < high
    text = describe(shipped)
    assert ("not known" in text) == (None in (shipped.watts, shipped.usd_per_h))
    facts = json.loads(json.dumps(as_json(shipped)))
    assert (facts["usd_per_h"], facts["inner"]["bandwidth_bytes_per_s"]) == (
        shipped.usd_per_h,
        shipped.inner.bandwidth_bytes_per_s,
    )


def test_types_without_a_rate_take_a_related_one() -> None:
    v100, cpu, tpu = load_device("v100-32gb"), load_device("cpu"), load_device("tpu-v4")
    assert v100.peak("float16") == 125e12 and v100.peak("bfloat16") == v100.peak("float32"), (
        "no bfloat16 units before Ampere"
    )
    assert cpu.peak("bfloat16") == cpu.peak("float32") == cpu.peak("float64")
    assert tpu.peak("float8_e4m3fn") == tpu.peak("float16") == tpu.peak("bfloat16")


@given(st.sampled_from(device_names()), st.floats(1, 1e15), st.floats(1, 10))
def test_larger_products_are_more_efficient_and_never_quicker(
    name: str, flops: float, factor: float
) -> None:
    chip = load_device(name)
    assert 0 < chip.efficiency(flops) <= chip.efficiency(flops * factor) * (1 + 1e-9) <= 1 + 1e-9
    assert roofline_time_s(chip, flops, 0, "bfloat16") <= roofline_time_s(
        chip, flops * factor, 0, "bfloat16"
    ) * (1 + 1e-9)


def test_the_curve_passes_through_its_points(shipped: Device) -> None:
    for x, y in zip(shipped.matmul_flops, shipped.matmul_efficiency, strict=True):
        assert shipped.efficiency(x) == pytest.approx(y)
    for (x0, x1), (y0, y1) in zip(
        pairwise(shipped.matmul_flops), pairwise(shipped.matmul_efficiency), strict=True
    ):
        assert shipped.efficiency(math.sqrt(x0 * x1)) == pytest.approx(math.sqrt(y0 * y1)), (
            "a power law between points"
        )


def _h100() -> dict:
    return tomllib.loads((DEVICES / "h100-sxm.toml").read_text())


REQUIRED = (
    "name",
    "kind",
    "node_size",
    "peak",
    "matmul.flops",
    "matmul.efficiency",
    "memory.capacity",
    "memory.context",
    "memory.bandwidth",
    "memory.efficiency",
    "kernel.launch",
    "attention.kernel",
    "attention.forward",
    "attention.backward",
    "inner.bandwidth",
    "inner.efficiency",
    "inner.latency",
    "outer",
    "outer.bandwidth",
    "host.bandwidth",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    data = _h100()
    *tables, last = key.split(".")
    del (data[tables[0]] if tables else data)[last]
    with pytest.raises(DeviceError, match=rf"mine\.toml: key '{key}' is missing"):
        from_table(data, "mine.toml")


BAD = [
    ("memory.capacity", "80", "number and a unit"),
    ("memory.capacity", "80 GB/s", "not a unit of size"),
    ("memory.capacity", 80, "number and a unit"),
    ("memory.capacity", "0 GiB", "above 0"),
    ("memory.context", "90 GiB", "leaves nothing of memory.capacity"),
    ("memory.bandwidth", "3350 GB", "not a unit of bandwidth"),
    ("memory.efficiency", 84, "at most 1"),
    ("memory.efficiency", "0.8", "at most 1"),
    ("memory.efficiency", float("nan"), "at most 1"),
    ("inner.efficiency", 0, "above 0"),
    ("inner.bandwidth", "0 GB/s", "above 0"),
    ("inner.latency", "3", "number and a unit"),
    ("inner.kind", "bus", "one of switch, mesh"),
    ("inner.bandwith", "1 GB/s", "'inner.bandwith' is not known"),
    ("inner.torus_dims", 4, "torus_dims"),
    ("inner.torus_dims", 3, "torus_pod"),
    ("outer", "50 GB/s", "is a table"),
    ("node_size", 0, "at least 1"),
    ("node_size", 8.5, "whole number"),
    ("node_size", True, "whole number"),
    ("kind", "abacus", "one of gpu, tpu, cpu"),
    ("attention.kernel", "flash", "one of cudnn, splash"),
    ("attention.forward", [60, 0.5, 0.5], "at most 1"),
    ("attention.backward", [0, 0.5, 0.5], "above 0"),
    ("attention.forward", 0.5, "1 figures where 3"),
    ("attention.widths", [64, 128, 128], "do not rise"),
    ("attention.passes", [-1, 1], "at least 0"),
    ("matmul.efficiency", [0.1], "as many"),
    ("matmul.efficiency", [0.05, 0.1, 0.2, 0.22, 0.5, 0.68, 1.2], "as many"),
    ("matmul.efficiency", [0.05, 0.1, 0.2, 0.22, 0.5, 0.4, 0.74], "must rise"),
    ("matmul.efficiency", [0.01, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], "no faster than"),
    ("matmul.flops", [1e9, 1e8, 1e10, 1e11, 1e12], "rising"),
    ("matmul.flops", "many", "could not convert"),
    ("peak", {}, "at least one type"),
    ("peak.bfloat16", "989 TFLOPS", "TFLOP/s"),
    ("package", {"size": 2, "bandwidth": "1 GB/s", "efficiency": 1.0, "latency": "1 us"}, "torus"),
    ("inner.all_reduce_latency", "70", "a unit"),
    ("power.device", "700", "is not a power"),
    ("price.device", "6.88 USD", "not a unit of price"),
    ("price.device", "0 USD/h", "above 0"),
    ("outer.all_reduce_latency", "70 us", "is not known"),
    ("colour", "green", "'colour' is not known"),
    ("memory", 80, "is a table"),
]


@pytest.mark.parametrize(("key", "value", "says"), BAD)
def test_a_bad_value_is_named(key: str, value: object, says: str) -> None:
    data = copy.deepcopy(_h100())
    *tables, last = key.split(".")
    (data[tables[0]] if tables else data)[last] = value
    with pytest.raises(DeviceError, match=says) as e:
        from_table(data, "mine.toml")
    assert str(e.value).startswith("mine.toml: ")


def test_what_a_device_file_may_leave_out() -> None:
    data = _h100()
    for table in ("date", "sources", "guessed", "aliases", "power", "price"):
        del data[table]
    del data["inner"]["all_reduce_bandwidth"]
    with pytest.raises(DeviceError, match="all_reduce_latency belongs to all_reduce_bandwidth"):
        from_table(data, "mine.toml")
    del data["inner"]["all_reduce_latency"]
    device = from_table(data, "mine.toml")
    assert (
        device.date,
        device.inner.all_reduce_bytes_per_s,
        device.aliases,
        device.watts,
        device.usd_per_h,
    ) == ("", 0.0, (), None, None)


def test_a_file_that_was_edited_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, as in a notebook; so is another folder's file of the same name."""
    text = (DEVICES / "a100-80gb.toml").read_text()
    monkeypatch.chdir(tmp_path)
    path = Path("mine.toml")
    path.write_text(text)
    assert load_device("mine.toml").outer.bandwidth_bytes_per_s == 25e9
    path.write_text(text.replace('bandwidth = "25 GB/s"', 'bandwidth = "50 GB/s"'))
    assert load_device("mine.toml").outer.bandwidth_bytes_per_s == 50e9
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    path.write_text(text)
    assert load_device("mine.toml").outer.bandwidth_bytes_per_s == 25e9
    assert load_device("a100") is load_device("A100-80GB")


def test_files_that_are_not_device_files(tmp_path) -> None:
    for content in (b"", b"name = ", b"\xff\xfe\x00", b"name = 'x'"):
        path = tmp_path / "x.toml"
        path.write_bytes(content)
        with pytest.raises(DeviceError, match=r"x\.toml"):
            load_device(str(path))
    for name in ("h1000", "", ".", "../../etc"):
        with pytest.raises(DeviceError):
            load_device(name)


def test_descriptions_hold_every_figure_and_stay_narrow(shipped: Device) -> None:
    text = describe(shipped)
    assert max(map(len, text.splitlines())) <= 110
    squeezed = " ".join(text.split())
    for key, value in figures(shipped):
        assert key in squeezed and value.split(",")[0] in squeezed
        first = origin(shipped, key).split()[:2]
        assert " ".join(first) in squeezed
    assert ("guessed: " in text) == bool(shipped.guessed)


def test_overview_lists_what_ships() -> None:
    lines = overview().splitlines()
    assert [line.split()[0] for line in lines[1 : len(device_names()) + 1]] == list(device_names())
    assert max(map(len, lines)) <= 120
    assert (
        "7 x 64 mesh" in overview()
        and "6 x 45 torus" in overview()
        and re.search("\nv100-32gb +125 ", overview())
        and "700   6.88" in overview()
    )


# --- kernels, precision, memory
# --------------------------------------------------------------------------------------------------------


def test_roofline_by_hand() -> None:
    h100 = load_device("h100-sxm")
    assert roofline_time_s(h100, 1e12, 1e6, "bfloat16") == pytest.approx(1e12 / (989e12 * 0.74))
    assert roofline_time_s(h100, 1e12, 1e6, "float8_e4m3fn") == pytest.approx(
        1e12 / (1979e12 * 0.74)
    )
    assert roofline_time_s(h100, 1e6, 3350e6 * 0.86, "bfloat16") == pytest.approx(1e-3)
    assert roofline_time_s(h100, 10, 10, "bfloat16") == h100.launch_s == 4e-6
    assert roofline_time_s(h100, 0, 0, "bfloat16") == 0
    assert optimizer_time_s(h100, 1e9, 38) == pytest.approx(38e9 / (3350e9 * 0.86))


def test_a_table_of_earlier_versions_has_no_effect() -> None:
    """Files of users may hold what earlier versions called the efficiency of attention."""
    plain = {key: value for key, value in _h100().items() if key != "attention"}
    older = {**plain, "attention": {"efficiency": 0.5}}
    assert from_table(older, "mine.toml") == from_table(plain, "mine.toml")
    assert from_table(older, "mine.toml").attention is None
    with pytest.raises(DeviceError, match="'attention.speed' is not known"):
        from_table({**_h100(), "attention": {"speed": 1}}, "mine.toml")


def test_recipes_hold_the_bytes_they_promise() -> None:
    def parts(name: str, **options: object) -> tuple[float, float, float]:
        r = load_recipe(name, **options)  # type: ignore[arg-type]
        return r.parameter_bytes, r.gradient_bytes, r.state_bytes

    assert parts("bf16-mixed") == (2, 2, 12) and parts("fp16") == (2, 2, 12)
    assert parts("bf16-pure") == (2, 2, 4) and parts("bf16-pure", optimizer="lion") == (2, 2, 2)
    assert parts("fp32") == (4, 4, 8)
    assert parts("bf16-mixed", optimizer="sgd") == (2, 2, 4) and parts("fp32", optimizer="sgd") == (
        4,
        4,
        0,
    )
    assert recipe_names()[0] == "bf16-mixed"
    for name in recipe_names():
        trained, served = load_recipe(name), load_recipe(name, training=False)
        assert (served.gradient_bytes, served.state_bytes, served.reduction_bytes) == (0, 0, 0)
        assert served.parameter_bytes == trained.parameter_bytes
        assert (
            "master" not in served.describe()
            and "gradients" not in served.describe()
            and f"{served.parameter_bytes:g} bytes" in served.describe()
        )
        assert (
            name in trained.describe() and ("not emitted" in trained.describe()) != trained.emitted
        )
    with pytest.raises(KeyError):
        load_recipe("fp12")
    with pytest.raises(KeyError):
        load_recipe("fp32", optimizer="adamax")


def test_capacity_parts_add_up(shipped: Device) -> None:
    for devices in (1, 8):
        c = capacity(shipped, devices)
        assert c.usable == c.capacity - c.context - c.collective_buffers - c.reserve
        assert c.collective_buffers == (
            COLLECTIVE_BUFFERS_BYTES if devices > 1 and shipped.kind == "gpu" else 0
        )
        assert 0.85 * c.capacity < c.usable < c.capacity == shipped.memory_bytes
    assert capacity(shipped, 8, 0).usable - capacity(shipped, 8, 10**9).usable == 10**9


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((64, 64, 112, 112), 64 * 128 * 112**2),
        ((64, 256, 56, 56), 64 * 256 * 56**2),
        ((64, 3, 224, 224), 4 * 128 * 224**2),
        ((4, 512, 7, 7), 4 * 512 * 49),
        ((9, 130, 5), min(16 * 256, 136 * 128) * 5),
        ((1, 1, 8), 128 * 8),
    ],
)
def test_images_take_whole_tiles(shape: tuple[int, ...], stored: int) -> None:
    """The first three as libtpu 0.0.42 stores them: bf16[64,64,112,112]{1,0,3,2:T(8,128)(2,1)} in
    205,520,896 B, [64,3,224,224]{0,1,3,2:T(4,128)(2,1)} in 51,380,224 B."""
    assert tiled_image(shape, (8, 128)) == stored >= math.prod(shape)


def test_heads_take_whole_lanes() -> None:
    """As libtpu 0.0.42 stores bf16[12,8,12,1024,64]{4,3,2,1,0:T(8,128)(2,1)}: 301,989,888 B."""
    assert 2 * tiled_rows((12, 8, 12, 1024, 64), (8, 128)) == 301_989_888
    assert tiled_rows((8, 12, 1024, 128), (8, 128)) == 8 * 12 * 1024 * 128


def test_tiles_are_read_and_checked() -> None:
    assert all(
        (load_device(name).tile == (8, 128)) == (load_device(name).kind == "tpu")
        for name in device_names()
    )
    table = tomllib.loads((DEVICES / "tpu-v5e.toml").read_text())
    with pytest.raises(DeviceError, match="memory.tile"):
        from_table({**table, "memory": {**table["memory"], "tile": [8, 0]}}, "here")


def test_default_reserve_is_two_gib_or_a_small_share() -> None:
    assert capacity(load_device("h100-sxm"), 8).reserve == 2 * 2**30
    assert capacity(load_device("tpu-v5e"), 8).reserve == load_device("tpu-v5e").memory_bytes // 25
    assert Breakdown(1, 2, 3, 4, 5).total == 15


def test_every_constant_of_a_runtime_says_where_it_is_from() -> None:
    for name in runtime_names():
        runtime, plain = load_runtime(name), Runtime(name, 0, 0, (0, 0), (0, 0), 0, 0, "")
        said = {**runtime.sources, **runtime.guessed}
        differing = {
            f.name
            for f in dataclasses.fields(Runtime)
            if f.name not in ("name", "note", "overlap", "sources", "guessed")
            and getattr(runtime, f.name) != getattr(plain, f.name)
        }
        assert differing | {"overlap"} == set(said), name
        assert all(said.values()) and runtime.sources.keys().isdisjoint(runtime.guessed)


def test_sets_of_kernels_differ_from_their_base_where_their_files_say() -> None:
    plain, flash1 = load_kernels("fsdp"), load_kernels("flash1")
    assert plain.saved["norm"] == 2.302 and plain.flash
    assert flash1.saved == {**plain.saved, "norm": 5.951, "attention": 2.0}
    assert flash1.passes == {**plain.passes, "norm": (20.0, 30.0)}
    assert (flash1.attention, flash1.logit_saved) == ("flash1", 17.413)
    assert {"fsdp", "flash1", "torch"} <= set(kernel_set_names())
    with pytest.raises(KeyError):
        load_runtime("pathways")
