"""`plan check`: does the model still cost what the committed plan says? Three columns answer it,
and which cause it was.

    recorded   what the baseline file says
    re-priced  the baseline's decisions on the model as it is now, with today's figures
    best now   the best plan for the model now, as the baseline was asked for: workload, machine,
               memory limit, pins, mode and objective

    recorded -> re-priced    the model changed (its hash differs), or else the cost model did:
                             nothing else is left
    re-priced -> best now    a better plan exists

Step or memory past tolerance in `best now` is a regression that planning again does not cure; past
tolerance in `re-priced` alone is one that it does. Both fail. The baseline is never rewritten. What
its pins cost is said beside, and judged by nobody: they are the user's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import read_toml
from costmodels.hardware.units import UnitError, show_bytes, size_bytes, time_s
from planner.cache.folder import Cache
from planner.errors import NO_PLAN, PlanError, did_you_mean
from planner.machine.topology import Topology
from planner.strategy.diff import payload
from planner.strategy.strategy import Strategy
from planner.support.choices import refuse_twice

if TYPE_CHECKING:
    from planner.workload.model import Model

TOLERANCES = {"step": 0.02, "memory": 0.05}
KEYS = {"step": "step_time_s", "memory": "memory_per_device_bytes"}
SHOWN = {
    "step": "s",
    "memory": "B",
    "compute": "s",
    "exposed communication": "s",
    "bubble": "s",
    "payload": "B",
    "FLOPs per device": "FLOP",
}
NOISE = 1e-5
"""Strategies keep six significant digits: smaller differences are rounding."""
TIE = 1e-3
"""Share of a step below which plans are equal to a search (planner.search.request.TIE)."""


@dataclass(frozen=True)
class Row:
    """One figure; `repriced` and `best` are None where there is no such plan. tolerance: None for
    figures that are only shown."""

    what: str
    unit: str
    recorded: float
    repriced: float | None
    best: float | None
    tolerance: float | None

    def change(self, value: float | None) -> float | None:
        """Relative change against the recorded figure, rounding left out."""
        if value is None or not self.recorded:
            return None
        change = value / self.recorded - 1
        return 0.0 if abs(change) < NOISE else change

    def beyond(self, value: float | None) -> bool:
        """Whether a value is past tolerance."""
        change = self.change(value)
        return self.tolerance is not None and change is not None and change > self.tolerance

    @property
    def worst(self) -> float | None:
        """The largest relative change past tolerance, None where there is none."""
        past = [self.change(v) for v in (self.best, self.repriced) if self.beyond(v)]
        return max((c for c in past if c is not None), default=None)


@dataclass(frozen=True)
class Limit:
    """One line of a budget: a figure of the best plan now and what it may be at most."""

    what: str
    unit: str
    value: float
    most: float

    @property
    def ok(self) -> bool:
        """Within the budget."""
        return self.value <= self.most

    @property
    def name(self) -> str:
        """The figure in words; `what` is its key in the file."""
        return self.what.replace("_", " ")


@dataclass(frozen=True)
class PinCost:
    """What a plan was held to by its user, and the best plan now without: its step (seconds), and
    its bytes a device."""

    pins: tuple[str, ...]
    step_s: float
    free_step_s: float
    free_memory_bytes: int

    @property
    def cost_s(self) -> float:
        """Seconds that a step of the best plan is longer by under the pins; below 0 for what they
        are there for, a smaller plan."""
        return (
            0.0
            if abs(self.step_s - self.free_step_s) < TIE * self.step_s
            else self.step_s - self.free_step_s
        )


@dataclass(frozen=True)
class Report:
    """The outcome. reasons: why the baseline could not be re-priced or planned anew, by column;
    pin_cost: None where nothing was pinned, or nothing fits."""

    model: str
    baseline: str
    rows: tuple[Row, ...]
    causes: tuple[str, ...]
    limits: tuple[Limit, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    pin_cost: PinCost | None = None

    @property
    def regressions(self) -> tuple[Row, ...]:
        """Rows past tolerance, in the best plan or in the re-priced one."""
        return tuple(r for r in self.rows if r.worst is not None)

    @property
    def ok(self) -> bool:
        """Nothing past tolerance, every budget kept, and a plan exists."""
        return (
            not self.regressions and all(x.ok for x in self.limits) and "best" not in self.reasons
        )

    @property
    def cured(self) -> bool:
        """Whether planning again brings every regression back within tolerance."""
        return (
            bool(self.regressions)
            and not any(r.beyond(r.best) for r in self.rows)
            and "best" not in self.reasons
        )

    @property
    def verdict(self) -> str:
        """One sentence."""
        over = [x for x in self.limits if not x.ok]
        why = f" ({'; '.join(self.causes)})" if self.causes else ""
        if "best" in self.reasons:
            reason = self.reasons["best"]
            return (reason if reason.startswith("no plan") else f"no plan: {reason}") + why
        text = [
            f"{r.what} {100 * (r.worst or 0):+.1f} %, {100 * (r.tolerance or 0):g} % allowed"
            for r in self.regressions
        ]
        text += [f"{x.name} over its budget" for x in over]
        if text:
            return (
                "; ".join(text)
                + why
                + (": planning again cures it" if self.cured and not over else "")
            )
        return ("within tolerance" if self.causes else "nothing changed") + why


def tolerances(text: str) -> dict[str, float]:
    """step=2%,memory=5% as shares; a figure that is not named keeps its default. Raises P064."""
    shares = dict(TOLERANCES)
    texts: dict[str, str] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, eq, value = part.partition("=")
        try:
            share = (
                float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
                if eq
                else -1.0
            )
        except ValueError:
            share = -1.0
        if name.strip() not in shares or not 0 <= share < 1000:
            known = name.strip() in shares
            suggestion = "" if known else did_you_mean(name.strip(), list(shares))
            raise PlanError(
                "P064",
                f"--tolerance {part!r} is not a figure and a share",
                help=[h for h in (suggestion, "step=2%,memory=5%") if h],
            )
        name, value = name.strip(), value.strip()
        refuse_twice("tolerance", name, texts.setdefault(name, value), value)
        shares[name] = share
    return shares


def check(
    strategy: Strategy,
    source: str,
    *,
    tolerance: Mapping[str, float] | None = None,
    budget: str | Path | None = None,
    baseline: str = "",
    cache: Cache | None = None,
) -> Report:
    """Check a model against its baseline. cache: where searches are kept and recalled from. Raises
    PlanError for a model that cannot be read, or a budget that is none."""
    from planner.whatif.reprice import machine_now, open_recorded

    allowed = {**TOLERANCES, **(tolerance or {})}
    limits_wanted = read_budget(budget, str(strategy.model["name"])) if budget else {}
    model = open_recorded(strategy, source)
    topology, moved = machine_now(strategy)
    same = model.sha256() == strategy.model["sha256"]
    reasons: dict[str, str] = {}
    repriced = _repriced(strategy, model, topology, reasons)
    best = _best(strategy, model, topology, reasons, cache)
    rows = []
    for what, unit in SHOWN.items():
        tables = (strategy.costs, repriced, best)
        values = [None if t is None else _figure(t, what) for t in tables]
        if what == "bubble" and not any(values):
            continue  # none of the plans has pipeline stages
        rows.append(
            Row(
                what=what,
                unit=unit,
                recorded=values[0] or 0.0,
                repriced=values[1],
                best=values[2],
                tolerance=allowed.get(what),
            )
        )
    causes = _causes(strategy, model, same, moved, rows, reasons)
    limit, needed = (
        int(strategy.costs["memory_limit_bytes"]),
        (int(repriced["memory_per_device_bytes"]) if repriced is not None else 0),
    )
    if needed > limit:
        causes.append(
            f"the recorded plan fits no more: {show_bytes(needed)} of {show_bytes(limit)}"
        )
    limits = _limits(limits_wanted, strategy, best) if best is not None else ()
    return Report(
        model=model.name,
        baseline=baseline,
        rows=tuple(rows),
        causes=tuple(causes),
        limits=limits,
        reasons=reasons,
        pin_cost=_pin_cost(strategy, model, topology, best, cache),
    )


def _figure(table: Mapping[str, Any], what: str) -> float:

    if what == "payload":
        return payload(table)
    if what == "FLOPs per device":
        return float(table["flops_per_device"])
    return float(table[KEYS.get(what, f"{what.replace(' ', '_')}_time_s")])


def _repriced(
    strategy: Strategy, model: Model, topology: Topology, reasons: dict[str, str]
) -> dict[str, Any] | None:
    from planner.whatif.reprice import reprice

    try:
        return reprice(strategy, model, topology).table
    except (
        PlanError
    ) as e:  # the decisions do not carry over: a fact to report, not a failure of the check
        reasons["repriced"] = e.what
        return None


def _best(
    strategy: Strategy,
    model: Model,
    topology: Topology,
    reasons: dict[str, str],
    cache: Cache | None,
) -> Mapping[str, Any] | None:
    from planner.whatif.reprice import replan

    try:
        return replan(strategy, model, topology, cache).costs
    except PlanError as e:
        if e.exit_code != NO_PLAN:
            raise
        reasons["best"] = e.what
        return None


def _pin_cost(
    strategy: Strategy,
    model: Model,
    topology: Topology,
    best: Mapping[str, Any] | None,
    cache: Cache | None,
) -> PinCost | None:
    """What pins and mode cost now."""
    from planner.strategy.pins import pins_of
    from planner.whatif.reprice import unpinned

    mode = str(strategy.provenance.get("mode", "auto"))
    words = [
        *([f"mode {mode}"] if mode not in ("auto", "semi-auto") else []),
        *(text for text, _ in pins_of(strategy).each()),
    ]
    if best is None or not words:
        return None
    free = unpinned(strategy, model, topology, cache).costs
    return PinCost(
        tuple(words),
        float(best["step_time_s"]),
        float(free["step_time_s"]),
        int(free["memory_per_device_bytes"]),
    )


def _causes(
    strategy: Strategy,
    model: Model,
    same: bool,
    moved: str,
    rows: list[Row],
    reasons: Mapping[str, str],
) -> list[str]:
    """What differs from when the baseline was made, a phrase each, in the order model, machine,
    cost model, plan."""
    from planner.search.to_strategy import COST_MODEL_VERSION

    causes = []
    changes = {r.what: r.change(r.repriced) or 0.0 for r in rows}
    version = str(strategy.provenance.get("cost_model", ""))
    if not same:
        graph = model.graph(1)
        growths = {
            "nodes": len(graph.nodes) - strategy.model["nodes"],
            "parameters": graph.parameters - strategy.model["parameters"],
        }
        grew = [f"{n:+,} {k}" for k, n in growths.items() if n]
        causes.append("the model changed" + (f": {', '.join(grew)}" if grew else ""))
    if moved:
        causes.append(f"the machine's description changed: {moved}")
    if version and version != COST_MODEL_VERSION:
        causes.append(f"the cost model changed: version {version} to {COST_MODEL_VERSION}")
    elif same and not moved and any(changes.values()):
        causes.append(
            "the cost model changed: the same decisions on the same model have another price"
        )
    step = next(r for r in rows if r.what == "step")
    if (
        step.best is not None
        and step.repriced is not None
        and step.best < step.repriced * (1 - NOISE)
    ):
        causes.append(f"a better plan exists: {100 * (step.best / step.repriced - 1):+.1f} % step")
    elif "repriced" in reasons:
        causes.append("the recorded decisions are not possible on the model as it is")
    return causes


def read_budget(path: str | Path, name: str) -> dict[str, float]:
    """Limits for a model: every table of the file whose glob matches its name, of the zoo's with or
    without `zoo:`, later ones on top. Raises P065.

    ["zoo:llama3-8b"]   step_time = "1200 ms"   memory = "70 GiB"   devices = 64
    """

    try:
        data = read_toml(path)
    except OSError as e:
        raise PlanError("P065", f"cannot read budget {str(path)!r}: {e.strerror}") from e
    except ValueError as e:
        raise PlanError("P065", f"{path} is not TOML: {e}") from e
    readers = {"step_time": time_s, "memory": size_bytes, "devices": _devices}
    names = {name, name.removeprefix("zoo:")}

    def matches(glob: str) -> bool:
        return any(fnmatch.fnmatchcase(n, glob) for n in names)

    limits: dict[str, float] = {}
    hit = False
    for glob, table in data.items():
        if not isinstance(table, dict):
            raise PlanError(
                "P065",
                f"{path}: {glob!r} is no table",
                help=['["model.onnx"] and below it step_time = "50 ms"'],
            )
        for key, value in table.items():
            if key not in readers:
                suggestion = did_you_mean(key, list(readers))
                raise PlanError(
                    "P065",
                    f"{path}: [{glob}] {key}: unknown",
                    help=[h for h in (suggestion, f"one of {', '.join(readers)}") if h],
                )
            try:
                limit = float(readers[key](value))
            except (UnitError, ValueError) as e:
                raise PlanError("P065", f"{path}: [{glob}] {key}: {e}") from e
            if matches(glob):
                limits[key] = limit
        hit = hit or matches(glob)
    if not hit:
        has = f"tables for {', '.join(map(repr, data))}" if data else "no table"
        raise PlanError(
            "P065",
            f"{path} has no budget for {name!r}: it has {has}",
            help=[f'a table ["{name}"], or a glob'],
        )
    return limits


def _devices(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no number of devices")
    return float(value)


def _limits(
    wanted: Mapping[str, float], strategy: Strategy, best: Mapping[str, Any]
) -> tuple[Limit, ...]:
    values = {
        "step_time": ("s", best["step_time_s"]),
        "memory": ("B", best["memory_per_device_bytes"]),
        "devices": ("", strategy.topology["devices"]),
    }
    return tuple(Limit(k, values[k][0], float(values[k][1]), most) for k, most in wanted.items())
