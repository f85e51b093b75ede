"""The cycle collector's setting is the caller's again after a plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import planner
from planner.errors import PlanError
from planner.search.search import Search
from planner.support.gc_pause import SELDOM, seldom_collecting


@pytest.fixture
def setting() -> Iterator[tuple[int, int, int]]:
    """One that is not Python's own."""
    before = gc.get_threshold()
    gc.set_threshold(600, 9, 8)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_it_runs_seldom_inside_and_as_before_after(setting: tuple[int, int, int]) -> None:
    with seldom_collecting():
        assert gc.get_threshold() == (SELDOM, 9, 8)
        with seldom_collecting():
            assert gc.get_threshold()[0] == SELDOM
        assert gc.get_threshold()[0] == SELDOM
    assert gc.get_threshold() == setting


def test_a_plan_that_fails_gives_it_back(setting: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError):
        planner.plan("zoo:mlp-tiny", devices=2, solver="no such solver")
    assert gc.get_threshold() == setting


@pytest.mark.parametrize("own", [0, 10 * SELDOM])
def test_one_that_is_off_or_seldomer_stays_so(setting: tuple[int, int, int], own: int) -> None:
    gc.set_threshold(own, 9, 8)
    with seldom_collecting():
        assert gc.get_threshold()[0] == own


@pytest.mark.slow
def test_a_search_goes_without_the_cycle_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its objects are hundreds of thousands, and the collector would look at each."""
    gone: list[weakref.ref[object]] = []
    begin = Search.__init__

    def noted(self: Search, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        gone.append(weakref.ref(self))

    monkeypatch.setattr(Search, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        planner.plan("zoo:gpt-tiny", devices=4, batch=8)
        assert gone and not any(ref() for ref in gone)
    finally:
        gc.enable()
