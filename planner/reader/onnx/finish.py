"""The finished draft as a frozen Graph: roles, labels, unique ids, nothing unused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np

from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.graph.ir import FLOATS, Graph, Role, Tensor, WeightRef
from planner.reader.draft.common_subexpressions import merge_identical
from planner.reader.draft.draft import FOLD_ELEMENTS, Draft, Op, ref_array
from planner.reader.draft.simplify import drop_copies, drop_dead
from planner.reader.lower.bodies import frozen
from planner.reader.onnx.params import STATE, Use, lost_ties, named, resolve_ties

_GENERATED = re.compile(
    r"^(val_\d+|onnx::\w+|\d+|_tensor_constant\d+|.*Constant(_\d+)?_output_0|const_fold_opt_.*)$"
)
_SLOTS = {
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
    "LSTM": {1: "weight_ih", 2: "weight_hh", 3: "bias"},
    "GRU": {1: "weight_ih", 2: "weight_hh", 3: "bias"},
}
_SLOTS["RoutedExperts"] = {
    3: "gate_proj",
    4: "up_proj",
    5: "down_proj",
    6: "gate_bias",
    7: "up_bias",
    8: "down_bias",
}
_OF_EIGHT_BITS = ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul")
SHOWN = 4  # names in a note
_BUFFERS = (
    "running_mean",
    "running_var",
    "inv_freq",
    ".layer_scalar",  # of Gemma 4
    ".relative_coords_table",  # of Swin v2
)


def finish(draft: Draft) -> Graph:
    """Decides what every leaf is and freezes the draft. Raises PlanError when nothing is left to
    plan."""
    drop_copies(draft)
    for op in draft.ops:
        if op.op in ("RandomUniform", "RandomNormal"):
            op.inputs = []  # whose shape it took: the batch was followed
    uses = resolve_ties(draft)
    trainable = {u.leaf for u in uses}
    _fold_rest(draft, trainable)
    drop_dead(draft)
    merge_identical(draft, trainable)
    if not draft.ops:
        raise PlanError("P114", "every output of the model is constant: there is nothing to plan")
    weights, constants = _roles(draft, trainable)
    scales = {n for op in draft.ops if op.op in _OF_EIGHT_BITS for n in op.inputs[1:]}
    statistics = {
        n for op in draft.ops for slot, n in enumerate(op.inputs) if (op.op, slot) in STATE
    }
    idle = [
        w
        for w in weights
        if named(w)
        and w not in scales | statistics
        and w not in trainable
        and draft.is_float(w)
        and not draft.records.buffer(w)
        and not w.endswith(_BUFFERS)
    ]
    _name_ids(draft.ops)
    tensors = _tensors(draft, weights, constants)
    labels = _labels(draft, list(weights), uses)
    draft.notes.extend(lost_ties(draft, uses, labels))
    if idle:
        draft.notes.append(
            Finding(
                "frozen",
                _left_out([labels.get(w, w) for w in idle], [labels.get(w, w) for w in weights]),
            )
        )
    leaves = (*weights, *constants)
    if packed := _quantised([labels.get(n, n) for n in leaves if _packed(draft, n)]):
        draft.notes.append(Finding("frozen", packed))
    if computed := _computed(draft, trainable, constants):
        draft.notes.append(Finding("frozen", computed))
    nodes = tuple(map(frozen, draft.ops))
    return Graph(
        name=draft.name,
        nodes=nodes,
        tensors=tensors,
        inputs=tuple(draft.inputs),
        outputs=tuple(draft.outputs),
        weights=weights,
        constants=constants,
        labels=labels,
        trainable=frozenset(w for w in weights if w in trainable),
        dims=dict(draft.dims),
        notes=tuple(draft.notes),
    )


def _left_out(idle: list[str], labels: list[str]) -> str:
    """The finding that names weights training leaves out, with the options that train them: by
    their last name where no other weight has it."""
    globs: dict[str, None] = {}
    for label in idle:
        last = f"*.{label.rpartition('.')[2]}"
        alone = "." in label and all(other in idle for other in labels if fnmatchcase(other, last))
        globs[last if alone else label] = None
    and_more = f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else ""
    options = " ".join(f"--trainable '+{glob}'" for glob in list(globs)[:SHOWN]) + (
        " ..." if len(globs) > SHOWN else ""
    )
    return (
        f"not trained: {', '.join(map(repr, idle[:SHOWN]))}{and_more}: added or joined rather than"
        f" multiplied, and nothing says whether they are parameters or tables ({options} trains"
        " them)"
    )


def _packed(draft: Draft, name: str) -> bool:
    """Whether a leaf is a matrix, or filters, of quantised numbers."""
    return draft.dtype(name) in ("int8", "uint8") and len(draft.shape(name)) > 1


def _quantised(labels: list[str]) -> str:
    """The finding on quantised weights, "" where there are none."""
    and_more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return (
        f"not trained: {labels[0]!r}{and_more}: quantised weights have no gradient (plan the model"
        " that"
        " was quantised, to train it)"
        if labels
        else ""
    )


def _computed(draft: Draft, trainable: set[str], constants: Mapping[str, np.ndarray]) -> str:
    """The finding on parameters that are in the file only as what the exporter computed from them,
    "" where there are none."""
    lost: dict[str, str] = {}
    read = {n for op in draft.ops for n in op.inputs}
    for name, origins in draft.records.folded.items():
        if name not in trainable and name in draft.types and not draft.records.view_of(name):
            lost |= {origin: name for origin in origins if name in read or not draft.shape(name)}
    if lost:
        and_more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        return (
            f"not trained: {', '.join(map(repr, list(lost)[:SHOWN]))}{and_more}: the exporter"
            " computed"
            f" {next(iter(lost.values()))!r} from {'them' if len(lost) > 1 else 'it'}, and only"
            " that is in the file (torch.onnx.export(..., optimize=False) keeps what they are"
            " made of)"
        )
    folded = [
        n
        for n, a in constants.items()
        if n.startswith("onnx::Add_") and a.dtype.kind == "f" and a.ndim > 1 and not _mask(a)
    ]
    if folded:
        and_more = f" and {len(folded) - 1} more" if len(folded) > 1 else ""
        return (
            f"not trained: {folded[0]!r} {list(constants[folded[0]].shape)}{and_more}, which the"
            " exporter computed: parameters may be in it, such as position embeddings"
            " (torch.onnx.export(..., do_constant_folding=False) keeps what it is made of)"
        )
    return ""


def _mask(array: np.ndarray) -> bool:
    """Whether an array that is added masks: zeros and very low values alone."""
    return bool(((array == 0) | (array < -1e4)).all())


def _fold_rest(draft: Draft, trainable: set[str]) -> None:
    """Float tables that turned out to be no parameters: small operations on them alone are done now
    (Expand is left lazy)."""
    known: set[str] = set(draft.values) - trainable
    for name, ref in draft.refs.items():
        if (
            ref.kind == "inline"
            and name not in trainable
            and not _of_the_model(name)
            and math.prod(draft.shape(name)) <= FOLD_ELEMENTS
        ):
            known.add(name)
    remaining: list[Op] = []
    for op in draft.ops:
        small = all(math.prod(draft.shape(o)) <= FOLD_ELEMENTS for o in op.outputs if o)
        if (
            op.op != "Expand"
            and op.inputs
            and small
            and all(i in known for i in op.inputs if i)
            and len([o for o in op.outputs if o]) == 1
        ):
            value = draft.value(op.outputs[0], FOLD_ELEMENTS)
            if value is not None:
                draft.values[op.outputs[0]] = value
                known.add(op.outputs[0])
                continue
        remaining.append(op)
    draft.ops = remaining


def _of_the_model(name: str) -> bool:
    """Whether a leaf that is not trained is a weight by its name. Frequencies of rotary angles are
    none: as constants they and the angles stay float32, where a program that computes in bfloat16
    would round its weights, and with them position 4,001 to 4,000."""
    return named(name) and not name.endswith("inv_freq")


def _roles(draft: Draft, trainable: set[str]) -> tuple[dict[str, WeightRef], dict[str, np.ndarray]]:
    """Leaves in order of first use: weights (parameters, state, large or unknown values) and small
    constants."""
    weights: dict[str, WeightRef] = {}
    constants: dict[str, np.ndarray] = {}
    fills: dict[str, Op] = {}
    order = [(op, slot, name) for op in draft.ops for slot, name in enumerate(op.inputs) if name]
    for op, slot, name in [*order, *((OUTPUT, 0, name) for name in draft.outputs)]:
        if name in weights or name in constants or name in fills or not draft.is_leaf(name):
            continue
        state = (op.op, slot) in STATE
        if name in draft.values and (
            draft.values[name].size > FOLD_ELEMENTS or name in trainable or state
        ):
            draft.refs[name] = WeightRef("inline", proto=draft.values.pop(name))
        ref = draft.refs.get(name)
        if ref is None:
            constants[name] = draft.values[name]
        elif name in trainable or state or ref.kind != "inline" or _of_the_model(name):
            weights[name] = ref
        elif math.prod(draft.shape(name)) <= FOLD_ELEMENTS:
            array = ref_array(ref, name)
            assert array is not None
            constants[name] = np.array(array, order="C")
        elif isinstance(ref.proto, np.ndarray) and not any(ref.proto.strides):
            fills[name] = _fill(draft, name, ref.proto)
        else:
            weights[name] = ref
    draft.ops = [*fills.values(), *draft.ops]
    return weights, constants


OUTPUT = Op("", [], [], {})


def _fill(draft: Draft, name: str, array: np.ndarray) -> Op:
    """A large tensor of one repeated value is made where it is needed."""
    value = array.reshape(-1)[0].item() if array.size else 0.0
    op = Op("ConstantOfShape", [], [name], {"value": value, "dtype": draft.dtype(name)}, id=name)
    draft.maker[name] = op
    return op


def _name_ids(ops: list[Op]) -> None:
    """Ids are unique by construction; one that is not (a user's name equal to a derived one) gets
    an ordinal."""
    seen: set[str] = set()
    for op in ops:
        wanted, k = op.id or f"{op.op}", 1
        while wanted in seen:
            wanted, k = f"{op.id}.{k}", k + 1
        op.id = wanted
        seen.add(wanted)
        if op.members == (op.id,):
            op.members = ()


def _tensors(
    draft: Draft, weights: dict[str, WeightRef], constants: dict[str, np.ndarray]
) -> dict[str, Tensor]:
    """Inputs, then leaves, then what each node makes."""
    tensors: dict[str, Tensor] = {}

    def put(name: str, role: Role) -> None:
        shape, dtype = draft.types[name]
        tensors[name] = Tensor(name, tuple(int(n) for n in shape), dtype, role)

    for name in draft.inputs:
        put(name, "input")
    for name in weights:
        put(name, "weight")
    for name in constants:
        put(name, "constant")
    for op in draft.ops:
        for o in op.outputs:
            if o:
                put(o, "activation")
    return tensors


def _labels(draft: Draft, weights: list[str], uses: list[Use]) -> dict[str, str]:
    """A readable, unique name per weight: its own when it is a module path, else the scope of its
    first use and the slot."""
    first: dict[str, tuple[Op, int, str]] = {}
    for use in uses:
        first.setdefault(use.leaf, (use.op, use.slot, use.kind))
    for op in draft.ops:
        for slot, name in enumerate(op.inputs):
            first.setdefault(
                name, (op, slot, "buffer" if name and draft.types[name][1] in FLOATS else "table")
            )
    labels: dict[str, str] = {}
    taken: set[str] = set()
    for name in weights:
        label = name
        if not named(name):
            op, slot, kind = first.get(name, (OUTPUT, 0, "buffer"))
            what = _SLOTS.get(op.op, {}).get(slot) or {"scale": "weight"}.get(kind, kind)
            if op.scope:
                label = f"{op.scope}.{what}"
            elif _GENERATED.match(name):
                base = (op.members[-1] if op.members else op.id).strip("/").replace("/", ".")
                label = f"{base}.{what}"
        unique, k = label, 1
        while unique in taken:
            unique, k = f"{label}.{k}", k + 1
        taken.add(unique)
        labels[name] = unique
    return labels
