"""What a published row's words say of the network between nodes."""

from __future__ import annotations

import re

NAMED = {"GCP A3": 4 * 200e9}
"""Machines by name -> bits a second of a node. A3 High: four adapters of 200 Gb/s for eight GPUs
(Google Cloud documentation)."""
PER_DEVICE = (
    r"(\d+) ?Gb/s (?:RDMA|CX-7|RoCE|InfiniBand)?[^;,)]*per GPU",
    r"RoCE (\d+)Gb/s per GPU",
)
SEVERAL = r"(\d+) ?x [\w -]*?\(?(\d+) ?Gb"
"""Adapters of a node: `4x Omni-Path (100Gb)`."""
PER_NODE = r"(\d+) ?Gbps"
EFFICIENCY = {"Omni-Path": 5.06 / 12.5}
"""Network by name -> what NCCL reaches of an adapter, where that is less than the device's file
says. Omni-Path: 5.06 GB/s of bus bandwidth over four nodes of eight A100 with four adapters of
100 Gb/s each (bigscience-workshop/bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt,
2022), taken as what one ring of devices reaches through one adapter (a guess)."""


def bytes_per_s(hardware: str, notes: str, node_size: int) -> float:
    """Bytes a second of one device between nodes, in one direction; 0 where a row does not say.
    node_size: devices that share a node's adapters."""
    for pattern in PER_DEVICE:
        if match := re.search(pattern, hardware):
            return float(match[1]) / 8e-9
    if match := re.search(SEVERAL, hardware):
        return float(match[1]) * float(match[2]) / 8e-9 / node_size
    if match := re.search(PER_NODE, hardware) or re.search(r"inter_node_bandwidth (\d+)", notes):
        return float(match[1]) / 8e-9 / node_size
    named = next((bits for name, bits in NAMED.items() if name in hardware), 0.0)
    return named / 8 / node_size


def efficiency(hardware: str) -> float:
    """What is reached of the network between nodes; 0 where a row's words do not tell."""
    return next((share for name, share in EFFICIENCY.items() if name in hardware), 0.0)
