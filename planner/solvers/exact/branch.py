"""Branch and bound on memory: what is left where prices leave a gap that labels cannot close.

Under the best prices two choices are cheapest, one that overloads and one that fits. The node whose
priced usage differs most between them is split at the middle: its options that use less in one
half, those that use more in the other. Neither half has both choices, so that both bounds rise.
Halves are looked at lowest bound first; each drops the options that cost too much under its own
prices (`Tree.marginals`) before it is split. When it ends the optimum is proven; stopped by the
clock, the lowest bound of an open half is a bound.
"""

from __future__ import annotations

import heapq

import numpy as np

from planner.solvers.bounds.lagrangian import Dual, maximise, slack
from planner.solvers.bounds.messages import rounding
from planner.solvers.exact.elimination import compile_tree
from planner.solvers.exact.labels import close_gap
from planner.solvers.exact.narrow import chosen, options, places
from planner.solvers.model import Model, restrict

CAP = 500
"""Labels of a half: enough for a small gap."""

Options = list[np.ndarray]
"""Of each variable the options that are still looked at, by number. [variables][options]"""


def branch(root: Dual) -> None:
    """Halve until nothing better is left or the clock stops; updates the best choice and the
    bound."""
    model, clock = root.model, root.clock
    heap: list[tuple[float, int, Options]] = [(root.bound, 0, [np.arange(s) for s in model.sizes])]
    number = 1
    while heap and not clock.stopped:
        bound, _, open_options = heap[0]
        if bound > root.best_cost - 1 + slack(root.best_cost):
            break
        halves = _halves(root, open_options, bound)
        if clock.stopped:
            break
        heapq.heappop(heap)
        for least, half in halves:
            heapq.heappush(heap, (least, number, half))
            number += 1
    root.bound = max(root.bound, min(heap[0][0] if heap else np.inf, root.best_cost))


def _halves(root: Dual, open_options: Options, bound: float) -> list[tuple[float, Options]]:
    """What is still open of these options, in two halves with their bound; nothing when they hold
    no better choice."""
    model = restrict(root.model, open_options)
    memory, tree = model.memory, compile_tree(model)
    assert memory is not None
    if (memory.extreme(False) > memory.limit).any():
        return []
    if tree is None:  # the order found is larger than that for all options together
        return [
            (bound, [k[c] for k, c in zip(open_options, half, strict=True)])
            for half in _split(model, [np.arange(s) for s in model.sizes], None)
        ]
    dual = Dual(model, tree, root.clock, best_cost=root.best_cost)
    if root.best is not None and (known := places(open_options, root.best)) is not None:
        dual.best = known
    maximise(dual)
    if dual.bound == np.inf:  # each choice has a forbidden entry
        return []
    if not dual.closed and not root.clock.stopped:
        close_gap(dual, CAP, root.clock)
    if dual.best is not None and dual.best_cost < root.best_cost:
        root.offer(chosen(open_options, dual.best))
    if dual.closed or root.clock.stopped:
        return []
    least = (
        tree.marginals(model.cost + memory.priced(dual.price, len(model.cost)))[1]
        - float(dual.price.sum()) * memory.limit
    )
    root.clock.spend(2 * tree.entries)
    still_open = options(model, least, root.best_cost + rounding(root.best_cost))
    if not all(map(len, still_open)):
        return []
    return [
        (max(bound, dual.bound), [k[c] for k, c in zip(open_options, half, strict=True)])
        for half in _split(model, still_open, dual)
    ]


def _split(model: Model, inner: Options, dual: Dual | None) -> list[Options]:
    """Two halves of the options of the node whose usage differs most, by price where rows have
    one."""
    memory = model.memory
    assert memory is not None
    price = dual.price if dual is not None and dual.price.any() else np.ones(memory.rows)
    use = memory.priced(price, len(model.cost))
    part = [use[a + k] for a, k in zip(model.offset[:-1], inner, strict=True)]
    low, high = np.array([p.min() for p in part]), np.array([p.max() for p in part])
    if dual is not None and dual.below is not None and dual.above is not None:
        ends = use[model.offset[:-1] + dual.below], use[model.offset[:-1] + dual.above]
        apart = np.minimum(high, np.maximum(*ends)) - np.maximum(low, np.minimum(*ends))
        if apart.max() > 0:
            low, high = np.maximum(low, np.minimum(*ends)), np.minimum(high, np.maximum(*ends))
    i = int((high - low).argmax())
    less = part[i] <= (low[i] + high[i]) / 2
    if high[i] <= low[i]:
        i = int(np.argmax([len(k) for k in inner]))
        less = np.arange(len(inner[i])) < len(inner[i]) // 2
    return [
        [*inner[:i], inner[i][which], *inner[i + 1 :]] for which in (less, ~less) if which.any()
    ]
