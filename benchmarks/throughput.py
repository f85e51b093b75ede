"""Speed of emitted programs beside programs written by hand with the same shardings, and beside
onnxruntime.

    python -m benchmarks.throughput [--rounds 10] [--seq 128] [--batch 8] [--only
    shard_map|jit|infer]

GPT-2 small trains on 4 virtual CPU devices, data 2 x model 2 (Megatron with sequence parallelism),
in float32: the emitted program of each back end beside benchmarks.throughput_hand. Both start from
the same values and must give the same losses; then they take steps in turn, in one process, so that
whatever else the machine does meets both alike. Printed: ratios emitted / by hand of the medians
and of the least times, of wall and of CPU seconds. Inference on one device: the emitted program
beside onnxruntime on the same file, with as many threads as this process may use. Exits with 1
where a training ratio of the medians is above 1.05.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import planner
from planner.commands.programs import write_program

DEVICES, PINS, MARK = 4, "dp=2,tp=2,zero=0,micro=1,recompute=none", 1.05
SKIPPED = 2
"""Steps that compile and fill caches."""
SAME = 2e-4
"""Largest relative difference of losses: sums in another order, over a few steps."""
Run = Callable[[], float]


def loaded(path: Path) -> Any:
    """An emitted program as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emitted_step(m: Any) -> Run:
    """One training step of an emitted program: () -> loss."""
    import jax
    import jax.numpy as jnp

    mesh = m.make_mesh()
    values = m.initial_values(m.PARAMS, 0, {})
    held = [
        m.place(values, m.specs_of(m.PARAMS), mesh),
        jax.jit(m.start_state, out_shardings=None)(m.place(values, m.specs_of(m.GRADIENTS), mesh)),
    ]
    batch, step, count = (
        m.place(m.synthetic_batch(0), m.specs_of(m.INPUTS), mesh),
        m.make_step(mesh),
        [0],
    )

    def one() -> float:
        count[0] += 1
        held[0], held[1], loss = step(held[0], held[1], {}, batch, jnp.float32(count[0]))
        jax.block_until_ready(held)
        return float(loss)

    return one


def hand_step(m: Any, backend: str) -> Run:
    """One training step of the program written by hand, from the values and with the cuts of an
    emitted one."""
    import jax
    import jax.numpy as jnp

    from benchmarks import throughput_hand

    mesh, specs = m.make_mesh(), m.specs_of(m.PARAMS)
    params = m.place(m.initial_values(m.PARAMS, 0, {}), specs, mesh)
    held = [params, {k: (jnp.zeros_like(p), jnp.zeros_like(p)) for k, p in params.items()}]
    batch, count = m.place(m.synthetic_batch(0), m.specs_of(m.INPUTS), mesh), [0]
    vocabulary = m.PARAMS["transformer.wte.weight"][0][0]
    step = throughput_hand.make_step(mesh, specs, m.specs_of(m.INPUTS), backend, vocabulary)

    def one() -> float:
        count[0] += 1
        with jax.set_mesh(mesh):
            held[0], held[1], loss = step(held[0], held[1], batch, jnp.float32(count[0]))
        jax.block_until_ready(held)
        return float(loss)

    return one


