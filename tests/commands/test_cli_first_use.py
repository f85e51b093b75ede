"""What users met in their first hour: refusals come before the work, options that are pins are said
to be, and nothing stale is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import models_zoo
import planner.api
from planner.cli import main, parser
from planner.commands.options.other_names import OTHER_NAMES
from planner.errors import PlanError
from planner.support.console import Live
from planner.whatif.reprice import manual

TINY = "zoo:llama-tiny"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "models"
MACHINE = (
    'device = "h100-sxm"\n[[level]]\nname = "nvlink"\nsize = 4\nbandwidth = "450 GB/s"\nlatency ='
    ' "2 us"\n'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("searched before refusing")

    monkeypatch.setattr(planner.api, "plan", fail)


def small(spec: str, path: str) -> str:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(models_zoo.build(spec).SerializeToString())
    return path


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def test_a_program_over_other_text_is_refused_before_the_search(
    no_search: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("print('mine')\n")
    assert "error[P053]" in error(capsys, TINY, "--devices", "2", "--emit", "mine.py")
    assert "error[P056]" in error(capsys, TINY, "--devices", "2", "--emit", "none/mine.py")
    assert Path("mine.py").read_text() == "print('mine')\n" and not list(Path().glob("*.json"))


def test_a_strategy_of_another_file_of_the_same_name_is_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = small("mlp-tiny", "a/m.onnx"), small("mlp-tiny,hidden=32", "b/m.onnx")
    for source in (
        one,
        small("mlp-tiny,layers=4", one),
    ):  # edited since: still the plan of this file
        assert main([source, "--devices", "2", "--batch", "8", "--quiet", "-o", "s.json"]) == 0
    before = Path("s.json").read_text()
    monkeypatch.setattr(
        planner.api, "plan", lambda *_, **__: pytest.fail("searched before refusing")
    )
    assert "error[P053]" in error(capsys, two, "--devices", "2", "--batch", "8", "-o", "s.json")
    assert Path("s.json").read_text() == before


def test_a_manual_plan_is_shown_beside_baselines_of_its_own() -> None:
    made = planner.api.plan(TINY, devices=2)
    stale = replace(
        made, baselines={k: {**row, "step_time_s": 1.0} for k, row in made.baselines.items()}
    )
    again = manual(stale, TINY)
    assert again.baselines.keys() == made.baselines.keys()
    assert {k: r["step_time_s"] for k, r in again.baselines.items()} == pytest.approx(
        {k: r["step_time_s"] for k, r in made.baselines.items()}, rel=1e-5
    )


@pytest.mark.parametrize(
    ("option", "pin"),
    [
        ("--zero=3", "--pin zero=3"),
        ("--tp", "--pin tp=VALUE"),
        ("--microbatches=4", "--pin microbatches=4"),
        ("--zero-stage", "--pin zero_stage=VALUE"),
    ],
)
def test_options_that_are_pins_are_said_to_be(
    option: str, pin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error(capsys, TINY, "--devices", "8", option)
    assert "error[P002]" in said and pin in said and "--version" not in said


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        (("--gpus", "8"), "--devices N"),
        (("-n", "8"), "--devices N"),
        (("--num_nodes=2",), "--devices N"),
        (("--devices", "8", "--dtype", "bf16"), "--precision bf16-mixed"),
        (("--devices", "8", "--seq-len", "128"), "zoo:NAME,seq=N"),
        (("--devices", "8", "--global-batch-size", "8"), "--batch N"),
        (("--devices", "8", "--gradient-accumulation-steps", "8"), "--pin micro=N"),
        (("--devices", "8", "--inference"), "--workload infer"),
        (("--devices", "8", "--zero", "3"), "--pin zero=3"),
        (("--devices", "8xh100"), "--hardware 8xh100"),
        (("--hardware", "h100:8"), "--hardware 8xh100"),
        (("--hardware", "h100x8"), "--hardware 8xh100"),
    ],
)
def test_what_other_tools_call_an_option_is_answered_with_how_it_is_typed(
    options: tuple[str, ...], typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{typed}" in error(capsys, TINY, *options)


def test_what_other_names_are_told_to_type_exists() -> None:
    options = parser("make")._option_string_actions
    for typed in OTHER_NAMES.values():
        for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", typed):
            assert word in options, typed


def test_semi_auto_needs_pins(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error[P059]" in error(capsys, TINY, "--devices", "8", "--mode", "semi-auto")
    planner.api.plan(TINY, devices=8, mode="semi-auto", pins="tp=2", baselines=False)


def test_operators_are_listed_without_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    source = SHARED / "torch_bert_base_dynamo.onnx"
    if not source.exists():
        pytest.skip("the exported models are not here")
    assert main(["ops", str(source)]) == 0
    out, err = capsys.readouterr()
    assert "MatMul" in out and "note: seq taken as 128 (--dim seq=N)" in err
    assert (
        main(["ops", str(source), "--dim", "seq=64"]) == 0 and "note" not in capsys.readouterr().err
    )
    with pytest.raises(PlanError, match="P140"):
        planner.api.plan(source, devices=2)


def test_hardware_describes_a_topology_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.toml").write_text(MACHINE)
    assert main(["hardware", "t.toml"]) == 0
    out = capsys.readouterr().out
    assert "h100-sxm" in out and "nvlink x 4" in out and "450 GB/s" in out
    Path("t.toml").write_text(MACHINE.replace("450 GB/s", "450"))
    assert "t.toml" in error(capsys, "hardware", "t.toml")


def test_the_live_line_says_what_takes_so_long() -> None:
    assert Live(False, "compiling the program").line().startswith("compiling the program 0 s")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["llama3-8b,layers=2", "--devices", "8"], "did you mean 'zoo:llama3-8b'?"),
        (["gpt2", "--devices", "8"], "did you mean 'zoo:gpt2-small'?"),
        (["explan", "s.json"], "did you mean 'explain'?"),
        (["modle.onnx", "--devices", "2"], "did you mean 'model.onnx'?"),
        (["explain", "in/planned.jsn"], "no folder 'in'"),
        (["show", "other.json"], "cannot read strategy"),
        (["show", "planed.json"], "did you mean 'planned.json'?"),
        (["mine.onnx.bak", "--devices", "2"], "zoo:NAME"),
        (["zoo:mlp-tiny", "--devices", "2", "--precision", "bf16"], "did you mean 'bf16-mixed'?"),
        (["zoo:mlp-tiny", "--devices", "2", "--hardware", "h100-sx"], "did you mean 'h100-sxm'?"),
        (
            ["zoo:llama-tiny", "--devices", "2", "--freeze", "*embd*"],
            "did you mean '*.embed_tokens.weight'?",
        ),
        (["zoo:mlp-tiny", "--device", "2"], "did you mean '--devices'?"),
    ],
)
def test_names_that_are_nearly_right_get_a_suggestion(
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.onnx", "modle.txt", "planned.json"):
        Path(name).touch()
    assert said in error(capsys, *argv)


@pytest.mark.slow
def test_the_bound_rises_while_the_search_goes_on() -> None:
    from planner.search.build_request import make_request
    from planner.search.search import Search
    from planner.workload.model import Model, Workload

    told: list[tuple[float, float]] = []
    request = make_request(devices=8, hardware=None, topology=None, baselines=False)
    found = Search(
        Model.open("zoo:gpt-tiny,hidden=1024,seq=256", Workload(batch=64), 8),
        request,
        lambda _, best, bound: told.append((best or 0.0, bound or 0.0)),
    ).run()
    bounds = [bound for _, bound in told if bound]
    assert found.best is not None and bounds[0] < bounds[-1] <= found.best.cost.step_time_s
    assert all(0 <= bound <= best for best, bound in told) and [best for best, _ in told] == sorted(
        (best for best, _ in told), reverse=True
    )
    assert told[-1][0] == pytest.approx(found.best.cost.step_time_s, rel=1e-9)


def test_what_is_wrong_with_what_was_typed_comes_before_the_file_that_is_in_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("s.json").write_text("{}")
    Path("mine.py").write_text("mine\n")
    there = ("--devices", "2", "-o", "s.json", "--emit", "mine.py")
    for code, words in {
        "P071": ("zoo:llama-tiny,seqlen=4",),
        "P010": (TINY, "--hardware", "none"),
        "P018": (TINY, "--solver", "none"),
        "P020": (TINY, "--pin", "none=2"),
        "P141": (small("llama-tiny", "m.onnx"), "--dim", "none=2"),
        "P101": ("none.onnx",),
        "P053": (TINY,),
    }.items():
        assert f"error[{code}]" in error(capsys, *words, *there), code
    assert Path("s.json").read_text() == "{}" and Path("mine.py").read_text() == "mine\n"


@pytest.mark.slow
def test_plans_of_two_sizes_of_a_model_have_names_of_their_own() -> None:
    for spec in (TINY, f"{TINY},layers=3,seq=32"):
        assert main([spec, "--devices", "2", "--batch", "2", "--quiet"]) == 0
    assert {p.name for p in Path().glob("*.json")} == {
        "llama-tiny.plan.json",
        "llama-tiny-layers3-seq32.plan.json",
    }
    assert (
        main(["emit", "llama-tiny-layers3-seq32.plan.json"]) == 0
        and Path("llama_tiny_layers3_seq32.py").is_file()
    )


def test_a_plan_says_that_it_is_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--devices", "2", "--batch", "2", "--quiet", "-o", "s.json"]) == 0
    for command in (("emit",), ("explain", "mlp"), ("verify",)):
        verb, *rest = command
        said = error(capsys, verb, "s.json", *rest, "--model", "zoo:mlp-tiny")
        assert (
            "error[P051]: zoo:mlp-tiny is another model: this strategy was made for"
            " 'zoo:llama-tiny'" in said
        )
    plan = planner.Strategy.load("s.json")
    replace(plan, workload={**plan.workload, "dims": {"tokens": 4}}).save("s.json")
    said = error(
        capsys, "emit", "s.json", "--model", "zoo:mlp-tiny"
    )  # a dim that the other has not
    assert "error[P051]: zoo:mlp-tiny is another model" in said and "'tokens'" in said
    assert "error[P070]" in error(capsys, "emit", "s.json", "--model", "zoo:none-of-these")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("train.py", "a Python program"),
        ("model.PT", "a PyTorch checkpoint"),
        ("w.safetensors", "a file of weights"),
        ("m.onnx", ""),
    ],
)
def test_files_of_other_kinds_are_called_what_they_are(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(b"import torch\nmodel = 3\n")
    said = error(capsys, name, "--devices", "2")
    assert (
        "error[P102]" in said
        and ("export the model to ONNX" in said) == bool(says)
        and says in said
    )
    Path(name).write_bytes(b"")
    assert ("export the model to ONNX" in error(capsys, name, "--devices", "2")) == bool(says)


def test_only_a_like_name_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.onnx").write_bytes(b"")
    assert "did you mean" not in error(capsys, "nofile.onnx", "--devices", "2")
    assert "did you mean 'empty.onnx'?" in error(capsys, "emty.onnx", "--devices", "2")


def test_a_renamed_model_is_known_by_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    small("mlp-tiny,layers=4", "model2.onnx"), small("mlp-tiny", "model.onnx")
    assert main(["model.onnx", "--devices", "2", "--batch", "8", "--quiet", "-o", "s.json"]) == 0
    Path("model.onnx").rename("renamed.onnx")
    said = error(capsys, "check", "model.onnx", "--against", "s.json")
    assert (
        "error[P101]" in said
        and "'renamed.onnx' holds the model that s.json was made for" in said
        and "help: plan check renamed.onnx --against s.json" in said
    )
    assert (
        "error[P058]" in (said := error(capsys, "emit", "s.json"))
        and "--model renamed.onnx" in said
    )
    Path("renamed.onnx").unlink()
    assert "did you mean 'model2.onnx'?" in error(
        capsys, "check", "model.onnx", "--against", "s.json"
    )
    assert "holds the same" not in error(capsys, "emit", "s.json")


@pytest.mark.parametrize("pages", [1, 1 << 40])
def test_a_program_too_large_for_this_host_is_verified_not_run(
    pages: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([TINY, "--devices", "2", "--batch", "2", "--quiet", "-o", "s.json"]) == 0
    monkeypatch.setattr("os.sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else 4096)
    assert main(["emit", "s.json"]) == 0
    said = capsys.readouterr().err
    assert (
        ("next: plan verify s.json (a smaller copy: all devices together hold " in said)
        == (pages == 1)
        != ("next: python llama_tiny.py" in said)
    )


def test_show_ends_with_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "--devices", "2", "--batch", "2", "-o", "s.json"]) == 0
    made = capsys.readouterr()
    assert main(["show", "s.json"]) == 0
    again = capsys.readouterr()
    assert (
        again.out == made.out
        and again.err == "next: plan explain s.json · plan emit s.json\n"
        and again.err.strip() in made.err
    )


def test_an_unknown_device_comes_with_the_ten_lines_that_describe_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = error(capsys, TINY, "--devices", "2", "--hardware", "zx81")
    lines = [line.strip() for line in said.partition("(docs/hardware.md):\n")[2].splitlines()]
    assert "error[P010]" in said and len(lines) == 10
    Path("mine.toml").write_text("\n".join(lines))
    assert (
        main(
            [
                "zoo:mlp-tiny",
                "--devices",
                "16",
                "--batch",
                "16",
                "--hardware",
                "mine.toml",
                "--quiet",
            ]
        )
        == 0
    )
    near = error(capsys, TINY, "--devices", "2", "--hardware", "h100-smx")
    assert (
        "did you mean 'h100-sxm'?" in near
        and "mine.toml (docs/hardware.md)" in near
        and "node_size" not in near
    )


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("l4", "l4"),
        ("L40S", "l40s"),
        ("a10", "a10"),
        ("rtx-4090", "rtx4090"),
        ("h20", "h20"),
        ("gh200", "gh200"),
        ("gb300", "gb300-nvl72"),
        ("mi325x", "mi325x"),
        ("mi355x", "mi355x"),
        ("trn2", "trainium2"),
        ("h800", "h800-sxm"),
        ("A6000", "rtx-a6000"),
        ("3090", "rtx3090"),
        ("t4", "t4"),
        ("mi250x", "mi250x"),
        ("p4d.24xlarge", "a100-40gb"),
        ("a3-megagpu-8g", "h100-sxm"),
    ],
)
def test_devices_that_people_have_ship(name: str, device: str) -> None:
    assert (
        planner.plan("zoo:mlp-tiny", devices=8, hardware=name, batch=8, baselines=False).topology[
            "device"
        ]
        == device
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["zoo:llama-tiny", "--devices", "2", "--for", "deepspeed"],
        ["zoo:llama-tiny", "--devices", "2", "--confirm", "gpu:zzz"],
        ["zoo:llama-tiny", "--devices", "2", "--optimizer", "prodigy"],
    ],
)
def test_what_is_like_nothing_gets_no_suggestion(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean" not in error(capsys, *argv)
