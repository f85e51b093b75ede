"""A model by its name on the hub: its config.json where the hub's tools keep it, else what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from planner.cli import main
from planner.support.hub_cache import cached_config, hub_folder, is_hub_name

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of downloads; what is written goes beside it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def download(hub: Path, name: str, commit: str, *, main: bool = False, **fields: int) -> Path:
    """A config.json as the hub's tools lay it: a link to its bytes."""
    folder = hub / ("models--" + name.replace("/", "--"))
    blob, config = folder / "blobs" / f"{commit}b", folder / "snapshots" / commit / "config.json"
    blob.parent.mkdir(parents=True, exist_ok=True)
    config.parent.mkdir(parents=True)
    blob.write_text(json.dumps(CONFIG | fields))
    config.symlink_to(os.path.relpath(blob, config.parent))
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    return config


def test_a_downloaded_model_is_planned_by_its_name(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    download(hub, "someone/Tiny-1.1B", NEW, main=True)
    assert main(["someone/Tiny-1.1B", "--devices", "2", "--batch", "4"]) == 0
    out, err = capsys.readouterr()
    assert "2 x h100-sxm" in out and "wrote Tiny-1.1B.plan.json" in err
    assert main(["check", "someone/Tiny-1.1B", "--against", "Tiny-1.1B.plan.json"]) == 0
    assert main(["emit", "Tiny-1.1B.plan.json", "-o", "program.py"]) == 0
    assert main(["ops", "someone/Tiny-1.1B,seq=32"]) == 0


def test_the_branch_main_is_read_else_the_newest_download(hub: Path) -> None:
    assert cached_config("a/b") == ""
    old = download(hub, "a/b", OLD)
    new = download(hub, "a/b", NEW)
    os.utime(old, (1, 1))
    assert cached_config("a/b") == str(new)
    refs = hub / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text(OLD)
    assert cached_config("a/b") == str(old)
    (refs / "main").write_text("../../../elsewhere")
    assert cached_config("a/b") == str(new)


def test_a_model_that_is_not_here_is_answered_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["meta-llama/Llama-3.1-8B", "--devices", "8"]) == 2
    error = capsys.readouterr().err
    assert "error[P101]: there is no file 'meta-llama/Llama-3.1-8B'" in error
    assert "zoo:llama3.1-8b" in error and "hf download meta-llama/Llama-3.1-8B config.json" in error
    assert main(["Llama-3.1-8B", "--devices", "8"]) == 2
    assert "zoo:llama3.1-8b" in capsys.readouterr().err
    assert main(["llama-3-8b", "--devices", "8"]) == 2
    assert "did you mean 'zoo:llama3-8b'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("folder/model.onnx", False),
        ("folder/config.json", False),
        ("../b", False),
        ("a/b/c", False),
        ("a", False),
        ("a/..", False),
        ("here/b", False),
    ],
)
def test_what_reads_as_a_name_of_the_hub(text: str, expected: bool) -> None:
    Path("here").mkdir()
    assert is_hub_name(text) is expected


def test_where_downloads_are() -> None:
    assert hub_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert hub_folder({"HF_HOME": "/h"}) == Path("/h/hub")
    assert hub_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert hub_folder({}) == Path.home() / ".cache" / "huggingface" / "hub"
