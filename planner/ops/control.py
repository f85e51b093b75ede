"""Control flow: nodes whose work is graphs of their own (planner.graph.ir: If, Scan, While).

What may be split follows from the bodies. Dims that a node of a body links by one factor are one
class, as are a state's dims where it enters and where it leaves an iteration; the class is a factor
of the whole node. It may be cut where no node of any body sums over it, keeps it whole, or makes a
compound dim with it: then every device runs the bodies on its pieces, without a collective inside.
A result without the factor does not depend on anything cut by it; it must not carry a gradient of
what is replicated either, so only results made of integers may lack one.

FLOPs: of the heavier branch; of one iteration times their number (that of a While is its limit, 1
where there is none).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.graph.ir import Graph, Node
from planner.ops.base import Call, NoRule, Operator, jnp_dtype, register
from planner.ops.cost import Pieces
from planner.ops.lookup import rule_of
from planner.sharding.layout import Axes
from planner.sharding.rule import Dim, KernelCollective, Rule, Split


@dataclass(frozen=True)
class Region:
    """A node's rule; per body and node of it: factor -> factor of the rule; per result of the
    bodies: factors of the rule (only those that may be cut)."""

    rule: Rule
    inside: tuple[tuple[Mapping[str, str], ...], ...]
    made: tuple[tuple[str, ...], ...]
    rules: tuple[tuple[Rule, ...], ...]

    def axes(self, split: Split, order: Axes) -> tuple[Axes, ...]:
        """Per result of the bodies (absent ones included): mesh axes that cut it under a split of
        the node."""
        return tuple(
            tuple(a for a in order if any(a in split.axes(f) for f in factors))
            for factors in self.made
        )

    def splits(self, node: Node, split: Split) -> tuple[dict[str, Split], ...]:
        """Per body: the splits of its nodes under a split of the node."""
        return tuple(
            {
                inner.id: Split.of({f: split.axes(c) for f, c in linked.items()})
                for inner, linked in zip(body.nodes, linked_nodes, strict=True)
            }
            for body, linked_nodes in zip(node.bodies, self.inside, strict=True)
        )


def trips(node: Node) -> int:
    """How often the bodies are run, for prices."""
    return _count(node, "trips") or max(_count(node, "limit"), 1)


def _count(node: Node, key: str) -> int:
    return int(node.attrs.get(key, 0))  # type: ignore[arg-type]


class _Classes:
    """Classes of dims, joined; some of them may not be cut, or only evenly."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}
        self.whole: set[object] = set()
        self.even: set[object] = set()
        self.size: dict[object, int] = {}

    def root(self, a: object) -> object:
        while self.parent.setdefault(a, a) != a:
            self.parent[a] = self.parent[self.parent[a]]
            a = self.parent[a]
        return a

    def join(self, a: object, b: object) -> None:
        self.parent[self.root(a)] = self.root(b)

    def cuttable(self) -> set[object]:
        """Roots that may be cut."""
        return {self.root(a) for a in self.parent} - {self.root(a) for a in self.whole}


def region(node: Node, graph: Graph) -> Region:
    """The rule of a node with bodies (module docstring)."""
    classes = _Classes()
    rules = tuple(tuple(rule_of(inner, body)[0] for inner in body.nodes) for body in node.bodies)
    for b, body in enumerate(node.bodies):
        for j, inner in enumerate(body.nodes):
            _read(classes, b, j, inner, rules[b][j])
    slots, outs = _outside(classes, node, graph)
    for b, body in enumerate(node.bodies):
        _results(classes, b, body, node)
    cut = classes.cuttable()
    names: dict[object, str] = {}
    sizes: dict[str, int] = {}
    operand_shapes = [graph.tensors[n].shape if n else () for n in node.inputs]
    operands = tuple(
        _dims(classes, dims, shape, names, sizes)
        for dims, shape in zip(slots, operand_shapes, strict=True)
    )
    results = tuple(
        _dims(classes, outs[k], graph.tensors[o].shape, names, sizes)
        for k, o in enumerate(node.outputs)
        if o
    )
    free = {name for root, name in names.items() if root in cut}
    even = {classes.root(a) for a in classes.even}
    lacking = [
        f
        for f in names.values()
        if f in free and any(not any(f in dim for dim in r) for r in results)
    ]
    # A collective that never runs says that a result without the factor is complete and not one
    # term of a sum.
    complete = tuple(KernelCollective(f, "all-reduce", (), 0, 0) for f in lacking)
    rule = Rule(
        operands,
        results,
        sizes,
        frozenset(sizes) - free,
        no_pad=frozenset(n for r, n in names.items() if r in even),
        flops=_flops(node, rules),
        inner=complete,
    )
    linked = tuple(
        tuple(
            {
                f: names[r]
                for f in one.factors
                if (r := classes.root((b, j, f))) in cut and r in names
            }
            for j, one in enumerate(rules[b])
        )
        for b in range(len(rules))
    )
    body_results = node.bodies[0].outputs[1 if node.op == "While" else 0 :]
    roots = (
        [classes.root((0, o, d)) for d in range(len(node.bodies[0].tensors[o].shape))]
        for o in body_results
    )
    factors = tuple(tuple(names[r] for r in dims if r in cut and r in names) for dims in roots)
    return Region(rule, linked, factors, rules)


