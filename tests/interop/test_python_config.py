"""Configurations of Python (torchtitan's since February 2026, Megatron-Bridge's recipes): read from
the syntax tree, never imported or run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.interop.launchers import torchtitan
from planner.interop.price import read_configuration
from planner.interop.settings import Facts, Rounds, Settings
from planner.machine.topology import for_devices
from planner.strategy.strategy import Strategy

TITAN = """
from torchtitan.config import ParallelismConfig, TrainingConfig

LENGTH = 4096


def small() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * LENGTH,
            max_context_length=LENGTH,
            steps=1000,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def staged() -> Trainer.Config:
    config = small()
    config.training.num_tokens_per_train_step = LENGTH * 64
    config.parallelism = ParallelismConfig(
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_degree=2,
        num_pp_microbatches=4,
        enable_sequence_parallel=False,
    )
    config.activation_checkpoint = None
    if config.training.max_context_length > 2048:
        config.parallelism.tensor_parallel_degree = 2
    return config
"""
RECIPE = """
def _common(cfg):
    cfg.ddp.use_distributed_optimizer = True


def llama_64gpu_config(tensor_model_parallel_size: int = 4) -> ConfigContainer:
    cfg = llama_pretrain_config()
    cfg.model.tensor_model_parallel_size = tensor_model_parallel_size
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 256
    cfg.train.micro_batch_size = 1
    _common(cfg)
    _benchmark(cfg)
    cfg.env_vars = {**COMMON, "A": 1}
    return cfg
"""


def written(folder: Path, text: str, name: str = "config_registry.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_functions_are_followed_and_named(tmp_path: Path) -> None:
    path = written(tmp_path, TITAN)
    with pytest.raises(PlanError, match="several configurations: small, staged") as e:
        read_configuration(path, 8)
    assert e.value.code == "P190" and e.value.help == (f"{path}:small says which",)
    found = read_configuration(f"{path}:small", 8)
    assert found.launcher == "torchtitan" and found.settings == Settings(
        8, data=4, tensor=2, microbatches=1, zero_stage=3, recompute="block", positions=True,
        length=4096,
    )  # fmt: skip
    assert found.unread == ("training.steps",)
    staged = read_configuration(f"{path}:staged", 16).settings
    assert staged == Settings(
        64, stage=2, data=4, tensor=2, microbatches=8, zero_stage=1, schedule="interleaved",
        length=4096, virtual_stages=2,
    )  # fmt: skip
    with pytest.raises(PlanError, match="no function 'stage'") as e:
        read_configuration(f"{path}:stage", 8)
    assert "did you mean 'staged'?" in e.value.help


def test_a_recipe_of_megatron_bridge(tmp_path: Path) -> None:
    found = read_configuration(written(tmp_path, RECIPE), 64)
    assert found.launcher == "megatron" and found.settings == Settings(
        256, stage=4, data=4, tensor=4, microbatches=64, zero_stage=1, schedule="interleaved",
        positions=True, virtual_stages=5,
    )  # fmt: skip
    assert [n.partition(": ")[2] for n in found.notes] == [
        "what llama_pretrain_config, which is not in this file, sets is not read",
        "_benchmark, which is not in this file, is not followed",
    ]
    assert "env_vars.A" in found.unread


def test_versions_between_count_rows(tmp_path: Path) -> None:
    text = """
