"""What a recomputed block runs again, whatever the layouts (`demand_of`); and where it keeps
results of collectives (recompute=block-keep), as far as pairs of layouts say it.

A node runs again where its result, or what is made of it, is read backward and no collective lies
on the way: what a collective made is kept, and nothing asks for what was before it
(planner.execution.recompute). Of each node one way is looked at, the shortest inside its repeat to
an operand that a gradient reads (`find_demanded`): the node is spared only if some hop of it has a
collective, a hop being the conversion of one tensor from the layout that it is made in to the one
that its next reader needs. So

    spared(node) <= its first hop has a collective, or the next node of its way runs again for its
    own readers and is spared

and which conversions have a collective forward the links of a space say. One over a hub is two
hops; one that no link has may have a collective whatever the layouts. What is in a gated unit never
runs again for the block (planner.execution.gated_units), and its operands are read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from planner.ops.residuals import reads

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


class Hop(NamedTuple):
    """A tensor on its way to a node that reads it; again: that node runs again if it is not spared,
    else its gradient reads it."""

    tensor: str
    reader: int
    again: bool


class AlikeDemand(NamedTuple):
    """What most nodes of a class have in common of their ways. hops: the first hops, of the first
    repeat; share: what part of the class's nodes they are of."""

    hops: tuple[Hop, ...]
    share: float


class Demand(NamedTuple):
    """What recomputed blocks make before their backward pass. again: nodes, of all repeats. kept:
    tensors of first repeats that are saved by name, if asked for; saved: those that are asked for,
    with the number of repeats."""

    again: frozenset[int]
    kept: frozenset[str]
    saved: Mapping[str, int]


def demand_of(base: BasicFacts, kept: frozenset[str] = frozenset()) -> Demand:
    """The nodes whose results the backward pass reads, directly or on the way to what it reads, and
    that no kept tensor spares. Backward passes of gated units make what is inside themselves."""
    graph, result, saved = base.graph, set[int](), dict[str, int]()
    kept -= base.gated.tensors
    for first, period, repeats in base.loops:
        maker_of = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        wanted = [
            graph.nodes[i].inputs[slot]
            for i in range(first, first + period)
            for slot in reads(graph.nodes[i], base.grad).slots
        ]
        again: set[int] = set()
        while wanted:
            name = wanted.pop()
            i = maker_of.get(name, -1)
            if name in kept:
                saved[name] = repeats
            elif i >= 0 and i not in again and i not in base.gated.nodes:
                again.add(i)
                wanted += graph.nodes[i].inputs
        result.update(i + r * period for i in again for r in range(repeats))
    return Demand(frozenset(result), kept, saved)


def find_demanded(base: BasicFacts) -> Mapping[int, Hop]:
    """Node of a first repeat -> the first hop of a shortest way, inside the repeat, from its result
    to an operand that a gradient reads. Readers come before what they read."""
    graph, result = base.graph, dict[int, Hop]()
    for first, period, _ in base.loops if base.training else ():
        maker_of = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        queue = deque(
            Hop(graph.nodes[i].inputs[slot], i, False)
            for i in range(first, first + period)
            for slot in sorted(reads(graph.nodes[i], base.grad).slots)
        )
        while queue:
            hop = queue.popleft()
            i = maker_of.get(hop.tensor, -1)
            if i >= 0 and i not in result and i not in base.gated.nodes:
                result[i] = hop
                queue.extend(Hop(n, i, True) for n in graph.nodes[i].inputs if n)
    return result


def alike_demands(base: BasicFacts, demanded: Mapping[int, Hop]) -> Mapping[int, AlikeDemand]:
    """Class -> the way that most of its nodes have: over results of the same numbers to readers of
    the same classes, of which each has the way that is its own class's here. Where layers inside a
    block decide alike, ways lead to different readers in some (the last layer's results are read
    in the next repeat); of these nothing is said."""
    ways, nodes_of = dict[int, tuple](), dict[int, list[int]]()
    for i, hop in demanded.items():  # readers come before what they read
        k = base.graph.nodes[i].outputs.index(hop.tensor)
        beyond = ways[hop.reader] if hop.again else None
        ways[i] = k, base.shared[hop.reader], beyond
        nodes_of.setdefault(base.shared[i], []).append(i)
    chosen = dict[int, tuple]()
    result = {}
    for c, nodes in nodes_of.items():
        common = Counter(
            way
            for way in map(ways.__getitem__, nodes)
            if way[2] is None or chosen.get(way[1]) == way[2]
        )
        if common:
            (chosen[c], count), *_ = common.most_common(1)
            hops = tuple(demanded[i] for i in nodes if ways[i] == chosen[c])
            result[c] = AlikeDemand(hops, count / len(base.nodes_in_repeat[c]))
    return result
