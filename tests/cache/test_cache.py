"""The cache of searches: it changes no answer, knows what an answer follows from, and no file in
its folder can do harm."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
import planner.cache.folder
from planner.cache.folder import Cache
from planner.cache.keys import digest, installed, program
from planner.cli import main
from planner.errors import PlanError
from planner.pins.pins import from_table
from planner.search.build_request import make_request
from planner.search.keys import model_key, search_key
from planner.search.search import Search
from planner.workload.model import Model
from planner.workload.open import open_model

GPT = "zoo:gpt-tiny"
SMALL = "zoo:gpt-tiny,layers=1"
"""Nothing repeats in it: a search of it is a third as long."""
KEY = "0" * 32


def text(strategy: planner.Strategy) -> dict[str, Any]:
    """A strategy file without its date and timings."""
    found = json.loads(strategy.to_json())
    del found["provenance"]
    return dict(found)


def key_of(
    source: Any = GPT, *, devices: int = 8, batch: int = 16, loss: str = "", **more: Any
) -> str:
    model = open_model(source, devices, batch=batch, loss=loss)
    return search_key(
        model, model_key(model), make_request(devices=devices, hardware=None, topology=None, **more)
    )


def entry_in(folder: Path) -> tuple[str, dict[str, Any]]:
    """The one search in a folder and its key; beside it lies what models like its own are planned
    from."""
    found = {
        path.stem: json.loads(path.read_bytes().partition(b"\n")[2])
        for path in folder.glob("*.json")
    }
    ((key, entry),) = [(key, entry) for key, entry in found.items() if "best" in entry]
    return key, entry


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "free": (GPT, {"devices": 8, "batch": 64}),
    "three axes": (GPT, {"devices": 16, "batch": 8}),
    "stages": (GPT, {"devices": 4, "batch": 16, "pins": "pp=2,micro=4"}),
    "pins": (GPT, {"devices": 8, "batch": 16, "pins": "tp=2,zero=3,micro=2,recompute=block"}),
    "named axes": (
        GPT,
        {"devices": 8, "batch": 16, "pins": from_table({"mesh": {"mine": 2, "data": 4}})},
    ),
    "not folded": ("zoo:resnet-tiny", {"devices": 4, "batch": 8}),
    "memory first": ("zoo:mlp-tiny", {"devices": 4, "batch": 8, "objective": "memory"}),
    "memory binds": ("zoo:mlp-tiny", {"devices": 4, "batch": 2**20, "memory_limit_bytes": 2**28}),
    "inference": ("zoo:bert-tiny", {"devices": 4, "batch": 8, "workload": "infer"}),
    "tables": ("zoo:dlrm-tiny", {"devices": 8, "batch": 64}),
    "experts": ("zoo:mixtral-tiny", {"devices": 4, "batch": 16, "solver": "recursive"}),
    "state on the host": (
        GPT,
        {"devices": 8, "batch": 16, "pins": "dp=8,micro=1,zero=1,offload=optimizer"},
    ),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", PLANS)
def test_a_recalled_plan_is_the_plan(name: str, tmp_path: Path) -> None:
    source, options = PLANS[name]
    known = Cache(tmp_path)
    alone = text(planner.plan(source, **options))
    assert text(planner.plan(source, **options, cache=known)) == alone
    assert (known.hits, known.lookups) == (0, known.lookups) and known.lookups >= 1, (
        "the first finds nothing"
    )
    again = Cache(tmp_path)
    assert text(planner.plan(source, **options, cache=again)) == alone
    assert again.hits == again.lookups == known.lookups, "every search of the second is recalled"


@pytest.mark.slow
def test_phases_of_serving_are_searches_too(tmp_path: Path) -> None:
    from planner.serving.serve import serve

    def served(cache: Cache | None) -> dict[str, Any]:
        made = json.loads(
            serve(
                "zoo:llama-tiny,cache=1,layers=1",
                devices=1,
                prompt=8,
                generate=4,
                concurrency=4,
                cache=cache,
            ).to_json()
        )
        for part in (made, made["prompts"], made["step"]):
            del part["provenance"]
        return dict(made)

    first, again = Cache(tmp_path), Cache(tmp_path)
    alone = served(None)
    assert served(first) == alone == served(again)
    assert first.hits < first.lookups == again.lookups
    assert again.hits >= 2


def test_what_is_recalled_is_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner.plan(SMALL, devices=8, batch=16, cache=tmp_path)

    def searched(self: Search, how_close: bool) -> Any:
        raise AssertionError("a search")

    monkeypatch.setattr(Search, "_searched", searched)
    planner.plan(SMALL, devices=8, batch=16, cache=str(tmp_path))
    with pytest.raises(AssertionError, match="a search"):
        planner.plan(SMALL, devices=8, batch=32, cache=tmp_path)


def test_the_key_is_of_all_that_an_answer_follows_from(tmp_path: Path) -> None:
    """Each of these may change a plan, so each has a key of its own; the same asked twice has the
    same."""
    limits: list[dict[str, Any]] = [
        {"memory_limit_bytes": 2**33},
        {"memory_reserve_bytes": 2**30},
        {"objective": "memory"},
        {"solver": "ilp"},
        {"mode": "data-parallel"},
        {"seed": 1},
        {"pins": "tp=2"},
        {"pins": "tp=4"},
        {"pins": "zero=1"},
        {"precision": "fp32"},
        {"optimizer": "sgd"},
        {"runtime": "jax-jit"},
        {"fold": False},
        {"baselines": False},
        {"time_limit_s": 5.0},
        {"devices": 4},
        {"batch": 32},
        {"loss": "mse"},
    ]
    sizes: list[dict[str, Any]] = [
        {"source": s}
        for s in (
            "zoo:gpt-tiny,layers=3",
            "zoo:gpt-tiny,hidden=128",
            "zoo:llama-tiny",
            "zoo:bert-tiny",
        )
    ]
    keys = [key_of(**more) for more in ({}, *limits, *sizes)]
    assert len(set(keys)) == len(keys)
    assert key_of() == keys[0]
    model, request = (
        open_model(GPT, 8, batch=16),
        make_request(devices=8, hardware=None, topology=None),
    )
    other = replace(
        request,
        topology=replace(
            request.topology, device=replace(request.topology.device, memory_efficiency=0.5)
        ),
    )
    known = model_key(model)
    assert (
        search_key(model, known, replace(request, cache=Cache(tmp_path)))
        == keys[0]
        != search_key(model, known, other)
    )


def test_a_graph_is_confirmed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as it was is not read again to see whether its graph was derived rightly, whatever
    else is asked; a model that changed is."""
    options: dict[str, Any] = {"devices": 2, "baselines": False}
    binding: dict[str, Any] = {"memory_limit_bytes": 2**28}
    tighter: dict[str, Any] = {"memory_limit_bytes": 2**28 - 2**20}
    planner.plan("zoo:mlp-tiny", batch=2**20, **options, **binding, cache=tmp_path)
    alone = text(planner.plan("zoo:mlp-tiny", batch=2**20, **options, **tighter))
    assert alone["techniques"]["microbatches"] > 1

    def read(self: Model, microbatches: int) -> bool:
        raise AssertionError("read")

    monkeypatch.setattr(Model, "confirm", read)
    for limit, found in ((binding, 1), (tighter, 0)):
        known = Cache(tmp_path)
        made = planner.plan("zoo:mlp-tiny", batch=2**20, **options, **limit, cache=known)
        assert known.hits == found
    assert text(made) == alone
    with pytest.raises(AssertionError, match="read"):
        planner.plan("zoo:mlp-tiny,layers=4", batch=2**20, **options, **binding, cache=tmp_path)


