"""Meshes that are not expanded: those of which nothing fits, and those that no better plan is on."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from planner.machine.topology import Mesh
from planner.search import best_first
from planner.search.build_request import make_request
from planner.search.relaxation import Relaxation
from planner.search.search import Search
from planner.strategy.strategy import Strategy
from planner.workload.model import Model, Workload


def searched(
    monkeypatch: pytest.MonkeyPatch, many: int, source: str, **options: Any
) -> tuple[Strategy, list[Mesh], list[Mesh]]:
    """The plan where so many meshes are many, those that were expanded for it, and all that were
    put aside as too large."""
    expanded, large = [], []
    expand, too_large = best_first.BestFirst._expand, best_first.BestFirst._too_large

    def counted(self: best_first.BestFirst, index: int) -> None:
        expanded.append(self.meshes[index])
        expand(self, index)

    def noted(self: best_first.BestFirst, mesh: Mesh) -> bool:
        if found := too_large(self, mesh):
            large.append(mesh)
        return found

    monkeypatch.setattr(best_first, "MANY_MESHES", many)
    monkeypatch.setattr(best_first.BestFirst, "_expand", counted)
    monkeypatch.setattr(best_first.BestFirst, "_too_large", noted)
    plan = planner.plan(source, remedies=False, baselines=False, **options)
    monkeypatch.undo()
    return plan, expanded, large


CASES: dict[str, dict[str, Any]] = {
    "nothing fits without stages": {
        "source": "zoo:mixtral-8x7b,layers=20",
        "devices": 16,
        "batch": 64,
        "launcher": "megatron",
    },
    "names": {
        "source": "zoo:llama3-8b",
        "devices": 64,
        "batch": 256,
        "hardware": "tpu-v5p",
        "launcher": "maxtext",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "names")) for c in CASES]
)
def test_meshes_put_aside_change_neither_the_plan_nor_what_is_proven(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, all_expanded, none = searched(monkeypatch, 1 << 20, **CASES[case])
    some, expanded, large = searched(monkeypatch, 1, **CASES[case])
    assert not none and len(expanded) < 0.8 * len(all_expanded)
    assert bool(large) == (case != "names")
    assert some.nodes == every.nodes and some.mesh == every.mesh
    assert some.techniques == every.techniques and some.cost == every.cost
    assert some.solver["bound_s"] == pytest.approx(every.solver["bound_s"], rel=1e-4)


def test_products_outside_of_blocks_are_a_part_of_what_a_mesh_takes_at_least() -> None:
    source = "zoo:deepseek-v3,layers=8,seq=1024"
    request = make_request(devices=16, hardware=None, topology=None, launcher="megatron")
    search = Search(Model.open(source, Workload("train", batch=64), 16), request)
    seen = set()
    for mesh in search.offered.meshes():
        part = search.heavy_in_blocks(mesh, 1, pinned=True)
        if part is None or mesh.stages in seen:
            continue
        seen.add(mesh.stages)
        whole = search.space(mesh, 1, None)
        assert whole is not None
        levels = (0, 1)
        outside = search.outside_s(part)
        least = Relaxation(whole).least(levels)
        assert outside > 0
        assert Relaxation(part).least(levels) + outside <= least
    assert len(seen) > 2
