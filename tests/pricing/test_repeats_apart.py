"""Blocks that are made again: the values of a repeat count once, and gradients come on top."""

from __future__ import annotations

import pytest

from planner.analysis.facts import GraphFacts
from planner.machine.mesh_choices import pinned_mesh
from planner.ops import operator_of
from planner.pricing.kernels import working_bytes
from planner.pricing.pricer import Pricer
from planner.pricing.saved_activations import repeat_is_apart
from planner.pricing.workspaces import scatters_later
from planner.search.build_request import make_request
from planner.sharding.rule import Split
from planner.workload.model import Model, Workload

LLAMA = "zoo:llama-tiny,layers=3"
INS, OUTS, WEIGHTS = 3000.0, 1000.0, 500.0


def priced(
    devices: int = 8, hardware: str = "h100-sxm", source: str = LLAMA, **more: str
) -> tuple[GraphFacts, Pricer]:
    request = make_request(devices=devices, hardware=hardware, topology=None, **more)
    work = Workload(kind="train", batch=16)
    base = GraphFacts.of(Model.open(source, work, devices).graph(1), training=True)
    mesh = pinned_mesh(request.topology, {"data": devices})
    return base, Pricer(request.topology, mesh, request.runtime, request.recipe)


def work(base: GraphFacts, pricer: Pricer, i: int, apart: bool) -> float:
    return working_bytes(base, i, Split(), INS, OUTS, WEIGHTS, pricer, apart)


@pytest.mark.parametrize("hardware", ["h100-sxm", "tpu-v5p"])
def test_gradients_come_on_top_of_what_a_repeat_has(hardware: str) -> None:
    """A product has gradients of operand, result and weight; the one behind a gated unit its
    operand, too, which is made again for it; everything twice where values are cut out of what
    all repeats save, and for what is in no block."""
    base, pricer = priced(hardware=hardware)
    products = [
        i
        for i in sorted(base.repeated)
        if operator_of(base.graph.nodes[i].op).kind == "product" and i not in base.handing_back
    ]
    behind, plain = (
        [i for i in products if (i in base.gated.inside) is inside] for inside in (True, False)
    )
    assert behind and plain
    for i in plain:
        assert work(base, pricer, i, True) == INS + OUTS + WEIGHTS
        assert work(base, pricer, i, False) == 2 * (INS + OUTS + WEIGHTS)
    for i in behind:
        assert work(base, pricer, i, True) == 2 * INS + OUTS + WEIGHTS
    head = max(i for i in base.epilogue if operator_of(base.graph.nodes[i].op).kind == "product")
    assert work(base, pricer, head, True) == work(base, pricer, head, False)


def test_elementwise_gradients_take_the_place_of_their_results() -> None:
    base, pricer = priced()
    inside = next(iter(base.gated.inside.values()))
    one = working_bytes(base, inside[-1], Split(), INS, OUTS, 0.0, pricer, True)
    assert one == max(INS, OUTS)


def test_where_a_repeat_is_counted_by_itself() -> None:
    """Where its blocks are made again, or their weights gathered again; not of frameworks, whose
    memory was fitted without it, nor of a program for one GPU alone."""
    base, pricer = priced()
    assert repeat_is_apart(base, pricer, "block", 0)
    assert repeat_is_apart(base, pricer, "save:context", 1)
    assert repeat_is_apart(base, pricer, "none", 3)
    assert not repeat_is_apart(base, pricer, "none", 2)
    assert not repeat_is_apart(*priced(devices=1), "block", 0)
    assert repeat_is_apart(*priced(devices=1, hardware="tpu-v5p"), "block", 0)
    assert not repeat_is_apart(*priced(runtime="megatron"), "block", 0)


def test_gradients_of_the_repeat_before_wait_on_gpus() -> None:
    """Beside the weights of a block that is made again; of experts they are counted with them."""
    assert scatters_later(*priced(), "block") and not scatters_later(*priced(), "none")
    assert not scatters_later(*priced(hardware="tpu-v5p"), "block")
    assert not scatters_later(*priced(source="zoo:mixtral-tiny,layers=3"), "block")
