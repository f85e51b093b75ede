"""All published runs of compiled programs together, under the default profile: by kind of device
and size of model, as shipped and with each source left out, and trends of the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import exp, log, log2, sqrt
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.published_scores import quantiles
from costmodels.ranges import SMALL, Asked, TimeRange, time_range
from planner.calibrate.runs import xla
from planner.calibrate.runs.compiled import sources_left_out
from planner.calibrate.runs.fit import Prepared

TRENDS: Mapping[str, Callable[[Prepared], float]] = {
    "devices": lambda p: log2(p.case.topology.devices),
    "tensor degree": lambda p: log2(max(1, int(p.case.row["tp"] or 1))),
    "sequence": lambda p: log2(float(p.case.row["seq"])),
}


def range_of(row: Prepared) -> TimeRange:
    """The range that a plan like a row's is printed with."""
    device, facts = row.case.topology.device, row.case.row
    asked = Asked(
        device=device.name,
        kind=device.kind,
        calibrated=False,
        devices=row.case.topology.devices,
        parameters=row.parameters,
        sequence=int(facts["seq"]),
        stages=row.case.mesh.stages,
        experts=bool(xla.mixture(row.case.row)),
        training=True,
    )
    return time_range(row.case.runtime, asked)


def inside(rows: Sequence[Prepared]) -> float:
    """Share of measured runs within the printed range of their price."""
    return mean(_is_inside(row, range_of(row)) for row in rows)


def _is_inside(row: Prepared, spread: TimeRange) -> bool:
    low, high = spread.ends(row.step_s())
    return low <= (row.case.measured_s or 0.0) <= high


def class_of(row: Prepared) -> str:
    """`gpu large`: kind of device, and whether the model has a billion parameters, or experts."""
    if xla.mixture(row.case.row):
        return f"{row.case.topology.device.kind} experts"
    size = "small" if row.parameters < SMALL else "large"
    return f"{row.case.topology.device.kind} {size}"


def all_compiled(rows: Sequence[Prepared], fit: bool) -> dict[str, Any]:
    """Figures of every class of rows. fit: of rates that have not seen a row's source, too."""
    unseen = sources_left_out(rows) if fit else []
    out: dict[str, Any] = {}
    for name in sorted({class_of(row) for row in rows}):
        mine = [k for k, row in enumerate(rows) if class_of(row) == name]
        out[name] = _figures([rows[k] for k in mine], [rows[k].step_s() for k in mine])
        out[name]["covered"] = inside([rows[k] for k in mine])
        out[name]["ends"] = ends([rows[k] for k in mine])
        out[name]["ends held out"] = ends_held_out([rows[k] for k in mine])
        if fit:
            out[name]["source left out"] = _figures(
                [rows[k] for k in mine], [unseen[k] for k in mine]
            )
    return out


def _figures(rows: Sequence[Prepared], seconds: Sequence[float]) -> dict[str, Any]:
    off = [s / (row.case.measured_s or 1.0) - 1 for row, s in zip(rows, seconds, strict=True)]
    return {
        "rows": len(rows),
        "sources": len({row.case.row["source"] for row in rows}),
        "mean": mean(map(abs, off)),
        "median": median(map(abs, off)),
        "bias": mean(off),
        "trends": trends(rows, seconds),
    }


def trends(rows: Sequence[Prepared], seconds: Sequence[float]) -> dict[str, float]:
    """Feature -> how much the error changes over it."""
    return {name: _trend(rows, seconds, of) for name, of in TRENDS.items()}


def _trend(
    rows: Sequence[Prepared], seconds: Sequence[float], of: Callable[[Prepared], float]
) -> float:
    """How much the error (in logarithms) changes over the middle four fifths of a feature: slope
    within groups of one source and model, times the spread of the feature."""
    groups: dict[Any, list[tuple[float, float]]] = {}
    for row, s in zip(rows, seconds, strict=True):
        facts = row.case.row
        key = facts["source"], facts["model"], facts.get("precision")
        groups.setdefault(key, []).append((of(row), log(s / (row.case.measured_s or 1.0))))
    pairs = [
        (x - mean(u for u, _ in each), y - mean(v for _, v in each))
        for each in groups.values()
        for x, y in each
    ]
    across = sum(x * x for x, _ in pairs)
    if not across:
        return 0.0
    slope = sum(x * y for x, y in pairs) / across
    low, high = np.quantile([of(row) for row in rows], (0.1, 0.9))
    return float(slope * (high - low))


