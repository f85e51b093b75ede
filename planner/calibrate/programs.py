"""The cases as JAX programs: one `shard_map` over all devices whose body runs a case `iterations`
times, each on the result of the time before.

    seconds of one run = (time of iterations + 1 runs - time of 1 run) / iterations

so that dispatch and the way back to Python cancel. Virtual devices of a host are measured by what
they take of its cores: when all of them work, one that waits for another leaves its core to a
third, and what other processes take of the machine does not count. The number of iterations is an
argument of the compiled program. Values stay finite: products are with a matrix whose rows sum to
one, or on accelerators of random values with an orthogonal one; sums over devices are of zeros.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from costmodels.collectives import COMPILED
from planner.calibrate.cases import ATTENTION_TOKENS, ITEM_BYTES, MIB, Case

ALL = ("outer", "group", "inner")
LEAD, WIDTH = 8, 256
"""Of what virtual devices exchange: extents before the dim that is cut, and after it."""
RANDOM = ("matmul", "attention")
"""Cases whose values matter."""
TINY = 8
TINY_CHAIN = 16
"""Kernels of one run of the case `tiny`."""
SHORT_CHAIN, LONG_CHAIN, SHORT_BYTES = 16, 4, 64 * MIB
"""Runs of a turn of what moves so many bytes or fewer, and of others."""
Body = Callable[[Any, Any], Any]


@dataclass
class Timed:
    """A compiled program with its arguments."""

    case: Case
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    iterations: int = 1
    cores: int = 0
    """That virtual devices share; 0 for devices of their own."""
    chained: int = 1
    """Runs of an iteration."""

    def seconds(self, iterations: int) -> float:
        """Time of so many runs, dispatch included: on the clock, or what they take of the cores
        that virtual devices share."""
        clock = time.process_time if self.cores else time.perf_counter
        start = clock()
        jax.block_until_ready(self.run(iterations, *self.arguments))
        return (clock() - start) / max(1, self.cores)

    @property
    def kernels(self) -> int:
        """What is counted in one run."""
        return TINY_CHAIN if self.case.kind == "tiny" else self.chained


def build(case: Case, devices: list[Any]) -> Timed:
    """The program of a case over all the devices, compiled."""
    n = len(devices)
    mesh = Mesh(
        np.array(devices).reshape(n // (case.members * case.stride), case.members, case.stride), ALL
    )
    body, shape, other = (
        _exchange(case) if case.kind in COMPILED and devices[0].platform == "cpu" else _body(case)
    )
    spread = NamedSharding(mesh, P(ALL))
    chained = chain_of(case, devices[0].platform)

    def local(iterations: Any, x: Any, w: Any) -> Any:
        x, w = x[0], w[0]

        def iteration(y: Any) -> Any:
            for _ in range(chained):
                y = lax.optimization_barrier(body(y, w)) if chained > 1 else body(y, w)
            return y

        return lax.fori_loop(0, iterations, lambda _, y: iteration(y), x)[None]

    program = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(ALL), P(ALL)), out_specs=P(ALL), check_vma=False
        )
    )
    of = jnp.zeros((n, *shape), case.dtype)
    if case.kind in RANDOM and devices[0].platform != "cpu":
        # Accelerators take less power for zeros, and are faster by as much.
        of = jax.random.normal(jax.random.key(0), of.shape, of.dtype)
        other = orthogonal(case.edge) if case.kind == "matmul" else other
    x = jax.device_put(of, spread)
    w = jax.device_put(jnp.broadcast_to(other, (n, *other.shape)).astype(case.dtype), spread)
    done = program.lower(jnp.int32(1), x, w).compile()
    cores = min(n, len(os.sched_getaffinity(0))) if devices[0].platform == "cpu" else 0
    return Timed(
        case,
        lambda iterations, *rest: done(jnp.int32(iterations), *rest),
        (x, w),
        cores=cores,
        chained=chained,
    )


def chain_of(case: Case, platform: str) -> int:
    """Runs of a turn. On an accelerator the host ends each turn of a loop: 18 us on an H100, in
    which a small product runs six times."""
    if platform == "cpu" or case.kind == "tiny":
        return 1
    return SHORT_CHAIN if case.size_bytes <= SHORT_BYTES else LONG_CHAIN


def _body(case: Case) -> tuple[Body, tuple[int, ...], Any]:
    """(one run of the case, local shape of what it works on, its second operand)."""
    if case.kind == "tiny":
        return _chain, (TINY, TINY), jnp.full((TINY, TINY), 1.0 / TINY)
    if case.kind == "attention":
        return _attention(case)
    if case.kind == "matmul":
        return (
            lambda x, w: (x @ w).astype(x.dtype),
            (case.rows, case.edge),
            jnp.full((case.edge, case.edge), 1.0 / case.edge),
        )
    item = ITEM_BYTES[case.dtype]
    if case.kind == "stream":
        return lambda x, w: x * w[0] + w[1], (case.size_bytes // 2 // item,), jnp.array([0.5, 1.0])
    if (
        case.kind == "reduce"
        # the first element depends on the sum, so that no run can be left out or moved out of the
        # loop
    ):
        return (
            lambda x, w: x.at[0].set(jnp.sum(jnp.maximum(x, x[0])) * w[0]),
            (case.size_bytes // item,),
            jnp.zeros(1),
        )
    return _collective(case, case.size_bytes // item)


def _attention(case: Case) -> tuple[Body, tuple[int, ...], Any]:
    """cuDNN's causal attention of queries that are keys and values, too. One element of its result,
    or with the backward pass of the gradients, goes where the next run reads it."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def run(x: Any, _: Any) -> Any:
        if not case.backward:
            return x.at[0, 0, 0, 0].set(forward(x, x, x)[0, 0, 0, 0])
        gradients = jax.vjp(forward, x, x, x)[1](x)
        return x.at[0, 0, 0, 0].set(sum(g[0, 0, 0, 0] for g in gradients))

    shape = (ATTENTION_TOKENS // case.rows, case.rows, case.heads, case.edge)
    return run, shape, jnp.zeros(1)


@cache
def orthogonal(edge: int) -> Any:
    """A random matrix that leaves the size of what it multiplies as it is."""
    return jnp.linalg.qr(jax.random.normal(jax.random.key(1), (edge, edge)))[0]


def _chain(x: Any, w: Any) -> Any:
    for _ in range(TINY_CHAIN):
        x = x @ w
    return x


def _collective(case: Case, elements: int) -> tuple[Body, tuple[int, ...], Any]:
    """A collective of that many elements of payload. Its result is put where the next run reads
    it."""
    n = case.members
    elements -= elements % n
    piece, none = elements // n, jnp.zeros(1)
    bodies: dict[str, tuple[Body, int]] = {
        "all-reduce": (lambda x, _: lax.psum(x, "group"), elements),
        "all-gather": (lambda x, _: lax.all_gather(x, "group", tiled=True)[:piece], piece),
        "reduce-scatter": (
            lambda x, _: x.at[:piece].set(lax.psum_scatter(x, "group", tiled=True)),
            elements,
        ),
        "all-to-all": (lambda x, _: lax.all_to_all(x, "group", 0, 0, tiled=True), elements),
        "collective-permute": (
            lambda x, _: lax.ppermute(x, "group", [(i, (i + 1) % n) for i in range(n)]),
            elements,
        ),
    }
    body, size = bodies[case.kind]
    return body, (size,), none


def _exchange(case: Case) -> tuple[Body, tuple[int, ...], Any]:
    """A collective between virtual devices, over the middle dim of [LEAD, rows, WIDTH] as programs
    have it between their layers: XLA's CPU back end puts the dim that is cut first, and copies the
    payload for it. One element of the result goes where the next run reads it.
    """
    n = case.members
    lead = max(LEAD, n)
    width = max(1, min(WIDTH, case.size_bytes // ITEM_BYTES[case.dtype] // (lead * n)))
    rows = max(1, case.size_bytes // ITEM_BYTES[case.dtype] // (lead * n * width))
    send: dict[str, Callable[[Any], Any]] = {
        "all-reduce": lambda x: lax.psum(x, "group"),
        "all-gather": lambda x: lax.all_gather(x, "group", axis=1, tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "group", scatter_dimension=1, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "group", 0, 1, tiled=True),
        "collective-permute": lambda x: lax.ppermute(
            x, "group", [(i, (i + 1) % n) for i in range(n)]
        ),
    }
    shape = (lead, rows if case.kind == "all-gather" else rows * n, width)
    return lambda x, _: x.at[0, 0, 0].set(send[case.kind](x)[0, 0, 0]), shape, jnp.zeros(1)
