"""Continuous batching by hand: closed forms of queues, single steps, requests and time that add up;
lengths and traces as they are written; prices between sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import PlanError
from planner.serving.arrivals import Requests, drawn, traced
from planner.serving.continuous import (
    BLOCK,
    Course,
    Limits,
    Replica,
    _steps_until,
    most_a_second,
    serve_all,
    steady,
)
from planner.serving.lengths import Lengths
from planner.serving.outcome import Outcome
from planner.serving.traffic import figures_of


@dataclass(frozen=True)
class Fixed:
    """Seconds of a step: of sequences and keys, of rows and pairs."""

    step_s: float = 0.01
    sequence_s: float = 0.0
    key_s: float = 0.0
    row_s: float = 0.0
    pair_s: float = 0.0

    state_s = 0.0

    def decode(self, sequences: int) -> tuple[float, float]:
        return self.step_s + self.sequence_s * sequences, self.key_s

    def prompt(self, tokens: int) -> tuple[float, float]:
        return self.step_s + self.row_s * tokens, self.pair_s


WIDE = Limits(sequences=10**6, step_tokens=10**6, cache_tokens=10**9)


def one(length: int) -> Lengths:
    return Lengths(length, length)


def single_steps(requests: Requests, prices: Fixed, limits: Limits, prefilled: bool) -> Course:
    """The same engine in the plainest words: every step for itself, every sequence looked at."""
    n = len(requests)
    arrival, prompt, generate = (
        a.tolist() for a in (requests.arrival_s, requests.prompt, requests.generate)
    )
    blocks = [-(-(p + g) // BLOCK) * BLOCK for p, g in zip(prompt, generate, strict=True)]
    admitted, first, finish = [0.0] * n, [0.0] * n, [0.0] * n
    done_prompt = [prompt[i] if prefilled else 0 for i in range(n)]
    tokens = [0] * n
    active: list[int] = []
    waiting = list(range(n))
    now = busy = weighted = 0.0
    while active or waiting:
        if not active:
            now = max(now, arrival[waiting[0]])
        left = max(1, limits.step_tokens - sum(tokens[i] > 0 for i in active))
        generating = [i for i in active if tokens[i]]
        work: list[tuple[int, int]] = []
        for i in [i for i in active if not tokens[i]]:
            if left:
                work.append((i, min(left, prompt[i] - done_prompt[i])))
                left -= work[-1][1]
        while (
            waiting
            and (left or prefilled)
            and arrival[waiting[0]] <= now
            and len(active) < limits.sequences
            and sum(blocks[i] for i in active) + blocks[waiting[0]] <= limits.cache_tokens
        ):
            i = waiting.pop(0)
            admitted[i] = now
            active.append(i)
            if prefilled:
                tokens[i], first[i] = 1, arrival[i]
                if generate[i] == 1:
                    finish[i] = now
                    active.remove(i)
                else:
                    generating.append(i)
            else:
                work.append((i, min(left, prompt[i])))
                left -= work[-1][1]
        if not active:
            continue
        base_s, key_s = prices.decode(len(generating)) if generating else (0.0, 0.0)
        seconds = base_s
        if work:
            rows = sum(c for _, c in work) + len(generating)
            base_s, pair_s = prices.prompt(rows)
            seconds = base_s + pair_s * sum(
                sum(done_prompt[i] + k + 1 for k in range(c)) for i, c in work
            )
        seconds += key_s * sum(prompt[i] + tokens[i] - 1 for i in generating)
        now += seconds
        busy += seconds
        weighted += seconds * len(generating)
        for i in generating:
            tokens[i] += 1
        for i, c in work:
            done_prompt[i] += c
            if done_prompt[i] == prompt[i]:
                tokens[i], first[i] = 1, now
        for i in list(active):
            if tokens[i] == generate[i]:
                finish[i] = now
                active.remove(i)
    times = (np.array(t) for t in (admitted, first, finish))
    return Course(requests, *times, busy, weighted)


@pytest.mark.parametrize("prefilled", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        WIDE,
        Limits(sequences=3, step_tokens=64, cache_tokens=4096),
        Limits(sequences=8, step_tokens=9, cache_tokens=256),
    ],
)
def test_events_are_single_steps(limits: Limits, prefilled: bool) -> None:
    prices = Fixed(0.01, 0.001, 1e-5, 1e-4, 1e-6)
    requests = drawn(9.0, Lengths(1, 90, ".."), Lengths(1, 30, ".."), seed=3, count=300)
    fast = Replica(requests, prices, limits, prefilled).run()
    plain = single_steps(requests, prices, limits, prefilled)
    for name in ("admitted_s", "first_s", "finish_s"):
        np.testing.assert_allclose(getattr(fast, name), getattr(plain, name), rtol=1e-9)
    assert fast.busy_s == pytest.approx(plain.busy_s)
    assert fast.sequence_s == pytest.approx(plain.sequence_s)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_at_a_time_waits_as_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: the mean wait is load / (2 (1 - load)) services."""
    service_s = 0.01
    requests = drawn(load / service_s, one(8), one(1), seed=1, count=100_000)
    course = Replica(requests, Fixed(service_s), Limits(1, 8, 1024)).run()
    wait = float((course.first_s - requests.arrival_s - service_s).mean())
    assert wait == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.05)
    assert course.busy_s == pytest.approx(len(requests) * service_s)


