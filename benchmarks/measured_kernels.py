"""Seconds of single kernels on the GPU that jax sees: `python -m benchmarks.measured_kernels RESULT
[--only WORD]`. Needs jax and numpy alone.

Products by (m, n, k), what a fused attention takes forward and backward by width of heads and
length, passes over memory, copies to and from the host. Each is compiled as jax compiles it, run a
few times on random values, and timed by jax's trace: RESULT is JSON, name -> seconds of its
kernels, FLOPs and bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RUNS = 4
DRAWN = 64
"""Products by chance, which judge what is fitted to the others."""
HIDDEN, TOKENS = 2048, 16384
"""Of attention's cases: heads times their width, and sequences times their length."""


@dataclass(frozen=True)
class Case:
    """A function of arrays. shapes: (shape, dtype) of each; flops, size_bytes: of one run."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    flops: float
    size_bytes: float


def products() -> Iterator[Case]:
    """Activations times weights, and gradients of weights, as transformers have them."""
    import jax.numpy as jnp

    sides = (
        (768, 768),
        (3072, 768),
        (768, 3072),
        (1024, 1024),
        (4096, 1024),
        (1024, 4096),
        (1600, 1600),
        (6400, 1600),
        (1600, 6400),
        (4096, 4096),
        (1024, 4096),
        (14336, 4096),
        (4096, 14336),
        (8192, 8192),
        (28672, 8192),
    )
    listed = [(m, n, k) for n, k in dict.fromkeys(sides) for m in (512, 2048, 8192)]
    listed += [(16384, 4096, 4096), (16384, 14336, 4096), (64, 4096, 4096), (64, 14336, 4096)]
    listed += [(8192, 50257, 768), (8192, 50304, 768), (8192, 50257, 1600), (8192, 50304, 1600)]
    listed += [(2048, 128256, 4096), (8192, 4095, 4096), (8192, 4100, 4096), (8192, 4104, 4096)]
    listed += [(197 * 32, 4096, 1024), (197 * 32, 1024, 1024), (256, 256, 256), (128, 128, 4096)]

    def case(m: int, n: int, k: int, kind: str, dtype: str) -> Case:
        """[m, k] times [k, n], or a gradient of one of the two."""

        def forward(a: Any, b: Any) -> Any:
            return jnp.matmul(a, b)

        def weights(a: Any, b: Any) -> Any:  # [m, k], [m, n] -> [k, n]
            return jnp.matmul(a.T, b)

        def back(a: Any, b: Any) -> Any:  # [m, n], [k, n] -> [m, k]
            return jnp.matmul(a, b.T)

        run, shapes = {
            "forward": (forward, ((m, k), (k, n))),
            "weights": (weights, ((m, k), (m, n))),
            "back": (back, ((m, n), (k, n))),
        }[kind]
        item = {"bfloat16": 2, "float32": 4}[dtype]
        return Case(
            f"product_{kind}_{dtype}_{m}x{n}x{k}",
            run,
            tuple((s, dtype) for s in shapes),
            2.0 * m * n * k,
            item * (m * n + m * k + k * n),
        )

    for m, n, k in listed:
        yield case(m, n, k, "forward", "bfloat16")
    for m, n, k in drawn_products():
        yield case(m, n, k, "forward", "bfloat16")
    for m, n, k in listed:
        if m == 8192 and n * k >= 2**20:
            yield case(m, n, k, "weights", "bfloat16")
            yield case(m, n, k, "back", "bfloat16")
    for m in (1024, 8192):
        yield case(m, 4096, 4096, "forward", "float32")


def drawn_products() -> list[tuple[int, int, int]]:
    """(m, n, k) that no transformer named above has: rows of small to large microbatches, sides of
    weights as tensor parallelism leaves them."""
    import random

    drawn = random.Random(29)
    sides = (320, 512, 640, 896, 1152, 1280, 1792, 2304, 2560, 3584, 5120, 7168, 11008, 13824)
    rows = (128, 384, 640, 1024, 1536, 3072, 4096, 6144, 12288)
    return [(drawn.choice(rows), drawn.choice(sides), drawn.choice(sides)) for _ in range(DRAWN)]


def attentions() -> Iterator[Case]:
    """cuDNN's fused attention."""
    import jax

    def case(d: int, s: int, causal: bool, backward: bool, kv: int = 1, mask: str = "") -> Case:
        """Heads of d elements over s tokens, kv of queries to one of keys."""
        batch, heads = max(1, TOKENS // s), HIDDEN // d
        q, k = (batch, s, heads, d), (batch, s, heads // kv, d)

        def forward(q: Any, k: Any, v: Any, *more: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, more[0] if more else None, is_causal=causal, implementation="cudnn"
            )

        def both(q: Any, k: Any, v: Any, g: Any, *more: Any) -> Any:
            return jax.vjp(lambda *x: forward(*x, *more), q, k, v)[1](g)

        flops = 4.0 * batch * heads * s * s * d * (0.5 if causal else 1.0)
        bias = (((batch, 1, s, s), "bfloat16"),) if mask else ()
        name = f"d{d}_s{s}{'_causal' if causal else ''}{f'_kv{kv}' if kv > 1 else ''}{mask}"
        arrays = ((q, "bfloat16"), (k, "bfloat16"), (k, "bfloat16"))
        size = 2.0 * batch * s * d * (2 * heads + 2 * heads // kv)
        if backward:
            return Case(
                f"attention_both_{name}",
                both,
                (*arrays, (q, "bfloat16"), *bias),
                3.5 * flops,
                4 * size,
            )
        return Case(f"attention_forward_{name}", forward, (*arrays, *bias), flops, size)

    for d in (64, 128):
        for s in (256, 512, 1024, 2048, 4096, 8192, 32768):
            for causal in (True, False) if s <= 8192 else (True,):
                yield case(d, s, causal, True)
    for d, s in ((96, 2048), (192, 4096), (256, 2048), (256, 8192)):
        yield case(d, s, True, True)
    for d, s in ((64, 1024), (64, 2048), (64, 8192), (128, 2048), (128, 8192)):
        yield case(d, s, True, False)
    for s in (2048, 8192):
        yield case(128, s, True, True, kv=4)
    yield case(64, 512, False, True, mask="_bias")
    yield case(64, 2048, False, True, mask="_bias")
    yield case(128, 2048, False, True, mask="_bias")


def passes() -> Iterator[Case]:
    """What moves memory."""
    import jax
    import jax.numpy as jnp

    for mib in (1, 4, 16, 64, 256, 1024):
        n = mib * 2**20 // 2
        yield Case(f"pass_scale_{mib}MiB", lambda x: x * 1.5, (((n,), "bfloat16"),), 0, 2 * 2.0 * n)
    n = 2**28
    flat = (((n // 8192, 8192), "bfloat16"),)
    yield Case("pass_sum_rows", lambda x: x.astype("float32").sum(1), flat, 0, 2.0 * n)
    yield Case("pass_sum_columns", lambda x: x.astype("float32").sum(0), flat, 0, 2.0 * n)
    yield Case("pass_transpose", lambda x: x.T + 0, flat, 0, 4.0 * n)
    yield Case(
        "pass_rms_norm",
        lambda x: (
            x
            * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype("float32")), 1, keepdims=True)).astype(
                x.dtype
            )
        ),
        flat,
        0,
        4.0 * n,
    )
    yield Case("pass_softmax", lambda x: jax.nn.softmax(x, 1), flat, 0, 4.0 * n)
    ids = ((16384,), "int32")
    yield Case(
        "pass_take_rows", lambda t, i: t[i % 128256], (((128256, 4096), "bfloat16"), ids), 0, 2.7e8
    )
    yield Case(
        "pass_add_rows",
        lambda g, i: jnp.zeros((128256, 4096), "bfloat16").at[i % 128256].add(g),
        (((16384, 4096), "bfloat16"), ids),
        0,
        1.05e9 + 4e8,
    )


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Random values on the device."""
    import jax

    key = jax.random.key(seed)
    if dtype == "int32":
        return jax.random.randint(key, shape, 0, 2**30, dtype)
    return jax.random.normal(key, shape, dtype)


def measured(cases: list[Case], seconds: float) -> dict[str, Any]:
    """Every case that there is time for."""
    import jax

    begun = time.monotonic()
    out: dict[str, Any] = {}
    for at in range(0, len(cases), 16):
        if time.monotonic() - begun > seconds:
            break
        ready = []
        for case in cases[at : at + 16]:
            case.run.__name__ = case.name
            try:
                arrays = [drawn(*s, i) for i, s in enumerate(case.shapes)]
                run = jax.jit(case.run).lower(*arrays).compile()
                jax.block_until_ready(run(*arrays))
            except (RuntimeError, ValueError) as e:  # of jax and of its compiler
                out[case.name] = {"failed": str(e)[:300]}
                continue
            ready.append((case, run, arrays))
        events = traced(ready)
        for one in ready:
            case = one[0]
            kernels = events.get(case.name) or traced([one]).get("", {})
            out[case.name] = {
                "time_s": sum(median(t) * len(t) / RUNS for t in kernels.values()),
                "flops": case.flops,
                "bytes": case.size_bytes,
                "kernels": {k: [median(t), len(t) / RUNS] for k, t in kernels.items()},
            }
    return out


def traced(ready: list[tuple[Case, Any, list[Any]]]) -> dict[str, dict[str, list[float]]]:
    """Name of a case, "" where the trace does not tell -> name of a kernel -> seconds of its
    runs."""
    import jax
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _, run, arrays in ready:
                for _ in range(RUNS):
                    jax.block_until_ready(run(*arrays))
        found = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    events: dict[str, dict[str, list[float]]] = {}
    for plane in found.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                module = str(dict(event.stats).get("hlo_module", ""))
                names = events.setdefault(module.removeprefix("jit_"), {})
                names.setdefault(event.name, []).append(event.duration_ns * 1e-9)
    return events


def host_links() -> dict[str, float]:
    """Bytes a second to the host's pinned memory and back."""
    import jax

    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    away = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.block_until_ready(jax.device_put(drawn((2**29,), "bfloat16", 0), here))
    out, told = {}, jax.block_until_ready(jax.device_put(x, away))
    for name, value, to in (("to_host", x, away), ("from_host", told, here)):
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(value, to))
            taken.append(time.perf_counter() - start)
        out[name] = 2.0**30 / min(taken)
    return out


def main() -> int:
    """The command."""
    import jax

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=150.0)
    given = parser.parse_args()
    listed = [c for make in (attentions, passes, products) for c in make() if given.only in c.name]
    told = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "cases": measured(listed, given.seconds),
    }
    given.result.write_text(json.dumps(told, indent=1))
    told["host"] = host_links()
    given.result.write_text(json.dumps(told, indent=1))
    for name, row in told["cases"].items():
        if row.get("time_s"):
            print(
                f"{name:50} {1e6 * row['time_s']:9.1f} us {row['flops'] / row['time_s'] / 1e12:7.1f}"
                f" TFLOP/s {row['bytes'] / row['time_s'] / 1e9:7.0f} GB/s"
            )
        else:
            print(name, row.get("failed", "no kernels"))
    print(told["host"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
