"""The Python interface: plan, emit, and the shared opening of models and machines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.cache import Cache
from planner.collector import seldom_collecting
from planner.errors import NO_PLAN, PlanError, did_you_mean
from planner.strategy import Strategy

DEFAULT_HARDWARE, DEFAULT_PRECISION, DEFAULT_RUNTIME = "h100-sxm", "bf16-mixed", "jax-shard_map"


@seldom_collecting()
def plan(source: Any, *, devices: int | None = None, hardware: str | None = None, topology: str | Path | None = None, workload: str = "train",
         batch: int | None = None, tokens_per_step: int | None = None, dims: Mapping[str, int] | None = None,
         shapes: Mapping[str, tuple[int, ...]] | None = None, mode: str = "auto", solver: str = "auto", pins: Any = None, objective: str = "step",
         memory_limit_bytes: int | None = None, memory_reserve_bytes: int | None = None, runtime: str = DEFAULT_RUNTIME, optimizer: str = "adamw",
         lr: float = 1e-4, precision: str = DEFAULT_PRECISION, loss: str = "", logits: str = "", shift_labels: bool = False,
         ignore_index: int | None = None, trainable: Sequence[str] = (), freeze: Sequence[str] = (), tie: Sequence[str] = (), lora: str = "", tables: str = "device",
         time_limit_s: float | None = None, seed: int = 0, fold: bool = True, baselines: bool = True, strict: bool = False, progress: Any = None,
         remedies: bool = True, cache: Cache | str | Path | None = None, incremental: bool = False, backend: str = "",
         confirm: str = "") -> Strategy:  # fmt: skip
    """Search for the best way to spread a model over a machine.

    source: an ONNX file, `zoo:SPEC`, a Hugging Face config.json, or an onnx ModelProto. Exactly one of hardware (with devices) and topology describes the machine. remedies: where
    nothing fits, plan what would help and say it in the error. cache: a folder where searches are kept and recalled from (planner.cache); it changes no answer.
    incremental: where the cache has the search of a model like this one, decide anew only what changed (planner.incremental); other plans are then not looked at.
    backend: of the program that is to be written; what such a program cannot do is refused before the search, and not chosen.
    confirm: gpu:NAME or tpu:SLICE, whose compiler is asked in a process of its own whether the best plans fit (planner.verify.confirm); the source is then a file or a zoo model.
    Returns a Strategy. Raises PlanError: exit_code 2 for bad input, 3 when no plan fits. Never imports jax.
    """
    from planner.compose import COST_MODEL_VERSION, TOOL_VERSION, compose
    from planner.search import Search

    started = time.monotonic()
    annotated = pins == "annotated"
    request = make_request(devices=devices, hardware=hardware, topology=topology, workload=workload, mode="auto" if annotated and mode == "semi-auto" else mode, solver=solver,
                           pins=None if annotated else pins, objective=objective,
                           memory_limit_bytes=memory_limit_bytes, memory_reserve_bytes=memory_reserve_bytes, runtime=runtime, optimizer=optimizer,
                           precision=precision, time_limit_s=time_limit_s, seed=seed, fold=fold, baselines=baselines,
                           cache=cache, incremental=incremental, backend=backend)  # fmt: skip
    target = target_of(confirm, source, request) if confirm else None
    model = open_model(source, request.topology.devices, workload=workload, batch=batch, tokens_per_step=tokens_per_step, dims=dims, shapes=shapes, loss=loss,
                       logits=logits, shift_labels=shift_labels, ignore_index=ignore_index, trainable=trainable, freeze=freeze, tie=tie, lora=lora,
                       optimizer=optimizer, lr=lr, tables=tables)  # fmt: skip
    refuse_tables(request.offload, tables)
    if backend:
        from planner.emit.program import check_kernels

        check_kernels(model.graph(1))
    model.graph(1)
    if annotated:
        request = replace(request, pins=annotated_pins(model))
    read = time.monotonic()
    search, before = Search(model, request, progress), request.cache.priced if request.cache is not None else (0, 0)
    if strict:
        refuse_unsupported(search.base(1))
    found = search.run()
    searched = time.monotonic()
    if found.best is None:
        if found.stopped:
            raise PlanError("P026", "the search was stopped before any plan fitted", help=["--time-limit with more seconds"], exit_code=NO_PLAN)
        raise no_plan(request, found, model if remedies else None)
    if request.baselines and not found.stopped and found.before is None:
        from planner.remedies import elsewhere

        found.baselines.update(elsewhere(request, model))
    if not found.stopped and found.before is None and time_limit_s is None:
        from planner.plausible import ragged

        found.findings = ragged(request, found, model)
    provenance = {"tool": TOOL_VERSION, "cost_model": COST_MODEL_VERSION, "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                  "source": str(source if isinstance(source, str | Path) else model.name), "read_s": round(read - started, 3), "search_s": round(searched - read, 3)}  # fmt: skip
    if request.cache is not None and request.cache.priced != before:
        provenance["tables"] = {what: n - m for what, n, m in zip(("asked", "recalled"), request.cache.priced, before, strict=True)}
    if request.cache is not None and request.cache.faults.told:
        provenance["cache_faults"] = list(request.cache.faults.told)
    if found.before is not None:
        provenance["incremental"] = found.before.to_json()
    provenance |= asked(request, objective, mode)
    taken = assumptions(model, request, hardware, topology)
    made = compose(model, request, found, provenance, taken)
    if target is None or found.stopped:
        return made
    from planner.verify.confirm import confirmed

    def smaller(most_bytes: int) -> Strategy | None:
        if most_bytes <= 0:
            return None
        again = Search(model, replace(request, memory_limit_bytes=most_bytes), progress).run(how_close=False)
        if again.stopped == "interrupt":
            raise KeyboardInterrupt
        if again.best is None:
            return None
        # The first search's alternatives, and what it proved, are of all plans.
        again = replace(found, best=again.best, base=again.base, space=again.space, choice=again.choice, problem=again.problem, tried=found.tried + again.tried)
        return compose(model, request, again, provenance, taken)

    return confirmed(made, smaller, source, target, backend=backend or "shard_map", tell=lambda said: progress(said, made.cost.step_time_s, None) if progress else None)


def target_of(confirm: str, source: Any, request: Any) -> Any:
    """The target that plans are compiled for before one is taken. Raises PlanError P003, P077, P163 to P165."""
    from planner.verify.confirm import target_of

    if not isinstance(source, str | Path):
        raise PlanError("P003", "confirm compiles in a process of its own, which reads the model from a file", help=["save the model, and give its path"])
    computed_in(request.recipe.name)
    return target_of(confirm, request.topology.devices, request.topology.device.kind, request.topology.device.name)


def asked(request: Any, objective: str, mode: str) -> dict[str, Any]:
    """What of a request the plan alone does not tell, for its file: pins, and an objective or mode other than the usual one."""
    pins = {} if request.pins.empty else {"pins": request.pins.table()}
    return pins | ({"objective": objective} if objective != "step" else {}) | ({"mode": mode} if mode != "auto" else {})


def annotated_pins(model: Any) -> Any:
    """What the model's own multi-device annotations fix (planner.exchange.annotated). Raises PlanError P193."""
    from planner.base import Base
    from planner.exchange.annotated import pins_of

    return pins_of(model.proto, Base.of(model.graph(1), training=model.workload.kind == "train"))


