"""Memory of a device over a step, as it is priced (planner.pricing.peak_memory).

Parameters, optimizer state and the workspace of the largest operator are priced as present all the
time; saved activations grow through the forward pass and are released in reverse by the backward
pass; gradients of the repeated blocks are there from their backward pass on. What follows the
blocks (the epilogue: head and loss) has workspace of its own. Without repeated blocks every
operator's backward pass has its own (costmodels.liveness). With pipeline stages what
the microbatches in flight save is there through all ticks under 1F1B, and grows by one a tick
under GPipe; a tick passes the epilogue as a microbatch does. So the peak lies there or where
the backward pass enters the blocks, and it is the figure of the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.liveness import Liveness
from planner.execution.pipeline import Pipeline
from planner.execution.techniques import ZB_H1
from planner.report.html import figures as f
from planner.report.html.bars import passes_of, timeline
from planner.report.html.derive import Detail, Row, short_name
from planner.report.html.tags import Markup, el, join, name
from planner.report.html.view import PART_NAMES, View, legend, note
from planner.report.summary import breakdown

ROOM = 1.09
"""Height of the curve's drawing over what has to be in it: the limit has its name above it."""
FAR = 0.4
HEIGHT, WIDTH = 100.0, 100.0
FINEST = 0.1
"""How far a drawn line may be from its points, in units of the drawing."""
ORDER = ("parameters", "optimizer", "gradients", "replay", "activations", "temporary")


@dataclass(frozen=True)
class Series:
    """Memory over the last microbatch and what follows it. bands: part -> bytes at each of times_s,
    stacked in this order; two points of one time are a jump. turn_s: where the forward pass ends.
    largest: operators by what they keep."""

    times_s: tuple[float, ...]
    bands: tuple[tuple[str, tuple[float, ...]], ...]
    turn_s: float
    largest: tuple[Row, ...]
    enters: str = "the backward pass enters the blocks"
    """What a peak behind the forward pass's end is called."""

    @property
    def total_bytes(self) -> tuple[float, ...]:
        """All bands together."""
        return tuple(sum(band[k] for _, band in self.bands) for k in range(len(self.times_s)))

    @property
    def peak(self) -> int:
        """The first point of the most memory."""
        total = self.total_bytes
        return max(range(len(total)), key=lambda k: (total[k], -k))

    @property
    def peak_text(self) -> str:
        """Where the peak is."""
        peak_s = self.times_s[self.peak]
        return "end of the forward pass" if peak_s <= self.turn_s * (1 + 1e-9) else self.enters


def series(d: Detail) -> Series:
    """The curve of a plan that was worked out. Lengths follow the microbatch's bars, so that both
    drawings keep the same time."""
    groups: list[list[Row]] = []
    for row in d.rows:
        if row.run >= 0 and groups and groups[-1][0].run == row.run:
            groups[-1].append(row)
        else:
            groups.append([row])
    h, enters = d.memory, "the backward pass enters the blocks"
    if h.liveness is not None:
        layers = d.layers or d
        walk, turn = _written_out(layers, h.liveness)
        peak_node = layers.rows[h.liveness.at]
        enters = f"backward pass of {short_name(peak_node.id, peak_node.op)}"
    elif d.pipeline is not None:
        walk, turn = _staged(d, d.pipeline)
    else:
        walk = _Walk(d)
        for rows in groups:
            walk.step(rows, _spans(d, rows)[0], 1)
        turn = walk.times[-1]
        for rows in reversed(groups):
            walk.step(rows, _spans(d, rows)[1], -1)
        end = walk.times[-1] + sum(m.exposed_s for m in d.moves if m.when == "sync") / d.micro
        walk.point(_step_end(d, end))
    n = len(walk.times)
    one_repeat = (
        0.0
        if h.liveness is not None
        else max(h.activations - sum(r.saved_bytes for r in d.rows if not r.after_blocks), 0.0)
    )
    shown = {
        "parameters": (h.parameters,) * n,
        "optimizer": (h.state,) * n,
        "gradients": tuple(walk.gradients),
        "replay": (one_repeat if one_repeat > 1e-6 * h.activations else 0.0,) * n,
        "activations": tuple(walk.saved),
        "temporary": tuple(walk.work),
    }
    largest = sorted((r for r in d.rows if r.saved_bytes), key=lambda r: (-r.saved_bytes, r.index))
    return Series(
        tuple(walk.times),
        tuple((k, shown[k]) for k in ORDER if any(shown[k])),
        turn,
        tuple(largest),
        enters,
    )


def _step_end(d: Detail, now: float) -> float:
    """Seconds at the end of the step, where the last microbatch has taken until now."""
    return now + max(sum(p.time_s for p in timeline(d).step) - now * d.micro, 0.0)


