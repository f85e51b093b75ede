"""Compiler options of programs whose loops over blocks read from the host's memory. Takes
the place of the function of its name."""

from __future__ import annotations

from planner.emit.runtime.files.tables import FUSED


def fused(mesh):
    """Compiler options: on GPUs collectives of these kinds are sent together up to so many bytes,
    small products that read one operand stay apart, and slices of loops are left as they are: the
    pass that works out where those in the host's memory begin takes the loop's count for the index,
    which in a backward pass runs the other way (XLA of jax 0.10; mended in openxla/xla 46308).
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    return {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in FUSED.items()} | {
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "dynamic-slice-annotator",
    }
