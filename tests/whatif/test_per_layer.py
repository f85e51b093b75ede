"""`plan explain --untied`: what a plan loses because repeats of a block decide alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.cli import main
from planner.errors import PlanError
from planner.machine.topology import from_json
from planner.report.per_layer import per_layer_text
from planner.sharding.rule import Limits
from planner.solvers import solve
from planner.solvers.problem import evaluate
from planner.space.assemble import assemble
from planner.space.build import build_space
from planner.space.techniques import Techniques
from planner.strategy.strategy import Strategy
from planner.whatif.per_layer import PerLayer, _solved, per_layer, without_sharing
from planner.whatif.reprice import Priced, open_recorded, reprice


def planned(source: str, pins: str, batch: int = 64) -> tuple[Strategy, Priced]:
    strategy = planner.plan(source, devices=8, batch=batch, pins=pins, baselines=False)
    return strategy, reprice(
        strategy, open_recorded(strategy, source), from_json(strategy.topology)
    )


def cost_of(priced: Priced, base: GraphFacts) -> int:
    """Picoseconds of the plan's splits in the problem of a base, layouts of shared tensors chosen
    best."""
    allowed = {i: (priced.plan.splits[base.graph.nodes[i].id],) for i in base.times}
    space = build_space(
        base,
        replace(priced.pricer, memo={}),
        limits=Limits(),
        allowed=allowed,
        zero_axes=priced.mesh.zero_axes,
        parts=priced.plan.microbatches,
    )
    problem = assemble(space, Techniques.of(priced.plan), None)
    return evaluate(problem, solve(problem, "dp").choice).cost


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("source", "pins"),
    [
        ("zoo:gpt-tiny,layers=4", "tp=2,zero=1,micro=2"),
        ("zoo:gpt-tiny,layers=2", "pp=2,tp=2,micro=4"),
        ("zoo:gpt-tiny,layers=3", "pp=2,tp=2,micro=4"),
        ("zoo:gpt-tiny,layers=4", "pp=2,tp=4,micro=4,virtual=2,schedule=interleaved"),
        ("zoo:llama-tiny,layers=4", "pp=4,tp=2,micro=8,recompute=block,zero=1"),
        ("zoo:llama-tiny,layers=3", "tp=4,zero=3"),
        ("zoo:t5-tiny,layers=3", "tp=2,micro=2"),
    ],
)
def test_a_plan_costs_the_same_with_repeats_alike_and_apart(source: str, pins: str) -> None:
    _, priced = planned(source, pins)
    alike, each = cost_of(priced, priced.base), cost_of(priced, without_sharing(priced.base))
    assert len(without_sharing(priced.base).times) > len(priced.base.times)
    assert alike == pytest.approx(each, rel=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("source", "pins"),
    [
        ("zoo:gpt-tiny,layers=4", "tp=2"),
        ("zoo:llama-tiny,layers=4", "pp=2,tp=2,micro=4"),
        pytest.param("zoo:t5-tiny,layers=3", "", marks=pytest.mark.slow),
    ],
)
def test_deciding_apart_is_bounded_by_what_is_found(source: str, pins: str) -> None:
    _, priced = planned(source, pins)
    found = per_layer(priced)
    space = build_space(
        without_sharing(priced.base),
        replace(priced.pricer, memo={}),
        zero_axes=priced.mesh.zero_axes,
        parts=priced.plan.microbatches,
    )
    cost_s, least_s = _solved(space, Techniques.of(priced.plan), priced.request.limit_bytes)
    assert 0 < least_s <= cost_s * (1 + 1e-6)
    assert found.shared_decisions == len(priced.base.times)
    assert found.shared_decisions < found.layer_decisions == len(priced.base.graph.nodes)
    assert 0 < found.lower_bound_s <= found.per_layer_s <= found.shared_s
    assert 0 <= found.saved <= found.most_saved < 1


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ("looped", "as one loop over the blocks needs them"),
        ("written-out", "one for all repeats of a block"),
    ],
)
def test_it_is_said(
    blocks: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy, _ = planned("zoo:gpt-tiny,layers=4", f"tp=2,blocks={blocks}")
    strategy.save(tmp_path / "a.json")
    assert main(["explain", str(tmp_path / "a.json"), "--untied"]) == 0
    said = capsys.readouterr().out
    assert why in said and "apart" in said
    assert main(["explain", str(tmp_path / "a.json"), "mlp", "--untied"]) == 2
    assert "P003" in capsys.readouterr().err


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("found", "least", "words"),
    [
        (1.0, 1.0, "no choice is faster"),
        (0.98, 0.98, "0.98 s was found, 2.0 % less   none saves more"),
        (0.98, 0.97, "less   none saves more than 3.0 %"),
        (1.0, 0.95, "no choice found is faster, and none saves more than 5.0 %"),
    ],
)
def test_words_say_what_is_proven(found: float, least: float, words: str) -> None:
    strategy, _ = planned("zoo:gpt-tiny,layers=4", "tp=2")
    said = per_layer_text(strategy, PerLayer(32, 110, 1.0, found, least), width=200)
    assert words in said.replace("980 ms", "0.98 s")


def test_without_repeats_nothing_is_tied() -> None:
    _, priced = planned("zoo:mlp,layers=2", "")
    with pytest.raises(PlanError, match="no blocks of this model are repeated") as e:
        per_layer(priced)
    assert e.value.code == "P059"
