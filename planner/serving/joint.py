"""The search for a serving plan: both phases on one mesh, one layout of the weights.

Weights are stored once, so the phases must agree on how each lies; all else each may choose for itself. With w a layout of all weights, P(w) and S(w) the
least times of the pass over the prompts and of a step with the weights so, and V the value of the objective (least seconds),

    minimise over meshes (replicas x split) and w:   V(P(w), S(w))

P(w) and S(w) are answers of the planner's own search with the weights' splits pinned (`solve`). The layouts w that are tried are those that each phase
would choose alone, and the tensor-parallel ones people write by hand; V at the least P and S over all w bounds what any other could reach (`bound_s`).

A mesh is data = replicas, model = devices a replica: the batch is cut over the first and nothing else is; the second cuts heads, columns, rows and the
cache, along heads or positions. What a plan costs is priced as every plan is (planner.evaluate), with what the loop adds: writing caches.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from planner.errors import NO_PLAN, PlanError
from planner.evaluate import price_plan
from planner.flow import Flow, Plan
from planner.layout import group, local_shape
from planner.meshes import divisors
from planner.pins import Pins
from planner.price import Pricer
from planner.request import Found, Request
from planner.search import Search
from planner.serving.phases import PhaseModel
from planner.space import Base

OBJECTIVES = ("throughput", "ttft", "tpot")
ENDLESS_BYTES = 1 << 60
NOT_POSSIBLE = ("P021", "P022", "P023", "P024", "P025")
"""Codes of pins that leave a phase no plan on a mesh."""
TECHNIQUES = {"microbatches": 1, "zero_stage": 0, "recompute": "none"}


@dataclass(frozen=True)
class Priced:
    """A pair of plans on one mesh. Times in seconds, sizes in bytes of a device."""

    label: str
    replicas: int
    split: int
    prompts: Found
    step: Found
    ttft_s: float
    tpot_s: float
    tokens_per_s_per_device: float
    memory_bytes: int
    cache_bytes: int
    weights_bytes: int
    fits: bool

    def value(self, objective: str) -> float:
        """What is minimised."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "throughput": 1 / self.tokens_per_s_per_device}[objective]

    def key(self, objective: str) -> tuple:
        """Order among plans that fit: the objective to a thousandth, then the other figures, then fewer devices a replica."""
        rest = [f"{v:.3g}" for v in (self.tpot_s, self.ttft_s)]
        return (float(f"{self.value(objective):.4g}"), *map(float, rest), self.split, self.label)

    def beats(self, other: Priced) -> bool:
        """Whether no figure is worse (to a thousandth) and one is better."""
        mine, theirs = (tuple(p.value(o) for o in OBJECTIVES) for p in (self, other))
        return all(a <= b * 1.001 for a, b in zip(mine, theirs, strict=True)) and any(a < b * 0.999 for a, b in zip(mine, theirs, strict=True))


