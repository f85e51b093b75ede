"""What files say of plans, in words that every view shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.execution.techniques import phrases, read_table


def tuned_words(row: Mapping[str, Any]) -> str:
    """What a baseline was tuned to: `4 microbatches, recompute`."""
    return ", ".join(tuned_phrases(row))


def tuned_phrases(row: Mapping[str, Any]) -> list[str]:
    """What a baseline was tuned to, in phrases that may be left out from the last on: what
    recomputed blocks save is one behind `recompute`."""
    listed = phrases(read_table(row), ("microbatches", "recompute"))
    return [part for phrase in listed for part in phrase.split(", ", 1)]
