"""Digests of arrays that are equal for equal values, of every dtype that ONNX has."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def value_bytes(value: np.ndarray) -> bytes:
    """An array's values as bytes that are equal for equal values, of every dtype that ONNX has.

    ml_dtypes (bfloat16, float8, int4, float4) have no buffer of their own, and strings are objects
    whose buffer holds addresses.
    """
    if value.dtype.hasobject:
        return repr(value.tolist()).encode()
    return value.tobytes()


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
