"""How each canonical operator carries the batch from its operands' dims to its results' (see
`planner.reader.batch.trace`)."""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.reader.batch.trace import Dims, Factors, Tracer, size
from planner.reader.draft.draft import Op
from planner.reader.draft.shapes import ARITHMETIC, COMPARE, LOGIC, REDUCE, SAME, words
from planner.reader.draft.views import Atom, regroup

Rule = Callable[[Tracer, Op], list[Dims]]


def _same(t: Tracer, op: Op) -> list[Dims]:
    return [t.dims(op.inputs[0])] * len(op.outputs)


def _broadcast(t: Tracer, op: Op) -> list[Dims]:
    rank = len(t.draft.shape(op.outputs[0]))
    return [t.align(op, [(i, rank - len(t.draft.shape(i))) for i in op.inputs], rank)]


def _matmul(t: Tracer, op: Op) -> list[Dims]:
    rank = len(t.draft.shape(op.outputs[0]))
    sides = []
    for k, flag in enumerate(("trans_a", "trans_b")):
        dims = t.dims(op.inputs[k])
        sides.append((*dims[:-2], dims[-1], dims[-2]) if op.attrs.get(flag) else dims)
    a, b = sides
    if (0 in a[-1]) != (0 in b[-2]):
        raise t.fail(op, "contracts over the batch")
    lead: list[Factors] = [(1,)] * (rank - 2)
    for dims in sides:
        for j, factors in enumerate(dims[:-2]):
            dim = j + rank - len(dims)
            lead[dim] = factors if 0 in factors or lead[dim] == (1,) else lead[dim]
    for k, dims in enumerate((a, b)):
        for j, factors in enumerate(dims[:-2]):
            want = lead[j + rank - len(dims)]
            if 0 in want and 0 not in factors and t.draft.shape(op.inputs[k])[j] != 1:
                t.demand(op, op.inputs[k], j, want)
    return [(*lead, a[-2], b[-1])]


def _einsum(t: Tracer, op: Op) -> list[Dims]:
    left, right = str(op.attrs["equation"]).split("->")
    terms = left.split(",")
    letters: dict[str, Factors] = {}
    for term, name in zip(terms, op.inputs, strict=True):
        for c, factors in zip(term, t.dims(name), strict=True):
            if 0 in factors or c not in letters:
                letters[c] = factors
    for term, name in zip(terms, op.inputs, strict=True):
        for k, (c, factors) in enumerate(zip(term, t.dims(name), strict=True)):
            if 0 in letters[c] and 0 not in factors and t.draft.shape(name)[k] != 1:
                t.demand(op, name, k, letters[c])
    return [tuple(letters[c] for c in right)]


def _reduce(t: Tracer, op: Op) -> list[Dims]:
    axes, keep = op.attrs["axes"], op.attrs["keepdims"]
    dims = t.dims(op.inputs[0])
    return [tuple((1,) if k in axes else f for k, f in enumerate(dims) if keep or k not in axes)]


def _arg(t: Tracer, op: Op) -> list[Dims]:
    axis, dims = op.attrs["axis"], t.dims(op.inputs[0])
    return [
        tuple(
            (1,) if k == axis else f
            for k, f in enumerate(dims)
            if op.attrs["keepdims"] or k != axis
        )
    ]


def _reshape(t: Tracer, op: Op) -> list[Dims]:
    target = t.draft.shape(op.outputs[0])
    groups = [
        [Atom(t.batch, True) if f == 0 else Atom(f) for f in factors]
        for factors in t.dims(op.inputs[0])
    ]
    regrouped = regroup(groups, target)
    if (
        regrouped is None
        and (whole := _one_batch(t.dims(op.inputs[0]), target, t.batch)) is not None
    ):
        return [whole]
    if regrouped is None:
        raise t.fail(op, f"splits the batch: {list(t.draft.shape(op.inputs[0]))} to {list(target)}")
    return [
        tuple(
            tuple(0 if a.batch else a.size for a in group if a.batch or a.size > 1) or (1,)
            for group in regrouped
        )
    ]  # a squeezed 1 is no factor


