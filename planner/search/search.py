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

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.analysis.axis_roles import role_named
from planner.cache.folder import Cache
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.machine.mesh_choices import meshes, pinned_mesh
from planner.machine.topology import Mesh
from planner.pricing.step_time import derived
from planner.search.axis_merging import joined
from planner.search.axis_names import axis_names, renamed_candidate, renamed_mesh, renamed_space
from planner.search.axis_symmetry import exchanged, mirrored
from planner.search.best_first import WIDE_GAP, BestFirst
from planner.search.bucketing import priced
from planner.search.cache_entry import kept, recalled
from planner.search.domain import Family
from planner.search.incremental import from_before, remember
from planner.search.keys import incremental_key, model_key, reading_key, search_key
from planner.search.machine_key import machine_key
from planner.search.microbatch_overlap import in_copies
from planner.search.request import TIE, TIE_MEMORY, Candidate, Covered, Found, Progress, Request
from planner.search.stage_cuts import with_cuts
from planner.search.workspace import Workspace
from planner.solvers.exact.elimination import Scratch
from planner.solvers.problem import FORBIDDEN, Budget, Problem, Solution, evaluate
from planner.space.assemble import PICO, Techniques, assemble, least_working, usage_of
from planner.space.build import splits_of
from planner.space.families import batch_only, megatron_only, no_split
from planner.space.variables import Space
from planner.workload.model import Model
from planner.workload.user_loss import is_user_loss

WORK = {"dp": 2_000_000, "auto": 2_000_000}
"""Work units (table entries visited) of one solve: a hundredth of a second on tables of repeated
blocks. What it cuts keeps its bound, and the best of it is solved again
(planner.search.best_first)."""
BEHIND, LEADERS = 1.1, 3
"""The best plan with stages and the best without are both refined, unless one takes this many times
the other's; where the bound is far, those of so many meshes. Meshes whose wide axis is parted where
the links are have as many stages as these."""
FAR = 1.5
"""Where the smallest plan found takes this many times the limit, none that fits is looked for (it
is found by bounds that are not tight)."""


WITH_ROOM = "with_room"
"""Key of the best plan that fits with the upper end of its memory range, among the baselines of one
that fits tightly."""


@dataclass(frozen=True)
class Reached:
    """What was found under a limit of memory: the best plan, the search of all that is allowed, the
    smallest plan (looked for where nothing fits), and bounds (seconds): of plans within the limit,
    of those that take more memory, too; bound_bytes: of which plans the first is, None for all that
    fit.
    """

    best: Candidate | None
    main: BestFirst
    smallest: Candidate | None
    bound_s: float
    bound_of_all_s: float
    bound_bytes: int | None
    covers: tuple[Covered, ...] = ()


