"""The clock of a compiled program: every kernel and collective of its text timed by the formulas
that plans are priced with, and put to the part of the model that it serves.

A kernel belongs to the operator whose line of the emitted program it came from
(planner.verify.hlo.origins): of its products, else of its own, else of what is fused into it. What
no line of an operator made are copies of what loops carry, and the optimizer's update by the name
of its function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from costmodels.hardware.device import Device, DeviceError, load_device
from costmodels.kernels import attention_time_s, roofline_time_s
from costmodels.precision import load_recipe
from costmodels.products import Product, kernel_time_s, product_time_s
from costmodels.runtimes import load_runtime
from planner.emit.blocks import display_names
from planner.execution.engine import Engine, engine_of
from planner.execution.loops import RepeatedBlock
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import from_json
from planner.ops import operator_of
from planner.ops.expert_kernels import KERNELS
from planner.pricing.pricer import Pricer
from planner.strategy.strategy import Strategy
from planner.verify.clock import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    HEAD,
    NORMS,
    OPTIMIZER,
    PARTS,
    PRODUCTS,
    Clock,
    CollectiveTime,
    TimePart,
)
from planner.verify.hlo.kernels import Kernel, kernels
from planner.verify.hlo.origins import Origins
from planner.verify.hlo.program import Collective, collectives
from planner.verify.hlo.schedule import Schedule
from planner.verify.hlo.text import Computation, Instruction, Module, parse
from planner.verify.hlo.trip_counts import Site
from planner.verify.report import CompiledSizes
from planner.verify.targets import Target

FUSED = ("cudnn", "splash")
UPDATE = "update"
"""The emitted function that makes new parameters."""
_KINDS = {
    "attention": ATTENTION,
    "convolution": PRODUCTS,
    "experts": PRODUCTS,
    "loss": HEAD,
    "norm": NORMS,
    "product": PRODUCTS,
    "recurrent": PRODUCTS,
}
"""Kind of an operator -> its part; of any other, element-wise."""
_FIRST = (ATTENTION, HEAD, NORMS, ELEMENTWISE, PRODUCTS)
"""Of kernels without products of their own that serve several parts, the part that they count
with."""
_TYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e4m3fn",  # devices multiply one by the other at one rate
}
"""XLA's names of the types that devices have rates for, but float32."""


@dataclass(frozen=True)
class Parts:
    """The part of every operator of a graph, and the names that the program has for operators."""

    graph: Graph
    runs: Sequence[RepeatedBlock]

    @cached_property
    def of_node(self) -> Mapping[str, str]:
        """Node -> part. The products that the loss is made of, or of which the results are where
        there is none, are the head, where no block repeats them."""
        nodes = self.graph.nodes
        repeated = {i for run in self.runs for i in range(run.first, run.end)}
        losses = [n for n in nodes if operator_of(n.op).kind == "loss"]
        reached = [n.inputs[0] for n in losses] or list(self.graph.outputs)
        head, seen = set[str](), set[str]()
        while reached:
            maker = self.graph.producer.get(reached.pop())
            if maker is None or maker in repeated or nodes[maker].id in seen:
                continue
            seen.add(nodes[maker].id)
            kind = operator_of(nodes[maker].op).kind
            if kind == "product":
                head.add(nodes[maker].id)
            elif not kind:
                reached += [name for name in nodes[maker].inputs if name]
        return {
            n.id: HEAD if n.id in head else _KINDS.get(operator_of(n.op).kind, ELEMENTWISE)
            for n in nodes
        }

    @cached_property
    def shown(self) -> Mapping[str, str]:
        """Node of a first repeat -> what the function of all repeats calls it."""
        return {
            old: new for run in self.runs for old, new in display_names(self.graph, run).items()
        }

    @cached_property
    def of_name(self) -> Mapping[str, str]:
        """Name of a node in the program -> part."""
        return {
            **self.of_node,
            **{new: self.of_node[old] for old, new in self.shown.items() if old in self.of_node},
        }

    def of(self, kernel: Kernel, origins: Origins) -> str:
        """The part that a kernel serves."""
        if kernel.attention:
            return ATTENTION
        own_name = origins.name(kernel.instruction.attributes)
        inside = [(i, origins.name(i.attributes)) for i in kernel.inside]
        products = [
            self.of_name[name]
            for i, name in inside
            if i.opcode in ("dot", "convolution", "custom-call") and name in self.of_name
        ]
        if products or own_name in self.of_name:
            return products[0] if products else self.of_name[own_name]
        names = [name for _, name in inside if name]
        if own_name == UPDATE or UPDATE in names:
            return OPTIMIZER
        parts = {self.of_name[name] for name in names if name in self.of_name}
        if not parts or _replaces_a_part(kernel):
            return COPIES
        return next(part for part in _FIRST if part in parts)


