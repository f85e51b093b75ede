"""The step as bars within bars: the step holds microbatches, a microbatch holds operators and repeated blocks, a block holds its own operators.

A `Part` is a stretch of time. Where a part folds several things, `shares` says how its time divides among the kinds of work; the drawing gives each
kind that share of the part's height, so that area is time at every level.

    step         m x (forward + backward), gradient reduction, optimizer
    microbatch   forward in program order, backward in reverse; what is replayed comes before the backward pass of its block
    block        one repeat: its forward pass, and its backward pass
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.report.html.derive import Detail, Move, Row, short_name

KINDS = ("forward", "backward", "again", "comm", "optimizer", "bubble")
SMALLEST = 0.002
"""Parts below this share of their bar are drawn together with their small neighbours."""


@dataclass(frozen=True)
class Part:
    """A stretch of a bar. shares: kind -> seconds. repeats: how many equal stretches it stands for; run: the block it opens into, -1 for none."""

    label: str
    shares: Mapping[str, float]
    note: str = ""
    repeats: int = 1
    run: int = -1

    @property
    def time_s(self) -> float:
        """Its length."""
        return sum(self.shares.values())


@dataclass(frozen=True)
class Block:
    """One repeat of a block: its operators forward and backward, and seconds of a step that all repeats take."""

    run: int
    name: str
    repeats: int
    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    total_s: float


@dataclass(frozen=True)
class Timeline:
    """Bars of one stage. hidden_s: communication behind the backward pass, which takes no time of its own."""

    step: tuple[Part, ...]
    micro: tuple[Part, ...]
    blocks: tuple[Block, ...]
    hidden_s: float


def add(into: dict[str, float], kind: str, seconds: float) -> None:
    """Add seconds of a kind; nothing for nothing."""
    if seconds > 0:
        into[kind] = into.get(kind, 0.0) + seconds


def total(parts: Iterable[Part]) -> dict[str, float]:
    """kind -> seconds of several parts."""
    out: dict[str, float] = {}
    for part in parts:
        for kind, seconds in part.shares.items():
            add(out, kind, seconds)
    return out


def block_name(d: Detail, run: int) -> str:
    """`block`, with a number where there are several."""
    return f"block {run + 1}" if len(d.runs) > 1 else "block"


def timeline(d: Detail) -> Timeline:
    """The bars of a plan that was worked out."""
    groups = _groups(d)
    forward = [_fold(d, rows, run, False) for run, rows in groups]
    backward = [_fold(d, rows, run, True) for run, rows in reversed(groups)] if d.training else []
    sync = [m for m in d.moves if m.when == "sync"]
    if sync:
        backward.append(Part("gradient reduction", _exposed(sync, 1 / d.micro), "each microbatch"))
    whole = sum(p.time_s for p in (*forward, *backward))
    micro = (*small_together(forward, whole), *small_together(backward, whole))
    if d.micro > 1:
        steps = [Part("microbatches", {k: s * d.micro for k, s in total((*forward, *backward)).items()}, "forward and backward pass", d.micro)]
    else:
        steps = [Part(name, total(parts)) for name, parts in (("forward pass", forward), ("backward pass", backward)) if parts]
    ends = {"gradient": "gradient reduction", "optimizer": "parameter gathering"}
    for phase in ("gradient", "optimizer"):
        if phase == "optimizer" and d.optimizer_s:
            steps.append(Part("optimizer", {"optimizer": d.optimizer_s}))
        found = [m for m in d.moves if m.when == "end" and m.phase == phase]
        if sum(m.exposed_s for m in found):
            steps.append(Part(ends[phase], _exposed(found, 1.0)))
    blocks = [_block(d, run, [r for r in d.rows if r.run == run]) for run in range(len(d.runs))]
    return Timeline(tuple(steps), micro, tuple(sorted(blocks, key=lambda b: (-b.total_s, b.run))), sum(m.hidden_s for m in d.moves))


def _groups(d: Detail) -> list[tuple[int, list[Row]]]:
    """Rows outside blocks one by one, those of a block together, in program order."""
    out: list[tuple[int, list[Row]]] = []
    for row in d.rows:
        if row.run >= 0 and out and out[-1][0] == row.run:
            out[-1][1].append(row)
        else:
            out.append((row.run, [row]))
    return out


def _fold(d: Detail, rows: list[Row], run: int, back: bool) -> Part:
    """All repeats of a group in one microbatch, forward or backward."""
    parts = [p for row in rows for p in (*_replayed(d, row, 1 / d.micro), *_backward(d, row, 1 / d.micro)) if back]
    parts += [p for row in rows for p in _forward(d, row, 1 / d.micro) if not back]
    if run < 0:
        return Part(short_name(rows[0].id, rows[0].op), total(parts), rows[0].op)
    return Part(block_name(d, run), total(parts), f"{len(rows)} operators", rows[0].repeats, run)


def _forward(d: Detail, row: Row, scale: float) -> list[Part]:
    """Kernel and collectives of a row's forward pass: what is gathered for it, the kernel, conversions of its result."""
    moves = [m for m in d.at.get(row.index, ()) if m.when == "forward"]
    return [*_collectives(moves, True, scale), *_kernel(row, "forward", row.forward_s * scale), *_collectives(moves, False, scale)]


