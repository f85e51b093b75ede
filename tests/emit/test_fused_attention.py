"""Attention by fused kernels: which kernel serves which operands, Splash's numbers in plain
operations beside the blocks', and what compiled texts hold."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from costmodels.hardware.device import load_device  # noqa: E402
from planner.emit.runtime.kernels import fused_attention as fused  # noqa: E402
from planner.emit.runtime.kernels import kernels  # noqa: E402
from planner.emit.runtime.kernels.fused_attention import (  # noqa: E402
    attention_kernel,
    block_of,
    fused_attention,
    splash_attention,
)
from planner.emit.runtime.kernels.kernels import (  # noqa: E402
    CAUSAL_PARTS,
    QUERY_BLOCK,
    attention,
    attention_rows,
    query_parts,
)
from planner.graph.ir import Graph, Node, Tensor  # noqa: E402
from planner.ops import OPERATORS  # noqa: E402
from planner.ops.attention_kernels import Chosen, chosen  # noqa: E402
from planner.ops.attention_pairs import Positions  # noqa: E402
from planner.sharding.rule import Split  # noqa: E402
from planner.verify.hlo.flops import dots  # noqa: E402
from planner.verify.targets import CUDNN_VERSION  # noqa: E402

COMPILED = Path(__file__).parents[1] / "compiled"
A100, H100, V100, V5P, CPU = (
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "Tesla V100-SXM2-16GB",
    "TPU v5",
    "cpu",
)


def mesh_of(device: str) -> Any:
    """A mesh of eight devices of that name; of no device that is known for ""."""
    of = jax.sharding.AbstractDevice(device, 1, "gpu") if device else None
    return jax.sharding.AbstractMesh((8,), ("data",), abstract_device=of)


def operands(
    queries: int = 256, width: int = 128, dtype: Any = jnp.bfloat16, keys: int = 256, batch: int = 2
) -> tuple[Any, Any, Any]:
    """Shapes of q, k and v, four heads of queries to two of keys."""
    shapes = (2, 4, queries, width), (batch, 2, keys, width), (batch, 2, keys, width)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("device", "given", "kernel"),
    [
        (H100, {}, "cudnn"),
        (H100, {"dtype": jnp.float16}, "cudnn"),
        (H100, {"width": 64, "queries": 100, "keys": 34}, "cudnn"),
        (H100, {"width": 64, "queries": 100, "keys": 33}, "cudnn"),
        (H100, {"width": 64, "queries": 197, "keys": 197}, "cudnn"),
        (H100, {"dtype": jnp.float32}, "blocks"),
        (H100, {"width": 256}, "cudnn"),
        (H100, {"width": 264}, "blocks"),
        (A100, {"width": 128}, "cudnn"),
        (A100, {"width": 136}, "blocks"),
        (H100, {"width": 20}, "blocks"),
        (H100, {"batch": 1}, "blocks"),
        (V100, {}, "blocks"),
        ("AMD Instinct MI300X", {}, "blocks"),
        (V5P, {}, "splash"),
        (V5P, {"width": 64, "queries": 384}, "splash"),
        (V5P, {"queries": 100}, "blocks"),
        (V5P, {"keys": 100}, "blocks"),
        (V5P, {"width": 80}, "blocks"),
        (H100, {"cap": 50.0}, "blocks"),
        (V5P, {"cap": 50.0}, "splash"),
        (CPU, {}, "blocks"),
        ("", {}, "blocks"),
    ],
)
def test_the_kernel_is_that_of_the_device_where_it_serves_the_operands(
    device: str, given: dict[str, Any], kernel: str
) -> None:
    with jax.sharding.use_abstract_mesh(mesh_of(device)):
        given, cap = {**given}, given.get("cap", 0.0)
        given.pop("cap", None)
        assert attention_kernel(*operands(**given), cap=cap) == kernel


SEGMENTS = jax.ShapeDtypeStruct((2, 1, 1, 256), jnp.int32)
MASKS = {
    "of keys": ((2, 1, 1, 256), bool),
    "of one sequence's keys": ((1, 256), bool),
    "of heads": ((2, 4, 1, 256), bool),
    "of queries": ((1, 1, 256, 256), bool),
    "of terms": ((2, 1, 1, 256), jnp.float32),
}


@pytest.mark.parametrize("kind", MASKS)
def test_the_kernel_takes_the_mask(kind: str) -> None:
    mask = jax.ShapeDtypeStruct(*MASKS[kind])
    of_keys = kind in ("of keys", "of one sequence's keys")
    for device, kernel in ((H100, "cudnn"), (V5P, "splash" if of_keys else "blocks")):
        with jax.sharding.use_abstract_mesh(mesh_of(device)):
            assert attention_kernel(*operands(), mask) == kernel


def test_segments_are_served_by_both_kernels() -> None:
    for device, kernel in ((H100, "cudnn"), (V5P, "splash"), (CPU, "blocks")):
        with jax.sharding.use_abstract_mesh(mesh_of(device)):
            assert attention_kernel(*operands(), SEGMENTS) == kernel


@pytest.mark.one_in(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["blocks", "splash", "cudnn"])
def test_queries_see_the_keys_of_their_segment(
    kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients under shard_map, of all kernels, as under the same mask in full: jax's
    plain implementation stands in for cuDNN's, Splash runs in plain operations, and blocks are
    several."""
    segments = jnp.asarray([[0] * 60 + [1] * 130 + [2] * 66, [7] * 256, [3, 4] * 128, [5] * 256])
    segments = segments[:, None, None].astype(jnp.int32)
    q, k, v = (_some((4, h, 256, 64), i) for i, h in enumerate((4, 2, 2)))
    run = jax.nn.dot_product_attention

    def plain(*x: Any, implementation: str, **options: Any) -> Any:
        return run(*x, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    monkeypatch.setattr(fused, "attention_kernel", lambda *_: kernel)
    interpreted = functools.partial(splash_attention, interpret=True)
    monkeypatch.setattr(fused, "splash_attention", interpreted)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, out = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def gradients(of: Any) -> Any:
        def step(mask: Any, *x: Any) -> Any:
            loss = lambda *x: jnp.sum(jnp.sin(of(*x, mask)))  # noqa: E731
            value, found = jax.value_and_grad(loss, (0, 1, 2))(*x)
            return jax.lax.psum(value, "data"), found

        whole = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(out, spec))
        return jax.jit(whole)(segments, q, k, v)

    def in_full(q: Any, k: Any, v: Any, mask: Any) -> Any:
        seen = jnp.swapaxes(mask, 2, 3) == mask
        return attention_rows(q, k, v, seen, 0.1, causal, False, 0)

    other = gradients(in_full)
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 64)
    one = gradients(lambda *x: fused_attention(*x[:3], 0.1, causal, False, mask=x[3]))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(14)
