"""Programs in every precision that is emitted, beside the unsharded program in float32: loss and
gradients of one training step on 8 virtual devices, as each precision computes them.

    python -m benchmarks.precisions [--only fp16]

A step from seeded parameters; gradients are read from the optimizer's first moments, so that the
whole step is run: the loss scale of fp16, the reductions, the sums over microbatches. Two errors of
gradients: of all of them together, |g - r| / |r| (norms), and of the worst tensor, max|g - r| /
max|r|, measured against at least a hundredth of the largest gradient. Tolerances are those of
TOLERANCES; exits with 1 when a row is above. Of the models in KINKED rounding decides which side of
a ReLU a value lies on, or which experts a token gets: single tensors are not judged, and all
together by KINKS times the bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

FLOOR = 1e-2
"""Of the largest gradient: what the tensors' errors are measured against at least."""
GPT, LLAMA = "zoo:gpt-tiny", "zoo:llama-tiny"
PLANS = (
    (GPT, "dp=8,zero=0,micro=2", "shard_map"),
    (GPT, "dp=2,tp=4,zero=1,micro=1", "shard_map"),
    (GPT, "dp=8,zero=3,micro=1", "shard_map"),
    (GPT, "pp=2,dp=2,tp=2,zero=1,micro=4", "shard_map"),
    (GPT, "dp=2,tp=4,zero=1,micro=1", "jit"),
    (LLAMA, "dp=4,tp=2,zero=2,micro=2", "shard_map"),
    ("zoo:bert-tiny", "dp=8,zero=1,micro=2", "shard_map"),
    ("zoo:t5-tiny", "dp=4,tp=2,zero=1,micro=1", "shard_map"),
    ("zoo:mixtral-tiny", "dp=8,zero=1,micro=1", "shard_map"),
    ("zoo:vit-tiny", "dp=4,tp=2,zero=1,micro=1", "shard_map"),
    ("zoo:resnet-tiny", "pp=4,dp=2,micro=4,widths=1+2+1,zero=1", "shard_map"),
)
BATCH, DEVICES = 16, 8
KINKED, KINKS = ("zoo:t5-tiny", "zoo:mixtral-tiny"), 5


@dataclass(frozen=True)
class Tolerance:
    """Bounds of a precision: of the loss (a fraction), of all gradients, of the worst tensor."""

    loss: float
    gradients: float
    worst: float


TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-5, 1e-4),
    "fp16": Tolerance(1e-3, 5e-3, 2e-2),
    "fp8": Tolerance(2e-3, 1e-1, 2.5e-1),
    "bf16-pure": Tolerance(1e-2, 4e-2, 1e-1),
    "bf16-mixed": Tolerance(1e-2, 4e-2, 1e-1),
}


@dataclass(frozen=True)
class Errors:
    """Of one step beside float32; `label`: of the worst tensor."""

    loss: float
    gradients: float
    worst: float
    label: str

    def within(self, bound: Tolerance, kinked: bool = False) -> bool:
        """Whether nothing is above the bounds; what is no number is."""
        gradients = bound.gradients * (KINKS if kinked else 1)
        return (
            self.loss <= bound.loss
            and self.gradients <= gradients
            and (kinked or self.worst <= bound.worst)
        )


