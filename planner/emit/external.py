"""Where a program finds weights: external data of the model in place, everything else in a
.safetensors beside the program."""

from __future__ import annotations

from itertools import pairwise

from planner.emit.source import literal
from planner.emit.tables import template
from planner.emit.writer import Writer
from planner.graph.ir import DTYPE_BYTES, Graph, WeightRef

STEPS = frozenset({"reshape", "transpose"})


def in_place(graph: Graph, name: str) -> bool:
    """Whether a program can map the weight from the model's own data file: whole bytes, and
    rewrites a program knows."""
    ref = graph.weights[name]
    return (
        isinstance(ref, WeightRef)
        and ref.kind == "external"
        and DTYPE_BYTES[graph.tensors[name].dtype] >= 1
        and all(k in STEPS for k, _ in ref.transform)
    )


def external_table(w: Writer, model_folder: str) -> str:
    """EXTERNAL and MODEL_FOLDER. Weights of repeated blocks share a row where they differ in their
    offsets alone."""
    graph = w.flow.graph
    used = {n for node in graph.nodes for n in node.inputs}
    inside = {names[0]: names for block in w.blocks for names in block.weights}
    rows: list[str] = []
    done: set[str] = set()
    for name in graph.weights:
        if name in used and name not in done and in_place(graph, name):
            names = inside.get(name, (name,))
            labels = [graph.labels.get(n, n) for n in names]
            key = template(labels) if len(names) > 1 else labels[0]
            together = (
                len(names) > 1
                and [key.replace("*", str(i)) for i in range(len(names))] == labels
                and all(in_place(graph, n) for n in names)
            )
            if not together or len({_row(graph, n) for n in names}) > 1:
                names, key = (name,), labels[0]
            done.update(names)
            file, dtype, shape, steps = _row(graph, name)
            offsets = _offsets([int(graph.weights[n].offset) for n in names])
            rows.append(
                f'    {literal(key)}: ({literal(file)}, "{dtype}", {offsets}, {shape}, {steps}),'
            )
    folder = f"MODEL_FOLDER = {literal(model_folder)}\n"
    if not rows:
        return f"EXTERNAL = {{}}\n{folder}"
    note = (
        "# name in the weights file (* counts repeats) -> (file in MODEL_FOLDER, dtype, offset of"
        " each repeat in bytes, shape, steps to the parameter)"
    )
    return "\n".join([note, "EXTERNAL = {", *rows, "}", folder])


def _row(graph: Graph, name: str) -> tuple[str, str, tuple[int, ...], str]:
    """(file, dtype, shape as stored, steps from there): stored shapes are flat where there are
    steps."""
    ref, t = graph.weights[name], graph.tensors[name]
    assert isinstance(ref, WeightRef)
    if not ref.transform:
        rows = (graph.host_tables[name].rows,) if name in graph.host_tables else t.shape[:1]
        return ref.location, t.dtype, (*rows, *t.shape[1:]), "()"
    steps = [f'("{kind}", {tuple(arg)})' for kind, arg in ref.transform]
    steps += [f'("reshape", {t.shape})'] if ref.transform[-1][0] != "reshape" else []
    return (
        ref.location,
        t.dtype,
        (int(ref.length // DTYPE_BYTES[t.dtype]),),
        f"({', '.join(steps)},)",
    )


def _offsets(offsets: list[int]) -> str:
    """Literal of the offsets: a range where they are evenly spaced."""
    steps = {b - a for a, b in pairwise(offsets)}
    if len(offsets) > 2 and len(steps) == 1 and min(steps) > 0:
        return f"range({offsets[0]}, {offsets[-1] + min(steps)}, {min(steps)})"
    return str(tuple(offsets))
