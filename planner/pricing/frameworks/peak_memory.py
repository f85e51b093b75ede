"""What a stage of a framework's program holds (runtime profiles `megatron` and `fsdp`;
planner.pricing.frameworks.price prices their time).

The flow is read once (`held_of`); `peak` puts the bytes together under a profile's few constants,
so that these can be fitted to which runs fitted.

    peak of stage s = parameters + gradients + optimizer state + overhead
                      + (1 + slack) * (gathered weights + larger moment + pinned * smaller moment) +
                      (1 + slack + pipeline slack) * in flight * (kept of its blocks + what it is
                      given)

Moments of the backward pass: loss and head; a block computed again. The second begins when the
first is over, but an allocator that hands out parts of what it once got cannot serve all of one
from what the other left: `pinned` of the smaller stays beside the larger. Slack is what lies unused
between tensors; a pipeline adds to it, whose microbatches free what they keep in the order in which
they made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from costmodels.capacity import Breakdown
from costmodels.runtimes import Runtime
from planner.analysis.facts import GraphFacts
from planner.execution.layout_flow import Flow, cut_layout, stored_layout
from planner.pricing.frameworks.kernels import role
from planner.pricing.frameworks.stages import of_stage, stage_sums
from planner.pricing.frameworks.step_time import AFTER, BEFORE, BLOCKS, Deal
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Layout, local_shape


@dataclass(frozen=True)
class FrameworkMemory:
    """What a device holds of a plan, whatever its kernels keep.

    blocks, parameters, gradients, state: of each stage, the last three in bytes. gathered: bytes of
    the most weights that ZeRO stage 3 brings together at a time. results: (place, role) ->
    bytes of the local results of one microbatch, of the blocks one. wide: place -> bytes that
    norms' results have more where they are read than where they are made. scores: place -> elements
    of attention's scores. logits: their elements; pieces: those of the local piece, where the loss
    gathers what devices have pieces of, else 0. entering: bytes that enter a block.
    """

    blocks: tuple[int, ...]
    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    state: tuple[float, ...]
    gathered: float
    results: Mapping[tuple[str, str], float]
    wide: Mapping[str, float]
    scores: Mapping[str, float]
    logits: float
    pieces: float
    entering: float
    microbatches: int
    recompute: str


def held_of(base: GraphFacts, flow: Flow, deal: Deal, pricer: Pricer) -> FrameworkMemory:
    """Read a flow; of the pricer only types and mesh matter."""
    graph, mesh, recipe = base.graph, dict(flow.plan.mesh), pricer.recipe
    own, gradients, state = dict[str, float](), dict[str, float](), dict[str, float]()
    for n, w in flow.weights.items():
        t = graph.tensors[n]
        stored, full, cut = (
            float(prod(local_shape(t.shape, x, mesh)))
            for x in (stored_layout(w), w.layout, cut_layout(w))
        )
        own[n] = stored * (recipe.parameter_bytes if t.is_float else pricer.itemsize(t.dtype))
        gradients[n] = (
            (cut if w.zero_stage >= 2 and w.zero_dim >= 0 else full)
            * recipe.gradient_bytes
            * (n in flow.grad)
        )
        state[n] = cut * recipe.state_bytes * (n in flow.grad)
    parameters, grads, states = (
        tuple(stage_sums(base, flow, deal, x)) for x in (own, gradients, state)
    )
    results, wide, scores, logits, pieces, entering = (
        dict[tuple[str, str], float](),
        dict[str, float](),
        dict[str, float](),
        0.0,
        0.0,
        0.0,
    )
    period = (deal.end - deal.first) // deal.repeats
    for i, node in enumerate(graph.nodes):
        place, kind = deal.place(i), role(graph, i)
        if place == BLOCKS and i >= deal.first + period:
            continue
        out = next(o for o in node.outputs if o)
        size = _local_bytes(flow, out, flow.source[out], pricer)
        if kind == "norm":
            whole = max(
                (
                    _local_bytes(flow, out, flow.need[j, slot], pricer)
                    for j, slot in graph.consumers.get(out, ())
                ),
                default=size,
            )
            wide[place] = wide.get(place, 0.0) + whole - size
        if kind == "CrossEntropyLoss":
            whole, piece = (
                prod(local_shape(graph.tensors[node.inputs[0]].shape, x, mesh))
                for x in (flow.need[i, 0], flow.source[node.inputs[0]])
            )
            logits, pieces = logits + whole, pieces + (piece if piece < whole else 0)
        elif place != AFTER or kind == "norm":  # the head's product leaves the logits
            results[place, kind] = results.get((place, kind), 0.0) + size
        if kind == "attention":
            q, k, _ = (
                local_shape(graph.tensors[n].shape, flow.need[i, slot], mesh)
                for slot, n in enumerate(node.inputs[:3])
            )
            scores[place] = scores.get(place, 0.0) + q[0] * q[1] * q[2] * k[2]
        if place == BLOCKS and kind == "residual":
            entering = size
    return FrameworkMemory(
        deal.blocks,
        parameters,
        grads,
        states,
        _gathered(base, flow, deal, pricer),
        results,
        wide,
        scores,
        logits,
        pieces,
        entering,
        flow.plan.microbatches,
        flow.plan.recompute,
    )


def _gathered(base: GraphFacts, flow: Flow, deal: Deal, pricer: Pricer) -> float:
    """Bytes of the weights that ZeRO stage 3 brings together at a time: one block's, or those
    outside."""
    found: dict[str, float] = {}
    mesh = dict(flow.plan.mesh)
    for name, place in of_stage(base, flow, deal):
        w = flow.weights[name]
        if w.zero_stage == 3 and w.zero_dim >= 0:
            found[place] = (
                found.get(place, 0.0)
                + prod(local_shape(flow.graph.tensors[name].shape, w.layout, mesh))
                * pricer.recipe.parameter_bytes
            )
    return max(found.values(), default=0.0)


def _local_bytes(flow: Flow, name: str, layout: Layout, pricer: Pricer) -> float:
    tensor = flow.graph.tensors[name]
    return prod(local_shape(tensor.shape, layout, dict(flow.plan.mesh))) * pricer.itemsize(
        tensor.dtype
    )


def in_flight(s: int, stages: int, microbatches: int, chunks: int) -> float:
    """Microbatches, counted by all blocks of stage s, whose backward pass is to come: p - s under
    1F1B; with v chunks of blocks a stage (interleaved 1F1B) it starts 2 (p - 1 - s) + (v - 1) p + 1
    passes of a chunk before the first comes back."""
    if chunks == 1:
        return min(microbatches, stages - s)
    return min(microbatches * chunks, 2 * (stages - 1 - s) + (chunks - 1) * stages + 1) / chunks


def peak(held: FrameworkMemory, runtime: Runtime) -> Breakdown:
    """Peak memory of the stage that needs the most."""
    kernels = runtime.kernels
    assert kernels is not None
    kept = {
        place: held.wide.get(place, 0.0) * kernels.gathered for place in (BEFORE, BLOCKS, AFTER)
    }
    for (place, kind), size in held.results.items():
        kept[place] += kernels.kept.get(kind, 0.0) * size
    inside = 0.0  # what a block's backward pass makes beside what is kept
    if not kernels.flash:
        inside = held.scores.get(BLOCKS, 0.0) * (
            kernels.score_made + kernels.score_kept * kernels.again
        )
        for place, elements in held.scores.items():
            kept[place] += elements * kernels.score_kept * (not kernels.again)
    logits = (
        held.logits * (kernels.logit_kept + kernels.logit_gathered * (held.pieces > 0))
        + held.pieces * kernels.logit_piece
    )
    last, worst, again = len(held.blocks) - 1, Breakdown(0, 0, 0, 0, 0), held.recompute != "none"
    slack = 1 + runtime.memory_slack
    for s, blocks in enumerate(held.blocks):
        flight = in_flight(s, len(held.blocks), held.microbatches, runtime.interleave)
        given = held.entering * (not kernels.offloaded)
        here = blocks * (1 - kernels.hosted) + (
            kernels.hosted > 0
        )  # one on its way to the host's memory or back
        activations = flight * (given + here * (given if again else kept[BLOCKS]))
        moments = (inside + (kept[BLOCKS] if again else 0.0), (logits + kept[AFTER]) * (s == last))
        temporary = max(moments) + runtime.pinned * min(moments) + 2 * held.gathered
        # Of one microbatch gradients come as what was kept goes.
        gradients = (
            held.gradients[s]
            if held.microbatches > 1
            else max(0.0, held.gradients[s] - activations)
        )
        parts = (
            held.parameters[s],
            gradients,
            held.state[s],
            activations * (slack + (runtime.pipeline_slack if last else 0.0)),
            temporary * slack + runtime.overhead_bytes,
        )
        worst = max(worst, Breakdown(*(int(x) for x in parts)), key=lambda b: b.total)
    return worst
