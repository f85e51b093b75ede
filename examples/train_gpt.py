"""A small GPT learns to count, on eight virtual devices: plan, emit, train, resume.

    python examples/train_gpt.py --steps 60

Sequences are `start, start + stride, ...` modulo the vocabulary, so that the loss falls from ln 512
= 6.2 towards nearly nothing. The plan is the planner's own for a machine of eight CPU devices;
`--pin` overrides it (`--pin pp=2,dp=2,tp=2,micro=4`). Everything is in the folder `-o`: the
strategy, the program, the data, checkpoints and a log (a line of JSON a step: loss, learning rate,
norm of the gradients before they are clipped, tokens a second). Run again with more steps, or
another --pin, and training goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

import planner

VOCABULARY, LENGTH, BATCH, DEVICES = 512, 16, 64, 8
MODEL = f"zoo:gpt-tiny,vocab={VOCABULARY},seq={LENGTH}"


def write_data(folder: Path, samples: int) -> None:
    """Token ids [samples, LENGTH], and as labels each position's next token."""
    rng = np.random.default_rng(0)
    start, stride = rng.integers(0, VOCABULARY, (samples, 1)), rng.integers(1, 5, (samples, 1))
    ids = (start + stride * np.arange(LENGTH + 1)) % VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "input_ids.npy", ids[:, :-1])
    np.save(folder / "labels.npy", ids[:, 1:].astype(np.int32))


def main() -> int:
    """Returns the training program's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pin", default="", help="decisions to respect, such as dp=4,tp=2")
    parser.add_argument("-o", dest="folder", type=Path, default=Path("gpt-example"))
    args = parser.parse_args()
    write_data(args.folder / "data", 4096)
    strategy = planner.plan(
        MODEL,
        devices=DEVICES,
        hardware="cpu",
        precision="fp32",
        batch=BATCH,
        lr=3e-3,
        pins=args.pin or None,
    )
    strategy.save(args.folder / "gpt.plan.json")
    print(strategy)
    program = args.folder / "gpt.py"
    program.write_text(planner.emit(strategy, MODEL))
    command = [
        sys.executable,
        str(program),
        "--virtual-devices",
        str(DEVICES),
        "--steps",
        str(args.steps),
        "--data",
        str(args.folder / "data"),
        "--checkpoints",
        str(args.folder / "checkpoints"),
        "--save-every",
        "20",
        "--warmup",
        "5",
        "--clip",
        "1",
        "--log",
        str(args.folder / "log.jsonl"),
    ]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
