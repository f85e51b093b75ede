"""Plans for requests that arrive, at rates up to what a machine serves.

    python -m benchmarks.arrivals

Llama-3 8B on eight H100 and 70B on eight: prompts of 512~2048 tokens, 128~512 generated. Rates are
parts of the most that the plan for most requests a second serves; at each, the plan with the
soonest first token is chosen among all. Printed: replicas x devices of each, percentiles of ttft
and tpot, sequences that generate in a replica, CPU-seconds of the search. Prices, nothing was run.
"""

from __future__ import annotations

import time

from planner.serving.result import Serving
from planner.serving.serve import serve

MODELS = ("zoo:llama3-8b,cache=1", "zoo:llama3-70b,cache=1")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
PROMPT, GENERATE, DEVICES = "512~2048", "128~512", 8


def planned(model: str, rate: float, objective: str) -> tuple[Serving, float]:
    """(the plan, CPU-seconds that it took)"""
    begun = time.process_time()
    made = serve(
        model, prompt=PROMPT, generate=GENERATE, rate=rate, devices=DEVICES, objective=objective
    )
    return made, time.process_time() - begun


def line(model: str, made: Serving, seconds: float) -> str:
    """A row of the table."""
    t, f = made.traffic, made.figures
    assert t is not None
    times = [f"{t[name][f'p{p}'] * 1e3:.1f}" for name in ("ttft_s", "tpot_s") for p in (50, 90, 99)]
    name = model.removeprefix("zoo:").removesuffix(",cache=1")
    cells = [
        name,
        f"{t['rate_per_s']:.1f}",
        f"{t['most_per_s']:.1f}",
        f"{f['replicas']} x {f['split']}",
        *times,
        f"{t['generating']:.1f}",
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    heads = ["requests/s", "at most", "replicas x split"]
    heads += [f"{name} p{p} ms" for name in ("ttft", "tpot") for p in (50, 90, 99)]
    heads += ["generate", "CPU-s"]
    print(f"| model | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for model in MODELS:
        full, seconds = planned(model, 1.0, "throughput")
        assert full.traffic is not None
        print(line(model, full, seconds), flush=True)
        for share in SHARES:
            print(
                line(model, *planned(model, share * full.traffic["most_per_s"], "ttft")), flush=True
            )


if __name__ == "__main__":
    main()
