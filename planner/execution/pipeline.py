"""Pipeline stages: the repeats of one block assigned to places along the mesh axis "stage", and how
often each node of the graph runs in a step.

    prologue   what the blocks are given (embeddings, masks): every stage runs it for its own
               microbatch, so that only carried tensors travel
    blocks     the repeats of the block with the most parameters: stage i holds repeats
               i * blocks_per_stage up to (i + 1) * blocks_per_stage
    epilogue   head and loss: every stage runs it on what leaves the last one; all but the last
               stage's result is dropped. Nodes that only the epilogue reads belong to it, wherever
               the graph has them (`early_epilogue`); what both it and the blocks read is computed
               twice (`shared_prologue`)

Stages work in lock-step ticks. Stage i runs microbatch m forward in tick m + i; with S stages, m
microbatches need m + S - 1 ticks, S - 1 of them a bubble. Schedules:

    1f1b        backward in tick m + 2 (S - 1) - i: at most 2 S - 1 microbatches are in flight in a
                stage, waiting for their backward pass, and their residuals are saved
    gpipe       all forward ticks, then all backward: every tick's residuals are saved, head and
                loss are recomputed
    zb-h1       1f1b with the gradients of blocks' weights apart from the backward pass, all stages
                those of microbatch m in tick m + 2 (S - 1) (planner.execution.weights_apart): they
                take m ticks. Until then what the backward pass hands on is saved, of at most S
                microbatches
    interleaved 1f1b in finer pieces: a stage holds V virtual stages (chunks of blocks), chunk v of
                stage i being number v S + i, so that a microbatch passes all stages V times and a
                tick is a V-th as long. Microbatches go in groups of S, each group through one chunk
                after the other: work item n of a stage is microbatch s of group g in chunk v, n =
                g S V + v S + s, forward in tick n + i; its backward pass takes the chunks in
                reverse, in tick g S V + (V - 1 - v) S + s + S V + S - 2 - i. At most S (V + 1) - 1
                chunks' residuals are in flight. S divides m
    dualpipe    priced alone, as a framework runs it: microbatches enter at both ends, each device
                has the chunks of two stages, and exchanges of experts' rows of one microbatch run
                beside kernels of another (costmodels.frameworks.step_time). Its flow is 1f1b's

With S stages and m microbatches 1f1b, gpipe and zb-h1 need (m + S - 1) times a stage's forward and
backward pass, interleaved (m + (S - 1) / V) times; the prologue runs in every tick. The epilogue
runs m times, under gpipe in every tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain

from planner.execution.engine import Engine, engine_of
from planner.execution.plan import Plan
from planner.execution.techniques import DUALPIPE, ZB_H1
from planner.graph.ir import Graph, Node

LEAST_FLOPS_SHARE = 1 / 3
"""Part of a graph's FLOPs: repeated blocks with less are not assigned to stages, as all other nodes
would run on every stage (planner.execution.uneven_pipeline has other stages for them)."""
TICKS_BESIDE_IN_FLIGHT = {"1f1b": 1.5, "gpipe": 0.0, "interleaved": 1.5, ZB_H1: 1.5, DUALPIPE: 1.5}
"""Ticks whose residuals are in memory beside those in flight, measured with the GPU compiler on
GPT-2 medium, 2 and 4 stages: 1.3 to 1.5."""


BUBBLE = -1
"""The number of the microbatch in passes of the bubble, which are for none."""


@dataclass(frozen=True)
class Schedule:
    """How microbatches pass through stages (module docstring): what each stage runs in every tick.
    kind: of SCHEDULES. virtual_stages: chunks that a stage holds."""

    stages: int
    microbatches: int
    kind: str
    virtual_stages: int = 1

    @property
    def ticks(self) -> int:
        """Lock-step ticks in which stages run forward, and as many in which they run backward."""
        return self.microbatches * self.virtual_stages + self.stages - 1

    @property
    def read_ticks(self) -> int:
        """Ticks whose forward passes are read. Of a single piece under 1F1B the last has none: its
        loop of one tick is unrolled, and compilers drop what nobody reads."""
        return self.ticks - (self.microbatches * self.virtual_stages == 1 and self.kind != "gpipe")

    @property
    def weight_ticks(self) -> int:
        """Ticks in which gradients of weights are made that wait for the backward pass: of zb-h1
        those in which every stage has some to make."""
        return self.microbatches if self.kind == ZB_H1 else self.ticks

    @property
    def first_backward(self) -> int:
        """The first tick with a backward pass."""
        return self.ticks if self.kind == "gpipe" else self.stages * self.virtual_stages - 1

    @property
    def in_flight(self) -> int:
        """Ticks whose residuals a stage has room for."""
        return (
            self.ticks
            if self.kind == "gpipe"
            else min(
                self.stages * (self.virtual_stages + 1) - 1,
                self.microbatches * self.virtual_stages + 1,
            )
        )

    @property
    def handed_in_flight(self) -> int:
        """Microbatches for which a stage has room for what a backward pass hands on to gradients of
        weights that are made apart."""
        return min(self.stages, self.microbatches + 1)

    def weights(self, tick: int) -> int | None:
        """Of which microbatch all stages make the gradients of weights that waited, None where
        they make none."""
        m = tick - 2 * (self.stages - 1)
        return m if self.kind == ZB_H1 and 0 <= m < self.microbatches else None

    def work_item(self, n: int) -> tuple[int, int]:
        """(microbatch, position of its chunk) of the n-th item of a stage's work: groups of
        microbatches, each through one chunk after the other. Before the first item and after the
        last the microbatch is BUBBLE, in the chunk of that item."""
        item = min(max(n, 0), self.microbatches * self.virtual_stages - 1)
        group, rest = divmod(item, self.stages * self.virtual_stages)
        return (
            group * self.stages + rest % self.stages if item == n else BUBBLE,
            rest // self.stages,
        )

    def forward(self, stage: int, tick: int) -> tuple[int, int]:
        """(microbatch, chunk) of a stage's forward pass."""
        return self.work_item(tick - stage)

    def backward(self, stage: int, tick: int) -> tuple[int, int]:
        """(microbatch, chunk) of a stage's backward pass; of gpipe that of uneven stages, which
        takes microbatches in their order."""
        m, turn = self.work_item(tick - self.first_backward - (self.stages - 1) + stage)
        return m, self.virtual_stages - 1 - turn


