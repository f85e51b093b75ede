"""Collectives sent together up to a chosen size: the pin, the price, the size that is chosen, the program, and what the GPU compiler makes of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels.runtime import RUNTIMES
from planner import account
from planner.buckets import SIZES, searched, with_bucket
from planner.emit.program import emit
from planner.errors import PlanError
from planner.evaluate import price_plan
from planner.pins import from_table, parse_pins
from planner.reprice import Priced, open_recorded, reprice
from planner.strategy import Strategy
from planner.topology import for_devices
from planner.verify.targets import parse_target, require
from planner.verify.worker import environment

OPTIONS: dict[str, Any] = {"devices": 8, "batch": 64, "hardware": "h100", "baselines": False}
RESNET, GPT = "zoo:resnet-tiny", "zoo:gpt-tiny,hidden=512,seq=256,layers=6"
LARGE = "zoo:gpt-tiny,hidden=1024,seq=256,layers=12"
COMPILE = """
import json, sys
from planner.emit.program import emit
from planner.strategy import Strategy
from planner.verify.ahead import compile_ahead
from planner.verify.targets import parse_target
from planner.verify.worker import recorded_model
found = {}
for name in sys.argv[2:]:
    s = Strategy.load(name)
    graph = recorded_model(s, sys.argv[1]).graph(int(s.techniques["microbatches"]))
    program = emit(graph, s.plan_for(graph), workload="train")
    found[name] = compile_ahead(program, "train", parse_target("gpu:h100", 8), "float32", 8).text
print(json.dumps(found))
"""


def planned(pins: str, source: str = RESNET, **more: Any) -> Strategy:
    return planner.plan(source, **{**OPTIONS, **more}, pins=pins)


def priced(s: Strategy, source: str = RESNET) -> Priced:
    return reprice(s, open_recorded(s, source), for_devices("h100", 8))


def test_pins_are_sizes_words_or_wrong() -> None:
    assert parse_pins("bucket=25MB").techniques["bucket"] == 25_000_000 == from_table({"techniques": {"bucket": "25 MB"}}).techniques["bucket"]
    assert [parse_pins(f"bucket={word}").techniques["bucket"] for word in ("none", "auto", "4096")] == [0, "auto", 4096]
    for wrong in ("0", "large", "-5MB", "25 miles"):
        with pytest.raises(PlanError, match="bucket") as e:
            parse_pins(f"bucket={wrong}")
        assert e.value.code == "P020"


@pytest.mark.parametrize("options", [{"hardware": "cpu"}, {"hardware": "tpu-v5e"}, {"workload": "infer"}, {"runtime": "megatron"}])
def test_what_contradicts_a_size_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="bucket") as e:
        planned("bucket=1MB", "zoo:gpt-tiny", **options)
    assert e.value.code == "P024"


def test_a_larger_bucket_spares_latencies() -> None:
    """Twice the size: half the latencies of each kind. Bytes stay, and what is smaller than a bucket altogether is one launch of whatever size."""
    small, large = (planned(f"dp=8,zero=1,micro=1,bucket={size}", GPT) for size in ("1MiB", "2MiB"))
    assert (small.techniques["fused_collective_bytes"], large.techniques["fused_collective_bytes"]) == (2**20, 2**21)
    now, later = priced(small, GPT), priced(large, GPT)
    sent = [u for u in account.collectives(now.flow, now.runs, now.pricer.itemsize) if u.bucketed and u.payload_bytes < 2**20]
    latency = sum(min(now.pricer.lines(u.kind, u.axes))[0] * u.payload_bytes / 2**21 for u in sent)
    assert {u.kind for u in sent} == {"reduce-scatter", "all-gather"} and latency > 0
    wide = [u for u in account.collectives(now.flow, now.runs, now.pricer.itemsize) if u.bucketed and u.payload_bytes >= 2**20]
    latency += sum(min(now.pricer.lines(u.kind, u.axes))[0] * max(0.0, 1 - u.payload_bytes / 2**21) for u in wide)
    assert now.cost.step_time_s - later.cost.step_time_s == pytest.approx(latency, rel=1e-3)
    assert now.cost.step_time_s == pytest.approx(small.costs["step_time_s"], rel=1e-5)
    assert small.costs["communication_bytes_per_device"] == large.costs["communication_bytes_per_device"]
    one, same = (price_plan(now.base, replace(now.plan, bucket_bytes=size), now.pricer)[0].step_time_s for size in (2**30, 2**31))
    assert one == same > 0


def test_the_last_bucket_is_not_hidden() -> None:
    """With overlap a bucket as large as all gradients hides nothing; with none of a size, all but one of the profile's size would."""
    now = priced(planned("dp=8,zero=0,micro=1,bucket=1GiB", GPT, runtime="jax-jit"), GPT)
    assert now.cost.communication_time_s == pytest.approx(now.cost.exposed_communication_time_s)
    cost, *_ = price_plan(now.base, replace(now.plan, bucket_bytes=2**20), now.pricer)
    hidden = cost.communication_time_s - cost.exposed_communication_time_s
    sent = [u for u in account.collectives(now.flow, now.runs, now.pricer.itemsize) if u.phase == "gradient"]
    whole = sum(now.pricer.use_s(u, 2**20) for u in sent)
    assert hidden == pytest.approx(0.3 * (whole - now.pricer.collective_s("all-reduce", ("data",), 2**20)))


