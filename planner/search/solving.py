"""Solutions of solvers as whole, priced plans; time, progress and what has been proven so far.

What explores (planner.search.best_first and its neighbours) is given one of these; the outer search
(planner.search.search) is one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.execution.techniques import BESIDE, WAITING
from planner.machine.topology import Mesh
from planner.pins.pins import Pins
from planner.pricing.cost import Cost
from planner.pricing.frameworks.dispatch import beside
from planner.pricing.pricer import Pricer
from planner.pricing.written_out import ways_of_blocks
from planner.search.bucketing import price_with_buckets
from planner.search.keys import model_key, reading_key
from planner.search.request import TIE_MEMORY, Candidate, Progress, Request
from planner.search.stage_cuts import with_cuts
from planner.search.workspace import Workspace
from planner.solvers.exact.elimination import Scratch
from planner.solvers.problem import FORBIDDEN, Budget, Problem, Solution, evaluate
from planner.space.assemble import (
    PICO,
    assemble,
    has_liveness,
    least_usage,
    least_working,
    usage_of,
)
from planner.space.build import splits_of
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model
from planner.workload.user_loss import is_user_loss

WORK = {"dp": 2_000_000, "auto": 2_000_000}
"""Work units (table entries visited) of one solve: a hundredth of a second on tables of repeated
blocks. What it cuts keeps its bound, and the best of it is solved again
(planner.search.best_first)."""


def digest(problem: Problem) -> bytes:
    """A hash of all that solvers' answers follow from."""
    hashed = blake2b(digest_size=16)
    sizes = *map(len, problem.cost), *(t.shape for t in problem.tables), problem.usage_limit
    hashed.update(repr((sizes, problem.axis_size)).encode())
    weight = () if problem.weight is None else (problem.weight,)
    rest = problem.edges, problem.edge_table, problem.live_node, problem.live_span, *weight
    for arrays in (problem.cost, problem.tables, problem.live_usage, problem.axis_choice, rest):
        for array in arrays:
            hashed.update(array.tobytes())
    return hashed.digest()


