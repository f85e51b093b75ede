"""The timeline as a lens: the step, one of its microbatches, one repeat of its costliest block,
each bar opening what is marked in the bar above it.

Widths are time; where a part folds several kinds of work, heights are their shares of it, so that
area is time in every bar.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.execution.pipeline import Pipeline
from planner.execution.techniques import ZB_H1
from planner.pricing.cost import OTHER_PARTS
from planner.report.html import figures as f
from planner.report.html.bars import KINDS, Block, Part, Timeline, timeline, total
from planner.report.html.derive import Detail
from planner.report.html.tags import Markup, el, join, name
from planner.report.html.view import KIND_NAMES, View, legend, note
from planner.sharding.layout import STAGE
from planner.strategy.stages import assigned_blocks, lockstep, stages, ticks

LETTERS = 150
"""Letters under a bar as wide as the page: a part has its name written where it has room for it."""
SEPARATE = 0.006
TICKS = 64
DENSEST = 250
"""Marks in a bar as wide as the page: more would hide what they part."""
ROOM = 14
"""Letters of the blocks that are named beside a stage's bar; more are told when it is pointed
at."""
STAGES = 16
"""Pipeline stages that are drawn."""
TICK = {
    "1f1b": "a full tick: one microbatch forward, another one backward",
    "zb-h1": "a full tick: one microbatch forward, another one backward, weights of a third",
    "gpipe": "a tick forward and a tick backward",
    "interleaved": "a full tick: a virtual stage forward, one of another microbatch backward",
}


def lens(v: View, scale_s: float) -> list[Markup]:
    """The bars of a plan; `scale_s` is the step time that fills the width (the longer of two
    plans)."""
    c = v.strategy.costs
    room = 0.47 if v.letter else 1.0
    if v.detail is None:
        parts = [
            Part(KIND_NAMES[k], {k: c[key]})
            for k, key in (
                ("compute", "compute_time_s"),
                ("comm", "exposed_communication_time_s"),
                ("bubble", "bubble_time_s"),
                ("optimizer", "optimizer_time_s"),
                *(("optimizer", part) for part in OTHER_PARTS),
            )
            if c.get(key, 0.0) > 0
        ]
        return [
            key_of(parts),
            stage(v),
            _bar("the step", c["step_time_s"], parts, scale_s, room),
            readout(),
            note("By kind only: microbatches, blocks and operators need the model."),
        ]
    t = timeline(v.detail)
    step_s = sum(p.time_s for p in t.step)
    drawn = [key_of(t.step), stage(v)]
    drawn += (
        _stages(v.detail.pipeline, t, scale_s)
        if v.detail.pipeline is not None
        else [_bar("the step", step_s, t.step, scale_s, room)]
    )
    if t.hidden_s:
        drawn.append(
            el(
                "p",
                el("i", class_="swatch k-hidden"),
                f" {f.time(t.hidden_s)} of gradient reduction is hidden behind the backward pass",
                class_="small",
            )
        )
    microbatch = _microbatch(v.detail, t, step_s, scale_s, room)
    drawn += microbatch
    if microbatch:
        drawn += [_opened(t.micro, b, k > 0, room) for k, b in enumerate(t.blocks)]
    return [*drawn, readout()]


def _microbatch(d: Detail, t: Timeline, step_s: float, scale_s: float, room: float) -> list[Markup]:
    """The second bar: one microbatch, tick or pass of the step above it; nothing where that is the
    step itself."""
    micro_s = sum(p.time_s for p in t.micro)
    if d.pipeline is not None:
        return [_bar(TICK[d.pipeline.schedule], micro_s, t.micro, room=room)]
    if d.micro > 1:
        title, end = "one microbatch", t.step[0].time_s / step_s / d.micro
    elif len(t.micro) > len(t.step):
        title, end = "its passes", micro_s / step_s
    else:
        return []
    return [fan(0.0, end, scale_s, step_s), _bar(title, micro_s, t.micro, room=room)]


def _apart(v: View) -> str:
    """What is said of gradients of weights that are made apart from the backward pass."""
    return (
        f" Gradients of blocks’ weights are made in {v.micro} ticks of their own, none of them a"
        " bubble."
        if v.strategy.chosen.schedule == ZB_H1
        else ""
    )


def stage(v: View) -> Markup:
    """Which devices the bars are of."""
    if stages(v.strategy) > 1:
        n, (per_stage, whole) = stages(v.strategy), assigned_blocks(v.strategy)
        blocks = (
            f", each with {'' if per_stage * n == whole else 'up to '}{per_stage} of {whole} blocks"
            if per_stage
            else ""
        )
        place, on = (
            v.strategy.topology["devices"] // dict(v.strategy.mesh_shape)[STAGE],
            ticks(v.strategy),
        )
        per = " or ".join(
            f"{place * w:,}" for w in sorted(set(v.strategy.chosen.stage_widths) or {1})
        )
        per = f"{per} {'device' if per == '1' else 'devices'}"
        if not lockstep(v.strategy):
            return el(
                "p",
                f"{n} stages of {per}{blocks}; bars are of the one that takes longest.",
                class_="small",
            )
        return el(
            "p",
            f"{n} stages of {per} keep lock-step{blocks}. {v.micro} microbatches take {on} ticks"
            f" forward and {on} backward, of which {n - 1} each way are a bubble: a stage waits for"
            " the first microbatch, or has had the last. The epilogue behind the blocks runs on"
            f" every stage; only the last one’s result counts.{_apart(v)}",
            class_="small",
        )
    return el(
        "p",
        f"No pipeline: all {v.strategy.topology['devices']:,} devices keep the same time",
        class_="small",
    )


def _stages(p: Pipeline, t: Timeline, scale_s: float) -> list[Markup]:
    """A thin bar per stage, the first and the last ones where there are many."""
    step_s = sum(part.time_s for part in t.step)
    shown = (
        [*range(p.stages)]
        if p.stages <= STAGES
        else [*range(STAGES // 2), *range(p.stages - STAGES // 2, p.stages)]
    )
    sized = None if step_s > 0.9995 * scale_s else f"width:{100 * step_s / scale_s:.2f}%"
    bars: list[Markup] = []
    for place, k in enumerate(shown):
        if place and k > shown[place - 1] + 1:
            bars.append(
                el("p", f"stages {shown[place - 1] + 1} to {k - 1} likewise", class_="small")
            )
        bar = el(
            "div",
            _parts(t.stages[k], step_s, marked=False),
            class_="bar thin",
            style=sized,
            role="group",
            aria_label=f"stage {k}, {f.time(step_s)}",
        )
        blocks = _held(p, k)
        label = (
            blocks
            if len(blocks) <= ROOM
            else blocks.removeprefix("blocks ").partition(",")[0] + ", …"
        )
        bars.append(
            el(
                "div",
                el("span", el("b", f"stage {k}"), " ", el("small", label), title=blocks),
                el("div", bar),
                class_="stagerow",
            )
        )
    return [
        el("p", el("span", "the step, a bar per stage"), el("b", f.time(step_s)), class_="cap"),
        el("div", bars, class_="stages level"),
    ]


def _held(p: Pipeline, stage: int) -> str:
    """Which blocks a stage has, chunk by chunk."""
    chunks = [
        range(first, min(first + p.blocks_per_tick, p.repeats))
        for first in range(stage * p.blocks_per_tick, p.repeats, p.stages * p.blocks_per_tick)
    ]
    numbers = [f"{c[0]}–{c[-1]}" if len(c) > 1 else f"{c[0]}" for c in chunks]
    return (
        f"block{'s' if sum(map(len, chunks)) > 1 else ''} {', '.join(numbers)}"
        if numbers
        else "no block"
    )


def key_of(parts: Sequence[Part]) -> Markup:
    """The legend, with seconds and shares of the step."""
    sums = total(parts)
    step = sum(sums.values()) or 1.0
    return legend(
        [
            (f"k-{k}", KIND_NAMES[k], f"{f.time(sums[k])} · {f.share(sums[k] / step)}")
            for k in ("compute", *KINDS)
            if k in sums
        ]
    )


def readout() -> Markup:
    """Where the part under the pointer, or in focus, is spelled out."""
    return el(
        "p",
        "Point at a part, or focus a bar and use the arrow keys.",
        class_="readout",
        aria_live="polite",
    )


def _bar(
    title: str, seconds: float, parts: Sequence[Part], scale_s: float = 0.0, room: float = 1.0
) -> Markup:
    """A bar with its title and names; room: the share of the page's width that it has."""
    width = 100 * seconds / scale_s if scale_s else 100.0
    sized = None if width > 99.95 else f"width:{width:.2f}%"
    cap = el("p", el("span", title), el("b", f.time(seconds)), class_="cap")
    return el(
        "div",
        cap,
        el(
            "div",
            _parts(parts, seconds),
            class_="bar",
            style=sized,
            role="group",
            aria_label=f"{title}, {f.time(seconds)}",
        ),
        _names(parts, seconds, sized, room * width / 100),
        class_="level",
    )


