"""The drawing of a folded graph: each line a slice of rails, a name, its split, and its time;
opened, what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.report.html import figures as f
from planner.report.html.derive import Row, short_name
from planner.report.html.fold import Line, Rail, Rails, fold, merged
from planner.report.html.tags import Child, Markup, el, join, name
from planner.report.html.view import View, decided, note, runner_up, split_words
from planner.report.notation import plain_split
from planner.sharding.notation import cells

THIN, WIDE = 1.25, 13.0
LANE = 10.0
OPEN = 40
"""Lines up to which a stretch outside the blocks is unfolded at first."""


def width(moved: float, widest: float) -> float:
    """Pixels of a rail: in proportion to the bytes, from a hairline for none."""
    return THIN if moved <= 0 or widest <= 0 else max(2.0, WIDE * moved / widest)


def laid_out(v: View) -> Rails | None:
    """The folded graph of a plan; None without its model."""
    return fold(v.detail) if v.detail is not None else None


def graph(v: View, rails: Rails | None, widest: float) -> list[Markup]:
    """The graph; `widest`: bytes of the widest rail (of two plans)."""
    if rails is None:
        return [_bare(v)]
    scale = max((line.kernels_s + line.comm_s for line in rails.lines), default=0.0)
    drawn: list[Markup] = []
    k = 0
    while k < len(rails.lines):
        end = k
        while end < len(rails.lines) and rails.lines[end].run == rails.lines[k].run:
            end += 1
        drawn.append(_stretch(v, rails, k, end, widest, scale))
        k = end
    return [
        _legend(widest, v.detail is not None and v.detail.pipeline is not None),
        el("div", drawn, class_="rails", style=f"--lanes:{rails.lanes}"),
    ]


def _legend(widest: float, staged: bool) -> Markup:
    def sample(moved: float, words: str) -> Markup:
        line = el(
            "line",
            x1=0.0,
            x2=34.0,
            y1=8.0,
            y2=8.0,
            stroke_width=width(moved, widest),
            class_="moved" if moved else "stays",
        )
        return el(
            "li", el("svg", line, width="34", height="16", aria_hidden="true"), el("span", words)
        )

    kinds = [
        el("li", el("i", class_=f"swatch k-{k}"), el("span", words))
        for k, words in (("forward", "kernels"), ("comm", "exposed communication"))
    ]
    if not widest:
        return el("ul", sample(0.0, "nothing moves between devices"), kinds, class_="legend")
    return el(
        "ul",
        sample(widest, f"{f.size(widest)} a step and device"),
        sample(widest / 4, f.size(widest / 4)),
        sample(0.0, "stays where it is"),
        el(
            "li",
            el(
                "svg",
                el("line", x1=17.0, x2=34.0, y1=8.0, y2=8.0, stroke_width=6.0, class_="stub"),
                width="34",
                height="16",
                aria_hidden="true",
            ),
            el("span", "weights, inputs" + ", next stage" * staged),
        ),
        kinds,
        class_="legend",
    )


def _stretch(v: View, rails: Rails, start: int, end: int, widest: float, scale: float) -> Markup:
    """Lines of a block, or between blocks, under a heading that folds them."""
    lines = rails.lines[start:end]
    run = lines[0].run
    d = v.detail
    assert d is not None
    seconds = sum(line.kernels_s + line.comm_s for line in lines)
    if run >= 0:
        repeats = lines[0].rows[0].repeats
        title = join(
            el("b", f"block {run + 1}" if len(d.runs) > 1 else "block"),
            el("span", f"× {repeats:,}", class_="times"),
            (
                f" of {p.repeats:,}, on each of {p.stages} stages"
                if (p := d.pipeline) is not None and d.runs[run][0] == p.first
                else None
            ),
        )
    else:
        blocks = "block" if len(d.runs) == 1 else "blocks"
        place = (
            ("between" if start else "before")
            if end < len(rails.lines)
            else "after"
            if start
            else ""
        )
        title = el("b", f"{place} the {blocks}" if place else "operators")
    moved = sum(m.total_bytes for line in lines for m in line.moves)
    facts = [
        f.plural(sum(len(line.rows) for line in lines), "operator"),
        f"{f.time(seconds)} a step",
        f"{f.size(moved)} moved" if moved else "",
    ]
    head = el(
        "summary",
        _through(rails, start, widest),
        el("span", title, class_="title"),
        el("span", " · ".join(x for x in facts if x), class_="muted num"),
    )
    rows = [_line(v, rails, k, widest, scale) for k in range(start, end)]
    return el(
        "details",
        head,
        rows,
        class_=f"stretch{' repeated' if run >= 0 else ''}",
        open=run >= 0 or len(lines) <= OPEN,
    )


def _active(rails: Rails, k: int) -> list[Rail]:
    """Rails that pass the gap above line k."""
    return [r for j, r in enumerate(rails.rails[:k]) if r is not None and r.last >= k and j < k]


def _x(lane: int) -> float:
    return lane * LANE + LANE / 2


def _svg(rails: Rails, shapes: Sequence[Markup]) -> Markup:
    return el(
        "svg",
        shapes,
        class_="slice",
        viewBox=f"0 0 {rails.lanes * LANE:.0f} 100",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _path(d: str, moved: float, widest: float, kind: str = "") -> Markup:
    return el(
        "path",
        d=d,
        class_=kind or ("moved" if moved > 0 else "stays"),
        stroke_width=width(moved, widest),
    )


def _through(rails: Rails, k: int, widest: float) -> Markup:
    """The slice above line k, beside a heading or what an opened line shows: rails that go on."""
    return _svg(
        rails,
        [
            _path(f"M{_x(r.lane)} 0 V100", r.ahead(k), widest)
            for r in sorted(_active(rails, k), key=lambda r: r.ahead(k))
        ],
    )


def _slice(rails: Rails, k: int, widest: float) -> Markup:
    """Line k: what passes, what comes in, what leaves, and what its weights and inputs bring. Thin
    ones are drawn first."""
    own_x = _x(rails.lane[k])
    drawn: list[tuple[float, Markup]] = []
    for r in _active(rails, k):
        x, beyond, into = _x(r.lane), r.ahead(k + 1), r.to.get(k)
        if r.last > k:
            drawn.append((beyond, _path(f"M{x} 0 V100", beyond, widest)))
        if into is not None:
            curve = f"M{x} 0 V50" if x == own_x else f"M{x} 0 C{x} 34 {own_x} 14 {own_x} 50"
            drawn.append((into, _path(curve, into, widest)))
    rail, line = rails.rails[k], rails.lines[k]
    if rail is not None:
        ahead = rail.ahead(k + 1)
        drawn.append((ahead, _path(f"M{own_x} 50 V100", ahead, widest)))
    if line.own_bytes > 0:
        drawn.append(
            (
                line.own_bytes - 1e30,
                _path(f"M{own_x} 50 H{rails.lanes * LANE}", line.own_bytes, widest, "stub"),
            )
        )
    return _svg(rails, [shape for _, shape in sorted(drawn, key=lambda p: p[0])])


def _line(v: View, rails: Rails, k: int, widest: float, scale: float) -> Markup:
    line = rails.lines[k]
    main, row = line.main, decided(v, line.main.decided)
    ops = list(dict.fromkeys(r.op for r in line.rows))
    others = [op for op in ops if op != main.op]
    called = short_name(main.id, main.op)
    words = " ".join([main.op] * (called != main.op) + [f"+ {', '.join(others)}"] * bool(others))
    label = el("span", name(called), el("small", words) if words else None, class_="what")
    total = line.kernels_s + line.comm_s
    bars = el(
        "span",
        [
            el("i", class_=f"k-{kind}", style=f"width:{100 * s / scale:.2f}%")
            for kind, s in (("forward", line.kernels_s), ("comm", line.comm_s))
            if s > 0 and scale
        ],
        class_="duo",
        aria_hidden="true",
    )
    dot = el("i", class_="dot", style=f"--x:{(rails.lane[k] + 0.5) / rails.lanes:.4f}")
    head = el(
        "summary",
        _slice(rails, k, widest),
        dot,
        label,
        el(
            "span",
            name(_cut(v, row) or split_words({})),
            class_="split",
            title=split_words(row.get("split", {})),
        ),
        bars,
        el("span", f.time(total) if total else "–", class_="num"),
    )
    return el(
        "details",
        head,
        el(
            "div",
            _through(rails, k + 1, widest),
            el("div", _inside(v, line), class_="inside"),
            class_="opened-line",
        ),
        class_="line",
    )


def _inside(v: View, line: Line) -> Markup:
    """What is known of the operators of a line, and of its collectives."""
    blocks: list[Child] = [_operator(v, r) for r in line.rows]
    moves = merged(line.moves)
    if moves:
        items = [
            el(
                "li",
                el(
                    "span",
                    f"{m.kind} over ",
                    name("+".join(m.axes)),
                    f", {m.phase}: {n:,} × {f.size(size / n)} for ",
                    name(m.what),
                ),
                el("b", f.time(s) if s else "hidden"),
                class_="move",
            )
            for m, n, size, s in moves
        ]
        blocks.append(el("ul", items, class_="moves"))
    return join(blocks)


def _cut(v: View, row: Mapping[str, Any]) -> str:
    """What of an operator is cut, in plain words; "" for nothing."""
    split = row.get("split", {})
    return plain_split(str(row["op"]), split, dict(v.strategy.mesh_shape)) if split else ""


def _operator(v: View, r: Row) -> Markup:
    row = decided(v, r.decided)
    times = [("forward", r.forward_s), ("recompute", r.recompute_s), ("backward", r.backward_s)]
    kernels = ", ".join(f"{k} {f.time(s)}" for k, s in times if s)
    facts: list[tuple[str, Child]] = [
        (
            "split",
            join(
                name(split_words(row.get("split", {}))),
                el("small", f" {words}") if (words := _cut(v, row)) else None,
            ),
        )
    ]
    for out in row.get("outputs", ())[:1]:
        t = v.strategy.tensors.get(out)
        if t:
            partial = f", pending sum over {'+'.join(t['partial'])}" if t["partial"] else ""
            facts.append(
                ("result", name(cells([f"{n:,}" for n in t["shape"]], t["layout"]) + partial))
            )
    facts.append(("kernels", f"{kernels} a step, bound by {r.bound}" if kernels else r.bound))
    if r.saved_bytes:
        facts.append(("saves", f"{f.size(r.saved_bytes)} for the backward pass"))
    if row.get("unsupported"):
        facts.append(("no rule", f"{row['unsupported']}; whole on every device"))
    other = runner_up(row)
    if other:
        facts.append(("runner-up", other))
    return el(
        "dl",
        el("div", el("dt", r.op), el("dd", name(r.id))),
        [el("div", el("dt", k), el("dd", x)) for k, x in facts],
        class_="op",
    )


def _bare(v: View) -> Markup:
    """From the file alone: operators in its order, without what connects them."""
    nodes = list(v.strategy.nodes.items())
    limit = 60
    items = [
        el(
            "li",
            name(short_name(n, row["op"])),
            " ",
            el("small", row["op"]),
            el("small", f" × {row['times']:,}") if row.get("times", 1) > 1 else None,
            el("span", name(split_words(row["split"])), class_="split"),
        )
        for n, row in nodes[:limit]
    ]
    rest_note = (
        el("p", f"and {len(nodes) - limit:,} more", class_="small") if len(nodes) > limit else None
    )
    return join(
        note(
            "What connects the operators, and what moves between them, needs the model. Operators"
            " and their splits:"
        ),
        el("ul", items, class_="bare"),
        rest_note,
    )
