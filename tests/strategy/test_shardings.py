"""strategy.shardings with the libraries it is for: device_put, jit, optax's states, Orbax's
checkpoints. The step computes what one device computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.errors import PlanError

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
PINS = "dp=4,tp=2,zero={zero},recompute=none,micro=1,tensor=megatron"


def planned(zero: int = 1) -> planner.Strategy:
    return planner.plan(
        "zoo:mlp-tiny", devices=8, batch=16, pins=PINS.format(zero=zero), baselines=False
    )


def parameters(s: planner.Strategy) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        r["label"]: rng.standard_normal(r["shape"]).astype(np.float32) * 0.1
        for r in s.tensors.values()
        if r.get("label")
    }


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": x} as {"a": {"b": x}}."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        at = out
        for word in path:
            at = at.setdefault(word, {})
        at[last] = value
    return out


def loss(tree: dict[str, Any], x: Any) -> Any:
    """Any differentiable function of every parameter will do here."""
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.tanh(leaf * x.mean())) for leaf in leaves)


def test_device_put_and_jit_take_a_nested_tree() -> None:
    s = planned()
    params = nested(parameters(s))
    where = s.shardings({"params": params})["params"]
    placed = jax.device_put(params, where)
    cut = [
        leaf
        for leaf in jax.tree.leaves(placed)
        if leaf.addressable_shards[0].data.shape != leaf.shape
    ]
    assert cut, "tensor parallelism cuts some weight"
    step = jax.jit(jax.grad(loss), in_shardings=(where, None), out_shardings=where)
    x = np.ones((4, 4), np.float32)
    for got, want in zip(
        jax.tree.leaves(step(placed, x)), jax.tree.leaves(jax.grad(loss)(params, x)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_optimizer_levels_cut_what_they_say(zero: int) -> None:
    s = planned(zero)
    flat = parameters(s)
    params, state = s.shardings(flat), s.shardings(flat, optimizer=True)
    over_data = {
        label
        for label, x in params.items()
        if any("data" in (axes if isinstance(axes, tuple) else (axes,)) for axes in x.spec)
    }
    state_over_data = {
        label
        for label, x in state.items()
        if any("data" in (axes if isinstance(axes, tuple) else (axes,)) for axes in x.spec)
    }
    assert bool(over_data) == (zero == 3) and bool(state_over_data) == (zero >= 1)


def test_optax_state_follows_its_parameters_and_a_step_is_that_of_one_device() -> None:
    optax = pytest.importorskip("optax")
    s = planned()
    params = nested(parameters(s))
    where = s.shardings(params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    shapes = jax.eval_shape(optimizer.init, params)
    state_where = s.shardings(shapes, optimizer=True)
    x = np.ones((4, 4), np.float32)

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    placed = jax.device_put(params, where)
    state = jax.jit(optimizer.init, out_shardings=state_where)(placed)
    assert any("data" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state)), (
        "level 1 cuts moments over data"
    )
    sharded, one = (
        jax.jit(step, in_shardings=(where, state_where, None), out_shardings=(where, state_where)),
        jax.jit(step),
    )
    plain, plain_state = params, optimizer.init(params)
    for _ in range(3):
        placed, state = sharded(placed, state, x)
        plain, plain_state = one(plain, plain_state, x)
    for got, want in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)


def test_orbax_restores_into_another_plan(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    before, after = planned(0), planned(3)
    params = nested(parameters(before))
    placed = jax.device_put(params, before.shardings(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", placed)
        checkpointer.wait_until_finished()
        where = after.shardings(params)
        target = jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), params, where
        )
        restored = checkpointer.restore(tmp_path / "step", target)
    for got, want, to in zip(
        jax.tree.leaves(restored), jax.tree.leaves(params), jax.tree.leaves(where), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), want)
        assert got.sharding.is_equivalent_to(to, got.ndim)


def test_names_and_shapes_that_do_not_fit_are_errors() -> None:
    s = planned()
    label = next(iter(parameters(s)))
    with pytest.raises(PlanError, match="has shape"):
        s.shardings({label: np.zeros((3, 3), np.float32)})
    with pytest.raises(PlanError, match="no parameter named"):
        s.shardings({"count": np.zeros((), np.int32)})
    assert s.shardings({"count": np.zeros((), np.int32)}, optimizer=True)[
        "count"
    ].is_fully_replicated


def test_a_plan_for_more_devices_than_there_are() -> None:
    s = planner.plan("zoo:mlp-tiny", devices=64, batch=64, baselines=False)
    with pytest.raises(PlanError, match="the plan is for 64 devices"):
        s.shardings({})


def test_a_notebook_shows_the_summary() -> None:
    s = planned()
    assert (
        s._repr_html_().startswith("<pre>mlp-tiny (zoo)")
        and "<script" not in s._repr_html_()
        and "memory" in s._repr_html_()
    )
