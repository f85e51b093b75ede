"""Where a program is compiled: virtual CPU devices, or the compiler of a GPU or TPU that is not
there (jax's ahead-of-time topologies).

    cpu              virtual devices; programs are compiled in float32 and can be run
    gpu:h100         the GPU compiler from jax's CUDA plugin wheels, one host per eight devices;
                     compiled only
    tpu:v5e:4x4      the TPU compiler from libtpu, for a slice of that shape; compiled only

Both compilers may end the process (unknown flags, internal checks), so they only ever run in a
worker process. jax is imported in `Target.compile_devices` alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from planner.errors import PlanError, did_you_mean
from planner.verify.chips import CHIPS, Chip, chip

_TPU = re.compile(r"(v[2-6][ep]?|tpu7x):(\d+(?:x\d+){1,2})")
_CORES_PER_CHIP = {"v2": 2, "v3": 2, "tpu7x": 2}
"""Devices of a chip where that is not one: a core is a device."""
_ACCELERATOR = {"v5e": "v5litepod"}
CUDNN_VERSION = 91100
"""Of cuDNN that programs are compiled for, as `planner.verify.chips` describes GPUs: 9.11.0."""
HOST_DEVICES = 8
"""GPUs of one host in the ahead-of-time topology, where the number of devices allows."""

HOST_CHIPS = (2, 2, 1)
"""Chips of one host along each dim of a TPU's torus, as jax's ahead-of-time topologies have it."""


@dataclass(frozen=True)
class Target:
    """A compiler. kind: cpu, gpu or tpu; name: the chip of a GPU, the generation of a TPU; shape: a
    TPU slice's; pool_bytes: of a GPU, what the program takes of its memory at the start, in which
    XLA keeps a step by making values again (0: as it does without a GPU).
    """

    kind: str
    name: str = ""
    shape: tuple[int, ...] = ()
    pool_bytes: int = 0

    @property
    def text(self) -> str:
        """As written on the command line."""
        return ":".join(p for p in (self.kind, self.name, "x".join(map(str, self.shape))) if p)

    @property
    def machine(self) -> str:
        """What the devices are called in reports."""
        return {
            "cpu": "virtual CPU devices",
            "gpu": f"{self.name} GPUs, compiled without them",
            "tpu": f"TPU {self.name} devices, compiled without them",
        }[self.kind]

    @property
    def devices(self) -> int:
        """Devices of a TPU slice; 0 where any number will do."""
        return prod(self.shape) * _CORES_PER_CHIP.get(self.name, 1) if self.shape else 0

    @property
    def small_host(self) -> tuple[int, ...]:
        """Chips of one host along each dim of a TPU slice that whole hosts do not make up, as one
        chip alone; () elsewhere."""
        if self.kind != "tpu":
            return ()
        chips = (*self.shape, 1)[:3]
        chips_per_host = tuple(gcd(n, most) for n, most in zip(chips, HOST_CHIPS, strict=True))
        return chips_per_host if chips_per_host != HOST_CHIPS else ()

    def environment(self) -> Mapping[str, str]:
        """Variables of the process that compiles, beside those of every worker."""
        if self.kind == "gpu":
            return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if self.kind == "tpu":
            # Nothing is run, so that several may compile at once.
            return {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                "TPU_ACCELERATOR_TYPE": f"{_ACCELERATOR.get(self.name, self.name)}-{self.devices}",
            }
        return {}

    def compile_devices(self, count: int) -> Sequence[Any]:
        """jax devices to compile for: the host's for cpu, else those of a topology that nothing
        runs on. Needs jax and the target's environment."""
        import jax
        from jax.experimental import topologies

        if self.kind == "cpu":
            return jax.devices()
        if self.kind == "tpu":
            name = f"{self.name}:{'x'.join(map(str, self.shape))}"
            options = (
                {"chips_per_host_bounds": chips_per_host}
                if (chips_per_host := self.small_host)
                else {}
            )
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            ).devices
        else:
            known = chip(self.name)
            assert known is not None
            _answer_for(known)
            host = gcd(count, HOST_DEVICES)
            devices = topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.name,
                topology=f"1x{count // host}x{host}",
                target_config=known.description(self.pool_bytes),
            ).devices
        return list(devices)


def _answer_for(chip: Chip) -> None:
    """Let jax trace cuDNN's attention for a GPU that is not there: it asks the installed library
    and the host's own device, which a compilation ahead of time needs neither of."""
    import jax._src.cudnn.fused_attention_stablehlo as fused

    has = f"{chip.capability[0]}.{chip.capability[1]}"
    fused.check_cudnn_version = lambda: CUDNN_VERSION
    fused.check_compute_capability = lambda needed: float(needed) <= float(has)
    fused.is_cuda_compute_capability_equal = lambda needed: needed == has


def parse_target(text: str, devices: int, option: str = "--target") -> Target:
    """Read `--target` (or another option) for a plan of that many devices. Raises PlanError P164
    for an unknown target, P165 for a slice of another size."""
    kind, _, rest = text.partition(":")
    help = ["cpu", f"gpu:NAME with one of {', '.join(CHIPS)}", "tpu:SLICE such as tpu:v5e:4x4"]
    if kind == "cpu" and not rest:
        return Target("cpu")
    if kind == "gpu" and chip(rest):
        return Target("gpu", rest)
    if match := _TPU.fullmatch(rest) if kind == "tpu" else None:
        target = Target("tpu", match.group(1), tuple(int(n) for n in match.group(2).split("x")))
        if target.devices != devices:
            raise PlanError(
                "P165",
                f"{option} {text} has {target.devices} devices, the plan {devices}",
                help=["a slice of as many devices as the plan has"],
            )
        return target
    near = did_you_mean(text, ["cpu", *(f"gpu:{name}" for name in CHIPS)])
    raise PlanError(
        "P164", f"{option} {text!r}: no such target", help=[near, *help] if near else help
    )


def require(target: Target, option: str = "--target") -> None:
    """Raise PlanError unless what compiles for the target is installed: P160 for jax, P163 for the
    compiler. Imports neither."""
    if importlib.util.find_spec("jax") is None:
        raise PlanError(
            "P160",
            f"{'plan verify' if option == '--target' else option} compiles with jax, which is not"
            " installed",
            help=["pip install jax"],
        )
    if target.kind == "gpu" and not any(
        _found(f"jax_plugins.xla_cuda{n}") and _found(f"jax_cuda{n}_plugin") for n in (12, 13)
    ):
        version = _version("jax")
        raise PlanError(
            "P163",
            f"{option} {target.text} needs jax's CUDA plugin, which is not installed",
            detail=["a compiler only: no GPU and no CUDA libraries are needed"],
            help=[
                "pip install 'meshwright[gpu-compiler]'",
                (
                    "or, beside the jax that is here: pip install --no-deps"
                    f" jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
                ),
            ],
        )
    if target.kind == "tpu" and not _found("libtpu"):
        raise PlanError(
            "P163",
            f"{option} {target.text} needs libtpu, which is not installed",
            detail=["a compiler only: no TPU is needed"],
            help=[
                "pip install 'meshwright[tpu-compiler]'",
                f"or: pip install 'jax[tpu]=={_version('jax')}'",
            ],
        )


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
