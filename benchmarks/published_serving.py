"""Prices of serving beside published measurements of engines.

    python -m benchmarks.published_serving

Batches: sequences that begin together, as TensorRT-LLM 0.6.1 was measured on A100 in FP16 (output
tokens a second and GPU at batch, tokens in and out; milliseconds to the first token of one prompt,
of 0.5). Rows tp=N of plans, all in FP16 on a100-80gb, a pass over prompts of 8,192 tokens, where
that does not fit of 1,024. Queues: 80 requests that are there at once, as vLLM 0.6.0 with ten steps
at a time was measured on H100, each with its own prompt and output (ShareGPT), through the
simulation of continuous batching with the prices of the plan tp=N in BF16. Nothing was fitted to
any of them, and no engine runs the programs that are priced.

Sources: docs/source/performance.md of github.com/NVIDIA/TensorRT-LLM at
138f96d45f90b9667426f7c47297d8c06bafac73 (tables of A100; of its throughputs those with several GPUs
are taken a GPU, as its table of H100 says); results/prompt_80/ of
github.com/LambdaLabsML/vllm-benchmark at a4f9f4371a1ccac781293837fce2bce0cc6d25cc
(1xH100-80GB-SXM/Meta-Llama-3-8B-Instruct_tp1_len2048.json,
4xH100-80GB-SXM/Meta-Llama-3-70B-Instruct_tp4_len2048.json; requests without output count as one
token).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from planner.errors import PlanError
from planner.search.build_request import make_request
from planner.serving.arrivals import Requests
from planner.serving.continuous import Limits, Replica
from planner.serving.joint import Joint
from planner.serving.phases import PhaseModel, readings_of
from planner.serving.readings import PHASES
from planner.serving.result import Service
from planner.serving.serve import serve
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices, spans_of
from planner.workload.open import open_model

A100 = {"hardware": "a100-80gb", "precision": "fp16", "memory_reserve_bytes": 0}
THROUGHPUT = (
    ("llama2-7b", 1, 384, 128, 128, 5586),
    ("llama2-7b", 1, 60, 128, 2048, 1928),
    ("llama2-7b", 1, 52, 2048, 128, 591),
    ("llama2-7b", 2, 64, 2048, 2048, 782),
    ("llama2-70b", 4, 1280, 128, 128, 670),
    ("llama2-70b", 4, 240, 128, 2048, 525),
    ("llama2-70b", 4, 120, 2048, 128, 79),
)
"""(model, GPUs, batch, tokens in, tokens out, output tokens a second and GPU)"""
FIRST_TOKEN = (
    ("llama2-7b", 1, 128, 16),
    ("llama2-7b", 1, 2048, 133),
    ("llama2-70b", 4, 128, 47),
    ("llama2-70b", 4, 2048, 377),
)
"""(model, GPUs, tokens of the prompt, milliseconds)"""
PROMPTS = (
    "13 25 27 10 329 29 399 328 4 205 16 372 403 9 12 770 227 8 14 390 659 59 76 744 619 279 344 9"
    " 10 45 11 4 80 768 317 40 619 8 298 16 17 696 575 11 7 281 12 147 481 770 336 6 331 9 45 222"
    " 802 481 93 641 22 15 16 77 32 689 178 9 628 480 42 336 24 515 761 112 113 348 82 467"
)
OF_8B = (
    "120 447 233 194 101 741 9 3 6 31 392 84 396 45 291 9 173 277 334 37 587 345 36 135 26 45 450"
    " 118 226 4 5 146 59 11 567 192 478 130 13 223 188 16 35 276 202 492 239 129 26 79 17 204 11 207"
    " 78 340 17 9 123 6 559 5 316 26 417 206 151 42 25 18 159 0 25 267 19 12 768 67 628 11"
)
OF_70B = (
    "120 723 233 194 101 741 0 0 6 35 392 30 396 45 291 9 173 277 334 0 587 372 14 89 0 0 450 118"
    " 226 4 5 146 59 11 0 192 230 130 0 223 188 0 0 276 202 492 239 89 0 31 17 204 11 207 78 311 9 0"
    " 0 6 559 5 316 0 417 207 151 42 25 0 159 0 25 171 0 12 768 67 628 0"
)


@dataclass(frozen=True)
class Queue:
    """Requests that are there at once. duration_s: until the last is done; tpot_s: the median."""

    model: str
    gpus: int
    outputs: str
    duration_s: float
    tpot_s: float


QUEUES = (
    Queue("llama3-8b", 1, OF_8B, 6.737, 9.942e-3),
    Queue("llama3-70b", 4, OF_70B, 16.141, 24.438e-3),
)


def batch(model: str, gpus: int, rows: int, tokens: int, out: int) -> dict[str, float]:
    """Figures of the row tp=N, a pass as long as fits."""
    for step in (8192, 1024):
        try:
            made = serve(
                f"zoo:{model},cache=1",
                prompt=tokens,
                generate=out,
                concurrency=rows,
                devices=gpus,
                prefill_tokens=step,
                **A100,
            )
        except PlanError:
            continue
        for row in made.rows:
            if row["label"] == f"tp={gpus}" and row["split"] == gpus and row["fits"]:
                return dict(row)
    return {}


def queue(q: Queue) -> tuple[float, float]:
    """(seconds until the last is done, median seconds a token)"""
    prompts, outputs = (np.array([int(n) for n in t.split()]) for t in (PROMPTS, q.outputs))
    requests = Requests(np.zeros(len(prompts)), prompts, np.maximum(outputs, 1))
    model = open_model(f"zoo:{q.model},cache=1", q.gpus, workload="infer", dims=None)
    service = Service(int(prompts.mean()), int(outputs.mean()), 64)
    longest = int((requests.prompt + requests.generate).max())
    spans = spans_of(longest, (service.prompt, service.generate))
    readings = readings_of(model, service, spans)
    phases = (PhaseModel.of(model, phase, service, readings) for phase in PHASES)
    joint = Joint(
        *phases,
        make_request(
            devices=q.gpus, hardware=None, topology=None, workload="infer", baselines=False
        ),
    )
    pair = next(p for p in joint.priced() if p.label == f"tp={q.gpus}" and p.split == q.gpus)
    prices = PlanPrices.of(Sizes(joint, longest, service.prompt), pair)
    course = Replica(requests, prices, Limits(256, 2048, 1 << 22)).run()
    several = requests.generate > 1
    generating_s = (course.finish_s - course.first_s)[several]
    each_s = generating_s / (requests.generate[several] - 1)
    return float(course.finish_s.max()), float(np.median(each_s))


def show(name: str, what: str, measured: float, priced: float, digits: int) -> float:
    """Print a row; how far off the price is, as a share."""
    error = priced / measured - 1
    cells = (
        name,
        what,
        f"{measured:,.{digits}f}",
        f"{priced:,.{digits}f}",
        f"{100 * error:+.1f} %",
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    return abs(error)


def main() -> None:
    """Print the table and the mean errors."""
    print("| run | figure | measured | priced | off |\n|---|---|---|---|---|")
    off: dict[str, list[float]] = {"throughput": [], "first token": [], "queue": []}
    for model, gpus, rows, tokens, out, measured in THROUGHPUT:
        name = f"{model}, {gpus} A100, {rows} x {tokens} + {out}"
        if not (row := batch(model, gpus, rows, tokens, out)):
            print(f"| {name} | tokens/s/GPU | {measured:,} | does not fit | |")
            continue
        priced = row["tokens_per_s_per_device"]
        off["throughput"].append(show(name, "tokens/s/GPU", measured, priced, 0))
    for model, gpus, tokens, measured in FIRST_TOKEN:
        row = batch(model, gpus, 1, tokens, 2)
        name = f"{model}, {gpus} A100, 1 x {tokens}"
        off["first token"].append(
            show(name, "ms to the first token", measured, row["ttft_s"] * 1e3, 0)
        )
    for q in QUEUES:
        name = f"{q.model}, {q.gpus} H100, 80 requests at once"
        done_s, tpot_s = queue(q)
        off["queue"].append(show(name, "s until the last", q.duration_s, done_s, 2))
        off["queue"].append(show(name, "ms a token, median", q.tpot_s * 1e3, tpot_s * 1e3, 1))
    print()
    for kind, errors in off.items():
        print(f"{kind}: {100 * statistics.fmean(errors):.1f} % off in the mean of {len(errors)}")


if __name__ == "__main__":
    main()
