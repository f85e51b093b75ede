"""The exact communication, arithmetic and bytes of an emitted program, read from its flow (never from a cost model).

One `Use` per collective: kind, axes, payload of one device, how often it runs in an optimizer step, and why. Payload is what semantics call it:
operand bytes for all-reduce, reduce-scatter and all-to-all, result bytes for all-gather. `traffic` adds them up by kind and axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from planner.emit.runs import Run, inner_flow, outer_flow
from planner.flow import Flow, WeightPlan, cut_layout, stored_layout
from planner.layout import Axes, Layout, Step, Tree, group, local_shape

ItemSize = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Use:
    """A collective of the program: `payload_bytes` each time, `count` times per optimizer step."""

    kind: str
    axes: Axes
    payload_bytes: int
    count: int
    phase: str
    """forward | backward | gradient | optimizer | recompute"""
    what: str
    """the tensor (label) or node it serves"""

    @property
    def total_bytes(self) -> int:
        """Payload of one optimizer step."""
        return self.payload_bytes * self.count


def collectives(flow: Flow, runs: Iterable[Run] = (), itemsize: ItemSize | None = None) -> tuple[Use, ...]:
    """Every collective of one optimizer step (training) or one forward pass. `runs` as emitted (none: every node by itself)."""
    size = itemsize or float32_sizes
    return tuple(u for u in _uses(flow, tuple(runs), size) if u.payload_bytes and u.count)


def float32_sizes(dtype: str) -> float:
    """Bytes per element of a float32 program: 64-bit integers become 32-bit."""
    return {"float64": 4, "float32": 4, "bfloat16": 4, "float16": 4, "int64": 4, "uint64": 4, "bool": 1}.get(dtype) or _plain(dtype)


def _plain(dtype: str) -> float:
    from planner.graph import DTYPE_BYTES

    return DTYPE_BYTES[dtype]


def _uses(flow: Flow, runs: tuple[Run, ...], size: ItemSize) -> Iterator[Use]:
    micro = flow.plan.microbatches
    graph, mesh = flow.graph, dict(flow.plan.mesh)
    outer = flow
    for run in runs:
        outer = outer_flow(outer, run)
    inside = {i for run in runs for i in range(run.first, run.end)}
    made_inside = {o for i in inside for o in graph.nodes[i].outputs if o}
    own_weights = {n for run in runs for names in run.weights for n in names}
    last = {c.leaves[-1] for run in runs for c in run.carries}
    for name, tree in outer.trees.items():
        if (name in made_inside and name not in last) or name in own_weights or name in graph.constants:
            continue
        yield from _tree(outer, name, tree, micro, size)
    for i in range(len(graph.nodes)):
        if i not in inside:
            yield from _inner(flow, i, micro, size)
    for run in runs:
        times = micro * run.repeats
        body = inner_flow(outer, run)
        replay = flow.training and flow.plan.recompute == "block"
        local = {o for i in range(run.first, run.first + run.period) for o in graph.nodes[i].outputs if o}
        for name in (*sorted(local, key=lambda n: graph.producer[n]), *(c.enters for c in run.carries), *(names[0] for names in run.weights)):
            for use in _tree(body, name, body.trees[name], times, size):
                yield use
                if replay and use.phase == "forward":
                    yield Use(use.kind, use.axes, use.payload_bytes, use.count, "recompute", use.what)
        for i in range(run.first, run.first + run.period):
            for use in _inner(flow, i, times, size):
                yield use
                if replay and use.phase == "forward":
                    yield Use(use.kind, use.axes, use.payload_bytes, use.count, "recompute", use.what)
    if flow.training:
        for name, plan in flow.weights.items():
            if name in flow.grad:
                yield from _reduction(flow, name, plan, micro, size, mesh)


def _tree(flow: Flow, name: str, tree: Tree, times: int, size: ItemSize) -> Iterator[Use]:
    for step in tree.steps():
        yield from _step(flow, name, step, times, size)


def _step(flow: Flow, name: str, step: Step, times: int, size: ItemSize) -> Iterator[Use]:
    tensor = flow.graph.tensors[name]
    what = flow.graph.labels.get(name, name)
    for phase, kind, elements in (("forward", step.forward, step.forward_elements), ("backward", step.backward, step.backward_elements)):
        if kind and (phase == "forward" or name in flow.grad):
            yield Use(kind, step.axes, int(elements * size(tensor.dtype)), times, phase, what)


def _inner(flow: Flow, i: int, times: int, size: ItemSize) -> Iterator[Use]:
    rule, split, node = flow.rules[i], flow.split(i), flow.graph.nodes[i]
    local = rule.local(split, dict(flow.plan.mesh))
    differentiated = any(o in flow.grad for o in node.outputs)
    for inner in rule.inner:
        axes = tuple(a for a in flow.plan.order if a in split.axes(inner.factor))
        if axes:
            payload = inner.itemsize * prod(local[f] for f in inner.over)
            yield Use(inner.kind, axes, payload, times * inner.forward, "forward", node.id)
            if differentiated:
                yield Use(inner.kind, axes, payload, times * inner.backward, "backward", node.id)


def _reduction(flow: Flow, name: str, plan: WeightPlan, micro: int, size: ItemSize, mesh: Mapping[str, int]) -> Iterator[Use]:
    """The reduction of one weight's gradient and, with sharded state, the gathering of the parameter."""
    tensor = flow.graph.tensors[name]
    what = flow.graph.labels.get(name, name)
    full = int(prod(local_shape(tensor.shape, plan.layout, mesh)) * size(tensor.dtype))
    level = plan.zero if plan.dim >= 0 else 0
    piece = full // group(plan.axes, mesh) if level else full
    rest = tuple(a for a in plan.fan if not level or a not in plan.axes)
    if level == 3:
        again = 1 if flow.plan.recompute == "none" and not gathers_again(flow) else 2
        yield Use("all-gather", plan.axes, full, micro, "forward", what)
        yield Use("all-gather", plan.axes, full, micro * (again - 1), "recompute", what)
        yield Use("reduce-scatter", plan.axes, full, micro, "gradient", what)
    elif level:
        each = micro if level == 2 else 1
        yield Use("reduce-scatter", plan.axes, full, each, "gradient", what)
        yield Use("all-gather", plan.axes, full, 1, "optimizer", what)
    if rest:
        yield Use("all-reduce", rest, piece, micro if level == 2 else 1, "gradient", what)


