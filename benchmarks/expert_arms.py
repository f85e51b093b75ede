"""Published arms of experiments on mixtures of experts, ordered by price and as measured, with
dropped tokens charged as lost work.

    python -m benchmarks.expert_arms --runs xla_runs.jsonl

Marin's arms on one rack of GB200 (rows of a file of published runs, by Levanter's Grug): all
parameters cut over 64 devices and gathered (FSDP), or experts on 64 devices to which tokens travel
(EP64), trained with Muon. Each arm is a plan of that layout with a capacity of 1.25, what it measured of drops is
charged to both seconds: step / (1 - dropped). The rows do not say heads: 128 wide, a fourth of them
for keys and values, as in the rows of the same author that do.

torchtitan's 16B (DeepSeek V2 Lite) on eight H100, priced as its programs run: degrees of expert
parallelism 1, 2 and 4 (pytorch/torchtitan issue 1624: higher degrees are slower at that size).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodels.capacity import Capacity
from planner.ops.expert_load import expert_nodes
from planner.pins.pins import Pins
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.workload.open import open_model

CAPACITY = 1.25
ENDLESS = Capacity(2**50, 0, 0, 0)
"""Arms ran: whether they fit is not asked."""
DEGREES = (1, 2, 4)


@dataclass(frozen=True)
class Arm:
    """One arm: what it is, seconds of a step as measured and as priced, part of tokens dropped."""

    name: str
    measured_s: float
    priced_s: float
    dropped: float

    def charged(self, seconds: float) -> float:
        """Seconds for as much work as a step that drops nothing does."""
        return seconds / (1 - self.dropped)


def priced_s(spec: str, devices: int, batch: int, pins: Pins, **options: Any) -> float:
    """Seconds of the best step under pins, whatever memory it takes."""
    capacity, optimizer = options.pop("capacity", None), options.get("optimizer", "adamw")
    model = open_model(spec, devices, batch=batch, capacity=capacity, optimizer=optimizer)
    if pins.nodes:
        first = model.graph(1).nodes[next(i for i, _ in expert_nodes(model.graph(1)))].id
        pins = replace(pins, nodes={first.replace("layers.0", "layers.*"): pins.nodes["experts"]})
    request = make_request(devices=devices, pins=pins, baselines=False, **options)
    best = Search(model, replace(request, capacity=ENDLESS), None).run().best
    assert best is not None
    return best.cost.step_time_s


def spec_of(row: Mapping[str, Any]) -> str:
    """The zoo's name for a Grug of a row."""
    heads = int(row["hidden"]) // 128
    sizes = {
        "layers": row["layers"],
        "hidden": row["hidden"],
        "heads": heads,
        "kv_heads": heads // 4,
        "head_dim": 128,
        "experts": row["experts"],
        "top": row["experts_per_token"],
        "expert_ff": row["ffn"],
        "ff": 2 * int(row["hidden"]),
        "vocab": 128256,
        "seq": row["seq"],
    }
    return "zoo:mixtral-8x7b," + ",".join(f"{k}={int(v)}" for k, v in sizes.items())


def arms(path: str) -> Iterator[Arm]:
    """Marin's arms of one rack that say what they dropped, the fastest of equal ones."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    best: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        if "Marin" in row["source"] and "GB200" in row["hardware"] and row.get("dropped"):
            key = row["model"], int(row["ep"])
            if key not in best or row["value"] < best[key]["value"]:
                best[key] = row
    for (model, degree), row in best.items():
        axis, factor = ("expert", "expert-b") if degree > 1 else ("data", "b")
        pins = Pins(
            mesh={axis: (int(row["devices"]),)},
            techniques={"microbatches": 1, "recompute": "block", "zero_stage": 3},
            nodes={"experts": {"split": {factor: [axis]}}},
        )
        seconds = priced_s(
            spec_of(row),
            int(row["devices"]),
            int(row["global_batch"]),
            pins,
            capacity=CAPACITY,
            optimizer="muon",
            hardware="gb200",
        )
        lost = float(str(row["dropped"]).rstrip("%")) / 100
        yield Arm(f"{model} {'EP64' if degree > 1 else 'FSDP'}", row["value"], seconds, lost)


def pairs(found: list[Arm]) -> tuple[int, int]:
    """Pairs of arms, and how many of them price orders as measurement does, drops charged in
    both."""
    both = [
        (a.charged(a.priced_s) < b.charged(b.priced_s))
        == (a.charged(a.measured_s) < b.charged(b.measured_s))
        for k, a in enumerate(found)
        for b in found[:k]
    ]
    return len(both), sum(both)


def torchtitan(degree: int) -> float:
    """Seconds of a step of DeepSeek V2 Lite on eight H100 under torchtitan."""
    techniques = {"zero_stage": 3, "microbatches": 1, "recompute": "block"}
    mesh = {"expert": (degree,), "stage": (1,), "tensor": (1,), "sequence": (1,)}
    return priced_s(
        "zoo:deepseek-v2-lite",
        8,
        32,
        Pins(mesh=mesh, techniques=techniques),
        hardware="h100-sxm",
        launcher="torchtitan",
    )


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", required=True)
    found = list(arms(parser.parse_args(arguments).runs))
    print("| arm | dropped | measured | charged | priced | charged |\n|---|---|---|---|---|---|")
    for a in sorted(found, key=lambda a: a.charged(a.measured_s)):
        print(
            f"| {a.name} | {a.dropped:.1%} | {a.measured_s:.2f} s | {a.charged(a.measured_s):.2f} s"
            f" | {a.priced_s:.2f} s | {a.charged(a.priced_s):.2f} s |"
        )
    print("of {} pairs {} are ordered as measured\n".format(*pairs(found)))
    steps = {degree: torchtitan(degree) for degree in DEGREES}
    print("torchtitan, 16B on 8 H100: " + ", ".join(f"EP {k} {s:.2f} s" for k, s in steps.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
