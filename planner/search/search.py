"""The outer search: mesh, optimizer sharding, recompute and microbatches around the one problem
that a solver answers.

    families    all plans, and for comparison the best of those people write by hand: batch only,
                ZeRO-3, Megatron's, everything everywhere
    each        is searched best first under lower bounds (planner.search.best_first); spaces and
                priced plans are shared (planner.search.workspace, planner.pricing.step_time)
    the winner  is the cheapest plan of all that fit, baselines included; its tensor axis is then
                split in two where that may pay

What may be chosen is planner.search.domain's, what is asked and found planner.search.request's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cache.folder import Cache
from planner.execution.plan import Plan
from planner.execution.techniques import BESIDE, LOOPED, WRITTEN_OUT
from planner.machine.topology import Mesh
from planner.search.axis_merging import with_merged_axes
from planner.search.baselines import tune_baselines
from planner.search.best_first import WIDE_GAP, BestFirst, PlanFamily
from planner.search.cache_entry import kept, recalled
from planner.search.canonical_form import (
    ON_DEVICES,
    WITH_ROOM,
    called,
    canonical,
    named,
    on_fewer_axes,
)
from planner.search.exchanges_beside import may_be_beside, with_exchanges_beside
from planner.search.incremental import from_before, remember
from planner.search.keys import incremental_key, search_key
from planner.search.machine_key import machine_key
from planner.search.microbatch_overlap import with_microbatch_overlap
from planner.search.request import Candidate, Covered, SearchResult
from planner.search.solving import Solving
from planner.solvers.problem import Problem
from planner.space.assemble import assemble
from planner.space.variables import Space
from planner.workload.user_loss import is_user_loss

BEHIND, LEADERS = 1.1, 3
"""The best plan with stages and the best without are both refined, unless one takes this many times
the other's; where the bound is far, those of so many meshes. Meshes whose wide axis is parted where
the links are have as many stages as these."""
LIMIT_IS_DEAR = 0.2
"""Share of a step that plans of any size are shorter by, as far as is known, from which on plans
with more in the host's memory are looked for."""
ONE_WAY_WORTH = 0.01
"""Share of a step between the best plan and what is proven from which on those whose programs run
blocks in one way are searched for alone, too."""
AWAY_WORTH = 0.03
"""Such a plan is taken where a step is shorter by this share at least: what the host's link does
beside kernels is a guess, and less is proven of it."""
FAR = 1.5
"""Where the smallest plan found takes this many times the limit, none that fits is looked for (it
is found by bounds that are not tight)."""


@dataclass(frozen=True)
class Reached:
    """What was found under a limit of memory: the best plan, the search of all that is allowed, the
    smallest plan (looked for where nothing fits), and bounds (seconds): of plans within the limit,
    of those that take more memory, too; bound_bytes: of which plans the first is, None for all that
    fit; searched: the families that had meshes.
    """

    best: Candidate | None
    main: BestFirst
    smallest: Candidate | None
    bound_s: float
    bound_of_all_s: float
    bound_bytes: int | None
    covers: tuple[Covered, ...] = ()
    searched: tuple[BestFirst, ...] = ()


