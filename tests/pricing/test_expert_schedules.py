"""Mixtures of experts as frameworks run them: what is saved of them, how rows travel, DualPipe."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

import planner
from costmodels.collectives import DISPATCH
from costmodels.frameworks.kernels import (
    KernelNeed,
    kernel_parts,
    kernel_times_s,
    memory_bytes_per_s,
)
from costmodels.frameworks.peak_memory import (
    FrameworkMemory,
    beside_more,
    peak,
    remade_bytes,
    saved_bytes,
)
from costmodels.frameworks.step_time import (
    AFTER,
    BEFORE,
    BLOCKS,
    DUALPIPE,
    CollectiveWork,
    Work,
    step_time,
)
from costmodels.hardware.device import load_device
from costmodels.precision import load_recipe
from costmodels.runtimes import load_kernels, load_runtime
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.ops.expert_load import ROUTED_EXPERTS, expert_nodes
from planner.pricing.frameworks.dispatch import choice_groups, dispatch_of, reached
from planner.pricing.frameworks.kernels import need_of, role
from planner.pricing.frameworks.memory import rows_bytes
from planner.pricing.frameworks.selective import (
    DENSE,
    LATENTS,
    NORMS,
    ROUTED,
    SHARED,
    made_again,
    modules,
)
from planner.pricing.kernels import local_bytes
from planner.pricing.pricer import Pricer
from planner.pricing.terms import terms_of
from planner.report.summary import techniques
from planner.sharding.rule import Split
from planner.strategy.strategy import Strategy
from planner.workload.open import open_model

RUNTIME = load_runtime("megatron")
DEVICE = load_device("h100-sxm")
GIB = 2**30


def _facts(spec: str) -> GraphFacts:
    return GraphFacts.of(open_model(spec, 8, batch=8).graph(1), training=True)


def test_torchtitan_saves_every_second_product() -> None:
    """Of a block the first, third, and so on, as its policy counts them; attention, experts and
    sums of the residual stream too, nothing else."""
    fsdp = load_runtime("fsdp")
    dense = _facts("zoo:llama-tiny")
    first, period, _ = dense.runs[-1]
    for block in (range(first, first + period), range(first + period, first + 2 * period)):
        products = [i for i in block if role(dense.graph, i) in ("product", "into residual")]
        again = [made_again(dense, i, fsdp) for i in products]
        assert again == [False, True, False, True, False, True, False]
    base = _facts("zoo:deepseek-tiny,layers=4,dense_layers=1")
    kinds = {role(base.graph, i) for i in range(len(base.graph.nodes)) if made_again(base, i, fsdp)}
    assert {"norm", "RotaryEmbedding"} <= kinds
    assert not kinds & {"attention", "RoutedExperts", "residual"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("rows", "recompute", "fits"),
    [(1, "selective", True), (2, "selective", False), (2, "full", True)],
)
def test_what_ran_under_torchtitans_policy_fits(rows: int, recompute: str, fits: bool) -> None:
    """Llama 2 70B on 64 A100 (docs/performance.md of pytorch/torchtitan, at 0413364): two rows a
    device ran out of memory by operator, and ran with every block recomputed."""

    def planned() -> Strategy:
        return planner.plan(
            "zoo:llama2-70b,seq=4096",
            devices=64,
            batch=64 * rows,
            hardware="a100-80gb",
            pins=f"dp=64,zero=3,micro=1,recompute={recompute}",
            launcher="torchtitan",
            baselines=False,
            remedies=False,
        )

    if fits:
        assert planned().costs["fit"] == "yes"
        return
    with pytest.raises(PlanError) as refused:
        planned()
    assert refused.value.code == "P021"


def test_megatron_recomputes_modules() -> None:
    """Norms, the widening of latents, dense layers and shared experts whole. Routed experts save
    the rows that come, what their first layer leaves and, unless that is made again, what their
    second reads."""
    base = _facts("zoo:deepseek-tiny,layers=4,dense_layers=1")
    names = {
        node.id.split("/")[-2]
        for i, node in enumerate(base.graph.nodes)
        if made_again(base, i, RUNTIME)
    }
    norms = {"input_layernorm", "q_a_layernorm", "kv_a_layernorm", "post_attention_layernorm"}
    layer = {"gate_proj", "up_proj", "act_fn", "down_proj"}
    assert names == norms | layer | {"norm", "q_b_proj", "kv_b_proj", "mlp", "shared_experts"}
    assert modules(base.graph) == (NORMS, LATENTS, ROUTED, DENSE, SHARED)
    assert modules(_facts("zoo:mixtral-tiny").graph) == (NORMS, ROUTED)
    assert modules(_facts("zoo:llama-tiny").graph) == ()
    i, _ = next(expert_nodes(base.graph))
    topology = for_devices("h100-sxm", 8)
    pricer = Pricer(
        topology, pinned_mesh(topology, {"data": 8}), RUNTIME, load_recipe("bf16-mixed")
    )
    whole, again = rows_bytes(base, i, Split(), pricer)
    h, f = (base.rules[i].sizes[factor] for factor in ("h", "f"))
    assert isclose(again / whole, f / (h + 3 * f))


@pytest.mark.parametrize(("devices", "experts"), [(8, 8), (64, 64)])
@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("zoo:mixtral-8x7b,layers=2,experts=64,top=8,seq=128", 5.25),
        ("zoo:deepseek-v3,layers=4,seq=128", 3.6),
    ],
)
def test_a_row_is_sent_once_for_all_experts_of_a_node(
    source: str, places: float, devices: int, experts: int
) -> None:
    """Of eight choices spread evenly over eight nodes, or devices of one, 5.25 are reached: 8 (1 -
    (7/8)^8); of four that DeepSeek's router chose before, 4 (1 - (3/4)^8) = 3.6."""
    base = _facts(source)
    topology = for_devices("h100-sxm", devices)
    mesh = pinned_mesh(topology, {"expert": experts})
    pricer = Pricer(topology, mesh, RUNTIME, load_recipe("bf16-mixed"))
    i, _ = next(expert_nodes(base.graph))
    assert isclose(reached(base, i, pricer, ("expert",)), places / 8, rel_tol=2e-3)


