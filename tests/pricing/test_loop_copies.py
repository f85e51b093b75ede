"""What loops over blocks copy: bytes by hand, the price of a plan against the arrays of the search,
and bounds that hold for every way to recompute."""

from __future__ import annotations

import pytest

import planner
from costmodels.hardware.device import load_device
from costmodels.kernels import loop_copy_time_s
from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.execution.techniques import RECOMPUTE
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.pricing.pricer import Pricer
from planner.search.relaxation import Relaxation
from planner.serving.serve import serve
from planner.solvers import solve
from planner.solvers.problem import Budget
from planner.space.assemble import Techniques, assemble
from planner.space.build import build_space
from planner.space.variables import Space
from planner.workload.model import Model, Workload

GPT = "zoo:gpt2-small,layers=6"
H100 = load_device("h100-sxm")


def space_of(source: str, batch: int) -> Space:
    topology = for_devices("h100-sxm", 8)
    mesh = next(m for m in meshes(topology) if [a.size for a in m.axes] == [4, 2])
    pricer = Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))
    graph = Model.open(source, Workload(batch=batch), 8).graph(1)
    return build_space(GraphFacts.of(graph, training=True), pricer, zero_axes=tuple(pricer.sizes))


def test_a_copy_out_reads_and_writes_and_one_in_fills_the_stack_before() -> None:
    rate = H100.memory_bytes_per_s * H100.memory_efficiency
    assert loop_copy_time_s(H100, 1e9, 0.0) == pytest.approx(2e9 / rate)
    assert loop_copy_time_s(H100, 0.0, 1e9) == pytest.approx(3e9 / rate)


@pytest.mark.parametrize("micro", [1, 2])
def test_weights_are_cut_out_twice_and_gradients_put_in_once(micro: int) -> None:
    """GPT-2 small, data parallel: bytes by hand. Recomputed blocks save the one tensor that enters
    beside that; blocks that are not, much more."""

    def copied_s(pins: str) -> float:
        s = planner.plan(GPT, devices=8, batch=64, hardware="h100-sxm", pins=pins, baselines=False)
        return s.cost.loop_copy_time_s

    rate = H100.memory_bytes_per_s * H100.memory_efficiency
    pins = f"dp=8,zero=0,micro={micro},recompute=block"
    hidden, layers, rows = 768, 6, 64 // 8 * 1024
    products = 12 * hidden**2 * 2  # bytes of a layer in bfloat16, read forward and backward
    biases = (9 + 4) * hidden * 2  # with the norms' scales; not all are read backward
    least = micro * layers * 7 * products + layers * 5 * rows * hidden * 2
    most = least + micro * layers * 7 * biases
    assert least / rate <= copied_s(pins) <= most / rate
    assert copied_s(f"dp=8,zero=0,micro={micro},recompute=none") > 2 * copied_s(pins)


def test_programs_without_loops_copy_nothing() -> None:
    s = planner.plan("zoo:resnet-tiny", devices=8, batch=64, hardware="h100-sxm", pins="dp=8")
    assert "loop_copy_time_s" not in s.costs


@pytest.mark.parametrize("source", [GPT, "zoo:llama-tiny,layers=4"])
def test_bounds_hold_for_every_way_to_recompute(source: str) -> None:
    """Small blocks are faster recomputed than saved: what is known of one way to recompute bounds
    another only by the difference."""
    space = space_of(source, 64)
    relaxed = Relaxation(space)
    least = relaxed.least([0, 1, 2, 3])
    best = {}
    for recompute in RECOMPUTE:
        at = Techniques(1, recompute, 1)
        solution = solve(assemble(space, at, None), "dp", Budget())
        assert solution.bound is not None
        best[recompute] = solution.bound * 1e-12
        assert least + relaxed.recompute_adds_s(recompute) <= best[recompute] * (1 + 1e-9)
    for known in RECOMPUTE:
        for recompute in RECOMPUTE[RECOMPUTE.index(known) :]:
            changes = relaxed.changes_by_s(Techniques(1, known, 1), Techniques(1, recompute, 1))
            assert best[known] + changes <= best[recompute] * (1 + 1e-9)
    assert (best["block"] < best["none"]) == (source == GPT)


def test_a_forward_pass_cuts_its_weights_out_once_and_programs_that_serve_have_no_stacks() -> None:
    made = planner.plan(
        GPT, devices=1, batch=8, hardware="h100-sxm", workload="infer", baselines=False, cache=None
    )
    base = GraphFacts.of(Model.open(GPT, Workload("infer", batch=8), 1).graph(1), training=False)
    weights = 2 * sum(base.graph.tensors[name].elements for name in base.stacks)
    assert made.costs["loop_copy_time_s"] == pytest.approx(loop_copy_time_s(H100, weights, 0.0))
    assert made.solver["bound_s"] <= made.costs["step_time_s"] * (1 + 1e-9)
    served = serve(
        "zoo:llama-tiny,cache=1", prompt=16, generate=8, concurrency=4, devices=1, hardware="h100"
    )
    for phase in (served.prompts, served.step):
        assert not phase.costs.get("loop_copy_time_s")
