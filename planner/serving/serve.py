"""`planner.serve`: from a model and a machine to a serving plan; and from a plan back to its phases
and its program."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.search.build_request import assumptions, build_request
from planner.search.options import (
    DEFAULT_PRECISION,
    DEFAULT_RUNTIME,
    MachineOptions,
    SearchOptions,
    StepOptions,
)
from planner.serving.result import OBJECTIVES, Service, Serving
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.workload.open import open_model

QUANTIZE = ("none", "int8")
"""As the precision keeps them, or the products' as int8 with a scale for each column."""


# Long: its list of options and the record that it fills take two thirds of it.
# Many parameters: the public list of options; behind it they are records.
def serve(
    source: Any,
    *,
    prompt: int,
    generate: int,
    concurrency: int,
    objective: str = "throughput",
    quantize: str = "none",
    prefill_tokens: int | None = None,
    devices: int | None = None,
    hardware: str | None = None,
    topology: str | Path | None = None,
    dims: Mapping[str, int] | None = None,
    memory_limit_bytes: int | None = None,
    memory_reserve_bytes: int | None = None,
    precision: str | None = None,
    runtime: str | None = None,
    solver: str = "auto",
    seed: int = 0,
    progress: Any = None,
    cache: Cache | str | Path | None = None,
) -> Serving:
    """Plan how to serve a decoder that was exported with a cache: `concurrency` prompts of `prompt`
    tokens at once, `generate` tokens for each.

    objective: throughput (tokens a second over prompts and generation), ttft (seconds to the first
    tokens) or tpot (seconds a token after them). quantize: of QUANTIZE. prefill_tokens: tokens of
    prompts that a replica passes at once (8192; at least one prompt). Machine, cache and the rest
    as of `planner.plan`. Raises PlanError: P220, P221 where the model has no cache that is
    understood, P021 where nothing fits.
    """
    from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION, compose
    from planner.serving.joint import PREFILL_TOKENS, Joint
    from planner.serving.phases import PhaseModel

    begun = time.monotonic()
    choose("objective", objective, OBJECTIVES)
    choose("quantize", quantize, QUANTIZE)
    machine = MachineOptions(devices, hardware, topology, memory_limit_bytes, memory_reserve_bytes)
    step = StepOptions(
        workload="infer",
        precision=precision or DEFAULT_PRECISION,
        runtime=runtime or DEFAULT_RUNTIME,
    )
    search = SearchOptions(solver=solver, seed=seed, baselines=False, cache=cache)
    request = build_request(machine, step, search)
    model = open_model(source, request.topology.devices, workload="infer", dims=dims)
    service = Service(prompt, generate, concurrency, quantize)
    prompts, step_phase = (PhaseModel.of(model, phase, service) for phase in ("prompts", "step"))
    joint = Joint(
        prompts, step_phase, request, progress, prefill_tokens=prefill_tokens or PREFILL_TOKENS
    )
    best, priced, gap = joint.run(objective)
    provenance = {
        "tool": TOOL_VERSION,
        "cost_model": COST_MODEL_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": str(source if isinstance(source, str | Path) else model.name),
        "search_s": round(time.monotonic() - begun, 3),
    }
    taken = assumptions(_batch_given(step_phase), request, hardware, topology)
    first, each = (
        compose(phase, request, found, provenance, taken)
        for phase, found in ((joint.prompts(best.replicas), best.prompts), (step_phase, best.step))
    )
    front = joint.front(priced)
    return Serving(
        service={
            "prompt": prompt,
            "generate": generate,
            "concurrency": concurrency,
            "objective": objective,
            "quantize": quantize,
            "label": best.label,
            "most_sequences": joint.most_sequences(best),
            "gap": gap,
            "memory_limit_bytes": request.limit_bytes,
            "solves": len(joint.solved),
        },
        figures=best.figures(),
        rows=tuple(
            {"label": p.label, "front": p in front, "chosen": p is best, **p.figures()}
            for p in priced
        ),
        prompts=first,
        step=each,
        provenance=provenance,
    )


def _batch_given(phase: Any) -> Any:
    """The phase with its batch among what the user said, so that it is not listed as assumed."""
    return replace(phase, workload=replace(phase.workload, batch=phase.service.concurrency))


def program(serving: Serving, source: str | Path, *, weights_file: str = "") -> Any:
    """The emitted program (text and constants) of a serving plan. Raises PlanError P051 when the
    model is another one, P224 for what is only priced."""
    from planner.search.build_request import _gpu_memory, emitted_recipe
    from planner.serving.program import Phased, emit_serving

    def phased(model: Any, strategy: Strategy) -> Phased:
        if model.sha256() != strategy.model["sha256"]:
            raise PlanError(
                "P051",
                f"{source} is not the model this plan was made for (its graph has changed)",
                help=["plan again"],
            )
        graph = model.graph(1)
        return Phased(graph, strategy.plan_for(graph))

    compute = emitted_recipe(str(serving.step.workload["precision"])).compute
    prompts, step = reopened(serving, source)
    return emit_serving(
        phased(prompts, serving.prompts),
        phased(step, serving.step),
        step.form,
        serving.shape,
        header=_header(serving),
        weights_file=weights_file,
        compute=compute,
        gpu_memory=_gpu_memory(serving.step),
    )


def reopened(serving: Serving, source: str | Path, quantized: bool = True) -> list[Any]:
    """The phases of a plan's model; quantized: with the plan's weights, else with the model's
    own."""
    from planner.serving.phases import PhaseModel

    model = open_model(
        source,
        serving.step.topology["devices"],
        workload="infer",
        dims=serving.step.workload["dims"],
    )
    service = serving.shape if quantized else replace(serving.shape, quantize="none")
    return [PhaseModel.of(model, phase, service) for phase in ("prompts", "step")]


def _header(serving: Serving) -> str:
    s, f = serving.service, serving.figures
    name, devices = serving.step.model["name"], serving.step.topology["devices"]
    return "\n".join(
        [
            (
                f"{name[:60]} on {devices} devices, {f['replicas']} replicas of {f['split']}: a"
                " serving program emitted by meshwright."
            ),
            (
                f"{s['concurrency']} sequences of {s['prompt']} + {s['generate']} tokens, prompts"
                f" of {f['wave']} at once; quantized: {s['quantize']}."
            ),
            "",
            f"    python PROGRAM.py --virtual-devices {devices} --steps 2",
            "    python PROGRAM.py --prompts ids.npy --output tokens.npy",
            "",
            (
                "prefill(weights, caches, ids, real, wave) gives the first tokens of a wave of"
                " prompts, generate(weights, caches, ...) the rest; caches are updated in place."
            ),
            (
                "Comments behind statements name the node and the layout of its result: [b/data, n]"
                " is cut over axis data along b; partial: a sum not yet taken."
            ),
        ]
    )
