"""Plans for the tests of the HTML report, hostile names for them, and a page's structure as plain
data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import planner
from planner.commands.common import priced
from planner.report.html.derive import Detail, work_out
from planner.report.html.tags import VOID
from planner.report.html.view import View
from planner.strategy.strategy import Strategy

SPEC = "zoo:gpt-tiny,hidden=256,layers=3"
HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"><svg onload='window.pwned=1'>",
    "' onmouseover='window.pwned=1",
    "</style><b>",
    "<!--",
    "]]>",
    "&lt;b&gt; &amp;",
    "%%script%%",
    "%%body%%",
    "javascript:window.pwned=1",
    "\u202eesrever",
    "a\x00b\x1bc",
    "\ud800 lone",
    "名前/😀/ñ",
    "a" * 400,
    "${pwned}",
    "{{7*7}}",
    "\\u003cscript\\u003e",
    "</title>",
    "</textarea>",
    "-->",
    "`",
)


@cache
def plan(
    pins: str = "",
    spec: str = SPEC,
    workload: str = "train",
    runtime: str = "jax-shard_map",
    devices: int = 8,
) -> Strategy:
    """A small plan on 8 devices; its blocks are a loop where pins do not say otherwise.
    Beside the free one and the one of most pages stand baselines."""
    compared = pins in ("", "tp=2,micro=2")
    if "blocks" not in pins and workload == "train" and runtime == "jax-shard_map":
        pins = f"{pins},blocks=looped".lstrip(",")
    return planner.plan(
        spec,
        devices=devices,
        batch=16,
        pins=pins or None,
        workload=workload,
        runtime=runtime,
        baselines=compared,
    )


@cache
def detail(
    pins: str = "", spec: str = SPEC, workload: str = "train", runtime: str = "jax-shard_map"
) -> Detail:
    """The same, worked out."""
    return work_out(priced(plan(pins, spec, workload, runtime), spec))


def view(pins: str = "", letter: str = "", spec: str = SPEC) -> View:
    """A plan as the page shows it."""
    return View(letter, f"{pins or 'best'}.json", plan(pins, spec), detail(pins, spec))


def hostile_view(letter: str = "") -> View:
    """A plan whose every name is hostile: of the file, the model, nodes, tensors, labels, mesh
    axes, levels, operators, assumptions."""
    s, d = plan("tp=2,micro=2"), detail("tp=2,micro=2")
    bad = lambda text, n: f"{text}{HOSTILE[n % len(HOSTILE)]}"  # noqa: E731
    axes = {a["name"]: bad(a["name"], n) for n, a in enumerate(s.mesh)}

    def swap(value: Any) -> Any:
        if isinstance(value, dict):
            return {axes.get(k, k): swap(v) for k, v in value.items()}
        return (
            [swap(v) for v in value]
            if isinstance(value, list | tuple)
            else axes.get(value, value)
            if isinstance(value, str)
            else value
        )

    ids = {n: bad(n, k) for k, n in enumerate(s.nodes)}
    nodes = {
        ids[n]: {
            **swap(dict(row)),
            "op": bad(row["op"], k),
            "unsupported": bad("", k) if k == 3 else "",
        }
        for k, (n, row) in enumerate(s.nodes.items())
    }
    tensors = {
        bad(n, k): {
            **swap(dict(row)),
            **({"label": bad(row["label"], k)} if "label" in row else {}),
        }
        for k, (n, row) in enumerate(s.tensors.items())
    }
    strategy = replace(
        s,
        model={**s.model, "name": bad("evil", 0), "sha256": HOSTILE[1]},
        nodes=nodes,
        tensors=tensors,
        blocks=tuple({**b, "body": [ids[n] for n in b["body"]]} for b in s.blocks),
        mesh=tuple(
            {**a, "name": axes[a["name"]], "levels": [bad(x, 2) for x in a["levels"]]}
            for a in s.mesh
        ),
        assumptions=HOSTILE,
        topology={**s.topology, "device": bad("gpu", 3)},
        provenance={**s.provenance, "date": HOSTILE[4], "cost_model": HOSTILE[5]},
        baselines={bad(k, 6): v for k, v in s.baselines.items()},
        techniques=swap(dict(s.techniques)),
    )
    rows = tuple(
        replace(r, id=bad(r.id, k), decided=ids[r.decided], op=bad(r.op, k), bound=bad(r.bound, k))
        for k, r in enumerate(d.rows)
    )
    moves = tuple(
        replace(m, what=bad(m.what, k), axes=tuple(axes[a] for a in m.axes))
        for k, m in enumerate(d.moves)
    )
    return View(
        letter, HOSTILE[0] + ".json", strategy, replace(d, rows=rows, moves=moves), HOSTILE[2]
    )


@dataclass
class Page(HTMLParser):
    """Elements in order as (tag, attributes), ids, the text outside scripts and styles, and what
    was wrong with the nesting."""

    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    text: str = ""
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []

    @classmethod
    def of(cls, source: str) -> Page:
        """Read a page."""
        page = cls()
        page.feed(source)
        page.close()
        page.wrong += [f"<{t}> is not closed" for t in page._open]
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len({k for k, _ in attrs}) < len(attrs):
            self.wrong.append(f"<{tag}> says an attribute twice")
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.text += data
