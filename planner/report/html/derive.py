"""What the strategy file does not hold, worked out on the model: per operator its kernels,
collectives and saved bytes, folded by repeated block.

A `Row` stands for an operator and its equals in further repeats of its block; times and bytes are
of all of them, over one optimizer step (training) or one forward pass, on one device; of blocks
that are divided over pipeline stages, of those one stage has. They are the terms that
planner.pricing.step_time adds up, by the same functions, so that the rows' sum is its price.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.execution import collectives
from planner.execution.block_values import offloaded_by_name
from planner.execution.engine import Engine, engine_of
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock, inner_flow, outer_flow
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.recompute import Recomputed, recomputed_in_block
from planner.execution.techniques import WRITTEN_OUT
from planner.execution.weights_apart import waiting_share, weights_apart
from planner.pricing.breakdown import bound_by
from planner.pricing.handed_on import handed_on
from planner.pricing.kernels import kernel_times
from planner.pricing.peak_memory import MemoryParts, memory_parts, slope_bytes, without_loops
from planner.pricing.saved_activations import saved_by_blocks, saved_tensors
from planner.pricing.step_time import sent_s
from planner.sharding.layout import STAGE, ReshardStep

if TYPE_CHECKING:
    from planner.whatif.reprice import Priced

Bodies = Sequence[tuple[RepeatedBlock, Flow]]
"""Repeated blocks, each with the flow inside it."""
Link = tuple[int, int, str]
"""A tensor from an operator to another."""
_LAYER = re.compile(r"(layers?|blocks?|h|stage\d*)?[._]?\d+")
_FILLER = frozenset(
    {"model", "transformer", "module", "encoder", "decoder", "layers", "blocks", ""}
)


@dataclass(frozen=True)
class Move:
    """A collective. row: the folded operator it is shown at. when: forward | recompute | backward |
    sync (each microbatch) | end (once a step) | handed (from a pipeline stage to the next; phase
    says which way).

    stored: it serves a weight or an input, not the result of an operator. exposed_s, hidden_s:
    seconds a step; bytes are payload.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    what: str
    row: int
    when: str
    stored: bool
    payload_bytes: int
    count: int
    exposed_s: float
    hidden_s: float

    @property
    def total_bytes(self) -> int:
        """Payload of one step."""
        return self.payload_bytes * self.count


@dataclass(frozen=True)
class Row:
    """An operator with its equals in further repeats. decided: its row in the strategy's nodes.
    run: which repeated block it is in, -1 for none. saved_bytes: what it adds to the saved
    activations. product: its arithmetic is a matrix product, a convolution or the like.
    after_blocks: it comes after the repeated blocks. in_epilogue: in a pipeline, it runs with the
    epilogue; also_in_epilogue: with that as well as with the blocks. bubble_s: seconds of
    passes that no microbatch needs, beside the others. weights_s: of backward_s, gradients of
    weights that are made apart from the backward pass."""

    index: int
    id: str
    decided: str
    op: str
    run: int
    repeats: int
    forward_s: float
    backward_s: float
    recompute_s: float
    saved_bytes: float
    bound: str
    product: bool
    after_blocks: bool
    in_epilogue: bool = False
    also_in_epilogue: bool = False
    bubble_s: float = 0.0
    weights_s: float = 0.0

    @property
    def kernels_s(self) -> float:
        """Seconds of kernels a step, without bubbles."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from an operator to another; total_bytes is what its reshards move
    between devices in a step (0: it stays put)."""

    source: int
    target: int
    tensor: str
    total_bytes: float


