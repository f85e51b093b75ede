"""Memory of a device over a step, as it is priced.

Parameters, gradients, optimizer state and temporary space are priced as held all the time; kept activations grow through the forward pass and are
released in reverse by the backward pass. With recompute, one repeat's own activations are priced as space held, too. So the peak is where the last
forward pass ends, and it is the figure of the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.report.html import figures as f
from planner.report.html.bars import timeline
from planner.report.html.derive import Detail, Row, short_name
from planner.report.html.tags import Markup, el, join, name
from planner.report.html.view import PART_NAMES, View, legend, note
from planner.report.summary import breakdown

HELD = ("parameters", "optimizer", "gradients", "temporary")
FAR = 0.4
HEIGHT, WIDTH = 100.0, 100.0
ROOM = 1.09
"""Height of the curve's drawing over what has to be in it: the limit has its name above it."""


@dataclass(frozen=True)
class Series:
    """times_s, kept_bytes: corners of the curve of kept activations over the last microbatch and what follows it. turn_s: where the forward pass ends.
    held: name -> bytes that are there all the time, `replay` included. largest: operators by what they keep."""

    times_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    turn_s: float
    held: tuple[tuple[str, float], ...]
    largest: tuple[Row, ...]
    kept_total: float

    @property
    def peak_bytes(self) -> float:
        """The highest point of everything together."""
        return max(self.kept_bytes, default=0.0) + sum(b for _, b in self.held)


def series(d: Detail) -> Series:
    """The curve of a plan that was worked out. Lengths follow the microbatch's bars, so that both drawings keep the same time."""
    groups: list[list[Row]] = []
    for row in d.rows:
        if row.run >= 0 and groups and groups[-1][0].run == row.run:
            groups[-1].append(row)
        else:
            groups.append([row])
    spans = [_spans(d, rows) for rows in groups]
    times, kept = [0.0], [0.0]
    for (ahead, _), rows in zip(spans, groups, strict=True):
        times.append(times[-1] + ahead)
        kept.append(kept[-1] + sum(r.kept_bytes for r in rows))
    turn = times[-1]
    for (_, back), rows in zip(reversed(spans), reversed(groups), strict=True):
        times.append(times[-1] + back)
        kept.append(max(0.0, kept[-1] - sum(r.kept_bytes for r in rows)))
    end = times[-1] + sum(m.exposed_s for m in d.moves if m.when == "sync") / d.micro
    tail = sum(p.time_s for p in timeline(d).step) - end * d.micro
    times.append(end + max(tail, 0.0))
    kept.append(0.0)
    whole = sum(r.kept_bytes for r in d.rows)
    held = [(k, float(d.parts[k])) for k in HELD if d.parts[k]]
    rest = d.activation_bytes - whole
    if rest > max(1e-3 * d.activation_bytes, 1024):
        held.append(("replay", rest))
    largest = sorted((r for r in d.rows if r.kept_bytes), key=lambda r: (-r.kept_bytes, r.index))
    return Series(tuple(times), tuple(kept), turn, tuple(held), tuple(largest), whole)


def _spans(d: Detail, rows: list[Row]) -> tuple[float, float]:
    """Seconds of a group in one microbatch: forward, and backward with what is replayed."""
    ahead = back = 0.0
    for r in rows:
        ahead += r.forward_s
        back += r.backward_s + r.again_s
        for m in d.at.get(r.index, ()):
            ahead += m.exposed_s if m.when == "forward" else 0.0
            back += m.exposed_s if m.when in ("backward", "again") else 0.0
    return ahead / d.micro, back / d.micro


def curve_bytes(views: Sequence[View], scale_bytes: float) -> float:
    """What fills the height of the curves: the limit, or where all plans stay far below it, a little more than the highest peak."""
    peaks = [float(sum(v.detail.parts.values())) for v in views if v.detail is not None]
    most = max(peaks, default=0.0)
    return scale_bytes if most >= FAR * scale_bytes else 1.25 * most


def memory(v: View, scale_bytes: float, curve: float) -> list[Markup]:
    """The stack, and with the model the curve and what is kept; `scale_bytes` fills the width of the stack, `curve` the height of the curve."""
    c = v.strategy.costs
    parts = [(k, n) for k, n in breakdown(c) if n]
    out = [legend([(f"m-{k}", PART_NAMES[k], f.size(n)) for k, n in parts]), _stack(v, parts, scale_bytes)]
    d = v.detail
    if d is None:
        return [*out, note("The curve over the step, and what is kept for the backward pass, need the model.")]
    if not d.training:
        return [*out, note("Nothing is kept from one operator to the next but what is still to be read: a forward pass has no curve.")]
    s = series(d)
    return [*out, _curve(v, s, curve), _kept(v, s)]


