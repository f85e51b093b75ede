"""The terminal summary of a strategy: the verdict and its figures on one screen, from the file alone.

    total FLOPs of a step = MFU x peak x devices x step time        (duplicated and padded work left out)

so the printed figures can be checked against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.layout import STAGE
from planner.report.notation import extent_names, residual, short_labels, spell_weight, weight_groups
from planner.report.stages import lockstep, stages, stages_words, ticks
from planner.report.words import Style, bar, count, flops, hang, labelled, listed, pack, percent, short, show_bytes, show_time, table, visible
from planner.strategy import bucket_of, copies_of, offload_of

if TYPE_CHECKING:
    from planner.strategy import Strategy

SHOWN_WEIGHTS = 6
LONGEST = 30
"""Columns of a parameter's name."""
DISTINCT = 0.995
TIE = 1e-3
"""Share of a step below which plans are equal to a search (planner.request.TIE)."""
TABLES = {"tables_host": "tables on hosts", "tables_server": "tables on servers"}
BAR = 40
STAGES_AGAIN = "each stage's forward pass runs again in its backward pass"
RECOMPUTE = {"block": "recompute blocks, collectives again", "block-keep": "recompute blocks, collective results kept"}
OFFLOADED = {"optimizer": "optimizer state", "activations": "what enters blocks", "parameters": "blocks' weights and gradients",
             "embeddings": "embedding tables"}  # fmt: skip
AXES = {"model": "tensor", STAGE: "pipeline"}
"""What people who know Megatron call an axis."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def summary(strategy: Strategy, width: int = 100, colour: bool = False) -> str:
    """The summary, without a closing line break. width: columns to keep to; long names are cut, never a figure."""
    style = Style(colour)
    parts = [_head(strategy, width, style), _plan(strategy, width, style), _figures(strategy, width, style), _layouts(strategy, width, style),
             _findings(strategy, width, style), comparison(strategy, width, style)]  # fmt: skip
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
    """"tokens" where an example has several, else "samples"."""
    return "tokens" if strategy.costs["tokens_per_step"] > strategy.workload["batch"] else "samples"


def _head(strategy: Strategy, width: int, style: Style) -> list[str]:
    w, m, tokens = strategy.workload, strategy.model, int(strategy.costs["tokens_per_step"])
    if unit_of_work(strategy) == "tokens":
        work = f"{w['kind']}, batch {w['batch']:,} x {tokens // w['batch']:,} tokens = {count(tokens)} tokens per step"
    else:
        work = f"{w['kind']}, batch {w['batch']:,}"
    items = [f"{m['nodes']:,} nodes, {count(m['parameters'])} parameters", machine(strategy), work]
    lines = pack([short(title(strategy), width), *items], width, 0, " · ")
    return [style.bold(lines[0]), *lines[1:], *_assumed(strategy, width, style)]


def _assumed(strategy: Strategy, width: int, style: Style) -> list[str]:
    # "batch 64 (--batch)" says nothing beside "batch 64: the smallest multiple of ... (--batch sets it)".
    said = [a for a in strategy.assumptions if not any(b.startswith(a.partition(" (--")[0] + ":") for b in strategy.assumptions)]
    return [style.dim(line) for line in hang("assumed: ", "; ".join(said), width)] if said else []


def _plan(strategy: Strategy, width: int, style: Style) -> list[str]:
    axes = [style.bold(f"{a['name']}={a['size']}") + (f" ({' + '.join(a['levels'])})" if a["levels"] else "") for a in strategy.mesh]
    lines = labelled("mesh", axes, width, style)
    lines += labelled("method", techniques(strategy), width, style)
    lines += labelled("solver", [solver_words(strategy)], width, style)
    return lines + (labelled("kept", kept_words(kept), width, style) if (kept := strategy.provenance.get("incremental")) else [])


def techniques(strategy: Strategy) -> list[str]:
    """The techniques in words, those that are on."""
    t = strategy.techniques
    out = [words] if (words := stages_words(strategy)) else []
    if t["zero_stage"]:
        what = {1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, gradients and optimizer state"}[t["zero_stage"]]
        # A gradient that is not summed over the group leaves nothing to cut; nor does a weight without a dim that the group can cut.
        weights = [row for row in strategy.tensors.values() if "label" in row]
        total, reached = (sum(prod(row["shape"]) for row in rows) for rows in (weights, [row for row in weights if "zero" in row]))
        part = "" if reached > 0.99 * total or (reached and t.get("cuts")) else f" of {count(reached)} of {count(total)} parameters"
        effect = f"{what}{part} cut" if reached else "no gradient is summed over it that it could cut: no effect"
        over = f" over {'+'.join(t['zero_group'])}" if t["zero_group"] else ""
        out.append(f"optimizer level {t['zero_stage']}{over} ({effect if over else 'every axis is one of stages: no effect'})")
    elif strategy.workload["kind"] == "train":
        out.append("optimizer level 0 (every replica keeps its state)")
    if t["recompute"] != "none":
        out.append(recompute_words(t))
    out += offload_words(offload_of(t)) + bucket_words(t)
    copies = f", {copies_of(t)} at the same time" if copies_of(t) > 1 else ""
    if strategy.workload["kind"] == "train":
        out.append(f"{t['microbatches']} microbatch{'es' if t['microbatches'] > 1 else ''}{copies}")
    return out or ["one forward pass"]


def recompute_words(techniques: Mapping[str, Any]) -> str:
    """What is computed again, in words."""
    mode = str(techniques["recompute"])
    return STAGES_AGAIN if techniques.get("cuts") else RECOMPUTE.get(mode, f"recompute {mode}")


def offload_words(offload: Sequence[str]) -> list[str]:
    """What waits in the host's memory, a phrase; empty for nothing."""
    *more, last = [OFFLOADED[what] for what in offload] or [""]
    return [f"{', '.join(more)}{' and ' if more else ''}{last} in the host's memory"] if offload else []


