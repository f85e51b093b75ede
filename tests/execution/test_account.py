"""Predicted collectives, products and argument bytes: equal to those counted by hand, to compiled
programs, and not equal when knowledge is wrong.

Everything at length is in benchmarks/compiler_truth.py; here are its quick cases, and what the
judgement must not let through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from benchmarks.compiled_truth import Truth, predict, truth
from benchmarks.compiler_truth import (
    EXPORTS,
    MODELS,
    Case,
    by_hand,
    cases,
    graph_of,
    hoarding,
    mesh_of,
    plan_of,
)
from planner.emit.program import emit
from planner.execution import collectives
from planner.execution.collective import CollectiveUse, traffic
from planner.execution.even_collectives import _reduction
from planner.execution.layout_flow import derive, own_zero_stage
from planner.execution.loops import repeated_blocks
from planner.execution.plan import Plan
from planner.execution.recompute import Recomputed
from planner.execution.shared_collectives import Merged
from planner.graph.ir import Graph, Node, Tensor
from planner.ops.cost import Reads
from planner.ops.lookup import rule_of
from planner.pins.pins import parse_pins
from planner.reader import read_model
from planner.sharding.rule import Split
from planner.verify.numerics import compare, seeded_values
from planner.workload.loss import add_loss
from tests.reader.reader_models import model as onnx_model
from tests.reader.reader_models import rand

COUNTED = [c for c in cases() if c.model not in EXPORTS and by_hand(c, mesh_of(c, 8)) is not None]


@cache
def model(name: str) -> Graph:
    return graph_of(name)


def program(case: Case) -> tuple[Graph, Plan]:
    return model(case.model), plan_of(case, model(case.model), mesh_of(case, 8))


@cache
def compiled(case: Case) -> Truth:
    return truth(*program(case))


@pytest.mark.parametrize("case", COUNTED, ids=lambda c: c.name)
def test_predictions_are_the_bytes_counted_by_hand(case: Case) -> None:
    assert predict(*program(case))[0] == by_hand(case, mesh_of(case, 8))


def test_every_way_of_tensor_parallelism_is_counted_by_hand() -> None:
    assert {c.model for c in COUNTED} == set(MODELS) and {
        (c.split, c.technique) for c in COUNTED
    } == {(s, t) for s in ("megatron", "sequence") for t in ("plain", "micro2")}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", list(cases(quick=True)), ids=lambda c: c.name)
def test_predictions_are_what_is_compiled(case: Case) -> None:
    assert compiled(case).differences() == ()
    assert (
        compiled(case).compiled_flops > 0
        and compiled(case).compiled_argument_bytes > 0
        and sum(compiled(case).compiled.values()) > 0
    )


def half_reduced(*args: Any) -> list[CollectiveUse]:
    """Gradients are reduced for two weights of three."""
    uses = list(REDUCTION(*args))
    return uses if len(args[1]) % 3 else []


REDUCTION = _reduction
WRONG: list[tuple[str, str, str, Callable[..., Any]]] = [
    (
        "gpt/megatron/block",
        "planner.execution.recompute.reads",
        "dot FLOPs",
        lambda *_: Reads(),
    ),  # a backward pass that reads nothing replays nothing
    (
        "gpt/megatron/block",
        "planner.execution.even_collectives.recomputed_in_block",
        "all-reduce over model",
        lambda *_: Recomputed(),
    ),
    (
        "gpt-block/data/zero3",
        "planner.execution.even_collectives.gathering_parts",
        "all-gather",
        lambda *_: (),
    ),  # weights that nobody gathers
    (
        "gpt-block/data/zero3",
        "planner.execution.collectives.stored_layout",
        "argument bytes",
        lambda w: w.layout,
    ),  # weights kept whole
    (
        "gpt-block/megatron/plain",
        "planner.execution.even_collectives._reduction",
        "all-reduce over data",
        half_reduced,
    ),
    (
        "gpt-block/megatron/plain",
        "planner.execution.even_flops.products",
        "dot FLOPs",
        lambda flow, i: (),
    ),
    (
        "gpt-block/sequence/zero3-keep-micro2",
        "planner.execution.even_collectives.microbatch_tensors",
        "over data",
        lambda flow: frozenset(),
    ),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "where", "figure", "instead"),
    WRONG,
    ids=[f"{w[0]}-{w[1].rpartition('.')[2]}" for w in WRONG],
)
def test_wrong_knowledge_is_a_difference(
    name: str, where: str, figure: str, instead: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in cases(quick=True) if c.name == name)
    right = compiled(case)
    monkeypatch.setattr(where, instead)
    payloads, flops, arguments = predict(*program(case))
    wrong = replace(
        right, predicted=payloads, predicted_flops=flops, predicted_argument_bytes=arguments
    )
    assert any(figure in line for line in wrong.differences()), wrong.differences()


def test_equal_conversions_of_equal_values_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes make the same value and both are gathered: compilers do that once, and so does the
    prediction."""
    tensors = {
        n: Tensor(
            n, (8, 8), "float32", "weight" if n[0] == "w" else "input" if n == "x" else "activation"
        )
        for n in ("x", "a", "b", "c", "d", "y", "w1", "w2")
    }
    nodes = (
        Node("a", "Relu", ("x",), ("a",)),
        Node("b", "Relu", ("x",), ("b",)),
        Node("c", "MatMul", ("a", "w1"), ("c",)),
        Node("d", "MatMul", ("b", "w2"), ("d",)),
        Node("y", "Add", ("c", "d"), ("y",)),
    )
    graph = Graph(
        "twice",
        nodes,
        tensors,
        ("x",),
        ("y",),
        weights=dict.fromkeys(("w1", "w2")),
        labels={w: w for w in ("w1", "w2")},
    )
    cut = Split.of({"d0": ["data"]})
    plan = Plan((("data", 8),), {n.id: cut if n.id in "ab" else Split() for n in nodes})
    right = truth(graph, plan, workload="infer", optimizer="")
    assert right.differences() == () and right.compiled == {("all-gather", "data"): 4 * 64}
    for module in ("planner.execution.even_collectives", "planner.execution.shared_collectives"):
        monkeypatch.setattr(f"{module}.merged", lambda *_: Merged(frozenset(), frozenset(), {}))
    assert predict(graph, plan, workload="infer")[0] == {("all-gather", "data"): 2 * 4 * 64}


