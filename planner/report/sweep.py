"""`plan sweep` in words and as JSON: the plans, what a run costs at each, and the answers.

Columns that hold one value throughout, and what all plans do, stand in the title instead; on
narrow terminals the least telling columns go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.report.summary import title, unit_of_work
from planner.report.tables import mesh_words, needed, roomy, technique_phrases
from planner.support.text import Style, count, hang, percent, visible
from planner.whatif.sweep_rows import DAY_S, Row, TrainingRun, best_run, fewest, first_too_large

SPARED = ("efficiency", "step", "fits", "MFU")
"""Columns that narrow terminals go without, the first to go first."""
HOW = 22
"""Columns that the reason why there is no plan needs at least."""
LEFT = ("hardware", "how")


@dataclass(frozen=True)
class Asked:
    """What a sweep is to answer: work in tokens or samples, a deadline in seconds, a budget in USD,
    and whether rows are fronts."""

    work: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    pareto: bool = False

    @property
    def question(self) -> bool:
        """Whether one row is asked for."""
        return self.deadline_s is not None or self.budget_usd is not None

    def best(self, rows: Sequence[Row], runs: Sequence[TrainingRun | None]) -> int | None:
        """The row that answers; None where none does."""
        return best_run(
            runs,
            None if self.deadline_s is None else self.deadline_s / DAY_S,
            self.budget_usd,
            [r.tight for r in rows],
        )


def sweep_text(
    model: str,
    rows: Sequence[Row],
    runs: Sequence[TrainingRun | None],
    asked: Asked,
    width: int,
    colour: bool,
) -> str:
    """The tables and the answers, for people."""
    style = Style(colour)
    some = next(r.strategy for r in rows if r.strategy is not None)
    shared = shared_phrases(rows)
    table, same = _hoisted([_cells(r, rows, unit_of_work(some), style, shared) for r in rows], rows)
    swept = {
        k for r in rows for k, _ in r.point.dims
    }  # an option of the spec that rows set anew is none of the title's
    spec = ",".join(
        o for o in model.removeprefix("zoo:").split(",") if o.partition("=")[0] not in swept
    )
    name = f"{spec} (zoo)" if model.startswith("zoo:") else title(some)
    subject = ", ".join([name, some.workload["kind"], *same, *shared])
    lines = [
        *(style.bold(line) for line in hang("", subject, width)),
        *_fit(table, width, _how_needs(table, rows)),
    ]
    if any(tied(r, rows) for r in rows if r.strategy is not None):
        lines += [
            style.dim(line)
            for line in hang(
                "",
                f"tie: the most {unit_of_work(some)} a second and these lie within each other's"
                " range",
                width,
            )
        ]
    if asked.work:
        lines += [
            "",
            *(
                style.bold(line)
                for line in hang("", f"{count(asked.work)} {unit_of_work(some)}", width)
            ),
            *_fit(_run_table(rows, runs, table[0]), width, 0),
        ]
        lines += [style.dim(line) for line in hang("", _priced(rows, runs), width)]
    sentences = answers(rows, runs, asked)
    return "\n".join(
        [
            *lines,
            *([""] if sentences else []),
            *(line for text in sentences for line in hang("", text, width)),
        ]
    )


def _names(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Column -> cell per row, of what tells rows apart."""
    names = {
        "hardware": [r.point.hardware for r in rows],
        "devices": [f"{r.devices:,}" if r.devices else "-" for r in rows],
    }
    for k in dict.fromkeys(k for r in rows for k, _ in r.point.dims):
        names[k] = [f"{dict(r.point.dims)[k]:,}" for r in rows]
    batches = [
        r.strategy.workload["batch"] if r.strategy is not None else r.point.batch for r in rows
    ]
    return {**names, "batch": [f"{b:,}" if isinstance(b, int) else "" for b in batches]}


