"""The space of plans on one mesh, and the arrays that price it.

Decisions (variables of the problem):
    op      one per class of nodes that share a decision (planner.blocks): a split of its rule
    hub     one per tensor read by several operators: the layout it is brought to once, possibly with one branch made from it
    weight  one per weight read by several operators: the layout it is kept in
Costs of an op are kernels forward and backward, collectives inside kernels, and the reduction of the gradients of weights only it reads.
Costs between variables are conversions, forward and (where a gradient flows) backward, from planner.layout.
Everything is kept apart (forward, backward, per sharding level) so that one space serves every choice of technique: planner.assemble adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from planner.blocks import classes, find_runs
from planner.flow import Plan, gradient_tensors, rule_of, weight_plan
from planner.graph import Graph
from planner.kernels import find_savers, inner_times, kernel_times, savers
from planner.layout import Axes, Layout, convert, group, local_shape
from planner.rule import PENDING, Limits, Rule, Split, candidates

if TYPE_CHECKING:
    from planner.price import Pricer

ZERO_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Base:
    """What does not depend on the mesh: rules, gradients, repeated blocks, classes and multiplicities."""

    graph: Graph
    training: bool
    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    grad: frozenset[str]
    runs: tuple[tuple[int, int, int], ...]
    shared: tuple[int, ...]
    times: Mapping[int, int]

    @classmethod
    def of(cls, graph: Graph, *, training: bool, fold: bool = True) -> Base:
        """Derive once per graph; `fold=False` gives every node its own decision."""
        runs = find_runs(graph) if fold else ()
        shared = tuple(classes(graph, runs))
        times: dict[int, int] = {}
        for c in shared:
            times[c] = times.get(c, 0) + 1
        known: dict[int, tuple[Rule, str]] = {}
        for i, node in enumerate(graph.nodes):
            known[i] = known[shared[i]] if shared[i] in known else rule_of(node, graph)
        grad = gradient_tensors(graph) if training else frozenset()
        return cls(graph, training, tuple(known[i][0] for i in range(len(known))), tuple(known[i][1] for i in range(len(known))), grad, runs, shared, times)

    @cached_property
    def savers(self) -> dict[tuple[int, int], str]:
        """See planner.kernels.savers."""
        return find_savers(self)


@dataclass
class Variable:
    """One decision: its options with their costs in seconds and bytes (arrays over options)."""

    name: str
    kind: str
    count: int
    node: int = -1
    splits: tuple[Split, ...] = ()
    layouts: tuple[tuple[Layout, Layout | None], ...] = ()
    forward_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    backward_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    replay_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    reduce_s: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> seconds once per optimizer step
    each_s: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> seconds per microbatch
    state_bytes: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> parameters + gradients + optimizer
    kept_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # activations the backward pass reads
    flops: float = 0.0


@dataclass
class Link:
    """Conversion seconds between two variables: tables [options of a, options of b], times `count`."""

    a: int
    b: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    count: int


@dataclass
class Space:
    """All variables and links of one mesh."""

    base: Base
    pricer: Pricer
    variables: list[Variable]
    links: list[Link]
    op_of: Mapping[int, int]  # node class -> variable


class _Builder:
    """Builds a Space; tables are memoised by shapes and layouts, so repeated work is priced once."""

    def __init__(self, base: Base, pricer: Pricer, limits: Limits, allowed: Mapping[int, tuple[Split, ...]], zero_axes: Axes) -> None:
        self.base, self.pricer, self.limits, self.allowed = base, pricer, limits, allowed
        self.graph, self.sizes = base.graph, dict(pricer.sizes)
        self.mesh = tuple(self.sizes.items())
        self.order = tuple(self.sizes)
        self.zero_axes = zero_axes
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.op_of: dict[int, int] = {}
        self._price = pricer.memo
        self._tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._connected: dict[tuple, tuple[int, int, int]] = {}  # wiring -> (hub or -1, first link, end link)

    def build(self) -> Space:
        graph, base = self.graph, self.base
        readers: dict[str, list[tuple[int, int]]] = {}
        for i, node in enumerate(graph.nodes):
            for slot, name in enumerate(node.inputs):
                if name and name not in graph.constants:
                    readers.setdefault(name, []).append((i, slot))
        self.readers = readers
        self.first_saver = savers(base)
        for i in range(len(graph.nodes)):
            if base.shared[i] == i:
                self._op(i)
        for name, uses in readers.items():
            self._connect(name, uses)
        self._outputs()
        return Space(base, self.pricer, self.variables, self.links, self.op_of)

    def need(self, i: int, slot: int, split: Split) -> Layout:
        """Layout of an operand under a split; without a gradient a fan is plain replication."""
        layout = self.base.rules[i].operand(slot, split, self.order)
        return layout if self.graph.nodes[i].inputs[slot] in self.base.grad else replace(layout, fan=())

    def _op(self, i: int) -> None:
        node, rule = self.graph.nodes[i], self.base.rules[i]
        splits = self.allowed.get(i) or self._reachable(i, candidates(rule, self.sizes, self.limits))
        v = Variable(node.id, "op", self.base.times[i], i, splits, flops=rule.flops * self.base.times[i])
        rows = [self._op_row(i, s) for s in splits]
        v.forward_s, v.backward_s, v.replay_s, v.kept_bytes = (np.array(c) for c in zip(*rows, strict=True))
        for z in ZERO_LEVELS:
            cells = [self._own_weights(i, s, z) for s in splits]
            v.reduce_s[z], v.each_s[z], v.state_bytes[z] = (np.array(c) for c in zip(*cells, strict=True))
        self.op_of[i] = len(self.variables)
        self.variables.append(v)

    def _reachable(self, i: int, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        """Without splits that want a weight, an input or a constant as pending terms: only operators make those."""
        graph, rule = self.graph, self.base.rules[i]
        if all(graph.nodes[i].inputs[slot] in graph.producer for slot in rule.linear):
            return splits
        return tuple(s for s in splits if not s.axes(PENDING))

    def _op_row(self, i: int, split: Split) -> tuple[float, float, float, float]:
        """(forward, backward, replayed collectives, bytes kept) of one node under a split."""
        forward, backward = kernel_times(self.base, i, split, self.pricer)
        inner_f, inner_b = inner_times(self.base, i, split, self.pricer)
        node, rule, kept = self.graph.nodes[i], self.base.rules[i], 0.0
        for slot, name in enumerate(node.inputs):
            if (i, slot) in self.first_saver:
                kept += self._bytes(name, self.need(i, slot, split))
        for k, name in enumerate(o for o in node.outputs if o):
            if (i, -1 - k) in self.first_saver:
                kept += self._bytes(name, rule.result(k, split, self.order))
        return forward + inner_f, backward + (inner_b if backward else 0.0), inner_f, kept

    def _bytes(self, name: str, layout: Layout) -> float:
        t = self.graph.tensors[name]
        total = self.pricer.itemsize(t.dtype)
        for s in local_shape(t.shape, layout, self.sizes):
            total *= s
        return total

    def _own_weights(self, i: int, split: Split, zero: int) -> tuple[float, float, float]:
        """(reduction seconds once a step, seconds each microbatch, state bytes) of the weights only this class of nodes reads."""
        once = each = state = 0.0
        for slot, name in enumerate(self.graph.nodes[i].inputs):
            if name in self.graph.weights and len(self.readers[name]) == 1:
                a, b, c = self.weight_cost(name, self.need(i, slot, split), zero)
                once, each, state = once + a, each + b, state + c
        return once, each, state

    def weight_cost(self, name: str, need: Layout, zero: int) -> tuple[float, float, float]:
        """Reduction and state of one weight needed in a layout, under an optimizer-sharding level."""
        key = ("weight", self.graph.tensors[name].shape, self.graph.tensors[name].dtype, need, zero, name in self.base.grad)
        if key not in self._price:
            self._price[key] = self._weight_cost(name, need, zero)  # type: ignore[assignment]
        return self._price[key]  # type: ignore[return-value]

    def _weight_cost(self, name: str, need: Layout, zero: int) -> tuple[float, float, float]:
        recipe, price, t = self.pricer.recipe, self.pricer, self.graph.tensors[name]
        trained = name in self.base.grad
        local = 1.0
        for s in local_shape(t.shape, need, self.sizes):
            local *= s
        if not trained:
            return 0.0, 0.0, local * (recipe.parameter_bytes if t.is_float else self.pricer.itemsize(t.dtype))
        plan = weight_plan(self.graph, name, [need], Plan(self.mesh, {}, zero, self.zero_axes), True)
        cut = group(plan.axes, self.sizes) if plan.zero and plan.dim >= 0 else 1
        rest = tuple(a for a in need.fan if cut == 1 or a not in plan.axes)
        level = plan.zero if cut > 1 else 0
        parameters = local * recipe.parameter_bytes / (cut if level == 3 else 1)
        gradients = local * recipe.gradient_bytes / (cut if level >= 2 else 1)
        state = local * recipe.state_bytes / cut
        full, piece = local * recipe.reduction_bytes, local * recipe.reduction_bytes / cut
        scatter = price.collective_s("reduce-scatter", plan.axes, full) if level else 0.0
        collect = price.collective_s("all-gather", plan.axes, local * recipe.parameter_bytes) if level else 0.0
        tail = price.collective_s("all-reduce", rest, piece)
        step = price.optimizer_s(local / cut)
        if level == 0 or level == 1:
            return scatter + collect + tail + step, 0.0, parameters + gradients + state
        if level == 2:
            return collect + tail + step, scatter, parameters + gradients + state
        return tail + step, scatter + 2 * collect, parameters + gradients + state

    def convert_s(self, name: str, source: Layout, target: Layout) -> tuple[float, float]:
        """(forward, backward) seconds of a conversion, infinite where there is none."""
        t, grad = self.graph.tensors[name], name in self.base.grad
        key = ("convert", t.shape, t.dtype, source, target, grad)
        known = self._price.get(key)
        if known is None:
            known = self._price[key] = self._convert_s(t.shape, self.pricer.itemsize(t.dtype), source, target, grad)
        return known

    def _convert_s(self, shape: tuple[int, ...], itemsize: float, source: Layout, target: Layout, grad: bool) -> tuple[float, float]:
        even = self._even(shape, source) and self._even(shape, target)
        key = ("steps", source, target) if even else ("steps", source, target, shape)
        moves = self._price.get(key)
        if moves is None:
            steps = convert(shape, source, target, self.mesh)
            whole = prod(shape) or 1
            # Of an evenly cut tensor every payload is a fixed fraction of the whole, so one derivation serves every shape.
            moves = self._price[key] = None if steps is None else tuple(
                (kind, s.axes, elements / whole, back)
                for s in steps
                for kind, elements, back in ((s.forward, s.forward_elements, False), (s.backward, s.backward_elements, True))
                if kind
            )  # fmt: skip
            if steps is None:
                self._price[key] = ()
                self._price["none", *key] = True
        if ("none", *key) in self._price:
            return np.inf, 0.0
        forward = backward = 0.0
        size = prod(shape) * itemsize
        for kind, axes, fraction, back in self._price[key]:
            if not back:
                forward += self.pricer.collective_s(kind, axes, size * fraction)
            elif grad:
                backward += self.pricer.collective_s(kind, axes, size * fraction)
        return forward, backward

    def _even(self, shape: tuple[int, ...], layout: Layout) -> bool:
        return all(not axes or n % group(axes, self.sizes) == 0 for n, axes in zip(shape, layout.dims, strict=True))

    def _results(self, name: str) -> tuple[int, list[Layout]]:
        """Variable of the producer's class and the layout it leaves the tensor in, per split."""
        i = self.graph.producer[name]
        c = self.base.shared[i]
        k = [o for o in self.graph.nodes[i].outputs if o].index(name)
        v = self.op_of[c]
        return v, [self.base.rules[c].result(k, s, self.order) for s in self.variables[v].splits]

    def _needs(self, i: int, slot: int) -> tuple[int, list[Layout]]:
        c = self.base.shared[i]
        v = self.op_of[c]
        return v, [self.need(i, slot, s) for s in self.variables[v].splits]

    def _connect(self, name: str, uses: list[tuple[int, int]]) -> None:
        """Link the producer of a tensor (or its storage) with its readers, once per class of such tensors."""
        graph, shared = self.graph, self.base.shared
        weight, made = name in graph.weights, graph.producer.get(name)
        if weight and len(uses) == 1:
            return
        if made is None and not weight and len(uses) == 1:
            return  # an input arrives as its only reader wants it
        key = (shared[made] if made is not None else name, graph.nodes[made].outputs.index(name) if made is not None else 0,
               tuple((shared[i], slot) for i, slot in uses), name in self.base.grad)  # fmt: skip
        if key in self._connected:  # a later repeat of the same wiring
            hub, first, last = self._connected[key]
            if hub >= 0:
                self.variables[hub].count += 1
            for link in self.links[first:last]:
                link.count += 1
            return
        first = len(self.links)
        hub = -1
        if len(uses) == 1:
            a, sources = self._results(name)
            b, targets = self._needs(*uses[0])
            self._link(name, a, [(s, None) for s in sources], b, targets, 1)
        else:
            hub = self._hub(name, uses, made)
        self._connected[key] = (hub, first, len(self.links))

    def _hub(self, name: str, uses: list[tuple[int, int]], made: int | None) -> int:
        """A variable for the layout a shared tensor is brought to; options may hold a second layout made from the first."""
        weight = name in self.graph.weights
        per_use = [self._needs(i, slot) for i, slot in uses]
        wanted = dict.fromkeys(t for _, targets in per_use for t in targets)
        plain = dict.fromkeys(Layout(t.dims, t.partial) for t in wanted)
        options: dict[tuple[Layout, Layout | None], None] = {}
        for layout in (*plain, *wanted):
            options[layout, None] = None
        if not weight:
            for t in wanted:
                if t.fan:
                    options[Layout(t.dims, t.partial), t] = None
        v = Variable(f"{name}", "weight" if weight else "hub", 1, layouts=tuple(options))
        index = len(self.variables)
        self.variables.append(v)
        n = len(v.layouts)
        inner = [self.convert_s(name, h, b) if b is not None else (0.0, 0.0) for h, b in v.layouts]
        v.forward_s, v.backward_s = np.array([f for f, _ in inner]), np.array([b for _, b in inner])
        v.replay_s, v.kept_bytes = v.forward_s, np.zeros(n)
        for z in ZERO_LEVELS:
            cells = [self.weight_cost(name, h, z) for h, _ in v.layouts] if weight else [(0.0, 0.0, 0.0)] * n
            v.reduce_s[z], v.each_s[z], v.state_bytes[z] = (np.array(c) for c in zip(*cells, strict=True))
        if made is not None:
            a, sources = self._results(name)
            hubs = [h for h, _ in v.layouts]
            self._link(name, a, [(s, None) for s in sources], index, hubs, 1)
        for (b, targets), _ in zip(per_use, uses, strict=True):
            self._link(name, index, list(v.layouts), b, targets, 1)
        return index

    def _link(self, name: str, a: int, sources: list[tuple[Layout, Layout | None]], b: int, targets: list[Layout], count: int) -> None:
        """Add the table of conversions from each option of a to each option of b."""
        t = self.graph.tensors[name]
        key = (t.shape, t.dtype, name in self.base.grad, tuple(sources), tuple(targets))
        if key not in self._tables:
            rows, row_of = _unique(sources)
            columns, column_of = _unique(targets)
            forward, backward = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
            for r, (hub, branch) in enumerate(rows):
                for c, target in enumerate(columns):
                    if target not in (hub, branch):
                        forward[r, c], backward[r, c] = self.convert_s(name, hub, target)
            self._tables[key] = forward[np.ix_(row_of, column_of)], backward[np.ix_(row_of, column_of)]
        forward, backward = self._tables[key]
        if a == b:
            self.variables[a].forward_s = self.variables[a].forward_s + np.diag(forward)
            self.variables[a].backward_s = self.variables[a].backward_s + np.diag(backward)
        else:
            self.links.append(Link(a, b, forward, backward, count))

    def _outputs(self) -> None:
        """Graph outputs are handed out without anything pending."""
        for name in self.graph.outputs:
            if name in self.graph.producer:
                v, sources = self._results(name)
                cost = np.array([self.convert_s(name, s, s.stored) for s in sources])
                self.variables[v].forward_s = self.variables[v].forward_s + cost[:, 0] / self.variables[v].count


def _unique(items: Sequence) -> tuple[list, np.ndarray]:
    index: dict = {}
    of = np.array([index.setdefault(x, len(index)) for x in items])
    return list(index), of


def build_space(base: Base, pricer: Pricer, *, limits: Limits = Limits(), allowed: Mapping[int, tuple[Split, ...]] | None = None,  # noqa: B008
                zero_axes: Axes = ()) -> Space:  # fmt: skip
    """The space of one mesh. `allowed` restricts nodes (by class) to given splits: pins."""
    return _Builder(base, pricer, limits, allowed or {}, zero_axes).build()