def test_versions_of_libraries_are_found_where_modules_are(tmp_path: Path) -> None:
    for name in ("numpy-2.0.1.dist-info", "Scipy-1.9.egg-info", "numpydoc-1.0.dist-info", "numpy"):
        (tmp_path / name).mkdir()
    assert installed(("numpy", "scipy"), [str(tmp_path), str(tmp_path / "none")]) == (
        "Scipy-1.9.egg-info",
        "numpy-2.0.1.dist-info",
    )
    assert any(found.startswith("numpy-") for found in installed(("numpy",))), (
        "the one that is imported here"
    )


def test_the_program_is_all_of_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.setattr("planner.cache.keys.FOLDERS", (str(tmp_path),))
    seen = []
    for name, body in (
        ("deep/a.py", b"x"),
        ("deep/a.py", b"y"),
        ("b.toml", b""),
        ("deep/c.json", b"1"),
        ("deep/c.txt", b"1"),
    ):
        (tmp_path / name).write_bytes(body)
        seen.append(program.__wrapped__())
    assert len(set(seen)) == 4 and seen[-1] == seen[-2], "what says nothing of plans is no part"


def test_the_key_is_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("zoo:mlp-tiny")
    monkeypatch.setattr("planner.search.keys.program", lambda: "other code")
    assert key_of("zoo:mlp-tiny") != before


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.sampled_from([0.0, 1.0, -0.0, "", "0", "1", b"", b"0"]),
    lambda x: st.lists(x, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("ab"), x),
    max_leaves=5,
)


