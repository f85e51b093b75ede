"""Images whose rows are cut: what a window reaches of the neighbours' pieces.

A window of k taps, d apart, moves by s rows, the first beginning `low` rows before the image:  y[j]
reads x[s j - low + d t],  t < k. With X rows in and Y = X / s rows out, n pieces of X / n and of Y
/ n rows line up, and a piece reads

    low                        rows before its own
    d (k - 1) + 1 - s - low    rows after its own

(negative: own rows that no window of its own reads). Before the first piece and after the last are
padding. A transposed window makes Y = s X rows, y[j] gathering from x[m] where j = s m - low + d t;
a piece then reads floor((d (k - 1) - low) / s) rows before and ceil(low / s) after.

Only one spatial dim of an operator is cut: the first one whose pieces line up. The rows that travel
are priced and emitted as one send to either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.graph.ir import AttrValue
from planner.ops.base import Call
from planner.sharding.rule import KernelCollective, Rule


@dataclass(frozen=True)
class Reach:
    """The spatial dim (from 0) that may be cut, rows out per row in or in per row out (`wide`:
    out), and rows read of the neighbours."""

    dim: int
    step: int
    before: int
    after: int
    wide: bool = False

    @property
    def factor(self) -> str:
        """The factor of the rows, coarse ones where in and out differ."""
        return f"y{self.dim}"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of factors that no dim has to itself."""
        return {f"x{self.dim}": self.step} if self.step > 1 else {}


Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def window(attrs: Mapping[str, AttrValue], kernel: tuple[int, ...]) -> Window:
    """(kernel, strides, pads, dilations) of an operator."""
    n = len(kernel)

    def numbers(name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(attrs.get(name, usual))  # type: ignore[arg-type]

    return (
        kernel,
        numbers("strides", (1,) * n),
        numbers("pads", (0,) * 2 * n),
        numbers("dilations", (1,) * n),
    )


def reach(
    x: tuple[int, ...], y: tuple[int, ...], of: Window, transposed: bool = False
) -> Reach | None:
    """The first spatial dim of x and y [N, C, ...] whose pieces line up, None where there is
    none."""
    for i, (k, s, low, d) in enumerate(zip(of[0], of[1], of[2], of[3], strict=False)):
        rows, result_rows = x[2 + i], y[2 + i]
        span = d * (k - 1)
        if not 0 <= low <= span or min(rows, result_rows) < 2:
            continue
        if not transposed and low > rows:  # all of a row's own may be padding
            continue
        if not transposed and rows == s * result_rows:
            return Reach(i, s, low, max(span + 1 - s - low, 0))
        if transposed and result_rows == s * rows:
            return Reach(i, s, (span - low) // s, -(-low // s), wide=True)
    return None


def spelled(rank: int, cut: Reach | None) -> tuple[str, str]:
    """Spatial dims of operand and result in rule notation: what is not cut stays whole."""
    sides = []
    for stem in "xy":
        names = [f"{stem}{i}!" for i in range(rank)]
        if cut is not None:
            fine = cut.step > 1 and (stem == "y") == cut.wide
            names[cut.dim] = f"({cut.factor} x{cut.dim}!)" if fine else cut.factor
        sides.append(" ".join(names))
    return sides[0], sides[1]


def with_rows(rule: Rule, cut: Reach | None) -> Rule:
    """The rule with the exchange of rows: cut evenly, in pieces no smaller than what is read of
    them."""
    if cut is None:
        return rule
    rows = rule.sizes[cut.factor] * (1 if cut.wide else cut.step)
    over = tuple(f for d, dim in enumerate(rule.operands[0]) if d != 2 + cut.dim for f in dim)
    inner = tuple(
        KernelCollective(
            cut.factor, "collective-permute", over, 1, 1, 0, units=n, kept=False, operand=0
        )
        for n in (cut.before, cut.after)
        if n
    )
    # One row between two neighbours': the CPU compiler of jax 0.10 aborts at the gradient of a
    # transposed window.
    widest = max(cut.before, cut.after, 2 if cut.wide and cut.before and cut.after else 1)
    fringe = {cut.factor: (cut.before + cut.after) / (1 if cut.wide else cut.step)}
    return replace(
        rule,
        no_pad=rule.no_pad | {cut.factor},
        most={**rule.most, cut.factor: rows // widest},
        inner=(*rule.inner, *inner),
        fringe=fringe,
        spatial=frozenset({cut.factor}),
    )


def brought(call: Call, cut: Reach | None, fill: str = "0") -> str:
    """Expression of the operand with its neighbours' rows where it is cut."""
    if cut is None or not call.axes(cut.factor) or not (cut.before or cut.after):
        return call.args[0]
    return (
        f"{call.use('halo')}({call.args[0]}, {2 + cut.dim}, {cut.before}, {cut.after},"
        f" {call.axis_text(cut.factor)}, {fill})"
    )


def cut_of(call: Call, kernel: tuple[int, ...], transposed: bool = False) -> Reach | None:
    """The reach of a call whose rows are cut, None where they are whole."""
    row_reach = reach(
        call.global_in[0], call.global_out[0], window(call.node.attrs, kernel), transposed
    )
    return row_reach if row_reach is not None and call.axes(row_reach.factor) else None
