"""What a terminal shows: every view of every command that prints one, at 80 and 120 columns, with
colour and without, beside its golden text.

Commands run as in a terminal, on the strategy files of tests/golden; where one would search or
compile, what it finds is given. The golden texts are rewritten by MESHWRIGHT_UPDATE_GOLDEN=1 pytest
tests/report/test_terminal.py; read the difference before committing it. Prices move one view only:
`explain_node_priced`.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner.api
import planner.commands.common as common
import planner.commands.explain as explain
import planner.verify.worker
import planner.whatif.gate
from planner.cli import main
from planner.errors import NO_PLAN, PlanError
from planner.report.sweep import Asked, sweep_text
from planner.strategy.strategy import Strategy
from planner.support.emphasis import printable
from planner.verify.report import FLOPS, TRAFFIC, Figure, Numbers, VerifyReport
from planner.whatif.gate import Limit, Report
from planner.whatif.gate import Row as CheckRow
from planner.whatif.sweep_rows import run_of
from tests.report.test_report import with_findings
from tests.whatif.test_sweep import GIB, refused, row

GOLDEN = Path(__file__).parents[1].joinpath("golden")
GPT, STAGED = str(GOLDEN / "gpt.plan.json"), str(GOLDEN / "staged.plan.json")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Screen(io.StringIO):
    """A terminal, as far as a program can see."""

    def isatty(self) -> bool:
        return True


def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three solvers: one proves its plan, one does not, one finds none."""
    gpt = Strategy.load(GPT)
    none = PlanError(
        "P021", "no plan fits: 91.3 GiB a device in the smallest plan priced", exit_code=NO_PLAN
    )
    found: dict[str, Strategy | PlanError] = {
        "dp": gpt,
        "recursive": with_findings(gpt),
        "ilp": none,
    }

    def plan(*_: object, solver: str, **__: object) -> Strategy:
        made = found[solver]
        if isinstance(made, PlanError):
            raise made
        return made

    monkeypatch.setattr(planner.api, "plan", plan)


def checked(monkeypatch: pytest.MonkeyPatch, grown: float) -> None:
    """A model that grew (or not), under a budget."""
    figures = (
        ("step", "s", 3.06e-3, 0.02),
        ("memory", "B", 634_912_768, 0.05),
        ("compute", "s", 1.69e-3, None),
        ("exposed communication", "s", 1.02e-3, None),
        ("payload", "B", 186_777_600, None),
        ("FLOPs per device", "FLOP", 338_228_674_560, None),
    )
    rows = tuple(
        CheckRow(what, unit, was, was * grown, was * (1 + 0.9 * (grown - 1)), tolerance)
        for what, unit, was, tolerance in figures
    )
    causes = ("the model changed: +104 nodes, +12,345,678 parameters",) if grown != 1 else ()
    limits = (Limit("step time", "s", 3.06e-3 * grown, 4e-3), Limit("devices", "", 8, 8))
    monkeypatch.setattr(
        planner.whatif.gate,
        "check",
        lambda *_, **__: Report("model.onnx", "model.plan.json", rows, causes, limits, {}),
    )


def verified(monkeypatch: pytest.MonkeyPatch, bad: bool) -> None:
    """Figures that are equal, near, apart and not judged, with what is behind a difference."""
    figures = (
        Figure("all-gather over data+model", 402_688, 402_688, of=TRAFFIC),
        Figure("all-reduce over data", 114_688, 98_304 if bad else 114_688, of=TRAFFIC),
        Figure(
            "all collectives",
            1_180_036,
            1_163_652,
            tolerance=0.001 if bad else 0.02,
            off=16_384,
            of=TRAFFIC,
        ),
        Figure(
            "dot FLOPs",
            24_903_680,
            25_073_025 if bad else 24_903_680,
            "FLOPs",
            of=FLOPS,
            by="/up +169,345 FLOPs by the compiler (rematerialization)" if bad else "",
        ),
        Figure("temporaries", None, 766_160, judged=False, note="CPU, not representative"),
        Figure(
            "peak",
            1_674_396,
            1_442_456,
            judged=False,
            note="planned for the target in its precision; CPU, not representative",
        ),
    )
    numbers = Numbers(
        "full size",
        158_016,
        0.0,
        2e-3 if bad else 7.7e-7,
        "model.layers.0.self_attn.v_proj.weight",
        1e-4,
    )
    why = (
        (
            (
                "all-reduce over data -16,384 B by cse -16,384 B; predicted and not there:"
                " float32[64] of model.layers.0.input_layernorm.weight"
            ),
        )
        if bad
        else ()
    )
    notes = ("batch 4 instead of 64: the unsharded model takes 41 GiB at full size",)
    how = "from shapes, repeated blocks as loops, float32"
    report = VerifyReport(
        "model.onnx",
        "shard_map",
        {"data": 4, "model": 2},
        "train",
        how,
        figures,
        numbers,
        notes=notes,
        differences=why,
    )
    monkeypatch.setattr(planner.verify.worker, "verify", lambda *_, **__: report)