def shared_phrases(rows: Sequence[Row]) -> list[str]:
    """What all plans of several do, as `technique_phrases` says it."""
    phrases = [technique_phrases(r.strategy.techniques) for r in rows if r.strategy is not None]
    return (
        [p for p in phrases[0] if all(p in others for others in phrases)]
        if len(phrases) > 1
        else []
    )


def _cells(
    row: Row, rows: Sequence[Row], unit: str, style: Style, shared: Sequence[str]
) -> dict[str, str]:
    """What a plan is worth, by column, without what is said of all."""
    rate = f"{unit}/s/dev"
    if row.strategy is None:
        assert row.error is not None
        return {
            "step": "-",
            rate: "",
            "efficiency": "",
            "MFU": "",
            "memory": "",
            "fits": style.bad("no"),
            "how": f"{row.error.code}: {row.error.what}",
        }
    c = row.strategy.costs
    first = next(
        r.strategy
        for r in rows
        if r.strategy is not None and r.point.hardware == row.point.hardware
    )
    base = first.costs["tokens_per_s_per_device"]
    share = c["tokens_per_s_per_device"] / base if base else 1.0
    own_phrases = [p for p in technique_phrases(row.strategy.techniques) if p not in shared]
    tie = ["tie"] if tied(row, rows) else []
    how = ", ".join([mesh_words(dict(row.strategy.mesh_shape)), *own_phrases, *tie])
    return {
        "step": show_time(c["step_time_s"]),
        rate: count(c["tokens_per_s_per_device"]),
        "efficiency": f"{100 * share:.0f} %",
        "MFU": percent(c["model_flops_utilization"]),
        "memory": show_bytes(c["memory_per_device_bytes"]),
        "fits": style.fit(c["fit"]),
        "how": how,
    }


