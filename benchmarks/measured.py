"""Prices beside what a GPU took: programs are planned and written here, run where the GPU is
(`benchmarks.measured_run`, which needs no planner), and what came back is read here.

    python -m benchmarks.measured write FOLDER [--only WORD]
    python -m benchmarks.measured_run FOLDER RESULTS                     on the machine with the GPU
    python -m benchmarks.measured read FOLDER RESULTS [--parts]

Read prints, of every program: seconds of a step as priced, as the roofline of the kernels that the
GPU's compiler made, and as measured; the same by part with --parts, where each kernel's measured
time is that of jax's trace; and the peak as planned, as compiled and as the allocator saw it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import planner
from costmodels.hardware.units import show_bytes, show_time
from planner.commands.programs import write_program
from planner.pins.pins import parse_pins
from planner.serving import serve as serving

HARDWARE = "h100-sxm"


@dataclass(frozen=True)
class Case:
    """A program for one device. kind: train, infer, decode (a serving program's generation) or
    check (numbers beside the host's). serve: prompt, tokens to generate, sequences."""

    model: str
    batch: int = 0
    pins: str = ""
    kind: str = "train"
    precision: str = "bf16-mixed"
    serve: tuple[int, int, int] = (0, 0, 0)
    quantize: str = "none"

    @property
    def name(self) -> str:
        """A file's name."""
        text = "-".join(
            str(part)
            for part in (
                self.kind,
                self.model,
                f"b{self.batch or self.serve[2]}",
                self.pins,
                self.precision if self.precision != "bf16-mixed" else "",
                self.quantize if self.quantize != "none" else "",
            )
            if part
        )
        return re.sub(r"[^A-Za-z0-9.]+", "_", text)


def llama(layers: int, seq: int) -> str:
    """Llama-3 8B of so many layers."""
    return f"llama3-8b,layers={layers},seq={seq}"


SMALL = "llama-tiny,layers=2,hidden=1024,heads=8,kv_heads=2,ff=2816,vocab=4096,seq=1024"
CASES = (
    Case(llama(4, 8192), 1),
    Case("gpt2-small", 8),
    Case(SMALL, 2, kind="check"),
    Case(llama(2, 32768), 1),
    Case("gpt2-xl", 8),
    Case(llama(4, 8192), 1, "recompute=block"),
    Case("resnet50", 128),
    Case("mixtral-8x7b,layers=1,seq=4096", 2),
    Case("llama3-8b,cache=1", kind="decode", serve=(2048, 128, 64)),
    Case("bert-large", 32),
    Case(llama(2, 2048), 4),
    Case("vit-l16", 32),
    Case("llama3-8b,seq=8192", 1, kind="infer"),
    Case("deepseek-moe-16b,layers=2,seq=4096", 2),
    Case(llama(4, 8192), 1, precision="fp8"),
    Case(f"{SMALL},packed=1", 2, kind="check"),
    Case("t5-large", 8),
    Case("mamba2-130m", 8),
    Case("dit-xl-2", 16),
    Case("unet-sd15", 4),
    Case(llama(4, 4096), 8, "micro=4"),
    Case("gpt2-xl", 8, "offload=optimizer"),
    Case("gpt2-medium", 8),
    Case(llama(1, 131072), 1),
    Case("llama3-8b,cache=1", kind="decode", serve=(2048, 128, 64), quantize="int8"),
    Case("llama3-8b,cache=1", kind="decode", serve=(2048, 128, 1)),
    Case("bert-large", 32, kind="infer"),
    Case(f"{SMALL},cap=0.1", 2, kind="check"),
    Case("t5-tiny,layers=2,hidden=512,heads=8,head_dim=64,ff=1024", 2, kind="check"),
    Case("gpt-tiny,layers=2,hidden=768,heads=12,seq=1024,vocab=4096", 2, kind="check"),
)


def written(case: Case, folder: Path) -> dict[str, Any]:
    """The program and the plan's file in the folder; what the runner and the table need."""
    source, path = f"zoo:{case.model}", folder / f"{case.name}.py"
    if case.kind == "decode":
        prompt, generate, concurrency = case.serve
        made = serving.serve(
            source,
            prompt=prompt,
            generate=generate,
            concurrency=concurrency,
            devices=1,
            hardware=HARDWARE,
            quantize=case.quantize,
        )
        text = serving.program(made, source)
        assert not text.constants
        path.write_text(text.text)
        step = made.step
        priced_s = float(step.costs["step_time_s"]) * (generate - 1)
        made.step.save(folder / f"{case.name}.plan.json")
    else:
        step = planner.plan(
            source,
            devices=1,
            batch=case.batch,
            hardware=HARDWARE,
            workload="infer" if case.kind == "infer" else "train",
            pins=parse_pins(case.pins),
            precision=case.precision,
            baselines=not case.pins,
        )
        write_program(step, source, path, "shard_map", False, True, True)
        step.save(folder / f"{case.name}.plan.json")
        priced_s = float(step.costs["step_time_s"])
    return {
        "name": case.name,
        "kind": case.kind,
        "program": path.name,
        "priced_s": priced_s,
        "planned_bytes": int(step.costs["memory_per_device_bytes"]),
    }


def write(folder: Path, only: str) -> int:
    """Plan and write all programs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        if only in case.name:
            rows.append(written(case, folder))
            print(
                f"{case.name}: {show_time(rows[-1]['priced_s'])},"
                f" {show_bytes(rows[-1]['planned_bytes'])}",
                flush=True,
            )
            (folder / "cases.json").write_text(json.dumps(rows, indent=1))
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    if given.verb == "write":
        return write(given.folder, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
