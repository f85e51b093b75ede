"""Weight bytes, when something other than planning needs them.

`load` resolves every `WeightRef` of a Graph: bytes inside the model, bytes in an external file
(looked up and checked again: the file may have changed since planning, and a location must never
lead outside the model's folder), or nothing at all. Absent weights are seeded: normal with standard
deviation 0.02; norm scales and variances 1 plus small noise. Each value depends on the seed and the
label alone, so that one weight can be made without the others.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import DTYPE_BYTES, Graph, WeightRef
from planner.ops.lookup import starts_at_one
from planner.reader.draft.draft import proto_array
from planner.reader.draft.fold import numpy_dtype
from planner.reader.draft.weight_transforms import transformed
from planner.reader.onnx.tensors import external_path

STANDARD_DEVIATION = 0.02


def load(
    graph: Graph,
    folder: str | os.PathLike[str] | None,
    seed: int = 0,
    *,
    seed_missing: bool = False,
) -> dict[str, np.ndarray]:
    """label -> array of every weight, in the graph's order, shaped and typed as the graph says.

    External files are mapped read-only, not copied. A missing one is an error, or with
    `seed_missing` its weights are seeded (`missing` lists them). Raises PlanError naming tensor and
    file when one is missing, too short, or outside `folder`.
    """
    return {
        graph.labels[name]: load_one(graph, name, folder, seed, seed_missing=seed_missing)
        for name in graph.weights
    }


def load_one(
    graph: Graph,
    name: str,
    folder: str | os.PathLike[str] | None,
    seed: int = 0,
    *,
    seed_missing: bool = False,
) -> np.ndarray:
    """The array of one weight, by tensor name. See `load`."""
    ref, tensor = graph.weights[name], graph.tensors[name]
    where = None if folder is None else Path(folder)
    if _unstored(ref, where, name, seed_missing):
        return _seeded(graph, name, seed)
    return _stored(ref, name, tensor.dtype, where).reshape(tensor.shape)


def _unstored(ref: WeightRef, where: Path | None, name: str, seed_missing: bool) -> bool:
    """Whether a weight has no bytes, or (`seed_missing`) none that are there; one whose parts lack
    any has none."""
    if ref.kind == "external":
        return seed_missing and external_path(ref.location, where, name) is None
    return ref.kind == "absent" or any(
        _unstored(part, where, name, seed_missing) for part in ref.parts
    )


def _stored(ref: WeightRef, name: str, dtype: str, where: Path | None) -> np.ndarray:
    """The bytes of a weight, rewritten as the reader did."""
    if ref.kind == "joined":
        array = np.stack([_stored(part, name, dtype, where) for part in ref.parts])
    else:
        array = (
            _external(ref, name, dtype, where) if ref.kind == "external" else proto_array(ref.proto)
        )
    return transformed(array, ref.transform, name)


def missing(graph: Graph, folder: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Labels of the weights that have no bytes in the model or in `folder`. Raises PlanError for
    locations outside it."""
    where = None if folder is None else Path(folder)
    return tuple(
        graph.labels[name]
        for name, ref in graph.weights.items()
        if _unstored(ref, where, name, True)
    )


def _external(ref: WeightRef, name: str, dtype: str, folder: Path | None) -> np.ndarray:
    path = external_path(ref.location, folder, name)
    if path is None:
        raise PlanError(
            "P151",
            f"weight {name!r} is stored in {ref.location!r}, which is not beside the model",
            help=["put the file beside the model"],
        )
    size = path.stat().st_size
    if ref.offset < 0 or ref.length < 0 or ref.offset + ref.length > size:
        raise PlanError(
            "P134",
            f"weight {name!r} ends at byte {ref.offset + ref.length} of {ref.location!r}, which has"
            f" {size}",
        )
    raw = (
        np.memmap(path, np.uint8, "r", ref.offset, (ref.length,))
        if ref.length
        else np.zeros(0, np.uint8)
    )
    if DTYPE_BYTES[dtype] < 1:
        halves = np.stack([raw & 15, raw >> 4], -1).reshape(-1)
        signed = (
            np.where(halves > 7, halves.astype(np.int8) - 16, halves) if dtype == "int4" else halves
        )
        return signed.astype(numpy_dtype(dtype))
    return raw.view(numpy_dtype(dtype))


def _seeded(graph: Graph, name: str, seed: int) -> np.ndarray:
    tensor = graph.tensors[name]
    random = np.random.default_rng([seed, zlib.crc32(graph.labels[name].encode())])
    near_one = starts_at_one(graph, name)
    if not tensor.is_float:
        return np.zeros(tensor.shape, numpy_dtype(tensor.dtype))
    array = random.standard_normal(math.prod(tensor.shape), np.float32) * np.float32(
        STANDARD_DEVIATION
    )
    return (
        (array + np.float32(1) if near_one else array)
        .astype(numpy_dtype(tensor.dtype))
        .reshape(tensor.shape)
    )
