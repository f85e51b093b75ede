"""GPU and TPU spellings, replica groups in all their notations, loops and library calls: short
texts in the compilers' own notation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.groups import axes_label, groups, permute_label
from planner.verify.hlo.program import collectives, traffic
from planner.verify.hlo.text import Shape, parse_shapes

MESH = (("data", 2), ("model", 4))


def module(body, before=""):
    return (
        f"HloModule m, is_scheduled=true\n\n{before}\nENTRY %main.1 (p: bf16[64,32]) -> bf16[64,32]"
        f" {{\n{body}\n}}\n"
    )


GPU = module(
    """\
  %p = bf16[64,32]{1,0} parameter(0), metadata={op_name="x"}
  %all-reduce-start = bf16[64,32]{1,0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/psum" stack_frame_id=12}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %all-reduce-done = bf16[64,32]{1,0} all-reduce-done(%all-reduce-start), metadata={op_name="jit(f)/psum"}
  %reduce-scatter-start = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}) reduce-scatter-start(%all-reduce-done), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %reduce-scatter-done = bf16[8,32]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %all-gather-start = (bf16[8,32]{1,0}, bf16[16,32]{1,0}) all-gather-start(%reduce-scatter-done), channel_id=2, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %all-gather-done = bf16[16,32]{1,0} all-gather-done(%all-gather-start)
  %ag2 = ((bf16[8,32]{1,0}, f32[2]{0}), (bf16[16,32]{1,0}, f32[4]{0})) all-gather-start(%reduce-scatter-done, %two), channel_id=2, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}, use_global_device_ids=true
  %two = f32[2]{0} constant({1, 2})
  %collective-permute-start = (bf16[16,32]{1,0}, bf16[16,32]{1,0}) collective-permute-start(%all-gather-done), channel_id=1, \
source_target_pairs={{0,0},{0,4},{4,4}}
  ROOT %collective-permute-done = bf16[16,32]{1,0} collective-permute-done(%collective-permute-start)"""
)


def test_gpu_start_and_done_count_once():
    found = collectives(GPU, MESH)
    assert [(c.kind, c.axes, c.payload_bytes, c.dtype) for c in found] == [
        ("all-reduce", "model", 4096, "bf16"),
        ("reduce-scatter", "data+model", 4096, "bf16"),
        ("all-gather", "data", 1024, "bf16"),
        ("all-gather", "data", 1024 + 16, "bf16+f32"),
        ("collective-permute", "data", 1024, "bf16"),
    ]
    assert found[0].op_name == "jit(f)/psum" and not found[0].promoted
    assert found[0].wire_bytes == Fraction(3, 2) * 4096


TPU_ASYNC = """\
%fused_computation.39 (param_0.60: bf16[32,32]) -> (bf16[32,32], bf16[64,32], s32[2], u32[], u32[], /*index=5*/u32[]) {
  %param_0.60 = bf16[32,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.65 = bf16[64,32]{1,0:T(8,128)(2,1)} all-gather(%param_0.60), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="CHAIN"}, metadata={op_name="jit(step)/all_gather"}
  ROOT %custom-call.1 = (bf16[32,32]{1,0:T(8,128)(2,1)S(1)}, bf16[64,32]{1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)}, \
u32[]{:S(2)}, /*index=5*/u32[]{:S(2)}) custom-call(%all-gather.65), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.72 (param_0.63: bf16[32,32], param_9.2: bf16[64,32]) -> (bf16[64,64], bf16[64,32]) {
  %param_9.2 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %convolution.53 = bf16[64,64]{1,0:T(8,128)(2,1)} convolution(%param_9.2, %param_9.2), dim_labels=bf_oi->bf
  %param_0.63 = bf16[32,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.67 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.63), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="CHAIN"}, metadata={op_name="jit(step)/all_gather"}
  ROOT %tuple.8 = (bf16[64,64]{1,0:T(8,128)(2,1)}, bf16[64,32]{1,0:T(8,128)(2,1)S(1)}) tuple(%convolution.53, %all-gather.67)
}

%fused_computation.41 (param_0.64: bf16[32,32]) -> bf16[64,32] {
  %param_0.64 = bf16[32,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.69 = bf16[64,32]{1,0:T(8,128)(2,1)} all-gather(%param_0.64), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="CHAIN"}, metadata={op_name="jit(step)/all_gather"}
  ROOT %custom-call.3 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} custom-call(%all-gather.69), custom_call_target="AsyncCollectiveDone"
}
"""


def tpu_async(suffix, chain):
    """The three fusions of one asynchronous gather, with names of their own."""
    text = TPU_ASYNC.replace("CHAIN", chain)
    for name in ("fused_computation.39", "async_collective_fusion.72", "fused_computation.41"):
        text = text.replace(name, name + suffix)
    return text


def calls(suffix):
    return "\n".join(
        f"  %{name}{suffix} = (bf16[64,32]{{1,0:T(8,128)(2,1)}}) fusion(%half, %p), kind=kCustom,"
        f" calls=%{name}{suffix}"
        for name in ("fused_computation.39", "async_collective_fusion.72", "fused_computation.41")
    )


def test_tpu_asynchronous_repeats_count_once_and_chains_stay_apart():
    head = "  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)\n"
    head += "  %half = bf16[32,32]{1,0:T(8,128)(2,1)S(1)} slice(%p), slice={[0:32], [0:32]}\n"
    text = module(
        head + calls(".a") + "\n" + calls(".b"), tpu_async(".a", "0") + "\n" + tpu_async(".b", "1")
    )
    assert traffic(text, MESH) == {
        "all-gather": {"data": {"payload": 2 * 4096, "wire": Fraction(4096)}}
    }
    assert dot_flops(text) == 2 * (2 * 64 * 64 * 32)


def test_tpu_all_reduce_scatter_is_a_reduce_scatter_even_with_a_channel_in_common():
    scatter = """\
