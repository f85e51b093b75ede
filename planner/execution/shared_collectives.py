"""Reshards that compilers merge because they are equal: the same steps on equal values, forward,
or on equal cotangents, backward.

Values are numbered as a compiler's common-subexpression pass sees them: a step's result by (step,
number of what it starts from), a node's by (operator, attributes, split, numbers of its operands).
Cotangents are numbered the other way round: both operands of an addition get the cotangent of the
sum; a value read in several places gets a sum of its own. Biases of what is summed up (a
convolution and its shortcut) have one gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, outer_flow
from planner.graph.ir import Node
from planner.ops import operator_of
from planner.sharding.layout import ReshardStep, ReshardTree

Version = tuple[str, tuple[ReshardStep, ...]]
"""(tensor, beginning of its reshard path): one version of a value."""


@dataclass(frozen=True)
class Merged:
    """Versions whose last step does not run by itself: an equal one does."""

    forward: frozenset[Version]
    backward: frozenset[Version]
    gradients: Mapping[str, str]
    """Weights whose gradient is another's, which is reduced in the same way -> that other."""


@dataclass(frozen=True)
class OutsideBlocks:
    """What a program has around its repeated blocks: the flow there, its nodes, and the trees of
    the tensors that are resharded there."""

    flow: Flow
    nodes: tuple[int, ...]
    trees: Mapping[str, ReshardTree]
    merged: Merged


def outside_blocks(flow: Flow, blocks: Sequence[RepeatedBlock]) -> OutsideBlocks:
    """The program around the repeated blocks that became one function."""
    graph, outer = flow.graph, flow
    for block in blocks:
        outer = outer_flow(outer, block)
    in_blocks = {i for block in blocks for i in range(block.first, block.end)}
    made_in_blocks = {o for i in in_blocks for o in graph.nodes[i].outputs if o}
    weights_of_blocks = {n for block in blocks for names in block.weights for n in names}
    last = {c.leaves[-1] for block in blocks for c in block.carries}
    inside = (made_in_blocks - last) | weights_of_blocks | set(graph.constants)
    nodes = tuple(i for i in range(len(graph.nodes)) if i not in in_blocks)
    trees = {n: tree for n, tree in outer.trees.items() if n not in inside}
    entering = [n for block in blocks for n in (*(c.enters for c in block.carries), *block.shared)]
    return OutsideBlocks(outer, nodes, trees, merged(outer, nodes, trees, entering))


def merged(
    flow: Flow, nodes: Iterable[int], trees: Mapping[str, ReshardTree], leaving: Iterable[str] = ()
) -> Merged:
    """Equal reshards among `trees` (those of one function), whose statements are `nodes`. leaving:
    values that are also read outside."""
    nodes, numbers = tuple(nodes), _Numbers()
    backward = _Backward(flow, nodes, frozenset(leaving), numbers)
    gradients = backward.walk(trees) if flow.grad else {}
    forward = _Forward(flow, nodes, trees, numbers)
    forward.walk()
    return Merged(frozenset(forward.repeated), frozenset(backward.repeated), gradients)


