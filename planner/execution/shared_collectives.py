"""Conversions that compilers merge because they are equal: the same steps on equal values, forward,
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

Place = tuple[str, tuple[ReshardStep, ...]]
"""(tensor, beginning of its way): one version of a value."""


@dataclass(frozen=True)
class Merged:
    """Places whose last step does not run by itself: an equal one does."""

    forward: frozenset[Place]
    backward: frozenset[Place]
    gradients: Mapping[str, str]
    """Weights whose gradient is another's, which is reduced in the same way -> that other."""


@dataclass(frozen=True)
class OutsideBlocks:
    """What a program has around its repeated blocks: the flow there, its nodes, and of the tensors
    that are converted there their trees."""

    flow: Flow
    nodes: tuple[int, ...]
    trees: Mapping[str, ReshardTree]
    merged: Merged


def outside_blocks(flow: Flow, blocks: Sequence[RepeatedBlock]) -> OutsideBlocks:
    """The program around `runs`, the repeated blocks that became one function."""
    graph, outer = flow.graph, flow
    for block in blocks:
        outer = outer_flow(outer, block)
    inside = {i for block in blocks for i in range(block.first, block.end)}
    made = {o for i in inside for o in graph.nodes[i].outputs if o}
    own = {n for block in blocks for names in block.weights for n in names}
    last = {c.leaves[-1] for block in blocks for c in block.carries}
    nodes = tuple(i for i in range(len(graph.nodes)) if i not in inside)
    trees = {
        n: t
        for n, t in outer.trees.items()
        if not ((n in made and n not in last) or n in own or n in graph.constants)
    }
    return OutsideBlocks(
        outer,
        nodes,
        trees,
        merged(
            outer,
            nodes,
            trees,
            [n for block in blocks for n in (*(c.enters for c in block.carries), *block.shared)],
        ),
    )


def merged(
    flow: Flow, nodes: Iterable[int], trees: Mapping[str, ReshardTree], leaving: Iterable[str] = ()
) -> Merged:
    """Equal conversions among `trees` (those of one function), whose statements are `nodes`.
    leaving: values also read outside."""
    nodes = tuple(nodes)
    numbers: dict[object, int] = {}

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    backward, gradients = (
        _backward(flow, nodes, trees, frozenset(leaving), number)
        if flow.grad
        else (frozenset[Place](), dict[str, str]())
    )
    return Merged(_forward(flow, nodes, trees, number), backward, gradients)


def _key(step: ReshardStep) -> tuple:
    """A step's forward instruction: a gather whose result varies and one whose result does not are
    the same."""
    kind = "all-gather" if step.kind == "all-gather-invariant" else step.kind
    return (kind, step.axes, step.dim, step.to_dim, step.size)


def _back(step: ReshardStep) -> tuple:
    """A step's backward instruction: the gradient of a slice and that of what was scattered are
    gathered alike."""
    return (step.backward, *_key(step)[1:]) if step.backward == "all-gather" else _key(step)


def _forward(
    flow: Flow, nodes: tuple[int, ...], trees: Mapping[str, ReshardTree], number
) -> frozenset[Place]:
    graph = flow.graph
    value: dict[str, int] = {}
    found: set[Place] = set()
    seen: set[int] = set()

    def version(name: str, path: tuple[ReshardStep, ...]) -> int:
        at = value.setdefault(name, number(("made", name))) if name not in value else value[name]
        for step in path:
            if step.kind != "pvary":
                at = number((_key(step), at))
        return at

    def convert(name: str) -> None:
        for path in trees[name].paths() if name in trees else ():
            if path[-1].forward:
                at = version(name, path)
                if at in seen:
                    found.add((name, path))
                seen.add(at)

    made = {o for i in nodes for o in graph.nodes[i].outputs if o}
    for name in trees:
        if name not in made:
            convert(name)
    for i in nodes:
        node = graph.nodes[i]
        operands = tuple(
            version(n, flow.trees[n].path(flow.need[i, slot])) if n else -1
            for slot, n in enumerate(node.inputs)
        )
        for k, name in enumerate(o for o in node.outputs if o):
            value[name] = number(
                (
                    node.op,
                    tuple(sorted(node.attrs.items())),
                    flow.split(i),
                    operands,
                    k,
                    graph.tensors[name].shape,
                )
            )
            convert(name)
    return frozenset(found)


def _backward(
    flow: Flow,
    nodes: tuple[int, ...],
    trees: Mapping[str, ReshardTree],
    leaving: frozenset[str],
    number,
) -> tuple[frozenset[Place], dict[str, str]]:
    graph = flow.graph
    inside = frozenset(nodes)
    cotangent: dict[str, int] = {}  # of a value as its node makes it
    found: set[Place] = set()
    seen: set[int] = set()

    def through(node: Node, i: int, slot: int) -> int:
        """Number of what a node hands its operand."""
        name = node.inputs[slot]
        live = [o for o in node.outputs if o]
        out = live[0]
        same = len(live) == 1 and graph.tensors[name].shape == graph.tensors[out].shape
        operator = operator_of(node.op)
        if same and slot in operator.adds:
            return cotangent[out]
        if operator.rearranges:
            return number(
                (
                    "back",
                    node.op,
                    tuple(sorted(node.attrs.items())),
                    graph.tensors[name].shape,
                    flow.split(i),
                    cotangent[out],
                )
            )
        if name in graph.weights and len(live) == 1 and slot in operator.adds:
            return number(
                (
                    "bias",
                    node.op,
                    slot,
                    graph.tensors[name].shape,
                    graph.tensors[out].shape,
                    flow.split(i),
                    cotangent[out],
                )
            )
        return number(("into", i, slot))

    def settle(name: str) -> None:
        """Number the cotangent of a value, walking its tree from the leaves."""
        tree = flow.trees[name]
        uses: dict[tuple[ReshardStep, ...], list[int]] = {
            (): [number(("out", name))] if name in leaving else []
        }
        for path in tree.paths():
            uses.setdefault(path, [])
        for i, slot in graph.consumers.get(name, ()):
            if i in inside:
                uses.setdefault(tree.path(flow.need[i, slot]), []).append(
                    through(graph.nodes[i], i, slot)
                )
        for path in sorted((p for p in uses if p), key=len, reverse=True):
            if not uses[path]:
                continue
            step, at = path[-1], _sum(uses[path], number)
            back = at if step.kind == "all-reduce" else number(("back", _back(step), at))
            if step.backward:
                if back in seen:
                    found.add((name, path))
                seen.add(back)
            uses[path[:-1]].append(back)
        cotangent[name] = _sum(uses[()], number)

    for i in reversed(nodes):
        for name in graph.nodes[i].outputs:
            if name:
                if name in flow.grad and name in flow.trees:
                    settle(name)
                else:
                    cotangent[name] = number(("none", name))
    made = {o for i in nodes for o in graph.nodes[i].outputs if o}
    for name in trees:
        if name not in made and name in flow.grad:
            settle(name)
    first: dict[object, str] = {}
    weights = [n for n in trees if n in flow.weights and n in flow.grad]
    leader = {
        name: first.setdefault((cotangent[name], flow.weights[name]), name) for name in weights
    }
    return frozenset(found), {name: other for name, other in leader.items() if other != name}


def _sum(parts: list[int], number) -> int:
    return parts[0] if len(parts) == 1 else number(("sum", tuple(sorted(parts))))
