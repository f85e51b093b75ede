"""Layers that are alike inside one repeated block.

A block that repeats may hold several layers: five with a window and one without (Gemma 3), dense
layers and mixtures in turn (Llama 4). The repeats of a block share their decisions; so may what is
alike in its layers, which leaves a search few decisions instead of as many as a block has layers.

A layer begins where a single tensor of the block is handed on (the residual). Two of them are put
together alike if the same operators on the same shapes read one another in the same way. Their
nodes then decide alike, each with its counterpart, if all of them have the same options. What the
options take may differ, as attention over a window takes less: a decision takes the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph.ir import Graph


def alike_in_blocks(
    graph: Graph, runs: Sequence[tuple[int, int, int]], kinds: Mapping[int, object]
) -> dict[int, int]:
    """Node of a first repeat -> its counterpart in the first layer like its own, of layers that are
    like one before. kinds: by node of a first repeat, equal for nodes with the same options."""
    result: dict[int, int] = {}
    for first, period, repeats in runs:
        if repeats < 2:
            continue
        alike: dict[tuple, range] = {}
        for layer in _layers(graph, first + period, period):
            key = _wiring(graph, layer), tuple(kinds[i - period] for i in layer)
            before = alike.setdefault(key, layer)
            if before != layer:
                result.update((i - period, j - period) for i, j in zip(layer, before, strict=True))
    return result


def _layers(graph: Graph, start: int, period: int) -> list[range]:
    """The layers of the repeat that begins at `start`, which is not the first: what the repeat
    before hands on is in it, too."""
    last_reader = {}
    for i in range(start - period, start + period):
        for name in graph.nodes[i].outputs:
            readers = [k for k, _ in graph.consumers.get(name, ())]
            if name and readers and readers[-1] >= start:
                last_reader[name] = i, readers[-1]
    handed_on = [0] * (period + 1)
    for made, read in last_reader.values():
        for at in range(max(made + 1, start), min(read, start + period) + 1):
            handed_on[at - start] += 1
    begins = [at for at in range(1, period) if handed_on[at] == 1]
    return [
        range(start + a, start + b) for a, b in zip([0, *begins], [*begins, period], strict=True)
    ]


def _wiring(graph: Graph, layer: range) -> tuple:
    """How a layer is put together: its operators, the shapes of their results, and which of its
    nodes each reads; what is from elsewhere is told apart by weights and shapes."""

    def source(name: str) -> tuple:
        if not name:
            return ()
        maker = graph.producer.get(name, -1)
        if maker in layer:
            return maker - layer.start, graph.nodes[maker].outputs.index(name)
        return name in graph.weights, graph.tensors[name].shape

    return tuple(
        (
            node.op,
            tuple(map(source, node.inputs)),
            tuple(graph.tensors[o].shape for o in node.outputs if o),
        )
        for node in (graph.nodes[i] for i in layer)
    )
