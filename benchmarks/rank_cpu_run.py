"""Runs emitted programs side by side: `python -m benchmarks.rank_cpu_run REQUEST ANSWER`. The
request names program files, a number of rounds and the type to compute in ("": each program's own);
the answer has the wall and CPU seconds of one training step of each, a pair a round. Every round
goes through all programs, one step each. Programs that the compiler makes the same instructions of
(a mesh with an axis of one device beside one without) are run as one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 6
"""Programs that are compiled at the same time: each is mostly one thread's work."""
SKIPPED = 2
"""Steps that fill caches and do not count."""


def stepper(path: str, compute: str) -> tuple[Any, Callable[[Any], Callable[[], float]]]:
    """A program's training step, or forward pass of an inference program, ready to be compiled; and
    what makes of the compiled one a function that runs it once and returns its seconds. compute:
    the type it computes in instead of its own."""
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
    frozen = module.place(
        module.computed(module.initial_values(module.FROZEN, 1, {})),
        module.specs_of(module.FROZEN),
        mesh,
    )
    batch = module.place(
        module.computed(module.synthetic_batch(0)), module.specs_of(module.INPUTS), mesh
    )
    if hasattr(module, "make_inference"):
        return module.make_inference(mesh).lower(
            params, frozen, batch
        ), lambda run: lambda: timed(lambda: run(params, frozen, batch))
    shardings = {key: NamedSharding(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    state = jax.jit(module.start_state, out_shardings=shardings)(
        module.place(values, module.specs_of(module.GRADIENTS), mesh)
    )
    held, rest = [params, state], (frozen, batch, jnp.float32(1))

    def stepping(step: Callable[..., Any]) -> Callable[[], float]:
        def one() -> Any:
            held[0], held[1], loss = step(*held, *rest)
            return held[0], loss

        return lambda: timed(one)

    return module.make_step(mesh).lower(*held, *rest), stepping


def timed(run: Callable[[], Any]) -> float:
    """Seconds until what it returns is there."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def both(one: Callable[[], float]) -> tuple[float, float]:
    """(wall seconds of a step, seconds of all cores that this process takes for it)."""
    start = time.process_time()
    wall = one()
    return wall, time.process_time() - start


def instructions(text: str) -> str:
    """What a compiled program does: its instructions in order, without what they say of the source
    they are from."""
    return "\n".join(
        re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line
    )


def main(request: str, answer: str) -> None:
    """Run what the request names."""
    asked = json.loads(Path(request).read_text())
    steps: dict[str, Callable[[], float]] = {}
    programs = {name: stepper(path, asked["compute"]) for name, path in asked["files"].items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        compiled = list(pool.map(lambda program: program[0].compile(), programs.values()))
    alike: dict[str, str] = {}  # instructions -> the first program of them
    same = {
        name: alike.setdefault(instructions(run.as_text()), name)
        for name, run in zip(programs, compiled, strict=True)
    }
    for (name, (_, stepping)), run in zip(programs.items(), compiled, strict=True):
        if same[name] != name:
            continue
        steps[name] = stepping(run)
        first = [steps[name]() for _ in range(SKIPPED)]
        print(f"  {name}: a step in {first[-1]:.3f} s", file=sys.stderr, flush=True)
    rounds = [{name: both(one) for name, one in steps.items()} for _ in range(asked["rounds"])]
    Path(answer).write_text(
        json.dumps({name: [r[same[name]] for r in rounds] for name in programs})
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