def make_request(*, devices: int | None, hardware: str | None, topology: str | Path | None, workload: str = "train", mode: str = "auto", solver: str = "auto",
                 pins: Any = None, objective: str = "step", memory_limit_bytes: int | None = None, memory_reserve_bytes: int | None = None,
                 runtime: str = DEFAULT_RUNTIME, optimizer: str = "adamw", precision: str = DEFAULT_PRECISION, time_limit_s: float | None = None,
                 seed: int = 0, fold: bool = True, baselines: bool = True,
                 cache: Cache | str | Path | None = None, incremental: bool = False, backend: str = "") -> Any:  # fmt: skip
    """Check the options against what exists and build the search request."""
    from costmodels.memory import capacity
    from costmodels.precision import OPTIMIZERS, load_recipe, recipe_names
    from costmodels.runtime import RUNTIMES
    from planner.buckets import searched
    from planner.pins import Pins, parse_pins
    from planner.request import Request
    from planner.spread import MODES
    from planner.topology import for_devices
    from planner.topology_file import from_file

    if incremental and cache is None:
        raise PlanError("P003", "an incremental plan keeps decisions of one in the cache, and there is none", help=["--cache DIR and no --no-cache, or leave out --incremental"])
    if topology is not None and hardware is not None:
        raise PlanError("P016", "--topology and --hardware both describe the machine", help=["give one of them: a topology file names its own device"])
    machine = from_file(topology, devices) if topology is not None else for_devices(hardware or DEFAULT_HARDWARE, devices)
    choose("precision", precision, recipe_names())
    choose("optimizer", optimizer, OPTIMIZERS)
    choose("runtime", runtime, tuple(RUNTIMES))
    choose("solver", solver, ("auto", "dp", "recursive", "ilp"))
    choose("mode", mode, ("auto", "data-parallel", "hybrid", "semi-auto", "propagate", "manual"))
    choose("objective", objective, ("step", "memory"))
    choose("workload", workload, ("train", "infer"))
    if mode == "manual":
        raise PlanError("P059", "--mode manual prices one strategy file as it is, and here plans are searched for", help=["plan MODEL --mode manual --pin strategy.json"])
    parsed = pins if isinstance(pins, Pins) else parse_pins(pins)
    if mode == "semi-auto" and parsed.empty:
        raise PlanError("P059", "--mode semi-auto completes pins, and there are none", help=["--pin tp=8 or a TOML file, or --mode auto"])
    if mode in MODES:
        if not parsed.mesh or not parsed.nodes:
            raise PlanError("P059", f"--mode {mode} takes the mesh and the splits of some operators from the user, and there are none",
                            help=["--pin FILE.toml with [mesh] and a table per operator or parameter (docs/modes.md)"])  # fmt: skip
        parsed = replace(parsed, techniques={"zero_stage": 0, "recompute": "none", "microbatches": parsed.techniques.get("copies", 1), "copies": 1, **parsed.techniques})
    refuse_copies(parsed, workload, runtime)
    refuse_training(parsed, workload)
    partitioned = refuse_partitioned(parsed, runtime, backend)
    profile = searched(RUNTIMES[runtime], pinned_bucket(parsed, machine.device, workload, runtime))
    return Request(machine, capacity(machine.device, machine.devices, memory_reserve_bytes), load_recipe(precision, optimizer, workload == "train"),
                   profile, solver, mode, objective, parsed, memory_limit_bytes, time_limit_s, seed, fold, baselines,
                   offload=pinned_offload(parsed, workload, runtime), cache=cache if isinstance(cache, Cache) or cache is None else Cache.chosen(cache),
                   partitioned=partitioned, incremental=incremental)  # fmt: skip