def test_choices_of_groups_are_found_in_the_graph() -> None:
    for source, groups in (("deepseek-v3,layers=4,seq=128", (8, 4)), ("mixtral-tiny", (1, 1))):
        graph = _facts(f"zoo:{source}").graph
        i, _ = next(expert_nodes(graph))
        assert choice_groups(graph, i) == groups


def test_only_rows_are_exchanged_and_by_kernels_made_for_it() -> None:
    """Of an emitted program's exchanges: no numbers and shares of their own, no rows again in the
    backward pass, each row once; at one latency."""
    base, sharded = _facts("zoo:mixtral-8x7b,layers=2,seq=128"), {"expert": 8}
    topology = for_devices("h100-sxm", 8)
    pricer = Pricer(topology, pinned_mesh(topology, sharded), RUNTIME, load_recipe("bf16-mixed"))
    i, _ = next(expert_nodes(base.graph))
    split = Split.of({"expert-b": ("expert",)})
    made = dispatch_of(base, i, split, pricer)
    assert made is not None and made.kind == DISPATCH
    once = 8 * (1 - (7 / 8) ** 2) / 2
    assert isclose(made.share("all-to-all", made.rows_bytes, "forward"), once)
    assert isclose(made.share("all-to-all", made.rows_bytes, "backward"), once * 2 / 3)
    assert made.share("all-to-all", 64, "forward") == made.share("all-reduce", 1, "forward") == 0
    latency, plain = (
        pricer.collective_s(kind, ("expert",), 1) for kind in (DISPATCH, "all-to-all")
    )
    assert isclose(7 * latency, plain, rel_tol=1e-3)
    other = replace(pricer, runtime=load_runtime("fsdp"))
    sent = dispatch_of(base, i, split, other)
    assert sent is not None and sent.share("all-reduce", 1, "forward") == 1


