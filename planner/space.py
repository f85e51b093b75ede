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
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.base import Base as Base
from planner.base import Wire
from planner.emit.replay import reads
from planner.flow import Plan, cut_layout, own_level, weight_plan
from planner.kernels import inner_times, kept_beside, times_of, working_bytes
from planner.layout import Axes, Layout, group, local_shape
from planner.moments import left_bytes, puts_off
from planner.rule import Limits, Rule, Split, candidates

if TYPE_CHECKING:
    from planner.parked import parks, tables, to_reduce, ways
from planner.parked import parks, tables, to_reduce, ways
from planner.price import Pricer

ZERO_LEVELS = (0, 1, 2, 3)
NONE = (0, 0, 0, 0)
NO_WEIGHT = np.zeros((len(ZERO_LEVELS), 7))


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
    spared_s: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of the forward pass, not run again where results of collectives are kept
    reduce_s: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> seconds once per optimizer step
    each_s: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> seconds per microbatch
    sum_s: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> seconds per microbatch, of several, to add up gradients
    state_bytes: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> parameters + gradients + optimizer
    kept_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # activations the backward pass reads, of all its nodes
    again_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # the same when repeated blocks are recomputed
    collected_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # what such blocks keep beside it at least, where they keep results of collectives
    inner_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # what of that is made in one repeat and alive while its backward pass runs
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(0))  # into how many the graph's batch may be cut on and leave a row for every device of the split
    work_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # what lives only while one of its nodes runs
    held_bytes: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> sums of gradients that microbatches add up
    tail_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # activations kept by nodes after the repeated blocks
    late_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # gradients of one node of a repeated block: not there before its backward pass
    moment_bytes: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))  # [options, 4] as in planner.moments: kept inputs of the graph, kept results, made, waits
    room_bytes: dict[int, np.ndarray] = field(default_factory=dict)  # zero level -> [options, 2] the whole gradient of its weights, and the piece left of it
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
    parts: int = 1
    """Microbatches of the batch, one of which the base's graph is."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What planner.assemble derives once per space."""


@dataclass(frozen=True)
class _Kind:
    """What nodes of one kind share: the priced variable, and the layout numbers of operands and results under each of its splits."""

    variable: Variable
    needs: list[list[int]]
    results: list[list[int]]