def test_auto_takes_the_smallest_of_the_best_sizes() -> None:
    """Neither end: latencies on one side, on the other what nothing hides."""
    s = planned("dp=8,zero=0,micro=1,bucket=auto", LARGE, runtime="jax-jit")
    now, chosen = priced(s, LARGE), s.techniques["fused_collective_bytes"]
    steps = {size: price_plan(now.base, replace(now.plan, bucket_bytes=size), now.pricer)[0].step_time_s for size in SIZES}
    assert steps[chosen] == min(steps.values()) < min(steps[SIZES[0]], steps[SIZES[-1]]), steps
    assert with_bucket(now.base, now.plan, now.pricer, "auto").bucket_bytes == chosen
    assert f"collectives fused up to {chosen / 2**20:.1f} MiB" in str(s)
    hidden = priced(planned("dp=8,zero=0,micro=1,bucket=auto", GPT), GPT)  # without overlap one launch is best, and the smallest size that holds all is taken
    total = sum(u.total_bytes for u in account.collectives(hidden.flow, hidden.runs, hidden.pricer.itemsize) if u.bucketed)
    assert hidden.plan.bucket_bytes == min(size for size in SIZES if size >= total)


def test_what_a_search_proves_holds_for_every_size() -> None:
    runtime = RUNTIMES["jax-shard_map"]
    assert searched(runtime, 0) is runtime and searched(runtime, "auto").bucket_bytes == max(SIZES) and searched(runtime, 5).bucket_bytes == 5.0
    s = planned("dp=8,bucket=auto", "zoo:gpt-tiny,layers=2")
    assert s.solver["bound_s"] <= s.costs["step_time_s"]


@pytest.mark.parametrize("level, kinds", [(0, {"all_gather", "all_reduce", "reduce_scatter"}), (3, {"all_reduce"})])
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_programs_tell_gpus_alone(level: int, kinds: set[str], backend: Any) -> None:
    s = planned(f"dp=8,zero={level},micro=1,bucket=25MB", "zoo:mlp-tiny")
    text = emit(s.graph, s.plan, workload="train", backend=backend).text  # type: ignore[arg-type]
    (table,) = re.findall(r"^FUSED = (\{.*\})", text, re.M)
    assert json.loads(table) == dict.fromkeys(sorted(kinds), 25_000_000) and "fused(mesh)" in text.split("def make_step")[1]
    assert "FUSED = {}" in emit(s.graph, replace(s.plan, bucket_bytes=0), workload="train", backend=backend).text  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_gpu_compiler_sends_them_together(tmp_path: Path) -> None:
    """A gradient of the size or more goes alone; of s bytes of smaller ones in buckets of B there are at least s / B, and no more than 2 s / B and one, since two neighbours
    would not fit into one. The loss may go with any, or alone."""
    try:
        require(parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    files = {size: str(tmp_path / f"{size}.json") for size in (1, 2048, 8192, 2**20)}
    for size, file in files.items():
        planned(f"dp=8,zero=0,micro=1,bucket={size}").save(file)
    s = Strategy.load(files[1])
    now = priced(s)
    sent = [u.payload_bytes for u in account.collectives(now.flow) if u.phase == "gradient" and not u.merged]
    place = {**environment(8, "gpu"), **parse_target("gpu:h100", 8).environment()}
    done = subprocess.run([sys.executable, "-c", COMPILE, RESNET, *files.values()], env=place, capture_output=True, text=True, check=True)
    texts = json.loads(done.stdout.splitlines()[-1])
    counts = {size: len(re.findall(r" all-reduce(?:-start)?\(", texts[file])) for size, file in files.items()}
    assert counts[1] == len(sent) + 1
    for size in (2048, 8192, 2**20):
        alone, small = sum(b >= size for b in sent), sum(b for b in sent if b < size)
        assert alone + ceil(small / size) <= counts[size] <= alone + 2 * small / size + 2, (size, counts, sent)
    assert counts[2**20] == 1 < counts[8192] < counts[2048] < counts[1]
