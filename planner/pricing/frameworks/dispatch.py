"""Exchanges of routed experts' rows as frameworks and engines make them.

Emitted programs send a row as often as it has experts, beside it how many rows come and their
shares, and for the backward pass a row again. Frameworks save the rows that came: of three
exchanges of the backward pass two are left. Where the runtime says so (Runtime.rows_once), kernels
made for it (DeepEP, HybridEP) send a row once to each device that has an expert of it, and over the
network once to each node, write to all receivers at once, and numbers and shares travel with the
rows. Engines that serve use such kernels in any case: for prompts, where the profile says so, those
that send a row once to each node, and others for what has few rows, steps among them, that send a
row by itself to each of its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from costmodels.collectives import DISPATCH
from costmodels.runtimes import Runtime
from planner.analysis.facts import GraphFacts
from planner.execution.collective import CollectiveUse, inner_collectives
from planner.execution.layout_flow import Flow
from planner.execution.plan import Plan
from planner.execution.save_policies import BLOCK
from planner.graph.ir import Graph, Node
from planner.ops import operator_of
from planner.ops.expert_load import ROUTED_EXPERTS, expert_nodes
from planner.ops.experts import exchanges
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Axes
from planner.sharding.rule import Split

FEW = 4
"""Rows, in float8 too, have more than a quarter of the bytes of the widest exchange; their numbers,
scales and shares have less."""
FAR = 40
"""Nodes before a choice of experts that are looked at for one of groups."""
EXCHANGE = "all-to-all"
BACKWARD = 2 / 3
"""Of the exchanges of an emitted program's backward pass those that frameworks make: not the one
that sends rows again."""


@dataclass(frozen=True)
class Dispatch:
    """kind: of collective. axes: over which rows travel to experts. rows_bytes: what one exchange
    sends of rows; 0 where their numbers and shares are sent beside them. reached: devices, or
    nodes, that a row goes to, over the experts that it goes to."""

    kind: str
    axes: Axes
    rows_bytes: int
    reached: float

    def share(self, kind: str, payload_bytes: float, phase: str) -> float:
        """The part of the payload of a collective inside the experts' kernel of an emitted program
        that a framework sends; 0 where it has no such collective."""
        if kind != EXCHANGE or FEW * payload_bytes < self.rows_bytes:
            return float(not self.rows_bytes)
        return self.reached * (BACKWARD if phase == "backward" else 1.0)


def dispatch_of(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> Dispatch | None:
    """How the rows of node i travel; None where none do."""
    node, rule = base.graph.nodes[i], base.rules[i]
    if node.op != ROUTED_EXPERTS:
        return None
    inner = inner_collectives(
        node, rule, split, base.grad, pricer.sizes, pricer.itemsize("float32")
    )
    sent = [
        (collective.axes, collective.payload_bytes)
        for collective in inner
        if collective.of.kind == EXCHANGE
    ]
    if not sent:
        return None
    axes, rows_bytes = max(sent, key=lambda exchange: exchange[1])
    if pricer.runtime.serves and (generates(base.graph) or not pricer.runtime.rows_once):
        return Dispatch(DISPATCH, axes, rows_bytes, 1.0)
    if not pricer.runtime.rows_once:
        return Dispatch(EXCHANGE, axes, 0, 1.0)
    return Dispatch(DISPATCH, axes, rows_bytes, reached(base, i, pricer, axes))


def dispatched(
    base: GraphFacts, flow: Flow, pricer: Pricer, uses: Iterable[CollectiveUse]
) -> Iterator[CollectiveUse]:
    """Collectives with the exchanges of experts' rows as frameworks and engines make them."""
    i, _ = next(expert_nodes(base.graph), (-1, 0))
    dispatch = dispatch_of(base, i, flow.split(i), pricer) if i >= 0 else None
    for use in uses:
        if dispatch is None or not use.inside or set(use.axes) != set(dispatch.axes):
            yield use
        elif share := dispatch.share(use.kind, use.payload_bytes, use.phase):
            kind = dispatch.kind if use.kind == EXCHANGE else use.kind
            yield replace(use, kind=kind, payload_bytes=int(use.payload_bytes * share))


