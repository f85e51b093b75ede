"""How each main tensor lies on the mesh: its first two cut dims as a rectangle, cut as the devices
hold it, with the piece of one device marked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from planner.report.html import figures as f
from planner.report.html.tags import Markup, el, name
from planner.report.html.view import View
from planner.report.notation import extent_names, residual, short_labels
from planner.sharding.layout import STAGE
from planner.sharding.notation import cells
from planner.strategy.notation import weight_groups
from planner.strategy.strategy import Strategy

TENSORS = 7
SIDE = 132.0
APART = 3.0
"""Pixels between cuts: more of them are drawn as a hatch of this width."""
LEAST = {"mine": 5.0, "state": 2.5}
"""Pixels of a marked piece at least."""
ACROSS = 64
"""Devices in a row of the drawn mesh at most."""
CELLS = 1024
"""Devices up to which the mesh is drawn."""


@dataclass(frozen=True)
class Card:
    """A tensor to draw: axes per dim as stored, and as the optimizer's state is cut (empty: the
    same). stages: pipeline stages that it and its equals are divided over."""

    title: str
    notation: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    state: tuple[tuple[str, ...], ...]
    count: int
    stages: int = 1


def cards(s: Strategy) -> list[Card]:
    """The heaviest groups of parameters, and what travels between repeated blocks."""
    groups = [g for g in weight_groups(s) if len(g.shape) > 1] or weight_groups(s)
    names, labels = extent_names(s), short_labels([g.label for g in groups])
    by_key: dict[tuple, Mapping[str, Any]] = {}
    for t in s.tensors.values():
        if "label" in t and t.get("zero"):
            by_key.setdefault((tuple(t["shape"]), tuple(tuple(a) for a in t["layout"])), t["zero"])
    cards_drawn = []
    for g in groups[:TENSORS]:
        zero = by_key.get((g.shape, g.dims))
        state = tuple(
            (*a, *zero["axes"]) if zero and zero["level"] < 3 and i == zero["dim"] else a
            for i, a in enumerate(g.dims)
        )
        label = re.sub(r"[./]weight$", "", labels[g.label])
        cards_drawn.append(
            Card(
                title=label,
                notation="W" + cells([names.get(n, f"{n:,}") for n in g.shape], g.dims),
                shape=g.shape,
                dims=g.dims,
                state=() if state == g.dims else state,
                count=g.count,
                stages=g.stages,
            )
        )
    x = residual(s, names)
    for block in s.blocks[:1]:
        last: Mapping[str, Any] = s.nodes.get(block["body"][-1], {}) if block["body"] else {}
        row = next(
            (
                s.tensors[o]
                for o in last.get("outputs", ())
                if o in s.tensors and s.tensors[o]["shape"]
            ),
            None,
        )
        if x and row is not None:
            cards_drawn.append(
                Card(
                    title="between blocks",
                    notation=x,
                    shape=tuple(row["shape"]),
                    dims=tuple(tuple(a) for a in row["layout"]),
                    state=(),
                    count=1,
                )
            )
    return cards_drawn


def shards(v: View) -> list[Markup]:
    """The mesh with a device to choose, and the cards."""
    sizes = dict(v.strategy.mesh_shape)
    drawn = [_card(c, sizes) for c in cards(v.strategy)]
    return [_mesh(v, sizes), el("div", drawn, class_="cards")]


def _mesh(v: View, sizes: Mapping[str, int]) -> Markup:
    prefix = f"ax{v.letter.lower()}"
    sliders = [
        el(
            "label",
            el("span", name(a), " ", el("output", "0"), f" of {n:,}"),
            el(
                "input",
                type="range",
                min="0",
                max=str(n - 1),
                value="0",
                step="1",
                data_axis=a,
                id=f"{prefix}{k}",
            ),
            class_="slider",
        )
        for k, (a, n) in enumerate(sizes.items())
        if n > 1
    ]
    devices = prod(sizes.values())
    grid = None
    if 1 < devices <= CELLS:
        inner = list(sizes.values())[-1]
        down = inner * inner < devices <= ACROSS * inner  # the longer side lies across
        across = (
            inner if down or devices // inner <= ACROSS >= inner else _across(list(sizes.values()))
        )
        cell = max(3.0, min(16.0, 560.0 / (devices // across if down else across)))
        marks = [el("i", data_device=str(k)) for k in range(devices)]
        grid = el(
            "div",
            marks,
            class_="devices down" if down else "devices",
            style=f"--cols:{across};--rows:{across};--cell:{cell:.1f}px",
            aria_hidden="true",
        )
    pick = el("p", "Device ", el("b", "0", class_="device"), f" of {devices:,}", class_="cap")
    return el(
        "div",
        el("div", pick, sliders, class_="pick"),
        grid,
        class_="mesh",
        data_mesh=json.dumps([[a, n] for a, n in sizes.items()]),
    )


def _across(sizes: Sequence[int]) -> int:
    """Devices in a row of a mesh that is too long for one axis a row: whole inner axes, then as
    much of the next as fits; where next to nothing does, the rows are cut anywhere."""
    row = 1
    for n in reversed(sizes):
        part = max(k for k in range(1, n + 1) if n % k == 0 and (k == 1 or row * k <= ACROSS))
        row *= part
        if part < n:
            break
    return row if row >= 8 else ACROSS


def _pieces(n: int, axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return prod(sizes.get(a, 1) for a in axes)


def _card(c: Card, sizes: Mapping[str, int]) -> Markup:
    devices = prod(sizes.values())
    local = [-(-n // _pieces(n, a, sizes)) for n, a in zip(c.shape, c.dims, strict=True)]
    pieces = prod(_pieces(n, a, sizes) for n, a in zip(c.shape, c.dims, strict=True))
    devices //= c.stages
    holders = devices // max(pieces, 1)
    text = (
        f"{' × '.join(f'{n:,}' for n in c.shape)}, of which a device holds"
        f" {' × '.join(f'{n:,}' for n in local)}"
    )
    everywhere = "whole on every device" + " of its stage" * (c.stages > 1)
    placement = (
        everywhere
        if pieces == 1 and devices > 1
        else f.plural(pieces, "piece")
        + (f", each on {holders:,} devices" if holders > 1 else ", each on one device")
    )
    lines: list[Markup | None] = [el("p", placement, class_="small")]
    if c.stages > 1:
        lines.append(el("p", f"each on one of {c.stages} pipeline stages", class_="small"))
    if c.state:
        n = prod(_pieces(n, a, sizes) for n, a in zip(c.shape, c.state, strict=True))
        lines.append(
            el(
                "p",
                el("i", class_="swatch m-optimizer"),
                f" optimizer state in {f.plural(n, 'piece')}",
                class_="small",
            )
        )
    title = el("h3", name(c.title), el("small", f"× {c.count:,}") if c.count > 1 else None)
    return el(
        "article",
        title,
        el("p", name(c.notation), class_="notation"),
        _drawing(c, sizes),
        el("p", text, class_="small num"),
        lines,
        class_="card",
    )


def _drawing(c: Card, sizes: Mapping[str, int]) -> Markup:
    """Rows and columns are the first two cut dims, else the largest ones; a single dim is a
    ribbon."""
    order = sorted(
        range(len(c.shape)),
        key=lambda d: (not c.dims[d], not (c.state and c.state[d]), -c.shape[d], d),
    )
    down, across = (
        (sorted(order[:2]) + [-1])[:2] if len(order) > 1 else (-1, order[0] if order else -1)
    )
    rows, columns = (c.shape[d] if d >= 0 else 1 for d in (down, across))
    longest = max(rows, columns, 1)
    h, w = (
        max(SIDE * n / longest, SIDE * 0.34 if d >= 0 else 18.0)
        for n, d in ((rows, down), (columns, across))
    )
    shapes = [el("rect", x=0.5, y=0.5, width=w, height=h, class_="whole")]
    counts = [_pieces(0, c.dims[d], sizes) if d >= 0 else 1 for d in (down, across)]
    for n, length, other, flat in ((counts[0], h, w, True), (counts[1], w, h, False)):
        shapes += _cuts(n, length, other, flat)
    marks = [("mine", c.dims), ("state", c.state)] if c.state else [("mine", c.dims)]
    for kind, dims in marks:
        m, n = (_pieces(0, dims[d], sizes) if d >= 0 else 1 for d in (down, across))
        # Each dim's axes, outermost first, and its length: the script moves the piece to the chosen
        # device with them.
        data = json.dumps(
            [[list(dims[d]) if d >= 0 else [], side] for d, side in ((down, h), (across, w))]
            + [[[STAGE] if c.stages > 1 else [], 0]]
        )
        shapes.append(
            el(
                "rect",
                x=0.5,
                y=0.5,
                width=max(w / n, LEAST[kind]),
                height=max(h / m, LEAST[kind]),
                class_=kind,
                data_piece=data,
            )
        )
    label = f"{c.title}: {counts[0]} by {counts[1]} pieces"
    hidden = [n for i, n in enumerate(c.shape) if i not in (down, across) and n > 1]
    rest = (
        el("p", f"further dims {', '.join(f'{n:,}' for n in hidden)}: whole", class_="small")
        if hidden and not any(c.dims[i] for i in range(len(c.shape)) if i not in (down, across))
        else None
    )
    svg = el(
        "svg",
        shapes,
        viewBox=f"0 0 {w + 1:.0f} {h + 1:.0f}",
        width=f"{w + 1:.0f}",
        height=f"{h + 1:.0f}",
        role="img",
        aria_label=label,
    )
    return el("div", svg, rest, class_="drawing")


def _cuts(n: int, length: float, other: float, flat: bool) -> list[Markup]:
    """Lines between n pieces of a side; where they would run together, a hatch that says so."""
    dense = length / n < APART
    n = int(length / APART) if dense else n
    positions = [0.5 + length * k / n for k in range(1, n)]
    ends = [(0.5, other + 0.5, a, a) if flat else (a, a, 0.5, other + 0.5) for a in positions]
    return [
        el("line", class_="cut dense" if dense else "cut", x1=x1, x2=x2, y1=y1, y2=y2)
        for x1, x2, y1, y2 in ends
    ]
