"""Names of values in repeated blocks, read from what feeds attention, what follows it, and how
products lie around activations.

    q, k, v      what an attention reads, after rotary embeddings, biases and orders of dims
    context      its result; out_proj: the first product behind it
    experts      the result of a mixture of experts; router: the product its choice is made from
    mlp_down     of the other products one that reads what others of them made, through element-wise
                 operators; mlp_act: what it reads
    mlp_up       the others before it; mlp_gate: of two that are multiplied with each other the one
                 that goes through an activation first
    norm         results of norms

A product's value is taken after its bias. Blocks without attention have fewer names, decoders with
two attentions have two values of each.

Which of them a plan saves (planner.execution.save_policies) is said by `kept_by_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from planner.execution.gated_units import gated_units
from planner.execution.layout_flow import Flow
from planner.execution.save_policies import NAMES, offloaded_values, saved_names
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.sharding.layout import ReshardStep

Runs = tuple[tuple[int, int, int], ...]


def block_values(graph: Graph, runs: Runs) -> Mapping[str, str]:
    """Tensor of the first repeat of a block -> its name."""
    key = ("block values", runs)
    if key not in graph.memo:
        names: dict[str, str] = {}
        for first, period, _ in runs:
            for name, tensor in _Repeat(graph, range(first, first + period)).values():
                names.setdefault(tensor, name)
        graph.memo[key] = names
    known: Mapping[str, str] = graph.memo[key]
    return known


def names_there(graph: Graph, runs: Runs) -> tuple[str, ...]:
    """The names that values of a graph's blocks have."""
    there = set(block_values(graph, runs).values())
    return tuple(n for n in NAMES if n in there)


def kept_by_name(flow: Flow) -> Mapping[str, str]:
    """Tensor of a first repeat that recomputed blocks save under the plan -> its name. Not what
    gated units make again, nor what comes from a kernel that exchanges pieces with other devices,
    where its backward pass needs more of its forward pass than what the kernel itself names."""
    names = frozenset(saved_names(flow.plan.recompute))
    if not names or not flow.training:
        return {}
    graph, plan = flow.graph, flow.plan
    inside = gated_units(graph, flow.grad, plan.repeated_blocks).tensors
    return {
        tensor: name
        for tensor, name in block_values(graph, plan.repeated_blocks).items()
        if name in names and tensor not in inside and is_saved_whole(flow, graph.producer[tensor])
    }


def offloaded_by_name(flow: Flow) -> Mapping[str, str]:
    """The tensors saved by name that wait in the host's memory."""
    away = offloaded_values(flow.plan.recompute)
    return {t: name for t, name in kept_by_name(flow).items() if name in away} if away else {}


def settles(step: ReshardStep) -> bool:
    """Whether a step adds up pending sums: a named value is saved behind it."""
    return step.forward in ("all-reduce", "reduce-scatter")


def is_saved_whole(flow: Flow, i: int) -> bool:
    """Whether the backward pass of a node needs no more of its kernel than what is saved by name:
    the kernel names it, or runs no collectives itself."""
    names_itself = operator_of(flow.graph.nodes[i].op).names_itself
    return names_itself or not any(
        inner.axes(flow.split(i), flow.plan.order) for inner in flow.rules[i].inner
    )


