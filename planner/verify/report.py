"""What `plan verify` found: predicted beside compiled, figure by figure, and how far the program's numbers are from the unsharded model's.

A figure is *judged* when the prediction claims it: on virtual CPU devices payloads, dot FLOPs and argument bytes of shard_map programs, which must
be equal; on other targets all collectives together, FLOPs, arguments, outputs and the peak of large programs, each within a tolerance.
Others (compiler-placed collectives of jit programs, temporaries of the CPU compiler) are shown beside and decide nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.report.words import Style, hang

GAP = "  "
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
    """One quantity of one device and one step; `predicted` is None where the plan predicts nothing comparable.

    tolerance: largest distance allowed, as a fraction of what was compiled. off: the distance where it is not that of the two totals (a sum of
    differences that could cancel). shown: the distance is printed though it is not judged.
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

    @property
    def distance(self) -> int:
        """How far apart, in the figure's unit."""
        return self.off if self.off is not None else abs(self.compiled - self.predicted) if self.predicted is not None else 0

    @property
    def ok(self) -> bool:
        """Within the tolerance (equal where there is none), or not judged."""
        return not self.judged or (self.predicted is not None and self.distance <= self.tolerance * self.compiled)

    @property
    def mark(self) -> str:
        """What the last column says."""
        if not self.judged and not self.shown:
            return self.note
        if not self.distance:
            return "exact"
        if not self.judged:
            return self._apart()
        return f"{self._apart()}, within {100 * self.tolerance:.3g} %" if self.ok else f"DIFFERS {self._apart()}"

    def _apart(self) -> str:
        """The distance as a fraction of the prediction, or in the figure's unit where nothing was predicted; a sum of differences has no sign."""
        sign = "sum of differences " if self.off is not None else "+" if self.compiled > (self.predicted or 0) else "-"
        return sign + (f"{100 * self.distance / self.predicted:.2f} %" if self.predicted and self.distance < 10 * self.predicted else _number(self.distance, self.unit))


@dataclass(frozen=True)
class Numbers:
    """Errors of the program that ran against the unsharded model (semantics: error of a tensor); sizes say what ran.

    error: of the outputs (inference) or of the loss (training). gradients: the largest of all, None for inference; `worst` names it.
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
        return all(math.isfinite(e) and e <= self.tolerance for e in (self.error, self.gradients or 0.0))


@dataclass(frozen=True)
class VerifyReport:
    """Everything verified, and what was not: `not_run` says why there are no numbers when they were asked for."""

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

    @property
    def ok(self) -> bool:
        """Every judged figure is as predicted, and the numbers, when asked for, were run and are within the tolerance."""
        return all(f.ok for f in self.figures) and (not self.asked or (self.numbers is not None and self.numbers.ok))

    def text(self, width: int = 100, colour: bool = False) -> str:
        """The report for people, in `width` columns."""
        style = Style(colour)
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
        devices = math.prod(self.mesh.values())
        first, *more = hang("", f"{self.model}: {self.program} program, {self.workload}, on {devices} {self.machine} ({mesh})", width)
        lines = [style.bold(first), *more, *hang("", f"compiled {self.compiled}; one device, one step:", width), *self._table(width, style)]
        lines += [line for text in self.differences for line in hang("  - ", text, width)]
        lines += hang("numbers ", self._numbers_text(), width)
        lines += [line for n in self.notes for line in hang("note: ", n, width)]
        if self.ok:
            return "\n".join([*lines, style.good("verified")])
        first, *more = hang("NOT VERIFIED: ", "; ".join(self.findings()), width)
        return "\n".join([*lines, first.replace("NOT VERIFIED", style.bad("NOT VERIFIED"), 1), *more])

    def _table(self, width: int, style: Style) -> list[str]:
        """The figures; a mark that is too long for its line is continued under itself."""
        rows = [("  ", "predicted", "compiled"), *(("  " + f.what, _number(f.predicted, f.unit), _number(f.compiled, f.unit)) for f in self.figures)]
        columns = [max(len(row[i]) for row in rows) for i in range(3)]
        room = max(LEAST, width - sum(columns) - 3 * len(GAP))
        lines: list[str] = []
        for row, figure in zip(rows, (None, *self.figures), strict=True):
            first, *more = hang("", figure.mark, room) if figure and figure.mark else [""]
            emphasis = style.bad if figure and not figure.ok else style.good if first == "exact" else str
            cells = [row[0].ljust(columns[0]), row[1].rjust(columns[1]), row[2].rjust(columns[2])]
            lines.append(GAP.join([*cells, emphasis(first)]).rstrip())
            lines += [" " * (sum(columns) + 3 * len(GAP)) + emphasis(line) for line in more]
        return lines

    def _numbers_text(self) -> str:
        n = self.numbers
        if n is None:
            return f"not run ({self.not_run or 'not asked for'})"
        what = f"loss {n.error:.1e}, gradients {n.gradients:.1e}" if n.gradients is not None else f"outputs {n.error:.1e}"
        where = f" (worst: {n.worst})" if n.worst else ""
        verdict = "within" if n.ok else "BEYOND"
        return f"against the unsharded model, {n.size}, {n.parameters:,} parameters, float32: error of {what}{where}, {verdict} {n.tolerance:g}"

    def findings(self) -> tuple[str, ...]:
        """What is wrong, a phrase each; empty when `ok`."""
        out = [f"{f.what} predicted {_number(f.predicted, f.unit)}, compiled {_number(f.compiled, f.unit)}"
               + (f", beyond {100 * f.tolerance:.3g} %" if f.tolerance else "") for f in self.figures if not f.ok]  # fmt: skip
        if self.asked and self.numbers is None:
            out.append(f"numbers were not run: {self.not_run}")
        elif self.numbers is not None and not self.numbers.ok:
            out.append("numbers are beyond the tolerance")
        return tuple(out)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; errors that are no number become null."""
        data = asdict(self)
        data["mesh"] = dict(self.mesh)
        data["ok"], data["findings"] = self.ok, list(self.findings())
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
        figures = tuple(Figure(**{k: v for k, v in row.items() if k != "ok"}) for row in data["figures"])
        n = data["numbers"]
        numbers = None
        if n:
            training = data["workload"] == "train"
            gradients = (math.nan if n["gradients"] is None else n["gradients"]) if training else None
            numbers = Numbers(n["size"], n["parameters"], math.nan if n["error"] is None else n["error"], gradients, n["worst"], n["tolerance"])
        plain = {key: data[key] for key in ("model", "program", "mesh", "workload", "compiled", "not_run", "asked", "machine")}
        return cls(**plain, figures=figures, numbers=numbers, notes=tuple(data["notes"]), differences=tuple(data["differences"]))


def _number(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value:,} {'B' if unit == 'bytes' else unit}"
