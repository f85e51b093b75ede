"""The first screen of a strategy, from its file alone: model and machine; mesh, method, step and
memory; the verdict in a sentence; the alternatives; findings; the defaults on one line. Everything
else is in planner.report.explain.

    total FLOPs of a step = MFU x peak x devices x step time        (duplicated and padded work left
        out)

so the printed figures can be checked against each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from costmodels.runtimes import as_framework
from planner.execution.save_policies import is_named, values_words
from planner.execution.techniques import BLOCK_KEEP, phrases
from planner.pricing.cost import OTHER_PARTS
from planner.report.baselines import comparison
from planner.report.confirmed import words as confirm_words
from planner.report.findings import finding_lines
from planner.report.islands import shares
from planner.report.proof import covered
from planner.report.verdict import of_plans, verdict
from planner.strategy.stages import lockstep, stages, stages_words, ticks
from planner.strategy.strategy import Strategy
from planner.support.text import (
    LABEL,
    Style,
    bar,
    count,
    flops,
    hang,
    labelled,
    pack,
    percent,
    short,
)

BAR = 40
STAGES_AGAIN = "each stage's forward pass is recomputed in its backward pass"
_ASIDE = re.compile(r"[:;]| \(")
RECOMPUTE = {
    "block": "recompute blocks and their collectives",
    "block-keep": "recompute blocks, collective results saved",
}
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def summary(strategy: Strategy, width: int = 100, colour: bool = False) -> str:
    """The first screen, without a closing line break. width: columns to keep to; long names are
    cut, never a figure."""
    style = Style(colour)
    parts = [
        _head(strategy, width, style),
        [
            *_plan(strategy, width, style),
            *_figures(strategy, width, style),
            *_verdict(strategy, width, style),
            *_compiled(strategy, width, style),
        ],
        comparison(strategy, width, style),
        finding_lines(strategy, width, style),
        _assumed(strategy, width, style),
    ]
    return "\n".join(line for part in parts if part for line in ("", *part)).lstrip("\n")


def title(strategy: Strategy) -> str:
    """`llama3-8b (zoo)`: the model's name and where it is from."""
    name = str(strategy.model["name"])
    return f"{name.removeprefix('zoo:')} (zoo)" if name.startswith("zoo:") else name


def machine(strategy: Strategy) -> str:
    """`64 x h100-sxm (8 nodes x 8)`."""
    t = strategy.topology
    sizes = [(x["name"], x["size"]) for x in t["levels"] if x["size"] > 1]
    if len(sizes) > 1:
        outer, *inner = reversed(sizes)
        shape = f" ({outer[1]} {outer[0]} x {' x '.join(str(n) for _, n in inner)})"
    else:
        shape = f" (one {sizes[0][0]})" if sizes else ""
    groups = t.get("groups") or [t]
    return " + ".join(f"{g['devices']} x {Path(g['device']).stem}" for g in groups) + shape


def unit_of_work(strategy: Strategy) -> str:
    """ "tokens" where an example has several, else "samples"."""
    return "tokens" if strategy.costs["tokens_per_step"] > strategy.workload["batch"] else "samples"


def _head(strategy: Strategy, width: int, style: Style) -> list[str]:
    w, m, tokens = strategy.workload, strategy.model, int(strategy.costs["tokens_per_step"])
    if unit_of_work(strategy) == "tokens":
        work = (
            f"{w['kind']}, batch {w['batch']:,} x {tokens // w['batch']:,} tokens = {count(tokens)}"
            " tokens per step"
        )
    else:
        work = f"{w['kind']}, batch {w['batch']:,}"
    items = [f"{m['nodes']:,} nodes, {count(m['parameters'])} parameters", machine(strategy), work]
    lines = pack([short(title(strategy), width), *items], width, 0, " · ")
    return [style.bold(lines[0]), *lines[1:]]


def _assumed(strategy: Strategy, width: int, style: Style) -> list[str]:
    """The defaults by their names, on one line: `plan explain` says them in full."""
    heads = list(dict.fromkeys(_ASIDE.split(text)[0].strip() for text in assumed(strategy)))
    if not heads:
        return []
    room, end = width - LABEL, " (plan explain: all)"
    shown = len(heads)
    while shown > 1 and len("; ".join(heads[:shown]) + end) > room:
        shown -= 1
    return [style.dim(short(f"{'assumed':<{LABEL}}{'; '.join(heads[:shown])}{end}", width))]


def assumed(strategy: Strategy) -> list[str]:
    """What was taken for granted, a phrase each."""
    # "batch 64 (--batch)" says nothing beside "batch 64: the smallest multiple of ... (--batch sets
    # it)".
    return [
        a
        for a in strategy.assumptions
        if not any(b.startswith(a.partition(" (--")[0] + ":") for b in strategy.assumptions)
    ]


