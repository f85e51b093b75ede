"""Kinds of nodes, priced alone: the splits that one may have, with their seconds and bytes, and the
layouts in which each of them wants operands and leaves results.

Nodes of one kind (`GraphFacts.kinds`) are priced once, all splits together: figures are arrays over
options from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.analysis.passing import puts_off
from planner.execution.weights_apart import factors, products_weights, waiting_share
from planner.graph.ir import Node
from planner.ops.residuals import reads
from planner.pricing.frameworks.kernels import role, together
from planner.pricing.frameworks.memory import option_bytes
from planner.pricing.frameworks.selective import made_again
from planner.pricing.frameworks.stages import attentions_before
from planner.pricing.gradient_sync import WeightCosts, WeightPricer, no_weights
from planner.pricing.kernels import (
    inner_times,
    kept_share,
    reads_whole,
    saved_beside_of,
    times_of,
    working_of,
)
from planner.pricing.pricer import Pricer
from planner.pricing.split_arrays import SplitArrays
from planner.sharding.candidates import candidates
from planner.sharding.layout import Axes, local_shape
from planner.sharding.layout_table import LayoutColumn
from planner.sharding.rule import PENDING, Limits, Rule, Split
from planner.space.variables import OptionCosts

UNSAVED = (0, 0, 0, 0)
BYTES = (
    "saved_bytes",
    "saved_bytes_remat",
    "saved_bytes_one_repeat",
    "saved_bytes_epilogue",
    "saved_input_bytes",
    "stacked_bytes",
    "stacked_bytes_remat",
    "saved_collective_bytes",
    "handed_on_bytes",
    "handed_on_bytes_remat",
    "passing_bytes",
    "postponed_bytes",
    "workspace_bytes",
    "workspace_without_weights_bytes",
    "workspace_apart_bytes",
    "workspace_apart_without_weights_bytes",
)
"""Fields of OptionCosts in bytes, but for weights."""


@dataclass(frozen=True)
class NodeOptions:
    """What nodes of one kind share: the splits that they may have with what each costs, and the
    layouts of operands (None where there is none) and of results under each."""

    splits: tuple[Split, ...]
    costs: OptionCosts
    needs: tuple[LayoutColumn | None, ...]
    results: tuple[LayoutColumn, ...]


@dataclass(frozen=True)
class _Shape:
    """The splits of a kind, what they cut, the layouts of operands and results under each, and
    their bytes."""

    splits: tuple[Split, ...]
    cuts: SplitArrays
    needs: tuple[LayoutColumn | None, ...]
    results: tuple[LayoutColumn, ...]
    size: _Bytes


@dataclass(frozen=True)
class _Bytes:
    """Bytes of one device's pieces. [options] each. ins, outs: of each operand and result; read,
    made: of all of them; weights: of operands that are weights."""

    ins: tuple[np.ndarray, ...]
    outs: tuple[np.ndarray, ...]
    read: np.ndarray
    made: np.ndarray
    weights: np.ndarray


class Kinds:
    """The kinds of one base on one mesh. allowed: class of nodes -> the splits that are left of
    it. seconds_alone: bytes that take no time are 0."""

    def __init__(
        self,
        base: GraphFacts,
        pricer: Pricer,
        limits: Limits,
        allowed: Mapping[int, tuple[Split, ...]],
        zero_axes: Axes,
        seconds_alone: bool = False,
    ) -> None:
        self.base, self.pricer, self.limits, self.allowed = base, pricer, limits, allowed
        self.graph, self.sizes, self.layout_table, self.tables = (
            base.graph,
            dict(pricer.sizes),
            pricer.layout_table,
            pricer.reshard_prices,
        )
        self.order, self.seconds_alone = tuple(self.sizes), seconds_alone
        self.weights = WeightPricer(base, pricer, zero_axes)

    def every(self) -> dict[int, NodeOptions]:
        """Class of nodes -> its kind."""
        alike: dict[tuple, int] = {}
        like = {
            i: alike.setdefault((self.base.kinds[i], self.allowed.get(i), self._run_as(i)), i)
            for i in self.base.times
        }
        shapes = {i: self._shaped(i) for i in alike.values()}
        self.weights.price(
            (name, row.layouts, read_backward)
            for i, shape in shapes.items()
            for name, row, read_backward in self._own(i, shape.needs)
        )
        known = {i: self._kind(i, shape) for i, shape in shapes.items()}
        return {i: known[k] for i, k in like.items()}

    def _run_as(self, i: int) -> tuple[object, ...]:
        """What else a framework's kernels and what they save depend on: what the nodes around
        are."""
        if self.pricer.runtime.kernels is None:
            return ()
        again = made_again(self.base, i, self.pricer.runtime)
        inside = i in self.base.repeated
        return role(self.graph, i), together(self.base, i), again, self.base.times[i], inside

    def _shaped(self, i: int) -> _Shape:
        """The splits of a node, and what they ask of layouts."""
        rule = self.base.rules[i]
        splits = self.allowed.get(i) or self.base.worthwhile(
            i, candidates(rule, self.sizes, self.limits)
        )
        needs, results = self._read(self.graph.nodes[i], rule, splits)
        size = self._bytes(self.graph.nodes[i], needs, results, len(splits))
        return _Shape(splits, self._cuts(splits), needs, results, size)

    def _kind(self, i: int, shape: _Shape) -> NodeOptions:
        """All that is priced of a node alone."""
        costs = OptionCosts(
            **vars(self._own_weights(i, shape.needs, len(shape.splits))),
            **self._seconds(i, shape),
            **(self._copied if self.seconds_alone else self._bytes_of)(i, shape),
            max_batch_pieces=_batch_pieces(
                self.base.rules[i], shape.cuts, self.base.batch_factors[i]
            ),
        )
        return NodeOptions(shape.splits, costs, shape.needs, shape.results)

    def _seconds(self, i: int, shape: _Shape) -> dict[str, np.ndarray]:
        """Fields of OptionCosts in seconds: kernels, and collectives inside them. Of nodes that
        decide alike and take different times the mean."""
        variants = self.base.variants.get(i)
        if variants is None:
            return self._seconds_of(i, shape)
        each, nodes = [self._seconds_of(j, shape) for j, _ in variants], [n for _, n in variants]
        fields = {f: [seconds[f] for seconds in each] for f in each[0]}
        return {f: np.average(seconds, axis=0, weights=nodes) for f, seconds in fields.items()}

    def _seconds_of(self, i: int, shape: _Shape) -> dict[str, np.ndarray]:
        """`_seconds` of one node."""
        base, rule, splits, size = self.base.untied, self.base.rules[i], shape.splits, shape.size
        not_recomputed = np.zeros(len(splits))
        forward, backward = times_of(base, i, shape.cuts, size.read, size.made, self.pricer)
        apart = self._waiting_share(i) * backward
        if rule.inner:
            inside, back, not_recomputed = np.array(
                [inner_times(base, i, split, self.pricer) for split in splits]
            ).T
            forward, backward = forward + inside, backward + np.where(backward, back, 0.0)
        if shape.results:
            # What is read of partial results is their sum over devices, which is saved: nothing
            # asks for the terms again.
            partial = [self.layout_table.partial(row) for row in shape.results]
            not_recomputed = np.where(np.logical_and.reduce(partial), forward, not_recomputed)
        return {
            "forward_s": forward,
            "backward_s": backward,
            "not_recomputed_s": not_recomputed,
            "weights_apart_s": apart,
        }

    @cached_property
    def _waiting(self) -> frozenset[str]:
        """Weights whose gradients may be made apart from the backward pass, on pipeline stages."""
        if not self.base.training or not self.base.dealt or self.pricer.mesh.stages < 2:
            return frozenset()
        first, period, repeats = self.base.dealt[0]
        blocks = range(first, first + period * repeats)
        return products_weights(self.graph, self.base.grad, blocks)

    def _waiting_share(self, i: int) -> float:
        """What part of a node's backward pass may be made apart from it."""
        if not self._waiting:
            return 0.0
        return waiting_share(self.graph.nodes[i], self.base.grad, self._waiting)

    def _operand_share(self, i: int) -> float:
        """One product's part of the operand that it hands on to its weight's gradient."""
        if not self._waiting:
            return 0.0
        both = factors(self.graph.nodes[i])
        operands = [n for n in both if n not in self._waiting]
        if len(operands) != 1 or operands[0] in self.graph.weights:
            return 0.0
        readers = [k for k, _ in self.graph.consumers[operands[0]]]
        products = (factors(self.graph.nodes[k]) for k in readers)
        return 1 / sum(not self._waiting.isdisjoint(operands) for operands in products)

    def _copied(self, i: int, shape: _Shape) -> dict[str, np.ndarray]:
        """Fields of OptionCosts in bytes as `_bytes_of`, but for what is copied into stacks of
        loops all 0."""
        none = dict.fromkeys(BYTES, np.zeros(len(shape.splits)))
        if self.pricer.runtime.kernels is not None or i not in self.base.looped:
            return none
        saved = self._saved(i, shape, 1 + self.pricer.runtime.memory_slack)
        return none | {f: saved[f] for f in ("stacked_bytes", "stacked_bytes_remat")}

    def _bytes_of(self, i: int, shape: _Shape) -> dict[str, np.ndarray]:
        """Fields of OptionCosts in bytes, but for weights."""
        base, size = self.base, shape.size
        slack, nothing = 1 + self.pricer.runtime.memory_slack, np.zeros(len(shape.splits))
        operands = size.read - size.weights
        handed = size.made * slack * (self._waiting_share(i) > 0)
        saved_collective = nothing
        saved = self._saved(i, shape, slack)
        if self._as_framework(i):
            at_framework, remaining = self._saved_by_framework(i, shape, slack)
            entering = at_framework
            if i in base.repeated:
                entering = saved["saved_bytes_remat"]
            elif attentions_before(base, base.runs[0][0] if base.runs else 0):
                entering = nothing  # layers before the blocks are made again, too
            saved |= {
                "saved_bytes": at_framework,
                "saved_bytes_one_repeat": at_framework / base.times[i] * (i in base.repeated),
                "saved_bytes_remat": entering,
            }
            saved_collective = remaining - entering  # below 0 of what reads all that enters
        elif shape.results and (most := base.saved_collective_bytes(i, self.pricer.itemsize)):
            saved_collective = self.layout_table.partial(shape.results[0]) * (
                slack * most / prod(self.sizes.values())
            )
        passing = postponed = nothing
        if not base.training:
            passing = size.made * slack * (not base.has_its_place(i))
        elif base.written_out:
            outputs = [o for o in base.graph.nodes[i].outputs if o]
            with_grad = [x for o, x in zip(outputs, size.outs, strict=True) if o in base.grad]
            passing = sum(with_grad, nothing) * slack
            if puts_off(base, i):
                postponed = (operands + size.made) * slack
        return {
            **saved,
            "saved_collective_bytes": saved_collective,
            "handed_on_bytes": handed,
            "handed_on_bytes_remat": handed + self._operand_share(i) * slack * operands,
            "passing_bytes": passing,
            "postponed_bytes": postponed,
            **self._workspaces(i, shape, slack),
        }

    def _workspaces(self, i: int, shape: _Shape, slack: float) -> dict[str, np.ndarray]:
        """Fields of OptionCosts of what lives only while a node runs; of nodes that decide alike
        the most."""
        base, size = self.base, shape.size
        operands, nothing = size.read - size.weights, np.zeros(len(shape.splits))
        can_be_apart = i in base.repeated and self.pricer.runtime.kernels is None

        nodes = [j for j, _ in base.variants.get(i, ((i, 1),))]

        def work(weights: np.ndarray, apart: bool) -> np.ndarray:
            sizes = (operands, size.made, weights)
            of_nodes = [
                working_of(base.untied, j, shape.cuts, *sizes, self.pricer, apart) for j in nodes
            ]
            largest: np.ndarray = slack * np.maximum.reduce(of_nodes)
            return largest

        with_weights = without_weights = work(size.weights, False)
        if size.weights.any():
            without_weights = work(nothing, False)
        apart_with_weights, apart_without_weights = with_weights, without_weights
        if can_be_apart:
            apart_with_weights = apart_without_weights = work(size.weights, True)
            if size.weights.any():
                apart_without_weights = work(nothing, True)
        return {
            "workspace_bytes": with_weights,
            "workspace_without_weights_bytes": without_weights,
            "workspace_apart_bytes": apart_with_weights,
            "workspace_apart_without_weights_bytes": apart_without_weights,
        }

    def _read(
        self, node: Node, rule: Rule, splits: Sequence[Split]
    ) -> tuple[tuple[LayoutColumn | None, ...], tuple[LayoutColumn, ...]]:
        """Layouts of operands and results under each split; an operand without a gradient, that no
        ZeRO stage cuts either, is plainly replicated over its `grad_partial` axes."""
        cut = self.base.cut_by_zero
        grad = tuple([bool(name) and name in cut for name in node.inputs])
        slots, count = (
            [slot for slot, name in enumerate(node.inputs) if name],
            sum(map(bool, node.outputs)),
        )
        paired, inside = tuple(rule.paired.items()), tuple([x.factor for x in rule.inner])
        key = (
            "rule",
            rule.operands,
            rule.results,
            rule.linear,
            paired,
            inside,
            self.order,
            grad,
            tuple(slots),
        )
        memo, layout_table = self.layout_table.memo.setdefault(key, {}), self.layout_table
        if (whole := memo.get(id(splits))) is not None:
            return whole[1:]
        if new := [s for s in splits if s not in memo]:
            wanted = [self._layouts(rule, slot, new, operand=True) for slot in slots]
            wanted = [
                column if grad[slot] else list(map(layout_table.without_grad_partial, column))
                for slot, column in zip(slots, wanted, strict=True)
            ]
            result_layouts = [self._layouts(rule, k, new, operand=False) for k in range(count)]
            memo.update(zip(new, zip(*wanted, *result_layouts, strict=True), strict=True))
        rows = [
            layout_table.column(column)
            for column in zip(*map(memo.__getitem__, splits), strict=True)
        ]
        wants = dict(zip(slots, rows, strict=False))
        memo[id(splits)] = (
            splits,
            tuple([wants.get(slot) for slot in range(len(node.inputs))]),
            tuple(rows[len(slots) :]),
        )  # the splits are kept, so that ids stay unique
        return memo[id(splits)][1:]

    def _cuts(self, splits: Sequence[Split]) -> SplitArrays:
        """What the splits cut into how many pieces; which axes cut what is read once for all meshes
        that offer the same splits."""
        memo = self.layout_table.memo.setdefault(("cuts",), {})
        if id(splits) not in memo:
            memo[id(splits)] = splits, SplitArrays.axes(splits)
        return SplitArrays.at(splits, memo[id(splits)][1], self.sizes)

    def _layouts(
        self, rule: Rule, slot: int, splits: Sequence[Split], *, operand: bool
    ) -> list[int]:
        """Numbers of the layouts of an operand or result. What they depend on is which of its dims
        each axis cuts, whatever rule says so: each such case is read once. Of choices that it lacks
        only pending terms of an operand and collectives inside the kernel of a result make a
        difference.
        """
        dims, reading = (
            (rule.operands[slot], rule.operand) if operand else (rule.results[slot], rule.result)
        )
        telling = {PENDING} if slot in rule.linear else set()
        if not operand:
            telling = {f for x in rule.inner for f in x.factor.split("+")}
        dims_of: dict[str, list[tuple[int, int]]] = {}
        for d, dim in enumerate(dims):
            for k, f in enumerate(dim):
                dims_of.setdefault(f, []).append((d, k))
        place = {
            choice: (
                tuple([p for f in rule.members(choice) for p in dims_of.get(f, ())])
                or choice in telling
            )
            for choice in (*rule.choices, PENDING)
        }
        memo, result = (
            self.layout_table.memo.setdefault(("layouts", operand, len(dims), self.order), {}),
            [],
        )
        for s in splits:
            case = tuple([(place[choice], axes) for choice, axes in s.pairs])
            n = memo.get(case)
            if n is None:
                n = memo[case] = self.layout_table.number(reading(slot, s, self.order))
            result.append(n)
        return result

    def _bytes(
        self,
        node: Node,
        needs: Sequence[LayoutColumn | None],
        results: Sequence[LayoutColumn],
        options: int,
    ) -> _Bytes:
        nothing = np.zeros(options)
        ins = tuple(
            [
                nothing if row is None else self._size(name, row)
                for name, row in zip(node.inputs, needs, strict=True)
            ]
        )
        outs = tuple(
            [
                self._size(name, row)
                for name, row in zip((o for o in node.outputs if o), results, strict=True)
            ]
        )
        weights = [
            x for name, x in zip(node.inputs, ins, strict=True) if name in self.graph.weights
        ]
        return _Bytes(ins, outs, sum(ins, nothing), sum(outs, nothing), sum(weights, nothing))

    def _size(self, name: str, row: LayoutColumn) -> np.ndarray:
        """Bytes of one device's piece in each layout."""
        t = self.graph.tensors[name]
        kind, share = self.base.kind_of(t.shape), kept_share(self.graph, name, self.pricer)
        if self.pricer.topology.device.tile and kind:
            sizes = [
                self.pricer.stored_bytes(
                    local_shape(t.shape, self.layout_table.layouts[n], self.sizes), t.dtype, kind
                )
                for n in row.layouts
            ]
            return share * np.array(sizes)[row.of]
        return share * self.tables.local(t.shape, row)[row.of] * self.pricer.itemsize(t.dtype)

    def _saved(self, i: int, shape: _Shape, slack: float) -> dict[str, np.ndarray]:
        """Fields of OptionCosts of what the backward pass reads."""
        base, node, size = self.base, self.graph.nodes[i], shape.size
        stays = "activations" not in self.pricer.offload
        slack = slack if base.training else 1.0
        saved = entering_bytes = one_repeat = epilogue = inputs = stacked = entering_stacks = (
            np.zeros(len(shape.splits))
        )
        for slot, saved_each in (
            *enumerate(size.ins),
            *((-1 - k, n) for k, n in enumerate(size.outs)),
        ):
            total, entering, first, after = base.saved_counts.get((i, slot), UNSAVED)
            if total or after:
                result_bytes = saved_each + saved_beside_of(
                    base, i, slot, shape.splits, self.pricer
                )
                if (i, slot) in base.gathered:
                    result_bytes = result_bytes * reads_whole(base, i, shape.cuts)
                saved_each = result_bytes * slack
                saved = saved + total * saved_each
                entering_bytes = entering_bytes + entering * stays * saved_each
                one_repeat = one_repeat + first * saved_each
                epilogue = epilogue + after * saved_each
                key = base.shared[i], slot
                filled = self.pricer.fills_stacks and key not in base.copied_apart
                if i in base.looped and base.training and not filled:
                    stacked = stacked + total * result_bytes
                    entering_stacks = entering_stacks + entering * stays * result_bytes
                if base.written_out and slot >= 0 and node.inputs[slot] in self.graph.inputs:
                    inputs = inputs + total * saved_each
        return {
            "saved_bytes": saved,
            "saved_bytes_remat": entering_bytes,
            "saved_bytes_one_repeat": one_repeat,
            "saved_bytes_epilogue": epilogue,
            "saved_input_bytes": inputs,
            "stacked_bytes": stacked,
            "stacked_bytes_remat": entering_stacks,
        }

    def _as_framework(self, i: int) -> bool:
        """Whether what a node saves is what a framework's program does: of the head and the loss
        that is logits, which are priced apart."""
        base, kernels = self.base, self.pricer.runtime.kernels
        return bool(kernels and base.training and i not in base.epilogue and not base.written_out)

    def _saved_by_framework(
        self, i: int, shape: _Shape, slack: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that a framework's program saves of a node's repeats, and those that recompute with
        saved collectives leaves of them."""
        saved, remaining = option_bytes(self.base, i, shape.splits, shape.size.outs[0], self.pricer)
        return self.base.times[i] * slack * saved, self.base.times[i] * slack * remaining

    def _own(
        self, i: int, needs: Sequence[LayoutColumn | None]
    ) -> Iterator[tuple[str, LayoutColumn, bool]]:
        """The weights that no other node reads, their layouts, and whether the backward pass reads
        them."""
        node = self.graph.nodes[i]
        backwards = reads(node, self.base.grad).slots
        for slot, (name, row) in enumerate(zip(node.inputs, needs, strict=True)):
            if row is not None and name in self.base.own:
                yield name, row, slot in backwards

    def _own_weights(
        self, i: int, needs: Sequence[LayoutColumn | None], options: int
    ) -> WeightCosts:
        """What the weights cost that no other node reads."""
        cells = None
        for name, row, read_backward in self._own(i, needs):
            costs = self.weights.of(name, row.layouts, read_backward)[..., row.of]
            cells = costs if cells is None else cells + costs
        return no_weights(options) if cells is None else WeightCosts.of(cells)


def _batch_pieces(rule: Rule, cuts: SplitArrays, batch: str) -> np.ndarray:
    """Into how many pieces what the graph is of may be cut with at least one row of the batch for
    each device that a split gives some. [options]"""
    parts = np.ones(len(cuts.splits))
    for choice, n in cuts.parts.items():
        if batch in rule.members(choice):
            parts = parts * n
    return np.where(parts > 1, rule.sizes.get(batch, 1) / parts, np.inf)
