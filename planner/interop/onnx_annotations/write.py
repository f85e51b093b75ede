"""A strategy as ONNX multi-device annotations (IR version 11): `ModelProto.configuration`, and for
every node how its operands and results lie.

    configuration           one, "meshwright"; devices are numbered along the mesh, the last axis
                            fastest, and called by their coordinates
    sharding_spec           one for each operand and result that the file knows by the name and
                            shape of the planner's graph. Shards are counted along the sharded dims,
                            the last fastest; where several devices hold one shard the entry is
                            negative and the map names them
    pipeline_stage          of nodes on stages; their devices are those of the stage
    metadata "meshwright"   what annotations cannot express: techniques, and splits that do not
                            follow from layouts of the file's tensors, such as the loss's

Sums that stay pending are written as reduced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.execution.pipeline import Pipeline, pipeline_of
from planner.execution.plan import Plan
from planner.execution.techniques import STRUCTURAL
from planner.graph.ir import Graph
from planner.interop.onnx_annotations.read import faults, plan_of, shapes_of
from planner.sharding.layout import STAGE, Layout, group
from planner.strategy.strategy import Strategy

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts

NAME, IR_VERSION = "meshwright", 11


@dataclass(frozen=True)
class Annotated:
    """model: the annotated ModelProto. nodes: how many carry annotations; pending: results written
    as reduced; beyond: nodes whose splits do not follow from layouts of the file's tensors."""

    model: Any
    nodes: int
    pending: int
    beyond: tuple[str, ...]


def annotate(strategy: Strategy, source: str | Path) -> Annotated:
    """The model of a strategy with its annotations. Raises PlanError: P051 another model, P193 what
    our own checker finds wrong."""
    import onnx

    from planner.analysis.facts import GraphFacts
    from planner.whatif.reprice import own_model, plan_on

    model = own_model(strategy, source)
    base = GraphFacts.of(
        model.graph(int(strategy.techniques["microbatches"])),
        training=model.workload.kind == "train",
    )
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    proto.ir_version = max(proto.ir_version, IR_VERSION)
    table = strategy.techniques
    annotated = _write(
        proto,
        base,
        plan_on(strategy, base),
        {t.key: table[t.key] for t in STRUCTURAL if t.key in table},
    )
    wrong = faults(proto)
    if wrong:
        raise PlanError(
            "P193",
            "the annotations are not valid: this is a mistake in the planner",
            detail=wrong[:4],
        )
    return annotated


def _write(proto: Any, base: GraphFacts, plan: Plan, techniques: dict[str, Any]) -> Annotated:
    graph, mesh = base.graph, tuple(plan.mesh)
    del proto.configuration[:]
    config = proto.configuration.add(name=NAME, num_devices=prod(n for _, n in mesh))
    config.device.extend(
        ",".join(f"{a}={i}" for (a, _), i in zip(mesh, coordinates, strict=True))
        for coordinates in product(*(range(n) for _, n in mesh))
    )
    for node in proto.graph.node:
        del node.device_configurations[:]
    file_nodes, pipeline, known = (
        _file_nodes(proto, graph),
        pipeline_of(graph, plan),
        shapes_of(proto),
    )
    marked, pending = set[int](), 0
    for i, node in enumerate(graph.nodes):
        layouts = dict(_layouts(base, plan, i))
        pending += sum(bool(x.partial) for name, x in layouts.items() if name in node.outputs)
        stage = _stage(i, pipeline)
        for k in file_nodes[i]:
            file_node = proto.graph.node[k]
            names = [
                n
                for n in dict.fromkeys((*file_node.input, *file_node.output))
                if n in layouts and _same(graph, n, known)
            ]
            if not names:
                continue
            of = file_node.device_configurations.add(configuration_id=NAME)
            if plan.stages > 1:
                of.pipeline_stage = stage
            for name in names:
                _spec(
                    of.sharding_spec.add(tensor_name=name),
                    known.get(name, graph.tensors[name].shape),
                    graph.tensors[name].shape,
                    layouts[name],
                    mesh,
                    stage,
                )
            marked.add(k)
    from_layouts = plan_of(proto, base)[1]
    beyond = {
        graph.nodes[c].id: plan.splits[graph.nodes[c].id]
        for c in base.times
        if from_layouts.get(c) != plan.splits[graph.nodes[c].id]
    }
    others = [p for p in proto.metadata_props if p.key != NAME]
    del proto.metadata_props[:]
    proto.metadata_props.extend(others)
    metadata = {
        "techniques": techniques,
        "splits": {n: split.as_dict() for n, split in beyond.items()},
    }
    proto.metadata_props.add(key=NAME, value=json.dumps(metadata, sort_keys=True))
    return Annotated(proto, len(marked), pending, tuple(beyond))


