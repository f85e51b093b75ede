"""Seconds of one node's kernels as a framework's program runs them: products at the device's
efficiency for their size, everything else by the bytes that costmodels.runtimes.Kernels says it
moves.

The constants of the profiles are fitted to published runs; docs/published-runs.md has the errors of
the step times that these seconds add up to.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.frameworks.fused_attention import shares_of_peak
from costmodels.hardware.device import Device
from costmodels.runtimes import Kernels, Rates

TWO_BYTES = 2
"""Bytes of an element of scores' operands."""
ALIGNED_BYTES = 16
"""Rows of operands whose length is no multiple of so many bytes do not fill a load of tensor cores'
kernels: products of heads as wide run without tensor cores, at the rate of float32 (NVIDIA, Matrix
Multiplication Background User's Guide, tensor core requirements)."""
EIGHT_BIT = ("float8_e4m3fn",)
LARGE_FLOPS = 1e11
"""FLOPs of a product beyond which the device files' curves are level; what larger ones still gain
is the framework's (Rates.growth)."""


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """What a node's kernels need on one device.

    role: a key of Kernels.passes and Kernels.saved. together: FLOPs of the products that run as one
    kernel with it. ins, outs: bytes of local operands and results. elements: scores of attention,
    logits of a loss. backward: the backward pass of a product as a multiple of its forward pass (1
    for other kernels), 0 where nothing is trained. causal: half of the scores are masked. keys,
    width: of attention, positions that a query sees and elements of a head. rows, width, inner: of
    routed experts, rows that they get, elements of one, and of what is between their products.
    """

    role: str
    dtype: str
    flops: float
    together: float
    ins: float
    outs: float
    elements: float
    backward: float
    causal: bool
    keys: int = 0
    width: int = 0
    inner: int = 0
    rows: float = 0.0


@dataclass(frozen=True)
class KernelPart:
    """A part of a node's seconds: what takes them, how much of it there is forward (bytes, or FLOPs
    of what computes), and how much of that a second; 0 and 0 of what waits."""

    what: str
    amount: float
    per_s: float
    forward_s: float
    backward_s: float
    computes: bool = False


def kernel_parts(
    need: KernelNeed, device: Device, kernels: Kernels, rates: Rates
) -> tuple[KernelPart, ...]:
    """What the seconds of `kernel_times_s` are made of."""
    forward, backward = kernel_times_s(need, device, kernels, rates)
    memory, trained = memory_bytes_per_s(device, rates), need.backward > 0
    if need.role == "attention":
        masked = need.flops * (0.5 if need.causal and kernels.flash else 1.0)
        what = f"attention ({kernels.attention if kernels.flash else 'scores through memory'})"
        return (KernelPart(what, masked, masked / forward, forward, backward, computes=True),)
    if need.role == "CrossEntropyLoss" or not need.flops:
        what = "passes over logits" if need.role == "CrossEntropyLoss" else "passes over memory"
        return (KernelPart(what, forward * memory, memory, forward, backward),)
    parts = list[KernelPart]()
    if need.rows:
        rows_s = _expert_rows_s(need, kernels, memory)
        what = "experts' rows sorted, cast and activated"
        parts.append(KernelPart(what, rows_s[0] * memory, memory, rows_s[0], rows_s[1] * trained))
        waits, what = kernels.expert_waits_s, "the host, which reads how many rows experts get"
        parts.append(KernelPart(what, 0.0, 0.0, waits, waits * trained))
    elif kernels.cast and need.dtype in EIGHT_BIT:
        shared = need.ins * need.flops / need.together
        cast, back = (kernels.cast * size / memory for size in (shared, need.outs))
        parts.append(KernelPart("casts to eight bits", cast * memory, memory, cast, back * trained))
    forward -= sum(part.forward_s for part in parts)
    backward -= sum(part.backward_s for part in parts)
    rate = device.peak(need.dtype) * product_efficiency(device, rates, need.together)
    moved = need.ins + need.outs
    if need.flops / rate < moved / memory:
        product = KernelPart("products, as they read", moved, memory, forward, backward)
    else:
        product = KernelPart("products", need.flops, rate, forward, backward, computes=True)
    return (product, *parts)


def kernel_times_s(
    need: KernelNeed, device: Device, kernels: Kernels, rates: Rates
) -> tuple[float, float]:
    """(forward, backward) seconds of a node's kernels."""
    memory, trained = memory_bytes_per_s(device, rates), need.backward > 0
    if need.role == "attention":
        forward, backward = _attention_s(need, device, kernels, rates)
        return forward, (backward + forward * kernels.recomputes_scores) * trained
    if need.role == "CrossEntropyLoss":
        forward, backward = (need.elements * size / memory for size in kernels.logit_bytes)
        return forward, backward * trained
    if need.flops:
        product = need.flops / (
            device.peak(need.dtype) * product_efficiency(device, rates, need.together)
        )
        forward = max(product, (need.ins + need.outs) / memory)
        backward = (need.backward + kernels.recomputed[0] * trained) * forward
        if need.rows:
            rows_s = _expert_rows_s(need, kernels, memory)
            forward += rows_s[0] + kernels.expert_waits_s
            backward += (rows_s[1] + kernels.expert_waits_s) * trained
        elif kernels.cast and need.dtype in EIGHT_BIT:  # products that run as one share an operand
            shared = need.ins * need.flops / need.together
            forward += kernels.cast * shared / memory
            backward += kernels.cast * need.outs / memory * trained
        return forward, backward
    default = ((need.ins + need.outs) / need.outs if need.outs else 0.0, 2.0)
    f, b = kernels.passes.get(need.role, default)
    return f * need.outs / memory, (b + f * kernels.recomputed[1]) * need.outs / memory * trained


def _expert_rows_s(need: KernelNeed, kernels: Kernels, memory: float) -> tuple[float, float]:
    """(forward, backward) seconds of what is moved of routed experts' rows beside their products:
    sorted by expert and back, brought into eight bits, activated."""
    wide, hidden, wide_back, hidden_back = kernels.expert_rows
    moved = TWO_BYTES * need.rows / memory
    return (
        moved * (wide * need.width + hidden * need.inner),
        moved * (wide_back * need.width + hidden_back * need.inner),
    )


def _attention_s(
    need: KernelNeed, device: Device, kernels: Kernels, rates: Rates
) -> tuple[float, float]:
    """(forward, backward) seconds of attention's core: one fused kernel, or products whose scores
    cross memory."""
    peak = device.peak(need.dtype)
    if kernels.flash:
        shares = shares_of_peak(kernels.attention, device.name, need.keys, need.width)
        whole = need.flops * (0.5 if need.causal else 1.0) / (peak * rates.attention)
        return whole / shares[0], 2.5 * whole / shares[1]
    if need.width * TWO_BYTES % ALIGNED_BYTES:
        peak = device.peak("float32")
    product = need.flops / (peak * product_efficiency(device, rates, need.flops / 2))
    memory = memory_bytes_per_s(device, rates)
    forward, backward = (
        n * product + need.elements * size / memory
        for n, size in zip((1, 2), kernels.score_bytes, strict=True)
    )
    return forward, backward


def product_efficiency(device: Device, rates: Rates, flops: float) -> float:
    """Fraction of peak that a product of so many FLOPs reaches."""
    growth = (max(flops, LARGE_FLOPS) / LARGE_FLOPS) ** rates.growth
    return min(1.0, device.efficiency(flops) * rates.matmul * growth)


def memory_bytes_per_s(device: Device, rates: Rates) -> float:
    """Bytes per second that element-wise kernels reach."""
    return device.memory_bytes_per_s * device.memory_efficiency * rates.memory
