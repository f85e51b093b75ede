"""One collective of a program, and how a tensor's way and a kernel come to theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from planner.execution.layout_flow import Flow
from planner.execution.recompute import Recomputed, is_gathered
from planner.execution.shared_collectives import Merged
from planner.graph.ir import DTYPE_BYTES, Graph
from planner.sharding.layout import Axes, ReshardStep, ReshardTree, group

ItemSize = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """A collective of the program: `payload_bytes` each time, `count` times per optimizer step."""

    kind: str
    axes: Axes
    payload_bytes: int
    count: int
    phase: str
    """forward | backward | gradient | optimizer | recompute"""
    what: str
    """the tensor (label) or node it serves"""
    bucketed: bool = False
    """the compiler may send it together with others like it: nothing waits for it but the
    optimizer, or the next step"""
    merged: bool = False
    """compilers send an equal one in its place: it takes no bytes (its seconds are still counted,
    as solvers price every weight for itself)"""
    stacked: int = 1
    """of how many equal ones, itself among them, one array is: the same weight of so many repeats
    of a block"""
    strided: bool = False
    """between two layouts of a tensor: its pieces may lie along an inner dim"""
    place: str = ""
    """of collectives that kernels wait for: before | blocks | after the repeated blocks that a
    pipeline deals out"""
    inside: bool = False
    """of a kernel"""

    @property
    def total_bytes(self) -> int:
        """Payload of one optimizer step."""
        return self.payload_bytes * self.count


def float32_sizes(dtype: str) -> float:
    """Bytes per element of a float32 program: 64-bit integers become 32-bit."""
    return {
        "float64": 4,
        "float32": 4,
        "bfloat16": 4,
        "float16": 4,
        "int64": 4,
        "uint64": 4,
        "bool": 1,
    }.get(dtype) or _plain(dtype)


def item_sizes(compute: str) -> ItemSize:
    """Bytes per element of a graph's dtype in a program that computes in `compute`."""
    if compute == "float32":
        return float32_sizes
    return lambda dtype: (
        2.0
        if dtype in ("float64", "float32")
        else float32_sizes(dtype)
        if dtype not in ("bfloat16", "float16")
        else 2.0
    )


def _plain(dtype: str) -> float:

    return DTYPE_BYTES[dtype]


def microbatch_tensors(flow: Flow) -> frozenset[str]:
    """Tensors that microbatches do not share: those that depend on an input of the graph, or on a
    weight gathered in each microbatch."""
    found = set(flow.graph.inputs) | {n for n in flow.weights if is_gathered(flow, n)}
    for node in flow.graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(o for o in node.outputs if o)
    return frozenset(found)


def first_result(graph: Graph, i: int) -> str:
    """A result of node i."""
    return next(o for o in graph.nodes[i].outputs if o)


def tree_collectives(
    flow: Flow, name: str, tree: ReshardTree, times: int, once: Merged, size: ItemSize, where: str
) -> Iterator[CollectiveUse]:
    for path in tree.paths():
        yield from path_collectives(flow, name, path, times, times, once, size, where)


def path_collectives(
    flow: Flow,
    name: str,
    path: tuple[ReshardStep, ...],
    times: int,
    forward_times: int,
    once: Merged,
    size: ItemSize,
    where: str,
) -> Iterator[CollectiveUse]:
    """The collectives of the last step of a way: backward so many times, forward so many."""
    yield from _step_collectives(
        flow,
        name,
        path[-1],
        0 if (name, path) in once.backward else times,
        0 if (name, path) in once.forward else forward_times,
        size,
        where,
    )


