"""Modes hybrid and propagate: what is given holds, what is not stays whole or follows its
neighbours, and the programs compute what the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.cli import main
from planner.errors import PlanError
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pins.pins import Pins, from_table
from planner.space.propagation import propagated
from planner.strategy.strategy import Strategy

LLAMA = "zoo:llama-tiny,heads=8,kv_heads=4"
MESH = {"data": 2, "tensor": 4}
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
BY_HAND = {
    "mesh": MESH,
    **{f"*.{n}.weight": {"layout": [[], ["tensor"]]} for n in COLUMNS},
    **{f"*.{n}.weight": {"layout": [["tensor"], []]} for n in ROWS},
}
A_FEW = {
    "mesh": MESH,
    "*.q_proj.weight": {"split": {"b0": ["data"], "n": ["tensor"]}},
    "*.up_proj.weight": {"split": {"n": ["tensor"]}},
}


def plan(mode: str, table: dict[str, Any], source: str = LLAMA, **more: Any) -> Strategy:
    return planner.plan(
        source, devices=8, batch=16, mode=mode, pins=from_table(table), baselines=False, **more
    )


@pytest.fixture(scope="module")
def hybrid() -> Strategy:
    return plan("hybrid", BY_HAND)


def layouts(s: Strategy) -> dict[str, Any]:
    return {row["label"]: row["layout"] for row in s.tensors.values() if row.get("label")}


def test_hybrid_is_what_was_said_and_the_data_axis(hybrid: Strategy) -> None:
    found = layouts(hybrid)
    for name, layout in found.items():
        part = name.split(".")[-2]
        assert layout == (
            [[], ["tensor"]]
            if part in COLUMNS
            else [["tensor"], []]
            if part in ROWS
            else [[] for _ in layout]
        ), name
    t = hybrid.techniques
    assert (t["zero_stage"], t["microbatches"], t["recompute"]) == (0, 1, "none")
    rows, layers = 16 // 2 * 16, 2
    assert (
        hybrid.costs["communication_bytes_per_device"]["all-reduce"]["tensor"]["payload"]
        == layers * 4 * rows * 64 * 2
    ), "Megatron's two all-reduces forward and two backward"
    assert set(hybrid.costs["communication_bytes_per_device"]) == {"all-reduce"}
    attention = next(row for row in hybrid.nodes.values() if row["op"] == "Attention")
    assert attention["split"] == {"b": ["data"], "g": ["tensor"]}, "follows its neighbours"


def test_techniques_of_hybrid_are_those_pinned() -> None:
    t = plan("hybrid", {**BY_HAND, "techniques": {"zero_stage": 1, "microbatches": 2}}).techniques
    assert (t["zero_stage"], t["microbatches"], t["recompute"]) == (1, 2, "none")
    with pytest.raises(PlanError, match="P021"):
        plan("hybrid", BY_HAND, memory_limit_bytes=2**20, remedies=False)


def test_two_annotations_spread_to_megatron_s_plan(hybrid: Strategy) -> None:
    spread = plan("propagate", A_FEW)
    assert {k: row["split"] for k, row in spread.nodes.items()} == {
        k: row["split"] for k, row in hybrid.nodes.items()
    }
    assert (
        layouts(spread) == layouts(hybrid)
        and spread.costs["step_time_s"] == hybrid.costs["step_time_s"]
    )


def _base(source: str) -> GraphFacts:
    from planner.workload.open import open_model

    return GraphFacts.of(open_model(source, 8, batch=16).graph(1), training=True)


@pytest.mark.parametrize("source", [LLAMA, "zoo:gpt-tiny", "zoo:t5-tiny", "zoo:mlp-tiny"])
def test_annotations_hold_and_what_none_reaches_stays_whole(source: str) -> None:
    base, mesh = _base(source), pinned_mesh(for_devices("h100", 8), MESH)
    i = next(
        i for i, node in enumerate(base.graph.nodes) if node.op == "MatMul" and i == base.shared[i]
    )
    node = base.graph.nodes[i]
    held = from_table({"mesh": MESH, node.id: {"split": {"n": ["tensor"]}}}).allowed(base, MESH)
    found = propagated(base, mesh, held)
    assert set(found) == set(base.times) and all(len(splits) == 1 for splits in found.values())
    assert found[base.shared[i]][0].axes("n") == ("tensor",)
    assert all(split.used <= {"tensor"} for (split,) in found.values()), (
        "nobody spoke of the data axis"
    )
    nothing = propagated(base, mesh, Pins().allowed(base, MESH))
    assert all(not split.used for (split,) in nothing.values())
    assert propagated(base, mesh, held) == found


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        ("hybrid", {"mesh": MESH}),
        ("propagate", {"*.q_proj.weight": {"split": {"n": ["tensor"]}}}),
        ("hybrid", {}),
    ],
)
def test_both_modes_need_a_mesh_and_splits(mode: str, table: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"P059.*--mode {mode}") as e:
        plan(mode, table)
    assert "docs/modes.md" in e.value.help[0]


def test_a_parameter_s_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="P025"):
        plan("hybrid", {"mesh": MESH, "*.q_proj.weight": {"layout": [["tensor"], ["tensor"]]}})


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mode", "pins"),
    [
        (
            "hybrid",
            '[mesh]\ndata = 2\ntensor = 2\n["layers.0.linear.weight"]\nlayout = [[], ["tensor"]]\n',
        ),
        (
            "propagate",
            (
                '[mesh]\ndata = 2\ntensor = 2\n["layers.0.linear.weight"]\nsplit = { m = ["data"],'
                ' n = ["tensor"] }\n'
            ),
        ),
    ],
)
def test_what_is_planned_so_is_verified(
    mode: str,
    pins: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.toml").write_text(pins)
    assert (
        main(
            [
                "zoo:mlp-tiny",
                "--devices",
                "4",
                "--batch",
                "8",
                "--mode",
                mode,
                "--pin",
                "pins.toml",
                "-o",
                "p.json",
                "--precision",
                "fp32",
            ]
        )
        == 0
    )
    assert "tensor=2" in capsys.readouterr().out
    assert main(["verify", "p.json"]) == 0
