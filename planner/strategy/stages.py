"""Pipeline stages of a strategy, read from its file: how many, how many blocks and ticks each, and
in words."""

from __future__ import annotations

from costmodels.runtimes import as_framework
from planner.execution.techniques import SCHEDULE_WORDS
from planner.sharding.layout import STAGE
from planner.strategy.strategy import Strategy


def stages(strategy: Strategy) -> int:
    """Pipeline stages; 1 without a pipeline."""
    chosen = strategy.chosen
    places = dict(strategy.mesh_shape).get(STAGE, 1) if chosen.schedule else 1
    return len(chosen.stage_widths) or places


def ticks(strategy: Strategy) -> int:
    """Lock-step ticks in which pipeline stages run forward: one a microbatch and chunk (with stages
    of two places one for two microbatches), and the bubble."""
    chosen = strategy.chosen
    together = max(chosen.stage_widths, default=1)
    return chosen.microbatches // together * chosen.virtual_stages + stages(strategy) - 1


def lockstep(strategy: Strategy) -> bool:
    """Whether the stages are priced tick by tick, as emitted programs run; frameworks let each run
    as soon as it can."""
    return stages(strategy) > 1 and not as_framework(str(strategy.workload.get("runtime")))


def assigned_blocks(strategy: Strategy) -> tuple[int, int]:
    """(blocks a pipeline stage holds, blocks in all) of the repeated block that is assigned to
    stages; (0, 0) where the file names none."""
    return next(
        ((int(b["per_stage"]), int(b["repeats"])) for b in strategy.blocks if "per_stage" in b),
        (0, 0),
    )


def stages_words(strategy: Strategy) -> str:
    """`16 pipeline stages (1F1B, 6 blocks each)`; "" without a pipeline."""
    n, (per_stage, in_all) = stages(strategy), assigned_blocks(strategy)
    if n < 2:
        return ""
    chosen = strategy.chosen
    chunks = chosen.virtual_stages
    per_chunk = -(-per_stage // chunks)
    block_count = (
        f"{chunks} virtual stages of {per_chunk} block{'s' if per_chunk > 1 else ''}"
        if chunks > 1
        else f"{per_stage} block{'s' if per_stage > 1 else ''}"
    )
    even = per_stage * n == in_all and per_stage == per_chunk * chunks
    share = f", {'' if even else 'up to '}{block_count} each" if per_stage else ""
    if strategy.techniques.get("cuts"):
        wide = ":".join(map(str, chosen.stage_widths))
        share = (
            f", {chunks} virtual stages each"
            if chunks > 1
            else f", devices per stage {wide}"
            if wide
            else ""
        ) + ", cut where they balance"
    return f"{n} pipeline stages ({SCHEDULE_WORDS[chosen.schedule]}{share})"
