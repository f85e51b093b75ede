"""ONNX multi-device annotations read and checked: `faults` holds them to the IR's rules, `pins_of`
makes pins of them.

The mesh is read from the devices' names where they are coordinates ("data=0,tensor=1"), else
inferred: every sharded dim says which shard each device has, and every stride at which the shards
count, (device // stride) % size, is one axis of the mesh. Inferred axes are called by what they cut
in the graph's inputs: data where it is their first dim, tensor elsewhere.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from itertools import permutations, product
from math import prod
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.pins.pins import Pins, from_table
from planner.sharding.candidates import candidates
from planner.sharding.layout import STAGE, Axes
from planner.sharding.rule import PENDING, Limits, Split

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts


def faults(proto: Any) -> list[str]:
    """What is wrong with the annotations of a model, a sentence each; [] where nothing is."""
    sentences: list[str] = []
    configs: dict[str, int] = {}
    for c in proto.configuration:
        if not c.name or c.name in configs:
            sentences.append(f"configuration {c.name!r}: no name of its own")
        if c.num_devices < 1 or (c.device and len(c.device) != c.num_devices):
            sentences.append(
                f"configuration {c.name!r}: {c.num_devices} devices, {len(c.device)} of them named"
            )
        configs[c.name] = c.num_devices
    ranks = shapes_of(proto)
    for node in proto.graph.node:
        seen: set[str] = set()
        for of in node.device_configurations:
            where = f"node {node.name or node.op_type!r}"
            if of.configuration_id not in configs or of.configuration_id in seen:
                sentences.append(
                    f"{where}: configuration {of.configuration_id!r} is unknown or named twice"
                )
                continue
            seen.add(of.configuration_id)
            tensors = [spec.tensor_name for spec in of.sharding_spec]
            sentences += [
                f"{where}: {n!r} is none of its tensors, or annotated twice"
                for n in dict.fromkeys(tensors)
                if n not in (*node.input, *node.output) or tensors.count(n) > 1
            ]
            sentences += [
                f"{where}, {spec.tensor_name!r}: {x}"
                for spec in of.sharding_spec
                for x in _spec_faults(
                    spec, ranks.get(spec.tensor_name), configs[of.configuration_id]
                )
            ]
            if of.pipeline_stage < 0:
                sentences.append(f"{where}: pipeline stage {of.pipeline_stage}")
    if (
        proto.configuration or any(n.device_configurations for n in proto.graph.node)
    ) and proto.ir_version < 11:
        sentences.append(f"IR version {proto.ir_version} has no annotations: 11 is the first")
    return sentences


def _spec_faults(spec: Any, shape: tuple[int, ...] | None, devices: int) -> list[str]:
    """What is wrong with one ShardingSpecProto, a sentence each."""
    sentences: list[str] = []
    axes: list[int] = []
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    shards = 1
    for dim in spec.sharded_dim:
        n = prod(s.num_shards for s in dim.simple_sharding)
        shards *= n
        if not dim.simple_sharding or any(s.num_shards < 1 for s in dim.simple_sharding):
            sentences.append(f"axis {dim.axis} has no number of shards")
        if shape is not None and not -len(shape) <= dim.axis < len(shape):
            sentences.append(f"axis {dim.axis} of rank {len(shape)}")
            continue
        axes.append(dim.axis % len(shape) if shape is not None else dim.axis)
        size = shape[dim.axis] if shape is not None else 0
        declared = (
            prod(s.dim_value for s in dim.simple_sharding)
            if all(s.HasField("dim_value") for s in dim.simple_sharding)
            else 0
        )
        if declared and (n > declared or (size > 0 and declared != size)):
            sentences.append(f"axis {dim.axis} of {size} as {declared} in {n} shards")
    if len(set(axes)) < len(axes):
        sentences.append("an axis is sharded twice")
    holders = [d for v in spec.device for d in groups.get(v, [v])]
    if (
        not holders
        or any(not 0 <= d < devices for d in holders)
        or len(set(holders)) < len(holders)
    ):
        sentences.append(f"devices {holders[:8]} are not each one of {devices}")
    if len(spec.device) != shards:
        sentences.append(f"{shards} shards on {len(spec.device)} devices or groups")
    return sentences


def shapes_of(proto: Any) -> dict[str, tuple[int, ...]]:
    """Shapes the file declares; dims without a value are 0."""
    shapes = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    for v in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if v.type.tensor_type.HasField("shape"):
            shapes.setdefault(v.name, tuple(d.dim_value for d in v.type.tensor_type.shape.dim))
    return shapes


def pins_of(proto: Any, base: GraphFacts) -> Pins:
    """The pins that annotations amount to: the mesh, the splits of nodes, and the techniques that
    our own metadata records.

    Raises PlanError P193: no annotations, several configurations, faults, or shardings that no mesh
    and no split of the graph gives.
    """
    if len(proto.configuration) != 1:
        raise PlanError(
            "P193",
            f"the model has {len(proto.configuration) or 'no'} device configurations; pins are made"
            " of one",
            help=["plan annotate writes one"],
        )
    wrong = faults(proto)
    if wrong:
        raise PlanError(
            "P193", f"the model's annotations are not valid: {wrong[0]}", detail=wrong[1:4]
        )
    config = proto.configuration[0]
    mesh, splits = plan_of(proto, base)
    table: dict[str, Any] = {"mesh": dict(mesh) or {"data": 1}}
    ours = _ours(proto, config.name)
    number = {n.id: i for i, n in enumerate(base.graph.nodes)}
    splits.update(
        {
            base.shared[number[n]]: Split.of(split)
            for n, split in ours.get("splits", {}).items()
            if n in number
        }
    )
    for c, split in sorted(splits.items()):
        rule = base.rules[c]
        axes_of_factor = {
            f: list(split.axes(f))
            for f in (*rule.choices, PENDING)
            if f in rule.sizes or split.axes(f)
        }
        table[glob.escape(base.graph.nodes[c].id)] = {"split": axes_of_factor}
    if base.training:
        table["techniques"] = {
            k: v for k, v in ours.get("techniques", {}).items() if k != "schedule" or v != "none"
        }
    return from_table(table)


def plan_of(proto: Any, base: GraphFacts) -> tuple[tuple[tuple[str, int], ...], dict[int, Split]]:
    """The mesh of the one configuration, and class of nodes -> split as far as annotations say it.
    Raises PlanError P193."""
    config = proto.configuration[0]
    annotated = [(node, of) for node in proto.graph.node for of in node.device_configurations]
    stages = 1 + max((of.pipeline_stage for _, of in annotated), default=0)
    shards = [
        (node, {s.tensor_name: _shards(s, config.num_devices) for s in of.sharding_spec})
        for node, of in annotated
    ]
    mesh = _named_mesh(config) or _inferred_mesh(shards, config.num_devices, stages, base.graph)
    return mesh, _splits(base, shards, mesh)


def _ours(proto: Any, name: str) -> dict[str, Any]:
    """What `plan annotate` writes beside the annotations; {} in files of other tools. Raises
    PlanError P193."""
    text = next((p.value for p in proto.metadata_props if p.key == name), "{}")
    try:
        table = json.loads(text)
        if not all(isinstance(table.get(k, {}), dict) for k in ("techniques", "splits")):
            raise ValueError
        for split in table.get("splits", {}).values():
            Split.of(split)
    except (ValueError, AttributeError, TypeError) as e:
        raise PlanError(
            "P193",
            f"the model's metadata {name!r} is not what plan annotate writes",
            help=["plan annotate again"],
        ) from e
    return dict(table)


def _shards(spec: Any, devices: int) -> tuple[dict[int, tuple[int, ...]], int]:
    """Dim -> shard of each device (-1: it holds nothing), and a device that holds something."""
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    counts = [prod(s.num_shards for s in dim.simple_sharding) for dim in spec.sharded_dim]
    shard_of = {dim.axis: [-1] * devices for dim in spec.sharded_dim}
    holder = 0
    for coordinates, v in zip(product(*(range(n) for n in counts)), spec.device, strict=True):
        for d in groups.get(v, [v]):
            holder = d
            for dim, k in zip(spec.sharded_dim, coordinates, strict=True):
                shard_of[dim.axis][d] = k
    return {d: tuple(v) for d, v in shard_of.items()}, holder


def _named_mesh(config: Any) -> tuple[tuple[str, int], ...]:
    """The mesh that devices' names spell, () where they spell none."""
    try:
        coordinates = [
            {a: int(i) for a, i in (part.split("=") for part in name.split(","))}
            for name in config.device
        ]
    except ValueError:
        return ()
    mesh = (
        tuple((a, 1 + max(c[a] for c in coordinates)) for a in coordinates[0])
        if coordinates and all(c.keys() == coordinates[0].keys() for c in coordinates)
        else ()
    )
    spelt = [tuple(c.values()) for c in coordinates]
    return mesh if spelt == list(product(*(range(n) for _, n in mesh))) else ()


