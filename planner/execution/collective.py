"""One collective of a program, and those of a reshard path, a kernel, a gradient and a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from planner.execution.layout_flow import Flow
from planner.execution.pipeline import Schedule
from planner.execution.recompute import Recomputed, is_gathered
from planner.execution.shared_collectives import Merged
from planner.execution.techniques import ZB_H1
from planner.execution.zero_stages import weight_collectives_of
from planner.graph.ir import DTYPE_BYTES, Graph, Node
from planner.ops.lookup import unread_gradients
from planner.sharding.layout import STAGE, Axes, ReshardStep, group
from planner.sharding.rule import KernelCollective, Rule, Split

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
    as solvers price every weight by itself)"""
    stacked: int = 1
    """of how many equal ones, itself among them, one array is: the same weight of so many repeats
    of a block"""
    strided: bool = False
    """between two layouts of a tensor: its pieces may lie along an inner dim"""
    place: str = ""
    """of collectives that kernels wait for: before | blocks | after the repeated blocks that are
    assigned to pipeline stages"""
    inside: bool = False
    """whether it runs inside a kernel"""
    halved: bool = False
    """whether it brings halves of a device's positions in the order of a balanced ring, or back"""
    looped: bool = False
    """of a weight under ZeRO stage 3: whether it runs in a loop over repeated blocks, or waits for
    nothing while one does"""
    joined: float = 1.0
    """of a weight under ZeRO stage 3: its part of its block's weights, which GPU compilers gather
    and scatter together, up to the size of their buckets"""

    @property
    def of_matrices(self) -> bool:
        """Whether the collective makes pieces whole matrices, which the optimizer orthogonalises,
        or back."""
        return self.phase == "optimizer" and not self.bucketed

    @property
    def total_bytes(self) -> int:
        """Payload of one optimizer step."""
        return self.payload_bytes * self.count

    def of(self, what: str) -> CollectiveUse:
        """The same collective for another tensor."""
        return CollectiveUse(
            kind=self.kind,
            axes=self.axes,
            payload_bytes=self.payload_bytes,
            count=self.count,
            phase=self.phase,
            what=what,
            bucketed=self.bucketed,
            merged=self.merged,
            stacked=self.stacked,
            strided=self.strided,
            place=self.place,
            inside=self.inside,
            looped=self.looped,
            joined=self.joined,
        )


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
    }.get(dtype) or DTYPE_BYTES[dtype]


def item_sizes(compute: str) -> ItemSize:
    """Bytes per element of a graph's dtype in a program that computes in `compute`."""
    if compute == "float32":
        return float32_sizes
    halved = ("float64", "float32", "bfloat16", "float16")
    return lambda dtype: 2.0 if dtype in halved else float32_sizes(dtype)


def microbatch_tensors(flow: Flow) -> frozenset[str]:
    """Tensors that microbatches do not share: those that depend on an input of the graph, or on a
    weight gathered in each microbatch."""
    graph, gathered = flow.graph, frozenset(n for n in flow.weights if is_gathered(flow, n))
    key = "microbatch tensors", gathered
    if key not in graph.memo:
        graph.memo[key] = frozenset(graph.reached((*graph.inputs, *gathered)))
    known: frozenset[str] = graph.memo[key]
    return known


def first_result(graph: Graph, i: int) -> str:
    """The first result of node i."""
    return next(o for o in graph.nodes[i].outputs if o)


def path_collectives(
    flow: Flow,
    name: str,
    path: tuple[ReshardStep, ...],
    times: tuple[int, int],
    equal: Merged,
    size: ItemSize,
    place: str,
) -> Iterator[CollectiveUse]:
    """The collectives of the last step of a reshard path, which runs so often forward and so often
    backward; none where an equal one runs in its place, nor backward where no gradient comes."""
    forward, backward = times
    nothing_back = (name, path) in equal.backward or not _brings_gradient(flow, name, path)
    yield from _step_collectives(
        flow,
        name,
        path[-1],
        (0 if (name, path) in equal.forward else forward, 0 if nothing_back else backward),
        size,
        place,
    )


