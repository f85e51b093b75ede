"""Time of collectives over a group of devices that spans link levels, and exact ring bytes.

A group is a tuple of `Span`s, innermost first; their sizes multiply to the group's. On one span of
n members, with P bytes of payload, B bytes per second a device can move over all the links the
collective uses, and a seconds per step:

    all-gather, reduce-scatter   steps a + P (n-1)/n / B
    all-reduce                   twice that (ring);   2 log2(n) a + 2 P / B (tree);   a' + 2 P
                                 (n-1)/n / bus (reduced inside the switch)
    all-to-all                   steps a + P (n-1)/n / B;   on a torus dim P floor(n^2/4)/n / B:
                                 bytes cross every link between sender and receiver
    permute                      a + P / (one link's rate)
    dispatch                     a + P (n-1)/n / B: an all-to-all by a kernel that writes to every
                                 receiver at once

Payload: operand bytes for all-reduce, reduce-scatter, all-to-all and permute; result bytes for
all-gather.

    kind     steps   B                                       example
    switch   n-1     the device's port                       NVSwitch, a fabric with one NIC a
             device
    mesh     1       (n-1) links, one to each other member   xGMI, HCCS
    ring     n/2     two directions of a wrapped torus dim   TPU
    line     n-1     one direction: no wrap, or part of a dim
    memory   log2 n  the device's share of its host's memory    virtual devices

Virtual devices meet once, the later the more of them there are, and copy: c P / B in all, whichever
number of them takes part, where c is how often the payload is read or written (PASSES). Latency
counts once for an all-reduce too.

Across spans P/n of an inner span's bytes reach the next one (reduce-scatter inside, the collective
across on the shards, all-gather inside), and the spans work at the same time on different chunks:
latencies add, the slowest span sets the rate (NCCL's rings and trees; jax-ml/scaling-book, GPU
chapter). Several torus dims are one stage: pieces of the payload visit the dims in different
orders, so that all links are busy. Gathering over a set A of dims first lowers their traffic to P
(product of their sizes - 1)/n, and no order lowers it further, hence the best mixture of orders
needs

    max over non-empty sets A of dims   P (prod_A - 1) / n / sum_A B
                                        (_stage_slope)

All-to-all keeps every byte apart: sent directly, a span carries what stays inside its stage; sent
in stages, each span carries the whole payload once and there are fewer messages. Every price is the
minimum of affine functions latency + bytes * slope ("lines"), so that it is memoised once per
group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations

DISPATCH = "dispatch"
"""Rows sent to experts, and back, by kernels made for that (DeepEP, HybridEP)."""
COMPILED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""What compilers make of a program's collectives."""
KINDS = (*COMPILED, DISPATCH)
PIECEWISE = frozenset({"all-gather", "reduce-scatter", "all-to-all"})
"""What puts pieces of tensors together or takes tensors apart."""
Line = tuple[float, float]
TORUS = ("ring", "line")
MEMORY = "memory"
PASSES = {
    "all-gather": 2,
    "reduce-scatter": 4,
    "all-reduce": 3,
    "all-to-all": 4,
    DISPATCH: 4,
    "collective-permute": 3,
}
"""How often a payload is read or written where devices share a memory: a gather copies; a scatter
and an all-to-all first sort by receiver; an all-reduce is added up and copied to everyone; what is
sent is copied on arrival, and once more where a loop keeps it."""


@dataclass(frozen=True)
class Span:
    """The part of a group on one link level.

    size: members. bytes_per_s: effective rate of one device over all the links a collective uses.
    latency_s: of a step. bus_bytes_per_s: bus bandwidth of in-switch all-reduce, 0 when there is
    none; bus_latency_s: what that takes beside its bytes, two steps when 0. kind: switch, mesh,
    ring, line or memory (module docstring).
    """

    size: int
    bytes_per_s: float
    latency_s: float
    bus_bytes_per_s: float = 0.0
    kind: str = "switch"
    bus_latency_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of an all-gather."""
        return {"mesh": 1, "ring": self.size // 2, MEMORY: math.ceil(math.log2(self.size))}.get(
            self.kind, self.size - 1
        )

    @property
    def exchanged(self) -> float:
        """All-to-all: bytes over the busiest link per byte of payload, in units of bytes_per_s."""
        return (self.size**2 // 4 if self.kind in TORUS else self.size - 1) / self.size

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of a permute, which sends to one neighbour only."""
        return self.bytes_per_s / {"mesh": self.size - 1, "ring": 2}.get(self.kind, 1)


def wire_bytes(kind: str, payload_bytes: int, members: int) -> Fraction:
    """Exact bytes one device sends under the ring algorithm."""
    share = Fraction(payload_bytes * (members - 1), members)
    return {"all-reduce": 2 * share, "collective-permute": Fraction(payload_bytes)}.get(kind, share)


def collective_lines(kind: str, group: tuple[Span, ...]) -> tuple[Line, ...]:
    """(latency_s, s_per_byte) lines whose minimum is the time of the collective as a function of
    its payload."""
    spans = tuple(s for s in group if s.size > 1)
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}")
    if not spans:
        return ((0.0, 0.0),)
    if len(spans) == 1 and spans[0].kind == MEMORY:
        return ((spans[0].steps * spans[0].latency_s, PASSES[kind] / spans[0].bytes_per_s),)
    if kind == "all-reduce":
        return _all_reduce(spans)
    if kind == "all-to-all":
        return _all_to_all(spans)
    if kind == DISPATCH:
        *_, (_, slope) = _all_to_all(spans)
        return ((max(s.latency_s for s in spans), slope),)
    if kind == "collective-permute":
        return ((max(s.latency_s for s in spans), max(1 / s.link_bytes_per_s for s in spans)),)
    latency = slope = 0.0
    shard = 1.0
    for stage in _stages(spans):
        latency += _stage_latency_s(stage)
        slope = max(slope, shard * _stage_slope(stage))
        shard /= _stage_size(stage)
    return ((latency, slope),)


