"""What blocks hand on: nothing pending, so that every plan of a space has the loop that its
techniques speak of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.execution.plan import Plan
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.step_time import derived
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.sharding.layout import Layout, reshard_tree
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget
from planner.space.assemble import assemble
from planner.space.build import splits_of
from planner.space.techniques import Techniques
from planner.workload.model import Model, Workload


def _search(source: str, devices: int, batch: int) -> Search:
    return Search(
        Model.open(source, Workload("train", batch=batch), devices),
        make_request(devices=devices, hardware=None, topology=None),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", ["zoo:t5-tiny", "zoo:llama-tiny", "zoo:ssm-tiny"])
def test_plans_of_a_space_have_the_loops_of_its_blocks(source: str) -> None:
    """Plans drawn by random prices."""
    search, rng = _search(source, 8, 32), np.random.default_rng(1)
    mesh = pinned_mesh(search.request.topology, {"data": 4, "model": 2})
    space = search.space(mesh, 1, None)
    assert space is not None and space.base.loops == space.base.runs and space.base.carried
    problem = assemble(space, Techniques(0, "block"), None)
    for _ in range(12):
        drawn = tuple(
            np.where(c >= FORBIDDEN, c, rng.integers(0, 10**9, len(c))) for c in problem.cost
        )
        tables = tuple(np.where(t >= FORBIDDEN, t, 0) for t in problem.tables)
        choice = solve(
            replace(problem, cost=drawn, tables=tables), "dp", Budget(work=2_000_000)
        ).choice
        _, runs = derived(
            space.base,
            Plan(
                mesh.shape,
                splits_of(space, choice),
                zero_stage=0,
                zero_axes=mesh.zero_axes,
                recompute="block",
                microbatches=1,
                repeated_blocks=space.base.runs,
            ),
        )
        assert [(run.first, run.period, run.repeats) for run in runs] == list(space.base.runs)


def _read_behind(path: Path) -> str:
    """A model of two equal layers, of which the first makes something that the head reads, too."""
    nodes, weights, x, kept = [], [], "first", ""

    def add(op: str, *inputs: str) -> str:
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"]))
        return str(nodes[-1].output[0])

    def product(x: str) -> str:
        weights.append(numpy_helper.from_array(np.ones((64, 64), np.float32), f"w{len(weights)}"))
        return add("MatMul", x, weights[-1].name)

    x = product("x")
    for _ in range(2):
        h = add("Relu", product(x))
        kept = kept or h
        x = add("Add", product(add("Relu", product(h))), x)
    nodes.append(helper.make_node("Mul", [x, kept], ["y"]))
    batch = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 64]) for n in "xy"]
    graph = helper.make_graph(nodes, "read_behind", batch[:1], batch[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return str(path)


def test_blocks_that_are_put_together_differently_are_not_recomputed(tmp_path: Path) -> None:
    """The blocks share their splits, no function serves them all, and no plan says that it computes
    them again."""
    search = _search(_read_behind(tmp_path / "model.onnx"), 8, 64)
    base = search.base(1)
    assert base is not None and base.runs and not base.loops and not base.recomputed
    assert search.offered.recomputes(base, search.offered.meshes()[0]) == ("none",)


def test_of_equal_ways_one_that_leaves_nothing_pending_is_taken() -> None:
    mesh, pending = (("data", 2), ("model", 4)), Layout((("data",), (), ()), partial=("model",))
    cut = Layout((("data",), ("model",), ()))
    tree = reshard_tree((8, 16, 32), pending, (cut,), mesh, True)
    assert (
        tree is not None
        and tree.shared_layout == cut
        and [s.kind for s in tree.shared_steps] == ["reduce-scatter"]
    )
