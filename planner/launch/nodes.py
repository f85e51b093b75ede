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
from planner.launch.job import Job
from planner.strategy.strategy import Strategy

NVIDIA, AMD, TPU = "nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"
OTHERS = {
    "cpu": "",
    "tpu": TPU,
    "mi3": AMD,
    "trainium": "aws.amazon.com/neuron",
    "ascend": "huawei.com/Ascend910",
}
"""How a device's name begins -> the resource that it is; all others are NVIDIA's."""
PRODUCTS = {
    "v100-16gb": "Tesla-V100-SXM2-16GB",
    "v100-32gb": "Tesla-V100-SXM2-32GB",
    "a100-40gb": "NVIDIA-A100-SXM4-40GB",
    "a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "h100-sxm": "NVIDIA-H100-80GB-HBM3",
    "h200-sxm": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "gb200-nvl72": "NVIDIA-GB200",
    "gb300-nvl72": "NVIDIA-GB300",
    "l4": "NVIDIA-L4",
    "l40s": "NVIDIA-L40S",
    "a10": "NVIDIA-A10",
    "h20": "NVIDIA-H20",
    "gh200": "NVIDIA-GH200-480GB",
    "rtx4090": "NVIDIA-GeForce-RTX-4090",
    "mi300x": "AMD_Instinct_MI300X_OAM",
    "mi325x": "AMD_Instinct_MI325_OAM",
    "mi355x": "AMD_Instinct_MI355X_OAM",
}
"""Device -> value of the label nvidia.com/gpu.product or amd.com/gpu.product-name."""
SLICES = {
    "tpu-v4": "tpu-v4-podslice",
    "tpu-v5e": "tpu-v5-lite-podslice",
    "tpu-v5p": "tpu-v5p-slice",
    "tpu-v6e": "tpu-v6e-slice",
    "tpu-v7x": "tpu7x",
}
"""Device -> value of the label cloud.google.com/gke-tpu-accelerator."""
CPUS, MEMORY_GIB = 4, 16
"""Of a pod for each device, requested: enough for one program, and less than nodes of accelerators
have. A guess; edit it where yours are others."""
RDMA = "rdma/ib"
NONE = "none"


def accelerator(job: Job) -> str:
    """The resource that a device is, "" for CPUs."""
    return (
        ""
        if job.virtual
        else next((kind for begin, kind in OTHERS.items() if job.device.startswith(begin)), NVIDIA)
    )


def labels(job: Job, strategy: Strategy, given: tuple[str, ...]) -> dict[str, str]:
    """Labels that a node must have: those given, else what tells the planned devices. {} where none
    are known. Raises PlanError P206 for one that is no label."""
    found = {}
    for text in given:
        key, sep, value = text.partition("=")
        if not key or not sep:
            raise PlanError(
                "P206",
                f"--node-label {text!r} is no label",
                help=["--node-label nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"],
            )
        found[key] = value
    kind = accelerator(job)
    if kind == TPU:
        grid = "x".join(
            str(level["size"]) for level in strategy.topology["levels"] if level["kind"] == "torus"
        )
        return {
            "cloud.google.com/gke-tpu-accelerator": SLICES[job.device],
            "cloud.google.com/gke-tpu-topology": grid,
            **found,
        }
    if found or not kind or job.device not in PRODUCTS:
        return found
    return {f"{kind}.product-name" if kind == AMD else f"{kind}.product": PRODUCTS[job.device]}


def resources(job: Job, strategy: Strategy, rdma: str) -> dict[str, Any]:
    """Requests and limits of a pod that holds a node's devices; {} for one on virtual devices."""
    kind = accelerator(job)
    if not kind:
        return {}
    extended: dict[str, Any] = {kind: job.slots, **({rdma: 1} if uses_rdma(job, rdma) else {})}
    host = -(-int(strategy.costs.get("host_memory_bytes", 0)) * job.slots // 2**30)
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
