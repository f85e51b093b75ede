"""Machines: shapes for any device count, groups on their links, candidate meshes, topology files
good and bad."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from costmodels import aliases, device_names, load_device, topology_names
from costmodels.collectives import Span, collective_lines, collective_time_s
from costmodels.hardware.describe import describe_topology, overview, topology_table
from costmodels.hardware.device import TOPOLOGIES, machine_named
from costmodels.hardware.mixed import slowest
from costmodels.kernels import roofline_time_s
from planner.emit.from_strategy import emit
from planner.errors import PlanError
from planner.machine.mesh_choices import divisors, meshes, pinned_mesh, two_axes
from planner.machine.topology import Level, Mesh, MeshAxis, Topology, for_devices, from_json
from planner.machine.topology_file import described, from_file
from planner.machine.tpu_slices import part_of_host, slice_shapes, wraps
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import machine_now, open_recorded, reprice

GB, US = 1e9, 1e-6
COUNTS = (*range(1, 65), 96, 1024, 2048)


@pytest.mark.parametrize("hardware", device_names())
def test_every_count_is_planned_or_refused_with_counts_that_work(hardware: str) -> None:
    for n in COUNTS:
        try:
            topology = for_devices(hardware, n)
        except PlanError as e:
            assert e.code == "P012" and e.exit_code == 2 and str(n) in e.what
            suggested = [
                int(x)
                for line in e.help
                if line.startswith("--devices")
                for x in re.findall(r"\d+", line)
            ]
            assert suggested and n not in suggested
            assert all(for_devices(hardware, other).devices == other for other in suggested)
        else:
            assert topology.devices == n
            assert from_json(json.loads(json.dumps(topology.to_json()))).levels == topology.levels


@pytest.mark.parametrize("n", [0, -8])
def test_no_devices_is_an_error(n: int) -> None:
    with pytest.raises(PlanError, match=f"P011.*--devices {n}"):
        for_devices("h100-sxm", n)


def _shape(hardware: str, n: int) -> tuple[int, ...]:
    return tuple(level.size for level in for_devices(hardware, n).levels)


def test_nodes_are_shared_evenly() -> None:
    assert (
        _shape("h100-sxm", 8) == (8,)
        and _shape("h100-sxm", 5) == (5,)
        and _shape("h100-sxm", 1) == (1,)
    )
    assert _shape("h100-sxm", 12) == (6, 2) and for_devices("h100-sxm", 12).notes == (
        "12 devices = 2 nodes x 6 of 8 devices each",
    )
    assert _shape("h100-sxm", 64) == (8, 8) and for_devices("h100-sxm", 64).notes == ()
    assert (
        _shape("gb200-nvl72", 72) == (72,)
        and _shape("gb200-nvl72", 96) == (48, 2)
        and _shape("gb200-nvl72", 144) == (72, 2)
    )
    with pytest.raises(PlanError, match="only 2 of each node") as e:
        for_devices("h100-sxm", 22)
    assert e.value.help[0] == "--devices 16 or 24"


def test_in_switch_reduction_needs_the_whole_node() -> None:
    assert for_devices("h100-sxm", 64).levels[0].all_reduce_bytes_per_s == 476 * GB
    assert for_devices("h100-sxm", 12).levels[0].all_reduce_bytes_per_s == 0


def test_tpu_slices_are_real_ones() -> None:
    shapes = {n: _shape("tpu-v5e", n) for n in (4, 8, 16, 32, 64, 128, 256)}
    assert shapes == {
        4: (2, 2),
        8: (2, 4),
        16: (4, 4),
        32: (4, 8),
        64: (8, 8),
        128: (8, 16),
        256: (16, 16),
    }
    shapes = {n: _shape("tpu-v5p", n) for n in (4, 8, 16, 32, 64, 128, 192, 256, 512, 2048, 6144)}
    assert shapes == {
        4: (2, 2),
        8: (2, 2, 2),
        16: (2, 2, 4),
        32: (2, 4, 4),
        64: (4, 4, 4),
        128: (4, 4, 8),
        192: (4, 4, 12),
        256: (4, 8, 8),
        512: (8, 8, 8),
        2048: (8, 16, 16),
        6144: (16, 16, 24),
    }
    assert for_devices("tpu-v4", 64).notes == ("slice 4x4x4",)
    assert for_devices("tpu-v4", 2).notes == ("slice 1x1x2 (part of a host's chips)",)
    with pytest.raises(PlanError, match="no slice of tpu-v4"):
        for_devices("tpu-v4", 96)


def test_slices_by_their_shape() -> None:
    named = for_devices("v5p:8x4x4")
    assert named.device.name == "tpu-v5p" and named.levels == for_devices("tpu-v5p", 128).levels
    long = for_devices("tpu-v5p:4x4x16", 256)
    assert [(x.size, x.wrap) for x in long.levels] == [
        (4, True),
        (4, True),
        (16, True),
    ] and long.notes == ("slice 4x4x16",), "not the most even slice of 256"
    assert for_devices("tpu-v7x:4x4x4").devices == 128 and [
        x.wrap for x in for_devices("v5e:8x16").levels
    ] == [False, True]


@pytest.mark.parametrize(
    ("hardware", "devices", "code", "says"),
    [
        ("tpu-v5e:3x3", None, "P012", "one of 2x4, 4x4"),
        ("h100:4x4", None, "P012", "--devices N instead"),
        ("tpu-v5e:4x4x4", None, "P012", "8x8"),
        ("tpu-v5e:4x4", 8, "P014", "--devices 16, or leave"),
        ("tpu-v9:4x4", None, "P010", "tpu-v"),
        ("tpu-v5e", None, "P017", "--devices N"),
        ("aws-p55", 8, "P010", "did you mean 'aws-p5'"),
        ("hh100", 8, "P010", "did you mean 'h100'"),
        ("v5litepod-16", None, "P010", "16 chips: --hardware v5e --devices 16"),
        ("tpu-v6e-256", None, "P010", "256 chips: --hardware v6e --devices 256"),
        ("v5p-128", 64, "P010", "128 TensorCores, 64 chips: --hardware v5p --devices 64"),
    ],
)
def test_slices_and_names_that_are_not(
    hardware: str, devices: int | None, code: str, says: str
) -> None:
    with pytest.raises(PlanError, match=code) as e:
        for_devices(hardware, devices)
    assert any(says in line for line in e.value.help)


def test_only_whole_cubes_and_full_sides_wrap() -> None:
    def wrapped(hardware: str, n: int) -> list[bool]:
        return [level.wrap for level in for_devices(hardware, n).levels]

    assert wrapped("tpu-v5p", 32) == [False] * 3 and wrapped("tpu-v5p", 64) == [True] * 3
    assert (
        wrapped("tpu-v5e", 64) == [False] * 2
        and wrapped("tpu-v5e", 128) == [False, True]
        and wrapped("tpu-v5e", 256) == [True] * 2
    )


def test_beyond_a_pod_slices_are_joined_by_the_network() -> None:
    topology = for_devices("tpu-v5e", 1024)
    assert _shape("tpu-v5e", 1024) == (16, 16, 4) and topology.notes == ("4 slices 16x16",)
    assert (
        topology.levels[-1].bandwidth_bytes_per_s
        == load_device("tpu-v5e").outer.bandwidth_bytes_per_s
    )
    with pytest.raises(PlanError) as e:
        for_devices("tpu-v5e", 300)
    assert e.value.help == ("--devices 256 or 512",)


def test_a_chip_of_two_devices_is_a_level() -> None:
    topology = for_devices("tpu-v7x", 128)
    assert _shape("tpu-v7x", 128) == (2, 4, 4, 4)
    assert (
        topology.levels[1].bandwidth_bytes_per_s
        == load_device("tpu-v7x").inner.bandwidth_bytes_per_s / 2
    ), "two devices share the chip's links"
    assert _shape("tpu-v7x", 2) == (2,) and _shape("tpu-v7x", 1) == (1,)
    with pytest.raises(PlanError, match="no slice"):
        for_devices("tpu-v7x", 9)


@pytest.mark.parametrize("pod", [(16, 16), (16, 16, 16), (16, 16, 24), (16, 24, 24)])
def test_slices_fit_their_pod(pod: tuple[int, ...]) -> None:
    found = slice_shapes(pod)
    assert found[prod(pod)] == pod
    for chips, shape in found.items():
        assert (
            prod(shape) == chips
            and list(shape) == sorted(shape)
            and all(n <= most for n, most in zip(shape, pod, strict=True))
        )
        assert part_of_host(shape) == (chips < 4)
        assert not any(wraps(shape, n) for n in shape) or max(shape) >= 4


# --- groups on links
# -------------------------------------------------------------------------------------------------------------------


def _torus(size: int, wrap: bool) -> Topology:
    return Topology(
        load_device("tpu-v4"), (Level("x", size, 10 * GB, US, 1.0, "torus", wrap=wrap),)
    )


def _three(a: int, b: int, c: int) -> Mesh:
    return Mesh(
        tuple(
            MeshAxis(name, ((0, n),) if n > 1 else ()) for name, n in (("a", a), ("b", b), ("c", c))
        )
    )


def test_part_of_a_torus_dim_is_a_line_and_strides_share_links() -> None:
    ring, mesh = _torus(16, True), _three(4, 2, 2)
    assert ring.group(mesh, ("a", "b", "c")) == (Span(16, 20 * GB, US, 0.0, "ring"),)
    assert ring.group(mesh, ("c",)) == (Span(2, 10 * GB, US, 0.0, "line"),)
    assert ring.group(mesh, ("b", "c")) == (Span(4, 10 * GB, US, 0.0, "line"),)
    assert ring.group(mesh, ("b",)) == (Span(2, 5 * GB, 2 * US, 0.0, "line"),), (
        "two places apart: two groups on each link"
    )
    assert ring.group(mesh, ("a",)) == (Span(4, 5 * GB, 4 * US, 0.0, "ring"),), (
        "around the whole ring in steps of four"
    )
    assert _torus(16, False).group(mesh, ("a",)) == (Span(4, 2.5 * GB, 4 * US, 0.0, "line"),)


def _strided_loads(n: int, stride: int, wrap: bool) -> float:
    """Seconds per byte of an all-gather when all `stride` interleaved groups of n run at once, by
    counting bytes on directed links of 1 B/s."""
    size = n * stride
    loads: dict[tuple[int, int], float] = {}
    for offset in range(stride):
        for source in range(
            n
        ):  # a shard of 1/n visits everyone: half each way around a ring, both ways along a line
            start = source * stride + offset
            if wrap:
                paths = [(1, (n - 1) * stride, 0.5), (-1, (n - 1) * stride, 0.5)]
            else:
                paths = [(1, (n - 1 - source) * stride, 1.0), (-1, source * stride, 1.0)]
            for step, hops, share in paths:
                for h in range(hops):
                    key = ((start + step * h) % size, step)
                    loads[key] = loads.get(key, 0.0) + share / n
    return max(loads.values())


@pytest.mark.parametrize(("n", "stride"), [(4, 1), (4, 2), (8, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("wrap", [False, True])
def test_strided_groups_load_links_as_counted(n: int, stride: int, wrap: bool) -> None:
    level = Level("x", n * stride, 1.0, US, 1.0, "torus", wrap=wrap)
    topology = Topology(load_device("tpu-v4"), (level,))
    mesh = Mesh((MeshAxis("far", ((0, n),)), MeshAxis("near", ((0, stride),))))
    slope = collective_lines("all-gather", topology.group(mesh, ("far",)))[0][1]
    assert slope == pytest.approx(_strided_loads(n, stride, wrap))


def test_a_wrapped_torus_is_twice_as_fast_as_a_line() -> None:
    mesh = Mesh((MeshAxis("data", ((0, 8),)),))
    seconds = [
        collective_time_s("all-gather", 1e9, _torus(8, wrap).group(mesh, ("data",)))
        for wrap in (False, True)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=1e-3)


def test_a_mesh_of_links_gives_few_members_little() -> None:
    topology = for_devices("mi300x", 8)
    link = topology.levels[0].effective_bytes_per_s
    two, eight = (
        topology.group(
            two_axes(topology, n) if n < 8 else Mesh((MeshAxis("tensor", ((0, 8),)),)), ("tensor",)
        )[0]
        for n in (2, 8)
    )
    assert (two.bytes_per_s, eight.bytes_per_s) == (link, pytest.approx(7 * link))
    assert two.kind == eight.kind == "mesh"


def test_groups_over_nodes_keep_levels_apart() -> None:
    topology = for_devices("h100-sxm", 64)
    mesh = pinned_mesh(topology, {"data": 16, "model": 4})
    assert topology.group(mesh, ("model",)) == (Span(4, 360 * GB, 3 * US),)
    data = topology.group(mesh, ("data",))
    assert [(s.size, s.bytes_per_s) for s in data] == [(2, 360 * GB), (8, 40 * GB)]
    everything = topology.group(mesh, ("data", "model"))
    assert [s.size for s in everything] == [8, 8] and everything[0].bus_bytes_per_s == 476 * GB
    assert topology.group(mesh, ()) == ()


# --- meshes
# ----------------------------------------------------------------------------------------------------------------------------


def _check(topology: Topology, mesh: Mesh) -> None:
    names = [a.name for a in mesh.axes]
    assert len(set(names)) == len(names)
    assert prod(a.size for a in mesh.axes) == topology.devices
    used = [1] * len(topology.levels)
    for axis in mesh.axes:
        assert prod(s.size for s in topology.group(mesh, (axis.name,))) == axis.size
        for level, n in axis.parts:
            used[level] *= n
    assert used == [level.size for level in topology.levels], "every device in exactly one place"
    for pair in [names[:2], names[1:], names]:
        assert prod(s.size for s in topology.group(mesh, tuple(pair))) == prod(
            a.size for a in mesh.axes if a.name in pair
        )


@pytest.mark.parametrize(
    ("hardware", "devices"),
    [
        ("h100-sxm", 1),
        ("h100-sxm", 2),
        ("h100-sxm", 7),
        ("h100-sxm", 12),
        ("h100-sxm", 24),
        ("h100-sxm", 64),
        ("h100-sxm", 1024),
        ("gb200-nvl72", 144),
        ("tpu-v5e", 128),
        ("tpu-v5p", 192),
        ("tpu-v7x", 128),
        ("mi300x", 16),
    ],
)
def test_candidate_meshes_use_every_device_once(hardware: str, devices: int) -> None:
    topology = for_devices(hardware, devices)
    found = meshes(topology)
    assert found[0].shape == (("data", devices),)
    assert len({m.shape for m in found}) == len(found)
    for mesh in found:
        _check(topology, mesh)
    if devices == 64:
        assert {m.axes[-1].size for m in found if len(m.axes) == 2} == {2, 4, 8, 16, 32}
    assert meshes(topology) == found, "the same order every time"


def test_model_axes_hold_neighbours() -> None:
    topology = for_devices("h100-sxm", 64)
    assert two_axes(topology, 8).axes[1].parts == ((0, 8),)
    assert two_axes(topology, 16).axes[1].parts == ((0, 8), (1, 2)), (
        "larger than a node: it spills over"
    )
    assert two_axes(topology, 2).axes[0].parts == ((0, 4), (1, 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 50), st.integers(0, 50))
def test_pinned_meshes_align_or_say_why(sizes: list[int], i: int, j: int) -> None:
    chip = load_device("h100-sxm")
    topology = Topology(chip, tuple(Level(f"l{k}", n, 10 * GB, US) for k, n in enumerate(sizes)))
    n = topology.devices
    inner = divisors(n)[i % len(divisors(n))]
    middle = divisors(n // inner)[j % len(divisors(n // inner))]
    wanted = {"data": n // inner // middle, "stage": middle, "model": inner}
    try:
        mesh = pinned_mesh(topology, wanted)
    except PlanError as e:
        assert e.code == "P015" and "does not align" in e.what
        cuts = {1}
        for size in sizes:
            cuts |= {max(cuts) * d for d in divisors(size)}
        assert inner not in cuts or inner * middle not in cuts, (
            "a mesh whose cuts fall on divisors of the levels was refused"
        )
    else:
        assert mesh.shape == tuple(wanted.items())
        _check(topology, mesh)


def test_pinned_meshes_must_multiply_to_the_devices() -> None:
    with pytest.raises(PlanError, match="has 32 devices, the topology 64"):
        pinned_mesh(for_devices("h100-sxm", 64), {"data": 8, "model": 4})


def test_divisors_are_complete() -> None:
    for n in (1, 12, 97, 9999, 10_000, 12_288):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


# --- files
# -----------------------------------------------------------------------------------------------------------------------------

GOOD = """
device = "h100-sxm"
[[level]]
name = "nvlink"
size = 8
bandwidth = "450 GB/s"
latency = "2 us"
[[level]]
name = "infiniband"
size = 4
bandwidth = "400 Gb/s"
latency = "8 us"
efficiency = 0.9
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return path


