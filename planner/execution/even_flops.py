"""FLOPs of products, node by node, where pipeline stages are even or there are none."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from planner.execution.collective import first_result
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, inner_flow, outer_flow, passes_of
from planner.execution.pipeline import Pipeline, pipeline_of, pipeline_places
from planner.execution.recompute import products, recomputed_in_block
from planner.execution.weights_apart import factors, weights_apart
from planner.graph.ir import Graph
from planner.ops.cost import Product


def flops_by_index(
    flow: Flow, blocks: Iterable[RepeatedBlock] = (), *, as_compiled: bool = True
) -> dict[int, Fraction]:
    """2MNK per node, as in `dot_flops`; of blocks on pipeline stages what one stage runs, spread
    over all repeats."""
    blocks, pipeline = tuple(blocks), pipeline_of(flow.graph, flow.plan)
    dots = _Dots(flow, as_compiled)
    flops = dots.of_one_pass(pipeline)
    if as_compiled:
        for i, recomputed in dots.recomputed(blocks):
            flops[i] = flops.get(i, Fraction(0)) + recomputed
    known: dict[tuple, Fraction] = {}  # by id: nodes that are alike share one fraction
    if pipeline:
        places, later = pipeline_places(flow.graph, pipeline), dots.made_apart(pipeline)
        fewer = pipeline.microbatch_schedule.ticks - pipeline.microbatch_schedule.weight_ticks
        for i, f in flops.items():
            key = id(f), places[i], later.get(i)
            if key not in known:
                once = f * pipeline.forward_passes(i) - fewer * later.get(i, Fraction(0))
                known[key] = once * pipeline.stage_share(i)
        return {i: known[id(f), places[i], later.get(i)] for i, f in flops.items() if f}
    passes = passes_of(flow, blocks)
    result = {}
    for i, f in flops.items():
        times = passes(first_result(flow.graph, i))
        if (id(f), times) not in known:
            known[id(f), times] = f * times
        if f:
            result[i] = known[id(f), times]
    return result


def flops_of_own_parts(flow: Flow, stages: int) -> dict[int, Fraction]:
    """2MNK per node and step where each pipeline stage runs its own part alone, and nothing in
    bubbles: the mean over stages, without what is recomputed."""
    once, known = _Dots(flow, False).of_one_pass(None), dict[int, Fraction]()
    for f in once.values():
        if id(f) not in known:
            known[id(f)] = f * flow.plan.microbatches / stages
    return {i: known[id(f)] for i, f in once.items() if f}


class _Dots:
    """The dots of a flow's nodes. as_compiled: with what kernels recompute in the backward pass,
    and without what compilers multiply. Nodes that share a rule and a split share their dots and
    sums, so keys are made of ids: fractions take long to hash."""

    def __init__(self, flow: Flow, as_compiled: bool) -> None:
        self.flow, self.as_compiled = flow, as_compiled
        self._products: dict[tuple, tuple[Product, ...]] = {}
        self._multiplying = [i for i, rule in enumerate(flow.rules) if rule.flops]
        self._trained = _trained(flow.graph, flow.grad)

    def of(self, i: int) -> tuple[Product, ...]:
        """The dots of node i."""
        rule = self.flow.rules[i]
        if not rule.flops:
            return ()
        key = id(rule), id(self.flow.splits[i]), self._trained[i]
        if key not in self._products:
            self._products[key] = products(self.flow, i)
        return self._products[key]

    def of_one_pass(self, pipeline: Pipeline | None) -> dict[int, Fraction]:
        """FLOPs of one forward and backward pass, per node with dots."""
        sums: dict[tuple[int, Fraction], Fraction] = {}
        flops: dict[int, Fraction] = {}
        for i in self._multiplying:
            if dots := self.of(i):
                forward = Fraction(1)
                if self.as_compiled and pipeline is not None and pipeline.schedule == "gpipe":
                    # Under gpipe head and loss are recomputed.
                    late = pipeline.epilogue_passes if True in pipeline.sides(i) else 0
                    forward += late / pipeline.forward_passes(i)
                if (id(dots), forward) not in sums:
                    sums[id(dots), forward] = self._sum(dots, forward)
                flops[i] = sums[id(dots), forward]
        return flops

    def _sum(self, dots: tuple[Product, ...], forward: Fraction) -> Fraction:
        total = Fraction(0)
        for dot in dots:
            backward = dot.backward + self.as_compiled * (dot.recomputed - dot.multiplied)
            total += (
                dot.counted(self.as_compiled) * (forward + backward * self.flow.training)
                + dot.beyond
            )
        return total

    def made_apart(self, pipeline: Pipeline) -> dict[int, Fraction]:
        """Per node the FLOPs of one microbatch's gradients of weights that are made apart from the
        backward pass."""
        waiting = weights_apart(self.flow, pipeline)
        return {
            i: sum((dot.counted(self.as_compiled) for dot in self.of(i)), Fraction(0)) * waits
            for i in pipeline.nodes
            if (waits := sum(name in waiting for name in factors(self.flow.graph.nodes[i])))
        }

    def recomputed(self, blocks: tuple[RepeatedBlock, ...]) -> Iterable[tuple[int, Fraction]]:
        """Per recomputed node of repeated blocks the FLOPs of its second run, in all repeats."""
        outer = self.flow
        for block in blocks:
            outer = outer_flow(outer, block)
        for block in blocks:
            recomputed = recomputed_in_block(inner_flow(outer, block), block)
            for i, wanted in recomputed.nodes.items() if recomputed else ():
                dots = (dot.counted(True) for dot in self.of(i) if wanted or dot.inside)
                yield i, block.repeats * sum(dots, Fraction(0))


def _trained(graph: Graph, grad: frozenset[str]) -> tuple[tuple[tuple[bool, ...], bool], ...]:
    """Of every node which operands have a gradient, and whether no result has one. Worked out once
    a graph."""
    key = "trained operands", grad
    if key not in graph.memo:
        graph.memo[key] = tuple(
            (tuple(map(grad.__contains__, node.inputs)), grad.isdisjoint(node.outputs))
            for node in graph.nodes
        )
    known: tuple[tuple[tuple[bool, ...], bool], ...] = graph.memo[key]
    return known
