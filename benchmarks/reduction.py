"""How long the exact reduction takes on the contest's instances, and on pairs of them joined to one
problem of 65 thousand nodes and more.

    python -m benchmarks.reduction --instances DIR [--runs 3]

Printed per problem: nodes, nodes that are left, edges left, and the least CPU seconds of the runs,
without reading. The mark, 5 s, is for the largest instance of the contest, which has 65 thousand
nodes; a pair stands for it where it is not at hand. Joined are two different instances (copies of
one would share every table): side by side in time, usages of the second in units of the first's
limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from planner.solvers.iopddl import read_problem
from planner.solvers.problem import Problem
from planner.solvers.reduce.reductions import reduce


def joined(first: Problem, second: Problem) -> Problem:
    """Both problems as one that has no edge and no moment in common."""
    assert first.usage_limit and second.usage_limit
    nodes, tables = len(first.cost), len(first.tables)
    after = int(first.live_span.max(initial=0))
    share = first.usage_limit / second.usage_limit
    return Problem(
        first.cost + second.cost,
        np.concatenate([first.edges, second.edges + nodes]),
        np.concatenate([first.edge_table, second.edge_table + tables]),
        first.tables + second.tables,
        np.concatenate([first.live_node, second.live_node + nodes]),
        np.concatenate(
            [
                first.live_span,
                np.where(
                    second.live_span[:, 1:] > second.live_span[:, :1], second.live_span + after, 0
                ),
            ]
        ),
        first.live_usage + tuple((u * share).astype(np.int64) for u in second.live_usage),
        first.usage_limit,
    )


def main() -> int:
    """One line a problem; 1 when one of them takes longer than the mark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reduction",
        description=__doc__.split("\n")[0] if __doc__ else None,
    )
    parser.add_argument("--instances", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    problems = {
        path.name.split(".")[0]: read_problem(path)
        for path in sorted(args.instances.glob("*.json.gz"))
    }
    large = sorted(problems, key=lambda name: -len(problems[name].cost))
    for one, other in zip(large[::2], large[1::2], strict=False):
        if len(problems[one].cost) + len(problems[other].cost) >= 65_000:
            problems[f"{one}+{other}"] = joined(problems[one], problems[other])
    print(f"{'':8s}{'nodes':>8s}{'left':>8s}{'edges':>8s}{'CPU s':>8s}")
    slow = False
    for name, problem in problems.items():
        times = []
        for _ in range(args.runs):
            began = time.process_time()
            left = reduce(problem).problem
            times.append(time.process_time() - began)
        assert left is not None
        slow |= min(times) >= 5
        print(
            f"{name:8s}{len(problem.cost):8d}{len(left.cost):8d}{len(left.edges):8d}{min(times):8.2f}",
            flush=True,
        )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
