"""What a plan predicts beside what its emitted program compiles to, for benchmarks and tests:
collectives by kind and axes, products, argument bytes, temporaries.

Exact are payloads (`planner.execution.collectives`), dot FLOPs and argument bytes, for shard_map
programs in float32; temporaries are the compiler's. Needs jax and as many (virtual) devices as the
plan's mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from planner.emit.program import emit
from planner.emit.writer import Training, Workload
from planner.execution import collectives
from planner.execution.collective import traffic as predicted_traffic
from planner.execution.layout_flow import cut_layout, derive
from planner.execution.loops import repeated_blocks
from planner.execution.plan import Plan
from planner.execution.recompute import gathering_parts
from planner.graph.ir import Graph
from planner.sharding.layout import local_shape
from planner.verify.compiled import compile_step
from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.program import traffic

Payloads = Mapping[tuple[str, str], int]
"""(kind, axes joined by +) -> payload bytes per device and optimizer step."""


@dataclass(frozen=True)
class Truth:
    """Predicted beside compiled, one device, one optimizer step (or one forward pass)."""

    predicted: Payloads
    compiled: Payloads
    predicted_flops: int
    compiled_flops: int
    predicted_argument_bytes: int
    compiled_argument_bytes: int
    temporary_bytes: int

    def differences(self) -> tuple[str, ...]:
        """A line per figure that is not equal; empty when the prediction is exact."""
        lines = []
        for key in sorted({*self.predicted, *self.compiled}):
            a, b = self.predicted.get(key, 0), self.compiled.get(key, 0)
            if a != b:
                lines.append(f"{key[0]} over {key[1]}: predicted {a} bytes, compiled {b}")
        for what, a, b in (
            ("dot FLOPs", self.predicted_flops, self.compiled_flops),
            ("argument bytes", self.predicted_argument_bytes, self.compiled_argument_bytes),
        ):
            if a != b:
                lines.append(f"{what}: predicted {a}, compiled {b}")
        return tuple(lines)


def truth(
    graph: Graph,
    plan: Plan,
    *,
    workload: Workload = "train",
    unroll: bool = True,
    optimizer: str = "adamw",
) -> Truth:
    """Emit the shard_map program of a plan, compile it in float32 and put prediction and compiler
    side by side."""
    program = emit(graph, plan, workload=workload, unroll=unroll, training=Training(optimizer))
    predicted, flops, arguments = predict(graph, plan, workload=workload, optimizer=optimizer)
    compiled = compile_step(program, workload)
    text = compiled.as_text()
    found = {
        (kind, axes): int(cell["payload"])
        for kind, by in traffic(text, plan.mesh).items()
        for axes, cell in by.items()
    }
    stats = compiled.memory_analysis()
    return Truth(
        predicted,
        found,
        flops,
        dot_flops(text),
        arguments,
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def predict(
    graph: Graph, plan: Plan, *, workload: Workload = "train", optimizer: str = "adamw"
) -> tuple[Payloads, int, int]:
    """(payloads, dot FLOPs, argument bytes) of one device, without compiling anything."""
    flow = derive(graph, plan, training=workload == "train")
    runs, _ = repeated_blocks(flow)
    by_kind = predicted_traffic(collectives.collectives(flow, runs), plan.order, dict(plan.mesh))
    payloads = {
        (kind, axes): int(cell["payload"])
        for kind, by in by_kind.items()
        for axes, cell in by.items()
    }
    return payloads, collectives.dot_flops(flow, runs), collectives.argument_bytes(flow, optimizer)


@dataclass(frozen=True)
class Room:
    """What a level-3 program may hold at once beside its arguments, in bytes of one device."""

    layer: int
    """The largest set of full weights that one function gathers."""
    gradients: int
    activations: int
    slices: int
    """One layer's own pieces of weights, which a scan copies out of their stack; 0 in unrolled
    programs."""

    @property
    def two_layers(self) -> int:
        """Two layers of full weights, the gradients' pieces, a scan's slices and every
        activation."""
        return 2 * self.layer + self.gradients + self.slices + self.activations


def room(graph: Graph, plan: Plan, *, unroll: bool) -> Room:
    """The room of a training plan in float32. Gradients' pieces count twice with microbatches: the
    sum, and the next."""
    flow = derive(graph, plan, training=True)
    runs, _ = repeated_blocks(flow)
    mesh = dict(plan.mesh)

    def full(names: Iterable[str]) -> int:
        return sum(
            4 * prod(local_shape(graph.tensors[n].shape, flow.weights[n].layout, mesh))
            for n in dict.fromkeys(names)
        )

    def pieces_of(names: Iterable[str]) -> int:
        return sum(
            4 * prod(local_shape(graph.tensors[n].shape, cut_layout(flow.weights[n]), mesh))
            for n in names
        )

    blocks = [full(names[0] for names in run.weights) for run in runs]
    loose = [
        full(n for i in part for n in graph.nodes[i].inputs if n in flow.weights)
        for part in gathering_parts(flow, runs)
    ]
    pieces = pieces_of(n for n in flow.weights if n in flow.grad)
    slices = (
        0
        if unroll
        else max((pieces_of(names[0] for names in run.weights) for run in runs), default=0)
    )
    made = [o for node in graph.nodes for o in node.outputs if o]
    activations = sum(
        4 * prod(local_shape(graph.tensors[o].shape, flow.source[o], mesh)) for o in made
    )
    return Room(
        max(blocks + loose, default=0),
        pieces * (2 if plan.microbatches > 1 else 1),
        activations,
        slices,
    )
