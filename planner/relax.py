"""Lower bounds of one space, many at a time: elimination compiled once, run for each choice of techniques.

The space is that of the whole batch or of large microbatches (`planner.assemble`, uncut): its optimum is below that of every multiple of their number.
Techniques change only the costs of single options, and (when collectives are replayed) the tables of links, so at most two compiled eliminations serve a space.

Costs are picoseconds in float64, not rounded; what rounding in their sums can add to a bound is taken off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.assemble import PICO, Techniques, bytes_of, least_working, link_scale, replayed, seconds_of, slowdown, ticking, usage_of
from planner.price import Pricer
from planner.problem import Budget
from planner.solvers.dp import Outcome, clock_of, solve_model
from planner.solvers.elimination import Scratch, Tree, compile_tree
from planner.solvers.minibucket import bounded, order_for
from planner.solvers.model import Memory, Model
from planner.space import Base, Space
from planner.topology import Mesh

OWN = frozenset({"RoutedExperts"})
"""Operators whose time is not that of one product."""
WORK = 200_000
"""Of a bound under a memory limit: its prices are worth a few eliminations, closing the last of the gap is not."""
ROUNDING, STEP = 1e-11, 2.0
"""What a bound may be too high by: relatively, and in picoseconds (solvers call a gap below one unit closed)."""


@dataclass(frozen=True)
class Arithmetic:
    """Seconds that the products of the whole batch would take one device, at the efficiency of the whole: of the blocks that stages share, and of the rest.

    A device of n takes at least an n-th of each: products lose efficiency as they shrink.
    """

    blocks_s: float
    rest_s: float
    repeats: int

    @classmethod
    def of(cls, base: Base, pricer: Pricer) -> Arithmetic:
        """base: of the whole batch."""
        run = base.dealt[0] if base.dealt else (0, 0, 1)
        inside, found = range(run[0], run[0] + run[1] * run[2]), [0.0, 0.0]
        for i, rule in enumerate(base.rules):
            node = base.graph.nodes[i]
            if rule.flops and node.op not in OWN and not node.bodies:
                backward = base.backward[i] if base.training and any(o in base.grad for o in node.outputs) else 0.0
                found[i not in inside] += (1 + backward) * pricer.kernel_s(rule.flops, 0.0, pricer.recipe.compute)
        return cls(found[0], found[1], run[2])

    def least(self, mesh: Mesh, microbatches: int, virtual: int = 1) -> float:
        """No plan on the mesh with at most so many microbatches, and chunks of blocks a stage, is faster (seconds): every stage runs its blocks in as many
        ticks as it has chunks, and the rest itself."""
        stages, devices = mesh.stages, prod(a.size for a in mesh.inner)
        share = -(-self.repeats // stages) / self.repeats * (1 + (stages - 1) / (microbatches * virtual)) if stages > 1 else 1.0
        return (share * self.blocks_s + self.rest_s) / devices * (1 - ROUNDING)


class Relaxed:
    """Bounds of a space without a memory limit, or under one. The tree of the last call is overwritten by the next, of any that shares the scratch."""

    def __init__(self, space: Space, scratch: Scratch | None = None) -> None:
        self.space, self.scratch = space, scratch or Scratch()
        self.offset = np.concatenate(([0], np.cumsum([len(v.kept_bytes) for v in space.variables])))
        self._trees: dict[tuple[bool, bool], tuple[Model, Tree | list[int]]] = {}
        """Per set of replayed links (with or without what follows the blocks) the tables, and their elimination or (too wide for one) the order of bounds without."""
        self._tick: float | None = None

    def least(self, levels: Sequence[int]) -> float:
        """No plan of the space is faster (seconds): as few microbatches as it is of, nothing replayed, each weight at its cheapest optimizer level, no memory limit."""
        endless = [Techniques(z, microbatches=0) for z in levels]
        found = self._run(np.minimum.reduce([seconds_of(self.space, t, uncut=True) for t in endless]), endless[0], None)
        return np.inf if found is None else found[1]

    def waiting(self, microbatches: int, virtual: int = 1) -> float:
        """What the bubble of a pipeline adds at least (seconds) to any bound for endless microbatches: its ticks, each at least as long as the shortest."""
        slow = slowdown(self.space, Techniques(microbatches=microbatches, virtual=virtual))
        if slow == 1:
            return 0.0
        if self._tick is None:
            # Everything that runs in ticks at its cheapest, and nothing else: reductions once a step, head and loss are left out.
            endless = Techniques(microbatches=0)
            found = self._run(ticking(self.space, endless), endless, None, ends=False)
            self._tick = 0.0 if found is None else found[1]
        return (slow - 1) * self._tick

    def free(self, techniques: Techniques, microbatches: int) -> tuple[np.ndarray, float] | None:
        """A fastest choice (empty where only the bound is known) and the bound (seconds) without a memory limit, for this many microbatches; None where none
        is possible."""
        at = replace(techniques, microbatches=microbatches)
        return self._run(seconds_of(self.space, at, uncut=True), at, None)

    def again(self, recompute: str) -> float:
        """What recomputation adds at least (seconds) to any bound without it."""
        plain, more = (seconds_of(self.space, Techniques(0, r, 0), uncut=True) for r in ("none", recompute))
        return max(0.0, float(np.minimum.reduceat(more - plain, self.offset[:-1]).sum()) * (1 - ROUNDING))

    def limited(self, techniques: Techniques, limit_bytes: float) -> float:
        """The bound (seconds) under a memory limit, +inf where nothing fits."""
        room = limit_bytes - least_working(self.space, techniques, uncut=True)
        found = self._run(seconds_of(self.space, techniques, uncut=True), techniques, room)
        return np.inf if found is None else found[1]

    def usage(self, techniques: Techniques, choice: np.ndarray) -> float:
        """Bytes of a choice, its working set left out; +inf of none (a bound without exact tables may come without a choice)."""
        return np.inf if not len(choice) else usage_of(self.space, techniques, choice, uncut=True)[0]

    def _run(self, seconds: np.ndarray, techniques: Techniques, limit: float | None, *, ends: bool = True) -> tuple[np.ndarray, float] | None:
        # A pipeline's ticks slow everything alike but what follows the blocks (at most to half: `link_scale`), so one tree serves any number of microbatches.
        slow = slowdown(self.space, techniques)
        cost = np.where(np.isfinite(seconds), seconds * (PICO / slow), np.inf)
        shape, tree = self._compiled(techniques, ends)
        memory = None if limit is None else self._memory(techniques, limit)
        if isinstance(tree, Tree) and memory is None:
            value, x, _ = tree.run(cost)
            return (x, self._proven(value * slow)) if np.isfinite(value) else None
        clock = clock_of(Budget(work=WORK), WORK)
        model = Model(self.offset, cost, shape.pairs, memory)
        if isinstance(tree, Tree):
            tree.model = model
            found = solve_model(model, clock, tree=tree)
        else:
            choice, bound = bounded(model, clock, None, order=tree)
            found = Outcome(choice, bound, bound == np.inf)
        if clock.stopped == "interrupt":
            raise KeyboardInterrupt
        if found.infeasible:
            return None
        return np.zeros(0, np.int64) if found.choice is None else found.choice, self._proven(found.bound * slow)

    @staticmethod
    def _proven(value: float) -> float:
        return max(0.0, (value * (1 - ROUNDING) - STEP) / PICO) if np.isfinite(value) else 0.0

    def _compiled(self, techniques: Techniques, ends: bool) -> tuple[Model, Tree | list[int]]:
        twice = replayed(self.space, techniques)
        key = any(twice), ends
        if key not in self._trees:
            tables: dict[tuple, np.ndarray] = {}
            pairs: dict[tuple[int, int], np.ndarray] = {}
            scale = link_scale(self.space, replace(techniques, microbatches=0), ends=ends)
            for link, again, part in zip(self.space.links, twice, scale, strict=True):
                at = (id(link.forward_s), id(link.backward_s), link.count, again, part)
                if at not in tables:
                    seconds = link.forward_s * (2 if again else 1) + link.backward_s
                    tables[at] = part * PICO * self.space.parts * link.count * seconds if part else np.zeros_like(seconds)
                pair, table = ((link.a, link.b), tables[at]) if link.a < link.b else ((link.b, link.a), tables[at].T)
                pairs[pair] = pairs[pair] + table if pair in pairs else table
            model = Model(self.offset, np.zeros(self.offset[-1]), pairs, None)
            tree = compile_tree(model)
            if tree is not None:
                tree.scratch = self.scratch
            self._trees[key] = model, tree or order_for(model)
        return self._trees[key]

    def _memory(self, techniques: Techniques, limit: float) -> Memory | None:
        """One row: everything is alive at the end of the last forward pass. None where no choice can exceed the limit."""
        use, first = bytes_of(self.space, techniques, uncut=True), self.offset[:-1]
        if np.maximum.reduceat(use, first).sum() <= limit:
            return None
        n = len(first)
        return Memory(float(limit), 1, np.arange(n), np.zeros(n, np.int64), np.ones(n, np.int64), self.offset, use, np.arange(len(use)))
