"""Prices of serving DeepSeek-V3 with experts over all devices, beside published figures.

    python -m benchmarks.latent_serving

Each run is priced as the plan of one mesh, `ep=M tp=1`, in bf16: every device has sequences of its
own and a part of all experts. What was run had products in FP8, rows that were sent once to each
node (in FP8 on their way to the experts), two microbatches of which one computes while the other
communicates, and copies of the busiest experts. None of this is priced, so the time without what
devices exchange is said, too. Experts are cut evenly or not at all here: runs on 144 and 72 devices
are priced on 128 and 64.

Sources: day_6_one_more_thing_deepseekV3R1_inference_system_overview.md of
github.com/deepseek-ai/open-infra-index (14.8k tokens a second and node of H800, 4,989 tokens of a
sequence in the mean; 73.7k of prompts, of which 56.3 % were found in a cache); the rest, and how
many sequences a device has, lmsys.org/blog/2025-05-05-large-scale-ep ("Overall Throughput"; at
github.com/lm-sys/lm-sys.github.io 2db4e4042b31f3c3c9f4f93068ae80946d25a115).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.search.build_request import make_request
from planner.search.request import SearchResult
from planner.serving.joint import Joint, Priced
from planner.serving.phases import PhaseModel
from planner.serving.result import Service
from planner.workload.open import open_model

SOURCE = "zoo:deepseek-v3,cache=1"


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


def priced(run: Run) -> tuple[Priced, SearchResult]:
    """The best pair of the mesh `ep=M tp=1`, and the plan of the run's phase."""
    request = make_request(
        devices=run.devices, hardware="h100-sxm", topology=None, workload="infer", baselines=False
    )
    model = open_model(SOURCE, run.devices, workload="infer", dims=None)
    # Prompts leave their last token to a step; generation has the mean in the cache in each.
    service = Service(run.tokens - run.generates, 1, run.each * run.devices)
    first, step = (PhaseModel.of(model, phase, service) for phase in ("prompts", "step"))
    tokens = 1 if run.generates else run.each * run.tokens
    joint = Joint(first, step, request, prefill_tokens=tokens)
    found = [p for p in joint.candidates(run.devices, 1) if p.label.startswith("ep=")]
    best = min(found, key=lambda p: p.tpot_s if run.generates else p.ttft_s)
    return best, best.step if run.generates else best.prompts


def main() -> None:
    """Print the table."""
    print(
        "| run | phase | tokens/s/node | priced on | tokens/s/node | of the run | a step or pass |"
        f" without exchange, of the run | memory |\n|{'---|' * 9}"
    )
    for run in RUNS:
        pair, plan = priced(run)
        assert plan.best is not None
        seconds = pair.tpot_s if run.generates else pair.ttft_s
        tokens = 8 * run.each * (1 if run.generates else run.tokens)
        alone = seconds - plan.best.cost.exposed_communication_time_s
        cells = (
            run.name,
            f"{run.phase}, {run.each} x {run.tokens:,} a device",
            f"{run.per_node_s:,.0f}",
            f"{run.devices} devices",
            f"{tokens / seconds:,.0f}",
            f"{100 * tokens / seconds / run.per_node_s:.0f} %",
            f"{1e3 * seconds:,.0f} ms",
            f"{100 * tokens / alone / run.per_node_s:.0f} %",
            f"{pair.memory_bytes / 2**30:.1f} GiB",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
