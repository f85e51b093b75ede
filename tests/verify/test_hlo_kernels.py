"""Kernels of compiled programs, counted by hand: bytes, FLOPs, loops, and what a schedule hides."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.hardware.device import AttentionPass
from planner.verify.hlo.fused_attention import FusedAttention
from planner.verify.hlo.kernels import Kernel, kernels
from planner.verify.hlo.schedule import Schedule
from planner.verify.hlo.text import Computation, Instruction, parse
from planner.verify.hlo.trip_counts import Site

SAMPLES = Path(__file__).parents[1] / "compiled"


def found(text: str) -> dict[str, tuple[int, int, int]]:
    """Kernel -> (runs, bytes of one, FLOPs of one)."""
    return {
        s.selected.instruction.name: (s.count, s.selected.moved_bytes, s.selected.flops)
        for s in kernels(parse(text))
        if s.heaviest
    }


ONE = """
%halves (a: f32[8,16], at: s32[], b: f32[2,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %b = f32[2,16]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %twice = f32[2,16]{1,0} add(%b, %b)
  ROOT %put = f32[8,16]{1,0} dynamic-update-slice(%a, %twice, %at, %zero)
}

%row (a: f32[8,16], at: s32[]) -> f32[1,16] {
  %a.1 = f32[8,16]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %flat = f32[8,16]{1,0} bitcast(%a.1)
  ROOT %cut = f32[1,16]{1,0} dynamic-slice(%flat, %at.1, %zero.1), dynamic_slice_sizes={1,16}
}

%product (l: bf16[4,8], r: bf16[8,16]) -> f32[4,16] {
  %l = bf16[4,8]{1,0} parameter(0)
  %r = bf16[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%pair (a: f32[8,16], b: f32[2,16]) -> (f32[8,16], f32[2]) {
  %a.2 = f32[8,16]{1,0} parameter(0)
  %b.2 = f32[2,16]{1,0} parameter(1)
  %zero.2 = f32[] constant(0)
  %sums = f32[2]{0} reduce(%b.2, %zero.2), dimensions={1}, to_apply=%sum
  %again = f32[8,16]{1,0} negate(%a.2)
  ROOT %both = (f32[8,16]{1,0}, f32[2]{0}) tuple(%again, %sums)
}

ENTRY %main (x: f32[8,16], at: s32[], b: f32[2,16], l: bf16[4,8], r: bf16[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[2,16]{1,0} parameter(2)
  %left = bf16[4,8]{1,0} parameter(3)
  %right = bf16[8,16]{1,0} parameter(4)
  %placed = f32[8,16]{1,0} fusion(%x, %i, %y), kind=kLoop, calls=%halves
  %taken = f32[1,16]{1,0} fusion(%placed, %i), kind=kLoop, calls=%row
  %gemm = f32[4,16]{1,0} fusion(%left, %right), kind=kCustom, calls=%product
  %several = (f32[8,16]{1,0}, f32[2]{0}) fusion(%placed, %y), kind=kLoop, calls=%pair
  %first = f32[8,16]{1,0} get-tuple-element(%several), index=0
  %turned = f32[16,8]{1,0} transpose(%first), dimensions={1,0}
  ROOT %copied = f32[8,16]{1,0} bitcast(%turned)
}
"""


def test_bytes_of_kernels_are_what_they_read_and_write() -> None:
    assert found(ONE) == {
        # The slice is written where it was, what it is made of and its place are read.
        "placed": (1, 2 * 16 * 4 + 4 + 2 * 16 * 4, 0),
        "taken": (1, 16 * 4 + 4 + 16 * 4, 0),
        "gemm": (1, 4 * 8 * 2 + 8 * 16 * 2 + 4 * 16 * 4, 2 * 4 * 8 * 16),
        "several": (1, 2 * 8 * 16 * 4 + 2 * 16 * 4 + 2 * 4, 0),
        "turned": (1, 2 * 8 * 16 * 4, 0),
    }


def test_a_slice_put_into_what_a_fusion_makes_is_written_with_all_around_it() -> None:
    text = ONE.replace("dynamic-update-slice(%a,", "dynamic-update-slice(%made,").replace(
        "  %twice =", "  %made = f32[8,16]{1,0} negate(%a)\n  %twice ="
    )
    assert found(text)["placed"][1] == 2 * 8 * 16 * 4 + 4 + 2 * 16 * 4


ASYNCHRONOUS = """
%row (stack: bf16[48,64], i: s32[]) -> bf16[1,64] {
  %stack = bf16[48,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = bf16[1,64]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,64}
}

%put (into: bf16[48,64], at: s32[], one: bf16[1,64]) -> bf16[48,64] {
  %into = bf16[48,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %one = bf16[1,64]{1,0} parameter(2)
  %none = s32[] constant(0)
  ROOT %replaced = bf16[48,64]{1,0} dynamic-update-slice(%into, %one, %at, %none)
}

ENTRY %main (w: bf16[48,64], k: s32[]) -> bf16[48,64] {
  %w = bf16[48,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %start = ((bf16[48,64]{1,0}, s32[]), bf16[1,64]{1,0}, u32[]) fusion-start(%w, %k), kind=kLoop, calls=%row
  %done = bf16[1,64]{1,0} fusion-done(%start)
  %twice = bf16[1,64]{1,0} add(%done, %done)
  %begun = ((bf16[48,64]{1,0}, s32[], bf16[1,64]{1,0}), bf16[48,64]{1,0}, u32[]) fusion-start(%w, %k, %twice), kind=kLoop, calls=%put
  ROOT %ended = bf16[48,64]{1,0} fusion-done(%begun)
}
"""


def test_copies_that_are_not_waited_for_move_what_they_cut_out_and_put_in() -> None:
    """As jax 0.11 writes them for GPUs: the type of a start has its operands, too."""
    assert found(ASYNCHRONOUS) == {
        "start": (1, 2 * 64 * 2 + 4, 0),
        "twice": (1, 3 * 64 * 2, 0),
        "begun": (1, 2 * 64 * 2 + 4, 0),
    }


AHEAD = """
ENTRY %main (w: bf16[64,128], h: f32[32]) -> bf16[64,128] {
  %w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %h = f32[32]{0:T(128)S(5)} parameter(1)
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0}, u32[]) copy-start(%w)
  %copy-done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %near = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} negate(%copy-done)
  %far = bf16[64,128]{1,0:T(8,128)(2,1)} add(%copy-done, %near)
  ROOT %host = f32[32]{0:T(128)S(5)} copy(%h)
}
"""


def test_what_is_copied_into_on_chip_memory_counts_with_its_first_reader() -> None:
    size = 64 * 128 * 2
    assert found(AHEAD) == {"near": (1, size, 0), "far": (1, size, 0), "host": (1, 0, 0)}


def nested(trips: tuple[int, ...]) -> str:
    """Loops within one another, with a copy of 4,096 bytes in each body and one outside."""
    whole = "(s32[], f32[1024])"

    def copied(k: int) -> str:
        return f"  %copy.{k} = f32[1024]{{0}} copy(%x.{k})\n"

    def computation(k: int, head: str) -> str:
        lines = f"{head} %body.{k} (p.{k}: {whole}) -> {whole} {{\n".lstrip()
        lines += f"  %p.{k} = {whole} parameter(0)\n"
        lines += f"  %i.{k} = s32[] get-tuple-element(%p.{k}), index=0\n"
        lines += f"  %x.{k} = f32[1024]{{0}} get-tuple-element(%p.{k}), index=1\n" + copied(k)
        if k < len(trips):
            lines += f"  %t.{k} = {whole} tuple(%i.{k}, %copy.{k})\n"
            lines += (
                f"  ROOT %while.{k} = {whole} while(%t.{k}), condition=%test, body=%body.{k + 1},"
                f' backend_config={{"known_trip_count":{{"n":"{trips[k]}"}}}}\n'
            )
        else:
            lines += f"  ROOT %r.{k} = {whole} tuple(%i.{k}, %copy.{k})\n"
        return lines + "}\n\n"

    test = (
        f"%test (q: {whole}) -> pred[] {{\n  %q = {whole} parameter(0)\n"
        "  ROOT %c = pred[] constant(true)\n}\n\n"
    )
    inner = "".join(computation(k, "") for k in range(len(trips), 0, -1))
    return test + inner + computation(0, "ENTRY")


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple))
def test_loops_multiply(trips: tuple[int, ...]) -> None:
    text = nested(trips)
    assert found(text) == {
        f"copy.{k}": (prod(trips[:k]), 2 * 4096, 0) for k in range(len(trips) + 1)
    }
    followed = Schedule(parse(text), lambda i, _: float(i.opcode == "copy"), {}).followed()
    assert followed.seconds == sum(prod(trips[:k]) for k in range(len(trips) + 1))


def attention(name: str) -> list[Kernel]:
    sites: tuple[Site[Kernel], ...] = kernels(parse((SAMPLES / f"{name}.txt").read_text()))
    return [s.selected for s in sites if s.selected.attention]


def test_fused_attention_does_what_a_causal_mask_leaves() -> None:
    forward, backward = attention("gpu_attention")
    assert forward.attention and backward.attention
    batch, rows, heads, width = 2, 256, 4, 64
    one = 2 * batch * heads * rows * rows * width
    causal = one * (rows + 1) // (2 * rows)
    assert forward.attention == FusedAttention(
        "cudnn", AttentionPass(False, 64), 2 * one, 2 * causal
    )
    assert backward.attention == FusedAttention(
        "cudnn", AttentionPass(True, 64), 5 * one, 5 * causal
    )
    assert forward.flops == 2 * causal

    # Splash makes scores and the gradient of weights in both kernels of its backward pass, of all
    # pairs of a block: 256 queries and keys are one.
    tpu = attention("tpu_attention")
    splash = [k.attention for k in tpu]
    assert {k.dtype for k in (forward, backward, *tpu)} == {"bf16"}
    assert splash == [
        FusedAttention("splash", AttentionPass(False, 64), 2 * one, 2 * one),
        FusedAttention("splash", AttentionPass(True, 64), 2 * one, 3 * one),
        FusedAttention("splash", AttentionPass(True, 64), 3 * one, 4 * one),
    ]


def test_splash_without_positions_meets_every_key() -> None:
    """Of a causal mask its last operand is the positions of queries."""
    text = (SAMPLES / "tpu_attention.txt").read_text()
    last = r", (?:/\*index=5\*/)?%[\w.-]+\), custom_call_target=\"tpu_custom_call\""
    text, changed = re.subn(last, '), custom_call_target="tpu_custom_call"', text)
    assert changed == 3
    one = 2 * 2 * 4 * 256 * 256 * 64
    sites: tuple[Site[Kernel], ...] = kernels(parse(text))
    assert [s.selected.attention for s in sites if s.selected.attention] == [
        FusedAttention("splash", AttentionPass(False, 64), 2 * one, 2 * one),
        FusedAttention("splash", AttentionPass(True, 64), 2 * one, 3 * one),
        FusedAttention("splash", AttentionPass(True, 64), 3 * one, 4 * one),
    ]


SENT = """
%cond (q: (s32[], f32[1024])) -> pred[] {
  %q = (s32[], f32[1024]) parameter(0)
  ROOT %c = pred[] constant(true)
}

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %inner = f32[1024]{0} all-reduce(%x), replica_groups={}, to_apply=%sum
  %copy.0 = f32[1024]{0} copy(%inner)
  ROOT %r = (s32[], f32[1024]) tuple(%i, %copy.0)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %arg = f32[1024]{0} parameter(0)
  %zero = s32[] constant(0)
  %all-gather-start = (f32[128]{0}, f32[1024]{0}) all-gather-start(%arg), dimensions={0}
  %copy.1 = f32[1024]{0} copy(%arg)
  %async-start = ((f32[1024]), f32[128], u32[]) async-start(%copy.1), calls=%wrapped
  %all-gather-done = f32[1024]{0} all-gather-done(%all-gather-start)
  %start = (s32[], f32[1024]) tuple(%zero, %all-gather-done)
  %loop = (s32[], f32[1024]) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %async-done = f32[128]{0} async-done(%async-start)
  ROOT %copy.2 = f32[128]{0} copy(%async-done)
}

%wrapped (w: f32[1024]) -> f32[128] {
  %w = f32[1024]{0} parameter(0)
  ROOT %scatter = f32[128]{0} reduce-scatter(%w), dimensions={0}, to_apply=%sum
}
"""


@pytest.mark.parametrize(
    ("gather", "scatter", "inner", "waited", "seconds"),
    [
        # A copy takes a second. The gather hides under one, the scatter under the loop.
        (1.0, 3.0, 0.0, {"all-gather-start": 0.0, "scatter": 0.0, "inner": 0.0}, 5.0),
        (4.0, 0.0, 0.0, {"all-gather-start": 3.0, "scatter": 0.0, "inner": 0.0}, 8.0),
        # The scatter begins when the gather is over, at 4, and ends at 10; the loop is over at 7.
        (4.0, 6.0, 0.0, {"all-gather-start": 3.0, "scatter": 3.0, "inner": 0.0}, 11.0),
        # Within the loop there is nothing between start and done: all three trips wait.
        (0.0, 0.0, 2.0, {"all-gather-start": 0.0, "scatter": 0.0, "inner": 6.0}, 11.0),
    ],
)
def test_a_schedule_hides_what_runs_between_start_and_done(
    gather: float, scatter: float, inner: float, waited: dict[str, float], seconds: float
) -> None:
    def kernel_s(instruction: Instruction, _: Computation) -> float:
        return float(instruction.opcode == "copy")

    links = {"all-gather-start": gather, "scatter": scatter, "inner": inner}
    timed = Schedule(parse(SENT), kernel_s, links).followed()
    assert timed.waited == waited and timed.seconds == seconds