def gathers_again(flow: Flow) -> bool:
    """Whether gathered weights are dropped after the forward pass and gathered again for the backward pass."""
    return flow.training and flow.plan.zero == 3


def traffic(uses: Iterable[Use], order: Axes, mesh: Mapping[str, int]) -> dict[str, dict[str, dict[str, int | Fraction]]]:
    """kind -> axes (names in mesh order joined by +) -> {payload, wire} bytes per device and optimizer step; wire is the exact ring figure."""
    out: dict[str, dict[str, dict[str, int | Fraction]]] = {}
    for use in uses:
        label = "+".join(a for a in order if a in use.axes)
        cell = out.setdefault(use.kind, {}).setdefault(label, {"payload": 0, "wire": Fraction(0)})
        n = group(use.axes, mesh)
        cell["payload"] += use.total_bytes
        cell["wire"] += Fraction(use.total_bytes * (n - 1), n) * (2 if use.kind == "all-reduce" else 1)
    return out


def dot_flops(flow: Flow, runs: Iterable[Run] = ()) -> int:
    """2MNK of every product per device and step: forward, and one product per operand that has a gradient."""
    total = 0
    mesh = dict(flow.plan.mesh)
    for i, node in enumerate(flow.graph.nodes):
        rule = flow.rules[i]
        if not rule.flops:
            continue
        local, share = rule.local(flow.split(i), mesh), Fraction(1)
        for f, n in rule.sizes.items():
            share *= Fraction(local[f], n)
        passes = 1
        if flow.training and any(o in flow.grad for o in node.outputs):
            passes += sum(1 for n in node.inputs if n in flow.grad)
        total += int(Fraction(rule.flops) * share) * passes
    return total * (flow.plan.microbatches if flow.training else 1)


def argument_bytes(flow: Flow, optimizer: str = "", size: ItemSize = float32_sizes) -> int:
    """Bytes of what one device passes to the step (training) or the forward pass: parameters, optimizer state, batch, step count."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)
    used = {n for node in graph.nodes for n in node.inputs}

    def local(name: str, layout: Layout, itemsize: float) -> int:
        return int(prod(local_shape(graph.tensors[name].shape, layout, mesh)) * itemsize)

    total = 4 if flow.training and optimizer == "adamw" else 0  # the step count
    for name, plan in flow.weights.items():
        if name in used:
            total += local(name, stored_layout(plan), size(graph.tensors[name].dtype))
            if flow.training and name in flow.grad and optimizer == "adamw":
                total += 2 * local(name, cut_layout(plan), 4)
    for name in graph.inputs:
        if name in used:
            total += local(name, flow.source[name], size(graph.tensors[name].dtype)) * (flow.plan.microbatches if flow.training else 1)
    return total
