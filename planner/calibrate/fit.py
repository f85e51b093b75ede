"""Samples -> the figures of a device file, each with its relative standard error.

    products     efficiency(F) = F / time / peak at the measured sizes, joined by a monotone curve
                 (below); other types: their rate over the main type's
                 by their extents, on devices with tiles: planner.calibrate.products
    memory       geometric mean of bytes / time of the cases that a launch does not bound
    launch       time of a tiny kernel in a chain
    attention    of a width of heads, time = FLOPs / (peak * efficiency) + passes * bytes /
                 (bandwidth * memory efficiency): least squares of relative errors over lengths,
                 passes shared by all widths; the backward pass is what both take less the forward
                 one
    a link       latency and bandwidth of costmodels.collectives' own formulas: robust least squares
                 on log(measured / priced) over all collectives, group sizes and payloads of that
                 link: a switch, or the memory that virtual devices of a CPU share

Standard errors: of a mean, the deviation of the logarithms / sqrt(n); of a link, from the curvature
of the least squares. The curve: the rates at close sizes are pooled, neighbours that fall are
pooled (the least-squares monotone curve), and no rate may fall in time: F grows no slower than the
rate does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.collectives import KINDS, MEMORY, Span, collective_time_s
from planner.calibrate.cases import MAIN_DTYPE, Sample
from planner.calibrate.products import MeasuredProduct
from planner.errors import PlanError

CLOSE = 1.5
"""Products whose FLOPs differ by less are one point of the curve."""
LEAST_ERROR = 0.01
"""No figure is said to be known better than this: clocks and caches change between runs by as
much."""
LAUNCHES = 3.0
"""A pass over memory tells of bandwidth when it takes so many launches."""
MOST_OFF = 0.25
"""Attention whose measured times a rate and passes over memory explain no better than this is none
of theirs: a plan by such figures would be worse than by those of the file."""
MOST_FALL = 3.0
"""Rates of products that fall by more than this with size are no rates of a device: something else
ran."""


@dataclass(frozen=True)
class Estimate:
    """A figure, its relative standard error, and how many samples it rests on."""

    value: float
    error: float
    samples: int


@dataclass(frozen=True)
class LinkFit:
    """A link: bytes per second of a device and seconds of a step. off: typical |log(measured /
    priced)|, by kind of collective.

    bus, bus_latency: an all-reduce over the whole node that is faster than its rings, where there
    is one.
    """

    kind: str
    bandwidth: Estimate
    latency: Estimate
    off: dict[str, float]
    bus: Estimate | None = None
    bus_latency: Estimate | None = None


@dataclass(frozen=True)
class AttentionFit:
    """A fused attention: FLOP/s of each pass by width of heads, and how often it goes over operands
    and results at the device's rate of memory. off: the largest |fitted / measured - 1|."""

    widths: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    passes: tuple[float, float]
    off: float
    samples: int


@dataclass(frozen=True)
class Figures:
    """What was measured. rate: FLOP/s of the main type's fastest products; curve: (FLOPs, FLOP/s)
    of products of that type, rising; others: type -> multiple of it.

    fastest_memory: best rate of any pass, bytes per second."""

    rate: Estimate
    curve: tuple[tuple[float, float], ...]
    others: dict[str, Estimate]
    memory: Estimate
    fastest_memory: float
    launch: Estimate
    inner: LinkFit | None
    outer: LinkFit | None
    attention: AttentionFit | None = None
    products: tuple[MeasuredProduct, ...] = ()
    """Those behind the curve, by their extents."""


