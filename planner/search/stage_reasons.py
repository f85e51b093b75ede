"""Why pipeline stages that a user asks for are not possible, with pins that would do instead."""

from __future__ import annotations

from dataclasses import dataclass

from planner.execution.orthogonalising import FLAT_BUFFERS
from planner.execution.techniques import DUALPIPE, INTERLEAVED, MAX_ZERO_STAGE, SCHEDULES, ZB_H1
from planner.search.request import Request

Reason = tuple[str, list[str]]
"""What stands against the stages, "" where nothing does, and pins that would do instead."""


@dataclass(frozen=True)
class AskedStages:
    """Pipeline stages of a mesh, and what a model has for them.

    batch: samples of a step. stages: of the mesh. most_stages: as many as the graph may have.
    blocks: repeats of the block that is assigned to stages, None where the graph is cut anywhere.
    training: whether the graph is trained; orthogonalised: whether its optimizer orthogonalises
    whole matrices. divides: whether a schedule has chunks for all stages. chunks: numbers of
    virtual stages that are tried.
    """

    request: Request
    batch: int
    stages: int
    most_stages: int
    blocks: int | None
    training: bool
    orthogonalised: bool
    divides: bool
    chunks: tuple[int, ...]


def reason_against(asked: AskedStages) -> Reason:
    """The first reason against the stages."""
    techniques, stages = asked.request.pins.techniques, asked.stages
    schedule = str(techniques.get("schedule", SCHEDULES[0]))
    virtual = int(techniques.get("virtual", 1))
    micro = int(techniques.get("microbatches", 0))
    zero_stage = int(techniques.get("zero_stage", 0))
    if asked.most_stages < stages:
        devices = asked.request.topology.devices
        fewer = next((n for n in range(asked.most_stages, 1, -1) if devices % n == 0), 0)
        return _too_few(asked), [f"pp={fewer}"] if fewer else []
    if schedule == DUALPIPE and (reason := _no_dualpipe(asked)):
        return reason, [f"schedule={SCHEDULES[0]}"]
    if schedule == ZB_H1 and (reason := _no_weights_apart(asked)):
        return reason, [f"schedule={SCHEDULES[0]}"]
    if asked.blocks is None and not asked.divides:
        return (
            f"the model is cut into {asked.most_stages} virtual stages at most, {stages}"
            f" stages of {_virtual_stages(asked, virtual)} each have more",
            [f"virtual={fewer}"] if (fewer := asked.most_stages // stages) > 1 else [],
        )
    if asked.blocks is None and techniques.get("recompute", "block") != "block":
        return (
            "stages without a block in common recompute their forward pass (recompute=block),"
            f" pinned is {techniques['recompute']}",
            ["recompute=block"],
        )
    if zero_stage > MAX_ZERO_STAGE[schedule]:
        return _excess_zero_stage(asked, schedule, zero_stage)
    if micro == 1:
        return (
            "they need at least two microbatches, pinned is one",
            [f"micro={stages}"] if asked.batch % stages == 0 else [],
        )
    if asked.blocks is not None and not asked.divides:
        return _undivided(asked, asked.blocks, virtual)
    if (schedule == INTERLEAVED or virtual > 1) and micro % stages:
        whole_groups = -(-micro // stages) * stages
        return (
            f"virtual stages pass groups of {stages} microbatches, and {micro} do not"
            " divide into them",
            [f"micro={whole_groups}"] if asked.batch % whole_groups == 0 else [],
        )
    return "", []


def _too_few(asked: AskedStages) -> str:
    """Why the graph has too few places for stages."""
    if not asked.training:
        return "it is run, not trained"
    if asked.blocks is not None:
        return f"the model has {asked.blocks} repeated blocks"
    most = asked.most_stages
    why = f", and is cut into {most} stages at most" if most else ""
    if asked.orthogonalised:
        why = f", and {FLAT_BUFFERS}"
    return f"the model has no repeated blocks{why}"


def _no_dualpipe(asked: AskedStages) -> str:
    """Why microbatches do not enter at both ends of the stages, "" where they may."""
    if asked.request.runtime.kernels is None:
        return f"{DUALPIPE} is priced as frameworks run it (--runtime megatron), not emitted"
    if asked.stages % 2:
        return f"{DUALPIPE} pairs stages, and {asked.stages} are odd"
    return ""


def _no_weights_apart(asked: AskedStages) -> str:
    """Why stages have no gradients of weights apart from their backward pass, "" where they may."""
    runtime = asked.request.runtime
    if runtime.kernels is not None:
        return f"{ZB_H1} is emitted, and --runtime {runtime.name} is priced as that framework runs"
    if asked.blocks is None:
        return f"{ZB_H1} is for stages of equal blocks, and these are cut between nodes"
    return ""


def _excess_zero_stage(asked: AskedStages, schedule: str, zero_stage: int) -> Reason:
    """Why a schedule cannot take the pinned ZeRO stage."""
    highest = MAX_ZERO_STAGE[schedule]
    sharded = asked.request.pins.mesh.get("fsdp", ())  # which is ZeRO-3 by its name
    instead = [
        f"dp={sharded[0]},zero={highest}" if sharded else f"zero={highest}",
        *(f"schedule={s}" for s in SCHEDULES if zero_stage <= MAX_ZERO_STAGE[s]),
    ]
    what = f"under {schedule} the ZeRO stage is at most {highest}, pinned is {zero_stage}"
    return what, instead[:2]


def _undivided(asked: AskedStages, blocks: int, virtual: int) -> Reason:
    """Why so many repeated blocks do not divide into stages."""
    stages = asked.stages
    other = next((v for v in range(2, blocks // stages + 1) if blocks % (stages * v) == 0), 0)
    return (
        f"{blocks} repeated blocks do not divide into {stages} stages of"
        f" {_virtual_stages(asked, virtual)} virtual stages",
        [f"virtual={other}"] if other else [],
    )


def _virtual_stages(asked: AskedStages, virtual: int) -> str:
    """How many virtual stages a stage may have."""
    return str(virtual) if virtual > 1 else " or ".join(map(str, asked.chunks))
