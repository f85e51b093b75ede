"""MindSpore's strategies as cuts of our nodes.

Its listings name operators `<Operator>Info<i><i>`, depth first from the output (later operands
first) or, when shardings were propagated, from the input (operands before the operator). The zoo's
comparison nets have the same operators; the reader has since recognised attention, so one of our
nodes stands for four of theirs: scores, scale, softmax, context. A listing in neither order
(ResNet's is grouped by operator) is used where all operators of a kind and rank are cut alike, so
that the order does not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cuts import Cuts
from planner.graph.ir import Graph

NAMES = {
    "LayerNormalization": "LayerNorm",
    "Gelu": "GeLU",
    "Relu": "ReLU",
    "Conv": "Conv2D",
    "BatchNormalization": "BatchNorm",
}
SPECS = {
    "gpt": "zoo:gpt,embedding=0,layers={layers},batch={batch}",
    "mlp": "zoo:mlp-mindspore,layers={layers},batch={rows}",
    "resnet": "zoo:resnet50-mindspore,batch={batch}",
}
SMALL_ROWS = 64
"""Rows of the net whose batch is given as 1; otherwise a batch is 1024 rows."""

Step = tuple[int, str, str]
"""(node index, part of an attention or "", MindSpore's operator)"""


@dataclass(frozen=True)
class Case:
    """A net, a machine, and who searched how. `cuts`: (operator, cuts per operand) in MindSpore's
    order, without its dataset."""

    net: str
    layers: int
    devices: int
    batch: int
    mode: str
    options: str
    cuts: tuple[tuple[str, Cuts], ...]

    @property
    def spec(self) -> str:
        """The zoo's net, batch included."""
        return spec(self.net, self.layers, self.batch)


def spec(net: str, layers: int, batch: int) -> str:
    """The zoo's comparison net at MindSpore's batch."""
    return SPECS[net].format(layers=layers, batch=batch, rows=rows(net, batch))


def rows(net: str, batch: int) -> int:
    """Dim 0 of the net's input: images, or rows of 1024 tokens a sequence. It is what the planner
    calls the batch of these nets."""
    return batch if net == "resnet" else SMALL_ROWS if batch == 1 else batch * 1024


def read_cases(path: Path) -> tuple[Case, ...]:
    """Every strategy of a `strategies.jsonl`, in its order."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        listed = [
            (re.sub(r"Info\d+$", "", key), json.loads(value))
            for key, value in row["strategies"].items()
        ]
        cuts = tuple((op, value) for op, value in listed if op != "VirtualDataset")
        options = ", ".join(json.loads(row["algo"]))
        found.append(
            Case(
                row["net"], row["layers"], row["devices"], row["batch"], row["mode"], options, cuts
            )
        )
    return tuple(found)


def table_of(case: Case, graph: Graph) -> dict[str, Cuts]:
    """Cuts per operand of each node of the zoo's graph. Raises ValueError for a listing that is not
    of this net."""
    theirs = [op for op, _ in case.cuts]
    for steps in (from_output(graph), from_input(graph)):
        if [op for _, _, op in steps] == theirs:
            return _joined(
                graph,
                {(i, part): cuts for (i, part, _), (_, cuts) in zip(steps, case.cuts, strict=True)},
            )
    return _joined(graph, _by_kind(case, graph))


def _by_kind(case: Case, graph: Graph) -> dict[tuple[int, str], Cuts]:
    kinds: dict[tuple[str, tuple[int, ...]], list[Cuts]] = {}
    for op, cuts in case.cuts:
        kinds.setdefault((op, tuple(map(len, cuts))), []).append(cuts)
    found: dict[tuple[int, str], Cuts] = {}
    for i, part, op in from_output(graph):
        ranks = tuple(len(graph.tensors[n].shape) for n in graph.nodes[i].inputs)
        alike = kinds.get((op, ranks), [])
        if part or not alike or any(cuts != alike[0] for cuts in alike):
            raise ValueError(
                f"{graph.nodes[i].id}: {len(alike)} strategies of {op} with ranks {ranks}, in no"
                " order that is known"
            )
        found[i, part] = alike[0]
    if len(found) != len(case.cuts):
        raise ValueError(f"{len(case.cuts)} strategies for a net of {len(found)} operators")
    return found


def _joined(graph: Graph, cuts: Mapping[tuple[int, str], Cuts]) -> dict[str, Cuts]:
    """Per node: an attention's operands are those of its two products, which its softmax must be
    cut like."""
    table: dict[str, Cuts] = {}
    for (i, part), value in cuts.items():
        node = graph.nodes[i]
        if not part:
            table[node.id] = value
        elif part == "context":
            scores, inner, scale = (cuts[i, p] for p in ("scores", "softmax", "scale"))
            (q, k), (weights, v) = scores, value
            if not list(weights) == list(inner[0]) == list(scale[0]) == [*q[:3], k[2]]:
                raise ValueError(
                    f"{node.id}: scores {scores}, softmax {inner} and context {value} are cut"
                    " differently"
                )
            table[node.id] = (q, k, v)
    return table


def _name(graph: Graph, i: int) -> str:
    op = graph.nodes[i].op
    return NAMES.get(op, op)


def from_output(graph: Graph) -> list[Step]:
    """Operators depth first from the last output, later operands first."""
    steps: list[Step] = []
    seen: set[tuple[int, str]] = set()
    stack = [(graph.producer[graph.outputs[-1]], "")]
    while stack:
        i, part = stack.pop()
        node = graph.nodes[i]
        attention = node.op == "Attention"
        if (i, part) in seen:
            continue
        seen.add((i, part))
        operands: Sequence[str] = node.inputs
        if part == "scores":
            steps += [(i, "softmax", "Softmax"), (i, "scale", "Mul"), (i, "scores", "BatchMatMul")]
            operands = node.inputs[:2]
        elif attention:
            steps.append((i, "context", "BatchMatMul"))
            stack.append((i, "scores"))
            operands = node.inputs[2:]
        else:
            steps.append((i, "", _name(graph, i)))
        stack += [(graph.producer[n], "") for n in operands if n in graph.producer]
    return steps


def from_input(graph: Graph) -> list[Step]:
    """Operators depth first from the last output, operands before the operator that reads them."""
    steps: list[Step] = []
    seen: set[tuple[int, str]] = set()
    stack = [(graph.producer[graph.outputs[-1]], "", False)]
    while stack:
        i, part, ready = stack.pop()
        node = graph.nodes[i]
        if ready and part == "scores":
            steps += [(i, "scores", "BatchMatMul"), (i, "scale", "Mul"), (i, "softmax", "Softmax")]
        elif ready:
            steps.append(
                (i, "context", "BatchMatMul")
                if node.op == "Attention"
                else (i, "", _name(graph, i))
            )
        elif (i, part) not in seen:
            seen.add((i, part))
            stack.append((i, part, True))
            operands = node.inputs
            if node.op == "Attention":
                operands = node.inputs[:2] if part == "scores" else node.inputs[2:]
            stack += [
                (graph.producer[n], "", False) for n in reversed(operands) if n in graph.producer
            ]
            if node.op == "Attention" and not part:
                stack.append((i, "scores", False))
    return steps
