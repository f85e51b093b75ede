"""Strategy files, checked before they are used: every key of the right type, and nothing that no
plan can have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from costmodels.hardware.device import known_rates
from planner.errors import PlanError
from planner.execution.techniques import OF_PLANS
from planner.strategy.strategy import Strategy
from planner.strategy.types import StrategyFile

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
_SUMMARY = """step_time_s step_time_range_s compute_time_s recompute_time_s optimizer_time_s communication_time_s exposed_communication_time_s bubble_time_s flops_per_device
              distinct_work model_flops_utilization memory_per_device_bytes memory_limit_bytes memory_range_bytes fit memory_breakdown_bytes communication_bytes_per_device"""  # noqa: E501
NEEDED = {
    "StrategyFile": (
        "model topology workload mesh nodes blocks tensors techniques cost solver baselines"
    ),
    "ModelTable": "name sha256 nodes parameters",
    "TopologyTable": "device devices levels",
    "LevelTable": (
        "name size bandwidth_bytes_per_s latency_s kind efficiency all_reduce_bytes_per_s"
    ),
    "GroupTable": "device devices",
    "AnchorTable": "model rates",
    "WorkloadTable": "kind batch dims precision runtime",
    "AxisTable": "name size levels",
    "RunnerUp": "split extra_s",
    "NodeTable": "op split outputs recompute",
    "BlockTable": "first period repeats body",
    "TensorTable": "layout partial shape",
    "ZeroTable": "level dim axes",
    "SideTable": "tensor dims layout partial",
    "KernelTable": "forward_s backward_s again times step_s bubble_s bound_by",
    "MoveTable": "kind axes phase tensor count payload_bytes time_s",
    "DetailTable": "rule sizes operands results kernels moves",
    "TechniqueTable": "microbatches zero_stage zero_group recompute",
    "MemoryTable": " ".join(PARTS),
    "TrafficTable": "payload wire",
    "IslandTable": "device devices microbatches busy_s",
    "SolverTable": "name status",
    "CostTable": _SUMMARY,
    "BaselineTable": f"{_SUMMARY} mesh zero_stage recompute microbatches",
}
"""Keys of each table that commands rely on. Others may be missing, as they are in files of earlier
versions; of the right type they must be where they are."""
WIDER = {"payload_bytes": float, "memory_range_bytes": list[float], "status": str}
"""Keys that earlier versions wrote with a wider type."""
_PROVENANCE: dict[str, Any] = {
    "source": str,
    "search_s": float,
    "read_s": float,
    "cost_model": str,
    "decisions": str,
    "pins": dict[str, Any],
    "objective": str,
    "mode": str,
    "launcher": str,
    "date": str,
    "tool": str,
    "incremental": dict[str, Any],
    "tables": dict[str, int],
    "cache_faults": list[str],
}
"""What commands read of a part whose other keys are anybody's."""
MOST_DEVICES, MOST_SIZE, MOST_WORK = 2**24, 2**62, 2**100
"""Of a machine, of anything else that is counted (beyond them nothing is priced in sensible time or
exactly), and of floating-point operations: DeepSeek-V3 on one device takes 2^64 a step."""


def load(path: str | Path) -> Strategy:
    """A strategy file, refused with its first wrong key when its content has not the types of a
    strategy."""

    try:
        strategy = Strategy.load(path)
    except (
        RecursionError,
        ValueError,
        TypeError,
    ) as e:  # nesting or a top-level shape that no strategy has
        raise PlanError("P057", f"{path} is not a usable strategy: {type(e).__name__}") from e
    return checked(strategy, path)


def checked(strategy: Strategy, path: str | Path) -> Strategy:
    """A strategy that was read from a file, refused where its content has not the types of one."""
    wrong = (
        mismatch(_content(strategy), StrategyFile)
        or _origin(strategy.provenance)
        or impossible(strategy)
    )
    if wrong:
        raise PlanError(
            "P057",
            f"{path} is not a usable strategy: {wrong}",
            help=["plan again, or undo the last edit of the file"],
        )
    return strategy


def _content(strategy: Strategy) -> dict[str, Any]:
    """The file's keys as they were read: rounding them (`to_dict`) would fail on what is to be
    found here."""
    return {
        ("cost" if f.name == "costs" else f.name): getattr(strategy, f.name)
        for f in fields(strategy)
        if f.name != "graph"
    }


