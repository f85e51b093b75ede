"""What an optimizer keeps is what its step moves."""

from __future__ import annotations

from itertools import pairwise

import planner
from costmodels.optimizers import OPTIMIZERS


def test_fewer_moments_take_less_memory_and_time() -> None:
    """Of a plan with everything on every device: 4 bytes of a parameter, and 8 bytes to move."""
    alike = {name: o for name, o in OPTIMIZERS.items() if not o.orthogonalises}
    costs = {
        name: planner.plan(
            "zoo:gpt-tiny",
            devices=4,
            batch=16,
            precision="fp32",
            pins="dp=4,zero=0,micro=1",
            optimizer=name,
            baselines=False,
        ).costs
        for name in sorted(alike, key=lambda name: alike[name].moments)
    }
    state = {name: c["memory_breakdown_bytes"]["optimizer"] for name, c in costs.items()}
    for name, optimizer in alike.items():
        assert state[name] == optimizer.moment_bytes * state["adamw"] / 8
    for less, more in pairwise(costs):
        fewer = OPTIMIZERS[less].moments < OPTIMIZERS[more].moments
        assert (costs[less]["optimizer_time_s"] < costs[more]["optimizer_time_s"]) == fewer