@dataclass(frozen=True)
class Pipeline:
    """A repeated block (first node, nodes per block, repeats) on stages under a schedule, with this
    many microbatches a step."""

    first: int
    period: int
    repeats: int
    stages: int
    microbatches: int
    schedule: str
    early_epilogue: frozenset[int] = frozenset()
    """Nodes before the blocks that only the epilogue reads."""
    shared_prologue: frozenset[int] = frozenset()
    """Nodes before the blocks that both the blocks and the epilogue read."""
    virtual_stages: int = 1
    """Chunks of blocks that a stage holds."""

    @cached_property
    def end(self) -> int:
        """Index after the last node of the blocks."""
        return self.first + self.period * self.repeats

    @cached_property
    def blocks_per_stage(self) -> int:
        """Blocks a stage runs; where they do not divide evenly the last stages run empty ones."""
        return -(-self.repeats // self.stages)

    @property
    def chunks(self) -> int:
        """Chunks of all stages."""
        return self.stages * self.virtual_stages

    @property
    def blocks_per_tick(self) -> int:
        """Blocks a stage runs in a tick: all of its own, or a chunk of them."""
        return self.blocks_per_stage // self.virtual_stages

    @cached_property
    def microbatch_schedule(self) -> Schedule:
        """What each stage runs in every tick."""
        return Schedule(self.stages, self.microbatches, self.schedule, self.virtual_stages)

    @property
    def ticks(self) -> int:
        """Lock-step ticks in which stages run forward, and as many in which they run backward."""
        return self.microbatch_schedule.ticks

    @property
    def in_flight(self) -> int:
        """Ticks whose residuals a stage has room for."""
        return self.microbatch_schedule.in_flight

    @property
    def saved_ticks(self) -> float:
        """How many ticks' residuals are in memory at most: those in flight, and those being
        written and read beside them."""
        return self.in_flight + TICKS_BESIDE_IN_FLIGHT[self.schedule]

    @property
    def epilogue_passes(self) -> int:
        """How often the epilogue runs in a step."""
        return self.ticks if self.schedule == "gpipe" else self.microbatches

    @property
    def blocks_share(self) -> Fraction:
        """What part of all repeats one stage runs."""
        return Fraction(self.blocks_per_stage, self.repeats)

    def forward_passes(self, i: int) -> Fraction:
        """How often a device that holds node i runs it forward in a step: its blocks once in as
        many ticks as it has chunks."""
        if self.in_epilogue(i):
            return Fraction(self.epilogue_passes)
        return (
            Fraction(self.ticks, self.virtual_stages)
            if i in self.nodes
            else Fraction(self.ticks + (self.epilogue_passes if i in self.shared_prologue else 0))
        )

    def gradient_additions(self, readers: Iterable[int]) -> Fraction:
        """How often a device adds to the gradient of a weight that it holds, by the nodes that read
        it: once for each forward pass of the blocks or the prologue, once for each of the
        epilogue."""
        places = frozenset(
            place
            for i in readers
            for place in (
                (self.first,)
                if i in self.nodes
                else (self.end if late else -1 for late in self.sides(i))
            )
        )
        if places not in self._gradient_additions:
            self._gradient_additions[places] = sum(
                (self.forward_passes(i) for i in sorted(places)), Fraction(0)
            )
        return self._gradient_additions[places]

    @cached_property
    def _gradient_additions(self) -> dict[frozenset[int], Fraction]:
        """Results of `gradient_additions`: weights of repeats are read in like places, and sums of
        fractions take long."""
        return {}

    def useful_passes(self, i: int) -> int:
        """How many of the forward passes of node i are for a microbatch; the prologue runs for each
        chunk."""
        return self.microbatches * (
            1 if self.in_epilogue(i) or i in self.nodes else self.virtual_stages
        )

    def saved_microbatches(self, i: int) -> float:
        """How many microbatches there are for which a device that holds node i saves what its
        backward pass reads."""
        return self.saved_ticks / (self.virtual_stages if i in self.nodes else 1)

    @property
    def copied_weights_share(self) -> Fraction:
        """What part of its blocks' weights a stage has beside them: those of the chunks that the
        forward and the backward pass of a tick run."""
        return Fraction(2, self.virtual_stages) if self.virtual_stages > 1 else Fraction(0)

    def in_epilogue(self, i: int) -> bool:
        """Whether node i runs in the epilogue, and only there."""
        return i >= self.end or i in self.early_epilogue

    def sides(self, i: int) -> frozenset[bool]:
        """Whether a node outside the blocks runs in the epilogue (True), before it (False), or in
        both."""
        if i in self.shared_prologue:
            return frozenset((False, True))
        return frozenset((self.in_epilogue(i),))

    def stage_share(self, i: int) -> Fraction:
        """What part of nodes like node i one stage holds."""
        return self.blocks_share if i in self.nodes else Fraction(1)

    def stage_of(self, i: int) -> int:
        """The stage that alone has node i, -1 where every stage has it."""
        return (
            (i - self.first) // self.period // self.blocks_per_tick % self.stages
            if i in self.nodes
            else -1
        )

    @cached_property
    def nodes(self) -> range:
        """Nodes of all repeats."""
        return range(self.first, self.end)


def pipeline_of(graph: Graph, plan: Plan) -> Pipeline | None:
    """The pipeline of a plan's repeated blocks, None where it has none or its stages are uneven
    (planner.execution.uneven_pipeline)."""
    if engine_of(plan) is not Engine.EVEN:
        return None
    assignment = stage_assignment(graph, plan.repeated_blocks)
    if assignment is None:
        return None
    (first, period, repeats), early_epilogue, shared_prologue = assignment
    return Pipeline(
        first=first,
        period=period,
        repeats=repeats,
        stages=plan.stages,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        early_epilogue=early_epilogue,
        shared_prologue=shared_prologue,
        virtual_stages=plan.virtual_stages,
    )


def stage_assignment(
    graph: Graph, blocks: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], frozenset[int], frozenset[int]] | None:
    """The repeated block whose repeats are assigned to stages, with `early_epilogue` and
    `shared_prologue` of its Pipeline; None where no repeated block has weights."""
    key = "stage assignment", blocks
    if key not in graph.memo:
        block = largest_repeated_block(graph, blocks)
        graph.memo[key] = (block, *_before_blocks(graph, block)) if block else None
    assignment: tuple[tuple[int, int, int], frozenset[int], frozenset[int]] | None
    assignment = graph.memo[key]
    return assignment