def bucket_words(techniques: Mapping[str, Any]) -> list[str]:
    """The size of what is sent together, a phrase; empty where that is left to the compiler."""
    size = bucket_of(techniques)
    return [f"collectives fused up to {show_bytes(size)}"] if size else []


def solver_words(strategy: Strategy) -> str:
    """`dp, proven optimal on this model (gap 0 %), 0.9 s`."""
    s = strategy.solver
    gap = "no bound proven" if s.get("gap") is None else "gap 0 %" if s["gap"] <= 1e-6 else "gap under 0.1 %" if s["gap"] < 5e-4 else f"gap {100 * s['gap']:.1f} %"
    status = "proven optimal on this cost model" if s["status"] == "optimal" else "best found"
    if s.get("stopped"):
        status = {"time": "stopped by --time-limit", "interrupt": "interrupted"}.get(s["stopped"], f"stopped: {s['stopped']}") + ", best so far"
    seconds = strategy.provenance.get("search_s")
    if s["name"] == "manual":
        return "manual: the plan as given, checked and priced"
    tried = f", {s['plans_tried']} plans priced" if s.get("plans_tried", 0) > 1 else ""
    return f"{s['name']}, {status} ({gap}){tried}" + (f", {show_time(seconds)}" if seconds is not None else "")


def kept_words(kept: Mapping[str, Any]) -> list[str]:
    """What an incremental plan keeps of one before."""
    solved, of = kept["solved"], str(kept["model"]).removeprefix("zoo:")
    what = f"{kept['kept']:,} of {kept['kept'] + solved:,} operators" if solved else "all operators"
    return [f"the mesh and {what} as planned for {of} on {kept['date']}", *([f"{solved:,} solved anew"] if solved else []), "no other plans looked at (--incremental)"]


