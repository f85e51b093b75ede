"""What the backward pass reads, and so what a rematerialised function computes, gathers and
communicates again.

A block (or part) that is wrapped keeps only some values from its forward pass; the rest of what its
backward pass reads is computed again. Dead code is not: a sum of which only the shape mattered is
not replayed. `replay` follows that demand through one function:

    mode "all"   ("block")       nothing but the arguments is kept
    mode "keep"  ("block-keep")  arguments and the results of collectives are kept
    mode "part"  (ZeRO stage 3 without recomputation)  everything is kept except gathered
                 weights

`reads` is the one table of derivatives: which operands the gradient of an operator needs. Verified
against compiled programs by benchmarks/compiler_truth.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, inner_flow, outer_flow
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.control import inner_gradients, region, trips
from planner.ops.cost import Dots, Product
from planner.ops.residuals import reads
from planner.sharding.layout import ReshardStep
from planner.sharding.rule import Rule


@dataclass
class Recomputed:
    """What runs a second time. steps: (tensor, beginning of a way) whose last step runs again;
    nodes: recomputed kernels (value: whether their result, not only what they know inside, is
    needed); weights: gathered again; kept: results of collectives that are kept (mode "keep").
    """

    steps: dict[tuple[str, tuple[ReshardStep, ...]], None] = field(default_factory=dict)
    nodes: dict[int, bool] = field(default_factory=dict)
    weights: dict[str, None] = field(default_factory=dict)
    saved: dict[tuple[str, tuple[ReshardStep, ...]], None] = field(default_factory=dict)


def find_recomputed(
    flow: Flow, inside: Sequence[int], mode: str, given: Iterable[str] = ()
) -> Recomputed:
    """The second run of nodes `inside`, wrapped as `mode` says. flow: as it is inside the function
    (`runs.inner_flow`).

    given: tensors that arrive as arguments in their source layout and are converted inside (what a
    block carries on).
    """
    graph, again = flow.graph, Recomputed()
    made = {o: i for i in inside for o in graph.nodes[i].outputs if o}
    given = frozenset(given)
    seen: set[tuple[str, tuple[ReshardStep, ...]]] = set()
    queue: list[tuple[str, tuple[ReshardStep, ...]]] = []

    def want(i: int, slot: int) -> None:
        name = graph.nodes[i].inputs[slot]
        way = flow.trees[name].path(flow.need[i, slot])
        if (name, way) not in seen:
            seen.add((name, way))
            queue.append((name, way))

    def compute(i: int) -> None:
        if not again.nodes.get(i):
            again.nodes[i] = True
            for slot, name in enumerate(graph.nodes[i].inputs):
                if name:
                    want(i, slot)

    for i in inside:
        need = reads(graph.nodes[i], flow.grad)
        for slot in need.in_order:
            want(i, slot)
        if (need.inside or (need.slots and _exchanges(flow, i))) and mode != "part":
            again.nodes.setdefault(i, False)
    while queue:
        name, way = queue.pop()
        if (
            name in graph.weights
            and name not in given
            and (mode == "all" or not any(step.forward for step in way))
        ):
            again.weights[name] = (
                None  # what a collective made of a gathered weight has a name and is kept
            )
        if mode == "part" or (name not in made and name not in given and name not in graph.weights):
            continue
        kept = mode == "keep"
        end = len(way)
        while end and not (kept and way[end - 1].forward):
            again.steps[name, way[:end]] = None
            end -= 1
        if end:
            again.saved[name, way[:end]] = None
        elif name in made:
            compute(made[name])
    return again


def _exchanges(flow: Flow, i: int) -> bool:
    """Whether the kernel brings in pieces of operands that nothing keeps: the backward pass, which
    reads them, brings them in again."""
    return any(
        not inner.kept and inner.axes(flow.split(i), flow.plan.order)
        for inner in flow.rules[i].inner
    )


def products(flow: Flow, i: int) -> tuple[Product, ...]:
    """The dots of node i on one device, padding included."""
    rule = flow.rules[i]
    local = rule.work(flow.split(i), dict(flow.plan.mesh)) if rule.flops else {}
    found = dots(
        flow.graph,
        i,
        rule,
        flow.grad,
        {f: Fraction(local[f], n) for f, n in rule.sizes.items() if n and rule.flops},
    )
    if rule.fringe and flow.graph.nodes[i].inputs[0] in flow.grad:
        beyond = Fraction(rule.beyond(flow.split(i), dict(flow.plan.mesh)))
        found = tuple(replace(dot, beyond=dot.flops * beyond) for dot in found)
    filling = operator_of(flow.graph.nodes[i].op).filling
    if filling is not None:
        more = filling(rule, flow.split(i), dict(flow.plan.mesh))
        return tuple(replace(dot, flops=dot.flops * more) for dot in found)
    return found


def dots(
    graph: Graph,
    i: int,
    rule: Rule,
    grad: frozenset[str],
    share: Mapping[str, Fraction] | None = None,
) -> tuple[Product, ...]:
    """The dots of node i. share: what part of each factor a device has (None: the whole). Backward:
    one dot per operand with a gradient."""
    node = graph.nodes[i]
    if not rule.flops:
        return ()
    share = share or {}
    if node.bodies:
        return _inner_dots(graph, i, share, grad)
    flows = any(o in grad for o in node.outputs)
    trained = frozenset(k for k, n in enumerate(node.inputs) if flows and n in grad)
    asked = Dots(node, rule, graph.shapes(node.inputs), trained, share)
    products = operator_of(node.op).products
    return products(asked) if products else (Product(asked.flops, len(trained)),)


def _inner_dots(
    graph: Graph, i: int, share: Mapping[str, Fraction], grad: frozenset[str]
) -> tuple[Product, ...]:
    """The dots of the heaviest body of a node with bodies, in all its iterations."""
    node = graph.nodes[i]
    found = region(node, graph)
    b = max(range(len(node.bodies)), key=lambda k: sum(r.flops for r in found.rules[k]))
    body, hot = (
        node.bodies[b],
        (inner_gradients(node, b, grad) if any(o in grad for o in node.outputs) else frozenset()),
    )
    made = []
    for j, rule in enumerate(found.rules[b]):
        own = {f: share.get(found.inside[b][j].get(f, ""), Fraction(1)) for f in rule.sizes}
        made += [
            replace(dot, flops=dot.flops * trips(node), inside=True)
            for dot in dots(body, j, rule, hot, own)
        ]
    return tuple(made)


def recomputed_in_block(flow: Flow, block: RepeatedBlock) -> Recomputed | None:
    """The second run of one repeat of a block under the plan; None where nothing is wrapped. flow:
    inside the block."""
    mode = block_mode(flow)
    if not mode:
        return None
    return find_recomputed(
        flow,
        range(block.first, block.first + block.period),
        mode,
        [c.enters for c in block.carries],
    )


def block_mode(flow: Flow) -> str:
    """How the functions of repeated blocks are wrapped: "all", "keep", "part" or "" (not at
    all)."""
    if not flow.training:
        return ""
    return {"block": "all", "block-keep": "keep"}.get(
        flow.plan.recompute, "part" if flow.plan.zero_stage == 3 else ""
    )


def is_gathered(flow: Flow, name: str) -> bool:
    """Whether a weight is kept in pieces and gathered where it is used (ZeRO stage 3)."""
    plan = flow.weights.get(name)
    return plan is not None and plan.zero_stage == 3 and plan.zero_dim >= 0


def gathering_parts(flow: Flow, blocks: Iterable[RepeatedBlock]) -> tuple[range, ...]:
    """Stretches of nodes outside repeated blocks that gather weights: each becomes a function of
    its own, so that gathered weights live no longer than it runs. A stretch begins at a node that
    reads a sharded weight, and a new one at the next that reads a matrix.
    """
    if not flow.training or flow.plan.zero_stage != 3:
        return ()
    graph = flow.graph
    blocked = {i for block in blocks for i in range(block.first, block.end)}
    found: list[range] = []
    first = last = -1
    for i, node in enumerate(graph.nodes):
        mine = [n for n in node.inputs if n and is_gathered(flow, n)]
        if first >= 0 and (i in blocked or any(len(graph.tensors[n].shape) > 1 for n in mine)):
            found.append(range(first, last + 1))
            first = -1
        if mine and i not in blocked:
            first, last = (i if first < 0 else first), i
    if first >= 0:
        found.append(range(first, last + 1))
    return tuple(found)


def recomputed_blocks(
    flow: Flow, blocks: tuple[RepeatedBlock, ...]
) -> Iterator[tuple[RepeatedBlock, Recomputed]]:
    """What recomputed blocks run a second time, for one repeat of each."""
    outer = flow
    for block in blocks:
        outer = outer_flow(outer, block)
    for block in blocks if flow.plan.recompute != "none" else ():
        replay = recomputed_in_block(inner_flow(outer, block), block)
        if replay:
            yield block, replay
