"""A few dozen published runs (facts with their source in each row) priced as the framework ran
them: a change that makes estimates worse is seen here.

Rows of these sources set constants of the profiles, so the bounds are no claim about other runs;
`benchmarks.published_runs` prints held-out figures.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from benchmarks.published_runs import main, outcomes, prepare_all
from benchmarks.published_scores import (
    Outcome,
    choice,
    covered,
    covered_held_out,
    errors,
    fitting,
    kendall,
    memory_spread,
    order,
    quantiles,
)
from costmodels.frameworks.peak_memory import in_flight, peak
from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS, handed_s
from costmodels.runtimes import Rates
from planner.calibrate.runs.fit import Prepared, prepare
from planner.calibrate.runs.keep import COUNTS, fitted_constants, held_out_bytes, priced_bytes
from planner.calibrate.runs.rows import (
    Left,
    case_of,
    kernels_of,
    level,
    machine,
    plan_of,
    runtime_of,
    sequence_parallel,
)
from planner.execution.collective import CollectiveUse
from planner.execution.pipeline import Pipeline
from planner.pricing.frameworks.stage_passes import without_bubbles
from planner.pricing.frameworks.work import merged_uses
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import derived

ROWS = Path(__file__).parents[1].joinpath("golden") / "published_runs.jsonl"
MOST = {
    "Hagemann": 0.05,
    "vTrain measured (multi": 0.135,
    "vTrain measured (single": 0.11,
    "mosaicml": 0.04,
    "torchtitan": 0.135,
    "NVIDIA Megatron-Bridge": 0.07,
}
"""Mean error of each source's rows. Two of vTrain's eight of several nodes, which took twice as
long as their neighbours, make 0.10 of its. The last two set no constant."""


def each_source(sources: Iterable[str], rarely: Container[str]) -> list[Any]:
    return [pytest.param(s, marks=[pytest.mark.slow] * (s in rarely)) for s in sources]


@cache
def prepared(source: str) -> list[Prepared]:
    """Rows of sources whose names begin so, priced."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    found, left = prepare_all([r for r in rows if str(r["source"]).startswith(source)])
    assert not left
    return found


@pytest.mark.parametrize(
    "source",
    each_source(
        MOST, rarely=("Hagemann", "mosaicml", "NVIDIA Megatron-Bridge", "vTrain measured (multi")
    ),
)
def test_estimates_of_published_runs_stay_as_good_as_they_are(source: str) -> None:
    mine = [p for p in prepared(source) if p.case.measured_s]
    assert len(mine) >= 8
    assert errors(outcomes(mine, [p.step_s() for p in mine]))["mean"] <= MOST[source]


@pytest.mark.slow
def test_runs_that_ran_out_of_memory_are_told() -> None:
    mine = prepared("Hagemann")
    found = outcomes(mine, [p.step_s() for p in mine])
    told = fitting(found)
    assert told["out_of_memory"] >= 10
    assert told["precision"] >= 0.93
    assert told["recall"] >= 0.93
    assert choice(found)["picks_out_of_memory"] == 0
    assert order(found)[0] >= 0.9


@pytest.mark.parametrize(
    "source", each_source([*MOST][1:], rarely=("mosaicml", "NVIDIA Megatron-Bridge"))
)
def test_runs_that_ran_are_said_to_fit(source: str) -> None:
    mine = prepared(source)
    assert len(mine) >= 8
    assert [p.case.row["model"] for p in mine if p.cost.memory.total > p.case.usable_bytes] == []


def test_constants_of_memory_follow_the_runs() -> None:
    """Rows said to have run out of memory, all that are priced above half of what is usable, drive
    every kept byte up; had all run, down."""
    mine = [p for p in prepared("Hagemann") if p.cost.memory.total > 0.5 * p.case.usable_bytes]
    least, most = (
        fitted_constants([replace(p, case=replace(p.case, measured_s=s)) for p in mine])
        for s in (1.0, None)
    )
    assert all(a <= b for a, b in zip(least, most, strict=True))
    assert (
        sum(priced_bytes(mine, least))
        < sum(priced_bytes(mine, next(zip(*COUNTS.values(), strict=True))))
        < sum(priced_bytes(mine, most))
    )
    unseen = held_out_bytes(mine, lambda c: c.row["seq"])
    first = [k for k, p in enumerate(mine) if p.case.row["seq"] == mine[0].case.row["seq"]]
    others = fitted_constants([p for p in mine if p.case.row["seq"] != mine[0].case.row["seq"]])
    assert [unseen[k] for k in first] == priced_bytes([mine[k] for k in first], others)


