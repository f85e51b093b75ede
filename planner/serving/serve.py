"""`planner.serve`: from a model and a machine to a serving plan; and from a plan back to its phases
and its program."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodels.precision import load_recipe, recipe_names
from costmodels.runtimes import ENGINES, load_runtime
from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.machine.group_names import named_groups
from planner.machine.topology import Topology
from planner.machine.tpu_slices import named_slice
from planner.search.build_request import assumptions, build_request
from planner.search.options import (
    DEFAULT_HARDWARE,
    DEFAULT_PRECISION,
    DEFAULT_RUNTIME,
    MachineOptions,
    SearchOptions,
    StepOptions,
)
from planner.serving.asked import Asked, ServingResult, Short, on_devices, on_fewest
from planner.serving.cached import with_cache
from planner.serving.draft import draft_of, refuse_states
from planner.serving.lengths import Lengths
from planner.serving.phases import PhaseModel, readings_of
from planner.serving.pools import Pools, refusal
from planner.serving.readings import PHASES, Readings
from planner.serving.result import OBJECTIVES, Service, Serving, pools_of
from planner.serving.step_prices import spans_of
from planner.serving.targets import Target
from planner.serving.traffic import Traffic
from planner.strategy.strategy import Strategy
from planner.support.choices import choose
from planner.whatif.sweep import device_counts
from planner.workload.model import Model
from planner.workload.open import open_model

FEWEST = "fewest"
CACHE_TYPES = ("compute", "fp8")
"""Of keys and values: as is computed, or float8_e4m3fn."""
QUANTIZE = ("none", "int8")
"""As the precision keeps them, or the products' as int8 with a scale for each column. In fp8 those
of products and experts are float8 with a scale for each column (planner.serving.quantize)."""


# Long: its list of options and what it says of them take two thirds of it.
# Many parameters: the public list of options; behind it they are records.
def serve(
    source: Any,
    *,
    prompt: int | str = 1,
    generate: int | str = 1,
    concurrency: int | None = None,
    rate: float | str | Path | None = None,
    ttft: float | str | None = None,
    tpot: float | str | None = None,
    objective: str = "throughput",
    quantize: str = "none",
    cache_type: str = "compute",
    draft: float | str | None = None,
    engine: str = "",
    prefill_tokens: int | None = None,
    pools: bool = False,
    devices: int | str | None = None,
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
    most, may be left out. ttft, tpot: targets, seconds that 99 requests in a hundred wait at most
    ("p90=500ms" for other parts). devices: with a rate also "fewest", that serve it and meet the
    targets. pools: prompts and generation on devices apart are tried, too. objective: throughput
    (tokens a second over prompts and generation; with a rate, requests a second at most), ttft
    (seconds to the first tokens) or tpot (seconds a token after them; with a rate, of 99 requests
    in a hundred). quantize: of QUANTIZE. cache_type: of CACHE_TYPES. draft: a model that drafts
    tokens, or what its step takes of the model's: from which acceptance on it pays. engine: of
    costmodels.runtimes.ENGINES, what serves in the place of the emitted program. prefill_tokens:
    tokens of prompts that a replica passes at once (8192; at least one prompt), with a rate tokens
    of a step (512, 2048 or 8192, whichever is best). Machine, cache and the rest as of
    `planner.plan`. Raises PlanError: P220, P221 where the model has no cache that is understood,
    P226 for lengths, traces and targets that are none, P021 where nothing fits, P227 where nothing
    serves in time.
    """
    begun = time.monotonic()
    choose("objective", objective, OBJECTIVES)
    choose("quantize", quantize, QUANTIZE)
    choose("cache-type", cache_type, CACHE_TYPES)
    step = StepOptions(
        workload="infer",
        precision=precision or DEFAULT_PRECISION,
        runtime=runtime or DEFAULT_RUNTIME,
    )
    search = SearchOptions(solver=solver, seed=seed, baselines=False, cache=cache)

    quantize = _kept(quantize, step.precision)
    _refuse_runtime(engine, runtime)
    service_options = Service(1, 1, 1, quantize, cache_type=cache_type, engine=engine)
    traffic, counts = None, list[int]()
    if rate is not None:
        wanted = {"ttft": ttft, "tpot": tpot}
        targets = tuple(Target.of(name, w) for name, w in wanted.items() if w is not None)
        traffic = Traffic.of(rate, prompt, generate, seed, targets)
        counts = _counts(hardware, topology) if pools or devices == FEWEST else []

    @lru_cache(maxsize=1)
    def opened() -> tuple[Model, Readings]:
        model = open_model(with_cache(source), 1, workload="infer", dims=dims)
        if draft is not None:
            refuse_states(model)
        spans = spans_of(traffic.longest, traffic.mean_lengths) if traffic else {}
        return model, readings_of(model, service_options, spans)

    def on(count: int | None) -> Asked:
        machine = MachineOptions(
            count, hardware, topology, memory_limit_bytes, memory_reserve_bytes
        )
        request = build_request(machine, step, search)
        if engine:
            request = replace(request, runtime=load_runtime(engine))
        model, readings = opened()
        model = replace(model, devices=request.topology.devices)
        return Asked(model, request, objective, prefill_tokens, progress, service_options, readings)

    def best() -> tuple[ServingResult, Short | None]:
        if traffic is None:
            asked = on(_number(devices))
            service = asked.served(_tokens(prompt), _tokens(generate), concurrency or 1)
            return asked.at_once(service), None
        sequences_a_device = (
            concurrency / devices if concurrency and isinstance(devices, int) else 0
        )
        apart = Pools(on, counts, sequences_a_device) if pools else None

        def ask(count: int | None) -> ServingResult:
            asked = on(count)
            _refuse_kinds(asked.request.topology)
            return asked.arriving(traffic, concurrency, seed, apart)

        if devices == FEWEST:
            return on_fewest(ask, counts, traffic)
        return on_devices(ask, _number(devices), traffic), None

    drafts = None if draft is None else draft_of(draft)
    result, fewer = best()
    if not result.as_read():  # then all is read
        opened()[1].derives = False
        result, fewer = best()
    provenance = {
        "source": str(source if isinstance(source, str | Path) else result.asked.model.name),
        "search_s": round(time.monotonic() - begun, 3),
    }
    taken = assumptions(result.batch_given, result.asked.request, hardware, topology)
    return result.serving(taken, provenance, fewer, drafts)


