"""`plan explain FILE NODE --price`: formula, inputs and constants of a node's price, each constant
with its file, line and source, and what such prices were worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.hardware.units import show_bytes, show_time
from costmodels.kernels import slowdown
from costmodels.products import Product, chosen, product_time_s
from costmodels.ranges import TimeRange
from planner.pricing.pricer import Pricer
from planner.pricing.terms import Term, Terms
from planner.support.text import Style, hang, percent, table

UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))


def price_text(
    terms: Terms,
    detail: Mapping[str, Any],
    pricer: Pricer,
    spread: TimeRange,
    step_s: float,
    width: int,
    style: Style,
) -> str:
    """The lines behind a node's price. detail: its row of planner.pricing.breakdown."""
    kernels = detail["kernels"]
    lines = ["", style.bold("price of its kernels, of one device")]
    lines += _parts(terms) if terms.parts else _kernels(terms, pricer, kernels["bound_by"])
    lines += hang("", _sum(terms, kernels, step_s), width)
    lines += _moves(detail["moves"], pricer, width, style)
    lines += ["", style.bold("constants")]
    rows = [[c.name, c.value, c.place] for c in terms.constants]
    for row, constant in zip(table(rows), terms.constants, strict=True):
        lines.append(row)
        if constant.source:
            lines += hang("    ", constant.source, width)
    slower = slowdown(pricer.topology.device, pricer.rates, pricer.topology.devices)
    if slower != 1.0:
        note = (
            f"rates above are already {percent(slower - 1)} lower than the device's alone, as"
            f" {pricer.topology.devices:,} devices wait for the slowest (stragglers)"
        )
        lines += hang("", note, width)
    return "\n".join([*lines, "", *_worth(spread, step_s, width, style)])


def _kernels(terms: Terms, pricer: Pricer, bound_by: str) -> list[str]:
    """A row per kernel: what it computes and moves, at which rates, and what sets its time.
    bound_by: what sets the node's, which says why it has none."""
    rows = [["", "computes", "at", "moves", "at", "takes", "bound by"]]
    device = pricer.device
    for term in _merged(terms.kernels):
        rate = _rate(term, pricer)
        bandwidth = device.memory_bytes_per_s * device.memory_efficiency
        sides = {
            "arithmetic": term.flops / rate if rate else 0.0,
            "memory": term.moved_bytes / bandwidth,
            "the launch": device.launch_s,
        }
        rows.append(
            [
                f"{term.often:,.0f} x" if term.often > 1 else "",
                _flops(term.flops) if term.flops else "-",
                f"{rate / 1e12:.0f} TFLOP/s {term.dtype}" if rate else "-",
                show_bytes(term.moved_bytes),
                f"{bandwidth / 1e9:,.0f} GB/s",
                show_time(term.seconds),
                max(sides, key=lambda k: sides[k]) if term.seconds else "nothing",
            ]
        )
    if len(rows) == 1:
        return [bound_by.replace("nothing", "no kernel", 1)]
    lines = table(rows, right=(0, 1, 2, 3, 4, 5))
    products = [term for term in _merged(terms.kernels) if term.extents]
    return [*lines, *(_waves(term, pricer) for term in products), *_beside(terms, pricer)]


def _beside(terms: Terms, pricer: Pricer) -> list[str]:
    """What passes of fused attention take beside their arithmetic."""
    if pricer.device.attention is None:
        return []
    shares = [
        (f"{pricer.device.attention.passes[backward]:g} times", which)
        for which, backward in (("forward", False), ("backward", True))
        if any(k.attention and k.attention.backward is backward for k in terms.kernels)
        if pricer.device.attention.passes[backward]
    ]
    if not shares:
        return []
    parts_text = ", ".join(f"{which} {share}" for share, which in shares)
    return [f"attention takes its arithmetic and what it moves: {parts_text}"]


def _parts(terms: Terms) -> list[str]:
    """A row for each part of what a framework's kernels take."""
    rows = [["", "forward", "at", "takes", "backward"]]
    for part in terms.parts:
        cells = ["-", "-"]
        if part.computes:
            cells = [_flops(part.amount), f"{part.per_s / 1e12:.0f} TFLOP/s"]
        elif part.amount:
            cells = [show_bytes(part.amount), f"{part.per_s / 1e9:,.0f} GB/s"]
        rows.append([part.what, *cells, show_time(part.forward_s), show_time(part.backward_s)])
    return table(rows, right=(1, 2, 3, 4))


