"""Communication fusion: the size up to which the GPU compiler sends collectives of a kind together, chosen instead of its own.

Gradients that are reduced, and updated parameters that are gathered, wait for nothing but each other; the compiler joins neighbours into one launch until the next would
pass the size. With S bytes over the same axes in buckets of B <= S,

    seconds = S / B * latency + S * s_per_byte             (a tensor of B or more pays one latency)
    hidden  = overlap * (seconds of the gradients - seconds of one bucket)

as the last bucket leaves when the backward pass is over. A small bucket pays latencies, a large one shows in full: without overlap (profile jax-shard_map) larger is never
slower, and the smallest of those that tie is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodels.runtime import Runtime
from planner import account
from planner.layout import Axes

if TYPE_CHECKING:
    from planner.account import Use
    from planner.base import Base
    from planner.flow import Plan
    from planner.price import Pricer

AUTO = "auto"
SIZES = tuple(2**k * 2**20 for k in range(0, 11, 2))
"""Bytes of a bucket that AUTO tries: 1 MiB to 1 GiB."""
TIE = 1e-3
"""Sizes whose reductions and gathers take no more than this beyond the least, as a fraction, are as good; the smallest is taken."""
Way = tuple[str, Axes]
KINDS = ("all_gather", "all_reduce", "reduce_scatter")
"""What the compiler has such a size for."""


def kinds(zero: int) -> tuple[str, ...]:
    """What is sent together under an optimizer level. Weights of level 3 are gathered, and their gradients scattered, where they are used: a size for those would be one of
    how many whole weights wait in memory, and the compiler's own stays."""
    return ("all_reduce",) if zero == 3 else KINDS


def searched(runtime: Runtime, asked: int | str) -> Runtime:
    """The profile that a search with a pinned bucket prices by: that of its size, or of the largest that AUTO tries, so that what is proven holds for all."""
    if not asked:
        return runtime
    return replace(runtime, bucket_bytes=float(SIZES[-1] if asked == AUTO else asked))


def launched(uses: Iterable[Use], bucket_bytes: int) -> dict[Way, float]:
    """(kind, axes) -> bytes of one launch of what travels together: no more than there are. bucket_bytes: a plan's; of 0 nothing is said, and the profile's size holds."""
    totals = _totals(use for use in uses if use.bucketed)
    return {way: min(total, bucket_bytes) for way, total in totals.items()} if bucket_bytes else {}


def _totals(uses: Iterable[Use]) -> dict[Way, float]:
    sums: dict[Way, float] = {}
    for use in uses:
        sums[use.kind, use.axes] = sums.get((use.kind, use.axes), 0.0) + use.total_bytes
    return sums


def seconds(uses: Iterable[Use], pricer: Pricer, sizes: Mapping[Way, float]) -> list[tuple[Use, float, float]]:
    """Every collective with its seconds, and those of them that hide under the backward pass: the profile's share of the gradients', but for the last launch. Which axes
    that is over is the compiler's choice: the one that takes longest."""
    uses = tuple(uses)
    each = [(use, pricer.use_s(use, sizes.get((use.kind, use.axes), 0.0))) for use in uses]
    whole = sum(s for use, s in each if use.phase == "gradient")
    share = pricer.runtime.overlap if whole else 0.0
    if share and sizes:
        late = _totals(use for use in uses if use.phase == "gradient" and use.bucketed)
        last = max((pricer.collective_s(*way, min(total, sizes[way])) for way, total in late.items()), default=0.0)
        share *= max(0.0, 1 - last / whole)
    return [(use, s, share * s if use.phase == "gradient" else 0.0) for use, s in each]


def with_bucket(base: Base, plan: Plan, pricer: Pricer, asked: int | str) -> Plan:
    """The plan with buckets of the size asked for; of AUTO the smallest size that ties with the best."""
    if not asked or isinstance(asked, int):
        return replace(plan, bucket_bytes=int(asked))
    from planner.evaluate import derived

    flow, runs = derived(base, plan)
    uses = account.collectives(flow, runs, pricer.itemsize)
    times = {size: sum(s - hidden for use, s, hidden in seconds(uses, pricer, launched(uses, size)) if use.bucketed) for size in SIZES}
    least = min(times.values())
    return replace(plan, bucket_bytes=next(size for size in SIZES if times[size] <= least * (1 + TIE)))