def alternated(runs: dict[str, Run], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of every run, in turn; the one that begins changes from round to
    round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for i in range(rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def shown(title: str, found: dict[str, list[tuple[float, float]]]) -> float:
    """Print a row; the ratio of the medians of wall time, first / second."""
    (a, first), (b, second) = found.items()
    ratios = [
        how(x[i] for x in first) / how(x[i] for x in second)
        for i in (0, 1)
        for how in (median, min)
    ]
    walls = ", ".join(
        f"{name} {median(x[0] for x in rows):.3f} s (least {min(x[0] for x in rows):.3f})"
        for name, rows in found.items()
    )
    print(
        f"{title:12} {a} / {b}: wall {ratios[0]:.3f} median, {ratios[1]:.3f} least; CPU"
        f" {ratios[2]:.3f} median, {ratios[3]:.3f} least   {walls}",
        flush=True,
    )
    return ratios[0]


def training(backend: str, model: str, batch: int, rounds: int, folder: Path) -> bool:
    """Whether the emitted program of a back end keeps the mark."""
    strategy = planner.plan(
        model,
        devices=DEVICES,
        hardware="cpu",
        batch=batch,
        precision="fp32",
        pins=PINS,
        baselines=False,
    )
    path = folder / f"{backend}.py"
    write_program(strategy, model, path, backend, False, True)
    m = loaded(path)
    runs = {"emitted": emitted_step(m), "by hand": hand_step(m, backend)}
    losses = {name: [run() for _ in range(SKIPPED)] for name, run in runs.items()}
    if any(abs(a - b) > SAME * abs(b) for a, b in zip(*losses.values(), strict=True)):
        raise SystemExit(f"{backend}: these are two different models: losses {losses}")
    ratio = shown(backend, alternated(runs, rounds))
    del runs
    gc.collect()
    return ratio <= MARK


def inference(model: str, batch: int, rounds: int, folder: Path) -> None:
    """The emitted forward pass on one device beside onnxruntime."""
    import jax
    import numpy as np
    import onnx
    import onnxruntime

    import models_zoo

    source = f"{model},weights=inline,batch={batch}"
    proto = models_zoo.build(source)
    file = folder / "model.onnx"
    onnx.save(proto, file)
    strategy = planner.plan(
        str(file), devices=1, hardware="cpu", workload="infer", precision="fp32", baselines=False
    )
    write_program(strategy, str(file), folder / "infer.py", "shard_map", False, True)
    m = loaded(folder / "infer.py")
    weights = m.read_safetensors(folder / "infer.safetensors")
    mesh = m.make_mesh()
    params = m.place(m.initial_values(m.PARAMS, 0, weights), m.specs_of(m.PARAMS), mesh)
    frozen = m.place(m.initial_values(m.FROZEN, 0, weights), m.specs_of(m.FROZEN), mesh)
    ids = m.synthetic_batch(0)
    placed, run = m.place(ids, m.specs_of(m.INPUTS), mesh), m.make_inference(mesh)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    given = {i.name: ids[i.name].astype(np.int64) for i in session.get_inputs()}
    outputs: dict[str, Any] = {}

    def ours() -> float:
        outputs["ours"] = jax.block_until_ready(run(params, frozen, placed))
        return 0.0

    def theirs() -> float:
        outputs["theirs"] = session.run(None, given)
        return 0.0

    for one in (ours, theirs) * SKIPPED:
        one()
    mine = np.asarray(jax.tree.leaves(outputs["ours"])[0])
    error = float(np.abs(mine - outputs["theirs"][0]).max())
    print(
        f"{'infer':12} largest difference of logits from onnxruntime's: {error:.1e} of"
        f" {float(np.abs(mine).max()):.1f}"
    )
    shown("infer", alternated({"emitted": ours, "onnxruntime": theirs}, rounds))


def main() -> int:
    """Print the ratios."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--only", choices=("shard_map", "jit", "infer"))
    args = p.parse_args()
    inferring = args.only == "infer"
    os.environ["XLA_FLAGS"] = (
        "" if inferring else f"--xla_force_host_platform_device_count={DEVICES}"
    )
    import jax

    jax.config.update("jax_platforms", "cpu")
    model = f"zoo:gpt2-small,seq={args.seq},layers={args.layers}"
    with tempfile.TemporaryDirectory() as folder:
        if inferring:
            inference(model, args.batch, args.rounds, Path(folder))
            return 0
        good = [
            training(b, model, args.batch, args.rounds, Path(folder))
            for b in ("shard_map", "jit")
            if args.only in (None, b)
        ]
    print("within the mark" if all(good) else f"a ratio of the medians is above {MARK}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
