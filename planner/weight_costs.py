"""What a weight costs that is needed in a layout: the reduction of its gradient, its share of the optimizer's state and pass, per optimizer level."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.flow import Plan, cut_layout, own_level, weight_plan
from planner.layout import Axes, group, local_shape
from planner.moments import left_bytes
from planner.parked import parks, tables, to_reduce, ways
from planner.variables import ZERO_LEVELS

if TYPE_CHECKING:
    from planner.base import Base
    from planner.price import Pricer

CELLS = (len(ZERO_LEVELS), 7)
"""Shape of what one weight costs."""


class WeightCosts:
    """Of one base on one mesh. Prices are kept in the pricer, for all bases and meshes of stages that share it."""

    def __init__(self, base: Base, pricer: Pricer, zero_axes: Axes) -> None:
        self.base, self.pricer, self.zero_axes = base, pricer, zero_axes
        self.graph, self.sizes = base.graph, dict(pricer.sizes)
        self._sharded = Plan(tuple(self.sizes.items()), {}, 1, zero_axes)

    def of(self, name: str, layouts: Sequence[int], twice: bool) -> np.ndarray:
        """[layouts, levels, 7]: seconds once a step, seconds each microbatch, seconds each to add up gradients of several, state bytes, bytes of the sum over microbatches,
        of the whole gradient and of the piece left of it, of one weight needed in each layout (numbers of the atlas), per optimizer level. State has a gradient where there
        is a loop over blocks (planner.evaluate).

        twice: the backward pass reads the weight too, so that level 3 gathers it again. What it gathers of the heaviest run's repeats is part of the state.
        """
        t, stacked, waits = self.graph.tensors[name], self._stacked(name), self.waits(name)
        beside = self._gathered() / stacked if self.base.stacks.get(name, (-1, 1))[0] == self.base.heaviest else 0.0
        key = "weight", t.shape, t.dtype, name in self.base.grad, self.zero_axes, twice, self.base.written_out, stacked, waits, beside
        known: dict[int, np.ndarray] = self.pricer.memo.setdefault(key, {})
        for n in layouts:
            if n not in known:
                known[n] = self._costs(name, n, twice, stacked, waits, beside)
        return np.array([known[n] for n in layouts])

    def waits(self, name: str) -> bool:
        """Whether a weight waits in the host's memory."""
        if name not in self.base.own or not parks(self.graph, name):
            return False
        inside = self.graph.consumers[name][0][0] in self.base.repeated
        return "parameters" in self.pricer.offload if inside else "embeddings" in self.pricer.offload and name in tables(self.graph)

    def _gathered(self) -> float:
        """How many whole weights of one repeat level 3 has at a time: those of two, and a gradient before it is scattered, which frameworks count otherwise
        (planner.memory, planner.held)."""
        runtime = self.pricer.runtime
        return (3 if runtime.kernels is None else 2) * (1 + runtime.memory_slack)

    def _stacked(self, name: str) -> int:
        """Of how many repeats a device has a weight in one array: with stages those it holds (interleaved ones scatter fewer at once under level 2)."""
        first, repeats = self.base.stacks.get(name, (-1, 1))
        dealt = self.base.dealt
        return -(-repeats // self.pricer.mesh.stages) if dealt is not None and dealt[0][0] == first else repeats

    def _costs(self, name: str, layout: int, twice: bool, stacked: int, waits: bool, beside: float) -> np.ndarray:
        recipe, price, t, need = self.pricer.recipe, self.pricer, self.graph.tensors[name], self.pricer.atlas.layouts[layout]
        local = float(prod(local_shape(t.shape, need, self.sizes)))
        if name not in self.base.grad:
            held = local * (recipe.parameter_bytes if t.is_float else self.pricer.itemsize(t.dtype))
            row = (0.0, price.host_s(2 * held), 0.0, 0.0, 0.0, 0.0, 0.0) if waits else (0.0, 0.0, 0.0, held, 0.0, 0.0, 0.0)
            return np.array([row] * len(ZERO_LEVELS))
        plan = weight_plan(self.graph, name, [need], self._sharded, True)
        cut = group(plan.axes, self.sizes) if plan.zero and plan.dim >= 0 else 1
        levels = [own_level(zero, t.shape) if cut > 1 and zero else 0 for zero in ZERO_LEVELS]
        shown = 1 - price.runtime.overlap  # of the gradients' reduction: the rest hides under the backward pass
        resident = 0.0 if "optimizer" in price.offload else recipe.state_bytes  # what passes through the device while it is used is counted with the whole plan
        made = recipe.parameter_bytes + (0.0 if self.base.written_out else recipe.gradient_bytes)

        def sent(kind: str, axes: Axes, size: float, bucketed: bool) -> float:
            return price.collective_s(kind, axes, size, bucketed=bucketed, stacked=stacked)

        def step(own: float, fan: Axes) -> float:
            return shown * sent("all-reduce", fan, own * recipe.reduction_bytes, True) + price.optimizer_s(own, price.offload)

        rows, moves = {}, dict[bool, tuple[float, float]]()
        if max(levels):
            piece = float(prod(local_shape(t.shape, cut_layout(plan), self.sizes)))  # padded where the group does not divide the dim
            reduced = step(piece, tuple(a for a in need.fan if a not in plan.axes))
            for late in {level < 3 for level in levels if level}:  # outside blocks, where collectives travel in buckets
                moves[late] = (shown * sent("reduce-scatter", plan.axes, piece * cut * recipe.reduction_bytes, late),
                               sent("all-gather", plan.axes, piece * cut * recipe.parameter_bytes, late))  # fmt: skip
        for level in dict.fromkeys(levels):
            own, once = (piece, reduced) if level else (local, step(local, need.fan))
            scatter, collect = moves[level < 3] if level else (0.0, 0.0)
            state = (own * made + beside * local * recipe.parameter_bytes if level == 3 else local * made) + own * resident
            once = once + (scatter if level == 1 else 0.0) + (collect if level in (1, 2) else 0.0)
            added = (own if level >= 2 else local) * recipe.gradient_bytes
            each = (scatter if level >= 2 else 0.0) + ((1 + twice) * collect if level == 3 else 0.0)
            rows[level] = (once, each, price.sum_s(added), state, 0.0 if level == 3 and not self.base.written_out else added,
                           local * recipe.gradient_bytes, own * left_bytes(recipe, level))  # fmt: skip
            if waits:  # what is on its way is counted with the whole plan
                moved, (once, each, sums, *_) = ways(own if level == 3 else local, local, own, level, to_reduce(plan, level), recipe), rows[level]
                rows[level] = (once + price.host_s(moved.once), each + price.host_s(moved.each), sums + price.host_s(moved.added), own * resident, 0.0, 0.0, 0.0)
        return np.array([rows[level] for level in levels])
