"""The tables of `plan compare` and `plan ops`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from costmodels.hardware.units import show_bytes, show_time
from planner.execution.techniques import phrases, read_table
from planner.report.baselines import MARK_NOTE, baseline_name, mark, ranked, unheld
from planner.report.summary import machine, title
from planner.report.verdict import of_plans
from planner.sharding.notation import spell_rule
from planner.strategy.strategy import Strategy
from planner.strategy.words import tuned_words
from planner.support.text import _AXIS, Style, count, fitted, flops, hang, percent, table, visible

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts

WIDE = 100
UNFOLDED = 40
"""Columns that how a plan is made needs so as not to be folded small."""


def mesh_words(mesh: Mapping[str, int]) -> str:
    """`data 32 x model 2`; axes of one device left out."""
    return " x ".join(f"{a} {n}" for a, n in mesh.items() if n > 1) or "one device"


def comparison(rows: Sequence[tuple[str, Strategy | str]], width: int, colour: bool) -> str:
    """Solvers, then baselines, with the gap each solver proves. `rows` hold a strategy, or why
    there is none."""
    style = Style(colour)
    plans = [(name, s) for name, s in rows if not isinstance(s, str)]
    table_rows = [["", "step", "relative", "memory", "fits", "MFU", "gap", "search", "how"]]
    table_rows += _solver_rows(rows, style)
    lines: list[str] = []
    among = unpinned = tie = ""
    if plans:
        _, s = plans[0]
        head = f"{title(s)} on {machine(s)}, {s.workload['kind']}, batch {s.workload['batch']:,}"
        lines.append(style.bold(head))
        best = min((p.costs for _, p in plans), key=lambda c: c["step_time_s"])
        table_rows += _baseline_rows(s, best, style)
        among, unpinned = of_plans(s), unheld(s, best)
        tie = MARK_NOTE if any(mark(best, row) for row in s.baselines.values()) else ""
    drop = (5, 7) if width < WIDE else ()  # MFU and search time
    table_rows = [[c for i, c in enumerate(row) if i not in drop] for row in table_rows]
    note = (
        f"gap: how far above what is proven of the meshes tried{among}; relative: to the best"
        f" solver{tie}; baselines are tuned too{unpinned}"
    )
    shown = roomy(table_rows, width, (1, 2, 3, 5) if drop else (1, 2, 3, 5, 6, 7))
    return "\n".join([*lines, *shown, *(style.dim(line) for line in hang("", note, width))])


def _solver_rows(rows: Sequence[tuple[str, Strategy | str]], style: Style) -> list[list[str]]:
    """A row per solver; a plan that an earlier solver found too is named instead of repeated."""
    plans = [(name, s) for name, s in rows if not isinstance(s, str)]
    best_s = min((s.costs["step_time_s"] for _, s in plans), default=0.0)
    table_rows: list[list[str]] = []
    shown: list[tuple[str, Strategy]] = []
    for name, s in rows:
        if isinstance(s, str):
            table_rows.append([name, "-", "", "", style.bad("no"), "", "", "", s])
            continue
        gap, seconds = s.solver.get("gap"), s.provenance.get("search_s")
        same = next((other for other, p in shown if p.decisions() == s.decisions()), "")
        how = (
            f"as {same}" if same else mesh_words(dict(s.mesh_shape)) + technique_words(s.techniques)
        )
        shown.append((name, s))
        proven = [
            "" if gap is None else f"{100 * gap:.1f} %",
            "" if seconds is None else show_time(seconds),
        ]
        table_rows.append([style.bold(name), *_cost(s.costs, best_s, style), *proven, how])
    return table_rows


def _baseline_rows(s: Strategy, best: Mapping[str, Any], style: Style) -> list[list[str]]:
    """A row per baseline, those that fit first; best: costs of the best plan."""
    table_rows = []
    for key, row in ranked(s):
        parts = (mesh_words(row["mesh"]), tuned_words(row), mark(best, row))
        how = ", ".join(text for text in parts if text)
        cost = _cost(row, best["step_time_s"], style)
        table_rows.append([baseline_name(key, row), *cost, "", "", how])
    return table_rows


def technique_phrases(t: Mapping[str, Any]) -> list[str]:
    """`ZeRO-1`, `4 microbatches`: what is out of the ordinary."""
    return phrases(read_table(t))


def technique_words(t: Mapping[str, Any]) -> str:
    """`, ZeRO-1, 4 microbatches`: what is out of the ordinary, each after a comma."""
    return "".join(f", {phrase}" for phrase in technique_phrases(t))


def _cost(c: Mapping[str, Any], best: float, style: Style) -> list[str]:
    ratio = f"{c['step_time_s'] / best:.2f}x" if best else ""
    return [
        show_time(c["step_time_s"]),
        ratio,
        show_bytes(c["memory_per_device_bytes"]),
        style.fit(c["fit"]),
        percent(c["model_flops_utilization"]),
    ]


def needed(rows: Sequence[Sequence[str]]) -> int:
    """Columns that the last one of a table needs so as not to be folded small."""
    return min(UNFOLDED, max(visible(row[-1]) for row in rows))


def roomy(
    rows: Sequence[Sequence[str]],
    width: int,
    right: Sequence[int],
    gap: str = "  ",
    need: int | None = None,
) -> list[str]:
    """`fitted`, or where that would leave less than `need` columns (`needed`) to the last one, each
    row's last cell under the row."""
    figures = table([row[:-1] for row in rows], right, gap)
    if width - visible(figures[0]) - len(gap) >= (needed(rows) if need is None else need):
        return fitted(rows, width, right, gap)
    under = [
        (
            []
            if k == 0
            else [
                f"    {line}"
                for line in textwrap.wrap(
                    _AXIS.sub("\\1\u00a0\\2", row[-1]), width - 4, break_on_hyphens=False
                )
            ]
        )
        for k, row in enumerate(rows)
    ]
    return [
        line.replace("\u00a0", " ")
        for row, below in zip(figures, under, strict=True)
        for line in (row, *below)
    ]


