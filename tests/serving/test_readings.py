"""Graphs of the phases that are derived from few readings, and prices that are added up of few
layers."""

from __future__ import annotations

from typing import Any

import pytest

from planner.graph.ir import Graph
from planner.graph.rescale import Scaled, same
from planner.search.build_request import make_request
from planner.serving.cached import with_cache
from planner.serving.joint import Joint, Timed
from planner.serving.phases import PhaseModel, readings_of
from planner.serving.readings import PHASES, READ_AT, Readings
from planner.serving.result import Service
from planner.serving.serve import serve
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices, spans_of
from planner.workload.model import Model
from planner.workload.open import open_model

KEPT = Service(1, 1, 1)


def opened(source: str) -> tuple[Model, Readings]:
    model = open_model(with_cache(source), 4, workload="infer", dims=None)
    return model, readings_of(model, KEPT, spans_of(40, (20, 12)))


@pytest.mark.parametrize(
    "source",
    [
        "zoo:llama-tiny,kv_heads=4",
        "zoo:mixtral-tiny",
        "zoo:deepseek-tiny",
        "zoo:hybrid-tiny",
        "zoo:gpt-tiny,seq=64",
    ],
)
def test_derived_graphs_are_those_that_are_read(source: str) -> None:
    model, readings = opened(source)
    for phase, rows, tokens in (
        ("prompts", 3, 20),
        ("prompts", 1, 17),
        ("step", 8, 32),
        ("step", 1, 9),
    ):
        derived = readings.graph(phase, rows, tokens)
        assert derived is not None
        read = PhaseModel.of(model, phase, KEPT).of_size(phase, rows, tokens).graph(1)
        assert same(derived, read)
    sizes = {phase: {(r, n) for p, r, n in readings._whole if p == phase} for phase in PHASES}
    assert all(len(read) == 3 for read in sizes.values())


def test_nothing_is_derived_along_tokens_where_attention_sees_a_window() -> None:
    model, readings = opened("zoo:llama-tiny,kv_heads=4,full_every=2,window=24")
    for tokens in (9, 40):  # before the window is full, and behind
        derived = readings.graph("step", 3, tokens)
        assert derived is not None
        read = PhaseModel.of(model, "step", KEPT).of_size("step", 3, tokens).graph(1)
        assert same(derived, read)
    assert {(r, n) for p, r, n in readings._whole if p == "step"} == {
        (rows, tokens) for rows in READ_AT for tokens in (9, 40)
    }


def joint_of(source: str) -> Joint:
    """A search for eight sequences, 20 + 12 tokens each."""
    model, readings = opened(source)
    prompts, step = (PhaseModel.of(model, p, Service(20, 12, 8), readings) for p in PHASES)
    request = make_request(
        devices=4, hardware=None, topology=None, workload="infer", baselines=False
    )
    return Joint(prompts, step, request)


@pytest.mark.parametrize(
    "source", ["zoo:llama-tiny,layers=9,kv_heads=4", "zoo:mixtral-tiny,layers=7"]
)
def test_two_and_three_repeats_say_what_all_take(source: str) -> None:
    joint = joint_of(source)
    sizes = Sizes(joint, 40, 20)
    for pair in joint.priced():
        assert pair.prompts.best is not None and pair.step.best is not None
        plans = PlanPrices.of(sizes, pair).plans
        for phase, rows, tokens, best in (
            ("prompts", 4, 16, pair.prompts.best),
            ("step", 16, 40, pair.step.best),
        ):
            assert len(plans[phase]) == 2
            summed = sizes.timed(phase, rows, tokens, best, plans[phase])
            whole = Timed.of(sizes.facts(phase, rows, tokens), best.plan, joint.pricer(best))
            assert summed.step_s == pytest.approx(whole.step_s, rel=1e-12)


@pytest.mark.parametrize("window", [16, 36])
@pytest.mark.parametrize("every", ["", "full_every=2,"])
def test_layers_are_summed_where_they_are_those_of_the_sample(every: str, window: int) -> None:
    """With a window, graphs of fewer tokens have other nodes, and the plan's may be one of them."""
    joint = joint_of(f"zoo:llama-tiny,layers=12,kv_heads=4,{every}window={window}")
    sizes = Sizes(joint, 40, 20)
    pair = next(p for p in joint.priced() if p.split == 2)
    prices = PlanPrices.of(sizes, pair)
    for phase, best, lengths in (
        ("prompts", pair.prompts.best, (16, 20, 32)),
        ("step", pair.step.best, (5, 32, 40)),
    ):
        assert best is not None
        for tokens in lengths:
            found = sizes.timed(phase, 4, tokens, best, prices.plans[phase])
            whole = Timed.of(sizes.facts(phase, 4, tokens), best.plan, joint.pricer(best))
            assert found.step_s == pytest.approx(whole.step_s, rel=1e-9)


def test_where_derived_graphs_are_not_those_that_are_read_all_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {"prompt": "8~24", "generate": "4~8", "rate": 20, "devices": 1}
    source = "zoo:llama-tiny,layers=2,kv_heads=4"
    made, at = serve(source, **asked), Scaled.at

    def wrong(scaled: Scaled, size: int) -> Graph | None:
        return at(scaled, 2 * size)

    monkeypatch.setattr(Scaled, "at", wrong)
    again = serve(source, **asked)
    assert (again.traffic, again.figures) == (made.traffic, made.figures)
