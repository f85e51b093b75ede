"""What a trained weight takes of a device, counted element by element on a small mesh."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels.liveness import gradient_takes_its_weights_place
from costmodels.precision import load_recipe
from costmodels.trained_weight import TrainedWeight

DEVICES, ROWS, COLUMNS = 4, 10, 3


def owners(zero_stage: int, cut_from: int) -> np.ndarray:
    """How many elements of a weight device 0 has of something that is cut from a ZeRO stage on: all
    before, then its rows, padded so that all devices have as many."""
    if zero_stage < cut_from:
        return np.ones((ROWS, COLUMNS), bool)
    rows = np.arange(-(-ROWS // DEVICES) * DEVICES).reshape(DEVICES, -1)[0]
    return np.isin(np.arange(ROWS), rows)[:, None] & np.ones(COLUMNS, bool)


@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp32"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bytes_of_a_weight_are_those_of_the_elements_that_a_device_has(
    zero_stage: int, recipe: str
) -> None:
    """ZeRO cuts the optimizer's state from stage 1 on, gradients' sums from 2, parameters from 3."""
    r = load_recipe(recipe)
    piece = int(owners(1, 1).sum())
    whole = TrainedWeight(float(ROWS * COLUMNS), float(piece if zero_stage else 30), zero_stage)
    assert whole.optimizer_bytes(r) == owners(zero_stage, 1).sum() * r.state_bytes
    assert whole.summed == owners(zero_stage, 2).sum()
    assert whole.stored == owners(zero_stage, 3).sum()
    assert whole.gradient_bytes(r, looped=True) == owners(zero_stage, 3).sum() * r.gradient_bytes
    assert whole.gradient_bytes(r, looped=False) == 0
    # Under stage 3 what a loop over blocks leaves of gradients is scattered already: it is the sum.
    sums = 0 if zero_stage == 3 else owners(zero_stage, 2).sum()
    assert whole.accumulator_bytes(r, looped=True) == sums * r.gradient_bytes
    assert whole.accumulator_bytes(r, looped=False) == (
        owners(zero_stage, 2).sum() * r.gradient_bytes
    )
    left = (0.0, r.parameter_bytes, r.parameter_bytes, r.gradient_bytes)[zero_stage]
    assert whole.remaining_bytes(r) == piece * left


def test_many_weights_are_priced_as_each_alone() -> None:
    recipe, rng = load_recipe("bf16-mixed"), np.random.default_rng(0)
    whole, piece = rng.integers(1, 10**6, (2, 50)).astype(float)
    for zero_stage in range(4):
        rows = TrainedWeight(whole, piece, zero_stage)
        each = [TrainedWeight(w, p, zero_stage) for w, p in zip(whole, piece, strict=True)]
        for name in ("optimizer_bytes", "remaining_bytes"):
            assert getattr(rows, name)(recipe).tolist() == [getattr(w, name)(recipe) for w in each]
        for looped in (True, False):
            for name in ("gradient_bytes", "accumulator_bytes"):
                assert getattr(rows, name)(recipe, looped=looped).tolist() == [
                    getattr(w, name)(recipe, looped=looped) for w in each
                ]


def test_gradients_lie_where_weights_lay_that_are_written_anew() -> None:
    """Not where sums or a stage's pieces outlive a microbatch, where weights are what is updated,
    or where a step that overflows leaves them as they were."""
    mixed, pure, scaled = (load_recipe(name) for name in ("bf16-mixed", "bf16-pure", "fp16"))
    assert all(gradient_takes_its_weights_place(mixed, zero, 1) for zero in (0, 1, 2))
    assert not gradient_takes_its_weights_place(mixed, 3, 1)
    assert not gradient_takes_its_weights_place(mixed, 0, 2)
    assert not any(gradient_takes_its_weights_place(r, 0, 1) for r in (pure, scaled))
