"""The tensors, operators and compiler passes behind every difference between a prediction and a
compiled program, a line each.

collectives   the passes whose changes add up to the difference, and the arrays that no predicted
use explains (and the reverse)
products      the passes that changed them, and nodes whose compiled dots are not those predicted,
beside what passes padded (`paddings`)
arguments     parameters that take more memory than their elements (tiles of TPU layouts)
temporaries   the largest values of the compiler's buffer assignment, and what they serve
memory        what the difference of temporaries is made of when most of them are there: gaps, what
came from the forward pass, what came after it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from planner.execution.collective import CollectiveUse
from planner.verify.hlo.buffers import Assignment, Held
from planner.verify.hlo.flops import dots
from planner.verify.hlo.groups import MeshAxes
from planner.verify.hlo.origins import Origins
from planner.verify.hlo.paddings import Padding
from planner.verify.hlo.passes import history, products, totals
from planner.verify.hlo.text import Instruction, Module, parse

LINES = 6
"""Differences of one sort that are written out; the rest is counted."""
NAMELESS = "no known operator (the compiler kept no note of the line)"
_FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True)
class Sent:
    """What is behind differences of traffic. own: (kind, axes) -> bytes of the difference that
    passes of the compiler made, and no part of the program as emitted; by: the passes, the one that
    changed most first."""

    lines: tuple[str, ...] = ()
    own: Mapping[tuple[str, str], int] = field(default_factory=dict)
    by: tuple[str, ...] = ()


def of_traffic(
    folder: Path,
    mesh: MeshAxes,
    uses: Iterable[CollectiveUse],
    compiled: Mapping[tuple[str, str], int],
    source: str,
    exact: bool,
) -> Sent:
    """What is behind collectives that differ. folder: the compiler's dumps after each pass;
    compiled: the final program's totals; what no pass explains of them is said; exact: the program
    writes its collectives out (shard_map)."""
    changes = history(
        folder, mesh, lambda text: Origins.of(text, source).name, merge_ar_slice=not exact
    )
    if changes is None:
        return Sent(("the compiler wrote no dumps after its passes, so no pass can be named",))
    wanted: dict[tuple[str, str], Counter[tuple[int, str]]] = {}
    for use in (u for u in uses if not u.merged):
        label = "+".join(a for a, _ in mesh if a in use.axes)
        wanted.setdefault((use.kind, label), Counter())[
            use.payload_bytes, f"{use.phase} of {use.what}"
        ] += use.count
    first_totals = totals(changes.first)
    rows = []
    compiler_bytes: dict[tuple[str, str], int] = {}
    changed: Counter[str] = Counter()
    for key in {*wanted, *compiled, *first_totals}:
        predicted = sum(size * n for (size, _), n in wanted.get(key, Counter()).items())
        delta = compiled.get(key, 0) - predicted
        if not delta:
            continue
        written = first_totals.get(key, 0) - predicted
        bytes_by_pass: dict[str, int] = {}
        for change in changes.later:
            if (change.kind, change.axes) == key:
                bytes_by_pass[change.by] = bytes_by_pass.get(change.by, 0) + change.delta_bytes
        in_no_pass = delta - written - sum(bytes_by_pass.values())
        compiler_bytes[key] = max(0, abs(delta) - abs(written) - abs(in_no_pass))
        changed.update({name: abs(size) for name, size in bytes_by_pass.items()})
        bytes_by_pass = {
            "as emitted" if exact else "partitioner": written,
            **bytes_by_pass,
            "seen in no pass": in_no_pass,
        }
        passes = ", ".join(f"{name} {size:+,} B" for name, size in bytes_by_pass.items() if size)
        what = _unexplained(wanted.get(key, Counter()), changes.settled.get(key, Counter()))
        rows.append(
            (
                -abs(delta),
                f"{key[0]} over {key[1]} {delta:+,} B by {passes}{f'; {what}' if what else ''}",
            )
        )
    return Sent(
        _limited([line for _, line in sorted(rows)]),
        compiler_bytes,
        tuple(name for name, _ in changed.most_common()),
    )


def _unexplained(wanted: Counter[tuple[int, str]], compiled: Counter[tuple[str, int, str]]) -> str:
    """What is left of predicted and compiled arrays of one kind once equal sizes cancel."""
    sizes: Counter[int] = Counter()
    for (size, _), n in wanted.items():
        sizes[size] += n
    extra = []
    for (array, size, what), n in sorted(compiled.items(), key=lambda r: (-r[0][1], r[0])):
        matched = min(n, sizes[size])
        sizes[size] -= matched
        if n > matched:
            extra.append(
                f"{array}{f' x{n - matched}' if n - matched > 1 else ''}"
                f"{f' of {what}' if what else ''}"
            )
    missing = []
    for (size, what), n in sorted(wanted.items(), key=lambda r: (-r[0][0], r[0])):
        matched = min(n, sizes[size])
        sizes[size] -= matched
        if matched:
            missing.append(f"{size:,} B{f' x{matched}' if matched > 1 else ''} ({what})")
    parts = [f"not predicted: {_few(extra)}"] if extra else []
    return "; ".join(parts + ([f"predicted and not there: {_few(missing)}"] if missing else []))


def of_flops(nodes: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Lines about nodes whose dots differ, as `apart` found them."""
    return _limited(
        [f"products of {name}: predicted {a:,} FLOPs, compiled {b:,}" for name, a, b in nodes]
    )


