"""Devices of several kinds that run one program together: at every figure the slowest, or the
smallest, of them.

A program of one mesh gives every device an equal share, and collectives wait for the last. So a
kernel takes what it takes on the device that needs most:

    time = max over devices of max(FLOPs / rate, bytes / bandwidth, launch)
         = max(FLOPs / least rate, bytes / least bandwidth, longest launch)

and what fits is what fits in the smallest memory. The least rate changes from one size of products
to another where curves of efficiency cross; it is taken at all points of all curves, for 16-bit
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodels.hardware.device import (
    AttentionPass,
    Device,
    DeviceError,
    FusedAttention,
    HeadWidths,
)
from costmodels.hardware.tiles import Tiles

DTYPE = "bfloat16"
"""Type of the products whose rates are compared."""
COMMON_WIDTH = 128
"""Elements of a head at which kernels of attention are compared: most models' today."""


def slowest(groups: Sequence[tuple[Device, int]]) -> Device:
    """What (device, how many of it) amount to when each gets as much work as any other; watts and
    USD/h are means of all. Raises DeviceError for unlike kinds."""
    devices = list(dict.fromkeys(d.source for d, _ in groups))
    kinds = [next(d for d, _ in groups if d.source == source) for source in devices]
    if len({d.kind for d in kinds}) > 1:
        raise DeviceError(
            f"{' and '.join(f'{d.name} ({d.kind})' for d in kinds)} cannot run one program"
        )
    if len({d.kubernetes for d in kinds}) > 1:
        raise DeviceError(
            f"{' and '.join(f'{d.name} ({d.kubernetes})' for d in kinds)} have no collectives in"
            " common: each maker's library joins its own devices"
        )
    if len(kinds) == 1:
        return kinds[0]
    types = sorted({t for d in kinds for t in d.peak_flops_per_s})
    peak = {t: min(d.peak(t) for d in kinds) for t in types}
    least_peak = min(d.peak(DTYPE) for d in kinds)
    points = tuple(sorted({x for d in kinds for x in d.matmul_flops}))
    memory = min(kinds, key=lambda d: d.memory_bytes_per_s * d.memory_efficiency)
    inner, outer = (
        min(links, key=lambda x: x.bandwidth_bytes_per_s * x.efficiency)
        for links in ([d.inner for d in kinds], [d.outer for d in kinds])
    )
    return Device(
        name="+".join(d.name for d in kinds),
        kind=kinds[0].kind,
        node_size=min(d.node_size for d in kinds),
        peak_flops_per_s=peak,
        matmul_flops=points,
        matmul_efficiency=tuple(
            min(1.0, min(d.peak(DTYPE) * d.efficiency(x) for d in kinds) / least_peak)
            for x in points
        ),
        memory_bytes=min(d.memory_bytes for d in kinds),
        context_bytes=max(d.context_bytes for d in kinds),
        memory_bytes_per_s=memory.memory_bytes_per_s,
        memory_efficiency=memory.memory_efficiency,
        launch_s=max(d.launch_s for d in kinds),
        inner=inner,
        outer=outer,
        host_bytes_per_s=min(d.host_bytes_per_s for d in kinds),
        watts=_mean([(d.watts, n) for d, n in groups]),
        usd_per_h=_mean([(d.usd_per_h, n) for d, n in groups]),
        tile=next((d.tile for d in kinds if d.tile), None),
        on_chip_bytes=min(d.on_chip_bytes for d in kinds),
        attention=_attention(kinds),
        tiles=_tiles(kinds, least_peak),
    )


def slowed(device: Device, share: float) -> Device:
    """A device at a share of its speed, above 0: products, memory and launches. Its links and its
    memory's size stay as they are."""
    return replace(
        device,
        name=f"{device.name} at {share:g}",
        file="",
        peak_flops_per_s={t: rate * share for t, rate in device.peak_flops_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s * share,
        launch_s=device.launch_s / share,
        tiles=device.tiles
        and replace(
            device.tiles,
            start_s=device.tiles.start_s / share,
            kernel_s=device.tiles.kernel_s / share,
            sums_bytes_per_s=device.tiles.sums_bytes_per_s * share,
        ),
    )


def _attention(every: Sequence[Device]) -> FusedAttention | None:
    """The kernel that all devices have, as the device has it whose is the slowest, its rates as
    fractions of the least peak; None where they have none in common."""
    kernels = [d.attention for d in every if d.attention]
    if len(kernels) < len(every) or len({k.kernel for k in kernels}) > 1:
        return None
    peaks = [d.peak(DTYPE) for d in every]
    of = AttentionPass(False, COMMON_WIDTH)
    peak, slowest = min(
        zip(peaks, kernels, strict=True), key=lambda pair: pair[0] * pair[1].efficiency(of)
    )
    forward, backward = (
        tuple(min(1.0, x * peak / min(peaks)) for x in rates)
        for rates in (slowest.forward, slowest.backward)
    )
    latent = {k.heads.latent for k in kernels}
    heads = HeadWidths(min(k.heads.most for k in kernels), *(latent if len(latent) == 1 else ()))
    return replace(slowest, forward=forward, backward=backward, heads=heads)


def _tiles(every: Sequence[Device], peak: float) -> Tiles | None:
    """The tiles of a mixed machine: as many units as the device with the fewest has, as fast as the
    slowest; None where a device is priced by FLOPs alone. peak: what the rate is a fraction of."""
    tiled = [(d, d.tiles) for d in every if d.tiles]
    if len(tiled) < len(every):
        return None
    units = min(t.units for _, t in tiled)
    shapes = [x for x in tiled[0][1].shapes if all(x in t.shapes for _, t in tiled)]
    if not shapes:
        return None
    return replace(
        tiled[0][1],
        units=units,
        shapes=tuple(shapes),
        efficiency=min(d.peak(DTYPE) * t.efficiency / t.units for d, t in tiled) * units / peak,
        start_s=max(t.start_s for _, t in tiled),
        kernel_s=max(t.kernel_s for _, t in tiled),
        sums_bytes_per_s=min(t.sums_bytes_per_s for _, t in tiled),
        convolutions=min(t.convolutions for _, t in tiled),
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean of one figure over all devices; None where one of them has none."""
    known = [(v, n) for v, n in values if v is not None]
    return (
        sum(v * n for v, n in known) / sum(n for _, n in known)
        if len(known) == len(values)
        else None
    )
