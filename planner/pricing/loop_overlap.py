"""What of a plan's collectives the GPU compiler's schedule puts beside kernels: of weights that
loops over blocks gather under ZeRO stage 3, of new parameters, and between pipeline stages
(costmodels.overlap has the formulas, the runtime's profile the shares). Kernels that run beside a
collective take longer: of what hides a share shows after all.

What a loop hides at most is a share of each collective and in the arrays of a space
(planner.pricing.gradient_sync). That it hides no more than its kernels allow is no sum over
decisions: the price of the whole plan alone has it, so that arrays are below it where collectives
of a loop take longer than its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from costmodels.overlap import LoopCollectives, shown_in_loop_s
from planner.execution.pipeline import pipeline_of
from planner.execution.weights_apart import waiting_share, weights_apart
from planner.pricing.kernels import kernel_times
from planner.sharding.layout import STAGE, group

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.execution.collective import CollectiveUse
    from planner.execution.layout_flow import Flow
    from planner.execution.loops import RepeatedBlock
    from planner.pricing.pricer import Pricer

Row = tuple["CollectiveUse", float, float]
"""A collective, its seconds in a step, and those of them that hide."""


def hidden_beside_kernels(
    base: GraphFacts,
    flow: Flow,
    runs: Sequence[RepeatedBlock],
    recomputed: frozenset[int],
    rows: Iterable[Row],
    pricer: Pricer,
) -> list[Row]:
    """The collectives of a step with what kernels hide of them beside what hid before. recomputed:
    nodes that run a second time."""
    hidden, rows = pricer.hidden, list(rows)
    beside = [0.0] * len(rows)
    loops: dict[tuple[int, bool], list[int]] = {}
    home = _homes(flow, runs) if any(use.looped for use, _, _ in rows) else {}
    last = max(range(len(runs)), key=lambda k: runs[k].first, default=0)
    for k, (use, seconds, under) in enumerate(rows):
        if use.looped:
            beside[k] = hidden.looped(use.phase) * (seconds - under)
            run, _ = home.get(use.what, (last, -1))
            loops.setdefault((run, use.phase != "forward"), []).append(k)
        elif use.axes == (STAGE,) and use.kind == "collective-permute":
            beside[k] = hidden.handed_on * (seconds - under)
        elif use.phase == "optimizer" and hidden.updated and not use.of_matrices:
            pieces = group(use.axes, dict(flow.plan.mesh))
            piece = use.total_bytes / pieces / pricer.recipe.parameter_bytes
            beside[k] = float(
                pricer.gathered_beside_updates_s(seconds - under, piece, flow.plan.offload)
            )
    for (run, backward), numbers in loops.items():
        kernels = _kernels(base, flow, runs[run], backward, recomputed, pricer)
        operators: dict[int, list[int]] = {}
        for k in numbers:
            operators.setdefault(home.get(rows[k][0].what, (run, -1))[1], []).append(k)
        part = _allowed(rows, beside, operators, kernels, hidden.beside)
        for k in numbers:
            beside[k] *= part
    return [
        (use, seconds, under + hidden.spared * hidden_s)
        for (use, seconds, under), hidden_s in zip(rows, beside, strict=True)
    ]


def _homes(flow: Flow, runs: Sequence[RepeatedBlock]) -> dict[str, tuple[int, int]]:
    """What a collective of a stacked weight serves -> its loop, and the node of the first repeat
    that reads it."""
    graph = flow.graph
    return {
        graph.labels.get(name, name): (k, graph.consumers[names[0]][0][0])
        for k, run in enumerate(runs)
        for names in run.weights
        for name in names
    }


def _kernels(
    base: GraphFacts,
    flow: Flow,
    run: RepeatedBlock,
    backward: bool,
    recomputed: frozenset[int],
    pricer: Pricer,
) -> dict[int, float]:
    """Node of a loop's first repeat -> seconds of a device's kernels of all repeats in a step, in
    the forward or in the backward pass, which begins with what runs a second time."""
    pipeline, result = pipeline_of(flow.graph, flow.plan), {}
    waiting = weights_apart(flow, pipeline)
    for i in range(run.first, run.first + run.period):
        forward_s, backward_s = kernel_times(base, i, flow.split(i), pricer)
        if waiting:  # these are no part of the loop
            backward_s *= 1 - waiting_share(flow.graph.nodes[i], flow.grad, waiting)
        seconds = backward_s + (forward_s if i in recomputed else 0.0) if backward else forward_s
        passes = float(pipeline.forward_passes(i) * pipeline.stage_share(i)) if pipeline else 1.0
        result[i] = seconds * run.repeats * (passes if pipeline else flow.plan.microbatches)
    return result


def _allowed(
    rows: Sequence[Row],
    beside: Sequence[float],
    operators: Mapping[int, Sequence[int]],
    kernels: Mapping[int, float],
    share: float,
) -> float:
    """What part of the seconds that one pass of a loop could hide its kernels allow. operators:
    node (-1: none of the loop) -> numbers of its collectives among the rows."""
    sums = [
        LoopCollectives(
            sum(rows[k][1] for k in numbers),
            sum(rows[k][1] - beside[k] for k in numbers),
            kernels.get(i, 0.0),
        )
        for i, numbers in operators.items()
    ]
    sent, least = sum(o.sent_s for o in sums), sum(o.shown_s for o in sums)
    shown = shown_in_loop_s(sums, sum(kernels.values()), share)
    return (sent - shown) / (sent - least) if sent > least else 1.0
