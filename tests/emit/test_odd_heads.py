"""Heads of odd vocabularies are padded in the program: same numbers, and work as predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import models_zoo
from benchmarks.hand_plans import megatron
from planner.analysis.facts import GraphFacts
from planner.emit.program import emit
from planner.execution import odd_heads
from planner.execution.collectives import flops_by_index
from planner.execution.layout_flow import derive
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.graph.repeats import hoist
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.kernels import kernel_times, working_bytes
from planner.pricing.pricer import Pricer
from planner.reader import read_model
from planner.search.build_request import make_request
from planner.sharding.rule import Split
from planner.verify import worker
from planner.verify.numerics import compare, load_program, seeded_values
from planner.verify.predicted import predict
from planner.workload.loss import add_loss

MESH = (("data", 2), ("model", 4))
GPT = "zoo:gpt-tiny,vocab=259,layers=2,seq=8"
ZERO = {"zero_axes": ("data",)}


@pytest.fixture
def _all_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of few classes are padded as those of many."""
    monkeypatch.setattr(odd_heads, "FEWEST", 16)


def trained(spec: str, **loss: object) -> Graph:
    return hoist(add_loss(read_model(models_zoo.build(spec), batch=8), **loss))  # type: ignore[arg-type]


def plan_of(graph: Graph, mesh: tuple[tuple[str, int], ...] = MESH, **changes: object) -> Plan:
    return replace(Plan(mesh, megatron(graph, mesh)), **changes)  # type: ignore[arg-type]


def test_vocabularies_that_are_padded() -> None:
    assert odd_heads.widened(50257) == 50304 and odd_heads.widened(25129) == 25216
    assert odd_heads.widened(50264) == 50264, "a multiple of 8"
    assert odd_heads.widened(1001) == 1001, "too few"


@pytest.mark.slow
def test_numbers_are_those_of_the_head_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    graph, plan = trained(GPT), Plan((), {})
    plain = load_program(emit(graph, plan, workload="train", unroll=True))
    monkeypatch.setattr(odd_heads, "FEWEST", 16)
    made = emit(graph, plan, workload="train", unroll=True)
    assert "pad_to(" in made.text and "(259, 259)" in made.text
    padded, values = load_program(made), seeded_values(graph, {})
    params = {key: values[names[0]] for key, names in made.labels.items()}
    rng = np.random.default_rng(0)
    batch = {
        graph.labels.get(n, n): rng.integers(0, 259, graph.tensors[n].shape, np.int32)
        for n in graph.inputs
    }
    frozen = {key: params.pop(key) for key in [*params] if key in plain.FROZEN}
    found = [
        jax.jit(jax.value_and_grad(lambda p, m=m: m.loss_of(p, frozen, batch)))(params)
        for m in (plain, padded)
    ]
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    for key, gradient in found[0][1].items():
        np.testing.assert_allclose(found[1][1][key], gradient, rtol=1e-4, atol=1e-6)


def head_of(graph: Graph) -> tuple[int, int]:
    """The head and its loss."""
    ((head, loss),) = odd_heads.odd_heads(graph).items()
    return head, loss


