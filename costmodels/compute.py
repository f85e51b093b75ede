"""Time of kernels: roofline with size-dependent efficiency, and the optimizer's pass.

    time = max(FLOPs / (peak(dtype) * efficiency(FLOPs)), bytes / (memory bandwidth * memory efficiency)), and never below the launch floor
"""

from __future__ import annotations

from costmodels.device import Device


def roofline_time_s(device: Device, flops: float, size_bytes: float, dtype: str) -> float:
    """Seconds of one kernel of `flops` FLOPs that moves `size_bytes`; 0 for no work at all."""
    if not flops and not size_bytes:
        return 0.0
    arithmetic = flops / (device.peak(dtype) * device.efficiency(flops)) if flops else 0.0
    memory = size_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    return max(arithmetic, memory, device.launch_s)


def optimizer_time_s(device: Device, elements: float, bytes_per_element: float) -> float:
    """Seconds to update `elements` local parameters (memory-bound)."""
    return elements * bytes_per_element / (device.memory_bytes_per_s * device.memory_efficiency)
