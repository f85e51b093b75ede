"""A small ResNet learns where an image is bright, on eight virtual devices: its ONNX file is
planned with half of the memory, emitted and trained.

    python examples/train_resnet.py --steps 30

Ten classes, ten places in which a noisy image has a bright square. The folder `-o` gets the model,
the strategy, its page (open resnet.html in a browser), the program and the data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx

import models_zoo
import planner
from planner.cli import main as plan

CLASSES, SIZE, BATCH, DEVICES = 10, 32, 64, 8


def write_data(folder: Path, samples: int) -> None:
    """Images [samples, 3, SIZE, SIZE] of noise with a bright square, and its place as label."""
    rng = np.random.default_rng(0)
    images, labels = (
        rng.normal(0, 0.3, (samples, 3, SIZE, SIZE)).astype(np.float32),
        rng.integers(0, CLASSES, samples),
    )
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "pixel_values.npy", images)
    np.save(folder / "labels.npy", labels.astype(np.int32))


def main() -> int:
    """Returns the training program's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("-o", dest="folder", type=Path, default=Path("resnet-example"))
    args = parser.parse_args()
    write_data(args.folder / "data", 1024)
    model = args.folder / "resnet.onnx"
    onnx.save(models_zoo.build(f"zoo:resnet-tiny,classes={CLASSES},training=1"), model)
    common = {
        "devices": DEVICES,
        "hardware": "cpu",
        "precision": "fp32",
        "batch": BATCH,
        "lr": 1e-2,
    }
    free = planner.plan(model, **common)
    strategy = planner.plan(
        model, **common, memory_limit_bytes=int(free.cost.memory_per_device_bytes * 0.5)
    )
    print(strategy)
    saved, program = args.folder / "resnet.plan.json", args.folder / "resnet.py"
    strategy.save(saved)
    plan(["show", str(saved), "--html", str(args.folder / "resnet.html")])
    program.write_text(planner.emit(strategy, model))
    command = [
        sys.executable,
        str(program),
        "--virtual-devices",
        str(DEVICES),
        "--steps",
        str(args.steps),
        "--data",
        str(args.folder / "data"),
    ]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