def test_a_topology_file(tmp_path: Path) -> None:
    topology = from_file(_write(tmp_path, GOOD), 32)
    assert (topology.device.name, topology.devices) == ("h100-sxm", 32)
    assert topology.levels == (
        Level("nvlink", 8, 450 * GB, 2 * US, 0.8),
        Level("infiniband", 4, 50 * GB, 8 * US, 0.9),
    )
    assert from_file(tmp_path / "machine.toml").devices == 32
    assert from_json(topology.to_json()).levels == topology.levels


def test_a_torus_in_a_file_is_a_level_per_dim(tmp_path: Path) -> None:
    text = (
        'device = "tpu-v5p"\n[[level]]\nname = "ici"\nkind = "torus"\nshape = [4, 4, 8]\nwrap ='
        ' true\nbandwidth = "90 GB/s"\nlatency = "1 us"\n'
    )
    topology = from_file(_write(tmp_path, text + "efficiency = 0.95\n"))
    assert [(x.name, x.size, x.wrap, x.kind) for x in topology.levels] == [
        ("ici0", 4, True, "torus"),
        ("ici1", 4, True, "torus"),
        ("ici2", 8, True, "torus"),
    ]
    assert [(x.size, x.effective_bytes_per_s, x.wrap) for x in topology.levels] == [
        (x.size, x.effective_bytes_per_s, x.wrap) for x in for_devices("tpu-v5p", 128).levels
    ]


