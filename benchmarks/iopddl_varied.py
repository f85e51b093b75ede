"""Instances like the contest's, made of those that are at hand: does a solver know the seven, or
problems of their kind?

    python -m benchmarks.iopddl_varied --instances DIR --out DIR [--seed 1] [--noise 0.5] [--drop
    0.02] [--limit 1.0] python -m benchmarks.iopddl --instances OUT --reference CSV

Nodes are numbered anew and in another order, so are the strategies of each; edges stand in another
order and either way round. The costs of a node, and of an edge, are multiplied by a random number
from 2^-noise to 2^noise; so much of the edges is left out; the limit is multiplied. With no noise,
nothing left out and the limit as it is the optimum is the instance's own, so the reference costs
hold; else only the gap between cost and bound tells how good a solution is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.solvers.problem import FORBIDDEN


def varied(
    problem: dict[str, Any], draw: random.Random, noise: float, drop: float, limit: float
) -> dict[str, Any]:
    """A problem like another, in the contest's JSON (planner.solvers.iopddl)."""
    given, pairs = problem["nodes"], problem["edges"]
    old = draw.sample(range(len(given["costs"])), len(given["costs"]))
    new = {node: k for k, node in enumerate(old)}
    order = [draw.sample(range(len(costs)), len(costs)) for costs in given["costs"]]

    def louder(costs: list[int]) -> list[int]:
        times = 2 ** draw.uniform(-noise, noise) if noise else 1
        return [c if c >= FORBIDDEN else int(c * times) for c in costs]

    ends, tables = [], []
    for (u, v), table in draw.sample(
        list(zip(pairs["nodes"], pairs["costs"], strict=True)), len(pairs["nodes"])
    ):
        if draw.random() < drop:
            continue
        first, second, wide = (
            (u, v, len(order[v])) if draw.random() < 0.5 else (v, u, len(order[v]))
        )
        cells = [(a, b) if first == u else (b, a) for a in order[first] for b in order[second]]
        ends.append([new[first], new[second]])
        tables.append(louder([table[a * wide + b] for a, b in cells]))
    nodes = {
        "intervals": [given["intervals"][node] for node in old],
        "costs": [louder([given["costs"][node][k] for k in order[node]]) for node in old],
        "usages": [[given["usages"][node][k] for k in order[node]] for node in old],
    }
    return {
        "name": problem.get("name", ""),
        "nodes": nodes,
        "edges": {"nodes": ends, "costs": tables},
        "usage_limit": int(problem["usage_limit"] * limit),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write one varied instance for each that is there."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.iopddl_varied", description="Instances like the contest's."
    )
    parser.add_argument("--instances", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="log2 of the largest factor on costs"
    )
    parser.add_argument(
        "--drop", type=float, default=0.0, help="part of the edges that is left out"
    )
    parser.add_argument("--limit", type=float, default=1.0, help="factor on the usage limit")
    args = parser.parse_args(argv)
    paths = sorted(args.instances.glob("*.json.gz"))
    if not paths or args.out.resolve() == args.instances.resolve():
        parser.error(
            f"no *.json.gz in {args.instances}"
            if not paths
            else "--out must be another folder than --instances: files keep their names"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        problem = json.loads(gzip.decompress(path.read_bytes()))["problem"]
        made = varied(
            problem, random.Random(f"{args.seed} {path.name}"), args.noise, args.drop, args.limit
        )
        (args.out / path.name).write_bytes(
            gzip.compress(json.dumps({"problem": made}).encode(), 1, mtime=0)
        )
        print(
            f"{path.name}: {len(made['nodes']['costs'])} nodes, {len(made['edges']['nodes'])}"
            f" edges, limit {made['usage_limit']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
