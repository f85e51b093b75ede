"""Runtime profiles: whose program is priced. Constants that belong to how a program runs, not to
the hardware.

The profiles `jax-*` price what is emitted. `megatron` and `fsdp` price others' runs as those
programs run them (costmodels.frameworks): their kernels are described by `Kernels`,
their rates beside the device's by `Rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a framework move and keep, by the role of a node
    (planner.pricing.frameworks.kernels.role).

    passes: role -> bytes that cross memory (forward, backward) as multiples of the result's bytes.
    kept: role -> bytes kept for the backward pass, likewise. score_bytes, logit_bytes: bytes moved
    (forward, backward) per element of attention scores and of logits. score_kept, logit_kept: bytes
    kept of each; score_made: bytes beside those kept while one block runs backward; logit_gathered,
    logit_piece: bytes more per element of logits, and of the local piece, where the loss gathers
    pieces. flash: attention keeps its scores on chip and skips what a causal mask hides; its
    products then run at `attention` of peak (forward, backward). again: the core of attention is
    computed again in the backward pass (selective recompute), its scores are not kept. remade: how
    much of the forward pass of products, and of what goes element by element, runs again in the
    backward pass (selective recompute beside flash attention). gathered: what products take whole
    of a tensor that is cut along the sequence, they keep whole. offloaded: what enters blocks waits
    in the host's memory. hosted: share of the blocks whose kept tensors wait there.
    """

    passes: Mapping[str, tuple[float, float]]
    kept: Mapping[str, float]
    flash: bool = True
    attention: tuple[float, float] = (0.5, 0.4)
    score_bytes: tuple[float, float] = (0.0, 0.0)
    score_kept: float = 0.0
    score_made: float = 0.0
    logit_bytes: tuple[float, float] = (20.0, 14.0)
    logit_kept: float = 10.0
    logit_gathered: float = 0.0
    logit_piece: float = 0.0
    again: bool = False
    remade: tuple[float, float] = (0.0, 0.0)
    gathered: bool = False
    offloaded: bool = False
    hosted: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a framework reaches of the rates in a device's file (1: all of it). attention: of peak,
    beside Kernels.attention. launch_s: what the host takes to start one kernel."""

    matmul: float = 1.0
    memory: float = 1.0
    attention: float = 1.0
    inner: float = 1.0
    outer: float = 1.0
    launch_s: float = 10e-6
    growth: float = 0.0
    """Large products gain with their FLOPs to this power."""
    latency: float = 1.0
    """Latency between nodes, as a multiple of the device file's."""


@dataclass(frozen=True)
class Runtime:
    """overlap: fraction of once-a-step gradient traffic hidden under the backward pass.
    fused_traffic: how much of the element-wise traffic is left after fusion. memory_slack:
    allowance for fragmentation, as a fraction of what is allocated. optimizer_bytes: traffic of the
    optimizer per local parameter. bucket_bytes: collectives of gradients and of updated parameters
    travel together up to this size (XLA on GPU: its default threshold of combining, 30 MiB, as
    PyTorch's buckets of 25 MB), so that each costs its share of a latency. stacked: gradients of
    repeated blocks are reduced as the arrays that hold those of all repeats, so that no launch is
    smaller (of GPU programs the compiler shows it: with shard_map they are, while its own
    partitioner reduces inside the loop).

    Of frameworks: kernels; rates (of devices with published runs those in per_device);
    gather_overlap: how much of the shorter of arithmetic and of gathering weights (ZeRO stage
    3) hides under the longer; interleave: chunks of blocks that each pipeline stage holds; balance:
    stages are dealt even numbers of parameters instead of blocks; overhead_bytes: what a process
    holds beside its tensors; pipeline_slack: memory_slack that a pipeline adds to what is kept of
    microbatches; pinned: fraction of the smaller of two moments
    (costmodels.frameworks.peak_memory) that stays allocated in the larger; flat_rings:
    collectives over several switched levels are rings through all members
    (costmodels.collectives.ring_lines), which the time of tensor parallelism over two nodes shows.
    """

    name: str
    overlap: float
    fused_traffic: float
    memory_slack: float
    time_spread: tuple[float, float]
    """How far below and above the price, as fractions of it, the printed range of the step time
    goes: one run in ten is below it, one in ten above."""
    memory_spread: tuple[float, float]
    """Likewise of memory."""
    optimizer_bytes: float
    bucket_bytes: float
    note: str
    kernels: Kernels | None = None
    rates: Rates = field(default_factory=Rates)
    per_device: Mapping[str, Rates] = field(default_factory=dict)
    gather_overlap: float = 0.0
    interleave: int = 1
    overhead_bytes: float = 0.0
    pipeline_slack: float = 0.0
    pinned: float = 0.0
    balance: bool = False
    flat_rings: bool = False
    stacked: bool = False
    copies_hidden: float = 0.0
    """Of what can hide where several microbatches run at the same time
    (planner.pricing.microbatch_overlap), what does, on accelerators: a guess beside the GPU
    compiler's schedule of one program, where ten of a block's sixteen collectives have products of
    the other copy beside them (benchmarks/RESULTS.md); nothing was timed."""


