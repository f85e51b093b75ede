"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.support.text import RECOMPUTED

OFFLOADED = {
    "optimizer": "optimizer state",
    "activations": "what enters blocks",
    "parameters": "blocks' weights and gradients",
    "embeddings": "embedding tables",
}


def offload_words(offload: Sequence[str]) -> list[str]:
    """What waits in the host's memory, a phrase; empty for nothing."""
    *more, last = [OFFLOADED[what] for what in offload] or [""]
    return (
        [f"{', '.join(more)}{' and ' if more else ''}{last} offloaded to host memory"]
        if offload
        else []
    )


def tuned_words(row: Mapping[str, Any]) -> str:
    """What a baseline was tuned to: `4 micro, recompute`."""
    out = [f"{row['microbatches']} microbatches"] if row["microbatches"] > 1 else []
    if row["recompute"] != "none":
        out.append(RECOMPUTED.get(row["recompute"], f"recompute ({row['recompute']})"))
    return ", ".join(out)
