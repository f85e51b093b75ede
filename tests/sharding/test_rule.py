"""The rule notation and everything read from it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ops.shape import reshape_factors
from planner.sharding.candidates import candidates
from planner.sharding.layout import Layout
from planner.sharding.rule import Limits, Rule, Split, legal, parse

MESH = {"data": 2, "model": 4}
ORDER = ("data", "model")


def matmul():
    return parse("b m k, k n -> b m n", ((8, 16, 32), (32, 64)), ((8, 16, 64),))


def test_layouts_of_a_column_then_row_parallel_product() -> None:
    rule = matmul()
    column = Split.of({"b": ["data"], "n": ["model"]})
    assert rule.operand(0, column, ORDER) == Layout((("data",), (), ()), grad_partial=("model",))
    assert rule.operand(1, column, ORDER) == Layout(((), ("model",)), grad_partial=("data",))
    assert rule.result(0, column, ORDER) == Layout((("data",), (), ("model",)))
    row = Split.of({"b": ["data"], "k": ["model"]})
    assert rule.result(0, row, ORDER) == Layout((("data",), (), ()), partial=("model",))
    assert rule.operand(1, row, ORDER) == Layout((("model",), ()), grad_partial=("data",))


def test_candidates_cover_every_assignment_once() -> None:
    found = candidates(matmul(), MESH)
    assert len(found) == len(set(found)) == 5 * 5  # each axis on b, m, k, n or nothing
    assert found[0] == Split()


RULES = [
    matmul(),
    parse("a b -> a b", ((9, 10),), ((9, 10),), linear=(0,)),
    parse("(h d) k! -> h d k!", ((32, 6),), ((2, 16, 6),), sizes={"h": 2, "d": 16}),
    parse(
        "a h -> a h",
        ((24, 12),),
        ((24, 12),),
        no_pad=frozenset({"a"}),
        most={"h": 2},
        paired={"both": ("a", "h")},
    ),
]


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.2, 0.5]),
)
def test_candidates_are_all_that_is_legal(rule: Rule, sizes: list[int], waste: float) -> None:
    mesh, limits = dict(zip("xyz", sizes, strict=False)), Limits(waste=waste)
    axes = [a for a, n in mesh.items() if n > 1]
    every = [
        Split.of(
            {
                f: [a for a, g in zip(axes, given, strict=True) if g == f]
                for f in (*rule.choices, "+")
            }
        )
        for given in product(("", *rule.choices, "+"), repeat=len(axes))
    ]
    assert set(candidates(rule, mesh, limits)) == {s for s in every if legal(rule, s, mesh, limits)}


def test_whole_factors_are_never_cut() -> None:
    rule = parse("a b! -> a b!", ((8, 8),), ((8, 8),))
    assert all(not s.axes("b") for s in candidates(rule, MESH))


def test_padding_only_within_the_allowed_waste() -> None:
    rule = parse("a -> a", ((9,),), ((9,),))
    assert legal(rule, Split.of({"a": ["data"]}), MESH)  # 9 -> 10
    assert not legal(rule, Split.of({"a": ["model"]}), MESH)  # 9 -> 12 wastes a quarter
    assert legal(parse("a -> a", ((50257,),), ((50257,),)), Split.of({"a": ["model"]}), MESH)


def test_a_minor_factor_is_cut_only_below_a_major_one_cut_to_one() -> None:
    rule = parse("(h d) -> h d", ((32,),), ((2, 16),), sizes={"h": 2, "d": 16})
    assert legal(rule, Split.of({"h": ["data"]}), MESH)
    assert legal(rule, Split.of({"h": ["data"], "d": ["model"]}), MESH)
    assert not legal(rule, Split.of({"d": ["model"]}), MESH)


def test_pending_axes_only_for_linear_operators() -> None:
    assert any(
        s.axes("+") for s in candidates(parse("a -> a", ((8,),), ((8,),), linear=(0,)), MESH)
    )
    assert not any(s.axes("+") for s in candidates(parse("a -> a", ((8,),), ((8,),)), MESH))


@pytest.mark.parametrize("line", ["a b -> a", "a, b -> a", "a a -> b"])
def test_a_line_that_does_not_fit_its_shapes_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="rule"):
        parse(line, ((4, 6),), ((4, 6),))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms())
def test_reshape_factors_multiply_back(source: list[int], random) -> None:
    """Whatever the shapes, factors of each side multiply to its dims; shared factors appear on both
    sides in the same order."""
    flat = [n for d in source for n in ([2, d // 2] if d % 2 == 0 and d > 2 else [d])]
    target, run = [], 1
    for n in flat:
        run *= n
        if random.random() < 0.5:
            target.append(run)
            run = 1
    target.append(run)
    left, right, sizes, whole = reshape_factors(tuple(source), tuple(target))
    for side, shape in ((left, source), (right, target)):
        for dim, extent in zip(side, shape, strict=True):
            product = 1
            for f in dim:
                product *= sizes[f]
            assert product == extent
    shared = [f for d in left for f in d if f not in whole]
    assert shared == [f for d in right for f in d if f not in whole]


def ring():
    return parse(
        "h s d!, h t! d! -> h s d!",
        ((6, 16, 4), (6, 16, 4)),
        ((6, 16, 4),),
        no_pad=frozenset({"s"}),
        paired={"ring": ("s", "t")},
    )


def test_a_pair_cuts_all_its_members_by_the_same_axes() -> None:
    rule, split = ring(), Split.of({"h": ["data"], "ring": ["model"]})
    assert legal(rule, split, MESH)
    assert rule.operand(0, split, ORDER) == Layout((("data",), ("model",), ()))
    assert rule.operand(1, split, ORDER) == Layout((("data",), ("model",), ()))
    assert rule.result(0, split, ORDER) == Layout((("data",), ("model",), ()))
    assert rule.local(split, MESH) == {"h": 3, "s": 4, "t": 4, "d": 4}
    assert rule.work(split, MESH) == {
        "h": 3,
        "s": 4,
        "t": 16,
        "d": 4,
    }  # each piece of queries meets all keys


def test_a_member_cut_alone_and_in_a_pair_has_its_axes_in_mesh_order() -> None:
    rule, split = ring(), Split.of({"s": ["model"], "ring": ["data"]})
    assert legal(rule, split, MESH)
    assert rule.operand(0, split, ORDER) == Layout(((), ("data", "model"), ()))
    assert rule.operand(1, split, ORDER) == Layout(((), ("data",), ()), grad_partial=("model",))
    assert rule.work(split, MESH) == {"h": 6, "s": 2, "t": 16, "d": 4}


def test_candidates_offer_pairs_and_never_a_whole_member_alone() -> None:
    found = candidates(ring(), MESH)
    assert Split.of({"ring": ["data", "model"]}) in found
    assert Split.of({"ring": ["model"], "s": ["data"]}) in found
    assert not any(s.axes("t") for s in found)
    assert (
        len(found) == len(set(found)) == (1 + 3) ** 2 - 4
        # each axis on h, s, ring or nothing; 6 rows of h are not cut into 4 or 8 (padding wastes too
        # much)
    )


def test_a_pair_is_cut_evenly_in_every_member() -> None:
    rule = parse("n d, e d -> n", ((12, 5), (8, 5)), ((12,),), paired={"both": ("n", "e")})
    assert legal(rule, Split.of({"both": ["model"]}), MESH)
    assert legal(rule, Split.of({"both": ["model"], "d": ["data"]}), MESH)
    assert not legal(rule, Split.of({"both": ["data", "model"]}), MESH)  # 12 rows over 8
    assert not legal(rule, Split.of({"both": ["model"], "n": ["data"]}), MESH)


def test_no_more_pieces_than_the_rule_allows() -> None:
    rule = parse("a -> a", ((16,),), ((16,),), most={"a": 4})
    assert legal(rule, Split.of({"a": ["model"]}), MESH)
    assert not legal(rule, Split.of({"a": ["data", "model"]}), MESH)


def test_equal_splits_are_one_object() -> None:
    """What repeats share is found by the object, whether a search made it or a file was read."""
    assert Split.of({"b": ["data"], "n": []}) is Split.of({"b": ("data",)})
