"""Which leaves are parameters, and which of them were merged or copied by the exporter.

A float leaf is a parameter when it feeds a parameter slot, directly or through Reshape, Transpose,
Cast, Identity, a scalar factor, a function that keeps it within bounds (Exp, Neg, Softplus,
Sigmoid, Tanh: Mamba's A is -exp(A_log)), or parts put together anew (Slice, Split, Concat, Expand,
a Gather of rows that are known: the gates of a recurrent layer, which exporters re-order):

    MatMul, Einsum      either operand of rank >= 2, the other depending on data or on a leaf that
                        the file says is a parameter (a table that goes through a layer: DeBERTa's
                        relative positions)
    Conv, ConvTranspose filters;  LSTM, GRU, RNN  W, R, B;  Gather, GatherND  the table
    RoutedExperts       stacks of weights and of biases
    norms               scale and bias
    Add, Mul            a vector as long as the last dim (heads and their width, where a product is
                        seen so), or [C, 1, ..], of an operand that depends on data; [C, 1] behind
                        a convolution; a named leaf [H, 1] that scales the heads of [B, .., H, D]
                        (Mamba's D)

and anywhere, through arithmetic with others too (a norm of its own, a scalar factor), when the file
says that it is a parameter: by the exporter's record, or by a name that modules give to nothing
else (planner.reader.onnx.records: class tokens, position embeddings, tables of relative positions,
temperatures; filters that are standardised).

Not: what the file says is a buffer, running statistics, other scalars, other tables of rank two and
more that are added or multiplied, anything quantised. Exporters merge initializers of equal value:
scales of one and biases of zero that belong to different modules are parted again here, and
filters of zeros, which a norm whose scale begins at zero leaves when it is folded, or matrices that
begin as the identity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from planner.graph.findings import Finding
from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.simplify import users

TRAINABLE = ("float64", "float32", "float16", "bfloat16")
_NORMS = ("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization")
_THROUGH = ("Reshape", "Transpose", "Cast", "Identity", "Exp", "Neg", "Softplus", "Sigmoid", "Tanh")
_PARTS = ("Slice", "Split", "Concat", "Expand", "Gather")
_ARITHMETIC = (
    *_THROUGH,
    *_PARTS,
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Sqrt",
    "Reciprocal",
    "Log",
    "Abs",
    "Clip",
    "Softmax",
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "MatMul",
    "Tile",
    "Pad",
    "Where",
    "Einsum",
    "Resize",
    "Relu",
    "Gelu",
    "Silu",
    "ScatterND",
    "BatchNormalization",
    *_NORMS,
)
"""Operations behind which a leaf that the file says is a parameter is looked for."""
_RECURRENT = {1: "weight_ih", 2: "weight_hh", 3: "bias"}
_NUMBERED = re.compile(r"(.+)_(\d+)")
_MADE_UP = re.compile(r"^val_\d+$|/?Constant(_\d+)?_output_0$")
"""Names that torch's exporters give to constants, never to parameters of norms."""


@dataclass(frozen=True)
class Use:
    """A parameter slot that a leaf feeds. kind: 'weight', 'scale', 'bias', 'weight_ih',
    'weight_hh'; direct: without views between."""

    leaf: str
    op: Op
    slot: int
    kind: str
    direct: bool


def depends_on_data(draft: Draft) -> set[str]:
    """Tensors that depend on a graph input."""
    dependent = set(draft.inputs)
    for op in draft.ops:
        if any(i in dependent for i in op.inputs):
            dependent.update(o for o in op.outputs if o)
    return dependent


def _projected(draft: Draft, data: set[str]) -> set[str]:
    """Tensors behind products of learned tables that no data has met yet: a layer is run over the
    table as over data, and what it multiplies and adds are its parameters."""
    learned: set[str] = set()
    projected: set[str] = set()
    for op in draft.ops:
        if not data.isdisjoint(op.outputs) or op.bodies:
            continue
        floats = [i for i in op.inputs if i and draft.dtype(i) in TRAINABLE]
        if not any(i in learned or _told_leaf(draft, i) for i in floats):
            continue
        results = [o for o in op.outputs if o]
        learned.update(results)
        if op.op in ("MatMul", "Einsum") or not projected.isdisjoint(floats):
            projected.update(results)
    return projected


