"""Findings: what a user should not miss of a plan, a sentence each, the gravest kind first.

A note of a graph (Graph.notes) is an assumption, unless it is a Finding: then it leaves the
assumptions and stands under the plan's figures. What is found of a whole plan joins in `of_plan`;
what a strategy file says by itself (padding, a tight memory) is worked out by
planner.report.findings when it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from costmodels.ranges import TimeRange
from planner.graph.findings import Finding, ordered
from planner.graph.ir import Graph
from planner.ops.attention_kernels import Chosen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.search.request import Request
    from planner.workload.model import Model


LEAST_MFU = 0.02
"""Below this share of the devices' arithmetic a training plan of a large model is a mistake
somewhere, and said so before anything else."""
LARGE = 1_000_000_000
UNFUSED = 0.05
"""Share of a step from which on it is said that attention is priced as a kernel that the emitted
program does not have."""


def of_plan(
    model: Model,
    graph: Graph,
    costs: Mapping[str, Any],
    nodes: Mapping[str, Mapping[str, Any]],
    microbatches: int,
) -> tuple[Finding, ...]:
    """What is found when a plan is put together: of the graph that is planned, its costs, and its
    nodes as the strategy file has them."""
    notes = tuple(note for note in model.plain.notes if isinstance(note, Finding))
    slow = (
        graph.parameters > LARGE
        and model.workload.kind == "train"
        and costs["model_flops_utilization"] < LEAST_MFU
    )
    return ordered([*([_speed(notes, costs, nodes, microbatches)] if slow else []), *notes])


def of_request(model: Model, request: Request) -> tuple[Finding, ...]:
    """What is found of a question before it is answered: a plan that the file brings and nobody
    asked for, parts of the model that are not planned, kinds of device that work at the pace of the
    slowest."""
    findings = [
        Finding("devices", note) for note in request.topology.notes if request.topology.groups
    ]
    findings += [Finding("note", sentence) for sentence in model.left_out]
    if model.proto.configuration and request.pins.empty:
        devices = ", ".join(str(c.num_devices) for c in model.proto.configuration)
        findings.append(
            Finding(
                "note",
                f"the model's annotations for {devices} devices are not used (--pin annotated)",
            )
        )
    return tuple(findings)


def unfused(
    kernels: Mapping[str, Chosen],
    costs: Mapping[str, Any],
    nodes: Mapping[str, Mapping[str, Any]],
    microbatches: int,
) -> tuple[Finding, ...]:
    """That much of a step goes into attention which no fused kernel serves
    (docs/how-a-plan-is-chosen.md, How sure it is). kernels: of the rows of `nodes` that are
    attention in an emitted program for accelerators."""
    slow = {n: chosen for n, chosen in kernels.items() if chosen.why}
    share = _spent((nodes[n] for n in slow), microbatches) / (costs["step_time_s"] or 1.0)
    if share < UNFUSED:
        return ()
    why = Counter(chosen.why for chosen in slow.values()).most_common(1)[0][0]
    return (
        Finding(
            "attention",
            f"attention takes {100 * share:.0f} % of the step: no fused kernel serves it, and its"
            f" scores pass through memory: {why}",
        ),
    )


def unsure(spread: TimeRange) -> tuple[Finding, ...]:
    """That a price goes beyond what was ever measured, and in what."""
    if not spread.why:
        return ()
    return (Finding("range", f"the range of the step is wide: {'; '.join(spread.why)}"),)


def _spent(rows: Iterable[Mapping[str, Any]], microbatches: int) -> float:
    """Seconds of a step that nodes' kernels take."""
    return microbatches * sum(row.get("time_s", 0.0) for row in rows)


def _shares(costs: Mapping[str, Any], step_s: float) -> tuple[tuple[float, tuple[str, str]], ...]:
    """What may be most of a step beside its kernels: its share, what is said of it, what helps."""
    waits, bubble, update = (
        costs[f"{part}_time_s"] / step_s
        for part in ("exposed_communication", "bubble", "optimizer")
    )
    return (
        (
            waits,
            (
                f"{waits:.0%} of the step waits for communication",
                "a larger --batch, or fewer --devices",
            ),
        ),
        (
            bubble,
            (f"{bubble:.0%} of the step are pipeline bubbles", "a larger --batch, or fewer stages"),
        ),
        (
            update,
            (
                f"{update:.0%} of the step is the optimizer's pass over all parameters, however"
                " few a step reads",
                "a larger --batch",
            ),
        ),
    )


def _speed(
    notes: Iterable[Finding],
    costs: Mapping[str, Any],
    nodes: Mapping[str, Mapping[str, Any]],
    microbatches: int,
) -> Finding:
    """Why a plan puts next to none of its devices' arithmetic to use, and what to do."""
    kinds, step = {n.kind for n in notes}, costs["step_time_s"] or 1.0
    no_rule = [row for row in nodes.values() if row.get("unsupported")]
    of_step = _shares(costs, step)
    if "experts" in kinds:
        why = (
            "its experts were not recognised, so whole weights are copied for each token, or every"
            " expert works on every token"
        )
        help_ = "export them in a form that is (docs/exporting.md, Experts)"
    elif _spent(no_rule, microbatches) > step / 3:
        why, help_ = (
            (
                f"{len(no_rule)} kinds of nodes have no rule and run whole on every device, first"
                f" {no_rule[0]['unsupported']}"
            ),
            "plan ops FILE lists them",
        )
    elif costs["distinct_work"] < 1 / 3:
        why, help_ = (
            f"devices repeat one another's work ({costs['distinct_work']:.1%} of it is distinct)",
            "a larger --batch, or fewer --devices",
        )
    elif words := next((w for share, w in of_step if share > 1 / 2), None):
        why, help_ = words
    elif "attention" in kinds:
        why, help_ = (
            "its attention was not recognised, so scores pass through memory",
            "export it with attn_implementation='sdpa'",
        )
    else:
        why, help_ = (
            "its operators move bytes rather than multiply: a device has too few rows at a time",
            "a larger --batch, or fewer --devices",
        )
    return Finding(
        "speed",
        f"{costs['model_flops_utilization']:.2%} of the devices' arithmetic is put to use (MFU),"
        f" which nobody would run: {why}; {help_}",
    )


def rows(findings: Iterable[Finding]) -> tuple[Mapping[str, Any], ...]:
    """As strategy files keep them."""
    return tuple({"kind": f.kind, "text": str(f)} for f in findings)
