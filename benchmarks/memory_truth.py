"""Predicted peak memory, part by part, beside what the compiler says of the emitted training step.

    python -m benchmarks.memory_truth --devices 8 [--target cpu|gpu:h100] [--case SUBSTRING]
    [--quick] [--json]

compiled = arguments + outputs - aliased + temporaries, bytes of one device, of the default
(scanned) shard_map program; nothing is allocated or run. The prediction is that of
planner.pricing.peak_memory without the allowance for fragmentation, which the compiler's figure
does not have either. Plans are written by hand (benchmarks.hand_plans): data parallel over all
devices, and Megatron on 2 x devices/2. Compiling happens in a process of its own, for virtual CPU
devices or (jax's CUDA plugin installed, no GPU needed) for a GPU; what differs between them is said
in docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.hand_plans import data_parallel, megatron
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.verify.targets import Target, parse_target, require
from planner.workload.loss import add_loss

ROOT = Path(__file__).parents[1]
GPT = "zoo:gpt2-small,layers=4,seq="
LLAMA = "zoo:llama-tiny,layers=4,hidden=512,heads=8,kv_heads=4,ff=1408,vocab=32000,seq="
LARGE = 100 * 2**20
"""Programs below this are not judged: what the compiler keeps for itself is a large part of
them."""


@dataclass(frozen=True)
class Case:
    """One program. rows: batch of one microbatch on one device under data parallelism."""

    model: str
    zero_stage: int = 0
    microbatches: int = 1
    recompute: str = "none"
    precision: str = "fp32"
    split: str = "data"
    rows: int = 1

    @property
    def name(self) -> str:
        """As printed, and matched by --case."""
        return f"{self.model.removeprefix('zoo:')}/{self.split}/zero{self.zero_stage}/micro{self.microbatches}/{self.recompute}/{self.precision}/rows{self.rows}"


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases, or a few."""
    if quick:
        yield from (
            Case(f"{GPT}256", rows=4),
            Case(f"{GPT}256", 2, 2, "block", rows=4),
            Case(f"{GPT}1024", 3, recompute="block-keep"),
        )
        return
    for zero in (0, 1, 2, 3):
        for micro in (1, 2):
            yield Case(f"{GPT}256", zero, micro, rows=4)
    for recompute in ("none", "block", "block-keep"):
        yield Case(f"{GPT}1024", 1, 1, recompute, rows=2)
        yield Case(f"{GPT}1024", 1, 1, recompute, "bf16-mixed", rows=2)
        yield Case(f"{GPT}256", 2, 2, recompute, split="megatron", rows=4)
        yield Case(f"{LLAMA}512", 2, 2, recompute, rows=4)
    yield Case(f"{GPT}1024", 3, 2, "block", rows=2)
    yield Case(f"{LLAMA}2048", 1, 1, "none", rows=1)
    yield Case(f"{LLAMA}2048", 3, 1, "block", rows=1)
    yield Case(f"{LLAMA}512", 1, 1, "none", "bf16-mixed", rows=4)
    for recompute in ("none", "block"):
        yield Case("zoo:bert-base,layers=4,seq=384", 1, 1, recompute, rows=4)
    yield Case("zoo:vit-b16,layers=4", 1, 1, "none", rows=8)
    yield Case("zoo:vit-b16,layers=4", 1, 1, "block", rows=8)
    yield Case("zoo:resnet18", 1, 1, "none", rows=4)
    yield Case("zoo:mlp,hidden=2048", 0, 2, "none", rows=64)


def graph_of(case: Case, devices: int) -> Graph:
    """The training graph of one microbatch."""
    import models_zoo
    from planner.graph.repeats import hoist
    from planner.reader import read_model

    rows = devices if case.split == "data" else 2
    return hoist(add_loss(read_model(models_zoo.build(case.model), batch=case.rows * rows)))