def _stack(v: View, parts: Sequence[tuple[str, int]], scale: float) -> Markup:
    c = v.strategy.costs
    cells = [el("i", class_=f"m-{k}", style=f"width:{100 * n / scale:.2f}%", title=f"{PART_NAMES[k]} {f.size(n)}") for k, n in parts]
    low, high = (100 * min(x / scale, 1.0) for x in c["memory_range_bytes"])
    limit = 100 * min(c["memory_limit_bytes"] / scale, 1.0)
    words = ", ".join(f"{PART_NAMES[k]} {f.size(n)}" for k, n in parts)
    return el("div", cells, el("s", class_="range", style=f"left:{low:.2f}%;width:{max(high - low, 0.2):.2f}%"), el("s", class_="limit", style=f"left:{limit:.2f}%"),
              class_="stackbar", role="img", aria_label=f"memory of a device: {words}")  # fmt: skip


def _curve(v: View, s: Series, scale: float) -> Markup:
    """Bands over time. The drawing stretches; its texts are set beside it in HTML."""
    ticks_at = _ticks(scale)
    whole, scale = s.times_s[-1] or 1.0, ROOM * scale
    x = [WIDTH * t / whole for t in s.times_s]
    y = lambda b: HEIGHT * (1 - b / scale)  # noqa: E731
    shapes, floor = [], 0.0
    for part, size in s.held:
        shapes.append(el("rect", class_=f"m-{part}", x=0.0, y=y(floor + size), width=WIDTH, height=HEIGHT * size / scale))
        floor += size
    line = " L".join(f"{a:.3f} {y(floor + b):.3f}" for a, b in zip(x, s.kept_bytes, strict=True))
    shapes.append(el("path", class_="m-activations", d=f"M0 {y(floor):.3f} L{line} L{WIDTH} {y(floor):.3f} Z"))
    limit = v.strategy.costs["memory_limit_bytes"]
    off = limit > scale
    if not off:
        shapes.append(el("line", class_="limit", x1=0.0, x2=WIDTH, y1=y(limit), y2=y(limit)))
    at = WIDTH * s.turn_s / whole
    shapes.append(el("line", class_="peakline", x1=at, x2=at, y1=y(s.peak_bytes), y2=HEIGHT))
    ticks = [el("span", f.size(b), style=f"top:{y(b):.2f}%") for b in ticks_at]
    grid = [el("line", class_="grid", x1=0.0, x2=WIDTH, y1=y(b), y2=y(b)) for b in ticks_at]
    svg = el("svg", grid, shapes, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none", aria_hidden="true")
    peak = el("b", f"peak {f.size(s.peak_bytes)}", el("small", "end of the forward pass"), class_=f"peak{' left' if at > 55 else ''}{' above' if y(s.peak_bytes) > 30 else ''}",
              style=f"left:{at:.2f}%;top:{y(s.peak_bytes):.2f}%")
    marks = el("b", f"{f.size(limit)} usable" + (", far above" if off else ""), class_="limitname off" if off else "limitname", style=f"top:{0 if off else y(limit):.2f}%")
    step = v.micro > 1
    names = el("div", el("span", "forward", style=f"width:{at:.2f}%"), el("span", "backward, then the optimizer" if WIDTH - at > 20 else ""), class_="axis-x")
    data = ";".join(f"{t:.6g},{k + floor:.0f}" for t, k in zip(s.times_s, s.kept_bytes, strict=True))
    plot = el("div", svg, marks, peak, el("i", class_="cursor", hidden=True), class_="plot", tabindex="0", role="img", data_points=data,
              aria_label=f"memory over the {'last microbatch' if step else 'step'}: peak {f.size(s.peak_bytes)} where the forward pass ends")  # fmt: skip
    head = el("p", el("span", "the last microbatch and the end of the step" if step else "the step"), el("b", f.time(whole)), class_="cap")
    return el("figure", head, el("div", el("div", ticks, class_="axis-y", aria_hidden="true"), plot, class_="chart"), names,
              el("p", "Point at the curve, or focus it and use the arrow keys.", class_="readout", aria_live="polite"), class_="curve")  # fmt: skip


def _ticks(scale: float) -> list[float]:
    """Three or four round values up to the scale."""
    unit = 1024.0 ** max(0, min(4, next((k for k in (4, 3, 2, 1, 0) if scale >= 1024.0**k), 0)))
    most = scale / unit
    step = next((s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500) if most / s <= 4.5), 500)
    return [k * step * unit for k in range(1, 20) if k * step <= most]


def _kept(v: View, s: Series) -> Markup:
    rows = [[name(short_name(r.id, r.op)), r.op, f"× {r.repeats:,}" if r.repeats > 1 else "", f.size(r.kept_bytes)] for r in s.largest[:6]]
    rest = s.kept_total - sum(r.kept_bytes for r in s.largest[:6])
    if rest > 0 and len(s.largest) > 6:
        rows.append([el("span", f.plural(len(s.largest) - 6, "other operator"), class_="muted"), "", "", f.size(rest)])
    replay = dict(s.held).get("replay")
    again = f", and one repeat being run again takes {f.size(replay)}" if replay else ""
    what = el("p", f"At the peak, activations kept for the backward pass are {f.size(s.kept_total)}{again}:", class_="small")
    items = [el("li", el("span", n, " ", el("small", op), " ", el("small", times)), el("b", size)) for n, op, times, size in rows]
    return join(what, el("ul", items, class_="kept"))