# Bytes over bytes of the result. Fused: one read and one write forward; unfused: an eager chain of
# float32 element-wise kernels.
_MOVED = {
    "norm": (2.0, 4.0),
    "residual": (3.5, 3.0),
    "bias": (0.0, 1.0),
    "Gelu": (2.0, 3.0),
    "Silu": (2.0, 3.0),
    "Mul": (3.0, 5.0),
    "RotaryEmbedding": (4.0, 4.0),
    "Transpose": (1.5, 1.5),
    "Gather": (2.0, 4.0),
    "Concat": (2.0, 2.0),
    "Split": (2.0, 2.0),
}
_KEPT = {
    "norm": 2.302,
    "residual": 0.5,
    "Gelu": 1.0,
    "Silu": 1.0,
    "Mul": 1.0,
    "RotaryEmbedding": 0.75,
    "attention": 1.0,
    "product": 1.0,
}
FLASH = Kernels(_MOVED, _KEPT)
"""Fused norms and flash attention (version 2)."""
KEPT_PRODUCTS = {"product": 1.0, "into residual": 1.0, "attention": 1.0}
"""Under selective recompute with flash attention: results of products and of attention are kept,
what is computed element by element is made again."""
_NVIDIA_KEPT = {**_KEPT, "norm": 1.0, "residual": 1.0, "Silu": 0.0, "RotaryEmbedding": 0.0}
_EAGER = {**_MOVED, "norm": (20.0, 30.0)}
_EAGER_KEPT = {**_KEPT, "norm": 5.951}
_FUSED = {
    **_MOVED,
    "residual": (1.0, 1.0),
    "Gelu": (0.0, 0.0),
    "Silu": (0.0, 0.0),
    "RotaryEmbedding": (2.0, 2.0),
    "Transpose": (0.0, 0.0),
}
"""As XLA fuses: an activation with the product of gates or of the next layer's operand, a sum with
what makes its operand; orders of axes are layouts."""
_WHOLE = replace(FLASH, logit_kept=17.413, logit_gathered=5.071, logit_piece=4.0, gathered=True)
_PLAIN = replace(_WHOLE, passes=_EAGER, kept=_EAGER_KEPT)
KERNELS = {
    "fsdp": FLASH,
    "fused-norm": replace(
        FLASH, flash=False, score_bytes=(14.0, 17.0), score_kept=5.0, score_made=4.0
    ),
    "nvidia": replace(FLASH, kept=_NVIDIA_KEPT),
    "nvidia-fp8": replace(
        FLASH, kept={**_NVIDIA_KEPT, "norm": 0.5, "Mul": 0.5, "Gelu": 1.5, "attention": 1.5}
    ),
    "mpt": replace(FLASH, kept={**_KEPT, "norm": 1.5}, logit_kept=4.0),
    "maxtext": replace(FLASH, passes=_FUSED, logit_kept=4.0),
    "flash2-rms": _WHOLE,
    "flash2": _PLAIN,
    "flash1": replace(_PLAIN, attention=(0.3, 0.23), kept={**_EAGER_KEPT, "attention": 2.0}),
    "fused": replace(
        _PLAIN, flash=False, score_bytes=(9.0, 11.0), score_kept=4.519, score_made=4.0
    ),
    "torch": replace(
        _PLAIN, flash=False, score_bytes=(30.0, 32.0), score_kept=5.961, score_made=8.0
    ),
}
"""Kernels of published runs: Megatron's GPT before flash attention; NVIDIA's of today (gated units
and rotary embedding in one kernel, which make their insides again; in fp8 what products read is
kept in one byte); llm-foundry's MPT (norms in bf16, a loss in one kernel: bf16 logits and their
gradient); MaxText's loss as XLA fuses it; and the five sets that Hagemann 2023 compares, whose loss
takes whole rows of logits (flash attention's first version copies its operands into one tensor).
Bytes kept by these five are fitted to which of its 783 configurations ran (2026-11;
planner.calibrate.runs.keep), those of the others are counts of tensors."""


