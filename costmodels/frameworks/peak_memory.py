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
from dataclasses import dataclass, field

from costmodels.capacity import Breakdown
from costmodels.frameworks.step_time import AFTER, BEFORE, BLOCKS, DUALPIPE, GPIPE
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
    layers that come before the blocks, on the first stage. recomputed: of `results` what recompute
    with saved collectives makes again (planner.pricing.frameworks.kernels.made_again). schedule: of
    pipeline stages. overlapped: another microbatch runs beside exchanges of experts' rows.
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
    recomputed: Mapping[tuple[str, str], float] = field(default_factory=dict)
    schedule: str = ""
    overlapped: bool = False


def in_flight(
    stage: int, stages: int, microbatches: int, virtual: int, schedule: str = "1f1b"
) -> float:
    """Microbatches, counted by all blocks of a stage, whose backward pass is to come: p - s of
    stage s of p under 1F1B; with v virtual stages each (interleaved 1F1B) it starts 2 (p - 1 - s) +
    (v - 1) p + 1 passes of a virtual stage before the first comes back. All under GPipe."""
    if schedule == GPIPE and stages > 1:
        return microbatches
    if virtual == 1:
        return min(microbatches, stages - stage)
    started = 2 * (stages - 1 - stage) + (virtual - 1) * stages + 1
    return min(microbatches * virtual, started) / virtual


def beside_more(blocks: int, stages: int, virtual: int) -> float:
    """Microbatches, counted by all blocks of a stage, that are in flight beside those of the
    schedule where the forward pass of one runs beside the backward pass of another: a pass of a
    virtual stage more before the first comes back (NVIDIA/Megatron-LM, pipeline_parallel/
    schedules.py), without stages a block."""
    return 1 / virtual if stages > 1 else 1 / max(1, blocks)


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


def stays(role: str, kernels: Kernels) -> float:
    """What stays saved of a result that is made again, as a multiple of it: of a norm what it
    reads, as far as the residual stream does not count that."""
    return max(0.0, 1 - kernels.saved.get("residual", 0.0)) if role == "norm" else 0.0


def remade_bytes(memory: FrameworkMemory, kernels: Kernels) -> dict[str, float]:
    """The part of `saved_bytes` that recompute with saved collectives makes again."""
    again = dict.fromkeys((BEFORE, BLOCKS, AFTER), 0.0)
    for (place, role), size in memory.recomputed.items():
        again[place] += max(0.0, kernels.saved.get(role, 0.0) - stays(role, kernels)) * size
    return again


def _waiting(
    memory: FrameworkMemory, s: int, saved: Mapping[str, float], kernels: Kernels
) -> tuple[float, float]:
    """Bytes that stage s saves of one microbatch, and those of its largest layer that are made
    again while that runs backward."""
    again = dict.fromkeys(saved, 0.0)
    if memory.recompute != "none":
        again = remade_bytes(memory, kernels) if memory.recompute == "block-keep" else dict(saved)
    entering = memory.entering

    def layer(place: str, layers: int) -> float:
        """Of one layer: nothing but what enters it where all is made again."""
        return (saved[place] - again[place]) / layers or entering

    # One block is on its way to the host's memory or back.
    on_device = memory.stage_blocks[s] * (1 - kernels.offloaded_share) + (
        kernels.offloaded_share > 0
    )
    waiting, remade = entering + on_device * layer(BLOCKS, 1), again[BLOCKS]
    if s == 0 and memory.layers_before:
        waiting += memory.layers_before * layer(BEFORE, memory.layers_before)
        remade = max(remade, again[BEFORE] / memory.layers_before)
    return waiting, remade


def _stage(
    memory: FrameworkMemory, s: int, saved: Mapping[str, float], runtime: Runtime, kernels: Kernels
) -> Breakdown:
    """Peak memory of stage s (module docstring). Under DualPipe a device holds what stage s and the
    one as far from the other end hold, and as many microbatches as there are stages, and one."""
    stages = len(memory.stage_blocks)
    last, slack = stages - 1, 1 + runtime.memory_slack
    stages_here = (s, last - s) if memory.schedule == DUALPIPE else (s,)
    flight = in_flight(s, stages, memory.microbatches, runtime.interleave, memory.schedule)
    flight = (
        flight if len(stages_here) == 1 else min(memory.microbatches, stages + 1) / len(stages_here)
    )
    if memory.overlapped:
        flight += beside_more(memory.stage_blocks[s], stages, runtime.interleave)
    waiting = [_waiting(memory, k, saved, kernels) for k in stages_here]
    activations = flight * sum(size for size, _ in waiting)
    again = max(size for _, size in waiting)
    workspace = 0.0  # what a block's backward pass makes beside what is saved
    if not kernels.flash:
        workspace = memory.scores.get(BLOCKS, 0.0) * (
            kernels.score_workspace + kernels.score_saved * kernels.recomputes_scores
        )
    logits = (
        memory.logits * (kernels.logit_saved + kernels.logit_gathered * (memory.pieces > 0))
        + memory.pieces * kernels.logit_piece
    )
    points = (workspace + again, (logits + saved[AFTER]) * (last in stages_here))
    temporary = max(points) + runtime.pinned * min(points) + 2 * memory.gathered
    # Of one microbatch gradients come as what was saved goes.
    gradients = sum(memory.gradients[k] for k in stages_here)
    if memory.microbatches == 1:
        gradients = max(0.0, gradients - activations)
    return Breakdown(
        parameters=int(sum(memory.parameters[k] for k in stages_here)),
        gradients=int(gradients),
        optimizer=int(
            sum(memory.state[k] for k in stages_here) / len(stages_here)
        ),  # of twice the replicas
        activations=int(activations * (slack + (runtime.pipeline_slack if last else 0.0))),
        temporary=int(temporary * slack + runtime.overhead_bytes),
    )