def _kept(quantize: str, precision: str) -> str:
    """How weights of products are kept: as is asked, or in float8 where that is what they are
    multiplied in. Raises PlanError P024 where both are asked for."""
    choose("precision", precision, recipe_names())
    recipe = load_recipe(precision)
    if recipe.compute == recipe.between:
        return quantize
    if quantize != "none":
        raise PlanError(
            "P024",
            f"--quantize {quantize} and --precision {precision} contradict each other: both say"
            " how weights of products are kept",
            help=[f"--precision {precision} alone", f"--quantize {quantize} alone"],
        )
    return "fp8"


def _refuse_runtime(engine: str, runtime: str | None) -> None:
    """Raises PlanError P024 for a runtime beside an engine, and for an engine that is not known."""
    if not engine:
        return
    choose("for", engine, ENGINES)
    if runtime not in (None, DEFAULT_RUNTIME):
        raise PlanError(
            "P024",
            f"--runtime {runtime} and --for {engine} contradict each other: both say whose work is"
            " priced",
            help=["leave --runtime out"],
        )


def _refuse_kinds(topology: Topology) -> None:
    """Raises PlanError P222 for several kinds of device: in one plan the fast ones would wait for
    the slow, where replicas that requests go to have nothing to wait for."""
    if topology.groups:
        by_kind = " and ".join(f"--hardware {d.name} --devices {n}" for d, n in topology.groups)
        raise PlanError(
            "P222",
            "replicas on several kinds of device do not wait for one another, and are planned one"
            " kind at a time",
            help=[f"{by_kind}: each kind serves its part of the --rate"],
        )


def _counts(hardware: str | None, topology: str | Path | None) -> list[int]:
    """Numbers of devices that hardware comes in. Raises PlanError P222 where one is given."""
    name = hardware or DEFAULT_HARDWARE
    if topology or named_slice(name)[1] or named_groups(name):
        raise PlanError(
            "P222",
            f"{topology or name} is so many devices, and other numbers are asked for",
            help=["--hardware NAME, a device that comes in several numbers"],
        )
    return device_counts(name)


def _number(devices: int | str | None) -> int | None:
    """A number of devices. Raises PlanError P222 for the fewest where there is no rate."""
    if isinstance(devices, str):
        raise PlanError(
            "P222",
            "the fewest devices are sought for a rate, and there is none",
            help=["--rate 8, with --ttft 500ms or --tpot 40ms"],
        )
    return devices


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


def program(
    serving: Serving, source: str | Path, *, weights_file: str = "", model_folder: str = "."
) -> Any:
    """The emitted program (text and constants) of a serving plan. weights_file, model_folder: as
    for `planner.emit.program.emit`. Raises PlanError P051 when the model is another one, P224 for
    what is only priced."""
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

    if pools := pools_of(serving):
        raise refusal(pools)
    if engine := serving.shape.engine:
        raise PlanError(
            "P224",
            f"this plan is for {engine}, and no program is written of it",
            help=[f"plan export --to {engine}", "plan again without --for"],
        )
    compute = emitted_recipe(str(serving.step.workload["precision"])).compute
    prompts, step = reopened(serving, source)
    return emit_serving(
        phased(prompts, serving.prompts),
        phased(step, serving.step),
        step.form,
        serving.shape,
        header=_header(serving),
        weights_file=weights_file,
        model_folder=model_folder,
        compute=compute,
        gpu_memory=_gpu_memory(serving.step),
    )


def reopened(serving: Serving, source: str | Path, quantized: bool = True) -> list[Any]:
    """The phases of a plan's model; quantized: with the plan's weights, else with the model's
    own."""
    model = open_model(
        with_cache(source),
        serving.step.topology["devices"],
        workload="infer",
        dims=serving.step.workload["dims"],
    )
    service = serving.shape if quantized else replace(serving.shape, quantize="none")
    return [PhaseModel.of(model, phase, service) for phase in PHASES]


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
