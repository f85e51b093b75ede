"""What the program of a plan does on one device, read from its flow for
costmodels.frameworks.step_time.

The flow is the emitted program's, so that collectives and their bytes are those of
planner.execution.collectives; how they and the kernels follow one another is the framework's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace
from math import prod
from operator import attrgetter

from costmodels.frameworks.kernels import KernelNeed
from costmodels.frameworks.step_time import (
    AFTER,
    BEFORE,
    BLOCKS,
    SUMS,
    CollectiveWork,
    HandedTensor,
    Work,
)
from planner.analysis.facts import GraphFacts
from planner.execution import collectives
from planner.execution.collective import CollectiveUse
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import RepeatedBlock, pipelined_block
from planner.execution.techniques import BESIDE
from planner.ops import operator_of
from planner.ops.expert_load import expert_nodes
from planner.pricing.frameworks.dispatch import dispatched
from planner.pricing.frameworks.kernels import need_of
from planner.pricing.frameworks.orthogonalising import orthogonalising_flops
from planner.pricing.frameworks.selective import made_again
from planner.pricing.frameworks.stages import StageAssignment, attentions_before, stage_sums
from planner.pricing.kernels import local_bytes
from planner.pricing.pricer import Pricer
from planner.sharding.layout import STAGE, local_shape
from planner.sharding.rule import Split


def work_of(
    base: GraphFacts,
    flow: Flow,
    runs: tuple[RepeatedBlock, ...],
    uses: Iterable[CollectiveUse],
    stages: StageAssignment,
    pricer: Pricer,
) -> Work:
    """Read a flow whose collectives are `uses`. pricer: for the mesh and the bytes of types; no
    rate of it matters."""
    micro = flow.plan.microbatches
    return Work(
        stage_blocks=stages.stage_blocks,
        repeats=stages.repeats,
        kernels=_kernels(base, flow, stages, pricer),
        recomputed=_kernels(base, flow, stages, pricer, recomputed=True),
        schedule=flow.plan.schedule,
        overlapped=flow.plan.exchanges == BESIDE,
        expert_axes=expert_axes(base, flow),
        collectives=tuple(_inside_stages(dispatched(base, flow, pricer, uses))),
        times=_times(stages, micro if base.training else 1),
        handed=_handed(flow, runs, stages, pricer),
        neighbours=pricer.topology.group(pricer.mesh, (STAGE,)) if stages.pipeline else (),
        gradient_elements=_summed(base, flow, stages),
        optimizer_elements=_updated(base, flow, stages) if base.training else 0.0,
        microbatches=micro if base.training else 1,
        recompute=flow.plan.recompute,
        layers_before=attentions_before(base, stages.first),
        optimizer_bytes_less=2
        * pricer.recipe.matrix_less_bytes
        * _updated(base, flow, stages, matrices=True),
        orthogonalising_flops=max(
            stage_sums(base, stages, lambda name: orthogonalising_flops(flow, name))
        ),
    )


def merged_uses(
    flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> tuple[CollectiveUse, ...]:
    """The collectives of a flow, equal ones as one: whom they serve does not matter. Gradients have
    the parameters' type there, and may be sent in a wider one. Sequences are read in the order of
    a balanced ring: no halves change places; matrices stay whole on one of the replicas
    (planner.pricing.frameworks.orthogonalising)."""
    wider = pricer.recipe.reduction_bytes / pricer.recipe.parameter_bytes
    alike: dict[tuple[object, ...], tuple[CollectiveUse, int]] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for use in collectives.collectives(flow, runs, pricer.itemsize):
        if use.halved or use.of_matrices:
            continue
        payload = use.payload_bytes
        if use.phase == "gradient" and use.kind in SUMS:
            payload = int(payload * wider)
        key = (payload, *_but_whom_and_size(use))
        alike.setdefault(key, (use, payload))
        counts[key] += use.count
    return tuple(
        replace(use, what="", payload_bytes=payload, count=counts[key])
        for key, (use, payload) in alike.items()
    )


_but_whom_and_size = attrgetter(
    *(f.name for f in fields(CollectiveUse) if f.name not in {"what", "count", "payload_bytes"})
)
"""What collectives have in common that may be counted as one, beside their bytes: records made and
hashed for each of a large model's thousands take most of a price."""


def expert_axes(base: GraphFacts, flow: Flow) -> tuple[str, ...]:
    """Axes that experts are cut over, of the first mixture."""
    i, _ = next(expert_nodes(base.graph), (-1, 0))
    split = flow.split(i) if i >= 0 else Split()
    names = ("e", *base.rules[i].paired) if i >= 0 else ()
    return tuple(dict.fromkeys(a for name in names for a in split.axes(name)))