class Solving(Workspace):
    """Asks solvers, prices what they answer, and says so to whoever watches."""

    def __init__(self, model: Model, request: Request, progress: Progress | None = None) -> None:
        super().__init__(model, request, self.out_of_time)
        self.progress = progress
        self.started = time.monotonic()
        self.stopped = ""
        self.scratch = Scratch()
        self.details: dict[
            int, tuple[Candidate, Space, tuple[int, ...], Problem]
        ] = {}  # by id; the candidate is kept, so that ids stay unique
        self._solved: dict[tuple[bytes, Budget], Solution] = {}
        """What solvers answered: ZeRO stages 1 and 2 are one problem in one microbatch."""
        self._best: Candidate | None = None
        self._at = "search"
        self._bounds: dict[int, float] = {}  # by id of an explorer

    @cached_property
    def _key(self) -> str:
        """What all that is kept of the model is kept under."""
        return model_key(self.model)

    def confirmed(self, microbatches: int) -> bool:
        """Whether a graph was derived rightly (`Model.confirm`): read once, then known to the cache
        for all searches of the model as it is."""
        cache = self.request.cache
        if (
            cache is None
            or is_user_loss(self.model.workload.loss)
            or not self.model.derived(microbatches)
        ):
            return self.model.confirm(microbatches)
        spare, right = cache.faults.spare, {"derived": "rightly"}
        if spare(
            "readings", lambda: cache.get(reading_key(self._key, microbatches)) == right, False
        ):
            return True
        if confirmed := self.model.confirm(microbatches):
            spare(
                "readings kept",
                lambda: cache.put(reading_key(self._key, microbatches), right),
                None,
            )
        return confirmed

    def out_of_time(self) -> bool:
        """Whether the time limit has passed (remembered as `stopped`)."""
        limit = self.request.time_limit_s
        if limit is not None and time.monotonic() - self.started > limit:
            self.stopped = "time"
        return bool(self.stopped)

    def value(self, c: Candidate | None) -> float:
        """What is minimised: seconds, or bytes."""
        if c is None:
            return np.inf
        return c.cost.memory.total if self.request.objective == "memory" else c.cost.step_time_s

    def report(self, candidate: Candidate, pinned: bool) -> None:
        """Tell the caller about a better plan that may be the answer. pinned: it respects the
        user's pins and mode."""
        if (
            self.progress
            and (pinned or self.offered.free)
            and (self._best is None or self.value(candidate) < self.value(self._best))
        ):
            self._best = candidate
            self.progress(self._at, candidate.cost.step_time_s, self._bound)

    def solve(self, problem: Problem, work_factor: int = 1, below: float = np.inf) -> Solution:
        """The requested solver's answer; its choice may be empty. work_factor: times the usual work
        limit; below: as in `Budget`."""
        left_s = None
        if self.request.time_limit_s is not None:
            left_s = max(0.05, self.request.time_limit_s - (time.monotonic() - self.started))
        name = self.request.solver if self.request.solver != "auto" else "dp"
        budget = Budget(
            time_limit_s=left_s,
            work=work_factor * WORK[name] if name in WORK else None,
            seed=self.request.seed,
            below=below,
        )
        if left_s is not None:
            return self._ask(problem, name, budget)
        key = digest(problem), budget
        if key not in self._solved:
            self._solved[key] = self._ask(problem, name, budget)
        return self._solved[key]

    @staticmethod
    def _ask(problem: Problem, name: str, budget: Budget) -> Solution:
        """A solver's answer; one that was interrupted hands the interruption on."""
        from planner.solvers import solve

        solution = solve(problem, name, budget)
        if solution.stopped == "interrupt":
            raise KeyboardInterrupt
        return solution

    @staticmethod
    def proven(problem: Problem, solution: Solution, unit_s: float = 1 / PICO) -> float:
        """A solver's bound in seconds, less what rounding to whole units may have added."""
        return max(
            0.0, ((solution.bound or 0.0) - 0.5 * (len(problem.cost) + len(problem.edges))) * unit_s
        )

    def looking(self, mesh: Mesh, number: int, of: int) -> None:
        """Which mesh is looked at now, for those who watch."""
        self._at = (
            f"mesh {number} of {of}"
            f" ({' x '.join(f'{name} {size}' for name, size in mesh.shape if size > 1) or 'one device'})"  # noqa: E501
        )
        if self.progress and self._best is not None:
            self.progress(self._at, self._best.cost.step_time_s, self._bound)

    def bounded(self, bound_s: float, family: object) -> None:
        """What a family has proven, for those who watch: no plan of it is below."""
        self._bounds[id(family)] = bound_s
        if self.progress and self._best is not None:
            self.progress(self._at, self._best.cost.step_time_s, self._bound)

    @property
    def _bound(self) -> float | None:
        """The least of what the families so far have proven, no more than the best plan takes; None
        before."""
        least = min(self._bounds.values(), default=0.0)
        return min(least, self._best.cost.step_time_s) if least and self._best is not None else None

    def offloading(self, offload: tuple[str, ...]) -> Self:
        """The same search with so much in the host's memory, in the time that is left."""
        return self._again(offload=offload)

    def with_blocks(self, way: str) -> Self:
        """The same search of programs that run their blocks in one way, in the time that is
        left."""
        return self._again(blocks=way)

    def under(self, pins: Pins) -> Self:
        """The same search under other pins, in the time that is left. Nobody watches it."""
        search = self._again(pins=pins)
        search.progress = None
        return search

    def _again(self, **changes: Any) -> Self:
        left_s = self.request.time_limit_s and max(
            0.0, self.request.time_limit_s - (time.monotonic() - self.started)
        )
        search = type(self)(
            self.model,
            replace(self.request, baselines=False, time_limit_s=left_s, **changes),
            self.progress,
        )
        search._bases, search._atlas, search._solved = self._bases, self._atlas, self._solved
        return search

    def price_smallest(
        self,
        space: Space,
        mesh: Mesh,
        techniques: Techniques,
        label: str,
        copies: int = 1,
        below: float = np.inf,
    ) -> Candidate | None:
        """The fastest of the plans that need the least memory under these techniques; None where
        that is not below so many bytes."""
        problem = assemble(space, techniques, None)
        by_size = replace(
            problem,
            cost=tuple(
                u + np.where(c >= FORBIDDEN, c, 0)
                for c, u in zip(problem.cost, problem.live_usage, strict=True)
            ),
            tables=tuple(np.where(t >= FORBIDDEN, t, 0) for t in problem.tables),
        )
        solved = self.solve(by_size)
        if not solved.choice:
            return None
        least = evaluate(problem, solved.choice).peak_usage
        if least + least_working(space, techniques) >= below:
            return None
        fastest = self.solve(replace(problem, usage_limit=least))
        solution = fastest if fastest.choice else replace(solved, bound=None)
        solution = self._less_at_once(space, techniques, solution, below)
        if (
            sum(usage_of(space, techniques, solution.choice)) >= below
        ):  # known before the whole plan is priced
            return None
        return self.price(space, mesh, techniques, solution, label, copies=copies)

    def _less_at_once(
        self, space: Space, techniques: Techniques, solution: Solution, below: float
    ) -> Solution:
        """Of forward passes, a choice with less at the point of most memory than one that keeps the
        least, as what lives only for a while weighs more there: where there is any that is below
        it and what is to be beaten, by halving what lies between that and what every choice
        needs."""
        if space.base.training or not has_liveness(space):
            return solution
        least = least_usage(space, techniques)
        least_found = min(sum(usage_of(space, techniques, solution.choice)), below)
        limit = least_found * (1 - TIE_MEMORY)
        while limit > least:
            solved = self.solve(assemble(space, techniques, limit, liveness=True))
            size = sum(usage_of(space, techniques, solved.choice)) if solved.choice else np.inf
            if size < least_found:
                solution, least_found = solved, size
            elif limit < least_found * (1 - 2 * TIE_MEMORY):
                least = limit
            else:
                break
            limit = min((least + least_found) / 2, least_found * (1 - TIE_MEMORY))
        return solution

    def with_recompute(self, candidate: Candidate, recompute: str) -> Candidate | None:
        """A priced plan with another way to recompute, all else as it is."""
        _, space, choice, _ = self.details[id(candidate)]
        return self.price(
            space,
            candidate.mesh,
            replace(candidate.techniques, recompute=recompute),
            Solution(choice, "feasible"),
            candidate.label,
            copies=candidate.plan.overlapped_microbatches,
            exchanges=candidate.plan.exchanges,
        )

    # Many parameters: a solution, and what of its plan no solver decides, by keyword.
    def price(
        self,
        space: Space,
        mesh: Mesh,
        techniques: Techniques,
        solved: Solution,
        label: str,
        unit_s: float = 1 / PICO,
        copies: int = 1,
        exchanges: str = WAITING,
    ) -> Candidate | None:
        """Price a solution as a whole plan; None where its blocks cannot be assigned to stages, or
        its exchanges cannot be as is pinned. unit_s: of the solution's bound; copies, exchanges:
        Plan.overlapped_microbatches, Plan.exchanges."""
        problem = assemble(space, techniques, self.request.limit_bytes)
        choice = tuple(int(x) for x in solved.choice)
        objective = evaluate(problem, choice).cost / PICO
        exchanges = self.request.pins.techniques.get("exchanges", exchanges)
        key = "price", mesh, techniques, choice, copies, exchanges
        if key not in space.memo:
            others = {"overlapped_microbatches": copies, "exchanges": exchanges}
            space.memo[key] = self._whole_plan(space, mesh, techniques, choice, **others)
        if space.memo[key] is None:
            return None
        plan, cost = space.memo[key]
        candidate = Candidate(
            label,
            mesh,
            plan,
            cost,
            techniques,
            objective,
            self.proven(problem, solved, unit_s),
            solved.status,
        )
        self.details[id(candidate)] = candidate, space, choice, problem
        self.take_up(space, choice)
        return candidate

    def _with_blocks(
        self, base: GraphFacts, plan: Plan, pricer: Pricer
    ) -> tuple[Plan, Cost] | None:
        """A plan with its blocks as is pinned, or else in the better way that fits, and its price;
        of ways that do not fit the one that takes the least."""
        request = self.request
        priced: list[tuple[Plan, Cost]] = []
        for way in ways_of_blocks(base, plan, pricer, request.only_blocks):
            priced.append(price_with_buckets(base, way, pricer, request.bucket))
            if priced[-1][1].memory.total <= request.limit_bytes:
                return priced[-1]
        return min(priced, key=lambda way_and_cost: way_and_cost[1].memory.total, default=None)

    def _whole_plan(
        self,
        space: Space,
        mesh: Mesh,
        techniques: Techniques,
        choice: tuple[int, ...],
        **others: Any,
    ) -> tuple[Plan, Cost] | None:
        """The plan of a choice and its price: searches under another memory limit, or of one mesh
        alone, come upon many of them again. others: fields of Plan."""
        plan = techniques.plan(
            mesh,
            splits_of(space, choice),
            space.base.runs,
            offload=self.offered.offloaded(space.base, mesh, techniques.recompute),
            **others,
        )
        if plan.exchanges == BESIDE and not beside(space.base, plan, self.request.runtime):
            return None
        try:
            plan = with_cuts(
                space.base.untied,
                plan,
                space.pricer,
                (self.request.limit_bytes, self.request.roomy_bytes),
                self.request.widths,
            )
            return self._with_blocks(space.base.untied, plan, self.pricer(mesh))
        except PlanError as e:
            if e.code != "P068":
                raise
            self.refused = e
            return None
