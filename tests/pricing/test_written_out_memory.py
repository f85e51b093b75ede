"""Memory of blocks that are written out, on GPUs."""

from __future__ import annotations

import pytest

import planner
from planner.pricing import peak_memory
from planner.pricing.peak_memory import MemoryParts
from planner.strategy.strategy import Strategy


def parts_of(
    model: str, monkeypatch: pytest.MonkeyPatch, pins: str
) -> tuple[Strategy, MemoryParts, list[str]]:
    """A plan, its memory operator by operator, and the operators' kinds."""
    found: list[tuple[MemoryParts, list[str]]] = []
    real = peak_memory.memory_parts

    def kept(*args: object) -> MemoryParts:
        parts = real(*args)  # type: ignore[arg-type]
        if parts.liveness is not None:
            found.append((parts, [n.op for n in args[0].graph.nodes]))  # type: ignore[attr-defined]
        return parts

    monkeypatch.setattr(peak_memory, "memory_parts", kept)
    made = planner.plan(
        f"zoo:{model}", devices=8, batch=16, pins=f"{pins},blocks=written-out", baselines=False
    )
    step = made.costs["memory_per_device_bytes"]
    parts, ops = next(
        (p, o)
        for p, o in reversed(found)
        if p.liveness is not None
        and abs(p.parameters + p.gradients + p.state + p.liveness.peak - step) < 1e4
    )
    return made, parts, ops


def test_every_layer_has_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's backward pass works with as much in each of four layers."""
    _, parts, ops = parts_of("gpt2-small,layers=4", monkeypatch, "dp=8,zero=1,micro=1")
    assert parts.liveness is not None
    layers = [float(parts.liveness.temporary[i]) for i, op in enumerate(ops) if op == "Attention"]
    assert len(layers) == 4 and min(layers) > 0
    assert max(layers) <= 1.3 * min(layers)


def test_rows_in_the_order_of_experts_are_kept_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows a token of 4,096 features in bf16, a tile more for each of eight experts."""
    model = "mixtral-8x7b,layers=3,seq=4096"
    _, parts, ops = parts_of(model, monkeypatch, "data=2,tensor=4,zero=2,micro=1")
    assert parts.liveness is not None
    at = [i for i, op in enumerate(ops) if op == "RoutedExperts"]
    live = parts.liveness.activations
    rows = 8 * 4096 * 2
    for i in at:  # its own rows are part of its workspace while its backward pass runs
        kept = float(live[i + 1] - live[i])
        assert rows * 4096 * 2 <= kept <= (rows + 8 * 256) * 4096 * 2 * 1.05 + 8 * 4096 * 4096 * 2


@pytest.mark.parametrize(("pins", "waits"), [("dp=8", False), ("dp=4,tp=2", True)])
def test_products_of_gated_units_wait_where_gradients_are_put_off(
    pins: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer keeps gate and up of a SwiGLU, 14,336 features by 1,024 tokens of a row in bf16; its
    product is there once its backward pass made it again, and stays beside collectives between
    activations alone (benchmarks/RESULTS.md, "Products that wait for their gradients")."""
    model = "llama3-8b,layers=3,seq=1024"
    _, parts, ops = parts_of(model, monkeypatch, f"{pins},micro=2,zero=1")
    live = parts.liveness
    assert live is not None
    first, second = [i for i, op in enumerate(ops) if op == "Attention"][:2]
    devices = 1 + waits
    rows = 1024 * (16 // 4 // 2 if waits else 16 // 8 // 2)
    hidden = rows * 14336 * 2 / devices * 1.04
    others = rows * 2 * (3 * 4096 + (4096 * 2 + 2 * 1024) / devices) * 1.04
    layer = float(live.activations[second] - live.activations[first])
    least, most = (-2 * hidden, -hidden) if waits else (others + 2 * hidden, others + 2.8 * hidden)
    assert least <= layer <= most


@pytest.mark.parametrize(
    ("layers", "pins", "compiled"),
    [(4, "dp=4,tp=2,zero=1,micro=4", 15.00e9), (16, "dp=4,tp=2,zero=1,micro=4", 41.24e9)],
)
def test_products_that_wait_are_not_counted_beside_logits(
    layers: int, pins: str, compiled: float
) -> None:
    """As benchmarks/RESULTS.md has them, "Products that wait for their gradients"."""
    made = planner.plan(
        f"zoo:llama3-8b,layers={layers}",
        devices=8,
        batch=32,
        hardware="h100",
        pins=f"{pins},blocks=written-out",
        baselines=False,
    )
    assert 0.0 < made.costs["memory_per_device_bytes"] / compiled - 1 < 0.05


@pytest.mark.parametrize("micro", [1, 2])
def test_logits_are_counted_once_while_the_head_runs_backward(
    micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradient lies where they lay; beside it the head's own, which no kernel adds to the
    sums of microbatches; with one microbatch it takes the weight's place, and its piece waits."""
    model = "llama3-8b,layers=2,seq=1024,vocab=65536"
    _, parts, ops = parts_of(model, monkeypatch, f"dp=8,zero=1,micro={micro}")
    live = parts.liveness
    assert live is not None and ops[-1] == "CrossEntropyLoss" and ops[-2] == "MatMul"
    logits, head = 16 // 8 // micro * 1024 * 65536 * 2, 4096 * 65536 * 2
    own = float(live.temporary[-2]) / 1.04
    assert 0.99 * logits <= own < 1.5 * logits
    assert 0.99 * logits <= float(live.activations[-1] - live.activations[-2]) / 1.04 < 1.1 * logits
    assert float(live.gradients[-2]) == pytest.approx(head if micro > 1 else head / 8, rel=0.05)


def test_a_bias_of_logits_hands_their_gradient_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the logits lay, while the sum and while the product before it run backward."""
    model = "modernbert-base,layers=3,seq=512"
    _, parts, ops = parts_of(model, monkeypatch, "dp=8,zero=1,micro=1")
    live = parts.liveness
    assert live is not None and ops[-3:] == ["MatMul", "Add", "CrossEntropyLoss"]
    logits = 16 // 8 * 512 * 50368 * 2
    for at in (-3, -2):
        assert 0.99 * logits <= float(live.temporary[at]) / 1.04 < 1.1 * logits


@pytest.mark.parametrize(
    ("model", "batch", "pins", "compiled"),
    [
        ("llama3-8b,layers=2,seq=2048", 128, "zero=1,micro=4", 13.28e9),
        ("llama3-8b,layers=16,seq=2048", 64, "zero=1,micro=1", 49.39e9),
        ("vit-b16", 512, "zero=2,micro=1", 4.38e9),
    ],
)
def test_peaks_are_those_of_compiled_programs(
    model: str, batch: int, pins: str, compiled: float
) -> None:
    """As benchmarks/RESULTS.md has them, "Gradients of one microbatch": planned with the allowance
    for fragmentation."""
    made = planner.plan(
        f"zoo:{model}",
        devices=8,
        batch=batch,
        hardware="h100",
        pins=f"dp=8,blocks=written-out,recompute=none,{pins}",
        baselines=False,
    )
    assert 0.0 < made.costs["memory_per_device_bytes"] / compiled - 1 < 0.05
