"""Runtime profiles: whose program is priced. Constants that belong to how a program runs, not to the hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """overlap: fraction of once-a-step gradient traffic hidden under the backward pass. fused_traffic: how much of the element-wise
    traffic is left after fusion. memory_slack: allowance for fragmentation, as a fraction of what is allocated. optimizer_bytes: traffic of the
    optimizer per local parameter. bucket_bytes: collectives of gradients and of updated parameters travel together up to this size (XLA on GPU: its default
    threshold of combining, 30 MiB, as PyTorch's buckets of 25 MB), so that each costs its share of a latency.
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


RUNTIMES = {
    "jax-shard_map": Runtime("jax-shard_map", 0.0, 0.6, 0.04, 0.25, 0.08, 38, 30 * 2**20, "the emitted program; constants are guesses, no communication counts as hidden"),
    "jax-jit": Runtime("jax-jit", 0.3, 0.6, 0.04, 0.3, 0.12, 38, 30 * 2**20, "the emitted program, collectives placed by the compiler; constants guessed"),
    "megatron": Runtime("megatron", 0.5, 1.0, 0.06, 0.15, 0.1, 38, 160e6, "Megatron-style runs; constants from published A100 runs, not fitted here"),
    "fsdp": Runtime("fsdp", 0.5, 1.0, 0.06, 0.2, 0.1, 38, 25 * 2**20, "FSDP runs; constants from published runs, not fitted here"),
}