def test_the_product_must_be_the_device_count(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"P014.*--devices 64 but .*machine\.toml describes 32 \(8 x 4\)"
    ) as e:
        from_file(_write(tmp_path, GOOD), 64)
    assert e.value.help == ("--devices 32, or leave --devices out",)


BAD = [
    ("", "", "needs `device = NAME`"),
    ('device = "h100-sxm"\n', "", "needs `device = NAME`"),
    ('device = "h100-sxm"', "device = 5", "needs `device = NAME`"),
    ("[[level]]", "[[levels]]", "'levels' is not known"),
    ("size = 8\n", "", "level 0: key 'size' is missing"),
    ('bandwidth = "400 Gb/s"\n', "", "level 1: key 'bandwidth' is missing"),
    ('latency = "2 us"\n', "", "level 0: key 'latency' is missing"),
    ('"450 GB/s"', '"450 GB"', "level 0: .*not a unit of bandwidth"),
    ('"450 GB/s"', "450", "level 0: 450 is not a bandwidth"),
    ('"450 GB/s"', '"0 GB/s"', "above 0"),
    ('"2 us"', '"2 GB"', "not a unit of time"),
    ("size = 8", "size = 0", "at least 1"),
    ("size = 8", "size = 8.5", "whole number"),
    ("size = 8", 'size = "8"', "whole number"),
    ("size = 8", "size = true", "whole number"),
    ("efficiency = 0.9", "efficiency = 9", "at most 1"),
    ("efficiency = 0.9", "eficiency = 0.9", "'eficiency' is not known"),
    ("size = 8", 'size = 8\nkind = "ring"', "one of switch, mesh, torus"),
    ("size = 8", "size = 8\nwrap = true", "belong to kind"),
    ("size = 8", 'size = 8\nkind = "torus"\nwrap = 1', "true or false"),
    ("size = 8", "size = 8\nshape = [2, 4]", "either size or shape"),
    ("size = 8", "shape = []", "whole number"),
    ("size = 8", "shape = [-2, -4]", "at least 1"),
    ('device = "h100-sxm"', 'device = "h100-sxn"', "unknown hardware"),
    ("size = 8", "size = ", "not TOML"),
]


