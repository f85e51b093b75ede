"""Runs emitted programs on the accelerator that jax sees and says how long their steps took, kernel
by kernel: `python -m benchmarks.measured_run FOLDER RESULTS [--seconds 300] [--only WORD]`.

Needs jax, numpy and what `python -m benchmarks.measured write FOLDER` wrote: nothing of the planner.
Each program runs in a process of its own, its values made on the device. Of each, RESULTS gets
NAME.json: seconds of every step, seconds and runs of every kernel by the name it has in the
compiled program (jax's trace), what the compiler says of its memory, and the device's own peak;
and NAME.hlo.gz, the compiled program. Programs to be checked are run on the host in float32 too.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SKIPPED, LEAST_STEPS, MEASURED_S = 1, 3, 1.2
"""Steps that do not count, and how many are measured: as many as take so long."""
TRACED = 2
AT_ONCE = 3
"""Processes: one uses the device, the others import and trace programs meanwhile."""
PROGRAM_S = 150.0
NOTHING = 1e-6
"""A gradient that is so small a part of the largest is nothing but rounding, as that of a bias of
attention's keys is, which no softmax sees."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The device for this process alone."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def loaded(path: Path) -> Any:
    """An emitted program as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def made(module: Any, table: str, mesh: Any, dtype: Any) -> dict[str, Any]:
    """Values of a table of the program, made on the device: floats around the mean that the table
    has for them, of a hash of their position."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    def drawn(shape: tuple[int, ...], mean: float, kind: str) -> Any:
        if kind not in ("float", "int8"):
            return jnp.zeros(shape, kind)
        at = jnp.zeros(shape, jnp.uint32)
        for dim in range(len(shape)):
            at = at * jnp.uint32(2246822519) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        at = (at ^ (at >> 15)) * jnp.uint32(2654435761)
        at = (at ^ (at >> 13)) * jnp.uint32(3266489917)
        noise = ((at >> 8).astype(jnp.float32) / 2**24 - 0.5) * 0.07
        return (mean + noise).astype(dtype) if kind == "float" else (noise * 3000).astype(kind)

    out = {}
    for key, (shape, kind, *rest, spec) in getattr(module, table).items():
        mean = float(rest[1]) if len(rest) > 1 else 0.0
        make = jax.jit(drawn, static_argnums=(0, 1, 2), out_shardings=NamedSharding(mesh, spec))
        out[key] = make(module.padded_shape(shape, spec), mean, kind)
    return out


def training(module: Any, mesh: Any) -> tuple[Any, Callable[[Any], Callable[[], Any]]]:
    """The lowered step, and what makes of the compiled one a function that runs it once."""
    import jax
    import jax.numpy as jnp

    at = {key: module.state_at(mesh, row[-1]) for key, row in module.GRADIENTS.items()}
    lowered = module.make_step(mesh).lower(*abstract(module, mesh))

    def ready(step: Any) -> Callable[[], Any]:
        """The compiled step with values of its own, which it replaces."""
        params = made(module, "PARAMS", mesh, module.COMPUTE)
        masters = made(module, "PARAMS", mesh, jnp.float32)
        state = {
            key: jax.jit(
                lambda p: module.start_state({"": p})[""], out_shardings=at[key], donate_argnums=0
            )(masters.pop(key))
            for key in list(masters)
        }
        state |= module.state_beside(mesh)
        batch = placed(module, mesh)
        frozen = made(module, "FROZEN", mesh, module.COMPUTE)
        held = [params, state]
        del params, state, masters

        def run() -> Any:
            held[0], held[1], *seen = step(*held, frozen, batch, jnp.float32(1))
            return seen[0]

        return run

    return lowered, ready


def shapes(module: Any, table: str, mesh: Any, dtype: Any = None) -> dict[str, Any]:
    """Shapes of a table's arrays as the program has them between steps; floats in the type that it
    computes in, or in dtype."""
    import jax
    from jax.sharding import NamedSharding

    out = {}
    for key, (shape, kind, *_, spec) in getattr(module, table).items():
        on = (
            module.parameter_at(mesh, key, spec)
            if hasattr(module, "parameter_at") and table == "PARAMS"
            else NamedSharding(mesh, spec)
        )
        out[key] = jax.ShapeDtypeStruct(
            module.padded_shape(shape, spec),
            (dtype or module.COMPUTE) if kind == "float" else kind,
            sharding=on,
        )
    return out


def abstract(module: Any, mesh: Any) -> tuple[Any, ...]:
    """Shapes of a training step's arguments."""
    import jax

    masters, state = shapes(module, "PARAMS", mesh, "float32"), {}
    for key, arrays in jax.eval_shape(module.start_state, masters).items():
        on = module.state_at(mesh, module.GRADIENTS[key][-1])
        state[key] = jax.tree.map(
            lambda s, on=on: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on), arrays
        )
    if hasattr(module, "SCALE"):
        state[module.SCALE] = (jax.ShapeDtypeStruct((), "float32"),) * 3
    params, frozen, batch = (shapes(module, t, mesh) for t in ("PARAMS", "FROZEN", "INPUTS"))
    return params, state, frozen, batch, jax.ShapeDtypeStruct((), "float32")


