"""Bytes that offloading keeps in hosts' memory, by hand, in files, summaries and pods."""

from __future__ import annotations

import pytest

import planner
from planner.launch.job import Job
from planner.launch.nodes import MEMORY_GIB, resources
from planner.report.summary import summary
from planner.strategy.strategy import Strategy

MODEL = "zoo:llama3-8b,layers=4,seq=2048"
ADAMW = 12
"""Bytes a parameter: a float32 master copy and two moments."""


def planned(pins: str, devices: int = 4) -> Strategy:
    return planner.plan(
        MODEL, devices=devices, batch=8, pins=pins, baselines=False, remedies=False, cache=None
    )


def test_the_state_is_that_of_a_devices_parameters() -> None:
    for pins, ways in (("dp=4,zero=1,offload=optimizer", 4), ("dp=4,zero=0,offload=optimizer", 1)):
        made = planned(pins)
        expected = made.model["parameters"] * ADAMW / ways
        assert made.costs["offloaded_per_device_bytes"] == pytest.approx(expected, rel=1e-3)
    assert "on hosts 21.5 GiB for each device" in summary(made)


def test_stages_keep_their_own_and_copies_of_what_is_outside_blocks() -> None:
    made = planned("pp=4,micro=8,offload=optimizer")
    share = made.costs["offloaded_per_device_bytes"] / made.model["parameters"] / ADAMW
    assert 0.25 < share < 1


def test_weights_and_activations_come_on_top() -> None:
    state = planned("dp=4,zero=3,recompute=block,micro=1,offload=optimizer")
    both = planned("dp=4,zero=3,recompute=block,micro=1,offload=optimizer+activations")
    rows, width, blocks = 8 // 4 * 2048, 4096, 4
    more = both.costs["offloaded_per_device_bytes"] - state.costs["offloaded_per_device_bytes"]
    assert more == rows * width * blocks * 2
    all_ = planned("dp=4,zero=3,recompute=block,micro=1,offload=optimizer+activations+parameters")
    more = all_.costs["offloaded_per_device_bytes"] - both.costs["offloaded_per_device_bytes"]
    in_blocks = 4 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert more == pytest.approx(in_blocks / 4 * (2 + 2), rel=1e-3)


def test_nothing_is_said_where_nothing_is_offloaded() -> None:
    made = planned("dp=4,offload=none")
    assert "offloaded_per_device_bytes" not in made.costs and "on hosts" not in summary(made)


def test_pods_ask_for_it(tmp_path) -> None:
    """Of tables that all hosts have together each pod asks for its part."""
    made = planned("dp=4,zero=1,offload=optimizer")
    away = made.costs["offloaded_per_device_bytes"]
    job = Job("p", tmp_path / "p.py", "h100-sxm", 4, 2, False)

    def asked(strategy: Strategy) -> int:
        return int(resources(job, strategy, "none")["requests"]["memory"].removesuffix("Gi"))

    assert asked(made) == 2 * MEMORY_GIB + -(-2 * away // 2**30)
    hosted = planned("dp=4,offload=none")
    hosted.costs["host_memory_bytes"] = 100 * 2**30
    assert asked(hosted) == 2 * MEMORY_GIB + 50
