"""The IOPDDL contest's JSON (ASPLOS/EuroSys 2025): read a problem, write a solution, and `plan
solve`.

    {"problem": {"name": ..., "usage_limit": L,
                 "nodes": {"intervals": [[lo, hi], ...], "costs": [[...], ...], "usages": [[...],
                 ...]}, "edges": {"nodes": [[u, v], ...], "costs": [[row-major, first endpoint
                 slow], ...]}}}

A solution file is the contest's: one JSON array with a strategy index per node.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from costmodels.hardware.intake import exists, irregular, read_bytes
from planner.errors import PlanError, did_you_mean
from planner.solvers.problem import FORBIDDEN, Budget, Problem, Solution, Verdict, evaluate

HIGHEST = 1 << 62
"""Costs and usages must stay below this to be exact in int64."""
MOST_BYTES = 2**30
"""Of a problem or a solution, unpacked: some ten times the largest of the contest's."""


def read_problem(path: str | Path) -> Problem:
    """Read a problem in the contest's JSON, gzipped or not.

    Raises:
        PlanError: S001 the file cannot be read, S002 it is not such JSON, S003 its parts do not
        agree.
    """
    try:
        data = _read(path)
    except (OSError, EOFError, zlib.error) as error:
        raise PlanError("S001", f"cannot read {str(path)!r}", detail=[str(error)]) from error
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError) as error:
        help = ["the IOPDDL contest's format is expected"]
        raise PlanError(
            "S002", f"{str(path)!r} is not JSON", detail=[str(error)], help=help
        ) from error
    try:
        return problem_of(loaded)
    except _Malformed as error:
        raise PlanError(
            "S003", f"{str(path)!r} is not a valid problem", detail=[str(error)]
        ) from error


class _Malformed(Exception):
    pass


def problem_of(loaded: Any) -> Problem:
    """The problem in loaded JSON. Self-edges go to the node's cost; equal tables are stored
    once."""
    body = _field(loaded, "problem", dict, "the file")
    nodes, edges = (
        _field(body, "nodes", dict, "problem"),
        body.get("edges") or {"nodes": [], "costs": []},
    )
    raw_cost = _field(nodes, "costs", list, "problem.nodes")
    cost = [_numbers(c, f"costs of node {i}", -FORBIDDEN) for i, c in enumerate(raw_cost)]
    for i, c in enumerate(cost):
        if not len(c):
            raise _Malformed(f"node {i} has no strategy")
    live_node, live_span, live_usage = _intervals(nodes, [len(c) for c in cost])
    ends, picked, tables = _edges(edges, cost)
    limit = body.get("usage_limit")
    if limit is not None and (type(limit) is not int or not -HIGHEST < limit < HIGHEST):
        raise _Malformed(f"usage_limit must be an integer below 2^62, not {limit!r}")
    return Problem(
        cost=tuple(cost),
        edges=ends,
        edge_table=picked,
        tables=tables,
        live_node=live_node,
        live_span=live_span,
        live_usage=live_usage,
        usage_limit=limit,
    )


