"""What changed between two strategies, and why: the model, the workload, the machine, the cost
model, or the search.

A cause is something that differs *before* any search ran; a plan that differs without a cause was
found by another search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.pins.dialects import axis_meant
from planner.pricing.cost import OTHER_PARTS
from planner.sharding.notation import spell_split
from planner.strategy.notation import spell_weight, weight_groups
from planner.strategy.strategy import GIVEN, Strategy

SHAPING = ("kind", "batch", "dims", "shapes", "training")
"""Parts of a workload that change the shapes or the nodes of a graph."""
PARTS = ("compute", "exposed communication", "bubble", "optimizer", *OTHER_PARTS.values())
"""Figures that add up to a step."""
CAUSES = ("model", "workload", "machine", "cost model", "solver")


@dataclass(frozen=True)
class Change:
    """One thing that differs. section: one of CAUSES, or mesh, techniques, splits, layouts, cost.
    before/after are texts ("" where absent)."""

    section: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Figure:
    """A priced figure of both plans, in its unit: seconds, bytes or a share."""

    what: str
    unit: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative change; 0 when both are 0, infinite from 0."""
        if self.before == self.after:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")


@dataclass(frozen=True)
class Diff:
    """All changes, causes first, and the figures."""

    names: tuple[str, str]
    changes: tuple[Change, ...]
    figures: tuple[Figure, ...]
    ranges: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    """Step time of either plan, from and to, in seconds."""

    @property
    def gain(self) -> tuple[float, tuple[Figure, ...]]:
        """Seconds of a step that the second plan saves, and the parts of a step that moved, the
        most first."""
        parts = [f for f in self.figures if f.what in PARTS and f.before != f.after]
        step = next((f.before - f.after for f in self.figures if f.what == "step"), 0.0)
        return step, tuple(sorted(parts, key=lambda f: -abs(f.before - f.after)))

    @property
    def tie(self) -> bool:
        """Whether the ranges of the step times overlap."""
        (a, b), (c, d) = self.ranges
        return a <= d and c <= b

    @property
    def causes(self) -> tuple[str, ...]:
        """What differs before the search, of CAUSES; "search" when only decisions differ; () when
        nothing does."""
        sections = tuple(c for c in CAUSES if any(x.section == c for x in self.changes))
        return sections or (
            ("search",) if self.changes or any(f.change for f in self.figures) else ()
        )


def compare(a: Strategy, b: Strategy) -> Diff:
    """Compare two strategies."""
    a, b = _named_now(a), _named_now(b)
    changes = [
        *_model(a, b),
        *_table("workload", a.workload, b.workload),
        *_machine(a, b),
        *_cost_model(a, b),
    ]
    if a.solver["name"] != b.solver["name"] and not {a.solver["name"], b.solver["name"]} & set(
        GIVEN
    ):
        changes.append(Change("solver", "name", a.solver["name"], b.solver["name"]))
    mesh = [" x ".join(f"{x['name']}={x['size']}" for x in s.mesh) for s in (a, b)]
    if mesh[0] != mesh[1]:
        changes.append(Change("mesh", "axes", *mesh))
    changes += _table("techniques", a.techniques, b.techniques)
    changes += _splits(a, b)
    changes += _layouts(a, b)
    return Diff(
        (str(a.model["name"]), str(b.model["name"])),
        tuple(changes),
        tuple(figures(a.costs, b.costs)),
        (_range(a), _range(b)),
    )


def _named_now(s: Strategy) -> Strategy:
    """The strategy with its axes in today's names: files of before say `model` for `tensor`."""
    names = {str(a["name"]): axis_meant(str(a["name"])) for a in s.mesh}
    if all(old == new for old, new in names.items()) or len(set(names.values())) < len(names):
        return s

    def now(axes: Sequence[str]) -> list[str]:
        return [names.get(a, a) for a in axes]

    def tensor(row: Mapping[str, Any]) -> dict[str, Any]:
        zero = {"zero": {**row["zero"], "axes": now(row["zero"]["axes"])}} if "zero" in row else {}
        return {**row, "layout": [now(axes) for axes in row["layout"]], **zero}

    return replace(
        s,
        mesh=tuple({**a, "name": names[a["name"]]} for a in s.mesh),
        techniques={**s.techniques, "zero_group": now(s.techniques["zero_group"])},
        nodes={
            n: {**row, "split": {f: now(axes) for f, axes in row["split"].items()}}
            for n, row in s.nodes.items()
        },
        tensors={n: tensor(row) for n, row in s.tensors.items()},
    )


def _range(s: Strategy) -> tuple[float, float]:
    low, high = s.costs["step_time_range_s"]
    return float(low), float(high)


def figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Figure]:
    """The figures of two cost tables side by side."""
    rows = [
        ("step", "s", "step_time_s"),
        ("compute", "s", "compute_time_s"),
        ("exposed communication", "s", "exposed_communication_time_s"),
        ("bubble", "s", "bubble_time_s"),
        ("optimizer", "s", "optimizer_time_s"),
        *((words, "s", part) for part, words in OTHER_PARTS.items() if part in a or part in b),
        ("memory", "B", "memory_per_device_bytes"),
        ("FLOPs per device", "FLOP", "flops_per_device"),
        ("MFU", "share", "model_flops_utilization"),
        ("distinct work", "share", "distinct_work"),
    ]
    return [
        *(
            Figure(what, unit, float(a.get(key, 0.0)), float(b.get(key, 0.0)))
            for what, unit, key in rows
        ),
        Figure("payload", "B", payload(a), payload(b)),
    ]


