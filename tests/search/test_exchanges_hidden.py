"""How much a plan may gain where experts' rows are sent beside kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.pricing.frameworks.dispatch import EXCHANGE
from planner.search.exchanges_beside import _sent_s


@pytest.mark.parametrize(("stages", "most"), [(1, 8.0), (3, 10.0)])
def test_exchanges_of_other_stages_are_in_the_bubble(stages: int, most: float) -> None:
    """A second a microbatch, eight of them; the bubble is as long as one in each other stage."""
    cost = SimpleNamespace(exposed_by_axes={(EXCHANGE, "expert"): 8.0, ("all-reduce", "data"): 3.0})
    mesh, plan = SimpleNamespace(stages=stages), SimpleNamespace(microbatches=8)
    candidate: Any = SimpleNamespace(cost=cost, mesh=mesh, plan=plan)
    assert _sent_s(candidate) == most
