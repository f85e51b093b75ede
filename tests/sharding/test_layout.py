"""Reshards between layouts: values and gradients on a 2x4 mesh, payloads, and the trees that
serve several consumers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.emit.body import Body
from planner.emit.source import helper_sources
from planner.emit.text import spec_text
from planner.sharding.layout import (
    Layout,
    ReshardStep,
    local_shape,
    padded,
    reshard_steps,
    reshard_tree,
)

MESH = (("data", 2), ("model", 4))
SHAPE = (8, 24)
UNEVEN = (7, 11)


def layouts() -> list[Layout]:
    """Every layout of a matrix over the mesh: each axis on a dim (both orders where they share
    one), partial, grad_partial or nowhere."""
    found = []
    for states in itertools.product((0, 1, "partial", "grad_partial", None), repeat=2):
        axes = dict(zip(("data", "model"), states, strict=True))
        dims = [[a for a, s in axes.items() if s == d] for d in (0, 1)]
        orders = [list(itertools.permutations(d)) for d in dims]
        for choice in itertools.product(*orders):
            found.append(
                Layout(
                    tuple(choice),
                    tuple(a for a, s in axes.items() if s == "partial"),
                    tuple(a for a, s in axes.items() if s == "grad_partial"),
                )
            )
    return found


PAIRS = [
    (a, b)
    for a in layouts()
    for b in layouts()
    if not a.grad_partial and reshard_steps(SHAPE, a, b, MESH) is not None
]


def test_every_layout_without_pending_terms_reaches_every_other() -> None:
    plain = [x for x in layouts() if not x.partial and not x.grad_partial]
    assert all(
        reshard_steps(SHAPE, a, b, MESH) is not None
        for a in plain
        for b in layouts()
        if not b.partial
    )
    assert len(PAIRS) > 150


def test_fans_are_never_left_and_partials_never_made() -> None:
    grad_partial, partial = (
        Layout(((), ()), grad_partial=("data",)),
        Layout(((), ()), partial=("data",)),
    )
    assert reshard_steps(SHAPE, grad_partial, Layout(((), ())), MESH) is None
    assert reshard_steps(SHAPE, Layout(((), ())), partial, MESH) is None


def run_pairs(pairs: list[tuple[Layout, Layout]], shape: tuple[int, int]) -> None:
    """Each pair: make x in the source layout, convert, weigh with fixed terms, and compare the
    sum's value and the gradient of x."""
    import jax
    from jax.sharding import AxisType

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    helpers: set[str] = set()
    text = []
    for k, (source, target) in enumerate(pairs):
        body = Body.__new__(Body)
        body.helpers = helpers
        text.append(f"def local_{k}(x, w):")
        text.append("    def f(x):")
        # partial source: every device holds an equal share of the sum (value / devices along the
        # axes)
        if source.partial:
            n = int(np.prod([dict(MESH)[a] for a in source.partial]))
            text.append(f"        x = lax.pcast(x, {source.partial!r}, to='varying') / {n}")
        text += [
            f"        x = {body.step_text('x', s)}"
            for s in reshard_steps(shape, source, target, MESH) or ()
        ]
        over = tuple(
            a
            for a in ("data", "model")
            if a in target.partial or a in target.grad_partial or any(a in d for d in target.dims)
        )
        text.append("        total = jnp.sum(x * w)")
        # A grad_partial's consumers make per-device terms; here each device contributes its share, so that
        # the sum is the plain one.
        share = int(np.prod([dict(MESH)[a] for a in target.grad_partial], dtype=int))
        text.append(
            f"        return lax.psum(total / {share}, {over!r})"
            if over
            else "        return total"
        )
        text.append("    return jax.value_and_grad(f)(x)")
        x_spec, w_spec = Layout(source.dims), Layout(target.dims)
        text.append(
            f"run_{k} = (local_{k}, ({spec_text(x_spec)}, {spec_text(w_spec)}), (P(),"
            f" {spec_text(x_spec)}), {x_spec.dims!r}, {w_spec.dims!r})"
        )
    head = [
        "import functools",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from jax import lax",
        "from jax.ad_checkpoint import checkpoint_name",
        "from jax.sharding import PartitionSpec as P",
    ]
    space: dict = {}
    exec("\n".join([*head, *helper_sources(helpers), *text]), space)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    jobs, feeds = [], []
    for k in range(len(pairs)):
        local, in_specs, out_specs, x_dims, w_dims = space[f"run_{k}"]
        jobs.append(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        grow = lambda a, dims: np.pad(  # noqa: E731
            a, [(0, padded(n, c, dict(MESH)) - n) for n, c in zip(shape, dims, strict=True)]
        )
        feeds.append((grow(x, x_dims), grow(w, w_dims)))
    results = jax.jit(lambda f: [job(*a) for job, a in zip(jobs, f, strict=True)])(feeds)
    for (source, target), (value, gradient) in zip(pairs, results, strict=True):
        assert np.isclose(value, (x * w).sum(), rtol=1e-4, atol=1e-4), (source, target)
        assert np.allclose(np.asarray(gradient)[: shape[0], : shape[1]], w, atol=1e-5), (
            source,
            target,
        )


def test_a_sample_of_conversions_is_exact_in_value_and_gradient() -> None:
    run_pairs(random.Random(5).sample(PAIRS, 40), SHAPE)


@pytest.mark.slow
def test_padded_conversions_are_exact_too() -> None:
    pairs = [p for p in PAIRS if not p[0].partial]
    run_pairs(random.Random(6).sample(pairs, 30), UNEVEN)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPE, UNEVEN])
