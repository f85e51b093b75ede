"""Programs whose linear layers multiply in float8: the kernel, which products it serves, and steps
beside float32 and beside the unsharded program in the same precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner
from benchmarks.precisions import TOLERANCES, beside, errors, one_step, program_of
from planner.execution.eight_bit import eight_bit, heads
from planner.report.findings import findings
from planner.verify.worker import verify
from tests.emit.shared import GPT, STEPS

LLAMA = "zoo:llama-tiny"
slow = pytest.mark.slow


def values(*shapes: tuple[int, ...]) -> list[Any]:
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for s in shapes]


def rounded(x: Any, dtype: Any) -> np.ndarray:
    """x as the type has it, its largest value scaled to the largest of the type, by numpy."""
    import jax.numpy as jnp

    x = np.asarray(x, np.float32)
    scale = np.float32(np.abs(x).max() / float(jnp.finfo(dtype).max))
    return (x / scale).astype(dtype).astype(np.float32) * scale


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_multiplies_rounded_operands(transposed: bool) -> None:
    """Values as e4m3, gradients as e5m2, sums in float32."""
    import jax
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.float8 import dot8

    x, w, g = values((2, 24, 64), (32, 64) if transposed else (64, 32), (2, 24, 32))
    y, pull = jax.vjp(lambda x, w: dot8(x, w, transposed), x, w)
    dx, dw = pull(g)
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    x8, w8 = (rounded(v, jnp.float8_e4m3fn) for v in (x, w))
    g8 = rounded(g, jnp.float8_e5m2)
    w8 = w8.T if transposed else w8
    wanted = x8 @ w8, g8 @ w8.T, np.einsum("abk,abn->kn", x8, g8)
    for found, want in zip((y, dx, dw.T if transposed else dw), wanted, strict=True):
        assert np.abs(np.asarray(found, np.float32) - want).max() < 0.01 * np.abs(want).max()


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.float8 import dot8

    x, w = values((4, 16), (16, 16))
    assert not np.asarray(dot8(0 * x, w), np.float32).any()
    assert np.isnan(np.asarray(dot8(x.at[0, 0].set(jnp.inf), w), np.float32)).any()


def test_float32_operands_are_multiplied_as_they_are() -> None:
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.float8 import dot8

    x, w = (v.astype(jnp.float32) for v in values((8, 16), (16, 48)))
    assert np.array_equal(dot8(x, w), jnp.matmul(x, w))
    assert np.array_equal(dot8(x, w.T, True), jnp.matmul(x, w))


def test_linear_layers_but_the_head_are_in_float8() -> None:
    """Neither attention, nor the head, nor weights that tensor cores do not take."""
    strategy, made = program_of(LLAMA, "dp=4,tp=2,zero=1,micro=1", "shard_map", "fp8")
    graph = strategy.graph
    assert graph is not None
    products = [i for i, n in enumerate(graph.nodes) if n.op == "MatMul"]
    (head,) = heads(graph)
    assert "lm_head" in graph.nodes[head].id
    assert sorted(eight_bit(graph)) == [i for i in products if i != head]
    assert "dot8(" in made.text and "COMPUTE = jnp.bfloat16" in made.text
    odd = planner.plan("zoo:llama-tiny,ff=24", devices=1, baselines=False, precision="fp8").graph
    assert odd is not None
    assert {odd.nodes[i].id.split("/")[-2] for i in eight_bit(odd)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }


@pytest.mark.parametrize(
    ("source", "pins", "backend"),
    [*STEPS, pytest.param(LLAMA, "dp=4,tp=2,zero=2,micro=2", "shard_map", marks=slow)],
)
def test_a_step_is_that_of_float32_but_for_rounding(source: str, pins: str, backend: str) -> None:
    found = errors(source, pins, backend, "fp8")
    assert found.within(TOLERANCES["fp8"]), found
    assert found.gradients > 1e-2  # of float8 it is


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device_but_for_scales() -> None:
    """Each device scales its own pieces, no more coarsely than the whole: both are within the same
    distance of one another as of float32."""
    want_loss, want = one_step(GPT, "", "shard_map", "fp8")
    loss, found = one_step(GPT, "dp=2,tp=4,zero=1,micro=1", "shard_map", "fp8")
    apart = beside(loss, found, want_loss, want)
    assert apart.within(TOLERANCES["fp8"]), apart


@pytest.mark.slow
def test_nothing_is_sent_for_scales() -> None:
    """The compiled step of bfloat16 operands has the collectives of one without float8."""
    from planner.verify.ahead import compiled_traffic
    from planner.verify.compiled import compile_module
    from planner.verify.numerics import load_program

    sent = []
    for precision in ("bf16-mixed", "fp8"):
        strategy, made = program_of(GPT, "dp=2,tp=4,zero=1,micro=1", "shard_map", precision)
        text = compile_module(load_program(made, compute="bfloat16"), "train").as_text()
        sent.append(compiled_traffic(text, strategy.plan, True))
    assert sent[0] == sent[1]
    report = verify(strategy, GPT, run=False)
    assert all(f.distance == 0 for f in report.figures if f.judged)


COMPILED = """
import re
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from planner.emit.runtime.kernels.float8 import dot8
from planner.verify.targets import parse_target

mesh = Mesh(np.array(parse_target("gpu:h100", 1).compile_devices(1)), ("x",))
x, w = (
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    for shape in ((4, 512, 1024), (1024, 2048))
)
step = jax.grad(lambda x, w: jnp.square(dot8(x, w).astype(jnp.float32)).sum(), argnums=(0, 1))
text = jax.jit(step).lower(x, w).compile().as_text()
triton = re.findall(r" dot\\((?:%parameter|f8)", text)
print(len(re.findall(r'custom_call_target="__cublas\\$lt\\$matmul\\$f8"', text)), len(triton))
"""


@pytest.mark.parametrize("triton", [True, False])
def test_gpus_multiply_float8(triton: bool) -> None:
    """Compiled for an H100, forward and both gradients: by Triton as it is without a device to
    choose on, by cuBLASLt without Triton."""
    import os
    import subprocess
    import sys

    from planner.errors import PlanError
    from planner.verify.targets import parse_target, require

    target = parse_target("gpu:h100", 1)
    try:
        require(target)
    except PlanError as e:
        pytest.skip(e.what)
    flags = f"--xla_gpu_enable_triton_gemm={'true' if triton else 'false'}"
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, **target.environment(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == (["0", "3"] if triton else ["3", "0"])


def test_devices_without_float8_are_told() -> None:
    def said(hardware: str) -> list[str]:
        strategy = planner.plan(
            "zoo:mlp-tiny", devices=8, batch=16, precision="fp8", hardware=hardware, baselines=False
        )
        return [f for f in findings(strategy) if "no units for products in fp8" in f]

    assert said("a100-80gb") and said("v5e") and not said("h100")


def test_products_are_faster_and_conversions_are_priced() -> None:
    """Of large products half the time and the passes over operands; of one with a row a device,
    as in decoding, weights are converted for nothing."""
    source = "zoo:llama-tiny,layers=2,hidden=4096,ff=14336,seq=2048,heads=32,kv_heads=8"

    def seconds(precision: str) -> float:
        strategy = planner.plan(
            source, devices=8, batch=8, precision=precision, pins="dp=8,micro=1", baselines=False
        )
        assert strategy.graph is not None
        ids = {strategy.graph.nodes[i].id for i in eight_bit(strategy.graph)}
        return sum(row["kernels"]["step_s"] for n, row in strategy.details.items() if n in ids)

    assert 0.5 < seconds("fp8") / seconds("bf16-mixed") < 0.8
