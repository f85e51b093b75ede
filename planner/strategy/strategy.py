"""The strategy: every decision and its price, as a file that is reviewed like a lock file.

Sorted keys, one node a line, rounded floats; nothing outside `provenance` depends on the clock or
on paths. Equality ignores provenance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from costmodels.hardware.intake import exists, read_json
from planner.errors import PlanError, did_you_mean, file_meant
from planner.execution.plan import Plan, StepTechniques
from planner.execution.techniques import read_table
from planner.graph.ir import Graph
from planner.sharding.layout import Layout
from planner.sharding.rule import Split
from planner.strategy.jax_shardings import shardings
from planner.support.atomic_write import write_atomically

FORMAT_VERSION = "1.0"
NODE_TABLES = ("details", "nodes", "tensors")

GIVEN = ("import", "manual")
"""Recorded solvers of plans that nobody searched for."""


@dataclass(frozen=True)
class Strategy:
    """Fields are the file's keys (planner/strategy/types.py, docs/stability.md). `graph` is the
    graph it was planned on, when it is at hand.

    details: what each class of nodes costs and why (planner.pricing.breakdown), of the decisions
    that `provenance.decisions` names; a plan is the same without.
    """

    model: Mapping[str, Any]
    topology: Mapping[str, Any]
    workload: Mapping[str, Any]
    mesh: tuple[Mapping[str, Any], ...]
    nodes: Mapping[str, Mapping[str, Any]]
    blocks: tuple[Mapping[str, Any], ...]
    tensors: Mapping[str, Mapping[str, Any]]
    techniques: Mapping[str, Any]
    costs: Mapping[str, Any]
    solver: Mapping[str, Any]
    baselines: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    """What a user should not miss, the gravest first: {kind, text} (planner.search.findings)."""
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)
    details: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict, compare=False, repr=False
    )
    graph: Graph | None = field(default=None, compare=False, repr=False)
    confirmed: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What a compiler said of the plan and of those before it (planner.verify.confirm); empty where
    none was asked."""

    @property
    def cost(self) -> SimpleNamespace:
        """`cost.step_time_s` and so on: the file's `cost`, as attributes."""
        return SimpleNamespace(**self.costs)

    @property
    def mesh_shape(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) pairs, outermost first."""
        return tuple((a["name"], a["size"]) for a in self.mesh)

    def decisions(self) -> str:
        """A short hash of what was decided: another one after an edit by hand, whose costs the file
        does not know."""
        decided = [
            self.mesh_shape,
            self.techniques,
            {n: row["split"] for n, row in self.nodes.items()},
        ]
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def plan(self) -> Plan:
        """The decisions an emitted program depends on. Needs the graph for repeated blocks' node
        ids: see `plan_for`."""
        if self.graph is None:
            raise PlanError(
                "P050",
                "this strategy has no graph at hand",
                help=["strategy.plan_for(graph), or planner.emit(strategy, model)"],
            )
        return self.plan_for(self.graph)

    def plan_for(self, graph: Graph) -> Plan:
        """The plan on a graph read at the strategy's microbatch.

        Raises PlanError: P051 when the graph is not the one it was made for, P060 and P061 when the
        file asks for what cannot be.
        """

        from planner.strategy.validate import check_mesh, check_splits

        check_mesh(self, int(self.topology["devices"]))
        runs = tuple((int(b["first"]), int(b["period"]), int(b["repeats"])) for b in self.blocks)
        of = list(range(len(graph.nodes)))
        for first, period, repeats in runs:
            if first + period * repeats > len(graph.nodes):
                raise PlanError(
                    "P051",
                    "this strategy was made for another graph: its repeated blocks end past the"
                    " last node",
                    help=["plan again"],
                )
            for i in range(first, first + period * repeats):
                of[i] = first + (i - first) % period
        splits = {}
        for i, node in enumerate(graph.nodes):
            row = self.nodes.get(node.id) or self.nodes.get(graph.nodes[of[i]].id)
            if row is None:
                raise PlanError(
                    "P051",
                    f"this strategy says nothing of node {node.id!r}: it was made for another"
                    " graph",
                    help=[
                        h
                        for h in (
                            did_you_mean(node.id, list(self.nodes)),
                            "plan again, or plan diff",
                        )
                        if h
                    ],
                )
            splits[node.id] = Split.of({f: tuple(a) for f, a in row["split"].items()})
        plan = self.plan_with(graph, splits, runs)
        check_splits(graph, plan)
        return plan

    def plan_with(
        self, graph: Graph, splits: Mapping[str, Split], runs: tuple[tuple[int, int, int], ...]
    ) -> Plan:
        """The plan of the file's mesh and techniques with these splits and repeated blocks. Raises
        PlanError P051, P060."""
        return Plan(
            mesh=self.mesh_shape,
            splits=splits,
            repeated_blocks=runs,
            stage_cuts=self.cuts(graph),
            **vars(self.chosen),
        )

    @property
    def chosen(self) -> StepTechniques:
        """The techniques, as values of a plan."""
        return read_table(self.techniques)

    def cuts(self, graph: Graph) -> tuple[int, ...]:
        """Where uneven pipeline stages begin. Raises PlanError P051, P060."""
        names = [str(n) for n in self.techniques.get("cuts", ())]
        index = {node.id: i for i, node in enumerate(graph.nodes)}
        if missing := next((n for n in names if n not in index), None):
            raise PlanError(
                "P051",
                f"a pipeline stage begins with node {missing!r}, which the graph has not: this"
                " strategy was made for another",
                help=["plan again"],
            )
        cuts = tuple(index[n] for n in names)
        if cuts and cuts != tuple(sorted(set(cuts) - {0})):
            raise PlanError(
                "P060",
                f"this strategy cannot be: its pipeline stages begin with {', '.join(names)}, which"
                " do not follow one another",
                help=["plan again"],
            )
        return cuts

    def layout(self, name: str) -> Layout:
        """Layout of a tensor, or of the first result of a node, by name or id (also by scope suffix
        such as "mlp.up")."""
        row = self.tensors.get(name)
        if row is None and name in self.nodes:
            row = self.tensors.get(self.nodes[name]["outputs"][0])
        if row is None:
            hits = [t for t in self.tensors if t.endswith(name) or name in t]
            if not hits:
                raise PlanError(
                    "P052",
                    f"no tensor or node named {name!r}",
                    help=[h for h in [did_you_mean(name, [*self.tensors, *self.nodes])] if h],
                )
            row = self.tensors[hits[0]]
        return Layout(tuple(tuple(a) for a in row["layout"]), tuple(row["partial"]))

    def shardings(self, params: Any, *, optimizer: bool = False) -> Any:
        """NamedSharding for every leaf of a pytree of parameters (by label), or of an optimizer's
        state: for device_put, jit and checkpoint restore. Imports jax."""

        return shardings(self, params, optimizer=optimizer)

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The file's text."""
        data = self.to_dict()
        lines = []
        for key in sorted(data):
            value = data[key]
            if key in NODE_TABLES:
                rows = ",\n".join(
                    f"    {json.dumps(k)}: {json.dumps(v, sort_keys=True)}"
                    for k, v in value.items()
                )
                lines.append(
                    f"  {json.dumps(key)}: {{\n{rows}\n  }}"
                    if rows
                    else f"  {json.dumps(key)}: {{}}"
                )
            else:
                body = json.dumps(value, sort_keys=True, indent=2).replace("\n", "\n  ")
                lines.append(f"  {json.dumps(key)}: {body}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_dict(self) -> dict[str, Any]:
        """The file's content as plain data."""
        names = {f.name for f in fields(self)} - {
            "graph",
            "costs",
            *(name for name in ("details", "confirmed") if not getattr(self, name)),
        }
        content = {name: _plain(getattr(self, name)) for name in names}
        return {**content, "cost": _plain(self.costs), "format_version": FORMAT_VERSION}

    def save(self, path: str | Path, force: bool = True) -> None:
        """Write atomically. With force=False an existing file of another model is not
        overwritten."""
        path = Path(path)
        if path.exists() and not force:
            try:
                same = Strategy.load(path).model.get("sha256") == self.model.get("sha256")
            except PlanError:
                same = False
            if not same:
                raise PlanError(
                    "P053",
                    f"{path} exists and is not a strategy of this model",
                    help=["-o another file, or --force"],
                )
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a file. Another major format version is refused; unknown keys are ignored."""
        path = Path(path)
        model = (
            [f"plan {path} --devices N plans this model, and writes its strategy"]
            if str(path).startswith("zoo:") or path.suffix == ".onnx"
            else []
        )
        try:
            data = read_json(path)
        except OSError as e:
            raise PlanError(
                "P054",
                f"cannot read strategy {str(path)!r}: {e.strerror}",
                help=model or ([] if exists(path) else file_meant(str(path))),
            ) from e
        except ValueError as e:
            raise PlanError("P054", f"{path} is not JSON: {e}", help=model) from e
        return cls.from_dict(data, path)

    @classmethod
    def from_dict(cls, data: Any, path: str | Path) -> Strategy:
        """The strategy of a file's content; path: what to call it. Raises PlanError P054, P055, and
        P223 for a serving plan, which holds two."""
        if not isinstance(data, dict) or "format_version" not in data:
            raise PlanError("P054", f"{path} is not a strategy file: no format_version")
        if data.get("kind") == "serving":
            raise PlanError(
                "P223",
                f"{path} is a serving plan: two strategies, of the prompts and of a step",
                help=["plan show and plan emit read it; other commands take the plan of one step"],
            )
        if str(data["format_version"]).split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise PlanError(
                "P055",
                f"{path} has format {data['format_version']}; this version reads {FORMAT_VERSION}",
                help=["plan again, or use the version that wrote it"],
            )
        try:
            return cls(
                data["model"],
                data["topology"],
                data["workload"],
                tuple(data["mesh"]),
                data["nodes"],
                tuple(data["blocks"]),
                data["tensors"],
                data["techniques"],
                data["cost"],
                data["solver"],
                data["baselines"],
                tuple(data.get("assumptions", ())),
                tuple(data.get("findings", ())),
                data.get("provenance", {}),
                data.get("details", {}),
                confirmed=data.get("confirmed", {}),
            )
        except KeyError as e:
            raise PlanError("P054", f"{path}: key {e.args[0]!r} is missing") from e

    def __str__(self) -> str:
        if PRINTERS:
            return PRINTERS[-1](self)
        devices, device = self.topology["devices"], self.topology["device"]
        return f"strategy of {self.model['name']} on {devices} x {device}"


PRINTERS: list[Callable[[Strategy], str]] = []
"""How a strategy is shown in words: reports stand above this room, and say so when they are there
(planner.api)."""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return round_figures(value)
    return value


def round_figures(value: float, digits: int = 6) -> float:
    """A float with six significant digits: costs are rounded when a strategy is made."""
    return float(f"{value:.{digits}g}")
