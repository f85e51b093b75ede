"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schedule_of(techniques: Mapping[str, Any]) -> str:
    """The pipeline schedule of a file's techniques, "" for none."""
    found = str(techniques.get("schedule", "none"))
    return "" if found == "none" else found


def virtual_of(techniques: Mapping[str, Any]) -> int:
    """Chunks of blocks that a pipeline stage holds; files name them where they are several."""
    return int(techniques.get("virtual", 1))


def widths_of(techniques: Mapping[str, Any]) -> tuple[int, ...]:
    """Places along the axis "stage" that each pipeline stage takes, () for one each."""
    return tuple(int(n) for n in techniques.get("widths", ()))


def offload_of(techniques: Mapping[str, Any]) -> tuple[str, ...]:
    """What waits in the host's memory."""
    return tuple(str(x) for x in techniques.get("offload", ()))


def bucket_of(techniques: Mapping[str, Any]) -> int:
    """Bytes that collectives are sent together up to, 0 where that is left to the compiler."""
    return int(techniques.get("fused_collective_bytes", 0))


def copies_of(techniques: Mapping[str, Any]) -> int:
    """Microbatches that run at the same time."""
    return int(techniques.get("copies", 1))
