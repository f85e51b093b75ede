"""Kernels that exchange with their neighbours equal the unsharded ones under every split that has
them exchange."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.ops.lookup import rule_of
from planner.pins.pins import from_table
from tests.ops.oracle import Case, all_splits, build, mismatch
from tests.ops.oracle_neighbours import neighbour_cases, row_cases

CASES = (*neighbour_cases(), *row_cases())


def exchanged(case: Case) -> str:
    """What is cut where the kernel exchanges."""
    graph, _ = build(case)
    rule, _ = rule_of(graph.nodes[0], graph)
    return "ring" if rule.paired else next(iter(rule.spatial))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exchange_equals_unsharded(case: Case) -> None:
    """One split that exchanges, over both axes for every other case and over one beside whatever
    else is cut for the rest; all of them in the slow suite."""
    factor = exchanged(case)
    wanted = 2 - [c.name for c in CASES].index(case.name) % 2
    splits = [s for s in all_splits(case) if len(s.axes(factor)) == wanted]
    assert mismatch(case, [random.Random(case.name).choice(splits)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_split_equals_unsharded(case: Case) -> None:
    assert mismatch(case, all_splits(case)) == []


def planned(tmp_path: Path, inside: str) -> tuple[planner.Strategy, str]:
    """A plan that keeps positions over "sequence" (4 devices) and cuts `inside` by it in attention,
    and its program."""
    pins = tmp_path / "pins.toml"
    pins.write_text(
        f'[mesh]\ndata = 2\nsequence = 4\n["*/attn/Attention"]\nsplit = {{ b = ["data"], {inside} ='
        ' ["sequence"] }\n'
    )
    strategy = planner.plan(
        MODEL, devices=8, batch=16, pins=pins, precision="fp32", baselines=False
    )
    assert [row["split"] for row in strategy.nodes.values() if row["op"] == "Attention"] == [
        {"b": ["data"], inside: ["sequence"]}
    ]
    return strategy, planner.emit(strategy, MODEL)


MODEL = "zoo:gpt-tiny,seq=64"


def test_positions_become_heads_by_all_to_all(tmp_path: Path) -> None:
    """Ulysses: q, k and v arrive cut along positions and leave cut along heads, the result the
    other way; nothing is gathered."""
    strategy, text = planned(tmp_path, "g")
    assert "all_to_all(" in text
    moved = strategy.costs["communication_bytes_per_device"]
    assert set(moved["all-to-all"]) == {"sequence"}
    one = 8 * 16 * 64 * 4  # positions, width: bytes of one device's activations [8, 16, 64]
    assert (
        moved["all-to-all"]["sequence"]["payload"] == 2 * 2 * 4 * one
    )  # layers, passes, and q, k, v and the result


def test_keys_pass_by_on_a_ring(tmp_path: Path) -> None:
    strategy, text = planned(tmp_path, "ring")
    assert text.count("= balanced_ring_attention(") == 1  # one repeated block
    assert "all_to_all(" not in text
    one = 8 * 16 * 64 * 4
    # k and v past 3 devices in each pass, their gradients past 3 and home; halves of q, k, v and
    # the result change places, in the backward pass these and four gradients.
    assert strategy.costs["communication_bytes_per_device"]["collective-permute"]["sequence"][
        "payload"
    ] == 2 * 2 * one * (3 + 3 + 4) + 2 * one // 2 * (4 + 4 + 4)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("layers", "recompute", "devices", "window"),
    [(1, "none", 2, 0), (2, "block-keep", 2, 0), (2, "block", 4, 0), (1, "none", 8, 0)]
    + [(1, "none", 4, 6), (2, "block", 8, 6), (2, "save:context", 4, 0)]
    + [(2, "save:q,k,v,context", 8, 6)],
)
def test_both_passes_of_a_ring_run_as_predicted(
    layers: int, recompute: str, devices: int, window: int
) -> None:
    """Where both passes stand in one computation (a block alone, or computed again) compilers made
    one of what both do: of the loops of two devices, which run once, keeping a block's scores, and
    of exchanges of halves. Pieces of four or eight positions; keys before a window are not sent."""
    from benchmarks.compiled_truth import truth
    from planner.verify.worker import recorded_model

    source = f"zoo:gpt-tiny,layers={layers},seq=32"
    techniques = {"zero_stage": 0, "microbatches": 1, "recompute": recompute}
    pins = from_table(
        {
            "mesh": {"data": 8 // devices, "sequence": devices},
            "techniques": techniques,
            "*Attention": {"split": {"ring": ["sequence"]}},
        }
    )
    strategy = planner.plan(
        source, devices=8, batch=16, pins=pins, precision="fp32", baselines=False
    )
    graph = recorded_model(strategy, source).graph(1)
    windowed = (
        replace(node, attrs={**node.attrs, "window": window}) if node.op == "Attention" else node
        for node in graph.nodes
    )
    graph = replace(graph, nodes=tuple(windowed)) if window else graph
    found = truth(graph, strategy.plan_for(graph), unroll=False)
    assert found.differences() == () and ("collective-permute", "sequence") in found.compiled


def test_rows_travel_as_predicted() -> None:
    """A residual network's rows over four devices: what neighbours send each other, in both passes,
    is what the compiled program sends."""
    import models_zoo
    from benchmarks.compiled_truth import truth
    from benchmarks.hand_plans import follow
    from planner.execution.plan import Plan
    from planner.reader import read_model
    from planner.sharding.layout import Layout
    from planner.workload.loss import add_loss

    graph, mesh = (
        add_loss(read_model(models_zoo.build("zoo:resnet-tiny"), batch=4)),
        (("data", 2), ("model", 4)),
    )
    image = Layout((("data",), (), ("model",), ()))
    splits = follow(
        graph,
        mesh,
        {
            n: image if len(graph.tensors[n].shape) == 4 else Layout((("data",),))
            for n in graph.inputs
        },
        {},
    )
    result = truth(graph, Plan(mesh, splits))
    key = ("collective-permute", "model")
    assert result.predicted[key] == result.compiled[key] > 0