def test_without_limits_as_many_generate_as_arrive_while_one_does() -> None:
    """M/D/infinity: rate times the seconds of a sequence generate in the mean, and each takes the
    same time."""
    requests = drawn(50.0, one(1), one(101), seed=2, count=20_000)
    course = Replica(requests, Fixed(0.01), WIDE).run()
    assert (course.finish_s - course.first_s).max() / 100 == pytest.approx(0.01)
    generating = course.sequence_s / float(course.finish_s.max())
    assert generating == pytest.approx(50.0 * 100 * 0.01, rel=0.02)


def test_every_request_is_served_once_and_time_adds_up() -> None:
    requests = drawn(20.0, Lengths(20, 400, "~"), Lengths(1, 60, ".."), seed=5, count=1000)
    limits = Limits(sequences=16, step_tokens=256, cache_tokens=8192)
    courses = serve_all(requests, 4, Fixed(0.004, 1e-4, 1e-7, 1e-5, 1e-9), limits)
    assert sum(len(c.requests) for c in courses) == len(requests)
    assert sum(c.requests.generate.sum() for c in courses) == requests.generate.sum()
    for c in courses:
        assert (c.admitted_s >= c.requests.arrival_s).all()
        assert (c.first_s > c.admitted_s).all() and (c.finish_s >= c.first_s).all()
        assert (np.diff(c.admitted_s) >= 0).all()
        assert c.busy_s <= c.finish_s.max() + 1e-9
        # Room for blocks is never given twice, and places are not either.
        events = [(t, k) for t in (c.admitted_s,) for k in t]
        blocks = limits.room(c.requests.prompt + c.requests.generate)
        for _, when in events:
            there = (c.admitted_s <= when) & (c.finish_s > when)
            assert blocks[there].sum() <= limits.cache_tokens
            assert there.sum() <= limits.sequences
        # Little: sequences that generate, summed over time, are their times in generation.
        stays = float((c.finish_s - c.first_s).sum())
        assert c.sequence_s == pytest.approx(stays)


@pytest.mark.parametrize(("stay_s", "counted"), [(4.5, slice(10, 95)), (60.0, slice(10, 100))])
def test_waits_are_those_of_requests_that_others_join(stay_s: float, counted: slice) -> None:
    """One a second, a hundred in all: the last few generate alone. Where they are most of all, all
    count but the first."""
    arrival_s = np.arange(100.0)
    assert steady(arrival_s, arrival_s + stay_s) == counted
    waits_s = np.linspace(1.0, 2.0, 100)
    each = np.full(100, 3)
    made = Outcome.of_requests(arrival_s, each, arrival_s + waits_s, arrival_s + stay_s, 2.0, 1.0)
    assert made.ttft_s == pytest.approx(waits_s[counted])
    assert made.tpot_s == pytest.approx((stay_s - waits_s[counted]) / 2)


def test_figures_are_those_of_the_time_in_which_requests_come() -> None:
    """Replicas that fill and empty at both ends are no part of them: of 4,000 requests that come
    in 20 s and take 3 s each, tokens a second were a seventh too few."""
    requests = drawn(200.0, one(100), one(300), seed=2, count=4000)
    courses = serve_all(requests, 2, Fixed(0.01), WIDE)
    said = figures_of(courses, WIDE)
    rate = len(requests) / float(requests.arrival_s[-1])
    assert said["tokens_per_s"] == pytest.approx(rate * 300, rel=0.02)
    assert said["generating"] == pytest.approx(rate / 2 * 299 * 0.01, rel=0.02)
    assert said["busy"] == pytest.approx(1)
    assert said["cache_taken"] == pytest.approx(rate / 2 * 3 * 400 / WIDE.cache_tokens, rel=0.02)
    seldom = drawn(0.5, one(10), one(11), seed=3, count=400)
    alone = figures_of(serve_all(seldom, 1, Fixed(0.01), WIDE), WIDE)
    assert alone["busy"] == pytest.approx(0.5 * 0.11, rel=0.15)
    together = replace(requests, arrival_s=np.zeros(len(requests)))
    whole = figures_of(serve_all(together, 1, Fixed(0.01), WIDE), WIDE)
    assert whole["tokens_per_s"] == pytest.approx(4000 * 300 / 3.0, rel=0.02)


