"""The Python interface: plan, save, load, layouts, shardings, emit."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels.runtimes import load_runtime
from planner.pins.pins import Pins

TINY = Pins(mesh={"data": (2,), "model": (4,)})


@pytest.fixture(scope="module")
def strategy() -> planner.Strategy:
    return planner.plan("zoo:mlp-tiny", devices=8, batch=16, precision="fp32", pins=TINY)


def test_costs_add_up(strategy: planner.Strategy) -> None:
    c = strategy.cost
    assert c.memory_per_device_bytes == sum(c.memory_breakdown_bytes.values())
    assert c.step_time_s == pytest.approx(
        c.compute_time_s + c.exposed_communication_time_s + c.optimizer_time_s
    )
    low, high = c.step_time_range_s
    assert low < c.step_time_s < high and c.fit == "yes"
    peak = 67e12
    assert c.flops_per_device * c.distinct_work == pytest.approx(
        c.model_flops_utilization * peak * c.step_time_s, rel=1e-6
    )


def test_a_plan_whose_range_straddles_the_limit_is_tight() -> None:
    below, above = load_runtime("jax-shard_map").memory_spread
    one: dict[str, Any] = {
        "devices": 8,
        "batch": 16,
        "mode": "data-parallel",
        "pins": "dp=8,zero=0,micro=1,offload=none",
    }  # of several the one with room is taken
    need = planner.plan("zoo:mlp-tiny", **one).cost.memory_per_device_bytes
    fits = {}
    for share in (1 + 0.5 * above, 1 + 2 * above):
        cost = planner.plan("zoo:mlp-tiny", memory_limit_bytes=int(share * need), **one).cost
        assert cost.memory_range_bytes == [int(need * (1 - below)), int(need * (1 + above))]
        fits[share] = cost.fit
    assert list(fits.values()) == ["tight", "yes"]


def test_a_saved_strategy_is_the_same_strategy(strategy: planner.Strategy, tmp_path: Path) -> None:
    strategy.save(tmp_path / "s.json")
    loaded = planner.Strategy.load(tmp_path / "s.json")
    assert (
        loaded.to_json()
        == planner.Strategy.load(tmp_path / "s.json").to_json()
        == strategy.to_json()
    )
    assert list(json.loads(strategy.to_json())) == sorted(json.loads(strategy.to_json()))
    assert not list(tmp_path.glob(".s.json*"))


def test_a_strategy_of_another_major_version_is_refused(
    strategy: planner.Strategy, tmp_path: Path
) -> None:
    data = {**strategy.to_dict(), "format_version": "2.0"}
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(planner.PlanError, match=r"format 2\.0"):
        planner.Strategy.load(tmp_path / "s.json")


def test_another_model_s_file_is_not_overwritten(
    strategy: planner.Strategy, tmp_path: Path
) -> None:
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(planner.PlanError, match="exists"):
        strategy.save(tmp_path / "s.json", force=False)
    assert (tmp_path / "s.json").read_text() == "{}"


def test_every_parameter_has_a_layout_and_a_sharding(strategy: planner.Strategy) -> None:
    labels = [r["label"] for r in strategy.tensors.values() if r.get("label")]
    assert labels
    shardings = strategy.shardings(dict.fromkeys(labels))
    for label in labels:
        assert (
            strategy.layout(
                next(t for t, r in strategy.tensors.items() if r.get("label") == label)
            ).dims
            is not None
        )
        assert dict(shardings[label].mesh.shape) == {"data": 2, "model": 4}
    with pytest.raises(planner.PlanError, match="no parameter named"):
        strategy.shardings({"nonsense": None})


@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_emitted_text_is_python_with_the_plan_in_its_header(
    strategy: planner.Strategy, backend: str
) -> None:
    text = planner.emit(strategy, "zoo:mlp-tiny", backend=backend)
    tree = ast.parse(text)
    assert "8 devices" in (ast.get_docstring(tree) or "")


def test_a_strategy_of_another_model_is_refused(strategy: planner.Strategy) -> None:
    with pytest.raises(planner.PlanError, match="is another model"):
        planner.emit(strategy, "zoo:mlp-tiny,layers=7")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "P017"),
        ({"devices": 8, "hardware": "h1000"}, "P010"),
        ({"devices": 8, "precision": "bf17"}, "P018"),
        ({"devices": 0}, "P011"),
        ({"devices": 8, "hardware": "h100-sxm", "topology": "x.toml"}, "P016"),
        ({"devices": 9}, "P012"),
        ({"devices": 8, "solver": "magic"}, "P018"),
    ],
)
def test_bad_options_are_named(options: dict, code: str) -> None:
    with pytest.raises(planner.PlanError) as e:
        planner.plan("zoo:mlp-tiny", **options)
    assert e.value.code == code and e.value.exit_code == 2


def test_nothing_fits_is_exit_code_3() -> None:
    with pytest.raises(planner.PlanError) as e:
        planner.plan("zoo:mlp-tiny", devices=8, memory_limit_bytes=1000, remedies=False)
    assert e.value.exit_code == 3 and "no plan fits" in e.value.what


def test_a_memory_limit_above_the_device_is_said_to_have_no_effect() -> None:
    above, below = (
        planner.plan(
            "zoo:mlp-tiny",
            hardware="h100",
            devices=2,
            batch=8,
            memory_limit_bytes=n * 2**30,
            baselines=False,
        )
        for n in (200, 20)
    )
    assert above.costs["memory_limit_bytes"] < 80 * 2**30 and any(
        "--memory-limit 200.0 GiB is more than a device has" in a for a in above.assumptions
    )
    assert below.costs["memory_limit_bytes"] == 20 * 2**30 and not any(
        "--memory-limit" in a for a in below.assumptions
    )