def spoken(
    nodes: Iterable[tuple[str, int, int]], predicted: Mapping[str, int], passes: Sequence[str]
) -> str:
    """What a verdict says is behind a difference of products: the operator that differs most, and
    the passes that changed any."""
    nodes = list(nodes)
    total = sum(b - a for _, a, b in nodes)
    node = next(
        (
            f"{name} {b - a:+,} FLOPs"
            for name, a, b in nodes
            if name in predicted and (b - a) * total > 0
        ),
        "",
    )
    by = f"by the compiler ({_few(passes, 3)})" if passes else ""
    return " ".join(filter(None, (node, by)))


def apart(
    text: str, source: str, predicted: Mapping[str, int], padded: Iterable[Padding] = ()
) -> list[tuple[str, int, int]]:
    """(node, predicted, compiled) where dots differ, the furthest first. predicted: node id ->
    FLOPs (`predicted.flops_by_node`); padded: what passes added, left out of what is compiled."""
    origins = Origins.of(text, source)
    compiled: dict[str, int] = {}
    for one in padded:
        compiled[one.what] = compiled.get(one.what, 0) - one.flops
    for instruction, flops in dots(text):
        name = origins.name(instruction.attributes) or NAMELESS
        compiled[name] = compiled.get(name, 0) + flops
    rows = [
        (name, predicted.get(name, 0), compiled.get(name, 0)) for name in {**predicted, **compiled}
    ]
    return sorted(
        (row for row in rows if row[1] != row[2]), key=lambda row: (-abs(row[2] - row[1]), row)
    )


def by_passes(
    folder: Path, predicted: int, placed: bool, padded: Iterable[Padding] = ()
) -> tuple[str, tuple[str, ...]]:
    """A line about the passes whose changes add up to the difference of all products, and their
    names, the one that changed most first; "" where there are no dumps. Paddings have lines of
    their own."""
    result = products(folder, placed)
    if result is None:
        return "", ()
    first, by = result
    for one in padded:
        by[one.by] = by.get(one.by, 0) - one.flops
    by = {
        "partitioner" if placed else "as emitted": first - predicted,
        **dict(sorted(by.items(), key=lambda row: -abs(row[1]))),
    }
    parts = [f"{name} {flops:+,}" for name, flops in by.items() if flops]
    return f"dot FLOPs {sum(by.values()):+,} by {', '.join(parts)}", tuple(
        name for name, flops in list(by.items())[1:] if flops
    )


def entry_bytes(text: str) -> tuple[int, int]:
    """Bytes of the elements of a module's parameters and of its results, without padding and tables
    of pointers."""
    module = parse(text)
    entry = module.computations[module.entry]
    return sum(s.size_bytes for p in entry.parameters.values() for s in p.shapes), sum(
        s.size_bytes for s in entry.root.shapes
    )


def of_arguments(text: str, assignment: Assignment) -> tuple[str, ...]:
    """Lines about parameters stored in more bytes than their elements have."""
    module = parse(text)
    rows = []
    for number, parameter in sorted(module.computations[module.entry].parameters.items()):
        plain = sum(s.size_bytes for s in parameter.shapes)
        stored = assignment.parameters.get(number, plain)
        if stored > plain:
            shape = parameter.shapes[0]
            name = _argument(parameter) or parameter.name
            rows.append(
                (
                    plain - stored,
                    (
                        f"{name} {shape.dtype}[{','.join(map(str, shape.dims))}] {plain:,} B as"
                        f" {stored:,} B"
                    ),
                )
            )
    if not rows:
        return ()
    total = -sum(extra for extra, _ in rows)
    return (
        (
            f"layout: {len(rows)} arguments are padded to whole tiles, {total:+,} B"
            f" ({_few([line for _, line in sorted(rows)], 3)})"
        ),
    )


