"""Kubernetes manifests: an indexed Job with its service, and a JobSet, for nodes of GPUs or hosts
of a TPU slice.

With tables on parameter servers (planner.workload.host_tables) the JobSet has three roles: as many
servers as nodes, the scheduler (process 0, where jax's coordinator is), and the other workers; it
has succeeded when scheduler and workers have.

A pod a node. Its rank is its completion index; pods of an indexed Job are called NAME-0, NAME-1 ...
in the domain of the headless service, so the coordinator's address is known beforehand. When a pod
fails, the processes of the others end too: a Job replaces each of them, a JobSet starts all anew at
once; they go on from the last whole checkpoint. Pods that a drained or preempted node took along
are replaced without being counted. Field names: the Kubernetes API reference (batch/v1 Job, v1
Service, v1 ConfigMap) and jobset.x-k8s.io/v1alpha2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from costmodels.hardware.device import device_names, load_device
from planner.errors import PlanError
from planner.launch.job import TPU, Job, shipped
from planner.launch.nodes import RDMA, accelerator, labels, resources, uses_rdma
from planner.launch.scripts import PORT, plain_name
from planner.strategy.strategy import Strategy

LARGEST_PROGRAM_BYTES = 900_000
"""A ConfigMap holds 1 MiB with everything around it."""
RESTARTS = 3
TABLES_PORT = PORT + 1
"""Where servers of tables listen."""


@dataclass(frozen=True)
class Asked:
    """What the user says of a cluster. volume: a PersistentVolumeClaim mounted at /data, "" for
    none; rdma: the resource, or none; labels: of nodes, KEY=VALUE; time_s: after which a job is
    ended, 0 for never; queue: a LocalQueue of Kueue's, "" for none."""

    image: str
    volume: str = ""
    tpu: bool = False
    rdma: str = RDMA
    labels: tuple[str, ...] = ()
    time_s: int = 0
    queue: str = ""


def manifests(job: Job, strategy: Strategy, asked: Asked) -> dict[str, str]:
    """File name -> YAML: job.yaml (an indexed Job) and jobset.yaml.

    Raises PlanError: P206 where the plan is for another kind of machine, P207 for a program that no
    ConfigMap holds.
    """
    name = plain_name(job.name)
    count = slices(strategy) if asked.tpu else 1
    program = [] if on_volume(job) else [_config(job, name)]
    if not program and not asked.volume:
        raise PlanError(
            "P207",
            f"the program cannot travel in a ConfigMap: {on_volume(job)}",
            help=[f"--volume CLAIM, its folder copied to {name}/ there; or --to slurm"],
        )
    served = (strategy.workload.get("training") or {}).get("tables") == "server"
    jobset = _jobset(job, strategy, asked, name, count, served)
    # Pods of several slices, or of several roles, are distinguished by a JobSet alone.
    single = [] if count > 1 or served else _indexed_job(job, strategy, asked, name)
    files = {
        **({"job.yaml": [*program, *single]} if single else {}),
        "jobset.yaml": [*program, jobset],
    }
    return {file: as_yaml(documents) for file, documents in files.items()}


