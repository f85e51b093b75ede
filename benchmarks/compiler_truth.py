"""Predicted against compiled, exactly: payload bytes by kind and mesh axes, dot FLOPs, argument bytes, and for tensor parallelism the bytes
counted by hand.

    python -m benchmarks.compiler_truth --devices 8 [--case SUBSTRING] [--quick] [--json]

Programs are shard_map, unrolled, float32 training steps of a zoo MLP, a zoo GPT block, Llama-tiny from the zoo and, where ../shared exists, two
Llama-tiny exports, on a 2 x 4 mesh: data parallel, Megatron (Shoeybi et al. 2019), sequence parallel (Korthikanti et al. 2022) and random
splits, each with optimizer levels 0-3, microbatches and recomputation. The temporaries of level 3 must hold at most two layers of full weights
beyond those of the same program without gathers. Compiling happens in a process of its own with virtual CPU devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hand_plans import Mesh, data_parallel, megatron, mlp_megatron, random_splits
from planner.blocks import find_runs, hoist
from planner.flow import Plan
from planner.graph import Graph
from planner.layout import group
from planner.rule import Split
from planner.training import add_loss

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "models"
BATCH = 16
MODELS: dict[str, str] = {
    "mlp": "zoo:mlp-tiny", "gpt-block": "zoo:gpt-tiny,layers=1", "gpt": "zoo:gpt-tiny", "llama-tiny": "zoo:llama-tiny,kv_heads=4",
    "llama-gqa": "zoo:llama-tiny",
}  # fmt: skip
EXPORTS = {"llama-legacy": "torch_llama_tiny_eager_legacy17.onnx", "llama-op23": "torch_llama_tiny_op23_static_dynamo.onnx"}
SINGLE = ("mlp", "gpt-block")
"""Models without a repeated block: nothing to recompute."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "micro2": {"microbatches": 2},
    "zero2-micro2": {"zero": 2, "microbatches": 2}, "block": {"recompute": "block"}, "block-keep": {"recompute": "block-keep"},
    "zero3-block": {"zero": 3, "recompute": "block"}, "zero3-keep-micro2": {"zero": 3, "recompute": "block-keep", "microbatches": 2},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program: model, way of splitting ("data", "megatron", "sequence" or "random-SEED"), technique."""

    model: str
    split: str
    technique: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.split}/{self.technique}"


def cases(quick: bool = False) -> Iterator[Case]:
    """All cases, or one of each kind."""
    if quick:
        yield from (Case("mlp", "megatron", "zero2-micro2"), Case("gpt-block", "megatron", "plain"), Case("gpt", "megatron", "block"))
        yield from (Case("gpt-block", "data", "zero3"), Case("gpt-block", "sequence", "zero3-keep-micro2"))
        return
    for model in (*MODELS, *(m for m, file in EXPORTS.items() if (SHARED / file).exists())):
        for split in ("data", "megatron", "sequence", "random-1", "random-2"):
            if split != "data" and not fits(model, split):
                continue
            for technique in TECHNIQUES if split != "random-2" else ("plain", "zero3-block", "zero3-keep-micro2"):
                if model not in SINGLE or "block" not in technique:
                    yield Case(model, split, technique)


def fits(model: str, split: str) -> bool:
    """Whether a hand-made split applies to a model: its node ids must be the zoo's, and its heads divide."""
    if split == "sequence":
        return model in ("gpt-block", "gpt", "llama-tiny")
    return split != "megatron" or model in ("mlp", "gpt-block", "gpt", "llama-tiny")


def graph_of(model: str) -> Graph:
    """The training graph of one microbatch."""
    if model in EXPORTS:
        from planner.reader import read

        return hoist(add_loss(read(SHARED / EXPORTS[model], batch=BATCH)))
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
    elif case.model == "mlp":
        splits = mlp_megatron(graph, mesh)
    else:
        splits = megatron(graph, mesh, sequence=case.split == "sequence")
    axes = tuple(a for a, _ in mesh) if case.split == "data" else ("data",)
    return Plan(mesh, splits, zero_axes=axes, runs=find_runs(graph), **TECHNIQUES[case.technique])


