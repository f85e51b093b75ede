"""How every value of a graph travels under a set of splits: in which layout it is made, needed, and
resharded in between.

One derivation, read by the cost model, the emitter and verification, so that what is priced is what
runs:

    need[node, slot]   the layout the node's rule asks of an operand
                       (planner.sharding.rule)
    source[tensor]     the layout the producer leaves, or in which an input or a weight is stored
    trees[tensor]      the reshard tree: to one shared layout, and from there to each distinct need
                       (planner.sharding.layout.reshard_tree)
    grad               tensors that carry a gradient: float, downstream of something trainable,
                       upstream of the loss

Reshards are charged their transposes only for tensors in `grad`. A weight's gradient is partial
over the `grad_partial` axes of its layout; how it is reduced is the ZeRO stage of its `WeightPlan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.execution.plan import Plan, WeightPlan
from planner.graph.ir import Graph
from planner.ops.lookup import gradient_tensors, rule_of
from planner.sharding.layout import (
    Axes,
    Layout,
    ReshardTree,
    group,
    local_shape,
    replicated,
    reshard_tree,
    ring_elements,
)
from planner.sharding.rule import Rule, Split

WHOLE = Split()


@dataclass(frozen=True)
class Flow:
    """The derivation (module docstring), with rules per node and weights' plans."""

    graph: Graph
    plan: Plan
    rules: tuple[Rule, ...]
    need: Mapping[tuple[int, int], Layout]
    source: Mapping[str, Layout]
    trees: Mapping[str, ReshardTree]
    weights: Mapping[str, WeightPlan]
    grad: frozenset[str]
    training: bool
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What prices derive once per flow."""

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Splits of all nodes."""
        return splits_of_nodes(self.graph, self.plan)

    def split(self, index: int) -> Split:
        """Split of node `index`."""
        return self.splits[index]

    def cheapest_tree(
        self, name: str, source: Layout, targets: Iterable[Layout]
    ) -> ReshardTree | None:
        """The cheapest tree of a tensor from a layout to others, None where there is none."""
        shape, targets = self.graph.tensors[name].shape, tuple(dict.fromkeys(targets))
        return reshard_tree(shape, source, targets, self.plan.mesh, name in self.grad)


def splits_of_nodes(graph: Graph, plan: Plan) -> tuple[Split, ...]:
    """Splits of all nodes of a graph under a plan."""
    chosen = plan.splits
    return tuple([chosen.get(node.id, WHOLE) for node in graph.nodes])


Slots = tuple[tuple[tuple[int, int], str, int], ...]
"""Of the operands of a node that are there: (node, slot), tensor, and which of a reading's two
layouts it is brought to: 0 with a gradient, 1 without."""


def _operands(graph: Graph, grad: frozenset[str]) -> tuple[tuple[Slots, tuple[str, ...]], ...]:
    """Operands and results of every node, worked out once a graph."""
    key = "operands", grad
    if key not in graph.memo:
        graph.memo[key] = tuple(
            (
                tuple(
                    ((i, slot), name, int(name not in grad))
                    for slot, name in enumerate(node.inputs)
                    if name
                ),
                tuple(filter(None, node.outputs)),
            )
            for i, node in enumerate(graph.nodes)
        )
    known: tuple[tuple[Slots, tuple[str, ...]], ...] = graph.memo[key]
    return known


def derive(
    graph: Graph,
    plan: Plan,
    *,
    training: bool,
    rules: tuple[Rule, ...] | None = None,
    grad: frozenset[str] | None = None,
) -> Flow:
    """Derive the flow of a whole graph. Raises PlanError where two layouts cannot be joined (only
    pins can cause it)."""
    rules = rules or tuple(rule_of(n, graph)[0] for n in graph.nodes)
    grad = (gradient_tensors(graph) if training else frozenset()) if grad is None else grad
    derivation = _Derivation(graph, plan, rules, grad)
    derivation.read_rules()
    derivation.read_ends()
    derivation.store_weights()
    trees = derivation.trees()
    return Flow(
        graph=graph,
        plan=plan,
        rules=rules,
        need=derivation.need,
        source=derivation.source,
        trees=trees,
        weights=derivation.weights,
        grad=grad,
        training=training,
    )


Reading = tuple[list[tuple[Layout, Layout]], list[Layout]]
"""Layouts of operands, with a gradient and without one, and of results."""
READINGS = 4096
"""Readings that are kept: a search has some hundred."""


def _reading(rule: Rule, split: Split, order: Axes) -> Reading:
    """The reading of a rule, made once for all rules of its form."""
    key = rule.form, split, order
    if key not in _readings:
        if len(_readings) >= READINGS:
            _readings.clear()
        operands = [rule.operand(slot, split, order) for slot in range(len(rule.operands))]
        _readings[key] = (
            [(x, replace(x, grad_partial=()) if x.grad_partial else x) for x in operands],
            [rule.result(k, split, order) for k in range(len(rule.results))],
        )
    return _readings[key]


_readings: dict[tuple[tuple[object, ...], Split, Axes], Reading] = {}


