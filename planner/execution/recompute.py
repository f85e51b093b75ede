"""What the backward pass reads, and so what a rematerialised function computes, gathers and
communicates a second time.

A block (or part) that is wrapped saves only some values from its forward pass; the rest of what its
backward pass reads is recomputed. Dead code is not: a sum of which only the shape mattered does not
run again. `find_recomputed` follows that demand through one function:

    mode "all"   ("block")       nothing but the arguments is saved
    mode "keep"  ("block-keep")  arguments and the results of collectives are saved
    named        ("save:q,k,v")  as "all", and values of these names are saved as they are made, of
                 pending sums what the reduction on the way to a reader leaves
    mode "part"  (ZeRO stage 3 without recomputation)  everything is saved except gathered
                 weights

In every mode, and where nothing is wrapped (`recomputed_reshards`), backward passes of gated units
make again what is inside (planner.execution.gated_units).

`reads` is the one table of derivatives: which operands the gradient of an operator needs. Verified
against compiled programs by benchmarks/compiler_truth.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from planner.execution.block_values import kept_by_name, settles
from planner.execution.gated_units import GatedUnits, gated_units
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, inner_flow, outer_flow
from planner.execution.odd_heads import wide_nodes
from planner.execution.save_policies import is_named
from planner.graph.ir import Graph, Node
from planner.ops import operator_of
from planner.ops.control import inner_gradients, region, trips
from planner.ops.cost import Dots, Product
from planner.ops.residuals import reads
from planner.sharding.layout import ReshardStep, group
from planner.sharding.rule import Rule


@dataclass
class Recomputed:
    """What runs a second time.

    steps: (tensor, beginning of a reshard path) whose last step runs again. nodes: recomputed
    kernels (value: whether their result is needed, not only what they compute inside). weights:
    gathered again. saved: results of collectives that are saved instead (mode "keep"), and of named
    values also results of kernels, at the beginning of their paths.
    """

    steps: dict[tuple[str, tuple[ReshardStep, ...]], None] = field(default_factory=dict)
    nodes: dict[int, bool] = field(default_factory=dict)
    weights: dict[str, None] = field(default_factory=dict)
    saved: dict[tuple[str, tuple[ReshardStep, ...]], None] = field(default_factory=dict)


def find_recomputed(
    flow: Flow,
    inside: Sequence[int],
    mode: str,
    arguments: Iterable[str] = (),
    named: Collection[str] = (),
) -> Recomputed:
    """The second run of nodes `inside`, wrapped as `mode` says. flow: as it is inside the function
    (`planner.execution.loops.inner_flow`). arguments: tensors that arrive in their source layout
    and are resharded inside (what a block carries on). named: tensors that are saved by name.
    """
    graph, recomputed, units = flow.graph, Recomputed(), _units(flow)
    producer = {o: i for i in inside for o in graph.nodes[i].outputs if o}
    arguments = frozenset(arguments)
    queued: set[tuple[str, tuple[ReshardStep, ...]]] = set()
    queue: list[tuple[str, tuple[ReshardStep, ...]]] = []

    def want(i: int, slot: int) -> None:
        name = graph.nodes[i].inputs[slot]
        path = flow.trees[name].path(flow.need[i, slot])
        if (name, path) not in queued:
            queued.add((name, path))
            queue.append((name, path))

    def compute(i: int) -> None:
        if not recomputed.nodes.get(i) and i not in units.nodes:
            recomputed.nodes[i] = True
            for slot, name in enumerate(graph.nodes[i].inputs):
                if name:
                    want(i, slot)

    for i in inside:
        need = reads(graph.nodes[i], flow.grad)
        for slot in need.in_order:
            want(i, slot)
        of_kernel = need.inside or (need.slots and _exchanges(flow, i))
        if of_kernel and mode != "part" and not _is_named_whole(graph.nodes[i], named):
            recomputed.nodes.setdefault(i, False)
    while queue:
        name, path = queue.pop()
        if (
            name in graph.weights
            and name not in arguments
            and (mode == "all" or not any(step.forward for step in path))
        ):
            # What a collective made of a gathered weight has a name and is saved.
            recomputed.weights[name] = None
        if name in units.tensors:
            recomputed.steps.update(dict.fromkeys(_beginnings(name, path)))
            continue
        local = name in producer or name in arguments or name in graph.weights
        if mode == "part" or not local:
            continue
        end = _saved_at(path, by_name := name in named, mode == "keep")
        recomputed.steps.update(dict.fromkeys(_beginnings(name, path)[: len(path) - end]))
        if end or (by_name and name in producer):
            recomputed.saved[name, path[:end]] = None
        elif name in producer:
            compute(producer[name])
    return recomputed


def _is_named_whole(node: Node, named: Collection[str]) -> bool:
    """Whether all that the backward pass needs of a node's kernel is saved by name."""
    return operator_of(node.op).names_itself and all(o in named for o in node.outputs if o)


def _saved_at(path: tuple[ReshardStep, ...], named: bool, collectives: bool) -> int:
    """How much of a path leads to the last of its steps whose result is saved, 0 for none. named:
    of a value that is saved by name; collectives: of others what those make is saved."""
    for end in range(len(path), 0, -1):
        step = path[end - 1]
        if settles(step) if named else collectives and bool(step.forward):
            return end
    return 0


def recomputed_reshards(flow: Flow, inside: Iterable[int]) -> Recomputed:
    """What runs a second time although nothing wraps its nodes: reshards of what gated units make
    again (planner.execution.gated_units)."""
    graph, recomputed, units = flow.graph, Recomputed(), _units(flow)
    for i in inside if units.nodes else ():
        for slot, name in enumerate(graph.nodes[i].inputs):
            if name in units.tensors:
                path = flow.trees[name].path(flow.need[i, slot])
                recomputed.steps.update(dict.fromkeys(_beginnings(name, path)))
    return recomputed


