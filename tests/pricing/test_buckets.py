"""Collectives sent together up to a chosen size: the pin, the price, the size that is chosen, the
program, and what the GPU compiler makes of it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from costmodels.runtimes import load_runtime
from planner.emit.program import emit
from planner.errors import PlanError
from planner.execution import collectives as account
from planner.execution.plan import Plan
from planner.execution.techniques import AUTO
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pins.pins import from_table, parse_pins
from planner.pricing.bucketing import NOTABLE, SIZES, bounding, not_recomputed_s
from planner.pricing.plan_price import price_plan
from planner.pricing.pricer import Pricer
from planner.search.bucketing import price_with_buckets as sized
from planner.search.bucketing import runtime_of_buckets
from planner.search.build_request import make_request
from planner.search.search import Search
from planner.sharding.rule import Limits
from planner.solvers import solve
from planner.solvers.problem import FORBIDDEN, Budget, evaluate
from planner.space.assemble import PICO, assemble
from planner.space.build import build_space, splits_of
from planner.space.techniques import Techniques
from planner.strategy.strategy import Strategy
from planner.verify.targets import parse_target, require
from planner.verify.worker import environment
from planner.whatif.reprice import Priced, open_recorded, reprice
from planner.workload.model import Model, Workload

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
    assert (
        parse_pins("bucket=25MB").techniques["bucket"]
        == 25_000_000
        == from_table({"techniques": {"bucket": "25 MB"}}).techniques["bucket"]
    )
    assert [
        parse_pins(f"bucket={word}").techniques["bucket"] for word in ("none", "auto", "4096")
    ] == [0, "auto", 4096]
    for wrong in ("0", "large", "-5MB", "25 miles"):
        with pytest.raises(PlanError, match="bucket") as e:
            parse_pins(f"bucket={wrong}")
        assert e.value.code == "P020"


@pytest.mark.parametrize(
    "options",
    [{"hardware": "cpu"}, {"hardware": "tpu-v5e"}, {"workload": "infer"}, {"runtime": "megatron"}],
)
def test_what_contradicts_a_size_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="bucket") as e:
        planned("bucket=1MB", "zoo:gpt-tiny", **options)
    assert e.value.code == "P024"


def test_a_larger_bucket_spares_latencies() -> None:
    """Twice the size: half the latencies of each kind, but one for each array of all blocks'
    weights. Bytes stay, and what is smaller than a bucket altogether is one launch of whatever
    size."""
    small, large = (
        planned(f"dp=8,zero=1,micro=1,blocks=looped,bucket={size}", GPT)
        for size in ("1MiB", "2MiB")
    )
    assert (
        small.techniques["fused_collective_bytes"],
        large.techniques["fused_collective_bytes"],
    ) == (2**20, 2**21)
    now, later = priced(small, GPT), priced(large, GPT)
    sent = [u for u in account.collectives(now.flow, now.runs, now.pricer.itemsize) if u.bucketed]
    shares = [[min(1 / u.stacked, u.payload_bytes / size) for size in (2**20, 2**21)] for u in sent]
    latency = sum(
        (a - b) * min(now.pricer.lines(u.kind, u.axes))[0]
        for u, (a, b) in zip(sent, shares, strict=True)
    )
    assert (
        {u.kind for u in sent} == {"reduce-scatter", "all-gather"}
        and {u.stacked for u in sent} == {1, 6}
        and latency > 0
    )
    assert now.cost.step_time_s - later.cost.step_time_s == pytest.approx(latency, rel=1e-3)
    assert now.cost.step_time_s == pytest.approx(small.costs["step_time_s"], rel=1e-5)
    assert (
        small.costs["communication_bytes_per_device"]
        == large.costs["communication_bytes_per_device"]
    )
    one, same = (
        price_plan(now.base, replace(now.plan, bucket_bytes=size), now.pricer)[0].step_time_s
        for size in (2**30, 2**31)
    )
    assert one == same > 0


def test_the_last_bucket_is_not_hidden() -> None:
    """With overlap a bucket as large as all gradients hides nothing; with none of a size, all but
    one of the profile's size would."""
    now = priced(planned("dp=8,zero=0,micro=1,bucket=1GiB", GPT, runtime="jax-jit"), GPT)
    assert now.cost.communication_time_s == pytest.approx(now.cost.exposed_communication_time_s)
    cost, *_ = price_plan(now.base, replace(now.plan, bucket_bytes=2**20), now.pricer)
    hidden = cost.communication_time_s - cost.exposed_communication_time_s
    sent = [
        u
        for u in account.collectives(now.flow, now.runs, now.pricer.itemsize)
        if u.phase == "gradient"
    ]
    whole = sum(now.pricer.use_s(u, 2**20) for u in sent)
    assert hidden == pytest.approx(
        0.3 * (whole - now.pricer.collective_s("all-reduce", ("data",), 2**20))
    )


