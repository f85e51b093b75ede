"""Gradients of weights apart from the backward pass (schedule zb-h1): programs beside those of
1F1B, their price, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.commands.common import priced
from planner.emit.from_strategy import program
from planner.emit.runtime.pipeline.backward_parts import backward_parts
from planner.errors import PlanError
from planner.report.html.derive import work_out
from planner.verify.numerics import load_program

GPT, DEEP, LLAMA = "zoo:gpt-tiny,layers=4", "zoo:gpt-tiny,layers=5", "zoo:llama-tiny,layers=4"
EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")


def plan(source: str, pins: str, **options: Any) -> planner.Strategy:
    usual = {"devices": 8, "batch": 16, "precision": "fp32", "hardware": EAGER}
    return planner.plan(source, pins=pins, baselines=False, **usual | options)


def as_1f1b(strategy: planner.Strategy) -> planner.Strategy:
    """The same splits under 1F1B."""
    return replace(strategy, techniques={**strategy.techniques, "schedule": "1f1b"})


@pytest.mark.parametrize(
    ("source", "pins"),
    [
        pytest.param(GPT, "pp=2,tp=2,dp=2,micro=4,zero=1", marks=pytest.mark.slow),
        pytest.param(
            DEEP, "pp=4,dp=2,micro=8,zero=0,recompute=block", marks=pytest.mark.slow
        ),  # stages of uneven length
        pytest.param(LLAMA, "pp=4,tp=2,micro=4,zero=0", marks=pytest.mark.slow),
        ("zoo:mlp-tiny,layers=10", "pp=4,dp=2,micro=2,zero=1"),  # fewer microbatches than stages
        pytest.param(LLAMA, "pp=4,dp=2,micro=2,zero=1", marks=pytest.mark.slow),
    ],
)
def test_three_steps_equal_those_of_1f1b(
    source: str, pins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights after three steps of plain descent, to a millionth of the largest of each."""
    from safetensors.numpy import load_file

    strategy = plan(source, f"{pins},schedule=zb-h1", optimizer="sgd")
    assert strategy.techniques["schedule"] == "zb-h1"
    moved = []
    for name, one in (("apart", strategy), ("together", as_1f1b(strategy))):
        module = load_program(program(one, source))
        assert ("WEIGHTS_APART" in vars(module)) == (name == "apart")
        monkeypatch.setitem(vars(module), "__file__", str(tmp_path / f"{name}.py"))
        out = str(tmp_path / f"{name}.safetensors")
        monkeypatch.setattr(sys, "argv", ["m.py", "--steps", "3", "--lr", "0.1", "--export", out])
        module.main()
        moved.append(load_file(out))
    apart, together = moved
    assert apart.keys() == together.keys()
    for key, value in together.items():
        assert np.abs(apart[key] - value).max() <= 1e-6 * max(1e-3, np.abs(value).max()), key


def test_the_second_part_has_the_products_of_weights_alone() -> None:
    """Of a loop over layers, one of them computed again: the first part has a product for each
    input and those that are made again, the second one for each weight."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    stacks, x = rng.normal(size=(3, 8, 8)).astype(np.float32), np.float32(rng.normal(size=(4, 8)))

    def layers(stacks, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacks)[0]

    y, pull = jax.vjp(layers, jnp.asarray(stacks), jnp.asarray(x))
    leaves, tree = jax.tree.flatten(pull)
    now, later = backward_parts(
        lambda saved, g: [*jax.tree.unflatten(tree, saved)(g)], [True, False], leaves, y
    )
    (gradient,), handed = now(leaves, y)
    for found, wanted in zip((*later(leaves, handed), gradient), pull(y), strict=True):
        assert np.array_equal(found, wanted)
    products = [
        str(jax.make_jaxpr(f)(leaves, g)).count("dot_general")
        for f, g in ((now, y), (later, handed))
    ]
    assert products == [2, 1]


@pytest.mark.parametrize(
    "pins", ["pp=4,tp=2,micro=8,zero=0", "pp=2,dp=4,micro=4,zero=1,recompute=block"]
)
def test_what_is_put_off_is_in_the_price(pins: str) -> None:
    """Beside 1F1B of the same splits: no gradient of a weight is made in a bubble, and what waits
    takes memory."""
    strategy = plan(GPT, f"{pins},schedule=zb-h1")
    found, usual = (priced(s, GPT) for s in (strategy, as_1f1b(strategy)))
    rows, micro = work_out(found).rows, strategy.techniques["microbatches"]
    stages = dict(strategy.mesh_shape)["stage"]
    apart_s = sum(row.weights_s for row in rows) / micro
    assert apart_s > 0
    assert found.cost.compute_time_s == pytest.approx(usual.cost.compute_time_s)
    assert usual.cost.bubble_time_s - found.cost.bubble_time_s == pytest.approx(
        (stages - 1) * apart_s, rel=1e-6
    )
    assert found.cost.memory.activations > usual.cost.memory.activations


@pytest.mark.parametrize(
    ("source", "pins", "options", "why", "instead"),
    [
        (GPT, "pp=2,dp=4,micro=4,zero=2", {}, "at most 1", "zero=1"),
        ("zoo:resnet50", "pp=2,dp=4,micro=4", {}, "stages of equal blocks", "schedule=1f1b"),
        (GPT, "pp=3,widths=2+1,micro=4", {}, "widths = 2+1", "leave widths out"),
        (GPT, "pp=2,micro=4,virtual=2", {}, "virtual = 2", "remove one"),
        (GPT, "pp=2,dp=4,micro=4", {"runtime": "megatron"}, "priced as that", "schedule=1f1b"),
    ],
)
def test_what_it_does_not_go_with(
    source: str, pins: str, options: dict[str, Any], why: str, instead: str
) -> None:
    with pytest.raises(PlanError) as e:
        plan(source, f"{pins},schedule=zb-h1", **options)
    assert why in str(e.value) and instead in str(e.value)
