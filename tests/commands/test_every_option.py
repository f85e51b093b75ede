"""Every option of every command is used by a real call: of the table below, or of another test.

What an option does is the business of its own tests; here it is read, passed on and harmless
together with its neighbours.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import models_zoo
from planner.cli import VERBS, main, options_of
from tests.interop.test_pretrained import checkpoint as hub_tensors
from tests.interop.test_pretrained import folder as checkpoint

HERE = Path(__file__)
ROOT = HERE.parents[2]
SPEC = "zoo:llama-tiny,layers=1"
TRAINING = (
    "--loss cross_entropy --logits logits --shift-labels --ignore-index -100 --trainable '*'"
    " --freeze '*norm*' --optimizer sgd --lr 0.01 --precision fp32"
)
TIED = "--workload train --tie lm_head.weight=model.embed_tokens.weight"
LORA = "--lora 'rank=2,targets=*.q_proj.weight'"
TABLES = "--tables device"
ROUTED = "--imbalance 2 --capacity 1.25"
SIZES = "--dim seq=4 --shape x=8,4,16 --batch 8 --workload infer"
MACHINE = "--hardware h100-sxm --memory-limit 40GiB --memory-reserve 1GiB --runtime jax-jit"
SEARCH = "--objective step --time-limit 100 --seed 7 --strict"
CALLS = list(
    filter(
        None,
        f"""
