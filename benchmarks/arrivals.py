"""Plans for requests that arrive: at rates up to what a machine serves, and the fewest devices for
a rate and a target; prompts and generation on devices apart.

    python -m benchmarks.arrivals

Llama-3 8B and 70B on H100: prompts of 512~2048 tokens, 128~512 generated. First on eight devices,
at parts of the most that the plan for most requests a second serves, the plan with the soonest
first token. Then the fewest devices for some rates and targets, with what the next smaller number
misses. Last the least time a token on eight devices with `--pools` and without,
and from which acceptance on drafts pay, with the gain at others (and tokens drafted at a time).
Printed: replicas x devices of each, percentiles of ttft and tpot, sequences that generate
in a replica, tokens of a step at most, CPU-seconds of the search. Prices, nothing was run.
"""

from __future__ import annotations

import time
from typing import Any

from planner.serving.result import Serving
from planner.serving.serve import serve

MODELS = ("zoo:llama3-8b,cache=1", "zoo:llama3-70b,cache=1")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = {"prompt": "512~2048", "generate": "128~512"}
DEVICES = 8
WANTED = (
    ("zoo:llama3-8b,cache=1", 30, "200ms", "20ms"),
    ("zoo:llama3-8b,cache=1", 30, "200ms", "10ms"),
    ("zoo:llama3-8b,cache=1", 300, "200ms", "20ms"),
    ("zoo:llama3-70b,cache=1", 10, "1 s", "50ms"),
    ("zoo:llama3-70b,cache=1", 10, "1 s", "25ms"),
    ("zoo:llama3-70b,cache=1", 40, "1 s", "50ms"),
)
"""(model, requests a second, most that 99 in a hundred wait for the first token, and a token)"""


def planned(model: str, **options: Any) -> tuple[Serving, float]:
    """(the plan, CPU-seconds that it took)"""
    begun = time.process_time()
    made = serve(model, **LENGTHS, **options)
    return made, time.process_time() - begun


def cells(made: Serving, seconds: float) -> list[str]:
    """What both tables say of a plan."""
    t, f = made.traffic, made.figures
    assert t is not None
    times = [f"{t[name][f'p{p}'] * 1e3:.1f}" for name in ("ttft_s", "tpot_s") for p in (50, 90, 99)]
    return [
        f"{t['most_per_s']:.1f}",
        f"{f['replicas']} x {f['split']}",
        *times,
        f"{t['generating']:.1f}",
        f"{t['limits']['step_tokens']:,}",
        f"{seconds:.1f}",
    ]


APART = (("zoo:llama3-8b,cache=1", 159), ("zoo:llama3-70b,cache=1", 16))
"""(model, requests a second)"""
TAKEN = (60, 70, 80, 90)
HEADS = [
    "at most",
    "replicas x split",
    *(f"{name} p{p} ms" for name in ("ttft", "tpot") for p in (50, 90, 99)),
    "generate",
    "step",
    "CPU-s",
]


def show(row: list[str]) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(row)} |", flush=True)


def short(model: str) -> str:
    """The model's name."""
    return model.removeprefix("zoo:").removesuffix(",cache=1")


def rates() -> None:
    """The table of rates."""
    show(["model", "requests/s", *HEADS])
    print("|---" * (len(HEADS) + 2) + "|")
    for model in MODELS:
        full, seconds = planned(model, rate=1.0, devices=DEVICES)
        assert full.traffic is not None
        show([short(model), "1.0", *cells(full, seconds)])
        for share in SHARES:
            rate = share * full.traffic["most_per_s"]
            made, seconds = planned(model, rate=rate, devices=DEVICES, objective="ttft")
            show([short(model), f"{rate:.1f}", *cells(made, seconds)])


def fewest() -> None:
    """The table of targets."""
    show(["model", "requests/s", "ttft, tpot", "devices", *HEADS, "fewer"])
    print("|---" * (len(HEADS) + 5) + "|")
    for model, rate, ttft, tpot in WANTED:
        made, seconds = planned(model, rate=rate, devices="fewest", ttft=ttft, tpot=tpot)
        assert made.traffic is not None
        fewer = made.traffic.get("fewer", {"devices": 0, "why": ""})
        devices = str(made.step.topology["devices"])
        why = f"{fewer['devices']}: {fewer['why']}" if fewer["why"] else ""
        asked = [short(model), str(rate), f"{ttft}, {tpot}", devices]
        show([*asked, *cells(made, seconds), why])


def pools() -> None:
    """The table of plans whose replicas do one phase, or both."""
    show(["model", "requests/s", *HEADS])
    print("|---" * (len(HEADS) + 2) + "|")
    for model, rate in APART:
        for apart in (False, True):
            made, seconds = planned(
                model, rate=rate, devices=DEVICES, objective="tpot", pools=apart
            )
            row = next(r for r in made.rows if r["chosen"])
            shown = cells(made, seconds)
            shown[1] = row.get("pools", shown[1])
            show([short(model), str(rate), *shown])


def drafts() -> None:
    """The table of speculative decoding: 8B drafts for 70B on eight devices."""
    show(
        [
            "sequences",
            "a draft's step of the model's",
            "pays from",
            *(f"{a} % taken" for a in TAKEN),
        ]
    )
    print("|---" * (len(TAKEN) + 3) + "|")
    for sequences in (1, 16, 64, 256):
        draft = serve(
            MODELS[1],
            prompt=1024,
            generate=256,
            concurrency=sequences,
            devices=DEVICES,
            objective="tpot",
            draft=MODELS[0],
        ).service["draft"]
        pays = draft["break_even"]
        least = "never" if pays is None else f"{100 * pays:.0f} %"
        gains = [f"{row['gain']:.2f}x ({row['drafted']})" for row in draft["gains"]]
        show([str(draft["sequences"]), f"{100 * draft['cost']:.1f} %", least, *gains])


def main() -> None:
    """Print the tables."""
    rates()
    print()
    fewest()
    print()
    pools()
    print()
    drafts()


if __name__ == "__main__":
    main()
