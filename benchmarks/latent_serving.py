"""Prices of serving DeepSeek-V3 with experts over all devices, beside published figures.

    python -m benchmarks.latent_serving

Each run is priced as the best plan of one mesh, `ep=M` with replicas of one device: in bf16 and in
fp8 as the emitted program runs, and in fp8 as SGLang serves (`--for sglang`). What was run had
products in FP8, rows that were sent once to each node from prompts (in FP8 on their way to the
experts), two microbatches of which one computes while the other communicates, and copies of the
busiest experts; copies are not priced. Experts are cut evenly or not at all here: runs on 144 and
72 devices are priced on 128 and 64. Exchanges alone are printed beside those that DeepEP's authors
measured on H800.

Sources: day_6_one_more_thing_deepseekV3R1_inference_system_overview.md of
github.com/deepseek-ai/open-infra-index (14.8k tokens a second and node of H800, 4,989 tokens of a
sequence in the mean; 73.7k of prompts, of which 56.3 % were found in a cache); the rest, and how
many sequences a device has, lmsys.org/blog/2025-05-05-large-scale-ep ("Overall Throughput"; at
github.com/lm-sys/lm-sys.github.io 2db4e4042b31f3c3c9f4f93068ae80946d25a115). DeepEP: docs/legacy.md of
github.com/deepseek-ai/DeepEP 0297fc801788b14b338a46554faca28d419e518a ("Low-latency kernels").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from costmodels.runtimes import load_runtime
from planner.search.build_request import make_request
from planner.serving.joint import Joint, Phase, Priced
from planner.serving.phases import PhaseModel
from planner.serving.result import Service
from planner.workload.open import open_model

SOURCE = "zoo:deepseek-v3,cache=1"
FEW_LAYERS = f"{SOURCE},layers=5"
"""Of which two have experts: exchanges of a layer are the same in all."""


@dataclass(frozen=True)
class Run:
    """A phase as it was run, and on how many devices it is priced. tokens: of a sequence in the
    cache, or of a prompt; each: sequences, or prompts passed at once, of a device; per_node_s:
    tokens a second and node of eight."""

    name: str
    phase: str
    devices: int
    tokens: int
    each: int
    per_node_s: float

    @property
    def generates(self) -> bool:
        """Whether tokens are generated."""
        return self.phase == "generation"


RUNS = (
    Run("DeepSeek's profile, 16 nodes", "generation", 128, 4096, 128, 18_598),
    Run("DeepSeek's service, 18 nodes", "generation", 128, 4989, 128, 14_800),
    Run("SGLang, 9 nodes", "generation", 64, 2000, 256, 22_282),
    Run("DeepSeek's profile, 4 nodes", "prompts", 32, 4096, 4, 62_713),
    Run("DeepSeek's service, 4 nodes", "prompts", 32, 4096, 4, 73_700 * (1 - 0.563)),
    Run("SGLang, 4 nodes", "prompts", 32, 4096, 4, 50_302),
)


WAYS = (("bf16-mixed", ""), ("fp8", ""), ("fp8", "sglang"))
"""(precision, engine; "" for the emitted program)"""
LOW_LATENCY = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369)}
"""Devices -> microseconds that 128 tokens of each, top 8, take to their experts in FP8 and back."""


def joint_of(run: Run, precision: str, engine: str, source: str) -> Joint:
    """The search of a run."""
    machine = {"hardware": "h100-sxm", "topology": None, "workload": "infer", "baselines": False}
    request = make_request(devices=run.devices, precision=precision, **machine)
    if engine:
        request = replace(request, runtime=load_runtime(engine))
    model = open_model(source, run.devices, workload="infer", dims=None)
    # Prompts leave their last token to a step; generation has the mean in the cache in each.
    quantize = "fp8" if precision == "fp8" else "none"
    tokens, rows = run.tokens - run.generates, run.each * run.devices
    service = Service(tokens, 1, rows, quantize, engine=engine)
    first, step = (PhaseModel.of(model, phase, service) for phase in ("prompts", "step"))
    tokens = 1 if run.generates else run.each * run.tokens
    return Joint(first, step, request, prefill_tokens=tokens)


@cache
def priced(run: Run, precision: str, engine: str, source: str = SOURCE) -> tuple[Priced, Phase]:
    """The best pair of the mesh, and the price of the run's phase."""
    joint = joint_of(run, precision, engine, source)
    found = [p for p in joint.candidates(run.devices, 1) if p.label.startswith("ep=")]
    best = min(found, key=lambda p: p.tpot_s if run.generates else p.ttft_s)
    plan = best.step if run.generates else best.prompts
    assert plan.best is not None
    return best, joint.phase(plan.base, plan.best)


def main() -> None:
    """Print both tables."""
    print(
        "| run | phase | tokens/s/node | priced as | tokens/s/node | of the run | a step or pass |"
        f" one batch | exchange | memory |\n|{'---|' * 10}"
    )
    for run in RUNS:
        for precision, engine in WAYS:
            alike = replace(run, name="", per_node_s=0.0)  # runs of the same sizes have one price
            pair, phase = priced(alike, precision, engine)
            seconds = pair.tpot_s if run.generates else pair.ttft_s
            tokens = 8 * run.each * (1 if run.generates else run.tokens)
            cells = (
                run.name,
                f"{run.phase}, {run.each} x {run.tokens:,} a device",
                f"{run.per_node_s:,.0f}",
                f"{precision}, {engine or 'emitted'}, {run.devices} devices",
                f"{tokens / seconds:,.0f}",
                f"{100 * tokens / seconds / run.per_node_s:.0f} %",
                f"{1e3 * seconds:,.0f} ms",
                f"{1e3 * phase.cost.step_time_s:,.0f} ms",
                f"{1e3 * phase.exchange_s:,.0f} ms",
                f"{pair.memory_bytes / 2**30:.1f} GiB",
            )
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n| devices | measured there and back | priced | of it |\n|{'---|' * 4}")
    for devices, (there, back) in LOW_LATENCY.items():
        run = Run("", "generation", devices, 4096, 128, 0.0)
        _, phase = priced(run, "fp8", "sglang", FEW_LAYERS)
        layers = sum(1 for node in phase.base.graph.nodes if node.op == "RoutedExperts")
        each = 1e6 * phase.exchange_s / layers
        share = f"{100 * each / (there + back):.0f} %"
        print(f"| {devices} | {there + back} us | {each:.0f} us | {share} |", flush=True)


if __name__ == "__main__":
    main()
