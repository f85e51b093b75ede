"""What Muon's matrices take of a device, held against figures by hand: which weights they are, who
orthogonalises how many, what is sent for it, products, seconds and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner
from costmodels.kernels import memory_time_s
from costmodels.precision import load_recipe
from costmodels.products import Product, product_time_s
from costmodels.runtimes import load_runtime
from planner.emit.runtime.step import newton_schulz
from planner.errors import PlanError
from planner.execution.orthogonalising import TURN_ELEMENTS, Matrices, device_matrices
from planner.execution.plan import WeightPlan
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.pricing.frameworks.orthogonalising import weight_flops
from planner.pricing.orthogonalising import newton_schulz_s
from planner.pricing.pricer import Pricer
from planner.report.summary import summary
from planner.sharding.layout import Layout
from planner.workload.model import Model, Workload

MESH = {"data": 4, "tensor": 2}


def matrices(count: int, cut: tuple[Any, Any], piece: tuple[int, int] = (6, 10)) -> Matrices:
    ways = tuple(int(np.prod([MESH[a] for a in axes])) for axes in cut)
    return Matrices(1, count, piece, cut, ways)  # type: ignore[arg-type]


def test_who_orthogonalises_what_and_what_is_sent_for_it() -> None:
    """Three matrices of which eight devices have a piece each, 6 x 10 of 24 x 20: zeros make them
    four, each device of a row of pieces gets one with its rows whole, 24 x 10; of two devices with
    halves of that both get the other half."""
    found = matrices(3, (("data",), ("tensor",)))
    steps = [(step.kind, step.axes, step.elements) for step in found.exchanges]
    assert steps == [
        ("all-to-all", ("data",), 4 * 6 * 10),
        ("all-gather", ("tensor",), 24 * 20),
        ("all-to-all", ("data",), 4 * 6 * 10),
    ]
    assert (found.own, found.whole) == (1, (24, 20))
    assert matrices(12, (("data", "tensor"), ())).own == 2  # of 16 places 12 are filled
    assert matrices(5, ((), ())).exchanges == () and matrices(5, ((), ())).own == 5


@pytest.mark.parametrize(
    ("repeats", "zero", "expected"),
    [
        # ZeRO-1 over data cuts eight repeats by repeats: nothing is sent for the rows.
        (8, 1, (2, (64, 48), ((), ("tensor",)))),
        # It cannot cut six so, nor does ZeRO-3 do it: rows are cut.
        (6, 1, (6, (16, 48), (("data",), ("tensor",)))),
        (8, 3, (8, (16, 48), (("data",), ("tensor",)))),
        (8, 0, (8, (64, 48), ((), ("tensor",)))),
    ],
)
def test_stacks_are_cut_as_programs_cut_them(repeats: int, zero: int, expected: Any) -> None:
    layout = Layout(((), ("tensor",)))
    weight = WeightPlan(layout, zero, ("data",), 0) if zero else WeightPlan(layout)
    found = device_matrices((64, 96), weight, MESH, repeats=repeats, by_repeats=True)
    assert (found.count, found.piece, found.cut) == expected


def test_seconds_are_those_of_products_and_passes_by_the_device() -> None:
    """One matrix of 1,024 x 4,096 on an H100 in bfloat16: X X', its square, and what they add up to
    times X, five times; between them two sums, and a pass before."""
    topology = for_devices("h100-sxm", 1)
    runtime = load_runtime("jax-shard_map")
    pricer = Pricer(topology, meshes(topology)[0], runtime, load_recipe("bf16-mixed", "muon"))
    one = Matrices(1, 1, (4096, 1024), ((), ()), (1, 1))  # tall: it is turned
    m, n = 1024, 4096
    assert one.flops == 5 * (4 * m * m * n + 2 * m**3)

    def product_s(rows: int, columns: int, sums: int, elements: int) -> float:
        extents = (np.array([float(x)]) for x in (rows, columns, sums, 1))
        size = np.array([2.0 * elements])
        return float(product_time_s(pricer.device, Product(*extents), size, "bfloat16")[0])

    def pass_s(elements: int) -> float:
        return max(float(memory_time_s(pricer.device, 2.0 * elements)), pricer.device.launch_s)

    products = (
        product_s(m, m, n, m * n + m * m)
        + product_s(m, m, m, 2 * m * m)
        + product_s(m, n, m, m * m + 2 * m * n)
    )
    sums = pass_s(3 * m * m) + pass_s(3 * m * n)
    assert newton_schulz_s(one, pricer) == pytest.approx(
        pass_s(3 * m * n) + 5 * (products + sums), rel=1e-12
    )
    assert one.flops / pricer.device.peak("bfloat16") < newton_schulz_s(one, pricer)
    # Two at a time fill the device better than one after the other.
    pairs = newton_schulz_s(Matrices(3, 2, (m, n), ((), ()), (1, 1)), pricer)
    assert 4 < pairs / newton_schulz_s(one, pricer) < 6


def test_programs_take_as_many_at_a_time() -> None:
    assert newton_schulz.TURN_ELEMENTS == TURN_ELEMENTS
    wide = Matrices(1, 12, (2**12, 2**12), ((), ()), (1, 1))
    assert wide.rounds == (3, 4)  # four of 2^24 elements, and no five that divide twelve
    assert Matrices(1, 7, (2**12, 2**12), ((), ()), (1, 1)).rounds == (7, 1)


def test_which_weights_are_matrices_of_hidden_layers() -> None:
    def others(source: str) -> set[str]:
        graph = Model.open(source, Workload(batch=8, optimizer="muon"), 1).graph(1)
        matrices = [n for n in graph.weights if len(graph.tensors[n].shape) > 1]
        return {graph.labels[n] for n in matrices if n not in graph.orthogonalised}

    # The head of the first is the table of its tokens; experts' stacks and routers are matrices.
    assert others("zoo:gpt-tiny") == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert others("zoo:mixtral-tiny") == {"model.embed_tokens.weight", "lm_head.weight"}
    with pytest.raises(PlanError, match=r"P024.*has none"):
        others("zoo:resnet-tiny")
    plain = Model.open("zoo:gpt-tiny", Workload(batch=8), 1).graph(1)
    assert plain.orthogonalised == frozenset()


def test_a_matrix_keeps_one_moment_and_all_else_two() -> None:
    """Of the tiny GPT 98,304 of 133,888 parameters are in matrices of its two blocks."""
    made = {
        optimizer: planner.plan(
            "zoo:gpt-tiny",
            devices=4,
            batch=16,
            precision="bf16-mixed",
            pins="dp=4,zero=0,micro=1",
            optimizer=optimizer,
            baselines=False,
        )
        for optimizer in ("muon", "adamw")
    }
    costs = {optimizer: strategy.costs for optimizer, strategy in made.items()}
    state = {name: c["memory_breakdown_bytes"]["optimizer"] for name, c in costs.items()}
    assert state == {"adamw": 12 * 133_888, "muon": 12 * 133_888 - 4 * 98_304}
    assert costs["muon"]["optimizer_time_s"] > costs["adamw"]["optimizer_time_s"]
    assert 0 < costs["muon"]["newton_schulz_time_s"] < costs["muon"]["optimizer_time_s"]
    assert "of it Newton-Schulz steps" in summary(made["muon"])
    assert "newton_schulz_time_s" not in costs["adamw"]


def test_frameworks_deal_whole_matrices_out_over_the_replicas() -> None:
    """Products of one of eight replicas under ZeRO-1, of all under none; a tensor-parallel rank
    takes its block, 64 x 128 of 64 x 256, by itself."""
    mesh = {"data": 8, "tensor": 2}
    whole = WeightPlan(Layout(((), ())), grad_partial=("data",))
    cut = WeightPlan(Layout(((), ("tensor",))), 1, ("data",), 0, ("data",))
    assert weight_flops((64, 256), whole, mesh) == 5 * (4 * 64**2 * 256 + 2 * 64**3)
    assert weight_flops((64, 256), cut, mesh) == 5 * (4 * 64**2 * 128 + 2 * 64**3) / 8


def test_stages_cut_between_nodes_have_no_matrices_to_orthogonalise() -> None:
    with pytest.raises(PlanError, match=r"(?s)P068.*flat buffers"):
        planner.plan(
            "zoo:mlp-tiny", devices=4, batch=16, pins="pp=2", optimizer="muon", baselines=False
        )