STATE = {("BatchNormalization", 3), ("BatchNormalization", 4)}
"""Operands that follow the data, whatever they are called: running statistics."""


def slot_kind(draft: Draft, op: Op, slot: int, data: set[str]) -> str:
    """What parameter slot of an operation holds, '' when it is none."""
    kind = op.op
    if op.bodies:
        return _kind_inside(op, slot, data)
    shape = draft.shape(op.inputs[slot])
    others = [i for k, i in enumerate(op.inputs) if k != slot and i]
    if kind in ("MatMul", "Einsum"):
        return "weight" if len(shape) >= 2 and op.outputs[0] in data else ""
    if kind in ("Conv", "ConvTranspose"):
        return "weight" if slot == 1 else ""
    if kind in ("Gather", "GatherND"):
        return "weight" if slot == 0 else ""
    if kind == "BatchNormalization" and op.inputs[0] not in data:
        return "scale" if slot == 1 else ""  # filters that are standardised: no bias is learned
    if kind in _NORMS or kind == "BatchNormalization":
        return {1: "scale", 2: "bias"}.get(slot, "")
    if kind == "RoutedExperts":
        return "weight" if 3 <= slot <= 5 else "bias" if slot > 5 else ""
    if kind in ("LSTM", "GRU", "RNN"):
        return _RECURRENT.get(slot, "")
    if kind in ("Add", "Mul") and others and others[0] in data:
        out = draft.shape(others[0])
        maker = draft.maker.get(others[0])
        if maker is not None and maker.op == "Cast" and not draft.is_float(maker.inputs[0]):
            return ""  # of a product of quantised numbers
        behind = (
            kind == "Add"
            and maker is not None
            and maker.op in ("Conv", "ConvTranspose")
            and shape == (out[1], *[1] * (len(out) - 2))
        )
        if (
            _vector(shape, out)
            or behind
            or (kind == "Add" and _of_heads(draft, shape, maker))
            or (kind == "Mul" and named(op.inputs[slot]) and len(out) > 3 and shape == (out[-2], 1))
        ):
            return "bias" if kind == "Add" else "scale"
    return ""


def _kind_inside(op: Op, slot: int, data: set[str]) -> str:
    """The parameter slot that an operand of a node with bodies feeds in one of them."""
    first, own_inputs = int(op.attrs["first"]), int(op.attrs["own"])
    states = set(range(int(op.attrs.get("states", 0)) + int(op.attrs.get("scanned", 0))))
    for body in op.bodies:
        names = body.inputs[own_inputs:]
        if slot < first:
            return ""
        not_stored = {
            n
            for k, (n, outer) in enumerate(zip(names, op.inputs[first:], strict=True))
            if outer in data or k in states
        } | set(body.inputs[:own_inputs])
        for inner in body.ops:
            if any(i in not_stored for i in inner.inputs):
                not_stored.update(o for o in inner.outputs if o)
        for inner in body.ops:
            for k, name in enumerate(inner.inputs):
                if (
                    name
                    and name not in not_stored
                    and _origin(body, name)[0] == names[slot - first]
                    and (kind := slot_kind(body, inner, k, not_stored))
                ):
                    return kind
    return ""


def named(name: str) -> bool:
    """True for a module path such as 'vit.embeddings.cls_token': whoever wants to train it must
    find it among the weights."""
    return "." in name and "::" not in name and "/" not in name


