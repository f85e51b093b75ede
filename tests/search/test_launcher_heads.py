"""Launchers start no program whose tensor ranks have unequal parts of attention's heads."""

from __future__ import annotations

import pytest

import planner
from planner.errors import PlanError
from planner.pins.launcher_space import SPACES

MODEL = "zoo:gpt-tiny,heads=6,hidden=48"


@pytest.mark.parametrize("launcher", sorted(SPACES))
def test_tensor_ranks_that_heads_do_not_divide_over_are_refused(launcher: str) -> None:
    if "tensor" not in SPACES[launcher].axes:
        pytest.skip("it has no tensor ranks")
    with pytest.raises(PlanError, match="attention has 6 heads") as e:
        planner.plan(MODEL, devices=4, batch=8, pins="tp=4", launcher=launcher, cache=None)
    assert e.value.code == "P024" and e.value.help[0] == "tp=2"


def test_none_is_searched() -> None:
    made = planner.plan(MODEL, devices=4, batch=4, launcher="megatron", baselines=False, cache=None)
    assert dict(made.mesh_shape).get("tensor", 1) in (1, 2)


def test_without_a_launcher_they_may_be_padded() -> None:
    made = planner.plan(MODEL, devices=4, batch=8, pins="tp=4", baselines=False, cache=None)
    assert dict(made.mesh_shape)["tensor"] == 4