def _one_batch(dims: Dims, target: tuple[int, ...], batch: int) -> Dims | None:
    """Where the batch goes when dims around it are cut anew: only the elements before and after it
    matter."""
    factors = [f for dim in dims for f in dim]
    if factors.count(0) != 1:
        return None
    before = math.prod(factors[: factors.index(0)])
    for k, n in enumerate(target):
        lead = math.prod(target[:k])
        if lead and before % lead == 0 and n % (before // lead * batch) == 0:
            major, minor = before // lead, n // (before // lead * batch)
            split = (*((major,) if major > 1 else ()), 0, *((minor,) if minor > 1 else ()))
            return (*((m,) for m in target[:k]), split, *((m,) for m in target[k + 1 :]))
    return None


def _transpose(t: Tracer, op: Op) -> list[Dims]:
    dims = t.dims(op.inputs[0])
    return [tuple(dims[k] for k in op.attrs["perm"])]


def _expand(t: Tracer, op: Op) -> list[Dims]:
    dims, target = t.dims(op.inputs[0]), t.draft.shape(op.outputs[0])
    lead = len(target) - len(dims)
    return [
        tuple(
            (
                dims[k - lead]
                if k >= lead and (0 in dims[k - lead] or n == size(dims[k - lead], t.batch))
                else (n,)
            )
            for k, n in enumerate(target)
        )
    ]


def _concat(t: Tracer, op: Op) -> list[Dims]:
    axis = int(op.attrs["axis"])
    parts = [t.dims(i)[axis] for i in op.inputs]
    if any(0 in p for p in parts):
        if any(p != (0,) for p in parts):
            raise t.fail(op, "joins the batch with something else")
        whole: Factors = (len(parts), 0)
    else:
        whole = (t.draft.shape(op.outputs[0])[axis],)
    rank = len(t.draft.shape(op.outputs[0]))
    aligned: list[Factors] = [(1,)] * rank
    for i in op.inputs:
        for k, factors in enumerate(t.dims(i)):
            if k != axis and (0 in factors or aligned[k] == (1,)):
                aligned[k] = factors
    for slot, i in enumerate(op.inputs):
        for k, factors in enumerate(t.dims(i)):
            if k != axis and 0 in aligned[k] and 0 not in factors:
                t.join(op, slot, k, aligned[k])
    aligned[axis] = whole
    return [tuple(aligned)]


def _split(t: Tracer, op: Op) -> list[Dims]:
    axis = int(op.attrs["axis"])
    dims = t.dims(op.inputs[0])
    parts = [t.draft.shape(o)[axis] for o in op.outputs]
    results = []
    for n in parts:
        factors: Factors = (n,)
        if 0 in dims[axis]:
            if dims[axis][-1] != 0 or len(dims[axis]) != 2 or n % t.batch:
                raise t.fail(op, "splits the batch")
            factors = (n // t.batch, 0) if n != t.batch else (0,)
        results.append((*dims[:axis], factors, *dims[axis + 1 :]))
    return results


def _slice(t: Tracer, op: Op) -> list[Dims]:
    dims = list(t.dims(op.inputs[0]))
    for axis, start, end, step in zip(
        *(op.attrs[k] for k in ("axes", "starts", "ends", "steps")), strict=True
    ):
        n = t.draft.shape(op.outputs[0])[axis]
        if 0 in dims[axis]:
            if (
                step != 1
                or len(dims[axis]) != 2
                or dims[axis][-1] != 0
                or start % t.batch
                or end % t.batch
                or t.batch == 1
            ):
                raise t.fail(op, "takes part of the batch")
            dims[axis] = (n // t.batch, 0) if n != t.batch else (0,)
        else:
            dims[axis] = (n,)
    return [tuple(dims)]


def _pad(t: Tracer, op: Op) -> list[Dims]:
    dims, pads = t.dims(op.inputs[0]), op.attrs["pads"]
    for k, factors in enumerate(dims):
        if 0 in factors and (pads[k] or pads[k + len(dims)]):
            raise t.fail(op, "pads the batch")
    target = t.draft.shape(op.outputs[0])
    return [tuple(f if 0 in f else (n,) for f, n in zip(dims, target, strict=True))]


def _tile(t: Tracer, op: Op) -> list[Dims]:
    repeats = op.attrs["repeats"]
    return [
        tuple((r, *f) if r != 1 else f for f, r in zip(t.dims(op.inputs[0]), repeats, strict=True))
    ]


def _gather(t: Tracer, op: Op) -> list[Dims]:
    data, indices, axis = t.dims(op.inputs[0]), t.dims(op.inputs[1]), int(op.attrs["axis"])
    if 0 in data[axis]:
        raise t.fail(op, f"picks samples of the batch by the indices {op.inputs[1]!r}")
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _elements(t: Tracer, op: Op) -> list[Dims]:
    """GatherElements and ScatterElements: operands of one rank, aligned except along the axis."""
    axis = int(op.attrs["axis"])
    rank = len(t.draft.shape(op.inputs[0]))
    if any(0 in t.dims(i)[axis] for i in op.inputs):
        raise t.fail(op, "picks samples of the batch")
    aligned = t.align(op, [(i, 0) for i in op.inputs], rank, ones=False)
    n = t.draft.shape(op.outputs[0])[axis]
    return [(*aligned[:axis], (n,), *aligned[axis + 1 :])]


def _gather_nd(t: Tracer, op: Op) -> list[Dims]:
    data, indices, b = t.dims(op.inputs[0]), t.dims(op.inputs[1]), int(op.attrs["batch_dims"])
    depth = t.draft.shape(op.inputs[1])[-1]
    for k in range(b):
        if (0 in data[k]) != (0 in indices[k]):
            slot = 1 if 0 in data[k] else 0
            t.demand(op, op.inputs[slot], k, data[k] if slot else indices[k])
    if any(0 in f for f in data[b : b + depth]) and not any(0 in f for f in indices):
        places = [k for k, n in enumerate(t.draft.shape(op.inputs[1])[:-1]) if n == t.batch]
        if len(places) != 1 or t.batch == 1:
            raise t.fail(op, f"picks samples of the batch by the indices {op.inputs[1]!r}")
        t.demand(op, op.inputs[1], places[0], (0,))
    if (
        any(0 in f for f in indices[b:])
        and depth
        and not any(0 in f for f in data)
        and (t.draft.shape(op.inputs[0])[0] == t.batch > 1)
    ):
        t.demand(op, op.inputs[0], 0, (0,))
    return [(*indices[:-1], *data[b + depth :])]


def _samples(t: Tracer, op: Op) -> list[Dims]:
    """Convolutions, pools and norms over images: the batch stays dim 0."""
    dims = t.dims(op.inputs[0])
    if any(0 in f for f in dims[1:]) or any(t.marks.get(i) is not None for i in op.inputs[1:] if i):
        raise t.fail(op, "has the batch in a dim that is not the first")
    return [
        (
            (dims[0], *((n,) for n in t.draft.shape(o)[1:]))
            if k == 0
            else tuple((n,) for n in t.draft.shape(o))
        )
        for k, o in enumerate(op.outputs)
    ]


def _resize(t: Tracer, op: Op) -> list[Dims]:
    """A dim that keeps its extent is resized element by element: the batch may be in it."""
    dims, before = t.dims(op.inputs[0]), t.draft.shape(op.inputs[0])
    after = t.draft.shape(op.outputs[0])
    if any(0 in f and m != n for f, m, n in zip(dims, before, after, strict=True)):
        raise t.fail(op, "resizes the batch")
    return [tuple(f if 0 in f else (n,) for f, n in zip(dims, after, strict=True))]


def _top_k(t: Tracer, op: Op) -> list[Dims]:
    axis, dims = int(op.attrs["axis"]), t.dims(op.inputs[0])
    if 0 in dims[axis]:
        raise t.fail(op, "ranks samples of the batch")
    return [(*dims[:axis], (int(op.attrs["k"]),), *dims[axis + 1 :])] * len(op.outputs)


def _one_hot(t: Tracer, op: Op) -> list[Dims]:
    axis, dims = int(op.attrs["axis"]), t.dims(op.inputs[0])
    return [(*dims[:axis], (int(op.attrs["depth"]),), *dims[axis:])]


def _recurrent(t: Tracer, op: Op) -> list[Dims]:
    steps, batch, _ = t.dims(op.inputs[0])
    for slot in (5, 6):
        if (
            slot < len(op.inputs)
            and op.inputs[slot]
            and 0 in batch
            and 0 not in t.dims(op.inputs[slot])[1]
        ):
            t.join(op, slot, 1, batch)
    if len(op.inputs) > 4 and op.inputs[4] and 0 in batch and 0 not in t.dims(op.inputs[4])[0]:
        t.demand(op, op.inputs[4], 0, batch)
    directions, hidden = (t.draft.shape(op.inputs[1])[0],), (int(op.attrs["hidden_size"]),)
    return [
        (steps, directions, batch, hidden),
        (directions, batch, hidden),
        (directions, batch, hidden),
    ]


def _linear_attention(t: Tracer, op: Op) -> list[Dims]:
    """Samples are apart, and each is one sequence."""
    q, v = t.dims(op.inputs[0]), t.dims(op.inputs[2])
    if any(0 in f for f in (*q[1:], *v[1:])):
        raise t.fail(op, "has the batch in a dim that is not the first")
    if q[0] == (0,):
        for inputs, rank in ((op.inputs[:3], 4), (op.inputs[3:5], 3), (op.inputs[5:], 4)):
            t.align(op, [(i, 0) for i in inputs if i], rank, ones=False)
    return [v, (v[0], v[2], q[3], v[3])]


def _attention(t: Tracer, op: Op) -> list[Dims]:
    q, k, v = (t.dims(i) for i in op.inputs[:3])
    if any(0 in f for f in (*q[1:], *k[1:], *v[1:])):
        raise t.fail(op, "has the batch in a dim that is not the first")
    (
        t.align(op, [(i, 0) for i in op.inputs[:3]], 4, ones=False)
        if q[0] == k[0] == v[0] == (0,)
        else _need_batch(t, op)
    )
    if len(op.inputs) > 3 and op.inputs[3]:
        mask = op.inputs[3]
        shape = t.draft.shape(mask)
        if len(shape) == 4 and 0 not in t.dims(mask)[0] and shape[0] != 1:
            t.demand(op, mask, 0, q[0])
    return [(q[0], q[1], q[2], v[3])]


def _need_batch(t: Tracer, op: Op) -> None:
    firsts = [t.dims(i)[0] for i in op.inputs if i and len(t.dims(i)) == 4]
    want = next((first for first in firsts if 0 in first), None)
    if want is None:
        raise t.fail(op, "has the batch in a dim that is not the first")
    for slot, i in enumerate(op.inputs[:3]):
        if 0 not in t.dims(i)[0]:
            t.join(op, slot, 0, want)


def _rotary(t: Tracer, op: Op) -> list[Dims]:
    rank = len(t.draft.shape(op.inputs[0]))
    return [t.align(op, [(i, rank - len(t.draft.shape(i))) for i in op.inputs], rank)]


def _experts(t: Tracer, op: Op) -> list[Dims]:
    x = t.dims(op.inputs[0])
    for name in op.inputs[1:3]:
        for k, (expert_factors, factors) in enumerate(zip(t.dims(name)[:-1], x[:-1], strict=True)):
            if 0 in factors and 0 not in expert_factors:
                t.demand(op, name, k, factors)
    return [x]


def _beside(t: Tracer, op: Op) -> list[Dims]:
    """Per-sample operands beside the first: lengths, positions, grids, offsets. The result has the
    batch where the first operand has it."""
    dims = t.dims(op.inputs[0])
    batch_dim = int(op.attrs.get("batch_axis", 0))
    if any(0 in f for k, f in enumerate(dims) if k != batch_dim):
        raise t.fail(op, "has the batch in another dim than its operands")
    for slot, name in enumerate(op.inputs[1:], 1):
        if name and (op.op, slot) != ("DeformConv", 1) and 0 not in t.dims(name)[0]:
            t.demand(op, name, 0, dims[batch_dim])
    return [
        tuple(dims[batch_dim] if k == batch_dim else (n,) for k, n in enumerate(t.draft.shape(o)))
        for o in op.outputs
    ]


_IMAGES = words(
    "Conv ConvTranspose MaxPool AveragePool InstanceNormalization GroupNormalization"
    " BatchNormalization LpPool MaxPoolIndices Col2Im ConvInteger"
)
_BESIDE = words("ReverseSequence TensorScatter GridSample MaxUnpool DeformConv")
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        SAME
        - _BESIDE
        - {"ScatterElements", "ScatterND", "InstanceNormalization", "GroupNormalization"},
        _same,
    ),
    **dict.fromkeys(words("Cast IsNaN Not Dropout QuantizeLinear DequantizeLinear"), _same),
    **dict.fromkeys(ARITHMETIC | COMPARE | LOGIC | {"Where"}, _broadcast),
    **dict.fromkeys(REDUCE, _reduce),
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Einsum": _einsum,
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "Gather": _gather,
    "GatherElements": _elements,
    "ScatterElements": _elements,
    "GatherND": _gather_nd,
    "Resize": _resize,
    "TopK": _top_k,
    "OneHot": _one_hot,
    **dict.fromkeys(_IMAGES, _samples),
    **dict.fromkeys(_BESIDE, _beside),
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
    "LinearAttention": _linear_attention,
    "RotaryEmbedding": _rotary,
    "RoutedExperts": _experts,
}
