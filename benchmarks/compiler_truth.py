"""Predicted against compiled, exactly: payload bytes by kind and mesh axes, dot FLOPs, argument
bytes, and for tensor parallelism the bytes counted by hand.

    python -m benchmarks.compiler_truth --devices 8 [--case SUBSTRING] [--quick] [--json]

Programs are shard_map, unrolled, float32 training steps of a zoo MLP, a zoo GPT block, Llama-tiny
from the zoo and, where ../shared exists, two Llama-tiny exports, on a mesh of two axes: data
parallel, Megatron (Shoeybi et al. 2019), sequence parallel (Korthikanti et al. 2022), attention on
a ring over one axis and over both, positions turned into heads for attention ("ulysses"), and
random splits, each with ZeRO stages 0-3, microbatches and recomputation. Where `hand_counts`
counts the bytes by hand, prediction and compiler must both equal them, with nothing beside them.

Temporaries of level-3 programs, unrolled and scanned, must have room in two layers of full weights,
the gradients' pieces and the activations (and, scanned, the slice of its own pieces that a device
copies out of their stack). Beside each, the same program with its wrapping taken off, so that every
gathered weight is kept, is compiled too: it must not pass that test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import hand_counts
from benchmarks.hand_plans import (
    Mesh,
    data_parallel,
    megatron,
    mlp_megatron,
    positions,
    random_splits,
)
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.graph.repeats import find_runs, hoist
from planner.sharding.rule import Split
from planner.workload.loss import add_loss

if TYPE_CHECKING:
    from planner.emit.writer import Program

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "models"
BATCH = 16
MODELS: dict[str, str] = {
    "mlp": "zoo:mlp-tiny",
    "gpt-block": "zoo:gpt-tiny,layers=1",
    "gpt": "zoo:gpt-tiny",
    "llama-tiny": "zoo:llama-tiny,kv_heads=4",
    "llama-gqa": "zoo:llama-tiny",
}
EXPORTS = {
    "llama-legacy": "torch_llama_tiny_eager_legacy17.onnx",
    "llama-op23": "torch_llama_tiny_op23_static_dynamo.onnx",
}
SINGLE = ("mlp", "gpt-block")
"""Models without a repeated block: nothing to recompute."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "micro2": {"microbatches": 2},
    "zero2-micro2": {"zero_stage": 2, "microbatches": 2},
    "block": {"recompute": "block"},
    "block-keep": {"recompute": "block-keep"},
    "zero3-block": {"zero_stage": 3, "recompute": "block"},
    "zero3-keep-micro2": {"zero_stage": 3, "recompute": "block-keep", "microbatches": 2},
}
CORE = ("plain", "micro2", "zero3-block", "zero3-keep-micro2")
TWINS = ("llama-gqa", *EXPORTS)
"""Further spellings of Llama-tiny, with half as many key heads: the most telling techniques
only."""
COUNTED = {
    "gpt-block": replace(hand_counts.GPT, layers=1),
    "gpt": hand_counts.GPT,
    "llama-tiny": hand_counts.LLAMA,
    **dict.fromkeys(TWINS, replace(hand_counts.LLAMA, kv=32)),
}


