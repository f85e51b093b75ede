"""Launchers shard parameters over groups of replicas, each with a copy (HSDP): searched where
links between nodes are slow, and written in the launcher's own keys."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.interop.price import hand_over
from planner.machine.topology import Mesh, MeshAxis
from planner.pins.launcher_space import SPACES
from planner.search.launcher_domain import replicas
from planner.strategy.strategy import Strategy

MODEL = "zoo:llama3-8b,layers=4,seq=2048"
SLOW = """
device = "a100-80gb"
[[level]]
name = "nvlink"
size = 4
bandwidth = "300 GB/s"
latency = "3 us"
[[level]]
name = "ethernet"
size = 4
bandwidth = "1 GB/s"
latency = "20 us"
"""
KEYS = {
    "maxtext": ("ici_fsdp_parallelism: 4", "dcn_data_parallelism: 4"),
    "torchtitan": ("data_parallel_replicate_degree = 4", "data_parallel_shard_degree = 4"),
    "hf": ('"dp_replicate_size": 4', '"dp_shard_size": 4'),
    "levanter": ("replica: 4",),
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "slow.toml"
    path.write_text(SLOW)
    return path


def made(machine: Path, launcher: str, pins: str) -> Strategy:
    return planner.plan(
        MODEL, topology=machine, batch=32, launcher=launcher, pins=pins, baselines=False
    )


def cut(plan: Strategy) -> dict[str, int]:
    """The axes of several devices."""
    return {axis: size for axis, size in dict(plan.mesh_shape).items() if size > 1}


@pytest.mark.parametrize("launcher", KEYS)
def test_shards_keep_to_a_node_where_links_between_nodes_are_slow(
    launcher: str, machine: Path
) -> None:
    alone = "pp=1,tp=1,cp=1,ep=1" if SPACES[launcher].axes[0] == "stage" else "tp=1,cp=1"
    plan = made(machine, launcher, f"{alone},zero=3")
    assert plan.techniques["zero_stage"] == 3
    assert cut(plan) == {"data": 4, "fsdp": 4}
    assert plan.techniques["zero_group"] == ["fsdp"]
    pinned = made(machine, launcher, f"{alone},zero=3,zero_group=4")
    assert plan.cost.step_time_s == pytest.approx(pinned.cost.step_time_s, rel=1e-6)
    handed = hand_over(plan, MODEL, launcher)
    assert all(key in handed.text for key in KEYS[launcher])
    steps = [row.cost["step_time_s"] for row in handed.rows if row.cost is not None]
    assert len(steps) > 1 and steps == pytest.approx([plan.cost.step_time_s] * len(steps))


def test_a_launcher_without_groups_has_one_copy(machine: Path) -> None:
    plan = made(machine, "megatron", "pp=1,tp=1,cp=1,ep=1,zero=3")
    assert cut(plan) == {"fsdp": 16}


def test_replicas_are_counted_over_both_axes_of_groups() -> None:
    axes = MeshAxis("data", ((1, 4),)), MeshAxis("data2", ((0, 4),))
    assert replicas(Mesh(axes, ("data2",))) == 16
