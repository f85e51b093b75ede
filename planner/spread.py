"""Plans from what the user gives, without a choice left to search: modes hybrid and propagate.

    hybrid      what the user says of parameters holds; the others stay whole. Axis "data" cuts the batch and nothing else, and operators without parameters
                follow their neighbours however costs least.
    propagate   each annotated operator is cut as it says. The others, and what an annotation leaves open, take the split that agrees on most dims (weighed by
                elements) with the layouts of their neighbours, with as few axes as do; a split only grows. Operators without parameters go first, there and
                back until none changes; then one with parameters, in the order of the graph, and again. What no annotation reaches stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from planner.base import Base
from planner.families import Allowed
from planner.naming import role_named
from planner.rule import Limits, Split, candidates
from planner.topology import Mesh

Dims = tuple[tuple[str, ...], ...]
MODES = ("hybrid", "propagate")


def by_hand(base: Base, mesh: Mesh, pinned: Allowed, named: Allowed) -> Allowed:
    """Hybrid: of the splits that the names of axes leave (planner.families.as_named), operators that read a parameter no pin speaks of use data axes alone."""
    weights = set(base.graph.weights)
    data = {a for a, _ in mesh.shape if role_named(a) == "data"}
    out = dict(named)
    for c in base.times:
        if c not in pinned and weights.intersection(base.graph.nodes[c].inputs):
            out[c] = tuple(s for s in named[c] if s.used <= data) or (Split(),)
    return out


def propagated(base: Base, mesh: Mesh, pinned: Allowed) -> Allowed:
    """Propagate: one split for every class of nodes."""
    spread = _Spread(base, dict(mesh.shape), pinned)
    while spread.follow(weights=False) or spread.follow(weights=True):
        pass
    return {c: (spread.chosen.get(c, Split()),) for c in base.times}


class _Spread:
    """What is decided so far: a split per class of nodes."""

    def __init__(self, base: Base, sizes: Mapping[str, int], pinned: Allowed) -> None:
        self.base, self.sizes, self.order = base, sizes, tuple(sizes)
        self.chosen = {c: min(splits, key=lambda s: len(s.used)) for c, splits in pinned.items()}
        self._found = dict(pinned)

    def follow(self, weights: bool) -> bool:
        """Nodes without parameters take after their neighbours, there and back; of those with parameters the first that can. Whether any did."""
        graph, changed = self.base.graph, False
        nodes = range(len(graph.nodes))
        for i in (*nodes, *reversed(nodes)):
            reads = any(n in graph.weights for n in graph.nodes[i].inputs)
            if reads == weights and self._decide(i):
                changed = True
                if weights:
                    break
        return changed

    def _decide(self, i: int) -> bool:
        """Give a node's class the split that agrees with most of what its neighbours have, and keeps what it has. Whether that is a new one."""
        base, rule = self.base, self.base.rules[i]
        graph, c, node = base.graph, base.shared[i], base.graph.nodes[i]
        outputs = [o for o in node.outputs if o]
        operands = {k: dims for k, n in enumerate(node.inputs) if n and any(dims := self._made(n))}
        results = {k: dims for k, n in enumerate(outputs) if any(dims := self._wanted(n))}
        if not operands and not results:
            return False
        if c not in self._found:
            self._found[c] = base.reachable(i, candidates(rule, self.sizes, Limits(pending=False)))
        now = self.chosen.get(c, Split())

        def agreed(split: Split) -> int:
            found = [(graph.tensors[node.inputs[k]], dims, rule.operand(k, split, self.order).dims) for k, dims in operands.items()]
            found += [(graph.tensors[outputs[k]], dims, rule.result(k, split, self.order).dims) for k, dims in results.items()]
            return sum(prod(tensor.shape) * sum(a == b for a, b in zip(theirs, ours, strict=True) if a) for tensor, theirs, ours in found)

        wider = (s for s in self._found[c] if all(s.axes(f)[: len(axes)] == axes for f, axes in now.pairs))
        best = max(wider, key=lambda s: (agreed(s), -len(s.used)), default=now)
        if agreed(best) <= agreed(now):
            return False
        self.chosen[c] = best
        return True

    def _made(self, name: str) -> Dims:
        """The layout a tensor has: its producer's, or for inputs and weights that of their first decided reader; () where nothing says."""
        graph, shared = self.base.graph, self.base.shared
        at = graph.producer.get(name)
        if at is None:
            return self._wanted(name)
        split = self.chosen.get(shared[at])
        return () if split is None else self.base.rules[at].result([o for o in graph.nodes[at].outputs if o].index(name), split, self.order).dims

    def _wanted(self, name: str) -> Dims:
        """The layout the first decided reader of a tensor wants, () without one."""
        for j, slot in self.base.graph.consumers.get(name, ()):
            split = self.chosen.get(self.base.shared[j])
            if split is not None:
                return self.base.rules[j].operand(slot, split, self.order).dims
        return ()