def pinned_offload(pins: Any, workload: str, runtime: str) -> tuple[str, ...]:
    """What the pins send to the host's memory. Raises PlanError P024 where no program that does so is written."""
    from costmodels.runtime import RUNTIMES

    offload: tuple[str, ...] = pins.techniques.get("offload", ())
    why = "inference keeps no optimizer state" if workload != "train" else f"--runtime {runtime} is priced as that framework runs" if RUNTIMES[runtime].kernels is not None else ""
    if offload and why:
        raise PlanError("P024", f"pin offload = {'+'.join(offload)} contradicts the request: {why}", help=["remove the pin"])
    return offload


def refuse_copies(pins: Any, workload: str, runtime: str) -> None:
    """Raises PlanError P024 where no program runs several copies of the batch at the same time."""
    from costmodels.runtime import RUNTIMES

    copies = pins.techniques.get("copies", 1)
    why = ("inference has no microbatches" if workload != "train" else f"--runtime {runtime} is priced as that framework runs" if RUNTIMES[runtime].kernels is not None
           else "")  # fmt: skip
    if copies > 1 and why:
        raise PlanError("P024", f"pin copies = {copies} contradicts the request: {why}", help=["remove the pin"])


def refuse_partitioned(pins: Any, runtime: str, backend: str) -> bool:
    """Whether the program's collectives are placed by the compiler's partitioner. Raises PlanError P024 for pins that only programs with collectives of their own keep."""
    from planner.layout import STAGE

    if backend:
        choose("backend", backend, ("shard_map", "jit"))
    asked = "--backend jit" if backend == "jit" else "--runtime jax-jit" if runtime == "jax-jit" else ""
    if not asked:
        return False
    techniques, stages = pins.techniques, min(pins.mesh.get(STAGE, (1,)))
    pinned = {"copies": techniques.get("copies", 1), "offload": "+".join(techniques.get("offload", ())), "pp": stages,
              "schedule": techniques.get("schedule", ""), "virtual": techniques.get("virtual", 1)}  # fmt: skip
    for key, value in pinned.items():
        if value not in (1, ""):
            what = {"copies": "several copies of the batch at the same time are", "offload": "what waits in the host's memory is"}.get(key, "pipeline stages are")
            instead = "--backend shard_map" if backend == "jit" else "--runtime jax-shard_map"
            raise PlanError("P024", f"pin {key} = {value} contradicts {asked}: {what} written for shard_map only", help=[f"{instead}, or remove the pin"])
    return True