def test_what_moves_of_rows_beside_products_takes_time() -> None:
    """Rows and what is between products are read and written, and kernels wait for the host."""
    kernels = load_kernels("fsdp")
    rates = load_runtime("megatron").rates
    need = KernelNeed(ROUTED_EXPERTS, "bfloat16", 1e12, 1e12, 1e6, 1e6, 0.0, 2.0, False)
    rows = replace(need, rows=1e5, width=4096, inner=1024)
    memory = memory_bytes_per_s(DEVICE, rates)
    wide, hidden, wide_back, hidden_back = kernels.expert_rows
    bare, with_rows = (kernel_times_s(n, DEVICE, kernels, rates) for n in (need, rows))
    more = [b - a for a, b in zip(bare, with_rows, strict=True)]
    moved = 2 * 1e5 / memory
    waits = kernels.expert_waits_s
    assert waits > 0
    assert isclose(more[0], moved * (wide * 4096 + hidden * 1024) + waits)
    assert isclose(more[1], moved * (wide_back * 4096 + hidden_back * 1024) + waits)


def test_megatron_has_other_kernels_on_newer_devices() -> None:
    """Those that its published runs there were priced with."""
    assert RUNTIME.on("a100-80gb", False).kernels == load_kernels("fsdp")
    assert RUNTIME.on("h100-sxm", False).kernels == load_kernels("nvidia")
    assert RUNTIME.on("gb300-nvl72", True).kernels == load_kernels("nvidia-fp8")
    topology = for_devices("h100-sxm", 8)
    mesh = pinned_mesh(topology, {"data": 8})
    assert Pricer(topology, mesh, RUNTIME, load_recipe("fp8")).runtime.kernels == load_kernels(
        "nvidia-fp8"
    )


def _work(schedule: str) -> Work:
    """Four stages of two blocks, each a product and an exchange of rows a tenth as long."""
    need = KernelNeed("product", "bfloat16", 1e13, 1e13, 1e6, 1e6, 0.0, 2.0, False)
    exchange = CollectiveWork("all-to-all", ("expert",), 1, 64, "forward", BLOCKS, False)
    return Work(
        stage_blocks=(2, 2, 2, 2),
        repeats=8,
        kernels=((BLOCKS, 1.0, need),),
        collectives=(exchange, replace(exchange, phase="backward")),
        times={BEFORE: 8, BLOCKS: 64, AFTER: 8},
        handed=(),
        neighbours=(),
        gradient_elements=(0.0,) * 4,
        optimizer_elements=0.0,
        microbatches=8,
        recompute="none",
        schedule=schedule,
        expert_axes=("expert",),
    )


def test_dualpipe_hides_exchanges_and_halves_the_bubble() -> None:
    """Exchanges run beside kernels that they slow; of the bubble is left (p/2 - 1)(F&B + B - 3W)."""

    def sent_s(kind: str, axes: tuple[str, ...], size: float, *, bucketed: bool = False) -> float:
        return 0.002

    plain, both = (
        step_time(_work(s), DEVICE, RUNTIME, RUNTIME.rates, sent_s) for s in ("1f1b", DUALPIPE)
    )
    exchanged = 2 * 2 * 0.002  # of a stage's two blocks, forward and backward
    stage = plain.kernels / 8 + exchanged
    assert isclose(plain.bubble, 3 * stage) and isclose(plain.exposed, 8 * exchanged)
    hidden = exchanged * (1 - RUNTIME.exchange_slows)
    assert isclose(both.hidden, 8 * hidden)
    assert isclose(both.total - both.bubble, 8 * (stage - hidden))
    backward = plain.kernels / 8 * 2 / 3
    waits = stage - hidden + backward + exchanged / 2 - 3 * backward / 2
    assert isclose(both.bubble, (4 / 2 - 1) * waits)


