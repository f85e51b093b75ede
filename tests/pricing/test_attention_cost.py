"""The price of attention is that of the kernel the emitted program runs it with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models_zoo
from costmodels.hardware.device import AttentionPass, Device, load_device
from costmodels.hardware.mixed import slowest
from costmodels.kernels import attention_time_s, roofline_time_s
from planner.analysis.facts import GraphFacts
from planner.emit.runtime.kernels.fused_attention import splash_blocks
from planner.machine.mesh_choices import pinned_mesh
from planner.ops.attention_cost import attention_passes, kernel_of
from planner.ops.attention_pairs import Positions, around_ring, splash_block
from planner.pricing.kernels import (
    inner_times,
    kernel_times,
    local_bytes,
    pieces_of,
    saved_beside,
    working_bytes,
)
from planner.pricing.pricer import Pricer
from planner.reader import read_model
from planner.search.build_request import make_request
from planner.sharding.rule import Split
from planner.workload.loss import add_loss

HEADS, GROUPS, WIDTH, ROWS = 32, 8, 128, 2048
PAIRS = HEADS * ROWS * ROWS
"""Pairs of a query and a key of all heads."""
ELEMENTS = (2 * HEADS + 2 * GROUPS) * ROWS * WIDTH
"""Of queries, keys, values and the result."""


def facts(model: str = f"zoo:llama3-8b,layers=1,seq={ROWS}") -> GraphFacts:
    """Of one row of the batch, trained."""
    return GraphFacts.of(add_loss(read_model(models_zoo.build(model), batch=1)), training=True)


def pricer(device: str, recipe: str = "bf16-mixed", jit: bool = False) -> Pricer:
    """Prices on one device."""
    request = make_request(
        devices=1, hardware=device, topology=None, precision=recipe, backend="jit" if jit else ""
    )
    mesh = pinned_mesh(request.topology, {"data": 1})
    return Pricer(request.topology, mesh, request.runtime, request.recipe)


def attention(base: GraphFacts) -> int:
    """The first node of attention."""
    return next(i for i, node in enumerate(base.graph.nodes) if node.op == "Attention")


def by_hand_in_blocks(device: Device, blocks: int) -> tuple[float, float]:
    """Seconds forward and backward of causal attention in blocks of queries, in bfloat16. Each
    block meets the keys up to its own last."""
    operands = ELEMENTS / blocks  # of two of four arrays, two bytes each
    scores = [PAIRS / blocks * (k + 1) / blocks for k in range(blocks)]

    def seconds(flops: float, score_bytes: float) -> float:
        return sum(
            roofline_time_s(
                device, flops * n, score_bytes * n + (operands if flops else 0), "bfloat16"
            )
            for n in scores
        )

    products = 2 * WIDTH
    forward = [(products, 4), (0, 4 + 4 + 2), (products, 2)]
    backward = [(products, 4), (0, 4), (0, 6), (products, 2), (0, 8), *[(products, 2)] * 3]
    return sum(seconds(*k) for k in forward), sum(seconds(*k) for k in backward)


@pytest.mark.parametrize(
    ("device", "backward"), [("h100-sxm", 2.5), ("b200", 2.5), ("tpu-v5p", 3.5)]
)
def test_a_fused_kernel_computes_what_the_mask_leaves_and_moves_operands_alone(
    device: str, backward: float
) -> None:
    base, chip = facts(), load_device(device)
    pairs = Positions(True).splash_pairs if chip.attention_kernel == "splash" else None
    seen = (pairs or Positions(True).pairs)(ROWS, ROWS) / ROWS**2
    of = partial(AttentionPass, width=WIDTH)
    flops, statistics = 4 * PAIRS * WIDTH * seen, 4 * HEADS * ROWS
    expected = (
        attention_time_s(chip, flops, 2 * ELEMENTS + statistics, "bfloat16", of(False)),
        attention_time_s(chip, backward * flops, 4 * ELEMENTS + statistics, "bfloat16", of(True)),
    )
    assert kernel_times(base, attention(base), Split(), pricer(device)) == pytest.approx(expected)
    assert chip.attention is not None
    rate = chip.peak("bfloat16") * chip.attention.efficiency(of(False))
    beside = chip.attention.passes[0] * (2 * ELEMENTS + statistics)
    beside /= chip.memory_bytes_per_s * chip.memory_efficiency
    assert expected[0] == pytest.approx(flops / rate + beside)


def test_heads_between_widths_take_the_kernel_of_the_next() -> None:
    found = load_device("h100-sxm").attention
    assert found is not None
    assert found.widths == (64, 128, 256)
    for backward, rates in ((False, found.forward), (True, found.backward)):
        at = {w: found.efficiency(AttentionPass(backward, w)) for w in (32, 64, 96, 128, 192, 256)}
        assert [at[w] for w in found.widths] == list(rates)
        assert at[32] == rates[0] / 2
        assert at[96] == pytest.approx(rates[1] * 96 / 128)
        assert at[192] == pytest.approx(rates[2] * 192 / 256)
        masked = found.efficiency(AttentionPass(backward, 128, masked=True))
        assert masked == pytest.approx(rates[1] * found.masked[backward])


@pytest.mark.parametrize("why", ["device", "jit"])
def test_scores_of_blocks_pass_through_memory(why: str) -> None:
    base = facts()
    prices = pricer("h100-sxm", jit=why == "jit")
    if why == "device":
        bare = replace(prices.topology.device, attention=None)
        prices = replace(prices, topology=replace(prices.topology, device=bare))
    times = kernel_times(base, attention(base), Split(), prices)
    assert times == pytest.approx(by_hand_in_blocks(load_device("h100-sxm"), ROWS // 1024))
    fused = kernel_times(base, attention(base), Split(), pricer("h100-sxm"))
    assert times[0] > 5 * fused[0] and times[1] > 4 * fused[1]


def test_attention_in_float32_runs_in_blocks() -> None:
    base = facts()
    fused, blocks = (pricer("h100-sxm", recipe) for recipe in ("bf16-mixed", "fp32"))
    i = attention(base)
    assert saved_beside(base, i, 0, Split(), fused) == 4 * HEADS * ROWS
    assert saved_beside(base, i, 0, Split(), blocks) == 0
    workspace = [working_bytes(base, i, Split(), 0.0, 0.0, 0.0, p) for p in (fused, blocks)]
    assert workspace == [0.0, HEADS * 1024 * ROWS * (4 + 4 + 4)]


def test_splash_saves_its_result_beside_the_graph_s() -> None:
    base = facts()
    saved = saved_beside(base, attention(base), 0, Split(), pricer("tpu-v5p"))
    assert saved == HEADS * ROWS * (2 * WIDTH + 4)


def test_queries_cut_under_a_causal_mask_leave_the_fused_kernel() -> None:
    base = facts()
    request = make_request(devices=2, hardware="h100-sxm", topology=None, precision="bf16-mixed")
    mesh = pinned_mesh(request.topology, {"data": 2})
    two = Pricer(request.topology, mesh, request.runtime, request.recipe)
    i = attention(base)
    heads, queries = Split.of({"g": ["data"]}), Split.of({"s": ["data"]})
    whole = kernel_times(base, i, Split(), pricer("h100-sxm"))
    cut = kernel_times(base, i, heads, two)
    assert cut == pytest.approx([t / 2 for t in whole], rel=0.01)
    assert sum(kernel_times(base, i, queries, two)) > 2 * sum(cut)
    assert pieces_of(base, i, (queries,), two).attention_kernel == "cudnn"


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3000))
def test_splash_computes_whole_blocks(rows: int, columns: int, window: int) -> None:
    """Of 128 to 1,024 queries and keys, as the kernel is given them."""
    queries, keys = 128 * rows, 128 * columns
    block, near = splash_block(queries), splash_block(keys)
    given_blocks = splash_blocks(queries, keys)
    assert (block, near) == (given_blocks["block_q"], given_blocks["block_kv"])
    at, seen = np.arange(queries)[:, None], np.arange(keys)[None, :]
    met = (seen <= at) & ((seen > at - window) if window else True)
    whole = met.reshape(queries // block, block, keys // near, near).any((1, 3))
    assert Positions(True, window).splash_pairs(queries, keys) == whole.sum() * block * near
    assert Positions().splash_pairs(queries, keys) == queries * keys


def ring_part(device: str) -> float:
    """Part of one device's work that each of eight on a balanced ring has. Splash's blocks are
    smaller there, and of those along the diagonal more is left out."""
    if device != "tpu-v5p":
        return 1 / 8
    met = around_ring(ROWS // 8, ROWS // 8, 8, True)
    pairs = sum(one.often * one.positions.splash_pairs(one.queries, one.keys) for one in met)
    return pairs / Positions(True).splash_pairs(ROWS, ROWS)


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5p"])
def test_a_balanced_ring_is_priced_as_its_part_of_the_causal_work(device: str) -> None:
    """Kernels of attention do their part of what one device would; sends between devices, exchanges
    of halves among them, are priced by their bytes."""
    base = facts()
    request = make_request(
        devices=8, hardware=device, topology=None, precision="bf16-mixed", backend=""
    )
    mesh = pinned_mesh(request.topology, {"data": 8})
    eight = Pricer(request.topology, mesh, request.runtime, request.recipe)
    i, ring = attention(base), Split.of({"ring": ["data"]})
    shapes = base.graph.shapes(base.graph.nodes[i].inputs)
    sizes = [2.0 * prod(shape) for shape in shapes[:3]]

    def work(split: Split, prices: Pricer, part: int) -> list[float]:
        pieces = pieces_of(base, i, (split,), prices)
        operands, results = np.array([sum(sizes) / part]), np.array([sizes[0] / part])
        (passes,) = attention_passes(pieces, operands, results)
        return [sum(k.flops * k.often for k in each if k.attention) for each in passes]

    whole = work(Split(), pricer(device), 1)
    assert work(ring, eight, 8) == pytest.approx([flops * ring_part(device) for flops in whole])
    q, k, v = (size / 8 for size in sizes)
    permutes = (
        [*[k, v] * 7, *[x / 2 for x in (q, k, v, q)]],
        [
            *[k, v] * 7,
            *[2 * k, 2 * v] * 7,  # float32
            *[k, v],
            *[x / 2 for x in (q, k, v, q, q, q, k, v)],
        ],
    )
    expected = [
        sum(eight.collective_s("collective-permute", ("data",), size) for size in each)
        for each in permutes
    ]
    assert inner_times(base, i, ring, eight)[:2] == pytest.approx(expected)


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5p"])
def test_values_cut_along_their_width_save_a_kernel_nothing(device: str) -> None:
    """Every device makes all scores, and the kernel is given values as wide as keys: those of
    heads cut over eight devices are an eighth of that."""
    base = facts()
    i, request = (
        attention(base),
        make_request(devices=8, hardware=device, topology=None, precision="bf16-mixed", backend=""),
    )
    mesh = pinned_mesh(request.topology, {"data": 4, "model": 2})
    eight = Pricer(request.topology, mesh, request.runtime, request.recipe)

    def seconds(**cuts: list[str]) -> float:
        return sum(kernel_times(base, i, Split.of(cuts), eight))

    alone, narrow, heads = seconds(), seconds(e=["data"]), seconds(g=["data"])
    assert narrow > 0.95 * alone > 3.5 * heads
    both = Split.of({"ring": ["data"], "e": ["model"]})
    assert kernel_of(pieces_of(base, i, (both,), eight), both) == "blocks"
    ring = Split.of({"ring": ["data"], "g": ["model"]})
    assert kernel_of(pieces_of(base, i, (ring,), eight), ring) != "blocks"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 50))
def test_pairs_that_positions_leave(queries: int, keys: int, window: int) -> None:
    left = Positions(True, window)
    pairs = sum(
        j <= i and (not window or i - window < j) for i in range(queries) for j in range(keys)
    )
    assert left.pairs(queries, keys) == pairs
    counted = queries * min(window or keys, keys)
    assert left.share(queries, keys) == pytest.approx(pairs / counted)
    assert Positions().pairs(queries, keys) == queries * keys


def test_unlike_devices_have_a_kernel_in_common_or_none() -> None:
    h100, a100 = load_device("h100-sxm"), load_device("a100-80gb")
    both = slowest([(h100, 4), (a100, 4)])
    assert both.attention == a100.attention
    assert slowest([(h100, 4), (load_device("v100-32gb"), 4)]).attention is None
    with pytest.raises(ValueError, match="v100-32gb has no fused attention"):
        attention_time_s(load_device("v100-32gb"), 1.0, 1.0, "float16", AttentionPass(False, 64))


def copied(model: str, batch: int) -> tuple[list[float], list[float]]:
    """Bytes of the kernels around a fused one in both passes, on one H100."""
    graph = add_loss(read_model(models_zoo.build(model), batch=batch))
    base, own = GraphFacts.of(graph, training=True), pricer("h100-sxm")
    i = attention(base)
    pieces = pieces_of(base, i, (Split(),), own)
    operands, results = (np.array([x]) for x in local_bytes(base, i, Split(), own))
    ((forward, backward),) = attention_passes(pieces, operands, results)
    around = [[k.moved_bytes for k in each if not k.attention] for each in (forward, backward)]
    return around[0], around[1]


def test_odd_numbers_of_rows_are_copied_into_the_kernel_and_out_of_it() -> None:
    """ViT-L's 197 positions, compiled for an H100: four copies of 26 MB forward, eight backward."""
    forward, backward = copied("vit-l16", 32)
    one = 2 * 32 * 197 * 1024 * 2
    assert sum(forward) == 4 * one and sum(backward) == 8 * one


def test_values_narrower_than_keys_are_copied_with_zeros_behind_them() -> None:
    """Values of 96 elements beside keys of 192: they are read and written wide, results are read as
    far as they count; queries and keys go as they are. (DeepSeek-V2 Lite's 128 elements compiled to
    copies of 83.89 and 67.11 MB forward, of 83.89, 83.89 and 67.11 MB backward that way.)"""
    forward, backward = copied("deepseek-v2-lite,layers=3,seq=4096,v_dim=96", 2)
    elements = 2 * 4096 * 16
    widened, cut = 2 * elements * (96 + 192), 2 * elements * (96 + 96)
    assert forward == [widened, cut]
    assert backward == [widened, widened, cut]


def test_latent_attention_is_not_copied_on_hopper() -> None:
    """cuDNN takes keys of 192 beside values of 128 as they are."""
    assert copied("deepseek-v2-lite,layers=3,seq=4096", 2) == ([], [])
