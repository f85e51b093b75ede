"""The search for a serving plan: both phases on one mesh, one layout of the weights.

Weights are stored once, so the phases must agree on how each lies; all else each may choose for
itself. With w a layout of all weights, P(w) and S(w) the least times of the pass over the prompts
and of a step with the weights so, and V the value of the objective (least seconds),

    minimise over meshes (replicas x split) and w:   V(P(w), S(w))

P(w) and S(w) are answers of the planner's own search with the weights' splits pinned (`solve`). The
layouts w that are tried are those that each phase would choose alone, and the tensor-parallel ones
people write by hand; V at the least P and S over all w bounds what any other could reach.

A mesh is data = replicas, model = devices a replica (model x model2 where these are more than the
cache has heads): the batch is cut over the first and nothing else is; the others cut heads,
columns, rows and the cache, along heads or positions. What a plan costs is priced as every plan is
(planner.pricing.step_time), with what the loop adds: writing caches.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

from costmodels.hardware.units import show_bytes
from planner.analysis.facts import GraphFacts
from planner.errors import NO_PLAN, PlanError
from planner.execution.collective import float32_sizes
from planner.execution.layout_flow import Flow
from planner.execution.plan import Plan
from planner.execution.techniques import STRUCTURAL
from planner.graph.ir import Graph
from planner.machine.mesh_choices import divisors, pinned_mesh
from planner.machine.topology import Mesh
from planner.ops import operator_of
from planner.ops.expert_load import expert_nodes
from planner.pins.pins import Pins
from planner.pricing.cost import Cost
from planner.pricing.kernels import inner_times
from planner.pricing.plan_price import price_plan, seconds_of
from planner.pricing.pricer import Pricer
from planner.search.request import Candidate, Request, SearchResult
from planner.search.search import Search
from planner.serving.phases import PhaseModel
from planner.serving.result import FIGURES, OBJECTIVES, kept_words, replicas_words
from planner.serving.states import FOUR_BYTES
from planner.sharding.layout import local_shape

PREFILL_TOKENS = 8192
EXPERT = "expert"
"""The axis of replicas over which the experts of a mixture are spread."""
ENDLESS_BYTES = 1 << 60
NOT_POSSIBLE = ("P021", "P022", "P023", "P024", "P025")
"""Codes of pins that leave a phase no plan on a mesh."""
NO_TECHNIQUES = {t.name: t.neutral for t in STRUCTURAL if not t.staged}
"""Pins of a pass that does nothing but compute."""


@dataclass(frozen=True)
class Priced:
    """A pair of plans on one mesh. Times in seconds, sizes in bytes of a device. token_bytes: keys
    and values of one token of its replica, in every layer."""

    label: str
    replicas: int
    split: int
    wave: int
    prompts: SearchResult
    step: SearchResult
    ttft_s: float
    tpot_s: float
    tokens_per_s_per_device: float
    memory_bytes: int
    cache_bytes: int
    token_bytes: float
    weights_bytes: int
    fits: bool
    state_bytes: int = 0
    """Of what layers keep beside keys and values, whatever the length."""

    def figures(self) -> dict[str, Any]:
        """The figures by name."""
        state = {"state_bytes": self.state_bytes} if self.state_bytes else {}
        return {**{name: getattr(self, name) for name in FIGURES}, **state}

    def value(self, objective: str) -> float:
        """What is minimised."""
        return {
            "ttft": self.ttft_s,
            "tpot": self.tpot_s,
            "throughput": 1 / self.tokens_per_s_per_device,
        }[objective]

    def key(self, objective: str) -> tuple:
        """Order among plans that fit: the objective to a thousandth, then the other figures, then
        fewer devices a replica."""
        rest = [f"{v:.3g}" for v in (self.tpot_s, self.ttft_s)]
        return (float(f"{self.value(objective):.4g}"), *map(float, rest), self.split, self.label)

    def like(self, other: Priced) -> bool:
        """Whether both are the same plans on one mesh."""
        plans = [(p.prompts.best, p.step.best) for p in (self, other)]
        return all(
            a is not None and b is not None and (a.mesh, a.plan) == (b.mesh, b.plan)
            for a, b in zip(*plans, strict=True)
        )

    def beats(self, other: Priced) -> bool:
        """Whether no figure is worse (to a thousandth) and one is better."""
        mine, theirs = (tuple(p.value(o) for o in OBJECTIVES) for p in (self, other))
        return all(a <= b * 1.001 for a, b in zip(mine, theirs, strict=True)) and any(
            a < b * 0.999 for a, b in zip(mine, theirs, strict=True)
        )


@dataclass(frozen=True)
class Timed:
    """A phase's seconds, those in which rows travel to experts and back, and the prices of its
    mesh."""

    step_s: float
    exchange_s: float
    pricer: Pricer

    @classmethod
    def of(cls, base: GraphFacts, plan: Plan, pricer: Pricer) -> Timed:
        """The times of a plan for a graph."""
        return Timed(seconds_of(base, plan, pricer), exchanges_s(base, plan, pricer), pricer)

    def seconds(self, half: Timed | None = None) -> float:
        """Of an engine, with two halves of the batch where that is shorter: one computes while rows
        of the other travel, so that the longer of both counts, twice. half: the pass over half the
        sequences; without it half takes half the time, as where arithmetic bounds it."""
        if not self.pricer.runtime.serves or not self.exchange_s:
            return self.step_s
        parts = (self.step_s / 2, self.exchange_s / 2)
        one_s, sent_s = (half.step_s, half.exchange_s) if half else parts
        return min(self.step_s, 2 * max(one_s - sent_s, sent_s))


@dataclass(frozen=True)
class Phase(Timed):
    """A phase's price, memory too, what it was read from, and its flow."""

    cost: Cost
    flow: Flow
    base: GraphFacts


