"""Optimizers that launchers' files name: Muon is priced as what it is, unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli import main
from planner.interop.price import read_configuration
from planner.strategy.strategy import Strategy

MEGATRON = "micro_batch_size: 1\nglobal_batch_size: 16\nseq_length: 16\n"
TITAN = """
[optimizer]
name = "Muon"
[parallelism]
data_parallel_shard_degree = -1
[training]
local_batch_size = 2
seq_len = 16
"""


@pytest.mark.parametrize(
    ("name", "text", "kind", "zero"),
    [
        ("mine.yaml", MEGATRON + "optimizer: dist_muon\n", "megatron", 1),
        ("mine.yaml", MEGATRON + "optimizer: muon\n", "megatron", 0),
        ("run.sh", "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 16"
         " --seq-length 16 --optimizer dist_muon --muon-momentum 0.95\n", "megatron", 1),
        ("mine.yml", "per_device_batch_size: 2\nmax_target_length: 16\nopt_type: muon\n",
         "maxtext", 3),
        ("mine.toml", TITAN, "torchtitan", 3),
        ("ds.json", '{"train_batch_size": 16, "zero_optimization": {"stage": 2},'
         ' "optimizer": {"type": "Muon"}}', "hf", 2),
    ],
)  # fmt: skip
def test_files_that_name_muon(tmp_path: Path, name: str, text: str, kind: str, zero: int) -> None:
    (tmp_path / name).write_text(text)
    found = read_configuration(tmp_path / name, 8)
    assert (found.launcher, found.settings.zero_stage) == (kind, zero)
    assert found.keys.optimizer == "muon"
    assert any("which --optimizer muon prices" in note for note in found.notes)


def test_an_import_that_names_muon_is_priced_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is told of another optimizer with that."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MEGATRON + "optimizer: dist_muon\n")
    call = ["import", "mine.yaml", "--model", "zoo:gpt-tiny", "--devices", "4", "--quiet"]
    for more, wanted in ([], "muon"), (["--optimizer", "lion"], "lion"):
        assert main([*call, *more, "-o", f"{wanted}.json"]) == 0
        training = Strategy.load(f"{wanted}.json").workload["training"]
        assert training["optimizer"] == wanted


def test_a_model_without_hidden_matrices_is_priced_with_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Muon takes AdamW's steps of all its weights."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_batch_size": 16, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon"}}'
    )
    call = ["import", "ds.json", "--model", "zoo:resnet-tiny", "--devices", "4", "-o", "it.json"]
    assert main(call) == 0
    assert Strategy.load("it.json").workload["training"]["optimizer"] == "adamw"
    assert "matrices of hidden layers, and the model has none" in capsys.readouterr().err
