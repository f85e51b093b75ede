"""The space, the problem made of it, and the price of the whole plan say the same thing."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from math import prod

import numpy as np
import pytest

from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import cut_layout, weight_plan
from planner.execution.plan import Plan
from planner.execution.techniques import LOOPED, WRITTEN_OUT
from planner.execution.zero_stages import ZERO_STAGES
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.pricing.gradient_sync import WeightCosts, WeightPricer
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.pricing.reshard import ReshardPrices
from planner.sharding.layout import Layout, local_shape, reshard_steps
from planner.sharding.layout_table import LayoutTable
from planner.sharding.rule import Limits
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget, evaluate
from planner.space.assemble import PICO, assemble, least_usage, usage_of
from planner.space.build import build_space, splits_of
from planner.space.families import batch_only, restrict
from planner.space.node_options import Kinds
from planner.space.option_arrays import arrays_of
from planner.space.techniques import Techniques
from planner.space.variables import OptionCosts, Space
from planner.workload.model import Model, Workload

MODELS = [
    ("zoo:gpt2-small,layers=3", 8),
    ("zoo:llama3-8b,layers=3,seq=512", 16),
    ("zoo:resnet50", 32),
]


def space_of(
    source: str,
    batch: int,
    devices: int = 8,
    model: int = 2,
    runtime: str = "jax-shard_map",
    fold: bool = True,
    layout_table: LayoutTable | None = None,
    hardware: str = "h100-sxm",
    workload: str = "train",
    optimizer: str = "adamw",
) -> Space:
    topology = for_devices(hardware, devices)
    mesh = next(
        m
        for m in meshes(topology)
        if [a.size for a in m.axes] == ([devices // model, model] if model > 1 else [devices])
    )
    recipe = load_recipe("bf16-mixed", optimizer)
    pricer = Pricer(topology, mesh, load_runtime(runtime), recipe, layout_table or LayoutTable())
    asked = Workload(workload, batch=batch, optimizer=optimizer)
    base = GraphFacts.of(
        Model.open(source, asked, devices).graph(1), training=workload == "train", fold=fold
    )
    return build_space(base, pricer, zero_axes=tuple(pricer.sizes))


def plan_of(space: Space, choice: tuple[int, ...], t: Techniques) -> Plan:
    shape = space.pricer.mesh.shape
    return Plan(
        shape,
        splits_of(space, choice),
        zero_stage=t.zero_stage,
        zero_axes=tuple(a for a, _ in shape),
        recompute=t.recompute,
        microbatches=t.microbatches,
        repeated_blocks=space.base.runs,
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "batch"), MODELS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_objective_of_the_optimum_is_the_price_of_the_plan(
    source: str, batch: int, zero: int
) -> None:
    space = space_of(source, batch)
    problem = assemble(space, Techniques(zero), None)
    found = solve(problem, "dp", Budget())
    cost, _, _ = price_plan(
        space.base, plan_of(space, found.choice, Techniques(zero)), space.pricer
    )
    assert evaluate(problem, found.choice).cost / PICO == pytest.approx(cost.step_time_s, rel=1e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("zero", "blocks"),
    [(0, LOOPED), (1, LOOPED), (2, LOOPED), (3, LOOPED), (1, WRITTEN_OUT), (0, WRITTEN_OUT)],
)
@pytest.mark.parametrize(
    ("source", "batch"), [MODELS[0], ("zoo:gpt2-small,layers=4", 8), ("zoo:mixtral-tiny", 16)]
)
def test_orthogonalised_matrices_are_in_the_objective(
    source: str, batch: int, zero: int, blocks: str
) -> None:
    """Muon's products and exchanges, of stacks that divide over the devices and that do not, of the
    plan that is best with it: what they add to the objective they add to the price."""
    techniques = Techniques(zero, "block" if zero == 3 else "none")
    muon, adamw = (
        build_space(
            made.base,
            replace(made.pricer, written_out_up_to=9999 * (blocks == WRITTEN_OUT), memo={}),
            zero_axes=tuple(made.pricer.sizes),
        )
        for made in (space_of(source, batch, optimizer=name) for name in ("muon", "adamw"))
    )
    problems = [assemble(space, techniques, None) for space in (muon, adamw)]
    choice = solve(problems[0], "dp", Budget()).choice
    with_muon, without = (evaluate(problem, choice).cost / PICO for problem in problems)
    costs = [
        price_plan(
            space.base, replace(plan_of(space, choice, techniques), blocks=blocks), space.pricer
        )[0]
        for space in (muon, adamw)
    ]
    more = costs[0].step_time_s - costs[1].step_time_s
    assert with_muon - without == pytest.approx(more, abs=1e-6 * costs[0].step_time_s)
    assert costs[0].step_time_s > costs[1].step_time_s
    assert costs[0].memory.optimizer < costs[1].memory.optimizer
    held = [usage_of(space, techniques, choice)[0] for space in (muon, adamw)]
    less = costs[1].memory.optimizer - costs[0].memory.optimizer
    assert held[1] - held[0] == pytest.approx(less, abs=8)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "batch"), MODELS[:2])
@pytest.mark.parametrize(
    "techniques",
    [
        Techniques(1, "block"),
        Techniques(1, "none", 2),
        Techniques(3, "block"),
        Techniques(1, "block-keep"),
    ],
)
def test_what_loops_copy_is_in_the_problem(source: str, batch: int, techniques: Techniques) -> None:
    space = space_of(source, batch)
    choice = solve(assemble(space, techniques, None), "dp", Budget()).choice
    cost, _, _ = price_plan(space.base, plan_of(space, choice, techniques), space.pricer)
    at = arrays_of(space).first + np.array(choice)
    weights = arrays_of(space).count * arrays_of(space).costs.loop_copy_s[techniques.zero_stage]
    copied = (weights + arrays_of(space).copy_s[techniques.recompute])[at].sum()
    copied *= techniques.microbatches
    assert cost.loop_copy_time_s > 0
    if techniques.recompute == "block-keep":  # the problem knows of sums alone
        assert copied <= cost.loop_copy_time_s * (1 + 1e-9)
    else:
        assert copied == pytest.approx(cost.loop_copy_time_s, rel=1e-9)


def test_values_in_host_memory_are_in_the_problem() -> None:
    """Seconds on the host's link, and bytes of what is on its way, as the price of the plan has
    them."""
    at = Techniques(1, "save:q,k,offload:v,context,mlp_up")
    space = space_of("zoo:llama-tiny,layers=3", 8)
    problem = assemble(space, at, None)
    choice = solve(problem, "dp", Budget()).choice
    cost, _, _ = price_plan(space.base, plan_of(space, choice, at), space.pricer)
    assert evaluate(problem, choice).cost / PICO == pytest.approx(cost.step_time_s, rel=1e-6)
    held, _ = usage_of(space, at, choice)
    assert held == pytest.approx(cost.memory.total - cost.memory.temporary, rel=1e-6, abs=8)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("source", "batch"), MODELS)
@pytest.mark.parametrize(
    "techniques", [Techniques(1), Techniques(2, "block-keep"), Techniques(0, "block")]
)
def test_usage_is_the_memory_of_the_plan(source: str, batch: int, techniques: Techniques) -> None:
    space = space_of(source, batch)
    choice = solve(assemble(space, techniques, None), "dp", Budget()).choice
    cost, _, _ = price_plan(space.base, plan_of(space, choice, techniques), space.pricer)
    held, working = usage_of(space, techniques, choice)
    kept = cost.memory.total - cost.memory.temporary
    if techniques.recompute == "block-keep" or (
        techniques.recompute != "none" and len(space.base.runs) > 1
    ):
        # Results of collectives that are kept, and one repeat's activations at a time, of the run
        # that has most: the problem counts the longest run's.
        assert held <= kept + 8
    else:
        assert held == pytest.approx(kept, rel=1e-6, abs=8)
    assert working == pytest.approx(cost.memory.temporary, rel=1e-6, abs=8)
    assert least_usage(space, techniques) <= cost.memory.total


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("source", "batch"),
    [("zoo:gpt2-small,layers=1", 8), ("zoo:resnet50,blocks=1-1-1-1", 32), ("zoo:mlp,layers=3", 64)],
)
@pytest.mark.parametrize(
    "techniques", [Techniques(0), Techniques(1), Techniques(2, microbatches=4)]
)
def test_usage_without_a_loop_is_the_peak_of_the_walk(
    source: str, batch: int, techniques: Techniques
) -> None:
    """Random choices: the search's figure is the plan's, and never below what every plan needs."""
    space, rng = space_of(source, batch, fold=False), random.Random(3)
    assert space.base.written_out
    for _ in range(4):
        choice = tuple(rng.randrange(len(v.splits or v.layouts)) for v in space.variables)
        if any(t.forward_s[choice[t.a], choice[t.b]] == np.inf for t in space.links):
            choice = solve(assemble(space, techniques, None), "dp", Budget()).choice
        cost, _, _ = price_plan(space.base, plan_of(space, choice, techniques), space.pricer)
        held, above = usage_of(space, techniques, choice)
        assert above >= 0
        assert held + above == pytest.approx(cost.memory.total, rel=1e-6, abs=16)
        assert least_usage(space, techniques) <= cost.memory.total + 16


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "source", ["zoo:llama-tiny,layers=3", "zoo:resnet50,blocks=2-1-1-1", "zoo:t5-tiny"]
)
def test_usage_of_a_forward_pass_is_the_memory_of_the_plan(source: str) -> None:
    """Random choices, pieces on their way from one operator to another that does not follow it among
    them; the graph's inputs and results are there all the time."""
    space, rng, techniques = space_of(source, 16, workload="infer"), random.Random(4), Techniques(0)
    for _ in range(4):
        choice = tuple(rng.randrange(len(v.splits or v.layouts)) for v in space.variables)
        if any(t.forward_s[choice[t.a], choice[t.b]] == np.inf for t in space.links):
            choice = solve(assemble(space, techniques, None), "dp", Budget()).choice
        cost, _, _ = price_plan(space.base, plan_of(space, choice, techniques), space.pricer)
        held, above = usage_of(space, techniques, choice)
        assert held == pytest.approx(cost.memory.total - cost.memory.temporary, rel=1e-6, abs=16)
        assert above == pytest.approx(cost.memory.temporary, rel=1e-6, abs=16)
        problem = assemble(space, techniques, 10**15, liveness=True)
        assert evaluate(problem, choice).peak_usage <= held + above + 64
        assert least_usage(space, techniques) <= cost.memory.total + 16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fold", [True, False])
