"""ZeRO stages, and the collectives that each asks for a weight: one table, read by the
census of a plan's collectives and by the prices of all ways that a weight may lie."""

from __future__ import annotations

from dataclasses import dataclass

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class WeightCollective:
    """A collective for one weight.

    cut: over the axes that the ZeRO stage cuts it over; else over those that are left of the axes
    its gradient is pending over. per_microbatch: it runs in every microbatch, else once a step.
    bucketed: it may travel with others (`CollectiveUse.bucketed`). phase: as in `CollectiveUse`.
    """

    kind: str
    phase: str
    cut: bool = True
    per_microbatch: bool = False
    bucketed: bool = True


_REDUCE = WeightCollective("all-reduce", "gradient", cut=False)
_SCATTER = WeightCollective("reduce-scatter", "gradient")
_SCATTER_EACH = WeightCollective("reduce-scatter", "gradient", per_microbatch=True)
_GATHER = WeightCollective("all-gather", "optimizer")
WEIGHT_COLLECTIVES: dict[int, tuple[WeightCollective, ...]] = {
    0: (_REDUCE,),
    1: (_SCATTER, _GATHER, _REDUCE),
    2: (_SCATTER_EACH, _GATHER, _REDUCE),
    3: (
        WeightCollective("all-gather", "forward", per_microbatch=True, bucketed=False),
        WeightCollective("all-gather", "recompute", per_microbatch=True, bucketed=False),
        WeightCollective("reduce-scatter", "gradient", per_microbatch=True, bucketed=False),
        _REDUCE,
    ),
}
"""Per ZeRO stage, in the order of a program. Under stage 3 parameters are gathered where they are
used, in the backward pass where that reads them, and nothing waits to travel with others."""


def weight_collectives_of(zero_stage: int, trained: bool) -> tuple[WeightCollective, ...]:
    """The collectives of a weight under a ZeRO stage: of a frozen one what gathers it under stage
    3, as it has neither a gradient to reduce nor a new value to hand out."""
    every = WEIGHT_COLLECTIVES[zero_stage]
    return every if trained else tuple(c for c in every if c.phase in ("forward", "recompute"))


def cut_by_repeats(zero_stage: int, size: int, pieces: int, ways: int, repeats: int) -> bool:
    """Whether ZeRO stages 1 and 2 cut a stack of so many repeats over so many ways by repeats
    instead of along a dim of each, of this size and in so many pieces then: the same bytes, but a
    collective along the first dim takes and leaves them in the order in which they lie, where one
    along another is compiled with copies in another order on both sides."""
    return zero_stage < 3 and size % pieces == 0 and repeats % ways == 0
