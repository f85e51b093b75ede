"""Tables of integer cuts (per operator, per operand, per dim) as plans: which devices hold which
piece.

A table says how finely a dim is cut, not by which devices. The machine becomes a mesh of one axis
per prime factor (8 = p0 p1 p2), and each operator's cuts are dealt axes in every order worth trying
(`placements`). Among those, the dealing that moves the fewest bytes is looked for:

    1. the bytes between each producer and consumer are tables over their dealings, and
       `planner.solvers.dp` minimises their sum
    2. values with several consumers are converted once, which the sum overstates: single nodes are
       changed until nothing moves fewer bytes

so that a table is judged at its kindest reading. Reshapes decide nothing: each takes the split that
suits its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import gcd, prod

import numpy as np

from benchmarks.neutral import ANY_PADDING
from planner.execution.collective import float32_sizes, inner_collectives
from planner.execution.layout_flow import weight_plan
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.ops.lookup import gradient_tensors, rule_of
from planner.sharding.layout import Axes, Layout, local_shape, replicated, reshard_tree
from planner.sharding.rule import Dim, Rule, Split, legal
from planner.solvers.problem import Budget, Problem

Cuts = Sequence[Sequence[int]]
"""Per operand, per dim, into how many pieces it is cut."""
Mesh = tuple[tuple[str, int], ...]

ALL_ORDERS = 3  # axes up to which every order is dealt
SWEEPS = 8


def lay(graph: Graph, table: Mapping[str, Cuts], devices: int) -> Plan:
    """A training plan over `prime_mesh(devices)` with the cuts of `table` (node id -> cuts per
    operand; every node but Reshapes is there).

    Raises ValueError, naming the node, for a table that the net's operators cannot have.
    """
    mesh = prime_mesh(devices)
    rules = tuple(rule_of(node, graph)[0] for node in graph.nodes)
    options: list[tuple[Split, ...]] = []
    for node, rule in zip(graph.nodes, rules, strict=True):
        if node.op == "Reshape":
            options.append(())
            continue
        if node.id not in table:
            raise ValueError(f"{node.id} ({node.op}) has no cuts")
        try:
            options.append(placements(rule, factor_cuts(rule, table[node.id]), mesh))
        except ValueError as e:
            raise ValueError(
                f"{node.id} ({node.op}), cuts {[list(c) for c in table[node.id]]}: {e}"
            ) from e
    reading = Reading(graph, rules, options, mesh)
    reading.start()
    reading.descend()
    return Plan(
        mesh,
        {
            node.id: split
            for node, split in zip(graph.nodes, reading.chosen, strict=True)
            if split.pairs
        },
    )


def prime_mesh(devices: int) -> Mesh:
    """One axis per prime factor, smallest first: 12 -> p0=2, p1=2, p2=3."""
    return tuple((f"p{i}", p) for i, p in enumerate(_primes(devices)))


def _primes(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def factor_cuts(rule: Rule, cuts: Cuts) -> dict[str, int]:
    """Pieces per factor, from the pieces per dim of each operand. Raises ValueError where they
    disagree or do not fit the rule."""
    if len(cuts) != len(rule.operands):
        raise ValueError(f"{len(rule.operands)} operands")
    found: dict[str, int] = {}
    for dims, row in zip(rule.operands, cuts, strict=True):
        if len(dims) != len(row):
            raise ValueError(f"an operand of rank {len(dims)}")
        for dim, pieces in zip(dims, row, strict=True):
            left = pieces
            for (
                f
            ) in dim:  # the minor factor of a compound dim is cut only by what the major one leaves
                n = left if len(dim) == 1 else gcd(left, rule.sizes[f])
                left //= n
                if found.setdefault(f, n) != n:
                    raise ValueError(f"the same extent is cut into {found[f]} and {n} pieces")
            if left != 1:
                raise ValueError(f"{pieces} pieces of a dim of {prod(rule.sizes[f] for f in dim)}")
    return {f: n for f, n in found.items() if n > 1}


def placements(rule: Rule, cuts: Mapping[str, int], mesh: Mesh) -> tuple[Split, ...]:
    """Splits with these pieces per factor: axes dealt to the factors in each order of the factors,
    then turned within each factor.

    The axes are dealt forwards and backwards, on small meshes in every order. Raises ValueError
    when they cannot be dealt so, or the rule forbids it.
    """
    orders = permutations(mesh) if len(mesh) <= ALL_ORDERS else (mesh, mesh[::-1])
    found: dict[Split, None] = {}
    for order in orders:
        for factors in permutations(cuts):
            dealt = _deal(order, factors, cuts)
            if dealt is None:
                raise ValueError(
                    f"{prod(cuts.values())} pieces on {prod(n for _, n in mesh)} devices"
                )
            turned = [[axes[i:] + axes[:i] for i in range(len(axes))] for axes in dealt]
            for axes in product(*turned):
                found[Split.of(dict(zip(factors, axes, strict=True)))] = None
    splits = tuple(s for s in found if legal(rule, s, dict(mesh), ANY_PADDING))
    if not splits and found:
        raise ValueError("not a split of this operator")
    return splits or (Split(),)


def _deal(
    order: Sequence[tuple[str, int]], factors: Sequence[str], cuts: Mapping[str, int]
) -> list[list[str]] | None:
    left, dealt = list(order), []
    for f in factors:
        taken = []
        for prime in _primes(cuts[f]):
            axis = next((a for a in left if a[1] == prime), None)
            if axis is None:
                return None
            left.remove(axis)
            taken.append(axis[0])
        dealt.append(taken)
    return dealt


class Reading:
    """A dealing of axes to every node (`chosen`), and the bytes it moves in one optimizer step of
    float32.

    The bytes of a value depend on its producer and consumers only, so a change is judged by the
    values around its node.
    """

    def __init__(
        self, graph: Graph, rules: Sequence[Rule], options: Sequence[tuple[Split, ...]], mesh: Mesh
    ) -> None:
        self.graph, self.rules, self.mesh = graph, rules, mesh
        self.sizes, self.order, self.empty = dict(mesh), tuple(a for a, _ in mesh), Plan(mesh, {})
        self.grad = gradient_tensors(graph)
        self.slot = {
            o: k for node in graph.nodes for k, o in enumerate(o for o in node.outputs if o)
        }
        self.options = list(options)
        for i, own in enumerate(options):
            if not own:
                self.options[i] = self._followers(i)
        self.chosen = [own[0] for own in self.options]
        self._around = [
            tuple(dict.fromkeys(n for n in (*node.inputs, *node.outputs) if n))
            for node in graph.nodes
        ]

    def total(self) -> int:
        """Payload bytes of one step under the splits chosen."""
        names = dict.fromkeys(n for values in self._around for n in values)
        return sum(map(self.value_bytes, names)) + sum(
            self._inner_bytes(i, split) for i, split in enumerate(self.chosen)
        )

    def descend(self) -> None:
        """Change one node at a time while that moves fewer bytes."""
        for _ in range(SWEEPS):
            if not sum(self._improve(i) for i in range(len(self.chosen))):
                return

    def _improve(self, i: int) -> bool:
        if len(self.options[i]) == 1:
            return False
        old = self.chosen[i]
        prices = []
        for split in (old, *self.options[i]):
            self.chosen[i] = split
            prices.append(sum(map(self.value_bytes, self._around[i])) + self._inner_bytes(i, split))
        best = min(
            range(len(prices)), key=prices.__getitem__
        )  # the first: what is there stays where nothing is better
        self.chosen[i] = (old, *self.options[i])[best]
        return best > 0

    def start(self) -> None:
        """Choose by the bytes between pairs (module docstring, 1)."""
        from planner.solvers.dp import solve

        cost = [
            np.array([self._inner_bytes(i, s) for s in own], np.int64)
            for i, own in enumerate(self.options)
        ]
        edges: list[tuple[int, int]] = []
        of_edge: list[int] = []
        tables: list[np.ndarray] = []
        known: dict[tuple, int] = {}
        for i, node in enumerate(self.graph.nodes):
            for slot, name in enumerate(node.inputs):
                if not name or name in self.graph.constants:
                    continue
                needs = tuple(self._need(i, slot, s) for s in self.options[i])
                made = self.graph.producer.get(name)
                if made is None:
                    cost[i] = cost[i] + np.array(
                        [self._bytes(name, None, (need,)) for need in needs], np.int64
                    )
                    continue
                sources = tuple(self._made(name, s) for s in self.options[made])
                key = (
                    self.graph.tensors[name].shape,
                    self.graph.tensors[name].dtype,
                    name in self.grad,
                    sources,
                    needs,
                )
                if key not in known:
                    known[key] = len(tables)
                    tables.append(
                        np.array(
                            [[self._bytes(name, a, (b,)) for b in needs] for a in sources], np.int64
                        )
                    )
                edges.append((made, i))
                of_edge.append(known[key])
        problem = Problem(
            tuple(cost),
            np.array(edges, np.int64).reshape(-1, 2),
            np.array(of_edge, np.int64),
            tuple(tables),
        )
        found = solve(problem, Budget())
        self.chosen = [own[k] for own, k in zip(self.options, found.choice, strict=True)]

    def _inner_bytes(self, i: int, split: Split) -> int:
        """Payload of the collectives inside a kernel."""
        found = inner_collectives(
            self.graph.nodes[i],
            self.rules[i],
            split,
            frozenset(self.grad),
            self.sizes,
            float32_sizes("float32"),
        )
        return int(sum(x.payload_bytes * (x.forward + x.backward) for x in found))

    def _need(self, i: int, slot: int, split: Split) -> Layout:
        layout = self.rules[i].operand(slot, split, self.order)
        return (
            layout
            if self.graph.nodes[i].inputs[slot] in self.grad
            else Layout(layout.dims, layout.partial)
        )

    def _made(self, name: str, split: Split) -> Layout:
        return self.rules[self.graph.producer[name]].result(self.slot[name], split, self.order)

    def value_bytes(self, name: str) -> int:
        """Payload of bringing one value to its consumers, forward and back, and of reducing its
        gradient when it is a weight."""
        graph = self.graph
        made = graph.producer.get(name)
        source = None if made is None else self._made(name, self.chosen[made])
        needs = [self._need(i, slot, self.chosen[i]) for i, slot in graph.consumers.get(name, ())]
        if name in graph.outputs:
            held = source or (needs[0] if needs else replicated(len(graph.tensors[name].shape)))
            needs.append(held.stored)
        return self._bytes(name, source, tuple(needs))

    def _bytes(self, name: str, source: Layout | None, needs: tuple[Layout, ...]) -> int:
        tensor, trained, elements = self.graph.tensors[name], name in self.grad, 0
        if not needs or name in self.graph.constants:
            return 0
        if name in self.graph.weights:
            kept = weight_plan(self.graph, name, needs, self.empty, trained)
            source = Layout(kept.layout.dims, grad_partial=kept.grad_partial)
            elements += (
                prod(local_shape(tensor.shape, kept.layout, self.sizes)) if kept.grad_partial else 0
            )
        tree = reshard_tree(tensor.shape, source or needs[0].stored, needs, self.mesh, trained)
        assert tree is not None  # no operand of a table is partial
        for step in tree.steps():
            elements += step.forward_elements * bool(step.forward) + step.backward_elements * bool(
                step.backward and trained
            )
        return int(elements * float32_sizes(tensor.dtype))

    def _followers(self, i: int) -> tuple[Split, ...]:
        """Splits a Reshape may take: on from its producer, back from each consumer, none."""
        node, rule, graph = self.graph.nodes[i], self.rules[i], self.graph
        found: dict[Split, None] = {Split(): None}
        name = node.inputs[0]
        for split in self.options[graph.producer[name]] if name in graph.producer else ():
            found[self._along(rule, rule.operands[0], self._made(name, split).dims)] = None
        for j, slot in graph.consumers.get(node.outputs[0], ()):
            for split in self.options[j]:
                found[self._along(rule, rule.results[0], self._need(j, slot, split).dims)] = None
        return tuple(found)

    def _along(self, rule: Rule, dims: tuple[Dim, ...], axes: tuple[Axes, ...]) -> Split:
        """The split that keeps one side's cuts, as far as its factors divide: major factors
        first."""
        dealt: dict[str, list[str]] = {}
        left = dict(rule.sizes)
        for dim, cut in zip(dims, axes, strict=True):
            for a in cut:
                f = next((f for f in dim if left[f] > 1), None)
                if f is None or left[f] % self.sizes[a]:
                    break
                left[f] //= self.sizes[a]
                dealt.setdefault(f, []).append(a)
        split = Split.of(dealt)
        return split if legal(rule, split, self.sizes, ANY_PADDING) else Split()
