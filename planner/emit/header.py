"""The docstring of an emitted program: what was planned, layouts in plain notation, and every collective with its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.emit.source import comment

if TYPE_CHECKING:
    from planner.strategy import Strategy

SHOWN = 14


def header(strategy: Strategy, backend: str) -> str:
    """Lines for the top of the program; all text of the model is cleaned."""
    mesh = ", ".join(f"{a}={n}" for a, n in strategy.mesh_shape)
    w = strategy.workload
    t = strategy.techniques
    lines = [f"{comment(str(strategy.model['name']), 60)} on {strategy.topology['devices']} devices ({mesh}), {w['kind']}, batch {w['batch']}: a {backend} program "
             f"emitted by meshwright."]  # fmt: skip
    lines += ["", "    python PROGRAM.py --virtual-devices " + f"{strategy.topology['devices']} --steps 3", ""]
    if w["kind"] == "train":
        lines.append(f"Techniques: optimizer sharding level {t['zero_stage']}, recompute {t['recompute']}, {t['microbatches']} microbatch(es).")
    lines.append("Parameters, in the notation of the plan (dim/axis: the dim is cut over the mesh axis):")
    rows = [(str(r["label"]), r) for r in strategy.tensors.values() if r.get("label")]
    for label, row in rows[:SHOWN]:
        dims = ", ".join(f"{n}" + ("/" + "+".join(a) if a else "") for n, a in zip(row["shape"], row["layout"], strict=True))
        lines.append(f"    {comment(label, 64):64} [{dims}]")
    if len(rows) > SHOWN:
        lines.append(f"    ... and {len(rows) - SHOWN} more, in PARAMS below")
    unit = "float32 programs move the payload of the compute type they run in" if w["precision"] != "fp32" else "float32"
    lines.append(f"Collectives per step and device, as planned in {w['precision']} (payload, bytes on the wire of a ring; {unit}):")
    for kind, axes in strategy.costs["communication_bytes_per_device"].items():
        for axis, cell in axes.items():
            lines.append(f"    {kind:20} over {axis:16} {cell['payload']:>16,} B {round(cell['wire']):>16,} B")
    return "\n".join(lines)
