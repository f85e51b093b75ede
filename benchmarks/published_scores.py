"""Scores of priced runs against measured ones: errors, order within groups, what picking our best
costs, and which runs are said to fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import erf, floor, log
from statistics import mean, median
from typing import Any

EDGE = 0.05
"""Runs whose predicted memory is within this fraction of what is usable are hard to tell, and are
counted apart."""

NORMAL_80 = 1.2816
"""Four fifths of a normal distribution lie within so many standard deviations."""


@dataclass(frozen=True)
class Outcome:
    """One run: seconds measured (None: ran out of memory) and priced, bytes priced and usable, the
    group it competes in."""

    group: Any
    measured_s: float | None
    priced_s: float
    priced_bytes: float
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the price says that it fits."""
        return self.priced_bytes <= self.usable_bytes


def errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean, median and 95th percentile of |priced / measured - 1|."""
    off = sorted(abs(o.priced_s / o.measured_s - 1) for o in outcomes if o.measured_s)
    return {
        "mean": mean(off),
        "median": median(off),
        "p95": off[min(len(off) - 1, int(0.95 * len(off)))],
    }


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two orders of the same things."""
    score = ties_a = ties_b = pairs = 0
    for (x, u), (y, v) in combinations(zip(a, b, strict=True), 2):
        pairs, ties_a, ties_b = pairs + 1, ties_a + (x == y), ties_b + (u == v)
        score += ((x > y) - (x < y)) * ((u > v) - (u < v))
    scale = ((pairs - ties_a) * (pairs - ties_b)) ** 0.5
    return score / scale if scale else 0.0


def grouped(
    outcomes: Sequence[Outcome], key: Callable[[Any], Hashable] = lambda group: group
) -> dict[Hashable, list[Outcome]]:
    """Outcomes by (a part of their) group, in order of first appearance."""
    found: dict[Hashable, list[Outcome]] = {}
    for o in outcomes:
        found.setdefault(key(o.group), []).append(o)
    return found


def order(
    outcomes: Sequence[Outcome],
    key: Callable[[Any], Hashable] = lambda group: group,
    least: int = 4,
) -> tuple[float, int]:
    """Mean tau over groups of at least so many measured runs, and how many groups."""
    taus = []
    for rows in grouped([o for o in outcomes if o.measured_s], key).values():
        if len(rows) >= least:
            taus.append(kendall([o.measured_s or 0.0 for o in rows], [o.priced_s for o in rows]))
    return (mean(taus), len(taus)) if taus else (0.0, 0)


def choice(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What picking the fastest by price costs, in groups where there is a choice: among measured
    runs, and among all by time and memory."""
    plain, chosen, ran_out, none = [], [], 0, 0
    for rows in grouped(outcomes).values():
        measured = [o for o in rows if o.measured_s]
        if len(measured) < 2:
            continue
        best = min(o.measured_s or 0.0 for o in measured)
        plain.append((min(measured, key=lambda o: o.priced_s).measured_s or 0.0) / best - 1)
        fitting = [o for o in rows if o.fits]
        if not fitting:
            none += 1
            continue
        pick = min(fitting, key=lambda o: o.priced_s)
        if pick.measured_s is None:
            ran_out += 1
        else:
            chosen.append(pick.measured_s / best - 1)
    out: dict[str, Any] = {"groups": len(plain), "regret_measured": mean(plain) if plain else 0.0}
    return out | {
        "picks_out_of_memory": ran_out,
        "nothing_fits": none,
        "regret": mean(chosen) if chosen else 0.0,
        "worst_regret": max(chosen, default=0.0),
    }


def fitting(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Precision and recall of "does not fit", and the share that is right near the edge."""
    said = [o for o in outcomes if not o.fits]
    out = [o for o in outcomes if o.measured_s is None]
    right = sum(o.measured_s is None for o in said)
    edge = [o for o in outcomes if abs(o.priced_bytes - o.usable_bytes) <= EDGE * o.usable_bytes]
    return {
        "rows": len(outcomes),
        "out_of_memory": len(out),
        "said": len(said),
        "precision": right / len(said) if said else 1.0,
        "recall": right / len(out) if out else 1.0,
        "edge_rows": len(edge),
        "edge_right": (
            sum(o.fits == (o.measured_s is not None) for o in edge) / len(edge) if edge else 1.0
        ),
    }


def covered(outcomes: Sequence[Outcome], spread: tuple[float, float]) -> float:
    """Share of measured runs between price * (1 - below) and price * (1 + above)."""
    ratios = [o.measured_s / o.priced_s for o in outcomes if o.measured_s]
    return sum(1 - spread[0] <= r <= 1 + spread[1] for r in ratios) / len(ratios)


def covered_held_out(
    outcomes: Sequence[Outcome], folds: Sequence[Hashable], outside: float = 0.1
) -> float:
    """Share of measured runs within the nominal range of their price, whose ends are quantiles of
    measured / priced of the other folds: `outside` below, `outside` above."""
    ratios = [
        (fold, o.measured_s / o.priced_s)
        for o, fold in zip(outcomes, folds, strict=True)
        if o.measured_s
    ]
    inside = 0
    for fold in dict.fromkeys(f for f, _ in ratios):
        others = sorted(r for f, r in ratios if f != fold)
        low, high = quantiles(others, outside) if others else (1.0, 1.0)
        inside += sum(low <= r <= high for f, r in ratios if f == fold)
    return inside / len(ratios)


def quantiles(values: Sequence[float], outside: float = 0.1) -> tuple[float, float]:
    """(low, high) of sorted values such that one more of their kind is below, and above, with
    probability `outside` at most where there are enough of them."""
    k = max(0, floor(outside * (len(values) + 1)) - 1)
    return values[k], values[len(values) - 1 - k]


def memory_spread(outcomes: Sequence[Outcome]) -> float:
    """Half-width of the range of priced bytes that holds the true bytes four times in five: most
    likely where log(true / priced) is normal around 0.

    Bytes of runs are not known, only whether they were more than usable; 2 % of runs may fail or
    pass for other reasons.
    """
    above = [(log(o.priced_bytes / o.usable_bytes), o.measured_s is None) for o in outcomes]

    def loss(sigma: float) -> float:
        return -sum(
            log(0.02 + 0.96 * (0.5 + 0.5 * erf((x if ran_out else -x) / sigma / 2**0.5)))
            for x, ran_out in above
        )

    return NORMAL_80 * min((0.005 * 1.1**k for k in range(40)), key=loss)