def _edges(
    edges: dict[str, Any], cost: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Ends of the edges [edges, 2], the table of each [edges], and the tables. What an edge from a
    node to itself costs is added to the node's cost."""
    listed = _field(edges, "nodes", list, "problem.edges")
    raw_tables = _field(edges, "costs", list, "problem.edges")
    if len(listed) != len(raw_tables):
        raise _Malformed(f"{len(listed)} edges but {len(raw_tables)} edge tables")
    number_of: dict[tuple[int, bytes], int] = {}
    tables: list[np.ndarray] = []
    ends: list[tuple[int, int]] = []
    picked: list[int] = []
    for e, (pair, raw) in enumerate(zip(listed, raw_tables, strict=True)):
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(i) is int and 0 <= i < len(cost) for i in pair)
        ):
            raise _Malformed(
                f"edge {e} must name two nodes from 0 to {len(cost) - 1}, not {pair!r}"
            )
        u, v = pair
        table = _numbers(raw, f"costs of edge {e}", -FORBIDDEN)
        rows, columns = len(cost[u]), len(cost[v])
        if len(table) != rows * columns:
            raise _Malformed(
                f"edge {e} ({u}, {v}) needs {rows} x {columns} costs, not {len(table)}"
            )
        if u == v:
            diagonal = np.diagonal(table.reshape(rows, rows))
            bad = (cost[u] >= FORBIDDEN) | (diagonal >= FORBIDDEN)
            cost[u] = np.where(bad, FORBIDDEN, cost[u] + diagonal)
            continue
        key = (rows, table.tobytes())
        if key not in number_of:
            number_of[key] = len(tables)
            tables.append(table.reshape(rows, columns))
        ends.append((u, v))
        picked.append(number_of[key])
    return (np.array(ends, np.int64).reshape(-1, 2), np.array(picked, np.int64), tuple(tables))


