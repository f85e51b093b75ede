"""accelerate's configuration: ParallelismConfig, FSDP of both versions, DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.interop.launchers import hf
from planner.interop.price import Configuration, read_configuration
from planner.interop.settings import Facts, Settings
from planner.machine.topology import for_devices

NAMES = ("dp_replicate", "dp_shard", "cp", "tp")
FSDP2 = "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: {}\n"


def read(folder: Path, text: str, *overrides: str, devices: int = 8) -> Configuration:
    (folder / "default_config.yaml").write_text(text)
    return read_configuration(
        folder / "default_config.yaml",
        devices,
        overrides=("per_device_train_batch_size=2", *overrides),
    )


def sizes(*degrees: int) -> str:
    rows = [f"  parallelism_config_{n}_size: {d}\n" for n, d in zip(NAMES, degrees, strict=True)]
    return "".join(["distributed_type: FSDP\nparallelism_config:\n", *rows])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (sizes(1, 4, 1, 2) + FSDP2.format("true"), Settings(8, data=4, tensor=2, zero_stage=3)),
        (sizes(1, 2, 4, 1) + FSDP2.format("false"), Settings(4, data=2, sequence=4, zero_stage=2)),
        (
            sizes(1, 1, 8, 1) + FSDP2.format("true") + "  fsdp_activation_checkpointing: true\n",
            Settings(2, sequence=8, zero_stage=3, recompute="block"),
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
            Settings(16, data=8, zero_stage=2),
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 3\n",
            Settings(16, data=8),
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: FULL_SHARD\n",
            Settings(16, data=8, zero_stage=3),
        ),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", Settings(16, data=8)),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n"
            "  gradient_accumulation_steps: 4\n",
            Settings(64, data=8, microbatches=4, zero_stage=1),
        ),
    ],
)  # fmt: skip
def test_its_kinds(text: str, expected: Settings, tmp_path: Path) -> None:
    found = read(tmp_path, text)
    assert (found.launcher, found.settings) == ("hf", expected)


def test_rows_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    with pytest.raises(PlanError, match="per_device_train_batch_size is missing") as e:
        read_configuration(tmp_path / "c.yaml", 8)
    assert e.value.code == "P191" and "behind the file" in e.value.help[0]
    assert read(tmp_path, (tmp_path / "c.yaml").read_text()).settings.precision == "bf16-mixed"


def test_what_is_priced_as_another_thing(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "distributed_type: FSDP\nnum_processes: 16\nfsdp_config:\n  fsdp_offload_params: true\n"
        "  fsdp_sharding_strategy: HYBRID_SHARD\n",
    )
    assert found.notes == (
        "fsdp_offload_params is left out: nothing is priced in the host's memory",
        "it starts 16 processes, and is priced on 8 devices",
    )
    with pytest.raises(PlanError, match="fsdp_sharding_strategy = 'full'"):
        read(tmp_path, "distributed_type: FSDP\nfsdp_sharding_strategy: full\n")


def test_a_command_line_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 8 --parallelism_config_dp_shard_size 4"
        " --parallelism_config_tp_size 2 train.py --per_device_train_batch_size 1\n"
    )
    found = read_configuration(tmp_path / "run.sh", 8)
    assert found.settings == Settings(4, data=4, tensor=2, zero_stage=3)


def test_replicas_beside_tensor_ranks_have_no_word() -> None:
    s = Settings(8, data=4, tensor=2)
    with pytest.raises(PlanError, match="shard nothing beside") as e:
        hf.write_accelerate(s, Facts("m", for_devices("h100-sxm", 8)))
    assert e.value.code == "P192"
