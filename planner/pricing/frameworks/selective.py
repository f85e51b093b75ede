"""What frameworks compute again under selective recompute ("block-keep" of a plan).

torchtitan's policy goes by operator: attention, experts, collectives and every second product of a
block are saved, all else runs again. Megatron makes modules again by name (recompute_modules),
those that take much room for little time: norms, the widening of latents (DeepSeek's queries and
keys), what experts' activation leaves, and beside routed experts the dense layers and the shared
experts whole.
"""

from __future__ import annotations

from costmodels.runtimes import Runtime
from planner.analysis.facts import GraphFacts
from planner.execution.save_policies import BLOCK
from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS
from planner.ops.loss import CROSS_ENTROPY
from planner.ops.shape import SPLIT
from planner.pricing.frameworks.kernels import role
from planner.pricing.frameworks.stages import attentions_before
from planner.pricing.pricer import Pricer

NORMS, LATENTS, ROUTED, DENSE, SHARED = "norms", "latents", "routed", "dense", "shared"
"""Modules: norms, products that widen latents, what routed experts' activation leaves, dense
layers' two products with what is between, shared experts."""
PRODUCTS = ("product", "into residual")


def made_again(base: GraphFacts, i: int, runtime: Runtime) -> bool:
    """Whether a node runs a second time. What routed experts save of a row is for
    planner.pricing.frameworks.memory.rows_bytes to tell."""
    key, memo = ("selective recompute", runtime.remakes_modules), base.graph.memo
    if key not in memo:
        memo[key] = _of_modules(base.graph) if runtime.remakes_modules else _by_operator(base)
    return i in memo[key]


def runs_again(base: GraphFacts, recompute: str, pricer: Pricer) -> frozenset[int]:
    """The nodes that run a second time under a way to recompute (costmodels.frameworks.step_time):
    all of the blocks, and of layers before them, or what of that `made_again` says."""
    run = base.dealt[0] if pricer.mesh.stages > 1 and base.dealt is not None else None
    first, period, repeats = run or max(
        base.runs, key=lambda run: run[1] * run[2], default=(0, 0, 1)
    )
    key = "runs again", first, period, repeats, recompute, pricer.runtime.remakes_modules
    memo, nodes = base.graph.memo, base.graph.nodes
    if key not in memo:
        begins = 0 if attentions_before(base, first) else first
        memo[key] = frozenset(
            i
            for i in range(begins, first + period * repeats)
            if not operator_of(nodes[i].op).free
            and (recompute == BLOCK or made_again(base, i, pricer.runtime))
        )
    known: frozenset[int] = memo[key]
    return known


def modules(graph: Graph) -> tuple[str, ...]:
    """The modules of a model that are made again one by one; none of a model of dense layers
    without latents, whose norms are fused into the products that read them."""
    nodes_of = _modules(graph)
    return tuple(m for m in (NORMS, LATENTS, ROUTED, DENSE, SHARED) if nodes_of.get(m))


def _of_modules(graph: Graph) -> frozenset[int]:
    """The nodes of all modules but routed experts, whose products are not made again."""
    named = (nodes for name, nodes in _modules(graph).items() if name != ROUTED)
    norms = {i for i in range(len(graph.nodes)) if role(graph, i) == "norm"}
    return frozenset(norms.union(*named))


def _by_operator(base: GraphFacts) -> frozenset[int]:
    """All nodes but attention, experts, sums of the residual stream and every second product of a
    block, the first among them."""
    first, period, repeats = max(base.runs, key=lambda r: r[1] * r[2], default=(0, 0, 1))
    recomputed, products = set[int](), 0
    for i in range(len(base.graph.nodes)):
        if period and first <= i < first + period * repeats and (i - first) % period == 0:
            products = 0
        kind = role(base.graph, i)
        if kind in PRODUCTS:
            products += 1
            if products % 2 == 0:
                recomputed.add(i)
        elif kind not in ("attention", "residual", ROUTED_EXPERTS, CROSS_ENTROPY):
            recomputed.add(i)
    return frozenset(recomputed)


def _modules(graph: Graph) -> dict[str, frozenset[int]]:
    """Module -> its nodes, where there are some; {} of a dense model without latents."""
    if "modules" not in graph.memo:
        graph.memo["modules"] = _nodes_of_modules(graph)
    known: dict[str, frozenset[int]] = graph.memo["modules"]
    return known


def _nodes_of_modules(graph: Graph) -> dict[str, frozenset[int]]:
    every = range(len(graph.nodes))
    latents = frozenset(i for i in every if _widens_latent(graph, i))
    routed = frozenset(i for i in every if graph.nodes[i].op == ROUTED_EXPERTS)
    if not latents and not routed:
        return {}
    nodes_of = {NORMS: frozenset(i for i in every if role(graph, i) == "norm")}
    nodes_of |= {LATENTS: latents, ROUTED: routed, DENSE: frozenset(), SHARED: frozenset()}
    sent = {_source(graph, graph.nodes[i].inputs[0]) for i in routed}
    for i in every if routed else ():
        if nodes := _dense_layer(graph, i):
            read = {_source(graph, graph.nodes[j].inputs[0]) for j in nodes if j != i}
            nodes_of[SHARED if read & sent else DENSE] |= nodes
    return nodes_of


def _dense_layer(graph: Graph, i: int) -> frozenset[int]:
    """The nodes of the dense layer whose second product is node i: that, the products before it,
    and what goes element by element between them; empty where node i is none."""
    between, first, stack = set[int](), set[int](), [graph.nodes[i].inputs[0]]
    if role(graph, i) not in PRODUCTS:
        return frozenset()
    while stack:
        j = graph.producer.get(stack.pop(), -1)
        if j < 0 or j in between:
            continue
        if role(graph, j) in PRODUCTS:
            first.add(j)
        elif operator_of(graph.nodes[j].op).kind:  # a norm, attention, experts
            return frozenset()
        else:
            between.add(j)
            stack += [name for name in graph.nodes[j].inputs if name]
    if not first or all(operator_of(graph.nodes[j].op).free for j in between):
        return frozenset()  # a product of a product is no layer with an activation
    return frozenset({i, *between, *first})


def _source(graph: Graph, name: str) -> str:
    """The tensor that others are views of."""
    while (j := graph.producer.get(name, -1)) >= 0 and operator_of(graph.nodes[j].op).free:
        name = graph.nodes[j].inputs[0]
    return name


def _widens_latent(graph: Graph, i: int) -> bool:
    """Whether a node is a product behind a norm of a product's result."""
    if role(graph, i) not in PRODUCTS:
        return False
    before = graph.producer.get(graph.nodes[i].inputs[0], -1)
    if before < 0 or role(graph, before) != "norm":
        return False
    latent = graph.producer.get(graph.nodes[before].inputs[0], -1)
    if latent >= 0 and graph.nodes[latent].op == SPLIT:
        latent = graph.producer.get(graph.nodes[latent].inputs[0], -1)
    return latent >= 0 and role(graph, latent) == "product"
