"""Prices of virtual devices of one host: what XLA's CPU back end does beside is paid there, and
nowhere else."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from costmodels import load_device
from costmodels.collectives import PIECEWISE
from costmodels.hardware.device import Device, from_table
from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.execution.collective import CollectiveUse
from planner.machine.topology import Level, Mesh, MeshAxis, Topology
from planner.pricing.bucketing import seconds
from planner.pricing.pricer import Pricer
from planner.strategy.strategy import Strategy

HOST = """
name = "host"
kind = "cpu"
node_size = 8
[peak]
float32 = "20 GFLOP/s"
[matmul]
flops = [1e5, 1e8]
efficiency = [0.7, 1.0]
[memory]
capacity = "4 GiB"
context = "200 MiB"
bandwidth = "5 GB/s"
efficiency = 1.0
[kernel]
launch = "2 us"
[inner]
bandwidth = "4 GB/s"
efficiency = 1.0
latency = "25 us"
kind = "KIND"
[outer]
bandwidth = "4 GB/s"
efficiency = 1.0
latency = "25 us"
[host]
bandwidth = "5 GB/s"
"""


def device(kind: str) -> Device:
    """The host above, its devices joined by a link of a kind."""
    return from_table(tomllib.loads(HOST.replace("KIND", kind)), "a test")


def pricer(kind: str, n: int = 8) -> Pricer:
    chip = device(kind)
    levels = (Level("node", n, chip.inner.bandwidth_bytes_per_s, chip.inner.latency_s, kind=kind),)
    return Pricer(
        Topology(chip, levels),
        Mesh((MeshAxis("x", ((0, n),)),)),
        load_runtime("jax-shard_map"),
        load_recipe("fp32"),
    )


def planned(tmp_path: Path, kind: str, pins: str) -> Strategy:
    file = tmp_path / f"{kind}.toml"
    file.write_text(HOST.replace("KIND", kind))
    return planner.plan(
        "zoo:gpt-tiny",
        devices=8,
        batch=32,
        hardware=str(file),
        pins=pins,
        precision="fp32",
        baselines=False,
    )


def test_only_virtual_devices_pay_for_orders() -> None:
    here, there = pricer("memory"), pricer("switch")
    for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute"):
        more = here.collective_s(kind, ("x",), 2**20, strided=True) - here.collective_s(
            kind, ("x",), 2**20
        )
        assert more == pytest.approx(8 * 2**20 / 5e9 if kind in PIECEWISE else 0.0)
        assert there.collective_s(kind, ("x",), 2**20, strided=True) == there.collective_s(
            kind, ("x",), 2**20
        )


def test_collectives_that_only_their_pieces_tell_apart_have_prices_of_their_own() -> None:
    here = pricer("memory")
    plain = CollectiveUse("all-gather", ("x",), 2**20, 1, "forward", "tensor")
    uses = [plain, replace(plain, strided=True), plain]
    prices = [s for _, s, _ in seconds(uses, here, {})]
    assert prices == [here.use_s(use) for use in uses]
    assert prices[0] < prices[1]


def test_virtual_devices_send_only_all_reduces_together() -> None:
    """A small gradient of many pays its share of a latency where it travels with others, else all
    of it."""
    here, there = pricer("memory"), pricer("switch")
    assert here.collective_s("all-reduce", ("x",), 1e3, bucketed=True) < 1e-6
    assert here.collective_s("reduce-scatter", ("x",), 1e3, bucketed=True) > 75e-6
    assert there.collective_s("reduce-scatter", ("x",), 1e3, bucketed=True) < 1e-6


@pytest.mark.parametrize(
    "pins",
    [
        "dp=8,zero=0,micro=1",
        "dp=4,tp=2,zero=1,micro=2",
        "pp=2,dp=4,micro=4",
        "dp=8,recompute=block",
    ],
)
def test_what_solvers_add_up_bounds_the_price(tmp_path: Path, pins: str) -> None:
    """Orders, lone gathers and what loops copy are in both. What stages hand over is in the price
    alone."""
    found = planned(tmp_path, "memory", pins)
    bound, price = found.solver["bound_s"], found.cost.step_time_s
    if "pp" in pins:
        assert 0.7 * price < bound < price
    else:
        assert bound == pytest.approx(price, rel=1e-6)
        assert found.solver["status"] == "optimal"


def test_shipped_devices_are_none_of_it() -> None:
    """Only a calibrated host says that it is one; the file `cpu` stays a guess with a link."""
    assert load_device("cpu").inner.kind == "switch"
    assert not pricer("switch").topology.virtual
    assert pricer("memory").topology.virtual