@pytest.mark.parametrize("scanned", [False, True], ids=("alone", "scanned"))
@pytest.mark.parametrize(
    ("heads", "causal", "window", "cap"),
    [
        (4, True, 0, 0.0),
        (2, True, 0, 0.0),
        (1, True, 0, 0.0),
        (2, False, 0, 0.0),
        (2, True, 40, 0.0),
        (2, True, 0, 0.7),
        (2, True, 40, 0.7),
    ],
    ids=str,
)
def test_splash_gives_the_numbers_of_the_blocks(
    heads: int, causal: bool, window: int, cap: float, scanned: bool
) -> None:
    """Result and gradients under shard_map, its types checked; the kernel in plain operations.
    Scanned: in the loop over blocks of a program, which jax traces a second time."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    values = [
        jnp.asarray(np.random.default_rng(i).normal(size=(2, h, 256, 64)), jnp.float32)
        for i, h in enumerate((4, heads, heads))
    ]

    def gradients(kernel: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            if scanned:
                q, _ = jax.lax.scan(lambda q, _: (kernel(q, k, v), None), q, None, length=2)
            return jnp.sum(jnp.sin(kernel(q, k, v)))

        def step(*operands: Any) -> Any:
            value, found = jax.value_and_grad(loss, argnums=(0, 1, 2))(*operands)
            return jax.lax.psum(value, "data"), found

        out = jax.sharding.PartitionSpec(), spec
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out))(*values)

    one = gradients(lambda *x: splash_attention(*x, 0.1, causal, window, interpret=True, cap=cap))
    other = gradients(lambda *x: attention(*x, None, 0.1, causal, False, 0, window, cap))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)


def _some(shape: tuple[int, ...], seed: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("causal", [True, False])
def test_splash_leaves_out_the_keys_that_a_mask_hides(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients under shard_map, of sequences of which one sees no key at all."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    q, k, v = (_some((4, h, 128, 64), i) for i, h in enumerate((4, 2, 2)))
    mask = jnp.arange(128) < jnp.asarray([128, 70, 1, 0])[:, None]
    monkeypatch.setattr(fused, "attention_kernel", lambda *_: "splash")
    plain = functools.partial(splash_attention, interpret=True)
    monkeypatch.setattr(fused, "splash_attention", plain)

    def gradients(kernel: Any) -> Any:
        def step(mask: Any, *operands: Any) -> Any:
            value, found = jax.value_and_grad(
                lambda q, k, v: jnp.sum(jnp.sin(kernel(q, k, v, mask))), (0, 1, 2)
            )(*operands)
            return jax.lax.psum(value, "data"), found

        out = jax.sharding.PartitionSpec(), spec
        whole = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out))
        return whole(mask[:, None, None], q, k, v)

    one = gradients(lambda *x: fused_attention(*x[:3], 0.1, causal, True, mask=x[3]))
    other = gradients(lambda *x: attention(*x, 0.1, causal, True, 0))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_values_narrower_than_keys_go_through_kernels(
    kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients of multi-head latent attention: kernels get zeros behind the values."""
    q, k, v = (_some((2, h, 128, width), h) for h, width in ((4, 64), (2, 64), (2, 40)))
    run = jax.nn.dot_product_attention

    def plain(*operands: Any, implementation: str, **options: Any) -> Any:
        assert implementation == "cudnn" and len({x.shape[3] for x in operands[:3]}) == 1
        return run(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    monkeypatch.setattr(fused, "attention_kernel", lambda *_: kernel)
    interpreted = functools.partial(splash_attention, interpret=True)
    monkeypatch.setattr(fused, "splash_attention", interpreted)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def gradients(of: Any) -> Any:
        def step(*x: Any) -> Any:
            value, found = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(of(*x))), (0, 1, 2))(*x)
            return jax.lax.psum(value, "data"), found

        out = jax.sharding.PartitionSpec(), spec
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out))(q, k, v)

    one = gradients(lambda *x: fused_attention(*x, 0.1, causal, True))
    other = gradients(lambda *x: attention(*x, None, 0.1, causal, True, 0))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 5)])
