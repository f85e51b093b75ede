"""MaxText: a file with overrides behind it, launch scripts, axes and policies by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.interop.launchers import maxtext
from planner.interop.price import read_configuration
from planner.interop.settings import Facts, Rounds, Settings
from planner.machine.topology import for_devices

FILE = "per_device_batch_size: 2\nremat_policy: 'full'\nici_tensor_parallelism: 2\nsteps: 3\n"
SCRIPT = """export EXECUTABLE="train"
for ARGUMENT in "$@"; do
    IFS='=' read -r KEY VALUE <<< "$ARGUMENT"
    export "$KEY"="$VALUE"
done
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${DIR:-$PWD/configs}"//base.yml model_name=llama2-70b\\
  base_output_directory=$OUTPUT_PATH per_device_batch_size=0.5 ici_tensor_parallelism=4\\
  steps=15 enable_checkpointing=false
"""


def read(folder: Path, name: str, text: str, devices: int, domain: int = 0, *overrides: str):  # type: ignore[no-untyped-def]
    (folder / name).write_text(text)
    return read_configuration(folder / name, devices, domain=domain, overrides=overrides)


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    found = read(
        tmp_path, "c.yml", FILE, 8, 0, "per_device_batch_size=4.0", "remat_policy=minimal_flash",
        "dcn_data_parallelism=1", "shard_optimizer_over_data=True",
    )  # fmt: skip
    assert found.launcher == "maxtext" and found.unread == ("steps",)
    assert found.settings == Settings(
        32, data=4, tensor=2, zero_stage=3,
        recompute="save:q,k,v,context,out_proj,mlp_gate,mlp_up,mlp_down",
        blocks="looped",
    )  # fmt: skip


def test_a_script_takes_the_defaults_of_base_yml(tmp_path: Path) -> None:
    """fsdp within a slice, data between slices: what is left of each."""
    found = read(tmp_path, "run.sh", SCRIPT, 64, 16)
    assert found.settings == Settings(
        32, data=16, tensor=4, zero_stage=3, zero_group=16, recompute="block", blocks="looped"
    )
    assert not any("base.yml" in n for n in found.notes)  # its values are those that are priced
    assert "model_name" not in found.unread and "steps" in found.unread


def test_a_file_beside_the_script_is_what_its_overrides_go_over(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text(
        "model: {remat_policy: save_qkv_proj}\nper_device_batch_size: 3\nici_fsdp_parallelism: 2\n"
        "ici_data_parallelism: -1\n"
    )
    text = (
        "python3 -m maxtext.train configs/mine.yml per_device_batch_size=1 ici_fsdp_parallelism=8\n"
    )
    found = read(tmp_path, "run.sh", text, 8)
    assert found.settings == Settings(
        8, data=8, zero_stage=3, recompute="save:q,k,v", blocks="looped"
    )
    assert found.notes == () and found.unread == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("remat_policy: minimal_with_quantization\n", "quantised copies are not saved"),
        (
            "ici_pipeline_parallelism: 4\nnum_pipeline_repeats: 2\n",
            "2 pipeline repeats (circular) are priced as one: 43% of the loop's time is bubble"
            " where it is 27%",
        ),
    ],
)
def test_what_is_priced_as_another_thing(text: str, note: str, tmp_path: Path) -> None:
    found = read(tmp_path, "c.yml", f"per_device_batch_size: 4\n{text}", 8)
    assert any(note in n for n in found.notes)


def test_repeats_follow_from_the_layers(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text("per_device_batch_size: 4\nici_pipeline_parallelism: 4\n")
    assert read_configuration(path, 8, layers=lambda: 4).notes == (
        "ZeRO-3 with stages is priced as ZeRO-1",
    )
    notes = read_configuration(path, 8, layers=lambda: 32).notes
    assert any("8 pipeline repeats" in n for n in notes)


def test_axes_of_two_names(tmp_path: Path) -> None:
    found = read(
        tmp_path, "c.yml",
        "per_device_batch_size: 1\nici_fsdp_parallelism: 2\nici_fsdp_transpose_parallelism: 2\n"
        "ici_context_parallelism: 2\nici_context_usp_ulysses_parallelism: 2\n", 16,
    )  # fmt: skip
    assert (found.settings.data, found.settings.sequence, found.settings.zero_stage) == (4, 4, 3)


def test_a_policy_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="remat_policy = 'minimul'") as e:
        read(tmp_path, "c.yml", "per_device_batch_size: 1\nremat_policy: minimul\n", 8)
    assert e.value.code == "P191" and e.value.help == ("did you mean 'minimal'?",)


def test_sizes_are_held_against_the_model_unless_a_name_sets_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yml"
    path.write_text("per_device_batch_size: 1\nbase_emb_dim: 2048\nvocab_size: 512\n")
    argv = ["import", str(path), "--model", "zoo:llama-tiny", "--devices", "8", "--quiet",
            "-o", str(tmp_path / "x.json")]  # fmt: skip
    assert main(argv) == 2 and "base_emb_dim = 2048" in capsys.readouterr().err
    assert main([*argv[:2], "model_name=mine-70b", *argv[2:]]) == 0
    assert main([*argv[:2], "base_emb_dim=64", *argv[2:], "--force"]) == 0


def test_overrides_for_a_script(tmp_path: Path) -> None:
    s = Settings(64, data=4, tensor=4, microbatches=2, zero_stage=3, recompute="save:q,mlp_up")
    s = replace(s, blocks="looped")
    facts = Facts("m", for_devices("h100-sxm", 16), 8)
    rounds = Rounds(s)
    maxtext.round_off(rounds, facts)
    text = maxtext.write_overrides(rounds.now, facts)
    assert "    ici_tensor_parallelism=4\n" in text and "    query_proj='device'\n" in text
    found = read(tmp_path, "x.sh", text, 16)
    assert (found.settings, found.notes, found.unread) == (s, (), ())
    behind = read(
        tmp_path, "y.sh", f'{text}python -m maxtext base.yml "${{PLANNED_ARGS[@]}}"\n', 16
    )
    assert behind.settings == s
