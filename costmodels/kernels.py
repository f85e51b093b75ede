"""Time of kernels: roofline with size-dependent efficiency, sums of gradients, and the optimizer's
pass.

    time = max(FLOPs / (peak(dtype) * efficiency(FLOPs)), bytes / (memory bandwidth * memory
    efficiency)), and never below the launch floor

A fused attention kernel sustains another fraction of peak than products do, the device file's
`[attention]`; attention without one is priced kernel by kernel (planner/ops/attention_cost.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING, TypeVar

from costmodels.hardware.device import AttentionPass, Device
from costmodels.runtimes import Rates

if TYPE_CHECKING:
    import numpy as np

Amount = TypeVar("Amount", float, "np.ndarray")
"""A number, or an array of some."""


def sustained(device: Device, rates: Rates, devices: int) -> Device:
    """The device as one of so many that run a step together reaches it: rates of its file times
    what a program reaches of them, and slower as all wait for the slowest of them."""
    slower = slowdown(device, rates, devices)
    if slower == rates.matmul == rates.memory == rates.attention == 1.0:
        return device
    fused = device.attention
    return replace(
        device,
        matmul_efficiency=tuple(x * rates.matmul / slower for x in device.matmul_efficiency),
        tiles=device.tiles and device.tiles.at(rates.matmul / slower),
        memory_efficiency=device.memory_efficiency * rates.memory / slower,
        launch_s=device.launch_s * slower,
        attention=fused
        and replace(
            fused,
            forward=tuple(x * rates.attention / slower for x in fused.forward),
            backward=tuple(x * rates.attention / slower for x in fused.backward),
        ),
    )


def slowdown(device: Device, rates: Rates, devices: int) -> float:
    """How much longer a step of so many devices takes than within one node, or one slice, as all
    wait for the slowest."""
    return 1 + rates.stragglers * log2(max(1.0, devices / device.node_size))


def roofline_time_s(device: Device, flops: float, size_bytes: float, dtype: str) -> float:
    """Seconds of one kernel of `flops` FLOPs that moves `size_bytes`; 0 for no work at all."""
    if not flops and not size_bytes:
        return 0.0
    arithmetic = flops / (device.peak(dtype) * device.efficiency(flops)) if flops else 0.0
    return max(arithmetic, memory_time_s(device, size_bytes), device.launch_s)


def memory_time_s(device: Device, size_bytes: Amount) -> Amount:
    """Seconds to read and write so many bytes within a kernel that runs in any case."""
    return size_bytes / (device.memory_bytes_per_s * device.memory_efficiency)


def attention_time_s(
    device: Device, flops: float, size_bytes: float, dtype: str, of: AttentionPass
) -> float:
    """Seconds of a pass of the device's fused attention over `flops` FLOPs that moves `size_bytes`.
    ValueError for a device without one."""
    if device.attention is None:
        raise ValueError(f"{device.name} has no fused attention")
    arithmetic = flops / (device.peak(dtype) * device.attention.efficiency(of))
    memory = memory_time_s(device, size_bytes)
    beside = device.attention.passes[of.backward] * memory
    return max(arithmetic + beside, memory, device.launch_s)


def sum_time_s(device: Device, size_bytes: Amount) -> Amount:
    """Seconds to add so many bytes of gradients to their sums over microbatches: both are read, the
    sums are written (memory-bound)."""
    return memory_time_s(device, 3 * size_bytes)


def order_s_per_byte(device: Device) -> float:
    """Seconds per byte to bring a tensor into another order of its dims and back: two copies, each
    read and written, at half of the rate for strides (memory-bound)."""
    return memory_time_s(device, 8.0)


def loop_copy_time_s(device: Device, cut_bytes: Amount, put_bytes: Amount) -> Amount:
    """Seconds that a loop over blocks takes to copy parts out of stacks and into them
    (memory-bound). What is cut out is read and written; what is put in is too, into a stack that
    was filled with zeros before. On TPUs what is cut out is brought into on-chip memory, and
    a stack is not filled.
    """
    on_tpu = device.kind == "tpu"
    moved = cut_bytes + 2 * put_bytes if on_tpu else 2 * cut_bytes + 3 * put_bytes
    return memory_time_s(device, moved)


def weight_copy_time_s(
    device: Device, cut_bytes: Amount, cuts: Amount | int, put_bytes: Amount
) -> Amount:
    """Seconds that a turn of a loop over blocks takes to copy a weight out of its stack, so many
    times, and its gradient into another: each is a kernel, and small ones take the launch floor.
    TPUs' kernels read weights where the stack has them, and write gradients there: stacks that both
    passes read are brought into another order of dims once, and so are gradients'."""
    from numpy import maximum

    rate = device.memory_bytes_per_s * device.memory_efficiency
    if device.kind == "tpu":
        whole: Amount = (2 * cut_bytes * (cuts - 1) * (cuts > 0) + 3 * put_bytes) / rate
        return whole
    cut, put = (maximum(x / rate, device.launch_s) for x in (2 * cut_bytes, 3 * put_bytes))
    seconds: Amount = (cut_bytes > 0) * cuts * cut + (put_bytes > 0) * put
    return seconds


def optimizer_time_s(device: Device, elements: Amount, bytes_per_element: float) -> Amount:
    """Seconds to update `elements` local parameters (memory-bound)."""
    return memory_time_s(device, elements * bytes_per_element)
