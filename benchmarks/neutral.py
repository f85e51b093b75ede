"""A judge of parallel plans that belongs to no planner: bytes, devices, wasted work and state, read
from the operators' rules alone.

A plan is judged as a set of splits over mesh axes (`judge`), one optimizer step in float32:

    payload   operand bytes of every all-reduce, reduce-scatter and all-to-all, result bytes of
              every all-gather, of one device: forward sums, conversions between producer and
              consumer, their transposes, and gradients of weights over the devices that hold the
              same piece. Equal to the compiled program's (tests/verify/test_neutral.py compiles
              some).
    wire      what a ring sends for it: 2 (g-1)/g of the payload of an all-reduce over g devices,
              (g-1)/g of the others; an all-reduce and the reduce-scatter and all-gather it can be
              cut into have the same wire bytes, while the two have twice its payload
    devices   pieces that differ, in the least divided product of the net: devices beyond them
              repeat another's work
    wasted    1 - W / (N W_local): the share of the machine's work that is padding or a repetition.
              W counts 2MNK for products and one operation per element for everything else, once
              forward and once per differentiated operand; replays are no waste.
    state     bytes of weights, gradients and two moments on one device

No time enters, so no cost model can favour its own plan. Tables of integer cuts are given axes by
`benchmarks.cuts` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.execution.collective import CollectiveUse, traffic
from planner.execution.collectives import collectives
from planner.execution.layout_flow import Flow, cut_layout, derive, stored_layout
from planner.execution.loops import RepeatedBlock, find_repeated_block
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.ops.lookup import rule_of
from planner.sharding.layout import local_shape
from planner.sharding.rule import Limits, Rule, Split, legal

ANY_PADDING = Limits(waste=1.0)
VIEWS = frozenset({"Reshape", "Transpose"})


@dataclass(frozen=True)
class Report:
    """What the judge found (module docstring): bytes of one device and optimizer step, counts of
    devices, a fraction, bytes of one device."""

    payload_bytes: int
    wire_bytes: int
    by_phase: Mapping[str, int]
    devices: int
    wasted: float
    state_bytes: int


def judge(graph: Graph, plan: Plan) -> Report:
    """Judge a training plan. graph: that of one microbatch, its first output the scalar loss.

    Raises ValueError for a plan that no machine can run, naming the node, and PlanError for layouts
    that cannot be joined.
    """
    rules = tuple(rule_of(node, graph)[0] for node in graph.nodes)
    refuse_impossible(graph, plan, rules)
    flow = derive(graph, plan, training=True, rules=rules)
    uses = step_collectives(flow)
    by_phase: dict[str, int] = {}
    for use in uses:
        by_phase[use.phase] = by_phase.get(use.phase, 0) + use.total_bytes
    wire = sum(
        cell["wire"]
        for by in traffic(uses, plan.order, dict(plan.mesh)).values()
        for cell in by.values()
    )
    return Report(
        sum(by_phase.values()),
        int(wire),
        by_phase,
        distinct_devices(flow),
        wasted_work(flow),
        state_bytes(flow),
    )


def refuse_impossible(graph: Graph, plan: Plan, rules: Sequence[Rule]) -> None:
    """Raise ValueError where a split gives an axis two things to do, names one the mesh lacks, or
    cuts what its operator keeps whole."""
    mesh = dict(plan.mesh)
    for node, rule in zip(graph.nodes, rules, strict=True):
        split = plan.splits.get(node.id, Split())
        axes = [a for _, own in split.pairs for a in own]
        if (
            len(set(axes)) < len(axes)
            or not mesh.keys() >= set(axes)
            or not legal(rule, split, mesh, ANY_PADDING)
        ):
            raise ValueError(
                f"{node.id} ({node.op}) cannot be split as {split.as_dict()} on {mesh}"
            )


def step_collectives(flow: Flow) -> tuple[CollectiveUse, ...]:
    """Every collective of one optimizer step of the emitted program, repeated blocks under scan
    where they can be."""
    found = [find_repeated_block(flow, *run) for run in flow.plan.repeated_blocks]
    return collectives(flow, [run for run in found if isinstance(run, RepeatedBlock)])


def distinct_devices(flow: Flow) -> int:
    """Pieces with work of their own in the least divided product (devices of the plan when there is
    none)."""
    mesh, counts = dict(flow.plan.mesh), [flow.plan.devices]
    for i, rule in enumerate(flow.rules):
        if rule.flops:
            local = rule.work(flow.split(i), mesh)
            counts.append(prod(-(-size // local[f]) for f, size in rule.sizes.items()))
    return min(counts)


def wasted_work(flow: Flow) -> float:
    """Share of the machine's operations that are padding or repeat another device's."""
    mesh, useful, spent = dict(flow.plan.mesh), 0.0, 0.0
    for i, (node, rule) in enumerate(zip(flow.graph.nodes, flow.rules, strict=True)):
        if node.op in VIEWS:
            continue
        passes = 1 + (
            sum(n in flow.grad for n in node.inputs)
            if any(o in flow.grad for o in node.outputs)
            else 0
        )
        local = rule.work(flow.split(i), mesh)
        useful += passes * _operations(rule, rule.sizes)
        spent += passes * _operations(rule, local) * flow.plan.devices
    return 1 - useful / spent if spent else 0.0


def _operations(rule: Rule, sizes: Mapping[str, int]) -> float:
    if rule.flops:
        return rule.flops * prod(sizes[f] / rule.sizes[f] for f in rule.sizes)
    return max(
        (prod(sizes[f] for dim in dims for f in dim) for dims in (*rule.operands, *rule.results)),
        default=0,
    )


def state_bytes(flow: Flow) -> int:
    """float32 weights, gradients and two moments of one device between steps; weights without a
    gradient count once."""
    total, mesh = 0, dict(flow.plan.mesh)
    for name in flow.graph.weights:
        shape, kept = flow.graph.tensors[name].shape, flow.weights.get(name)
        if kept is None:
            continue
        parts = [(4, stored_layout(kept))]
        if name in flow.grad:
            parts += [
                (4, cut_layout(kept) if kept.zero_stage >= 2 else kept.layout),
                (8, cut_layout(kept)),
            ]
        total += sum(size * prod(local_shape(shape, layout, mesh)) for size, layout in parts)
    return total
