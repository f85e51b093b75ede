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


def test_they_move_bytes_and_launch_nothing() -> None:
    base, pricer = facts("zoo:bert-tiny", training=False), pricer_on("h100-sxm")
    floor = pricer.device.launch_s
    orders = [i for i, node in enumerate(base.graph.nodes) if node.op == "Transpose"]
    for i in (*base.biases, *orders):
        forward, backward = kernel_times(base, i, Split(), pricer)
        assert 0 < forward < floor and backward == 0


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


def test_tpus_do_element_wise_work_in_the_kernels_before_it() -> None:
    base = facts("zoo:llama-tiny", training=True)
    graph, tpu, gpu = base.graph, pricer_on("tpu-v5p"), pricer_on("h100-sxm")
    gates = [i for i in base.after_products if graph.nodes[i].op == "Mul"]
    residuals = [i for i in base.after_products if graph.nodes[i].op == "Add"]
    assert gates and residuals
    for i in base.after_products:
        assert kernel_times(base, i, Split(), tpu) == (0, 0)
        assert sum(kernel_times(base, i, Split(), gpu)) > 0
    moved = [i for i, node in enumerate(graph.nodes) if node.op in ("Transpose", "Concat")]
    assert moved and base.after_products.isdisjoint(moved)
    assert all(sum(kernel_times(base, i, Split(), tpu)) > 0 for i in moved)


def test_scores_that_a_core_has_room_for_move_no_bytes() -> None:
    """ViT-L/16's 197 positions: fewer in a batch take less than in proportion to the rest."""
    times = []
    for batch in (8, 1024):
        workload = Workload("infer", batch=batch)
        base = GraphFacts.of(Model.open("zoo:vit-l16", workload).graph(1), training=False)
        i = next(i for i, node in enumerate(base.graph.nodes) if node.op == "Attention")
        times.append(kernel_times(base, i, Split(), pricer_on("tpu-v6e"))[0] / batch)
    assert times[0] < times[1] / 2
