"""What is asked of a machine, and what was found: a plan for sequences that begin together, or for
requests that arrive, on so many devices or on the fewest that serve them in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from planner.errors import NO_PLAN, PlanError
from planner.search.request import Request, SearchResult
from planner.search.to_strategy import COST_MODEL_VERSION, TOOL_VERSION, compose
from planner.serving.cached import with_cache
from planner.serving.continuous import Limits
from planner.serving.draft import figures, refuse_states, step_s
from planner.serving.joint import PREFILL_TOKENS, Joint, Priced
from planner.serving.outcome import Outcome
from planner.serving.phases import PhaseModel, readings_of
from planner.serving.pools import Apart, Pools
from planner.serving.readings import PHASES, Readings
from planner.serving.result import Service, Serving, replicas_words
from planner.serving.room import most_sequences
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices
from planner.serving.traffic import AT_ONCE, STEP_TOKENS, Loads, Traffic, figures_of, told
from planner.workload.open import open_model

ENOUGH = 0.05
"""Where twice the devices serve the rate and miss a target by hardly less, no number will do."""


@dataclass(frozen=True)
class Asked:
    """What is sought: the model, on the request's machine."""

    model: Any
    request: Request
    objective: str
    prefill_tokens: int | None
    progress: Any
    kept: Service
    """How weights and caches are kept; its sizes say nothing."""
    readings: Readings
    """Of the model, kept so."""

    def served(self, prompt: int, generate: int, concurrency: int) -> Service:
        """So many sequences of these lengths, kept as is asked."""
        return replace(self.kept, prompt=prompt, generate=generate, concurrency=concurrency)

    def joint(self, service: Service) -> Joint:
        """The search for a service."""
        tokens = self.prefill_tokens or PREFILL_TOKENS
        prompts, step = (
            PhaseModel.of(self.model, phase, service, self.readings) for phase in PHASES
        )
        return Joint(prompts, step, self.request, self.progress, prefill_tokens=tokens)

    def at_once(self, service: Service) -> ServingResult:
        """The best plan for sequences that begin together."""
        joint = self.joint(service)
        best, priced, gap = joint.run(self.objective)
        front = joint.front(priced)
        rows = tuple(
            {"label": p.label, "front": p in front, "chosen": p is best, **p.figures()}
            for p in priced
        )
        # Bounds know nothing of halves that take turns.
        proven = None if self.request.runtime.serves else gap
        return ServingResult(self, joint, best, rows, most_sequences(joint, best), proven)

    def arriving(
        self, traffic: Traffic, concurrency: int | None, seed: int, pools: Pools | None = None
    ) -> ServingResult:
        """The best plan for requests that arrive. Sequences at once: what is said, else as many as
        fit, halved from AT_ONCE a device. pools: replicas of which one phase's are on devices
        apart are tried, too."""
        devices = self.request.topology.devices
        sequences = concurrency or AT_ONCE * devices
        if not concurrency:
            most = self.joint(self.served(*traffic.mean_lengths, sequences))
            while sequences > devices and most.overfull(sequences):
                sequences //= 2
        while True:
            joint = self.joint(self.served(*traffic.mean_lengths, sequences))
            if priced := joint.fitting():
                break
            if concurrency or sequences == devices:
                joint = self.joint(joint.step.service)
                priced = joint.priced()  # says what does not fit
                break
            sequences //= 2
        steps = (self.prefill_tokens,) if self.prefill_tokens else STEP_TOKENS
        best, loads = Loads(joint, traffic, self.objective, steps).best(priced)
        every = pools.best(self.request.topology, traffic, self.objective) if pools else []
        order = self.objective, traffic.targets
        apart = min(every, key=lambda a: a.outcome.key(*order), default=None)
        taken = apart is not None and apart.outcome.key(*order) < best.outcome.key(*order)
        rows = tuple(
            {
                "label": load.pair.label,
                "front": False,
                "chosen": load is best and not taken,
                **load.pair.figures(),
                **load.outcome.row(),
            }
            for load in loads
        )
        for a in every:
            row = {"label": a.label, "front": False, "chosen": taken and a is apart}
            rows = (*rows, {**row, **a.figures(), **a.outcome.row()})
        length = joint.step.service.length
        if apart and taken:
            figures = {**told(apart.outcome, traffic, seed), **apart.said()}
            room = _sequences(apart.decode.limits, length, bool(apart.decode.state_bytes))
            room *= apart.replicas[1]
            return ServingResult(self, joint, apart, rows, room, None, figures, apart.outcome)
        figures = {**told(best.outcome, traffic, seed), **figures_of(best.courses, best.limits)}
        room = _sequences(best.limits, length, bool(best.pair.state_bytes)) * best.pair.replicas
        return ServingResult(self, joint, best.pair, rows, room, None, figures, best.outcome)