def test_one_moment_of_the_backward_pass_stands_for_the_peak() -> None:
    run = next(
        p
        for p in prepared("Hagemann")
        if p.memory.recompute != "none" and p.memory.pieces and len(p.memory.stage_blocks) > 1
    )
    assert run.cost.memory == peak(run.memory, run.case.runtime)
    kernels = run.case.runtime.kernels
    assert kernels is not None
    for more in (
        replace(kernels, logit_saved=40.0),
        replace(kernels, logit_saved=17.413, logit_gathered=30.0),
        replace(kernels, logit_piece=60.0),
    ):
        assert (
            peak(run.memory, replace(run.case.runtime, kernels=more)).temporary
            > run.cost.memory.temporary
        )
    assert (
        peak(run.memory, replace(run.case.runtime, pinned=1.0)).temporary
        > run.cost.memory.temporary
    )
    once, twice = (peak(replace(run.memory, microbatches=n), run.case.runtime) for n in (1, 2))
    assert once.gradients < twice.gradients == run.cost.memory.gradients


def test_chunks_in_flight() -> None:
    assert [in_flight(s, 4, 100, 1) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight(0, 4, 2, 1) == 2
    assert [in_flight(s, 4, 100, 2) for s in range(4)] == [
        5.5,
        4.5,
        3.5,
        2.5,
    ]  # 2 (p - 1 - s) + (v - 1) p + 1 chunks of half a stage
    assert in_flight(0, 4, 4, 2) == 4
    assert [in_flight(s, 4, 12, 1, "gpipe") for s in range(4)] == [12] * 4
    assert in_flight(0, 1, 12, 1, "gpipe") == 1  # without stages each runs back at once


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved,virtual=2"])
def test_stages_of_frameworks_do_their_own_part_alone(schedule: str) -> None:
    """Nothing is multiplied in bubbles, and under GPipe all microbatches wait for their backward
    pass."""
    plans = {
        s: planner.plan(
            "zoo:gpt-tiny,layers=4",
            devices=8,
            batch=32,
            runtime="megatron",
            pins=f"pp=2,dp=4,micro=8,recompute=none,schedule={s}",
        ).cost
        for s in {schedule, "1f1b"}
    }
    assert plans[schedule].distinct_work == pytest.approx(1)
    handed = plans[schedule].communication_bytes_per_device["collective-permute"]["stage"]
    turns = 16 if "virtual" in schedule else 8
    assert handed["payload"] == 2 * turns * (16 * 64 * 2)  # a row of a microbatch, there and back
    saved, least = (plans[s].memory_breakdown_bytes["activations"] for s in (schedule, "1f1b"))
    assert saved > 3 * least if schedule == "gpipe" else saved < 2 * least


def test_what_frameworks_send_is_for_microbatches_alone() -> None:
    """Two reductions a block and pass, and of what runs once in a step one."""
    pipeline = Pipeline(
        first=0, period=1, repeats=4, stages=4, microbatches=8, schedule="interleaved",
        virtual_stages=2,
    )  # fmt: skip
    use = CollectiveUse("all-reduce", ("tensor",), 4, 0, "forward", "x", place=BLOCKS)
    counts = {BLOCKS: (2 * pipeline.ticks, 2 * 16), AFTER: (8, 8), BEFORE: (1, 1)}
    for place, (run, wanted) in counts.items():
        (made,) = without_bubbles([replace(use, place=place, count=run)], pipeline)
        assert made.count == wanted
    assert without_bubbles([use], None) == (use,)


def test_rows_are_read_with_what_their_framework_keeps() -> None:
    row = json.loads(ROWS.read_text().splitlines()[0]) | {
        "kernel": None,
        "recompute": "none",
        "notes": "",
        "zero": None,
        "sequence_parallel": None,
    }
    megatron = row | {
        "source": "NVIDIA Megatron-Bridge performance summary",
        "hardware": "DGX-H100",
        "precision": "FP8",
    }
    assert kernels_of(row | {"hardware": "A100-80GB"}, 1) == "fused-norm"
    assert (kernels_of(megatron, 1), kernels_of(megatron | {"precision": "bf16"}, 1)) == (
        "nvidia-fp8",
        "nvidia",
    )
    assert (
        level(megatron),
        sequence_parallel(megatron),
        level(megatron | {"zero": 0}),
        sequence_parallel(row),
    ) == (1, True, 0, False)
    selective, offloaded = (
        runtime_of(megatron | more, 1).kernels
        for more in ({"recompute": "selective"}, {"notes": "remat_policy=qkv_proj_offloaded"})
    )
    assert selective is not None
    assert offloaded is not None
    assert "norm" not in selective.saved
    assert not offloaded.saved
    with pytest.raises(Left, match="LoRA"):
        case_of(megatron | {"notes": "task 'LoRA Performance'"})
    assert machine("H100 96GB HBM2e 2.4TB/s", "", 8).device.memory_bytes == 96 * 10**9


def test_ranges_of_errors_left_out() -> None:
    def run(group: str, ratio: float) -> Outcome:
        return Outcome(group, ratio, 1.0, 1.0, 1.0)

    rows = [run("a", 1.0 + 0.01 * k) for k in range(10)] + [
        run("b", 1.02 + 0.01 * k) for k in range(10)
    ]
    assert covered(rows, (0.0, 0.045)) == pytest.approx(8 / 20)
    assert quantiles([float(k) for k in range(1, 20)]) == (2.0, 18.0)
    # The ends of ten ratios are the least and the most: a's 1.00 to 1.09 hold eight of b's 1.02 to
    # 1.11, and those eight of a's.
    assert covered_held_out(rows, [o.group for o in rows]) == pytest.approx(16 / 20)
    edge = [
        Outcome("g", None if k % 2 else 1.0, 1.0, 1 + 0.002 * k * (1 if k % 2 else -1), 1.0)
        for k in range(40)
    ]
    blurred = [
        Outcome("g", None if k % 4 == 1 else 1.0, 1.0, 1 + 0.002 * k * (1 if k % 2 else -1), 1.0)
        for k in range(40)
    ]
    assert memory_spread(edge) < 0.02 < memory_spread(blurred)


def test_slower_parts_make_a_step_longer() -> None:
    run = next(
        p
        for p in prepared("Hagemann")
        if p.case.row["tp"] > 1
        and p.case.row["pp"] > 1
        and p.case.row["dp"] > 1
        and p.case.measured_s
    )
    as_is = run.step_s(Rates())
    for slower in (
        Rates(matmul=0.8),
        Rates(memory=0.8),
        Rates(attention=0.8),
        Rates(inner=0.5),
        Rates(outer=0.2),
    ):
        assert run.step_s(slower) > as_is


def test_devices_that_hold_the_same_send_a_piece_each() -> None:
    """Two of four stages in a node: one neighbour is reached inside. What tensor parallelism leaves
    whole is sent in pieces, which the receivers gather."""
    row = next(
        p.case.row
        for p in prepared("Hagemann")
        if p.case.measured_s and "LLaMA-13B" in p.case.row["model"]
    )
    row = {
        **row,
        "devices": 16,
        "tp": 4,
        "pp": 4,
        "dp": 1,
        "zero": 0,
        "microbatch": 1,
        "global_batch": 16,
        "recompute": "none",
    }
    whole, cut = (prepare(case_of({**row, "sequence_parallel": s})) for s in (False, True))
    sent, less = (p.work.handed[0].size_bytes for p in (whole, cut))
    assert whole.work.handed[0].same_axes == ("model",) and not cut.work.handed[0].same_axes
    assert sent == 4 * less
    pricer = Pricer(whole.case.topology, whole.case.mesh, whole.case.runtime, whole.case.recipe)
    inner, outer = whole.case.topology.levels
    slow, fast = (less / (x.bandwidth_bytes_per_s * x.efficiency) for x in (outer, inner))
    assert handed_s(cut.work, pricer.collective_s) == pytest.approx(slow + fast, rel=0.01)
    assert handed_s(whole.work, pricer.collective_s) == pytest.approx(
        slow + fast + 2 * pricer.collective_s("all-gather", ("model",), sent), rel=0.01
    )


TITAN = {
    "source": "torchtitan benchmarks",
    "model": "Llama 3.1 8B",
    "layers": 4,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "seq": 2048,
    "devices": 8,
    "hardware": "H100 96GB HBM2e 2.4TB/s, 500W (NVLink 8/node)",
    "tp": 1,
    "pp": 1,
    "dp": 8,
    "zero": 3,
    "microbatch": 1,
    "global_batch": 8,
    "recompute": "none",
    "precision": "bf16",
    "metric": "step_time_s",
    "value": 1.0,
}


def test_cards_are_those_that_a_row_describes() -> None:
    card, plain = (machine(words, "", 8).device for words in (TITAN["hardware"], "H100"))
    assert (card.memory_bytes_per_s, card.memory_bytes) == (2.4e12, 96 * 10**9)
    assert card.peak("bfloat16") == pytest.approx(plain.peak("bfloat16") * (500 / 700) ** (1 / 3))
    assert machine("H100 900W", "", 8).device.peak("bfloat16") == plain.peak("bfloat16")


def test_only_products_with_weights_are_eight_bit() -> None:
    wide, narrow = (prepare(case_of({**TITAN, "precision": p})) for p in ("bf16", "fp8"))
    types = {need.role: need.dtype for _, _, need in narrow.work.kernels if need.flops}
    assert types["attention"] == "bfloat16"
    assert {types["product"], types["into residual"]} == {"float8_e4m3fn"}
    assert [(p, n, need.ins, need.outs) for p, n, need in narrow.work.kernels] == [
        (p, n, need.ins, need.outs) for p, n, need in wide.work.kernels
    ]
    assert narrow.step_s() < wide.step_s()


def test_selective_recompute_takes_time() -> None:
    whole, kept, other = (
        prepare(case_of({**TITAN, **more}))
        for more in (
            {},
            {"recompute": "selective"},
            {"recompute": "selective", "source": "another"},
        )
    )
    assert whole.step_s() < other.step_s() < kept.step_s() < 1.3 * whole.step_s()


def test_notes_say_that_a_recipe_runs_fsdp() -> None:
    recipe = {"source": "NVIDIA Megatron-Bridge performance summary"}
    assert [level({**recipe, "notes": n}) for n in ("FSDP=64; arch", "FSDP=0", "")] == [3, 1, 1]


def test_scores_of_known_outcomes() -> None:
    def run(measured: float | None, priced: float, size: float) -> Outcome:
        return Outcome("g", measured, priced, size, 10.0)

    rows = [run(1.0, 1.1, 5.0), run(2.0, 1.8, 9.6), run(None, 0.5, 9.0), run(None, 0.4, 12.0)]
    assert errors(rows)["mean"] == pytest.approx(0.1)
    assert fitting(rows) == {
        "rows": 4,
        "out_of_memory": 2,
        "said": 1,
        "precision": 1.0,
        "recall": 0.5,
        "edge_rows": 1,
        "edge_right": 1.0,
    }
    assert choice(rows)["picks_out_of_memory"] == 1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall([1, 2, 3], [3, 2, 1]) == -1


def test_the_command_prints_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()][-2:]
    rows.append({**rows[0], "cp": 3})
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["--runs", str(path), "--as-shipped", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["left_out"] == {"degrees do not multiply to the devices": 1}
    assert printed["sources"][0]["rows"] == 2


def test_sequences_are_cut_from_end_to_end() -> None:
    """Context parallelism: positions of every layer, attention on a ring, states over it, too."""
    row = json.loads(ROWS.read_text().splitlines()[-1])
    sizes = {
        "model": "llama",
        "layers": 2,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 1024,
        "vocab": 1024,
    }
    long = {"seq": 65536, "devices": 8, "tp": 2, "pp": 1, "cp": 2, "dp": 2, "global_batch": 4}
    more = {"zero": 1, "microbatch": None, "metric": "step_time_s", "value": 1.0}
    case = case_of(row | sizes | long | more)
    base, plan = plan_of(case)
    assert case.microbatches == 2 and plan.zero_axes == ("data", "sequence")
    for node in base.graph.nodes:
        cut = dict(plan.splits[node.id].pairs)
        if node.op == "Attention":
            assert cut["ring"] == ("sequence",) and ("model",) in cut.values()
        elif node.op in ("MatMul", "RMSNormalization", "Add"):
            assert any("sequence" in axes for axes in cut.values()), node.id
    flow, runs = derived(base, plan)
    priced = merged_uses(flow, runs, Pricer(case.topology, case.mesh, case.runtime, case.recipe))
    sent = [use for use in priced if use.kind == "collective-permute"]
    assert sent and not any(use.halved for use in sent)


def test_maxtext_counts_sequences_per_chip() -> None:
    """Sixteen chips that share products with one sequence each run sixteen at once, not one after
    another."""
    row = {
        "source": "MaxText README TPU v5e",
        "model": "MaxText-128B",
        "layers": 2,
        "hidden": 8192,
        "heads": 128,
        "ffn": 57344,
        "vocab": 32000,
        "seq": 2048,
        "hardware": "TPU v5e",
        "devices": 256,
        "tp": 16,
        "pp": 1,
        "dp": 16,
        "zero": 3,
        "microbatch": 1,
        "global_batch": 256,
        "metric": "step_time_s",
        "value": 1.0,
    }
    assert case_of(row).microbatches == 16
    said = case_of({**row, "notes": "microbatch=per_device_batch_size"})
    assert (said.microbatches, said.graph_batch) == (1, 256)


def test_a_network_that_no_source_states_is_one_adapter_a_node() -> None:
    row = json.loads(ROWS.read_text().splitlines()[0]) | {
        "devices": 16,
        "dp": 16,
        "tp": 1,
        "pp": 1,
        "microbatch": 1,
        "global_batch": 16,
    }
    assert case_of(row | {"source": "Hagemann 2023"}).topology.levels[
        -1
    ].bandwidth_bytes_per_s == pytest.approx(12.5e9 / 8)
    assert case_of(row | {"source": "another"}).topology.levels[
        -1
    ].bandwidth_bytes_per_s == pytest.approx(25e9)
