"""plan verify for hardware that is not there: targets, what stored texts of the GPU and TPU
compilers are read as, and the compilers themselves.

tests/compiled holds what they wrote for a small perceptron (batch 16, 8 to 16 to 4, mesh data=2 by
model=4, ZeRO stage 1 over data, bfloat16) and the convolutions of a small ResNet, without the
instructions that are not asked about.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.collective import CollectiveUse
from planner.pins.pins import Pins
from planner.pricing.plan_price import price_plan
from planner.verify import ahead, host, worker
from planner.verify import explain as differences
from planner.verify.chips import CHIPS, chip
from planner.verify.hlo.buffers import read_assignment
from planner.verify.hlo.flops import dot_flops, dots
from planner.verify.hlo.origins import Origins
from planner.verify.hlo.paddings import Padding
from planner.verify.hlo.passes import history, pieces, products, totals
from planner.verify.hlo.program import traffic
from planner.verify.predicted import flops_by_node, predict
from planner.verify.report import TRAFFIC, Figure, VerifyReport
from planner.verify.targets import Target, parse_target, require
from planner.verify.timing import pricer_of
from planner.verify.worker import recorded_model

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parents[1].joinpath("compiled")
MESH = (("data", 2), ("model", 4))
FIRST, SECOND = "/layers.0/linear/MatMul", "/layers.1/linear/MatMul"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


def origins(text: str) -> Origins:
    return Origins.of(text, sample("mlp_program"))


@pytest.mark.parametrize(
    ("text", "devices", "found"),
    [
        ("cpu", 3, Target("cpu")),
        ("gpu:h100", 12, Target("gpu", "h100")),
        ("gpu:h100-sxm", 8, Target("gpu", "h100-sxm")),
        ("tpu:v5e:4x4", 16, Target("tpu", "v5e", (4, 4))),
        ("tpu:v4:2x2x1", 4, Target("tpu", "v4", (2, 2, 1))),
        ("tpu:v3:2x2", 8, Target("tpu", "v3", (2, 2))),
    ],
)
def test_targets_are_read(text: str, devices: int, found: Target) -> None:
    assert parse_target(text, devices) == found and found.text == text
    assert found.devices in (0, devices)


@pytest.mark.parametrize(
    ("target", "chips"),
    [
        (Target("tpu", "v5e", (1, 1)), (1, 1, 1)),
        (Target("tpu", "v5p", (1, 1, 1)), (1, 1, 1)),
        (Target("tpu", "v6e", (1, 4)), (1, 2, 1)),
        (Target("tpu", "v5e", (2, 4)), ()),
        (Target("tpu", "v5p", (2, 2, 4)), ()),
        (Target("cpu"), ()),
    ],
)
def test_slices_that_hosts_do_not_make_up_say_what_theirs_has(
    target: Target, chips: tuple[int, ...]
) -> None:
    """The compiler takes hosts for 2 x 2 x 1 chips, and refuses other slices without being told."""
    assert target.small_host == chips


@pytest.mark.parametrize(
    "text", ["gpu", "gpu:h1000", "tpu:v5e", "tpu:v5e:4x", "cpu:8", "", "tpu:v5e:4x4"]
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_target(text, 8)
    assert error.value.code == ("P165" if text.endswith("4x4") else "P164") and error.value.help


@pytest.mark.parametrize("text", ["gpu:a100", "tpu:v5e:2x4"])
def test_an_absent_compiler_says_what_to_install(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: (
            None if name.startswith(("jax_", "libtpu")) else real(name, package)
        ),
    )
    with pytest.raises(PlanError) as error:
        require(parse_target(text, 8))
    assert error.value.code == "P163" and f"meshwright[{text[:3]}-compiler]" in error.value.help[0]
    assert f"{text[:3]}-compiler" in (ROOT / "pyproject.toml").read_text()


def test_chips_describe_themselves() -> None:
    for known in CHIPS.values():
        text = known.description()
        assert (
            text.count("{") == text.count("}")
            and f'name: "{known.name}"' in text
            and f"core_count: {known.cores}\n" in text
        )
    assert chip("a100-80gb") is CHIPS["a100"] and chip("tpu-v4") is None
    given = ROOT.parent / "shared" / "data" / "gpu" / "h100_sxm.textproto"
    if given.exists():
        keys = [line.split(":")[0].split("{")[0].strip() for line in given.read_text().splitlines()]
        text = CHIPS["h100"].description()
        ours = [line.split(":")[0].split("{")[0].strip() for line in text.splitlines()]
        added = {"runtime_version", "compile_time_toolkit_version"}  # of CUDA
        assert [key for key in ours if key not in added] == keys


def test_the_gpu_compiler_makes_again_what_a_step_has_no_room_for_in_the_pool_of_its_program() -> (
    None
):
    """Without a GPU XLA goes by 80 % of the memory it is told of; with one by what the program took
    at the start."""
    h100 = CHIPS["h100"]
    assert f"device_memory_size: {h100.memory_bytes}\n" in h100.description()
    assert (
        "device_memory_size: 95000\n" in h100.description(76_000)
        and h100.description(76_000).replace("95000", str(h100.memory_bytes)) == h100.description()
    )


def test_a_host_without_room_refuses() -> None:
    target = Target("gpu", "h100")
    host.refuse_if_too_large(target, 100, host.host_need_bytes(target, 100))
    with pytest.raises(PlanError) as error:
        host.refuse_if_too_large(target, 100, host.host_need_bytes(target, 100) - 1)
    assert error.value.code == "P166" and "operators" in error.value.what


def test_collectives_of_both_compilers() -> None:
    # 8 rows of this device's 4 outputs are summed over model; weights [8, 4] and [4, 4] and biases
    # 4 and 4 go over data, and the loss.
    whole, loss = 2 * (8 * 4 + 4 * 4 + 4 + 4), 4
    gpu = {
        kind: {axes: cell["payload"] for axes, cell in by.items()}
        for kind, by in traffic(sample("gpu_mlp"), MESH).items()
    }
    assert gpu == {
        "all-gather": {"data": whole},
        "reduce-scatter": {"data": whole},
        "all-reduce": {"model": 2 * 8 * 4, "data": loss},
    }
    tpu = traffic(sample("tpu_mlp"), MESH)
    # Over two devices the TPU compiler sums whole arrays instead of scattering, and gathers biases
    # by summing them into zeros.
    assert tpu["all-reduce"]["data"]["payload"] == whole + 2 * (4 + 4) + loss and tpu["all-gather"][
        "data"
    ]["payload"] == 2 * (8 * 4 + 4 * 4)


def test_products_are_named_by_their_operators() -> None:
    text = sample("tpu_mlp")
    found: Counter[str] = Counter()
    for instruction, flops in dots(text):
        found[origins(text).name(instruction.attributes)] += flops
    # Batch 8 a device: forward and weight gradient of the first layer, and the operand's gradient
    # too of the second.
    assert found == {FIRST: 2 * 2 * 8 * 8 * 4, SECOND: 3 * 2 * 8 * 4 * 4} and dot_flops(
        text
    ) == sum(found.values())
    lines = differences.of_flops(
        differences.apart(text, sample("mlp_program"), {FIRST: 1024, SECOND: 1024})
    )
    assert lines == (f"products of {SECOND}: predicted 1,024 FLOPs, compiled 768",)


def test_small_products_are_padded_for_cublas_and_said() -> None:
    nodes = differences.apart(sample("gpu_mlp"), sample("mlp_program"), {FIRST: 1024, SECOND: 768})
    lines = differences.of_flops(nodes)
    assert lines == (
        f"products of {SECOND}: predicted 768 FLOPs, compiled 3,072",
        f"products of {FIRST}: predicted 1,024 FLOPs, compiled 2,048",
    )
    assert (
        differences.spoken(nodes, {FIRST: 1024, SECOND: 768}, ("cublas-pad-for-gemms",))
        == f"{SECOND} +2,304 FLOPs by the compiler (cublas-pad-for-gemms)"
    )
    assert (
        differences.spoken([(FIRST, 0, 5), (SECOND, 9, 1)], {FIRST: 0, SECOND: 9}, ())
        == f"{SECOND} -8 FLOPs"
    )  # what went the same way as all together


def test_convolutions_of_the_gpu_compiler_count_like_their_forward() -> None:
    by = Counter[str]()
    for instruction, flops in dots(sample("gpu_convolutions")):
        by[instruction.name.split(".")[0]] += flops
    stem, inner = 2 * (2 * 16 * 16 * 8) * (7 * 7 * 3), 2 * (2 * 8 * 8 * 8) * (3 * 3 * 8)
    assert (
        by["cudnn-conv"] == by["cudnn-conv-bw-filter"] == stem + 2 * inner
        and by["cudnn-conv-bw-input"] == 2 * inner
    )


def test_arguments_and_outputs_are_counted_without_tiles() -> None:
    elements = 2 * (8 * 4 + 4 * 4 + 4 + 4) + 3 * 4 * (4 * 4 + 2 * 4 + 2 + 2)
    batch, rest = 2 * 8 * 8 + 4 * 8, 4
    for name in ("gpu_mlp", "tpu_mlp"):
        assert differences.entry_bytes(sample(name)) == (elements + batch + rest, elements + rest)
    (line,) = differences.of_arguments(
        sample("tpu_mlp"), read_assignment(sample("tpu_mlp_buffers"))
    )
    assert line.startswith(
        "layout: 19 arguments are padded to whole tiles, +17,820 B"
        " (state['layers.0.linear.weight'][0] f32[4,4] 64 B as 2,048 B"
    )
    assert (
        differences.of_arguments(sample("gpu_mlp"), read_assignment(sample("gpu_mlp_buffers")))
        == ()
    )


def test_temporaries_are_named_and_never_counted_twice() -> None:
    held = read_assignment(sample("gpu_mlp_buffers")).temporaries
    assert (held[0].name, held[0].size_bytes) == ("cublas-lt-matmul.1", 4 * 2**20)
    assert differences.of_temporaries(
        sample("gpu_mlp"), sample("mlp_program"), read_assignment(sample("gpu_mlp_buffers"))
    ) == (f"temporary: s8[4194304] 4,194,304 B of {FIRST} (cublas-lt-matmul.1)",)
    text = """allocation 3: size 32, preallocated-temp:
 value: <1 a @0> (size=16,offset=0): f32[4]{0}
 value: <2 b @0> (size=16,offset=8): f32[4]{0}
 value: <3 c{1} @0> (size=8,offset=16): f32[2]{0}
 value: <4 d @0> (size=99,offset=0): f32[2]{0:T(128)S(1)}
