"""Pipeline stages: what a tick costs, programs against unsharded ones and their compiled bytes, and
the search that chooses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.emit.runtime.files import checkpoint
from planner.emit.runtime.pipeline import virtual_stages as program
from planner.errors import PlanError
from planner.execution.pipeline import BUBBLE, Pipeline, largest_repeated_block, pipeline_of
from planner.execution.plan import Plan
from planner.execution.techniques import MAX_ZERO_STAGE, SCHEDULES
from planner.machine.mesh_choices import staged_meshes
from planner.machine.topology import for_devices
from planner.pins.pins import Pins, parse_pins
from planner.pricing.plan_price import price_plan
from planner.report.ticks import ticks
from planner.search.build_request import make_request
from planner.search.relaxation import Relaxation
from planner.search.search import Search
from planner.solvers import solve
from planner.solvers.problem import Budget, evaluate
from planner.space.assemble import assemble, least_usage, usage_of
from planner.space.techniques import Techniques
from planner.verify import worker
from planner.workload.model import Model, Workload
from tests.verify.in_process import verified

NO_PINS = Pins()
EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")


def plan(source: str, pins: str, batch: int = 16, **options: Any) -> planner.Strategy:
    return planner.plan(
        source,
        devices=8,
        batch=batch,
        pins=parse_pins(pins),
        baselines=False,
        hardware=EAGER,
        **options,
    )


@given(st.integers(2, 12), st.integers(2, 40), st.integers(1, 60), st.sampled_from(SCHEDULES[:2]))
def test_every_microbatch_meets_every_stage_once_each_way(
    stages: int, microbatches: int, repeats: int, schedule: str
) -> None:
    """The arithmetic of the ring: a place is taken again only after the backward pass of the
    microbatch in it."""
    p = Pipeline(0, 3, max(repeats, stages), stages, microbatches, schedule)
    assert p.blocks_per_stage * stages >= p.repeats > (p.blocks_per_stage - 1) * stages - stages
    if schedule == "gpipe":
        return
    for stage in range(stages):
        forward = {m: m + stage for m in range(microbatches)}
        backward = {m: m + 2 * (stages - 1) - stage for m in range(microbatches)}
        assert all(0 <= t < p.ticks for t in forward.values()) and all(
            stages - 1 <= t < stages - 1 + p.ticks for t in backward.values()
        )
        places = {m: m % p.in_flight for m in range(microbatches)}
        for m in range(microbatches):
            later = [n for n in range(m + 1, microbatches) if places[n] == places[m]]
            assert all(forward[n] > backward[m] for n in later)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(2, 5))
def test_chunks_wait_in_a_ring_of_the_size_that_is_priced(
    stages: int, groups: int, chunks: int
) -> None:
    """The places that the program gives to pieces of work: as many as the pipeline says, none taken
    before its piece's backward pass on any stage. What the program runs as a piece is what the
    planner counts, beyond the first and the last as well."""
    p = Pipeline(
        0, 1, stages * chunks, stages, stages * groups, "interleaved", virtual_stages=chunks
    )
    pieces = p.microbatches * chunks
    with pytest.MonkeyPatch.context() as m:
        for name, value in (("VIRTUAL_STAGES", chunks), ("jnp", np)):
            m.setattr(program, name, value)
        places = program.ring_places(p.microbatch_schedule.first_backward, stages, stages * groups)
        microbatch, turn = program.slot_of(np.arange(-2, pieces + 2), stages, stages * groups)
    assert [p.microbatch_schedule.work_item(n)[1] for n in range(-2, pieces + 2)] == [*turn]
    assert [p.microbatch_schedule.work_item(n)[0] for n in range(-2, pieces + 2)] == [
        BUBBLE
    ] * 2 + [*microbatch][2:-2] + [BUBBLE] * 2
    assert (
        len(places) == pieces + 1
        and max(places) + 1 == p.in_flight
        and p.ticks == pieces + stages - 1
    )
    assert {p.stage_of(i) for i in p.nodes} == {*range(stages)} and [
        p.stage_of(i) for i in range(stages)
    ] == [*range(stages)]
    for stage in range(stages):
        seen = [*ticks(p, stage)]
        done = {
            (t.backward, t.chunks[1]): k
            for k, t in enumerate(seen)
            if t.backward not in (None, BUBBLE)
        }
        taken: dict[int, int] = {}  # place -> tick from which it is free
        for n, (k, t) in enumerate(
            (k, t) for k, t in enumerate(seen) if t.forward not in (None, BUBBLE)
        ):
            assert k == n + stage and taken.get(places[n], -1) < k
            taken[places[n]] = done[t.forward, t.chunks[0]]
        assert (
            taken.get(places[pieces], -1) < pieces + stage or stage == stages - 1
        )  # where passes of pieces that do not exist write


@pytest.mark.slow
def test_norms_of_a_constant_scale_run_in_stages() -> None:
    """What a stage keeps between its passes varies over the stages, constants too."""
    source = "zoo:hybrid-tiny,layers=8"
    report = worker.verify(plan(source, "pp=2,dp=2,tp=2,micro=4"), source)
    assert report.ok, report.text()
    assert report.numbers is not None and report.numbers.gradients is not None
    assert report.numbers.gradients < 1e-5


@pytest.mark.parametrize(
    ("source", "pins"),
    [
        pytest.param(
            "zoo:gpt-tiny,layers=4", "pp=2,tp=2,micro=4,schedule=1f1b", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=5",
            "pp=4,dp=2,micro=8,zero=1,recompute=block",
            marks=pytest.mark.slow,
        ),  # stages of uneven length
        pytest.param(
            "zoo:gpt-tiny,layers=4",
            "pp=2,dp=4,micro=4,zero=2,schedule=1f1b",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=4",
            "pp=4,tp=2,micro=8,zero=0,schedule=1f1b",
            marks=pytest.mark.slow,
        ),  # a tied table that the head alone brings together
        (
            "zoo:mlp-tiny,layers=10",
            "pp=2,dp=4,micro=4,virtual=2,zero=2",
        ),  # chunks, more than one group of microbatches
        pytest.param(
            "zoo:gpt-tiny,layers=4", "pp=2,dp=4,micro=4,virtual=2,zero=2", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=4",
            "pp=2,tp=2,dp=2,micro=4,virtual=2,zero=2",
            marks=pytest.mark.slow,
        ),  # chunks with tensor parallelism
        pytest.param(
            "zoo:llama-tiny,layers=4", "pp=4,tp=2,micro=4,schedule=gpipe", marks=pytest.mark.slow
        ),  # collectives after the blocks, run again in the backward pass
        pytest.param(
            "zoo:llama-tiny,layers=5",
            "pp=4,tp=2,micro=4,recompute=block,schedule=zb-h1",
            marks=pytest.mark.slow,
        ),  # gradients of weights apart, stages of uneven length, operands handed on; as many
        # microbatches as stages: nobody reads the last message
        pytest.param(
            "zoo:llama-tiny,layers=5",
            "pp=4,tp=2,micro=8,recompute=block,schedule=zb-h1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zoo:gpt-tiny,layers=4", "pp=2,dp=4,micro=2,schedule=zb-h1", marks=pytest.mark.slow
        ),
        pytest.param(
            "zoo:t5-tiny",
            "pp=2,tp=2,dp=2,micro=4,recompute=block-keep,schedule=1f1b",
            marks=pytest.mark.slow,
        ),  # with tensor and data parallelism; the encoder before the stages, its result read by
        # all of them
    ],
)
def test_programs_equal_the_unsharded_one_and_their_prediction(
    source: str, pins: str, tmp_path: Path
) -> None:
    report = verified(plan(source, pins), source, tmp_path)
    assert report.ok and not report.findings(), report.text()
    assert (
        report.numbers is not None
        and report.numbers.gradients is not None
        and report.numbers.gradients < 1e-5
    )
    assert any(f.what == "collective-permute over stage" and f.compiled for f in report.figures)


@pytest.mark.slow
def test_losses_that_count_rows_are_one_mean(tmp_path: Path) -> None:
    source = "zoo:gpt-tiny,layers=2"
    report = worker.verify(plan(source, "pp=2,dp=4,micro=4", ignore_index=3), source)
    assert report.ok, report.text()


@pytest.mark.slow
def test_1f1b_needs_less_memory_than_gpipe() -> None:
    """Of the compiled programs: temporaries at equal microbatches; and as predicted."""
    temporaries, predicted = {}, {}
    for schedule in ("1f1b", "gpipe"):
        strategy = plan(
            "zoo:gpt-tiny,layers=4,seq=64", f"pp=4,dp=2,micro=16,schedule={schedule}", batch=32
        )
        report = worker.verify(strategy, "zoo:gpt-tiny,layers=4,seq=64", run=False)
        temporaries[schedule] = next(f.compiled for f in report.figures if f.what == "temporaries")
        predicted[schedule] = strategy.cost.memory_breakdown_bytes["activations"]
    assert temporaries["1f1b"] < 0.75 * temporaries["gpipe"]
    assert predicted["1f1b"] < 0.75 * predicted["gpipe"]


def staged_search(
    source: str, devices: int, batch: int, stages: int, pins: Pins = NO_PINS, **workload: Any
) -> tuple[Search, list]:
    model = Model.open(source, Workload("train", batch=batch, **workload), devices)
    request = make_request(
        devices=devices,
        hardware="h100-sxm",
        topology=None,
        workload="train",
        mode="auto",
        solver="auto",
        pins=pins,
        precision="bf16-mixed",
        time_limit_s=None,
    )
    return Search(model, request), list(staged_meshes(request.topology, stages))


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "technique",
    [
        Techniques(1, "none", 8),
        Techniques(1, "none", 8, "interleaved", 3),
        Techniques(0, "block", 16),
        Techniques(2, "block-keep", 8),
        Techniques(1, "none", 8, "gpipe"),
        Techniques(1, "none", 8, "zb-h1"),
        Techniques(0, "block", 16, "zb-h1"),
    ],
)
def test_bounds_are_below_what_is_solved_and_that_close_to_the_price(technique: Techniques) -> None:
    pins = Pins(
        techniques={"bucket": 0}
    )  # where sizes of buckets are open, spaces are priced below all of them
    search, meshes = staged_search("zoo:gpt2-medium", 32, 64, 4, pins)
    for mesh in meshes[1:3]:
        whole, cut = search.space(mesh, 1, None), search.space(mesh, technique.microbatches, None)
        assert whole is not None and cut is not None
        relaxed, problem = Relaxation(whole), assemble(cut, technique, None)
        solved = solve(problem, "dp", Budget())
        objective = evaluate(problem, solved.choice).cost / 1e12
        free = relaxed.free(technique, technique.microbatches)
        assert free is not None and free[1] <= objective * (1 + 1e-9)
        endless = relaxed.free(technique, 0)
        bubble_s = relaxed.bubble_s(
            technique.microbatches, technique.virtual_stages, technique.schedule
        )
        assert endless is not None and endless[1] + bubble_s <= objective * (1 + 1e-9)
        assert relaxed.least((technique.zero_stage,)) + bubble_s <= objective * (1 + 1e-9)
        candidate = search.price(cut, mesh, technique, solved, "plan")
        assert candidate is not None
        # What stages hand on is not in the problem (chunks do so more often), nor is gpipe's second
        # pass of the head; block-keep prices kept collectives a little differently.
        assert (
            0.97
            <= candidate.cost.step_time_s / objective
            <= (1.1 if technique.schedule == "1f1b" else 1.25)
        )
        held, working = usage_of(cut, technique, solved.choice)
        total = candidate.cost.memory.total
        assert least_usage(whole, technique, uncut=True) <= 1.001 * total
        # Under block-keep the problem has the bytes of sums alone, the plan those of every result
        # of a collective that it keeps.
        if technique.recompute == "block-keep":
            assert held + working <= 1.02 * total
        else:
            assert total <= 1.02 * (held + working)


def test_a_pipeline_is_priced_as_what_its_stages_run() -> None:
    """One stage's share of the blocks, once for every tick, and everything else on every stage."""
    search, (mesh, *_) = staged_search("zoo:gpt2-small", 8, 32, 4)
    base = search.base(8)
    assert base is not None
    splits = {n.id: planner.sharding.rule.Split() for n in base.graph.nodes}
    flat = Plan(
        (("data", 2),),
        splits,
        zero_stage=0,
        zero_axes=("data",),
        recompute="none",
        microbatches=8,
        repeated_blocks=base.runs,
    )
    staged = replace(flat, mesh=(("stage", 4), ("data", 2)), schedule="1f1b")
    pipeline = pipeline_of(base.graph, staged)
    assert pipeline is not None and (pipeline.blocks_per_stage, pipeline.ticks) == (3, 11)
    a, b = (price_plan(base, p, search.pricer(mesh))[0] for p in (flat, staged))
    inside = sum(base.rules[i].flops for i in pipeline.nodes) / sum(r.flops for r in base.rules)
    assert b.flops_per_device == pytest.approx(
        a.flops_per_device * (inside * 11 / 8 / 4 + (1 - inside)), rel=1e-9
    )
    assert 0 < b.bubble_time_s < b.compute_time_s and b.memory.parameters < a.memory.parameters
    assert a.bubble_time_s == 0


