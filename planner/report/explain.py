"""Why a plan is as it is, read from its file: the whole plan, or one node with what it costs
(planner.pricing.breakdown)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError, did_you_mean
from planner.execution.save_policies import offloaded_values
from planner.execution.techniques import phrases
from planner.pricing.cost import OTHER_PARTS
from planner.report.baselines import baseline_name, ranked, ties
from planner.report.explain_stages import asked_repeat, named_repeat, on_stages, plain, why_stages
from planner.report.findings import finding_lines
from planner.report.laid_out import layouts, traffic
from planner.report.proof import covered, extent
from planner.report.summary import (
    assumed,
    breakdown,
    incremental_phrases,
    machine,
    recompute_text,
    solver_text,
    techniques,
    title,
)
from planner.report.verdict import of_plans
from planner.sharding.notation import cells, spell_split
from planner.strategy.stages import stages
from planner.strategy.strategy import Strategy
from planner.strategy.words import tuned_words
from planner.support.emphasis import one_line
from planner.support.text import Style, hang, labelled, pack, percent, short, signed_time, table

SHOWN = 8
GAP = "   "
NEAR_FULL = 0.9


def explain(strategy: Strategy, width: int = 100, colour: bool = False) -> str:
    """The reasoning behind a plan: its mesh, what was tried, what binds, where the time goes, the
    closest calls, and each baseline's difference."""
    style = Style(colour)
    parts = [
        _choice(strategy, width, style),
        _binds(strategy, width, style),
        labelled("stages", why_stages(strategy), width, style),
        [*traffic(strategy.costs, width, style), *layouts(strategy, width, style)],
        _costly(strategy, width, style),
        _calls(strategy, width, style),
        _others(strategy, width, style),
        finding_lines(strategy, width, style),
        [line for text in assumed(strategy) for line in hang("assumed ", text, width)],
    ]
    return "\n".join(line for part in parts if part for line in ("", *part)).lstrip("\n")


def _choice(s: Strategy, width: int, style: Style) -> list[str]:
    mesh = " x ".join(
        (
            f"{a['name']} {a['size']} ({' + '.join(a['levels'])})"
            if a["levels"]
            else f"{a['name']} {a['size']}"
        )
        for a in s.mesh
    )
    origin = str(s.solver.get("from", "plan"))
    lines = [style.bold(f"{title(s)} on {machine(s)}")]
    lines += labelled("chosen", [f"mesh {mesh}", *techniques(s)], width, style)
    if origin not in ("plan", "manual") and origin in s.baselines:
        lines += labelled(
            "",
            [
                f"this is the baseline `{baseline_name(origin, s.baselines[origin])}`: no searched"
                " plan was cheaper"
            ],
            width,
            style,
        )
    if s.provenance.get("pins"):
        from planner.strategy.pins import pins_of

        lines += labelled(
            "pins",
            [*(words for words, _ in pins_of(s).each()), "(--pins: what each costs)"],
            width,
            style,
        )
    lines += labelled("search", [solver_text(s)], width, style)
    if s.solver.get("bound_s") and s.solver["status"] != "optimal":
        lines += labelled(
            "",
            [
                f"no plan of {covered(s.solver)}{of_plans(s)} can be below"
                f" {show_time(s.solver['bound_s'])}"
            ],
            width,
            style,
        )
    lines += labelled("covers", words, width, style) if (words := extent(s.solver)) else []
    return lines + (
        labelled("kept", incremental_phrases(kept), width, style)
        if (kept := s.provenance.get("incremental"))
        else []
    )


NOT_TAKEN = (
    "it needs too much memory, or the solver's objective and the final price disagree about it"
)
"""Why a split that is faster by itself is not in the plan."""


