"""What training means for an exported graph: the loss that is appended, and what is pruned because the loss does not need it.

Losses: "cross_entropy" (labels int32, shape of the logits without the class dim), "mse", "l1", "bce" (targets like the output), and
"output:NAME" (a scalar output of the graph is the loss). The default is cross_entropy when the output is logits of rank >= 2, else mse.
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import PlanError, did_you_mean
from planner.graph import AttrValue, Graph, Node, Tensor

LOSSES = {"cross_entropy": "CrossEntropyLoss", "mse": "MSELoss", "l1": "L1Loss", "bce": "BCEWithLogitsLoss"}
LABELS, TARGETS, LOSS = "labels", "targets", "loss"


def default_loss(graph: Graph, logits: str = "") -> str:
    """cross_entropy for an output that looks like logits (float, rank >= 2, not an image), else mse; output:NAME for a scalar output."""
    out = graph.tensors[logits or graph.outputs[0]]
    if out.is_float and out.elements == 1 and not logits:
        return f"output:{out.name}"
    return "cross_entropy" if len(out.shape) in (2, 3) and out.shape[-1] > 1 else "mse"


def add_loss(graph: Graph, loss: str = "", logits: str = "", shift_labels: bool = False) -> Graph:
    """The graph whose first (only) output is the scalar loss, pruned to what the loss needs.

    logits: the output the loss reads (default: the first). shift_labels: position t predicts label t+1; the labels input is then already
    shifted by the data pipeline's convention, one label per position, so that shapes stay even over the sequence.
    Raises PlanError for unknown losses, outputs that do not exist, and graphs without anything trainable.
    """
    if logits and logits not in graph.outputs:
        raise PlanError("P031", f"no output named {logits!r}", detail=[f"outputs: {', '.join(graph.outputs)}"],
                        help=[did_you_mean(logits, graph.outputs) or "--logits with one of the outputs above"])  # fmt: skip
    loss = loss or default_loss(graph, logits)
    source = graph.tensors[logits or graph.outputs[0]]
    if loss.startswith("output:"):
        name = loss.removeprefix("output:")
        if name not in graph.outputs or graph.tensors[name].elements != 1:
            raise PlanError("P032", f"--loss {loss}: the graph has no scalar output of that name", detail=[
                f"{o}: shape {list(graph.tensors[o].shape)}" for o in graph.outputs], help=["--loss cross_entropy, or another output"])  # fmt: skip
        nodes, tensors, inputs = graph.nodes, dict(graph.tensors), graph.inputs
        if graph.tensors[name].shape:
            scalar = _free("loss", tensors)
            tensors[scalar] = Tensor(scalar, (), graph.tensors[name].dtype)
            nodes = (*nodes, Node(_free_id("loss/reshape", graph), "Reshape", (name,), (scalar,)))
            name = scalar
        return _checked(prune(replace(graph, nodes=nodes, tensors=tensors, outputs=(name,), inputs=inputs)))
    if loss not in LOSSES:
        raise PlanError("P030", f"unknown loss {loss!r}", help=[f"one of {', '.join(LOSSES)}, output:NAME"])
    if not source.is_float:
        raise PlanError("P033", f"output {source.name!r} is {source.dtype}: a loss needs a float output", help=["--logits NAME"])
    tensors = dict(graph.tensors)
    out = _free(LOSS, tensors)
    if loss == "cross_entropy":
        # ONNX keeps classes at dim 1 for images [N, C, H, W]; language and classification logits end with them.
        axis = 1 if len(source.shape) >= 4 else len(source.shape) - 1
        if len(source.shape) < 2:
            raise PlanError("P033", f"cross_entropy needs logits of rank 2 or more; {source.name!r} has shape {list(source.shape)}", help=["--loss mse"])
        extra = _free(LABELS, tensors)
        tensors[extra] = Tensor(extra, tuple(s for d, s in enumerate(source.shape) if d != axis), "int32", "input")
        node = Node(_free_id(LOSS, graph), LOSSES[loss], (source.name, extra), (out,), {"axis": axis})
    else:
        extra = _free(TARGETS, tensors)
        tensors[extra] = Tensor(extra, source.shape, source.dtype, "input")
        node = Node(_free_id(LOSS, graph), LOSSES[loss], (source.name, extra), (out,))
    tensors[out] = Tensor(out, (), "float32")
    note = ("labels are next tokens: shift them by one in the data",) if shift_labels else ()
    grown = replace(graph, nodes=(*graph.nodes, node), tensors=tensors, inputs=(*graph.inputs, extra), outputs=(out,), notes=(*graph.notes, *note))
    return _checked(prune(grown))


def prune(graph: Graph) -> Graph:
    """Without the nodes and values that no output needs; inputs stay listed only when used."""
    wanted = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(o in wanted for o in node.outputs):
            kept.append(node)
            wanted.update(n for n in node.inputs if n)
    # outputs nobody reads become absent, so that no kernel computes them
    nodes = tuple(part for n in reversed(kept) for part in _live_part(n, wanted, graph))
    live = {t for n in nodes for t in (*n.inputs, *n.outputs) if t} | set(graph.outputs)
    pick = lambda table: {k: v for k, v in table.items() if k in live}  # noqa: E731
    return replace(graph, nodes=nodes, tensors=pick(graph.tensors), inputs=tuple(i for i in graph.inputs if i in live), weights=pick(graph.weights),
                   constants=pick(graph.constants), labels=pick(graph.labels), trainable=frozenset(graph.trainable & live))  # fmt: skip


def _live_part(node: Node, wanted: set[str], graph: Graph) -> tuple[Node, ...]:
    """The node without outputs nobody reads. A Split then becomes a Slice per output: its kernel needs every piece's extent."""
    if all(o in wanted for o in node.outputs if o) and (node.op != "Split" or all(node.outputs)):
        return (node,)
    if node.op != "Split" or not all(node.outputs):
        return (replace(node, outputs=tuple(o if o in wanted else "" for o in node.outputs)),)
    axis, at = int(node.attrs["axis"]), 0  # type: ignore[arg-type]
    found: list[Node] = []
    for k, out in enumerate(node.outputs):
        end = at + graph.tensors[out].shape[axis]
        if out in wanted:
            name = f"{node.id}/{k}" if found else node.id
            attrs: dict[str, AttrValue] = {"axes": (axis,), "starts": (at,), "ends": (end,), "steps": (1,)}
            found.append(Node(name, "Slice", node.inputs[:1], (out,), attrs, node.scope, node.members or (node.id,)))
        at = end
    return tuple(found)


def _checked(graph: Graph) -> Graph:
    if not graph.trainable:
        raise PlanError("P034", "nothing in this graph is trainable", help=["--trainable 'GLOB' names parameters to train", "--workload infer"])
    return graph


def _free(name: str, taken: object) -> str:
    while name in taken:  # type: ignore[operator]
        name += "_"
    return name


def _free_id(name: str, graph: Graph) -> str:
    return _free(name, {n.id for n in graph.nodes})
