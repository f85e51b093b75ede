"""Programs whose blocks all read one value that trains, counted as compilers count them: a diffusion
transformer's condition, which the head reads too, and a router's scores, of which one reading only
chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.verify import worker

EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "pins"),
    [
        ("zoo:dit-tiny", "pp=2,dp=2,micro=4"),
        pytest.param(
            "zoo:dit-tiny", "pp=2,tensor=2,micro=2,schedule=gpipe", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:deepseek-tiny,layers=2,dense_layers=0", "expert=4", marks=pytest.mark.slow
        ),
    ],
)
def test_traffic_and_flops_are_exact(source: str, pins: str) -> None:
    made = planner.plan(
        source, devices=4, batch=8, precision="fp32", hardware=EAGER, baselines=False, pins=pins
    )
    report = worker.verify(made, source, run=False)
    assert report.ok, report.text()