class _Derivation:
    """A flow in the making.

    Repeats share rules and splits, so each reading of a rule is made once and its layouts are
    shared objects. What follows from them is found once for the same objects, which is why keys are
    made of their ids (hashing layouts would take longer than what is saved); `need` keeps them.
    """

    def __init__(
        self, graph: Graph, plan: Plan, rules: tuple[Rule, ...], grad: frozenset[str]
    ) -> None:
        self.graph, self.plan, self.rules, self.grad = graph, plan, rules, grad
        self.cut = grad | (zero_stage_frozen(graph, grad) if plan.zero_stage == 3 else frozenset())
        """What keeps `grad_partial`: tensors with a gradient, and weights without one that the ZeRO
        stage cuts all the same."""
        self.need: dict[tuple[int, int], Layout] = {}
        self.source: dict[str, Layout] = {}
        self.wanted: dict[str, list[Layout]] = {}  # of a tensor, by its readers
        self.weights: dict[str, WeightPlan] = {}

    def read_rules(self) -> None:
        """What every node asks of its operands, and in which layouts it leaves its results."""
        readings: dict[tuple[int, int], Reading] = {}
        need, source, wanted = self.need, self.source, self.wanted
        splits = splits_of_nodes(self.graph, self.plan)
        every = _operands(self.graph, self.cut)
        for rule, split, (slots, results) in zip(self.rules, splits, every, strict=True):
            reading = readings.get((id(rule), id(split)))
            if reading is None:
                reading = readings[id(rule), id(split)] = _reading(rule, split, self.plan.order)
            operands, result_layouts = reading
            for key, name, which in slots:
                layout = need[key] = operands[key[1]][which]
                if name in wanted:
                    wanted[name].append(layout)
                else:
                    wanted[name] = [layout]
            source.update(zip(results, result_layouts, strict=False))

    def read_ends(self) -> None:
        """Layouts of what enters the graph and of what leaves it: nothing partial is handed out."""
        tensors, wanted, constants = self.graph.tensors, self.wanted, self.graph.constants
        for name in self.graph.outputs:
            layout = self.source.get(name)
            if layout is None and name in wanted:
                layout = wanted[name][0]
            stored = layout.stored if layout else replicated(len(tensors[name].shape))
            wanted.setdefault(name, []).append(stored)
        for name in (*self.graph.inputs, *constants):
            if name in wanted and name not in self.source:
                self.source[name] = (
                    replicated(len(tensors[name].shape))
                    if name in constants
                    else wanted[name][0].stored
                )

    def store_weights(self) -> None:
        """How every weight that is read is stored."""
        known: dict[tuple, tuple[WeightPlan, Layout]] = {}
        for name in self.graph.weights:
            if name not in self.wanted:
                continue
            shape, trained = self.graph.tensors[name].shape, name in self.grad
            recorded = self.plan.weight_plans.get(name)
            key: tuple = (
                (shape, trained, *map(id, self.wanted[name])) if recorded is None else (name,)
            )
            if key not in known:
                weight = recorded or weight_plan(
                    self.graph, name, self.wanted[name], self.plan, trained
                )
                known[key] = weight, replace(weight.layout, grad_partial=weight.grad_partial)
            self.weights[name], self.source[name] = known[key]

    def trees(self) -> dict[str, ReshardTree]:
        """How every tensor reaches its readers. Raises PlanError P041."""
        known: dict[tuple, ReshardTree | None] = {}
        trees: dict[str, ReshardTree] = {}
        for name, targets in self.wanted.items():
            shape, trained = self.graph.tensors[name].shape, name in self.grad
            source = self.source[name]
            key = (shape, trained, id(source), *map(id, targets))
            if key not in known:
                known[key] = reshard_tree(shape, source, tuple(targets), self.plan.mesh, trained)
            tree = known[key]
            if tree is None:
                raise PlanError(
                    "P041",
                    f"the layouts asked of tensor {name!r} cannot be joined",
                    detail=[t.spell() for t in (source, *targets)],
                    help=["remove the pin of one of its operators"],
                )
            trees[name] = tree
        return trees


def weight_plan(
    graph: Graph, name: str, targets: Iterable[Layout], plan: Plan, trained: bool
) -> WeightPlan:
    """Stored as its consumer cuts it (several: see `_storage`); with optimizer sharding, the state
    (and at ZeRO stage 3 the weight) is also cut over the plan's zero axes among those its gradient
    is partial over (`zero_stage_dims`). Of a frozen weight targets say where a gradient would be
    partial under stage 3 alone, which cuts it as if it had one."""
    targets = tuple(dict.fromkeys(targets))
    shape = graph.tensors[name].shape
    layout = targets[0].stored if len(targets) == 1 else _storage(shape, targets, plan, trained)
    grad_partial = _pending(layout, targets, plan)
    axes = tuple(a for a in grad_partial if a in plan.zero_axes)
    if not plan.zero_stage or not axes:
        return WeightPlan(layout, grad_partial=grad_partial)
    sizes = dict(plan.mesh)
    pieces = np.array(
        [[group(dim, sizes) for dim in (*layout.dims, ())]]
    )  # the last: of a scalar too
    d = int(zero_stage_dims(np.array([[*shape, 1]]), pieces, np.array([group(axes, sizes)]))[0])
    return (
        WeightPlan(layout, own_zero_stage(plan.zero_stage, shape), axes, d, grad_partial)
        if d >= 0
        else WeightPlan(layout, grad_partial=grad_partial)
    )


