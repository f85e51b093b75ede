"""Experts with a capacity: what is dropped, by definition and by the zoo's own dispatch; plans and
programs; and what the busiest device gets of a router's counts."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import planner
from costmodels.routing import busiest, dropped_of_counts, dropped_of_spread
from planner.errors import PlanError
from planner.graph.ir import Node
from planner.ops.expert_load import busiest_blocks
from planner.pins.pins import Pins
from planner.report.commands import reproduce
from planner.report.summary import summary
from planner.strategy.reopen import reopen
from planner.verify import worker
from planner.workload.open import open_model
from tests.verify.in_process import compared

ROOT = Path(__file__).parents[2]
TINY = "zoo:mixtral-tiny,layers=1"
EAGER = str(ROOT / "benchmarks" / "eager.toml")
EXPERTS = "/model/layers.*/block_sparse_moe/ReduceSum_2"


def test_dropped_of_counts_is_counted_one_by_one() -> None:
    counts = (10, 30, 5, 35)  # the mean is 20
    for factor in (1.0, 1.25, 1.5, 1.75):
        kept = sum(min(n, factor * 20) for n in counts)
        assert dropped_of_counts(counts, factor) == pytest.approx(1 - kept / 80)
    assert busiest(counts, 4) == 1.75 and busiest(counts, 2) == 1.0 and busiest(counts, 1) == 1.0


@pytest.mark.parametrize("imbalance", [1.0, 1.1, 1.25, 2.0, 3.0])
@pytest.mark.parametrize("factor", [1.0, 1.05, 1.25, 2.5])
def test_dropped_of_a_spread_is_that_of_many_evenly_spread_experts(
    imbalance: float, factor: float
) -> None:
    low, idle = max(0.0, 2 - imbalance), max(0, round(10_000 * (1 - 2 / imbalance)))
    loads = np.concatenate([np.zeros(idle), np.linspace(low, imbalance, 10_000 - idle)])
    counts = tuple(int(n) for n in 1e6 * loads)
    assert dropped_of_spread(imbalance, factor) == pytest.approx(
        dropped_of_counts(counts, factor), abs=1e-4
    )


def test_the_busiest_device_runs_the_blocks_of_its_experts() -> None:
    """Two devices of two experts each; 160 rows, of which a block takes 16."""
    node = Node("n", "RoutedExperts", (), (), {"counts": (10, 30, 5, 35)})
    assert busiest_blocks(node, Fraction(40), 16, 2, 2) == max(2 + 4, 1 + 5)
    assert busiest_blocks(node, Fraction(40), 16, 4, 1) == 2 + 4 + 1 + 5


@pytest.mark.parametrize("rows", [10, 16, 50, 64])
def test_one_number_fills_blocks_as_evenly_spread_experts_do(rows: int) -> None:
    """A mean of 40 rows: experts of 30 to 50, or of 50 on the busiest device; a block that has
    room for all of an expert's rows is one block, not more."""
    node = Node("n", "RoutedExperts", (), ())
    spread = np.linspace(30, 50, 100_001)
    assert busiest_blocks(node, Fraction(40), rows, 4, 1) == pytest.approx(
        4 * np.ceil(spread / rows).mean(), rel=1e-4
    )
    assert busiest_blocks(node, Fraction(40), rows, 2, 2) == 2 * np.ceil(50 / rows)


def plan_tiny(factor: str, **options):  # type: ignore[no-untyped-def]
    return planner.plan(
        TINY,
        devices=8,
        batch=8,
        precision="fp32",
        hardware=EAGER,
        baselines=False,
        **options,
        capacity=float(factor) if factor else None,
    )


