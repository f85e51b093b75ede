"""Single products on one H100, priced by their extents and by FLOPs alone:
`python -m benchmarks.products [--each]`.

The figures of `[products]` are fitted to `records/h100_kernels.json` and judged on products that
nothing was fitted to (`records/h100_products_unseen.json`), and with each product left out in turn.
Single kernels do not reach the power limit, so that the cap by long steps is off here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodels.hardware.device import Device, load_device
from costmodels.kernels import roofline_time_s
from planner.calibrate.products import FIGURES, MeasuredProduct, fit_tiles, priced_s

RECORDS = Path(__file__).with_name("records")
FITTED, UNSEEN = "h100_kernels.json", "h100_products_unseen.json"
ALIGNED = 8
"""Columns of other vocabularies are padded in programs (planner.execution.odd_heads)."""
SIZES = ((3e10, np.inf), (3e9, 3e10), (0.0, 3e9))


def measured(file: str) -> list[MeasuredProduct]:
    """The products of a record in bfloat16."""
    found = []
    for name, row in json.loads((RECORDS / file).read_text())["cases"].items():
        what, *rest = name.split("_")
        if what != "product" or rest[1] != "bfloat16" or "time_s" not in row:
            continue
        m, n, k = (int(x) for x in rest[2].split("x"))
        if n % ALIGNED == 0:
            own = {"forward": (m, n, k), "weights": (k, n, m), "back": (m, k, n)}[rest[0]]
            found.append(MeasuredProduct(*own, row["time_s"]))
    return found


def alone(device: Device) -> Device:
    """The device of single kernels: not at the power limit, and without the launch of the next."""
    return replace(device, matmul_flops=(1.0,), matmul_efficiency=(1.0,), launch_s=0.0)


def by_flops(device: Device, products: Sequence[MeasuredProduct]) -> np.ndarray:
    """Seconds by the curve over FLOPs."""
    return np.array(
        [
            roofline_time_s(
                device,
                x.flops,
                2.0 * (x.rows * x.columns + x.rows * x.sums + x.sums * x.columns),
                "bfloat16",
            )
            for x in products
        ]
    )


def row(name: str, seconds: np.ndarray, products: Sequence[MeasuredProduct]) -> str:
    """Mean error by size."""
    off = np.abs(seconds / np.array([x.time_s for x in products]) - 1)
    flops = np.array([x.flops for x in products])
    cells = [f"{off[(flops >= low) & (flops < high)].mean():.1%}" for low, high in SIZES]
    return f"| {name} | {len(products)} | {' | '.join(cells)} | {np.median(off):.1%} |"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="a line for every product")
    given = parser.parse_args()
    shipped = load_device("h100-sxm")
    device, fitted, unseen = alone(shipped), measured(FITTED), measured(UNSEEN)
    tiles = fit_tiles(device, fitted)
    assert tiles is not None
    print("fitted:", ", ".join(f"{k} {getattr(tiles, k):.3g}" for k in FIGURES))
    here = replace(device, tiles=tiles)
    apart = []
    for i in range(len(fitted)):
        rest = fit_tiles(here, [x for k, x in enumerate(fitted) if k != i])
        apart.append(float(priced_s(replace(device, tiles=rest), [fitted[i]])[0]))
    print("| mean error | products | above 30 GFLOP | 3 to 30 | below 3 | median |")
    print("|---|---|---|---|---|---|")
    print(row("fitted to, by FLOPs", by_flops(shipped, fitted), fitted))
    print(row("fitted to, by extents", priced_s(here, fitted), fitted))
    print(row("each left out, by extents", np.array(apart), fitted))
    print(row("unseen, by FLOPs", by_flops(shipped, unseen), unseen))
    print(row("unseen, by extents", priced_s(here, unseen), unseen))
    print(row("unseen, by extents, in a program", priced_s(shipped, unseen), unseen))
    for x, t, before in zip(unseen, priced_s(here, unseen), by_flops(shipped, unseen), strict=True):
        if given.each:
            print(
                f"{x.rows:6} x {x.columns:6} x {x.sums:6} {1e6 * x.time_s:7.1f} us"
                f" {t / x.time_s - 1:+6.1%} by extents {before / x.time_s - 1:+6.1%} by FLOPs"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