@pytest.mark.parametrize(("old", "new", "says"), BAD)
def test_bad_topology_files_are_explained(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = GOOD.replace(old, new, 1) if old else new
    assert text != GOOD
    with pytest.raises(PlanError, match=says) as e:
        from_file(_write(tmp_path, text))
    assert e.value.exit_code == 2 and e.value.code in ("P010", "P013")


@pytest.mark.parametrize(
    "content",
    [
        b"device = 'h100-sxm'\nlevel = 3\n",
        b"device = 'h100-sxm'\nlevel = [1, 2]\n",
        b"\xff\xfe",
        b"[[level]]\nsize = 2\n",
    ],
)
def test_files_of_another_form_are_explained(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="P013"):
        from_file(path)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("p5.48xlarge", "aws-p5"),
        ("a3-megagpu-8g", "gcp-a3-mega"),
        ("Standard_ND96isr_H100_v5", "azure-nd-h100-v5"),
        ("aws-p6-b300", "aws-p6-b300"),
        ("frontier", "frontier"),
    ],
)
def test_hardware_may_be_what_a_provider_calls_a_machine(hardware: str, name: str) -> None:
    assert machine_named(hardware) == name
    named = [from_file(name, 32), from_file(hardware, 32), described(hardware, 32)]
    assert named[0].levels[-1].size == 4 and all(x == named[0] for x in named)
    assert described("h100", 32) == for_devices("h100-sxm", 32)