def _units(flow: Flow) -> GatedUnits:
    return gated_units(flow.graph, flow.grad, flow.plan.repeated_blocks)


def _beginnings(
    name: str, path: tuple[ReshardStep, ...]
) -> list[tuple[str, tuple[ReshardStep, ...]]]:
    """The steps of a path, each with what leads to it, the last first."""
    return [(name, path[:end]) for end in range(len(path), 0, -1)]


def _exchanges(flow: Flow, i: int) -> bool:
    """Whether the kernel brings in pieces of operands that nothing saves: the backward pass, which
    reads them, brings them in again."""
    return any(
        not inner.kept and inner.axes(flow.split(i), flow.plan.order)
        for inner in flow.rules[i].inner
    )


def products(flow: Flow, i: int) -> tuple[Product, ...]:
    """The dots of node i on one device, padding included."""
    rule = flow.rules[i]
    split, mesh = flow.split(i), dict(flow.plan.mesh)
    local = rule.work(split, mesh) if rule.flops else {}
    share = {f: Fraction(local[f], n) for f, n in rule.sizes.items() if n and rule.flops}
    pairs = {name: group(split.axes(name), mesh) for name in rule.paired}
    dots_of_node = dots(flow.graph, i, rule, flow.grad, share, pairs)
    if rule.fringe and flow.graph.nodes[i].inputs[0] in flow.grad:
        beyond = Fraction(rule.beyond(split, mesh))
        dots_of_node = tuple(replace(dot, beyond=dot.flops * beyond) for dot in dots_of_node)
    if rule.flops and (wide := wide_nodes(flow).get(i)):
        added = Fraction(wide, local["n"])
        dots_of_node = tuple(replace(dot, computed=added) for dot in dots_of_node)
    node = flow.graph.nodes[i]
    filling, trained = operator_of(node.op).filling, not flow.grad.isdisjoint(node.outputs)
    if filling is not None:
        filled = filling(node, rule, split, mesh, trained)
        return tuple(replace(dot, flops=dot.flops * filled) for dot in dots_of_node)
    return dots_of_node


def dots(
    graph: Graph,
    i: int,
    rule: Rule,
    grad: frozenset[str],
    share: Mapping[str, Fraction] | None = None,
    pairs: Mapping[str, int] | None = None,
) -> tuple[Product, ...]:
    """The dots of node i. share, pairs: what a device has (`planner.ops.cost.Dots`; None: the
    whole). Backward: one dot per operand with a gradient."""
    node = graph.nodes[i]
    if not rule.flops:
        return ()
    share = share or {}
    if node.bodies:
        return _inner_dots(graph, i, share, grad)
    flows = any(o in grad for o in node.outputs)
    trained = frozenset(k for k, n in enumerate(node.inputs) if flows and n in grad)
    asked = Dots(node, rule, graph.shapes(node.inputs), trained, share, pairs or {})
    products = operator_of(node.op).products
    return products(asked) if products else (Product(asked.flops, len(trained)),)


def _inner_dots(
    graph: Graph, i: int, share: Mapping[str, Fraction], grad: frozenset[str]
) -> tuple[Product, ...]:
    """The dots of the heaviest body of a node with bodies, in all its iterations."""
    node = graph.nodes[i]
    inside = region(node, graph)
    b = max(range(len(node.bodies)), key=lambda k: sum(r.flops for r in inside.rules[k]))
    body, hot = (
        node.bodies[b],
        (inner_gradients(node, b, grad) if any(o in grad for o in node.outputs) else frozenset()),
    )
    collected = []
    for j, rule in enumerate(inside.rules[b]):
        shares = {f: share.get(inside.inside[b][j].get(f, ""), Fraction(1)) for f in rule.sizes}
        collected += [
            replace(dot, flops=dot.flops * trips(node), inside=True)
            for dot in dots(body, j, rule, hot, shares)
        ]
    return tuple(collected)


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
        kept_by_name(flow),
    )


def block_mode(flow: Flow) -> str:
    """How the functions of repeated blocks are wrapped: "all", "keep", "part" or "" (not at
    all)."""
    if not flow.training:
        return ""
    if is_named(flow.plan.recompute):
        return "all"
    return {"block": "all", "block-keep": "keep"}.get(
        flow.plan.recompute, "part" if flow.plan.zero_stage == 3 else ""
    )


def is_gathered(flow: Flow, name: str) -> bool:
    """Whether a weight is stored in pieces and gathered where it is used (ZeRO stage 3)."""
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
    parts: list[range] = []
    first = last = -1
    for i, node in enumerate(graph.nodes):
        gathered = [n for n in node.inputs if n and is_gathered(flow, n)]
        if first >= 0 and (i in blocked or any(len(graph.tensors[n].shape) > 1 for n in gathered)):
            parts.append(range(first, last + 1))
            first = -1
        if gathered and i not in blocked:
            first, last = (i if first < 0 else first), i
    if first >= 0:
        parts.append(range(first, last + 1))
    return tuple(parts)


def recomputed_blocks(
    flow: Flow, blocks: tuple[RepeatedBlock, ...]
) -> Iterator[tuple[RepeatedBlock, Recomputed]]:
    """What recomputed blocks run a second time, for one repeat of each."""
    outer = flow
    for block in blocks:
        outer = outer_flow(outer, block)
    for block in blocks if flow.plan.recompute != "none" else ():
        recomputed = recomputed_in_block(inner_flow(outer, block), block)
        if recomputed:
            yield block, recomputed
