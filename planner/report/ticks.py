"""What each pipeline stage does in every lock-step tick, as planner.execution.pipeline says and
emitted programs do.

1f1b    stages - 1 ticks forward; microbatches ticks forward, head and loss, backward; stages - 1
ticks backward
interleaved   stages * chunks - 1 ticks forward; ticks forward and backward, with head and loss in
the last `stages` of every stages * chunks; and so on
zb-h1   as 1f1b; in the last `microbatches` ticks gradients of weights besides
gpipe   microbatches + stages - 1 ticks forward with head and loss, and as many backward in reverse
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from planner.execution.pipeline import BUBBLE, Pipeline

PASSES = ("forward", "epilogue", "epilogue_back", "backward", "weights")
"""Forward and backward pass of blocks and prologue, and those of the epilogue, then gradients of
blocks' weights that are made apart; in the order of a tick."""


@dataclass(frozen=True)
class Tick:
    """Microbatch of each pass, BUBBLE where it is none that exists, None where the tick has no such
    pass."""

    forward: int | None
    epilogue: int | None
    epilogue_back: int | None
    backward: int | None
    weights: int | None = None
    chunks: tuple[int, int] = (0, 0)
    """Which of a stage's chunks of blocks the forward and the backward pass run."""

    @property
    def passes(self) -> tuple[tuple[str, int], ...]:
        """(pass, microbatch or BUBBLE) of those it has."""
        return tuple((name, m) for name in PASSES if (m := getattr(self, name)) is not None)


@dataclass(frozen=True)
class Stretch:
    """Ticks in a row in which a stage does the same for one microbatch after the other."""

    first: Tick
    last: Tick
    count: int


def ticks(p: Pipeline, stage: int) -> Iterator[Tick]:
    """The ticks of one stage, in order."""

    def real(m: int) -> int:
        return m if 0 <= m < p.microbatches else BUBBLE

    behind, first = p.stages - 1, p.microbatch_schedule.first_backward
    if p.schedule != "gpipe":
        for t in range(first + p.ticks):
            ahead, back, leaving = (
                p.microbatch_schedule.forward(stage, t),
                p.microbatch_schedule.backward(stage, t),
                p.microbatch_schedule.forward(behind, t),
            )
            m = (
                leaving[0]
                if t < p.ticks and leaving[0] != BUBBLE and leaving[1] == p.virtual_stages - 1
                else None
            )
            yield Tick(
                ahead[0] if t < p.ticks else None,
                m,
                m,
                back[0] if t >= first else None,
                p.microbatch_schedule.weights(t),
                (ahead[1], back[1]),
            )
    else:
        yield from (Tick(real(t - stage), real(t - behind), None, None) for t in range(p.ticks))
        yield from (
            Tick(None, None, real(t - behind), real(t - stage)) for t in reversed(range(p.ticks))
        )


def stretches(p: Pipeline, stage: int) -> tuple[Stretch, ...]:
    """The ticks of one stage, equal neighbours together."""
    equal_ticks = []
    for _, same in groupby(
        ticks(p, stage), key=lambda t: (t.chunks, *((name, m == BUBBLE) for name, m in t.passes))
    ):
        run = list(same)
        equal_ticks.append(Stretch(run[0], run[-1], len(run)))
    return tuple(equal_ticks)