def _waves(term: Term, pricer: Pricer) -> str:
    """How the device's library multiplies a product."""
    rows, columns, sums, batch = (round(x) for x in term.extents)
    (tall, wide), waves, pieces = chosen(pricer.device, term.extents, term.dtype)
    of = f"{batch:,} x " if batch > 1 else ""
    cut = f", sums in {pieces} pieces" if pieces > 1 else ""
    return (
        f"{of}[{rows:,}, {sums:,}] x [{sums:,}, {columns:,}]: tiles of {tall} x {wide} in"
        f" {waves:,} wave{'s' if waves > 1 else ''}{cut}"
    )


def _merged(kernels: Sequence[Term]) -> list[Term]:
    """Equal kernels as one row."""
    often_of: dict[Term, float] = {}
    for k in kernels:
        key = replace(k, often=0.0)
        often_of[key] = often_of.get(key, 0.0) + k.often
    return [replace(key, often=often) for key, often in often_of.items()]


def _rate(term: Term, pricer: Pricer) -> float:
    """FLOP/s of a kernel, 0 for one that computes no products."""
    if not term.flops:
        return 0.0
    device = pricer.device
    if term.extents:
        extents = (np.array([x]) for x in term.extents)
        product = Product(*extents, convolution=term.convolution)
        seconds = product_time_s(device, product, np.zeros(1), term.dtype)
        return term.flops / float(seconds[0])
    share = device.efficiency(term.flops)
    if term.attention and device.attention:
        share = device.attention.efficiency(term.attention)
    return device.peak(term.dtype) * share


def _flops(flops: float) -> str:
    scale, unit = next((s, u) for s, u in UNITS if flops >= s or s == 1.0)
    return f"{flops / scale:.3g} {unit}"


def _sum(terms: Terms, kernels: Mapping[str, Any], step_s: float) -> str:
    """How the kernels make the node's share of a step."""
    noted = sum(k.often * k.seconds for k in terms.kernels)
    text = f"forward {show_time(terms.forward_s)}"
    if terms.backward_s:
        text += f", backward {show_time(terms.backward_s)}"
        if abs(noted - terms.forward_s) < 1e-9 * noted:
            text += f" ({terms.backward_s / terms.forward_s:.3g} x forward)"
    if kernels["again"]:
        text += ", forward once more in the backward pass"
    share = percent(kernels["step_s"] / step_s) if step_s else "-"
    return f"{text}; x {kernels['times']:,} = {show_time(kernels['step_s'])} a step, {share} of it"


def _moves(
    moves: Sequence[Mapping[str, Any]], pricer: Pricer, width: int, style: Style
) -> list[str]:
    """The collectives on its tensors, each with the line that prices it."""
    if not moves:
        return []
    lines = ["", style.bold("price of its collectives")]
    for move in moves:
        each_bytes = move["payload_bytes"] / move["count"]
        axes = tuple(move["axes"].split("+"))
        latency, slope = min(
            pricer.lines(move["kind"], axes), key=lambda line: line[0] + line[1] * each_bytes
        )
        text = (
            f"{move['phase']}: {move['kind']} over {move['axes']}: {show_time(latency)} +"
            f" {show_bytes(each_bytes)} / {1e-9 / slope:,.0f} GB/s"
            f" = {show_time(latency + slope * each_bytes)}, x {move['count']:,}"
        )
        together = latency + slope * each_bytes > 1.001 * move["time_s"] / move["count"]
        if together:
            text += f"; latencies shared with others: {show_time(move['time_s'])} a step"
        lines += hang("", text, width)
    return lines


def _worth(spread: TimeRange, step_s: float, width: int, style: Style) -> list[str]:
    """How often such prices were wrong."""
    low, high = spread.ends(step_s)
    return [
        style.bold("what such a price was worth"),
        *hang(
            "",
            "no kernel of a published run was timed alone, whole steps were: four in five lie"
            f" between {percent(-spread.below)} and +{percent(spread.above)} of their price, here"
            f" {show_time(low)} to {show_time(high)}{_of_runs(spread)}"
            + (f"; wide as {'; '.join(spread.why)}" if spread.why else ""),
            width,
        ),
    ]


def _of_runs(spread: TimeRange) -> str:
    """How many runs a range is of, and where it stands."""
    of = f"{spread.runs} runs of {spread.sources} sources, " if spread.runs else ""
    return f" ({of}costmodels/runtimes/ranges.toml)"
