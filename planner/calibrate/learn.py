"""`plan calibrate --runs FILE`: what a cluster reaches of its device's figures, learned from runs
that were measured on it.

Each line of the file is one run in the schema of docs/calibrate.md. A run becomes a model of the
zoo and a plan (planner.calibrate.runs.rows) and is priced as its framework runs it; the rates of
costmodels.runtimes.Rates are fitted to all runs of a framework at once
(planner.calibrate.runs.fit), with a log-normal prior around what ships: few runs move what they
tell of, and leave the rest. What is reported is the error on runs that a fit has not seen: each
left out in turn, many in ten groups. Relative standard errors of the rates are those of the
posterior, from the slopes of the prices at the fit.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from costmodels.hardware.device import DEVICES, device_names
from costmodels.hardware.intake import read_text, read_toml
from costmodels.runtimes import Rates
from planner.calibrate.runs.fit import (
    SPREAD,
    WIDTHS,
    Prepared,
    fitted,
    fitted_names,
    held_out,
    prepare,
)
from planner.calibrate.runs.rows import ODD, Case, Left, case_of, why_odd
from planner.errors import PlanError
from planner.pricing.pricer import Pricer
from planner.support.measured_steps import step_seconds

LEAST_RUNS = 2
STEP = 0.02
"""Of the logarithm of a rate, where its slope is taken."""
GIVEN = ("model", "hardware", "metric", "value")
"""What every line needs beside the sizes and degrees that planner.calibrate.runs.rows asks for."""


@dataclass(frozen=True)
class Learned:
    """The rates of one runtime profile. errors: relative standard errors. before, after: |priced /
    measured - 1| of each run, as shipped and by a fit that has not seen it."""

    runtime: str
    shipped: Rates
    rates: Rates
    errors: Mapping[str, float]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def line(self) -> str:
        """What a user wants to know first."""
        return (
            f"{self.runtime}: {len(self.before)} runs; median error of runs left out"
            f" {median(self.after):.1%}, with the shipped rates {median(self.before):.1%} (worst"
            f" {max(self.after):.1%}, {max(self.before):.1%})"
        )

    def rows(self) -> list[tuple[str, str]]:
        """(rate, "shipped -> learned +- error")."""
        return [
            (k, f"{getattr(self.shipped, k):.3g} -> {getattr(self.rates, k):.3g} +- {e:.0%}")
            for k, e in self.errors.items()
        ]


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file. Raises PlanError P185 with the line that is none."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as e:
        raise PlanError(
            "P185", f"cannot read {str(path)!r}: {getattr(e, 'strerror', None) or 'it is no text'}"
        ) from e
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise PlanError(
                "P185",
                f"{path}:{number} is no JSON: {e}",
                help=["one run a line; docs/calibrate.md lists the keys"],
            ) from e
        if isinstance(row, dict) and row.get("history"):
            row = {**row, "metric": "step_time_s", "value": _measured(path, number, row)}
        missing = [
            k
            for k in GIVEN
            if not isinstance(row, dict)
            or (row.get(k) is None and (k != "value" or row.get("metric") != "oom"))
        ]
        if missing:
            raise PlanError(
                "P185",
                f"{path}:{number} lacks {', '.join(missing)}",
                help=["docs/calibrate.md lists the keys of a run"],
            )
        rows.append({"source": "", **row})
    return rows


def _measured(path: Path, number: int, row: Mapping[str, Any]) -> float:
    """Seconds of a step of a run's history, a file beside that of the runs. Raises PlanError
    P185."""
    file = path.parent / str(row["history"])
    try:
        return step_seconds(file)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise PlanError(
            "P185",
            f"{path}:{number}: its history {str(file)!r} cannot be read: {why}",
            help=["a history of W&B, an overview of xprof or a log; docs/calibrate.md says which"],
        ) from e


def prepared(
    rows: Sequence[Mapping[str, Any]], hardware: str
) -> tuple[list[Prepared], Counter[str]]:
    """Runs priced, and why others are left out."""
    runs, reasons = [], Counter[str]()
    for row in rows:
        try:
            case = case_of(row, hardware)
            if not case.measured_s:
                raise Left("ran out of memory: tells nothing about time")
            runs.append(prepare(case))
        except Left as e:
            reasons[str(e)] += 1
        except ODD as e:
            reasons[why_odd(e)] += 1
    return runs, reasons


def learn(rows: Sequence[Prepared], left: Mapping[str, int] = {}) -> list[Learned]:
    """Rates of each runtime profile that has runs. Raises PlanError P186 where there are too few,
    or they ran on several devices."""
    devices = list(dict.fromkeys(row.case.topology.device.name for row in rows))
    if len(devices) > 1:
        raise PlanError(
            "P186",
            f"the runs are of {len(devices)} devices: {', '.join(devices)}",
            help=["one file a cluster, or --hardware NAME for all of its runs"],
        )
    by: dict[str, list[Prepared]] = {}
    for row in rows:
        by.setdefault(row.case.runtime.name, []).append(row)
    usable = {name: mine for name, mine in by.items() if len(mine) >= LEAST_RUNS}
    if not usable:
        reasons = [f"{n} left out: {why}" for why, n in left.items()]
        raise PlanError(
            "P186",
            f"{len(rows)} runs can be priced; {LEAST_RUNS} of one framework are the least to learn"
            " from",
            detail=reasons,
            help=["docs/calibrate.md says what a run needs"],
        )
    return [_learn(name, mine) for name, mine in usable.items()]


def _learn(runtime: str, rows: Sequence[Prepared]) -> Learned:
    case = rows[0].case
    shipped = Pricer(case.topology, case.mesh, case.runtime, case.recipe).rates
    rates = fitted(rows, shipped)
    numbers = {id(row.case): k for k, row in enumerate(rows)}
    unseen, _ = held_out(list(rows), shipped, lambda c: numbers[id(c)])
    off = [
        [abs(s / measured(row.case) - 1) for s, row in zip(priced, rows, strict=True)]
        for priced in ([r.step_s() for r in rows], unseen)
    ]
    return Learned(
        runtime, shipped, rates, standard_errors(rows, rates), tuple(off[0]), tuple(off[1])
    )


def measured(case: Case) -> float:
    """Seconds of a run that did run."""
    assert case.measured_s
    return case.measured_s


def standard_errors(rows: Sequence[Prepared], rates: Rates) -> dict[str, float]:
    """Relative standard error of each fitted rate: sqrt of the diagonal of (J'J / s^2 + prior)^-1,
    J the slopes of log price by log rate."""
    now = np.log([row.step_s(rates) for row in rows])
    slopes, names = [], fitted_names(rows)
    for name in names:
        moved = Rates(**{**asdict(rates), name: getattr(rates, name) * float(np.exp(STEP))})
        slopes.append((np.log([row.step_s(moved) for row in rows]) - now) / STEP)
    jac = np.stack(slopes, 1)
    covariance = np.linalg.inv(
        jac.T @ jac / SPREAD**2 + np.diag(np.array([WIDTHS[name] for name in names]) ** -2.0)
    )
    return dict(zip(names, (float(x) for x in np.sqrt(np.diag(covariance))), strict=True))


def table(learned: Sequence[Learned], hardware: str, name: str, runs: str) -> dict[str, Any]:
    """The device's own file with the rates beside its figures."""
    path = DEVICES / f"{hardware}.toml" if hardware in device_names() else Path(hardware)
    content: dict[str, Any] = read_toml(path)
    content.pop("aliases", None)
    content |= {"name": name, "date": time.strftime("%Y-%m-%d")}
    kept = {k: dict(content.get(k, {})) for k in ("measured", "rates", "sources", "uncertainty")}
    kept["measured"]["runs"] = runs
    for x in learned:
        kept["rates"][x.runtime] = {
            f.name: float(f"{getattr(x.rates, f.name):.5g}") for f in fields(Rates)
        }
        kept["sources"][f"rates.{x.runtime}"] = (
            f"fitted to {len(x.before)} runs; of runs left out the median error is"
            f" {median(x.after):.1%}, {median(x.before):.1%} as shipped"
        )
        kept["uncertainty"] |= {
            f"rates.{x.runtime}.{k}": float(f"{min(e, 1.0):.2g}") for k, e in x.errors.items()
        }
    return content | kept
