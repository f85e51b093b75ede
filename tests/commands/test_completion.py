"""Completion scripts: every verb and option is in them, bash runs its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from planner.cli import VERBS, main, options_of


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for verb in VERBS:
        assert verb in text
        for action in options_of(verb):
            for option in action.option_strings:
                spelt = (
                    option
                    if shell != "fish"
                    else f"-l {option[2:]} "
                    if option.startswith("--")
                    else f"-s {option[1:]} "
                )
                assert spelt in text, (verb, option)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("plan exp", {"explain", "export"}),
        ("plan export --t", {"--to"}),
        ("plan model.onnx --dev", {"--devices"}),
        ("plan check --against pl", {"plan.json"}),
        ("plan m.onnx --hardware h1", {"h100-nvl", "h100-pcie", "h100-sxm"}),
        ("plan sweep m.onnx --runtime meg", {"megatron"}),
        ("plan z", {"zoo:"}),
        ("plan zoo:llama3-7", {"llama3-70b"}),
        ("plan compare zoo:dl", {"dlrm-tiny", "dlrm-criteo"}),
    ],
)
def test_bash_completes(
    line: str, wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.bash").write_text(script("bash", capsys))
    (tmp_path / "plan.json").write_text("{}")
    words = line.split()
    asked = (
        f"source ./c.bash; COMP_LINE={line!r}; COMP_POINT={len(line)};"
        f" COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _plan; printf '%s\\n'"
        ' "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == wanted and not found.stderr


def test_an_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err
