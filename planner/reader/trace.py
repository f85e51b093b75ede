"""The batch as a factor of dims, operator by operator (see `planner.reader.rebatch`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.reader.draft import Draft, Op

Factors = tuple[int, ...]
"""A dim: factors, major first; 0 is the batch."""
Dims = tuple[Factors, ...]
Marks = Dims | None
"""None: the tensor does not depend on the batch."""


def size(factors: Factors, batch: int) -> int:
    """The extent of a dim."""
    return math.prod(batch if f == 0 else f for f in factors)


@dataclass(frozen=True)
class Demand:
    """A tensor without the batch meets one with it: its dim `axis` must become `factors`."""

    tensor: str
    axis: int
    factors: Factors
    why: str


class Tracer:
    """One forward sweep. `leaves` and `made` hold the dims of constants, and of operations that make dims, found by earlier sweeps."""

    def __init__(self, draft: Draft, batch: int, leaves: dict[str, Dims], made: dict[int, Dims], traced: Sequence[str]) -> None:
        self.draft, self.batch, self.made = draft, batch, made
        self.marks: dict[str, Marks] = {**leaves}
        self.demands: list[Demand] = []
        self.expands: list[tuple[Op, int, int]] = []  # operation, slot, axis: a 1 that must be repeated
        for name in traced:
            self.marks[name] = ((0,), *((n,) for n in draft.shape(name)[1:]))

    def run(self) -> None:
        """Fills `marks`, `demands` and `expands`. Raises PlanError where the batch cannot be followed."""
        from planner.reader.trace_rules import RULES

        for op in self.draft.ops:
            forced = self.made.get(id(op))
            if forced is not None:
                self.marks[op.outputs[0]] = forced
                continue
            if all(self.marks.get(i) is None for i in op.inputs if i):
                continue
            rule = RULES.get(op.op)
            if rule is None:
                self._other(op)
            else:
                for name, dims in zip(op.outputs, rule(self, op), strict=False):
                    if name:
                        self.marks[name] = dims if any(0 in f for f in dims) else None

    def fail(self, op: Op, what: str) -> PlanError:
        """The error for a batch that an operation loses."""
        inputs = "; ".join(f"{i!r} {list(self.draft.shape(i))}" for i in op.inputs if i)
        return PlanError(
            "P146", f"cannot change the exported batch of {self.batch}: node {op.id!r} ({op.op}) {what}", detail=[f"inputs: {inputs}"],
            help=[f"plan with --batch {self.batch}, or export with a dynamic batch"],
        )  # fmt: skip

    def dims(self, name: str) -> Dims:
        """The tensor's dims; plain ones when the batch is not in it."""
        found = self.marks.get(name)
        return found if found is not None else tuple((n,) for n in self.draft.shape(name))

    def demand(self, op: Op, name: str, axis: int, factors: Factors) -> None:
        """Records that a dim of an operand must carry the batch."""
        self.demands.append(Demand(name, axis, factors, f"it meets the batch at node {op.id!r} ({op.op})"))

    def align(self, op: Op, operands: Sequence[tuple[str, int]], rank: int, *, ones: bool = True) -> Dims:
        """Dims of operands laid over each other: (name, offset) puts dim k of the operand at dim k + offset of the result.

        Operands without the batch where others have it are demanded; a 1 broadcasts (`ones`), or is expanded.
        """
        out: list[Factors] = [(1,)] * rank
        for name, offset in operands:
            for k, factors in enumerate(self.dims(name)):
                at = k + offset
                if 0 in factors and 0 not in out[at]:
                    out[at] = factors
                elif 0 in factors and factors != out[at]:
                    raise self.fail(op, "combines two different layouts of the batch")
                elif out[at] == (1,):
                    out[at] = factors
        for name, offset in operands:
            for k, factors in enumerate(self.dims(name)):
                want = out[k + offset]
                if 0 not in want or 0 in factors:
                    continue
                if self.draft.shape(name)[k] != 1:
                    self.demand(op, name, k, want)
                elif not ones:
                    if want != (0,):
                        self.demand(op, name, k, want)
                    else:
                        self.expands.append((op, op.inputs.index(name), k))
        return tuple(out)

    def _other(self, op: Op) -> None:
        """Operators without a rule: only those that keep the shape of their one batched operand."""
        batched = [i for i in op.inputs if i and self.marks.get(i) is not None]
        outputs = [o for o in op.outputs if o]
        if len(set(batched)) == 1 and all(self.draft.shape(o) == self.draft.shape(batched[0]) for o in outputs):
            for o in outputs:
                self.marks[o] = self.marks[batched[0]]
            return
        raise self.fail(op, "has no rule for the batch")