def test_auto_takes_the_smallest_of_the_best_sizes() -> None:
    """Neither end: latencies on one side, on the other what nothing hides."""
    s = planned("dp=8,zero=0,micro=1,bucket=auto", LARGE, runtime="jax-jit")
    now, chosen = priced(s, LARGE), s.techniques["fused_collective_bytes"]
    steps = {
        size: price_plan(now.base, replace(now.plan, bucket_bytes=size), now.pricer)[0].step_time_s
        for size in SIZES
    }
    assert steps[chosen] == min(steps.values()) < min(steps[SIZES[0]], steps[SIZES[-1]]), steps
    assert sized(now.base, now.plan, now.pricer, "auto")[0].bucket_bytes == chosen
    assert f"collectives fused up to {chosen / 2**20:.1f} MiB" in str(s)
    hidden = priced(
        planned("dp=8,zero=0,micro=1,bucket=auto", GPT), GPT
    )  # without overlap one launch is best, and the smallest size that holds all is taken
    total = sum(
        u.total_bytes
        for u in account.collectives(hidden.flow, hidden.runs, hidden.pricer.itemsize)
        if u.bucketed
    )
    assert hidden.plan.bucket_bytes == min(size for size in SIZES if size >= total)


@pytest.mark.slow
def test_without_a_pin_a_size_is_chosen_where_it_spares_something() -> None:
    """ResNet-50's gradients, each an array of its own, fill more than a launch of 30 MiB; a small
    GPT's are one."""
    wide: dict[str, Any] = {"source": "zoo:resnet50", "devices": 64, "batch": 2048}
    s, plain = (
        planned("dp=64,micro=1,zero=1", **wide),
        planned("dp=64,micro=1,zero=1,bucket=none", **wide),
    )
    size, steps = (
        s.techniques["fused_collective_bytes"],
        [x.costs["step_time_s"] for x in (s, plain)],
    )
    assert size in SIZES and plain.techniques["fused_collective_bytes"] == 0
    assert (
        steps[0] < steps[1] * (1 - NOTABLE)
        and s.solver["bound_s"] <= steps[0]
        and s.solver["objective_s"] <= steps[0]
    )
    assert planned(f"dp=64,micro=1,zero=1,bucket={size}", **wide).costs["step_time_s"] == steps[0]
    assert (
        s.costs["communication_bytes_per_device"] == plain.costs["communication_bytes_per_device"]
    )
    for source, options in (
        ("zoo:gpt-tiny", {}),
        (RESNET, {"hardware": "cpu"}),
        (RESNET, {"hardware": "tpu-v5e"}),
        ("zoo:resnet50", {"runtime": "jax-jit"}),
    ):
        assert (
            planned("dp=8,micro=1,zero=1", source, **options).techniques["fused_collective_bytes"]
            == 0
        )


