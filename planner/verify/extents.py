"""Which extents of a graph must change together, and what a smaller choice of them does to the
graph.

Every dim of every tensor belongs to a class of equal extents: dims that a rule reads as the same
factor are one class (union-find over `planner.ops.lookup.rule_of`). What ties different classes is
a constraint, kept under every change:

    Product   a dim that a rule reads as several factors            hidden = heads * head_dim
    Sum       Concat and Split along their axis                     q + k + v
    Window    Slice: bounds that give the wanted extent             2048 of 2049
    Shift     Pad                                                   n + 2

`Extents.divide` divides classes and lets the change run through the constraints; None when it
cannot be done, for example because a class is fixed: the batch, what an attribute counts (groups,
k, kernel windows, hidden_size), everything around an operator without a rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.graph.ir import Graph, Node
from planner.ops import operator_of
from planner.ops.lookup import rule_of
from planner.ops.ties import Indexed, Same, Shift, Sum, Tie, Window

FLOOR = 8
"""No extent becomes smaller than this."""


@dataclass(frozen=True)
class Product:
    """extent(whole) = product of extent(parts)."""

    whole: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Lookup:
    """Stored indices into a dim: their values must stay below its extent. column: of the last dim,
    None: all values."""

    leaf: str
    column: int | None
    table: str
    axis: int


Constraint = Product | Sum[int] | Window[int] | Shift[int]


class Extents:
    """Classes and constraints of one graph. `keep`: every extent stays divisible by what it shares
    with it."""

    def __init__(self, graph: Graph, keep: int = 1) -> None:
        self.graph, self.keep = graph, keep
        self._parent: list[int] = []
        self._element: dict[tuple[str, int], int] = {}
        self.extent: dict[int, int] = {}
        self.fixed: set[int] = set()
        self.constraints: list[Constraint] = []
        self.lookups: list[Lookup] = []
        for name, t in graph.tensors.items():
            for axis, n in enumerate(t.shape):
                self._element[name, axis] = self._new(n)
        for node in graph.nodes:
            self._read(node)
        for name in graph.inputs:
            if graph.tensors[name].shape:
                self._fix((name, 0))
        self._settle_roots()

    def _new(self, extent: int) -> int:
        self._parent.append(len(self._parent))
        self.extent[len(self._parent) - 1] = extent
        return len(self._parent) - 1

    def root(self, element: int) -> int:
        """The class of an element."""
        while self._parent[element] != element:
            self._parent[element] = element = self._parent[self._parent[element]]
        return element

    def of(self, tensor: str, axis: int) -> int:
        """The class of a dim."""
        return self.root(self._element[tensor, axis])

    def _union(self, a: int, b: int) -> None:
        self._parent[self.root(b)] = self.root(a)

    def _fix(self, *dims: tuple[str, int]) -> None:
        self.fixed.update(self._element[d] for d in dims)

    def _fix_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._fix(*((name, axis) for axis in range(len(self.graph.tensors[name].shape))))

    def _read(self, node: Node) -> None:
        graph = self.graph
        rule, reason = rule_of(node, graph)
        live = [o for o in node.outputs if o]
        if reason or node.bodies or len(rule.results) != len(live):
            self._fix_all([n for n in (*node.inputs, *live) if n])
            return
        atoms: dict[str, int] = {}
        for name, dims in zip((*node.inputs, *live), (*rule.operands, *rule.results), strict=True):
            for axis, dim in enumerate(dims if name else ()):
                for f in dim:
                    if f not in atoms:
                        atoms[f] = self._new(rule.sizes[f])
                if len(dim) == 1:
                    self._union(atoms[dim[0]], self._element[name, axis])
                elif dim:
                    self.constraints.append(
                        Product(self._element[name, axis], tuple(atoms[f] for f in dim))
                    )
        operator = operator_of(node.op)
        for f, atom in atoms.items():
            if (
                f == operator.counted
                or f in rule.spatial
                or (f in rule.whole and not operator.extents)
            ):
                self.fixed.add(atom)
        for tie in operator.ties(node, graph) if operator.ties else ():
            self._tie(tie)

    def _tie(self, tie: Tie) -> None:
        """Enter what the operator says beside its rule."""
        element = self._element
        match tie:
            case Sum(whole, parts):
                self.constraints.append(Sum(element[whole], tuple(element[p] for p in parts)))
            case Window(source, result, bounds):
                self.constraints.append(Window(element[source], element[result], bounds))
            case Shift(source, result, by):
                self.constraints.append(Shift(element[source], element[result], by))
            case Same(one, other):
                self._union(element[one], element[other])
            case Indexed(table, axis, indices, columns):
                (self._lookup_columns if columns else self._lookup)(table, axis, indices)

    def _lookup(self, table: str, axis: int, indices: str) -> None:
        """Where looked-up integers come from: inputs follow the table by themselves, stored ones
        are clipped, computed ones fix it."""
        graph, queue, lookups = self.graph, [indices], []
        while queue:
            name = queue.pop()
            producer = graph.producer.get(name)
            if producer is not None:
                maker = graph.nodes[producer]
                if not operator_of(maker.op).passes_values or maker.attrs.get("value"):
                    self._fix((table, axis))
                    return
                queue += [n for n in maker.inputs if n]
            elif name not in graph.inputs:
                lookups.append(Lookup(name, None, table, axis))
        self.lookups += lookups

    def _lookup_columns(self, data: str, first: int, indices: str) -> None:
        """Column c of the stored indices looks up dim `first` + c of the data."""
        graph = self.graph
        producer = graph.producer.get(indices)
        last = len(graph.tensors[indices].shape) - 1
        leaves: tuple[str, ...] = (indices,)
        if producer is not None:
            maker = graph.nodes[producer]
            ties = operator_of(maker.op).ties
            side_by_side = ties is not None and any(
                isinstance(tie, Sum) and tie.whole == (indices, last) for tie in ties(maker, graph)
            )
            leaves = maker.inputs if side_by_side else ()
        depth = graph.tensors[indices].shape[-1]
        if not leaves or any(n in graph.producer or n in graph.inputs for n in leaves):
            self._fix(*((data, first + c) for c in range(depth)))
            return
        columns = itertools.count(first)
        for leaf in leaves:
            self.lookups += [
                Lookup(leaf, c, data, next(columns)) for c in range(graph.tensors[leaf].shape[-1])
            ]

    def _settle_roots(self) -> None:
        """Fixed elements and constraints in terms of classes; extents of 1 broadcast and never
        change."""
        self.fixed = {self.root(e) for e in self.fixed} | {
            self.root(e) for e, n in self.extent.items() if n == 1
        }
        renamed: dict[Constraint, None] = {}
        for c in self.constraints:
            if isinstance(c, Product | Sum):
                renamed[type(c)(self.root(c.whole), tuple(self.root(p) for p in c.parts))] = None
            elif isinstance(c, Window):
                renamed[Window(self.root(c.source), self.root(c.result), c.bounds)] = None
            else:
                renamed[Shift(self.root(c.source), self.root(c.result), c.by)] = None
        self.constraints = list(renamed)

    def classes(self) -> list[int]:
        """Classes that may change, in a fixed order."""
        return sorted({self.root(e) for e in self.extent} - self.fixed)

    def divide(
        self, together: Sequence[int], by: int, now: Mapping[int, int]
    ) -> dict[int, int] | None:
        """Extents after dividing classes by `by` (a divisor of each), or None. now: class ->
        extent; so is what is returned, whole."""
        change: dict[int, int] = {}
        if not all(self._set(change, now, c, now[c] // by) for c in together):
            return None
        done = self._settle(change, now)
        return None if done is None else {**now, **done}

    def _set(self, change: dict[int, int], now: Mapping[int, int], c: int, extent: int) -> bool:
        if extent == change.get(c, now[c]):
            return True
        old = self.extent[c]
        if (
            c in self.fixed
            or c in change
            or extent < min(old, FLOOR)
            or math.gcd(extent, self.keep) != math.gcd(old, self.keep)
        ):
            return False
        change[c] = extent
        return True

    def _settle(self, change: dict[int, int], now: Mapping[int, int]) -> dict[int, int] | None:
        """Repair violated constraints until none is left; where there is a choice of factors, the
        largest first."""
        while True:
            repairs = next(
                (
                    r
                    for r in (self._repairs(c, change, now) for c in self.constraints)
                    if r is not None
                ),
                None,
            )
            if repairs is None:
                return change
            for repair in repairs:
                trial = dict(change)
                if all(self._set(trial, now, c, n) for c, n in repair):
                    settled = self._settle(trial, now)
                    if settled is not None:
                        return settled
            return None

    def _repairs(
        self, c: Constraint, change: Mapping[int, int], now: Mapping[int, int]
    ) -> list[list[tuple[int, int]]] | None:
        """None when the constraint holds; else ways to mend it, each a list of (class, new extent);
        [] when there is none."""
        extent = lambda k: change.get(k, now[k])  # noqa: E731
        if isinstance(c, Product):
            total = math.prod(extent(p) for p in c.parts)
            if total == extent(c.whole):
                return None
            if c.whole not in change:
                return [[(c.whole, total)]]
            by, rest = divmod(total, extent(c.whole))
            free = sorted(
                (p for p in c.parts if p not in change and extent(p) % max(by, 1) == 0),
                key=lambda p: (-extent(p), p),
            )
            return [[(p, extent(p) // by)] for p in free] if not rest else []
        if isinstance(c, Sum):
            total = sum(extent(p) for p in c.parts)
            if total == extent(c.whole):
                return None
            if c.whole not in change:
                return [[(c.whole, total)]]
            scaled = [(p, *divmod(now[p] * extent(c.whole), now[c.whole])) for p in c.parts]
            return [] if any(rest for _, _, rest in scaled) else [[(p, n) for p, n, _ in scaled]]
        if isinstance(c, Shift):
            if extent(c.source) + c.by == extent(c.result):
                return None
            return (
                [[(c.result, extent(c.source) + c.by)]]
                if c.result not in change
                else [[(c.source, extent(c.result) - c.by)]]
            )
        old, new = (
            (self.extent[c.source], self.extent[c.result]),
            (extent(c.source), extent(c.result)),
        )
        if window(c.bounds, old[0], *new) is not None:
            return None
        if c.result not in change:
            n, rest = divmod(old[1] * new[0], old[0])
            return [[(c.result, n if not rest else old[1] - old[0] + new[0])]]
        n, rest = divmod(old[0] * new[1], old[1])
        return [[(c.source, n)]] if not rest else [[(c.source, old[0] - old[1] + new[1])]]


def window(
    bounds: tuple[int, int, int], old: int, extent: int, wanted: int
) -> tuple[int, int] | None:
    """Start and end of a Slice on an axis that went from `old` to `extent`, so that `wanted`
    elements are kept; None when there are none.

    Tried in turn for each bound: the same end of the axis, the same fraction, the same number, the
    same distance from the end.
    """
    start, end, step = bounds

    def places(v: int) -> Iterator[int]:
        if v == old:
            yield extent
        if v <= 0:
            yield v
        if v * extent % old == 0:
            yield v * extent // old
        yield v
        yield extent - (old - v)

    for s, e in itertools.product(dict.fromkeys(places(start)), dict.fromkeys(places(end))):
        if (
            0 <= s <= extent
            and -1 <= e <= extent
            and (e >= 0 or step < 0)
            and len(range(s, e, step)) == wanted
        ):
            return s, e
    return None
