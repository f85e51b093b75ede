"""Which factor of each node carries the batch: followed from dim 0 of the inputs through the
rules."""

from __future__ import annotations

from planner.analysis.basics import BasicFacts


def batch_factors(base: BasicFacts) -> tuple[str, ...]:
    """Per node the factor that carries the batch, "" where none does (or where it would not stay in
    step).

    A dim carries the batch when its major factor does; a node follows the first operand that
    carries it. Inputs whose dim 0 is not the batch (positions, a mask [query, key]) carry none.
    """
    graph = base.graph
    batch = graph.dims.get("batch")
    leading = {
        name: graph.tensors[name].shape[0] for name in graph.inputs if graph.tensors[name].shape
    }
    carried = {
        name: 0 for name, n in leading.items() if n == batch or batch not in leading.values()
    }
    result = []
    for i, node in enumerate(graph.nodes):
        rule, factor = base.rules[i], ""
        for slot, name in enumerate(node.inputs):
            if name in carried:
                dim = rule.operands[slot][carried[name]]
                if dim and dim[0] not in rule.whole:
                    factor = dim[0]
                    break
        result.append(factor)
        if factor:
            for k, out in enumerate(o for o in node.outputs if o):
                for d, dim in enumerate(rule.results[k]):
                    if dim and dim[0] == factor:
                        carried[out] = d
                        break
    return tuple(result)
