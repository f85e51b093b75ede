"""Best-first search over meshes, microbatches, recompute and ZeRO stages of one family of
plans.

A leaf is (mesh, techniques). Its lower bound is raised in stages, and the leaf of the least bound
goes on first:

    unseen    products alone, of all leaves of a mesh at once
              (planner.search.relaxation.Arithmetic): its space is built when the search comes to it
    mesh      the whole batch in one piece, no memory limit, any level: one exact elimination a mesh
              (planner.space.assemble, `uncut`)
    fitting   the same, of a leaf whose least memory is within the limit
    free      the same under the leaf's own techniques
    bounded   the same under the memory limit; where tables would be too large a rough bound, made
              tight where it is near the best plan
    priced    the space of its microbatches, the chosen solver, and the price of the whole plan

Splitting the batch further, recomputing more and limiting memory only ever cost time, so every
stage bounds the next, and a leaf priced without memory binding bounds all leaves of its mesh and
level with as many microbatches and as much recomputation (with pipeline stages, where more
microbatches also fill the pipeline better, those with the same number). Leaves whose least memory
exceeds the limit are dropped unsolved. The search ends when no bound is below the best price: what
is left bounds the optimum. In the end bounds that were left rough, or of leaves that were given up,
are raised as far as they are the least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.execution.techniques import MAX_ZERO_STAGE, RECOMPUTE
from planner.machine.topology import Mesh
from planner.search.leaf import BOUNDED, LEVEL_ORDER, MESH, PRICED, UNSEEN, Asked, Leaf
from planner.search.leaf_bounds import SAME, LeafBounds
from planner.search.relaxation import Relaxation
from planner.search.saved_collective_bounds import least_surely
from planner.solvers.problem import evaluate
from planner.space.assemble import (
    PICO,
    Techniques,
    assemble,
    has_liveness,
    least_usage,
    least_working,
    usage_of,
)
from planner.space.variables import Space

if TYPE_CHECKING:
    from planner.search.request import Candidate
    from planner.search.solving import Solving

LONG_S = 5.0
"""Steps longer than this are bounded in nanoseconds."""
PATIENCE = 32
"""Leaves solved in a row without a better plan, of those with pipeline stages and of those without,
before the search is content with that kind; the bounds of those left stay part of the answer."""
WIDE_GAP, LONG_PATIENCE = 0.1, 128
"""The same while the plan is further than this from the bound: large models whose memory binds meet
many leaves that cannot be made to fit first."""
ROUNDS = 3
"""Bounded solves of a leaf, each with the room that the whole plan's temporaries leave."""
NEARLY = 0.97
"""Before a leaf is solved its bound is tightened where it is no further below the best plan: less
often it pays."""
SETTLING = 2_000_000_000
"""Entries of tables that may be worked through, when all is solved, to raise bounds of leaves that
were not."""
DEEPER, POOL = 200, 1_000_000_000
"""A leaf whose solve the work limit cut is solved again with so many times the work, least bounds
first, until a family has spent so many units on that."""


