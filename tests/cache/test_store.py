"""Tables of moves that a changed model has in common with one planned before: they are read back,
change no answer, and no file in their folder can do harm."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models_zoo
import planner
import planner.cache.folder
import planner.cache.reshard_tables
from planner.cache.folder import Cache
from planner.cache.reshard_tables import HEAD, ROW, Tables, _digest
from planner.cli import main
from planner.pricing.table_key import key_of
from planner.search.build_request import make_request
from planner.search.machine_key import machine_key

MACHINE = "a" * 32


def text(strategy: planner.Strategy) -> dict[str, Any]:
    """A strategy file without its date and timings."""
    found = json.loads(strategy.to_json())
    del found["provenance"]
    return dict(found)


def replaced(source: str, op: str, by: str) -> Any:
    """A model of the zoo with the first operator of a kind replaced."""
    model = models_zoo.build(source)
    next(n for n in model.graph.node if n.op_type == op).op_type = by
    return model


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("zoo:gpt-tiny", {"devices": 4, "batch": 16}),
    "experts": ("zoo:mixtral-tiny", {"devices": 4, "batch": 8}),
    "images": ("zoo:resnet-tiny", {"devices": 4, "batch": 8, "hardware": "tpu-v5e"}),
    "memory binds": ("zoo:mlp-tiny", {"devices": 4, "batch": 2**20, "memory_limit_bytes": 2**28}),
}
CHANGES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "one layer more": ("gpt", "zoo:gpt-tiny,layers=3", {}),
    "another width": ("gpt", "zoo:gpt-tiny,ff=384", {}),
    "another vocabulary": ("gpt", "zoo:gpt-tiny,vocab=520", {}),
    "an operator replaced": ("gpt", lambda: replaced("zoo:gpt-tiny", "Gelu", "Relu"), {}),
    "another batch": ("gpt", "zoo:gpt-tiny", {"batch": 32}),
    "fewer experts": ("experts", "zoo:mixtral-tiny,experts=2", {}),
    "other images": ("images", "zoo:resnet-tiny,classes=12", {}),
    "wider images": ("images", "zoo:resnet-tiny,width=9", {}),
    "another limit": ("memory binds", "zoo:mlp-tiny", {"memory_limit_bytes": 2**27}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The cache that a base leaves, made when it is first asked for; each asker gets a copy."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("base")
            source, options = BASES[name]
            planner.plan(source, **options, baselines=False, cache=made[name])
        return shutil.copytree(made[name], tmp_path_factory.mktemp("copy"), dirs_exist_ok=True)

    return folder


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_has_the_plan_it_has_without(
    name: str, folders: Callable[[str], Path]
) -> None:
    base, source, more = CHANGES[name]
    options, source = (
        BASES[base][1] | more | {"baselines": False},
        (source() if callable(source) else source),
    )
    known = Cache(folders(base))
    made = planner.plan(source, **options, cache=known)
    assert text(made) == text(planner.plan(source, **options))
    asked, there = known.priced
    assert known.hits == 0 < there <= asked, "no search is recalled, tables are"
    assert made.provenance["tables"] == {"asked": asked, "recalled": there}
    if name == "one layer more":
        assert there == asked, "repeats are in no table"
    else:
        assert there > asked // 20


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_key_says_all_that_a_table_follows_from(
    step: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever asks for a table of some key, under whatever model, mesh and machine, would make the
    same numbers."""
    known: dict[tuple[str, bytes], np.ndarray] = {}
    again = 0

    def checked(
        self: Tables, key: bytes, rows: int, columns: int, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        nonlocal again
        table, place = make(), (self.machine, key)
        again += place in known
        np.testing.assert_array_equal(known.setdefault(place, table), table)
        assert table.shape == (rows, columns)
        return table

    monkeypatch.setattr(Tables, "array", checked)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("zoo:gpt-tiny", {}),
        ("zoo:t5-tiny", {}),
        ("zoo:gpt-tiny,layers=3", {"batch": 32}),
        ("zoo:resnet-tiny", {}),
        ("zoo:gpt-tiny", {"hardware": "tpu-v5e"}),
        ("zoo:gpt-tiny", {"precision": "fp32"}),
        ("zoo:gpt-tiny", {"hardware": "cpu"}),
        ("zoo:gpt-tiny", {"pins": "pp=2"}),
        ("zoo:gpt-tiny", {"pins": "bucket=25MB"}),
        ("zoo:llama-tiny", {}),
    ]
    for source, options in cases[::step]:
        planner.plan(
            source, **{"devices": 4, "batch": 16, "baselines": False, **options}, cache=tmp_path
        )
    assert again > 100 and len({machine for machine, _ in known}) == 3


