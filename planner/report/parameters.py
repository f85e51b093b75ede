"""`plan ops FILE --parameters`: every weight with its label, shape, what it feeds, and whether it
trains."""

from __future__ import annotations

import re

from planner.graph.ir import Graph
from planner.ops import operator_of
from planner.support.text import Style, count, fitted, hang, percent

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
SLOTS = {"product": "product", "lookup": "table", "convolution": "filter"}
"""Kind of an operator -> what a weight that it reads is to it."""


def parameter_table(graph: Graph, width: int, colour: bool) -> str:
    """A row per weight; weights whose labels differ in numbers alone share one
    (layers.*.mlp.up.weight, 32 of them)."""
    style = Style(colour)
    groups: dict[tuple[str, tuple[int, ...], str, bool, str], list[str]] = {}
    for name in graph.weights:
        t = graph.tensors[name]
        pattern = _NUMBER.sub("*", graph.labels.get(name, name))
        groups.setdefault(
            (pattern, t.shape, t.dtype, name in graph.trainable, feeds(graph, name)), []
        ).append(name)
    table_rows = [["parameter", "", "shape", "type", "elements", "trains", "feeds"]]
    for (pattern, shape, dtype, trains, slot), names in groups.items():
        label = pattern if len(names) > 1 else graph.labels.get(names[0], names[0])
        elements = sum(graph.tensors[n].elements for n in names)
        table_rows.append(
            [
                label,
                f"x{len(names)}" if len(names) > 1 else "",
                " x ".join(f"{n:,}" for n in shape) or "scalar",
                dtype,
                count(elements),
                style.good("yes") if trains else "no",
                slot,
            ]
        )
    trained = sum(graph.tensors[n].elements for n in graph.trainable)
    share = f" ({percent(trained / graph.parameters)})" if graph.parameters else ""
    head = (
        f"{len(graph.weights):,} weights, {count(graph.parameters)} elements;"
        f" {len(graph.trainable):,} weights train: {count(trained)} elements{share}"
    )
    notes = [line for note in graph.notes for line in hang("", f"note: {note}", width)]
    return "\n".join(
        [
            *hang("", head, width),
            "",
            *fitted(table_rows, width, (1, 4)),
            *([""] if notes else []),
            *notes,
        ]
    )


def feeds(graph: Graph, name: str) -> str:
    """The operators that read a weight and what it is to them, such as `MatMul product`, `Add
    operand 1`."""
    names: dict[str, None] = {}
    for i, slot in graph.consumers.get(name, ()):
        op = graph.nodes[i].op
        kind = operator_of(op).kind
        role = (
            {1: "scale", 2: "bias", 3: "running mean", 4: "running variance"}.get(slot, "")
            if kind == "norm"
            else SLOTS.get(kind, "")
        )
        names[f"{op} {role or f'operand {slot}'}"] = None
    return ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "") or "an output"
