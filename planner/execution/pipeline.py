"""Pipeline stages: the repeats of one block dealt out along the mesh axis "stage", and how often
each place of the graph runs in a step.

    before   what the blocks are given (embeddings, masks): every stage runs it for its own
             microbatch, so that only carried tensors travel
    blocks   the repeats of the run with the most parameters: stage i holds repeats i * per_stage up
             to (i + 1) * per_stage
    after    head and loss: every stage runs it on what leaves the last one; all but the last
             stage's result is dropped. What only it reads goes with it, wherever the graph has it;
             what both it and the blocks read is made twice

Stages work in lock-step ticks. Stage i runs microbatch m forward in tick m + i; with S stages, m
microbatches need m + S - 1 ticks, S - 1 of them a bubble. Schedules:

    1f1b    backward in tick m + 2 (S - 1) - i: a stage has at most 2 S - 1 microbatches waiting for
            their backward pass, whose residuals are kept
    gpipe   all forward ticks, then all backward: every tick's residuals are kept, head and loss are
            computed again
    interleaved   1f1b in finer pieces: a stage holds V chunks of blocks, chunk v of stage i being
                  number v S + i, so that a microbatch passes all stages
            V times and a tick is a V-th as long. Microbatches go in groups of S, each group through
            one chunk after the other: work n of a stage is microbatch s of group g in chunk v, n =
            g S V + v S + s, forward in tick n + i; its backward pass takes the chunks in reverse,
            in tick g S V + (V - 1 - v) S + s + S V + S - 2 - i. At most S (V + 1) - 1 chunks'
            residuals wait. S divides m

With S stages and m microbatches 1f1b and gpipe need (m + S - 1) times a stage's forward and
backward pass, interleaved (m + (S - 1) / V) times; what comes before the blocks runs in every tick.
`after` runs m times, under gpipe in every tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain

from planner.execution.plan import Plan
from planner.graph.ir import Graph

INTERLEAVED = "interleaved"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED)
MAX_ZERO_STAGE = {"1f1b": 2, "gpipe": 1, "interleaved": 2}
"""ZeRO stages that go with stages: ZeRO stage 3 would gather weights anew in every tick, and under
gpipe there is one backward pass for all microbatches."""

LEAST_FLOPS_SHARE = 1 / 3
"""Of a graph's products: repeated blocks with fewer are not dealt out, as all others would run on
every stage (planner.execution.uneven_pipeline has other stages for them)."""
TICKS_BESIDE_IN_FLIGHT = {"1f1b": 1.5, "gpipe": 0.0, "interleaved": 1.5}
"""Ticks' residuals beside those that wait, measured with the GPU compiler on GPT-2 medium, 2 and 4
stages: 1.3 to 1.5."""


BUBBLE = -1
"""The microbatch of passes that are for none."""


@dataclass(frozen=True)
class Schedule:
    """How microbatches pass through stages (module docstring): what each stage runs in every tick.
    virtual: chunks that a stage holds."""

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
    def first_backward(self) -> int:
        """The first tick with a backward pass."""
        return self.ticks if self.kind == "gpipe" else self.stages * self.virtual_stages - 1

    @property
    def in_flight(self) -> int:
        """Ticks for whose residuals a stage has room."""
        return (
            self.ticks
            if self.kind == "gpipe"
            else min(
                self.stages * (self.virtual_stages + 1) - 1,
                self.microbatches * self.virtual_stages + 1,
            )
        )

    def work_item(self, n: int) -> tuple[int, int]:
        """(microbatch, turn) of the n-th piece of a stage's work: groups of microbatches, each
        through one chunk after the other. Beyond the first and the last piece BUBBLE in the turn of
        these."""
        at = min(max(n, 0), self.microbatches * self.virtual_stages - 1)
        group, rest = divmod(at, self.stages * self.virtual_stages)
        return group * self.stages + rest % self.stages if at == n else BUBBLE, rest // self.stages

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
    """A run of blocks (first node, nodes per block, repeats) on stages under a schedule, with this
    many microbatches a step."""

    first: int
    period: int
    repeats: int
    stages: int
    microbatches: int
    schedule: str
    early_epilogue: frozenset[int] = frozenset()
    """Nodes before the blocks that only what follows them reads."""
    shared_prologue: frozenset[int] = frozenset()
    """Nodes before the blocks that both read."""
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
    def blocks_per_tick(self) -> int:
        """Blocks a stage runs in a tick: all of its own, or a chunk of them."""
        return self.blocks_per_stage // self.virtual_stages

    @cached_property
    def microbatch_schedule(self) -> Schedule:
        """How microbatches pass through it."""
        return Schedule(self.stages, self.microbatches, self.schedule, self.virtual_stages)

    @property
    def ticks(self) -> int:
        """Lock-step ticks in which stages run forward, and as many in which they run backward."""
        return self.microbatch_schedule.ticks

    @property
    def in_flight(self) -> int:
        """Ticks for whose residuals a stage has room."""
        return self.microbatch_schedule.in_flight

    @property
    def saved_ticks(self) -> float:
        """How many ticks' residuals are in memory at most: those that wait, and beside the ring
        what is being made and read."""
        return self.in_flight + TICKS_BESIDE_IN_FLIGHT[self.schedule]

    @property
    def epilogue_passes(self) -> int:
        """How often what follows the blocks runs."""
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
        it: once for the blocks or what comes before them in each of their turns, once for what
        follows them."""
        places = frozenset(
            self.first if i in self.nodes else self.end if self.in_epilogue(i) else -1
            for i in readers
        )
        if places not in self._gradient_additions:
            self._gradient_additions[places] = sum(
                (self.forward_passes(i) for i in sorted(places)), Fraction(0)
            )
        return self._gradient_additions[places]

    @cached_property
    def _gradient_additions(self) -> dict[frozenset[int], Fraction]:
        """What `sums` found: weights of repeats are read in like places, and fractions take
        long."""
        return {}

    def useful_passes(self, i: int) -> int:
        """Those of its turns that are for a microbatch: what comes before the blocks runs for each
        chunk."""
        return self.microbatches * (
            1 if self.in_epilogue(i) or i in self.nodes else self.virtual_stages
        )

    def saved_microbatches(self, i: int) -> float:
        """Of how many microbatches node i, where a device holds it, keeps what its backward pass
        reads."""
        return self.saved_ticks / (self.virtual_stages if i in self.nodes else 1)

    @property
    def copied_weights_share(self) -> Fraction:
        """What part of its blocks' weights a stage has beside them: those of the chunks that the
        forward and the backward pass of a tick run."""
        return Fraction(2, self.virtual_stages) if self.virtual_stages > 1 else Fraction(0)

    def in_epilogue(self, i: int) -> bool:
        """Whether node i runs with what follows the blocks, and only there."""
        return i >= self.end or i in self.early_epilogue

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