def _plan(strategy: Strategy, width: int, style: Style) -> list[str]:
    axes = [
        style.bold(f"{a['name']}={a['size']}")
        + (f" ({' + '.join(a['levels'])})" if a["levels"] else "")
        for a in strategy.mesh
    ]
    lines = labelled("mesh", axes, width, style)
    lines += labelled("method", techniques(strategy), width, style)
    lines += labelled("shares", items, width, style) if (items := shares(strategy)) else []
    return lines + (
        labelled("kept", incremental_phrases(kept), width, style)
        if (kept := strategy.provenance.get("incremental"))
        else []
    )


def _compiled(strategy: Strategy, width: int, style: Style) -> list[str]:
    """What a compiler said of the plan, where one was asked."""
    text = confirm_words(strategy)
    return labelled("confirm", [text], width, style) if text else []


def _verdict(strategy: Strategy, width: int, style: Style) -> list[str]:
    paint = {"yes": style.good, "tight": style.warn}.get(strategy.costs["fit"], style.bad)
    lines = hang(" " * LABEL, verdict(strategy), width)
    return [
        (style.bold(f"{'verdict':<{LABEL}}") if i == 0 else " " * LABEL) + paint(line[LABEL:])
        for i, line in enumerate(lines)
    ]


def techniques(strategy: Strategy) -> list[str]:
    """The techniques in words, those that are on."""
    t = strategy.techniques
    listed = [words] if (words := stages_words(strategy)) else []
    if t["zero_stage"]:
        what = {
            1: "optimizer state",
            2: "optimizer state and gradients",
            3: "parameters, gradients and optimizer state",
        }[t["zero_stage"]]
        # A gradient that is not summed over the group leaves nothing to cut; nor does a weight
        # without a dim that the group can cut.
        weights = [row for row in strategy.tensors.values() if "label" in row]
        total, reached = (
            sum(prod(row["shape"]) for row in rows)
            for rows in (weights, [row for row in weights if "zero" in row])
        )
        part = (
            ""
            if reached > 0.99 * total or (reached and t.get("cuts"))
            else f" of {count(reached)} of {count(total)} parameters"
        )
        effect = (
            f"{what}{part} cut"
            if reached
            else "no gradient is summed over it that it could cut: no effect"
        )
        over = f" over {'+'.join(t['zero_group'])}" if t["zero_group"] else ""
        listed.append(
            f"ZeRO-{t['zero_stage']}{over}"
            f" ({effect if over else 'every axis is one of stages: no effect'})"
        )
    elif strategy.workload["kind"] == "train":
        listed.append("no ZeRO (every replica keeps its optimizer state)")
    if t["recompute"] != "none":
        listed.append(recompute_text(strategy))
    chosen = strategy.chosen
    listed += phrases(chosen, ("offload", "blocks", "exchanges", "bucket"))
    overlapped = chosen.overlapped_microbatches
    copies = f", {overlapped} overlapped" if overlapped > 1 else ""
    if strategy.workload["kind"] == "train":
        listed.append(
            f"{t['microbatches']} microbatch{'es' if t['microbatches'] > 1 else ''}{copies}"
        )
    return listed or ["one forward pass"]


def recompute_text(strategy: Strategy) -> str:
    """What is recomputed, in words."""
    techniques = strategy.techniques
    mode = str(techniques["recompute"])
    if mode == BLOCK_KEEP and as_framework(str(strategy.workload["runtime"])):
        return "selective recompute in blocks"
    if is_named(mode):
        return f"recompute blocks but for what {values_words(mode)}"
    return STAGES_AGAIN if techniques.get("cuts") else RECOMPUTE.get(mode, f"recompute {mode}")


def solver_text(strategy: Strategy) -> str:
    """`dp, proven the best of the 22 meshes tried (gap 0 %), 0.9 s`."""
    s = strategy.solver
    gap = (
        "no bound proven"
        if s.get("gap") is None
        else (
            "gap 0 %"
            if s["gap"] <= 1e-6
            else "gap under 0.1 %"
            if s["gap"] < 5e-4
            else f"gap {100 * s['gap']:.1f} %"
        )
    )
    status = (
        f"proven the best of {covered(s)}"
        if s["status"] == "optimal"
        else f"best of {covered(s)}"
        if s.get("covers")
        else "best found"
    )
    if s.get("stopped"):
        status = {"time": "stopped by --time-limit", "interrupt": "interrupted"}.get(
            s["stopped"], f"stopped: {s['stopped']}"
        ) + ", best so far"
    seconds = strategy.provenance.get("search_s")
    if s["name"] == "manual":
        return "manual: the plan as given, checked and priced"
    if s["name"] == "import":
        return "import: the plan as configured, checked and priced"
    tried = f", {s['plans_tried']} plans priced" if s.get("plans_tried", 0) > 1 else ""
    return f"{s['name']}, {status}{of_plans(strategy)} ({gap}){tried}" + (
        f", {show_time(seconds)}" if seconds is not None else ""
    )