@pytest.mark.slow
def test_the_search_takes_stages_where_links_are_slow_and_the_model_large() -> None:
    """Links between nodes at half their rate: at the whole, what ZeRO-3 gathers hides under the
    products of the block before."""
    search, _ = staged_search("zoo:gpt3-175b,layers=24", 256, 384, 2)
    topology = search.request.topology
    inside, *between = topology.levels
    slow = [replace(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / 2) for x in between]
    request = replace(
        search.request, baselines=False, topology=replace(topology, levels=(inside, *slow))
    )
    found = Search(search.model, request).run()
    assert (
        found.best is not None
        and found.best.mesh.stages > 1
        and found.best.plan.schedule in ("1f1b", "interleaved")
    )
    assert found.bound_s <= found.best.cost.step_time_s


@pytest.mark.parametrize(
    ("source", "pins", "said"),
    [
        ("zoo:gpt-tiny,layers=4", "pp=8,micro=16", "4 repeated blocks"),
        ("zoo:gpt-tiny,layers=4", "pp=4,zero=3", "at most 2"),
        (
            "zoo:gpt-tiny,layers=4",
            "pp=2,micro=4,virtual=3",
            "4 repeated blocks do not divide into 2 stages of 3 virtual stages",
        ),
        (
            "zoo:gpt-tiny,layers=4",
            "pp=4,schedule=interleaved",
            "4 repeated blocks do not divide into 4 stages of 2 or 4 virtual stages",
        ),
        (
            "zoo:gpt-tiny,layers=8",
            "pp=4,micro=2,virtual=2",
            "groups of 4 microbatches, and 2 do not divide",
        ),
        ("zoo:gpt-tiny,layers=4", "pp=4,zero=2,schedule=gpipe", "at most 1"),
        ("zoo:gpt-tiny,layers=4", "pp=4,micro=1", "at least two microbatches"),
    ],
)
def test_what_cannot_be_is_said(source: str, pins: str, said: str) -> None:
    with pytest.raises(PlanError) as e:
        plan(source, pins)
    assert e.value.code == "P068" and said in str(e.value)