def mismatch(value: Any, of: Any, where: str = "") -> str:
    """The first place where a value of JSON is not of a type of planner.strategy.types, in words;
    "" when it is. Keys beside those named are not looked at."""
    origin, inner = get_origin(of), get_args(of)
    if of is Any:
        return _endless(value, where)
    if is_typeddict(of) or origin is dict:
        if not isinstance(value, Mapping):
            return f"{where or 'the file'} is no table"
        hints = _keys(of) if is_typeddict(of) else dict.fromkeys(value, (inner[1], True))
        for key, (kind, needed) in hints.items():
            place = f"{where}.{key}" if where else str(key)
            if key not in value:
                if needed:
                    return f"{place} is missing"
            elif wrong := mismatch(value[key], kind, place):
                return wrong
        return ""
    if origin is list:
        if not isinstance(value, list | tuple):
            return f"{where} is no list"
        return next(
            (m for i, v in enumerate(value) if (m := mismatch(v, inner[0], f"{where}[{i}]"))), ""
        )
    if origin in (Union, UnionType):
        return (
            ""
            if any(not mismatch(value, t, where) for t in inner)
            else mismatch(value, inner[0], where)
        )
    if origin is Literal:
        return (
            "" if value in inner else f"{where} is {str(value)[:40]!r}, none of {', '.join(inner)}"
        )
    if of is NoneType:
        return "" if value is None else f"{where} is {type(value).__name__} {str(value)[:40]!r}"
    if not isinstance(value, (int, float) if of is float else of) or (
        isinstance(value, bool) and of is not bool
    ):
        return f"{where} is {type(value).__name__} {str(value)[:40]!r}"
    return _endless(value, where, counted=of is not float)


def _endless(value: Any, where: str, counted: bool = True) -> str:
    """Numbers that are none, or that no strategy counts up to. counted: as whole numbers are."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}"
    return (
        f"{where} is {str(value)[:20]}..., which is too large"
        if isinstance(value, int) and abs(value) > (MOST_SIZE if counted else MOST_WORK)
        else ""
    )


def _origin(provenance: Mapping[str, Any]) -> str:
    return next(
        (
            m
            for k, kind in _PROVENANCE.items()
            if k in provenance and (m := mismatch(provenance[k], kind, f"provenance.{k}"))
        ),
        "",
    )


@cache
def _keys(of: Any) -> dict[str, tuple[Any, bool]]:
    """Key of a table -> its type, and whether it must be there."""
    needed = NEEDED.get(of.__name__, "").split()
    kinds = {
        k: get_args(t)[0] if get_origin(t) is NotRequired else t
        for k, t in get_type_hints(of, include_extras=True).items()
    }
    return {k: (WIDER.get(k, t), k in needed) for k, t in kinds.items()}


def impossible(s: Strategy) -> str:
    """The first value of the right type that no strategy can have, in words; "" when there is
    none."""
    counts = {
        "topology.devices": s.topology["devices"],
        "workload.batch": s.workload["batch"],
        "techniques.microbatches": s.techniques["microbatches"],
        **{f"mesh axis {a['name']}": a["size"] for a in s.mesh},
        **{f"level {x['name']}": x["size"] for x in s.topology["levels"]},
        **{f"times of node {n}": row.get("times", 1) for n, row in s.nodes.items()},
        **{
            f"{k} of a block": b[k]
            for b in s.blocks
            for k in ("period", "repeats", "step")
            if k in b
        },
        **{
            f"count of a collective of {n}": move["count"]
            for n, row in s.details.items()
            for move in row["moves"]
        },
    }
    if odd := next((f"{k} is {n}" for k, n in counts.items() if not 1 <= n <= MOST_SIZE), ""):
        return odd
    if s.topology["devices"] > MOST_DEVICES or math.prod(a["size"] for a in s.mesh) > MOST_DEVICES:
        return (
            f"{s.topology['devices']:,} devices in a mesh of"
            f" {' x '.join(str(a['size']) for a in s.mesh)}: more than {MOST_DEVICES:,}"
        )
    if anchor := s.topology.get("anchor"):
        try:
            known_rates(anchor["rates"])
        except ValueError as e:
            return f"topology.anchor: {e}"
    chosen = s.chosen
    if odd := next((w for t in OF_PLANS if (w := t.wrong(getattr(chosen, t.field)))), ""):
        return f"techniques: {odd[:80]}"
    for where, table in (
        ("cost", s.costs),
        *((f"baselines.{k}", row) for k, row in s.baselines.items()),
    ):
        for key in ("step_time_range_s", "memory_range_bytes"):
            if len(table[key]) != 2:
                return f"{where}.{key} has {len(table[key])} ends"
    for name, row in s.tensors.items():
        if len(row["layout"]) != len(row["shape"]) or any(n < 0 for n in row["shape"]):
            return f"tensor {name}: layout {row['layout']} of shape {row['shape']}"
        if "zero" in row and not 0 <= row["zero"]["dim"] < len(row["shape"]):
            return f"tensor {name}: zero.dim is {row['zero']['dim']}"
    uneven = next(
        (
            f"{n}: {side['tensor']}"
            for n, row in s.details.items()
            for side in (*row["operands"], *row["results"])
            if len(side["dims"]) != len(side["layout"])
        ),
        "",
    )
    return f"details of {uneven}: dims and layout differ in length" if uneven else ""
