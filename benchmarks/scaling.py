"""How the solvers grow: python -m benchmarks.scaling [--quick] [--only STUDY] [--save FILE] [--plot
FOLDER] [--from FILE].

One problem (splits on one mesh, ZeRO stage 1, one microbatch) of the zoo's GPT grows along one
line at a time:

    layers        repeats tied (`folded`, as `plan` searches) or each deciding for itself
                  (`unfolded`), mesh 8 x 8
    devices       mesh (devices / 8) x 8, 24 layers
    mesh axes     64 devices as one to three axes, 24 layers
    strategies    at most so many a node, evenly drawn from those of a mesh of three axes, 24 layers

Every solver gets every problem, without a memory limit and under one halfway between the least any
plan needs and what the fastest needs (`tight`), with LIMIT_S to end in; `dp-leaf` is `dp` with the
work that `plan` gives it for one of its many problems at first. One process a figure: CPU-seconds
of building the problem and of solving it, the process's peak memory, the gap the solver proves, and
how far its answer is above the best any solver found.

--save FILE writes the figures as JSON; --plot FOLDER draws them (needs the extra `plot`); --from
FILE draws a saved file without measuring. `exact` means a proven gap of at most 1e-6.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from planner.solvers.problem import FORBIDDEN, Budget, Problem, evaluate
from planner.support.atomic_write import replacing

ROOT = Path(__file__).parents[1]
SOLVERS = ("dp", "dp-leaf", "recursive", "ilp")
LIMIT_S = 60.0
EXACT = 1e-6
AXES = ((64,), (8, 8), (4, 4, 4))
STUDIES: dict[str, tuple[str, tuple[int, ...]]] = {
    "layers-folded": ("layers", (6, 12, 24, 48, 96, 192, 384)),
    "layers-unfolded": ("layers", (6, 12, 24)),
    "devices": ("devices", (8, 64, 512, 4096, 32768)),
    "axes": ("mesh axes", (1, 2, 3)),
    "strategies": ("strategies a node, at most", (4, 8, 16, 32, 64, 128)),
}
"""Study -> what grows, and its values."""


@dataclass(frozen=True)
class Row:
    """One solver on one problem. gap: 1 - bound / cost, None without a bound; cost: None without a
    plan (`status` says why)."""

    study: str
    value: int
    limit: str  # "none" or "tight"
    solver: str
    nodes: int
    options: int
    build_cpu_s: float
    solve_cpu_s: float
    peak_mib: float
    cost: int | None
    gap: float | None
    status: str


def thinned(problem: Problem, most: int) -> Problem:
    """The problem with at most so many strategies a node, evenly spaced in the node's own order (so
    that equal nodes keep equal ones)."""
    kept = [
        np.unique(np.linspace(0, len(c) - 1, min(most, len(c))).round().astype(int))
        for c in problem.cost
    ]
    tables, at, which = [], {}, []
    for (u, v), t in zip(problem.edges.tolist(), problem.edge_table.tolist(), strict=True):
        key = t, kept[u].tobytes(), kept[v].tobytes()
        if key not in at:
            at[key] = len(tables)
            tables.append(problem.tables[t][np.ix_(kept[u], kept[v])])
        which.append(at[key])
    usage = tuple(
        u[kept[i]] for u, i in zip(problem.live_usage, problem.live_node.tolist(), strict=True)
    )
    choices = tuple(c[kept[i]] for i, c in enumerate(problem.axis_choice))
    return replace(
        problem,
        cost=tuple(c[k] for c, k in zip(problem.cost, kept, strict=True)),
        edge_table=np.array(which, np.int64),
        tables=tuple(tables),
        live_usage=usage,
        axis_choice=choices,
    )


def built(study: str, value: int) -> Problem:
    """The problem of a study at one value, without a memory limit."""
    from planner.machine.mesh_choices import pinned_mesh
    from planner.pricing.pricer import Pricer
    from planner.search.build_request import make_request
    from planner.search.search import Search
    from planner.sharding.layout_table import LayoutTable
    from planner.sharding.rule import Limits
    from planner.space.assemble import assemble
    from planner.space.build import build_space
    from planner.space.techniques import Techniques
    from planner.whatif.per_layer import without_sharing
    from planner.workload.model import Model, Workload

    layers = value if study.startswith("layers") else 24
    devices = value if study == "devices" else 64
    shape = (
        AXES[value - 1]
        if study == "axes"
        else AXES[2]
        if study == "strategies"
        else (devices // 8, 8)
        if devices > 8
        else (8,)
    )
    request = make_request(devices=devices, hardware=None, topology=None)
    model = Model.open(
        f"zoo:gpt,layers={layers},hidden=4096,heads=32,seq=1024,vocab=51200,tied=false",
        Workload(batch=max(128, devices)),
        devices,
    )
    names = ("data", "model", "model2")
    search = Search(model, request)
    mesh = pinned_mesh(request.topology, dict(zip(names, shape, strict=False)))
    base = search.base(1)
    assert base is not None
    base = without_sharing(base) if study == "layers-unfolded" else base
    # Every split of every axis; the outer search gives meshes of three axes only those that plans
    # on two suggest.
    space = build_space(
        base,
        Pricer(request.topology, mesh, request.runtime, request.recipe, LayoutTable()),
        limits=Limits(),
        allowed=None,
        zero_axes=mesh.zero_axes,
        parts=1,
    )
    problem = assemble(space, Techniques(1), None)
    return thinned(problem, value) if study == "strategies" else problem


def halfway(problem: Problem) -> int:
    """Bytes halfway between the least that any choice needs and what the fastest needs."""
    from planner.solvers import solve

    sizes = replace(
        problem,
        cost=tuple(np.where(c >= FORBIDDEN, c, 0) for c in problem.cost),
        tables=tuple(np.where(t >= FORBIDDEN, t, 0) for t in problem.tables),
    )
    usage = [np.zeros(len(c), np.int64) for c in problem.cost]
    for i, u in zip(problem.live_node.tolist(), problem.live_usage, strict=True):
        usage[i] = usage[i] + u
    least = solve(
        replace(sizes, cost=tuple(c + u for c, u in zip(sizes.cost, usage, strict=True))),
        "dp",
        Budget(work=2_000_000),
    )
    fastest = solve(problem, "dp", Budget(work=2_000_000))
    return (
        evaluate(problem, least.choice).peak_usage + evaluate(problem, fastest.choice).peak_usage
    ) // 2


def cell(study: str, value: int, limit: str, solver: str) -> Row:
    """One figure, in this process."""
    import resource

    from planner.search.solving import WORK
    from planner.solvers import solve

    began = time.process_time()
    problem = built(study, value)
    build = time.process_time() - began
    if limit == "tight":
        problem = replace(problem, usage_limit=halfway(problem))
    began = time.process_time()
    name, _, leaf = solver.partition("-")
    solved = solve(problem, name, Budget(time_limit_s=LIMIT_S, work=WORK[name] if leaf else None))
    took = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    verdict = evaluate(problem, solved.choice) if solved.choice else None
    cost = verdict.cost if verdict is not None and verdict.feasible else None
    gap = max(0.0, 1 - solved.bound / cost) if cost and solved.bound is not None else None
    return Row(
        study,
        value,
        limit,
        solver,
        len(problem.cost),
        sum(map(len, problem.cost)),
        build,
        took,
        peak,
        cost,
        gap,
        solved.stopped or solved.status,
    )


def measured(study: str, value: int, limit: str, solver: str) -> Row:
    """`cell` in a process of its own."""
    code = (
        "import json, dataclasses; from benchmarks.scaling import cell;"
        f" print(json.dumps(dataclasses.asdict(cell({study!r}, {value}, {limit!r}, {solver!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{study} {value} {limit} {solver} failed:"
            f" {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def above(row: Row, rows: Sequence[Row]) -> float | None:
    """How far a row's plan is above the best of its problem, as a fraction."""
    costs = [
        r.cost
        for r in rows
        if (r.study, r.value, r.limit) == (row.study, row.value, row.limit) and r.cost
    ]
    return row.cost / min(costs) - 1 if row.cost else None


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The figures as a Markdown table, a line a problem and limit."""
    yield (
        "| study | value | nodes | options | build CPU s | limit | "
        + " | ".join(f"`{s}` CPU s, gap, above best" for s in SOLVERS)
        + " |"
    )
    yield "|---|---|---|---|---|---|" + "---|" * len(SOLVERS)
    for key in dict.fromkeys((r.study, r.value, r.limit) for r in rows):
        same = {r.solver: r for r in rows if (r.study, r.value, r.limit) == key}
        first = next(iter(same.values()))
        cells = [
            f"{key[0]} | {key[1]:,} | {first.nodes:,} | {first.options:,} |"
            f" {min(r.build_cpu_s for r in same.values()):.2f} | {key[2]}"
        ]
        for solver in SOLVERS:
            row = same.get(solver)
            far = above(row, rows) if row else None
            if row is None or far is None:
                cells.append(f"no plan ({row.status})" if row else "")
                continue
            proof = (
                "no bound"
                if row.gap is None
                else "exact"
                if row.gap <= EXACT
                else f"{100 * row.gap:.2g} %"
            )
            cells.append(f"{row.solve_cpu_s:.2f}, {proof}, {100 * far:.2g} %")
        yield f"| {' | '.join(cells)} |"


def limits(rows: Sequence[Row]) -> Iterator[str]:
    """Where each solver stops being exact, a line a study, limit and solver."""
    for study, limit in dict.fromkeys((r.study, r.limit) for r in rows):
        for solver in SOLVERS:
            mine = [r for r in rows if (r.study, r.limit, r.solver) == (study, limit, solver)]
            lost = [r.value for r in mine if r.gap is None or r.gap > EXACT]
            worst = max((above(r, rows) or 0.0 for r in mine), default=0.0)
            said = (
                f"exact to {mine[-1].value:,}"
                if not lost
                else f"proves no optimum at {', '.join(f'{v:,}' for v in lost)}"
            )
            yield (
                f"{study:16s} {limit:5s} {solver:9s} {said}; at most {100 * worst:.2g} % above the"
                " best known"
            )


def drawn(rows: Sequence[Row], folder: Path) -> None:
    """One picture a study: CPU-seconds of solving and peak memory against what grows."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install 'meshwright[plot]'") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "meshwright"  # the same figures give the same file
    folder.mkdir(parents=True, exist_ok=True)
    for study in dict.fromkeys(r.study for r in rows):
        figure, (seconds, memory) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for solver, colour in zip(
            SOLVERS, ("#1f6fb4", "#7fb2dd", "#d1691c", "#3a8f5c"), strict=True
        ):
            for limit, style in (("none", "o-"), ("tight", "s--")):
                mine = [r for r in rows if (r.study, r.solver, r.limit) == (study, solver, limit)]
                x, label = (
                    [r.value for r in mine],
                    f"{solver}, {'no limit' if limit == 'none' else 'tight memory'}",
                )
                seconds.plot(
                    x,
                    [max(r.solve_cpu_s, 1e-3) for r in mine],
                    style,
                    color=colour,
                    label=label,
                    markersize=4,
                )
                memory.plot(x, [r.peak_mib for r in mine], style, color=colour, markersize=4)
        for axes, title in (
            (seconds, "CPU seconds of solving"),
            (memory, "peak memory of the process, MiB"),
        ):
            axes.set_xlabel(STUDIES[study][0])
            axes.set_title(title, fontsize=10)
            axes.set_xscale(
                "linear" if study == "axes" else "log", **({} if study == "axes" else {"base": 2})
            )
            axes.set_xticks(STUDIES[study][1], [f"{v:,}" for v in STUDIES[study][1]], fontsize=8)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        seconds.set_yscale("log")
        figure.legend(
            *seconds.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7
        )
        figure.suptitle(study, fontsize=11)
        figure.savefig(folder / f"scaling-{study}.svg", metadata={"Date": None})
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, then print, save and draw."""
    parser = argparse.ArgumentParser(description="How the solvers grow.")
    parser.add_argument("--only", choices=STUDIES, help="one study")
    parser.add_argument(
        "--quick", action="store_true", help="the two smallest values of each study"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--from",
        type=Path,
        metavar="FILE",
        dest="source",
        help="read figures saved before instead of measuring",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="draw one SVG a study into this folder"
    )
    options = parser.parse_args(argv)
    if options.source:
        rows = [Row(**r) for r in json.loads(options.source.read_text())]
    else:
        rows = []
        for study, (_, values) in STUDIES.items():
            for value in (
                (values[:2] if options.quick else values) if options.only in (None, study) else ()
            ):
                for limit in ("none", "tight"):
                    rows += [measured(study, value, limit, solver) for solver in SOLVERS]
                    print(*rows[-len(SOLVERS) :], sep="\n", file=sys.stderr, flush=True)
    if options.save:
        with replacing(options.save) as f:
            f.write(("[\n" + ",\n".join(json.dumps(asdict(r)) for r in rows) + "\n]\n").encode())
    if options.plot:
        drawn(rows, options.plot)
    print(*lines(rows), "", *limits(rows), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
