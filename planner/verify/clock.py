"""Where the time of a step goes, by part: the plan's price beside the roofline of the kernels that
were compiled. The record, and its lines in a report; planner.verify.timing fills it.

A time of neither column was measured. Both are of the same device figures and the same formula, so
that what is apart are bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.support.text import flops, hang, show_bytes, show_time

ATTENTION, PRODUCTS, HEAD, NORMS = "attention", "products", "head and loss", "norms"
ELEMENTWISE, COPIES, OPTIMIZER = "element-wise", "loops and copies", "optimizer"
PARTS = (ATTENTION, PRODUCTS, HEAD, NORMS, ELEMENTWISE, COPIES, OPTIMIZER)
APART = 0.25
"""Distance from the price, as a fraction of it, beyond which the time is said to be apart: a
guess, which fails no program."""


@dataclass(frozen=True)
class TimePart:
    """One part of a step on one device. priced_s: None where the plan does not say; kernels: runs
    of them; moved_bytes, flops: of all runs."""

    part: str
    priced_s: float | None
    compiled_s: float
    kernels: int
    moved_bytes: int
    flops: int


@dataclass(frozen=True)
class CollectiveTime:
    """Collectives of a step. count: runs; links_s: seconds on the links; exposed_s: seconds that
    kernels wait, by what the schedule has between start and done; whole: runs that are waited for
    from start to end; priced_exposed_s: what the plan counts as exposed."""

    count: int
    whole: int
    links_s: float
    exposed_s: float
    priced_exposed_s: float


@dataclass(frozen=True)
class Clock:
    """One step of one device. device: whose figures the roofline is made of; priced_for: the
    plan's own; limit_bytes: what a plan may use of a device's memory; unfused: attention that was
    priced with a fused kernel and compiled without, a phrase each; judged: whether what was
    compiled is what was priced; notes: what is not in the figures."""

    device: str
    priced_for: str
    parts: tuple[TimePart, ...]
    collectives: CollectiveTime
    peak_bytes: int
    limit_bytes: int
    unfused: tuple[str, ...] = ()
    judged: bool = True
    notes: tuple[str, ...] = ()

    @property
    def compiled_s(self) -> float:
        """Seconds of all kernels."""
        return sum(part.compiled_s for part in self.parts)

    @property
    def priced_s(self) -> float | None:
        """Seconds of all kernels as priced, where every part's price is known."""
        priced = [part.priced_s for part in self.parts]
        return None if None in priced else sum(s for s in priced if s is not None)

    @property
    def distance(self) -> float | None:
        """How far the kernels are from their price, as a fraction of it."""
        return (self.compiled_s - self.priced_s) / self.priced_s if self.priced_s else None

    @property
    def apart(self) -> bool:
        """Whether kernels take longer or shorter than priced by more than APART."""
        return self.distance is not None and abs(self.distance) > APART

    @property
    def says(self) -> str:
        """The verdict in words."""
        if self.unfused:
            return "; ".join(self.unfused)
        kernels = f"kernels {show_time(self.compiled_s)}"
        if self.judged and self.priced_s is not None and self.distance is not None:
            kernels += f" where {show_time(self.priced_s)} were priced ({self.distance:+.1%})"
        waits = f"waits {show_time(self.collectives.exposed_s)}, by roofline"
        return f"{kernels}, {waits}{'' if self.judged else '; priced for another program'}"

    def lines(self, width: int) -> list[str]:
        """The table by part and the lines below it."""
        priced = "priced" if self.priced_for == self.device else f"priced ({self.priced_for})"
        rows = [
            ("", priced, "compiled", "apart", "kernels", "moved", "FLOPs"),
            *map(_row, self.parts),
            _row(self._total()),
        ]
        sent = self.collectives
        free = self.limit_bytes - self.peak_bytes
        sentences = [
            f"collectives: {sent.count:,}, {show_time(sent.links_s)} on the links,"
            f" {show_time(sent.exposed_s)} of it exposed between start and done"
            f" ({show_time(sent.priced_exposed_s)} priced), {sent.whole:,} of them whole",
            f"peak {show_bytes(self.peak_bytes)},"
            f" {show_bytes(abs(free))} {'below' if free >= 0 else 'ABOVE'} the plan's limit of"
            f" {show_bytes(self.limit_bytes)}",
            *self.notes,
        ]
        return [
            *hang("", f"time by part, roofline of {self.device}; nothing was run:", width),
            *_columns(rows),
            *(line for text in sentences for line in hang("  - ", text, width)),
        ]

    def _total(self) -> TimePart:
        return TimePart(
            part="all kernels",
            priced_s=self.priced_s,
            compiled_s=self.compiled_s,
            kernels=sum(part.kernels for part in self.parts),
            moved_bytes=sum(part.moved_bytes for part in self.parts),
            flops=sum(part.flops for part in self.parts),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the sums."""
        data = asdict(self)
        data["compiled_s"], data["priced_s"] = self.compiled_s, self.priced_s
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Clock:
        """The inverse of `to_dict`."""
        return cls(
            device=data["device"],
            priced_for=data["priced_for"],
            parts=tuple(TimePart(**part) for part in data["parts"]),
            collectives=CollectiveTime(**data["collectives"]),
            peak_bytes=data["peak_bytes"],
            limit_bytes=data["limit_bytes"],
            unfused=tuple(data["unfused"]),
            judged=data["judged"],
            notes=tuple(data["notes"]),
        )


def _row(part: TimePart) -> tuple[str, ...]:
    return (
        part.part,
        "-" if part.priced_s is None else show_time(part.priced_s),
        show_time(part.compiled_s),
        f"{part.compiled_s / part.priced_s:.2f}x" if part.priced_s else "",
        f"{part.kernels:,}",
        f"{part.moved_bytes / 1e9:,.2f} GB",
        flops(part.flops) if part.flops else "",
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(wide[0]), *(c.rjust(n) for c, n in zip(row[1:], wide[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