@pytest.mark.parametrize("kind", [*MASKS, "trained terms of heads", "none"])
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (9, 15)])
def test_what_cudnn_is_given_is_what_the_blocks_compute(
    kind: str, queries: int, keys: int, causal: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN itself runs on GPUs alone: jax's plain implementation of the same call stands in for
    it. Result and gradients, a trained mask's too, of rows that see no key as well."""
    shape, dtype = {
        "of keys": ((2, 1, 1, keys), bool),
        "of one sequence's keys": ((1, keys), bool),
        "of heads": ((2, 4, 1, keys), bool),
        "of queries": ((1, 1, queries, keys), bool),
        "of terms": ((2, 1, 1, keys), jnp.float32),
        "trained terms of heads": ((1, 4, queries, keys), jnp.float32),
        "none": ((), None),
    }[kind]
    q, k, v = _some((2, 4, queries, 8), 0), _some((2, 2, keys, 8), 1), _some((2, 2, keys, 8), 2)
    mask = None if dtype is None else _some(shape, 3)
    if dtype is bool:
        mask = (mask > 0.3).at[..., :2].set(False)
    elif kind == "of terms":
        mask = jnp.where(mask > 0.5, -jnp.inf, mask)
    run = jax.nn.dot_product_attention

    def plain(*operands: Any, implementation: str, **options: Any) -> Any:
        assert implementation == "cudnn"
        assert all(x.shape[1] % 2 == 0 for x in operands[:3])
        return run(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    monkeypatch.setattr(fused, "attention_kernel", lambda *_: "cudnn")
    trained = kind == "trained terms of heads"

    def gradients(kernel: Any) -> Any:
        def loss(*operands: Any) -> Any:
            return jnp.sum(jnp.sin(kernel(*operands)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, *[3] * trained)))(q, k, v, mask)

    def guarded(*x: Any) -> Any:
        return fused_attention(*x[:3], 0.3, causal, True, window, x[3])

    one = gradients(guarded)
    other = gradients(lambda *x: attention(*x, 0.3, causal, True, 0, window))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_devices_without_a_kernel_run_the_blocks() -> None:
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(1, 2, 64, 8)), jnp.float32)
        for i in range(3)
    )
    same = attention(q, k, v, None, 0.3, True, False, 0)
    np.testing.assert_array_equal(fused_attention(q, k, v, 0.3, True, False), same)


