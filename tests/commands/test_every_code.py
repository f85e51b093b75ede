"""Every documented error code is met by a test; here are those that no other test meets."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import NEXT_STEPS, PlanError
from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor
from planner.sharding.rule import PENDING, Split
from planner.strategy.strategy import Strategy

ROOT = Path(__file__).parents[2]


def code_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """(exit code, error code) of a command."""
    ended = main(list(argv))
    found = re.match(r"error\[(\w+)\]", capsys.readouterr().err)
    return ended, found[1] if found else ""


def test_a_search_that_is_stopped_at_once_has_no_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert code_of(
        capsys,
        "zoo:gpt2-small",
        "--devices",
        "8",
        "--time-limit",
        "0.000001",
        "--pin",
        "sequence=8",
        "-o",
        str(tmp_path / "p.json"),
    ) == (3, "P026")


def test_strict_refuses_operators_without_a_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 16]) for name in "xy")
    node = helper.make_node("Own", ["x"], ["y"], domain="own.ops")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("own.ops", 1)],
    )
    onnx.save(model, tmp_path / "m.onnx")
    ask = (
        str(tmp_path / "m.onnx"),
        "--devices",
        "2",
        "--workload",
        "infer",
        "-o",
        str(tmp_path / "p.json"),
    )
    assert code_of(capsys, *ask, "--strict") == (2, "P027")
    assert code_of(capsys, *ask) == (0, "")


def test_training_needs_something_to_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert code_of(
        capsys, "zoo:mlp-tiny", "--devices", "2", "--freeze", "*", "-o", str(tmp_path / "p.json")
    ) == (2, "P034")


def test_a_live_norm_refuses_microbatches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert code_of(
        capsys,
        "zoo:resnet-tiny,training=1",
        "--devices",
        "2",
        "--batch",
        "8",
        "--pin",
        "micro=2",
        "-o",
        str(tmp_path / "p.json"),
    ) == (2, "P037")


def test_terms_of_a_sum_are_made_by_operators_alone() -> None:
    """A weight cannot be asked for in pieces that are to be added."""
    tensors = {
        n: Tensor(n, (8, 8), "float32", role)
        for n, role in (("x", "input"), ("w", "weight"), ("y", "activation"))
    }
    graph = Graph(
        "g",
        (Node("add", "Add", ("x", "w"), ("y",), {}),),
        tensors,
        ("x",),
        ("y",),
        {"w": None},
        labels={"w": "w"},
    )
    with pytest.raises(PlanError, match="P041.*'x'"):
        derive(
            graph, Plan((("model", 2),), {"add": Split.of({PENDING: ["model"]})}), training=False
        )


def test_a_program_with_a_file_of_constants_does_not_go_to_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 4096]) for name in "xy")
    table = numpy_helper.from_array(np.random.default_rng(0).permutation(4096), "order")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "order"], ["y"], axis=1)], "g", [x], [y], [table]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx"
    )
    saved = str(tmp_path / "p.json")
    assert code_of(
        capsys,
        str(tmp_path / "m.onnx"),
        "--devices",
        "2",
        "--workload",
        "infer",
        "--quiet",
        "-o",
        saved,
    ) == (0, "")
    assert code_of(capsys, "emit", saved, "--model", str(tmp_path / "m.onnx"), "-o", "-") == (
        2,
        "P063",
    )


def test_a_strategy_without_its_graph() -> None:
    with pytest.raises(PlanError, match="P050"):
        _ = Strategy.load(ROOT / "tests" / "golden" / "gpt.plan.json").plan


def test_verify_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.verify import targets

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="P160"):
        targets.require(targets.parse_target("gpu:h100", 8))


def test_a_model_without_kernels_of_its_own() -> None:
    from planner.onnx_backend.program import source

    odd = {n: Tensor(n, (2,), "float8_e5m2", "input" if n == "x" else "activation") for n in "xy"}
    with pytest.raises(PlanError, match="P170"):
        source(Graph("g", (Node("i", "Identity", ("x",), ("y",), {}),), odd, ("x",), ("y",)))


def test_calibrating_where_jax_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.calibrate import measure

    monkeypatch.setattr(
        measure.subprocess,
        "run",
        lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "no backend"),
    )
    with pytest.raises(PlanError, match="P181.*"):
        measure.platform()


def test_every_documented_code_is_named_by_a_test() -> None:
    documented = re.findall(r"^\| ([PS]\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    named = {
        code
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        for text in _strings(path)
        for code in re.findall(r"[PS]\d{3}", text)
    }
    assert len(documented) > 100 and not [c for c in documented if c not in named]


def _strings(path: Path) -> list[str]:
    """The strings that a test works with: what its docstrings tell does not count."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    told = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    return [
        n.value
        for n in nodes
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in told
    ]


WITHOUT_A_FILE = ("verify", "onnx_backend", "calibrate", "launch", "solvers", "serving")
"""Rooms whose errors are of a host, of a caller or of a measurement."""


def test_every_error_about_what_was_given_has_a_next_step() -> None:
    """Its own, or that of its code."""
    raised: set[str] = set()
    for path in (ROOT / "planner").rglob("*.py"):
        if path.relative_to(ROOT / "planner").parts[0] in WITHOUT_A_FILE:
            continue
        if "PlanError" not in (text := path.read_text()):
            continue
        for call in ast.walk(ast.parse(text)):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "PlanError"
                and not any(k.arg == "help" for k in call.keywords)
            ):
                assert isinstance(call.args[0], ast.Constant), f"{path}:{call.lineno}"
                raised.add(call.args[0].value)
    assert raised == set(NEXT_STEPS), "say what to do, or keep NEXT_STEPS to those that do not"
    assert PlanError("P111", "x").help == (NEXT_STEPS["P111"],)
    assert PlanError("P111", "x", help=["y"]).help == ("y",)
