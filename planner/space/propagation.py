"""Plans from what the user gives, without a choice left to search: modes hybrid and propagate.

hybrid      what the user says of parameters holds; the others stay whole. Axis "data" cuts the
batch and nothing else, and operators without parameters
            follow their neighbours however costs least.
propagate   each annotated operator is cut as it says. The others, and what an annotation leaves
open, take the split that agrees on most dims (weighed by
            elements) with the layouts of their neighbours, with as few axes as do; a split only
            grows. Operators without parameters go first, there and back until none changes; then
            one with parameters, in the order of the graph, and again. What no annotation reaches
            stays whole.
"""

from __future__ import annotations

from math import prod

from planner.analysis.axis_roles import role_named
from planner.analysis.facts import GraphFacts
from planner.machine.topology import Mesh
from planner.sharding.candidates import candidates
from planner.sharding.rule import Limits, Split
from planner.space.families import Allowed

Dims = tuple[tuple[str, ...], ...]
MODES = ("hybrid", "propagate")


def by_hand(base: GraphFacts, mesh: Mesh, pinned: Allowed, named: Allowed) -> Allowed:
    """Hybrid: of the splits that the names of axes leave (planner.space.families.as_named),
    operators that read a parameter no pin speaks of use data axes alone."""
    weights = set(base.graph.weights)
    data = {a for a, _ in mesh.shape if role_named(a) == "data"}
    allowed = dict(named)
    for c in base.times:
        if c not in pinned and weights.intersection(base.graph.nodes[c].inputs):
            allowed[c] = tuple(s for s in named[c] if s.used <= data) or (Split(),)
    return allowed


def propagated(base: GraphFacts, mesh: Mesh, pinned: Allowed) -> Allowed:
    """Propagate: one split for every class of nodes."""
    result = Spread(base, mesh).run(pinned)
    return {c: (result.get(c, Split()),) for c in base.times}


def _unlike(base: GraphFacts) -> tuple[int, ...]:
    """One node of each class and surroundings: the others of repeated blocks meet the same
    neighbours, and would decide the same."""
    graph, shared = base.graph, base.shared

    def met(name: str) -> object:
        maker = graph.producer.get(name)
        return (
            (shared[maker], graph.nodes[maker].outputs.index(name))
            if maker is not None
            else read(name)
        )

    def read(name: str) -> object:
        return tuple(dict.fromkeys((shared[j], slot) for j, slot in graph.consumers.get(name, ())))

    first: dict[object, int] = {}
    for i, node in enumerate(graph.nodes):
        first.setdefault(
            (shared[i], *(met(n) for n in node.inputs), *(read(n) for n in node.outputs)), i
        )
    return tuple(first.values())


class Spread:
    """Propagation on one mesh, from any annotations."""

    def __init__(self, base: GraphFacts, mesh: Mesh) -> None:
        self.base, self.sizes, self.order = base, dict(mesh.shape), tuple(a for a, _ in mesh.shape)
        self._nodes = _unlike(base)
        self._open = dict[
            int, tuple[Split, ...]
        ]()  # splits of a class that no annotation speaks of
        self._left = dict[
            tuple[int, int, Split], Dims
        ]()  # layouts of results and operands (operand k as -1 - k) of a class under a split

    def run(self, pinned: Allowed) -> dict[int, Split]:
        """The split of every class of nodes that the annotations reach. pinned: the splits that
        they leave an annotated class, which begins with the least."""
        self.pinned = pinned
        self.chosen = {c: min(splits, key=lambda s: len(s.used)) for c, splits in pinned.items()}
        self._met = dict[
            int, tuple[object, ...]
        ]()  # what a node was last decided by: the same again changes nothing
        while self._follow(weights=False) or self._follow(weights=True):
            pass
        return self.chosen

    def _follow(self, weights: bool) -> bool:
        """Nodes without parameters take after their neighbours, there and back; of those with
        parameters the first that can. Whether any did."""
        graph, changed = self.base.graph, False
        for i in (*self._nodes, *reversed(self._nodes)):
            reads = any(n in graph.weights for n in graph.nodes[i].inputs)
            if reads == weights and self._decide(i):
                changed = True
                if weights:
                    break
        return changed

    def _decide(self, i: int) -> bool:
        """Give a node's class the split that agrees with most of what its neighbours have, and
        keeps what it has. Whether that is a new one."""
        base = self.base
        graph, c, node = base.graph, base.shared[i], base.graph.nodes[i]
        outputs = [o for o in node.outputs if o]
        operands = {k: dims for k, n in enumerate(node.inputs) if n and any(dims := self._made(n))}
        results = {k: dims for k, n in enumerate(outputs) if any(dims := self._wanted(n))}
        now = self.chosen.get(c, Split())
        met = (now, operands, results)
        if not (operands or results) or self._met.get(i) == met:
            return False
        self._met[i] = met
        if c not in self.pinned and c not in self._open:
            self._open[c] = base.reachable(
                i, candidates(base.rules[i], self.sizes, Limits(pending=False))
            )

        def agreed(split: Split) -> int:
            result = [
                (graph.tensors[node.inputs[k]], dims, self._layout(i, -1 - k, split))
                for k, dims in operands.items()
            ]
            result += [
                (graph.tensors[outputs[k]], dims, self._layout(i, k, split))
                for k, dims in results.items()
            ]
            return sum(
                prod(tensor.shape) * sum(a == b for a, b in zip(theirs, ours, strict=True) if a)
                for tensor, theirs, ours in result
            )

        wider = (
            s
            for s in self.pinned.get(c) or self._open[c]
            if all(s.axes(f)[: len(axes)] == axes for f, axes in now.pairs)
        )
        best = max(wider, key=lambda s: (agreed(s), -len(s.used)), default=now)
        if agreed(best) <= agreed(now):
            return False
        self.chosen[c] = best
        return True

    def _layout(self, i: int, k: int, split: Split) -> Dims:
        """The layout of result k of a node under a split, or of operand -1 - k."""
        key = (self.base.shared[i], k, split)
        if key not in self._left:
            rule = self.base.rules[i]
            self._left[key] = (
                rule.operand(-1 - k, split, self.order)
                if k < 0
                else rule.result(k, split, self.order)
            ).dims
        return self._left[key]

    def _made(self, name: str) -> Dims:
        """The layout a tensor has: its producer's, or for inputs and weights that of their first
        decided reader; () where nothing says."""
        graph, shared = self.base.graph, self.base.shared
        maker = graph.producer.get(name)
        if maker is None:
            return self._wanted(name)
        split = self.chosen.get(shared[maker])
        return (
            ()
            if split is None
            else self._layout(
                maker, [o for o in graph.nodes[maker].outputs if o].index(name), split
            )
        )

    def _wanted(self, name: str) -> Dims:
        """The layout the first decided reader of a tensor wants, () without one."""
        for j, slot in self.base.graph.consumers.get(name, ()):
            split = self.chosen.get(self.base.shared[j])
            if split is not None:
                return self._layout(j, -1 - slot, split)
        return ()
