"""What is asked of a graph in several rooms: its losses, and the scalar that counts their rows."""

from __future__ import annotations

from planner.graph.ir import Graph


def counted_rows(graph: Graph) -> str:
    """The int32 scalar that counts the rows of a cross-entropy whose number is a part of the data;
    "" for any other loss."""
    node = graph.nodes[graph.producer[graph.outputs[0]]]
    if node.op != LOSSES["cross_entropy"] or len(node.inputs) < 3:
        return ""
    return graph.nodes[graph.producer[node.inputs[2]]].inputs[0]  # before it was made at least 1


LOSSES = {
    "cross_entropy": "CrossEntropyLoss",
    "mse": "MSELoss",
    "l1": "L1Loss",
    "bce": "BCEWithLogitsLoss",
}
