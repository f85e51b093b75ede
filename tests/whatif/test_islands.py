"""Machines of several kinds of device: unequal shares, beside equal ones and one kind alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.commands.exchange import machine_of
from planner.errors import PlanError
from planner.machine.topology import for_devices, from_json
from planner.machine.topology_file import described
from planner.pins.pins import Pins, parse_pins
from planner.report.commands import reproduce
from planner.strategy.read import load
from planner.strategy.strategy import Strategy
from planner.whatif.islands import shares_by_speed
from planner.whatif.reprice import own_model, replan, reprice
from planner.whatif.sweep import own_devices

BOTH = "8xh100-sxm+8xa100-80gb"
MODEL = "zoo:llama3-8b,layers=1,seq=2048"


@pytest.fixture(scope="module")
def shared() -> Strategy:
    return planner.plan(MODEL, hardware=BOTH, batch=512)


@pytest.fixture(scope="module")
def alone() -> dict[str, Strategy]:
    return {
        name: planner.plan(MODEL, hardware=name, devices=8, batch=512, baselines=False)
        for name in ("h100-sxm", "a100-80gb")
    }


def test_both_kinds_together_reach_the_sum_of_their_speeds(
    shared: Strategy, alone: dict[str, Strategy]
) -> None:
    fast, slow = (alone[name].costs["step_time_s"] for name in ("h100-sxm", "a100-80gb"))
    step = shared.costs["step_time_s"]
    assert 1 / step >= 0.95 * (1 / fast + 1 / slow)
    assert step < fast < slow and step < shared.baselines["even_shares"]["step_time_s"]


def test_microbatches_are_dealt_out_whole_and_the_last_island_sets_the_step(
    shared: Strategy,
) -> None:
    turns, rows = shared.techniques["islands"], shared.costs["islands"]
    assert sum(turns) == shared.techniques["microbatches"] and 512 % sum(turns) == 0
    assert [r["microbatches"] for r in rows] == [[n] for n in turns]
    assert [r["devices"] for r in rows] == [8, 8] and turns[0] > turns[1]
    busy = [r["busy_s"] for r in rows]
    assert max(busy) <= shared.costs["step_time_s"] * 1.001
    assert min(busy) > 0.8 * shared.costs["step_time_s"]
    assert dict(shared.mesh_shape)["island"] == 2 and shared.mesh[0]["name"] == "island"


def test_an_island_takes_what_its_devices_take_alone(
    shared: Strategy, alone: dict[str, Strategy]
) -> None:
    """With the figures of its own device file: each kind's share of the whole is near its share
    of the batch times what it takes alone."""
    total = shared.techniques["microbatches"]
    for row, name in zip(shared.costs["islands"], ("h100-sxm", "a100-80gb"), strict=True):
        part = sum(row["microbatches"]) / total
        assert row["busy_s"] == pytest.approx(part * alone[name].costs["step_time_s"], rel=0.1)


def test_a_plan_is_priced_where_all_devices_are_of_one_kind(shared: Strategy) -> None:
    """As the compiler of one kind is asked about it: the island with the most microbatches sets the
    step."""
    one_kind = for_devices("h100-sxm", 16)
    cost = reprice(shared, own_model(shared, MODEL), one_kind).cost
    [row] = cost.islands
    assert list(row.microbatches) == shared.techniques["islands"] and row.devices == 16
    assert cost.step_time_s == pytest.approx(shared.costs["islands"][0]["busy_s"], rel=0.05)


def test_what_is_sent_between_islands_is_priced(shared: Strategy) -> None:
    between = {k: s for k, s in shared.costs["exposed_s_by_collective"].items() if "island" in k}
    assert between and all(k.startswith("all-reduce") and s > 0 for k, s in between.items())


@pytest.mark.slow
def test_the_file_is_read_priced_and_planned_again(shared: Strategy, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    shared.save(file)
    again = load(file)
    topology = from_json(again.topology)
    assert topology.group_levels and topology.devices == 16
    model = own_model(again, MODEL)
    now = reprice(again, model, topology)
    assert now.cost.step_time_s == pytest.approx(shared.costs["step_time_s"], rel=1e-5)
    assert replan(again, model, topology).techniques == shared.techniques


def test_reports_say_the_shares(
    shared: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(str(shared).split())
    of = shared.techniques["microbatches"]
    assert f"8 x h100-sxm: {shared.techniques['islands'][0]} of {of} microbatches" in said
    assert "sums between islands" in said and "in equal shares" in said and "alone" in said
    shared.save(tmp_path / "p.json")
    for more in ([], ["mlp.up_proj", "--price", "--model", MODEL]):
        assert main(["explain", str(tmp_path / "p.json"), *more]) == 0
    assert "island" in capsys.readouterr().out
    html, trace = (str(tmp_path / name) for name in ("p.html", "p.trace.json"))
    assert main(["show", str(tmp_path / "p.json"), "--html", html, "--trace", trace]) == 0
    for option in ("--untied", "--minimal-pins"):
        assert main(["explain", str(tmp_path / "p.json"), option]) == 2
        assert "error[P059]" in capsys.readouterr().err


@pytest.mark.slow
def test_where_one_kind_is_faster_alone_it_is_planned_alone() -> None:
    """Shares of a small batch are coarse, and gradients cross the slow link."""
    plan = planner.plan("zoo:gpt2-small", hardware="8xh100-sxm+8xv100-32gb", batch=8)
    fast = planner.plan("zoo:gpt2-small", hardware="h100-sxm", devices=8, batch=8, baselines=False)
    assert plan.costs["step_time_s"] <= fast.costs["step_time_s"]
    if not plan.techniques.get("islands"):
        assert plan.topology["devices"] == 8 and plan.topology["device"] == "h100-sxm"
        assert any("the others are left out" in f["text"] for f in plan.findings)


@pytest.mark.slow
def test_a_kind_whose_devices_fill_no_nodes_alone_is_left_out_of_what_is_compared() -> None:
    """Nine of eight to a node are no machine by themselves; islands of one device are."""
    plan = planner.plan(
        "zoo:gpt2-small,layers=2", hardware="9xh100-sxm+8xa100-80gb", batch=272, baselines=False
    )
    assert plan.topology["devices"] in (17, 8)
    assert any("9 x h100-sxm alone" not in f["text"] for f in plan.findings)


@pytest.mark.slow
def test_groups_of_unlike_sizes_are_several_islands() -> None:
    plan = planner.plan(MODEL, hardware="16xh100-sxm+8xa100-80gb", batch=768, baselines=False)
    turns = plan.techniques["islands"]
    assert len(turns) == 3 and sum(turns) == plan.techniques["microbatches"]
    assert [len(r["microbatches"]) for r in plan.costs["islands"]] == [2, 1]
    assert max(turns[:2]) - min(turns[:2]) <= 1 and turns[2] < min(turns[:2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pins": "dp=16"}, "under a pinned mesh"),
        ({"workload": "infer"}, "of inference"),
        pytest.param({"objective": "memory"}, "under --objective memory", marks=pytest.mark.slow),
        pytest.param({"runtime": "megatron"}, "under --runtime megatron", marks=pytest.mark.slow),
        ({"backend": "jit"}, "under --runtime jax-jit"),
        ({"pins": "copies=2"}, "with copies pinned"),
    ],
)
def test_where_shares_are_equal_it_says_why(options: dict, why: str) -> None:
    plan = planner.plan(
        "zoo:gpt2-small,layers=2", hardware=BOTH, batch=64, baselines=False, **options
    )
    assert not plan.techniques.get("islands") and plan.topology["devices"] == 16
    assert any(f["text"] == f"unequal shares are not planned {why}" for f in plan.findings)


@pytest.mark.parametrize(
    ("hardware", "devices", "code"),
    [
        ("0xh100-sxm+8xa100-80gb", None, "P012"),
        ("8xh100-sxm+a100-80gb", None, "P012"),
        ("8xh100-sxm+8x", None, "P012"),
        ("8xh100-sxm+8xnothing", None, "P010"),
        ("8xh100-sxm+8xa100-80gb", 8, "P014"),
        ("8xh100-sxm+8xtpu-v5e", None, "P012"),
        ("8xh100-sxm+8xcpu", None, "P012"),
        ("123456789012xh100-sxm+8xa100-80gb", None, "P012"),
    ],
)
def test_names_of_groups_that_cannot_be(hardware: str, devices: int | None, code: str) -> None:
    with pytest.raises(PlanError) as e:
        for_devices(hardware, devices)
    assert e.value.code == code


def test_one_kind_twice_is_that_kind() -> None:
    assert for_devices("8xh100-sxm+8xh100") == for_devices("h100-sxm", 16)
    assert described("8xh100") == for_devices("h100-sxm", 8)


def test_so_many_nodes_of_a_machine_may_be_named() -> None:
    """By what its provider calls them; a device of that number is not meant."""
    assert described("4xp5.48xlarge") == described("aws-p5", 32)
    assert described("4xp5.48xlarge", 32) == described("aws-p5", 32)
    with pytest.raises(PlanError, match="has 32"):
        described("4xp5.48xlarge", 8)
    assert own_devices("2xp5.48xlarge") == 16 and own_devices("8xh100") == 8


def test_islands_cannot_be_pinned() -> None:
    with pytest.raises(PlanError, match="islands = 3 is not possible"):
        parse_pins("islands=3")
    with pytest.raises(PlanError, match="contradicts the name"):
        Pins(mesh={"island": (2,), "data": (8,)})


@pytest.mark.parametrize(
    "edit",
    [
        {"islands": [1, 1]},
        {"islands": [4]},
        {"islands": [0, 4]},
        {"islands": [-1, 5]},
        {"islands": []},
        {"copies": 2},
        {"offload": ["optimizer"]},
    ],
)
def test_hands_that_edit_a_file_are_told(
    shared: Strategy, edit: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    shared.save(file)
    data = json.loads(file.read_text())
    data["techniques"] |= edit
    file.write_text(json.dumps(data))
    assert main(["emit", str(file), "-o", str(tmp_path / "p.py")]) == 2
    assert "error[P06" in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 3)), min_size=2, max_size=3),
    st.integers(3, 9),
)
def test_no_other_deal_ends_earlier(seconds: Sequence[tuple[float, float]], total: int) -> None:
    def end(turns: Sequence[int]) -> float:
        return max(f + n * e for (f, e), n in zip(seconds, turns, strict=True))

    turns = shares_by_speed(seconds, total)
    every = (t for t in product(range(1, total), repeat=len(seconds)) if sum(t) == total)
    assert sum(turns) == total and min(turns) >= 1
    assert end(turns) <= min(map(end, every)) + 1e-9


def test_commands_name_the_machine_as_hardware_takes_it(shared: Strategy) -> None:
    assert f"--hardware {BOTH}" in reproduce(shared)
    assert machine_of(shared) == f"--devices 16 --hardware {BOTH}"


def test_annotations_of_islands_lead_to_no_plan_as_islands_are_not_pinned(
    shared: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.save(tmp_path / "p.json")
    assert main(["annotate", str(tmp_path / "p.json"), "-o", str(tmp_path / "p.onnx")]) == 0
    said = capsys.readouterr().err
    assert "nodes annotated" in said and "--pin annotated" not in said