def _dims(
    classes: _Classes,
    dims: tuple[object, ...],
    shape: tuple[int, ...],
    names: dict[object, str],
    sizes: dict[str, int],
) -> tuple[Dim, ...]:
    """A tensor's dims in factors, one for each class of dims; what is new is added to `names`
    (class -> factor) and `sizes` (factor -> elements)."""
    result = []
    for dim, n in zip(dims, shape, strict=True):
        name = names.setdefault(classes.root(dim), f"f{len(names)}")
        sizes[name] = n
        result.append((name,))
    return tuple(result)


def _read(classes: _Classes, b: int, j: int, node: Node, rule: Rule) -> None:
    """What one node of a body says of the dims of its operands and results."""
    live = [o for o in node.outputs if o]
    for name, dims in zip((*node.inputs, *live), (*rule.operands, *rule.results), strict=True):
        for axis, dim in enumerate(dims):
            if len(dim) == 1:
                classes.join((b, name, axis), (b, j, dim[0]))
            else:
                classes.whole.update([(b, name, axis), *((b, j, f) for f in dim)])
                classes.root((b, name, axis))
    inner = {i.factor for i in rule.inner}
    for f in rule.factors:
        if f in rule.whole or f in rule.summed or f in inner:
            classes.whole.add((b, j, f))
        if f in rule.no_pad:
            classes.even.add((b, j, f))


