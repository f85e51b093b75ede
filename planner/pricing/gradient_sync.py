"""What a weight costs that is needed in a layout: the reduction of its gradient, its share of the
optimizer's state and pass, its gathering, per ZeRO stage.

Weights of many operators are priced together: a row is a weight in one layout, and figures are
arrays over rows. What a weight takes of a device is `costmodels.trained_weight`'s, its collectives
are `planner.execution.zero_stages`', as in the price of a whole plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Self

import numpy as np

from costmodels.frameworks.step_time import orthogonalising_s
from costmodels.host_link import offloaded_weight
from costmodels.trained_weight import TrainedWeight
from planner.execution.layout_flow import own_zero_stage, zero_stage_dims
from planner.execution.loops import shares_of_blocks
from planner.execution.orthogonalising import device_matrices
from planner.execution.plan import WeightPlan
from planner.execution.weight_offload import can_offload, lookup_tables
from planner.execution.zero_stages import ZERO_STAGES, weight_collectives_of
from planner.pricing.frameworks.orthogonalising import weight_flops
from planner.pricing.orthogonalising import exchanges_s, newton_schulz_s
from planner.pricing.workspaces import GATHERED_BLOCKS
from planner.sharding.layout import Axes, group

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.pricer import Pricer


@dataclass(frozen=True)
class WeightCosts:
    """Seconds and bytes of a device for weights, under each ZeRO stage and for each option of how
    they lie. [ZeRO stages, options] each"""

    grad_reduce_per_step_s: np.ndarray
    """Seconds once a step: what is left of the gradients' reduction, the optimizer's pass, new
    parameters gathered."""
    grad_reduce_per_microbatch_s: np.ndarray
    """Seconds of each microbatch: gradients scattered, under stage 3 parameters gathered."""
    grad_accumulate_s: np.ndarray
    """Seconds of each of several microbatches, to add its gradients to the sums."""
    loop_copy_s: np.ndarray
    """Seconds of each microbatch, to copy weights out of the stacks of loops over blocks and
    gradients into them."""
    state_bytes: np.ndarray
    """Parameters, optimizer state, and where there is a loop over blocks gradients of a
    microbatch."""
    grad_accumulator_bytes: np.ndarray
    """Sums of gradients over microbatches."""
    grad_buffer_bytes: np.ndarray
    """The whole gradients."""
    grad_remaining_bytes: np.ndarray
    """What is left of the reduced gradients until the end of the step."""
    gradient_bytes: np.ndarray
    """Of `state_bytes` the gradients of a microbatch."""
    gathered_bytes: np.ndarray
    """Of `state_bytes` what stage 3 has gathered of a block while it runs."""
    update_launch_s: np.ndarray
    """Seconds once a step by which updating weights of blocks takes longer where each is an array
    of its own: a kernel each, and small ones take the launch floor."""

    @classmethod
    def of(cls, cells: np.ndarray) -> Self:
        """From an array [fields, ZeRO stages, options]."""
        return cls(**dict(zip(WEIGHT_FIELDS, cells, strict=True)))


WEIGHT_FIELDS = tuple(f.name for f in fields(WeightCosts))


@cache
def no_weights(options: int) -> WeightCosts:
    """Costs of options without a weight; shared, so not to be written to."""
    zeros = np.zeros((len(WEIGHT_FIELDS), len(ZERO_STAGES), options))
    zeros.setflags(write=False)
    return WeightCosts.of(zeros)


@dataclass(frozen=True)
class _Weight:
    """What the costs of a weight follow from, its layout aside.

    zero_stages: its own under each of the plan's. regathered: the backward pass reads it too, so
    that stage 3 gathers it again. stacked: of how many repeats a device has it in one array.
    looped: a loop over blocks cuts it out of that. after_loops: only what follows all loops reads
    it. offloaded: it waits in the host's memory. gathered_copies: how many whole ones stage 3 has
    at a time. element_bytes: of an element. joined: its part of its block's weights. matrices:
    whether the optimizer orthogonalises it.
    """

    shape: tuple[int, ...]
    zero_stages: tuple[int, ...]
    trained: bool
    regathered: bool
    stacked: int
    looped: bool
    after_loops: bool
    offloaded: bool
    gathered_copies: float
    element_bytes: float
    joined: float
    matrices: bool


@dataclass(frozen=True)
class _Rows:
    """Weights that all train, or of which none does, each in one layout. [rows] each

    whole, piece: elements of a device, and of its piece where a ZeRO stage cuts the weight over so
    many `devices`, which it `can_cut`. fan_of: which of the fans below. pending, cut, rest: of each
    fan its axes, those that a ZeRO stage cuts over, and the others. matrices: whether the optimizer
    orthogonalises it; orthogonalising: seconds of that under each ZeRO stage where an array has all
    its repeats, and how many more where each is an array of its own [2, ZeRO stages, rows].
    """

    trained: bool
    whole: np.ndarray
    piece: np.ndarray
    can_cut: np.ndarray
    element_bytes: np.ndarray
    devices: np.ndarray
    stacked: np.ndarray
    regathered: np.ndarray
    looped: np.ndarray
    after_loops: np.ndarray
    offloaded: np.ndarray
    gathered_copies: np.ndarray
    joined: np.ndarray
    matrices: np.ndarray
    orthogonalising: np.ndarray
    fan_of: np.ndarray
    pending: Sequence[Axes]
    cut: Sequence[Axes]
    rest: Sequence[Axes]


class WeightPricer:
    """Prices the weights of one graph on one mesh. Prices are kept in the pricer, for all graphs
    and meshes of stages that share it."""

    def __init__(self, base: GraphFacts, pricer: Pricer, zero_axes: Axes) -> None:
        self.base, self.pricer, self.zero_axes = base, pricer, zero_axes
        self.graph, self.sizes = base.graph, dict(pricer.sizes)
        self._weights: dict[tuple[str, bool], _Weight] = {}

    def of(self, name: str, layouts: Sequence[int], regathered: bool) -> np.ndarray:
        """`WeightCosts` of one weight needed in each layout (numbers of the layout table), as an
        array [fields, ZeRO stages, layouts]. State has a gradient where there is a loop over
        blocks.

        regathered: the backward pass reads the weight too, so that stage 3 gathers it again. What
        it gathers of the heaviest run's repeats is part of the state.
        """
        known = self._known(self._weight(name, regathered))
        if any(n not in known for n in layouts):
            self.price([(name, layouts, regathered)])
        return np.stack([known[n] for n in layouts], axis=-1)

    def price(self, asked: Iterable[tuple[str, Sequence[int], bool]]) -> None:
        """Work out what is not known of these weights, layouts and readings (as for `of`), all
        together."""
        new: dict[tuple[_Weight, int], None] = {}
        for name, layouts, regathered in asked:
            weight = self._weight(name, regathered)
            known = self._known(weight)
            new.update(dict.fromkeys((weight, n) for n in layouts if n not in known))
        if new:
            cells = self._costs(*zip(*new, strict=True))
            for row, (weight, n) in enumerate(new):
                self._known(weight)[n] = cells[:, :, row]

    def offloaded(self, name: str) -> bool:
        """Whether a weight waits in the host's memory."""
        if name not in self.base.own or not can_offload(self.graph, name):
            return False
        inside = self.graph.consumers[name][0][0] in self.base.repeated
        return (
            "parameters" in self.pricer.offload
            if inside
            else "embeddings" in self.pricer.offload and name in lookup_tables(self.graph)
        )

    def _weight(self, name: str, regathered: bool) -> _Weight:
        key = name, regathered
        if key not in self._weights:
            self._weights[key] = self._described(*key)
        return self._weights[key]

    def _described(self, name: str, regathered: bool) -> _Weight:
        base, t, stacked = self.base, self.graph.tensors[name], self._stacked(name)
        in_heaviest = base.stacks.get(name, (-1, 1))[0] == base.heaviest
        return _Weight(
            shape=t.shape,
            zero_stages=tuple([own_zero_stage(z, t.shape) for z in ZERO_STAGES]),
            trained=name in base.grad,
            regathered=regathered,
            stacked=stacked,
            looped=self._looped(name),
            after_loops=self._after_loops(name),
            offloaded=self.offloaded(name),
            gathered_copies=self._gathered() / stacked if in_heaviest else 0.0,
            element_bytes=(
                self.pricer.recipe.parameter_bytes if t.is_float else self.pricer.itemsize(t.dtype)
            ),
            joined=shares_of_blocks(self.graph, base.runs).get(name, 1.0),
            matrices=name in base.graph.orthogonalised and name in base.grad,
        )

    def _known(self, weight: _Weight) -> dict[int, np.ndarray]:
        """Layout -> what the weight costs in it [fields, ZeRO stages], as far as it was asked
        for."""
        known: dict[int, np.ndarray] = self.pricer.memo.setdefault(
            ("weight", weight, self.zero_axes, self.base.written_out), {}
        )
        return known

    def _gathered(self) -> float:
        """How many whole weights of one repeat stage 3 has at a time, which frameworks count
        otherwise (planner.pricing.peak_memory, planner.pricing.frameworks.peak_memory)."""
        runtime = self.pricer.runtime
        return (GATHERED_BLOCKS if runtime.kernels is None else 2) * (1 + runtime.memory_slack)

    def _stacked(self, name: str) -> int:
        """Of how many repeats a device has it in one array: with pipeline stages those it holds
        (interleaved ones scatter fewer at once under stage 2)."""
        first, repeats = self.base.stacks.get(name, (-1, 1))
        dealt = self.base.dealt
        return (
            -(-repeats // self.pricer.mesh.stages)
            if dealt is not None and dealt[0][0] == first
            else repeats
        )

    def _looped(self, name: str) -> bool:
        """Whether a loop over blocks of the program cuts it out of a stack. Uneven pipeline stages
        have no loops, nor have programs that serve."""
        uneven = self.base.dealt is None and self.pricer.mesh.stages > 1
        return (
            not uneven
            and not self.base.graph.unstacked
            and name in self.base.stacks
            and self.base.graph.consumers[name][0][0] in self.base.looped
            and not self.offloaded(name)
        )

    def _after_loops(self, name: str) -> bool:
        """Whether a weight's gradient is there before the backward passes of all loops."""
        base = self.base
        return (
            bool(base.looped)
            and self.pricer.mesh.stages == 1
            and min(i for i, _ in base.graph.consumers[name])
            >= max(first + period * repeats for first, period, repeats in base.loops)
            and not self.offloaded(name)
        )

    def _costs(self, weights: Sequence[_Weight], layouts: Sequence[int]) -> np.ndarray:
        """Of weights, each in one layout. [fields, ZeRO stages, rows]"""
        price, rank = self.pricer, max(1, *(len(w.shape) for w in weights))
        shape = np.array(
            [w.shape + (1,) * (rank - len(w.shape)) for w in weights], np.int64
        ).reshape(len(weights), rank)
        pieces = price.reshard_prices.pieces(layouts, rank)
        local = (-(-shape // pieces)).prod(axis=1).astype(np.float64)
        trained, offloaded = (
            np.array([getattr(w, part) for w in weights]) for part in ("trained", "offloaded")
        )
        cells = np.zeros((len(WEIGHT_FIELDS), len(ZERO_STAGES), len(weights)))
        costs = WeightCosts.of(cells)
        stored = local * np.array([w.element_bytes for w in weights])
        costs.grad_reduce_per_microbatch_s[:, offloaded] = price.host_s(2 * stored[offloaded])
        costs.state_bytes[:, ~offloaded] = stored[~offloaded]
        cuts = np.array([w.looped * (1 + w.regathered) for w in weights])
        costs.loop_copy_s[:] = price.weight_copy_s(stored, cuts, 0 * stored)
        frozen = ~trained & np.array([w.zero_stages[-1] == ZERO_STAGES[-1] for w in weights])
        for chosen, fill in ((trained, self._trained), (frozen, self._frozen)):
            if len(rows := np.flatnonzero(chosen)):
                of = [weights[k] for k in rows.tolist()]
                numbers = [layouts[k] for k in rows.tolist()]
                fill(cells, rows, of, self._rows(of, numbers, shape[rows], pieces[rows]))
        return cells

    def _trained(
        self, cells: np.ndarray, columns: np.ndarray, weights: Sequence[_Weight], rows: _Rows
    ) -> None:
        """Put in what weights with gradients cost. cells: [fields, ZeRO stages, weights];
        columns: which of them these rows are."""
        if not rows.can_cut.any():
            cells[:, :, columns] = self._of_stage(rows, 0)[:, None]
            return
        every = np.array([self._of_stage(rows, z) for z in ZERO_STAGES])
        stages = np.where(rows.can_cut[:, None], [w.zero_stages for w in weights], 0)
        cells[:, :, columns] = every[stages.T, :, np.arange(len(columns))].transpose(2, 0, 1)

    def _frozen(
        self, cells: np.ndarray, columns: np.ndarray, weights: Sequence[_Weight], rows: _Rows
    ) -> None:
        """Put in what frozen weights cost that ZeRO stage 3 cuts (as for `_trained`): stored in
        pieces, gathered where they are used."""
        zero_stage, costs = ZERO_STAGES[-1], WeightCosts.of(cells[:, ZERO_STAGES[-1]])
        weight = TrainedWeight(rows.whole, rows.piece, zero_stage)
        stored = rows.piece * rows.element_bytes
        gathered = rows.gathered_copies * rows.whole * rows.element_bytes * ~rows.offloaded
        _, seconds = self._sync_s(rows, weight)
        seconds += np.where(rows.offloaded, self.pricer.host_s(2 * stored), 0.0)
        cuts = rows.looped * (1 + rows.regathered)
        copied = self.pricer.weight_copy_s(stored, cuts, 0 * stored)
        for put, value in (
            (costs.grad_reduce_per_microbatch_s, seconds),
            (costs.loop_copy_s, copied),
            (costs.state_bytes, np.where(rows.offloaded, 0.0, stored + gathered)),
            (costs.gathered_bytes, gathered),
        ):
            put[columns[rows.can_cut]] = value[rows.can_cut]

    def _rows(
        self,
        weights: Sequence[_Weight],
        layouts: Sequence[int],
        shape: np.ndarray,
        pieces: np.ndarray,
    ) -> _Rows:
        """Weights that all train, or of which none does. shape, pieces: extents of each dim, and
        into how many the layout cuts it [rows, dims]."""
        fans = [self.pricer.layout_table.layouts[n].grad_partial for n in layouts]
        pending = list(dict.fromkeys(fans))
        fan_of = np.array([pending.index(fan) for fan in fans])
        cut = [tuple([a for a in fan if a in self.zero_axes]) for fan in pending]
        devices = np.array([group(axes, self.sizes) for axes in cut])[fan_of]
        dim = zero_stage_dims(shape, pieces, devices)
        whole, can_cut = (-(-shape // pieces)).prod(axis=1).astype(np.float64), dim >= 0
        pieces[can_cut, dim[can_cut]] *= devices[can_cut]
        return _Rows(
            trained=weights[0].trained,
            whole=whole,
            # padded where the devices do not divide the dim
            piece=(-(-shape // pieces)).prod(axis=1).astype(np.float64),
            can_cut=can_cut,
            element_bytes=np.array([w.element_bytes for w in weights]),
            devices=devices,
            stacked=np.array([w.stacked for w in weights]),
            regathered=np.array([w.regathered for w in weights]),
            looped=np.array([w.looped for w in weights]),
            after_loops=np.array([w.after_loops for w in weights]),
            offloaded=np.array([w.offloaded for w in weights]),
            gathered_copies=np.array([w.gathered_copies for w in weights]),
            joined=np.array([w.joined for w in weights]),
            matrices=np.array([w.matrices for w in weights]),
            orthogonalising=self._orthogonalising_s(weights, layouts, dim),
            fan_of=fan_of,
            pending=pending,
            cut=cut,
            rest=[tuple([a for a in fan if a not in self.zero_axes]) for fan in pending],
        )

    def _orthogonalising_s(
        self, weights: Sequence[_Weight], layouts: Sequence[int], dims: np.ndarray
    ) -> np.ndarray:
        """`_Rows.orthogonalising` of weights in their layouts. dims: along which a ZeRO stage would
        cut each. [2, ZeRO stages, weights]"""
        price, seconds = self.pricer, np.zeros((2, len(ZERO_STAGES), len(weights)))
        for k, weight in enumerate(weights):
            if not weight.matrices:
                continue
            layout = price.layout_table.layouts[layouts[k]]
            axes = tuple(a for a in layout.grad_partial if a in self.zero_axes)
            for z in ZERO_STAGES if dims[k] >= 0 else ZERO_STAGES[:1]:
                plan = WeightPlan(layout.stored, z, axes if z else (), int(dims[k]) if z else -1)
                if price.runtime.kernels is not None:
                    flops = weight_flops(weight.shape, plan, self.sizes)
                    seconds[0, z, k] = orthogonalising_s(flops, price.topology.device, price.rates)
                else:
                    seconds[:, z, k] = self._array_s(weight, plan)
        return seconds

    def _array_s(self, weight: _Weight, plan: WeightPlan) -> tuple[float, float]:
        """Seconds of a weight that is orthogonalised with all its repeats, and how many more where
        each is an array of its own."""
        price, repeats = self.pricer, weight.stacked
        per_repeat_s = []
        for by_repeats in (price.mesh.stages == 1 and not price.offload, False):
            matrices = device_matrices(
                weight.shape,
                plan,
                self.sizes,
                repeats=repeats,
                apart=repeats if "optimizer" in price.offload else 1,
                by_repeats=by_repeats,
            )
            seconds = newton_schulz_s(matrices, price) + exchanges_s(matrices, price)
            per_repeat_s.append(seconds / repeats)
        return per_repeat_s[0], per_repeat_s[1] - per_repeat_s[0]

    def _of_stage(self, rows: _Rows, zero_stage: int) -> np.ndarray:
        """Of weights with gradients that one ZeRO stage all cuts. [fields, rows]"""
        price, recipe = self.pricer, self.pricer.recipe
        piece = rows.piece if zero_stage else rows.whole
        weight = TrainedWeight(rows.whole, piece, zero_stage, piece * rows.matrices)
        # State that passes through the device while it is used is counted with the whole plan.
        resident = 0.0 if "optimizer" in price.offload else weight.optimizer_bytes(recipe)
        looped = not self.base.written_out
        per_step, per_microbatch = self._sync_s(rows, weight)
        gathered = (
            rows.gathered_copies * rows.whole * recipe.parameter_bytes
            if zero_stage == 3
            else np.zeros_like(rows.whole)
        )
        gradient = weight.gradient_bytes(recipe, looped=looped)
        accumulator = weight.accumulator_bytes(recipe, looped=looped)
        if price.runtime.kernels is not None:  # frameworks add to the one gradient that they keep
            gradient, accumulator = weight.summed * recipe.gradient_bytes, 0.0 * rows.whole
        cut, put = weight.loop_copies(recipe)
        _, alone = rows.orthogonalising
        costs = np.stack(
            [
                per_step,
                per_microbatch,
                price.grad_accumulate_s(weight.summed * recipe.gradient_bytes),
                rows.looped * price.weight_copy_s(cut, 1 + rows.regathered, put),
                weight.stored * recipe.parameter_bytes + gathered + gradient + resident,
                accumulator,
                rows.whole * recipe.gradient_bytes,
                weight.remaining_bytes(recipe),
                gradient,
                gathered,
                rows.looped * (price.update_launch_s(weight.piece) + alone[zero_stage]),
            ]
        )
        pending = rows.rest if zero_stage == 3 else rows.pending
        for k in np.flatnonzero(rows.offloaded).tolist():
            one = TrainedWeight(float(weight.whole[k]), float(weight.piece[k]), zero_stage)
            moved = offloaded_weight(one, bool(pending[rows.fan_of[k]]), recipe)
            costs[:3, k] += [price.host_s(x) for x in (moved.once, moved.each, moved.added)]
            # What is on its way is counted with the whole plan.
            costs[3:, k] = 0.0
            costs[4, k] = resident if isinstance(resident, float) else resident[k]
        return costs

    def _sync_s(
        self, rows: _Rows, weight: TrainedWeight[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds once a step, of the optimizer's pass and collectives, and of each microbatch's
        collectives. [rows] each"""
        price, recipe = self.pricer, self.pricer.recipe
        # Of the gradients' reduction; the rest hides under the backward pass. Frameworks hide as
        # much of new parameters' gathering, and what is gathered in each microbatch under the
        # arithmetic beside it, as far as that reaches (costmodels.overlap.gather_beside_work_s).
        shown = 1 - price.runtime.overlap
        framework = price.runtime.kernels is not None
        per_step = price.optimizer_s(weight.piece, price.offload, weight.matrices)
        per_step = per_step + rows.orthogonalising[0, weight.zero_stage]
        per_microbatch = np.zeros(len(rows.whole))
        for c in weight_collectives_of(weight.zero_stage, rows.trained):
            gradient = c.phase == "gradient"
            over = rows.cut if c.cut else rows.rest if weight.zero_stage else rows.pending
            elements = weight.piece * rows.devices if c.cut else weight.piece
            seconds = price.collectives_s(
                c.kind,
                over,
                rows.fan_of,
                elements * (recipe.reduction_bytes if gradient else rows.element_bytes),
                c.bucketed,
                rows.stacked,
                rows.joined if weight.zero_stage == 3 and c.cut else np.ones(len(rows.whole)),
            )
            if framework and c.per_microbatch and not c.bucketed:
                seconds = (1 - price.runtime.gather_overlap) * seconds
            elif gradient or (framework and not c.per_microbatch):
                seconds = shown * seconds
            if weight.zero_stage == 3 and c.cut:
                beside = rows.looped | rows.after_loops if gradient else rows.looped
                seconds = seconds * (
                    1 - beside * price.hidden.spared * price.hidden.looped(c.phase)
                )
            if c.phase == "recompute":
                seconds = seconds * rows.regathered
            elif c.phase == "optimizer":
                seconds = seconds - price.hidden.spared * price.gathered_beside_updates_s(
                    seconds, weight.piece, price.offload
                )
            if c.per_microbatch:
                per_microbatch = per_microbatch + seconds
            else:
                per_step = per_step + seconds
        return per_step, per_microbatch
