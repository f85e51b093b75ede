"""Bytes that a device moves in one decode step of emitted serving programs, beside those of its
weights and cache read once; compiled for chips that are not there.

    python -m benchmarks.decode_bytes --target gpu:h100 [--case SUBSTRING] [--prefill]

64 sequences of 2,048 + 256 tokens on eight devices. Least: the weights that products and norms
read (tables of embeddings are looked up in) and the cache, and states twice, as they are written
too. Moved: by the kernels of the loop over
steps (planner.verify.hlo.kernels); once: by those before and behind it.
Copied: the largest result of a kernel that makes no product; what is replaced in place counts as
what replaces it. Roofline: of these kernels, by the formula of prices; priced: the compute time of
the plan. With --prefill, the pass over prompts is compiled, too. Each program compiles in a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from planner.errors import PlanError
from planner.serving.serve import program, serve
from planner.strategy.strategy import Strategy
from planner.verify.compiled import shapes
from planner.verify.hlo.kernels import kernels, main_bytes
from planner.verify.hlo.text import parse
from planner.verify.numerics import load_program
from planner.verify.targets import Target, parse_target
from planner.verify.timing import kernel_s, pricer_of
from planner.verify.worker import environment

DEVICES, PROMPT, GENERATE, SEQUENCES = 8, 2048, 256, 64
HARDWARE = {"gpu:h100": "h100-sxm", "tpu:v5e:2x4": "v5e:2x4", "tpu:v5p:2x2x2": "v5p:2x2x2"}


@dataclass(frozen=True)
class Case:
    """A model that is served, and how its weights are kept."""

    name: str
    model: str
    quantize: str = "none"
    cache_type: str = "compute"
    precision: str = "bf16-mixed"


CASES = (
    Case("llama3-8b, grouped heads", "zoo:llama3-8b,cache=1"),
    Case("llama2-7b, 8 layers, a key for every head", "zoo:llama2-7b,cache=1,layers=8"),
    Case("mixtral-8x7b, 4 layers", "zoo:mixtral-8x7b,cache=1,layers=4"),
    Case("llama3-8b, windows of 1,024", "zoo:llama3-8b,cache=1,window=1024,full_every=4"),
    Case("deepseek-v3, 5 layers of 64 experts, latents", "zoo:deepseek-v3,layers=5,experts=64"),
    Case("deepseek-v2-lite, 8 layers, latents", "zoo:deepseek-v2-lite,layers=8"),
    Case("llama3-8b, int8 weights", "zoo:llama3-8b,cache=1", "int8"),
    Case("llama3-8b, fp8 cache", "zoo:llama3-8b,cache=1", "none", "fp8"),
    Case("llama3-8b, fp8", "zoo:llama3-8b,cache=1", precision="fp8"),
    Case("mixtral-8x7b, 4 layers, fp8", "zoo:mixtral-8x7b,cache=1,layers=4", precision="fp8"),
    Case("mamba2-2.7b, 16 layers", "zoo:mamba2-2.7b,layers=16"),
    Case("granite-4.0-h-micro, 16 layers", "zoo:granite-4.0-h-micro,layers=16"),
    Case("qwen3-next-80b-a3b, 8 layers", "zoo:qwen3-next-80b-a3b,layers=8"),
    Case("deepseek-v3, fp8", "zoo:deepseek-v3,layers=5,experts=64", precision="fp8"),
)


def measured(case: Case, target: Target, prefill: bool) -> dict[str, Any]:
    """The figures of one case. Runs in an environment of the target."""
    import jax
    from jax.sharding import AxisType

    made = serve(
        case.model,
        prompt=PROMPT,
        generate=GENERATE,
        concurrency=SEQUENCES,
        devices=DEVICES,
        hardware=HARDWARE[target.text],
        quantize=case.quantize,
        cache_type=case.cache_type,
        precision=case.precision,
    )
    module = load_program(program(made, case.model), compute="bfloat16")
    mesh: Any = jax.make_mesh(
        tuple(module.MESH.values()),
        tuple(module.MESH),
        axis_types=(AxisType.Auto,) * len(module.MESH),
        devices=target.compile_devices(DEVICES),
    )
    weights, caches = shapes(module, "FROZEN", mesh), shapes(module, "CACHE", mesh)
    states = shapes(module, "BEFORE", mesh) | shapes(module, "STATES", mesh)
    caches |= states
    read = [s for key, s in {**weights, **caches}.items() if "embed" not in key]
    read += states.values()  # and written
    of = {
        "mesh": f"{made.figures['replicas']} x {made.figures['split']}",
        "least_bytes": sum(prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in read),
        "step": _compiled(_step(module, mesh, weights, caches), made.step, True),
    }
    if prefill:
        of["prefill"] = _compiled(_pass(module, mesh, weights, caches), made.prompts, False)
    return of


def _whole(*shape: int) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, "int32")


def _step(module: Any, mesh: Any, weights: Any, caches: Any) -> Any:
    ids, real = _whole(module.ROWS, 1), _whole(module.ROWS, module.PROMPT)
    return module.make_generate(mesh).lower(weights, caches, ids, real, _whole(), _whole())


def _pass(module: Any, mesh: Any, weights: Any, caches: Any) -> Any:
    ids = _whole(module.WAVE, module.PROMPT)
    return module.make_prefill(mesh).lower(weights, caches, ids, ids, _whole())


def _compiled(lowered: Any, priced: Strategy, looped: bool) -> dict[str, Any]:
    """What the compiler made of one phase, of the loop in it where that is asked for."""
    begun, cpu = time.monotonic(), time.process_time()
    done = lowered.compile()
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    device = pricer_of(priced).topology.device
    module = parse(done.as_text())
    found = [site for site in kernels(module) if site.heaviest]
    sites = [site for site in found if not looped or site.computation != module.entry]
    copied = [
        min(site.selected.moved_bytes, sum(main_bytes(site.selected.instruction)))
        for site in sites
        if not site.selected.flops
    ]
    return {
        "moved_bytes": sum(site.count * site.selected.moved_bytes for site in sites),
        "once_bytes": sum(s.count * s.selected.moved_bytes for s in found if s not in sites),
        "copied_bytes": max(copied, default=0),
        "roofline_s": sum(site.count * kernel_s(site.selected, device) for site in sites),
        "priced_s": float(priced.costs["compute_time_s"]),
        "compile_s": seconds,
        "compile_cpu_s": cpu,
    }


def rows(found: Sequence[tuple[Case, dict[str, Any]]]) -> list[str]:
    """The table."""
    lines = [
        "| program | replicas x split | least | moved | of the least | once | copied at most"
        " | roofline | priced | compiled in (processor) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, of in found:
        for phase in ("step", "prefill"):
            if phase in of:
                p, step = of[phase], phase == "step"
                cells = [
                    case.name if step else f"{case.name}: the pass over prompts",
                    of["mesh"],
                    f"{of['least_bytes'] / 1e9:.2f} GB" if step else "",
                    f"{p['moved_bytes'] / 1e9:.2f} GB",
                    f"{p['moved_bytes'] / of['least_bytes']:.2f}x" if step else "",
                    f"{p['once_bytes'] / 1e9:.2f} GB" if step else "",
                    f"{p['copied_bytes'] / 1e6:.1f} MB",
                    f"{p['roofline_s'] * 1e3:.2f} ms",
                    f"{p['priced_s'] * 1e3:.2f} ms",
                    f"{p['compile_s']:.0f} s ({p['compile_cpu_s']:.0f} s)",
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def apart(case: Case, target: Target, prefill: bool) -> dict[str, Any]:
    """`measured` in a process of its own. Raises PlanError where that ends without an answer."""
    command = [sys.executable, "-m", "benchmarks.decode_bytes", "--target", target.text]
    command += ["--worker", case.name, *(["--prefill"] if prefill else [])]
    done = subprocess.run(
        command,
        env={**environment(DEVICES, target.kind), **target.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    answer = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answer:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        raise PlanError("P000", f"{case.name} did not compile: {why}")
    return dict(json.loads(answer[-1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="gpu:h100", choices=HARDWARE)
    parser.add_argument("--case", default="")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = parse_target(args.target, DEVICES)
    if args.worker:
        case = next(c for c in CASES if c.name == args.worker)
        print(json.dumps(measured(case, target, args.prefill)))
        return
    found = []
    for case in CASES:
        if args.case in case.name:
            try:
                found.append((case, apart(case, target, args.prefill)))
            except PlanError as e:
                print(e.what)
    print("\n".join(rows(found)))


if __name__ == "__main__":
    main()