def coverage(base: GraphFacts, width: int, colour: bool) -> str:
    """Per operator: nodes, share of the forward FLOPs, and its rule (of the first such node) or the
    reason it is planned whole."""
    style = Style(colour)
    graph = base.graph
    total = sum(r.flops for r in base.rules)
    groups: dict[tuple[str, str], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        groups.setdefault((node.op, base.reasons[i]), []).append(i)
    rows = []
    for (op, reason), nodes in groups.items():
        work = sum(base.rules[i].flops for i in nodes)
        what = (
            style.warn(f"no rule, whole on every device: {reason}")
            if reason
            else spell_rule(base.rules[nodes[0]])
        )
        rows.append(
            (
                -work,
                -len(nodes),
                [op, f"{len(nodes):,}", percent(work / total) if work and total else "", what],
            )
        )
    table_rows = [
        ["operator", "nodes", "FLOPs", "rule (k! stays whole)"],
        *(row for _, _, row in sorted(rows, key=lambda r: (r[0], r[1], r[2][0]))),
    ]
    bad = sum(1 for r in base.reasons if r)
    bad_work = sum(rule.flops for rule, r in zip(base.rules, base.reasons, strict=True) if r)
    share = f", {percent(bad_work / total)} of the FLOPs" if total and bad_work else ""
    verdict = (
        f"{bad} of {len(graph.nodes)} nodes have no rule{share}: they run whole on every device"
        if bad
        else f"all {len(graph.nodes)} nodes have a rule"
    )
    head = (
        f"{graph.name.removeprefix('zoo:')}: {len(graph.nodes):,} nodes, {count(graph.parameters)}"
        f" parameters, {flops(total)} forward at batch {graph.dims.get('batch', 1)}"
    )
    return "\n".join(
        [
            *hang("", head, width),
            "",
            *fitted(table_rows, width, (1, 2)),
            "",
            (style.warn if bad else style.good)(verdict),
        ]
    )
