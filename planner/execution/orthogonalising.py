"""Muon's matrices on one device: which it has pieces of, how the pieces become whole matrices, and
how many of these it orthogonalises.

A piece of a matrix cannot be orthogonalised by itself. Where an array of K matrices has its rows,
or its columns, cut over n devices, an all-to-all gives each of them ceil(K / n) whole matrices
(zeros fill K up), and a second one brings back the pieces of what they become: the work is divided.
Of one matrix alone all are given all of it (all-gather), each does the work, and keeps its own
piece. First rows, then columns, and back in the other order. Dims before the last two, and repeats
of a block that lie in one array, are matrices of their own: whatever cuts those asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from costmodels.optimizers import NEWTON_SCHULZ_STEPS
from planner.errors import PlanError
from planner.execution.collective import CollectiveUse, ItemSize
from planner.execution.engine import Engine, engine_of
from planner.execution.even_collectives import weights_of_other_stages
from planner.execution.layout_flow import Flow, cut_layout
from planner.execution.loops import RepeatedBlock, repeated_blocks
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import Plan, WeightPlan
from planner.execution.techniques import WRITTEN_OUT
from planner.execution.zero_stages import cut_by_repeats
from planner.graph.ir import Graph
from planner.sharding.layout import Axes, group, local_shape

TURN_ELEMENTS = 2**26
"""Elements of the matrices that are orthogonalised at a time, where one has fewer: a guess (of
bfloat16 128 MiB, and some times that beside them). It is also the program's, a test holds the two
together."""


FLAT_BUFFERS = (
    "stages without a block in common keep their weights in flat buffers, in which there are no"
    " matrices to orthogonalise (optimizer muon)"
)


def refuse_flat_buffers(graph: Graph, plan: Plan) -> None:
    """Raises PlanError P068 where uneven pipeline stages have matrices to orthogonalise."""
    if graph.orthogonalised and engine_of(plan) is Engine.UNEVEN:
        raise PlanError(
            "P068", FLAT_BUFFERS, help=["stages of equal blocks, or none", "--optimizer adamw"]
        )


@dataclass(frozen=True)
class Exchange:
    """A collective on the way to whole matrices and back; elements: its payload, as
    `CollectiveUse` counts it."""

    kind: str
    axes: Axes
    elements: int


@dataclass(frozen=True)
class Matrices:
    """Arrays of matrices of which a device has a piece each. arrays: how many alike are taken one
    after the other; count: matrices of one; piece: extents of a piece, with padding; cut: the axes
    that cut rows and columns; ways: into how many pieces."""

    arrays: int
    count: int
    piece: tuple[int, int]
    cut: tuple[Axes, Axes]
    ways: tuple[int, int]

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of a matrix, with padding."""
        return self.piece[0] * self.ways[0], self.piece[1] * self.ways[1]

    @cached_property
    def _there(self) -> tuple[int, tuple[Exchange, ...]]:
        """Matrices of an array that the device orthogonalises, and what brings them there."""
        count, elements, steps = self.count, prod(self.piece), []
        for axes, n in zip(self.cut, self.ways, strict=True):
            if n > 1:
                alone = count == 1
                count = -(-count // n)
                # What an all-gather results in, or an all-to-all is given: the same.
                elements *= n
                kind = "all-gather" if alone else "all-to-all"
                steps.append(Exchange(kind, axes, count * elements))
        return count, tuple(steps)

    @property
    def own(self) -> int:
        """Matrices of an array that the device orthogonalises."""
        return self._there[0]

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Collectives of one array: there, and back."""
        there = self._there[1]
        return (*there, *(step for step in reversed(there) if step.kind == "all-to-all"))

    @property
    def rounds(self) -> tuple[int, int]:
        """(rounds in which they are orthogonalised, matrices of each round): as many matrices as
        divide them and have no more than TURN_ELEMENTS elements."""
        largest = max(1, TURN_ELEMENTS // prod(self.whole))
        at_a_time = max(n for n in range(1, min(largest, self.own) + 1) if self.own % n == 0)
        return self.own // at_a_time, at_a_time

    @property
    def flops(self) -> int:
        """2MNK of the products that the device does in a step: of each matrix with m rows and
        n >= m columns three products in a Newton-Schulz step, X X', its square, and their sum times
        X."""
        m, n = sorted(self.whole)
        return self.arrays * self.own * NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)


# Many parameters: a weight, and by keyword how its array is put together.
def device_matrices(
    shape: tuple[int, ...],
    weight: WeightPlan,
    mesh: Mapping[str, int],
    *,
    repeats: int = 1,
    apart: int = 1,
    by_repeats: bool = False,
) -> Matrices:
    """The matrices of a weight of this shape, of which so many repeats lie in one array of a
    device. apart: into how many arrays, taken one after the other, that is divided; by_repeats:
    whether a ZeRO stage may cut it along the repeats."""
    zero, layout, ways = weight.zero_stage, weight.layout, group(weight.zero_axes, mesh)
    if zero and weight.zero_dim >= 0:
        size, cut = shape[weight.zero_dim], group(layout.dims[weight.zero_dim], mesh)
        if by_repeats and cut_by_repeats(zero, size, cut * ways, ways, repeats):
            repeats //= ways
        else:
            layout = cut_layout(weight)
    *before, rows, columns = local_shape(shape, layout, mesh)
    axes = layout.dims[-2], layout.dims[-1]
    return Matrices(
        arrays=apart,
        count=repeats // apart * prod(before),
        piece=(rows, columns),
        cut=axes,
        ways=(group(axes[0], mesh), group(axes[1], mesh)),
    )


def orthogonalised(
    flow: Flow, blocks: Sequence[RepeatedBlock]
) -> Iterator[tuple[tuple[str, ...], Matrices]]:
    """Of every array of matrices that a device orthogonalises the weights in it that the device
    has, and its matrices. blocks: the repeated blocks of the plan's program."""
    graph = flow.graph
    if not graph.orthogonalised or not flow.training:
        return
    pipeline = pipeline_of(graph, flow.plan)
    elsewhere = weights_of_other_stages(graph, pipeline) if pipeline else frozenset[str]()
    stacks = _stacks(flow, blocks, pipeline)
    for name in flow.weights:
        names, apart = stacks.get(name, ((name,), 1))
        trained = name in graph.orthogonalised and name in flow.grad
        if trained and name not in elsewhere and name == names[0]:
            yield (
                names,
                device_matrices(
                    graph.tensors[name].shape,
                    flow.weights[name],
                    dict(flow.plan.mesh),
                    repeats=len(names),
                    apart=apart,
                    by_repeats=not pipeline
                    and not flow.plan.offload
                    and flow.plan.blocks != WRITTEN_OUT,
                ),
            )


def exchanges(
    flow: Flow, blocks: Sequence[RepeatedBlock], size: ItemSize
) -> Iterator[CollectiveUse]:
    """The collectives of all arrays in a step."""
    graph = flow.graph
    for (name, *_), matrices in orthogonalised(flow, blocks):
        for step in matrices.exchanges:
            yield CollectiveUse(
                kind=step.kind,
                axes=step.axes,
                payload_bytes=int(step.elements * size(graph.tensors[name].dtype)),
                count=matrices.arrays,
                phase="optimizer",
                what=graph.labels.get(name, name),
            )


def _stacks(
    flow: Flow, blocks: Sequence[RepeatedBlock], pipeline: Pipeline | None
) -> dict[str, tuple[tuple[str, ...], int]]:
    """Weight -> those that are taken in one array with it on a device (written-out repeats are put
    into one), and into how many arrays that is divided: state in the host's memory is here repeat
    by repeat, or chunk by chunk of a pipeline stage."""
    stacks = {}
    if flow.plan.blocks == WRITTEN_OUT:
        blocks, _ = repeated_blocks(flow)
    for block in blocks:
        staged = pipeline if pipeline and block.first == pipeline.first else None
        blocks_here = staged.blocks_per_stage if staged else block.repeats
        chunks = staged.virtual_stages if staged and staged.virtual_stages > 1 else blocks_here
        apart = chunks if "optimizer" in flow.plan.offload else 1
        for names in block.weights:
            stacks.update(dict.fromkeys(names, (names[:blocks_here], apart)))
    return stacks
