"""What configurations of launchers say of the precision: read, priced, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.interop import precisions
from planner.interop.price import LAUNCHERS, forms_of, hand_over, read_configuration
from planner.pins.launcher_space import SPACES
from planner.strategy.strategy import Strategy

MODEL = "zoo:llama-tiny"


def test_spaces_have_the_recipes_that_are_written() -> None:
    assert {name: space.precisions for name, space in SPACES.items()} == {
        name: tuple(known) for name, known in precisions.WRITTEN.items()
    }


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "recipe",
    ["bf16-fp32-grads", "bf16-mixed", "bf16-pure", "fp16", "fp8", "fp8-fp32-grads", "fp32"],
)
def test_what_is_written_is_read(recipe: str, tmp_path: Path) -> None:
    made = planner.plan(
        MODEL,
        devices=8,
        batch=16,
        precision=recipe,
        runtime="megatron" if "grads" in recipe else "jax-shard_map",
        pins="dp=8,zero=2,micro=1",
        baselines=False,
    )
    rows = ("per_device_train_batch_size=2", "gradient_accumulation_steps=1")
    for launcher, module in LAUNCHERS.items():
        for suffix in (module.SUFFIX, *forms_of(module)):
            case = launcher, suffix, recipe
            silent = case in (("hf", ".json", "fp8"), ("torchtitan", ".py", "fp8"))
            if recipe not in SPACES[launcher].precisions or silent:
                with pytest.raises(PlanError, match=recipe):
                    hand_over(made, MODEL, launcher, suffix)
                continue
            path = tmp_path / f"{launcher}{suffix}"
            path.write_text(hand_over(made, MODEL, launcher, suffix).text)
            more = rows if launcher == "hf" and suffix != ".json" else ()
            found = read_configuration(path, 8, launcher, overrides=more).settings.precision
            silent = launcher == "megatron" and suffix in (".sh", ".args", ".txt")
            expected = "" if silent and recipe == "fp32" else recipe  # --bf16 is said or left out
            assert found == expected, case


FILES = {
    ("megatron", "--micro-batch-size 2 --bf16 --fp8-format e4m3 --fp8-recipe mxfp8"): (
        "fp8-fp32-grads"
    ),
    ("megatron", "--micro-batch-size 2 --bf16"): "bf16-fp32-grads",
    ("megatron", "--micro-batch-size 2 --bf16 --grad-reduce-in-bf16"): "bf16-mixed",
    ("megatron", "--micro-batch-size 2 --bf16 --accumulate-allreduce-grads-in-fp32"): (
        "bf16-fp32-grads"
    ),
    ("megatron", "--micro-batch-size 2 --fp16"): "fp16",
    ("megatron", "--micro-batch-size 2"): "",
    ("maxtext", "per_device_batch_size=2 quantization=te_fp8_currentscaling"): "fp8",
    ("maxtext", "per_device_batch_size=2 quantization=int8"): "",
    ("maxtext", "per_device_batch_size=2 weight_dtype=bfloat16"): "bf16-pure",
    ("maxtext", "per_device_batch_size=2 dtype=float32"): "fp32",
}


@pytest.mark.parametrize(("given", "recipe"), FILES.items())
def test_words_of_launch_scripts(given: tuple[str, str], recipe: str, tmp_path: Path) -> None:
    launcher, words = given
    path = tmp_path / "c.sh"
    path.write_text(f"python train.py {words}\n")
    found = read_configuration(path, 8, launcher)
    assert found.settings.precision == recipe
    assert not {u for u in found.unread if "fp" in u or "bf16" in u or "dtype" in u}
    assert bool(found.notes) == ("mxfp8" in words or "int8" in words)


@pytest.mark.parametrize(
    ("policy", "recipe"),
    [
        ("p=f32,c=bfloat16", "bf16-mixed"),
        ("params=float32,compute=bfloat16,output=float32", "bf16-mixed"),
        ("bf16", "bf16-pure"),
        ("f32", "fp32"),
    ],
)
def test_policies_of_levanter(policy: str, recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"trainer:\n  train_batch_size: 16\n  mp: {policy}\n  mesh: {{axes: {{}}}}\n")
    assert read_configuration(path, 8, "levanter").settings.precision == recipe


def test_a_bare_no_of_accelerate_is_float32(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nmixed_precision: no\n")
    rows = ("per_device_train_batch_size=2",)
    assert read_configuration(path, 8, "hf", overrides=rows).settings.precision == "fp32"


def test_a_configuration_is_priced_in_its_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in another where that is asked for."""
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python p.py --micro-batch-size 2 --bf16 --fp8-format hybrid\n")

    def priced(*more: str) -> Any:
        call = ["import", "run.sh", "--model", MODEL, "--devices", "8", "--quiet", "--force"]
        assert main([*call, "-o", "x.json", *more]) == 0
        return Strategy.load("x.json").workload["precision"]

    assert priced() == "fp8" and priced("--precision", "bf16-mixed") == "bf16-mixed"


def test_gradients_of_megatron_are_float32_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 bytes a parameter, as Megatron-LM's own theoretical_memory_usage.py counts: 6 + 12 / d
    with the optimizer's state over d ranks, and gradients that are sent in twice the bytes.
    Programs of ours have none such: --grad-reduce-in-bf16 changes nothing of their price."""
    monkeypatch.chdir(tmp_path)

    def priced(runtime: str, *words: str) -> Strategy:
        said = " ".join(["--micro-batch-size 2 --global-batch-size 32 --bf16", *words])
        Path("run.sh").write_text(
            f"python p.py {said} --tensor-model-parallel-size 2 --use-distributed-optimizer\n"
        )
        call = ["import", "run.sh", "--model", MODEL, "--devices", "8", "--quiet", "--force"]
        assert main([*call, "-o", "x.json", "--runtime", runtime]) == 0
        return Strategy.load("x.json")

    wide, narrow = priced("megatron"), priced("megatron", "--grad-reduce-in-bf16")
    parts, less = (s.costs["memory_breakdown_bytes"] for s in (wide, narrow))
    assert parts["gradients"] == 2 * less["gradients"] == 2 * less["parameters"]
    assert {**parts, "gradients": 0} == {**less, "gradients": 0}
    sent, half = (s.costs["communication_bytes_per_device"] for s in (wide, narrow))
    scattered = sent["reduce-scatter"]["data"], half["reduce-scatter"]["data"]
    assert scattered[0]["payload"] == 2 * scattered[1]["payload"]
    assert sent["all-gather"] == half["all-gather"]
    assert wide.costs["step_time_s"] > narrow.costs["step_time_s"]
    ours = [priced("jax-shard_map", *words) for words in ((), ("--grad-reduce-in-bf16",))]
    assert ours[0].costs == ours[1].costs
    assert "gradients in float32 are priced in bfloat16" in str(ours[0].assumptions)


def test_gradients_in_float32_are_of_megatron_alone() -> None:
    with pytest.raises(PlanError, match="gradients in float32 beside bfloat16 weights"):
        planner.plan(MODEL, devices=8, batch=16, precision="bf16-fp32-grads")
    made = planner.plan(
        MODEL, devices=8, batch=16, launcher="megatron", precision="bf16-fp32-grads"
    )
    assert "grad_reduce_in_bf16: False" in hand_over(made, MODEL, "megatron").text
    compile(planner.emit(made, MODEL), "train.py", "exec")  # in bf16-mixed


def test_a_precision_that_a_launcher_cannot_say() -> None:
    with pytest.raises(PlanError, match="fp8 and --for levanter"):
        planner.plan(MODEL, devices=8, batch=16, launcher="levanter", precision="fp8")
