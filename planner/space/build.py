"""The space of plans on one mesh, and the arrays that price it.

Decisions (variables of the problem):
    op      one per class of nodes that share a decision (planner.graph.repeats): a split of its
            rule
    shared_layout
            one per tensor read by several operators: the layout it is brought to once, possibly
            with a second one derived from it
    weight  one per weight read by several operators: the layout it is stored in
Costs of an op are kernels forward and backward, collectives inside kernels, and the reduction of
the gradients of weights only it reads. Costs between variables are reshards, forward and (where a
gradient flows) backward, from planner.sharding.layout. Each is a figure of its own (forward,
backward, per ZeRO stage) so that one space serves every choice of technique:
planner.space.assemble adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.analysis.facts import GraphFacts, TensorEdge
from planner.ops.lookup import unread_gradients
from planner.ops.residuals import reads
from planner.pricing.gradient_sync import WeightCosts, no_weights
from planner.pricing.pricer import Pricer
from planner.sharding.layout import Axes
from planner.sharding.layout_table import LayoutColumn
from planner.sharding.rule import Limits, Split
from planner.space.node_options import Kinds, NodeOptions
from planner.space.variables import Link, OptionCosts, Space, Variable


class _Builder:
    """Builds a Space. Layouts are numbers of the pricer's layout table."""

    def __init__(
        self,
        base: GraphFacts,
        pricer: Pricer,
        limits: Limits,
        allowed: Mapping[int, tuple[Split, ...]],
        zero_axes: Axes,
        parts: int,
        seconds_alone: bool,
    ) -> None:
        self.base, self.pricer, self.parts = base, pricer, parts
        self.graph, self.layout_table, self.reshard_tables = (
            base.graph,
            pricer.layout_table,
            pricer.reshard_prices,
        )
        self.kinds = Kinds(base, pricer, limits, allowed, zero_axes, seconds_alone)
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.op_of: dict[int, int] = {}
        self._kind_of: Mapping[int, NodeOptions] = {}
        self._linked: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._shares: dict[LayoutColumn, np.ndarray] = {}

    def build(self) -> Space:
        self._kind_of = self.kinds.every()
        for i, kind in self._kind_of.items():
            self._op(i, kind)
        for edge in self.base.tensor_edges:
            self._connect(edge)
        self._outputs()
        return Space(self.base, self.pricer, self.variables, self.links, self.op_of, self.parts)

    def _op(self, i: int, kind: NodeOptions) -> None:
        times, self.op_of[i] = self.base.times[i], len(self.variables)
        v = Variable(
            name=self.graph.nodes[i].id,
            kind="op",
            count=times,
            costs=kind.costs,
            node=i,
            splits=kind.splits,
            flops=self.base.rules[i].flops * times,
        )
        self.variables.append(v)

    def _connect(self, edge: TensorEdge) -> None:
        """Link the producer of a tensor (or its storage) with its readers; the tables of reshards
        serve all tensors of the edge."""
        (reader, slot, times), *others = edge.uses
        if times > 1 or others:
            self._shared_layout(edge)
        else:
            assert edge.maker is not None
            self._link(
                edge,
                self.op_of[edge.maker[0]],
                self._result(edge.maker),
                (),
                self.op_of[reader],
                self._need(reader, slot),
                1,
            )

    def _need(self, i: int, slot: int) -> LayoutColumn:
        """Layouts of an operand that is there."""
        row = self._kind_of[i].needs[slot]
        assert row is not None
        return row

    def _result(self, maker: tuple[int, int]) -> LayoutColumn:
        """Layouts of a class's result."""
        return self._kind_of[maker[0]].results[maker[1]]

    def _shared_layout(self, edge: TensorEdge) -> None:
        """A variable for the layout that a tensor of several readers is brought to; options may
        have a second layout, derived from the first."""
        name, layout_table = edge.name, self.layout_table
        per_use = [(self.op_of[i], self._need(i, slot), times) for i, slot, times in edge.uses]
        options = self._shared_layout_options(name, [target for _, target, _ in per_use])
        shared, derived = zip(*options, strict=True)
        source = layout_table.column(shared)
        index = len(self.variables)
        self.variables.append(
            Variable(
                name=name,
                kind="weight" if name in self.graph.weights else "shared_layout",
                count=edge.count,
                costs=self._shared_layout_costs(edge, options),
                layouts=tuple(
                    (layout_table.layouts[s], layout_table.layouts[d] if d >= 0 else None)
                    for s, d in options
                ),
            )
        )
        if edge.maker is not None:
            self._link(
                edge, self.op_of[edge.maker[0]], self._result(edge.maker), (), index, source, 1
            )
        for b, target, times in per_use:
            self._link(edge, index, source, derived, b, target, times)

    def _shared_layout_options(
        self, name: str, targets: Sequence[LayoutColumn]
    ) -> tuple[tuple[int, int], ...]:
        """Layouts that a tensor of several readers may be brought to, each with one derived from
        it, or -1: numbers of the layout table. targets: what its readers want."""
        layout_table = self.layout_table
        wanted = dict.fromkeys(n for target in targets for n in target.layouts)
        plain = dict.fromkeys(layout_table.without_grad_partial(n) for n in wanted)
        options = dict.fromkeys(
            (n, -1)
            for n in (*plain, *wanted)
            if not (name in self.base.carried and layout_table.layouts[n].partial)
        ) or dict.fromkeys((n, -1) for n in plain)
        if name not in self.graph.weights:
            options.update(
                dict.fromkeys(
                    (layout_table.without_grad_partial(n), n)
                    for n in wanted
                    if layout_table.layouts[n].grad_partial
                )
            )
        return tuple(options)

    def _shared_layout_costs(
        self, edge: TensorEdge, options: Sequence[tuple[int, int]]
    ) -> OptionCosts:
        """A derived layout costs its reshard from the shared one; without one the diagonal, from
        the shared layout to itself, costs nothing."""
        name, layout_table, t = edge.name, self.layout_table, self.graph.tensors[edge.name]
        source = layout_table.column(tuple([s for s, _ in options]))
        last = layout_table.column(tuple([s if d < 0 else d for s, d in options]))
        forward, backward = self.reshard_tables.table(
            t.shape,
            self.pricer.itemsize(t.dtype),
            source.layouts,
            last.layouts,
            name in self.base.grad,
        )
        weights = no_weights(len(options))
        if name in self.graph.weights:
            read_backward = any(
                slot in reads(self.graph.nodes[i], self.base.grad).slots for i, slot, _ in edge.uses
            )
            weights = WeightCosts.of(
                self.kinds.weights.of(name, [s for s, _ in options], read_backward)
            )
        return OptionCosts.of_layouts(
            weights,
            forward[source.of, last.of] * self._forward_share(name),
            backward[source.of, last.of],
        )

    def _link(
        self,
        edge: TensorEdge,
        a: int,
        source: LayoutColumn,
        derived: Sequence[int],
        b: int,
        target: LayoutColumn,
        times: int,
    ) -> None:
        """Add the table of reshards from each option of a (a layout; derived: the layout that is
        already derived from each, or -1) to each option of b, so many of which read each
        tensor."""
        forward, backward = self._reshard_tables(edge, source, derived, target)
        if a == b:
            share = edge.count / self.variables[a].count  # one fewer than there are repeats
            self._add(self.variables[a], share * np.diag(forward), share * np.diag(backward))
        else:
            self.links.append(
                Link(
                    a,
                    b,
                    forward,
                    backward,
                    edge.count * times,
                    edge.name,
                    self._share(target, len(self.graph.tensors[edge.name].shape)),
                )
            )

    def _reshard_tables(
        self, edge: TensorEdge, source: LayoutColumn, derived: Sequence[int], target: LayoutColumn
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the reshards of `_link`, forward and backward; edges that are alike have their
        tables in common. [options of a, of b]"""
        t, grad = self.graph.tensors[edge.name], edge.name in self.base.grad
        times, carried = self._forward_share(edge.name), edge.name in self.base.carried
        # Columns of equal layouts are the same object, compared by identity (LayoutTable.column).
        has_backward = edge.name not in unread_gradients(self.graph, self.base.grad) or any(
            not self.base.grad.isdisjoint(self.graph.nodes[i].outputs) for i, _, _ in edge.uses
        )
        key = (t.shape, t.dtype, grad, has_backward, times, source, derived, target, carried)
        if key not in self._linked:
            place = source.of[:, None] * len(target.layouts) + target.of
            tables = self.reshard_tables.table(
                t.shape, self.pricer.itemsize(t.dtype), source.layouts, target.layouts, grad
            )
            forward, backward = (table.take(place) for table in tables)
            if carried:
                partial = np.array(
                    [bool(self.layout_table.layouts[n].partial) for n in target.layouts]
                )
                forward[:, partial[target.of]] = np.inf
            if derived:
                ready = np.array(derived)[:, None] == np.array(target.layouts)[target.of]
                forward[ready] = backward[ready] = 0.0
            forward *= times
            if not has_backward:
                backward = np.where(np.isinf(backward), backward, 0.0)
            self._linked[key] = forward, backward
        return self._linked[key]

    def _share(self, row: LayoutColumn, rank: int) -> np.ndarray:
        """The part of a tensor that a device has in each layout, padding aside. [options]"""
        if row not in self._shares:
            self._shares[row] = (1 / self.reshard_tables.pieces(row.layouts, rank).prod(axis=1))[
                row.of
            ]
        return self._shares[row]

    def _forward_share(self, name: str) -> float:
        """What part of its forward reshards a tensor needs in every microbatch: all, or its share
        of one where microbatches do not differ in it."""
        return 1 / self.parts if name in self.base.still else 1.0

    def _outputs(self) -> None:
        """Graph outputs are handed out without anything pending."""
        graph, layout_table = self.graph, self.layout_table
        for name in graph.outputs:
            maker = graph.producer.get(name)
            if maker is None or self.base.shared[maker] not in self.op_of:
                continue
            c, k = self.base.shared[maker], [o for o in graph.nodes[maker].outputs if o].index(name)
            source = self._result((c, k))
            columns = layout_table.column(
                tuple([layout_table.number(layout_table.layouts[s].stored) for s in source.layouts])
            )
            t = graph.tensors[name]
            forward, _ = self.reshard_tables.table(
                t.shape,
                self.pricer.itemsize(t.dtype),
                source.layouts,
                columns.layouts,
                name in self.base.grad,
            )
            v = self.variables[self.op_of[c]]
            self._add(v, forward[source.of, columns.of[source.of]] / v.count)

    def _add(
        self, v: Variable, forward_s: np.ndarray, backward_s: np.ndarray | float = 0.0
    ) -> None:
        """More seconds for each option of a variable."""
        v.costs = replace(
            v.costs,
            forward_s=v.costs.forward_s + forward_s,
            backward_s=v.costs.backward_s + backward_s,
        )


def build_space(
    base: GraphFacts,
    pricer: Pricer,
    *,
    limits: Limits = Limits(),  # noqa: B008
    allowed: Mapping[int, tuple[Split, ...]] | None = None,
    zero_axes: Axes = (),
    parts: int = 1,
    seconds_alone: bool = False,
) -> Space:
    """The space of one mesh. `allowed` restricts nodes (by class) to given splits: pins. parts:
    microbatches, one of which the base's graph is. seconds_alone: what only takes memory is left
    out, for bounds without a limit."""
    return _Builder(base, pricer, limits, allowed or {}, zero_axes, parts, seconds_alone).build()


def splits_of(space: Space, choice: tuple[int, ...]) -> dict[str, Split]:
    """node id -> split, for every node (repeats take their class's)."""
    base = space.base
    return {
        node.id: (
            space.variables[space.op_of[base.shared[i]]].splits[choice[space.op_of[base.shared[i]]]]
        )
        for i, node in enumerate(base.graph.nodes)
    }
