"""The whole page: sections in order, with the style sheet and the script inside.

Nothing is loaded: a content security policy forbids it, and allows this page's own script by its
hash and no other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from planner.report.html import lens, memory, rails, shards, tables, verdict
from planner.report.html.tags import Markup, el, join, name, text
from planner.report.html.view import View, beside, section
from planner.report.summary import title

HOW = {
    "timeline": (
        "Widths are time. Where a part folds several kinds of work, heights are their shares, so"
        " that area is time in every bar."
    ),
    "memory": (
        "What a device holds as it is priced: the whisker is the range, the dashed line what is"
        " usable."
    ),
    "graph": (
        "Rails are what flows between operators, as wide as the bytes that move between devices in"
        " a step. Open a line for its numbers."
    ),
    "shards": "How tensors are cut. Choose a device to see the pieces it holds.",
    "operators": (
        "Kernels of all repeats and microbatches of a device together, without bubbles. A runner-up"
        " is the best other split with everything else kept; its price is what it would add to the"
        " step."
    ),
    "reshards": "Collectives by what they serve. Payload is per device.",
}


def page(views: Sequence[View]) -> str:
    """The page of one plan, or of two side by side: text of a complete HTML document."""
    folder = files("planner.report.html")
    script = folder.joinpath("page.js").read_text("utf-8")
    style = folder.joinpath("page.css").read_text("utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = " and ".join(dict.fromkeys(title(v.strategy) for v in views))
    slots = {
        "title": text(f"{names} · Meshwright"),
        "hash": allowed,
        "style": style,
        "script": script,
        "body": body(views),
        "nav": _nav(views),
    }
    parts = folder.joinpath("page.html").read_text("utf-8").split("%%")
    # Odd pieces are the names of slots; nothing that was filled in is looked at again.
    return "".join(slots[p] if k % 2 else p for k, p in enumerate(parts))


def _sections(views: Sequence[View]) -> list[tuple[str, str]]:
    sections = [
        ("timeline", "Timeline"),
        ("memory", "Memory"),
        ("graph", "Graph"),
        ("shards", "Shards"),
        ("operators", "Operators"),
        ("reshards", "Reshards"),
        ("assumptions", "Assumptions"),
    ]
    return (
        [("changes", "Changes"), *sections[:-1], ("baselines", "Baselines"), *sections[-1:]]
        if len(views) > 1
        else [("baselines", "Baselines"), *sections]
    )


def _nav(views: Sequence[View]) -> Markup:
    return join([el("a", label, href=f"#{key}") for key, label in _sections(views)])


def body(views: Sequence[View]) -> Markup:
    """Everything between the bar at the top and the foot of the page."""
    one = len(views) == 1
    step_s = max(
        max(v.strategy.costs["step_time_s"], v.detail.grad_accumulate_s if v.detail else 0.0)
        for v in views
    )
    bytes_ = (
        max(
            max(c["memory_limit_bytes"], c["memory_range_bytes"][1], c["memory_per_device_bytes"])
            for c in (v.strategy.costs for v in views)
        )
        or 1
    )
    curve = memory.curve_bytes(views, float(bytes_))
    laid = {v.letter: rails.laid_out(v) for v in views}
    widest = max((r.widest_bytes for r in laid.values() if r is not None), default=0.0)
    alone = [
        el("header", verdict.head(views[0]), class_="hero"),
        verdict.single(views[0], tables.baselines(views[0])),
    ]
    top = alone if one else [_both(views), verdict.double(views), verdict.changes(views)]
    return join(
        top,
        section(
            "timeline",
            "Where the step goes",
            HOW["timeline"],
            beside(views, lambda v: lens.lens(v, step_s)),
        ),
        section(
            "memory",
            "Memory over the step",
            HOW["memory"],
            beside(views, lambda v: memory.memory(v, float(bytes_), curve)),
        ),
        section(
            "graph",
            "The graph, folded",
            HOW["graph"],
            beside(views, lambda v: rails.graph(v, laid[v.letter], widest)),
        ),
        section("shards", "Tensors on the mesh", HOW["shards"], beside(views, shards.shards)),
        section(
            "operators", "Costliest operators", HOW["operators"], beside(views, tables.operators)
        ),
        section("reshards", "Costliest reshards", HOW["reshards"], beside(views, tables.reshards)),
        (
            None
            if one
            else section("baselines", "Beside the baselines", None, beside(views, tables.baselines))
        ),
        section(
            "assumptions", "Assumptions and provenance", None, beside(views, verdict.assumptions)
        ),
    )


def _both(views: Sequence[View]) -> Markup:
    heads = [
        el("div", el("b", v.letter, class_=f"letter letter-{v.letter.lower()}"), verdict.head(v))
        for v in views
    ]
    if verdict.head(views[0]) == verdict.head(views[1]):
        return el(
            "header",
            verdict.head(views[0]),
            el(
                "p",
                "Two plans: ",
                name(views[0].file),
                " as A and ",
                name(views[1].file),
                " as B",
                class_="sub",
            ),
            class_="hero",
        )
    return el("header", heads, class_="hero two")
