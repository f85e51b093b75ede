"""Weights of products in a byte with a scale for each column, just what the program computes with.

    int8   x W  ->  (x Q) * s         Q[k, n] = round(W[k, n] / s[n]),   s[n] = largest / 127
    fp8    x W  ->  (x8 Q) * r * s    Q[k, n] = float8(W[k, n] / s[n])

largest = max over k of |W[k, n]|. int8: Q is converted to the type computed in as it is read
(exact: whole numbers up to 127), s is rounded to it. fp8 (float8_e4m3fn): s is the least power of
two with largest / s <= 448, exact in any type, and rows x are made float8 as they come, each
divided by r so that its largest value is 448. s is multiplied as the product's sums are written: no
kernel of its own.

Activations between products, embeddings (and heads tied to them), what makes keys and values of
latents, norms, biases and the cache stay as they are; with int8 experts of a mixture too. With fp8
experts have columns' scales of their own, and heads, routers and weights whose extents are no
multiples of 16 stay as they are. Programs make Q and s from the model's own weights when they load
them, and keep float8 weights of products as [n, k]: GPUs' compilers would turn them around.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from planner.execution.eight_bit import ALIGNED, eight_bit
from planner.graph.ir import KEPT_FLOAT8, OF_PRODUCT, Graph, Node, Tensor, WeightRef

KEPT = {"int8": "int8", "fp8": "uint8"}
"""Way to keep weights -> their type in graphs. Float8 is counted as uint8 there, as in caches: the
type of a weight that is float is that of the program."""
STACKS = (3, 4, 5)
"""Operands of routed experts that are weights with columns: gate, up, down."""
AS_IS, TURNED = 1, 2
"""Values of KEPT_FLOAT8: whether a weight is kept with its dims the other way round."""
CHOICES = (1, 2)
"""Those that say a token's experts and their shares."""


def scale_name(weight: str) -> str:
    """The weight that holds another's scales."""
    return f"{weight}.scale"


def quantized(
    graph: Graph, how: str, apart: Set[str] = frozenset(), states: Set[str] = frozenset()
) -> Graph:
    """The graph with every weight that one product reads, as its second operand, kept in a byte;
    how: of KEPT. apart: weights that stay as they are; states: outputs that go on with what is kept
    of sequences, which no product is a head for."""
    tensors, weights, labels, nodes = (
        dict(graph.tensors),
        dict(graph.weights),
        dict(graph.labels),
        [],
    )
    results = tuple(o for o in graph.outputs if o not in states)
    served = _served(replace(graph, outputs=results), how, apart)

    def keep(name: str, over: int) -> str:
        """Keep a weight in a byte; the name of its scales, one for each of what is left of its
        shape without the dim `over`."""
        t, scale = tensors[name], scale_name(name)
        shape = (*t.shape[:over], *t.shape[over + 1 :])
        tensors[name] = replace(t, dtype=KEPT[how])
        tensors[scale] = Tensor(scale, shape, t.dtype, "weight")
        weights[scale], labels[scale] = WeightRef("absent"), scale_name(labels.get(name, name))
        return scale

    for i, node in enumerate(graph.nodes):
        if i not in served:
            nodes.append(node)
        elif node.op == "RoutedExperts":
            operands = [*node.inputs, *[""] * (9 - len(node.inputs))]
            of_stacks = [keep(operands[k], _over(node, k)) if operands[k] else "" for k in STACKS]
            inputs = (*operands, *of_stacks)
            nodes.append(replace(node, inputs=inputs, attrs={**node.attrs, KEPT_FLOAT8: AS_IS}))
        else:
            (result,) = node.outputs
            attrs = dict(node.attrs)
            if how == "fp8":
                around = not attrs.get("trans_b")
                attrs |= {KEPT_FLOAT8: TURNED if around else AS_IS, "trans_b": 1}
                if around:
                    t = tensors[node.inputs[1]]
                    tensors[t.name] = replace(t, shape=t.shape[::-1])
            node = replace(node, attrs=attrs)
            scale, before = keep(node.inputs[1], _over(node, 1)), f"{result}/unscaled"
            tensors[before] = replace(tensors[result], name=before, role="activation")
            scaled = (before, scale), (result,), {OF_PRODUCT: 1}
            nodes += [
                replace(node, outputs=(before,)),
                Node(f"{node.id}/scale", "Mul", *scaled, scope=node.scope),
            ]
    return replace(graph, nodes=tuple(nodes), tensors=tensors, weights=weights, labels=labels)


def _served(graph: Graph, how: str, apart: Set[str]) -> frozenset[int]:
    """Nodes whose weights are kept in a byte."""
    products = frozenset(
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "MatMul" and _keeps(graph, node.inputs[1], 2) and node.inputs[1] not in apart
    )
    if how == "int8":
        return products
    experts = [
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "RoutedExperts"
        and all(_keeps(graph, node.inputs[k], 3) for k in STACKS if node.inputs[k])
        and not any(n % ALIGNED for n in graph.tensors[node.inputs[4]].shape[1:])
    ]
    return ((products & eight_bit(graph)) - routers(graph)) | frozenset(experts)


def _keeps(graph: Graph, name: str, dims: int) -> bool:
    """Whether a tensor is a weight of so many dims that one operator reads."""
    t = graph.tensors.get(name)
    return (
        t is not None
        and name in graph.weights
        and len(t.shape) == dims
        and t.is_float
        and len(graph.consumers[name]) == 1
    )


def routers(graph: Graph) -> frozenset[int]:
    """Products that choices of experts are made from."""
    waiting = [n.inputs[k] for n in graph.nodes if n.op == "RoutedExperts" for k in CHOICES]
    products, seen = set[int](), set[int]()
    while waiting:
        i = graph.producer.get(waiting.pop(), -1)
        if i < 0 or i in seen:
            continue
        seen.add(i)
        if graph.nodes[i].op == "MatMul":
            products.add(i)
        else:
            waiting += [n for n in graph.nodes[i].inputs if n in graph.producer]
    return frozenset(products)


def _over(node: Node, slot: int) -> int:
    """The dim of a weight that its product sums over."""
    if node.op == "RoutedExperts":
        return 2 if node.attrs.get("trans_out" if slot == STACKS[-1] else "trans_in") else 1
    return 1 if node.attrs.get("trans_b") else 0


def _scaled(node: Node) -> Iterator[tuple[int, str]]:
    """(place of an operand, its name) of a node's weights that may be kept in a byte."""
    slots = {"MatMul": (1,), "RoutedExperts": STACKS}.get(node.op, ())
    return ((k, node.inputs[k]) for k in slots if node.inputs[k])


def scales(graph: Graph) -> dict[str, tuple[str, int]]:
    """Quantised weight -> (its scales, the dim that a scale is taken over)."""
    return {
        name: (scale_name(name), _over(node, k))
        for node in graph.nodes
        for k, name in _scaled(node)
        if scale_name(name) in graph.weights
    }


def turned(graph: Graph) -> frozenset[str]:
    """Quantised weights whose dims are the other way round in the model's files."""
    return frozenset(n.inputs[1] for n in graph.nodes if n.attrs.get(KEPT_FLOAT8) == TURNED)


def as_stored(graph: Graph) -> Graph:
    """The graph with its weights as the model's files have them, for tables of where those lie."""
    floats, around = {}, turned(graph)
    for w, (s, _) in scales(graph).items():
        t = graph.tensors[w]
        shape = t.shape[::-1] if w in around else t.shape
        floats[w] = replace(t, dtype=graph.tensors[s].dtype, shape=shape)
    return replace(graph, tensors={**graph.tensors, **floats})
