"""Weights of products as int8 with a scale for each column, exactly what the program computes with.

    x W  ->  (x Q) * s        Q[k, n] = round(W[k, n] / s[n]),   s[n] = max over k of |W[k, n]| /
         127

Q is converted to the type computed in as it is read (exact: whole numbers up to 127), s is rounded
to it and multiplied as the product's sums are written: no kernel of its own. Activations,
embeddings (and heads tied to them), experts of a mixture, what makes keys and values of latents,
norms, biases and the cache stay as they are. Programs make Q and s from the model's own weights
when they load them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from planner.graph.ir import OF_PRODUCT, Graph, Node, Tensor, WeightRef

DTYPE = "int8"


def scale_name(weight: str) -> str:
    """The weight that holds another's scales."""
    return f"{weight}.scale"


def quantized(graph: Graph, apart: Set[str] = frozenset()) -> Graph:
    """The graph with every weight that one product reads, as its second operand, in int8. apart:
    weights that stay as they are."""
    tensors, weights, labels, nodes = (
        dict(graph.tensors),
        dict(graph.weights),
        dict(graph.labels),
        [],
    )
    for node in graph.nodes:
        name = node.inputs[1] if node.op == "MatMul" else ""
        t = tensors.get(name)
        if (
            t is None
            or name not in weights
            or name in apart
            or len(t.shape) != 2
            or not t.is_float
            or len(graph.consumers[name]) > 1
        ):
            nodes.append(node)
            continue
        scale, (out,) = scale_name(name), node.outputs
        before = f"{out}/unscaled"
        tensors[name] = replace(t, dtype=DTYPE)
        tensors[scale] = Tensor(
            scale, (t.shape[0 if node.attrs.get("trans_b") else 1],), t.dtype, "weight"
        )
        tensors[before] = replace(tensors[out], name=before, role="activation")
        weights[scale], labels[scale] = WeightRef("absent"), scale_name(labels.get(name, name))
        nodes += [
            replace(node, outputs=(before,)),
            Node(
                f"{node.id}/scale",
                "Mul",
                (before, scale),
                (out,),
                {OF_PRODUCT: 1},
                scope=node.scope,
            ),
        ]
    return replace(graph, nodes=tuple(nodes), tensors=tensors, weights=weights, labels=labels)


def scales(graph: Graph) -> dict[str, tuple[str, int]]:
    """Quantised weight -> (its scales, the dim that a scale is taken over)."""
    found = {}
    for node in graph.nodes:
        if node.op == "MatMul" and scale_name(node.inputs[1]) in graph.weights:
            found[node.inputs[1]] = (
                scale_name(node.inputs[1]),
                (1 if node.attrs.get("trans_b") else 0),
            )
    return found


def as_stored(graph: Graph) -> Graph:
    """The graph with its weights as the model's files have them, for tables of where those lie."""
    floats = {
        w: replace(graph.tensors[w], dtype=graph.tensors[s].dtype)
        for w, (s, _) in scales(graph).items()
    }
    return replace(graph, tensors={**graph.tensors, **floats})