def test_a_part_of_a_machines_node_is_asked_for() -> None:
    part, usual = described("p5.48xlarge", 4), for_devices("h100-sxm", 4)
    assert [level.size for level in part.levels] == [4]
    assert part.levels[0].all_reduce_bytes_per_s == usual.levels[0].all_reduce_bytes_per_s == 0
    assert from_file("gb200-racks", 36).devices == 36
    with pytest.raises(PlanError, match="--devices 12 but aws-p5 joins groups of 8") as e:
        described("p5.48xlarge", 12)
    assert list(e.value.help) == ["--devices 8 or 16"]


def test_names_of_machines_are_of_one_machine_and_no_device() -> None:
    listed = [a for n in topology_names() for a in topology_table(n).get("aliases", ())]
    assert len(listed) == len(set(listed)) and all(a == a.lower() for a in listed)
    assert not {*listed, *topology_names()} & {*device_names(), *aliases()}


@pytest.mark.parametrize("name", topology_names())
def test_machines_that_ship(name: str) -> None:
    data = tomllib.loads((TOPOLOGIES / f"{name}.toml").read_text())
    assert (
        data["summary"]
        and re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", data["date"])
        and all(len(level["source"]) > 5 for level in data["level"])
    )
    node = load_device(data["device"]).node_size
    topology = from_file(name, 4 * node)
    assert [x.size for x in topology.levels] == [node, 4] and topology.device.name == data["device"]
    usual = for_devices(data["device"], 4 * node)
    inside = [f.name for f in fields(Level) if f.name != "name"]
    assert [getattr(topology.levels[0], f) for f in inside] == [
        getattr(usual.levels[0], f) for f in inside
    ], "a node is what the device file says"
    assert topology.levels[1].bandwidth_bytes_per_s <= usual.levels[1].bandwidth_bytes_per_s
    assert describe_topology(name).startswith(f"{name}: ") and name in overview()


