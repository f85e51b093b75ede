"""`plan explain FILE NODE` answers from the file: what it tells is what the model, opened again,
would say; after an edit the model is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import main
from planner.commands.common import priced
from planner.pricing.breakdown import details
from planner.report.explain import explain_node, find_nodes
from planner.report.explain_stages import named_repeat
from planner.strategy.strategy import Strategy

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": (
        "zoo:gpt-tiny,layers=4",
        {"devices": 8, "batch": 16, "pins": "dp=4,tp=2,micro=2,zero=2"},
    ),
    "gpipe": (
        "zoo:gpt-tiny,layers=4",
        {
            "devices": 8,
            "batch": 16,
            "pins": "pp=2,tp=2,dp=2,micro=4,schedule=gpipe,recompute=block",
        },
    ),
    "interleaved": (
        "zoo:gpt-tiny,layers=4",
        {"devices": 8, "batch": 16, "pins": "pp=2,tp=2,dp=2,micro=4,virtual=2"},
    ),
    "experts": ("zoo:mixtral-tiny", {"devices": 4, "batch": 16}),
    "infer": ("zoo:resnet-tiny", {"devices": 4, "batch": 8, "workload": "infer"}),
}


def made(name: str) -> Strategy:
    spec, options = CASES[name]
    return planner.plan(spec, baselines=False, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_the_file_says_what_the_model_would(name: str, tmp_path: Path) -> None:
    s = made(name)
    s.save(tmp_path / "s.json")
    kept = Strategy.load(tmp_path / "s.json")
    p = priced(kept, CASES[name][0])
    fresh = details(p.base, p.runs, p.flow, p.pricer)
    assert fresh.keys() == kept.details.keys() == kept.nodes.keys()
    for node, row in fresh.items():
        assert explain_node(kept, node, 200, detail=row) == explain_node(
            kept, node, 200, detail=kept.details[node]
        )
    if (
        name != "infer"
    ):  # of what the details name, all seconds of kernels and collectives are those of the price
        kernels = sum(row["kernels"]["step_s"] for row in kept.details.values())
        assert kernels == pytest.approx(kept.costs["compute_time_s"], rel=1e-4)


def test_answering_opens_no_model(tmp_path: Path) -> None:
    made("interleaved").save(tmp_path / "s.json")
    code = f"""
import sys
from planner.cli import main
assert main(["explain", {str(tmp_path / "s.json")!r}, "h.3.mlp.c_fc"]) == 0
assert not {{"onnx", "numpy", "models_zoo", "jax"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "repeat 3 is on stage 1" in done.stdout and "bound by" in done.stdout


def test_after_an_edit_by_hand_the_model_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s = made("data")
    node = find_nodes(s, "mlp.c_fc")[0]
    path = tmp_path / "s.json"
    s.save(path)
    data = json.loads(path.read_text())
    data["nodes"][node]["split"] = {"b0": ["data"], "n": ["tensor"]}
    path.write_text(json.dumps(data))
    assert main(["explain", str(path), node]) == 0
    edited = capsys.readouterr().out
    assert "split   b0/data, n/tensor\n" in edited and "[k, n/tensor]" in edited
    s.save(path)
    assert main(["explain", str(path), node]) == 0
    from_file = capsys.readouterr().out
    assert main(["explain", str(path), node, "--model", CASES["data"][0]]) == 0
    assert capsys.readouterr().out == from_file != edited


def test_an_older_file_without_details_is_explained_by_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s = made("data")
    for strategy in (s, replace(s, details={})):
        strategy.save(tmp_path / "s.json")
        assert main(["explain", str(tmp_path / "s.json"), "mlp.c_fc"]) == 0
    assert "details" not in json.loads((tmp_path / "s.json").read_text())
    assert capsys.readouterr().out.count("bound by") == 2


def test_names_tell_repeats_apart(tmp_path: Path) -> None:
    """A block of two layers: the fourteenth layer is the second one of the seventh repeat."""
    s = made("data")
    block = {
        **s.blocks[0],
        "body": ["/model/layers.0/mlp/up", "/model/layers.1/mlp/up", "/model/layers.1/mlp/up_2"],
        "period": 3,
        "repeats": 8,
        "scope": "/model/layers.",
        "step": 2,
    }
    row = {**next(iter(s.nodes.values())), "time_s": 1.0}
    two = replace(
        s,
        blocks=(block,),
        nodes={n: {**row, "time_s": row["time_s"] - k} for k, n in enumerate(block["body"])},
    )
    assert (
        find_nodes(two, "layers.13.mlp.up")[0] == block["body"][1]
        and named_repeat(two, block["body"][1], "layers.13.mlp.up") == 6
    )
    assert named_repeat(two, block["body"][0], "model.layers.4.mlp.up.weight") == 2
    for text in (
        "mlp.up",
        "layers.16.mlp.up",
        "layers.13.mlp.up",
        "up_2",
    ):  # no number, past the end, of the other layer, a number that tells no repeat
        assert named_repeat(two, block["body"][0], text) == -1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["kernels"].update(times="many"), "times is str"),
        (lambda row: row["operands"][0]["layout"].pop(), "differ in length"),
        (
            lambda row: row["moves"].append(
                {
                    "kind": "x",
                    "axes": "",
                    "phase": "",
                    "tensor": "",
                    "count": 0,
                    "payload_bytes": 1,
                    "time_s": 0.0,
                }
            ),
            "count of a collective",
        ),
        (lambda row: row.pop("rule"), "rule is missing"),
        (lambda row: row["kernels"].update(forward_s=float("nan")), "NaN"),
    ],
)
def test_details_of_the_wrong_shape_are_refused(
    change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    made("data").save(path)
    data = json.loads(path.read_text())
    change(next(row for row in data["details"].values() if len(row["operands"]) > 1))
    path.write_text(json.dumps(data))
    assert main(["explain", str(path), "mlp.c_fc"]) == 2
    assert ("P054" if said == "NaN" else "P057") in (err := capsys.readouterr().err) and said in err


def test_a_numbered_node_is_found_by_its_parameter() -> None:
    """torch's exporter calls nodes node_MatMul_6 and keeps the module's path in the parameter's
    name alone."""
    s = made("data")
    numbered = {n: f"node_{i}" for i, n in enumerate(s.nodes)}
    there = replace(
        s,
        nodes={
            numbered[n]: {**row, "outputs": [f"val_{i}"]}
            for i, (n, row) in enumerate(s.nodes.items())
        },
        details={numbered[n]: row for n, row in s.details.items()},
    )
    name = next(n for n in s.nodes if n.endswith("c_fc/MatMul"))
    assert (
        find_nodes(there, "mlp.c_fc")[0]
        == numbered[name]
        == find_nodes(there, "h.0.mlp.c_fc.weight")[0]
        == find_nodes(there, "h.1.mlp.c_fc")[0]
    )


def test_collectives_of_weights_are_those_of_all_repeats() -> None:
    """They were those of the first layer's weight beside kernels and activations of all layers."""
    s = planner.plan(
        "zoo:gpt-tiny,layers=4", devices=8, batch=16, pins="dp=8,zero=3", baselines=False
    )
    moves = {  # a weight that two nodes read is listed at both
        (m["kind"], m["axes"], m["phase"], m["tensor"]): m["payload_bytes"]
        for row in s.details.values()
        for m in row["moves"]
    }
    for kind in ("all-gather", "reduce-scatter"):
        listed = sum(size for key, size in moves.items() if key[0] == kind)
        whole = s.costs["communication_bytes_per_device"][kind].values()
        assert listed == sum(c["payload"] for c in whole)
