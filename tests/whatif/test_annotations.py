"""`plan explain --minimal-pins`: planning with what it prints makes the same plan again, and
nothing smaller does."""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.cli import main
from planner.commands.common import priced
from planner.errors import PlanError
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import Mesh, for_devices
from planner.pins.pins import from_table
from planner.sharding.candidates import candidates
from planner.sharding.rule import Split
from planner.space.propagation import Spread
from planner.strategy.strategy import Strategy
from planner.whatif.fewest_annotations import fewest, pins_file
from planner.workload.open import open_model

LLAMA = "zoo:llama-tiny,heads=8,kv_heads=4"
MESH = {"data": 2, "tensor": 4}
TWO_NODES = """device = "h100-sxm"
[[level]]
name = "node"
size = 4
bandwidth = "450 GB/s"
latency = "2 us"
[[level]]
name = "net"
size = 2
bandwidth = "50 GB/s"
latency = "8 us"
"""


def plan(source: str = LLAMA, **how: Any) -> Strategy:
    return planner.plan(source, **{"devices": 8, "batch": 16, "baselines": False, **how})


def decided(s: Strategy) -> list[Any]:
    """Everything that a plan decides, and its price; a plan from no search has no runner-up."""
    return [
        s.mesh,
        {n: {k: v for k, v in row.items() if k != "runner_up"} for n, row in s.nodes.items()},
        s.tensors,
        s.techniques,
        s.blocks,
        s.costs,
    ]


def pins_of(s: Strategy, source: str) -> str:
    p = priced(s, source)
    return pins_file(
        s, fewest(p.base, Mesh(p.mesh.inner), {c: p.flow.split(c) for c in p.base.times})
    )


MEGATRON = "dp=2,tp=4,tensor=megatron"


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("source", "how"),
    [
        (LLAMA, {"pins": f"{MEGATRON},zero=1"}),
        (LLAMA, {"pins": "dp=4,tp=2,tensor=megatron-sp,micro=2,recompute=block,zero=3"}),
        (LLAMA, {"pins": "dp=8,zero=1,zero_group=4"}),
        (LLAMA, {"pins": "dp=8,zero=1,bucket=1MiB,offload=optimizer"}),
        (LLAMA, {"workload": "infer", "pins": MEGATRON}),
        ("zoo:gpt-tiny,layers=4", {"pins": "pp=2,virtual=2,tp=4,micro=4,tensor=megatron"}),
        ("zoo:resnet-tiny", {"pins": "dp=4,tp=2,tensor=megatron"}),
        ("zoo:mixtral-tiny", {"pins": "expert=4,dp=2"}),
        ("zoo:mlp-tiny", {}),
        pytest.param("zoo:t5-tiny", {"pins": "dp=4,tp=2"}, marks=pytest.mark.slow),
        pytest.param("zoo:bert-tiny", {"pins": MEGATRON}, marks=pytest.mark.slow),
    ],
)
def test_planning_with_the_pins_makes_the_plan_again(
    source: str, how: dict[str, Any], tmp_path: Path
) -> None:
    made = plan(source, **how)
    path = tmp_path / "pins.toml"
    path.write_text(pins_of(made, source))
    assert decided(plan(source, **{**how, "pins": str(path)}, mode="propagate")) == decided(made)


def test_a_plan_from_two_annotations_takes_two() -> None:
    two = {
        "mesh": {"data": 2, "tensor": 4},
        "*.q_proj": {"split": {"b0": ["data"], "n": ["tensor"]}},
        "*.up_proj": {"split": {"n": ["tensor"]}},
    }
    made = plan(pins=from_table(two), mode="propagate")
    assert pins_of(made, LLAMA).count("split") == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_smaller_set_makes_it(seed: int) -> None:
    """Of what two annotations give, with up to two classes decided otherwise: every smaller set of
    annotations is tried."""
    base, mesh, draw = (
        GraphFacts.of(open_model("zoo:mlp-tiny", 8, batch=16).graph(1), training=True),
        pinned_mesh(for_devices("h100", 8), MESH),
        random.Random(seed),
    )
    spread = Spread(base, mesh)

    def some(count: int) -> dict[int, tuple[Split, ...]]:
        return {
            c: (draw.choice(base.reachable(c, candidates(base.rules[c], MESH))),)
            for c in draw.sample(sorted(base.times), count)
        }

    splits = (
        dict.fromkeys(base.times, Split())
        | spread.run(some(2))
        | {c: s for c, (s,) in some(seed % 3).items()}
    )
    found = fewest(base, mesh, splits)
    assert set(spread.run(from_table(found).allowed(base, MESH)).items()) >= {
        (c, s) for c, s in splits.items() if s.pairs
    }
    for chosen in (s for n in range(1, len(found)) for s in combinations(base.times, n)):
        reached = spread.run({c: (splits[c],) for c in chosen})
        assert any(reached.get(c, Split()) != s for c, s in splits.items()), chosen


