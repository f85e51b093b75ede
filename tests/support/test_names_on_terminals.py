"""Names that steer a terminal (colours, bells, titles, other directions of writing, lines that look
like ours) reach none, whoever wrote them: only our own emphasis does."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from onnx import helper as H
from onnx import numpy_helper, save

from planner.cli import main
from planner.support.emphasis import ANSI, emphasised, one_line, printable
from planner.support.text import Style, visible
from tests.reader.reader_models import rand
from tests.report.test_terminal import Screen

EVIL = "\x1b[31mred\x1b[0m\x07\x1b]0;title\x07\nerror[P999]: forged\u202e\x9b2J"
VERBS = [
    ["m.onnx", "--devices", "8", "-o", "s.json", "--force"],
    ["show", "s.json"],
    ["explain", "s.json"],
    ["explain", "s.json", "mm"],
    ["ops", "m.onnx"],
    ["ops", "m.onnx", "--parameters"],
    ["explain", "s.json", "nosuch"],
    ["check", "m.onnx", "--against", "s.json"],
    ["diff", "s.json", "s.json"],
    ["m.onnx", "--devices", "8", "--dim", "q=3"],
    ["zoo:mlp-tiny", "--devices", "8", "--pin", "p.toml", "-o", "p.json", "--force"],
    ["emit", "s.json", "-o", "p.py", "--force"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("evil")
    e, node = EVIL, H.make_node
    nodes = [
        node("MatMul", [f"x{e}", f"w{e}"], [f"m{e}"], name=f"mm{e}"),
        node("Relu", [f"m{e}"], [f"r{e}"], name=f"re{e}"),
        node("MatMul", [f"r{e}", f"v{e}"], [f"y{e}"], name=f"m2{e}"),
    ]
    graph = H.make_graph(
        nodes,
        f"g{e}",
        [H.make_tensor_value_info(f"x{e}", 1, [8, 16])],
        [H.make_tensor_value_info(f"y{e}", 1, None)],
        [numpy_helper.from_array(rand(16, 16), f"{n}{e}") for n in "wv"],
    )
    save(H.make_model(graph, opset_imports=[H.make_opsetid("", 18)]), made / "m.onnx")
    (made / "p.toml").write_text('[mesh]\n"\\u001b[31m\\u0007" = 8\n')
    assert (
        main([str(made / "m.onnx"), "--devices", "8", "-o", str(made / "s.json"), "--quiet"]) == 0
    )
    return made


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("words", VERBS, ids=lambda w: " ".join(w[:3]))
def test_names_steer_no_terminal(
    words: list[str], colour: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (Screen() if colour else io.StringIO() for _ in range(2))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(words)
    for line in (out.getvalue() + err.getvalue().replace("\r\x1b[2K", "")).split("\n"):
        assert "\x1b[31mred" not in line and not line.lstrip().startswith("error[P999]")
        plain = re.sub(r"\x1b\[(0|1|2|31|32|33|31;1)m", "", line) if colour else line
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", plain), ascii(plain)


def test_only_our_own_emphasis_is_left() -> None:
    bold = Style(True).bold("name")
    assert visible(bold) == 4 and printable(bold) == "\x1b[1mname\x1b[0m"
    assert printable("a\x1b[1mb\tc\nd") == "a\\x1b[1mb\tc\nd"
    assert (
        printable(emphasised("2", "\x1b[8mhidden\u2066")) == "\x1b[2m\\x1b[8mhidden\\u2066\x1b[0m"
    )
    assert printable("a · b", "ascii") == "a - b"
    assert (
        one_line("a\nb\r") == "a\\nb\\r" and one_line(bold) == bold and ANSI.sub("", bold) == "name"
    )