def _parts(parts: Sequence[Part], whole: float, marked: bool = True) -> list[Markup]:
    """The parts of a bar. marked: lines part them and what they repeat; hundreds of ticks side by
    side would be nothing but lines."""
    drawn = []
    for n, part in enumerate(parts):
        sep = " sep" if marked and part.time_s >= SEPARATE * whole else ""
        bands = [
            el("b", class_=f"k-{k}", style=f"height:{100 * part.shares[k] / part.time_s:.2f}%")
            for k in ("compute", *KINDS)
            if part.shares.get(k)
        ]
        ticks = (
            el("u", style=f"--n:{part.repeats}")
            if marked and 1 < part.repeats <= min(TICKS, DENSEST * part.time_s / whole)
            else None
        )
        drawn.append(
            el(
                "i",
                bands,
                ticks,
                class_=f"part{sep}{' opens' if part.run >= 0 else ''}",
                style=f"flex-grow:{max(part.time_s / whole, 1e-5) * 1000:.3f}",
                role="button" if part.run >= 0 else "img",
                aria_label=tip(part),
                data_tip=tip(part),
                tabindex="-1" if n else "0",
                data_run=str(part.run) if part.run >= 0 else None,
            )
        )
    return drawn


def _names(parts: Sequence[Part], whole: float, sized: str | None, room: float) -> Markup:
    """Names under the parts that have room for one."""
    cells = []
    for part in parts:
        fits = len(part.label) + 8 * (part.repeats > 1) <= LETTERS * room * part.time_s / whole
        shown = (
            [
                name(part.label),
                el("span", f"× {part.repeats:,}", class_="muted") if part.repeats > 1 else None,
            ]
            if fits
            else []
        )
        cells.append(
            el(
                "span",
                join(*shown, gap=" "),
                style=f"flex-grow:{max(part.time_s / whole, 1e-5) * 1000:.3f}",
            )
        )
    return el("div", cells, class_="names", style=sized, aria_hidden="true")


