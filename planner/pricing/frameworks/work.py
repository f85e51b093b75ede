"""What the program of a plan does on one device, read from its flow for
costmodels.frameworks.step_time.

The flow is the emitted program's, so that collectives and their bytes are those of
planner.execution.collectives; how they and the kernels follow one another is the framework's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

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
        again=_kernels(base, flow, stages, pricer, again=True),
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
        orthogonalising_flops=max(stage_sums(base, flow, stages, orthogonalising_flops(flow))),
    )


def merged_uses(
    flow: Flow, runs: tuple[RepeatedBlock, ...], pricer: Pricer
) -> tuple[CollectiveUse, ...]:
    """The collectives of a flow, equal ones as one: whom they serve does not matter. Gradients have
    the parameters' type there, and may be sent in a wider one. Sequences are read in the order of
    a balanced ring: no halves change places; matrices stay whole on one of the replicas
    (planner.pricing.frameworks.orthogonalising)."""
    counts: dict[CollectiveUse, int] = {}
    recipe = pricer.recipe
    wider = recipe.reduction_bytes / recipe.parameter_bytes
    for use in collectives.collectives(flow, runs, pricer.itemsize):
        if use.halved or use.of_matrices:
            continue
        alike = replace(use, what="", count=0)
        if use.phase == "gradient" and use.kind in SUMS:
            alike = replace(alike, payload_bytes=int(use.payload_bytes * wider))
        counts[alike] = counts.get(alike, 0) + use.count
    return tuple(replace(use, count=n) for use, n in counts.items())


def expert_axes(base: GraphFacts, flow: Flow) -> tuple[str, ...]:
    """Axes that experts are cut over, of the first mixture."""
    i, _ = next(expert_nodes(base.graph), (-1, 0))
    split = flow.split(i) if i >= 0 else Split()
    names = ("e", *base.rules[i].paired) if i >= 0 else ()
    return tuple(dict.fromkeys(a for name in names for a in split.axes(name)))


def _kernels(
    base: GraphFacts, flow: Flow, stages: StageAssignment, pricer: Pricer, *, again: bool = False
) -> tuple[tuple[str, float, KernelNeed], ...]:
    """Work.kernels; again: Work.again, none where the plan has none."""
    counts: dict[tuple[int, Split, str], float] = {}
    if again and flow.plan.recompute != "block-keep":
        return ()
    for i, node in enumerate(base.graph.nodes):
        if not operator_of(node.op).free and (not again or made_again(base, i, pricer.runtime)):
            place = stages.place(i)
            key = (base.shared[i], flow.split(i), place)
            counts[key] = counts.get(key, 0.0) + (1 / stages.repeats if place == BLOCKS else 1.0)
    needs: dict[tuple[str, KernelNeed], float] = {}
    for (i, split, place), n in counts.items():
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
    local = dict.fromkeys(flow.weights, 0.0)
    for n, w in flow.weights.items():
        if n in flow.grad:
            layout = cut_layout(w) if w.zero_stage >= 2 else w.layout
            local[n] = float(prod(local_shape(graph.tensors[n].shape, layout, mesh)))
    return tuple(stage_sums(base, flow, stages, local))


def _updated(
    base: GraphFacts, flow: Flow, stages: StageAssignment, *, matrices: bool = False
) -> float:
    """Parameters that the fullest stage updates. matrices: in matrices that are orthogonalised."""
    mesh = dict(flow.plan.mesh)
    local = {
        n: float(prod(local_shape(flow.graph.tensors[n].shape, cut_layout(w), mesh)))
        if n in flow.grad and (not matrices or n in flow.graph.orthogonalised)
        else 0.0
        for n, w in flow.weights.items()
    }
    return max(stage_sums(base, flow, stages, local))


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
