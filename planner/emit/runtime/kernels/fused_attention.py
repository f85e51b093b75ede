"""Attention by the fused kernel of the devices that a program runs on.

cudnn     cuDNN's flash attention, on NVIDIA GPUs from Ampere on (jax.nn.dot_product_attention)
splash    Splash attention, on TPUs (jax.experimental.pallas.ops.tpu.splash_attention)
blocks    everywhere else, and where a kernel cannot serve: `attention` of kernels.py

Neither kernel sends scores through memory, and both leave out the keys that a causal mask hides or
that lie before a window.
What they keep for their backward pass is their operands, their result and a float32 a row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from planner.emit.runtime.collectives.exchange import spread
from planner.emit.runtime.kernels.kernels import attention, is_of_segments, same_segment

WITHOUT_FLASH = ("P100", "V100", "T4", "GTX", "TITAN", "Quadro")
"""NVIDIA GPUs before Ampere, by parts of their names: cuDNN's fused attention needs a later one."""
HOPPER = ("H100", "H200", "H20", "H800")
"""Those on which it takes heads of up to 256 elements, by parts of their names; of others 128."""
BLACKWELL = ("B200", "B300")
LATENT = (192, 128)
"""Elements of a key and of a value in multi-head latent attention, which cuDNN takes as they are on
Hopper and on Blackwell."""
LATENT_SINCE = 91100
"""The version of cuDNN that takes those first."""


# Many parameters: the operands and attributes of attention.
def fused_attention(q, k, v, scale, causal, guard, window=0, mask=None, name="", cap=0.0):
    """`attention`, q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] whole along S and T, a mask
    broadcastable to [B, H, S, T], by the kernel that the devices have for these operands. name:
    what checkpoint policies call the result, and what a kernel keeps beside it; cuDNN's they know
    by itself (`save_names`)."""
    kernel = attention_kernel(q, k, v, mask, cap, window)
    if kernel == "blocks":
        out = attention(q, k, v, mask, scale, causal, guard, 0, window, cap)
        return checkpoint_name(out, name) if name else out

    def run(v):
        """The kernel's result. Most kernels take values as wide as keys: narrower ones (multi-head
        latent attention) get zeros behind them, which are left out of the result."""
        width = q.shape[3] - v.shape[3]
        if width and not is_latent(q, k, v, mask, window):
            with jax.named_scope(f"values_{v.shape[3]}"):
                wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width)))
                return served(wide)[..., : v.shape[3]]
        return served(v)

    def served(v):
        """The kernel's result for values as wide as it takes."""
        if kernel == "cudnn":
            return cudnn_attention(q, k, v, scale, causal, window, mask)
        return splash_attention(q, k, v, scale, causal, window, mask, name=name, cap=cap)

    if mask is None or not guard:
        return run(v)
    seen = sees_a_key(mask, q.shape[2], k.shape[2], causal, window)
    if all(n == 1 for n in seen.shape[-3:]):
        # One answer for all queries of a sequence: without values its result is zero, and to clear
        # values, which are being written, costs nothing.
        return run(jnp.where(seen, v, 0))
    return jnp.where(seen, run(v), 0)


# Many parameters: the operands and attributes of attention.
def attention_kernel(q, k, v, mask=None, cap=0.0, window=0):
    """Which kernel serves operands of these shapes and types on the devices of the mesh: "cudnn",
    "splash" or "blocks". cuDNN's has no cap of scores."""
    name = device_name()
    short = q.dtype in (jnp.bfloat16, jnp.float16) and q.dtype == k.dtype == v.dtype
    alike = q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] >= v.shape[3]
    if not short or not alike:
        return "blocks"
    if name.startswith("NVIDIA") and not any(old in name for old in WITHOUT_FLASH):
        widest = 256 if any(new in name for new in HOPPER) else 128
        served = q.shape[3] <= widest or is_latent(q, k, v, mask, window)
        return "cudnn" if served and q.shape[3] % 8 == 0 and not cap else "blocks"
    if name.startswith("TPU"):
        whole = q.shape[2] % 128 == 0 and k.shape[2] % 128 == 0 and q.shape[3] % 64 == 0
        return "splash" if whole and (mask is None or is_of_keys(mask)) else "blocks"
    return "blocks"