def test_files_say_which_schedule(tmp_path: Path) -> None:
    """A strategy carries its stages through its file; an impossible schedule in one is refused."""
    source = "zoo:gpt-tiny,layers=4"
    strategy = plan(source, "pp=4,tp=2,micro=8,schedule=1f1b")
    strategy.save(tmp_path / "s.json")
    back = planner.Strategy.load(tmp_path / "s.json")
    graph = planner.workload.model.Model.open(source, Workload("train", batch=16), 8).graph(8)
    made = back.plan_for(graph)
    assert (made.stages, made.schedule) == (4, "1f1b") and made == strategy.plan
    assert {row["stage"] for row in back.nodes.values()} == {0, 3}
    for techniques in (
        {"schedule": "none"},
        {"schedule": "2f2b"},
        {"zero_stage": MAX_ZERO_STAGE["1f1b"] + 1},
        {"microbatches": 1},
    ):
        with pytest.raises(PlanError) as e:
            replace(back, techniques={**back.techniques, **techniques}).plan_for(graph)
        assert e.value.code == "P060"


def test_files_say_how_many_chunks() -> None:
    strategy = plan("zoo:gpt-tiny,layers=4", "pp=2,dp=4,micro=4,schedule=interleaved")
    assert (strategy.techniques["schedule"], strategy.techniques["virtual"]) == ("interleaved", 2)
    assert (strategy.plan.schedule, strategy.plan.virtual_stages) == ("interleaved", 2)
    assert strategy.graph is not None
    for techniques, said in (
        ({"virtual": 1}, "virtual"),
        ({"virtual": 3}, "virtual"),
        ({"microbatches": 3}, "groups"),
        ({"schedule": "1f1b"}, "virtual"),
    ):
        with pytest.raises(PlanError) as e:
            replace(strategy, techniques={**strategy.techniques, **techniques}).plan_for(
                strategy.graph
            )
        assert e.value.code == "P060" and said in str(e.value)


