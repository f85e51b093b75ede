"""What a user says of a plan, as three records: the machine, how a step is computed, and how the
search goes. The model's own options are planner.workload.model.Workload.

Doors (`planner.plan`, `planner.serve`, the command) take keywords and make these once; everything
behind them is handed records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from planner.cache.folder import Cache

DEFAULT_HARDWARE = "h100-sxm"
DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_RUNTIME = "jax-shard_map"


@dataclass(frozen=True)
class MachineOptions:
    """Exactly one of hardware (with devices) and topology describes the machine; memory in bytes a
    device: what a plan may use, and what is kept free. calibrate_with: PLAN=STEP, a plan whose
    measured step prices are scaled to (planner.search.anchor), "" for none."""

    devices: int | None = None
    hardware: str | None = None
    topology: str | Path | None = None
    memory_limit_bytes: int | None = None
    memory_reserve_bytes: int | None = None
    calibrate_with: str = ""


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed. workload: train or infer; backend: of the program that is to be
    written, "" where none is; launcher: whose plans alone are searched
    (planner.pins.launcher_space.SPACES), "" for any."""

    workload: str = "train"
    optimizer: str = "adamw"
    precision: str = DEFAULT_PRECISION
    runtime: str = DEFAULT_RUNTIME
    backend: str = ""
    launcher: str = ""


@dataclass(frozen=True)
class SearchOptions:
    """What is searched for and how. pins: as planner.pins.pins.parse_pins reads them; cache: a
    folder or an opened one."""

    mode: str = "auto"
    solver: str = "auto"
    pins: Any = None
    objective: str = "step"
    time_limit_s: float | None = None
    seed: int = 0
    fold: bool = True
    baselines: bool = True
    cache: Cache | str | Path | None = None
    incremental: bool = False


def records(options: Mapping[str, Any]) -> tuple[MachineOptions, StepOptions, SearchOptions]:
    """The three records of keywords, each a field of one of them. Raises TypeError for others."""
    kinds = (MachineOptions, StepOptions, SearchOptions)
    named = [{f.name for f in fields(kind)} for kind in kinds]
    if unknown := sorted(options.keys() - set[str]().union(*named)):
        raise TypeError(f"no option of a request: {', '.join(unknown)}")
    machine, step, search = (
        kind(**{k: v for k, v in options.items() if k in names})
        for kind, names in zip(kinds, named, strict=True)
    )
    return machine, step, search  # type: ignore[return-value]