@dataclass(frozen=True)
class Detail:
    """A plan worked out. rows in program order; runs as (first row's node, nodes of a repeat,
    repeats); memory: its parts; memory_bytes: its peak as priced; layers: of a plan whose blocks
    are written out, the same with every layer by itself."""

    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    edges: tuple[Edge, ...]
    runs: tuple[tuple[int, int, int], ...]
    micro: int
    training: bool
    optimizer_s: float
    loop_copy_s: float
    step_s: float
    memory: MemoryParts
    memory_bytes: int
    pipeline: Pipeline | None = None
    layers: Detail | None = None

    def passes(self, row: Row) -> int:
        """How often what surrounds a row's kernels runs in a step."""
        p = self.pipeline
        return self.micro if p is None else p.epilogue_passes if row.in_epilogue else p.ticks

    def useful_passes(self, row: Row) -> int:
        """How many of a row's passes are for a microbatch, a virtual stage of the blocks each."""
        return self.micro * (
            1 if self.pipeline is None or row.in_epilogue else self.pipeline.virtual_stages
        )

    def repeats_per_pass(self, row: Row) -> int:
        """Repeats of a row that one pass runs."""
        p = self.pipeline
        return (
            row.repeats // p.virtual_stages
            if p is not None and row.index in p.nodes
            else row.repeats
        )

    @cached_property
    def at(self) -> Mapping[int, tuple[Move, ...]]:
        """row index -> its collectives, in program order."""
        by_row: dict[int, list[Move]] = {}
        for m in self.moves:
            by_row.setdefault(m.row, []).append(m)
        return {k: tuple(v) for k, v in by_row.items()}

    @property
    def grad_accumulate_s(self) -> float:
        """Seconds of everything that is drawn: the step, unless the price has a term that is
        not."""
        return (
            sum(r.kernels_s + r.bubble_s for r in self.rows)
            + sum(m.exposed_s for m in self.moves)
            + self.optimizer_s
            + self.loop_copy_s
        )


def short_name(node_id: str, op: str) -> str:
    """`self_attn.q_proj` of /model/layers.0/self_attn/q_proj/MatMul; the operator's own name where
    nothing else is left."""
    parts = [p for p in re.split(r"[/]+", node_id) if p]
    if len(parts) == 1:
        parts = [p for p in parts[0].split(".") if p]
    if parts and re.fullmatch(rf"{re.escape(op)}(_\d+)?", parts[-1]) and len(parts) > 1:
        parts = parts[:-1]
    telling = [p for p in parts if not _LAYER.fullmatch(p) and p not in _FILLER] or [op]
    return ".".join(telling[-2:])


def work_out(p: Priced) -> Detail:
    """The detail of a priced plan. Raises PlanError P069 where the price is not the sum of single
    operators: of a framework (planner.pricing.frameworks.price), of uneven pipeline stages
    (planner.pricing.uneven_step)."""
    if p.pricer.runtime.kernels is not None:
        raise PlanError(
            "P069",
            f"plans priced as {p.pricer.runtime.name} runs them have no timeline of operators",
            help=["plan show FILE --html draws what the file holds"],
        )
    if engine_of(p.plan) is Engine.UNEVEN:
        raise PlanError(
            "P069",
            "a step of uneven pipeline stages is the longest pass of any, not a sum over operators",
            help=["plan show FILE --html draws what the file holds"],
        )
    folded = _detail(p, p.plan.repeated_blocks)
    written_out = p.plan.blocks == WRITTEN_OUT
    return replace(folded, layers=_detail(p, ())) if written_out else folded


def _detail(p: Priced, runs: tuple[tuple[int, int, int], ...]) -> Detail:
    """A plan worked out, the repeats of each of `runs` as one."""
    home = list(range(len(p.base.graph.nodes)))
    where = [-1] * len(home)
    for k, (first, period, repeats) in enumerate(runs):
        for i in range(first, first + period * repeats):
            home[i], where[i] = first + (i - first) % period, k
    outer = p.flow
    for run in p.runs:
        outer = outer_flow(outer, run)
    bodies = [(run, inner_flow(outer, run)) for run in p.runs]
    rows, moves = _rows(p, home, where, bodies), _moves(p, home)
    return Detail(
        rows=rows,
        moves=moves,
        edges=_edges(p, home, moves, outer, bodies),
        runs=runs,
        micro=p.plan.microbatches if p.base.training else 1,
        training=p.base.training,
        optimizer_s=p.cost.optimizer_time_s,
        loop_copy_s=p.cost.loop_copy_time_s,
        step_s=p.cost.step_time_s,
        memory=memory_parts(p.base, p.flow, p.pricer, p.runs),
        memory_bytes=p.cost.memory.total,
        pipeline=pipeline_of(p.base.graph, p.plan),
    )


def _bubble_s(pipeline: Pipeline, i: int, one_pass: float, apart: float) -> float:
    """Seconds of the passes of a node that no microbatch needs. apart: of one pass, gradients of
    weights that are made in ticks of their own."""
    schedule = pipeline.microbatch_schedule
    idle_passes = pipeline.forward_passes(i) - pipeline.useful_passes(i)
    return float(idle_passes) * one_pass - (schedule.ticks - schedule.weight_ticks) * apart