def _figures(strategy: Strategy, width: int, style: Style) -> list[str]:
    c, devices = strategy.costs, strategy.topology["devices"]
    low, high = c["step_time_range_s"]
    step = [style.bold(show_time(c["step_time_s"])), f"(range {show_time(low)} to {show_time(high)})", f"compute {show_time(c['compute_time_s'])}",
            f"exposed communication {show_time(c['exposed_communication_time_s'])}"]  # fmt: skip
    if c["recompute_time_s"]:
        step[2] += f", {show_time(c['recompute_time_s'])} of it again"
    if c["optimizer_time_s"]:
        step.append(f"optimizer {show_time(c['optimizer_time_s'])}")
    if c.get("tables_time_s"):
        step.append(f"tables pulled and pushed {show_time(c['tables_time_s'])}")
    if c["bubble_time_s"]:
        among = f" ({stages(strategy) - 1} of {ticks(strategy)} ticks)" if lockstep(strategy) else ""
        step.append(f"bubble {show_time(c['bubble_time_s'])}{among}")
    parts = [(c.get(f"{part}_time_s", 0.0), part[0].upper()) for part in ("compute", "exposed_communication", "optimizer", "tables", "bubble")]
    lines = [*labelled("step", step, width, style), *_bar(parts, c["step_time_s"], width, style)]
    total = c["flops_per_device"] * c["distinct_work"] * devices
    lines += labelled("speed", [f"{c['tokens_per_s_per_device']:,.0f} {unit_of_work(strategy)}/s/device", f"MFU {percent(c['model_flops_utilization'])}",
                                f"{flops(total)} a step over {devices} device{'s' if devices > 1 else ''}"], width, style)  # fmt: skip
    return [*lines, *_memory(c, width, style), *_traffic(c, width, style)]