def _brings_gradient(flow: Flow, name: str, path: tuple[ReshardStep, ...]) -> bool:
    """Whether a gradient comes back on a reshard path: none does where all that read its end only
    choose by it (a router's scores on their way to the choice of experts)."""
    if name not in unread_gradients(flow.graph, flow.grad):
        return True
    return any(
        not flow.grad.isdisjoint(flow.graph.nodes[i].outputs)
        for i, slot in flow.graph.consumers[name]
        if (need := flow.need.get((i, slot))) is None
        or flow.trees[name].path(need)[: len(path)] == path
    )


def _step_collectives(
    flow: Flow,
    name: str,
    step: ReshardStep,
    times: tuple[int, int],
    size: ItemSize,
    place: str,
    forward_phase: str = "forward",
) -> Iterator[CollectiveUse]:
    """The collectives of one step on a tensor that runs so often forward and so often backward."""
    itemsize = size(flow.graph.tensors[name].dtype)
    what = flow.graph.labels.get(name, name)
    forward, backward = times
    if step.forward and forward:
        yield CollectiveUse(
            kind=step.forward,
            axes=step.axes,
            payload_bytes=int(step.forward_elements * itemsize),
            count=forward,
            phase=forward_phase,
            what=what,
            strided=True,
            place=place,
        )
    if step.backward and backward and name in flow.grad:
        yield CollectiveUse(
            kind=step.backward,
            axes=step.axes,
            payload_bytes=int(step.backward_elements * itemsize),
            count=backward,
            phase="backward",
            what=what,
            strided=True,
            place=place,
        )


def recomputed_collectives(
    flow: Flow,
    recomputed: Recomputed | None,
    mode: str,
    times: Callable[[str], int],
    equal: Merged,
    size: ItemSize,
    place: str,
) -> Iterator[CollectiveUse]:
    """Collectives of a function's forward pass that its backward pass runs again. mode: how it is
    wrapped (planner.execution.recompute); times: how often what a tensor needs runs."""
    if recomputed is None:
        return
    for name, path in recomputed.steps:
        if (name, path) not in equal.forward:
            yield from _step_collectives(
                flow, name, path[-1], (times(name), 0), size, place, "recompute"
            )
    for i, wanted in recomputed.nodes.items() if mode in ("all", "keep") else ():
        count = times(first_result(flow.graph, i))
        for use in kernel_collectives(flow, i, count, size, place, mode, wanted):
            if use.phase == "forward":
                yield replace(use, phase="recompute")


class InnerCollective(NamedTuple):
    """A collective inside a kernel: bytes each time, and how often it runs in the forward and in
    the backward pass of one microbatch. differentiated: whether it has a backward pass."""

    of: KernelCollective
    axes: Axes
    payload_bytes: int
    forward: int
    backward: int
    differentiated: bool


def inner_collectives(
    node: Node,
    rule: Rule,
    split: Split,
    grad: frozenset[str],
    mesh: Mapping[str, int],
    itemsize: float,
) -> Iterator[InnerCollective]:
    """The collectives inside a node's kernel under a split. mesh: axis -> size, outermost first;
    itemsize: bytes of an element. Their backward pass is that of a node and an operand with a
    gradient."""
    over = [(inner, axes) for inner in rule.inner if (axes := inner.axes(split, mesh))]
    if not over:
        return
    local = rule.local(split, mesh)
    trained = not grad.isdisjoint(node.outputs)
    for inner, axes in over:
        if inner.runs(local):
            devices = group(axes, mesh)
            forward, backward = inner.times(devices, local)
            differentiated = trained and (inner.operand < 0 or node.inputs[inner.operand] in grad)
            yield InnerCollective(
                of=inner,
                axes=axes,
                payload_bytes=inner.payload_bytes(local, devices, itemsize),
                forward=forward,
                backward=backward if differentiated else 0,
                differentiated=differentiated,
            )


