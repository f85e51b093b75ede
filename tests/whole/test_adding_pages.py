"""The pages docs/adding-*.md are enough: what each shows is done, to the letter and nothing else,
to a copy of the project, and then the commands at its end work.

A page holds, in order, under a line that names a file:

    `path`, a new file:         the block below it is that file
    `path`, lines to add:       a diff: lines with `+` are added behind the lines before them

Blocks of kind `sh` are what is typed afterwards, in a folder beside the copy; a line `# prints TEXT`
below a command says what must be in its output.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("adding-*.md"))
COPIED = ("planner", "costmodels", "models_zoo", "tests", "pyproject.toml")
EDIT = re.compile(
    r"^`(?P<path>[\w./-]+)`, (?P<how>a new file|lines to add):\n\n(?:<!-- illustration -->\n)?"
    r"```\w+\n(?P<text>.*?)^```$",
    re.M | re.S,
)
TYPED = re.compile(r"^```sh\n(?P<text>.*?)^```$", re.M | re.S)


def add(text: str, diff: str) -> str:
    """A file with a diff's lines added. The lines without a sign must stand in it, once."""
    lines = text.split("\n")
    context: list[str] = []
    new: list[str] = []

    def place() -> None:
        n = len(context)
        found = [i + n for i in range(len(lines) - n + 1) if lines[i : i + n] == context]
        assert len(found) == 1, f"stands {len(found)} times in the file: {context}"
        lines[found[0] : found[0]] = new

    for line in diff.rstrip("\n").split("\n"):
        if line.startswith("+"):
            new.append(line[1:])
            continue
        if new:
            place()
            context, new = [], []
        context.append(line[1:] if line.startswith(" ") else line)
    if new:
        place()
    return "\n".join(lines)


def follow(page: Path, copy: Path) -> int:
    """Do what a page shows; how many files it touched."""
    touched = set()
    for edit in EDIT.finditer(page.read_text()):
        path = copy / edit["path"]
        touched.add(path)
        if edit["how"] == "a new file":
            assert not path.exists(), f"{path} is there already"
            path.write_text(edit["text"])
        else:
            path.write_text(add(path.read_text(), edit["text"]))
    return len(touched)


def typed(page: Path) -> list[tuple[str, list[str]]]:
    """(command, what it prints among others) of a page."""
    out: list[tuple[str, list[str]]] = []
    for block in TYPED.finditer(page.read_text()):
        for line in block["text"].splitlines():
            if line.startswith("# prints "):
                out[-1][1].append(line.removeprefix("# prints "))
            elif line.strip():
                out.append((line, []))
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_a_page_shows_is_enough(page: Path, tmp_path: Path) -> None:
    copy, folder = tmp_path / "copy", tmp_path / "folder"
    folder.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "graphs", "golden", "compiled")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=skip)
        else:
            shutil.copy(ROOT / name, copy / name)
    assert follow(page, copy) > 0 and typed(page)
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "MESHWRIGHT_CACHE": str(tmp_path / "kept"),
    }
    for command, wanted in typed(page):
        first, *words = shlex.split(command)
        program = {
            "plan": [sys.executable, "-m", "planner.cli"],
            "python": [sys.executable],
            "pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        }[first]
        place = copy if first == "pytest" else folder
        done = subprocess.run(
            [*program, *words], cwd=place, env=environment, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{said[-3000:]}"
        for text in wanted:
            assert text in said, f"{command}: {text!r} is not in\n{said[-3000:]}"


def test_a_diff_is_put_where_its_lines_stand() -> None:
    assert add("a\nb\nc\n", " b\n+x\n c\n") == "a\nb\nx\nc\n"
    with pytest.raises(AssertionError):
        add("a\na\n", " a\n+x\n")
