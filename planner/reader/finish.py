"""The finished draft as a frozen Graph."""

from __future__ import annotations

from planner.graph import Graph, Node, Tensor
from planner.reader.draft import FOLD_ELEMENTS, Draft


def finish(draft: Draft) -> Graph:
    import math
    from planner.reader.tidy import drop_dead
    drop_dead(draft)
    used = {i for op in draft.ops for i in op.inputs if i} | set(draft.outputs) | set(draft.inputs)
    made = {o for op in draft.ops for o in op.outputs if o}
    tensors = {}
    weights, constants = {}, {}
    for n in draft.types:
        if n not in used and n not in made: continue
        shape, dtype = draft.types[n]
        role = "activation"
        if n in draft.inputs: role = "input"
        elif n in draft.values: role = "constant"; constants[n] = draft.values[n]
        elif n in draft.refs: role = "weight"; weights[n] = draft.refs[n]
        tensors[n] = Tensor(n, shape, dtype, role)
    nodes = tuple(Node(op.id, op.op, tuple(op.inputs), tuple(op.outputs), op.attrs, op.scope, op.members) for op in draft.ops)
    return Graph(draft.name, nodes, tensors, tuple(draft.inputs), tuple(draft.outputs), weights, constants, {n: n for n in weights}, frozenset(), dict(draft.dims), tuple(draft.notes))
