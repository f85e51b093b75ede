"""What fills a program's temporary memory: the compiler's own buffer assignment, and where it wrote
them the lives of its values (`xla_dump_to`).

    allocation 7: size 1024, parameter 1, shape |bf16[32,16]| at ShapeIndex {}, maybe-live-out:
     value: <516 param.28 @0> (size=1024,offset=0): bf16[32,16]{1,0}

Values of one allocation that overlap in their bytes share them over time. Sizes here are as stored:
in whole tiles on TPU. Lives are

    InstructionSequence:
      81:fusion.3
    BufferLiveRange:
      fusion.3{0}:81-93

in places of the schedule; an instruction's operands and results are there while it runs. What a
device holds when most of its temporary memory is in use is a `Moment`: beside it the allocation is
gaps. On TPU values may also lie in on-chip memory (S(1)), or where an argument was that has been
read for the last time and whose bytes the program was given (donated).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from planner.verify.hlo.text import parse_shapes

_ALLOCATION = re.compile(
    r"allocation (\d+): size (\d+)(?:, color (\d+))?(?:, parameter (\d+))?(.*)"
)
_VALUE = re.compile(
    r"\s+value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_SPACE = re.compile(r"S\((\d+)\)")
_STEP = re.compile(r"\s+(\d+):([\w.\-]+)$")
_LIFE = re.compile(r"\s+([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$")
_COPIES = ("copy-start", "slice-start", "copy-done", "slice-done")
"""Values brought into on-chip memory ahead of their use: copies, the original may still be where it
was."""


@dataclass(frozen=True)
class Held:
    """A value in memory. name: of its instruction; shape as the compiler writes it, without layout
    (of a tuple its first array); first, last: places in the schedule between which it lives, -1
    where the compiler did not say."""

    name: str
    shape: str
    size_bytes: int
    first: int = -1
    last: int = -1

    @property
    def tile_bytes(self) -> int:
        """Bytes beyond those of its elements; none of a tuple's table of pointers, which is smaller
        than its first array."""
        return max(0, self.size_bytes - sum(s.size_bytes for s in parse_shapes(self.shape)))


@dataclass(frozen=True)
class Moment:
    """When most of the temporary memory is in use. at: the instruction that runs; used_bytes: as
    stored; held: what fills it; on_chip: what lies in on-chip memory instead; donated: what lies in
    the places of arguments. Each largest first, none overlapping a larger one.
    """

    at: str
    used_bytes: int
    held: tuple[Held, ...]
    on_chip: tuple[Held, ...]
    donated: tuple[Held, ...]


@dataclass(frozen=True)
class Assignment:
    """temporaries: largest first, none overlapping a larger one. parameters: number -> bytes as
    stored. arena_bytes: all that is allocated for temporaries, gaps included; given_bytes: of
    parameters whose places results take; result_bytes: of results with places of their own.
    schedule: instructions in order; moment: None where the compiler did not write lives."""

    temporaries: tuple[Held, ...]
    parameters: dict[int, int]
    arena_bytes: int = 0
    given_bytes: int = 0
    result_bytes: int = 0
    schedule: tuple[str, ...] = ()
    moment: Moment | None = None


@dataclass(frozen=True)
class _Placed:
    """A value and its place: (allocation, offset)."""

    held: Held
    allocation: int
    offset: int


def read_assignment(text: str, lives: str = "") -> Assignment:
    """Read a `...buffer-assignment.txt`, and the `...live-range.txt` beside it; lines of other
    kinds are skipped."""
    schedule, life = _lives(lives)
    parameters: dict[int, int] = {}
    temporary, on_chip, donated = list[_Placed](), list[_Placed](), list[_Placed]()
    arena, argument_bytes, results, into, number = 0, 0, 0, temporary, 0
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            number, size, rest = int(match.group(1)), int(match.group(2)), match.group(5)
            wanted = match.group(4) is None and "preallocated-temp" in rest
            if match.group(4) is not None:
                parameters[int(match.group(4))] = size
            if wanted and not int(match.group(3) or 0):
                arena += size
            elif "maybe-live-out" in rest or "output shape is" in rest:
                argument_bytes, results = (
                    (argument_bytes + size, results)
                    if match.group(4) is not None
                    else (argument_bytes, results + size)
                )
            into = donated if match.group(4) is not None else temporary if wanted else []
        elif match := _VALUE.match(line):
            first, last = life.get((match.group(1), match.group(2) or "{}"), (-1, -1))
            value = Held(
                match.group(1),
                match.group(5).split("{")[0].lstrip("("),
                int(match.group(3)),
                first,
                last,
            )
            space = _SPACE.search(match.group(5))
            if space and into is temporary:
                if int(space.group(1)) == 1:
                    on_chip.append(_Placed(value, number, int(match.group(4))))
            elif not space:
                into.append(_Placed(value, number, int(match.group(4))))
    return Assignment(
        temporaries=_apart(temporary),
        parameters=parameters,
        arena_bytes=arena,
        given_bytes=argument_bytes,
        result_bytes=results,
        schedule=schedule,
        moment=_moment(schedule, temporary, on_chip, donated) if schedule else None,
    )


def _lives(text: str) -> tuple[tuple[str, ...], dict[tuple[str, str], tuple[int, int]]]:
    """The schedule, and (instruction, index) -> (first, last) place of each value."""
    steps: dict[int, str] = {}
    life = {}
    for line in text.splitlines():
        if match := _STEP.match(line):
            steps[int(match.group(1))] = match.group(2)
        elif match := _LIFE.match(line):
            life[match.group(1), match.group(2)] = int(match.group(3)), int(match.group(4))
    return tuple(steps[i] for i in sorted(steps)), life


def _moment(
    schedule: tuple[str, ...],
    temporary: Sequence[_Placed],
    on_chip: Sequence[_Placed],
    donated: Sequence[_Placed],
) -> Moment | None:
    """The first moment of most bytes. Values may overlap (updates in place): a byte counts once."""
    best, peak_time, there = 0, 0, list[_Placed]()
    for time, begun in groupby(
        sorted((p for p in temporary if p.held.first >= 0), key=lambda p: p.held.first),
        key=lambda p: p.held.first,
    ):
        there = [*(p for p in there if p.held.last >= time), *begun]
        used = _covered(there)
        if used > best:
            best, peak_time = used, time
    if not best:
        return None
    end = len(schedule) - 1

    def then(placed: Iterable[_Placed]) -> list[_Placed]:
        return [p for p in placed if p.held.first <= peak_time <= p.held.last]

    chip = [p for p in then(on_chip) if not p.held.name.startswith(_COPIES)]
    # What lives from the beginning is the argument itself, what lives to the end is the result that
    # takes its place.
    donated_there = [
        p
        for p in then(donated)
        if p.held.first > 0 and p.held.last < end and not p.held.name.startswith("param")
    ]
    return Moment(
        schedule[peak_time], best, _apart(then(temporary)), _apart(chip), _apart(donated_there)
    )


def _covered(placed: Iterable[_Placed]) -> int:
    """Bytes that some value takes."""
    total, allocation, reached = 0, -1, 0
    for p in sorted(placed, key=lambda p: (p.allocation, p.offset)):
        reached = reached if p.allocation == allocation else 0
        allocation, high = p.allocation, p.offset + p.held.size_bytes
        total += max(0, high - max(p.offset, reached))
        reached = max(reached, high)
    return total


def _apart(placed: Iterable[_Placed]) -> tuple[Held, ...]:
    """Largest first, of equal ones the earliest, none overlapping one before it."""
    taken: dict[int, list[tuple[int, int]]] = {}
    apart = []
    for p in sorted(
        placed,
        key=lambda p: (-p.held.size_bytes, p.held.first, p.allocation, p.offset, p.held.name),
    ):
        spans, low, high = (
            taken.setdefault(p.allocation, []),
            p.offset,
            p.offset + p.held.size_bytes,
        )
        if high > low and all(high <= a or b <= low for a, b in spans):
            spans.append((low, high))
            apart.append(p.held)
    return tuple(apart)


def assignment_in(folder: Path) -> Assignment:
    """The buffer assignment dumped into a folder; an empty one where the compiler wrote none."""
    files = sorted(
        folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda p: -p.stat().st_size
    )
    if not files:
        return Assignment((), {})
    lives = files[0].with_name(files[0].name.replace("-buffer-assignment.txt", "-live-range.txt"))
    return read_assignment(
        files[0].read_text(errors="replace"),
        lives.read_text(errors="replace") if lives.exists() else "",
    )
