"""The terminal summary of a serving plan, from the file alone.

    tokens/s/device = concurrency x generate / (concurrency / wave x ttft + (generate - 1) x tpot) /
    devices

so the printed figures can be checked against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.machine.mesh_choices import divisors
from planner.machine.topology import from_json
from planner.report.findings import finding_line
from planner.report.notation import extent_names, short_labels
from planner.report.summary import machine, title
from planner.serving.result import (
    PERCENTILES,
    Serving,
    arriving,
    kept_words,
    pools_of,
    rate_words,
    replicas_words,
    sequences_words,
    together_words,
)
from planner.serving.targets import Target
from planner.sharding.notation import cells
from planner.strategy.notation import spell_weight, weight_groups
from planner.strategy.strategy import Strategy
from planner.support.text import LONGEST, Style, count, hang, labelled, listed, pack, short, table

SHOWN_WEIGHTS = 6
AIMS = {
    "throughput": "most tokens a second",
    "ttft": "soonest first token",
    "tpot": "least time a token",
}
ARRIVING = {
    "throughput": "most requests a second",
    "ttft": "soonest first token, of 99 requests in a hundred",
    "tpot": "least time a token, of 99 requests in a hundred",
}
CACHE, STATE = "cache.", "state."


def summary(serving: Serving, width: int = 100, colour: bool = False) -> str:
    """The summary, without a closing line break."""
    style = Style(colour)
    parts = [
        _head(serving, width, style),
        _plan(serving, width, style),
        (_figures if serving.traffic is None else _traffic)(serving, width, style),
        _memory(serving, width, style),
        _layouts(serving, width, style),
        _table(serving, width, style),
        _findings(serving, width, style),
    ]
    return "\n".join(line for part in parts if part for line in ("", *part)).lstrip("\n")


def _head(serving: Serving, width: int, style: Style) -> list[str]:
    s, strategy = serving.service, serving.step
    items = [
        f"{count(strategy.model['parameters'] - cache_elements(strategy))} parameters",
        _machine(serving),
        (
            f"serve {together_words(serving.shape)}"
            if serving.traffic is None
            else f"serve {arriving(serving.traffic)}"
        ),
    ]
    lines = pack([short(title(strategy), width), *items], width, 0, " · ")
    in_fp8 = s["quantize"] == "fp8"
    assumed = [
        # The recipe's own line is of weights in two bytes.
        *(
            _in_fp8(strategy) if in_fp8 and a.startswith("fp8: ") else a
            for a in strategy.assumptions
        ),
        (
            "all prompts are passed, then all sequences generate in step; every step reads the"
            " whole cache, filled or not"
            if serving.traffic is None
            else "requests join while others generate, which engines do and the emitted program"
            " does not; prices of its phases between sizes that were priced; the engine's own work"
            " beside the device's is not priced"
        ),
    ]
    if s["quantize"] == "int8":
        assumed.append("int8 weights of products, a scale for each column")
    if s.get("engine"):
        assumed.append(
            "no program is written: plan export; where rows travel to experts, two halves of a"
            " batch take turns if that is shorter (phases apart are shown without)"
        )
    if s.get("cache_type") == "fp8":
        assumed.append("keys and values in float8_e4m3fn")
    if serving.figures.get("state_bytes"):
        assumed.append(
            "states of linear attention in float32, rows that convolutions read again in the type"
            " computed in"
        )
    return [
        style.bold(lines[0]),
        *lines[1:],
        *(style.dim(line) for line in hang("assumed: ", "; ".join(assumed), width)),
    ]


def _in_fp8(strategy: Strategy) -> str:
    """What is kept and multiplied in float8, and by devices that do not multiply it, how."""
    text = (
        "fp8: weights of products and experts in float8_e4m3fn, a scale for each column, and rows"
        " made float8 as they come; head, router, what spreads latents, attention and norms in bf16"
    )
    device = from_json(strategy.topology).device
    if "float8_e4m3fn" in device.peak_flops_per_s:
        return text
    name = device.name
    return f"{text}; {name} multiplies no float8: weights take a byte, products the time of bf16"


def _traffic(serving: Serving, width: int, style: Style) -> list[str]:
    """What becomes of requests that arrive."""
    t = serving.traffic
    assert t is not None
    load = t["rate_per_s"] / t["most_per_s"]
    most = f"{rate_words(t['most_per_s'])} requests a second"
    if t["stable"]:
        served = [style.fit("yes") + f": {100 * load:.0f} % of the {most} that this plan serves"]
    else:
        served = [style.fit("no") + f": the rate is above what this plan serves, {most}"]
    lines = [*labelled("served", served, width, style)]
    for name, what in (("ttft", "arrival to first token"), ("tpot", "a token after that")):
        times = [f"p{p} {show_time(t[f'{name}_s'][f'p{p}'])}" for p in PERCENTILES]
        lines += labelled(name, [*times, f"({what}, waiting included)"], width, style)
    lines += _targets(t, width, style)
    limits = t["limits"]
    batch = [
        f"{t['generating']:.3g} sequences generate at a time in a replica, of"
        f" {limits['sequences']:,} at most",
        f"busy {100 * t['busy']:.0f} % of the time",
        f"{t['tokens_per_s']:,.0f} tokens/s generated",
    ]
    lines += labelled("batch", batch, width, style)
    waiting = rate_words(t["waiting"])
    queue = [f"{waiting} requests wait in the mean", f"{t['most_waiting']:,} at most"]
    lines += labelled("queue", queue, width, style)
    steps = f"steps of {limits['step_tokens']:,} tokens at most"
    if not serving.figures["cache_bytes"]:
        return lines + labelled("state", ["one for each sequence at once", steps], width, style)
    cache = [
        f"{100 * t['cache_taken']:.1f} % of {limits['cache_tokens']:,} tokens a replica taken",
        f"{100 * t['block_waste']:.2g} % of that by the rounding to blocks of {limits['block']}",
        steps,
    ]
    return lines + labelled("cache", cache, width, style)


def _targets(t: Mapping[str, Any], width: int, style: Style) -> list[str]:
    """Targets that were set, and what the next smaller number of devices misses."""
    words = [
        Target(**target).words(t[f"{target['figure']}_s"][f"p{target['percentile']}"])
        for target in t["targets"]
    ]
    lines = []
    if words:
        words.append(f"{100 * t['attained']:.1f} % of the requests wait no longer")
        lines = labelled("target", [f"{style.good('met')}: {words[0]}", *words[1:]], width, style)
    if fewer := t.get("fewer"):
        why = "".join(c for c in fewer["why"] if c.isprintable())
        devices = f"{fewer['devices']:,} device{'s' if fewer['devices'] > 1 else ''}"
        lines += labelled("fewer", [f"not on {devices}: {why}"], width, style)
    return lines


def _machine(serving: Serving) -> str:
    """The devices, in words; of pools, all of both."""
    if not (pools := pools_of(serving)):
        return machine(serving.step)
    devices = sum(pools[k]["replicas"] * pools[k]["split"] for k in ("prefill", "decode"))
    return f"{devices} x {Path(serving.step.topology['device']).stem}"


def cache_elements(strategy: Strategy) -> int:
    """Elements of caches and states, which a strategy counts among its weights."""
    from math import prod

    return sum(
        prod(row["shape"])
        for row in strategy.tensors.values()
        if str(row.get("label", "")).startswith((CACHE, STATE))
    )


def mesh_words(row: Mapping[str, Any]) -> str:
    """`2 x 4`: replicas and devices of each; of pools `2 x 1 + 1 x 4`."""
    if isinstance(row.get("pools"), str):
        return short("".join(c for c in row["pools"] if c.isprintable()), LONGEST)
    return f"{row['replicas']} x {row['split']}"


def _plan(serving: Serving, width: int, style: Style) -> list[str]:
    s, f, pools = serving.service, serving.figures, pools_of(serving)
    axes = [
        f"{a['name']}={a['size']} ({' + '.join(a['levels'])})"
        for a in serving.step.mesh
        if a["size"] > 1
    ]
    mesh = [style.bold(replicas_words(f["replicas"], f["split"])), *axes]
    lines = _apart(pools, width, style) if pools else labelled("mesh", mesh, width, style)
    if s["gap"] is None:
        gap = "of the plans priced"
    else:
        better = (
            "better" if s["gap"] <= 1e-6 else f"more than {max(0.1, 100 * s['gap']):.1f} % better"
        )
        gap = f"no other layout of the weights on the meshes tried can be {better}"
    seconds = serving.provenance.get("search_s")
    aims = AIMS if serving.traffic is None else ARRIVING
    aim = f"{aims[s['objective']]} (--objective {s['objective']})"
    return lines + labelled(
        "solver",
        [
            f"{aim}: best found, {gap}, {len(serving.rows)} plans priced"
            + (f", {show_time(seconds)}" if seconds is not None else "")
        ],
        width,
        style,
    )


def _apart(pools: Mapping[str, Any], width: int, style: Style) -> list[str]:
    """Prompts and generation on devices apart."""
    lines = []
    for name, label in (("prefill", "prompts"), ("decode", "decode")):
        pool = pools[name]
        words = [
            style.bold(replicas_words(pool["replicas"], pool["split"])),
            f"{rate_words(pool['per_s'] * pool['replicas'])} requests a second at most",
            f"busy {100 * pool['busy']:.0f} % of the time",
        ]
        lines += labelled(label, words, width, style)
    sent = pools["transfer"]
    link = "".join(c for c in sent["link"] if c.isprintable())
    state = sent.get("bytes_per_sequence", 0)
    also = f" and states, {show_bytes(state)} a sequence," if state else ""
    words = [
        f"keys and values, {show_bytes(sent['bytes_per_token'])} a token,{also} take"
        f" {show_time(sent['mean_s'])} in the mean over {short(link, LONGEST)}",
        f"links busy {100 * sent['busy']:.2g} % of the time",
    ]
    return lines + labelled("between", words, width, style)


def _figures(serving: Serving, width: int, style: Style) -> list[str]:
    f, devices = serving.figures, serving.step.topology["devices"]
    spread = [
        tuple(x / p.costs["step_time_s"] for x in p.costs["step_time_range_s"])
        for p in (serving.prompts, serving.step)
    ]
    lines = []
    passed = (
        f"to the first tokens of {f['wave']} prompt{'s' if f['wave'] > 1 else ''} passed at once"
    )
    phases = ("ttft", passed, serving.prompts), ("tpot", "a token after that", serving.step)
    for (label, what, strategy), (low, high) in zip(phases, spread, strict=True):
        c, seconds = strategy.costs, f[f"{label}_s"]
        lines += labelled(
            label,
            [
                style.bold(show_time(seconds)) + f" {what}",
                f"(range {show_time(seconds * low)} to {show_time(seconds * high)})",
                f"compute {show_time(c['compute_time_s'])}",
                f"exposed communication {show_time(c['exposed_communication_time_s'])}",
            ],
            width,
            style,
        )
    speed = f["tokens_per_s_per_device"]
    lines += labelled(
        "speed",
        [
            style.bold(f"{speed:,.0f} tokens/s/device"),
            f"{speed * devices:,.0f} tokens/s",
            f"{1 / f['tpot_s']:,.1f} tokens/s a sequence",
        ],
        width,
        style,
    )
    return lines


def _memory(serving: Serving, width: int, style: Style) -> list[str]:
    f, s = serving.figures, serving.service
    rest = f["memory_bytes"] - f["weights_bytes"] - f["cache_bytes"] - f.get("state_bytes", 0)
    fits = "fits: " + style.fit("yes" if f["fits"] else "no")
    parts = [
        f"weights {show_bytes(f['weights_bytes'])}",
        kept_words(f),
        f"at work {show_bytes(rest)}",
    ]
    lines = labelled(
        "memory",
        [
            style.bold(show_bytes(f["memory_bytes"]))
            + f" of {show_bytes(s['memory_limit_bytes'])} usable",
            fits,
            *parts,
        ],
        width,
        style,
    )
    lines += labelled(
        "room",
        [
            f"{sequences_words(s['most_sequences'])} at once"
            f" {'fits' if s['most_sequences'] == 1 else 'fit'} under this plan"
        ],
        width,
        style,
    )
    return lines + (labelled("draft", _draft(s["draft"]), width, style) if "draft" in s else [])


def _draft(draft: Mapping[str, Any]) -> list[str]:
    """From which acceptance on drafted tokens pay (planner.serving.draft)."""
    cost = f"its step takes {100 * draft['cost']:.3g} % of one of {draft['sequences']:,} sequences"
    if draft["break_even"] is None:
        twice = f"passing two tokens of each {draft['verify']['1']:.3g} times as long as one"
        return [f"does not pay at any acceptance: {cost}, {twice}"]
    gains = [
        f"{100 * row['acceptance']:.0f} %: {row['gain']:.2f} times as fast, {row['drafted']} at a"
        " time"
        for row in draft["gains"]
    ]
    pays = f"pays from {100 * draft['break_even']:.0f} % of its tokens taken on"
    return [f"{pays}; {cost}", *gains]


def _layouts(serving: Serving, width: int, style: Style) -> list[str]:
    groups = [g for g in weight_groups(serving.step) if len(g.shape) > 1]
    weights = [g for g in groups if not g.label.startswith((CACHE, STATE))]
    caches, states = ([g for g in groups if g.label.startswith(k)] for k in (CACHE, STATE))
    names, labels = extent_names(serving.prompts), short_labels([g.label for g in weights])
    items = [
        f"{short(labels[g.label], LONGEST)} {spell_weight(g, names)}"
        for g in weights[:SHOWN_WEIGHTS]
    ]
    items += [f"and {len(weights) - SHOWN_WEIGHTS} more"] if len(weights) > SHOWN_WEIGHTS else []
    lines = labelled("layouts", items, width, style)
    several = len({g.shape[2] for g in caches}) > 1  # windows beside whole lengths
    cut = [
        g.label.removeprefix(CACHE)
        + " "
        + cells(("b", "heads", str(g.shape[2]) if several else "t", "d"), g.dims)
        for g in caches
    ]
    lines += labelled("cache", cut, width, style) if cut else []
    kept = [
        f"{g.label.removeprefix(STATE)}"
        f" {cells(('b', 'heads', 'v', 'k') if len(g.dims) == 4 else ('b', 'c', 'rows'), g.dims)}"
        for g in states
    ]
    return lines + (labelled("state", kept, width, style) if kept else [])


def _not_tried(serving: Serving) -> list[str]:
    """Numbers of replicas that would have had unequally many sequences."""
    sequences, devices = serving.service["concurrency"], serving.step.topology["devices"]
    uneven = [n for n in divisors(devices) if n <= sequences and sequences % n]
    if pools_of(serving) or not uneven:
        return []
    multiple = lcm(*uneven)
    return [
        f"{listed([f'{n:,}' for n in uneven])} replicas would have unequally many of"
        f" {sequences_words(sequences)} and were not tried: --concurrency"
        f" {-(-sequences // multiple) * multiple} tries them"
    ]


def _findings(serving: Serving, width: int, style: Style) -> list[str]:
    """What the files of both phases say a user should know, beside the ranges that are shown and
    what speaks of training."""
    rows = [row for plan in (serving.step, serving.prompts) for row in plan.findings]
    texts = dict.fromkeys(
        str(row["text"]) for row in rows if row["kind"] not in ("range", "published")
    )
    return [
        line for text in [*_not_tried(serving), *texts] for line in finding_line(text, width, style)
    ]


def _table(serving: Serving, width: int, style: Style) -> list[str]:
    """Everything priced: the plan first, what is on the front marked."""
    arrive = serving.traffic is not None
    heads = (
        ["ttft p99", "tpot p99", "requests/s"] if arrive else ["ttft", "tpot", "tokens/s/device"]
    )
    rows = [["", "replicas x split", *heads, "memory", "fits", ""]]
    for row in sorted(
        serving.rows,
        key=lambda r: (
            not r["chosen"],
            not str(r["label"]).startswith("tp="),
            r["split"],
            str(r["label"]),
        ),
    ):
        shown = [
            mesh_words(row),
            show_time(row["ttft_p99_s" if arrive else "ttft_s"]),
            show_time(row["tpot_p99_s" if arrive else "tpot_s"]),
            rate_words(row["most_per_s"]) if arrive else f"{row['tokens_per_s_per_device']:,.0f}",
            show_bytes(row["memory_bytes"]),
        ]
        mark = "front" if row["front"] else ""
        rows.append(
            [
                style.bold("this plan") if row["chosen"] else short(row["label"], LONGEST),
                *shown,
                style.fit("yes" if row["fits"] else "no"),
                mark,
            ]
        )
    front = (
        "front: no other is better in one of ttft, tpot and tokens/s/device and as good in the rest"
    )
    most = "requests/s: what a plan serves at most"
    note = f"{most if arrive else front}; tp=N: tensor parallelism alone"
    if any(str(row["label"]).startswith("ep=") for row in serving.rows):
        note += "; ep=M: experts spread over M replicas"
    return [*table(rows, (1, 2, 3, 4, 5)), *(style.dim(line) for line in hang("", note, width))]
