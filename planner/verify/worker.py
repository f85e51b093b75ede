"""`plan verify`: the emitted program compiled, and on virtual devices run, predicted beside actual.

`verify` starts `python -m planner.verify.worker` with one virtual CPU device per device of the
plan, so that the caller never imports jax and a crash, a hang or exhausted memory of the compiler
is an error message. For a GPU or TPU target nothing is run: `planner.verify.ahead`. The worker
writes its report after each phase:

    compile    the text that `plan emit` writes, from shapes alone, in float32: nothing is allocated
    run        outputs or gradients against the unsharded program, on the full model when the host
               memory it would take (what the compiler says each device needs, times devices, plus
               the unsharded model) is below half of what there is and it would end in time; else on
               `planner.verify.shrink`'s smaller model under the same splits
    explain    where collectives or products are not as predicted, the program compiled again with
               dumps: which pass changed them
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.units import show_bytes
from costmodels.precision import recipe_in
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.execution.techniques import BESIDE, WRITTEN_OUT
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.lookup import rule_of
from planner.search.build_request import emitted_recipe
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.verify.failure import last_words, told
from planner.verify.hlo.flops import dot_flops
from planner.verify.host import free_bytes, host_bytes, refuse_if_too_large
from planner.verify.predicted import predict
from planner.verify.report import FLOPS, PEAK, TRAFFIC, CompiledSizes, Figure, Numbers, VerifyReport
from planner.verify.targets import Target, parse_target, require

if TYPE_CHECKING:
    from planner.emit.writer import Program
    from planner.verify.predicted import Predicted
    from planner.workload.model import Model

TOLERANCE = 1e-4
EMITTED = "emitted.py"
"""What the program's text is called in tracebacks (planner.verify.numerics.load_program)."""
TIMEOUT_S = 900.0
CORE_FLOPS_PER_S = 5e9
"""What one core is counted on to do; decides only whether the full model is run."""


