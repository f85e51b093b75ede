"""Time by part of compiled programs: an emitted program's own lines say which part a kernel
serves, and attention that was priced with a fused kernel has to have one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from costmodels.hardware.device import AttentionPass, load_device
from costmodels.kernels import attention_time_s, roofline_time_s
from costmodels.overlap import Step, waited_s
from costmodels.products import Product, kernel_time_s
from planner.emit.from_strategy import program
from planner.execution.plan import Plan
from planner.graph.ir import Graph
from planner.pins.pins import Pins
from planner.strategy.strategy import Strategy
from planner.verify import worker
from planner.verify.clock import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    HEAD,
    NORMS,
    OPTIMIZER,
    PRODUCTS,
    Clock,
)
from planner.verify.predicted import predict
from planner.verify.report import FLOPS, TIME, CompiledSizes, VerifyReport
from planner.verify.targets import Target
from planner.verify.timing import Parts, clock
from planner.verify.worker import recorded_model
from tests.verify.test_targets import compiler

SOURCE = "zoo:llama-tiny,layers=4"
H100 = load_device("h100")
ATTEND, FIRST = "/model/layers.*/self_attn/Attention", "/model/layers.0/self_attn/Attention"


def test_waits_follow_one_stream_of_kernels_and_one_of_collectives() -> None:
    a, b = Step("start", 3.0, "a"), Step("start", 2.0, "b")
    work, wait_a, wait_b = Step("work", 4.0), Step("wait", name="a"), Step("wait", name="b")
    assert waited_s([a, wait_a, work]) == {"a": 3.0}
    assert waited_s([a, work, wait_a]) == {"a": 0.0}
    assert waited_s([a, b, work, wait_b, wait_a]) == {"b": 1.0, "a": 0.0}
    assert waited_s([a, Step("work", 1.0), b, wait_a]) == {"a": 2.0, "b": 2.0}
    assert waited_s([work, wait_a]) == {}


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return planner.plan(
        SOURCE,
        devices=8,
        batch=16,
        hardware="h100-sxm",
        precision="bf16-mixed",
        pins=Pins(mesh={"data": (8,)}, techniques={"blocks": "looped"}),
        baselines=False,
    )


@pytest.fixture(scope="module")
def emitted(strategy: Strategy) -> str:
    return str(program(strategy, SOURCE).text)


class Text:
    """HLO of kernels that came from given lines of an emitted program."""

    def __init__(self, source: str) -> None:
        self.source = source.splitlines()
        self.functions: list[str] = []
        self.rows: list[tuple[int, int]] = []
        self.lines: list[str] = []
        self.before: list[str] = []

    def frame(self, function: str, mark: str) -> int:
        """The frame of the first line with a mark."""
        line = next(k for k, text in enumerate(self.source, 1) if mark in text)
        if function not in self.functions:
            self.functions.append(function)
        self.rows.append((self.functions.index(function) + 1, line))
        return len(self.rows)

    def add(self, instruction: str, frame: int = 0) -> None:
        made = f", metadata={{stack_frame_id={frame}}}" if frame else ""
        self.lines.append(f"  %{instruction}{made}")

    def __str__(self) -> str:
        functions = [f'{k} "{name}"' for k, name in enumerate(self.functions, 1)]
        places = [
            f"{k} {{file_name_id=1 function_name_id={f} line={line}}}"
            for k, (f, line) in enumerate(self.rows, 1)
        ]
        frames = [
            f"{k} {{file_location_id={k} parent_frame_id=0}}" for k in range(1, len(places) + 1)
        ]
        return "\n".join(
            [
                *("HloModule m", "", "FileNames", '1 "emitted.py"', "", "FunctionNames"),
                *functions,
                *("", "FileLocations", *places, "", "StackFrames", *frames, ""),
                *self.before,
                *("ENTRY %main (x: bf16[1024,512]) -> bf16[1024,512] {",),
                "  %x = bf16[1024,512]{1,0} parameter(0)",
                "  %w = bf16[512,512]{1,0} parameter(1)",
                *self.lines,
                "  ROOT %end = bf16[1024,512]{1,0} bitcast(%x)",
                "}",
            ]
        )


WIDE = "bf16[1024,512]{1,0}"
HEADS = "bf16[2,64,4,32]{3,2,1,0}"


def compiled(source: str, fused: bool) -> str:
    """A kernel of every part, and two collectives."""
    text = Text(source)
    dots = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    norm = text.frame("rms_norm", "# /model/layers.*/input_layernorm")
    text.add(
        f"up = {WIDE} dot(%x, %w), {dots}", text.frame("block0", "# /model/layers.*/mlp/up_proj")
    )
    text.add(f"logits = {WIDE} dot(%x, %w), {dots}", text.frame("loss_of", "# /lm_head/MatMul"))
    text.add(f"loss.1 = {WIDE} negate(%logits)", text.frame("loss_of", "# CrossEntropyLoss loss"))
    text.add(f"normed = {WIDE} negate(%x)", norm)
    text.add(f"sum = {WIDE} add(%x, %up)", text.frame("block0", "# /model/layers.*/Add "))
    text.add(f"new = {WIDE} add(%x, %up)", text.frame("update", "m = BETA1 * m"))
    text.add("turned = bf16[512,1024]{1,0} transpose(%x), dimensions={1,0}")
    # What is put into a stack is a copy, whatever is made on the way.
    stack = text.frame("loss_of", "lax.scan")
    text.before = [
        f"%put (s: bf16[4,1024,512], n: {WIDE}) -> bf16[4,1024,512] {{",
        "  %s = bf16[4,1024,512]{2,1,0} parameter(0)",
        f"  %n = {WIDE} parameter(1)",
        f"  %silu = {WIDE} negate(%n), metadata={{stack_frame_id={norm}}}",
        "  %at = s32[] constant(0)",
        "  ROOT %d = bf16[4,1024,512]{2,1,0} dynamic-update-slice(%s, %silu, %at, %at, %at)",
        "}",
        "",
    ]
    text.add("stacked = bf16[4,1024,512]{2,1,0} broadcast(%at)")
    text.add("saved = bf16[4,1024,512]{2,1,0} fusion(%stacked, %up), kind=kLoop, calls=%put", stack)
    attend = text.frame("block0", f"# {ATTEND}")
    text.add(f"q = {HEADS} bitcast(%x)")
    if fused:
        text.add(
            f"attend = ({HEADS}, f32[2,4,64]{{2,1,0}}) custom-call(%q, %q, %q),"
            ' custom_call_target="__cudnn$fmhaSoftmax"',
            attend,
        )
    else:
        text.add(f"attend = {WIDE} dot(%x, %w), {dots}", attend)
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum"
    text.add(f"all-reduce-start = {WIDE} all-reduce-start(%up), {groups}")
    text.add(f"under = {WIDE} add(%x, %up)", attend)
    text.add(f"all-reduce-done = {WIDE} all-reduce-done(%all-reduce-start)")
    text.add(f"all-reduce = {WIDE} all-reduce(%up), {groups}")
    return str(text).replace("broadcast(%at)", "broadcast(%w)")


def opened(strategy: Strategy) -> tuple[Graph, Plan, Any]:
    model = recorded_model(strategy, SOURCE)
    graph = model.graph(int(strategy.techniques["microbatches"]))
    plan = strategy.plan_for(graph)
    return graph, plan, predict(graph, plan, workload="train", compute="bfloat16").runs


def timed(strategy: Strategy, source: str, fused: bool, as_priced: bool = True) -> Clock:
    graph, plan, runs = opened(strategy)
    return clock(
        CompiledSizes(compiled(source, fused), 2**30, 0, 0, 2 * 2**30),
        source,
        strategy=strategy,
        graph=graph,
        plan=plan,
        runs=runs,
        target=Target("gpu", "h100"),
        exact=True,
        as_priced=as_priced,
    )


def test_kernels_are_put_to_the_part_whose_line_made_them(strategy: Strategy, emitted: str) -> None:
    found = timed(strategy, emitted, fused=True)
    rows = {part.part: part for part in found.parts}
    wide, product = 1024 * 512 * 2, 2 * 1024 * 512 * 512
    read = 2 * wide + 512 * 512 * 2
    attended = 4 * 2 * 64 * 4 * 32 * 2 + 2 * 4 * 64 * 4

    def seconds(*kernels: tuple[int, int]) -> float:
        return sum(roofline_time_s(H100, flops, size, "bfloat16") for flops, size in kernels)

    sizes = Product(*(np.array([float(x)]) for x in (1024, 512, 512, 1)))
    dot = float(kernel_time_s(H100, sizes, np.array([read]), "bfloat16")[0])
    expected = {
        PRODUCTS: (dot, 1, read, product),
        HEAD: (dot + seconds((0, 2 * wide)), 2, read + 2 * wide, product),
        NORMS: (seconds((0, 2 * wide)), 1, 2 * wide, 0),
        ELEMENTWISE: (seconds((0, 3 * wide)), 1, 3 * wide, 0),
        OPTIMIZER: (seconds((0, 3 * wide)), 1, 3 * wide, 0),
    }
    for part, (each_s, runs, moved, flops) in expected.items():
        row = rows[part]
        assert (row.kernels, row.moved_bytes, row.flops) == (runs, moved, flops), part
        assert row.compiled_s == pytest.approx(each_s)
    # The transpose, the fill and the slice that is put into it.
    filled = 4 * wide + 512 * 512 * 2
    assert rows[COPIES].moved_bytes == 2 * wide + filled + 2 * wide and rows[COPIES].kernels == 3
    # cuDNN's kernel, and what runs beside the collective.
    assert rows[ATTENTION].moved_bytes == attended + 3 * wide
    flops = 4 * 2 * 4 * 64 * 64 * 32
    assert rows[ATTENTION].flops == flops
    fused_s = attention_time_s(H100, flops, attended, "bfloat16", AttentionPass(False, 32))
    assert rows[ATTENTION].compiled_s == pytest.approx(fused_s + seconds((0, 3 * wide)))
    assert found.compiled_s == pytest.approx(sum(r.compiled_s for r in found.parts))


def test_prices_by_part_are_those_of_the_file(strategy: Strategy, emitted: str) -> None:
    found = timed(strategy, emitted, fused=True)
    costs = strategy.costs
    parts = ("compute_time_s", "optimizer_time_s", "loop_copy_time_s")
    assert found.priced_s == pytest.approx(sum(costs[part] for part in parts))
    priced = {part.part: part.priced_s for part in found.parts}
    row = strategy.details[FIRST]["kernels"]
    assert priced[ATTENTION] == row["step_s"]
    assert priced[COPIES] == costs["loop_copy_time_s"] > 0
    assert found.collectives.priced_exposed_s == costs["exposed_communication_time_s"]
    # Files before this one had no price of each operator.
    before = timed(replace(strategy, details={}), emitted, fused=True)
    assert before.priced_s is None and before.distance is None and not before.apart
    assert before.compiled_s == found.compiled_s and "priced" not in before.says


def test_collectives_hide_under_the_kernels_that_the_schedule_has_beside_them(
    strategy: Strategy, emitted: str
) -> None:
    sent = timed(strategy, emitted, fused=True).collectives
    each_s = sent.links_s / 2
    under = roofline_time_s(H100, 0, 3 * 1024 * 512 * 2, "bfloat16")
    assert sent.count == 2 and sent.whole == 1
    assert sent.exposed_s == pytest.approx(each_s + max(0.0, each_s - under))


def test_attention_priced_as_fused_and_compiled_in_blocks_is_no_verified_program(
    strategy: Strategy, emitted: str
) -> None:
    assert strategy.nodes[FIRST]["attention_kernel"] == "cudnn"
    right, wrong = timed(strategy, emitted, fused=True), timed(strategy, emitted, fused=False)
    assert not right.unfused and right.judged
    (phrase,) = wrong.unfused
    assert ATTEND in phrase and "cudnn" in phrase
    base = VerifyReport("m", "shard_map", {"data": 8}, "train", "x", (), asked=False)
    good, bad = replace(base, clock=right), replace(base, clock=wrong)
    assert good.ok and not bad.ok and bad.findings() == (phrase,)
    assert f"NOT VERIFIED: {phrase}" in " ".join(bad.text(1000).split())
    assert {v.name: v.state for v in bad.verdicts}[TIME] == "wrong"
    # The price is of another precision, where attention is in blocks: nothing to hold it to.
    other = timed(strategy, emitted, fused=False, as_priced=False)
    assert not other.unfused and not other.judged and "were priced" not in other.says
    assert {v.name: v.state for v in replace(base, clock=other).verdicts}[TIME] == "not judged"
    # Attention that was priced in blocks may be in blocks.
    nodes = {**strategy.nodes, FIRST: {**strategy.nodes[FIRST], "attention_kernel": "blocks: why"}}
    assert not timed(replace(strategy, nodes=nodes), emitted, fused=False).unfused
    # Experts that were priced with one kernel have to have one.
    (other_name,) = list(strategy.nodes)[:1]
    for kernel, said in (("triton", 1), ("mosaic", 1), ("blocks: why", 0)):
        nodes = {
            **strategy.nodes,
            other_name: {**strategy.nodes[other_name], "expert_kernel": kernel},
        }
        lost = timed(replace(strategy, nodes=nodes), emitted, fused=True).unfused
        assert len(lost) == said and all("rows of all experts" in phrase for phrase in lost)


def test_a_report_with_a_clock_is_kept_and_shown(strategy: Strategy, emitted: str) -> None:
    found = replace(timed(strategy, emitted, fused=True), limit_bytes=2 * 2**30)
    base = VerifyReport("m", "shard_map", {"data": 8}, "train", "x", (), asked=False)
    report = replace(base, clock=found)
    data = json.loads(report.to_json())
    assert VerifyReport.from_dict(data) == report
    assert data["clock"]["compiled_s"] == found.compiled_s
    assert "1.0 GiB ABOVE the plan's limit of 2.0 GiB" in report.text(200)
    assert "roofline of h100-sxm; nothing was run" in report.text(100)
    assert max(map(len, report.text(80).splitlines())) <= 80
    # Reports of virtual CPU devices have no clock.
    assert base.verdicts[-1].name == "memory" and "roofline" not in base.text()
    assert VerifyReport.from_dict({k: v for k, v in base.to_dict().items() if k != "clock"}) == base


def test_the_head_is_the_last_product_before_the_loss(strategy: Strategy) -> None:
    graph, _, runs = opened(strategy)
    parts = Parts(graph, runs).of_node
    heads = [n.id for n in graph.nodes if parts[n.id] == HEAD]
    assert heads == ["/lm_head/MatMul", graph.nodes[-1].id]
    assert {parts[n.id] for n in graph.nodes} == {ATTENTION, PRODUCTS, HEAD, NORMS, ELEMENTWISE}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "right"), [("shard_map", True), ("jit", False)])
def test_the_gpu_compiler_is_timed(strategy: Strategy, backend: str, right: bool) -> None:
    """Of the same plan: programs whose collectives the partitioner places run attention in
    blocks."""
    report = worker.verify(strategy, SOURCE, target=compiler("gpu:h100"), backend=backend)
    found = report.clock
    assert found is not None and found.judged
    assert report.ok == right == (not found.unfused)
    parts = {part.part: part for part in found.parts}
    assert {ATTENTION, PRODUCTS, HEAD, NORMS, ELEMENTWISE, COPIES, OPTIMIZER} == parts.keys()
    flops = sum(f.compiled for f in report.figures if f.of == FLOPS)  # padding is beside products
    assert sum(part.flops for part in found.parts) <= flops
    if not right:
        assert sum(part.flops for part in found.parts) == flops