def ends(rows: Sequence[Prepared]) -> tuple[float, float]:
    """(below, above) of ranges that hold four runs in five: a tenth of the runs beyond either end,
    each source counting as one, and wider for a source that is not among them."""
    by: dict[str, list[float]] = {}
    for row in rows:
        ratio = log((row.case.measured_s or 1.0) / row.step_s())
        by.setdefault(str(row.case.row["source"]), []).append(ratio)
    most = max(len(found) for found in by.values())
    even = sorted(x for found in by.values() for x in found * -(-most // len(found)))
    low, high = quantiles(even)
    wider = sqrt(1 + 1 / len(by))
    return 1 - exp(wider * low), exp(wider * high) - 1


def ends_held_out(rows: Sequence[Prepared]) -> float:
    """Share of runs within ends that come from the other sources."""
    found = []
    for source in {row.case.row["source"] for row in rows}:
        others = [row for row in rows if row.case.row["source"] != source]
        if others:
            below, above = ends(others)
            ratios = [
                (row.case.measured_s or 0.0) / row.step_s()
                for row in rows
                if row.case.row["source"] == source
            ]
            found += [1 - below <= x <= 1 + above for x in ratios]
    return mean(found) if found else 1.0


def apart(rows: Sequence[Prepared]) -> tuple[int, float]:
    """(pairs, by what fraction) steps of two runs of one program and machine must be priced apart
    for the order to be told right four times in five: the 80 % quantile of how much measured over
    priced differs between two meshes, without stages, of one model, release, build and length."""
    groups: dict[Any, list[tuple[float, str]]] = {}
    for row in rows:
        if row.case.mesh.stages > 1:
            continue
        facts = row.case.row
        same = ("source", "model", "seq", "devices", "precision", "attention", "date")
        build = str(facts.get("url_or_repo")).rpartition("/")[0]
        ratio = log((row.case.measured_s or 1.0) / row.step_s())
        key = (*(facts.get(k) for k in same), build)
        groups.setdefault(key, []).append((ratio, str(facts.get("mesh"))))
    off = [
        abs(a - b)
        for found in groups.values()
        for (a, mesh), (b, other) in combinations(found, 2)
        if mesh != other
    ]
    return len(off), exp(float(np.quantile(off, 0.8))) - 1 if off else 0.0


SAME_PROGRAM = ("source", "precision", "date", "attention")


def between(rows: Sequence[Prepared], same: Sequence[str], other: Sequence[str]) -> dict[str, Any]:
    """How much measured over priced differs between two runs that agree in the facts `same` and not
    in all of `other`: a tenth of the pairs beyond either end, and what four in five are within,
    each source counting as one."""
    groups: dict[Any, list[tuple[float, Any]]] = {}
    for row in rows:
        facts = row.case.row
        ratio = log((row.case.measured_s or 1.0) / row.step_s())
        key = (*(facts.get(k) for k in same), row.case.topology.device.name)
        groups.setdefault(key, []).append((ratio, tuple(facts[k] for k in other)))
    by: dict[str, list[float]] = {}
    for key, found in groups.items():
        apart = [b[0] - a[0] for a in found for b in found if a[1] != b[1]]
        if apart:
            by.setdefault(str(key[0]), []).extend(apart)
    if not by:
        return {"pairs": 0, "sources": 0}
    most = max(map(len, by.values()))
    even = [x for found in by.values() for x in (found * -(-most // len(found)))[:most]]
    low, high = np.quantile(even, (0.1, 0.9))
    return {
        "pairs": sum(map(len, by.values())),
        "sources": len(by),
        "below": 1 - exp(low),
        "above": exp(high) - 1,
        "within": exp(float(np.quantile(np.abs(even), 0.8))) - 1,
    }


def show_between(rows: Sequence[Prepared]) -> None:
    """How far one measured step tells of others, and when two meshes are told apart."""
    pairs, fraction = apart(rows)
    if pairs:
        print(
            f"\n{pairs} pairs of meshes of one program and machine: told apart from {fraction:.1%} on"
        )
    large = [row for row in rows if class_of(row).endswith("large")]
    cases = {
        "differ in devices alone": between(large, (*SAME_PROGRAM, "model"), ("devices",)),
        "differ in model, length or devices": between(
            large, SAME_PROGRAM, ("model", "seq", "devices")
        ),
    }
    for name, line in cases.items():
        if line["pairs"]:
            print(
                f"\npairs of runs that {name}: {line['pairs']} of {line['sources']} sources; four in"
                f" five within {line['within']:.1%}, from -{line['below']:.1%} to"
                f" +{line['above']:.1%}"
            )


def show_compiled(found: Mapping[str, Any]) -> None:
    """The classes as text."""
    for name, line in found.items():
        print(f"\ncompiled programs, {name}: {line['rows']} rows of {line['sources']} sources")
        _show("as shipped", line)
        if "source left out" in line:
            _show("source left out", line["source left out"])
        below, above = line["ends"]
        print(
            f"  printed 80 % range holds {line['covered']:.0%}; of four in five the range is"
            f" -{below:.0%} to +{above:.0%}, and made of other sources holds"
            f" {line['ends held out']:.0%}"
        )


def _show(title: str, line: Mapping[str, Any]) -> None:
    print(
        f"  {title:<18}mean {line['mean']:.1%}, median {line['median']:.1%}, bias"
        f" {line['bias']:+.1%}; trend over {trend_words(line['trends'])}"
    )


def trend_words(found: Mapping[str, float]) -> str:
    """Trends in one line."""
    return ", ".join(f"{name} {x:+.0%}" for name, x in found.items())
