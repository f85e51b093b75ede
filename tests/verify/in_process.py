"""What `plan verify` finds, without a process of its own: the tests' has eight devices."""

from __future__ import annotations

from pathlib import Path

from planner.strategy.strategy import Strategy
from planner.verify import worker
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