def check(case: Case, devices: int, target: Target) -> dict[str, Any]:
    """Price and compile one case."""
    from costmodels.precision import load_recipe
    from costmodels.runtimes import load_runtime
    from planner.analysis.facts import GraphFacts
    from planner.emit.program import emit
    from planner.machine.mesh_choices import pinned_mesh
    from planner.machine.topology import for_devices
    from planner.pricing.plan_price import price_plan
    from planner.pricing.pricer import Pricer
    from planner.verify.ahead import compile_ahead

    start = time.perf_counter()
    graph = graph_of(case, devices)
    base = GraphFacts.of(graph, training=True)
    shape = {"data": devices} if case.split == "data" else {"data": 2, "model": devices // 2}
    topology = for_devices("h100-sxm", devices)
    mesh = pinned_mesh(topology, shape)
    splits = (
        data_parallel(graph, mesh.shape) if case.split == "data" else megatron(graph, mesh.shape)
    )
    plan = Plan(
        mesh.shape,
        splits,
        zero_stage=case.zero_stage,
        zero_axes=("data",),
        recompute=case.recompute,
        microbatches=case.microbatches,
        repeated_blocks=base.runs,
    )
    pricer = Pricer(
        topology,
        mesh,
        replace(load_runtime("jax-shard_map"), memory_slack=0.0),
        load_recipe(case.precision),
    )
    predicted = price_plan(base, plan, pricer)[0].memory
    program = emit(
        graph,
        plan,
        workload="train",
        compute="bfloat16" if case.precision == "bf16-mixed" else "float32",
    )
    compiled = compile_ahead(
        program, "train", target, "float32" if case.precision == "fp32" else "bfloat16", devices
    )
    return {
        "case": case.name,
        "predicted": predicted.total,
        **asdict(predicted),
        "compiled": compiled.peak_bytes,
        "arguments": compiled.argument_bytes,
        "temporaries": compiled.temporary_bytes,
        "ratio": round(predicted.total / compiled.peak_bytes, 3),
        "seconds": round(time.perf_counter() - start, 1),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean, least and largest ratio of the programs large enough to be judged."""
    ratios = [r["predicted"] / r["compiled"] for r in rows if r["compiled"] >= LARGE]
    if not ratios:
        return f"no program of {LARGE / 2**20:g} MiB or more a device"
    within = sum(abs(r - 1) <= 0.1 for r in ratios)
    return (
        f"{len(ratios)} programs of {LARGE / 2**20:g} MiB or more a device: predicted / compiled"
        f" mean {statistics.mean(ratios):.3f}, least {min(ratios):.3f}, largest {max(ratios):.3f};"
        f" {within} within 10 %, {sum(r < 0.95 for r in ratios)} more than 5 % below the compiled"
        " figure"
    )


def main(argv: list[str] | None = None) -> int:
    """Print a line per case and the summary; exit code 1 when a prediction is more than 5 % below
    the compiled figure, or nothing was judged."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=8, help="4 or more, a multiple of 2")
    parser.add_argument(
        "--target", default="cpu", help="cpu, or gpu:NAME: the GPU compiler, without a GPU"
    )
    parser.add_argument(
        "--case",
        default="",
        help="only cases whose name contains this, such as gpt2-small,layers=4,seq=256/data/zero2",
    )
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    target = parse_target(args.target, args.devices)
    require(target)
    flags = f"--xla_force_host_platform_device_count={args.devices}"
    if flags not in os.environ.get("XLA_FLAGS", "") or os.environ.get("JAX_PLATFORMS") != "cpu":
        environment = os.environ | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **target.environment(),
        }
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.memory_truth",
                *(sys.argv[1:] if argv is None else argv),
            ],
            env=environment,
            cwd=ROOT,
            check=False,
        ).returncode
    rows = []
    for case in cases(args.quick):
        if args.case not in case.name:
            continue
        row = check(case, args.devices, target)
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        parts = "  ".join(
            f"{k[:4]} {row[k] / 2**20:>7.1f}"
            for k in ("parameters", "gradients", "optimizer", "activations", "temporary")
        )
        print(
            f"{row['case']:100} predicted {row['predicted'] / 2**20:>7.1f} ({parts})  compiled"
            f" {row['compiled'] / 2**20:>7.1f} (arguments {row['arguments'] / 2**20:>7.1f} "
            f" temporaries {row['temporaries'] / 2**20:>7.1f}) MiB  ratio {row['ratio']:.3f}",
            flush=True,
        )
    if not args.json:
        print(summary(rows))
    return int(
        not any(r["compiled"] >= LARGE for r in rows)
        or any(r["compiled"] >= LARGE and r["predicted"] < 0.95 * r["compiled"] for r in rows)
    )


if __name__ == "__main__":
    raise SystemExit(main())
