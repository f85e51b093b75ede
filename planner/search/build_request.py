"""Options checked against what exists, and built into the request of a search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from costmodels.capacity import Capacity, capacity, preallocation
from costmodels.hardware.units import show_bytes
from costmodels.optimizers import OPTIMIZERS
from costmodels.precision import Recipe, load_recipe, recipe_names
from costmodels.runtimes import as_framework, load_runtime, runtime_names
from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.execution.save_policies import offloaded_values
from planner.execution.techniques import (
    ALL_WAIT,
    BY_NAME,
    FRAMEWORK,
    INFERENCE,
    NO_GPU,
    PARTITIONER,
    TECHNIQUES,
)
from planner.graph.findings import Finding
from planner.machine.topology import Topology, from_json
from planner.machine.topology_file import described, from_file
from planner.ops.expert_load import said
from planner.pins.launcher_space import SPACES, LauncherSpace, choose_launcher, within
from planner.pins.pins import Pins, parse_pins
from planner.search.options import (
    DEFAULT_HARDWARE,
    DEFAULT_RUNTIME,
    MachineOptions,
    SearchOptions,
    StepOptions,
    records,
)
from planner.sharding.layout import STAGE
from planner.solvers import SOLVERS
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.workload.user_loss import is_user_loss, priced

MODE_NAMES = ("auto", "data-parallel", "hybrid", "semi-auto", "propagate", "manual")


def asked(pins: Any, launcher: str, objective: str, mode: str) -> dict[str, Any]:
    """What of a request the plan alone does not tell, for its file: the user's pins, the launcher
    that it is for, and an objective or mode other than the usual one."""
    return (
        ({} if pins.empty else {"pins": pins.table()})
        | ({"launcher": launcher} if launcher else {})
        | ({"objective": objective} if objective != "step" else {})
        | ({"mode": mode} if mode != "auto" else {})
    )


def make_request(**options: Any) -> Any:
    """`build_request` of keywords, each a field of the records of planner.search.options."""
    return build_request(*records(options))


def build_request(machine: MachineOptions, step: StepOptions, search: SearchOptions) -> Any:
    """Check the options against what exists and build the search's request. Raises PlanError."""
    from planner.search.bucketing import runtime_of_buckets
    from planner.search.request import Request

    topology = _machine(machine, search)
    step, space = _for_launcher(step)
    _choose(step, search)
    pins = _pins(search)
    pins = pins if space is None else within(space, pins, topology, step.workload)
    refuse_pins(pins, topology.device, step.workload, step.runtime)
    # A program written for jit is priced as one, unless as a framework's.
    jit = step.backend == "jit" and step.runtime == DEFAULT_RUNTIME
    runtime = load_runtime("jax-jit" if jit else step.runtime)
    request = Request(
        topology=topology,
        capacity=capacity(topology.device, topology.devices, machine.memory_reserve_bytes),
        recipe=load_recipe(step.precision, step.optimizer, step.workload == "train"),
        runtime=runtime_of_buckets(runtime, pins.techniques.get("bucket", 0)),
        solver=search.solver,
        mode=search.mode,
        objective=search.objective,
        pins=pins,
        launcher=space,
        memory_limit_bytes=machine.memory_limit_bytes,
        time_limit_s=search.time_limit_s,
        seed=search.seed,
        fold=search.fold,
        baselines=search.baselines,
        partitioned=refuse_partitioned(pins, step.runtime, step.backend),
        offload=pins.techniques.get("offload", ()),
        cache=(
            search.cache
            if isinstance(search.cache, Cache) or search.cache is None
            else Cache.chosen(search.cache)
        ),
        incremental=search.incremental,
    )
    _refuse_no_memory(machine, request.capacity)
    if not machine.calibrate_with:
        return request
    from planner.search.anchor import anchored, read_anchor

    return anchored(request, read_anchor(machine.calibrate_with))


def _refuse_no_memory(machine: MachineOptions, room: Capacity) -> None:
    """Raises PlanError P003 where the options leave a plan no memory at all."""
    limit = machine.memory_limit_bytes
    if limit is not None and limit < 1:
        raise PlanError(
            "P003",
            f"--memory-limit {limit} B leaves a plan no memory",
            help=[f"of {show_bytes(max(0, room.usable))} usable, or without it"],
        )
    if room.usable < 1:
        raise PlanError(
            "P003",
            f"--memory-reserve {show_bytes(room.reserve)} leaves a plan no memory: a device has"
            f" {show_bytes(room.usable + room.reserve)} without it",
            help=["a smaller --memory-reserve"],
        )


def _for_launcher(step: StepOptions) -> tuple[StepOptions, LauncherSpace | None]:
    """The options, under the runtime of the launcher that is planned for, and its space. Raises
    PlanError P024 where another runtime, a program of ours, or a precision that it cannot say is
    asked for."""
    if not step.launcher:
        return step, None
    choose_launcher("for", step.launcher, tuple(SPACES))
    space = SPACES[step.launcher]
    if step.runtime not in (DEFAULT_RUNTIME, space.runtime):
        raise PlanError(
            "P024",
            f"--runtime {step.runtime} and --for {space.name} contradict each other: its programs"
            f" are priced as {space.runtime}",
            help=["leave --runtime out"],
        )
    choose("precision", step.precision, recipe_names())
    if step.workload == "train" and step.precision not in space.precisions:
        raise PlanError(
            "P024",
            f"--precision {step.precision} and --for {space.name} contradict each other:"
            f" {space.version} has no setting for it that is known here",
            help=[f"--precision {' or '.join(space.precisions)}"],
        )
    return replace(step, runtime=space.runtime), space


