"""Two microbatches at the same time: the two streams, the pin, what a search makes of it, the
program, its bytes and gradients, and the GPU compiler's schedule."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from costmodels.overlap import BOTH, KERNELS, LINKS, together_s
from planner.emit.program import emit
from planner.errors import PlanError
from planner.execution import collectives
from planner.execution.collective import item_sizes
from planner.graph.ir import Graph
from planner.machine.topology import for_devices
from planner.pricing.loop_overlap import hidden_beside_kernels
from planner.pricing.microbatch_overlap import hidden_shares, launch_bytes
from planner.pricing.peak_memory import memory_parts
from planner.pricing.plan_price import price_plan
from planner.pricing.step_time import recomputed_nodes
from planner.search.build_request import make_request
from planner.search.microbatch_overlap import with_microbatch_overlap
from planner.search.request import Candidate
from planner.search.search import Search
from planner.strategy.strategy import Strategy
from planner.verify.numerics import (
    Twin,
    load_program,
    placed,
    seeded_batch,
    seeded_values,
    unstacked,
    worst_error,
)
from planner.verify.targets import parse_target, require
from planner.verify.worker import environment
from planner.whatif.reprice import Priced, open_recorded, reprice
from planner.workload.model import Model, Workload
from planner.workload.weights import load
from tests.pricing.test_buckets import COMPILE

GPT = "zoo:gpt-tiny,layers=4,seq=32"
WIDE = "zoo:gpt-tiny,hidden=8192,seq=2048,layers=8,heads=64"
MEGATRON = "tp=16,tensor=megatron-sp"
CHUNKS = ("micro=2,copies=1", "micro=2,copies=2")


def planned(pins: str, source: str = GPT, devices: int = 8, **more: Any) -> Strategy:
    return planner.plan(
        source,
        **{"devices": devices, "batch": 64, "hardware": "h100", "baselines": False, **more},
        pins=pins,
    )


def priced(pins: str, source: str = GPT, devices: int = 8, hardware: str = "h100") -> Priced:
    s = planned(pins, source, devices, hardware=hardware)
    return reprice(s, open_recorded(s, source), for_devices(hardware, devices))


# --- the price


def test_heads_that_are_gathered_have_a_gradient_of_each() -> None:
    """Until both are added up and scattered; with one there is the gathered weight or the gradient.
    Compiled for H100 as planned: Llama-3 8B of four layers takes 17.2 GB where 15.3 were."""
    source = "zoo:llama-tiny,hidden=512,vocab=32000"
    one, two = (
        memory_parts(p.base, p.flow, p.pricer, p.runs)
        for p in (priced(f"dp=8,zero=3,recompute=none,{m}", source) for m in CHUNKS)
    )
    head = 2 * 512 * 32000
    more = (two.epilogue_workspace - one.epilogue_workspace) / head
    assert more == pytest.approx(2, rel=0.1)


def test_a_gathered_head_has_its_gradient_beside_it_on_tpus() -> None:
    """The compiler scatters it while the operand's gradient is made, which reads the weight.
    Compiled for v5p Llama-3 8B of four layers takes 10.6 GB as planned, where 9.7 were."""
    source = "zoo:llama-tiny,hidden=512,vocab=32000"
    gpu, tpu = (
        memory_parts(p.base, p.flow, p.pricer, p.runs)
        for p in (
            priced(f"dp=8,zero=3,recompute=none,{CHUNKS[0]}", source, hardware=hardware)
            for hardware in ("h100", "tpu-v5p")
        )
    )
    head = 2 * 512 * 32000
    more = (tpu.epilogue_workspace - gpu.epilogue_workspace) / head
    assert more == pytest.approx(1, rel=0.1)


def test_one_sends_while_the_other_computes() -> None:
    assert (
        together_s([(KERNELS, 1.0), (LINKS, 1.0)], 2) == 3.0
    )  # not 4: the second computes while the first sends
    assert together_s([(KERNELS, 2.0), (LINKS, 1.0), (KERNELS, 2.0)], 2) == 8.0  # nothing shows
    assert (
        together_s([(KERNELS, 1.0), (LINKS, 5.0)], 2) == 11.0
    )  # one link: all that is hidden is the second's product
    assert together_s([(KERNELS, 1.0), (BOTH, 1.0)], 2) == 4.0


@given(
    st.lists(
        st.tuples(st.sampled_from([KERNELS, LINKS, BOTH]), st.floats(0.01, 10)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_no_stream_is_in_two_places(
    chain: list[tuple[tuple[int, ...], float]], copies: int
) -> None:
    whole = sum(s for _, s in chain)
    busy = max(sum(s for where, s in chain if stream in where) for stream in BOTH)
    found = together_s(chain, copies)
    assert max(whole, copies * busy) - 1e-9 <= found <= copies * whole + 1e-9
    assert copies > 1 or found == pytest.approx(whole)


def test_only_what_a_copy_waits_for_hides_and_no_more_than_the_runtime_says() -> None:
    now = priced("dp=2,tp=4,tensor=megatron-sp,zero=1,micro=4,copies=2")
    sent = [
        (use, now.pricer.use_s(use))
        for use in collectives.collectives(now.flow, now.runs, now.pricer.itemsize)
    ]
    shares = hidden_shares(
        now.base, now.flow, now.runs, sent, recomputed_nodes(now.flow, now.runs), now.pricer
    )
    assert {use.phase for (use, _), share in zip(sent, shares, strict=True) if share} == {
        "forward",
        "backward",
    }
    assert all(0 <= share <= now.pricer.copies_hidden for share in shares)
    assert not any(
        share
        for (use, _), share in zip(sent, shares, strict=True)
        if use.phase in ("gradient", "optimizer") or use.inside
    )
    hidden = sum(s * share for (_, s), share in zip(sent, shares, strict=True))
    beside = hidden_beside_kernels(  # new parameters, beside the updates of others
        now.base, now.flow, now.runs, frozenset(), [(use, s, 0.0) for use, s in sent], now.pricer
    )
    hidden += sum(under for use, _, under in beside if use.phase == "optimizer")
    assert (
        now.cost.communication_time_s - now.cost.exposed_communication_time_s
        == pytest.approx(hidden)
        and hidden > 0
    )


def test_memory_is_that_of_microbatches_twice_as_large() -> None:
    two, one = (
        priced(f"dp=2,tp=4,tensor=megatron-sp,zero=1,{pins}").cost.memory
        for pins in ("micro=4,copies=2", "micro=2,copies=1,blocks=looped")
    )
    assert two.activations == pytest.approx(one.activations, rel=0.02)
    assert (two.parameters, two.gradients, two.optimizer) == (
        one.parameters,
        one.gradients,
        one.optimizer,
    )


# --- the search


@pytest.mark.slow
def test_a_search_takes_copies_where_they_pay() -> None:
    free, one, two = (
        planned(f"{MEGATRON},blocks=looped{pins}", WIDE, 16)
        for pins in ("", ",copies=1", ",copies=2")
    )
    assert (free.techniques["copies"], one.techniques["copies"], two.techniques["copies"]) == (
        2,
        1,
        2,
    )
    assert (
        free.costs["step_time_s"] == pytest.approx(two.costs["step_time_s"], rel=0.01)
        and free.costs["step_time_s"] < 0.95 * one.costs["step_time_s"]
    )
    assert free.solver["gap"] is None  # bounds count all communication as shown
    assert "2 overlapped" in str(free)


def test_a_search_leaves_them_where_they_do_not() -> None:
    """CPUs hide nothing; nor is there anything to hide where the batch alone is cut."""
    for hardware in ("cpu", "h100"):
        assert planned("dp=8", hardware=hardware).techniques["copies"] == 1
    cpu = planned("tp=8,micro=2,copies=2", hardware="cpu")
    assert cpu.costs["communication_time_s"] == cpu.costs["exposed_communication_time_s"]


@pytest.mark.parametrize(
    "pins, says",
    [
        ("copies=2,pp=2", "stages"),
        ("copies=2,micro=3", "microbatches = 3"),
        ("copies=2,micro=1", "microbatches = 1"),
    ],
)
def test_pins_that_contradict_are_named(pins: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as e:
        planned(pins)
    assert e.value.code == "P024" and "copies = 2" in e.value.what


@pytest.mark.parametrize(
    "options", [{"workload": "infer"}, {"runtime": "megatron"}, {"runtime": "jax-jit"}]
)
def test_requests_that_contradict_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="copies") as e:
        planned("copies=2", **options)
    assert e.value.code == "P024"


def test_an_odd_batch_and_other_numbers_are_refused() -> None:
    for pins, batch, code in (("copies=2", 15, "P035"), ("copies=3", 64, "P020")):
        with pytest.raises(PlanError, match="copies") as e:
            planned(pins, batch=batch)
        assert e.value.code == code


def test_a_file_that_cannot_be_is_refused() -> None:
    s = planned("tp=8,micro=2")
    with pytest.raises(PlanError, match="copies 3 is none of 1, 2") as e:
        replace(s, techniques={**s.techniques, "copies": 3}).plan_for(s.graph)  # type: ignore[arg-type]
    assert e.value.code == "P060"


# --- the program


def bytes_of(s: Strategy, phases: set[str]) -> dict[tuple[str, tuple[str, ...]], int]:
    found = priced_of(s)
    totals: dict[tuple[str, tuple[str, ...]], int] = {}
    for use in collectives.collectives(found.flow, found.runs):
        if use.phase in phases:
            totals[use.kind, use.axes] = totals.get((use.kind, use.axes), 0) + use.total_bytes
    return totals


def priced_of(s: Strategy) -> Priced:
    return reprice(s, open_recorded(s, GPT), for_devices("h100", 8))


def test_gradients_are_reduced_and_weights_gathered_once_for_both() -> None:
    """Bytes of gradients are those of half as many microbatches; those that products wait for, over
    the axis that cuts them, those of as many."""
    s = planned("dp=4,tp=2,zero=3,micro=4,copies=2,tensor=megatron")
    large, small = ({**s.techniques, "copies": 1, "microbatches": n} for n in (2, 4))
    two, alone = s, replace(s, techniques=small)
    halved = replace(s, techniques=large)
    own = {"gradient", "optimizer", "recompute"}
    two, alone = s, replace(s, techniques=small)
    assert bytes_of(two, own) == bytes_of(halved, own) != bytes_of(alone, own)
    sent, apart = (
        bytes_of(x, {"forward", "backward"})["all-reduce", ("tensor",)] for x in (two, alone)
    )
    assert sent == apart > 0


def test_statements_stand_twice_and_weights_once() -> None:
    s = planned("dp=4,tp=2,zero=3,micro=4,copies=2,tensor=megatron")
    two, one = (
        emit(graph_of(s), replace(plan_of(s), overlapped_microbatches=n), workload="train")
        .text.split("\ndef block0(")[1]
        .split("\n\n\n")[0]
        for n in (2, 1)
    )
    for word, times in (
        ("attention(", 2),
        ("lax.psum(", 2),
        ("gather_weight(", 1),
        ("gather_after(", 1),
    ):
        assert two.count(word) == times * one.count(word), word
    assert "OVERLAPPED_MICROBATCHES = 2" in emit(graph_of(s), plan_of(s), workload="train").text
    with pytest.raises(PlanError, match="shard_map only") as e:
        emit(graph_of(s), plan_of(s), workload="train", backend="jit")
    assert e.value.code == "P076"


def graph_of(s: Strategy) -> Graph:
    assert s.graph is not None
    return s.graph


def plan_of(s: Strategy) -> Any:
    return s.plan_for(graph_of(s))


def test_launches_of_both_are_not_joined() -> None:
    """A kind of collective goes together up to less than two of the largest that kernels wait for,
    unless that is above the compiler's own size."""
    s = planned("dp=2,tp=4,tensor=megatron,zero=1,micro=2,copies=2")
    now = priced_of(s)
    uses = collectives.collectives(now.flow, now.runs, item_sizes("bfloat16"))
    most = launch_bytes(uses, dict(now.plan.mesh))
    text = emit(graph_of(s), plan_of(s), workload="train", compute="bfloat16").text
    (table,) = re.findall(r"^FUSED = (\{.*\})", text, re.M)
    assert json.loads(table) == {"all_reduce": most["all-reduce"]}
    largest = max(
        u.payload_bytes
        for u in uses
        if u.place == "blocks" and u.kind == "all-reduce" and not u.inside
    )
    assert most["all-reduce"] == 2 * largest - 1
    assert (
        "FUSED = {}"
        in emit(
            graph_of(s),
            replace(plan_of(s), overlapped_microbatches=1),
            workload="train",
            compute="bfloat16",
        ).text
    )


