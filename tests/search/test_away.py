"""Plans with more in the host's memory are looked for where the limit of memory is dear."""

from __future__ import annotations

from typing import NoReturn

import pytest

import planner
from planner.search.search import AWAY_WORTH, Search


@pytest.mark.slow
def test_what_makes_room_is_offloaded_where_steps_are_shorter() -> None:
    """Llama-3 70B on twenty H100 fits with all on the devices, in blocks recomputed whole; with
    values of the blocks on the hosts it saves them."""
    machine = {"devices": 20, "batch": 80, "baselines": False, "remedies": False}
    kept = planner.plan("zoo:llama3-70b", **machine, pins="offload=none")
    free = planner.plan("zoo:llama3-70b", **machine)
    assert kept.costs["fit"] == free.costs["fit"] == "yes"
    assert not kept.techniques["offload"] and free.techniques["offload"]
    assert free.baselines["on_devices"]["step_time_s"] == kept.costs["step_time_s"]
    assert free.costs["step_time_s"] < (1 - AWAY_WORTH) * kept.costs["step_time_s"]
    assert 0 < free.solver["bound_s"] <= kept.solver["bound_s"]


def test_where_memory_is_cheap_nothing_goes() -> None:
    free = planner.plan("zoo:llama3-8b,layers=8", devices=8, batch=32, baselines=False)
    assert not free.techniques["offload"]


@pytest.mark.slow
def test_an_interrupt_keeps_the_plan_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(search: Search, offload: tuple[str, ...]) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "offloading", interrupted)
    kept = planner.plan("zoo:llama3-70b", devices=16, batch=64, baselines=False, remedies=False)
    assert kept.costs["fit"] == "tight" and not kept.techniques["offload"]
    assert kept.solver["stopped"] == "interrupt"
