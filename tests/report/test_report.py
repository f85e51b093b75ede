"""What people see: figures that must agree with each other, names that must be found, and the text
helpers. Golden texts are in tests/report/test_terminal.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.errors import PlanError
from planner.report import diff as diff_report
from planner.report.explain import explain, explain_node, find_nodes
from planner.report.findings import findings
from planner.report.notation import short_labels
from planner.report.summary import summary, techniques
from planner.sharding.notation import spell_rule
from planner.strategy.diff import compare
from planner.strategy.notation import weight_groups
from planner.strategy.strategy import Strategy
from planner.support.text import Style, bar, hang, pack, percent, short, table, visible

GOLDEN = Path(__file__).parents[1].joinpath("golden")


@pytest.fixture(scope="module")
def gpt() -> Strategy:
    return Strategy.load(GOLDEN / "gpt.plan.json")


@pytest.fixture(scope="module")
def staged() -> Strategy:
    """With pipeline stages: zoo:gpt2-medium,layers=8 on 16 devices, pp=4,dp=4,micro=16."""
    return Strategy.load(GOLDEN / "staged.plan.json")


@pytest.fixture(scope="module")
def odd(gpt: Strategy) -> Strategy:
    return with_findings(gpt)


def with_findings(gpt: Strategy) -> Strategy:
    """A plan with everything that deserves a finding, and every technique on."""
    nodes = {n: dict(row) for n, row in gpt.nodes.items()}
    first = next(iter(nodes))
    nodes[first]["unsupported"] = "no rule for NonZero"
    tensors = {n: dict(row) for n, row in gpt.tensors.items()}
    label = next(n for n, row in tensors.items() if "label" in row and len(row["shape"]) == 2)
    tensors[label].update(padded=True, zero={"level": 3, "dim": 0, "axes": ["data"]})
    limit = (gpt.costs["memory_per_device_bytes"] + gpt.costs["memory_range_bytes"][1]) // 2
    costs = {
        **gpt.costs,
        "distinct_work": 0.91,
        "fit": "tight",
        "memory_limit_bytes": limit,
        "recompute_time_s": 2e-4,
        "bubble_time_s": 1e-5,
    }
    techniques = {
        **gpt.techniques,
        "zero_stage": 3,
        "zero_group": ["data"],
        "recompute": "block-keep",
        "microbatches": 4,
    }
    solver = {**gpt.solver, "status": "feasible", "gap": 0.031, "stopped": "time"}
    return replace(
        gpt, nodes=nodes, tensors=tensors, costs=costs, techniques=techniques, solver=solver
    )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_keep_to_the_width(
    gpt: Strategy, odd: Strategy, staged: Strategy, width: int
) -> None:
    for s in (gpt, odd, staged):
        for text in (summary(s, width, True), explain(s, width, True)):
            tables = 75  # columns of figures are never cut
            assert max(visible(line) for line in text.splitlines()) <= max(width, tables)


def test_findings_name_everything(gpt: Strategy, odd: Strategy) -> None:
    assert findings(gpt) == []
    text = "\n".join(findings(odd))
    assert "91.0 %" in text and "tight" in text and "NonZero" in text and "padded" in text
    low = gpt.costs["memory_range_bytes"][0]
    over = {
        limit: findings(replace(gpt, costs={**gpt.costs, "fit": "no", "memory_limit_bytes": limit}))
        for limit in (low - 1, low)
    }
    assert [("lower end" in lines[0], "does not fit" in lines[0]) for lines in over.values()] == [
        (False, True),
        (True, True),
    ]


def parse(text: str, pattern: str, units: dict[str, float]) -> float:
    match = re.search(pattern, text)
    assert match, pattern
    return float(match[1].replace(",", "")) * units[match[2]]


SPECS = [
    ("zoo:gpt-tiny,hidden=512,seq=256", 8, "train"),
    ("zoo:llama-tiny,hidden=256", 4, "infer"),
    ("zoo:mlp-tiny", 1, "train"),
]


@pytest.mark.parametrize(("spec", "devices", "workload"), SPECS)
def test_printed_flops_are_mfu_times_peak_times_devices_times_step(
    spec: str, devices: int, workload: str
) -> None:
    """The printed figures agree with each other, with the device file, and the FLOPs with a count
    over the graph's rules."""
    from costmodels.hardware.device import load_device
    from planner.analysis.facts import GraphFacts
    from planner.workload.open import open_model

    s = planner.plan(spec, devices=devices, workload=workload, batch=8, baselines=False)
    text = summary(s, 140)
    peak = load_device("h100-sxm").peak("bfloat16")
    total = parse(
        text,
        r"([\d.,]+) ([EPTGM]?FLOP) a step",
        {"EFLOP": 1e18, "PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1},
    )
    step = parse(text, r"step +([\d.]+) (s|ms|us)", {"s": 1, "ms": 1e-3, "us": 1e-6})
    mfu = float(re.search(r"MFU ([\d.e-]+) %", text)[1]) / 100  # type: ignore[index]
    assert total == pytest.approx(
        mfu * peak * devices * step, rel=0.06
    )  # printed to two or three digits
    exact = s.costs["model_flops_utilization"] * peak * devices * s.costs["step_time_s"]
    assert exact == pytest.approx(
        s.costs["flops_per_device"] * s.costs["distinct_work"] * devices, rel=1e-4
    )
    base = GraphFacts.of(
        open_model(spec, devices, workload=workload, batch=8).graph(1), training=workload == "train"
    )
    counted = 0.0
    for node, rule in zip(base.graph.nodes, base.rules, strict=True):
        hot = (
            sum(n in base.grad for n in node.inputs)
            if any(o in base.grad for o in node.outputs)
            else 0
        )
        counted += rule.flops * (
            1 + (2 if hot and node.op == "Attention" else hot)
        )  # two products forward, four backward
    assert exact == pytest.approx(counted, rel=0.05)  # long attention makes its scores again
    assert float(
        re.search(r"([\d,]+) (?:tokens|samples)/s/device", text)[1].replace(",", "")
    ) == pytest.approx(  # type: ignore[index]
        s.costs["tokens_per_step"] / s.costs["step_time_s"] / devices, rel=1e-3, abs=1
    )


def test_memory_parts_add_up(gpt: Strategy) -> None:
    assert sum(gpt.costs["memory_breakdown_bytes"].values()) == gpt.costs["memory_per_device_bytes"]


def test_weight_groups_count_every_parameter(gpt: Strategy) -> None:
    groups = weight_groups(gpt)
    assert sum(g.elements for g in groups) == gpt.model["parameters"]
    assert [g.elements for g in groups] == sorted((g.elements for g in groups), reverse=True)


def test_short_labels_stay_distinct() -> None:
    labels = [
        "model.layers.*.self_attn.q_proj.weight",
        "model.layers.*.mlp.up.weight",
        "encoder.layers.*.mlp.up.weight",
        "x",
    ]
    found = short_labels(labels)
    assert found["model.layers.*.self_attn.q_proj.weight"] == "q_proj"
    assert len(set(found.values())) == len(labels)


def test_names_find_nodes(gpt: Strategy) -> None:
    node = "/transformer/h.0/mlp/c_fc/MatMul"
    assert find_nodes(gpt, node) == [node]
    assert find_nodes(gpt, gpt.nodes[node]["outputs"][0]) == [node]
    assert node in find_nodes(gpt, "transformer.h.0.mlp.c_fc.weight")
    assert node in find_nodes(gpt, "h.3.mlp.c_fc")  # a later repeat is decided by the first
    with pytest.raises(PlanError, match=r"P052.*\n.*did you mean"):
        find_nodes(gpt, "/transformer/h.0/mlp/c_fd/MatMu")
    with pytest.raises(PlanError, match=r"P052.*\n.*did you mean 'c_proj'"):
        find_nodes(gpt, "c_prj")  # a part of a name, misspelt


def test_narrow_comparisons_keep_the_tie_and_what_does_not_fit_ties_with_nothing(
    gpt: Strategy,
) -> None:
    key, row = min(gpt.baselines.items(), key=lambda kv: kv[0])
    row = {
        **row,
        "step_time_s": gpt.costs["step_time_s"],
        "step_time_range_s": gpt.costs["step_time_range_s"],
        "microbatches": 16,
        "recompute": "block-keep",
    }
    for width in (80, 120):
        last = [
            line
            for line in summary(
                replace(gpt, baselines={key: {**row, "fit": "tight"}}), width
            ).splitlines()
            if " tight " in line
        ][-1]
        assert "tie" in last and len(last) <= width
    text = summary(replace(gpt, baselines={key: {**row, "fit": "no"}}), 120)
    assert "   tie" not in text and "16 microbatches" in text
    assert "tie" not in text.partition("each tuned")[2]  # nor is the word explained


def test_explain_with_the_model_shows_layouts_and_collectives() -> None:
    from planner.commands.common import priced

    s = planner.plan(
        "zoo:gpt-tiny,hidden=1024,seq=512", devices=8, batch=64, pins="tp=8", baselines=False
    )
    s = Strategy.load(saved(s))
    detail = priced(s, "zoo:gpt-tiny,hidden=1024,seq=512")
    name = next(n for n in s.nodes if n.endswith("mlp/c_fc/MatMul"))
    text = explain_node(s, name, 140, detail=s.details[name])
    assert (
        spell_rule(detail.base.rules[[n.id for n in detail.base.graph.nodes].index(name)]) in text
    )
    assert "/tensor" in text and "over tensor" in text and "bound by arithmetic" in text
    assert detail.cost.step_time_s == pytest.approx(s.costs["step_time_s"], rel=1e-5)


def test_nodes_of_several_kernels_are_bound_by_what_takes_longer() -> None:
    s = planner.plan("zoo:mixtral-8x7b,layers=1", devices=8, batch=16, pins="dp=8", baselines=False)
    bound = {name.split("/")[-1]: row["kernels"]["bound_by"] for name, row in s.details.items()}
    assert bound["Attention"] == bound["ReduceSum_2"] == "arithmetic"  # the last: the experts
    assert bound["RMSNormalization"] == "memory bandwidth"


def saved(s: Strategy) -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "s.json"
    s.save(path)
    return path


@pytest.mark.parametrize("pins", ["tp=2,micro=2", "dp=8,zero=3,recompute=block"])
def test_trace_is_as_long_as_the_step(pins: str) -> None:
    from planner.commands.common import priced
    from planner.report.trace import trace

    spec = "zoo:gpt-tiny,hidden=256,layers=3"
    s = planner.plan(spec, devices=8, batch=16, pins=pins, baselines=False)
    events = [e for e in json.loads(trace(priced(s, spec)))["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in events) == pytest.approx(1e6 * s.costs["step_time_s"], rel=1e-3)
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(spans))  # nothing overlaps


def test_diff_names_only_the_layer_that_was_added() -> None:
    a, b = (
        planner.plan(f"zoo:gpt-tiny,layers={n}", devices=4, batch=4, baselines=False)
        for n in (2, 3)
    )
    d = compare(a, b)
    assert d.causes == ("model",)
    model = [c.what for c in d.changes if c.section == "model"]
    assert [w for w in model if w.startswith("node ")] == [] and any(
        "repeats of the block" in w for w in model
    )


def test_diff_tells_causes_apart(gpt: Strategy) -> None:
    assert compare(gpt, gpt).causes == ()
    assert compare(
        gpt,
        replace(
            gpt, workload={**gpt.workload, "batch": 32}, model={**gpt.model, "sha256": "other"}
        ),
    ).causes == ("workload",)
    assert compare(gpt, replace(gpt, model={**gpt.model, "sha256": "other"})).causes == ("model",)
    assert compare(gpt, replace(gpt, topology={**gpt.topology, "device": "a100-80gb"})).causes == (
        "machine",
    )
    assert compare(gpt, replace(gpt, provenance={**gpt.provenance, "cost_model": "0"})).causes == (
        "cost model",
    )
    assert compare(gpt, replace(gpt, costs={**gpt.costs, "step_time_s": 1.0})).causes == (
        "cost model",
    )
    assert compare(gpt, replace(gpt, solver={**gpt.solver, "name": "ilp"})).causes == ("solver",)
    node = next(n for n, row in gpt.nodes.items() if row["split"])
    other = replace(gpt, nodes={**gpt.nodes, node: {**gpt.nodes[node], "split": {}}})
    assert compare(gpt, other).causes == ("search",)
    assert node in diff_report.render(compare(gpt, other))


@given(
    st.lists(st.tuples(st.floats(0, 1e12), st.sampled_from("PGOAT")), max_size=6),
    st.floats(0, 1e12),
    st.integers(0, 60),
)
def test_bars_fill_their_columns(
    parts: list[tuple[float, str]], total: float, columns: int
) -> None:
    assert len(bar(parts, total, columns)) == columns


@given(st.text(max_size=60), st.integers(12, 60))
def test_short_keeps_both_ends(text: str, width: int) -> None:
    cut = short(text, width)
    assert len(cut) <= width and (
        cut == text or (cut.startswith(text[:3]) and cut.endswith(text[-3:]))
    )


@given(
    st.lists(st.lists(st.text("abc", max_size=8), min_size=3, max_size=3), min_size=1, max_size=6)
)
def test_tables_align(rows: list[list[str]]) -> None:
    lines = table([[Style(True).bold(r[0]), r[1], f"|{r[2]}"] for r in rows], right=(1,))
    assert len({re.sub(r"\x1b\[[0-9;]*m", "", line).index("|") for line in lines}) == 1


@given(st.lists(st.text("ab c", min_size=1, max_size=30), max_size=8), st.integers(40, 100))
def test_packing_loses_nothing(items: list[str], width: int) -> None:
    lines = pack(items, width)
    assert all(visible(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join("".join(items).split())


def test_small_words() -> None:
    assert percent(0.5) == "50.0 %" and percent(0.0) == "0.0 %" and percent(0.000012) == "0.0012 %"
    assert hang("help: ", "a b c d", 9) == ["help: a b", "      c d"]


def test_an_optimizer_level_over_no_axis_names_none(gpt: Strategy) -> None:
    bare = replace(gpt, techniques={**gpt.techniques, "zero_stage": 2, "zero_group": []})
    assert "ZeRO-2 (every axis is one of stages: no effect)" in techniques(bare)


def test_a_file_from_before_axes_were_called_tensor_differs_in_nothing(gpt: Strategy) -> None:
    """`model` is what `tensor` was called; the golden file is such a one."""
    assert [a["name"] for a in gpt.mesh] == ["data", "model"]

    def called(name: str) -> Strategy:
        return Strategy.from_dict(
            json.loads(
                re.sub(r'"model"(?=\s*\])|(?<="name": )"model"', f'"{name}"', gpt.to_json())
            ),
            name,
        )

    now, other = called("tensor"), called("x")
    assert (
        now.mesh_shape == (("data", 2), ("tensor", 4))
        and now.nodes != gpt.nodes
        and now.tensors != gpt.tensors
    )
    assert not compare(gpt, now).changes and not compare(now, gpt).changes
    assert any(c.section == "mesh" for c in compare(gpt, other).changes)


def test_closest_calls_are_those_that_cost_and_the_firmest_leaves_no_axis_idle(
    gpt: Strategy,
) -> None:
    """A split that is faster by itself and was not taken is told apart; that leaving an axis idle
    costs much says nothing."""
    names = [n for n, row in gpt.nodes.items() if row.get("runner_up")][:3]
    own = {"b": ["data"], "n": ["model"]}
    others = [
        ({"b": ["data"], "k": ["model"]}, -0.1),
        ({"b": ["data", "model"]}, 0.02),
        ({"n": ["model"]}, 132.0),
    ]
    rows = {n: {**row, "runner_up": None} for n, row in gpt.nodes.items()}
    rows |= {
        n: {**gpt.nodes[n], "split": own, "runner_up": {"split": split, "extra_s": s}}
        for n, (split, s) in zip(names, others, strict=True)
    }
    text = explain(replace(gpt, nodes=rows), 200)
    calls = text[text.index("closest calls") :]
    assert (
        "-100 ms" not in calls[: calls.index("not taken")]
        and "not taken though faster by itself: 1 split" in calls
        and "(-100 ms)" in calls
    )
    firm = next(line for line in calls.splitlines() if line.startswith("the firmest"))
    assert "+20 ms" in firm and "132" not in firm
    assert "not taken: it needs too much memory" in explain_node(
        replace(gpt, nodes=rows), names[0], 400
    )
    assert "not taken" not in explain_node(replace(gpt, nodes=rows), names[1], 400)


def test_a_baseline_is_said_to_save_values_in_a_whole_phrase_or_not_at_all(gpt: Strategy) -> None:
    """`8 microbatches, recompute, v` was cut out of `recompute, v, router saved`."""
    from planner.report.baselines import comparison

    zero3 = {**gpt.baselines["zero3"], "recompute": "save:v,router", "microbatches": 8}
    lines = comparison(replace(gpt, baselines={"zero3": zero3}), 100, Style(False))
    row = next(line for line in lines if line.startswith("ZeRO-3"))
    assert row.endswith(("recompute", "recompute, v, router saved"))
    for width in range(50, 100):
        lines = comparison(replace(gpt, baselines={"zero3": zero3}), width, Style(False))
        row = next(line for line in lines if line.startswith("ZeRO-3"))
        assert not row.endswith(", v"), width


def test_one_value_saves_and_several_save() -> None:
    from planner.execution.save_policies import values_words

    assert values_words("save:router") == "router saves"
    assert values_words("save:k,v") == "k, v save"
    assert values_words("save:offload:context") == "context sends to host memory"


def test_devices_without_bfloat16_are_told() -> None:
    def told(hardware: str, precision: str) -> bool:
        options = {"batch": 16, "precision": precision, "baselines": False, "cache": None}
        strategy = planner.plan("zoo:mlp-tiny", devices=8, hardware=hardware, **options)
        return any("no units for products in bfloat16" in f for f in findings(strategy))

    assert told("v100", "bf16-mixed") and told("t4", "bf16-mixed")
    assert not told("t4", "fp16") and not told("a100", "bf16-mixed") and not told("cpu", "fp32")