def test_an_outermost_size_left_open_follows_from_the_devices(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD.replace("size = 4\n", ""))
    assert [x.size for x in from_file(path, 24).levels] == [8, 3]
    assert [x.name for x in from_file(path, 8).levels] == ["nvlink"], "one node has no network"
    with pytest.raises(PlanError, match=r"P014.*leaves the size of its outermost level open") as e:
        from_file(path)
    assert e.value.help == ("--devices N, a multiple of 8",)
    for devices, near in ((12, "--devices 8 or 16"), (4, "--devices 8"), (0, "--devices 8")):
        with pytest.raises(PlanError, match=r"P014.*joins groups of 8") as e:
            from_file(path, devices)
        assert e.value.help == (near,)


def test_missing_files_and_unknown_hardware(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"P013.*cannot read"):
        from_file(tmp_path / "none.toml")
    with pytest.raises(PlanError, match=r"P013.*cannot read"):
        from_file(tmp_path)
    with pytest.raises(PlanError, match="did you mean 'h100-sxm'") as e:
        for_devices("h100sxm", 8)
    assert e.value.code == "P010" and any("tpu-v5p" in line for line in e.value.help)


def test_a_hardware_file_of_ones_own(tmp_path: Path) -> None:
    import costmodels.hardware.device

    text = (
        (costmodels.hardware.device.DEVICES / "h100-sxm.toml")
        .read_text()
        .replace('name = "h100-sxm"', 'name = "mine"')
        .replace("node_size = 8", "node_size = 4")
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert tuple(level.size for level in for_devices(str(path), 16).levels) == (4, 4)
    (tmp_path / "bad.toml").write_text(text.replace('"3350 GB/s"', '"3350 GB"'))
    with pytest.raises(PlanError, match=r"P010.*bad\.toml' cannot be used") as e:
        for_devices(str(tmp_path / "bad.toml"), 16)
    assert "not a unit of bandwidth" in str(e.value)


MIXED = """
[[group]]
device = "h100-sxm"
devices = 8
[[group]]
device = "a100-40gb"
devices = 8
[[level]]
name = "nvlink"
size = 8
bandwidth = "300 GB/s"
latency = "3 us"
[[level]]
name = "infiniband"
size = 2
bandwidth = "25 GB/s"
latency = "10 us"
"""


@given(st.floats(3, 16), st.floats(3, 11))
def test_kernels_on_several_kinds_of_device_take_what_they_take_on_the_slowest(
    flops: float, moved: float
) -> None:
    kinds = [load_device("h100-sxm"), load_device("a100-40gb"), load_device("v100-32gb")]
    together = slowest([(d, 4) for d in kinds])
    each = [roofline_time_s(d, 10**flops, 10**moved, "bfloat16") for d in kinds]
    # Between two points of a curve the least of power laws is bent, and the mixture's is straight.
    assert (
        max(each) * 0.98
        <= roofline_time_s(together, 10**flops, 10**moved, "bfloat16")
        <= max(each) * 1.1
    )
    assert (
        together.memory_bytes == min(d.memory_bytes for d in kinds)
        and slowest([(kinds[0], 8), (kinds[0], 8)]) == kinds[0]
    )


def test_a_cluster_of_two_kinds_is_planned_saved_and_priced_again(tmp_path: Path) -> None:
    """On one mesh, as a pinned one is, in equal shares; unequal ones: tests/whatif/test_islands."""
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED)
    made = planner.plan(
        "zoo:gpt2-small,layers=2", topology=file, batch=32, baselines=False, pins="dp=16"
    )
    slower = tmp_path / "slower.toml"
    slower.write_text('device = "a100-40gb"\n' + MIXED[MIXED.index("[[level]]") :])
    alone = planner.plan(
        "zoo:gpt2-small,layers=2", topology=slower, batch=32, baselines=False, pins="dp=16"
    )
    assert made.costs["step_time_s"] == pytest.approx(alone.costs["step_time_s"], rel=0.02), (
        "at the pace of the slower"
    )
    assert made.costs["memory_limit_bytes"] == pytest.approx(
        alone.costs["memory_limit_bytes"], rel=0.01
    ), "within the memory of the smaller"
    assert made.costs["model_flops_utilization"] < 0.6 * alone.costs["model_flops_utilization"], (
        "and of the peaks of both"
    )
    said = " ".join(str(made).split())
    assert (
        "8 x h100-sxm + 8 x a100-40gb (2 infiniband x 8)" in said
        and "share the work evenly" in said
    )
    made.save(tmp_path / "s.json")
    again = Strategy.load(tmp_path / "s.json")
    topology, moved = machine_now(again)
    assert moved == "" and topology.groups
    now = reprice(again, open_recorded(again, "zoo:gpt2-small,layers=2"), topology)
    assert now.cost.step_time_s == pytest.approx(made.costs["step_time_s"], rel=1e-5)
    assert re.search(r"GPU_MEMORY = 0\.\d+", emit(again, "zoo:gpt2-small,layers=2"))
    assert "8 x h100-sxm + 8 x a100-40gb" in " ".join(describe_topology(str(file)).split())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("devices = 8", "devices = 4"), "P014"),
        (('"a100-40gb"', '"tpu-v5e"'), "P013"),
        (('"a100-40gb"', '"mi300x"'), "P013"),
        (("[[group]]\ndevice", "[[group]]\nspeed = 2\ndevice"), "P013"),
        (("devices = 8", "devices = 0"), "P013"),
        (("[[group]]", 'device = "h100-sxm"\n[[group]]'), "P013"),
        (("a100-40gb", "a99"), "P010"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    change: tuple[str, str], code: str, tmp_path: Path
) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED.replace(*change, 1))
    with pytest.raises(PlanError) as e:
        from_file(file)
    assert e.value.code == code


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [{"device": "h100-sxm", "devices": 7}, {"device": "a100-80gb", "devices": 8}]},
        {"groups": [{"device": "h100-sxm", "devices": 16}, {"device": "a100-80gb", "devices": 0}]},
        {"groups": [{"device": "tpu-v5e", "devices": 8}, {"device": "a100-80gb", "devices": 8}]},
        {"group_levels": [[], []]},
    ],
)
def test_recorded_groups_that_are_not_the_machines_are_refused(change: dict) -> None:
    recorded = for_devices("8xh100-sxm+8xa100-80gb", None).to_json()
    assert from_json(recorded).devices == 16
    with pytest.raises(PlanError) as e:
        from_json({**recorded, **change})
    assert e.value.code == "P060"
