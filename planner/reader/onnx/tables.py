"""Tables that exporters write beside the weights: positions, indices, masks, angles.

torch.onnx.export writes every initializer of more than a few numbers into the data file beside the
model, and which keys a query sees or which rows a lookup takes is then in none of the nodes. Such
tables are read where the file is there; what is a parameter, or may be one, stays closed.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import WeightRef
from planner.reader.draft.draft import LOOK_ELEMENTS
from planner.reader.draft.fold import numpy_dtype
from planner.reader.draft.shapes import Type
from planner.reader.onnx.records import PARAMETER, Records
from planner.reader.onnx.tensors import external_path

WHOLE = ("int64", "int32", "bool")
"""Types that parameters do not have, quantised ones neither."""
FLOATING = ("float64", "float32", "float16", "bfloat16")


class Tables:
    """Opens the tables of a model. Each data file is mapped once, so that whatever a model claims
    takes no memory of its own."""

    def __init__(self, folder: Path | None, records: Records) -> None:
        self.folder, self.records = folder, records
        self._files: dict[str, np.ndarray | None] = {}

    def opened(self, name: str, type_: Type, ref: WeightRef) -> WeightRef:
        """The reference with a table's numbers in it where they lie in a file that is there; any
        other as it is. `ref` was checked (planner.reader.onnx.tensors)."""
        elements = math.prod(type_[0])
        if ref.kind != "external" or not 0 < elements <= self._most_elements(name, type_[1]):
            return ref
        numbers = self.numbers(name, type_, ref)
        return ref if numbers is None else WeightRef("inline", proto=numbers)

    def numbers(self, name: str, type_: Type, ref: WeightRef) -> np.ndarray | None:
        """What lies in external data of whole bytes a number; None where the file is not there."""
        file = self._file(ref.location, name)
        if file is None:
            return None
        raw = file[ref.offset : ref.offset + ref.length]
        return raw.view(numpy_dtype(type_[1])).reshape(type_[0])

    def _file(self, location: str, name: str) -> np.ndarray | None:
        if location not in self._files:
            path = external_path(location, self.folder, name)
            self._files[location] = None if path is None else _mapped(path, location, name)
        return self._files[location]

    def _most_elements(self, name: str, dtype: str) -> int:
        """How many numbers of a tensor may be read: of floats, where the exporter's record says
        that they are none of its parameters and made of none."""
        records = self.records
        table = dtype in WHOLE or (
            dtype in FLOATING
            and bool(records.kinds)
            and records.kinds.get(name) != PARAMETER
            and name not in records.computed
        )
        return LOOK_ELEMENTS if table else 0


def _mapped(path: Path, location: str, name: str) -> np.ndarray:
    """The bytes of a data file. Raises PlanError P135 for one that may not be read."""
    try:
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except OSError as error:
        raise PlanError(
            "P135",
            f"tensor {name!r}: external data {location!r} cannot be read",
            detail=[str(error)],
        ) from error
