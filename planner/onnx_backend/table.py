"""Handlers of operators that a Graph does not hold, by domain, name and the opset they appeared in.

A handler sees one node with its values and returns its outputs: numpy arrays, lists (sequences), or
None (an empty optional). The one with the greatest `since` not above the model's opset serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from planner.onnx_backend.machine import Machine, Scope

Value = Any
FAMILIES = (
    "control",
    "sequence",
    "make",
    "select",
    "shape",
    "quant",
    "empty",
    "text",
    "vision",
    "resize",
    "ml",
    "training",
    "random",
)


class Refused(Exception):
    """This node cannot be run; the text says why."""


@dataclass(frozen=True)
class Call:
    """One node at run time: its values (None where an optional input is absent), attributes, and
    where its subgraphs look names up."""

    node: Any
    inputs: tuple[Value, ...]
    attrs: Mapping[str, Any]
    opset: int
    machine: Machine
    scope: Scope

    def get(self, slot: int) -> Value:
        """Input `slot`, None when absent."""
        return self.inputs[slot] if slot < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """Attribute value or the default."""
        return self.attrs.get(name, default)

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """A non-negative axis attribute. Raises Refused."""
        found = int(self.attr(name, default))
        if not -rank <= found < max(rank, 1):
            raise Refused(f"axis {found} of a tensor with {rank} dims")
        return found % rank if rank else 0

    def wants(self, k: int) -> bool:
        """Whether output k has a name."""
        return k < len(self.node.output) and bool(self.node.output[k])


Handler = Callable[[Call], Value]
_HANDLERS: dict[tuple[str, str], list[tuple[int, Handler]]] = {}


def handles(*ops: str, since: int = 1, domain: str = "") -> Callable[[Handler], Handler]:
    """Registers a handler for operators of a domain from an opset on."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            found = _HANDLERS.setdefault((domain, op), [])
            found.append((since, handler))
            found.sort(key=lambda pair: pair[0])
        return handler

    return register


def handler_of(domain: str, op: str, opset: int) -> Handler | None:
    """The handler that serves an operator at an opset, or None."""
    for family in FAMILIES:
        import_module(f"planner.onnx_backend.{family}")
    serving = [h for since, h in _HANDLERS.get((domain, op), []) if since <= opset]
    return serving[-1] if serving else None


def handled() -> tuple[tuple[str, str], ...]:
    """(domain, operator) of everything in the table, sorted."""
    for family in FAMILIES:
        import_module(f"planner.onnx_backend.{family}")
    return tuple(sorted(_HANDLERS))


def as_array(value: Value) -> np.ndarray:
    """A tensor value. Raises Refused for sequences and empty optionals."""
    if not isinstance(value, np.ndarray):
        raise Refused(
            f"a tensor is needed, not {'an empty optional' if value is None else 'a sequence'}"
        )
    return value
