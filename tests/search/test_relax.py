"""Bounds of a space: those of the assembled problem, whatever the techniques and the limit."""

from __future__ import annotations

import numpy as np
import pytest

from planner.pins.pins import parse_pins
from planner.search import workspace
from planner.search.build_request import make_request
from planner.search.relaxation import CLOSE, PriceLineSearch, Relaxation
from planner.search.search import Search
from planner.solvers.dp import solve
from planner.solvers.exact.elimination import Tree
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import PICO, assemble, least_working, usage_of
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("source", "devices", "batch"),
    [
        ("zoo:llama3-8b,layers=2", 16, 64),
        pytest.param("zoo:resnet18", 8, 64, marks=pytest.mark.slow),
        ("zoo:bert-tiny", 6, 24),
    ],
)
def test_bounds_are_those_of_the_assembled_problem(source: str, devices: int, batch: int) -> None:
    request = make_request(devices=devices, hardware=None, topology=None)
    search = Search(Model.open(source, Workload("train", batch=batch), devices), request)
    checked = 0
    for mesh in search.offered.meshes()[1:3]:
        space = search.space(mesh, 1, None)
        assert space is not None
        relaxed = Relaxation(space)
        least = relaxed.least((0, 1, 2, 3))
        for at in (
            Techniques(0, "none", 1),
            Techniques(2, "block", 2),
            Techniques(3, "block-keep", 4),
            Techniques(1, "none", batch),
        ):
            problem = assemble(space, at, None, uncut=True)
            exact = solve(problem, Budget())
            found = relaxed.free(at, at.microbatches)
            if exact.status == "infeasible":
                assert found is None
                continue
            cost = evaluate(problem, exact.choice).cost / PICO
            rounding = (len(problem.cost) + len(problem.edges)) / PICO
            assert found is not None and exact.status == "optimal"
            assert cost * (1 - 1e-9) - rounding <= found[1] <= cost + rounding
            assert relaxed.usage(at, found[0]) == pytest.approx(
                usage_of(space, at, tuple(found[0].tolist()), uncut=True)[0]
            )
            assert least <= found[1] + rounding
            low, high = (
                evaluate(problem, exact.choice).peak_usage,
                evaluate(problem, tuple(int(u.argmin()) for u in problem.live_usage)).peak_usage,
            )
            for limit in (low, (low + high) // 2):
                bounded = assemble(space, at, limit, uncut=True)
                best = solve(bounded, Budget())
                if best.status != "optimal":
                    continue
                value, room = (
                    evaluate(bounded, best.choice).cost / PICO,
                    limit + least_working(space, at, uncut=True),
                )
                free = found[1], relaxed.usage(at, found[0])
                if free[1] <= limit:
                    continue
                bound = relaxed.limited(at, room, free)
                assert found[1] - rounding <= bound <= value + rounding
                priced = solve(bounded, Budget(work=1)).bound  # a single price of memory
                assert priced is not None and bound >= 0.99 * priced / PICO
                # From another first price the search of prices may end higher, by no more than the
                # gain that it does not look for.
                enough = (found[1] + bound) / 2
                early = relaxed.limited(at, room, free, enough)
                assert min(enough, bound) * (1 - 1e-9) <= early <= value + rounding
                assert early <= bound * (1 + CLOSE) + rounding
                checked += 1
            assert relaxed.limited(at, 0, (found[1], 0.0)) == float("inf")
    assert checked >= 6


@pytest.mark.slow
def test_bounds_below_a_target_are_the_same_without_options_that_miss_it() -> None:
    request = make_request(
        devices=16, hardware=None, topology=None, pins=parse_pins("blocks=looped")
    )
    search = Search(Model.open("zoo:llama3-8b,layers=2", Workload("train", batch=128), 16), request)
    for mesh in (
        search.offered.meshes()[2],
        next(m for m in search.offered.meshes() if m.stages == 2 and len(m.axes) == 3),
    ):
        space = search.space(mesh, 2, None)
        assert space is not None
        whole, narrow = Relaxation(space), Relaxation(space)
        target = 1.15 * whole.least((0, 1, 2))
        assert narrow.least((0, 1, 2), target) == pytest.approx(whole.least((0, 1, 2)), rel=1e-9)
        assert (
            whole.splits is None
            and narrow.splits is not None
            and len(narrow.considered) < 0.9 * len(whole.considered)
        )
        below = 0
        for at in (
            Techniques(z, r, m)
            for z in (0, 1, 2)
            for r in ("none", "block", "block-keep")
            for m in (2, 8, 16)
        ):
            found, same = whole.free(at, at.microbatches), narrow.free(at, at.microbatches)
            for relaxed, exact in (
                (whole, found),
                (narrow, same),
            ):  # what is known without an elimination: no more, and not much less
                quick = relaxed.quick(at, at.microbatches)
                assert exact is None or quick <= exact[1] * (1 + 1e-9)
                assert relaxed is whole or quick >= 0.9 * target
            assert (
                whole.bubble_s(at.microbatches)
                == pytest.approx(narrow.bubble_s(at.microbatches), rel=1e-9)
                or mesh.stages > 1
            )
            if found is not None and found[1] < target:
                assert same is not None and same[1] == pytest.approx(found[1], rel=1e-9)
                assert narrow.usage(at, same[0]) == pytest.approx(
                    whole.usage(at, found[0]), rel=0.05
                )
                below += 1
            else:
                assert same is None or same[1] >= target * (1 - 1e-9)
        assert below >= 3


def test_what_is_looked_at_below_a_target_is_what_some_plan_below_it_has() -> None:
    request = make_request(
        devices=16, hardware=None, topology=None, pins=parse_pins("blocks=looped")
    )
    search = Search(Model.open("zoo:llama3-8b,layers=2", Workload("train", batch=64), 16), request)
    space = search.space(search.offered.meshes()[2], 1, None)
    assert space is not None
    first = Relaxation(space)
    best = first.least((0,))
    tree = first._compiled(Techniques(0, microbatches=0))
    assert isinstance(tree, Tree)
    each = tree.marginals(first._least[0])[1] / PICO
    for more in (1.001, 1.02, 1.3, 3.0):
        narrow = Relaxation(space)
        assert narrow.least((0,), more * best) == pytest.approx(best, rel=1e-9)
        assert narrow.considered.tolist() == np.flatnonzero(each < more * best).tolist()
    for less in (0.5, 0.99):
        assert (
            Relaxation(space).least((0,), less * best) == less * best
        )  # nothing more is known of what was left out


@pytest.mark.parametrize("source, batch", [("zoo:resnet18", 2048), ("zoo:gpt2-xl,layers=8", 64)])
def test_a_bound_for_some_chunks_a_stage_bounds_others(source: str, batch: int) -> None:
    """Never above the bound itself, within a quarter of it from more to fewer chunks of uneven
    stages or from fewer to more; of blocks nothing from more to fewer."""
    request = make_request(devices=8, hardware=None, topology=None)
    search = Search(Model.open(source, Workload("train", batch=batch), 8), request)
    mesh = next(m for m in search.offered.meshes() if m.stages == 2 and len(m.axes) == 2)
    space = search.space(mesh, 2, None)
    assert space is not None
    relaxed = Relaxation(space)
    relaxed.least((0, 1, 2))
    for level, micro in ((0, 4), (2, 8)):
        at = {
            v: Techniques(level, "block", micro, "interleaved" if v > 1 else "1f1b", v)
            for v in (1, 2, 4)
        }
        bounds = {
            v: found[1] for v, t in at.items() if (found := relaxed.free(t, micro)) is not None
        }
        assert bounds[1] > bounds[4]
        for v, t in at.items():
            for other in at:
                told = relaxed.by_virtual_stages(bounds[other], t, micro, other)
                assert told <= bounds[v] * (1 + 1e-6)
                if v < other and space.base.dealt:
                    assert told == 0.0
                else:
                    assert told >= 0.75 * bounds[v]


@pytest.mark.slow
def test_bounds_stand_where_tables_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request(devices=8, hardware=None, topology=None)
    search = Search(Model.open("zoo:bert-tiny", Workload("train", batch=24), 8), request)
    space = search.space(search.offered.meshes()[1], 1, None)
    assert space is not None
    whole, at = Relaxation(space), Techniques()
    exact = whole.free(at, 1)
    assert exact is not None
    usage, bests = whole.usage(at, exact[0]), {}
    for part in (0.95, 0.9, 0.8):
        bests[part] = whole.limited(at, part * usage, (exact[1], usage))
    target = 1.02 * whole.least((0,))
    least = whole.least((0,), target)
    monkeypatch.setattr("planner.search.relaxation.ROOM", 0)
    monkeypatch.setattr("planner.search.relaxation.WIDEST", 64)
    narrow = Relaxation(space)
    found = narrow.free(at, 1)
    assert (
        found is not None
        and not narrow._compiled(at).exact
        and 0.9 * exact[1] < found[1] < exact[1]
    )
    for part, best in bests.items():
        roughly, tight, more = narrow.limited(at, part * usage, (found[1], usage)), 0.0, True
        while more:
            before, (tight, more) = tight, narrow.tightened(at, part * usage)
            assert before <= tight
        assert (
            found[1] * (1 - 1e-7) <= roughly < tight <= best * (1 + 2e-3)
        )  # prices of the best one are near the best of all
        assert narrow.limited(at, part * usage, (found[1], usage)) and narrow.tightened(
            at, part * usage, 0.9 * tight
        ) == (pytest.approx(tight, rel=2e-3), False)
        assert exact[1] <= best
    # Of options that no plan below a target has fewer are known: none is left out that the whole
    # elimination keeps.
    assert narrow.least((0,), target) <= least and whole.exact and not narrow.exact
    assert set(whole.considered) <= set(narrow.considered) and len(
        narrow.considered
    ) < space_options(space)


@pytest.mark.parametrize("best", [1.0, 3.7, 900.0, 1e-4])
def test_a_climb_ends_near_the_top_or_where_it_is_enough(best: float) -> None:
    """Over heights that rise up to some price and fall after it, no price tried twice; over such as
    rise without end up to what is enough."""
    tried: list[float] = []

    def hill(price: float) -> float:
        tried.append(price)
        return 100.0 - abs(np.log(price / best))

    line_search = PriceLineSearch(1.0, np.inf)
    while not line_search.over:
        line_search.step_with(hill)
    assert len(tried) == len(set(tried)) and line_search.top == hill(line_search.price)
    assert abs(np.log2(line_search.price / best)) <= 0.25
    endless = PriceLineSearch(best, 1e6)
    while not endless.over:
        endless.step_with(lambda price: price)
    assert 1e6 <= endless.top <= 2e6


def space_options(space: Space) -> int:
    return sum(v.options for v in space.variables)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "source", ["zoo:llama3-8b,layers=2", "zoo:gpt2-small,layers=4", "zoo:mixtral-8x7b,layers=2"]
)
def test_what_is_heavy_in_blocks_bounds_all_and_knows_most(source: str) -> None:
    request = make_request(devices=16, hardware=None, topology=None)
    search = Search(Model.open(source, Workload("train", batch=64), 16), request)
    meshes = [m for m in search.offered.meshes() if len(m.axes) > 1]
    for mesh in (meshes[0], next(m for m in meshes if m.stages == 2)):
        whole, part = search.space(mesh, 1, None), search.heavy_in_blocks(mesh, 1, pinned=True)
        assert whole is not None and part is not None
        assert len(part.variables) <= workspace.FEW_HEAVY * len(whole.variables)
        least = Relaxation(whole).least((0, 1, 2))
        alone = Relaxation(part).least((0, 1, 2))
        assert 0.3 * least < alone <= least
        assert Relaxation(part).least((0, 1, 2), 0.9 * alone) == 0.9 * alone


