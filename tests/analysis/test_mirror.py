"""Of plans that nothing but the place of equal axes tells apart, the usual one is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import planner
from planner.analysis.axis_roles import ROLES, role_named
from planner.machine.topology import Mesh, MeshAxis
from planner.search.axis_symmetry import axis_swap

GPT = "zoo:gpt-tiny,hidden=256,heads=8,seq=32,vocab=1024"


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("source", "devices", "batch", "hardware"),
    [
        (GPT, 4, 16, "cpu"),
        ("zoo:llama-tiny", 4, 8, "cpu"),
        ("zoo:mlp,layers=4,hidden=512", 4, 512, "cpu"),
    ],
)
def test_equal_axes_stand_in_their_usual_order(
    source: str, devices: int, batch: int, hardware: str
) -> None:
    found = planner.plan(
        source, devices=devices, batch=batch, hardware=hardware, precision="fp32", baselines=False
    )
    alike = [
        (a, b)
        for a, b in pairwise(found.mesh)
        if (a["size"], a["levels"]) == (b["size"], b["levels"]) and a["name"] != "stage"
    ]
    assert alike, "the case has no two axes alike"
    for outer, inner in alike:
        assert ROLES.index(role_named(outer["name"])) <= ROLES.index(role_named(inner["name"])), (
            found.mesh_shape
        )


def test_mirror_images_cost_the_same() -> None:
    """What the search takes for granted, on a node of equal links."""
    plans = [
        planner.plan(
            GPT,
            devices=4,
            batch=16,
            hardware="cpu",
            precision="fp32",
            baselines=False,
            pins=f"{mesh},zero=0",
        )
        for mesh in ("dp=2,tp=2", "tp=2,dp=2")
    ]
    assert plans[0].cost.step_time_s == plans[1].cost.step_time_s
    assert plans[0].cost.memory_per_device_bytes == plans[1].cost.memory_per_device_bytes


def test_what_differs_or_was_named_stays() -> None:
    near, far = ((0, 2),), ((1, 2),)
    unequal = Mesh((MeshAxis("a", far), MeshAxis("b", near)))
    assert axis_swap(unequal, {"a": "model", "b": "data"}) == {}
    equal = Mesh((MeshAxis("a", near), MeshAxis("b", near), MeshAxis("c", near)))
    assert axis_swap(equal, {"a": "model", "b": "model2", "c": "data"}) == {
        "c": "a",
        "a": "b",
        "b": "c",
    }
    assert axis_swap(equal, {"a": "model", "b": "model2", "c": "data"}, given_names=("a",)) == {
        "c": "b",
        "b": "c",
    }
    assert axis_swap(replace(equal, group=("a",)), {"a": "model", "b": "model2", "c": "data"}) == {
        "c": "b",
        "b": "c",
    }


def test_a_level_that_cuts_nothing_is_not_chosen() -> None:
    """Tensor parallelism alone leaves no gradient to sum: every level is ZeRO stage 0, and is called
    so."""
    found = planner.plan(
        "zoo:mlp,layers=4,hidden=512",
        devices=4,
        batch=4,
        hardware="cpu",
        precision="fp32",
        baselines=False,
        pins="tp=4",
    )
    assert found.plan.zero_stage == 0
    pinned = planner.plan(
        "zoo:mlp,layers=4,hidden=512",
        devices=4,
        batch=4,
        hardware="cpu",
        precision="fp32",
        baselines=False,
        pins="tp=4,zero=2",
    )
    assert pinned.plan.zero_stage == 2
    assert pinned.cost.step_time_s == found.cost.step_time_s
