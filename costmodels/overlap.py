"""How much communication hides beside other work: collectives of gradients that travel in buckets,
microbatches that run at the same time, and weights that are gathered beside arithmetic.

Loops over blocks. One pass of a loop gathers the weights of each block, and scatters their
gradients, beside its kernels: h of each collective's seconds c have kernels beside them, b of the
kernels' seconds k can have collectives beside them, and those of an operator (gathered before it,
scattered after it) are beside no kernel of its own:

    shown = max(sum (1 - h) c,
                sum c - b sum k,
                largest over operators of own c - b (sum k - own k))

and each second that does not show makes the kernels beside it take longer by a share of one.

New parameters are gathered beside the optimizer's pass over others, in all as long as its own:

    shown = c - min(c, u * optimizer)

Buckets. With S bytes over the same axes in buckets of B <= S,

    seconds = S / B * latency + S * s_per_byte       (an array of B or more pays one latency)
    hidden  = overlap * (seconds of the gradients - seconds of one bucket)

as the last bucket leaves when the backward pass is over.

Microbatch overlap. The pass of one microbatch is a chain of pieces, kernels k and collectives s by
turns. Chains of c microbatches wait for nothing of each other, and take

    alone     c (sum k + sum s)
    together  t: one stream of kernels, one of collectives; of the chains, that one goes on whose
              next piece can start first
    hidden    h (alone - t)

where h is the runtime's `copies_hidden`: collectives take units and bandwidth from the kernels
beside them, and schedules are not perfect.

A schedule that a compiler has written says itself what hides: `waited_s` follows it, kernels on one
stream and collectives on another.

The first two are models of schedules, not of one compiler: what a program hides may be less. Errors
of the prices that contain them are in docs/published-runs.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

KERNELS, LINKS, BOTH = (0,), (1,), (0, 1)
"""Streams that a piece of a chain takes. Both: a collective inside a kernel."""
Piece = tuple[tuple[int, ...], float]
"""Streams that it takes, and seconds."""


def latency_share(payload_bytes: float, bucket_bytes: float, stacked: int = 1) -> float:
    """Fraction of one latency that a collective pays which travels in buckets of so many bytes with
    others of its kind. stacked: so many like it are one array, whose launch is no smaller."""
    return min(1.0 / stacked, payload_bytes / bucket_bytes)


def gradients_hidden(overlap: float, total_s: float, last_s: float = 0.0) -> float:
    """Fraction of the seconds of gradient collectives that hides under the backward pass: the
    runtime's `overlap`, but for the last launch."""
    return overlap * max(0.0, 1 - last_s / total_s) if last_s else overlap


def gather_beside_work_s(work_s: float, gather_s: float, overlap: float) -> float:
    """Seconds of work beside which weights are gathered: the longer of the two, and of the shorter
    what does not hide under it."""
    return max(work_s, gather_s) + (1 - overlap) * min(work_s, gather_s)


@dataclass(frozen=True)
class LoopCollectives:
    """The collectives of one operator in one pass of a loop over blocks: seconds, those of them
    without kernels beside them whatever the loop has, and the seconds of the operator itself."""

    sent_s: float
    shown_s: float
    kernel_s: float


def shown_in_loop_s(operators: Sequence[LoopCollectives], kernels_s: float, beside: float) -> float:
    """Seconds of the collectives of one pass of a loop that kernels wait for. kernels_s: of all
    that the pass runs; beside: the share of them that can have collectives beside them."""
    return max(
        sum(o.shown_s for o in operators),
        sum(o.sent_s for o in operators) - beside * kernels_s,
        *(o.sent_s - beside * (kernels_s - o.kernel_s) for o in operators),
    )


def together_s(chain: Sequence[Piece], microbatches: int) -> float:
    """Seconds of so many equal chains on one stream of kernels and one of collectives."""
    streams, ready, next_piece = [0.0, 0.0], [0.0] * microbatches, [0] * microbatches

    def start(k: int) -> float:
        return max(ready[k], *(streams[s] for s in chain[next_piece[k]][0]))

    for _ in range(microbatches * len(chain)):
        k = min((k for k in range(microbatches) if next_piece[k] < len(chain)), key=start)
        end = start(k) + chain[next_piece[k]][1]
        for s in chain[next_piece[k]][0]:
            streams[s] = end
        ready[k], next_piece[k] = end, next_piece[k] + 1
    return max(ready)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """A chain with neighbours on the same streams as one piece, and without empty ones."""
    chain: list[Piece] = []
    for streams, seconds in pieces:
        if seconds and chain and chain[-1][0] == streams:
            chain[-1] = streams, chain[-1][1] + seconds
        elif seconds:
            chain.append((streams, seconds))
    return chain


def collectives_hidden(chain: Sequence[Piece], microbatches: int, hidden: float) -> float:
    """Fraction of the chain's own collectives that hides where so many microbatches run at the same
    time and the runtime reaches `hidden` of what the streams allow; 0 of a chain without any."""
    sent_s = sum(seconds for streams, seconds in chain if streams == LINKS)
    if not sent_s:
        return 0.0
    alone_s = microbatches * sum(seconds for _, seconds in chain)
    saved_s = alone_s - together_s(chain, microbatches)  # sums that round apart: none, or all of it
    return hidden * min(1.0, max(0.0, saved_s / (microbatches * sent_s)))


@dataclass(frozen=True)
class Step:
    """One step of a program's schedule. Work takes `seconds` of kernels. A collective that is
    started, by its name, takes `seconds` of the links; one that is waited for takes none."""

    kind: Literal["work", "start", "wait"]
    seconds: float = 0.0
    name: str = ""


def waited_s(schedule: Iterable[Step]) -> dict[str, float]:
    """Seconds that kernels wait for each collective of a schedule. Kernels run one after the other,
    and so do collectives, each from its start on; a wait ends with its collective. What is never
    waited for is waited for at the end."""
    now = links = 0.0
    ends: dict[str, float] = {}
    waited: dict[str, float] = {}

    def wait(name: str) -> None:
        nonlocal now
        end = ends.pop(name)
        waited[name] = waited.get(name, 0.0) + max(0.0, end - now)
        now = max(now, end)

    for step in schedule:
        if step.kind == "work":
            now += step.seconds
        elif step.kind == "start":
            links = ends[step.name] = max(now, links) + step.seconds
        elif step.name in ends:
            wait(step.name)
    for name in list(ends):
        wait(name)
    return waited
