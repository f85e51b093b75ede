"""What nodes are called and what they hand out in Kubernetes: labels that tell their accelerators,
resources that pods ask for.

Labels of GPUs are those that NVIDIA's GPU feature discovery and AMD's node labeller put on nodes;
TPUs' are GKE's. A cluster that calls them otherwise: --node-label. RDMA devices are handed out by a
shared device plugin, one slot of which shows a pod all of a node's; what it is called is the
cluster's own choice, most often rdma/ib (--rdma says otherwise).
"""

from __future__ import annotations

from typing import Any

from planner.errors import PlanError
from planner.launch.job import AMD, NVIDIA, TPU, Job, shipped
from planner.strategy.strategy import Strategy
from planner.support.choices import refuse_twice

CPUS, MEMORY_GIB = 4, 16
"""Of a pod for each device, requested: enough for one program, and less than nodes of accelerators
have. A guess; edit it where yours are others."""
RDMA = "rdma/ib"
NONE = "none"


def accelerator(job: Job) -> str:
    """The resource that a device is, "" for CPUs."""
    return "" if job.virtual else shipped(job.device).kubernetes


def torus(strategy: Strategy) -> str:
    """The dims of a TPU slice, as in 4x4x8."""
    levels = strategy.topology["levels"]
    return "x".join(str(level["size"]) for level in levels if level["kind"] == "torus")


def labels(job: Job, strategy: Strategy, given: tuple[str, ...]) -> dict[str, str]:
    """Labels that a node must have: those given, else what tells the planned devices. {} where none
    are known. Raises PlanError P206 for one that is no label."""
    chosen: dict[str, str] = {}
    for text in given:
        key, sep, value = text.partition("=")
        if not key or not sep:
            raise PlanError(
                "P206",
                f"--node-label {text!r} is no label",
                help=["--node-label nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"],
            )
        refuse_twice("node-label", key, chosen.setdefault(key, value), value)
    kind = accelerator(job)
    if kind == TPU:
        return {
            "cloud.google.com/gke-tpu-accelerator": shipped(job.device).node_label,
            "cloud.google.com/gke-tpu-topology": torus(strategy),
            **chosen,
        }
    value = shipped(job.device).node_label if kind else ""
    if chosen or not value:
        return chosen
    return {f"{kind}.product-name" if kind == AMD else f"{kind}.product": value}


def resources(job: Job, strategy: Strategy, rdma: str) -> dict[str, Any]:
    """Requests and limits of a pod that holds a node's devices; {} for one on virtual devices."""
    kind = accelerator(job)
    if not kind:
        return {}
    extended: dict[str, Any] = {kind: job.slots, **({rdma: 1} if uses_rdma(job, rdma) else {})}
    costs = strategy.costs
    tables = int(costs.get("host_memory_bytes", 0)) // job.processes
    host = -(-(tables + int(costs.get("offloaded_per_device_bytes", 0)) * job.slots) // 2**30)
    return {
        "requests": {
            "cpu": CPUS * job.slots,
            "memory": f"{MEMORY_GIB * job.slots + host}Gi",
            **extended,
        },
        "limits": extended,
    }


def uses_rdma(job: Job, rdma: str) -> bool:
    """Whether pods ask for RDMA devices: GPUs of several nodes, unless the user says none."""
    return accelerator(job) in (NVIDIA, AMD) and job.processes > 1 and rdma != NONE
