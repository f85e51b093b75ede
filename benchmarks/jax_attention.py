"""Memory that `planner.from_jax` plans for attention, beside what XLA reports for the function.

    python -m benchmarks.jax_attention

Needs the GPU compiler (the extra gpu-compiler); nothing is run. An H100 is compiled for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from planner.verify.targets import parse_target

ROWS, HEADS, LENGTH, WIDTH = 8, 8, 4096, 64


def written(softmax_in_float32: bool) -> Callable[..., Any]:
    """Attention as people write it out."""
    import jax
    import jax.numpy as jnp

    def fn(p: Any, x: Any) -> Any:
        q, k, v = (
            (x @ p[n]).reshape(ROWS, LENGTH, HEADS, WIDTH).transpose(0, 2, 1, 3) for n in "qkv"
        )
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / WIDTH**0.5
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        wide = scores.astype(jnp.float32) if softmax_in_float32 else scores
        y = jax.nn.softmax(wide, -1).astype(x.dtype) @ v
        return jnp.sum((y.swapaxes(1, 2).reshape(x.shape) @ p["o"]).astype(jnp.float32) ** 2)

    return fn


def called(implementation: str) -> Callable[..., Any]:
    """Attention by `jax.nn.dot_product_attention`."""
    import jax
    import jax.numpy as jnp

    def fn(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(ROWS, LENGTH, HEADS, WIDTH) for n in "qkv")
        y = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            implementation=implementation,  # type: ignore[arg-type]
        )
        return jnp.sum((y.reshape(x.shape) @ p["o"]).astype(jnp.float32) ** 2)

    return fn


def main() -> None:
    """Print the table."""
    os.environ |= parse_target("gpu:h100", 1).environment()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import planner

    (device,) = parse_target("gpu:h100", 1).compile_devices(1)
    whole = NamedSharding(Mesh(np.array([device]), ("d",)), PartitionSpec())
    print("| function | planned | compiled | planned / compiled |\n|---|---|---|---|")
    for name, dtype, fn in (
        ("written out, float32", jnp.float32, written(False)),
        ("written out, bfloat16", jnp.bfloat16, written(False)),
        ("written out, softmax in float32", jnp.bfloat16, written(True)),
        ("`jax.nn.dot_product_attention`, xla", jnp.bfloat16, called("xla")),
        ("`jax.nn.dot_product_attention`, cudnn", jnp.bfloat16, called("cudnn")),
    ):
        width = HEADS * WIDTH
        params = {n: jax.ShapeDtypeStruct((width, width), dtype, sharding=whole) for n in "qkvo"}
        x = jax.ShapeDtypeStruct((ROWS, LENGTH, width), dtype, sharding=whole)
        planned = planner.from_jax(fn, params, x, devices=1, hardware="h100-sxm")
        memory = planned.strategy.costs["memory_breakdown_bytes"]
        ours = memory["activations"] + memory["temporary"]
        compiled = jax.jit(jax.grad(fn)).lower(params, x).compile().memory_analysis()
        theirs = compiled.temp_size_in_bytes
        print(
            f"| {name} | {ours / 2**30:.2f} GiB | {theirs / 2**30:.2f} GiB | {ours / theirs:.2f} |"
        )


if __name__ == "__main__":
    main()
