"""The outer search: mesh, optimizer sharding, recompute and microbatches around the one problem that a solver answers.

    for each mesh           a space is built once (planner.space)
      relaxed solves        without a memory limit, per optimizer level: a bound below which no technique on this mesh can come
      techniques            in the order of that bound, the cheapest first; solved under the memory limit only while the bound can win
    the winner is priced as a whole (planner.evaluate) beside the baselines, and is the cheapest plan of all that fits, baselines included

Ties (within a thousandth): less memory first, then the simpler mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from costmodels.memory import Capacity
from costmodels.precision import Recipe
from costmodels.runtime import Runtime
from planner.assemble import PICO, Techniques, assemble, splits_of
from planner.batch import batch_factors
from planner.errors import PlanError
from planner.evaluate import Cost, price_plan
from planner.flow import Plan
from planner.model import Model
from planner.pins import Pins
from planner.price import Pricer
from planner.problem import FORBIDDEN, Budget, Problem, evaluate
from planner.rule import PENDING, Limits, Split, candidates, legal
from planner.space import Base, Space, build_space
from planner.topology import Mesh, Topology, meshes, pinned_mesh

RECOMPUTE = ("none", "block-keep", "block")
TIE = 1e-3
WORK = {"dp": 2_000_000}
"""Work units of one solve: about a third of a second where the memory limit binds hard; the bound is kept either way."""
Progress = Callable[[str, float | None, float | None], None]


@dataclass(frozen=True)
class Request:
    """Everything a search needs to know beside the model."""

    topology: Topology
    capacity: Capacity
    recipe: Recipe
    runtime: Runtime
    solver: str = "auto"
    mode: str = "auto"
    objective: str = "step"
    pins: Pins = field(default_factory=Pins)
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    seed: int = 0
    fold: bool = True
    baselines: bool = True

    @property
    def limit_bytes(self) -> int:
        """Bytes a plan may use on a device."""
        usable = self.capacity.usable
        return usable if self.memory_limit_bytes is None else min(usable, self.memory_limit_bytes)


@dataclass(frozen=True)
class Candidate:
    """A priced plan, and what its solver claims about the problem it came from."""

    label: str
    mesh: Mesh
    plan: Plan
    cost: Cost
    techniques: Techniques
    objective_s: float = 0.0
    bound_s: float = 0.0
    status: str = "feasible"

    def key(self, request: Request) -> tuple:
        """Order among plans that fit: the objective in steps of a tie, then memory, then the simpler mesh."""
        main = self.cost.memory.total if request.objective == "memory" else self.cost.step_time_s
        return (round(np.log(max(main, 1e-12)) / TIE), self.cost.memory.total, len(self.plan.mesh), self.plan.mesh)


@dataclass
class Found:
    """What a search returns: the winner, the baselines (label -> best tuned variant, fitting or the smallest), the spaces used."""

    best: Candidate | None
    baselines: dict[str, Candidate]
    base: Base
    space: Space | None
    choice: tuple[int, ...]
    problem: Problem | None
    bound_s: float
    tried: int
    stopped: str = ""
    smallest: Candidate | None = None


class Search:
    """One search. Deterministic unless the time limit cuts it."""

    def __init__(self, model: Model, request: Request, progress: Progress | None = None) -> None:
        self.model, self.request, self.progress = model, request, progress
        self.training = model.workload.kind == "train"
        self.started = time.monotonic()
        self.bases: dict[int, Base] = {}
        self.found: list[Candidate] = []
        self.too_large: list[Candidate] = []
        self.details: dict[int, tuple[Space, tuple[int, ...], Problem, Base]] = {}
        self.bounds: list[float] = []
        self._pricers: dict[Mesh, Pricer] = {}
        self._tried: list[Candidate] = []  # keeps candidates alive, so that their ids stay unique
        self.stopped = ""
        self._least: dict[str, tuple[float, Space, Mesh, Techniques]] = {}  # label -> least usage any choice has, and where

    def base(self, microbatches: int) -> Base:
        """Rules, gradients and repeated blocks of the graph of one microbatch."""
        if microbatches not in self.bases:
            self.bases[microbatches] = Base.of(self.model.graph(microbatches), training=self.training, fold=self.request.fold)
        return self.bases[microbatches]

    def run(self) -> Found:
        """Search everything the request allows."""
        request = self.request
        try:
            chosen = self._meshes()
            fixed = self.fixed_splits if request.mode in ("data-parallel",) else None
            relaxed = []
            for mesh in chosen:
                entry = self._relax(mesh, 1, fixed)
                if entry:
                    relaxed.append(entry)
                if self._out_of_time():
                    break
            relaxed.sort(key=lambda e: e[0])
            for bound, mesh, space in relaxed:
                if self._out_of_time():
                    break
                self._techniques(space, mesh, 1, bound)
            for micro in self._microbatches():
                # Splitting the batch pays only where memory binds: tried on the most promising meshes.
                for _, mesh, _ in relaxed[:4]:
                    if self._out_of_time():
                        break
                    entry = self._relax(mesh, micro, fixed)
                    if entry:
                        self._techniques(entry[2], mesh, micro, entry[0])
                best = self._best()
                if best is not None and best.techniques.microbatches < micro:
                    break
        except KeyboardInterrupt:
            self.stopped = "interrupt"
        baselines = self._baselines() if request.baselines and not self.stopped else {}
        best = self._best()
        for label, c in baselines.items():
            fits = c.cost.memory.total <= request.limit_bytes
            if fits and request.mode == "auto" and request.pins.empty and (best is None or c.key(request) < best.key(request)):
                best = replace(c, label=label)
        detail = self.details.get(id(best))
        base = self.base(best.plan.microbatches if best else 1)
        if best is None:
            self.too_large += [c for c in [self._smallest("plan")] if c]
        smallest = min(self.too_large, key=lambda c: c.cost.memory.total, default=None)
        space, choice, problem = detail[:3] if detail else (None, (), None)
        return Found(best, baselines, base, space, choice, problem, min(self.bounds, default=0.0), len(self.found) + len(self.too_large), self.stopped, smallest)

    def _out_of_time(self) -> bool:
        limit = self.request.time_limit_s
        if limit is not None and time.monotonic() - self.started > limit:
            self.stopped = "time"
        return bool(self.stopped)

    def _best(self) -> Candidate | None:
        return min(self.found, key=lambda c: c.key(self.request), default=None)

    def _meshes(self) -> tuple[Mesh, ...]:
        request = self.request
        if request.pins.mesh:
            return tuple(pinned_mesh(request.topology, sizes) for sizes in request.pins.mesh_choices(request.topology.devices))
        every = meshes(request.topology)
        if request.mode == "data-parallel":
            return every[:1]
        return tuple(m for m in every if len(m.axes) < 3)

    def _microbatches(self) -> Iterable[int]:
        pinned = self.request.pins.techniques.get("microbatches")
        if not self.training:
            return ()
        batch = self.model.batch
        if pinned:
            return (int(pinned),)
        tight = not self.found or (min(c.key(self.request) for c in self.found) and self._best().techniques != Techniques())  # type: ignore[union-attr]
        return [m for m in (2, 4, 8, 16, 32, 64) if batch % m == 0 and self._divides(m)] if tight else ()

    def _divides(self, micro: int) -> bool:
        """Whether the model can be read at a fraction of its batch: static reshapes of a batch mixed with other dims cannot."""
        try:
            self.model.graph(micro)
        except PlanError as e:
            if e.code != "P146":
                raise
            return False
        return True

    def _pricer(self, mesh: Mesh) -> Pricer:
        """One pricer a mesh: what it has priced serves every space on that mesh."""
        if mesh not in self._pricers:
            self._pricers[mesh] = Pricer(self.request.topology, mesh, self.request.runtime, self.request.recipe)
        return self._pricers[mesh]

    def _relax(self, mesh: Mesh, micro: int, fixed: Callable | None) -> tuple[float, Mesh, Space] | None:
        """Space of a mesh and the least cost without a memory limit over all optimizer levels: a bound for every technique on it."""
        pinned_micro = self.request.pins.techniques.get("microbatches")
        if pinned_micro and int(pinned_micro) != micro:
            return None
        base = self.base(micro)
        pricer = self._pricer(mesh)
        allowed = fixed(base, mesh) if fixed else self.request.pins.allowed(base, dict(mesh.shape))
        space = build_space(base, pricer, limits=Limits(forbidden=self.request.pins.forbidden_factors), allowed=allowed, zero_axes=tuple(pricer.sizes))
        least = np.inf
        for zero in self._levels():
            problem = assemble(space, Techniques(zero, "none", micro), None)
            solution = self._solve(problem)
            if solution is not None and solution[0]:
                value = evaluate(problem, solution[0]).cost / PICO
                least = min(least, value if solution[1] is None else min(value, solution[1] / PICO))
        if not np.isfinite(least):
            return None
        self.bounds.append(float(least))
        return float(least), mesh, space

    def _levels(self) -> tuple[int, ...]:
        if not self.training:
            return (0,)
        pinned = self.request.pins.techniques.get("zero_stage")
        return (0, 1, 2, 3) if pinned is None else (int(pinned),)

    def _recomputes(self, base: Base) -> tuple[str, ...]:
        if not self.training or not base.runs:
            return ("none",)
        pinned = self.request.pins.techniques.get("recompute")
        return RECOMPUTE if pinned is None else (str(pinned),)

    def _solve(self, problem: Problem, start: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], float | None, str] | None:
        from planner.solvers import solve

        left = None
        if self.request.time_limit_s is not None:
            left = max(0.05, self.request.time_limit_s - (time.monotonic() - self.started))
        name = self.request.solver if self.request.solver != "auto" else "dp"
        solution = solve(problem, name, Budget(time_limit_s=left, work=WORK.get(name), seed=self.request.seed), start)
        if solution.status in ("infeasible", "none") or not solution.choice:
            return None
        return tuple(int(x) for x in solution.choice), solution.bound, solution.status

    def _techniques(self, space: Space, mesh: Mesh, micro: int, bound: float) -> None:
        """Try optimizer levels and recompute on one space, cheapest first; records what fits and what does not."""
        fitted: set[str] = set()
        for recompute in self._recomputes(space.base):
            for zero in self._levels():
                incumbent = self._best()
                worth = incumbent.cost.step_time_s * (1 + TIE) if incumbent is not None and self.request.objective == "step" else np.inf
                if bound > worth:
                    return
                candidate = self._one(space, mesh, Techniques(zero, recompute, micro), "plan", worth)
                if candidate is None:
                    continue
                if candidate.cost.memory.total > self.request.limit_bytes:
                    self.too_large.append(candidate)
                    continue
                self.found.append(candidate)
                fitted.add(recompute)
                self._report(self._best())
            if fitted and self.request.objective == "step":
                return  # recomputing more only costs time

    def _one(self, space: Space, mesh: Mesh, techniques: Techniques, label: str, worth_s: float = np.inf) -> Candidate | None:
        """Solve one choice of techniques: freely first, then under the memory limit, tightened by what the whole price adds.

        None when it is impossible or cannot beat `worth_s`: the free solution bounds the bounded one.
        """
        limit = self.request.limit_bytes
        problem = assemble(space, techniques, None)
        solved = self._solve(problem)
        if solved is None or evaluate(problem, solved[0]).cost / PICO > worth_s:
            return None
        room = float(limit)
        if evaluate(problem, solved[0]).peak_usage <= limit:
            candidate = self._candidate(space, mesh, techniques, problem, label, solved)
            excess = candidate.cost.memory.total - limit
            if excess <= 0:
                return candidate
            room = evaluate(problem, solved[0]).peak_usage - excess
        candidate = None
        for _ in range(3):
            bounded = assemble(space, techniques, room)
            solved = self._solve(bounded) if room > 0 else None
            if solved is None:
                if candidate is None:
                    self._note_small(space, mesh, techniques, label)
                return candidate
            if evaluate(bounded, solved[0]).cost / PICO > worth_s:
                return None
            candidate = self._candidate(space, mesh, techniques, bounded, label, solved)
            excess = candidate.cost.memory.total - limit
            if excess <= 0:
                return candidate
            room = min(room, evaluate(bounded, solved[0]).peak_usage) - excess
        return candidate

    def _note_small(self, space: Space, mesh: Mesh, techniques: Techniques, label: str) -> None:
        """Remember where the least memory is needed: only that one is priced, and only when nothing fits."""
        usage = float(sum(u.min() for u in assemble(space, techniques, None).live_usage))
        if label not in self._least or usage < self._least[label][0]:
            self._least[label] = usage, space, mesh, techniques

    def _smallest(self, label: str) -> Candidate | None:
        """The plan that needs about the least memory of those that did not fit: what an error quotes when nothing fits."""
        if label not in self._least:
            return None
        _, space, mesh, techniques = self._least[label]
        problem = assemble(space, techniques, None)
        by_size = replace(problem, cost=tuple(u + 0 * c for c, u in zip(problem.cost, problem.live_usage, strict=True)),
                          tables=tuple(np.where(t >= FORBIDDEN, t, 0) for t in problem.tables))  # fmt: skip
        solved = self._solve(by_size)
        return self._candidate(space, mesh, techniques, problem, label, solved) if solved else None

    def _candidate(self, space: Space, mesh: Mesh, techniques: Techniques, problem: Problem, label: str,
                   solved: tuple[tuple[int, ...], float | None, str]) -> Candidate:  # fmt: skip
        """Price a solution as a whole plan."""
        choice, bound, status = solved
        objective = evaluate(problem, choice).cost / PICO
        plan = Plan(mesh.shape, splits_of(space, choice), techniques.zero, tuple(a for a, _ in mesh.shape), techniques.recompute, techniques.microbatches,
                    space.base.runs)  # fmt: skip
        cost, _, _ = price_plan(space.base, plan, space.pricer)
        candidate = Candidate(label, mesh, plan, cost, techniques, objective, (bound or 0.0) / PICO, status)
        self.details[id(candidate)] = (space, choice, problem, space.base)
        self._tried.append(candidate)
        return candidate

    def _report(self, best: Candidate | None) -> None:
        if self.progress and best:
            self.progress("search", best.cost.step_time_s, min(self.bounds, default=None))

    def fixed_splits(self, base: Base, mesh: Mesh) -> dict[int, tuple[Split, ...]]:
        """Batch split only, over every axis of the mesh."""
        return batch_only(base, mesh.shape)

    def _baselines(self) -> dict[str, Candidate]:
        """data_parallel, zero3, megatron and replicated, each tuned over microbatches, recompute and optimizer level under the same limit."""
        request, out = self.request, {}
        n = request.topology.devices
        one = pinned_mesh(request.topology, {"data": n})
        rows: list[tuple[str, Mesh, Callable[[Base, Mesh], Mapping[int, tuple[Split, ...]]], tuple[int, ...]]] = [
            ("data_parallel", one, lambda b, m: batch_only(b, m.shape), (0, 1) if self.training else (0,)),
            ("replicated", one, lambda b, m: {i: (Split(),) for i in range(len(b.graph.nodes)) if b.shared[i] == i}, (0,)),
        ]
        if self.training:
            rows.insert(1, ("zero3", one, lambda b, m: batch_only(b, m.shape), (3,)))
        if n > 1:
            for mesh in meshes(request.topology):
                names = [a.name for a in mesh.axes]
                if "model" in names and len(names) <= 2 and mesh.axes[-1].size <= request.topology.levels[0].size:
                    rows.append(("megatron", mesh, megatron_only, (0, 1) if self.training else (0,)))
        for label, mesh, allowed, levels in rows:
            best = self._baseline(label, mesh, allowed, levels)
            old = out.get(label)
            if best and (old is None or self._rank(best) < self._rank(old)):
                out[label] = best
        return out

    def _rank(self, c: Candidate) -> tuple:
        fits = c.cost.memory.total <= self.request.limit_bytes
        return (not fits, c.key(self.request) if fits else (c.cost.memory.total,))

    def _baseline(self, label: str, mesh: Mesh, allowed: Callable, levels: tuple[int, ...]) -> Candidate | None:
        """The best fitting variant, else the one that needs the least memory."""
        tried: list[Candidate] = []
        for micro in (1, *[m for m in (2, 4, 8, 16, 32) if self.training and self.model.batch % m == 0 and self._divides(m)]):
            base = self.base(micro)
            pricer = self._pricer(mesh)
            space = build_space(base, pricer, allowed=allowed(base, mesh), zero_axes=tuple(a for a in pricer.sizes if a == "data") or tuple(pricer.sizes))
            fitting = False
            for recompute in RECOMPUTE if self.training and base.runs else ("none",):
                for zero in levels:
                    techniques = Techniques(zero, recompute, micro)
                    worth = min((c.cost.step_time_s for c in tried if c.cost.memory.total <= self.request.limit_bytes), default=np.inf)
                    candidate = self._one(space, mesh, techniques, label, worth)
                    if candidate:
                        tried.append(candidate)
                        fitting = fitting or candidate.cost.memory.total <= self.request.limit_bytes
                if fitting:
                    break
            if fitting or label == "replicated":
                break
        if not any(c.cost.memory.total <= self.request.limit_bytes for c in tried):
            tried += [c for c in [self._smallest(label)] if c]
        return min(tried, key=self._rank, default=None)


def batch_only(base: Base, mesh: Iterable[tuple[str, int]], axes: tuple[str, ...] | None = None) -> dict[int, tuple[Split, ...]]:
    """Per class of nodes the one split that cuts the batch over the axes (as many of them as divide it)."""
    sizes = dict(mesh)
    used = [a for a in (tuple(sizes) if axes is None else axes) if sizes[a] > 1]
    out = {}
    factors = batch_factors(base)
    for i in range(len(base.graph.nodes)):
        if base.shared[i] != i:
            continue
        rule, split = base.rules[i], Split()
        for k in range(len(used), 0, -1):
            trial = Split.of({factors[i]: used[:k]}) if factors[i] else Split()
            if legal(rule, trial, sizes, Limits()):
                split = trial
                break
        out[i] = (split,)
    return out


def megatron_only(base: Base, mesh: Mesh) -> dict[int, tuple[Split, ...]]:
    """Batch over "data"; over "model" anything but the batch (heads, columns, rows, vocabulary), nothing left pending."""
    sizes = dict(mesh.shape)
    data = batch_only(base, mesh.shape, tuple(a for a in sizes if a == "data"))
    factors = batch_factors(base)
    out = {}
    for i, (fixed,) in data.items():
        rule = base.rules[i]
        kept = []
        for s in candidates(rule, {a: n for a, n in sizes.items() if a != "data"}, Limits(pending=False)):
            both = {**{f: list(a) for f, a in fixed.pairs}}
            if any(f == factors[i] and f for f, _ in s.pairs) or s.axes(PENDING):
                continue
            for f, a in s.pairs:
                both[f] = both.get(f, []) + list(a)
            joined = Split.of(both)
            if legal(rule, joined, sizes, Limits()):
                kept.append(joined)
        out[i] = tuple(kept) or (fixed,)
    return out