def test_images_in_whole_tiles_cost_the_search_what_they_cost_the_plan(fold: bool) -> None:
    """On a TPU a batch of 8 with 64 channels takes twice its bytes; programs without convolutions
    or attention take what they take elsewhere."""
    tpu, packed = (
        space_of("zoo:resnet50,blocks=2-1-1-1", 32, model=1, fold=fold, hardware=name)
        for name in ("tpu-v5e", "h100-sxm")
    )
    choice = solve(assemble(tpu, Techniques(1), None), "dp", Budget()).choice
    plan = plan_of(tpu, choice, Techniques(1))
    cost, elsewhere = (
        price_plan(tpu.base, plan, tpu.pricer)[0],
        price_plan(tpu.base, plan, replace(tpu.pricer, topology=packed.pricer.topology))[0],
    )
    assert sum(usage_of(tpu, Techniques(1), choice)) == pytest.approx(
        cost.memory.total, rel=1e-6, abs=16
    )
    assert evaluate(assemble(tpu, Techniques(1), None), choice).cost / PICO == pytest.approx(
        cost.step_time_s, rel=1e-6
    )
    assert (cost.memory.parameters, cost.memory.optimizer) == (
        elsewhere.memory.parameters,
        elsewhere.memory.optimizer,
    )
    assert (
        1.2 * elsewhere.memory.activations
        < cost.memory.activations
        < 2 * elsewhere.memory.activations
    )
    text = space_of("zoo:gpt2-small,layers=1", 8, hardware="tpu-v5e")
    assert not text.base.images


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_of_gradients_over_microbatches_are_in_the_objective_and_in_the_price(
    zero: int,
) -> None:
    space = space_of("zoo:gpt2-small,layers=3", 8)
    one, four = (assemble(space, Techniques(zero, microbatches=n), None) for n in (1, 4))
    choice = solve(four, "dp", Budget()).choice
    (once, _, _), (often, flow, _) = (
        price_plan(
            space.base, plan_of(space, choice, Techniques(zero, microbatches=n)), space.pricer
        )
        for n in (1, 4)
    )
    assert evaluate(four, choice).cost / PICO == pytest.approx(often.step_time_s, rel=1e-6)
    assert evaluate(one, choice).cost / PICO == pytest.approx(once.step_time_s, rel=1e-6)
    device, graph, mesh = space.pricer.topology.device, space.base.graph, dict(space.pricer.sizes)
    held = sum(
        prod(local_shape(graph.tensors[n].shape, cut_layout(w) if zero == 2 else w.layout, mesh))
        for n, w in flow.weights.items()
        if n in flow.grad
    )
    moved = (
        3 * 4 * held * space.pricer.recipe.gradient_bytes
    )  # sum and gradient read, the sum written, in each of four
    assert often.optimizer_time_s - once.optimizer_time_s == pytest.approx(
        moved / (device.memory_bytes_per_s * device.memory_efficiency), rel=1e-9
    )


