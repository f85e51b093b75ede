"""Files that commands read and write: strategies (checked before use), the model a strategy was made for, and default names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError

if TYPE_CHECKING:
    from planner.strategy import Strategy

NUMBER = (int, float)
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
# What commands rely on. A type (or several): a value of it. {"*": x}: a mapping to x; other mappings: these keys, "key?" where it may be absent. [x]: a list.
_SPLIT: Any = {"*": [str]}
_SIDE: Any = {"tensor": str, "dims": [str], "layout": [[str]], "partial": [str]}
_SUMMARY: Any = {
    "step_time_s": NUMBER, "step_time_range_s": [NUMBER], "tokens_per_s_per_device": NUMBER, "tokens_per_step": int, "compute_time_s": NUMBER,
    "recompute_time_s": NUMBER, "optimizer_time_s": NUMBER, "communication_time_s": NUMBER, "exposed_communication_time_s": NUMBER,
    "bubble_time_s": NUMBER, "flops_per_device": NUMBER, "distinct_work": NUMBER, "model_flops_utilization": NUMBER, "memory_per_device_bytes": int,
    "memory_limit_bytes": int, "memory_range_bytes": [NUMBER], "fit": str, "memory_breakdown_bytes": {"*": NUMBER},
    "communication_bytes_per_device": {"*": {"*": {"payload": NUMBER, "wire": NUMBER}}},
}  # fmt: skip
SHAPE: Any = {
    "model": {"name": str, "sha256": str, "nodes": int, "parameters": int},
    "topology": {"device": str, "devices": int, "levels": [{"name": str, "size": int, "bandwidth_bytes_per_s": NUMBER, "latency_s": NUMBER,
                                                            "kind": str, "efficiency": NUMBER, "all_reduce_bytes_per_s": NUMBER}]},
    "workload": {"kind": str, "batch": int, "dims": {"*": int}, "precision": str, "runtime": str},
    "mesh": [{"name": str, "size": int, "levels": [str]}],
    "nodes": {"*": {"op": str, "split": _SPLIT, "outputs": [str], "recompute": bool, "members?": [str], "times?": int, "time_s?": NUMBER, "unsupported?": str,
                    "runner_up?": {"split": _SPLIT, "extra_s": NUMBER}}},
    "blocks": [{"first": int, "period": int, "repeats": int, "body": [str], "scope?": str, "step?": int}],
    "tensors": {"*": {"layout": [[str]], "partial": [str], "shape": [int], "label?": str, "zero?": {"level": int, "dim": int, "axes": [str]}}},
    "techniques": {"microbatches": int, "zero_stage": int, "zero_group": [str], "recompute": str, "offload?": [str], "fused_collective_bytes?": int},
    "cost": _SUMMARY,
    "solver": {"name": str, "status": str, "stopped?": str, "plans_tried?": int},
    "assumptions?": [str],
    "findings?": [{"kind": str, "text": str}],
    "provenance?": {"source?": str, "search_s?": NUMBER, "cost_model?": str, "decisions?": str, "pins?": dict, "objective?": str, "mode?": str},
    "details?": {"*": {"rule": str, "sizes": {"*": int}, "operands": [_SIDE], "results": [_SIDE],
                       "kernels": {"forward_s": NUMBER, "backward_s": NUMBER, "again": bool, "times": int, "step_s": NUMBER, "bubble_s": NUMBER, "bound_by": str},
                       "moves": [{"kind": str, "axes": str, "phase": str, "tensor": str, "count": int, "payload_bytes": NUMBER, "time_s": NUMBER}]}},
    "baselines": {"*": {**_SUMMARY, "mesh": {"*": int}, "zero_stage": int, "recompute": str, "microbatches": int}},
}  # fmt: skip


def load(path: str | Path) -> Strategy:
    """A strategy file, refused with its first wrong key when its content has not the types of a strategy."""
    from planner.strategy import Strategy

    try:
        strategy = Strategy.load(path)
    except (RecursionError, ValueError, TypeError) as e:  # nesting or a top-level shape that no strategy has
        raise PlanError("P057", f"{path} is not a usable strategy: {type(e).__name__}") from e
    return checked(strategy, path)


def checked(strategy: Strategy, path: str | Path) -> Strategy:
    """A strategy that was read from a file, refused where its content has not the types of one."""
    wrong = mismatch(_content(strategy), SHAPE, "") or impossible(strategy)
    if wrong:
        raise PlanError("P057", f"{path} is not a usable strategy: {wrong}", help=["plan again, or undo the last edit of the file"])
    return strategy


def _content(strategy: Strategy) -> dict[str, Any]:
    """The file's keys as they were read: rounding them (`to_dict`) would fail on what is to be found here."""
    return {("cost" if f.name == "costs" else f.name): getattr(strategy, f.name) for f in fields(strategy) if f.name != "graph"}


