"""Checks of stored tensors before anything is allocated: type, dims, inline sizes, and where
external bytes claim to be."""

from __future__ import annotations

import math
import os
import stat
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from planner.errors import PlanError
from planner.graph.ir import DTYPE_BYTES, WeightRef
from planner.reader.draft.draft import MOST_ELEMENTS
from planner.reader.draft.shapes import Type

_SPECIAL = {
    "float": "float32",
    "double": "float64",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
}
_FIELD = {
    "float32": ("float_data", 1),
    "float64": ("double_data", 1),
    "int64": ("int64_data", 1),
    "uint64": ("uint64_data", 1),
    "uint32": ("uint64_data", 1),
    "complex64": ("float_data", 2),
    "complex128": ("double_data", 2),
}


@lru_cache(maxsize=64)
def dtype_name(elem_type: int) -> str:
    """Our name of an ONNX element type, or its ONNX name (lower case) when it cannot be planned."""
    from onnx import TensorProto

    try:
        name = TensorProto.DataType.Name(elem_type).lower()
    except ValueError:
        return f"unknown type {elem_type}"
    return _SPECIAL.get(name, name)


def check_tensor(tensor: Any, name: str, folder: Path | None) -> tuple[Type, WeightRef]:
    """((shape, dtype), reference) of a TensorProto, checked. Raises PlanError; external files are
    never opened."""
    dtype = dtype_name(tensor.data_type)
    shape = tuple(tensor.dims)
    if any(d < 0 for d in shape):
        raise PlanError("P132", f"tensor {name!r} has a negative dim: {list(shape)}")
    elements = math.prod(shape)
    if elements > MOST_ELEMENTS:
        raise PlanError(
            "P133",
            f"tensor {name!r} of shape {list(shape)} has {elements} elements, which does not fit in"
            " any device memory",
        )
    if dtype not in DTYPE_BYTES:
        return (shape, dtype), WeightRef("absent")
    size = math.ceil(elements * DTYPE_BYTES[dtype])
    if tensor.data_location == 1:
        return (shape, dtype), _external(tensor, name, folder, size)
    field, per = _FIELD.get(dtype, ("int32_data", 1))
    stored = getattr(tensor, field)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size and not (not tensor.raw_data and size):
            raise PlanError(
                "P131",
                f"tensor {name!r} of shape {list(shape)} needs {size} bytes but holds"
                f" {len(tensor.raw_data)}",
            )
        kind = "inline" if tensor.raw_data or not size else "absent"
    else:
        expected = math.ceil(elements / 2) if dtype in ("int4", "uint4") else elements * per
        if len(stored) not in (expected, 0):
            raise PlanError(
                "P131",
                f"tensor {name!r} of shape {list(shape)} needs {expected} values but holds"
                f" {len(stored)}",
            )
        kind = "inline" if len(stored) == expected else "absent"
    return (shape, dtype), (
        WeightRef("inline", proto=tensor) if kind == "inline" else WeightRef("absent")
    )


def _external(tensor: Any, name: str, folder: Path | None, size: int) -> WeightRef:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if not location:
        return WeightRef("absent")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        raise PlanError(
            "P134",
            f"tensor {name!r} has an external offset or length that is no number",
            detail=[repr(entries)[:200]],
        ) from None
    if offset < 0 or length != size:
        raise PlanError(
            "P134",
            f"tensor {name!r}: external data of {length} bytes at offset {offset} does not match"
            f" its {size} bytes",
            detail=[f"location {location!r}"],
        )
    path = external_path(location, folder, name)
    if path is not None:
        available = os.stat(path).st_size
        if offset + length > available:
            raise PlanError(
                "P134",
                f"tensor {name!r} ends at byte {offset + length} of {location!r}, which has"
                f" {available}",
            )
    return WeightRef("external", location=location, offset=offset, length=length)


def external_path(location: str, folder: Path | None, name: str) -> Path | None:
    """The regular file inside `folder` that an external location names; None when it is absent.
    Raises PlanError on escapes."""
    pure, mode = PurePosixPath(location), 0
    windows = PureWindowsPath(location)
    if (
        pure.is_absolute()
        or windows.is_absolute()
        or windows.drive
        or ".." in pure.parts
        or ".." in windows.parts
        or "\0" in location
    ):
        raise PlanError(
            "P135",
            f"tensor {name!r} refers to external data outside the model's folder: {location!r}",
        )
    if folder is None:
        return None
    path = str(folder)
    for part in pure.parts:
        path = os.path.join(path, part)
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise PlanError(
                "P135",
                f"tensor {name!r}: external data {location!r} cannot be looked up",
                detail=[str(error)],
            ) from error
        if stat.S_ISLNK(mode):
            raise PlanError(
                "P135",
                f"tensor {name!r} refers to external data through a symbolic link: {location!r}",
            )
    if not stat.S_ISREG(mode):
        raise PlanError(
            "P135",
            f"tensor {name!r}: external data {location!r} is not a regular file inside the model's"
            " folder",
        )
    return Path(path)


def input_type(value_info: Any) -> tuple[str, str]:
    """(kind, dtype name) of a ValueInfoProto; kind is 'tensor' or what else it is."""
    kind = value_info.type.WhichOneof("value") or "untyped"
    if kind != "tensor_type":
        return kind.removesuffix("_type").capitalize(), ""
    return "tensor", dtype_name(value_info.type.tensor_type.elem_type)