# Many parameters: the options of `plan verify`, all but two by keyword.
def verify(
    strategy: Strategy,
    source: str | Path,
    *,
    backend: str = "shard_map",
    target: str = "cpu",
    run: bool = True,
    tolerance: float | None = None,
    compute: str = "",
    unroll: bool = False,
    named: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> VerifyReport:
    """Compile, and with `run` on virtual CPU devices execute, the program of a strategy, in a
    process of its own.

    source: the model the strategy was made for. target: cpu, gpu:NAME or tpu:SLICE (compiled only).
    tolerance: on cpu the largest error of outputs, loss and gradients (a fraction, default
    TOLERANCE), else the largest difference of every judged figure instead of the target's own ones.
    compute: float32 or bfloat16 on other targets than cpu, default as the plan computes. backend,
    unroll: as for `plan emit`, whose text is what is compiled. named: on other targets than cpu
    also find what is behind differences, for which the program is compiled a second time. Raises
    PlanError: another model, no jax or no compiler, an unknown target, devices that cannot be had,
    a host with too little memory, or a compilation that fails or exceeds timeout_s. Running out of
    time after compiling is no error: the report says that numbers are missing.
    """

    choose("backend", backend, ("shard_map", "jit"))
    devices = strategy_devices(strategy)
    place = parse_target(target, devices)
    require(place)
    request = {
        "source": str(source),
        "backend": backend,
        "run": run,
        "tolerance": tolerance,
        "timeout_s": timeout_s,
        "target": target,
        "compute": compute,
        "unroll": unroll,
        "named": named,
    }
    answer, exit_code, log = _answer(strategy, request, place, timeout_s)
    if "error" in answer:
        raise PlanError(**answer["error"])
    if "report" not in answer:
        where = place.text if place.kind != "cpu" else f"{devices} virtual devices"
        raise _lost(exit_code is None, timeout_s, exit_code or 0, log, where)
    report = VerifyReport.from_dict(answer["report"])
    failed = answer.get("failed")
    if answer["phase"] == "ran":
        why = failed or f"not found within {timeout_s:g} s"
        note = f"which passes of the compiler are behind the differences: {why}"
        return replace(report, notes=(*report.notes, note))
    if answer["phase"] == "compiled":
        if exit_code is None:
            return replace(report, not_run=f"not finished within {timeout_s:g} s")
        return replace(report, not_run=failed or f"running {_died(exit_code, log)}")
    return report


def _answer(
    strategy: Strategy, request: dict[str, Any], place: Target, timeout_s: float
) -> tuple[dict[str, Any], int | None, str]:
    """What a worker process wrote ({} if nothing), its exit code (None: it was ended for time), and
    its log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        strategy.save(folder / "strategy.json")
        request = {"strategy": str(folder / "strategy.json"), **request}
        (folder / "request.json").write_text(json.dumps(request))
        files = [str(folder / "request.json"), str(folder / "answer.json")]
        exit_code, log = None, ""
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, "-m", "planner.verify.worker", *files],
                env={
                    **environment(strategy_devices(strategy), place.kind, QUICK_TO_COMPILE),
                    **place.environment(),
                },
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            exit_code, log = done.returncode, done.stderr
        answer = folder / "answer.json"
        return json.loads(answer.read_text()) if answer.exists() else {}, exit_code, log


QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
"""Of XLA on CPUs: machine code that runs for milliseconds need not be fast, and one loop for each
fused kernel compiles in a third of the time of a module. The program that is compiled, its
collectives, FLOPs and memory are the same."""


def strategy_devices(strategy: Strategy) -> int:
    """How many devices a strategy is for."""
    return prod(size for _, size in strategy.mesh_shape)


def environment(devices: int, kind: str = "cpu", options: Sequence[str] = ()) -> dict[str, str]:
    """Environment of a process able to import this package; on cpu with that many virtual devices
    and products in float32. Nothing comes from a cache of compiled programs that the user may have:
    what the compiler did is read from its dumps.

    NPROC, the number of XLA's threads, is well above that of devices: independent collectives of
    one device run at once, each holding a thread until the other devices come, and with 8 threads
    for 8 devices they were seen to wait for one another for ever. options: flags of XLA
    on CPUs, before those of the user, which count.
    """
    root = str(Path(__file__).resolve().parents[2])
    flags = [
        f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f
    ]
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    variables = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if kind != "cpu":
        return {
            **variables,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(flags),
        }
    return {
        **variables,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "float32",
        "NPROC": os.environ.get("NPROC", str(min(32 * devices, 2048))),
        "XLA_FLAGS": " ".join(
            [*options, f"--xla_force_host_platform_device_count={devices}", *flags]
        ),
    }


def _lost(late: bool, timeout_s: float, code: int, log: str, where: str) -> PlanError:
    """The error for a worker that left no report."""
    if late:
        return PlanError(
            "P161",
            f"compiling did not end within {timeout_s:g} s",
            help=["a smaller model or fewer devices"],
        )
    return PlanError("P162", f"compiling for {where} {_died(code, log)}")


def _died(code: int, log: str) -> str:
    """How a process ended that could not say so itself."""
    if code in (-9, 137):
        return "failed: the process was killed, most likely for memory"
    message = last_words(log) or "it left no message"
    return f"failed: {f'the process was ended by signal {-code}; ' if code < 0 else ''}{message}"


def written_out(graph: Graph, plan: Plan, unroll: bool) -> int:
    """How many operators a program has."""
    whole = unroll or plan.blocks == WRITTEN_OUT
    return len(graph.nodes) - (
        0 if whole else sum(period * (repeats - 1) for _, period, repeats in plan.repeated_blocks)
    )


def compile_program(program: Program, workload: str) -> CompiledSizes:
    """Compile the training step (or the forward pass) from shapes alone, in float32. Needs jax and
    the plan's devices."""
    from planner.verify.compiled import compile_step

    return measured(compile_step(program, workload))  # type: ignore[arg-type]


def measured(done: Any) -> CompiledSizes:
    """What the compiler says of a compiled step."""
    stats = done.memory_analysis()
    return CompiledSizes(
        done.as_text(),
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def figures(
    predicted: Predicted, plan: Plan, compiled: CompiledSizes, backend: str, planned_bytes: int
) -> tuple[Figure, ...]:
    """Predicted beside compiled. planned_bytes: memory per device the strategy claims, in its own
    precision."""
    from planner.verify.ahead import DOTS, compiled_traffic
    from planner.verify.explain import entry_bytes

    exact = backend == "shard_map"
    actual = compiled_traffic(compiled.text, plan, exact)

    def row(what: str, planned: int, compiled_value: int, **options: Any) -> Figure:
        note = "" if exact else "placed by the compiler"
        return Figure(what, planned, compiled_value, judged=exact, note=note, **options)

    planned = predicted.traffic
    results = entry_bytes(compiled.text)[1]
    cpu = "CPU, not representative"
    return (
        *(
            row(f"{key[0]} over {key[1]}", planned.get(key, 0), actual.get(key, 0), of=TRAFFIC)
            for key in sorted({*planned, *actual})
        ),
        row(DOTS, predicted.flops, dot_flops(compiled.text), unit="FLOPs", of=FLOPS),
        row("argument bytes", predicted.argument_bytes, compiled.argument_bytes),
        row("output bytes", predicted.output_bytes, results),
        Figure("temporaries", None, compiled.temporary_bytes, judged=False, note=cpu),
        Figure(
            PEAK,
            planned_bytes,
            compiled.peak_bytes,
            judged=False,
            note=f"planned for the target in its precision; {cpu}",
        ),
    )


def explained(
    rows: tuple[Figure, ...], predicted: Predicted, plan: Plan, program: Program, workload: str
) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """The figures and the lines behind their differences, for which the program is compiled again
    with dumps after every pass."""
    from planner.verify.ahead import compile_ahead, explain

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        text = compile_ahead(
            program, workload, Target("cpu"), "float32", plan.devices, Path(name)
        ).text
        return explain(rows, predicted, text, plan, program, True, Path(name))


def too_large(
    graph: Graph, plan: Plan, compiled: CompiledSizes, training: bool, timeout_s: float
) -> str:
    """Why the full model is not run; "" when it is: its estimated memory is below half the host's,
    and its work ends in a quarter of the time."""

    values_bytes = (
        4
        * sum(t.elements for n, t in graph.tensors.items() if n not in graph.weights)
        * plan.microbatches
    )
    weights = 4 * graph.parameters
    need = (
        plan.devices * compiled.peak_bytes
        + (2 if training else 1) * (weights + values_bytes)
        + 2 * weights
    )
    if need > host_bytes() / 2:
        return f"it would take about {show_bytes(need)} of {show_bytes(host_bytes())} host memory"
    work = (
        sum(rule_of(n, graph)[0].flops for n in graph.nodes)
        * plan.microbatches
        * (3 if training else 1)
    )
    seconds = 2 * work / (CORE_FLOPS_PER_S * (os.cpu_count() or 1))
    return f"it would take about {seconds:.0f} s" if seconds > timeout_s / 4 else ""


def numbers(
    model: Model,
    plan: Plan,
    program: Program,
    compiled: CompiledSizes,
    backend: str,
    tolerance: float,
    timeout_s: float,
) -> tuple[Numbers | None, str, tuple[str, ...]]:
    """Run the program, full or shrunk, against the unsharded one: (numbers or None, why not,
    notes)."""
    from planner.verify.numerics import compare, seeded_values
    from planner.workload.weights import load

    workload = model.workload.kind
    graph, size = model.graph(plan.microbatches), "full size"
    own_program: Program | None = program
    notes: tuple[str, ...] = ()
    reason = too_large(graph, plan, compiled, workload == "train", timeout_s)
    if reason:
        from planner.execution.fewer_repeats import follow
        from planner.verify.shrink import shrink, within_goals

        small = shrink(graph, 0, plan=plan, folder=model.folder)
        notes = tuple(n for n in small.notes if n not in graph.notes)
        if not within_goals(small):
            return None, f"at full size {reason}, and the model does not shrink far enough", notes
        shares = (2, *[1] * (len(plan.islands) - 1)) if plan.islands else ()
        plan, size = (
            replace(follow(plan, graph, small), microbatches=sum(shares) or 1, islands=shares),
            f"shrunk model ({reason} at full size)",
        )
        graph, own_program = small, None
    values = seeded_values(graph, load(graph, model.folder, seed_missing=True))
    errors, _ = compare(
        graph, plan, workload=workload, backend=backend, values=values, program=own_program
    )
    gradients = errors.gradients if workload == "train" else None
    return (
        Numbers(
            size=size,
            parameters=graph.parameters,
            error=errors.outputs,
            gradients=gradients,
            worst=errors.worst,
            tolerance=tolerance,
        ),
        "",
        notes,
    )


def work(request: Mapping[str, Any], write: Any) -> None:
    """The worker's phases; `write(phase, report)` after each."""
    strategy = Strategy.load(request["strategy"])
    if request.get("target", "cpu") != "cpu":
        write("done", ahead_of_time(strategy, request))
        return
    _require_devices(strategy_devices(strategy))
    model = recorded_model(strategy, request["source"])
    kind, backend, unroll = model.workload.kind, request["backend"], request.get("unroll", False)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan, program = strategy.plan_for(graph), emitted(strategy, request)
    refuse_if_too_large(Target("cpu"), written_out(graph, plan, unroll), free_bytes())
    compiled = compile_program(program, kind)
    precision = str(strategy.workload.get("precision", "fp32"))
    predicted = predict(
        graph, plan, workload=kind, optimizer=model.workload.optimizer, precision=precision
    )
    twin = (
        f"the plan computes in {precision}; CPU collectives would widen it, so its float32 twin is"
        " verified"
    )
    notes = (*([twin] if precision != "fp32" else []), *offload_notes(plan, "cpu"))
    notes = (*notes, *routing_notes(graph, plan))
    planned_bytes = int(strategy.costs["memory_per_device_bytes"])
    rows = figures(predicted, plan, compiled, backend, planned_bytes)
    report = VerifyReport(
        model=str(strategy.model["name"]),
        program=backend,
        mesh=dict(plan.mesh),
        workload=kind,
        compiled=compiled_how(plan, unroll, "float32"),
        figures=rows,
        numbers=None,
        not_run="",
        asked=request["run"],
        notes=notes,
    )
    write("compiled" if request["run"] else "ran", report)
    if request["run"]:
        tolerance = TOLERANCE if request["tolerance"] is None else request["tolerance"]
        errors, why, more_notes = numbers(
            model, plan, program, compiled, backend, tolerance, request["timeout_s"]
        )
        report = replace(report, numbers=errors, not_run=why, notes=(*notes, *more_notes))
        write("ran", report)
    if any(f.of in (TRAFFIC, FLOPS) and f.judged and f.distance for f in rows):
        rows, lines = explained(rows, predicted, plan, program, kind)
        report = replace(report, figures=rows, differences=lines)
    write("done", report)


def _require_devices(count: int) -> None:
    """Raises PlanError P160 unless jax has so many virtual CPU devices."""
    import jax

    try:
        have = len(jax.devices())
    except RuntimeError as e:
        raise PlanError(
            "P160", f"jax cannot make {count} virtual CPU devices: {str(e).splitlines()[0]}"
        ) from e
    if have != count:
        raise PlanError(
            "P160",
            f"jax made {have} virtual CPU devices instead of {count}",
            help=["unset JAX settings in the environment"],
        )


def emitted(strategy: Strategy, request: Mapping[str, Any]) -> Program:
    """The program that `plan emit` writes with the same options."""
    from planner.emit.from_strategy import program

    emitted_program: Program = program(
        strategy, request["source"], backend=request["backend"], unroll=request.get("unroll", False)
    )
    return emitted_program


def compiled_how(plan: Plan, unroll: bool, compute: str) -> str:
    """How the program was compiled, in words."""
    unroll = unroll or plan.blocks == WRITTEN_OUT
    return (
        "from shapes,"
        f" {'' if not plan.repeated_blocks else 'repeated blocks written out, ' if unroll else 'repeated blocks as loops, '}{compute}"  # noqa: E501
    )


def offload_notes(plan: Plan, kind: str) -> tuple[str, ...]:
    """What is said of a plan that sends something to the host's memory, of targets whose figures do
    not tell it from the devices'."""
    if not plan.in_host_memory or kind == "gpu":
        return ()
    return (
        (
            f"what the plan offloads to host memory ({', '.join(plan.in_host_memory)}) is counted"
            " with the devices' here; --target gpu:NAME tells the two apart"
        ),
    )


def routing_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """What is said of loops whose length no compiler knows, and of exchanges that a framework alone
    runs beside other kernels."""
    routed = any(operator_of(n.op).kind == "experts" for n in graph.nodes)
    counted = (
        "blocks of routed experts, and rounds of their exchange, are counted as often as they run"
        " when the router is balanced"
    )
    beside = (
        "experts' rows are priced as sent beside other kernels, as the plan's framework does; this"
        " program's kernels wait for them"
    )
    return (*[counted] * routed, *[beside] * (plan.exchanges == BESIDE))


def recorded_model(strategy: Strategy, source: str) -> Model:
    """The model under the strategy's workload. Raises PlanError P051 when its graph is another
    one."""
    from planner.whatif.reprice import own_model

    return own_model(strategy, source)


def ahead_notes(plan: Plan, graph: Graph, target: Target) -> tuple[str, ...]:
    """What is said of every program that is only compiled."""
    notes = [
        "peak and temporaries are predicted without the allowance for fragmentation that a plan"
        " adds"
    ]
    notes += [*offload_notes(plan, target.kind), *routing_notes(graph, plan)]
    return tuple(notes)


def ahead_of_time(strategy: Strategy, request: Mapping[str, Any]) -> VerifyReport:
    """The report for a target that is not there."""
    from planner.verify import ahead
    from planner.verify.timing import clock, device_of, pricer_of

    model, backend = recorded_model(strategy, request["source"]), request["backend"]
    kind, optimizer = model.workload.kind, model.workload.optimizer
    precision = str(strategy.workload["precision"])
    compute = request["compute"] or emitted_recipe(precision).between
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan = strategy.plan_for(graph)
    unroll = request.get("unroll", False)
    target = replace(
        parse_target(request["target"], plan.devices),
        pool_bytes=int(strategy.costs["memory_limit_bytes"]),
    )
    refuse_if_too_large(target, written_out(graph, plan, unroll), free_bytes())
    runtime = str(strategy.workload["runtime"])
    recipe = recipe_in(compute, precision, optimizer, kind == "train")
    device = device_of(target, pricer_of(strategy).topology.device)
    memory = ahead.planned_memory(graph, plan, recipe, runtime, device=device)
    outcome = ahead.check(
        graph,
        plan,
        program := emitted(strategy, request),
        target,
        memory,
        workload=kind,
        backend=backend,
        optimizer=optimizer,
        compute=compute,
        precision=precision,
        tolerance=request["tolerance"],
        named=request.get("named", True),
    )
    return VerifyReport(
        model=str(strategy.model["name"]),
        program=backend,
        mesh=dict(plan.mesh),
        workload=kind,
        compiled=compiled_how(plan, unroll, compute),
        figures=outcome.figures,
        numbers=None,
        not_run=f"{target.text} is only compiled for",
        asked=False,
        notes=ahead_notes(plan, graph, target),
        machine=target.machine,
        differences=outcome.differences,
        clock=clock(
            outcome.compiled,
            program.text,
            strategy=strategy,
            graph=graph,
            plan=plan,
            runs=outcome.predicted.runs,
            target=target,
            exact=backend == "shard_map",
            as_priced=compute == emitted_recipe(precision).between,
        ),
    )


GRACE_S = 60
"""How long a worker outlives the time it has: its caller ends it sooner, unless that was killed."""


def end_in_time(asked: Path) -> None:
    """Ends this process, whatever it is in, some time after the limit of its request: a worker
    whose caller was killed would else compile on for as long as it takes."""
    if hasattr(signal, "alarm"):
        limit_s = json.loads(asked.read_text())["timeout_s"]
        signal.alarm(max(1, math.ceil(limit_s + GRACE_S)))


def main(argv: list[str]) -> int:
    """Entry of the worker process: REQUEST ANSWER, two JSON files."""
    asked, answered = map(Path, argv)
    kept: dict[str, Any] = {}

    def report(phase: str, phase_report: VerifyReport) -> None:
        kept.update(phase=phase, report=phase_report.to_dict())
        put(kept)

    def put(answer: Mapping[str, Any]) -> None:
        part = answered.with_suffix(".part")
        part.write_text(json.dumps(answer))
        part.replace(answered)

    request = json.loads(asked.read_text())
    try:
        work(request, report)
    except PlanError as e:
        put({"error": _row(e)})
    except Exception as e:  # of the compiler, or of the program
        activity = {"compiled": "running", "ran": "compiling again"}.get(str(kept.get("phase")))
        failed = told(
            e,
            activity
            or f"compiling for {request['target'] if request['target'] != 'cpu' else 'virtual devices'}",  # noqa: E501
            EMITTED,
        )
        put(
            {**kept, "failed": "; ".join([failed.what, *failed.detail])}
            if kept
            else {"error": _row(failed)}
        )
    return 0


def _row(e: PlanError) -> dict[str, Any]:
    return {
        "code": e.code,
        "what": e.what,
        "detail": list(e.detail),
        "help": list(e.help),
        "exit_code": e.exit_code,
    }


if __name__ == "__main__":
    from planner.verify.ahead import leave

    end_in_time(Path(sys.argv[1]))
    leave(main(sys.argv[1:]))
