"""XLA's own auto-sharding beside our plans, compiled by the same TPU compiler for the same slice:
python -m benchmarks.xla_auto --libtpu LIBTPU.SO

The pass is in libtpu up to 0.0.40 and works for TPUs alone (no TPU is needed); newer ones leave
everything replicated without a word. Where --libtpu is not given nothing is measured, and that is
said. To get it:

    pip download --no-deps libtpu==0.0.40 && unzip -d libtpu40 libtpu-0.0.40-*.whl      # then
        --libtpu libtpu40/libtpu/libtpu.so

Per model one training step (AdamW, bfloat16) on a v5e slice of 2 x 4:

    auto    the program of one device without any sharding; the pass chooses those of arguments,
            results and everything between, within RATIO times its own lower bound of memory (its
            default of 1.1 takes minutes more and answers worse) and SOLVER_S a partial mesh
    ours    what `plan` chooses for the slice with everything open, as a program of either back end

Printed: ring bytes a device sends in a step as compiled (parsed from the compiled text by
`planner.verify`), arguments and peak memory a device by the compiler, seconds: of `auto` the
compilation less that of our jit program (what choosing adds), of ours the whole `plan` process.
Marks (exit status 1 when one is missed): a plan of ours sends no more bytes at no more peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET, HARDWARE, DEVICES, MESH = "tpu:v5e:2x4", "tpu-v5e:2x4", 8, {"x": 2, "y": 4}
MODELS = {
    "mlp": ("zoo:mlp,layers=4,hidden=4096,in=1024,out=1024", 4096),
    "gpt-block": ("zoo:gpt,layers=1,hidden=1024,heads=16,seq=512,vocab=8192", 16),
}
"""name -> (zoo model, global batch)."""
RATIO, SOLVER_S, TIMEOUT_S = 3, 30, 1500.0
FLAGS = (
    f"--xla_tpu_auto_spmd_partitioning_memory_budget_ratio={RATIO}"
    f" --xla_tpu_auto_spmd_partitioning_solver_timeout_seconds={SOLVER_S}"
)


def figures(done: Any, mesh: dict[str, int]) -> dict[str, float]:
    """Ring bytes sent, arguments and peak of a compiled program, a device."""
    from planner.verify.hlo.program import traffic

    stats = done.memory_analysis()
    found = traffic(done.as_text(), tuple(mesh.items()), merge_ar_slice=True)
    sent = sum(float(cell["wire"]) for by in found.values() for cell in by.values())
    peak = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return {"sent": sent, "arguments": stats.argument_size_in_bytes, "peak": peak}


def auto(source: str, batch: int) -> dict[str, float]:
    """The step of one device, sharded by the compiler. Runs in a process of its own with the old
    libtpu."""
    import jax

    # the options are reached nowhere else in this version of jax
    import jax._src.compiler as compiler
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import planner
    from planner.emit.program import emit
    from planner.emit.writer import Training
    from planner.verify.numerics import load_program
    from planner.verify.targets import parse_target
    from planner.workload.model import Model, Workload

    strategy = planner.plan(source, devices=1, hardware="tpu-v5e", batch=batch, baselines=False)
    graph = Model.open(source, Workload(batch=batch), 1).graph(
        int(strategy.techniques["microbatches"])
    )
    module = load_program(
        emit(
            graph,
            strategy.plan_for(graph),
            workload="train",
            backend="jit",
            unroll=True,
            training=Training("adamw"),
        ),
        compute="bfloat16",
    )
    devices = parse_target(TARGET, DEVICES).compile_devices(DEVICES)
    mesh = jax.make_mesh(
        tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH), devices=devices
    )
    module.__dict__["at"] = lambda x, spec: x
    params, frozen, data = (
        {
            k: jax.ShapeDtypeStruct(row[0], module.COMPUTE if row[1] == "float" else row[1])
            for k, row in getattr(module, table).items()
        }
        for table in ("PARAMS", "FROZEN", "INPUTS")
    )
    state = jax.eval_shape(
        module.start_state,
        {k: jax.ShapeDtypeStruct(s.shape, jnp.float32) for k, s in params.items()},
    )

    def step(params: Any, state: Any, frozen: Any, data: Any, count: Any) -> Any:
        # One mention of the mesh, or the program is lowered for one device.
        free = {
            k: jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim))
            )
            for k, x in params.items()
        }
        return module.one_step(free, state, frozen, data, count)

    jax.config.update("jax_use_shardy_partitioner", False)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        params, state, frozen, data, jax.ShapeDtypeStruct((), "float32")
    )
    given = len(jax.tree.leaves((params, state, frozen, data))) + 1
    made = len(jax.tree.leaves((params, state))) + 1
    usual = compiler.get_compile_options

    def options(*args: Any, **named: Any) -> Any:
        out = usual(*args, **named)
        build = out.executable_build_options
        build.use_spmd_partitioning = build.use_auto_spmd_partitioning = True
        build.auto_spmd_partitioning_mesh_shape, build.auto_spmd_partitioning_mesh_ids = (
            list(MESH.values()),
            list(range(DEVICES)),
        )
        build.allow_spmd_sharding_propagation_to_parameters = [True] * given
        build.allow_spmd_sharding_propagation_to_output = [True] * made
        return out

    compiler.get_compile_options = options
    began = time.monotonic()
    done = lowered.compile()
    return {"seconds": time.monotonic() - began, **figures(done, MESH)}


def ours(source: str, batch: int, file: str, backend: str) -> dict[str, float]:
    """A plan's program compiled. Runs in a process of its own with the same libtpu."""
    from planner.emit.program import emit
    from planner.emit.writer import Training
    from planner.strategy.strategy import Strategy
    from planner.verify.ahead import compile_ahead
    from planner.verify.hlo.program import traffic
    from planner.verify.targets import parse_target
    from planner.workload.model import Model, Workload

    strategy = Strategy.load(file)
    graph = Model.open(source, Workload(batch=batch), DEVICES).graph(
        int(strategy.techniques["microbatches"])
    )
    plan = strategy.plan_for(graph)
    program = emit(
        graph, plan, workload="train", backend=backend, unroll=True, training=Training("adamw")
    )  # type: ignore[arg-type]
    began = time.monotonic()
    done = compile_ahead(program, "train", parse_target(TARGET, DEVICES), "bfloat16", DEVICES)
    found = traffic(done.text, plan.mesh, merge_ar_slice=True)
    sent = sum(float(cell["wire"]) for by in found.values() for cell in by.values())
    return {
        "seconds": time.monotonic() - began,
        "sent": sent,
        "arguments": done.argument_bytes,
        "peak": done.peak_bytes,
    }


