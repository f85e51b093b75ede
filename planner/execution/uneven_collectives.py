"""The exact communication, arithmetic and bytes of a program with uneven pipeline stages
(planner.execution.uneven_pipeline), as planner.execution.collectives has them of other programs.

In a tick every device runs the forward pass of one of its stage's chunks, and the backward pass of
one, or one of both. What is counted is the heaviest chunk's of either: the others wait for it. A
chunk but the last runs what its backward pass reads a second time there; the last has its forward
pass there alone, and but under 1f1b nothing to do once its microbatches are through, S - 1 ticks
before the others'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod

from planner.execution.collective import (
    CollectiveUse,
    ItemSize,
    WeightArray,
    handover_collectives,
    kernel_collectives,
    path_collectives,
    recomputed_collectives,
    traffic,
    weight_collectives,
)
from planner.execution.layout_flow import Flow
from planner.execution.odd_heads import wide_nodes
from planner.execution.pipeline import Schedule
from planner.execution.recompute import Recomputed, find_recomputed, products, recomputed_reshards
from planner.execution.shared_collectives import Merged, merged
from planner.execution.stage_buffers import buffers
from planner.execution.uneven_pipeline import (
    UnevenPipeline,
    buffer_elements,
    handed_tensors,
    stage_flow,
    uneven_pipeline_of,
)
from planner.sharding.layout import STAGE, ReshardTree, local_shape


@dataclass(frozen=True)
class ChunkTick:
    """What a place does in a tick with a chunk. forward, backward: collectives of all its
    microbatches; recomputed: what the backward pass runs a second time, None of the last chunk."""

    flow: Flow
    forward: tuple[CollectiveUse, ...]
    backward: tuple[CollectiveUse, ...]
    recomputed: Recomputed | None
    microbatches: int


@dataclass(frozen=True)
class _Chunk:
    """What of a chunk no sizes of types change. flow: of its stage; trees: of what it reads and
    makes; equal: reshards that run once; recomputed: as in `ChunkTick`."""

    flow: Flow
    trees: Mapping[str, ReshardTree]
    equal: Merged
    recomputed: Recomputed | None


def uneven_schedule(flow: Flow) -> Schedule:
    """How microbatches pass through the stages of a plan; where stages take several places, as many
    microbatches as the widest has go together."""
    plan = flow.plan
    return Schedule(
        len(plan.stage_widths) or plan.stages,
        plan.microbatches // max(plan.stage_widths, default=1),
        plan.schedule,
        plan.virtual_stages,
    )


def idle_ticks_of_last_chunk(p: Schedule) -> int:
    """Ticks with backward passes in which the last chunk runs none."""
    return 0 if p.kind == "gpipe" else p.first_backward


@dataclass(frozen=True)
class TickGroup:
    """Ticks in which the same chunks run at the same time, one a stage: the way they run, whether
    it is the bubble that these ticks make, how many ticks."""

    forward: bool
    bubble: bool
    chunks: tuple[int, ...]
    ticks: int


def chunks_at(p: Schedule, tick: int, *, forward: bool) -> tuple[int, ...]:
    """The chunks that run a pass of a tick, by stage. The last one runs no backward pass of
    microbatches that do not exist."""
    work = p.forward if forward else p.backward
    numbers = (work(stage, tick)[1] * p.stages + stage for stage in range(p.stages))
    left_out = (
        p.stages * p.virtual_stages - 1
        if not forward and p.kind != "gpipe" and tick >= p.ticks
        else -1
    )
    return tuple(k for k in numbers if k != left_out)


@cache
def tick_groups(p: Schedule) -> tuple[TickGroup, ...]:
    """All ticks, forward and backward passes apart. The bubble is the first forward passes, and the
    last backward ones."""
    counts: Counter[tuple[bool, bool, tuple[int, ...]]] = Counter()
    for n in range(p.ticks):
        if n < p.read_ticks:
            counts[True, n < p.stages - 1, chunks_at(p, n, forward=True)] += 1
        chunks = chunks_at(p, p.first_backward + n, forward=False)
        counts[False, n >= p.ticks - (p.stages - 1), chunks] += 1
    return tuple(TickGroup(*key, count) for key, count in counts.items())


def chunk_ticks(flow: Flow, size: ItemSize) -> tuple[ChunkTick, ...]:
    """The work of every chunk, worked out once a flow."""
    key = "chunk ticks", size
    if key not in flow.memo:
        stages, chunks = uneven_stages(flow), _chunks(flow)
        flow.memo[key] = tuple(
            _tick(chunk, stages.nodes[k], stages.microbatches_per_place(k), size)
            for k, chunk in enumerate(chunks)
        )
    known: tuple[ChunkTick, ...] = flow.memo[key]
    return known


def uneven_stages(flow: Flow) -> UnevenPipeline:
    """The stages of a plan that has some."""
    stages = uneven_pipeline_of(flow)
    assert stages is not None
    return stages


def _chunks(flow: Flow) -> tuple[_Chunk, ...]:
    """Every chunk, whatever the sizes of types: worked out once a flow."""
    if "chunks" not in flow.memo:
        stages = uneven_stages(flow)
        flow.memo["chunks"] = tuple(_chunk(flow, stages, k) for k in range(stages.count))
    known: tuple[_Chunk, ...] = flow.memo["chunks"]
    return known


def _chunk(flow: Flow, stages: UnevenPipeline, k: int) -> _Chunk:
    inside, nodes, last = stage_flow(flow, stages, k), stages.nodes[k], k + 1 == stages.count
    graph, entering = flow.graph, stages.entering[k]
    results = [o for i in nodes for o in graph.nodes[i].outputs if o]
    read = [n for i in nodes for n in graph.nodes[i].inputs if n and n not in graph.constants]
    names = dict.fromkeys((*entering, *results, *read))
    trees = {n: inside.trees[n] for n in names if n in inside.trees}
    equal = merged(inside, nodes, trees, stages.leaving(k))
    recomputed = None if last else find_recomputed(inside, nodes, "all", (*entering, *graph.inputs))
    return _Chunk(inside, trees, equal, recomputed)


def _tick(chunk: _Chunk, nodes: tuple[int, ...], microbatches: int, size: ItemSize) -> ChunkTick:
    """The work of a chunk in a tick."""
    inside, equal = chunk.flow, chunk.equal
    forward, backward = list[CollectiveUse](), list[CollectiveUse]()
    # the last chunk runs both passes at once
    in_pass = backward if chunk.recomputed is None else forward
    for name, tree in chunk.trees.items():
        for path in tree.paths():
            in_pass += path_collectives(inside, name, path, (1, 0), equal, size, "blocks")
            backward += path_collectives(inside, name, path, (0, 1), equal, size, "blocks")
    for i in nodes:
        uses = [*kernel_collectives(inside, i, 1, size, "blocks")]
        in_pass += [use for use in uses if use.phase == "forward"]
        backward += [use for use in uses if use.phase != "forward"]
    recomputed = chunk.recomputed or recomputed_reshards(inside, nodes)
    backward += recomputed_collectives(
        inside, recomputed, "all", lambda name: 1, equal, size, "blocks"
    )

    def of_all(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
        return tuple(replace(u, count=u.count * microbatches) for u in uses if u.total_bytes)

    return ChunkTick(inside, of_all(forward), of_all(backward), chunk.recomputed, microbatches)


def collectives(flow: Flow, size: ItemSize) -> Iterator[CollectiveUse]:
    """Every collective of one optimizer step, of each pass those of the chunk that sends the
    most."""
    ticks, schedule = chunk_ticks(flow, size), uneven_schedule(flow)
    idle = idle_ticks_of_last_chunk(schedule)
    forward, backward = [t.forward for t in ticks], [t.backward for t in ticks]
    for of_chunks, times in (
        (forward, schedule.read_ticks),
        (backward, schedule.ticks - idle),
        (backward[:-1], idle),
    ):
        if times:
            heaviest = max(of_chunks, key=lambda uses: _ring_bytes(flow, uses))
            yield from (replace(u, count=u.count * times) for u in heaviest)
    yield from collectives_between_stages(flow, size)


def collectives_between_stages(flow: Flow, size: ItemSize) -> Iterator[CollectiveUse]:
    """What stages hand to each other and back, the loss, and gradients of packed weights."""
    stages, schedule = uneven_stages(flow), uneven_schedule(flow)
    together = stages.microbatches_per_tick
    for axes, elements in buffer_elements(handed_tensors(flow, stages)).items():
        what = "what stages hand on" + (f" ({'+'.join(axes)})" if axes else "")
        payload = int(elements * size("float32"))
        yield from handover_collectives(what, payload, schedule, schedule.read_ticks, together)

    def in_step(kind: str, payload: int, count: int, phase: str, what: str) -> CollectiveUse:
        return CollectiveUse(
            kind=kind, axes=(STAGE,), payload_bytes=payload, count=count, phase=phase, what=what
        )

    yield in_step("all-reduce", 8, 1, "forward", "loss and its weight")
    mesh = dict(flow.plan.mesh)
    for b in (b for b in buffers(flow, stages) if b.trained):
        array = WeightArray(
            what=b.key,
            zero_stage=b.zero_stage,
            zero_axes=b.zero_axes,
            rest=b.rest,
            full=int(b.length * size(b.dtype)),
            piece=int(b.state_length(mesh) * size(b.dtype)),
        )
        yield from weight_collectives(array, schedule.ticks)
        if together > 1:
            yield in_step("collective-permute", array.piece, together - 1, "gradient", b.key)


def _ring_bytes(flow: Flow, uses: tuple[CollectiveUse, ...]) -> Fraction:
    """Bytes on the wire."""
    cells = traffic(uses, flow.plan.order, dict(flow.plan.mesh))
    return sum(
        (Fraction(cell["wire"]) for axes in cells.values() for cell in axes.values()), Fraction(0)
    )


def flops_by_index(flow: Flow, *, as_compiled: bool = True) -> dict[int, Fraction]:
    """2MNK per node, device and step, of the heaviest chunk forward and the heaviest backward;
    where not as compiled without what is recomputed, of the stage that has the most."""
    stages, p = uneven_stages(flow), uneven_schedule(flow)
    fewer = idle_ticks_of_last_chunk(p)
    forward_flops, backward_flops = list[dict[int, Fraction]](), list[dict[int, Fraction]]()
    known: dict[tuple[object, ...], tuple[Fraction, Fraction]] = {}
    for k, chunk in enumerate(_chunks(flow)):
        microbatches = stages.microbatches_per_place(k)
        chunk_forward, chunk_backward = dict[int, Fraction](), dict[int, Fraction]()
        for i in stages.nodes[k]:
            alike = _alike(chunk, i)
            if alike not in known:
                known[alike] = _flops(chunk, i, as_compiled)
            node_forward, node_backward = known[alike]
            if chunk.recomputed is not None:
                chunk_forward[i] = node_forward * microbatches
            chunk_backward[i] = node_backward * microbatches
        forward_flops.append(chunk_forward)
        backward_flops.append(chunk_backward)
    if as_compiled:
        passes = [
            (_heaviest(forward_flops), p.read_ticks),
            (_heaviest(backward_flops), p.ticks - fewer),
            (_heaviest(backward_flops[:-1]), fewer),
        ]
    else:
        work_of_stage: list[list[tuple[dict[int, Fraction], int]]] = [[] for _ in range(p.stages)]
        for row in tick_groups(p):
            for k in row.chunks:
                work_of_stage[stages.stage_of_chunk(k)].append(
                    ((forward_flops if row.forward else backward_flops)[k], row.ticks)
                )
        passes = max(
            work_of_stage, key=lambda rows: sum(sum(work.values()) * times for work, times in rows)
        )
    total: dict[int, Fraction] = {}
    for flops, times in passes:
        for i, of_node in flops.items():
            total[i] = total.get(i, Fraction(0)) + of_node * times
    return {i: of_node for i, of_node in total.items() if of_node}


def _alike(chunk: _Chunk, i: int) -> tuple[object, ...]:
    """All that `_flops` reads of a node: nodes of a class have their rule in common."""
    flow, recomputed = chunk.flow, chunk.recomputed
    node = flow.graph.nodes[i]
    trained = tuple([n in flow.grad for n in (*node.inputs, *node.outputs)])
    runs_again = None if recomputed is None else recomputed.nodes.get(i, "not")
    return id(flow.rules[i]), flow.split(i), trained, wide_nodes(flow).get(i), runs_again


def _flops(chunk: _Chunk, i: int, as_compiled: bool) -> tuple[Fraction, Fraction]:
    """2MNK of a node's passes forward and backward, of one microbatch; both are backward ones in
    the last chunk."""
    dots = products(chunk.flow, i)
    forward = sum((dot.counted(as_compiled) for dot in dots), Fraction(0))
    backward = sum(
        (
            dot.counted(as_compiled)
            * (dot.backward + as_compiled * (dot.recomputed - dot.multiplied))
            + dot.beyond
            for dot in dots
        ),
        Fraction(0),
    )
    if chunk.recomputed is None:
        backward += forward
    elif as_compiled and i in chunk.recomputed.nodes:
        whole = chunk.recomputed.nodes[i]
        backward += sum((dot.counted(True) for dot in dots if whole or dot.inside), Fraction(0))
    return forward, backward


def _heaviest(passes: list[dict[int, Fraction]]) -> dict[int, Fraction]:
    return max(passes, key=lambda flops: sum(flops.values()))


def parameter_bytes(flow: Flow, size: ItemSize, *, trained: bool = False) -> int:
    """Bytes of the buffers a device has its part of; of trained weights alone."""
    return int(
        sum(
            b.length * size(b.dtype)
            for b in buffers(flow, uneven_stages(flow))
            if b.trained or not trained
        )
    )


def state_elements(flow: Flow) -> int:
    """Elements that a device has the optimizer's state of."""
    return sum(
        b.state_length(dict(flow.plan.mesh))
        for b in buffers(flow, uneven_stages(flow))
        if b.trained
    )


def chunk_weight_bytes(flow: Flow, stages: UnevenPipeline, k: int, size: ItemSize) -> float:
    """Bytes of chunk k's weights as its nodes read them, beside the buffers: XLA cuts each out of
    them."""
    mesh = dict(flow.plan.mesh)
    return sum(
        prod(local_shape(flow.graph.tensors[n].shape, flow.weights[n].layout, mesh))
        * size(flow.graph.tensors[n].dtype)
        for n in stages.weights(k)
    )