def placed(module: Any, mesh: Any) -> Any:
    """The program's synthetic batch on the device."""
    return module.place(
        module.computed(module.synthetic_batch(0)), module.specs_of(module.INPUTS), mesh
    )


def inference(module: Any, mesh: Any) -> tuple[Any, Callable[[Any], Callable[[], Any]]]:
    """The same of a forward pass."""
    given = [shapes(module, table, mesh) for table in ("PARAMS", "FROZEN", "INPUTS")]

    def ready(run: Any) -> Callable[[], Any]:
        params, frozen = (made(module, t, mesh, module.COMPUTE) for t in ("PARAMS", "FROZEN"))
        batch = placed(module, mesh)
        return lambda: run(params, frozen, batch)

    return module.make_inference(mesh).lower(*given), ready


def decoding(module: Any, mesh: Any) -> tuple[Any, Callable[[Any], Callable[[], Any]]]:
    """All tokens of a batch behind their prompts."""
    import jax.numpy as jnp

    weights, caches = (shapes(module, table, mesh) for table in ("FROZEN", "CACHE"))
    ids = np.zeros((module.ROWS, 1), np.int32)
    real = np.ones((module.ROWS, module.PROMPT), np.int32)
    end, count = jnp.int32(-1), jnp.int32(module.GENERATE)
    generate = module.make_generate(mesh)

    def ready(run: Any) -> Callable[[], Any]:
        held = [made(module, "FROZEN", mesh, module.COMPUTE), module.make_caches(mesh)]

        def one() -> Any:
            tokens, made_, held[1] = run(*held, jnp.asarray(ids), jnp.asarray(real), count, end)
            return tokens, made_

        return one

    return generate.lower(weights, caches, ids, real, count, end), ready


def timed(run: Callable[[], Any]) -> list[float]:
    """Seconds of steps one after another, each waited for."""
    import jax

    out = list[float]()
    while len(out) < SKIPPED + LEAST_STEPS or (
        sum(out[SKIPPED:]) < MEASURED_S and len(out) < SKIPPED + 200
    ):
        start = time.perf_counter()
        jax.block_until_ready(run())
        out.append(time.perf_counter() - start)
    return out[SKIPPED:]


def in_a_row(run: Callable[[], Any], steps: int) -> float:
    """Seconds of one of so many steps that are not waited for one by one, as a training loop has
    them."""
    import jax

    start, last = time.perf_counter(), None
    for _ in range(steps):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / steps


