"""If, Loop and Scan from ONNX to a program: against onnxruntime, against the unsharded program, and
against the unrolled form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from costmodels.precision import load_recipe
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.machine.mesh_choices import meshes
from planner.machine.topology import for_devices
from planner.onnx_backend.program import compiled
from planner.ops.lookup import rule_of
from planner.pricing.kernels import kernel_times
from planner.pricing.pricer import Pricer
from planner.reader import read_model
from planner.reader.lower import control as lower_control
from planner.sharding.candidates import candidates
from planner.sharding.layout_table import LayoutTable
from planner.sharding.rule import Split
from planner.space.build import build_space
from planner.verify.numerics import compare, seeded_values
from planner.workload.loss import add_loss
from tests.reader import control_models as models
from tests.reader.control_models import BOOL, FLOAT, INT, info, model, stored

MESH = (("data", 2), ("model", 4))
CASES = {
    "high rate": (models.branches(), {"rate": 16000}),
    "low rate": (models.branches(), {"rate": 8000}),
    "loop": (models.counted_loop(60), {}),
    "short loop": (models.counted_loop(3), {}),
    "scan": (models.scan(), {}),
    "scan forwards": (models.scan(0), {}),
    "until": (models.until_large(), {}),
    "until, at most twice": (models.until_large(limit=True), {}),
    "two scans": (models.two_scans(), {}),
    "speech": (models.speech(), {"sr": 16000}),
    "slow speech": (models.speech(), {"sr": 8000}),
}


def feeds(graph: Any, given: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        n: (
            np.asarray(given[n], np.int64)
            if n in given
            else rng.normal(size=graph.tensors[n].shape).astype(np.float32)
        )
        for n in graph.inputs
    }


def small(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: v.astype(np.int32) if v.dtype == np.int64 else v for n, v in values.items()}


def region_plan(graph: Any) -> Plan:
    """The node with bodies cut as far as it may be."""
    node = next(n for n in graph.nodes if n.bodies)
    splits = candidates(rule_of(node, graph)[0], dict(MESH))
    return Plan(MESH, {node.id: max(splits, key=lambda s: (len(s.used), s.pairs))})


@pytest.mark.parametrize(
    "name",
    [
        (
            pytest.param(n, marks=pytest.mark.slow)
            if n in ("scan forwards", "slow speech", "low rate")
            else n
        )
        for n in CASES
    ],
)
def test_equal_to_onnxruntime(name: str) -> None:
    import onnxruntime

    made, given = CASES[name]
    graph = read_model(made)
    values = feeds(graph, given)
    wanted = onnxruntime.InferenceSession(made.SerializeToString()).run(None, values)
    for got, want in zip(compiled(graph)(values), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("high rate", "shard_map"),
        ("low rate", "jit"),
        ("loop", "shard_map"),
        ("scan", "shard_map"),
        pytest.param("speech", "shard_map", marks=pytest.mark.slow),
    ],
)
def test_training_over_devices(name: str, backend: str) -> None:
    made, given = CASES[name]
    graph = add_loss(read_model(made), "mse")
    plan = region_plan(graph)
    assert len(next(iter(plan.splits.values())).used) >= 1
    found, _ = compare(
        graph,
        plan,
        workload="train",
        backend=backend,
        values=seeded_values(graph, {}),
        batch=small(feeds(graph, {**given})),
        step=name == "loop",
    )
    assert (
        found.outputs < 1e-5 and found.gradients < 1e-4 and found.compared == len(graph.trainable)
    )


def test_gradients_of_a_scan_equal_those_of_the_unrolled_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    def gradient() -> tuple[list[str], np.ndarray]:
        graph = read_model(models.counted_loop(6))
        from planner.onnx_backend.program import function_of

        run, weights = function_of(graph)
        x = feeds(graph, {})["x"]
        (name,) = weights
        return [n.op for n in graph.nodes], np.asarray(
            jax.grad(lambda w: (run({"x": x}, {name: w})[0] ** 2).sum())(weights[name])
        )

    many, unrolled = gradient()
    monkeypatch.setattr(lower_control, "UNROLLED_NODES", 0)
    one, scanned = gradient()
    assert many.count("Tanh") == 6 and one.count("Scan") == 1 and "Tanh" not in one
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-4, atol=1e-6)


def test_weights_inside_bodies_are_weights_of_the_graph() -> None:
    graph = read_model(models.speech())
    assert (
        len(graph.weights) == len(graph.trainable) == 8
        and graph.labels["by_rate/high_rate/kernel"] == "by_rate/high_rate/kernel"
    )
    loop = read_model(models.counted_loop(3))
    assert len(loop.weights) == len(loop.trainable) == 1, (
        "stored once, however often the body is repeated"
    )


def test_a_heavy_branch_and_every_iteration_are_priced() -> None:
    for made, flops in (
        (models.branches(), 2 * 8 * 16 * 16),
        (models.counted_loop(60), 60 * 2 * 8 * 16 * 16),
        (models.scan(), 12 * 2 * 8 * 16 * 16),
    ):
        base = GraphFacts.of(read_model(made), training=False)
        assert sum(r.flops for r in base.rules) == flops == base.model_flops


def test_bodies_that_let_nothing_be_cut_are_reported_with_their_work() -> None:
    made = models.until_large()
    body = made.graph.node[2].attribute[0].g
    body.node.insert(0, helper.make_node("MatMul", ["h", "w"], ["hw"]))
    body.node[1].input[0] = "hw"
    graph = read_model(made)
    rule, reason = rule_of(graph.nodes[-1], graph)
    assert (
        "every dim" in reason
        and rule.flops == 2 * 8 * 16 * 16
        and len(candidates(rule, dict(MESH))) == 1
    )


def test_every_iteration_pays_its_launches() -> None:
    topology = for_devices("h100-sxm", 8)
    pricer = Pricer(
        topology,
        meshes(topology)[0],
        load_runtime("jax-shard_map"),
        load_recipe("bf16-mixed"),
        LayoutTable(),
    )
    times = []
    for trips in (50, 100):
        base = GraphFacts.of(read_model(models.counted_loop(trips)), training=False)
        i = next(i for i, n in enumerate(base.graph.nodes) if n.bodies)
        times.append(kernel_times(base, i, Split(), pricer)[0])
    assert times[1] == pytest.approx(2 * times[0]) and times[0] >= 50 * 2 * topology.device.launch_s


def test_recurrences_that_differ_inside_alone_are_priced_apart() -> None:
    topology = for_devices("h100-sxm", 4)
    pricer = Pricer(
        topology,
        meshes(topology)[0],
        load_runtime("jax-shard_map"),
        load_recipe("bf16-mixed"),
        LayoutTable(),
    )
    space = build_space(GraphFacts.of(read_model(models.two_scans()), training=False), pricer)
    found = {
        v.name: [kernel_times(space.base, v.node, split, pricer)[0] for split in v.splits]
        for v in space.variables
        if space.base.graph.nodes[v.node].bodies
    }
    assert {v.name: v.costs.forward_s.tolist() for v in space.variables if v.name in found} == found
    assert found["scan0"][0] < found["scan1"][0]  # a softmax is a kernel of its own


def test_what_cannot_be_followed_is_said() -> None:
    with pytest.raises(PlanError, match="P147.*differentiate"):
        add_loss(read_model(models.until_large()), "mse")
    stacking = models.until_large()
    body = stacking.graph.node[2].attribute[0].g
    body.output.append(info("twice", FLOAT, [8, 16]))
    stacking.graph.node[2].output.append("all_of_them")
    stacking.graph.output.append(info("all_of_them", FLOAT, ["n", 8, 16]))
    with pytest.raises(PlanError, match="how many is not known"):
        read_model(stacking)
    uneven = models.branches()
    else_branch = next(a.g for a in uneven.graph.node[1].attribute if a.name == "else_branch")
    else_branch.node[1].CopyFrom(
        helper.make_node("ReduceMax", ["coarse/product"], ["coarse/made"], keepdims=0)
    )
    with pytest.raises(PlanError, match="in one branch and"):
        read_model(uneven)


def test_the_batch_is_not_followed_through_bodies_but_may_be_a_symbol() -> None:
    with pytest.raises(PlanError, match="P146.*subgraphs"):
        read_model(models.branches(), batch=16)
    free = models.branches()
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    for batch in (1, 16):
        graph = read_model(free, batch=batch)
        assert graph.tensors["y"].shape == (batch, 16) and graph.nodes[1].bodies[0].tensors[
            graph.nodes[1].bodies[0].outputs[0]
        ].shape == (batch, 16)


def growing(trips: int) -> Any:
    """Each iteration appends a row: states of another shape each time."""
    nodes = [
        helper.make_node("Concat", ["h", "x"], ["longer"], axis=1),
        helper.make_node("Identity", ["on"], ["still_on"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [info("i", INT, []), info("on", BOOL, []), info("h", FLOAT, None)],
        [info("still_on", BOOL, []), info("longer", FLOAT, None)],
    )
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], name="loop", body=body)
    return model(
        [loop], [info("x", FLOAT, [8, 2])], [info("y", FLOAT, None)], stored(trips=np.int64(trips))
    )


def test_states_that_grow_are_unrolled_where_that_is_possible() -> None:
    graph = read_model(growing(100))
    assert graph.tensors[graph.outputs[0]].shape == (8, 202)
    with pytest.raises(
        PlanError, match=r"enters as float32 \[8, 2\] and leaves as float32 \[8, 4\]"
    ):
        read_model(growing(100_000))


def nested(depth: int, trips: int) -> Any:
    """Loops within loops."""
    body = None
    for k in range(depth):
        inside = (
            [helper.make_node("Relu", [f"h{k}"], [f"r{k}"])]
            if body is None
            else [helper.make_node("Loop", ["trips", "", f"h{k}"], [f"r{k}"], body=body)]
        )
        body = helper.make_graph(
            [*inside, helper.make_node("Identity", [f"on{k}"], [f"go{k}"])],
            f"b{k}",
            [info(f"i{k}", INT, []), info(f"on{k}", BOOL, []), info(f"h{k}", FLOAT, [8])],
            [info(f"go{k}", BOOL, []), info(f"r{k}", FLOAT, [8])],
        )
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], name="loop", body=body)
    return model(
        [loop], [info("x", FLOAT, [8])], [info("y", FLOAT, [8])], stored(trips=np.int64(trips))
    )


@pytest.mark.parametrize(
    ("depth", "trips"), [(12, 2), (30, 2), (3, 10_000), (30, 1 << 62), (2, 200)]
)
def test_nested_loops_stay_small(depth: int, trips: int) -> None:
    import time

    start = time.process_time()
    try:
        graph = read_model(nested(depth, trips))
        assert len(graph.nodes) <= 4 * lower_control.MOST_UNROLLED
    except PlanError as error:
        assert error.code in ("P121", "P130")
    assert time.process_time() - start < 5


def test_nested_splits_reach_the_inner_body() -> None:
    graph = read_model(nested(2, 200))
    node = graph.nodes[0]
    assert node.op == "Scan" and node.bodies[0].nodes[0].op == "Scan"
    result, _ = compare(
        graph,
        Plan(MESH, {node.id: Split.of({"f0": ("data", "model")})}),
        workload="infer",
        backend="shard_map",
        values={},
    )
    assert result.outputs == 0.0
