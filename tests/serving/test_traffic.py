"""Plans for requests that arrive: prices between the sizes that were priced, what is chosen, and
what the command and the file say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published_serving import QUEUES, queue
from planner.cli import main
from planner.errors import PlanError
from planner.search.build_request import make_request
from planner.serving.arrivals import Requests
from planner.serving.continuous import Limits, serve_all
from planner.serving.joint import Joint
from planner.serving.phases import PhaseModel, readings_of
from planner.serving.readings import PHASES
from planner.serving.result import Service, Serving
from planner.serving.serve import serve
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices
from planner.serving.targets import Target
from planner.serving.traffic import AT_ONCE, STEP_TOKENS, Loads, Traffic, most_waiting
from planner.workload.open import open_model
from tests.serving.test_continuous import Fixed

MODEL = "zoo:llama3-8b,layers=2,cache=1"
TINY = "zoo:llama-tiny,cache=1,kv_heads=4"


@cache
def joint(source: str = MODEL, limit_bytes: int | None = None) -> Joint:
    service = Service(1024, 128, 64) if source == MODEL else Service(32, 8, 16)
    model = open_model(source, 4, workload="infer", dims=None)
    request = make_request(
        devices=4,
        hardware=None,
        topology=None,
        workload="infer",
        baselines=False,
        memory_limit_bytes=limit_bytes,
    )
    readings = readings_of(model, service)
    prompts, step = (PhaseModel.of(model, phase, service, readings) for phase in PHASES)
    return Joint(prompts, step, request)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("label", ["tp=4", "tp=1"])
def test_prices_between_sizes_are_those_of_the_sizes(label: str) -> None:
    pair = next(p for p in joint().priced() if p.label == label)
    prices = PlanPrices.of(Sizes(joint(), 1152, 1024), pair)
    for sequences, length in ((1, 300), (3, 1152), (12, 600), (40, 900), (100, 1100)):
        base_s, key_s = prices.decode(sequences)
        exact = prices.step_s(sequences, length)
        assert base_s + key_s * sequences * length == pytest.approx(exact, rel=0.03)
    for rows, length in ((1, 200), (1, 1024), (3, 512), (3, 1024), (5, 700)):
        base_s, pair_s = prices.prompt(rows * length)
        exact = prices.pass_s(rows, length)
        assert base_s + pair_s * rows * length**2 / 2 == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    "objective, rate, targets",
    [
        ("throughput", 30.0, ()),
        ("throughput", 30.0, ("100ms", "12ms")),
        ("ttft", 400.0, ()),
        ("tpot", 30.0, ("100ms",)),
    ],
)
def test_steps_are_as_long_as_is_best(
    objective: str, rate: float, targets: tuple[str, ...]
) -> None:
    """What is simulated last, only where it is asked for, changes no choice."""
    asked = tuple(Target.of(n, t) for n, t in zip(("ttft", "tpot"), targets, strict=False))
    traffic = Traffic.of(rate, 24, 16, 0, asked)
    pair = next(p for p in joint(TINY).priced() if p.label == "tp=4")
    chosen = Loads(joint(TINY), traffic, objective, STEP_TOKENS).load(pair)
    every = [Loads(joint(TINY), traffic, objective, (n,)).load(pair) for n in STEP_TOKENS]
    key = Loads(joint(TINY), traffic, objective, STEP_TOKENS).key
    assert chosen is not None and all(each is not None for each in every)
    assert key(chosen) == min(key(each) for each in every if each)


def test_what_fits_is_found_without_what_does_not() -> None:
    limit = max(pair.memory_bytes for pair in joint(TINY).priced()) - 1
    every = [p.figures() for p in joint(TINY, limit).priced()]
    fitting = [p.figures() for p in joint.__wrapped__(TINY, limit).fitting()]
    assert fitting and fitting == [f for f in every if f["fits"]] and len(fitting) < len(every)


def test_what_is_priced_at_the_plans_own_sizes_is_the_plans_price() -> None:
    """64 sequences with full caches, and the pass over a wave, as the search prices them."""
    for pair in joint().priced():
        prices = PlanPrices.of(Sizes(joint(), 1152, 1024), pair)
        assert prices.step_s(64 // pair.replicas, 1152) == pytest.approx(pair.tpot_s, rel=0.01)
        passed = prices.pass_s(pair.wave // pair.replicas, 1024)
        assert passed == pytest.approx(pair.ttft_s, rel=0.01)


def test_the_plan_serves_most_of_those_priced_and_each_figure_fits_the_others() -> None:
    made = serve(MODEL, prompt=512, generate="8..64", rate=20, devices=1, concurrency=32)
    t = made.traffic
    assert t is not None and t["stable"]
    assert t["most_per_s"] == pytest.approx(max(r["most_per_s"] for r in made.rows), rel=2e-3)
    assert [r["chosen"] for r in made.rows].count(True) == 1
    for figure in ("ttft_s", "tpot_s"):
        assert 0 < t[figure]["p50"] <= t[figure]["p90"] <= t[figure]["p99"]
    # Tokens a second are those of the requests; sequences in generation, by Little, their rate
    # times their stay.
    assert t["tokens_per_s"] == pytest.approx(20 * 36, rel=0.1)
    assert t["generating"] * made.figures["replicas"] == pytest.approx(
        20 * 35 * t["tpot_s"]["p50"], rel=0.3
    )
    assert 0 < t["busy"] <= 1 and 0 <= t["block_waste"] < 16 / 520
    again = serve(MODEL, prompt=512, generate="8..64", rate=20, devices=1, concurrency=32)
    assert again.traffic == t


@pytest.mark.slow
def test_more_than_is_served_is_said_and_fewer_wait_less() -> None:
    made = serve(MODEL, prompt=512, generate=32, rate=40, devices=1, concurrency=32)
    assert made.traffic is not None
    most = made.traffic["most_per_s"]
    over = serve(MODEL, prompt=512, generate=32, rate=1.5 * most, devices=1, concurrency=32)
    assert over.traffic is not None and not over.traffic["stable"]
    assert over.traffic["ttft_s"]["p99"] > 3 * made.traffic["ttft_s"]["p99"]
    assert "the rate is above what this plan serves" in str(over)


@pytest.mark.slow
def test_each_objective_gets_its_best() -> None:
    for objective, figure, sign in (("ttft", "ttft_p99_s", 1), ("tpot", "tpot_p99_s", 1)):
        made = serve(
            MODEL, prompt=512, generate=32, rate=30, devices=2, concurrency=32, objective=objective
        )
        chosen = next(r for r in made.rows if r["chosen"])
        best = min(sign * r[figure] for r in made.rows if r["most_per_s"] > 30)
        assert chosen[figure] == pytest.approx(best, rel=2e-3)


@pytest.mark.slow
def test_as_many_sequences_as_fit_where_nobody_says_how_many() -> None:
    """128 a device, halved until caches of mean lengths fit."""
    roomy = serve(MODEL, prompt=512, generate=32, rate=5, devices=2)
    least = min(r["memory_bytes"] - 0.7 * r["cache_bytes"] for r in roomy.rows)
    narrow = serve(MODEL, prompt=512, generate=32, rate=5, devices=2, memory_limit_bytes=int(least))
    assert roomy.service["concurrency"] == 2 * AT_ONCE > narrow.service["concurrency"] >= 2
    assert narrow.figures["fits"] and narrow.traffic is not None


def test_a_cache_without_room_for_the_longest_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt,generate\n" + "0,8,8\n" * 99 + "1,9000000,8\n"
    )
    with pytest.raises(PlanError, match="longest request, 9,000,008 tokens") as e:
        serve(MODEL, rate=str(tmp_path / "t.csv"), devices=1, concurrency=1)
    assert e.value.code == "P021" and e.value.exit_code == 3


def test_a_trace_is_served_from_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{0.05 * i},{8 + i % 5},{1 + i % 4}" for i in range(60)]
    Path("trace.csv").write_text("\n".join(["arrival_s,prompt,generate", *rows]))
    ask = [TINY, "--devices", "2", "--workload", "infer", "--rate", "trace.csv"]
    assert main([*ask, "-o", "p.json", "--no-cache"]) == 0
    printed = capsys.readouterr().out
    assert "60 requests of trace.csv" in printed and "p99" in printed
    made = Serving.load("p.json")
    assert made.traffic is not None and made.traffic["rate_per_s"] == pytest.approx(20)
    assert main(["show", "p.json"]) == 0 and "serve 60 requests" in capsys.readouterr().out
    for beside, says in ((["--prompt", "8"], "beside the trace"), (["--batch", "8"], "--batch")):
        assert main([*ask, *beside]) == 2
        assert says in capsys.readouterr().err
    assert main([*ask[:-1], "5", "--prompt", "8"]) == 2
    assert "--rate without --generate" in capsys.readouterr().err.replace("--prompt", "--rate")


def test_lengths_of_sequences_that_begin_together_are_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = [TINY, "--devices", "2", "--workload", "infer", "--generate", "4", "--concurrency", "4"]
    assert main([*ask, "--prompt", "8..16"]) == 2
    assert "error[P226]" in capsys.readouterr().err
    assert main([*ask, "--prompt", "16..8"]) == 2
    assert main([*ask, "--prompt", "8~x"]) == 2
    for rate in ("0", "-1", "nan", "inf", "1e10", "1e-300", "20/s"):
        assert main([*ask, "--prompt", "8", "--rate", rate, "--quiet"]) == 2
        assert "error[P226]" in capsys.readouterr().err
    assert main([*ask, "--prompt", "8", "--rate", "", "--quiet"]) == 2
    assert "--rate is empty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def arriving() -> Serving:
    """A small plan for requests that arrive."""
    return serve(TINY, prompt=8, generate=4, rate=5, devices=2, concurrency=4)


def test_a_file_whose_traffic_was_edited_is_refused(arriving: Serving, tmp_path: Path) -> None:
    made = arriving
    made.save(tmp_path / "p.json")
    assert Serving.load(tmp_path / "p.json").to_json() == made.to_json()
    data = json.loads((tmp_path / "p.json").read_text())
    for change in (
        {"busy": "x"},
        {"ttft_s": 3},
        {"limits": {}},
        {"source": 1},
        {"tpot_s": {"p50": [], "p90": 0, "p99": 0}},
        {"most_per_s": 0},
        {"rate_per_s": 10**400},
        {"waiting": -1},
        {"targets": [{"figure": "ttft", "percentile": 99, "seconds": 1, "of": 1}]},
    ):
        edited = {**data, "traffic": {**data["traffic"], **change}}
        text = json.dumps(edited).removeprefix('{"kind": "serving",')
        (tmp_path / "q.json").write_text('{\n  "kind": "serving",' + text)
        with pytest.raises(PlanError) as e:
            Serving.load(tmp_path / "q.json")
        assert e.value.code == "P057"


def test_a_file_whose_service_was_edited_is_refused(arriving: Serving, tmp_path: Path) -> None:
    made = arriving
    for change in ({"objective": "most"}, {"most_sequences": "x"}, {"draft": {"cost": -1}}):
        replace(made, service={**made.service, **change}).save(tmp_path / "p.json")
        with pytest.raises(PlanError) as e:
            Serving.load(tmp_path / "p.json")
        assert e.value.code == "P057"


@pytest.mark.slow
def test_requests_at_once_take_as_long_as_a_published_run() -> None:
    """80 requests on vLLM, one H100 (benchmarks/RESULTS.md, Published serving)."""
    done_s, tpot_s = queue(QUEUES[0])
    assert done_s == pytest.approx(QUEUES[0].duration_s, rel=0.1)
    assert tpot_s == pytest.approx(QUEUES[0].tpot_s, rel=0.1)


def test_traffic_of_a_rate_is_drawn_at_it() -> None:
    traffic = Traffic.of(8, "100~400", 20, seed=4)
    assert traffic.requests.rate == pytest.approx(8, rel=0.05) and traffic.rate_per_s == 8
    prompt, generate = traffic.mean_lengths
    assert generate == 20 and prompt == np.ceil(traffic.requests.prompt.mean())


def test_a_seed_below_zero_draws_no_requests() -> None:
    with pytest.raises(PlanError, match="--seed -1"):
        serve(TINY, prompt=8, generate=4, rate=5, devices=2, seed=-1)


def test_the_longest_queue_is_that_of_all_replicas_together() -> None:
    """As the mean is: a burst of forty on four replicas of one sequence each."""
    requests = Requests(np.zeros(40), np.full(40, 8), np.full(40, 4))
    limits = Limits(sequences=1, step_tokens=64, cache_tokens=64)
    courses = serve_all(requests, 4, Fixed(), limits)
    assert most_waiting(courses) == 36 and most_waiting(courses[:1]) == 9


def test_replicas_of_several_kinds_of_device_are_planned_one_kind_at_a_time() -> None:
    """In equal shares 8 H100 and 8 A100 served fewer requests than the H100 alone."""
    ask: dict = {"prompt": 8, "generate": 4, "rate": 5, "hardware": "8xh100-sxm+8xa100-80gb"}
    with pytest.raises(PlanError, match="one kind at a time") as e:
        serve(TINY, **ask)
    assert e.value.code == "P222" and "--hardware a100-80gb --devices 8" in e.value.help[0]
    for more in ({"pools": True}, {"devices": "fewest"}):
        with pytest.raises(PlanError, match="is so many devices"):
            serve(TINY, **ask, **more)