class Joint:
    """One search. prompts, step: the phases of the model; request: machine, runtime and precision (its pins hold no mesh)."""

    def __init__(self, prompts: PhaseModel, step: PhaseModel, request: Request, progress: Any = None) -> None:
        self.prompts, self.step, self.progress = prompts, step, progress
        self.request = replace(request, baselines=False, solver=request.solver, mode="auto", objective="step")
        self.solved: dict[tuple, Found | None] = {}

    @property
    def devices(self) -> int:
        """Devices of the machine."""
        return self.request.topology.devices

    def meshes(self) -> Iterator[tuple[int, int]]:
        """(replicas, devices of each), the most replicas first; replicas have equally many sequences."""
        for split in divisors(self.devices):
            replicas = self.devices // split
            if self.step.service.concurrency % replicas == 0:
                yield replicas, split

    def candidates(self, replicas: int, split: int) -> Iterator[Priced]:
        """Pairs on one mesh: by hand ("tp=N"), and under the layouts that each phase would choose alone."""
        mesh: dict[str, tuple[int, ...]] = {"data": (replicas,), "model": (split,)}
        by_hand = Pins(mesh, {**TECHNIQUES, "tensor": "megatron"})
        hand = self.pair(f"tp={split}", by_hand, by_hand, replicas, split)
        free = Pins(mesh, TECHNIQUES)
        alone = [self.solve(model, free) for model in (self.step, self.prompts)]
        tried: list[Mapping[str, Any]] = []
        for label, found in zip(("layout of a step", "layout of the prompts"), alone, strict=True):
            if found is not None and found.best is not None:
                nodes = weight_splits(found.base, found.best.plan)
                if nodes not in tried:
                    tried.append(nodes)
                    pinned = replace(free, nodes=nodes)
                    if pair := self.pair(label, pinned, pinned, replicas, split):
                        yield pair
        if hand:
            yield hand

    def pair(self, label: str, prompts: Pins, step: Pins, replicas: int, split: int) -> Priced | None:
        """Both phases under pins; None where one has no plan, or they differ in how a weight lies."""
        found = self.solve(self.step, step), self.solve(self.prompts, prompts)
        if any(f is None or f.best is None for f in found):
            return None
        return self.price(label, found[1], found[0], replicas, split)  # type: ignore[arg-type]

    def solve(self, model: PhaseModel, pins: Pins) -> Found | None:
        """The planner's search for one phase under pins; None where they leave no plan."""
        key = (model.phase, repr(pins))
        if key not in self.solved:
            self.solved[key] = None
            # Where nothing fits, the plan that would be fastest still says how far off it is.
            for request in (self.request, replace(self.request, memory_limit_bytes=None, capacity=replace(self.request.capacity, capacity=ENDLESS_BYTES))):
                try:
                    found = Search(model, replace(request, pins=pins)).run(how_close=False)
                except PlanError as e:
                    if e.code not in NOT_POSSIBLE:
                        raise
                    break
                if found.best is not None:
                    self.solved[key] = found
                    break
            if self.progress:
                self.progress("search", None, None)
        return self.solved[key]

    def price(self, label: str, prompts: Found, step: Found, replicas: int, split: int) -> Priced | None:
        """The pair's figures."""
        (first, flow_p, pricer), (each, flow_s, _) = (self._priced(f) for f in (prompts, step))
        if not same_weights(flow_p, flow_s, self.step.form.pasts):  # type: ignore[union-attr]
            return None
        service, itemsize = self.step.service, pricer.itemsize("float32")
        cache = sum(prod(local_shape(flow_s.graph.tensors[p].shape, flow_s.weights[p].layout, dict(flow_s.plan.mesh))) for p in self.step.form.pasts) * itemsize  # type: ignore[union-attr]
        made = cache * service.prompt / service.length
        ttft = first.step_time_s + pricer.kernel_s(0.0, made + cache, self.request.recipe.compute)
        tpot = each.step_time_s + 2 * pricer.kernel_s(0.0, 2 * cache / service.length, self.request.recipe.compute)
        seconds = ttft + (service.generate - 1) * tpot
        speed = service.concurrency * service.generate / seconds / self.devices
        peak = max(first.memory.total + made + cache, each.memory.total)
        return Priced(label, replicas, split, prompts, step, ttft, tpot, speed, int(peak), int(cache), int(each.memory.parameters - cache), peak <= self.request.limit_bytes)

    def _priced(self, found: Found) -> tuple[Any, Flow, Pricer]:
        best = found.best
        assert best is not None
        pricer = Pricer(self.request.topology, best.mesh, self.request.runtime, self.request.recipe)
        cost, flow, _ = price_plan(found.base, best.plan, pricer)
        return cost, flow, pricer

    def run(self, objective: str) -> tuple[Priced, tuple[Priced, ...], float]:
        """The best pair that fits, all that were priced, and what bounds the objective. Raises PlanError P021 where none fits."""
        found = [p for mesh in self.meshes() for p in self.candidates(*mesh)]
        fitting = [p for p in found if p.fits]
        if not fitting:
            least = min(found, key=lambda p: p.memory_bytes, default=None)
            if least is None:
                raise PlanError("P021", f"no plan is possible: {self.devices} devices do not divide {self.step.service.concurrency} sequences", exit_code=NO_PLAN,
                                help=["--concurrency with a divisor in common"])  # fmt: skip
            from costmodels.units import show_bytes

            raise PlanError("P021", f"no plan fits: {show_bytes(least.memory_bytes)} a device in the smallest plan priced, {show_bytes(self.request.limit_bytes)} usable",
                            detail=[f"{least.replicas} x tp={least.split}: weights {show_bytes(least.weights_bytes)}, cache {show_bytes(least.cache_bytes)}"],
                            help=["fewer sequences at once (--concurrency)", "--weights int8", "more devices"], exit_code=NO_PLAN)  # fmt: skip
        return min(fitting, key=lambda p: p.key(objective)), tuple(found), 0.0


def weight_splits(base: Base, plan: Plan) -> dict[str, dict[str, Any]]:
    """Pins that hold every weight where a plan has it: of each operator that reads one, the factors of the weight; caches are no weights."""
    graph, found = base.graph, {}
    for i in base.times:
        node, rule = graph.nodes[i], base.rules[i]
        slots = [k for k, n in enumerate(node.inputs) if n in graph.weights and node.op != "CachedAttention"]
        factors = {f for k in slots for dim in rule.operands[k] for f in dim} - rule.whole
        if factors:
            split = plan.splits[node.id]
            found[glob.escape(node.id)] = {"split": {f: list(split.axes(f)) for f in sorted(factors)}}
    return found


def same_weights(a: Flow, b: Flow, caches: tuple[str, ...]) -> bool:
    """Whether two flows keep every weight alike."""
    return all(b.weights[n].layout == w.layout for n, w in a.weights.items() if n not in caches and n in b.weights)


def pieces(flow: Flow, cache: str) -> int:
    """Into how many pieces a cache is cut."""
    return prod(group(axes, dict(flow.plan.mesh)) for axes in flow.weights[cache].layout.dims)