def refuse_tables(offload: tuple[str, ...], tables: str) -> None:
    """Raises PlanError P076 where optimizer state and tables are both sent to hosts, which no program does."""
    if offload and tables != "device":
        raise PlanError("P076", f"tables on hosts (--tables {tables}) and pin offload = {'+'.join(offload)} do not go together in a program",
                        help=["pin offload=none, or --tables device"])  # fmt: skip


def refuse_training(pins: Any, workload: str) -> None:
    """Raises PlanError P024 for what only a training step does where none is planned; its neutral values say nothing."""
    neutral = {"zero_stage": 0, "zero_group": None, "recompute": "none", "microbatches": 1, "virtual": 1}
    asked = next((k for k, v in pins.techniques.items() if k in neutral and v != neutral[k]), "")
    if workload != "train" and asked:
        raise PlanError("P024", f"pin {asked} = {pins.techniques[asked]} contradicts the request: inference has no backward pass, and takes its batch at once",
                        help=["remove the pin"])  # fmt: skip


def pinned_bucket(pins: Any, device: Any, workload: str, runtime: str) -> int | str:
    """The pinned size of what is sent together. Raises PlanError P024 where no program can be told of it."""
    from costmodels.runtime import RUNTIMES

    bucket: int | str = pins.techniques.get("bucket", 0)
    why = (f"the compiler for {device.kind} has no such setting" if device.kind != "gpu" else "inference has nothing that waits to be sent together" if workload != "train"
           else f"--runtime {runtime} is priced as that framework runs" if RUNTIMES[runtime].kernels is not None else "")  # fmt: skip
    if bucket and why:
        raise PlanError("P024", f"pin bucket = {bucket} contradicts the request: {why}", help=["remove the pin"])
    return bucket


def choose(option: str, value: str, known: Sequence[str]) -> None:
    """Raise PlanError unless the value is known."""
    if value not in known:
        raise PlanError("P018", f"--{option} {value!r}: unknown", help=[h for h in (did_you_mean(value, known), f"one of {', '.join(known)}") if h])


def open_model(source: Any, devices: int, **workload: Any) -> Any:
    """Open a model for a workload."""
    from planner.hosted import PLACES
    from planner.model import Model, Workload

    kind = workload.pop("workload", "train")
    choose("tables", workload.get("tables", PLACES[0]), PLACES)
    pick = {k: v for k, v in workload.items() if v is not None}
    for key in ("trainable", "freeze", "tie"):
        pick[key] = tuple(pick.get(key, ()))
    return Model.open(source, Workload(kind=kind, **pick), devices)


def refuse_unsupported(base: Any) -> None:
    """--strict: an operator without a rule is an error."""
    bad = sorted({r for r in base.reasons if r})
    if bad:
        raise PlanError("P027", f"{len(bad)} kinds of operators have no rule and would be replicated", detail=bad, help=["leave --strict out to plan them replicated"])


def assumptions(model: Any, request: Any, hardware: str | None, topology: Any) -> tuple[str, ...]:
    """What was taken for granted, a phrase each, for the first lines of the summary."""
    from costmodels.units import show_bytes
    from planner.findings import Finding
    from planner.ops.experts import said
    from planner.user_loss import is_user_loss, priced

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
        out.append(f"--memory-limit {show_bytes(request.memory_limit_bytes)} is more than a device has: {show_bytes(request.limit_bytes)} are usable")
    if model.workload.batch is None and model.workload.tokens_per_step is None:
        out.append(f"batch {model.batch} (--batch)")
    out += model.said
    shape = () if request.topology.groups else request.topology.notes
    return (*out, *said(model.plain), *shape, *(note for note in model.plain.notes if not isinstance(note, Finding)))


