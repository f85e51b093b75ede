"""`plan solve`: a bare problem of the strategy-selection contest."""

from __future__ import annotations

import argparse


def solve(args: argparse.Namespace) -> int:
    """A bare problem in the contest's JSON."""
    from planner.solvers.iopddl import solve_file

    return solve_file(args.problem, args.time_limit, args.solver, args.output, args.seed).exit_code
