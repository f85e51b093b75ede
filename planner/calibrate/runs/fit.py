"""A few rates of a cluster fitted to measured steps: damped Gauss-Newton on the logarithm of time,
with a prior around what the device's file says.

    minimise   sum over rows of rho(log(measured / priced) / s)  +  sum over rates of (log rate /
               width)^2

rho is Huber's, so that rows which no model explains do not pull. The folds of a split are fitted
apart, each from the same start: what is reported for a row comes from a fit that has not seen its
group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.frameworks.peak_memory import FrameworkMemory
from costmodels.frameworks.step_time import Work
from costmodels.runtimes import Rates
from planner.calibrate.runs.rows import Case, plan_of
from planner.pricing.cost import Cost
from planner.pricing.frameworks.price import price_with_work, step_seconds
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import derived

WIDTHS = {
    "matmul": 0.15,
    "memory": 0.25,
    "attention": 0.3,
    "inner": 0.3,
    "outer": 1.0,
    "launch_s": 0.5,
}
"""Rates that are fitted, and how far (in log) they may be from the file's at no great cost: what
runs reach of a network between nodes is known least."""
SPREAD = 0.05
"""s: error of a step that is nothing unusual."""
ROUNDS = 3
MOST_ROWS = 80
"""Rows a fit looks at: every so many-th of more."""
MOST_FOLDS = 10


@dataclass(frozen=True)
class Prepared:
    """A case read once: its work, what it holds, and its price under the profile as it ships."""

    case: Case
    work: Work
    cost: Cost
    memory: FrameworkMemory

    def step_s(self, rates: Rates | None = None) -> float:
        """Seconds of a step; under other rates than the profile's where given."""
        return (
            self.cost.step_time_s
            if rates is None
            else step_seconds(self.work, self._pricer(rates)).total
        )

    def _pricer(self, rates: Rates) -> Pricer:
        case = self.case
        return Pricer(
            case.topology, case.mesh, replace(case.runtime, rates=rates, per_device={}), case.recipe
        )


def prepare(case: Case) -> Prepared:
    """Price a case and keep what prices under other rates need. Raises Left where its splits are
    not possible."""
    base, plan = plan_of(case)
    pricer = Pricer(case.topology, case.mesh, case.runtime, case.recipe)
    flow, runs = derived(base, plan)
    priced = price_with_work(base, flow, runs, pricer)
    return Prepared(case, priced.work, priced.cost, priced.memory)


def fitted(rows: Sequence[Prepared], start: Rates) -> Rates:
    """The rates that explain the rows, near `start`."""
    rows = rows[:: -(-len(rows) // MOST_ROWS)]
    measured = np.array([row.case.measured_s for row in rows], float)
    names, theta = tuple(WIDTHS), np.zeros(len(WIDTHS))
    widths = np.array(list(WIDTHS.values()))

    def rates(at: np.ndarray) -> Rates:
        return replace(
            start,
            **{n: getattr(start, n) * float(np.exp(x)) for n, x in zip(names, at, strict=True)},
        )

    def priced(at: np.ndarray) -> np.ndarray:
        constants = rates(at)
        return np.log([row.step_s(constants) for row in rows])

    for _ in range(ROUNDS):
        now = priced(theta)
        left = np.log(measured) - now
        slopes = np.stack(
            [(priced(theta + 0.02 * step) - now) / 0.02 for step in np.eye(len(names))], 1
        )
        weight = SPREAD**-2 / np.maximum(1.0, np.abs(left) / (1.5 * SPREAD))
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(widths**-2.0)
        theta = theta + np.clip(
            np.linalg.solve(normal, (slopes * weight[:, None]).T @ left - theta / widths**2),
            -0.7,
            0.7,
        )
    return rates(theta)


def held_out(
    rows: Sequence[Prepared], start: Rates, group: Callable[[Case], Hashable]
) -> tuple[list[float], dict[Hashable, Rates]]:
    """Per row the seconds priced by a fit that has not seen its group, and the rates of each group;
    many groups are left out several at a time."""
    seconds = [0.0] * len(rows)
    groups = list(dict.fromkeys(group(row.case) for row in rows))
    folds: dict[Hashable, Rates] = {}
    for first in range(min(len(groups), MOST_FOLDS)):
        out = set(groups[first::MOST_FOLDS])
        rest = [row for row in rows if group(row.case) not in out]
        rates = fitted(rest, start) if rest else start
        folds |= dict.fromkeys(groups[first::MOST_FOLDS], rates)
        for k, row in enumerate(rows):
            if group(row.case) in out:
                seconds[k] = row.step_s(rates)
    return seconds, folds
