"""Where a program finds weights: external data of the model in place, everything else in a .safetensors beside the program."""

from __future__ import annotations

from planner.emit.source import literal
from planner.graph import DTYPE_BYTES, Graph, WeightRef

STEPS = frozenset({"reshape", "transpose"})


def in_place(graph: Graph, name: str) -> bool:
    """Whether a program can map the weight from the model's own data file: whole bytes, and rewrites a program knows."""
    ref = graph.weights[name]
    return isinstance(ref, WeightRef) and ref.kind == "external" and DTYPE_BYTES[graph.tensors[name].dtype] >= 1 and all(k in STEPS for k, _ in ref.transform)


def external_table(graph: Graph, model_folder: str) -> str:
    """EXTERNAL and MODEL_FOLDER. Stored shapes are flat: the steps (or the final shape) say the rest."""
    rows = []
    used = {n for node in graph.nodes for n in node.inputs}
    for name, ref in graph.weights.items():
        if name in used and in_place(graph, name):
            t = graph.tensors[name]
            count = int(ref.length // DTYPE_BYTES[t.dtype])
            steps = "".join(f'("{kind}", {tuple(arg)}), ' for kind, arg in ref.transform)
            if not ref.transform or ref.transform[-1][0] != "reshape":
                steps += f'("reshape", {t.shape}), '
            label = graph.labels.get(name, name)
            rows.append(f'    {literal(label)}: ({literal(ref.location)}, "{t.dtype}", {ref.offset}, ({count},), ({steps.rstrip()})),')
    folder = f"MODEL_FOLDER = {literal(model_folder)}\n"
    if not rows:
        return f"EXTERNAL = {{}}\n{folder}"
    note = "# name in the weights file -> (file in MODEL_FOLDER, dtype, offset in bytes, elements, steps to the parameter)"
    return "\n".join([note, "EXTERNAL = {", *rows, "}", folder])