def _sequences(limits: Limits, length: int, states: bool) -> int:
    """Sequences of so many tokens that a replica has room for; states: of which there are as many
    as sequences are let in."""
    room = int(limits.cache_tokens / limits.kept(np.array(length)))
    return min(room, limits.sequences) if states else room


@dataclass(frozen=True)
class ServingResult:
    """The plan that serves best, and the search behind it. room: sequences that fit; gap: None
    where nothing is proven; traffic: of requests that arrive, what became of them."""

    asked: Asked
    joint: Joint
    best: Priced | Apart
    rows: tuple[Mapping[str, Any], ...]
    room: int
    gap: float | None
    traffic: Mapping[str, Any] | None = None
    outcome: Outcome | None = None

    @property
    def batch_given(self) -> Any:
        """The phase of steps with its batch among what the user said, so that it is not listed as
        assumed."""
        step = self.joint.step
        return replace(step, workload=replace(step.workload, batch=step.service.concurrency))

    @property
    def words(self) -> str:
        """The replicas of the plan, in words."""
        if isinstance(self.best, Apart):
            return f"the nearest: {self.best.words} devices"
        return f"the nearest: {replicas_words(self.best.replicas, self.best.split)}"

    def _phases(self) -> list[tuple[PhaseModel, Request, SearchResult]]:
        """(model, machine, plan) of the prompts and of a step; of pools, of a replica of each."""
        joint, best, request = self.joint, self.best, self.asked.request
        if isinstance(best, Apart):
            p, d = best.prefill, best.decode
            return [
                (p.joint.prompts(1), p.asked.request, p.result),
                (d.joint.step, d.asked.request, d.result),
            ]
        return [
            (joint.prompts(best.replicas), request, best.prompts),
            (joint.step, request, best.step),
        ]

    def as_read(self) -> bool:
        """Whether both phases are what is read at their own sizes."""
        return all(model.as_read() for model, _, _ in self._phases())

    def drafted(self, draft: str | float) -> Mapping[str, Any]:
        """From which acceptance on a draft pays beside the plan's steps: of as many sequences as
        generate at a time, halfway. Raises PlanError P226."""
        best, joint, asked = self.best, self.joint, self.asked
        if isinstance(best, Apart):
            joint, mesh, prices = best.decode.joint, (1, best.decode.split), best.decode.prices
        else:
            longest = joint.step.service.length
            mesh = (best.replicas, best.split)
            prices = PlanPrices.of(Sizes(joint, longest, joint.step.service.prompt), best)
        service = joint.step.service
        sequences = service.concurrency // mesh[0]
        if self.traffic is not None:
            sequences = max(1, round(self.traffic["generating"]))
        length = service.prompt + service.generate // 2
        base_s, key_s = prices.decode(sequences)
        seconds = base_s + key_s * sequences * length
        if isinstance(draft, str):
            model = open_model(with_cache(draft), joint.devices, workload="infer", dims=None)
            refuse_states(model)
            readings = readings_of(model, asked.kept)
            other = replace(asked, model=model, request=joint.request, readings=readings).joint(
                service
            )
            seconds = step_s(other, mesh, sequences, length)
        else:
            seconds *= draft
        return {"source": str(draft), **figures(prices, sequences, length, seconds)}

    def serving(
        self,
        taken: Any,
        provenance: Mapping[str, Any],
        fewer: Short | None = None,
        draft: str | float | None = None,
    ) -> Serving:
        """The plan. taken: what was assumed; fewer: the next smaller number of devices; draft:
        planner.serving.draft."""
        joint, best, asked = self.joint, self.best, self.asked
        service, traffic = joint.step.service, self.traffic
        if traffic is not None and fewer is not None:
            traffic = {**traffic, "fewer": {"devices": fewer.devices, "why": fewer.why}}
        provenance = {
            "tool": TOOL_VERSION,
            "cost_model": COST_MODEL_VERSION,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            **provenance,
        }
        prompts_plan, step_plan = (
            compose(model, request, result, provenance, taken)
            for model, request, result in self._phases()
        )
        return Serving(
            service={
                "prompt": service.prompt,
                "generate": service.generate,
                "concurrency": service.concurrency,
                "objective": asked.objective,
                "quantize": service.quantize,
                **({} if service.cache_type == "compute" else {"cache_type": service.cache_type}),
                **({"engine": service.engine} if service.engine else {}),
                "label": best.label,
                "most_sequences": self.room,
                "gap": self.gap,
                "memory_limit_bytes": asked.request.limit_bytes,
                "solves": len(joint.solved),
                **({"draft": self.drafted(draft)} if draft is not None else {}),
            },
            figures=best.figures(),
            rows=self.rows,
            prompts=prompts_plan,
            step=step_plan,
            traffic=traffic,
            provenance=provenance,
        )


