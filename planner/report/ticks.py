"""What each pipeline stage does in every lock-step tick, as planner.pipeline says and emitted programs do.

    1f1b    stages - 1 ticks forward; microbatches ticks forward, head and loss, backward; stages - 1 ticks backward
    gpipe   microbatches + stages - 1 ticks forward with head and loss, and as many backward in reverse
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from planner.pipeline import Pipeline

BUBBLE = -1
PASSES = ("forward", "late", "late_back", "backward")
"""Of blocks and what comes before them: forward, backward; late: of what follows the blocks. In the order of a tick."""


@dataclass(frozen=True)
class Tick:
    """Microbatch of each pass, BUBBLE where it is none that exists, None where the tick has no such pass."""

    forward: int | None
    late: int | None
    late_back: int | None
    backward: int | None

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

    behind = p.stages - 1
    if p.schedule == "1f1b":
        for t in range(p.ticks + behind):
            m = t - behind if behind <= t < p.ticks else None
            yield Tick(real(t - stage) if t < p.ticks else None, m, m, real(t - 2 * behind + stage) if t >= behind else None)
    else:
        yield from (Tick(real(t - stage), real(t - behind), None, None) for t in range(p.ticks))
        yield from (Tick(None, None, real(t - behind), real(t - stage)) for t in reversed(range(p.ticks)))


def stretches(p: Pipeline, stage: int) -> tuple[Stretch, ...]:
    """The ticks of one stage, equal neighbours together."""
    out = []
    for _, same in groupby(ticks(p, stage), key=lambda t: tuple((name, m == BUBBLE) for name, m in t.passes)):
        found = list(same)
        out.append(Stretch(found[0], found[-1], len(found)))
    return tuple(out)