def test_saved_chunks_are_read_back_as_any_stack() -> None:
    """Parameters saved as [chunks, repeats of each], one by one, and stacked otherwise."""
    chunks = np.arange(24.0).reshape(2, 3, 4)
    places = tuple(checkpoint.place_in((["w"] * 6, 2, [2, 3, 4]), j) for j in range(6))
    assert places[4] == (1, 1) and checkpoint.place_in((["w"], 0, [4]), 0) == ()
    for first in ((6,), (3, 2)):
        assert np.array_equal(
            checkpoint.restacked([chunks] * 6, places, first), chunks.reshape(*first, 4)
        )
    assert np.array_equal(
        checkpoint.restacked([chunks] * 6, places, (8,))[6:], np.zeros((2, 4))
    )  # filled up to what stages need
    assert np.array_equal(checkpoint.restacked([chunks], places[4:5], ()), chunks[1, 1])


def test_pins_of_schedules_that_contradict_are_a_pair() -> None:
    for pins in ("schedule=1f1b,virtual=2", "schedule=interleaved,virtual=1"):
        with pytest.raises(PlanError) as e:
            parse_pins(pins)
        assert e.value.code == "P024" and "schedule" in str(e.value) and "virtual" in str(e.value)


@pytest.mark.slow
def test_chunks_take_bubble_and_ring_down_and_messages_up() -> None:
    """At equal microbatches, in the price and in the compiled program."""
    found = {}
    for pins in ("schedule=1f1b", "virtual=2"):
        strategy = plan(
            "zoo:gpt-tiny,layers=8,seq=64", f"pp=4,dp=2,micro=8,zero=0,{pins}", batch=16
        )
        report = worker.verify(strategy, "zoo:gpt-tiny,layers=8,seq=64", run=False)
        sent = next(f for f in report.figures if f.what == "collective-permute over stage")
        flops = next(f for f in report.figures if f.what == "dot FLOPs")
        assert sent.predicted == sent.compiled and flops.predicted == flops.compiled
        found[pins] = strategy.cost, sent.predicted, flops.predicted
    (plain, sent, flops), (finer, more, fewer) = found["schedule=1f1b"], found["virtual=2"]
    assert more / sent == pytest.approx((8 * 2 + 3) / (8 + 3)) and fewer < flops
    assert finer.bubble_time_s < 0.6 * plain.bubble_time_s
    assert (
        finer.memory_breakdown_bytes["activations"]
        < 0.8 * plain.memory_breakdown_bytes["activations"]
    )


def test_meshes_put_stages_outermost() -> None:
    topology = for_devices("h100-sxm", 32)
    for mesh in staged_meshes(topology, 4):
        assert mesh.axes[0].name == "stage" and mesh.axes[0].parts == ((1, 4),) and mesh.stages == 4
        assert np.prod([a.size for a in mesh.inner]) == 8
    assert not staged_meshes(topology, 5)


def test_the_run_with_the_most_parameters_is_dealt_out() -> None:
    model = Model.open("zoo:t5-tiny", Workload("train", batch=8), 8)
    search = Search(model, staged_search("zoo:t5-tiny", 8, 8, 2)[0].request)
    base = search.base(2)
    assert base is not None
    run = largest_repeated_block(base.graph, base.runs)
    assert run == max(base.runs)  # the decoder's blocks also attend to the encoder