def fit(samples: Sequence[Sample], kind: str, devices: int, node_size: int) -> Figures:
    """Figures of `devices` in nodes of `node_size`. Raises PlanError P180 for samples that no
    device can give."""
    for s in samples:
        if not (math.isfinite(s.time_s) and s.time_s > 0 and s.spread >= 0):
            raise PlanError(
                "P180",
                f"{_name(s)} took {s.time_s:g} s: that is no measurement",
                help=["run again when the machine does nothing else, without --quick"],
            )
    launch = _mean([s.time_s for s in _of(samples, "tiny")])
    products = [s for s in _of(samples, "matmul") if s.case.dtype == MAIN_DTYPE[kind]]
    curve = monotone([(s.case.flops, s.case.flops / s.time_s) for s in products])
    spread = [math.log(s.case.flops / s.time_s / rate_at(curve, s.case.flops)) for s in products]
    rate = Estimate(curve[-1][1], _error(spread), len(products))
    passes = [
        s.case.size_bytes / s.time_s
        for k in ("stream", "reduce")
        for s in _of(samples, k)
        if s.time_s > LAUNCHES * launch.value
    ]
    if not passes:
        raise PlanError(
            "P180",
            "no pass over memory took longer than a few launches",
            help=["run without --quick"],
        )
    others: dict[str, Estimate] = {}
    for dtype in dict.fromkeys(s.case.dtype for s in _of(samples, "matmul")):
        if dtype != MAIN_DTYPE[kind]:
            others[dtype] = _mean(
                [
                    s.case.flops / s.time_s / rate_at(curve, s.case.flops)
                    for s in _of(samples, "matmul")
                    if s.case.dtype == dtype
                ]
            )
    inside = [
        s
        for s in samples
        if s.case.kind in KINDS and s.case.stride == 1 and s.case.members <= node_size
    ]
    across = [
        s
        for s in samples
        if s.case.kind in KINDS and s.case.stride == node_size and node_size < devices
    ]
    inner = fit_link(inside, MEMORY if kind == "cpu" else "switch", node_size)
    return Figures(
        rate=rate,
        curve=curve,
        others=others,
        memory=_mean(passes),
        fastest_memory=max(passes),
        launch=launch,
        inner=inner,
        outer=fit_link(across, "switch", 0),
        attention=fit_attention(_of(samples, "attention"), _mean(passes).value),
        products=tuple(_product(s) for s in products),
    )