def _replaces_a_part(kernel: Kernel) -> bool:
    """Whether a kernel puts something into a stack that a loop carries."""
    root = next((i for i in kernel.inside[1:] if i.root), kernel.instruction)
    return root.opcode == "dynamic-update-slice"


def kernel_s(kernel: Kernel, device: Device) -> float:
    """Seconds of one run by the formula of prices."""
    dtype = _TYPES.get(kernel.dtype, "float32")
    if kernel.attention and device.attention:
        return attention_time_s(
            device, kernel.flops, kernel.moved_bytes, dtype, kernel.attention.of
        )
    if kernel.extents and device.tiles:
        extents = (np.array([x]) for x in kernel.extents)
        product = Product(*extents, convolution=kernel.convolution)
        # cuDNN's kernels cut their sums themselves; those of other products are as compiled.
        time_s = product_time_s if kernel.convolution else kernel_time_s
        return float(time_s(device, product, np.array([kernel.moved_bytes]), dtype)[0])
    return roofline_time_s(device, kernel.flops, kernel.moved_bytes, dtype)


# Many parameters: what was compiled, of what, by keyword.
def clock(
    compiled: CompiledSizes,
    source: str,
    *,
    strategy: Strategy,
    graph: Graph,
    plan: Plan,
    runs: Sequence[RepeatedBlock],
    target: Target,
    exact: bool,
    as_priced: bool,
) -> Clock:
    """The clock of one program. source: of the emitted program; runs: its
    repeated blocks; exact: whether its collectives are its own and not the partitioner's;
    as_priced: whether it computes in the precision that the plan is priced in."""
    pricer = pricer_of(strategy)
    device = pricer.sustained(device_of(target, pricer.topology.device))
    module, parts = parse(compiled.text), Parts(graph, runs)
    origins = Origins.of(compiled.text, source)
    sites = kernels(module)
    heaviest = [site for site in sites if site.heaviest]
    served = [parts.of(site.selected, origins) for site in heaviest]
    priced = priced_parts(strategy, parts, plan)
    rows = tuple(
        _part(
            part,
            priced[part],
            [
                site
                for site, part_served in zip(heaviest, served, strict=True)
                if part_served == part
            ],
            device,
        )
        for part in PARTS
    )
    sent = [
        c for c in collectives(compiled.text, plan.mesh, merge_ar_slice=not exact) if c.heaviest
    ]
    seconds = {
        (site.computation, site.selected.instruction.name): kernel_s(site.selected, device)
        for site in sites
    }
    waits = _waits(module, sent, {c: _links_s(c, plan, pricer) for c in sent}, seconds)
    return Clock(
        device=device.name,
        priced_for=pricer.topology.device.name,
        parts=tuple(row for row in rows if row.kernels or row.priced_s),
        collectives=replace(
            waits, priced_exposed_s=float(strategy.costs["exposed_communication_time_s"])
        ),
        peak_bytes=compiled.peak_bytes,
        limit_bytes=int(strategy.costs["memory_limit_bytes"]),
        unfused=_unfused(strategy, parts, heaviest, origins) if as_priced else (),
        judged=as_priced and device.name == pricer.topology.device.name,
        notes=_notes(heaviest, sent, plan, as_priced),
    )


def device_of(target: Target, planned: Device) -> Device:
    """The device that a program was compiled for: the plan's own, with the plan's figures, where it
    is that one."""
    try:
        shipped = load_device(target.name)
    except DeviceError:
        return planned
    return planned if planned.name == shipped.name else shipped


def pricer_of(strategy: Strategy) -> Pricer:
    """Prices on the plan's machine, for the collectives of a program."""
    topology, workload = from_json(strategy.topology), strategy.workload
    training = workload.get("training") or {}
    return Pricer(
        topology,
        pinned_mesh(topology, dict(strategy.mesh_shape)),
        load_runtime(str(workload["runtime"])),
        load_recipe(
            str(workload["precision"]),
            str(training.get("optimizer", "adamw")),
            workload["kind"] == "train",
        ),
    )