def of_temporaries(
    text: str, source: str, assignment: Assignment, most: int = LINES
) -> tuple[str, ...]:
    """Lines about the largest temporary values, of 1 % of all or more, and what they serve."""
    every = assignment.moment.held if assignment.moment else assignment.temporaries
    total_bytes = sum(h.size_bytes for h in every)
    serves = _Serves(parse(text), Origins.of(text, source))
    return tuple(
        f"temporary: {serves.shown(h)}" for h in every[:most] if h.size_bytes >= total_bytes / 100
    )


def of_memory(
    text: str, source: str, assignment: Assignment, activations_bytes: int, working_bytes: int
) -> tuple[str, ...]:
    """Lines about the moment when most of the temporary memory is in use: three sums that add up to
    the difference, and the values behind them. activations_bytes, working_bytes: predicted, of
    activations and of gradients and working memory, in tiles where those are priced. Nothing where
    the compiler wrote no lives of its values.
    """
    moment = assignment.moment
    if moment is None:
        return ()
    serves = _Serves(parse(text), Origins.of(text, source))
    tiles = sum(h.tile_bytes for h in moment.held)
    turn = serves.backward(assignment.schedule)
    forward = sum(h.size_bytes for h in moment.held if h.first < turn)
    made_later = moment.used_bytes - forward
    gaps = assignment.arena_bytes - moment.used_bytes
    where = serves.who(moment.at) or "no line of the program"
    lines = [
        (
            f"temporaries {assignment.arena_bytes - activations_bytes - working_bytes:+,} B: gaps"
            f" between values {gaps:+,} B, from the forward pass"
            f" {forward - activations_bytes:+,} B, made later {made_later - working_bytes:+,} B"
        ),
        (
            f"most of them at {where} ({moment.at}): {moment.used_bytes:,} B in use of"
            f" {assignment.arena_bytes:,} B, {forward:,} B from the forward pass"
            f" ({activations_bytes:,} B of activations predicted), {made_later:,} B made later"
            f" ({working_bytes:,} B of gradients and working memory)"
        ),
    ]
    padded = sorted((h for h in moment.held if h.tile_bytes), key=lambda h: -h.tile_bytes)
    for what, values, total in (
        ("beyond elements, to fill whole tiles", padded, tiles),
        ("beside them in on-chip memory", moment.on_chip, _sum(moment.on_chip)),
        ("beside them in the places of arguments", moment.donated, _sum(moment.donated)),
    ):
        if total >= moment.used_bytes / 100:
            lines.append(f"{what}: {total:,} B ({_few([serves.shown(h) for h in values], 3)})")
    return tuple(lines)


def _argument(parameter: Instruction) -> str:
    """What the program calls an argument, such as params['w']."""
    return parameter.op_name.replace("\\'", "'")


def _sum(values: Iterable[Held]) -> int:
    return sum(h.size_bytes for h in values)


@dataclass(frozen=True)
class _Serves:
    """From an instruction's name to what it serves."""

    module: Module
    origins: Origins

    @cached_property
    def _found(self) -> dict[str, Instruction]:
        return {i.name: i for c in self.module.computations.values() for i in c.instructions}

    def who(self, name: str) -> str:
        """The node, tensor or argument; of a copy what is copied. "" where nothing tells."""
        for _ in range(4):
            instruction = self._found.get(name)
            if instruction is None:
                return ""
            if what := self.origins.name(instruction.attributes):
                return what
            if instruction.opcode == "parameter":
                return _argument(instruction)
            if not instruction.operands:
                return ""
            name = instruction.operands[0]
        return ""

    def shown(self, value: Held) -> str:
        """A value as it is printed."""
        what = self.who(value.name)
        return f"{value.shape} {value.size_bytes:,} B{f' of {what}' if what else ''} ({value.name})"

    def backward(self, schedule: Sequence[str]) -> int:
        """Where the backward pass begins in a schedule: at the first array of floats that it makes
        (ids may be sorted for it long before, zeros filled in). The schedule's length where there
        is none."""
        for index, name in enumerate(schedule):
            maker = self._found.get(name)
            if (
                maker
                and "transpose(" in maker.op_name
                and maker.opcode not in ("constant", "broadcast")
                and any(s.dims and s.dtype in _FLOATS for s in maker.shapes)
            ):
                return index
        return len(schedule)


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _limited(lines: Sequence[str]) -> tuple[str, ...]:
    return (
        *lines[: 2 * LINES],
        *((f"and {len(lines) - 2 * LINES} more differences",) if len(lines) > 2 * LINES else ()),
    )
