"""Which weights train: globs over labels, ties made anew, and adapters (planner.workload.lora) in
place of whole weights.

--trainable GLOB   these weights and no others; `+GLOB` adds to the reader's choice
--freeze GLOB      not these
--tie A=B          B is A again (or A transposed): one parameter, both uses
--lora ...         see planner.workload.lora; everything but the adapters is frozen

A frozen weight has no gradient, no optimizer state and no reduction, in the price and in the
emitted program: both derive them from `Graph.trainable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.errors import PlanError, did_you_mean
from planner.graph.ir import Graph, Node, Tensor
from planner.workload.weight_globs import matching


def choose(
    graph: Graph,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    tie: Sequence[str] = (),
    lora: str = "",
) -> Graph:
    """The graph with ties, adapters and the choice of what trains. Raises PlanError for a glob or
    name that matches no weight."""
    for pair in tie:
        graph = tied(graph, pair)
    chosen = set(graph.trainable)
    plain = [g for g in trainable if not g.startswith("+")]
    if plain:
        chosen = set()
    for glob in trainable:
        chosen |= {
            n
            for n in matching(graph, glob.removeprefix("+"), "--trainable")
            if graph.tensors[n].is_float
        }
    if trainable:  # the user has seen to what the reader left out
        graph = replace(
            graph, notes=tuple(n for n in graph.notes if getattr(n, "kind", "") != "frozen")
        )
    for glob in freeze:
        chosen -= matching(graph, glob, "--freeze")
    if not lora:
        return replace(graph, trainable=frozenset(chosen))
    from planner.workload.lora import add_adapters

    kept = {
        n
        for glob in trainable
        for n in matching(graph, glob.removeprefix("+"), "--trainable")
        if n in chosen
    }  # named: trained beside the adapters
    return add_adapters(replace(graph, trainable=frozenset(kept)), lora)


def _one(graph: Graph, name: str) -> str:
    matches = sorted(n for n in graph.weights if name in (n, graph.labels.get(n, n)))
    if len(matches) != 1:
        near = did_you_mean(name, [*graph.labels.values(), *graph.weights])
        raise PlanError(
            "P036",
            f"--tie: {name!r} is no parameter",
            help=[near or "`plan ops FILE --parameters` lists them"],
        )
    return matches[0]


def tied(graph: Graph, pair: str) -> Graph:
    """`A=B`: every use of weight B reads A, transposed where B was stored the other way round.
    Raises PlanError when they do not fit."""
    left, eq, right = pair.partition("=")
    if not eq or not left or not right:
        raise PlanError(
            "P036",
            f"--tie {pair!r}: two parameters are needed",
            help=["--tie embed.weight=lm_head.weight"],
        )
    keep, drop = _one(graph, left), _one(graph, right)
    a, b = graph.tensors[keep], graph.tensors[drop]
    flipped = a.shape != b.shape
    if (
        keep == drop
        or a.dtype != b.dtype
        or (flipped and (len(a.shape) != 2 or a.shape != b.shape[::-1]))
    ):
        shapes = f"{list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}"
        raise PlanError(
            "P036",
            f"--tie {pair!r}: the two cannot be one parameter",
            detail=[shapes],
            help=["equal shapes, or one the other's transpose"],
        )
    nodes, tensors = _rewired(graph, keep, drop, flipped)
    del tensors[drop]
    without = lambda table: {k: v for k, v in table.items() if k != drop}  # noqa: E731
    outputs = graph.outputs
    if drop in outputs:
        raise PlanError("P036", f"--tie {pair!r}: {right!r} is an output of the graph")
    trained = graph.trainable - {drop} | ({keep} if drop in graph.trainable else set())
    note = (
        f"{graph.labels.get(drop, drop)!r} is {graph.labels.get(keep, keep)!r} again (--tie)"
        + (", transposed" if flipped else "")
        + ": its own values are dropped"
    )
    notes = tuple(
        n for n in graph.notes if not (repr(keep) in n and repr(drop) in n and "untie" in n)
    )
    return replace(
        graph,
        nodes=tuple(nodes),
        tensors=tensors,
        weights=without(graph.weights),
        labels=without(graph.labels),
        trainable=frozenset(trained),
        notes=(*notes, note),
    )


def _rewired(
    graph: Graph, keep: str, drop: str, flipped: bool
) -> tuple[list[Node], dict[str, Tensor]]:
    """Nodes and tensors where every use of `drop` reads `keep`; flipped: its transpose, which a
    MatMul takes as an attribute and other nodes from a Transpose."""
    nodes: list[Node] = []
    tensors = dict(graph.tensors)
    turned = f"{drop}/tied"
    for node in graph.nodes:
        if drop in node.inputs and flipped:
            if node.op == "MatMul" and node.inputs[1] == drop and drop not in node.inputs[:1]:
                node = replace(
                    node,
                    inputs=(node.inputs[0], keep),
                    attrs={**node.attrs, "trans_b": 1 - int(node.attrs.get("trans_b", 0))},  # type: ignore[arg-type]
                )
            elif turned not in tensors:
                transposed = graph.tensors[drop]
                tensors[turned] = Tensor(turned, transposed.shape, transposed.dtype)
                nodes.append(
                    Node(f"{turned}/transpose", "Transpose", (keep,), (turned,), {"perm": (1, 0)})
                )
        read = turned if flipped else keep
        nodes.append(replace(node, inputs=tuple(read if n == drop else n for n in node.inputs)))
    return nodes, tensors
