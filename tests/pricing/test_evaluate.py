"""What a strategy says about itself: bounds, tokens, the batch, memory and arithmetic against hand
counts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from planner.analysis.batch_factor import batch_factors
from planner.analysis.facts import GraphFacts
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor
from planner.machine.mesh_choices import pinned_mesh
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.search.build_request import make_request
from planner.search.cost_table import tokens_per_step
from planner.search.search import Search
from planner.search.to_strategy import compose
from planner.space.families import batch_only
from planner.workload.open import open_model


def test_tokens_are_looked_up_whole():
    assert tokens_per_step(None, open_model("zoo:gpt-tiny,layers=1", 8)) == 8 * 16  # type: ignore[arg-type]
    # Columns of categories are not positions of a sequence.
    tensors = {
        "ids": Tensor("ids", (8, 3), "int64", "input"),
        "table": Tensor("table", (50, 4), "float32", "weight"),
        "column": Tensor("column", (8, 1), "int64"),
        "row": Tensor("row", (8, 1, 4), "float32"),
    }
    nodes = (
        Node(
            "cut",
            "Slice",
            ("ids",),
            ("column",),
            {"axes": (1,), "starts": (0,), "ends": (1,), "steps": (1,)},
        ),
        Node("look", "Gather", ("table", "column"), ("row",), {"axis": 0}),
    )
    graph = Graph("columns", nodes, tensors, ("ids",), ("row",), weights={"table": None})
    assert tokens_per_step(graph, SimpleNamespace(plain=graph, batch=8)) == 8  # type: ignore[arg-type]


def test_a_history_that_is_averaged_is_no_sequence_of_tokens():
    """Of a two-tower model the length of a history is none of the model's work, unless a product
    works on its rows."""
    shapes = {
        "ids": (16, 20),
        "rows": (16, 20, 8),
        "mean": (16, 8),
        "scores": (16, 4),
        "each": (16, 20, 4),
    }
    tensors = {
        n: Tensor(
            n, s, "int64" if n == "ids" else "float32", "input" if n == "ids" else "activation"
        )
        for n, s in shapes.items()
    }
    tensors |= {
        n: Tensor(n, s, "float32", "weight") for n, s in {"table": (50, 8), "w": (8, 4)}.items()
    }
    look = Node("look", "Gather", ("table", "ids"), ("rows",), {"axis": 0})
    averaged = (
        look,
        Node("mean", "ReduceMean", ("rows",), ("mean",), {"axes": (1,), "keepdims": 0}),
        Node("dot", "MatMul", ("mean", "w"), ("scores",)),
    )
    whole = (look, Node("dot", "MatMul", ("rows", "w"), ("each",)))
    for nodes, out, tokens in ((averaged, "scores", 16), (whole, "each", 16 * 20)):
        graph = Graph(
            "towers", nodes, tensors, ("ids",), (out,), weights={"table": None, "w": None}
        )
        assert tokens_per_step(graph, SimpleNamespace(plain=graph, batch=16)) == tokens  # type: ignore[arg-type]


def test_batch_is_not_looked_for_in_other_inputs():
    shapes = {"positions": (6, 4), "x": (8, 6, 4), "y": (8, 6, 4)}
    tensors = {
        n: Tensor(n, s, "float32", "activation" if n == "y" else "input") for n, s in shapes.items()
    }
    graph = Graph(
        "g",
        (Node("add", "Add", ("positions", "x"), ("y",)),),
        tensors,
        ("positions", "x"),
        ("y",),
        dims={"batch": 8},
    )
    assert batch_factors(GraphFacts.of(graph, training=False)) == ("d0",)


@pytest.fixture(scope="module")
def llama():
    """Two layers of a Llama 3 8B on eight devices, the batch cut: priced per ZeRO stage."""
    request = make_request(devices=8, hardware="h100-sxm", topology=None, baselines=False)
    model = open_model("zoo:llama3-8b,layers=2,seq=256", 8, batch=8)
    search = Search(model, request)
    mesh = pinned_mesh(request.topology, {"data": 8})
    base = search.base(1)
    allowed = batch_only(base, mesh.shape)
    splits = {n.id: allowed[base.shared[i]][0] for i, n in enumerate(base.graph.nodes)}
    pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)
    return base, [
        price_plan(
            base,
            Plan(
                mesh.shape, splits, zero_stage=zero, zero_axes=("data",), repeated_blocks=base.runs
            ),
            pricer,
        )[0]
        for zero in range(4)
    ]


def test_memory_of_optimizer_levels_is_that_of_the_recipe(llama):
    base, costs = llama
    n = base.graph.parameters
    scales = (2 * 2 + 1) * 4096  # two norms a layer and the last one stay whole at ZeRO stage 3
    table = head = 128256 * 4096
    behind = head + 4096
    for zero, cost in enumerate(costs):
        whole = n if zero < 3 else scales + (n - scales) / 8
        # The table's comes last; below stage 3 those of head and last norm lie where the weights
        # lay, and what the stage leaves of them waits.
        gradients = n - table - behind + (behind / 8 if zero else 0)
        if zero == 3:
            gradients = scales + (n - table - scales) / 8
        own = (2 * whole, 2 * gradients, 12 * n / (8 if zero else 1))
        assert (cost.memory.parameters, cost.memory.gradients, cost.memory.optimizer) == own


def test_repeats_that_gather_weights_again_are_cut_out_of_stacks_whole(llama):
    """Beside the stacks of two repeats one more of all that a repeat saves, but what enters it."""
    _, costs = llama
    below, gathered = (cost.memory.activations for cost in costs[2:])
    q, kv, hidden = 4096, 1024, 14336
    one = 2 * (3 * 4096 + 2 * q + 2 * kv + 2 * hidden)  # two norms' results, residual; q, context
    assert gathered / below - 1 == pytest.approx(one / (2 * (one + 2 * 4096)), rel=0.01)


def test_flops_are_six_per_parameter_and_token_and_attention(llama):
    _, costs = llama
    tokens, width, vocabulary, layers, sequence = 8 * 256, 4096, 128256, 2, 256
    matrices = (
        layers * (2 * width * width + 2 * width * 1024 + 3 * width * 14336) + width * vocabulary
    )  # the lookup multiplies nothing
    attention = (
        3 * 4 * tokens * sequence * width * layers
    )  # scores and values, forward and twice that backward; what is made again left out
    for cost in costs:
        assert cost.flops_per_device * 8 == 6 * matrices * tokens + attention
        assert cost.distinct_work == 1.0


def test_gradients_are_reduced_once_at_every_level(llama):
    base, costs = llama
    payload = 2 * base.graph.parameters
    for zero, cost in enumerate(costs):
        moved = {
            kind: sum(int(c["payload"]) for c in axes.values())
            for kind, axes in cost.traffic.items()
        }  # type: ignore[call-overload, misc]
        assert sum(moved.get(k, 0) for k in ("all-reduce", "reduce-scatter")) == pytest.approx(
            payload, abs=64
        )
        assert moved.get("all-gather", 0) == 0 if zero == 0 else moved["all-gather"] >= payload


def test_bound_above_the_price_by_rounding_is_the_price():
    request = make_request(devices=2, hardware="h100-sxm", topology=None, baselines=False)
    model = open_model("zoo:gpt-tiny,layers=1", 2)
    found = Search(model, request).run()
    assert found.best is not None
    step = found.best.cost.step_time_s
    found.bound_s = float(np.nextafter(step * (1 + 1e-8), 1))
    assert compose(model, request, found, {}, ()).solver["status"] == "optimal"
    found.bound_s = step * 1.01  # no bound at all
    assert compose(model, request, found, {}, ()).solver["gap"] is None


@pytest.mark.parametrize(
    ("zero", "recompute", "micro"),
    [pytest.param(1, "none", 1, marks=pytest.mark.slow), (2, "block", 2)],
)
def test_predicted_peak_is_the_compiler_s(zero, recompute, micro):
    """A GPT whose blocks and vocabulary both matter, 8 devices, data parallel: within 10 %, without
    the allowance for fragmentation."""
    from dataclasses import replace

    import models_zoo
    from benchmarks.hand_plans import data_parallel
    from planner.emit.program import emit
    from planner.graph.repeats import hoist
    from planner.reader import read_model
    from planner.verify.compiled import compile_step
    from planner.workload.loss import add_loss

    graph = hoist(
        add_loss(
            read_model(
                models_zoo.build("zoo:gpt2-small,layers=6,hidden=512,heads=8,vocab=8192,seq=256"),
                batch=8 * 8,
            )
        )
    )
    base = GraphFacts.of(graph, training=True)
    request = make_request(
        devices=8, hardware="h100-sxm", topology=None, baselines=False, precision="fp32"
    )
    mesh = pinned_mesh(request.topology, {"data": 8})
    plan = Plan(
        mesh.shape,
        data_parallel(graph, mesh.shape),
        zero_stage=zero,
        zero_axes=("data",),
        recompute=recompute,
        microbatches=micro,
        repeated_blocks=base.runs,
    )
    pricer = Pricer(
        request.topology, mesh, replace(request.runtime, memory_slack=0.0), request.recipe
    )
    predicted = price_plan(base, plan, pricer)[0].memory.total
    found = compile_step(emit(graph, plan, workload="train"), "train").memory_analysis()
    compiled = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
    assert compiled > 100 * 2**20
    assert 0.9 * compiled < predicted < 1.1 * compiled, (predicted, compiled)


def test_attention_works_beside_the_residual_stream_s_gradient():
    """In a repeated block, trained, on a device without a fused kernel: operands, result and their
    gradients, float32 scores, the weights and the scores' gradient as computed with, and the stream
    twice."""
    import models_zoo
    from planner.graph.repeats import hoist
    from planner.pricing.kernels import working_bytes
    from planner.reader import read_model
    from planner.sharding.rule import Split
    from planner.workload.loss import add_loss

    graph = hoist(add_loss(read_model(models_zoo.build("zoo:gpt-tiny,layers=2,seq=16"), batch=4)))
    request = make_request(
        devices=1, hardware="v100-32gb", topology=None, baselines=False, precision="bf16-mixed"
    )
    pricer = Pricer(
        request.topology,
        pinned_mesh(request.topology, {"data": 1}),
        request.runtime,
        request.recipe,
    )
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "Attention")
    rows, heads, queries, _ = graph.tensors[graph.nodes[i].inputs[0]].shape
    ins, outs, scores = 3000.0, 1000.0, rows * heads * queries * 16
    trained, frozen = (
        working_bytes(GraphFacts.of(graph, training=t), i, Split(), ins, outs, 0.0, pricer)
        for t in (True, False)
    )
    assert i in GraphFacts.of(graph, training=True).repeated
    assert trained == 2 * (ins + outs) + scores * (4 + 2 + 2) + 2 * outs
    assert frozen == ins + outs + scores * (4 + 2)


@pytest.mark.parametrize(("hardware", "bytes_"), [("h100-sxm", 2 * (3000 + 1000)), ("v5e", 3000)])
def test_elementwise_work_in_a_block_takes_no_room_of_its_own_on_a_tpu(
    hardware: str, bytes_: float
) -> None:
    """Its gradient is made by the product that reads it, in the place of its result's; a GPU's
    kernels have operands, result and both gradients beside one another."""
    import models_zoo
    from planner.graph.repeats import hoist
    from planner.pricing.kernels import working_bytes
    from planner.reader import read_model
    from planner.sharding.rule import Split
    from planner.workload.loss import add_loss

    spec = "zoo:gpt-tiny,layers=3,seq=16"
    graph = hoist(add_loss(read_model(models_zoo.build(spec), batch=4)))
    request = make_request(devices=1, hardware=hardware, topology=None, baselines=False)
    mesh = pinned_mesh(request.topology, {"data": 1})
    pricer = Pricer(request.topology, mesh, request.runtime, request.recipe)
    base = GraphFacts.of(graph, training=True)
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "Gelu" and i in base.repeated)
    assert working_bytes(base, i, Split(), 3000.0, 1000.0, 0.0, pricer) == bytes_
