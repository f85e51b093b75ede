"""Files for tools that bring machines of a cloud up: a SkyPilot task, and an XPK command for TPU
slices of GKE.

SkyPilot copies the folder to every node and runs `run` there with the node's number and the
addresses of all in the environment. XPK builds an image of the folder and makes a JobSet of it
under Kueue. Field names: SkyPilot's YAML reference, `xpk workload create --help`; types of slices
are XPK's with their topology.
"""

from __future__ import annotations

import shlex
from typing import Any

from planner.errors import PlanError
from planner.launch.job import TPU, Job, shipped
from planner.launch.kubernetes import RESTARTS, Asked, as_yaml, slices
from planner.launch.nodes import NVIDIA, accelerator, torus
from planner.launch.scripts import EXPANDED, PORT, plain_name
from planner.strategy.strategy import Strategy

ACCELERATORS = {
    "a10": "A10",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "a10g": "A10G",
    "a40": "A40",
    "b200": "B200",
    "gb200-nvl72": "GB200",
    "gh200": "GH200",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx-a6000": "RTXA6000",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "rtx6000-ada": "RTX6000-Ada",
    "t4": "T4",
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
}
"""Device that ships -> what SkyPilot calls it (`sky show-gpus --all`)."""

SLICES = {
    "tpu-v4": "v4",
    "tpu-v5e": "v5litepod",
    "tpu-v5p": "v5p",
    "tpu-v6e": "v6e",
    "tpu-v7x": "tpu7x",
}
"""Device that ships -> how XPK's types of its slices begin."""

PACKAGES = ("jax[cuda12]>=0.10.2,<0.12", "orbax-checkpoint>=0.11", "grain>=0.2")
"""What a node of NVIDIA's installs where no image is given."""


def skypilot(job: Job, asked: Asked, python: str) -> str:
    """A SkyPilot task; started from the folder it lies in.

    Raises PlanError P206 for devices that SkyPilot has no name for, and for others than NVIDIA's
    without an image.
    """
    resources: dict[str, Any] = {**_accelerators(job), **_image(job, asked.image)}
    resources["job_recovery"] = {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": RESTARTS,
    }
    run = [
        f'if [ "$SKYPILOT_NUM_NODES" -ne {job.processes} ]; then',
        f'  echo "this plan is for {job.processes} nodes, there are $SKYPILOT_NUM_NODES" >&2',
        "  exit 1",
        "fi",
        'head=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
        f"exec {_limited(_words(job, python), asked.time_s)}",
    ]
    packages = " ".join(shlex.quote(p) for p in PACKAGES)
    install = f"{shlex.quote(python)} -m pip install --quiet {packages}"
    task = {
        "name": plain_name(job.name),
        "num_nodes": job.processes,
        "workdir": ".",
        "resources": resources,
        **({"envs": dict(job.environment())} if job.environment() else {}),
        **_data(asked.volume),
        **({} if asked.image else {"setup": install}),
        "run": "\n".join(run) + "\n",
    }
    return as_yaml([task])


def _accelerators(job: Job) -> dict[str, str]:
    """The devices of a node; {} where virtual ones stand in."""
    if job.virtual:
        return {}
    kind = shipped(job.device)
    if not job.device.startswith(kind.name) or kind.name not in ACCELERATORS:
        others = "--to gke-tpu or xpk" if kind.kubernetes == TPU else "--to slurm or kubernetes"
        raise PlanError(
            "P206",
            f"--to skypilot: no name of SkyPilot's is known for {job.device}",
            help=[others, f"a plan for one of {', '.join(ACCELERATORS)}"],
        )
    return {"accelerators": f"{ACCELERATORS[kind.name]}:{job.slots}"}


def _image(job: Job, image: str) -> dict[str, str]:
    if image:
        return {"image_id": f"docker:{image}"}
    if accelerator(job) not in ("", NVIDIA):
        raise PlanError(
            "P206",
            f"--to skypilot: {job.device} needs --image",
            help=["--image NAME of a container image with python3 and a jax that runs there"],
        )
    return {}


def _data(volume: str) -> dict[str, Any]:
    """What lies at /data: a bucket by its address, or a volume of SkyPilot's."""
    if not volume:
        return {}
    if "://" in volume:
        return {"file_mounts": {"/data": {"source": volume, "mode": "MOUNT"}}}
    return {"volumes": {"/data": volume}}


def _words(job: Job, python: str) -> str:
    """What a node of SkyPilot's runs, for its shell."""
    words = job.command(python, job.program.name, "HEAD", "RANK")
    own_words = len(words) - len(job.arguments)
    variables = {"HEAD": f'"$head:{PORT}"', "RANK": '"$SKYPILOT_NODE_RANK"'}
    return " ".join(
        variables.get(w, shlex.quote(w)) if i < own_words else shlex.quote(w)
        for i, w in enumerate(words)
    )


def _limited(command: str, time_s: int) -> str:
    """A command that is ended after some seconds; 0 for never."""
    return f"timeout {time_s} {command}" if time_s else command


def xpk(job: Job, strategy: Strategy, asked: Asked) -> str:
    """A script with the XPK command; $CLUSTER names the cluster, words behind it go to xpk.

    Raises PlanError P206 for other devices than TPUs.
    """
    count = slices(strategy)
    kind = f"{SLICES[shipped(job.device).name]}-{torus(strategy)}"
    program = shlex.join(job.command("python3", job.program.name, "auto", "0"))
    options = [
        f"--workload {plain_name(job.name)}",
        f"--tpu-type {kind}",
        f"--num-slices {count}",
        f"--base-docker-image {shlex.quote(asked.image)}",
        "--script-dir .",
        f"--max-restarts {RESTARTS}",
        *([f"--storage {shlex.quote(asked.volume)}"] if asked.volume else []),
        f"--command {shlex.quote(_limited(program, asked.time_s))}",
    ]
    return f"""#!/bin/bash
# {job.devices} devices: {count} slice{"s" * (count > 1)} of {kind}. CLUSTER: the GKE cluster; options of xpk's may follow: --project, --zone.
set -euo pipefail
cd "$(dirname "$0")"
{EXPANDED}
xpk workload create --cluster "${{CLUSTER:?the name of the GKE cluster}}" \\
  {f" {chr(92)}{chr(10)}  ".join(options)} "$@"
"""  # noqa: E501
