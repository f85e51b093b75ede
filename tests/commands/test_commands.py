"""What the page and the terminal say to type: a command that makes the same plan again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import choose_verb, main, parser
from planner.pins.pins import parse_pins
from planner.report.commands import onward, reproduce, short_pins
from planner.strategy.pins import pins_of
from planner.strategy.strategy import Strategy

TINY = "zoo:gpt-tiny,hidden=256"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--hardware a100-80gb --batch 32",
        "--workload infer",
        "--precision fp32 --optimizer sgd --lr 0.5",
        "--pin dp=4,tp=2,micro=2,zero=1,recompute=block",
        "--freeze *wte* --freeze *wpe* --shift-labels --ignore-index -100",
        pytest.param("--objective memory", marks=pytest.mark.slow),
        "--mode data-parallel",
        "--runtime megatron --pin tp=2,pp=1",
        "--topology gcp-a3-mega --batch 64",
        "--pin offload=optimizer",
        "--pin dp=4 --pin zero=1",
    ],
)
def test_the_command_makes_the_same_plan(options: str) -> None:
    assert main([TINY, "--devices", "8", *options.split(), "--quiet", "-o", "a.json"]) == 0
    one = Strategy.load("a.json")
    command = shlex.split(reproduce(one))
    assert command[0] == "plan" and main([*command[1:], "--quiet", "-o", "b.json"]) == 0
    two = Strategy.load("b.json")
    assert (two.decisions(), two.workload, two.topology, two.costs) == (
        one.decisions(),
        one.workload,
        one.topology,
        one.costs,
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{} --devices 8 --devices 16", "--devices is given twice, 8 and 16"),
        ("{} --devices 8 --hardware=", "--hardware is empty"),
        ("{} --devices 8 --memory-limit 0GiB", "--memory-limit 0 B leaves a plan no memory"),
        ("{} --devices 8 --memory-reserve 90GiB", "--memory-reserve 90.0 GiB leaves a plan no"),
        ("{} --batch=8 --devices 8 --batch 16", "--batch is given twice, 8 and 16"),
        ("{} --devices 8 --dim seq=8 --dim seq=16", "--dim seq is given twice, 8 and 16"),
        ("{} --devices 8 --shape a=1,2 --shape a=1,3", "--shape a is given twice"),
        ("{} --devices 8 --pin tp=2 --pin tp=4", "tensor is pinned twice"),
        ("{} --devices 8 --pin tp=2 --pin annotated", "another --pin is beside it"),
        ("{} --mode manual --pin a.json --pin b.json", "takes one strategy"),
        ("sweep {} --devices 8 --devices 16", "or --devices 8,16"),
        ("sweep {} --devices 8 --tokens 1T --price 2,3", "--price is given twice, 2 and 3"),
        (
            "check {} --against a.json --tolerance step=1%,step=2%",
            "--tolerance step is given twice, 1% and 2%",
        ),
    ],
)
def test_options_that_say_two_things_or_nothing_are_refused(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(TINY).split()) == 2
    assert says in capsys.readouterr().err and not list(Path().iterdir())


def test_an_option_may_say_the_same_twice_and_pins_are_joined() -> None:
    line = [TINY, "--devices", "8", "--devices", "8", "--quiet", "-o"]
    assert main([*line, "a.json", "--pin", "tp=2", "--pin", "micro=2"]) == 0
    assert main([*line, "b.json", "--pin", "tp=2,micro=2"]) == 0
    one, two = Strategy.load("a.json"), Strategy.load("b.json")
    assert dict(one.mesh_shape)["tensor"] == 2 and one.techniques["microbatches"] == 2
    assert one.decisions() == two.decisions() and reproduce(one) == reproduce(two)


def test_defaults_are_left_out_and_sizes_of_a_file_are_said() -> None:
    import models_zoo

    Path("my model.onnx").write_bytes(models_zoo.build("llama-tiny").SerializeToString())
    assert main(["my model.onnx", "--devices", "2", "--batch", "4", "--quiet", "-o", "a.json"]) == 0
    assert reproduce(Strategy.load("a.json")) == "plan 'my model.onnx' --devices 2 --batch 4"


def test_a_machine_of_ones_own_is_a_file() -> None:
    Path("t.toml").write_text(
        'device = "h100-sxm"\n[[level]]\nname = "nvlink"\nsize = 4\nbandwidth = "400 GB/s"\nlatency'
        ' = "2 us"\n'
    )
    s = planner.plan(TINY, topology="t.toml", batch=8, baselines=False)
    assert reproduce(s).startswith(f"plan {TINY} --topology TOPOLOGY.toml --devices 4 --batch 8")


@pytest.mark.parametrize(
    ("table", "short"),
    [
        (
            {"mesh": {"model": {"size": [4]}}, "techniques": {"zero_stage": 3, "schedule": "1f1b"}},
            "tensor=4,zero_stage=3,schedule=1f1b",
        ),
        ({"mesh": {"model": {"size": [2, 4]}}}, "PINS.toml"),
        ({"forbid": {"factors": ["k"]}}, "PINS.toml"),
    ],
)
def test_pins_are_short_where_a_line_holds_them(table: dict[str, Any], short: str) -> None:
    from planner.pins.pins import from_table

    pins = from_table(table)
    assert short_pins(pins) == short and (short == "PINS.toml" or parse_pins(short) == pins)


def test_what_follows_a_plan_parses() -> None:
    for workload, verbs in (("train", ["emit", "verify", "launch"]), ("infer", ["emit", "verify"])):
        s = planner.plan(TINY, devices=2, batch=2, workload=workload, baselines=False)
        assert pins_of(s).empty
        found = []
        for _, command in onward(s, "a plan.json"):
            verb, rest = choose_verb(shlex.split(command)[1:])
            assert parser(verb).read(rest).strategy == "a plan.json"
            found.append(verb)
        assert found == verbs


def test_what_is_left_of_an_interrupted_command_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import planner.commands.hardware as verb

    for left, said in (((), "nothing was written"), (("two rows",), "two rows")):

        def interrupted(args: Any, left: tuple[str, ...] = left) -> int:
            raise KeyboardInterrupt(*left)

        monkeypatch.setattr(verb, "hardware", interrupted)
        assert main(["hardware"]) == 130
        assert capsys.readouterr().err == f"\ninterrupted: {said}\n"


def test_a_dash_is_stdout_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--devices", "8", "--pin", "dp=8", "--quiet", "-o", "a.json"]) == 0
    left = sorted(Path().iterdir())
    capsys.readouterr()
    assert main(["export", "a.json", "--to", "megatron", "-o", "-"]) == 0
    assert "tensor_model_parallel_size" in capsys.readouterr().out
    assert main([TINY, "--devices", "8", "-o", "-"]) == 2
    assert "--json prints the strategy" in capsys.readouterr().err
    assert main(["show", "a.json", "--trace", "-"]) == 2
    assert "P056" in capsys.readouterr().err and sorted(Path().iterdir()) == left
