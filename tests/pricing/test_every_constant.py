"""No figure that nothing reads: every number of every device file and of every profile of emitted
programs is changed, alone, and some price must change with it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from itertools import product as iter_product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels.capacity import capacity
from costmodels.collectives import KINDS
from costmodels.expert_tiles import MOSAIC, rows_tile
from costmodels.hardware.device import DEVICES, AttentionPass, device_names, load_device
from costmodels.precision import load_recipe
from costmodels.products import Product
from costmodels.ranges import Asked, time_range
from costmodels.runtimes import Runtime, load_runtime
from planner.analysis.facts import GraphFacts
from planner.calibrate.profile import text
from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.ops.cost import Kernel
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.space.families import batch_only
from planner.workload.model import Model, Workload

LESS = 0.997
OF_FRAMEWORKS = ("interleave", "launch_s", "growth", "wider_sums")
"""Figures of profiles that price others' programs alone."""
REPORTED = ("watts", "usd_per_h", "head_widths")
"""Figures that are no part of a price of a step: what a sweep reports, and what a kernel takes."""


def numbers(table: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all figures of a file above 0: numbers, and texts that begin with one."""
    for key, value in table.items():
        at = (*path, key)
        if path == () and key in ("sources", "guessed", "measured", "names", "date", "aliases"):
            continue
        if key == "torus_dims":  # another number asks for another number of sides
            continue
        if isinstance(value, dict):
            yield from numbers(value, at)
        elif isinstance(value, list):
            yield from ((*at, k) for k, x in enumerate(value) if _is_figure(x))
        elif _is_figure(value):
            yield at


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return value[:1].isdigit() and " " in value and float(value.split(" ")[0]) > 0
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def changed(table: Mapping[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """The table with one figure a little less."""
    out = deepcopy(dict(table))
    place: Any = out
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    if isinstance(old, str):
        number, unit = old.split(" ", 1)
        less = float(number) * LESS
        place[path[-1]] = f"{less:.0f} {unit}" if unit == "B" else f"{less:.6g} {unit}"
    elif path[-2:-1] in (("widths",), ("latent_head",)):  # which rise, or fall
        place[path[-1]] = old - 8
    elif path[-2:-1] == ("splitting",):  # a threshold
        place[path[-1]] = old / 2
    elif isinstance(old, int):
        place[path[-1]] = max(1, old // 2) if old > 1 else 2
    else:
        place[path[-1]] = old * LESS
    return out


def prices(table: Mapping[str, Any], path: Path) -> tuple[Any, ...]:
    """Prices of all that a step is made of, on several nodes of the device of a file's table."""
    path.write_text(text(dict(table), ""))
    device = load_device(str(path))
    topology = for_devices(str(path), 2 * device.node_size)
    sizes = {x.name: x.size for x in reversed(topology.levels) if x.size > 1}
    mesh = pinned_mesh(topology, sizes)
    pricer = Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))
    axes = tuple(a.name for a in mesh.axes)
    found: list[Any] = [capacity(device, topology.devices).usable, pricer.host_s(1e9)]
    found += [
        pricer.kernel_s(10.0 ** (n / 4), 1.0, dtype)
        for n in range(24, 64)
        for dtype in device.peak_flops_per_s
    ]
    found += [pricer.kernel_s(1.0, 10.0**n, "bfloat16") for n in (1, 9)]
    found += [
        pricer.kernels_s(of.flops, np.zeros(1), "bfloat16", of).tolist()
        for of in products()
        if device.tiles
    ]
    if device.attention:
        found += [
            pricer.pass_s([Kernel(1e12, 1e9, attention=of)], "bfloat16")
            for of in (
                AttentionPass(backward, width, masked)
                for backward in (False, True)
                for width in (60, 120, 250)
                for masked in (False, True)
            )
        ]
    if device.on_chip_bytes:
        found += [
            rows_tile(MOSAIC, device.on_chip_bytes, across, 2**20).rows_moved(1, 1, across, 2**20)
            for across in range(128, 2048, 128)
        ]
    found += [
        pricer.collective_s(kind, over, 10.0**n)
        for kind in sorted(KINDS)
        for over in [axes, *((a,) for a in axes)]
        for n in range(2, 11)
    ]
    found += [
        pricer.stored_bytes((n, 300, 7, 7), "float32", kind)
        for n in (3, 20)
        for kind in ("image", "heads")
    ]
    return (*found, *(getattr(device, name) for name in REPORTED))


