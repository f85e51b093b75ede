"""The step as bars within bars: the step holds microbatches, a microbatch holds operators and
repeated blocks, a block holds its own operators.

A `Part` is a stretch of time. Where a part folds several things, `shares` says how its time divides
among the kinds of work; the drawing gives each kind that share of the part's height, so that area
is time at every level.

    step         m x (forward + backward), gradient reduction, optimizer
    microbatch   forward in program order, backward in reverse; what is recomputed comes before the
                 backward pass of its block
    block        one repeat: its forward pass, and its backward pass

With pipeline stages the step is one bar a stage, made of lock-step ticks (planner.report.ticks),
and what is opened is a tick with both passes instead of a microbatch. Collectives run in bubbles as
well: their arithmetic alone is drawn as a bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.execution.pipeline import BUBBLE, Pipeline
from planner.report.html.derive import Detail, Move, Row, short_name
from planner.report.ticks import PASSES, stretches

KINDS = ("forward", "backward", "recompute", "comm", "optimizer", "bubble")
SMALLEST = 0.002
"""Parts below this share of their bar are drawn together with their small neighbours."""


@dataclass(frozen=True)
class Part:
    """A stretch of a bar. shares: kind -> seconds. repeats: how many equal stretches it stands for;
    run: the block it opens into, -1 for none."""

    label: str
    shares: Mapping[str, float]
    note: str = ""
    repeats: int = 1
    run: int = -1

    @property
    def time_s(self) -> float:
        """Seconds of the part."""
        return sum(self.shares.values())


@dataclass(frozen=True)
class Block:
    """One repeat of a block: its operators forward and backward, and seconds of a step that all
    repeats take, bubbles included. per_stage: its repeats are those of one pipeline stage."""

    run: int
    name: str
    repeats: int
    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    total_s: float
    per_stage: bool = False


@dataclass(frozen=True)
class Timeline:
    """Bars of one device. hidden_s: communication behind the backward pass, which takes no time of
    its own. stages: the step of each pipeline stage, () without a pipeline; all are as long and
    have as much of every kind as `step`, the first one's. ends_s: seconds after the last
    microbatch."""

    step: tuple[Part, ...]
    micro: tuple[Part, ...]
    blocks: tuple[Block, ...]
    hidden_s: float
    stages: tuple[tuple[Part, ...], ...] = ()
    ends_s: float = 0.0


def add(into: dict[str, float], kind: str, seconds: float) -> None:
    """Add seconds of a kind; nothing for nothing."""
    if seconds > 0:
        into[kind] = into.get(kind, 0.0) + seconds


def total(parts: Iterable[Part]) -> dict[str, float]:
    """kind -> seconds of several parts."""
    seconds_of: dict[str, float] = {}
    for part in parts:
        for kind, seconds in part.shares.items():
            add(seconds_of, kind, seconds)
    return seconds_of


def block_name(d: Detail, run: int) -> str:
    """`block`, with a number where there are several."""
    return f"block {run + 1}" if len(d.runs) > 1 else "block"


def timeline(d: Detail) -> Timeline:
    """The bars of a plan that was worked out."""
    passes = passes_of(d)
    forward, backward = (
        [*passes["forward"], *passes["epilogue"]],
        [*passes["epilogue_back"], *passes["backward"], *passes["weights"]],
    )
    pass_s = sum(p.time_s for p in (*forward, *backward))
    micro = (*small_together(forward, pass_s), *small_together(backward, pass_s))
    stages: list[list[Part]] = []
    if d.pipeline is not None:
        stages = [_stage(d.pipeline, passes, stage) for stage in range(d.pipeline.stages)]
        steps = stages[0]
    elif d.micro > 1:
        steps = [
            Part(
                "microbatches",
                {k: s * d.micro for k, s in total((*forward, *backward)).items()},
                "forward and backward pass",
                d.micro,
            )
        ]
    else:
        steps = [
            Part(name, total(parts))
            for name, parts in (("forward pass", forward), ("backward pass", backward))
            if parts
        ]
    ends = ends_of(d)
    blocks = [_block(d, run, [r for r in d.rows if r.run == run]) for run in range(len(d.runs))]
    hidden = sum(m.hidden_s for m in d.moves)
    return Timeline(
        step=(*steps, *ends),
        micro=micro,
        blocks=tuple(sorted(blocks, key=lambda b: (-b.total_s, b.run))),
        hidden_s=hidden,
        stages=tuple((*s, *ends) for s in stages),
        ends_s=sum(p.time_s for p in ends),
    )


def passes_of(d: Detail) -> dict[str, list[Part]]:
    """Parts of the passes of one microbatch, in the order of planner.report.ticks.PASSES. epilogue:
    in a pipeline, of what follows the blocks."""
    passes: dict[str, list[Part]] = {name: [] for name in PASSES}
    groups = _groups(d)
    for run, rows in groups:
        passes["epilogue" if rows[0].in_epilogue else "forward"].append(_fold(d, rows, run, False))
    for row in d.rows:
        if (
            row.also_in_epilogue and d.pipeline is not None
        ):  # priced as bubbles: the blocks have run it already
            bubble_s = row.bubble_s / float(
                d.pipeline.forward_passes(row.index) - d.pipeline.useful_passes(row.index)
            )
            passes["epilogue"].append(
                Part(
                    short_name(row.id, row.op), {"bubble": bubble_s}, "recomputed for the epilogue"
                )
            )
    for run, rows in reversed(groups) if d.training else ():
        passes["epilogue_back" if rows[0].in_epilogue else "backward"].append(
            _fold(d, rows, run, True)
        )
    passes["weights"] = _weights(d)
    for name, phase in (("forward", "forward"), ("backward", "backward")):
        handed = [m for m in d.moves if m.when == "handed" and m.phase == phase]
        if d.pipeline is not None and any(m.exposed_s for m in handed):
            passes[name].append(
                Part(
                    f"to the {'next' if name == 'forward' else 'previous'} stage",
                    _exposed(handed, 1 / d.pipeline.ticks),
                    "collective-permute over stage",
                )
            )
    sync = [m for m in d.moves if m.when == "sync"]
    inside = [m for m in sync if d.pipeline is None or m.count >= d.pipeline.ticks]
    ending = [m for m in sync if d.pipeline is not None and m.count != d.pipeline.ticks]
    for name, moves in (("backward", inside), ("epilogue_back", ending)):
        if moves:
            each_s = [m.exposed_s / (m.count if d.pipeline is not None else d.micro) for m in moves]
            passes[name].append(
                Part(
                    "gradient reduction",
                    {"comm": sum(each_s)} if any(each_s) else {},
                    "each microbatch",
                )
            )
    return passes


def _stage(p: Pipeline, passes: Mapping[str, list[Part]], stage: int) -> list[Part]:
    """A stage's ticks, equal neighbours together."""
    sums = {name: total(parts) for name, parts in passes.items()}
    ticks = []
    for s in stretches(p, stage):
        shares: dict[str, float] = {}
        words = []
        for (name, m), (_, end) in zip(s.first.passes, s.last.passes, strict=True):
            for kind, seconds in sums[name].items():
                add(shares, "bubble" if m == BUBBLE and kind != "comm" else kind, seconds * s.count)
            if name in ("forward", "backward") and m != BUBBLE:
                turn = s.first.chunks[name == "backward"]
                chunk = f", virtual stage {turn}" if p.virtual_stages > 1 else ""
                words.append(
                    f"{name} of microbatch{f'es {m} to {end}' if m != end else f' {m}'}{chunk}"
                )
        both = [name for name in ("forward", "backward") if any(w.startswith(name) for w in words)]
        ticks.append(
            Part(
                " and ".join(both)
                or ("head and loss" if any(m != BUBBLE for _, m in s.first.passes) else "bubble"),
                shares,
                ", ".join(words) or "no microbatch",
                s.count,
            )
        )
    return ticks


