"""The second process of `auto`: HiGHS, or another search. planner.solvers.partner starts it as
`python -m planner.solvers.worker`, and says what the two send each other.

It ignores Ctrl-C (the parent ends it) and ends when its input closes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import IO

import numpy as np

from planner.solvers import ilp
from planner.solvers.bounds.messages import Rising, raise_bound
from planner.solvers.model import build
from planner.solvers.neighbourhood import descents, search
from planner.solvers.partner import Inbox, get, put
from planner.solvers.problem import Budget, Problem, evaluate


def main() -> None:
    """Serve one problem."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a solver's chatter must not reach the messages
    problem, kind, time_s, seed = get(source)
    inbox = Inbox(source)
    if kind == "ilp":
        _serve_ilp(problem, time_s, sink)
    else:
        _serve_search(problem, time_s, seed, sink, inbox)
    os._exit(0)  # the reading thread may still wait for input


def _serve_ilp(problem: Problem, time_s: float, sink: IO[bytes]) -> None:
    solution = ilp.solve_reduced(problem, Budget(time_limit_s=time_s))
    x = np.array(solution.choice, np.int64) if solution.choice else None
    cost = float(evaluate(problem, solution.choice).cost) if solution.choice else np.inf
    bound = -np.inf if solution.bound is None else solution.bound
    put(sink, (cost, x, bound, np.zeros(0), solution.status == "infeasible", False))


def _serve_search(
    problem: Problem, time_s: float, seed: int, sink: IO[bytes], inbox: Inbox
) -> None:
    began, sent_cost = time.monotonic(), np.inf
    state = search.start(build(problem))
    best = state.best

    def tell() -> None:
        nonlocal sent_cost
        if best.x is not None and best.cost < sent_cost:
            sent_cost = best.cost
            put(sink, (best.cost, best.x, best.bound, best.price, False, False))

    last = 0.0

    def sync() -> None:
        nonlocal last
        if inbox.closed:
            os._exit(0)
        if time.monotonic() - last > 1.0:
            last = time.monotonic()
            tell()

    # a shorter patience than the first process: another way up, another set of decoded choices
    rising = Rising(best, min(60.0, 0.3 * time_s))

    def go_on(_: float) -> bool:
        sync()
        return rising.worthwhile()

    raise_bound(state, go_on, patience=8)
    inbox.merge(best)
    tell()

    def ended(x: np.ndarray) -> None:
        put(sink, (state.model.total(x), x, -np.inf, np.zeros(0), False, True))
        inbox.merge(best)

    if best.x is not None:
        descents.descend(
            state,
            lambda _: (time.monotonic() - began) / time_s,
            search.Others(sync, ended, lambda: None),
            seed,
        )
    tell()


if __name__ == "__main__":
    main()