@pytest.mark.usefixtures("_all_odd")
@pytest.mark.parametrize(
    ("spec", "backend", "changes"),
    [
        (GPT.replace("layers=2", "layers=1"), "shard_map", {}),
        pytest.param(GPT, "shard_map", {"zero_stage": 1, **ZERO}, marks=pytest.mark.slow),
        pytest.param(GPT, "shard_map", {"zero_stage": 3, **ZERO}, marks=pytest.mark.slow),
        pytest.param(
            "zoo:llama-tiny,layers=2,vocab=131,seq=18",
            "shard_map",
            {"recompute": "block", "microbatches": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(GPT, "jit", {"zero_stage": 3, **ZERO}, marks=pytest.mark.slow),
        pytest.param(GPT.replace("259", "260"), "jit", {}, marks=pytest.mark.slow),
    ],
)
def test_classes_cut_over_devices(spec: str, backend: str, changes: dict) -> None:
    """Each device pads its own classes, which four divide unevenly or into odd numbers."""
    graph = trained(spec)
    check(graph, plan_of(graph, **changes), backend, columns=128)


@pytest.mark.usefixtures("_all_odd")
@pytest.mark.parametrize(
    ("split", "backend", "columns"),
    [
        pytest.param({"b0": ["data", "model"]}, "shard_map", 384, marks=pytest.mark.slow),
        pytest.param({"b0": ["data"], "k": ["model"]}, "shard_map", 384, marks=pytest.mark.slow),
        pytest.param({"b0": ["model"], "n": ["data"]}, "jit", 256, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_cut_the_head(
    split: dict[str, list[str]], backend: str, columns: int
) -> None:
    """Rows alone; sums that are pending, and other layouts than the loss wants, which go on without
    the padding."""
    graph = trained(GPT, shift_labels=True, ignore_index=-100)
    plan, (head, loss) = plan_of(graph), head_of(graph)
    splits = {**plan.splits, graph.nodes[head].id: Split.of(split)}
    if len(split) == 1:
        splits[graph.nodes[loss].id] = Split.of({"d0": split["b0"]})
    check(graph, replace(plan, splits=splits), backend, columns, cut_back=len(split) > 1)


def check(
    graph: Graph, plan: Plan, backend: str, columns: int, cut_back: bool = False, step: bool = True
) -> None:
    """Loss, gradients and a step are those of one device, and products are those predicted."""
    predicted, (head, loss) = predict(graph, plan, workload="train"), head_of(graph)
    padded = {head: columns} if cut_back else {head: columns, loss: columns}
    assert odd_heads.wide_nodes(predicted.flow) == padded
    found, _ = compare(
        graph,
        plan,
        workload="train",
        backend=backend,  # type: ignore[arg-type]
        values=seeded_values(graph, {}),
        step=step,
    )
    assert found.gradients < 1e-4 and (found.update or 0.0) < 1e-4
    assert found.loss == pytest.approx(found.reference_loss, rel=1e-5)
    program = emit(graph, plan, workload="train", backend=backend)  # type: ignore[arg-type]
    compiled = worker.compile_program(program, "train")
    figures = {f.what: f for f in worker.figures(predicted, plan, compiled, backend, 0)}
    exact = {"argument bytes", "output bytes", "dot FLOPs"}
    if backend == "shard_map":
        exact |= {what for what in figures if " over " in what}
    assert {w for w in exact if figures[w].predicted != figures[w].compiled} == set()


@pytest.mark.slow
@pytest.mark.usefixtures("_all_odd")
@pytest.mark.parametrize("cut", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_stages_that_have_no_block_in_common(cut: int) -> None:
    """Between two products, and between the head and its loss: logits are handed on as they are."""
    graph = hoist(add_loss(read_model(chain_of_products()), "cross_entropy"))
    mesh = (("data", 4), ("stage", 2))
    splits = {
        n.id: Split.of({("d0" if n.op == "CrossEntropyLoss" else "m"): ["data"]})
        for n in graph.nodes
        if n.op != "Relu"
    }
    splits |= {n.id: Split.of({"d0": ["data"]}) for n in graph.nodes if n.op == "Relu"}
    plan = Plan(mesh, splits, microbatches=4, schedule="1f1b", stage_cuts=(cut,))
    check(graph, plan, "shard_map", columns=384, cut_back=cut == 9, step=False)


def chain_of_products() -> Any:
    """A model of five products without biases, the last of 259 classes."""
    from onnx import TensorProto, helper, numpy_helper

    rng, widths = np.random.default_rng(0), (32, 48, 40, 56, 24, 259)
    shapes = list(zip(widths, widths[1:], strict=False))
    weights = [
        numpy_helper.from_array(rng.normal(0, 0.2, shape).astype(np.float32), f"w{i}")
        for i, shape in enumerate(shapes)
    ]
    nodes, x = [], "x"
    for i in range(len(shapes)):
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("Relu", [f"p{i}"], [x := f"r{i}"]))
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, n])
        for name, n in (("x", 32), ("p4", 259))
    ]
    graph = helper.make_graph(nodes[:-1], "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.usefixtures("_all_odd")
def test_logits_that_others_read_stay_as_they_are() -> None:
    graph = trained(GPT)
    head, _ = head_of(graph)
    shown = replace(graph, outputs=(*graph.outputs, graph.nodes[head].outputs[0]))
    assert odd_heads.odd_heads(shown) == {}


def test_work_and_memory_are_those_of_wider_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's head is as much more work as it has more columns, and its logits as much larger; its
    padded weight is there beside the table."""
    graph = trained("zoo:gpt2-small,layers=1")
    head, _ = head_of(graph)
    request = make_request(devices=1, hardware="h100", topology=None)
    mesh = pinned_mesh(request.topology, {"data": 1})
    pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)

    def found(fewest: int) -> tuple[float, float, float, float]:
        monkeypatch.setattr(odd_heads, "FEWEST", fewest)
        facts, flow = (
            GraphFacts.of(graph, training=True),
            derive(graph, Plan((), {}), training=True),
        )
        size = working_bytes(facts, head, Split(), 0.0, 1e6, 0.0, pricer)
        flops = float(flops_by_index(flow)[head])
        return flops, *kernel_times(facts, head, Split(), pricer), size

    (*wide, size), (*plain, less) = found(odd_heads.FEWEST), found(10**6)
    assert wide[0] == plain[0] * 50304 / 50257
    assert wide == pytest.approx([n * 50304 / 50257 for n in plain], rel=1e-4), "beside launches"
    assert size == pytest.approx(less + 1e6 * 47 / 50257 + 50304 * 768 * 2)