@dataclass(frozen=True)
class Case:
    """One program: model, way of splitting ("data", "megatron", "sequence", "ring", "ring-both",
    "ulysses" or "random-SEED"), technique."""

    model: str
    split: str
    technique: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.split}/{self.technique}"


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases, or one of each kind."""
    if quick:
        yield from (
            Case("mlp", "megatron", "zero2-micro2"),
            Case("gpt-block", "megatron", "plain"),
            Case("gpt", "megatron", "block"),
        )
        yield from (
            Case("gpt-block", "data", "zero3"),
            Case("gpt-block", "sequence", "zero3-keep-micro2"),
        )
        yield Case("llama-gqa", "ring", "block-keep")
        return
    for model in (*MODELS, *(m for m, file in EXPORTS.items() if (SHARED / file).exists())):
        for split in (
            "data",
            "megatron",
            "sequence",
            "ring",
            "ring-both",
            "ulysses",
            "random-1",
            "random-2",
        ):
            if (model == "mlp" and split in ("sequence", "ring", "ring-both", "ulysses")) or (
                model in TWINS and split == "ulysses"
            ):
                continue
            for technique in (
                CORE
                if split in ("random-2", "ring-both", "ulysses") or model in TWINS
                else TECHNIQUES
            ):
                if model not in SINGLE or "block" not in technique:
                    yield Case(model, split, technique)


def mesh_of(case: Case, devices: int) -> Mesh:
    """Two by half the devices; Megatron with two key heads has two devices on the model axis."""
    model = 2 if case.split in ("megatron", "sequence") and case.model in TWINS else devices // 2
    return (("data", devices // model), ("model", model))


def graph_of(model: str) -> Graph:
    """The training graph of one microbatch."""
    if model in EXPORTS:
        from planner.reader import read

        return hoist(
            add_loss(
                read(
                    SHARED / EXPORTS[model],
                    batch=BATCH,
                    dims={"seq": 16} if "legacy" in model else {},
                )
            )
        )
    import models_zoo
    from planner.reader import read_model

    return hoist(add_loss(read_model(models_zoo.build(MODELS[model]), batch=BATCH)))


def plan_of(case: Case, graph: Graph, mesh: Mesh) -> Plan:
    """The plan of a case."""
    splits: Mapping[str, Split]
    if case.split == "data":
        splits = data_parallel(graph, mesh)
    elif case.split.startswith("random"):
        splits = random_splits(graph, mesh, int(case.split.partition("-")[2]))
    elif case.split.startswith("ring"):
        splits = (
            positions(graph, mesh, "ring")
            if case.split == "ring"
            else positions(graph, mesh, "ring", (), ("data", "model"))
        )
    elif case.split == "ulysses":
        splits = positions(graph, mesh, "g")
    elif case.model == "mlp":
        splits = mlp_megatron(graph, mesh)
    else:
        splits = megatron(graph, mesh, sequence=case.split == "sequence")
    axes = tuple(a for a, _ in mesh) if case.split == "data" else ("data",)
    return Plan(
        mesh, splits, zero_axes=axes, repeated_blocks=find_runs(graph), **TECHNIQUES[case.technique]
    )


def by_hand(case: Case, mesh: Mesh) -> hand_counts.Counts | None:
    """The bytes of a case as counted by hand; None where nobody counted: recomputation, sharded
    state, other splits."""
    sizes, micro = dict(mesh), TECHNIQUES[case.technique].get("microbatches", 1)
    if case.split not in ("megatron", "sequence") or case.technique not in ("plain", "micro2"):
        return None
    if case.model == "mlp":
        return hand_counts.perceptron(hand_counts.MLP, BATCH, sizes["data"], sizes["model"], micro)
    return hand_counts.transformer(
        COUNTED[case.model],
        BATCH,
        sizes["data"],
        sizes["model"],
        micro,
        sequence=case.split == "sequence",
    )


def check(case: Case, devices: int) -> dict[str, Any]:
    """Compile one case; what differs, what was counted by hand, and the figures."""
    from benchmarks.compiled_truth import truth

    start = time.perf_counter()
    graph, mesh = graph_of(case.model), mesh_of(case, devices)
    result = truth(graph, plan_of(case, graph, mesh))
    lines = list(result.differences())
    hand = by_hand(case, mesh)
    if hand is not None:
        for key in sorted({*hand, *result.compiled}):
            if hand.get(key, 0) != result.compiled.get(key, 0):
                lines.append(
                    f"{key[0]} over {key[1]}: by hand {hand.get(key, 0)} bytes, compiled"
                    f" {result.compiled.get(key, 0)}"
                )
    return {
        "case": case.name,
        "differences": lines,
        "payload": sum(result.compiled.values()),
        "flops": result.compiled_flops,
        "arguments": result.compiled_argument_bytes,
        "by_hand": hand is not None,
        "seconds": round(time.perf_counter() - start, 1),
    }


QUICK_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
)
"""Programs are read, not run: the machine code behind their HLO may be poor. Collectives and
products are the same, temporaries to 0.1 %."""
WIDE = (
    "zoo:gpt-tiny,layers=6,hidden=256,seq=8",
    "zoo:llama-tiny,layers=6,hidden=256,seq=8,ff=704",
    "zoo:mlp-tiny,layers=6,hidden=512",
)
"""Models whose weights are far larger than their activations, so that a gathered weight too many is
seen."""


def memory_cases(quick: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(model, technique, unrolled) for the temporaries of ZeRO stage 3."""
    for spec in WIDE[:1] if quick else WIDE:
        for technique in (
            ("zero3", "zero3-block") if quick else ("zero3", "zero3-block", "zero3-keep-micro2")
        ):
            for unroll in (True, False):
                yield spec, technique, unroll


