"""Training and evaluation mode of operators that behave differently in each: Dropout and
BatchNormalization. Numbers that are drawn (RandomUniform, RandomNormal) are drawn in both, from
seeds that are handed on as those of Dropout are.

evaluation   Dropout is the identity, BatchNormalization uses its running statistics.
training     Dropout reads an integer seed beside its operand and hands the next one on: Dropout(x,
seed) -> (y, seed + 1). The first seed is an
             input of the graph, new in every step and microbatch. What is dropped is a function of
             the seed and the element's global index (planner.emit.runtime.kernels.nets.dropout), so
             that it is the same under any split; a chain of seeds lets repeated blocks share one
             function and drop differently. BatchNormalization uses the statistics of the whole
             batch, so its batch cannot come in microbatches.
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.graph.ir import Graph, Node, Tensor

SEED = "dropout_seed"


def evaluation(graph: Graph) -> Graph:
    """The graph as inference runs it. Running statistics asked for as outputs keep a
    BatchNormalization live."""
    read = {n for node in graph.nodes for n in node.inputs} | set(graph.outputs)
    data = graph.reached(graph.inputs)  # filters are standardised in evaluation, too
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = replace(node, inputs=tuple(renamed.get(n, n) for n in node.inputs))
        if _drops(node) and not _used(node, read) and node.outputs[0] not in graph.outputs:
            renamed[node.outputs[0]] = node.inputs[0]
            continue
        if _drops(node) and not _used(node, read):
            node = replace(node, op="Identity", attrs={}, outputs=node.outputs[:1])
        elif (
            node.op == "BatchNormalization"
            and node.attrs.get("training_mode")
            and node.inputs[0] in data
            and not _used(node, read)
        ):
            node = replace(node, attrs={**node.attrs, "training_mode": 0}, outputs=node.outputs[:1])
        nodes.append(node)
    return _seeded(replace(graph, nodes=tuple(nodes)))


def training(graph: Graph, microbatches: int = 1) -> Graph:
    """The graph as a training step runs it. Raises PlanError for microbatches of a live
    BatchNormalization."""
    if microbatches > 1 and (live := _of_batch(graph)) is not None:
        raise PlanError(
            "P037",
            f"node {live.id!r} (BatchNormalization) uses statistics of the whole batch:"
            f" {microbatches} microbatches would change them",
            help=["one microbatch, or an export in evaluation mode"],
        )
    return _seeded(graph)


def _of_batch(graph: Graph) -> Node | None:
    """A live BatchNormalization of data: filters that are standardised know no batch."""
    live = [n for n in graph.nodes if n.op == "BatchNormalization" and n.attrs.get("training_mode")]
    data = graph.reached(graph.inputs) if live else set[str]()
    return next((n for n in live if n.inputs[0] in data), None)


def _seeded(graph: Graph) -> Graph:
    """With a seed handed on through all nodes that draw and have none."""
    read = {n for node in graph.nodes for n in node.inputs} | set(graph.outputs)
    drawing = {n.id for n in graph.nodes if _draws(n) or (_drops(n) and not _used(n, read))}
    if not drawing:
        return graph
    seed = _free(SEED, graph)
    tensors = {**graph.tensors, seed: Tensor(seed, (), "int32", "input")}
    nodes: list[Node] = []
    current_seed = seed
    for node in graph.nodes:
        if node.id in drawing:
            after = f"{node.outputs[0]}/seed"
            tensors[after] = Tensor(after, (), "int32")
            node = replace(
                node, inputs=(*node.inputs[:1], current_seed), outputs=(node.outputs[0], after)
            )
            current_seed = after
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), tensors=tensors, inputs=(*graph.inputs, seed))


def mode_notes(graph: Graph, folded: int | None = None) -> tuple[str, ...]:
    """What training an export in evaluation mode means, a sentence; nothing for one in training
    mode that has kept its norms. folded: layers of BatchNormalization that the exporter folded
    away, where that is recorded."""
    norms = [n for n in graph.nodes if n.op == "BatchNormalization"]
    live = any(_drops(n) or n.op == "RandomUniform" for n in graph.nodes)
    live |= any(n.attrs.get("training_mode") for n in norms)
    kept = ""
    if folded:
        kept = (
            f"{folded} BatchNormalization {'layers are' if folded > 1 else 'layer is'} folded into"
            " neighbours (torch.onnx.export(..., dynamo=True, optimize=False) keeps them)"
        )
    elif norms and not live:
        kept = f"{len(norms)} BatchNormalization nodes keep the running statistics of the export"
    elif folded is None and any(n.op in ("Conv", "ConvTranspose") for n in graph.nodes):
        kept = "BatchNormalization, where the model had any, is folded into its neighbours"
    if live:
        return (Finding("training", f"the exporter's doing: {kept}"),) if folded else ()
    if not kept:
        return ("exported in evaluation mode, or without dropout: it trains without dropout",)
    return (
        Finding(
            "training",
            "exported in evaluation mode, as far as its nodes show: it trains without dropout, and"
            f" {kept}",
        ),
    )


def _drops(node: Node) -> bool:
    return node.op == "Dropout" and bool(node.attrs.get("training_mode"))


def _draws(node: Node) -> bool:
    return node.op in ("RandomUniform", "RandomNormal") and not node.inputs


def _used(node: Node, read: set[str]) -> bool:
    """Whether anything reads the results after the first (a mask, running statistics)."""
    return any(o in read for o in node.outputs[1:] if o)


def _free(name: str, graph: Graph) -> str:
    while name in graph.tensors:
        name += "_"
    return name