@pytest.mark.parametrize("window", [0, 1, 100, 1024, 2500, 5000])
@pytest.mark.parametrize(
    ("queries", "keys"), [(100, 100), (1024, 8192), (4096, 4096), (12288, 9000)]
)
def test_blocks_meet_the_keys_that_prices_count(queries: int, keys: int, window: int) -> None:
    for causal, whole in ((True, True), (True, False), (False, True)):
        positions = Positions(causal, window if causal else 0)
        blocks = queries // QUERY_BLOCK if queries > QUERY_BLOCK else 1
        parts = query_parts(blocks, queries // blocks, keys, causal, positions.window, whole)
        assert tuple(parts) == positions.parts(queries, keys, whole)
        assert len(parts) <= CAUSAL_PARTS + 1
        assert positions.pairs(queries, keys) <= positions.computed_pairs(queries, keys, whole)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("queries", "keys", "window", "start"),
    [
        (128, 640, 50, 256),
        (640, 640, 0, 0),
        (640, 640, 100, 0),
        (640, 640, 1, 0),
        (320, 128, 40, 0),
    ],
)
def test_keys_that_blocks_leave_out_are_masked(
    queries: int, keys: int, window: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and gradients, with a mask beside, as of all rows at once. Where queries begin later
    only the running program knows it."""
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 64)
    q, k, v, mask = (
        jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
        for i, shape in enumerate(
            [(2, 4, queries, 8), *[(2, 2, keys, 8)] * 2, (1, 1, queries, keys)]
        )
    )

    def gradients(kernel: Any) -> Any:
        def loss(*operands: Any) -> Any:
            return jnp.sum(jnp.sin(kernel(*operands)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, mask)

    first = jnp.int32(start) if start else 0
    one = gradients(lambda *x: attention(*x, 0.3, True, False, first, window))
    other = gradients(lambda *x: attention_rows(*x, 0.3, True, False, start, 0, window))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_blocks_divide_their_dim() -> None:
    assert [block_of(n, 1024) for n in (128, 384, 512, 1536, 8192)] == [128, 128, 512, 512, 1024]


@pytest.mark.parametrize(
    ("file", "products"),
    [("gpu_attention.txt", (2, 5)), ("tpu_attention.txt", (2, 2, 3))],
    ids=("cudnn", "splash"),
)
def test_products_of_compiled_kernels_are_counted(file: str, products: tuple[int, ...]) -> None:
    """Of 2 batches x 4 heads x 256 queries x 256 keys x 64: two forward, five backward, the causal
    half of the single block not left out. The texts are the compilers' for `value_and_grad` of `fused_attention`."""
    one = 2 * 2 * 4 * 256 * 256 * 64
    assert [flops for _, flops in dots((COMPILED / file).read_text())] == [
        n * one for n in products
    ]


KINDS = {
    "h100-sxm": H100,
    "a100-80gb": A100,
    "v100-16gb": V100,
    "b200": "NVIDIA B200",
    "mi300x": "AMD Instinct MI300X",
    "tpu-v5p": V5P,
}


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("queries", "width", "mask"),
    [
        *[(256, 128, kind) for kind in ("", *MASKS)],
        (100, 64, ""),
        (197, 64, ""),
        (256, 80, "of terms"),
        (256, 256, ""),
        (256, 192, ""),
        (255, 192, ""),
        (256, 192, "of terms"),
        (256, 128, "cap"),
        (256, 128, "segments"),
    ],
)
def test_plans_name_the_kernel_that_programs_choose(
    device: str, compute: str, queries: int, width: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`planner.ops.attention_kernels` from a plan, `attention_kernel` when a program is traced."""
    library = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(library, "check_cudnn_version", lambda: CUDNN_VERSION)
    own = 128 if width == 192 else width  # latent attention's values are narrower than its keys
    shapes = {"q": (2, 4, queries, width), "k": (2, 2, 256, width), "v": (2, 2, 256, own)}
    out = {"o": (2, 4, queries, own)}
    tensors = {n: Tensor(n, shape, "float32") for n, shape in (shapes | out).items()}
    attributes = {"scale": 0.1, "causal": 1, "guard": 0}
    given = tuple(jax.ShapeDtypeStruct(x, getattr(jnp, compute)) for x in shapes.values())
    cap = 30.0 if mask == "cap" else 0.0
    if cap:
        attributes["cap"] = cap
    elif mask == "segments":
        attributes["segments"] = 1
        given = (*given, SEGMENTS)
        tensors["mask"] = Tensor("mask", SEGMENTS.shape, "int32")
    elif mask:
        given = (*given, jax.ShapeDtypeStruct(*MASKS[mask]))
        tensors["mask"] = Tensor("mask", MASKS[mask][0], jnp.dtype(MASKS[mask][1]).name)
    names = tuple(n for n in tensors if n != "o")
    node = Node("attention", "Attention", names, ("o",), attributes)
    graph = Graph("g", (node,), tensors, names, ("o",))
    rule, chip = OPERATORS["Attention"].rule(node, graph), load_device(device)

    def planned(split: Split, mesh: dict[str, int], partitioned: bool = False) -> Chosen:
        return chosen(
            node,
            graph,
            rule,
            split,
            mesh,
            device_kernel=chip.attention_kernel,
            head_widths=chip.head_widths,
            compute=compute,
            partitioned=partitioned,
        )

    whole = planned(Split(), {})
    with jax.sharding.use_abstract_mesh(mesh_of(KINDS[device])):
        assert whole.kernel == attention_kernel(*given, cap=cap)
    assert (whole.kernel == "blocks") == bool(whole.why)
    cut = Split((("s", ("data",)),))
    assert planned(cut, {"data": 2}).kernel == planned(Split(), {}, True).kernel == "blocks"
