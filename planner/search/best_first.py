"""Best-first search over meshes, microbatches, recompute and ZeRO stages of one family of
plans.

A search node is (mesh, techniques). Its lower bound is raised in stages, and the node of the least
bound goes on first. A stage is called by what is done next:

    BOUND_BLOCKS        where there are many meshes, one node stands for all of a mesh, bounded by
                        its products alone (planner.search.relaxation.Arithmetic); the next bound is
                        that of EXPAND of products, norms and sums in repeated blocks alone
                        (`Workspace.heavy_in_blocks`), and of products outside of them
    EXPAND              one node stands for all of a mesh, bounded by its products alone, its
                        blocks, or what a search under another limit proved; its space is built, and
                        all are bounded by the whole batch in one piece, no memory limit, any ZeRO
                        stage: one exact elimination a mesh (planner.space.assemble, `uncut`). Where
                        the state of what is heavy leaves no plan that fits, it is put aside
    SPREAD              one node still stands for all of them, which are listed
    CHECK_FIT           dropped where its least memory exceeds the limit
    BOUND_ENDLESS       the whole batch under the node's own techniques; with pipeline stages as
                        endless microbatches, and what the bubble adds, and each microbatch's waits
                        for the host
    BOUND_MICROBATCHES  the same in the node's own microbatches
    BOUND_MEMORY        the same under the memory limit; a rough bound where tables would be too
                        large
    SOLVE               the space of its microbatches, the chosen solver, and the price of the whole
                        plan

Plans that save values by name go first (planner.search.named_nodes): one bound stands for all
policies of a node's mesh and techniques, and what they find leaves little of the rest.

Splitting the batch further, recomputing more and limiting memory only ever cost time, so every
stage bounds the next, and a search node priced without memory binding bounds all nodes of its mesh
and level with as many microbatches and as much recomputation (with pipeline stages, where more
microbatches also fill the pipeline better, those with the same number). The search ends when no
bound is below the best price: what is left bounds the optimum. In the end bounds that were left
rough, or of nodes that were given up, are raised as far as they are the least."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from planner.analysis.facts import GraphFacts
from planner.execution.save_policies import BLOCK
from planner.execution.techniques import MAX_ZERO_STAGE, RECOMPUTE
from planner.machine.topology import Mesh
from planner.search.launch_bounds import least_launch_s
from planner.search.named_nodes import NamedNodes, nearby, with_a_name_less
from planner.search.node_bounds import SAME, NodeBounds
from planner.search.relaxation import Relaxation
from planner.search.saved_collective_bounds import raised_lower_bound
from planner.search.search_node import (
    BOUND_BLOCKS,
    BOUND_ENDLESS,
    BOUND_MEMORY,
    CHECK_FIT,
    EXPAND,
    LEVEL_ORDER,
    SOLVE,
    SPREAD,
    NodeSolves,
    SearchNode,
)
from planner.solvers.problem import Problem, Solution, Verdict, evaluate
from planner.space.assemble import (
    PICO,
    Techniques,
    assemble,
    has_liveness,
    least_usage,
    least_working,
    may_write_out,
    usage_of,
)
from planner.space.variables import Space

if TYPE_CHECKING:
    from planner.search.request import Candidate
    from planner.search.solving import Solving

LONG_S = 5.0
"""Steps longer than this are bounded in nanoseconds."""
PATIENCE = 32
"""Search nodes solved in a row without a better plan, of those with pipeline stages and of those
without, before the search is content with that kind; the bounds of those left stay part of the
answer."""
WIDE_GAP, LONG_PATIENCE = 0.1, 128
"""The same while the plan is further than this from the bound: large models whose memory binds meet
many nodes that cannot be made to fit first. Of stages that are cut anywhere bounds know neither
where nor what runs again, and are far from every plan."""
ROUNDS = 3
"""Bounded solves of a search node, each with the room that the whole plan's temporaries leave."""
SETTLING = 2_000_000_000
"""Entries of tables that may be worked through, when all is solved, to raise bounds of nodes that
were not."""
WORK_FACTOR, SOLVE_AGAIN_WORK = 100, 200_000_000
"""A search node whose solve the work limit cut is solved again with so many times the work, least
bounds first, until so many units are spent on that: by a family and those of finer meshes that
follow it."""


MANY_MESHES = 128
"""From so many meshes on each is bounded by what is heavy in repeated blocks before its whole space
is built (a guess: most of them are then far from the best plan; of 91 meshes of Llama-3 70B on 512
devices they are not, and it took 3 % longer)."""


@dataclass(frozen=True)
class PlanFamily:
    """Which plans are searched: the splits it allows (None: all) at these ZeRO stages.

    pinned: the user's pins hold for it (not for baselines). alone: no other family has its spaces,
    which are made of what it allows and nothing else.
    """

    label: str
    allowed: Callable[[GraphFacts, Mesh], dict] | None
    levels: Sequence[int]
    pinned: bool = True
    alone: bool = False