class BestFirst:
    """One family: its meshes, the splits it allows (None: all), its ZeRO stages. pinned: the
    user's pins hold for it (not for baselines). alone: no other family has its spaces, which are
    made of what it allows and nothing else."""

    def __init__(
        self,
        search: Solving,
        label: str,
        meshes: Sequence[Mesh],
        allowed: Callable[[GraphFacts, Mesh], dict] | None,
        levels: Sequence[int],
        limit_bytes: int | None = None,
        *,
        pinned: bool = True,
        alone: bool = False,
    ) -> None:
        self.search, self.label, self.meshes, self.allowed, self.pinned = (
            search,
            label,
            tuple(meshes),
            allowed,
            pinned,
        )
        self._own = allowed if alone else None
        self.limit = search.request.limit_bytes if limit_bytes is None else limit_bytes
        self._beyond = math.inf
        """The least that was proven of a leaf without the limit of memory when the limit first
        raised its bound, or left nothing of it."""
        self.levels = [k for k, z in enumerate(LEVEL_ORDER) if z in levels]
        self.best: Candidate | None = None
        self.priced: list[Candidate] = []
        self.closed: list[float] = []  # bounds of leaves that were priced
        self.unfinished: list[Leaf] = []  # priced, but the work limit cut a solve
        self.open: list[Leaf] = []
        self.loose: list[
            Leaf
        ] = []  # given up, or priced under a rough bound: it may still be raised
        self._first: dict[int, Space | None] = {}
        self._spaces: dict[tuple[int, int], Space | None] = {}  # mesh, microbatches
        self._worth = math.inf
        self._cut = 0.0
        """Bounds hold from here on only: 0 until every leaf is known, and while one is worked on
        its bound."""
        self._ended: float | None = None
        self.unit_s = 1 / PICO
        """Unit of the relaxed problems' costs: nanoseconds where picoseconds would leave the range
        of exact floats."""
        self._bounds = LeafBounds(self.limit)
        self._none: set[tuple[int, Techniques]] = set()
        """Leaves of which nothing fits."""

    @property
    def _copies(self) -> int:
        """Microbatches that run at the same time in the family's plans."""
        return max(1, self.search.request.copies) if self.pinned else 1

    @property
    def memory_first(self) -> bool:
        """Whether memory is minimised (bounds are then bytes)."""
        return self.search.request.objective == "memory"

    @property
    def empty(self) -> bool:
        """Whether no mesh has a space, as far as was looked."""
        return not any(self._first.values())

    @property
    def _to_beat(self) -> float:
        return min(self._worth, self.search.value(self.best))

    def run(self, worth: float = math.inf) -> Candidate | None:
        """The best plan of the family below `worth` (seconds, or bytes), or None."""
        self.open = [
            Leaf(self._floor(mesh), 0, 0, 0, index, stage=UNSEEN)
            for index, mesh in enumerate(self.meshes)
        ]
        heapq.heapify(self.open)
        self._ended, self._worth, idle = None, worth, {True: 0, False: 0}
        while self.open:
            leaf = heapq.heappop(self.open)
            self._cut, kind = self._proves(leaf), self.meshes[leaf.mesh].stages > 1
            if idle[kind] >= (
                LONG_PATIENCE if leaf.bound < self._to_beat * (1 - WIDE_GAP) else PATIENCE
            ):
                self._give_up(leaf)
                continue
            if leaf.bound >= self._to_beat * (1 - SAME) or self.search.out_of_time():
                heapq.heappush(self.open, leaf)
                break
            if leaf.stage == UNSEEN:
                if self.search.progress and self.pinned:
                    self.search.looking(
                        self.meshes[leaf.mesh], len(self._first) + 1, len(self.meshes)
                    )
                self._expand(leaf.mesh)
                continue
            if leaf.stage == PRICED:
                reached = self._to_beat
                self._price(leaf)
                self._tell()
                idle[kind] = 0 if self._to_beat < reached else idle[kind] + 1
            elif self._raise(leaf):
                heapq.heappush(self.open, leaf)
        if self.pinned:  # the plan's own family, not a baseline's
            self._deepen()
            self._settle()
        self._cut = math.inf
        return self.best

    def _give_up(self, leaf: Leaf) -> None:
        """Look at no plan of a leaf, or of an unseen mesh: what bounds it is still a part of the
        bound."""
        if leaf.stage == UNSEEN:
            self.closed.append(leaf.bound)
        else:
            heapq.heappush(self.loose, leaf)

    def _deepen(self) -> None:
        """Solve again what the work limit cut, while the pool lasts: where memory binds, a first
        answer may be far above the leaf's optimum."""
        left = POOL
        while self.unfinished and left > 0 and not self.search.out_of_time():
            leaf = self.unfinished[0]
            if leaf.bound >= self._to_beat * (1 - SAME):
                break
            self._cut = self._proves(heapq.heappop(self.unfinished))
            if leaf.tight:
                left -= self._price(leaf, DEEPER)
            else:
                self._tighten(leaf)
                heapq.heappush(self.unfinished, leaf)
            self._tell()

    def _settle(self) -> None:
        """Raise the bounds of leaves that were given up, or priced under rough ones, least first,
        while they are what is not proven and the pool lasts."""
        if self.memory_first:
            return
        scratch = self.search.scratch
        ends, self._cut = scratch.work + SETTLING, math.inf
        others = self._left(loose=False)
        while (
            self.loose
            and self.loose[0].bound < min(others, self._to_beat) * (1 - SAME)
            and scratch.work < ends
            and not self.search.out_of_time()
        ):
            leaf = heapq.heappop(self.loose)
            self._cut = self._proves(leaf)
            if leaf.keeps:
                continue
            if leaf.stage < PRICED:
                possible = self._raise(leaf)
            elif possible := not leaf.tight:
                self._tighten(leaf)
            else:
                others = leaf.bound
                self.closed.append(others)
            if possible:
                heapq.heappush(self.loose, leaf)

    def bound(self) -> float:
        """No plan of the family is below this (seconds, or bytes). Worked out once where the search
        of it has ended."""
        if self._ended is not None:
            return self._ended
        found = min(self._cut, self._left())
        if not self.memory_first:
            found = least_surely(
                self._keeping(),
                self.limit,
                found,
                None if self.search.out_of_time() else self._space,
            )
        self._ended = found if math.isinf(self._cut) else None
        return found

    def bound_of_all(self) -> float:
        """No plan of the family is below this, whatever memory it takes."""
        # Plans that keep results in recomputed blocks are no faster than those that recompute
        # nothing, where there are such.
        alone = (
            least
            for least, leaf, relaxed in self._keeping()
            if "none"
            not in self.search.offered.recomputes(relaxed.space.base, self.meshes[leaf.mesh])
        )
        return min(self.bound(), self._beyond, *alone)

    def _tighten(self, leaf: Leaf) -> None:
        """Raise the bound of a leaf under the limit."""
        free = leaf.bound
        self._bounds.tighten(leaf, self._to_beat)
        self._limited(leaf, free)

    def _limited(self, leaf: Leaf, free: float) -> None:
        """Remember what was proven of a leaf without the limit, where the limit has raised that."""
        if leaf.bound > free and not leaf.keeps:
            self._beyond = min(self._beyond, free)

    def _left(self, *, loose: bool = True) -> float:
        """The least bound of all leaves but the one that is worked on."""
        leaves = (*self.open, *self.unfinished, *(self.loose if loose else ()))
        return min([*self.closed, *map(self._proves, leaves)], default=math.inf)

    def _proves(self, leaf: Leaf) -> float:
        """A leaf's bound; of those that keep results of collectives it is known in the end alone
        (planner.search.saved_collective_bounds)."""
        return leaf.bound if self.memory_first or not leaf.keeps else math.inf

    def _keeping(self) -> Iterator[tuple[float, Leaf, Relaxation]]:
        """Leaves that keep results of collectives, with what is known of them all the same: that of
        their mesh, and of the same without recomputation."""
        plain = {(m, z, k, n): v for m, z, r, k, n, v in self._bounds.known if r == 0}
        for index, relaxed in self._bounds.relaxed.items():
            for leaf in self._leaves(index):
                if leaf.keeps and (index, leaf.techniques) not in self._none:
                    least = self._bounds.least[index] + relaxed.waiting(leaf.micro, leaf.virtual)
                    yield (
                        max(least, plain.get((index, leaf.level, leaf.micro, leaf.virtual), 0.0)),
                        leaf,
                        relaxed,
                    )

    def _tell(self) -> None:
        """What is proven so far, for those who watch: of the plan's own family, in seconds."""
        if self.search.progress and self.pinned and not self.memory_first:
            self.search.bounded(self._left(), self)

    def smallest(self) -> Candidate | None:
        """The plan of least memory: what is shown when nothing fits. Leaves are taken by their
        least usage, which bounds what a plan of theirs needs, a leaf of each level and mesh in turn
        (the bound knows neither gathered weights nor what cuts go together), until a whole round of
        them finds none smaller.
        """
        best, idle = None, 0
        for index in range(len(self.meshes)):
            if index not in self._first:
                self._expand(index)
        sizes = [
            (least_usage(self._bounds.relaxed[index].space, leaf.techniques, uncut=True), leaf)
            for index in self._bounds.relaxed
            for leaf in self._leaves(index)
        ]
        rows: dict[tuple[int, int], list[tuple[float, Leaf]]] = {}
        for usage, leaf in sorted(sizes):
            rows.setdefault((leaf.level, leaf.mesh), []).append((usage, leaf))
        for usage, leaf in (
            row[k]
            for k in range(max(map(len, rows.values()), default=0))
            for row in rows.values()
            if k < len(row)
        ):
            size = best.cost.memory.total if best else math.inf
            if idle > len(rows) or (best is not None and self.search.out_of_time()):
                break
            if usage >= size:
                continue
            space = self._space(leaf)
            found = (
                self.search.price_smallest(
                    space, self.meshes[leaf.mesh], leaf.techniques, self.label, self._copies, size
                )
                if space
                else None
            )
            idle += 1
            if found is not None:
                self.priced.append(found)
            if found is not None and found.cost.memory.total < size:
                best, idle = found, 0
        return best

    def _expand(self, index: int) -> None:
        """All leaves of a mesh that may be better than the best plan, at what bounds them all;
        whether they fit is looked at when the search comes to them."""
        space = self._first[index] = self._large(self.meshes[index])
        if space is None:
            return
        self._bounds.relaxed[index] = Relaxation(space, self.search.scratch)
        levels = sorted(LEVEL_ORDER[k] for k in self._levels(self.meshes[index]))
        bound = self._bounds.least[index] = (
            0.0
            if self.memory_first or not levels
            else self._bounds.relaxed[index].least(levels, self._to_beat)
        )
        if bound > LONG_S:
            self.unit_s = 1e-9
        beaten = math.inf
        for leaf in self._leaves(index):
            if self.memory_first:
                leaf.bound = least_usage(space, leaf.techniques, uncut=True)
            if leaf.bound < self._to_beat * (1 - SAME):
                heapq.heappush(self.open, leaf)
            else:
                beaten = min(beaten, self._proves(leaf))
        self.closed.append(beaten)
        self._tell()

    def _levels(self, mesh: Mesh) -> list[int]:
        """ZeRO stages that go with a mesh."""
        most = (
            max(MAX_ZERO_STAGE[s] for s, _ in self.search.offered.schedules(mesh))
            if mesh.stages > 1
            else max(LEVEL_ORDER)
        )
        return [k for k in self.levels if LEVEL_ORDER[k] <= most]

    def _leaves(self, index: int) -> Iterator[Leaf]:
        """The leaves of a mesh that was expanded, each with what bounds all levels of it in
        seconds."""
        mesh, offered, relaxed = (
            self.meshes[index],
            self.search.offered,
            self._bounds.relaxed[index],
        )
        again = {r: relaxed.again(r) for r in offered.recomputes(relaxed.space.base, mesh)}
        for micro, (schedule, virtual) in product(
            offered.microbatches(mesh), offered.schedules(mesh)
        ):
            if virtual > 1 and micro % mesh.stages:
                continue
            once = self._bounds.least[index] + relaxed.waiting(micro, virtual)
            for recompute, more in again.items():
                for level in self._levels(mesh):
                    yield Leaf(
                        once + more,
                        RECOMPUTE.index(recompute),
                        micro,
                        level,
                        index,
                        schedule=schedule,
                        virtual=virtual,
                    )

    def _floor(self, mesh: Mesh) -> float:
        """What is known of a mesh before its space is built."""
        counts = self.search.offered.microbatches(mesh)
        return self.search.floor(mesh, max(counts)) if counts and not self.memory_first else 0.0

    def _large(self, mesh: Mesh) -> Space | None:
        """The space that all leaves of a mesh are bounded in: of the largest microbatches that all
        of theirs divide."""
        parts = math.gcd(*self.search.offered.microbatches(mesh))
        if not parts:
            return None
        parts = parts if self.search.base(parts) else 1
        base = self.search.base(parts)
        if self._own is not None and base is not None:
            return self.search.space(
                mesh, parts, None, self.pinned, self._own(base, Mesh(mesh.inner))
            )
        return self.search.space(mesh, parts, self.allowed, self.pinned)

    def _space(self, leaf: Leaf) -> Space | None:
        """The space of a leaf's microbatches, of what may be in a better plan. Nodes are numbered
        alike only in graphs that were derived from one another."""
        first, key = self._first[leaf.mesh], (leaf.mesh, leaf.micro)
        if key not in self._spaces:
            mesh, base, allowed = self.meshes[leaf.mesh], self.search.base(leaf.micro), self.allowed
            among = (
                self._bounds.relaxed[leaf.mesh].splits if self.search.request.pins.empty else None
            )
            if first is None or base is None or base.shared is not first.base.shared:
                among = None
            if (
                among is None
                and base is not None
                and allowed is not None
                and (self._own or not self.pinned)
            ):  # nothing else is asked for
                among, allowed = allowed(base, Mesh(mesh.inner)), None
            self._spaces[key] = self.search.space(mesh, leaf.micro, allowed, self.pinned, among)
        return self._spaces[key]

    def _raise(self, leaf: Leaf) -> bool:
        """Raise the leaf's bound to what others that were priced prove of it, or to that of its
        next stage; whether a plan of it is possible."""
        if (
            leaf.stage == MESH
            and least_usage(self._bounds.relaxed[leaf.mesh].space, leaf.techniques, uncut=True)
            > self.limit
        ):
            self._beyond = min(self._beyond, self._proves(leaf))
            return False
        if not self.memory_first and leaf.stage > MESH:
            if (known := self._bounds.by_others(leaf)) > leaf.bound:
                leaf.bound = known
                return True
            free = leaf.bound
            leaf.bound = max(leaf.bound, self._bounds.at_stage(leaf, self._to_beat))
            if leaf.stage == BOUNDED:
                self._limited(leaf, free)
            while (
                leaf.stage == BOUNDED
                and not leaf.tight
                and NEARLY * self._to_beat <= leaf.bound < self._to_beat
            ):
                self._tighten(leaf)
        leaf.tight |= self.memory_first  # bounds in bytes are as they are
        leaf.stage += 1
        return True

    def _price(self, leaf: Leaf, deeper: int = 1) -> int:
        """Solve the leaf, price what it finds, and keep the bound of what it proved; the work spent
        on solving. deeper: times the usual work limit."""
        asked = Asked(self.search, deeper)
        bound = self._priced(leaf, asked)
        if bound is None or bound > leaf.bound:  # under the limit
            self._beyond = min(self._beyond, self._proves(leaf))
        if bound is not None and asked.cut and deeper == 1:
            leaf.bound = bound
            heapq.heappush(self.unfinished, leaf)
        elif bound is not None:
            leaf.bound = bound
            heapq.heappush(self.loose, leaf)
        else:
            self._none.add((leaf.mesh, leaf.techniques))
        return asked.work

    def _priced(self, leaf: Leaf, asked: Asked) -> float | None:
        """The bound of a leaf after it was solved, and priced where that may pay; None where
        nothing of it fits. The room shrinks by what the whole plan needs beside."""
        search, limit = self.search, self.limit
        space = self._space(leaf)
        if space is None or least_usage(space, leaf.techniques) > limit:
            return None
        if self.memory_first:
            self._take(
                search.price_smallest(
                    space,
                    self.meshes[leaf.mesh],
                    leaf.techniques,
                    self.label,
                    self._copies,
                    self._to_beat,
                )
            )
            return leaf.bound
        worth = self._to_beat
        problem = assemble(space, leaf.techniques, None, unit_s=self.unit_s)
        solved = asked.solve(problem)
        if solved.status == "infeasible":
            return None
        if solved.bound is not None:
            unlimited = search.proven(
                problem, solved, self.unit_s
            )  # a bound under the memory limit says nothing of leaves that need less memory
            self._bounds.known.append(
                (leaf.mesh, leaf.level, leaf.recompute, leaf.micro, leaf.virtual, unlimited)
            )
            leaf.bound = max(leaf.bound, unlimited)
        bound = leaf.bound
        if not solved.choice:
            return bound
        verdict = evaluate(problem, solved.choice)
        if verdict.cost * self.unit_s >= worth:
            return bound
        room = most = limit - least_working(space, leaf.techniques)
        # the limit is first that of what is kept beside the least that any operator needs
        liveness = False
        for turn in range(ROUNDS + 1):
            if turn or verdict.peak_usage > most:
                if room <= 0:
                    return bound
                bounded = assemble(
                    space, leaf.techniques, room, unit_s=self.unit_s, liveness=liveness
                )
                solved = asked.solve(
                    bounded, worth / self.unit_s + len(bounded.cost) + len(bounded.edges)
                )  # costs are rounded
                whole = room == (limit if liveness else most)
                if whole and solved.status == "infeasible":
                    return None
                if whole and solved.bound is not None:
                    bound = max(bound, search.proven(bounded, solved, self.unit_s))
                if not solved.choice:
                    return bound
                verdict = evaluate(bounded, solved.choice)
                if verdict.cost * self.unit_s >= worth:
                    return bound
            # The working set is known before the whole plan is priced.
            excess = sum(usage_of(space, leaf.techniques, solved.choice)) - limit
            if excess > 0 and not liveness and has_liveness(space):
                room, liveness = limit, True
                continue
            if excess <= 0:
                candidate = search.price(
                    space,
                    self.meshes[leaf.mesh],
                    leaf.techniques,
                    solved,
                    self.label,
                    self.unit_s,
                    self._copies,
                )
                if candidate is None or self._take(candidate):
                    return bound
                excess = candidate.cost.memory.total - limit
            room = min(room, verdict.peak_usage) - excess
        return bound

    def _take(self, candidate: Candidate | None) -> bool:
        """Record a priced plan; whether it fits."""
        if candidate is None:
            return False
        self.priced.append(candidate)
        if candidate.cost.memory.total > self.limit:
            return False
        if self.search.value(candidate) < self.search.value(self.best):
            self.best = candidate
            self.search.report(candidate, self.pinned)
        return True
