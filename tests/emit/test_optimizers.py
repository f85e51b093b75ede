"""Optimizers of emitted programs: Lion's steps are optax's on the program's own gradients, under
every ZeRO stage, with pipeline stages and in the partitioner's programs; what each keeps is what is
predicted, to the byte."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import planner
from benchmarks.compiled_truth import truth
from costmodels.optimizers import OPTIMIZERS
from planner.emit.from_strategy import program
from planner.verify.numerics import load_program

MLP = "zoo:mlp-tiny,layers=10"
STEPS = 3
RATE = 1e-3


def planned(pins: str, optimizer: str, **options: Any) -> planner.Strategy:
    usual = {"devices": 8, "batch": 16, "precision": "fp32", "lr": RATE, "baselines": False}
    return planner.plan(MLP, **(usual | options), pins=pins, optimizer=optimizer)


def whole(arrays: Any) -> dict[str, np.ndarray]:
    return {key: np.asarray(a) for key, a in arrays.items()}


@pytest.mark.parametrize(
    ("backend", "pins"),
    [
        pytest.param("shard_map", "dp=8,zero=0,micro=2", marks=pytest.mark.slow),
        pytest.param("shard_map", "dp=8,zero=1,micro=1", marks=pytest.mark.slow),
        pytest.param("shard_map", "dp=4,tp=2,zero=2,micro=2", marks=pytest.mark.slow),
        ("shard_map", "dp=8,zero=3,micro=1"),
        pytest.param("shard_map", "pp=2,dp=4,zero=1,micro=4", marks=pytest.mark.slow),
        pytest.param("jit", "dp=4,tp=2,zero=1,micro=1", marks=pytest.mark.slow),
    ],
)
def test_steps_of_lion_are_those_of_optax(backend: Any, pins: str) -> None:
    optax = pytest.importorskip("optax")
    import jax.numpy as jnp

    m = load_program(program(planned(pins, "lion"), MLP, backend=backend))
    mesh = m.make_mesh()
    _, params, state = m.begin(types.SimpleNamespace(seed=1), {}, mesh)
    step, gradients, specs = m.make_step(mesh), m.make_gradients(mesh), m.specs_of(m.PARAMS)
    first = wanted = whole(params)
    mask = {key: key not in m.NO_DECAY for key in m.PARAMS}
    lion = optax.lion(RATE, b1=m.BETA1, b2=m.BETA2, weight_decay=m.WEIGHT_DECAY, mask=mask)
    kept = lion.init(wanted)
    sure = {key: np.ones(p.shape, bool) for key, p in wanted.items()}
    for k in range(STEPS):
        batch = m.next_batch(None, k, 1, mesh)
        frozen = m.place(m.initial_values(m.FROZEN, 1, {}), m.specs_of(m.FROZEN), mesh)
        _, grads = gradients(m.place(wanted, specs, mesh), frozen, batch)
        grads = whole(grads)
        mean = {
            key: np.abs(m.BETA1 * np.asarray(kept[0].mu[key]) + (1 - m.BETA1) * g)
            for key, g in grads.items()
        }
        # The sign of what is nothing but rounding, as of a key's bias, is chance.
        least = 1e-5 * max(each.max() for each in mean.values())
        for key, g in grads.items():
            sure[key] &= (mean[key] > least) | (g == 0)
        updates, kept = lion.update(grads, kept, wanted)
        wanted = whole(optax.apply_updates(wanted, updates))
        params, state, _ = step(params, state, frozen, batch, jnp.float32(k + 1))
    for key, p in whole(params).items():
        assert np.abs(p - first[key]).max() > RATE, key
        assert np.abs(p - wanted[key])[sure[key]].max(initial=0.0) < 0.01 * RATE, key


PINS = ("dp=8,zero=1,micro=2", "dp=8,zero=3,micro=1", "pp=2,dp=4,zero=1,micro=4")


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("optimizer", "pins"),
    [
        pytest.param(
            optimizer,
            pins,
            marks=[pytest.mark.slow]
            * (pins != PINS[1] and (optimizer, pins) != ("adamw", PINS[0])),
        )
        for optimizer in OPTIMIZERS
        for pins in PINS
    ],
)
def test_what_a_step_is_passed_is_predicted_to_the_byte(optimizer: str, pins: str) -> None:
    strategy = planned(pins, optimizer)
    assert strategy.graph is not None
    result = truth(strategy.graph, strategy.plan, optimizer=optimizer)
    assert not result.differences()