def _written_out(d: Detail, moments: Liveness) -> tuple[_Walk, float]:
    """The curve of a program without a loop, and the end of its forward pass: the forward pass
    saves, each operator's backward pass has what is there then."""
    walk = _Walk(d)
    for row in d.rows:
        walk.step([row], _spans(d, [row])[0], 1)
    turn = walk.times[-1]
    for row in reversed(d.rows):
        walk.moment(
            walk.times[-1],
            *(
                float(x[row.index])
                for x in (moments.activations, moments.gradients, moments.temporary)
            ),
        )
        walk.moment(
            walk.times[-1] + _spans(d, [row])[1],
            walk.saved[-1],
            walk.gradients[-1] - d.memory.gradients,
            walk.work[-1],
        )
    end = walk.times[-1] + sum(m.exposed_s for m in d.moves if m.when == "sync") / d.micro
    walk.moment(walk.times[-1], 0.0, walk.gradients[-1] - d.memory.gradients, 0.0)
    walk.moment(_step_end(d, end), 0.0, walk.gradients[-1] - d.memory.gradients, 0.0)
    return walk, turn


def _staged(d: Detail, p: Pipeline) -> tuple[_Walk, float]:
    """The curve with pipeline stages, and the end of its forward pass. 1F1B: the last full tick and
    what follows; GPipe: the step."""
    spans = {name: sum(part.time_s for part in parts) for name, parts in passes_of(d).items()}
    spans["backward"] += spans["weights"]
    ring = sum(r.saved_bytes for r in d.rows if not r.after_blocks)
    epilogue = [r for r in d.rows if r.after_blocks]
    one_tick = p.schedule != "gpipe"
    walk = _Walk(d, ring if one_tick else 0.0)
    walk.now = ring
    walk.point(
        spans["forward"]
        if one_tick
        else p.ticks * (spans["forward"] + spans["epilogue"]) - spans["epilogue"]
    )
    if epilogue:
        walk.step(epilogue, spans["epilogue"], 1)
    turn = walk.times[-1]
    if epilogue:
        walk.step(epilogue, spans["epilogue_back"], -1)
    walk.turned()
    if not one_tick:
        walk.now = 0.0
    walk.point(
        walk.times[-1]
        + spans["backward"] * (p.stages * p.virtual_stages if one_tick else p.ticks)
        + (0.0 if one_tick else (p.ticks - 1) * spans["epilogue_back"])
    )
    walk.now = 0.0
    walk.point(walk.times[-1])
    walk.point(walk.times[-1] + timeline(d).ends_s)
    return walk, turn


class _Walk:
    """Points of the curve in order. The epilogue is entered and left in no time: what differs there
    jumps."""

    def __init__(self, d: Detail, now: float = 0.0) -> None:
        self.parts, self.inside, self.backward_in_blocks = d.memory, False, False
        self.times: list[float] = []
        self.saved: list[float] = []
        self.gradients: list[float] = []
        self.work: list[float] = []
        self.now = now
        self.point(0.0)

    def point(self, time_s: float) -> None:
        """Adds a point to the curve: what is in memory at this time."""
        h = self.parts
        self.times.append(time_s)
        self.saved.append(self.now)
        self.gradients.append(
            h.gradients if self.backward_in_blocks else h.gradients - h.block_grads
        )
        self.work.append(h.epilogue_workspace if self.inside else h.workspace)

    def moment(self, time_s: float, saved: float, gradients: float, work: float) -> None:
        """What a backward pass without loops has; gradients beside the sums of microbatches."""
        self.times.append(time_s)
        self.saved.append(saved)
        self.gradients.append(self.parts.gradients + gradients)
        self.work.append(work)

    def turned(self) -> None:
        """The backward pass enters the blocks."""
        self.backward_in_blocks, self.inside = True, False
        self.point(self.times[-1])

    def step(self, rows: list[Row], seconds: float, sign: int) -> None:
        """Pass a group: forward (1) saves its activations, backward (-1) releases them."""
        here = rows[0].after_blocks
        self.backward_in_blocks = self.backward_in_blocks or (sign < 0 and not here)
        if here != self.inside or (
            self.backward_in_blocks and self.gradients[-1] != self.parts.gradients
        ):
            self.inside = here
            self.point(self.times[-1])
        self.now = max(0.0, self.now + sign * sum(r.saved_bytes for r in rows))
        self.point(self.times[-1] + seconds)


def _spans(d: Detail, rows: list[Row]) -> tuple[float, float]:
    """Seconds of a group in one microbatch: forward, and backward with what is recomputed."""
    ahead = back = 0.0
    for r in rows:
        ahead += r.forward_s
        back += r.backward_s + r.recompute_s
        for m in d.at.get(r.index, ()):
            ahead += m.exposed_s if m.when == "forward" else 0.0
            back += m.exposed_s if m.when in ("backward", "recompute") else 0.0
    return ahead / d.micro, back / d.micro


