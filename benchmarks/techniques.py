"""Each way of spreading work alone, and combinations drawn at random: the emitted program against the unsharded one, its bytes against the compiler's.

    python -m benchmarks.techniques [--only WORD] [--drawn 30] [--seed 0]

Every row pins a technique on a small model, emits its training step for 8 virtual CPU devices, compiles it and runs it (`plan verify`, a process a row):
collective bytes by kind and axes, products and argument bytes must equal the prediction, loss, every gradient and the update the unsharded float32 program. Where a
technique promises less memory, the compiled program's (arguments, results and temporaries) is held against that of the row it is compared with.

Exit status 1 where a row fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planner
from planner.errors import PlanError
from planner.pins import Pins, parse_pins
from planner.verify.worker import verify

HARDWARE = str(Path(__file__).with_name("eager.toml"))
DEVICES = 8
BOUND = 1e-4
GPT, LLAMA, MIXTRAL, T5 = "zoo:gpt-tiny,layers=4,seq=32", "zoo:llama-tiny,layers=4", "zoo:mixtral-tiny", "zoo:t5-tiny"
DEEP = "zoo:gpt-tiny,layers=8,seq=32"
RESNET, UNET = "zoo:resnet-tiny", "zoo:unet-tiny"


@dataclass(frozen=True)
class Row:
    """A technique on a model. less: the row whose memory is to be above this one's. nodes: pins of operators by glob."""

    what: str
    source: str
    pins: str
    less: str = ""
    batch: int = 16
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


ALONE = (
    Row("data parallel", GPT, "dp=8,zero=0,micro=1"),
    Row("data parallel, images", RESNET, "dp=8,zero=0,micro=1"),
    Row("operator-level, simple", GPT, "tp=8,micro=1", less="data parallel"),
    Row("operator-level, two axes", LLAMA, "dp=2,tp=4,micro=1"),
    Row("operator-level, higher order", GPT, "dp=2,model=2,model2=2,micro=1"),
    Row("sequence parallel", GPT, "sequence=2,dp=4,micro=1"),
    Row("attention on a ring", GPT, "sequence=8,micro=1", nodes={"*Attention": {"split": {"ring": ["sequence"]}}}),
    Row("experts on devices, tokens routed", MIXTRAL, "expert=2,dp=4,micro=1", nodes={"*experts*": {"split": {"expert-b": ["expert"]}}}),
    Row("rows of images", UNET, "sequence=2,dp=4,micro=1", batch=4),
    Row("optimizer parallel, level 1", GPT, "dp=8,zero=1,micro=1", less="data parallel"),
    Row("optimizer parallel, level 2", GPT, "dp=8,zero=2,micro=2", less="data parallel"),
    Row("optimizer parallel, level 3", GPT, "dp=8,zero=3,micro=1", less="data parallel"),
    Row("optimizer parallel, level 1 in groups", GPT, "dp=8,zero=1,zero_group=4,micro=1", less="data parallel"),
    Row("optimizer parallel, level 3 in groups", GPT, "dp=8,zero=3,zero_group=4,micro=1", less="data parallel"),
    Row("gradient accumulation", GPT, "dp=4,tp=2,micro=2"),
    Row("recompute a block", GPT, "dp=8,zero=0,micro=1,recompute=block", less="data parallel"),
    Row("recompute, collectives kept", LLAMA, "dp=2,tp=4,micro=1,recompute=block-keep", less="operator-level, two axes"),
    Row("pipeline, GPipe", GPT, "pp=4,dp=2,micro=8,schedule=gpipe,zero=0"),
    Row("pipeline, 1F1B", GPT, "pp=4,dp=2,micro=8,zero=0,schedule=1f1b", less="pipeline, GPipe"),
    Row("pipeline, interleaved", DEEP, "pp=4,dp=2,micro=8,zero=0,virtual=2"),
    Row("pipeline, interleaved, four chunks", DEEP, "pp=2,tp=2,dp=2,micro=4,zero=2,recompute=block,virtual=4"),
    Row("pipeline, uneven stages", "zoo:gpt-tiny,layers=5", "pp=4,dp=2,micro=4"),
    Row("pipeline, encoder and decoder", T5, "pp=2,dp=4,micro=4,schedule=1f1b"),
    Row("pipeline, encoder and decoder, interleaved", "zoo:t5-tiny,layers=4", "pp=2,tp=2,dp=2,micro=4,virtual=2"),
)
MODELS = (GPT, LLAMA, MIXTRAL, T5, "zoo:gpt-tiny,layers=5", RESNET, UNET)
NOT_BUILT = ("multi-copy", "host offload of parameters, state and activations", "parameter server", "disk for optimizer state")