def test_unwrapping_takes_every_wrapping_off() -> None:
    """What the memory benchmark compiles beside a level-3 program keeps all that is gathered: no
    checkpoint is left around blocks and parts."""
    for unroll in (True, False):
        graph, plan = program(Case("gpt", "data", "zero3"))
        made = emit(graph, plan, workload="train", unroll=unroll)
        body = hoarding(made).text.split("def loss_of(")[1].split("\ndef ")[0]
        assert (
            "recompute(" in made.text.split("def loss_of(")[1]
            and "recompute(" not in body
            and "jax.checkpoint" not in body
        )
        compile(hoarding(made).text, "bare.py", "exec")


def test_wire_bytes_of_a_ring_are_exact() -> None:
    mesh = {"data": 2, "model": 3}
    uses = [
        CollectiveUse("all-reduce", ("model",), 10, 2, "forward", "x"),
        CollectiveUse("all-gather", ("data", "model"), 7, 1, "forward", "y"),
        CollectiveUse("all-to-all", ("data",), 8, 1, "backward", "z"),
    ]
    found = traffic(uses, ("data", "model"), mesh)
    assert found["all-reduce"]["model"] == {"payload": 20, "wire": Fraction(80, 3)}
    assert found["all-gather"]["data+model"] == {"payload": 7, "wire": Fraction(35, 6)}
    assert found["all-to-all"]["data"] == {"payload": 8, "wire": Fraction(4)}


def test_a_difference_names_kind_axes_and_both_figures() -> None:
    one = Truth({("all-reduce", "data"): 4}, {("all-reduce", "model"): 8}, 10, 11, 5, 5, 0)
    assert one.differences() == (
        "all-reduce over data: predicted 4 bytes, compiled 0",
        "all-reduce over model: predicted 0 bytes, compiled 8",
        "dot FLOPs: predicted 10, compiled 11",
    )


