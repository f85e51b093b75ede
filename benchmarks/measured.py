"""Prices beside what a GPU took: programs are planned and written here, run where the GPU is
(`benchmarks.measured_run`, which needs no planner), and what came back is read here.

    python -m benchmarks.measured write FOLDER [--only WORD]
    python -m benchmarks.measured_run FOLDER RESULTS                     on the machine with the GPU
    python -m benchmarks.measured read FOLDER RESULTS -o RECORD.json
    python -m benchmarks.measured [RECORD.json] [--parts]

Read puts every kernel's measured time (jax's trace) to the part of the model that it serves, beside
the roofline of the kernels that the GPU's compiler made, and keeps the plan: RECORD. Without a verb
the record (default: that of one H100, in the repository) is priced as of today: of every program
the price, that roofline, and the time of a step among others that are not waited for one by one, as
a training loop runs them; the peak as planned today, as compiled, and as the allocator saw it; with
`--parts` the price of each part, too.
Kernels of libraries are put to products, attention or copies by their names: graphs of kernels do
not tell which instruction ran one, so that products and the head are one part here.
Exit status 1 where a price is off by more than 10 %, or a peak is more than 5 % above the planned.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import planner
from costmodels.hardware.device import load_device
from costmodels.hardware.units import show_bytes, show_time
from planner.commands.programs import write_program
from planner.pins.pins import parse_pins
from planner.pricing.breakdown import details
from planner.search.build_request import emitted_recipe
from planner.serving import serve as serving
from planner.strategy.strategy import Strategy
from planner.verify.clock import ATTENTION, COPIES, ELEMENTWISE, HEAD, OPTIMIZER, PRODUCTS
from planner.verify.hlo.kernels import kernels
from planner.verify.hlo.origins import Origins
from planner.verify.hlo.text import parse
from planner.verify.predicted import predict
from planner.verify.timing import Parts, kernel_s, pricer_of
from planner.verify.worker import recorded_model
from planner.whatif.reprice import Priced, machine_now, reprice

HARDWARE = "h100-sxm"
MARK, PEAK = 0.10, 0.05
RECORD = Path(__file__).parent / "records" / "h100.json"


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
    Case("llama2-13b,layers=4,seq=4096", 4),
    Case("mistral-7b,layers=4,seq=16384", 1),
    Case("llama3-70b,layers=1,seq=8192", 1),
    Case("deepseek-v2-lite,layers=3,seq=4096", 2),
    Case("mixtral-8x22b,layers=1,seq=4096", 1),
    Case("vit-h14", 32),
    Case("resnet152", 64),
    Case("bert-base", 64),
    Case("dit-xl-2", 32, kind="infer"),
    Case("gpt2-large", 8, "recompute=block"),
    Case("gpt2-medium", 16, "recompute=none"),
    Case("gpt2-medium", 16, "recompute=none,micro=4"),
    Case("gpt2-medium", 16, "recompute=block"),
    Case("gpt2-medium", 16, "recompute=block,micro=4"),
    Case(llama(4, 4096), 2, precision="bf16-pure"),
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
        write_program(step, source, path, "shard_map", unroll=False, force=True, standalone=True)
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


LIBRARY = re.compile(r"nvjet|cutlass|cublas|gemm|xmma|sm90_|sm80_|conv(?!ert)|fprop|dgrad|wgrad")
FLASH = re.compile(r"sdpa|flash|cudnn::fusion")
MOVES = re.compile(r"memcpy|memset", re.IGNORECASE)
UNREAD = ("details", "baselines", "tensors")
"""Of a plan's file, what a price of it does not read."""
MULTIPLIED = f"{PRODUCTS}, {HEAD}"
"""Products and the head: one part."""


