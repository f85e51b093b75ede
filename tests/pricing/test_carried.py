"""What a GPU's kernels do on their way: biases of products and other orders of elements launch
nothing of their own."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pricing.kernels import kernel_times
from planner.pricing.pricer import Pricer
from planner.sharding.rule import Split
from planner.workload.model import Model, Workload


def facts(spec: str, training: bool) -> GraphFacts:
    workload = Workload("train" if training else "infer", batch=16)
    return GraphFacts.of(Model.open(spec, workload).graph(1), training=training)


def pricer_on(hardware: str) -> Pricer:
    topology = for_devices(hardware, 8)
    mesh = pinned_mesh(topology, {"data": 8})
    return Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))


def test_biases_are_added_to_products_that_nothing_else_reads() -> None:
    base = facts("zoo:bert-tiny", training=False)
    graph = base.graph
    assert len(base.biases) >= 6 * 2  # q, k, v, out, up and down of two layers
    for i in base.biases:
        node = graph.nodes[i]
        products = [graph.producer[n] for n in node.inputs if n in graph.producer]
        assert len(products) == 1 and base.rules[products[0]].flops
        assert len(graph.consumers[graph.nodes[products[0]].outputs[0]]) == 1
    residuals = [
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "Add" and all(n in graph.producer for n in node.inputs)
    ]
    assert residuals and base.biases.isdisjoint(residuals)


@pytest.mark.parametrize(("hardware", "carried"), [("h100-sxm", True), ("tpu-v5p", False)])
def test_they_move_bytes_and_launch_nothing(hardware: str, carried: bool) -> None:
    base, pricer = facts("zoo:bert-tiny", training=False), pricer_on(hardware)
    floor = pricer.device.launch_s
    orders = [i for i, node in enumerate(base.graph.nodes) if node.op == "Transpose"]
    for i in (*base.biases, *orders):
        forward, backward = kernel_times(base, i, Split(), pricer)
        assert forward > 0 and backward == 0
        assert (forward < floor) == carried, base.graph.nodes[i].id


def test_their_gradients_are_kernels() -> None:
    base, pricer = facts("zoo:bert-tiny", training=True), pricer_on("h100-sxm")
    for i in base.biases:
        forward, backward = kernel_times(base, i, Split(), pricer)
        assert forward < pricer.device.launch_s <= backward


def test_large_ones_cost_what_they_move() -> None:
    base, pricer = facts("zoo:bert-base", training=False), pricer_on("h100-sxm")
    whole = [kernel_times(base, i, Split(), pricer)[0] for i in sorted(base.biases)]
    moved = [
        base.graph.tensors[base.graph.nodes[i].outputs[0]].elements * pricer.itemsize("float32")
        for i in sorted(base.biases)
    ]
    rates = np.array(moved) / np.array(whole)
    assert rates == pytest.approx(rates[0])
