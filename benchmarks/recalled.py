"""What the cache of searches spares: python -m benchmarks.recalled [--quick] [--turns N].

Each row is a whole `plan` process, asked three times: without a cache, with one that does not know
it yet, and with one that does. A row that changes another finds what that one's search left: the
search itself where nothing differs that a plan follows from (names, a learning rate), else the
tables of moves that both have in common. Printed: user CPU seconds, the least of N by turns, and
what the command says of the cache. Exit status 1 when a strategy differs from the one without a
cache in anything but its provenance, or when the third process searched, or the first one of a
model that was but exported otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

import models_zoo
from benchmarks.otherwise import called_otherwise
from planner.cache.folder import OFF, VARIABLE

OTHERWISE = "otherwise:"
"""A model of the zoo with other names, written to a file (benchmarks.otherwise)."""
BASE = ("zoo:llama3-8b", 64, 512)
ROWS: tuple[tuple[str, str, int, int, tuple[str, ...]], ...] = (
    ("Llama-3 8B, 64 devices", *BASE, ()),
    ("  exported otherwise", f"{OTHERWISE}llama3-8b", *BASE[1:], ("--lr", "0.0002")),
    ("  one layer more", "zoo:llama3-8b,layers=33", *BASE[1:], ()),
    ("  FFN 14,336 to 16,384", "zoo:llama3-8b,ff=16384", *BASE[1:], ()),
    ("  vocabulary 128,000", "zoo:llama3-8b,vocab=128000", *BASE[1:], ()),
    ("  twice the batch", BASE[0], 64, 1024, ()),
    ("  70 GiB of memory", *BASE, ("--memory-limit", "70GiB")),
    ("  twice the devices", BASE[0], 128, 512, ()),
    ("GPT-3 175B, 1,024 devices", "zoo:gpt3-175b", 1024, 1536, ()),
    ("  exported otherwise", f"{OTHERWISE}gpt3-175b", 1024, 1536, ()),
    ("  two layers more", "zoo:gpt3-175b,layers=98", 1024, 1536, ()),
    ("Llama-3 405B, 4,096 devices", "zoo:llama3-405b", 4096, 2048, ()),
    ("  two layers more", "zoo:llama3-405b,layers=128", 4096, 2048, ()),
)
"""Name, model, devices, batch and other options. Indented: a change of the row above that is
not."""
QUICK = 8
"""Rows without the large models."""


def timed(
    row: tuple[str, str, int, int, tuple[str, ...]], folder: Path, cache: str
) -> tuple[float, dict[str, Any], str]:
    """One `plan` process: user CPU seconds, its strategy without provenance, and what it said of
    the cache."""
    _, source, devices, batch, more = row
    if source.startswith(OTHERWISE):
        source = str(folder / "model.onnx")
    command = [
        sys.executable,
        "-m",
        "planner.cli",
        source,
        "--devices",
        str(devices),
        "--batch",
        str(batch),
        "-o",
        str(folder / "p.json"),
        "--force",
        *more,
    ]
    before = os.times().children_user
    done = subprocess.run(
        command, env={**os.environ, VARIABLE: cache}, capture_output=True, text=True, check=True
    )
    strategy = json.loads((folder / "p.json").read_text())
    del strategy["provenance"]
    said = [
        line.partition(" from the cache")[0]
        for line in done.stderr.splitlines()
        if " from the cache" in line
    ]
    return os.times().children_user - before, strategy, "".join(said) or "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What the cache of searches spares.")
    parser.add_argument("--quick", action="store_true", help="without the large models")
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="times that each row is asked: --turns 5 on a machine with other work",
    )
    options = parser.parse_args(argv)
    wrong = 0
    print(
        f"{'plan':28s} {'no cache':>9s} {'first':>8s} {'ratio':>6s} {'second':>8s} {'ratio':>6s} "
        " recalled first; second"
    )
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), Path(name) / "before"
        before.mkdir(mode=0o700)
        for row in ROWS[: QUICK if options.quick else None]:
            turns, same = [], row[1].startswith(OTHERWISE)
            if same:
                onnx.save(
                    called_otherwise(models_zoo.build(row[1].replace(OTHERWISE, "zoo:"))),
                    folder / "model.onnx",
                )
            for turn in range(options.turns):
                cache = folder / f"cache{turn}"
                shutil.copytree(before, cache)
                turns.append([timed(row, folder, where) for where in (OFF, str(cache), str(cache))])
            (alone, _, _), (first, _, found), (second, _, spared) = (
                min(way, key=lambda run: run[0]) for way in zip(*turns, strict=True)
            )
            wrong += any(
                made != kept
                or made != again
                or "search" not in said
                or (same and "search" not in at_once)
                for (_, made, _), (_, kept, at_once), (_, again, said) in turns
            )
            print(
                f"{row[0]:28s} {alone:7.2f} s {first:6.2f} s {first / alone:6.2f} {second:6.2f} s"
                f" {second / alone:6.2f}  {found}; {spared}",
                flush=True,
            )
            if not row[0].startswith(" "):  # what the changes below it find
                shutil.rmtree(before)
                shutil.copytree(folder / "cache0", before)
            for turn in range(options.turns):
                shutil.rmtree(folder / f"cache{turn}")
    print(
        "every strategy equal, every second search recalled"
        if not wrong
        else f"{wrong} rows are wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
