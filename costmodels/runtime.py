"""Runtime profiles: whose program is priced. Constants that belong to how a program runs, not to the hardware.

The profiles `jax-*` price what is emitted. `megatron` and `fsdp` price others' runs as those programs run them (planner.framework): their kernels are
described by `Kernels`, their rates beside the device's by `Rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a framework move and keep, by the role of a node (planner.framework.role).

    passes: role -> bytes that cross memory (forward, backward) as multiples of the result's bytes. kept: role -> bytes kept for the backward pass, likewise.
    score_bytes, logit_bytes: bytes moved (forward, backward) per element of attention scores and of logits. score_kept, logit_kept: bytes kept of each.
    flash: attention keeps its scores on chip and skips what a causal mask hides; its products then run at `attention` of peak (forward, backward).
    again: the core of attention is computed again in the backward pass (selective recompute), its scores are not kept.
    """

    passes: Mapping[str, tuple[float, float]]
    kept: Mapping[str, float]
    flash: bool = True
    attention: tuple[float, float] = (0.5, 0.4)
    score_bytes: tuple[float, float] = (0.0, 0.0)
    score_kept: float = 0.0
    logit_bytes: tuple[float, float] = (20.0, 14.0)
    logit_kept: float = 10.0
    again: bool = False


@dataclass(frozen=True)
class Rates:
    """What a framework reaches of a device's sustained rates (1: all of it). launch_s: what the host takes to start one kernel."""

    matmul: float = 1.0
    memory: float = 1.0
    attention: float = 1.0
    inner: float = 1.0
    outer: float = 1.0
    launch_s: float = 10e-6


@dataclass(frozen=True)
class Runtime:
    """overlap: fraction of once-a-step gradient traffic hidden under the backward pass. fused_traffic: how much of the element-wise
    traffic is left after fusion. memory_slack: allowance for fragmentation, as a fraction of what is allocated. optimizer_bytes: traffic of the
    optimizer per local parameter. bucket_bytes: collectives of gradients and of updated parameters travel together up to this size (XLA on GPU: its default
    threshold of combining, 30 MiB, as PyTorch's buckets of 25 MB), so that each costs its share of a latency.

    Of frameworks: kernels and rates; gather_overlap: how much of the shorter of arithmetic and of gathering weights (optimizer level 3) hides under the longer;
    interleave: chunks of blocks that each pipeline stage holds; balance: stages are dealt
    even numbers of parameters instead of blocks; overhead_bytes: what a process holds beside its tensors.
    """

    name: str
    overlap: float
    fused_traffic: float
    memory_slack: float
    time_spread: float
    """Half-width of the printed step-time range, as a fraction: guessed until fitted to runs of this profile."""
    memory_spread: float
    optimizer_bytes: float
    bucket_bytes: float
    note: str
    kernels: Kernels | None = None
    rates: Rates = field(default_factory=Rates)
    gather_overlap: float = 0.0
    interleave: int = 1
    overhead_bytes: float = 0.0
    balance: bool = False


# Bytes over bytes of the result. Fused: one read and one write forward; unfused: an eager chain of float32 element-wise kernels.
_MOVED = {
    "norm": (2.0, 4.0), "residual": (3.5, 3.0), "bias": (0.0, 1.0), "Gelu": (2.0, 3.0), "Silu": (2.0, 3.0), "Mul": (3.0, 5.0), "RotaryEmbedding": (4.0, 4.0),
    "Transpose": (1.5, 1.5), "Gather": (2.0, 4.0), "Concat": (2.0, 2.0), "Split": (2.0, 2.0),
}  # fmt: skip
_KEPT = {"norm": 2.0, "residual": 0.5, "Gelu": 1.0, "Silu": 1.0, "Mul": 1.0, "RotaryEmbedding": 1.0, "attention": 1.0, "product": 1.0}
FLASH = Kernels(_MOVED, _KEPT)
"""Fused norms and flash attention (version 2)."""
KERNELS = {
    "flash2-rms": FLASH,
    "flash2": Kernels({**_MOVED, "norm": (17.0, 26.0)}, {**_KEPT, "norm": 5.0}),
    "flash1": Kernels({**_MOVED, "norm": (17.0, 26.0)}, {**_KEPT, "norm": 5.0}, attention=(0.35, 0.28)),
    "fused": Kernels({**_MOVED, "norm": (17.0, 26.0)}, {**_KEPT, "norm": 5.0}, flash=False, score_bytes=(9.0, 11.0), score_kept=4.0),
    "torch": Kernels({**_MOVED, "norm": (17.0, 26.0)}, {**_KEPT, "norm": 5.0}, flash=False, score_bytes=(30.0, 32.0), score_kept=10.0),
    "fused-norm": Kernels(_MOVED, _KEPT, flash=False, score_bytes=(9.0, 11.0), score_kept=5.0),
}  # fmt: skip
"""Kernels of published runs, by name."""


RUNTIMES = {
    "jax-shard_map": Runtime("jax-shard_map", 0.0, 0.6, 0.04, 0.25, 0.08, 38, 30 * 2**20, "the emitted program; constants are guesses, no communication counts as hidden"),
    "jax-jit": Runtime("jax-jit", 0.3, 0.6, 0.04, 0.3, 0.12, 38, 30 * 2**20, "the emitted program, collectives placed by the compiler; constants guessed"),
    "megatron": Runtime("megatron", 0.0, 1.0, 0.0, 0.15, 0.1, 38, 160e6, "Megatron-style runs", FLASH, Rates(outer=0.6), overhead_bytes=1.5e9),
    "fsdp": Runtime("fsdp", 0.5, 1.0, 0.0, 0.2, 0.1, 38, 25 * 2**20, "FSDP runs", FLASH, Rates(outer=0.6), 0.5, overhead_bytes=1.5e9),
}
