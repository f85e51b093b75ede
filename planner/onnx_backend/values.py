"""Values at run time, in ONNX's own terms: their element types and shapes, and sparse tensors as
dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.onnx_backend.table import Value


def type_of(value: Value) -> Any:
    """The TypeProto of a value: of a tensor, or of a sequence by its first element."""
    from onnx import helper

    if isinstance(value, list):
        return helper.make_sequence_type_proto(
            type_of(value[0]) if value else helper.make_tensor_type_proto(1, None)
        )
    return helper.make_tensor_type_proto(element_code(value), value.shape)


def value_info(name: str, value: np.ndarray) -> Any:
    """ValueInfoProto of an array."""
    from onnx import helper

    return helper.make_tensor_value_info(name, element_code(value), value.shape)


def element_code(value: np.ndarray) -> int:
    """ONNX element type of an array; object and text arrays are strings."""
    from onnx import TensorProto, helper

    return (
        int(TensorProto.STRING)
        if value.dtype.kind in "OUS"
        else int(helper.np_dtype_to_tensor_dtype(value.dtype))
    )


def dense(sparse: Any) -> np.ndarray:
    """A SparseTensorProto as a dense array."""
    from onnx import numpy_helper

    values, indices, shape = (
        numpy_helper.to_array(sparse.values),
        numpy_helper.to_array(sparse.indices),
        tuple(sparse.dims),
    )
    array = np.zeros(shape, values.dtype)
    where = tuple(indices.T) if indices.ndim == 2 else np.unravel_index(indices, shape)
    array[where] = values
    return array
