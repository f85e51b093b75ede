"""The decisions of a plan as a strategy file has them: a row per class of nodes with its runner-up,
per repeated block, and per tensor with its layout."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.uneven_pipeline import UnevenPipeline, uneven_pipeline_of
from planner.graph.ir import Graph
from planner.pricing.kernels import kernel_times
from planner.search.request import SearchResult
from planner.sharding.layout import padded
from planner.solvers.problem import FORBIDDEN, Problem
from planner.space.assemble import PICO
from planner.space.variables import Space


def node_table(base: GraphFacts, flow: Flow, result: SearchResult) -> dict[str, dict[str, Any]]:
    """A row per class of nodes: operator, split, time of the node (all its repeats) and the best
    other split with what it would cost."""
    from planner.pricing.pricer import Pricer

    rows = {}
    pipeline, uneven = pipeline_of(base.graph, flow.plan), uneven_pipeline_of(flow)
    times_run = (
        times_on_stage(base, pipeline) if uneven is None else times_on_fullest_stage(base, uneven)
    )
    space, problem = result.space, result.problem
    pricer = space.pricer if space is not None else None
    others = (
        runner_ups(space, problem, result.choice)
        if space is not None and problem is not None
        else {}
    )
    classes = space.base.shared if space is not None else base.shared
    for i, node in enumerate(base.graph.nodes):
        if base.shared[i] != i:
            continue
        row: dict[str, Any] = {
            "op": node.op,
            "split": flow.split(i).as_dict(),
            "stage": stage_of(i, pipeline) if uneven is None else uneven.stage_of(i),
            "recompute": (
                flow.plan.recompute != "none" and (uneven is not None or _inside(base, i))
            ),
            "outputs": [o for o in node.outputs if o],
            "times": base.times[i],
        }
        if node.members:
            row["members"] = list(node.members)
        if base.reasons[i]:
            row["unsupported"] = base.reasons[i]
        if isinstance(pricer, Pricer):
            forward, backward = kernel_times(base, i, flow.split(i), pricer)
            row["time_s"] = (forward + backward) * times_run[i]
        if (other := others.get(classes[i])) is not None:
            row["runner_up"] = {k: n for k, n in other.items() if k != "nodes" or n > base.times[i]}
        rows[node.id] = row
    return rows


def times_on_stage(base: GraphFacts, pipeline: Pipeline | None) -> dict[int, float]:
    """First node of a class -> how many of the class a device runs in a microbatch: of blocks on
    pipeline stages, those of one stage."""
    per_device: dict[int, Fraction] = {}
    for i, first in enumerate(base.shared):
        per_device[first] = per_device.get(first, Fraction(0)) + (
            pipeline.stage_share(i) * pipeline.useful_passes(i) / pipeline.microbatches
            if pipeline
            else 1
        )
    return {i: float(n) for i, n in per_device.items()}


def times_on_fullest_stage(base: GraphFacts, uneven: UnevenPipeline) -> dict[int, float]:
    """First node of a class -> how many of the class the uneven stage with the most of them runs
    in a microbatch."""
    per_stage: dict[int, Counter[int]] = {}
    for i, first in enumerate(base.shared):
        per_stage.setdefault(first, Counter())[uneven.stage_of(i)] += 1
    return {first: float(max(counts.values())) for first, counts in per_stage.items()}


def block_table(graph: Graph, flow: Flow, base: GraphFacts) -> tuple[dict[str, Any], ...]:
    """A row per repeated block; of one that is assigned to pipeline stages, how many repeats a
    stage holds; how names tell the repeats apart, where they do."""
    pipeline = pipeline_of(graph, flow.plan)
    return tuple(
        {"first": f, "period": p, "repeats": r, "body": [n.id for n in graph.nodes[f : f + p]]}
        | (
            {"per_stage": pipeline.blocks_per_stage}
            if pipeline is not None and pipeline.first == f
            else {}
        )
        | numbering(graph, f, p, r)
        for f, p, r in base.runs
    )


def numbering(graph: Graph, first: int, period: int, repeats: int) -> dict[str, Any]:
    """{"scope": "/model/layers.", "step": 1} where the number behind one prefix rises by `step`
    from repeat to repeat in the ids of all of a block's nodes and nothing else in them differs;
    nothing where ids are made otherwise, or of a layer that is there once."""
    if repeats == 1:
        return {}
    ids = [[graph.nodes[first + r * period + j].id for r in range(repeats)] for j in range(period)]
    second_id = ids[0][1]
    differs_at = next(
        (k for k, (a, b) in enumerate(zip(ids[0][0], second_id, strict=False)) if a != b), 0
    )
    scope = second_id[:differs_at].rstrip("0123456789")
    rest = re.compile(re.escape(scope) + r"(\d+)(.*)", re.S)
    steps: set[int] = set()
    for names in ids:
        read = [rest.fullmatch(name) for name in names]
        if not scope or not all(read) or len({m[2] for m in read if m}) > 1:
            return {}
        numbers = [int(m[1]) for m in read if m]
        steps |= {b - a for a, b in pairwise(numbers)}
    return {"scope": scope, "step": steps.pop()} if len(steps) == 1 and min(steps) > 0 else {}


def stage_of(i: int, pipeline: Pipeline | None) -> int:
    """The pipeline stage of a node: of blocks the first that has one of theirs (blocks follow in
    order), of what comes after them the last."""
    return pipeline.stages - 1 if pipeline is not None and pipeline.in_epilogue(i) else 0


def _inside(base: GraphFacts, i: int) -> bool:
    return any(first <= i < first + period * repeats for first, period, repeats in base.runs)


def runner_ups(
    space: Space, problem: Problem, choice: tuple[int, ...]
) -> dict[int, dict[str, Any]]:
    """Per class of nodes the cheapest other split with every other decision kept, what it adds
    (seconds), and of how many nodes."""
    n = len(problem.cost)
    delta = [c.astype(np.float64).copy() for c in problem.cost]
    for (u, v), t in zip(problem.edges, problem.edge_table, strict=True):
        table = problem.tables[t]
        delta[u] += table[:, choice[v]]
        delta[v] += table[choice[u], :]
    out = {}
    for k in range(n):
        v = space.variables[k]
        if v.kind != "op" or len(delta[k]) < 2:
            continue
        extra = delta[k] - delta[k][choice[k]]
        extra[choice[k]] = np.inf
        best = int(np.argmin(extra))
        if extra[best] < FORBIDDEN / 2:
            out[v.node] = {
                "split": v.splits[best].as_dict(),
                "extra_s": float(extra[best]) / PICO,
                "nodes": v.count,
            }
    return out


def tensor_table(graph: Graph, flow: Flow, base: GraphFacts) -> dict[str, dict[str, Any]]:
    """Producer's layout per tensor; of repeated blocks only the first repeat's, except parameters,
    which are all listed."""
    rows, pipeline, uneven = {}, pipeline_of(graph, flow.plan), uneven_pipeline_of(flow)
    stage_of_weight = (
        {n: uneven.stage_of_chunk(k) for k in range(uneven.count) for n in uneven.weights(k)}
        if uneven is not None
        else {}
    )
    for name, layout in flow.source.items():
        maker = graph.producer.get(name)
        if name in graph.constants or (maker is not None and base.shared[maker] != maker):
            continue
        t = graph.tensors[name]
        row: dict[str, Any] = {
            "layout": [list(a) for a in layout.dims],
            "partial": list(layout.partial),
            "padded": _padded(t.shape, layout, flow),
            "memory": "device",
            "shape": list(t.shape),
        }
        if name in flow.weights:
            row["label"] = graph.labels.get(name, name)
            w = flow.weights[name]
            stages = (
                {pipeline.stage_of(i) for i, _ in graph.consumers[name]} if pipeline else set[int]()
            )
            if name in stage_of_weight:
                row["stage"] = stage_of_weight[name]
            if len(stages) == 1 and -1 not in stages:
                row["stage"] = stages.pop()
            if w.zero_stage and w.zero_dim >= 0:
                row["zero"] = {"level": w.zero_stage, "dim": w.zero_dim, "axes": list(w.zero_axes)}
        rows[name] = row
    return rows


def _padded(shape: tuple[int, ...], layout: Any, flow: Flow) -> bool:

    sizes = dict(flow.plan.mesh)
    return any(padded(n, a, sizes) != n for n, a in zip(shape, layout.dims, strict=True))
