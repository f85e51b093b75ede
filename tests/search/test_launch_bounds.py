"""What a framework's host takes to start kernels bounds every plan; small models are searched by
it."""

from __future__ import annotations

import pytest

from planner.pins.pins import parse_pins
from planner.search.build_request import build_request
from planner.search.launch_bounds import least_launch_s
from planner.search.options import MachineOptions, SearchOptions, StepOptions
from planner.search.search import Search
from planner.workload.open import open_model


@pytest.mark.one_in(8)
@pytest.mark.parametrize("runtime", ["megatron", "fsdp"])
@pytest.mark.parametrize("pins", ["pp=2,virtual=2", "", "pp=2", "recompute=full"])
def test_no_plan_takes_less_than_its_launches(runtime: str, pins: str) -> None:
    request = build_request(
        MachineOptions(devices=8, hardware="a100-80gb"),
        StepOptions(runtime=runtime),
        SearchOptions(pins=parse_pins(pins), baselines=False),
    )
    search = Search(open_model("zoo:gpt2-small,layers=4,seq=128", 8, batch=32), request)
    assert search.run().best is not None
    tightest = 0.0
    for candidate, space, _, _ in search.details.values():
        mesh = candidate.mesh
        least = least_launch_s(space.base, search.pricer(mesh), mesh.stages, candidate.techniques)
        assert 0 < least <= candidate.cost.step_time_s * (1 + 1e-9)
        tightest = max(tightest, least / candidate.cost.step_time_s)
    assert tightest > 0.5
    assert len(search.details) < 150  # more than twice as many without
