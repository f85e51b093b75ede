"""What a user types first, on graphs that real exporters wrote: README.md here says what is walked,
`make slow` walks all of it.

Every test starts processes of the installed `plan`, with its default options and a cache in the
place where a user's is.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.front_door import Step, Walk, asked_dims, environment, graphs, main, ran, walk

FOLDER = Path(__file__).parent / "graphs"
GRAPHS = {g.name: g for g in graphs(FOLDER)}
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
FAMILIES = {
    "GPT-2",
    "Llama",
    "Qwen",
    "Gemma",
    "Phi",
    "Mistral",
    "Mixtral",
    "DeepSeek",
    "BERT",
    "RoBERTa",
    "T5",
    "BART",
    "Whisper",
    "ViT",
    "CLIP",
    "ConvNeXt",
    "ResNet",
    "UNet",
    "DiT",
    "Mamba",
    "GRU",
    "LSTM",
    "two towers",
    "EmbeddingBag",
    "ALiBi",
    "flax",
}
KINDS = ("train", "infer")
GATE_RUN = (("llama_dynamo_bf16", "train"),)
"""Walked to the end on every change."""
GATE_PLAN = (
    ("mixtral_dynamo_bf16", "train"),
    ("full_llama3_8b_bf16", "train"),
    ("full_vit_large_bf16", "infer"),
    ("gemma3_dynamo_sliding", "infer"),
    ("llama_torchscript_fp16_batch1", "train"),
    ("unet_torchscript_dynamic", "train"),
    ("clip_dynamo", "train"),
    ("gpt2_torchscript_dynamic", "train"),
    ("two_towers_dynamo", "train"),
    ("embedding_bag_torchscript", "train"),
    ("gpt2_dynamo_cache", "infer"),
    ("mamba_dynamo", "infer"),
    ("whisper_dynamo", "train"),
    ("deepseek_v3_dynamo", "train"),
    ("lstm_torchscript_dynamic", "train"),
    ("vit_dynamo_bf16_batch1", "infer"),
)
"""Planned on every change, cold and warm."""


def expected(name: str, kind: str) -> str:
    """How a walk is to end: as the manifest says, or well."""
    told = MANIFEST[name]["expect"].get(kind)
    return (
        str(told["end"])
        if told
        else "verified"
        if MANIFEST[name]["weights"] == "inside"
        else "emitted"
    )


def told(done: Walk) -> str:
    """The commands of a walk and the end of what the last one said."""
    last = done.steps[-1]
    commands = "\n".join(" ".join((Path(s.argv[0]).name, *s.argv[1:])) for s in done.steps)
    return (
        f"{done.graph} ({done.workload}) ended with"
        f" {done.end}\n{commands}\n{last.out[-1500:]}\n{last.err[-1500:]}"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *GATE_RUN,
        pytest.param("gpt2_torchscript_dynamic", "infer", marks=pytest.mark.slow),
        pytest.param("flax_cnn", "train", marks=pytest.mark.slow),
        pytest.param("mlp_dynamo_train_mode", "infer", marks=pytest.mark.slow),
    ],
)
def test_the_way_from_a_file_to_a_verified_program(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's in all but what XLA is told: as in tests/conftest.py, it compiles in a third of
    the time. The long suite walks with XLA's defaults."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    quick = {"XLA_FLAGS": " ".join(flags)}
    monkeypatch.setattr("benchmarks.front_door.environment", lambda home: environment(home) | quick)
    done = walk(GRAPHS[name], kind, tmp_path)
    assert not done.fault and done.end == expected(name, kind), told(done)


@pytest.mark.one_in(20)
@pytest.mark.parametrize(("name", "kind"), GATE_PLAN)
def test_a_plan_cold_and_warm(name: str, kind: str, tmp_path: Path) -> None:
    done = walk(GRAPHS[name], kind, tmp_path, execute=False)
    wanted = expected(name, kind)
    assert not done.fault and done.end == (wanted if wanted.startswith("plan ") else "planned"), (
        told(done)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_every_graph_to_the_end(name: str, kind: str, tmp_path: Path) -> None:
    done = walk(GRAPHS[name], kind, tmp_path)
    assert not done.fault and done.end == expected(name, kind), told(done)


def test_the_graphs_are_what_the_readme_says() -> None:
    assert set(GRAPHS) == set(MANIFEST) and len(GRAPHS) >= 48
    assert {e["family"] for e in MANIFEST.values()} >= FAMILIES
    options = {
        key: {e[key] for e in MANIFEST.values()}
        for key in ("exporter", "dtype", "dynamic", "weights", "batch")
    }
    assert options["exporter"] == {"dynamo", "torchscript", "jax2onnx"} and options["dtype"] == {
        "float32",
        "float16",
        "bfloat16",
    }
    assert (
        options["dynamic"] == {True, False}
        and options["weights"] == {"inside", "absent"}
        and {1} < options["batch"]
    )
    for name, graph in GRAPHS.items():
        assert graph.path.stat().st_size < 200_000, name
        assert all(
            set(e) == {"end", "why"} and e["why"] for e in MANIFEST[name]["expect"].values()
        ), name
    assert sum(g.path.stat().st_size for g in GRAPHS.values()) < 6_000_000


GOOD = Step("plan", ("plan",), 0, "", "wrote m.plan.json\n", 1.0)
REFUSED = replace(GOOD, code=2, err="error[P130]: an operator\nhelp: another\n")


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (GOOD, ""),
        (REFUSED, ""),
        (replace(REFUSED, code=3, err="error[P021]: no plan fits\n"), ""),
        (replace(REFUSED, err="error[P000]: internal error: ValueError\n"), "P000"),
        (
            replace(
                REFUSED, err="Traceback (most recent call last):\n  File\nValueError: x\n", code=1
            ),
            "a traceback",
        ),
        (replace(GOOD, err="m.py:3: RuntimeWarning: divide by zero\n"), "a warning of a library"),
        (replace(REFUSED, code=1), "exit 1 with P130"),
        (replace(REFUSED, code=3), "exit 3 with P130"),
        (replace(REFUSED, err="error: no\n"), "exit 2 without an error's code"),
        (replace(GOOD, err="error[P130]: an operator\n"), "exit 0 with an error"),
        (replace(GOOD, name="verify", code=1, out="NOT VERIFIED"), "NOT VERIFIED"),
        (replace(GOOD, code=-9, err=""), "exit -9 without an error's code"),
    ],
)
def test_an_end_that_is_no_good_one_is_a_fault(step: Step, fault: str) -> None:
    assert step.fault == fault


def test_a_walk_is_told_by_its_last_step() -> None:
    assert Walk("m", "train", (GOOD,)).end == "planned"
    assert Walk("m", "train", (GOOD, replace(REFUSED, name="emit"))).end == "emit P130"
    assert Walk("m", "train", (GOOD, replace(GOOD, name="verify"))).end == "verified"
    assert (
        Walk("m", "train", (GOOD,), "another strategy from the cache").end
        == "plan: another strategy from the cache"
    )


def test_a_program_that_ran_told_two_steps_with_losses_that_are_numbers() -> None:
    said = replace(GOOD, out="step 0  loss 4.5  3.1 ms\nstep 1  loss 4.4  3.1 ms\n")
    assert ran(said, "train") and not ran(said, "infer")
    assert not ran(
        replace(said, out="step 0  loss 4.5  3.1 ms\nstep 1  loss nan  3.1 ms\n"), "train"
    )
    assert ran(
        replace(said, out="step 0  outputs (8, 4)  3.1 ms\nstep 1  outputs (8, 4)  3.1 ms\n"),
        "infer",
    )


def test_dims_are_given_as_the_help_asks() -> None:
    step = replace(
        REFUSED,
        err=(
            "error[P140]: the model's inputs have dims without a value: seq, s22\nhelp: add --dim"
            " seq=? --dim s22=?\n"
        ),
    )
    assert asked_dims(step, {"s22": 4}) == ("--dim", "seq=16", "--dim", "s22=4")
    assert asked_dims(REFUSED, {}) == ()


def test_the_environment_is_a_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", "off")
    monkeypatch.setenv("XLA_FLAGS", "--xla")
    given = environment(tmp_path)
    assert (
        "MESHWRIGHT_CACHE" not in given
        and "XLA_FLAGS" not in given
        and given["XDG_CACHE_HOME"] == str(tmp_path)
    )


@pytest.mark.slow
def test_the_table_of_a_folder_tells_good_ends_from_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.onnx.gz").write_bytes(GRAPHS["mlp_dynamo_train_mode"].path.read_bytes())
    (tmp_path / "none.onnx").write_bytes(b"nothing")
    assert main([str(tmp_path), "--no-run", "--workload", "infer"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert (
        rows[2].startswith("| good | infer | planned |")
        and rows[3].startswith("| none | infer | plan P102 |")
        and rows[-1] == "2 of 2 ended well or in one clear line"
    )
    assert main([str(tmp_path / "absent")]) == 2
