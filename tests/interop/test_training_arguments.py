"""TrainingArguments, accelerate and DeepSpeed as people have them: FSDP by a word, shards within
groups, what nobody prices; torchtitan's and Levanter's files beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.interop.launchers import hf
from planner.interop.price import Configuration, read_configuration
from planner.interop.settings import Settings
from planner.interop.unread import told


def read(folder: Path, name: str, text: str, devices: int = 8, domain: int = 0) -> Configuration:
    (folder / name).write_text(text)
    return read_configuration(folder / name, devices, domain=domain)


@pytest.mark.parametrize(
    ("fsdp", "zero", "group"),
    [
        ('"full_shard auto_wrap"', 3, 0),
        ('["shard_grad_op", "auto_wrap"]', 2, 0),
        ('"hybrid_shard auto_wrap"', 3, 4),
        ("true", 3, 0),
        ('""', 0, 0),
        ("false", 0, 0),
    ],
)
def test_fsdp_of_training_arguments(fsdp: str, zero: int, group: int, tmp_path: Path) -> None:
    """They were priced as data parallelism that shards nothing."""
    text = f'{{"per_device_train_batch_size": 1, "fsdp": {fsdp}}}'
    found = read(tmp_path, "c.json", text, 8, 4)
    assert found.settings == Settings(8, data=8, zero_stage=zero, zero_group=group)


def test_fsdps_own_table_may_be_a_file(tmp_path: Path) -> None:
    table = '{"activation_checkpointing": true, "reshard_after_forward": false}'
    (tmp_path / "fsdp.json").write_text(table)
    text = (
        '{"per_device_train_batch_size": 1, "fsdp": "auto_wrap offload", "fsdp_config": "fsdp.json",'
        ' "gradient_checkpointing": false}'
    )
    found = read(tmp_path, "c.json", text)
    assert (found.settings.zero_stage, found.settings.recompute) == (2, "block")
    assert found.notes == ("fsdp offload is left out: nothing is priced in the host's memory",)


def test_megatron_under_accelerate_is_refused(tmp_path: Path) -> None:
    """It was priced as data parallelism, whatever its degrees."""
    text = "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n"
    with pytest.raises(PlanError, match="megatron_lm_config is not read") as e:
        read(tmp_path, "c.yaml", text)
    assert "FILE.args" in e.value.help[0]


def test_shards_within_groups_of_deepspeed(tmp_path: Path) -> None:
    text = (
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "mics_shard_size":'
        ' 4, "zero_hpz_partition_size": 4, "zero_quantized_weights": false}}'
    )
    found = read(tmp_path, "c.json", text, 16, 8)
    assert found.settings.zero_group == 4
    assert found.notes == (
        "zero_hpz_partition_size is left out: weights are gathered from all replicas",
    )


def test_devices_that_deepspeeds_batch_is_for(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8, "zero_optimization": {}}'
    with pytest.raises(PlanError) as e:
        read(tmp_path, "c.json", text)
    assert e.value.help == ("--devices 2",)


def test_rows_go_behind_what_is_written(tmp_path: Path) -> None:
    """accelerate's file has none: what to type next has them."""
    s = Settings(32, data=8, microbatches=2, zero_stage=3)
    assert hf.behind(s)[:2] == ["per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
    assert hf.BEHIND[".yaml"](s) == hf.behind(s) and ".json" not in hf.BEHIND


def test_levanters_schedule_of_batches_and_its_quantization(tmp_path: Path) -> None:
    text = "trainer: {num_train_steps: 9, train_batch_size: [{start: 0, value: 8}]}\n"
    with pytest.raises(PlanError, match="train_batch_size is a schedule"):
        read(tmp_path, "c.yaml", text)
    found = read(tmp_path, "c.yaml", "trainer: {num_train_steps: 9, quantization: {fp8: true}}\n")
    assert found.launcher == "levanter" and found.settings.batch == 512
    assert found.notes == ("quantization is left out: products are priced as mp says",)


def test_torchtitans_experts_over_tensor_ranks_too(tmp_path: Path) -> None:
    text = "[parallelism]\ntensor_parallel_degree = 4\nexpert_parallel_degree = 8\n"
    text += "[activation_checkpoint]\nmode = 'none'\n[training]\nlocal_batch_size = 1\n"
    found = read(tmp_path, "c.toml", text)
    assert (found.settings.data, found.settings.expert, found.settings.tensor) == (1, 2, 4)
    assert found.notes[0].startswith("experts over 8 ranks, tensor or context ranks among them")
    with pytest.raises(PlanError, match="does not divide the 2 data-parallel ranks"):
        read(tmp_path, "c.toml", text.replace("_degree = 8", "_degree = 16"))


def test_rows_of_text_beside_images(tmp_path: Path) -> None:
    """seq_length is the pictures', decoder_seq_length the text's; of T5 the first is the
    encoder's."""
    words = "--micro-batch-size 1 --seq-length 256 --decoder-seq-length 1024"
    assert read(tmp_path, "a.args", words).settings.length == 1024
    assert read(tmp_path, "a.args", f"{words} --encoder-num-layers 2").settings.length == 256


def test_of_keys_that_are_not_read_those_that_may_matter_come_first() -> None:
    keys = [
        "--lr",
        "--save-interval",
        "--moe-grouped-gemm",
        "logger.level",
        "model.cuda_graph_impl",
    ]
    assert told(keys) == (
        "--moe-grouped-gemm, model.cuda_graph_impl and 3 of data, logging, saving and learning"
    )
    assert told(["a"]) == "a" and told(["lr"]) == "1 of data, logging, saving and learning"
    many = told([f"k{i}" for i in range(14)] + ["lr"])
    assert many.endswith("k11, 2 more and 1 of data, logging, saving and learning")
