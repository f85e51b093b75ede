"""Every figure in README and docs has a source: the paragraph, or what leads into its list or
table, names a file of the repository in which the figure stands.

A figure is a number with a unit of measurement (or an error such as 3.1e-6) in prose, a list or a
table. Named is a file by a link, with a section where the link has one, or by its path in
backticks; in a Python file the figure may be a constant (512 MiB is 512 * 2**20). Figures of
sessions are printed anew by tests/whole/test_docs.py; pages that a command writes are compared
whole by the tests that MADE names. What stands in benchmarks/RESULTS.md stands under the command
that printed it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {
    "operators.md": "tests/ops/test_operator_page.py",
    "techniques.md": "tests/whole/test_techniques.py",
}
"""Page that a command wrote -> the test that holds it."""
TABLES = {"scaling.md": "tests/solvers/test_scaling.py"}
"""Page whose tables a command wrote -> the test that holds them: a source of the prose around
them."""
PAGES = [
    p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if p.name not in MADE
]
FENCE = re.compile(r"^(?:<!-- illustration -->\n)?```.*?^```$", re.M | re.S)
SCALE = {
    "%": 0.01,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "seconds": 1.0,
    "CPU-seconds": 1.0,
    "minutes": 60.0,
    "W": 1.0,
    "x": 1.0,
    "": 1.0,
}
SCALE |= {
    f"{k}{b}": float(n**i) for i, k in enumerate("kMGTP", 1) for b, n in (("B", 1000), ("iB", 1024))
} | {"KiB": 1024.0}
FIGURE = re.compile(
    r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?:"
    r" ?(%|[um]?s\b|CPU-seconds|seconds|minutes|[kMGTP]i?B\b|KiB|W\b)|(x)\b)"
    r"|(?<![\w.,-])(?<!Python )(?<!MindSpore )(\d+\.\d+|\d(?:\.\d+)?e-\d+)(?![\w.]|\.\d)"
)
NAMED = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)|`([\w./-]+\.(?:py|toml|txt|json|jsonl|md))`")


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, paragraph or item or row, what leads into it) of everything that is not fenced."""
    text = FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)
    lead, own, start = "", "", 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        item = re.match(r"\s*(?:[-*] |\d+\. |\|)", line)
        if own and (not line.strip() or item):
            yield start, own, lead
            if not re.match(r"\s*(?:[-*] |\d+\. |\|)", own):
                lead = own
            own = ""
        if line.strip():
            start, own = (number, line) if not own else (start, f"{own}\n{line}")


def figures(block: str) -> list[tuple[str, str]]:
    """(number, unit) of every figure; what stands in backticks is an option or a value, not a
    figure."""
    return [
        (m[1] or m[4], m[2] or m[3] or "")
        for m in FIGURE.finditer(re.sub(r"`[^`]*`|\]\([^)]*\)", "", block))
    ]


def sources(page: Path, block: str) -> Iterator[str]:
    """Texts of the files that a block names, and of tables in its page that a test holds."""
    if page.name in TABLES and not block.startswith("|"):
        yield "\n".join(line for line in page.read_text().splitlines() if line.startswith("|"))
    for link, section, path in NAMED.findall(block):
        file = page.parent / link if link else ROOT / path
        if (
            not link.startswith(("http:", "https:"))
            and file.is_file()
            and file.resolve().parent != ROOT / "docs"
        ):  # another page is no source
            yield part(file, section[1:]) if section else file.read_text()


def part(file: Path, anchor: str) -> str:
    """A section of a page, by the anchor of its heading."""
    pieces = re.split(r"^(#+ .*)$", file.read_text(), flags=re.M)
    return "".join(
        text
        for head, text in zip(pieces[1::2], pieces[2::2], strict=True)
        if slug(head.lstrip("# ")) == anchor
    )


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-")


@cache
def constants(source: str) -> frozenset[float]:
    """Numbers of a Python file, products and powers of numbers included; none of another file."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.Constant) and all(
            isinstance(x, ast.BinOp | ast.operator | ast.Constant) for x in ast.walk(node)
        ):
            value = (
                eval(compile(ast.Expression(node), "", "eval"))
                if isinstance(node, ast.BinOp) and "'" not in ast.unparse(node)
                else getattr(node, "value", None)
            )
            if isinstance(value, int | float):
                found.add(float(value))
    return frozenset(found)


def stands(number: str, unit: str, source: str) -> bool:
    """Whether a source has a figure, in letters or as a constant."""
    near = rf"(?<![\d.,]){re.escape(number)}(?![\d.]*\d)"
    between = rf"(?: ?to [\d.,]+| and [\d.,]+|, [\d.,]+)* ?{re.escape(unit)}" if unit else ""
    if re.search(near + between, re.sub(r"\n[\s#]*", " ", source.replace("**", ""))):
        return True  # a figure may stand at the end of a line, its unit on the next
    value = float(number.replace(",", "")) * SCALE[unit]
    return any(abs(value - c) <= 1e-9 * value for c in constants(source)) or (
        unit in ("s", "CPU-seconds", "") and rounded(number, source)
    )


def rounded(number: str, source: str) -> bool:
    """Whether a cell of a printed table, whose head has the unit, is the number to as many
    digits."""
    digits = len(number.partition(".")[2])
    return any(
        f"{float(cell):.{digits}f}" == number
        for cell in re.findall(r"(?<= )\d+\.\d+(?=\s)", source)
        if len(cell.partition(".")[2]) >= max(digits, 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_figure_stands_in_a_source_that_is_named_beside_it(page: Path) -> None:
    own = [
        b for b in blocks(page.read_text()) if page.name not in TABLES or not b[1].startswith("|")
    ]
    lost = [
        f"{page.name}:{line}: {number} {unit}"
        for line, block, lead in own
        for number, unit in figures(block)
        if not any(
            stands(number, unit, text) for text in (*sources(page, block), *sources(page, lead))
        )
    ]
    assert not lost, "no file named beside it has:\n" + "\n".join(lost)


def test_what_a_section_of_the_results_says_was_printed_by_a_command_it_names() -> None:
    pieces = re.split(r"^## (.*)$", (ROOT / "benchmarks" / "RESULTS.md").read_text(), flags=re.M)
    bare = [
        head
        for head, text in zip(pieces[1::2], pieces[2::2], strict=True)
        if not re.search(r"`(?:python -m|python examples|plan |pytest )", head + text)
    ]
    assert not bare and all((ROOT / test).is_file() for test in (MADE | TABLES).values())


def test_figures_are_found_and_looked_up() -> None:
    assert figures(
        "took 3.5 s, 12 % of 1,024 MiB; `9 s` and [x](a-7 s.md); 8 x 4 devices, error 1.2e-06"
    ) == [("3.5", "s"), ("12", "%"), ("1,024", "MiB"), ("1.2e-06", "")]
    assert (
        stands("512", "MiB", "ROOM = 512 * 2**20\n")
        and not stands("511", "MiB", "ROOM = 512 * 2**20\n")
        and stands("4", "%", "SHARE = 0.04")
    )
    assert (
        stands("8", "%", "by 8 to 12 %")
        and not stands("8", "%", "by 18 %")
        and not stands("8", "%", "by 8.5 %")
    )
    assert stands("15.0", "s", "gpt 96    15.0464     25.16\n") and not stands(
        "15.1", "s", "gpt 96    15.0464     25.16\n"
    )
    assert [b for _, b, _ in blocks("a\nb\n\n- c\n- d\n\n```\n1 s\n```\n")] == [
        "a\nb",
        "- c",
        "- d",
    ]
