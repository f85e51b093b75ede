"""Where the time goes, ranked: operators, reshards, and the plans beside this one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.report.baselines import MARK, baseline_name, mark, ranked, tuned_over
from planner.report.html import figures as f
from planner.report.html.derive import Move, short_name
from planner.report.html.tags import Child, Markup, el, join, name
from planner.report.html.verdict import FITS
from planner.report.html.view import View, decided, meter, note, runner_up, split_cell, table
from planner.strategy.words import tuned_words

SHOWN = 10


def operators(v: View) -> Markup:
    """The costliest operators by their kernels, with the next best split of each."""
    step = (v.detail.step_s if v.detail else v.strategy.costs["step_time_s"]) or 1.0
    ranked = _operator_times(v)
    if not ranked:
        return note("The file holds no times of operators: the plan came from no search.")
    rows: list[list[Child]] = []
    for seconds, node, op, times, row in ranked[:SHOWN]:
        called = short_name(node, op)
        label = join(
            name(called),
            el("small", " ".join([op] * (called != op) + [f"× {times:,}"] * (times > 1))),
        )
        rows.append(
            [
                el("span", label, class_="what"),
                join(meter(seconds, ranked[0][0], "k-forward"), f.time(seconds)),
                f.share(seconds / step),
                el("span", split_cell(v, row), class_="what"),
                runner_up(row) or el("span", "none open", class_="muted"),
            ]
        )
    rest_s = sum(r[0] for r in ranked[SHOWN:])
    if rest_s:
        label = el("span", f.plural(len(ranked) - SHOWN, "other operator"), class_="muted")
        rows.append([label, f.time(rest_s), f.share(rest_s / step), "", ""])
    heads = ["operator", "kernels a step", "of the step", "split", "runner-up"]
    drawn = table(heads, rows, (1, 2), "costliest operators", 1)
    below = any(
        row.get("runner_up") and row["runner_up"]["extra_s"] < 0 for *_, row in ranked[:SHOWN]
    )
    why = (
        "A negative price: faster by itself, yet not taken, because it needs too much memory or"
        " because the solver’s objective and the final price disagree about it."
    )
    return join(drawn, el("p", why, class_="small") if below else None)


def _operator_times(v: View) -> list[tuple[float, str, str, int, Mapping[str, Any]]]:
    """(seconds of kernels a step, node, operator, repeats, its row in the file), the costliest
    first."""
    if v.detail is not None:
        times = [
            (r.kernels_s, r.id, r.op, r.repeats, decided(v, r.decided))
            for r in v.detail.rows
            if r.kernels_s
        ]
    else:
        times = [
            (row.get("time_s", 0.0) * v.micro, n, row["op"], row.get("times", 1), row)
            for n, row in v.strategy.nodes.items()
            if row.get("time_s")
        ]
    return sorted(times, key=lambda r: (-r[0], r[1]))


def reshards(v: View) -> Markup:
    """The costliest collectives with what they serve; without the model, by kind and axes."""
    if v.detail is None:
        return _by_kind(v)
    step = v.detail.step_s or 1.0
    row_of = {r.index: r for r in v.detail.rows}
    groups: dict[tuple, list[Move]] = {}
    for m in v.detail.moves:
        late = m.phase in ("gradient", "optimizer")
        groups.setdefault((m.kind, m.axes, m.row, m.when == "handed", late, m.stored), []).append(m)
    ranked = sorted(groups.values(), key=lambda ms: (-_exposed_s(ms), -_payload(ms), ms[0].what))
    if not ranked:
        return note("None: no device waits for another.")
    rows: list[list[Child]] = []
    for ms in ranked[:SHOWN]:
        r = row_of[ms[0].row]
        what = (
            "to the next stage, result of "
            if ms[0].when == "handed"
            else {True: "weights of ", False: "result of "}[ms[0].stored]
        )
        exposed_s = _exposed_s(ms)
        phases = ", ".join(dict.fromkeys(m.phase for m in ms))
        label = join(what, name(short_name(r.id, r.op)))
        rows.append(
            [
                el("span", label, el("small", phases), class_="what"),
                join(ms[0].kind, " over ", name("+".join(ms[0].axes))),
                join(meter(exposed_s, _exposed_s(ranked[0]), "k-comm"), f.time(exposed_s)),
                f.share(exposed_s / step),
                f.size(_payload(ms)),
                f"{sum(m.count for m in ms):,}",
                runner_up(decided(v, r.decided)) or el("span", "none open", class_="muted"),
            ]
        )
    rest = [m for ms in ranked[SHOWN:] for m in ms]
    if rest:
        others = f.plural(len(ranked) - SHOWN, "other reshard")
        rows.append(
            [
                el("span", others, class_="muted"),
                "",
                f.time(_exposed_s(rest)),
                f.share(_exposed_s(rest) / step),
                f.size(_payload(rest)),
                f"{sum(m.count for m in rest):,}",
                "",
            ]
        )
    heads: list[Child] = [
        "what moves",
        "how",
        "exposed a step",
        "of the step",
        "payload",
        "times",
        "runner-up",
    ]
    return table(heads, rows, (2, 3, 4, 5), "costliest reshards", 2)


def _exposed_s(moves: Iterable[Move]) -> float:
    """Exposed seconds of several collectives a step."""
    return sum(m.exposed_s for m in moves)


def _payload(moves: Iterable[Move]) -> int:
    """Payload bytes of several collectives a step."""
    return sum(m.total_bytes for m in moves)


def _by_kind(v: View) -> Markup:
    c = v.strategy.costs
    exposed = c.get("exposed_s_by_collective", {})
    cells = [
        (exposed.get(f"{kind} {axes}", 0.0), kind, axes, cell["payload"])
        for kind, table_ in c["communication_bytes_per_device"].items()
        for axes, cell in table_.items()
    ]
    if not cells:
        return note("None: no device waits for another.")
    cells.sort(key=lambda r: (-r[0], -r[3], r[1], r[2]))
    step, most = c["step_time_s"] or 1.0, cells[0][0]
    rows = [
        [
            join(kind, " over ", name(axes)),
            join(meter(s, most, "k-comm"), f.time(s)),
            f.share(s / step),
            f.size(size),
        ]
        for s, kind, axes, size in cells
    ]
    return join(
        table(
            ["collectives", "exposed a step", "of the step", "payload"],
            rows,
            (1, 2, 3),
            "collectives by kind",
            1,
        ),
        note("What each one serves needs the model."),
    )


def baselines(v: View) -> Markup:
    """This plan beside the tuned baselines: step with its range, and memory."""
    costs, limit = v.strategy.costs, v.strategy.costs["memory_limit_bytes"]
    if not v.strategy.baselines:
        return note("The file holds no baselines.")
    shown: list[tuple[str, Mapping[str, Any], str]] = [("this plan", costs, "")]
    for key, r in ranked(v.strategy):
        tie = mark(costs, r)
        shown.append((baseline_name(key, r), r, ", ".join(t for t in (tie, tuned_words(r)) if t)))
    # A bar that is many times the plan's would flatten all others: those run off the drawing.
    comparable = [r for _, r, _ in shown if r["step_time_s"] <= 3 * costs["step_time_s"]]
    longest = max((r["step_time_range_s"][1] for r in comparable), default=1.0) or 1.0
    rows = []
    for title, r, words in shown:
        ratio = r["step_time_s"] / costs["step_time_s"] if costs["step_time_s"] else 1.0
        cls, fits = FITS.get(r["fit"], FITS["no"])
        rows.append(
            [
                el(
                    "span",
                    el("b", title) if r is costs else name(title),
                    el("small", words) if words else None,
                    class_="what",
                ),
                _range_bar(r, longest, "bar-ink" if r is costs else "bar-muted"),
                f.time(r["step_time_s"]),
                "" if r is costs else f"{ratio:,.2f}×",
                f.size(r["memory_per_device_bytes"]),
                el("span", fits, class_=f"fit {cls}"),
            ]
        )
    tuned = (
        f"Each baseline is {words.removeprefix('each ')}. "
        if (words := tuned_over(v.strategy))
        else ""
    )
    tied = any(words.partition(",")[0] == MARK for _, _, words in shown)
    text = (
        f"{tuned}Whiskers are ranges{'; a tie is too close to tell apart' if tied else ''}."
        f" {f.size(limit)} are usable."
    )
    return join(
        table(
            ["", "", "step", "relative", "memory", ""],
            rows,
            (2, 3, 4),
            "this plan beside the baselines",
            2,
        ),
        el("p", text, class_="small"),
    )


def _range_bar(row: Mapping[str, Any], longest: float, kind: str) -> Markup:
    """The bar of a step time with a whisker over its range; `longest` seconds fill the width."""
    low, high = row["step_time_range_s"]
    off = row["step_time_s"] > longest
    width = min(100.0, 100 * row["step_time_s"] / longest)
    whisker = (
        f"left:{100 * low / longest:.2f}%;width:{100 * (min(high, longest) - low) / longest:.2f}%"
    )
    return el(
        "span",
        el("i", class_=kind, style=f"width:{width:.2f}%"),
        None if off else el("s", style=whisker),
        class_=f"span{' off' if off else ''}",
        aria_hidden="true",
    )