def planned(
    source: str, pins: str, microbatches: int = 1, nodes: Mapping[str, Any] | None = None
) -> tuple[Graph, Plan]:
    """A model of the zoo under pins, on 8 devices. nodes: pins of operators by glob."""
    import planner
    from planner.whatif.reprice import open_recorded

    pinned = replace(parse_pins(f"{pins},micro={microbatches}"), nodes=nodes or {})
    found = planner.plan(
        source, devices=8, batch=32, hardware="cpu", precision="fp32", pins=pinned, baselines=False
    )
    graph = open_recorded(found, source).graph(microbatches)
    return graph, found.plan_for(graph)


def resnet(microbatches: int) -> tuple[Graph, Plan]:
    """A ResNet whose shortcut has a bias beside the one of what it is added to; data parallel."""
    return planned("zoo:resnet-tiny", "dp=8,zero=0", microbatches)


def test_biases_of_one_sum_have_one_gradient() -> None:
    flow, label = derive(*resnet(1), training=True), "layer2.0.downsample.bn.bias"
    uses = [u for u in collectives.collectives(flow) if u.phase == "gradient"]
    assert [u.what for u in uses if u.merged] == [label]
    (one,) = (u for u in uses if u.what == label)
    every = traffic([replace(u, merged=False) for u in uses], flow.plan.order, dict(flow.plan.mesh))
    sent = traffic(uses, flow.plan.order, dict(flow.plan.mesh))
    assert (
        every["all-reduce"]["data"]["payload"] - sent["all-reduce"]["data"]["payload"]
        == one.payload_bytes
        == 64
    )
    graph, plan = resnet(2)
    summed, scattered = (
        [
            u
            for u in collectives.collectives(
                derive(graph, replace(plan, zero_stage=zero, zero_axes=("data",)), training=True)
            )
            if u.merged
        ]
        for zero in (0, 2)
    )
    assert [(u.what, u.kind, u.count) for u in summed] == [(label, "all-reduce", 1)]
    assert [(u.what, u.kind, u.count) for u in scattered] == [(label, "reduce-scatter", 2)]


def test_gradients_of_a_slice_and_of_what_was_scattered_are_gathered_once() -> None:
    """Both operands of a sum have its gradient: of one the piece was cut out, of the other partial
    sums were scattered."""
    text = (
        "(float[16,16] x) => (float[a,b] y) { h = MatMul(x, v) g = MatMul(x, u) t = Tanh(g) q ="
        " MatMul(t, w) s = Add(h, q) y = Tanh(s) }"
    )
    graph = add_loss(
        read_model(onnx_model(text, 18, v=rand(16, 16), u=rand(16, 16), w=rand(16, 16)), batch=16),
        "mse",
    )
    whole, cut = dict[str, list[str]](), {"d1": ["model"]}
    cuts = {"h": whole, "g": {"n": ["model"]}, "q": {"k": ["model"]}, "t": cut, "s": cut, "y": cut}
    splits = {
        n.id: Split.of({rule_of(n, graph)[0].factors[0]: ["data"], **cuts.get(n.outputs[0], {})})
        for n in graph.nodes
    }
    found = truth(graph, Plan((("data", 4), ("model", 2)), splits))
    assert (
        not found.differences() and found.compiled["all-gather", "model"] == 2 * 4 * 16 * 4
    )  # this gradient and that of the result: rows, columns, float32


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("op", "zero"),
    [
        ("MatMul", 0),
        ("Conv", 0),
        *(
            pytest.param(op, zero, marks=pytest.mark.slow)
            for op in ("MatMul", "Conv")
            for zero in (1, 2)
        ),
    ],
)
def test_equal_gradients_of_microbatches_are_reduced_once(op: str, zero: int) -> None:
    """In a loop over microbatches (MatMul), where compilers do not see that two sums are equal, and
    written out as CPUs get convolutions, where they do."""
    result, weight, bias = {
        "MatMul": ("float[a,b] y", (16, 8), (8,)),
        "Conv": ("float[a,b,c,d] y", (8, 16, 1, 1), (8, 1, 1)),
    }[op]
    operand = "float[16,16] x" if op == "MatMul" else "float[16,16,4,4] x"
    text = (
        f"({operand}) => ({result}) {{ h = Tanh(x) p = {op}(x, v) q = Add(p, b) r = {op}(h, w) s ="
        " Add(r, c) y = Add(q, s) }"
    )
    graph = add_loss(
        read_model(
            onnx_model(text, 18, v=rand(*weight), w=rand(*weight), b=rand(*bias), c=rand(*bias)),
            batch=16,
        ),
        "mse",
    )
    splits = {
        node.id: Split.of({rule_of(node, graph)[0].factors[0]: ["data"]}) for node in graph.nodes
    }
    plan = Plan(
        (("data", 8),), splits, microbatches=2, zero_stage=zero, zero_axes=("data",) if zero else ()
    )
    assert 'SAME_GRADIENT = {"c": "b"}' in emit(graph, plan, workload="train").text
    (one,) = [u for u in collectives.collectives(derive(graph, plan, training=True)) if u.merged]
    assert (one.what, one.kind) == ("c", "reduce-scatter" if zero else "all-reduce")
    assert not truth(graph, plan).differences()
    found, _ = compare(
        graph, plan, workload="train", backend="shard_map", values=seeded_values(graph, {})
    )
    assert found.compared == 4 and found.gradients < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_compilers_send_one_gradient_for_both(microbatches: int) -> None:
    found = truth(*resnet(microbatches))
    assert not found.differences() and found.compiled