def _intervals(
    nodes: dict[str, Any], sizes: list[int]
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    spans = nodes.get("intervals", [[0, 0]] * len(sizes))
    usages = nodes.get("usages", [[0] * s for s in sizes])
    for what, listed in (("intervals", spans), ("usages", usages)):
        if not isinstance(listed, list) or len(listed) != len(sizes):
            raise _Malformed(
                f"problem.nodes.{what} must have one entry per node, {len(sizes)} of them"
            )
    live_node, live_span, live_usage = [], [], []
    for i, (span, raw) in enumerate(zip(spans, usages, strict=True)):
        if not (
            isinstance(span, list)
            and len(span) == 2
            and all(type(t) is int and abs(t) < HIGHEST for t in span)
        ):
            raise _Malformed(f"interval of node {i} must be [start, end] in integers, not {span!r}")
        usage = _numbers(raw, f"usages of node {i}", 0)
        if len(usage) != sizes[i]:
            raise _Malformed(f"node {i} has {sizes[i]} costs but {len(usage)} usages")
        if span[1] > span[0] and usage.any():
            live_node.append(i)
            live_span.append(span)
            live_usage.append(usage)
    return (
        np.array(live_node, np.int64),
        np.array(live_span, np.int64).reshape(-1, 2),
        tuple(live_usage),
    )


def _field(where: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(where, dict) or not isinstance(where.get(name), kind):
        raise _Malformed(
            f"{place} must hold {name!r}, a {'list' if kind is list else 'JSON object'}"
        )
    return where[name]


def _numbers(raw: Any, what: str, least: int) -> np.ndarray:
    """A flat list of integers as int64; anything at or above FORBIDDEN becomes FORBIDDEN in costs
    only."""
    if not isinstance(raw, list):
        raise _Malformed(f"{what} must be a list of integers")
    try:
        numbers = np.array(raw)
    except (ValueError, OverflowError) as error:
        raise _Malformed(f"{what} must be a flat list of integers") from error
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise _Malformed(f"{what} must be a flat list of integers below 2^63")
    if len(numbers) and (int(numbers.min()) < least or int(numbers.max()) >= HIGHEST):
        raise _Malformed(f"{what} must lie between {least} and 2^62")
    return numbers.astype(np.int64)


def _read(path: str | Path) -> bytes:
    """A file's content, unpacked where it is gzipped, of at most `MOST_BYTES`. Raises OSError,
    EOFError and zlib.error."""
    data = read_bytes(path, MOST_BYTES)
    if data[:2] == b"\x1f\x8b":
        with gzip.GzipFile(
            fileobj=io.BytesIO(data)
        ) as packed:  # a few kilobytes may hold gigabytes of zeros
            data = packed.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it holds more than {MOST_BYTES:,} bytes")
    return data


def write_solution(choice: tuple[int, ...], path: str | Path) -> None:
    """Write the choice as one JSON array, atomically: the file is complete or untouched. PlanError
    S001 when it cannot be written."""
    target = Path(path)
    try:
        if exists(target) and (what := irregular(target.stat().st_mode)):
            raise OSError(errno.EINVAL, what)
        handle, name = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(list(choice)) + "\n")
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # as an ordinary new file, not mkstemp's private one
            os.replace(name, target)
        except BaseException:  # Ctrl-C too leaves no half file behind
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PlanError("S001", f"cannot write {str(path)!r}", detail=[str(error)]) from error


@dataclass(frozen=True)
class Solved:
    """What `solve_file` found. `verdict` is None when there is no choice at all."""

    solution: Solution
    verdict: Verdict | None
    usage_limit: int | None
    time_s: float

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost, or None without both."""
        if self.verdict is None or self.solution.bound is None:
            return None
        return max(0.0, self.verdict.cost - self.solution.bound) / max(1, abs(self.verdict.cost))

    @property
    def exit_code(self) -> int:
        """0 solved, 3 nothing feasible, 130 interrupted with the best so far."""
        if self.verdict is None or not self.verdict.feasible:
            return 3
        return 130 if self.solution.stopped == "interrupt" else 0

    def text(self) -> str:
        """The lines that `plan solve` prints on stdout."""
        s, v = self.solution, self.verdict
        bound = "none" if s.bound is None or not math.isfinite(s.bound) else f"{s.bound:.0f}"
        limit = "none" if self.usage_limit is None else str(self.usage_limit)
        lines = [f"status      {s.status}" + (f" (stopped: {s.stopped})" if s.stopped else "")]
        if v is not None:
            lines += [f"cost        {v.cost}", f"peak usage  {v.peak_usage} of {limit}"]
            if v.forbidden:
                lines.append(f"FAILURE     {v.forbidden} forbidden entries chosen")
            elif not v.feasible:
                lines.append("FAILURE     the usage limit is exceeded")
        lines.append(f"bound       {bound}")
        lines.append(
            "gap         " + ("unknown" if self.gap is None else f"{100 * self.gap:.4f} %")
        )
        lines.append(f"time        {self.time_s:.1f} s")
        return "\n".join(lines)


def solve_file(
    path: str | Path,
    time_limit_s: float | None = 60.0,
    solver: str = "auto",
    output: str | Path | None = None,
    seed: int = 0,
    out: TextIO | None = None,
) -> Solved:
    """Solve a problem file, print cost, peak usage, bound and gap, and write the best choice; the
    time limit includes reading.

    On time-out and on Ctrl-C the best choice so far counts. PlanError for a bad file, an unknown
    solver or a bad limit.
    """
    from planner.solvers import SOLVERS, solve
    from planner.solvers.neighbourhood.search import numba_is_there

    began = time.monotonic()
    if solver not in SOLVERS:
        near = did_you_mean(solver, list(SOLVERS)) or "one of " + ", ".join(SOLVERS)
        raise PlanError("S004", f"no solver is called {solver!r}", help=[near])
    if time_limit_s is not None and not time_limit_s > 0:
        raise PlanError("S004", f"the time limit must be positive, not {time_limit_s}")
    problem = read_problem(path)
    left_s = None if time_limit_s is None else max(0.05, time_limit_s - (time.monotonic() - began))
    try:
        solution = solve(problem, solver, Budget(time_limit_s=left_s, seed=seed))
    except KeyboardInterrupt:
        solution = Solution((), "none", None, solver, stopped="interrupt")
    verdict = evaluate(problem, solution.choice) if solution.choice or not problem.cost else None
    if verdict is not None and output is not None:
        write_solution(solution.choice, output)
    result = Solved(solution, verdict, problem.usage_limit, time.monotonic() - began)
    print(result.text(), file=out or sys.stdout, flush=True)
    if solver == "auto" and solution.status == "feasible" and not numba_is_there():
        print(
            "note        the search ran in numpy; its compiled loops are ten times as"
            " fast: pip install 'meshwright[fast]'",
            file=sys.stderr,
        )
    return result