def test_a_capacity_is_in_the_plan_its_report_and_its_model() -> None:
    made = plan_tiny("1.25", imbalance="2")
    assert made.workload["routing"] == {"imbalance": 2.0, "capacity": 1.25}
    lost = dropped_of_spread(2, 1.25)
    assert made.costs["dropped_choices"] == pytest.approx(lost, rel=1e-5)
    whole = plan_tiny("1.25", imbalance="1")
    assert "dropped_choices" not in whole.costs
    for key in ("tokens_per_s_per_device", "model_flops_utilization"):
        assert made.costs[key] < whole.costs[key]
    assert made.costs["tokens_per_s_per_device"] == pytest.approx(
        (1 - lost) * whole.costs["tokens_per_s_per_device"], rel=1e-5
    )
    assert made.costs["step_time_s"] == whole.costs["step_time_s"]  # experts work on every place
    assert "14.1 % of tokens' choices dropped" in " ".join(summary(made).split())
    assert "--imbalance 2.0 --capacity 1.25" in reproduce(made)
    assert reopen(made, TINY).sha256() == made.model["sha256"]


def test_a_routers_counts_are_read_and_priced(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps([1, 1, 1, 5]))
    (tmp_path / "c.csv").write_text("1,1\n1,5\n")
    steps = {
        text: plan_tiny("", imbalance=text, pins=EXPERT_PINS).costs["step_time_s"]
        for text in (str(tmp_path / "c.json"), str(tmp_path / "c.csv"), "1", "2")
    }
    assert steps[str(tmp_path / "c.json")] == steps[str(tmp_path / "c.csv")] > steps["1"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1.5, 1, 1, 1]", "1.5 is no whole number"),
        ("[1e999, 1, 1, 1]", "inf is no whole number"),
        ("[true, 1, 1, 1]", "True is no whole number"),
        ("[[1], 1, 1, 1]", "is no whole number"),
        ("[" * 100_000, "recursion"),
        ("1, two", "invalid literal"),
    ],
)
def test_a_file_that_has_no_counts_is_refused_with_what_it_has(
    content: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(PlanError) as refused:
        open_model(TINY, 8, batch=8, imbalance=str(tmp_path / "c.json"))
    assert refused.value.code == "P019" and says in " ".join(refused.value.detail)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"imbalance": "0.5"}, "neither a number"),
        ({"imbalance": "nowhere.json"}, "neither a number"),
        ({"imbalance": "3"}, "of 4 experts, 2 a token, the busiest has at most 2 times the mean"),
        ({"capacity": 0.9}, "at least the mean"),
        ({"imbalance": (1, 2, 3)}, "3 experts, the model has 4"),
        ({"imbalance": (0, 0, 0, 0)}, "neither a number"),
    ],
)
def test_what_is_no_spread_and_no_capacity_is_refused(
    options: dict[str, object], says: str
) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        open_model(TINY, 8, batch=8, **options).graph(1)
    assert refused.value.code == "P019" and refused.value.help


def test_a_model_without_experts_is_told() -> None:
    with pytest.raises(PlanError, match="the model has none"):
        open_model("zoo:mlp-tiny", 8, batch=8, capacity=1.25).graph(1)


def test_a_device_has_at_most_all_rows() -> None:
    """Of two devices one was taken to have four times the mean, twice as many rows as there are."""
    from planner.ops.expert_load import busiest_blocks, busiest_rows

    graph = open_model("zoo:mixtral-8x7b,layers=1", 8, batch=8, imbalance="4").graph(1)
    node = next(n for n in graph.nodes if n.op == "RoutedExperts")
    assert [busiest_rows(node, pieces) for pieces in (2, 4, 8)] == [2, 4, 4]
    mean = Fraction(1024)
    assert busiest_blocks(node, mean, 128, 4, 2) == 8 * 1024 / 128


EXPERT_PINS = Pins(
    mesh={"data": (2,), "expert": (4,)}, nodes={EXPERTS: {"split": {"expert-b": ["expert"]}}}
)


def that_drops(factor: str) -> planner.Strategy:
    """A plan of experts that keep as many rows as the mean, cut in a factor over four devices."""
    pins = Pins(
        mesh={"data": (2,), "expert": (4,)}, nodes={EXPERTS: {"split": {factor: ["expert"]}}}
    )
    return plan_tiny("1", imbalance="2", pins=pins)