def binds(s: Strategy) -> list[str]:
    """What limits the plan, the strongest first, a phrase each."""
    c = s.costs
    step = c["step_time_s"] or 1.0
    summed = " and sums of gradients over microbatches" if s.techniques["microbatches"] > 1 else ""
    if steps := c.get("newton_schulz_time_s"):
        summed += f" (Newton-Schulz steps {percent(steps / step)})"
    shares = [
        (c["compute_time_s"] / step, "compute"),
        (c["exposed_communication_time_s"] / step, "exposed communication"),
        (c["optimizer_time_s"] / step, f"the optimizer{summed}"),
        (c["bubble_time_s"] / step, "pipeline bubbles"),
        *((c.get(part, 0.0) / step, words) for part, words in OTHER_PARTS.items()),
    ]
    limits = [
        f"{what} {percent(share)} of the step"
        for share, what in sorted(shares, key=lambda p: -p[0])
        if share >= 0.005
    ]
    exposed = sorted(c.get("exposed_s_by_collective", {}).items(), key=lambda kv: -kv[1])
    if exposed and exposed[0][1] / step >= 0.02:
        kind, _, axes = exposed[0][0].partition(" ")
        levels = dict.fromkeys(
            level for a in s.mesh if a["name"] in axes.split("+") for level in a["levels"]
        )
        limits.append(
            f"the largest collective, {kind} over {axes} ({' + '.join(levels)}),"
            f" {percent(exposed[0][1] / step)}"
        )
    full = (
        c["memory_per_device_bytes"] / c["memory_limit_bytes"] if c["memory_limit_bytes"] else 0.0
    )
    spent = [f"{stages(s)} pipeline stages"] if stages(s) > 1 else []
    if s.techniques["zero_stage"]:
        spent.append(f"ZeRO-{s.techniques['zero_stage']}")
    if c["recompute_time_s"]:
        spent.append(f"recompute ({show_time(c['recompute_time_s'])})")
    if s.techniques["microbatches"] > 1:
        spent.append(f"{s.techniques['microbatches']} microbatches")
    spent += phrases(s.chosen, ("offload",))
    largest, size = max(breakdown(c), key=lambda part: part[1])
    text = (
        f"memory {f'{100 * full:.0f} %' if full >= 0.01 else 'under 1 %'} full, most of it"
        f" {largest} ({show_bytes(size)})"
    )
    limits.append(
        text
        + (f"; spent on it: {', '.join(spent)}" if spent else "")
        + ("" if full >= NEAR_FULL or spent else ": does not bind")
    )
    return limits


def _binds(s: Strategy, width: int, style: Style) -> list[str]:
    return labelled("binds", binds(s), width, style)


def by_operator(s: Strategy) -> list[tuple[str, int, float]]:
    """(operator, nodes, seconds of kernels a step), the costliest first."""
    micro = int(s.techniques["microbatches"])
    sums: dict[str, list[float]] = {}
    for row in s.nodes.values():
        cell = sums.setdefault(row["op"], [0, 0.0])
        cell[0] += row.get("times", 1)
        cell[1] += row.get("time_s", 0.0) * micro
    return sorted(((op, int(n), t) for op, (n, t) in sums.items()), key=lambda r: (-r[2], r[0]))


def _costly(s: Strategy, width: int, style: Style) -> list[str]:
    rows = by_operator(s)
    total = sum(t for _, _, t in rows) or 1.0
    table_rows = [["kernels of", "nodes", "a step", "share"]]
    table_rows += [[op, f"{n:,}", show_time(t), percent(t / total)] for op, n, t in rows[:SHOWN]]
    if len(rows) > SHOWN:
        table_rows.append(
            [
                f"{len(rows) - SHOWN} more",
                f"{sum(n for _, n, _ in rows[SHOWN:]):,}",
                show_time(sum(t for *_, t in rows[SHOWN:])),
                percent(sum(t for *_, t in rows[SHOWN:]) / total),
            ]
        )
    return table(table_rows, right=(1, 2, 3))


def brief(split: Mapping[str, Sequence[str]]) -> str:
    """A split in a table cell."""
    return spell_split(split) if split else "whole"


def _calls(s: Strategy, width: int, style: Style) -> list[str]:
    """Decisions with the cheapest alternatives: where the cost model's error could turn the
    choice."""
    rows, alike_seen = list[tuple[float, str, Mapping[str, Any]]](), set[str]()
    for name, row in s.nodes.items():
        if (other := row.get("runner_up")) is None:
            continue
        alike = f"{row['op']} {row['split']} {other}"
        if "nodes" not in other or alike not in alike_seen:  # layers that decide alike say the same
            rows.append((other["extra_s"], name, row))
        alike_seen.add(alike)
    if not rows:
        return []
    rows.sort(key=lambda r: (r[0], r[1]))
    faster, rows = [r for r in rows if r[0] < 0], [r for r in rows if r[0] >= 0]
    lines: list[str] = []
    if rows:
        splits = [["split", "runner-up", "costs"]]
        splits += [
            [brief(row["split"]), brief(row["runner_up"]["split"]), signed_time(extra)]
            for extra, _, row in rows[:5]
        ]
        room = max(
            20, width - sum(max(len(row[i]) for row in splits) + len(GAP) for i in range(3))
        )  # splits are facts and stay whole
        names = ["closest calls", *(short(name, room) for _, name, _ in rows[:5])]
        lines = table(
            [[name, *row] for name, row in zip(names, splits, strict=True)], right=(3,), gap=GAP
        )
    if faster:
        extra, name, row = faster[0]
        lines += hang(
            "",
            f"not taken though faster by {'themselves' if len(faster) > 1 else 'itself'}:"
            f" {len(faster)} split{'s' * (len(faster) > 1)}, first {short(name, 40)} as"
            f" {brief(row['runner_up']['split'])} ({signed_time(extra)}): {NOT_TAKEN}",
            width,
        )
    # That leaving an axis idle costs much says nothing of the split.
    comparable = [
        r for r in rows if _axes(r[2]["runner_up"]["split"]) >= _axes(r[2]["split"]) != set()
    ]
    if comparable:
        extra, name, row = max(comparable, key=lambda r: r[0])
        other = brief(row["runner_up"]["split"])
        lines += hang(
            "",
            f"the firmest: {short(name, width - len('the firmest: ,'))}, where the next split of"
            f" as many axes, {other}, costs {signed_time(extra)}",
            width,
        )
    return lines