%all-reduce-scatter.3 (input: bf16[64,32]) -> bf16[18,32] {
  %input = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[72,32]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_8x0_0
  %all-reduce.11 = bf16[72,32]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %dynamic-slice.23 = bf16[18,32]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.11, %id, %id), dynamic_slice_sizes={18,32}
}
"""
    body = """\
  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %fusion = bf16[18,32]{1,0:T(8,128)(2,1)S(1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %ar = bf16[64,32]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add"""
    found = traffic(module(body, scatter), MESH)
    assert (
        found["reduce-scatter"]["model"]["payload"] == 72 * 32 * 2
    )  # the padded rows are really sent
    assert found["all-reduce"]["model"]["payload"] == 64 * 32 * 2


def test_layouts_tuples_and_odd_types_are_read():
    text = (
        "((bf16[64,32]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0:T(128)E(4)}), u32[]{:S(2)},"
        " f8e4m3fn[<=8,2]{1,0}, token[])"
    )
    shapes = parse_shapes(text)
    assert shapes == (
        Shape("bf16", (64, 32)),
        Shape("s4", (3,)),
        Shape("u32", ()),
        Shape("f8e4m3fn", (8, 2)),
        Shape("token", ()),
    )
    assert [s.size_bytes for s in shapes] == [4096, 2, 4, 16, 0]
    with pytest.raises(ValueError, match="unknown HLO element type 'q7'"):
        _ = Shape("q7", (1,)).size_bytes


def test_operands_may_carry_types_and_names_may_lack_percent():
    text = """HloModule m

ENTRY main (x: f32[8]) -> f32[8] {
  x = f32[8]{0} parameter(0)
  ROOT ar = f32[8]{0} all-reduce(f32[8]{0} x), replica_groups={}, to_apply=add
}
"""
    assert traffic(text, MESH) == {
        "all-reduce": {"data+model": {"payload": 32, "wire": Fraction(56)}}
    }


@pytest.mark.parametrize(
    ("target", "left", "config", "contracted"),
    [
        ("__onednn$matmul", "bf16[64,32]{1,0}", "", 32),
        (
            "__onednn$matmul",
            "bf16[32,64]{1,0}",
            ', backend_config={"onednn_matmul_config":{"transpose_a":true}}',
            32,
        ),
        (
            "__cublas$gemm",
            "bf16[48,64]{1,0}",
            ', backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}',
            48,
        ),
    ],
)
def test_library_products_count(target, left, config, contracted):
    body = f"""\
  %p = {left} parameter(0)
  %q = bf16[{contracted},16]{{1,0}} parameter(1)
  ROOT %c = (bf16[64,16]{{1,0}}, s8[4096]{{0}}) custom-call(%p, %q), custom_call_target="{target}"{config}"""
    assert dot_flops(module(body)) == 2 * 64 * 16 * contracted


def test_a_batched_product_written_as_a_dilated_convolution():
    # Base 4 dilated by 4 under a window of 4 with stride 3: of the 16 (output, tap) pairs only the
    # 4 diagonal ones meet data.
    body = """\
  %p = bf16[4,8,16]{2,1,0} parameter(0)
  %q = bf16[4,16,24]{2,1,0} parameter(1)
  ROOT %c = bf16[4,8,24]{2,1,0} convolution(%p, %q), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf"""
    assert dot_flops(module(body)) == 2 * 4 * 8 * 16 * 24


LOOP = """\
%body (s: (s32[], bf16[64,32], s32[])) -> (s32[], bf16[64,32], s32[]) {
  %s = (s32[], bf16[64,32]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = bf16[64,32]{1,0} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %ar = bf16[64,32]{1,0} all-reduce(%v), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], bf16[64,32]{1,0}, s32[]) tuple(%next, %ar, %n)
}

%cond (s.1: (s32[], bf16[64,32], s32[])) -> pred[] {
  %s.1 = (s32[], bf16[64,32]{1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  ROOT %test = pred[] compare(SIDES), direction=DIRECTION
}
"""


@given(
    st.integers(-5, 9),
    st.integers(-9, 40),
    st.integers(-3, 3),
    st.sampled_from(["LT", "LE", "GT", "GE"]),
    st.booleans(),
)
def test_trip_counts_equal_running_the_loop(start, bound, step, direction, mirrored):
    test = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}[direction]
    i, trips = start, 0
    while test(i, bound) and trips < 200:
        i, trips = i + step, trips + 1
    written = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}[direction] if mirrored else direction
    sides = "%n.1, %i.1" if mirrored else "%i.1, %n.1"
    loop = LOOP.replace("STEP", str(step)).replace("SIDES", sides).replace("DIRECTION", written)
    body = f"""\
  %p = bf16[64,32]{{1,0}} parameter(0)
  %zero = s32[] constant({start})
  %bound = s32[] constant({bound})
  %init = (s32[], bf16[64,32]{{1,0}}, s32[]) tuple(%zero, %p, %bound)
  ROOT %w = (s32[], bf16[64,32]{{1,0}}, s32[]) while(%init), condition=%cond, body=%body"""
    (found,) = collectives(module(body, loop), MESH)
    if found.unknown_loop:
        assert step == 0 or (step < 0) == (
            direction in ("LT", "LE")
        )  # such a loop runs never or for ever
    else:
        assert found.count == trips


@st.composite
def mesh_and_axes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    picked = [k for k in range(len(sizes)) if draw(st.booleans())]
    return tuple(sizes), tuple(picked)


@given(mesh_and_axes(), st.randoms(use_true_random=False))
def test_every_spelling_of_the_groups_of_any_axes_is_read(case, random):
    sizes, picked = case
    rest = [k for k in range(len(sizes)) if k not in picked]
    n = math.prod(sizes[k] for k in picked)
    rows = np.arange(math.prod(sizes)).reshape(sizes).transpose([*rest, *picked]).reshape(-1, n)
    mesh = tuple((f"m{k}", size) for k, size in enumerate(sizes))
    label = "+".join(f"m{k}" for k in picked if sizes[k] > 1)
    dims, perm = ",".join(map(str, sizes)), ",".join(map(str, [*rest, *picked]))
    listed = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
    # XLA may name the axes of a mesh whose ids are permuted: here its axes are ours in another
    # order.
    order = list(range(len(sizes)))
    random.shuffle(order)
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()
    axes = ",".join(f"'x{k}'={sizes[k]}" for k in order)
    named = ",".join(f"'x{k}'" for k in picked)
    spellings = (
        f"replica_groups={listed}, dimensions={{0}}",
        f"replica_groups=[{len(rows)},{n}]<=[{dims}]T({perm}), use_global_device_ids=true",
        (
            f"replica_groups=mesh[{axes}], device_ids=([{dims}]T({','.join(map(str, order))}))"
            f" {{{named}}}, to_apply=%add"
        ),
        (
            f"replica_groups=mesh[{axes}], device_ids=({','.join(map(str, ids))}) {{{named}}},"
            " to_apply=%add"
        ),
    )
    for spelling in spellings:
        found = groups(f", channel_id=1, {spelling}", math.prod(sizes))
        assert {frozenset(g) for g in found} == {frozenset(map(int, row)) for row in rows}, spelling
        assert axes_label(found, mesh) == label


def test_sub_axes_and_groups_that_no_axes_have():
    # 'y':(2)2 is the minor half of an axis of 4: pairs of neighbours. On a 2x4 mesh no axis has
    # these groups; on 2x2x2 the last has.
    found = groups("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", 8)
    assert found == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axes_label(found, MESH) == "irregular:{0,1}+3 more"
    assert axes_label(found, (("a", 2), ("b", 2), ("c", 2))) == "c"
    assert groups("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}", 8) == (
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
    )
    assert axes_label(((0, 1, 2, 3), (4, 5), (6, 7)), MESH) == "irregular:{0,1,2,3}+2 more"


def test_permuted_device_ids_and_permutes():
    ids = (0, 4, 1, 5, 2, 6, 3, 7)
    assert axes_label(((0, 4), (1, 5), (2, 6), (3, 7)), (("a", 4), ("b", 2)), ids) == "b"
    assert permute_label(((0, 5), (5, 0)), MESH) == "data+model"
    body = (
        "  %p = bf16[64,32]{1,0} parameter(0)\n  ROOT %c = bf16[64,32]{1,0} collective-permute(%p),"
        " source_target_pairs={{0,0},{1,1}}"
    )
    assert collectives(module(body), MESH) == ()


def test_groups_that_cannot_be_read_are_an_error():
    with pytest.raises(ValueError, match="cannot read the replica groups"):
        groups("replica_groups=<new notation>, dimensions={0}", 8)


def test_all_subsets_of_a_three_axis_mesh_have_their_own_label():
    mesh = (("a", 2), ("b", 3), ("c", 2))
    ids = np.arange(12).reshape(2, 3, 2)
    for r in range(1, 4):
        for picked in itertools.combinations(range(3), r):
            rest = [k for k in range(3) if k not in picked]
            rows = ids.transpose([*rest, *picked]).reshape(
                -1, math.prod(mesh[k][1] for k in picked)
            )
            assert axes_label(tuple(map(tuple, rows.tolist())), mesh) == "+".join(
                mesh[k][0] for k in picked
            )
