"""The IOPDDL contest's instances against reference costs.

    python -m benchmarks.iopddl --instances DIR --reference CSV [--scale S] [--only A,C] [--solver
    auto] [--keep DIR]

Each instance runs in its own process within the contest's time limit (reading included) times S.
Printed per instance: cost, reference cost / cost (1 = as good, above 1 = better), proven bound and
gap, wall time, and peak memory of the process and its partner. The CSV has columns instance,
contest_seconds and best_known_cost.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path


def run_one(path: Path, limit_s: float, solver: str, seed: int, keep: Path | None) -> None:
    """Solve one file in this process and print a JSON line."""
    import resource

    from planner.solvers import solve
    from planner.solvers.iopddl import read_problem, write_solution
    from planner.solvers.problem import Budget, evaluate

    began = time.monotonic()
    problem = read_problem(path)
    found = solve(
        problem, solver, Budget(time_limit_s=limit_s - (time.monotonic() - began), seed=seed)
    )
    wall = time.monotonic() - began
    verdict = evaluate(problem, found.choice) if found.choice else None
    if keep is not None and verdict is not None and verdict.feasible:
        write_solution(found.choice, keep / f"{path.name.split('.')[0]}.solution.json")
    peak = sum(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    line = {
        "cost": verdict.cost if verdict is not None and verdict.feasible else None,
        "status": found.status,
        "bound": found.bound,
        "time_s": wall,
        "peak_bytes": peak * 1024,
    }
    print(json.dumps(line))


def main() -> int:
    """Run the instances named in the reference file, one after the other."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.iopddl", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="", help="comma-separated instances")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for solution files")
    parser.add_argument(
        "--one", nargs=2, metavar=("FILE", "SECONDS"), help="one file only, a JSON line"
    )
    args = parser.parse_args()
    if args.one:
        run_one(Path(args.one[0]), float(args.one[1]), args.solver, args.seed, args.keep)
        return 0
    if args.instances is None or args.reference is None:
        parser.error("--instances and --reference are needed")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    wanted = {name for name in args.only.split(",") if name}
    ratios = []
    print(
        f"{'':4s}{'cost':>16s}{'ref/cost':>10s}{'bound':>18s}{'gap %':>9s}{'time s':>8s}{'limit':>7s}{'MiB':>7s}"
        "  status",
        flush=True,
    )
    for row in csv.DictReader(args.reference.read_text().splitlines()):
        name = row["instance"]
        files = sorted(args.instances.glob(f"{name}.json*"))
        if not files or (wanted and name not in wanted):
            continue
        limit = float(row["contest_seconds"]) * args.scale
        command = [
            sys.executable,
            "-m",
            "benchmarks.iopddl",
            "--one",
            str(files[0]),
            str(limit),
            "--solver",
            args.solver,
        ]
        command += ["--seed", str(args.seed)] + (["--keep", str(args.keep)] if args.keep else [])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(
                f"{name:4s}failed:"
                f" {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
            )
            ratios.append(0.0)
            continue
        got = json.loads(done.stdout.strip().splitlines()[-1])
        cost, bound = got["cost"], got["bound"]
        ratio = int(row["best_known_cost"]) / cost if cost else 0.0
        ratios.append(ratio)
        gap = (
            f"{100 * max(0.0, cost - bound) / cost:9.4f}"
            if cost and bound is not None
            else f"{'-':>9s}"
        )
        shown = "-" if bound is None else f"{bound:.0f}"
        print(
            f"{name:4s}{cost if cost else '-':>16}{ratio:10.5f}{shown:>18s}{gap}{got['time_s']:8.1f}{limit:7.0f}{got['peak_bytes'] / 2**20:7.0f}"
            f"  {got['status']}",
            flush=True,
        )
    if ratios:
        print(f"mean ref/cost {sum(ratios) / len(ratios):.5f} over {len(ratios)} instances")
    return 0


if __name__ == "__main__":
    sys.exit(main())
