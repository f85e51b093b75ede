"""What loops over blocks copy: bytes by hand, the price of a plan against the arrays of the search,
and bounds that hold for every way to recompute."""

from __future__ import annotations

import numpy as np
import pytest

import planner
from costmodels.hardware.device import load_device
from costmodels.kernels import loop_copy_time_s, weight_copy_time_s
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
from planner.space.assemble import assemble
from planner.space.build import build_space
from planner.space.techniques import Techniques
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


def test_small_weights_take_the_launch_floor_each_time() -> None:
    size = np.array([0.0, 2.0, 1e9])
    rate, floor = H100.memory_bytes_per_s * H100.memory_efficiency, H100.launch_s
    assert weight_copy_time_s(H100, size, 2, size).tolist() == pytest.approx(
        [0.0, 3 * floor, 7e9 / rate]
    )
    assert weight_copy_time_s(H100, size, 1, 0 * size)[1] == floor


@pytest.mark.one_in(2)
@pytest.mark.parametrize("micro", [1, 2])
def test_weights_are_cut_out_twice_and_gradients_put_in_once(micro: int) -> None:
    """GPT-2 small, data parallel: bytes by hand, and no copy below the launch floor. Recomputed
    blocks save the one tensor that enters beside that; blocks that are not, much more."""

    def copied_s(pins: str) -> float:
        s = planner.plan(GPT, devices=8, batch=64, hardware="h100-sxm", pins=pins, baselines=False)
        return s.cost.loop_copy_time_s

    rate = H100.memory_bytes_per_s * H100.memory_efficiency
    pins = f"dp=8,zero=0,micro={micro},recompute=block"
    hidden, layers, rows = 768, 6, 64 // 8 * 1024
    products = [n * hidden**2 * 2 for n in (1, 1, 1, 1, 4, 4)]  # read forward and backward
    small = 10 * H100.launch_s  # biases and the norms' scales; not all are read backward
    each = sum(
        2 * max(2 * size / rate, H100.launch_s) + max(3 * size / rate, H100.launch_s)
        for size in products
    )
    entering = layers * 5 * rows * hidden * 2 / rate
    least, most = (micro * layers * (each + n * small) + entering for n in (2, 3))
    assert least <= copied_s(pins) <= most
    assert (
        copied_s(f"dp=8,zero=0,micro={micro},recompute=none,blocks=looped")
        > copied_s(pins) + 3 * entering
    )


def test_programs_without_loops_copy_nothing() -> None:
    s = planner.plan("zoo:resnet-tiny", devices=8, batch=64, hardware="h100-sxm", pins="dp=8")
    assert "loop_copy_time_s" not in s.costs


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", ["none", "block", "save:context+mlp_up"])
def test_tpus_copy_what_norms_and_attention_save(recompute: str) -> None:
    """What products and element-wise operators save is put into its stack by the kernel that makes
    it: bytes by hand. Stacks of weights that both passes read are brought into another order."""
    chip = load_device("tpu-v5p")
    rate = chip.memory_bytes_per_s * chip.memory_efficiency
    pins = f"dp=8,zero=0,micro=1,recompute={recompute}"
    made = planner.plan(GPT, devices=8, batch=64, hardware="v5p", pins=pins, baselines=False)
    layers, hidden, rows = 6, 768, 64 // 8 * 1024
    tensor = layers * rows * hidden * 2
    # What enters the block; with all saved what enters its second norm, q, k, v and the context
    # too, of heads of 64 in tiles of 128, and Splash's own context.
    tensors = {"none": (6, 12), "block": (1, 1), "save:context+mlp_up": (2, 5)}[recompute]
    weights = layers * 12 * hidden**2 * 2
    least, most = (3 * n * tensor + 5 * weights for n in tensors)
    assert least / rate <= made.costs["loop_copy_time_s"] <= 1.08 * most / rate


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", [*RECOMPUTE, "save:q+k+v+context", "save:mlp_up"])
def test_bounds_hold_on_tpus(recompute: str) -> None:
    """The space takes no more than the price of a plan, whatever is saved by name."""
    pins = f"zero=1,micro=1,recompute={recompute}"
    made = planner.plan(
        GPT, devices=8, batch=64, hardware="tpu-v5p", pins=pins, baselines=False, cache=None
    )
    assert made.solver["bound_s"] <= made.cost.step_time_s * (1 + 1e-9)


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
        GPT,
        devices=1,
        batch=8,
        hardware="h100-sxm",
        workload="infer",
        pins="blocks=looped",
        baselines=False,
        cache=None,
    )
    base = GraphFacts.of(Model.open(GPT, Workload("infer", batch=8), 1).graph(1), training=False)
    sizes = [2 * base.graph.tensors[name].elements for name in base.stacks]
    cut = sum(max(loop_copy_time_s(H100, size, 0.0), H100.launch_s) for size in sizes)
    assert made.costs["loop_copy_time_s"] == pytest.approx(cut)
    assert made.solver["bound_s"] <= made.costs["step_time_s"] * (1 + 1e-9)
    served = serve(
        "zoo:llama-tiny,cache=1", prompt=16, generate=8, concurrency=4, devices=1, hardware="h100"
    )
    for phase in (served.prompts, served.step):
        assert not phase.costs.get("loop_copy_time_s")
