"""Runs emitted programs side by side: `python -m benchmarks.rank_cpu_run REQUEST ANSWER`. The request names program files, a number of rounds and the type to
compute in ("": each program's own); the answer has the seconds of one training step of each, a value a round. Every round goes through all programs, one step each.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SKIPPED = 2
"""Steps after the one that compiles which fill caches and do not count."""


def stepper(path: str, compute: str) -> Callable[[], float]:
    """A function that makes one training step of a program, or one forward pass of an inference program, and returns its seconds. compute: the type it computes in
    instead of its own."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if compute:
        module.COMPUTE = jnp.dtype(compute)
    mesh = module.make_mesh()
    values = module.initial_values(module.PARAMS, 0, {})
    params = module.place(module.computed(values), module.specs_of(module.PARAMS), mesh)
    frozen = module.place(module.computed(module.initial_values(module.FROZEN, 1, {})), module.specs_of(module.FROZEN), mesh)
    batch = module.place(module.computed(module.synthetic_batch(0)), module.specs_of(module.INPUTS), mesh)
    if hasattr(module, "make_inference"):
        run = module.make_inference(mesh)
        return lambda: timed(lambda: run(params, frozen, batch))
    shardings = {key: NamedSharding(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    state = jax.jit(module.start_state, out_shardings=shardings)(module.place(values, module.specs_of(module.GRADIENTS), mesh))
    step, held = module.make_step(mesh), [params, state]

    def one() -> Any:
        held[0], held[1], loss = step(held[0], held[1], frozen, batch, jnp.float32(1))
        return held[0], loss

    return lambda: timed(one)


def timed(run: Callable[[], Any]) -> float:
    """Seconds until what it returns is there."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main(request: str, answer: str) -> None:
    """Run what the request names."""
    asked = json.loads(Path(request).read_text())
    steps: dict[str, Callable[[], float]] = {}
    for name, path in asked["files"].items():
        steps[name] = stepper(path, asked["compute"])
        first = [steps[name]() for _ in range(1 + SKIPPED)]
        print(f"  {name}: compiled and made a step in {first[0]:.1f} s, then {first[-1]:.3f} s", file=sys.stderr, flush=True)
    rounds = [{name: one() for name, one in steps.items()} for _ in range(asked["rounds"])]
    Path(answer).write_text(json.dumps({name: [r[name] for r in rounds] for name in steps}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
