"""The pages docs/adding-*.md are enough: what each shows is done, to the letter and nothing else,
to a copy of the project, and then the commands at its end work.

A page holds, in order, under a line that names a file:

    `path`, a new file:         the block below it is that file
    `path`, lines to change:       a diff, its parts divided by `@@`

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
PAGES = [p for p in sorted((ROOT / "docs").glob("adding-*.md")) if "```sh" in p.read_text()]
COPIED = ("planner", "costmodels", "models_zoo", "tests", "pyproject.toml")
EDIT = re.compile(
    r"^`(?P<path>[\w./-]+)`, (?P<how>a new file|lines to change):\n\n(?:<!-- illustration -->\n)?"
    r"```\w+\n(?P<text>.*?)^```$",
    re.M | re.S,
)
TYPED = re.compile(r"^```sh\n(?P<text>.*?)^```$", re.M | re.S)


def changed(text: str, diff: str) -> str:
    """A file under a diff whose parts are divided by `@@`: what a part takes away or leaves must
    stand in the file, together and once."""
    for part in diff.rstrip("\n").split("\n@@\n"):
        lines = part.split("\n")
        old = [line[1:] for line in lines if not line.startswith("+")]
        new = [line[1:] for line in lines if not line.startswith("-")]
        within = text.split("\n")
        n = len(old)
        at = [i for i in range(len(within) - n + 1) if within[i : i + n] == old]
        assert len(at) == 1, f"stands {len(at)} times in the file: {old}"
        text = "\n".join([*within[: at[0]], *new, *within[at[0] + n :]])
    return text


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
            path.write_text(changed(path.read_text(), edit["text"]))
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


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            p, marks=[pytest.mark.slow] * (p.stem in ("adding-a-cost-term", "adding-a-technique"))
        )
        for p in PAGES
    ],
    ids=lambda p: p.stem,
)
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
    assert changed("a\nb\nc\n", " b\n+x\n c\n") == "a\nb\nx\nc\n"
    assert changed("a\nb\nc\n", "-a\n+x\n@@\n-c\n+z\n") == "x\nb\nz\n"
    with pytest.raises(AssertionError):
        changed("a\na\n", " a\n+x\n")