def _of_heads(draft: Draft, shape: tuple[int, ...], maker: Op | None) -> bool:
    """Whether a tensor [H, D] is as long as the rows of a product that is seen in heads: Keras adds
    biases so."""
    product = draft.maker.get(maker.inputs[0]) if maker is not None else None
    return (
        maker is not None
        and maker.op == "Reshape"
        and product is not None
        and product.op == "MatMul"
        and len(shape) > 1
        and draft.shape(maker.outputs[0])[-len(shape) :] == shape
        and draft.shape(product.outputs[0])[-1] == math.prod(shape)
    )


def _vector(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """True for [last dim], for [1, 1, last dim] of rank three, and for [C, 1, ..] or [1, C, 1, ..]
    aligned to dim 1 of a tensor of rank three or more."""
    if len(shape) == 1 or (len(shape) == len(out) == 3 and shape[:2] == (1, 1)):
        return bool(out) and shape[-1] == out[-1]
    lead = len(out) - len(shape)
    channel = [k + lead for k, n in enumerate(shape) if n != 1]
    return (
        len(out) >= 3
        and lead <= 1
        and channel == [1]
        and len(shape) > 2
        and shape[1 - lead] == out[1]
    )


def parameter_uses(draft: Draft) -> list[Use]:
    """Every use of a float leaf in a parameter slot, in node order."""
    data = depends_on_data(draft)
    data |= _projected(draft, data)
    uses: list[Use] = []
    recorded: dict[str, tuple[str, ...]] = {}
    for op in draft.ops:
        for slot, name in enumerate(op.inputs):
            if (
                not name
                or name in data
                or draft.dtype(name) not in TRAINABLE
                or (op.op, slot) in STATE
            ):
                continue
            kind = slot_kind(draft, op, slot, data)
            leaves = _leaves(draft, name) if kind else []
            for leaf, direct in leaves:
                if (
                    _may_train(draft, leaf)
                    and not (
                        kind in ("scale", "bias")
                        and op.op in _NORMS
                        and _made_up(draft, leaf, kind)
                    )
                    and not _buffer_rows(draft, op, leaf)
                ):
                    uses.append(Use(leaf, op, slot, kind, direct))
            if data.isdisjoint(op.outputs) or not draft.is_float(op.outputs[0]):
                continue
            for leaf in _told(draft, name, recorded):
                if all(leaf != known for known, _ in leaves):
                    uses.append(Use(leaf, op, slot, _told_kind(draft, op, leaf), leaf == name))
    return uses


def _may_train(draft: Draft, leaf: str) -> bool:
    """Whether nothing speaks against a leaf: it is a float, kept as stored, and no buffer by the
    exporter's record."""
    return (
        draft.dtype(leaf) in TRAINABLE
        and (leaf not in draft.values or leaf in draft.keep_floats)
        and not draft.records.buffer(leaf)
    )


def _told_leaf(draft: Draft, name: str) -> bool:
    """Whether a tensor is a leaf of which the file says that it is a parameter."""
    return draft.is_leaf(name) and _may_train(draft, name) and draft.records.learned(name)


def _told(draft: Draft, name: str, known: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Leaves behind a tensor that the file says are parameters."""
    stack = [name]
    while stack:
        top = stack[-1]
        op = draft.maker.get(top)
        if top in known:
            stack.pop()
        elif op is None or op.op not in _ARITHMETIC or op.bodies:
            known[top] = (top,) if op is None and _told_leaf(draft, top) else ()
            stack.pop()
        elif below := [i for i in _table_of(op) if i not in known]:
            stack.extend(below)
        else:
            known[top] = tuple(dict.fromkeys(leaf for i in _table_of(op) for leaf in known[i]))
            stack.pop()
    return known[name]


def _table_of(op: Op) -> list[str]:
    """Operands behind which leaves are looked for: a norm's scale and bias have slots of their
    own."""
    has_slots = op.op in (*_NORMS, "BatchNormalization")
    return op.inputs[:1] if has_slots else [i for i in op.inputs if i]


def _told_kind(draft: Draft, op: Op, leaf: str) -> str:
    """What a leaf is that no slot names: exporters merge scales and biases of equal value, but what
    is one number may well have many readers."""
    one = math.prod(draft.shape(leaf)) == 1
    return "weight" if one or op.op not in ("Add", "Mul") else "bias" if op.op == "Add" else "scale"


def _leaves(draft: Draft, name: str) -> list[tuple[str, bool]]:
    """The leaves that a tensor is a view or a function within bounds of, or is put together from,
    and whether it is the leaf itself."""
    leaves: list[tuple[str, bool]] = []
    seen = {name}
    stack = [(name, True)]
    while stack:
        name, direct = stack.pop()
        origin, alone = _origin(draft, name)
        if origin and draft.is_leaf(origin):
            leaves.append((origin, direct and alone))
            continue
        op = draft.maker.get(origin) if origin else None
        for part in (
            op.inputs[::-1]
            if op is not None and op.op == "Concat"
            else op.inputs[:1]
            if op is not None
            else []
        ):
            if part not in seen:
                seen.add(part)
                stack.append((part, False))
    return leaves


def _origin(draft: Draft, name: str) -> tuple[str, bool]:
    """What a tensor is a view or a function within bounds of, and whether it is that itself; a
    tensor put together from parts is its own origin."""
    direct = True
    while name in draft.maker:
        op = draft.maker[name]
        if op.op in _PARTS and not (op.op == "Gather" and draft.value(op.inputs[1]) is None):
            return name, direct
        if op.op == "Mul":  # Gemm's beta
            k = 0 if draft.scalar(op.inputs[1]) is not None else 1
            if draft.scalar(op.inputs[1 - k]) is None:
                return "", False
        elif op.op in _THROUGH or op.op == "BatchNormalization":  # of filters: standardised ones
            k = 0
        else:
            return "", False
        name, direct = op.inputs[k], False
    return name, direct


def _made_up(draft: Draft, leaf: str, kind: str) -> bool:
    """True for the ones and zeros an exporter writes for a norm without affine parameters."""
    named_by_exporter = bool(_MADE_UP.search(leaf)) and leaf not in draft.records.computed
    return named_by_exporter and draft.splat(leaf) == (1.0 if kind == "scale" else 0.0)


def _buffer_rows(draft: Draft, op: Op, leaf: str) -> bool:
    """Whether rows at known places are taken of what an exporter made: a buffer that the model
    writes into (rotary embeddings of Wan), no table."""
    known = op.op in ("Gather", "GatherND") and draft.value(op.inputs[1]) is not None
    return known and bool(_MADE_UP.search(leaf)) and leaf not in draft.records.computed


def resolve_ties(draft: Draft) -> list[Use]:
    """Parts merged scales, biases and zeros, and joins the copies of anything else. All uses of
    parameters after that."""
    uses = parameter_uses(draft)
    by_leaf: dict[str, list[Use]] = {}
    for use in uses:
        by_leaf.setdefault(use.leaf, []).append(use)
    joined = _join_copies(draft, by_leaf)
    readers = users(draft)
    second_calls = _second_calls(draft, by_leaf)
    parted: list[str] = []
    shared = _called_together(by_leaf)
    for leaf in list(by_leaf):
        partable = [
            u
            for u in by_leaf[leaf]
            if u.kind in ("scale", "bias") and (u.direct or _view(draft, u, readers) is not None)
        ]
        if _made_alike(draft, leaf, by_leaf[leaf]):
            partable = by_leaf[leaf]
        elif len(partable) != len(by_leaf[leaf]) or not (
            _may_part(draft, leaf) or _of_one_module(leaf, partable, shared)
        ):
            continue
        if len(partable) < 2:
            continue
        groups: dict[str, list[Use]] = {}
        for use in partable:
            scope = use.op.scope or use.op.id
            groups.setdefault(second_calls.get(scope, scope), []).append(use)
        keeper = next(
            (scope for scope in groups if leaf.startswith(scope + ".")), next(iter(groups))
        )
        for scope, group in groups.items():
            if scope != keeper:
                _part(draft, leaf, scope, group, readers)
        if len(groups) > 1:
            parted.append(leaf)
    if parted:
        shown = ", ".join(repr(p) for p in parted[:3]) + (", ..." if len(parted) > 3 else "")
        draft.notes.append(
            f"weights of different modules that the exporter had merged, being equal ({shown}), are"
            " separate parameters again"
        )
    return parameter_uses(draft) if parted or joined else uses


def _second_calls(draft: Draft, by_leaf: dict[str, list[Use]]) -> dict[str, str]:
    """Scope of a module's later call, such as 'ffn_1' -> the module, 'ffn'.

    The tracing exporter numbers later calls of one module, and a module may be named that way. It
    is a later call when nothing is stored under the numbered name, and the model does call modules
    twice: some matrix feeds a scope and its numbered one.
    """
    called: set[str] = set()
    for uses in by_leaf.values():
        hard = {u.op.scope for u in uses if u.kind not in ("scale", "bias")}
        called.update(m[2] for scope in hard if (m := _NUMBERED.fullmatch(scope)) and m[1] in hard)
    if not called:
        return {}
    stored = {name.rpartition(".")[0] for name in (*draft.refs, *draft.values, *draft.copy_of)}
    scopes = {u.op.scope for uses in by_leaf.values() for u in uses}
    numbered = (
        (scope, m) for scope in sorted(scopes - stored) if (m := _NUMBERED.fullmatch(scope))
    )
    return {scope: m[1] for scope, m in numbered if m[2] in called and m[1] in scopes}


def _may_part(draft: Draft, leaf: str) -> bool:
    """Merged by value: all elements equal, or the values are not known."""
    ref = draft.refs.get(leaf)
    return (ref is not None and ref.kind != "inline") or draft.splat(leaf) is not None


def _made_alike(draft: Draft, leaf: str, uses: list[Use]) -> bool:
    """Whether a leaf is filters or a matrix that several products read and nobody drew: no model
    shares those."""
    products = ("Conv", "ConvTranspose", "MatMul")
    apart = len(uses) > 1 and all(u.direct and u.op.op in products for u in uses)
    return apart and _undrawn(draft, leaf)


def _undrawn(draft: Draft, leaf: str) -> bool:
    """Whether a leaf has two numbers or fewer: zeros, the identity."""
    values = draft.value(leaf)
    if values is None or not values.size:
        return False
    flat = values.reshape(-1)
    rest = flat[flat != flat[0]]
    return not rest.size or bool((rest == rest[0]).all())


def _called_together(by_leaf: dict[str, list[Use]]) -> set[str]:
    """Scopes that read a matrix which another scope reads too: one module under several names."""
    shared: set[str] = set()
    for uses in by_leaf.values():
        scopes = {u.op.scope for u in uses if u.kind not in ("scale", "bias")}
        if len(scopes) > 1:
            shared |= scopes
    return shared


def _of_one_module(leaf: str, soft: list[Use], shared: set[str]) -> bool:
    """Whether a leaf that several modules' norms read, or products of matrices of their own have
    as bias, is named after one of them: then the others' were equal to it (layers of
    nn.TransformerEncoder are copies of one), and were merged whatever the values are. A module that
    several were to share would be one; where its scope is another's with a number, as tracing
    exporters call a module's later calls, it may be that."""
    scopes = {u.op.scope for u in soft}
    owner = next((scope for scope in scopes if scope and leaf.startswith(f"{scope}.")), None)
    if owner is None or "" in scopes or any(u.op.op not in (*_NORMS, "Add") for u in soft):
        return False
    if any(u.op.op == "Add" for u in soft) and not shared.isdisjoint(scopes):
        return False
    later = (_NUMBERED.fullmatch(scope) for scope in scopes)
    return not any(m and m[1] == owner for m in later)


def _view(draft: Draft, use: Use, readers: Mapping[str, list[Op]]) -> Op | None:
    """The view of a leaf that one norm alone reads (scales of group norms are [C, 1, 1])."""
    name = use.op.inputs[use.slot]
    op = draft.maker.get(name)
    alone = op is not None and op.op == "Reshape" and op.inputs[0] == use.leaf
    return op if alone and len(readers.get(name, ())) == 1 else None


def _part(
    draft: Draft, leaf: str, scope: str, group: list[Use], readers: Mapping[str, list[Op]]
) -> None:
    """Gives a module its own copy of a shared leaf."""
    what = "bias" if group[0].kind == "bias" else "weight"
    name = draft.fresh(f"{scope}.{what}")
    draft.types[name] = draft.types[leaf]
    if leaf in draft.refs:
        draft.refs[name] = draft.refs[leaf]
    else:
        draft.values[name] = draft.values[leaf]
        draft.keep_floats.add(name)
    for use in group:
        view = None if use.direct else _view(draft, use, readers)
        if view is not None:
            view.inputs[0] = name
        else:
            use.op.inputs[use.slot] = name


def _join_copies(draft: Draft, by_leaf: dict[str, list[Use]]) -> bool:
    """Initializers known under several names: one again, unless all of it is scales, biases and
    zeros that may be parted. Whether any was joined."""
    families: dict[str, list[str]] = {}
    for name, origin in draft.copy_of.items():
        if name in draft.refs:
            families.setdefault(origin, []).append(name)
    kept_apart, joined = 0, False
    for origin, copies in families.items():
        names = [n for n in (origin, *copies) if n in draft.refs]
        uses = [u for n in names for u in by_leaf.get(n, ())]
        partable = all(u.kind in ("scale", "bias") for u in uses) and _may_part(draft, origin)
        if partable or _undrawn(draft, names[0]):
            kept_apart += len(copies)
            continue
        first = names[0]
        for name in names[1:]:
            if draft.refs[name] == draft.refs[first] and draft.shape(name) == draft.shape(first):
                for op in draft.ops:
                    op.inputs[:] = [first if i == name else i for i in op.inputs]
                by_leaf.setdefault(first, []).extend(by_leaf.pop(name, []))
                del draft.refs[name]
                joined = True
    if kept_apart:
        draft.notes.append(
            f"{kept_apart} weights that the exporter stored once because their values are equal"
            " are separate parameters"
        )
    return joined


def lost_ties(draft: Draft, uses: list[Use], labels: Mapping[str, str]) -> Iterator[Finding]:
    """Embeddings and output layers that are equal copies: training would untie them. They are
    called by their labels, which --tie takes."""
    tables = {u.leaf: u for u in uses if u.op.op == "Gather"}
    heads = {u.leaf: u for u in uses if u.op.op == "MatMul" and u.leaf not in tables}
    for table in tables:
        v, d = (*draft.shape(table), 0, 0)[:2]
        for head, use in heads.items():
            shape = draft.shape(head)
            if (
                len(draft.shape(table)) != 2
                or v < 2
                or tuple(sorted(shape)) != tuple(sorted((v, d)))
                or draft.dtype(head) != draft.dtype(table)
            ):
                continue
            a, b = draft.value(table, 1 << 33), draft.value(head, 1 << 33)
            both = f"{labels.get(table, table)!r} and {labels.get(head, head)!r}"
            if a is not None and b is not None:
                if (a.shape == b.shape and np.array_equal(a, b)) or (
                    a.shape == b.T.shape and np.array_equal(a, b.T)
                ):
                    yield Finding(
                        "tie",
                        f"{both} hold equal values: the tie was lost in the export, and training"
                        " would untie them (--tie joins them)",
                    )
            elif (
                use.op.outputs[0] in draft.outputs
                and d
                and shape[0 if use.op.attrs.get("trans_b") else 1] == v
            ):
                yield Finding(
                    "tie",
                    f"{both} have matching shapes: if they were tied before the export, training"
                    " would untie them (--tie joins them)",
                )
