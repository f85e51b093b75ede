"""What one search shares over its meshes and numbers of microbatches: graphs, pricers, spaces. Each
is made once, when it is first asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from planner.analysis.facts import GraphFacts
from planner.cache.reshard_tables import Tables
from planner.errors import PlanError
from planner.execution.pipeline import Schedule
from planner.execution.techniques import ZB_H1
from planner.machine.topology import Mesh
from planner.pricing.bucketing import OPEN, bounding
from planner.pricing.pricer import Pricer
from planner.search.domain import Family, SearchDomain
from planner.search.relaxation import Arithmetic, Relaxation
from planner.search.request import Request
from planner.sharding.layout import STAGE
from planner.sharding.layout_table import LayoutTable
from planner.sharding.rule import Limits, legal
from planner.space.build import build_space
from planner.space.families import Allowed, restrict
from planner.space.handover import least_handover_s
from planner.space.propagation import MODES
from planner.space.stage_shares import share_outside
from planner.space.variables import Space
from planner.support.weak_method import weakly
from planner.workload.model import Model

FEW_HEAVY = 0.6
"""Meshes are bounded by what is heavy in repeated blocks where that is this part of the decisions
at most (a guess: what is bounded twice takes so much longer)."""


class Workspace:
    """The graphs, pricers and spaces of a request. out_of_time: whether to make no more of them.

    cuts: of every node, the factors that plans and bounds so far cut: spaces of finer meshes take
    them up. refused: why the last mesh that cannot be had was refused.
    """

    def __init__(self, model: Model, request: Request, out_of_time: Callable[[], bool]) -> None:
        self.model, self.request = model, request
        self.training = model.workload.kind == "train"
        self.cuts: dict[str, set[str]] = {}
        self.refused: PlanError | None = None
        self.tables: Tables | None = None
        self.least: dict[tuple[Mesh, bool, tuple[int, ...]], float] = {}
        """Of meshes on which every plan was bounded, whatever memory it takes: with the user's pins
        or without, at some ZeRO stages, no plan takes less (seconds)."""
        self.relaxed: dict[tuple[Mesh, bool, tuple[int, ...]], Relaxation] = {}
        """Their spaces, relaxed: what bounds them without a limit serves under any."""
        self.offered = SearchDomain(model, request, weakly(self.base), weakly(out_of_time))
        self._bases: dict[int, GraphFacts | None] = {}
        self._spaces: dict[tuple, Space | None] = {}
        self.heavy: dict[tuple[Mesh, int, bool], Space | None] = {}
        """What `heavy_in_blocks` made."""
        self._pricers: dict[Mesh, Pricer] = {}
        self._bounding: dict[Mesh, Pricer] = {}
        self._atlas = LayoutTable()
        self._arithmetic: Arithmetic | None = None

    def take_up(self, space: Space, choice: Sequence[int]) -> None:
        """Let finer meshes cut what a choice cuts."""
        for v, k in zip(space.variables, choice, strict=True):
            if v.kind == "op" and (pairs := v.splits[k].pairs):
                name = space.base.graph.nodes[v.node].id
                self.cuts.setdefault(name, set()).update(f for f, _ in pairs)

    def base(self, microbatches: int) -> GraphFacts | None:
        """Rules, gradients and repeated blocks of the graph of one microbatch, with layers that are
        alike in a block deciding alike; None where the model cannot be read at that batch."""
        if microbatches not in self._bases:
            try:
                self._bases[microbatches] = self._base(microbatches)
            except PlanError as e:
                # Static reshapes of a batch mixed with other dims, and inputs whose shape was given
                # whole, cannot be read at a fraction of it; a live BatchNormalization must not be.
                if (
                    e.code not in ("P037", "P115", "P146")
                    or microbatches == 1
                    or "microbatches" in self.request.pins.techniques
                    or self.request.copies > 1
                ):
                    raise
                self._bases[microbatches] = None
        return self._bases[microbatches]

    def _base(self, microbatches: int) -> GraphFacts:
        """Nodes that are alike in both graphs that another was derived from are alike in that one
        too."""
        read = (
            self.model.graph
            if "microbatches" in self.request.pins.techniques
            else self.model.sketch
        )
        graph = read(microbatches)
        of_batch, of_small = (
            (self.base(m) for m in (1, self.model.small))
            if self.model.derived(microbatches)
            else (None, None)
        )
        if of_batch is not None and of_small is not None and of_batch.runs == of_small.runs:
            return of_batch.at(graph)
        base = GraphFacts.known(graph, training=self.training, fold=self.request.fold)
        pins, runtime = self.request.pins, self.request.runtime
        # Of what a user may pin, stages that are cut anywhere have no other recomputation.
        unpinned = pins.techniques.get("recompute", "block") == "block" and pins.techniques.get(
            "schedule"
        ) not in ("gpipe", ZB_H1)
        may_cut_anywhere = self.training and runtime.kernels is None and unpinned
        stages = min(pins.mesh.get(STAGE, (1,)))
        if may_cut_anywhere and base.repeats_too_much(stages):
            base = replace(base, cut_anywhere=True)
        # Pins of nodes may be of one layer alone.
        return base if pins.nodes or self.request.mode in MODES else base.tied

    def pricer(self, mesh: Mesh) -> Pricer:
        """One pricer a mesh: what it has priced serves every space on that mesh."""
        if mesh not in self._pricers:
            self._pricers[mesh] = Pricer(
                self.request.topology,
                mesh,
                self.request.runtime,
                self.request.recipe,
                self._atlas,
                offload=self.request.offload,
                written_out_up_to=self.request.written_out_up_to,
                kept=self.tables,
            )
        return self._pricers[mesh]

    def space_pricer(self, mesh: Mesh) -> Pricer:
        """What spaces of a mesh are priced by: below every plan's price, whatever is chosen after
        its splits."""
        if self.request.bucket != OPEN or not self.training:
            return self.pricer(mesh)
        if mesh not in self._bounding:
            base, counts = self.base(1), self.offered.microbatches(mesh)
            assert base is not None
            self._bounding[mesh] = bounding(
                base, self.pricer(mesh), self.floor(mesh, max(counts, default=1))
            )
        return self._bounding[mesh]

    def space(
        self,
        mesh: Mesh,
        micro: int,
        allowed: Family | None,
        pinned: bool = True,
        among: Allowed | None = None,
    ) -> Space | None:
        """The space of a mesh, restricted to a family of plans; with the user's pins unless it is a
        baseline's. among: nothing but these splits, where pins leave all."""
        base, pins, inner = self.base(micro), self.request.pins, Mesh(mesh.inner)
        if base is None:
            return None
        if refused := self.offered.unstaged(base, mesh):
            self.refused = refused
            return None
        pinned = pinned and not pins.empty
        key, limits = (mesh, micro, pinned), self._limits(pinned)
        if key in self._spaces or among is None:
            space = self._whole(key, base, limits)
            space = space if space is None or among is None else restrict(space, among)
        else:
            left = {
                i: tuple(s for s in splits if legal(base.rules[i], s, dict(inner.shape), limits))
                for i, splits in among.items()
            }
            space = self._built(mesh, micro, base, limits, left) if all(left.values()) else None
        return space if space is None or allowed is None else restrict(space, allowed(base, inner))

    def heavy_in_blocks(self, mesh: Mesh, micro: int, pinned: bool) -> Space | None:
        """Of a mesh's space what bounds without a limit ask of `GraphFacts.heavy_in_blocks`; None
        where that is no small part of all decisions, or pins leave nothing of the mesh."""
        key = mesh, micro, pinned
        if key not in self.heavy:
            self.heavy[key] = self._heavy_in_blocks(*key)
        return self.heavy[key]

    def _heavy_in_blocks(self, mesh: Mesh, micro: int, pinned: bool) -> Space | None:
        base, pinned = self.base(micro), pinned and not self.request.pins.empty
        if base is None or self.offered.by_alphabet(mesh) or self.request.mode in MODES:
            return None
        if len(base.heavy_in_blocks.times) > FEW_HEAVY * len(base.times):
            return None
        limits = self._limits(pinned)
        try:
            allowed = self._allowed(mesh, base.heavy_in_blocks, limits, pinned)
        except PlanError:  # said again, where it matters, when its space is built
            return None
        return self._built(mesh, micro, base.heavy_in_blocks, limits, allowed, seconds_alone=True)

    def outside_s(self, space: Space) -> float:
        """Seconds that products outside of the repeated blocks take a device at least, on the mesh
        of a space of what is heavy in them."""
        mesh = space.pricer.mesh
        devices = prod(axis.size for axis in mesh.inner)
        return self._of_products(mesh).outside_s * share_outside(space) / devices

    def _limits(self, pinned: bool) -> Limits:
        return Limits(
            spatial=self.model.batch < self.request.topology.devices,
            forbidden=self.request.pins.forbidden_factors if pinned else frozenset(),
        )

    def _allowed(
        self, mesh: Mesh, base: GraphFacts, limits: Limits, pinned: bool
    ) -> Allowed | None:
        """What the user's pins leave of each class of nodes, and where a mesh has too many splits
        what plans so far cut."""
        inner, fixed = Mesh(mesh.inner), None
        if pinned:
            fixed = self.offered.restricted(base, inner, limits)
        if not self.offered.by_alphabet(mesh):
            return fixed
        seen = self.offered.alphabet(base, inner, self.cuts)
        return {
            i: (
                tuple(s for s in splits if s in fixed[i]) or fixed[i]
                if fixed and i in fixed
                else splits
            )
            for i, splits in seen.items()
        }

    def _whole(self, key: tuple[Mesh, int, bool], base: GraphFacts, limits: Limits) -> Space | None:
        """The space of a mesh and number of microbatches, with the user's pins or without."""
        mesh, micro, pinned = key
        if key not in self._spaces:
            try:
                allowed = self._allowed(mesh, base, limits, pinned)
                self._spaces[key] = self._built(mesh, micro, base, limits, allowed)
            except PlanError as e:
                # A pin that one mesh cannot follow (it has no such axis, or one too large) leaves
                # the others.
                if e.code != "P025":
                    raise
                self.refused, self._spaces[key] = e, None
        return self._spaces[key]

    def _built(
        self,
        mesh: Mesh,
        micro: int,
        base: GraphFacts,
        limits: Limits,
        allowed: Allowed | None,
        seconds_alone: bool = False,
    ) -> Space:
        """The space of a mesh and number of microbatches, of the splits that are allowed."""
        return build_space(
            base,
            self.space_pricer(mesh),
            limits=limits,
            allowed=allowed,
            zero_axes=mesh.zero_axes,
            parts=micro,
            seconds_alone=seconds_alone,
        )

    def floor(self, mesh: Mesh, microbatches: int) -> float:
        """Seconds below which no plan on the mesh is, with at most so many microbatches: known
        without its space."""
        kinds = self.offered.schedules(mesh)
        finest = max((math.inf if s == ZB_H1 else v for s, v in kinds), default=1)
        least = self._of_products(mesh).least(mesh, microbatches, finest)
        if mesh.stages > 1 and (base := self.base(1)) is not None:
            passes = Schedule(mesh.stages, 0, kinds[0][0] if kinds else "1f1b")
            least += least_handover_s(base, self.pricer(mesh), 1, passes)
        return least

    def _of_products(self, mesh: Mesh) -> Arithmetic:
        """Seconds of products, the same on every mesh."""
        if self._arithmetic is None:
            base = self.base(1)
            assert base is not None
            self._arithmetic = Arithmetic.of(base, self.pricer(mesh))
        return self._arithmetic
