"""Compiler options of training: what is sent together, and that products stay apart."""

from __future__ import annotations

from planner.emit.runtime.files.tables import FUSED


def fused(mesh):
    """Compiler options: on GPUs collectives of these kinds are sent together up to so many bytes,
    and small products that read one operand stay apart: the compiler would make one product of
    them, and keep its result beside its parts."""
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    return {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in FUSED.items()} | {
        "xla_gpu_dot_merger_threshold_mb": 0
    }
