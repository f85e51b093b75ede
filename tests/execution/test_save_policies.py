"""Recomputation by name: which values have names, what policies save, that programs save and run
again exactly that, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from benchmarks.compiled_truth import truth
from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.emit.program import emit
from planner.errors import PlanError
from planner.execution.block_values import block_values, names_there
from planner.execution.layout_flow import derive
from planner.execution.loops import repeated_blocks
from planner.execution.plan import Plan
from planner.execution.save_policies import NAMES, PRESETS, saved_names, saving
from planner.graph.ir import Graph
from planner.graph.repeats import find_runs
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.pins.pins import parse_pins
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import entering_bytes, saved_by_blocks_bytes
from planner.strategy.strategy import Strategy
from planner.verify.numerics import compare, seeded_values
from planner.whatif.reprice import open_recorded
from planner.workload.model import Model, Workload

ATTENTION = ("norm", "q", "k", "v", "context", "out_proj")
MLP = ("mlp_up", "mlp_act", "mlp_down")
LLAMA = "zoo:llama-tiny,layers=3"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (LLAMA, (*ATTENTION, "mlp_gate", *MLP)),
        ("zoo:gpt-tiny", (*ATTENTION, *MLP)),
        ("zoo:bert-tiny", (*ATTENTION, *MLP)),
        ("zoo:vit-tiny", (*ATTENTION, *MLP)),
        ("zoo:t5-tiny", (*ATTENTION, *MLP)),
        ("zoo:dit-tiny", (*ATTENTION, *MLP)),
        ("zoo:mixtral-tiny", (*ATTENTION, "router", "experts")),
        ("zoo:ssm-tiny", ("norm",)),
        ("zoo:resnet-tiny", ()),
    ],
)
def test_values_of_blocks_have_names(source: str, names: tuple[str, ...]) -> None:
    graph = Model.open(source, Workload(batch=8), 8).graph(1)
    assert names_there(graph, find_runs(graph)) == names


def test_names_say_what_attention_and_mlp_do() -> None:
    """Queries after their rotary embedding; of a gated unit the side of the activation; products
    after their biases; both attentions of a decoder."""

    def ids(source: str, name: str) -> list[str]:
        graph = Model.open(source, Workload(batch=8), 8).graph(1)
        found = block_values(graph, find_runs(graph)).items()
        return [graph.nodes[graph.producer[t]].id.split("/", 3)[-1] for t, n in found if n == name]

    assert ids(LLAMA, "q") == ["self_attn/Add"]
    assert ids(LLAMA, "mlp_gate") == ["mlp/gate_proj/MatMul"]
    assert ids("zoo:gpt-tiny", "out_proj") == ["attn/out_proj/Add"]
    assert len(ids("zoo:t5-tiny", "k")) == 3


def test_pins_are_names_and_presets() -> None:
    said = {
        "save:q,k,v": "save:q,k,v",
        "save:v+q, k": "save:q,k,v",
        "save:block_input": "block",
        "save_qkv_proj": "save:q,k,v",
        "full": "block",
        "selective": "block-keep",
        "minimal": "save:q,k,v,out_proj,mlp_gate,mlp_up,mlp_down",
    }
    for text, value in said.items():
        pins = parse_pins(f"tp=2,recompute={text},zero=1")
        assert pins.techniques == {"recompute": value, "zero_stage": 1}
    for wrong in ("save:q,query", "save_nothing", "3"):
        with pytest.raises(PlanError, match="P020"):
            parse_pins(f"recompute={wrong}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("preset", "size"),
    [
        ("full", 21.5e9),
        ("save_out_proj", 42.9e9),
        ("save_qkv_proj", 48.3e9),
        ("save_dot_except_mlp", 69.8e9),
        ("save_dot_except_mlpwi", 69.8e9),
        ("save_dot_with_context_except_mlp", 91.3e9),
        ("minimal", 220.1e9),
        ("minimal_with_context", 241.6e9),
    ],
)
def test_presets_save_what_their_widths_say(preset: str, size: float) -> None:
    """Llama 3 70B, 2 x 8,192 tokens in bfloat16: what enters each block, and by name. The last
    product of an MLP is read by nothing but a sum, so that naming it saves nothing."""
    base, pricer = _large()
    recompute = saving(PRESETS[preset])
    plan = Plan((("data", 1),), {}, recompute=recompute, repeated_blocks=base.runs)
    flow = derive(base.graph, plan, training=True, rules=base.rules, grad=base.grad)
    runs, _ = repeated_blocks(flow)
    entering = sum(run.repeats * entering_bytes(flow, pricer, run) for run in runs)
    named = saved_by_blocks_bytes(base, flow, runs, pricer)
    saved = entering + sum(size for _, size in named)
    assert saved == pytest.approx(size, abs=6e7)


@cache
def _large() -> tuple[GraphFacts, Pricer]:
    topology = for_devices("cpu", 1)
    pricer = Pricer(
        topology, meshes(topology)[0], load_runtime("jax-shard_map"), load_recipe("bf16-mixed")
    )
    graph = Model.open("zoo:llama3-70b,seq=8192", Workload(batch=2), 1).graph(1)
    return GraphFacts.of(graph, training=True), pricer


@cache
def _planned(source: str, pins: str) -> tuple[Graph, Plan]:
    found = planner.plan(
        source,
        devices=8,
        batch=8,
        hardware="cpu",
        precision="fp32",
        pins=f"{pins},recompute=save:{','.join(NAMES)}",
        baselines=False,
        cache=None,
    )
    graph = open_recorded(found, source).graph(found.chosen.microbatches)
    return graph, found.plan_for(graph)


RUN_AGAIN = [
    (LLAMA, "dp=2,tp=4,tensor=megatron", "q,k,v"),
    (LLAMA, "dp=2,tp=4,tensor=megatron-sp,micro=2", "context,out_proj,mlp_up"),
    ("zoo:gpt-tiny", "dp=4,tp=2,zero=3", "q,k,v,context,out_proj,mlp_up,mlp_act,mlp_down"),
    ("zoo:mixtral-tiny", "dp=2,ep=4", "norm,router,experts"),
]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("source", "pins", "names", "unroll"),
    [
        pytest.param(*case, unroll, marks=[pytest.mark.slow] * (unroll is not bool(i % 2)))
        for i, case in enumerate(RUN_AGAIN)
        for unroll in (False, True)
    ],
)
def test_programs_run_again_what_is_predicted(
    source: str, pins: str, names: str, unroll: bool
) -> None:
    graph, plan = _planned(source, pins)
    plan = replace(plan, recompute=f"save:{names}")
    assert not truth(graph, plan, unroll=unroll).differences()


@pytest.mark.slow
def test_what_is_saved_is_not_made_again() -> None:
    """Of Megatron's block FLOPs fall by those of the products saved; nothing falls by a name that
    no gradient reads."""
    graph, plan = _planned(LLAMA, "dp=2,tp=4,tensor=megatron")
    flops = {
        names: truth(graph, replace(plan, recompute=saving(names.split(",")))).compiled_flops
        for names in ("", "q,k,v", "mlp_gate", "mlp_down")
    }
    rows, layers, places = 8 * 16 // 2, 3, 4
    assert flops[""] - flops["q,k,v"] == 2 * rows * 64 * (64 + 32 + 32) * layers // places
    assert flops[""] - flops["mlp_gate"] == 2 * rows * 64 * 176 * layers // places
    assert flops[""] == flops["mlp_down"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shard_map", pytest.param("jit", marks=pytest.mark.slow)])
def test_numbers_are_those_of_the_whole_program(backend: str) -> None:
    graph, plan = _planned(LLAMA, "dp=2,tp=4,tensor=megatron-sp,micro=2")
    plan = replace(plan, recompute="save:q,k,context,mlp_up")
    program = emit(graph, plan, workload="train", backend=backend)  # type: ignore[arg-type]
    assert 'save_names("q", "k", "context", "mlp_up")' in program.text
    found, _ = compare(
        graph,
        plan,
        workload="train",
        backend=backend,
        values=seeded_values(graph, {}),
        program=program,
    )
    assert found.outputs < 1e-5 and found.gradients < 1e-4


def test_files_say_which_values_are_saved(tmp_path: Path) -> None:
    found = planner.plan(
        LLAMA, devices=8, batch=8, hardware="cpu", pins="dp=8,recompute=save_out_proj", cache=None
    )
    path = tmp_path / "plan.json"
    found.save(path)
    again = Strategy.load(path)
    assert again.chosen.recompute == again.techniques["recompute"] == "save:out_proj"
    assert saved_names(again.chosen.recompute) == ("out_proj",)
    named = [row["saved_as"] for row in again.nodes.values() if "saved_as" in row]
    assert named == ["out_proj"]


def test_names_that_no_value_has_are_refused_or_left_out() -> None:
    options: dict[str, Any] = {
        "devices": 8,
        "batch": 8,
        "hardware": "cpu",
        "baselines": False,
        "cache": None,
    }
    found = planner.plan("zoo:gpt-tiny", pins="dp=8,recompute=minimal", **options)
    assert found.chosen.recompute == "save:q,k,v,out_proj,mlp_up,mlp_down"
    with pytest.raises(PlanError, match=r"P023.*\n.*its values are norm"):
        planner.plan("zoo:ssm-tiny", pins="dp=8,recompute=save:q", **options)
    with pytest.raises(PlanError, match="P024"):
        planner.plan(
            "zoo:gpt-tiny",
            pins="dp=8,recompute=save:q",
            runtime="megatron",
            **options | {"hardware": "h100-sxm"},
        )


def test_pins_say_what_waits_in_host_memory() -> None:
    said = {
        "save:q,k,offload:context": "save:q,k,offload:context",
        "offload:out_proj+context,save:k": "save:k,offload:context,out_proj",
        "offload:mlp_gate, mlp_up": "offload:mlp_gate,mlp_up",
        "qkv_proj_offloaded": "offload:q,k,v",
        "minimal_offloaded": "offload:q,k,v,out_proj,mlp_gate,mlp_up,mlp_down",
    }
    for text, value in said.items():
        pins = parse_pins(f"tp=2,recompute={text},zero=1")
        assert pins.techniques == {"recompute": value, "zero_stage": 1}
    for wrong in ("save:q,offload:q", "offload:query", "offload:block_input"):
        with pytest.raises(PlanError, match="P020"):
            parse_pins(f"recompute={wrong}")
    with pytest.raises(PlanError, match="P024"):
        parse_pins("pp=2,recompute=offload:q")


def test_offloaded_values_leave_the_device_and_pay_for_their_way() -> None:
    """Of 16 layers what q, k, v and the context take is gone but for two layers on their way; the
    host's link carries it out and in, and no loop copies it."""
    options: dict[str, Any] = {
        "devices": 8,
        "batch": 8,
        "hardware": "cpu",
        "precision": "fp32",
        "baselines": False,
        "cache": None,
    }
    here, away = (
        planner.plan(
            "zoo:llama-tiny,layers=16", pins=f"dp=8,micro=1,zero=0,recompute={what}", **options
        )
        for what in ("save:q,k,v,context", "offload:q,k,v,context")
    )
    assert away.plan.in_host_memory == ("q", "k", "v", "context")
    # 16 positions, 64 of queries and of the context, 32 of keys and of values, float32.
    size = 16 * (64 + 64 + 32 + 32) * 4
    slack = 1 + load_runtime("jax-shard_map").memory_slack
    fell = (
        here.costs["memory_breakdown_bytes"]["activations"]
        - away.costs["memory_breakdown_bytes"]["activations"]
    )
    assert fell == pytest.approx((16 - 2) * size * slack, rel=0.02)
    ways = 2 * 16 * size / for_devices("cpu", 8).device.host_bytes_per_s
    more = away.costs["exposed_communication_time_s"] - here.costs["exposed_communication_time_s"]
    assert more == pytest.approx(ways, rel=1e-3)
    assert away.costs["loop_copy_time_s"] < here.costs["loop_copy_time_s"]
    assert "q, k, v, context send to host memory" in str(away)


def test_numbers_with_values_in_host_memory_are_those_of_the_whole_program() -> None:
    graph, plan = _planned(LLAMA, "dp=2,tp=4,tensor=megatron-sp,micro=2")
    plan = replace(plan, recompute="save:q,k,offload:context,mlp_up")
    program = emit(graph, plan, workload="train")
    assert 'save_or_offload(["q", "k"], ["context", "mlp_up"])' in program.text
    found, _ = compare(
        graph,
        plan,
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
        program=program,
    )
    assert found.outputs < 1e-5 and found.gradients < 1e-4
    for refused in ({"unroll": True}, {"backend": "jit"}):
        with pytest.raises(PlanError, match="P076"):
            emit(graph, plan, workload="train", **refused)  # type: ignore[arg-type]
