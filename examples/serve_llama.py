"""A small Llama answers prompts of several lengths, on eight virtual devices: both phases of
serving are planned at once, and one program runs them.

    python examples/serve_llama.py --generate 8

The weights are seeded, so what it says means nothing; that it is what the model says is what tests
hold it to. The folder `-o` gets the strategy, the program, the prompts and the tokens. For a model
of your own: docs/serving.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from planner.cli import main as plan

MODEL, PROMPT, CONCURRENCY, DEVICES, PAD = "zoo:llama-tiny,cache=1", 12, 16, 8, 0


def main() -> int:
    """Returns the serving program's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generate", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--objective", default="throughput", help="throughput, ttft or tpot")
    parser.add_argument("-o", dest="folder", type=Path, default=Path("llama-example"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    saved, program, prompts, tokens = (
        args.folder / name for name in ("llama.plan.json", "serve.py", "prompts.npy", "tokens.npy")
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 256, (CONCURRENCY, PROMPT))
    for row, length in zip(ids, rng.integers(3, PROMPT + 1, CONCURRENCY), strict=True):
        row[: PROMPT - length] = PAD  # shorter prompts are padded on the left
    np.save(prompts, ids)
    sizes = [
        "--prompt",
        str(PROMPT),
        "--generate",
        str(args.generate),
        "--concurrency",
        str(CONCURRENCY),
        "--devices",
        str(DEVICES),
    ]
    ended = plan(
        [
            MODEL,
            "--workload",
            "infer",
            *sizes,
            "--hardware",
            "cpu",
            "--precision",
            "fp32",
            "--objective",
            args.objective,
            "-o",
            str(saved),
        ]
    )
    ended = ended or plan(["emit", str(saved), "-o", str(program), "--force"])
    if ended:
        return ended
    command = [
        sys.executable,
        str(program),
        "--virtual-devices",
        str(DEVICES),
        "--float32",
        "--prompts",
        str(prompts),
        "--pad",
        str(PAD),
        "--output",
        str(tokens),
    ]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
