"""Scripts for schedulers: an sbatch file, and an Open MPI command.

Every word from a user or a model is quoted by shlex; names that schedulers read are reduced to plain characters. One process a node, ranked in blocks, in the order of
the allocation, which SLURM's topology plugin makes that of the switches.
"""

from __future__ import annotations

import re
import shlex

from planner.launch.job import Host, Job

PORT = 8476
"""Where jax's coordinator listens on the first node."""

EXPANDED = "# shellcheck disable=SC2016,SC1003  # the rank's own shell expands what is quoted; a lone backslash is meant"


def plain_name(name: str, limit: int = 40) -> str:
    """A name of a-z, 0-9 and inner dashes, for jobs and Kubernetes objects."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:limit].strip("-") or "job"


def slurm(job: Job, python: str) -> str:
    """An sbatch script; submitted from the folder it lies in."""
    gpus = [] if job.virtual or job.device.startswith("cpu") else [f"#SBATCH --gpus-per-node={job.slots}"]
    head = ["#!/bin/bash", f"#SBATCH --job-name={plain_name(job.name)}", f"#SBATCH --nodes={job.processes}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive",
            *gpus, "#SBATCH --output=%x-%j.out", "#SBATCH --open-mode=append", "#SBATCH --requeue"]  # fmt: skip
    nodes = f"{job.processes} node{'s' * (job.processes > 1)}"
    body = f"""# {job.devices} devices: {nodes} of {job.slots}. sbatch this file in the folder where it lies; with --checkpoints, a requeued job goes on.
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
if [ "$SLURM_JOB_NUM_NODES" -ne {job.processes} ]; then
  echo "this plan is for {nodes}, the allocation has $SLURM_JOB_NUM_NODES" >&2
  exit 1
fi
{_exports(job)}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
{EXPANDED}
srun --kill-on-bad-exit=1 --distribution=block --label --output="rank-%t.log" \\
  bash -c {_inner(job, python, '"$SLURM_PROCID"')} \\
  rank "$head:{PORT}" {_rest(job)}"""
    return "\n".join(head) + "\n\n" + body.rstrip() + "\n"


def mpirun(job: Job, python: str, hosts: tuple[Host, ...] = ()) -> str:
    """A script with the Open MPI command; started on the first host. Without hosts, the scheduler's allocation is taken."""
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
  rank "$coordinator:{PORT}" {_rest(job)}"""
    return body.rstrip() + "\n"


def _exports(job: Job) -> str:
    return "".join(f'export {name}={shlex.quote(value)}"${{{name}:+ ${name}}}"\n' for name, value in job.environment().items())


def _inner(job: Job, python: str, rank: str) -> str:
    """What a rank runs, quoted for `bash -c`: the coordinator is its $1, what follows are the program's own arguments."""
    words = job.command(python, job.program.name, "COORDINATOR", "RANK")
    own = words[: len(words) - len(job.arguments)]
    text = " ".join({"COORDINATOR": '"$1"', "RANK": rank}.get(w, shlex.quote(w)) for w in own)
    return shlex.quote(f'exec {text} "${{@:2}}"')


def _rest(job: Job) -> str:
    return " ".join(shlex.quote(a) for a in job.arguments)