def _part(
    part: str, priced_s: float | None, sites: Iterable[Site[Kernel]], device: Device
) -> TimePart:
    listed = list(sites)
    return TimePart(
        part=part,
        priced_s=priced_s,
        compiled_s=sum(s.count * kernel_s(s.selected, device) for s in listed),
        kernels=sum(s.count for s in listed),
        moved_bytes=sum(s.count * s.selected.moved_bytes for s in listed),
        flops=sum(s.count * s.selected.flops for s in listed),
    )


def priced_parts(strategy: Strategy, parts: Parts, plan: Plan) -> Mapping[str, float | None]:
    """Part -> seconds of a step as the plan's file has them, of every tick of a pipeline. Of stages
    that differ, and of files without the price of each operator, the parts are not known."""
    rows = strategy.details
    if engine_of(plan) is Engine.UNEVEN or not rows or not rows.keys() <= parts.of_node.keys():
        return dict.fromkeys(PARTS)
    priced: dict[str, float | None] = dict.fromkeys(PARTS, 0.0)
    for name, row in rows.items():
        kernel, part = row["kernels"], parts.of_node[name]
        priced[part] = (priced[part] or 0.0) + kernel["step_s"] + kernel["bubble_s"]
    priced[OPTIMIZER] = float(strategy.costs["optimizer_time_s"])
    priced[COPIES] = float(strategy.costs.get("loop_copy_time_s", 0.0))
    return priced


def _waits(
    module: Module,
    sent: Iterable[Collective],
    links_s: Mapping[Collective, float],
    kernels_s: Mapping[tuple[str, str], float],
) -> CollectiveTime:
    """What the collectives of a program cost beside its kernels. links_s: of one run; kernels_s:
    (computation, instruction) -> seconds of one run."""
    count: dict[str, int] = {}
    each_s: dict[str, float] = {}
    for c in sent:  # an all-reduce that is partly a scatter is two entries of one instruction
        count[c.name] = c.count
        each_s[c.name] = each_s.get(c.name, 0.0) + links_s[c]

    def kernel(instruction: Instruction, computation: Computation) -> float:
        return kernels_s.get((computation.name, instruction.name), 0.0)

    waited = Schedule(module, kernel, each_s).followed().waited
    return CollectiveTime(
        count=sum(count.values()),
        whole=sum(
            n for name, n in count.items() if waited.get(name, 0.0) >= n * each_s[name] * (1 - 1e-9)
        ),
        links_s=sum(n * each_s[name] for name, n in count.items()),
        exposed_s=sum(waited.values()),
        priced_exposed_s=0.0,
    )


def _links_s(collective: Collective, plan: Plan, pricer: Pricer) -> float:
    """Seconds of one run; of groups that follow no axes as over all of them."""
    axes = tuple(a for a in plan.order if a in collective.axes.split("+")) or plan.order
    return pricer.collective_s(collective.kind, axes, float(collective.payload_bytes))


def _unfused(
    strategy: Strategy, parts: Parts, sites: Sequence[Site[Kernel]], origins: Origins
) -> tuple[str, ...]:
    """Attention and experts that were priced with a kernel of their own and have none in the
    program, by the operator that each such kernel came from; kernels whose operator cannot be told
    serve any."""
    served, experts = (
        {origins.name(s.selected.instruction.attributes) for s in sites if take(s.selected)}
        for take in (lambda kernel: kernel.attention, lambda kernel: kernel.experts)
    )
    lost = tuple(
        f"{parts.shown.get(name, name)} was priced with one kernel for the rows of all experts and"
        " compiled without it"
        for name, row in strategy.nodes.items()
        if row.get("expert_kernel") in KERNELS.values()
        and not {name, parts.shown.get(name, name)} & experts
        and not experts - parts.of_name.keys()
    )
    if served - parts.of_name.keys():
        return lost
    return lost + tuple(
        f"{parts.shown.get(name, name)} was priced with {row['attention_kernel']}'s fused attention"
        " and compiled without a fused kernel"
        for name, row in strategy.nodes.items()
        if row.get("attention_kernel") in FUSED and not {name, parts.shown.get(name, name)} & served
    )


def _notes(
    sites: Iterable[Site[Kernel]], sent: Iterable[Collective], plan: Plan, as_priced: bool
) -> tuple[str, ...]:
    unknown = {s.unknown_loop for s in sites} | {c.unknown_loop for c in sent}
    notes = []
    if unknown - {""}:
        notes.append(
            "counted once, as the text does not say how often they run:"
            f" {', '.join(sorted(unknown - {''}))}"
        )
    if plan.in_host_memory:
        notes.append("what crosses the host's link is in no time here")
    if not as_priced:
        notes.append("the price is that of another precision than was compiled")
    return tuple(notes)
