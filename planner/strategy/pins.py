"""The pins that a strategy file records."""

from __future__ import annotations

from planner.pins.pins import Pins, from_table
from planner.strategy.strategy import Strategy


def pins_of(strategy: Strategy) -> Pins:
    """The pins that a strategy was searched under; none where its file says nothing of them."""
    return from_table(strategy.provenance.get("pins", {}))
