"""jit programs of plans that axes do not divide evenly: weights are kept in padded pieces, nothing
is kept whole for it, and programs stay equal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import models_zoo
from benchmarks.hand_plans import megatron, mlp_megatron
from planner.emit.program import emit
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.graph.repeats import hoist
from planner.reader import read_model
from planner.verify import worker
from planner.verify.numerics import compare, seeded_values
from planner.verify.predicted import predict
from planner.workload.loss import add_loss

MESH = (("data", 2), ("model", 4))
ODD_GPT = "zoo:gpt-tiny,vocab=259,layers=2,seq=8"


def megatron_of(
    spec: str, batch: int = 8, sequence: bool = False, **changes: object
) -> tuple[Graph, Plan]:
    graph = hoist(add_loss(read_model(models_zoo.build(spec), batch=batch)))
    splits = (
        mlp_megatron(graph, MESH) if "mlp" in spec else megatron(graph, MESH, sequence=sequence)
    )
    return graph, replace(Plan(MESH, splits), **changes)  # type: ignore[arg-type]


def equal(graph: Graph, plan: Plan, *, unroll: bool = True, workload: str = "train") -> None:
    found, _ = compare(
        graph,
        plan,
        workload=workload,
        backend="jit",
        values=seeded_values(graph, {}),
        unroll=unroll,
        step=workload == "train",
    )
    assert (
        found.gradients < 1e-4
        and found.loss == pytest.approx(found.reference_loss, rel=1e-5)
        and (found.update or 0.0) < 1e-4
    )


def test_an_odd_vocabulary_is_looked_up_multiplied_and_scored_in_pieces() -> None:
    graph, plan = megatron_of(ODD_GPT)
    text = emit(graph, plan, workload="train", backend="jit", unroll=True).text
    assert '"transformer.wte.weight": ((259, 64), "float", 0, 0.0, P("model")),' in text
    inside = {
        line.rpartition("  # ")[2].split(" ")[0].rpartition("/")[2]
        for line in text.splitlines()
        if re.match(r"\s+\w+ = by_piece\(", line)
    }
    assert (
        {"Gather", "CrossEntropyLoss"} <= inside
        and "pad_to(" not in text
        and "slice_in_dim(params" not in text
    )
    assert re.search(
        r'by_piece\(lambda .*, \(P\("data"\), P\("model"\)\), P\("data", None, "model"\)\)\(\w+,'
        r' params\["transformer.wte.weight"\]\)',
        text,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "unroll"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        (1, True),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_odd_vocabularies_and_widths(zero: int, unroll: bool) -> None:
    """259 rows over 4; at ZeRO stages 1 and 3 state is cut along data too, which divides no padded dim
    evenly."""
    equal(
        *megatron_of(f"{ODD_GPT},ff=130", zero_stage=zero, zero_axes=("data",) if zero else ()),
        unroll=unroll,
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("spec", "batch", "sequence", "recompute"),
    [
        ("zoo:mlp-tiny,hidden=50", 6, False, "none"),
        ("zoo:mlp-tiny", 7, False, "none"),
        pytest.param(
            "zoo:llama-tiny,layers=2,vocab=131,seq=18", 4, True, "block", marks=pytest.mark.slow
        ),
        pytest.param("zoo:bert-tiny,vocab=131", 3, False, "none", marks=pytest.mark.slow),
    ],
)
def test_other_models(spec: str, batch: int, sequence: bool, recompute: str) -> None:
    """Rows of the batch, positions, and widths that do not go up."""
    equal(*megatron_of(spec, batch, sequence, recompute=recompute))


def test_memory_and_work_are_those_of_pieces() -> None:
    """Arguments and outputs to the byte, and no product done twice."""
    graph, plan = megatron_of("zoo:gpt-tiny,vocab=259,layers=1")
    compiled = worker.compile_program(emit(graph, plan, workload="train", backend="jit"), "train")
    found = {
        f.what: f
        for f in worker.figures(predict(graph, plan, workload="train"), plan, compiled, "jit", 0)
    }
    for what in ("argument bytes", "output bytes", "dot FLOPs"):
        assert found[what].predicted == found[what].compiled