def test_every_conversion_is_exact(shape: tuple[int, int]) -> None:
    for k in range(0, len(PAIRS), 60):
        run_pairs(PAIRS[k : k + 60], shape)


@given(st.sampled_from(PAIRS))
def test_payloads_are_those_of_the_local_shapes(pair: tuple[Layout, Layout]) -> None:
    """Replaying the steps on local element counts gives the target's local shape, and every payload
    is what the step touches."""
    source, target = pair
    elements = int(np.prod(local_shape(SHAPE, source, dict(MESH))))
    sizes = dict(MESH)
    for s in reshard_steps(SHAPE, source, target, MESH) or ():
        n = int(np.prod([sizes[a] for a in s.axes], dtype=int))
        before = elements
        if s.kind in ("reduce-scatter", "slice"):
            elements //= n
        elif s.kind in ("all-gather", "all-gather-invariant"):
            elements *= n
        if s.forward:
            assert s.forward_elements == (elements if s.kind.startswith("all-gather") else before)
        if s.backward:
            assert s.backward_elements == (elements if s.kind == "all-gather" else before)
    assert elements == int(np.prod(local_shape(SHAPE, target, dict(MESH))))


def test_megatron_pair_is_one_all_reduce_each_way() -> None:
    """Row-parallel result to a replicated residual, and its use by column-parallel products: g and
    f of Megatron."""
    rest = (("data",), ())
    g = reshard_steps(SHAPE, Layout(rest, partial=("model",)), Layout(rest), MESH)
    f = reshard_steps(SHAPE, Layout(rest), Layout(rest, grad_partial=("model",)), MESH)
    assert g is not None and [(s.forward, s.backward) for s in g] == [("all-reduce", "")]
    assert f is not None and [(s.forward, s.backward) for s in f] == [("", "all-reduce")]


def test_sequence_parallel_pair_is_scatter_and_gather() -> None:
    g = reshard_steps(
        SHAPE, Layout((("data",), ()), partial=("model",)), Layout((("data",), ("model",))), MESH
    )
    f = reshard_steps(
        SHAPE,
        Layout((("data",), ("model",))),
        Layout((("data",), ()), grad_partial=("model",)),
        MESH,
    )
    assert g is not None and [(s.forward, s.backward) for s in g] == [
        ("reduce-scatter", "all-gather")
    ]
    assert f is not None and [(s.forward, s.backward) for s in f] == [
        ("all-gather", "reduce-scatter")
    ]


def test_several_consumers_share_one_conversion() -> None:
    """q, k and v want the same grad_partial: one pcast, one all-reduce backward; a residual beside them
    costs nothing more."""
    rest = (("data",), ())
    source, plain, grad_partial = (
        Layout(rest, partial=("model",)),
        Layout(rest),
        Layout(rest, grad_partial=("model",)),
    )
    tree = reshard_tree(
        SHAPE, source, (grad_partial, grad_partial, grad_partial, plain), MESH, True
    )
    assert tree is not None
    kinds = [k for s in tree.steps() for k in (s.forward, s.backward) if k]
    assert kinds == ["all-reduce", "all-reduce"]


def test_a_step_names_its_collectives() -> None:
    step = ReshardStep("all-to-all", ("model",), 0, 1)
    assert (step.forward, step.backward) == ("all-to-all", "all-to-all")