def zero_stage_dims(shape: np.ndarray, pieces: np.ndarray, devices: np.ndarray) -> np.ndarray:
    """The dim along which optimizer sharding over so many devices cuts each weight [weights]: the
    first that divides evenly, else the one of least padding among dims that nothing else cuts (a
    piece of a piece that is padded too would not lie where the weight's own cut has it), -1 where
    padding would more than double all.

    shape, pieces: extents of each dim, and into how many its own layout cuts it; dims of one
    element may follow. [weights, dims]
    """
    local, n = -(-shape // pieces), devices[:, None]
    even = (shape % (pieces * n) == 0) & (local > 1)
    waste = np.where(
        (pieces == 1) & (2 * local > n), -(-local // n) * n / np.maximum(local, 1), np.inf
    )
    least = np.where(np.isfinite(waste).any(axis=1), waste.argmin(axis=1), -1)
    dims: np.ndarray = np.where(
        devices > 1, np.where(even.any(axis=1), even.argmax(axis=1), least), -1
    )
    return dims


def zero_stage_frozen(graph: Graph, grad: frozenset[str]) -> frozenset[str]:
    """Weights without a gradient that ZeRO stage 3 cuts like those with one: gathered where they
    are used, in the backward pass where that reads them. grad: tensors with a gradient; a graph
    that has none is not trained, and nothing is cut."""
    key = "frozen under ZeRO", grad
    if key not in graph.memo:
        graph.memo[key] = frozenset(
            name
            for name in (graph.weights if grad else ())
            if name not in grad
            and name not in graph.host_tables
            and own_zero_stage(3, graph.tensors[name].shape) == 3
        )
    known: frozenset[str] = graph.memo[key]
    return known


def own_zero_stage(zero_stage: int, shape: tuple[int, ...]) -> int:
    """The ZeRO stage of one weight under a plan's. Biases and scales, also those of channels
    ([32, 1, 1]), stay at stage 1 under stage 3: gathering one costs a collective's latency in every
    block and pass, and saves nothing that counts."""
    return 1 if zero_stage == 3 and sum(n > 1 for n in shape) <= 1 else zero_stage


def _pending(layout: Layout, targets: tuple[Layout, ...], plan: Plan) -> Axes:
    """Axes over which a weight's gradient is left pending: those of all its uses."""
    cut = {a for dim in layout.dims for a in dim}
    return tuple(
        a for a in plan.order if a not in cut and all(a in t.grad_partial for t in targets)
    )


def _storage(
    shape: tuple[int, ...], targets: tuple[Layout, ...], plan: Plan, trained: bool
) -> Layout:
    """The layout, of those its uses want and of what two of them cut together, from which a weight
    reaches all its uses with the fewest bytes, the reduction of what is pending of its gradient
    included; among equals the smallest piece."""
    sizes, best = dict(plan.mesh), None
    wanted = dict.fromkeys(t.stored for t in targets)
    for layout in dict.fromkeys(
        (
            *wanted,
            *(both for a, b in combinations(wanted, 2) if (both := _cut_by_both(a, b)) is not None),
        )
    ):
        source = replace(layout, grad_partial=_pending(layout, targets, plan))
        tree = reshard_tree(shape, source, targets, plan.mesh, trained)
        if tree is None:
            continue
        piece = prod(local_shape(shape, layout, sizes))
        n = group(source.grad_partial, sizes) if trained else 1
        price = (ring_elements(tree.steps(), sizes, trained) + 2 * piece * (n - 1) / n, piece)
        if best is None or price < best[0]:
            best = price, layout
    return best[1] if best else targets[0].stored


def _cut_by_both(a: Layout, b: Layout) -> Layout | None:
    """The layout with the cuts of two; None where they cut one dim, or over one axis."""
    axes = [x for layout in (a, b) for dim in layout.dims for x in dim]
    if len(set(axes)) < len(axes) or any(x and y for x, y in zip(a.dims, b.dims, strict=True)):
        return None
    return Layout(tuple(x or y for x, y in zip(a.dims, b.dims, strict=True)))


def stored_layout(weight: WeightPlan) -> Layout:
    """How the parameter lies in memory between steps: ZeRO stage 3 cuts the weight itself."""
    return cut_layout(weight) if weight.zero_stage == 3 else weight.layout


def cut_layout(weight: WeightPlan) -> Layout:
    """The layout of the sharded optimizer state (ZeRO stages 1-3)."""
    if weight.zero_dim < 0:
        return weight.layout
    dims = list(weight.layout.dims)
    dims[weight.zero_dim] = dims[weight.zero_dim] + weight.zero_axes
    return Layout(tuple(dims))
