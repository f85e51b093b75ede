"""Optimizers of emitted programs: Lion's and Muon's steps are optax's on the program's own
gradients, under every ZeRO stage, with pipeline stages and in the partitioner's programs; what each
keeps is what is predicted, to the byte, and Muon's products and exchanges are too."""

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


def planned(pins: str, optimizer: str, source: str = MLP, **options: Any) -> planner.Strategy:
    usual = {"devices": 8, "batch": 16, "precision": "fp32", "lr": RATE, "baselines": False}
    return planner.plan(source, **(usual | options), pins=pins, optimizer=optimizer)


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


def optax_of_muon(m: Any, wanted: dict[str, np.ndarray]) -> Any:
    """optax.contrib.muon of the matrices, optax.adamw of all else: that of the former is Adam with
    Nesterov's momentum."""
    import optax
    from optax.contrib import MuonDimensionNumbers, muon

    mask = {key: key not in m.NO_DECAY for key in wanted}
    matrices = {key: mask[key] for key in m.ORTHOGONALISED}
    others = {key: mask[key] for key in wanted if key not in m.ORTHOGONALISED}
    return optax.partition(
        {
            "matrices": muon(
                RATE,
                beta=m.MOMENTUM,
                weight_decay=m.WEIGHT_DECAY,
                weight_decay_mask=lambda tree: {k: matrices.get(k, False) for k in tree},
                consistent_rms=m.STEP_RMS,
                muon_weight_dimension_numbers=lambda tree: {
                    k: MuonDimensionNumbers(-2, -1) for k in tree
                },
            ),
            "others": optax.adamw(
                RATE,
                b1=m.BETA1,
                b2=m.BETA2,
                eps=m.EPSILON,
                weight_decay=m.WEIGHT_DECAY,
                mask=lambda tree: {k: others.get(k, False) for k in tree},
            ),
        },
        {key: "matrices" if key in m.ORTHOGONALISED else "others" for key in wanted},
    )


@pytest.mark.parametrize(
    ("source", "backend", "pins"),
    [
        pytest.param(
            "zoo:gpt-tiny", "shard_map", "dp=8,zero=0,micro=2,blocks=looped", marks=pytest.mark.slow
        ),
        ("zoo:gpt-tiny", "shard_map", "dp=4,tp=2,zero=1,micro=1,blocks=looped"),
        pytest.param(
            "zoo:gpt-tiny", "shard_map", "dp=2,tp=4,zero=2,blocks=looped", marks=pytest.mark.slow
        ),
        pytest.param("zoo:gpt-tiny", "shard_map", "dp=8,zero=3,micro=1", marks=pytest.mark.slow),
        pytest.param(
            "zoo:gpt-tiny,layers=4", "shard_map", "pp=2,dp=2,tp=2,zero=1", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=4",
            "shard_map",
            "pp=2,dp=4,zero=1,schedule=interleaved,virtual=2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zoo:mixtral-tiny",
            "shard_map",
            "ep=4,dp=2,zero=1,micro=1,blocks=looped",
            marks=pytest.mark.slow,
        ),
        pytest.param("zoo:mixtral-tiny", "shard_map", "tp=4,dp=2,zero=3", marks=pytest.mark.slow),
        ("zoo:mlp-tiny,layers=10", "jit", "dp=4,tp=2,zero=1,micro=1,blocks=looped"),
        pytest.param(
            "zoo:gpt-tiny,layers=3",
            "shard_map",
            "dp=4,tp=2,zero=1,blocks=written-out",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zoo:gpt-tiny", "jit", "dp=4,tp=2,zero=1,blocks=written-out", marks=pytest.mark.slow
        ),
        pytest.param("zoo:gpt-tiny", "jit", "dp=2,tp=4,zero=3,micro=1", marks=pytest.mark.slow),
        pytest.param("zoo:mixtral-tiny", "jit", "dp=8,zero=1,micro=1", marks=pytest.mark.slow),
    ],
)
def test_steps_of_muon_are_those_of_optax(source: str, backend: Any, pins: str) -> None:
    """In float32; a step's elements are of a fifth of the learning rate, and it is followed to a
    hundredth of that rate."""
    optax = pytest.importorskip("optax")
    import jax.numpy as jnp

    m = load_program(program(planned(pins, "muon", source), source, backend=backend))
    assert m.ORTHOGONALISED
    mesh = m.make_mesh()
    _, params, state = m.begin(types.SimpleNamespace(seed=1), {}, mesh)
    step, gradients, specs = m.make_step(mesh), m.make_gradients(mesh), m.specs_of(m.PARAMS)
    first = wanted = whole(params)
    muon = optax_of_muon(m, wanted)
    kept, sure = muon.init(wanted), {key: np.ones(p.shape, bool) for key, p in wanted.items()}
    for k in range(STEPS):
        batch = m.next_batch(None, k, 1, mesh)
        frozen = m.place(m.initial_values(m.FROZEN, 1, {}), m.specs_of(m.FROZEN), mesh)
        _, grads = gradients(m.place(wanted, specs, mesh), frozen, batch)
        grads = {
            key: g[tuple(map(slice, wanted[key].shape))] for key, g in whole(grads).items()
        }  # without the padding of what is cut
        # The size of what is nothing but rounding, as of a key's bias, is chance to AdamW.
        least = 1e-5 * max(np.abs(g).max() for g in grads.values())
        for key, g in grads.items():
            sure[key] &= (np.abs(g) > least) | (g == 0) | (key in m.ORTHOGONALISED)
        updates, kept = muon.update(grads, kept, wanted)
        wanted = whole(optax.apply_updates(wanted, updates))
        params, state, _ = step(params, state, frozen, batch, jnp.float32(k + 1))
    for key, p in whole(params).items():
        assert not sure[key].any() or np.abs(p - first[key]).max() > 0.3 * RATE, key
        assert np.abs(p - wanted[key])[sure[key]].max(initial=0.0) < 0.01 * RATE, key


