"""`plan check` for people, for pull requests, and for machines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from typing import Any
from xml.sax.saxutils import quoteattr

from costmodels.hardware.units import show_bytes, show_time
from planner.report.diff import quantity
from planner.strategy.strategy import round_figures
from planner.support.text import Style, flops, hang, table, visible
from planner.whatif.gate import Limit, PinCost, Report, Row

WIDE = 100
"""Columns from which counts of FLOPs are written out, and names stay on one line."""
LABEL = 16
HEAD = ("", "recorded", "re-priced", "", "best now", "", "allowed")


def _cells(row: Row, style: Style, wide: bool = True) -> list[str]:
    def value(v: float | None) -> str:
        return (
            "-"
            if v is None
            else flops(v, 3)
            if row.unit == "FLOP" and not wide
            else quantity(v, row.unit)
        )

    def change(v: float | None) -> str:
        c = row.change(v)
        text = "" if c is None else "=" if c == 0 else f"{100 * c:+.1f} %"
        return style.bad(text) if row.beyond(v) else text

    allowed = "" if row.tolerance is None else f"+{100 * row.tolerance:g} %"
    return [
        row.what,
        value(row.recorded),
        value(row.repriced),
        change(row.repriced),
        value(row.best),
        change(row.best),
        allowed,
    ]


def _limit(x: Limit) -> str:
    figures = quantity(x.value, x.unit), quantity(x.most, x.unit)
    return f"budget {x.name}: {figures[0]} of {figures[1]}" + ("" if x.ok else " OVER")


def _sentence(row: Row) -> str:
    """A judged figure where there is no table around it."""

    def value(name: str, v: float | None) -> list[str]:
        c = row.change(v)
        return (
            []
            if v is None
            else [
                f"{name} {quantity(v, row.unit)}"
                + ("" if c is None else f" ({100 * c:+.1f} %)" if c else " (the same)")
            ]
        )

    return (
        f"{row.what}:"
        f" {', '.join([f'recorded {quantity(row.recorded, row.unit)}', *value('re-priced', row.repriced), *value('best now', row.best)])}; "  # noqa: E501
        + f"{100 * (row.tolerance or 0):g} % more allowed"
    )


def _why(report: Report) -> str:
    return f" ({'; '.join(report.causes)})" if report.causes else ""


def _pin_cost(report: Report) -> str:
    """What the pins cost, a sentence; "" where there are none."""
    pinned = report.pin_cost
    if pinned is None:
        return ""
    free = (
        f"{show_time(pinned.free_step_s)} a step and {show_bytes(pinned.free_memory_bytes)} without"
    )
    price = (
        f"cost {show_time(pinned.cost_s)} a step"
        f" ({100 * pinned.cost_s / pinned.free_step_s:+.1f} %)"
        if pinned.cost_s > 0
        else "cost no time"
    )
    return (
        f"best now keeps the pins ({'; '.join(pinned.pins)}), which {price}: {free}; plan explain"
        f" {report.baseline or 'FILE'} --pins prices each"
    )


def _notes(report: Report) -> list[str]:
    """Causes, reasons and the next step, a sentence each."""
    notes = [cost_line] if (cost_line := _pin_cost(report)) else []
    notes += (
        [f"re-priced: not possible: {report.reasons['repriced']}"]
        if "repriced" in report.reasons
        else []
    )
    if report.cured:
        notes.append("the baseline is stale: plan again and commit the new one")
    elif "best" in report.reasons:
        notes.append(
            "plan with more devices or a smaller batch, and commit that, or keep the model as"
            " it was"
        )
    elif report.regressions:
        notes.append("if this is meant, plan again and commit the new baseline")
    if any(not x.ok for x in report.limits):
        notes.append(
            "the budget is absolute: planning again keeps it only with other options, or raise it"
            " in its file"
        )
    if report.ok and any(
        (r.change(r.best) or 0.0) < -(r.tolerance or 1.0)
        for r in report.rows
        if r.tolerance is not None
    ):
        notes.append("better than recorded past the tolerance: plan again to keep the gain")
    return notes


def text(report: Report, width: int = 100, colour: bool = False) -> str:
    """The table and its verdict, for a terminal."""
    style = Style(colour)
    verdict = (style.good if report.ok else style.bad)("ok" if report.ok else "FAILED")
    lines = [
        style.bold(f"{report.model} against {report.baseline}"),
        *_table(report, style, width >= WIDE),
    ]
    lines += [style.bad(_limit(x)) if not x.ok else _limit(x) for x in report.limits]
    first, *continued = hang("FAILED: " if not report.ok else "ok: ", report.verdict, width)
    lines += [first.replace("FAILED" if not report.ok else "ok", verdict, 1), *continued]
    return "\n".join([*lines, *(line for n in _notes(report) for line in hang("  ", n, width))])


def _table(report: Report, style: Style, wide: bool) -> list[str]:
    """The figures; on a narrow terminal a change stands close to its figure, and a long name takes
    two lines."""
    rows = [list(HEAD), *(_cells(r, style, wide) for r in report.rows)]
    if wide:
        return table(rows, right=(1, 2, 3, 4, 5, 6))
    joined: list[list[str]] = []
    beside = {i: max(visible(row[i]) for row in rows) for i in (3, 5)}
    for name, recorded, *pairs, allowed in rows:
        cells = [
            f"{value} {' ' * (beside[i] - visible(change))}{change}"
            for i, value, change in zip((3, 5), pairs[::2], pairs[1::2], strict=True)
        ]
        first, *continued = textwrap.wrap(name, LABEL) or [""]
        joined += [
            [first, recorded, *cells, allowed],
            *([line, "", "", "", ""] for line in continued),
        ]
    return table(joined, right=(1, 2, 3, 4), gap="  ")


def markdown(report: Report) -> str:
    """A comment for a pull request."""
    rows = [_cells(r, Style()) for r in report.rows]
    lines = [
        f"### plan check: {_md(report.model)} {'✅' if report.ok else '❌'}",
        "",
        _md(report.verdict),
        "",
        "| " + " | ".join(h or "change" for h in ("figure", *HEAD[1:])) + " |",
        "|:---|" + "---:|" * (len(HEAD) - 1),
    ]
    lines += ["| " + " | ".join(_md(c) for c in row) + " |" for row in rows]
    if report.limits:
        lines += ["", *(f"- {_md(_limit(x))}" for x in report.limits)]
    notes = _notes(report)
    return "\n".join(
        [
            *lines,
            "",
            f"Baseline: `{report.baseline}`.",
            *(f"{_md(n[:1].upper() + n[1:])}." for n in notes),
        ]
    )


def _md(text_: str) -> str:
    return text_.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def github(report: Report) -> str:
    """Workflow commands: an error per regression, or one notice. Escaped as the runner asks."""

    def command(kind: str, title: str, message: str) -> str:
        return (
            f"::{kind}"
            f" file={_property(report.baseline)},title={_property(title)}::{_escape(message)}"
        )

    lines = [
        command("error", f"plan check: {r.what}", f"{report.model}: {_sentence(r)}{_why(report)}")
        for r in report.regressions
    ]
    lines += [
        command("error", f"plan check: budget {x.name}", f"{report.model}: {_limit(x)}")
        for x in report.limits
        if not x.ok
    ]
    if "best" in report.reasons:
        lines.append(command("error", "plan check: no plan", f"{report.model}: {report.verdict}"))
    phrases = (
        [command("notice", "plan check: pins", f"{report.model}: {_pin_cost(report)}")]
        if report.pin_cost is not None
        else []
    )
    return "\n".join(
        [
            *(lines or [command("notice", "plan check", f"{report.model}: {report.verdict}")]),
            *phrases,
        ]
    )


def _escape(message: str) -> str:
    return message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escape(value).replace(":", "%3A").replace(",", "%2C")


def as_json(report: Report) -> str:
    """The report as JSON."""

    def figure(v: float | None) -> float | None:
        """Seconds and shares are rounded as in strategies, bytes and FLOPs are whole."""
        return v if v is None or float(v).is_integer() else round_figures(v)

    rows = {
        r.what: {
            "unit": r.unit,
            "recorded": r.recorded,
            "repriced": figure(r.repriced),
            "best": figure(r.best),
            "tolerance": r.tolerance,
            "repriced_change": figure(r.change(r.repriced)),
            "best_change": figure(r.change(r.best)),
        }
        for r in report.rows
    }
    budget = {
        x.what: {"value": figure(x.value), "most": x.most, "unit": x.unit, "ok": x.ok}
        for x in report.limits
    }
    data = {
        "ok": report.ok,
        "verdict": report.verdict,
        "model": report.model,
        "baseline": report.baseline,
        "causes": list(report.causes),
        "figures": rows,
        "budget": budget,
        "reasons": dict(report.reasons),
        "pins": _held_figures(report.pin_cost),
    }
    return json.dumps(data, indent=2, sort_keys=True)


def _held_figures(pin_cost: PinCost | None) -> dict[str, Any] | None:
    return (
        None
        if pin_cost is None
        else {
            "held": list(pin_cost.pins),
            "cost_s": round_figures(pin_cost.cost_s),
            "free_step_time_s": round_figures(pin_cost.free_step_s),
            "free_memory_per_device_bytes": pin_cost.free_memory_bytes,
        }
    )


def junit(report: Report) -> str:
    """A test suite: a case per judged figure and budget line, and one for there being a plan."""
    cases: list[tuple[str, str]] = [("plan exists", report.reasons.get("best", ""))]
    cases += [
        (r.what, _sentence(r) + _why(report) if r in report.regressions else "")
        for r in report.rows
        if r.tolerance is not None
    ]
    cases += [(f"budget {x.name}", "" if x.ok else _limit(x)) for x in report.limits]
    failed = sum(1 for _, why in cases if why)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        "<testsuites>",
        (
            f'  <testsuite name={_xml("plan check " + report.model)} tests="{len(cases)}"'
            f' failures="{failed}" errors="0">'
        ),
    ]
    for name, why in cases:
        head = f"    <testcase classname={_xml(report.model)} name={_xml(name)}"
        lines.append(
            f'{head}><failure type="finding" message={_xml(why)}/></testcase>'
            if why
            else f"{head}/>"
        )
    return "\n".join([*lines, "  </testsuite>", "</testsuites>"])


def _xml(value: str) -> str:
    """A quoted attribute; characters that XML forbids are left out."""
    return quoteattr("".join(c for c in value if c >= " " or c in "\t\n"))


def badge(report: Report) -> str:
    """What an endpoint badge of shields.io reads: step and memory of the baseline as it is priced
    now, or the first finding."""
    now = [
        quantity(row.recorded if row.repriced is None else row.repriced, row.unit)
        for row in report.rows
        if row.tolerance is not None
    ]
    findings = [
        *(["no plan fits"] if "best" in report.reasons else []),
        *(f"{row.what} {100 * (row.worst or 0):+.1f} %" for row in report.regressions),
        *(f"{x.name} over budget" for x in report.limits if not x.ok),
    ]
    data = {
        "schemaVersion": 1,
        "label": "plan",
        "message": findings[0] if findings else ", ".join(now),
        "color": "red" if findings else "brightgreen",
    }
    return json.dumps(data)


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "text": text,
    "markdown": markdown,
    "github": github,
    "json": as_json,
    "junit": junit,
    "badge": badge,
}
