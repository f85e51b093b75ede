"""Each way of spreading work alone, and combinations drawn at random: the emitted program against
the unsharded one, its bytes against the compiler's.

    python -m benchmarks.techniques [--only WORD] [--drawn 30] [--mixed 0] [--seed 0] [--records
    FILE] [--page FILE]

Every row pins a technique on a small model, emits its training step for 8 virtual CPU devices,
compiles it and makes three optimizer steps, a process a row (`benchmarks.technique_run`):
collective bytes by kind and axes, products and argument bytes must equal the prediction; loss,
every gradient and every parameter, in each step, the unsharded float32 program. Where a technique
promises less memory, the compiled program's (arguments, results and temporaries) is held against
that of the row it is compared with.

--records: a line of JSON a row, written as it ends (default benchmarks/results/techniques.jsonl).
Rows that hold there are not run again; rows that failed are. --mixed: so many combinations of all
that the rows have alone, for seeds of one's own (with --only mixed and a file of records of their
own). --page: write the table of the documentation from the records, instead of running anything.
JAX_COMPILATION_CACHE_DIR=FOLDER in the environment spares compiling a model's unsharded program for
every row.

Exit status 1 where a row fails.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import planner
from benchmarks.technique_rows import ALONE, DEVICES, Row, drawn, mixed
from planner.errors import PlanError
from planner.pins.pins import Pins, parse_pins
from planner.verify.worker import environment

HARDWARE = str(Path(__file__).with_name("eager.toml"))
RECORDS = Path(__file__).parent / "results" / "techniques.jsonl"
BOUND = 1e-4
TIMEOUT_S = 3600.0
DRAWN = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a row: largest errors of three steps against the unsharded program, judged
    figures that differ as (predicted, compiled), bytes of the compiled program, its mesh, processor
    seconds of compiling and running it, and why there is none ("")."""

    loss: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    judged: int = 0
    differs: Mapping[str, tuple[int, int]] | None = None
    peak_bytes: int = 0
    mesh: str = ""
    date: str = ""
    cpu_s: float = 0.0
    refused: str = ""

    @property
    def error(self) -> float:
        """The largest of all errors."""
        return max(self.loss, self.gradients, self.parameters)

    @property
    def ok(self) -> bool:
        """Equal numbers and exact figures."""
        return not self.refused and not self.differs and self.judged > 0 and self.error <= BOUND


