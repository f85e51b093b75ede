"""Compiler options of collectives that are sent together."""

from __future__ import annotations

from planner.emit.runtime.files.tables import FUSED


def fused(mesh):
    """Compiler options: on GPUs collectives of these kinds are sent together up to so many
    bytes."""
    return (
        {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in FUSED.items()}
        if mesh.devices.flat[0].platform in ("gpu", "cuda")
        else {}
    )