allocation 4: size 64, parameter 2, shape |f32[16]| at ShapeIndex {}:
 value: <5 e @0> (size=64,offset=0): f32[16]{0}
"""
    found = read_assignment(text)
    assert [(h.name, h.size_bytes) for h in found.temporaries] == [
        ("a", 16),
        ("c", 8),
    ] and found.parameters == {2: 64}


PLACED = """allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=64,offset=0): f32[16]{0:T(128)}
 value: <2 late @0> (size=64,offset=0): f32[16]{0:T(128)}
 value: <3 new @0> (size=64,offset=0): f32[16]{0:T(128)}
allocation 1: size 4096, preallocated-temp:
 value: <4 kept @0> (size=2048,offset=0): bf16[4,128]{1,0:T(8,128)(2,1)}
 value: <5 made{1} @0> (size=1024,offset=2048): f32[256]{0:T(256)}
 value: <6 body.1{1} (phi) @0> (size=1024,offset=2048): f32[256]{0:T(256)}
 value: <7 made @0> (size=16,offset=3072): (f32[999]{0:T(256)}, f32[256]{0:T(256)})
 value: <8 early @0> (size=2048,offset=1024): f32[512]{0:T(512)}
allocation 3: size 512, maybe-live-out:
 value: <11 loss @0> (size=512,offset=0): f32[]{:T(128)}
