"""Quantities with their units written out: "450 GB/s", "2 us", "80 GiB", "989 TFLOP/s", "700 W",
"6.88 USD/h". GB (10^9) and GiB (2^30) are never mixed."""

from __future__ import annotations

import math
import re

_SIZE = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS = {"Kb": 10**3 / 8, "Mb": 10**6 / 8, "Gb": 10**9 / 8, "Tb": 10**12 / 8}
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+(?:/[sh])?)\s*")


class UnitError(ValueError):
    """A quantity without a unit, or with one that does not belong there."""


def _split(text: object, kind: str, units: dict[str, float]) -> tuple[float, float]:
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if not match:
        raise UnitError(
            f"{text!r} is not a {kind}: write a number and a unit, one of {', '.join(units)}"
        )
    number, unit = match.groups()
    if unit not in units:
        raise UnitError(f"{text!r}: {unit!r} is not a unit of {kind}: one of {', '.join(units)}")
    if not math.isfinite(float(number) * units[unit]):
        raise UnitError(f"{str(text)[:20]!r}... is too large for a {kind}")
    return float(number), units[unit]


def size_bytes(text: object) -> int:
    """Bytes of "80 GiB" or "16 GB", exact."""
    number, unit = _split(text, "size", _SIZE)  # type: ignore[arg-type]
    return round(number * unit)


def bandwidth_bytes_per_s(text: object) -> float:
    """Bytes per second of "450 GB/s" or "400 Gb/s" (bits)."""
    number, unit = _split(text, "bandwidth", {f"{u}/s": v for u, v in {**_SIZE, **_BITS}.items()})
    return number * unit


def time_s(text: object) -> float:
    """Seconds of "2 us"."""
    number, unit = _split(text, "time", _TIME)
    return number * unit


def rate_flops_per_s(text: object) -> float:
    """FLOPs per second of "989 TFLOP/s"."""
    number, unit = _split(text, "rate", _RATE)  # type: ignore[arg-type]
    return number * unit


def power_w(text: object) -> float:
    """Watts of "700 W"."""
    number, unit = _split(text, "power", {"W": 1.0})
    return number * unit


def price_usd_per_h(text: object) -> float:
    """US dollars an hour of "6.88 USD/h"."""
    number, unit = _split(text, "price", {"USD/h": 1.0})
    return number * unit


def show_bytes(size: float) -> str:
    """A size for people, in binary units: "74.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def show_time(seconds: float) -> str:
    """A time for people: "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or unit == "us":
            return (
                f"{seconds / scale:.3g} {unit}"
                if abs(seconds) < 100 * scale
                else f"{seconds / scale:,.0f} {unit}"
            )
    raise AssertionError
