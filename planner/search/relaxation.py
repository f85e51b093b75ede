"""Lower bounds of one space, many at a time: elimination compiled once, run for each choice of
techniques.

The space is that of the whole batch or of large microbatches (`planner.space.assemble`, uncut): its
optimum is below that of every multiple of their number. Techniques change only the costs of single
options, and (when reshards are recomputed) the tables of links, so at most two compiled
eliminations serve a space.

Costs are picoseconds in float64, not rounded; what rounding in their sums can add to a bound is
taken off it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.machine.topology import Mesh
from planner.ops import operator_of
from planner.pricing.pricer import Pricer
from planner.search.keep_steps import charges, steps_of
from planner.sharding.rule import Split
from planner.solvers.exact.elimination import Scratch, Tree, compile_tree
from planner.solvers.exact.minibucket import split_tree
from planner.solvers.model import Model, restrict
from planner.space.assemble import (
    PICO,
    bytes_of,
    least_working,
    recomputed_link_shares,
    seconds_of,
    split_waits_s,
)
from planner.space.handover import handover_s
from planner.space.stage_shares import (
    has_uneven_stages,
    link_scale,
    parts_of_stage,
    slowdown,
    ticking,
)
from planner.space.techniques import Techniques
from planner.space.variables import Space

PRICES, FIRST_PRICE, RISE, WIDE_STEP, LEAST_STEP, CLOSE = 8, 0.05, 4.0, 8, 2, 1e-3
"""Of memory in a bound: how many are tried at most, the first (in whole costs for what exceeds the
limit), by what it rises while nothing fits; where variables were split the steps between two that
are tried, largest and least (`PriceLineSearch`); and what gain is not worth another."""
FAR = 100.0
"""Times the bound without a memory limit that one under it is raised to at most: where nothing fits
in pieces that only bounds know of, it would rise without end."""
FASTER = 0.01
"""A space is relaxed anew for plans that are faster by this share: a guess at when the options that
this leaves out pay for looking for them (with tables that are then small enough to be exact,
mostly)."""
FEWER = 0.9
"""A bound of an elimination that would be too large is worked out again while no more than this
part of the options is left."""
ROOM, WIDEST = 4e6, 2e4
"""Entries of all tables that an elimination may have, and of each where it would need more and
variables are split: many run, and what wide tables gain over narrow ones that costs are shifted
between (`Tree.tighten`) is little."""
NEAR = 32
"""Of what is known of other techniques so many, those found last, are looked at for a quick
bound."""
ROUNDING, STEP = 1e-11, 2.0
"""What a bound may be too high by: relatively, and in picoseconds (solvers call a gap below one
unit closed)."""


@dataclass(frozen=True)
class Arithmetic:
    """Seconds that the products of the whole batch, but attention's, would take one device, at the
    efficiency of the whole: of the blocks that stages share, and of the rest; outside_s: what of
    the rest is in no repeated block.

    A device of n takes at least an n-th of each: products lose efficiency as they shrink.
    """

    blocks_s: float
    rest_s: float
    repeats: int
    outside_s: float

    @classmethod
    def of(cls, base: GraphFacts, pricer: Pricer) -> Arithmetic:
        """base: of the whole batch. repeats: 0 where stages may be cut anywhere."""
        first, period, repeats = (
            base.dealt[0]
            if base.dealt
            else (0, len(base.graph.nodes), 1)
            if base.places
            else (0, 0, 1)
        )
        inside = range(first, first + period * repeats)
        totals_s, known, outside_s = [0.0, 0.0], dict[float, float](), 0.0
        for i, work in base.backward.items():
            node, flops = base.graph.nodes[i], base.rules[i].flops
            kernels = operator_of(node.op)
            # Attention's kernels leave out pairs that a mask hides.
            if kernels.filling is None and kernels.kind != "attention" and not node.bodies:
                if flops not in known:
                    known[flops] = pricer.least_s(flops, pricer.recipe.compute)
                backward = 0.0 if not base.training or base.grad.isdisjoint(node.outputs) else work
                seconds = (1 + backward) * known[flops]
                totals_s[i not in inside] += seconds
                outside_s += seconds * (i not in base.repeated)
        if base.places and not base.dealt:
            repeats = 0
        return cls(totals_s[0], totals_s[1], repeats, outside_s)

    def least(self, mesh: Mesh, microbatches: int, virtual: float = 1) -> float:
        """No plan on the mesh with at most so many microbatches, and chunks of blocks a stage, is
        faster (seconds): every stage runs its blocks in as many ticks as it has chunks, and the
        rest itself. virtual: infinite where part of the bubble has work."""
        stages, devices = mesh.stages, prod(a.size for a in mesh.inner)
        part = -(-self.repeats // stages) / self.repeats if self.repeats else 1 / stages
        share = part * (1 + (stages - 1) / (microbatches * virtual)) if stages > 1 else 1.0
        return (share * self.blocks_s + self.rest_s) / devices * (1 - ROUNDING)


@dataclass
class PriceLineSearch:
    """A bound under a memory limit where variables were split, on its way up over prices of a byte:
    `start` times powers of 2^(1/8).

    enough: the bound from which on none is needed; at: the power of the best so far; top: the bound
    there; step: how far off the next are; shift: of costs between parts at the best.
    """

    start: float
    enough: float
    at: int = 0
    top: float = -np.inf
    step: int = WIDE_STEP
    shift: dict[int, np.ndarray] = field(default_factory=dict)
    _tried: set[int] = field(default_factory=set)

    @property
    def price(self) -> float:
        """The best so far."""
        return self._of(self.at)

    @property
    def over(self) -> bool:
        """Whether steps up and down gain nothing, or nothing that matters."""
        return self.step < LEAST_STEP or self.top >= self.enough

    def step_with(self, height: Callable[[float], float]) -> None:
        """Try the start, then a price above the best and, unless that gains, one below: heights
        rise to one price and fall from there, nearly. Where neither gains the next are nearer."""
        top_before = self.top
        for power in (self.at + self.step, self.at - self.step) if self._tried else (0,):
            if power not in self._tried:
                self._tried.add(power)
                reached = height(self._of(power))
                if reached > self.top:
                    self.at, self.top = power, reached
                    break
        if np.isfinite(top_before) and self.top <= top_before + CLOSE * abs(top_before):
            self.step //= 2

    def _of(self, power: int) -> float:
        return float(self.start * 2 ** (power / 8))


class Relaxation:
    """Bounds of a space without a memory limit, or under one. The tree of the last call is
    overwritten by the next, of any that shares the scratch."""

    def __init__(self, space: Space, scratch: Scratch | None = None) -> None:
        self.space, self.scratch = space, scratch or Scratch()
        self.offset = np.concatenate(([0], np.cumsum([v.options for v in space.variables])))
        self._all_offset = self.offset
        self.considered = np.arange(self.offset[-1])
        """Options that are looked at, of all those of the space in a row."""
        self._models: dict[tuple[bool, bool], Model] = {}
        """(whether any link's reshards are recomputed, whether what follows the blocks is counted)
        -> the reshards of all options."""
        self._trees: dict[tuple[bool, bool], Tree] = {}
        """Their elimination over the options that are looked at, or a bound of it where that is too
        wide."""
        self._least = np.zeros(0), 0.0
        """Costs of those options that no techniques are below, and what the elimination of `least`
        found under them (as a tree's)."""
        self._found: list[tuple[bool, np.ndarray, float]] = []
        """Of what `free` ran: whether reshards are recomputed, costs, and what an elimination found
        under them."""
        self.free_known: dict[tuple, tuple[np.ndarray, float] | None] = {}
        """Kept by planner.search.node_bounds: what `free` found."""
        self.near_known: dict[tuple, Any] = {}
        """Kept by planner.search.saved_collective_bounds: per microbatches, ZeRO stages and bound
        what of the mesh's plans that save results of collectives may be below that."""
        self._tick: float | None = None
        self._bubbles: dict[tuple[int, int, str], float] = {}
        """What `bubble_s` found."""
        self.exact = True
        """Whether what `least` found is of an exact elimination: tables were not too large."""
        self._price = 0.0
        """Of a byte, in the last bound under a memory limit: the next is near."""
        self._line_searches: dict[Techniques, PriceLineSearch] = {}
        """Of bounds under a memory limit where variables were split."""
        self._charged: np.ndarray | None = None
        """Seconds of one node that `_surely_again_s` counts, of all options."""
        self._below_s = 0.0
        """Bounds are of plans below that: `least` was asked so."""

    def serves(self, below_s: float) -> bool:
        """Whether bounds hold of plans below that: as `least` was asked, which found less."""
        least = self._proven(self._least[1])
        return bool(len(self._least[0])) and below_s <= self._below_s and least < self._below_s

    def again_below(self, below_s: float) -> Relaxation | None:
        """The same space relaxed anew for plans so much faster than what bounds are of now that far
        fewer options may be left; None where they are not."""
        if not below_s < (1 - FASTER) * self._below_s:
            return None
        return Relaxation(self.space, self.scratch)

    def forget_limit(self) -> None:
        """Forget what bounds under a limit of memory were found with."""
        self._price, self._line_searches = 0.0, {}

    def least(self, levels: Sequence[int], below_s: float = np.inf) -> float:
        """No plan of the space is faster (seconds): as few microbatches as it is of, nothing
        recomputed, no more copied into stacks of loops than where blocks are recomputed, each
        weight at its cheapest ZeRO stage, no memory limit. below_s: from now on bounds are of plans
        faster than that; options that none of them has are not looked at.
        """
        self._below_s = below_s
        endless = [Techniques(z, microbatches=0) for z in levels]
        cost = units(np.minimum.reduce([self._least_seconds(t) for t in endless]), 1.0)
        if np.isfinite(below_s):
            # Before any table of reshards: what an option costs by itself, and every other variable
            # at its cheapest.
            lowest = np.minimum.reduceat(cost, self.offset[:-1])
            possible = self._below(
                cost + np.repeat(lowest.sum() - lowest, np.diff(self.offset)), below_s
            )
            if not np.logical_or.reduceat(possible, self.offset[:-1]).all():
                return below_s
            cost = self._keep(possible, cost)
        if np.isinf(below_s):
            tree = self._compiled(endless[0])
            self._least, self.exact = (cost, tree.run(cost)[0]), tree.exact
            return self._proven(self._least[1])
        while True:
            tree = self._compiled(endless[0])
            value, marginals = tree.marginals(cost)
            # Of parts of variables each knows something else, so that the dearest of all variables
            # may tell more than their sum.
            value, self.exact = (
                max(value, float(np.minimum.reduceat(marginals, self.offset[:-1]).max())),
                tree.exact,
            )
            if (bound := self._proven(value)) >= below_s:
                break
            possible = self._below(marginals, below_s)
            cost = self._keep(possible, cost)
            if tree.exact or possible.mean() > FEWER:
                break
        self._least = cost, value
        return min(bound, below_s)  # of plans with the options left out nothing more is known

    @staticmethod
    def _below(least_cost: np.ndarray, below_s: float) -> np.ndarray:
        """Which options may be in a plan below that (seconds). least_cost: what a plan with the
        option costs at least (picoseconds). [options looked at]"""
        possible: np.ndarray = least_cost * (1 - ROUNDING) - STEP < below_s * PICO
        return possible

    def _keep(self, possible: np.ndarray, cost: np.ndarray) -> np.ndarray:
        """Look at these options only (possible: whether each that is looked at stays); their
        costs."""
        self.considered, self.offset = (
            self.considered[possible],
            np.concatenate(([0], np.cumsum(np.add.reduceat(possible, self.offset[:-1])))),
        )
        self._trees, self._line_searches, self._found = {}, {}, []
        return cost[possible]

    def quick(self, techniques: Techniques, microbatches: int) -> float:
        """No more than the bound of `free`, without an elimination: what `least` found, or `free`
        of other techniques, and of every variable the least that these add to its options. Only
        after `least`."""
        tried = replace(techniques, microbatches=microbatches)
        slow, (cheapest, value) = slowdown(self.space, tried), self._least
        cost, first = units(self._seconds(tried), slow), self.offset[:-1]
        possible = np.isfinite(cost)
        if not np.logical_or.reduceat(possible, first).all():
            return np.inf
        recomputes = any(recomputed_link_shares(self.space, tried))
        known = [
            (c, v)
            for also_recomputes, c, v in self._found[-NEAR:]
            if recomputes or not also_recomputes
        ]
        costs = np.array([cheapest, *(c for c, _ in known)])
        added = np.subtract(cost, costs, out=np.full(costs.shape, np.inf), where=possible)
        least = np.minimum.reduceat(added, first, axis=1).sum(axis=1)
        least += [value, *(v for _, v in known)]
        return self._proven(float(least.max()) * slow)

    def by_virtual_stages(
        self, found_s: float, techniques: Techniques, microbatches: int, virtual: int
    ) -> float:
        """A bound for these techniques by that of `free` (found_s) for `virtual` chunks a pipeline
        stage; 0 where it is none.

        Where ticks take a smaller part of a microbatch's time, everything becomes shorter by that
        part at most: what precedes repeated blocks runs the more often the more chunks there are,
        reductions once. Of uneven stages nothing precedes, so that longer ticks make nothing
        shorter. What stages hand on is told apart: there is the more of it the more chunks there
        are.
        """
        unsplit = replace(techniques, microbatches=microbatches)
        split = replace(unsplit, virtual_stages=virtual)
        part = slowdown(self.space, unsplit) / slowdown(self.space, split)
        if part > 1 and not has_uneven_stages(self.space):
            return 0.0
        handover_unsplit_s, handover_split_s = (
            handover_s(self.space, microbatches, t.schedule, t.virtual_stages)
            for t in (unsplit, split)
        )
        return max(0.0, min(part, 1.0) * (found_s - handover_split_s) + handover_unsplit_s)

    def in_space(self, choice: np.ndarray) -> list[int]:
        """A choice of the options that are looked at, as options of the space."""
        options: list[int] = (
            self.considered[self.offset[:-1] + choice] - self._all_offset[:-1]
        ).tolist()
        return options

    @property
    def splits(self) -> dict[int, tuple[Split, ...]] | None:
        """Per class of nodes those that are looked at, None where all are."""
        if len(self.considered) == self._all_offset[-1]:
            return None
        rows = np.split(self.considered, self.offset[1:-1])
        return {
            v.node: tuple(v.splits[k - first] for k in row.tolist())
            for v, row, first in zip(
                self.space.variables, rows, self._all_offset.tolist(), strict=False
            )
            if v.kind == "op"
        }

    def bubble_s(self, microbatches: int, virtual: int = 1, schedule: str = "1f1b") -> float:
        """What the bubble of a pipeline adds at least (seconds) to any bound for endless
        microbatches: its ticks, each at least as long as the shortest; and what more microbatches
        than the space's wait for the host."""
        key = microbatches, virtual, schedule
        if key not in self._bubbles:
            techniques = Techniques(
                microbatches=microbatches, virtual_stages=virtual, schedule=schedule
            )
            slow, waits = (
                slowdown(self.space, techniques),
                split_waits_s(self.space, techniques)[self.considered],
            )
            least = float(np.minimum.reduceat(waits, self.offset[:-1]).sum()) * (1 - ROUNDING)
            self._bubbles[key] = least + ((slow - 1) * self._shortest() if slow > 1 else 0.0)
        return self._bubbles[key]

    def _shortest(self) -> float:
        """Seconds of all ticks at least, were there no bubble."""
        if self._tick is None:
            # Everything that runs in ticks at its cheapest, and nothing else: reductions once a
            # step, head and loss are left out.
            endless = Techniques(microbatches=0)
            ticks = self._run(ticking(self.space, endless)[self.considered], endless, ends=False)
            self._tick = 0.0 if ticks is None else ticks[1]
        return self._tick

    def free(self, techniques: Techniques, microbatches: int) -> tuple[np.ndarray, float] | None:
        """A fastest choice and the bound (seconds) without a memory limit, for this many
        microbatches; None where none is possible."""
        tried = replace(techniques, microbatches=microbatches)
        seconds = self._seconds(tried)
        fastest = self._run(seconds, tried)
        if fastest is not None and np.isfinite(fastest[1]):
            slow = slowdown(self.space, tried)
            value = fastest[1] * PICO / slow
            self._found.append(
                (any(recomputed_link_shares(self.space, tried)), units(seconds, slow), value)
            )
        return fastest

    def recompute_adds_s(self, recompute: str) -> float:
        """What plans of this recompute take more at least (seconds) than `least` counts: nodes that
        run again, and what is copied into stacks of loops."""
        techniques = Techniques(0, recompute, 0)
        return self._least_difference(self._least_seconds(techniques), self._seconds(techniques))

    def changes_by_s(self, known: Techniques, techniques: Techniques) -> float:
        """By what plans of techniques are at least slower (seconds; below 0: at most faster) than
        others of the same mesh that differ in recompute alone, results of collectives saved or
        not: what is saved is copied into stacks of loops, what is not runs again."""
        if known.recompute == techniques.recompute:
            return 0.0
        seconds = self._seconds(techniques)
        if techniques.recompute == "block-keep" and self.space.pricer.runtime.kernels is None:
            seconds = self._least_seconds(techniques) + self._surely_again_s(techniques)
        return self._least_difference(self._seconds(known), seconds)

    def _surely_again_s(self, techniques: Techniques) -> np.ndarray:
        """Seconds of the nodes that run again whichever results of collectives are saved."""
        if self._charged is None:
            self._charged = charges(self.space)
            for k in {step.variable for step in steps_of(self.space)}:
                self._charged[self._all_offset[k] : self._all_offset[k + 1]] = 0.0
        share = parts_of_stage(self.space, techniques)[0]
        times = self.space.parts * share * [v.count for v in self.space.variables]
        nodes_s: np.ndarray = np.repeat(times, np.diff(self._all_offset))[self.considered]
        return nodes_s * self._charged[self.considered]

    def _least_difference(self, before: np.ndarray, after: np.ndarray) -> float:
        """The least by which a choice of options takes more after than before, in safety; options
        that are impossible in both, before and after, are in no choice."""
        added = np.subtract(after, before, out=np.zeros(len(after)), where=np.isfinite(before))
        difference_s = float(np.minimum.reduceat(added, self.offset[:-1]).sum())
        return difference_s - ROUNDING * abs(difference_s)

    def limited(
        self,
        techniques: Techniques,
        limit_bytes: float,
        free: tuple[float, float],
        enough_s: float = np.inf,
    ) -> float:
        """A bound (seconds) under a memory limit: the best over prices of a byte, or the first of
        at least `enough_s`. free: bound and bytes of the choice without a limit, which exceeds it.
        Where variables were split it is a rough one (`tightened`).

        At a price the cheapest choice is a line below the bound's height over all prices; where the
        lines of one that fits and one that does not meet is next.
        """
        slow, option_bytes, first = (
            slowdown(self.space, techniques),
            self._bytes(techniques),
            self.offset[:-1],
        )
        room = limit_bytes - least_working(self.space, techniques, uncut=True)
        if np.minimum.reduceat(option_bytes, first).sum() > room:
            return np.inf
        cost, enough = (
            units(self._seconds(techniques), slow),
            min(enough_s, FAR * free[0]) * PICO / slow,
        )
        low = 0.0, free[0] * PICO / slow, free[1] - room  # price, height, slope
        high: tuple[float, float, float] | None = None
        best, price = low[1], self._price or low[1] * FIRST_PRICE / low[2]
        if np.isfinite(enough):
            price = max(price, (enough - low[1]) / low[2])
        if not self._compiled(techniques).exact:
            rough = self._searched(techniques, PriceLineSearch(price, enough), room)
            return self._proven(max(best, rough) * slow)
        for _ in range(PRICES):
            value, used = self._priced(techniques, cost, option_bytes, price)
            height, slope = value - price * room, used - room
            if height > best:
                best, self._price = height, price
            if not height < enough or not slope:
                break
            low, high = (
                ((price, height, slope), high) if slope > 0 else (low, (price, height, slope))
            )
            if high is None:
                price *= RISE
                continue
            price = (low[1] - high[1] + high[2] * high[0] - low[2] * low[0]) / (high[2] - low[2])
            if not low[0] < price < high[0] or low[1] + low[2] * (price - low[0]) <= best * (
                1 + CLOSE
            ):
                break
        return self._proven(best * slow)

    def _searched(self, techniques: Techniques, search: PriceLineSearch, room: float) -> float:
        """The height of a line search over prices where variables were split: the bounds that they
        give are no lines that a choice tells. The next search begins at its price."""
        cost = units(self._seconds(techniques), slowdown(self.space, techniques))
        option_bytes = self._bytes(techniques)
        while not search.over:
            search.step_with(
                lambda p: self._priced(techniques, cost, option_bytes, p)[0] - p * room
            )
        self._price = search.price
        self._line_searches[techniques] = PriceLineSearch(search.price, search.enough)
        return search.top

    def rough(self, techniques: Techniques) -> bool:
        """Whether what `limited` found of these techniques is a rough bound, which `tightened` may
        raise."""
        return techniques in self._line_searches

    def tightened(
        self, techniques: Techniques, limit_bytes: float, enough_s: float = np.inf
    ) -> tuple[float, bool]:
        """A better bound than that of `limited`, after it, where variables were split, and whether
        another call may find a still better one: costs are shifted between their parts
        (`Tree.tighten`), first at the price that was best, then at two around the best, nearer with
        each call that gains nothing.
        """
        slow, option_bytes, line_search = (
            slowdown(self.space, techniques),
            self._bytes(techniques),
            self._line_searches[techniques],
        )
        room = limit_bytes - least_working(self.space, techniques, uncut=True)
        cost, start = (
            units(self._seconds(techniques), slow),
            line_search.shift or self._compiled(techniques).shift,
        )
        line_search.enough = min(line_search.enough, enough_s * PICO / slow)

        def height(price: float) -> float:
            tree = self._at(techniques, price)
            tree.shift = start
            reached = (
                tree.tighten(cost + price * option_bytes, line_search.enough + price * room)
                - price * room
            )
            if reached > line_search.top:
                line_search.shift = tree.shift
            return reached

        line_search.step_with(height)
        self._compiled(techniques).shift = line_search.shift
        return self._proven(line_search.top * slow), not line_search.over

    def _priced(
        self, techniques: Techniques, cost: np.ndarray, option_bytes: np.ndarray, price: float
    ) -> tuple[float, float]:
        """The least cost under a price of a byte (picoseconds a byte), and the bytes of the choice
        that has it. cost (picoseconds), option_bytes: of each option. [options looked at]"""
        value, choice, _ = self._at(techniques, price).run(cost + price * option_bytes)
        return value, self._used(techniques, option_bytes, choice)

    def _at(self, techniques: Techniques, price: float) -> Tree:
        """The elimination under a price of a byte of what pairs of options hold: of this space none
        does."""
        return self._compiled(techniques)

    def _used(self, techniques: Techniques, option_bytes: np.ndarray, choice: np.ndarray) -> float:
        """Bytes of a choice. option_bytes: of each option. [options looked at]"""
        return float(option_bytes[self.offset[:-1] + choice].sum())

    def usage(self, techniques: Techniques, choice: np.ndarray) -> float:
        """Bytes of a choice, its working set left out."""
        return self._used(techniques, self._bytes(techniques), choice)

    def _bytes(self, techniques: Techniques) -> np.ndarray:
        return bytes_of(self.space, techniques, uncut=True)[self.considered]

    def _seconds(self, techniques: Techniques) -> np.ndarray:
        return seconds_of(self.space, techniques, uncut=True)[self.considered]

    def _least_seconds(self, techniques: Techniques) -> np.ndarray:
        """The same where nothing runs again and no more is copied into stacks of loops than where
        blocks are recomputed: no recompute takes less."""
        plain = replace(techniques, recompute="none")
        return seconds_of(self.space, plain, uncut=True, copies="block")[self.considered]

    def _run(
        self, seconds: np.ndarray, techniques: Techniques, *, ends: bool = True
    ) -> tuple[np.ndarray, float] | None:
        # A pipeline's ticks slow everything alike but what follows the blocks (at most to half:
        # `link_scale`), so one tree serves any number of microbatches.
        slow = slowdown(self.space, techniques)
        value, choice, _ = self._compiled(techniques, ends=ends).run(units(seconds, slow))
        return (choice, self._proven(value * slow)) if np.isfinite(value) else None

    @staticmethod
    def _proven(value: float) -> float:
        return max(0.0, (value * (1 - ROUNDING) - STEP) / PICO)

    def _compiled(self, techniques: Techniques, *, ends: bool = True) -> Tree:
        recomputed = recomputed_link_shares(self.space, techniques)
        key = any(recomputed), ends
        if key not in self._trees:
            if key not in self._models:
                scale = link_scale(self.space, replace(techniques, microbatches=0), ends=ends)
                self._models[key] = Model(
                    self._all_offset,
                    np.zeros(self._all_offset[-1]),
                    self._pairs(recomputed, scale),
                    None,
                )
            self._trees[key] = self._tree(self._models[key])
        return self._trees[key]

    def _pairs(
        self, recomputed: Sequence[float], scale: Sequence[float]
    ) -> dict[tuple[int, int], np.ndarray]:
        """Reshards between variables, parallel links added up (picoseconds of ticks without a
        bubble). recomputed, scale: of each link the share of its reshards that is recomputed, and
        the part of its time that counts. [links]"""
        table_of: dict[tuple, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for link, recomputed_share, part in zip(self.space.links, recomputed, scale, strict=True):
            key = (id(link.forward_s), id(link.backward_s), link.count, recomputed_share, part)
            if key not in table_of:
                seconds = link.forward_s * (1 + recomputed_share) + link.backward_s
                table_of[key] = (
                    part * PICO * self.space.parts * link.count * seconds
                    if part
                    else np.zeros_like(seconds)
                )
            pair, table = (
                ((link.a, link.b), table_of[key])
                if link.a < link.b
                else ((link.b, link.a), table_of[key].T)
            )
            pairs[pair] = pairs[pair] + table if pair in pairs else table
        return pairs

    def _tree(self, model: Model) -> Tree:
        """The elimination of a model of the whole space over the options that are looked at."""
        if len(self.considered) < self._all_offset[-1]:
            model = restrict(
                model,
                np.split(
                    self.considered - np.repeat(self._all_offset[:-1], np.diff(self.offset)),
                    self.offset[1:-1],
                ),
            )
        return self._eliminated(model)

    def _eliminated(self, model: Model) -> Tree:
        """The elimination of a model of what is looked at: of the same variables and pairs as any
        before."""
        like = next(iter(self._trees.values()), None)
        if like is not None:
            return like.with_pairs(model.pairs)
        tree = compile_tree(model, total_limit=ROOM) or split_tree(model, WIDEST)
        tree.scratch = self.scratch
        return tree


def units(seconds: np.ndarray, slow: float) -> np.ndarray:
    """Costs of a tree: picoseconds as long as ticks take without a bubble."""
    return np.where(np.isfinite(seconds), seconds * (PICO / slow), np.inf)
