"""Prices of serving models that keep a state beside published measurements of engines.

    python -m benchmarks.state_serving

Nemotron 3 Nano 30B-A3B in FP8 on two B200, vLLM 0.16, prompts of 2,048 tokens and 512 generated:
milliseconds a token after the first, in the mean, by sequences at once. Qwen3-Next 80B-A3B in BF16
by SGLang on two, four and eight H200, 8 sequences at once of 1,000 + 2,000 tokens: tokens a second.
Rows tp=N of plans for that engine; nothing was fitted to any of them. The engines' requests come
one after the other as places get free, so that some steps have prompts among them; plans' begin
together.

Sources: docs.vultr.com/inference-cookbook/cuda/optimization/concurrency-tuning (2026-03-11);
github.com/sgl-project/sglang/pull/10404 (2025-09-13, figures with the tuned kernels).
"""

from __future__ import annotations

import statistics
from typing import Any

from planner.serving.serve import serve

NEMOTRON = {1: 2.91, 8: 3.96, 16: 4.32, 64: 6.74, 128: 8.91, 256: 11.77, 512: 15.46}
"""Sequences at once -> milliseconds a token. The row of 32 (7.86 ms, above that of 64) is left
out."""
QWEN = {2: 937.94, 4: 1137.94, 8: 1239.43}
"""GPUs -> tokens a second."""


def by_hand(model: str, devices: int, **asked: Any) -> dict[str, Any]:
    """The row tp=N of all devices."""
    made = serve(model, devices=devices, **asked)
    return next(dict(r) for r in made.rows if r["label"] == f"tp={devices}")


def nemotron() -> list[tuple[str, str, float, float]]:
    """(run, figure, measured, priced)"""
    found = []
    for sequences, measured in NEMOTRON.items():
        row = by_hand(
            "zoo:nemotron-3-nano-30b-a3b",
            2,
            hardware="b200",
            precision="fp8",
            engine="vllm",
            prompt=2048,
            generate=512,
            concurrency=sequences,
        )
        name = f"nemotron-3-nano-30b-a3b, FP8, 2 B200, {sequences} at once"
        found.append((name, "ms a token", measured, 1e3 * row["tpot_s"]))
    return found


def qwen() -> list[tuple[str, str, float, float]]:
    """(run, figure, measured, priced)"""
    found = []
    for devices, measured in QWEN.items():
        row = by_hand(
            "zoo:qwen3-next-80b-a3b",
            devices,
            hardware="h200",
            engine="sglang",
            prompt=1000,
            generate=2000,
            concurrency=8,
        )
        name = f"qwen3-next-80b-a3b, BF16, {devices} H200, 8 at once"
        speed = row["tokens_per_s_per_device"] * devices
        found.append((name, "tokens/s", measured, speed))
    return found


def main() -> None:
    """Print the table."""
    rows = [*nemotron(), *qwen()]
    print("| run | figure | measured | priced | off |")
    print("|---|---|---|---|---|")
    for name, figure, measured, priced in rows:
        off = f"{100 * (priced / measured - 1):+.1f} %"
        print(f"| {name} | {figure} | {measured:.4g} | {priced:.4g} | {off} |")
    each = [abs(priced / measured - 1) for _, _, measured, priced in rows]
    print(f"\nIn the mean {100 * statistics.mean(each):.1f} % off.")


if __name__ == "__main__":
    main()