@pytest.mark.parametrize(
    ("rows", "columns", "dots", "work"), [(8, 8, 512, 896), (16, 1, 1088, 1120)]
)
def test_gradients_that_are_sums_of_one_term_are_no_products(
    rows: int, columns: int, dots: int, work: int
) -> None:
    """Of a weight where a device has one row, of what a weight of one column is multiplied with:
    compilers multiply there."""
    text = f"(float[{rows},16] x) => (float[a,b] y) {{ h = MatMul(x, v) y = MatMul(h, w) }}"
    graph = add_loss(
        read_model(onnx_model(text, 18, v=rand(16, 8), w=rand(8, columns)), batch=rows), "mse"
    )
    plan = Plan(
        (("data", 8),),
        {node.id: Split.of({rule_of(node, graph)[0].factors[0]: ["data"]}) for node in graph.nodes},
    )
    found = truth(graph, plan)
    assert not found.differences() and found.compiled_flops == dots
    assert collectives.dot_flops(derive(graph, plan, training=True), as_compiled=False) == work


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(
    ("operator", "gates", "attributes"),
    [("GRU", 3, ""), ("GRU", 3, ", linear_before_reset = 1"), ("RNN", 1, ""), ("LSTM", 4, "")],
)
def test_products_of_recurrences_are_those_compiled(
    operator: str, gates: int, attributes: str, rows: int
) -> None:
    """With the sequence, and at each step with the hidden state, whose weight's gradient is no
    product where a device has one row. A bias has none."""
    text = (
        f"(float[4,{rows},6] x) => (float[4,1,{rows},5] y) {{ h = MatMul(x, v) y = {operator}"
        f" <hidden_size = 5{attributes}> (h, w, r, b) }}"
    )
    graph = add_loss(
        read_model(
            onnx_model(
                text,
                18,
                v=rand(6, 3),
                w=rand(1, gates * 5, 3),
                r=rand(1, gates * 5, 5),
                b=rand(1, 2 * gates * 5),
            )
        ),
        "mse",
    )
    batch = {"MatMul": "b1", operator: "b", "MSELoss": "d1"}
    plan = Plan(
        (("data", 8),),
        {
            node.id: Split.of({batch[node.op]: ["data"]})
            for node in graph.nodes
            if batch.get(node.op) in rule_of(node, graph)[0].factors
        },
    )
    found = truth(graph, plan)
    assert not found.differences() and found.compiled_flops > 0


