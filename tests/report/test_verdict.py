"""The first screen: the verdict in a sentence, findings before defaults and the gravest first,
everything else in `plan explain`."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import planner
from planner.graph.findings import KINDS, Finding, ordered
from planner.report.explain import explain
from planner.report.findings import findings
from planner.report.summary import assumed, summary
from planner.report.verdict import verdict
from planner.search.findings import rows
from planner.strategy.strategy import Strategy
from tests.reader.reader_models import model, rand

GOLDEN = Path(__file__).parents[1].joinpath("golden")
GIB = 2**30


@pytest.fixture(scope="module")
def gpt() -> Strategy:
    return Strategy.load(GOLDEN / "gpt.plan.json")


def beside(s: Strategy, ratio: float, spread: float = 0.0, **row: Any) -> Strategy:
    """A plan with one baseline, whose step is so many times as long; ranges reach so far to both
    sides."""
    step = s.costs["step_time_s"]
    own = {**s.costs, "step_time_range_s": [step * (1 - spread), step * (1 + spread)]}
    other = {
        **s.baselines["zero3"],
        "step_time_s": step * ratio,
        "step_time_range_s": [step * ratio * (1 - spread), step * ratio * (1 + spread)],
        "fit": "yes",
        **row,
    }
    return replace(s, costs=own, baselines={"zero3": other})


@pytest.mark.parametrize(
    ("ratio", "spread", "said"),
    [
        (1.02, 0.1, "Run this: 2.0 % faster than ZeRO-3, a tie"),
        (1.5, 0.1, "Run this: 50.0 % faster than ZeRO-3; "),
        (2.5, 0.1, "Run this: 2.5 times as fast as ZeRO-3; "),
        (1.0, 0.1, "Run this: as fast as ZeRO-3, a tie"),
        (0.8, 0.1, "Run this: 25.0 % slower than ZeRO-3; "),
        (0.1, 0.1, "Run this: 10 times as slow as ZeRO-3; "),
    ],
)
def test_how_much_better_and_whether_it_is_a_tie(
    gpt: Strategy, ratio: float, spread: float, said: str
) -> None:
    assert verdict(beside(gpt, ratio, spread)).startswith(said)


def test_a_faster_baseline_says_why_it_is_not_the_plan(gpt: Strategy) -> None:
    fast = beside(gpt, 0.5)
    assert "2 times as slow as ZeRO-3, which does not keep the pins;" in verdict(
        replace(fast, provenance={**fast.provenance, "pins": {"mesh": {"data": 8}}})
    )
    assert "ZeRO-3, which does not keep the mode;" in verdict(
        replace(fast, provenance={**fast.provenance, "mode": "hybrid"})
    )
    assert "ZeRO-3 (--objective memory);" in verdict(
        replace(fast, provenance={**fast.provenance, "objective": "memory"})
    )
    assert "ZeRO-3, which is tight;" in verdict(beside(gpt, 0.5, fit="tight"))


def test_two_faster_baselines_are_parted_by_a_comma(gpt: Strategy) -> None:
    both = beside(gpt, 0.5)
    both = replace(
        both,
        baselines={"megatron": dict(both.baselines["zero3"]), **both.baselines},
        provenance={**both.provenance, "pins": {"mesh": {"data": 8}}},
    )
    assert ", which does not keep the pins, and 2 times as slow as ZeRO-3, which" in verdict(both)


def test_rows_of_the_busiest_experts_are_not_called_work_done_twice() -> None:
    """Nothing is padded or done twice where experts lie on two devices; the busier one has more."""
    made = planner.plan(
        "zoo:mixtral-tiny", devices=2, batch=8, pins="ep=2", baselines=False, hardware="h100-sxm"
    )
    assert made.costs["distinct_work"] < 0.97
    said = " ".join(str(f) for f in findings(made))
    assert "on padding or what the device of the busiest experts has beyond the mean" in said
    assert "the rest padding, the busiest experts' rows or done twice" in verdict(made)


def test_a_plan_that_is_a_baseline_and_one_beside_none(gpt: Strategy) -> None:
    same = beside(gpt, 1.0)
    assert "it is ZeRO-3, and nothing that was searched is notably faster;" in verdict(
        replace(same, solver={**same.solver, "from": "zero3"})
    )
    assert verdict(replace(gpt, baselines={})).startswith("Run this: fits with")
    assert "none of the usual ways fits" in verdict(beside(gpt, 1.0, fit="no"))


def test_room_at_the_upper_end_of_the_range(gpt: Strategy) -> None:
    def memory(fit: str, need: float, high: float, limit: float) -> str:
        costs = {
            **gpt.costs,
            "fit": fit,
            "memory_per_device_bytes": int(need * GIB),
            "memory_range_bytes": [0, int(high * GIB)],
            "memory_limit_bytes": int(limit * GIB),
        }
        return verdict(replace(gpt, costs=costs))

    assert "fits with 4.0 GiB to spare" in memory("yes", 60, 72, 76)
    assert "tight: it may need 2.0 GiB more than is usable" in memory("tight", 75, 78, 76)
    assert memory("no", 90, 99, 76).startswith(
        "Do not run this: it does not fit: 14.0 GiB too much"
    )


def test_work_that_is_done_twice(gpt: Strategy) -> None:
    def words(distinct: float) -> str:
        return verdict(replace(gpt, costs={**gpt.costs, "distinct_work": distinct}))

    assert words(0.125).startswith("One device does as well: all 8 do the same work; fits with ")
    assert "50.0 % of the work is distinct, the rest padding or done twice" in words(
        0.5
    ) and "distinct" not in words(1.0)


def test_how_good_it_is_known_to_be(gpt: Strategy) -> None:
    def words(**solver: Any) -> str:
        return verdict(replace(gpt, solver={**gpt.solver, **solver}))

    assert words().endswith("proven the best of the meshes tried")
    assert words(status="feasible", gap=0.036).endswith(
        "best found, within 3.6 % of what is proven of the meshes tried"
    )
    assert words(status="feasible", gap=None, stopped="time").endswith("best when the time was up")
    assert words(name="manual").endswith("priced as given")


def test_a_speed_nobody_accepts_stops_the_show(gpt: Strategy) -> None:
    slow = replace(
        gpt,
        findings=rows([Finding("speed", "experts are gathered")]),
        costs={**gpt.costs, "model_flops_utilization": 0.001},
    )
    assert verdict(slow).startswith("Do not run this yet (MFU 0.1 %: the first finding says why): ")


def test_the_gravest_finding_first_wherever_it_is_from(gpt: Strategy) -> None:
    found = rows(
        [
            Finding("tie", "untied"),
            Finding("of a later version", "later"),
            Finding("frozen", "frozen"),
            Finding("speed", "slow"),
        ]
    )
    s = replace(gpt, findings=found, costs={**gpt.costs, "distinct_work": 0.5})
    assert [f.kind for f in findings(s)] == [
        "speed",
        "frozen",
        "tie",
        "devices",
        "of a later version",
    ]
    assert KINDS[0] == "speed" and ordered([Finding("note", "a"), Finding("note", "a")]) == (
        Finding("note", "a"),
    )


def test_a_finding_is_text_that_keeps_its_kind() -> None:
    one = Finding("tie", "both")
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert again == "both" and again.kind == "tie"


def test_the_first_screen_in_its_order_and_the_rest_in_explain(gpt: Strategy) -> None:
    s = replace(gpt, findings=rows([Finding("frozen", "not trained: 'bias'")]))
    lines = summary(s, 100).splitlines()
    starts = [
        "gpt-tiny",
        "mesh",
        "method",
        "step",
        "memory",
        "verdict",
        "this plan",
        "finding not trained",
        "assumed",
    ]
    at = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert at == sorted(at) and at[-1] == len(lines) - 1  # the defaults are one line
    text = explain(s, 100)
    for label in ("traffic ", "layouts ", "search  "):
        assert any(line.startswith(label) for line in text.splitlines()) and not any(
            line.startswith(label) for line in lines
        )
    flat = " ".join(text.split())
    assert assumed(s) and all(" ".join(phrase.split()) in flat for phrase in assumed(s))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_defaults_are_one_line(gpt: Strategy, width: int) -> None:
    many = replace(
        gpt,
        assumptions=(
            *gpt.assumptions,
            *(f"default {k} (--option): a long story" for k in range(20)),
        ),
    )
    *_, before, last = summary(many, width).splitlines()
    assert (
        before == ""
        and last.startswith("assumed hardware h100-sxm; bf16-mixed")
        and last.endswith("(plan explain: all)")
        and len(last) <= width
    )


def test_what_changes_the_training_is_no_assumption(tmp_path: Path) -> None:
    """Weights left out and lost ties are findings of a plan that trains, and of none that
    infers."""
    path = tmp_path / "m.onnx"
    tied = model(
        "(int64[2,3] ids) => (float[2,3,16] y) { h = Gather(embed, ids) y = MatMul(h, head) }",
        embed=rand(16, 8),
        head=rand(16, 8).T.copy(),
    )
    onnx.save(tied, path)
    s = planner.plan(path, devices=1, batch=2, baselines=False, cache=None)
    assert [row["kind"] for row in s.findings] == ["tie"] and not any(
        "--tie" in a for a in s.assumptions
    )
    s.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json").findings == s.findings
    inferred = planner.plan(path, devices=1, batch=2, workload="infer", baselines=False, cache=None)
    assert [row["kind"] for row in inferred.findings] == ["range"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_compare_says_how_under_each_row_where_beside_it_there_is_no_room(
    gpt: Strategy, width: int
) -> None:
    from planner.report.tables import comparison

    long = replace(
        gpt,
        techniques={
            **gpt.techniques,
            "zero_stage": 3,
            "recompute": "block-keep",
            "microbatches": 16,
        },
    )
    text = comparison([("dp", gpt), ("ilp", long), ("recursive", long)], width, False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(width, 70) and "block-keep" not in text
    at = next(i for i, line in enumerate(lines) if line.startswith("ilp "))
    assert lines[at + 1].startswith("    data 2 x model 4, ZeRO-3") and lines[
        -len(lines) + 1
    ].split()[-1] in ("gap", "search")
    assert (
        next(
            line
            for line in lines[
                lines.index(next(x for x in lines if x.startswith("recursive"))) + 1 :
            ]
        )
        == "    as ilp"
    )


def test_compare_keeps_it_on_the_row_where_there_is_room(gpt: Strategy) -> None:
    from planner.report.tables import comparison

    assert any(
        line.startswith("dp ") and line.endswith("data 2 x model 4")
        for line in comparison([("dp", gpt)], 140, False).splitlines()
    )


def test_compare_marks_no_baseline_as_a_tie_that_does_not_fit(gpt: Strategy) -> None:
    from planner.report.tables import comparison

    as_fast = {k: gpt.costs[k] for k in ("step_time_s", "step_time_range_s")}
    as_fast |= {"tie_range_s": gpt.costs["step_time_range_s"]}

    def words(fit: str) -> str:
        row = {**gpt.baselines["zero3"], **as_fast, "fit": fit}
        return comparison([("dp", replace(gpt, baselines={"zero3": row}))], 140, False)

    assert "tie: too close" in words("yes")
    assert "tie" not in words("no")


def test_beside_tensor_parallelism_the_plain_way_is_named_too(gpt: Strategy) -> None:
    step = gpt.costs["step_time_s"]

    def words(near: float, plain: float, spread: float) -> str:
        own = {**gpt.costs, "step_time_range_s": [step * (1 - spread), step * (1 + spread)]}
        rows = {
            key: {
                **gpt.baselines[key],
                "step_time_s": step * r,
                "step_time_range_s": [step * r * (1 - spread), step * r * (1 + spread)],
                "fit": "yes",
            }
            for key, r in (("megatron", near), ("zero3", plain), ("replicated", 9.0))
        }
        return verdict(replace(gpt, costs=own, baselines=rows))

    name = "tensor 4 x data 2"
    assert (
        f"1.0 % faster than {name} and 7.0 % faster than ZeRO-3, ties within the model's error;"
        in words(1.01, 1.07, 0.2)
    )
    assert f"1.0 % faster than {name}, a tie, and 7.0 % faster than ZeRO-3;" in words(
        1.01, 1.07, 0.05
    )
    assert f"10.0 % faster than {name} and 20.0 % faster than ZeRO-3;" in words(1.1, 1.2, 0.01)
    assert "Run this: 7.0 % faster than ZeRO-3, a tie" in words(
        1.2, 1.07, 0.2
    )  # the nearest is the plain way itself


def test_the_progress_line_says_which_mesh_of_how_many() -> None:
    from planner.support.console import Live

    line, seen = Live(False), []

    def watch(stage: str, best_s: float | None, bound_s: float | None) -> None:
        line.report(stage, best_s, bound_s)
        seen.append(line.line())

    planner.plan("zoo:gpt-tiny", devices=8, batch=16, progress=watch, cache=None)
    numbers = [
        text.partition("   mesh ")[2].partition(" (")[0] for text in seen if "   mesh " in text
    ]
    assert numbers and all(
        0 < int(n) <= int(of) for n, _, of in (text.partition(" of ") for text in numbers)
    )
    assert any("(data " in text or "(model " in text for text in seen)


def test_an_incremental_plan_says_so_on_the_first_screen(gpt: Strategy) -> None:
    kept = {"model": "zoo:gpt-tiny,layers=3", "date": "2026-11-01", "kept": 100, "solved": 10}
    text = " ".join(
        summary(replace(gpt, provenance={**gpt.provenance, "incremental": kept}), 100).split()
    )
    assert (
        "kept the mesh and 100 of 110 operators as planned for gpt-tiny,layers=3" in text
        and "no other plans looked at (--incremental)" in text
    )


def test_a_plan_that_was_imported_is_not_recommended(gpt: Strategy) -> None:
    given = replace(gpt, solver={**gpt.solver, "name": "import", "status": "feasible"})
    said = verdict(given)
    assert said.startswith("As configured: ") and said.endswith("no other plan was looked for")
    assert verdict(gpt).startswith("Run this: ")


def test_what_cuts_no_rows_is_not_called_data_parallel() -> None:
    """Seven rows on eight devices: each of them would run all."""
    made = planner.plan("zoo:gpt-tiny", devices=8, batch=7, hardware="h100-sxm")
    assert made.baselines["data_parallel"]["mesh"] == {"replicated": 8}
    assert "data parallel" not in str(made) and "all rows on every device" in str(made)
    cut = planner.plan("zoo:gpt-tiny", devices=8, batch=8, hardware="h100-sxm")
    assert "data parallel" in str(cut)
