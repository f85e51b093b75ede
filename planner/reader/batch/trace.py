"""The batch as a factor of dims, operator by operator (see `planner.reader.batch.rebatch`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.errors import PlanError
from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.simplify import ALONE, BROADCASTING
from planner.reader.onnx.params import depends_on_data

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
    """One forward sweep. `leaves` and `made` hold the dims of constants, and of operations that
    make dims, found by earlier sweeps."""

    # Many parameters: the state that earlier sweeps hand on, and what a sweep of a whole draft and
    # one that follows a lowering differ in.
    def __init__(
        self,
        draft: Draft,
        batch: int,
        leaves: dict[str, Dims],
        made: dict[int, Dims],
        traced: Sequence[str],
        *,
        rules: Mapping[str, Callable[[Tracer, Op], list[Dims]]],
        exported: int,
        by_size: bool = False,
    ) -> None:
        self.draft, self.batch, self.made, self.exported, self.by_size = (
            draft,
            batch,
            made,
            exported,
            by_size,
        )
        self.rules = rules
        self.marks: dict[str, Marks] = {**leaves}
        self.demands: list[Demand] = []
        self.expands: list[
            tuple[Op, int, int]
        ] = []  # operation, slot, axis: a 1 that must be repeated
        for name in traced:
            self.marks[name] = ((0,), *((n,) for n in draft.shape(name)[1:]))

    def run(self) -> None:
        """Fills `marks`, `demands` and `expands`. Raises PlanError where the batch cannot be
        followed."""
        for op in self.draft.ops:
            self.step(op)

    def step(self, op: Op) -> None:
        """Follows the batch through one operation."""
        forced = self.made.get(id(op))
        if forced is not None:
            self.marks[op.outputs[0]] = forced
            return
        if not any(0 in factors for i in op.inputs if i for factors in self.dims(i)):
            return
        rule = self.rules.get(op.op)
        if rule is None:
            self._other(op)
            return
        for name, dims in zip(op.outputs, rule(self, op), strict=False):
            if name:
                self.marks[name] = dims if any(0 in f for f in dims) else None

    def fail(self, op: Op, what: str) -> PlanError:
        """The error for a batch that an operation loses."""
        inputs = "; ".join(f"{i!r} {list(self.draft.shape(i))}" for i in op.inputs if i)
        return PlanError(
            "P146",
            f"cannot change the exported batch of {self.exported}: node {op.id!r} ({op.op}) {what}",
            detail=[f"inputs: {inputs}"],
            help=[f"plan with --batch {self.exported}, or export with a dynamic batch"],
        )

    def dims(self, name: str) -> Dims:
        """The tensor's dims; plain ones when the batch is not in it."""
        marked = self.marks.get(name)
        if marked is not None:
            return marked
        if self.by_size:  # no other dim is a multiple of the batch
            b = self.batch
            return tuple(
                (n,) if n % b or not n else (0,) if n == b else (0, n // b)
                for n in self.draft.shape(name)
            )
        return tuple((n,) for n in self.draft.shape(name))

    def demand(self, op: Op, name: str, axis: int, factors: Factors) -> None:
        """Records that a dim of an operand must carry the batch."""
        self.demands.append(
            Demand(name, axis, factors, f"it meets the batch at node {op.id!r} ({op.op})")
        )

    def join(self, op: Op, slot: int, axis: int, factors: Factors) -> None:
        """An operand must have the batch in a dim and broadcasting does not help: a constant single
        sample is repeated, the rest demanded."""
        name = op.inputs[slot]
        if (
            self.draft.shape(name)[axis] == 1
            and factors == (0,)
            and (self.batch > 1 or name not in self.data)
        ):
            self.expands.append((op, slot, axis))
        else:
            self.demand(op, name, axis, factors)

    @cached_property
    def data(self) -> set[str]:
        """Tensors that depend on an input."""
        return depends_on_data(self.draft)

    def align(
        self, op: Op, operands: Sequence[tuple[str, int]], rank: int, *, ones: bool = True
    ) -> Dims:
        """Dims of operands laid over each other: (name, offset) puts dim k of the operand at dim k
        + offset of the result.

        Operands without the batch where others have it are demanded; a 1 broadcasts (`ones`), or is
        expanded.
        """
        aligned: list[Factors] = [(1,)] * rank
        for name, offset in operands:
            for k, factors in enumerate(self.dims(name)):
                dim = k + offset
                if 0 in factors and 0 not in aligned[dim]:
                    aligned[dim] = factors
                elif 0 in factors and factors != aligned[dim]:
                    raise self.fail(op, "combines two different layouts of the batch")
                elif aligned[dim] == (1,):
                    aligned[dim] = factors
        for name, offset in operands:
            for k, factors in enumerate(self.dims(name)):
                want = aligned[k + offset]
                if 0 not in want or 0 in factors:
                    continue
                if self.draft.shape(name)[k] != 1:
                    self.demand(op, name, k, want)
                elif not ones:
                    self.join(op, op.inputs.index(name), k, want)
        return tuple(aligned)

    def _other(self, op: Op) -> None:
        """Operators without a rule: only those that keep the shape of their one batched operand."""
        if op.bodies:
            raise self.fail(op, "holds subgraphs, through which the batch is not followed")
        batched = [i for i in op.inputs if i and any(0 in factors for factors in self.dims(i))]
        outputs = [o for o in op.outputs if o]
        if len(set(batched)) == 1 and all(
            self.draft.shape(o) == self.draft.shape(batched[0]) for o in outputs
        ):
            for o in outputs:
                self.marks[o] = self.dims(batched[0])
            return
        raise self.fail(op, "has no rule for the batch")


def behind(
    draft: Draft, op: Op, name: str, axis: int, factors: tuple[int, ...], old: int
) -> list[tuple[str, int, tuple[int, ...]]] | None:
    """Where dim `axis` of an operation's result comes from; [] when the operation itself makes it,
    None when unknown."""
    rank = len(draft.shape(name))
    n = draft.shape(name)[axis]
    if op.op in BROADCASTING:
        below = []
        for i in op.inputs:
            dim = axis - (rank - len(draft.shape(i)))
            if dim >= 0 and draft.shape(i)[dim] == n and n != 1:
                below.append((i, dim, factors))
        return below or None
    if op.op in LAYERS:
        return _behind_layer(draft, op, rank, axis, factors)
    if op.op in ALONE or op.op in ("CumSum", "Trilu") or (op.op == "Conv" and axis == 0):
        return [(op.inputs[0], axis, factors)]
    if op.op == "Transpose":
        return [(op.inputs[0], op.attrs["perm"][axis], factors)]
    if op.op == "Concat" and op.attrs["axis"] != axis:
        return [(i, axis, factors) for i in op.inputs]
    if op.op in ("Slice", "Split", "Pad") and draft.shape(op.inputs[0])[axis] == n:
        return [(op.inputs[0], axis, factors)]
    if op.op == "Expand":
        dim = axis - (rank - len(draft.shape(op.inputs[0])))
        return (
            [(op.inputs[0], dim, factors)]
            if dim >= 0 and draft.shape(op.inputs[0])[dim] == n and n != 1
            else []
        )
    if op.op in ("ConstantOfShape", "RandomUniform", "RandomNormal") or (
        op.op == "Tile" and factors[0] == 0 and op.attrs["repeats"][axis] == old > 1
    ):  # whole copies, one for each sample
        return []
    if op.op == "Reshape":
        source, target = draft.shape(op.inputs[0]), draft.shape(name)
        before = math.prod(target[:axis])
        for k, m in enumerate(source):
            if m == n and math.prod(source[:k]) == before:
                return [(op.inputs[0], k, factors)]
        for k, m in enumerate(source):  # batch and heads in one dim: the batch comes first
            if factors[0] == 0 and m == old > 1 and math.prod(source[:k]) == before:
                return [(op.inputs[0], k, (0,))]
        return None
    if op.op in ("Gather", "GatherND"):
        return _behind_lookup(draft, op, axis, factors, old)
    return None


def _behind_lookup(
    draft: Draft, op: Op, axis: int, factors: Factors, old: int
) -> list[tuple[str, int, Factors]] | None:
    """Where dim `axis` of what is looked up comes from: the data or the indices."""
    data, indices = draft.shape(op.inputs[0]), draft.shape(op.inputs[1])
    if op.op == "Gather":
        g = int(op.attrs["axis"])
        if axis < g:
            return [(op.inputs[0], axis, factors)]
        if axis < g + len(indices):
            return [(op.inputs[1], axis - g, factors)]
        return [(op.inputs[0], axis - len(indices) + 1, factors)] if data else None
    if axis >= len(indices) - 1:
        return None
    below = [(op.inputs[1], axis, factors)]
    if factors == (0,) and data[0] == old:
        below.append((op.inputs[0], 0, factors))  # an index along the batch needs as many rows
    return below


def _behind_layer(
    draft: Draft, op: Op, rank: int, axis: int, factors: Factors
) -> list[tuple[str, int, Factors]] | None:
    """Where dim `axis` of a layer's result comes from. Of a product: rows of one operand, columns
    of the other, and what is before them in either."""
    if op.op == "Attention":
        return [(i, 0, factors) for i in op.inputs[:3]] if axis == 0 else None
    if op.op != "MatMul":
        return [(op.inputs[0], axis, factors)] if axis < op.attrs["axis"] else None
    if axis >= rank - 2:
        slot = axis - (rank - 2)
        operand_rank = len(draft.shape(op.inputs[slot]))
        swapped = bool(op.attrs.get("trans_b" if slot else "trans_a"))
        return [(op.inputs[slot], operand_rank - 2 + (slot ^ swapped), factors)]
    below = []
    for name in op.inputs:
        dim = axis - (rank - len(draft.shape(name)))
        if dim >= 0 and draft.shape(name)[dim] != 1:
            below.append((name, dim, factors))
    return below or None


LAYERS = ("MatMul", "LayerNormalization", "RMSNormalization", "Attention")
