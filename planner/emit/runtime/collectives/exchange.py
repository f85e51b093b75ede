"""ReshardPrices between layouts and rematerialisation, under shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Offloadable


def cut(x, axes, dim):
    """This device's piece of `dim` of a value that is equal over the axes; the gradient is gathered
    (not summed: all hold the same)."""
    size = x.shape[dim] // lax.axis_size(axes)

    @jax.custom_vjp
    def piece(value):
        return lax.dynamic_slice_in_dim(
            lax.pcast(value, axes, to="varying"), lax.axis_index(axes) * size, size, dim
        )

    piece.defvjp(
        lambda value: (piece(value), None),
        lambda _, g: (lax.all_gather(g, axes, axis=dim, tiled=True, to="invarying"),),
    )
    return piece(x)


def gather_weight(shard, axes, dim, size=0):
    """A weight from its shards; its gradient is scattered back over them. size: of `dim`, where the
    shards are padded."""
    whole = lax.all_gather(shard, axes, axis=dim, tiled=True)
    return lax.slice_in_dim(whole, 0, size, axis=dim) if size else whole


def gather_after(cause, shard, axes, dim, size=0):
    """A weight from its shards, not before `cause` is there: gathered weights then do not pile up
    ahead of their use."""
    return gather_weight(after(shard, cause), axes, dim, size)


def after(values, cause):
    """`values` unchanged, but computed after `cause`.

    Values that vary over fewer mesh axes than `cause` are left alone: tying them would change their
    type.
    """
    cause = [c for c in jax.tree.leaves(cause) if c.dtype != jax.dtypes.float0 and c.size]
    if not cause:
        return values
    values, cause = lax.optimization_barrier((values, cause))
    first = min(cause, key=lambda c: len(jax.typeof(c).manual_axis_type.varying))
    no = never(first)
    axes = jax.typeof(no).manual_axis_type.varying

    @jax.custom_vjp
    def unless(no, v):
        return jnp.where(no, jnp.zeros((), v.dtype), v)

    unless.defvjp(
        lambda no, v: (unless(no, v), None), lambda _, g: (None, g)
    )  # a gradient does not wait for the cause
    return jax.tree.map(
        lambda v: unless(no, v) if axes <= jax.typeof(v).manual_axis_type.varying else v, values
    )


def never(x):
    """False, once x is there: no square is below -1, which compilers do not know."""
    return jnp.square(x[(0,) * x.ndim].astype(jnp.float32)) < -1.0


def recompute(block, policy=None):
    """jax.checkpoint for unrolled programs: what the policy does not save is recomputed once
    the cotangent is there.

    Compilers merge a replay that could start early with the original. All differentiated values
    must be arguments of `block`.
    """
    saving = jax.checkpoint(block, policy=policy)

    @jax.custom_vjp
    def run(*args):
        return block(*args)

    run.defvjp(
        lambda *args: jax.vjp(saving, *args),
        lambda pull, cotangent: after(pull, cotangent)(cotangent),
    )
    return run


def lean(function):
    """A function of whose insides nothing is saved, whatever policy the function around it has:
    its backward pass begins with its operands.

    Repeated blocks under lax.scan are held to this; where both passes stand in one computation, the
    compiler chooses. Operands vary alike: a constant that a stage keeps between its passes would
    vary over the stages in the backward pass alone.
    """

    @jax.custom_vjp
    def run(*operands):
        return function(*operands)

    run.defvjp(
        lambda *operands: (function(*operands), operands),
        lambda operands, g: jax.vjp(function, *operands)[1](g),
    )
    return lambda *operands: run(*alike(operands))


def at_once(function):
    """A function of whose operands' gradients none is used before all are made."""
    identity = jax.custom_vjp(lambda *operands: operands)
    identity.defvjp(lambda *x: (x, None), lambda _, gradients: waiting(gradients))
    return lambda *operands: function(*identity(*operands))


def waiting(values):
    """Values of which none is used before all are there. Those that vary over fewer mesh axes than
    the first that varies over most are left alone: a barrier would change their type."""
    leaves, tree = jax.tree.flatten(values)
    axes = [jax.typeof(v).manual_axis_type.varying for v in leaves]
    most = max(axes, key=len)
    tied = [k for k, own in enumerate(axes) if own == most]
    for k, v in zip(tied, lax.optimization_barrier([leaves[k] for k in tied]), strict=True):
        leaves[k] = v
    return jax.tree.unflatten(tree, leaves)


def save_names(*names):
    """Checkpoint policy: values of these names are saved."""
    return with_fused(jax.checkpoint_policies.save_only_these_names(*names), names)


