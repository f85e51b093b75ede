"""Models whose first layers are unlike the others (DeepSeek-V3: three dense ones before the mixtures)
under many pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.pipeline import laid_out_blocks
from planner.interop.price import hand_over
from planner.machine.topology import from_json
from planner.verify import worker
from planner.whatif.reprice import open_recorded, reprice
from planner.workload.open import open_model
from tests.verify.in_process import compared

EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")
TINY = "zoo:deepseek-tiny,layers=6,dense_layers=3"
SINGLE = "zoo:deepseek-tiny,layers=3,dense_layers=1"
GIB = 2**30


def test_stages_are_cut_anywhere_where_all_would_run_the_first_layers() -> None:
    """Three of six layers in each of four stages are more than a forward pass; of embeddings there
    is nothing to multiply."""
    layers = GraphFacts.of(open_model(TINY, 8, batch=8).graph(1), training=True)
    assert layers.repeats_too_much(4) and not layers.repeats_too_much(1)
    gpt = GraphFacts.of(open_model("zoo:gpt-tiny", 8, batch=8).graph(1), training=True)
    assert not gpt.repeats_too_much(64)


@pytest.mark.slow
def test_such_a_program_is_exact_and_priced_alike_from_its_file() -> None:
    tiny = "zoo:deepseek-tiny,layers=4,dense_layers=2"
    made = planner.plan(
        tiny,
        devices=4,
        batch=8,
        precision="fp32",
        hardware=EAGER,
        baselines=False,
        pins="pp=2,expert=2,micro=2,schedule=1f1b",
    )
    assert made.techniques["cuts"]
    again = reprice(made, open_recorded(made, tiny), from_json(made.topology)).cost
    assert abs(again.step_time_s / made.costs["step_time_s"] - 1) < 1e-5
    report = worker.verify(made, tiny)
    assert report.ok, report.text()


def test_a_launcher_without_such_stages_says_so() -> None:
    """Layers unlike the blocks, not the batch, are why there is none."""
    with pytest.raises(PlanError, match="58 repeated blocks evenly, and 3 more layers") as refused:
        planner.plan(
            "zoo:deepseek-v3", devices=2048, batch=15360, pins="pp=16,ep=64", launcher="torchtitan"
        )
    assert refused.value.code == "P068" and any("pp=2" in h for h in refused.value.help)


@pytest.mark.slow
def test_megatron_lays_dense_layers_out_with_the_mixtures() -> None:
    """61 layers on 16 stages: the first holds the three dense ones and one mixture, the last two
    beside the head; the step is priced by the longest, and every stage holds its own part."""
    made = planner.plan(
        "zoo:deepseek-v3,seq=4096",
        devices=2048,
        batch=15360,
        pins="pp=16,dp=2,ep=64,zero=1,micro=120,recompute=block",
        launcher="megatron",
        precision="fp8",
        baselines=False,
        remedies=False,
    )
    assert laid_out_blocks(58, 16, 2.99, 1.23) == (1, 3, *[4] * 13, 2)
    # 16 microbatches wait in the first stage: what enters it and its four layers.
    entering = 16 * 4096 * 7168 * 2
    held = made.costs["memory_breakdown_bytes"]["activations"]
    assert 5 * entering <= held <= 1.1 * 5 * entering
    assert made.costs["step_time_s"] < 60
    handed = hand_over(made, "zoo:deepseek-v3,seq=4096", "megatron")
    assert "pipeline_model_parallel_layout: Etttt|ttt|(tttt|)*13ttL\n" in handed.text
    assert not handed.inexpressible and handed.rows[-1].cost == handed.rows[0].cost


@pytest.mark.slow
def test_one_row_a_device_of_deepseek_v3_keeps_what_its_stages_hold() -> None:
    """Sixteen stages of 64-way experts, a row of 4,096 x 7,168 in bf16 for each device and
    microbatch: what enters a stage in 31 slots, and one microbatch of a stage's four layers. Where
    all-to-all takes rows to their experts nothing else waits; gathering the rows of 64 devices,
    which is faster as a node's devices share what comes over the network, keeps them in each of
    four layers."""
    slots, gathered = 31 * 4096 * 7168 * 2, 4 * 64 * 4096 * 7168 * 2
    made = planner.plan(
        "zoo:deepseek-v3", devices=2048, batch=15360, baselines=False, pins="pp=16,ep=64"
    )
    assert made.techniques["microbatches"] == 120  # one row a device, found unasked
    assert made.costs["fit"] != "no" and made.costs["distinct_work"] > 0.6
    exchanged = planner.plan(
        "zoo:deepseek-v3",
        devices=2048,
        batch=15360,
        baselines=False,
        pins={
            "mesh": {"stage": 16, "data": 2, "expert": 64},
            "*/mlp/ReduceSum_4": {"split": {"b": ["data"], "expert-b": ["expert"]}},
        },
    )
    activations = [s.costs["memory_breakdown_bytes"]["activations"] for s in (exchanged, made)]
    assert slots < activations[0] < 12 * GIB
    assert activations[1] - activations[0] == pytest.approx(gathered, rel=0.05)


@pytest.fixture(scope="module")
def single() -> planner.Strategy:
    """A plan of a model with one dense layer, as DeepSeek-V2 and Kimi K2 have."""
    return planner.plan(
        SINGLE,
        devices=8,
        batch=8,
        precision="fp32",
        baselines=False,
        pins="dp=4,tp=2,recompute=save:context",
    )


def test_a_single_dense_layer_is_a_block_as_the_others(single: planner.Strategy) -> None:
    assert [block["repeats"] for block in single.blocks] == [1, 2]


@pytest.mark.slow  # other blocks are recomputed by name in tests/execution/test_save_policies.py
def test_a_single_dense_layer_is_recomputed_by_name_as_the_others(single: planner.Strategy) -> None:
    found = compared(single, SINGLE)
    assert max(found.outputs, found.gradients) < 1e-5


def test_a_single_dense_layer_holds_no_more_than_one_of_several() -> None:
    def saved(dense_layers: int) -> float:
        model = f"zoo:deepseek-tiny,layers=6,dense_layers={dense_layers},seq=512"
        made = planner.plan(
            model, devices=1, batch=8, baselines=False, pins="recompute=block,micro=1"
        )
        return made.cost.memory_breakdown_bytes["activations"]

    assert saved(1) < 1.1 * saved(2)
