"""Where the time goes, ranked: operators, reshards, and the plans beside this one."""

from __future__ import annotations

from collections.abc import Iterable

from planner.report.baselines import baseline_name, ties, tuned_over
from planner.report.html import figures as f
from planner.report.html.derive import Move, short_name
from planner.report.html.tags import Child, Markup, el, join, name
from planner.report.html.verdict import FITS
from planner.report.html.view import View, decided, meter, note, runner_up, split_cell, table
from planner.strategy.words import tuned_words

SHOWN = 10


def operators(v: View) -> Markup:
    """The costliest operators by their kernels, with the next best split of each."""
    step = v.strategy.costs["step_time_s"] or 1.0
    if v.detail is not None:
        found = [
            (r.kernels_s, r.id, r.op, r.repeats, decided(v, r.decided))
            for r in v.detail.rows
            if r.kernels_s
        ]
        step = v.detail.step_s or 1.0
    else:
        found = [
            (row.get("time_s", 0.0) * v.micro, n, row["op"], row.get("times", 1), row)
            for n, row in v.strategy.nodes.items()
            if row.get("time_s")
        ]
    found.sort(key=lambda r: (-r[0], r[1]))
    if not found:
        return note("The file holds no times of operators: the plan came from no search.")
    most = found[0][0]
    rows: list[list[Child]] = []
    for seconds, node, op, times, row in found[:SHOWN]:
        called = short_name(node, op)
        label = join(
            name(called),
            el("small", " ".join([op] * (called != op) + [f"× {times:,}"] * (times > 1))),
        )
        rows.append(
            [
                el("span", label, class_="what"),
                join(meter(seconds, most, "k-forward"), f.time(seconds)),
                f.share(seconds / step),
                el("span", split_cell(v, row), class_="what"),
                runner_up(row) or el("span", "none open", class_="muted"),
            ]
        )
    rest = sum(r[0] for r in found[SHOWN:])
    if rest:
        rows.append(
            [
                el("span", f.plural(len(found) - SHOWN, "other operator"), class_="muted"),
                f.time(rest),
                f.share(rest / step),
                "",
                "",
            ]
        )
    made = table(
        ["operator", "kernels a step", "of the step", "split", "runner-up"],
        rows,
        (1, 2),
        "costliest operators",
        1,
    )
    below = any(
        row.get("runner_up") and row["runner_up"]["extra_s"] < 0 for *_, row in found[:SHOWN]
    )
    why = (
        "A negative price: faster by itself, yet not taken, because it needs too much memory or"
        " because the solver’s objective and the final price disagree about it."
    )
    return join(made, el("p", why, class_="small") if below else None)


def reshards(v: View) -> Markup:
    """The costliest collectives with what they serve; without the model, by kind and axes."""
    if v.detail is None:
        return _by_kind(v)
    step = v.detail.step_s or 1.0
    rows_of = {r.index: r for r in v.detail.rows}
    found: dict[tuple, list[Move]] = {}
    for m in v.detail.moves:
        key = (
            m.kind,
            m.axes,
            m.row,
            m.when == "handed",
            m.phase in ("gradient", "optimizer"),
            m.stored,
        )
        found.setdefault(key, []).append(m)
    ranked = sorted(
        found.values(),
        key=lambda ms: (-sum(m.exposed_s for m in ms), -sum(m.total_bytes for m in ms), ms[0].what),
    )
    if not ranked:
        return note("None: no device waits for another.")
    most = sum(m.exposed_s for m in ranked[0])
    rows: list[list[Child]] = []
    for ms in ranked[:SHOWN]:
        r = rows_of[ms[0].row]
        seconds, size = sum(m.exposed_s for m in ms), sum(m.total_bytes for m in ms)
        what = (
            "to the next stage, result of "
            if ms[0].when == "handed"
            else {True: "weights of ", False: "result of "}[ms[0].stored]
        )
        rows.append(
            [
                el(
                    "span",
                    join(what, name(short_name(r.id, r.op))),
                    el("small", ", ".join(_phases(ms))),
                    class_="what",
                ),
                join(ms[0].kind, " over ", name("+".join(ms[0].axes))),
                join(meter(seconds, most, "k-comm"), f.time(seconds)),
                f.share(seconds / step),
                f.size(size),
                f"{sum(m.count for m in ms):,}",
                runner_up(decided(v, r.decided)) or el("span", "none open", class_="muted"),
            ]
        )
    rest = ranked[SHOWN:]
    if rest:
        seconds = sum(m.exposed_s for ms in rest for m in ms)
        rows.append(
            [
                el("span", f.plural(len(rest), "other reshard"), class_="muted"),
                "",
                f.time(seconds),
                f.share(seconds / step),
                f.size(sum(m.total_bytes for ms in rest for m in ms)),
                f"{sum(m.count for ms in rest for m in ms):,}",
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


def _phases(ms: Iterable[Move]) -> list[str]:
    return list(dict.fromkeys({"recompute": "again"}.get(m.phase, m.phase) for m in ms))


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
    own, limit = v.strategy.costs, v.strategy.costs["memory_limit_bytes"]
    if not v.strategy.baselines:
        return note("The file holds no baselines.")
    order = sorted(
        v.strategy.baselines.items(), key=lambda kv: (kv[1]["fit"] == "no", kv[1]["step_time_s"])
    )
    shown = [("this plan", own, "")] + [
        (
            baseline_name(k, r),
            r,
            ", ".join(
                t for t in ("tie" if r["fit"] != "no" and ties(own, r) else "", tuned_words(r)) if t
            ),
        )
        for k, r in order
    ]
    # A bar that is many times the plan's would flatten all others: those run off the drawing.
    most = (
        max(
            [
                r["step_time_range_s"][1]
                for _, r, _ in shown
                if r["step_time_s"] <= 3 * own["step_time_s"]
            ]
            or [1.0]
        )
        or 1.0
    )
    rows = []
    for title, r, words in shown:
        low, high = r["step_time_range_s"]
        ratio = r["step_time_s"] / own["step_time_s"] if own["step_time_s"] else 1.0
        off = r["step_time_s"] > most
        bar = el(
            "span",
            el(
                "i",
                class_="bar-ink" if r is own else "bar-muted",
                style=f"width:{min(100.0, 100 * r['step_time_s'] / most):.2f}%",
            ),
            (
                None
                if off
                else el(
                    "s",
                    style=(
                        f"left:{100 * low / most:.2f}%;width:{100 * (min(high, most) - low) / most:.2f}%"  # noqa: E501
                    ),
                )
            ),
            class_=f"span{' off' if off else ''}",
            aria_hidden="true",
        )
        cls, fits = FITS.get(r["fit"], FITS["no"])
        over = f.size(r["memory_per_device_bytes"])
        rows.append(
            [
                el(
                    "span",
                    el("b", title) if r is own else name(title),
                    el("small", words) if words else None,
                    class_="what",
                ),
                bar,
                f.time(r["step_time_s"]),
                "" if r is own else f"{ratio:,.2f}×",
                over,
                el("span", fits, class_=f"fit {cls}"),
            ]
        )
    tuned = (
        f"Each baseline is {words.removeprefix('each ')}. "
        if (words := tuned_over(v.strategy))
        else ""
    )
    text = (
        f"{tuned}Whiskers are ranges; a tie lies within the other’s range. {f.size(limit)} are"
        " usable."
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
