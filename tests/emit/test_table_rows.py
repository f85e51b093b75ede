"""Tables of parameters, folded or not, say the same in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.emit.table_rows import table_rows

PART = st.sampled_from(["layers", "w", "0", "1", "2", "7", "*", "a'b", 'q"\\'])
NAME = st.lists(PART, min_size=1, max_size=4).map(".".join)


@st.composite
def blocks(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Rows of layers that count from somewhere, some of which differ, among others."""
    first, repeats = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    within = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True))
    rows = [(f"layers.{first + r}.{w}", f"({w!r},)") for r in range(repeats) for w in within]
    odd = draw(st.sampled_from([*range(len(rows)), None]))
    if odd is not None:
        rows[odd] = rows[odd][0], "('odd',)"
    names = draw(st.lists(NAME, max_size=3, unique=True))
    around = [(name, "('other',)") for name in names if name not in dict(rows)]
    return [*around[:1], *rows, *around[1:]]


def read(rows: list[tuple[str, str]]) -> object:
    return eval("\n".join(["{", *table_rows(rows), "}"]))


@given(blocks())
def test_a_folded_table_is_the_same(rows: list[tuple[str, str]]) -> None:
    found = read(rows)
    assert isinstance(found, dict)
    assert list(found.items()) == [(name, eval(row)) for name, row in rows]
    assert read([(name, "") for name, _ in rows]) == {name for name, _ in rows}


def test_layers_are_counted_once() -> None:
    rows = [(f"layers.{i}.{w}", "(1,)") for i in range(40) for w in "abc"]
    assert len(table_rows(rows)) < 12