def incremental_phrases(kept: Mapping[str, Any]) -> list[str]:
    """What an incremental plan keeps of one before."""
    solved, of = kept["solved"], str(kept["model"]).removeprefix("zoo:")
    what = f"{kept['kept']:,} of {kept['kept'] + solved:,} operators" if solved else "all operators"
    return [
        f"the mesh and {what} as planned for {of} on {kept['date']}",
        *([f"{solved:,} solved anew"] if solved else []),
        "no other plans looked at (--incremental)",
    ]


def _figures(strategy: Strategy, width: int, style: Style) -> list[str]:
    c, devices = strategy.costs, strategy.topology["devices"]
    low, high = c["step_time_range_s"]
    step = [
        style.bold(show_time(c["step_time_s"])),
        f"(range {show_time(low)} to {show_time(high)})",
        f"compute {show_time(c['compute_time_s'])}",
        f"exposed communication {show_time(c['exposed_communication_time_s'])}",
    ]
    if c["exposed_communication_time_s"]:
        sent = show_time(c["communication_time_s"])
        hides = sent != show_time(c["exposed_communication_time_s"])
        step[3] += f" of {sent}" if hides else " (not overlapped)"
    if c["recompute_time_s"]:
        step[2] += f", {show_time(c['recompute_time_s'])} of it recompute"
    if c["optimizer_time_s"]:
        summed = (
            " and sums of gradients" if strategy.techniques["microbatches"] > 1 else ""
        )  # over microbatches: three passes over them for each
        step.append(f"optimizer{summed} {show_time(c['optimizer_time_s'])}")
        if steps := c.get("newton_schulz_time_s"):
            step[-1] += f", {show_time(steps)} of it Newton-Schulz steps"
    step += [f"{words} {show_time(c[part])}" for part, words in OTHER_PARTS.items() if c.get(part)]
    if c["bubble_time_s"]:
        among = (
            f" ({stages(strategy) - 1} of {ticks(strategy)} ticks)" if lockstep(strategy) else ""
        )
        step.append(f"bubble {show_time(c['bubble_time_s'])}{among}")
    parts = [
        (c.get(part, 0.0), part[0].upper())
        for part in (
            "compute_time_s",
            "exposed_communication_time_s",
            "optimizer_time_s",
            *OTHER_PARTS,
            "bubble_time_s",
        )
    ]
    lines = [*labelled("step", step, width, style), *_bar(parts, c["step_time_s"], width, style)]
    total = c["flops_per_device"] * c["distinct_work"] * devices
    lines += labelled(
        "speed",
        [
            f"{c['tokens_per_s_per_device']:,.0f} {unit_of_work(strategy)}/s/device",
            f"MFU {percent(c['model_flops_utilization'])}",
            f"{flops(total)} a step over {devices} device{'s' if devices > 1 else ''}",
            *(
                [f"{percent(lost)} of tokens' choices dropped, which count as not done"]
                if (lost := c.get("dropped_choices"))
                else []
            ),
        ],
        width,
        style,
    )
    return [*lines, *_memory(c, width, style)]


def breakdown(c: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(part, bytes) of the memory, in the order parameters, gradients, optimizer, activations,
    temporary."""
    parts = c["memory_breakdown_bytes"]
    return [(k, parts[k]) for k in PARTS if k in parts]


def _memory(c: Mapping[str, Any], width: int, style: Style) -> list[str]:
    low, high = c["memory_range_bytes"]
    limit = f" of {show_bytes(c['memory_limit_bytes'])} usable" if "memory_limit_bytes" in c else ""
    items = [
        style.bold(show_bytes(c["memory_per_device_bytes"]))
        + f"{limit} (range {show_bytes(low)} to {show_bytes(high)})",
        "fits: " + style.fit(c["fit"]),
    ]
    items += [f"{k} {show_bytes(v)}" for k, v in breakdown(c) if v]
    if away := c.get("offloaded_per_device_bytes"):
        items.append(f"on hosts {show_bytes(away)} for each device")
    lines = labelled("memory", items, width, style)
    if "memory_limit_bytes" in c:
        parts = [(float(v), k[0].upper()) for k, v in breakdown(c)]
        lines += _bar(
            parts, max(c["memory_limit_bytes"], c["memory_per_device_bytes"]), width, style
        )
    return lines


def _bar(parts: Sequence[tuple[float, str]], total: float, width: int, style: Style) -> list[str]:
    """The line of a bar of parts by their first letters, which the words above it begin with; none
    where all of it is one letter, or nothing."""
    drawn = bar(parts, total, min(BAR, width - 10))
    return labelled("", [f"[{drawn}]"], width, style) if len(set(drawn)) > 1 else []