def tied(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row and the fastest of all that do the same work (other than itself) cannot be told
    apart: each one's time for a token lies in the other's range."""
    token_times = [
        (
            r,
            [
                x / r.strategy.costs["tokens_per_step"]
                for x in (r.strategy.costs["step_time_s"], *r.strategy.costs["step_time_range_s"])
            ],
        )
        for r in rows
        if r.strategy is not None and r.point.dims == row.point.dims
    ]
    best, best_times = min(token_times, key=lambda pair: pair[1][0])
    mine = next((times for r, times in token_times if r is row), None)
    return (
        mine is not None
        and best is not row
        and best_times[1] <= mine[0] <= best_times[2]
        and mine[1] <= best_times[0] <= mine[2]
    )


def _hoisted(
    cells: Sequence[Mapping[str, str]], rows: Sequence[Row]
) -> tuple[list[list[str]], list[str]]:
    """The table, and what all rows have in common."""
    names = _names(rows)
    known = {k: {v for v in column if v} for k, column in names.items()}
    same = [k for k, values in known.items() if len(values) <= 1]
    words = {
        "hardware": "{}",
        "devices": "{} device" if known["devices"] == {"1"} else "{} devices",
        "batch": "batch {}",
    }
    phrases = [words.get(k, k + " {}").format(*known[k]) for k in same if known[k]]
    varied = [k for k in names if k not in same]
    head = [*varied, *cells[0]]
    return [
        head,
        *([*(names[k][i] for k in varied), *row.values()] for i, row in enumerate(cells)),
    ], phrases


def _how_needs(table: Sequence[Sequence[str]], rows: Sequence[Row]) -> int:
    """Columns that how plans work needs so as not to be folded small; why there is none may be."""
    plans = [cells for cells, r in zip(table[1:], rows, strict=True) if r.strategy is not None]
    return max(HOW if len(plans) < len(rows) else 0, needed(plans))


def _fit(table: list[list[str]], width: int, how: int) -> list[str]:
    """The table on a terminal: without the least telling columns where it is narrow, and how a plan
    works in a line of its own where the others leave less than `how` columns for it."""
    if not how:
        table = [[*row, ""] for row in table]
    for name in SPARED:
        fewer = _without(table, name)
        if _room(table, width) < 0 or _room(table, width) < how <= _room(fewer, width):
            table = fewer
    return roomy(table, width, [i for i, name in enumerate(table[0]) if name not in LEFT], need=how)


def _without(table: list[list[str]], name: str) -> list[list[str]]:
    """The table without a column."""
    return [[c for head, c in zip(table[0], row, strict=True) if head != name] for row in table]


def _room(table: Sequence[Sequence[str]], width: int) -> int:
    """Columns that the others leave for the last; -1 and below where they do not fit by
    themselves."""
    wide = [max(visible(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return width - sum(wide) - 2 * len(wide)


def _run_table(
    rows: Sequence[Row], runs: Sequence[TrainingRun | None], shown: Sequence[str]
) -> list[list[str]]:
    names = {k: column for k, column in _names(rows).items() if k in shown}
    table_rows = [[*names, "days", "device-hours", "USD/h", "USD", "MWh"]]
    for i, run in enumerate(runs):
        if run is not None:
            cost = ["-", "-"] if run.usd is None else [f"{run.usd_per_h:.2f}", amount(run.usd)]
            table_rows.append(
                [
                    *(column[i] for column in names.values()),
                    days(run.days),
                    amount(run.device_hours),
                    *cost,
                    "-" if run.kwh is None else f"{run.kwh / 1000:,.3g}",
                ]
            )
    return table_rows


def days(n: float) -> str:
    """Days for people: "0.14", "12.5", "1,400"."""
    return f"{n:,.0f}" if n >= 100 or n == int(n) else f"{n:.1f}" if n >= 1 else f"{n:.2g}"


def span(n: float) -> str:
    """A time span of so many days, for people: "12.5 days", "2 hours", "8.9 minutes"."""
    value, unit = (
        (n, "day") if n >= 1 else (24 * n, "hour") if n >= 1 / 24 else (1440 * n, "minute")
    )
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {unit}{'' if number == '1' else 's'}"


def amount(n: float) -> str:
    """Device-hours or USD for people: "1.19", "8,202", "4.2 M"."""
    return f"{n:.3g}" if n < 99.5 else count(n)


def _priced(rows: Sequence[Row], runs: Sequence[TrainingRun | None]) -> str:
    """Where prices are from, and what energy means."""
    pairs = [
        (r, run)
        for r, run in zip(rows, runs, strict=True)
        if run is not None and r.device is not None
    ]
    dated = sorted(
        {
            r.device.date
            for r, run in pairs
            if r.device is not None
            and run.usd_per_h is not None
            and run.usd_per_h == r.device.usd_per_h
            and r.device.date
        }
    )
    notes = [f"prices: list prices on demand as of {', '.join(dated)} (--price)"] if dated else []
    return "; ".join([*notes, "MWh: the devices alone, at their limit; - not known"])


def answers(rows: Sequence[Row], runs: Sequence[TrainingRun | None], asked: Asked) -> list[str]:
    """Sentences: the row asked for, where it stops fitting and what would help, the fewest
    devices."""
    sentences = [_answer(rows, runs, asked)] if asked.question else []
    tried = {(r.point.hardware, r.point.dims) for r in rows if r.too_large}
    least = [f"{n} x {_where(*key)}" for key, n in fewest(rows).items() if key in tried]
    sentences += [f"fewest that fit: {', '.join(least)}"] if least else []
    large = first_too_large(rows)
    if large is not None:
        sentences.append(f"first that no longer fits: {_count(large)}{_sizes(large)}")
    for r in rows:
        would = (
            [h for h in r.error.help if "re-priced" in h]
            if r.too_large and r.error is not None
            else []
        )
        if would:
            sentences.append(f"what would make {_count(r)}{_sizes(r)} fit: {'; '.join(would)}")
    return sentences


def _sizes(row: Row) -> str:
    """`, seq 65,536, batch 512`: what tells a row from others of its hardware and devices."""
    batch = f", batch {row.point.batch:,}" if isinstance(row.point.batch, int) else ""
    return "".join(f", {k} {n:,}" for k, n in row.point.dims) + batch


def _count(row: Row) -> str:
    """`64 x h100`; a slice's name says how many."""
    return (
        row.point.hardware if row.point.devices is None else f"{row.devices} x {row.point.hardware}"
    )


def _where(hardware: str, dims: Sequence[tuple[str, int]]) -> str:
    return hardware + "".join(f" at {k} {n:,}" for k, n in dims)


def _answer(rows: Sequence[Row], runs: Sequence[TrainingRun | None], asked: Asked) -> str:
    limits = [span(asked.deadline_s / DAY_S)] if asked.deadline_s is not None else []
    limits += [f"{amount(asked.budget_usd)} USD"] if asked.budget_usd is not None else []
    i, within = asked.best(rows, runs), " and ".join(limits)
    tight = [r.tight for r in rows]
    fastest, cheapest = best_run(runs, None, None, tight), best_run(runs, float("inf"), None, tight)
    if i is None:
        nearest = fastest if asked.deadline_s is not None else cheapest
        return f"within {within}: none of these" + (
            f"; nearest is {_row_text(rows[nearest], runs[nearest])}" if nearest is not None else ""
        )
    if asked.deadline_s is not None or i == cheapest or cheapest is None:
        return f"cheapest within {within}: {_row_text(rows[i], runs[i])}"
    return (
        f"fastest within {within}: {_row_text(rows[i], runs[i])}; cheapest of all:"
        f" {_row_text(rows[cheapest], runs[cheapest])}"
    )


def _row_text(row: Row, run: TrainingRun | None) -> str:
    assert run is not None
    cost = "" if run.usd is None else f", {amount(run.usd)} USD"
    risk = ", tight in memory: it may run out" if row.tight else ""
    return (
        f"{row.devices} x {_where(row.point.hardware, row.point.dims)} in {span(run.days)},"
        f" {amount(run.device_hours)} device-hours{cost}{risk}"
    )


def as_json(
    model: str, rows: Sequence[Row], runs: Sequence[TrainingRun | None], asked: Asked
) -> dict[str, Any]:
    """The sweep as a table for scripts: figures in the units their names say."""
    large, best = first_too_large(rows), asked.best(rows, runs) if asked.question else None
    least = [{"hardware": h, "dims": dict(d), "devices": n} for (h, d), n in fewest(rows).items()]
    return {
        "model": model,
        "rows": [_row(r, run) for r, run in zip(rows, runs, strict=True)],
        "pareto": asked.pareto,
        "fewest_devices": least,
        "first_too_large": None if large is None else rows.index(large),
        "best": best,
        "deadline_s": asked.deadline_s,
        "budget_usd": asked.budget_usd,
        "work": asked.work,
        "best_is_tight": best is not None and rows[best].tight,
    }


def _row(row: Row, run: TrainingRun | None) -> dict[str, Any]:
    p = row.point
    batch = (
        row.strategy.workload["batch"]
        if row.strategy is not None
        else p.batch
        if isinstance(p.batch, int)
        else None
    )
    record: dict[str, Any] = {
        "hardware": p.hardware,
        "devices": row.devices,
        "dims": dict(p.dims),
        "batch": batch,
        "run": None if run is None else asdict(run),
    }
    if row.strategy is None:
        assert row.error is not None
        return {
            **record,
            "error": {"code": row.error.code, "what": row.error.what, "help": list(row.error.help)},
            "fit": "no",
        }
    c = row.strategy.costs
    figures = (
        "step_time_s",
        "step_time_range_s",
        "tokens_per_s_per_device",
        "tokens_per_step",
        "model_flops_utilization",
        "memory_per_device_bytes",
        "memory_limit_bytes",
        "fit",
    )
    return {
        **record,
        **{k: c[k] for k in figures},
        "mesh": dict(row.strategy.mesh_shape),
        "techniques": dict(row.strategy.techniques),
        "error": None,
    }
