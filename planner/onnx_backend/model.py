"""A model made static for one call: input shapes are those of the values, and operands that shapes
depend on are constants.

ONNX lets shapes, axes and paddings be run-time inputs. A Graph is static, so such a call is read
with them built in: first no input is, then small integers (the first input last), then all vectors
and scalars. Whatever can be run without a value is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import PlanError
from planner.graph.value_digest import value_bytes
from planner.onnx_backend.program import compiled, fits
from planner.reader import read_model

Built = Callable[[int, np.ndarray], bool]
LEVELS: tuple[Built, ...] = (
    lambda k, a: False,
    lambda k, a: k > 0 and a.ndim <= 1 and a.dtype.kind in "iub",
    lambda k, a: k > 0 and a.ndim <= 1,
    lambda k, a: a.ndim <= 1 and a.dtype.kind in "iub",
    lambda k, a: a.ndim <= 1,
)
SMALL = 4096
"""Most elements of an operand that is built in."""


def static(model: Any, values: Mapping[str, np.ndarray], built: Sequence[str]) -> Any:
    """A copy of the model with the inputs' shapes, and the `built` ones as initializers."""
    from onnx import ModelProto, numpy_helper

    copy = ModelProto()
    copy.CopyFrom(model)
    inputs = list(copy.graph.input)
    del copy.graph.input[:]
    old = [t for t in copy.graph.initializer if t.name not in values]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(old)
    kept = {t.name for t in old}
    for info in inputs:
        if info.name in kept:
            continue
        if info.name in built:
            copy.graph.initializer.append(numpy_helper.from_array(values[info.name], info.name))
            continue
        new = copy.graph.input.add()
        new.CopyFrom(info)
        shape = new.type.tensor_type.shape
        del shape.dim[:]
        shape.SetInParent()
        for n in values[info.name].shape:
            shape.dim.add().dim_value = n
    return copy


class Static:
    """A model run as graphs, one per combination of shapes, types and built-in values."""

    def __init__(self, model: Any, folder: str | None = None) -> None:
        self.model, self.folder = model, folder
        self.programs: dict[Any, Callable[[Mapping[str, Any]], list[np.ndarray]] | PlanError] = {}
        self.level = 0

    def __call__(self, values: Mapping[str, Any]) -> list[np.ndarray]:
        """Outputs in the model's order. Raises PlanError when no graph holds the model at these
        values."""
        if not fits(list(values.values())):
            raise PlanError("P170", "a value is no tensor, or of a type that cannot be planned")
        last: PlanError | None = None
        tried: set[tuple[str, ...]] = set()
        for level in range(self.level, len(LEVELS)):
            built = tuple(
                n
                for k, (n, a) in enumerate(values.items())
                if a.size <= SMALL and LEVELS[level](k, a)
            )
            if built in tried:
                continue
            tried.add(built)
            key = (
                tuple((n, a.shape, a.dtype.name) for n, a in values.items()),
                tuple((n, value_bytes(values[n])) for n in built),
            )
            if key not in self.programs:
                self.programs[key] = self._program(values, built)
            program = self.programs[key]
            if not isinstance(program, PlanError):
                self.level = level
                return program({n: a for n, a in values.items() if n not in built})
            last = program
        assert last is not None
        raise last

    def _program(
        self, values: Mapping[str, np.ndarray], built: Sequence[str]
    ) -> Callable[[Mapping[str, Any]], list[np.ndarray]] | PlanError:
        try:
            return compiled(read_model(static(self.model, values, built), self.folder), self.folder)
        except PlanError as error:
            return error