def breakdown(c: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(part, bytes) of the memory, in the order parameters, gradients, optimizer, activations, temporary."""
    parts = c["memory_breakdown_bytes"]
    return [(k, parts[k]) for k in PARTS if k in parts]


def _memory(c: Mapping[str, Any], width: int, style: Style) -> list[str]:
    low, high = c["memory_range_bytes"]
    limit = f" of {show_bytes(c['memory_limit_bytes'])} usable" if "memory_limit_bytes" in c else ""
    items = [style.bold(show_bytes(c["memory_per_device_bytes"])) + f"{limit} (range {show_bytes(low)} to {show_bytes(high)})", "fits: " + style.fit(c["fit"])]
    items += [f"{k} {show_bytes(v)}" for k, v in breakdown(c) if v]
    lines = labelled("memory", items, width, style)
    if "memory_limit_bytes" in c:
        parts = [(float(v), k[0].upper()) for k, v in breakdown(c)]
        lines += _bar(parts, max(c["memory_limit_bytes"], c["memory_per_device_bytes"]), width, style)
    return lines


def _bar(parts: Sequence[tuple[float, str]], total: float, width: int, style: Style) -> list[str]:
    """The line of a bar of parts by their first letters, which the words above it begin with; none where all of it is one letter, or nothing."""
    drawn = bar(parts, total, min(BAR, width - 10))
    return labelled("", [f"[{drawn}]"], width, style) if len(set(drawn)) > 1 else []


def _traffic(c: Mapping[str, Any], width: int, style: Style) -> list[str]:
    exposed = c.get("exposed_s_by_collective", {})
    rows = []
    for kind, axes in c["communication_bytes_per_device"].items():
        for axis, cell in axes.items():
            seconds = exposed.get(f"{kind} {axis}", 0.0)
            rows.append((seconds, cell["payload"], f"{kind} over {axis} {show_bytes(cell['payload'])} (exposed {show_time(seconds)})"))
    rows.sort(key=lambda r: (-r[0], -r[1]))
    return labelled("traffic", [text for _, _, text in rows] or ["none: no device waits for another"], width, style, " · ")


def _layouts(strategy: Strategy, width: int, style: Style) -> list[str]:
    groups = [g for g in weight_groups(strategy) if len(g.shape) > 1] or weight_groups(strategy)
    names = extent_names(strategy)
    labels = short_labels([g.label for g in groups])
    items = [f"{short(labels[g.label], LONGEST)} {spell_weight(g, names)}" for g in groups[:SHOWN_WEIGHTS]]
    if len(groups) > SHOWN_WEIGHTS:
        items.append(f"and {len(groups) - SHOWN_WEIGHTS} more")
    x = residual(strategy, names)
    if x:
        items.append(f"between blocks {x}")
    legend = ", ".join(f"{letter} {n:,}" for n, letter in names.items() if any(n in g.shape for g in groups[:SHOWN_WEIGHTS]))
    if legend:
        items.append(style.dim(f"({legend})"))
    return labelled("layouts", items, width, style)


def unsupported(strategy: Strategy) -> list[tuple[str, int, float]]:
    """(reason, nodes, seconds a step) per kind of operator that has no rule and so runs whole on every device."""
    found: dict[str, tuple[int, float]] = {}
    for row in strategy.nodes.values():
        if row.get("unsupported"):
            n, s = found.get(row["unsupported"], (0, 0.0))
            found[row["unsupported"]] = (n + row.get("times", 1), s + row.get("time_s", 0.0) * int(strategy.techniques["microbatches"]))
    return [(reason, n, s) for reason, (n, s) in found.items()]


def findings(strategy: Strategy) -> list[str]:
    """What a reader should not miss, a sentence each."""
    c, out = strategy.costs, []
    if c["distinct_work"] < DISTINCT:
        beside = ", on padding or on no microbatch (bubbles)" if lockstep(strategy) else " or on padding"
        out.append(f"devices doing distinct work: {percent(c['distinct_work'])}: the rest of the arithmetic is done twice{beside}")
    low, high = c["memory_range_bytes"]
    if c["fit"] == "tight":
        out.append(f"memory is tight: its range ends {show_bytes(high - c['memory_limit_bytes'])} above what is usable; --memory-reserve with so much more plans for that, "
                   "plan verify asks the compiler")  # fmt: skip
    if c["fit"] == "no":
        perhaps = "; the lower end of its range would: plan verify asks the compiler" if low <= c["memory_limit_bytes"] else ""
        out.append("this plan does not fit in the memory of a device" + perhaps)
    for reason, n, seconds in unsupported(strategy):
        share = f", {percent(seconds / c['step_time_s'])} of the step" if c["step_time_s"] else ""
        out.append(f"{n} node{'s' if n > 1 else ''} whole on every device ({reason}): {show_time(seconds)}{share}")
    out += table_findings(strategy)
    padded = [name for name, row in strategy.tensors.items() if row.get("padded")]
    if padded:
        out.append(f"{len(padded)} tensor{'s' if len(padded) > 1 else ''} padded to a multiple of {'their' if len(padded) > 1 else 'its'} axes, "
                   f"first {short(padded[0], 40)}")  # fmt: skip
    return out


def table_findings(strategy: Strategy) -> list[str]:
    """What host memory the hosted tables take, or whether hosting them would pay."""
    c, out = strategy.costs, []
    if c.get("host_memory_bytes"):
        n = len(strategy.techniques["hosted"])
        out.append(f"{n} table{'s' if n > 1 else ''} with their optimizer state take {show_bytes(c['host_memory_bytes'])} of the memory of all hosts together; "
                   "rows that a step does not read keep their moments (docs/tables.md)")  # fmt: skip
    for key, name in TABLES.items():
        row = strategy.baselines.get(key)
        if row is not None and row["fit"] != "no" and not ties(c, row):
            ratio = c["step_time_s"] / row["step_time_s"]
            faster, slower = f"{ratio:.2g} times as fast: plan again with --tables {key.removeprefix('tables_')}", f"{1 / ratio:.2g} times as slow: they stay on the devices"
            sizes = f"{show_bytes(row['memory_per_device_bytes'])} a device instead of {show_bytes(c['memory_per_device_bytes'])}"
            out.append(f"{name} would be {faster if ratio > 1 else slower}; {sizes}")
    return out


def _findings(strategy: Strategy, width: int, style: Style) -> list[str]:
    lines = []
    for text in findings(strategy):
        first, *more = hang("finding  ", text, width)
        lines += [style.warn("finding  ") + first.removeprefix("finding  "), *more]
    return lines


def baseline_name(key: str, row: Mapping[str, Any]) -> str:
    """A baseline in words: `data parallel + ZeRO-1`, `tensor 8 x data 8`."""
    mesh = row["mesh"]
    name = {"data_parallel": "data parallel", "zero3": "ZeRO-3", "replicated": "replicated", **TABLES}.get(key, key)
    if key == "megatron":
        name = " x ".join(f"{AXES.get(a, a)} {n}" for a, n in reversed(list(mesh.items())))
    return name + (f" + ZeRO-{row['zero_stage']}" if row["zero_stage"] and key != "zero3" else "")


def tuned_words(row: Mapping[str, Any]) -> str:
    """What a baseline was tuned to: `4 micro, recompute`."""
    out = [f"{row['microbatches']} microbatches"] if row["microbatches"] > 1 else []
    if row["recompute"] != "none":
        out.append("recompute" if row["recompute"] == "block" else f"recompute ({row['recompute']})")
    return ", ".join(out)


def tuned_over(strategy: Strategy) -> str:
    """`each tuned over microbatches, recompute and optimizer level`: of that what no pin decides for baselines, and what there are blocks for."""
    pinned = strategy.provenance.get("pins", {}).get("techniques", {})
    if strategy.workload["kind"] != "train":
        return ""
    level = strategy.topology["devices"] > 1
    every = {"microbatches": "microbatches", "recompute": "recompute"} if strategy.blocks else {"microbatches": "microbatches"}
    open_ = [word for key, word in every.items() if key not in pinned] + (["optimizer level"] if level else [])
    kept = [word for key, word in every.items() if key in pinned]
    words = [f"each tuned over {listed(open_)}"] if open_ else []
    return ", ".join([*words, *([f"with {listed(kept)} as pinned"] if kept else [])])


def unheld(strategy: Strategy, own: Mapping[str, Any]) -> str:
    """`; faster ones do not keep the pins`, where a baseline is faster than the best plan under them, of costs `own`: one that kept them would be the plan."""
    said = strategy.provenance
    what = "pins" if "pins" in said else "mode" if said.get("mode", "auto") != "auto" else ""
    faster = any(row["fit"] != "no" and row["step_time_s"] < own["step_time_s"] * (1 - TIE) for key, row in strategy.baselines.items() if key not in TABLES)
    return f"; faster ones do not keep the {what}" if what and faster and said.get("objective", "step") == "step" else ""


def ties(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether each plan's step time lies in the other's range: the model cannot tell them apart."""
    inside = lambda x, y: y["step_time_range_s"][0] <= x["step_time_s"] <= y["step_time_range_s"][1]  # noqa: E731
    return inside(a, b) and inside(b, a)


def comparison(strategy: Strategy, width: int, style: Style) -> list[str]:
    """The plan beside the baselines."""
    if not strategy.baselines:
        return []
    own = strategy.costs
    rows = [["", "step", "relative", "memory", "fits", ""]]
    rows.append([style.bold("this plan"), show_time(own["step_time_s"]), "", show_bytes(own["memory_per_device_bytes"]), style.fit(own["fit"]), ""])
    notes: list[list[str]] = []
    order = sorted(strategy.baselines.items(), key=lambda kv: (kv[1]["fit"] == "no", kv[1]["step_time_s"]))
    for key, row in order:
        ratio = row["step_time_s"] / own["step_time_s"] if own["step_time_s"] else 1.0
        same = "tie" if row["fit"] != "no" and ties(own, row) else ""
        notes.append([t for t in (same, *tuned_words(row).split(", ")) if t])
        rows.append([baseline_name(key, row), show_time(row["step_time_s"]), f"{ratio:.2f}x", show_bytes(row["memory_per_device_bytes"]), style.fit(row["fit"]), ""])
    room = width - visible(table([[*row[:5], "|"] for row in rows], right=(1, 2, 3))[0]) + 1
    for cells, words in zip(rows[2:], notes, strict=True):
        while words and len(", ".join(words)) > room:
            words.pop()  # a word that does not fit is left out; the first ("tie") goes last
        cells[5] = ", ".join(words)
    lines = table(rows, right=(1, 2, 3))
    none = "; those that do not fit at their smallest" if any(row["fit"] == "no" for row in strategy.baselines.values()) else ""
    note = f"{tuned_over(strategy)}{none}{unheld(strategy, own)}; tie: each within the other's range".removeprefix("; ")
    return [*lines, *(style.dim(line) for line in hang("", note, width))]
