"""Plans of models that changed a little: what did not change is decided as before, the rest is
solved, and where that is not good enough all is searched."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.analysis.facts import GraphFacts
from planner.cache.folder import Cache
from planner.cli import main
from planner.errors import PlanError
from planner.machine.topology import from_json
from planner.search.build_request import make_request
from planner.search.incremental import MOST_SEARCHES, SLOWER, contents, kept_places
from planner.search.keys import history_key
from planner.strategy.strategy import Strategy
from planner.whatif.reprice import open_recorded, reprice
from planner.workload.open import open_model

GPT = "zoo:gpt-tiny"
OPTIONS: dict[str, Any] = {"devices": 8, "batch": 64, "baselines": False}
HEAVY = "zoo:gpt,layers=4,hidden=1024,heads=16,seq=512,vocab=32000,tied=false"


def plan(source: Any, folder: Path | None, incremental: bool = True, **more: Any) -> Strategy:
    return planner.plan(source, **{**OPTIONS, **more}, cache=folder, incremental=incremental)


def kept(strategy: Strategy) -> dict[str, Any] | None:
    found: dict[str, Any] | None = strategy.provenance.get("incremental")
    return found


def history(folder: Path, source: Any = GPT, **more: Any) -> str:
    """The key of the searches that models like this one are planned from."""
    model = open_model(source, 8, batch=64)
    return history_key(
        model, make_request(devices=8, hardware=None, topology=None, baselines=False, **more)
    )


def splits(strategy: Strategy) -> dict[str, Any]:
    return {name: row["split"] for name, row in strategy.nodes.items()}


def text(strategy: Strategy) -> dict[str, Any]:
    found = json.loads(strategy.to_json())
    del found["provenance"]
    return dict(found)


letters = st.lists(st.sampled_from("abcde"), max_size=12)


@given(
    old=letters,
    new=letters,
    links=st.dictionaries(st.integers(0, 11), st.frozensets(st.integers(0, 11), max_size=3)),
)
def test_what_is_kept_is_in_both_in_one_order_and_not_beside_a_change(
    old: list[str], new: list[str], links: dict[int, frozenset[int]]
) -> None:
    found = kept_places(old, new, links)
    assert all(new[k] == old[at] for k, at in found.items())
    assert all(a < b and found[a] < found[b] for a, b in pairwise(sorted(found)))
    for a, b in pairwise(sorted(found)):
        if b == a + 1:
            assert found[b] == found[a] + 1, "between neighbours nothing was taken out"
    assert (len(found) == len(new)) == (old == new or not new)
    nowhere = [k for k in range(len(new)) if new[k] not in old]
    assert not any(k in found for c in nowhere for k in (c - 1, c, c + 1, *links.get(c, ())))


@pytest.mark.slow
def test_contents_know_no_names_and_no_repeats(tmp_path: Path) -> None:
    def of(source: str) -> tuple[str, ...]:
        return contents(GraphFacts.of(open_model(source, 8, batch=64).graph(1), training=True))

    assert of(GPT) == of(GPT + ",layers=5")
    other, wider = of(GPT + ",vocab=320"), of(GPT + ",hidden=192")
    same = set(of(GPT))
    assert 0 < len(same - set(other)) < len(same) / 4 and len(same & set(wider)) < len(same) / 4
    program = (
        "from planner.api import open_model; from planner.analysis.facts import GraphFacts; from"
        f" planner.search.incremental import contents; print(contents(GraphFacts.of(open_model({GPT!r},"
        " 8, batch=64).graph(1), training=True)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert said == {f"{of(GPT)}\n"}, "the same in every process"


@pytest.mark.slow
def test_a_layer_more_keeps_every_decision(tmp_path: Path) -> None:
    before = plan(HEAVY, tmp_path)
    assert kept(before) is None, "there was nothing to keep"
    after = plan(HEAVY.replace("layers=4", "layers=5"), tmp_path)
    assert kept(after) == {
        "model": HEAVY,
        "date": before.provenance["date"],
        "kept": after.model["nodes"],
        "solved": 0,
    }
    assert splits(after) == splits(before) and after.mesh == before.mesh
    assert after.solver["gap"] is None and after.solver["status"] == "feasible", "nothing is proven"
    again = reprice(
        after,
        open_recorded(after, HEAVY.replace("layers=4", "layers=5")),
        from_json(after.topology),
    )
    assert again.cost.step_time_s == pytest.approx(after.costs["step_time_s"], rel=1e-9)


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "images": ("zoo:resnet-tiny", "zoo:resnet-tiny,classes=12", {}),
    "vocabulary": (HEAVY, HEAVY.replace("32000", "32768"), {}),
    "an odd vocabulary": (HEAVY, HEAVY.replace("32000", "32001"), {}),
    "fewer layers": (HEAVY, HEAVY.replace("layers=4", "layers=2"), {}),
    "pins": (HEAVY, HEAVY.replace("32000", "32768"), {"pins": "tp=2,zero=1"}),
    "inference": ("zoo:bert-tiny", "zoo:bert-tiny,layers=3", {"workload": "infer"}),
    "state on the host": (
        HEAVY,
        HEAVY.replace("32000", "32768"),
        {"memory_limit_bytes": 200 * 2**20, "batch": 8},
    ),
    "stages": (HEAVY, HEAVY.replace("32000", "32768"), {"pins": "pp=2,micro=8"}),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "state on the host")) for n in CHANGES],
)
def test_what_changed_is_solved_and_the_rest_kept(name: str, tmp_path: Path) -> None:
    old, new, more = CHANGES[name]
    before = plan(old, tmp_path, **more)
    full = plan(new, None, incremental=False, **more)
    made = plan(new, tmp_path, **more)
    was = kept(made)
    assert (
        was is not None
        and was["kept"] + was["solved"] == made.model["nodes"]
        and was["kept"] > was["solved"]
    )
    assert [(a["size"], a["levels"]) for a in made.mesh] == [
        (a["size"], a["levels"]) for a in before.mesh
    ], "called by what they do now"
    assert made.techniques["offload"] == before.techniques["offload"]
    step = made.costs["step_time_s"]
    assert made.costs["memory_per_device_bytes"] <= made.costs["memory_limit_bytes"]
    assert (
        full.solver["bound_s"] <= step * (1 + 1e-9)
        and step <= SLOWER * 1.02 * full.costs["step_time_s"]
    )
    plain = plan(new, tmp_path, incremental=False, **more)
    assert kept(plain) is None and text(plain) == text(full), (
        "what was kept is no part of another answer"
    )
    assert kept(plan(new, tmp_path, **more)) is None, "where all was searched, that is the answer"


@pytest.mark.slow
def test_no_split_of_what_was_solved_anew_would_be_better(tmp_path: Path) -> None:
    """Every operator that changed has the best of its splits, all else as it is."""
    plan(HEAVY, tmp_path)
    made = plan(HEAVY.replace("32000", "32768"), tmp_path, pins=None)
    head = [row for name, row in made.nodes.items() if "runner_up" in row]
    assert head and all(row["runner_up"]["extra_s"] >= -1e-12 for row in head)


@pytest.mark.slow
def test_where_it_is_not_good_enough_all_is_searched(tmp_path: Path) -> None:
    before = plan(HEAVY, tmp_path)
    least = int(before.costs["memory_per_device_bytes"])
    for source, more in (
        (HEAVY, {"batch": 32}),
        (HEAVY.replace("hidden=1024", "hidden=2048"), {}),
        ("zoo:mlp-tiny", {}),
        (HEAVY, {"memory_limit_bytes": 2 * least}),
    ):
        made = plan(source, tmp_path, **more)
        assert kept(made) is None and text(made) == text(
            plan(source, None, incremental=False, **more)
        )
    tight = {"memory_limit_bytes": least + 2**20}
    plan(HEAVY, tmp_path, **tight)
    deep = HEAVY.replace("layers=4", "layers=8")
    made = plan(deep, tmp_path, **tight)  # what fitted then does not fit now, or takes longer
    full = plan(deep, None, incremental=False, **tight)
    assert (
        text(made) == text(full)
        if kept(made) is None
        else made.costs["step_time_s"] <= SLOWER * full.costs["step_time_s"] * 1.02
    )


@pytest.mark.slow
def test_the_most_alike_of_the_searches_before_is_kept(tmp_path: Path) -> None:
    like, other = HEAVY.replace("32000", "32768"), HEAVY.replace("32000", "16000")
    plan(like, tmp_path)
    plan(other, tmp_path, incremental=False)
    made = plan(like.replace("layers=4", "layers=3"), tmp_path)
    assert (kept(made) or {})["model"] == like


WRONG = {"key": "0" * 32, "model": "m", "date": "d", "contents": 3, "flops": 1.0, "other_s": 0.0}


@cache
def planned_anew(source: str) -> Strategy:
    return plan(source, None, incremental=False)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "rows", [None, 3, [3], [{}], [WRONG], "gone", "short", "strange", "endless"]
)
def test_a_history_that_does_not_hold_is_none(rows: Any, tmp_path: Path) -> None:
    plan(GPT, tmp_path)
    kept_there, new = Cache(tmp_path), GPT + ",layers=3"
    found = kept_there.get(history(tmp_path))["searches"]
    if rows == "gone":
        rows = [{**found[0], "key": "f" * 32}]
    elif rows == "short":
        rows = [{**found[0], "contents": found[0]["contents"][:-1]}]
    elif rows == "strange":  # an entry whose splits are none of these operators
        entry = kept_there.get(found[0]["key"])
        kept_there.put(
            found[0]["key"],
            {**entry, "palette": [[["no such factor", ["no such axis"]]]] * len(entry["palette"])},
        )
        rows = found
    elif rows == "endless":
        entry = kept_there.get(found[0]["key"])
        kept_there.put(
            found[0]["key"], {**entry, "best": {**entry["best"], "copies": float("inf")}}
        )
        rows = found
    kept_there.put(history(tmp_path), {"searches": rows})
    made = plan(new, tmp_path)
    assert kept(made) is None and text(made) == text(planned_anew(new))


@pytest.mark.slow
def test_a_history_is_bounded(tmp_path: Path) -> None:
    for width in range(MOST_SEARCHES + 3):
        plan(f"zoo:mlp-tiny,hidden={16 + 8 * width}", tmp_path)
    rows = Cache(tmp_path).get(history(tmp_path, "zoo:mlp-tiny"))["searches"]
    assert len(rows) == MOST_SEARCHES and rows[0]["model"].endswith(
        str(16 + 8 * (MOST_SEARCHES + 2))
    )


def test_the_command_says_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--devices", "8", "--batch", "64", "--cache", "kept", "-o", "p.json", "--force"]
    assert main([HEAVY, *words]) == 0
    assert main([HEAVY.replace("32000", "33024"), *words]) == 0
    said = capsys.readouterr().err
    assert f"most operators are as in {HEAVY} on " in said and said.count("--incremental") == 1
    assert main([HEAVY.replace("32000", "32768"), *words, "--incremental"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "kept the mesh and " in out
        and " solved anew no other plans looked at (--incremental)" in out
    )
    assert main(["explain", "p.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "kept the mesh and " in out and "no bound proven" in out
    assert main(["show", "p.json", "--html", "p.html"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "<dt>kept</dt>" in page and "the mesh and " in page
    assert main([GPT, "--devices", "8", "--no-cache", "--incremental"]) == 2
    assert (
        main(
            [
                GPT,
                "--devices",
                "8",
                "--workload",
                "infer",
                "--prompt",
                "8",
                "--generate",
                "4",
                "--concurrency",
                "4",
                "--incremental",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert (
        "P003" in err
        and "keeps decisions of one in the cache" in err
        and "a serving plan does not take --incremental" in err
    )
    with pytest.raises(PlanError, match="P003"):
        planner.plan(GPT, devices=8, incremental=True)
