"""What a recomputed block runs again, whatever the layouts (`demand_of`); and where it keeps
results of collectives (recompute=block-keep), as far as pairs of layouts say it.

A node is recomputed where its result, or what is made of it, is read backward and no collective
lies between the two: what a collective made is saved, and nothing asks for what was before it
(planner.execution.recompute). Of each node one path is looked at, the shortest inside its repeat
from its result to an operand that a gradient reads (`find_demanded`). A path is a row of reads of
tensors, and a read may take a reshard: from the layout that the tensor is made in to the one that
its reader needs. The node is spared from running again only if some reshard of its path has a
collective. So

    spared(node) <= the first read of its path takes a collective, or the next node of the path
    is recomputed for its own readers and is spared

and which reshards have a collective forward the links of a space say. A read of a tensor with a
shared layout is two reshards, to that and from it; one that no link has may have a collective
whatever the layouts. What is in a gated unit is never recomputed for the block
(planner.execution.gated_units), and its operands are read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from planner.ops.residuals import reads

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


class TensorRead(NamedTuple):
    """One read on a path: of a tensor, by a node (its number in the graph).

    again: the node is recomputed if nothing spares it; else its gradient reads the tensor.
    """

    tensor: str
    reader: int
    again: bool


class AlikeDemand(NamedTuple):
    """What most nodes of a class have in common of their paths. first_reads: the first read of each
    of these nodes' paths, in the first repeat; share: the part of the class's nodes that they are.
    """

    first_reads: tuple[TensorRead, ...]
    share: float


class Demand(NamedTuple):
    """What recomputed blocks make before their backward pass. recomputed: nodes, of all repeats.
    saved_by_name: tensors of first repeats that a policy saves where the backward pass asks for
    them; asked_for: those of them that it asks for -> the number of repeats."""

    recomputed: frozenset[int]
    saved_by_name: frozenset[str]
    asked_for: Mapping[str, int]


def demand_of(base: BasicFacts, saved_by_name: frozenset[str] = frozenset()) -> Demand:
    """The nodes whose results the backward pass reads, directly or through other nodes, and that no
    saved tensor spares. Backward passes of gated units make what is inside themselves."""
    graph, result, asked_for = base.graph, set[int](), dict[str, int]()
    saved_by_name -= base.gated.tensors
    for first, period, repeats in base.loops:
        maker_of = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        read_backward = [
            graph.nodes[i].inputs[slot]
            for i in range(first, first + period)
            for slot in reads(graph.nodes[i], base.grad).slots
        ]
        recomputed: set[int] = set()
        while read_backward:
            name = read_backward.pop()
            i = maker_of.get(name, -1)
            if name in saved_by_name:
                asked_for[name] = repeats
            elif i >= 0 and i not in recomputed and i not in base.gated.nodes:
                recomputed.add(i)
                read_backward += graph.nodes[i].inputs
        result.update(i + r * period for i in recomputed for r in range(repeats))
    return Demand(frozenset(result), saved_by_name, asked_for)


def find_demanded(base: BasicFacts) -> Mapping[int, TensorRead]:
    """Node of a first repeat -> the first read of a shortest path, inside the repeat, from its
    result to an operand that a gradient reads. Readers come before what they read."""
    graph, result = base.graph, dict[int, TensorRead]()
    for first, period, _ in base.loops if base.training else ():
        maker_of = {o: i for i in range(first, first + period) for o in graph.nodes[i].outputs if o}
        queue = deque(
            TensorRead(graph.nodes[i].inputs[slot], i, False)
            for i in range(first, first + period)
            for slot in sorted(reads(graph.nodes[i], base.grad).slots)
        )
        while queue:
            read = queue.popleft()
            i = maker_of.get(read.tensor, -1)
            if i >= 0 and i not in result and i not in base.gated.nodes:
                result[i] = read
                queue.extend(TensorRead(n, i, True) for n in graph.nodes[i].inputs if n)
    return result


def alike_demands(
    base: BasicFacts, demanded: Mapping[int, TensorRead]
) -> Mapping[int, AlikeDemand]:
    """Class -> the path that most of its nodes have: over results of the same numbers to readers of
    the same classes, of which each has the path that is its own class's here. Where layers inside a
    block decide alike, paths lead to different readers in some (the last layer's results are read
    in the next repeat); these have no entry."""
    path_of, nodes_of = dict[int, tuple](), dict[int, list[int]]()
    for i, read in demanded.items():  # readers come before what they read
        k = base.graph.nodes[i].outputs.index(read.tensor)
        rest = path_of[read.reader] if read.again else None
        path_of[i] = k, base.shared[read.reader], rest
        nodes_of.setdefault(base.shared[i], []).append(i)
    class_path = dict[int, tuple]()
    result = {}
    for c, nodes in nodes_of.items():
        common = Counter(
            path
            for path in map(path_of.__getitem__, nodes)
            if path[2] is None or class_path.get(path[1]) == path[2]
        )
        if common:
            (class_path[c], count), *_ = common.most_common(1)
            first_reads = tuple(demanded[i] for i in nodes if path_of[i] == class_path[c])
            result[c] = AlikeDemand(first_reads, count / len(base.nodes_in_repeat[c]))
    return result