def swept(width: int, colour: bool) -> str:
    """Hardware and devices with what a run costs; a dimension; a point that fits nowhere."""
    some = Strategy.load(GPT)
    rows = [
        row(some, "h100-sxm", 64, 2.0, 60 * GIB),
        row(some, "h100-sxm", 128, 1.1, 70 * GIB, fit="tight"),
        refused("tpu-v5e", 64),
        row(some, "tpu-v5e", 256, 2.0, 14 * GIB),
    ]
    found = [run_of(r, 2e12, {}) if r.strategy else None for r in rows]
    seqs = [
        row(some, "h100-sxm", 64, s, int(m * GIB), batch=b, dims=(("seq", q),))
        for q, b, s, m in ((8192, 256, 1.0, 40), (16384, 128, 1.3, 50))
    ]
    return "\n\n".join(
        [
            sweep_text("zoo:gpt-tiny", rows, found, Asked(2e12, 30 * 86400.0), width, colour),
            sweep_text("zoo:gpt-tiny", seqs, [None, None], Asked(), width, colour),
            sweep_text("gpt.onnx", [rows[0]], [None], Asked(), width, colour),
        ]
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both plans. odd.json: every finding and technique. alone.json: its model is not
    there."""
    gpt, folder = Strategy.load(GPT), tmp_path_factory.mktemp("plans")
    plans = {
        "gpt": gpt,
        "staged": Strategy.load(STAGED),
        "odd": with_findings(gpt),
        "alone": replace(
            gpt,
            model={**gpt.model, "name": "gone.onnx"},
            provenance={**gpt.provenance, "source": "gone.onnx"},
        ),
    }
    for name, s in plans.items():
        s.save(folder / f"{name}.json")
    return folder


Given = Callable[[pytest.MonkeyPatch], None]
VIEWS: dict[str, tuple[tuple[str, ...], Given | None]] = {
    "summary": (("show", "gpt.json"), None),
    "summary_odd": (("show", "odd.json"), None),
    "summary_staged": (("show", "staged.json"), None),
    "explain": (("explain", GPT), None),
    "explain_staged": (("explain", STAGED), None),
    "explain_node": (("explain", "alone.json", "mlp.c_fc"), None),
    "explain_node_priced": (("explain", STAGED, "h.5/mlp/c_fc/MatMul"), None),
    "minimal_pins": (("explain", STAGED, "--minimal-pins"), None),
    "untied": (("explain", STAGED, "--untied"), None),
    "diff": (("diff", GPT, "odd.json"), None),
    "diff_staged": (("diff", GPT, STAGED), None),
    "compare": (("compare", "zoo:gpt-tiny", "--devices", "8"), compared),
    "check": (("check", "model.onnx", "--against", GPT), functools.partial(checked, grown=1.0)),
    "check_grown": (
        ("check", "model.onnx", "--against", GPT),
        functools.partial(checked, grown=1.318),
    ),
    "hardware": (("hardware",), None),
    "hardware_device": (("hardware", "h100"), None),
    "hardware_machine": (("hardware", "aws-p5"), None),
    "verify": (("verify", STAGED), functools.partial(verified, bad=False)),
    "verify_bad": (("verify", STAGED), functools.partial(verified, bad=True)),
}
"""Name -> what is typed, and what is given to the command."""


@pytest.fixture(scope="module")
def once() -> Any:
    """Prices a strategy once for all widths."""
    return functools.cache(lambda path, source: _priced(Strategy.load(path), source))


_priced = common.priced


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("view", [*VIEWS, "sweep"])
def test_golden(
    view: str, width: int, files: Path, once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, colour = (
        shown(view, width, coloured, files, once, monkeypatch) for coloured in (False, True)
    )
    assert ANSI.sub("", colour) == plain and "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= width
    for text, kind in ((plain, "plain"), (colour, "colour")):
        path = GOLDEN / "terminal" / f"{view}_{width}_{kind}.txt"
        if os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), (
            f"{path.name}: MESHWRIGHT_UPDATE_GOLDEN=1 pytest tests/report/test_terminal.py"
            " rewrites it"
        )


def shown(
    view: str, width: int, colour: bool, files: Path, once: Any, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Everything that is printed, in its order."""
    if view == "sweep":
        return printable(swept(width, colour)) + "\n"
    typed, given = VIEWS[view]
    with monkeypatch.context() as m:
        m.chdir(files)
        m.setenv("COLUMNS", str(width))
        m.setenv("TERM", "xterm")
        m.setenv("NO_COLOR", "" if colour else "1")
        for module in (common, explain):
            m.setattr(
                module,
                "priced",
                lambda _, source: (
                    once(STAGED, source)
                    if source.startswith("zoo:gpt2-medium")
                    else _priced(_, source)
                ),
            )
        if given:
            given(m)
        screen = Screen()
        m.setattr("sys.stdout", screen)
        m.setattr(
            "planner.support.console.Live._tick", lambda _: None
        )  # the line that comes and goes
        m.setattr("sys.stderr", screen)
        main([*typed])
    return screen.getvalue().replace("\r\x1b[2K", "")


def test_no_golden_text_is_left_over() -> None:
    kept = {
        f"{view}_{width}_{kind}.txt"
        for view in (*VIEWS, "sweep")
        for width in (80, 120)
        for kind in ("plain", "colour")
    }
    assert {path.name for path in (GOLDEN / "terminal").iterdir()} == kept