def drawn(count: int, seed: int) -> Iterator[Row]:
    """Combinations of stages, tensor, data and optimizer parallelism, microbatches and recomputation on 8 devices."""
    rng = random.Random(seed)
    for k in range(count):
        source = rng.choice(MODELS)
        stages = rng.choice((1, 2, 4)) if source not in (RESNET, UNET) else 1
        stages = min(stages, 2) if source in (MIXTRAL, T5) else stages
        tensor = rng.choice([t for t in (1, 2, 4, 8) if stages * t <= DEVICES])
        data, live = DEVICES // stages // tensor, source == RESNET
        micro = 1 if live else rng.choice((2, 4) if stages > 1 else (1, 2))
        micro = max(micro, stages) if stages > 1 else micro
        level = rng.choice((0, 1, 2) if stages > 1 else (0, 1, 2, 3))
        recompute = rng.choice(("none", "block", "block-keep")) if source not in (RESNET, UNET) else "none"
        parts = [f"{a}={n}" for a, n in (("pp", stages), ("dp", data), ("tp", tensor)) if n > 1]
        yield Row(f"drawn {k + 1}", source, ",".join([*parts, f"micro={micro}", f"zero={level}", f"recompute={recompute}"]), batch=32)


@dataclass(frozen=True)
class Outcome:
    """What became of a row: errors against the unsharded program, whether all judged figures are exact, bytes of the compiled program."""

    error: float
    gradients: float
    differs: tuple[str, ...]
    peak_bytes: int
    plan: str
    apart: float = 0.0
    """The largest difference of a figure that differs, as a part of it."""
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Equal numbers and exact figures."""
        return not self.refused and not self.differs and max(self.error, self.gradients) <= BOUND


def run(row: Row) -> Outcome:
    """Plan under the row's pins, verify the program."""
    pins = parse_pins(row.pins)
    if row.nodes:
        pins = Pins(pins.mesh, pins.techniques, pins.forbidden_factors, row.nodes)
    try:
        strategy = planner.plan(row.source, devices=DEVICES, batch=row.batch, pins=pins, baselines=False, hardware=HARDWARE, precision="fp32")
        report = verify(strategy, row.source)
    except PlanError as e:
        return Outcome(0.0, 0.0, (), 0, "", refused=str(e).splitlines()[0])
    mesh = " x ".join(f"{a}={n}" for a, n in strategy.mesh_shape)
    figures = {f.what: f for f in report.figures}
    numbers = report.numbers
    error, gradients = (numbers.error, numbers.gradients or 0.0) if numbers is not None else (float("inf"), float("inf"))
    return Outcome(error, gradients, tuple(f.what for f in report.figures if not f.ok), figures["peak"].compiled, mesh,
                   max((f.distance / f.compiled for f in report.figures if not f.ok and f.compiled), default=0.0))  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the rows, print a line each, then what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--drawn", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    started, results = time.process_time(), dict[str, Outcome]()
    print(f"{'technique':36} {'model':28} {'loss':>8} {'gradients':>9}  {'bytes, FLOPs':16} {'memory':>9}  mesh; pins")
    failed = []
    for row in (*ALONE, *drawn(args.drawn, args.seed)):
        if args.only not in row.what:
            continue
        found = results[row.what] = run(row)
        more = results.get(row.less)
        kept = more is None or found.peak_bytes < more.peak_bytes
        promise = f"{found.peak_bytes / more.peak_bytes:.2f}x" if more is not None and more.peak_bytes else ""
        exact = "exact" if not found.differs else f"{len(found.differs)} differ {found.apart:.2%}"
        line = found.refused or f"{found.error:8.1e} {found.gradients:9.1e}  {exact:16} {promise:>9}  {found.plan}; {row.pins}"
        print(f"{row.what:36} {row.source.removeprefix('zoo:'):28} {line}", flush=True)
        if not (found.ok and kept):
            failed.append(f"{row.what}: {found.refused or ', '.join(found.differs) or 'numbers or memory'}")
    print(f"{len(results) - len(failed)} of {len(results)} rows hold; {time.process_time() - started:.0f} CPU s here beside the compilers'")
    print("not built: " + ", ".join(NOT_BUILT))
    print(*(f"FAILED {f}" for f in failed), sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
