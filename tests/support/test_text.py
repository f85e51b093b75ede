"""Counts in words."""

import pytest

from planner.support.text import count


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (1124, "1,124"),
        (999_700, "999,700"),
        (4_200_000, "4.2 M"),
        (999_885_952, "1 B"),
        (999_400_000, "999 M"),
        (8.03e9, "8.03 B"),
        (999.9e9, "1 T"),
    ],
)
def test_counts_have_three_digits_and_no_exponent(n: float, text: str) -> None:
    assert count(n) == text
