"""Gated units of repeated blocks, whose element-wise products are made again in the backward pass.

Of a SwiGLU, `(silu(gate) * up) @ down`, the backward pass reads four tensors of the hidden width:
gate, up, silu(gate) and the product that `down` reads. Two of them follow from the other two
element by element, so an emitted program keeps gate and up alone (planner.emit.body). So it does of
every such unit, GeGLU or the gate of a state space model:

    reader    a matrix product whose gradient reads an operand
    inside    what makes that operand: an element-wise operator of two activations, and before it
              element-wise operators, as long as each has one reader, which is of the unit, and a
              gradient that reads all its operands: those are kept anyway

All of a unit is in one repeat of a block. Elsewhere both passes stand in one computation, where
compilers choose themselves what they make again (planner.analysis.residuals).

Prices, collectives and programs ask here which nodes these are. What is inside runs a second time
in every backward pass, also in a recomputed block, where its first run in the backward pass has no
reader and goes; so do reshards of what it makes (planner.execution.recompute).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.residuals import reads

Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class GatedUnits:
    """The gated units of a graph. inside: reader -> the nodes that are made again for it, in order.
    nodes: of all units. tensors: what those make, which nothing keeps."""

    inside: Mapping[int, tuple[int, ...]]
    nodes: frozenset[int]
    tensors: frozenset[str]


def gated_units(graph: Graph, grad: frozenset[str], runs: Runs) -> GatedUnits:
    """The gated units of the repeats of blocks `runs`; none without gradients."""
    key = ("gated units", grad, runs)
    if key not in graph.memo:
        inside = dict(_units(graph, grad, runs)) if grad else {}
        nodes = frozenset(i for unit in inside.values() for i in unit)
        tensors = frozenset(o for i in nodes for o in graph.nodes[i].outputs if o)
        graph.memo[key] = GatedUnits(inside, nodes, tensors)
    known: GatedUnits = graph.memo[key]
    return known


def _units(graph: Graph, grad: frozenset[str], runs: Runs) -> Iterator[tuple[int, tuple[int, ...]]]:
    outputs = frozenset(graph.outputs)
    for first, period, repeats in runs:
        for i in range(first, first + period * repeats):
            if operator_of(graph.nodes[i].op).kind != "product":
                continue
            repeat = first + (i - first) // period * period
            makers = _Makers(graph, grad, outputs, range(repeat, repeat + period))
            unit = {
                n
                for slot in reads(graph.nodes[i], grad).in_order
                for n in makers.of_gated(graph.nodes[i].inputs[slot])
            }
            if unit:
                yield i, tuple(sorted(unit))


@dataclass(frozen=True)
class _Makers:
    """Which nodes of one repeat make an operand again."""

    graph: Graph
    grad: frozenset[str]
    outputs: frozenset[str]
    repeat: range

    def of_gated(self, name: str) -> set[int]:
        """The nodes that make the operand of a product, where the last of them gates."""
        i = self._remade(name)
        if i < 0 or sum(n in self.graph.producer for n in self.graph.nodes[i].inputs) < 2:
            return set()
        return self._with_makers(i)

    def _with_makers(self, i: int) -> set[int]:
        makers = {self._remade(name) for name in self.graph.nodes[i].inputs} - {-1}
        return {i}.union(*map(self._with_makers, makers))

    def _remade(self, name: str) -> int:
        """The node that makes a tensor again; -1 where that one may not."""
        graph = self.graph
        i = graph.producer.get(name, -1)
        if i not in self.repeat or len(graph.consumers[name]) > 1 or name in self.outputs:
            return -1
        node = graph.nodes[i]
        wanted = {slot for slot, n in enumerate(node.inputs) if n}
        alone = operator_of(node.op).fusible and len(node.outputs) == 1
        return i if alone and wanted and reads(node, self.grad).slots >= wanted else -1
