"""What a search knows about a graph before it looks at any mesh: rules, gradients, repeated blocks,
and which nodes and tensors are alike."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import chain

from costmodels.liveness import PassingGradients
from planner.analysis.alike_layers import alike_in_blocks
from planner.analysis.axis_roles import purposes
from planner.analysis.basics import BasicFacts, repeat_starts, saved_in
from planner.analysis.batch_factor import batch_factors
from planner.analysis.columns_rows import RANK_DIMS
from planner.analysis.passing import find_passing
from planner.analysis.recompute_demand import (
    AlikeDemand,
    TensorRead,
    alike_demands,
    demand_of,
    find_demanded,
)
from planner.analysis.residuals import find_gathered, find_residuals
from planner.analysis.saved_collectives import Paths, find_saved_collectives
from planner.analysis.stage_places import places
from planner.execution.collective import float32_sizes
from planner.execution.loops import carried_tensors, stacked_weights
from planner.execution.pipeline import LEAST_FLOPS_SHARE, stage_assignment
from planner.execution.recompute import dots
from planner.graph.ir import Graph, Node
from planner.graph.repeats import classes, find_runs
from planner.ops import operator_of
from planner.ops.control import Region, region
from planner.ops.cost import Product
from planner.ops.lookup import gradient_tensors, rule_of
from planner.sharding.rule import PENDING, Rule, Split

STRUCTURE = (
    "carried",
    "begins_turns",
    "biases",
    "copied_apart",
    "after_products",
    "saved_collective_paths",
    "dealt",
    "demanded",
    "saved_counts",
    "loops",
    "own",
    "passing",
    "repeated",
    "recomputed",
    "looped",
    "residuals",
    "gathered",
    "stacks",
    "still",
    "epilogue",
    "turns",
    "gated",
    "tensor_edges",
)
"""Derived parts of a GraphFacts that follow from the nodes and how they are wired, whatever the
extents."""

OWN_KERNELS = ("attention", "experts")
"""Kinds of operators whose kernels compilers fuse nothing into."""


@dataclass(frozen=True)
class TensorEdge:
    """Tensors that link the same classes of nodes in the same way.

    name: the first of them. uses: (class of the reading node, operand slot, how many of its nodes
    read it there). maker: class of the producer and which of its results, None for inputs and
    weights. count: how many there are.
    """

    name: str
    uses: tuple[tuple[int, int, int], ...]
    maker: tuple[int, int] | None
    count: int


@dataclass(frozen=True)
class GraphFacts(BasicFacts):
    """What does not depend on the mesh: what the analyses of this room find, each worked out when
    it is first asked for."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        *,
        training: bool,
        fold: bool = True,
        cut_anywhere: bool = False,
        runs: tuple[tuple[int, int, int], ...] | None = None,
    ) -> GraphFacts:
        """Derive once per graph; `fold=False` gives every node its own decision. runs: its repeated
        blocks, where they are known."""
        if runs is None:
            runs = find_runs(graph) if fold else ()
        shared = tuple(classes(graph, runs))
        times: dict[int, int] = {}
        for c in shared:
            times[c] = times.get(c, 0) + 1
        grad = gradient_tensors(graph) if training else frozenset()
        return cls(graph, training, *_rules(graph, shared), grad, runs, shared, times, cut_anywhere)

    @classmethod
    def known(cls, graph: Graph, *, training: bool, fold: bool) -> GraphFacts:
        """The facts as `of` derives them, once for all searches of a graph."""
        key = "facts", training, fold
        if key not in graph.memo:
            graph.memo[key] = cls.of(graph, training=training, fold=fold)
        facts: GraphFacts = graph.memo[key]
        return facts

    @cached_property
    def alike(self) -> GraphFacts:
        """Facts of whose graph a node of each name takes as long: themselves, or those of the graph
        with other repeats."""
        return self

    @cached_property
    def tied(self) -> GraphFacts:
        """The facts that a search looks at: layers that are alike inside a block decide alike, too
        (planner.analysis.alike_layers)."""
        first_repeats = [i for first, period, _ in self.runs for i in range(first, first + period)]
        kinds = {
            i: (
                self.form(i),
                tuple(self.stacks.get(n) for n in self.graph.nodes[i].inputs),
                i in self.gated.nodes,
                i in self.looped,
            )
            for i in first_repeats
        }
        alike = alike_in_blocks(self.graph, self.runs, kinds)
        if not alike:
            return self
        shared = tuple(alike.get(first, first) for first in self.shared)
        times = Counter(shared)
        result = replace(self, shared=shared, times={c: times[c] for c in self.times if c in times})
        vars(result).update(untied=self, tied=result, alike=self.alike)
        return result

    @cached_property
    def untied(self) -> GraphFacts:
        """The facts that prices and programs are of: layers of a block decide apart."""
        return self

    @cached_property
    def variants(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """Class -> nodes of a repeat that take different times under the same split, each with how
        many are like it; of classes whose nodes all take the same nothing."""
        result = {}
        for c, nodes in self.nodes_in_repeat.items() if self.untied is not self else ():
            number: dict[tuple, list[int]] = {}
            for i in nodes:
                number.setdefault(self.untied.content(i), []).append(i)
            if len(number) > 1:
                result[c] = tuple((alike[0], len(alike)) for alike in number.values())
        return result

    @cached_property
    def demanded_alike(self) -> Mapping[int, AlikeDemand]:
        """What of `demanded` nodes of a class have in common
        (planner.analysis.recompute_demand)."""
        return alike_demands(self, self.demanded)

    def with_repeats(self, graph: Graph, runs: tuple[tuple[int, int, int], ...]) -> GraphFacts:
        """Facts of the same graph with other repeats of its runs, at least two of each."""
        result = GraphFacts.of(graph, training=self.training, runs=runs)
        vars(result)["alike"] = self.alike
        return result

    def at(self, graph: Graph) -> GraphFacts:
        """The base of the same graph at another batch: only what its extents say is worked out
        again."""
        result = GraphFacts(
            graph,
            self.training,
            *_rules(graph, self.shared),
            self.grad,
            self.runs,
            self.shared,
            self.times,
            self.cut_anywhere,
            self.runs_of_units,
            self.end_of_blocks,
            self.waiting,
        )
        vars(result).update({name: getattr(self, name) for name in STRUCTURE})
        if self.untied is not self:
            vars(result)["untied"] = self.untied.at(graph)
        return result

    def reachable(self, i: int, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        """Without splits that want a weight, an input or a constant as pending terms: only
        operators make those."""
        graph = self.graph
        if all(graph.nodes[i].inputs[slot] in graph.producer for slot in self.rules[i].linear):
            return splits
        return _settled(splits)

    def worthwhile(self, i: int, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        """The reachable splits that a search looks at: the rank of adapters stays whole. It is
        narrow, so that cutting it saves next to nothing, and with it each adapter of a block would
        have as many choices as the weight it stands beside."""
        reachable, ranks = self.reachable(i, splits), set[str]()
        for slot, name in enumerate(self.graph.nodes[i].inputs):
            if name in self.graph.weights and name in self.graph.trainable:
                ending = self.graph.labels.get(name, name).rpartition(".")[2]
                if ending in RANK_DIMS:
                    ranks.update(self.rules[i].operands[slot][RANK_DIMS[ending]])
        return tuple([s for s in reachable if ranks.isdisjoint(f for f, _ in s.pairs)])

    @cached_property
    def backward(self) -> Mapping[int, float]:
        """Node with products -> work of its backward pass as a multiple of its forward pass."""
        alike: dict[
            int, float
        ] = {}  # by id: nodes that are alike have their products in common, which `_dots` keeps
        for i, result in self._dots.items():
            if id(result) not in alike:
                alike[id(result)] = float(
                    sum(dot.flops * (dot.backward + dot.recomputed) for dot in result)
                    / Fraction(self.rules[i].flops)
                )
        return {i: alike[id(result)] for i, result in self._dots.items()}

    def flops_of(self, i: int) -> Fraction:
        """The FLOPs of `model_flops` that are node i's."""
        return sum((dot.flops * (1 + dot.backward) for dot in self._dots.get(i, ())), Fraction(0))

    @cached_property
    def model_flops(self) -> Fraction:
        """FLOPs of one microbatch over all devices when nothing is duplicated, padded or computed
        again."""
        alike = {id(result): result for result in self._dots.values()}  # by id, as for `backward`
        times = Counter(map(id, self._dots.values()))
        return sum(
            (
                times[key] * dot.flops * (1 + dot.backward)
                for key, result in alike.items()
                for dot in result
            ),
            Fraction(0),
        )

    @cached_property
    def _dots(self) -> Mapping[int, tuple[Product, ...]]:
        """Node with products -> its products, whole; nodes of a class have a rule in common."""
        alike: dict[tuple, tuple[Product, ...]] = {}
        result = {}
        for i, rule in enumerate(self.rules):
            if rule.flops:
                node = self.graph.nodes[i]
                key = (
                    self.shared[i],
                    tuple(map(self.grad.__contains__, node.inputs)),
                    self.grad.isdisjoint(node.outputs),
                )
                if key not in alike:
                    alike[key] = dots(self.graph, i, rule, self.grad)
                result[i] = alike[key]
        return result

    @cached_property
    def still(self) -> frozenset[str]:
        """Tensors outside repeated blocks that are the same in every microbatch: no input of the
        graph reaches them. Compilers take the forward collectives of those out of the loop
        (`planner.execution.collectives`)."""
        nodes = self.graph.nodes
        outside = {
            *self.graph.weights,
            *chain.from_iterable(
                [node.outputs for i, node in enumerate(nodes) if i not in self.repeated]
            ),
        } - {""}
        outside.difference_update(*[nodes[i].inputs for i in self.repeated])
        return frozenset(outside - self.graph.reached(self.graph.inputs))

    @cached_property
    def repeated(self) -> frozenset[int]:
        """Nodes of repeated blocks."""
        return frozenset(
            i
            for first, period, repeats in self.runs
            for i in range(first, first + period * repeats)
        )

    @cached_property
    def carried(self) -> frozenset[str]:
        """What the first repeats hand to the second ones: it is handed on as a loop does, nothing
        pending."""
        return carried_tensors(self.graph, self.loops)

    @cached_property
    def begins_turns(self) -> frozenset[int]:
        """Classes of element-wise operators of repeated blocks that read nothing but what the turn
        of the loop before handed on. No kernel reaches over turns, so that they fuse with nothing
        that is before them."""
        nodes, producer = self.graph.nodes, self.graph.producer
        second = (i for first, p, _ in self.loops for i in range(first + p, first + 2 * p))
        return frozenset(
            self.shared[i]
            for i in second
            if operator_of(nodes[i].op).fusible
            and (read := {n for n in nodes[i].inputs if n in producer})
            and read <= self.carried
        )

    @cached_property
    def biases(self) -> frozenset[int]:
        """Nodes that add a weight of one dim to a product that nothing else reads: on GPUs the
        product's own kernel does so as it writes its result."""
        graph = self.graph
        biases = set()
        for i, rule in enumerate(self.rules):
            if not rule.flops or operator_of(graph.nodes[i].op).kind != "product":
                continue
            readers = graph.consumers.get(graph.nodes[i].outputs[0], ())
            if len(readers) == 1 and graph.nodes[i].outputs[0] not in graph.outputs:
                node = graph.nodes[readers[0][0]]
                other = node.inputs[1 - readers[0][1]] if len(node.inputs) == 2 else ""
                bias = other in graph.weights and len(graph.tensors[other].shape) == 1
                if bias and operator_of(node.op).adds == (0, 1):
                    biases.add(readers[0][0])
        return frozenset(biases)

    @cached_property
    def after_products(self) -> frozenset[int]:
        """Element-wise operators of what a product, a convolution or a norm made, and of what such
        operators made of it in the order of its elements: TPUs' kernels compute them as they write
        their results, and their gradients as others read them."""
        graph, fused = self.graph, set[int]()
        from_kernels = {
            name
            for i, node in enumerate(graph.nodes)
            if operator_of(node.op).kind in ("product", "convolution", "norm")
            for name in node.outputs
        }
        for i, node in enumerate(graph.nodes):
            operator = operator_of(node.op)
            of_product = [n for n in node.inputs if n in from_kernels]
            if not of_product or not operator.fusible:
                continue
            last = {graph.tensors[n].shape[-1:] for n in (of_product[0], node.outputs[0])}
            if operator.free and len(last) == 1:
                from_kernels.add(node.outputs[0])
            elif not operator.passes_values and not operator.free:
                fused.add(i)
                from_kernels.update(n for n in node.outputs if n)
        return frozenset(fused)

    @cached_property
    def copied_apart(self) -> frozenset[tuple[int, int]]:
        """(class, operand, or -1 - k of result k) of nodes in loops whose tensor compilers copy
        into a stack and out of it also where the kernels that make and read it could do so: what
        enters a repeat, what norms read, and what kernels of ours read or make (attention,
        experts')."""
        graph, copied_everywhere = self.graph, dict[tuple[int, int], bool]()
        starts = repeat_starts(self.loops)

        @cache
        def apart(name: str) -> bool:
            maker = graph.producer.get(name)
            kinds = {operator_of(graph.nodes[i].op).kind for i, _ in graph.consumers.get(name, ())}
            own_kernel = (
                maker is not None and operator_of(graph.nodes[maker].op).kind in OWN_KERNELS
            )
            return own_kernel or not kinds.isdisjoint((*OWN_KERNELS, "norm"))

        for i in self.looped:
            node = graph.nodes[i]
            results = ((-1 - k, name) for k, name in enumerate(node.outputs))
            for slot, name in (*enumerate(node.inputs), *results):
                enters = slot >= 0 and saved_in(graph, starts, i, name) < 0
                key = self.shared[i], slot
                copied_everywhere[key] = copied_everywhere.get(key, True) and (
                    enters or apart(name)
                )
        return frozenset(key for key, copied in copied_everywhere.items() if copied)

    @cached_property
    def demanded(self) -> Mapping[int, TensorRead]:
        """See planner.analysis.recompute_demand."""
        return find_demanded(self)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """Nodes of repeated blocks that a recomputed block runs again before its backward pass:
        those whose results that reads, directly or through other nodes. Backward passes of gated
        units make what is inside themselves."""
        return demand_of(self).recomputed

    @cached_property
    def dealt(self) -> tuple[tuple[int, int, int], frozenset[int], frozenset[int]] | None:
        """The repeated block that is assigned to pipeline stages, with its early epilogue and
        shared prologue (planner.execution.pipeline.stage_assignment); None where it is too small a
        part of the graph (`LEAST_FLOPS_SHARE`), or stages are cut anywhere."""
        if self.cut_anywhere:
            return None
        result, products = (
            stage_assignment(self.graph, self.runs),
            [i for i, rule in enumerate(self.rules) if rule.flops],
        )
        if result is None:
            return None
        first, period, repeats = result[0]
        return (
            result
            if sum(first <= i < first + period * repeats for i in products)
            >= LEAST_FLOPS_SHARE * len(products)
            else None
        )

    def repeats_too_much(self, stages: int) -> bool:
        """Whether stages that share the blocks do more twice than stages that are cut anywhere:
        all of them run what comes before the blocks, in both passes, which takes three times the
        forward pass of it; the others run the whole forward pass again."""
        if self.dealt is None:
            return False
        first, early = self.dealt[0][0], self.dealt[1]
        before = sum(r.flops for i, r in enumerate(self.rules[:first]) if i not in early)
        return 3 * (stages - 1) * before > sum(r.flops for r in self.rules)

    @cached_property
    def places(self) -> Mapping[int, float]:
        """Nodes before which uneven pipeline stages may begin, where no repeated block is assigned
        to stages, and how many elements are handed over there."""
        return (
            places(self)
            if self.training and self.dealt is None and not self.graph.host_tables
            else {}
        )

    @cached_property
    def epilogue(self) -> frozenset[int]:
        """Nodes after the last repeated block: what they keep is gone before the gradients of
        repeated blocks are there."""
        return frozenset(
            range(max(self.repeated, default=len(self.graph.nodes)) + 1, len(self.graph.nodes))
        )

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Which turn of the forward pass each node runs in: odd numbers are those of the runs of
        repeated blocks, even ones of what is before, between and behind them. The backward pass has
        them the other way round, and what a turn saved is gone when an earlier one has its own.
        [nodes]"""
        ends = [end for first, p, times in self.runs for end in (first, first + p * times)]
        return tuple([bisect_right(ends, i) for i in range(len(self.graph.nodes))])

    @cached_property
    def last_run(self) -> int:
        """The turn of the last repeated blocks, -1 where there are none."""
        return 2 * len(self.runs) - 1

    @cached_property
    def handing_back(self) -> frozenset[int]:
        """Nodes behind the repeated blocks, in a loop or written out, whose result only the loss
        reads, which puts the gradient in its place; none where there are no such blocks."""
        graph = self.graph

        def readers(i: int) -> list[Node]:
            results = graph.nodes[i].outputs
            return [graph.nodes[j] for n in results for j, _ in graph.consumers.get(n, ())]

        behind = self.epilogue
        if self.end_of_blocks is not None:
            behind = frozenset(range(self.end_of_blocks, len(graph.nodes)))
        return frozenset(
            i
            for i in behind
            if readers(i) and all(operator_of(node.op).in_place for node in readers(i))
        )

    @cached_property
    def residuals(self) -> dict[tuple[int, int], str]:
        """See planner.analysis.residuals."""
        return find_residuals(self)

    @cached_property
    def gathered(self) -> dict[tuple[int, int], str]:
        """See planner.analysis.residuals.find_gathered."""
        return find_gathered(self, self.residuals)

    def has_its_place(self, i: int) -> bool:
        """Whether all results of node i are the graph's, of a forward pass alone, or lie where
        element-wise operators, one after the other, make one of them (a head's capped logits)."""
        return not self.training and i in self._having_their_place

    @cached_property
    def _having_their_place(self) -> frozenset[int]:
        """From the last node to the first: a chain of operators may be as long as the graph."""
        settled: set[int] = set()
        for i in reversed(range(len(self.graph.nodes))):
            results = [name for name in self.graph.nodes[i].outputs if name]
            if all(
                (i, -1 - k) in self.residuals or self._becomes_one_of(settled, name)
                for k, name in enumerate(results)
            ):
                settled.add(i)
        return frozenset(settled)

    def _becomes_one_of(self, settled: Set[int], name: str) -> bool:
        """Whether one element-wise operator alone reads a tensor, and is one of those whose result,
        as large, has its place. Those between convolutions are no such: they lie in another order
        of dims."""
        graph, reading = self.graph, self.graph.consumers.get(name, ())
        if len(reading) != 1 or graph.tensors[name].shape in self.images:
            return False
        node = graph.nodes[reading[0][0]]
        results, tensor = [graph.tensors[n] for n in node.outputs if n], graph.tensors[name]
        alike = [(t.shape, t.dtype) for t in results] == [(tensor.shape, tensor.dtype)]
        return alike and operator_of(node.op).fusible and reading[0][0] in settled

    @cached_property
    def passing(self) -> PassingGradients:
        """See costmodels.liveness.PassingGradients."""
        return find_passing(self)

    @cached_property
    def images(self) -> frozenset[tuple[int, ...]]:
        """Shapes of what convolutions read and make: [batch, channels, *extents]. What lies between
        them has the same."""
        result = {
            (node.inputs[0], *node.outputs)
            for node in self.graph.nodes
            if operator_of(node.op).kind == "convolution"
        }
        return frozenset(
            self.graph.tensors[name].shape for names in result for name in names if name
        )

    @cached_property
    def heads(self) -> frozenset[tuple[int, ...]]:
        """Shapes of what kernels of attention read and make, [batch, heads, positions, width]: the
        kernels ask for the width in lanes, however narrow it is."""
        attentions = [n for n in self.graph.nodes if operator_of(n.op).kind == "attention"]
        read = {name for node in attentions for name in (*node.inputs[:3], *node.outputs) if name}
        shapes = {self.graph.tensors[name].shape for name in read}
        return frozenset(shape for shape in shapes if len(shape) == 4)

    def kind_of(self, shape: tuple[int, ...]) -> str:
        """What arrays of a shape are to a device that stores whole tiles: image, heads or nothing
        of these."""
        return "image" if shape in self.images else "heads" if shape in self.heads else ""

    @cached_property
    def saved_counts(self) -> Mapping[tuple[int, int], tuple[int, int, int, int]]:
        """(class, slot as in `residuals` and `gathered`) -> how many of the class's nodes save it,
        those of the epilogue aside; how many of those save what enters a repeat; how many, in the
        first repeat, save what is made in it; and how many are of the epilogue. Recomputed blocks
        save all that enters and one repeat's own, of one run at a time. Results of a forward pass
        alone are there all the time, whoever makes them."""
        starts = repeat_starts(self.runs)
        counts: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        for (i, slot), name in (self.residuals | self.gathered).items():
            repeat, key = saved_in(self.graph, starts, i, name), (self.shared[i], slot)
            a, b, c, d = counts.get(key, (0, 0, 0, 0))
            if i in self.epilogue and self.training:
                counts[key] = a, b, c, d + 1
            else:
                counts[key] = a + 1, b + (repeat < 0), c + (repeat == 0), d
        return counts

    @cached_property
    def saved_collective_paths(self) -> Mapping[int, tuple[int, Paths]]:
        """See planner.analysis.saved_collectives."""
        return find_saved_collectives(self)

    def saved_collective_bytes(self, i: int, itemsize: Callable[[str], float]) -> float:
        """Bytes, over all devices and repeats, of what recomputed blocks surely keep of results of
        collectives where those of class i leave terms to be added up."""
        repeats, paths = self.saved_collective_paths.get(i, (0, ()))
        tensors = self.graph.tensors
        return repeats * sum(
            min(tensors[n].elements * itemsize(tensors[n].dtype) for n in path) for path in paths
        )

    @cached_property
    def regions(self) -> Mapping[int, Region]:
        """Nodes with bodies -> how their splits reach the nodes inside."""
        return {
            i: region(node, self.graph) for i, node in enumerate(self.graph.nodes) if node.bodies
        }

    @cached_property
    def batch_factors(self) -> tuple[str, ...]:
        """See planner.analysis.batch_factor."""
        return batch_factors(self)

    @cached_property
    def roles(self) -> Mapping[int, Mapping[str, str]]:
        """See planner.analysis.axis_roles.purposes."""
        return purposes(self, self.batch_factors)

    @cached_property
    def own(self) -> frozenset[str]:
        """Weights that a single node reads, in a single slot: they have no decision of their
        own."""
        return frozenset(n for n in self.graph.weights if len(self.graph.consumers.get(n, ())) == 1)

    @cached_property
    def stacks(self) -> Mapping[str, tuple[int, int]]:
        """Weights of repeated blocks -> (first node of the run, of how many repeats one array holds
        them)."""
        return stacked_weights(self.graph, self.runs)

    @cached_property
    def heaviest(self) -> int:
        """First node of the run whose repeats have the largest weights; -2 without any."""
        result = dict[int, float]()
        for name, (first, repeats) in self.stacks.items():
            result[first] = result.get(first, 0.0) + self.graph.tensors[name].elements / repeats
        return max(result, key=lambda first: result[first], default=-2)

    @cached_property
    def reduced(self) -> Mapping[tuple[tuple[int, ...], int], int]:
        """(shape, repeats of a block whose weights are one array) -> how many trained weights are
        so."""
        return Counter(
            (self.graph.tensors[n].shape, self.stacks.get(n, (0, 1))[1])
            for n in self.graph.weights
            if n in self.grad
        )

    @cached_property
    def kinds(self) -> Mapping[int, int]:
        """class -> a number; nodes of equal numbers have the same splits at the same prices on
        every mesh."""
        result, kind_of = dict[tuple, int](), {}
        for i in self.times:
            node = self.graph.nodes[i]
            slots = (
                *enumerate(node.inputs),
                *((-1 - k, o) for k, o in enumerate(o for o in node.outputs if o)),
            )
            counts = tuple(
                [
                    (self.saved_counts.get((i, slot)), self.stacks.get(n) if slot >= 0 else None)
                    for slot, n in slots
                    if n
                ]
            )
            kind_of[i] = result.setdefault(
                (
                    self.content(i),
                    tuple((self.untied.content(j), n) for j, n in self.variants.get(i, ())),
                    counts,
                    self.saved_collective_bytes(i, float32_sizes),
                    i in self.gated.nodes,
                    i in self.looped,
                ),
                len(result),
            )
        return kind_of

    def content(self, i: int) -> tuple:
        """What the splits of a class and their prices follow from, but for how often things are
        (how many of its nodes keep an operand, how many repeats a weight has); the same in every
        process."""
        return (
            *self.form(i),
            self.rules[i].flops,
            self.rules[i].inner,
            i in self.begins_turns,
            i in self.biases,
            i in self.after_products,
        )

    def form(self, i: int) -> tuple:
        """What the splits of a node and the layouts that they ask for follow from; the same in
        every process."""
        graph, rule, node = self.graph, self.rules[i], self.graph.nodes[i]
        line = (
            rule.operands,
            rule.results,
            tuple(rule.sizes.items()),
            tuple(sorted(rule.whole)),
            tuple(sorted(rule.linear)),
            tuple(sorted(rule.no_pad)),
            tuple(dict.fromkeys(inner.factor for inner in rule.inner)),
            tuple(rule.paired.items()),
            tuple(rule.most.items()),
            tuple(rule.fringe.items()),
            rule.spatial,
        )
        cells = tuple(
            [
                (
                    (
                        graph.tensors[n].shape,
                        graph.tensors[n].dtype,
                        n in graph.weights,
                        n in self.own,
                        n in graph.producer,
                        n in self.grad,
                    )
                    if n
                    else None
                )
                for n in node.inputs
            ]
        )
        outs = tuple(
            [
                (graph.tensors[o].shape, graph.tensors[o].dtype, o in self.grad)
                for o in node.outputs
                if o
            ]
        )
        attrs = tuple(sorted(node.attrs.items())) if node.bodies else None
        return (
            node.op,
            line,
            cells,
            outs,
            self.batch_factors[i],
            i in self.repeated,
            i in self.epilogue,
            attrs,
        )

    @cached_property
    def heavy_in_blocks(self) -> GraphFacts:
        """The facts of products, norms and sums in repeated blocks alone, with what links these: a
        plan takes at least what they take, which is most of it."""
        heavy = {self.shared[i] for i in self.repeated if self._weighs(i)}
        tensor_edges = []
        for edge in self.tensor_edges:
            uses = tuple(use for use in edge.uses if use[0] in heavy)
            maker = edge.maker if edge.maker and edge.maker[0] in heavy else None
            if len(uses) > 1 or (uses and (maker or uses[0][2] > 1)):
                tensor_edges.append(replace(edge, uses=uses, maker=maker))
        _ = self.roles, self.kinds  # which the rest of the graph has a say in
        result = copy(self)
        times = {i: n for i, n in self.times.items() if i in heavy}
        vars(result).update(times=times, tensor_edges=tuple(tensor_edges))
        return result

    def _weighs(self, i: int) -> bool:
        """Whether node i is a product, a norm or a sum of two tensors."""
        operator = operator_of(self.graph.nodes[i].op)
        return bool(self.rules[i].flops) or operator.kind == "norm" or operator.adds == (0, 1)

    @cached_property
    def tensor_edges(self) -> tuple[TensorEdge, ...]:
        """The tensors that link decisions, alike ones together, in order of first use. Constants,
        inputs and weights with one reader link nothing."""
        graph, shared, untied_class = self.graph, self.shared, self.untied.shared
        # What a repeat hands on is handed on as a loop does, which layers inside it do not.
        handed_on = {untied_class[graph.producer[n]] for n in self.carried if n in graph.producer}
        count: dict[tuple, int] = {}
        first: dict[tuple, str] = {}
        for name, uses in graph.consumers.items():
            maker = graph.producer.get(name)
            if maker is None and (len(uses) == 1 or name in graph.constants):
                continue  # stored, or handed in, as its only reader wants it
            source = None
            if maker is not None:
                outputs = graph.nodes[maker].outputs
                k = outputs.index(name)
                source = shared[maker], k - outputs[:k].count("")
            key = (
                source or name,
                tuple([(shared[i], slot) for i, slot in uses]),
                name in self.grad,
                maker is not None and untied_class[maker] in handed_on,
            )
            if key in count:
                count[key] += 1
            else:
                count[key], first[key] = 1, name
        return tuple(
            TensorEdge(
                first[key],
                tuple((*use, times) for use, times in Counter(key[1]).items()),
                key[0] if isinstance(key[0], tuple) else None,
                n,
            )
            for key, n in count.items()
        )


@cache
def _settled(splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """The splits that leave nothing pending: the same object for the same splits."""
    return tuple(s for s in splits if not s.axes(PENDING))


def _rules(graph: Graph, shared: Sequence[int]) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """The rule of each node, and why it has none of its own where that is so; nodes of a class have
    theirs in common."""
    known: dict[int, tuple[Rule, str]] = {}
    for i, node in enumerate(graph.nodes):
        known[i] = known[shared[i]] if shared[i] in known else rule_of(node, graph)
    return tuple(rule for rule, _ in known.values()), tuple(reason for _, reason in known.values())