class _Numbers:
    """Equal keys have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def sum(self, parts: list[int]) -> int:
        return parts[0] if len(parts) == 1 else self.of("sum", *sorted(parts))


def _made(flow: Flow, nodes: Iterable[int]) -> set[str]:
    return {o for i in nodes for o in flow.graph.nodes[i].outputs if o}


def _key(step: ReshardStep) -> tuple:
    """A step's forward instruction: a gather whose result varies and one whose result does not are
    the same."""
    kind = "all-gather" if step.kind == "all-gather-invariant" else step.kind
    return (kind, step.axes, step.dim, step.to_dim, step.size)


def _backward_key(step: ReshardStep) -> tuple:
    """A step's backward instruction: the gradient of a slice and that of what was scattered are
    gathered alike."""
    return (step.backward, *_key(step)[1:]) if step.backward == "all-gather" else _key(step)


class _Forward:
    """Values in the order of the forward pass, numbered; `repeated` are steps that run on an equal
    value before."""

    def __init__(
        self,
        flow: Flow,
        nodes: tuple[int, ...],
        trees: Mapping[str, ReshardTree],
        numbers: _Numbers,
    ) -> None:
        self.flow, self.nodes, self.trees, self.numbers = flow, nodes, trees, numbers
        self.values: dict[str, int] = {}
        self.repeated: set[Version] = set()
        self.seen: set[int] = set()

    def walk(self) -> None:
        """Number what the nodes compute, and reshard it."""
        results = _made(self.flow, self.nodes)
        for name in self.trees:
            if name not in results:
                self._reshard(name)
        for i in self.nodes:
            node = self.flow.graph.nodes[i]
            operands = tuple(
                self._version(n, self.flow.trees[n].path(self.flow.need[i, slot])) if n else -1
                for slot, n in enumerate(node.inputs)
            )
            attributes = tuple(sorted(node.attrs.items()))
            for k, name in enumerate(o for o in node.outputs if o):
                shape = self.flow.graph.tensors[name].shape
                self.values[name] = self.numbers.of(
                    node.op, attributes, self.flow.split(i), operands, k, shape
                )
                self._reshard(name)

    def _version(self, name: str, path: tuple[ReshardStep, ...]) -> int:
        if name not in self.values:
            self.values[name] = self.numbers.of("made", name)
        value = self.values[name]
        for step in path:
            if step.kind != "pvary":
                value = self.numbers.of(_key(step), value)
        return value

    def _reshard(self, name: str) -> None:
        for path in self.trees[name].paths() if name in self.trees else ():
            if path[-1].forward:
                value = self._version(name, path)
                if value in self.seen:
                    self.repeated.add((name, path))
                self.seen.add(value)


class _Backward:
    """Cotangents in the order of the backward pass, numbered; `repeated` are steps whose backward
    instruction runs on an equal cotangent before."""

    def __init__(
        self, flow: Flow, nodes: tuple[int, ...], leaving: frozenset[str], numbers: _Numbers
    ) -> None:
        self.flow, self.nodes, self.leaving, self.numbers = flow, nodes, leaving, numbers
        self.inside = frozenset(nodes)
        self.cotangents: dict[str, int] = {}  # of values as their nodes make them
        self.repeated: set[Version] = set()
        self.seen: set[int] = set()

    def walk(self, trees: Mapping[str, ReshardTree]) -> dict[str, str]:
        """Number the cotangents of all values. Weights with the cotangent and the plan of an
        earlier one -> that one."""
        flow = self.flow
        for i in reversed(self.nodes):
            for name in filter(None, flow.graph.nodes[i].outputs):
                if name in flow.grad and name in flow.trees:
                    self._collect(name)
                else:
                    self.cotangents[name] = self.numbers.of("none", name)
        results = _made(flow, self.nodes)
        for name in trees:
            if name not in results and name in flow.grad:
                self._collect(name)
        first: dict[object, str] = {}
        leaders = {
            n: first.setdefault((self.cotangents[n], flow.weights[n]), n)
            for n in trees
            if n in flow.weights and n in flow.grad
        }
        return {name: leader for name, leader in leaders.items() if leader != name}

    def _collect(self, name: str) -> None:
        """Number the cotangent of a value, walking its tree from the readers."""
        flow, tree = self.flow, self.flow.trees[name]
        parts: dict[tuple[ReshardStep, ...], list[int]] = {path: [] for path in ((), *tree.paths())}
        if name in self.leaving:
            parts[()].append(self.numbers.of("out", name))
        for i, slot in flow.graph.consumers.get(name, ()):
            if i in self.inside:
                handed = self._handed_on(flow.graph.nodes[i], i, slot)
                parts.setdefault(tree.path(flow.need[i, slot]), []).append(handed)
        for path in sorted((p for p in parts if p), key=len, reverse=True):
            if not parts[path]:
                continue
            step, cotangent = path[-1], self.numbers.sum(parts[path])
            if step.kind != "all-reduce":
                cotangent = self.numbers.of("back", _backward_key(step), cotangent)
            if step.backward:
                if cotangent in self.seen:
                    self.repeated.add((name, path))
                self.seen.add(cotangent)
            parts[path[:-1]].append(cotangent)
        self.cotangents[name] = self.numbers.sum(parts[()])

    def _handed_on(self, node: Node, i: int, slot: int) -> int:
        """The number of what a node hands on to its operand."""
        graph, operator, name = self.flow.graph, operator_of(node.op), node.inputs[slot]
        results = [o for o in node.outputs if o]
        result, single_result = results[0], len(results) == 1
        shape, result_shape = graph.tensors[name].shape, graph.tensors[result].shape
        if single_result and shape == result_shape and slot in operator.adds:
            return self.cotangents[result]
        split, cotangent = self.flow.split(i), self.cotangents[result]
        if operator.rearranges:
            attributes = tuple(sorted(node.attrs.items()))
            return self.numbers.of("back", node.op, attributes, shape, split, cotangent)
        if name in graph.weights and single_result and slot in operator.adds:
            return self.numbers.of("bias", node.op, slot, shape, result_shape, split, cotangent)
        return self.numbers.of("into", i, slot)
