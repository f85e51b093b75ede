"""The head of the page: what was planned, whether it fits, how long a step takes, and what a reader
should not miss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.report.commands import onward, reproduce
from planner.report.explain import binds
from planner.report.findings import findings
from planner.report.html import figures as f
from planner.report.html.tags import Child, Markup, el, join, name
from planner.report.html.view import View, beside, note, section, table
from planner.report.proof import covered
from planner.report.summary import (
    incremental_phrases,
    machine,
    solver_text,
    techniques,
    title,
    unit_of_work,
)
from planner.report.verdict import of_plans, verdict
from planner.strategy.diff import compare

Figure = tuple[str, str, Callable[[float], str]]
"""A figure of a comparison: what it is called, its key in a strategy's costs, how it is written."""
FITS = {"yes": ("good", "fits"), "tight": ("warn", "fits, tightly"), "no": ("bad", "does not fit")}


def head(v: View) -> Markup:
    """Title and subtitle of one plan."""
    s = v.strategy
    w, tokens = s.workload, int(s.costs["tokens_per_step"])
    work = f"batch {w['batch']:,}"
    if unit_of_work(s) == "tokens":
        work += f" × {tokens // w['batch']:,} tokens"
    kind = {"train": "training", "infer": "inference"}.get(w["kind"], w["kind"])
    items = [
        f.count(s.model["parameters"]) + " parameters",
        f.plural(s.model["nodes"], "operator"),
        machine(s).replace(" x ", " × "),
        kind,
        work,
    ]
    return join(el("h1", name(title(s))), el("p", " · ".join(items), class_="sub"))


def fit(v: View) -> Markup:
    """The verdict as a coloured word."""
    cls, words = FITS.get(v.strategy.costs["fit"], FITS["no"])
    return el("span", words, class_=f"fit {cls}")


def sentence(v: View) -> Markup:
    """The verdict in words."""
    return el(
        "p",
        f.prose(verdict(v.strategy)),
        class_=f"sentence {FITS.get(v.strategy.costs['fit'], FITS['no'])[0]}",
    )


def commands(v: View) -> Markup:
    """What to type to make the plan again, and to go on from it."""
    rows = [("this plan again", reproduce(v.strategy)), *onward(v.strategy, v.file)]
    return el(
        "dl",
        [el("div", el("dt", what), el("dd", el("code", text))) for what, text in rows],
        class_="commands",
    )


def proof(v: View) -> tuple[str, str]:
    """(figure, words) of how good the plan is known to be."""
    s = v.strategy.solver
    gap = s.get("gap")
    if s["name"] == "manual":
        return "manual", "priced as given"
    if gap is None:
        return "no bound", "best plan found"
    shown = "0" + f.NARROW + "%" if gap <= 1e-6 else f.share(gap)
    return shown, (
        f"proven the best of {covered(s)}"
        if s["status"] == "optimal"
        else f"above the bound of {covered(s)}"
    ) + of_plans(v.strategy)


def strip(v: View) -> Markup:
    """The four figures on top of a page."""
    c = v.strategy.costs
    low, high = c["step_time_range_s"]
    mlow, mhigh = c["memory_range_bytes"]
    peak = max(c["memory_limit_bytes"], c["memory_per_device_bytes"], 1)
    gauge = el(
        "span",
        el("i", style=f"width:{100 * c['memory_per_device_bytes'] / peak:.1f}%"),
        class_=f"gauge {FITS.get(c['fit'], FITS['no'])[0]}",
        aria_hidden="true",
    )
    cells = [
        ("step", f.time(c["step_time_s"]), f"range {f.time(low)} – {f.time(high)}", None),
        (
            "memory of a device",
            f.size(c["memory_per_device_bytes"]),
            join(f"of {f.size(c['memory_limit_bytes'])} usable · ", fit(v)),
            gauge,
        ),
        (
            "throughput",
            f"{c['tokens_per_s_per_device']:,.0f}",
            f"{unit_of_work(v.strategy)}/s/device",
            None,
        ),
        ("model FLOPs used", f.share(c["model_flops_utilization"]), "of the devices’ peak", None),
    ]
    tip = f"memory range {f.size(mlow)} – {f.size(mhigh)}"
    return el(
        "dl",
        [
            el("div", el("dt", k), el("dd", el("b", x), extra, el("span", sub)))
            for k, x, sub, extra in cells
        ],
        class_="strip",
        title=tip,
    )