def _axes(split: Mapping[str, Sequence[str]]) -> set[str]:
    """The axes that a split uses."""
    return {a for axes in split.values() for a in axes}


def difference(costs: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Where another plan's step and memory differ, the largest part first."""
    parts = ("compute", "exposed communication", "optimizer", "bubble")
    deltas = sorted(
        (
            (other[key] - costs[key], name)
            for name in parts
            for key in [f"{name.replace(' ', '_')}_time_s"]
        ),
        key=lambda d: -abs(d[0]),
    )
    step = costs["step_time_s"] or 1.0
    listed = [f"{signed_time(d)} {name}" for d, name in deltas if abs(d) / step >= 0.001]
    recompute = other["recompute_time_s"] - costs["recompute_time_s"]
    if abs(recompute) / step >= 0.001:
        listed.append(f"(recompute {signed_time(recompute)} of the compute)")
    memory = other["memory_per_device_bytes"] - costs["memory_per_device_bytes"]
    if memory:
        listed.append(f"memory {'-' if memory < 0 else '+'}{show_bytes(abs(memory))}")
    return listed or ["the same step and memory"]


def _others(s: Strategy, width: int, style: Style) -> list[str]:
    lines: list[str] = []
    for key, row in ranked(s):
        name = baseline_name(key, row) + (f" ({tuned_words(row)})" if tuned_words(row) else "")
        verdict = (
            "does not fit"
            if row["fit"] == "no"
            else "a tie: too close to tell apart"
            if ties(s.costs, row)
            else ""
        )
        head = f"{name}: {show_time(row['step_time_s'])}"
        items = [*difference(s.costs, row), *([verdict] if verdict else [])]
        lines += [head, *("  " + line for line in pack(items, width - 2, 0, ", "))]
    return [style.bold("beside it"), *lines] if lines else []


def _recorded(s: Strategy, row: Mapping[str, Any], width: int, style: Style) -> list[str]:
    """Results and kernels of a node, as far as the file knows them without details."""
    lines: list[str] = []
    for name in row["outputs"]:
        t = s.tensors.get(name)
        if t:
            side = _side({"tensor": name, "dims": [str(n) for n in t["shape"]], **t}, width)
            lines += labelled("result", [side], width, style)
    if "time_s" in row:
        step_s = row["time_s"] * s.techniques["microbatches"]
        lines += labelled("kernels", [f"{show_time(step_s)} a step"], width, style)
    return lines


def find_nodes(s: Strategy, text: str) -> list[str]:
    """The nodes a name may mean, the best first: an id, a fused member, a result, else every id
    that holds it, else every node that reads a tensor (a parameter) of which it is a part:
    exporters number their nodes and name the parameters. The costliest first.

    Dots and slashes are alike, and numbers match any where nothing else does: later repeats of a
    block are decided by its first one. Raises PlanError P052 with a suggestion.
    """
    if text in s.nodes:
        return [text]
    exact = [
        n for n, row in s.nodes.items() if text in row["outputs"] or text in row.get("members", ())
    ]
    if exact:
        return exact

    wanted = plain(text)
    read = {n: [x["tensor"] for x in row["operands"]] for n, row in s.details.items()}
    for names in ({n: [n] for n in s.nodes}, read):
        for form in (plain, lambda name: re.sub(r"\d+", "*", plain(name))):
            hits = [
                n for n in names if wanted and any(form(wanted) in form(name) for name in names[n])
            ]
            if hits:
                return sorted(
                    hits,
                    key=lambda n: (named_repeat(s, n, text) < 0, -s.nodes[n].get("time_s", 0.0)),
                )
    # A part of a name is what people type: it is held against the parts of names, too.
    full_names = [*s.nodes, *s.tensors]
    parts = (part for name in full_names for part in re.split(r"[./]+", name) if part)
    suggestion = did_you_mean(text, list(dict.fromkeys([*full_names, *parts])))
    costliest = sorted(s.nodes, key=lambda n: -s.nodes[n].get("time_s", 0.0))[:3]
    parts_do = f"a part of a name is enough; the costliest nodes are {', '.join(costliest)}"
    raise PlanError(
        "P052",
        f"no node or tensor named {text!r}",
        help=[h for h in (suggestion, one_line(parts_do)) if h],
    )


def explain_node(
    s: Strategy,
    name: str,
    width: int = 100,
    colour: bool = False,
    detail: Mapping[str, Any] | None = None,
    asked: str = "",
) -> str:
    """One node: its split, what the file knows, and with its row of `planner.pricing.breakdown` its
    rule, operands, kernels, collectives and what binds.

    asked: the name that was looked for, which may be of a later repeat.
    """
    style = Style(colour)
    row = s.nodes[name]
    times = row.get("times", 1)
    lines = [
        style.bold(one_line(f"{name} ({row['op']})"))
        + (f", decided once for {times} equal nodes" if times > 1 else "")
    ]
    if stages(s) > 1:
        where = asked_repeat(s, name, asked)
        lines += labelled("stage", [on_stages(s, name), *([where] if where else [])], width, style)
    if row.get("members"):
        lines += hang("  fused from ", ", ".join(row["members"]), width)
    lines += labelled("split", [spell_split(row["split"])], width, style)
    if row.get("unsupported"):
        lines += labelled(
            "",
            [style.warn(f"no rule: {row['unsupported']}; planned whole on every device")],
            width,
            style,
        )
    if kernel := row.get("attention_kernel") or row.get("expert_kernel"):
        lines += labelled("kernel", [kernel], width, style)
    if detail is not None:
        lines += _detailed(detail, width, style)
    else:
        lines += _recorded(s, row, width, style)
    if row["recompute"] and s.techniques["recompute"] != "none":
        saved = _saved_words(row, s.techniques["recompute"])
        lines += labelled("memory", [recompute_text(s), *saved], width, style)
    other = row.get("runner_up")
    if other:
        why = f"; not taken: {NOT_TAKEN}" if other["extra_s"] < 0 else ""
        lines += labelled(
            "next",
            [
                f"{spell_split(other['split'])} would cost {signed_time(other['extra_s'])} a step,"
                f"{_alike(other)} all else kept{why}"
            ],
            width,
            style,
        )
    else:
        lines += labelled(
            "next", ["no other split was open, or the plan came from no search"], width, style
        )
    return "\n".join(lines)


def _alike(other: Mapping[str, Any]) -> str:
    """Of how many nodes another split would be."""
    return f" {other['nodes']} nodes deciding alike," if "nodes" in other else ""


def _detailed(d: Mapping[str, Any], width: int, style: Style) -> list[str]:
    spelled = re.findall(
        r"\w+", d["rule"]
    )  # files sort their keys: factors in the order of the rule again
    sizes = sorted(
        d["sizes"].items(), key=lambda f: spelled.index(f[0]) if f[0] in spelled else len(spelled)
    )
    lines = labelled("rule", [d["rule"], ", ".join(f"{f} {n:,}" for f, n in sizes)], width, style)
    for word, sides in (("operand", d["operands"]), ("result", d["results"])):
        for k, side in enumerate(sides):
            lines += labelled("" if k else word, [_side(side, width)], width, style)
    kernels = d["kernels"]
    forward = show_time(kernels["forward_s"])
    items = [
        f"forward {forward}",
        *([f"recompute {forward}"] if kernels["again"] else []),
        *([f"backward {show_time(kernels['backward_s'])}"] if kernels["backward_s"] else []),
        f"x {kernels['times']} = {show_time(kernels['step_s'])} a step",
        *([f"and {show_time(kernels['bubble_s'])} in bubbles"] if kernels["bubble_s"] else []),
        f"bound by {kernels['bound_by']}",
    ]
    lines += labelled("kernels", items, width, style)
    for k, move in enumerate(d["moves"]):
        size_text = show_bytes(move["payload_bytes"] / move["count"])
        text = (
            f"{move['phase']}: {move['kind']} of {short(move['tensor'], 40)} over {move['axes']},"
            f" {move['count']} x {size_text}, {show_time(move['time_s'])}"
        )
        lines += labelled("" if k else "moves", [text], width, style)
    return lines if d["moves"] else [*lines, *labelled("moves", ["no collective"], width, style)]


def _side(row: Mapping[str, Any], width: int) -> str:
    """`x [b/data, k/tensor]` of an operand or result, with what is pending."""
    pending = f" partial sums over {'+'.join(row['partial'])}" if row["partial"] else ""
    return f"{short(row['tensor'], width // 2)} {cells(row['dims'], row['layout'])}{pending}"


def _saved_words(row: Mapping[str, Any], recompute: str) -> list[str]:
    """Where the named result of an operator waits for the backward pass, in words."""
    if not (name := row.get("saved_as")):
        return []
    away = " in host memory" if name in offloaded_values(recompute) else ""
    return [f"its result is saved as {name}{away}"]