def by_hand(case: Case, graph: Graph, mesh: Mesh) -> dict[tuple[str, str], int] | None:
    """Megatron's bytes from the model's sizes alone, for plans without recomputation and sharded state; None for other cases.

    Per layer and microbatch two all-reduces of an activation forward and two backward; the same once forward for the vocabulary-parallel
    table and once backward for the head; three numbers a token for the loss. Sequence parallel: each all-reduce becomes a reduce-scatter and
    an all-gather. Every parameter's gradient is reduced once over data (a tied table too), and the loss once.
    """
    if case.model in EXPORTS or case.split not in ("megatron", "sequence") or case.technique not in ("plain", "micro2"):
        return None
    sizes = dict(mesh)
    micro = TECHNIQUES[case.technique].get("microbatches", 1)
    local = sum(4 * graph.tensors[w].elements // _cut(graph, w, sizes) for w in graph.weights)
    out = {("all-reduce", "data"): local + 4 * micro}
    if case.model == "mlp":
        first = graph.tensors[graph.nodes[0].inputs[1]]
        out["all-reduce", "model"] = micro * 4 * (BATCH // sizes["data"]) * first.shape[1]  # the second product forward, the third's operand backward
        products = [n for n in graph.nodes if n.op == "MatMul"]
        rows = [graph.tensors[n.outputs[0]].shape[1] for n in products[1::2]]
        operands = [graph.tensors[n.inputs[0]].shape[1] for n in products[2::2]]
        out["all-reduce", "model"] = micro * 4 * (BATCH // sizes["data"]) * (sum(rows) + sum(operands))
        return out
    layers = 1 if case.model == "gpt-block" else 2
    batch, seq, width = (graph.tensors[next(n for n in graph.nodes if n.op.endswith("Normalization")).inputs[0]].shape)
    rows_ = batch // sizes["data"] * seq
    activation, loss = 4 * rows_ * width, 3 * 4 * rows_
    if case.split == "megatron":
        out["all-reduce", "model"] = micro * ((4 * layers + 2) * activation + loss)
        return out
    return None


def _cut(graph: Graph, weight: str, sizes: Mapping[str, int]) -> int:
    """How many pieces Megatron cuts a weight of the zoo's models into: all matrices of products and tables, and biases of column-parallel ones."""
    shape = graph.tensors[weight].shape
    label = graph.labels[weight]
    readers = [graph.nodes[i] for i, _ in graph.consumers[weight]]
    if any(n.op == "MatMul" for n in readers):
        products = [n.id for n in graph.nodes if n.op == "MatMul"]
        mine = next(n.id for n in readers if n.op == "MatMul")
        if mine.startswith("/layers."):  # the MLP: alternately columns and rows
            return sizes["model"] if products.index(mine) % 2 < 2 else 1
        return sizes["model"]
    if any(n.op == "Gather" for n in readers):
        return sizes["model"] if "wpe" not in label else 1
    column = any(part in label for part in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "c_fc.bias"))
    if label.startswith("layers.") and len(shape) == 1:
        column = int(label.split(".")[1]) % 2 == 0
    return sizes["model"] if column else 1


def check(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Compile one case; what differs, what was counted by hand, and the figures."""
    from planner.verify.compiled import truth

    start = time.perf_counter()
    graph = graph_of(case.model)
    plan = plan_of(case, graph, mesh)
    result = truth(graph, plan)
    lines = list(result.differences())
    hand = by_hand(case, graph, mesh)
    for key, size in (hand or {}).items():
        if result.compiled.get(key, 0) != size:
            lines.append(f"{key[0]} over {key[1]}: by hand {size} bytes, compiled {result.compiled.get(key, 0)}")
    total = sum(result.compiled.values())
    return {"case": case.name, "differences": lines, "payload": total, "flops": result.compiled_flops, "arguments": result.compiled_argument_bytes,
            "temporaries": result.temporary_bytes, "by_hand": hand is not None, "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip


WIDE = ("zoo:gpt-tiny,layers=6,hidden=256,seq=8", "zoo:llama-tiny,layers=6,hidden=256,seq=8,ff=704", "zoo:mlp-tiny,layers=6,hidden=512")
"""Models whose weights are far larger than their activations, so that a gathered weight too many is seen."""


def memory_cases(quick: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(model, technique, unrolled) for the temporaries of optimizer level 3."""
    for spec in WIDE[:1] if quick else WIDE:
        for technique in ("zero3", "zero3-block") if quick else ("zero3", "zero3-block", "zero3-keep-micro2"):
            for unroll in (True, False):
                yield spec, technique, unroll


def check_memory(spec: str, technique: str, unroll: bool, devices: int) -> dict[str, Any]:
    """Temporaries of a level-3 program over all devices, against two layers of full weights."""
    import models_zoo
    from planner.emit.program import emit
    from planner.reader import read_model
    from planner.verify.compiled import compile_step, room

    start = time.perf_counter()
    graph = hoist(add_loss(read_model(models_zoo.build(spec), batch=devices)))
    mesh = (("data", devices),)
    plan = Plan(mesh, data_parallel(graph, mesh), zero_axes=("data",), runs=find_runs(graph), **TECHNIQUES[technique])
    held = compile_step(emit(graph, plan, workload="train", unroll=unroll), "train").memory_analysis().temp_size_in_bytes
    space = room(graph, plan)
    layers, limit = ((size - space.gradients) / space.layer for size in (held, space.two_layers))
    whole = sum(4 * graph.tensors[w].elements for w in graph.weights) / space.layer
    lines = [] if held <= space.two_layers else [f"temporaries: {held} bytes, {space.two_layers} with two layers of full weights"]
    return {"case": f"{spec}/{technique}/{'unrolled' if unroll else 'scanned'}", "differences": lines, "layers": round(layers, 2), "limit_layers": round(limit, 2),
            "model_layers": round(whole, 2),
            "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print a line per case; exit code 1 when any figure differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler_truth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="4 or more, a multiple of 2; the mesh is data=2 by model=devices/2")
    parser.add_argument("--case", default="", help="only cases whose name contains this, such as gpt/megatron")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    flags = f"--xla_force_host_platform_device_count={args.devices}"
    if os.environ.get("XLA_FLAGS") != flags or os.environ.get("JAX_PLATFORMS") != "cpu":
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "float32", "TF_CPP_MIN_LOG_LEVEL": "2"}
        return subprocess.run([sys.executable, "-m", "benchmarks.compiler_truth", *(sys.argv[1:] if argv is None else argv)], env=environment, cwd=ROOT, check=False).returncode
    mesh = (("data", 2), ("model", args.devices // 2))
    assert group(("data", "model"), dict(mesh)) == args.devices
    failed = count = 0
    for case in cases(args.quick):
        if args.case not in case.name:
            continue
        row = check(case, mesh)
        failed, count = failed + bool(row["differences"]), count + 1
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        exact = "exact" + (", by hand too" if row["by_hand"] else "") if not row["differences"] else "DIFFERS"
        print(f"{row['case']:38} {exact:20} payload {row['payload']:>9,} B  dots {row['flops']:>11,}  arguments {row['arguments']:>9,} B"
              f"  temporaries {row['temporaries']:>9,} B  {row['seconds']:>5} s", flush=True)  # fmt: skip
        for line in row["differences"]:
            print(f"    {line}", flush=True)
    for spec, technique, unroll in memory_cases(args.quick):
        if args.case not in f"{spec}/{technique}":
            continue
        row = check_memory(spec, technique, unroll, args.devices)
        failed, count = failed + bool(row["differences"]), count + 1
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print(f"{row['case']:84} weights and activations held: {row['layers']:.2f} layers (limit {row['limit_layers']:.2f},"
              f" the model has {row['model_layers']:.1f})  {row['seconds']:>5} s", flush=True)
        for line in row["differences"]:
            print(f"    {line}", flush=True)
    if not args.json:
        print(f"{count - failed} of {count} programs exact")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