def apart(libtpu: Path, call: str) -> dict[str, float]:
    """A function of this module in a process of its own: libtpu ends the process on some errors."""
    from planner.verify.targets import parse_target

    place = {
        **os.environ,
        **parse_target(TARGET, DEVICES).environment(),
        "TPU_LIBRARY_PATH": str(libtpu.resolve()),
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": FLAGS if call.startswith("auto") else "",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json; from benchmarks.xla_auto import *; print(json.dumps({call}))",
        ],
        cwd=ROOT,
        env=place,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{call} ended with code {done.returncode}:"
            f" {(done.stderr.strip().splitlines() or ['no output'])[-1][:300]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def planned(source: str, batch: int, file: Path, *more: str) -> float:
    """Wall seconds of a whole `plan` process."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "planner.cli",
        source,
        "--batch",
        str(batch),
        "--hardware",
        HARDWARE,
        "--force",
        "-o",
        str(file),
        "--quiet",
        "--no-cache",
        *more,
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and say which marks are kept."""
    parser = argparse.ArgumentParser(description="XLA's auto-sharding beside our plans.")
    parser.add_argument(
        "--libtpu", type=Path, metavar="FILE", help="libtpu.so of the wheel libtpu 0.0.40, unpacked"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    options = parser.parse_args(argv)
    if options.libtpu is None or not options.libtpu.exists():
        print(
            "left out: needs --libtpu with libtpu.so of the wheel libtpu 0.0.40, the newest that"
            " holds XLA's auto-sharding (see this module's first lines)"
        )
        return 0
    print(
        f"{'model':12s} {'program':28s} {'sent MB':>9s} {'arguments MB':>13s} {'peak MB':>9s}"
        f" {'seconds':>9s}"
    )
    kept = True
    for name in options.models.split(","):
        source, batch = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "plan.json")
            theirs = apart(options.libtpu, f"auto({source!r}, {batch})")
            took = planned(source, batch, file)
            rows = {
                f"plan, {b}": apart(
                    options.libtpu, f"ours({source!r}, {batch}, {str(file)!r}, {b!r})"
                )
                for b in ("jit", "shard_map")
            }
        choosing = theirs["seconds"] - rows["plan, jit"]["seconds"]
        for label, row, seconds in (
            ("XLA auto", theirs, choosing),
            *((k, r, took) for k, r in rows.items()),
        ):
            print(
                f"{name:12s} {label:28s} {row['sent'] / 1e6:9.1f} {row['arguments'] / 1e6:13.1f}"
                f" {row['peak'] / 1e6:9.1f} {seconds:9.1f}",
                flush=True,
            )
        best = min(rows.values(), key=lambda r: (r["peak"] > theirs["peak"], r["sent"]))
        held = best["sent"] <= theirs["sent"] and best["peak"] <= theirs["peak"]
        kept &= held
        said = " beside ".join(
            f"{r['sent'] / 1e6:.1f} MB at {r['peak'] / 1e6:.1f} MB" for r in (best, theirs)
        )
        print(
            f"{'kept  ' if held else 'MISSED'} {name}: {said}; choosing takes {choosing / took:.0f}"
            " times a whole `plan`"
        )
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
