"""The baselines that a plan stands beside: their names, what they were tuned over, what ties, and
the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.sharding.layout import STAGE
from planner.strategy.strategy import Strategy
from planner.strategy.words import tuned_phrases
from planner.support.text import Style, hang, listed, table, visible

TIE = 1e-3
"""Share of a step below which plans are equal to a search (planner.search.request.TIE)."""
TABLES = {"tables_host": "tables on hosts", "tables_server": "tables on servers"}
WITH_ROOM = "with_room"
"""The best plan that fits with room, beside one that fits tightly
(planner.search.canonical_form.WITH_ROOM)."""
ON_DEVICES = "on_devices"
"""The best plan with nothing in the host's memory, beside one that has something there because that
is faster (planner.search.canonical_form.ON_DEVICES)."""
UNCUT = "replicated"
"""The axis of devices that all do the same (planner.analysis.axis_roles)."""
AXES = {"model": "tensor", STAGE: "pipeline"}
"""What people who know Megatron call an axis."""


def baseline_name(key: str, row: Mapping[str, Any]) -> str:
    """A baseline in words: `data parallel + ZeRO-1`, `tensor 8 x data 8`."""
    mesh = row["mesh"]
    name = {
        "data_parallel": "data parallel",
        "zero3": "ZeRO-3",
        "replicated": "replicated",
        WITH_ROOM: "with room",
        ON_DEVICES: "all on the devices",
        "even_shares": "in equal shares",
        **TABLES,
    }.get(key, key)
    if key == "megatron":
        name = " x ".join(f"{AXES.get(a, a)} {n}" for a, n in reversed(list(mesh.items())))
    elif key == "data_parallel" and UNCUT in mesh:
        name = "all rows on every device"  # too few of them to be divided: nothing is parallel
    return name + (f" + ZeRO-{row['zero_stage']}" if row["zero_stage"] and key != "zero3" else "")


def pins_for(row: Mapping[str, Any]) -> str:
    """The mesh and the techniques of a plan beside the one of a file, as --pin takes them."""
    pins = {
        **{a: n for a, n in row["mesh"].items() if n > 1},
        "zero": row["zero_stage"],
        "recompute": row["recompute"],
        "micro": row["microbatches"],
    }
    pins |= {"schedule": row["schedule"]} if row.get("schedule", "none") != "none" else {}
    pins |= {"virtual": row["virtual"]} if row.get("virtual", 1) > 1 else {}
    pins |= {"offload": "+".join(row["offload"])} if row.get("offload") else {}
    return ",".join(f"{k}={v}" for k, v in pins.items())


def tuned_over(strategy: Strategy) -> str:
    """`each tuned over microbatches, recompute and ZeRO stage`: of that what no pin decides for
    baselines, and what there are blocks for."""
    pinned = strategy.provenance.get("pins", {}).get("techniques", {})
    if strategy.workload["kind"] != "train":
        return ""
    level = strategy.topology["devices"] > 1
    every = (
        {"microbatches": "microbatches", "recompute": "recompute"}
        if strategy.blocks
        else {"microbatches": "microbatches"}
    )
    open_ = [word for key, word in every.items() if key not in pinned] + (
        ["ZeRO stage"] if level else []
    )
    pinned_words = [word for key, word in every.items() if key in pinned]
    words = [f"each tuned over {listed(open_)}"] if open_ else []
    return ", ".join(
        [*words, *([f"with {listed(pinned_words)} as pinned"] if pinned_words else [])]
    )


def unheld(strategy: Strategy, costs: Mapping[str, Any]) -> str:
    """`; faster ones do not keep the pins`, where a baseline is faster than the best plan under
    them, of `costs`: one that kept them would be the plan."""
    provenance = strategy.provenance
    what = (
        "pins"
        if "pins" in provenance
        else "mode"
        if provenance.get("mode", "auto") != "auto"
        else ""
    )
    faster = any(
        row["fit"] != "no" and row["step_time_s"] < costs["step_time_s"] * (1 - TIE)
        for key, row in strategy.baselines.items()
        if key not in TABLES
    )
    return (
        f"; faster ones do not keep the {what}"
        if what and faster and provenance.get("objective", "step") == "step"
        else ""
    )


def ranked(strategy: Strategy) -> list[tuple[str, Mapping[str, Any]]]:
    """The baselines by their keys: those that fit first, each group by its step."""
    return sorted(
        strategy.baselines.items(), key=lambda kv: (kv[1]["fit"] == "no", kv[1]["step_time_s"])
    )


MARK, MARK_NOTE = "tie", "; tie: too close to tell apart"
"""How a row is marked that `ties` with the plan, and what a table says of that."""


def ties(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two plans of one model on one machine are too close to be told apart: each step lies
    within what the other's cannot be told from (of files of earlier versions, its range)."""

    def inside(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
        low, high = y.get("tie_range_s") or y["step_time_range_s"]
        return bool(low <= x["step_time_s"] <= high)

    return inside(a, b) and inside(b, a)


def mark(costs: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The mark of a baseline that fits and `ties` with the plan; "" of others."""
    return MARK if row["fit"] != "no" and ties(costs, row) else ""


def comparison(strategy: Strategy, width: int, style: Style) -> list[str]:
    """The plan beside the baselines."""
    if not strategy.baselines:
        return []
    costs = strategy.costs
    rows = [["", "step", "relative", "memory", "fits", ""]]
    rows.append(
        [
            style.bold("this plan"),
            show_time(costs["step_time_s"]),
            "",
            show_bytes(costs["memory_per_device_bytes"]),
            style.fit(costs["fit"]),
            "",
        ]
    )
    notes: list[list[str]] = []
    for key, row in ranked(strategy):
        ratio = row["step_time_s"] / costs["step_time_s"] if costs["step_time_s"] else 1.0
        asked = f"with --tables {key.removeprefix('tables_')}" if key in TABLES else ""
        notes.append([t for t in (mark(costs, row), asked, *tuned_phrases(row)) if t])
        rows.append(
            [
                baseline_name(key, row),
                show_time(row["step_time_s"]),
                f"{ratio:.2f}x",
                show_bytes(row["memory_per_device_bytes"]),
                style.fit(row["fit"]),
                "",
            ]
        )
    room = width - visible(table([[*row[:5], "|"] for row in rows], right=(1, 2, 3))[0]) + 1
    for cells, words in zip(rows[2:], notes, strict=True):
        while words and len(", ".join(words)) > room:
            words.pop()  # a word that does not fit is left out; the first ("tie") goes last
        cells[5] = ", ".join(words)
    lines = table(rows, right=(1, 2, 3))
    none = (
        "; those that do not fit at their smallest"
        if any(row["fit"] == "no" for row in strategy.baselines.values())
        else ""
    )
    marked = any(row[5].partition(",")[0] == MARK for row in rows[2:])
    note = f"{tuned_over(strategy)}{none}{unheld(strategy, costs)}{MARK_NOTE if marked else ''}"
    note = note.removeprefix("; ")
    return [*lines, *(style.dim(line) for line in hang("", note, width))]