def _indexed_job(job: Job, strategy: Strategy, asked: Asked, name: str) -> list[dict[str, Any]]:
    """A headless service, and the Job whose pods it gives addresses."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    pod = _pod(job, strategy, asked, name, f"{name}-0.{name}")
    return [
        service,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _queued(name, asked.queue),
            "spec": {
                **_suspended(asked.queue),
                **_job_spec(job.processes, pod, asked.time_s, RESTARTS),
            },
        },
    ]


def _jobset(
    job: Job, strategy: Strategy, asked: Asked, name: str, count: int, served: bool
) -> dict[str, Any]:
    """The JobSet: workers, a replica for each of `count` TPU slices, or the three roles of served
    tables."""
    # Pods of a JobSet are NAME-workers-REPLICA-INDEX in the domain NAME.
    pod = _pod(job, strategy, asked, "", f"{name}-workers-0-0.{name}")
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    template = {
        **({"metadata": {"annotations": exclusive}} if asked.tpu else {}),
        "spec": _job_spec(job.processes // count, pod, asked.time_s),
    }
    jobs = (
        _roles(job, strategy, asked, name)
        if served
        else [{"name": "workers", "replicas": count, "template": template}]
    )
    finishing = [j["name"] for j in jobs if j["name"] != "servers"]
    policy = {"successPolicy": {"operator": "All", "targetReplicatedJobs": finishing}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(name, asked.queue),
        "spec": {
            **_suspended(asked.queue),
            "failurePolicy": {"maxRestarts": RESTARTS},
            **(policy if served else {}),
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": jobs,
        },
    }


def _queued(name: str, queue: str) -> dict[str, Any]:
    """Metadata of what Kueue admits. Raises PlanError P206 for a queue that no label can name."""
    if not queue:
        return {"name": name}
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", queue):
        raise PlanError(
            "P206",
            f"--queue {queue!r} is no name of a queue",
            help=["kubectl get localqueues says which there are"],
        )
    return {"name": name, "labels": {"kueue.x-k8s.io/queue-name": queue}}


def _suspended(queue: str) -> dict[str, Any]:
    """Nothing starts before Kueue admits it."""
    return {"suspend": True} if queue else {}


def _roles(job: Job, strategy: Strategy, asked: Asked, name: str) -> list[dict[str, Any]]:
    """Replicated jobs of a plan with tables on servers: servers, scheduler, and workers where there
    are several nodes.

    Raises PlanError P206 for TPUs: their processes are numbered by the slice.
    """
    if asked.tpu:
        raise PlanError(
            "P206",
            "tables on servers are not written for TPU slices",
            help=["--to kubernetes for GPU nodes, or plan with --tables device"],
        )
    servers = job.processes
    tables = ",".join(f"{name}-servers-0-{i}.{name}:{TABLES_PORT}" for i in range(servers))
    reading = replace(job, arguments=("--tables", tables, *job.arguments))
    base = _pod(reading, strategy, asked, "", f"{name}-scheduler-0-0.{name}")
    devices_option = ["--virtual-devices", str(job.slots)] if job.virtual else []
    serving = [
        "python3",
        f"/program/{job.program.name}",
        *devices_option,
        "--serve",
        f"$(RANK)/{servers}",
        "--port",
        str(TABLES_PORT),
    ]

    command = base["spec"]["containers"][0]["command"]
    # The last --process counts.
    later = ["bash", "-c", 'exec "$$@" --process "$$((RANK + 1))"', "worker", *command]
    roles = [("servers", servers, serving, False), ("scheduler", 1, command, True)]
    roles += [("workers", job.processes - 1, later, True)] if job.processes > 1 else []
    return [
        {
            "name": role,
            "replicas": 1,
            "template": {
                "spec": _job_spec(pods, _role_pod(base, role, command, accelerated), asked.time_s)
            },
        }
        for role, pods, command, accelerated in roles
    ]


def _role_pod(
    base: dict[str, Any], role: str, command: list[str], accelerated: bool
) -> dict[str, Any]:
    """A pod template with another command; without an accelerator it asks for no devices and for no
    nodes that have some."""
    container = {
        **base["spec"]["containers"][0],
        "name": role,
        "command": command,
        "ports": [{"containerPort": PORT if accelerated else TABLES_PORT}],
    }
    spec = {**base["spec"], "containers": [container]}
    if not accelerated:
        for key in ("resources", "securityContext"):
            container.pop(key, None)
        for key in ("nodeSelector", "tolerations"):
            spec.pop(key, None)
    return {"spec": spec}


def as_yaml(parts: list[dict[str, Any]]) -> str:
    """The documents in the order of their keys, text of several lines as a literal block where YAML
    can hold it so."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Its own, so that the representer is."""

    Dumper.add_representer(
        str,
        lambda d, text: d.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if text.count("\n") > 1 else None
        ),
    )
    return str(yaml.dump_all(parts, Dumper=Dumper, sort_keys=False, width=160))


