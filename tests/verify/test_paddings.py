"""Products that compiler passes pad: found in dumps after each pass, and nothing else that changes
FLOPs is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.verify import explain as differences
from planner.verify.hlo.paddings import Padding, paddings

FRAMES = """HloModule m

FileNames
1 "emitted.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=2 end_line=2 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""
SOURCE = "def step():\n    fc = x @ w  # /fc/MatMul -> fc\n"
META = 'metadata={op_name="jit(step)/dot_general" stack_frame_id=1}'


def module(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{FRAMES}ENTRY %main (x: bf16[64,1000], w: bf16[2048,1000]) -> bf16[64,2048]"
        f" {{\n{body}\n}}\n"
    )


def product(name: str, left: str, right: str, shape: str, root: bool = True) -> str:
    contracted = f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, {META}"
    return (
        f"{'ROOT ' if root else ''}%{name} = bf16[{shape}]{{1,0}} dot(%{left}, %{right}),"
        f" {contracted}"
    )


PARAMETERS = (
    "%x = bf16[64,1000]{1,0} parameter(0)",
    "%w = bf16[2048,1000]{1,0} parameter(1)",
    "%zero = bf16[] constant(0)",
)
PLAIN = module(*PARAMETERS, product("y", "x", "w", "64,2048"))
WIDER = (
    "%a = bf16[64,1024]{1,0} pad(%x, %zero), padding=0_0x0_24",
    "%b = bf16[2048,1024]{1,0} pad(%w, %zero), padding=0_0x0_24",
)
SPLIT = module(
    *PARAMETERS,
    *WIDER,
    "%l = bf16[64,4,256]{2,1,0} reshape(%a)",
    "%r = bf16[2048,4,256]{2,1,0} reshape(%b)",
    "ROOT %d = f32[4,64,2048]{2,1,0} dot(%l, %r), lhs_batch_dims={1},"
    f" lhs_contracting_dims={{2}}, rhs_batch_dims={{1}}, rhs_contracting_dims={{2}}, {META}",
)
TWICE = module(
    *PARAMETERS,
    *WIDER,
    product("y", "x", "w", "64,2048", root=False),
    product("again", "x", "w", "64,2048"),
)
LARGER = module(
    *PARAMETERS,
    *WIDER,
    "%s = bf16[64,1024]{1,0} broadcast(%zero), dimensions={}",
    product("y", "a", "b", "96,2048"),
)
ADDED = 2 * 64 * 2048 * 24


def dump(folder: Path, *stages: tuple[str, str]) -> Path:
    for k, (name, text) in enumerate(stages):
        (
            folder / f"module_0001.jit_step.{k:04}.normalization.after_{name}.before_next.txt"
        ).write_text(text)
    return folder


def found(folder: Path, *stages: tuple[str, str], placed: bool = False) -> tuple[Padding, ...]:
    from planner.verify.hlo.origins import Origins

    return paddings(dump(folder, *stages), lambda text: Origins.of(text, SOURCE).name, placed)


def test_a_pass_that_pads_is_named_with_its_operator_extents_and_flops(tmp_path: Path) -> None:
    (one,) = found(tmp_path, ("dce", PLAIN), ("splitk-rewriter", SPLIT), ("layout", SPLIT))
    assert one == Padding("splitk-rewriter", "/fc/MatMul", ((1000, 1024),), ADDED)
    assert (
        str(one)
        == "padding of products of /fc/MatMul by splitk-rewriter: 1,000 to 1,024, +6,291,456 FLOPs"
    )


def test_before_the_partitioner_nothing_counts(tmp_path: Path) -> None:
    assert (
        found(
            tmp_path,
            ("dce", PLAIN),
            ("early", SPLIT),
            ("spmd-partitioning", SPLIT),
            ("late", SPLIT),
            placed=True,
        )
        == ()
    )


@pytest.mark.parametrize("text", [TWICE, LARGER], ids=["done twice", "more than the pads explain"])
def test_other_changes_are_no_padding(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, ("dce", PLAIN), ("some-pass", text)) == ()


def test_pads_that_were_there_explain_nothing(tmp_path: Path) -> None:
    padded_before = module(*PARAMETERS, *WIDER, product("y", "x", "w", "64,2048"))
    assert found(tmp_path, ("dce", padded_before), ("some-pass", SPLIT)) == ()


def test_what_is_padded_is_no_difference_and_the_rest_stays_one() -> None:
    one = Padding("splitk-rewriter", "/fc/MatMul", ((1000, 1024),), ADDED)
    plain = 2 * 64 * 2048 * 1000
    assert differences.apart(SPLIT, SOURCE, {"/fc/MatMul": plain}, (one,)) == []
    assert differences.apart(SPLIT, SOURCE, {"/fc/MatMul": plain - 2}, (one,)) == [
        ("/fc/MatMul", plain - 2, plain)
    ]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_any_extents_to_whole_units(m: int, n: int, k: int) -> None:
    """Rows, columns and what is summed over go to multiples of 8, as matrix units want: all that it
    adds is found."""
    import tempfile

    up = [-(-e // 8) * 8 for e in (m, n, k)]
    inputs = (
        f"%x = bf16[{m},{k}]{{1,0}} parameter(0)",
        f"%w = bf16[{n},{k}]{{1,0}} parameter(1)",
        "%zero = bf16[] constant(0)",
    )
    pads = tuple(
        f"%{new} = bf16[{e},{up[2]}]{{1,0}} pad(%{old}, %zero), padding=0_{e - d}x0_{up[2] - k}"
        for new, old, d, e in (("a", "x", m, up[0]), ("b", "w", n, up[1]))
    )
    before = module(*inputs, product("y", "x", "w", f"{m},{n}"))
    after = module(
        *inputs,
        *pads,
        product("y", "a", "b", f"{up[0]},{up[1]}", root=False),
        f"ROOT %s = bf16[{m},{n}]{{1,0}} slice(%y), slice={{[0:{m}], [0:{n}]}}",
    )
    with tempfile.TemporaryDirectory() as folder:
        seen = found(Path(folder), ("dce", before), ("cublas-pad-for-gemms", after))
    assert sum(p.flops for p in seen) == 2 * (up[0] * up[1] * up[2] - m * n * k) and len(seen) == (
        up != [m, n, k]
    )