def is_latent(q, k, v, mask, window):
    """Whether cuDNN takes values that are narrower than keys as they are, on these devices."""
    there = any(new in device_name() for new in HOPPER + BLACKWELL)
    if not there or (q.shape[3], v.shape[3]) != LATENT:
        return False
    import jax._src.cudnn.fused_attention_stablehlo as cudnn

    even = q.shape[2] % 2 == 0 and k.shape[2] % 2 == 0
    if not even or mask is not None or window or not hasattr(cudnn, "dot_product_attention"):
        return False
    return cudnn.check_cudnn_version() >= LATENT_SINCE


def device_name():
    """The kind of the devices of the mesh, "" where nothing tells it."""
    device, here = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()
    if device is None and len(here) == 1:  # the mesh of a single device does not tell which
        device = here[0]
    return "" if device is None else device.device_kind


def is_of_keys(mask):
    """Whether a mask says of each key whether all queries see it, or of which segment it is, for
    all heads alike."""
    whole = mask.dtype == bool or is_of_segments(mask)
    return whole and all(n == 1 for n in mask.shape[:-1][-2:])


def sees_a_key(mask, rows, keys, causal, window):
    """Whether a query sees any key, [.., S, 1]. Kernels hide keys by terms that are finite, so that
    a query that sees none would see all."""
    seen = mask if mask.dtype == bool else mask > -jnp.inf
    if causal:
        ahead = jnp.arange(keys)[None, :] - jnp.arange(rows)[:, None]
        seen = seen & (ahead <= 0) & (ahead > -window if window else True)
    return jnp.any(seen, -1, keepdims=True)


# Many parameters: the operands and attributes of attention.
def cudnn_attention(q, k, v, scale, causal, window=0, mask=None):
    """cuDNN's fused attention, forward and backward. Operands as for `fused_attention`. Its
    backward pass takes even numbers of queries and keys: odd ones get one more, which is left
    out."""
    rows, odd = q.shape[2], (q.shape[2] % 2, k.shape[2] % 2)
    mask = same_segment(mask, 0, rows) if is_of_segments(mask) else mask
    bias = None if mask is None else spread(bias_of(mask, q, k), q, k, v)
    lengths = [jnp.full(q.shape[0], x.shape[2], jnp.int32) if any(odd) else None for x in (q, k)]
    q, k, v = (jnp.swapaxes(spread(x, q, k, v), 1, 2) for x in (q, k, v))
    if q.shape[3] != v.shape[3]:
        return jnp.swapaxes(latent_attention(q, k, v, scale, causal), 1, 2)
    if any(odd):
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
            for x, padding in ((q, odd[0]), (k, odd[1]), (v, odd[1]))
        )
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=scale,
        is_causal=causal,
        local_window_size=(window - 1, 0) if window else None,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        implementation="cudnn",
    )
    return jnp.swapaxes(out[:, :rows], 1, 2)


def latent_attention(q, k, v, scale, causal):
    """cuDNN's attention of values that are narrower than keys, [B, S, H, D]. jax.nn's function
    wants them alike, so that what it calls is called."""
    import jax._src.cudnn.fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    return cudnn.dot_product_attention(q, k, v, scale=scale, mask_type=mask)


def bias_of(mask, q, k):
    """The terms that cuDNN adds to scores for a mask, [B or 1, H or 1, S, T], to even S and T: of a
    key that is not seen a large negative one, as it subtracts infinities from each other."""
    least = jnp.asarray(-(2.0**41) if q.dtype == jnp.bfloat16 else -(2.0**15), q.dtype)
    terms = jnp.where(mask, 0, least) if mask.dtype == bool else jnp.maximum(mask, least)
    sizes = (*(1,) * (4 - mask.ndim), *mask.shape)
    whole = (*sizes[:2], q.shape[2], k.shape[2])
    bias = jnp.broadcast_to(terms.astype(q.dtype).reshape(sizes), whole)
    return jnp.pad(bias, ((0, 0), (0, 0), (0, whole[2] % 2), (0, whole[3] % 2)))