def test_what_tables_share_is_of_the_machine_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their file is another for each of these; sizes of buckets, optimizers and limits are in no
    table."""

    def of(**more: Any) -> str:
        return machine_key(
            make_request(**{"devices": 8, "hardware": None, "topology": None, **more})
        )

    request = make_request(devices=8, hardware=None, topology=None)
    slower = machine_key(
        replace(
            request,
            topology=replace(
                request.topology,
                levels=tuple(
                    replace(x, latency_s=2 * x.latency_s) for x in request.topology.levels
                ),
            ),
        )
    )
    keys = [of(), of(devices=16), of(hardware="a100-80gb"), of(runtime="jax-jit"), slower]
    assert len(set(keys)) == len(keys)
    assert (
        of() == of(optimizer="sgd") == of(memory_limit_bytes=2**30) == of(seed=1) == of(pins="tp=2")
    )
    monkeypatch.setattr("planner.search.machine_key.program", lambda: "other code")
    assert of() != keys[0]


def key(k: int) -> bytes:
    return key_of(b"%d" % k)


def filled(folder: Path, count: int = 3) -> tuple[Path, list[np.ndarray]]:
    """A file of tables, and these."""
    kept, rows = Tables(folder, MACHINE), [np.arange(6.0).reshape(2, 3) + k for k in range(count)]
    for k, table in enumerate(rows):
        assert kept.array(key(k), 2, 3, partial(np.copy, table)).tobytes() == table.tobytes()
    assert kept.keep() and not kept.keep()
    (path,) = folder.glob("*.tables")
    return path, rows


def there(folder: Path, k: int, shape: tuple[int, int] = (2, 3)) -> np.ndarray | None:
    """The table of a key as a new process finds it."""
    kept = Tables(folder, MACHINE)
    found = kept.array(key(k), *shape, lambda: np.full(shape, -1.0))
    return found if kept.hits else None


def test_tables_come_back_to_the_bit(tmp_path: Path) -> None:
    kept, odd = (
        Tables(tmp_path, MACHINE),
        np.array([[np.inf, -0.0, 5e-324], [0.1 + 0.2, 1e308, -1.0]]),
    )
    kept.array(key(0), 2, 3, lambda: odd)
    kept.array(key(1), 3, 0, lambda: np.zeros((3, 0)))
    kept.keep()
    found = there(tmp_path, 0)
    assert found is not None and found.tobytes() == odd.tobytes()
    assert not found.flags.writeable, "a table is of all who ask"
    assert there(tmp_path, 1, (3, 0)) is not None
    assert there(tmp_path, 0, (3, 2)) is None and there(tmp_path, 2) is None
    assert Tables(tmp_path, "b" * 32).array(key(0), 2, 3, lambda: odd - 1)[1, 2] == -2, (
        "of another machine"
    )


def test_a_file_is_added_for_what_is_new_and_all_are_read(tmp_path: Path) -> None:
    filled(tmp_path)
    kept = Tables(tmp_path, MACHINE)
    for k in (1, 7, 7):
        kept.array(key(k), 2, 3, lambda: np.full((2, 3), 9.0))
    assert (kept.lookups, kept.hits) == (2, 1)
    kept.keep()
    sizes = sorted(p.stat().st_size for p in tmp_path.iterdir())
    assert sizes == [HEAD + n * (ROW.itemsize + 48) for n in (1, 3)]
    assert there(tmp_path, 0) is not None and there(tmp_path, 7) is not None


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "short": lambda b: b[:20],
    "no index": lambda b: b[:HEAD],
    "cut": lambda b: b[:-8],
    "odd": lambda b: b[:-3],
    "count": lambda b: b[:32] + struct.pack("<Q", 2**60) + b[HEAD:],
    "digest": lambda b: b"x" + b[1:],
    "index": lambda b: b[:HEAD] + b"x" + b[HEAD + 1 :],
    "text": lambda b: b"{}" * 200,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_no_file(name: str, tmp_path: Path) -> None:
    path, _ = filled(tmp_path)
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    assert all(there(tmp_path, k) is None for k in range(3))


def test_a_damaged_table_is_no_table_and_the_others_are(tmp_path: Path) -> None:
    path, rows = filled(tmp_path)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    assert there(tmp_path, 2) is None
    for k in (0, 1):
        np.testing.assert_array_equal(there(tmp_path, k), rows[k])


@given(
    at=st.integers(0, 2),
    name=st.sampled_from(["at", "rows", "columns", "check"]),
    value=st.one_of(st.integers(0, 400), st.just(2**32 - 1), st.just(2**63)),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_index_that_lies_leads_nowhere(at: int, name: str, value: int, tmp_path: Path) -> None:
    """Whatever one number of an index says whose digest holds: what is found is the table that was
    kept."""
    for old in tmp_path.iterdir():
        old.unlink()
    path, rows = filled(tmp_path)
    body = path.read_bytes()
    index = np.frombuffer(body, ROW, 3, HEAD).copy()
    index[name][at] = min(value, np.iinfo(index.dtype[name]).max)
    path.write_bytes(
        _digest(index.tobytes()) + body[32:HEAD] + index.tobytes() + body[HEAD + index.nbytes :]
    )
    for k in range(3):
        found = there(tmp_path, k)
        assert found is None or found.tobytes() == rows[k].tobytes()


@pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")
def test_files_of_others_are_not_read(tmp_path: Path) -> None:
    path, _ = filled(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    path.chmod(0o666)
    assert there(path.parent, 0) is None
    path.chmod(0o644)
    assert there(path.parent, 0) is not None


def test_what_cannot_be_written_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Tables(tmp_path / "file" / "below", MACHINE)
    assert kept.array(key(0), 1, 1, lambda: np.ones((1, 1))).item() == 1
    kept.keep()


def test_the_room_for_tables_is_a_part_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those used least recently go; a search's entry stays, and so does what is not the cache's."""
    monkeypatch.setattr(planner.cache.folder, "MOST_TABLES_BYTES", 2500)
    monkeypatch.setattr(planner.cache.reshard_tables, "MOST_NEW_BYTES", 1000)
    known = Cache(tmp_path)
    known.put("0" * 32, {"a": 1})
    (tmp_path / "mine.tables").write_bytes(b"x" * 9000)
    for k in range(4):
        kept = known.tables(f"{k:032x}")
        for n in range(3):
            kept.array(key(n), 10, 6, lambda: np.ones((10, 6)))
        known.keep_tables()
        for age, path in enumerate(sorted(tmp_path.glob(f"{k:032x}-*"))):
            os.utime(path, (time.time() - 100 + k + age,) * 2)
        again = Tables(tmp_path, f"{0:032x}")
        again.array(key(0), 10, 6, lambda: np.ones((10, 6)))
        again.keep()  # the first is in use
    left = sorted(p.name[:32] for p in tmp_path.glob("*-*.tables"))
    assert left == [f"{k:032x}" for k in (0, 3)], "960 bytes and an index each: two have room"
    assert known.get("0" * 32) == {"a": 1} and (tmp_path / "mine.tables").stat().st_size == 9000


