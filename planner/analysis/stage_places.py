"""Where a graph may be cut into uneven pipeline stages (planner.execution.uneven_pipeline).

Between two nodes: where all that crosses has a gradient, or depends on the batch alone and is made
again, and where no weight has readers on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.execution.uneven_pipeline import batch_only

if TYPE_CHECKING:
    from planner.analysis.basics import BasicFacts


def places(base: BasicFacts) -> dict[int, float]:
    """Nodes before which the graph may be cut -> how many elements are handed over there (module
    docstring)."""
    graph, weightless, n = base.graph, batch_only(base.graph), len(base.graph.nodes)
    uncuttable, handed_on = np.zeros(n + 1, np.int64), np.zeros(n + 1)
    for name, readers in graph.consumers.items():
        ends = [i for i, _ in readers]
        maker = graph.producer.get(name, -1)
        low = min(ends) if name in graph.weights else maker
        high = max(ends, default=low)
        if high <= low or low < 0 or maker in weightless:
            continue
        sums = handed_on if name in base.grad and name not in graph.weights else uncuttable
        size = graph.tensors[name].elements if sums is handed_on else 1
        sums[low + 1] += size
        sums[high + 1] -= size
    crossing, closed = np.cumsum(handed_on), np.cumsum(uncuttable)
    return {
        i: float(crossing[i])
        for i in range(1, n)
        if not closed[i] and i not in weightless and crossing[i] > 0
    }
