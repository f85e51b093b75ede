"""Compiler options of programs in which several microbatches run at the same time."""

from __future__ import annotations

from planner.emit.runtime.files.tables import FUSED


def fused(mesh):
    """Compiler options: on GPUs collectives of these kinds are sent together up to so many bytes,
    products of the microbatches with one weight stay apart (one product of both would wait for
    both), and the schedule puts kernels under collectives."""
    sizes = {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in FUSED.items()}
    apart = {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_latency_hiding_scheduler": True}
    return sizes | apart if mesh.devices.flat[0].platform in ("gpu", "cuda") else {}