def mesh(v: View) -> Markup:
    """Axes of the mesh and the techniques, as quiet chips."""
    axes = [
        el(
            "li",
            el("b", name(a["name"]), " ", f"{a['size']:,}"),
            el("span", " over ", name(" + ".join(a["levels"]))) if a["levels"] else None,
            class_="axis",
        )
        for a in v.strategy.mesh
    ]
    return el(
        "ul",
        axes,
        [el("li", f.prose(t)) for t in techniques(v.strategy)],
        class_="chips",
        aria_label="mesh and techniques",
    )


def remarks(v: View) -> Markup | None:
    """Findings, and how what is drawn relates to what is recorded."""
    items = [el("li", f.prose(text)) for text in findings(v.strategy)]
    if v.missing:
        items.append(el("li", v.missing))
    d, step = v.detail, v.strategy.costs["step_time_s"]
    if d is not None and abs(d.step_s - step) > 1e-3 * step:
        items.append(
            el(
                "li",
                f"The file records a step of {f.time(step)}; today’s cost model prices the same"
                f" decisions at {f.time(d.step_s)}. The timeline, the curve, the graph and the"
                " lists of operators and reshards follow the latter.",
            )
        )
    return el("ul", items, class_="remarks", aria_label="findings") if items else None


def binding(v: View) -> Markup:
    """What limits the plan, as `plan explain` says it."""
    return el("p", el("b", "What binds: "), f.prose("; ".join(binds(v.strategy))), class_="binds")


def single(v: View, alternatives: Markup) -> Markup:
    """The verdict of one plan: the sentence, the figures, what else there is and what to type; then
    what it is made of."""
    beside_it = el(
        "div", el("h2", "Beside the usual ways", id="baselines-h"), alternatives, id="baselines"
    )
    typed = el("div", el("h2", "What to type"), commands(v))
    return el(
        "section",
        sentence(v),
        strip(v),
        el("div", beside_it, typed, class_="first"),
        mesh(v),
        remarks(v),
        binding(v),
        id="verdict",
        aria_label="verdict",
    )


def double(views: Sequence[View]) -> Markup:
    """Two plans: figures, what changed between them, then each one's mesh and findings."""
    rows = _figures(views)
    rows.append(["memory", fit(views[0]), fit(views[1]), ""])
    rows.append(
        [
            "gap to the bound",
            *(join(el("b", gap), el("small", words)) for gap, words in map(proof, views)),
            "",
        ]
    )
    heads = [
        "",
        *(
            join(el("b", v.letter, class_=f"letter letter-{v.letter.lower()}"), " ", name(v.file))
            for v in views
        ),
        "change",
    ]
    figures = table(heads, rows, (1, 2, 3), "figures of both plans")
    columns = beside(views, lambda v: [sentence(v), mesh(v), remarks(v), binding(v), commands(v)])
    return el(
        "section",
        comparison(views),
        el("div", figures, class_="versus"),
        columns,
        id="verdict",
        aria_label="verdict",
    )