@dataclass(frozen=True)
class Short:
    """A number of devices that does not serve in time, and why."""

    devices: int
    why: str
    miss: float


def on_devices(
    ask: Callable[[int | None], ServingResult], devices: int | None, traffic: Traffic
) -> ServingResult:
    """What is found on so many devices. Raises PlanError P227 where the targets are missed."""
    result = ask(devices)
    short = _short(result, traffic)
    if traffic.targets and short.why:
        raise _missed(short, result, ["--devices fewest", "a lower --rate, or a longer time"])
    return result


def on_fewest(
    ask: Callable[[int | None], ServingResult], counts: Sequence[int], traffic: Traffic
) -> tuple[ServingResult, Short | None]:
    """What is found on the fewest devices of `counts` that serve in time, and the next smaller
    number: doubled until they do, then between. Raises PlanError P227, or the search's own where
    nothing fits."""
    tried: dict[int, ServingResult | Short] = {}

    def serves(count: int) -> bool:
        try:
            result = ask(count)
            short = _short(result, traffic)
            tried[count] = short if short.why else result
        except PlanError as e:
            if e.code != "P021":
                raise
            tried[count] = Short(count, e.what, float("inf"))
        return isinstance(tried[count], ServingResult)

    before: Short | None = None
    for count in [c for c in counts if c & (c - 1) == 0 or c == counts[0]]:
        if serves(count):
            break
        short = tried[count]
        assert isinstance(short, Short)
        helps = before is None or before.miss == float("inf")
        if before is not None and not helps and short.miss > (1 - ENOUGH) * before.miss:
            raise _missed(short, None, ["a longer time: more devices hardly help"])
        before = short
    else:
        assert before is not None
        raise _missed(before, None, ["a lower --rate"])
    low = before.devices if before else 0
    between = [c for c in counts if low < c < count]
    while between:
        middle = between[len(between) // 2]
        if serves(middle):
            count, between = middle, [c for c in between if c < middle]
        else:
            low, between = middle, [c for c in between if c > middle]
    result, below = tried[count], tried.get(low)
    assert isinstance(result, ServingResult) and not isinstance(below, ServingResult)
    return result, below


def _short(result: ServingResult, traffic: Traffic) -> Short:
    """What a plan misses: why is "" where it serves in time."""
    assert result.outcome is not None
    targets = traffic.targets
    return Short(result.joint.devices, result.outcome.missed(targets), result.outcome.miss(targets))


def _missed(short: Short, result: ServingResult | None, help: Sequence[str]) -> PlanError:
    return PlanError(
        "P227",
        f"no plan on {short.devices} devices serves in time: {short.why}",
        detail=[result.words] if result else [],
        help=help,
        exit_code=NO_PLAN,
    )