allocation 2: size 512, color 1, preallocated-temp:
 value: <9 near @1> (size=512,offset=0): f32[128]{0:T(128)S(1)}
 value: <10 copy-start.2{0} @1> (size=512,offset=0): f32[128]{0:T(128)S(1)}
"""
LIVED = """HloLiveRange (max 5):
  InstructionSequence:
    0:param.1
    1:early
    2:kept
    3:made
    4:late
    5:new
  BufferLiveRange:
    param.1{}:0-3
    early{}:1-2
    kept{}:2-4
    made{}:3-4
    made{1}:3-4
    body.1{1}:3-4
    late{}:3-4
    new{}:4-5
    near{}:2-3
    copy-start.2{0}:3-4
"""


def test_the_fullest_moment_of_a_program_is_found_and_made_up_of_its_parts() -> None:
    found = read_assignment(PLACED, LIVED)
    assert (
        found.arena_bytes == 4096
        and found.schedule == ("param.1", "early", "kept", "made", "late", "new")
        and found.moment is not None
    )
    moment = found.moment
    # kept and what made{1} and the loop's own name for it share; early is over, and would overlap
    # both.
    assert (moment.at, moment.used_bytes) == ("made", 2048 + 1024 + 16) and [
        h.name for h in moment.held
    ] == ["kept", "body.1", "made"]
    assert [h.tile_bytes for h in moment.held] == [2048 - 4 * 128 * 2, 0, 0]
    assert [h.name for h in moment.on_chip] == ["near"] and [h.name for h in moment.donated] == [
        "late"
    ]
    assert read_assignment(PLACED).moment is None and read_assignment(PLACED).arena_bytes == 4096
    assert (found.given_bytes, found.result_bytes) == (64, 512)


def test_a_compilation_ends_with_its_buffers_and_errors_reach_the_caller(tmp_path: Path) -> None:
    stop = threading.Event()

    def compile_slowly() -> None:
        (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(PLACED)
        (tmp_path / "m.after_optimizations-live-range.txt").write_text(LIVED)
        (tmp_path / "m.after_optimizations_after_buffer_assignment.txt").write_text(
            "ENTRY %main { }"
        )
        stop.wait(60)

    found = ahead._until_buffers(compile_slowly, tmp_path, Target("tpu", "v5e", (2, 4)))
    assert not stop.is_set()
    stop.set()
    assert (
        found.text.startswith("ENTRY")
        and (found.argument_bytes, found.temporary_bytes) == (64, 4096)
        and found.peak_bytes == 64 + 512 + 4096
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="no dumps"):
        ahead._until_buffers(lambda: None, tmp_path / "empty", Target("tpu", "v5e", (2, 4)))
    with pytest.raises(ZeroDivisionError):
        ahead._until_buffers(lambda: 1 // 0, tmp_path / "empty", Target("tpu", "v5e", (2, 4)))


def test_differences_of_memory_add_up_and_name_their_causes() -> None:
    text = """ENTRY %main (param.1: f32[16]) -> f32[16] {
  %param.1 = f32[16]{0} parameter(0)
  %early = f32[512]{0} fusion(%param.1), kind=kLoop, calls=%a, metadata={op_name="jit(step)/jvp()/mul"}
  %kept = bf16[4,128]{1,0} fusion(%early), kind=kLoop, calls=%b, metadata={op_name="jit(step)/jvp()/add"}
  %made = (f32[999]{0}, f32[256]{0}) fusion(%kept), kind=kLoop, calls=%c, metadata={op_name="jit(step)/transpose(jvp())/mul"}
  ROOT %new = f32[16]{0} fusion(%made), kind=kLoop, calls=%d
}
"""
    lines = differences.of_memory(text, "", read_assignment(PLACED, LIVED), 1000, 1100)
    assert (
        lines[0]
        == "temporaries +1,996 B: gaps between values +1,008 B, from the forward pass +1,048 B,"
        " made later -60 B"
    )
    assert (
        "3,088 B in use of 4,096 B" in lines[1]
        and "2,048 B from the forward pass (1,000 B of activations predicted), 1,040 B made later"
        in lines[1]
    )
    assert lines[2:] == (
        "beyond elements, to fill whole tiles: 1,024 B (bf16[4,128] 2,048 B (kept))",
        "beside them in on-chip memory: 512 B (f32[128] 512 B (near))",
        "beside them in the places of arguments: 64 B (f32[16] 64 B (late))",
    )
    assert differences.of_memory(text, "", read_assignment(PLACED), 1000, 1100) == ()


def test_a_batch_written_as_spatial_dims_counts_what_it_multiplies() -> None:
    """Eight products of the batch [8, 4] x [8, 4], written by the TPU compiler as one convolution
    whose other pairs meet padding alone."""
    line = """ENTRY %main (a: bf16[8,16,4], b: bf16[8,4,32]) -> bf16[8,16,32] {{
  %a = bf16[8,16,4]{{2,1,0}} parameter(0)
  %b = bf16[8,4,32]{{2,1,0}} parameter(1)
  ROOT %c = bf16[8,16,32]{{2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels=0bf_0io->0bf
}}
"""
    whole = 8 * 2 * 16 * 4 * 32
    assert (
        dot_flops(line.format(window="size=8 stride=8 pad=7_7 lhs_dilate=7 rhs_reversal=1"))
        == whole
    )
    assert dot_flops(line.format(window="size=8 stride=7 lhs_dilate=8")) == whole
    # A true convolution counts what it does to its padding.
    assert dot_flops(line.format(window="size=3 pad=1_1")) == 3 * whole


def test_passes_that_change_totals_are_named() -> None:
    seen = history(SAMPLES / "tpu_passes", MESH, lambda text: origins(text).name)
    assert seen is not None
    assert totals(seen.first) == {
        ("all-gather", "data"): 112,
        ("reduce-scatter", "data"): 112,
        ("all-reduce", "model"): 64,
        ("all-reduce", "data"): 4,
    }
    moved = {(c.by, c.kind, c.axes): c.delta_bytes for c in seen.later}
    assert (
        moved["reduce-scatter-decomposer", "reduce-scatter", "data"] == -112
        and moved["reduce-scatter-decomposer", "all-reduce", "data"] == 112
    )
    assert (
        moved["all_gather_decomposer", "all-gather", "data"]
        == -16
        == -moved["all_gather_decomposer", "all-reduce", "data"]
    )
    assert not any(c.by == "all-reduce-combiner" for c in seen.later)
    assert {what for _, _, what in seen.first["all-reduce", "model"]} == {f"{SECOND}_output_0"}
    # Settled after the decomposer and before the combiner: arrays are still apart.
    assert (
        not seen.settled["reduce-scatter", "data"] and len(seen.settled["all-reduce", "data"]) == 4
    )


def test_a_pass_that_makes_slices_plain_is_not_said_to_scatter(tmp_path: Path) -> None:
    """The partitioner wrote the sum of which each device keeps a slice; the pass that drops a
    barrier in between sends nothing else, and one that sends twice does."""

    def text(*lines: str) -> str:
        body = "\n".join(
            f"  {line}"
            for line in ("%p = f32[16]{0} parameter(0)", "%id = u32[] partition-id()", *lines)
        )
        adding = (
            "%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  ROOT %b = f32[]"
            " parameter(1)\n}\n"
        )
        return f"HloModule m\n\n{adding}\nENTRY %main (p: f32[16]) -> f32[8] {{\n{body}\n}}\n"

    def reduce(name: str, of: str) -> str:
        return (
            f"%{name} = f32[16]{{0}} all-reduce(%{of}),"
            " replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum"
        )

    def cut(of: str) -> str:
        return f"ROOT %s = f32[8]{{0}} dynamic-slice(%{of}, %id), dynamic_slice_sizes={{8}}"

    stages = {
        "spmd-partitioning": text(
            reduce("r", "p"), "%bar = f32[16]{0} opt-barrier(%r)", cut("bar")
        ),
        "barrier-expander": text(reduce("r.1", "p"), cut("r.1")),
        "twice": text(reduce("r.1", "p"), reduce("again", "r.1"), cut("again")),
    }
    for k, (name, dumped) in enumerate(stages.items()):
        (tmp_path / f"module_0001.jit_step.{k:04}.some.after_{name}.before_next.txt").write_text(
            dumped
        )
    seen = history(tmp_path, MESH, lambda text: lambda attributes: "", merge_ar_slice=True)
    assert seen is not None
    assert {k: n for k, n in totals(seen.first).items() if n} == {("reduce-scatter", "data"): 64}
    assert {(c.by, c.kind): c.delta_bytes for c in seen.later} == {("twice", "all-reduce"): 64}


def test_lines_about_collectives_add_up_or_say_so() -> None:
    uses = [
        CollectiveUse("all-gather", ("data",), 112, 1, "optimizer", "w"),
        CollectiveUse("reduce-scatter", ("data",), 100, 1, "gradient", "w"),
        CollectiveUse("all-reduce", ("data",), 4, 1, "forward", "loss"),
        CollectiveUse("all-reduce", ("model",), 64, 1, "forward", "h"),
    ]
    final = {("all-reduce", "model"): 64, ("all-reduce", "data"): 132, ("all-gather", "data"): 96}
    sent = differences.of_traffic(
        SAMPLES / "tpu_passes", MESH, uses, final, sample("mlp_program"), True
    )
    lines = sent.lines
    # What passes did is the compiler's own; what the program has otherwise from the start, or
    # nobody saw, is not.
    assert sent.own == {
        ("all-reduce", "data"): 128,
        ("reduce-scatter", "data"): 88,
        ("all-gather", "data"): 16,
    }
    assert set(sent.by) == {"all_gather_decomposer", "reduce-scatter-decomposer"}
    assert len(lines) == 3 and not any(
        "all-reduce over model" in line or "seen in no pass" in line for line in lines
    )
    assert lines[0].startswith(
        "all-reduce over data +128 B by all_gather_decomposer +16 B, reduce-scatter-decomposer +112"
        " B; not predicted: bf16[8,4]"
    )
    gone = (
        "reduce-scatter over data -100 B by as emitted +12 B, reduce-scatter-decomposer -112 B;"
        " predicted and not there: 100 B (gradient of w)"
    )
    assert lines[1] == gone
    sent = differences.of_traffic(
        SAMPLES / "tpu_passes",
        MESH,
        uses,
        {**final, ("all-gather", "data"): 90},
        sample("mlp_program"),
        True,
    )
    lines = sent.lines
    assert sent.own["all-gather", "data"] == 22 - 6
    assert lines[-1].startswith(
        "all-gather over data -22 B by all_gather_decomposer -16 B, seen in no pass -6 B; "
    )


def test_a_folder_without_dumps_is_said(tmp_path: Path) -> None:
    assert "no dumps" in differences.of_traffic(tmp_path, MESH, (), {}, "", True).lines[0]
    assert differences.by_passes(tmp_path, 1, False) == ("", ())


def test_passes_that_change_products_are_named(tmp_path: Path) -> None:
    """A product made twice, one padded (which has a line of its own), and one taken away: all add
    up from the program as emitted."""

    def text(*rows: int) -> str:
        products = "\n".join(
            f"%d.{k} = f32[{n},4] dot(%p.{n}, %q), lhs_contracting_dims={{1}},"
            " rhs_contracting_dims={0}"
            for k, n in enumerate(rows)
        )
        given = "\n".join(
            f"%p.{n} = f32[{n},8] parameter({k + 1})" for k, n in enumerate(sorted(set(rows)))
        )
        return (
            "HloModule m\n\nENTRY %main (q: f32[8,4]) -> f32[] {\n%q = f32[8,4]"
            f" parameter(0)\n{given}\n{products}\nROOT %c = f32[] constant(0)\n}}\n"
        )

    stages = {
        "pipeline-start": text(2, 3),
        "cse": text(2, 3),
        "rematerialization": text(2, 3, 3),
        "pad": text(2, 3, 4),
        "algsimp": text(3, 4),
    }
    for k, (name, dumped) in enumerate(stages.items()):
        (tmp_path / f"module_0001.jit_step.{k:04}.some.after_{name}.before_next.txt").write_text(
            dumped
        )
    found = products(tmp_path)
    assert found == (
        2 * 5 * 32,
        {"rematerialization": 2 * 3 * 32, "pad": 2 * 32, "algsimp": -2 * 2 * 32},
    )
    line, names = differences.by_passes(
        tmp_path, 2 * 5 * 32, False, [Padding("pad", "node", ((3, 4),), 64)]
    )
    assert line == "dot FLOPs +64 by rematerialization +192, algsimp -128" and names == (
        "rematerialization",
        "algsimp",
    )
    assert (
        differences.by_passes(tmp_path, 300, False)[0]
        == "dot FLOPs +148 by as emitted +20, rematerialization +192, algsimp -128, pad +64"
    )


def test_pieces_multiply_by_loops() -> None:
    found = pieces(sample("gpu_mlp"), MESH, lambda attributes: "")
    assert totals(found)["all-reduce", "model"] == 64 and totals(found)["all-gather", "data"] == 112


def test_figures_have_tolerances_and_sums_that_do_not_cancel() -> None:
    exact, near, far = (
        Figure("a", 100, 100),
        Figure("b", 100, 104, tolerance=0.05),
        Figure("c", 100, 110, tolerance=0.05),
    )
    assert (
        (exact.ok, near.ok, far.ok) == (True, True, False)
        and far.mark == "+10.00 %, beyond 5 %"
        and near.mark == "+4.00 %, within 5 %"
    )
    swapped = Figure("all collectives", 100, 100, tolerance=0.01, off=50, of=TRAFFIC)
    assert not swapped.ok and swapped.mark.startswith("DIFFERS")
    assert (
        replace(swapped, own=50).ok
        and replace(swapped, own=50).mark == "sum of differences 50.00 %, the compiler's own"
        and not replace(swapped, own=48).ok
    )
    assert not swapped.ok and "50.00 %" in swapped.mark
    assert Figure("new", 0, 7, judged=False, shown=True).mark == "+7 B"
    report = VerifyReport(
        "m",
        "shard_map",
        {"data": 2},
        "train",
        "from shapes",
        (near, swapped),
        None,
        "",
        False,
        (),
        "h100 GPUs",
        ("cse: all-reduce over data -2 B",),
    )
    assert (
        not report.ok
        and "  - cse: all-reduce over data -2 B" in report.text()
        and "2 h100 GPUs" in report.text()
    )
    assert VerifyReport.from_dict(report.to_dict()) == report


@pytest.fixture(scope="module")
def strategy() -> planner.Strategy:
    return planner.plan(
        "zoo:mlp-tiny",
        devices=8,
        batch=16,
        pins=Pins(mesh={"data": (2,), "model": (4,)}),
        baselines=False,
        hardware=str(ROOT / "benchmarks" / "eager.toml"),
    )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_predicted_bytes_are_those_of_the_emitted_tables(
    strategy: planner.Strategy, compute: str
) -> None:
    """Against the arrays that the program itself names, on the devices of this process; and FLOPs
    by node add up."""
    import jax
    import numpy as np

    from planner.emit.program import emit
    from planner.verify.compiled import shapes
    from planner.verify.numerics import load_program

    assert strategy.graph is not None
    for zero in (0, 1, 3):
        plan = replace(strategy.plan, zero_stage=zero, zero_axes=("data",))
        found = predict(strategy.graph, plan, workload="train", compute=compute)
        module = load_program(
            emit(strategy.graph, plan, workload="train", compute=compute), compute=compute
        )
        mesh = module.make_mesh()
        tables: dict[str, Any] = {
            name: shapes(module, name, mesh) for name in ("PARAMS", "FROZEN", "INPUTS")
        }

        def local(array: Any) -> int:
            return (
                int(np.prod(array.sharding.shard_shape(array.shape), dtype=int))
                * array.dtype.itemsize
            )

        parameters, batch = (
            sum(local(a) for a in tables[name].values()) for name in ("PARAMS", "INPUTS")
        )
        state = 0
        for key, moments in jax.eval_shape(
            module.start_state,
            {k: jax.ShapeDtypeStruct(a.shape, "float32") for k, a in tables["PARAMS"].items()},
        ).items():
            spec = jax.sharding.NamedSharding(mesh, module.GRADIENTS[key][-1])
            state += sum(
                int(np.prod(spec.shard_shape(m.shape), dtype=int)) * m.dtype.itemsize
                for m in moments
            )
        assert (
            found.argument_bytes == parameters + state + batch + 4
            and found.output_bytes == parameters + state + 4
        )
        assert sum(flops_by_node(found.flow, found.runs).values()) == found.flops


def test_precision_decides_the_bytes_and_never_those_of_the_loss(
    strategy: planner.Strategy,
) -> None:
    assert strategy.graph is not None
    wide, short = (
        predict(strategy.graph, strategy.plan, workload="train", compute=c)
        for c in ("float32", "bfloat16")
    )
    loss = [u.payload_bytes for u in short.uses if u.what == "loss"]
    assert (
        loss
        and loss == [u.payload_bytes for u in wide.uses if u.what == "loss"]
        and set(short.traffic) == set(wide.traffic)
    )
    assert sum(u.payload_bytes for u in wide.uses) - sum(loss) == 2 * (
        sum(u.payload_bytes for u in short.uses) - sum(loss)
    )
    assert wide.flops == short.flops


def test_the_caller_sets_no_cpu_flags_for_other_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION", raising=False)
    assert "host_platform_device_count=8" in worker.environment(8)["XLA_FLAGS"]
    other = worker.environment(8, "gpu")
    assert (
        "host_platform_device_count" not in other["XLA_FLAGS"]
        and "JAX_DEFAULT_MATMUL_PRECISION" not in other
        and other["JAX_PLATFORMS"] == "cpu"
    )


def compiler(text: str) -> str:
    """The target, or a skip where its compiler is not installed."""
    try:
        require(parse_target(text, 8))
    except PlanError as e:
        pytest.skip(e.what)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_the_gpu_compiler_agrees(strategy: planner.Strategy, backend: str, compute: str) -> None:
    report = worker.verify(
        strategy, "zoo:mlp-tiny", target=compiler("gpu:h100"), backend=backend, compute=compute
    )
    by = {f.what: f for f in report.figures}
    assert report.ok, report.text()
    assert (
        by["all collectives"].compiled > 0
        and not by["all collectives"].distance
        and not by["argument bytes"].distance
    )
    assert report.numbers is None and "compiled without them" in report.text()


@pytest.mark.slow
def test_the_tpu_compiler_is_read_and_its_passes_are_named(strategy: planner.Strategy) -> None:
    report = worker.verify(strategy, "zoo:mlp-tiny", target=compiler("tpu:v5e:2x4"))
    by = {f.what: f for f in report.figures}
    assert (
        not by["argument bytes"].distance
        and not by["output bytes"].distance
        and by["arguments as stored"].compiled > by["argument bytes"].compiled
    )
    if by["all collectives"].distance:
        assert any(
            "reduce-scatter-decomposer" in line or "all_gather_decomposer" in line
            for line in report.differences
        )
    assert not any("seen in no pass" in line for line in report.differences)
    assert not by["dot FLOPs"].distance
    (line,) = (line for line in report.differences if line.startswith("temporaries "))
    off, _, parts = line.partition(": ")
    apart = by["temporaries"].compiled - (by["temporaries"].predicted or 0)
    assert (
        sum(int(n) for n in re.findall(r"[+-]\d+", parts.replace(",", "")))
        == int(off.split()[1].replace(",", ""))
        == apart
    )


@pytest.mark.slow
def test_a_compiler_that_ends_its_process_is_an_error_message(
    strategy: planner.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("tpu:v5e:2x4")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    with pytest.raises(PlanError) as error:
        worker.verify(strategy, "zoo:mlp-tiny", target="tpu:v5e:2x4")
    assert error.value.code == "P162" and "tpu:v5e:2x4" in error.value.what


@pytest.mark.parametrize(
    "source",
    [
        "zoo:mixtral-tiny,layers=1",
        "zoo:mixtral-tiny,layers=1,form=capacity",
        "zoo:llama-tiny,layers=1",
        "zoo:resnet-tiny",
    ],
)
def test_products_of_bfloat16_programs_multiply_bfloat16(source: str) -> None:
    """A float32 value anywhere carries on into everything that is added to it: found by a
    collective twice its size in the GPU compiler's text."""
    from planner.emit.program import emit
    from planner.execution.plan import Plan
    from planner.workload.model import Model, Workload

    graph = Model.open(source, Workload(kind="train", batch=4), 1).graph(1)
    program = emit(graph, Plan((), {}), workload="train", compute="bfloat16")
    text = lowered(program)
    products = re.findall(
        r"stablehlo\.(?:dot_general|convolution)\b.*?: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text
    )
    wide = [p for p in products if all(kind.endswith("xf32") for kind in p)]
    # Gradients of attention's scores are float32, as the scores are: five dims, batch and both
    # kinds of heads first.
    assert products and not [p for p in wide if p[0].count("x") < 5]


def test_float32_is_compiled_as_precise_as_programs_run_it() -> None:
    """GPUs multiply float32 as TF32 where nothing is said, and programs say it."""
    import jax

    from planner.emit.program import emit
    from planner.execution.plan import Plan
    from planner.verify.ahead import compile_ahead
    from planner.workload.model import Model, Workload

    graph = Model.open("zoo:mlp-tiny", Workload(kind="train", batch=4), 1).graph(1)
    program = emit(graph, Plan((("data", 8),), {}), workload="train")
    with jax.default_matmul_precision("default"):
        text = compile_ahead(program, "train", Target("cpu"), "float32", 8).text
    products = re.findall(r" dot\(.*", text)
    assert products and all("operand_precision={highest,highest}" in p for p in products)


def lowered(program: Any) -> str:
    """StableHLO of a program's step on one device, nothing compiled."""
    import jax

    from planner.verify.compiled import shapes
    from planner.verify.numerics import load_program

    module = load_program(program, compute="bfloat16")
    mesh = jax.make_mesh((), (), axis_types=(), devices=jax.devices()[:1])
    module.__dict__["make_mesh"] = lambda: mesh
    params, frozen, batch = (shapes(module, name, mesh) for name in ("PARAMS", "FROZEN", "INPUTS"))
    return str(module.make_gradients(mesh).lower(params, frozen, batch).as_text())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("hardware", "model", "batch", "pins"),
    [
        ("h100-sxm", "llama-tiny,layers=4", 32, "dp=8,micro=2,blocks=written-out"),
        ("h100-sxm", "bert-tiny,layers=4", 32, "dp=4,tp=2,micro=2,blocks=written-out"),
        ("h100-sxm", "llama-tiny,layers=4", 32, "dp=8,zero=3"),
        ("tpu-v5e", "llama-tiny,layers=4", 32, "dp=8,recompute=block"),
        ("tpu-v5p", "gpt-tiny,layers=4", 32, "dp=4,tp=2"),
    ],
)
def test_memory_is_predicted_as_it_was_planned(
    hardware: str, model: str, batch: int, pins: str
) -> None:
    """What `plan verify` holds against a compiler is the plan's own price of a device, but for the
    allowance for fragmentation."""
    made = planner.plan(
        f"zoo:{model}", devices=8, batch=batch, hardware=hardware, pins=pins, baselines=False
    )
    own, source = pricer_of(made), recorded_model(made, f"zoo:{model}")
    graph = source.graph(int(made.techniques["microbatches"]))
    base = GraphFacts.of(graph, training=True)
    plan, runtime = made.plan_for(graph), replace(own.runtime, memory_slack=0.0)
    planned = price_plan(base, plan, replace(own, runtime=runtime))[0].memory
    device = own.topology.device
    told = ahead.planned_memory(graph, plan, own.recipe, "jax-shard_map", device=device)
    assert told == asdict(planned)
