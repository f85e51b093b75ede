"""Blocks' weights in the host's memory: chosen last, pinned, priced by what crosses the host's
link, and the program that brings them."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.emit.from_strategy import program
from planner.errors import PlanError
from planner.execution.weight_offload import can_offload, lookup_tables
from planner.machine.topology import for_devices
from planner.pins.pins import parse_pins
from planner.strategy.strategy import Strategy

from .test_offload import exchange_checkpoints

GPT = "zoo:gpt-tiny,seq=16,layers=4"
LLAMA = "zoo:llama-tiny,layers=2"
OPTIONS: dict[str, Any] = {
    "devices": 8,
    "batch": 16,
    "hardware": "cpu",
    "precision": "fp32",
    "baselines": False,
}
PINS = "dp=4,tp=2,micro=1,zero=0,recompute=block"


def planned(what: str, pins: str = PINS, source: str = GPT, **options: Any) -> Strategy:
    return planner.plan(source, **OPTIONS, **options, pins=f"{pins},offload={what}")


@pytest.fixture(scope="module")
def pair() -> tuple[Strategy, Strategy]:
    """The same plan with state away, and with weights away too."""
    return planned("optimizer"), planned("optimizer+parameters")


def block_bytes(s: Strategy) -> Iterator[tuple[int, int, bool]]:
    """(bytes of a device's piece, repeat, whether several devices add to its gradient) of every
    weight of repeated blocks that is no vector, in float32."""
    graph, plan = s.graph, s.plan
    assert graph is not None
    sizes = dict(plan.mesh)
    for name, row in s.tensors.items():
        nodes = [i for i, _ in graph.consumers.get(name, ())]
        first, period, repeats = plan.repeated_blocks[0]
        if (
            name in graph.weights
            and can_offload(graph, name)
            and nodes
            and first <= nodes[0] < first + period * repeats
        ):
            cut = prod(sizes[a] for axes in row["layout"] for a in axes)
            yield (
                4 * graph.tensors[name].elements // cut,
                (nodes[0] - first) // period,
                cut < plan.devices,
            )


def test_weights_need_state_away_and_recomputed_blocks() -> None:
    assert parse_pins("offload=parameters+optimizer").techniques["offload"] == (
        "optimizer",
        "parameters",
    )
    for wrong in (
        "offload=parameters",
        "offload=optimizer+parameters,recompute=none",
        "offload=optimizer+parameters,pp=2",
    ):
        with pytest.raises(PlanError, match="parameters") as e:
            parse_pins(wrong)
        assert e.value.code == "P024"


def test_weights_and_gradients_leave_the_devices_and_pay_for_their_ways(
    pair: tuple[Strategy, Strategy],
) -> None:
    here, away = pair
    assert {k: v["split"] for k, v in here.nodes.items()} == {
        k: v["split"] for k, v in away.nodes.items()
    }
    rows = list(block_bytes(away))
    total, one, summed = (
        sum(b for b, _, _ in rows),
        sum(b for b, r, _ in rows if r == 0),
        sum(b for b, _, over in rows if over),
    )
    for part in ("parameters", "gradients"):  # those of one repeat stay
        saved = (
            here.costs["memory_breakdown_bytes"][part] - away.costs["memory_breakdown_bytes"][part]
        )
        assert saved == total - one > 0
    link = for_devices("cpu", 8).device.host_bytes_per_s
    # in for both passes and gradients out; then gradients in and out to be reduced, in again with
    # the old weights, and the new ones out
    assert away.costs["exposed_communication_time_s"] - here.costs[
        "exposed_communication_time_s"
    ] == pytest.approx(3 * total / link, rel=1e-3)
    assert away.costs["optimizer_time_s"] - here.costs["optimizer_time_s"] == pytest.approx(
        (2 * summed + 3 * total) / link, rel=1e-3
    )
    assert "optimizer state and blocks' weights and gradients offloaded to host memory" in str(away)


def test_sums_over_microbatches_cross_the_link_too() -> None:
    """Level 3: a device moves its own pieces alone."""
    for micro in (1, 2):
        here, away = (
            planned(what, f"dp=8,micro={micro},zero=3,recompute=block")
            for what in ("optimizer", "optimizer+parameters")
        )
        total, link = (
            sum(b for b, _, _ in block_bytes(away)) / 8,
            for_devices("cpu", 8).device.host_bytes_per_s,
        )
        sums = (
            (2 * 3 + 2) * total if micro > 1 else 0
        )  # sum and gradient in and the sum out for each; once more, to be divided
        assert away.costs["exposed_communication_time_s"] - here.costs[
            "exposed_communication_time_s"
        ] == pytest.approx(micro * 3 * total / link, rel=1e-2)
        assert away.costs["optimizer_time_s"] - here.costs["optimizer_time_s"] == pytest.approx(
            (3 * total + sums) / link, rel=1e-2
        )


def test_tables_that_are_looked_up_alone_leave_and_pay_for_their_ways() -> None:
    """By hand: the table comes, its gradient goes; then the gradient goes once more around to be
    reduced, and comes with the old table for the update, which goes back."""
    here, away = (
        planned(what, "dp=8,micro=1,zero=1", LLAMA)
        for what in ("optimizer", "optimizer+embeddings")
    )
    graph = away.graph
    assert graph is not None and away.techniques["offload"] == ["optimizer", "embeddings"]
    (name,) = lookup_tables(graph)
    table, link = 4 * graph.tensors[name].elements, for_devices("cpu", 8).device.host_bytes_per_s
    memory = [s.costs["memory_breakdown_bytes"] for s in (here, away)]
    assert memory[0]["parameters"] - memory[1]["parameters"] == table
    # The gradient of a table that stays is made when the blocks have run, after the peak; room for
    # one table that comes and goes is counted all the time.
    assert memory[1]["gradients"] - memory[0]["gradients"] == table
    assert away.costs["exposed_communication_time_s"] - here.costs[
        "exposed_communication_time_s"
    ] == pytest.approx(2 * table / link, rel=1e-2)
    assert away.costs["optimizer_time_s"] - here.costs["optimizer_time_s"] == pytest.approx(
        (1 + 1 / 8 + 1 / 8 + 2) * table / link, rel=1e-2
    )
    text = program(away, LLAMA).text
    assert (
        'to_device(params["model.embed_tokens.weight"])' in text and "w = to_device(w)" not in text
    )
    tied = planner.plan(
        "zoo:gpt-tiny,seq=16,layers=4", **OPTIONS, pins="dp=8,offload=optimizer+embeddings"
    )
    assert tied.graph is not None and "transformer.wte.weight" not in [
        tied.graph.labels.get(n, n) for n in lookup_tables(tied.graph)
    ]  # the head reads it whole


def test_the_search_sends_weights_away_last(pair: tuple[Strategy, Strategy]) -> None:
    limit = int(1.01 * pair[1].costs["memory_per_device_bytes"])
    with pytest.raises(PlanError) as e:
        planned("optimizer+activations", memory_limit_bytes=limit, remedies=False)
    assert e.value.code == "P021"
    found = planner.plan(GPT, **OPTIONS, pins=PINS, memory_limit_bytes=limit)
    assert (
        found.techniques["offload"] == ["optimizer", "activations", "parameters"]
        and found.costs["memory_per_device_bytes"] <= limit
    )


def test_programs_say_which_weights_wait(pair: tuple[Strategy, Strategy]) -> None:
    here, away = (program(s, GPT).text for s in pair)
    assert "w = to_device(w)" in away and "OFFLOADED" not in here and "to_device(" not in here
    assert (
        '    "transformer.h.*.mlp.c_fc.weight",\n' in away.split("OFFLOADED = {")[1].split("}")[0]
        and ".bias" not in away.split("OFFLOADED = {")[1].split("}")[0]
    )
    for options in ({"backend": "jit"}, {"unroll": True}):
        with pytest.raises(PlanError) as e:
            program(pair[1], GPT, **options)  # type: ignore[arg-type]
        assert e.value.code == "P076"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("what", "wanted"),
    [("optimizer", False), ("activations", True), ("optimizer+parameters", True)],
)
def test_gpus_work_out_where_slices_begin_when_they_run(what: str, wanted: bool) -> None:
    """XLA of jax 0.10 gets the place of slices of the host's memory wrong in backward loops:
    programs that have such loops leave its pass out."""
    pytest.importorskip("jax")
    import numpy as np

    from planner.verify.numerics import load_program

    module = load_program(program(planned(what), GPT))
    gpu, cpu = (
        types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=p)]))
        for p in ("gpu", "cpu")
    )
    assert (module.fused(gpu).get("xla_disable_hlo_passes") == "dynamic-slice-annotator") == wanted
    assert not module.fused(cpu)


@pytest.mark.parametrize(
    "pins",
    [
        PINS,
        pytest.param("dp=4,tp=2,micro=2,zero=2,recompute=block-keep", marks=pytest.mark.slow),
        pytest.param("dp=8,micro=2,zero=3,zero_group=4,recompute=block", marks=pytest.mark.slow),
        pytest.param("dp=4,tp=2,micro=2,zero=1,recompute=block", marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_those_of_the_unsharded_program(pins: str, tmp_path: Path) -> None:
    """And collectives, products, arguments and results are the compiler's."""
    from benchmarks.technique_run import main

    source = GPT.replace("layers=4", "layers=2")
    planned("optimizer+activations+parameters+embeddings", pins, source).save(
        tmp_path / "plan.json"
    )
    main(str(tmp_path / "plan.json"), source, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert max(found["errors"].values()) < 1e-5 and not found["differs"] and found["judged"] > 0, (
        found
    )


@pytest.mark.slow
@pytest.mark.parametrize("pins", ["dp=8,micro=2,zero=3", "dp=4,tp=2,micro=1,zero=1"])
def test_three_steps_with_a_table_away(pins: str, tmp_path: Path) -> None:
    """Whole, without recomputed blocks; the head is another weight."""
    from benchmarks.technique_run import main

    planned("optimizer+embeddings", pins, LLAMA).save(tmp_path / "plan.json")
    main(str(tmp_path / "plan.json"), LLAMA, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert max(found["errors"].values()) < 1e-5 and not found["differs"] and found["judged"] > 0, (
        found
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_are_read_wherever_weights_wait(
    tmp_path: Path, pair: tuple[Strategy, Strategy]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    exchange_checkpoints(pair, GPT, tmp_path)