def check_memory(spec: str, technique: str, unroll: bool, devices: int) -> dict[str, Any]:
    """Temporaries of a level-3 program over all devices against two layers of full weights, and of
    its twin that keeps every gathered weight."""
    import models_zoo
    from benchmarks.compiled_truth import room
    from planner.emit.program import emit
    from planner.reader import read_model
    from planner.verify.compiled import compile_step

    start = time.perf_counter()
    graph = hoist(add_loss(read_model(models_zoo.build(spec), batch=devices)))
    mesh = (("data", devices),)
    plan = Plan(
        mesh,
        data_parallel(graph, mesh),
        zero_axes=("data",),
        repeated_blocks=find_runs(graph),
        **TECHNIQUES[technique],
    )
    program = emit(graph, plan, workload="train", unroll=unroll)
    held, hoarded = (
        compile_step(p, "train").memory_analysis().temp_size_in_bytes
        for p in (program, hoarding(program))
    )
    space = room(graph, plan, unroll=unroll)
    whole = sum(4 * graph.tensors[w].elements for w in graph.weights) / space.layer
    layers, limit, planted = (
        round((size - space.gradients) / space.layer, 2)
        for size in (held, space.two_layers, hoarded)
    )
    lines = (
        []
        if held <= space.two_layers
        else [f"temporaries: {held} bytes, {space.two_layers} with two layers of full weights"]
    )
    if hoarded <= space.two_layers:
        lines.append(f"the program that keeps every gathered weight passes: {hoarded} bytes")
    return {
        "case": f"{spec}/{technique}/{'unrolled' if unroll else 'scanned'}",
        "differences": lines,
        "layers": layers,
        "limit_layers": limit,
        "hoarding_layers": planted,
        "model_layers": round(whole, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def hoarding(program: Program) -> Program:
    """The program with nothing gathered or computed again: blocks and parts are called as they
    are."""
    bare = re.sub(
        r"^( +recomputed\d+ = )[\w.]+\((block\d+).*\)$", r"\1\2", program.text, flags=re.M
    )
    bare = re.sub(r"\brecompute\((part\d+), no_gathers\)", r"\1", bare)
    return replace(program, text=bare)


def main(argv: list[str] | None = None) -> int:
    """Print a line per case; exit code 1 when any figure differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiler_truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--devices",
        type=int,
        choices=(4, 8),
        default=8,
        help="the mesh is data=2 by model=devices/2",
    )
    parser.add_argument(
        "--case", default="", help="only cases whose name contains this, such as gpt/megatron"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    flags = f"--xla_force_host_platform_device_count={args.devices} {QUICK_COMPILE}"
    if os.environ.get("XLA_FLAGS") != flags or os.environ.get("JAX_PLATFORMS") != "cpu":
        environment = os.environ | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "float32",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.compiler_truth",
            *(sys.argv[1:] if argv is None else argv),
        ]
        return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    failed = count = by_hand_count = 0
    for row in rows(args.case, args.quick, args.devices):
        failed, count, by_hand_count = (
            failed + bool(row["differences"]),
            count + 1,
            by_hand_count + row.get("by_hand", False),
        )
        print(json.dumps(row) if args.json else line_of(row), flush=True)
    if not args.json:
        print(
            f"{count - failed} of {count} programs as predicted, {by_hand_count} of them counted by"
            " hand"
        )
    return 1 if failed or not count else 0


def rows(name: str, quick: bool, devices: int) -> Iterator[dict[str, Any]]:
    """The results of all cases whose name contains `name`."""
    for case in cases(quick):
        if name in case.name:
            yield check(case, devices)
    for spec, technique, unroll in memory_cases(quick):
        if name in f"{spec}/{technique}":
            yield check_memory(spec, technique, unroll, devices)


def line_of(row: Mapping[str, Any]) -> str:
    """A result for reading; differences on lines of their own."""
    verdict = (
        "DIFFERS"
        if row["differences"]
        else (
            "exact, and by hand"
            if row.get("by_hand")
            else "exact"
            if "payload" in row
            else "has room"
        )
    )
    if "payload" in row:
        figures = (
            f"payload {row['payload']:>9,} B   dots {row['flops']:>11,} FLOPs   arguments"
            f" {row['arguments']:>9,} B"
        )
        text = f"{row['case']:36} {verdict:18} {figures}   {row['seconds']:>5} s"
    else:
        figures = (
            f"held {row['layers']:.2f} layers, limit {row['limit_layers']:.2f}, keeping all"
            f" {row['hoarding_layers']:.2f} (the model {row['model_layers']:.2f})"
        )
        text = f"{row['case']:75} {verdict:10} {figures}   {row['seconds']:>5} s"
    return "\n".join([text, *(f"    {line}" for line in row["differences"])])


if __name__ == "__main__":
    raise SystemExit(main())
