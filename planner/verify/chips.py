"""GPUs whose compiler can be asked without one: what XLA needs to know of a chip, as its target
description (a text protocol buffer).

Figures: NVIDIA's CUDA C++ Programming Guide (technical specifications by compute capability) and
the chips' data sheets, read November 2026. They steer tiling, fusion and scheduling, so they move
temporaries a little; collectives, arguments and outputs do not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

CUDA_VERSION = "12.9.0"
"""That programs are taken to run with: XLA asks for it before it hands float8 products to
cuBLASLt."""


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
  runtime_version: "{CUDA_VERSION}"
  compile_time_toolkit_version: "{CUDA_VERSION}"
  name: "{self.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 11 patch: 0 }}
device_description_str: "{self.name}"
"""


_GB, _MIB = 10**9, 2**20
_H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    shared_memory_bytes=233472,
    shared_memory_per_block_bytes=232448,
    l2_cache_bytes=50 * _MIB,
    memory_bytes=80 * 2**30,
    bandwidth_bytes_per_s=3350 * _GB,
    clock_ghz=1.98,
)
_A100 = Chip(
    name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    cores=108,
    fpus_per_core=64,
    shared_memory_bytes=167936,
    shared_memory_per_block_bytes=166912,
    l2_cache_bytes=40 * _MIB,
    memory_bytes=80 * 2**30,
    bandwidth_bytes_per_s=2039 * _GB,
    clock_ghz=1.41,
)
CHIPS: Mapping[str, Chip] = {
    "h100": _H100,
    "h200": replace(
        _H100, name="NVIDIA H200", memory_bytes=141 * _GB, bandwidth_bytes_per_s=4800 * _GB
    ),
    "a100": _A100,
    "a100-40gb": replace(
        _A100,
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40 * 2**30,
        bandwidth_bytes_per_s=1555 * _GB,
    ),
    "b200": Chip(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        fpus_per_core=128,
        shared_memory_bytes=233472,
        shared_memory_per_block_bytes=232448,
        l2_cache_bytes=126 * _MIB,
        memory_bytes=180 * _GB,
        bandwidth_bytes_per_s=8000 * _GB,
        clock_ghz=1.965,
    ),
}
"""name -> chip, as in `--target gpu:NAME`."""

_OTHER_NAMES: Mapping[str, str] = {
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "h800-sxm": "h100",
    "a100-80gb": "a100",
    "a800-80gb": "a100",
}
"""Names of shipped devices (`plan hardware`) -> names here."""


def chip(name: str) -> Chip | None:
    """The chip of a name, or of a shipped device's name; None when unknown."""
    return CHIPS.get(_OTHER_NAMES.get(name, name))