def run(row: Row) -> Outcome:
    """Plan under the row's pins; compile and run the program in a process of its own."""
    pins = parse_pins(row.pins)
    if row.nodes:
        pins = Pins(pins.mesh, pins.techniques, pins.forbidden_factors, row.nodes)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    try:
        strategy = planner.plan(
            row.source,
            devices=DEVICES,
            batch=row.batch,
            pins=pins,
            baselines=False,
            precision="fp32",
            **{"hardware": HARDWARE, **row.options},
        )
    except PlanError as e:
        return Outcome(date=today, refused=str(e).splitlines()[0])
    mesh = " x ".join(f"{a}={n}" for a, n in strategy.mesh_shape)
    with tempfile.TemporaryDirectory() as folder:
        planned, answer = Path(folder, "strategy.json"), Path(folder, "answer.json")
        strategy.save(planned)
        command = [
            sys.executable,
            "-m",
            "benchmarks.technique_run",
            str(planned),
            row.source,
            str(answer),
        ]
        settings = environment(DEVICES)
        settings[
            "XLA_FLAGS"
        ] += (  # of kernels alone, in half of the time: the program's text is the same to the byte
            " --xla_backend_optimization_level=0"
        )
        before = processor_s()
        try:
            done = subprocess.run(
                command,
                env=settings,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(mesh=mesh, date=today, refused=f"not finished within {TIMEOUT_S:g} s")
        if done.returncode or not answer.exists():
            return Outcome(
                mesh=mesh,
                date=today,
                refused=(
                    f"ended with code {done.returncode}:"
                    f" {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
                ),
            )
        found = json.loads(answer.read_text())
    cpu_s = round(processor_s() - before, 1)
    return Outcome(
        **found["errors"],
        judged=found["judged"],
        differs=found["differs"],
        peak_bytes=found["peak_bytes"],
        mesh=mesh,
        date=today,
        cpu_s=cpu_s,
    )


def processor_s() -> float:
    """Seconds of processors that ended children used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stored(file: Path) -> dict[tuple[object, ...], Outcome]:
    """Outcomes of earlier runs by `Row.key`; of a row run several times the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {tuple(r["row"]): Outcome(**r["outcome"]) for r in rows}


def verdict(
    row: Row, outcomes: Mapping[tuple[object, ...], Outcome], rows: Iterable[Row]
) -> tuple[str, float | None]:
    """("" or what is wrong with a row that was run, its memory as a share of that of the row it is
    compared with)."""
    found = outcomes[row.key]
    other = next(
        (
            outcomes[r.key]
            for r in rows
            if row.less
            and (r.what, r.source, r.batch) == (row.less, row.source, row.batch)
            and r.key in outcomes
        ),
        None,
    )
    share = (
        found.peak_bytes / other.peak_bytes
        if other is not None and other.peak_bytes and found.peak_bytes
        else None
    )
    if found.refused:
        return found.refused, None
    if found.differs:
        return (
            "; ".join(
                f"{what}: {have} predicted, {compiled} compiled"
                for what, (have, compiled) in found.differs.items()
            ),
            share,
        )
    if not found.ok:
        return f"error {found.error:.1e}", share
    return (f"memory {share:.2f}x of {row.less}" if share is not None and share >= 1 else ""), share


HEAD = """# Techniques, as measured

Written by `python -m benchmarks.techniques --page docs/techniques.md` from what the benchmark recorded (benchmarks/results/techniques.jsonl). Every row is the training
step of a small model, emitted for 8 virtual CPU devices in float32 with AdamW, alone (first table) or in a combination drawn at random (second). Blocks that repeat are
one compiled body, with its collectives, in every row of a model that has them.

- *error*: the largest of loss, any gradient and any parameter, in each of three optimizer steps, against the unsharded program; 1e-4 is allowed
- *figures*: collective bytes by kind and axes, FLOPs of products, bytes of arguments and results, predicted beside compiled; exact means equal to the byte
- *memory*: arguments, results and temporaries of the compiled step beside another row's on the same model (virtual devices have no memory apart for the host)

"""
TAIL = """
What has no row here, and where it is shown:

| technique | why | shown by |
|---|---|---|
| recompute of repeated blocks, on ResNet and UNet | they repeat no block | |
| recompute of single operators | no choice: norms, activations, attention and the loss always recompute their insides ([memory](memory.md)) | these rows |
| attention on a ring or by all-to-all, experts, on ResNet | it has neither | |
| GPipe on a UNet | GPipe of uneven stages is shown on ResNet | |
| communication fusion up to a chosen size | the CPU compiler joins everything whatever is asked | `tests/pricing/test_buckets.py`, by the GPU compiler ([fusion](fusion.md)) |
| dataset sharding, start-up by every launcher, Kubernetes | about processes, not one step | `benchmarks.launching`, `benchmarks.manifests` ([launch](launch.md)) |
| parameter server | tables live in processes beside the program | `tests/emit/test_hosted.py` |
| manual plans, semi-auto | a file, or pins, for what the rows pin here | `tests/pins/test_pins.py` ([modes](modes.md)) |
"""
COLUMNS = ("technique", "model", "batch", "pins", "error", "figures", "memory")


def document(outcomes: Mapping[tuple[object, ...], Outcome]) -> str:
    """The page of the documentation: rows that were run."""
    combined = tuple(drawn(DRAWN, 0))
    tables = "\n".join(table(outcomes, rows) for rows in (ALONE, combined))
    ran = [r for r in (*ALONE, *combined) if r.key in outcomes]
    held = sum(not verdict(r, outcomes, ALONE)[0] for r in ran)
    left = (
        f" {len(ALONE) + len(combined) - len(ran)} rows of the benchmark were not run."
        if len(ran) < len(ALONE) + len(combined)
        else ""
    )
    spent, dates = (
        sum(outcomes[r.key].cpu_s for r in ran),
        sorted({outcomes[r.key].date for r in ran}),
    )
    when = (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {spent / 60:.0f} minutes of"
        " processor time"
        if dates
        else "nothing was run"
    )
    return f"{HEAD}{tables}\n{held} of {len(ran)} rows hold ({when}).{left}\n{TAIL}"


def table(outcomes: Mapping[tuple[object, ...], Outcome], rows: Sequence[Row]) -> str:
    """The rows that were run, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in (r for r in rows if r.key in outcomes):
        found = outcomes[row.key]
        wrong, share = verdict(row, outcomes, ALONE)
        pins = ", ".join(
            [
                *([f"`{row.pins}`"] if row.pins else []),
                *(f"`{glob}`" for glob in row.nodes),
                *(f"{k} {v}" for k, v in row.options.items()),
            ]
        )
        figures = (
            f"{found.error:.1e} | {f'{found.judged} exact' if not found.differs else wrong} |"
            f" {'' if share is None else f'{share:.2f}x of {row.less}'}"
        )
        lines.append(
            f"| {row.what} | {row.source.removeprefix('zoo:')} | {row.batch} | {pins} |"
            f" {figures if not found.refused else f'- | {wrong} | '} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the rows that no record holds, print a line each, then what failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name or model has this word")
    parser.add_argument("--drawn", type=int, default=DRAWN)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mixed", type=int, default=0, help="combinations of everything, beside the drawn ones"
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args(arguments)
    rows = [*ALONE, *drawn(args.drawn, args.seed), *mixed(args.mixed, args.seed)]
    outcomes = stored(args.records)
    if args.page:
        args.page.write_text(document(outcomes))
        return 0
    wanted = [row for row in rows if args.only in row.what or args.only in row.source]
    failed = []
    for row in wanted:
        known = row.key in outcomes and not verdict(row, outcomes, rows)[0]
        if not known:
            outcomes[row.key] = run(row)
            with args.records.open("a") as out:
                out.write(json.dumps({"row": row.key, "outcome": asdict(outcomes[row.key])}) + "\n")
        found, (wrong, share) = outcomes[row.key], verdict(row, outcomes, rows)
        line = (
            wrong
            or f"{found.error:8.1e}  {found.judged} exact  {'' if share is None else f'{share:.2f}x'}"
        )
        print(
            f"{row.what:40} {row.source.removeprefix('zoo:'):24} {row.pins:48}"
            f" {line}{'  (recorded)' if known else ''}",
            flush=True,
        )
        if wrong:
            failed.append(f"{row.what}, {row.source}: {wrong}")
    print(f"{len(wanted) - len(failed)} of {len(wanted)} rows hold")
    print(*(f"FAILED {f}" for f in failed), sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
