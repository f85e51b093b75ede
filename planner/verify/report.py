"""What `plan verify` found: predicted beside compiled, figure by figure, how far the program's
numbers are from the unsharded model's, and the verdicts.

A figure is *judged* when the prediction claims it: on virtual CPU devices payloads, dot FLOPs and
argument bytes of shard_map programs, which must be equal; on other targets all collectives
together, FLOPs, arguments, outputs and the peak of large programs, each within a tolerance. Others
(compiler-placed collectives of jit programs, temporaries of the CPU compiler) are shown beside and
decide nothing.

Verdicts are given, each with tolerances of its own: numbers, traffic, FLOPs and memory, and of
what was compiled for an accelerator time. Wrong numbers or traffic are a wrong program, and so is
attention without the fused kernel that it was priced with. FLOPs, memory and time are prices: where
a compiler makes them others, it is said, and the program is as right as before. What compilers do
on their own is told apart by their passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.hardware.units import show_bytes
from planner.support.text import Style, hang
from planner.verify.clock import Clock

NUMBERS, TRAFFIC, FLOPS, MEMORY, TIME = "numbers", "traffic", "FLOPs", "memory", "time"
OK, APART, WRONG, UNKNOWN = "ok", "apart", "wrong", "not judged"
"""States of a verdict. apart: a price is further from the plan than its tolerance, or the compiler
changed something on its own; the program is right."""
GAP = "  "
PEAK = "peak"
LEAST = 14
"""Columns that a mark keeps, however narrow the terminal."""


@dataclass(frozen=True)
class CompiledSizes:
    """What the compiler says of one program: text, and bytes of one device."""

    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries, aliased bytes once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True)
class Figure:
    """One quantity of one device and one step; `predicted` is None where the plan predicts nothing
    comparable.

    of: the verdict it belongs to. tolerance: largest distance allowed, as a fraction of what was
    compiled. off: the distance where it is not that of the two totals (a sum of differences that
    could cancel). shown: the distance is printed though it is not judged. own: how much of the
    distance the compiler's passes made on their own, which is allowed; by: what made it, in words.
    """

    what: str
    predicted: int | None
    compiled: int
    unit: str = "bytes"
    judged: bool = True
    note: str = ""
    tolerance: float = 0.0
    off: int | None = None
    shown: bool = False
    of: str = MEMORY
    own: int = 0
    by: str = ""

    @property
    def distance(self) -> int:
        """How far apart, in the figure's unit."""
        return (
            self.off
            if self.off is not None
            else abs(self.compiled - self.predicted)
            if self.predicted is not None
            else 0
        )

    @property
    def ok(self) -> bool:
        """Within the tolerance (equal where there is none), or not judged."""
        return not self.judged or (
            self.predicted is not None
            and self.distance - self.own <= self.tolerance * self.compiled
        )

    @property
    def mark(self) -> str:
        """What the last column says."""
        if not self.judged and not self.shown:
            return self.note
        if not self.distance:
            return "exact"
        if not self.judged:
            return self.apart
        if self.ok:
            return (
                f"{self.apart}, the compiler's own"
                if self.own
                else f"{self.apart}, within {100 * self.tolerance:.3g} %"
            )
        return (
            f"DIFFERS {self.apart}"
            if self.of == TRAFFIC
            else f"{self.apart}{f', beyond {100 * self.tolerance:.3g} %' if self.tolerance else ''}"
        )

    @property
    def apart(self) -> str:
        """The distance as a fraction of the prediction, or in the figure's unit where nothing was
        predicted; a sum of differences has no sign."""
        sign = (
            "sum of differences "
            if self.off is not None
            else "+"
            if self.compiled > (self.predicted or 0)
            else "-"
        )
        return sign + (
            f"{100 * self.distance / self.predicted:.2f} %"
            if self.predicted and self.distance < 10 * self.predicted
            else _number(self.distance, self.unit)
        )


@dataclass(frozen=True)
class Numbers:
    """Errors of the program that ran against the unsharded model (semantics: error of a tensor);
    sizes say what ran.

    error: of the outputs (inference) or of the loss (training). gradients: the largest of all, None
    for inference; `worst` names it.
    """

    size: str
    parameters: int
    error: float
    gradients: float | None
    worst: str
    tolerance: float

    @property
    def ok(self) -> bool:
        """Every error is a number within the tolerance."""
        return all(
            math.isfinite(e) and e <= self.tolerance for e in (self.error, self.gradients or 0.0)
        )


@dataclass(frozen=True)
class Verdict:
    """One of what is verified: numbers, traffic, FLOPs, memory or time."""

    name: str
    state: str
    """ok | apart | wrong | not judged"""
    says: str


