"""The docstring of an emitted program: what was planned, layouts in plain notation, and every
collective with its bytes."""

from __future__ import annotations

import re

from planner.emit.source import comment
from planner.emit.text import pattern
from planner.execution.techniques import phrases
from planner.strategy.strategy import Strategy

SHOWN = 24


def header(strategy: Strategy, backend: str) -> str:
    """Lines for the top of the program; all text of the model is cleaned."""
    mesh = ", ".join(f"{a}={n}" for a, n in strategy.mesh_shape)
    w = strategy.workload
    t = strategy.techniques
    lines = [
        f"{comment(str(strategy.model['name']), 60)} on {strategy.topology['devices']} devices"
        f" ({mesh}), {w['kind']}, batch {w['batch']}: a {backend} program emitted by meshwright."
    ]
    lines += [
        "",
        "    python PROGRAM.py --virtual-devices " + f"{strategy.topology['devices']} --steps 3",
        "",
    ]
    if w["kind"] == "train":
        lines.append(
            f"Techniques: ZeRO stage {t['zero_stage']}, recompute {t['recompute']},"
            f" {t['microbatches']}"
            f" {', '.join(['microbatch(es)', *phrases(strategy.chosen, ('offload',))])}."
        )
    lines.append(
        "Comments behind statements name the node and the layout of its result: [b/data, n] is cut"
        " over axis data along b; partial: a sum not yet taken."
    )
    lines.append("Parameters, likewise:")
    rows = parameters(strategy)
    for label, dims in rows[:SHOWN]:
        lines.append(f"    {comment(label, 64):64} [{dims}]")
    if len(rows) > SHOWN:
        lines.append(f"    ... and {len(rows) - SHOWN} more, in PARAMS below")
    if not strategy.costs["communication_bytes_per_device"]:
        lines.append("Collectives: none.")
        return "\n".join(lines)
    lines.append(
        f"Collectives per step and device, as planned in {w['precision']}: payload, and bytes on"
        " the wire of a ring"
    )
    for kind, axes in strategy.costs["communication_bytes_per_device"].items():
        for axis, cell in axes.items():
            lines.append(
                f"    {kind:20} over {axis:16} {cell['payload']:>16,} B"
                f" {round(cell['wire']):>16,} B"
            )
    return "\n".join(lines)


def parameters(strategy: Strategy) -> list[tuple[str, str]]:
    """(label, dims) of every parameter; those of repeated blocks once, with * for what counts the
    repeats."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in strategy.tensors.values():
        if row.get("label"):
            label = str(row["label"])
            dims = ", ".join(
                f"{n}" + ("/" + "+".join(a) if a else "")
                for n, a in zip(row["shape"], row["layout"], strict=True)
            )
            groups.setdefault((re.sub(r"\d+", "*", label), dims), []).append(label)
    return [(pattern(labels), dims) for (_, dims), labels in groups.items()]
