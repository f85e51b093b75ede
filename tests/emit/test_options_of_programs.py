"""What training programs refuse on their command line, before they compile anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.emit.runtime.files import settings
from planner.emit.runtime.files.frame import at_least
from planner.emit.runtime.files.main_train import TRAINING_OPTIONS, refuse_no_folder
from planner.emit.runtime.files.watch import WATCH_OPTIONS


@pytest.mark.parametrize(
    ("option", "least"),
    [("--save-every", 1), ("--keep", 1), ("--eval-every", 0), ("--eval-batches", 1)],
)
def test_counts_have_a_least(option: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No checkpoint would be kept, or none ever saved."""
    parser = argparse.ArgumentParser()
    for name, how in (*TRAINING_OPTIONS, *WATCH_OPTIONS):
        parser.add_argument(name, **how)  # type: ignore[arg-type]
    assert vars(parser.parse_args([option, str(least)]))
    with pytest.raises(SystemExit):
        parser.parse_args([option, str(least - 1)])
    assert f"argument {option}: {least - 1} is below {least}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="invalid literal"):
        at_least(1)("many")


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_learning_rate_is_a_number(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LEARNING_RATE", 1e-3, raising=False)
    with pytest.raises(SystemExit, match="--lr .*: a finite number of at least 0 is wanted"):
        settings.set_constants(SimpleNamespace(steps=3, lr=rate))


def test_files_that_could_not_be_written_are_refused_at_the_start(tmp_path: Path) -> None:
    refuse_no_folder(None, tmp_path / "a.jsonl")
    with pytest.raises(SystemExit, match="there is no folder .*none"):
        refuse_no_folder(tmp_path / "a.jsonl", tmp_path / "none" / "b.safetensors")
