"""GPT-2's training step as one writes it by hand in plain JAX, with the shardings of Megatron and
its sequence parallelism on a mesh of axes "data" and "model".

Two programs: `jit_loss` leaves collectives to the partitioner, held by constraints on what runs
between blocks; `shard_map_loss` writes them out. Parameters go by the names and stacked shapes of
the zoo's model, so that both start from the values that an emitted program starts from, and give
its loss. Nothing is imported from the planner. x [B, S, D] runs between blocks, B over data, S over
model; heads, the feed-forward's width and the vocabulary, padded, over model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Arrays = Mapping[str, Any]
HEAD = 64
BETA1, BETA2, EPSILON, DECAY, RATE = 0.9, 0.999, 1e-8, 0.01, 1e-4
BLOCK = "transformer.h.*."


def norm(x: Any, w: Arrays, name: str) -> Any:
    """Layer normalisation over the last dim."""
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(h: Any, w: Arrays) -> Any:
    """Causal attention of the heads whose columns are here, before the product that joins them: h
    [B, S, D] -> [B, S, heads * HEAD]."""
    q, k, v = (
        (h @ w[f"attn.{n}_proj.weight"] + w[f"attn.{n}_proj.bias"]).reshape(*h.shape[:2], -1, HEAD)
        for n in "qkv"
    )
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * HEAD**-0.5
    seen = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(*h.shape[:2], -1)


def widened(h: Any, w: Arrays) -> Any:
    """The feed-forward up to its activation."""
    return jax.nn.gelu(h @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"], approximate=True)


def blocks(x: Any, params: Arrays, block: Callable[[Any, Arrays], Any]) -> Any:
    """All blocks, by a scan over their stacked weights."""
    stacked = {k.removeprefix(BLOCK): v for k, v in params.items() if k.startswith(BLOCK)}
    return lax.scan(lambda x, w: (block(x, w), None), x, stacked)[0]


def jit_loss(params: Arrays, batch: Arrays, vocabulary: int) -> Any:
    """Mean loss; the partitioner places the collectives."""

    def between(x: Any) -> Any:
        return lax.with_sharding_constraint(x, P("data", "model"))

    def block(x: Any, w: Arrays) -> Any:
        x = between(
            x
            + attention(norm(x, w, "ln_1"), w) @ w["attn.out_proj.weight"]
            + w["attn.out_proj.bias"]
        )
        return between(
            x + widened(norm(x, w, "ln_2"), w) @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
        )

    ids, labels, table = batch["input_ids"], batch["labels"], params["transformer.wte.weight"]
    x = between(table[ids] + params["transformer.wpe.weight"][: ids.shape[1]])
    logits = norm(blocks(x, params, block), params, "transformer.ln_f") @ table.T
    logits = jnp.where(jnp.arange(table.shape[0]) < vocabulary, logits, -jnp.inf)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def shard_map_loss(params: Arrays, batch: Arrays, vocabulary: int) -> Any:
    """Mean loss on local pieces, every collective written out."""

    def gathered(x: Any) -> Any:
        return lax.all_gather(x, "model", axis=1, tiled=True)

    def scattered(x: Any) -> Any:
        return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)

    def block(x: Any, w: Arrays) -> Any:
        x = (
            x
            + scattered(attention(gathered(norm(x, w, "ln_1")), w) @ w["attn.out_proj.weight"])
            + w["attn.out_proj.bias"]
        )
        return (
            x
            + scattered(widened(gathered(norm(x, w, "ln_2")), w) @ w["mlp.c_proj.weight"])
            + w["mlp.c_proj.bias"]
        )

    ids, labels, table = batch["input_ids"], batch["labels"], params["transformer.wte.weight"]
    rows = table.shape[0]
    first = lax.axis_index("model") * rows
    here = (ids >= first) & (ids < first + rows)
    tokens = scattered(jnp.where(here[..., None], table[jnp.clip(ids - first, 0, rows - 1)], 0))
    x = tokens + lax.all_to_all(
        params["transformer.wpe.weight"][: ids.shape[1]],
        "model",
        split_axis=0,
        concat_axis=1,
        tiled=True,
    )
    logits = gathered(norm(blocks(x, params, block), params, "transformer.ln_f")) @ table.T
    logits = jnp.where(first + jnp.arange(rows) < vocabulary, logits, -jnp.inf)
    top = lax.pmax(lax.stop_gradient(jnp.max(logits, -1)), "model")
    total = lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), -1), "model")
    mine = (labels >= first) & (labels < first + rows)
    picked = jnp.take_along_axis(logits, jnp.clip(labels - first, 0, rows - 1)[..., None], -1)[
        ..., 0
    ]
    return lax.pmean(
        jnp.mean(jnp.log(total) + top - lax.psum(jnp.where(mine, picked, 0), "model")), "data"
    )


def update(p: Any, g: Any, m: Any, v: Any, count: Any) -> tuple[Any, Any, Any]:
    """One step of AdamW."""
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * jnp.square(g)
    step = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
    return p - RATE * (step + DECAY * p), m, v


def make_step(
    mesh: Mesh, specs: Mapping[str, Any], inputs: Mapping[str, Any], backend: str, vocabulary: int
) -> Any:
    """step(params, state, batch, count) -> (params, state, loss), compiled, in place. specs: cuts
    of parameters and of their two moments alike."""

    def step(params: Arrays, state: Arrays, batch: Arrays, count: Any) -> Any:
        loss, grads = jax.value_and_grad(jit_loss if backend == "jit" else shard_map_loss)(
            params, batch, vocabulary
        )
        new = {k: update(p, grads[k], state[k][0], state[k][1], count) for k, p in params.items()}
        return (
            {k: p for k, (p, _, _) in new.items()},
            {k: (m, v) for k, (_, m, v) in new.items()},
            loss,
        )

    moments = {k: (s, s) for k, s in specs.items()}
    if backend == "shard_map":
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, moments, inputs, P()), out_specs=(specs, moments, P())
        )
    on = [
        jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda s: isinstance(s, P))
        for tree in (specs, moments, inputs, P())
    ]
    return jax.jit(
        step, in_shardings=tuple(on), out_shardings=(on[0], on[1], on[3]), donate_argnums=(0, 1)
    )