def test_a_program_that_drops_equals_the_unsharded_model() -> None:
    """Rows travel to their experts."""
    made = that_drops("expert-b")
    errors = compared(made, TINY)
    assert errors.compared and errors.outputs < 1e-5 and errors.gradients < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["b", "e", "f"])
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_programs_that_drop_equal_the_unsharded_model(factor: str, backend: str) -> None:
    """Rows travel, experts are cut, or their width; the compiler's collectives and FLOPs are those
    that were priced."""
    made = that_drops("expert-b" if factor == "b" else factor)
    report = worker.verify(made, TINY, backend=backend)
    assert report.ok, report.text()
    assert factor != "b" or any(
        f.what == "all-to-all over expert" and f.compiled for f in report.figures
    )


def by_definition(x, index, share, stacks, places):  # type: ignore[no-untyped-def]
    """Results and how many choices were dropped: a choice after the other, first choices first."""
    import jax
    import jax.numpy as jnp

    (gate, up, down), dropped, out = stacks, 0, jnp.zeros_like(x)
    for b in range(x.shape[0]):
        taken = [0] * gate.shape[0]
        for j in range(index.shape[2]):
            for s in range(x.shape[1]):
                e, row = int(index[b, s, j]), x[b, s]
                if taken[e] < places:
                    y = (jax.nn.silu(row @ gate[e]) * (row @ up[e])) @ down[e]
                    out = out.at[b, s].add(share[b, s, j] * y)
                dropped += taken[e] >= places
                taken[e] += 1
    return out, dropped


@pytest.mark.one_in(2)
@pytest.mark.parametrize("places", [1, pytest.param(3, marks=pytest.mark.slow), 8])
def test_results_and_gradients_are_those_of_the_definition(places: int) -> None:
    import jax
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.expert_places import experts_with_places

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.array(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, share, weight = draw(2, 8, 6), draw(2, 8, 2), draw(2, 8, 6)
    stacks = draw(4, 6, 7), draw(4, 6, 7), draw(4, 7, 6)
    index = np.argsort(rng.normal(size=(2, 8, 4)), -1)[..., :2]
    how = (lambda g, u: jax.nn.silu(g) * u, "peth,ehf->petf", "petf,efh->peth")

    def placed(x, share, stacks):  # type: ignore[no-untyped-def]
        return experts_with_places(
            x, jnp.array(index), share, (*stacks, None, None, None), (), (), (8, places), how
        )

    want, dropped = by_definition(x, index, share, stacks, places)
    assert (dropped == 0) == (places == 8)
    assert np.abs(placed(x, share, stacks) - want).max() < 1e-4
    loss = lambda f: jax.jit(jax.grad(lambda *v: jnp.sum(f(*v) * weight), (0, 1, 2)))  # noqa: E731
    found = loss(placed)(x, share, stacks)
    definite = loss(lambda x, share, stacks: by_definition(x, index, share, stacks, places)[0])(
        x, share, stacks
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(definite), strict=True):
        assert np.abs(a - b).max() < 1e-3


def test_compiled_work_is_that_of_all_places() -> None:
    """Forward, and backward twice that and the first layer again, as experts that drop nothing;
    nothing as large as the weights of the chosen experts is held."""
    import jax
    import jax.numpy as jnp

    from planner.emit.runtime.kernels.expert_places import experts_with_places
    from planner.verify.hlo.flops import dot_flops

    how = (lambda g, u: jax.nn.silu(g) * u, "peth,ehf->petf", "petf,efh->peth")
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    experts, places, h, wide = 8, 40, 64, 96

    def loss(x, share, stacks, index):  # type: ignore[no-untyped-def]
        y = experts_with_places(
            x, index, share, (*stacks, None, None, None), (), (), (128, places), how
        )
        return jnp.sum(jnp.square(y))

    stacks = f(experts, h, wide), f(experts, h, wide), f(experts, wide, h)
    done = (
        jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        .lower(f(2, 128, h), f(2, 128, 2), stacks, jax.ShapeDtypeStruct((2, 128, 2), jnp.int32))
        .compile()
    )
    rows = 2 * experts * places
    assert dot_flops(done.as_text()) == 2 * rows * h * wide * 11