_A100 = Rates(0.88, 0.88, 1.3, launch_s=38e-6, growth=0.05)
_A100_FSDP = Rates(0.85, 0.78, 0.74, 1.0, 0.8, growth=0.055)
_HOPPER = dict.fromkeys(("h100-sxm", "h200-sxm", "b200", "gb200-nvl72"), Rates(0.78, 0.9, 0.9))
"""Links reach what the device's file says, with Megatron also between nodes. An operator takes its
host 38 us (Python, autograd and two or three kernels), as single-node runs of small models show
(vTrain 2024). Products: 0.67 of an A100's peak at 1e11 FLOPs, a twentieth power more beyond, alike
in fits to three sources (Hagemann 2023, vTrain 2024, llm-foundry 2023-2024; fitted 2026-11). H100
and what followed it: runs reach less of the card's peak than single products do, as torchtitan's
(2024), MaxText's (2024) and NVIDIA's (2025-2026) show."""

_XLA_TIME = (0.16, 0.44)
"""Of 47 published runs of XLA programs (MaxText on TPU v5e and v6e and on H100, tpu-recipes) whose
devices' rates no run has set, priced by the profile `fsdp` (2026-11): the emitted programs
themselves were measured on no cluster."""
_XLA_MEMORY = (0.25, 0.02)
"""Of compiled over priced bytes of scanned programs, as the GPU compiler allocates them
(benchmarks.memory_truth, 2026-11)."""
_XLA = (_XLA_TIME, _XLA_MEMORY, 38, 30 * 2**20)
_WIDE = Rates(attention=0.5, outer=0.8)
"""TPUs with matrix units of 256 x 256 (v6e, 7x; Google Cloud TPU documentation): heads of 128 fill
half of them."""

RUNTIMES = {
    "jax-shard_map": Runtime(
        "jax-shard_map",
        0.0,
        0.6,
        0.04,
        *_XLA,
        "the emitted program; constants are guesses, no communication counts as hidden",
        copies_hidden=0.5,
        stacked=True,
    ),
    "jax-jit": Runtime(
        "jax-jit",
        0.3,
        0.6,
        0.04,
        *_XLA,
        "the emitted program, collectives placed by the compiler; constants guessed",
    ),
    "megatron": Runtime(
        "megatron",
        0.0,
        1.0,
        0.045,
        (0.15, 0.2),
        (0.06, 0.06),
        38,
        160e6,
        "as Megatron's programs run; fitted to published A100 runs",
        FLASH,
        _A100,
        _HOPPER,
        overhead_bytes=0.593e9,
        pipeline_slack=0.029,
        pinned=0.386,
        flat_rings=True,
    ),
    "fsdp": Runtime(
        "fsdp",
        0.5,
        1.0,
        0.05,
        (0.2, 0.4),
        (0.1, 0.1),
        38,
        25 * 2**20,
        "as FSDP programs run; fitted to published A100 runs",
        FLASH,
        Rates(outer=0.8),
        {
            "a100-40gb": _A100_FSDP,
            "a100-80gb": _A100_FSDP,
            **_HOPPER,
            "tpu-v6e": _WIDE,
            "tpu-v7x": _WIDE,
        },
        0.5,
        overhead_bytes=1e9,
        flat_rings=True,
    ),
}
