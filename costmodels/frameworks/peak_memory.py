"""Peak memory of a stage of a framework's program (runtime profiles `megatron` and `fsdp`), from a
record of what it holds.

    peak of stage s = parameters + gradients + optimizer state + overhead
                      + (1 + slack) * (gathered weights + larger point + pinned * smaller point)
                      + (1 + slack + pipeline slack) * in flight * (saved of its blocks + what
                      enters them)

Two points of the backward pass need the most beside what microbatches in flight save: loss and
head; a block that is recomputed. The second begins when the first is over, but an allocator that
hands out parts of what it once got cannot serve all of one from what the other left: `pinned` of
the smaller stays beside the larger. Slack is what lies unused between tensors; a pipeline adds to
it, whose microbatches free what they save in the order in which they made it.

The record does not depend on a profile's constants, so that these can be fitted to which runs
fitted (planner.calibrate.runs.keep); docs/published-runs.md has the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.capacity import Breakdown
from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS
from costmodels.runtimes import Kernels, Runtime


@dataclass(frozen=True)
class FrameworkMemory:
    """What a device holds of a plan, whatever its kernels save.

    stage_blocks, parameters, gradients, state: of each stage, the last three in bytes. gathered:
    bytes of the most weights that ZeRO stage 3 gathers at a time. results: (place, role) -> bytes
    of the local results of one microbatch, of the blocks one. norms_gathered: place -> bytes that
    norms' results have more where they are read than where they are made. scores: place -> elements
    of attention's scores. logits: their elements; pieces: those of the local piece, where the loss
    gathers what devices have pieces of, else 0. entering: bytes that enter a block. layers_before:
    layers that come before the blocks, on the first stage.
    """

    stage_blocks: tuple[int, ...]
    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    state: tuple[float, ...]
    gathered: float
    results: Mapping[tuple[str, str], float]
    norms_gathered: Mapping[str, float]
    scores: Mapping[str, float]
    logits: float
    pieces: float
    entering: float
    microbatches: int
    recompute: str
    layers_before: int = 0


def in_flight(stage: int, stages: int, microbatches: int, virtual: int) -> float:
    """Microbatches, counted by all blocks of a stage, whose backward pass is to come: p - s of
    stage s of p under 1F1B; with v virtual stages each (interleaved 1F1B) it starts 2 (p - 1 - s) +
    (v - 1) p + 1 passes of a virtual stage before the first comes back."""
    if virtual == 1:
        return min(microbatches, stages - stage)
    started = 2 * (stages - 1 - stage) + (virtual - 1) * stages + 1
    return min(microbatches * virtual, started) / virtual


def peak(memory: FrameworkMemory, runtime: Runtime) -> Breakdown:
    """Peak memory of the stage that needs the most."""
    kernels = runtime.kernels
    assert kernels is not None
    saved = saved_bytes(memory, kernels)
    stages = (_stage(memory, s, saved, runtime, kernels) for s in range(len(memory.stage_blocks)))
    return max((Breakdown(0, 0, 0, 0, 0), *stages), key=lambda b: b.total)


def saved_bytes(memory: FrameworkMemory, kernels: Kernels) -> dict[str, float]:
    """Place -> bytes saved for the backward pass of one microbatch, of the blocks one; logits
    aside."""
    saved = {
        place: memory.norms_gathered.get(place, 0.0) * kernels.saves_gathered
        for place in (BEFORE, BLOCKS, AFTER)
    }
    for (place, role), size in memory.results.items():
        saved[place] += kernels.saved.get(role, 0.0) * size
    if not kernels.flash:
        for place, elements in memory.scores.items():
            saved[place] += elements * kernels.score_saved * (not kernels.recomputes_scores)
    return saved


def _stage(
    memory: FrameworkMemory, s: int, saved: Mapping[str, float], runtime: Runtime, kernels: Kernels
) -> Breakdown:
    """Peak memory of stage s (module docstring)."""
    stages, recomputed = len(memory.stage_blocks), memory.recompute != "none"
    last, slack = stages - 1, 1 + runtime.memory_slack
    flight = in_flight(s, stages, memory.microbatches, runtime.interleave)
    entering = memory.entering
    # One block is on its way to the host's memory or back.
    on_device = memory.stage_blocks[s] * (1 - kernels.offloaded_share) + (
        kernels.offloaded_share > 0
    )
    activations = flight * (entering + on_device * (entering if recomputed else saved[BLOCKS]))
    again = saved[BLOCKS]
    if s == 0 and memory.layers_before:
        layer = saved[BEFORE] / memory.layers_before
        activations += flight * memory.layers_before * (entering if recomputed else layer)
        again = max(again, layer)
    workspace = 0.0  # what a block's backward pass makes beside what is saved
    if not kernels.flash:
        workspace = memory.scores.get(BLOCKS, 0.0) * (
            kernels.score_workspace + kernels.score_saved * kernels.recomputes_scores
        )
    logits = (
        memory.logits * (kernels.logit_saved + kernels.logit_gathered * (memory.pieces > 0))
        + memory.pieces * kernels.logit_piece
    )
    points = (workspace + (again if recomputed else 0.0), (logits + saved[AFTER]) * (s == last))
    temporary = max(points) + runtime.pinned * min(points) + 2 * memory.gathered
    # Of one microbatch gradients come as what was saved goes.
    gradients = (
        memory.gradients[s]
        if memory.microbatches > 1
        else max(0.0, memory.gradients[s] - activations)
    )
    return Breakdown(
        parameters=int(memory.parameters[s]),
        gradients=int(gradients),
        optimizer=int(memory.state[s]),
        activations=int(activations * (slack + (runtime.pipeline_slack if last else 0.0))),
        temporary=int(temporary * slack + runtime.overhead_bytes),
    )
