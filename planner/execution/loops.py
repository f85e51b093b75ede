"""Repeated blocks as one function: what a block takes, carries on and hands over, checked against
every repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from planner.errors import PlanError
from planner.execution.engine import Engine, engine_of
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline
from planner.execution.techniques import WRITTEN_OUT
from planner.graph.ir import Graph
from planner.graph.repeats import passed_through
from planner.sharding.layout import Layout, ReshardTree, tree_over


@dataclass(frozen=True)
class Carry:
    """A tensor handed from repeat to repeat: `enters` the first, `leaves[r]` repeat r; `layout` is
    the one it travels in."""

    enters: str
    leaves: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class RepeatedBlock:
    """Nodes [first, first + period) repeated. weights: per slot the tensor of each repeat; shared:
    tensors every repeat reads; yields: results that every repeat hands out of the program (a
    layer's new keys), the tensors of all repeats each."""

    first: int
    period: int
    repeats: int
    carries: tuple[Carry, ...]
    weights: tuple[tuple[str, ...], ...]
    shared: tuple[str, ...]
    yields: tuple[tuple[str, ...], ...] = ()

    @property
    def end(self) -> int:
        """Index after the last node of the last repeat."""
        return self.first + self.period * self.repeats


@dataclass(frozen=True)
class _Wiring:
    """How repeats are put together, whatever their splits.

    weights: as in `RepeatedBlock`, with a node that reads each. enters: (node of the block, which
    of its results) -> what takes its place in the first repeat. leaves: the tensors of all repeats
    of each of those results.
    """

    weights: Mapping[tuple[str, ...], str]
    shared: tuple[str, ...]
    enters: Mapping[tuple[int, int], str]
    leaves: tuple[tuple[str, ...], ...]
    yields: tuple[tuple[str, ...], ...]


def repeated_blocks(flow: Flow) -> tuple[tuple[RepeatedBlock, ...], list[str]]:
    """The repeated blocks that become one function, and why the others do not; none in uneven
    pipeline stages."""
    blocks: list[RepeatedBlock] = []
    reasons: list[str] = []
    uneven = engine_of(flow.plan) is Engine.UNEVEN
    for first, period, repeats in flow.plan.repeated_blocks if not uneven else ():
        block = find_repeated_block(flow, first, period, repeats)
        if isinstance(block, str):
            reasons.append(block)
        else:
            blocks.append(block)
    return tuple(blocks), reasons


def looped_blocks(flow: Flow) -> tuple[RepeatedBlock, ...]:
    """The repeated blocks that a program loops over: none where the plan has them written out."""
    return () if flow.plan.blocks == WRITTEN_OUT else repeated_blocks(flow)[0]


def gradients_at_once(flow: Flow, block: RepeatedBlock) -> bool:
    """Whether a program whose blocks are written out makes all gradients of a repeat before the
    repeat below goes on. Compilers would put off those of all repeats' weights until what they are
    made of is there together, as nothing asks for them before the end (benchmarks/RESULTS.md,
    "Gradients of one microbatch" and "Microbatches written out"). In sums over microbatches they do
    so in encoders; products of decoders add up their gradients in their own kernels, which would be
    parted. Weights that are not trained would get gradients, too."""
    plan, nodes = flow.plan, flow.graph.nodes[block.first : block.first + block.period]
    trained = all(name in flow.grad for names in block.weights for name in names)
    if not trained or plan.overlapped_microbatches > 1:
        return False
    return plan.accumulation_steps == 1 or not any(node.attrs.get("causal") for node in nodes)


def find_repeated_block(flow: Flow, first: int, period: int, repeats: int) -> RepeatedBlock | str:
    """The repeated block, or the reason why these repeats cannot share one function under this
    flow."""
    graph, nodes = flow.graph, flow.graph.nodes
    for j in range(first, first + period):
        split = flow.split(j)
        for i in range(j, first + period * repeats, period):
            if flow.split(i) is not split and flow.split(i) != split:
                return f"{nodes[i].id} is split otherwise than its first repeat"
    wiring = _wired(graph, first, period, repeats)
    if isinstance(wiring, str):
        return wiring
    for names, reader in wiring.weights.items():
        plans = {
            id(plan): plan for plan in map(flow.weights.__getitem__, names)
        }.values()  # most often one object
        if len(set(plans)) > 1 or len({n in flow.grad for n in names}) > 1:
            return f"weights of {reader} are kept differently in its repeats"
    carries = []
    for name, leaves in zip(wiring.enters.values(), wiring.leaves, strict=True):
        shared = flow.trees[leaves[0]].shared_layout
        if (
            shared.partial
            or graph.tensors[name].shape != graph.tensors[leaves[0]].shape
            or (name in flow.grad) != (leaves[0] in flow.grad)
        ):
            return f"{name} cannot be carried from block to block"
        carries.append(Carry(name, leaves, shared))
    return RepeatedBlock(
        first=first,
        period=period,
        repeats=repeats,
        carries=tuple(carries),
        weights=tuple(wiring.weights),
        shared=wiring.shared,
        yields=wiring.yields,
    )


def stacked_weights(
    graph: Graph, blocks: Iterable[tuple[int, int, int]]
) -> dict[str, tuple[int, int]]:
    """Weights of repeated blocks -> (first node of the first repeat, in how many repeats there is
    one): those of all repeats lie in one array."""
    stacked = {}
    for block in blocks:
        wiring = _wired(graph, *block)
        stacked.update(
            {
                n: (block[0], block[2])
                for names in (wiring.weights if isinstance(wiring, _Wiring) else ())
                for n in names
            }
        )
    return stacked


def shares_of_blocks(graph: Graph, blocks: tuple[tuple[int, int, int], ...]) -> Mapping[str, float]:
    """Weights of repeated blocks -> their part of the elements of one repeat's. Worked out once a
    graph."""
    key = "shares of blocks", blocks
    if key not in graph.memo:
        stacked, totals = stacked_weights(graph, blocks), dict[int, float]()
        for name, (first, repeats) in stacked.items():
            totals[first] = totals.get(first, 0.0) + graph.tensors[name].elements / repeats
        graph.memo[key] = {
            name: graph.tensors[name].elements / totals[first]
            for name, (first, _) in stacked.items()
        }
    known: Mapping[str, float] = graph.memo[key]
    return known


def loopable_blocks(
    graph: Graph, blocks: Iterable[tuple[int, int, int]]
) -> tuple[tuple[int, int, int], ...]:
    """The blocks whose repeats are put together alike, so that one function may serve them."""
    return tuple(block for block in blocks if isinstance(_wired(graph, *block), _Wiring))


def carried_tensors(graph: Graph, blocks: Iterable[tuple[int, int, int]]) -> frozenset[str]:
    """What first repeats hand on to second ones."""
    return frozenset(
        leaves[0]
        for block in blocks
        if isinstance(wiring := _wired(graph, *block), _Wiring)
        for leaves in wiring.leaves
    )


def _wired(graph: Graph, first: int, period: int, repeats: int) -> _Wiring | str:
    """The wiring of repeats, worked out once a graph."""
    key = "wiring", first, period, repeats
    if key not in graph.memo:
        graph.memo[key] = _wiring(graph, first, period, repeats)
    known: _Wiring | str = graph.memo[key]
    return known


def _wiring(graph: Graph, first: int, period: int, repeats: int) -> _Wiring | str:
    """The wiring, or why repeats are put together differently."""
    block = _Repeats(graph, first, period, repeats)
    why = block.read_operands() or block.entering_twice() or block.stacked_elsewhere()
    if why:
        return why
    rows = block.results()
    leaves = tuple(rows[graph.nodes[first + j].outputs[k]] for j, k in block.enters)
    first_leaves = {row[0] for row in leaves}
    yields = tuple(
        rows[o]
        for o in graph.outputs
        if o in rows and o not in first_leaves and set(rows[o]) <= set(graph.outputs)
    )
    why = block.leaving_elsewhere({row[-1] for row in leaves}, yields)
    return why or _Wiring(block.weights, tuple(block.shared), block.enters, leaves, yields)


class _Repeats:
    """Repeats of a block, whose wiring is looked up. Methods that return text say what keeps the
    repeats from being put together alike, "" where nothing does."""

    def __init__(self, graph: Graph, first: int, period: int, repeats: int) -> None:
        self.graph, self.first, self.period, self.repeats = graph, first, period, repeats
        self.end = first + period * repeats
        self.made = {
            o: (i - first, k)
            for i in range(first, self.end)
            for k, o in enumerate(graph.nodes[i].outputs)
            if o
        }
        """Result -> (node, counted from the first of the block; which of its results)."""
        self.weights: dict[tuple[str, ...], str] = {}
        self.shared: dict[str, None] = {}
        self.enters: dict[tuple[int, int], str] = {}

    def read_operands(self) -> str:
        """Sort what the block's nodes read into weights, what all repeats share, and what
        enters."""
        for i in range(self.first, self.first + self.period):
            alike = self.graph.nodes[i : self.end : self.period]
            if other := next((node for node in alike if node.op != alike[0].op), None):
                return f"{other.id} is split otherwise than its first repeat"
            for slot, name in enumerate(alike[0].inputs):
                names = tuple([node.inputs[slot] for node in alike])
                if name and (why := self._read(alike[0].id, names)):
                    return why
        return ""

    def _read(self, reader: str, names: tuple[str, ...]) -> str:
        """Sort in one operand, by its name in every repeat."""
        name = names[0]
        if self.repeats == 1:
            return self._read_once(reader, name)
        if len(set(names)) == 1:
            if name in self.made:  # one repeat's value cannot be an argument of them all
                return f"{name} is made in one repeat and read by others"
            self.shared[name] = None
            return ""
        if name in self.graph.constants:  # repeats match, so the others hold the same values
            self.shared[name] = None
            return ""
        if name in self.graph.weights and self.graph.weights.keys() >= set(names):
            if len(set(names)) < self.repeats:
                return f"weights of {reader} are kept differently in its repeats"
            self.weights[names] = reader
            return ""
        makers = [self.made.get(n) for n in names]
        elsewhere = f"{reader} reads another place in a later repeat"
        if name in self.made:  # inside the block
            return "" if makers == self._in_repeats(self.made[name], self.repeats) else elsewhere
        entering = makers[1]
        if entering is None or None in makers[1:]:
            return f"{reader} reads different outside values in its repeats"
        if makers[1:] != self._in_repeats(entering, self.repeats - 1):
            return elsewhere
        return "" if self.enters.setdefault(entering, name) == name else elsewhere

    def _read_once(self, reader: str, name: str) -> str:
        """Sort in an operand of a block that is there once."""
        graph = self.graph
        if name in graph.weights and name not in graph.constants:
            self.weights[name,] = reader
        elif name not in self.made:
            through = passed_through(graph, self.first, self.end)
            if through and name == through[0]:
                self.enters[self.made[through[1]]] = name
            else:
                self.shared[name] = None
        return ""

    def entering_twice(self) -> str:
        """A tensor that a repeat hands on to the next, which all repeats read too, or that enters
        in two places: in the block's function it would have one name for both."""
        names = list(self.enters.values())
        twice = next((n for n in names if n in self.shared or names.count(n) > 1), "")
        return f"{twice} enters the first repeat in more than one place" if twice else ""

    def _in_repeats(self, place: tuple[int, int], repeats: int) -> list[tuple[int, int]]:
        """A result's places in so many repeats."""
        node, k = place
        return [(node + r * self.period, k) for r in range(repeats)]

    def stacked_elsewhere(self) -> str:
        """Weights that are read outside their place in the block too."""
        for n, times in Counter(chain.from_iterable(self.weights)).items():
            readers = self.graph.consumers[n]  # in node order
            outside = readers[0][0] < self.first or readers[-1][0] >= self.end
            if times > 1 or n in self.shared or outside:
                label = self.graph.labels.get(n, n)
                return f"{label} is also used elsewhere, so it cannot be stacked"
        return ""

    def results(self) -> dict[str, tuple[str, ...]]:
        """Results of the first repeat -> the same of all repeats."""
        nodes = self.graph.nodes
        return {
            o: tuple(node.outputs[k] for node in nodes[self.first + j : self.end : self.period])
            for o, (j, k) in self.made.items()
            if j < self.period
        }

    def leaving_elsewhere(self, last: set[str], yields: Iterable[tuple[str, ...]]) -> str:
        """Results that are read behind the blocks, or returned, but are none of the last repeat's
        carried ones and not yielded."""
        returned = set(self.graph.outputs) - {*last, *chain.from_iterable(yields)}
        for o in self.made:
            readers = self.graph.consumers.get(o, ())  # in node order
            if o not in last and (o in returned or (readers and readers[-1][0] >= self.end)):
                return f"{o} leaves the middle of a repeated block"
        return ""


def tensors_per_microbatch(flow: Flow, blocks: Iterable[RepeatedBlock]) -> frozenset[str]:
    """Tensors of which every overlapped microbatch has its own: what depends on an input of the
    graph, or is handed from block to block. They share all else."""
    carried = (c.enters for block in blocks for c in block.carries)
    return frozenset(flow.graph.reached((*flow.graph.inputs, *carried)))


def passes_of(flow: Flow, blocks: Iterable[RepeatedBlock]) -> Callable[[str], int]:
    """How often an optimizer step computes a tensor (or brings it to another layout), apart from
    repeats of blocks: for each microbatch, or where overlapped microbatches share it in each
    iteration of the loop over them. Without pipeline stages."""
    plan = flow.plan
    if plan.overlapped_microbatches == 1:
        times = plan.device_microbatches if flow.training else 1
        return lambda name: times
    apart = tensors_per_microbatch(flow, blocks)
    return lambda name: plan.microbatches if name in apart else plan.accumulation_steps


def output_layout(layout: Layout) -> Layout:
    """The layout in which a graph's output leaves the program: nothing is left pending."""
    return layout.stored if layout.partial else layout


def pipelined_block(
    flow: Flow, blocks: Iterable[RepeatedBlock], pipeline: Pipeline, reasons: Iterable[str] = ()
) -> RepeatedBlock:
    """The block whose repeats are assigned to stages. Raises PlanError P068 where they cannot
    be."""
    block = next((r for r in blocks if r.first == pipeline.first), None)
    why = "; ".join(reasons) or "its repeated blocks are not split alike"
    if block is not None:
        loose = [c.enters for c in block.carries if c.enters not in flow.grad]
        why = (
            f"{loose[0]} is handed from block to block without a gradient"
            if loose
            else ""
            if block.carries
            else "its blocks hand on nothing"
        )
    if block is None or why:
        raise PlanError("P068", f"this plan has no pipeline: {why}", help=["plan without stages"])
    return block


def inner_flow(flow: Flow, block: RepeatedBlock) -> Flow:
    """The flow inside the block: carried tensors arrive in their travelling layout."""
    source, trees = dict(flow.source), dict(flow.trees)
    inside = range(block.first, block.first + block.period)
    for carry in block.carries:
        source[carry.enters] = carry.layout
        trees[carry.enters] = _tree(
            flow, carry.enters, carry.layout, _needs(flow, carry.enters, inside)
        )
        leaving = carry.leaves[0]
        trees[leaving] = _tree_over(
            flow, leaving, flow.source[leaving], carry.layout, _needs(flow, leaving, inside)
        )
    return replace(flow, source=source, trees=trees)


def outer_flow(flow: Flow, block: RepeatedBlock) -> Flow:
    """The flow around the block: what enters is brought to its travelling layout, and what the last
    repeat hands over is in it."""
    source, trees = dict(flow.source), dict(flow.trees)
    before, after = range(block.first), range(block.end, len(flow.graph.nodes))
    for carry in block.carries:
        last, first = carry.leaves[-1], carry.enters
        source[last] = carry.layout
        trees[last] = _tree(
            flow,
            last,
            carry.layout,
            [
                *_needs(flow, last, after),
                *([flow.source[last].stored] if last in flow.graph.outputs else []),
            ],
        )
        outside = [*_needs(flow, first, before), *_needs(flow, first, after), carry.layout]
        trees[first] = _tree(flow, first, source[first], outside)
    return replace(flow, source=source, trees=trees)


def _needs(flow: Flow, name: str, nodes: range) -> list[Layout]:
    return [flow.need[i, slot] for i, slot in flow.graph.consumers.get(name, ()) if i in nodes]


def _tree(flow: Flow, name: str, source: Layout, targets: list[Layout]) -> ReshardTree:
    """The cheapest tree from a layout to the targets."""
    tree = flow.cheapest_tree(name, source, targets)
    if tree is None:
        raise AssertionError(f"{name}: no path from {source.spell()}")
    return tree


def _tree_over(
    flow: Flow, name: str, source: Layout, shared: Layout, targets: list[Layout]
) -> ReshardTree:
    """The tree over a given shared layout."""
    tree = tree_over(flow.graph.tensors[name].shape, source, shared, targets, flow.plan.mesh)
    if tree is None:
        raise AssertionError(f"{name}: no path over {shared.spell()}")
    return tree
