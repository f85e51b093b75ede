"""Which compiler pass changed what a program communicates, read from the compiler's own dumps after each pass (`xla_dump_hlo_pass_re`).

From the partitioner's result on, the payload by kind and axes is totalled after every pass whose text differs in its collectives; a pass
that changes a total is named with the bytes and the arrays that it removed and added. Combining and renaming keep the totals and stay silent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.verify.hlo import collectives
from planner.verify.hlo_groups import MeshAxes
from planner.verify.hlo_text import parse

_FILE = re.compile(r"(?P<module>module_\d+)\..*?\.(?P<index>\d{4,})\.(?P<pipeline>[^.]+)\.after_(?P<name>.+?)\.before_.*\.txt$")
_LINE = re.compile(r"= .*?\b(?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(?:-start)?\(")
PARTITIONED = ("spmd-partitioning", "tpu-spmd-partitioning")

Pieces = dict[tuple[str, str], Counter[tuple[str, int, str]]]
"""(kind, axes) -> how often each (array, payload bytes, what it serves) is sent in a step."""


@dataclass(frozen=True)
class Change:
    """What one pass did to the payload of one kind over some axes. removed, added: arrays and what they serve."""

    by: str
    kind: str
    axes: str
    delta_bytes: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    def text(self) -> str:
        """One line for people."""
        parts = [f"removed {_few(self.removed)}"] if self.removed else []
        parts += [f"added {_few(self.added)}"] if self.added else []
        return f"{self.by}: {self.kind} over {self.axes} {self.delta_bytes:+,} B ({'; '.join(parts)})"


def _few(names: tuple[str, ...], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def pieces(text: str, mesh: MeshAxes, name: Callable[[str], str], merge_ar_slice: bool = False) -> Pieces:
    """Arrays sent by a module. name: from an instruction's attributes to what it serves.

    Raises:
        ValueError: not HLO, or groups outside the mesh.
    """
    module = parse(text)
    where = {i.name: (i, c) for c in module.computations.values() for i in c.instructions if _LINE.search(f"= {i.line}")}
    out: Pieces = {}
    for found in collectives(text, mesh, merge_ar_slice=merge_ar_slice):
        if not found.heaviest:
            continue
        instruction, computation = where[found.name]
        shapes = computation.operand_shapes(instruction)
        total = sum(s.size_bytes for s in shapes)
        if found.kind == "all-gather":
            scale = found.payload_bytes // total if total else 1
        else:
            scale = 1
        cell = out.setdefault((found.kind, found.axes), Counter())
        if scale * total != found.payload_bytes:  # only some operands are of this kind (a sum of which pieces are kept)
            cell[f"{found.payload_bytes} B", found.payload_bytes, name(instruction.attributes)] += found.count
            continue
        for shape in shapes:
            array = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            cell[array, shape.size_bytes * scale, name(instruction.attributes)] += found.count
    return out


def totals(found: Pieces) -> dict[tuple[str, str], int]:
    """Payload bytes by kind and axes."""
    return {key: sum(size * n for (_, size, _), n in cell.items()) for key, cell in found.items()}


def stages(folder: Path) -> Iterator[tuple[str, str]]:
    """(pass, text) of the dumps of the largest module in a folder, from the partitioner's result on."""
    rows: dict[str, list[tuple[int, str, Path]]] = {}
    for path in sorted(folder.iterdir()):
        if found := _FILE.match(path.name):
            rows.setdefault(found["module"], []).append((int(found["index"]), found["name"], path))
    if not rows:
        return
    begun, largest = False, max(rows.values(), key=len)
    for _, name, path in sorted(largest, key=lambda r: r[0]):
        begun = begun or name in PARTITIONED
        if begun:
            yield name, path.read_text(errors="replace")


def changes(folder: Path, mesh: MeshAxes, namer: Callable[[str], Callable[[str], str]], merge_ar_slice: bool = False) -> tuple[Pieces, tuple[Change, ...]]:
    """The arrays sent as partitioned, and every pass after that which changed a total. namer: text -> (attributes -> what it serves)."""
    first: Pieces | None = None
    before: Pieces = {}
    lines: list[str] = []
    out: list[Change] = []
    for name, text in stages(folder):
        now = [line for line in text.splitlines() if _LINE.search(line)]
        if now == lines and first is not None:
            continue
        lines = now
        try:
            after = pieces(text, mesh, namer(text), merge_ar_slice)
        except (ValueError, KeyError):
            continue  # between passes a module may use forms that final programs do not have
        if first is None:
            first = after
        else:
            out += _difference(name, before, after)
        before = after
    return first or {}, tuple(out)


def _difference(by: str, before: Pieces, after: Pieces) -> list[Change]:
    a, b = totals(before), totals(after)
    out = []
    for key in sorted({*a, *b}):
        delta = b.get(key, 0) - a.get(key, 0)
        if delta:
            old, new = before.get(key, Counter()), after.get(key, Counter())
            out.append(Change(by, *key, delta, _named(old - new), _named(new - old)))
    return out


def _named(cell: Mapping[tuple[str, int, str], int]) -> tuple[str, ...]:
    rows = sorted(cell.items(), key=lambda r: (-r[0][1] * r[1], r[0]))
    return tuple(f"{array}{f' x{n}' if n > 1 else ''}{f' of {what}' if what else ''}" for (array, _, what), n in rows)
