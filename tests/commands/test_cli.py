"""The command line: every verb once, exit codes, streams, files, and errors without tracebacks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import planner
from planner.cli import VERBS, choose_verb, main, parser
from planner.commands.sweep import series
from planner.errors import PlanError
from planner.strategy.strategy import Strategy
from planner.verify.report import VerifyReport

ROOT = Path(__file__).parents[2]
TINY = "zoo:llama-tiny"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "tiny.json"
    assert main([TINY, "--devices", "8", "--quiet", "-o", str(path)]) == 0
    return str(path)


def run(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )  # type: ignore[call-overload, no-any-return]


# --- the main verb


def test_summary_on_stdout_talk_on_stderr_and_the_default_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([TINY, "--devices", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("llama-tiny (zoo) · ") and "\x1b" not in out
    assert (
        err.startswith("wrote llama-tiny.plan.json") and "plan explain llama-tiny.plan.json" in err
    )
    assert Strategy.load("llama-tiny.plan.json").topology["devices"] == 8


def test_json_is_the_strategy_and_nothing_else(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["zoo:mlp-tiny", "--devices", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["format_version"] == "1.0" and err == "" and list(folder.iterdir()) == []
    assert main(["make", "zoo:mlp-tiny", "--devices", "4", "--json", "-o", "x.json"]) == 0
    ours, file = json.loads(capsys.readouterr().out), json.loads(Path("x.json").read_text())
    assert {**ours, "provenance": 0} == {**file, "provenance": 0}


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo:mlp-tiny", "--devices", "2", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_same_input_same_bytes_outside_provenance() -> None:
    for name in ("a.json", "b.json"):
        assert main(["zoo:mlp-tiny", "--devices", "8", "--quiet", "-o", name]) == 0
    a, b = (json.loads(Path(n).read_text()) for n in ("a.json", "b.json"))
    assert {**a, "provenance": 0} == {**b, "provenance": 0}


def test_files_of_other_models_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo:mlp-tiny", "--devices", "2", "--quiet", "-o", "s.json"]) == 0
    assert (
        main(["zoo:mlp-tiny", "--devices", "4", "--batch", "16", "--quiet", "-o", "s.json"]) == 0
    )  # the same model's
    before = Path("s.json").read_text()
    assert main(["zoo:llama-tiny,layers=1", "--devices", "2", "--quiet", "-o", "s.json"]) == 2
    assert "error[P053]" in capsys.readouterr().err and Path("s.json").read_text() == before
    Path("notes.json").write_text("my notes")
    assert (
        main(["zoo:llama-tiny,layers=1", "--devices", "2", "--quiet", "-o", "notes.json"]) == 2
        and Path("notes.json").read_text() == "my notes"
    )
    assert main(
        ["zoo:llama-tiny,layers=1", "--devices", "2", "--quiet", "-o", "notes.json", "--force"]
    ) == 0 and Strategy.load("notes.json")
    for options in (["--lora", "rank=2,targets=*"], []):  # adapters make no other model
        assert (
            main(
                [
                    "zoo:llama-tiny,layers=1",
                    "--devices",
                    "2",
                    "--quiet",
                    "-o",
                    "notes.json",
                    *options,
                ]
            )
            == 0
        )


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        TINY,
        "--devices",
        "8",
        "--hardware",
        "a100-80gb",
        "--batch",
        "32",
        "--workload",
        "train",
        "--solver",
        "recursive",
        "--pin",
        "dp=4,tp=2",
        "--optimizer",
        "sgd",
        "--lr",
        "0.1",
        "--precision",
        "fp32",
        "--loss",
        "cross_entropy",
        "--shift-labels",
        "--freeze",
        "*embed*",
        "--runtime",
        "jax-jit",
        "--memory-limit",
        "70GiB",
        "--memory-reserve",
        "1GiB",
        "--objective",
        "memory",
        "--seed",
        "3",
        "--time-limit",
        "60",
        "--json",
    ]
    assert main(argv) == 0
    s = json.loads(capsys.readouterr().out)
    w, t = s["workload"], s["workload"]["training"]
    assert (
        s["topology"]["device"],
        w["batch"],
        w["precision"],
        w["runtime"],
        s["solver"]["name"],
    ) == ("a100-80gb", 32, "fp32", "jax-jit", "recursive")
    assert (t["optimizer"], t["lr"], t["loss"], t["shift_labels"], t["freeze"]) == (
        "sgd",
        0.1,
        "cross_entropy",
        True,
        ["*embed*"],
    )
    assert [(a["name"], a["size"]) for a in s["mesh"]] == [("data", 4), ("tensor", 2)] and s[
        "cost"
    ]["memory_limit_bytes"] == 70 * 2**30


def test_topology_file_tokens_and_inference(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.toml").write_text(
        'device = "h100-sxm"\n[[level]]\nname = "nvlink"\nsize = 4\nbandwidth = "450 GB/s"\nlatency'
        ' = "2 us"\n'
    )
    assert (
        main(
            [
                TINY,
                "--topology",
                "t.toml",
                "--tokens-per-step",
                "1k",
                "--workload",
                "infer",
                "--json",
            ]
        )
        == 0
    )
    s = json.loads(capsys.readouterr().out)
    assert (
        s["topology"]["levels"][0]["name"] == "nvlink"
        and s["cost"]["tokens_per_step"] == 1024
        and s["workload"]["training"] is None
    )


def test_data_parallel_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--devices", "4", "--mode", "data-parallel", "--json"]) == 0
    s = json.loads(capsys.readouterr().out)
    assert {a for row in s["nodes"].values() for axes in row["split"].values() for a in axes} == {
        "data"
    }


def test_manual_mode(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--mode", "manual", "--pin", plan_file, "-o", "m.json"]) == 0
    assert "priced as given" in " ".join(capsys.readouterr().out.split())
    made = Strategy.load("m.json")
    assert made.nodes.keys() == Strategy.load(plan_file).nodes.keys()
    assert (
        main([TINY, "--mode", "manual"]) == 2
        and main([TINY, "--mode", "manual", "--pin", plan_file, "--devices", "8"]) == 2
    )
    for said in (
        ["--optimizer", "sgd"],
        ["--objective", "memory"],
        ["--solver", "ilp"],
        ["--precision", "fp32"],
        ["--freeze", "*"],
        ["--dim", "seq=8"],
    ):
        assert main([TINY, "--mode", "manual", "--pin", plan_file, *said]) == 2, (
            f"{said[0]} would be passed over"
        )
    with pytest.raises(PlanError, match="P059"):
        planner.plan(TINY, devices=8, mode="manual")


def test_emit_with_the_plan_and_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "zoo:mlp-tiny,weights=inline",
                "--devices",
                "2",
                "--precision",
                "fp32",
                "-o",
                "s.json",
                "--emit",
                "p.py",
                "--quiet",
            ]
        )
        == 0
    )
    compile(Path("p.py").read_text(), "p.py", "exec")
    raw = Path("p.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    sizes = sorted(e["data_offsets"][1] - e["data_offsets"][0] for e in header.values())
    assert (
        sum(sizes) == len(raw) - 8 - int.from_bytes(raw[:8], "little")
        and sum(sizes) >= 4 * Strategy.load("s.json").model["parameters"]
    )
    capsys.readouterr()
    assert main(["emit", "s.json", "--backend", "jit", "--unroll"]) == 0
    assert (
        "wrote mlp_tiny_weightsinline.py" in capsys.readouterr().err
        and "meshwright" in Path("mlp_tiny_weightsinline.py").read_text()
    )
    assert main(["emit", "s.json"]) == 0  # its own program may be written again
    Path("mine.py").write_text("print('mine')")
    assert (
        main(["emit", "s.json", "-o", "mine.py"]) == 2
        and Path("mine.py").read_text() == "print('mine')"
    )
    assert (
        main(["emit", "s.json", "-o", "mine.py", "--force"]) == 0
        and "import jax" in Path("mine.py").read_text()
    )


# --- views


@pytest.mark.parametrize(
    "argv",
    [
        ["show"],
        ["show", "--json"],
        ["show", "--trace", "t.json"],
        ["explain"],
        ["explain", "mlp.up_proj"],
    ],
)
def test_views(argv: list[str], plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *rest = argv
    assert main([verb, plan_file, *rest]) == 0
    out = capsys.readouterr().out
    if "--json" in rest:
        assert json.loads(out) == json.loads(Path(plan_file).read_text())
    elif "--trace" in rest:
        assert json.loads(Path("t.json").read_text())["traceEvents"] and out == ""
    else:
        assert "llama-tiny" in out or "up_proj" in out


def test_diff_verb(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", plan_file, plan_file]) == 0
    assert "no difference" in capsys.readouterr().out


def test_compare_sweep_ops_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "zoo:mlp-tiny", "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert all(
        name in out for name in ("dp", "recursive", "ilp", "data parallel", "ZeRO-3", "replicated")
    )
    assert main(["sweep", "zoo:mlp-tiny", "--devices", "1,2..4,9", "--batch", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [r for r in lines if r.split() and r.split()[0].isdecimal()]  # long words are wrapped
    assert [r.split()[0] for r in rows] == ["1", "2", "4", "9"] and "P012" in rows[3]
    assert main(["sweep", "zoo:mlp-tiny", "--devices", "2", "--hardware", "h100-sxm,tpu-v5e"]) == 0
    assert "tpu-v5e" in capsys.readouterr().out
    assert main(["sweep", "zoo:mlp-tiny", "--devices", "2", "--hardware", "h100-sxm,h200-sxm"]) == 0
    out = capsys.readouterr().out
    assert (
        sum(line.endswith(", tie") for line in out.splitlines()) == 1
        and "within each other's range" in out
    )
    assert main(["ops", TINY]) == 0
    out = capsys.readouterr().out
    assert "MatMul" in out and "all 52 nodes have a rule" in out
    assert main(["hardware"]) == 0 and "h100-sxm" in capsys.readouterr().out
    assert main(["hardware", "h100-sxm"]) == 0 and "memory.capacity" in capsys.readouterr().out
    assert main(["hardware", "aws-p5"]) == 0 and "efa" in capsys.readouterr().out
    assert main(["hardware", "--json"]) == 0
    library = json.loads(capsys.readouterr().out)
    assert (
        library["devices"]["h100-sxm"]["memory_bytes"] == 81008 * 2**20
        and library["topologies"]["dgx-h100"]["device"] == "h100-sxm"
    )
    assert (
        main(["hardware", "H100", "--json"]) == 0
        and json.loads(capsys.readouterr().out) == library["devices"]["h100-sxm"]
    )
    assert (
        main(["hardware", "aws-p5", "--json"]) == 0
        and json.loads(capsys.readouterr().out) == library["topologies"]["aws-p5"]
    )


def test_verify_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.verify import worker

    assert (
        main(
            [
                "zoo:mlp-tiny",
                "--devices",
                "2",
                "--precision",
                "fp32",
                "--pin",
                "dp=2",
                "--quiet",
                "-o",
                "s.json",
            ]
        )
        == 0
    )
    reports: list[VerifyReport] = []
    real = worker.verify

    def kept(*args: Any, **more: Any) -> VerifyReport:
        reports.append(real(*args, **more))
        return reports[-1]

    monkeypatch.setattr(worker, "verify", kept)
    assert main(["verify", "s.json", "--no-run"]) == 0
    out = capsys.readouterr().out
    assert "argument bytes" in out and "traffic: exact" in out and "numbers: not run" in out
    report = reports.pop()

    def off_by_one(*_: object, **__: object) -> object:
        first = next(f for f in report.figures if f.judged and f.of == "traffic")
        return replace(
            report,
            figures=tuple(
                replace(f, compiled=f.compiled + 1) if f is first else f for f in report.figures
            ),
        )

    monkeypatch.setattr(worker, "verify", off_by_one)
    assert main(["verify", "s.json", "--no-run"]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out


def test_solve_verb(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {"intervals": [[0, 2], [1, 3]], "costs": [[5, 1], [2, 2]], "usages": [[1, 9], [1, 1]]}
    Path("p.json").write_text(
        json.dumps(
            {
                "problem": {
                    "name": "p",
                    "usage_limit": 5,
                    "nodes": nodes,
                    "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 1, 0]]},
                }
            }
        )
    )
    assert main(["solve", "p.json", "--time-limit", "5", "-o", "c.json"]) == 0
    assert (
        json.loads(Path("c.json").read_text()) == [0, 0]
        and "cost        7" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [("8", [8]), ("8,16..64", [8, 16, 32, 64]), ("3..20", [3, 6, 12]), ("4,4", [4])],
)
def test_series(text: str, found: list[int]) -> None:
    assert series(text) == found


# --- help


def test_help_of_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, (_, _, about, example) in VERBS.items():
        assert main([verb, "--help"]) == 0
        out = capsys.readouterr().out
        assert f"example: {example}" in out and about.split(",")[0] in out
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"plan {verb}" in out for verb in VERBS)
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("plan ")


def test_plan_alone_is_a_start_of_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    lines = [line.strip().split("  ")[0] for line in out.splitlines() if line.startswith("  plan ")]
    assert len(out.splitlines()) == 10 and not err and max(map(len, out.splitlines())) <= 100
    for line in lines:  # each is a command that parses
        verb, rest = choose_verb(line.split()[1:])
        parser(verb).read(rest)
    assert len(lines) == 6


def test_examples_in_help_parse() -> None:
    for verb, (_, _, _, example) in VERBS.items():
        words = example.split()[1:]
        assert vars(parser(verb).read(words[1:] if words[0] == verb else words)), verb


def test_help_is_quick() -> None:
    """Processor time, which busy machines stretch little, with slack for slow ones;
    benchmarks/view_time.py measures the marks, those of saved plans too."""
    from benchmarks.view_time import took

    assert took("--help", runs=3).cpu_s < 0.3


def test_a_saved_plan_is_shown_and_explained_without_anything_heavy() -> None:
    saved = str(ROOT / "tests" / "golden" / "staged.plan.json")
    code = (
        "import sys; from planner.cli import main; main(['show', sys.argv[1]]); main(['explain',"
        " sys.argv[1]]); print(sorted(m for m in ('numpy', 'onnx', 'scipy', 'ortools', 'jax') if m"
        " in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, saved],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, planner.cli as c; c.parser('make').format_help(); print(sorted(m for m in"
        " ('numpy', 'onnx', 'scipy', 'ortools', 'jax') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_planning_never_imports_jax() -> None:
    code = (
        f"import sys; from planner.cli import main; main([{TINY!r}, '--devices', '2', '--quiet']);"
        f" main(['check', {TINY!r}, '--against', 'llama-tiny.plan.json']); main(['explain',"
        " 'llama-tiny.plan.json', 'mlp']); main(['emit', 'llama-tiny.plan.json']); print(any(m =="
        " 'jax' or m.startswith('jaxlib') for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# --- errors

ERRORS: list[tuple[list[str], str, int]] = [
    (["deploy", "s.json"], "P001", 2),
    (["exlpain"], "did you mean 'explain'?", 2),
    (["serve", TINY], "plan MODEL --workload infer", 2),
    ([TINY], "P017", 2),
    ([TINY, "--devices", "0"], "P003", 2),
    ([TINY, "--devices", "eight"], "P003", 2),
    ([TINY, "--devices", "8", "--lora", "4"], "P039", 2),
    ([TINY, "--devices", "8", "--scaling", "weak"], "P002", 2),
    ([TINY, "--device", "8"], "did you mean '--devices'?", 2),
    (["verify", "tiny.json", "--target", "gpu:h900"], "P164", 2),
    (["verify", "tiny.json", "--target", "tpu:v5e:4x4"], "P165", 2),
    (["show", "tiny.json", "--html2", "r.html"], "P002", 2),
    (["show"], "P003", 2),
    (["show", "tiny.json", "extra"], "P002", 2),
    ([TINY, "--devices", "8", "--solver", "gurobi"], "P018", 2),
    ([TINY, "--devices", "8", "--mode", "wild"], "P018", 2),
    ([TINY, "--devices", "8", "--mode", "hybrid"], "P059", 2),
    ([TINY, "--devices", "8", "--objective", "speed"], "P018", 2),
    ([TINY, "--devices", "8", "--objective", "ttft"], "P222", 2),
    ([TINY, "--devices", "8", "--workload", "serve"], "P018", 2),
    ([TINY, "--devices", "8", "--backend", "torch"], "P018", 2),
    ([TINY, "--devices", "8", "--precision", "bf16"], "P018", 2),
    ([TINY, "--devices", "8", "--hardware", "h10"], "did you mean 'h100'", 2),
    ([TINY, "--devices", "9"], "P012", 2),
    ([TINY, "--topology", "none.toml"], "P013", 2),
    ([TINY, "--topology", "t.toml", "--devices", "8"], "P014", 2),
    ([TINY, "--topology", "t.toml", "--hardware", "h100-sxm"], "P016", 2),
    ([TINY, "--devices", "8", "--pin", "none.toml"], "P020", 2),
    ([TINY, "--devices", "8", "--pin", "tp=3"], "P022", 2),
    (["zoo:mlp-tiny", "--devices", "2", "--memory-limit", "1kB"], "P021", 3),
    (
        [TINY, "--devices", "8", "--mode", "data-parallel", "--pin", "tp=8"],
        "no plan is possible under these pins",
        3,
    ),
    ([TINY, "--devices", "8", "--memory-limit", "80"], "P003", 2),
    ([TINY, "--devices", "8", "--loss", "hinge"], "P030", 2),
    ([TINY, "--devices", "8", "--freeze", "nothing*"], "P036", 2),
    ([TINY, "--devices", "8", "--dim", "sq=4"], "P141", 2),
    ([TINY, "--devices", "8", "--dim", "seq"], "P003", 2),
    ([TINY, "--devices", "8", "--dim", "seq=x"], "P003", 2),
    ([TINY, "--devices", "8", "--time-limit", "0"], "P003", 2),
    ([TINY, "--devices", "8", "-o", "no/such/x.json"], "P056", 2),
    ([TINY, "--devices", "8", "-o", "folder"], "P056", 2),
    (["zoo:lama-tiny", "--devices", "8"], "P070", 2),
    (["zoo:llama-tiny,layer=2", "--devices", "8"], "P071", 2),
    (["none.onnx", "--devices", "8"], "P101", 2),
    (["folder/", "--devices", "8"], "P101", 2),
    ([TINY, "--devices", "8", "--batch", "8", "--tokens-per-step", "4096"], "P142", 2),
    (["garbage.onnx", "--devices", "8"], "P102", 2),
    (["empty.onnx", "--devices", "8"], "P102", 2),
    (["list.json", "--devices", "8"], "P074", 2),
    (["show", "none.json"], "P054", 2),
    (["show", "folder"], "P054", 2),
    (["show", "garbage.onnx"], "help: plan garbage.onnx --devices N", 2),
    (["emit", TINY], f"help: plan {TINY} --devices N", 2),
    (["show", "list.json"], "P054", 2),
    (["show", "deep.json"], "P054", 2),
    (["show", "future.json"], "P055", 2),
    (["show", "wrong.json"], "P057", 2),
    (["explain", "tiny.json", "nothing-like-it"], "P052", 2),
    (["explain", "tiny.json", "mlp", "--model", "none.onnx"], "P101", 2),
    (["emit", "tiny.json", "--model", "zoo:mlp-tiny"], "P051", 2),
    (["emit", "moved.json"], "P058", 2),
    (["diff", "tiny.json"], "P003", 2),
    (["check", TINY], "P003", 2),
    (["check", TINY, "--against", "tiny.json", "--format", "xml"], "P018", 2),
    (["check", "none.onnx", "--against", "tiny.json"], "P101", 2),
    (["check", TINY, "--against", "tiny.json", "--tolerance", "speed=1%"], "P064", 2),
    (["check", TINY, "--against", "tiny.json", "--budget", "none.toml"], "P065", 2),
    (["sweep", TINY, "--devices", "8..2"], "P003", 2),
    (["sweep", TINY, "--devices", "9,11"], "P012", 2),
    (["hardware", "none"], "P010", 2),
    (["hardware", "list.json"], "P010", 2),
    (["compare", TINY, "--devices", "8", "--mode", "manual"], "P018", 2),
    (["compare", TINY, "--devices", "8", "--solver", "dp"], "P002", 2),
    (["solve", "none.json"], "S001", 2),
    (["solve", "garbage.onnx"], "S002", 2),
    (["solve", "list.json"], "S003", 2),
    (["solve", "list.json", "--solver", "x"], "S004", 2),
]


@pytest.mark.parametrize(
    ("argv", "said", "code"), ERRORS, ids=[" ".join(a)[:60] for a, _, _ in ERRORS]
)
def test_errors(
    argv: list[str],
    said: str,
    code: int,
    plan_file: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = Path(plan_file).read_text()
    files = {
        "tiny.json": text,
        "list.json": "[]",
        "deep.json": "[" * 100_000,
        "future.json": text.replace('"format_version": "1.0"', '"format_version": "2.0"'),
        "wrong.json": text.replace('"zero_stage": ', '"zero_stage": "three", "was": '),
        "empty.onnx": "",
        "moved.json": (
            text.replace(f'"name": "{TINY}"', '"name": "gone.onnx"').replace(
                f'"source": "{TINY}"', '"source": "/else/gone.onnx"'
            )
        ),
        "t.toml": (
            'device = "h100-sxm"\n[[level]]\nname = "nvlink"\nsize = 4\nbandwidth = "450'
            ' GB/s"\nlatency = "2 us"\n'
        ),
    }
    for name, content in files.items():
        Path(name).write_text(content)
    Path("garbage.onnx").write_bytes(bytes(range(256)) * 8)
    Path("folder").mkdir()
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.startswith("error[")
        and said in err
        and "Traceback" not in err
        and "P000" not in err
    )
    assert {
        p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()
    } == before  # nothing is half-written


WORDS = [
    *VERBS,
    *(o for v in VERBS for o in parser(v)._option_string_actions),
    "8",
    "-1",
    "x=y",
    "none.onnx",
    "",
    "--",
    "=",
    "é\udc80",
    "tp=2",
    "1e400",
    "0x8",
    "--devices=8",
]


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=7))
def test_any_words_end_in_an_exit_code(argv: list[str]) -> None:
    """No arrangement of words raises, or is answered by an internal error. Planning itself is left
    out: no model is among the words."""
    import contextlib
    import io

    err, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = main(argv)
    assert code in (0, 2, 3) and "error[P000]" not in err.getvalue()
    assert code == 0 or err.getvalue().startswith(("error[", "usage: "))


def test_a_mistake_of_ours_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHWRIGHT_DEBUG")
    monkeypatch.setattr("planner.commands.sweep.series", lambda *texts: 1 // 0)
    assert main(["sweep", TINY, "--devices", "8"]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("error[P000]: internal error: ZeroDivisionError")
        and "test_cli.py" in err
        and "MESHWRIGHT_DEBUG" in err
    )
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["sweep", TINY, "--devices", "8"])


CODE = re.compile(r'"([PS]\d{3})"')


def test_every_error_code_is_documented_and_none_is_left_over() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    documented = re.findall(r"^\| ([PS]\d{3}) \|", text, re.M)
    used = {
        c
        for room in ("planner", "costmodels", "models_zoo")
        for p in (ROOT / room).rglob("*.py")
        for c in CODE.findall(p.read_text())
    }
    used &= _raised()
    assert len(documented) == len(set(documented))
    assert set(documented) == used
    assert all(
        len(cells) >= 3 and all(c.strip() for c in cells[:3])
        for line in text.splitlines()
        if line.startswith("| P")
        for cells in [line.strip("|").split("|")]
    )


def _raised() -> set[str]:
    """Codes that stand as the first argument of a call, which is how every PlanError is made."""
    import ast

    found = set()
    for room in ("planner", "costmodels", "models_zoo"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            if not CODE.search(text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    found |= {
                        a.value
                        for a in node.args[:1]
                        if isinstance(a, ast.Constant) and isinstance(a.value, str)
                    }
    return found


# --- terminals, pipes, interrupts


def in_terminal(
    *argv: str, env: dict[str, str] | None = None, interrupt_at: bytes = b""
) -> tuple[int, str]:
    """Run in a pseudo-terminal; optionally press Ctrl-C once when the output holds some bytes.
    (exit code, everything shown)."""
    import pty

    handle, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", *argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(env or {})},
    )
    os.close(slave)
    shown, deadline, pressed = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        try:
            chunk = os.read(handle, 65536)
        except OSError:  # how a closed pseudo-terminal ends on Linux
            break
        if not chunk:
            break
        shown += chunk
        if interrupt_at and not pressed and interrupt_at in shown:
            pressed = True
            process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    os.close(handle)
    return code, shown.decode(errors="replace")


def test_a_terminal_gets_colour_and_no_color_is_honoured() -> None:
    golden = str(Path(__file__).parents[1].joinpath("golden") / "gpt.plan.json")
    code, shown = in_terminal("show", golden, env={"NO_COLOR": "", "COLUMNS": "80"})
    assert code == 0 and "\x1b[1m" in shown
    code, shown = in_terminal("show", golden, env={"NO_COLOR": "1"})
    assert code == 0 and "\x1b" not in shown


def test_ctrl_c_writes_the_best_plan_and_exits_130(folder: Path) -> None:
    """Pressed when the live line first names a plan, on a model whose search goes on for
    seconds."""
    code, shown = in_terminal(
        "zoo:gpt2-xl",
        "--devices",
        "64",
        "--batch",
        "512",
        "-o",
        "s.json",
        "--memory-limit",
        "8GiB",
        interrupt_at=b"best ",
    )
    assert "searching" in shown
    assert code == 130, shown
    s = Strategy.load("s.json")
    assert s.solver["stopped"] == "interrupt" and "interrupted: wrote s.json" in shown
    assert [p.name for p in folder.iterdir()] == ["s.json"]


def test_not_a_terminal_shows_no_live_line(plan_file: str) -> None:
    done = run(TINY, "--devices", "8", "-o", "s.json")
    assert (
        done.returncode == 0
        and done.stderr.startswith("wrote s.json")
        and "\r" not in done.stderr + done.stdout
    )


def test_output_survives_a_closed_pipe_and_a_plain_encoding(plan_file: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m planner.cli show {plan_file} --json | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "{\n" and done.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "show", plan_file],
        env={**env, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and b" - " in done.stdout.splitlines()[0]
