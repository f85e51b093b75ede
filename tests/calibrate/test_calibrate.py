"""`plan calibrate`: figures recovered from samples of a known machine, nonsense refused, and a
measurement of this host from end to end."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.collectives import KINDS, PASSES, Span, collective_time_s
from costmodels.hardware.device import from_table, load_device
from planner.calibrate.cases import Case, Sample, attention, cases, groups
from planner.calibrate.fit import CLOSE, MOST_FALL, Figures, fit, fit_link, monotone
from planner.calibrate.measure import Measured, last_said
from planner.calibrate.products import MeasuredProduct, fit_tiles, priced_s
from planner.calibrate.profile import shipped_name, table, text
from planner.cli import main
from planner.errors import PlanError

RATE, MEMORY, LAUNCH, LATENCY, LINK = 50e9, 8e9, 4e-6, 25e-6, 2e9

ATTENTION = {64: (20e9, 18e9), 128: (30e9, 25e9), 256: (28e9, 19e9)}
"""Width of heads -> FLOP/s of each pass."""
FORWARD_BYTES = {w: attention(w, 512, False).size_bytes for w in ATTENTION}


def truth(case: Case, devices: int = 8, kind: str = "cpu", bus: float = 0.0) -> float:
    """Seconds of a case on a machine whose figures are known."""
    if case.kind == "tiny":
        return LAUNCH
    if case.kind == "matmul":
        reached = min(1.0, (case.flops / 1e8) ** 0.2) * (
            0.25 if case.dtype == "bfloat16" and kind == "cpu" else 1.0
        )
        return case.flops / (RATE * reached) + LAUNCH / 10
    if case.kind == "attention":
        both, forward = case, replace(case, backward=False, size_bytes=FORWARD_BYTES[case.edge])
        rates, passes = ATTENTION[case.edge], (0.7, 3.0)
        seconds = forward.flops / rates[0] + passes[0] * forward.size_bytes / MEMORY
        if case.backward:
            more = both.size_bytes - forward.size_bytes
            seconds += (both.flops - forward.flops) / rates[1] + passes[1] * more / MEMORY
        return seconds
    if case.kind in ("stream", "reduce"):
        return max(case.size_bytes / MEMORY, LAUNCH)
    if kind == "cpu" and case.stride == 1:
        return math.log2(case.members) * LATENCY + PASSES[case.kind] * case.size_bytes / LINK
    outer = 4.0 if case.stride > 1 else 1.0
    return collective_time_s(
        case.kind,
        case.size_bytes,
        (
            Span(
                case.members,
                LINK / outer,
                LATENCY * outer,
                bus if case.members == devices else 0.0,
                bus_latency_s=LATENCY,
            ),
        ),
    )


def samples(
    devices: int, node_size: int, kind: str = "cpu", noise: float = 0.0, bus: float = 0.0
) -> list[Sample]:
    rng = np.random.default_rng(5)
    return [
        Sample(c, truth(c, devices, kind, bus) * math.exp(rng.normal(0, noise)), 0.1, 9)
        for c in cases(devices, node_size, kind, False)
    ]


def measured(
    found: list[Sample], devices: int, node_size: int, kind: str = "cpu", device: str = "cpu"
) -> Measured:
    return Measured(kind, device, devices, node_size, "0.0.0", 0, tuple(found))


def figures(devices: int = 8, node_size: int = 8, noise: float = 0.0, bus: float = 0.0) -> Figures:
    return fit(samples(devices, node_size, noise=noise, bus=bus), "cpu", devices, node_size)


def test_what_is_known_of_a_machine_is_found() -> None:
    found = figures(noise=0.05)
    assert found.inner is not None
    assert found.inner.kind == "memory"
    for estimate, value in (
        (found.rate, RATE),
        (found.memory, MEMORY),
        (found.launch, LAUNCH),
        (found.inner.bandwidth, LINK),
        (found.inner.latency, LATENCY),
    ):
        assert abs(estimate.value / value - 1) < 0.1
        assert 0 < estimate.error < 0.12
    assert found.others["bfloat16"].value == pytest.approx(0.25, rel=0.1)
    assert found.outer is None


def test_standard_errors_grow_with_noise() -> None:
    quiet, loud = figures(noise=0.02), figures(noise=0.4)
    assert quiet.inner is not None
    assert loud.inner is not None
    assert loud.inner.latency.error > 4 * quiet.inner.latency.error
    assert loud.memory.error > 4 * quiet.memory.error


def test_links_inside_and_between_nodes_are_told_apart() -> None:
    assert groups(8, 4) == [(2, 1), (4, 1), (2, 4)]
    found = figures(devices=8, node_size=4, noise=0.02)
    assert found.inner is not None
    assert found.outer is not None
    assert found.outer.bandwidth.value == pytest.approx(LINK / 4, rel=0.1)
    assert found.outer.latency.value == pytest.approx(4 * LATENCY, rel=0.1)
    assert found.inner.bandwidth.value == pytest.approx(LINK, rel=0.1)


def test_devices_that_share_a_memory_meet_once_and_copy() -> None:
    """A switch leaves a third of what is measured unexplained; a shared memory is found to a
    thousandth."""
    found = [s for s in samples(8, 8) if s.case.kind in KINDS]
    link, other = fit_link(found, "memory", 8), fit_link(found, "switch", 8)
    assert link is not None
    assert other is not None
    assert link.bandwidth.value == pytest.approx(LINK, rel=1e-3)
    assert link.latency.value == pytest.approx(LATENCY, rel=1e-3)
    assert max(link.off.values()) < 1e-3
    assert max(other.off.values()) > 0.3


def test_reduction_in_the_switch_gets_figures_of_its_own() -> None:
    collectives = [s for s in samples(8, 8, "gpu", bus=4 * LINK) if s.case.kind in KINDS]
    link = fit_link(collectives, "switch", 8)
    assert link is not None
    assert link.bus is not None
    assert link.bus.value == pytest.approx(4 * LINK, rel=0.2)
    plain = fit_link([s for s in samples(8, 8, "gpu") if s.case.kind in KINDS], "switch", 8)
    assert plain is not None
    assert plain.bus is None


@given(st.lists(st.tuples(st.floats(1e4, 1e12), st.floats(0.6, 1.6)), min_size=1, max_size=30))
def test_a_curve_rises_no_faster_than_flops(points: list[tuple[float, float]]) -> None:
    curve = monotone([(x, y * 1e10) for x, y in points])
    assert all(
        y0 <= y1 * (1 + 1e-9) and y1 <= y0 * x1 / x0 * (1 + 1e-9)
        for (x0, y0), (x1, y1) in pairwise(curve)
    )
    assert all(x1 >= x0 * 1.0 for (x0, _), (x1, _) in pairwise(curve))
    assert len(curve) <= 1 + math.log(1e8) / math.log(CLOSE) + len(points)


def test_nonsense_is_refused() -> None:
    good = samples(8, 8)
    for broken in (
        replace(good[0], time_s=0.0),
        replace(good[0], time_s=-1e-6),
        replace(good[0], time_s=math.nan),
        replace(good[0], time_s=math.inf),
    ):
        with pytest.raises(PlanError, match="P180"):
            fit([broken, *good[1:]], "cpu", 8, 8)
    with pytest.raises(PlanError, match="P180"):
        monotone([(1e6, 1e10), (1e9, 1e10 / MOST_FALL / 1.1)])


def test_a_file_is_read_back_with_its_errors_and_is_a_machine_for_plans(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        text(
            table(figures(noise=0.05), measured([], 8, 8), load_device("cpu"), "mine"), 'a "title"'
        )
    )
    mine = load_device(str(path))
    assert mine.node_size == 8
    assert mine.memory_bytes_per_s * mine.memory_efficiency == pytest.approx(MEMORY, rel=0.1)
    assert mine.inner.bandwidth_bytes_per_s * mine.inner.efficiency == pytest.approx(LINK, rel=0.1)
    assert mine.peak("float32") * mine.efficiency(1e9) == pytest.approx(RATE, rel=0.1)
    assert mine.measured["jax"] == "0.0.0"
    assert {
        "matmul.efficiency",
        "memory.efficiency",
        "kernel.launch",
        "inner.efficiency",
        "inner.latency",
    } <= mine.uncertainty.keys()
    assert mine.uncertainty.keys().isdisjoint(mine.guessed)
    assert "outer.latency" in mine.guessed
    assert (
        main(
            [
                "zoo:mlp",
                "--devices",
                "8",
                "--hardware",
                str(path),
                "--precision",
                "fp32",
                "-o",
                str(tmp_path / "p.json"),
                "--quiet",
            ]
        )
        == 0
    )


@cache
def one_gpu() -> Figures:
    return fit(samples(1, 1, "gpu"), "gpu", 1, 1)


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_small_products_that_all_take_a_launch_make_a_file(examples: int) -> None:
    """As on an H100: their rates rise as FLOPs do, and no digit of the file rises faster."""

    @given(st.lists(st.floats(2e-6, 4e-6), min_size=2, max_size=3))
    @settings(max_examples=examples)
    def make_a_file(times: list[float]) -> None:
        sizes = [2.0 * 128**3 * 8**i for i in range(len(times))]
        curve = monotone([(x, x / t) for x, t in zip(sizes, times, strict=True)])
        base = load_device("h100-sxm")
        made = table(
            replace(one_gpu(), curve=curve), measured([], 1, 1, "gpu", "H100"), base, "mine"
        )
        loaded = from_table(tomllib.loads(text(made, "mine")), "mine.toml")
        assert [loaded.efficiency(x) for x, _ in curve] == pytest.approx(
            [y / base.peak("bfloat16") for _, y in curve], rel=2e-3
        )

    make_a_file()


def test_a_data_sheet_that_is_beaten_is_another_devices(tmp_path: Path) -> None:
    found = fit(samples(8, 8, "gpu"), "gpu", 8, 8)
    base = load_device("a100-80gb")
    content = table(
        replace(found, memory=replace(found.memory, value=1.5e12), inner=None),
        measured([], 8, 8, "gpu", "NVIDIA A100-SXM4-80GB"),
        base,
        "a",
    )
    made = from_table(tomllib.loads(text(content, "t")), "t")
    assert made.peak_flops_per_s == base.peak_flops_per_s
    assert made.memory_efficiency == pytest.approx(1.5e12 / base.memory_bytes_per_s, rel=1e-3)
    assert made.inner == replace(base.inner, kind=made.inner.kind)
    with pytest.raises(PlanError, match="P184"):
        table(
            replace(found, memory=replace(found.memory, value=3e12), inner=None),
            measured([], 8, 8, "gpu"),
            base,
            "a",
        )


def test_attention_is_found_by_width_of_heads(tmp_path: Path) -> None:
    found = fit(samples(1, 1, "gpu"), "gpu", 1, 1)
    assert found.attention is not None
    assert found.attention.widths == (64, 128, 256)
    for k, pass_rates in enumerate((found.attention.forward, found.attention.backward)):
        assert pass_rates == pytest.approx([rates[k] for rates in ATTENTION.values()], rel=1e-6)
    assert found.attention.passes == pytest.approx((0.7, 3.0), rel=1e-6)
    base = load_device("h100-sxm")
    kind = "NVIDIA H100 80GB HBM3"
    real = replace(  # of a device that the data sheet can be of
        found, memory=replace(found.memory, value=2.9e12), inner=None
    )
    content = table(real, measured([], 1, 1, "gpu", kind), base, "mine")
    made = from_table(tomllib.loads(text(content, "t")), "t")
    assert made.attention is not None and base.attention is not None
    assert made.attention.passes == (0.7, 3.0)
    assert made.attention.forward[1] == pytest.approx(30e9 / 989e12, rel=1e-3)
    assert made.attention.masked == base.attention.masked
    assert "attention.masked" in made.guessed and "attention.passes" in made.sources
    # A machine without the kernel keeps what its file says.
    bare = fit([s for s in samples(1, 1, "gpu") if s.case.kind != "attention"], "gpu", 1, 1)
    assert bare.attention is None
    content = table(replace(bare, memory=real.memory), measured([], 1, 1, "gpu", kind), base, "b")
    kept = from_table(tomllib.loads(text(content, "t")), "t")
    assert kept.attention == base.attention and "attention.forward" in kept.guessed


def test_attention_that_no_rate_explains_is_left_as_the_file_has_it() -> None:
    """As on an H100, where times of short sequences were half of what longer ones made of them."""
    odd = [
        replace(s, time_s=s.time_s / 2) if s.case.kind == "attention" and s.case.rows == 512 else s
        for s in samples(1, 1, "gpu")
    ]
    assert fit(odd, "gpu", 1, 1).attention is None
    assert fit(samples(1, 1, "gpu", noise=0.02), "gpu", 1, 1).attention is not None


def test_turns_of_accelerators_have_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    from planner.calibrate import programs

    small = Case("matmul", "float32", 3 * 4 * 32 * 32, 32, 32)
    large = Case("stream", "float32", 2**30)
    assert [programs.chain_of(c, "gpu") for c in (small, large, Case("tiny"))] == [16, 4, 1]
    assert programs.chain_of(small, "cpu") == 1
    ones = replace(small, kind="stream", size_bytes=2**10)
    monkeypatch.setattr(programs, "chain_of", lambda case, platform: 4)
    device = jax.devices()[:1]
    four = programs.build(ones, device)
    monkeypatch.setattr(programs, "chain_of", lambda case, platform: 1)
    one = programs.build(ones, device)
    assert (four.kernels, one.kernels) == (4, 1)
    assert np.allclose(four.run(3, *four.arguments), one.run(12, *one.arguments))


@pytest.mark.slow
def test_every_case_of_a_machine_is_a_program_that_runs() -> None:
    """Of each kind the smallest, on the devices that the tests have."""
    jax = pytest.importorskip("jax")
    from planner.calibrate.programs import build

    smallest: dict[tuple[str, str], Case] = {}
    for case in sorted(cases(8, 4, "cpu", quick=True), key=lambda c: c.size_bytes):
        smallest.setdefault((case.kind, case.dtype), case)
    assert {"all-gather", "all-to-all", "matmul", "stream"} <= {kind for kind, _ in smallest}
    for case in smallest.values():
        assert build(case, jax.devices()) is not None


def test_what_a_failed_process_says_is_its_exception() -> None:
    log = "Traceback ...\nKeyError: 'x'\n" + 20 * "-" + "\nFor simplicity, JAX has removed its"
    assert last_said(log + " internal frames from the traceback.\n") == ["KeyError: 'x'"]
    assert last_said("") == []


def test_one_device_has_figures_without_links() -> None:
    found = fit(samples(1, 1), "cpu", 1, 1)
    assert found.inner is None
    made = from_table(
        tomllib.loads(text(table(found, measured([], 1, 1), load_device("cpu"), "one"), "t")), "t"
    )
    assert made.peak("float32") * made.efficiency(1e9) == pytest.approx(RATE, rel=0.1)
    assert made.inner == load_device("cpu").inner
    assert "inner.latency" in made.guessed


def test_devices_are_known_by_what_jax_calls_them() -> None:
    for kind, name in (
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("cpu", "cpu"),
    ):
        assert shipped_name(kind) == name
    with pytest.raises(PlanError, match="P183"):
        shipped_name("Abacus")


def test_node_sizes_that_do_not_divide_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["calibrate", "--devices", "4", "--node-size", "3", "-o", str(tmp_path / "x.toml")])
        == 2
    )
    assert "P182" in capsys.readouterr().err


@pytest.mark.slow
def test_this_host_is_measured_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "here.toml"
    assert (
        main(["calibrate", "--devices", "4", "--node-size", "2", "--quick", "-o", str(target)]) == 0
    )
    said = capsys.readouterr()
    assert "outer link as a switch" in said.err
    here = load_device(str(target))
    assert here.node_size == 2
    assert here.measured["devices"] == "4"
    assert 1e8 < here.peak("float32") < 1e13
    assert 1e8 < here.memory_bytes_per_s * here.memory_efficiency < 1e12
    assert 1e-7 < here.launch_s < 1e-3
    assert 1e-6 < here.inner.latency_s < 1e-1


def test_plans_made_with_a_file_know_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan = tmp_path / "mine.toml", tmp_path / "p.json"
    path.write_text(text(table(figures(), measured([], 8, 8), load_device("cpu"), "mine"), "t"))
    assert (
        main(
            [
                "zoo:mlp",
                "--devices",
                "8",
                "--hardware",
                str(path),
                "--precision",
                "fp32",
                "-o",
                str(plan),
                "--quiet",
            ]
        )
        == 0
    )
    anew = ["explain", str(plan), "/layers.0/linear/MatMul_output_0", "--model", "zoo:mlp"]
    assert main(anew) == 0
    path.unlink()
    assert main(anew) == 2
    assert "mine.toml" in capsys.readouterr().err


def test_products_are_found_by_their_extents() -> None:
    """Times of a device whose library is slower than an H100's give that device's prices, those of
    `--quick` are too few, and what has no tiles gets none."""
    base = load_device("h100-sxm")
    assert base.tiles is not None
    slower = replace(
        base.tiles, efficiency=0.7, start_s=1.5e-6, kernel_s=3e-6, sums_bytes_per_s=1.5e12
    )
    extents = [
        (c.rows, c.edge, c.edge)
        for c in cases(1, 1, "gpu", False)
        if c.kind == "matmul" and c.dtype == "bfloat16"
    ]
    listed = [MeasuredProduct(*each, 1.0) for each in extents]
    true = priced_s(replace(base, tiles=slower), listed)
    timed = tuple(replace(x, time_s=float(t)) for x, t in zip(listed, true, strict=True))
    shape = replace(fit(samples(1, 1, "gpu"), "gpu", 1, 1), products=timed)
    shape = replace(
        shape,
        curve=((1e12, listed[6].flops / true[6]),),
        memory=replace(shape.memory, value=base.memory_bytes_per_s * base.memory_efficiency),
    )
    made = table(shape, measured([], 1, 1, "gpu", "H100"), base, "mine")
    found = from_table(tomllib.loads(text(made, "mine")), "mine.toml")
    assert found.tiles is not None and found.tiles.units == base.tiles.units
    assert priced_s(found, listed) == pytest.approx(true, rel=0.08)
    assert "13 samples" in made["sources"]["products.efficiency"]
    assert "products.units" in made["guessed"]
    few = table(replace(shape, products=timed[:4]), measured([], 1, 1, "gpu", "H100"), base, "x")
    assert few["products"]["efficiency"] == base.tiles.efficiency
    assert "products.efficiency" in few["guessed"]
    other = load_device("a10")
    assert other.tiles is None and fit_tiles(other, timed) is None
