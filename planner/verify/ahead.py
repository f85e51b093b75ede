"""A plan's program compiled for a target that is not there, predicted beside compiled. Runs in
`plan verify`'s worker process.

Compiled from shapes alone: nothing is allocated on any device, and what the compiler itself needs
of this host is estimated first. Where collectives or products differ, the program is compiled a
second time with dumps after every pass, so that each difference is named by the pass.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from costmodels.hardware.device import Device, aliases, load_device
from costmodels.precision import Recipe
from costmodels.runtimes import load_runtime
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.verify import explain as differences
from planner.verify.hlo.buffers import Assignment, assignment_in
from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.origins import Origins
from planner.verify.hlo.paddings import Padding, paddings
from planner.verify.hlo.program import traffic
from planner.verify.predicted import Predicted, Traffic, flops_by_node, named_uses, predict
from planner.verify.report import FLOPS, PEAK, TRAFFIC, CompiledSizes, Figure
from planner.verify.targets import Target

if TYPE_CHECKING:
    from planner.emit.writer import Program

LARGE = 10**9
"""Programs below this many bytes a device are not judged by their peak: what compilers keep for
themselves is a large part of them."""
PEAK_TOLERANCE = {"gpu": 0.10, "tpu": 0.25}
TRAFFIC_TOLERANCE = 0.01
ALL, DOTS = "all collectives", "dot FLOPs"
PADDING = "padding of products"
"""The figure of what compiler passes added to products; it is there only where they did."""
HOST_ARGUMENTS = "arguments on the host"
"""The figure of offloaded arguments; it is there only where a plan offloads any."""
ASSIGNED = "*.after_optimizations_after_buffer_assignment.txt"
"""The last dump before the TPU compiler makes machine code: the program, with all that was dumped
about its buffers before it."""
POLL_S = 0.1
SPOKEN = 3
"""Passes that a verdict names."""
FLOPS_TOLERANCE = {"cpu": 0.0, "gpu": 0.0, "tpu": 0.01}


@dataclass(frozen=True)
class Compiled(CompiledSizes):
    """A program compiled for a target that is not there. host_argument_bytes, host_temporary_bytes:
    in the memory of a device's host, and in no other figure."""

    assignment: Assignment
    host_argument_bytes: int = 0
    host_temporary_bytes: int = 0


