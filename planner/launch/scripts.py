"""Scripts for schedulers: an sbatch file, and an Open MPI command.

Every word from a user or a model is quoted by shlex; names that schedulers read are reduced to
plain characters. One process a node, ranked in blocks, in the order of the allocation, which
SLURM's topology plugin makes that of the switches.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from planner.launch.job import Host, Job, shipped

PORT = 8476
"""Where jax's coordinator listens on the first node."""

EXPANDED = (
    "# shellcheck disable=SC2016,SC1003  # the rank's own shell expands what is quoted; a lone"
    " backslash is meant"
)


def plain_name(name: str, limit: int = 40) -> str:
    """A name of a-z, 0-9 and inner dashes, for jobs and Kubernetes objects."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:limit].strip("-") or "job"


def slurm(jobs: Sequence[Job], python: str, time_s: int = 0) -> str:
    """An sbatch script; submitted from the folder it lies in. jobs: one a number of nodes, the
    fewest first; the allocation decides which of them runs. time_s: the limit of a run, 0 for that
    of the partition."""
    job, largest = jobs[0], jobs[-1]
    gpus = (
        []
        if job.virtual or not shipped(job.device).kubernetes
        else [f"#SBATCH --gpus-per-node={job.slots}"]
    )
    nodes = str(job.processes) if len(jobs) == 1 else f"{job.processes}-{largest.processes}"
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={plain_name(job.name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *gpus,
        *([f"#SBATCH --time={clock(time_s)}"] if time_s else []),
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    body = f"""# {_sizes(jobs)} of {job.slots} devices. sbatch this file in the folder where it lies; with --checkpoints, a requeued job goes on.
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
{_program_of(jobs)}{_exports(job)}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
{EXPANDED}
srun --kill-on-bad-exit=1 --nodes="$nodes" --ntasks="$nodes" --distribution=block --label --output="rank-%t.log" \\
  bash -c {_inner(job, python, '"$SLURM_PROCID"')} \\
  rank "$head:{PORT}" "$program" "$nodes" {_rest(job)}"""  # noqa: E501
    return "\n".join(head) + "\n\n" + body.rstrip() + "\n"


def clock(seconds: int) -> str:
    """SLURM's way of writing a time, in whole minutes: D-HH:MM:SS."""
    minutes = -(-seconds // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _sizes(jobs: Sequence[Job]) -> str:
    counts = [str(j.processes) for j in jobs]
    return (
        f"{', '.join(counts[:-1])}{' or ' * (len(counts) > 1)}{counts[-1]}"
        f" node{'s' * (counts[-1] != '1')}"
    )


def _program_of(jobs: Sequence[Job]) -> str:
    """Lines that set `program` and `nodes` to those of the largest job that the allocation holds; a
    plan for one number of nodes takes no other."""
    lines = []
    for word, job in zip(("if", *("elif",) * len(jobs)), reversed(jobs), strict=False):
        test = "-ge" if len(jobs) > 1 else "-eq"
        lines.append(
            f'{word} [ "$SLURM_JOB_NUM_NODES" {test} {job.processes} ]; then'
            f" program={shlex.quote(job.program.name)} nodes={job.processes}"
        )
    what = "these plans are" if len(jobs) > 1 else "this plan is"
    refusal = (
        f'else\n  echo "{what} for {_sizes(jobs)}, the allocation has $SLURM_JOB_NUM_NODES" >&2\n '
        " exit 1\nfi\n"
    )
    counts = (
        'echo "$SLURM_JOB_NUM_NODES nodes came up: $program on $nodes of them"\n'
        if len(jobs) > 1
        else ""
    )
    return "\n".join(lines) + "\n" + refusal + counts


def mpirun(job: Job, python: str, hosts: tuple[Host, ...] = ()) -> str:
    """A script with the Open MPI command; started on the first host. Without hosts, the scheduler's
    allocation is taken."""
    listed = ",".join(f"{h.name}:1" for h in hosts)
    where = [f"--host {shlex.quote(listed)}"] if hosts else []
    how = "--oversubscribe" if job.virtual else "--map-by ppr:1:node"
    variables = "".join(f"-x {name} " for name in job.environment())
    first = shlex.quote(hosts[0].name) if hosts else '"$(hostname)"'
    body = f"""#!/bin/bash
# {job.devices} devices: {job.processes} processes of {job.slots}. COORDINATOR: an address of the first host that all reach.
set -euo pipefail
cd "$(dirname "$0")"
{_exports(job)}coordinator=${{COORDINATOR:-{first}}}
{EXPANDED}
mpirun -np {job.processes} {" ".join([*where, how])} --bind-to none --tag-output {variables}\\
  bash -c {_inner(job, python, '"$OMPI_COMM_WORLD_RANK"')} \\
  rank "$coordinator:{PORT}" {shlex.quote(job.program.name)} {job.processes} {_rest(job)}"""  # noqa: E501
    return body.rstrip() + "\n"


def _exports(job: Job) -> str:
    return "".join(
        f'export {name}={shlex.quote(value)}"${{{name}:+ ${name}}}"\n'
        for name, value in job.environment().items()
    )


def _inner(job: Job, python: str, rank: str) -> str:
    """What a rank runs, quoted for `bash -c`: its $1 is the coordinator, $2 the program, $3 the
    number of processes; what follows are the program's own arguments."""
    words = job.command(python, "PROGRAM", "COORDINATOR", "RANK")
    own_words = words[: len(words) - len(job.arguments)]
    quoted = {"PROGRAM": '"$2"', "COORDINATOR": '"$1"', "RANK": rank}
    text = " ".join(
        '"$3"' if before == "--processes" else quoted.get(w, shlex.quote(w))
        for before, w in zip(("", *own_words), own_words, strict=False)
    )
    return shlex.quote(f'exec {text} "${{@:4}}"')


def _rest(job: Job) -> str:
    return " ".join(shlex.quote(a) for a in job.arguments)