def largest_repeated_block(
    graph: Graph, blocks: Iterable[Sequence[int]]
) -> tuple[int, int, int] | None:
    """The repeated block with the most parameters, None where none has any."""
    largest, most_parameters = None, -1
    for first, period, repeats in blocks:
        names = {
            n
            for i in range(first, first + period * repeats)
            for n in graph.nodes[i].inputs
            if n in graph.weights
        }
        parameters = sum(graph.tensors[n].elements for n in names)
        if names and parameters > most_parameters:
            largest, most_parameters = (first, period, repeats), parameters
    return largest


def _before_blocks(
    graph: Graph, block: tuple[int, int, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """`early_epilogue` and `shared_prologue` of a Pipeline."""
    first, period, repeats = block
    end = first + period * repeats

    def needed_by(nodes: Iterable[Node], *outputs: str) -> frozenset[int]:
        wanted = chain(outputs, chain.from_iterable([node.inputs for node in nodes]))
        return frozenset(nodes_needed(graph, range(first), wanted))

    of_blocks = needed_by(graph.nodes[first:end])
    of_epilogue = needed_by(graph.nodes[end:], *graph.outputs[:1])
    return of_epilogue - of_blocks, of_epilogue & of_blocks


def nodes_needed(
    graph: Graph, nodes: Iterable[int], wanted: Iterable[str], known: Iterable[str] = ()
) -> list[int]:
    """Those of `nodes` that are needed to compute the wanted tensors from the given ones, in
    order."""
    producer = {o: i for i in nodes for o in graph.nodes[i].outputs if o}
    for name in known:
        producer.pop(name, None)
    needed, queue = set[int](), list(producer.keys() & set(wanted))
    while queue:
        i = producer.get(queue.pop())
        if i is not None and i not in needed:
            needed.add(i)
            queue += graph.nodes[i].inputs
    return sorted(needed)


def balanced_blocks(repeats: int, chunks: int, before: float, after: float) -> tuple[int, ...]:
    """Blocks of each chunk such that the longest is the shortest; () where another than the first
    and the last has none. before, after: work outside the blocks, as multiples of one block's."""
    ends = [before, *[0.0] * (chunks - 2), after]
    blocks = [0] * chunks
    for _ in range(repeats):
        blocks[min(range(chunks), key=lambda k: (ends[k] + blocks[k] + 1, -k))] += 1
    return tuple(blocks) if all(blocks[1:-1]) else ()


def laid_out_blocks(repeats: int, chunks: int, before: float, after: float) -> tuple[int, ...]:
    """Blocks of each chunk as launchers lay them out: as many as whole blocks go, the longer chunks
    first; where layers come before the blocks, balanced with them."""
    shorter, longer = divmod(repeats, chunks)
    even = tuple(shorter + (c < longer) for c in range(chunks))
    return (before >= 1 / 2 and balanced_blocks(repeats, chunks, before, after)) or even


def pipeline_places(graph: Graph, pipeline: Pipeline) -> tuple[tuple[bool, bool, bool], ...]:
    """For every node, whether it is in the blocks, in the epilogue, in the shared prologue: those
    of one place run as often. Worked out once for all schedules of a graph's stages."""
    key = (
        "places",
        pipeline.first,
        pipeline.end,
        pipeline.early_epilogue,
        pipeline.shared_prologue,
    )
    if key not in graph.memo:
        graph.memo[key] = tuple(
            (i in pipeline.nodes, pipeline.in_epilogue(i), i in pipeline.shared_prologue)
            for i in range(len(graph.nodes))
        )
    known: tuple[tuple[bool, bool, bool], ...] = graph.memo[key]
    return known