def test_a_space_is_relaxed_anew_for_plans_that_are_much_faster() -> None:
    """Of these fewer options are left; what is proven of them is not below what was, nor above the
    optimum."""
    request = make_request(devices=16, hardware=None, topology=None)
    source = "zoo:llama3-8b,layers=2"
    search = Search(Model.open(source, Workload("train", batch=64), 16), request)
    space = search.space(search.offered.meshes()[2], 1, None)
    assert space is not None
    relaxed, at = Relaxation(space), Techniques(1, "none", 1)
    least = relaxed.least((0, 1, 2, 3))
    found = relaxed.free(at, 1)
    assert found is not None
    below = 1.05 * found[1]
    again = relaxed.again_below(below)
    assert again is not None and again.least((0, 1, 2, 3), below) >= least * (1 - 1e-9)
    assert len(again.considered) < len(relaxed.considered)
    now = again.free(at, 1)
    assert now is not None and now[1] == pytest.approx(found[1], rel=1e-9)
    assert again.again_below(0.999 * below) is None


def test_a_price_above_that_gains_leaves_the_one_below_untried() -> None:
    """Heights that rise to one price and fall from there are climbed to near their top."""
    for top in (-37, 0, 5, 64):
        tried = list[float]()

        def height(price: float, top: int = top, tried: list[float] = tried) -> float:
            tried.append(price)
            return -abs(8 * float(np.log2(price)) - top) - 100

        line = PriceLineSearch(1.0, np.inf)
        while not line.over:
            line.step_with(height)
        assert abs(8 * np.log2(line.price) - top) <= 8 and len(tried) == len(set(tried))
