"""Forward passes where memory binds: what passes by operators counts in the problem as in the
price, and relations between answers under different limits hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner
from planner.machine.mesh_choices import pinned_mesh
from planner.pins.pins import from_table
from planner.search.build_request import make_request
from planner.search.request import TIE, TIE_MEMORY
from planner.search.search import Search
from planner.solvers.problem import evaluate
from planner.space.assemble import assemble, usage_of
from planner.space.techniques import Techniques
from planner.workload.model import Model, Workload


def planned(source: str, devices: int, batch: int, **options: Any) -> Any:
    """What a forward pass on V100s costs."""
    return planner.plan(
        source,
        devices=devices,
        hardware="v100-16gb",
        batch=batch,
        workload="infer",
        baselines=False,
        remedies=False,
        **options,
    ).cost


@pytest.mark.parametrize("source", ["zoo:tiny-whisper", "zoo:gpt-tiny,layers=4"])
def test_the_problem_has_all_that_the_plan_has_at_once(source: str) -> None:
    request = make_request(devices=4, hardware=None, topology=None, workload="infer")
    search = Search(Model.open(source, Workload("infer", batch=16), 4), request)
    mesh = pinned_mesh(request.topology, {"data": 2, "tensor": 2})
    space, techniques = search.space(mesh, 1, None), Techniques()
    assert space is not None
    problem = assemble(space, techniques, 2**40, liveness=True)
    dice = np.random.default_rng(1)
    for _ in range(20):
        choice = [int(dice.integers(v.options)) for v in space.variables]
        known = sum(usage_of(space, techniques, choice))
        assert evaluate(problem, choice).peak_usage == pytest.approx(known, abs=len(choice))


def test_a_pinned_mesh_is_no_dearer_where_memory_binds() -> None:
    pins = from_table({"mesh": {"foo": 8}, "techniques": {"microbatches": 1, "zero_stage": 0}})
    free, pinned = (
        planned("zoo:tiny-whisper", 8, 256, memory_limit_bytes=1_726_645, pins=p)
        for p in (None, pins)
    )
    assert pinned.step_time_s <= free.step_time_s * (1 + TIE)


def test_no_plan_takes_less_memory_than_that_of_least_memory() -> None:
    smallest, within = (
        planned("zoo:gpt-tiny", 4, 16, **options)
        for options in ({"objective": "memory"}, {"memory_limit_bytes": 270_000})
    )
    assert smallest.memory_per_device_bytes <= within.memory_per_device_bytes * (1 + TIE_MEMORY)