@dataclass(frozen=True)
class _Repeat:
    """The first repeat of a block."""

    graph: Graph
    nodes: range

    def values(self) -> Iterator[tuple[str, str]]:
        """(name, tensor) of all that have one; of several names of a tensor the first counts."""
        graph, projections = self.graph, set[int]()
        for i in self._of_kind("attention"):
            node = graph.nodes[i]
            for name, tensor in zip(("q", "k", "v"), node.inputs, strict=False):
                if graph.producer.get(tensor, -1) in self.nodes:
                    yield name, tensor
                    projections |= self._makers(tensor)
            yield "context", node.outputs[0]
            for product in self._next(node.outputs[0]):
                projections.add(product)
                yield "out_proj", self._with_bias(product)
        for i in self._of_kind("experts"):
            node = graph.nodes[i]
            yield "experts", node.outputs[0]
            for tensor in node.inputs[1:]:
                for product in self._makers(tensor) - projections:
                    projections.add(product)
                    yield "router", self._with_bias(product)
        yield from self._of_mlp(projections)
        for i in self._of_kind("norm"):
            yield "norm", graph.nodes[i].outputs[0]

    def _of_mlp(self, others: set[int]) -> Iterator[tuple[str, str]]:
        """Of products with a weight that are none of attention's or of a router."""
        graph = self.graph
        products = {
            i
            for i in self._of_kind("product")
            if i not in others and any(n in graph.weights for n in graph.nodes[i].inputs)
        }
        after = {i: self._next(graph.nodes[i].outputs[0]) & products for i in sorted(products)}
        last = {i for i, following in after.items() if not following}
        for down in sorted(last):
            before = [i for i, following in after.items() if down in following]
            if not before:
                continue
            gates = [i for i in before if len(before) == 2 and self._is_activated(i)]
            for i in before:
                yield ("mlp_gate" if gates == [i] else "mlp_up"), self._with_bias(i)
            for tensor in graph.nodes[down].inputs:
                if self._makers(tensor) & set(before):
                    yield "mlp_act", tensor
            yield "mlp_down", self._with_bias(down)

    def _of_kind(self, kind: str) -> list[int]:
        return [i for i in self.nodes if operator_of(self.graph.nodes[i].op).kind == kind]

    def _is_activated(self, product: int) -> bool:
        """Whether a product's value goes through one element-wise operator alone before it meets
        another tensor."""
        reader = self._reader(self._with_bias(product))
        if reader < 0:
            return False
        node = self.graph.nodes[reader]
        operands = [n for n in node.inputs if n in self.graph.producer]
        operator = operator_of(node.op)
        return operator.fusible and not operator.free and len(operands) == 1

    def _with_bias(self, product: int) -> str:
        """A product's result, or what adding a weight to it makes where nothing else reads it."""
        (value, *_) = self.graph.nodes[product].outputs
        reader = self._reader(value)
        if reader < 0:
            return value
        node = self.graph.nodes[reader]
        bias = all(n == value or n in self.graph.weights for n in node.inputs)
        return node.outputs[0] if operator_of(node.op).adds and bias else value

    def _reader(self, tensor: str) -> int:
        """The only reader of a tensor inside the repeat, -1 where there are several or none."""
        readers = {i for i, _ in self.graph.consumers.get(tensor, ())}
        return readers.pop() if len(readers) == 1 and min(readers) in self.nodes else -1

    def _makers(self, tensor: str) -> set[int]:
        """The nearest products of the repeat that a tensor is made from, no norm on the way."""
        return self._reached([tensor], lambda i: self.graph.nodes[i].inputs, self._made_by)

    def _next(self, tensor: str) -> set[int]:
        """The nearest products of the repeat that read a tensor, no norm on the way."""
        return self._reached([tensor], lambda i: self.graph.nodes[i].outputs, self._read_by)

    def _made_by(self, tensor: str) -> list[int]:
        return [self.graph.producer[tensor]] if tensor in self.graph.producer else []

    def _read_by(self, tensor: str) -> list[int]:
        return [i for i, _ in self.graph.consumers.get(tensor, ())]

    def _reached(
        self,
        tensors: list[str],
        onwards: Callable[[int], Iterable[str]],
        neighbours: Callable[[str], list[int]],
    ) -> set[int]:
        """Products met from tensors on. onwards: a node -> tensors beyond it; neighbours: a tensor
        -> the nodes next to it."""
        products, seen, queue = set[int](), set[int](), tensors
        while queue:
            for i in neighbours(queue.pop()):
                if i in seen or i not in self.nodes:
                    continue
                seen.add(i)
                kind = operator_of(self.graph.nodes[i].op).kind
                if kind == "product":
                    products.add(i)
                elif not kind:
                    queue.extend(n for n in onwards(i) if n)
        return products
