"""Lookups in tables, as emitted programs have them: values, and gradients of tables of few rows."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from planner.emit.runtime.kernels.kernels import FEW_ROWS, OFTEN, take  # noqa: E402

CASES = [
    (0, (8, 5), (40, 20)),
    (1, (3, 4, 5), (300,)),
    (0, (2, 6), (7, 33)),
    (2, (3, 2, 4), (16, 17)),
    (0, (FEW_ROWS, 2), (OFTEN * FEW_ROWS,)),
    (0, (FEW_ROWS + 1, 2), (OFTEN * FEW_ROWS + OFTEN,)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("axis", "shape", "many"), CASES)
def test_lookups_and_their_gradients_are_numpys(
    axis: int, shape: tuple[int, ...], many: tuple[int, ...]
) -> None:
    """Negative indices count from the end, those beyond it are the last row."""
    rng, size = np.random.default_rng(0), shape[axis]
    table = rng.standard_normal(shape).astype(np.float32)
    at = rng.integers(-size, size + 2, many)
    rows = np.minimum(np.where(at < 0, at + size, at), size - 1)
    found, back = jax.vjp(lambda t: take(t, jnp.asarray(at), axis), table)
    assert np.array_equal(found, np.take(table, rows, axis))
    gradient = rng.standard_normal(found.shape).astype(np.float32)
    expected = np.zeros(shape)
    np.add.at(np.moveaxis(expected, axis, 0), rows.ravel(), _rows(gradient, axis, len(many)))
    assert np.allclose(back(gradient)[0], expected, rtol=1e-5, atol=1e-4)


def _rows(gradient: np.ndarray, axis: int, dims: int) -> np.ndarray:
    """What each index adds to its row, in the order of the indices."""
    moved = np.moveaxis(gradient, range(axis, axis + dims), range(dims))
    return moved.reshape(-1, *moved.shape[dims:])


def test_many_gradients_of_one_row_are_added_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    table, at = jnp.ones((2, 1), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
    found, back = jax.vjp(lambda t: take(t, at, 0), table)
    assert back(jnp.ones_like(found))[0][:, 0].tolist() == [4096.0, 0.0]


def test_gradients_of_few_rows_are_not_scattered() -> None:
    """They wait for one another there (benchmarks/RESULTS.md, On one H100)."""

    def text(rows: int) -> str:
        table, at = jnp.ones((rows, 4)), jnp.zeros((64, 64), jnp.int32)
        step = jax.grad(lambda t: take(t, at, 0).sum())
        return str(jax.jit(step).lower(table).as_text())

    assert "scatter" not in text(32)
    assert "scatter" in text(1000)
