"""What holds of every plan, whatever was asked: drawn models, machines, pins, memory limits and
objectives.

no baseline that keeps the pins is better by more than a tie, and none that is printed does not fit
and is called fitting
peak <= memory limit;   bound <= objective;   a saved file has the price that was saved
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import PlanError
from planner.pins.pins import parse_pins
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import machine_now, open_recorded, reprice

MODELS = (
    "zoo:gpt-tiny",
    "zoo:llama-tiny",
    "zoo:mixtral-tiny",
    "zoo:t5-tiny",
    "zoo:resnet-tiny",
    "zoo:mlp-tiny",
    "zoo:ssm-tiny",
    "zoo:gpt2-small,layers=2",
    "zoo:llama3-8b,layers=2,seq=1024",
)
MACHINES = (
    ("h100-sxm", (2, 4, 8, 16)),
    ("a100-40gb", (3, 6, 8, 12)),
    ("tpu-v5e", (4, 8, 16)),
    ("tpu-v4", (8, 16)),
    ("cpu", (8,)),
)
PINS = (
    "",
    "",
    "zero=0",
    "zero=1",
    "zero=2",
    "zero=3",
    "tp=2",
    "dp=2",
    "dp=4,tp=2",
    "micro=2",
    "micro=4,recompute=block",
    "recompute=block-keep",
    "pp=2",
    "pp=2,tp=2",
    "tp=2,zero=3",
    "copies=2",
    "zero=1,zero_group=4",
    "offload=none",
    "tensor=megatron,tp=2",
    "sequence=2",
    "dp=2,zero=1",
)
REFUSED = ("P021", "P022", "P024", "P035", "P068")
"""Nothing fits, or the pins are none for this machine, workload, batch or model."""


def drawn(seed: int) -> tuple[str, dict[str, Any], float | None]:
    """A model, options of `planner.plan`, and the share of the memory of their plan to plan again
    within."""
    r = random.Random(seed)
    hardware, counts = r.choice(MACHINES)
    options = {
        "devices": r.choice(counts),
        "hardware": hardware,
        "pins": r.choice(PINS) or None,
        "batch": r.choice((None, 8, 24, 64)),
        "workload": "infer" if r.random() < 0.1 else "train",
        "runtime": "jax-jit" if r.random() < 0.1 else "jax-shard_map",
        "mode": "data-parallel" if r.random() < 0.1 else "auto",
    }
    return r.choice(MODELS), options, r.choice((None, None, 0.9, 0.6, 0.4))


def keeps(row: Any, pins: Any) -> bool:
    """Whether a baseline keeps pins, told from its row alone: those of its mesh are left out, for a
    name also says what an axis may cut."""
    told = {"zero_stage", "recompute", "microbatches"}
    return (
        not pins.mesh
        and pins.techniques.keys() <= told | {"offload"}
        and all(row[k] == v for k, v in pins.techniques.items() if k in told)
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *range(1, 8),
        *(pytest.param(k, marks=pytest.mark.slow) for k in range(8, 68)),
    ],
)
def test_a_plan_is_what_it_says(seed: int, tmp_path: Path) -> None:
    model, options, share = drawn(seed)
    try:
        made = planner.plan(model, **options)
        if share is not None:
            made = planner.plan(
                model,
                **options,
                memory_limit_bytes=int(made.costs["memory_per_device_bytes"] * share),
                remedies=False,
            )
    except PlanError as e:
        assert e.code in REFUSED, str(e)
        return
    cost, pins = made.costs, parse_pins(options["pins"])
    assert cost["memory_per_device_bytes"] <= cost["memory_limit_bytes"] and cost["fit"] != "no"
    for name, row in made.baselines.items():
        assert (row["memory_per_device_bytes"] <= row["memory_limit_bytes"]) == (row["fit"] != "no")
        better = row["fit"] != "no" and row["step_time_s"] < cost["step_time_s"] * (1 - 1e-3)
        assert not better or options["mode"] != "auto" or not keeps(row, pins), (
            f"{name} takes {row['step_time_s']}, the plan {cost['step_time_s']}"
        )
    bound = made.solver.get("bound_s")
    assert bound is None or bound <= min(cost["step_time_s"], made.solver["objective_s"]) * (
        1 + 1e-6
    )
    held = dict(made.mesh_shape)
    assert all(held.get(a) in sizes for a, sizes in pins.mesh.items())
    assert all(
        made.techniques[k] == v
        for k, v in pins.techniques.items()
        if k in ("zero_stage", "recompute", "microbatches", "copies")
    )
    made.save(tmp_path / "s.json")
    again = Strategy.load(tmp_path / "s.json")
    topology, moved = machine_now(again)
    table = reprice(again, open_recorded(again, model), topology).table
    assert moved == "" and all(
        table[k] == pytest.approx(cost[k], rel=2e-5)
        for k in ("step_time_s", "memory_per_device_bytes", "flops_per_device")
    )
