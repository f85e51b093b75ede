"""Lowering an export of one sample as if it had many.

In a file exported with a batch of 1 the batch is a dim like any other 1, and squeezes and
unsqueezes make it impossible to tell where it went. So the inputs get a batch that divides nothing
else in the model, a prime, and the nodes are lowered with it: operators that name axes carry it
along by themselves. Only constants still speak of one sample. Their meaning is worked out for one
sample and the batch put back where it was: targets of Reshape, index grids, and operands that must
agree in size. A node that loses the batch is an error, because every size that was overlooked
contradicts another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.errors import PlanError
from planner.reader.batch.rules import RULES
from planner.reader.batch.trace import Tracer, behind
from planner.reader.draft.draft import Draft, proto_array
from planner.reader.draft.shapes import ShapeError

PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_SMALL = 64


class CarriesBatch(Exception):
    """Dim `axis` of input `name` turned out to hold the batch: lower again with it."""

    def __init__(self, name: str, axis: int) -> None:
        super().__init__(name, axis)
        self.name, self.axis = name, axis


def stand_in(graph: Any) -> int:
    """The smallest prime from 5 on that divides no dim, and no entry of a small integer constant,
    of the model."""
    sizes: set[int] = set()
    tensors = list(graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            tensors.extend(a.t for a in node.attribute if a.type == 4)
            sizes.update(v for a in node.attribute if a.type in (2, 7) for v in (a.i, *a.ints))
    for value in graph.input:
        sizes.update(d.dim_value for d in value.type.tensor_type.shape.dim)
    for tensor in tensors:
        sizes.update(tensor.dims)
        if (
            tensor.data_type in (6, 7)
            and tensor.data_location != 1
            and math.prod(tensor.dims) <= _SMALL
        ):
            sizes.update(int(v) for v in proto_array(tensor).reshape(-1))
    return next((p for p in PRIMES if not any(n and n % p == 0 for n in sizes)), 101)


class Guide:
    """Knows where the batch is in every tensor lowered so far."""

    def __init__(self, draft: Draft, batch: int) -> None:
        self.draft, self.batch = draft, batch
        self.tracer = Tracer(draft, batch, {}, {}, (), rules=RULES, exported=1, by_size=True)

    def step(self, start: int) -> None:
        """Follows the batch through the operations added since `start`, and repeats single samples
        that meet many."""
        draft = self.draft
        added = draft.ops[start:]
        del draft.ops[start:]
        for op in added:
            self.tracer.demands.clear()
            self.tracer.expands.clear()
            self.tracer.step(op)
            for demand in self.tracer.demands:
                raise self.tracer.fail(
                    op, f"needs the batch in {demand.tensor!r}, which does not have it"
                )
            for _, slot, axis in self.tracer.expands:
                self.claim(op.inputs[slot], axis)
                op.inputs[slot] = self.repeated(op.inputs[slot], axis)
            draft.ops.append(op)

    def claim(self, name: str, axis: int) -> None:
        """Raises CarriesBatch when a single sample that meets many comes from an input: a state,
        say, that has one entry per sample."""
        seen: set[str] = set()
        stack = [(name, axis)]
        while stack:
            tensor, k = stack.pop()
            if tensor in self.draft.inputs:
                raise CarriesBatch(tensor, k)
            op = self.draft.maker.get(tensor)
            if op is not None and tensor not in seen:
                seen.add(tensor)
                stack.extend(
                    (below, j) for below, j, _ in behind(self.draft, op, tensor, k, (1,), 1) or ()
                )

    def repeated(self, name: str, axis: int) -> str:
        """The tensor with a dim of 1 expanded to the batch."""
        shape = self.draft.shape(name)
        expanded = self.draft.add(
            "Expand",
            [name],
            out=f"{name}/expand",
            shape=(*shape[:axis], self.batch, *shape[axis + 1 :]),
        )
        self.tracer.marks[expanded] = tuple(
            (0,) if k == axis else (n,) for k, n in enumerate(shape)
        )
        return expanded

    def single(self, name: str) -> tuple[int, ...]:
        """The tensor's shape for one sample."""
        return tuple(math.prod(f for f in factors if f) for factors in self.tracer.dims(name))

    def speaks_of_one(self, index: Any, limit: int) -> bool:
        """True for constant indices written for one sample: not made from the stand-in batch."""
        return (
            not any(n % self.batch == 0 for n in index.shape if n)
            and bool(index.size)
            and int(index.max()) < limit
        )

    def with_batch(self, name: str, target: tuple[int, ...]) -> tuple[int, ...]:
        """A target shape meant for one sample, with the batch of `name` put where it belongs.
        Raises ShapeError."""
        dims = self.tracer.dims(name)
        where = [k for k, factors in enumerate(dims) if 0 in factors]
        if not where:
            return target
        if len(where) > 1:
            raise ShapeError("the batch is in two dims")
        flat = [f for factors in dims for f in factors]
        before = math.prod(flat[: flat.index(0)])
        ends = [math.prod(target[:k]) for k in range(len(target))]
        places = [k for k, end in enumerate(ends) if end == before and target[k] == 1]
        if where[0] in places:
            k = where[0]
        elif places:
            k = places[0]
        else:
            inside = [
                k
                for k, end in enumerate(ends)
                if end <= before < end * target[k]
                and before % end == 0
                and target[k] % (before // end) == 0
            ]
            if not inside:
                raise ShapeError(f"a reshape to {list(target)} cuts through the batch")
            k = inside[0]
        return tuple(n * self.batch if j == k else n for j, n in enumerate(target))

    def agreeing(self, names: Sequence[str], axis: int) -> list[str]:
        """Operands of a Concat along `axis`: single samples are repeated where others have the
        batch."""
        agreed = list(names)
        for k in range(len(self.draft.shape(names[0]))):
            if k != axis and any(self.tracer.dims(n)[k] == (0,) for n in names):
                agreed = [self.repeated(n, k) if self.draft.shape(n)[k] == 1 else n for n in agreed]
        return agreed


def refused(error: PlanError) -> PlanError:
    """What a model that reads well with one sample, but not with many, is told."""
    if error.code == "P146":
        return error
    return PlanError(
        "P146",
        f"cannot change the exported batch of 1: {error.what}",
        detail=error.detail,
        help=["plan with --batch 1, or export with a dynamic batch"],
    )