class BestFirst:
    """The search of one family of plans on some meshes, within so many bytes (None: those of the
    request)."""

    def __init__(
        self,
        search: Solving,
        family: PlanFamily,
        meshes: Sequence[Mesh],
        limit_bytes: int | None = None,
    ) -> None:
        self.search, self.meshes = search, tuple(meshes)
        self.label, self.allowed, self.pinned = family.label, family.allowed, family.pinned
        self._own = family.allowed if family.alone else None
        self.limit = search.request.limit_bytes if limit_bytes is None else limit_bytes
        self._least_beyond_limit = math.inf
        """The least that was proven of a search node without the limit of memory when the limit
        first raised its bound, or left nothing of it."""
        self.levels = [k for k, z in enumerate(LEVEL_ORDER) if z in family.levels]
        self.best: Candidate | None = None
        self.priced: list[Candidate] = []
        self.finished_bounds: list[float] = []  # bounds of nodes that were priced
        self.unfinished: list[SearchNode] = []  # priced, but the work limit cut a solve
        self.solve_again_work = SOLVE_AGAIN_WORK  # left for these
        self.open: list[SearchNode] = []
        self.to_raise: list[
            SearchNode
        ] = []  # given up, or priced under a rough bound: it may still be raised
        self._large: list[SearchNode] = []
        """Meshes of which nothing fits, each as the node that stands for it."""
        self._mesh_spaces: dict[int, Space | None] = {}
        self._spread_meshes: set[int] = set()
        """Those whose nodes are listed: of others what bounds the mesh bounds them all."""
        self._spaces: dict[tuple[int, int], Space | None] = {}  # mesh, microbatches
        self._worth = math.inf
        self._holds_from = 0.0
        """Bounds hold from here on only: 0 until every node is known, and while one is worked on
        its bound."""
        self._final_bound: float | None = None
        self.unit_s = 1 / PICO
        """Unit of the relaxed problems' costs: nanoseconds where picoseconds would leave the range
        of exact floats."""
        self._bounds = NodeBounds(self.limit)
        self._named: NamedNodes | None = None
        self._cut_by_name: list[SearchNode] = []
        """Policies of names, priced, of which the work limit cut a solve."""
        self._impossible: set[tuple[int, Techniques]] = set()
        """Search nodes of which nothing fits."""

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
        return not self._large and not any(self._mesh_spaces.values())

    @property
    def _to_beat(self) -> float:
        return min(self._worth, self.search.value(self.best))

    def run(self, worth: float = math.inf) -> Candidate | None:
        """The best plan of the family below `worth` (seconds, or bytes), or None."""
        self.open = [
            SearchNode(self._floor(mesh), 0, 0, 0, index, stage=self._first_stage(mesh))
            for index, mesh in enumerate(self.meshes)
        ]
        heapq.heapify(self.open)
        self._final_bound, self._worth, idle = None, worth, {True: 0, False: 0}
        if self._copies == 1:
            self._save_by_name()
        while self.open:
            node = heapq.heappop(self.open)
            self._holds_from, kind = self._lower_bound(node), self.meshes[node.mesh].stages > 1
            if node.stage >= SPREAD and self._renew(node):
                heapq.heappush(self.open, node)
                continue
            if (
                node.stage == SPREAD
                and node.bound < self._to_beat * (1 - SAME)
                and not self.search.out_of_time()
            ):
                self._spread(node.mesh)
                continue
            if idle[kind] >= self._patience(node):
                self._give_up(node)
                continue
            if node.bound >= self._to_beat * (1 - SAME) or self.search.out_of_time():
                heapq.heappush(self.open, node)
                break
            if node.stage == BOUND_BLOCKS:
                self._bound_blocks(node)
                heapq.heappush(self.open, node)
                continue
            if node.stage == EXPAND:
                self._expand_unless_large(node)
                continue
            if node.stage == SOLVE:
                reached = self._to_beat
                self._price(node)
                self._report_bound()
                idle[kind] = 0 if self._to_beat < reached else idle[kind] + 1
            elif self._raise(node):
                heapq.heappush(self.open, node)
        if self.pinned:  # the plan's own family, not a baseline's
            self._solve_again()
            self._raise_remaining()
            if self._copies > 1:  # such plans are priced below their bounds
                self._save_by_name()
            self._vary_names()
        for space, choice in self._bounds.choices(self._to_beat):
            self.search.take_up(space, choice)
        self._holds_from = math.inf
        return self.best

    def _renew(self, node: SearchNode) -> bool:
        """Relax a node's mesh anew where the best plan is much faster than when it was last;
        whether the node is to be bounded again."""
        if self.memory_first or node.bound >= self._to_beat * (1 - SAME):
            return False
        levels = self._zero_stages(self.meshes[node.mesh])
        again = self._bounds.renew(node, levels, self._to_beat)
        if again and node.stage > CHECK_FIT:
            node.stage, node.tight = BOUND_ENDLESS, False
        return again

    def _patience(self, node: SearchNode) -> int:
        """How many search nodes are solved in a row without a better plan before this one is given
        up."""
        near = node.bound >= self._to_beat * (1 - WIDE_GAP)
        return PATIENCE if near or self._cut_anywhere(node.mesh) else LONG_PATIENCE

    def _cut_anywhere(self, index: int) -> bool:
        """Whether pipeline stages of a mesh are cut anywhere."""
        base = self.search.base(1) if self.meshes[index].stages > 1 else None
        return base is not None and base.dealt is None

    def _give_up(self, node: SearchNode) -> None:
        """Look at no plan of a search node, or of an unseen mesh: what bounds it is still a part of
        the bound."""
        if node.stage <= SPREAD:
            self.finished_bounds.append(node.bound)
        else:
            heapq.heappush(self.to_raise, node)

    def _solve_again(self) -> None:
        """Solve again what the work limit cut, while the pool lasts: where memory binds, a first
        answer may be far above the node's optimum."""
        while self.unfinished and not self._spent:
            node = self.unfinished[0]
            if node.bound >= self._to_beat * (1 - SAME):
                break
            self._holds_from = self._lower_bound(heapq.heappop(self.unfinished))
            if node.tight:
                self.solve_again_work -= self._price(node, WORK_FACTOR)
            else:
                self._tighten(node)
                heapq.heappush(self.unfinished, node)
            self._report_bound()

    @property
    def _spent(self) -> bool:
        """Whether no search node is solved again: the work for that, or time, is over."""
        return self.solve_again_work <= 0 or self.search.out_of_time()

    def _raise_remaining(self) -> None:
        """Raise the bounds of nodes that were given up, or priced under rough ones, least first,
        while they are what is not proven and the pool lasts."""
        if self.memory_first:
            return
        scratch = self.search.scratch
        ends, self._holds_from = scratch.work + SETTLING, math.inf
        others = self._least_open_bound(to_raise=False)
        while (
            self.to_raise
            and self.to_raise[0].bound < min(others, self._to_beat) * (1 - SAME)
            and scratch.work < ends
            and not self.search.out_of_time()
        ):
            node = heapq.heappop(self.to_raise)
            self._holds_from = self._lower_bound(node)
            if node.saves_collectives:
                continue
            if node.stage < SOLVE:
                possible = self._raise(node)
            elif possible := not node.tight:
                self._tighten(node)
            else:
                others = node.bound
                self.finished_bounds.append(others)
            if possible:
                heapq.heappush(self.to_raise, node)

    def bound(self, most: float = math.inf) -> float:
        """No plan of the family is below this (seconds, or bytes), as far as that is below `most`.
        Worked out once where the search of it has ended."""
        if self._final_bound is not None:
            return min(self._final_bound, most)
        least = min(self._holds_from, self._least_open_bound())
        if not self.memory_first:
            least = min(least, self._by_name.bound)
            own = None if self.search.out_of_time() else self._space
            least = min(least, most)
            least = raised_lower_bound(self._saving_collectives(), self.limit, least, own)
        if math.isinf(self._holds_from) and least < most:
            self._final_bound = least
        return min(least, most)

    def bound_of_all(self, bound: float) -> float:
        """No plan of the family is below this, whatever memory it takes, as far as that is below
        what is proven under the limit of all families."""
        self._bound_large(bound)
        least = min(bound, self._least_beyond_limit)
        if self.memory_first:
            return least
        # Plans that keep results in recomputed blocks copy less of what is saved than those that
        # recompute nothing: they may be faster, and are bounded by themselves.
        least = min(least, self._by_name.bound_of_all)
        return raised_lower_bound(self._saving_collectives(), math.inf, least, None)

    @property
    def _by_name(self) -> NamedNodes:
        """Search nodes that save values by name: none where that is not for the search to say."""
        if self._named is not None:
            return self._named
        nodes = list[tuple[float, SearchNode]]()
        for index, relaxed in self._bounds.relaxed.items() if self.pinned else ():
            if not self.search.offered.saves_by_name(relaxed.space.base, self.meshes[index]):
                continue
            if index not in self._spread_meshes and self._bounds.least[index] >= self._to_beat:
                continue  # bounded by the node that stands for the mesh
            nodes += self._nodes_by_name(index)
        return NamedNodes(
            nodes, self._bounds.relaxed, self.limit, self.search.offered.offloads_by_name
        )

    def _nodes_by_name(self, index: int) -> list[tuple[float, SearchNode]]:
        """The nodes of a mesh that was expanded that each stand for every policy of names, with
        what is known of them."""
        relaxed, least = self._bounds.relaxed[index], self._bounds.least[index]
        return [
            (least + relaxed.bubble_s(node.micro, node.virtual, node.schedule), node)
            for node in self._nodes_of(index)
            if node.techniques.recompute == BLOCK
        ]

    def _save_by_name(self) -> None:
        """Search the nodes that save values by name, before all others: each stands for every
        policy of its mesh and techniques, and what they find leaves little of the others. Meshes
        are expanded as their bounds are the least."""
        if self.memory_first or not self.pinned:
            return
        base, offered = self.search.base(1), self.search.offered
        named = self._named = self._by_name
        if base is not None:
            named.meshes = [
                node
                for node in sorted(self.open)
                if node.stage <= EXPAND and offered.saves_by_name(base, self.meshes[node.mesh])
            ]
        waiting = {node.mesh for node in named.meshes}
        self.open = [node for node in self.open if node.mesh not in waiting]
        named.search(
            self._expand_by_name,
            lambda: self._to_beat,
            self._space,
            self._price_by_name,
            self.search.out_of_time,
        )
        self.open += named.meshes
        heapq.heapify(self.open)
        for node in sorted(self._cut_by_name):
            if node.bound >= self._to_beat * (1 - SAME) or self._spent:
                break
            solves = NodeSolves(self.search, WORK_FACTOR)
            self._priced(node, solves)
            self.solve_again_work -= solves.work
        self._report_bound()

    def _expand_by_name(self, node: SearchNode) -> list[tuple[float, SearchNode]] | None:
        """Do what is next for a node that stands for a mesh: the nodes that save values by name
        where it was expanded, None where its bound was raised."""
        if node.stage == BOUND_BLOCKS:
            self._bound_blocks(node)
            return None
        self._expand_unless_large(node)
        return self._nodes_by_name(node.mesh) if node.mesh in self._bounds.relaxed else []

    def _price_by_name(self, node: SearchNode) -> None:
        """Solve and price a policy of names: what is proven of all is `NamedNodes`' to say. One
        that saves nothing is solved again among the others."""
        if node.techniques.recompute == BLOCK:
            self._priced(node, NodeSolves(self.search, 1))
            return
        space, policy = self._space(node), node.techniques.recompute
        while policy and space is not None:
            priced = len(self.priced)
            self._solve_policy(node, policy)
            tried = self.priced[priced:]
            if not tried or any(c.cost.memory.total <= self.limit for c in tried):
                return
            # What no row of the problem has is more than is left: with a name less it may fit.
            policy = with_a_name_less(space, replace(node.techniques, recompute=policy))

    def _solve_policy(self, node: SearchNode, recompute: str) -> None:
        """Solve and price a node with a policy of names; one that the work limit cuts is kept, to
        be solved again."""
        policy = self.search.offered.policy(recompute)
        node = replace(node, recompute=len(RECOMPUTE), values=(*RECOMPUTE, policy))
        solves = NodeSolves(self.search, 1)
        bound = self._priced(node, solves)
        if bound is not None and solves.cut:
            self._cut_by_name.append(replace(node, bound=bound))

    def _vary_names(self) -> None:
        """Search around the best plan by single names."""
        if self.memory_first:
            return
        tried = set[tuple[int, str]]()
        while (best := self.best) is not None and not self.search.out_of_time():
            _, space, choice, _ = self.search.details[id(best)]
            if not self.search.offered.saves_by_name(space.base, best.mesh):
                return
            offered = self.search.offered
            offloads = offered.offloads_by_name and best.mesh.stages == 1
            beside = nearby(space, choice, best.techniques, self.limit, offloads)
            for policy in dict.fromkeys(map(offered.policy, beside)):
                if (id(space), policy) not in tried and self.best is best:
                    tried.add((id(space), policy))
                    other = self.search.with_recompute(best, policy)
                    if self.search.value(other) < self.search.value(best):
                        self._take(other)
            if self.best is best:
                return

    def _tighten(self, node: SearchNode) -> None:
        """Raise the bound of a search node under the limit."""
        free = node.bound
        self._bounds.tighten(node, self._to_beat)
        self._note_limit(node, free)

    def _note_limit(self, node: SearchNode, free: float) -> None:
        """Remember what was proven of a search node without the limit, where the limit has raised
        that."""
        if node.bound > free and not node.saves_collectives:
            self._least_beyond_limit = min(self._least_beyond_limit, free)

    def _least_open_bound(self, *, to_raise: bool = True) -> float:
        """The least bound of all search nodes but the one that is worked on."""
        nodes = (*self.open, *self.unfinished, *(self.to_raise if to_raise else ()))
        return min([*self.finished_bounds, *map(self._lower_bound, nodes)], default=math.inf)

    def _lower_bound(self, node: SearchNode) -> float:
        """A search node's bound; of those that keep results of collectives it is known in the end
        alone (planner.search.saved_collective_bounds)."""
        return node.bound if self.memory_first or not node.saves_collectives else math.inf

    def _saving_collectives(self) -> Iterator[tuple[float, SearchNode, Relaxation]]:
        """Search nodes that keep results of collectives, with what is known of them all the same:
        that of their mesh, and of the same without recomputation, less the copies of what that
        saves."""
        plain = {(m, z, k, n): v for m, z, r, k, n, v in self._bounds.known if r == 0}
        for index in sorted(self._spread_meshes):
            relaxed = self._bounds.relaxed[index]
            for node in self._nodes_of(index):
                if node.saves_collectives and (index, node.techniques) not in self._impossible:
                    least = self._bounds.least[index] + relaxed.bubble_s(
                        node.micro, node.virtual, node.schedule
                    )
                    key = index, node.level, node.micro, node.virtual
                    if key in plain:
                        least = max(least, plain[key] + _fewer_copies_s(relaxed, node))
                    yield least, node, relaxed

    def _report_bound(self) -> None:
        """What is proven so far, for those who watch: of the plan's own family, in seconds."""
        if self.search.progress and self.pinned and not self.memory_first:
            self.search.bounded(min(self._least_open_bound(), self._least_by_name()), self)

    def _least_by_name(self) -> float:
        """No plan that saves values by name is below this; by meshes alone while such plans were
        not searched yet."""
        if self._named is not None:
            return self._named.bound
        offered, least = self.search.offered, self._bounds.least
        return min(
            (
                least[index]
                for index, relaxed in self._bounds.relaxed.items()
                if offered.saves_by_name(relaxed.space.base, self.meshes[index])
            ),
            default=math.inf,
        )

    def smallest(self) -> Candidate | None:
        """The plan of least memory: what is shown when nothing fits. Search nodes are taken by
        their least usage, which bounds what a plan of theirs needs, a search node of each level and
        mesh in turn (the bound knows neither gathered weights nor what cuts go together), until a
        whole round of them finds none smaller."""
        best, idle = None, 0
        for index in range(len(self.meshes)):
            if index not in self._mesh_spaces:
                self._expand(index)
        sizes = [
            (least_usage(self._bounds.relaxed[index].space, node.techniques, uncut=True), node)
            for index in self._bounds.relaxed
            for node in self._nodes_of(index)
        ]
        rows: dict[tuple[int, int], list[tuple[float, SearchNode]]] = {}
        for usage, node in sorted(sizes):
            rows.setdefault((node.level, node.mesh), []).append((usage, node))
        for usage, node in (
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
            space = self._space(node)
            candidate = (
                self.search.price_smallest(
                    space, self.meshes[node.mesh], node.techniques, self.label, self._copies, size
                )
                if space
                else None
            )
            idle += 1
            if candidate is not None:
                self.priced.append(candidate)
            if candidate is not None and candidate.cost.memory.total < size:
                best, idle = candidate, 0
        return best

    def _first_stage(self, mesh: Mesh) -> int:
        """The stage that the search of a mesh begins with."""
        known = (mesh, self.pinned, self._zero_stages(mesh)) in self.search.least
        few = len(self.meshes) < MANY_MESHES or self.allowed is not None
        return EXPAND if few or known or self.memory_first else BOUND_BLOCKS

    def _bound_blocks(self, node: SearchNode) -> None:
        """Raise the bound of a mesh that was not expanded to that of what is heavy in blocks, and
        of products outside of them."""
        mesh, search = self.meshes[node.mesh], self.search
        levels, parts = self._zero_stages(mesh), self._large_parts(mesh)
        space = search.heavy_in_blocks(mesh, parts, self.pinned) if levels and parts else None
        if space is not None:
            outside, relaxed = search.outside_s(space), Relaxation(space, search.scratch)
            bound_s = outside + relaxed.least(levels, self._to_beat - outside)
            if bound_s < self._to_beat * (1 - SAME):
                bound_s += self._splitting_s(mesh, relaxed)
            node.bound = search.least[mesh, self.pinned, levels] = max(node.bound, bound_s)
        node.stage = EXPAND

    def _splitting_s(self, mesh: Mesh, relaxed: Relaxation) -> float:
        """What bubbles and waits for the host add at least (seconds), in whichever microbatches a
        mesh's plans run: fewer have the longer bubble, more wait the oftener."""
        offered = self.search.offered
        return min(
            (
                relaxed.bubble_s(micro, virtual, schedule)
                for micro, (schedule, virtual) in product(
                    offered.microbatches(mesh), offered.schedules(mesh)
                )
            ),
            default=0.0,
        )

    def _expand_unless_large(self, node: SearchNode) -> None:
        """Expand a mesh, or put the node that stands for it aside where nothing of it fits."""
        if self._too_large(self.meshes[node.mesh]):
            heapq.heappush(self._large, node)
        else:
            self._expand(node.mesh)

    def _too_large(self, mesh: Mesh) -> bool:
        """Whether the state of what is heavy in blocks, where that is known, leaves no plan of a
        mesh that fits."""
        counts = self.search.offered.microbatches(mesh)
        space = self.search.heavy.get((mesh, self._large_parts(mesh), self.pinned))
        if space is None or not counts:
            return False
        asked = product(
            reversed(self._zero_stages(mesh)),
            dict.fromkeys((max(counts), min(counts))),
            self.search.offered.schedules(mesh),
        )
        return not any(
            least_usage(space, Techniques(zero, "none", micro, *kind), uncut=True) <= self.limit
            for zero, micro, kind in asked
        )

    def _bound_large(self, below: float) -> None:
        """Look at meshes on which nothing fits, the least bounds first, as far as these are below:
        what is proven of plans that take more memory is then proven of their nodes."""
        while self._large and self._large[0].bound < min(below, self._least_beyond_limit):
            node = heapq.heappop(self._large)
            if self.search.out_of_time() or not self._relax(node.mesh):
                self._least_beyond_limit = node.bound
                continue
            self._spread_meshes.add(node.mesh)
            least = list(map(self._lower_bound, self._nodes_of(node.mesh)))
            base, mesh = self._bounds.relaxed[node.mesh].space.base, self.meshes[node.mesh]
            if self.search.offered.saves_by_name(base, mesh):
                least += [known for known, _ in self._nodes_by_name(node.mesh)]
            self._least_beyond_limit = min([self._least_beyond_limit, *least])

    def _expand(self, index: int) -> None:
        """All nodes of a mesh that may be better than the best plan, at what bounds them all;
        whether they fit is looked at when the search comes to them."""
        if self.search.progress and self.pinned:
            number = len(self._mesh_spaces) + 1
            self.search.looking(self.meshes[index], number, len(self.meshes))
        if not self._relax(index):
            return
        bound = self._bounds.least[index]
        if bound > LONG_S:
            self.unit_s = 1e-9
        known = self._bounds.renewals.get(index, 0)
        heapq.heappush(self.open, SearchNode(bound, 0, 0, 0, index, stage=SPREAD, relaxed=known))
        self._report_bound()

    def _relax(self, index: int) -> bool:
        """Build the space of a mesh and bound all its nodes; whether there is one."""
        mesh = self.meshes[index]
        space = self._mesh_spaces[index] = self._mesh_space(mesh)
        if space is not None:
            self._bounds.least[index] = self._relaxed(index, space, self._zero_stages(mesh))
        return space is not None

    def _relaxed(self, index: int, space: Space, levels: tuple[int, ...]) -> float:
        """Relax the space of a mesh, or take what a search under another limit did, and bound all
        nodes."""
        search, key = self.search, (self.meshes[index], self.pinned, levels)
        known = search.relaxed.get(key) if self.allowed is None else None
        if known is not None and known.space is space and known.serves(self._to_beat):
            known.forget_limit()
            self._bounds.relaxed[index] = known
            return search.least[key]
        relaxed = self._bounds.relaxed[index] = Relaxation(space, search.scratch)
        if self.memory_first or not levels:
            return 0.0
        bound = relaxed.least(levels, self._to_beat)
        if self.allowed is None:
            search.relaxed[key], search.least[key] = relaxed, bound
        return bound

    def _spread(self, index: int) -> None:
        """All nodes of a mesh that was expanded in place of the one that stood for them: those that
        may be better than the best plan."""
        space, beaten = self._bounds.relaxed[index].space, math.inf
        self._spread_meshes.add(index)
        for node in self._nodes_of(index):
            if self.memory_first:
                node.bound = least_usage(space, node.techniques, uncut=True)
            if node.bound < self._to_beat * (1 - SAME):
                heapq.heappush(self.open, node)
            else:
                beaten = min(beaten, self._lower_bound(node))
        self.finished_bounds.append(beaten)
        self._report_bound()

    def _zero_stages(self, mesh: Mesh) -> tuple[int, ...]:
        """The same as `_levels`, as stages."""
        return tuple(sorted(LEVEL_ORDER[k] for k in self._levels(mesh)))

    def _levels(self, mesh: Mesh) -> list[int]:
        """ZeRO stages that go with a mesh."""
        most = (
            max((MAX_ZERO_STAGE[s] for s, _ in self.search.offered.schedules(mesh)), default=-1)
            if mesh.stages > 1
            else max(LEVEL_ORDER)
        )
        said = self.search.offered.zero_stages(mesh) if self.pinned else LEVEL_ORDER
        return [k for k in self.levels if LEVEL_ORDER[k] <= most and LEVEL_ORDER[k] in said]

    def _nodes_of(self, index: int) -> Iterator[SearchNode]:
        """The nodes of a mesh that was expanded, each with what bounds all levels of it in
        seconds."""
        mesh, offered, relaxed = (
            self.meshes[index],
            self.search.offered,
            self._bounds.relaxed[index],
        )
        again = {
            r: relaxed.recompute_adds_s(r) for r in offered.recomputes(relaxed.space.base, mesh)
        }
        values = tuple(dict.fromkeys((*RECOMPUTE, *again)))
        for micro, (schedule, virtual) in product(
            offered.microbatches(mesh), offered.schedules(mesh)
        ):
            if virtual > 1 and micro % mesh.stages:
                continue
            once = self._bounds.least[index] + relaxed.bubble_s(micro, virtual, schedule)
            for recompute, more in again.items():
                started = least_launch_s(
                    relaxed.space.base,
                    self.search.pricer(mesh),
                    mesh.stages,
                    Techniques(0, recompute, micro, schedule, virtual),
                )
                for level in self._levels(mesh):
                    yield SearchNode(
                        max(once + more, started),
                        values.index(recompute),
                        micro,
                        level,
                        index,
                        schedule=schedule,
                        virtual=virtual,
                        values=values,
                        relaxed=self._bounds.renewals.get(index, 0),
                        keeps_all=self.search.request.runtime.kernels is not None,
                    )

    def _floor(self, mesh: Mesh) -> float:
        """What is known of a mesh before its space is built."""
        counts = self.search.offered.microbatches(mesh)
        if not counts or self.memory_first:
            return 0.0
        known = self.search.least if self.allowed is None else {}
        proven = known.get((mesh, self.pinned, self._zero_stages(mesh)), 0.0)
        return max(self.search.floor(mesh, max(counts)), proven)

    def _large_parts(self, mesh: Mesh) -> int:
        """The number of the largest microbatches that all of a mesh's divide; 0 where it has
        none."""
        parts = math.gcd(*self.search.offered.microbatches(mesh))
        return parts if not parts or self.search.base(parts) else 1

    def _mesh_space(self, mesh: Mesh) -> Space | None:
        """The space that all nodes of a mesh are bounded in: of the largest microbatches that all
        of theirs divide."""
        parts = self._large_parts(mesh)
        if not parts:
            return None
        base = self.search.base(parts)
        if self._own is not None and base is not None:
            return self.search.space(
                mesh, parts, None, self.pinned, self._own(base, Mesh(mesh.inner))
            )
        return self.search.space(mesh, parts, self.allowed, self.pinned)

    def _space(self, node: SearchNode) -> Space | None:
        """The space of a search node's microbatches, of what may be in a better plan. Nodes are
        numbered alike only in graphs that were derived from one another."""
        first, key = self._mesh_spaces[node.mesh], (node.mesh, node.micro)
        if key not in self._spaces:
            mesh, base, allowed = self.meshes[node.mesh], self.search.base(node.micro), self.allowed
            among = (
                self._bounds.relaxed[node.mesh].splits if self.search.request.pins.empty else None
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
            self._spaces[key] = self.search.space(mesh, node.micro, allowed, self.pinned, among)
        return self._spaces[key]

    def _raise(self, node: SearchNode) -> bool:
        """Raise the node's bound to what others that were priced prove of it, or to that of its
        next stage; whether a plan of it is possible."""
        if (
            node.stage == CHECK_FIT
            and least_usage(self._bounds.relaxed[node.mesh].space, node.techniques, uncut=True)
            > self.limit
        ):
            self._least_beyond_limit = min(self._least_beyond_limit, self._lower_bound(node))
            return False
        if not self.memory_first and node.stage > CHECK_FIT:
            others, quickly = self._bounds.by_others, self._bounds.quickly
            if (known := max(others(node), quickly(node))) > node.bound:
                node.bound = known
                return True
            free = node.bound
            node.bound = max(node.bound, self._bounds.at_stage(node, self._to_beat))
            if node.stage == BOUND_MEMORY:
                self._note_limit(node, free)
        node.tight |= self.memory_first  # bounds in bytes are as they are
        node.stage += 1
        return True

    def _price(self, node: SearchNode, work_factor: int = 1) -> int:
        """Solve the node, price what it finds, and keep the bound of what it proved; the work spent
        on solving. work_factor: times the usual work limit."""
        solves = NodeSolves(self.search, work_factor)
        bound = self._priced(node, solves)
        if bound is None or bound > node.bound:  # under the limit
            self._least_beyond_limit = min(self._least_beyond_limit, self._lower_bound(node))
        if bound is not None and solves.cut and work_factor == 1:
            node.bound = bound
            heapq.heappush(self.unfinished, node)
        elif bound is not None:
            node.bound = bound
            heapq.heappush(self.to_raise, node)
        else:
            self._impossible.add((node.mesh, node.techniques))
        return solves.work

    def _priced(self, node: SearchNode, solves: NodeSolves) -> float | None:
        """The bound of a search node after it was solved, and priced where that may pay; None where
        nothing of it fits. The room shrinks by what the whole plan needs beside."""
        search, limit = self.search, self.limit
        space = self._space(node)
        if space is None or least_usage(space, node.techniques) > limit:
            return None
        if self.memory_first:
            self._take(
                search.price_smallest(
                    space,
                    self.meshes[node.mesh],
                    node.techniques,
                    self.label,
                    self._copies,
                    self._to_beat,
                )
            )
            return node.bound
        problem = assemble(space, node.techniques, None, unit_s=self.unit_s)
        solved = solves.solve(problem, self._below(problem))
        if solved.status == "infeasible":
            return None
        if solved.bound is not None:
            # A bound under the memory limit says nothing of nodes that need less memory.
            unlimited = search.proven(problem, solved, self.unit_s)
            self._bounds.known.append(
                (node.mesh, node.level, node.recompute, node.micro, node.virtual, unlimited)
            )
            node.bound = max(node.bound, unlimited)
        if (
            not solved.choice
            or evaluate(problem, solved.choice).cost * self.unit_s >= self._to_beat
        ):
            return node.bound
        return self._made_to_fit(node, solves, space, solved, evaluate(problem, solved.choice))

    def _made_to_fit(
        self, node: SearchNode, solves: NodeSolves, space: Space, solved: Solution, verdict: Verdict
    ) -> float | None:
        """Solve again within the room that is left until the whole plan fits, which is then priced;
        the node's bound, None where nothing of it fits. solved, verdict: without a limit."""
        limit, worth, bound = self.limit, self._to_beat, node.bound
        if self._fits_written_out(node, space, solved):
            return bound
        room = most = limit - least_working(space, node.techniques)
        # The limit is first that of what is kept beside the least that any operator needs.
        liveness = False
        for turn in range(ROUNDS + 1):
            if turn or verdict.peak_usage > most:
                if room <= 0:
                    return bound
                bounded = assemble(
                    space, node.techniques, room, unit_s=self.unit_s, liveness=liveness
                )
                solved = solves.solve(bounded, self._below(bounded, worth))
                whole = room == (limit if liveness else most)
                if whole and solved.status == "infeasible":
                    return None
                if whole and solved.bound is not None:
                    bound = max(bound, self.search.proven(bounded, solved, self.unit_s))
                if not solved.choice:
                    return bound
                verdict = evaluate(bounded, solved.choice)
                if verdict.cost * self.unit_s >= worth:
                    return bound
            # The working set is known before the whole plan is priced.
            excess = sum(usage_of(space, node.techniques, solved.choice)) - limit
            if excess > 0 and not liveness and has_liveness(space):
                room, liveness = limit, True
                continue
            if excess <= 0:
                candidate = self._whole(node, space, solved)
                if candidate is None or self._take(candidate):
                    return bound
                excess = candidate.cost.memory.total - limit
            room = min(room, verdict.peak_usage) - excess
        return bound

    def _fits_written_out(self, node: SearchNode, space: Space, solved: Solution) -> bool:
        """Whether a choice is too large as the problem has it, with the bytes of loops, and is
        taken all the same, as it fits with its blocks written out."""
        return (
            may_write_out(space, node.techniques)
            and sum(usage_of(space, node.techniques, solved.choice)) > self.limit
            and self._take(self._whole(node, space, solved))
        )

    def _whole(self, node: SearchNode, space: Space, solved: Solution) -> Candidate | None:
        """A solution of a search node as a whole plan with its price."""
        return self.search.price(
            space,
            self.meshes[node.mesh],
            node.techniques,
            solved,
            self.label,
            self.unit_s,
            self._copies,
        )

    def _below(self, problem: Problem, worth: float | None = None) -> float:
        """Units from which on no choice of a problem is wanted, whose costs are rounded. worth:
        seconds that a plan is to beat, those of the best where it is None."""
        worth_s = self._to_beat if worth is None else worth
        return worth_s / self.unit_s + len(problem.cost) + len(problem.edges)

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


def _fewer_copies_s(relaxed: Relaxation, node: SearchNode) -> float:
    """What plans of the node take more (seconds; below 0: less) than such that recompute nothing,
    at least."""
    plain = replace(node.techniques, recompute="none")
    return relaxed.changes_by_s(plain, node.techniques)
