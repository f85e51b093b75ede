"""What a weight costs that is needed in a layout: the reduction of its gradient, its share of the
optimizer's state and pass, per ZeRO stage.

Weights of many operators are priced together: a row is a weight in one layout, and figures are
arrays over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from costmodels.host_link import offloaded_weight
from costmodels.liveness import waiting_bytes
from planner.execution.layout_flow import own_zero_stage, zero_stage_dims
from planner.execution.weight_offload import can_offload, lookup_tables
from planner.execution.zero_stages import ZERO_STAGES
from planner.sharding.layout import Axes, group

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.pricer import Pricer

CELLS = (len(ZERO_STAGES), 7)
"""Shape of what one weight costs."""


@dataclass(frozen=True)
class _Weight:
    """What the costs of a weight follow from, its layout aside. levels: its own under each of the
    plan's; stacked: of how many repeats a device has it in one array; beside: how many whole ones
    ZeRO stage 3 has at a time; held: bytes of an element where it has no gradient.
    """

    shape: tuple[int, ...]
    levels: tuple[int, ...]
    trained: bool
    twice: bool
    stacked: int
    waits: bool
    beside: float
    held: float


class WeightCosts:
    """Of one base on one mesh. Prices are kept in the pricer, for all bases and meshes of stages
    that share it."""

    def __init__(self, base: GraphFacts, pricer: Pricer, zero_axes: Axes) -> None:
        self.base, self.pricer, self.zero_axes = base, pricer, zero_axes
        self.graph, self.sizes = base.graph, dict(pricer.sizes)

    def of(self, name: str, layouts: Sequence[int], twice: bool) -> np.ndarray:
        """[layouts, levels, 7]: seconds once a step, seconds each microbatch, seconds each to add
        up gradients of several, state bytes, bytes of the sum over microbatches, of the whole
        gradient and of the piece left of it, of one weight needed in each layout (numbers of the
        atlas), per ZeRO stage. State has a gradient where there is a loop over blocks
        (planner.pricing.step_time).

        twice: the backward pass reads the weight too, so that ZeRO stage 3 gathers it again. What
        it gathers of the heaviest run's repeats is part of the state.
        """
        known = self._known(self._weight(name, twice))
        if any(n not in known for n in layouts):
            self.price([(name, layouts, twice)])
        return np.array([known[n] for n in layouts])

    def price(self, asked: Iterable[tuple[str, Sequence[int], bool]]) -> None:
        """Work out what is not known of these weights, layouts and readings (as for `of`), all
        together."""
        new: dict[tuple[_Weight, int], None] = {}
        for name, layouts, twice in asked:
            weight = self._weight(name, twice)
            known = self._known(weight)
            new.update(dict.fromkeys((weight, n) for n in layouts if n not in known))
        if new:
            for (weight, n), cells in zip(new, self._costs(*zip(*new, strict=True)), strict=True):
                self._known(weight)[n] = cells

    def waits(self, name: str) -> bool:
        """Whether a weight waits in the host's memory."""
        if name not in self.base.own or not can_offload(self.graph, name):
            return False
        inside = self.graph.consumers[name][0][0] in self.base.repeated
        return (
            "parameters" in self.pricer.offload
            if inside
            else "embeddings" in self.pricer.offload and name in lookup_tables(self.graph)
        )

    def _weight(self, name: str, twice: bool) -> _Weight:
        base, t, stacked = self.base, self.graph.tensors[name], self._stacked(name)
        beside = (
            self._gathered() / stacked
            if base.stacks.get(name, (-1, 1))[0] == base.heaviest
            else 0.0
        )
        held = self.pricer.recipe.parameter_bytes if t.is_float else self.pricer.itemsize(t.dtype)
        return _Weight(
            t.shape,
            tuple([own_zero_stage(z, t.shape) for z in ZERO_STAGES]),
            name in base.grad,
            twice,
            stacked,
            self.waits(name),
            beside,
            held,
        )

    def _known(self, weight: _Weight) -> dict[int, np.ndarray]:
        """Layout -> what the weight costs in it, as far as it was asked for."""
        known: dict[int, np.ndarray] = self.pricer.memo.setdefault(
            ("weight", weight, self.zero_axes, self.base.written_out), {}
        )
        return known

    def _gathered(self) -> float:
        """How many whole weights of one repeat ZeRO stage 3 has at a time: those of two, and a
        gradient before it is scattered, which frameworks count otherwise
        (planner.pricing.peak_memory, planner.pricing.frameworks.peak_memory)."""
        runtime = self.pricer.runtime
        return (3 if runtime.kernels is None else 2) * (1 + runtime.memory_slack)

    def _stacked(self, name: str) -> int:
        """Of how many repeats a device has a weight in one array: with stages those it holds
        (interleaved ones scatter fewer at once under ZeRO stage 2)."""
        first, repeats = self.base.stacks.get(name, (-1, 1))
        dealt = self.base.dealt
        return (
            -(-repeats // self.pricer.mesh.stages)
            if dealt is not None and dealt[0][0] == first
            else repeats
        )

    def _costs(self, weights: Sequence[_Weight], layouts: Sequence[int]) -> np.ndarray:
        """Of rows. [rows, levels, 7]"""
        price, rank = self.pricer, max(1, *(len(w.shape) for w in weights))
        shape = np.array(
            [w.shape + (1,) * (rank - len(w.shape)) for w in weights], np.int64
        ).reshape(len(weights), rank)
        pieces = price.conversions.pieces(layouts, rank)
        local = (-(-shape // pieces)).prod(axis=1).astype(np.float64)
        trained, waits = (
            np.array([getattr(w, part) for w in weights]) for part in ("trained", "waits")
        )
        out = np.zeros((len(weights), *CELLS))
        held = local * np.array([w.held for w in weights])
        out[waits, :, 1] = price.host_s(2 * held[waits])[:, None]
        out[~waits, :, 3] = held[~waits, None]
        if trained.any():
            rows = np.flatnonzero(trained)
            out[rows] = self._trained(
                [weights[k] for k in rows.tolist()],
                [layouts[k] for k in rows.tolist()],
                shape[rows],
                pieces[rows],
                local[rows],
            )
        return out

    def _trained(
        self,
        weights: Sequence[_Weight],
        layouts: Sequence[int],
        shape: np.ndarray,
        pieces: np.ndarray,
        local: np.ndarray,
    ) -> np.ndarray:
        """Of rows of weights with gradients. shape, pieces: of each dim [rows, dims]; local:
        elements of a device's piece. [rows, levels, 7]"""
        price, recipe = self.pricer, self.pricer.recipe
        grad_partials = [price.atlas.layouts[n].grad_partial for n in layouts]
        distinct = list(dict.fromkeys(grad_partials))
        of = np.array([distinct.index(grad_partial) for grad_partial in grad_partials])
        over = [
            tuple([a for a in grad_partial if a in self.zero_axes]) for grad_partial in distinct
        ]
        rest = [
            tuple([a for a in grad_partial if a not in self.zero_axes]) for grad_partial in distinct
        ]
        devices = np.array([group(axes, self.sizes) for axes in over])[of]
        dim = zero_stage_dims(shape, pieces, devices)
        cut = dim >= 0
        pieces[cut, dim[cut]] *= devices[cut]
        piece = (
            (-(-shape // pieces)).prod(axis=1).astype(np.float64)
        )  # padded where the group does not divide the dim
        stacked = np.array([w.stacked for w in weights])
        shown = (
            1 - price.runtime.overlap
        )  # of the gradients' reduction: the rest hides under the backward pass
        resident = (
            0.0 if "optimizer" in price.offload else recipe.state_bytes
        )  # what passes through the device while it is used is counted with the whole plan
        made = recipe.parameter_bytes + (0.0 if self.base.written_out else recipe.gradient_bytes)

        def step(own: np.ndarray, grad_partial: list[Axes]) -> np.ndarray:
            return shown * price.collectives_s(
                "all-reduce", grad_partial, of, own * recipe.reduction_bytes, True, stacked
            ) + price.optimizer_s(own, price.offload)

        def row(
            level: int,
            own: np.ndarray,
            once: np.ndarray,
            scatter: np.ndarray | float,
            collect: np.ndarray | float,
        ) -> np.ndarray:
            state = (
                own * made + beside * local * recipe.parameter_bytes if level == 3 else local * made
            ) + own * resident
            once = once + (scatter if level == 1 else 0.0) + (collect if level in (1, 2) else 0.0)
            added = (own if level >= 2 else local) * recipe.gradient_bytes
            each = (scatter if level >= 2 else 0.0) + (
                (1 + twice) * collect if level == 3 else np.zeros(len(own))
            )
            summed = np.zeros(len(own)) if level == 3 and not self.base.written_out else added
            found = np.stack(
                [
                    once,
                    each,
                    price.grad_accumulate_s(added),
                    state,
                    summed,
                    local * recipe.gradient_bytes,
                    own * waiting_bytes(recipe, level),
                ],
                axis=1,
            )
            for k in np.flatnonzero(
                away
            ).tolist():  # what is on its way is counted with the whole plan
                pending = bool(rest[of[k]] if level == 3 else distinct[of[k]])
                moved = offloaded_weight(
                    float((own if level == 3 else local)[k]),
                    float(local[k]),
                    float(own[k]),
                    level,
                    pending,
                    recipe,
                )
                found[k] = (
                    found[k, 0] + price.host_s(moved.once),
                    found[k, 1] + price.host_s(moved.each),
                    found[k, 2] + price.host_s(moved.added),
                    own[k] * resident,
                    0,
                    0,
                    0,
                )
            return found

        twice, away, beside = (
            np.array([getattr(w, part) for w in weights]) for part in ("twice", "waits", "beside")
        )
        every = [row(0, local, step(local, distinct), 0.0, 0.0)]
        if not cut.any():
            return np.repeat(every[0][:, None], len(ZERO_STAGES), axis=1)
        reduced, whole = step(piece, rest), piece * devices
        for level in ZERO_STAGES[1:]:
            # Outside blocks, below ZeRO stage 3, collectives travel in buckets.
            scatter = shown * price.collectives_s(
                "reduce-scatter", over, of, whole * recipe.reduction_bytes, level < 3, stacked
            )
            collect = price.collectives_s(
                "all-gather", over, of, whole * recipe.parameter_bytes, level < 3, stacked
            )
            every.append(row(level, piece, reduced, scatter, collect))
        levels = np.where(cut[:, None], [w.levels for w in weights], 0)
        found: np.ndarray = np.array(every)[levels, np.arange(len(local))[:, None]]
        return found