@dataclass(frozen=True)
class VerifyReport:
    """Everything verified, and what was not: `not_run` says why there are no numbers when they were
    asked for."""

    model: str
    program: str
    mesh: Mapping[str, int]
    workload: str
    compiled: str
    figures: tuple[Figure, ...]
    numbers: Numbers | None = None
    not_run: str = ""
    asked: bool = True
    notes: tuple[str, ...] = ()
    machine: str = "virtual CPU devices"
    differences: tuple[str, ...] = ()
    """The tensor, operator or compiler pass behind each difference, a line each."""
    clock: Clock | None = None
    """Time by part; None where nothing was compiled for an accelerator."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Numbers, traffic, FLOPs and memory; of what was compiled for an accelerator time, too."""
        return (
            self._of_numbers(),
            self._of_traffic(),
            self._of_flops(),
            self._of_memory(),
            *([self._of_time(self.clock)] if self.clock else []),
        )

    @property
    def ok(self) -> bool:
        """The program is right: traffic is as predicted, the numbers, when asked for, were run and
        are within the tolerance, and attention that was priced with a fused kernel has one."""
        return all(v.state != WRONG for v in self.verdicts)

    def _of_numbers(self) -> Verdict:
        n = self.numbers
        if n is None:
            return Verdict(
                NUMBERS,
                WRONG if self.asked else UNKNOWN,
                f"not run ({self.not_run or 'not asked for'})",
            )
        worst = max(n.error, n.gradients or 0.0) if n.ok else math.nan
        return (
            Verdict(NUMBERS, OK, f"equal within {worst:.1e}")
            if n.ok
            else Verdict(NUMBERS, WRONG, f"beyond {n.tolerance:g} of the unsharded model's")
        )

    def _judged(self, verdict: str) -> list[Figure]:
        return [f for f in self.figures if f.of == verdict and f.judged]

    def _of_traffic(self) -> Verdict:
        rows = self._judged(TRAFFIC)
        bad = [f for f in rows if not f.ok]
        if bad:
            return Verdict(TRAFFIC, WRONG, "; ".join(map(_beside, bad)))
        if not rows:
            return (
                Verdict(TRAFFIC, UNKNOWN, "placed by the compiler")
                if self.program == "jit"
                else Verdict(TRAFFIC, OK, "none")
            )
        far = [f for f in rows if f.distance]
        says = "; ".join(
            f"{f.what} {f.apart}{f' by the compiler ({f.by})' if f.by else ''}" for f in far
        )
        return Verdict(TRAFFIC, APART if any(f.own for f in far) else OK, says or "exact")

    def _of_flops(self) -> Verdict:
        rows = self._judged(FLOPS)
        bad = [f for f in rows if f.distance]
        if bad:
            return Verdict(
                FLOPS,
                OK if all(f.ok for f in bad) else APART,
                "; ".join(f"{f.apart}{f', {f.by}' if f.by else ''}" for f in bad),
            )
        return (
            Verdict(FLOPS, OK, "exact")
            if rows
            else Verdict(FLOPS, UNKNOWN, "placed by the compiler")
        )

    def _of_memory(self) -> Verdict:
        rows = self._judged(MEMORY)
        bad = [f for f in rows if not f.ok]
        if bad:
            return Verdict(
                MEMORY,
                APART,
                "; ".join(
                    (
                        f"{show_bytes(f.compiled)} where {show_bytes(f.predicted or 0)} were"
                        " planned"
                        if f.what == PEAK
                        else f"{f.what} {f.apart}"
                    )
                    for f in bad
                ),
            )
        peak = next((f for f in rows if f.what == PEAK), None)
        if peak is not None:
            return Verdict(
                MEMORY,
                OK,
                f"{show_bytes(peak.compiled)} where {show_bytes(peak.predicted or 0)} were planned,"
                f" {peak.mark}",
            )
        return (
            Verdict(MEMORY, OK, "arguments and outputs exact")
            if rows
            else Verdict(MEMORY, UNKNOWN, "placed by the compiler")
        )

    def _of_time(self, clock: Clock) -> Verdict:
        if clock.unfused:
            return Verdict(TIME, WRONG, clock.says)
        state = UNKNOWN if not clock.judged else APART if clock.apart else OK
        return Verdict(TIME, state, clock.says)

    def text(self, width: int = 100, colour: bool = False) -> str:
        """The report for people, in `width` columns."""
        style = Style(colour)
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
        devices = math.prod(self.mesh.values())
        first, *continued = hang(
            "",
            f"{self.model}: {self.program} program, {self.workload}, on {devices} {self.machine}"
            f" ({mesh})",
            width,
        )
        lines = [
            style.bold(first),
            *continued,
            *hang("", f"compiled {self.compiled}; one device, one step:", width),
            *self._table(width, style),
        ]
        lines += [line for text in self.differences for line in hang("  - ", text, width)]
        lines += self.clock.lines(width) if self.clock else []
        lines += hang("numbers ", self._numbers_text(), width)
        lines += [line for n in self.notes for line in hang("note: ", n, width)]
        lines += hang("", " · ".join(f"{v.name}: {v.says}" for v in self.verdicts), width)
        if self.ok:
            return "\n".join([*lines, style.good("verified")])
        first, *continued = hang("NOT VERIFIED: ", "; ".join(self.findings()), width)
        return "\n".join(
            [*lines, first.replace("NOT VERIFIED", style.bad("NOT VERIFIED"), 1), *continued]
        )

    def _table(self, width: int, style: Style) -> list[str]:
        """The figures; a mark that is too long for its line is continued under itself."""
        rows = [
            ("  ", "predicted", "compiled"),
            *(
                ("  " + f.what, _number(f.predicted, f.unit), _number(f.compiled, f.unit))
                for f in self.figures
            ),
        ]
        columns = [max(len(row[i]) for row in rows) for i in range(3)]
        room = max(LEAST, width - sum(columns) - 3 * len(GAP))
        lines: list[str] = []
        for row, figure in zip(rows, (None, *self.figures), strict=True):
            first, *continued = hang("", figure.mark, room) if figure and figure.mark else [""]
            emphasis = (
                style.bad if figure and not figure.ok else style.good if first == "exact" else str
            )
            cells = [row[0].ljust(columns[0]), row[1].rjust(columns[1]), row[2].rjust(columns[2])]
            lines.append(GAP.join([*cells, emphasis(first)]).rstrip())
            lines += [" " * (sum(columns) + 3 * len(GAP)) + emphasis(line) for line in continued]
        return lines

    def _numbers_text(self) -> str:
        n = self.numbers
        if n is None:
            return f"not run ({self.not_run or 'not asked for'})"
        what = (
            f"loss {n.error:.1e}, gradients {n.gradients:.1e}"
            if n.gradients is not None
            else f"outputs {n.error:.1e}"
        )
        where = f" (worst: {n.worst})" if n.worst else ""
        verdict = "within" if n.ok else "BEYOND"
        return (
            f"against the unsharded model, {n.size}, {n.parameters:,} parameters, float32: error of"
            f" {what}{where}, {verdict} {n.tolerance:g}"
        )

    def findings(self) -> tuple[str, ...]:
        """What is wrong, a phrase each; empty when `ok`."""
        phrases = [_beside(f) for f in self.figures if f.of == TRAFFIC and not f.ok]
        if self.asked and self.numbers is None:
            phrases.append(f"numbers were not run: {self.not_run}")
        elif self.numbers is not None and not self.numbers.ok:
            phrases.append("numbers are beyond the tolerance")
        return (*phrases, *(self.clock.unfused if self.clock else ()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; errors that are no number become null."""
        data = asdict(self)
        data["mesh"] = dict(self.mesh)
        data["clock"] = self.clock.to_dict() if self.clock else None
        data["ok"], data["findings"] = self.ok, list(self.findings())
        data["verdicts"] = {v.name: {"state": v.state, "says": v.says} for v in self.verdicts}
        for figure, row in zip(self.figures, data["figures"], strict=True):
            row["ok"] = figure.ok
        if data["numbers"]:
            data["numbers"]["ok"] = self.numbers.ok if self.numbers else False
            for key in ("error", "gradients"):
                value = data["numbers"][key]
                data["numbers"][key] = value if value is None or math.isfinite(value) else None
        return data

    def to_json(self) -> str:
        """The report for programs."""
        return json.dumps(self.to_dict(), sort_keys=True, indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VerifyReport:
        """The inverse of `to_dict`; an error that was no number becomes NaN again."""
        figures = tuple(
            Figure(**{k: v for k, v in row.items() if k != "ok"}) for row in data["figures"]
        )
        n = data["numbers"]
        numbers = None
        if n:
            training = data["workload"] == "train"
            gradients = (
                (math.nan if n["gradients"] is None else n["gradients"]) if training else None
            )
            numbers = Numbers(
                size=n["size"],
                parameters=n["parameters"],
                error=math.nan if n["error"] is None else n["error"],
                gradients=gradients,
                worst=n["worst"],
                tolerance=n["tolerance"],
            )
        plain = {
            key: data[key]
            for key in (
                "model",
                "program",
                "mesh",
                "workload",
                "compiled",
                "not_run",
                "asked",
                "machine",
            )
        }
        return cls(
            **plain,
            figures=figures,
            numbers=numbers,
            notes=tuple(data["notes"]),
            differences=tuple(data["differences"]),
            clock=Clock.from_dict(data["clock"]) if data.get("clock") else None,
        )


def _beside(figure: Figure) -> str:
    """A figure that is not as predicted."""
    beyond = f", beyond {100 * figure.tolerance:.3g} %" if figure.tolerance else ""
    return (
        f"{figure.what} predicted {_number(figure.predicted, figure.unit)}, compiled"
        f" {_number(figure.compiled, figure.unit)}{beyond}"
    )


def _number(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value:,} {'B' if unit == 'bytes' else unit}"
