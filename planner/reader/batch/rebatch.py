"""Another batch for a static export.

The batch is followed through the canonical draft as a factor of dims, from dim 0 of the inputs: a
dim is a sequence of factors, major first, in which 0 stands for the batch (16384 = 8 * 2048 is (0,
2048)). Shapes are then written anew with the new batch. Constants that meet the batch are
lengthened: they must repeat along it, or count along it as index tables do. What is neither is an
error that names the constant; so is a batch that an operator splits, slices or contracts in a way
that has no meaning at another size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.errors import PlanError
from planner.graph.ir import WeightRef
from planner.reader.batch.rules import RULES
from planner.reader.batch.trace import Demand, Dims, Marks, Tracer, behind, size
from planner.reader.draft.draft import (
    FOLD_ELEMENTS,
    LOOK_ELEMENTS,
    MOST_ELEMENTS,
    Draft,
    Op,
    ref_array,
)
from planner.reader.draft.shapes import ShapeError, infer
from planner.reader.draft.simplify import drop_dead
from planner.reader.draft.weight_transforms import transformed
from planner.reader.onnx.dims import Bound

_ROUNDS = 12


def rebatch(draft: Draft, bound: Bound) -> None:
    """Rewrites the draft from the exported batch to the wanted one. Raises PlanError when the batch
    cannot be followed."""
    old, new = bound.lowered, bound.batch
    assert old is not None
    exported = bound.exported or old
    drop_dead(draft)
    leaves: dict[str, Dims] = {}
    made_dims: dict[int, Dims] = {}
    for _ in range(_ROUNDS):
        tracer = Tracer(
            draft,
            old,
            {name: leaves[name] for name in leaves},
            made_dims,
            bound.traced,
            rules=RULES,
            exported=exported,
        )
        tracer.run()
        if not tracer.demands:
            break
        for demand in tracer.demands:
            _satisfy(tracer, demand, leaves, made_dims)
    else:
        raise _error("the batch does not settle", exported, [])
    for name in draft.inputs:
        if name in leaves and bound.exported is not None:
            axes = [k for k, factors in enumerate(leaves[name]) if 0 in factors]
            draft.notes.append(
                f"input {name!r} carries the batch in dim {axes[0]}: it meets the batch later"
            )
    grown = [
        _grow(draft, name, dims, old, new)
        for name, dims in sorted(leaves.items())
        if name not in draft.inputs
    ]
    _write(draft, tracer.marks, tracer.expands, old, new)
    _verify(draft, exported)
    if bound.exported is not None:
        draft.notes.append(
            f"rebatched from the exported {exported} to {new}"
            + (f"; lengthened {', '.join(grown[:6])}" if grown else "")
        )


def _error(what: str, old: int, detail: list[str]) -> PlanError:
    return PlanError(
        "P146",
        f"cannot change the exported batch of {old}: {what}",
        detail=detail,
        help=[f"plan with --batch {old}, or export with a dynamic batch"],
    )


def _satisfy(
    tracer: Tracer, demand: Demand, leaves: dict[str, Dims], made_dims: dict[int, Dims]
) -> None:
    """Follows a demand for a batch dim back to the leaves, or to the operation that makes the
    dim."""
    draft, old = tracer.draft, tracer.batch
    stack = [(demand.tensor, demand.axis, demand.factors)]
    seen: set[tuple[str, int]] = set()
    while stack:
        name, axis, factors = stack.pop()
        if (name, axis) in seen:
            continue
        seen.add((name, axis))
        shape = draft.shape(name)
        if 0 in tracer.dims(name)[axis]:
            continue
        if shape[axis] != size(factors, old):
            raise _error(
                f"tensor {name!r} of shape {list(shape)} does not carry it",
                tracer.exported,
                [demand.why],
            )
        op = draft.maker.get(name)
        if op is None:
            dims = leaves.get(name, tuple((n,) for n in shape))
            leaves[name] = (*dims[:axis], factors, *dims[axis + 1 :])
            continue
        below = behind(draft, op, name, axis, factors, old)
        if below is None:
            raise _error(f"node {op.id!r} ({op.op}) hides it", tracer.exported, [demand.why])
        if not below:
            dims = made_dims.get(id(op), tuple((n,) for n in shape))
            made_dims[id(op)] = (*dims[:axis], factors, *dims[axis + 1 :])
        stack.extend(below)


def _grow(draft: Draft, name: str, dims: Dims, old: int, new: int) -> str:
    """Lengthens a leaf along its batch factors; external ones when they are loaded. Returns how to
    name it in a note."""
    shape = draft.shape(name)
    steps: list[tuple[str, tuple[int, ...]]] = []
    for axis, factors in enumerate(dims):
        if 0 in factors:
            k = factors.index(0)
            steps.append(
                ("rebatch", (axis, math.prod(factors[:k]), old, math.prod(factors[k + 1 :]), new))
            )
    grown = tuple(n // old * new if 0 in f else n for n, f in zip(shape, dims, strict=True))
    if math.prod(grown) > (LOOK_ELEMENTS * 8 if name in draft.values else MOST_ELEMENTS):
        raise PlanError(
            "P133",
            f"batch {new}: constant {name!r} of shape {list(shape)} would grow to {list(grown)}",
            help=["a smaller --batch"],
        )
    if name in draft.values:
        value = transformed(draft.values[name], steps, name)
        draft.values[name] = value
        draft.types[name] = (tuple(value.shape), draft.dtype(name))
        if value.size > FOLD_ELEMENTS:
            draft.refs[name] = WeightRef("inline", proto=draft.values.pop(name))
    else:
        ref = draft.refs[name]
        if ref.kind == "inline" and (array := ref_array(ref, name)) is not None:
            # complains now rather than when the weights are loaded; one sample more shows what any
            # number would
            transformed(array, [(kind, (*arg[:-1], old + 1)) for kind, arg in steps], name)
        draft.refs[name] = replace(
            ref, transform=(*(ref.transform or (("reshape", shape),)), *steps)
        )
        draft.types[name] = (grown, draft.dtype(name))
    draft.forget(name)
    return f"{name!r} {list(shape)}"


def _write(
    draft: Draft, marks: dict[str, Marks], expands: list[tuple[Op, int, int]], old: int, new: int
) -> None:
    """New shapes everywhere, attributes that hold batch positions, and Expands where a single
    sample met a batch."""

    def scaled(name: str) -> tuple[int, ...]:
        factors = marks.get(name)
        shape = draft.shape(name)
        if factors is None:
            return shape
        grown = tuple(n // old * new if 0 in f else n for n, f in zip(shape, factors, strict=True))
        if math.prod(grown) > MOST_ELEMENTS:
            raise PlanError(
                "P133",
                f"batch {new}: tensor {name!r} of shape {list(shape)} would grow to {list(grown)}",
                help=["a smaller --batch"],
            )
        return grown

    for name in draft.inputs:
        draft.types[name] = (scaled(name), draft.dtype(name))
    added: dict[int, list[Op]] = {}
    targets = {id(op): [scaled(o) for o in op.outputs if o] for op in draft.ops}
    for op in draft.ops:
        factors = marks.get(op.inputs[0]) if op.inputs else None
        if op.op == "Slice" and factors is not None:
            for key in ("starts", "ends"):
                op.attrs[key] = tuple(
                    v // old * new if 0 in factors[a] else v
                    for v, a in zip(op.attrs[key], op.attrs["axes"], strict=True)
                )
        after = marks.get(op.outputs[0])
        if op.op == "Tile" and after is not None:
            op.attrs["repeats"] = tuple(
                n // old * new if 0 in after[k] and (factors is None or 0 not in factors[k]) else n
                for k, n in enumerate(op.attrs["repeats"])
            )
        for o, shape in zip((o for o in op.outputs if o), targets[id(op)], strict=True):
            draft.types[o] = (shape, draft.dtype(o))
    for op, slot, axis in expands:
        name = op.inputs[slot]
        shape = draft.shape(name)
        expanded = draft.fresh(f"{name}/expand")
        draft.types[expanded] = ((*shape[:axis], new, *shape[axis + 1 :]), draft.dtype(name))
        expand = Op(
            "Expand",
            [name],
            [expanded],
            {},
            f"{op.id}/expand.{slot}",
            op.scope,
            op.members or (op.id,),
        )
        draft.maker[expanded] = expand
        op.inputs[slot] = expanded
        added.setdefault(id(op), []).append(expand)
    draft.ops = [one for op in draft.ops for one in (*added.get(id(op), ()), op)]


def _verify(draft: Draft, exported: int) -> None:
    """Every operation must still fit its operands. Raises PlanError naming the node."""
    for op in draft.ops:
        shapes = [draft.shape(o) for o in op.outputs if o]
        types = [draft.types[i] if i else None for i in op.inputs]
        try:
            inferred = infer(op.op, op.attrs, types, shapes if op.op == "Split" else shapes[0])
        except KeyError:
            continue
        except ShapeError as error:
            raise _error(
                f"node {op.id!r} ({op.op}) no longer fits: {error}", exported, []
            ) from None
        wrong = [
            f"{list(a)} expected, {list(b)} found"
            for (a, _), b in zip(inferred, shapes, strict=False)
            if a != b
        ]
        if wrong and all(op.outputs[: len(inferred)]):
            raise _error(f"node {op.id!r} ({op.op}) gets another shape", exported, wrong)