def _machine(machine: MachineOptions, search: SearchOptions) -> Topology:
    """The machine that is described. Raises PlanError P003, P016 for options that contradict each
    other."""
    if search.incremental and search.cache is None:
        raise PlanError(
            "P003",
            "an incremental plan keeps decisions of one in the cache, and there is none",
            help=["--cache DIR and no --no-cache, or leave out --incremental"],
        )
    if machine.topology is not None and machine.hardware is not None:
        raise PlanError(
            "P016",
            "--topology and --hardware both describe the machine",
            help=["give one of them: a topology file names its own device"],
        )
    return (
        from_file(machine.topology, machine.devices)
        if machine.topology is not None
        else described(machine.hardware or DEFAULT_HARDWARE, machine.devices)
    )


def _choose(step: StepOptions, search: SearchOptions) -> None:
    """Raises PlanError where a name is none of those that exist."""
    choose("precision", step.precision, recipe_names())
    choose("optimizer", step.optimizer, tuple(OPTIMIZERS))
    choose("runtime", step.runtime, runtime_names())
    if (own := load_recipe(step.precision).program) and not as_framework(step.runtime):
        raise PlanError(
            "P024",
            f"--precision {step.precision} and --runtime {step.runtime} contradict each other: no"
            " program that is written here has gradients in float32 beside bfloat16 weights",
            help=[f"--precision {own}", "--runtime megatron, or --for megatron"],
        )
    if step.workload == "train" and not load_recipe(step.precision).gradient_bytes:
        raise PlanError(
            "P024",
            f"--precision {step.precision} and --workload train contradict each other: nothing is"
            " trained in integers",
            help=["--workload infer", f"--precision {recipe_names()[0]}"],
        )
    choose("solver", search.solver, tuple(SOLVERS))
    choose("mode", search.mode, MODE_NAMES)
    choose("objective", search.objective, ("step", "memory"))
    choose("workload", step.workload, ("train", "infer"))


def own_pins(search: SearchOptions) -> Pins:
    """The user's pins."""
    return search.pins if isinstance(search.pins, Pins) else parse_pins(search.pins)


def _pins(search: SearchOptions) -> Any:
    """The pins as the mode takes them. Raises PlanError P059 where a mode lacks what it needs."""
    from planner.space.propagation import MODES

    if search.mode == "manual":
        raise PlanError(
            "P059",
            "--mode manual prices one strategy file as it is, and here plans are searched for",
            help=["plan MODEL --mode manual --pin strategy.json"],
        )
    pins = own_pins(search)
    if search.mode == "semi-auto" and pins.empty:
        raise PlanError(
            "P059",
            "--mode semi-auto completes pins, and there are none",
            help=["--pin tp=8 or a TOML file, or --mode auto"],
        )
    if search.mode not in MODES:
        return pins
    if not pins.mesh or not pins.nodes:
        raise PlanError(
            "P059",
            f"--mode {search.mode} takes the mesh and the splits of some operators from the user,"
            " and there are none",
            help=[
                "--pin FILE.toml with [mesh] and a table per operator or parameter (docs/modes.md)"
            ],
        )
    unpinned_defaults = {
        "zero_stage": 0,
        "recompute": "none",
        "microbatches": pins.techniques.get("copies", 1),
        "copies": 1,
    }
    return replace(pins, techniques=unpinned_defaults | dict(pins.techniques))


def refuse_pins(pins: Any, device: Any, workload: str, runtime: str) -> None:
    """Raises PlanError P024 for a technique that no program of such a request has; neutral values
    say nothing."""
    holds = {
        NO_GPU: device.kind != "gpu",
        INFERENCE: workload != "train",
        FRAMEWORK: load_runtime(runtime).kernels is not None,
        ALL_WAIT: not load_runtime(runtime).exchange_slows,
    }
    for t in TECHNIQUES:
        value = t.among(pins.techniques)
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
    partitioned_by = (
        "--backend jit" if backend == "jit" else "--runtime jax-jit" if runtime == "jax-jit" else ""
    )
    if not partitioned_by:
        return False
    pinned = {
        t.name: (t.shown(value), t.refused[PARTITIONER])
        for t in TECHNIQUES
        for value in [t.among(pins.techniques)]
        if PARTITIONER in t.refused and value != t.neutral
    }
    if (stages := min(pins.mesh.get(STAGE, (1,)))) > 1:
        pinned = {"pp": (str(stages), BY_NAME["schedule"].refused[PARTITIONER])} | pinned
    if offloaded_values(policy := str(pins.techniques.get("recompute", ""))):
        pinned["recompute"] = policy, BY_NAME["offload"].refused[PARTITIONER]
    for key, (value, what) in pinned.items():
        instead = "--backend shard_map" if backend == "jit" else "--runtime jax-shard_map"
        raise PlanError(
            "P024",
            f"pin {key} = {value} contradicts {partitioned_by}: {what} written for shard_map only",
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


def emitted_recipe(precision: str) -> Recipe:
    """The recipe that a plan's program is written in: its own, or the one that stands for it.
    Raises PlanError P077 for those that are priced, not emitted."""
    choose("precision", precision, recipe_names())
    recipe = load_recipe(load_recipe(precision).program or precision)
    if not recipe.emitted:
        written = [name for name in recipe_names() if load_recipe(name).emitted]
        raise PlanError(
            "P077",
            f"no program is written in {precision} ({recipe.note}): it is priced only",
            detail=[f"programs are written in {', '.join(written)}"],
            help=[
                f"plan again with --precision {written[0]} or another of these for a program, or"
                " for the price alone without --emit and --confirm"
            ],
        )
    return recipe