def traced(run: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of a step: name in the compiled program and of the kernel -> [seconds, runs]; and the
    seconds in which at least one ran."""
    import jax
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                jax.block_until_ready(run())
        found = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    rows: dict[str, list[float]] = {}
    busy, lines = list[tuple[float, float]](), list[str]()
    for plane in found.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            events = list(line.events)
            lines.append(f"{line.name}: {len(events)}")
            if not line.name.startswith("Stream"):
                continue
            for event in events:
                own = dict(event.stats)
                key = f"{own.get('hlo_op', '')}|{event.name}"
                row = rows.setdefault(key, [0.0, 0.0])
                row[0] += event.duration_ns * 1e-9 / TRACED
                row[1] += 1 / TRACED
                busy.append((event.start_ns, event.start_ns + event.duration_ns))
    return {"kernels": rows, "busy_s": union(busy) * 1e-9 / TRACED, "lines": lines}


def union(spans: list[tuple[float, float]]) -> float:
    """Length of what any of the spans covers."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def differences(path: Path) -> dict[str, Any]:
    """Loss and gradients on the device, in the program's own type, beside those of the host in
    float32: |difference| / |host's| of the loss and of each gradient."""
    import jax
    import jax.numpy as jnp

    found, start = [], list[Any]()
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        module = loaded(path)
        if start:
            module.COMPUTE = jnp.float32
        mesh = jax.make_mesh(
            tuple(module.MESH.values()),
            tuple(module.MESH),
            axis_types=(jax.sharding.AxisType.Auto,) * len(module.MESH),
            devices=[device],
        )
        values = [
            module.place(
                module.computed(module.initial_values(getattr(module, table), seed, {})),
                module.specs_of(getattr(module, table)),
                mesh,
            )
            for seed, table in enumerate(("PARAMS", "FROZEN"))
        ]
        if not start:  # both start from values of the program's own type
            start = [{k: np.asarray(v).astype(np.float32) for k, v in t.items()} for t in values]
        else:
            values = [
                module.place(t, module.specs_of(getattr(module, table)), mesh)
                for t, table in zip(start, ("PARAMS", "FROZEN"), strict=True)
            ]
        run = module.make_gradients(mesh).lower(*values, placed(module, mesh)).compile()
        loss, gradients = run(*values, placed(module, mesh))
        found.append((float(loss), {k: np.asarray(g, np.float32) for k, g in gradients.items()}))
    (loss, mine), (whole, theirs) = found
    sizes = {k: float(np.linalg.norm(g)) for k, g in theirs.items()}
    least = NOTHING * max(sizes.values())
    return {
        "loss": [loss, whole],
        "gradients": {
            k: float(np.linalg.norm(mine[k] - g)) / sizes[k]
            for k, g in theirs.items()
            if sizes[k] > least
        },
    }


def one(folder: Path, results: Path, case: dict[str, Any]) -> None:
    """One program, in this process."""
    import jax

    path, told = folder / case["program"], {"case": case["name"]}
    if case["kind"] == "check":
        with alone(results):
            told |= differences(path)
    else:
        module = loaded(path)
        mesh = module.make_mesh()
        begun = time.perf_counter()
        lowered, ready = {"train": training, "infer": inference, "decode": decoding}[case["kind"]](
            module, mesh
        )
        told["lower_s"] = time.perf_counter() - begun
        with alone(results):
            begun = time.perf_counter()
            step = lowered.compile()
            told["compile_s"] = time.perf_counter() - begun
            (results / f"{case['name']}.hlo.gz").write_bytes(
                gzip.compress(step.as_text().encode(), 3)
            )
            sizes = step.memory_analysis()
            told["compiler_bytes"] = {
                key: int(getattr(sizes, key))
                for key in dir(sizes)
                if key.endswith("_in_bytes") and "serialized" not in key
            }
            saved(results, case, told)
            run = ready(step)
            jax.block_until_ready(run())
            told["before_bytes"] = stats()
            told["steps_s"] = timed(run)
            told["after_bytes"] = stats()
            saved(results, case, told)
            told["in_a_row_s"] = in_a_row(run, min(len(told["steps_s"]), 20))
            saved(results, case, told)
            told |= traced(run)
    told["device"], told["jax"] = jax.devices()[0].device_kind, jax.__version__
    saved(results, case, told)


def stats() -> dict[str, int]:
    """What the device's allocator says."""
    import jax

    return {k: int(v) for k, v in (jax.devices()[0].memory_stats() or {}).items()}


def saved(results: Path, case: dict[str, Any], told: dict[str, Any]) -> None:
    """Write what is known so far."""
    (results / f"{case['name']}.json").write_text(json.dumps(told))


def summary(results: Path, case: dict[str, Any], begun: float) -> str:
    """A line about a program that has run."""
    path = results / f"{case['name']}.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    if "gradients" in told:
        worst = max(told["gradients"].values())
        mine, whole = told["loss"]
        text = f"loss {mine:.5f} beside {whole:.5f}, worst gradient {worst:.2e}"
    elif "steps_s" in told:
        measured, priced = median(told["steps_s"]), case["priced_s"]
        peak = told["after_bytes"].get("peak_bytes_in_use", 0)
        text = (
            f"measured {1e3 * measured:.2f} ms, busy {1e3 * told.get('busy_s', 0):.2f},"
            f" priced {1e3 * priced:.2f} ({priced / measured - 1:+.1%}); peak {peak / 1e9:.2f} GB,"
            f" planned {case['planned_bytes'] / 1e9:.2f}; compile {told['compile_s']:.0f} s"
        )
    else:
        text = "FAILED"
    return f"[{time.monotonic() - begun:5.0f} s] {case['name']}: {text}"


def main() -> int:
    """Run all programs of the folder that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--case", default="")
    given = parser.parse_args()
    cases = json.loads((given.folder / "cases.json").read_text())
    given.results.mkdir(parents=True, exist_ok=True)
    if given.case:
        one(given.folder, given.results, next(c for c in cases if c["name"] == given.case))
        return 0
    words = given.only.split(",")
    wanted = [c for word in words for c in cases if word in c["name"]]
    wanted = list({c["name"]: c for c in wanted}.values())
    begun = time.monotonic()
    running: list[tuple[Any, dict[str, Any], float]] = []
    failed = 0
    while wanted or running:
        while wanted and len(running) < AT_ONCE and time.monotonic() - begun < given.seconds:
            case = wanted.pop(0)
            log = (given.results / f"{case['name']}.log").open("w")
            command = [sys.executable, "-m", "benchmarks.measured_run"]
            running.append(
                (
                    subprocess.Popen(
                        [*command, str(given.folder), str(given.results), "--case", case["name"]],
                        stdout=log,
                        stderr=log,
                        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                    ),
                    case,
                    time.monotonic(),
                )
            )
        if time.monotonic() - begun >= given.seconds:
            wanted = []
        for entry in list(running):
            process, case, started = entry
            if process.poll() is None:
                if time.monotonic() - started > AT_ONCE * PROGRAM_S:
                    process.kill()
                continue
            running.remove(entry)
            print(summary(given.results, case, begun), flush=True)
            if process.returncode:
                failed += 1
                text = (given.results / f"{case['name']}.log").read_text().strip().splitlines()
                print("\n".join(f"    {line[:300]}" for line in text[-6:]), flush=True)
        time.sleep(0.05)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
