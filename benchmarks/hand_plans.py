"""Plans written by hand: a few nodes are split as told, the rest follows the layouts of what they
read.

    data parallel      every input's batch over the axes; everything else follows
    Megatron           heads, columns, rows and vocabulary over one axis, batch over another
    sequence parallel  Megatron, and the residual stream between blocks cut along the sequence
    ring               positions over one axis everywhere, attention on a ring over it
    ulysses            positions over one axis, heads inside attention (Jacobs et al. 2023)
    random             any legal split per node (equal in the repeats of a block)

`follow` is deliberately simple and independent of the planner's search: a node takes, for each
operand in turn, the axes its dims are cut by.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from planner.errors import PlanError
from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.graph.repeats import classes, find_runs
from planner.ops.lookup import rule_of
from planner.sharding.candidates import candidates
from planner.sharding.layout import Layout
from planner.sharding.rule import Limits, Split, legal

Mesh = tuple[tuple[str, int], ...]
Fixed = Mapping[str, Mapping[str, Sequence[str]]]
"""node id -> {factor: axes}"""


def follow(
    graph: Graph, mesh: Mesh, inputs: Mapping[str, Layout], fixed: Fixed
) -> dict[str, Split]:
    """Splits of all nodes: fixed ones as given, the others as their operands lie. `inputs`: layouts
    of graph inputs."""
    sizes, order = dict(mesh), tuple(a for a, _ in mesh)
    known: dict[str, Layout] = dict(inputs)
    splits: dict[str, Split] = {}
    for node in graph.nodes:
        rule, _ = rule_of(node, graph)
        told = fixed.get(node.id)
        choice: dict[str, list[str]] = {
            f: list(a) for f, a in (told or {}).items() if f in rule.choices
        }
        used = {a for axes in choice.values() for a in axes}
        for slot, name in enumerate(node.inputs):
            for dim, axes in zip(
                rule.operands[slot], known[name].dims if name in known else (), strict=False
            ):
                for axis in axes:
                    trial = {f: list(a) for f, a in choice.items()}
                    if axis in used or not dim or (told and axis not in _batch_axes(inputs)):
                        continue
                    trial.setdefault(dim[0], []).append(axis)
                    if legal(rule, Split.of(trial), sizes, Limits()):
                        choice, used = trial, used | {axis}
        splits[node.id] = Split.of(choice)
        if not legal(rule, splits[node.id], sizes, Limits()):
            raise ValueError(f"{node.id}: {choice} is no legal split")
        for k, name in enumerate(o for o in node.outputs if o):
            known[name] = rule.result(k, splits[node.id], order).stored
    return splits


def _batch_axes(inputs: Mapping[str, Layout]) -> set[str]:
    return {a for layout in inputs.values() for axes in layout.dims for a in axes}


def batch_inputs(graph: Graph, axes: Sequence[str]) -> dict[str, Layout]:
    """Every input cut over the axes along dim 0."""
    return {
        n: Layout((tuple(axes), *((),) * (len(graph.tensors[n].shape) - 1)))
        for n in graph.inputs
        if graph.tensors[n].shape
    }


def data_parallel(graph: Graph, mesh: Mesh) -> dict[str, Split]:
    """The batch over every axis of the mesh."""
    return follow(graph, mesh, batch_inputs(graph, [a for a, _ in mesh]), {})


def positions(
    graph: Graph,
    mesh: Mesh,
    inside: str,
    data: Sequence[str] = ("data",),
    over: Sequence[str] = ("model",),
) -> dict[str, Split]:
    """Positions of token ids and of all that is made of them over some axes, the batch over others;
    inside attention they cut `inside`: "ring" or heads."""
    inputs = {
        n: Layout((tuple(data), tuple(over)))
        for n in graph.inputs
        if len(graph.tensors[n].shape) == 2
    }
    fixed: dict[str, Mapping[str, Sequence[str]]] = {}
    cut: set[str] = set()
    """results that have their heads cut"""
    for node in graph.nodes:
        if node.op == "Attention":
            fixed[node.id] = {inside: over}
            cut.update(node.outputs if inside != "ring" else ())
        elif node.op == "Transpose" and not cut.isdisjoint(node.inputs):
            fixed[node.id] = {rule_of(node, graph)[0].operands[0][2][0]: over}
    return follow(graph, mesh, inputs, fixed)


def random_splits(graph: Graph, mesh: Mesh, seed: int) -> dict[str, Split]:
    """A random legal split per node, alike in the repeats of a block; axes are used as often as
    not. Redrawn until layouts can be joined."""
    rng = np.random.default_rng(seed)
    shared = classes(graph, find_runs(graph))
    rules = [rule_of(n, graph)[0] for n in graph.nodes]
    while True:
        splits: dict[str, Split] = {}
        for i, node in enumerate(graph.nodes):
            if shared[i] != i:
                splits[node.id] = splits[graph.nodes[shared[i]].id]
                continue
            options = candidates(rules[i], dict(mesh), Limits(pending=bool(rng.random() < 0.2)))
            splits[node.id] = options[int(rng.integers(len(options)))]
        try:
            derive(graph, Plan(mesh, splits), training=False, rules=tuple(rules))
        except PlanError:
            continue
        return splits


COLUMNS = (
    "*q_proj.weight",
    "*k_proj.weight",
    "*v_proj.weight",
    "*c_fc.weight",
    "*gate_proj.weight",
    "*up_proj.weight",
    "*lm_head.weight",
)
ROWS = ("*out_proj.weight", "*o_proj.weight", "*c_proj.weight", "*down_proj.weight")
TABLES = ("*wte.weight", "*embed_tokens.weight")
"""Weight labels of GPT and Llama, in the zoo and from exporters: products cut by columns and by
rows, and tables cut by words (a tied head too)."""


def megatron(
    graph: Graph, mesh: Mesh, *, data: str = "data", model: str = "model", sequence: bool = False
) -> dict[str, Split]:
    """Shoeybi et al. 2019 (and with `sequence` Korthikanti et al. 2022) for GPT and Llama:
    vocabulary-parallel table, head and loss."""
    fixed: dict[str, dict[str, list[str]]] = {}
    wide: set[str] = set()
    """results of column-parallel products"""
    hidden = 0
    for node in graph.nodes:
        label = next((graph.labels[n] for n in node.inputs if n in graph.weights), "")
        table, column = _matches(label, TABLES), _matches(label, COLUMNS)
        if node.op == "Gather" and table:
            fixed[node.id], hidden = {"v": [model]}, graph.tensors[node.inputs[0]].shape[1]
        elif node.op == "MatMul" and (table or column):
            fixed[node.id] = {"n": [model]}
            wide.update(node.outputs)
        elif node.op == "MatMul" and _matches(label, ROWS):
            fixed[node.id] = {"k": [model]}
        elif sequence and (
            node.op.endswith("Normalization") or (node.op == "Add" and wide.isdisjoint(node.inputs))
        ):
            shape = graph.tensors[node.outputs[0]].shape
            if len(shape) == 3 and shape[2] == hidden:  # the residual stream between blocks
                fixed[node.id] = {"d1": [model]}
    return follow(graph, mesh, batch_inputs(graph, [data]), fixed)


def _matches(label: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(label, glob) for glob in globs)


def mlp_megatron(
    graph: Graph, mesh: Mesh, *, data: str = "data", model: str = "model"
) -> dict[str, Split]:
    """Alternately column- and row-parallel products."""
    products = [n.id for n in graph.nodes if n.op == "MatMul"]
    return follow(
        graph,
        mesh,
        batch_inputs(graph, [data]),
        {p: {"kn"[k % 2 == 0]: [model]} for k, p in enumerate(products)},
    )