def _step_collectives(
    flow: Flow,
    name: str,
    step: ReshardStep,
    times: int,
    forward_times: int,
    size: ItemSize,
    where: str,
    forward_phase: str = "forward",
) -> Iterator[CollectiveUse]:
    tensor = flow.graph.tensors[name]
    what = flow.graph.labels.get(name, name)
    if step.forward and forward_times:
        yield CollectiveUse(
            step.forward,
            step.axes,
            int(step.forward_elements * size(tensor.dtype)),
            forward_times,
            forward_phase,
            what,
            strided=True,
            place=where,
        )
    if step.backward and times and name in flow.grad:
        yield CollectiveUse(
            step.backward,
            step.axes,
            int(step.backward_elements * size(tensor.dtype)),
            times,
            "backward",
            what,
            strided=True,
            place=where,
        )


def recomputed_collectives(
    flow: Flow,
    again: Recomputed | None,
    mode: str,
    times: Callable[[str], int],
    once: Merged,
    size: ItemSize,
    where: str,
) -> Iterator[CollectiveUse]:
    """Collectives of a function's forward pass that its backward pass runs again. mode: how it is
    wrapped (planner.execution.recompute); times: how often what a tensor needs runs."""
    if again is None:
        return
    for name, path in again.steps:
        if (name, path) in once.forward:
            continue
        yield from _step_collectives(flow, name, path[-1], 0, times(name), size, where, "recompute")
    for i, wanted in again.nodes.items() if mode in ("all", "keep") else ():
        for use in kernel_collectives(
            flow, i, times(first_result(flow.graph, i)), size, where, mode, wanted
        ):
            if use.phase == "forward":
                yield CollectiveUse(
                    use.kind,
                    use.axes,
                    use.payload_bytes,
                    use.count,
                    "recompute",
                    use.what,
                    place=where,
                    inside=True,
                )


def kernel_collectives(
    flow: Flow, i: int, times: int, size: ItemSize, where: str, again: str = "", wanted: bool = True
) -> Iterator[CollectiveUse]:
    """Collectives inside a node's kernel. again: how its function is wrapped, for what its second
    run has; wanted: whether that makes the node's result."""
    rule, split, node = flow.rules[i], flow.split(i), flow.graph.nodes[i]
    local = rule.local(split, dict(flow.plan.mesh))
    differentiated = any(o in flow.grad for o in node.outputs)
    for inner in rule.inner:
        axes = inner.axes(split, flow.plan.order)
        if axes and not (again == "keep" and inner.kept) and (wanted or not inner.for_result):
            devices = group(axes, dict(flow.plan.mesh))
            payload, (forward, backward) = (
                inner.payload_bytes(local, devices, size("float32")),
                inner.times(devices),
            )
            yield CollectiveUse(
                inner.kind,
                axes,
                payload,
                times * forward,
                "forward",
                node.id,
                place=where,
                inside=True,
            )
            if differentiated and (inner.operand < 0 or node.inputs[inner.operand] in flow.grad):
                yield CollectiveUse(
                    inner.kind,
                    axes,
                    payload,
                    times * backward,
                    "backward",
                    node.id,
                    place=where,
                    inside=True,
                )


def traffic(
    uses: Iterable[CollectiveUse], order: Axes, mesh: Mapping[str, int]
) -> dict[str, dict[str, dict[str, int | Fraction]]]:
    """kind -> axes (names in mesh order joined by +) -> {payload, wire} bytes per device and
    optimizer step; wire is the exact ring figure."""
    total: dict[tuple[str, Axes], int] = {}
    for use in uses:
        if not use.merged:
            total[use.kind, use.axes] = total.get((use.kind, use.axes), 0) + use.total_bytes
    out: dict[str, dict[str, dict[str, int | Fraction]]] = {}
    for (kind, axes), payload in total.items():
        cell = out.setdefault(kind, {}).setdefault(
            "+".join(a for a in order if a in axes), {"payload": 0, "wire": Fraction(0)}
        )
        n = group(axes, mesh)
        sent = Fraction(payload) if kind == "collective-permute" else Fraction(payload * (n - 1), n)
        cell["payload"] += payload
        cell["wire"] += sent * (2 if kind == "all-reduce" else 1)
    return out