def ring_lines(kind: str, group: tuple[Span, ...]) -> tuple[Line, ...]:
    """As `collective_lines`, with rings that pass through all members of a group of several
    switched levels, node after node.

    An outer level then carries (N-1)/N of the payload through the ports of the members of a node
    together, N being all members, where shards that were made inside a node first would need
    (n-1)/n, n being the nodes: nearly twice as much for two nodes, the same for many. All-reduces
    may take a tree, or what a switch reduces.
    """
    spans = tuple(s for s in group if s.size > 1)
    if (
        len(spans) < 2
        or kind not in ("all-reduce", "all-gather", "reduce-scatter")
        or any(s.kind != "switch" for s in spans)
    ):
        return collective_lines(kind, group)
    members = math.prod(s.size for s in spans)
    rate, hops, inside = math.inf, 0.0, 1
    for s in spans:
        rate, hops = min(rate, inside * s.bytes_per_s), hops * s.size + (s.size - 1) * s.latency_s
        inside *= s.size
    times = 2 if kind == "all-reduce" else 1
    ring = (times * hops, times * (members - 1) / members / rate)
    if kind != "all-reduce":
        return (ring,)
    tree = (2 * sum(math.ceil(math.log2(s.size)) * s.latency_s for s in spans), 2 / rate)
    return _lower(
        [ring, tree, *(_all_reduce(spans) if any(s.bus_bytes_per_s for s in spans) else ())]
    )


def collective_time_s(kind: str, payload_bytes: float, group: tuple[Span, ...]) -> float:
    """Seconds of one collective of a payload over a group."""
    return (
        min(a + payload_bytes * b for a, b in collective_lines(kind, group))
        if payload_bytes
        else 0.0
    )


def _stages(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
    """Spans that work as one: neighbouring dims of a torus together, every other span alone."""
    stages: list[tuple[Span, ...]] = []
    for s in spans:
        if stages and s.kind in TORUS and stages[-1][-1].kind in TORUS:
            stages[-1] += (s,)
        else:
            stages.append((s,))
    return tuple(stages)


def _stage_size(stage: tuple[Span, ...]) -> int:
    return math.prod(s.size for s in stage)


def _stage_latency_s(stage: tuple[Span, ...]) -> float:
    return sum(s.steps * s.latency_s for s in stage)


def _stage_slope(stage: tuple[Span, ...]) -> float:
    """Seconds per byte of an all-gather or reduce-scatter over a stage."""
    n = _stage_size(stage)
    sets = chain.from_iterable(combinations(stage, k) for k in range(1, len(stage) + 1))
    return max((_stage_size(some) - 1) / n / sum(s.bytes_per_s for s in some) for some in sets)


def _all_reduce(spans: tuple[Span, ...]) -> tuple[Line, ...]:
    """Each stage in the better of its ways. Ring and switch leave a shard for the next stage; a
    tree passes the whole payload on."""
    so_far: list[tuple[float, float, float]] = [
        (0.0, 0.0, 1.0)
    ]  # latency, slope, share of the payload that goes on to the next stage
    for stage in _stages(spans):
        n, s = _stage_size(stage), stage[0]
        algorithms = [(2 * _stage_latency_s(stage), 2 * _stage_slope(stage), 1 / n)]
        if s.kind == "switch":
            algorithms.append((2 * math.ceil(math.log2(n)) * s.latency_s, 2 / s.bytes_per_s, 1.0))
        if s.bus_bytes_per_s:
            # Bus bandwidth is quoted as 2 (n-1)/n P / time.
            algorithms.append(
                (s.bus_latency_s or 2 * s.latency_s, 2 * (n - 1) / n / s.bus_bytes_per_s, 1 / n)
            )
        so_far = [
            (a + latency, max(b, share * slope), share * rest)
            for a, b, share in so_far
            for latency, slope, rest in algorithms
        ]
    return _lower((a, b) for a, b, _ in so_far)


def _all_to_all(spans: tuple[Span, ...]) -> tuple[Line, ...]:
    """Direct: every member sends to every other. Staged: span after span, each exchanging the whole
    payload among its few members."""
    total = math.prod(s.size for s in spans)
    direct_latency = direct_slope = staged_latency = staged_slope = 0.0
    inside = 1
    for stage in _stages(spans):
        reached = inside * _stage_size(stage)
        slowest = max(s.exchanged / s.bytes_per_s for s in stage)
        direct_latency += inside * _stage_latency_s(stage)
        direct_slope = max(direct_slope, reached / total * slowest)
        staged_latency += _stage_latency_s(stage)
        staged_slope += slowest
        inside = reached
    return _lower([(direct_latency, direct_slope), (staged_latency, staged_slope)])


def _lower(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Without lines that another one is below everywhere."""
    kept: list[Line] = []
    for a, b in sorted(set(lines)):
        if not kept or b < kept[-1][1]:
            kept.append((a, b))
    return tuple(kept)
