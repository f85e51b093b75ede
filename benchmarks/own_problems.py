"""Solvers on the planner's own problems: python -m benchmarks.own_problems [--models NAME,...]
[--untied].

Per zoo model problems on 64 devices (h100-sxm), on a mesh of two axes (8 x 8) and on one of three
(8 x 2 x 4) with every split of each operator: ZeRO stage 1, one microbatch, without a memory
limit and under one halfway between the least any plan needs and what the fastest plan needs.
Printed: options, the gap that the portfolio (`auto`) proves, the gap between its cost and what `dp`
proves alone, and how far `recursive` is above its cost, each with its CPU seconds. --untied: the
problem on two axes with every repeat of a block deciding for itself; its optimum beside the tied
one's.

Marks (exit status 1 when one is missed): gap at most 0.1 % for every model; recursive within 2 % on
average and 5 % at worst; tied and untied within 0.01 %.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from planner.machine.mesh_choices import finer_meshes, two_axes
from planner.machine.topology import Mesh
from planner.pricing.pricer import Pricer
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.solvers.problem import Budget, Problem, evaluate
from planner.space.assemble import assemble
from planner.space.build import build_space
from planner.space.techniques import Techniques
from planner.whatif.per_layer import without_sharing
from planner.workload.model import Model, Workload

MODELS = (
    "gpt2-small",
    "bert-base",
    "t5-small",
    "vit-b16",
    "llama3-8b",
    "mixtral-8x7b",
    "dit-b-2",
    "mamba2-130m",
    "resnet18",
    "resnet50",
)
UNTIED = (
    "gpt2-small,layers=2",
    "gpt2-small,layers=6",
    "gpt2-small",
    "llama3-8b,layers=2",
    "llama3-8b,layers=6",
    "llama3-8b,layers=12",
)
DEVICES, BATCH = 64, 128
GAP, MEAN, WORST, TIED = 1e-3, 0.02, 0.05, 1e-4
LIMIT_S = 300.0
"""By the clock, for one proof."""


def searcher(spec: str) -> Search:
    """A search of a zoo model, to build its spaces and run its solvers."""
    request = make_request(devices=DEVICES, hardware=None, topology=None)
    return Search(Model.open(f"zoo:{spec}", Workload(batch=BATCH), DEVICES), request)


def problem_on(
    search: Search, mesh: Mesh, limit: int | None = None, *, tied: bool = True
) -> Problem:
    """The problem of a mesh at ZeRO stage 1, of every split: a search offers fewer over three
    axes (planner.search.domain). tied: repeats of a block decide alike; if not, every node for
    itself, at the same prices (weights of a block are still reduced as one array).
    """
    base = search.base(1)
    assert base is not None
    base = base if tied else without_sharing(base)
    pricer = Pricer(search.request.topology, mesh, search.request.runtime, search.request.recipe)
    return assemble(build_space(base, pricer, zero_axes=mesh.zero_axes), Techniques(1), limit)


def cpu_s() -> float:
    """Processor seconds of this process and of those it waited for: the portfolio has a second
    one."""
    return sum(os.times()[:4])


def measured(name: str, problem: Problem) -> tuple[float, float, int]:
    """Print a row; (gap of the portfolio, distance of recursive, peak usage of the portfolio's
    choice)."""
    from planner.solvers import solve

    began = cpu_s()
    exact = solve(problem, "auto", Budget(time_limit_s=LIMIT_S))
    middle = cpu_s()
    alone = solve(problem, "dp")
    later = cpu_s()
    quick = solve(problem, "recursive")
    seconds = middle - began, later - middle, cpu_s() - later
    best = evaluate(problem, exact.choice)
    gap, left = (1 - (s.bound or 0.0) / best.cost for s in (exact, alone))
    far = evaluate(problem, quick.choice).cost / best.cost - 1 if quick.choice else float("inf")
    print(
        f"{name:34s} {sum(map(len, problem.cost)):7d} {100 * gap:9.4f} {seconds[0]:7.2f}"
        f" {100 * left:9.4f} {seconds[1]:7.2f} {100 * far:11.3f} {seconds[2]:7.2f}",
        flush=True,
    )
    return gap, far, best.peak_usage


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and say which marks are kept."""
    parser = argparse.ArgumentParser(description="Solvers on the planner's own problems.")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="zoo models, separated by commas"
    )
    parser.add_argument(
        "--untied",
        action="store_true",
        help="compare with problems whose repeats decide for themselves",
    )
    options = parser.parse_args(argv)
    print(
        f"{'problem':34s} {'options':>7s} {'gap %':>9s} {'CPU s':>7s} {'dp gap %':>9s}"
        f" {'CPU s':>7s} {'recursive %':>11s} {'CPU s':>7s}"
    )
    gaps, far = [], []
    for spec in options.models.split(","):
        search = searcher(spec)
        flat = two_axes(search.request.topology, 8)
        for mesh in (flat, finer_meshes(search.request.topology, flat)[0]):
            label = f"{spec} {'x'.join(str(n) for _, n in mesh.shape)}"
            problem = problem_on(search, mesh)
            gap, distance, peak = measured(label, problem)
            least = sum(int(u.min()) for u in problem.live_usage)
            tight = measured(f"{label} tight", problem_on(search, mesh, (least + peak) // 2))
            gaps += [gap, tight[0]]
            far += [distance, tight[1]]
    marks = [
        (f"largest gap {100 * max(gaps):.4f} % <= {100 * GAP:g} %", max(gaps) <= GAP),
        (
            (
                f"recursive {100 * sum(far) / len(far):.2f} % above on average,"
                f" {100 * max(far):.2f} % at worst"
            ),
            sum(far) / len(far) <= MEAN and max(far) <= WORST,
        ),
    ]
    if options.untied:
        from planner.solvers import solve

        for spec in UNTIED:
            costs = []
            search = searcher(spec)
            for tied in (True, False):
                problem = problem_on(search, two_axes(search.request.topology, 8), tied=tied)
                costs.append(evaluate(problem, solve(problem, "dp").choice).cost)
            apart = costs[0] / costs[1] - 1
            marks.append((f"{spec}: tied {100 * apart:+.4f} % beside untied", abs(apart) <= TIED))
    for text, kept in marks:
        print(f"{'kept  ' if kept else 'MISSED'} {text}")
    return 0 if all(kept for _, kept in marks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
