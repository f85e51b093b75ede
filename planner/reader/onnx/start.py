"""From a ModelProto to the first draft: checks, dims, leaves, then one lowering pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.graph.ir import DTYPE_BYTES, FLOATS, WeightRef
from planner.reader.draft.draft import FOLD_ELEMENTS, Draft, proto_array
from planner.reader.draft.fold import numpy_dtype
from planner.reader.draft.shapes import Type
from planner.reader.draft.simplify import replace_tensor, users
from planner.reader.lower.call import Frame
from planner.reader.lower.guide import CarriesBatch, Guide, refused
from planner.reader.lower.lowering import Lowering
from planner.reader.lower.table import TABLE
from planner.reader.onnx.check import Checked
from planner.reader.onnx.dims import Bound, bind
from planner.reader.onnx.records import Records
from planner.reader.onnx.tables import Tables
from planner.reader.onnx.tensors import check_tensor, input_type

SHOWN = 3
"""Tensors that a finding names."""


# Many parameters: a model, and the options for the shapes of its inputs as `bind` takes them.
def start(
    checked: Checked,
    folder: Path | None,
    name: str,
    *,
    batch: int | None,
    dims: Mapping[str, int] | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
    tokens_per_step: int | None,
    devices: int,
    direct: bool = False,
    carriers: Mapping[str, int] | None = None,
) -> tuple[Draft, Bound]:
    """The canonical draft of a model at its lowered batch (see `planner.reader.onnx.dims.bind`).
    Raises PlanError."""
    graph = checked.model.graph
    options: dict[str, Any] = {
        "batch": batch,
        "tokens_per_step": tokens_per_step,
        "devices": devices,
    }
    bound = bind(
        graph, dims=dims or {}, shapes=shapes or {}, direct=direct, carriers=carriers, **options
    )
    draft = Draft(name=name, dims=bound.dims, notes=list(bound.notes), records=Records.of(graph))
    declared = _declared(graph, bound)
    lowering = Lowering(draft, checked.functions, declared, TABLE)
    opsets = {
        ("" if o.domain == "ai.onnx" else o.domain): o.version for o in checked.model.opset_import
    }
    frame = Frame({}, opsets)
    _add_inputs(draft, frame, bound)
    if bound.guided:
        lowering.guide = Guide(draft, bound.lowered or 1)
    for stored in checked.initializers:
        _add_stored(lowering, frame, bound, checked.tables, *stored)
    for sparse in graph.sparse_initializer:
        _add_sparse(lowering, frame, sparse, folder)
    _refuse_outputs(graph)
    try:
        lowering.run(checked.nodes, frame)
        lowering.report()
    except CarriesBatch as carrier:
        known = {**(carriers or {}), carrier.name: carrier.axis}
        return start(checked, folder, name, dims=dims, shapes=shapes, carriers=known, **options)
    except PlanError as error:
        if not bound.guided:
            raise
        others = {k: v for k, v in (dims or {}).items() if k != "batch"}
        single: dict[str, Any] = {"batch": 1, "tokens_per_step": None, "devices": 1}
        start(checked, folder, name, dims=others, shapes=shapes, **single)  # the file's own fault?
        raise refused(error) from None
    if bound.exported in (None, bound.lowered) and (false := _otherwise(declared, draft, frame)):
        draft.notes.append(Finding("note", false))
    draft.forget()
    _name_outputs(draft, [o.name for o in graph.output], frame)
    _own_names(draft)
    return draft, bound


def _own_names(draft: Draft) -> None:
    """Initializers that are read under one name alone, an Identity's, are called as the file calls
    them: names tell parameters from what an exporter made up. Names that nothing reads, as inside
    a chain of Identities, are no others."""
    readers = users(draft)
    for copy in [copy for copy in draft.copy_of if copy not in readers]:
        del draft.copy_of[copy], draft.refs[copy], draft.types[copy]
    times = Counter(draft.copy_of.values())
    for copy, origin in list(draft.copy_of.items()):
        if times[origin] == 1 and origin not in readers and copy not in draft.outputs:
            replace_tensor(readers[copy], copy, origin)
            del draft.copy_of[copy], draft.refs[copy], draft.types[copy]


def _add_inputs(draft: Draft, frame: Frame, bound: Bound) -> None:
    """The inputs with their static types. Raises PlanError P143 for values without a plan."""
    for input_, type_ in bound.inputs.items():
        if type_[1] not in DTYPE_BYTES:
            raise PlanError(
                "P143", f"input {input_!r} holds {type_[1]} values, which cannot be planned"
            )
        draft.types[input_] = type_
        frame.env[input_] = input_
        if 0 in type_[0]:  # a cache before the first token
            draft.leaf(input_, np.zeros(type_[0], numpy_dtype(type_[1])))
        else:
            draft.inputs.append(input_)


def _refuse_outputs(graph: Any) -> None:
    """Raises PlanError P143 where an output is no tensor."""
    for output in graph.output:
        if output.type.WhichOneof("value") not in ("tensor_type", None):
            raise PlanError(
                "P143",
                f"output {output.name!r} has {input_type(output)[0]} type; only tensors can be"
                " planned",
            )


def _declared(graph: Any, bound: Bound) -> dict[str, Type]:
    """Shapes the file declares for inner tensors, where the bound dims make them static (custom
    operators need them)."""
    declared: dict[str, Type] = {}
    for value in [*graph.value_info, *graph.output]:
        kind, dtype = input_type(value)
        if (
            kind != "tensor"
            or dtype not in DTYPE_BYTES
            or not value.type.tensor_type.HasField("shape")
        ):
            continue
        dims: list[int] = []
        for dim in value.type.tensor_type.shape.dim:
            n = (
                dim.dim_value
                if dim.WhichOneof("value") == "dim_value"
                else bound.symbols.get(dim.dim_param, -1)
            )
            dims.append(n)
        if min(dims, default=0) >= 0:
            declared[value.name] = (tuple(dims), dtype)
    return declared


def _otherwise(declared: Mapping[str, Type], draft: Draft, frame: Frame) -> str:
    """Tensors whose declared shape is not what their operators make of the inputs, in words; ""
    where all agree. Constants are what they are (onnxruntime-genai declares those of one number
    without dims)."""
    types = {
        name: draft.types[tensor]
        for name in declared
        if (tensor := frame.env.get(name)) in draft.types
    }
    false = [
        f"{name!r} is declared {list(declared[name][0])} and made {list(type_[0])}"
        for name, type_ in types.items()
        if type_[0] != declared[name][0] and not draft.is_leaf(frame.env[name] or "")
    ]
    and_more = f", and {len(false) - SHOWN} more" if len(false) > SHOWN else ""
    return (
        f"the file contradicts itself: {'; '.join(false[:SHOWN])}{and_more}; planned as made"
        if false
        else ""
    )


def _add_stored(
    lowering: Lowering,
    frame: Frame,
    bound: Bound,
    tables: Tables,
    name: str,
    type_: Type,
    ref: WeightRef,
) -> None:
    """An initializer; one that the exporter made of a parameter's rows is that parameter, copies
    for the samples of a batch are one again, and the exponential of a number that is trained is
    taken anew."""
    draft, (shape, dtype) = lowering.draft, type_
    if dtype in FLOATS and _add_exponential(lowering, frame, name, type_, ref):
        return
    origin = draft.records.view_of(name)
    if not origin or ref.kind == "absent" or dtype not in FLOATS:
        lowering.add_leaf(frame, name, type_, ref)
        return
    leaf = draft.fresh(origin)
    if len(shape) > 2 and shape[0] == bound.exported != 1:
        outside = ref.kind == "external"
        array = tables.numbers(name, type_, ref) if outside else proto_array(ref.proto)
        if array is None:  # nobody knows whether these are copies
            lowering.add_leaf(frame, name, type_, ref)
            return
        if bool((array == array[:1]).all()):
            flat = (("reshape", shape),) if outside else ()
            steps = (*ref.transform, *flat, ("slice", (0, 0, 1, 1)))
            lowering.add_ref(leaf, (1, *shape[1:]), dtype, replace(ref, transform=steps))
            frame.env[name] = draft.add("Expand", [leaf], out=name, shape=shape)
            return
    lowering.add_ref(leaf, shape, dtype, ref)
    frame.env[name] = leaf


def _add_exponential(
    lowering: Lowering, frame: Frame, name: str, type_: Type, ref: WeightRef
) -> bool:
    """Adds the exponential of a number that is trained (CLIP's temperature), of which the file has
    the exponential alone. Whether it is one."""
    draft = lowering.draft
    origin = draft.records.logarithm_of(name)
    if not origin or ref.kind != "inline" or math.prod(type_[0]) != 1:
        return False
    value = proto_array(ref.proto)
    if not (value > 0).all():
        return False
    leaf = draft.fresh(origin)
    logarithm = np.asarray(np.log(value), value.dtype)
    lowering.add_ref(leaf, *type_, WeightRef("inline", proto=logarithm))
    frame.env[name] = draft.add("Exp", [leaf], out=name)
    del draft.records.folded[name]
    return True


def _add_sparse(lowering: Lowering, frame: Frame, sparse: Any, folder: Path | None) -> None:
    """A small sparse initializer becomes dense; a large one is refused before anything is
    allocated."""
    name, shape = sparse.values.name, tuple(sparse.dims)
    elements = 1
    for n in shape:
        elements *= max(n, 0)
    if min(shape, default=0) < 0 or elements > FOLD_ELEMENTS:
        raise PlanError(
            "P136",
            f"sparse initializer {name!r} of shape {list(shape)} stands for {elements} elements,"
            " too many to make dense",
            help=["store it as a dense initializer"],
        )
    (count, dtype), values = check_tensor(sparse.values, name, folder)
    (where, _), indices = check_tensor(sparse.indices, f"{name} (indices)", folder)
    if values.kind != "inline" or indices.kind != "inline" or dtype not in DTYPE_BYTES or not shape:
        raise PlanError("P136", f"sparse initializer {name!r} has no values inside the file")
    dense = np.zeros(elements, proto_array(values.proto).dtype)
    index = proto_array(indices.proto).astype(np.int64)
    try:
        flat = np.ravel_multi_index(tuple(index.T), shape) if index.ndim == 2 else index
        dense[flat] = proto_array(values.proto)
    except (ValueError, IndexError) as error:
        raise PlanError(
            "P136",
            f"sparse initializer {name!r} has bad indices",
            detail=[str(error)[:200], f"{count} values, {where} indices"],
        ) from None
    leaf = lowering.draft.fresh(name)
    lowering.add_ref(leaf, shape, dtype, WeightRef("inline", proto=dense.reshape(shape)))
    frame.env[name] = leaf


def _name_outputs(draft: Draft, names: list[str], frame: Frame) -> None:
    """Gives the graph's outputs their names back where aliases or functions hid them."""
    tensors = [frame.find(name) for name in names]
    renamed: dict[str, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor:  # nothing is known of it, or a function hands on an operand it was not given
            raise PlanError("P130", f"output {name!r} of the graph cannot be planned")
        tensor = renamed.get(tensor, tensor)
        if (
            tensor != name
            and name not in draft.types
            and tensor in draft.maker
            and tensor not in draft.outputs
            and tensor not in names
        ):
            rename(draft, tensor, name)
            renamed[tensor] = tensor = name
        elif (
            tensor != name or tensor in draft.inputs
        ):  # an input, a constant, or a tensor that is already an output
            tensor = draft.add("Identity", [tensor], out=name)
            if tensor in draft.maker and not draft.maker[tensor].id:
                draft.maker[tensor].id = f"{tensor}/identity"
        draft.outputs.append(tensor)


def rename(draft: Draft, old: str, new: str) -> None:
    """Renames a tensor that an operation makes."""
    op = draft.maker.pop(old)
    draft.maker[new] = op
    draft.types[new] = draft.types.pop(old)
    op.outputs[op.outputs.index(old)] = new
    for user in draft.ops:
        if old in user.inputs:
            user.inputs[:] = [new if i == old else i for i in user.inputs]