def ends_of(d: Detail) -> list[Part]:
    """What comes once a step, after the backward pass."""
    ends, labels = (
        [],
        {
            "forward": "sum of the loss",
            "gradient": "gradient reduction",
            "optimizer": "parameter gathering",
        },
    )
    if d.loop_copy_s:
        shown_as = "optimizer" if d.optimizer_s else "forward"
        ends.append(Part("copies of loops", {shown_as: d.loop_copy_s}))
    for phase, label in labels.items():
        if phase == "optimizer" and d.optimizer_s:
            ends.append(Part("optimizer", {"optimizer": d.optimizer_s}))
        moves = [m for m in d.moves if m.when == "end" and m.phase == phase]
        if sum(m.exposed_s for m in moves):
            ends.append(Part(label, _exposed(moves, 1.0)))
    return ends


def _groups(d: Detail) -> list[tuple[int, list[Row]]]:
    """Rows outside blocks one by one, those of a block together, in program order."""
    groups: list[tuple[int, list[Row]]] = []
    for row in d.rows:
        if row.run >= 0 and groups and groups[-1][0] == row.run:
            groups[-1][1].append(row)
        else:
            groups.append((row.run, [row]))
    return groups


def opened(d: Detail, part: Part, back: bool) -> list[Part]:
    """What a part of a pass folds: of a block its operators and their collectives, all repeats
    together; of anything else itself."""
    if part.run < 0:
        return [part]
    rows = [r for r in d.rows if r.run == part.run]
    if not back:
        return [p for row in rows for p in _forward(d, row)]
    return [p for row in rows for p in _recomputed(d, row)] + [
        p for row in reversed(rows) for p in _backward(d, row)
    ]


def _fold(d: Detail, rows: list[Row], run: int, back: bool) -> Part:
    """All repeats of a group in one microbatch, forward or backward."""
    parts = [p for row in rows for p in (*_recomputed(d, row), *_backward(d, row)) if back]
    parts += [p for row in rows for p in _forward(d, row) if not back]
    if run < 0:
        return Part(short_name(rows[0].id, rows[0].op), total(parts), rows[0].op)
    return Part(
        block_name(d, run), total(parts), f"{len(rows)} operators", d.repeats_per_pass(rows[0]), run
    )


