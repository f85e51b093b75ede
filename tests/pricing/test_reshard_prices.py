"""Prices of conversions of tensors that pad: those of each shape's own way, derived once for all
shapes that pad alike."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.pricer import Pricer
from planner.search.build_request import make_request
from planner.sharding import reshard_table as moves
from planner.sharding.layout import Layout, reshard_steps

SIZES = {"data": 4, "model": 2}


def pricer(sizes: dict[str, int] = SIZES) -> Pricer:
    request = make_request(devices=prod(sizes.values()), hardware=None, topology=None)
    return Pricer(
        request.topology, pinned_mesh(request.topology, sizes), request.runtime, request.recipe
    )


PRICER = pricer()
SPOTS = ["first", "second", "partial", "grad_partial", ""]


def layout(first: str, second: str, major: bool) -> Layout:
    place = {"data": first, "model": second}
    order = ("data", "model") if major else ("model", "data")
    held = {spot: tuple(a for a in order if place[a] == spot) for spot in SPOTS}
    return Layout(
        (held["first"], held["second"]),
        tuple(sorted(held["partial"])),
        tuple(sorted(held["grad_partial"])),
    )


LAYOUTS = st.builds(layout, st.sampled_from(SPOTS), st.sampled_from(SPOTS), st.booleans())


@settings(max_examples=400, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    LAYOUTS,
    LAYOUTS,
    st.sampled_from([2.0, 4.0]),
    st.booleans(),
    st.sampled_from([None, 0, 1, 2]),
)
def test_a_way_costs_what_its_own_steps_cost(
    shape: tuple[int, ...], a: Layout, b: Layout, itemsize: float, grad: bool, whole: int | None
) -> None:
    """Padded or not, and with another dim in between that neither layout cuts: ways that are alike
    are derived once."""
    table = PRICER.reshard_prices
    if whole is not None:
        shape = (*shape[:whole], 3, *shape[whole:])
        a, b = (
            Layout((*x.dims[:whole], (), *x.dims[whole:]), x.partial, x.grad_partial)
            for x in (a, b)
        )
    rows, columns = [PRICER.layout_table.number(a)], [PRICER.layout_table.number(b)]
    forward, backward = table.table(shape, itemsize, rows, columns, grad)
    steps = reshard_steps(shape, a, b, tuple(SIZES.items()))
    if steps is None:
        assert np.isinf(forward[0, 0])
        return
    price = PRICER.collective_s
    assert forward[0, 0] == pytest.approx(
        sum(price(s.forward, s.axes, s.forward_elements * itemsize) for s in steps), rel=1e-12
    )
    assert backward[0, 0] == pytest.approx(
        grad * sum(price(s.backward, s.axes, s.backward_elements * itemsize) for s in steps),
        rel=1e-12,
    )


def test_shapes_that_pad_alike_share_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concatenations grow by a few channels from node to node: each has a shape of its own, and the
    same ways."""
    met = []
    monkeypatch.setattr(
        moves, "reshard_steps", lambda *args: met.append(args) or reshard_steps(*args)
    )
    fresh = pricer()
    rows = [
        fresh.layout_table.number(Layout(((), ("data",)))),
        fresh.layout_table.number(Layout((("data",), ()))),
    ]
    for channels in range(8, 8 * 40, 8):
        fresh.reshard_prices.table((channels, 7), 4.0, rows, rows, True)
    assert 0 < len(met) <= 4 * len(rows) ** 2


THREE = {"data": 4, "sequence": 2, "model": 2}
FINE = pricer(THREE)


@st.composite
def finer(draw: st.DrawFn) -> Layout:
    """A layout of three dims over three axes, in any order on a dim."""
    spot = {
        a: draw(st.sampled_from(["0", "1", "2", "partial", "grad_partial", ""]))
        for a in draw(st.permutations(list(THREE)))
    }
    dims = tuple(tuple(a for a, at in spot.items() if at == str(d)) for d in range(3))
    return Layout(
        dims, *(tuple(a for a in THREE if spot[a] == word) for word in ("partial", "grad_partial"))
    )


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(finer(), finer(), st.booleans())
def test_axes_that_keep_their_place_only_divide_what_moves(
    a: Layout, b: Layout, grad: bool
) -> None:
    """What is derived without them costs what the steps between the whole layouts cost."""
    shape, price = (64, 32, 96), FINE.collective_s
    forward, backward = FINE.reshard_prices.table(
        shape, 2.0, [FINE.layout_table.number(a)], [FINE.layout_table.number(b)], grad
    )
    steps = reshard_steps(shape, a, b, tuple(THREE.items()))
    if steps is None:
        assert np.isinf(forward[0, 0])
        return
    assert forward[0, 0] == pytest.approx(
        sum(price(s.forward, s.axes, s.forward_elements * 2.0) for s in steps), rel=1e-12
    )
    assert backward[0, 0] == pytest.approx(
        grad * sum(price(s.backward, s.axes, s.backward_elements * 2.0) for s in steps), rel=1e-12
    )


def test_pairs_that_differ_alike_are_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that stays cut, over one axis or the other, on whichever dim: one gather is one
    derivation."""
    met = []
    monkeypatch.setattr(
        moves, "reshard_steps", lambda *args: met.append(args) or reshard_steps(*args)
    )
    moves._evenly.cache_clear()  # it outlives a layout table
    fresh = pricer(THREE)
    stays = [
        ((), ()),
        (("data",), ()),
        ((), ("sequence",)),
        (("sequence", "data"), ()),
        (("data",), ("sequence",)),
    ]
    for first, second in stays:
        pair = [
            fresh.layout_table.number(Layout((first, second, last))) for last in (("model",), ())
        ]
        forward, _ = fresh.reshard_prices.table((64, 64, 64), 2.0, pair[:1], pair[1:], True)
        cut = prod(THREE[x] for x in (*first, *second))
        assert forward[0, 0] == pytest.approx(
            fresh.collective_s("all-gather", ("model",), 64**3 * 2.0 / cut), rel=1e-12
        )
    assert len(met) == 1
