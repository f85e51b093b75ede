"""What spaces charge of a plan is no more than its price as a framework runs it: else a plan would
be called the best that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.pins.pins import Pins
from planner.pricing.frameworks.selective import made_again
from planner.search.build_request import build_request
from planner.search.options import MachineOptions, SearchOptions, StepOptions
from planner.search.relaxation import Relaxation
from planner.search.search import Search
from planner.solvers.problem import evaluate
from planner.space.assemble import assemble
from planner.space.option_arrays import arrays_of
from planner.space.techniques import Techniques
from planner.workload.open import open_model


@pytest.mark.one_in(4)
@pytest.mark.parametrize("runtime", ["fsdp", "megatron"])
@pytest.mark.parametrize("source", ["llama3-8b,layers=2", "deepseek-v2-lite,layers=3"])
def test_no_space_charges_more_than_the_price(source: str, runtime: str) -> None:
    """New parameters' gathering hides as gradients' sums do, and what blocks gather is one
    collective a block, beside arithmetic. What recompute with saved collectives runs again is what
    the framework says, not what an emitted program's backward pass asks for."""
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime=runtime),
        SearchOptions(),
    )
    search = Search(open_model(f"zoo:{source}", 16, batch=32), request)
    assert search.run().best is not None
    stages = set()
    for c, space, _, _ in search.details.values():
        _, bound_s = Relaxation(space).free(c.techniques, c.techniques.microbatches)
        assert bound_s <= c.cost.step_time_s * (1 + 1e-9), (c.label, c.mesh.shape, c.techniques)
        stages.add(c.techniques.zero_stage)
    assert {1, 3} <= stages


@pytest.mark.parametrize(
    ("source", "runtime", "pins"),
    [
        ("llama3-8b,layers=8", "megatron", "pp=4,dp=4,vpp=2,zero=1,micro=8"),
        ("llama3-8b,layers=8", "fsdp", "pp=2,dp=8,zero=2,micro=4"),
        ("llama3-8b,layers=4", "megatron", "dp=8,tp=2,zero=1,micro=2"),
        ("llama3-8b,layers=4", "fsdp", "dp=16,zero=3"),
        ("mixtral-8x7b,layers=4,seq=1024", "megatron", "pp=2,dp=2,ep=4,zero=1,micro=4"),
        (
            "mixtral-8x7b,layers=4,seq=1024",
            "megatron",
            "pp=2,dp=2,ep=4,zero=1,micro=4,recompute=block-keep",
        ),
        ("llama3-8b,layers=8", "megatron", "pp=4,dp=4,zero=1,micro=8,recompute=block-keep"),
    ],
)
def test_no_space_holds_more_than_the_price(source: str, runtime: str, pins: str) -> None:
    """A framework has one gradient of a weight and no copy of a chunk's weights; its first stage
    has nothing of the head. Nodes that are cut alike save what their place in the block asks for:
    a product that goes into the residual stream leaves nothing."""
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime=runtime),
        SearchOptions(pins=pins, baselines=False),
    )
    search = Search(open_model(f"zoo:{source}", 16, batch=32), request)
    assert search.run().best is not None
    for c, space, choice, _ in search.details.values():
        problem = assemble(space, c.techniques, None)
        held = evaluate(problem, choice).peak_usage
        assert held <= c.cost.memory.total * (1 + 1e-9), (c.mesh.shape, c.techniques)
    assert search.details


@pytest.mark.parametrize("pins", ["pp=2,dp=4,ep=2", "dp=4,ep=4"])
def test_small_microbatches_are_bounded_by_what_waits_in_each(pins: str) -> None:
    """Experts' kernels wait for the host in every pass: of many microbatches a bound in the space
    of few knows that too, and recomputed blocks wait once more. It is no more than the bound in the
    space of the microbatches themselves."""
    source, micro = "mixtral-8x7b,layers=4,seq=512", 32
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime="megatron"),
        SearchOptions(pins=f"{pins},zero=1", baselines=False),
    )
    search = Search(open_model(f"zoo:{source}", 16, batch=128), request)
    mesh = search.offered.meshes()[0]
    kernels = request.runtime.kernels
    assert kernels is not None and kernels.expert_waits_s > 0
    few, own = (search.space(mesh, parts, None, True) for parts in (mesh.stages, micro))
    assert few is not None and own is not None
    relaxed, exact = Relaxation(few), Relaxation(own)
    for recompute, passes in (("none", 2), ("block-keep", 2), ("block", 3)):
        at = Techniques(1, recompute, micro)
        bound_s, own_s = (each.free(at, micro)[1] for each in (relaxed, exact))
        endless_s = relaxed.free(at, 0)[1] + relaxed.bubble_s(micro)
        blocks = 4 // mesh.stages
        waits_s = (micro - few.parts) * blocks * passes * kernels.expert_waits_s
        assert relaxed.free(at, 0)[1] + waits_s <= bound_s * (1 + 1e-9)
        assert endless_s <= bound_s * (1 + 1e-9)
        assert bound_s <= own_s * (1 + 1e-9)


def test_spaces_run_again_what_the_framework_does() -> None:
    """Whole blocks, their last products included, which an emitted program's backward pass does not
    ask for; and modules by name, of experts' products none."""
    request = build_request(
        MachineOptions(devices=16, hardware="h100-sxm"),
        StepOptions(runtime="megatron"),
        SearchOptions(pins="pp=2,dp=4,ep=2,zero=1", baselines=False),
    )
    search = Search(open_model("zoo:mixtral-8x7b,layers=4,seq=512", 16, batch=128), request)
    space = search.space(search.offered.meshes()[0], 2, None, True)
    assert space is not None and space.base.dealt is not None
    (first, period, repeats), arrays = space.base.dealt[0], arrays_of(space)
    remade = set[str]()
    for k, v in zip(arrays.first, space.variables, strict=True):
        if v.kind != "op" or not first <= v.node < first + period * repeats:
            continue
        again = made_again(space.base, v.node, request.runtime)
        assert arrays.recompute_s["block"][k] == v.costs.forward_s[0]
        assert again or not arrays.recompute_s["block-keep"][k]
        if again and arrays.recompute_s["block-keep"][k]:
            remade.add(space.base.graph.nodes[v.node].op)
    assert remade and "RoutedExperts" not in remade


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "runtime", "lora", "stages"),
    [
        ("deepseek-v2-lite,layers=5", "megatron", "", 4),
        pytest.param(
            "llama3-70b,layers=5",
            "jax-shard_map",
            "rank=16,targets=*_proj.weight",
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama3-70b,layers=5",
            "fsdp",
            "rank=16,targets=*_proj.weight",
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_known_of_a_mesh_before_its_space_is_below_every_price(
    source: str, runtime: str, lora: str, stages: int
) -> None:
    """Also with layers before the repeated blocks: a dense one, and the one whose input has no
    gradient."""
    options = SearchOptions(baselines=False)
    machine = MachineOptions(devices=16, hardware="h100-sxm")
    request = build_request(machine, StepOptions(runtime=runtime), options)
    if stages > 1:
        request = replace(request, pins=Pins(mesh={"stage": (stages,)}))
    search = Search(open_model(f"zoo:{source}", 16, batch=32, lora=lora), request)
    search.run()
    assert search.details
    for c, *_ in search.details.values():
        floor = search.floor(c.mesh, c.plan.microbatches)
        assert 0 < floor <= c.cost.step_time_s, (c.label, c.mesh.shape, c.techniques)
