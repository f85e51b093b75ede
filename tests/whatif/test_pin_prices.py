"""`plan explain --pins`: what each pin of a plan costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.pins.pins import Pins, from_table, parse_pins
from planner.strategy.pins import pins_of
from planner.strategy.strategy import Strategy
from planner.whatif.pin_prices import ALL, price_pins

MODEL, BERT = "zoo:mlp-tiny", "zoo:bert-base,layers=2,seq=512"
AXES = st.sampled_from(("data", "model", "sequence"))
SIZES = st.integers(1, 8)
MESH = st.dictionaries(
    AXES,
    st.one_of(
        SIZES,
        st.lists(SIZES, min_size=1, max_size=3),
        st.fixed_dictionaries({"size": SIZES, "level": st.just("node")}),
    ),
)
TECHNIQUES = st.fixed_dictionaries(
    {},
    optional={
        "zero_stage": st.integers(0, 3),
        "recompute": st.sampled_from(("none", "block", "selective")),
        "microbatches": st.integers(1, 8),
        "offload": st.sampled_from(("none", "optimizer", ["optimizer", "activations"])),
        "bucket": st.sampled_from(("none", "auto", "25MB", 1024)),
        "tensor": st.just("megatron"),
    },
)
PLACES: st.SearchStrategy[dict] = st.one_of(
    st.fixed_dictionaries(
        {"split": st.dictionaries(st.sampled_from("mnk"), st.lists(AXES, max_size=2))}
    ),
    st.fixed_dictionaries({"layout": st.lists(st.lists(AXES, max_size=1), max_size=3)}),
    st.just({}),
)


@settings(max_examples=100, deadline=None)
@given(
    MESH,
    TECHNIQUES,
    st.lists(st.sampled_from("msn"), max_size=2),
    st.dictionaries(st.sampled_from(("*.up", "a/b", "head")), PLACES),
)
def test_pins_come_back_from_their_table(
    mesh: dict, techniques: dict, forbidden: list[str], nodes: dict
) -> None:
    try:
        pins = from_table(
            {"mesh": mesh, "techniques": techniques, "forbid": {"factors": forbidden}, **nodes}
        )
    except PlanError as e:  # techniques that contradict each other
        assert e.code == "P024"
        return
    assert from_table(pins.table()) == pins
    fewer = pins.each()
    assert (
        len(fewer)
        == len({words for words, _ in fewer})
        == len(pins.mesh) + len(pins.techniques) + len(pins.forbidden_factors) + len(pins.nodes)
    )
    for _, left in fewer:
        assert left != pins and len(left.each()) == len(fewer) - 1


@pytest.fixture(scope="module")
def pinned() -> Strategy:
    return planner.plan(MODEL, devices=8, batch=64, pins="tp=2,zero=1,micro=2", baselines=False)


def test_a_file_says_under_which_pins_it_was_searched(pinned: Strategy, tmp_path: Path) -> None:
    pinned.save(tmp_path / "a.json")
    assert pins_of(Strategy.load(tmp_path / "a.json")) == parse_pins("tp=2,zero=1,micro=2")
    assert pins_of(planner.plan(MODEL, devices=8, batch=64, baselines=False)) == Pins()


def test_each_price_is_what_a_search_without_the_pin_saves(pinned: Strategy) -> None:
    rows = {row.pin: row for row in price_pins(pinned, MODEL)}
    assert set(rows) == {"tensor = 2", "microbatches = 2", "zero_stage = 1", ALL}
    step = pinned.costs["step_time_s"]
    for pin, left in (
        ("tensor = 2", "zero=1,micro=2"),
        ("microbatches = 2", "tp=2,zero=1"),
        ("zero_stage = 1", "tp=2,micro=2"),
        (ALL, ""),
    ):
        without = planner.plan(
            MODEL, devices=8, batch=64, pins=left or None, baselines=False
        ).costs["step_time_s"]
        assert rows[pin].saved_s == pytest.approx(step - without, rel=1e-5, abs=1e-9), pin
    assert rows["microbatches = 2"].binds and rows[ALL].binds
    assert all(rows[ALL].saved_s >= row.saved_s * (1 - 1e-6) for row in rows.values())


def test_a_table_says_it(
    pinned: Strategy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pinned.save("a.json")
    assert main(["explain", "a.json"]) == 0
    assert "pins tensor = 2 microbatches = 2 zero_stage = 1 (--pins: what each costs)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["explain", "a.json", "--pins"]) == 0
    out = capsys.readouterr().out
    assert "without the pin" in out and "all of them" in out
    assert main(["explain", "a.json", "lm_head", "--pins"]) == 2


def test_plans_without_pins_have_no_prices() -> None:
    with pytest.raises(PlanError, match="without pins") as e:
        list(price_pins(planner.plan(MODEL, devices=8, batch=64, baselines=False), MODEL))
    assert e.value.code == "P059"


@pytest.mark.slow
def test_a_pin_that_the_search_does_not_offer_is_said_to_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks written out on a TPU, which the search leaves to who asks for them."""
    monkeypatch.chdir(tmp_path)
    made = planner.plan(
        BERT, devices=8, batch=64, hardware="v5e:2x4", pins="blocks=written-out", baselines=False
    )
    free = planner.plan(BERT, devices=8, batch=64, hardware="v5e:2x4", baselines=False)
    (row,) = price_pins(made, BERT)
    assert row.pays and not row.binds
    assert row.saved_s == pytest.approx(made.costs["step_time_s"] - free.costs["step_time_s"])
    made.save("a.json")
    assert main(["explain", "a.json", "--pins"]) == 0
    out = capsys.readouterr().out
    assert "a price below 0" in out and "nothing" not in out
