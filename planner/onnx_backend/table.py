"""The table of handlers of operators that a Graph does not hold, by domain, name and the opset they
appeared in; `handlers` fills it.

A handler sees one node with its values and returns its outputs: numpy arrays, lists (sequences), or
None (an empty optional). The one with the greatest `since` not above the model's opset serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Value = Any


class Refused(Exception):
    """This node cannot be run; the text says why."""


@dataclass
class Scope:
    """Names of one list of nodes; `parent` sees what is around a subgraph. `attrs`: attributes of
    the function that is being run."""

    values: dict[str, Value] = field(default_factory=dict)
    parent: Scope | None = None
    opsets: Mapping[str, int] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    depth: int = 0

    def find(self, name: str) -> Value:
        """The value of a name. Raises Refused."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        raise Refused(f"tensor {name!r} is used but nothing makes it")

    def inner(self, values: dict[str, Value]) -> Scope:
        """The scope of a subgraph."""
        return Scope(values, self, self.opsets, self.attrs, self.depth + 1)


class Runner(Protocol):
    """What a handler may ask of the machine that runs its node."""

    model: Any

    def subgraph(self, call: Call, graph: Any, inputs: Sequence[Value]) -> list[Value]:
        """Outputs of a node's subgraph on given inputs."""


@dataclass(frozen=True)
class Call:
    """One node at run time: its values (None where an optional input is absent), attributes, and
    where its subgraphs look names up."""

    node: Any
    inputs: tuple[Value, ...]
    attrs: Mapping[str, Any]
    opset: int
    machine: Runner
    scope: Scope

    def get(self, slot: int) -> Value:
        """Input `slot`, None when absent."""
        return self.inputs[slot] if slot < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """Attribute value or the default."""
        return self.attrs.get(name, default)

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """A non-negative axis attribute. Raises Refused."""
        axis = int(self.attr(name, default))
        if not -rank <= axis < max(rank, 1):
            raise Refused(f"axis {axis} of a tensor with {rank} dims")
        return axis % rank if rank else 0

    def wants(self, k: int) -> bool:
        """Whether output k has a name."""
        return k < len(self.node.output) and bool(self.node.output[k])


Handler = Callable[[Call], Value]
HANDLERS: dict[tuple[str, str], list[tuple[int, Handler]]] = {}
"""Domain and operator -> (opset from which it serves, handler), ascending; `handlers` fills it."""


def handles(*ops: str, since: int = 1, domain: str = "") -> Callable[[Handler], Handler]:
    """Registers a handler for operators of a domain from an opset on."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            versions = HANDLERS.setdefault((domain, op), [])
            versions.append((since, handler))
            versions.sort(key=lambda pair: pair[0])
        return handler

    return register


def as_array(value: Value) -> np.ndarray:
    """A tensor value. Raises Refused for sequences and empty optionals."""
    if not isinstance(value, np.ndarray):
        raise Refused(
            f"a tensor is needed, not {'an empty optional' if value is None else 'a sequence'}"
        )
    return value
