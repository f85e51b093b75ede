"""The gate over our own estimates (`benchmarks.baselines`, a step of `make test`) fails when an
estimate moves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import baselines


def test_a_moved_estimate_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "resnet-tiny"
    path = tmp_path / "baselines" / f"{name}.plan.json"
    path.parent.mkdir()
    shutil.copy(baselines.FOLDER / path.name, path)
    monkeypatch.setattr(baselines, "FOLDER", path.parent)
    monkeypatch.setattr(baselines, "CASES", {name: baselines.CASES[name]})
    monkeypatch.setattr("sys.argv", ["baselines"])
    assert baselines.main() == 0
    recorded = json.loads(path.read_text())
    recorded["cost"]["step_time_s"] *= 0.9
    path.write_text(json.dumps(recorded))
    assert baselines.main() == 1
    assert f"FAILED  {name}" in capsys.readouterr().err


def test_update_writes_what_the_gate_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(baselines, "FOLDER", tmp_path / "baselines")
    monkeypatch.setattr(baselines, "CASES", {"mlp": ("zoo:mlp-tiny", {"devices": 2})})
    for arguments in (["baselines", "--update"], ["baselines"]):
        monkeypatch.setattr("sys.argv", arguments)
        assert baselines.main() == 0
    assert (tmp_path / "baselines" / "mlp.plan.json").exists()


def test_every_baseline_has_a_case() -> None:
    assert {p.name for p in baselines.FOLDER.iterdir()} == {
        f"{name}.plan.json" for name in baselines.CASES
    }