def mismatch(value: Any, shape: Any, where: str) -> str:
    """The first place where a value has not the wanted shape, in words; "" when it has."""
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return f"{where or 'the file'} is no table"
        pairs = [(k, shape["*"]) for k in value] if "*" in shape else list(shape.items())
        for wanted, inner in pairs:
            key = wanted.removesuffix("?") if "*" not in shape else wanted
            at = f"{where}.{key}" if where else key
            if key not in value and key != wanted:
                continue
            found = mismatch(value[key], inner, at) if key in value else f"{at} is missing"
            if found:
                return found
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list | tuple):
            return f"{where} is no list"
        return next((m for i, v in enumerate(value) if (m := mismatch(v, shape[0], f"{where}[{i}]"))), "")
    if not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        return f"{where} is {type(value).__name__} {str(value)[:40]!r}"
    return "" if not isinstance(value, float) or math.isfinite(value) else f"{where} is {value}"


def impossible(s: Strategy) -> str:
    """The first value of the right type that no strategy can have, in words; "" when there is none."""
    counts = {"topology.devices": s.topology["devices"], "workload.batch": s.workload["batch"], "techniques.microbatches": s.techniques["microbatches"],
              **{f"mesh axis {a['name']}": a["size"] for a in s.mesh}, **{f"level {x['name']}": x["size"] for x in s.topology["levels"]},
              **{f"times of node {n}": row.get("times", 1) for n, row in s.nodes.items()},
              **{f"{k} of a block": b[k] for b in s.blocks for k in ("period", "repeats", "step") if k in b},
              **{f"count of a collective of {n}": move["count"] for n, row in s.details.items() for move in row["moves"]}}  # fmt: skip
    low = next((k for k, n in counts.items() if n < 1), "")
    if low:
        return f"{low} is {counts[low]}"
    if s.techniques["zero_stage"] not in (0, 1, 2, 3):
        return f"techniques.zero_stage is {s.techniques['zero_stage']}"
    for where, table in (("cost", s.costs), *((f"baselines.{k}", row) for k, row in s.baselines.items())):
        for key in ("step_time_range_s", "memory_range_bytes"):
            if len(table[key]) != 2:
                return f"{where}.{key} has {len(table[key])} ends"
        if not set(PARTS) <= set(table["memory_breakdown_bytes"]):
            return f"{where}.memory_breakdown_bytes lacks a part"
    for name, row in s.tensors.items():
        if len(row["layout"]) != len(row["shape"]) or any(n < 0 for n in row["shape"]):
            return f"tensor {name}: layout {row['layout']} of shape {row['shape']}"
        if "zero" in row and not 0 <= row["zero"]["dim"] < len(row["shape"]):
            return f"tensor {name}: zero.dim is {row['zero']['dim']}"
    uneven = next((f"{n}: {side['tensor']}" for n, row in s.details.items() for side in (*row["operands"], *row["results"]) if len(side["dims"]) != len(side["layout"])), "")
    return f"details of {uneven}: dims and layout differ in length" if uneven else ""


def stem(source: str) -> str:
    """`llama3-8b` of zoo:llama3-8b,layers=2, `model` of folder/model.onnx."""
    if source.startswith("zoo:"):
        return source.removeprefix("zoo:").partition(",")[0]
    return Path(source).stem


def model_of(strategy: Strategy, path: str | Path, given: str | None) -> str:
    """Where the model of a strategy is: as given, as recorded, or beside the strategy. PlanError when it is nowhere."""
    if given:
        return given
    name, recorded = str(strategy.model["name"]), str(strategy.provenance.get("source", ""))
    if name.startswith("zoo:"):
        return name
    places = [Path(recorded)] if recorded else []
    places.append(Path(path).parent / name)
    for place in places:
        if place.is_file():
            return str(place)
    raise PlanError("P058", f"the model {name!r} of {path} is not where it was", detail=[f"looked for {p}" for p in places], help=["--model FILE"])