def _figures(views: Sequence[View]) -> list[list[Child]]:
    """Figures of two plans beside each other, with what changed and whether that is better."""
    a, b = (v.strategy.costs for v in views)
    less_is_better: list[Figure] = [
        ("step", "step_time_s", f.time),
        ("kernels", "compute_time_s", f.time),
        ("exposed communication", "exposed_communication_time_s", f.time),
        ("pipeline bubbles", "bubble_time_s", f.time),
        ("memory of a device", "memory_per_device_bytes", f.size),
    ]
    more_is_better: list[Figure] = [("model FLOPs used", "model_flops_utilization", f.share)]
    units = [unit_of_work(v.strategy) for v in views]
    if units[0] == units[1]:
        unit = f"{units[0]} per second and device"
        more_is_better.insert(0, (unit, "tokens_per_s_per_device", lambda x: f"{x:,.0f}"))
    rows: list[list[Child]] = []
    for label, key, shown in (*less_is_better, *more_is_better):
        x, y = a[key], b[key]
        if key == "bubble_time_s" and not x and not y:
            continue
        change = f.change(x, y)
        better = (y < x) == (key in [k for _, k, _ in less_is_better])
        mark = None if change in ("=", "≈") else "good" if better else "bad"
        rows.append([label, el("b", shown(x)), el("b", shown(y)), el("span", change, class_=mark)])
    return rows


def comparison(views: Sequence[View]) -> Markup:
    """Which of two plans is faster, by how much, and whether that is more than the model's error:
    as `plan diff` says it."""
    d = compare(views[0].strategy, views[1].strategy)
    (saved, _), before = d.gain, views[0].strategy.costs["step_time_s"]
    if not saved or not before:
        return el("p", "Both take the same step.", class_="sentence")
    a, b = (f"{f.time(low)} – {f.time(high)}" for low, high in d.ranges)
    faster = (
        f"B is {'faster' if saved > 0 else 'slower'} by {f.time(abs(saved))} a step"
        f" ({f.share(abs(saved) / before)})"
    )
    sure = (
        f"a tie: the ranges overlap ({a} and {b})"
        if d.tie
        else f"the ranges do not overlap ({a} and {b})"
    )
    return el("p", f"{faster}; {sure}.", class_="sentence")


def changes(views: Sequence[View]) -> Markup:
    """What changed between two plans and why: the same findings as `plan diff`."""
    d = compare(views[0].strategy, views[1].strategy)
    if not d.changes:
        return section("changes", "What changed", None, note("Nothing: the same decisions."))
    cause = {"search": "the search: model, workload, machine and cost model are the same"}.get(
        d.causes[0], " and ".join(d.causes)
    )
    shown = 6
    parts: list[Markup] = []
    for key in dict.fromkeys(c.section for c in d.changes):
        changes_here = [c for c in d.changes if c.section == key]
        rows = [
            [name(c.what), name(c.before or "–"), name(c.after or "–")]
            for c in changes_here[:shown]
        ]
        hidden_note = (
            f" ({shown} of {len(changes_here):,}; plan diff lists all)"
            if len(changes_here) > shown
            else ""
        )
        parts.append(table([key + hidden_note, "A", "B"], rows, (), f"changes: {key}"))
    return section(
        "changes",
        "What changed",
        f"The difference comes from {cause}.",
        el("div", parts, class_="stack"),
    )


def assumptions(v: View) -> Markup:
    """What was assumed, how the plan was found, and where it is from."""
    s = v.strategy
    items = [el("li", f.prose(a)) for a in s.assumptions] or [el("li", "none recorded")]
    p = s.provenance
    rows = [
        ("search", f.prose(solver_text(s))),
        ("cost model", str(p.get("cost_model", "not recorded"))),
        ("planned", str(p.get("date", "not recorded"))),
        ("model", f"{s.model['name']}, sha256 {str(s.model['sha256'])[:12]}…"),
        ("precision", s.workload["precision"]),
        ("runtime", s.workload["runtime"]),
    ]
    if kept := p.get("incremental"):
        rows.append(("kept", ", ".join(incremental_phrases(kept))))
    facts = el("dl", [el("div", el("dt", k), el("dd", name(x))) for k, x in rows], class_="facts")
    return join(el("ul", items, class_="plain"), facts)
