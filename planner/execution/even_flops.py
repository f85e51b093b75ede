"""FLOPs of products, node by node, where pipeline stages are equal or there are none."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from planner.execution.collective import first_result
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, inner_flow, outer_flow, passes_of
from planner.execution.pipeline import pipeline_of
from planner.execution.recompute import products, recomputed_in_block
from planner.ops.cost import Product


def flops_by_index(
    flow: Flow, blocks: Iterable[RepeatedBlock] = (), *, again: bool = True
) -> dict[int, Fraction]:
    """2MNK per node, as in `dot_flops`; of blocks on pipeline stages what one stage runs, spread
    over all repeats."""
    blocks, graph, pipeline = tuple(blocks), flow.graph, pipeline_of(flow.graph, flow.plan)
    total: dict[int, Fraction] = {}
    alike: dict[tuple, tuple[Product, ...]] = {}

    def made(i: int) -> tuple[Product, ...]:
        """The node's products; repeats of a block share a rule."""
        node, rule = graph.nodes[i], flow.rules[i]
        if not rule.flops:
            return ()
        key = (
            id(rule),
            id(flow.split(i)),
            tuple(map(flow.grad.__contains__, node.inputs)),
            flow.grad.isdisjoint(node.outputs),
        )
        if key not in alike:
            alike[key] = products(flow, i)
        return alike[key]

    each: dict[tuple[int, bool], Fraction] = {}
    for i in range(len(graph.nodes)):
        if not (dots := made(i)):
            continue
        twice = (
            pipeline is not None
            and again
            and pipeline.schedule == "gpipe"
            and pipeline.in_epilogue(i)
        )  # head and loss are computed again
        if (id(dots), twice) not in each:
            back = {
                id(dot): dot.backward + again * (dot.recomputed - dot.multiplied)
                if flow.training
                else 0
                for dot in dots
            }
            each[id(dots), twice] = sum(
                (dot.flops * (1 + twice + back[id(dot)]) + dot.beyond for dot in dots), Fraction(0)
            )
        total[i] = each[id(dots), twice]
    outer = flow
    for block in blocks:
        outer = outer_flow(outer, block)
    for block in blocks:
        replayed = recomputed_in_block(inner_flow(outer, block), block)
        for i, result in (replayed.nodes if replayed and again else {}).items():
            total[i] = total.get(i, Fraction(0)) + block.repeats * sum(
                (dot.flops for dot in made(i) if result or dot.inside), Fraction(0)
            )
    passes = passes_of(flow, blocks)
    known: dict[tuple, Fraction] = {}
    for i, f in list(total.items()):
        times = 0 if pipeline else passes(first_result(graph, i))
        place = (
            id(f),
            *(
                (pipeline.in_epilogue(i), i in pipeline.nodes, i in pipeline.shared_prologue)
                if pipeline
                else (times,)
            ),
        )  # by id: nodes that are alike share one
        if place not in known:
            known[place] = f * (
                pipeline.forward_passes(i) * pipeline.stage_share(i) if pipeline else times
            )
        total[i] = known[place]
    return {i: f for i, f in total.items() if f}
