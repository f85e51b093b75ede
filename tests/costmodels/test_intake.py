"""Whatever a user's file is (a pipe, a socket, a device, a folder, endless, nested, with a key
twice), no command waits for it, and none fails but by a coded error."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from costmodels.hardware.intake import opened, parse_json, read_bytes, read_toml
from planner.cache.folder import Cache
from planner.cli import main
from planner.strategy.strategy import Strategy
from planner.support.atomic_write import replacing

KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": lambda p: os.mkfifo(p),
    "folder": lambda p: p.mkdir(),
    "device": lambda p: p.symlink_to("/dev/zero"),
    "nothing": lambda p: None,
    "link to itself": lambda p: p.symlink_to(p),
    "not text": lambda p: p.write_bytes(b"\xff\xfe\x00[]"),
    "nested": lambda p: p.write_text('{"a":' * 50_000),
    "deep": lambda p: p.write_text("x=" + "{a=" * 5_000),
    "no numbers": lambda p: p.write_text('{"format_version": "1.0", "a": NaN}'),
}
ASKED = {
    "a model": ["FILE", "--devices", "2"],
    "a strategy": ["show", "FILE"],
    "a strategy to explain": ["explain", "FILE"],
    "two strategies": ["diff", "FILE", "FILE"],
    "a baseline": ["check", "zoo:mlp-tiny", "--against", "FILE"],
    "pins": ["zoo:mlp-tiny", "--devices", "2", "--pin", "FILE"],
    "a machine": ["zoo:mlp-tiny", "--topology", "FILE"],
    "a device": ["zoo:mlp-tiny", "--devices", "2", "--hardware", "FILE"],
    "a device to show": ["hardware", "FILE"],
    "a configuration": ["import", "FILE", "--model", "zoo:mlp-tiny", "--devices", "2"],
    "a problem": ["solve", "FILE"],
    "a program": ["launch", "FILE", "--local", "2"],
    "a manual plan": ["zoo:mlp-tiny", "--mode", "manual", "--pin", "FILE"],
    "a config.json": ["FILE/config.json", "--devices", "2"],
    "weights": ["weights", "zoo:mlp-tiny", "--from", "FILE", "-o", "w.safetensors"],
}


@pytest.fixture(autouse=True)
def _no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What waits for ever fails."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("the command waits")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED)
def test_no_kind_of_file_makes_a_command_wait_or_break(
    kind: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](tmp_path / "given.onnx")
    code = main([w.replace("FILE", "given.onnx") for w in ASKED[asked]])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error[") and "P000" not in err, err


def test_a_socket_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("a.onnx")
        assert main(["a.onnx", "--devices", "2"]) == 2
    assert "it is a socket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("P056", ["-o", "OUT"]),
        ("P056", ["--emit", "OUT.py"]),
        ("P053", ["--emit", "OUT"]),  # the name of a folder
        ("P056", ["-o", "OUT", "--force"]),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_replaced(
    kind: str, code: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / words[1]
    KINDS[kind](target)
    before = target.stat().st_mode
    assert main(["zoo:mlp-tiny", "--devices", "2", *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert target.stat().st_mode == before
    with pytest.raises(OSError, match="it is a"), replacing(target):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [words[1]]


def test_pipes_in_the_cache_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "zoo:mlp-tiny",
        "--devices",
        "2",
        "--quiet",
        "--json",
        "--cache",
        str(tmp_path / "cache"),
    ]
    assert main(words) == 0
    first = capsys.readouterr().out
    files = list((tmp_path / "cache").iterdir())
    assert files
    for file in files:
        file.unlink()
        os.mkfifo(file)
    assert main(words) == 0
    assert (
        capsys.readouterr().out.partition('"provenance"')[0] == first.partition('"provenance"')[0]
    )
    assert Cache(tmp_path / "cache").get(files[0].stem) is None


def test_a_file_that_grows_or_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as f:
        f.truncate(1 << 40)  # a hole of a terabyte
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_bytes(tmp_path / "a", 1000)
    (tmp_path / "b").write_bytes(b"12345")
    assert read_bytes(tmp_path / "b", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(tmp_path / "b", 4)
    with opened("/proc/self/status") as f:  # a file of size 0 that has content
        assert f.read(4) == b"Name"


def test_a_gzip_bomb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.solvers.iopddl.MOST_BYTES", 1 << 20)
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    assert main(["solve", "p.json.gz"]) == 2
    assert "it holds more than 1,048,576 bytes" in capsys.readouterr().err


def test_json_and_toml_are_read_strictly(tmp_path: Path) -> None:
    for text, said in (
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        ('[{"b": {"c": 1, "d": 1, "c": 1}}]', "'c'"),
        ("[NaN]", "NaN is no number"),
        ("[" * 99_999, "nested"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_json(text)
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    (tmp_path / "a.toml").write_text("x=" + "{a=" * 5000)
    with pytest.raises(ValueError, match="nested"):
        read_toml(tmp_path / "a.toml")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plan") / "s.json"
    assert (
        main(["zoo:llama-tiny", "--devices", "8", "--batch", "16", "-o", str(file), "--quiet"]) == 0
    )
    return file.read_text()


def tampered(text: str, place: str, value: Any) -> str:
    """The file with another value at a place such as workload.shapes."""
    data = json.loads(text)
    *way, last = place.split(".")
    at = data
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    at[last] = value
    return json.dumps(data)


PLACES = {
    "workload.shapes": "x",
    "workload.training.optimizer": ["adamw"],
    "workload.training": "sgd",
    "workload.training.lr": "fast",
    "topology.hardware": 7,
    "mesh.0.size": 10**30,
    "topology.devices": 10**12,
    "techniques.virtual": "two",
    "techniques.cuts": 3,
    "workload.dims": {"s": 0.5},
    "solver.bound_s": "none",
    "cost.host_memory_bytes": "x",
    "blocks.0.per_stage": "x",
    "provenance.search_s": "\x1b[31m",
    "provenance.read_s": float("inf"),
    "techniques.offload": ["x"],
    "tensors.x": [],
    "model.nodes": -(10**40),
    "workload.kind": "guess",
    "baselines.replicated.fit": "perhaps",
}
VERBS = [
    ["show", "FILE"],
    ["show", "FILE", "--trace", "t.json"],
    ["show", "FILE", "--html", "t.html"],
    ["explain", "FILE"],
    ["emit", "FILE", "-o", "p.py"],
    ["check", "zoo:llama-tiny", "--against", "FILE"],
    ["diff", "FILE", "FILE"],
    ["launch", "FILE", "--local", "2"],
    ["annotate", "FILE", "-o", "o.onnx"],
]


@pytest.mark.parametrize("place", PLACES)
def test_a_strategy_with_a_wrong_value_is_refused_by_all_verbs(
    place: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.json").write_text(tampered(text, place, PLACES[place]))
    for words in VERBS:
        assert main([w.replace("FILE", "s.json") for w in words]) == 2, words
        err = capsys.readouterr().err
        assert err.startswith(("error[P057]", "error[P054]")), (words, err)


@pytest.mark.parametrize("words", VERBS, ids=lambda w: " ".join(w[:3:2]))
def test_a_key_that_stands_twice_is_refused(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.json").write_text(text.rstrip().removesuffix("}") + ', "mesh": []}')
    assert main([w.replace("FILE", "s.json") for w in words]) == 2
    assert "the key 'mesh' stands there twice" in capsys.readouterr().err


def test_a_strategy_of_an_earlier_version_may_lack_what_was_added_since(
    text: str, tmp_path: Path
) -> None:
    from planner.commands import files

    data = json.loads(text)
    del (
        data["assumptions"],
        data["provenance"],
        data["details"],
        data["workload"]["shapes"],
        data["techniques"]["copies"],
    )
    (tmp_path / "s.json").write_text(json.dumps(data))
    assert files.load(tmp_path / "s.json") == Strategy.load(tmp_path / "s.json")


LONG = "a" * 300
REFUSED = [
    ["zoo:mlp-tiny", "--devices", "2", "-o", f"{LONG}.json"],
    [f"{LONG}.onnx", "--devices", "2"],
    ["zoo:mlp-tiny", "--devices", "2", "--cache", LONG],
    ["zoo:mlp-tiny", "--devices", "2", "--emit", f"{LONG}.py"],
    ["show", LONG],
    ["zoo:mlp-tiny", "--devices", "2", "--pin", LONG],
]


@pytest.mark.parametrize("words", REFUSED, ids=lambda w: " ".join(w)[:40])
def test_a_name_that_the_system_refuses_is_no_mistake_of_the_planner(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHWRIGHT_DEBUG")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        ("error[P006]", "error[P001]", "error[P054]", "error[P020]", "error[P101]")
    ), err


def test_a_full_disk_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "s.json").write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "MESHWRIGHT_DEBUG"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli", "show", "s.json"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
    assert (
        done.returncode == 2
        and done.stderr.startswith(
            "error[P006]: a file or stream cannot be used: No space left on device"
        )
        and "Exception" not in done.stderr
    )