def compile_ahead(
    program: Program,
    workload: str,
    target: Target,
    compute: str,
    devices: int,
    passes: Path | None = None,
) -> Compiled:
    """Compile the training step (or the forward pass) of a program for a target. passes: a folder
    for dumps after every pass. Products are as precise as the program asks for where it computes in
    float32 (`command_line` of planner/emit/runtime/files/frame.py).

    Needs jax and the target's environment. Whatever the compiler raises is left to the caller.
    """
    import jax

    from planner.verify.numerics import load_program

    asked = jax.default_matmul_precision("highest") if compute == "float32" else nullcontext()
    with asked:
        lowered = lowered_for(
            load_program(program, compute=compute), workload, target.compile_devices(devices)
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = passes or Path(name)
        options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": ".*" if passes else ""}
        if target.kind == "tpu":
            return _until_buffers(lambda: lowered.compile(compiler_options=options), folder, target)
        done, assignment = lowered.compile(compiler_options=options), assignment_in(folder)
    stats = done.memory_analysis()
    return Compiled(
        done.as_text(),
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        assignment,
        stats.host_argument_size_in_bytes,
        stats.host_temp_size_in_bytes,
    )


def lowered_for(module: types.ModuleType, workload: str, devices: Sequence[Any]) -> Any:
    """A loaded program's training step (or forward pass), lowered for devices.

    Devices that are only compiled for have no memories by name, and shardings over them forget the
    names: what a program keeps in the host's memory would be its device's. Shardings over an
    abstract mesh keep them, and the devices are those of the mesh that is set.
    """
    import jax

    from planner.verify.compiled import lowered

    mesh: Any = module.mesh_of(devices)
    if not hasattr(module, "parameter_at"):
        module.__dict__["make_mesh"] = lambda: mesh
        return lowered(module, workload, mesh)  # type: ignore[arg-type]
    options = module.fused(mesh)  # an abstract mesh has no devices to ask
    module.__dict__.update(make_mesh=lambda: mesh.abstract_mesh, fused=lambda _: options)
    with jax.set_mesh(mesh):
        return lowered(module, workload, mesh.abstract_mesh)  # type: ignore[arg-type]


def _until_buffers(compile: Callable[[], object], folder: Path, target: Target) -> Compiled:
    """What the TPU compiler has settled once buffers are assigned, read from its dumps. The machine
    code that it makes then takes ten times as long and is not looked at: it is left to a thread
    that ends with the process (`leave`), but for programs near what a device holds, of which the
    compiler is to speak itself.

    Sizes are those of the assignment: what its memory analysis calls temporary counts the gaps
    between values twice.
    """

    failed: list[BaseException] = []

    def run() -> None:
        try:
            compile()
        except BaseException as e:  # raised below, in the caller's thread
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and not any(folder.glob(ASSIGNED)):
        thread.join(POLL_S)
    if failed:
        raise failed[0]
    dumps = sorted(folder.glob(ASSIGNED), key=lambda path: path.stat().st_size)
    if not dumps:
        raise RuntimeError("the TPU compiler wrote no dumps of its buffers")
    assignment = assignment_in(folder)
    compiled = Compiled(
        dumps[-1].read_text(errors="replace"),
        sum(assignment.parameters.values()),
        assignment.given_bytes + assignment.result_bytes,
        assignment.given_bytes,
        assignment.arena_bytes,
        assignment,
    )
    if compiled.peak_bytes > 0.9 * (
        load_device(target.name).memory_bytes if target.name in aliases() else 0
    ):
        thread.join()
        if failed:
            raise failed[0]
    return compiled


def leave(code: int) -> NoReturn:
    """End the process at once, with whatever a compiler still does."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def compiled_traffic(text: str, plan: Plan, exact: bool) -> Traffic:
    """(kind, axes) -> payload bytes of a compiled program."""
    by_kind = traffic(text, plan.mesh, merge_ar_slice=not exact)
    return {
        (kind, axes): int(cell["payload"])
        for kind, by in by_kind.items()
        for axes, cell in by.items()
    }


def figures(
    predicted: Predicted,
    compiled: Compiled,
    plan: Plan,
    target: Target,
    exact: bool,
    memory: Mapping[str, int],
    tolerance: float | None,
    padded: Sequence[Padding] = (),
) -> tuple[Figure, ...]:
    """Predicted beside compiled. memory: the planned parts of a device's memory without an
    allowance for fragmentation; tolerance: instead of the target's own for every judged figure;
    padded: what passes added to products, which has a line of its own and is no part of their
    FLOPs.
    """
    inside, results = differences.entry_bytes(compiled.text)

    def judged(what: str, a: int, b: int, usual_tolerance: float, **options: Any) -> Figure:
        return Figure(
            what, a, b, tolerance=usual_tolerance if tolerance is None else tolerance, **options
        )

    rows = _traffic_figures(predicted, compiled_traffic(compiled.text, plan, exact), judged)
    added = sum(p.flops for p in padded)
    flops = dot_flops(compiled.text) - added
    exactness = FLOPS_TOLERANCE[target.kind]
    rows.append(judged(DOTS, predicted.flops, flops, exactness, unit="FLOPs", of=FLOPS))
    if added:
        note = f"beside them, by {', '.join(dict.fromkeys(p.by for p in padded))}"
        rows.append(Figure(PADDING, None, added, "FLOPs", judged=False, of=FLOPS, note=note))
    rows.append(judged("argument bytes", predicted.argument_bytes, inside, 0.0))
    rows.append(judged("output bytes", predicted.output_bytes, results, 0.0))
    offloaded = predicted.host_argument_bytes
    if offloaded and target.kind == "gpu":
        rows.append(judged(HOST_ARGUMENTS, offloaded, compiled.host_argument_bytes, 0.0))
    if compiled.argument_bytes != inside - compiled.host_argument_bytes:
        stored, note = compiled.argument_bytes, "whole tiles"
        rows.append(Figure("arguments as stored", None, stored, judged=False, note=note))
    temporaries = sum(_temporaries(predicted, memory))
    temporary_bytes = compiled.temporary_bytes
    rows.append(Figure("temporaries", temporaries, temporary_bytes, judged=False, shown=True))
    if plan.in_host_memory and target.kind == "gpu":
        temporary_bytes = compiled.host_temporary_bytes
        rows.append(Figure("temporaries on the host", None, temporary_bytes, judged=False))
    total, target_tolerance = sum(memory.values()), PEAK_TOLERANCE.get(target.kind)
    if target_tolerance is None or (compiled.peak_bytes < LARGE and tolerance is None):
        rows.append(Figure(PEAK, total, compiled.peak_bytes, judged=False, shown=True))
    else:
        rows.append(judged(PEAK, total, compiled.peak_bytes, target_tolerance))
    return tuple(rows)


def _traffic_figures(
    predicted: Predicted, actual: Traffic, judged: Callable[..., Figure]
) -> list[Figure]:
    """A line for each kind of collective over the same axes, and the judged one of all of them."""
    planned = predicted.traffic
    keys = sorted({*planned, *actual})
    rows = [
        Figure(
            f"{key[0]} over {key[1]}",
            planned.get(key, 0),
            actual.get(key, 0),
            judged=False,
            shown=True,
            of=TRAFFIC,
        )
        for key in keys
    ]
    off = sum(abs(planned.get(key, 0) - actual.get(key, 0)) for key in keys)
    totals = sum(planned.values()), sum(actual.values())
    return [*rows, judged(ALL, *totals, TRAFFIC_TOLERANCE, off=off, of=TRAFFIC)]


def _temporaries(predicted: Predicted, memory: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that the memory model has beside the arguments: activations, of which the batch is an
    argument; gradients and working memory."""
    return (
        max(0, memory["activations"] - predicted.batch_bytes),
        memory["gradients"] + memory["temporary"],
    )


def explain(
    rows: tuple[Figure, ...],
    predicted: Predicted,
    text: str,
    plan: Plan,
    program: Program,
    exact: bool,
    folder: Path,
    padded: Sequence[Padding] = (),
) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """The figures with what the compiler's passes made of them on their own, and a line per tensor,
    operator and pass behind a difference of collectives or products. folder: dumps after every
    pass, where there is one."""
    lines: list[str] = []
    if any(f.of == TRAFFIC and f.distance for f in rows):
        uses = named_uses(predicted.flow.graph, predicted.runs, predicted.uses)
        sent = differences.of_traffic(
            folder, plan.mesh, uses, compiled_traffic(text, plan, exact), program.text, exact
        )
        lines += sent.lines
        compiler_bytes = {
            ALL: sum(sent.own.values()),
            **{f"{kind} over {axes}": size for (kind, axes), size in sent.own.items()},
        }
        by = ", ".join(sent.by[:SPOKEN])
        rows = tuple(
            (
                replace(f, own=compiler_bytes.get(f.what, 0), by=by)
                if f.of == TRAFFIC and f.judged and f.distance
                else f
            )
            for f in rows
        )
    lines += map(str, padded)
    if any(f.of == FLOPS and f.distance for f in rows):
        by_node = flops_by_node(predicted.flow, predicted.runs)
        line, passes = differences.by_passes(folder, predicted.flops, not exact, padded)
        nodes = differences.apart(text, program.text, by_node, padded)
        lines += [line] if line else []
        lines += differences.of_flops(nodes)
        words = differences.spoken(nodes, by_node, passes)
        rows = tuple(
            replace(f, by=words) if f.of == FLOPS and f.judged and f.distance else f for f in rows
        )
    return rows, tuple(lines)


def planned_memory(
    graph: Graph,
    plan: Plan,
    recipe: Recipe,
    runtime: str,
    *,
    unroll: bool = False,
    device: Device | None = None,
) -> dict[str, int]:
    """The planner's memory of a device by part, as its cost model has it, without the allowance for
    fragmentation. device: what is compiled for, None for cores of this host; bytes depend on it by
    its kind, its tiles, its cores' own memory and its fused attention alone.

    unroll: priced as a program without a loop over its blocks, a few blocks at most: of many,
    compilers put off more gradients than one, and the price as a loop, which is the plan's own, is
    the nearer. Recomputed blocks and pipeline stages are priced as loops in any case.
    """
    from dataclasses import asdict, replace

    from planner.analysis.facts import GraphFacts
    from planner.pricing.plan_price import price_plan
    from planner.pricing.pricer import Pricer

    topology = for_devices("cpu", plan.devices)
    if device is not None:
        there = replace(
            topology.device,
            kind=device.kind,
            tile=device.tile,
            attention=device.attention,
            on_chip_bytes=device.on_chip_bytes,
        )
        topology = replace(topology, device=there)
    mesh = pinned_mesh(topology, dict(plan.mesh))
    training = recipe.gradient_bytes > 0
    pricer = Pricer(topology, mesh, replace(load_runtime(runtime), memory_slack=0.0), recipe)
    if unroll and plan.recompute == "none" and plan.stages < 2:
        return asdict(
            price_plan(
                GraphFacts.of(graph, training=training, fold=False),
                replace(plan, repeated_blocks=()),
                pricer,
            )[0].memory
        )
    base = GraphFacts.of(graph, training=training, cut_anywhere=bool(plan.stage_cuts))
    return asdict(price_plan(base, plan, pricer)[0].memory)


@dataclass(frozen=True)
class Outcome:
    """Figures of one program on one target, the lines behind their differences, what was compiled,
    and what was predicted of it."""

    figures: tuple[Figure, ...]
    differences: tuple[str, ...]
    compiled: Compiled
    predicted: Predicted


# Many parameters: what one program is made of, and what is asked of it, by keyword.
def check(
    graph: Graph,
    plan: Plan,
    program: Program,
    target: Target,
    memory: Mapping[str, int],
    *,
    workload: str,
    backend: str,
    optimizer: str,
    compute: str,
    precision: str = "",
    tolerance: float | None = None,
    named: bool = True,
) -> Outcome:
    """Compile and compare one program. named: what is behind differences, for which the program is
    compiled a second time (for TPU at once with all dumps, which take less than that would). Needs
    jax and the target's environment."""
    exact = backend == "shard_map"
    predicted = predict(
        graph, plan, workload=workload, optimizer=optimizer, compute=compute, precision=precision
    )

    def build(passes: Path | None = None) -> Compiled:
        return compile_ahead(program, workload, target, compute, plan.devices, passes)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, padded, at_once = Path(name), tuple[Padding, ...](), named and target.kind == "tpu"
        compiled = build(folder if at_once else None)
        rows = figures(predicted, compiled, plan, target, exact, memory, tolerance)
        if not named:
            return Outcome(rows, (), compiled, predicted)
        by = {f.what: f for f in rows}
        if not at_once and (by[ALL].distance or by[DOTS].distance):
            build(folder)
        if by[DOTS].distance:
            padded = paddings(
                folder, lambda text: Origins.of(text, program.text).name, placed=not exact
            )
            rows = figures(predicted, compiled, plan, target, exact, memory, tolerance, padded)
        rows, lines = explain(rows, predicted, compiled.text, plan, program, exact, folder, padded)
        lines = (*lines, *of_memory(predicted, compiled, by, program, memory))
        return Outcome(rows, lines, compiled, predicted)


def of_memory(
    predicted: Predicted,
    compiled: Compiled,
    by: Mapping[str, Figure],
    program: Program,
    memory: Mapping[str, int],
) -> tuple[str, ...]:
    """A line per argument, value and moment behind a difference of memory. memory: as in
    `figures`."""
    lines = [*differences.of_arguments(compiled.text, compiled.assignment)]
    if by["temporaries"].distance:
        lines += differences.of_memory(
            compiled.text, program.text, compiled.assignment, *_temporaries(predicted, memory)
        )
        lines += differences.of_temporaries(compiled.text, program.text, compiled.assignment)
    return tuple(lines)
