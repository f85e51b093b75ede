"""Frozen weights under ZeRO stage 3: stored in pieces, gathered where they are used, without a
gradient or a state, in the space, in the price, and in the program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

import planner
from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.execution.collectives import collectives
from planner.execution.layout_flow import derive, stored_layout
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.sharding.candidates import candidates
from planner.sharding.layout import local_shape
from planner.sharding.layout_table import LayoutTable
from planner.solvers import solve
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import PICO, assemble, usage_of
from planner.space.build import Space, build_space, splits_of
from planner.space.families import batch_only, restrict
from planner.space.techniques import Techniques
from planner.verify import worker
from planner.workload.open import open_model
from tests.verify.in_process import verified

LORA = "rank=4,targets=*.q_proj.weight,targets=*.down_proj.weight"
MODEL = "zoo:llama-tiny,layers=3,hidden=128,ff=512"
TIED = f"{MODEL},tied=1"


def space_of(source: str, *, model: int = 1, runtime: str = "jax-shard_map", **what: str) -> Space:
    """Of eight devices, so many of them along a second axis."""
    topology, sizes = for_devices("h100-sxm", 8), [8 // model, model][: 1 + (model > 1)]
    mesh = next(m for m in meshes(topology) if [a.size for a in m.axes] == sizes)
    recipe = load_recipe("bf16-mixed")
    pricer = Pricer(topology, mesh, load_runtime(runtime), recipe, LayoutTable())
    base = GraphFacts.of(open_model(source, 8, batch=64, **what).graph(1), training=True)
    return build_space(base, pricer, zero_axes=tuple(pricer.sizes))


def plan_of(space: Space, choice: tuple[int, ...], at: Techniques) -> Plan:
    shape = space.pricer.mesh.shape
    return Plan(
        shape,
        splits_of(space, choice),
        zero_stage=at.zero_stage,
        zero_axes=tuple(a for a, _ in shape),
        recompute=at.recompute,
        microbatches=at.microbatches,
        repeated_blocks=space.base.runs,
    )


def data_parallel(source: str, lora: str) -> tuple[Graph, Plan]:
    """A plan whose eight devices share the batch."""
    strategy = planner.plan(
        source, devices=8, batch=64, pins="fsdp=8,microbatches=1", lora=lora, baselines=False
    )
    graph = open_model(source, 8, batch=64, lora=lora).graph(1)
    return graph, strategy.plan_for(graph)


def test_stage_3_alone_cuts_frozen_matrices_and_gathers_them_without_a_gradient() -> None:
    graph, plan = data_parallel(MODEL, LORA)
    matrices = {n for n in graph.weights if sum(x > 1 for x in graph.tensors[n].shape) > 1}
    frozen, mesh = set(graph.weights) - graph.trainable, dict(plan.mesh)
    assert frozen & matrices and frozen - matrices
    for stage in (0, 1, 2, 3):
        flow = derive(graph, replace(plan, zero_stage=stage), training=True)
        for name in frozen:
            shape = graph.tensors[name].shape
            part = prod(local_shape(shape, stored_layout(flow.weights[name]), mesh))
            assert prod(shape) == part * (8 if stage == 3 and name in matrices else 1), name
        uses = [
            use for use in collectives(flow) if use.what in {graph.labels.get(n, n) for n in frozen}
        ]
        kinds = Counter((use.kind, use.phase) for use in uses)
        assert {kind for kind, _ in kinds} == ({"all-gather"} if stage == 3 else set())
        assert {phase for _, phase in kinds} <= {"forward", "recompute"}
        if stage == 3:  # a lookup's backward pass would read no table, a product's reads its weight
            assert kinds["all-gather", "forward"] > kinds["all-gather", "recompute"] > 0
    infer = derive(graph, replace(plan, zero_stage=3), training=False)
    assert not any(w.zero_stage for w in infer.weights.values())


@pytest.mark.one_in(8)
@pytest.mark.parametrize("source", [MODEL, TIED])
@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize(
    "at", [Techniques(3), Techniques(3, "block"), Techniques(3, "none", 2), Techniques(1)]
)
@pytest.mark.parametrize("what", [{"lora": LORA}, {"freeze": ("*.layers.0.*", "*embed*")}])
def test_a_space_has_what_the_price_of_a_plan_has(
    source: str, model: int, at: Techniques, what: dict
) -> None:
    free = space_of(source, model=model, **what)
    space = restrict(free, batch_only(free.base, free.pricer.mesh.shape[:1]))
    assert space is not None
    problem = assemble(space, at, None)
    choice = solve(problem, "dp", Budget()).choice
    cost, flow, _ = price_plan(space.base, plan_of(space, choice, at), space.pricer)
    cut = [n for n, w in flow.weights.items() if n not in flow.grad and w.zero_dim >= 0]
    assert bool(cut) == (at.zero_stage == 3)
    priced, used = evaluate(problem, choice).cost / PICO, sum(usage_of(space, at, choice))
    if source == TIED and at.zero_stage == 3:
        # Plans gather a tied table for each of its readers; sums once, or they have it whole.
        assert cost.step_time_s * 0.94 < priced < cost.step_time_s
        assert cost.memory.total <= used < 1.05 * cost.memory.total
    else:
        assert priced == pytest.approx(cost.step_time_s, rel=1e-6)
        assert used == pytest.approx(cost.memory.total, rel=1e-6, abs=8)


def test_the_rank_of_adapters_stays_whole_in_a_search() -> None:
    """Each adapter has the choices of its batch and of what its weight is cut along."""
    space, ends = space_of(MODEL, model=2, lora=LORA), set[str]()
    for v in (v for v in space.variables if v.kind == "op"):
        node, rule = space.base.graph.nodes[v.node], space.base.rules[v.node]
        if node.id.endswith(("lora_A", "lora_B")):
            ends.add(node.id[-1])
            (rank,) = rule.results[0][-1] if node.id.endswith("A") else rule.operands[0][-1]
            assert len(v.splits) > 4 and not any(s.axes(rank) for s in v.splits), node.id
            full = space.base.reachable(v.node, candidates(rule, space.pricer.sizes))
            assert set(v.splits) < set(full)
    assert ends == {"A", "B"}


def test_a_device_of_a_framework_stores_its_piece() -> None:
    """Eight devices under FSDP: an eighth of all matrices, frozen or not."""
    space = space_of(MODEL, runtime="fsdp", lora=LORA)
    graph = space.base.graph
    within = restrict(space, batch_only(space.base, space.pricer.mesh.shape))
    assert within is not None
    choice = solve(assemble(within, Techniques(3), None), "dp", Budget()).choice
    cost, _, _ = price_plan(space.base, plan_of(within, choice, Techniques(3)), space.pricer)
    whole = 2 * sum(int(np.prod(graph.tensors[n].shape)) for n in graph.weights)
    assert whole / 8 < cost.memory.parameters < whole / 7


@pytest.mark.parametrize(
    ("source", "pins", "what"),
    [
        pytest.param(MODEL, "fsdp=8,microbatches=2", {"lora": LORA}, marks=pytest.mark.slow),
        pytest.param(TIED, "fsdp=4,tp=2,recompute=block", {"lora": LORA}, marks=pytest.mark.slow),
        (MODEL, "dp=8,zero=3,zero_group=4", {"trainable": ("*lm_head*",)}),
    ],
)
def test_programs_gather_what_is_predicted_and_equal_the_unsharded_model(
    source: str, pins: str, what: dict, tmp_path: Path
) -> None:
    strategy = planner.plan(source, devices=8, batch=64, pins=pins, baselines=False, **what)
    report = verified(strategy, source, tmp_path)
    assert report.ok and not report.findings()
    gathers = [f for f in report.figures if f.what.startswith("all-gather over")]
    assert gathers and all(f.compiled == f.predicted > 0 for f in gathers)


@pytest.mark.slow
def test_a_jit_program_stores_pieces_and_equals_the_unsharded_model() -> None:
    strategy = planner.plan(MODEL, devices=8, batch=64, pins="fsdp=8", lora=LORA, baselines=False)
    report = worker.verify(strategy, MODEL, backend="jit")
    assert report.ok
    (arguments,) = [f for f in report.figures if f.what == "argument bytes"]
    assert arguments.compiled == arguments.predicted