plan {SPEC} --devices 2 --batch 8 {TRAINING} {MACHINE} {SEARCH} --solver ilp --mode semi-auto --pin tp=2 -o a.json --emit a.py --backend jit --quiet --force
plan {SPEC} --topology two.toml --tokens-per-step 128 {TIED} --json --cache kept
plan {SPEC} --devices 2 --batch 8 --json --cache kept --incremental
plan {SPEC} --devices 2 --batch 8 {LORA} --quiet -o lora.json --no-cache
plan free.onnx --devices 2 {SIZES} --quiet -o free.json
plan free.onnx --devices 2 --dim seq=4 --shape x=8,4,16 --batch 8 --quiet -o free.json --force
plan zoo:llama-tiny,cache=1 --devices 2 --workload infer --prompt 8 --generate 4 --concurrency 4 --prefill-tokens 16 --quantize int8 --cache-type fp8 --draft 0.1 --quiet -o serve.json
plan zoo:llama-tiny,cache=1 --devices 2 --workload infer --prompt 8 --generate 2..4 --rate 50 --quiet -o arrive.json
plan zoo:llama-tiny,cache=1 --devices fewest --workload infer --prompt 8 --generate 2..4 --rate 50 --ttft 1s --tpot p90=500ms --pools --quiet -o fewest.json
plan m.onnx --devices 4 --hardware cpu --precision fp32 --batch 8 --calibrate-with p.json=2ms --quiet -o anchored.json
plan zoo:dlrm-tiny --devices 2 --batch 8 {TABLES} --quiet -o dlrm.json
plan zoo:mixtral-tiny --devices 2 --batch 8 {ROUTED} --quiet -o moe.json
plan {SPEC} --devices 2 --batch 8 --for megatron --quiet -o for.json
plan --version
plan --completion fish
annotate p.json --model m.onnx -o m2.onnx
annotate p.json --model m.onnx -o m2.onnx --force
export megatron.json --to maxtext -o p.yml
export megatron.json --model {SPEC} --to maxtext -o p.yml --force
import mega.yaml --from megatron --model {SPEC} --devices 2 --batch 8 {TRAINING} {MACHINE} -o i.json --quiet --force
import mega.yaml --model {SPEC} --topology two.toml --batch 8 {TIED} -o i.json --force --quiet
import mega.yaml --model {SPEC} --devices 2 --tokens-per-step 128 {LORA} -o i.json --force --quiet
import dp.yaml --model zoo:dlrm-tiny --devices 2 --batch 8 {TABLES} -o i.json --force --quiet
import mega.yaml --model free.onnx --devices 2 --dim seq=4 --shape x=8,4,16 --batch 8 --workload train -o i.json --force --quiet
tune mega.yaml --from megatron --model {SPEC} --devices 2 --batch 8 {TRAINING} --hardware h100-sxm --memory-limit 40GiB --memory-reserve 1GiB --runtime fsdp -o t.yaml --quiet --force
tune mega.yaml --model {SPEC} --topology two.toml --batch 8 {TIED} -o t.yaml --force --json
tune mega.yaml --model {SPEC} --devices 2 --tokens-per-step 128 {LORA} -o t.yaml --force
tune dp.yaml --model zoo:dlrm-tiny --devices 2 --batch 8 {TABLES} -o t.yaml --force --quiet
tune mega.yaml --model free.onnx --devices 2 --dim seq=4 --shape x=8,4,16 --batch 8 --workload train -o t.yaml --force --quiet
tune mega.yaml --model m.onnx --devices 2 --hardware cpu --precision fp32 --calibrate-with p.json=2ms --confirm gpu:h100 -o t.yaml --force
launch p.json --model m.onnx --to kubernetes --image i --volume v --backend jit --python python3 --timeout 60 --cpu -o k8s --force -- --steps 2
launch p.json --model m.onnx --to kubernetes --image i --queue team-a --cpu -o queued -- --steps 2
launch p.json --model m.onnx --nnodes 2 --coordinator nowhere --cpu -o l
weights hub/config.json --from hub --batch 8 {TRAINING} -o w.safetensors
weights hub/config.json --from hub --tokens-per-step 64 --workload train -o w.safetensors --force --partial
weights hub/config.json --from hub --tie lm_head.weight=model.embed_tokens.weight --partial
weights hub/config.json --from hub {LORA} --partial
weights free.onnx --from bare {SIZES} {TABLES}
weights zoo:mixtral-tiny --from bare {ROUTED}
verify p.json --model m.onnx --backend jit --unroll --target cpu --compute plan --no-run --tolerance 0.01 --time-limit 300
check m.onnx --against p.json --cache kept
check m.onnx --against p.json --no-cache --write badge=badge.json
compare {SPEC} --devices 2 --batch 8 {TRAINING} {MACHINE} {SEARCH}
compare {SPEC} --devices 2 --batch 8 --for torchtitan --no-cache
compare {SPEC} --topology two.toml --tokens-per-step 128 {TIED} --cache kept
compare {SPEC} --devices 2 --batch 8 {LORA} --no-cache
compare m.onnx --devices 4 --hardware cpu --precision fp32 --batch 8 --calibrate-with p.json=2ms --no-cache
compare zoo:dlrm-tiny --devices 2 --batch 8 {TABLES}
compare free.onnx --devices 2 {SIZES}
sweep {SPEC} --devices 2,4 --batch 8 {TRAINING} {MACHINE} {SEARCH} --solver dp --mode semi-auto --pin tp=2 --scaling weak
sweep {SPEC} --devices 2 --tokens-per-step 128 {TIED} --cache kept
sweep zoo:mlp-tiny --devices 2 --tokens 1B --price 2/h --deadline 30d --budget 1M --pareto
sweep {SPEC} --devices 2 --batch 8 --for hf --no-cache
sweep {SPEC} --devices 2 --batch 8 {LORA} --json --no-cache
sweep zoo:dlrm-tiny --devices 2 --batch 8 {TABLES}
sweep free.onnx --devices 2 {SIZES}
ops {SPEC} --batch 8 {TRAINING} --parameters
ops {SPEC} --tokens-per-step 128 {TIED}
ops {SPEC} {LORA} --batch 8
ops free.onnx {SIZES} {TABLES}
import mega.yaml --model zoo:mixtral-tiny --devices 2 --batch 8 {ROUTED} -o i.json --quiet --force
tune mega.yaml --model zoo:mixtral-tiny --devices 2 --batch 8 {ROUTED} -o t.yaml --quiet --force
compare zoo:mixtral-tiny --devices 2 --batch 8 {ROUTED} --no-cache
sweep zoo:mixtral-tiny --devices 2 --batch 8 {ROUTED} --no-cache
ops zoo:mixtral-tiny --batch 8 {ROUTED}
calibrate --runs none.jsonl --hardware a100-80gb-sxm -o mine.toml --force
solve problem.json --seed 3
""".splitlines(),
    )
)
ENDS = {
    "calibrate --runs none.jsonl": 2,
    "launch p.json --model m.onnx --nnodes": 2,
    "tune mega.yaml --model m.onnx": 2,
    "weights zoo:mixtral-tiny --from bare": 2,
}
"""Calls that end in an error: what they are given cannot be used, and the option is read before
that is known."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the calls read: a plan and its model, one for a launcher, a model with open sizes, a machine, checkpoints,
    another launcher's file, a contest problem."""
    at = tmp_path_factory.mktemp("calls")
    onnx.save(models_zoo.build("zoo:mlp-tiny"), at / "m.onnx")
    assert (
        main(
            [
                str(at / "m.onnx"),
                "--devices",
                "2",
                "--hardware",
                "cpu",
                "--precision",
                "fp32",
                "--batch",
                "8",
                "--pin",
                "tp=2",
                "--quiet",
                "-o",
                str(at / "p.json"),
            ]
        )
        == 0
    )
    planned = ["--devices", "2", "--batch", "8", "--for", "megatron", "--quiet", "-o"]
    assert main([SPEC, *planned, str(at / "megatron.json")]) == 0
    (at / "two.toml").write_text(
        'device = "h100-sxm"\n[[level]]\nname = "nvlink"\nsize = 2\nbandwidth = "450 GB/s"\nlatency'
        ' = "2 us"\n'
    )
    weight, rows = (
        numpy_helper.from_array(np.zeros((16, 16), np.float32), "w"),
        ["batch", "seq", 16],
    )
    x, z, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", None), ("z", rows), ("y", rows))
    )
    steps = [
        helper.make_node("Add", ["x", "z"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["y"]),
    ]
    onnx.save(
        helper.make_model(
            helper.make_graph(steps, "free", [x, z], [y], [weight]),
            opset_imports=[helper.make_opsetid("", 18)],
        ),
        at / "free.onnx",
    )
    (at / "mega.yaml").write_text(
        "tensor_model_parallel_size: 2\nmicro_batch_size: 8\nglobal_batch_size: 8\n"
    )
    (at / "dp.yaml").write_text(
        "tensor_model_parallel_size: 1\nmicro_batch_size: 4\nglobal_batch_size: 8\n"
    )
    tensors = hub_tensors("llama")
    checkpoint(
        at / "hub", "llama", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    checkpoint(at / "bare", "llama", {"w": np.zeros((16, 16), np.float32)})
    nodes = {"intervals": [[0, 1]], "costs": [[5, 1]], "usages": [[1, 9]]}
    (at / "problem.json").write_text(
        json.dumps(
            {
                "problem": {
                    "name": "p",
                    "nodes": nodes,
                    "edges": {"nodes": [], "costs": []},
                    "usage_limit": 5,
                }
            }
        )
    )
    return at


def _often() -> list[Any]:
    """The calls, of each command two of three in the long suites."""
    seen, found = Counter[str](), list[Any]()
    for line in CALLS:
        command = line.split()[0]
        found.append(pytest.param(line, marks=[pytest.mark.slow] * bool(seen[command] % 3)))
        seen[command] += 1
    return found


@pytest.mark.parametrize("line", _often())
def test_the_call_works(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line.removeprefix("plan "))
    code = main(words)
    out, err = capsys.readouterr()
    assert code == next((end for start, end in ENDS.items() if line.startswith(start)), 0), err
    assert "P000" not in err and (out or err or "--quiet" in words)


def _calls(path: Path) -> Iterator[list[str]]:
    """The words of every list, tuple and call of a test's source that holds some, whatever stands
    between them."""

    def words(parts: Sequence[ast.expr]) -> Iterator[str]:
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Starred) and isinstance(part.value, ast.List | ast.Tuple):
                yield from words(part.value.elts)

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            yield list(words(node.args if isinstance(node, ast.Call) else node.elts))


def test_every_option_of_every_command_is_used() -> None:
    """Elsewhere a call is known by its first word, a command, or by --devices or --topology: it
    plans."""
    used: dict[str, set[str]] = {verb: set() for verb in VERBS}
    others = (
        words
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if path != HERE
        for words in _calls(path)
    )
    for words in (*(shlex.split(line.removeprefix("plan ")) for line in CALLS), *others):
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        verb = (
            words[0]
            if words and words[0] in VERBS
            else (
                "make" if options & {"--devices", "--topology", "--version", "--completion"} else ""
            )
        )
        if verb:
            used[verb] |= options
    unused = {
        verb: [
            a.option_strings[-1]
            for a in options_of(verb)
            if a.dest != "help" and not used[verb].intersection(a.option_strings)
        ]
        for verb in VERBS
    }
    assert not any(unused.values()), {verb: names for verb, names in unused.items() if names}


CONTRACT = ROOT.parent / "shared" / "design" / "interface.md"


@pytest.mark.skipif(not CONTRACT.exists(), reason="the contract is not beside this checkout")
def test_every_command_and_option_of_the_contract_exists() -> None:
    text = CONTRACT.read_text()
    block, rest = (
        text.split("## 1. The command `plan`")[1].split("## 2. Python")[0].split("```")[1:3]
    )
    asked: dict[str, set[str]] = {}
    for line in block.strip().splitlines():
        call = line.split("   ")[0].split()
        asked.setdefault(call[1] if call[1] in VERBS else "make", set()).update(
            re.findall(r"--[a-z-]+", line.partition("# ")[0])
        )
    for verb, options in re.findall(
        r"`plan (\w+)` (?:also )?(?:takes )?((?:`[^`]+`(?:, | and )?)+)", rest
    ):
        asked.setdefault(verb, set()).update(re.findall(r"--[a-z-]+", options))
    table = rest.split("| option | meaning |")[1].split("\n\n")[0]
    asked["make"].update(
        option
        for row in table.splitlines()
        if row.startswith("| `")
        for option in re.findall(r"--[a-z-]+", row.split(" | ")[0])
    )
    assert asked.keys() <= VERBS.keys() and len(asked) > 14 and len(asked["make"]) > 25
    assert not {
        verb: lacking
        for verb, options in asked.items()
        if (lacking := options - {o for a in options_of(verb) for o in a.option_strings})
    }