def test_what_a_function_converted_is_handed_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor read cut inside the function that makes it, then whole and then cut outside: it is
    cut once, and its gradient gathered once."""
    monkeypatch.setattr("planner.emit.program.STAGE_NODES", 2)
    text = (
        "(float[8,6] x) => (float[8,8] y) { t = MatMul(x, v) a = Relu(t) b = MatMul(t, w) c ="
        " Tanh(t) s = Add(a, c) y = Add(s, b) }"
    )
    graph = add_loss(read_model(onnx_model(text, 18, v=rand(6, 8), w=rand(8, 8))), "mse")
    cut = {
        "a": {"d0": ["data"]},
        "b": {"n": ["data"]},
        "c": {"d0": ["data"]},
        "s": {"d0": ["data"]},
    }
    plan = Plan(
        (("data", 8),),
        {node.id: Split.of(cut[node.outputs[0]]) for node in graph.nodes if node.outputs[0] in cut},
    )
    assert (
        emit(graph, plan, workload="train").text.count("cut(") == 2
    )  # its definition, and that of t
    assert not truth(graph, plan, unroll=False).differences()


def counts(graph: Graph, plan: Plan, kind: str, what: str) -> dict[str, int]:
    """How often a tensor's or a node's collectives of a kind run in each phase."""
    flow = derive(graph, plan, training=True)
    found = [
        u
        for u in collectives.collectives(flow, repeated_blocks(flow)[0])
        if u.kind == kind and u.what == what
    ]
    return {
        phase: sum(u.count for u in found if u.phase == phase)
        for phase in ("forward", "recompute", "gradient")
    }


def test_a_table_of_two_lookups_is_gathered_once_for_both() -> None:
    graph, plan = planned(
        "zoo:t5-tiny",
        "dp=8,zero=3",
        # read by the encoder's and the decoder's lookup, and by the head, whose products read it again
    )
    assert counts(graph, plan, "all-gather", "shared.weight") == {
        "forward": 2,
        "recompute": 1,
        "gradient": 0,
    }
    assert counts(graph, plan, "reduce-scatter", "shared.weight") == {
        "forward": 0,
        "recompute": 0,
        "gradient": 3,
    }


@pytest.mark.parametrize(("pins", "again"), [("dp=8,zero=3", 1), ("dp=4,tp=2,zero=3", 0)])
def test_a_head_is_not_gathered_again_where_what_a_collective_made_of_it_is_kept(
    pins: str, again: int
) -> None:
    graph, plan = planned("zoo:gpt-tiny", pins)
    flow, table = (
        derive(graph, plan, training=True),
        next(n for n in graph.weights if graph.labels.get(n, n) == "transformer.wte.weight"),
    )
    ways = [flow.trees[table].path(flow.need[place]) for place in graph.consumers[table]]
    assert any(step.forward for way in ways for step in way) is not bool(again)
    assert counts(graph, plan, "all-gather", "transformer.wte.weight")["recompute"] == again


def test_an_exchange_of_tokens_is_not_repeated_for_results_that_nothing_reads() -> None:
    graph, plan = planned(
        "zoo:mixtral-tiny",
        "expert=2,dp=4,zero=0,recompute=block-keep",
        nodes={"*experts*": {"split": {"expert-b": ["expert"]}}},
    )
    experts, *_ = [n.id for n in graph.nodes if n.op == "RoutedExperts"]
    rounds, sent = (
        counts(graph, plan, "all-reduce", experts),
        counts(graph, plan, "all-to-all", experts),
    )
    assert (
        rounds["forward"] == rounds["recompute"] > 0
        and sent["forward"] == 3 * rounds["forward"]
        and not sent["recompute"]
    )


@pytest.mark.parametrize(
    ("shape", "level"),
    [((32,), 1), ((32, 1, 1), 1), ((1, 32), 1), ((1,), 1), ((32, 2), 3), ((32, 16, 1, 1), 3)],
)
def test_biases_and_scales_of_any_shape_stay_whole_under_level_3(
    shape: tuple[int, ...], level: int
) -> None:
    assert own_zero_stage(3, shape) == level and [own_zero_stage(n, shape) for n in (0, 1, 2)] == [
        0,
        1,
        2,
    ]