def test_the_most_a_second_parts_rates_that_are_served_from_those_that_are_not() -> None:
    prices, limits = Fixed(0.005, 2e-4, 1e-7, 1e-5), Limits(32, 512, 65536)
    lengths = one(200), one(40)
    most = most_a_second(drawn(1.0, *lengths, seed=0, count=2000), prices, limits)
    # Full batches: 32 sequences leave in 39 steps of all, with 200 + 1 rows of each passed beside.
    waits = {}
    for share in (0.8, 0.95, 1.2):
        requests = drawn(share * most, *lengths, seed=7, count=6000)
        course = Replica(requests, prices, limits).run()
        late, early = (course.admitted_s - requests.arrival_s)[-1000:], 1000 / (share * most)
        waits[share] = float(late.mean()) / early
    assert waits[0.8] < 0.05 and waits[0.95] < 0.3 and waits[1.2] > 0.5


def test_the_same_seed_gives_the_same_course() -> None:
    a, b, c = (drawn(5.0, Lengths(8, 64, "~"), one(9), seed=s, count=50) for s in (1, 1, 2))
    assert (a.arrival_s == b.arrival_s).all() and (a.prompt == b.prompt).all()
    assert (a.arrival_s != c.arrival_s).any()


@pytest.mark.parametrize(("least", "slope"), [(0.01, 0.0), (0.01, 1e-4), (3e-3, 1e-9)])
def test_steps_until_a_time_are_the_fewest(least: float, slope: float) -> None:
    for seconds in np.geomspace(1.1e-4, 4.973, 60):
        steps, passed = 0, 0.0
        while passed < seconds:
            passed += least + slope * steps
            steps += 1
        assert _steps_until(float(seconds), least, slope) == steps


def test_lengths_are_drawn_as_they_are_written() -> None:
    generator = np.random.default_rng(0)
    even = Lengths.of("512..2048", "prompt")
    drawn_ = even.draw(20_000, generator)
    assert drawn_.min() == 512 and drawn_.max() == 2048
    assert drawn_.mean() == pytest.approx(even.mean, rel=0.01)
    tailed = Lengths.of("512~2048", "prompt")
    drawn_ = tailed.draw(50_000, generator)
    assert np.median(drawn_) == pytest.approx(512, rel=0.02)
    assert np.percentile(drawn_, 99) == pytest.approx(2048, rel=0.05)
    assert drawn_.mean() == pytest.approx(tailed.mean, rel=0.01)
    assert Lengths.of(7, "prompt") == Lengths.of("7..7", "prompt") == one(7)
    assert str(tailed) == "512~2048" and str(one(7)) == "7"


@pytest.mark.parametrize("text", ["", "0", "-3", "8..4", "a~b", "1~2~3", "1e9", "99999999999", "~"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as e:
        Lengths.of(text, "prompt")
    assert e.value.code == "P226"


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": t, "input_length": p, "output_length": g, "hash_ids": [0]})
    for t, p, g in ((500, 600, 7), (0, 1200, 5))
)


def test_traces_are_read_as_they_are_published(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    azure, mooncake = traced(tmp_path / "a.csv"), traced(tmp_path / "m.jsonl")
    np.testing.assert_allclose(azure.arrival_s, [0, 0.052, 0.098189], atol=1e-6)
    assert azure.prompt.tolist() == [4808, 3180, 110] and azure.generate.tolist() == [10, 8, 27]
    assert mooncake.arrival_s.tolist() == [0, 0.5] and mooncake.prompt.tolist() == [1200, 600]
    assert azure.rate == pytest.approx(2 / 0.098189, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "arrival_s,prompt\n0,1\n1,2\n",
        "arrival_s,prompt,generate\n0,5,5\n",
        "arrival_s,prompt,generate\n0,5,5\n1,0,5\n",
        "arrival_s,prompt,generate\n0,5,5\nnan,5,5\n",
        "arrival_s,prompt,generate\n0,5,5\ninf,5,5\n",
        "arrival_s,prompt,generate\n0,5,5\n1,5\n",
        "arrival_s,prompt,generate\n0,5,5\n1,5,1e3\n",
        "arrival_s,prompt,generate\n0,5,5\nyesterday,5,5\n",
        "arrival_s,prompt,generate\n0,5,5\n1," + "9" * 5000 + ",5\n",
        '{"arrival_s": 0, "prompt": 5, "generate": true}\n',
        '{"arrival_s": 0, "prompt": 5.5, "generate": 1}\n',
        '{"arrival_s": true, "prompt": 5, "generate": 1}\n' * 2,
        '{"arrival_s": [0], "prompt": 5, "generate": 1}\n',
        "{" + "[" * 100_000,
        '{"a": 1}\n[1]\n',
    ],
)
def test_files_that_are_no_traces_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(PlanError) as e:
        traced(tmp_path / "t")
    assert e.value.code == "P226"


def test_a_trace_that_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path / "b", tmp_path / "none", tmp_path):
        with pytest.raises(PlanError) as e:
            traced(path)
        assert e.value.code == "P226"
