"""A folder stands for the one model in it, wherever a model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.support.model_folder import model_file

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a model's repository, from whose parent commands run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Tiny-1.5B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "README.md").write_text("a model")
    return folder


def test_plans_of_a_folder_are_called_like_it_and_found_again(
    cloned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's name has a dot in it, and other folders hold a config.json, too."""
    assert main(["Tiny-1.5B", "--devices", "2", "--hardware", "cpu"]) == 0
    assert "wrote Tiny-1.5B.plan.json" in capsys.readouterr().err
    assert main(["Tiny-1.5B/", "--devices", "2", "--hardware", "cpu", "--quiet"]) == 0
    assert main(["explain", "Tiny-1.5B.plan.json", "lm_head", "--price"]) == 0
    assert main(["ops", "Tiny-1.5B"]) == 0
    by_file = planner.plan("Tiny-1.5B/config.json", devices=2, hardware="cpu", baselines=False)
    assert planner.plan("Tiny-1.5B", devices=2, hardware="cpu", baselines=False) == by_file


def test_a_folder_with_several_models_or_none_is_refused(cloned: Path) -> None:
    (cloned / "model.onnx").write_bytes(b"")
    with pytest.raises(PlanError, match="is a folder with 2 models") as e:
        model_file("Tiny-1.5B")
    assert e.value.code == "P101"
    assert e.value.help == ("give one of them: Tiny-1.5B/config.json, Tiny-1.5B/model.onnx",)
    (cloned / "config.json").unlink()
    assert model_file("Tiny-1.5B") == "Tiny-1.5B/model.onnx"
    (cloned / "model.onnx").unlink()
    with pytest.raises(PlanError, match="is a folder without a model"):
        model_file("Tiny-1.5B")
