"""The graph at a size (a batch, a number of tokens) derived from readings at two others.

A search asks for the same model at many sizes, and reading is most of what it does per size. Two
readings, at sizes a and b, may be equal but for integers (extents of tensors, integer attributes,
entries of integer constants) that grow with the size:

    value(c) = value(a) + (value(b) - value(a)) * (c - a) / (b - a)

With the batch they have to grow in proportion (value(a) / a = value(b) / b), with tokens there may
be one more than these, say. Where anything else differs (a node, a name, a constant of another
shape), nothing is derived. What two readings cannot show is that a third is like them: the graph of
the plan that is chosen is read too, and held against the derived one (`same`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.graph.ir import Graph, Node, Tensor, WeightRef


class _Differs(Exception):
    """The readings are not alike."""


@dataclass(frozen=True)
class Scaled:
    """A reading at size sizes[0], and per part of it (a tensor, a node, a constant, what is done to
    a weight when it is loaded) by how much its integers are greater at sizes[1]."""

    graph: Graph
    sizes: tuple[int, int]
    shapes: Mapping[str, tuple[int, ...]]
    attrs: Mapping[int, Mapping[str, Any]]
    constants: Mapping[str, np.ndarray]
    weights: Mapping[str, tuple[tuple[int, ...], ...]]
    dims: Mapping[str, int]

    @classmethod
    def of(cls, a: Graph, b: Graph) -> Scaled | None:
        """What two readings have in common; None where they differ in more than their batch."""
        pair = a.dims.get("batch", 0), b.dims.get("batch", 0)
        return cls._of(a, b, pair, _Growth(*pair)) if all(pair) else None

    @classmethod
    def along(cls, a: Graph, b: Graph, sizes: tuple[int, int]) -> Scaled | None:
        """What two readings of one batch have in common that differ in so many tokens; None where
        they differ in more."""
        return cls._of(a, b, sizes, _Growth())

    @classmethod
    def _of(cls, a: Graph, b: Graph, sizes: tuple[int, int], growth: _Growth) -> Scaled | None:
        if sizes[0] == sizes[1]:
            return None
        try:
            return cls(a, sizes, *_common(a, b, growth))
        except _Differs:
            return None

    def at(self, size: int) -> Graph | None:
        """The graph at a size; None where some integer of it would not be whole."""
        graph, tensors, nodes, constants, weights = (
            self.graph,
            dict(self.graph.tensors),
            list(self.graph.nodes),
            dict(self.graph.constants),
            dict(self.graph.weights),
        )

        away, apart = size - self.sizes[0], self.sizes[1] - self.sizes[0]

        def times(value: int, growth: int) -> int:
            added, rest = divmod(growth * away, apart) if growth else (0, 0)
            if rest:
                raise _Differs
            return int(value) + added if growth else value

        try:
            shapes: dict[tuple, tuple[int, ...]] = {}  # layers have tensors of few shapes
            for name, growths in self.shapes.items():
                t = tensors[name]
                if (t.shape, growths) not in shapes:
                    shapes[t.shape, growths] = tuple(map(times, t.shape, growths))
                tensors[name] = Tensor(name, shapes[t.shape, growths], t.dtype, t.role)
            for i, changed in self.attrs.items():
                values = {k: nodes[i].attrs[k] for k in changed}
                scaled = {
                    k: tuple(map(times, v, changed[k]))  # type: ignore[arg-type]
                    if isinstance(v, tuple)
                    else times(v, changed[k])  # type: ignore[arg-type]
                    for k, v in values.items()
                }
                nodes[i] = replace(nodes[i], attrs={**nodes[i].attrs, **scaled})
            for name, more_at in self.constants.items():
                if (more_at * away % apart).any():
                    raise _Differs
                value = constants[name].astype(np.int64) + more_at * away // apart
                constants[name] = value.astype(constants[name].dtype)
            for name, rows in self.weights.items():
                steps = tuple(
                    (kind, tuple(map(times, args, growths)))
                    for (kind, args), growths in zip(weights[name].transform, rows, strict=True)
                )
                if any(kind == "rebatch" and args[2] == args[4] for kind, args in steps):
                    raise _Differs  # at the batch of the file nothing is lengthened
                weights[name] = replace(weights[name], transform=steps)
            dims = {k: times(v, self.dims[k]) for k, v in graph.dims.items()}
        except _Differs:
            return None
        return replace(
            graph,
            tensors=tensors,
            nodes=tuple(nodes),
            constants=constants,
            weights=weights,
            dims=dims,
        )

    def on(self, graph: Graph) -> Scaled | None:
        """What is in proportion to the batch of a graph whose readings differ from these in their
        tokens (`along`): what is in that of these. None where it is not whole."""
        a, b = self.sizes

        def more(value: int, grown: int) -> int:
            growth, rest = divmod(int(value) * (b - a), a) if grown else (0, 0)
            if rest:
                raise _Differs
            return growth

        def entries(values: np.ndarray, grown: np.ndarray) -> np.ndarray:
            growth, rest = np.divmod(values.astype(np.int64) * (b - a), a)
            if rest[grown != 0].any():
                raise _Differs
            return np.where(grown != 0, growth, 0)

        def each(values: Any, grown: Any) -> Any:
            return (
                tuple(map(more, values, grown))
                if isinstance(values, tuple)
                else more(values, grown)
            )

        try:
            return Scaled(
                graph,
                self.sizes,
                {n: each(graph.tensors[n].shape, grown) for n, grown in self.shapes.items()},
                {
                    i: {k: each(graph.nodes[i].attrs[k], grown) for k, grown in attrs.items()}
                    for i, attrs in self.attrs.items()
                },
                {n: entries(graph.constants[n], grown) for n, grown in self.constants.items()},
                {
                    n: tuple(
                        each(arguments, grown)
                        for (_, arguments), grown in zip(
                            graph.weights[n].transform, rows, strict=True
                        )
                    )
                    for n, rows in self.weights.items()
                },
                {k: more(graph.dims[k], grown) for k, grown in self.dims.items()},
            )
        except _Differs:
            return None


@dataclass(frozen=True)
class _Growth:
    """How integers of two readings compare, at sizes that they are in proportion to; None where
    they need not be."""

    a: int | None = None
    b: int | None = None

    def one(self, x: int, y: int) -> int:
        """By how much a number is greater in the second reading."""
        if x != y and self.a is not None and self.b is not None and x * self.b != y * self.a:
            raise _Differs
        return int(y) - int(x)

    def row(self, x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
        """By how much each number of a row is greater in the second reading."""
        if len(x) != len(y):
            raise _Differs
        return tuple(map(self.one, x, y))

    def array(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """By how much each entry of a constant is greater in the second reading."""
        if x is y:
            return np.zeros(x.shape, np.int64)
        if x.dtype != y.dtype or x.shape != y.shape:
            raise _Differs
        grows = x != y
        if not grows.any():
            return np.zeros(x.shape, np.int64)
        if x.dtype.kind not in "iu":
            raise _Differs
        growth = y.astype(np.int64) - x.astype(np.int64)
        if self.a is not None and self.b is not None:
            before, after = (value[grows].astype(object) for value in (x, y))
            if (before * self.b != after * self.a).any():
                raise _Differs
        return np.asarray(growth)


def _common(a: Graph, b: Graph, growth: _Growth) -> tuple[dict, dict, dict, dict, dict]:
    """The fields of Scaled that say how much grows. Raises _Differs."""
    fixed = (
        a.name == b.name
        and a.inputs == b.inputs
        and a.outputs == b.outputs
        and a.labels == b.labels
        and a.trainable == b.trainable
    )
    tables = (
        (a.tensors, b.tensors),
        (a.constants, b.constants),
        (a.weights, b.weights),
        (a.dims, b.dims),
    )
    if not fixed or len(a.nodes) != len(b.nodes) or any(list(x) != list(y) for x, y in tables):
        raise _Differs
    shapes, attrs, constants = {}, {}, {}
    for name, t in a.tensors.items():
        u = b.tensors[name]
        if t.dtype != u.dtype or t.role != u.role:
            raise _Differs
        if t.shape != u.shape:
            shapes[name] = growth.row(t.shape, u.shape)
    for i, (n, m) in enumerate(zip(a.nodes, b.nodes, strict=True)):
        if (
            (n.id, n.op, n.inputs, n.outputs, n.scope, n.members)
            != (m.id, m.op, m.inputs, m.outputs, m.scope, m.members)
            or n.bodies
            or m.bodies
        ):
            raise _Differs
        if n.attrs != m.attrs:
            attrs[i] = _attrs(n, m, growth)
    for name, value in a.constants.items():
        grows = growth.array(value, b.constants[name])
        if grows.any():
            constants[name] = grows
    weights = {
        name: _steps(w, b.weights[name], growth)
        for name, w in a.weights.items()
        if not _same_weight(w, b.weights[name])
    }
    return (
        shapes,
        attrs,
        constants,
        weights,
        {k: growth.one(v, b.dims[k]) for k, v in a.dims.items()},
    )


def _steps(w: WeightRef, u: WeightRef, growth: _Growth) -> tuple[tuple[int, ...], ...]:
    """How much grows of each step that loading a weight takes. Raises _Differs where the weights
    differ in more."""
    if [kind for kind, _ in w.transform] != [kind for kind, _ in u.transform] or not _same_weight(
        w, replace(u, transform=w.transform)
    ):
        raise _Differs
    return tuple(growth.row(x, y) for (_, x), (_, y) in zip(w.transform, u.transform, strict=True))


def _attrs(n: Node, m: Node, growth: _Growth) -> dict[str, Any]:
    """Attributes that differ -> how much of each grows."""
    if list(n.attrs) != list(m.attrs):
        raise _Differs
    growths: dict[str, Any] = {}
    for key, value in n.attrs.items():
        other = m.attrs[key]
        if value == other:
            continue
        if isinstance(value, int) and isinstance(other, int):
            growths[key] = growth.one(value, other)
        elif (
            isinstance(value, tuple)
            and isinstance(other, tuple)
            and all(isinstance(v, int) for v in (*value, *other))
        ):
            growths[key] = growth.row(value, other)  # type: ignore[arg-type]
        else:
            raise _Differs
    return growths


def _same_weight(a: WeightRef, b: WeightRef) -> bool:
    if (a.kind, a.location, a.offset, a.length, a.transform) != (
        b.kind,
        b.location,
        b.offset,
        b.length,
        b.transform,
    ):
        return False
    if len(a.parts) != len(b.parts) or not all(map(_same_weight, a.parts, b.parts)):
        return False
    if a.proto is b.proto:
        return True
    if isinstance(a.proto, np.ndarray) or isinstance(b.proto, np.ndarray):
        alike = type(a.proto) is type(b.proto) and (a.proto.dtype, a.proto.shape) == (
            b.proto.dtype,
            b.proto.shape,
        )
        return alike and np.array_equal(_stored(a.proto), _stored(b.proto))
    return bool(a.proto == b.proto)


def _stored(array: np.ndarray) -> np.ndarray:
    """What is in memory of an array that may repeat one value along dims: comparing all of it could
    take more than there is."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def same(derived: Graph, read: Graph) -> bool:
    """Whether a derived graph is the one that was read, notes for the user aside."""
    try:
        *parts, dims = _common(derived, read, _Growth(1, 1))
    except _Differs:
        return False
    return not (any(parts) or any(dims.values()))
