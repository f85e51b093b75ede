"""Steps of latent attention: what makes a head's keys and values of cached latents is absorbed into
its queries and its result.

    q_h = [p_h ; r_h]   k_h = [latent W_k,h ; key]   v_h = latent W_v,h   (r_h, key: what rotates)

    softmax(q_h k_h') v_h  =  (softmax([p_h W_k,h' ; r_h] [latent ; key]') latent) W_v,h

The left side, as exporters write it, makes keys and values of every earlier token anew in each
step; the right one reads the cache where it lies. Both W are columns of the matrices that the pass
over prompts multiplies latents with. Recognised by how the cache is used, whatever the model is
called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.ir import Graph, Node, Tensor

HEADS_LAST = (0, 2, 1, 3)


@dataclass(frozen=True)
class Spread:
    """Keys or values [B, H, T, width] made of latents: columns start .. start + width of each
    head's part of a matrix. transposed: whether it is stored [H * M, R]."""

    latent: str
    weight: str
    start: int
    transposed: bool

    def product(self, id: str, scope: str, operand: str, result: str, back: bool) -> Node:
        """The product of a head's queries, or (`back`) its result, with its columns."""
        attrs = {"start": self.start, "back": int(back), "transposed": int(self.transposed)}
        return Node(id, "HeadProduct", (operand, self.weight), (result,), attrs, scope=scope)


@dataclass(frozen=True)
class Latent:
    """An attention over latents. queries: of the latents, and those that rotate; latent, key: what
    its cache continues."""

    queries: tuple[str, str]
    latent: str
    key: str
    keys: Spread
    values: Spread

    def nodes_of_step(
        self,
        node: Node,
        joined: Mapping[str, tuple[str, str]],
        mask: str,
        attrs: Mapping,
        tensors: dict[str, Tensor],
    ) -> list[Node]:
        """What takes the attention's place in a step. joined: present -> (past, new)."""
        (past, new), (past_key, new_key) = joined[self.latent], joined[self.key]
        b, heads, rows, _ = tensors[self.queries[0]].shape
        shape, dtype = (b, heads, rows, tensors[past].shape[3]), tensors[self.queries[0]].dtype
        q, context = f"{node.id}/queries", f"{node.id}/latents"
        tensors |= {name: Tensor(name, shape, dtype) for name in (q, context)}
        attention = Node(
            node.id,
            "CachedLatentAttention",
            (q, self.queries[1], new, new_key, past, past_key, mask),
            (context,),
            dict(attrs),
            scope=node.scope,
        )
        (result,) = node.outputs
        return [
            self.keys.product(q, node.scope, self.queries[0], q, False),
            attention,
            self.values.product(f"{node.id}/values", node.scope, context, result, True),
        ]


def latents(graph: Graph, presents: frozenset[str]) -> dict[str, Latent]:
    """Attention -> what it is over latents, of those whose keys and values are made of what a cache
    continues as is said above. presents: names of that."""
    by_attention = {}
    for node in graph.nodes:
        if node.op == "Attention" and (latent := _latent(graph, node, presents)):
            by_attention[node.id] = latent
    return by_attention


def absorbed(latents_by_attention: Mapping[str, Latent]) -> frozenset[str]:
    """The matrices that steps do not multiply latents with."""
    return frozenset(
        s.weight for latent in latents_by_attention.values() for s in (latent.keys, latent.values)
    )


def _latent(graph: Graph, node: Node, presents: frozenset[str]) -> Latent | None:
    q, k, v = node.inputs[:3]
    parts, queries = _maker(graph, k), _maker(graph, q)
    if not (_joins_two(parts) and _joins_two(queries) and _alike_for_heads(graph, node)):
        return None
    assert parts and queries
    (key_source, shared), (query_source, rotated) = parts.inputs, queries.inputs
    keys, values = (_spread(graph, name, presents) for name in (key_source, v))
    expand = _maker(graph, shared)
    if keys is None or values is None or expand is None or keys.latent != values.latent:
        return None
    key, (first, second) = expand.inputs[0], graph.shapes((query_source, key_source))
    if expand.op != "Expand" or key not in presents or first[3] != second[3]:
        return None
    return Latent((query_source, rotated), keys.latent, key, keys, values)


def _maker(graph: Graph, name: str) -> Node | None:
    """The node that makes a tensor."""
    maker = graph.producer.get(name)
    return None if maker is None else graph.nodes[maker]


def _joins_two(node: Node | None) -> bool:
    """Whether features of two tensors are put side by side."""
    return (
        node is not None
        and node.op == "Concat"
        and node.attrs["axis"] == 3
        and len(node.inputs) == 2
    )


def _alike_for_heads(graph: Graph, node: Node) -> bool:
    """Whether an attention has a mask, the same for all heads."""
    mask = graph.tensors[node.inputs[3]].shape if len(node.inputs) > 3 and node.inputs[3] else ()
    return len(mask) > 1 and (len(mask) < 3 or mask[-3] == 1)


def _spread(graph: Graph, name: str, presents: frozenset[str]) -> Spread | None:
    """How keys or values [B, H, T, D] are made of latents [B, 1, T, R]: their product with a matrix
    [B, T, H * M], of each head's M all columns or some that are cut out behind one another."""

    def made(name: str, *ops: str) -> Node | None:
        """The node that makes a tensor, where it is one of these."""
        node = _maker(graph, name)
        return node if node and node.op in ops else None

    start = 0
    if cut := made(name, "Split", "Slice"):
        column = _first_column(graph, cut, name)
        if column is None:
            return None
        name, start = cut.inputs[0], column
    heads = made(name, "Transpose")
    apart = heads and heads.attrs["perm"] == HEADS_LAST and made(heads.inputs[0], "Reshape")
    product = apart and made(apart.inputs[0], "MatMul")
    if not product or product.attrs.get("trans_a") or product.inputs[1] not in graph.weights:
        return None
    flat = made(product.inputs[0], "Reshape")
    latent = flat.inputs[0] if flat else ""
    b, h, t, m = graph.tensors[name].shape
    shapes = graph.shapes((product.outputs[0], product.inputs[0]))
    if latent not in presents or shapes != ((b, t, h * m), (b, t, graph.tensors[latent].shape[3])):
        return None
    transposed = bool(product.attrs.get("trans_b"))
    return Spread(latent, product.inputs[1], start, transposed)


def _first_column(graph: Graph, node: Node, name: str) -> int | None:
    """Where the columns `name` begin in the operand that a node cuts; None where it cuts another
    dim, or leaves some out between."""
    if node.op == "Split":
        before = node.outputs[: node.outputs.index(name)]
        return sum(graph.tensors[o].shape[3] for o in before) if node.attrs["axis"] == 3 else None
    plain = node.attrs["axes"] == (3,) and node.attrs["steps"] == (1,)
    return node.attrs["starts"][0] if plain else None  # type: ignore[index,return-value]