def exchanges_s(base: GraphFacts, plan: Plan, pricer: Pricer) -> float:
    """Seconds in which rows travel to experts and back."""
    nodes = base.graph.nodes
    return sum(
        base.times[i] * inner_times(base, i, plan.splits[nodes[i].id], pricer)[0]
        for i, _ in expert_nodes(base.graph)
        if i in base.times
    )


class Joint:
    """One search. prompts, step: the phases of the model; request: machine, runtime and precision
    (its pins hold no mesh).

    prefill_tokens: a replica passes as many prompts at once as have so many tokens, at least one,
    and as divide its sequences.
    """

    def __init__(
        self,
        prompts: PhaseModel,
        step: PhaseModel,
        request: Request,
        progress: Any = None,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._prompts, self.step, self.progress, self.prefill_tokens = (
            prompts,
            step,
            progress,
            prefill_tokens,
        )
        self._waves: dict[int, PhaseModel] = {}
        self._pricers: dict[Mesh, Pricer] = {}
        self.request = replace(
            request, baselines=False, solver=request.solver, mode="auto", objective="step"
        )
        self.solved: dict[tuple, SearchResult | None] = {}
        self.refused = ""
        """Why the last phase that has no plan under pins has none."""
        self.fitting_alone = False
        """Whether plans that do not fit are left out."""
        self.bounds: dict[tuple[int, int], dict[str, float]] = {}
        """mesh -> objective -> what no layout of the weights can go below"""

    @property
    def devices(self) -> int:
        """Devices of the machine."""
        return self.request.topology.devices

    def meshes(self) -> Iterator[tuple[int, int]]:
        """(replicas, devices of each) whose axes lie along the links, the most replicas first;
        replicas have equally many sequences, and of an engine devices as many query heads: it
        starts no others."""
        sequences, engine = self.step.service.concurrency, bool(self.step.service.engine)
        for split in divisors(self.devices):
            replicas = self.devices // split
            if engine and self._heads % split:
                continue
            if sequences % replicas == 0 and self._on_links(replicas, split):
                yield replicas, split

    @cached_property
    def _heads(self) -> int:
        """What number of devices all attentions' query heads divide over; 0 without attention."""
        graph = self.step.graph(1)
        queries = (n.inputs[0] for n in graph.nodes if operator_of(n.op).kind == "attention")
        return gcd(*(graph.tensors[q].shape[1] for q in queries))

    def _on_links(self, replicas: int, split: int) -> bool:
        """Whether the mesh's axes take whole factors of the levels of links."""
        sizes = {name: prod(parts) for name, parts in self.axes(replicas, split).items()}
        try:
            pinned_mesh(self.request.topology, sizes)
        except PlanError:
            return False
        return True

    def prompts(self, replicas: int) -> PhaseModel:
        """The pass over as many prompts as so many replicas take at once."""
        service = self._prompts.service
        rows = service.concurrency // replicas
        wave = replicas * max(
            (k for k in divisors(rows) if k * service.prompt <= self.prefill_tokens), default=1
        )
        if wave not in self._waves:
            self._waves[wave] = self._prompts.at(wave=wave)
        return self._waves[wave]

    def axes(self, replicas: int, split: int) -> dict[str, tuple[int, ...]]:
        """The mesh's axes. Where a replica has more devices than the cache has heads, two axes: one
        for these, the other for query heads or positions."""
        assert self.step.form is not None
        form = self.step.form
        counts = [heads for heads, _ in form.sizes.values()]
        heads = gcd(split, *(counts or [form.shapes[past][0] for past in form.constant]))
        over = (
            {"tensor": (heads,), "tensor2": (split // heads,)}
            if 1 < heads < split
            else {"tensor": (split,)}
        )
        return {"data": (replicas,), **over}

    def candidates(self, replicas: int, split: int) -> Iterator[Priced]:
        """Pairs on one mesh: by hand ("tp=N"), and under the layouts that each phase would choose
        alone. Of a mixture likewise with its experts over all replicas ("ep=M tp=N"), each of which
        has sequences of its own and waits for the others."""
        if not self.fitting_alone or not self._too_small(replicas, split):
            yield from self._on_mesh(Pins(self.axes(replicas, split)), "", replicas, split)
        if replicas > 1 and self._experts:
            _, *over = self.axes(replicas, split).items()
            nodes = {**self._own_sequences, **self._exchanged}
            pins = Pins({EXPERT: (replicas,), **dict(over)}, nodes=nodes)
            yield from self._on_mesh(pins, f"ep={replicas} ", replicas, split)

    @cached_property
    def _experts(self) -> bool:
        """Whether the model has routed experts."""
        return any(True for _ in expert_nodes(self.step.graph(1)))

    @cached_property
    def _own_sequences(self) -> dict[str, dict[str, Any]]:
        """Pins that cut sequences, and what is cached of them, over the axis of experts."""
        nodes = self.step.graph(1).nodes
        cached = [node.id for node in nodes if operator_of(node.op).cached(node)]
        return {glob.escape(id): {"split": {"b": [EXPERT]}} for id in cached}

    @cached_property
    def _exchanged(self) -> dict[str, dict[str, Any]]:
        """The pins of an engine that send rows to their experts' devices and back. Prompts and
        steps may call the experts of a layer by names of which one begins with the other."""
        if not self.request.runtime.serves:
            return {}
        nodes = self._prompts.graph(1).nodes
        experts = [n.id for n in nodes if operator_of(n.op).kind == "experts"]
        return {f"{glob.escape(id)}*": {"split": {"expert-b": [EXPERT]}} for id in experts}

    def _on_mesh(self, pins: Pins, name: str, replicas: int, split: int) -> Iterator[Priced]:
        """Pairs under pins of a mesh, and perhaps of attention. name: what their labels begin
        with."""
        by_hand = replace(pins, techniques={**NO_TECHNIQUES, "tensor": "megatron"})
        hand = self.held(f"{name}tp={split}", by_hand, replicas, split)
        free = replace(pins, techniques=NO_TECHNIQUES)
        prompts = self.prompts(replicas)
        alone = [self.solve(model, free) for model in (self.step, prompts)]
        if all(f is not None and f.best is not None for f in alone):
            bound, known = (
                self._bound(alone[0], alone[1], prompts.rows),  # type: ignore[arg-type]
                self.bounds.get((replicas, split), {}),
            )
            self.bounds[replicas, split] = {k: min(v, known.get(k, v)) for k, v in bound.items()}
        tried: list[Mapping[str, Any]] = []
        others = (prompts, self.step)
        for label, result, other in zip(
            ("layout of a step", "layout of the prompts"), alone, others, strict=True
        ):
            if result is not None and result.best is not None:
                nodes = weight_pins(result.base, result.best.plan, other.graph(1))
                if nodes not in tried:
                    tried.append(nodes)
                    pinned = replace(free, nodes={**pins.nodes, **nodes})
                    if pair := self.pair(f"{name}{label}", pinned, replicas, split):
                        yield pair
        if hand:
            yield hand

    def _bound(self, step: SearchResult, prompts: SearchResult, wave: int) -> dict[str, float]:
        """The objectives at what bounds each phase alone on a mesh."""
        assert step.best is not None
        launch_s = Pricer(
            self.request.topology, step.best.mesh, self.request.runtime, self.request.recipe
        ).kernel_s(0.0, 0.0, self.request.recipe.compute)
        ttft, tpot = (
            prompts.bound_of_all_s + launch_s,
            step.bound_of_all_s + 2 * launch_s,
        )  # caches are written
        return {"ttft": ttft, "tpot": tpot, "throughput": 1 / self.speed(ttft, tpot, wave)}

    def speed(self, ttft_s: float, tpot_s: float, wave: int) -> float:
        """Tokens a second and device: every prompt is passed, then all sequences generate."""
        s = self.step.service
        return (
            s.concurrency
            * s.generate
            / (s.concurrency // wave * ttft_s + (s.generate - 1) * tpot_s)
            / self.devices
        )

    def held(self, label: str, pins: Pins, replicas: int, split: int) -> Priced | None:
        """The pair under pins, weights as one of the phases has them under those pins; None where
        the other cannot."""
        for model, other in (
            (self.step, self.prompts(replicas)),
            (self.prompts(replicas), self.step),
        ):
            result = self.solve(model, pins)
            if result is not None and result.best is not None:
                weights = weight_pins(result.base, result.best.plan, other.graph(1))
                pinned = replace(pins, nodes={**pins.nodes, **weights})
                pair = self.pair(label, pinned, replicas, split)
                if pair:
                    return pair
        return None

    def pair(self, label: str, pins: Pins, replicas: int, split: int) -> Priced | None:
        """Both phases under pins; None where one has no plan, or they differ in how a weight
        lies."""
        results = self.solve(self.step, pins), self.solve(self.prompts(replicas), pins)
        if any(f is None or f.best is None for f in results):
            return None
        return self.price(label, results[1], results[0], replicas, split)  # type: ignore[arg-type]

    def solve(self, model: PhaseModel, pins: Pins) -> SearchResult | None:
        """The planner's search for one phase under pins; None where they leave no plan."""
        key = (model.phase, model.rows, repr(pins))
        if key not in self.solved:
            self.solved[key] = None
            # Where nothing fits, the plan that would be fastest still says how far off it is.
            endless = replace(self.request.capacity, capacity=ENDLESS_BYTES)
            requests = (
                self.request,
                replace(self.request, memory_limit_bytes=None, capacity=endless),
            )
            for request in requests[:1] if self.fitting_alone else requests:
                try:
                    result = Search(model, replace(request, pins=pins)).run(how_close=False)
                except PlanError as e:
                    if e.code not in NOT_POSSIBLE:
                        raise
                    self.refused = e.what
                    break
                if result.best is not None:
                    self.solved[key] = result
                    break
            if self.progress:
                self.progress("search", None, None)
        return self.solved[key]

    def price(
        self, label: str, prompts: SearchResult, step: SearchResult, replicas: int, split: int
    ) -> Priced | None:
        """The pair's figures; None where the phases keep a weight in different layouts."""
        assert prompts.best is not None and step.best is not None
        prompts_phase, step_phase = (
            self.phase(prompts.base, prompts.best),
            self.phase(step.base, step.best),
        )
        if not same_weights(prompts_phase.flow, step_phase.flow, self.kept):
            return None
        compute, wave = self.request.recipe.compute, self.prompts(replicas).rows
        cache, state = self.cache_bytes(step_phase), self.state_bytes(step_phase)
        half = self.half_step(replicas, step.best)
        ttft = prompts_phase.seconds() + step_phase.pricer.kernel_s(
            0.0, self._handed(step_phase, wave), compute
        )
        tpot = (
            step_phase.seconds(half) if half else step_phase.step_s
        ) + 2 * step_phase.pricer.kernel_s(0.0, 2 * self.token_bytes(step_phase), compute)
        peak = self.peak_bytes(prompts_phase, step_phase, wave)
        weights = int(step_phase.cost.memory.parameters - cache - state)
        return Priced(
            label=label,
            replicas=replicas,
            split=split,
            wave=wave,
            prompts=prompts,
            step=step,
            ttft_s=ttft,
            tpot_s=tpot,
            tokens_per_s_per_device=self.speed(ttft, tpot, wave),
            memory_bytes=peak,
            cache_bytes=int(cache),
            token_bytes=self.token_bytes(step_phase) * replicas / self.step.service.concurrency,
            weights_bytes=weights,
            fits=peak <= self.request.limit_bytes,
            state_bytes=int(state),
        )

    @property
    def pasts(self) -> tuple[str, ...]:
        """Names of the caches of keys and values."""
        assert self.step.form is not None
        return self.step.form.pasts

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of these, and of what else is kept of sequences."""
        assert self.step.form is not None
        return self.step.form.held

    def phase(self, base: GraphFacts, best: Candidate) -> Phase:
        """The price of a plan for a graph."""
        pricer = self.pricer(best)
        cost, flow, _ = price_plan(base, best.plan, pricer)
        exchange_s = exchanges_s(base, best.plan, pricer)
        return Phase(cost.step_time_s, exchange_s, pricer, cost, flow, base)

    def pricer(self, best: Candidate) -> Pricer:
        """Prices on a plan's mesh, which plans on it share."""
        mesh, request = best.mesh, self.request
        if mesh not in self._pricers:
            self._pricers[mesh] = Pricer(request.topology, mesh, request.runtime, request.recipe)
        return self._pricers[mesh]

    def half_step(self, replicas: int, best: Candidate) -> Timed | None:
        """A step of half the sequences under a plan; None where replicas cannot halve theirs, or
        nothing has halves."""
        sequences = self.step.service.concurrency
        if not self.request.runtime.serves or sequences % (2 * replicas):
            return None
        return Timed.of(self._half_base, best.plan, self.pricer(best))

    @cached_property
    def _half_base(self) -> GraphFacts:
        half = self.step.at(concurrency=self.step.service.concurrency // 2)
        return GraphFacts.of(half.graph(1), training=False, fold=self.request.fold)

    def cache_bytes(self, step: Phase) -> float:
        """Bytes of the caches on a device."""
        return sum(size for size, _ in self._caches(step))

    def token_bytes(self, step: Phase) -> float:
        """Bytes on a device of one more token of all its sequences, in every cache."""
        return sum(size / tokens for size, tokens in self._caches(step))

    def state_bytes(self, step: Phase) -> float:
        """Bytes on a device of what is kept beside keys and values, of all its sequences."""
        assert self.step.form is not None
        return sum(self._local_bytes(step, p) for p in self.step.form.constant)

    def _caches(self, step: Phase) -> Iterator[tuple[float, int]]:
        """(bytes on a device, tokens of a sequence that it has room for) of each cache."""
        for p in self.pasts:
            yield self._local_bytes(step, p), step.flow.graph.tensors[p].shape[2]

    def _local_bytes(self, step: Phase, name: str) -> float:
        """Bytes on a device of a cache or a state."""
        t, mesh = step.flow.graph.tensors[name], dict(step.flow.plan.mesh)
        local = prod(local_shape(t.shape, step.flow.weights[name].layout, mesh))
        return local * step.pricer.itemsize(t.dtype)

    def _handed(self, step: Phase, wave: int) -> float:
        """Bytes on a device of a wave's keys and values, as they are made and with the room for
        what is generated, and of its states: read, then written into the caches."""
        graph = step.flow.graph
        share, states = wave / dict(graph.dims)["batch"], 2 * self.state_bytes(step)
        if not self.pasts:
            return states * share
        kept = step.pricer.itemsize(graph.tensors[self.pasts[0]].dtype)
        wider = step.pricer.itemsize("float32") / kept  # they are made in the type computed in
        new_bytes = self.token_bytes(step) * wider * self.step.service.prompt
        return (self.cache_bytes(step) + new_bytes + states) * share

    def peak_bytes(self, prompts: Phase, step: Phase, wave: int) -> int:
        """The larger peak of the two phases; while prompts are passed the caches are there, and the
        wave's keys and values beside them."""
        return int(
            max(
                prompts.cost.memory.total
                + self.cache_bytes(step)
                + self.state_bytes(step)
                + self._handed(step, wave),
                step.cost.memory.total,
            )
        )

    @staticmethod
    def front(priced: Sequence[Priced]) -> list[Priced]:
        """Pairs that fit and that no other that fits beats."""
        fitting = [p for p in priced if p.fits]
        return [p for p in fitting if not any(q.beats(p) for q in fitting)]

    def fitting(self) -> tuple[Priced, ...]:
        """All pairs that fit, on all meshes."""
        if self.overfull(self.step.service.concurrency):
            return ()
        self.fitting_alone = True
        return tuple(p for mesh in self.meshes() for p in self.candidates(*mesh) if p.fits)

    def priced(self) -> tuple[Priced, ...]:
        """All pairs on all meshes. Raises PlanError P021 where none fits."""
        if self.overfull(self.step.service.concurrency):
            raise self._overfull()
        pairs = tuple(p for mesh in self.meshes() for p in self.candidates(*mesh))
        if not any(p.fits for p in pairs):
            raise self._nothing_fits(pairs)
        return pairs

    def overfull(self, sequences: int) -> bool:
        """Whether weights, and caches of so many sequences, are more than all devices hold
        together: then no plan fits, however they are cut."""
        weights, cache = self._least_bytes
        return weights + cache * sequences > self.devices * self.request.limit_bytes

    def _too_small(self, replicas: int, split: int) -> bool:
        """Whether a device cannot hold its part of weights, which each replica has whole, and of
        caches."""
        weights, cache = self._least_bytes
        cached = cache * self.step.service.concurrency / replicas
        return (weights + cached) / split > self.request.limit_bytes

    def _overfull(self) -> PlanError:
        """The error for weights and caches that are too many for all devices together."""
        weights, cache = self._least_bytes
        caches = cache * self.step.service.concurrency
        devices = self.devices
        return PlanError(
            "P021",
            f"no plan fits: {show_bytes((weights + caches) / devices)} a device of weights and"
            f" caches alone, {show_bytes(self.request.limit_bytes)} usable",
            detail=[
                f"weights {show_bytes(weights)}, caches {show_bytes(caches)}, over"
                f" {devices} device{'s' * (devices > 1)}"
            ],
            help=self._remedies((weights + caches) / devices),
            exit_code=NO_PLAN,
        )

    @cached_property
    def _least_bytes(self) -> tuple[float, float]:
        """Bytes of all weights once, and of one sequence's caches."""
        return self._bytes_of(self.step.graph(1))

    def _bytes_of(self, graph: Graph) -> tuple[float, float]:
        """Bytes of all weights once, and of one sequence's caches, of a step's graph whose weights
        may be kept otherwise."""
        weights, caches = 0.0, 0.0
        for name in (n for n in graph.weights if graph.consumers.get(n)):
            t = graph.tensors[name]
            one = 1.0 if "8" in t.dtype else self.request.recipe.parameter_bytes
            size = t.elements * (one if t.is_float else min(one, float32_sizes(t.dtype)))
            if t.dtype == FOUR_BYTES:
                size = t.elements * float32_sizes(t.dtype)
            if name in self.kept:
                caches += size / self.step.service.concurrency
            else:
                weights += size
        return weights, caches

    def run(self, objective: str) -> tuple[Priced, tuple[Priced, ...], float]:
        """The best pair that fits, all that were priced, and by what part of its value no other can
        be better. Raises PlanError P021 where none fits."""
        pairs = self.priced()
        best = min((p for p in pairs if p.fits), key=lambda p: p.key(objective))
        least = min(self.bounds[mesh][objective] for mesh in self.meshes() if mesh in self.bounds)
        return best, pairs, max(0.0, 1 - least / best.value(objective))

    def _nothing_fits(self, pairs: Sequence[Priced]) -> PlanError:

        sequences = self.step.service.concurrency
        least = min(pairs, key=lambda p: p.memory_bytes, default=None)
        if least is None and any(True for _ in self.meshes()):
            return PlanError(
                "P021",
                "no plan is possible: on no mesh both phases have one layout of the weights",
                detail=[self.refused] if self.refused else [],
                exit_code=NO_PLAN,
                help=["plan the phases apart: --workload infer without --prompt and --generate"],
            )
        if least is None:
            engine, heads = self.step.service.engine, self._heads
            over = f", of devices that {heads} query heads divide over" if engine and heads else ""
            return PlanError(
                "P021",
                f"no plan is possible: no mesh of {self.devices} devices has replicas that divide"
                f" {sequences} sequence{'s' * (sequences > 1)}{over}",
                exit_code=NO_PLAN,
                help=["--concurrency with more divisors"],
            )
        return PlanError(
            "P021",
            f"no plan fits: {show_bytes(least.memory_bytes)} a device in the smallest plan priced,"
            f" {show_bytes(self.request.limit_bytes)} usable",
            detail=[
                f"{replicas_words(least.replicas, least.split)}: weights"
                f" {show_bytes(least.weights_bytes)}, {kept_words(least.figures())}"
            ],
            help=self._remedies(least.memory_bytes),
            exit_code=NO_PLAN,
        )

    def _remedies(self, memory_bytes: float) -> list[str]:
        """What would fit, by bytes, where the smallest plan takes so many on a device: fewer
        sequences unless weights alone are too many, weights in a byte where that is enough, and so
        many devices."""
        room, sequences = self.devices * self.request.limit_bytes, self.step.service.concurrency
        help = ["fewer sequences at once (--concurrency)"] if self._least_bytes[0] < room else []
        if self.step.service.quantize == "none":
            for how, asked in (("int8", "--quantize int8"), ("fp8", "--precision fp8")):
                weights, cache = self._bytes_of(self.step.in_a_byte(self.step.graph(1), how))
                help += [asked] if weights + cache * sequences < room else []
        devices = self.devices
        while devices * self.request.limit_bytes < memory_bytes * self.devices:
            devices *= 2
        return [*help, f"more devices: --devices {max(devices, 2 * self.devices)}"]


def weight_pins(base: GraphFacts, plan: Plan, other: Graph) -> dict[str, dict[str, Any]]:
    """Pins that hold every weight where a plan has it, for both phases: of each operator that reads
    one, the factors of the weight, or, where the other phase's graph has no such operator, the
    weight's layout. Caches are no weights."""
    graph = base.graph
    pins: dict[str, dict[str, Any]] = {}
    there = {(n.id, n.op) for n in other.nodes}
    for i in base.times:
        node, rule, split = graph.nodes[i], base.rules[i], plan.splits[graph.nodes[i].id]
        slots = [
            k
            for k, n in enumerate(node.inputs)
            if n in graph.weights and k not in operator_of(node.op).caches
        ]
        factors = {f for k in slots for dim in rule.operands[k] for f in dim} - rule.whole
        if factors and (node.id, node.op) in there:
            pins[glob.escape(node.id)] = {
                "split": {f: list(split.axes(f)) for f in sorted(factors)}
            }
        elif factors:
            layouts = {node.inputs[k]: rule.operand(k, split, plan.order).dims for k in slots}
            pins.update(
                {
                    glob.escape(n): {"layout": [list(axes) for axes in dims]}
                    for n, dims in layouts.items()
                    if n in other.weights
                }
            )
    return pins


def same_weights(a: Flow, b: Flow, caches: tuple[str, ...]) -> bool:
    """Whether two flows keep every weight alike."""
    return all(
        b.weights[n].layout == w.layout
        for n, w in a.weights.items()
        if n not in caches and n in b.weights
    )
