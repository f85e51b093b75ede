"""Every command that README and docs list is typed, from the top of the page to its end, in one
folder, as a reader would: none ends in an error.

tests/whole/test_docs.py compares what pages show as sessions; here are the listings, which say what
a command is for instead of what it prints. The folder of a page begins with what the page says a
reader has: model.onnx, and what STAND_INS names. A command that needs what no test has (a cluster,
a checkpoint, minutes) is left out by LEFT_OUT, each with why.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.whole.test_docs import BLOCK, PAGES, ROOT

LEFT_OUT = {
    r"\.\.\.": "what follows is for the reader to say",
    r"\b(MODEL|DIR|DIR2|FILE|path/to)\b": "a placeholder",
    r"--(target|confirm) (gpu|tpu)": "compilers that are not installed (tests/verify/test_targets.py)",
    r"--nnodes|--hostfile": "several machines (tests/launch/test_launch.py)",
    r"plan calibrate -o mine\.toml( +measure|$)|calibrate .*--node-size": (
        "a minute and a half of measuring (tests/calibrate/test_calibrate.py)"
    ),
    r"--tables localhost": "servers beside it (tests/emit/test_hosted.py)",
    r"calibrate --runs": "runs of a cluster (tests/calibrate/test_calibrate_runs.py)",
    r"--local 2 --slots 4 -- --checkpoints": (
        "plans that the page makes for a cluster (tests/launch/test_elastic.py)"
    ),
}
"""A pattern of commands -> why they are not typed."""
LONG = r"llama3-70b|405b|plan sweep|plan compare|seq=65536|dlrm-criteo|resnet50|unet|offload=|launch .*--local|plan tune"
"""Commands of seconds and more, in `make slow`; on every change tests/launch/test_launch_run.py starts
what is launched, and tests/interop/test_tune.py tunes."""


def _save(spec: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import onnx

        import models_zoo

        onnx.save(models_zoo.build(spec), path)

    return make


def _planned(*words: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        done = _typed(["plan", *words, "--quiet", "-o", path.name], path.parent)
        assert done.returncode == 0, done.stderr

    return make


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


MEGATRON = (
    "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 1\nmicro_batch_size:"
    " 1\nglobal_batch_size: 512\n"
)
SCRIPT = (
    "TP=${TP:-2}\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 1"
    " --global-batch-size 512\n"
)
TINY = ("model.onnx", "--devices", "8", "--batch", "16", "--hardware", "cpu", "--precision", "fp32")
STAND_INS: dict[str, dict[str, Callable[[Path], None]]] = {
    "": {"model.onnx": _save("zoo:llama-tiny")},
    "README.md": {"mine.yaml": _text(MEGATRON)},
    "SKILL.md": {"mine.yaml": _text(MEGATRON)},
    "serving.md": {
        "model.onnx": _save("zoo:llama-tiny,cache=1"),
        "trace.csv": _text("arrival_s,prompt,generate\n0.0,64,8\n0.1,32,16\n0.3,80,4\n"),
    },
    "exchange.md": {
        "model.plan.json": _planned(*TINY, "--pin", "dp=4,tp=2"),
        "mine.yaml": _text(MEGATRON),
        "train.sh": _text(SCRIPT),
    },
    "calibrate.md": {
        "node.plan.json": _planned("zoo:llama3-8b", "--devices", "8", "--batch", "16")
    },
    "emit.md": {"model.plan.json": _planned(*TINY)},
    "exporting.md": {"model.plan.json": _planned(*TINY)},
    "launch.md": {"model.plan.json": _planned(*TINY)},
    "reading-a-report.md": {
        f"{name}.plan.json": _planned(*TINY, "--pin", pins)
        for name, pins in (("model", "dp=8"), ("a", "dp=8"), ("b", "dp=4,tp=2"))
    },
    "verify.md": {"s.json": _planned(*TINY)},
}
"""Page -> file -> what makes it, in order; "": of every page."""
SMALL = {"model.onnx": _save("zoo:mlp-tiny")}
"""A reader's model where commands of seconds alone are typed; `make slow` types them all with a
transformer."""


def listed(page: Path) -> list[str]:
    """The `plan` lines of a page's listings, without what they are for."""
    blocks = [
        m["text"]
        for m in BLOCK.finditer(page.read_text())
        if not m["mark"] and not m["kind"] and not m["text"].startswith("$ ")
    ]
    lines = [
        line for text in blocks for line in text.splitlines() if re.match(r"plan [a-z./-]", line)
    ]
    return [part for line in lines for part in re.split(r"\s{2,}|\s#", line)[0].split(" · ")]


def _typed(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "MESHWRIGHT_CACHE": str(folder / ".cache"),
    }
    environment.pop("COLUMNS", None)
    flags = environment["XLA_FLAGS"].split()  # the tests' own devices are none of the reader's
    environment["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def walk(page: Path, folder: Path, long: bool) -> int:
    """Type a page's commands, those of seconds alone or all; how many."""
    given = STAND_INS[""] | STAND_INS.get(page.name, {}) | ({} if long else SMALL)
    for name, make in given.items():
        make(folder / name)
    done = 0
    for command in listed(page):
        if any(re.search(pattern, command) for pattern in LEFT_OUT) or (
            not long and re.search(LONG, command)
        ):
            continue
        answer = _typed(
            [
                *shlex.split(command),
                *(
                    ("--force",)
                    if re.match(r"plan (\S+\.onnx|zoo:|emit|calibrate)", command)
                    else ()
                ),
            ],
            folder,
        )
        assert answer.returncode == 0 and "Traceback" not in answer.stderr, (
            f"{page.name}: {command}\n{answer.stderr[-2000:]}"
        )
        done += 1
    return done


WALKED = [p for p in PAGES if listed(p)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "page", [p for p in WALKED if p.name in ("README.md", "SKILL.md")], ids=lambda p: p.name
)
def test_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    assert walk(page, tmp_path, long=False) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page", WALKED, ids=lambda p: p.name)
def test_all_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    typed = walk(page, tmp_path, long=True)
    assert typed > 0 or all(any(re.search(p, c) for p in LEFT_OUT) for c in listed(page))