def products() -> Iterator[Product]:
    """Products of many extents, so that each tile is the fastest of one, and one whose sums are
    all but split."""
    sides = (64, 192, 256, 640, 1536, 4096, 13824)
    for extents in ((496, 3120, 3792), *iter_product(sides, sides, (64, 320, 4096))):
        of = Product(*(np.array([float(x)]) for x in (*extents, 1)))
        yield from (of, replace(of, convolution=True))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", device_names())
def test_every_figure_of_a_device_is_read(name: str, tmp_path: Path) -> None:
    table = tomllib.loads((DEVICES / f"{name}.toml").read_text())
    table.pop("aliases", None)
    now = prices(table, tmp_path / "now.toml")
    unread = [
        ".".join(map(str, path))
        for k, path in enumerate(numbers(table))
        if prices(changed(table, path), tmp_path / f"{k}.toml") == now
    ]
    assert unread == []


@cache
def facts() -> GraphFacts:
    """A decoder whose kernels are large enough to be more than their launches."""
    model = Model.open("zoo:llama3-8b,layers=2", Workload(batch=1024))
    return GraphFacts.of(model.graph(2), training=True)


def steps(runtime: Runtime, devices: int) -> list[Any]:
    """Prices of plans that use all that a profile has a figure for."""
    base, found = facts(), list[Any]()
    for hardware in ("h100-sxm", "tpu-v5e"):
        topology = for_devices(hardware, devices)
        node = topology.device.node_size
        mesh = pinned_mesh(topology, {"nodes": devices // node, "node": node})
        pricer = Pricer(topology, mesh, runtime, load_recipe("bf16-mixed"))
        cut = batch_only(base, mesh.shape, ("nodes", "node"))
        splits = {n.id: cut[base.shared[i]][0] for i, n in enumerate(base.graph.nodes)}
        plan = Plan(
            mesh=mesh.shape,
            splits=splits,
            repeated_blocks=base.runs,
            zero_stage=1,
            zero_axes=("node",),
            microbatches=2,
        )
        for together in (1, 2):
            cost, _, _ = price_plan(base, replace(plan, overlapped_microbatches=together), pricer)
            found += [cost.step_time_s, cost.memory.total]
        asked = Asked(hardware, topology.device.kind, False, devices, 10**8, 64, 1, False, True)
        large = replace(asked, parameters=10**13, device="other", sequence=10**6, devices=10**6)
        found += [time_range(runtime, x) for x in (asked, large, replace(asked, kind="cpu"))]
    return [*found, runtime.memory_spread]


@pytest.mark.parametrize("name", ["jax-shard_map", "jax-jit"])
def test_every_figure_of_an_emitted_programs_profile_is_read(name: str) -> None:
    """time_spread alone is of profiles and devices that ranges.toml has no row of."""
    runtime = load_runtime(name)
    now = steps(runtime, 512)
    unread = []
    for f in fields(runtime):
        value = getattr(runtime, f.name)
        if isinstance(value, bool) or not isinstance(value, float | int | tuple) or not value:
            continue
        less = tuple(LESS * x for x in value) if isinstance(value, tuple) else LESS * value
        if f.name in OF_FRAMEWORKS:
            continue
        if steps(replace(runtime, **{f.name: less}), 512) == now:
            unread.append(f.name)
    for device, rates in runtime.per_device.items():
        for f in fields(rates):
            less = replace(rates, **{f.name: LESS * getattr(rates, f.name)})
            changed_ = replace(runtime, per_device={**runtime.per_device, device: less})
            if (
                getattr(rates, f.name)
                and f.name not in OF_FRAMEWORKS
                and steps(changed_, 512) == now
            ):
                unread.append(f"{device}.{f.name}")
    assert unread == []
