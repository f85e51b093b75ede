"""`plan explain --without` and `--slow`: what a node costs that is missing, or slower."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.machine.nodes import machines_without, nodes_of, with_slow_node
from planner.machine.topology import Level, Topology, device, for_devices
from planner.whatif.lost_nodes import slow_node, without_nodes

MODEL = "zoo:mlp-tiny"


@pytest.fixture(scope="module")
def planned() -> planner.Strategy:
    return planner.plan(MODEL, devices=32, batch=96, baselines=False)


def test_the_largest_even_machine_is_left() -> None:
    topology = for_devices("h100-sxm", 64)
    sizes = [[x.size for x in t.levels] for t in machines_without(topology, [3], 1024)]
    assert nodes_of(topology) == 8 and sizes == [[8, 7], [8, 4]]
    assert [t.devices for t in machines_without(topology, [3], 56)] == [56]
    assert [t.devices for t in machines_without(topology, [0, 1, 5], 1024)] == [40, 32]


def test_on_three_levels_whole_groups_of_one_of_them_are_left_out() -> None:
    """Nodes in racks: the missing node's rack, or its place in every rack, whichever is less."""
    link = Level("node", 8, 4e11, 3e-6)
    racks = Topology(
        device("h100-sxm"), (link, replace(link, name="rack", size=4), replace(link, size=6))
    )
    shapes = [[x.size for x in machines_without(racks, n, 1)[0].levels] for n in ([9], [9, 13, 5])]
    # node 9 is the second of the third rack; 5, 9 and 13 are the second ones of three racks
    assert shapes == [[8, 4, 5], [8, 3, 6]]
    assert [prod(s) for s in shapes] == [160, 144]


def test_a_torus_loses_whole_slices() -> None:
    slices = for_devices("tpu-v5e", 512)
    assert nodes_of(slices) == 2 and machines_without(slices, [1], 256)[0].devices == 256


def test_groups_keep_the_devices_that_are_left() -> None:
    link = Level("node", 8, 3e11, 3e-6)
    mixed = Topology.mixed(
        ((device("h100-sxm"), 16), (device("a100-80gb"), 8)), (link, replace(link, size=3))
    )
    assert machines_without(mixed, [2], 96)[0].device.name == "h100-sxm"
    left = machines_without(mixed, [0], 96)[0]
    assert [(d.name, n) for d, n in left.groups] == [("h100-sxm", 8), ("a100-80gb", 8)]
    slow = with_slow_node(mixed, 2, 0.5)
    assert slow.device.peak("bfloat16") == device("a100-80gb").peak("bfloat16") / 2


def test_a_missing_node_is_planned_without(planned: planner.Strategy) -> None:
    lost = without_nodes(planned, MODEL, [2])
    assert lost.of == 4 and lost.devices == 32 and lost.slow is None
    assert lost.today_s == pytest.approx(planned.costs["step_time_s"], rel=1e-5)
    assert lost.today_bytes == planned.costs["memory_per_device_bytes"]
    assert [w.devices for w in lost.without] == [24]  # 96 samples divide over 24 devices, too
    fresh = planner.plan(MODEL, devices=24, batch=96, baselines=False)
    assert lost.best is not None and lost.best.step_s == fresh.costs["step_time_s"]


def test_a_slow_node_is_waited_for_or_left_out(planned: planner.Strategy) -> None:
    same, half = (slow_node(planned, MODEL, 1, share) for share in (1.0, 0.5))
    assert same.slow is not None and half.slow is not None and half.best is not None
    assert same.slow[1] == pytest.approx(same.today_s)
    assert half.today_s < half.slow[1] <= 2 * half.today_s
    # The share from which on leaving it out pays is the one at which both take as long.
    assert 0 < half.pays_below <= 1 and half.best.step_s is not None
    if half.pays_below < 1:
        at = slow_node(planned, MODEL, 1, half.pays_below).slow
        assert at is not None and at[1] <= half.best.step_s


def test_words_and_json(
    planned: planner.Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    planned.save(file)
    assert main(["explain", str(file), "--without", "2"]) == 0
    text = capsys.readouterr().out
    assert "all nodes" in text and "without node 2" in text and "24" in text
    assert text.count("iB  ") == 2  # of both plans
    assert main(["explain", str(file), "--slow", "1=0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["slow"]["share"] == 0.5 and told["nodes"] == [1] and told["without"]
    assert main(["explain", str(file), "--slow", "1=0.5"]) == 0
    assert "node 1 at 50" in capsys.readouterr().out


def test_the_only_node_can_be_slow_and_not_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = planner.plan(MODEL, devices=8, batch=32, baselines=False)
    lost = slow_node(one, MODEL, 0, 0.5)
    assert lost.without == () and lost.best is None and lost.slow is not None
    with pytest.raises(PlanError, match="no node of 1 is left"):
        without_nodes(one, MODEL, [0])
    one.save(tmp_path / "p.json")
    assert main(["explain", str(tmp_path / "p.json"), "--slow", "0=0.5"]) == 0
    assert "no plan without it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--without", "4"], "the machine has 4 nodes"),
        (["--without", "0,1,2,3"], "no node of 4 is left"),
        (["--without", "x"], "names no nodes"),
        (["--without", "-1"], "names no nodes"),
        (["--without", "1", "--slow", "1=0.5"], "two questions"),
        (["--slow", "1"], "no node and share"),
        (["--slow", "1=0"], "no node and share"),
        (["--slow", "1=nan"], "no node and share"),
        (["--slow", "1=inf"], "no node and share"),
        (["--slow", "9=0.5"], "the machine has 4 nodes"),
        (["mlp", "--slow", "1=0.5"], "one node"),
        (["--json"], "--json is of --without"),
    ],
)
def test_what_cannot_be_asked(
    planned: planner.Strategy,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "p.json"
    planned.save(file)
    argv = ["explain", str(file), *(f"{a}" for a in arguments)]
    argv = [w for w in argv if w != "-1"]
    if "-1" in arguments:
        argv[-1] = "--without=-1"
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "error[P003]" in error and says in " ".join(error.split())


@pytest.mark.slow
def test_pins_that_have_no_place_on_what_is_left_are_said_to_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "zoo:gpt-tiny,layers=4"
    pinned = planner.plan(
        source, devices=32, batch=96, baselines=False, pins="pp=4,dp=8,micro=4,schedule=zb-h1"
    )
    assert [w.unpinned for w in without_nodes(pinned, source, [0]).without] == [True]
    pinned.save(tmp_path / "p.json")
    assert main(["explain", str(tmp_path / "p.json"), "--without", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without its pins" in said and "what the pins cost" in said
