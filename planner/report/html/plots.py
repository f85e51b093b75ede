"""Timeline and memory of a plan as one PNG: the page's two drawings for slides and pull requests.
matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.report.html.bars import KINDS, Part, timeline
from planner.report.html.lens import STAGES, TICK
from planner.report.html.memory import FAR, round_values, series, span_text
from planner.report.html.tags import clean
from planner.report.html.view import KIND_NAMES, PART_NAMES
from planner.report.summary import machine, title
from planner.strategy.strategy import Strategy
from planner.support.atomic_write import replacing

if TYPE_CHECKING:
    from planner.report.html.derive import Detail

COLOURS = {
    "forward": "#5d91c4",
    "backward": "#2f5f93",
    "recompute": "#a9c3dc",
    "comm": "#d9703a",
    "optimizer": "#5c9470",
    "bubble": "#c9c4bb",
}
BANDS = {
    "parameters": "#2f5f93",
    "optimizer": "#5c9470",
    "gradients": "#7ba7d1",
    "temporary": "#b9b3a8",
    "replay": "#ead6a5",
    "activations": "#d3a63c",
}


def png(s: Strategy, d: Detail, path: Path) -> None:
    """Write the picture. Raises PlanError P067 without matplotlib, P056 where the file cannot be
    written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise PlanError(
            "P067",
            "--png draws with matplotlib, which is not installed",
            help=['pip install "meshwright[plot]"', "--html needs nothing"],
        ) from e
    t = timeline(d)
    stages = min(len(t.stages), STAGES)
    tall = max(1.0, 0.3 * stages)
    figure = Figure(figsize=(10, 5.2 + tall), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rows: Any = figure.subplots(3, 1, height_ratios=[tall, 1, 4])
    head = clean(f"{title(s)} on {machine(s)}: {show_time(d.step_s)} a step").replace("$", r"\$")
    figure.suptitle(head, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if d.pipeline is not None:
        of = f"first {stages} of {len(t.stages)} stages" if stages < len(t.stages) else "by stage"
        _bars(rows[0], t.stages[:stages], f"the step, {of}")
        rows[0].set_yticks(
            [k + 0.5 for k in range(stages)], [f"stage {k}" for k in range(stages)], fontsize=8
        )
    else:
        _bars(rows[0], [t.step], "the step")
    _bars(
        rows[1],
        [t.micro],
        (
            TICK[d.pipeline.schedule]
            if d.pipeline is not None
            else "one microbatch"
            if d.micro > 1
            else "its passes"
        ),
    )
    present = [k for k in KINDS if any(p.shares.get(k) for p in t.step)]
    handles = [rows[0].bar(0, 0, color=COLOURS[k])[0] for k in present]
    rows[0].legend(
        handles,
        [KIND_NAMES[k] for k in present],
        ncols=len(present),
        loc="lower right",
        bbox_to_anchor=(1, 1.0),
        frameon=False,
        fontsize=8,
    )
    _memory(rows[2], s, d)
    try:
        with replacing(path) as file:
            figure.savefig(file, format="png", metadata={"Software": None})
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}: {e.strerror}",
            help=["--png a file in a folder that exists and is writable"],
        ) from e


def _bars(ax: Any, lines: Sequence[tuple[Part, ...]], label: str) -> None:
    """A line or several, the first on top, of parts side by side; kinds share a part's height by
    their time."""
    high = 1.0 if len(lines) == 1 else 0.86
    for line, parts in enumerate(lines):
        start_s = 0.0
        for part in parts:
            floor = float(line)
            for kind in KINDS:
                share = high * part.shares.get(kind, 0.0) / (part.time_s or 1.0)
                if share:
                    ax.bar(
                        start_s,
                        share,
                        part.time_s,
                        bottom=floor,
                        align="edge",
                        color=COLOURS[kind],
                        linewidth=0,
                    )
                floor += share
            start_s += part.time_s
    ax.set(xlim=(0, start_s or 1.0), ylim=(len(lines), 0) if len(lines) > 1 else (0, 1), yticks=[])
    ax.set_title(f"{label}, {show_time(start_s)}", loc="left", fontsize=9)
    _time_axis(ax, start_s)


def _time_axis(ax: Any, end: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: show_time(x) if x else "0"))
    ax.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _memory(ax: Any, s: Strategy, d: Detail) -> None:
    """Bands over the last microbatch and the end of the step, or in inference one level."""
    c = series(d)
    times, turn, peak = c.times_s, c.times_s[c.peak], c.total_bytes[c.peak]
    names = {**PART_NAMES, "replay": "one recomputed repeat"}
    ax.stackplot(
        times,
        *(band for _, band in c.bands),
        colors=[BANDS[k] for k, _ in c.bands],
        labels=[names[k] for k, _ in c.bands],
        linewidth=0,
    )
    limit = s.costs["memory_limit_bytes"]
    off = peak < FAR * limit  # drawn larger then, as on the page
    top = 1.25 * peak if off else max(limit, peak)
    if not off:
        ax.axhline(limit, color="#1b2026", linestyle="--", linewidth=1)
    ax.annotate(
        f"{show_bytes(limit)} usable" + (", far above" if off else ""),
        (times[-1], top if off else limit),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    text = f"peak {show_bytes(peak)}" + (f", {c.peak_text}" if d.training else "")
    ax.annotate(
        text,
        (turn, peak),
        xytext=(6 if turn < times[-1] / 2 else -6, 5),
        textcoords="offset points",
        ha="left" if turn < times[-1] / 2 else "right",
        fontsize=8,
    )
    ax.plot([turn], [peak], "o", color="#1b2026", markersize=4)
    marks = round_values(top)
    ax.set(xlim=(0, times[-1] or 1.0), ylim=(0, 1.12 * top), ylabel="a device")
    ax.set_yticks(marks, [show_bytes(x) for x in marks])
    ax.set_title(f"memory over {span_text(d)}", loc="left", fontsize=9)
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=len(c.bands),
        frameon=False,
        fontsize=8,
    )
    _time_axis(ax, times[-1])