def test_the_command_prints_a_file_for_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO_NODES)
    options = ["--topology", "two.toml", "--batch", "16", "--quiet"]
    assert main([LLAMA, *options, "--pin", "dp=4,tp=2,tensor=megatron", "-o", "a.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "a.json", "--minimal-pins"]) == 0
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert "--mode propagate --pin" in said and f"{out.count('split')} of " in said
    Path("pins.toml").write_text(out)
    assert tomllib.loads(out)["mesh"] == {
        "data": {"size": 4, "level": ["node", "net"]},
        "tensor": {"size": 2, "level": "node"},
    }
    assert main([LLAMA, *options, "--mode", "propagate", "--pin", "pins.toml", "-o", "b.json"]) == 0
    assert decided(Strategy.load("b.json")) == decided(Strategy.load("a.json"))
    Path("old.json").write_text(
        re.sub(r'"tensor"(?!\s*:)', '"model"', Path("a.json").read_text())
    )  # a file of before calls the axis so
    assert main(["explain", "old.json", "--minimal-pins"]) == 0
    assert capsys.readouterr().out == out.replace("tensor = {", "model = {").replace(
        '"tensor"', '"model"'
    )
    assert main(["explain", "a.json", "lm_head", "--minimal-pins"]) == 2
    assert "P003" in capsys.readouterr().err


def _mesh(tmp_path: Path, table: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    machine = tmp_path / "two.toml"
    machine.write_text(TWO_NODES)
    return planner.plan(
        "zoo:mlp-tiny",
        topology=machine,
        batch=16,
        baselines=False,
        pins=from_table({"mesh": table}),
    ).mesh_shape


def test_axes_lie_on_the_levels_that_are_named(tmp_path: Path) -> None:
    assert _mesh(tmp_path, {"tensor": {"size": 2, "level": "net"}, "data": 4}) == (
        ("tensor", 2),
        ("data", 4),
    )
    assert _mesh(tmp_path, {"tensor": {"size": 2, "level": "node"}, "data": 4}) == (
        ("data", 4),
        ("tensor", 2),
    )
    assert _mesh(tmp_path, {"tensor": 2, "data": 4}) == (("data", 4), ("tensor", 2))
    assert _mesh(tmp_path, {"tensor": {"size": [2, 4], "level": "node"}}) in (
        (("data", 4), ("tensor", 2)),
        (("data", 2), ("tensor", 4)),
    )
    for fault, code in (
        ({"size": 8, "level": "net"}, "P022"),
        ({"size": 2, "level": "nvlink"}, "P022"),
        ({"size": 2, "level": 3}, "P020"),
        ({"size": 2, "links": "net"}, "P020"),
    ):
        with pytest.raises(PlanError, match=code):
            _mesh(tmp_path, {"tensor": fault})


def test_a_node_s_own_name_means_that_node_alone() -> None:
    base = GraphFacts.of(open_model("zoo:mlp-tiny", 8, batch=16).graph(1), training=True)
    read = next(n for n in base.graph.nodes if n.outputs[0] in base.graph.consumers)
    graph = replace(
        base.graph,
        nodes=tuple(replace(n, id=n.outputs[0]) if n is read else n for n in base.graph.nodes),
    )
    renamed = GraphFacts.of(graph, training=True)
    assert list(from_table({read.outputs[0]: {"split": {}}}).allowed(renamed, MESH)) == [
        renamed.shared[graph.nodes.index(next(n for n in graph.nodes if n.id == read.outputs[0]))]
    ]
