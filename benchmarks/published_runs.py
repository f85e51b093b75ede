"""Published training runs priced as their frameworks ran them, beside what was measured.

    python -m benchmarks.published_runs --runs runs.jsonl [more.jsonl] [--oom oom.jsonl]
    [--as-shipped | --fit] [--source WORD] [--tiers AB] [--cut-sequences] [--json]

Every row becomes a plan on the zoo's model and is priced by planner.pricing.plan_price under the
runtime profile of its framework; programs that XLA compiled (MaxText, PaxML, T5X, Levanter,
torch_xla) under the default profile, that of emitted programs. Per source and hardware it prints
the error of the profile as it ships (marked where rows of the source were used to set it), and of
fits that leave the row's group out; beside each the error of one constant FLOP rate, fitted on the
same rows. `--as-shipped` prints the first only. At the end all rows of compiled programs together:
by kind of device and size of model, as shipped and by rates that have not seen the row's source,
and how the error goes with devices, tensor degree and sequence length.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.published_compiled import (
    all_compiled,
    inside,
    show_between,
    show_compiled,
    trend_words,
    trends,
)
from benchmarks.published_scores import (
    Outcome,
    choice,
    covered_held_out,
    errors,
    fitting,
    memory_spread,
    order,
)
from costmodels.runtimes import Rates
from planner.calibrate.runs.fit import MOST_FOLDS, Prepared, held_out, prepare
from planner.calibrate.runs.keep import held_out_bytes
from planner.calibrate.runs.mixtures import mixture_of
from planner.calibrate.runs.rows import ODD, Case, Left, case_of, model_flops, why_odd

FITTED_SOURCES = ("Hagemann", "vTrain measured", "mosaicml")
"""Sources whose rows set constants of the shipped profiles: their figures without a held-out fit
are marked, where they ran on FITTED_DEVICES."""
FITTED_DEVICES = ("a100-40gb", "a100-80gb")
SPLITS = {
    "group": lambda c: (c.group, c.row["global_batch"]),
    "model": lambda c: c.row["model"],
    "sequence": lambda c: c.row["seq"],
    "devices": lambda c: c.row["devices"],
}
LEAST = 8
"""Rows of a source on one device below which nothing is fitted."""


def read(path: str, word: str, tiers: str) -> list[dict[str, Any]]:
    """Rows of a file, of sources that contain `word`, of the given tiers (rows without one count as
    A)."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return [
        r
        for r in rows
        if word.lower() in str(r["source"]).lower() and str(r.get("tier") or "A") in tiers
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", required=True, nargs="+")
    parser.add_argument("--oom", default="")
    parser.add_argument("--source", default="")
    parser.add_argument("--tiers", default="AB")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--as-shipped", action="store_true")
    which.add_argument("--fit", action="store_true", help="fits too, which is the default")
    parser.add_argument(
        "--cut-sequences", action="store_true", help="rows of context parallelism alone"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    files = [*given.runs, *([given.oom] if given.oom else [])]
    rows = [row for path in files for row in read(path, given.source, given.tiers)]
    if given.cut_sequences:
        rows = [row for row in rows if int(row.get("cp") or 1) > 1]
    left: Counter[str] = Counter()
    report: list[dict[str, Any]] = []
    compiled, every = list[Prepared](), list[Prepared]()
    for source in dict.fromkeys(str(row["source"]) for row in rows):
        prepared, out = prepare_all([row for row in rows if row["source"] == source])
        left += out
        every += [p for p in prepared if p.case.measured_s]
        compiled += [p for p in prepared if p.work is None and p.case.measured_s]
        for name, device in dict.fromkeys(map(table_of, prepared)):
            mine = [p for p in prepared if table_of(p) == (name, device)]
            if any(p.case.measured_s for p in mine):
                report.append(score(name, device, mine, not given.as_shipped))
                if not given.json:
                    show(report[-1])
    together = all_compiled(compiled, not given.as_shipped) if compiled else {}
    if given.json:
        found = {"sources": report, "compiled": together, "left_out": dict(left)}
        print(json.dumps(found, indent=1))
    else:
        apart = [p.step_s() / (p.case.measured_s or 1.0) - 1 for p in every]
        if apart:
            size = [abs(x) for x in apart]
            print(
                f"\nall {len(apart)} rows that ran: mean {mean(size):.1%}, median"
                f" {median(size):.1%}, bias {mean(apart):+.1%}"
            )
        show_compiled(together)
        show_between(compiled)
        print(
            "\nleft out: "
            + (", ".join(f"{n} {what}" for what, n in left.most_common()) or "nothing")
        )
    return 0


def table_of(prepared: Prepared) -> tuple[str, str]:
    """The source and the device under which a row is shown; mixtures of experts as frameworks run
    them apart."""
    row, device = prepared.case.row, prepared.case.topology.device.name
    mixed = prepared.work is not None and mixture_of(row) is not None
    return f"{row['source']}{', mixtures of experts' * mixed}", device


def prepare_all(rows: list[dict[str, Any]]) -> tuple[list[Prepared], Counter[str]]:
    """Rows priced, those alike in model and batch one after the other; and why the others were left
    out."""
    left: Counter[str] = Counter()
    cases: list[Case] = []
    for row in rows:
        try:
            cases.append(case_of(row))
        except Left as e:
            left[str(e)] += 1
        except ODD as e:
            left[why_odd(e)] += 1
    found = []
    for case in sorted(cases, key=lambda c: (str(c.row["source"]), c.spec, c.graph_batch)):
        try:
            found.append(prepare(case))
        except Left as e:
            left[str(e)] += 1
        except ODD as e:
            left[why_odd(e)] += 1
    return found, left


def score(source: str, device: str, rows: list[Prepared], fit: bool) -> dict[str, Any]:
    """All figures of the rows of a source on a device."""
    measured = [p for p in rows if p.case.measured_s]
    out: dict[str, Any] = {
        "source": source,
        "device": device,
        "rows": len(measured),
        "in_sample": device in FITTED_DEVICES and source.startswith(FITTED_SOURCES),
    }
    rates = [
        (p.case.measured_s or 0.0) * p.case.row["devices"] / model_flops(p.case.row)
        for p in measured
    ]
    typical = median(rates)
    out["bias"] = mean(p.step_s() / (p.case.measured_s or 1.0) - 1 for p in measured)
    constant = [
        Outcome(
            p.case.group,
            p.case.measured_s,
            typical * model_flops(p.case.row) / p.case.row["devices"],
            0,
            0,
        )
        for p in measured
    ]
    out["constant"] = errors(constant) | {
        "tau": order(constant)[0],
        "tau_devices": order(constant, machine_group)[0],
    }
    shipped = outcomes(rows, [p.step_s() for p in rows])
    out["shipped"] = times(shipped) | {"covered": inside(measured)}
    out["trends"] = trends(measured, [p.step_s() for p in measured])
    out["peaks"] = peaks(measured)
    out["memory"] = fitting(shipped) | sure(shipped, max(rows[0].case.runtime.memory_spread))
    sizes = None
    of_framework = rows[0].memory is not None
    if fit and of_framework and len(measured) < len(rows) and len({p.case.group for p in rows}) > 1:
        sizes = held_out_bytes(rows, lambda c: c.group)
        unseen = outcomes(rows, [p.step_s() for p in rows], sizes)
        out["memory of groups left out"] = fitting(unseen) | sure(unseen, memory_spread(unseen))
    if fit and len(measured) >= LEAST:
        start = Rates(growth=0.05)
        for name, group in SPLITS.items():
            if len({group(p.case) for p in measured}) > 1:
                priced, folds = held_out(measured, start, group)
                extra = [p for p in rows if not p.case.measured_s]
                every = priced + [p.step_s(folds.get(group(p.case), start)) for p in extra]
                at = (
                    {id(p): size for p, size in zip(rows, sizes, strict=True)}
                    if sizes and name == "group"
                    else {}
                )
                found = outcomes(
                    [*measured, *extra],
                    every,
                    [at.get(id(p), p.cost.memory.total) for p in (*measured, *extra)],
                )
                parts = [group(p.case) for p in (*measured, *extra)]
                out["leave one " + name + " out"] = times(found) | {
                    "folds": min(len(folds), MOST_FOLDS),
                    "covered": covered_held_out(found, parts),
                }
    return out


def peaks(rows: Sequence[Prepared]) -> dict[str, float]:
    """Priced over measured memory - 1, of runs that say how many GB they held."""
    off = [
        p.cost.memory.total / 1e9 / float(p.case.row["memory_gb"]) - 1
        for p in rows
        if p.case.row.get("memory_gb")
    ]
    return {"rows": len(off)} | ({"mean": mean(map(abs, off)), "bias": mean(off)} if off else {})


def outcomes(
    rows: list[Prepared], priced: list[float], sizes: Sequence[int] | None = None
) -> list[Outcome]:
    """Rows with their prices; sizes: bytes, where not those of the profile as it ships."""
    sizes = sizes or [p.cost.memory.total for p in rows]
    return [
        Outcome(p.case.group, p.case.measured_s, s, size, p.case.usable_bytes)
        for p, s, size in zip(rows, priced, sizes, strict=True)
    ]


def sure(found: list[Outcome], spread: float) -> dict[str, float]:
    """Runs whose range of bytes, price * (1 -+ spread), straddles what is usable (`fit: tight` and
    what may still fit), and how many of the others are told right."""
    open_ = [
        o
        for o in found
        if o.priced_bytes * (1 - spread) <= o.usable_bytes < o.priced_bytes * (1 + spread)
    ]
    told = [o for o in found if o not in open_]
    right = sum(o.fits == (o.measured_s is not None) for o in told)
    return {"spread": spread, "open": len(open_), "sure_right": right / len(told) if told else 1.0}


def times(found: list[Outcome]) -> dict[str, Any]:
    """Errors, order and regret."""
    (tau, groups), (wide, _) = order(found), order(found, machine_group)
    return errors(found) | {"tau": tau, "tau_groups": groups, "tau_devices": wide} | choice(found)


def machine_group(group: tuple[Any, ...]) -> tuple[Any, ...]:
    """One model and device count, whatever the sequence length."""
    return group[0], *group[2:]


def show(table: dict[str, Any]) -> None:
    """One source as text."""
    print(
        f"\n{table['source']} on {table['device']}: {table['rows']} rows, bias {table['bias']:+.1%}"
    )
    print(
        f"  {'':34}{'mean':>8}{'median':>8}{'p95':>8}{'tau':>7}{'in range':>10}{'all seq':>8}{'groups':>7}{'regret':>8}{'with memory':>13}{'worst':>8}{'ran out':>9}"
    )
    for name, line in table.items():
        if not isinstance(line, dict) or "median" not in line:
            continue
        mark = (
            " (used for fitting)"
            if name == "shipped" and table["in_sample"]
            else f" ({line['folds']} folds)"
            if "folds" in line
            else ""
        )
        tail, inside = "", f"{line['covered']:.0%}" if "covered" in line else ""
        if "regret" in line:
            tail = f"{line['tau_groups']:>7}{line['regret_measured']:>8.1%}{line['regret']:>13.1%}{line['worst_regret']:>8.1%}{line['picks_out_of_memory']:>9}"
        print(
            f"  {name + mark:<34}{line['mean']:>8.1%}{line['median']:>8.1%}{line['p95']:>8.1%}{line['tau']:>7.2f}{inside:>10}{line['tau_devices']:>8.2f}{tail}"
        )
    print(f"  trend of the error over {trend_words(table['trends'])}")
    if held := table["peaks"].get("rows"):
        peak = table["peaks"]
        print(f"  peak memory of {held} rows: mean {peak['mean']:.1%}, bias {peak['bias']:+.1%}")
    print(
        f"  {memory_words(table['memory'])}"
        + (" (used for fitting)" if table["in_sample"] else ""),
        flush=True,
    )
    if "memory of groups left out" in table:
        print(
            "  constants fitted to other groups:"
            f" {memory_words(table['memory of groups left out'])}",
            flush=True,
        )


def memory_words(m: Mapping[str, Any]) -> str:
    """What is said of memory, in one line."""
    if not m["out_of_memory"]:
        return f"does not fit: said of {m['said']} of {m['rows']} rows, which all ran"
    return (
        f"does not fit: {m['out_of_memory']} of {m['rows']} rows ran out of memory; precision"
        f" {m['precision']:.3f}, recall {m['recall']:.3f}; within 5 % of usable"
        f" {m['edge_right']:.2f} of {m['edge_rows']} right; range of {m['spread']:.1%} straddles"
        f" the limit in {m['open']}, {m['sure_right']:.3f} of the others right"
    )


if __name__ == "__main__":
    sys.exit(main())
