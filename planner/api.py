"""The Python interface: plan, emit, and the shared opening of models and machines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cache.folder import Cache
from planner.errors import NO_PLAN, PlanError
from planner.search.anchor import assumed, read_anchor
from planner.search.build_request import (
    asked,
    assumptions,
    build_request,
    emitted_recipe,
    make_request,
    own_pins,
    refuse_tables,
    refuse_unsupported,
)
from planner.search.options import (
    DEFAULT_PRECISION,
    DEFAULT_RUNTIME,
    MachineOptions,
    SearchOptions,
    StepOptions,
)
from planner.strategy.strategy import PRINTERS, Strategy
from planner.support.gc_pause import seldom_collecting
from planner.whatif.no_plan import no_plan
from planner.workload.open import open_model

if TYPE_CHECKING:
    from planner.search.request import Request, SearchResult
    from planner.workload.model import Model

__all__ = ["AnswerOptions", "assumptions", "make_request", "open_model", "plan", "target_of"]


def _in_words(strategy: Strategy) -> str:
    from planner.report.summary import summary

    return summary(strategy)


PRINTERS.append(_in_words)


# Long: most of it is the public list of options.
# Many parameters: the public list of options; behind it they are records.
@seldom_collecting()
def plan(
    source: Any,
    *,
    devices: int | None = None,
    hardware: str | None = None,
    topology: str | Path | None = None,
    workload: str = "train",
    batch: int | None = None,
    tokens_per_step: int | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    mode: str = "auto",
    solver: str = "auto",
    pins: Any = None,
    objective: str = "step",
    memory_limit_bytes: int | None = None,
    memory_reserve_bytes: int | None = None,
    calibrate_with: str = "",
    runtime: str = DEFAULT_RUNTIME,
    optimizer: str = "adamw",
    lr: float = 1e-4,
    precision: str = DEFAULT_PRECISION,
    loss: str = "",
    logits: str = "",
    shift_labels: bool = False,
    ignore_index: int | None = None,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    tie: Sequence[str] = (),
    lora: str = "",
    tables: str = "device",
    imbalance: str | float | None = None,
    capacity: float | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    fold: bool = True,
    baselines: bool = True,
    strict: bool = False,
    progress: Any = None,
    remedies: bool = True,
    cache: Cache | str | Path | None = None,
    incremental: bool = False,
    backend: str = "",
    launcher: str = "",
    confirm: str = "",
) -> Strategy:
    """Search for the best way to spread a model over a machine.

    source: an ONNX file, `zoo:SPEC`, a Hugging Face config.json, or an onnx ModelProto. Exactly one
    of hardware (with devices) and topology describes the machine. pins: a TOML file, the short form
    (tp=8,micro=2), or a dict of such a file's tables. remedies: where nothing fits, plan what would
    help and say it in the error. cache: a folder where searches are kept and
    recalled from (planner.cache.folder); it changes no answer. incremental: where the cache has the
    search of a model like this one, decide anew only what changed (planner.search.incremental);
    other plans are then not looked at. backend: of the program that is to be written; what such a
    program cannot do is refused before the search, and not chosen. launcher: megatron, maxtext,
    torchtitan or hf, whose own settings can say the plan, priced as its programs run. confirm:
    gpu:NAME or tpu:SLICE, whose compiler is asked in a process of its own whether the best plans
    fit (planner.verify.confirm); the source is then a file or a zoo model. calibrate_with:
    PLAN=STEP, a strategy file and a measured step of it that prices are scaled to
    (planner.search.anchor).
    Returns a Strategy. Raises PlanError: exit_code 2 for bad input, 3 when no plan fits. Never
    imports jax.
    """
    machine = MachineOptions(
        devices, hardware, topology, memory_limit_bytes, memory_reserve_bytes, calibrate_with
    )
    step = StepOptions(workload, optimizer, precision, runtime, backend, launcher)
    search = SearchOptions(
        mode=mode,
        solver=solver,
        pins=pins,
        objective=objective,
        time_limit_s=time_limit_s,
        seed=seed,
        fold=fold,
        baselines=baselines,
        cache=cache,
        incremental=incremental,
    )
    what = {
        "workload": workload,
        "batch": batch,
        "tokens_per_step": tokens_per_step,
        "dims": dims,
        "shapes": shapes,
        "loss": loss,
        "logits": logits,
        "shift_labels": shift_labels,
        "ignore_index": ignore_index,
        "trainable": trainable,
        "freeze": freeze,
        "tie": tie,
        "lora": lora,
        "optimizer": optimizer,
        "lr": lr,
        "tables": tables,
        "imbalance": imbalance,
        "capacity": capacity,
    }
    return _plan(
        source, machine, step, search, what, AnswerOptions(strict, remedies, confirm, progress)
    )


@dataclass(frozen=True)
class AnswerOptions:
    """What is asked of an answer. strict: operators without a rule are an error; remedies: where
    nothing fits, plan what would help; confirm: the target whose compiler is asked; progress: told
    how a search goes (planner.search.request.Progress)."""

    strict: bool
    remedies: bool
    confirm: str
    progress: Any


def _plan(
    source: Any,
    machine: MachineOptions,
    step: StepOptions,
    search: SearchOptions,
    workload: Mapping[str, Any],
    answer: AnswerOptions,
) -> Strategy:
    """`plan` of records. workload: keywords of planner.workload.open.workload_of."""
    from planner.search.never_fits import refuse_never_fitting
    from planner.search.search import Search
    from planner.search.to_strategy import compose
    from planner.whatif.islands import searched

    clock = [time.monotonic()]
    request = build_request(machine, step, _without_annotations(search))
    target = target_of(answer.confirm, source, request) if answer.confirm else None
    model = open_model(source, request.topology.devices, **workload)
    refuse_tables(request.offload, model.workload.tables)
    if step.backend:
        from planner.emit.program import check_kernels

        check_kernels(model.graph(1))
    model.graph(1)
    if search.pins == "annotated":
        request = replace(request, pins=annotated_pins(model))
    clock.append(time.monotonic())
    priced_before = request.cache.priced if request.cache is not None else (0, 0)
    if answer.strict:
        refuse_unsupported(Search(model, request).base(1))
    refuse_never_fitting(model, request)
    request, result = searched(model, request, answer.progress)
    clock.append(time.monotonic())
    _complete(result, request, model, answer)
    provenance = _provenance(source, model, request, result, clock, priced_before) | asked(
        own_pins(search) if request.launcher else request.pins,
        step.launcher,
        search.objective,
        search.mode,
    )
    taken = assumptions(model, request, machine.hardware, machine.topology)
    if machine.calibrate_with:
        taken = (assumed(read_anchor(machine.calibrate_with), model.name), *taken)
    best = compose(model, request, result, provenance, taken)
    if target is None or result.stopped:
        return best
    from planner.verify.confirm import confirmed

    def smaller(most_bytes: int) -> Strategy | None:
        """The best plan within fewer bytes, None where there is none."""
        other = _within(most_bytes, model, request, result, answer.progress)
        return None if other is None else compose(model, request, other, provenance, taken)

    def tell(line: str) -> None:
        """Progress beside the step that stands."""
        if answer.progress:
            answer.progress(line, best.cost.step_time_s, None)

    return confirmed(best, smaller, source, target, backend=step.backend or "shard_map", tell=tell)


def _without_annotations(search: SearchOptions) -> SearchOptions:
    """The options of a search whose pins, where they are the model's own annotations, come later:
    with the model."""
    if search.pins != "annotated":
        return search
    return replace(search, pins=None, mode="auto" if search.mode == "semi-auto" else search.mode)


def _complete(result: SearchResult, request: Request, model: Model, answer: AnswerOptions) -> None:
    """Add to a search's result the baselines of other layouts and what is found of the machine.
    Raises PlanError P021, P026 where it found no plan."""
    if result.best is None:
        if result.stopped:
            raise PlanError(
                "P026",
                "the search was stopped before any plan fitted",
                help=["--time-limit with more seconds"],
                exit_code=NO_PLAN,
            )
        raise no_plan(request, result, model if answer.remedies else None)
    if result.stopped or result.reused_from is not None:
        return
    if request.baselines:
        from planner.whatif.remedies import elsewhere

        result.baselines.update(elsewhere(request, model))
    if request.time_limit_s is None:
        from planner.search.plausible import ragged

        result.findings = (*result.findings, *ragged(request, result, model))


def _provenance(
    source: Any,
    model: Model,
    request: Request,
    result: SearchResult,
    clock: Sequence[float],
    priced_before: tuple[int, int],
) -> dict[str, Any]:
    """Where a plan comes from. clock: seconds at the start, when the model was read, when the
    search was over; priced_before: tables of prices that the cache was asked for and had."""
    from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION

    started, read, searched = clock
    provenance: dict[str, Any] = {
        "tool": TOOL_VERSION,
        "cost_model": COST_MODEL_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": str(source if isinstance(source, str | Path) else model.name),
        "read_s": round(read - started, 3),
        "search_s": round(searched - read, 3),
    }
    if request.cache is not None and request.cache.priced != priced_before:
        counts = zip(("asked", "recalled"), request.cache.priced, priced_before, strict=True)
        provenance["tables"] = {what: n - m for what, n, m in counts}
    if request.cache is not None and request.cache.faults.messages:
        provenance["cache_faults"] = list(request.cache.faults.messages)
    if result.reused_from is not None:
        provenance["incremental"] = result.reused_from.to_json()
    return provenance


def _within(
    most_bytes: int, model: Model, request: Request, result: SearchResult, progress: Any
) -> SearchResult | None:
    """A search's result with the best plan of at most so many bytes a device, None where there is
    none. The first search's alternatives, and what it proved, are of all plans and stay."""
    from planner.search.search import Search

    if most_bytes <= 0:
        return None
    smaller = replace(request, memory_limit_bytes=most_bytes)
    other = Search(model, smaller, progress).run(how_close=False)
    if other.stopped == "interrupt":
        raise KeyboardInterrupt
    if other.best is None:
        return None
    return replace(
        result,
        best=other.best,
        base=other.base,
        space=other.space,
        choice=other.choice,
        problem=other.problem,
        tried=result.tried + other.tried,
    )


def target_of(confirm: str, source: Any, request: Any) -> Any:
    """The target that plans are compiled for before one is taken. Raises PlanError P003, P077, P163
    to P165."""
    from planner.verify.confirm import target_of

    if not isinstance(source, str | Path):
        raise PlanError(
            "P003",
            "confirm compiles in a process of its own, which reads the model from a file",
            help=["save the model, and give its path"],
        )
    emitted_recipe(request.recipe.name)
    return target_of(
        confirm,
        request.topology.devices,
        request.topology.device.kind,
        request.topology.device.name,
    )


def annotated_pins(model: Any) -> Any:
    """What the model's own multi-device annotations fix (planner.interop.onnx_annotations.read).
    Raises PlanError P193."""
    from planner.analysis.facts import GraphFacts
    from planner.interop.onnx_annotations.read import pins_of

    return pins_of(
        model.proto, GraphFacts.of(model.graph(1), training=model.workload.kind == "train")
    )