@cache
def reference(source: str, microbatches: int) -> tuple[Any, Any, Any, Any]:
    """(graph of a microbatch, values by label, batch, (loss, gradients) of the unsharded program in
    float32)."""
    import planner
    from planner.verify.numerics import Twin, seeded_batch, seeded_values

    options: dict[str, Any] = {"batch": BATCH // microbatches, "precision": "fp32"}
    graph = planner.plan(source, devices=1, baselines=False, pins="micro=1", **options).graph
    assert graph is not None
    values = seeded_values(graph, {})
    twin = Twin(graph, "train", values)
    parts = [seeded_batch(twin.module, {}, seed) for seed in range(microbatches)]
    feeds = {k: np.stack([p[k] for p in parts]) for k in parts[0]} if len(parts) > 1 else parts[0]
    return graph, values, feeds, twin.gradients(feeds, microbatches)


def program_of(source: str, pins: str, backend: str, precision: str) -> tuple[Any, Any]:
    """(strategy, emitted program) of a plan in a precision."""
    import planner
    from planner.emit.from_strategy import program

    strategy = planner.plan(
        source,
        devices=DEVICES if pins else 1,
        batch=BATCH,
        precision=precision,
        pins=pins or "micro=1",
        baselines=False,
    )
    return strategy, program(strategy, source, backend=backend)


def begun(
    module: types.ModuleType, program: Any, values: Mapping[str, np.ndarray]
) -> tuple[Any, Any, Any]:
    """(parameters, optimizer state, frozen weights) of a program before its first step."""
    import jax

    from planner.verify.numerics import placed

    mesh = module.make_mesh()
    params, frozen = (
        {
            key: p.astype(module.COMPUTE) if np.issubdtype(p.dtype, np.floating) else p
            for key, p in placed(module, program, table, values, mesh).items()
        }
        for table in ("PARAMS", "FROZEN")
    )
    masters = {
        key: np.asarray(p)[tuple(slice(0, n) for n in module.PARAMS[key][0])]
        for key, p in placed(module, program, "PARAMS", values, mesh).items()
    }
    cuts = {key: module.state_at(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    state = jax.jit(module.start_state, out_shardings=cuts)(
        module.place(masters, module.specs_of(module.GRADIENTS), mesh)
    )
    return params, state | module.state_beside(mesh), frozen


def one_step(
    source: str, pins: str, backend: str, precision: str
) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradients by label) of a step of the program; without pins of the unsharded one."""
    import jax
    import jax.numpy as jnp

    from costmodels.precision import load_recipe
    from planner.verify.numerics import load_program, unstacked

    strategy, made = program_of(source, pins, backend, precision)
    micro = int(strategy.techniques["microbatches"])
    _, values, feeds, (_, want) = reference(source, micro)
    module = load_program(made, compute=load_recipe(precision).between)
    if not pins:
        alone = jax.make_mesh((), (), devices=jax.devices()[:1])
        module.__dict__["make_mesh"] = lambda: alone
    mesh = module.make_mesh()
    params, state, frozen = begun(module, made, values)
    data = module.place(module.computed(feeds), module.specs_of(module.INPUTS), mesh)
    _, state, loss, *_ = module.make_step(mesh)(params, state, frozen, data, jnp.float32(1))
    moments = {key: np.asarray(state[key][0], np.float32) for key in module.PARAMS}
    gradients = {key: m / (1 - module.BETA1) for key, m in moments.items()}
    return float(loss), unstacked(module, made, gradients, want)


def errors(source: str, pins: str, backend: str, precision: str) -> Errors:
    """Of a step of the program beside the unsharded one in float32."""
    loss, found = one_step(source, pins, backend, precision)
    micro = next((int(p[6:]) for p in pins.split(",") if p.startswith("micro=")), 1)
    _, _, _, (want_loss, want) = reference(source, micro)
    return beside(loss, found, float(want_loss), want)


def beside(
    loss: float, found: Mapping[str, np.ndarray], want_loss: float, want: Mapping[str, np.ndarray]
) -> Errors:
    """Loss and gradients beside those wanted."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    top = max(float(np.abs(g).max()) for g in want.values())
    apart = {
        label: float(np.abs(found[label] - g).max()) / max(float(np.abs(g).max()), FLOOR * top)
        for label, g in want.items()
    }
    label = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else np.inf)
    off = sum(float(np.square(found[name] - g, dtype=np.float64).sum()) for name, g in want.items())
    whole = sum(float(np.square(g, dtype=np.float64).sum()) for g in want.values())
    return Errors(abs(loss - want_loss) / abs(want_loss), (off / whole) ** 0.5, apart[label], label)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every row is within its tolerance."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="precisions whose name contains this")
    args = parser.parse_args(argv)
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    os.environ |= {"NPROC": "256", "JAX_PLATFORMS": "cpu"}
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "float32"
    columns = f"{'loss':>8} {'gradients':>9} {'worst':>8}"
    print(f"{'model':18} {'plan':39} {'back end':9} {'precision':10} {columns}  result")
    failed = 0
    for precision, bound in TOLERANCES.items():
        for source, pins, backend in PLANS if args.only in precision else ():
            e = errors(source, pins, backend, precision)
            good = e.within(bound, source in KINKED)
            failed += not good
            print(
                f"{source:18} {pins:39} {backend:9} {precision:10} {e.loss:8.1e}"
                f" {e.gradients:9.1e} {e.worst:8.1e}  {'ok' if good else f'ABOVE: {e.label}'}",
                flush=True,
            )
    print(f"\n{failed} rows above their tolerance" if failed else "\nall within their tolerances")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
