"""What `plan launch --to NAME` can write for: one record per scheduler, with the files of a job and
the command that submits them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.launch.clouds import skypilot, xpk
from planner.launch.job import Host, Job
from planner.launch.kubernetes import Asked, manifests
from planner.launch.scripts import mpirun, slurm
from planner.strategy.strategy import Strategy


@dataclass(frozen=True)
class Submission:
    """What files are written from. jobs: several, the fewest nodes first, only for a scheduler that
    picks one by its allocation; limit_s: seconds after which a run is ended, 0 for never."""

    jobs: Sequence[Job]
    strategy: Strategy
    python: str
    hosts: tuple[Host, ...]
    limit_s: int
    cluster: Asked


@dataclass(frozen=True)
class Scheduler:
    """files: file name -> text, the one to submit first. submit: the command that starts a job from
    that file. takes_hosts: of --hostfile; picks_plan: among several by its allocation; needs_image:
    it runs a container image; in_config_map: the program travels in one; default_limit: a run
    without --time is limited by what its steps take."""

    name: str
    files: Callable[[Submission], Mapping[str, str]]
    submit: Callable[[Path], str]
    takes_hosts: bool = False
    picks_plan: bool = False
    needs_image: bool = False
    in_config_map: bool = False
    default_limit: bool = False


def _apply(file: Path) -> str:
    return f"kubectl apply -f {shlex.quote(str(file))}"


def _manifests(s: Submission) -> Mapping[str, str]:
    return manifests(s.jobs[0], s.strategy, s.cluster)


SCHEDULERS = {
    scheduler.name: scheduler
    for scheduler in (
        Scheduler(
            "slurm",
            lambda s: {"job.sbatch": slurm(s.jobs, s.python, s.limit_s)},
            lambda file: f"cd {shlex.quote(str(file.parent))} && sbatch {file.name}",
            picks_plan=True,
            default_limit=True,
        ),
        Scheduler(
            "mpirun",
            lambda s: {"mpirun.sh": mpirun(s.jobs[0], s.python, s.hosts)},
            lambda file: f"bash {shlex.quote(str(file))}",
            takes_hosts=True,
        ),
        Scheduler("kubernetes", _manifests, _apply, needs_image=True, in_config_map=True),
        Scheduler("gke-tpu", _manifests, _apply, needs_image=True, in_config_map=True),
        Scheduler(
            "skypilot",
            lambda s: {"job.sky.yaml": skypilot(s.jobs[0], s.cluster, s.python)},
            lambda file: f"cd {shlex.quote(str(file.parent))} && sky jobs launch {file.name}",
        ),
        Scheduler(
            "xpk",
            lambda s: {"job.xpk.sh": xpk(s.jobs[0], s.strategy, s.cluster)},
            lambda file: f"CLUSTER=... bash {shlex.quote(str(file))}",
            needs_image=True,
        ),
    )
}
"""Name -> scheduler."""
