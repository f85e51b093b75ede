"""A short run of the fuzzer and of the hostile files' benchmark, and that both can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fuzz, hostile
from tests.reader.reader_models import model, rand


def test_mutated_models_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--inputs", "300", "--seed", "11", "--no-cases", "--plan-every", "20"]) == 0
    out = capsys.readouterr().out
    assert "0 faults" in out and " read\n" in out and "then planned" in out and "P1" in out


def test_an_input_follows_from_its_seed_and_number() -> None:
    groups = fuzz.sound_models(False, None)
    assert fuzz.make(groups, 5, 7)[:2] == fuzz.make(groups, 5, 7)[:2] != fuzz.make(groups, 5, 8)[:2]


def test_silence_and_tracebacks_are_faults() -> None:
    quiet = subprocess.Popen(
        [sys.executable, "-c", "print('one')\nwhile True: pass"],
        stdout=subprocess.PIPE,
        bufsize=0,
        env={"PYTHONUNBUFFERED": "1"},
    )
    with quiet:
        assert list(fuzz._lines(quiet, [0.5])) == ["one", None]
        quiet.kill()
    workers = fuzz.Workers(type("Args", (), {"inputs": 3})())  # type: ignore[arg-type]
    for index, outcome in enumerate(
        ("P102", "traceback: KeyError at x.py:1: 'y'", "hang: no answer in 10 s")
    ):
        workers._add(index, outcome, 0.1)
    assert dict(workers.counts) == {"P102": 1, "traceback": 1, "hang": 1} and [
        i for i, _ in workers.faults
    ] == [1, 2]


def outcome(code: int | None, text: str = "", peak: int = 1) -> hostile.Outcome:
    return hostile.Outcome(code, text, 1.0, 1.0, peak)


def test_hostile_judgement() -> None:
    assert hostile.judge(outcome(0, "fine")) == ("plan", "")
    assert hostile.judge(outcome(2, "error[P112]: nodes form a cycle")) == ("P112", "")
    for bad in (
        outcome(None),
        outcome(1, "Traceback (most recent call last):\n  x"),
        outcome(-9),
        outcome(0, "", 3 << 30),
        outcome(2, "error[P000]: internal"),
        outcome(2, "error[P1]: a\nerror[P2]: b"),
        outcome(2),
        outcome(1, "error[P112]: x"),
    ):
        assert hostile.judge(bad)[1] or hostile.judge(bad)[0] == "hang", bad
    rows = {
        "PLAN OK: x": "plan",
        "OK: fold": "plan",
        "clear error: cycle": "refuse",
        "clear error (spec) or assume 1": "either",
        "OK or clear error; y": "either",
        "": "either",
    }
    assert {k: hostile.expected({"expect": k}) for k in rows} == rows


def test_hostile_files_are_held_to_their_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.onnx").write_bytes(
        model(
            "(float[8,4] x) => (float[8,3] y) { y = MatMul(x, w) }", w=rand(4, 3)
        ).SerializeToString()
    )
    (tmp_path / "bad.onnx").write_bytes(b"\x08")
    expectations = {
        "good.onnx": {"expect": "OK", "kind": "valid"},
        "bad.onnx": {"expect": "clear error", "kind": "file"},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(expectations))
    assert hostile.main(["--dir", str(tmp_path), "--no-run"]) == 0
    assert "2 of 2 files as expected" in capsys.readouterr().out
    expectations["good.onnx"]["expect"] = "clear error"
    (tmp_path / "manifest.json").write_text(json.dumps(expectations))
    assert hostile.main(["--dir", str(tmp_path), "--no-run", "--only", "good"]) == 1
    assert "FAILED expected refuse" in capsys.readouterr().out
    assert hostile.main(["--dir", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_memory_of_a_command_is_not_that_of_who_started_it(tmp_path: Path) -> None:
    """Started from a process that has held much, a small command is small, and a large one
    large."""
    much = bytearray(b"x" * (400 << 20))
    small, large = (
        hostile.run(
            [
                sys.executable,
                "-c",
                f"import time; x = bytearray(b'x' * ({n} << 20)); time.sleep(0.2)",
            ],
            tmp_path,
            20,
            {},
        )
        for n in (1, 900)
    )
    assert small.peak_bytes < len(much) / 2 and large.peak_bytes > 900 << 20


@pytest.mark.parametrize(
    "text", ["x = eval('1')", "import os\nos.system('true')", "x = inf", "x = (", "x = 1\n\0"]
)
def test_programs_that_do_what_they_should_not_are_caught(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emitted(
        command: list[str], cwd: Path, limit_s: float, environment: dict[str, str]
    ) -> hostile.Outcome:
        (cwd / "program.py").write_text(text)
        return outcome(0)

    monkeypatch.setattr(hostile, "run", emitted)
    assert hostile.check_program(tmp_path, tmp_path, execute=False)[1]