@given(PLAIN, PLAIN)
def test_digests_are_equal_where_values_are(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == (repr(a) == repr(b))


def test_what_has_no_fingerprint_is_an_error() -> None:
    assert digest(frozenset("ab")) == digest(frozenset("ba"))
    with pytest.raises(TypeError, match="object has no fingerprint"):
        digest(object())


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """An entry, and the plan it is of."""
    folder = tmp_path_factory.mktemp("kept")
    made = text(planner.plan("zoo:mlp-tiny", devices=2, batch=8, baselines=False, cache=folder))
    return entry_in(folder)[1], made


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in nested JSON."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [*([at] if at else []), *(p for k, v in inside for p in places(v, (*at, k)))]


@pytest.mark.parametrize("edits", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_an_edited_entry_changes_no_price(
    edits: int, entry: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever stands in one place of an entry whose digest holds, the plan is the same: at worst
    all is searched anew."""

    @given(data=st.data())
    @settings(max_examples=edits)
    def edited(data: st.DataObject) -> None:
        same_where_edited(data, entry, tmp_path)

    edited()


def same_where_edited(
    data: st.DataObject, entry: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    known, made = json.loads(json.dumps(entry[0])), entry[1]
    at = data.draw(st.sampled_from(places(known)))
    held = known
    for k in at[:-1]:
        held = held[k]
    held[at[-1]] = data.draw(
        st.sampled_from(
            [None, -1, 0, 7, 2.5, float("nan"), float("inf"), "", "x", [], {}, [[]], 10**30, True]
        )
    )
    model, request = (
        open_model("zoo:mlp-tiny", 2, batch=8),
        make_request(devices=2, hardware=None, topology=None, baselines=False),
    )
    Cache(tmp_path).put(search_key(model, model_key(model), request), known)
    found = text(planner.plan("zoo:mlp-tiny", devices=2, batch=8, baselines=False, cache=tmp_path))
    assert found["cost"] == made["cost"]
    assert found["nodes"].keys() == made["nodes"].keys()
    assert all(row["split"] == made["nodes"][name]["split"] for name, row in found["nodes"].items())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layouts", [[], [[None, None]], "none of them", [0] * 1000, None])
def test_layouts_that_are_none_of_a_tensors_are_no_entry(layouts: Any, tmp_path: Path) -> None:
    """Of a model with tensors that several operators read."""
    alone = text(planner.plan(SMALL, devices=4, batch=8, baselines=False, cache=tmp_path))
    key, entry = entry_in(tmp_path)
    assert entry["layouts"]
    Cache(tmp_path).put(
        key,
        {
            **entry,
            "layouts": (
                [[None, None]] * len(entry["layouts"]) if layouts == "none of them" else layouts
            ),
        },
    )
    again = Cache(tmp_path)
    assert text(planner.plan(SMALL, devices=4, batch=8, baselines=False, cache=again)) == alone
    assert (again.lookups, again.hits) == (1, 0)


@pytest.mark.parametrize(
    "body",
    [b"", b"\n", b"{}", b"\xff\xfe\n{}", b"[" * 100_000, b'{"best":' * 5000],
    ids=["empty", "line", "no digest", "bytes", "deep", "deeper"],
)
def test_a_damaged_file_is_no_entry(body: bytes, tmp_path: Path) -> None:
    known = Cache(tmp_path)
    known.put(KEY, {"a": 1})
    (path,) = tmp_path.iterdir()
    assert known.get(KEY) == {"a": 1}
    whole = path.read_bytes()
    for wrong in (
        body,
        whole[:-1],
        whole.replace(b"1", b"2"),
        planner.cache.folder._digest(body).encode() + b"\n" + body,
    ):
        path.write_bytes(wrong)
        assert known.get(KEY) is None or wrong.endswith(b"\n{}")
    path.write_bytes(whole)
    assert known.get(KEY) == {"a": 1}


@pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")
def test_files_of_others_are_no_entries(tmp_path: Path) -> None:
    known = Cache(tmp_path / "new")
    known.put(KEY, {"a": 1})
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0, "a folder of the user's alone"
    (path,) = known.folder.iterdir()
    path.chmod(0o666)
    assert known.get(KEY) is None
    path.chmod(0o644)
    assert known.get(KEY) == {"a": 1}
    path.unlink()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)  # or opening it would wait for a writer
    try:
        assert known.get(KEY) is None
    finally:
        os.close(reader)


def test_the_folder_is_bounded_and_what_was_used_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not the cache's is left alone."""
    monkeypatch.setattr(planner.cache.folder, "MOST_BYTES", 5000)
    monkeypatch.setattr(planner.cache.folder, "MOST_ENTRY_BYTES", 3000)
    known, other = Cache(tmp_path), tmp_path / "thesis.json"
    other.write_text("x" * 9000)
    keys = [f"{k:032x}" for k in range(4)]
    for k, key in enumerate(keys[:3]):
        known.put(key, {"pad": "p" * 1500})
        os.utime(tmp_path / f"{key}.json", (time.time() - 100 + k,) * 2)
    assert known.get(keys[0]) is not None, "used now"
    known.put(keys[3], {"pad": "p" * 1500})
    assert [known.get(key) is not None for key in keys] == [True, False, True, True]
    known.put(keys[1], {"pad": "p" * 4000})
    assert known.get(keys[1]) is None, "larger than an entry may be"
    assert other.stat().st_size == 9000


def test_many_may_write_at_once(tmp_path: Path) -> None:
    """A reader beside writers sees one of the whole entries."""
    rows = [{"n": n, "pad": "p" * 20_000} for n in range(8)]
    known = Cache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(known.put, KEY, row) for row in rows for _ in range(5)]
        seen = [known.get(KEY) for _ in range(100)]
        assert all(w.result() is None for w in writing)
    assert known.get(KEY) in rows
    assert all(s is None or s in rows for s in seen)
    assert [p.name for p in tmp_path.iterdir()] == [f"{KEY}.json"]


def test_a_switch_is_no_folder() -> None:
    with pytest.raises(PlanError, match="P018") as error:
        planner.plan("zoo:mlp-tiny", devices=2, cache=False)  # type: ignore[arg-type]
    assert error.value.help == ("cache=None keeps nothing",)


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = planner.plan(
        "zoo:mlp-tiny",
        devices=2,
        batch=8,
        baselines=False,
        cache=Cache(tmp_path / "file" / "below"),
    )
    assert text(made) == text(planner.plan("zoo:mlp-tiny", devices=2, batch=8, baselines=False))
    with pytest.raises(PlanError, match="P056"):
        planner.plan("zoo:mlp-tiny", devices=2, batch=8, cache=tmp_path / "file")


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run searched anew, and nothing said why."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "file" / "below"))
    call = ["zoo:mlp-tiny", "--devices", "2", "--batch", "8", "-o", str(tmp_path / "it.json")]
    assert main(call) == 0
    assert capsys.readouterr().err.count("file/below cannot be written (Not a directory)") == 1


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path | None:
        found = Cache.chosen()
        return found.folder if found is not None else None

    assert folder() is None, "tests/conftest.py"
    assert Cache.chosen("off") is None
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "a"))
    assert folder() == tmp_path / "a"
    monkeypatch.setenv("MESHWRIGHT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "meshwright"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is not allowed there")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder() == tmp_path / "home" / ".cache" / "meshwright"


