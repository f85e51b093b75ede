"""Pipeline stages without a block in common: where graphs are cut, what such programs hold and
send, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.analysis.facts import GraphFacts
from planner.analysis.stage_places import places
from planner.emit.from_strategy import program
from planner.errors import PlanError
from planner.execution.pipeline import Schedule
from planner.execution.plan import Plan
from planner.execution.stage_buffers import PARTS, buffers
from planner.execution.uneven_collectives import chunks_at, tick_groups
from planner.execution.uneven_pipeline import (
    UnevenPipeline,
    buffer_elements,
    handed_tensors,
    uneven_pipeline_of,
)
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import from_json
from planner.pins.pins import parse_pins
from planner.pricing.plan_price import price_plan
from planner.pricing.step_time import derived
from planner.report.explain import explain, explain_node
from planner.report.trace import trace
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.search.stage_cuts import _balanced, last_chunk, unbroken, with_cuts
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget
from planner.space.assemble import assemble
from planner.space.build import splits_of
from planner.space.techniques import Techniques
from planner.strategy.reopen import reopen
from planner.strategy.stages import stages_words
from planner.verify import worker
from planner.whatif.reprice import reprice
from planner.workload.model import Model, Workload

RESNET, UNET = "zoo:resnet-tiny", "zoo:unet-tiny"
EAGER = str(Path(__file__).parents[2] / "benchmarks" / "eager.toml")


def plan(source: str, pins: str, devices: int = 4, **options: Any) -> planner.Strategy:
    return planner.plan(
        source,
        devices=devices,
        batch=16,
        pins=parse_pins(pins),
        baselines=False,
        hardware=EAGER,
        **options,
    )


@cache
def based(source: str) -> GraphFacts:
    return GraphFacts.of(
        Model.open(source, Workload(kind="train", batch=16), 8).graph(1), training=True
    )


@pytest.mark.parametrize(("source", "count"), [(RESNET, 2), (RESNET, 4), (UNET, 2), (UNET, 5)])
def test_every_node_and_weight_has_one_stage_and_what_it_reads_reaches_it(
    source: str, count: int
) -> None:
    """At cuts spread over all places: nodes that a gradient passes run on one stage, and a stage
    has all that its nodes read, handed over or made there."""
    base = based(source)
    graph, where = base.graph, sorted(base.places)
    starts = (0, *(where[len(where) * k // count] for k in range(1, count)))
    stages = UnevenPipeline(graph, base.grad, starts, graph.outputs[:1])
    for k in range(count):
        made = {o for i in stages.nodes[k] for o in graph.nodes[i].outputs}
        has = made | {*stages.entering[k], *graph.inputs, *graph.constants, *stages.weights(k), ""}
        assert (
            all(n in has for i in stages.nodes[k] for n in graph.nodes[i].inputs)
            and {*stages.leaving(k)} <= has
        )
        assert {*stages.entering[k]} <= base.grad, "only what has a gradient is handed over"
    runs = [
        i
        for own in stages.nodes
        for i in own
        if any(o in base.grad for o in graph.nodes[i].outputs)
    ]
    assert sorted(runs) == [
        i for i, n in enumerate(graph.nodes) if any(o in base.grad for o in n.outputs)
    ]
    held = [n for k in range(count) for n in stages.weights(k)]
    assert sorted(held) == sorted(graph.weights)


def test_long_skips_are_handed_through_the_stages_between() -> None:
    """A UNet cut in three: what the first stage makes and the last reads is also given to the
    second, and counts at both boundaries."""
    base = based(UNET)
    where = sorted(base.places)
    stages = UnevenPipeline(
        base.graph,
        base.grad,
        (0, where[len(where) // 3], where[2 * len(where) // 3]),
        base.graph.outputs[:1],
    )
    through = {*stages.entering[1]} & {*stages.entering[2]}
    assert through and all(base.graph.producer[n] < stages.starts[1] for n in through)
    assert all(any(i >= stages.starts[2] for i, _ in base.graph.consumers[n]) for n in through)
    over = base.places
    for k in (1, 2):
        assert over[stages.starts[k]] == sum(
            base.graph.tensors[n].elements for n in stages.entering[k]
        )


def test_a_weight_that_two_places_read_is_not_cut_between_them() -> None:
    """A table read first and last leaves no place for a cut, two tied layers none between them."""
    tied = GraphFacts.of(
        Model.open("zoo:gpt-tiny,layers=1,seq=32", Workload(kind="train", batch=8), 8).graph(1),
        training=True,
    )
    readers = {n: [i for i, _ in tied.graph.consumers[n]] for n in tied.graph.weights}
    shared = {n: at for n, at in readers.items() if max(at) > min(at)}
    assert shared and not any(
        min(at) < b <= max(at) for at in shared.values() for b in places(tied)
    )


def test_cuts_are_the_best_of_all() -> None:
    """Dynamic programming against trying everything."""
    from itertools import combinations

    rng = np.random.default_rng(3)
    for count in (2, 3, 4):
        both = np.cumsum([0.0, *rng.random(9)])
        twice = both + np.cumsum([0.0, *rng.random(9)])
        where = [1, 2, 4, 5, 7, 8]
        found = _balanced(where, both, twice, count)
        assert found is not None

        def longest(
            cut: tuple[int, ...], both: np.ndarray = both, twice: np.ndarray = twice
        ) -> float:
            ends = (0, *cut)
            return max(
                *(twice[b] - twice[a] for a, b in zip(ends, ends[1:], strict=False)),
                both[-1] - both[cut[-1]],
            )

        best = min(longest(cut) for cut in combinations(where, count - 1))
        assert (
            found[0] == pytest.approx(best) == pytest.approx(longest(found[1])) and found[2] == ()
        )


def test_the_last_chunk_begins_where_the_longest_is_least() -> None:
    """Against every beginning: what is before the cuts grows, falls in places, or cannot be."""
    rng = np.random.default_rng(0)
    for drawn in range(600):
        cuts = int(rng.integers(1, 40))
        until = np.cumsum(rng.choice([0.0, 1.0, 2.0, 0.5, rng.random()], cuts))
        before = rng.random(cuts) * until[-1]
        before = np.sort(before) if drawn % 2 else before
        before += rng.random(cuts) * 0.1 * until[-1] * (drawn % 3 == 0)
        before[: rng.integers(0, cuts + 1)] = np.inf
        table = np.maximum(before[:, None], until - until[:, None])
        table[np.tril_indices(cuts)] = np.inf
        seconds, first = last_chunk(before, until)
        assert np.array_equal(seconds, table.min(0))
        assert np.array_equal(table[first, np.arange(cuts)], seconds)


@pytest.mark.parametrize(("places", "count"), [(3, 2), (5, 3), (5, 4), (6, 4), (7, 5)])
def test_cuts_and_widths_are_the_best_of_all(places: int, count: int) -> None:
    """Dynamic programming against trying every cut with every widths of one and two places; pinned
    widths against every cut."""
    from itertools import combinations, product

    rng = np.random.default_rng(places)
    both = np.cumsum([0.0, *rng.random(9)])
    twice = both + np.cumsum([0.0, *rng.random(9)])
    where = [1, 2, 4, 5, 7, 8]

    def tick(cut: tuple[int, ...], widths: tuple[int, ...]) -> float:
        ends = (0, *cut, 9)
        sums = [twice] * (count - 1) + [both]
        return max(
            2 // w * (s[b] - s[a]) for a, b, w, s in zip(ends, ends[1:], widths, sums, strict=False)
        )

    every = [w for w in product((1, 2), repeat=count) if sum(w) == places]
    found = _balanced(where, both, twice, count, places - count)
    assert found is not None
    assert (
        found[0]
        == pytest.approx(min(tick(c, w) for c in combinations(where, count - 1) for w in every))
        == pytest.approx(tick(found[1], found[2]))
    )
    for widths in every:
        pinned = _balanced(where, both, twice, count, places - count, widths)
        assert pinned is not None and pinned[2] == widths
        assert (
            pinned[0]
            == pytest.approx(min(tick(c, widths) for c in combinations(where, count - 1)))
            == pytest.approx(tick(pinned[1], widths))
        )


@given(
    st.lists(st.sampled_from([1, 2]), min_size=2, max_size=8).filter(lambda w: len(set(w)) == 2),
    st.integers(1, 8),
)
def test_stages_of_two_places_have_no_shorter_bubble_and_no_smaller_ring(
    widths: list[int], groups: int
) -> None:
    """In microbatches: what bounds of one place each rest on. Every microbatch of a tick has its
    own way, and each place its share of them."""
    one, two = Schedule(sum(widths), 2 * groups, "1f1b"), Schedule(len(widths), groups, "1f1b")
    assert 2 * two.ticks >= one.ticks and 2 * two.in_flight >= one.in_flight
    paths = UnevenPipeline(
        based(RESNET).graph, frozenset(), tuple(range(len(widths))), (), stage_widths=tuple(widths)
    ).paths
    runs = Counter((k, at) for path in paths for k, at in enumerate(path))
    assert [sorted({at for j, at in runs if j == k}) for k in range(len(widths))] == [
        [*range(sum(widths[:k]), sum(widths[: k + 1]))] for k in range(len(widths))
    ]
    assert all(n == 2 // widths[k] for (k, _), n in runs.items())


def test_what_is_read_as_pending_terms_is_made_in_the_same_chunk() -> None:
    """Drawn with conversions free, which favours operators that read pending terms: each plan is
    cut and priced, and a cut between maker and reader is refused."""
    search, rng, met = (
        Search(
            Model.open("zoo:dlrm-tiny", Workload("train", batch=32), 8),
            make_request(devices=8, hardware=None, topology=None),
        ),
        random.Random(0),
        0,
    )
    mesh = pinned_mesh(search.request.topology, {"stage": 2, "model": 4})
    space = search.space(mesh, 2, None)
    assert space is not None
    problem = assemble(space, Techniques(0, "none", 2, "interleaved", 4), None)
    for _ in range(20):
        costs = tuple(
            np.where(
                c >= FORBIDDEN,
                c,
                c + np.array([rng.randrange(int(np.median(c)) + 10**6) for _ in c]),
            )
            for c in problem.cost
        )
        free = tuple(np.where(t >= FORBIDDEN, t, 0) for t in problem.tables)
        choice = solve(
            replace(problem, cost=costs, tables=free), "dp", Budget(work=2_000_000)
        ).choice
        drawn = Plan(
            mesh.shape,
            splits_of(space, choice),
            zero_stage=0,
            zero_axes=mesh.zero_axes,
            recompute="none",
            microbatches=2,
            repeated_blocks=space.base.runs,
            schedule="interleaved",
            virtual_stages=4,
        )
        pairs = unbroken(space.base, drawn)
        cut = with_cuts(space.base, drawn, search.pricer(mesh))
        assert not any(made < start <= reader for made, reader in pairs for start in cut.stage_cuts)
        price_plan(space.base, cut, search.pricer(mesh))
        where = [i for made, reader in pairs for i in space.base.places if made < i <= reader]
        for i in where[:1]:
            met += 1
            with pytest.raises(PlanError, match="nothing pending is handed on"):
                price_plan(
                    space.base,
                    replace(drawn, stage_cuts=(i,), virtual_stages=1),
                    search.pricer(mesh),
                )
    assert met


def test_a_stage_holds_its_own_weights_alone() -> None:
    """Parameters of the strategy name their stage, and what a device holds is the fullest stage's
    part, not the model."""
    s = plan(RESNET, "pp=2,micro=4,dp=2,zero=0")
    weights = [row for row in s.tensors.values() if "label" in row]
    assert {row["stage"] for row in weights} == {0, 1} and len(s.techniques["cuts"]) == 1
    sizes = [
        sum(int(np.prod(row["shape"])) for row in weights if row["stage"] == k) for k in (0, 1)
    ]
    held = s.costs["memory_breakdown_bytes"]["parameters"] / 2
    assert max(sizes) <= held < sum(sizes)


@pytest.mark.slow
def test_a_boundary_is_as_wide_as_its_widest() -> None:
    """What is sent in every tick is what the widest boundary needs."""
    s = plan(UNET, "pp=4,micro=4,recompute=block,schedule=1f1b", solver="recursive")
    graph = reopen(s, UNET).graph(4)
    flow, _ = derived(GraphFacts.of(graph, training=True), s.plan_for(graph))
    stages = uneven_pipeline_of(flow)
    assert stages is not None and stages.count == 4
    rows = handed_tensors(flow, stages)
    each = [sum(int(np.prod(h.shape)) for h in row) for row in rows]
    assert not rows[0] and sum(buffer_elements(rows).values()) >= max(each) > 0
    sent = s.costs["communication_bytes_per_device"]["collective-permute"]["stage"]["payload"]
    assert sent == 2 * (4 + 3) * 2 * sum(buffer_elements(rows).values())


@pytest.mark.parametrize(
    ("source", "pins", "said"),
    [
        (RESNET, "pp=4,micro=2,virtual=2", "groups of 4 microbatches, and 2 do not divide"),
        (
            RESNET,
            "pp=4,micro=4,virtual=5",
            "cut into 16 virtual stages at most, 4 stages of 5 each have more\nhelp: virtual=4",
        ),
        (RESNET, "pp=2,dp=2,micro=4,recompute=none", "recompute their forward pass"),
        (RESNET, "pp=2,dp=2,micro=4,zero=3", "ZeRO stage is at most 2"),
        ("zoo:resnet-tiny,blocks=1", "pp=32,micro=16", "is cut into 16 stages at most"),
    ],
)
def test_what_is_not_built_is_refused(source: str, pins: str, said: str) -> None:
    with pytest.raises(PlanError) as e:
        plan(source, pins, devices=32 if "32" in pins else 4)
    assert e.value.code == "P068" and said in str(e.value)


def test_a_program_equals_the_unsharded_one_and_sends_what_was_counted() -> None:
    """Weights packed, two chunks of the model a stage by lax.switch, optimizer state cut: loss,
    gradients, bytes, FLOPs and arguments."""
    s = plan(RESNET, "pp=2,dp=2,micro=4,zero=2,virtual=2")
    assert len(s.techniques["cuts"]) == 3 and {
        row["stage"] for row in s.tensors.values() if "label" in row
    } == {0, 1}
    report = worker.verify(s, RESNET)
    assert report.ok, str(report)
    assert (
        report.numbers is not None
        and report.numbers.gradients is not None
        and report.numbers.gradients < 1e-5
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stages", "schedule", "virtual", "products"),
    [
        (2, "1f1b", 1, 5 * 1 + 4 * 12 + 1 * 2),
        (2, "gpipe", 1, 5 * 1 + 5 * 12),
        (4, "1f1b", 1, 7 * 1 + 4 * 6 + 3 * 3),
        (2, "interleaved", 2, 9 * 1 + 6 * 6 + 3 * 3),
    ],
)
def test_a_last_stage_without_microbatches_waits(
    stages: int, schedule: str, virtual: int, products: int
) -> None:
    """Five equal products, one in every chunk but the last: forward ticks have one, backward ones
    those of the last chunk as long as it has microbatches.

    UnevenPipeline begin with a product: the gradient that the last would hand back for no microbatch was in
    the prediction and not in the program.
    """
    from benchmarks.compiled_truth import truth

    graph = Model.open(
        "zoo:mlp,layers=5,hidden=32,in=32,out=32", Workload(kind="train", batch=8), 8
    ).graph(4)
    cuts = tuple(i for i, n in enumerate(graph.nodes) if n.op == "MatMul")[1 : stages * virtual]
    plan = Plan(
        (("stage", stages), ("alike", 8 // stages)),
        {},
        microbatches=4,
        schedule=schedule,
        virtual_stages=virtual,
        stage_cuts=cuts,
    )
    found = truth(graph, plan)
    assert found.differences() == () and found.compiled_flops == products * 2 * 2 * 32 * 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "pins"),
    [
        (RESNET, "pp=2,dp=2,micro=4,zero=2"),
        (RESNET, "pp=4,micro=8,schedule=gpipe"),
        (RESNET, "pp=2,tp=2,micro=4,virtual=4,zero=1"),
        (RESNET, "pp=2,tp=2,micro=4,schedule=gpipe"),
        (RESNET, "pp=2,dp=2,tp=2,micro=4,zero=1"),
        (UNET, "pp=2,dp=2,micro=4"),
        (UNET, "pp=4,micro=4"),
        (UNET, "pp=2,dp=2,micro=2,virtual=2"),
        (RESNET, "pp=4,micro=4,zero=0,widths=1+2+1,schedule=gpipe"),
        (RESNET, "pp=4,micro=4,zero=0,widths=1+1+2,offload=optimizer"),
        (RESNET, "pp=3,dp=2,micro=4,zero=2,widths=1+2"),
        (RESNET, "pp=3,dp=2,micro=2,zero=1,widths=2+1"),
        (UNET, "pp=4,micro=4,zero=0,widths=2+1+1"),
    ],
)
def test_more_programs_equal_the_unsharded_ones(source: str, pins: str) -> None:
    s = plan(source, pins, devices=8 if "dp=2,tp=2" in pins else 6 if "pp=3" in pins else 4)
    report = worker.verify(s, source, timeout_s=1800)
    assert report.ok, str(report)


def test_models_of_blocks_keep_their_stages() -> None:
    """Stages are cut only where no repeated block makes up a third of the products."""
    for source in ("zoo:gpt-tiny,layers=4,seq=32", "zoo:t5-tiny", "zoo:mixtral-tiny,layers=4"):
        assert based(source).dealt is not None and not based(source).places
    assert (
        based(RESNET).dealt is None
        and based("zoo:resnet50").dealt is None
        and based(UNET).dealt is None
    )


def test_frameworks_that_deal_blocks_get_no_cut_stages() -> None:
    """Runtime profiles of frameworks price how those deal blocks."""
    with pytest.raises(PlanError) as e:
        plan(RESNET, "pp=2,dp=2,micro=4", runtime="megatron")
    assert e.value.code == "P068"


@pytest.mark.slow
def test_a_stage_of_two_places_next_to_one_of_one() -> None:
    """The wide stage's places share each tick's microbatches and add up gradients: loss, gradients,
    bytes, FLOPs and arguments. The report says who has what."""
    s = plan(RESNET, "pp=3,micro=4,zero=0,widths=2+1", devices=3)
    assert (
        s.techniques["widths"] == [2, 1]
        and len(s.techniques["cuts"]) == 1
        and {row["stage"] for row in s.tensors.values() if "label" in row} == {0, 1}
    )
    assert (
        stages_words(s) == "2 pipeline stages (1F1B, devices per stage 2:1, cut where they balance)"
    )
    report = worker.verify(s, RESNET)
    assert report.ok, str(report)
    assert (
        report.numbers is not None
        and report.numbers.gradients is not None
        and report.numbers.gradients < 1e-5
    )
    graph = reopen(s, RESNET).graph(4)
    assert s.plan_for(graph) == s.plan
    drawn = json.loads(trace(reprice(s, reopen(s, RESNET), from_json(s.topology))))["traceEvents"]
    assert {"forward 0 and 1", "backward 2 and 3"} <= {e["name"] for e in drawn}


@pytest.mark.slow
def test_the_search_gives_a_stage_two_places_where_that_is_faster() -> None:
    """ResNet-50 on three places: one stage of one and one of two are faster than three of one, by
    the price of whole plans."""
    pins = "pp=3,dp=2,micro=16,zero=0,schedule=1f1b"
    free, even = (
        planner.plan("zoo:resnet50", devices=6, batch=96, pins=parse_pins(p), baselines=False)
        for p in (pins, f"{pins},widths=1+1+1")
    )
    assert sorted(free.techniques["widths"]) == [1, 2] and "widths" not in even.techniques
    assert free.costs["step_time_s"] < even.costs["step_time_s"]


@pytest.mark.parametrize(
    ("pins", "code", "said"),
    [
        ("pp=4,micro=4,widths=2+1", "P024", "widths = 2+1 and stage = 4 contradict"),
        ("micro=4,widths=2+1", "P024", "widths = 2+1 and no stages contradict"),
        ("pp=3,micro=3,widths=2+1", "P024", "microbatches = 3"),
        ("pp=3,micro=6,widths=2+1,virtual=2", "P024", "virtual = 2"),
        ("pp=3,micro=6,widths=3", "P020", "1 to 2 positions of the stage axis for each stage"),
        ("pp=4,micro=4,widths=2+2", "P068", "are not of 1 and 2, both among them"),
    ],
)
def test_widths_that_cannot_be(pins: str, code: str, said: str) -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(
            RESNET, devices=12, batch=24, pins=parse_pins(pins), baselines=False, hardware=EAGER
        )
    assert e.value.code == code and said in str(e.value)


def test_repeated_blocks_take_one_place_a_stage() -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(
            "zoo:gpt-tiny,layers=4,seq=32",
            devices=3,
            batch=12,
            pins=parse_pins("pp=3,micro=4,widths=2+1"),
            baselines=False,
            hardware=EAGER,
        )
    assert e.value.code == "P068" and "one position of the stage axis each" in str(e.value)


@pytest.mark.parametrize("widths", [[2, 2], [3], [1, 1, 1], [1, 2, 1]])
def test_widths_that_a_file_cannot_have(widths: list[int]) -> None:
    s = plan(RESNET, "pp=3,micro=4,zero=0,widths=2+1", devices=3)
    edited = planner.Strategy.from_dict(
        s.to_dict() | {"techniques": {**s.techniques, "widths": widths}}, "edited"
    )
    with pytest.raises(PlanError) as e:
        reprice(edited, reopen(s, RESNET), from_json(s.topology))
    assert e.value.code == "P060" and "widths" in str(e.value)


def test_a_file_keeps_its_cuts_and_is_priced_again_the_same(tmp_path: Path) -> None:
    """Through the file, the price worked out anew, and what says which stage runs a node."""
    s = plan(RESNET, "pp=2,dp=2,micro=4,zero=1")
    s.save(tmp_path / "s.json")
    back = planner.Strategy.load(tmp_path / "s.json")
    model = reopen(back, RESNET)
    assert back.plan_for(model.graph(4)) == s.plan and s.plan.stage_cuts
    again = reprice(back, model, from_json(back.topology))
    assert (
        again.cost.step_time_s == pytest.approx(s.costs["step_time_s"], rel=1e-5)
        and again.plan.stage_cuts == s.plan.stage_cuts
    )
    first = s.techniques["cuts"][0]
    assert (
        s.nodes[first]["stage"] == 1
        and f"cut before {first}" in explain(s, 400)
        and "stage 1 of 2 runs it" in explain_node(s, first, 200)
    )


@pytest.mark.slow
def test_chunks_make_the_bubble_small_and_the_search_takes_them_for_it() -> None:
    """Stages of one chunk and of several: less bubble, more messages, the whole faster; unpinned
    the search finds the faster itself."""
    pins = "pp=4,dp=2,micro=8"
    one, two, free = (
        planner.plan(
            "zoo:resnet50", devices=8, batch=64, pins=parse_pins(pins + more), baselines=False
        )
        for more in (",schedule=1f1b", ",virtual=2", "")
    )
    assert two.techniques["schedule"] == "interleaved" and len(two.techniques["cuts"]) == 7
    assert (
        two.costs["bubble_time_s"] < 0.7 * one.costs["bubble_time_s"]
        and two.costs["step_time_s"] < one.costs["step_time_s"]
    )
    once, often = (
        s.costs["communication_bytes_per_device"]["collective-permute"]["stage"]["payload"]
        for s in (one, two)
    )
    assert once % (2 * (8 + 3)) == 0 == often % (2 * (2 * 8 + 3)) and once < often
    assert (
        free.techniques["schedule"] == "interleaved"
        and free.costs["step_time_s"] <= two.costs["step_time_s"]
    )
    assert (
        "4 pipeline stages (interleaved 1F1B, 2 virtual stages each, cut where they balance)"
        in stages_words(two)
    )


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_together_all_chunks_run_every_microbatch_once_each_way(
    stages: int, groups: int, virtual: int, gpipe: bool
) -> None:
    """Of the ticks in which the same chunks run: every stage runs one, every chunk is run for each
    microbatch, and the rest of the passes fill the bubble."""
    gpipe = gpipe and virtual == 1
    p = Schedule(
        stages,
        stages * groups,
        "gpipe" if gpipe else "interleaved" if virtual > 1 else "1f1b",
        virtual,
    )
    for forward in (True, False):
        rows = [r for r in tick_groups(p) if r.forward is forward]
        assert (
            sum(r.ticks for r in rows) == p.ticks
            and sum(r.ticks for r in rows if r.bubble) == stages - 1
        )
        runs = Counter(k for r in rows for k in r.chunks for _ in range(r.ticks))
        assert set(runs) == {*range(stages * virtual)} and min(runs.values()) >= p.microbatches
        assert sum(runs.values()) == p.ticks * stages - (
            0 if forward or gpipe or virtual > 1 else stages - 1
        )
        assert all(len({k % stages for k in r.chunks}) == len(r.chunks) for r in rows)
    assert (
        not any(
            stages * virtual - 1 in chunks_at(p, t, forward=False)
            for t in range(p.ticks, p.first_backward + p.ticks)
        )
        or gpipe
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stages", "schedule", "virtual"),
    [(2, "1f1b", 1), (4, "1f1b", 1), (4, "gpipe", 1), (2, "interleaved", 2)],
)
def test_every_stage_of_a_trace_takes_the_step(stages: int, schedule: str, virtual: int) -> None:
    """Each stage's track ends with the step, runs every microbatch once each way (the last both at
    once), forward before backward, and nothing at the same time."""
    way = f"virtual={virtual}" if virtual > 1 else f"widths={'+'.join('1' * stages)}"
    s = plan(RESNET, f"pp={stages},dp={4 // stages},micro=8,zero=1,schedule={schedule},{way}")
    events = json.loads(trace(reprice(s, reopen(s, RESNET), from_json(s.topology))))["traceEvents"]
    for stage in range(stages):
        own = [e for e in events if e["pid"] == stage and e["ph"] == "X"]
        assert max(e["ts"] + e["dur"] for e in own) == pytest.approx(
            s.cost.step_time_s * 1e6, abs=0.01
        )
        assert all(
            a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in zip(own, own[1:], strict=False)
        )
        at = {e["name"]: e["ts"] for e in own}
        passes = [e["name"] for e in own if e["name"].split(" ")[0] in ("forward", "backward")]
        last = (
            stage + 1 == stages
            # it has no forward pass of its last chunk, which is every other of its passes where there
            # are two
        )
        for k, chunk in enumerate(
            [f" virtual stage {v}" for v in range(virtual)] if virtual > 1 else [""]
        ):
            once = last and k + 1 == virtual
            mine = [p for p in passes if p.endswith(chunk)]
            assert sorted(mine) == sorted(
                f"{way} {m}{chunk}"
                for way in (("backward",) if once else ("forward", "backward"))
                for m in range(8)
            )
            assert once or all(
                at[f"forward {m}{chunk}"] < at[f"backward {m}{chunk}"] for m in range(8)
            )
        bubbles = sum(e["name"] == "bubble" for e in own)
        if virtual == 1:
            assert bubbles == (2 if not last else schedule == "gpipe") * (stages - 1), (
                "a stage waits for its first microbatch, and after its last"
            )
        else:
            assert bubbles == 2 * (stages - 1), (
                "of several chunks the last stage begins with another"
            )


@pytest.mark.parametrize("cuts", [["/no/such/node"], ["/fc/MatMul", "/stem/Relu"], []])
def test_cuts_that_a_file_cannot_have(cuts: list[str]) -> None:
    """Nodes that the graph has not, out of order, too few or too many of them."""
    s = plan(RESNET, "pp=2,dp=2,micro=4")
    data = s.to_dict() | {
        "techniques": {
            **s.techniques,
            "cuts": cuts or ["/stem/Relu", "/fc/MatMul", "/layer1/0/Relu"],
        }
    }
    with pytest.raises(PlanError) as e:
        planner.Strategy.from_dict(data, "edited").plan_for(reopen(s, RESNET).graph(4))
    assert e.value.code in ("P051", "P060")


def test_buffers_give_back_what_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of two stages, whole, cut over one axis or two, and with padding where a dim does not
    divide."""
    from jax.sharding import PartitionSpec as P

    from planner.emit.runtime.files import frame
    from planner.emit.runtime.pipeline import stage_buffers

    shapes = {"a": (5, 4), "b": (6,), "c": (3, 8), "d": (2, 2)}
    rows = (
        (0, 0, (3, 4), shapes["a"], 0.0, P("model")),
        (0, 12, (3,), shapes["b"], 1.0, P("model")),
        (1, 0, (3, 2), shapes["c"], 0.0, P(None, ("model", "model2"))),
        (1, 6, (1, 1), shapes["d"], 0.0, P("model2", "model")),
    )
    monkeypatch.setattr(stage_buffers, "MESH", {"stage": 2, "model": 2, "model2": 2})
    monkeypatch.setattr(stage_buffers, "PATHS", ((0, 1),))
    monkeypatch.setattr(stage_buffers, "STAGE_BUFFERS", {"buffer": rows})
    monkeypatch.setattr(frame, "LABELS", {"buffer": tuple(shapes)})
    row = ((2, 2, 2, 16), "float", 0, 0.0, P("stage", "model", "model2"))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    buffer = stage_buffers.packed("buffer", row, values)
    assert buffer.shape == row[0]
    back = stage_buffers.unpacked("buffer", row, buffer)
    assert all(np.array_equal(back[name], value) for name, value in values.items())
    assert (
        np.array_equal(buffer[1, 1, 0, :6].reshape(3, 2), values["c"][:, 4:6])
        and buffer[1, 1, 0, 6] == values["d"][0, 1]
    )
    assert not buffer[0, 1, 0, 8:12].any() and np.array_equal(
        buffer[0, 1, 1, :8].reshape(2, 4), values["a"][3:]
    )
    fresh = stage_buffers.unpacked(
        "buffer", row, stage_buffers.initial_value("buffer", row, 0, {"c": values["c"]})
    )
    assert (
        np.array_equal(fresh["c"], values["c"])
        and abs(fresh["b"].mean() - 1) < 0.1
        and 0 < np.abs(fresh["a"]).max() < 0.2
    )


