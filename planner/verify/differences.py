"""The tensors, operators and compiler passes behind every difference between a prediction and a compiled program, a line each.

    collectives   the passes whose changes add up to the difference, and the arrays that no predicted use explains (and the reverse)
    products      nodes whose compiled dots are not those predicted
    arguments     parameters that take more memory than their elements (tiles of TPU layouts)
    temporaries   the largest values of the compiler's buffer assignment, and what they serve
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from planner.account import Use
from planner.verify.buffers import Assignment
from planner.verify.hlo_flops import dots
from planner.verify.hlo_groups import MeshAxes
from planner.verify.hlo_text import Module, parse
from planner.verify.origins import Origins
from planner.verify.passes import history, totals

LINES = 6
"""Differences of one sort that are written out; the rest is counted."""


def of_traffic(folder: Path, mesh: MeshAxes, uses: Iterable[Use], compiled: Mapping[tuple[str, str], int], source: str, exact: bool) -> tuple[str, ...]:
    """Lines about collectives. folder: the compiler's dumps after each pass; compiled: the final program's totals; what no pass explains of
    them is said; exact: the program writes its collectives out (shard_map)."""
    seen = history(folder, mesh, lambda text: Origins.of(text, source).name, merge_ar_slice=not exact)
    if seen is None:
        return ("the compiler wrote no dumps after its passes, so no pass can be named",)
    wanted: dict[tuple[str, str], Counter[tuple[int, str]]] = {}
    for use in uses:
        label = "+".join(a for a, _ in mesh if a in use.axes)
        wanted.setdefault((use.kind, label), Counter())[use.payload_bytes, f"{use.phase} of {use.what}"] += use.count
    begun = totals(seen.first)
    rows = []
    for key in {*wanted, *compiled, *begun}:
        predicted = sum(size * n for (size, _), n in wanted.get(key, Counter()).items())
        delta = compiled.get(key, 0) - predicted
        if not delta:
            continue
        by = {"as emitted" if exact else "partitioner": begun.get(key, 0) - predicted}
        for change in seen.later:
            if (change.kind, change.axes) == key:
                by[change.by] = by.get(change.by, 0) + change.delta_bytes
        by["seen in no pass"] = delta - sum(by.values())
        passes = ", ".join(f"{name} {size:+,} B" for name, size in by.items() if size)
        what = _unexplained(wanted.get(key, Counter()), seen.settled.get(key, Counter()))
        rows.append((-abs(delta), f"{key[0]} over {key[1]} {delta:+,} B by {passes}{f'; {what}' if what else ''}"))
    return _limited([line for _, line in sorted(rows)])


def _unexplained(wanted: Counter[tuple[int, str]], found: Counter[tuple[str, int, str]]) -> str:
    """What is left of predicted and compiled arrays of one kind once equal sizes cancel."""
    sizes: Counter[int] = Counter()
    for (size, _), n in wanted.items():
        sizes[size] += n
    extra = []
    for (array, size, what), n in sorted(found.items(), key=lambda r: (-r[0][1], r[0])):
        here = min(n, sizes[size])
        sizes[size] -= here
        if n > here:
            extra.append(f"{array}{f' x{n - here}' if n - here > 1 else ''}{f' of {what}' if what else ''}")
    missing = []
    for (size, what), n in sorted(wanted.items(), key=lambda r: (-r[0][0], r[0])):
        here = min(n, sizes[size])
        sizes[size] -= here
        if here:
            missing.append(f"{size:,} B{f' x{here}' if here > 1 else ''} ({what})")
    parts = [f"not predicted: {_few(extra)}"] if extra else []
    return "; ".join(parts + ([f"predicted and not there: {_few(missing)}"] if missing else []))


def of_flops(text: str, source: str, predicted: Mapping[str, int]) -> tuple[str, ...]:
    """Lines about nodes whose dots differ. predicted: node id -> FLOPs (`predicted.flops_by_node`)."""
    origins = Origins.of(text, source)
    compiled: dict[str, int] = {}
    for instruction, flops in dots(text):
        name = origins.name(instruction.attributes) or instruction.name
        compiled[name] = compiled.get(name, 0) + flops
    rows = []
    for name in {**predicted, **compiled}:
        delta = compiled.get(name, 0) - predicted.get(name, 0)
        if delta:
            rows.append((-abs(delta), f"products of {name}: predicted {predicted.get(name, 0):,} FLOPs, compiled {compiled.get(name, 0):,}"))
    return _limited([line for _, line in sorted(rows)])


def entry_bytes(text: str) -> tuple[int, int]:
    """Bytes of the elements of a module's parameters and of its results, without padding and tables of pointers."""
    module = parse(text)
    entry = module.computations[module.entry]
    return sum(s.size_bytes for p in entry.parameters.values() for s in p.shapes), sum(s.size_bytes for s in entry.root.shapes)


def of_arguments(text: str, assignment: Assignment) -> tuple[str, ...]:
    """Lines about parameters stored in more bytes than their elements have."""
    module = parse(text)
    rows = []
    for number, parameter in sorted(module.computations[module.entry].parameters.items()):
        plain = sum(s.size_bytes for s in parameter.shapes)
        stored = assignment.parameters.get(number, plain)
        if stored > plain:
            shape = parameter.shapes[0]
            name = (parameter.op_name or parameter.name).replace("\\'", "'")
            rows.append((plain - stored, f"{name} {shape.dtype}[{','.join(map(str, shape.dims))}] {plain:,} B as {stored:,} B"))
    if not rows:
        return ()
    total = -sum(extra for extra, _ in rows)
    return (f"layout: {len(rows)} arguments are padded to whole tiles, {total:+,} B ({_few([line for _, line in sorted(rows)], 3)})",)


def of_temporaries(text: str, source: str, assignment: Assignment, most: int = LINES) -> tuple[str, ...]:
    """Lines about the largest temporary values, of 1 % of all or more, and what they serve."""
    module, origins = parse(text), Origins.of(text, source)
    whole = sum(h.size_bytes for h in assignment.temporaries)
    largest = [h for h in assignment.temporaries[:most] if h.size_bytes >= whole / 100]
    found = _instructions(module, {h.name for h in largest})
    lines = []
    for held in largest:
        instruction = found.get(held.name)
        what = origins.name(instruction.attributes) if instruction else ""
        lines.append(f"temporary: {held.shape} {held.size_bytes:,} B{f' of {what}' if what else ''} ({held.name})")
    return tuple(lines)


def _instructions(module: Module, names: set[str]):  # type: ignore[no-untyped-def]
    return {i.name: i for c in module.computations.values() for i in c.instructions if i.name in names}


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _limited(lines: Sequence[str]) -> tuple[str, ...]:
    return (*lines[: 2 * LINES], *((f"and {len(lines) - 2 * LINES} more differences",) if len(lines) > 2 * LINES else ()))
