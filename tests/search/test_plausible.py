"""Plans that need a word: a batch that the data axis does not divide, counts of devices that leave
nodes ragged, speeds above all that was published."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import planner
from costmodels import device_names
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.pins.pins import Pins
from planner.pricing.cost import Cost
from planner.search.build_request import make_request
from planner.search.plausible import hidden_work, published, ragged, too_fast
from planner.search.search import Search
from planner.workload.model import Model, Workload

GPT = "zoo:gpt-tiny"


@pytest.mark.parametrize(
    "asked",
    [
        {"pins": "dp=8"},
        {"mode": "data-parallel"},
        {"pins": "dp=8,micro=3", "batch": 36},
        {"pins": "fsdp=8"},
        {"pins": "fsdp=4"},
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest(asked: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(GPT, devices=8, **{"batch": 12, **asked})
    assert e.value.code == "P035" and e.value.exit_code == 2
    assert (
        "over"
        f" {'data=2 x fsdp=4' if asked.get('pins') == 'fsdp=4' else 'fsdp=8' if 'fsdp' in asked.get('pins', '') else 'data=8'}:"
        in e.value.what
    )
    near = e.value.help[0].removeprefix("--batch ").split(" or ")
    assert near == (["24", "48"] if "batch" in asked else ["8", "16"])
    for batch in map(int, near):
        made = planner.plan(GPT, devices=8, baselines=False, **{**asked, "batch": batch})
        assert made.costs["distinct_work"] > 0.99


@pytest.mark.slow
def test_a_batch_that_is_padded_a_little_or_cut_by_hand_is_not_refused() -> None:
    padded = planner.plan("zoo:mlp-tiny", devices=8, batch=15, pins="dp=8", baselines=False)
    assert 0.9 < padded.costs["distinct_work"] < 1
    free = planner.plan(
        "zoo:gpt2-small,layers=2", devices=8, batch=12, baselines=False
    )  # nobody asked for data parallelism
    assert free.costs["distinct_work"] > 0.4
    several = planner.plan(
        GPT, devices=8, batch=12, pins=Pins(mesh={"data": (4, 8), "model": (1, 2)}), baselines=False
    )
    assert dict(several.mesh_shape)["data"] == 4


def test_a_count_that_leaves_nodes_ragged_is_said_with_the_nearest_and_what_fewer_take() -> None:
    made = planner.plan("zoo:mlp-tiny", devices=12, batch=24, baselines=False)
    said = next(row["text"] for row in made.findings if row["kind"] == "devices")
    fewer = planner.plan("zoo:mlp-tiny", devices=8, batch=24, baselines=False)
    from costmodels.hardware.units import show_time

    assert (
        said.startswith("12 devices are 2 nodes with 6 of their 8 devices")
        and "8 or 16 fill whole nodes" in said
    )
    assert f"8 take {show_time(fewer.costs['step_time_s'])} a step for the same batch" in said
    assert ("less time on fewer devices" in said) == (
        fewer.costs["step_time_s"] < made.costs["step_time_s"]
    )
    for devices in (6, 16):  # part of one node; whole nodes
        assert not [
            row
            for row in planner.plan(
                "zoo:mlp-tiny", devices=devices, batch=48, baselines=False
            ).findings
            if row["kind"] == "devices"
        ]


@pytest.mark.slow
def test_fewer_devices_that_are_faster_are_said() -> None:
    request = make_request(devices=12, hardware=None, topology=None, baselines=False)
    model = Model.open(GPT, Workload(batch=24), 12)
    found = Search(model, request).run()
    assert found.best is not None
    slow = replace(found, best=replace(found.best, cost=replace(found.best.cost, step_time_s=1.0)))
    assert "less time on fewer devices" in ragged(request, slow, model)[0]


def test_a_speed_above_all_that_was_published_carries_a_mark() -> None:
    found = Search(
        Model.open(GPT, Workload(batch=16), 8),
        make_request(devices=8, hardware="tpu-v5p", topology=None, baselines=False),
    ).run()
    assert found.best is not None
    request, cost = make_request(devices=8, hardware="tpu-v5p", topology=None), found.best.cost
    assert too_fast(request, cost, found.base) == ()
    work = cost.flops_per_device * cost.distinct_work / request.topology.peak("bfloat16")
    best = published()["tpu-v5p"]["mfu"]
    assert too_fast(request, replace(cost, step_time_s=1.01 * work / best), found.base) == ()
    (said,) = too_fast(request, replace(cost, step_time_s=0.9 * work / best), found.base)
    assert (
        said.kind == "published"
        and f"{100 * best:.1f} %" in said
        and published()["tpu-v5p"]["source"] in said
    )
    assert (
        too_fast(
            make_request(devices=8, hardware="tpu-v5p", topology=None, precision="fp32"),
            replace(cost, step_time_s=1e-12),
            found.base,
        )
        == ()
    )


def test_long_sequences_are_not_faster_than_runs_of_short_ones() -> None:
    """At 131,072 tokens three quarters of the counted work are attention's, and half of that is
    hidden by the causal mask."""
    request = make_request(devices=64, hardware="h100-sxm", topology=None)
    facts = {
        seq: GraphFacts.of(
            Model.open(f"zoo:llama3-8b,layers=4,seq={seq}", Workload(batch=64), 64).graph(1),
            training=True,
        )
        for seq in (2048, 131072)
    }
    layers, width, head = 4, 4096, 4096 * 128256
    blocks = layers * (2 * width * width * 1.25 + 3 * width * 14336)
    for seq, base in facts.items():
        attention = 12 * layers * width * seq
        share = attention / (attention + 6 * (blocks + head))
        assert hidden_work(base) == pytest.approx(share * (seq - 1) / seq / 2, rel=1e-3)
    work = 1e15
    cost = SimpleNamespace(
        flops_per_device=work,
        distinct_work=1.0,
        step_time_s=work / 0.7 / request.topology.peak("bfloat16"),
    )
    said = {seq: too_fast(request, cast(Cost, cost), base)[0] for seq, base in facts.items()}
    assert "expect a longer step" in said[2048]
    assert "MFU 70.0 % counts pairs" in said[131072] and "59.6 %" in said[131072]


def test_published_figures_are_of_devices_that_ship_with_their_sources() -> None:
    assert set(published()) <= set(device_names())
    assert all(
        0.3 < row["mfu"] < 0.8 and 0 < row["hidden"] < 0.5 and row["run"] and row["source"]
        for row in published().values()
    )