def _inferred_mesh(
    read: list[tuple[Any, dict[str, Any]]], devices: int, stages: int, graph: Graph
) -> tuple[tuple[str, int], ...]:
    """The mesh behind shards of devices: an axis for every stride at which the shards count."""
    strides: dict[
        int, tuple[int, bool]
    ] = {}  # stride -> size, and whether it cuts the first dim of an input
    inner = devices // stages
    for _, specs in read:
        for name, (dims, _) in specs.items():
            for d, shards in dims.items():
                numbers = [k for k in shards if k >= 0]
                size = 1 + max(numbers)
                stride = next(
                    (
                        s
                        for s in range(1, inner + 1)
                        if numbers == [(i // s) % size for i in range(len(numbers))]
                    ),
                    0,
                )
                if size > 1 and stride:
                    old = strides.get(stride, (size, False))
                    strides[stride] = (
                        min(size, old[0]),
                        old[1] or (name in graph.inputs and d == 0),
                    )
    axes: list[tuple[str, int]] = []
    counted = 1
    for stride, (size, first) in sorted(strides.items()):
        if stride % counted:
            raise PlanError(
                "P193",
                "the annotations follow no mesh of devices",
                detail=[f"devices counted off in {size} at {stride}"],
            )
        axes += [("", stride // counted)] if stride > counted else []
        axes.append(("data" if first else "tensor", size))
        counted = stride * size
    if inner % counted:
        raise PlanError(
            "P193",
            "the annotations follow no mesh of devices",
            detail=[f"{inner} devices, axes of {counted}"],
        )
    axes += [("", inner // counted)] if inner > counted else []
    used: dict[str, int] = {}
    named = []
    for name, size in axes:
        name = name or "tensor"
        used[name] = used.get(name, 0) + 1
        named.append((name if used[name] == 1 else f"{name}{used[name]}", size))
    return (*(((STAGE, stages),) if stages > 1 else ()), *reversed(named))


def _axes_of(
    shards: Mapping[int, tuple[int, ...]], rank: int, mesh: tuple[tuple[str, int], ...]
) -> tuple[Axes, ...] | None:
    """Layout behind the shards of a tensor, None where no order of axes gives it."""
    names, coordinates = [a for a, _ in mesh], list(product(*(range(n) for _, n in mesh)))
    sizes, axes_of_dims = dict(mesh), list[Axes]()
    for d in range(rank):
        have = shards.get(d, shards.get(d - rank))
        if have is None or max(have) < 1:
            axes_of_dims.append(())
            continue
        want = 1 + max(have)
        inner = [a for a in names if a != STAGE and sizes[a] > 1]
        for axes in (
            p
            for k in range(1, len(inner) + 1)
            for p in permutations(inner, k)
            if prod(sizes[a] for a in p) == want
        ):
            order = [names.index(a) for a in axes]
            if all(
                k < 0 or k == _number(tuple(c[j] for j in order), tuple(sizes[a] for a in axes))
                for k, c in zip(have, coordinates, strict=True)
            ):
                axes_of_dims.append(axes)
                break
        else:
            return None
    return tuple(axes_of_dims)


def _number(coordinates: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    value = 0
    for i, n in zip(coordinates, sizes, strict=True):
        value = value * n + i
    return value


def _splits(
    base: GraphFacts, read: list[tuple[Any, dict[str, Any]]], mesh: tuple[tuple[str, int], ...]
) -> dict[int, Split]:
    """Class of nodes -> the split that its annotations amount to. Nodes of the file that the
    planner fused are read together."""
    graph = base.graph
    member = {m: i for i, n in reversed(list(enumerate(graph.nodes))) for m in n.members}
    wanted: dict[int, dict[str, tuple[Axes, ...]]] = {}
    for file_node, specs in read:
        i = next(
            (graph.producer[o] for o in file_node.output if o in graph.producer),
            member.get(file_node.name, -1),
        )
        for name, (shards, _) in specs.items() if i >= 0 else ():
            axes = (
                _axes_of(shards, len(graph.tensors[name].shape), mesh)
                if name in graph.tensors
                else ()
            )
            if axes is None:
                raise PlanError(
                    "P193",
                    f"node {file_node.name!r}: the shards of {name!r} follow no axes of the mesh"
                    f" {dict(mesh)}",
                )
            wanted.setdefault(i, {})[name] = axes
    splits: dict[int, Split] = {}
    first_of_class: dict[int, int] = {}
    known: dict[Any, Split] = {}
    for i in sorted(wanted):
        node, c = graph.nodes[i], base.shared[i]
        slots = (
            *(
                (slot, n)
                for slot, n in enumerate(node.inputs)
                if slot < len(base.rules[i].operands)
            ),
            *((-1 - k, n) for k, n in enumerate(o for o in node.outputs if o)),
        )
        wanted_layouts = tuple(
            (slot, wanted[i][n])
            for slot, n in {n: (s, n) for s, n in reversed(slots) if n in wanted[i]}.values()
        )
        split = known.get((c, wanted_layouts)) or known.setdefault(
            (c, wanted_layouts), _split(base, i, wanted_layouts, mesh)
        )
        if splits.setdefault(c, split) != split:
            raise PlanError(
                "P193",
                f"nodes {graph.nodes[first_of_class[c]].id!r} and {node.id!r} are repeats of one"
                " another and annotated differently",
                help=["annotate the repeats of a block alike: they share their decisions"],
            )
        first_of_class.setdefault(c, i)
    return splits


def _split(
    base: GraphFacts,
    i: int,
    wanted_layouts: tuple[tuple[int, tuple[Axes, ...]], ...],
    mesh: tuple[tuple[str, int], ...],
) -> Split:
    """The split of node i under which its operands (by slot) and results (-1, -2, ...) lie as
    asked; of several the one that cuts least."""
    node, rule, order = base.graph.nodes[i], base.rules[i], tuple(a for a, _ in mesh)
    fits = [
        s
        for s in base.reachable(
            i, candidates(rule, {a: n for a, n in mesh if a != STAGE}, Limits(waste=0.5))
        )
        if all(
            (rule.operand(slot, s, order) if slot >= 0 else rule.result(-1 - slot, s, order)).dims
            == axes
            for slot, axes in wanted_layouts
        )
    ]
    if not fits:
        raise PlanError(
            "P193",
            f"node {node.id!r} ({node.op}) cannot be split as annotated",
            detail=[
                f"{'operand' if k >= 0 else 'result'} {max(k, -1 - k)}: {x}"
                for k, x in wanted_layouts
            ],
        )
    return min(
        fits, key=lambda s: (bool(s.axes(PENDING)), sum(len(a) for _, a in s.pairs), s.pairs)
    )