def payload(cost: Mapping[str, Any]) -> float:
    """Bytes of all collectives of one device and step."""
    return float(
        sum(
            cell["payload"]
            for axes in cost["communication_bytes_per_device"].values()
            for cell in axes.values()
        )
    )


def _model(a: Strategy, b: Strategy) -> list[Change]:
    """Nothing for the same graph. Else what a reader can act on: counts, blocks that repeat more or
    less often, nodes that came and went."""
    if a.model["sha256"] == b.model["sha256"]:
        return []
    changes = [
        Change("model", k, f"{a.model[k]:,}", f"{b.model[k]:,}")
        for k in ("nodes", "parameters")
        if a.model[k] != b.model[k]
    ]
    before, after = (
        {tuple(x["body"]): x["repeats"] for x in a.blocks},
        {tuple(x["body"]): x["repeats"] for x in b.blocks},
    )
    for body, repeats in before.items():
        if after.get(body, repeats) != repeats:
            changes.append(
                Change(
                    "model",
                    f"repeats of the block of {len(body)} nodes from {body[0]}",
                    str(repeats),
                    str(after[body]),
                )
            )
    gone = [n for n in a.nodes if n not in b.nodes]
    new = [n for n in b.nodes if n not in a.nodes]
    changes += [Change("model", f"node {n} ({a.nodes[n]['op']})", "there", "") for n in gone]
    changes += [Change("model", f"node {n} ({b.nodes[n]['op']})", "", "new") for n in new]
    changes += [
        Change("model", f"operator of {n}", a.nodes[n]["op"], b.nodes[n]["op"])
        for n in a.nodes
        if n in b.nodes and a.nodes[n]["op"] != b.nodes[n]["op"]
    ]
    moved = [
        n
        for n, row in a.tensors.items()
        if n in b.tensors and row["shape"] != b.tensors[n]["shape"] and "label" in row
    ]
    changes += [
        Change(
            "model",
            f"shape of {a.tensors[n]['label']}",
            str(a.tensors[n]["shape"]),
            str(b.tensors[n]["shape"]),
        )
        for n in moved
    ]
    if changes or any(a.workload.get(k) != b.workload.get(k) for k in SHAPING):
        return changes  # other sizes make another hash: the workload says it
    return [
        Change(
            "model",
            "graph (attributes or activations)",
            str(a.model["sha256"])[:12],
            str(b.model["sha256"])[:12],
        )
    ]


def _machine(a: Strategy, b: Strategy) -> list[Change]:
    changes = _table(
        "machine",
        {k: v for k, v in a.topology.items() if k != "levels"},
        {k: v for k, v in b.topology.items() if k != "levels"},
    )
    shapes = [
        " x ".join(f"{x['size']} ({x['name']})" for x in s.topology["levels"]) for s in (a, b)
    ]
    if shapes[0] != shapes[1]:
        return [*changes, Change("machine", "levels", *shapes)]
    for x, y in zip(a.topology["levels"], b.topology["levels"], strict=True):
        changes += _table("machine", x, y, f"level {x['name']}: ")
    return changes


def _cost_model(a: Strategy, b: Strategy) -> list[Change]:
    """By the recorded version; and by figures, where the same decisions on the same model and
    machine have another price."""
    versions = [str(s.provenance.get("cost_model", "unknown")) for s in (a, b)]
    if versions[0] != versions[1]:
        return [Change("cost model", "version", *versions)]
    same = (
        a.model["sha256"] == b.model["sha256"]
        and a.topology == b.topology
        and a.workload == b.workload
        and a.mesh == b.mesh
    )
    if same and a.techniques == b.techniques and splits(a) == splits(b) and a.costs != b.costs:
        return [
            Change(
                "cost model",
                "prices of the same decisions",
                f"{a.costs['step_time_s']:.4g} s",
                f"{b.costs['step_time_s']:.4g} s",
            )
        ]
    return []


def splits(s: Strategy) -> dict[str, Any]:
    """node -> split."""
    return {n: row["split"] for n, row in s.nodes.items()}


def _table(
    section: str, a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> list[Change]:
    changes: list[Change] = []
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if x == y:
            continue
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            changes += _table(section, x, y, f"{prefix}{key}.")
        else:
            changes.append(Change(section, prefix + key, _text(x), _text(y)))
    return changes


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _splits(a: Strategy, b: Strategy) -> list[Change]:

    return [
        Change("splits", n, spell_split(a.nodes[n]["split"]), spell_split(b.nodes[n]["split"]))
        for n in a.nodes
        if n in b.nodes and a.nodes[n]["split"] != b.nodes[n]["split"]
    ]


def _layouts(a: Strategy, b: Strategy) -> list[Change]:
    """Parameters that are kept otherwise: those have to be moved when a checkpoint changes plans.
    Layer numbers are starred."""

    before, after = (
        {
            (g.label, g.shape): (
                spell_weight(g, {}) + (f" on one of {g.stages} stages" if g.stages > 1 else "")
            )
            for g in weight_groups(s)
        }
        for s in (a, b)
    )
    return [
        Change("layouts", label, text, after[label, shape])
        for (label, shape), text in before.items()
        if after.get((label, shape), text) != text
    ]
