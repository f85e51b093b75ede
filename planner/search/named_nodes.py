"""Search nodes whose plans save values by name, before all others: a mesh and techniques each stand
for every policy of names.

Their bounds come first (planner.search.named_policy_bounds), least first, as far as they are below
the best plan. Of a node that stays below, the policy that its bound was found by is solved and
priced whole, with a name less after the other where its plan takes more than is left; when all else
was searched so are policies that differ from that of the best plan by one name, until none is
faster. What was not looked at stays part of the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.analysis.facts import GraphFacts
from planner.execution.block_values import names_there
from planner.execution.save_policies import PRESETS, is_named, offloaded_values, saved_names, saving
from planner.execution.techniques import RECOMPUTE
from planner.search.named_policy_bounds import NamedRelaxation, Outlook
from planner.search.node_bounds import SAME
from planner.search.relaxation import Relaxation
from planner.search.search_node import SearchNode
from planner.space.assemble import least_usage, seconds_of, usage_of
from planner.space.option_arrays import arrays_of
from planner.space.techniques import Techniques
from planner.space.variables import Space

SOLVES, POLICIES, NEARBY = 4, 2, 2
"""Search nodes that are solved at most, policies of one, and those beside a plan's that are priced
before the next is looked for."""


MESH, BY_OTHERS, MESH_SPACE, OWN_SPACE, DONE = range(-1, 4)
"""Stages of a node, called by what it is bounded in next; in its own space it is solved, too. The
first is of a node that stands for all of a mesh."""


@dataclass
class NamedNodes:
    """Those of one family. nodes: each with what is known of it (seconds), under recompute=block;
    relaxed: mesh -> its space; limit_bytes: of plans; offloads: whether values may wait in the
    host's memory; meshes: nodes that each stand for all of a mesh that is not expanded yet.

    bound, bound_of_all: no plan that saves values by name is below these, under the limit and
    whatever memory it takes.
    """

    nodes: list[tuple[float, SearchNode]]
    relaxed: dict[int, Relaxation]
    limit_bytes: float
    offloads: bool = False
    meshes: list[SearchNode] = field(default_factory=list)
    bound: float = math.inf
    bound_of_all: float = math.inf
    _known: dict[tuple[int, int], NamedRelaxation] = field(default_factory=dict)
    _free: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Mesh, microbatches and virtual stages -> bound of all ZeRO stages, whatever the memory."""
    _bases: dict[int, Relaxation] = field(default_factory=dict)
    """Mesh -> what its entries of the two above were found with."""
    _levels_of: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound = self.bound_of_all = min((least for least, _ in self.nodes), default=math.inf)

    def _levels(self, mesh: int) -> list[int]:
        """ZeRO stages of the nodes of a mesh."""
        if mesh not in self._levels_of:
            stages = {node.techniques.zero_stage for _, node in self.nodes if node.mesh == mesh}
            self._levels_of[mesh] = sorted(stages)
        return self._levels_of[mesh]

    def search(
        self,
        expand: Callable[[SearchNode], list[tuple[float, SearchNode]] | None],
        to_beat: Callable[[], float],
        own: Callable[[SearchNode], Space | None],
        solve: Callable[[SearchNode], object],
        over: Callable[[], bool],
    ) -> None:
        """Raise bounds and solve what stays below the best plan, of a node first the policy that
        saves nothing: where memory binds its plan is found at once, and leaves fewer to look at.
        expand: what is known of the nodes of a mesh, None where only its bound was raised; to_beat:
        seconds of the best plan; own: the space of a node's own microbatches; solve: to find and
        price plans of a node; over: whether time is. What was not expanded stays in `meshes`."""
        heap = [(least, BY_OTHERS, k) for k, (least, _) in enumerate(self.nodes)]
        heap += [(node.bound, MESH, k) for k, node in enumerate(self.meshes)]
        heapq.heapify(heap)
        looked, solved, free = 0, list[float](), list[float]()
        while heap and heap[0][0] < to_beat() * (1 - SAME) and not over():
            least, stage, k = heapq.heappop(heap)
            if stage == MESH:
                if (expanded := expand(self.meshes[k])) is None:
                    heapq.heappush(heap, (self.meshes[k].bound, MESH, k))
                    continue
                for opened in expanded:
                    heapq.heappush(heap, (opened[0], BY_OTHERS, len(self.nodes)))
                    self.nodes.append(opened)
                continue
            node = self.nodes[k][1]
            if stage == DONE or (stage == OWN_SPACE and looked == SOLVES):
                solved.append(least)
                continue
            if stage == BY_OTHERS:
                others = self._by_others(node, to_beat() * (1 - SAME))
                heapq.heappush(heap, (max(least, others), stage + 1, k))
                continue
            own_space = stage == OWN_SPACE
            if own_space:
                looked += 1
                solve(node)
                if least >= to_beat() * (1 - SAME):
                    solved.append(least)
                    continue
            space = own(node) if own_space else self.relaxed[node.mesh].space
            outlook = self._outlook(node, space, own_space, to_beat())
            if not own_space:
                free.append(max(least, outlook.free_s))
            for bound, policy in outlook.policies:
                if bound < to_beat() * (1 - SAME):
                    solve(replace(node, recompute=len(RECOMPUTE), values=(*RECOMPUTE, policy)))
            heapq.heappush(heap, (max(least, outlook.bound_s), stage + 1, k))
        self.meshes = [self.meshes[k] for _, stage, k in heap if stage == MESH]
        heap = [entry for entry in heap if entry[1] != MESH]
        unseen = [least for least, stage, _ in heap if stage < OWN_SPACE]
        self.bound = min([*solved, *(least for least, _, _ in heap)], default=math.inf)
        self.bound_of_all = min([*free, *unseen], default=math.inf)

    def _by_others(self, node: SearchNode, enough_s: float) -> float:
        """What is proven of a node whatever the memory, beside others of its mesh: by all ZeRO
        stages at once, and by fewer microbatches, as more only take longer; with pipeline stages by
        endless ones and the bubble, and by other virtual stages. enough_s: no more is needed."""
        relaxed, techniques = self.relaxed[node.mesh], node.techniques
        if relaxed.space.pricer.mesh.stages == 1:
            fewer = (
                s
                for (mesh, micro, _), s in self._free.items()
                if mesh == node.mesh and micro <= node.micro
            )
            best = max(fewer, default=0.0)
            return best if best >= enough_s else max(best, self._of_levels(node, node.micro, 1))
        best = self._of_levels(node, 0, 1) + relaxed.bubble_s(
            node.micro, node.virtual, node.schedule
        )
        for virtual in dict.fromkeys((1, node.virtual)):
            if best < enough_s:
                bound_s = self._of_levels(node, node.micro, virtual)
                if virtual != node.virtual:
                    bound_s = relaxed.by_virtual_stages(bound_s, techniques, node.micro, virtual)
                best = max(best, bound_s)
        return best

    def _of_levels(self, node: SearchNode, micro: int, virtual: int) -> float:
        """The bound of all ZeRO stages, worked out once."""
        key = node.mesh, micro, virtual
        if key not in self._free:
            at = replace(node.techniques, microbatches=micro, virtual_stages=virtual)
            self._free[key] = self._of_mesh(node).of_levels_s(at, self._levels(node.mesh))
        return self._free[key]

    def _of_mesh(self, node: SearchNode) -> NamedRelaxation:
        """The bounds that all nodes of a mesh share."""
        relaxed = self.relaxed[node.mesh]
        if self._bases.get(node.mesh) is not relaxed:  # not seen yet, or relaxed anew
            self._bases[node.mesh] = relaxed
            self._known[node.mesh, 0] = NamedRelaxation(relaxed, self.offloads)
            self._free = {key: s for key, s in self._free.items() if key[0] != node.mesh}
        return self._known[node.mesh, 0]

    def _outlook(
        self, node: SearchNode, space: Space | None, own_space: bool, below_s: float
    ) -> Outlook:
        """What is proven of a node in a space: its own, or that of its mesh."""
        techniques = node.techniques
        if space is None or least_usage(space, techniques, uncut=True) > self.limit_bytes:
            return Outlook(math.inf, 0.0)
        key = node.mesh, node.micro
        another = own_space and space is not self.relaxed[node.mesh].space
        if another and (relaxed := self._anew(key, space, below_s)) is not None:
            if relaxed.least(self._levels(node.mesh), below_s) >= below_s:
                return Outlook(below_s, below_s)
            self._known[key] = NamedRelaxation(relaxed, self.offloads)
        named = self._known.get(key) if own_space else None
        return (named or self._of_mesh(node)).outlook(
            techniques, self.limit_bytes, below_s, POLICIES if own_space else 0
        )

    def _anew(self, key: tuple[int, int], space: Space, below_s: float) -> Relaxation | None:
        """A relaxation of a space of a node's own microbatches, to be asked what is below so many
        seconds; None where the one before serves."""
        if (known := self._known.get(key)) is not None:
            return known.again_below(below_s)
        return Relaxation(space, self.relaxed[key[0]].scratch)


