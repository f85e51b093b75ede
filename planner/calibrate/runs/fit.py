"""A few rates of a cluster fitted to measured steps: damped Gauss-Newton on the logarithm of time,
with a prior around what the device's file says.

    minimise   sum over rows of rho(log(measured / priced) / s)  +  sum over rates of (log rate /
               width)^2

rho is Huber's, so that rows which no model explains do not pull. The folds of a split are fitted
apart, each from the same start: what is reported for a row comes from a fit that has not seen its
group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from costmodels.frameworks.peak_memory import FrameworkMemory
from costmodels.frameworks.step_time import Work
from costmodels.kernels import slowdown
from costmodels.runtimes import Rates
from planner.analysis.facts import GraphFacts
from planner.calibrate.runs.rows import Case, plan_of
from planner.execution.plan import Plan
from planner.pricing.cost import Cost
from planner.pricing.frameworks.price import price_with_work, step_seconds
from planner.pricing.plan_price import price_flow
from planner.pricing.pricer import Pricer
from planner.pricing.step_time import derived

STRAGGLERS = "stragglers"
SCALED = ("matmul", "memory", "attention", "inner", "outer")
COMPILED = (*SCALED, STRAGGLERS)
"""Rates that decide steps of compiled programs; the first decide seconds of their own."""
WIDTHS = {
    "matmul": 0.15,
    "memory": 0.25,
    "attention": 0.3,
    "inner": 0.3,
    "outer": 1.0,
    "launch_s": 0.5,
    STRAGGLERS: 0.7,
}
"""Rates that are fitted, and how far (in log) they may be from the file's at no great cost: what
runs reach of a network between nodes is known least."""
SPREAD = 0.05
"""s: error of a step that is nothing unusual."""
ROUNDS = 3
MOST_ROWS = 80
"""Rows a fit looks at: every so many-th of more."""
MOST_FOLDS = 10


SLOWER = 1.1
"""By what factor a rate is worse where its seconds are found."""


@dataclass(frozen=True)
class Prepared:
    """A case read once: its price under the profile as it ships, and what prices under other rates
    need. work, memory: of a framework's run. seconds: of a compiled program, rate -> what it
    decides; shipped: the rates that they were found under. parameters: of the model."""

    case: Case
    cost: Cost
    parameters: int
    work: Work | None = None
    memory: FrameworkMemory | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    shipped: Rates = field(default_factory=Rates)

    def step_s(self, rates: Rates | None = None) -> float:
        """Seconds of a step; under other rates than the profile's where given.

        Of compiled programs what each rate decides is scaled by it, which leaves out that another
        than the slower of two things that run together may then be the slower.
        """
        if rates is None:
            return self.cost.step_time_s
        if self.work is not None:
            return step_seconds(self.work, self._pricer(rates)).total
        device, n = self.case.topology.device, self.case.topology.devices
        step = self.cost.step_time_s + sum(
            seconds * (getattr(self.shipped, name) / getattr(rates, name) - 1)
            for name, seconds in self.seconds.items()
        )
        return step * slowdown(device, rates, n) / slowdown(device, self.shipped, n)

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
    if case.runtime.kernels is None:
        return _compiled(case, base, plan, pricer)
    flow, runs = derived(base, plan)
    priced = price_with_work(base, flow, runs, pricer)
    return Prepared(case, priced.cost, base.graph.parameters, priced.work, priced.memory)


def _compiled(case: Case, base: GraphFacts, plan: Plan, pricer: Pricer) -> Prepared:
    """A case that the emitted program's profile prices: time with all that its blocks save at hand,
    memory without what waits in the host's."""
    for recompute in case.recompute:
        flow, runs = derived(base, replace(plan, recompute=recompute))
        cost = price_flow(base, flow, runs, pricer)
        if cost.memory.total <= case.usable_bytes:
            break
    seconds, shipped = {}, pricer.rates
    for name in SCALED:
        worse = replace(shipped, **{name: getattr(shipped, name) / SLOWER})
        runtime = replace(case.runtime, rates=worse, per_device={})
        again = Pricer(case.topology, case.mesh, runtime, case.recipe)
        step = price_flow(base, flow, runs, again).step_time_s
        seconds[name] = (step - cost.step_time_s) / (SLOWER - 1)
    if case.on_device:
        recompute, offload = case.on_device
        away = replace(plan, recompute=recompute, offload=offload)
        cost = replace(cost, memory=price_flow(base, *derived(base, away), pricer).memory)
    return Prepared(case, cost, base.graph.parameters, seconds=seconds, shipped=shipped)


def fitted_names(rows: Sequence[Prepared]) -> tuple[str, ...]:
    """The rates that decide steps of such rows, of WIDTHS."""
    compiled = all(row.work is None for row in rows)
    return tuple(n for n in WIDTHS if (n in COMPILED if compiled else n != STRAGGLERS))


def fitted(
    rows: Sequence[Prepared],
    start: Rates,
    counts: Callable[[Prepared], float] = lambda row: 1.0,
    within: Mapping[str, float] = WIDTHS,
) -> Rates:
    """The rates that explain the rows, near `start`. counts: how much a row counts; within: rate ->
    how far (in log) it may be from there at no great cost."""
    rows = rows[:: -(-len(rows) // MOST_ROWS)]
    share = np.array([counts(row) for row in rows])
    measured = np.array([row.case.measured_s for row in rows], float)
    names = fitted_names(rows)
    theta, widths = np.zeros(len(names)), np.array([within[name] for name in names])

    def rates(log_factors: np.ndarray) -> Rates:
        return replace(
            start,
            **{
                n: getattr(start, n) * float(np.exp(x))
                for n, x in zip(names, log_factors, strict=True)
            },
        )

    def priced(log_factors: np.ndarray) -> np.ndarray:
        constants = rates(log_factors)
        return np.log([row.step_s(constants) for row in rows])

    for _ in range(ROUNDS):
        now = priced(theta)
        errors = np.log(measured) - now
        slopes = np.stack(
            [(priced(theta + 0.02 * step) - now) / 0.02 for step in np.eye(len(names))], 1
        )
        weight = share * SPREAD**-2 / np.maximum(1.0, np.abs(errors) / (1.5 * SPREAD))
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(widths**-2.0)
        theta = theta + np.clip(
            np.linalg.solve(normal, (slopes * weight[:, None]).T @ errors - theta / widths**2),
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
        left_out = set(groups[first::MOST_FOLDS])
        rest = [row for row in rows if group(row.case) not in left_out]
        rates = fitted(rest, start) if rest else start
        folds |= dict.fromkeys(groups[first::MOST_FOLDS], rates)
        for k, row in enumerate(rows):
            if group(row.case) in left_out:
                seconds[k] = row.step_s(rates)
    return seconds, folds