def largest_repeated_block(
    graph: Graph, runs: Iterable[Sequence[int]]
) -> tuple[int, int, int] | None:
    """The run whose blocks are dealt out over stages: the one with the most parameters."""
    found: tuple[int, tuple[int, int, int]] | None = None
    for first, period, repeats in runs:
        names = {
            n
            for i in range(first, first + period * repeats)
            for n in graph.nodes[i].inputs
            if n in graph.weights
        }
        size = sum(graph.tensors[n].elements for n in names)
        if names and (found is None or size > found[0]):
            found = size, (first, period, repeats)
    return found[1] if found else None


def pipeline_of(graph: Graph, plan: Plan) -> Pipeline | None:
    """The pipeline of a plan's repeated blocks, None where it has none (and of uneven stages:
    planner.execution.uneven_pipeline)."""
    if plan.stages < 2 or plan.stage_cuts:
        return None
    found = stage_assignment(graph, plan.repeated_blocks)
    return (
        Pipeline(
            *found[0],
            plan.stages,
            plan.microbatches,
            plan.schedule,
            *found[1:],
            plan.virtual_stages,
        )
        if found
        else None
    )


def stage_assignment(
    graph: Graph, runs: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], frozenset[int], frozenset[int]] | None:
    """The run whose blocks stages share, with what `read_late` says of it; None where there is
    none."""
    if ("dealt", runs) not in graph.memo:
        run = largest_repeated_block(graph, runs)
        graph.memo["dealt", runs] = (
            (run, *epilogue_and_shared_prologue(graph, run)) if run else None
        )
    found: tuple[tuple[int, int, int], frozenset[int], frozenset[int]] | None = graph.memo[
        "dealt", runs
    ]
    return found


def epilogue_and_shared_prologue(
    graph: Graph, run: tuple[int, int, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """`ending` and `twice` of a Pipeline."""
    first, period, repeats = run
    end = first + period * repeats
    blocks = nodes_needed(
        graph, range(first), chain.from_iterable([node.inputs for node in graph.nodes[first:end]])
    )
    after = nodes_needed(
        graph, range(first), chain(graph.outputs[:1], *[node.inputs for node in graph.nodes[end:]])
    )
    return frozenset(after) - frozenset(blocks), frozenset(after) & frozenset(blocks)


def nodes_needed(
    graph: Graph, nodes: Iterable[int], wanted: Iterable[str], given: Iterable[str] = ()
) -> list[int]:
    """Those of the nodes that the wanted tensors are made by, given some."""
    made = {o: i for i in nodes for o in graph.nodes[i].outputs if o}
    for name in given:
        made.pop(name, None)
    found, queue = set[int](), list(made.keys() & set(wanted))
    while queue:
        i = made.get(queue.pop())
        if i is not None and i not in found:
            found.add(i)
            queue += graph.nodes[i].inputs
    return sorted(found)
