"""Time of collectives over a group of devices that spans link levels, and exact ring bytes.

A group is a tuple of `Span(size, ...)`, innermost first: `size` members at each level, sizes multiply to the group's. Per level, with n members, S bytes
of the full tensor on it, B the effective bandwidth and a the latency of a step:

    all-gather, reduce-scatter   (n-1) a + S (n-1)/n / B
    all-reduce                   2 (n-1) a + 2 S (n-1)/n / B      ring;  tree: 2 log2(n) a + 2 S / B;  in-switch: 2 a + S / bus
    all-to-all                   (n-1) a + S (n-1)/n / B
    permute                      a + S / B

Over several levels collectives are hierarchical: reduce-scatter inside, the collective across on the shards, all-gather inside. Every price is a minimum
of affine functions latency + bytes * slope ("lines"), so that it is memoised once per group and applied to any payload.
A torus level uses both directions of each of its dims: the ring bandwidth is 2 * links' bandwidth * dims spanned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
Line = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """The part of a group on one link level: members, effective bytes per second per device and direction, latency of a step."""

    size: int
    bytes_per_s: float
    latency_s: float
    bus_bytes_per_s: float = 0.0
    """Bus bandwidth of in-network all-reduce, 0 when there is none."""


def wire_bytes(kind: str, payload_bytes: int, members: int) -> Fraction:
    """Exact bytes one device sends under the ring algorithm."""
    share = Fraction(payload_bytes * (members - 1), members)
    return {"all-reduce": 2 * share, "collective-permute": Fraction(payload_bytes)}.get(kind, share)


def collective_lines(kind: str, group: tuple[Span, ...]) -> tuple[Line, ...]:
    """(latency_s, s_per_byte) lines whose minimum is the time of the collective as a function of its payload (semantics of payload: module)."""
    spans = tuple(s for s in group if s.size > 1)
    if not spans:
        return ((0.0, 0.0),)
    if kind == "all-reduce":
        return _all_reduce(spans)
    if kind in ("all-gather", "reduce-scatter"):
        return (_scatter(spans),)
    if kind == "all-to-all":
        # Each device sends 1/n of its payload to each other member; what crosses an outer level leaves through that level's link.
        total = math.prod(s.size for s in spans)
        latency, slope, inner = 0.0, 0.0, 1
        for s in spans:
            crossing = (inner * s.size - inner) / total * (total / (inner * s.size))
            slope = max(slope, crossing / s.bytes_per_s)
            latency += (s.size - 1) * s.latency_s
            inner *= s.size
        return ((latency, slope),)
    if kind == "collective-permute":
        worst = spans[-1]
        return ((worst.latency_s, 1 / worst.bytes_per_s),)
    raise ValueError(f"unknown collective {kind!r}")


def _scatter(spans: tuple[Span, ...]) -> Line:
    """All-gather or reduce-scatter of a full tensor of S bytes: inner level first on all of it, outer levels on the shards."""
    latency = slope = 0.0
    shard = 1.0
    for s in spans:
        latency += (s.size - 1) * s.latency_s
        slope += shard * (s.size - 1) / s.size / s.bytes_per_s
        shard /= s.size
    return latency, slope


def _all_reduce(spans: tuple[Span, ...]) -> tuple[Line, ...]:
    """Hierarchical: reduce-scatter inside, all-reduce of the shard across, all-gather inside; at each level the better of its algorithms."""
    lines = _level_all_reduce(spans[-1])
    for s in reversed(spans[:-1]):
        inside_latency, inside_slope = 2 * (s.size - 1) * s.latency_s, 2 * (s.size - 1) / s.size / s.bytes_per_s
        tree_latency = 2 * math.ceil(math.log2(s.size)) * s.latency_s
        grown = [(inside_latency + a, inside_slope + b / s.size) for a, b in lines]
        # Small payloads: every level reduces the whole payload by tree, without scattering.
        grown += [(tree_latency + a, 2 / s.bytes_per_s + b) for a, b in lines]
        if s.bus_bytes_per_s:
            grown += [(4 * s.latency_s + a, 2 * (s.size - 1) / s.size / s.bus_bytes_per_s + b / s.size) for a, b in lines]
        lines = tuple(grown)
    return _lower(lines)


def _level_all_reduce(s: Span) -> tuple[Line, ...]:
    ring = (2 * (s.size - 1) * s.latency_s, 2 * (s.size - 1) / s.size / s.bytes_per_s)
    tree = (2 * math.ceil(math.log2(s.size)) * s.latency_s, 2 / s.bytes_per_s)
    lines = [ring, tree]
    if s.bus_bytes_per_s:
        # Bus bandwidth is quoted as 2 (n-1)/n S / time.
        lines.append((2 * s.latency_s, 2 * (s.size - 1) / s.size / s.bus_bytes_per_s))
    return tuple(lines)


def _lower(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Without lines that are nowhere the smallest."""
    kept: list[Line] = []
    for a, b in sorted(set(lines)):
        if not kept or b < kept[-1][1]:
            kept.append((a, b))
    return tuple(kept)


def collective_time_s(kind: str, payload_bytes: float, group: tuple[Span, ...]) -> float:
    """Seconds of one collective of a payload over a group."""
    return min(a + payload_bytes * b for a, b in collective_lines(kind, group)) if payload_bytes else 0.0