# Many parameters: the operands and attributes of attention.
def splash_attention(
    q, k, v, scale, causal, window=0, mask=None, interpret=False, name="", cap=0.0
):
    """Splash attention, forward and backward, batch by batch. Operands and name as for
    `fused_attention`, a mask `is_of_keys`; interpret: in plain operations, for devices that are no
    TPUs.

    The kernel does not say over which mesh axes its results differ, so it is traced without that
    check and its results are given the type of the queries.
    """
    from jax._src.config import _check_vma as check_types
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    rows, keys = q.shape[2], k.shape[2]
    grouped = k.shape[1] > 1 or q.shape[1] == 1
    make = splash.make_splash_mha if grouped else splash.make_splash_mqa
    kernel = functools.partial(
        splash_kernel, make, q.shape[1], rows, keys, causal, window, interpret, name, cap=cap
    )

    def attend(q, k, v, seen):
        """The kernel's result for one sequence. seen: whether each key is, None for all; queries
        are of the segment of the keys that are, or of that of their own position."""
        if seen is None:
            return kernel()(q, k, v)
        query_segments = jnp.ones(rows, jnp.int32) if seen.dtype == bool else seen.astype(jnp.int32)
        return kernel()(q, k, v, splash.SegmentIds(query_segments, seen.astype(jnp.int32)))

    @jax.custom_vjp
    def run(q, k, v, seen):
        """The result alone."""
        return keep(q, k, v, seen)[0]

    def keep(q, k, v, seen):
        """The result, and the kernel's backward pass."""
        with check_types(False), jax.named_scope(f"window_{window}"):
            bare = [x if x is None else untyped(x) for x in (q, k, v, seen)]
            whole = jax.vmap(attend, in_axes=(0, 0, 0, None if seen is None else 0))
            out, pull = jax.vjp(lambda q, k, v: whole(q, k, v, bare[3]), *bare[:3])
        return typed(out, q), jax.tree.map(lambda x: typed(x, q), pull)

    def backward(pull, g):
        """Gradients of all operands."""
        with check_types(False), jax.named_scope(f"window_{window}"):
            gradients = jax.tree.map(untyped, pull)(untyped(g))
        return *(typed(x, g) for x in gradients), None

    run.defvjp(keep, backward)
    if mask is not None:
        mask = jnp.broadcast_to(mask.reshape(-1, keys), (q.shape[0], keys))
        mask = spread(mask, q, k, v)
    q, k, v = (spread(x, q, k, v) for x in (q, k, v))
    k, v = (k, v) if grouped else (k[:, 0], v[:, 0])
    return run(q * jnp.asarray(scale, q.dtype), k, v, mask)


# Many parameters: what a kernel is made of.
def splash_kernel(
    make, heads, rows, keys, causal, window, interpret, name, logarithms=False, cap=0.0
):
    """Splash's kernel, made where it is used: its description of the mask belongs to what is being
    traced. logarithms: whether it gives those of its rows' sums of exponentials beside its
    result."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    visible = (
        masks.LocalMask((rows, keys), (window - 1, 0), 0)
        if window
        else (masks.CausalMask if causal else masks.FullMask)((rows, keys))
    )
    return make(
        masks.MultiHeadMask([visible] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**splash_blocks(rows, keys)),
        interpret=interpret,
        residual_checkpoint_name=name or None,
        save_residuals=logarithms,
        attn_logits_soft_cap=cap or None,
    )


def splash_blocks(rows, keys):
    """Rows and keys of the blocks that Splash's kernels take."""
    row_block, key_block, step = block_of(rows, 1024), block_of(keys, 1024), block_of(keys, 512)
    return {
        "block_q": row_block,
        "block_kv": key_block,
        "block_kv_compute": step,
        "block_q_dkv": row_block,
        "block_kv_dkv": key_block,
        "block_kv_dkv_compute": step,
        "block_q_dq": row_block,
        "block_kv_dq": key_block,
    }


def untyped(x):
    """x without the mesh axes over which it differs, where types are not checked."""
    return lax.reshape(lax.reshape(x, (x.size,)), x.shape)


def typed(x, like):
    """x with the mesh type of `like`, whether or not it has it already: loops trace their body a
    second time, in which `untyped` and the kernel have the types that they lacked in the first."""
    return mesh_type().bind(x, like)


@functools.cache
def mesh_type():
    """The primitive that `typed` is, which does nothing when it runs."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("mesh_type")
    primitive.def_impl(lambda x, like: x)
    primitive.def_abstract_eval(
        lambda x, like: x.update(
            sharding=x.sharding.update(mesh=like.sharding.mesh),
            manual_axis_type=like.manual_axis_type,
        )
    )
    mlir.register_lowering(primitive, lambda context, x, like: [x])
    return primitive


def block_of(size, most):
    """The largest block of at most `most` that divides `size`, a multiple of 128."""
    return next(n for n in (most, most // 2, most // 4, 128) if size % n == 0)