def _replayed(d: Detail, row: Row, scale: float) -> list[Part]:
    """What runs again before the backward pass of a recomputed block."""
    moves = [m for m in d.at.get(row.index, ()) if m.when == "again"]
    return [*_collectives(moves, True, scale), *_kernel(row, "again", row.again_s * scale), *_collectives(moves, False, scale)]


def _backward(d: Detail, row: Row, scale: float) -> list[Part]:
    """The backward pass of a row: its result's gradient arrives, the kernel, gradients of what was gathered for it leave."""
    moves = [m for m in d.at.get(row.index, ()) if m.when == "backward"]
    return [*_collectives(moves, False, scale), *_kernel(row, "backward", row.backward_s * scale), *_collectives(moves, True, scale)]


def _kernel(row: Row, kind: str, seconds: float) -> list[Part]:
    return [Part(short_name(row.id, row.op), {kind: seconds}, row.op)] if seconds > 0 else []


def _collectives(moves: Iterable[Move], stored: bool, scale: float) -> list[Part]:
    """Collectives of one place, equal ones (of several repeats' weights) as one."""
    found: dict[str, list[Move]] = {}
    for m in moves:
        if m.stored == stored and m.exposed_s > 0:
            found.setdefault(f"{m.kind} {m.axes}", []).append(m)
    return [Part(same[0].kind, {"comm": scale * sum(m.exposed_s for m in same)}, f"over {'+'.join(same[0].axes)}, for {same[0].what}") for same in found.values()]


def _exposed(moves: Iterable[Move], scale: float) -> dict[str, float]:
    seconds = scale * sum(m.exposed_s for m in moves)
    return {"comm": seconds} if seconds > 0 else {}


def _block(d: Detail, run: int, rows: list[Row]) -> Block:
    """One repeat. Its backward pass first runs again, in program order, what is recomputed."""
    one = 1 / (d.micro * rows[0].repeats)
    forward = [p for row in rows for p in _forward(d, row, one)]
    backward = [p for row in rows for p in _replayed(d, row, one)] + [p for row in reversed(rows) for p in _backward(d, row, one)] if d.training else []
    whole = sum(p.time_s for p in (*forward, *backward))
    return Block(run, block_name(d, run), rows[0].repeats, small_together(forward, whole), small_together(backward, whole), whole / one)


def small_together(parts: Iterable[Part], whole: float) -> tuple[Part, ...]:
    """Parts in order, neighbours below the smallest share of `whole` merged, so that a bar of thousands of operators stays a bar."""
    out: list[Part] = []
    run: list[Part] = []

    def close() -> None:
        if len(run) == 1:
            out.append(run[0])
        elif run:
            out.append(Part(f"{len(run)} small parts", total(run), f"from {run[0].label} to {run[-1].label}"))
        run.clear()

    for part in parts:
        if part.time_s <= 0:
            continue
        if part.time_s >= SMALLEST * whole or part.run >= 0:
            close()
            out.append(part)
        else:
            run.append(part)
            if sum(p.time_s for p in run) >= SMALLEST * whole:
                close()
    close()
    return tuple(out)
