"""A plan as the report shows it, and the few pieces that every section shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.report.html import figures as f
from planner.report.html.derive import Detail
from planner.report.html.tags import Child, Markup, el, join, name
from planner.report.notation import plain_split
from planner.sharding.notation import spell_split
from planner.strategy.strategy import Strategy

KIND_NAMES = {
    "compute": "kernels",
    "forward": "forward kernels",
    "backward": "backward kernels",
    "recompute": "recomputed kernels",
    "comm": "exposed communication",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
}
PART_NAMES = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "temporary": "temporary",
    "activations": "activations",
}


@dataclass(frozen=True)
class View:
    """letter: "" for a plan by itself, else A or B. file: what it was read from. missing: why there
    is no detail, "" when there is."""

    letter: str
    file: str
    strategy: Strategy
    detail: Detail | None = None
    missing: str = ""

    @property
    def micro(self) -> int:
        """Microbatches of a step."""
        return (
            int(self.strategy.techniques["microbatches"])
            if self.strategy.workload["kind"] == "train"
            else 1
        )


def section(key: str, title: str, about: Child, *body: Child | Sequence[Child]) -> Markup:
    """A titled part of the page; `about` is one sentence on how to read it."""
    head = el(
        "div",
        el("h2", title, id=f"{key}-h"),
        el("p", about, class_="about") if about else None,
        class_="head",
    )
    return el("section", head, *body, id=key, aria_labelledby=f"{key}-h")


def beside(views: Sequence[View], draw: Callable[[View], Child | Sequence[Child]]) -> Markup:
    """One drawing per plan, side by side when there are two."""
    if len(views) == 1:
        return join(draw(views[0]))
    return el("div", [el("div", badge(v), draw(v), class_="col") for v in views], class_="pair")


def badge(v: View) -> Markup:
    """The letter and file of a plan above its column."""
    return el(
        "p",
        el("b", v.letter, class_=f"letter letter-{v.letter.lower()}"),
        " ",
        name(v.file),
        class_="badge",
    )


def note(text: Child) -> Markup:
    """What a drawing leaves out, and what would add it."""
    return el("p", text, class_="note")


def legend(items: Sequence[tuple[str, str, str]]) -> Markup:
    """(class of the swatch, name, figure) in a row."""
    return el(
        "ul",
        [
            el(
                "li",
                el("i", class_=f"swatch {c}"),
                el("span", label),
                el("b", value) if value else None,
            )
            for c, label, value in items
        ],
        class_="legend",
    )


def split_words(split: Mapping[str, Sequence[str]]) -> str:
    """A split in a cell: `n/model`, or whole."""
    return spell_split(split) if split else "whole"


def split_cell(v: View, row: Mapping[str, Any]) -> Markup:
    """A split as it is written, and in plain words."""
    split = row.get("split", {})
    return join(
        name(split_words(split)),
        (
            el("small", plain_split(str(row.get("op", "")), split, dict(v.strategy.mesh_shape)))
            if split
            else None
        ),
    )


def decided(v: View, key: str) -> Mapping[str, Any]:
    """The strategy's row of a node; empty where there is none."""
    return v.strategy.nodes.get(key, {})


def runner_up(row: Mapping[str, Any]) -> Markup | None:
    """The runner-up and its price."""
    other = row.get("runner_up")
    return (
        join(
            name(split_words(other["split"])),
            " ",
            el("span", f.extra(other["extra_s"]), class_="muted num"),
        )
        if other
        else None
    )


def table(
    head: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    right: Sequence[int] = (),
    caption: str = "",
    main: int = 0,
) -> Markup:
    """A table in a box that scrolls sideways by itself. right: columns of numbers. main: the column
    of the figure that ranks the rows; with one, rows of a narrow table become entries of two lines,
    the name and that figure first."""
    cls = lambda i: (  # noqa: E731
        " ".join(c for c, on in (("num", i in right), ("main", main and i == main)) if on) or None
    )
    top = el("tr", [el("th", h, scope="col", class_=cls(i)) for i, h in enumerate(head)])
    label = lambda i: str(head[i]) if main and i and i != main and head[i] else None  # noqa: E731
    body = [
        el(
            "tr",
            [
                el("td", c if c is not None else "", class_=cls(i), data_label=label(i))
                for i, c in enumerate(r)
            ],
        )
        for r in rows
    ]
    drawn = el(
        "table",
        el("caption", caption) if caption else None,
        el("thead", top),
        el("tbody", body),
        class_="ranked" if main else None,
    )
    return el(
        "div", drawn, class_="scroll", tabindex="0", role="region", aria_label=caption or "table"
    )


def meter(value: float, whole: float, kind: str = "bar-ink") -> Markup:
    """A thin bar of a share."""
    return el(
        "span",
        el(
            "i",
            class_=kind,
            style=f"width:{100 * min(1.0, value / whole) if whole > 0 else 0:.2f}%",
        ),
        class_="meter",
        aria_hidden="true",
    )
