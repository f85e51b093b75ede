"""What files say of plans, in words that every view shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.execution.techniques import phrases, read_table


def tuned_words(row: Mapping[str, Any]) -> str:
    """What a baseline was tuned to: `4 microbatches, recompute`."""
    return ", ".join(phrases(read_table(row), ("microbatches", "recompute")))