def _kernels(
    base: GraphFacts,
    flow: Flow,
    stages: StageAssignment,
    pricer: Pricer,
    *,
    recomputed: bool = False,
) -> tuple[tuple[str, float, KernelNeed], ...]:
    """Work.kernels; recomputed: Work.recomputed, none where the plan has none."""
    if recomputed and flow.plan.recompute != "block-keep":
        return ()
    # By id: splits of repeats are one object, and take long to hash.
    counts: dict[tuple[int, int, str], float] = {}
    splits = {id(split): split for split in flow.splits}
    for i, (node, split) in enumerate(zip(base.graph.nodes, flow.splits, strict=True)):
        if not operator_of(node.op).free and (
            not recomputed or made_again(base, i, pricer.runtime)
        ):
            place = stages.place(i)
            key = (base.shared[i], id(split), place)
            counts[key] = counts.get(key, 0.0) + (1 / stages.repeats if place == BLOCKS else 1.0)
    needs: dict[tuple[str, KernelNeed], float] = {}
    for (i, number, place), n in counts.items():
        split = splits[number]
        need = need_of(base, i, split, *local_bytes(base, i, split, pricer), pricer)
        needs[place, need] = needs.get((place, need), 0.0) + n
    return tuple((place, n, need) for (place, need), n in needs.items())


def _inside_stages(uses: Iterable[CollectiveUse]) -> Iterable[CollectiveWork]:
    """Collectives among the devices of one stage."""
    for use in uses:
        if axes := tuple(a for a in use.axes if a != STAGE):
            yield CollectiveWork(
                kind=use.kind,
                axes=axes,
                payload_bytes=use.payload_bytes,
                count=use.count,
                phase=use.phase,
                place=use.place,
                bucketed=use.bucketed,
            )


def _times(stages: StageAssignment, microbatches: int) -> dict[str, int]:
    """Work.times. A pipeline's flow runs in lock-step ticks."""
    pipeline = stages.pipeline
    if pipeline is None:
        return {BEFORE: microbatches, BLOCKS: microbatches * stages.repeats, AFTER: microbatches}
    return {
        BEFORE: pipeline.ticks,
        BLOCKS: pipeline.ticks * pipeline.blocks_per_tick,
        AFTER: pipeline.epilogue_passes,
    }


def _summed(base: GraphFacts, flow: Flow, stages: StageAssignment) -> tuple[float, ...]:
    """Work.gradient_elements: of pieces from ZeRO stage 2 on, else of whole gradients."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)

    def local(name: str) -> float:
        w = flow.weights[name]
        layout = cut_layout(w) if w.zero_stage >= 2 else w.layout
        return float(prod(local_shape(graph.tensors[name].shape, layout, mesh)))

    return tuple(stage_sums(base, stages, lambda name: local(name) if name in flow.grad else 0.0))


def _updated(
    base: GraphFacts, flow: Flow, stages: StageAssignment, *, matrices: bool = False
) -> float:
    """Parameters that the fullest stage updates. matrices: in matrices that are orthogonalised."""
    graph, mesh = flow.graph, dict(flow.plan.mesh)

    def local(name: str) -> float:
        if name not in flow.grad or (matrices and name not in graph.orthogonalised):
            return 0.0
        layout = cut_layout(flow.weights[name])
        return float(prod(local_shape(graph.tensors[name].shape, layout, mesh)))

    return max(stage_sums(base, stages, local))


def _handed(
    flow: Flow, runs: tuple[RepeatedBlock, ...], stages: StageAssignment, pricer: Pricer
) -> tuple[HandedTensor, ...]:
    """Work.handed: what blocks carry from one to the next."""
    if stages.pipeline is None:
        return ()
    mesh, handed = dict(flow.plan.mesh), []
    for carry in pipelined_block(flow, runs, stages.pipeline).carries:
        tensor = flow.graph.tensors[carry.enters]
        size = prod(local_shape(tensor.shape, carry.layout, mesh)) * pricer.itemsize(tensor.dtype)
        cut = {a for axes in (*carry.layout.dims, carry.layout.partial) for a in axes}
        same = tuple(a for a, n in mesh.items() if n > 1 and a != STAGE and a not in cut)
        handed.append(HandedTensor(size, same, prod(mesh[a] for a in same)))
    return tuple(handed)
