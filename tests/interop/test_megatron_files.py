"""What files of Megatron-LM say beyond degrees: experts over tensor ranks, recompute of some
layers, layouts, devices, models that the file must not contradict."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner.api as api
from planner.errors import PlanError
from planner.interop.launchers import megatron
from planner.interop.model_sizes import LAYERS, hold, sizes_of
from planner.interop.price import Configuration, facts_of, read_configuration
from planner.interop.settings import Facts, Settings
from planner.machine.topology import for_devices
from planner.search.search import Search


def read(folder: Path, words: str, devices: int) -> Configuration:
    path = folder / "a.args"
    path.write_text(f"--micro-batch-size 1 {words}\n")
    return read_configuration(path, devices)


def test_experts_over_tensor_ranks_too(tmp_path: Path) -> None:
    """Data-parallel ranks 4, experts over 8: of each a device has all columns, or of twice as many
    half the columns."""
    folded = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --num-experts 8"
    found = read(tmp_path, f"{folded} --expert-tensor-parallel-size 1", 8)
    assert (found.settings.data, found.settings.expert, found.settings.tensor) == (1, 4, 2)
    assert found.notes[-1].startswith("experts over 8 ranks, tensor ranks among them, are priced")
    with pytest.raises(PlanError, match="does not divide the 4 data-parallel ranks, nor those"):
        read(tmp_path, folded, 8)  # as many tensor ranks as elsewhere: 16 devices
    with pytest.raises(PlanError, match="x expert_tensor_parallel_size 1 does not divide the 2 "):
        read(tmp_path, "--context-parallel-size 4 --expert-model-parallel-size 8", 8)


def test_what_is_written_says_how_experts_are_cut(tmp_path: Path) -> None:
    """A file with another number keeps it otherwise, and would hold other experts."""
    s = Settings(8, expert=4, tensor=2, microbatches=2, zero_stage=1, length=8, positions=True)
    text = megatron.write_arguments(s, Facts("x", for_devices("h100-sxm", 8), 4))
    assert "--expert-tensor-parallel-size 2\n" in text
    (tmp_path / "b.args").write_text(text)
    found = read_configuration(tmp_path / "b.args", 8)
    assert found.settings == s and found.notes == ()


@pytest.mark.parametrize(
    ("words", "recompute"),
    [
        ("--recompute-num-layers 1", "none"),
        ("--recompute-num-layers 3", "block"),
        ("--recompute-num-layers 4", "block"),
        ("--recompute-num-layers 1 --pipeline-model-parallel-size 4", "block"),
        ("--recompute-num-layers 0", "none"),
    ],
)
def test_recompute_of_some_layers_is_the_nearer_of_all_and_none(
    words: str, recompute: str, tmp_path: Path
) -> None:
    full = "--recompute-granularity full --recompute-method block --num-layers 4"
    assert read(tmp_path, f"{full} {words}", 4).settings.recompute == recompute


def test_megatron_under_deepspeed(tmp_path: Path) -> None:
    """Its ZeRO stage, sequence ranks, experts and recompute stand beside Megatron's arguments."""
    words = (
        "--zero-stage 3 --ds-sequence-parallel-size 2 --moe-expert-parallel-size 2"
        " --checkpoint-activations --no-pipeline-parallel --pipeline-model-parallel-size 2"
    )
    found = read(tmp_path, words, 8)
    assert found.settings == Settings(
        4, data=2, expert=2, sequence=2, zero_stage=3, recompute="block"
    )
    assert found.notes == ("sequence ranks of DeepSpeed (Ulysses) are priced as context ranks",)


def test_the_older_word_for_experts_that_are_recomputed(tmp_path: Path) -> None:
    assert read(tmp_path, "--moe-layer-recompute", 4).settings.recompute == "block"


def test_devices_that_do_not_fit_are_answered_by_those_that_do(tmp_path: Path) -> None:
    words = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
    with pytest.raises(PlanError) as e:
        read(tmp_path, words, 64)
    assert e.value.help[0].endswith("a multiple of 128")


def test_layers_of_a_hybrid_are_not_its_attentions(tmp_path: Path) -> None:
    """A file counts every layer, of which few are attention."""
    graph = api.open_model("zoo:hybrid-tiny", 8, batch=8).plain
    assert LAYERS not in sizes_of(graph)
    hold(read(tmp_path, "--num-layers 77", 8).claims, graph, "a.args")
    plain = api.open_model("zoo:llama-tiny", 8, batch=8).plain
    with pytest.raises(PlanError, match="num_layers = 77, the model has 2 layers"):
        hold(read(tmp_path, "--num-layers 77", 8).claims, plain, "a.args")


def test_experts_without_gates_have_sizes_too() -> None:
    graph = api.open_model("zoo:nemotron-3-nano-30b-a3b,seq=64", 8, batch=8).plain
    assert sizes_of(graph)["experts"] == (128,)


def test_a_name_of_maxtext_says_sizes(tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text("per_device_batch_size: 1\nmodel_name: llama2-70b\n")
    claims = read_configuration(tmp_path / "c.yml", 8).claims
    assert [c.value for c in claims] == [80, 8192]
    plain = api.open_model("zoo:llama-tiny", 8, batch=8).plain
    with pytest.raises(PlanError, match="model_name llama2-70b, with base_num_decoder_layers = 80"):
        hold(claims, plain, "c.yml")


def test_layers_of_a_block_are_all_that_mix_positions() -> None:
    """Exports with stages count them: three states and one attention are four layers."""
    model = api.open_model("zoo:hybrid-tiny,layers=8", 8, batch=8)
    request = api.make_request(devices=8)
    base = Search(model, request).base(1)
    assert base is not None
    facts = facts_of("x", request.topology, base)
    assert (facts.layers, facts.each, facts.beside, facts.all_layers) == (2, 4, 0, 8)