def save_or_offload(saved, offloaded):
    """Checkpoint policy: values of these names are saved, and of those offloaded to the host's
    memory; "entering" is what enters a block."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return with_fused(policy, saved, offloaded)


def with_fused(policy, saved, offloaded=()):
    """A checkpoint policy that also saves or offloads, with "context" among the names, what cuDNN's
    attention makes: its result and a float32 a row, which its backward pass reads."""
    if "context" not in (*saved, *offloaded):
        return policy
    away = Offloadable(src="device", dst="pinned_host")
    verdict = away if "context" in offloaded else True

    def keeps(primitive, *avals, **params):
        is_cudnn = primitive.name.startswith("dot_product_attention_fwd")
        return verdict if is_cudnn else policy(primitive, *avals, **params)

    return keeps


def made_again(function, waiting):
    """`lean` where both passes stand in one computation: so many operands wait for the cotangent,
    or compilers would merge what the backward pass makes of them with what the forward pass made.
    """

    @jax.custom_vjp
    def run(*operands):
        return function(*operands)

    def pull(operands, g):
        return jax.vjp(function, *after(operands[:waiting], g), *operands[waiting:])[1](g)

    run.defvjp(lambda *operands: (function(*operands), operands), pull)
    return run


def no_gathers(primitive, *_, **__):
    """Checkpoint policy: save everything except what a gather made and views of anything, so that
    gathered weights are gathered again. Collectives between activations are named, and names are
    saved."""
    views = ("broadcast_in_dim", "convert_element_type", "reshape", "slice", "squeeze", "transpose")
    return primitive.name not in ("all_gather", "all_gather_invariant", "pad", *views)


def pend(p, axes):
    """A parameter that is equal on all devices of the axes, its gradient a sum still to be taken
    over them."""
    return lax.pcast(p, axes, to="varying") if axes else p


def reduce_gradient(g, sum_axes, scatter_axes, dim):
    """The one reduction of a gradient that is pending over mesh axes: summed, or scattered along
    `dim` first."""
    if scatter_axes:
        g = lax.psum_scatter(
            even(g, scatter_axes, dim), scatter_axes, scatter_dimension=dim, tiled=True
        )
    return lax.psum(g, sum_axes) if sum_axes else g


def even(x, axes, dim):
    """x with `dim` padded by zeros up to a multiple of the devices along the axes."""
    n = lax.axis_size(axes)
    return pad_to(x, dim, -(-x.shape[dim] // n) * n) if x.shape[dim] % n else x


def local_piece(x, axes, dim):
    """This device's piece of `dim`, without a gradient."""
    x = even(x, axes, dim)
    size = x.shape[dim] // lax.axis_size(axes)
    there = jax.typeof(x).manual_axis_type.varying
    missing = tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if a not in there)
    return lax.dynamic_slice_in_dim(
        lax.pcast(x, missing, to="varying") if missing else x,
        lax.axis_index(axes) * size,
        size,
        dim,
    )


def pad_to(x, dim, size):
    """x with `dim` padded by zeros at its end, up to `size`."""
    return jnp.pad(x, [(0, size - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)])


def real_part(x, dim, start, size):
    """x with padding (global index >= size along `dim`) set to zero, so that sums over `dim` are
    exact."""
    index = start + jnp.arange(x.shape[dim])
    return jnp.where((index < size).reshape((-1,) + (1,) * (x.ndim - dim - 1)), x, 0)


def zeros_like_piece(x, axes, dim):
    """Zeros of the shape and mesh type that x has once it is scattered over the axes along `dim`:
    the start of a sum of such gradients."""
    piece = local_piece(x, axes, dim) if axes else x
    varying = tuple(sorted(jax.typeof(piece).manual_axis_type.varying))
    return (
        lax.pcast(jnp.zeros(piece.shape, piece.dtype), varying, to="varying")
        if varying
        else jnp.zeros(piece.shape, piece.dtype)
    )


def spread(x, *beside):
    """x with the mesh type of a result made of all of them."""
    return vary(x, varied_over(beside))


def alike(values):
    """The values, all varying over every mesh axis that any of them varies over."""
    axes = varied_over(values)
    return jax.tree.map(lambda v: vary(v, axes), values)


def varied_over(values):
    """The mesh axes that any of the values varies over."""
    types = (jax.typeof(v).manual_axis_type for v in jax.tree.leaves(values))
    return frozenset().union(*(each.varying for each in types))


def vary(v, axes):
    """A value as one that varies over the axes."""
    missing = tuple(sorted(axes - jax.typeof(v).manual_axis_type.varying))
    return lax.pcast(v, missing, to="varying") if missing else v


def pass_on(values, axes, step=1):
    """What the device `step` places before this one on the ring of the axes holds: its own goes on
    to the one `step` after it."""
    n = lax.axis_size(axes)
    return jax.tree.map(
        lambda x: lax.ppermute(x, axes, [(j, (j + step) % n) for j in range(n)]), values
    )
