"""What a space says of memory under a framework is near the price of the whole plan."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from planner.search.solving import Solving
from planner.space.assemble import usage_of


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", ["selective", "none", "block"])
def test_memory_of_a_mixture_is_nearly_the_price(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three dense layers before eight with experts. Of the price what lives only for a while is
    left out, which for a space begins with other things: it counts what one repeat makes again
    among what is saved."""
    pairs: list[tuple[float, float]] = []
    price = Solving.price

    def with_usage(
        self: Solving, space: Any, mesh: Any, techniques: Any, found: Any, *more: Any, **named: Any
    ) -> Any:
        made = price(self, space, mesh, techniques, found, *more, **named)
        if made is not None:
            memory = made.cost.memory
            held, _ = usage_of(space, techniques, found.choice)
            pairs.append((held, memory.total - memory.temporary))
        return made

    monkeypatch.setattr(Solving, "price", with_usage)
    planner.plan(
        "zoo:deepseek-v3,layers=11,seq=2048",
        devices=128,
        hardware="b200",
        batch=1024,
        pins=f"pp=1,ep=32,zero=1,micro=4,recompute={recompute}",
        runtime="megatron",
        baselines=False,
        remedies=False,
    )
    assert pairs
    for of_space, of_plan in pairs:
        assert of_space == pytest.approx(of_plan, rel=0.06)