def test_the_command_says_what_it_recalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> str:
        assert (
            main(
                [
                    "zoo:mlp-tiny",
                    "--devices",
                    "2",
                    "--batch",
                    "8",
                    "-o",
                    "p.json",
                    "--force",
                    *words,
                ]
            )
            == 0
        )
        return capsys.readouterr().err

    assert "from the cache" not in said("--cache", "kept")
    assert "1 of 1 search from the cache kept (--no-cache searches anew)" in said("--cache", "kept")
    assert "from the cache" not in said("--no-cache")
    assert "from the cache" not in said("--cache", "kept", "--quiet")
    assert (
        main(["sweep", "zoo:mlp-tiny", "--devices", "2,4", "--batch", "8", "--cache", "kept"]) == 0
    )
    assert "1 of 2 searches from the cache" in capsys.readouterr().err
    assert main(["zoo:mlp-tiny", "--devices", "2", "--cache", "kept", "--no-cache"]) == 2


def test_what_a_function_says_is_never_recalled(tmp_path: Path) -> None:
    """The loss of a file may call on others that no key knows."""
    (tmp_path / "loss.py").write_text(
        "import jax.numpy as jnp\n\n\ndef mine(output, labels):\n    return jnp.mean(output)\n"
    )
    known = Cache(tmp_path / "kept")
    for _ in range(2):
        planner.plan(
            "zoo:mlp-tiny",
            devices=2,
            batch=8,
            loss=f"{tmp_path / 'loss.py'}:mine",
            baselines=False,
            cache=known,
        )
    assert known.lookups == 0


@pytest.mark.slow
def test_a_search_that_was_cut_short_is_not_kept(tmp_path: Path) -> None:
    known = Cache(tmp_path)
    with pytest.raises(PlanError, match="P021|P026"):
        planner.plan(
            "zoo:llama3-8b,layers=2",
            devices=2,
            batch=8,
            memory_limit_bytes=6 * 10**9,
            remedies=False,
            cache=known,
        )
    assert known.lookups and not list(tmp_path.glob("*.json"))