def by_part(of: Mapping[str, str], kernels: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Part -> measured seconds of a step. of: instruction -> part; kernels: as the runner wrote
    them."""
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): part for name, part in of.items()}
    seconds: dict[str, float] = {}
    for key, (each, _) in kernels.items():
        instruction, kernel = key.split("|", 1)
        part = of.get(kernel) or named.get(kernel) or of.get(instruction)
        if part is None and FLASH.search(kernel):
            part = ATTENTION
        elif part is None and LIBRARY.search(kernel):
            part = PRODUCTS
        elif part is None and MOVES.search(kernel):
            part = COPIES
        part = together(part or ELEMENTWISE)
        seconds[part] = seconds.get(part, 0.0) + each
    return seconds


def together(part: str) -> str:
    """The part that stands in the table for it."""
    return MULTIPLIED if part in (PRODUCTS, HEAD) else part


def read(folder: Path, results: Path) -> list[dict[str, Any]]:
    """A row of every program that ran: its plan, what was measured of it, and the roofline of its
    kernels by part."""
    rows = []
    for case in CASES:
        path = results / f"{case.name}.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        keys = ("device", "jax", "loss", "gradients", "steps_s", "in_a_row_s", "busy_s")
        row = {"name": case.name, "model": case.model, "kind": case.kind} | {
            key: told[key] for key in keys if key in told
        }
        if case.kind == "check" and "gradients" in told:
            rows.append(row)
        if "kernels" not in told:
            continue
        sizes = told["compiler_bytes"]
        row["compiled_bytes"] = (
            sum(sizes[f"{key}_size_in_bytes"] for key in ("argument", "output", "temp"))
            - (sizes["alias_size_in_bytes"])
        )
        row["allocated_bytes"] = told["after_bytes"]["peak_bytes_in_use"]
        row["kernels"] = sum(n for _, n in told["kernels"].values())
        plan_file = folder / f"{case.name}.plan.json"
        strategy = Strategy.load(plan_file)
        row["plan"] = json.loads(plan_file.read_text()) | {key: {} for key in UNREAD}
        if case.kind == "decode":
            row["tokens"] = case.serve[1] - 1
        else:
            row["parts"] = parts_of(case, strategy, folder, results, told)
        rows.append(row)
    return rows


def parts_of(
    case: Case, strategy: Strategy, folder: Path, results: Path, told: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Part -> seconds by the roofline of its compiled kernels, and measured."""
    model = recorded_model(strategy, f"zoo:{case.model}")
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan, precision = strategy.plan_for(graph), str(strategy.workload["precision"])
    predicted = predict(
        graph,
        plan,
        workload=model.workload.kind,
        optimizer=model.workload.optimizer,
        compute=emitted_recipe(precision).between,
        precision=precision,
    )
    text = gzip.decompress((results / f"{case.name}.hlo.gz").read_bytes()).decode()
    source, file = (folder / f"{case.name}.py").read_text(), f"{case.name}.py"
    parts, origins = Parts(graph, predicted.runs), Origins.of(text, source, file)
    pricer = pricer_of(strategy)
    device = pricer.sustained(load_device(pricer.topology.device.name))
    of, roofline = dict[str, str](), dict[str, float]()
    for site in kernels(parse(text)):
        if site.heaviest:
            part = parts.of(site.selected, origins)
            of[site.selected.instruction.name] = part
            seconds = site.count * kernel_s(site.selected, device)
            roofline[together(part)] = roofline.get(together(part), 0.0) + seconds
    measured = by_part(of, told["kernels"])
    return {
        part: {"roofline_s": roofline.get(part, 0.0), "measured_s": measured.get(part, 0.0)}
        for part in dict.fromkeys((*roofline, *measured))
    }


def priced(row: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds of a step and bytes of the peak, of the plan of a row as it is priced today."""
    if row["kind"] == "decode":
        strategy = Strategy.from_dict(row["plan"], row["name"])
        step_s = float(strategy.costs["step_time_s"])
        return step_s * row["tokens"], int(strategy.costs["memory_per_device_bytes"])
    now = priced_now(row)
    return now.cost.step_time_s, int(now.cost.memory.total)


def priced_now(row: Mapping[str, Any]) -> Priced:
    """The plan of a row as it is priced today."""
    strategy = Strategy.from_dict(row["plan"], row["name"])
    model = recorded_model(strategy, f"zoo:{row['model']}")
    return reprice(strategy, model, machine_now(strategy)[0])


def priced_by_part(now: Priced) -> dict[str, float]:
    """Part -> seconds of a step as priced."""
    of = Parts(now.base.graph, now.runs).of_node
    seconds = {OPTIMIZER: now.cost.optimizer_time_s, COPIES: now.cost.loop_copy_time_s}
    for name, made in details(now.base, now.runs, now.flow, now.pricer).items():
        part = together(of[name])
        seconds[part] = seconds.get(part, 0.0) + made["kernels"]["step_s"]
    return seconds


HEADER = (
    "| program | priced | roofline of its kernels | measured | price / measured | waited for"
    " | peak planned | compiled | allocated |\n|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Mapping[str, Any]], parts: bool) -> int:
    """Print the record as it is priced today; the number of marks that are missed."""
    print(HEADER)
    off, missed = list[float](), 0
    for row in rows:
        if "steps_s" not in row:
            continue
        step_s, peak = priced(row)
        measured = row["in_a_row_s"]
        off.append(step_s / measured - 1)
        roofline = sum(p["roofline_s"] for p in row.get("parts", {}).values())
        above = max(row["compiled_bytes"], 0) / peak - 1
        missed += (abs(off[-1]) > MARK) + (above > PEAK)
        cells = [
            row["name"].replace("_", " "),
            show_time(step_s),
            show_time(roofline) if roofline else "-",
            show_time(measured),
            f"{step_s / measured:.2f}",
            show_time(median(row["steps_s"])),
            show_bytes(peak),
            f"{show_bytes(row['compiled_bytes'])} ({above:+.0%})",
            show_bytes(row["allocated_bytes"]),
        ]
        print(f"| {' | '.join(cells)} |")
    print(
        f"\n{len(off)} programs: price off by {mean(map(abs, off)):.1%} on average,"
        f" {median(map(abs, off)):.1%} in the median, {mean(off):+.1%} with its sign;"
        f" {sum(abs(x) <= MARK for x in off)} within {MARK:.0%}"
    )
    for row in rows:
        if "note" in row:
            print(f"{row['name'].replace('_', ' ')}: {row['note']}")
        if "gradients" in row:
            mine, whole = row["loss"]
            print(
                f"{row['name']}: loss {mine:.5f}, of float32 on the host {whole:.5f}; gradients"
                f" apart by {max(row['gradients'].values()):.1%} at most"
            )
    for row in rows if parts else ():
        if "parts" in row:
            print(f"\n{row['name']}, {row['kernels']:,.0f} kernels")
            ours = priced_by_part(priced_now(row))
            for part, each in row["parts"].items():
                print(
                    f"  {part:24}{1e3 * ours.get(part, 0.0):9.2f} ms priced"
                    f"{1e3 * each['roofline_s']:9.2f} ms roofline"
                    f"{1e3 * each['measured_s']:9.2f} ms measured"
                )
    return missed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="write FOLDER, read FOLDER RESULTS, or RECORD")
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    verb, *paths = given.what or [str(RECORD)]
    if verb == "write":
        return write(Path(paths[0]), given.only)
    if verb == "read":
        rows = [row for results in paths[1:] for row in read(Path(paths[0]), Path(results))]
        given.output.write_text(json.dumps(rows, indent=None) + "\n")
        return 0
    return int(table(json.loads(Path(verb).read_text()), given.parts) > 0)


if __name__ == "__main__":
    sys.exit(main())
