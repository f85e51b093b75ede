"""Collectives and dot FLOPs of really compiled programs against bytes and products computed by
hand."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.program import collectives, traffic

MESH = (("data", 2), ("model", 4))
SIZES = {"data": ("data", 2), "model": ("model", 4), "both": ("data+model", 8)}
OPERAND = 24 * 16 * 4


@pytest.fixture(scope="module")
def programs():
    script = Path(__file__).with_name("hlo_programs.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def text(programs, name):
    return programs[name]


@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize(
    ("primitive", "kind", "scale"),
    [
        ("psum", "all-reduce", lambda n: (1, Fraction(2 * (n - 1), n))),
        ("psum_scatter", "reduce-scatter", lambda n: (1, Fraction(n - 1, n))),
        ("all_gather", "all-gather", lambda n: (n, Fraction(n - 1))),
        ("all_to_all", "all-to-all", lambda n: (1, Fraction(n - 1, n))),
        ("ppermute", "collective-permute", lambda n: (1, Fraction(1))),
    ],
)
def test_each_kind_over_each_axis(programs, primitive, kind, scale, label):
    axes, n = SIZES[label]
    payload, wire = scale(n)
    expected = {kind: {axes: {"payload": OPERAND * payload, "wire": OPERAND * wire}}}
    assert traffic(text(programs, f"{primitive} {label}"), MESH) == expected


def test_all_gather_to_invarying_is_one_gather(programs):
    assert traffic(text(programs, "invarying"), MESH) == {
        "all-gather": {"model": {"payload": 32 * 16 * 4, "wire": Fraction(1536)}}
    }


def test_a_combined_all_reduce_sums_its_tuple(programs):
    (found,) = collectives(text(programs, "two sums"), MESH)
    assert (found.payload_bytes, found.dtype, found.promoted) == (OPERAND + 2 * 4 * 4, "f32", False)


def test_cpu_promotion_of_bf16_is_said(programs):
    for name in ("bf16", "bf16 gather"):
        (found,) = collectives(text(programs, name), MESH)
        assert found.promoted and found.dtype == "f32"


@pytest.mark.parametrize(("name", "runs"), [("scan", 5), ("nested scan", 15), ("fori", 7)])
def test_loops_multiply(programs, name, runs):
    (found,) = collectives(text(programs, name), MESH)
    assert (found.axes, found.payload_bytes, found.count, found.unknown_loop) == (
        "model",
        32 * 16 * 4,
        runs,
        "",
    )
    assert found.op_name.endswith("psum_invariant")
    assert traffic(text(programs, name), MESH)["all-reduce"]["model"]["payload"] == 2048 * runs
    assert dot_flops(text(programs, name)) == 2 * 32 * 16 * 16 * runs


@pytest.mark.parametrize(("name", "runs"), [("scan", 5), ("nested scan", 15), ("fori", 7)])
def test_trip_counts_are_solved_when_not_written(programs, name, runs):
    stripped = text(programs, name).replace('"known_trip_count"', '"not_known"')
    assert stripped != text(programs, name)
    (found,) = collectives(stripped, MESH)
    assert (found.count, found.unknown_loop) == (runs, "")


def test_a_loop_with_a_dynamic_bound_counts_once_and_says_so(programs):
    (found,) = collectives(text(programs, "dynamic"), MESH)
    assert found.count == 1 and found.unknown_loop.startswith("while")


def test_of_a_conditional_the_heaviest_branch_is_totalled(programs):
    found = collectives(text(programs, "branch"), MESH)
    assert sorted((c.branch[-1], c.heaviest) for c in found) == [
        ("0", False),
        ("1", True),
        ("1", True),
    ]
    assert traffic(text(programs, "branch"), MESH)["all-reduce"]["model"]["payload"] == 2 * 2048
    assert dot_flops(text(programs, "branch")) == 2 * (2 * 32 * 16 * 16)


def test_a_training_step(programs):
    # Forward: one sum of the 16x24 activations over model; backward: both weight shards (24x8
    # twice) and the loss over data.
    assert traffic(text(programs, "train"), MESH) == {
        "all-reduce": {
            "data": {"payload": 2 * 24 * 8 * 4 + 4, "wire": Fraction(2 * 24 * 8 * 4 + 4)},
            "model": {"payload": 16 * 24 * 4, "wire": Fraction(16 * 24 * 4 * 3, 2)},
        }
    }
    # Two products forward, two weight gradients, one activation gradient: x is data and needs none.
    assert dot_flops(text(programs, "train")) == 5 * 2 * 16 * 24 * 8


def test_the_partitioners_all_reduce_with_a_slice_is_a_reduce_scatter(programs):
    plain = traffic(text(programs, "jit"), MESH)
    merged = traffic(text(programs, "jit"), MESH, merge_ar_slice=True)
    w1, w2 = (
        32 * 32 * 4,
        32 * 16 * 4,
    )  # local gradients: w1 [32, 128/4] stays whole over data, w2 [128/4, 16] is cut by data
    assert plain["all-reduce"]["data"]["payload"] == w1 + w2 and "reduce-scatter" not in plain
    assert (
        merged["all-reduce"]["data"]["payload"] == w1
        and merged["reduce-scatter"]["data"]["payload"] == w2
    )
    assert merged["reduce-scatter"]["data"]["wire"] == Fraction(w2, 2)
    assert merged["all-gather"] == plain["all-gather"]


def test_convolutions_count_as_products(programs):
    forward = 2 * (4 * 8 * 8 * 32) * (3 * 3 * 4)
    assert dot_flops(text(programs, "conv")) == forward
    # Strides become holes in the gradients' operands; holes multiply nothing, so the step is three
    # forwards.
    assert dot_flops(text(programs, "conv grad")) == 3 * forward
    assert dot_flops(text(programs, "batched")) == 2 * (2 * 3) * 8 * 24 * 16


def test_axes_of_size_one_never_appear(programs):
    mesh = (("stage", 1), ("data", 2), ("expert", 1), ("model", 4))
    assert list(traffic(text(programs, "psum both"), mesh)["all-reduce"]) == ["data+model"]


def test_another_mesh_order_is_another_label(programs):
    # The groups {0,4},{1,5},... are the outer axis of 2x4 whatever its name, and no axis of 4x2.
    assert list(
        traffic(text(programs, "psum data"), (("a", 2), ("b", 2), ("c", 2)))["all-reduce"]
    ) == ["a"]
    assert list(traffic(text(programs, "psum data"), (("a", 4), ("b", 2)))["all-reduce"]) == [
        "irregular:{0,4}+3 more"
    ]


def test_a_wrong_mesh_is_an_error(programs):
    with pytest.raises(
        ValueError, match=r"device \d of a collective is outside the mesh of 4 devices"
    ):
        collectives(text(programs, "psum data"), (("data", 2), ("model", 2)))


def test_text_that_is_not_hlo_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        dot_flops("module @jit_f { func.func public @main() }")


def test_reading_needs_no_jax():
    code = "import sys, planner.verify.hlo.program; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]
        ).returncode
        == 0
    )
