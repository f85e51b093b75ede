"""Compiles small sharded programs on 8 virtual CPU devices and prints {name: HLO text} as JSON. Run
as a process of its own.

The mesh is data=2 x model=4; every program is small enough that its payloads are computed by hand
in test_hlo.py.
"""

import json
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
BOTH = ("data", "model")
F32 = jnp.float32


def arg(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def spmd(body, in_specs, out_specs, *args):
    return (
        jax.jit(jax.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs))
        .lower(*args)
        .compile()
    )


def one_collective(found):
    """Each kind over each axis and both; every device holds float32[24, 16] (1536 bytes) of the
    operand."""
    spec, x = P(BOTH), arg(8 * 24, 16)
    for label, axes in (("data", "data"), ("model", "model"), ("both", BOTH)):
        kept = tuple(a for a in BOTH if a not in axes) if axes != BOTH else ()
        found[f"psum {label}"] = spmd(lambda v, a=axes: lax.psum(v, a), spec, P(kept or None), x)
        found[f"psum_scatter {label}"] = spmd(
            lambda v, a=axes: lax.psum_scatter(v, a, tiled=True), spec, P(BOTH), x
        )
        found[f"all_gather {label}"] = spmd(
            lambda v, a=axes: lax.all_gather(v, a, tiled=True), spec, spec, x
        )
        found[f"all_to_all {label}"] = spmd(
            lambda v, a=axes: lax.all_to_all(v, a, 1, 0, tiled=True), spec, spec, x
        )
        size = {"data": 2, "model": 4, "both": 8}[label]
        ring = [(i, (i + 1) % size) for i in range(size)]
        found[f"ppermute {label}"] = spmd(
            lambda v, a=axes, r=ring: lax.ppermute(v, a, r), spec, spec, x
        )
    found["invarying"] = spmd(
        lambda v: lax.all_gather(v, "model", tiled=True, to="invarying"),
        P("model"),
        P(),
        arg(32, 16),
    )
    found["two sums"] = spmd(
        lambda v, w: lax.psum((v, w), "model"),
        (spec, spec),
        (P("data"), P("data")),
        x,
        arg(8 * 2, 4),
    )
    half = arg(8 * 24, 16, dtype=jnp.bfloat16)
    found["bf16"] = spmd(lambda v: lax.psum(v, "model"), spec, P("data"), half)
    found["bf16 gather"] = spmd(
        lambda v: lax.all_gather(v * 2, "model", tiled=True), spec, spec, half
    )


def row_parallel(x, w):
    return jnp.tanh(lax.pcast(lax.psum(x @ w, "model"), "model", to="varying"))


def loops(found):
    """scan of 5, scan of 3 in scan of 5, a while loop with a dynamic bound, a branch."""

    def scan(x, w, inner=1):
        def body(c, _):
            if inner == 1:
                return row_parallel(c, w), None
            return lax.scan(lambda d, _: (row_parallel(d, w), None), c, None, length=inner)[0], None

        return lax.scan(body, x, None, length=5)[0]

    specs = ((P("data", "model"), P("model", None)), P("data", "model"))
    args = (arg(2 * 32, 4 * 16), arg(4 * 16, 16))
    found["scan"] = spmd(scan, *specs, *args)
    found["nested scan"] = spmd(lambda x, w: scan(x, w, 3), *specs, *args)
    found["fori"] = spmd(
        lambda x, w: lax.fori_loop(2, 9, lambda _, c: row_parallel(c, w), x), *specs, *args
    )

    def dynamic(x, w, n):
        return lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, row_parallel(s[1], w)), (0, x)
        )[1]

    found["dynamic"] = spmd(dynamic, (*specs[0], P()), specs[1], *args, arg(dtype=jnp.int32))

    def branch(x, w, n):
        return lax.cond(
            n > 0, lambda: row_parallel(row_parallel(x, w), w), lambda: row_parallel(x, w)
        )

    found["branch"] = spmd(branch, (*specs[0], P()), specs[1], *args, arg(dtype=jnp.int32))


def training(found):
    """Megatron's pair of products under value_and_grad, in shard_map and by the partitioner; a
    strided grouped convolution's gradient."""

    def step(x, w1, w2):
        def loss(params):
            a, b = params
            y = lax.psum(jnp.tanh(lax.pcast(x, "model", to="varying") @ a) @ b, "model")
            return (y**2).sum()

        params = tuple(lax.pcast(p, "data", to="varying") for p in (w1, w2))
        value, grads = jax.value_and_grad(loss)(params)
        return lax.psum(value, "data"), lax.psum(grads, "data")

    w = (P(None, "model"), P("model", None))
    args = (arg(2 * 16, 24), arg(24, 4 * 8), arg(4 * 8, 24))
    found["train"] = spmd(step, (P("data"), *w), (P(), w), *args)

    def named(*spec):
        return NamedSharding(MESH, P(*spec))

    def plain(x, w1, w2):
        return jax.grad(lambda p: ((jnp.tanh(x @ p[0]) @ p[1]) ** 2).sum())((w1, w2))

    shardings = (named(None, "model"), named("model", "data"))
    shapes = (arg(64, 32), arg(32, 128), arg(128, 16))
    found["jit"] = (
        jax.jit(plain, in_shardings=(named("data"), *shardings), out_shardings=shardings)
        .lower(*shapes)
        .compile()
    )

    def convolution(x, k):
        return lax.conv_general_dilated(x, k, (2, 2), [(1, 1), (1, 1)], feature_group_count=2)

    pair = (arg(4, 8, 16, 16), arg(32, 4, 3, 3))
    found["conv"] = jax.jit(convolution).lower(*pair).compile()
    found["conv grad"] = (
        jax.jit(jax.grad(lambda x, k: (convolution(x, k) ** 2).sum(), (0, 1)))
        .lower(*pair)
        .compile()
    )
    found["batched"] = (
        jax.jit(lambda q, k: jnp.einsum("bhsd,bhtd->bhst", q, k))
        .lower(arg(2, 3, 8, 16), arg(2, 3, 24, 16))
        .compile()
    )


if __name__ == "__main__":
    programs: dict = {}
    one_collective(programs)
    loops(programs)
    training(programs)
    json.dump({name: compiled.as_text() for name, compiled in programs.items()}, sys.stdout)