@pytest.mark.parametrize(
    "micro, options",
    [
        (4, {"ignore_index": 3}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"ignore_index": 3}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(
    micro: int, options: dict[str, Any]
) -> None:
    """Also where rows are ignored, whose number differs from copy to copy."""
    source = "zoo:gpt-tiny,layers=2,seq=16,hidden=32"
    s = planned(
        f"dp=4,tp=2,zero=1,micro={micro},copies=2",
        source,
        batch=16,
        hardware="cpu",
        precision="fp32",
        **options,
    )
    graph = graph_of(s)
    values = seeded_values(graph, load(graph, Path(), seed_missing=True))
    program = emit(graph, plan_of(s), workload="train")
    module = load_program(program)
    mesh = module.make_mesh()
    params, frozen = (
        placed(module, program, table, values, mesh) for table in ("PARAMS", "FROZEN")
    )
    feeds = seeded_batch(module, {}, 1)
    if options:
        feeds["labels"][0, :3] = 3
    loss, grads = module.make_gradients(mesh)(
        params, frozen, module.place(feeds, module.specs_of(module.INPUTS), mesh)
    )
    want, wanted = Twin(graph, "train", values).gradients(feeds, micro)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert worst_error(unstacked(module, program, grads, wanted), wanted)[0] < 1e-4


def test_a_plan_in_copies_costs_what_its_parts_do() -> None:
    now = priced(MEGATRON + ",copies=2", WIDE, 16)
    cost, *_ = price_plan(now.base, now.plan, now.pricer)
    parts = (
        cost.compute_time_s
        + cost.bubble_time_s
        + cost.exposed_communication_time_s
        + cost.optimizer_time_s
        + cost.loop_copy_time_s
    )
    assert cost.step_time_s == pytest.approx(parts) and np.isfinite(parts)
    assert sum(cost.exposed_by_axes.values()) == pytest.approx(cost.exposed_communication_time_s)


@pytest.mark.slow
def test_copies_are_tried_of_what_fits_and_of_equal_plans_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal plans of meshes that are one with an axis in two parts, and plans that do not fit, are
    no finalists."""
    search = Search(
        Model.open(WIDE, Workload(batch=64), 16),
        make_request(devices=16, hardware=None, topology=None, baselines=False),
    )
    best = search.run().best
    assert best is not None

    def slower(seconds: float, exposed: float, size: int = 2**30) -> Candidate:
        cost = replace(
            best.cost,
            step_time_s=seconds,
            exposed_communication_time_s=exposed,
            memory=replace(best.cost.memory, parameters=size),
        )
        return replace(best, cost=cost)

    plain = replace(
        best, cost=replace(best.cost, step_time_s=10.0, exposed_communication_time_s=0.5)
    )
    huge, equal, other = (
        slower(10.1, 9.0, 2**50),
        [slower(10.2, 8.0) for _ in range(5)],
        slower(10.3, 7.0),
    )
    asked: list[tuple[float, int]] = []
    monkeypatch.setattr(
        "planner.search.microbatch_overlap._overlapped",
        lambda search, c, micro: asked.append((c.cost.step_time_s, micro)),
    )
    monkeypatch.setattr(search.offered, "microbatches", lambda mesh: range(1, 1000))
    assert (
        with_microbatch_overlap(
            search, plain, (huge, *equal, other, huge), search.request.limit_bytes
        )
        is plain
    )
    assert {seconds for seconds, _ in asked} == {10.2, 10.3} and len(asked) == len(set(asked))


@pytest.mark.slow
def test_the_gpu_compiler_puts_products_of_one_beside_collectives_of_the_other(
    tmp_path: Path,
) -> None:
    """Of the collectives in loops some have products between start and end; without copies, where
    all wait for one another, fewer have."""
    try:
        require(parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    source, files = "zoo:gpt-tiny,hidden=1024,seq=512,layers=4,heads=8", {}
    for copies in (1, 2):
        files[copies] = str(tmp_path / f"{copies}.json")
        planned(f"tp=8,tensor=megatron-sp,zero=0,micro={copies},copies={copies}", source).save(
            files[copies]
        )
    place = {**environment(8, "gpu"), **parse_target("gpu:h100", 8).environment()}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, source, *files.values()],
        env=place,
        capture_output=True,
        text=True,
        check=True,
    )
    texts = json.loads(done.stdout.splitlines()[-1])
    one, two = (beside(texts[files[copies]]) for copies in (1, 2))
    assert two[1] == 2 * one[1] > 0, "collectives of the copies were joined"
    assert two[0] / two[1] > max(0.5, one[0] / one[1]), (one, two)


def beside(text: str) -> tuple[int, int]:
    """(collectives of loops that have a product between start and end, all of them) of a scheduled
    program."""
    having = every = 0
    for body in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \([^\n]*\{\n)", text):
        lines = body.splitlines()
        for at, line in enumerate(lines if "ENTRY" not in lines[0] else []):
            found = re.match(
                r"\s*%?(\S+) = .*"
                r" (?:all-gather-start|all-reduce-start|reduce-scatter-start|async-start)\(",
                line,
            )
            if found:
                end = next(
                    k
                    for k in range(at + 1, len(lines))
                    if re.search(rf"-done\(.*%?{re.escape(found[1])}\b", lines[k])
                )
                every += 1
                having += any("gemm" in x for x in lines[at + 1 : end])
    return having, every
