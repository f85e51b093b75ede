"""What an incremental plan spares, and what it costs: python -m benchmarks.incremental [--quick]
[--turns N].

Each row plans a model, then one that differs a little: with all searched anew (no cache), and with
`--incremental` after the first. One process; CPU seconds of the search with the graph read, the
least of N by turns; "alone" is the full search without its baselines, which an incremental plan has
none of. `step`: of the incremental plan over that of the full search. `kept`: operators that keep
their decisions, of all; "none" where all was searched after all (and what was tried first is part
of its seconds).

Exit status 1 when a step is more than 2 % above the full search's, or when one that keeps something
takes more than half of the seconds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from planner.cache.folder import Cache
from planner.search.build_request import make_request
from planner.search.incremental import SLOWER
from planner.search.request import SearchResult
from planner.search.search import Search
from planner.support.gc_pause import seldom_collecting
from planner.workload.model import Model, Workload

ROWS: tuple[tuple[str, str, str, int, int], ...] = (
    ("Llama-3 8B: vocabulary 128,512", "llama3-8b", "vocab=128512", 64, 256),
    ("  30 layers", "llama3-8b", "layers=30", 64, 256),
    ("  33 layers", "llama3-8b", "layers=33", 64, 256),
    ("  FFN 14,592", "llama3-8b", "ff=14592", 64, 256),
    ("Mixtral 8x7B: 30 layers", "mixtral-8x7b", "layers=30", 64, 256),
    ("BERT large: 26 layers", "bert-large", "layers=26", 64, 1024),
    ("ViT-L/16: 2,000 classes", "vit-l16", "classes=2000", 64, 1024),
    ("T5 3B: vocabulary 32,256", "t5-3b", "vocab=32256", 64, 512),
    ("T5 large: FFN 3,072", "t5-large", "ff=3072", 64, 512),
    ("ResNet-50: 1,200 classes", "resnet50", "classes=1200", 64, 1024),
    ("DLRM: another top", "dlrm-criteo", "top=512-256-1", 64, 65536),
    ("GPT-3 175B: vocabulary 51,200", "gpt3-175b", "vocab=51200", 1024, 1536),
    ("  95 layers", "gpt3-175b", "layers=95", 1024, 1536),
    ("Llama-3 405B: vocabulary 128,512", "llama3-405b", "vocab=128512", 4096, 4096),
    ("Llama-3 70B: 78 layers", "llama3-70b", "layers=78", 256, 1024),
    ("U-Net (SD 1.5): 8 channels", "unet-sd15", "channels=8", 64, 256),
    ("DeepSeek-V2: vocabulary 102,656", "deepseek-v2", "vocab=102656", 64, 256),
    ("  58 layers", "deepseek-v2", "layers=58", 64, 256),
)
"""Name, model of the zoo, its change, devices and batch."""
QUICK = 12


def searched(
    source: str,
    devices: int,
    batch: int,
    cache: Cache | None,
    *,
    incremental: bool = False,
    baselines: bool = True,
) -> tuple[float, SearchResult]:
    """One search: CPU seconds, and what was found."""
    model = Model.open(f"zoo:{source}", Workload(batch=batch), devices)
    model.graph(1)
    request = make_request(
        devices=devices,
        hardware=None,
        topology=None,
        cache=cache,
        incremental=incremental,
        baselines=baselines,
    )
    with seldom_collecting():
        began = time.process_time()
        found = Search(model, request).run()
        return time.process_time() - began, found


def step(found: SearchResult) -> float:
    """Seconds of a plan's step."""
    assert found.best is not None
    return found.best.cost.step_time_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description="What an incremental plan spares, and what it costs."
    )
    parser.add_argument("--quick", action="store_true", help="without the large models")
    parser.add_argument(
        "--turns", type=int, default=1, metavar="N", help="times that each is searched: --turns 3"
    )
    options = parser.parse_args(argv)
    missed = 0
    print(
        "| change | devices | all, s | alone, s | incremental, s | all / incremental | step | kept"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for name, model, change, devices, batch in ROWS[: QUICK if options.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            before_it, turns = Path(folder) / "before", []
            searched(model, devices, batch, Cache(before_it))
            for turn in range(options.turns):
                known = shutil.copytree(before_it, Path(folder) / str(turn))
                full, alone = (
                    searched(f"{model},{change}", devices, batch, None, baselines=b)
                    for b in (True, False)
                )
                turns.append(
                    (
                        full,
                        alone,
                        searched(
                            f"{model},{change}", devices, batch, Cache(known), incremental=True
                        ),
                    )
                )
        all_s, alone_s, made_s = (min(turn[k][0] for turn in turns) for k in range(3))
        (_, full_found), _, (_, found) = turns[0]
        ratio, before = step(found) / step(full_found), found.reused_from
        kept = f"{before.kept:,} of {before.kept + before.solved:,}" if before else "none"
        wrong = ratio > SLOWER or (before is not None and made_s > all_s / 2)
        missed += wrong
        print(
            f"| {name} | {devices:,} | {all_s:.2f} | {alone_s:.2f} | {made_s:.2f} |"
            f" {all_s / made_s:.1f} | {ratio:.4f} | {kept}{' MISSED' if wrong else ''} |",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