def test_dualpipe_holds_two_stages_and_one_microbatch_more() -> None:
    memory = FrameworkMemory(
        stage_blocks=(2, 2, 2, 2),
        parameters=(GIB,) * 4,
        gradients=(GIB,) * 4,
        state=(GIB,) * 4,
        gathered=0.0,
        results={(BLOCKS, "product"): GIB / 8, (BLOCKS, "norm"): GIB / 8},
        norms_gathered={},
        scores={},
        logits=0.0,
        pieces=0.0,
        entering=0.0,
        microbatches=8,
        recompute="none",
        recomputed={(BLOCKS, "norm"): GIB / 8},
    )
    kernels = RUNTIME.kernels
    assert kernels is not None
    saved, again = saved_bytes(memory, kernels)[BLOCKS], remade_bytes(memory, kernels)[BLOCKS]
    plain = peak(memory, RUNTIME)
    both = peak(replace(memory, schedule=DUALPIPE), RUNTIME)
    assert (both.parameters, both.gradients, both.optimizer) == (2 * GIB, 2 * GIB, GIB)
    assert isclose(both.activations / plain.activations, 5 / 4, rel_tol=0.03)
    left = peak(replace(memory, recompute="block-keep"), RUNTIME)
    assert isclose(left.activations / plain.activations, 1 - again / saved, rel_tol=1e-6)


@pytest.mark.slow
def test_deepseeks_own_layout_takes_about_what_was_published() -> None:
    """PP16 x EP64 under DualPipe in fp8: 180 thousand H800 hours a trillion tokens, 19.9 s a step
    of 15,360 sequences on 2,048 devices (DeepSeek-V3, 2.1 and 3.1). No constant was fitted to it; what is counted of exchanges and of
    recompute was chosen with it in view."""
    made = planner.plan(
        "zoo:deepseek-v3,seq=4096",
        devices=2048,
        batch=15360,
        pins="pp=16,dp=2,ep=64,zero=1,micro=120,schedule=dualpipe,recompute=selective",
        runtime="megatron",
        precision="fp8",
        baselines=False,
        remedies=False,
    )
    published = 180e3 * 3600 / 1e12 * 15360 * 4096 / 2048
    assert isclose(made.costs["step_time_s"], published, rel_tol=0.2)
    assert made.costs["fit"] != "no"
    with pytest.raises(PlanError, match="no program is written"):
        planner.emit(made, "zoo:deepseek-v3,seq=4096")


def test_dualpipe_asks_for_a_framework() -> None:
    with pytest.raises(PlanError, match="dualpipe is priced as frameworks run it"):
        planner.plan(
            "zoo:gpt-tiny,layers=8", devices=8, batch=64, pins="pp=4,dp=2,schedule=dualpipe"
        )


def test_exchanges_beside_other_kernels_cost_what_these_are_slowed_by() -> None:
    """What DualPipe hides, at the bubble and in the order of 1F1B; one pass of a virtual stage more
    is in flight."""

    def sent_s(kind: str, axes: tuple[str, ...], size: float, *, bucketed: bool = False) -> float:
        return 0.002

    work = _work("interleaved")
    waiting, beside = (
        step_time(w, DEVICE, RUNTIME, RUNTIME.rates, sent_s)
        for w in (work, replace(work, overlapped=True))
    )
    hidden = 2 * 2 * 0.002 * (1 - RUNTIME.exchange_slows)
    assert isclose(beside.hidden, 8 * hidden) and waiting.hidden == 0
    assert isclose(waiting.total - beside.total, (8 + 3) * hidden)
    assert isclose(beside_more(4, 4, 2), 1 / 2) and isclose(beside_more(4, 1, 1), 1 / 4)


def test_megatron_is_planned_with_exchanges_beside_other_kernels() -> None:
    """Unless it is pinned that they wait, or where blocks are recomputed whole; nobody else has
    it."""

    def planned(*more: str, **options: str) -> Strategy:
        return planner.plan(
            "zoo:mixtral-8x7b,layers=4,seq=1024",
            devices=8,
            hardware="h100-sxm",
            batch=64,
            baselines=False,
            remedies=False,
            pins=",".join(("ep=8", "zero=1", "micro=4", *more)),
            **{"runtime": "megatron", **options},
        )

    beside, waiting = planned(), planned("exchanges=waiting")
    assert beside.techniques["exchanges"] == "beside" and "exchanges" not in waiting.techniques
    assert "experts' rows sent beside other kernels" in techniques(beside)
    assert beside.cost.step_time_s < waiting.cost.step_time_s
    assert beside.cost.memory_per_device_bytes >= waiting.cost.memory_per_device_bytes
    assert "exchanges" not in planned("recompute=block").techniques
    with pytest.raises(PlanError, match="contradict each other"):
        planned("exchanges=beside", "recompute=block")
    with pytest.raises(PlanError, match="wait for experts' rows"):
        planned("exchanges=beside", runtime="fsdp")


