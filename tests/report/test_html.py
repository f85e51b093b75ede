"""The HTML report without a browser: its figures add up, its markup is sound, nothing is loaded,
hostile names stay text, and it stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli import main
from planner.commands.common import priced
from planner.report.html import figures as f
from planner.report.html.bars import Part, small_together, timeline, total
from planner.report.html.derive import short_name, work_out
from planner.report.html.fold import _lay_out, fold
from planner.report.html.memory import FINEST, plain_line, series
from planner.report.html.page import page
from planner.report.html.tables import baselines
from planner.report.html.tags import clean, el, join, name
from planner.report.html.verdict import comparison
from planner.report.html.view import View
from planner.report.notation import plain_split
from planner.strategy.strategy import Strategy
from tests.report.html_plans import HOSTILE, SPEC, Page, detail, hostile_view, plan, view

PINS = [
    "tp=2,micro=2",
    "dp=8,zero=3,recompute=block",
    "tp=4,recompute=block-keep,micro=2,zero=2",
    "",
]
GOLDEN = Path(__file__).parents[1] / "golden" / "gpt.plan.json"


@pytest.fixture(scope="module")
def one() -> str:
    return page([view("tp=2,micro=2")])


@pytest.fixture(scope="module")
def two() -> str:
    return page([view("tp=2,micro=2", "A"), view("dp=8,zero=3,recompute=block", "B")])


@pytest.fixture(scope="module")
def bare() -> str:
    return page([View("", "gpt.plan.json", Strategy.load(GOLDEN), None, "no model")])


# --- figures


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pins", PINS)
def test_every_bar_adds_up_to_the_step(pins: str) -> None:
    d = detail(pins)
    t = timeline(d)
    assert d.grad_accumulate_s == pytest.approx(d.step_s, rel=1e-9)
    assert sum(p.time_s for p in t.step) == pytest.approx(d.step_s, rel=1e-9)
    ahead = [p for p in t.step if p.label in ("microbatches", "forward pass", "backward pass")]
    assert sum(p.time_s for p in t.micro) * d.micro == pytest.approx(
        sum(p.time_s for p in ahead), rel=1e-9
    )
    for block in (
        t.blocks
    ):  # the block's own bar, its share of the microbatch, and what is said of it in words
        inside = sum(p.time_s for p in (*block.forward, *block.backward))
        assert inside * block.repeats * d.micro == pytest.approx(block.total_s, rel=1e-9)
        assert inside * block.repeats == pytest.approx(
            sum(p.time_s for p in t.micro if p.run == block.run), rel=1e-9
        )
    costs = plan(pins).costs
    kinds = total(t.step)
    assert kinds.get("comm", 0.0) == pytest.approx(costs["exposed_communication_time_s"], rel=1e-4)
    assert kinds["forward"] + kinds.get("backward", 0.0) + kinds.get(
        "recompute", 0.0
    ) == pytest.approx(costs["compute_time_s"], rel=1e-4)
    assert kinds.get("recompute", 0.0) == pytest.approx(costs["recompute_time_s"], rel=1e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pins", PINS)
def test_the_peak_of_the_curve_is_the_priced_memory(pins: str) -> None:
    s, d = plan(pins), detail(pins)
    curve = series(d)
    assert (
        curve.total_bytes[curve.peak] == pytest.approx(d.memory_bytes, abs=8)
        and d.memory_bytes == s.costs["memory_per_device_bytes"]
    )
    assert curve.times_s[-1] == pytest.approx(
        d.step_s - (d.micro - 1) * sum(p.time_s for p in timeline(d).micro), rel=1e-9
    )
    bands = dict(curve.bands)
    assert list(curve.times_s) == sorted(curve.times_s) and bands["activations"][
        0
    ] == 0 == pytest.approx(bands["activations"][-1], abs=1e-3)
    assert max(bands["activations"]) == bands["activations"][curve.times_s.index(curve.turn_s)]
    assert bands["gradients"][-1] == pytest.approx(d.memory.gradients) and list(
        bands["gradients"]
    ) == sorted(bands["gradients"])
    assert curve.peak_text == (
        "end of the forward pass"
        if curve.times_s[curve.peak] <= curve.turn_s
        else "the backward pass enters the blocks"
    )


@pytest.mark.parametrize(
    "spec", ["zoo:gpt-tiny,layers=4", pytest.param("zoo:t5-tiny", marks=pytest.mark.slow)]
)
def test_blocks_written_out_add_up_too(spec: str) -> None:
    """Equal layers are one block, as in a loop; memory is drawn layer by layer."""
    pins = "dp=8,zero=2,blocks=written-out"
    s, d = plan(pins, spec), detail(pins, spec)
    looped, layers, curve = detail("dp=8,zero=2,blocks=looped", spec), d.layers, series(d)
    assert s.techniques["blocks"] == "written-out" and layers is not None and not layers.runs
    assert [(r.id, r.run, r.repeats) for r in d.rows] == [
        (r.id, r.run, r.repeats) for r in looped.rows
    ]
    assert sum(r.repeats for r in d.rows) == len(layers.rows) > len(d.rows)
    for figure in ("kernels_s", "saved_bytes"):
        assert sum(getattr(r, figure) for r in d.rows) == pytest.approx(
            sum(getattr(r, figure) for r in layers.rows)
        )
    assert curve.total_bytes[curve.peak] == pytest.approx(d.memory_bytes, abs=8)
    assert d.memory_bytes == s.costs["memory_per_device_bytes"]
    assert d.grad_accumulate_s == pytest.approx(d.step_s)
    text = Page.of(page([view(pins, "", spec)])).text
    assert "one repeat of" in text and f"×\u202f{d.runs[0][2]}" in text.replace(" ", "\u202f")
    sound(page([view(pins, "", spec)]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", ["zoo:gpt-tiny,layers=4", "zoo:t5-tiny", "zoo:resnet-tiny"])
def test_what_is_saved_is_drawn_where_it_is(spec: str) -> None:
    """Without loops the forward pass has, at its end, what the backward pass begins with."""
    d = detail("dp=8,blocks=written-out", spec)
    curve = series(d)
    saved = dict(curve.bands)["activations"]
    ends = [k for k, t in enumerate(curve.times_s) if t == curve.turn_s]
    assert saved[ends[0]] == pytest.approx(saved[ends[0] + 1])
    assert saved[ends[0]] == pytest.approx(sum(r.saved_bytes for r in d.rows))


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100)), min_size=2, max_size=60))
@settings(max_examples=50)
def test_a_plainer_line_is_near_all_of_its_points(steps: list[tuple[float, float]]) -> None:
    x = np.cumsum([s for s, _ in steps])
    line = list(zip(x.tolist(), [y for _, y in steps], strict=True))
    kept = plain_line(line)
    assert kept[0] == 0 and kept[-1] == len(line) - 1
    for a, b in pairwise(kept):
        (x0, y0), (x1, y1) = line[a], line[b]
        for px, py in line[a : b + 1]:
            way = (x1 - x0) ** 2 + (y1 - y0) ** 2
            at = ((px - x0) * (x1 - x0) + (py - y0) * (y1 - y0)) / way if way else 0.0
            at = min(max(at, 0.0), 1.0)
            off = math.hypot(px - x0 - at * (x1 - x0), py - y0 - at * (y1 - y0))
            assert off <= FINEST + 1e-6


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "spec",
    [
        "zoo:t5-tiny",
        "zoo:ssm-tiny",
        "zoo:resnet-tiny",
        "zoo:mlp-tiny",
        "zoo:dlrm-tiny",
        pytest.param("zoo:unet-tiny", marks=pytest.mark.slow),
    ],
)
def test_other_models_add_up_too(spec: str) -> None:
    d = detail("dp=8", spec)
    curve = series(d)
    assert curve.total_bytes[curve.peak] == pytest.approx(
        d.memory_bytes, abs=8
    ) and d.grad_accumulate_s == pytest.approx(d.step_s)
    sound(page([view("dp=8", "", spec)]))


def test_inference_and_hidden_communication() -> None:
    d = detail("", SPEC, "infer")
    t = timeline(d)
    assert not any(b.backward for b in t.blocks) and total(t.step).keys() <= {"forward", "comm"}
    text = page([View("", "s.json", plan("", SPEC, "infer"), d)])
    assert "backward" not in Page.of(text.split('id="timeline"')[1].split('id="graph"')[0]).text
    hidden = detail("dp=8,zero=1", SPEC, "train", "jax-jit")
    assert timeline(hidden).hidden_s > 0 and hidden.grad_accumulate_s == pytest.approx(
        hidden.step_s, rel=1e-9
    )


@pytest.mark.parametrize("pins", PINS)
def test_edges_carry_what_moves_and_rails_go_down(pins: str) -> None:
    d = detail(pins)
    moved = {e.tensor for e in d.edges if e.total_bytes}
    assert moved <= {m.what for m in d.moves}
    for e in d.edges:  # a tensor with one reader carries all that its conversions move
        if sum(1 for x in d.edges if x.tensor == e.tensor) == 1:
            own = sum(
                m.total_bytes
                for m in d.moves
                if m.what == e.tensor
                and not m.stored
                and m.when in ("forward", "backward", "recompute")
            )
            assert e.total_bytes == pytest.approx(own)
    rails = fold(d)
    assert sorted(r.index for line in rails.lines for r in line.rows) == [r.index for r in d.rows]
    assert all(sum(r.product for r in line.rows) <= 1 for line in rails.lines)
    assert sum(len(line.moves) for line in rails.lines) == len(d.moves)
    links = {(k, t) for k, rail in enumerate(rails.rails) if rail for t in rail.to}
    at = {r.index: k for k, line in enumerate(rails.lines) for r in line.rows}
    assert links == {(at[e.source], at[e.target]) for e in d.edges if at[e.source] != at[e.target]}


@given(
    st.integers(1, 25).flatmap(
        lambda n: st.lists(
            st.dictionaries(st.integers(0, n - 1), st.floats(0, 1e12), max_size=4),
            min_size=n,
            max_size=n,
        )
    )
)
def test_no_two_rails_share_a_lane(to: list[dict[int, float]]) -> None:
    rails = _lay_out([None] * len(to), to)  # type: ignore[list-item]
    live = [(k, r) for k, r in enumerate(rails.rails) if r]
    for k, r in live:
        assert r.lane == rails.lane[k] < rails.lanes
        assert not any(j != k and x.lane == r.lane and j < r.last and k < x.last for j, x in live)
        assert not any(rails.lane[j] == r.lane for j in range(k + 1, r.last)), (
            "a line lies on a rail that passes it"
        )


@given(st.lists(st.floats(0, 1.0), max_size=60))
def test_small_parts_together_lose_no_time(times: list[float]) -> None:
    parts = [Part("p", {"forward": t} if t else {}) for t in times]
    out = small_together(parts, sum(times))
    assert sum(p.time_s for p in out) == pytest.approx(sum(times))
    assert len(out) <= 2 / 0.002


@pytest.mark.parametrize(
    ("node", "op", "short"),
    [
        ("/model/layers.0/self_attn/q_proj/MatMul", "MatMul", "self_attn.q_proj"),
        ("/transformer/h.11/mlp/Gelu_1", "Gelu", "mlp"),
        ("loss", "CrossEntropyLoss", "loss"),
        ("/model/layers.0/Add", "Add", "Add"),
        ("Add_12", "Add", "Add_12"),
        ("", "Add", "Add"),
        ("///", "Relu", "Relu"),
        ("model.layers.3.mlp.up", "MatMul", "mlp.up"),
    ],
)
def test_short_names(node: str, op: str, short: str) -> None:
    assert short_name(node, op) == short


def test_figures() -> None:
    assert [f.time(x) for x in (0, 6.02, 0.1968, 1.2e-5)] == [
        "0 s",
        "6.02\u202fs",
        "197\u202fms",
        "12\u202fµs",
    ]
    assert [f.size(x) for x in (0, 2**30, 1.5 * 2**40)] == [
        "0\u202fB",
        "1.0\u202fGiB",
        "1.5\u202fTiB",
    ]
    assert [f.change(*x) for x in ((1, 1), (1, 1.5), (2, 1), (1, 3), (0, 1))] == [
        "=",
        "+50.0\u202f%",
        "−50.0\u202f%",
        "×3.0",
        "new",
    ]
    assert [f.share(x) for x in (0.0, 1e-5, 0.5)] == [
        "0.0\u202f%",
        "<\u202f0.1\u202f%",
        "50.0\u202f%",
    ]
    assert (
        f.extra(-3.5) == "−3.5\u202fs"
        and f.prose("74 % of 2 GiB in 3 us") == "74\u202f% of 2\u202fGiB in 3\u202fµs"
    )


# --- the page


def sound(source: str) -> Page:
    """A page whose markup nests, whose ids are unique and referred to rightly, and which loads
    nothing."""
    p = Page.of(source)
    assert p.wrong == []
    ids = [a["id"] for _, a in p.elements if "id" in a]
    assert len(ids) == len(set(ids))
    refs = [a["href"].removeprefix("#") for t, a in p.elements if t == "a"] + [
        a["aria-labelledby"] for _, a in p.elements if "aria-labelledby" in a
    ]
    assert set(refs) <= set(ids)
    assert {t for t, _ in p.elements} & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "audio",
        "video",
    } == set()
    assert not any(
        k.startswith("on") or k in ("src", "srcset", "action", "formaction", "xlink:href")
        for _, a in p.elements
        for k in a
    )
    assert [t for t, _ in p.elements].count("script") == 1 and len(p.scripts) == 1
    assert not re.search(
        r"https?://|//[a-z]+\.[a-z]|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|import\(",
        source.replace("</", ""),
    )
    policy = next(
        a["content"]
        for t, a in p.elements
        if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    allowed = base64.b64encode(hashlib.sha256(p.scripts[0].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{allowed}'" in policy
    return p


def test_pages_are_sound(one: str, two: str, bare: str) -> None:
    for source in (one, two, bare):
        p = sound(source)
        assert source.startswith("<!doctype html>") and [t for t, _ in p.elements].count("h1") == 1
        assert not any(
            "nan" in a.get(k, "").lower()
            for _, a in p.elements
            for k in ("style", "d", "x", "y", "width", "height")
        )
    assert one == page([view("tp=2,micro=2")])  # the same bytes each time


def test_what_is_on_the_page(one: str, two: str, bare: str) -> None:
    s = plan("tp=2,micro=2")
    text = Page.of(one).text
    for words in (
        f.time(s.costs["step_time_s"]),
        f.size(s.costs["memory_per_device_bytes"]),
        "microbatches",
        "one repeat of the block",
        "peak",
        "saved for the backward pass",
        "Costliest reshards",
        "runner-up",
        "this plan",
        "ZeRO-3",
        "optimizer state",
        "between blocks",
    ):
        assert words in text, words
    assert all(f.prose(a) in text for a in s.assumptions)
    both = Page.of(two).text
    assert "What changed" in both and "zero_stage" in both and both.count("No pipeline") == 2
    assert (
        "needs the model" in Page.of(bare).text
        and "no model" in Page.of(bare).text
        and "runner-up" in Page.of(bare).text
    )


def test_a_changed_cost_model_is_said() -> None:
    v = view("tp=2,micro=2")
    other = replace(
        v,
        strategy=replace(
            v.strategy,
            costs={**v.strategy.costs, "step_time_s": 2 * v.strategy.costs["step_time_s"]},
        ),
    )
    assert (
        "today’s cost model prices" in Page.of(page([other])).text
        and "today’s cost model prices" not in Page.of(page([v])).text
    )


@pytest.mark.parametrize("letters", [("",), ("A", "B")])
def test_hostile_names_stay_text(letters: tuple[str, ...]) -> None:
    source = page([hostile_view(x) for x in letters])
    p = sound(source)
    assert (
        "<svg onload='window.pwned=1'>" in p.text
        and "</script><script>window.pwned=1</script>" in p.text
        and "名前" in p.text
        and "%%script%%" in p.text
    )
    source.encode("utf-8")
    assert not re.search("[\u202a-\u202e\x00-\x08\ud800-\udfff]", source)
    honest = page([view("tp=2,micro=2", x) for x in letters])
    kinds = {(t, k) for t, a in Page.of(honest).elements for k in a}
    assert {(t, k) for t, a in p.elements for k in a} <= kinds | {("li", "class")}, (
        "a name became markup"
    )


def test_hostile_names_without_the_model() -> None:
    sound(page([replace(hostile_view(), detail=None)]))


@given(st.text() | st.sampled_from(HOSTILE))
@settings(max_examples=200)
def test_text_and_attributes_are_escaped(value: str) -> None:
    p = Page.of(el("p", value, el("span", join(value), title=value), name(value), data_x=value))
    assert p.wrong == [] and [t for t, _ in p.elements if t != "wbr"] == ["p", "span", "span"]
    assert p.elements[0][1]["data-x"] == clean(value) == p.elements[1][1]["title"]
    assert p.text.replace("\r\n", "\n") == (clean(value) * 3).replace("\r\n", "\n")


@pytest.mark.parametrize(
    "sizes",
    [(8,), (16, 4), (1024,), (512, 2), (2, 512), (4, 128, 2), (997,), (1, 1), (64, 16), (128, 8)],
)
def test_the_mesh_is_never_wider_than_the_page(sizes: tuple[int, ...]) -> None:
    s = replace(
        Strategy.load(GOLDEN),
        mesh=tuple({"name": f"a{k}", "size": n, "levels": []} for k, n in enumerate(sizes)),
        tensors={},
        blocks=(),
    )
    p = Page.of(page([View("", "mesh.json", s)]))
    cells = sum("data-device" in a for _, a in p.elements)
    grid = next((a for _, a in p.elements if a.get("class", "").startswith("devices")), None)
    assert cells == (math.prod(sizes) if math.prod(sizes) > 1 else 0) and (grid is None) == (
        cells == 0
    )
    if grid is not None:
        side = int(re.search(r"--cols:(\d+)", grid["style"])[1])  # type: ignore[index]
        across = -(-cells // side) if "down" in grid["class"] else side
        assert across <= 64 and -(-cells // across) <= 64


ZERO = dict.fromkeys(
    (
        "step_time_s",
        "compute_time_s",
        "exposed_communication_time_s",
        "optimizer_time_s",
        "memory_per_device_bytes",
        "memory_limit_bytes",
    ),
    0,
)


@pytest.mark.parametrize(
    "change",
    [
        {
            "nodes": {},
            "tensors": {},
            "blocks": (),
            "baselines": {},
            "assumptions": (),
            "provenance": {},
            "mesh": (),
        },
        {
            "costs": {
                **Strategy.load(GOLDEN).costs,
                **ZERO,
                "step_time_range_s": [0, 0],
                "memory_range_bytes": [0, 0],
            }
        },
        {
            "costs": {
                **Strategy.load(GOLDEN).costs,
                "fit": "no",
                "memory_per_device_bytes": 10**16,
                "memory_range_bytes": [10**16, 10**16],
                "step_time_s": 1e9,
            }
        },
        {
            "costs": {
                **Strategy.load(GOLDEN).costs,
                "bubble_time_s": 0.1,
                "communication_bytes_per_device": {},
                "exposed_s_by_collective": {},
            }
        },
        {
            "solver": {
                **Strategy.load(GOLDEN).solver,
                "name": "manual",
                "gap": None,
                "bound_s": None,
            }
        },
        {"mesh": ({"name": "data", "size": 100_000, "levels": []},)},
    ],
)
def test_odd_plans_have_a_page(change: dict) -> None:
    s = replace(Strategy.load(GOLDEN), **change)
    text = sound(page([View("", "odd.json", s, None, "no model")])).text
    assert not re.search(r"\b(nan|inf)\b", text.lower())
    sound(page([View("A", "odd.json", s), View("B", "even.json", Strategy.load(GOLDEN))]))


@pytest.mark.slow
def test_depth_does_not_grow_the_page(one: str) -> None:
    deep_spec = "zoo:gpt-tiny,hidden=256,layers=12"
    deep = page([view("tp=2,micro=2", "", deep_spec)])
    assert len(deep) < 1.1 * len(one) < 220_000
    written_out = page([view("tp=2,micro=2,blocks=written-out", "", deep_spec)])
    assert len(written_out) < 1.2 * len(one)  # a longer curve of memory
    assert len(page([View("", "gpt.plan.json", Strategy.load(GOLDEN))])) < 120_000


# --- the command


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plan("tp=2,micro=2").save("a.json")
    plan("dp=8,zero=3,recompute=block").save("b.json")
    return tmp_path


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "argv",
    [
        ["a.json", "--html", "r.html", "b.json"],
        ["a.json", "b.json", "--html", "r.html"],
        ["--html", "r.html", "a.json", "b.json"],
    ],
)
def test_two_plans_in_any_order_of_words(
    argv: list[str], saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *argv]) == 0
    out = capsys.readouterr()
    assert out.out == "" and "wrote r.html" in out.err
    assert "What changed" in sound(Path("r.html").read_text("utf-8")).text


def test_several_files_at_once(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # its own files are written anew
        assert main(["show", "a.json", "--html", "r.html", "--trace", "t.json"]) == 0
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert all(
        e["dur"] > 0 and e["ts"] >= 0 and e["name"] and isinstance(e["pid"], int)
        for e in events
        if e["ph"] == "X"
    )
    assert sum(e["dur"] for e in events if e["ph"] == "X") == pytest.approx(
        1e6 * plan("tp=2,micro=2").costs["step_time_s"], rel=1e-3
    )
    _perfetto_reads(events)


def _perfetto_reads(events: list[dict[str, Any]]) -> None:
    """What its importer of Chrome's JSON asks for: known phases, whole process and thread numbers
    that metadata names, slices of a thread that follow each other or nest, counted in nanoseconds,
    and counters of numbers, with the same series in every event of a name.
    """
    assert {e["ph"] for e in events} == {"X", "M", "C"} and all(
        type(e["pid"]) is int and type(e["tid"]) is int for e in events
    )
    processes, counters = (
        {e["pid"] for e in events if e["name"] == "process_name"},
        [e for e in events if e["ph"] == "C"],
    )
    assert {e["pid"] for e in counters} <= processes and not {e["pid"] for e in counters} & {
        e["pid"] for e in events if e["ph"] == "X"
    }
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters) and all(
        type(n) is int and n >= 0 for e in counters for n in e["args"].values()
    )
    totals, held = (
        [e["args"] for e in counters if e["name"] == name] for name in ("total", "held")
    )
    assert (
        all(abs(t["bytes"] - sum(h.values())) <= len(h) for t, h in zip(totals, held, strict=True))
        and len({tuple(h) for h in held}) == 1
    )
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append(
                (round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"])))
            )
    assert tracks and tracks.keys() <= named
    for spans in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "pins",
    ["pp=4,dp=2,micro=8,schedule=1f1b", "pp=2,virtual=2,dp=4,micro=4", "dp=8,micro=2,zero=2"],
)
def test_perfetto_reads_the_trace(pins: str) -> None:
    from planner.report.trace import trace

    spec = "zoo:gpt-tiny,layers=4"
    events = json.loads(trace(priced(plan(pins, spec), spec)))["traceEvents"]
    _perfetto_reads(events)
    peak = max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "total")
    assert peak == pytest.approx(plan(pins, spec).costs["memory_per_device_bytes"], abs=8)


@pytest.mark.parametrize("runtime", ["fsdp", "megatron"])
def test_a_price_that_is_not_made_of_operators_is_not_drawn_as_if(
    runtime: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan("dp=8", SPEC, "train", runtime).save("f.json")
    assert main(["show", "f.json", "--html", "r.html", "--model", SPEC]) == 0
    assert (
        f"priced as {runtime} runs them" in capsys.readouterr().err
        and "Drawn from the file alone" in sound(Path("r.html").read_text("utf-8")).text
    )
    assert main(["show", "f.json", "--trace", "t.json"]) == 2
    assert "error[P069]" in capsys.readouterr().err and not Path("t.json").exists()


def test_without_the_model_the_file_is_enough(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(Path("a.json").read_text())
    data["model"]["name"] = data["provenance"]["source"] = "gone.onnx"
    Path("c.json").write_text(json.dumps(data))
    assert main(["show", "c.json", "--html", "r.html"]) == 0
    assert (
        "not where it was" in capsys.readouterr().err
        and "Drawn from the file alone" in sound(Path("r.html").read_text("utf-8")).text
    )
    assert main(["show", "c.json", "--html", "r.html", "--model", SPEC]) == 0
    assert "Drawn from the file alone" not in Path("r.html").read_text("utf-8")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["a.json", "b.json"], "P002"),
        (["a.json", "--json", "--html", "r.html"], "P003"),
        (["a.json", "--html", "none/r.html"], "P056"),
        (["a.json", "--html", "r.html", "z.json"], "P054"),
        (["a.json", "--html", "r.html", "--model", "zoo:mlp-tiny"], "P051"),
        (["a.json", "--html"], "P003"),
        (["a.json", "--png", "none/p.png"], "P056"),
        (["a.json", "--html", "b.json"], "P053"),
        (["a.json", "--trace", "a.json"], "P053"),
        (["a.json", "--png", "b.json"], "P053"),
    ],
)
def test_errors(
    argv: list[str], code: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--png" in argv:
        pytest.importorskip("matplotlib")
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    assert main(["show", *argv]) == 2
    assert (
        f"error[{code}]" in capsys.readouterr().err
        and {p.name: p.read_bytes() for p in saved.iterdir()} == before
    )


def test_a_picture_needs_matplotlib_and_says_so(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["show", "a.json", "--png", "p.png"]) == 2
    assert (
        "error[P067]" in (err := capsys.readouterr().err)
        and "meshwright[plot]" in err
        and not Path("p.png").exists()
    )


@pytest.mark.parametrize("workload", [pytest.param("train", marks=pytest.mark.slow), "infer"])
def test_a_picture(workload: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from planner.report.html.plots import png

    s = replace(
        plan("", SPEC, workload), model={**plan().model, "name": "a$b_{\\x}$ \u202e</script>\ud800"}
    )
    png(s, detail("", SPEC, workload), tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert (
        data.startswith(b"\x89PNG")
        and len(data) > 10_000
        and [p.name for p in tmp_path.iterdir()] == ["p.png"]
    )


def test_the_page_imports_nothing_heavy() -> None:
    import subprocess

    code = (
        f"import sys; from planner.cli import main; main(['show', {str(GOLDEN)!r}]); print([m for m"
        " in ('jax', 'matplotlib', 'planner.report.html') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.rstrip().endswith("[]")


@pytest.mark.slow
def test_a_large_model_stays_small_and_quick(tmp_path: Path) -> None:
    import time

    import planner
    from planner.commands.common import priced

    s = planner.plan("zoo:llama3-405b", devices=512, batch=256)
    started = time.process_time()
    source = page([View("", "s.json", s, work_out(priced(s, "zoo:llama3-405b")))])
    assert len(source) < 300_000 and time.process_time() - started < 6.0


# --- the first screen


def test_the_decision_is_on_the_first_screen(one: str, two: str) -> None:
    from planner.report.commands import onward, reproduce
    from planner.report.verdict import verdict

    v = view("tp=2,micro=2")
    order = [
        f.prose(verdict(v.strategy)),
        "model FLOPs used",
        "ZeRO-3",
        reproduce(v.strategy),
        onward(v.strategy, v.file)[0][1],
        "What binds",
    ]
    text = Page.of(one[one.index('aria-label="verdict"') :]).text
    at = [text.index(words) for words in order]
    assert (
        at == sorted(at)
        and at[-1] < text.index("Where the step goes")
        and "gap to the bound" not in text
    )
    assert one.count('id="baselines"') == 1 == two.count('id="baselines"')
    both = Page.of(two).text
    assert (
        both.count("What to type") == 0
        and both.count("this plan again") == 2
        and reproduce(v.strategy) in both
    )


def test_two_plans_say_whether_they_are_a_tie() -> None:
    one = view("tp=2,micro=2", "A")
    step = one.strategy.costs["step_time_s"]

    def said(ratio: float, spread: float) -> str:
        costs = [
            {
                **one.strategy.costs,
                "step_time_s": s,
                "step_time_range_s": [s * (1 - spread), s * (1 + spread)],
            }
            for s in (step, step * ratio)
        ]
        return Page.of(
            str(
                comparison(
                    [
                        replace(one, letter=x, strategy=replace(one.strategy, costs=c))
                        for x, c in zip("AB", costs, strict=True)
                    ]
                )
            )
        ).text

    assert "B is slower by" in (near := said(1.1, 0.2)) and "a tie: the ranges overlap" in near
    assert (
        "B is faster by" in (far := said(0.5, 0.1))
        and "the ranges do not overlap" in far
        and "tie" not in far
    )
    assert "Both take the same step." in said(1.0, 0.1)


def test_what_does_not_fit_ties_with_nothing() -> None:
    v = view("tp=2,micro=2")
    key, row = next(iter(v.strategy.baselines.items()))
    same = {
        **row,
        "step_time_s": v.strategy.costs["step_time_s"],
        "step_time_range_s": v.strategy.costs["step_time_range_s"],
    }
    for fit, tie in (("no", False), ("yes", True)):
        made = Page.of(
            str(
                baselines(
                    replace(v, strategy=replace(v.strategy, baselines={key: {**same, "fit": fit}}))
                )
            )
        ).text
        assert ("tie" in made.partition("Whiskers")[0]) == tie
        assert ("a tie is" in made) == tie


def test_bars_of_stages_have_no_lines_between_ticks() -> None:
    """The picture has none: hundreds of ticks would be nothing but lines."""
    v = view("pp=2,dp=4,micro=4", spec="zoo:gpt-tiny,layers=4")
    source = page([v])
    for bar in source.split('class="bar thin"')[1:]:
        inside = (
            bar[: bar.index('class="stagerow"')]
            if 'class="stagerow"' in bar
            else bar[: bar.index('class="level"')]
        )
        assert 'class="part' in inside and " sep" not in inside and "<u " not in inside
    assert (
        source.count('class="bar thin"') == 2 and '" sep' not in source and "part sep" in source
    )  # other bars keep theirs


@pytest.mark.parametrize(
    ("op", "split", "words"),
    [
        ("MatMul", {"b0": ["data"], "n": ["model"]}, "batch over 4, columns over 8"),
        ("MatMul", {"k": ["data", "model"]}, "sums over 32"),
        ("Add", {"d1": ["model"]}, "dim 1 over 8"),
        ("Attention", {"g": ["model"], "s": ["data"]}, "heads over 8, queries over 4"),
        ("Sum", {"+": ["data"]}, "pending sums over 4"),
        ("Odd", {"z": ["model"]}, "z over 8"),
        ("Attention", {"g": ["data"], "r": ["model"]}, "heads over 32"),
        ("Add", {}, "whole on every device"),
    ],
)
def test_splits_in_plain_words(op: str, split: dict[str, list[str]], words: str) -> None:
    assert plain_split(op, split, {"data": 4, "model": 8}) == words


def test_plain_words_stand_on_the_lines_of_the_graph(one: str) -> None:
    assert 'class="split" title="b0/data"><span class="name">batch over 4</span>' in one


@pytest.mark.parametrize("pins", ["dp=4,tp=2,micro=2,copies=1", "dp=4,tp=2,micro=2,copies=2"])
def test_saved_activations_of_operators_add_up_to_those_priced(pins: str) -> None:
    """Of overlapped microbatches both save theirs."""
    d = detail(f"{pins},recompute=none", "zoo:gpt-tiny,layers=4")
    total = sum(r.saved_bytes for r in d.rows if not r.after_blocks)
    assert total == pytest.approx(d.memory.activations, rel=1e-6) and total > 0
