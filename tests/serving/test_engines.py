"""A serving plan as arguments of vLLM and SGLang: which row of the plan, which words, and what is
refused."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.serving.engines import ENGINES, hand_over
from planner.serving.result import Serving, rate_words
from planner.serving.serve import serve

WORDS = {
    "vllm": [
        "serve",
        "a model; x",
        "--tensor-parallel-size",
        "2",
        "--data-parallel-size",
        "2",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "24",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "32",
    ],
    "sglang": [
        "-m",
        "sglang.launch_server",
        "--model-path",
        "a model; x",
        "--tp-size",
        "2",
        "--dp-size",
        "2",
        "--dtype",
        "bfloat16",
        "--context-length",
        "24",
        "--max-running-requests",
        "4",
        "--chunked-prefill-size",
        "32",
    ],
}
"""Engine -> its words for two replicas of two devices, eight sequences of 16 + 8 tokens, all prompts
of a replica in passes of two."""


@pytest.fixture(scope="module")
def serving() -> Serving:
    return serve(
        "zoo:llama-tiny,cache=1",
        prompt=16,
        generate=8,
        concurrency=8,
        devices=4,
        prefill_tokens=32,
        hardware="h100-sxm",
    )


def with_rows(serving: Serving, aim: str = "throughput", **rows: dict[str, Any]) -> Serving:
    """The plan with rows tp=N changed (a row as it is where nothing is said), and no others."""
    made = [
        {**row, **rows[label]}
        for row in serving.rows
        if (label := str(row["label"]).replace("=", "")) in rows
    ]
    best = max(float(row["tokens_per_s_per_device"]) for row in made)
    figures = {**serving.figures, "tokens_per_s_per_device": best * 1.01}
    return replace(
        serving, rows=tuple(made), figures=figures, service={**serving.service, "objective": aim}
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_starts_what_was_planned(serving: Serving, engine: str, tmp_path: Path) -> None:
    hostile = replace(
        serving.step, model={**serving.step.model, "name": "x\ntouch pwned $(touch pwned)"}
    )
    made = hand_over(replace(with_rows(serving, tp2={}), step=hostile), engine)
    assert made.cost.startswith(f"{engine}: tp=2, 2 replicas: ") and "1.0 % worse" in made.cost
    (tmp_path / "run.sh").write_text(made.text)
    for name in ("vllm", "python3"):
        (tmp_path / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "a model; x"}
    done = subprocess.run(
        ["bash", "run.sh", "--port", "8000"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [*WORDS[engine], "--port", "8000"]
    assert not (tmp_path / "pwned").exists()
    del environment["MODEL"]
    nameless = subprocess.run(
        ["bash", "run.sh"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert nameless.returncode and b"a checkpoint of the model" in nameless.stderr


def test_the_best_row_that_engines_can_say_is_taken(serving: Serving) -> None:
    slow = {"tokens_per_s_per_device": 1.0, "ttft_s": 9.0, "tpot_s": 9.0}
    fast = {"tokens_per_s_per_device": 2.0, "ttft_s": 8.0, "tpot_s": 8.0}
    assert "tp=4, 1 replica:" in hand_over(with_rows(serving, tp2=slow, tp4=fast), "vllm").cost
    lacking = with_rows(serving, tp2=slow, tp4={**fast, "fits": False})
    with pytest.raises(PlanError, match="P194.*no tensor parallelism in a node fits"):
        hand_over(replace(lacking, rows=lacking.rows[-1:]), "vllm")
    aimed = with_rows(serving, "ttft", tp2=slow)
    late = replace(aimed, figures={**aimed.figures, "ttft_s": 6.0})
    with pytest.raises(PlanError, match="P194.*sglang can say of this plan, tp=2, is 50.0 % worse"):
        hand_over(late, "sglang")


def test_replicas_of_several_nodes_are_started_on_each(serving: Serving) -> None:
    sixteen = {"replicas": 16, "split": 1, "wave": 16}
    made = hand_over(with_rows(serving, tp1=sixteen), "vllm")
    node = serving.step.topology["levels"][0]["size"]
    assert f"each of {16 // node} nodes" in made.text
    assert f"--data-parallel-size {node}" in made.text and "--max-num-seqs 1 " in made.text
    wide = with_rows(serving, tp4={"split": 2 * node})
    with pytest.raises(PlanError, match="P194.*in a node fits"):
        hand_over(wide, "vllm")


@pytest.fixture(scope="module")
def mixture() -> Serving:
    """Two nodes of eight."""
    return serve(
        "zoo:deepseek-tiny,layers=2",
        prompt=16,
        generate=8,
        concurrency=32,
        devices=16,
        prefill_tokens=32,
        hardware="h100-sxm",
    )


SHARED = {
    "vllm": {
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "8",
        "--data-parallel-size-local": "4",
        "--data-parallel-start-rank": "4",
        "--data-parallel-address": "first",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "32",
    },
    "sglang": {
        "--tp-size": "16",
        "--dp-size": "8",
        "--ep-size": "16",
        "--nnodes": "2",
        "--node-rank": "1",
        "--dist-init-addr": "first:5000",
        "--max-running-requests": "32",
        "--chunked-prefill-size": "256",
    },
}
"""Engine -> its arguments for eight replicas of two devices on two nodes, which share experts, of
32 sequences, two prompts a pass; on the second node."""


FLAGS = {"vllm": "--enable-expert-parallel", "sglang": "--enable-dp-attention"}
"""What tells an engine that replicas share experts."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_share_experts(mixture: Serving, engine: str, tmp_path: Path) -> None:
    made = hand_over(with_rows(mixture, **{"ep8 tp2": {}}), engine)
    assert "ep=8 tp=2, 8 replicas: " in made.cost
    (tmp_path / "run.sh").write_text(made.text)
    for name in ("vllm", "python3"):
        (tmp_path / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m"}
    run = partial(subprocess.run, ["bash", "run.sh"], cwd=tmp_path, capture_output=True, text=True)
    done = run(env={**environment, "HEAD": "first", "NODE": "1"}, check=True)
    words = done.stdout.splitlines()
    said = dict(zip(words, words[1:], strict=False))
    assert {k: said[k] for k in SHARED[engine]} == SHARED[engine]
    assert FLAGS[engine] in words and ("--headless" in words) == (engine == "vllm")
    first = run(env={**environment, "HEAD": "first", "NODE": "0"}, check=True).stdout
    assert "--headless" not in first
    lost = run(env=environment, check=False)
    assert lost.returncode and "address of the first node" in lost.stderr


def test_replicas_of_a_mixture_share_experts_or_are_not_of_vllm() -> None:
    on_four = serve("zoo:mixtral-tiny", prompt=8, generate=4, concurrency=8, devices=4)
    for engine, flag in FLAGS.items():
        made = hand_over(with_rows(on_four, **{"ep4 tp1": {"fits": True}}), engine)
        assert flag in made.text and "ep=4 tp=1, 4 replicas: " in made.cost
    rows = with_rows(on_four, tp2={"fits": True})
    assert "tp=2, 2 replicas: " in hand_over(rows, "sglang").cost
    with pytest.raises(PlanError, match="P194"):
        hand_over(rows, "vllm")


@pytest.mark.slow
def test_vllm_has_no_replicas_of_a_mixture_that_share_nothing(mixture: Serving) -> None:
    rows = with_rows(mixture, tp8={"fits": True})
    assert "tp=8, 2 replicas: " in hand_over(rows, "sglang").cost
    with pytest.raises(PlanError, match="P194"):
        hand_over(rows, "vllm")


def test_int8_is_the_checkpoints_business(serving: Serving) -> None:
    quantized = replace(serving, service={**serving.service, "quantize": "int8"})
    with pytest.raises(PlanError, match="P192.*--quantize int8"):
        hand_over(with_rows(quantized, tp2={}), "vllm")


def test_the_command_exports_and_asks_for_an_engine(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with_rows(serving, tp2={}).save("s.json")
    assert main(["export", "s.json"]) == 2 and "for which engine" in capsys.readouterr().err
    assert main(["export", "s.json", "--to", "megatron"]) == 2
    assert "error[P018]" in capsys.readouterr().err
    assert main(["export", "s.json", "--to", "vllm"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n") and "tp=2" in shown.err
    assert main(["export", "s.json", "--to", "sglang", "-o", "run.sh"]) == 0
    assert "MODEL=... bash run.sh" in capsys.readouterr().err
    assert main(["export", "s.json", "--to", "sglang", "-o", "run.sh"]) == 2


def test_a_plan_for_requests_that_arrive_says_its_limits(tmp_path: Path) -> None:
    (tmp_path / "t\nrm.csv").write_text(
        "arrival_s,prompt,generate\n" + "".join(f"{i / 50},{8 + i},4\n" for i in range(40))
    )
    made = serve(
        "zoo:llama-tiny,cache=1",
        rate=str(tmp_path / "t\nrm.csv"),
        concurrency=8,
        devices=2,
        prefill_tokens=64,
        hardware="h100-sxm",
    )
    done = hand_over(made, "vllm")
    row = next(r for r in made.rows if f"{r['label']}," in done.cost)
    assert f"{rate_words(row['most_per_s'])} requests/s at most" in done.cost
    words = done.text.replace("\\\n", " ").split()
    said = dict(zip(words, words[1:], strict=False))
    assert said["--max-model-len"] == str(47 + 4)
    assert said["--max-num-seqs"] == str(8 // row["replicas"])
    assert said["--max-num-batched-tokens"] == "64"
    assert not any(line.startswith("rm") for line in done.text.splitlines())


def test_engines_have_no_replicas_that_query_heads_do_not_divide_over() -> None:
    """vLLM and SGLang start none; six heads over four devices were planned and exported."""
    model = "zoo:llama-tiny,heads=6,kv_heads=2,hidden=48,cache=1"
    sizes = {"prompt": 16, "generate": 4, "concurrency": 1, "devices": 4, "objective": "tpot"}
    for engine in ("vllm", "sglang"):
        with pytest.raises(PlanError) as e:
            serve(model, engine=engine, **sizes)  # type: ignore[arg-type]
        assert e.value.code == "P021"
        made = serve(model, engine=engine, **{**sizes, "concurrency": 2})  # type: ignore[arg-type]
        assert {row["split"] for row in made.rows} == {2}
    free = serve(model, **{**sizes, "concurrency": 4})  # type: ignore[arg-type]
    assert {row["split"] for row in free.rows} == {1, 2, 4}
    alone = replace(free, rows=tuple(r for r in free.rows if r["split"] == 4))
    with pytest.raises(PlanError, match="P194.*divides the query heads"):
        hand_over(alone, "vllm")