def _rows(p: Priced, home: list[int], where: list[int], bodies: Bodies) -> tuple[Row, ...]:
    nodes, micro = p.base.graph.nodes, p.plan.microbatches if p.base.training else 1
    saved, pipeline = saved_bytes(p), pipeline_of(p.base.graph, p.plan)
    recomputed: set[int] = set()
    for run, flow in bodies if p.plan.recompute != "none" else ():
        in_block = recomputed_in_block(flow, run)
        if in_block:
            recomputed.update(i for i, result in in_block.nodes.items() if result)
            for name, size in _saved_here(p, flow, run, in_block):
                i = max(flow.graph.producer.get(name, -1), run.first)
                saved[i] = saved.get(i, 0.0) + size * (1 + p.pricer.runtime.memory_slack)
    for i, size in handed_on(p.base, p.flow, p.runs, p.pricer):
        saved[i] = saved.get(i, 0.0) + size * (1 + p.pricer.runtime.memory_slack)
    waiting = weights_apart(p.flow, pipeline)
    known: dict[tuple[int, object], tuple[float, float]] = {}
    sums: dict[int, list[float]] = {}
    for i in range(len(nodes)):
        key = (p.base.shared[i], p.flow.split(i))
        if key not in known:
            known[key] = kernel_times(p.base, i, p.flow.split(i), p.pricer)
        forward, backward = known[key]
        recompute = (
            forward
            if home[i] in recomputed
            or (pipeline and pipeline.schedule == "gpipe" and pipeline.in_epilogue(i))
            else 0.0
        )
        cell = sums.setdefault(home[i], [0.0] * 7)
        share = float(pipeline.stage_share(i)) if pipeline else 1.0
        useful = pipeline.useful_passes(i) if pipeline else micro
        apart = waiting_share(nodes[i], p.base.grad, waiting) * backward if waiting else 0.0
        bubble = _bubble_s(pipeline, i, forward + backward + recompute, apart) if pipeline else 0.0
        for slot, value in enumerate(
            (forward * useful, backward * useful, recompute * useful, bubble, 1.0, apart * useful)
        ):
            cell[slot] += value * share
        cell[6] += saved.get(i, 0.0)
    return tuple(
        Row(
            index=i,
            id=nodes[i].id,
            decided=nodes[p.base.shared[i]].id,
            op=nodes[i].op,
            run=where[i],
            repeats=round(n),
            forward_s=f,
            backward_s=b,
            recompute_s=r,
            saved_bytes=k,
            bound=bound_by(p.base, i, p.flow.split(i), p.pricer),
            product=p.base.rules[i].flops > 0,
            after_blocks=i in p.base.epilogue,
            in_epilogue=pipeline is not None and pipeline.in_epilogue(i),
            also_in_epilogue=pipeline is not None and i in pipeline.shared_prologue,
            bubble_s=bubble,
            weights_s=apart,
        )
        for i, (f, b, r, bubble, n, apart, k) in sorted(sums.items())
    )


def _saved_here(
    p: Priced, flow: Flow, run: RepeatedBlock, recomputed: Recomputed
) -> Iterator[tuple[str, float]]:
    """(tensor, bytes) of what a recomputed block saves on the device."""
    away = offloaded_by_name(flow)
    saved = saved_by_blocks(p.base, flow, run, recomputed, p.pricer)
    return ((name, size) for name, size in saved if name not in away)


def saved_bytes(p: Priced) -> dict[int, float]:
    """node -> bytes of activations it adds to those saved for the backward pass, of a program whose
    blocks are written out with what compilers keep for slopes; under recompute only what enters a
    repeat is saved there."""
    graph, plan = p.base.graph, p.plan
    inside = {
        i: (first, period)
        for first, period, repeats in plan.repeated_blocks
        for i in range(first, first + period * repeats)
    }
    pipeline = pipeline_of(graph, plan)
    slack, bytes_of = 1 + p.pricer.runtime.memory_slack, dict[int, float]()
    written_out = plan.blocks == WRITTEN_OUT
    base = without_loops(p.base, p.flow) if written_out else p.base
    for i, size in slope_bytes(base, p.flow, p.pricer) if written_out else ():
        bytes_of[i] = bytes_of.get(i, 0.0) + size * slack
    for i, name, size in saved_tensors(base, p.flow, p.pricer):
        if plan.recompute != "none" and i in inside:
            first, period = inside[i]
            producer = graph.producer.get(name, -1)
            if producer >= first and (i - first) // period == (producer - first) // period:
                continue
        times = (
            pipeline.saved_microbatches(i) * float(pipeline.stage_share(i))
            if pipeline and i not in p.base.epilogue
            else 1.0
        )
        bytes_of[i] = bytes_of.get(i, 0.0) + size * times * slack
    return bytes_of