def nearby(
    space: Space, choice: Sequence[int], techniques: Techniques, limit_bytes: float, offloads: bool
) -> list[str]:
    """Policies beside that of a plan whose problem is faster and fits, the fastest first: with a
    name more or less, on the device or where that may be offloaded; where nothing is recomputed all
    names, and the presets."""
    at = arrays_of(space).first + np.asarray(choice)

    def seconds(recompute: str) -> float:
        return float(seconds_of(space, replace(techniques, recompute=recompute))[at].sum())

    now, ranked = seconds(techniques.recompute), list[tuple[float, str]]()
    for policy in dict.fromkeys(_beside(techniques.recompute, space.base, offloads)):
        if (least := seconds(policy)) < now:
            used = usage_of(space, replace(techniques, recompute=policy), choice)
            if sum(used) <= limit_bytes:
                ranked.append((least, policy))
    return [policy for _, policy in sorted(ranked)[:NEARBY]]


def with_a_name_less(space: Space, techniques: Techniques) -> str:
    """Of policies that save one name less of those on the device the one that is the fastest where
    every decision takes the option that is its fastest; "" where none is left."""
    first, away = arrays_of(space).first, offloaded_values(techniques.recompute)
    names = frozenset(saved_names(techniques.recompute))

    def least_s(policy: str) -> float:
        seconds = seconds_of(space, replace(techniques, recompute=policy))
        return float(np.minimum.reduceat(seconds, first).sum())

    fewer = [saving(names - {name}, away) for name in sorted(names - {*away})]
    saved = [policy for policy in fewer if is_named(policy)]
    return min(saved, key=lambda policy: (least_s(policy), policy), default="")


def _beside(recompute: str, base: GraphFacts, offloads: bool) -> Iterator[str]:
    named = names_there(base.graph, base.loops)
    if recompute == "none":
        yield saving(named)
        for names in PRESETS.values():
            yield saving(n for n in names if n in named)
        return
    offloaded = frozenset(offloaded_values(recompute))
    saved = frozenset(saved_names(recompute)) - offloaded
    for name in named:
        yield saving(saved ^ {name}, offloaded - {name})
        if offloads:
            yield saving(saved - {name}, offloaded ^ {name})