def _outside(
    classes: _Classes, node: Node, graph: Graph
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Places of the dims of the node's operands and results, joined with those of its bodies."""
    first, own_inputs, states, scanned = (
        _count(node, k) for k in ("first", "own", "states", "scanned")
    )
    slots: list[tuple[object, ...]] = []
    for slot, name in enumerate(node.inputs):
        places = tuple(
            ("in", slot, d) for d in range(len(graph.tensors[name].shape) if name else 0)
        )
        slots.append(places)
        if slot < first:
            classes.whole.update(places)
            continue
        k = slot - first
        along = node.attrs["in_axes"][k - states] if states <= k < states + scanned else -1  # type: ignore[index]
        _join_around(
            classes,
            places,
            int(along),
            [(b, body.inputs[own_inputs + k]) for b, body in enumerate(node.bodies)],
        )
    outs: list[tuple[object, ...]] = []
    leading = 1 if node.op == "While" else 0
    for k, name in enumerate(node.outputs):
        rank = len(graph.tensors[name].shape) if name else 0
        places = tuple(("out", k, d) for d in range(rank))
        outs.append(places)
        inner = [(b, body.outputs[k + leading]) for b, body in enumerate(node.bodies)]
        along = node.attrs["out_axes"][k - states] if node.op == "Scan" and k >= states else -1  # type: ignore[index]
        if name:
            _join_around(classes, places, int(along), inner)
    for k in range(states):
        body = node.bodies[0]
        enters, leaves = body.inputs[own_inputs + k], body.outputs[leading + k]
        for d in range(len(body.tensors[enters].shape)):
            classes.join((0, enters, d), (0, leaves, d))
    return slots, outs


def _join_around(
    classes: _Classes, places: tuple[object, ...], along: int, inner: list[tuple[int, str]]
) -> None:
    """Dims outside with those inside; dim `along` is the one that iterations go along."""
    rest = [p for d, p in enumerate(places) if d != along]
    classes.whole.update(p for d, p in enumerate(places) if d == along)
    for p in places:
        classes.root(p)
    for b, name in inner:
        for d, place in enumerate(rest):
            classes.join(place, (b, name, d))


def _results(classes: _Classes, b: int, body: Graph, node: Node) -> None:
    """A float result, or one made of floats, must have every factor that is cut; constants cannot
    be cut where they are results themselves."""
    floats = {n for n in body.inputs if body.tensors[n].is_float}
    own_inputs, states, leading = (
        _count(node, "own"),
        _count(node, "states"),
        1 if node.op == "While" else 0,
    )
    for _ in range(1 + states):
        before = len(floats)
        for inner in body.nodes:
            if any(n in floats for n in inner.inputs):
                floats.update(o for o in inner.outputs if o)
        floats.update(
            body.inputs[own_inputs + k]
            for k in range(states)
            if body.outputs[leading + k] in floats
        )
        if len(floats) == before:
            break
    for name in body.outputs:
        if name in body.constants:
            classes.whole.update((b, name, d) for d in range(len(body.tensors[name].shape)))
        if name in floats or body.tensors[name].is_float:
            has = {classes.root((b, name, d)) for d in range(len(body.tensors[name].shape))}
            classes.whole.update(r for r in classes.cuttable() if r not in has)


def _flops(node: Node, rules: tuple[tuple[Rule, ...], ...]) -> float:
    return trips(node) * max(
        (sum(r.flops for r in body_rules) for body_rules in rules), default=0.0
    )


def _region_rule(node: Node, graph: Graph) -> Rule:
    rule = region(node, graph).rule
    if any(n > 1 for n in rule.sizes.values()) and not any(
        n > 1 and f not in rule.whole for f, n in rule.sizes.items()
    ):
        raise NoRule("its bodies sum over, or look along, every dim", rule)
    return rule


def _made(call: Call) -> str:
    """(type, mesh axes over which pieces differ) of each result of the bodies."""
    return _tuple([f"({jnp_dtype(dtype)}, {axes!r})" for dtype, axes in call.made])


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def inner_gradients(node: Node, b: int, grad: frozenset[str]) -> frozenset[str]:
    """Tensors of body b through which a gradient flows when it flows through `grad` outside:
    downstream of such an operand or state."""
    body, first, own_inputs, states = (
        node.bodies[b],
        _count(node, "first"),
        _count(node, "own"),
        _count(node, "states"),
    )
    hot = {
        inner
        for inner, outer in zip(body.inputs[own_inputs:], node.inputs[first:], strict=True)
        if outer in grad
    }
    for _ in range(1 + states):
        before = len(hot)
        for inner in body.nodes:
            if any(n in hot for n in inner.inputs):
                hot.update(o for o in inner.outputs if o and body.tensors[o].is_float)
        hot.update(
            enters
            for enters, leaves in zip(
                body.inputs[own_inputs : own_inputs + states], body.outputs, strict=False
            )
            if leaves in hot
        )
        if len(hot) == before:
            break
    return frozenset(hot)


def _left_behind(pieces: Pieces, results: np.ndarray) -> np.ndarray:
    """Bytes that the branch that was taken, or all iterations, leave for the backward pass."""
    if not pieces.trained:
        return np.zeros(len(pieces.splits))
    elements = trips(pieces.node) * max(
        sum(body.tensors[o].elements for inner in body.nodes for o in inner.outputs if o)
        for body in pieces.node.bodies
    )
    return elements * pieces.share("") * pieces.itemsize("float32")


def _picked(call: Call, text: str) -> str:
    """The wanted ones of a tuple of results."""
    live = [k for k, o in enumerate(call.node.outputs) if o]
    if len(live) == 1:
        return f"{text}[{live[0]}]"
    return text if len(live) == len(call.made) else f"tuple({text}[i] for i in {tuple(live)})"


def _if(call: Call) -> str:
    then, other = call.functions
    text = (
        f"{call.use('either')}({call.args[0]}, {then}, {other}, {_tuple(list(call.args[1:]))},"
        f" {_made(call)})"
    )
    return _picked(call, text)


def _scan(call: Call) -> str:
    states, scanned = int(call.attr("states")), int(call.attr("scanned"))  # type: ignore[arg-type]
    args = list(call.args)
    parts = ", ".join(
        _tuple(group)
        for group in (args[:states], args[states : states + scanned], args[states + scanned :])
    )
    ways = ", ".join(
        repr(tuple(call.attr(k)))  # type: ignore[arg-type]
        for k in ("in_axes", "in_reverse", "out_axes", "out_reverse")
    )
    text = (
        f"{call.use('iterate')}({call.functions[0]}, {call.attr('trips')}, {parts}, {_made(call)},"
        f" {bool(call.attr('own'))}, {ways})"
    )
    return _picked(call, text)


def _while(call: Call) -> str:
    states = int(call.attr("states"))  # type: ignore[arg-type]
    limit = call.args[0] or (repr(call.attr("limit")) if int(call.attr("limit")) >= 0 else "None")  # type: ignore[arg-type]
    args = list(call.args[2:])
    text = (
        f"{call.use('until')}({call.functions[0]}, {limit}, {call.args[1] or 'True'},"
        f" {_tuple(args[:states])}, {_tuple(args[states:])}, {_made(call)})"
    )
    return _picked(call, text)


register(
    Operator("If", _region_rule, _if, saves="in", workspace=_left_behind),
    Operator("Scan", _region_rule, _scan, saves="in out", workspace=_left_behind),
    Operator("While", _region_rule, _while, saves="", workspace=_left_behind),
)