@pytest.mark.slow
def test_baselines_choose_a_size_too() -> None:
    s = planner.plan(
        "zoo:resnet50",
        devices=64,
        batch=2048,
        hardware="h100",
        mode="data-parallel",
        pins="zero=1,micro=1",
    )
    assert s.techniques["fused_collective_bytes"] > 0 and s.baselines["data_parallel"][
        "step_time_s"
    ] <= s.costs["step_time_s"] * (1 + 1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "source, axes",
    [
        ("zoo:resnet50", {"data": 64}),
        ("zoo:resnet50", {"data": 8, "model": 8}),
        (LARGE, {"data": 16, "model": 4}),
    ],
)
def test_no_size_spares_more_than_is_bounded(source: str, axes: dict[str, int]) -> None:
    """Plans of the space drawn by random prices: what any size spares them is within the bound of
    their mesh, and left out of what the mesh is searched by."""
    request = make_request(devices=64, hardware="h100", topology=None)
    search = Search(Model.open(source, Workload(batch=1024), 64), request)
    mesh, rng = pinned_mesh(request.topology, axes), random.Random(1)
    base, exact = search.base(1), Pricer(request.topology, mesh, request.runtime, request.recipe)
    assert base is not None
    below = bounding(base, exact, 0.0)
    assert (
        bounding(base, exact, 1e9) is exact
        and below.runtime.bucket_bytes > exact.runtime.bucket_bytes
    )
    space, low = (
        build_space(base, pricer, limits=Limits(), zero_axes=tuple(axes))
        for pricer in (exact, below)
    )
    for zero in (0, 1, 2):
        problem, lower = (assemble(s, Techniques(zero), None) for s in (space, low))
        drawn = tuple(
            np.where(c >= FORBIDDEN, c, np.array([rng.randrange(10**9) for _ in c]))
            for c in problem.cost
        )
        choice = solve(replace(problem, cost=drawn), "dp", Budget()).choice
        plan = Plan(
            mesh.shape,
            splits_of(space, choice),
            zero_stage=zero,
            zero_axes=tuple(axes),
            repeated_blocks=base.runs,
        )
        plain = price_plan(base, plan, exact)[0]
        least = min(
            price_plan(base, replace(plan, bucket_bytes=size), exact)[0].step_time_s
            for size in SIZES
        )
        chosen, cost = sized(base, plan, exact, AUTO)
        assert chosen.bucket_bytes in SIZES and cost == price_plan(base, chosen, exact)[0]
        spared = plain.step_time_s - least
        assert spared <= min(plain.launch_time_s, not_recomputed_s(base, exact)) + 1e-12
        assert evaluate(problem, choice).cost - evaluate(lower, choice).cost >= max(
            0.0, spared
        ) * PICO - len(space.variables)


def test_what_a_search_proves_holds_for_every_size() -> None:
    runtime = load_runtime("jax-shard_map")
    assert (
        runtime_of_buckets(runtime, 0) is runtime
        and runtime_of_buckets(runtime, "auto").bucket_bytes == max(SIZES)
        and runtime_of_buckets(runtime, 5).bucket_bytes == 5.0
    )
    s = planned("dp=8,bucket=auto", "zoo:gpt-tiny,layers=2")
    assert s.solver["bound_s"] <= s.costs["step_time_s"]


@pytest.mark.parametrize(
    "level, kinds", [(0, {"all_gather", "all_reduce", "reduce_scatter"}), (3, {"all_reduce"})]
)
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_programs_tell_gpus_alone(level: int, kinds: set[str], backend: Any) -> None:
    s = planned(f"dp=8,zero={level},micro=1,bucket=25MB", "zoo:mlp-tiny")
    text = emit(s.graph, s.plan, workload="train", backend=backend).text  # type: ignore[arg-type]
    (table,) = re.findall(r"^FUSED = (\{.*\})", text, re.M)
    assert (
        json.loads(table) == dict.fromkeys(sorted(kinds), 25_000_000)
        and "fused(mesh)" in text.split("def make_step")[1]
    )
    assert (
        "FUSED = {}"
        in emit(s.graph, replace(s.plan, bucket_bytes=0), workload="train", backend=backend).text
    )  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_gpu_compiler_sends_them_together(tmp_path: Path) -> None:
    """A gradient of the size or more goes alone; of s bytes of smaller ones in buckets of B there
    are at least s / B, and no more than 2 s / B and one, since two neighbours would not fit into
    one. The loss may go with any, or alone."""
    try:
        require(parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    files = {size: str(tmp_path / f"{size}.json") for size in (1, 2048, 8192, 2**20)}
    for size, file in files.items():
        planned(f"dp=8,zero=0,micro=1,bucket={size}").save(file)
    s = Strategy.load(files[1])
    now = priced(s)
    sent = [
        u.payload_bytes
        for u in account.collectives(now.flow)
        if u.phase == "gradient" and not u.merged
    ]
    place = {**environment(8, "gpu"), **parse_target("gpu:h100", 8).environment()}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, RESNET, *files.values()],
        env=place,
        capture_output=True,
        text=True,
        check=True,
    )
    texts = json.loads(done.stdout.splitlines()[-1])
    counts = {
        size: len(re.findall(r" all-reduce(?:-start)?\(", texts[file]))
        for size, file in files.items()
    }
    assert counts[1] == len(sent) + 1
    for size in (2048, 8192, 2**20):
        alone, small = sum(b >= size for b in sent), sum(b for b in sent if b < size)
        assert alone + ceil(small / size) <= counts[size] <= alone + 2 * small / size + 2, (
            size,
            counts,
            sent,
        )
    assert counts[2**20] == 1 < counts[8192] < counts[2048] < counts[1]
