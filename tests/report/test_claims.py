"""A printed bound holds for what it says it covers: pins are drawn, narrowed by more pins, and no
plan of the narrower ones is below the bound of the wider."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import PlanError
from planner.report.proof import covered, extent
from planner.strategy.strategy import Strategy

ROUNDED = 1e-6
MODELS = (
    "zoo:gpt-tiny,layers=4",
    "zoo:llama-tiny,layers=4",
    "zoo:mixtral-tiny",
    "zoo:mlp-tiny",
    "zoo:t5-tiny",
    "zoo:gpt2-small,layers=4",
    "zoo:llama3-8b,layers=4",
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": (2, 4),
    "data": (1, 2, 4, 8),
    "tensor": (2, 4),
    "sequence": (2,),
    "microbatches": (1, 2, 4, 8),
    "zero_stage": (0, 1, 2, 3),
    "recompute": ("none", "block", "block-keep"),
    "copies": (1, 2),
    "schedule": ("1f1b", "interleaved"),
    "offload": ("none", "optimizer"),
}
FREE = ("data", "stage", "microbatches", "zero_stage", "recompute")
"""What the wider pins are drawn of: those that leave most."""


def mesh_name(s: Strategy) -> str:
    """A plan's mesh as `solver.covers` names it."""
    sizes = [(a["name"], a["size"]) for a in s.mesh]
    stages = next((n for name, n in sizes if name == "stage"), 1)
    inner = "x".join(str(n) for name, n in sizes if name != "stage") or "1"
    return f"{stages}|{inner}" if stages > 1 else inner


def is_covered(narrow: Strategy, wide: Strategy) -> bool:
    """Whether the wider search says that its bound holds for the plan."""
    rows = [
        r
        for r in wide.solver.get("covers", ())
        if r["splits"] == "all"
        and mesh_name(narrow) in r["meshes"]
        and narrow.techniques["microbatches"] in r["microbatches"]
    ]
    if narrow.costs["memory_per_device_bytes"] > wide.solver.get(
        "bound_memory_bytes", float("inf")
    ):
        return False
    alike = (
        narrow.chosen.overlapped_microbatches == 1 and narrow.chosen.offload == wide.chosen.offload
    )
    return (
        bool(rows)
        and alike
        and narrow.techniques["fused_collective_bytes"]
        in (0, wide.techniques["fused_collective_bytes"])
    )


def planned(source: str, devices: int, batch: int, pins: dict[str, Any]) -> Strategy | None:
    """The plan under pins; None where there is none."""
    try:
        text = ",".join(f"{k}={v}" for k, v in pins.items())
        return planner.plan(
            source,
            devices=devices,
            batch=batch,
            baselines=False,
            remedies=False,
            **({"pins": text} if pins else {}),
        )
    except PlanError as e:
        assert e.code != "P000", e
        return None


def hunt(seed: int, draws: int) -> tuple[int, int]:
    """(pairs compared, pairs that the bound covered)"""
    rng, compared, held = random.Random(seed), 0, 0
    for _ in range(draws):
        source, devices = rng.choice(MODELS), rng.choice((4, 8, 16))
        wide_pins = {k: rng.choice(CHOICES[k]) for k in rng.sample(FREE, rng.randrange(3))}
        more = [k for k in CHOICES if k not in wide_pins]
        narrow_pins = wide_pins | {
            k: rng.choice(CHOICES[k]) for k in rng.sample(more, rng.randint(1, 4))
        }
        wide, narrow = (planned(source, devices, 32, pins) for pins in (wide_pins, narrow_pins))
        if wide is None or narrow is None or not wide.solver.get("bound_s"):
            continue
        compared += 1
        if is_covered(narrow, wide):
            held += 1
            bound, step = wide.solver["bound_s"], narrow.costs["step_time_s"]
            assert step >= bound * (1 - ROUNDED), (
                f"{source} on {devices}: {narrow_pins} takes {step}, below {bound} of {wide_pins}"
                f" ({covered(wide.solver)})"
            )
    return compared, held


@pytest.mark.slow
def test_no_plan_of_narrower_pins_is_below_a_bound_that_covers_it() -> None:
    compared, held = hunt(seed=26, draws=20)
    assert compared >= 8 and held >= 3, (compared, held)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_plan_of_many_narrower_pins_is_below(seed: int) -> None:
    compared, held = hunt(seed, draws=60)
    assert compared >= 20 and held >= 8, (compared, held)


def test_what_a_bound_covers_is_said_and_kept(tmp_path: Path) -> None:
    """In the file with its meshes, in words with their number; an optimum is one of these."""
    found = planner.plan("zoo:gpt-tiny", devices=8, batch=32)
    rows = found.solver["covers"]
    names = [m for row in rows for m in row["meshes"]]
    assert {"8", "4x2", "2x4", "2|4", "2|2x2"} <= set(names) and len(names) == len(set(names))
    assert covered(found.solver) == f"the {len(names)} meshes tried"
    assert any("every split" in words for words in extent(found.solver))
    found.save(tmp_path / "s.json")
    assert f"best of the {len(names)} meshes tried" in str(Strategy.load(tmp_path / "s.json"))
    held = planner.plan("zoo:gpt-tiny", devices=8, batch=32, pins="dp=4,tp=2,micro=2")
    assert (
        held.solver["covers"] == [{"meshes": ["4x2"], "microbatches": [2], "splits": "all"}]
        and covered(held.solver) == "the one mesh tried"
    )


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param("pp=4,micro=64", marks=pytest.mark.slow),
        pytest.param("micro=64", marks=pytest.mark.slow),
    ],
)
def test_an_experts_plan_is_found_without_its_pins(pins: str) -> None:
    """Positions over two devices and columns over four of a node, in four stages: three pins found
    it where the search with fewer did not."""
    expert = planned(
        "zoo:llama3-70b",
        256,
        512,
        {
            "stage": 4,
            "data": 8,
            "sequence": 2,
            "tensor": 4,
            "zero": 1,
            "microbatches": 64,
            "recompute": "none",
        },
    )
    found = planner.plan("zoo:llama3-70b", devices=256, batch=512, pins=pins, baselines=False)
    assert expert is not None and found.costs["fit"] == "yes"
    assert found.costs["step_time_s"] <= expert.costs["step_time_s"] * 1.001
