"""What whole searches prove: python -m benchmarks.gaps [--quick] [--save FILE].

Each row is the search of one zoo model on so many H100 (80 GB, nodes of 8), as `plan` runs it, most
of them where memory binds: seconds of the step it found, its bound, the gap between them, plans
priced, and CPU seconds of the search alone. A gap is what is not proven: a better plan may be there
or not (of plans with two microbatches at the same time nothing is). Exit status 1 where a bound is
above a plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from planner.search.build_request import make_request
from planner.search.search import Search
from planner.support.gc_pause import seldom_collecting
from planner.workload.model import Model, Workload

ROWS = (
    ("llama3-8b", 4, 64),
    ("llama3-8b", 8, 512),
    ("mixtral-8x7b", 16, 256),
    ("mixtral-8x7b", 64, 512),
    ("gpt3-175b", 1024, 1536),
    ("megatron-530b", 512, 1920),
    ("megatron-530b", 2048, 1920),
    ("llama3-70b", 16, 512),
    ("llama3-70b", 64, 512),
    ("llama3-70b", 256, 1024),
    ("gpt3-175b", 128, 1536),
    ("gpt3-175b", 256, 1536),
    ("gpt-1t", 1024, 3072),
    ("gpt-1t", 3072, 3072),
    ("llama3-405b", 512, 2048),
    ("llama3-405b", 1024, 2048),
    ("llama3-405b", 4096, 2048),
    ("llama3-405b", 16384, 2048),
    ("resnet50", 64, 1024),
    ("unet-sd15", 64, 512),
)
"""Zoo model, devices, sequences a step."""
QUICK = 6


def searched(name: str, devices: int, batch: int) -> tuple[float, float, int, float]:
    """Seconds of the step and of the bound, plans priced, and CPU seconds of the search."""
    model = Model.open(f"zoo:{name}", Workload(batch=batch), devices)
    model.graph(1)
    search = Search(model, make_request(devices=devices, hardware=None, topology=None))
    with seldom_collecting():
        began = time.process_time()
        found = search.run()
        took = time.process_time() - began
    assert found.best is not None, f"{name} on {devices} devices: nothing fits"
    return found.best.cost.step_time_s, found.bound_s, found.tried, took


def main() -> int:
    """Print the table, and write it where asked."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help=f"the first {QUICK} rows")
    options.add_argument("--save", type=Path, metavar="FILE", help="write the table there too")
    given = options.parse_args()
    lines, wrong = (
        [
            "| model | devices | batch | step | bound | gap | plans priced | search, CPU |",
            "|---|---|---|---|---|---|---|---|",
        ],
        0,
    )
    print("\n".join(lines))
    for name, devices, batch in ROWS[: QUICK if given.quick else None]:
        step, bound, tried, took = searched(name, devices, batch)
        wrong += bound > step * (1 + 1e-6)
        gap = f"{100 * max(0.0, 1 - bound / step):.2f} %" if bound else "nothing proven"
        lines.append(
            f"| {name} | {devices:,} | {batch:,} | {step:.5g} s | {bound:.5g} s | {gap} | {tried} |"
            f" {took:.1f} s |"
        )
        print(lines[-1], flush=True)
    if given.save:
        given.save.write_text("\n".join(lines) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