def _moves(p: Priced, home: list[int]) -> tuple[Move, ...]:
    graph = p.base.graph
    pipeline = pipeline_of(graph, p.plan)
    leaves = {
        c.enters: c.leaves[0]
        for run in p.runs
        if pipeline and run.first == pipeline.first
        for c in run.carries
    }
    first_seen_at: dict[str, int] = {}
    produced: set[str] = set()
    for i, node in enumerate(graph.nodes):
        for t in (*node.inputs, *node.outputs):
            first_seen_at.setdefault(graph.labels.get(t, t), i)
        first_seen_at.setdefault(node.id, i)
        produced.update(node.outputs, (node.id,))
    gathered = {
        graph.labels.get(n, n)
        for n, w in p.flow.weights.items()
        if w.zero_stage == 3 and w.zero_dim >= 0
    }
    moves = []
    uses = collectives.collectives(p.flow, p.runs, p.pricer.itemsize)
    for use, seconds, hidden in sent_s(p.base, p.flow, p.runs, uses, p.pricer):
        if use.phase == "gradient":
            when = (
                "backward"
                if use.what in gathered and use.kind == "reduce-scatter"
                else "sync"
                if use.count >= p.plan.accumulation_steps > 1
                else "end"
            )
        else:
            when = {"optimizer": "end"}.get(use.phase, use.phase)
        what = use.what
        if pipeline and use.axes == (STAGE,) and use.phase in ("forward", "backward"):
            # What a stage hands on is what its last block makes; the loss is summed over the stages
            # once.
            when, what = ("handed", leaves[what]) if what in leaves else ("end", what)
        moves.append(
            Move(
                kind=use.kind,
                axes=use.axes,
                phase=use.phase,
                what=what,
                row=home[first_seen_at.get(what, 0)],
                when=when,
                stored=what not in produced,
                payload_bytes=use.payload_bytes,
                count=use.count,
                exposed_s=seconds - hidden,
                hidden_s=hidden,
            )
        )
    return tuple(moves)


def _edges(
    p: Priced, home: list[int], moves: tuple[Move, ...], outer: Flow, bodies: Bodies
) -> tuple[Edge, ...]:
    """Links between folded operators. A tensor's bytes are given to the uses whose path has a
    collective, by the elements that its steps move; steps that several uses share are counted at
    each. What enters a block is drawn at its first repeat, what leaves it at its last; further
    repeats of blocks that are no loop add to the links of the first.
    """
    graph = p.base.graph
    totals: dict[str, float] = {}
    for m in moves:
        if m.when in ("forward", "backward", "recompute") and not m.stored:
            totals[m.what] = totals.get(m.what, 0.0) + m.total_bytes
    links: dict[str, list[tuple[Link, int, tuple[ReshardStep, ...], int]]] = {}
    looped = {i for run in p.runs for i in range(run.first + run.period, run.end)}
    for i, node in enumerate(graph.nodes):
        if i in looped:
            continue
        flow, times = next(
            ((f, run.repeats) for run, f in bodies if run.first <= i < run.first + run.period),
            (outer, 1),
        )
        for slot, name in enumerate(node.inputs):
            drawn = graph.nodes[home[i]].inputs[slot]
            producer = graph.producer.get(drawn)
            if producer is not None and name in graph.producer and name in flow.trees:
                link = (home[producer], home[i], drawn)
                path = flow.trees[name].path(flow.need[i, slot])
                links.setdefault(name, []).append((link, i, path, times))
    bytes_of: dict[Link, float] = {}
    for name, uses in links.items():
        back = name in p.flow.grad
        steps = {
            (path_taken[:k], n): _elements(path_taken[k - 1], back) * n
            for *_, path_taken, n in uses
            for k in range(1, len(path_taken) + 1)
        }
        total = sum(steps.values())
        moved = totals.get(graph.labels.get(name, name), 0.0)
        largest: dict[tuple[Link, int], float] = {}  # of uses by one operator
        for link, i, path_taken, n in uses:
            mine = sum(_elements(s, back) * n for s in path_taken)
            size = moved * mine / total if total else 0.0
            largest[link, i] = max(largest.get((link, i), 0.0), size)
        for (link, _), size in largest.items():
            bytes_of[link] = bytes_of.get(link, 0.0) + size
    return tuple(Edge(*link, size) for link, size in sorted(bytes_of.items()))


def _elements(step: ReshardStep, back: bool) -> int:
    return (step.forward_elements if step.forward else 0) + (
        step.backward_elements if back and step.backward else 0
    )