class Search(Solving):
    """One search. Deterministic unless the time limit cuts it."""

    def run(self, *, how_close: bool = True) -> SearchResult:
        """Search everything the request allows, or recall what such a search found before.
        how_close: where nothing fits, also look for the smallest plan."""
        cache = self.request.cache
        if cache is None or is_user_loss(
            self.model.workload.loss
        ):  # what a function in a file says is no part of a key
            return self._searched(how_close)
        cache.lookups += 1
        spare = cache.faults.spare
        if (result := spare("recalled", lambda: self._recalled(cache), None)) is not None:
            cache.hits += 1
            return result
        self.tables = spare("tables", lambda: cache.tables(machine_key(self.request)), None)
        result = (
            spare("a plan before", self._from_before, None) if self.request.incremental else None
        ) or self._searched(how_close)
        spare("kept", lambda: self._keep(cache, result), None)
        return result

    def _recalled(self, cache: Cache) -> SearchResult | None:
        """What a search for the same found before."""
        entry = cache.get(search_key(self.model, self._key, self.request))
        return recalled(Search(self.model, self.request), entry) if entry is not None else None

    def _keep(self, cache: Cache, result: SearchResult) -> None:
        """Leave what was found to searches to come."""
        cache.keep_tables()
        if (entry := kept(result)) is not None:
            key = search_key(self.model, self._key, self.request)
            key = key if result.reused_from is None else incremental_key(key)
            cache.put(key, entry)
            remember(self, key, result)

    def _from_before(self) -> SearchResult | None:
        """What is found where what did not change stays as a search before decided it; None where
        there is nothing of the kind."""
        answer = from_before(self)
        if answer is None:
            return None
        within, best, before = answer
        if not self.confirmed(best.plan.microbatches):
            return None
        result = within._complete(canonical(within, best), {}, 0.0)
        return replace(result, reused_from=before)

    def _searched(self, how_close: bool) -> SearchResult:
        """The best plan that fits with room; one that fits tightly where none with room is within
        the range of its step time. Where none fits, the search goes on with more in the host's
        memory."""
        request, baselines, search = self.request, dict[str, Candidate](), self
        reached = self._within(request.roomy_bytes, baselines)
        safe = reached.best
        if self._perhaps_tight(reached):
            worth = self._outside(safe, faster=True) if safe is not None else np.inf
            tight = self._within(request.limit_bytes, baselines, worth)
            if tight.best is not None and safe is None:
                search, reached, safe = self._sparing(tight, reached.bound_s)
            elif tight.best is not None or safe is None:
                reached = tight
        if (one_way := self._faster_one_way(reached)) is not None:
            search, reached = one_way
            safe = reached.best
        if (away := self._faster_away(reached)) is not None:
            assert reached.best is not None
            baselines[ON_DEVICES] = reached.best if safe is None else safe
            search, reached = away
            safe = reached.best
        if reached.best is None and self.stopped:
            reached = self._best_so_far(reached, baselines)
        best = reached.best
        if best is None and not self.stopped and (more := self.offered.offload()) is not None:
            if (none := self._hopeless(baselines, how_close)) is not None:
                return none
            return self._offloaded(more, baselines, reached.bound_s, how_close)
        smallest = (
            self._smallest(reached, baselines)
            if best is None and how_close and not self.stopped
            else None
        )
        if best is not None and not self.confirmed(best.plan.microbatches):
            warnings.warn(
                f"{self.model.name}: the graph at {best.plan.microbatches} microbatches was derived"
                " wrongly; searching again with every graph read",
                stacklevel=2,
            )
            return Search(self.model, self.request, self.progress)._searched(how_close)
        if best is not None and safe is not None and best is not safe:
            baselines[WITH_ROOM] = safe
        sure = self._sure(reached, best)
        holder = search if best is not None and id(best) in search.details else self
        result = holder._complete(best, baselines, reached.bound_s if sure else 0.0, smallest)
        tried, stopped = (
            len(self.details.keys() | search.details.keys()),
            self.stopped or search.stopped,
        )
        return replace(
            result,
            bound_bytes=reached.bound_bytes,
            bound_of_all_s=reached.bound_of_all_s if sure else 0.0,
            tried=tried,
            stopped=stopped,
            covers=reached.covers,
        )

    def _sure(self, reached: Reached, best: Candidate | None) -> bool:
        """Whether a bound holds for all plans. Bounds count all communication of blocks: of plans
        that hide some of it nothing is proven."""
        base = self.base(1)
        return (
            self.request.objective == "step"
            and bool(np.isfinite(reached.bound_s))
            and (best is None or not overlaps(best.plan))
            and (base is None or not may_be_beside(self, base.graph))
        )

    def _best_so_far(self, reached: Reached, baselines: Mapping[str, Candidate]) -> Reached:
        """The best that fits of what was priced before the search was stopped; nothing is proven of
        it."""
        limit = self.request.limit_bytes
        fitting = [
            c
            for c in (*reached.main.priced, *self._eligible(baselines, limit))
            if c.cost.memory.total <= limit
        ]
        best = min(fitting, key=lambda c: c.key(self.request), default=None)
        return replace(reached, best=best, bound_s=0.0)

    def _within(
        self, limit_bytes: int, baselines: dict[str, Candidate], worth: float = np.inf
    ) -> Reached:
        """The best plan that takes so many bytes at most and less than `worth`. baselines: those
        tuned before, or where they are to go."""
        request = self.request
        main = self._main(limit_bytes)
        families = (main, *self._side_families(limit_bytes))
        try:
            # Baselines first: small searches, and what they reach is what the large one has to
            # beat.
            if request.baselines and not baselines:
                tune_baselines(self, baselines)
            self._run_families(families, self._eligible(baselines, limit_bytes), worth)
        except KeyboardInterrupt:
            self.stopped = "interrupt"
        fitting = [
            c
            for c in (*(f.best for f in families), *self._eligible(baselines, limit_bytes))
            if c is not None and self.value(c) < worth
        ]
        best, smallest = min(fitting, key=lambda c: c.key(request), default=None), None
        if best is None and not self.stopped and np.isinf(worth):
            smallest = main.smallest()
            if smallest is not None and smallest.cost.memory.total <= limit_bytes:
                # where memory binds, a solver's work may end before it finds what is known to be
                # there
                best = smallest
        priced = tuple(c for f in families for c in f.priced)
        if best is not None:
            within = (c for c in priced if c.cost.memory.total <= limit_bytes)
            tried = (*fitting, *(c for c in within if self.value(c) < worth))
            best = on_fewer_axes(self, best, tried)
            if not self.stopped:
                best = with_microbatch_overlap(self, best, priced, limit_bytes)
                best = with_exchanges_beside(self, best, priced, limit_bytes)
            best = canonical(self, best)
        bounded = [f for f in families if f.meshes]
        bound = np.inf
        for family in reversed(bounded):  # of finer meshes less is proven
            bound = family.bound(bound)
        of_all = min(f.bound_of_all(bound) for f in bounded)
        bounds_all = of_all >= bound or limit_bytes >= request.limit_bytes
        return Reached(
            best=best,
            main=main,
            smallest=smallest,
            bound_s=bound,
            bound_of_all_s=of_all,
            bound_bytes=None if bounds_all else limit_bytes,
            covers=self._covered([m for f in families for m in f.meshes]),
            searched=tuple(bounded),
        )

    def _side_families(self, limit_bytes: int) -> tuple[BestFirst, BestFirst, BestFirst]:
        """The searches beside the main one, which begin without meshes: of finer meshes, of wider
        ones and of named ones."""
        levels = self.offered.levels()
        finer, wider = (
            BestFirst(self, PlanFamily("plan", None, levels), (), limit_bytes) for _ in range(2)
        )
        named = PlanFamily("plan", self.offered.named, levels, alone=True)
        return finer, wider, BestFirst(self, named, (), limit_bytes)

    def _run_families(
        self,
        families: tuple[BestFirst, BestFirst, BestFirst, BestFirst],
        eligible: Sequence[Candidate],
        worth: float,
    ) -> None:
        """Search all that is allowed, then meshes finer than the best found, those of more plans
        where the bound is far, and meshes named by the user's axes. eligible: baselines that may be
        the answer; worth: of plans that take less."""
        main, finer, wider, named = families
        least = min(map(self.value, eligible), default=np.inf)
        main.run(least if np.isinf(worth) else worth)
        if self.refused is not None and (
            main.empty
            or (main.best is None and not main.priced and "stage" in self.request.pins.mesh)
        ):
            raise self.refused
        if main.best is None and not np.isinf(worth):
            return
        leaders, others, stages = self._leaders((*main.priced, *eligible), main.limit)
        finer.meshes = self.offered.finer(*leaders, stages=stages)
        worth = min(map(self.value, (main.best, *eligible)))
        finer.solve_again_work = main.solve_again_work
        finer.run(worth)
        worth = min(worth, self.value(finer.best))
        most = (1 - WIDE_GAP) * worth
        if min(main.bound(most), finer.bound(most)) < most < np.inf:
            # there may be more to find
            wider.meshes = tuple(m for m in self.offered.finer(*others) if m not in finer.meshes)
        wider.solve_again_work = finer.solve_again_work
        wider.run(worth)
        among = {c.mesh.stages for c in (*leaders, *others)} | {m.stages for m in main.meshes[:1]}
        named.meshes = tuple(
            dict.fromkeys(
                [
                    *self.offered.by_name((*finer.meshes, *wider.meshes)),
                    *self.offered.for_long_sequences(among),
                ]
            )
        )
        named.solve_again_work = wider.solve_again_work
        named.run(min(worth, self.value(wider.best)))

    def _covered(self, meshes: Sequence[Mesh]) -> tuple[Covered, ...]:
        """What a bound over these meshes holds for."""
        rows: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        for mesh in dict.fromkeys(meshes):
            sizes = "x".join(str(a.size) for a in mesh.inner) or "1"
            alike = self.offered.microbatches(mesh), not self.offered.by_alphabet(mesh)
            rows.setdefault(alike, []).append(
                f"{mesh.stages}|{sizes}" if mesh.stages > 1 else sizes
            )
        return tuple(
            Covered(tuple(dict.fromkeys(names)), micro, every)
            for (micro, every), names in rows.items()
        )

    def _outside(self, c: Candidate, *, faster: bool) -> float:
        """Seconds of a step whose range ends at a plan's step; or at which the range of that one
        ends."""
        slower = 1 + self.request.runtime.time_spread[1]
        return c.cost.step_time_s / slower if faster else c.cost.step_time_s * slower

    def _perhaps_tight(self, reached: Reached) -> bool:
        """Whether a plan that fits tightly may be the answer, after those that fit with room were
        searched."""
        if self.stopped or self.request.roomy_bytes >= self.request.limit_bytes:
            return False
        if reached.best is not None:
            # What the limit had no say in is the same under another one.
            worth = self._outside(reached.best, faster=True)
            return reached.bound_of_all_s < worth and any(
                f.bound_of_all(worth) < worth for f in reached.searched
            )
        return (
            reached.smallest is not None
            and reached.smallest.cost.memory.total <= self.request.limit_bytes
        )

    def _sparing(self, tight: Reached, bound_s: float) -> tuple[Search, Reached, Candidate | None]:
        """Where nothing fits with room, the best plan that does with more in the host's memory, and
        its search: the answer, if it is within the range of the best one that fits tightly.
        bound_s: of plans with room and no more than now in the host's memory."""
        search = self
        assert tight.best is not None
        while not self.stopped and (more := search.offered.offload()) is not None:
            try:
                search = search.offloading(more)
                roomy = search._within(search.request.roomy_bytes, {})
            except KeyboardInterrupt:
                self.stopped = "interrupt"
                break
            self.stopped = search.stopped
            bound_s = min(bound_s, roomy.bound_s)
            if (safe := roomy.best) is not None:
                within = safe.cost.step_time_s <= self._outside(tight.best, faster=False)
                return (
                    search,
                    (
                        replace(roomy, bound_s=bound_s, bound_bytes=self.request.roomy_bytes)
                        if within
                        else tight
                    ),
                    safe,
                )
        return self, tight, None

    def _faster_one_way(self, reached: Reached) -> tuple[Search, Reached] | None:
        """Where the best plan is far from what is proven, a faster one with room of those that run
        their blocks in one way, and its search; None where none is found. Where memory is short,
        what is proven of both ways at once takes the seconds of blocks written out and the bytes
        of loops, and patience ends among choices that are neither."""
        request = self.request
        fastest: tuple[Search, Reached] | None = None
        one_way = request.only_blocks is not None or bool(request.staged_pin)  # stages are loops
        if request.objective != "step" or one_way:
            return None
        for blocks in (WRITTEN_OUT, LOOPED):
            best, base = reached.best, self.base(1)
            if (
                best is None
                or base is None
                or self.stopped
                or reached.bound_s >= (1 - ONE_WAY_WORTH) * self.value(best)
                or not self.pricer(best.mesh).writes_out(base)
            ):
                break
            search = self.with_blocks(blocks)
            found_one_way = search._within(request.roomy_bytes, {}, self.value(best))
            self.stopped = search.stopped
            if found_one_way.best is not None:
                reached = replace(reached, best=found_one_way.best, main=found_one_way.main)
                fastest = search, reached
        return fastest

    def _faster_away(self, reached: Reached) -> tuple[Search, Reached] | None:
        """Where the limit of memory makes steps much longer, a faster plan with room that has the
        optimizer's state or what enters blocks in the host's memory, and its search; None where
        none is found. Looked at are meshes of one axis, which such plans make room for, and that of
        the best; what is proven of plans that may take any memory holds of all these, too."""
        best, request = reached.best, self.request
        if (
            best is None
            or self.stopped
            or request.objective != "step"
            or reached.bound_of_all_s > (1 - LIMIT_IS_DEAR) * self.value(best)
        ):
            return None
        fastest: tuple[Search, Candidate, BestFirst] | None = None
        try:
            for offload in self.offered.away():
                search = self.offloading(offload)
                family = search._main(request.roomy_bytes)
                family.meshes = tuple(
                    m
                    for m in family.meshes
                    if m == best.mesh or (m.stages == 1 and len(m.inner) == 1)
                )
                worth = self.value(best) if fastest else (1 - AWAY_WORTH) * self.value(best)
                faster = family.run(worth)
                if faster is not None and self.value(faster) < worth:
                    best, fastest = faster, (search, faster, family)
                self.stopped = self.stopped or search.stopped
        except KeyboardInterrupt:
            self.stopped = "interrupt"
        if fastest is None:
            return None
        search, best, family = fastest
        away = replace(
            reached,
            best=canonical(search, best),
            main=family,
            bound_s=reached.bound_of_all_s,
            bound_bytes=None,
        )
        return search, away

    def _complete(
        self,
        best: Candidate | None,
        baselines: dict[str, Candidate],
        bound_s: float,
        smallest: Candidate | None = None,
    ) -> SearchResult:
        """What was found, with the winner's space and problem, in the names that its axes have to
        people."""
        space, choice, problem = self._among_all(best) if best else (None, (), None)
        if best is not None and space is not None and problem is not None:
            best, space, choice, problem = with_merged_axes(self, best, space, choice, problem)
            best, space = named(self, best, space)
        base = self.base(best.plan.microbatches if best else 1)
        assert base is not None
        return SearchResult(
            best=best,
            baselines=called(self, baselines),
            base=base.untied,
            space=space,
            choice=choice,
            problem=problem,
            bound_s=bound_s,
            tried=len(self.details),
            stopped=self.stopped,
            smallest=smallest,
        )

    def _hopeless(self, baselines: dict[str, Candidate], how_close: bool) -> SearchResult | None:
        """The answer where even with all that may be in the host's memory the smallest plan is far
        beyond the limit (`FAR`): a search for each step on the way there would find that out one by
        one."""
        if self.request.offload:
            return None  # asked before the first step
        most_offloaded = self
        while (further := most_offloaded.offered.offload()) is not None:
            most_offloaded = self.offloading(further)
        main, base = most_offloaded._main(), self.base(1)
        least_bytes_plan = main.smallest()
        if (
            least_bytes_plan is None
            or base is None
            or most_offloaded.stopped
            or least_bytes_plan.cost.memory.total <= FAR * self.request.limit_bytes
        ):
            return None
        nothing_fits = Reached(
            best=None,
            main=main,
            smallest=least_bytes_plan,
            bound_s=np.inf,
            bound_of_all_s=np.inf,
            bound_bytes=None,
        )
        smallest = (
            most_offloaded._smallest(nothing_fits, baselines) if how_close else least_bytes_plan
        )
        return SearchResult(
            best=None,
            baselines=called(self, baselines),
            base=base.untied,
            space=None,
            choice=(),
            problem=None,
            bound_s=0.0,
            tried=len(self.details),
            smallest=smallest,
        )

    def quoted(self) -> Candidate | None:
        """The best plan with as little in the host's memory as the smallest plan found needs to
        fit; None where none does. What a remedy is quoted by: no step on the way there is
        searched."""
        search = self
        while (
            near := search._main().smallest()
        ) is None or near.cost.memory.total > self.request.limit_bytes:
            if (more := search.offered.offload()) is None:
                return None
            search = search.offloading(more)
        return search.run(how_close=False).best

    def _main(self, limit_bytes: int | None = None) -> BestFirst:
        """The search of all that the request allows, within so many bytes."""
        family = PlanFamily("plan", self.offered.allowed(), self.offered.levels())
        return BestFirst(self, family, self.offered.meshes(), limit_bytes)

    def _offloaded(
        self,
        offload: tuple[str, ...],
        baselines: dict[str, Candidate],
        bound: float,
        how_close: bool,
    ) -> SearchResult:
        """The search again with more in the host's memory. bound: of the plans that nothing of this
        one's fitted among."""
        result = self.offloading(offload).run(how_close=how_close)
        return replace(
            result,
            baselines=called(self, baselines),
            tried=result.tried + len(self.details),
            bound_s=min(bound, result.bound_s),
        )  # both searches covered the same

    def _leaders(
        self, priced: Sequence[Candidate], limit_bytes: int
    ) -> tuple[list[Candidate], list[Candidate], tuple[int, ...]]:
        """The best plan that fits, and the best without stages (or with some, where the first has
        none) unless it is far behind; the best of a few more meshes; and of the best of all these
        the numbers of stages of those whose tensor axis is as wide as the innermost links.
        """
        fitting = sorted((c for c in priced if c.cost.memory.total <= limit_bytes), key=self.value)
        close = [c for c in fitting if self.value(c) <= BEHIND * self.value(fitting[0])]
        kinds, meshes = (
            {c.mesh.stages > 1: c for c in reversed(close)},
            {c.mesh: c for c in reversed(close)},
        )
        best, near = (
            sorted(meshes.values(), key=self.value)[:LEADERS],
            self.request.topology.levels[0].size,
        )
        stages = dict.fromkeys(
            c.mesh.stages for c in best if len(c.mesh.inner) > 1 and c.mesh.inner[-1].size >= near
        )
        return list(kinds.values()), [c for c in best if c not in kinds.values()], tuple(stages)

    def _smallest(self, reached: Reached, baselines: Mapping[str, Candidate]) -> Candidate | None:
        """The smallest plan, on a mesh of three axes around the smallest of two priced where that
        is smaller yet."""
        sizes = [
            c
            for c in (
                reached.smallest,
                *reached.main.priced,
                *(baselines.values() if self.offered.free else ()),
            )
            if c is not None
        ]
        around = min(
            (c for c in sizes if len(c.mesh.axes) == 2),
            key=lambda c: c.cost.memory.total,
            default=None,
        )
        finer = BestFirst(
            self, PlanFamily("plan", None, self.offered.levels()), self.offered.finer(around)
        )
        finer.run()
        return min(
            [*sizes, *(c for c in (finer.smallest(),) if c is not None)],
            key=lambda c: c.cost.memory.total,
            default=None,
        )

    def _among_all(self, best: Candidate) -> tuple[Space, tuple[int, ...], Problem]:
        """A plan's space, choice and problem; where any plan would have done, beside every split of
        its mesh, so that what else was there can be said."""
        _, space, choice, problem = self.details[id(best)]
        whole_space = (
            self.space(best.mesh, best.plan.microbatches, None, pinned=False)
            if self.offered.free
            else None
        )
        if whole_space is None or whole_space is space:
            return space, choice, problem
        try:
            whole_choice = tuple(
                w.splits.index(v.splits[k]) if v.kind == "op" else w.layouts.index(v.layouts[k])
                for v, w, k in zip(space.variables, whole_space.variables, choice, strict=True)
            )
        except (
            ValueError
        ):  # of what was kept of another search: on finer meshes not all splits are offered
            return space, choice, problem
        return (
            whole_space,
            whole_choice,
            assemble(whole_space, best.techniques, self.request.limit_bytes),
        )

    def _eligible(self, baselines: Mapping[str, Candidate], limit_bytes: int) -> list[Candidate]:
        """Baselines that may be the answer: they take so many bytes at most, and keep pins and
        mode."""
        return [
            c
            for c in baselines.values()
            if c.cost.memory.total <= limit_bytes and self.offered.keeps(c)
        ]

    def tuned_baselines(self) -> dict[str, Candidate]:
        """The baselines alone, for a plan that was not searched for."""
        baselines: dict[str, Candidate] = {}
        tune_baselines(self, baselines)
        return called(self, baselines)


def overlaps(plan: Plan) -> bool:
    """Whether a plan hides communication under kernels of other microbatches, of which bounds know
    nothing."""
    return plan.overlapped_microbatches > 1 or plan.exchanges == BESIDE