def kernel_collectives(
    flow: Flow,
    i: int,
    times: int,
    size: ItemSize,
    place: str,
    recomputed: str = "",
    wanted: bool = True,
) -> Iterator[CollectiveUse]:
    """Collectives inside a node's kernel. recomputed: how its function is wrapped, for what its
    second run has; wanted: whether that makes the node's result."""
    node, mesh = flow.graph.nodes[i], dict(flow.plan.mesh)
    for inner in inner_collectives(
        node, flow.rules[i], flow.split(i), flow.grad, mesh, size("float32")
    ):
        if (recomputed == "keep" and inner.of.kept) or (inner.of.for_result and not wanted):
            continue
        for phase, runs in (("forward", inner.forward), ("backward", inner.backward)):
            if phase == "forward" or inner.differentiated:
                yield CollectiveUse(
                    kind=inner.of.kind,
                    axes=inner.axes,
                    payload_bytes=inner.payload_bytes,
                    count=times * runs,
                    phase=phase,
                    what=node.id,
                    place=place,
                    inside=True,
                    halved=inner.of.halved,
                )


@dataclass(frozen=True)
class WeightArray:
    """A weight that trains or is gathered, or a buffer of several, on one device. full: bytes
    before the ZeRO stage cuts them over `zero_axes`; piece: after that; rest: the other axes over
    which its gradient is partial; share: its part of its block's weights."""

    what: str
    zero_stage: int
    zero_axes: Axes
    rest: Axes
    full: int
    piece: int
    share: float = 1.0
    trained: bool = True


def weight_collectives(
    array: WeightArray,
    microbatches: int,
    functions: Mapping[str, int] | None = None,
    stacked: tuple[int, int] = (1, 1),
    merged: bool = False,
    looped: Container[str] = (),
) -> Iterator[CollectiveUse]:
    """The reduction of a gradient, and the gathering of a sharded parameter.

    microbatches: how often a gradient that is scattered in every microbatch is. functions: under
    ZeRO stage 3, how many functions run those of each phase. stacked: of how many equal arrays it
    is one when the optimizer runs, and in each microbatch. merged: an equal gradient is reduced in
    its place. looped: under ZeRO stage 3, phases that run beside a loop over blocks.
    """
    for c in weight_collectives_of(array.zero_stage, array.trained):
        axes = array.zero_axes if c.cut else array.rest
        if axes:
            yield CollectiveUse(
                kind=c.kind,
                axes=axes,
                payload_bytes=array.full if c.cut else array.piece,
                count=(microbatches if c.per_microbatch else 1)
                * (functions[c.phase] if functions and c.cut else 1),
                phase=c.phase,
                what=array.what,
                bucketed=c.bucketed,
                merged=merged and c.bucketed and c.phase == "gradient",
                stacked=stacked[c.per_microbatch] if c.bucketed else 1,
                looped=array.zero_stage == 3 and c.cut and c.phase in looped,
                joined=array.share if array.zero_stage == 3 and c.cut else 1.0,
            )


def handover_collectives(
    what: str, payload: int, schedule: Schedule, forward_ticks: int, microbatches: int = 1
) -> Iterator[CollectiveUse]:
    """A tensor on its way to the next pipeline stage in so many ticks, and its gradient on the way
    back, of so many microbatches each. Between two stages the last way back is a loop of one tick,
    which compilers unroll: nobody reads what it sends. Under zb-h1 so is the last way forward of as
    many microbatches as stages."""
    alone = schedule.kind == ZB_H1 and schedule.microbatches == schedule.stages
    unread = schedule.kind in ("1f1b", ZB_H1) and schedule.stages == 2
    for phase, ticks in (("forward", forward_ticks - alone), ("backward", schedule.ticks - unread)):
        yield CollectiveUse(
            kind="collective-permute",
            axes=(STAGE,),
            payload_bytes=payload,
            count=ticks * microbatches,
            phase=phase,
            what=what,
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
    totals: dict[str, dict[str, dict[str, int | Fraction]]] = {}
    for (kind, axes), payload in total.items():
        cell = totals.setdefault(kind, {}).setdefault(
            "+".join(a for a in order if a in axes), {"payload": 0, "wire": Fraction(0)}
        )
        n = group(axes, mesh)
        sent = Fraction(payload) if kind == "collective-permute" else Fraction(payload * (n - 1), n)
        cell["payload"] += payload
        cell["wire"] += sent * (2 if kind == "all-reduce" else 1)
    return totals
