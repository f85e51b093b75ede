"""The Python interface: plan, emit, and the shared opening of models and machines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.cache.folder import Cache
from planner.emit.from_strategy import computed_in
from planner.errors import NO_PLAN, PlanError
from planner.search.build_request import (
    DEFAULT_PRECISION,
    DEFAULT_RUNTIME,
    asked,
    assumptions,
    make_request,
    refuse_tables,
    refuse_unsupported,
)
from planner.strategy.strategy import PRINTERS, Strategy
from planner.support.gc_pause import seldom_collecting
from planner.whatif.no_plan import no_plan
from planner.workload.open import open_model


def _in_words(strategy: Strategy) -> str:
    from planner.report.summary import summary

    return summary(strategy)


PRINTERS.append(_in_words)


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
    confirm: str = "",
) -> Strategy:
    """Search for the best way to spread a model over a machine.

    source: an ONNX file, `zoo:SPEC`, a Hugging Face config.json, or an onnx ModelProto. Exactly one
    of hardware (with devices) and topology describes the machine. remedies: where nothing fits,
    plan what would help and say it in the error. cache: a folder where searches are kept and
    recalled from (planner.cache.folder); it changes no answer. incremental: where the cache has the
    search of a model like this one, decide anew only what changed (planner.search.incremental);
    other plans are then not looked at. backend: of the program that is to be written; what such a
    program cannot do is refused before the search, and not chosen. confirm: gpu:NAME or tpu:SLICE,
    whose compiler is asked in a process of its own whether the best plans fit
    (planner.verify.confirm); the source is then a file or a zoo model. Returns a Strategy. Raises
    PlanError: exit_code 2 for bad input, 3 when no plan fits. Never imports jax.
    """
    from planner.search.search import Search
    from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION, compose

    started = time.monotonic()
    annotated = pins == "annotated"
    request = make_request(
        devices=devices,
        hardware=hardware,
        topology=topology,
        workload=workload,
        mode="auto" if annotated and mode == "semi-auto" else mode,
        solver=solver,
        pins=None if annotated else pins,
        objective=objective,
        memory_limit_bytes=memory_limit_bytes,
        memory_reserve_bytes=memory_reserve_bytes,
        runtime=runtime,
        optimizer=optimizer,
        precision=precision,
        time_limit_s=time_limit_s,
        seed=seed,
        fold=fold,
        baselines=baselines,
        cache=cache,
        incremental=incremental,
        backend=backend,
    )
    target = target_of(confirm, source, request) if confirm else None
    model = open_model(
        source,
        request.topology.devices,
        workload=workload,
        batch=batch,
        tokens_per_step=tokens_per_step,
        dims=dims,
        shapes=shapes,
        loss=loss,
        logits=logits,
        shift_labels=shift_labels,
        ignore_index=ignore_index,
        trainable=trainable,
        freeze=freeze,
        tie=tie,
        lora=lora,
        optimizer=optimizer,
        lr=lr,
        tables=tables,
    )
    refuse_tables(request.offload, tables)
    if backend:
        from planner.emit.program import check_kernels

        check_kernels(model.graph(1))
    model.graph(1)
    if annotated:
        request = replace(request, pins=annotated_pins(model))
    read = time.monotonic()
    search, before = (
        Search(model, request, progress),
        (request.cache.priced if request.cache is not None else (0, 0)),
    )
    if strict:
        refuse_unsupported(search.base(1))
    found = search.run()
    searched = time.monotonic()
    if found.best is None:
        if found.stopped:
            raise PlanError(
                "P026",
                "the search was stopped before any plan fitted",
                help=["--time-limit with more seconds"],
                exit_code=NO_PLAN,
            )
        raise no_plan(request, found, model if remedies else None)
    if request.baselines and not found.stopped and found.reused_from is None:
        from planner.whatif.remedies import elsewhere

        found.baselines.update(elsewhere(request, model))
    if not found.stopped and found.reused_from is None and time_limit_s is None:
        from planner.search.plausible import ragged

        found.findings = ragged(request, found, model)
    provenance = {
        "tool": TOOL_VERSION,
        "cost_model": COST_MODEL_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": str(source if isinstance(source, str | Path) else model.name),
        "read_s": round(read - started, 3),
        "search_s": round(searched - read, 3),
    }
    if request.cache is not None and request.cache.priced != before:
        provenance["tables"] = {
            what: n - m
            for what, n, m in zip(("asked", "recalled"), request.cache.priced, before, strict=True)
        }
    if request.cache is not None and request.cache.faults.told:
        provenance["cache_faults"] = list(request.cache.faults.told)
    if found.reused_from is not None:
        provenance["incremental"] = found.reused_from.to_json()
    provenance |= asked(request, objective, mode)
    taken = assumptions(model, request, hardware, topology)
    made = compose(model, request, found, provenance, taken)
    if target is None or found.stopped:
        return made
    from planner.verify.confirm import confirmed

    def smaller(most_bytes: int) -> Strategy | None:
        if most_bytes <= 0:
            return None
        again = Search(model, replace(request, memory_limit_bytes=most_bytes), progress).run(
            how_close=False
        )
        if again.stopped == "interrupt":
            raise KeyboardInterrupt
        if again.best is None:
            return None
        # The first search's alternatives, and what it proved, are of all plans.
        again = replace(
            found,
            best=again.best,
            base=again.base,
            space=again.space,
            choice=again.choice,
            problem=again.problem,
            tried=found.tried + again.tried,
        )
        return compose(model, request, again, provenance, taken)

    return confirmed(
        made,
        smaller,
        source,
        target,
        backend=backend or "shard_map",
        tell=lambda said: progress(said, made.cost.step_time_s, None) if progress else None,
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
    computed_in(request.recipe.name)
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
