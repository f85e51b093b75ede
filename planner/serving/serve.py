"""`planner.serve`: from a model and a machine to a serving plan; and from a plan back to its phases
and its program."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from planner.serving.lengths import Lengths
from planner.serving.result import OBJECTIVES, Service, Serving
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.workload.open import open_model

if TYPE_CHECKING:
    from planner.search.request import Request
    from planner.serving.joint import Joint, Priced
    from planner.serving.traffic import Traffic

QUANTIZE = ("none", "int8")
"""As the precision keeps them, or the products' as int8 with a scale for each column."""


# Long: its list of options and what it says of them take two thirds of it.
# Many parameters: the public list of options; behind it they are records.
def serve(
    source: Any,
    *,
    prompt: int | str = 1,
    generate: int | str = 1,
    concurrency: int | None = None,
    rate: float | str | Path | None = None,
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
    tokens at once, `generate` tokens for each; or requests that arrive (`rate`).

    rate: requests a second, or the file of a trace, which says the lengths too; prompt and generate
    may then be distributions (planner.serving.lengths), and concurrency, the sequences at once at
    most, may be left out. objective: throughput (tokens a second over prompts and generation; with
    a rate, requests a second at most), ttft (seconds to the first tokens) or tpot (seconds a token
    after them; with a rate, of 99 requests in a hundred). quantize: of QUANTIZE. prefill_tokens:
    tokens of prompts that a replica passes at once (8192; at least one prompt), with a rate tokens
    of a step. Machine, cache and the rest as of `planner.plan`. Raises PlanError: P220, P221 where
    the model has no cache that is understood, P226 for lengths and traces that are none, P021 where
    nothing fits.
    """
    from planner.serving.joint import PREFILL_TOKENS

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
    asked = Asked(model, request, objective, prefill_tokens or PREFILL_TOKENS, progress)
    if rate is None:
        service = Service(_tokens(prompt), _tokens(generate), concurrency or 1, quantize)
        found = asked.at_once(service)
    else:
        from planner.serving.traffic import Traffic

        traffic = Traffic.of(rate, prompt, generate, seed)
        found = asked.arriving(traffic, concurrency, quantize, seed)
    provenance = {
        "source": str(source if isinstance(source, str | Path) else model.name),
        "search_s": round(time.monotonic() - begun, 3),
    }
    return found.serving(
        asked, assumptions(found.batch_given, request, hardware, topology), provenance
    )


def _tokens(value: int | str) -> int:
    """A number of tokens that is no distribution. Raises PlanError P226."""
    lengths = Lengths.of(value, "prompt")
    if lengths.spread:
        raise PlanError(
            "P226",
            f"{lengths} tokens: sequences that begin together have one length",
            help=["--rate, for requests that arrive, each with its own", f"{lengths.high}"],
        )
    return lengths.low


@dataclass(frozen=True)
class Asked:
    """What is sought: the model, on the request's machine."""

    model: Any
    request: Request
    objective: str
    prefill_tokens: int
    progress: Any

    def joint(self, service: Service) -> Joint:
        """The search for a service."""
        from planner.serving.joint import Joint
        from planner.serving.phases import PhaseModel

        prompts, step = (PhaseModel.of(self.model, phase, service) for phase in ("prompts", "step"))
        return Joint(prompts, step, self.request, self.progress, prefill_tokens=self.prefill_tokens)

    def at_once(self, service: Service) -> Found:
        """The best plan for sequences that begin together."""
        joint = self.joint(service)
        best, priced, gap = joint.run(self.objective)
        front = joint.front(priced)
        rows = tuple(
            {"label": p.label, "front": p in front, "chosen": p is best, **p.figures()}
            for p in priced
        )
        return Found(joint, best, rows, joint.most_sequences(best), gap)

    def arriving(
        self, traffic: Traffic, concurrency: int | None, quantize: str, seed: int
    ) -> Found:
        """The best plan for requests that arrive. Sequences at once: what is said, else as many as
        fit, halved from AT_ONCE."""
        from planner.serving.traffic import AT_ONCE, Loads, told

        devices = self.request.topology.devices
        sequences = concurrency or -(-AT_ONCE // devices) * devices
        while True:
            joint = self.joint(Service(*traffic.mean_lengths, sequences, quantize))
            try:
                priced = joint.priced()
                break
            except PlanError as e:
                if concurrency or e.code != "P021" or sequences // 2 < devices:
                    raise
                sequences = sequences // 2 // devices * devices
        best, loads = Loads(joint, traffic).best(priced, self.objective)
        rows = tuple(
            {
                "label": load.pair.label,
                "front": False,
                "chosen": load is best,
                **load.pair.figures(),
                **load.row(),
            }
            for load in loads
        )
        room = best.limits.cache_tokens // joint.step.service.length * best.pair.replicas
        return Found(joint, best.pair, rows, room, None, told(best, traffic, seed))


@dataclass(frozen=True)
class Found:
    """What a search found. room: sequences that fit; gap: None where nothing is proven; traffic: of
    requests that arrive, what became of them."""

    joint: Joint
    best: Priced
    rows: tuple[Mapping[str, Any], ...]
    room: int
    gap: float | None
    traffic: Mapping[str, Any] | None = None

    @property
    def batch_given(self) -> Any:
        """The phase of steps with its batch among what the user said, so that it is not listed as
        assumed."""
        step = self.joint.step
        return replace(step, workload=replace(step.workload, batch=step.service.concurrency))

    def serving(self, asked: Asked, taken: Any, provenance: Mapping[str, Any]) -> Serving:
        """The plan. taken: what was assumed."""
        from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION, compose

        joint, best, service = self.joint, self.best, self.joint.step.service
        provenance = {
            "tool": TOOL_VERSION,
            "cost_model": COST_MODEL_VERSION,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            **provenance,
        }
        first, each = (
            compose(phase, asked.request, found, provenance, taken)
            for phase, found in (
                (joint.prompts(best.replicas), best.prompts),
                (joint.step, best.step),
            )
        )
        return Serving(
            service={
                "prompt": service.prompt,
                "generate": service.generate,
                "concurrency": service.concurrency,
                "objective": asked.objective,
                "quantize": service.quantize,
                "label": best.label,
                "most_sequences": self.room,
                "gap": self.gap,
                "memory_limit_bytes": asked.request.limit_bytes,
                "solves": len(joint.solved),
            },
            figures=best.figures(),
            rows=self.rows,
            prompts=first,
            step=each,
            traffic=self.traffic,
            provenance=provenance,
        )


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