@pytest.mark.parametrize(
    ("source", "pins"),
    [
        ("zoo:gpt-tiny", "dp=4,tp=2,zero=1,micro=1,blocks=looped"),
        pytest.param("zoo:gpt-tiny", "dp=8,zero=0,micro=2,blocks=looped", marks=pytest.mark.slow),
        pytest.param("zoo:gpt-tiny", "dp=2,tp=4,zero=3,micro=1", marks=pytest.mark.slow),
        pytest.param(
            "zoo:gpt-tiny,layers=3", "dp=8,zero=2,micro=2,blocks=looped", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=3", "dp=4,tp=2,zero=1,blocks=written-out", marks=pytest.mark.slow
        ),
        pytest.param("zoo:gpt-tiny,layers=4", "pp=2,dp=2,tp=2,zero=1", marks=pytest.mark.slow),
        pytest.param(
            "zoo:mixtral-tiny", "ep=4,dp=2,zero=1,micro=1,blocks=looped", marks=pytest.mark.slow
        ),
        pytest.param("zoo:mixtral-tiny", "tp=4,dp=2,zero=3", marks=pytest.mark.slow),
    ],
)
def test_what_muon_sends_and_multiplies_is_predicted(source: str, pins: str) -> None:
    strategy = planned(pins, "muon", source)
    assert strategy.graph is not None
    found = truth(strategy.graph, strategy.plan, unroll=False, optimizer="muon")
    assert not found.differences()


@pytest.mark.slow
@pytest.mark.parametrize("pins", ["dp=8,zero=0,micro=1,blocks=looped", "dp=8,zero=3,micro=1"])
def test_orthogonalising_is_no_peak(pins: str) -> None:
    """Its temporaries live when the backward pass's are gone: with 32 tokens a device, next to
    nothing saved, and compiled for CPUs the program's are at most a twentieth beyond AdamW's, which
    is why none are counted."""
    compiled = []
    for optimizer in ("adamw", "muon"):
        strategy = planned(pins, optimizer, "zoo:gpt-tiny,hidden=256,layers=4,seq=32", batch=8)
        assert strategy.graph is not None
        found = truth(strategy.graph, strategy.plan, unroll=False, optimizer=optimizer)
        compiled.append(found.temporary_bytes)
    assert compiled[1] <= 1.05 * compiled[0]


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
    # Arrays of all repeats are what Muon takes at a time.
    looped = OPTIMIZERS[optimizer].orthogonalises
    result = truth(strategy.graph, strategy.plan, unroll=not looped, optimizer=optimizer)
    assert not result.differences()
