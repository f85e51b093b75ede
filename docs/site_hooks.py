"""Hooks of the documentation site (mkdocs.yml): README, changelog and results, which live outside
docs/, become pages of it, and links to them lead there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> its page."""
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, the raw outputs and quotations that pages link to, and the
    examples."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for room, kind in (
        ("benchmarks/results", "*.*"),
        ("examples", "*.py"),
        ("benchmarks", "peers.toml"),
    ):
        for path in sorted((ROOT / room).glob(kind)):
            files.append(
                File.generated(
                    config,
                    path.relative_to(ROOT).as_posix().removeprefix("benchmarks/"),
                    abs_src_path=str(path),
                )
            )
    return files


def on_post_page(output: str, **_: Any) -> str:
    """The theme's switch of colours looks up two style sheets of highlightjs, which is left out,
    and fails without them."""
    return output.replace("</head>", '<link id="hljs-light"><link id="hljs-dark">\n    </head>', 1)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository lead to their pages here; those to other files of it keep
    the name alone."""
    here = next(
        (source for source, name in PAGES.items() if name == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )

    def moved(link: re.Match[str]) -> str:
        path = (ROOT / here).parent.joinpath(link[1]).resolve().relative_to(ROOT).as_posix()
        name = PAGES.get(path) or (
            path.removeprefix("docs/")
            if path.startswith("docs/")
            else path.removeprefix("benchmarks/")
        )
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{name}{link[2] or ''})"

    # A comment that marks a block for the tests would hide the fence after it from the renderer.
    return LINK.sub(moved, markdown).replace("<!-- illustration -->\n", "\n")