def mine():
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=2, seq_len=128),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )
"""
    found = read_configuration(written(tmp_path, text), 8)
    assert found.settings == Settings(
        16, data=8, zero_stage=3, recompute="block", length=128
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("num_tokens_per_train_step=5000", "is no multiple of 4096 tokens x 1"),
        ("max_context_length=3000", "is no multiple of max_context_length 3000"),
    ],
)
def test_tokens_that_do_not_divide(extra: str, said: str, tmp_path: Path) -> None:
    text = f"c = Config(num_tokens_per_microbatch_per_dp_rank=4096, {extra})\n"
    with pytest.raises(PlanError, match=said) as e:
        read_configuration(written(tmp_path, text), 8)
    assert e.value.code == "P191"


def test_layers_of_a_virtual_stage(tmp_path: Path) -> None:
    text = (
        "c = Config(local_batch_size=4, pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=1,"
        " pipeline_parallel_schedule='Interleaved1F1B', pipeline_parallel_layers_per_stage=4)\n"
    )
    path = written(tmp_path, text)
    assert read_configuration(path, 8, layers=lambda: 30).settings.virtual_stages == 4
    for layers in (16, 6):
        with pytest.raises(PlanError, match="no whole number of virtual stages"):
            read_configuration(path, 8, layers=lambda layers=layers: layers)  # type: ignore[misc]


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"""
import os
os.system("touch {mark}")
X = open("{mark}", "w")
c = Config(local_batch_size=4, steps=__import__("os").system("touch {mark}"))
c.training.x = [open("{mark}", "w") for _ in range(3)]
"""
    found = read_configuration(written(tmp_path, text), 8)
    assert found.settings.batch == 32 and not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "def f(:\n",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 20_000 + "1",
        "def f():\n    return f()\n",
        "\n".join(
            f"def f{k}():\n    f{k + 1}()\n    f{k + 1}()\n    f{k + 1}()" for k in range(11)
        ),
        "x = Config(local_batch_size=9**9**9)",
        "x = Config(local_batch_size=" + "9999999999*" * 50 + "1)",
        "c = {}\nc.self = c\nc.local_batch_size = 'x'\n",
        "\0",
        "",
    ],
)
def test_hostile_files_are_errors(text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as e:
        read_configuration(written(tmp_path, text), 8)
    assert e.value.code in ("P190", "P191")


def test_the_function_that_is_written_is_merged_into_a_registry(tmp_path: Path) -> None:
    """`planned(small())`: what the plan decides goes over what the base has."""
    s = Settings(
        64, stage=4, data=2, tensor=2, microbatches=8, zero_stage=1, recompute="block",
        schedule="interleaved", positions=True, length=128, virtual_stages=3,
    )  # fmt: skip
    text = torchtitan.write(s, Facts("x", for_devices("h100-sxm", 16), 12))
    assert "pipeline_parallel_layers_per_stage = 1\n" in text
    merged = f"{TITAN}\n{text}\n\ndef mine():\n    return planned(staged())\n"
    found = read_configuration(f"{written(tmp_path, merged)}:mine", s.devices, layers=lambda: 12)
    assert found.settings == s


def test_layers_that_are_no_blocks_are_not_counted_out(tmp_path: Path) -> None:
    """A dense layer before 26 with experts: torchtitan counts 27."""
    s = Settings(
        64, stage=2, data=4, microbatches=4, zero_stage=2, schedule="interleaved", length=128,
        virtual_stages=13,
    )  # fmt: skip
    for beside, virtual in ((0, 13), (1, 2)):
        facts, rounds = Facts("x", for_devices("h100-sxm", 8), 26, beside), Rounds(s)
        said = torchtitan.round_off(rounds, facts)
        assert (rounds.now.virtual_stages, bool(said)) == (virtual, bool(beside))
        text = torchtitan.write(rounds.now, facts)
        assert ("layers_per_stage" in text) == (not beside)
        found = read_configuration(written(tmp_path, text), 8, layers=lambda: 26)
        assert found.settings == rounds.now


def test_the_command_reads_a_function_and_the_models_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TITAN.replace("LENGTH = 4096", "LENGTH = 16")
    text += "\n\ndef tiny():\n    config = staged()\n"
    for key, value in (("layers_per_stage", 1), ("first_stage_less_layers", 0),
                       ("last_stage_less_layers", 0)):  # fmt: skip
        text += f"    config.parallelism.pipeline_parallel_{key} = {value}\n"
    text += "    return config\n"
    argv = ["import", f"{written(tmp_path, text)}:tiny", "--model", "zoo:llama-tiny,layers=4", "--devices",
            "8", "--quiet", "-o", str(tmp_path / "x.json")]  # fmt: skip
    assert main(argv) == 0
    assert "next: plan zoo:llama-tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_what_to_type_next_is_of_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows as long and the same adapters: `plan diff` would compare two workloads otherwise."""
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python p.py --micro-batch-size 1 --seq-length 8 --bf16\n")
    Path("config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256,'
        ' "num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 32}'
    )
    lora = "rank=2,targets=*.q_proj.weight"
    same = ["--dim", "seq=8", "--optimizer", "lion", "--lora", lora]
    call = ["import", "run.sh", "--model", "config.json", "--devices", "8", *same]
    assert main([*call, "--runtime", "megatron", "--quiet", "-o", "mine.json"]) == 0
    said = capsys.readouterr().err
    words = shlex.split(said[said.index("next: plan") :].partition("·")[0])[2:]
    assert main([*words, "--quiet"]) == 0 and words[-2:] == ["-o", "best.json"]
    mine, best = (Strategy.load(f"{name}.json").workload for name in ("mine", "best"))
    assert mine == best
    capsys.readouterr()
    assert main(["export", "mine.json", "--to", "megatron", "-o", "again.sh"]) == 0
    said = capsys.readouterr().err
    assert main([*shlex.split(said[said.index("import") :]), "--quiet"]) == 0


def test_many_functions_share_one_budget(tmp_path: Path) -> None:
    """Seconds, not hours: each function alone would be within bounds."""
    body = "".join(f"    x{k} = ({' + '.join(['1'] * 60)})\n" for k in range(200))
    text = "".join(f"def f{k}():\n{body}\n" for k in range(12))
    with pytest.raises(PlanError, match="takes too many steps"):
        read_configuration(written(tmp_path, text), 8)