class Search(Workspace):
    """One search. Deterministic unless the time limit cuts it."""

    def __init__(self, model: Model, request: Request, progress: Progress | None = None) -> None:
        super().__init__(model, request, self.out_of_time)
        self.progress = progress
        self.started = time.monotonic()
        self.stopped = ""
        self.scratch = Scratch()
        self._details: dict[
            int, tuple[Candidate, Space, tuple[int, ...], Problem]
        ] = {}  # by id; the candidate is kept, so that ids stay unique
        self._best: Candidate | None = None
        self._at = "search"
        self._bounds: dict[int, float] = {}  # by id of an explorer

    def run(self, *, how_close: bool = True) -> Found:
        """Search everything the request allows, or recall what such a search found before.
        how_close: where nothing fits, also look for the smallest plan."""
        cache = self.request.cache
        if cache is None or is_user_loss(
            self.model.workload.loss
        ):  # what a function in a file says is no part of a key
            return self._searched(how_close)
        cache.asked += 1
        spare = cache.faults.spare
        if (found := spare("recalled", lambda: self._recalled(cache), None)) is not None:
            cache.found += 1
            return found
        self.tables = spare("tables", lambda: cache.tables(machine_key(self.request)), None)
        found = (
            spare("a plan before", self._from_before, None) if self.request.incremental else None
        ) or self._searched(how_close)
        spare("kept", lambda: self._keep(cache, found), None)
        return found

    def _recalled(self, cache: Cache) -> Found | None:
        """What a search for the same found before."""
        entry = cache.get(search_key(self.model, self._key, self.request))
        return recalled(Search(self.model, self.request), entry) if entry is not None else None

    def _keep(self, cache: Cache, found: Found) -> None:
        """Leave what was found to searches to come."""
        cache.keep_tables()
        if (entry := kept(found)) is not None:
            key = search_key(self.model, self._key, self.request)
            key = key if found.before is None else incremental_key(key)
            cache.put(key, entry)
            remember(self, key, found)

    def _from_before(self) -> Found | None:
        """What is found where what did not change stays as a search before decided it; None where
        there is nothing of the kind."""
        answer = from_before(self)
        if answer is None:
            return None
        within, best, before = answer
        if not self.confirmed(best.plan.microbatches):
            return None
        found = within._complete(within._plainest(best), {}, 0.0)
        return replace(found, before=before)

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
        if found := self.model.confirm(microbatches):
            spare(
                "readings kept",
                lambda: cache.put(reading_key(self._key, microbatches), right),
                None,
            )
        return found

    def _searched(self, how_close: bool) -> Found:
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
        if reached.best is None and self.stopped:
            fitting = [
                c
                for c in (*reached.main.priced, *self._eligible(baselines, request.limit_bytes))
                if c.cost.memory.total <= request.limit_bytes
            ]
            reached = replace(
                reached, best=min(fitting, key=lambda c: c.key(request), default=None), bound_s=0.0
            )
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
        # Bounds count all communication of blocks: of plans that hide some of it nothing is proven.
        sure = (
            request.objective == "step"
            and np.isfinite(reached.bound_s)
            and (best is None or best.plan.copies == 1)
        )
        holder = search if best is not None and id(best) in search._details else self
        found = holder._complete(best, baselines, reached.bound_s if sure else 0.0, smallest)
        tried, stopped = (
            len(self._details.keys() | search._details.keys()),
            self.stopped or search.stopped,
        )
        return replace(
            found,
            bound_bytes=reached.bound_bytes,
            bound_of_all_s=reached.bound_of_all_s if sure else 0.0,
            tried=tried,
            stopped=stopped,
            covers=reached.covers,
        )

    def _within(
        self, limit_bytes: int, baselines: dict[str, Candidate], worth: float = np.inf
    ) -> Reached:
        """The best plan that takes so many bytes at most and less than `worth`. baselines: those
        tuned before, or where they are to go."""
        request, beaten = self.request, worth
        main, (finer, wider) = (
            self._main(limit_bytes),
            (
                BestFirst(self, "plan", (), None, self.offered.levels(), limit_bytes)
                for _ in range(2)
            ),
        )
        named = BestFirst(
            self, "plan", (), self.offered.named, self.offered.levels(), limit_bytes, alone=True
        )
        every = (main, finer, wider, named)
        try:
            # Baselines first: small searches, and what they reach is what the large one has to
            # beat.
            if request.baselines and not baselines:
                self._baselines(baselines)
            main.run(
                min((self.value(c) for c in self._eligible(baselines, limit_bytes)), default=np.inf)
                if np.isinf(worth)
                else worth
            )
            if self.refused is not None and (
                main.empty
                or (main.best is None and not main.priced and "stage" in request.pins.mesh)
            ):
                raise self.refused
            if main.best is not None or np.isinf(beaten):
                eligible = self._eligible(baselines, limit_bytes)
                leaders, others, stages = self._leaders((*main.priced, *eligible), limit_bytes)
                finer.meshes = self.offered.finer(*leaders, stages=stages)
                finer.run(worth := min(map(self.value, (main.best, *eligible))))
                worth = min(worth, self.value(finer.best))
                if (
                    min(main.bound(), finer.bound()) < (1 - WIDE_GAP) * worth < np.inf
                ):  # there may be more to find
                    wider.meshes = tuple(
                        m for m in self.offered.finer(*others) if m not in finer.meshes
                    )
                wider.run(worth)
                named.meshes = self.offered.by_name((*finer.meshes, *wider.meshes))
                named.run(min(worth, self.value(wider.best)))
        except KeyboardInterrupt:
            self.stopped = "interrupt"
        fitting = [
            c
            for c in (*(e.best for e in every), *self._eligible(baselines, limit_bytes))
            if c is not None and self.value(c) < beaten
        ]
        best, near = min(fitting, key=lambda c: c.key(request), default=None), None
        if best is None and not self.stopped and np.isinf(beaten):
            near = main.smallest()
            if near is not None and near.cost.memory.total <= limit_bytes:
                # where memory binds, a solver's work may end before it finds what is known to be
                # there
                best = near
        tried = (
            *fitting,
            *(
                c
                for e in every
                for c in e.priced
                if c.cost.memory.total <= limit_bytes and self.value(c) < beaten
            ),
        )
        best = self._on_fewer_axes(best, tried) if best is not None else None
        best = (
            in_copies(self, best, tuple(c for e in every for c in e.priced), limit_bytes)
            if best is not None and not self.stopped
            else best
        )
        best = self._plainest(best) if best is not None else None
        bound, of_all = (
            min(map(proven, (e for e in every if e.meshes)))
            for proven in (BestFirst.bound, BestFirst.bound_of_all)
        )
        of = None if of_all >= bound or limit_bytes >= request.limit_bytes else limit_bytes
        return Reached(
            best, main, near, bound, of_all, of, self._covered([m for e in every for m in e.meshes])
        )

    def _on_fewer_axes(self, best: Candidate, others: Sequence[Candidate]) -> Candidate:
        """The plan, or where two of its axes do the same (data, data2) one on fewer axes that is as
        fast and as small: what one odd operator gains by a second axis of the batch is less than a
        tie."""
        base = self.base(best.plan.microbatches)
        assert base is not None
        roles = [
            role
            for name in axis_names(base, best.plan, self.request.pins.named).values()
            if (role := role_named(name))
        ]
        if len(set(roles)) == len(roles):
            return best
        close = (
            c
            for c in others
            if len(c.mesh.axes) < len(best.mesh.axes)
            and self.value(c) <= (1 + TIE) * self.value(best)
            and c.cost.step_time_s <= (1 + TIE) * best.cost.step_time_s
            and c.cost.memory.total <= (1 + TIE_MEMORY) * best.cost.memory.total
        )
        return min(close, key=lambda c: c.key(self.request), default=best)

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
            return reached.bound_of_all_s < self._outside(reached.best, faster=True)
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
        while (more := search.offered.offload()) is not None:
            search = search.offloading(more)
            found = search._within(search.request.roomy_bytes, {})
            bound_s = min(bound_s, found.bound_s)
            if (safe := found.best) is not None:
                within = safe.cost.step_time_s <= self._outside(tight.best, faster=False)
                return (
                    search,
                    (
                        replace(found, bound_s=bound_s, bound_bytes=self.request.roomy_bytes)
                        if within
                        else tight
                    ),
                    safe,
                )
        return self, tight, None

    def _complete(
        self,
        best: Candidate | None,
        baselines: dict[str, Candidate],
        bound_s: float,
        smallest: Candidate | None = None,
    ) -> Found:
        """What was found, with the winner's space and problem, in the names that its axes have to
        people."""
        space, choice, problem = self._among_all(best) if best else (None, (), None)
        if best is not None and space is not None and problem is not None:
            best, space, choice, problem = joined(self, best, space, choice, problem)
            best, space = self._named(best, space)
        base = self.base(best.plan.microbatches if best else 1)
        assert base is not None
        return Found(
            best,
            self._called(baselines),
            base,
            space,
            choice,
            problem,
            bound_s,
            len(self._details),
            self.stopped,
            smallest,
        )

    def _hopeless(self, baselines: dict[str, Candidate], how_close: bool) -> Found | None:
        """The answer where even with all that may be in the host's memory the smallest plan is far
        beyond the limit (`FAR`): a search for each step on the way there would find that out one by
        one."""
        if self.request.offload:
            return None  # asked before the first step
        most = self
        while (more := most.offered.offload()) is not None:
            most = self.offloading(more)
        main, base = most._main(), self.base(1)
        near = main.smallest()
        if (
            near is None
            or base is None
            or most.stopped
            or near.cost.memory.total <= FAR * self.request.limit_bytes
        ):
            return None
        found = Reached(None, main, near, np.inf, np.inf, None)
        smallest = most._smallest(found, baselines) if how_close else near
        return Found(
            None,
            self._called(baselines),
            base,
            None,
            (),
            None,
            0.0,
            len(self._details),
            "",
            smallest,
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
        return BestFirst(
            self,
            "plan",
            self.offered.meshes(),
            self.offered.allowed(),
            self.offered.levels(),
            limit_bytes,
        )

    def offloading(self, offload: tuple[str, ...]) -> Search:
        """The same search with so much in the host's memory, in the time that is left."""
        left = self.request.time_limit_s and max(
            0.0, self.request.time_limit_s - (time.monotonic() - self.started)
        )
        again = Search(
            self.model,
            replace(self.request, offload=offload, baselines=False, time_limit_s=left),
            self.progress,
        )
        again._bases, again._atlas = self._bases, self._atlas
        return again

    def _offloaded(
        self,
        offload: tuple[str, ...],
        baselines: dict[str, Candidate],
        bound: float,
        how_close: bool,
    ) -> Found:
        """The search again with more in the host's memory. bound: of the plans that nothing of this
        one's fitted among."""
        found = self.offloading(offload).run(how_close=how_close)
        return replace(
            found,
            baselines=self._called(baselines),
            tried=found.tried + len(self._details),
            bound_s=min(bound, found.bound_s),
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
        finer = BestFirst(self, "plan", self.offered.finer(around), None, self.offered.levels())
        finer.run()
        return min(
            [*sizes, *(c for c in (finer.smallest(),) if c is not None)],
            key=lambda c: c.cost.memory.total,
            default=None,
        )

    def _among_all(self, best: Candidate) -> tuple[Space, tuple[int, ...], Problem]:
        """A plan's space, choice and problem; where any plan would have done, beside every split of
        its mesh, so that what else was there can be said."""
        _, space, choice, problem = self._details[id(best)]
        whole = (
            self.space(best.mesh, best.plan.microbatches, None, pinned=False)
            if self.offered.free
            else None
        )
        if whole is None or whole is space:
            return space, choice, problem
        try:
            at = tuple(
                w.splits.index(v.splits[k]) if v.kind == "op" else w.layouts.index(v.layouts[k])
                for v, w, k in zip(space.variables, whole.variables, choice, strict=True)
            )
        except (
            ValueError
        ):  # of what was kept of another search: on finer meshes not all splits are offered
            return space, choice, problem
        return whole, at, assemble(whole, best.techniques, self.request.limit_bytes)

    def _plainest(self, best: Candidate) -> Candidate:
        """The plan, or one that is told apart from it by nothing that costs, where it is no dearer:
        without an optimizer level that finds nothing to cut, and of the mirror images in which axes
        that cost the same change places (planner.search.axis_symmetry) the usual one.
        """
        _, space, choice, _ = self._details[id(best)]
        pins, techniques = self.request.pins, best.techniques
        swap = exchanged(best.mesh, axis_names(space.base, best.plan, pins.axes), pins.axes)
        image = (mirrored(space, choice, best.mesh, swap) if swap else None) or choice
        if (
            best.plan.zero
            and "zero_stage" not in pins.techniques
            and not any(w.zero for w in derived(space.base, best.plan)[0].weights.values())
        ):
            techniques = replace(techniques, zero=0)
        if (image, techniques) == (choice, best.techniques):
            return best
        other = self.price(
            space,
            best.mesh,
            techniques,
            Solution(image, "feasible"),
            best.label,
            copies=best.plan.copies,
        )
        if other is None or other.key(self.request) > best.key(self.request):
            return best
        proven = replace(
            other, bound_s=best.bound_s, status=best.status
        )  # of the problem that offers both
        self._details[id(proven)] = proven, *self._details[id(other)][1:]
        return proven

    def _named(self, best: Candidate, space: Space) -> tuple[Candidate, Space]:
        """A plan and its space with axes called by what they do; names the user gave stay."""
        names = axis_names(space.base, best.plan, self.request.pins.named)
        if all(a == b for a, b in names.items()):
            return best, space
        mesh = renamed_mesh(best.mesh, names)
        return renamed_candidate(best, mesh, names), renamed_space(space, mesh, names)

    def _called(self, baselines: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Baselines, and the plan with room, with axes called by what they do."""
        found: dict[str, Candidate] = {}
        for label, c in baselines.items():
            base = self.base(c.plan.microbatches)
            assert base is not None
            names = axis_names(base, c.plan, self.request.pins.named if label == WITH_ROOM else ())
            found[label] = renamed_candidate(c, renamed_mesh(c.mesh, names), names)
        return found

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

    def _eligible(self, baselines: Mapping[str, Candidate], limit_bytes: int) -> list[Candidate]:
        """Baselines that may be the answer: they take so many bytes at most, and keep pins and
        mode."""
        return [
            c
            for c in baselines.values()
            if c.cost.memory.total <= limit_bytes and self.offered.keeps(c)
        ]

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

    # --- solving and pricing
    # ------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def solve(self, problem: Problem, deeper: int = 1, below: float = np.inf) -> Solution:
        """The requested solver's answer; its choice may be empty. deeper: times the usual work
        limit; below: as in `Budget`."""
        left = None
        if self.request.time_limit_s is not None:
            left = max(0.05, self.request.time_limit_s - (time.monotonic() - self.started))
        name = self.request.solver if self.request.solver != "auto" else "dp"
        return self._ask(
            problem,
            name,
            Budget(
                time_limit_s=left,
                work=deeper * WORK[name] if name in WORK else None,
                seed=self.request.seed,
                below=below,
            ),
        )

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

    def bounded(self, bound_s: float, family: BestFirst) -> None:
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
        found = fastest if fastest.choice else replace(solved, bound=None)
        if (
            sum(usage_of(space, techniques, found.choice)) >= below
        ):  # known before the whole plan is priced
            return None
        return self.price(space, mesh, techniques, found, label, copies=copies)

    def price(
        self,
        space: Space,
        mesh: Mesh,
        techniques: Techniques,
        solved: Solution,
        label: str,
        unit_s: float = 1 / PICO,
        copies: int = 1,
    ) -> Candidate | None:
        """Price a solution as a whole plan; None where its blocks cannot be dealt out to stages.
        unit_s: of the solution's bound; copies: Plan.copies."""
        problem = assemble(space, techniques, self.request.limit_bytes)
        choice = tuple(int(x) for x in solved.choice)
        objective = evaluate(problem, choice).cost / PICO
        plan = Plan(
            mesh.shape,
            splits_of(space, choice),
            techniques.zero,
            mesh.zero_axes,
            techniques.recompute,
            techniques.microbatches,
            space.base.runs,
            schedule=techniques.schedule if mesh.stages > 1 else "",
            virtual=techniques.virtual,
            offload=self.offered.sent(space.base, mesh, techniques.recompute),
            copies=copies,
        )
        try:
            plan = with_cuts(
                space.base,
                plan,
                space.pricer,
                (self.request.limit_bytes, self.request.roomy_bytes),
                self.request.widths,
            )
            plan, cost = priced(space.base, plan, self.pricer(mesh), self.request.bucket)
        except PlanError as e:
            if e.code != "P068":
                raise
            self.refused = e
            return None
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
        self._details[id(candidate)] = candidate, space, choice, problem
        self.plans.append(plan)
        return candidate

    # --- baselines
    # ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def tuned_baselines(self) -> dict[str, Candidate]:
        """The baselines alone, for a plan that was not searched for."""
        found: dict[str, Candidate] = {}
        self._baselines(found)
        return self._called(found)

    def _baselines(self, found: dict[str, Candidate]) -> None:
        """Adds data_parallel, zero3, megatron and replicated, each tuned over microbatches,
        recompute and optimizer level under the same limits: with room where it fits so."""
        topology, n = self.request.topology, self.request.topology.devices
        one = (self.offered.replicas(),)
        node = topology.levels[0].size
        inner = tuple(
            m
            for m in meshes(topology)
            if len(m.axes) <= 2 and m.axes[-1].name == "tensor" and m.axes[-1].size <= node
        )
        levels = (0, 1) if self.training else (0,)
        families: list[tuple[str, tuple[Mesh, ...], Family, tuple[int, ...]]] = [
            ("data_parallel", one, lambda b, m: batch_only(b, m.shape, ("data",)), levels),
            ("replicated", (pinned_mesh(topology, {"data": n}),), lambda b, m: no_split(b), (0,)),
        ]
        if self.training:
            families.append(("zero3", one, lambda b, m: batch_only(b, m.shape, ("data",)), (3,)))
        base = self.base(1)
        staged = (
            tuple(m for m in self.offered.staged() if dict(m.shape).get("tensor", 1) <= node)
            if base is not None and base.dealt
            else ()
        )
        if n > 1 and (inner or staged):
            families.append(("megatron", inner + staged, megatron_only, levels))
        for label, on, allowed, at in families:
            explorer = BestFirst(
                self, label, on, allowed, at, self.request.roomy_bytes, pinned=False
            )
            try:
                best = explorer.run() or explorer.smallest()
                if (
                    best is not None
                    and self.request.roomy_bytes
                    < best.cost.memory.total
                    <= self.request.limit_bytes
                ):
                    explorer = BestFirst(self, label, on, allowed, at, pinned=False)
                    best = explorer.run() or best
            except KeyboardInterrupt:
                if explorer.best is not None:  # it may have been reported
                    found[label] = explorer.best
                raise
            if best is not None:
                found[label] = best
