"""Communication fusion: the size up to which the GPU compiler sends collectives of a kind together,
chosen instead of its own.

Gradients that are reduced, and updated parameters that are gathered, wait for nothing but each
other; the compiler joins neighbours into one launch until the next would pass the size
(costmodels.overlap has the formula). A small bucket pays latencies, a large one shows in full:
without overlap (profile jax-shard_map, of what is sent together) larger is never slower, and the
smallest of those that tie is taken. The weights of all repeats of a block are one array: of such
models few launches are left to spare.

Without a pin the compiler's own size (Runtime.bucket_bytes) stays unless another spares a plan a
notable part of its step. What a size may spare is bounded before a mesh is searched: where that is
too little for any plan on it, the search prices the compiler's size and is exact; elsewhere it
prices the largest, so that what it proves holds for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from costmodels.overlap import gradients_hidden
from planner.machine.mesh_choices import divisors
from planner.sharding.layout import Axes

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.execution.collective import CollectiveUse
    from planner.pricing.pricer import Pricer

OPEN = "open"
"""No pin: the best size where it gains something notable (AUTO: whatever it gains)."""
SIZES = tuple(2**k * 2**20 for k in range(0, 11, 2))
"""Bytes of a bucket that are tried: 1 MiB to 1 GiB."""
TIE = 1e-3
"""Sizes whose reductions and gathers take no more than this beyond the least, as a fraction, are as
good; the smallest is taken."""
NOTABLE = 1e-3
"""Share of a plan's step that another size than the compiler's must spare to be chosen without a
pin."""
PADDED = 2.0
"""Times its bytes that a gradient takes at most where its pieces are padded
(planner.execution.layout_flow); no launch is larger than all of them."""
Way = tuple[str, Axes]
KINDS = ("all_gather", "all_reduce", "reduce_scatter")
"""What the compiler has such a size for."""


def kinds(zero: int) -> tuple[str, ...]:
    """What is sent together under an ZeRO stage. Weights of ZeRO stage 3 are gathered, and their
    gradients scattered, where they are used: a size for those would be one of how many whole
    weights wait in memory, and the compiler's own stays."""
    return ("all_reduce",) if zero == 3 else KINDS


def bounding(base: GraphFacts, pricer: Pricer, least_s: float) -> Pricer:
    """What a mesh is searched by where sizes are open: the pricer itself, or where a size might be
    chosen for a plan of at least so many seconds one that is below all sizes."""
    if not_recomputed_s(base, pricer) <= NOTABLE * least_s:
        return pricer
    counts = divisors(prod(pricer.sizes.values()))
    padding = {
        shape: min(
            PADDED, prod(max(-(-d // n) * n / d for n in counts if n < 2 * d) for d in shape)
        )
        for shape, _ in base.reduced
    }
    every = _reduced_bytes(pricer) * sum(
        times * prod(shape) * padding[shape] for (shape, _), times in base.reduced.items()
    )
    return replace(
        pricer, runtime=replace(pricer.runtime, bucket_bytes=min(SIZES[-1], every)), memo={}
    )


def not_recomputed_s(base: GraphFacts, pricer: Pricer) -> float:
    """No size spares a plan on the mesh more seconds: of the launches that whole gradients would
    be, of each kind all but one, at the longest latency of any axes."""
    wide = _reduced_bytes(pricer)
    launches = sum(
        times * min(1 / repeats, prod(shape) * wide / pricer.runtime.bucket_bytes)
        for (shape, repeats), times in base.reduced.items()
    )
    ways = [axes for k in range(len(pricer.sizes)) for axes in combinations(pricer.sizes, k + 1)]
    latency = max(
        (
            line[0]
            for axes in ways
            for kind in KINDS
            for line in pricer.lines(kind.replace("_", "-"), axes)
        ),
        default=0.0,
    )
    return len(KINDS) * max(0.0, launches - 1) * latency


def _reduced_bytes(pricer: Pricer) -> float:
    """Bytes of one element, as it is reduced, or gathered where that is more."""
    return max(pricer.recipe.reduction_bytes, pricer.recipe.parameter_bytes)


def launched(uses: Iterable[CollectiveUse], bucket_bytes: int) -> dict[Way, float]:
    """(kind, axes) -> bytes of one launch of what travels together: no more than there are.
    bucket_bytes: a plan's; of 0 nothing is said, and the profile's size holds."""
    totals = _totals(use for use in uses if use.bucketed)
    return {way: min(total, bucket_bytes) for way, total in totals.items()} if bucket_bytes else {}


def _totals(uses: Iterable[CollectiveUse]) -> dict[Way, float]:
    sums: dict[Way, float] = {}
    for use in uses:
        sums[use.kind, use.axes] = sums.get((use.kind, use.axes), 0.0) + use.total_bytes
    return sums


def _joined(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    """Equal collectives, as those of the repeats of a block, as one that runs as often as all of
    them: the same seconds but for rounding."""
    alike: dict[tuple, list[CollectiveUse]] = {}
    for use in uses:
        alike.setdefault(
            (
                use.kind,
                use.axes,
                use.payload_bytes,
                use.count,
                use.phase,
                use.bucketed,
                use.stacked,
                use.strided,
                use.joined,
            ),
            [],
        ).append(use)
    return tuple(replace(same[0], count=same[0].count * len(same)) for same in alike.values())


def seconds(
    uses: Iterable[CollectiveUse], pricer: Pricer, sizes: Mapping[Way, float]
) -> list[tuple[CollectiveUse, float, float]]:
    """Every collective with its seconds, and those of them that hide under the backward pass: the
    profile's share of the gradients', but for the last launch. Which axes that is over is the
    compiler's choice: the one that takes longest."""
    uses = tuple(uses)
    known: dict[tuple, float] = {}
    rows = []
    for use in uses:
        key = (
            use.kind,
            use.axes,
            use.payload_bytes,
            use.count,
            use.bucketed,
            use.stacked,
            use.strided,
            use.joined,
        )
        if key not in known:
            known[key] = pricer.use_s(use, sizes.get((use.kind, use.axes), 0.0))
        rows.append((use, known[key]))
    gradient_s = sum(s for use, s in rows if use.phase == "gradient")
    overlap = pricer.runtime.overlap if gradient_s else 0.0
    last = 0.0
    if overlap and sizes:
        late = _totals(use for use in uses if use.phase == "gradient" and use.bucketed)
        last = max(
            (pricer.collective_s(*way, min(total, sizes[way])) for way, total in late.items()),
            default=0.0,
        )
    share = gradients_hidden(overlap, gradient_s, last)
    return [(use, s, share * s if use.phase == "gradient" else 0.0) for use, s in rows]


def launching_s(sent: Iterable[tuple[CollectiveUse, float, float]], pricer: Pricer) -> float:
    """Of what `seconds` found, those of launches of what travels together: no size spares more."""
    least: dict[tuple[str, Axes, int, int], float] = {}
    total = 0.0
    for use, s, _ in sent:
        if use.bucketed:
            key = use.kind, use.axes, use.payload_bytes, use.count
            if key not in least:
                least[key] = pricer.use_s(use, math.inf)
            total += s - least[key]
    return total