def test_state_waits_in_the_hosts_memory() -> None:
    """It leaves the devices, pays for its way, and the program and the file say so; buffers are as
    long as without, so that checkpoints go both ways."""
    here, away = (
        plan(RESNET, f"pp=2,dp=2,micro=4,zero=1,virtual=2,offload={what}")
        for what in ("none", "optimizer")
    )
    state = here.costs["memory_breakdown_bytes"]["optimizer"]
    assert (
        away.costs["memory_breakdown_bytes"]["optimizer"] == 0 < state
    )  # what is on its way needs less than activations did
    assert here.costs["memory_per_device_bytes"] - away.costs["memory_per_device_bytes"] == state
    moved = 2 * state / from_json(away.topology).device.host_bytes_per_s
    assert away.costs["optimizer_time_s"] - here.costs["optimizer_time_s"] == pytest.approx(
        moved, rel=1e-3
    )
    model = reopen(away, RESNET)
    assert reprice(away, model, from_json(away.topology)).cost.step_time_s == pytest.approx(
        away.costs["step_time_s"], rel=1e-5
    )
    graph = model.graph(4)
    lengths = []
    for s in (here, away):
        flow, _ = derived(GraphFacts.of(graph, training=True), s.plan_for(graph))
        stages = uneven_pipeline_of(flow)
        assert stages is not None
        lengths.append([b.length for b in buffers(flow, stages)])
        assert all(
            b.state_length({"stage": 2, "data": 2}) % PARTS == 0
            for b in buffers(flow, stages)
            if b.trained
        )
    assert lengths[0] == lengths[1]
    texts = [program(s, RESNET).text for s in (here, away)]
    assert (
        f"PARTS = {PARTS}" in texts[1]
        and 'memory_kind="pinned_host"' in texts[1]
        and "PARTS" not in texts[0]
    )


def test_a_buffer_is_updated_part_by_part_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter, moments and what they become, in the order of the buffer."""
    import jax

    from planner.emit.runtime.pipeline import stage_buffers_host
    from planner.emit.runtime.step.adamw import update

    monkeypatch.setattr(stage_buffers_host, "PARTS", 4)
    p, g, m, v, decaying = np.random.default_rng(0).random((5, 1, 2, 8)).astype(np.float32)

    def change(p: Any, g: Any, state: Any, decaying: Any) -> Any:
        return update(p, g, state, 3.0, decaying)

    def in_parts(p: Any, g: Any, state: Any, decaying: Any) -> Any:
        away = jax.device_put(state, jax.memory.Space.Host)
        return stage_buffers_host.update_offloaded(change, 0, p, g, away, decaying)

    operands = p, g, (m, v), decaying > 0.5
    found, whole = (jax.jit(f)(*operands) for f in (in_parts, change))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        assert a.shape == b.shape and np.allclose(a, b, rtol=1e-6)