def _layouts(base: GraphFacts, plan: Plan, i: int) -> Iterator[tuple[str, Layout]]:
    """Tensor -> how node i takes or leaves it. Of an operand taken twice the first way counts."""
    node, rule, split, order = (
        base.graph.nodes[i],
        base.rules[i],
        plan.splits[base.graph.nodes[i].id],
        tuple(a for a, _ in plan.mesh),
    )
    seen = set[str]()
    for slot, name in enumerate(node.inputs):
        if name and name not in seen and slot < len(rule.operands):
            seen.add(name)
            yield name, rule.operand(slot, split, order)
    for slot, name in enumerate(o for o in node.outputs if o):
        yield name, rule.result(slot, split, order)


def _file_nodes(proto: Any, graph: Graph) -> list[list[int]]:
    """Per node of the graph the nodes of the file that it stands for: its members by name, and the
    one that makes its results."""
    by_name: dict[str, int] = {}
    by_output: dict[str, int] = {}
    for k, node in enumerate(proto.graph.node):
        by_name.setdefault(node.name, k)
        by_output.update((o, k) for o in node.output if o)
    taken: set[int] = set()
    members = []
    for node in graph.nodes:
        stood_for = [by_name[m] for m in node.members if m in by_name] + [
            by_output[o] for o in node.outputs if o in by_output
        ]
        stood_for = [k for k in dict.fromkeys(stood_for) if k not in taken]
        taken.update(stood_for)
        members.append(stood_for)
    return members


def _same(graph: Graph, name: str, known: dict[str, tuple[int, ...]]) -> bool:
    """Whether the graph's tensor is the file's: a weight that the reader transposed or joined is
    not."""
    weight = graph.weights.get(name)
    if weight is None:
        return len(known.get(name, graph.tensors[name].shape)) == len(graph.tensors[name].shape)
    return (
        not weight.transform and not weight.parts and known.get(name) == graph.tensors[name].shape
    )


def _stage(i: int, pipeline: Pipeline | None) -> int:
    if pipeline is None:
        return 0
    return pipeline.stages - 1 if pipeline.in_epilogue(i) else max(pipeline.stage_of(i), 0)


def _spec(
    spec: Any,
    written: tuple[int, ...],
    shape: tuple[int, ...],
    layout: Layout,
    mesh: tuple[tuple[str, int], ...],
    stage: int,
) -> None:
    """Fill in a ShardingSpecProto. written: the shape in the file, which may hold another batch:
    its dims are then left to the file."""
    sizes, names = dict(mesh), [a for a, _ in mesh]
    cut = [(d, axes) for d, axes in enumerate(layout.dims) if group(axes, sizes) > 1]
    for d, axes in cut:
        how = spec.sharded_dim.add(axis=d).simple_sharding.add(num_shards=group(axes, sizes))
        if written[d] == shape[d]:
            how.dim_value = shape[d]
    holders: list[list[int]] = [[] for _ in range(prod(group(axes, sizes) for _, axes in cut))]
    for number, place in enumerate(product(*(range(n) for _, n in mesh))):
        coordinates = dict(zip(names, place, strict=True))
        if coordinates.get(STAGE, stage) != stage:
            continue
        shard = 0
        for _, axes in cut:
            for a in axes:
                shard = shard * sizes[a] + coordinates[a]
        holders[shard].append(number)
    for k, devices in enumerate(holders):
        if len(devices) == 1:
            spec.device.append(devices[0])
        else:
            spec.device.append(-1 - k)
            spec.index_to_device_group_map.add(key=-1 - k, value=devices)
