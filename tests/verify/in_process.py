"""What `plan verify` finds, without a process of its own: the tests' has eight devices."""

from __future__ import annotations

from pathlib import Path

from planner.strategy.reopen import reopen
from planner.strategy.strategy import Strategy
from planner.verify import worker
from planner.verify.numerics import Comparison, compare, seeded_values
from planner.verify.report import VerifyReport


def verified(strategy: Strategy, source: str, folder: Path) -> VerifyReport:
    """Of a strategy for eight devices, which is saved in a folder on the way."""
    path = folder / "s.json"
    strategy.save(path)
    reports: list[VerifyReport] = []
    request = {
        "strategy": str(path),
        "source": source,
        "backend": "shard_map",
        "run": True,
        "tolerance": None,
        "timeout_s": worker.TIMEOUT_S,
    }
    worker.work(request, lambda _, report: reports.append(report))
    return reports[-1]


def compared(
    strategy: Strategy, source: str, microbatches: int = 1, step: bool = False
) -> Comparison:
    """A strategy's training program beside the unsharded model, with so many microbatches. step:
    the whole step."""
    graph = reopen(strategy, source).graph(microbatches)
    errors, _ = compare(
        graph,
        strategy.plan_for(graph),
        workload="train",
        backend="shard_map",
        values=seeded_values(graph, {}),
        step=step,
    )
    return errors