@pytest.mark.slow
def test_pinned_exchanges_are_planned_where_the_best_plan_has_none() -> None:
    """Each mesh was solved for splits that send no rows, and refused for them."""

    def planned(model: str, pins: str) -> Strategy:
        return planner.plan(
            f"zoo:{model},layers=4,hidden=512,ff=1024,vocab=2048,seq=512",
            devices=16,
            hardware="a100-80gb",
            batch=1024,
            baselines=False,
            remedies=False,
            pins=pins,
            runtime="megatron",
        )

    assert planned("mixtral-8x7b", "exchanges=waiting").mesh_shape == (("data", 16),)
    assert planned("mixtral-8x7b", "exchanges=beside").techniques["exchanges"] == "beside"
    with pytest.raises(PlanError, match="no rows of routed experts travel"):
        planned("llama3-8b", "exchanges=beside")


@pytest.mark.parametrize("kernels", ["fsdp", "fused-norm", "nvidia", "nvidia-fp8"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8"])
def test_the_parts_of_a_price_are_all_of_it(kernels: str, precision: str) -> None:
    """Of every node of a mixture with latents, as `plan explain --price` shows them."""
    base, used = _facts("zoo:deepseek-tiny,layers=3,dense_layers=1"), load_kernels(kernels)
    topology = for_devices("h100-sxm", 8)
    pricer = Pricer(topology, pinned_mesh(topology, {"data": 8}), RUNTIME, load_recipe(precision))
    shown = set[str]()
    for i in base.times:
        need = need_of(base, i, Split(), *local_bytes(base, i, Split(), pricer), pricer)
        times = kernel_times_s(need, DEVICE, used, RUNTIME.rates)
        parts = kernel_parts(need, DEVICE, used, RUNTIME.rates)
        assert isclose(sum(p.forward_s for p in parts), times[0], abs_tol=1e-15)
        assert isclose(sum(p.backward_s for p in parts), times[1], abs_tol=1e-15)
        assert all(
            isclose(p.forward_s * p.per_s, p.amount, rel_tol=1e-9) for p in parts if p.amount
        )
        shown |= {p.what for p in parts}
    assert {"products", "passes over memory"} <= shown and len(shown) >= 6


def test_the_price_of_a_frameworks_node_is_explained() -> None:
    """It said "no kernel: it is a view" of all of them."""
    base = _facts("zoo:mixtral-tiny")
    topology = for_devices("h100-sxm", 8)
    pricer = Pricer(
        topology, pinned_mesh(topology, {"data": 8}), RUNTIME, load_recipe("bf16-mixed")
    )
    i, _ = next(expert_nodes(base.graph))
    terms = terms_of(base, i, Split(), pricer)
    assert [p.what.split(",")[0] for p in terms.parts][-1] == "the host"
    named = {c.name: c.place for c in terms.constants}
    assert named["fsdp.expert_waits_s"].startswith("kernel_sets.toml:")
    assert named["per_device.h100-sxm.matmul"].startswith("megatron.toml:")


@pytest.mark.slow
def test_nothing_is_proven_where_exchanges_may_be_beside_kernels() -> None:
    """A pinned mesh with exchanges beside kernels was below the bound of plans that wait."""

    def planned(*pins: str) -> Strategy:
        return planner.plan(
            "zoo:mixtral-8x7b,layers=4,hidden=1024,heads=16,ff=2048,vocab=8192,seq=1024",
            devices=16,
            hardware="h100-sxm",
            batch=64,
            baselines=False,
            remedies=False,
            runtime="megatron",
            pins=",".join(pins) or None,
        )

    free, waiting = planned(), planned("exchanges=waiting")
    assert not free.solver["bound_s"] and waiting.solver["bound_s"] > 0
