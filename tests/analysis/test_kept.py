"""What the backward pass is handed: outside loops, of experts, and when it is gone again."""

from __future__ import annotations

import pytest

from planner.analysis.facts import GraphFacts
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.peak_memory import memory_parts
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import saved_activations
from planner.pricing.step_time import derived
from planner.pricing.workspaces import temporaries
from planner.search.build_request import make_request
from planner.space.build import build_space, splits_of
from planner.space.variables import Space
from planner.workload.model import Model, Workload


def facts(source: str, batch: int = 32) -> GraphFacts:
    model = Model.open(source, Workload("train", batch=batch), 8)
    return GraphFacts.of(model.graph(1), training=True)


def space_of(base: GraphFacts, sizes: dict[str, int]) -> Space:
    request = make_request(devices=8, hardware=None, topology=None)
    mesh = pinned_mesh(request.topology, sizes)
    pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)
    return build_space(base, pricer, zero_axes=mesh.zero_axes)


def kept(base: GraphFacts, word: str) -> set[str]:
    return {name for name in base.residuals.values() if word in name}


def test_outside_loops_what_one_kernel_makes_again_is_not_kept() -> None:
    """As the GPU compiler keeps it of ResNet-50: convolutions' results, and the activations that
    convolutions read; of the stem not what max pooling reads. Inside loops everything."""
    base = facts("zoo:resnet50,blocks=3-3-1-1")
    first, period, _ = base.loops[0]
    inside = {i for (i, _) in base.residuals if first <= i < first + period}
    assert {base.graph.nodes[i].op for i in inside} == {"Conv", "BatchNormalization", "Relu"}
    assert kept(base, "/stem/") == {"/stem/Conv_output_0"}
    assert not any("/layer1/0/" in name for name in kept(base, "BatchNormalization"))
    assert "/layer1/0/conv1/Relu_output_0" in base.residuals.values()
    assert "/layer1/1/conv1/BatchNormalization_output_0" in base.residuals.values()


def test_what_a_loop_reads_and_what_norms_lay_out_anew_is_kept() -> None:
    """A block's input is kept whatever made it; a GroupNorm's result is a copy in the order that
    convolutions want."""
    base = facts("zoo:t5-tiny")
    assert {i for i, _ in base.residuals} & base.looped
    loops = [name for i in base.looped for name in base.graph.nodes[i].inputs]
    outside = [n for n in loops if base.graph.producer.get(n, -1) not in base.looped]
    made = {n for n in outside if n in base.grad and n not in base.graph.weights}
    assert made and made <= set(base.residuals.values())
    assert kept(facts("zoo:unet-tiny"), "GroupNormalization")
    assert not kept(facts("zoo:dit-tiny"), "Silu")


def test_experts_that_read_all_rows_are_handed_all_rows() -> None:
    """Where experts lie on several devices without an exchange of rows; else what the router reads
    is all."""
    base = facts("zoo:mixtral-tiny")
    space = space_of(base, {"data": 4, "model": 2})
    (node, _), name = next(iter(base.gathered.items()))
    assert base.graph.nodes[node].op == "RoutedExperts" and name in base.residuals.values()
    costs = next(v for v in space.variables if v.kind == "op" and v.node == node)
    whole = [k for k, s in enumerate(costs.splits) if dict(s.pairs).get("e")]
    rest = [k for k, s in enumerate(costs.splits) if not dict(s.pairs).get("e")]
    assert whole and rest
    saved = costs.costs.saved_bytes
    assert min(saved[whole]) > max(saved[rest])


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_what_later_blocks_saved_is_gone_when_earlier_ones_run_backward(recompute: str) -> None:
    """The workspace of an earlier turn counts as far as it is above what later ones saved, and what
    one repeat has at once is of the blocks whose turn it is."""
    base = facts("zoo:resnet50,blocks=3-3-1-1")
    space = space_of(base, {"data": 8})
    plan = Plan(
        space.pricer.mesh.shape,
        splits_of(space, [0] * len(space.variables)),
        recompute=recompute,
        repeated_blocks=base.runs,
    )
    flow, runs = derived(base, plan)
    saved = saved_activations(base, flow, space.pricer)
    assert base.turns[0] == 0 and base.turns[-1] == 4 and base.last_run == 3
    assert saved.gone[3] == 0 < saved.gone[2] < saved.gone[0]
    at_once = temporaries(base, flow, space.pricer, {}, 0 * saved.gone)[0]
    by_turn = temporaries(base, flow, space.pricer, {}, saved.gone)[0]
    slack = 1 + space.pricer.runtime.memory_slack
    assert 0 < by_turn < at_once
    assert memory_parts(base, flow, space.pricer, runs).workspace == pytest.approx(slack * by_turn)
