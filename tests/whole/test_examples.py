"""The examples run from end to end on eight virtual devices: what trains learns, what serves
answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import planner
from planner.report.explain import find_nodes
from planner.strategy.strategy import Strategy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(name: str, folder: Path, *options: str) -> str:
    """What an example prints, with its files in the folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "-o", str(folder), *options],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step (\d+) +loss ([\d.]+)", text, re.M)
    }


def test_a_gpt_learns_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    first = losses(run("train_gpt.py", tmp_path / "gpt", "--steps", "40"))
    assert first[0] == pytest.approx(np.log(512), abs=0.1) and first[39] < 3.5
    more = losses(run("train_gpt.py", tmp_path / "gpt", "--steps", "50", "--pin", "dp=2,tp=4"))
    assert min(more) == 40 and max(more) == 49 and more[49] < first[39]
    log = [json.loads(line) for line in (tmp_path / "gpt" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(50)) and log[0]["gradient_norm"] > 0
    assert [row["learning_rate"] for row in log[3:6]] == pytest.approx([2.4e-3, 3e-3, 3e-3])
    assert Strategy.load(tmp_path / "gpt" / "gpt.plan.json").mesh_shape == (
        ("data", 2),
        ("tensor", 4),
    )


def test_a_resnet_learns_in_half_of_the_memory(tmp_path: Path) -> None:
    found = losses(run("train_resnet.py", tmp_path / "resnet", "--steps", "30"))
    assert found[0] == pytest.approx(np.log(10), abs=0.1) and found[29] < 1.2
    assert (tmp_path / "resnet" / "resnet.html").read_text().startswith("<!doctype html>")


def test_a_torch_module_is_exported_planned_and_found_by_its_names(tmp_path: Path) -> None:
    """Another batch than the exported one; nodes are asked for by the module's path, which torch
    keeps in parameters alone."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "export_torch.py"), "-o", "mine.onnx"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=300,
    )
    strategy = planner.plan(tmp_path / "mine.onnx", devices=8, batch=64)
    assert strategy.workload["batch"] == 64 and "rebatched from the exported 2 to 64" in " ".join(
        strategy.assumptions
    )
    assert strategy.nodes[find_nodes(strategy, "blocks.3.qkv")[0]]["op"] == "MatMul" and any(
        row["op"] == "Dropout" for row in strategy.nodes.values()
    )


def test_a_llama_answers_every_prompt(tmp_path: Path) -> None:
    run("serve_llama.py", tmp_path / "llama", "--generate", "6")
    prompts, tokens = (
        np.load(tmp_path / "llama" / "prompts.npy"),
        np.load(tmp_path / "llama" / "tokens.npy"),
    )
    assert tokens.shape == (len(prompts), 6) and len(np.unique(tokens)) > 6