class _Builder:
    """Builds a Space. Layouts are numbers of the pricer's atlas; nodes of one kind (`Base.kinds`) are priced once."""

    def __init__(self, base: Base, pricer: Pricer, limits: Limits, allowed: Mapping[int, tuple[Split, ...]], zero_axes: Axes, parts: int) -> None:
        self.parts = parts
        self.base, self.pricer, self.limits, self.allowed = base, pricer, limits, allowed
        self.graph, self.sizes = base.graph, dict(pricer.sizes)
        self.mesh = tuple(self.sizes.items())
        self.order = tuple(self.sizes)
        self.zero_axes, self._sharded = zero_axes, Plan(self.mesh, {}, 1, zero_axes)
        self.atlas, self.tables = pricer.atlas, pricer.conversions
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.op_of: dict[int, int] = {}
        self._kinds: dict[tuple, _Kind] = {}
        self._kind_of: dict[int, _Kind] = {}
        self._linked: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def build(self) -> Space:
        for i in self.base.times:
            self._op(i)
        for wire in self.base.wires:
            self._connect(wire)
        self._outputs()
        return Space(self.base, self.pricer, self.variables, self.links, self.op_of, self.parts)

    def _op(self, i: int) -> None:
        base, allowed = self.base, self.allowed.get(i)
        key = (base.kinds[i], allowed)
        if key not in self._kinds:
            self._kinds[key] = self._kind(i, allowed)
        kind = self._kind_of[i] = self._kinds[key]
        times = base.times[i]
        self.op_of[i] = len(self.variables)
        self.variables.append(replace(kind.variable, name=self.graph.nodes[i].id, count=times, node=i, flops=base.rules[i].flops * times))

    def _kind(self, i: int, allowed: tuple[Split, ...] | None) -> _Kind:
        """The splits of a node and all that is priced of it alone."""
        graph, base, rule, node = self.graph, self.base, self.base.rules[i], self.graph.nodes[i]
        splits = allowed or base.reachable(i, self._candidates(rule))
        needs = [self._read(rule, slot, splits, name in base.grad) if name else [] for slot, name in enumerate(node.inputs)]
        results = [self._read(rule, -1 - k, splits, True) for k in range(len([o for o in node.outputs if o]))]
        live = [o for o in node.outputs if o]
        nothing = np.zeros(len(splits))
        slack = 1 + self.pricer.runtime.memory_slack
        ins = [self._sizes(name, row) if name else nothing for name, row in zip(node.inputs, needs, strict=True)]
        outs = [self._sizes(name, row) for name, row in zip(live, results, strict=True)]
        read, made, weights = (sum(rows, nothing) for rows in (ins, outs, [x for name, x in zip(node.inputs, ins, strict=True) if name in graph.weights]))
        times = [(*times_of(base, i, split, r, m, self.pricer), *inner_times(base, i, split, self.pricer))
                 for split, r, m in zip(splits, read.tolist(), made.tolist(), strict=True)]  # fmt: skip
        f, b, inner_f, inner_b, spared = np.array(times).reshape(-1, 5).T.copy()
        forward, backward = f + inner_f, b + np.where(b, inner_b, 0.0)
        if results:  # what is read of partial results is their sum over devices, which is kept: nothing asks for the terms again
            spared = np.where([all(self.atlas.layouts[n].partial for n in row) for row in zip(*results, strict=True)], forward, spared)
        stays = "activations" not in self.pricer.offload
        kept, again, inner, tail, given = nothing, nothing, nothing, nothing, nothing
        for slot, size in (*enumerate(ins), *((-1 - o, n) for o, n in enumerate(outs))):
            total, entering, first, after = base.kept.get((i, slot), NONE)
            if total or after:
                size = (size + np.array([kept_beside(base, i, slot, split, self.pricer) for split in splits]) if slot == 0 else size) * slack
                kept, again, inner, tail = kept + total * size, again + (first + entering * stays) * size, inner + first * size, tail + after * size
                given = given + total * size if slot >= 0 and node.inputs[slot] in graph.inputs else given
        work = slack * np.array([working_bytes(base, i, split, r - w, m, w, self.pricer)
                                 for split, r, m, w in zip(splits, read.tolist(), made.tolist(), weights.tolist(), strict=True)])  # fmt: skip
        backwards = reads(node, base.grad).slots
        own = [(name, needs[slot], slot in backwards) for slot, name in enumerate(node.inputs) if name in base.own]
        cells = np.zeros((len(splits), *NO_WEIGHT.shape))
        late = nothing
        for name, row, twice in own:
            layouts, of = _unique(row)
            cells = cells + np.array([self.weight_costs(name, n, twice) for n in layouts])[of]
            if i in base.repeated and name in base.grad and not self._waits(name):
                late = late + np.array(self._local(graph.tensors[name].shape, layouts), np.float64)[of] * self.pricer.recipe.gradient_bytes
        reduce, each, sums, state, held = _by_level(cells)
        made_grad = sum((x for name, x in zip(live, outs, strict=True) if name in base.grad), nothing)
        pending = np.array([bool(self.atlas.layouts[n].partial) for n in results[0]]) if results else nothing
        collected = pending * (slack * base.collected_bytes(i, self.pricer.itemsize) / prod(self.sizes.values()))
        moment = np.stack([given, kept - given, made_grad * slack, (read - weights + made) * slack if puts_off(base, i) else nothing], 1)
        v = Variable("", "op", 0, i, splits, (), forward, backward, spared, reduce, each, sums, state, kept, again, collected, inner,
                     np.array([self._pieces(rule, s, base.batch_factors[i]) for s in splits]), work, held, tail, late, moment, _room(cells))
        return _Kind(v, needs, results)

    def _pieces(self, rule: Rule, split: Split, batch: str) -> float:
        """Into how many pieces what the graph is of may be cut with at least one row of the batch for each device that the split gives some."""
        axes = rule.axes(batch, split) if batch else ()
        return rule.sizes[batch] / group(axes, self.sizes) if axes else np.inf

    def _candidates(self, rule: Rule) -> tuple[Split, ...]:
        key = ("candidates", rule.operands, rule.results, tuple(rule.sizes.items()), rule.whole, rule.linear, rule.no_pad,
               tuple(rule.paired.items()), tuple(rule.most.items()), rule.spatial, self.limits)
        memo = self.pricer.memo
        if key not in memo:
            memo[key] = candidates(rule, self.sizes, self.limits)
        found: tuple[Split, ...] = memo[key]
        return found

    def _read(self, rule: Rule, slot: int, splits: tuple[Split, ...], grad: bool) -> list[int]:
        """Layouts of an operand (or, for slot -1 - k, of result k) under each split; without a gradient a fan is plain replication."""
        pairs = tuple(rule.paired.items())
        if slot >= 0:
            memo = self.atlas.memo.setdefault((rule.operands[slot], slot in rule.linear, pairs, self.order), {})
        else:
            memo = self.atlas.memo.setdefault((rule.results[-1 - slot], tuple(x.factor for x in rule.inner), pairs, self.order, "result"), {})
        found = []
        for s in splits:
            n = memo.get(s)
            if n is None:
                n = memo[s] = self.atlas.number(rule.operand(slot, s, self.order) if slot >= 0 else rule.result(-1 - slot, s, self.order))
            found.append(n if grad else self.atlas.plain(n))
        return found

    def _local(self, shape: tuple[int, ...], layouts: Sequence[int]) -> list[int]:
        """Elements of one device's piece in each layout."""
        memo = self.pricer.memo.setdefault(("local", shape), {})
        for layout in layouts:
            if layout not in memo:
                memo[layout] = prod(local_shape(shape, self.atlas.layouts[layout], self.sizes))
        return [memo[layout] for layout in layouts]

    def _sizes(self, name: str, layouts: list[int]) -> np.ndarray:
        """Bytes of one device's piece in each layout."""
        t = self.graph.tensors[name]
        each, of = _unique(layouts)
        if self.pricer.topology.device.tile and t.shape in self.base.images:
            return np.array([self.pricer.stored_bytes(local_shape(t.shape, self.atlas.layouts[n], self.sizes), t.dtype, True) for n in each])[of]
        return (np.array(self._local(t.shape, each)) * self.pricer.itemsize(t.dtype))[of]

    def weight_costs(self, name: str, layout: int, twice: bool) -> np.ndarray:
        """[levels, 7]: seconds once a step, seconds each microbatch, seconds each to add up gradients of several, state bytes, bytes of the sum over microbatches, of the
        whole gradient and of the piece left of it, of one weight needed in a layout, per optimizer level. State has a gradient where there is a loop over
        blocks (planner.evaluate).

        twice: the backward pass reads the weight too, so that level 3 gathers it again.
        """
        t, memo = self.graph.tensors[name], self.pricer.memo
        stacked = self._stacked(name)
        key = ("weight", t.shape, t.dtype, layout, name in self.base.grad, self.zero_axes, twice, self.base.written_out, stacked,
               self._waits(name))  # fmt: skip
        if key not in memo:
            memo[key] = self._weight_costs(name, layout, twice, stacked)
        found: np.ndarray = memo[key]
        return found

    def _waits(self, name: str) -> bool:
        """Whether a weight waits in the host's memory."""
        if name not in self.base.own or not parks(self.graph, name):
            return False
        inside = self.graph.consumers[name][0][0] in self.base.repeated
        return "parameters" in self.pricer.offload if inside else "embeddings" in self.pricer.offload and name in tables(self.graph)

    def _stacked(self, name: str) -> int:
        """Of how many repeats a device has a weight in one array: with stages those it holds (interleaved ones scatter fewer at once under level 2)."""
        first, repeats = self.base.stacks.get(name, (-1, 1))
        dealt = self.base.dealt
        return -(-repeats // self.pricer.mesh.stages) if dealt is not None and dealt[0][0] == first else repeats

    def _weight_costs(self, name: str, layout: int, twice: bool, stacked: int) -> np.ndarray:
        recipe, price, t, need = self.pricer.recipe, self.pricer, self.graph.tensors[name], self.atlas.layouts[layout]
        local = float(self._local(t.shape, (layout,))[0])
        if name not in self.base.grad:
            held = local * (recipe.parameter_bytes if t.is_float else self.pricer.itemsize(t.dtype))
            row = (0.0, price.host_s(2 * held), 0.0, 0.0, 0.0, 0.0, 0.0) if self._waits(name) else (0.0, 0.0, 0.0, held, 0.0, 0.0, 0.0)
            return np.array([row] * len(ZERO_LEVELS))
        plan = weight_plan(self.graph, name, [need], self._sharded, True)
        cut = group(plan.axes, self.sizes) if plan.zero and plan.dim >= 0 else 1
        piece = float(prod(local_shape(t.shape, cut_layout(plan), self.sizes)))  # padded where the group does not divide the dim
        written = self.base.written_out
        shown = 1 - price.runtime.overlap  # of the gradients' reduction: the rest hides under the backward pass
        resident = 0.0 if "optimizer" in price.offload else recipe.state_bytes  # what passes through the device while it is used is counted with the whole plan
        levels = [own_level(zero, t.shape) if cut > 1 and zero else 0 for zero in ZERO_LEVELS]
        rows = {}
        for level in dict.fromkeys(levels):
            rest = tuple(a for a in need.fan if not level or a not in plan.axes)
            own, whole = (piece, piece * cut) if level else (local, local)
            state = (own if level == 3 else local) * (recipe.parameter_bytes + (0.0 if written else recipe.gradient_bytes)) + own * resident
            full = whole * recipe.reduction_bytes
            late = level < 3  # outside blocks, where collectives travel in buckets
            scatter = shown * price.collective_s("reduce-scatter", plan.axes, full, bucketed=late, stacked=stacked) if level else 0.0
            collect = price.collective_s("all-gather", plan.axes, whole * recipe.parameter_bytes, bucketed=late, stacked=stacked) if level else 0.0
            step = shown * price.collective_s("all-reduce", rest, own * recipe.reduction_bytes, bucketed=True, stacked=stacked) + price.optimizer_s(own, price.offload)
            once = step + (scatter if level == 1 else 0.0) + (collect if level in (1, 2) else 0.0)
            added = (own if level >= 2 else local) * recipe.gradient_bytes
            each = (scatter if level >= 2 else 0.0) + ((1 + twice) * collect if level == 3 else 0.0)
            rows[level] = (once, each, price.sum_s(added), state, 0.0 if level == 3 and not written else added,
                           local * recipe.gradient_bytes, own * left_bytes(recipe, level))  # fmt: skip
            if self._waits(name):  # what is on its way is counted with the whole plan
                moved, (once, each, sums, *_) = ways(own if level == 3 else local, local, own, level, to_reduce(plan, level), recipe), rows[level]
                rows[level] = (once + price.host_s(moved.once), each + price.host_s(moved.each), sums + price.host_s(moved.added), own * resident, 0.0, 0.0, 0.0)
        return np.array([rows[level] for level in levels])

    def _connect(self, wire: Wire) -> None:
        """Link the producer of a tensor (or its storage) with its readers; the tables serve all tensors of the wire."""
        (reader, slot, times), *others = wire.uses
        if times == 1 and not others:
            made = wire.made
            assert made is not None
            sources, targets = self._kind_of[made[0]].results[made[1]], self._kind_of[reader].needs[slot]
            self._link(wire, self.op_of[made[0]], [(s, -1) for s in sources], self.op_of[reader], targets, 1)
        else:
            self._hub(wire)

    def _hub(self, wire: Wire) -> None:
        """A variable for the layout a shared tensor is brought to; options may hold a second layout made from the first."""
        name, graph, atlas = wire.name, self.graph, self.atlas
        weight, t = name in graph.weights, graph.tensors[name]
        per_use = [(self.op_of[i], self._kind_of[i].needs[slot], times) for i, slot, times in wire.uses]
        wanted = dict.fromkeys(n for _, targets, _ in per_use for n in targets)
        plain = dict.fromkeys(atlas.plain(n) for n in wanted)
        options = dict.fromkeys((n, -1) for n in (*plain, *wanted))
        if not weight:
            options.update(dict.fromkeys((atlas.plain(n), n) for n in wanted if atlas.layouts[n].fan))
        pairs = tuple(options)
        v = Variable(name, "weight" if weight else "hub", wire.count,
                     layouts=tuple((atlas.layouts[h], atlas.layouts[b] if b >= 0 else None) for h, b in pairs))  # fmt: skip
        # A branch costs its conversion from the hub; without one the diagonal, from the hub to itself, costs nothing.
        inner = self.tables.table(t.shape, self.pricer.itemsize(t.dtype), [h for h, _ in pairs], [h if b < 0 else b for h, b in pairs],
                                  name in self.base.grad)  # fmt: skip
        v.forward_s, v.backward_s = np.diag(inner[0]) * self._each(name), np.diag(inner[1]).copy()
        v.spared_s = v.forward_s
        v.kept_bytes, v.again_bytes, v.collected_bytes, v.inner_bytes, v.work_bytes, v.tail_bytes, v.late_bytes = np.zeros((7, len(pairs)))
        v.pieces = np.full(len(pairs), np.inf)
        twice = any(slot in reads(graph.nodes[i], self.base.grad).slots for i, slot, _ in wire.uses)
        cells = np.array([self.weight_costs(name, h, twice) for h, _ in pairs]) if weight else np.zeros((len(pairs), *NO_WEIGHT.shape))
        v.reduce_s, v.each_s, v.sum_s, v.state_bytes, v.held_bytes = _by_level(cells)
        v.moment_bytes, v.room_bytes = np.zeros((len(pairs), 4)), _room(cells)
        index = len(self.variables)
        self.variables.append(v)
        if wire.made is not None:
            sources = self._kind_of[wire.made[0]].results[wire.made[1]]
            self._link(wire, self.op_of[wire.made[0]], [(s, -1) for s in sources], index, [h for h, _ in pairs], 1)
        for b, targets, times in per_use:
            self._link(wire, index, pairs, b, targets, times)

    def _link(self, wire: Wire, a: int, sources: Sequence[tuple[int, int]], b: int, targets: Sequence[int], times: int) -> None:
        """Add the table of conversions from each option of a (a layout, and a branch already made from it) to each option of b, so many of which read each tensor."""
        t, grad = self.graph.tensors[wire.name], wire.name in self.base.grad
        each = self._each(wire.name)
        key = (t.shape, t.dtype, grad, each, tuple(sources), tuple(targets))
        if key not in self._linked:
            hubs, hub_of = _unique([h for h, _ in sources])
            columns, column_of = _unique(targets)
            place = np.ix_(hub_of, column_of)
            forward, backward = (part[place] for part in self.tables.table(t.shape, self.pricer.itemsize(t.dtype), hubs, columns, grad))
            ready = np.array([branch for _, branch in sources])[:, None] == np.array(targets)[None, :]
            forward[ready] = 0.0
            backward[ready] = 0.0
            forward *= each
            self._linked[key] = forward, backward
        forward, backward = self._linked[key]
        if a == b:
            share = wire.count / self.variables[a].count  # one fewer than there are repeats
            self.variables[a].forward_s = self.variables[a].forward_s + share * np.diag(forward)
            self.variables[a].backward_s = self.variables[a].backward_s + share * np.diag(backward)
        else:
            self.links.append(Link(a, b, forward, backward, wire.count * times))

    def _each(self, name: str) -> float:
        """What part of its forward conversions a tensor needs in every microbatch: all, or its share of one where microbatches do not differ in it."""
        return 1 / self.parts if name in self.base.still else 1.0

    def _outputs(self) -> None:
        """Graph outputs are handed out without anything pending."""
        graph, atlas = self.graph, self.atlas
        for name in graph.outputs:
            made = graph.producer.get(name)
            if made is None:
                continue
            c, k = self.base.shared[made], [o for o in graph.nodes[made].outputs if o].index(name)
            sources = self._kind_of[c].results[k]
            rows, row_of = _unique(sources)
            columns, column_of = _unique([atlas.number(atlas.layouts[s].stored) for s in sources])
            t = graph.tensors[name]
            forward, _ = self.tables.table(t.shape, self.pricer.itemsize(t.dtype), rows, columns, name in self.base.grad)
            v = self.variables[self.op_of[c]]
            v.forward_s = v.forward_s + forward[row_of, column_of] / v.count


def _by_level(cells: np.ndarray) -> tuple[dict[int, np.ndarray], ...]:
    """[options, levels, 7] -> reduction once, reduction each microbatch, sums each microbatch, state bytes and bytes of sums: level -> [options]."""
    parts = np.ascontiguousarray(cells[:, :, :5].transpose(2, 1, 0))
    return tuple({z: part[z] for z in ZERO_LEVELS} for part in parts)


def _room(cells: np.ndarray) -> dict[int, np.ndarray]:
    """[options, levels, 7] -> level -> [options, 2]."""
    parts = np.ascontiguousarray(cells[:, :, 5:].transpose(1, 0, 2))
    return {z: parts[z] for z in ZERO_LEVELS}


def _unique(items: Sequence) -> tuple[list, np.ndarray]:
    index: dict = {}
    of = np.array([index.setdefault(x, len(index)) for x in items])
    return list(index), of


def build_space(base: Base, pricer: Pricer, *, limits: Limits = Limits(), allowed: Mapping[int, tuple[Split, ...]] | None = None,  # noqa: B008
                zero_axes: Axes = (), parts: int = 1) -> Space:  # fmt: skip
    """The space of one mesh. `allowed` restricts nodes (by class) to given splits: pins. parts: microbatches, one of which the base's graph is."""
    return _Builder(base, pricer, limits, allowed or {}, zero_axes, parts).build()
