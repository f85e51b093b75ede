"""Why a plan has pipeline stages, and which of them run a node: from the file, and with the model
which stage holds a repeat that was asked for."""

from __future__ import annotations

import re
from math import prod

from costmodels.hardware.units import show_bytes, show_time
from planner.report.baselines import baseline_name
from planner.sharding.layout import STAGE
from planner.strategy.stages import assigned_blocks, lockstep, stages, ticks
from planner.strategy.strategy import Strategy
from planner.support.text import count, percent


def why_stages(s: Strategy) -> list[str]:
    """What a pipeline costs and what it is good for, a phrase each; nothing without one."""
    n, c = stages(s), s.costs
    if n < 2:
        return []
    step = c["step_time_s"] or 1.0
    weights = [
        (prod(row["shape"]), row.get("stage")) for row in s.tensors.values() if "label" in row
    ]
    largest, in_all = (
        sum(size for size, stage in weights if not stage),
        sum(size for size, _ in weights),
    )
    if cuts := s.techniques.get(
        "cuts"
    ):  # every weight has a stage, and each device room for those of the fullest
        largest = max(sum(size for size, stage in weights if stage == k) for k in range(n))
    sent = (
        c["communication_bytes_per_device"]
        .get("collective-permute", {})
        .get(STAGE, {"payload": 0})["payload"]
    )
    seconds = c["exposed_s_by_collective"].get(f"collective-permute {STAGE}", 0.0)
    share = percent(c["bubble_time_s"] / step)
    among = f" in {ticks(s)} ticks: {n - 1} are a bubble" if lockstep(s) else ": bubbles"
    phrases = [
        *([f"cut before {', '.join(cuts)}"] if cuts else []),
        f"each holds {count(largest)} of {count(in_all)} parameters",
        (
            f"{s.techniques['microbatches']} microbatches{among}, {show_time(c['bubble_time_s'])}"
            f" ({share} of the step)"
        ),
        f"{show_bytes(sent)} go from stage to stage, {show_time(seconds)} exposed",
    ]
    others = [
        (row["step_time_s"], key, row)
        for key, row in s.baselines.items()
        if row.get("schedule", "none") == "none"
    ]
    fitting = sorted((x for x in others if x[2]["fit"] != "no"), key=lambda x: x[:2])
    if fitting:
        seconds, key, row = fitting[0]
        phrases.append(
            f"the fastest baseline without stages that fits, {baseline_name(key, row)}, takes"
            f" {show_time(seconds)} ({100 * (seconds / step - 1):+.1f} %)"
        )
    elif others:
        least = min(row["memory_per_device_bytes"] for *_, row in others)
        phrases.append(
            f"no baseline without stages fits: the smallest takes {show_bytes(least)} of"
            f" {show_bytes(c['memory_limit_bytes'])}"
        )
    return phrases


def on_stages(s: Strategy, name: str) -> str:
    """Which pipeline stages run a node: its repeats are divided over them, or each has it."""
    n, (per_stage, repeats), chunks = stages(s), assigned_blocks(s), s.chosen.virtual_stages
    if s.techniques.get("cuts"):
        return f"stage {s.nodes[name]['stage']} of {n} runs it" + (
            ", and other stages its repeats" if s.nodes[name]["times"] > 1 else ""
        )
    if per_stage and any("per_stage" in b and name in b["body"] for b in s.blocks):
        chunk_repeats = (
            per_stage // chunks
        )  # of chunk v stage k holds those from (v * n + k) * chunk_repeats on
        starts = [[(v * n + k) * chunk_repeats for v in range(chunks)] for k in range(min(n, 2))]
        first = ", ".join(
            f"stage {k}: repeats"
            f" {' and '.join(f'{a} to {min(a + chunk_repeats, repeats) - 1}' for a in starts_here)}"
            for k, starts_here in enumerate(starts)
            if starts_here[0] < repeats
        )
        return (
            f"{per_stage} of its {repeats} repeats on each of {n} stages"
            f" ({first}{', ...' if n > 2 else ''})"
        )
    in_epilogue = s.nodes[name]["stage"] == n - 1
    return f"every one of {n} stages runs it" + (
        ": what follows the blocks counts on the last only"
        if in_epilogue
        else ", for its own microbatch"
    )


def plain(name: str) -> str:
    """A name with dots and slashes alike, without the ends of parameters' names."""
    return re.sub(r"[./]+", "/", name.removesuffix(".weight").removesuffix(".bias")).strip("/")


def named_repeat(s: Strategy, name: str, text: str) -> int:
    """The repeat of its block that a name means, of a node in the file: `layers.13.mlp` the 14th.
    -1 where it names none: no number, or names are not told apart by one
    (planner.search.decision_tables.numbering)."""
    block = next((b for b in s.blocks if name in b["body"] and "step" in b), None)
    if block is None:
        return -1
    scope, plain_name = re.sub(r"[./]+", "/", block["scope"]).lstrip("/"), plain(name)
    form = re.sub(r"\\?\d+", lambda _: r"(\d+)", re.escape(plain(text)))
    for match in re.finditer(f"(?={form})", plain_name):
        numbers = re.findall(r"\d+", plain(text))
        moved = [
            (int(a), int(match[k]))
            for k, a in enumerate(numbers, 1)
            if match.start(k) == len(scope)
        ]
        fixed = all(a == match[k] for k, a in enumerate(numbers, 1) if match.start(k) != len(scope))
        if fixed and moved:
            repeat, rest = divmod(moved[0][0] - moved[0][1], block["step"])
            if not rest and 0 <= repeat < block["repeats"]:
                return repeat
    return -1


def asked_repeat(s: Strategy, name: str, text: str) -> str:
    """`repeat 13 of the block is on stage 2` where a name stands for one repeat of a block that is
    divided over stages; "" else. name: its node in the file."""
    repeat, (per_stage, _) = named_repeat(s, name, text), assigned_blocks(s)
    if repeat < 0 or not any("per_stage" in b and name in b["body"] for b in s.blocks):
        return ""
    per_chunk = per_stage // s.chosen.virtual_stages
    return f"repeat {repeat} is on stage {repeat // per_chunk % stages(s)}"