def test_the_commands_say_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for layers in (2, 3):
        assert (
            main(
                [
                    f"zoo:gpt-tiny,layers={layers}",
                    "--devices",
                    "2",
                    "--batch",
                    "8",
                    "-o",
                    "p.json",
                    "--force",
                    "--cache",
                    "kept",
                ]
            )
            == 0
        )
    err = capsys.readouterr().err
    assert (
        err.count("from the cache") == 1
        and "tables of moves from the cache kept (--no-cache makes all anew)" in err
    )
    (tmp_path / "kept" / "thesis.txt").write_text("mine")
    assert main(["cache", "--cache", "kept"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (
        rows[0] == ["kept"]
        and rows[2][:4] == ["searches", "and", "readings", "3"]
        and rows[3][:4] == ["tables", "of", "moves", "1"]
    )
    assert main(["cache", "--cache", "kept", "--clear"]) == 0
    assert "removed 4 files (" in capsys.readouterr().err and [
        p.name for p in (tmp_path / "kept").iterdir()
    ] == ["thesis.txt"]
    assert main(["cache", "--cache", "nothing there"]) == 0 and " 0 B" in capsys.readouterr().out
    assert (
        main(["cache"]) == 0
        and "nothing is kept: MESHWRIGHT_CACHE is off" in capsys.readouterr().err
    )
    (tmp_path / "file").write_text("")
    assert main(["cache", "--cache", "file"]) == 2