def no_plan(request: Any, found: Any, model: Any = None) -> PlanError:
    """Nothing fits: how close it came, where the memory goes, and (given the model) remedies that were planned anew."""
    from costmodels.units import show_bytes
    from planner.remedies import fewer_pins, remedies
    from planner.report.summary import offload_words

    close = found.smallest
    limit = show_bytes(request.limit_bytes)
    if close is None or close.cost.memory.total <= request.limit_bytes:  # a baseline that fits does not keep the pins
        without = fewer_pins(request, model) if model is not None else ""
        return PlanError("P021", f"no plan is possible under these pins on {request.topology.devices} devices",
                         help=[without or "remove pins, or the mode that contradicts them"], exit_code=NO_PLAN)  # fmt: skip
    parts = {k: getattr(close.cost.memory, k) for k in ("parameters", "gradients", "optimizer", "activations", "temporary")}
    sent = "".join(f", {words}" for words in offload_words(close.plan.offload))
    heavy = ", ".join(f"{k} {show_bytes(v)}" for k, v in sorted(parts.items(), key=lambda p: -p[1]))
    help = remedies(request, found, model) if model is not None else []
    full, least = request.capacity.usable, show_bytes(close.cost.memory.total)
    more = (f"a --memory-limit above {least}, which the smallest plan takes: the device has {show_bytes(full)} usable"
            if close.cost.memory.total <= full else "hardware with more memory (--hardware)")  # fmt: skip
    return PlanError("P021", f"no plan fits: {least} a device in the smallest plan priced, {limit} usable",
                     detail=[f"smallest plan: mesh {' x '.join(f'{a} {n}' for a, n in close.plan.mesh)}, ZeRO-{close.plan.zero}, recompute {close.plan.recompute}, "
                             f"{close.plan.microbatches} microbatch{'es' if close.plan.microbatches > 1 else ''}{sent}", heavy],
                     help=help if any(line.startswith("--hardware ") for line in help) else [*help, more], exit_code=NO_PLAN)  # fmt: skip


def reopen(strategy: Strategy, source: str | Path) -> Any:
    """The model of a strategy, under the workload it records."""
    w = strategy.workload
    training = w.get("training") or {}
    return open_model(source, strategy.topology["devices"], workload=w["kind"], batch=w["batch"], dims=w["dims"],
                      shapes={k: tuple(v) for k, v in w.get("shapes", {}).items()}, loss=training.get("loss", ""), logits=training.get("logits", ""),
                      shift_labels=training.get("shift_labels", False), ignore_index=training.get("ignore_index"), tie=training.get("tie", ()),
                      lora=training.get("lora", ""), trainable=training.get("trainable", ()), freeze=training.get("freeze", ()),
                      optimizer=training.get("optimizer", "adamw"), lr=training.get("lr", 1e-4), tables=training.get("tables", "device"))  # fmt: skip


def program(strategy: Strategy, source: str | Path, *, backend: str = "shard_map", unroll: bool = False, weights_file: str = "") -> Any:
    """The emitted program (text and constants) of a strategy on a model. Raises PlanError when the model is another one."""
    from planner.emit.header import header
    from planner.emit.program import Training, emit
    from planner.reprice import own_model

    choose("backend", backend, ("shard_map", "jit"))
    model = own_model(strategy, source)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    training = (strategy.workload.get("training") or {}) if strategy.workload["kind"] == "train" else {}
    return emit(graph, strategy.plan_for(graph), workload=strategy.workload["kind"], backend=backend, unroll=unroll, gpu_memory=_gpu_memory(strategy),  # type: ignore[arg-type]
                training=Training(training.get("optimizer", "adamw"), training.get("lr", 1e-4)), header=header(strategy, backend), weights_file=weights_file,
                compute=computed_in(str(strategy.workload["precision"])))  # fmt: skip


def computed_in(precision: str) -> str:
    """The type that programs of a recipe compute in. Raises PlanError P077 for recipes that are priced, not emitted."""
    from costmodels.precision import load_recipe, recipe_names

    choose("precision", precision, recipe_names())
    recipe = load_recipe(precision)
    if not recipe.emitted:
        written = [name for name in recipe_names() if load_recipe(name).emitted]
        raise PlanError("P077", f"no program is written in {precision} ({recipe.note}): it is priced only", detail=[f"programs are written in {' and '.join(written)}"],
                        help=[f"plan again with --precision {' or '.join(written)} for a program, or for the price alone without --emit and --confirm"])  # fmt: skip
    return recipe.compute


def _gpu_memory(strategy: Strategy) -> float | None:
    """Share of a GPU's memory that the plan may use; None for other devices, and where the device's own file is not at hand."""
    from costmodels.memory import preallocation
    from planner.topology import from_json

    try:
        return preallocation(from_json(strategy.topology).device, int(strategy.costs["memory_limit_bytes"]))
    except PlanError:
        return None


def emit(strategy: Strategy, source: str | Path, *, backend: str = "shard_map", unroll: bool = False) -> str:
    """Source text of the program."""
    return str(program(strategy, source, backend=backend, unroll=unroll).text)



