"""Targets: what is met, what is missed and by how much, and the fewest devices that do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.serving.asked import ServingResult, Short, on_fewest
from planner.serving.joint import Joint
from planner.serving.outcome import Outcome
from planner.serving.result import Serving
from planner.serving.serve import serve
from planner.serving.targets import Target
from planner.serving.traffic import Traffic

MODEL = "zoo:llama3-8b,layers=2,cache=1"
ASK: dict[str, Any] = {"prompt": 512, "generate": 32, "concurrency": 64}


@pytest.mark.parametrize(
    ("value", "percentile", "seconds"),
    [("500ms", 99, 0.5), ("p90=2 s", 90, 2.0), (0.25, 99, 0.25), ("p50=40us", 50, 4e-5)],
)
def test_targets_are_read(value: str | float, percentile: int, seconds: float) -> None:
    target = Target.of("ttft", value)
    assert target.percentile == percentile and target.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "500", "p95=1s", "0s", "-1s", "=1s", "1 m", "1e400s", 0.0, float("nan"), -1]
)
def test_what_is_no_target_is_refused(value: str | float) -> None:
    with pytest.raises(PlanError) as e:
        Target.of("tpot", value)
    assert e.value.code == "P226"


def outcome(ttft: float, most: float = 9.0, rate: float = 5.0) -> Outcome:
    """A hundred requests, one in ten of which waits ten times as long."""
    waits = np.where(np.arange(100) % 10 == 9, 10 * ttft, ttft)
    return Outcome(waits, np.full(100, 0.01), np.ones(100, bool), most, rate)


def test_a_target_is_met_by_the_part_of_requests_it_names() -> None:
    half, most = Target("ttft", 50, 0.2), Target("ttft", 99, 0.2)
    got = outcome(0.1)
    assert got.attained([half]) == 0.9 and got.miss([half]) == 1 and got.missed([half]) == ""
    assert got.miss([half, most]) == pytest.approx(5)
    assert got.missed([half, most]) == "ttft p99 1 s of 200 ms"
    assert got.missed([Target("tpot", 90, 0.02)]) == ""
    late = outcome(0.001, most=4.0)
    assert late.miss([]) == float("inf") and "4 requests a second are served" in late.missed([])
    assert min((outcome(0.3), outcome(0.1), late), key=lambda o: o.key("tpot", [most])) is not late


def asker(miss: Callable[[int], float]) -> Callable[[int | None], ServingResult]:
    """Searches whose plans wait `miss(devices)` times a second, or do not fit (0)."""

    def ask(devices: int | None) -> ServingResult:
        assert devices
        if not miss(devices):
            raise PlanError("P021", f"no plan fits on {devices}")
        joint: Any = SimpleNamespace(devices=devices)
        best: Any = SimpleNamespace(replicas=1, split=devices)
        asked: Any = None
        return ServingResult(asked, joint, best, (), 1, None, {}, outcome(miss(devices) / 10))

    return ask


def sought(seconds: float) -> Traffic:
    traffic = Traffic.of(5, 8, 8, 0)
    return Traffic(traffic.requests, 5, "", "", "", (Target("ttft", 99, seconds),))


COUNTS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@pytest.mark.parametrize("least", [1, 2, 16, 24, 40, 56, 64])
def test_the_fewest_are_found_and_the_next_smaller_misses(least: int) -> None:
    """Every number of devices below `least` misses."""
    ask = asker(lambda n: 0 if n < least / 4 else 66 / n if n < least else 1)
    found, fewer = on_fewest(ask, COUNTS, sought(1.0001))
    assert found.joint.devices == least
    below = [c for c in COUNTS if c < least]
    assert (fewer and fewer.devices) == (below[-1] if below else None)


def test_no_number_is_tried_for_ever() -> None:
    tried: list[int] = []

    def miss(devices: int) -> float:
        tried.append(devices)
        return 0 if devices < 4 else 3

    with pytest.raises(PlanError, match="ttft p99 3 s of 1 s") as e:
        on_fewest(asker(miss), COUNTS, sought(1.0))
    assert e.value.code == "P227" and e.value.exit_code == 3 and sorted({*tried}) == [1, 2, 4, 8]
    with pytest.raises(PlanError, match="no plan fits on 64") as e:
        on_fewest(asker(lambda _: 0), COUNTS, sought(1.0))
    assert e.value.code == "P227"
    assert Short(1, "", 1.0).why == ""


@pytest.mark.slow
def test_a_plan_meets_its_target_or_says_by_how_much_it_does_not() -> None:
    free = serve(MODEL, rate=60, devices=2, **ASK)
    assert free.traffic is not None and free.traffic["targets"] == []
    p90 = min(r["ttft_p99_s"] for r in free.rows)
    made = serve(MODEL, rate=60, devices=2, ttft=1.05 * p90, **ASK)
    assert made.traffic is not None
    assert made.traffic["ttft_s"]["p99"] <= 1.05 * p90 and made.traffic["attained"] >= 0.99
    assert "target  met: ttft p99" in str(made)
    with pytest.raises(PlanError, match="no plan on 2 devices serves in time: ttft p99") as e:
        serve(MODEL, rate=60, devices=2, ttft="p99=10us", **ASK)
    assert e.value.code == "P227" and e.value.exit_code == 3


@pytest.mark.slow
def test_the_fewest_devices_for_a_rate(tmp_path: Path) -> None:
    one = serve(MODEL, rate=60, devices=1, **ASK)
    assert one.traffic is not None
    rate = 1.3 * one.traffic["most_per_s"]
    made = serve(MODEL, rate=rate, devices="fewest", **ASK)
    assert made.traffic is not None and made.step.topology["devices"] == 2
    assert made.traffic["fewer"]["devices"] == 1
    assert "served at most" in made.traffic["fewer"]["why"]
    assert "fewer   not on 1 device: " in str(made)
    made.save(tmp_path / "p.json")
    assert Serving.load(tmp_path / "p.json").to_json() == made.to_json()


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "gib"), [("none", 3), ("int8", 2)])
def test_sequences_that_fit_nowhere_are_not_searched(
    quantize: str, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than weights and caches leave room for, whatever is cut: the plan is the same without
    looking at them."""
    ask: dict[str, Any] = {"prompt": 2048, "generate": 32, "rate": 1, "devices": 2}
    ask |= {"memory_limit_bytes": gib << 30, "quantize": quantize}
    tried: list[int] = []
    fitting = Joint.fitting

    def counted(self: Joint) -> Any:
        tried.append(self.step.service.concurrency)
        return fitting(self)

    monkeypatch.setattr(Joint, "fitting", counted)
    few, looked = serve(MODEL, **ask), tried.copy()
    tried.clear()
    monkeypatch.setattr(Joint, "overfull", lambda self, sequences: False)
    monkeypatch.setattr(Joint, "_too_small", lambda self, replicas, split: False)
    every = serve(MODEL, **ask)
    assert tried[-len(looked) :] == looked and len(looked) < len(tried)
    assert (few.traffic, few.step.costs, few.rows) == (every.traffic, every.step.costs, every.rows)


def test_what_needs_a_rate_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["zoo:llama-tiny,cache=1", "--workload", "infer"]
    whole = ["--prompt", "8", "--generate", "4", "--concurrency", "4"]
    for more in (["--devices", "2", "--ttft", "1s"], ["--devices", "fewest"]):
        for options in (whole, []):
            assert main([*ask, *options, *more]) == 2
            assert "error[P222]" in capsys.readouterr().err
    with pytest.raises(PlanError, match="P222"):
        serve(MODEL, prompt=8, generate=4, concurrency=4, devices="fewest")