def test_overlap_of_the_runtime_is_in_the_objective() -> None:
    space = space_of("zoo:gpt2-small,layers=3", 8, runtime="jax-jit")
    problem = assemble(space, Techniques(1), None)
    found = solve(problem, "dp", Budget())
    cost, _, _ = price_plan(space.base, plan_of(space, found.choice, Techniques(1)), space.pricer)
    assert evaluate(problem, found.choice).cost / PICO == pytest.approx(cost.step_time_s, rel=1e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("micro", [2, 4, 16])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_whole_batch_in_one_piece_bounds_any_number_of_microbatches(
    micro: int, zero: int
) -> None:
    source, batch, t = "zoo:gpt2-small,layers=2", 32, Techniques(zero, "none", micro)
    whole, cut = space_of(source, batch), space_of(source, batch // micro)
    bound = solve(assemble(whole, t, None, uncut=True), "dp", Budget()).bound
    real = solve(assemble(cut, t, None), "dp", Budget())
    assert bound is not None
    assert bound <= evaluate(assemble(cut, t, None), real.choice).cost
    assert least_usage(whole, t, uncut=True) <= least_usage(cut, t) * (1 + 1e-9)


def test_unfolded_repeats_cost_what_folded_ones_do() -> None:
    costs = []
    for fold in (True, False):
        space = space_of("zoo:gpt2-small,layers=4", 8, fold=fold)
        problem = assemble(space, Techniques(1), None)
        choice = solve(problem, "dp", Budget()).choice
        at = arrays_of(space).first + np.array(choice)
        copied = arrays_of(space).copy_s["none"][at].sum() + sum(
            v.count * v.costs.loop_copy_s[1, k]
            for v, k in zip(space.variables, choice, strict=True)
        )
        assert (copied > 0) == fold  # a program that is written out has no loops
        costs.append(evaluate(problem, choice).cost / PICO - copied)
    assert costs[0] == pytest.approx(costs[1], rel=0.02)
    assert costs[1] <= costs[0] * (1 + 1e-6)  # tying decisions cannot help


def test_conversions_priced_together_are_those_priced_one_by_one() -> None:
    topology, random_ = for_devices("h100-sxm", 16), random.Random(1)
    cells = [(), ("data",), ("tensor",), ("data", "tensor")]
    layouts = [
        x
        for x in (
            Layout((a, b), p, f)
            for a in cells
            for b in cells
            for p in ((), ("tensor",))
            for f in ((), ("data",))
        )
        if len({*x.dims[0], *x.dims[1], *x.partial, *x.grad_partial})
        == len([*x.dims[0], *x.dims[1], *x.partial, *x.grad_partial])
    ]
    layout_table = LayoutTable()
    for mesh in [m for m in meshes(topology) if len(m.axes) == 2]:
        pricer = Pricer(
            topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"), layout_table
        )
        tables = ReshardPrices(layout_table, pricer)
        numbers = [layout_table.number(x) for x in layouts]
        for shape in ((64, 4096), (48, 30), (7, 5)):  # cut evenly, partly so, and hardly ever
            forward, backward = tables.table(shape, 2, numbers, numbers, True)
            for a, b in random_.sample(
                [(a, b) for a in range(len(layouts)) for b in range(len(layouts))], 80
            ):
                steps = reshard_steps(shape, layouts[a], layouts[b], mesh.shape)
                if steps is None:
                    assert np.isinf(forward[a, b])
                    continue
                assert forward[a, b] == pytest.approx(
                    sum(
                        pricer.collective_s(s.forward, s.axes, 2 * s.forward_elements)
                        for s in steps
                    ),
                    rel=1e-9,
                    abs=1e-18,
                )
                assert backward[a, b] == pytest.approx(
                    sum(
                        pricer.collective_s(s.backward, s.axes, 2 * s.backward_elements)
                        for s in steps
                    ),
                    rel=1e-9,
                    abs=1e-18,
                )


def test_a_restricted_space_is_the_space_with_fewer_options() -> None:
    space = space_of("zoo:gpt2-small,layers=3", 8)
    allowed = batch_only(space.base, space.pricer.mesh.shape)
    small = restrict(space, allowed)
    assert small is not None
    built = build_space(
        space.base, space.pricer, allowed=allowed, zero_axes=tuple(space.pricer.sizes)
    )
    costs = [solve(assemble(s, Techniques(1), None), "dp", Budget()) for s in (small, built)]
    assert costs[0].bound == costs[1].bound
    assert all(len(v.splits) == 1 for v in small.variables if v.kind == "op")
    assert all(c.min() < FORBIDDEN for c in assemble(small, Techniques(1), None).cost)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("source", "batch"),
    [
        ("zoo:llama-tiny", 16),
        ("zoo:mixtral-tiny", 16),
        ("zoo:resnet-tiny", 12),
        ("zoo:lstm-tiny", 8),
    ],
)
def test_splits_priced_together_are_those_priced_one_by_one(source: str, batch: int) -> None:
    space = space_of(source, batch)
    rule_of, order = space.base.rules, tuple(space.pricer.sizes)
    every = Kinds(space.base, space.pricer, Limits(), {}, order).every()
    for k in range(max(len(kind.splits) for kind in every.values())):
        own = {i: (kind.splits[k],) for i, kind in every.items() if k < len(kind.splits)}
        rest = {i: kind.splits[:1] for i, kind in every.items() if i not in own}
        each = Kinds(
            space.base, replace(space.pricer, memo={}), Limits(), own | rest, order
        ).every()
        for i, (split,) in own.items():
            one = each[i]
            for f in fields(OptionCosts):
                alone, among = getattr(one.costs, f.name), getattr(every[i].costs, f.name)
                same = np.array_equal(alone[..., 0], among[..., k])
                assert same, (space.base.graph.nodes[i].op, split, f.name)
            for slot, row in enumerate(one.needs):
                if row is not None:
                    layout = rule_of[i].operand(slot, split, order)
                    has = space.base.graph.nodes[i].inputs[slot] in space.base.grad
                    assert space.pricer.layout_table.layouts[row.layouts[0]] == (
                        layout if has else Layout(layout.dims, layout.partial)
                    )


@pytest.mark.parametrize("hardware", ["h100-sxm", "cpu"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_collectives_priced_together_are_those_priced_one_by_one(
    hardware: str, bucketed: bool
) -> None:
    pricer = space_of("zoo:gpt-tiny", 16, 16, 4, hardware=hardware).pricer
    rng, ways = np.random.default_rng(0), ((), ("data",), ("tensor",), ("data", "tensor"))
    of, payload, stacked = (
        rng.integers(0, 4, 60),
        np.floor(10 ** rng.uniform(-1, 10, 60)),
        rng.integers(1, 99, 60),
    )
    joined = np.where(rng.random(60) < 0.5, 1.0, rng.random(60))
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):
        for runtime in ("jax-shard_map", "jax-jit"):
            priced = replace(pricer, runtime=load_runtime(runtime), memo={})
            alone = [
                priced.collective_s(kind, ways[k], size, bucketed=bucketed, stacked=n, joined=part)
                for k, size, n, part in zip(
                    of.tolist(), payload.tolist(), stacked.tolist(), joined.tolist(), strict=True
                )
            ]
            together = priced.collectives_s(kind, ways, of, payload, bucketed, stacked, joined)
            assert together.tolist() == alone


def test_what_a_block_gathers_takes_one_launch_on_gpus_up_to_a_bucket() -> None:
    """As compiled: a GPT of twelve blocks under ZeRO-3 has three gathers and scatters a block for
    H100, one for each weight on TPUs; weights beyond the compiler's size go alone."""
    gpu, tpu = (
        space_of("zoo:gpt-tiny", 16, hardware=name).pricer for name in ("h100-sxm", "tpu-v5e")
    )
    whole = gpu.collective_s("all-gather", ("data",), 6e6)
    parts = [gpu.collective_s("all-gather", ("data",), 6e6 * x, joined=x) for x in (0.5, 0.3, 0.2)]
    assert sum(parts) == pytest.approx(whole)
    large = 2.0 * gpu.runtime.bucket_bytes
    assert gpu.collective_s("all-gather", ("data",), large, joined=0.1) == gpu.collective_s(
        "all-gather", ("data",), large
    )
    assert tpu.collective_s("all-gather", ("data",), 1e6, joined=0.1) == tpu.collective_s(
        "all-gather", ("data",), 1e6
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", ["zoo:gpt-tiny", "zoo:resnet-tiny", "zoo:mixtral-tiny,layers=2"])
def test_what_a_weight_costs_is_what_its_own_plan_says(source: str) -> None:
    """Level by level and layout by layout, of the weight's plan (planner.execution.layout_flow) and
    one collective after the other."""
    space = space_of(source, 48, 24, 4)  # dims of 64 over six devices are padded
    base, pricer, sizes = space.base, space.pricer, dict(space.pricer.sizes)
    recipe, costs, hidden, shown = (
        pricer.recipe,
        WeightPricer(base, pricer, ("data",)),
        pricer.hidden,
        1 - pricer.runtime.overlap,
    )
    for v in space.variables:
        for slot, name in enumerate(base.graph.nodes[v.node].inputs if v.kind == "op" else ()):
            if name not in base.own or name not in base.grad:
                continue
            t, stack = base.graph.tensors[name], base.stacks.get(name, (0, 1))[1]
            looped, late = v.node in base.looped, v.node > max(base.looped, default=v.node)
            block = [
                base.graph.tensors[other].elements / repeats
                for other, (first, repeats) in base.stacks.items()
                if name in base.stacks and first == base.stacks[name][0]
            ]
            joined = t.elements / sum(block) if block else 1.0
            wanted = tuple(
                pricer.layout_table.number(base.rules[v.node].operand(slot, split, tuple(sizes)))
                for split in v.splits
            )
            priced = WeightCosts.of(costs.of(name, wanted, True))
            for k, n in enumerate(wanted):
                need = pricer.layout_table.layouts[n]
                for level in ZERO_STAGES:
                    w = weight_plan(
                        base.graph,
                        name,
                        [need],
                        Plan(tuple(sizes.items()), {}, zero_stage=level, zero_axes=("data",)),
                        True,
                    )
                    zero = w.zero_stage if w.zero_dim >= 0 else 0
                    full, piece = (
                        prod(local_shape(t.shape, x, sizes)) for x in (w.layout, cut_layout(w))
                    )
                    own, group = (piece if zero else full), prod(sizes[a] for a in w.zero_axes)
                    sent = [
                        (
                            "all-reduce",
                            tuple(a for a in w.grad_partial if not zero or a not in w.zero_axes),
                            own * recipe.reduction_bytes,
                            True,
                            shown,
                        )
                    ]
                    later = (
                        [
                            (
                                "reduce-scatter",
                                w.zero_axes,
                                own * group * recipe.reduction_bytes,
                                zero < 3,
                                shown
                                * (
                                    1
                                    - (zero == 3 and (looped or late))
                                    * hidden.spared
                                    * hidden.scattered
                                ),
                            )
                        ]
                        if zero
                        else []
                    )
                    forward, backward = (
                        (
                            "all-gather",
                            w.zero_axes,
                            own * group * recipe.parameter_bytes,
                            zero < 3,
                            1 - (zero == 3 and looped) * hidden.spared * share,
                        )
                        for share in hidden.gathered
                    )
                    once = (
                        sent + (later if zero == 1 else []) + ([forward] if zero in (1, 2) else [])
                    )
                    each = (later if zero >= 2 else []) + ([forward, backward] if zero == 3 else [])
                    seconds = [
                        sum(
                            part
                            * pricer.collective_s(
                                kind, axes, size, bucketed=late, stacked=stack, joined=joined
                            )
                            for kind, axes, size, late, part in some
                        )
                        for some in (once, each)
                    ]
                    if zero in (1, 2):  # beside the updates of other weights
                        new = pricer.collective_s(*forward[:3], bucketed=True, stacked=stack)
                        seconds[0] -= hidden.spared * min(
                            new, hidden.updated * pricer.optimizer_s(own, ())
                        )
                    assert priced.grad_reduce_per_step_s[level, k] == pytest.approx(
                        seconds[0] + pricer.optimizer_s(own, ()), rel=1e-12
                    )
                    assert priced.grad_reduce_per_microbatch_s[level, k] == pytest.approx(
                        seconds[1], rel=1e-12
                    )
                    assert priced.grad_accumulate_s[level, k] == pricer.grad_accumulate_s(
                        (own if zero >= 2 else full) * recipe.gradient_bytes
                    )
                    assert priced.grad_buffer_bytes[level, k] == full * recipe.gradient_bytes


def test_all_nodes_of_a_class_that_read_a_tensor_alike_are_one_link() -> None:
    space = space_of("zoo:t5-tiny", 16)
    graph, read = (
        space.base.graph,
        {v.name: k for k, v in enumerate(space.variables) if v.kind == "shared_layout"},
    )
    assert any(
        len(w.uses) < len(graph.consumers[w.name]) for w in space.base.tensor_edges
    )  # what the encoder makes for every decoder block
    for name, k in read.items():
        v = space.variables[k]
        assert sum(link.count for link in space.links if link.a == k) == v.count * len(
            graph.consumers[name]
        )
