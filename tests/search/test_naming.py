"""Axes are called by what they do, in the plan, its price, its file and its program alike."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import planner
from planner.analysis.axis_roles import ROLES, role_named
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.search.axis_merging import used_alike, with_merged_axes
from planner.search.axis_names import axis_names, renamed_cost, renamed_mesh, renamed_plan
from planner.search.best_first import BestFirst, PlanFamily
from planner.search.build_request import make_request
from planner.search.canonical_form import PLAINER, on_fewer_axes
from planner.search.canonical_form import named as named_by_use
from planner.search.request import SearchResult
from planner.search.search import Search
from planner.sharding.rule import PENDING
from planner.space.families import batch_only
from planner.workload.model import Model, Workload

CASES = [  # model, devices, batch: small batches leave axes for something else
    ("zoo:gpt2-small,layers=3,seq=64", 8, 8),
    ("zoo:gpt2-small,layers=3", 8, 64),
    ("zoo:llama3-8b,layers=3", 64, 16),
    ("zoo:mixtral-8x7b,layers=2", 16, 16),
    ("zoo:vit-b16,layers=2", 8, 4),
    ("zoo:resnet18", 16, 16),
]


def search(source: str, devices: int, batch: int, **options: Any) -> tuple[SearchResult, Any]:
    request = make_request(devices=devices, hardware=None, topology=None, **options)
    return (
        Search(Model.open(source, Workload("train", batch=batch), devices), request).run(),
        request,
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("source", "devices", "batch"), CASES)
def test_an_axis_does_what_it_is_called_in_most_of_the_work(
    source: str, devices: int, batch: int
) -> None:
    found, request = search(source, devices, batch)
    assert found.best is not None and found.space is not None
    plan, base = found.best.plan, found.base
    graph = base.graph
    for axis, _ in plan.mesh:
        done = dict.fromkeys(ROLES, 0.0)
        for i, node in enumerate(graph.nodes):
            weight = max(
                base.rules[i].flops,
                *(float(math.prod(graph.tensors[o].shape)) for o in node.outputs if o),
            )
            for f, axes in plan.splits[node.id].pairs:
                if axis in axes and f != PENDING:
                    done[base.roles[base.shared[i]][f]] += weight
        if any(done.values()):
            assert done[role_named(axis)] == max(done.values()), (axis, done)
    assert len(set(plan.order)) == len(plan.order)
    assert plan.mesh == found.best.mesh.shape == found.space.pricer.mesh.shape
    # The price is that of the plan under its new names, axis for axis.
    again, _, _ = price_plan(
        base, plan, Pricer(request.topology, found.best.mesh, request.runtime, request.recipe)
    )
    assert again.traffic == found.best.cost.traffic
    assert again.step_time_s == pytest.approx(found.best.cost.step_time_s, rel=1e-12)
    assert again.memory == found.best.cost.memory
    # Naming again changes nothing.
    assert axis_names(base, plan) == {a: a for a in plan.order}


def test_renaming_there_and_back() -> None:
    found, _ = search(
        "zoo:gpt2-small,layers=2", 8, 64, pins="dp=4,tp=2", mode="semi-auto", baselines=False
    )
    assert found.best is not None
    there, back = {"data": "tensor", "tensor": "data"}, {"tensor": "data", "data": "tensor"}
    best = found.best
    assert renamed_plan(renamed_plan(best.plan, there), back) == best.plan
    assert renamed_plan(best.plan, there) != best.plan
    assert renamed_mesh(renamed_mesh(best.mesh, there), back) == best.mesh
    assert renamed_cost(renamed_cost(best.cost, there), back) == best.cost


def test_file_and_program_use_the_names() -> None:
    source = "zoo:gpt2-small,layers=2,seq=64"
    s = planner.plan(source, devices=8, batch=8, baselines=False)
    names = [a["name"] for a in s.mesh]
    assert names[0] == "tensor"  # nothing is gained by cutting a batch of one row a device
    used = {a for row in s.nodes.values() for axes in row["split"].values() for a in axes}
    used |= {a for row in s.tensors.values() for axes in row["layout"] for a in axes}
    used |= {
        a
        for kinds in s.costs["communication_bytes_per_device"].values()
        for axes in kinds
        for a in axes.split("+")
    }
    used |= {
        a
        for row in s.nodes.values()
        for axes in row.get("runner_up", {"split": {}})["split"].values()
        for a in axes
    }
    assert used <= set(names) and set(s.techniques["zero_group"]) == set(names)
    text = planner.emit(s, source)
    assert "'data'" not in text and '"data"' not in text
    assert all(f"'{n}'" in text or f'"{n}"' in text for n in names)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pins", "forbidden"),
    [
        ("tensor=2", {"tensor": {"data"}, "data": {"tensor", "sequence"}}),
        ("sequence=4", {"sequence": {"data", "tensor"}}),
        (
            "sequence=2,tp=2",
            {"data": {"tensor", "sequence"}, "sequence": {"data", "tensor"}, "tensor": {"data"}},
        ),
    ],
)
def test_pinned_axes_do_what_they_are_called(pins: str, forbidden: dict[str, set[str]]) -> None:
    found, _ = search(
        "zoo:gpt2-small,layers=2", 8, 64, pins=pins, mode="semi-auto", baselines=False
    )
    assert found.best is not None
    for i, node in enumerate(found.base.graph.nodes):
        for f, axes in found.best.plan.splits[node.id].pairs:
            for a in axes if f != PENDING else ():
                assert found.base.roles[found.base.shared[i]][f] not in forbidden.get(a, set()), (
                    node.id,
                    f,
                    a,
                )
    attention = next(n.id for n in found.base.graph.nodes if n.op == "Attention")
    if "sequence" in dict(found.best.plan.mesh):
        split = found.best.plan.splits[attention]
        assert "sequence" in (*split.axes("s"), *split.axes("ring"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [{"data": 2, "data2": 8}, {"data": 8, "data2": 2}])
def test_neighbours_that_every_decision_uses_as_one_are_one_axis_of_the_same_price(
    sizes: dict[str, int], zero: int
) -> None:
    request = make_request(devices=16, hardware=None, topology=None)
    search = Search(
        Model.open("zoo:gpt2-small,layers=2,seq=64", Workload("train", batch=64), 16), request
    )
    two = BestFirst(
        search,
        PlanFamily("plan", lambda base, mesh: batch_only(base, mesh.shape), (zero,)),
        (pinned_mesh(request.topology, sizes),),
    ).run()
    assert two is not None
    one, space, choice, problem = with_merged_axes(search, two, *search._among_all(two))
    assert (
        one.mesh == pinned_mesh(request.topology, {"data": 16})
        and one.plan.mesh == one.mesh.shape == space.pricer.mesh.shape
    )
    assert (
        one.cost.step_time_s == pytest.approx(two.cost.step_time_s, rel=1e-12)
        and one.cost.memory == two.cost.memory
    )
    assert {
        kind: sum(row["payload"] for row in rows.values())
        for kind, rows in one.cost.traffic.items()
    } == {
        kind: sum(row["payload"] for row in rows.values())
        for kind, rows in two.cost.traffic.items()
    }
    assert len(choice) == len(space.variables) == len(problem.cost)
    named, _ = named_by_use(search, one, space)
    assert named.mesh.shape == ((("fsdp" if zero == 3 else "data"), 16),)


def test_neighbours_that_one_decision_tells_apart_stay_two_axes() -> None:
    found, request = search(
        "zoo:gpt2-small,layers=2,seq=64",
        16,
        64,
        pins="dp=16,zero=1,zero_group=8,micro=1",
        mode="semi-auto",
        baselines=False,
    )
    assert found.best is not None
    mesh, plan = found.best.mesh, found.best.plan
    assert len(set(used_alike(mesh, plan).values())) == len(mesh.axes), (
        "a group of optimizer sharding ends between them"
    )
    node, split = next((n, s) for n, s in plan.splits.items() if len(s.used) > 1)
    apart = {**plan.splits, node: type(split).of({f: axes[:1] for f, axes in split.pairs})}
    whole = type(mesh)(mesh.axes)
    assert len(set(used_alike(whole, plan).values())) < len(mesh.axes)
    assert len(set(used_alike(whole, dataclasses.replace(plan, splits=apart)).values())) > len(
        set(used_alike(whole, plan).values())
    )
    assert used_alike(whole, plan, given_names=tuple(a.name for a in mesh.axes)) == {
        a.name: a.name for a in mesh.axes
    }, "the user named them"
    assert request.pins.named == {"data"}


def test_an_axis_that_cuts_nothing_is_not_called_data() -> None:
    s = planner.plan("zoo:mlp-tiny", devices=8, batch=1)
    assert [a["name"] for a in s.mesh] == ["replicated"] and s.costs[
        "distinct_work"
    ] == pytest.approx(1 / 8, rel=0.01)
    assert not any(
        n > 1 for row in s.baselines.values() for a, n in row["mesh"].items() if a == "data"
    )
    one = planner.plan("zoo:mlp-tiny", devices=1, batch=1)
    assert [a["name"] for a in one.mesh] == ["data"]


@pytest.mark.slow
def test_parameters_cut_over_the_batch_axis_make_it_fsdp() -> None:
    source = "zoo:gpt2-small,layers=2,seq=64"
    s = planner.plan(source, devices=8, batch=64, mode="data-parallel", pins="zero=3")
    assert s.mesh_shape == (("fsdp", 8),) and s.techniques["zero_group"] == ["fsdp"]
    assert (
        s.baselines["zero3"]["mesh"] == {"fsdp": 8}
        and s.baselines["replicated"]["mesh"] == {"replicated": 8}
        and s.baselines["data_parallel"]["mesh"] == {"data": 8}
    )
    assert all(
        "fsdp" in axes
        for rows in s.costs["communication_bytes_per_device"].values()
        for axes in rows
    )
    again = planner.plan(source, devices=8, batch=64, pins="fsdp=8", baselines=False)
    assert again.mesh_shape == s.mesh_shape and again.costs["step_time_s"] == pytest.approx(
        s.costs["step_time_s"], rel=1e-6
    )


def test_old_names_are_read() -> None:
    assert [
        role_named(a)
        for a in ("model", "model2", "tensor", "fsdp", "fsdp2", "data3", "replicated", "stage", "x")
    ] == ["tensor", "tensor", "tensor", "data", "data", "data", "", "", ""]


def test_of_plans_hardly_slower_and_as_small_the_one_without_a_second_axis_of_its_kind() -> None:
    request = make_request(devices=16, hardware=None, topology=None)
    search = Search(
        Model.open("zoo:gpt2-small,layers=2,seq=64", Workload("train", batch=64), 16), request
    )

    def best(sizes: dict[str, int]) -> Any:
        return BestFirst(
            search,
            PlanFamily("plan", lambda base, mesh: batch_only(base, mesh.shape), (1,)),
            (pinned_mesh(request.topology, sizes),),
        ).run()

    def with_cost(c: Any, **change: Any) -> Any:
        return dataclasses.replace(c, cost=dataclasses.replace(c.cost, **change))

    two, one = best({"data": 2, "data2": 8}), best({"data": 16})
    larger = dataclasses.replace(
        one.cost.memory, activations=one.cost.memory.activations + two.cost.memory.total // 50
    )
    assert (
        on_fewer_axes(search, two, [two, one]) is one
        and on_fewer_axes(search, one, [two, one]) is one
    )
    hardly, slower = (
        with_cost(one, step_time_s=times * two.cost.step_time_s)
        for times in (1 + 0.9 * PLAINER, 1 + 1.1 * PLAINER)
    )
    assert on_fewer_axes(search, two, [two, hardly]) is hardly
    assert on_fewer_axes(search, two, [two, slower, with_cost(one, memory=larger)]) is two
    other = planner.plan(
        "zoo:gpt2-small,layers=2", devices=8, batch=64, pins="dp=4,tp=2", baselines=False
    )
    assert other.mesh_shape == (("data", 4), ("tensor", 2)), (
        "axes that do different things both stay"
    )