def curve_bytes(views: Sequence[View], scale_bytes: float) -> float:
    """What fills the height of the curves: the limit, or where all plans stay far below it, a
    little more than the highest peak."""
    peaks = [float(v.detail.memory_bytes) for v in views if v.detail is not None]
    highest = max(peaks, default=0.0)
    return scale_bytes if highest >= FAR * scale_bytes else 1.25 * highest


def memory(v: View, scale_bytes: float, curve: float) -> list[Markup]:
    """The stack, and with the model the curve and the saved activations; `scale_bytes` fills the
    width of
    the stack, `curve` the height of the curve."""
    c = v.strategy.costs
    parts = [(k, n) for k, n in breakdown(c) if n]
    drawn = [
        legend([(f"m-{k}", PART_NAMES[k], f.size(n)) for k, n in parts]),
        _stack(v, parts, scale_bytes),
    ]
    d = v.detail
    if d is None:
        return [
            *drawn,
            note(
                "The curve over the step, and the activations saved for the backward pass, need"
                " the model."
            ),
        ]
    if not d.training:
        return [
            *drawn,
            note(
                "Nothing is saved from one operator to the next but what is still to be read: a"
                " forward pass has no curve."
            ),
        ]
    s = series(d)
    return [*drawn, _curve(v, s, curve, span_text(d)), _kept(s, d.pipeline)]


def _stack(v: View, parts: Sequence[tuple[str, int]], scale: float) -> Markup:
    c = v.strategy.costs
    cells = [
        el(
            "i",
            class_=f"m-{k}",
            style=f"width:{100 * n / scale:.2f}%",
            title=f"{PART_NAMES[k]} {f.size(n)}",
        )
        for k, n in parts
    ]
    low, high = (100 * min(x / scale, 1.0) for x in c["memory_range_bytes"])
    limit = 100 * min(c["memory_limit_bytes"] / scale, 1.0)
    words = ", ".join(f"{PART_NAMES[k]} {f.size(n)}" for k, n in parts)
    return el(
        "div",
        cells,
        el("s", class_="range", style=f"left:{low:.2f}%;width:{max(high - low, 0.2):.2f}%"),
        el("s", class_="limit", style=f"left:{limit:.2f}%"),
        class_="stackbar",
        role="img",
        aria_label=f"memory of a device: {words}",
    )


def span_text(d: Detail) -> str:
    """What the curve is drawn over."""
    if d.pipeline is not None and d.pipeline.schedule != "gpipe":
        return "the last full tick and the end of the step"
    return (
        "the last microbatch and the end of the step"
        if d.pipeline is None and d.micro > 1
        else "the step"
    )


def _curve(v: View, s: Series, scale: float, span: str) -> Markup:
    """Bands over time. The drawing stretches; its texts are set beside it in HTML."""
    top = ROOM * scale
    seconds, total = s.times_s[-1] or 1.0, s.total_bytes
    x = [WIDTH * t / seconds for t in s.times_s]
    limit, peak, peak_x = v.strategy.costs["memory_limit_bytes"], total[s.peak], x[s.peak]
    off, turn = limit > top, WIDTH * s.turn_s / seconds
    marks = round_values(scale)
    ticks = [el("span", f.size(b), style=f"top:{_y(b, top):.2f}%") for b in marks]
    side = f"{' left' if peak_x > 50 else ''}{' above' if _y(peak, top) > 30 else ''}"
    peak_name = el(
        "b",
        f"peak {f.size(peak)}",
        el("small", s.peak_text),
        class_=f"peak{side}",
        style=f"--at:{peak_x:.2f}%;top:{_y(peak, top):.2f}%",
    )
    limit_name = el(
        "b",
        f"{f.size(limit)} usable" + (", far above" if off else ""),
        class_="limitname off" if off else "limitname",
        style=f"top:{0 if off else _y(limit, top):.2f}%",
    )
    names = el(
        "div",
        el("span", "forward" if turn > 18 else "", style=f"width:{turn:.2f}%"),
        el("span", "backward, then the optimizer" if WIDTH - turn > 20 else ""),
        class_="axis-x",
    )
    shown = {s.peak, *plain_line([(a, _y(b, top)) for a, b in zip(x, total, strict=True)])}
    plot = el(
        "div",
        _bands(s, x, top, None if off else limit, marks),
        limit_name,
        peak_name,
        el("i", class_="cursor", hidden=True),
        class_="plot",
        tabindex="0",
        role="img",
        data_points=";".join(f"{s.times_s[k]:.6g},{total[k]:.0f}" for k in sorted(shown)),
        aria_label=f"memory over {span}: peak {f.size(peak)}, {s.peak_text}",
    )
    return el(
        "figure",
        el("p", el("span", span), el("b", f.time(seconds)), class_="cap"),
        el("div", el("div", ticks, class_="axis-y", aria_hidden="true"), plot, class_="chart"),
        names,
        el(
            "p",
            "Point at the curve, or focus it and use the arrow keys.",
            class_="readout",
            aria_live="polite",
        ),
        class_="curve",
    )


