"""What fills a program's temporary memory: the largest values of the compiler's own buffer assignment (`xla_dump_to`), each place counted once.

    allocation 7: size 1024, parameter 1, shape |bf16[32,16]| at ShapeIndex {}, maybe-live-out:
     value: <516 param.28 @0> (size=1024,offset=0): bf16[32,16]{1,0}

Values of one allocation that overlap in their bytes share them over time. Sizes here are as stored: tiled on TPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color \d+)?(?:, parameter (\d+))?(.*)")
_VALUE = re.compile(r"\s+value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Held:
    """A value in temporary memory. name: of its instruction; shape as the compiler writes it, without layout (of a tuple its first array)."""

    name: str
    shape: str
    size_bytes: int


@dataclass(frozen=True)
class Assignment:
    """temporaries: largest first, none overlapping a larger one. parameters: number -> bytes as stored."""

    temporaries: tuple[Held, ...]
    parameters: dict[int, int]


def read_assignment(text: str) -> Assignment:
    """Read a `...buffer-assignment.txt`; lines of other kinds are skipped."""
    parameters: dict[int, int] = {}
    held: list[tuple[int, int, int, Held]] = []
    number, mine = 0, False
    for line in text.splitlines():
        if found := _ALLOCATION.match(line):
            number += 1
            rest = found.group(3)
            if found.group(2) is not None:
                parameters[int(found.group(2))] = int(found.group(1))
            mine = found.group(2) is None and "preallocated-temp" in rest
        elif mine and (found := _VALUE.match(line)):
            if _SPACE.search(found.group(4)):
                continue  # on-chip memory
            size, at = int(found.group(2)), int(found.group(3))
            held.append((size, number, at, Held(found.group(1), found.group(4).split("{")[0].lstrip("("), size)))
    taken: dict[int, list[tuple[int, int]]] = {}
    out = []
    for size, allocation, at, value in sorted(held, key=lambda h: (-h[0], h[1], h[2], h[3].name)):
        spans = taken.setdefault(allocation, [])
        if size and all(at + size <= low or high <= at for low, high in spans):
            spans.append((at, at + size))
            out.append(value)
    return Assignment(tuple(out), parameters)


def assignment_in(folder: Path) -> Assignment:
    """The buffer assignment dumped into a folder; an empty one where the compiler wrote none."""
    files = sorted(folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda p: -p.stat().st_size)
    return read_assignment(files[0].read_text(errors="replace")) if files else Assignment((), {})
