"""Routed experts as a whole: work and memory of compiled kernels, prices, and programs in which
tokens travel to their experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import planner
from planner.analysis.facts import GraphFacts
from planner.graph.ir import Graph, Node, Tensor
from planner.ops.experts import BLOCK_ROWS, LEAST_ROWS, ROOM, blocks, filling
from planner.ops.lookup import rule_of
from planner.pins.pins import Pins
from planner.search.build_request import assumptions, make_request
from planner.sharding.rule import Rule, Split
from planner.verify import worker
from planner.workload.open import open_model

ROOT = Path(__file__).parents[2]
TINY = "zoo:mixtral-tiny"
TOKENS, HIDDEN, WIDTH = 512, 64, 96


def rule(experts: int, top: int, tokens: int = TOKENS) -> tuple[Node, Rule]:
    shapes = {
        "x": (tokens, HIDDEN),
        "i": (tokens, top),
        "s": (tokens, top),
        "g": (experts, HIDDEN, WIDTH),
        "u": (experts, HIDDEN, WIDTH),
        "d": (experts, WIDTH, HIDDEN),
        "y": (tokens, HIDDEN),
    }
    node = Node(
        "n", "RoutedExperts", ("x", "i", "s", "g", "u", "d"), ("y",), {"activation": "silu"}
    )
    return (
        node,
        rule_of(
            node,
            Graph("g", (node,), {n: Tensor(n, s, "float32") for n, s in shapes.items()}, (), ()),
        )[0],
    )


def compiled(experts: int, top: int):  # type: ignore[no-untyped-def]
    """The compiled training kernel on one device, and its text."""
    import jax
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.experts import routed_experts

    how = (
        lambda g, u: jax.nn.silu(g) * u,
        "rh,hf->rf",
        "rf,fh->rh",
        *blocks(rule(experts, top)[1], Split(), {}, False),
    )

    def loss(x, share, stacks, index):  # type: ignore[no-untyped-def]
        return jnp.sum(
            jnp.square(routed_experts(x, index, share, (*stacks, None, None, None), 0, how))
        )

    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    stacks = (f(experts, HIDDEN, WIDTH), f(experts, HIDDEN, WIDTH), f(experts, WIDTH, HIDDEN))
    index = jax.ShapeDtypeStruct((TOKENS, top), jnp.int32)
    return (
        jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        .lower(f(TOKENS, HIDDEN), f(TOKENS, top), stacks, index)
        .compile()
    )


def test_compiled_work_follows_the_choices_and_memory_holds_no_gathered_weights() -> None:
    from planner.verify.hlo.flops import dot_flops

    for experts, top in ((4, 2), (16, 2), (16, 4)):
        done = compiled(experts, top)
        active = 2 * TOKENS * top * 3 * HIDDEN * WIDTH
        filled = filling(*rule(experts, top), Split(), {}, False)
        assert (
            dot_flops(done.as_text()) == active * filled * 11 // 3
        )  # forward; backward twice that, and the first layer again
        one, rows = 4 * 3 * HIDDEN * WIDTH, 4 * TOKENS * HIDDEN
        assert done.memory_analysis().temp_size_in_bytes < 4 * one + 8 * rows + 64 * TOKENS * top
        assert 4 * one + 8 * rows < TOKENS * top * one / 20


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("tokens", [3, 100, 512, 5000, 100_000])
@pytest.mark.parametrize(("experts", "top"), [(4, 1), (8, 2), (64, 6)])
def test_blocks_hold_what_a_balanced_router_sends(
    tokens: int, experts: int, top: int, trained: bool
) -> None:
    node, bound = rule(experts, top, tokens)
    rows, count = blocks(bound, Split(), {}, trained)
    mean = tokens * top / experts
    room = ROOM if count == 1 else 1
    assert rows * count >= room * mean > (rows - 1) * count
    assert rows <= 1.5 * BLOCK_ROWS[trained] and (count == 1 or rows >= LEAST_ROWS[trained] / 1.5)
    assert filling(node, bound, Split(), {}, trained) == pytest.approx(rows * count / mean)
    assert filling(node, bound, Split(), {}, trained) >= 1


def test_a_router_of_any_kind_loses_no_token() -> None:
    """One device: against the definition, a router that is balanced, one that sends everything to
    one expert, and one that leaves experts out."""
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.experts import routed_experts

    rng = np.random.default_rng(3)
    x, share = (
        rng.normal(size=(50, 6)).astype(np.float32),
        rng.normal(size=(50, 2)).astype(np.float32),
    )
    up, down = (
        rng.normal(size=(5, 6, 7)).astype(np.float32),
        rng.normal(size=(5, 7, 6)).astype(np.float32),
    )
    routers = (rng.integers(0, 5, (50, 2)), np.full((50, 2), 3), rng.integers(1, 3, (50, 2)) * 2)
    for index in routers:
        want = sum(
            share[:, j, None]
            * np.stack(
                [np.maximum(r @ up[e], 0) @ down[e] for r, e in zip(x, index[:, j], strict=True)]
            )
            for j in range(2)
        )
        how = (lambda _, u: jnp.maximum(u, 0), "rh,hf->rf", "rf,fh->rh", 4, 5)
        found = routed_experts(
            jnp.array(x),
            jnp.array(index),
            jnp.array(share),
            (None, jnp.array(up), jnp.array(down), None, None, None),
            0,
            how,
        )
        assert np.abs(found - want).max() < 1e-4


def test_work_is_that_of_the_chosen_experts_in_every_form() -> None:
    flops = {
        spec: float(
            GraphFacts.of(
                open_model(f"{TINY},{spec}", 8, workload="infer", batch=8).graph(1), training=False
            ).model_flops
        )
        for spec in ("top=1", "top=2", "top=2,form=gathered", "top=2,experts=8")
    }
    each = 2 * (2 * 8 * 16) * 3 * 64 * 96  # layers, samples, positions; three weights
    router = 2 * (2 * 8 * 16) * 64 * 4
    assert flops["top=2"] - flops["top=1"] == each
    assert flops["top=2,form=gathered"] == flops["top=2"]
    assert flops["top=2,experts=8"] - flops["top=2"] == router


def test_plans_say_what_was_assumed_of_the_router() -> None:
    request = make_request(devices=8, hardware="h100-sxm", topology=None)
    (said,) = [
        a
        for a in assumptions(open_model("zoo:mixtral-8x7b", 8, batch=8), request, None, None)
        if a.startswith("experts")
    ]
    assert (
        said
        == "experts: 8, top 2, 32 layers; 12.9 B of 46.7 B parameters work on a token; priced at"
        " imbalance 1.25 (a guess: --imbalance), nothing dropped"
    )
    assert not any(
        a.startswith("experts")
        for a in assumptions(open_model("zoo:mlp-tiny", 8, batch=8), request, None, None)
    )


@pytest.mark.slow
def test_large_mixtures_plan_to_send_tokens_to_their_experts() -> None:
    """Where the router is even; at the imbalance that is guessed, gathering weights within a node
    costs less than waiting for the busiest device."""
    found = planner.plan(
        "zoo:mixtral-8x7b,layers=2", devices=8, batch=64, baselines=False, imbalance=1.0
    )
    assert any(
        "expert-b" in node["split"] or "expert-s" in node["split"] for node in found.nodes.values()
    )
    assert any(
        cell["payload"]
        for cell in found.costs["communication_bytes_per_device"]["all-to-all"].values()
    )


EXPERT = {"data": (2,), "expert": (4,)}
PAIRS = [
    pytest.param(("expert-b",), marks=pytest.mark.slow),
    pytest.param(("expert-s",), marks=pytest.mark.slow),
    pytest.param(("e",), marks=pytest.mark.slow),
    pytest.param(("f",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("factors", PAIRS, ids=lambda f: f[0])
@pytest.mark.parametrize("backend", ["shard_map", pytest.param("jit", marks=pytest.mark.slow)])
def test_programs_equal_the_unsharded_model_and_the_compiler_agrees(
    factors: tuple[str, ...], backend: str
) -> None:
    pins = Pins(
        mesh=EXPERT,
        nodes={
            "/model/layers.*/block_sparse_moe/ReduceSum_2": {
                "split": {f: ["expert"] for f in factors}
            }
        },
    )
    source = f"{TINY},layers=1"
    made = planner.plan(
        source,
        devices=8,
        batch=8,
        pins=pins,
        baselines=False,
        precision="fp32",
        hardware=str(ROOT / "benchmarks" / "eager.toml"),
    )
    report = worker.verify(made, source, backend=backend)
    assert report.ok, report.text()
    assert not factors[0].startswith("expert") or any(
        f.what == "all-to-all over expert" and f.compiled for f in report.figures
    )
    assert any("balanced" in n for n in report.notes)


@pytest.mark.parametrize(("lora", "waits"), [("", True), ("rank=4,targets=*.q_proj.weight", False)])
def test_only_trained_experts_have_gradients_that_others_wait_for(lora: str, waits: bool) -> None:
    """Frozen ones would get gradients that nobody asked for."""
    made = planner.plan(
        "zoo:mixtral-tiny", devices=8, batch=16, pins="dp=8", lora=lora or None, baselines=False
    )
    text = planner.emit(made, "zoo:mixtral-tiny")
    assert "routed_experts(" in text and (", trained=True)" in text) is waits
