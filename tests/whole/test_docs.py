"""README and docs tell the truth: what they show as a terminal session is run and compared, their
Python runs, their links lead somewhere.

A fenced block whose first line starts with "$ " is a session: every "$ " line is a command (plan,
cat, sed and head only), followed by what it prints. A page's sessions and Python blocks run in
order in one folder, which holds model.onnx, a small Llama. A block after the line `<!--
illustration -->` is shown, not run. What a machine's clock, rounding or CPU compiler decides is not
compared: seconds of searches, dates, digits of rounding errors and where they are largest, and what
the CPU compiler takes for temporaries. MESHWRIGHT_UPDATE_GOLDEN=1 rewrites the sessions with what
was printed.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "docs" / "skills" / "meshwright" / "SKILL.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), SKILL]
BLOCK = re.compile(
    r"^(?P<mark><!-- illustration -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
PRINTED_ELSEWHERE = {
    "jax-notes.md"
}  # tests/verify/test_hlo_recipes.py runs them with eight devices
READERS = ("cat", "sed", "head")


def sessions_of(page: Path) -> list[re.Match]:
    return [
        m for m in BLOCK.finditer(page.read_text()) if m["text"].startswith("$ ") and not m["mark"]
    ]


def python_of(page: Path) -> list[str]:
    return [
        m["text"]
        for m in BLOCK.finditer(page.read_text())
        if m["kind"] == "python" and not m["mark"] and page.name not in PRINTED_ELSEWHERE
    ]


def masked(text: str) -> str:
    """Without what differs from run to run, or from one kind of CPU to another."""
    text = re.sub(
        r"\n {8,}(?=\w)", " ", text
    )  # where a line is broken follows the length of what is masked below
    text = re.sub(r"plans? priced, [\d.]+ m?s", "plans priced, - s", text)
    text = re.sub(r"\b\d\.\de[+-]\d\d\b", "small", text)
    text = re.sub(r"\(worst:\s+[^)]*\)", "(worst: one)", text)
    text = re.sub(
        r"^( *(?:temporaries|peak)\b.*?) +[\d,]+ B(?= +(?:CPU|planned))",
        r"\1 - B",
        text,
        flags=re.M,
    )
    return re.sub(r"\d{4}-\d\d-\d\d", "date", text).rstrip()


def commands_of(session: str) -> list[tuple[str, str]]:
    """(command, what it prints)"""
    parts = re.split(r"^\$ ", session, flags=re.M)[1:]
    return [(line, rest) for line, _, rest in (p.partition("\n") for p in parts)]


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "plan" or words[0] in READERS, (
        f"sessions run plan and {READERS}, not {words[0]!r}"
    )
    program = [sys.executable, "-m", "planner.cli"] if words[0] == "plan" else [words[0]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    environment.pop("COLUMNS", None)
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout[-2000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    import onnx

    import models_zoo

    onnx.save(models_zoo.build("zoo:llama-tiny"), tmp_path / "model.onnx")
    return tmp_path


LONG = ("tuning.md", "tutorial.md", "experts.md", "modes.md", "continuous-integration.md")
"""Pages whose sessions take ten seconds to half a minute each, in `make slow`; on every change the
same commands are typed in README's walk (tests/whole/test_docs_walk.py) and in
tests/interop/test_tune.py, tests/whatif/test_check.py, tests/whatif/test_gate.py,
tests/commands/test_cli.py and tests/ops/test_expert_capacity.py."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in LONG))
        for p in PAGES
        if sessions_of(p)
    ],
)
def test_sessions_print_what_the_page_shows(page, folder):
    text, update = page.read_text(), bool(os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"))
    for block in sessions_of(page):
        found = [(command, run(command, folder)) for command, _ in commands_of(block["text"])]
        if update:
            new = "".join(f"$ {command}\n{printed}" for command, printed in found)
            text = text.replace(block["text"], new)
            continue
        for (command, shown), (_, printed) in zip(commands_of(block["text"]), found, strict=True):
            assert masked(printed) == masked(shown), f"{page.name}: $ {command}"
    if update:
        page.write_text(text)


@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=lambda p: p.name)
def test_python_of_a_page_runs(page, folder):
    script = folder / "page.py"
    script.write_text("\n\n".join(python_of(page)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    made = set(re.findall(r"^`([^`]+)`, a new file:$", text, re.M))  # by who follows the page
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for named in re.findall(
        r"`((?:docs|planner|costmodels|models_zoo|benchmarks|tests|examples)/[\w./-]+\.\w+)`", text
    ):
        exists = "NAME" in named or named in made or (ROOT / named).exists()
        assert exists, f"{page.name} names {named}"


def test_every_page_is_in_the_index():
    """docs/index.md leads to every other page."""
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [
        p.name
        for p in (ROOT / "docs").glob("*.md")
        if p.name != "index.md" and f"]({p.name})" not in index
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_that_are_named_exist_with_their_options(page):
    """In listings and in prose: the verb is one, and every option is one of its own. What follows
    two spaces says what a command of a listing is for."""
    from planner.cli import choose_verb, parser

    text = page.read_text()
    listed = [
        line
        for m in BLOCK.finditer(text)
        for line in m["text"].splitlines()
        if re.match(r"plan [a-z./-]", line)
    ]
    for command in (*listed, *re.findall(r"`(plan [a-z./-][^`\n]*)`", BLOCK.sub("", text))):
        words = shlex.split(re.split(r"\s{2,}|\s#| · | > |\(", command)[0])[1:]
        verb, rest = choose_verb(words)
        options = {name for action in parser(verb)._actions for name in action.option_strings}
        ours = rest[: rest.index("--")] if "--" in rest else rest
        assert not [w for w in ours if w.startswith("-") and w.partition("=")[0] not in options], (
            f"{page.name}: {command}"
        )


def test_the_skill_is_found_by_its_name():
    """Its head: the name of its folder, and a description short enough to be read beforehand."""
    import yaml

    _, head, body = SKILL.read_text().split("---\n", 2)
    found = yaml.safe_load(head)
    assert found.keys() == {"name", "description"} and found["name"] == SKILL.parent.name
    assert len(found["description"]) <= 1024 and len(body.splitlines()) < 500


def test_files_that_pages_show_are_read(tmp_path):
    """A device, a machine and pins, as written in the pages: the planner takes them."""
    from planner.api import plan
    from planner.machine.topology import device
    from planner.machine.topology_file import from_file

    shown = {
        name: [
            m["text"]
            for m in BLOCK.finditer((ROOT / "docs" / name).read_text())
            if m["kind"] == "toml"
        ]
        for name in ("hardware.md", "modes.md")
    }
    chip, machine, mixed = (tmp_path / f"{name}.toml" for name in ("chip", "machine", "mixed"))
    for path, text in zip((chip, machine, mixed), shown["hardware.md"], strict=True):
        path.write_text(text)
    assert (
        device(str(chip)).memory_bytes == device("h100-sxm").memory_bytes
        and from_file(machine).devices == 64
    )
    assert [(d.name, n) for d, n in from_file(mixed).groups] == [("h100-sxm", 8), ("a100-80gb", 8)]
    for text, mode, devices in zip(
        shown["modes.md"], ("semi-auto", "propagate", "semi-auto"), (8, 8, 64), strict=True
    ):
        path = tmp_path / "pins.toml"
        path.write_text(text if "[mesh]" in text else f"[mesh]\ndata = 2\nmodel = 4\n\n{text}")
        found = plan(
            "zoo:llama-tiny,heads=8,kv_heads=4",
            devices=devices,
            batch=64,
            mode=mode,
            pins=str(path),
            baselines=False,
        )
        assert dict(found.mesh_shape)["data"] in (2, 8)
