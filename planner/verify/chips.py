"""GPUs whose compiler can be asked without one: what XLA needs to know of a chip, as its target
description (a text protocol buffer).

Figures: NVIDIA's CUDA C++ Programming Guide (technical specifications by compute capability) and
the chips' data sheets, read November 2026. They steer tiling, fusion and scheduling, so they move
temporaries a little; collectives, arguments and outputs do not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU. shared_memory: bytes a multiprocessor has, and the most one block may take."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory_bytes: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int
    memory_bytes: int
    bandwidth_bytes_per_s: int
    clock_ghz: float

    def description(self, pool_bytes: int = 0) -> str:
        """XLA's GpuTargetConfigProto of the chip, as text. pool_bytes: what a program takes of its
        memory at the start. With a GPU that is what XLA lets a step take before it makes values
        again (jax tells it the allocator's limit); without one it goes by 80 % of the memory of the
        description, which then says so much more.
        """
        major, minor = self.capability
        memory_bytes = pool_bytes * 100 // 80 or self.memory_bytes
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_bytes}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth_bytes_per_s}
  l2_cache_size: {self.l2_cache_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation"
  name: "{self.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


_GB, _MIB = 10**9, 2**20
CHIPS: Mapping[str, Chip] = {
    "h100": Chip(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        128,
        233472,
        232448,
        50 * _MIB,
        80 * 2**30,
        3350 * _GB,
        1.98,
    ),
    "h200": Chip(
        "NVIDIA H200", (9, 0), 132, 128, 233472, 232448, 50 * _MIB, 141 * _GB, 4800 * _GB, 1.98
    ),
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        64,
        167936,
        166912,
        40 * _MIB,
        80 * 2**30,
        2039 * _GB,
        1.41,
    ),
    "a100-40gb": Chip(
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        108,
        64,
        167936,
        166912,
        40 * _MIB,
        40 * 2**30,
        1555 * _GB,
        1.41,
    ),
    "b200": Chip(
        "NVIDIA B200", (10, 0), 148, 128, 233472, 232448, 126 * _MIB, 180 * _GB, 8000 * _GB, 1.965
    ),
}
"""name -> chip, as in `--target gpu:NAME`."""

_OTHER_NAMES: Mapping[str, str] = {"h100-sxm": "h100", "h200-sxm": "h200", "a100-80gb": "a100"}
"""Names of shipped devices (`plan hardware`) -> names here."""


def chip(name: str) -> Chip | None:
    """The chip of a name, or of a shipped device's name; None when unknown."""
    return CHIPS.get(_OTHER_NAMES.get(name, name))