def _y(size_bytes: float, top: float) -> float:
    """Where a size lies in a drawing that `top` bytes fill."""
    return HEIGHT * (1 - size_bytes / top)


def _bands(
    s: Series, x: Sequence[float], top: float, limit: float | None, marks: Sequence[float]
) -> Markup:
    """The drawing: grid, bands, the limit where it is inside, and a line at the peak."""
    shapes, sums = [], [0.0] * len(x)
    floor = [(0.0, HEIGHT), (WIDTH, HEIGHT)]
    for part, band in s.bands:
        sums = [a + b for a, b in zip(sums, band, strict=True)]
        line = [(a, _y(b, top)) for a, b in zip(x, sums, strict=True)]
        ceiling = [line[k] for k in plain_line(line)]
        up, down = (
            " L".join(f"{a:.2f} {b:.2f}" for a, b in points) for points in (ceiling, floor[::-1])
        )
        shapes.append(el("path", class_=f"m-{part}", d=f"M{up} L{down} Z"))
        floor = ceiling
    lines = [("grid", 0.0, WIDTH, _y(b, top), _y(b, top)) for b in marks]
    if limit is not None:
        lines.append(("limit", 0.0, WIDTH, _y(limit, top), _y(limit, top)))
    lines.append(("peakline", x[s.peak], x[s.peak], _y(sums[s.peak], top), HEIGHT))
    drawn = [el("line", class_=c, x1=x1, x2=x2, y1=y1, y2=y2) for c, x1, x2, y1, y2 in lines]
    return el(
        "svg",
        drawn[: len(marks)],
        shapes,
        drawn[len(marks) :],
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def plain_line(line: Sequence[tuple[float, float]]) -> list[int]:
    """Which points of a line are enough to draw it: all others are within FINEST of it (Douglas and
    Peucker 1973)."""
    points = np.array(line)
    drawn, parts = {0, len(line) - 1}, [(0, len(line) - 1)]
    while parts:
        a, b = parts.pop()
        if b - a < 2:
            continue
        chord, offsets = points[b] - points[a], points[a + 1 : b] - points[a]
        along = np.clip(offsets @ chord / max(float(chord @ chord), 1e-12), 0.0, 1.0)
        distances = np.hypot(*(offsets - along[:, None] * chord).T)
        k = a + 1 + int(distances.argmax())
        if distances[k - a - 1] > FINEST:
            drawn.add(k)
            parts += [(a, k), (k, b)]
    return sorted(drawn)


def round_values(scale: float) -> list[float]:
    """Three or four round values up to the scale."""
    unit = 1024.0 ** max(0, min(4, next((k for k in (4, 3, 2, 1, 0) if scale >= 1024.0**k), 0)))
    units = scale / unit
    step = next((s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500) if units / s <= 4.5), 500)
    return [k * step * unit for k in range(1, 20) if k * step <= units]


def _kept(s: Series, p: Pipeline | None) -> Markup:
    total = sum(r.saved_bytes for r in s.largest)
    rows = [
        [
            name(short_name(r.id, r.op)),
            r.op,
            f"× {r.repeats:,}" if r.repeats > 1 else "",
            f.size(r.saved_bytes),
        ]
        for r in s.largest[:6]
    ]
    if len(s.largest) > 6:
        rest = el("span", f.plural(len(s.largest) - 6, "other operator"), class_="muted")
        rows.append([rest, "", "", f.size(sum(r.saved_bytes for r in s.largest[6:]))])
    one_repeat = dict(s.bands).get("replay")
    repeat_text = (
        f", and one recomputed repeat takes {f.size(one_repeat[0])} (the paler band)"
        if one_repeat
        else ""
    )
    staged = ""
    if p is not None:
        beside = (
            f" and {p.saved_ticks - p.in_flight:g} beside it" if p.saved_ticks > p.in_flight else ""
        )
        what = {
            "1f1b": "microbatches that may be in flight at a stage",
            ZB_H1: "microbatches that may be in flight at a stage, with gradients that wait",
            "interleaved": "virtual-stage passes that may be in flight at a stage",
        }.get(p.schedule, "ticks")
        staged = f", those of {p.in_flight:,} {what}{beside} together"
    what = el(
        "p",
        f"Activations saved for the backward pass come to {f.size(total)}{staged}{repeat_text}:",
        class_="small",
    )
    items = [
        el("li", el("span", n, " ", el("small", op), " ", el("small", times)), el("b", size))
        for n, op, times, size in rows
    ]
    return join(what, el("ul", items, class_="kept"))
