"""Extents of products under a split, and that their prices are those of the gradients, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodels.precision import load_recipe
from costmodels.products import Product, product_time_s
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.ops import operator_of
from planner.pricing.kernels import kernel_times, local_bytes
from planner.pricing.pricer import Pricer
from planner.pricing.product_extents import product_of
from planner.pricing.split_arrays import SplitArrays
from planner.sharding.rule import Split, parse
from planner.workload.model import Model, Workload

MESH = {"data": 2, "tensor": 4}


def pricer() -> Pricer:
    topology = for_devices("h100-sxm", 8)
    mesh = pinned_mesh(topology, MESH)
    return Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))


def extents(line: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], split: Split) -> tuple:
    rule = parse(line, shapes, [out])
    factors = np.prod(list(rule.sizes.values()), dtype=float)
    rule = replace(rule, flops=2.0 * factors)
    cuts = SplitArrays.of((split,), MESH)
    found = product_of(rule, cuts, rule.flops * cuts.share(rule))
    assert found is not None
    return tuple(float(x[0]) for x in (found.rows, found.columns, found.sums, found.batch))


def test_extents_are_read_off_the_rule() -> None:
    whole, cut = Split(), Split.of({"n": ("tensor",), "b": ("data",)})
    assert extents("b m k, k n -> b m n", [(4, 8, 16), (16, 32)], (4, 8, 32), whole) == (
        *(32, 32, 16),
        1,
    )
    assert extents("b m k, k n -> b m n", [(4, 8, 16), (16, 32)], (4, 8, 32), cut) == (16, 8, 16, 1)
    assert extents("b m k, b k n -> b m n", [(4, 8, 16), (4, 16, 32)], (4, 8, 32), cut) == (
        *(8, 8, 16),
        2,
    )
    summed = Split.of({"k": ("tensor",)})
    assert extents("m k, k n -> m n", [(8, 16), (16, 32)], (8, 32), summed) == (8, 32, 4, 1)
    convolution = "n c h! w!, o c i! j! -> n o y! x!"
    rule = parse(convolution, [(2, 3, 8, 8), (16, 3, 3, 3)], [(2, 16, 6, 6)])
    rule = replace(rule, flops=2.0 * 2 * 16 * 36 * 27)
    found = product_of(rule, SplitArrays.of((whole,), MESH), np.array([rule.flops]))
    assert found is not None
    assert (found.rows[0], found.columns[0], found.sums[0]) == (72, 16, 27)


def test_a_convolution_in_groups_has_no_extents() -> None:
    """Mamba's, each channel by itself: as products of one column they took 14 times their bytes."""
    rule = parse("n c y, c i! -> n c y", [(8, 64, 64), (64, 4)], [(8, 64, 64)])
    rule = replace(rule, flops=2.0 * 8 * 64 * 64 * 4)
    assert product_of(rule, SplitArrays.of((Split(),), MESH), np.array([rule.flops])) is None


def test_padding_leaves_whole_extents() -> None:
    """GPT-2's odd vocabulary, padded to 128 classes: a trillionth more would fill another tile."""
    rule = parse("m k, n k -> m n", [(8192, 768), (50257, 768)], [(8192, 50257)])
    flops = np.array([2.0 * 8192 * 768 * 50257 * (50304 / 50257)])
    cuts = SplitArrays.of((Split(),), MESH)
    found = product_of(replace(rule, flops=flops[0]), cuts, flops, 50304 / 50257)
    assert found is not None
    assert (found.columns[0], found.sums[0], found.of_left.columns[0]) == (50304, 768, 768)


def test_what_is_no_product_has_no_extents() -> None:
    cuts = SplitArrays.of((Split(),), MESH)
    three = parse("a b, b c, c d -> a d", [(2, 3), (3, 4), (4, 5)], [(2, 5)])
    assert product_of(replace(three, flops=240.0), cuts, np.array([240.0])) is None
    assert product_of(parse("a -> a", [(2,)], [(2,)]), cuts, np.zeros(1)) is None


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet-tiny"])
def test_gradients_are_products_of_their_own(name: str) -> None:
    base = GraphFacts.of(Model.open(f"zoo:{name}", Workload(batch=8)).graph(1), training=True)
    prices, checked = pricer(), 0
    for i, node in enumerate(base.graph.nodes):
        if operator_of(node.op).kind not in ("product", "convolution") or base.rules[i].fringe:
            continue
        rule, split = base.rules[i], Split()
        forward, backward = kernel_times(base, i, split, prices)
        cuts = SplitArrays.of((split,), prices.sizes)
        found = product_of(rule, cuts, rule.flops * cuts.share(rule))
        assert found is not None
        size = np.array([sum(local_bytes(base, i, split, prices))])

        def seconds(of: Product, size: np.ndarray = size) -> float:
            return float(product_time_s(prices.device, of, size, "bfloat16")[0])

        gradients = [
            of
            for slot, of in enumerate((found.of_left, found.of_right))
            if node.inputs[slot] in base.grad
        ]
        assert forward == pytest.approx(seconds(found))
        assert backward == pytest.approx(sum(map(seconds, gradients)))
        checked += 1
    assert checked
