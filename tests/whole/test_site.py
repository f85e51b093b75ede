"""The documentation builds as a site without a warning, and opens without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install 'meshwright[docs]'")
ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|link|img)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    pages = {
        p.relative_to(tmp_path).as_posix(): p.read_text()
        for p in tmp_path.rglob("*.html")
        if p.name != "404.html"
    }
    assert {p.with_suffix(".html").name for p in (ROOT / "docs").glob("*.md")} | {
        "readme.html",
        "results.html",
        "changelog.html",
    } <= pages.keys()
    for name, text in pages.items():
        for target in LOADED.findall(text):
            assert not target.startswith(("http:", "https:", "//")), f"{name} loads {target}"
        for target in re.findall(r"<a\b[^>]*?\bhref=\"([^\"#?]+)", text):
            assert (
                target.startswith(("http", "mailto:"))
                or (tmp_path / name).parent.joinpath(target).exists()
            ), f"{name} leads to {target}"
    assert (
        "$ plan zoo:llama3-8b" in pages["readme.html"]
        and "illustration" not in pages["continuous-integration.html"]
    )