def _forward(d: Detail, row: Row, repeats: int = 1) -> list[Part]:
    """Kernel and collectives of a row's forward pass: what is gathered for it, the kernel,
    reshards of its result. repeats: of how many repeats one is meant."""
    scale = 1 / (d.passes(row) * repeats)
    moves = [m for m in d.at.get(row.index, ()) if m.when == "forward"]
    return [
        *_collectives(moves, True, scale),
        *_kernel(row, "forward", row.forward_s / (d.useful_passes(row) * repeats)),
        *_collectives(moves, False, scale),
    ]


def _recomputed(d: Detail, row: Row, repeats: int = 1) -> list[Part]:
    """What is recomputed before the backward pass of a block."""
    scale = 1 / (d.passes(row) * repeats)
    moves = [m for m in d.at.get(row.index, ()) if m.when == "recompute"]
    return [
        *_collectives(moves, True, scale),
        *_kernel(row, "recompute", row.recompute_s / (d.useful_passes(row) * repeats)),
        *_collectives(moves, False, scale),
    ]


def _backward(d: Detail, row: Row, repeats: int = 1) -> list[Part]:
    """The backward pass of a row: its result's gradient arrives, the kernel, gradients of what was
    gathered for it leave."""
    scale = 1 / (d.passes(row) * repeats)
    moves = [m for m in d.at.get(row.index, ()) if m.when == "backward"]
    return [
        *_collectives(moves, False, scale),
        *_kernel(
            row, "backward", (row.backward_s - row.weights_s) / (d.useful_passes(row) * repeats)
        ),
        *_collectives(moves, True, scale),
    ]


def _weights(d: Detail) -> list[Part]:
    """Gradients of weights that are made apart from the backward pass, of one microbatch."""
    rows = [row for row in d.rows if row.weights_s]
    seconds = sum(row.weights_s / d.useful_passes(row) for row in rows)
    words = f"{len(rows)} operators, apart from the backward pass"
    return [Part("gradients of weights", {"backward": seconds}, words)] if rows else []


def _kernel(row: Row, kind: str, seconds: float) -> list[Part]:
    return [Part(short_name(row.id, row.op), {kind: seconds}, row.op)] if seconds > 0 else []


def _collectives(moves: Iterable[Move], stored: bool, scale: float) -> list[Part]:
    """Collectives of one place, equal ones (of several repeats' weights) as one."""
    groups: dict[str, list[Move]] = {}
    for m in moves:
        if m.stored == stored and m.exposed_s > 0:
            groups.setdefault(f"{m.kind} {m.axes}", []).append(m)
    return [
        Part(
            same[0].kind,
            {"comm": scale * sum(m.exposed_s for m in same)},
            f"over {'+'.join(same[0].axes)}, for {same[0].what}",
        )
        for same in groups.values()
    ]


def _exposed(moves: Iterable[Move], scale: float) -> dict[str, float]:
    seconds = scale * sum(m.exposed_s for m in moves)
    return {"comm": seconds} if seconds > 0 else {}


def _block(d: Detail, run: int, rows: list[Row]) -> Block:
    """One repeat. Its backward pass begins, in program order, with what is recomputed."""
    repeats_a_pass = d.repeats_per_pass(rows[0])
    forward = [p for row in rows for p in _forward(d, row, repeats_a_pass)]
    backward = (
        [p for row in rows for p in _recomputed(d, row, repeats_a_pass)]
        + [p for row in reversed(rows) for p in _backward(d, row, repeats_a_pass)]
        if d.training
        else []
    )
    pass_s = sum(p.time_s for p in (*forward, *backward))
    per_stage = d.pipeline is not None and d.runs[run][0] == d.pipeline.first
    return Block(
        run=run,
        name=block_name(d, run),
        repeats=rows[0].repeats,
        forward=small_together(forward, pass_s),
        backward=small_together(backward, pass_s),
        total_s=pass_s * repeats_a_pass * d.passes(rows[0]),
        per_stage=per_stage,
    )


def small_together(parts: Iterable[Part], bar_s: float) -> tuple[Part, ...]:
    """Parts in order, neighbours below the smallest share of a bar of `bar_s` seconds merged, so
    that a bar of thousands of operators stays a bar."""
    merged: list[Part] = []
    small: list[Part] = []

    def close() -> None:
        if len(small) == 1:
            merged.append(small[0])
        elif small:
            merged.append(
                Part(
                    f"{len(small)} small parts",
                    total(small),
                    f"from {small[0].label} to {small[-1].label}",
                )
            )
        small.clear()

    for part in parts:
        if part.time_s <= 0:
            continue
        if part.time_s >= SMALLEST * bar_s or part.run >= 0:
            close()
            merged.append(part)
        else:
            small.append(part)
            if sum(p.time_s for p in small) >= SMALLEST * bar_s:
                close()
    close()
    return tuple(merged)