def slices(strategy: Strategy) -> int:
    """TPU slices of a plan: what is not torus is the network between them. Raises PlanError P206
    where it is for no TPUs."""
    device = str(strategy.topology["device"])
    if shipped(device).kubernetes != TPU:
        tpus = [name for name in device_names() if load_device(name).kubernetes == TPU]
        raise PlanError(
            "P206",
            f"the plan is for {device}, not for TPUs",
            help=[f"--to kubernetes, or plan for one of {', '.join(tpus)}"],
        )
    return prod(
        int(level["size"]) for level in strategy.topology["levels"] if level["kind"] != "torus"
    )


def on_volume(job: Job) -> str:
    """Why no ConfigMap holds a program, "" where one does: it must then lie in the folder NAME of
    the volume."""
    beside, size = job.program.with_suffix(".safetensors"), job.program.stat().st_size
    if beside.exists():
        return f"{beside.name} ({beside.stat().st_size:,} bytes) lies beside it"
    return f"it has {size:,} bytes" if size > LARGEST_PROGRAM_BYTES else ""


def _config(job: Job, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {Path(job.program).name: job.program.read_text()},
    }


def _job_spec(pods: int, pod: dict[str, Any], time_s: int, restarts: int = 0) -> dict[str, Any]:
    """An indexed Job. restarts: of all its pods, by itself; 0 where a JobSet restarts them."""
    limit = {"activeDeadlineSeconds": time_s} if time_s else {}
    again = {
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
    }
    return {
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "backoffLimit": restarts * pods,
        **(again if restarts else {}),
        **limit,
        "template": pod,
    }


def _pod(
    job: Job, strategy: Strategy, asked: Asked, subdomain: str, coordinator: str
) -> dict[str, Any]:
    """A pod template. TPU hosts find each other by what GKE puts into their environment; GPU nodes
    by rank and coordinator."""
    rank = {
        "name": "RANK",
        "valueFrom": {
            "fieldRef": {
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            }
        },
    }
    mounts, volumes = _mounts(job, asked.volume)
    variables = [rank, *({"name": k, "value": v} for k, v in job.environment().items())]
    devices = resources(job, strategy, asked.rdma)
    limits = {"resources": devices} if devices else {}
    if uses_rdma(job, asked.rdma):
        limits["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    container = {
        "name": "worker",
        "image": asked.image,
        "command": _command(job, "auto" if asked.tpu else f"{coordinator}:{PORT}"),
        "env": variables,
        "ports": [{"containerPort": PORT}],
        **limits,
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    if subdomain:
        spec["subdomain"] = subdomain
    if selector := labels(job, strategy, asked.labels):
        spec["nodeSelector"] = selector
    if kind := accelerator(job):
        spec["tolerations"] = [
            {"key": kind, "operator": "Exists", "effect": "NoSchedule"}
        ]  # nodes of accelerators are often kept for who asks for them
    return {"spec": spec}


def _command(job: Job, coordinator: str) -> list[str]:
    """What a pod runs. $(NAME) in a command is a variable's value; $$ is a dollar sign."""
    arguments = job.command("python3", f"/program/{job.program.name}", coordinator, "RANK")
    own_arguments = len(arguments) - len(job.arguments)
    return [
        "$(RANK)" if word == "RANK" and i < own_arguments else word.replace("$", "$$")
        for i, word in enumerate(arguments)
    ]


def _mounts(job: Job, volume: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(mounts, volumes) of the program, shared memory, and the data where there is a volume."""
    name, aside = plain_name(job.name), bool(on_volume(job))
    program = (
        {"name": "data", "mountPath": "/program", "subPath": name}
        if aside
        else {"name": "program", "mountPath": "/program"}
    )
    mounts = [program, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        *([] if aside else [{"name": "program", "configMap": {"name": name}}]),
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if volume:
        mounts.append({"name": "data", "mountPath": "/data"})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": volume}})
    return mounts, volumes
