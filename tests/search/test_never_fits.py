"""Limits of memory that no plan keeps are refused before anything is searched."""

from __future__ import annotations

import pytest

import planner
from planner.search.search import Search


@pytest.mark.parametrize("workload", ["train", "infer"])
def test_less_than_a_products_weights_is_refused_at_once(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-tiny's widest product but the head's reads 64 x 256 numbers: 8 kB a device of four."""
    monkeypatch.setattr(Search, "run", lambda *_, **__: pytest.fail("it searched"))
    with pytest.raises(planner.PlanError, match="of one product alone") as e:
        planner.plan("zoo:gpt-tiny", devices=4, workload=workload, memory_limit_bytes=1000)
    assert e.value.code == "P021" and e.value.exit_code == 3
    assert list(e.value.help) == ["a larger --memory-limit"]
