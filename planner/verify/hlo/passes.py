"""Which compiler pass changed what a program communicates or multiplies, read from the compiler's
own dumps after each pass (`xla_dump_hlo_pass_re`).

From the program as emitted (shard_map) or the partitioner's result (jit) on, the payload by kind
and axes is totalled after every pass whose text differs in its collectives; a pass that changes a
total is named with its bytes. Combining and renaming keep the totals and stay silent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.groups import MeshAxes
from planner.verify.hlo.program import collectives
from planner.verify.hlo.text import parse

_FILE = re.compile(
    r"(?P<module>module_\d+)\..*?\.(?P<index>\d{4,})\.(?P<pipeline>[^.]+)\.after_(?P<name>.+?)\.before_.*\.txt$"
)
_LINE = re.compile(
    r"= .*?\b(?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(?:-start)?\("  # noqa: E501
)
PRODUCT = re.compile(r"= .*?\b(?:dot|convolution|custom-call)\(")
PARTITIONED = ("spmd-partitioning", "tpu-spmd-partitioning")

Pieces = dict[tuple[str, str], Counter[tuple[str, int, str]]]
"""(kind, axes) -> how often each (array, payload bytes, what it serves) is sent in a step."""


@dataclass(frozen=True)
class Change:
    """What one pass did to the payload of one kind over some axes."""

    by: str
    kind: str
    axes: str
    delta_bytes: int


@dataclass(frozen=True)
class History:
    """What is sent at first (as emitted, or as partitioned), every later pass that changed a total,
    and the arrays of each kind and axes after the last such pass (combined ones still apart, where
    combining keeps the total)."""

    first: Pieces
    later: tuple[Change, ...]
    settled: Pieces


def pieces(
    text: str, mesh: MeshAxes, name: Callable[[str], str], merge_ar_slice: bool = False
) -> Pieces:
    """Arrays sent by a module. name: from an instruction's attributes to what it serves.

    Raises:
        ValueError: not HLO, or groups outside the mesh.
    """
    module = parse(text)
    where = {
        i.name: (i, c)
        for c in module.computations.values()
        for i in c.instructions
        if _LINE.search(f"= {i.line}")
    }
    sent: Pieces = {}
    for collective in collectives(text, mesh, merge_ar_slice=merge_ar_slice):
        if not collective.heaviest:
            continue
        instruction, computation = where[collective.name]
        shapes = computation.operand_shapes(instruction)
        total = sum(s.size_bytes for s in shapes)
        if collective.kind == "all-gather":
            scale = collective.payload_bytes // total if total else 1
        else:
            scale = 1
        cell = sent.setdefault((collective.kind, collective.axes), Counter())
        if (
            scale * total != collective.payload_bytes
        ):  # only some operands are of this kind (a sum of which pieces are kept)
            cell[
                f"{collective.payload_bytes} B",
                collective.payload_bytes,
                name(instruction.attributes),
            ] += collective.count
            continue
        for shape in shapes:
            array = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            cell[array, shape.size_bytes * scale, name(instruction.attributes)] += collective.count
    return sent


def totals(sent: Pieces) -> dict[tuple[str, str], int]:
    """Payload bytes by kind and axes."""
    return {key: sum(size * n for (_, size, _), n in cell.items()) for key, cell in sent.items()}


def stages(folder: Path, placed: bool = False) -> Iterator[tuple[str, str]]:
    """(pass, text) of the dumps of the largest module in a folder, in order. placed: from the
    partitioner's result on."""
    rows: dict[str, list[tuple[int, str, Path]]] = {}
    for path in sorted(folder.iterdir()):
        if match := _FILE.match(path.name):
            rows.setdefault(match["module"], []).append((int(match["index"]), match["name"], path))
    if not rows:
        return
    begun, largest = not placed, max(rows.values(), key=len)
    for _, name, path in sorted(largest, key=lambda r: r[0]):
        begun = begun or name in PARTITIONED
        if begun:
            yield name, path.read_text(errors="replace")


def history(
    folder: Path,
    mesh: MeshAxes,
    namer: Callable[[str], Callable[[str], str]],
    merge_ar_slice: bool = False,
) -> History | None:
    """Follow the collectives through the dumps of a folder; None where there are none. namer: text
    -> (attributes -> what an array serves); merge_ar_slice: a jit program, whose collectives begin
    with the partitioner's result.

    A sum of which slices are kept counts as scattered once the text shows the slices. A pass that
    only makes them plain (by inlining a call, say) sends nothing else: what it changes is reckoned
    to the beginning.
    """
    first: Pieces | None = None
    before: tuple[str, Pieces] = "", {}
    settled: Pieces = {}
    lines: list[str] = []
    later: list[Change] = []
    for name, text in stages(folder, merge_ar_slice):
        now = [line for line in text.splitlines() if _LINE.search(line)]
        if now == lines and first is not None:
            continue
        lines = now
        try:
            after = pieces(text, mesh, namer(text), merge_ar_slice)
            if first is None:
                first, settled = dict(after), dict(after)
            else:
                a, b = totals(before[1]), totals(after)
                changed = [key for key in sorted({*a, *b}) if a.get(key, 0) != b.get(key, 0)]
                plainer = changed and merge_ar_slice and _sent(before[0], mesh) == _sent(text, mesh)
                for key in changed:
                    settled[key] = after.get(key, Counter())
                    if plainer:
                        first[key] = first.get(key, Counter()).copy()
                        first[key].update(after.get(key, Counter()))
                        first[key].subtract(before[1].get(key, Counter()))
                    else:
                        later.append(Change(name, *key, b.get(key, 0) - a.get(key, 0)))
        except (ValueError, KeyError):
            continue  # between passes a module may use forms that final programs do not have
        before = text, after
    return None if first is None else History(first, tuple(later), settled)


def products(folder: Path, placed: bool = False) -> tuple[int, dict[str, int]] | None:
    """FLOPs of the products as emitted (placed: as partitioned), and by how much every later pass
    changed them; None where there are no dumps."""
    first, before, by, lines = None, 0, dict[str, int](), list[str]()
    for name, text in stages(folder, placed):
        now = [line for line in text.splitlines() if PRODUCT.search(line)]
        if now == lines and first is not None:
            continue
        try:
            after = dot_flops(text)
        except (ValueError, KeyError, IndexError):
            continue  # between passes a module may use forms that final programs do not have
        lines = now
        if first is None:
            first = after
        elif after != before:
            by[name] = by.get(name, 0) + after - before
        before = after
    return None if first is None else (first, {name: flops for name, flops in by.items() if flops})


def _sent(text: str, mesh: MeshAxes) -> dict[tuple[str, str], int]:
    """Payload bytes by kind and axes, sums of which slices are kept as the sums that they are."""
    return totals(pieces(text, mesh, lambda attributes: ""))
