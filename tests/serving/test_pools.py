"""Prompts and generation on devices apart: one request by hand, the divisions of devices, and what
the command, the file and the engines' scripts say."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.machine.topology import for_devices
from planner.serving.arrivals import Requests, drawn
from planner.serving.continuous import Limits
from planner.serving.engines import ENGINES, hand_over
from planner.serving.lengths import Lengths
from planner.serving.pools import Unit, _divisions, _simulated
from planner.serving.result import Serving
from planner.serving.serve import program, serve
from planner.serving.traffic import Traffic
from tests.serving.test_continuous import Fixed

MODEL = "zoo:llama3-8b,layers=2,cache=1"
WIDE = Limits(sequences=10**6, step_tokens=10**6, cache_tokens=10**9)


def unit(split: int, per_s: float, prices: Any = None, token_bytes: float = 0.0) -> Unit:
    """A replica without a plan."""
    none: Any = SimpleNamespace()
    prices = prices or Fixed()
    return Unit(none, none, split, f"tp={split}", none, prices, WIDE, per_s, token_bytes, 0, 0, 0)


def traffic_of(requests: Requests) -> Traffic:
    return Traffic(requests, 5.0, "poisson", "", "")


def test_one_request_goes_from_prompt_to_tokens_as_a_hand_counts() -> None:
    """Its prompt 0.1 s, 8 tokens over the link of a node, then three steps of 10 ms."""
    requests = Requests(np.array([1.0]), np.array([8]), np.array([4]))
    topology = for_devices("h100-sxm", 2)
    rate, latency = topology.levels[0].effective_bytes_per_s, topology.levels[0].latency_s
    token = rate / 100
    made = _simulated(
        unit(1, 9.0, Fixed(0.1)),
        unit(1, 9.0, Fixed(0.01), token),
        (1, 1),
        traffic_of(requests),
        topology,
    )
    assert made.outcome.ttft_s == pytest.approx([0.1])
    assert made.sent_s == pytest.approx([latency + 0.08])
    assert made.outcome.tpot_s == pytest.approx([(latency + 0.08 + 3 * 0.01) / 3])


def test_links_are_busy_while_requests_come() -> None:
    """Half a second of each: the time in which the last are generated was counted, too."""
    requests = Requests(np.arange(101.0), np.full(101, 8), np.full(101, 41))
    topology = for_devices("h100-sxm", 2)
    token = topology.levels[0].effective_bytes_per_s / 16
    units = unit(1, 9.0, Fixed(0.1)), unit(1, 9.0, Fixed(1.0), token)
    made = _simulated(*units, (1, 1), traffic_of(requests), topology)
    assert made.said()["pools"]["transfer"]["busy"] == pytest.approx(0.5, rel=0.01)


def test_the_busier_side_says_how_long_a_cache_is_on_its_way() -> None:
    requests = Requests(np.array([0.0]), np.array([8]), np.array([4]))
    topology = for_devices("h100-sxm", 8)
    sent = {
        (a, b): float(
            _simulated(
                unit(a, 9.0), unit(b, 9.0, None, 1e9 / b), (1, 1), traffic_of(requests), topology
            ).sent_s[0]
        )
        for a in (1, 2, 4)
        for b in (1, 2, 4)
    }
    assert sent[1, 4] == pytest.approx(sent[1, 1]) and sent[4, 1] == pytest.approx(sent[1, 1])
    assert sent[2, 4] == pytest.approx(sent[4, 2]) and sent[2, 2] < 0.6 * sent[1, 1]


def test_every_request_is_served_by_both_kinds() -> None:
    requests = drawn(20.0, Lengths(50, 400, "~"), Lengths(1, 30, ".."), seed=1, count=500)
    p, d = unit(1, 99.0, Fixed(0.002, 0, 0, 1e-5)), unit(2, 99.0, Fixed(0.004, 1e-4), 1e3)
    made = _simulated(p, d, (3, 2), traffic_of(requests), for_devices("h100-sxm", 8))
    first, second = made.courses
    assert sum(len(c.requests) for c in first) == 500
    assert sum(len(c.requests) for c in second) == int((requests.generate > 1).sum())
    steps = sum(int((c.requests.generate - 1).sum()) for c in second)
    assert steps == int((requests.generate - 1).sum())
    for course in second:
        assert (np.diff(course.requests.arrival_s) >= 0).all()
    assert made.outcome.most_per_s == pytest.approx(min(3 * 99.0, 2 * 99.0))


@pytest.mark.parametrize("devices", [2, 3, 8, 24])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 4)])
def test_divisions_are_those_that_serve_most(devices: int, a: int, b: int) -> None:
    p, d = unit(a, 7.0), unit(b, 3.0)
    found = _divisions(p, d, devices)
    every = [
        (n, m) for n in range(1, devices) for m in range(1, devices) if n * a + m * b == devices
    ]
    if every:
        assert min(found[0][0] * 7, found[0][1] * 3) == max(min(n * 7, m * 3) for n, m in every)
        assert set(found) <= set(every)
    for n, m in found:
        assert n >= 1 and m >= 1 and n * a + m * b <= devices


@pytest.fixture(scope="module")
def apart() -> Serving:
    """A plan of pools: nothing disturbs generation there."""
    made = serve(
        MODEL,
        prompt=1024,
        generate=64,
        rate=700,
        devices=4,
        concurrency=256,
        objective="tpot",
        pools=True,
    )
    assert made.traffic is not None and "pools" in made.traffic
    return made


@pytest.mark.slow
def test_pools_are_chosen_where_they_are_better_and_say_what_they_are(
    apart: Serving, tmp_path: Path
) -> None:
    assert apart.traffic is not None
    pools = apart.traffic["pools"]
    used = sum(pools[k]["replicas"] * pools[k]["split"] for k in ("prefill", "decode"))
    assert used == 4
    # Two layers, keys and values of 8 heads of 128 features, two bytes each.
    assert pools["transfer"]["bytes_per_token"] == 2 * 2 * 8 * 128 * 2
    both = [r for r in apart.rows if "units" in r]
    assert both and all(r["label"].startswith("apart: ") and " + " in r["label"] for r in both)
    rows = {bool(r["chosen"]): r for r in sorted(apart.rows, key=lambda r: -r["tpot_p99_s"])}
    assert rows[True]["label"].startswith("apart") and "+" in rows[True]["pools"]
    assert rows[True]["tpot_p99_s"] < rows[False]["tpot_p99_s"]
    shown = str(apart)
    assert "prompts " in shown and "between keys and values, 8.0 KiB a token" in shown
    apart.save(tmp_path / "p.json")
    assert Serving.load(tmp_path / "p.json").to_json() == apart.to_json()
    with pytest.raises(PlanError, match="P224.*on devices apart"):
        program(apart, MODEL)
    together = serve(
        MODEL, prompt=1024, generate=64, rate=700, devices=4, concurrency=256, objective="tpot"
    )
    assert together.traffic is not None
    assert together.traffic["tpot_s"]["p99"] > apart.traffic["tpot_s"]["p99"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=[pytest.mark.slow] * (e == "vllm")) for e in ENGINES]
)
def test_a_script_starts_replicas_of_both_kinds(
    apart: Serving, engine: str, tmp_path: Path
) -> None:
    row = next(r for r in apart.rows if r["label"].startswith("apart: tp="))
    pools = row["units"]
    chosen = (r for r in apart.rows if r["chosen"] and r is not row)
    made = hand_over(replace(apart, rows=(*chosen, row)), engine)
    (tmp_path / "run.sh").write_text(made.text)
    for name in ("vllm", "python3"):
        (tmp_path / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m"}
    for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        done = subprocess.run(
            ["bash", "run.sh", role, "--port", "8000"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        words = done.stdout.splitlines()
        said = dict(zip(words, words[1:], strict=False))
        tensor = said["--tensor-parallel-size" if engine == "vllm" else "--tp-size"]
        assert tensor == str(pools[role]["split"]) and words[-2:] == ["--port", "8000"]
        if engine == "vllm":
            assert said["--kv-transfer-config"] == (
                f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}'
            )
        else:
            assert said["--disaggregation-mode"] == role
    for wrong in ([], ["both"]):
        assert subprocess.run(
            ["bash", "run.sh", *wrong],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        ).returncode
    assert f"{pools['prefill']['replicas']} of prefill" in made.cost


@pytest.mark.slow
def test_there_are_no_pools_of_one_device_or_of_requests_without_generation() -> None:
    ask: dict[str, Any] = {"prompt": 8, "rate": 5, "concurrency": 4, "pools": True}
    for generate, devices in ((3, 1), (1, 2)):
        made = serve("zoo:llama-tiny,cache=1", generate=generate, devices=devices, **ask)
        assert made.traffic is not None and "pools" not in made.traffic
        assert not any("units" in row for row in made.rows)


def test_pools_are_of_a_rate_and_of_hardware_in_several_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = ["zoo:llama-tiny,cache=1", "--workload", "infer", "--prompt", "8", "--generate", "4"]
    for more in (
        ["--concurrency", "4", "--devices", "2"],
        ["--rate", "5", "--hardware", "v5e:2x4"],
    ):
        assert main([*ask, *more, "--pools"]) == 2
        assert "error[P222]" in capsys.readouterr().err