def tip(part: Part) -> str:
    """A part in a line of text."""
    times_text = f" × {part.repeats:,}" if part.repeats > 1 else ""
    kinds = [
        f"{KIND_NAMES[k]} {f.time(part.shares[k])}"
        for k in ("compute", *KINDS)
        if part.shares.get(k)
    ]
    note = f" ({part.note})" if part.note and part.note != part.label else ""
    times = ", ".join(kinds) if len(kinds) > 1 else kinds[0] if kinds else "no time"
    return f"{part.label}{note}{times_text}: {times}" + (
        f", together {f.time(part.time_s)}" if len(kinds) > 1 else ""
    )


def fan(start: float, end: float, scale_s: float = 0.0, seconds: float = 0.0) -> Markup:
    """The rays from a part of a bar (shares of its length) to the whole of the next one."""
    k = 100 * (seconds / scale_s if scale_s else 1.0)
    a, b = start * k, max(end * k, start * k + 0.15)
    return el(
        "svg",
        el("path", d=f"M{a:.2f} 0 L{b:.2f} 0 L100 20 L0 20 Z"),
        class_="fan",
        viewBox="0 0 100 20",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _opened(micro: Sequence[Part], b: Block, hidden: bool, room: float) -> Markup:
    """One repeat of a block under the microbatch, its two passes side by side as long as they
    take."""
    micro_s = sum(p.time_s for p in micro)
    start_s, first = 0.0, None
    for part in micro:
        if part.run == b.run and first is None:
            first = (start_s, start_s + part.time_s / part.repeats)
        start_s += part.time_s
    a, e = first or (0.0, 0.0)
    both = sum(p.time_s for p in (*b.forward, *b.backward))
    title = f"one repeat of the {b.name}" if b.name == "block" else f"one repeat of {b.name}"
    passes = [("forward", b.forward), ("backward", b.backward)]
    rows = []
    for label, parts in passes:
        if parts:
            seconds = sum(p.time_s for p in parts)
            rows.append(
                el(
                    "div",
                    _bar(label, seconds, parts, room=room * seconds / both),
                    class_="pass",
                    style=f"flex-grow:{1000 * seconds / both:.2f}",
                )
            )
    many = f"the {b.repeats:,} of a stage" if b.per_stage else f"{b.repeats:,} of them"
    head = el(
        "p",
        el(
            "span",
            f"{title}: {many} take {f.time(b.total_s)} a"
            f" step{', bubbles included' if b.per_stage else ''}",
        ),
        class_="cap",
    )
    return el(
        "div",
        fan(a / micro_s, e / micro_s),
        head,
        el("div", rows, class_="passes"),
        class_="opened",
        data_block=str(b.run),
        hidden=hidden,
    )