def fit_attention(samples: Sequence[Sample], memory: float) -> AttentionFit | None:
    """The figures of fused attention. memory: bytes per second of its passes. None where fewer than
    two lengths of a width were measured, or what was measured makes no rates (MOST_OFF)."""
    widths = tuple(sorted({s.case.edge for s in samples}))
    sample_of = {(s.case.edge, s.case.rows, s.case.backward): s for s in samples}
    rates: list[tuple[float, ...]] = []
    passes, off = list[float](), 0.0
    for backward in (False, True):
        cases = list[tuple[int, float, float, float]]()  # width, FLOPs, bytes, seconds
        for (width, rows, both), s in sample_of.items():
            less = sample_of.get((width, rows, False))
            if both is not backward or less is None:
                continue
            minus = less if backward else None
            cases.append(
                (
                    width,
                    s.case.flops - (minus.case.flops if minus else 0),
                    s.case.size_bytes - (minus.case.size_bytes if minus else 0),
                    s.time_s - (minus.time_s if minus else 0),
                )
            )
        lengths = {w: sum(case[0] == w for case in cases) for w in widths}
        if not cases or min(lengths.values()) < 2 or min(t for *_, t in cases) <= 0:
            return None
        terms = np.array(
            [
                [*(flops / t if w == width else 0.0 for w in widths), size / memory / t]
                for width, flops, size, t in cases
            ]
        )
        solution = np.linalg.lstsq(terms, np.ones(len(cases)), rcond=None)[0]
        if solution.min() <= 0:
            return None
        rates.append(tuple(float(1 / x) for x in solution[:-1]))
        passes.append(float(solution[-1]))
        off = max(off, float(np.abs(terms @ solution - 1).max()))
    if off > MOST_OFF:
        return None
    return AttentionFit(widths, rates[0], rates[1], (passes[0], passes[1]), off, len(samples))


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(FLOPs, rate) points as a curve that rises, no faster than FLOPs do (module docstring).
    Raises PlanError P180 where they fall far."""
    merged: list[list[tuple[float, float]]] = []
    for x, y in sorted(points):
        if merged and x < CLOSE * merged[-1][0][0]:
            merged[-1].append((x, y))
        else:
            merged.append([(x, y)])
    xs = [_geometric([x for x, _ in group]) for group in merged]
    ys = [_geometric([y for _, y in group]) for group in merged]
    top = 0.0
    for x, y in zip(xs, ys, strict=True):
        top = max(top, y)
        if y * MOST_FALL < top:
            raise PlanError(
                "P180",
                f"products of {x:.3g} FLOPs run at {y / 1e9:.3g} GFLOP/s, smaller ones at"
                f" {top / 1e9:.3g}: rates that fall are none of a device",
                help=["run again when the machine does nothing else"],
            )
    pools: list[list[float]] = []  # (sum of logs, count) of neighbours with one value
    for y in ys:
        pools.append([math.log(y), 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, n = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + n]
    level = [math.exp(total / n) for total, n in pools for _ in range(int(n))]
    curve = [(xs[0], level[0])]
    for x, y in zip(xs[1:], level[1:], strict=True):
        curve.append((x, min(y, curve[-1][1] * x / curve[-1][0])))
    return tuple(curve)


def rate_at(curve: Sequence[tuple[float, float]], flops: float) -> float:
    """The curve between its points, as costmodels.hardware.device reads it: a power law, level
    outside."""
    xs, ys = [math.log(x) for x, _ in curve], [math.log(y) for _, y in curve]
    return float(np.exp(np.interp(math.log(flops), xs, ys)))


def fit_link(samples: Sequence[Sample], kind: str, node_members: int) -> LinkFit | None:
    """The link of a kind (costmodels.collectives) that explains the collectives best; None without
    samples. node_members: those of a full node, whose all-reduce may have a way of its own where
    the kind is switch."""
    if not samples:
        return None
    from scipy.optimize import least_squares

    measured = np.log([s.time_s for s in samples])

    def left(theta: np.ndarray) -> np.ndarray:
        latency, rate = (float(x) for x in np.exp(theta))
        priced = [
            collective_time_s(
                s.case.kind, s.case.size_bytes, (Span(s.case.members, rate, latency, kind=kind),)
            )
            for s in samples
        ]
        return np.asarray(np.log(priced) - measured)

    fast = max(samples, key=lambda s: s.case.size_bytes / s.time_s)
    start = np.log([min(s.time_s for s in samples), fast.case.size_bytes / fast.time_s])
    done = least_squares(left, start, loss="soft_l1", f_scale=0.3)
    residual = left(done.x)
    scale = float(np.mean(residual**2)) * len(samples) / max(1, len(samples) - 2)
    errors = np.sqrt(np.diag(np.linalg.pinv(done.jac.T @ done.jac)) * scale)
    latency, rate = (
        Estimate(float(np.exp(x)), max(LEAST_ERROR, float(e)), len(samples))
        for x, e in zip(done.x, errors, strict=True)
    )
    off = {
        k: float(
            np.median([abs(r) for s, r in zip(samples, residual, strict=True) if s.case.kind == k])
        )
        for k in KINDS
        if any(s.case.kind == k for s in samples)
    }
    link = LinkFit(kind, rate, latency, off)
    return with_bus(link, samples, node_members) if kind == "switch" else link


def with_bus(link: LinkFit, samples: Sequence[Sample], node_members: int) -> LinkFit:
    """The link with an all-reduce of its own over a full node, where that is measured and clearly
    faster than rings and trees: reduction in the switch."""
    mine = sorted(
        (s for s in samples if s.case.kind == "all-reduce" and s.case.members == node_members),
        key=lambda s: s.case.size_bytes,
    )
    if len(mine) < 3:
        return link
    span = Span(node_members, link.bandwidth.value, link.latency.value)
    gains = [
        collective_time_s("all-reduce", s.case.size_bytes, (span,)) / s.time_s for s in mine[-2:]
    ]
    if min(gains) < 1.25:
        return link
    payload, seconds = (
        np.array([float(s.case.size_bytes) for s in mine]),
        np.array([s.time_s for s in mine]),
    )
    delay, slope = (
        float(x) for x in np.polynomial.polynomial.polyfit(payload, seconds, 1, w=1 / seconds)
    )
    if delay <= 0 or slope <= 0:
        return link
    error = _error([math.log((delay + slope * s.case.size_bytes) / s.time_s) for s in mine])
    return replace(
        link,
        bus=Estimate(2 * (node_members - 1) / node_members / slope, error, len(mine)),
        bus_latency=Estimate(delay, error, len(mine)),
    )


def _of(samples: Sequence[Sample], kind: str) -> list[Sample]:
    return [s for s in samples if s.case.kind == kind]


def _product(s: Sample) -> MeasuredProduct:
    return MeasuredProduct(s.case.rows, s.case.edge, s.case.edge, s.time_s)


def _name(s: Sample) -> str:
    c = s.case
    return f"{c.kind} of {c.size_bytes} bytes" + (
        f" over {c.members} devices" if c.members > 1 else ""
    )


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _error(logs: Sequence[float]) -> float:
    return max(
        LEAST_ERROR, float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.5
    )


def _mean(values: Sequence[float]) -> Estimate:
    """Geometric mean. A single value's own error is taken from nothing better than LEAST_ERROR's
    tenfold."""
    return Estimate(
        _geometric(values),
        _error([math.log(v) for v in values]) if len(values) > 1 else 10 * LEAST_ERROR,
        len(values),
    )
