"""Linear attention alone, compiled for a GPU that is not there: FLOPs, bytes, roofline and working
memory beside what the planner counts (planner.ops.linear_attention).

    python -m benchmarks.linear_attention [--target gpu:h100] [--case NAME]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from math import ceil
from typing import Any

from costmodels.hardware.device import Device, load_device
from costmodels.kernels import roofline_time_s
from planner.ops.linear_attention import Sizes, forward_kernels, workspace_bytes
from planner.verify.hlo.kernels import kernels
from planner.verify.hlo.text import parse
from planner.verify.targets import Target, parse_target
from planner.verify.timing import kernel_s
from planner.verify.worker import environment

HARDWARE = {"gpu:h100": "h100-sxm", "gpu:b200": "b200"}
DEVICES = 8
"""Of the topology; one is compiled for."""
ITEMSIZE = 2
WORKER = "LINEAR_ATTENTION_WORKER"


@dataclass(frozen=True)
class Case:
    """Samples, steps, groups of heads, heads, features of keys and of values; steps of a chunk;
    delta: states are corrected."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    chunk: int
    delta: bool = False

    @property
    def sizes(self) -> Sizes:
        """As the planner reads them from a node."""
        b, t, g, h, n, p = self.shape
        return Sizes(b * h, h // g, ceil(t / self.chunk), self.chunk, n, p, self.delta)


CASES = (
    Case("Mamba-2 130M", (8, 2048, 1, 24, 128, 64), 256),
    Case("Bamba 9B", (1, 4096, 1, 128, 128, 64), 256),
    Case("Nemotron-H 8B", (1, 8192, 8, 128, 128, 64), 128),
    Case("Qwen3-Next 80B", (1, 4096, 16, 32, 128, 128), 64, delta=True),
    Case("Qwen3.5 27B", (2, 2048, 16, 48, 128, 128), 64, delta=True),
)


def compiled(case: Case, target: Target) -> tuple[Any, ...]:
    """The forward pass, and it with the backward pass behind it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from planner.emit.runtime.kernels import linear_attention as kernel

    b, t, g, h, n, p = case.shape
    place = SingleDeviceSharding(target.compile_devices(DEVICES)[0])

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    operands = [given(b, t, g, n), given(b, t, g, n), given(b, t, h, p)]
    operands += [given(b, t, h, dtype=jnp.float32), *([given(b, t, h)] if case.delta else [])]

    def forward(*args: Any) -> Any:
        beta = args[4] if case.delta else None
        return kernel.linear_attention(*args[:4], beta, 1.0, case.chunk)[0]

    def both(gradient: Any, *args: Any) -> Any:
        y, back = jax.vjp(forward, *args)
        return y, back(gradient)

    gradient = given(b, t, h, p)
    return tuple(
        jax.jit(f).lower(*args).compile()
        for f, args in ((forward, operands), (both, [gradient, *operands]))
    )


def row(case: Case, target: Target, device: Device) -> str:
    """A line of the table."""
    sizes = case.sizes
    planned = forward_kernels(sizes, (1.0, 1.0), ITEMSIZE)
    once_s = sum(
        k.often * float(roofline_time_s(device, k.flops, k.moved_bytes, "bfloat16"))
        for k in planned
    )
    cells = [case.name, str(case.chunk)]
    for done, trained in zip(compiled(case, target), (False, True), strict=True):
        sites = [site for site in kernels(parse(done.as_text())) if site.heaviest]
        roofline_s = sum(s.count * kernel_s(s.selected, device) for s in sites)
        flops = sum(s.count * s.selected.flops for s in sites)
        temporary = done.memory_analysis().temp_size_in_bytes
        priced_s = once_s * (1 + sizes.form.backward * trained)
        room = workspace_bytes(sizes, ITEMSIZE, trained)
        if not trained:
            cells.append(f"{sizes.flops / flops - 1:+.1%}")
        cells += [f"{priced_s * 1e6:,.0f} us", f"{roofline_s * 1e6:,.0f} us"]
        cells += [f"{priced_s / roofline_s:.2f}", f"{room / 1e9:.2f}", f"{temporary / 1e9:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table; compile in a process of its own, with the target's environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="gpu:h100", choices=sorted(HARDWARE))
    parser.add_argument("--case", default="")
    args = parser.parse_args()
    target = parse_target(args.target, DEVICES)
    if WORKER not in os.environ:
        there = {**environment(DEVICES, target.kind), **target.environment(), WORKER: "1"}
        command = [sys.executable, "-m", "benchmarks.linear_attention", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, **there}, check=False).returncode)
    each = ["priced", "roofline", "ratio", "GB planned", "compiled"]
    head = ["sizes of", "chunk", "FLOPs apart", *each, *(f"{name}, training" for name in each)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for case in CASES:
        if args.case in case.name:
            print(row(case, target, load_device(HARDWARE[args.target])), flush=True)


if __name__ == "__main__":
    main()