def generates(graph: Graph) -> bool:
    """Whether a graph is a step of generation: it reads a cache."""
    if "generates" not in graph.memo:
        graph.memo["generates"] = any(operator_of(n.op).caches for n in graph.nodes)
    return bool(graph.memo["generates"])


def beside(base: GraphFacts, plan: Plan, runtime: Runtime) -> bool:
    """Whether a framework can run other microbatches' kernels beside a plan's exchanges, as
    Megatron's overlap_moe_expert_parallel_comm does: not where whole blocks are recomputed, and of
    pipeline stages those that interleave. DualPipe does in any case."""
    i, _ = next(expert_nodes(base.graph), (-1, 0))
    sent = i >= 0 and exchanges(base.rules[i], plan.splits[base.graph.nodes[i].id])
    passes = plan.stages == 1 or plan.virtual_stages > 1
    return bool(sent and passes and runtime.exchange_slows and plan.recompute != BLOCK)


def reached(base: GraphFacts, i: int, pricer: Pricer, axes: Axes) -> float:
    """Nodes that a row of node i goes to, of devices in one node the devices, over the experts that
    it goes to, its choices spread evenly: n (1 - (1 - 1/n)^k) / k, n those that hold experts which
    the router chooses among."""
    spans = [s.size for s in pricer.topology.group(pricer.mesh, axes) if s.size > 1]
    n = float(prod(spans[1:]) if len(spans) > 1 else prod(spans))
    top = base.graph.tensors[base.graph.nodes[i].inputs[1]].shape[-1]
    groups, chosen = choice_groups(base.graph, i)
    n = n * chosen / groups if n >= groups else spread(n, chosen)
    return spread(n, top) / top


def spread(places: float, choices: int) -> float:
    """Different places that independent choices come to on average."""
    return places * (1 - (1 - 1 / places) ** choices) if places > 1 else 1.0


def choice_groups(graph: Graph, i: int) -> tuple[int, int]:
    """Equal groups of neighbouring experts, and of how many of them a router takes a token's, where
    it chooses groups first (DeepSeek-AI 2024, DeepSeek-V3, node-limited routing); (1, 1) for
    others. Of the choices that lead to node i's, that of groups has no weights and fewer than
    experts to choose among."""
    key = "choice groups", i
    if key not in graph.memo:
        graph.memo[key] = _choice_groups(graph, i)
    known: tuple[int, int] = graph.memo[key]
    return known


def _choice_groups(graph: Graph, i: int) -> tuple[int, int]:
    node = graph.nodes[i]
    experts = graph.tensors[node.inputs[4]].shape[0]
    dims = len(graph.tensors[node.inputs[1]].shape)
    waiting, seen = [node.inputs[1]], set[int]()
    while waiting and len(seen) < FAR:
        j = graph.producer.get(waiting.pop())
        if j is None or j in seen:
            continue
        seen.add(j)
        chooses = graph.nodes[j]
        groups, chosen = _choice(graph, chooses)
        flat = groups and len(graph.tensors[chooses.inputs[0]].shape) == dims
        if flat and 1 <= chosen < groups < experts and experts % groups == 0:
            return groups, chosen
        waiting += [n for n in chooses.inputs if n and n not in graph.weights]
    return 1, 1


def _choice(graph: Graph, node: Node) -> tuple[int, int]:
    """Among how many a node chooses, and how many of them; (0, 0) where it does not."""
    k, axis = node.attrs.get("k"), node.attrs.get("axis", -1)
    if not isinstance(k, int) or not isinstance(axis, int) or len(node.outputs) != 2:
        return 0, 0
    return graph.tensors[node.inputs[0]].shape[axis], k
