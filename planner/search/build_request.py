"""Options checked against what exists, and built into the request of a search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodels.capacity import capacity, preallocation
from costmodels.hardware.units import show_bytes
from costmodels.optimizers import OPTIMIZERS
from costmodels.precision import load_recipe, recipe_names
from costmodels.runtimes import load_runtime, runtime_names
from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.execution.techniques import (
    BY_NAME,
    FRAMEWORK,
    INFERENCE,
    NO_GPU,
    PARTITIONER,
    TECHNIQUES,
)
from planner.graph.findings import Finding
from planner.machine.topology import for_devices, from_json
from planner.machine.topology_file import from_file
from planner.ops.experts import said
from planner.sharding.layout import STAGE
from planner.solvers import SOLVERS
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.workload.user_loss import is_user_loss, priced

DEFAULT_HARDWARE = "h100-sxm"
DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_RUNTIME = "jax-shard_map"


def asked(request: Any, objective: str, mode: str) -> dict[str, Any]:
    """What of a request the plan alone does not tell, for its file: pins, and an objective or mode
    other than the usual one."""
    pins = {} if request.pins.empty else {"pins": request.pins.table()}
    return (
        pins
        | ({"objective": objective} if objective != "step" else {})
        | ({"mode": mode} if mode != "auto" else {})
    )


def make_request(
    *,
    devices: int | None,
    hardware: str | None,
    topology: str | Path | None,
    workload: str = "train",
    mode: str = "auto",
    solver: str = "auto",
    pins: Any = None,
    objective: str = "step",
    memory_limit_bytes: int | None = None,
    memory_reserve_bytes: int | None = None,
    runtime: str = DEFAULT_RUNTIME,
    optimizer: str = "adamw",
    precision: str = DEFAULT_PRECISION,
    time_limit_s: float | None = None,
    seed: int = 0,
    fold: bool = True,
    baselines: bool = True,
    cache: Cache | str | Path | None = None,
    incremental: bool = False,
    backend: str = "",
) -> Any:
    """Check the options against what exists and build the search request."""
    from planner.pins.pins import Pins, parse_pins
    from planner.search.bucketing import runtime_of_buckets
    from planner.search.request import Request
    from planner.space.propagation import MODES

    if incremental and cache is None:
        raise PlanError(
            "P003",
            "an incremental plan keeps decisions of one in the cache, and there is none",
            help=["--cache DIR and no --no-cache, or leave out --incremental"],
        )
    if topology is not None and hardware is not None:
        raise PlanError(
            "P016",
            "--topology and --hardware both describe the machine",
            help=["give one of them: a topology file names its own device"],
        )
    machine = (
        from_file(topology, devices)
        if topology is not None
        else for_devices(hardware or DEFAULT_HARDWARE, devices)
    )
    choose("precision", precision, recipe_names())
    choose("optimizer", optimizer, tuple(OPTIMIZERS))
    choose("runtime", runtime, runtime_names())
    choose("solver", solver, tuple(SOLVERS))
    choose("mode", mode, ("auto", "data-parallel", "hybrid", "semi-auto", "propagate", "manual"))
    choose("objective", objective, ("step", "memory"))
    choose("workload", workload, ("train", "infer"))
    if mode == "manual":
        raise PlanError(
            "P059",
            "--mode manual prices one strategy file as it is, and here plans are searched for",
            help=["plan MODEL --mode manual --pin strategy.json"],
        )
    parsed = pins if isinstance(pins, Pins) else parse_pins(pins)
    if mode == "semi-auto" and parsed.empty:
        raise PlanError(
            "P059",
            "--mode semi-auto completes pins, and there are none",
            help=["--pin tp=8 or a TOML file, or --mode auto"],
        )
    if mode in MODES:
        if not parsed.mesh or not parsed.nodes:
            raise PlanError(
                "P059",
                f"--mode {mode} takes the mesh and the splits of some operators from the user, and"
                " there are none",
                help=[
                    "--pin FILE.toml with [mesh] and a table per operator or parameter"
                    " (docs/modes.md)"
                ],
            )
        parsed = replace(
            parsed,
            techniques={
                "zero_stage": 0,
                "recompute": "none",
                "microbatches": parsed.techniques.get("copies", 1),
                "copies": 1,
                **parsed.techniques,
            },
        )
    refuse_pins(parsed, machine.device, workload, runtime)
    partitioned = refuse_partitioned(parsed, runtime, backend)
    profile = runtime_of_buckets(load_runtime(runtime), parsed.techniques.get("bucket", 0))
    return Request(
        machine,
        capacity(machine.device, machine.devices, memory_reserve_bytes),
        load_recipe(precision, optimizer, workload == "train"),
        profile,
        solver,
        mode,
        objective,
        parsed,
        memory_limit_bytes,
        time_limit_s,
        seed,
        fold,
        baselines,
        offload=parsed.techniques.get("offload", ()),
        cache=cache if isinstance(cache, Cache) or cache is None else Cache.chosen(cache),
        partitioned=partitioned,
        incremental=incremental,
    )


def refuse_pins(pins: Any, device: Any, workload: str, runtime: str) -> None:
    """Raises PlanError P024 for a technique that no program of such a request has; neutral values
    say nothing."""
    holds = {
        NO_GPU: device.kind != "gpu",
        INFERENCE: workload != "train",
        FRAMEWORK: load_runtime(runtime).kernels is not None,
    }
    for t in TECHNIQUES:
        value = pins.techniques.get(t.name, t.neutral)
        why = next((t.refused[c] for c, true in holds.items() if true and c in t.refused), "")
        if why and value != t.neutral:
            raise PlanError(
                "P024",
                f"pin {t.name} = {t.shown(value)} contradicts the request:"
                f" {why.format(runtime=runtime, kind=device.kind)}",
                help=["remove the pin"],
            )


def refuse_partitioned(pins: Any, runtime: str, backend: str) -> bool:
    """Whether the program's collectives are placed by the compiler's partitioner. Raises PlanError
    P024 for pins that only programs with collectives of their own keep."""

    if backend:
        choose("backend", backend, ("shard_map", "jit"))
    asked = (
        "--backend jit" if backend == "jit" else "--runtime jax-jit" if runtime == "jax-jit" else ""
    )
    if not asked:
        return False
    pinned = {
        t.name: (t.shown(value), t.refused[PARTITIONER])
        for t in TECHNIQUES
        for value in [pins.techniques.get(t.name, t.neutral)]
        if PARTITIONER in t.refused and value != t.neutral
    }
    if (stages := min(pins.mesh.get(STAGE, (1,)))) > 1:
        pinned = {"pp": (str(stages), BY_NAME["schedule"].refused[PARTITIONER])} | pinned
    for key, (value, what) in pinned.items():
        instead = "--backend shard_map" if backend == "jit" else "--runtime jax-shard_map"
        raise PlanError(
            "P024",
            f"pin {key} = {value} contradicts {asked}: {what} written for shard_map only",
            help=[f"{instead}, or remove the pin"],
        )
    return True


def refuse_tables(offload: tuple[str, ...], tables: str) -> None:
    """Raises PlanError P076 where optimizer state and tables are both sent to hosts, which no
    program does."""
    if offload and tables != "device":
        raise PlanError(
            "P076",
            f"tables on hosts (--tables {tables}) and pin offload = {'+'.join(offload)} do not go"
            " together in a program",
            help=["pin offload=none, or --tables device"],
        )


def refuse_unsupported(base: Any) -> None:
    """--strict: an operator without a rule is an error."""
    bad = sorted({r for r in base.reasons if r})
    if bad:
        raise PlanError(
            "P027",
            f"{len(bad)} kinds of operators have no rule and would be replicated",
            detail=bad,
            help=["leave --strict out to plan them replicated"],
        )


def assumptions(model: Any, request: Any, hardware: str | None, topology: Any) -> tuple[str, ...]:
    """What was taken for granted, a phrase each, for the first lines of the summary."""

    out = []
    if hardware is None and topology is None:
        out.append(f"hardware {DEFAULT_HARDWARE} (--hardware)")
    out.append(request.recipe.describe())
    if model.workload.kind == "train":
        out.append(f"optimizer {model.workload.optimizer}, loss {model.loss}")
        if is_user_loss(model.loss):
            out.append(priced(model.loss))
    out.append(f"runtime {request.runtime.name}: {request.runtime.note}")
    reserve = request.capacity.reserve / 2**30
    out.append(f"{reserve:.3g} GiB a device kept free (--memory-reserve)")
    if request.memory_limit_bytes is not None and request.limit_bytes < request.memory_limit_bytes:
        out.append(
            f"--memory-limit {show_bytes(request.memory_limit_bytes)} is more than a device has:"
            f" {show_bytes(request.limit_bytes)} are usable"
        )
    if model.workload.batch is None and model.workload.tokens_per_step is None:
        out.append(f"batch {model.batch} (--batch)")
    out += model.said
    shape = () if request.topology.groups else request.topology.notes
    return (
        *out,
        *said(model.plain),
        *shape,
        *(note for note in model.plain.notes if not isinstance(note, Finding)),
    )


def _gpu_memory(strategy: Strategy) -> float | None:
    """Share of a GPU's memory that the plan may use; None for other devices, and where the device's
    own file is not at hand."""

    try:
        return preallocation(
            from_json(strategy.topology).device, int(strategy.costs["memory_limit_bytes"])
        )
    except PlanError:
        return None
