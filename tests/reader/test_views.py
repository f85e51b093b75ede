"""Chains of views against numpy, and constants lengthened for another batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.reader.draft.views import Step, shortest
from planner.reader.draft.weight_transforms import lengthen


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    """A shape and one to five views of it that numpy accepts."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    steps: list[Step] = []
    at = shape
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            perm = tuple(draw(st.permutations(range(len(at)))))
            steps.append(("transpose", perm))
            at = tuple(at[k] for k in perm)
        else:
            at = draw(st.sampled_from(regroupings(math.prod(at))))
            steps.append(("reshape", at))
    return shape, steps


def regroupings(n: int, most: int = 4) -> list[tuple[int, ...]]:
    """Every shape of n elements with up to `most` dims (and a few ones)."""
    found: list[tuple[int, ...]] = [(n,), (1, n), (n, 1)]
    for a in range(2, n):
        if n % a == 0:
            found += [(a, *rest) for rest in regroupings(n // a, most - 1)] if most > 1 else []
    return sorted(set(found))


def applied(array: np.ndarray, steps: list[Step]) -> np.ndarray:
    for kind, arg in steps:
        array = array.transpose(arg) if kind == "transpose" else array.reshape(arg)
    return array


@pytest.mark.parametrize("examples", [120, pytest.param(400, marks=pytest.mark.slow)])
def test_shortest_form_moves_the_same_elements(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(chains())(same_elements))()


def same_elements(case: tuple[tuple[int, ...], list[Step]]) -> None:
    shape, steps = case
    best = shortest(shape, steps)
    if best is None:  # dims that do not align, such as [6, 4] -> [8, 3] after a transpose
        return
    array = np.arange(math.prod(shape)).reshape(shape)
    expected = applied(array, steps)
    found = applied(array, best)
    assert found.shape == expected.shape and np.array_equal(found, expected)
    assert len(best) <= 3


@pytest.mark.parametrize(
    ("shape", "steps", "best"),
    [
        (
            (8, 32, 64, 16),
            [("reshape", (256, 64, 16)), ("transpose", (0, 2, 1)), ("reshape", (8, 32, 16, 64))],
            [("transpose", (0, 1, 3, 2))],
        ),
        ((2, 3), [("transpose", (1, 0)), ("transpose", (1, 0))], []),
        ((2, 6), [("reshape", (12,)), ("reshape", (3, 4))], [("reshape", (3, 4))]),
        (
            (2, 4, 6),
            [("transpose", (1, 0, 2)), ("reshape", (4, 2, 1, 6))],
            [("reshape", (2, 4, 1, 6)), ("transpose", (1, 0, 2, 3))],
        ),
    ],
)
def test_known_chains(shape: tuple[int, ...], steps: list[Step], best: list[Step]) -> None:
    found = shortest(shape, steps)
    assert found is not None and len(found) <= len(best)
    array = np.arange(math.prod(shape)).reshape(shape)
    assert np.array_equal(applied(array, found), applied(array, steps))


# lengthening: (axis, major, old, minor, new)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))
def test_repeating_values_repeat(old: int, new: int, major: int, minor: int) -> None:
    base = np.random.default_rng(0).standard_normal((2, major, 1, minor, 3)).astype(np.float32)
    array = np.broadcast_to(base, (2, major, old, minor, 3)).reshape(2, -1, 3)
    found = lengthen(array, (1, major, old, minor, new), "c")
    assert (
        np.array_equal(found, np.broadcast_to(base, (2, major, new, minor, 3)).reshape(2, -1, 3))
        and found.dtype == np.float32
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 6), st.integers(1, 9), st.integers(-3, 3), st.integers(-5, 5))
def test_index_tables_go_on_counting(old: int, new: int, step: int, start: int) -> None:
    table = (start + step * np.arange(old))[:, None] + np.arange(4)
    expected = (start + step * np.arange(new))[:, None] + np.arange(4)
    assert np.array_equal(lengthen(table, (0, 1, old, 1, new), "c"), expected)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0, 2.0, 3.0]),
        np.array([0, 1, 5]),
        np.array([True, False, True]),
        np.array([[0, 1], [1, 3], [2, 6]]),
    ],
)
def test_other_constants_are_an_error_that_names_them(array: np.ndarray) -> None:
    with pytest.raises(PlanError, match=r"(?s)'table'.*neither repeat nor count") as caught:
        lengthen(array, (0, 1, 3, 1, 6), "table")
    assert caught.value.code == "P146"


def test_two_samples_count_only_by_one() -> None:
    assert lengthen(np.array([0, 1]), (0, 1, 2, 1, 4), "c").tolist() == [0, 1, 2, 3]
    assert lengthen(np.array([[0, 5], [1, 5]]), (0, 1, 2, 1, 3), "c").tolist() == [
        [0, 5],
        [1, 5],
        [2, 5],
    ]
    with pytest.raises(PlanError):
        lengthen(np.array([0, 7]), (0, 1, 2, 1, 4), "c")
