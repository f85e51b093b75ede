"""Published runs of programs that XLA compiled (facts with their source in each row), priced by the
default profile, which no constant of was fitted to but how steps grow with the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.published_compiled import all_compiled, apart, class_of, inside
from benchmarks.published_runs import main, outcomes, prepare_all
from benchmarks.published_scores import choice, order
from costmodels.kernels import slowdown, sustained
from costmodels.ranges import Asked, time_range
from costmodels.runtimes import Rates, load_runtime
from planner.calibrate.runs import network, xla
from planner.calibrate.runs.compiled import learned, rates_of, sources_left_out, tells
from planner.calibrate.runs.fit import Prepared
from planner.calibrate.runs.mixtures import mixture_of
from planner.calibrate.runs.recipes import tpu_recipes
from planner.calibrate.runs.releases import as_compiled, release_of, releases
from planner.calibrate.runs.rows import case_of, measured_s, recipe_of
from planner.execution.save_policies import NAMES, PRESETS, saving
from planner.machine.topology import device

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = GOLDEN / "xla_runs.jsonl"
ON_GPUS = GOLDEN / "xla_gpu_large.jsonl"
"""All published runs of large models on GPUs."""
MOST = {"gpu large": 0.11, "tpu large": 0.11}
"""Mean error of each class."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


@pytest.fixture(scope="module")
def prepared(rows: list[dict[str, Any]]) -> list[Prepared]:
    """Of large models two sources for each kind."""
    few = ("DGXC", "TPU v6e", "Ironwood")
    found, left = prepare_all([r for r in rows if any(name in r["source"] for name in few)])
    assert not left
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gpu large")) for n in MOST]
)
def test_the_default_profile_prices_runs_of_large_models(name: str) -> None:
    path = ON_GPUS if name == "gpu large" else ROWS
    found, left = prepare_all([json.loads(line) for line in path.read_text().splitlines()])
    assert not left and (name != "gpu large" or len(found) == 46)
    mine = [p for p in found if class_of(p) == name]
    assert len(mine) >= 7
    assert {p.case.runtime.name for p in mine} == {"jax-shard_map"}
    off = [abs(p.step_s() / (p.case.measured_s or 1.0) - 1) for p in mine]
    assert mean(off) <= MOST[name]
    assert inside(mine) >= 0.78


@pytest.fixture(scope="module")
def of_one_model(rows: list[dict[str, Any]]) -> list[Prepared]:
    """Those of one model on several meshes of one machine."""
    found, left = prepare_all([r for r in rows if "CI baselines" in r["source"]])
    assert not left
    return found


def test_meshes_of_one_model_are_ranked(of_one_model: list[Prepared]) -> None:
    mine = of_one_model
    found = outcomes(mine, [p.step_s() for p in mine])
    assert order(found)[0] >= 0.9
    assert choice(found)["regret_measured"] <= 0.01


@pytest.mark.slow
def test_rates_are_learned_without_a_rows_source(prepared: list[Prepared]) -> None:
    """What a fit has not seen it prices otherwise than one that has."""
    large = [p for p in prepared if tells(p)]
    unseen = sources_left_out(large)
    found = learned(large)
    assert all(0.6 < found[kind].matmul < 1.4 for kind in ("gpu", "tpu"))
    assert rates_of(large[0], found) == found[large[0].case.topology.device.name]
    kind = large[0].case.topology.device.kind
    assert rates_of(large[0], {kind: Rates(matmul=0.5)}).matmul == 0.5
    one = large[0].case.row["source"]
    mine = [k for k, p in enumerate(large) if p.case.row["source"] == one]
    assert all(unseen[k] != large[k].step_s(rates_of(large[k], found)) for k in mine)


@pytest.mark.slow
def test_seconds_of_a_rate_are_those_of_a_price_with_it(prepared: list[Prepared]) -> None:
    """What is kept of a price tells that under other rates to a per cent."""
    from planner.calibrate.runs.fit import prepare

    row = next(p for p in prepared if p.case.topology.device.name == "h100-sxm")
    for name in ("matmul", "memory", "attention", "outer"):
        other = replace(row.shipped, **{name: 0.8})
        runtime = replace(row.case.runtime, rates=other, per_device={})
        again = prepare(replace(row.case, runtime=runtime))
        assert row.step_s(other) == pytest.approx(again.step_s(), rel=0.02), name


def test_policies_of_rows() -> None:
    def read(**facts: Any) -> tuple[str, ...]:
        return xla.policies({"source": "MaxText", **facts})

    assert read(remat_policy="save_qkv_proj") == ("save:q,k,v",)
    assert read(remat_policy="SAVE_DOT_WITH_NO_BATCH_DIM") == (saving(PRESETS["minimal"]),)
    assert read(notes="FSDP; remat=custom offload; 2 slices") == ("save:q,k,v,out_proj",)
    assert read(remat_policy="none (layers not repeated)") == ("none",)
    assert read(recompute="full") == ("block",)
    assert read() == ("none", "save:q,k,v,out_proj", "block")

    def left(**facts: Any) -> tuple[str, tuple[str, ...]] | None:
        return xla.left_on_device({"source": "MaxText", **facts})

    assert left(remat_policy="custom (q, k, v offloaded)") == ("block", ("activations",))
    assert left(remat_policy="full", notes="flags and offloads may differ") is None


def test_recipes_say_what_rows_do_not() -> None:
    """By the narrowest table that fits; not where a row tells its policy itself."""

    def row(**facts: Any) -> dict[str, Any]:
        return {"source": "tpu-recipes Ironwood", "model": "llama3.1-70b", "seq": 8192, **facts}

    assert xla.policies(row()) == ("save:q,k,v,context",)
    assert xla.policies(row(seq=131072)) == ("save:q,k,v,context,mlp_down",)
    large = row(model="llama3.1-405b", precision="bf16")
    assert xla.policies(large) == ("save:k,v,mlp_down",)
    assert xla.left_on_device(large) == ("save:k,v,offload:mlp_down", ("activations",))
    assert xla.policies(row(model="llama3.1-405b", precision="fp8_full")) == ("block",)
    assert xla.policies(row(remat_policy="full")) == ("block",)
    assert xla.policies(row(model="another")) == ("none", "save:q,k,v,out_proj", "block")
    small = row(source="tpu-recipes TPU v6e", devices=32)
    assert recipe_of(small).name == "bf16-pure" != recipe_of(small | {"devices": 64}).name
    names = {n for recipe in tpu_recipes() for n in (*recipe.saved, *recipe.away)}
    assert names <= NAMES.keys()


def test_products_are_saved_but_for_those_of_fused_attention() -> None:
    """A fused kernel is no product to a policy that saves products."""
    row = {"source": "PaxML", "model": "GPT-5B", "remat_policy": "SAVE_DOT_ONLY"}
    assert xla.policies(row | {"attention": "TransformerEngine"}) == (saving(PRESETS["minimal"]),)
    assert xla.policies(row | {"attention": "XLA"}) == (saving(PRESETS["minimal_with_context"]),)


def test_what_the_release_of_a_row_hid() -> None:
    runtime = load_runtime("jax-shard_map")
    old = {"source": "NVIDIA JAX-Toolbox Pax", "model": "GPT-5B", "date": "2023-08-16"}
    assert (found := release_of(old)) and found.name == "joined"
    assert (found := release_of(old | {"date": "2024-04-26"})) and found.name == "before-2025"
    assert (found := release_of({"source": "NVIDIA DGXC MaxText"})) and found.name == "dgxc-maxtext"
    assert release_of(old | {"date": "2025-03"}) is None
    assert release_of({"source": "NVIDIA JAX-Toolbox MaxText"}) is None
    hidden = as_compiled(old, runtime).hidden
    assert (hidden.gathered, hidden.scattered) == ((0.13, 0.12), 0.22)
    assert hidden.slowed == runtime.hidden.slowed
    others = as_compiled({"source": "Levanter"}, runtime)
    assert others == replace(runtime, optimizer_bytes=38)
    for release in releases():
        assert all(0 <= share <= 1 for share in (*release.gathered, release.scattered))
        assert release.source and release.runs


@pytest.mark.slow
def test_every_share_that_a_release_hid_moves_a_price(prepared: list[Prepared]) -> None:
    from planner.calibrate.runs.fit import prepare

    row = next(p for p in prepared if "DGXC MaxText" in p.case.row["source"])
    runtime = row.case.runtime
    for name, less in (("gathered", (0.5, 0.03)), ("gathered", (0.81, 0.0)), ("scattered", 0.3)):
        changed = replace(runtime, hidden=replace(runtime.hidden, **{name: less}))
        assert prepare(replace(row.case, runtime=changed)).step_s() > row.step_s()


def test_which_attention_a_row_ran() -> None:
    chip = device("a100-80gb")
    early = {
        "source": "NVIDIA JAX-Toolbox Pax",
        "model": "GPT-5B",
        "attention": "TransformerEngine",
    }
    assert xla.unfused(early | {"date": "2023-08-29"})
    assert not xla.unfused(early | {"date": "2024-04-26"})
    assert xla.device_of({"source": "", "model": "", "attention": "XLA"}, chip).attention is None
    assert xla.device_of({"source": "", "model": "", "attention": "splash"}, chip).attention
    assert xla.unfused({"source": "T5X on GPU", "model": "T5"})
    eight = xla.device_of({"source": "", "model": "", "precision": "int8"}, device("tpu-v6e"))
    assert eight.peak("float8_e4m3fn") == 2 * eight.peak("bfloat16")


def test_facts_that_rows_lack() -> None:
    row = xla.completed(
        {"devices": 64, "tp": 1, "global_batch": 256, "notes": "devices = CHIPS (2 each)"}
    )
    assert (row["devices"], row["dp"], row["microbatch"], row["zero"]) == (128, 128, 2, 3)
    assert xla.copies({"mesh": {"ici_fsdp": 8, "dcn_data": 4}}, 32) == 4
    assert xla.copies({"mesh": {"data": 8}}, 8) == 0
    block = {
        "metric": "block_time_s",
        "value": 130.0,
        "global_batch": 10,
        "seq": 1,
        "recompute": "full",
        "steps_per_block": 12,
        "eval_sequences": 40,
    }
    assert measured_s(block) == pytest.approx(10.0)


def test_an_encoder_and_a_decoder_are_read(rows: list[dict[str, Any]]) -> None:
    row = next(r for r in rows if "T5" in r["model"])
    case = case_of(row)
    assert case.spec.startswith("zoo:t5-large,layers=24,decoder_layers=24")
    assert xla.encoder_decoder_flops(row) > 0


def test_a_mixture_of_experts_is_read() -> None:
    row = {"model": "Mixtral-8x7B", "seq": 4096}
    assert xla.mixture(row) == "zoo:mixtral-8x7b,seq=4096"
    mixture = mixture_of(row)
    assert mixture is not None and mixture.active == 2 * 14336
    assert xla.mixture({"model": "gpt-oss-120b", "seq": 8192}) == ""


@pytest.mark.parametrize(
    ("words", "node", "expected"),
    [
        ("H100 (8/node, 400 Gb/s InfiniBand per GPU)", 8, 50e9),
        ("V100-32GB; 4/node; 4x Omni-Path (100Gb)", 4, 12.5e9),
        ("A100-40GB; 1600Gbps RoCE node-node", 8, 25e9),
        ("H100-80GB (GCP A3, 8/VM)", 8, 12.5e9),
        ("A100 (DGX)", 8, 0.0),
    ],
)
def test_networks_in_words(words: str, node: int, expected: float) -> None:
    assert network.bytes_per_s(words, "", node) == pytest.approx(expected)


def test_steps_grow_with_the_devices_that_wait_for_one_another() -> None:
    chip = device("h100-sxm")
    rates = Rates(stragglers=0.01, matmul=0.5, attention=2.0)
    assert slowdown(chip, rates, 8) == 1.0
    assert slowdown(chip, rates, 64) == pytest.approx(1.03)
    many = sustained(chip, rates, 64)
    assert many.efficiency(1e12) == pytest.approx(chip.efficiency(1e12) * 0.5 / 1.03)
    assert chip.attention and many.attention
    expected = [x * 2 / 1.03 for x in chip.attention.forward]
    assert many.attention.forward == pytest.approx(expected)
    assert sustained(chip, Rates(), 64) is chip


ASKED = Asked("h100-sxm", "gpu", False, 64, 8 * 10**9, 8192, 1, False, True)


def test_ranges_are_wide_where_nothing_was_measured() -> None:
    runtime = load_runtime("jax-shard_map")
    known = time_range(runtime, ASKED)
    assert known.why == ()
    assert (known.runs, known.sources) == (46, 7)
    assert known.ends(1.0) == (1 - known.below, 1 + known.above)
    low, high = known.tied(1.0)
    assert 1 - known.below < low < 1 < high < 1 + known.above
    for more in (
        {"device": "mi300x"},
        {"devices": 10**5},
        {"parameters": 10**12},
        {"sequence": 131072},
        {"stages": 4},
        {"experts": True},
        {"training": False},
    ):
        found = time_range(runtime, replace(ASKED, **more))
        assert len(found.why) == 1
        assert found.above > known.above
        assert found.below > known.below
    assert time_range(runtime, replace(ASKED, device="mine", calibrated=True)).why == ()
    on_tpus = replace(ASKED, kind="tpu", device="tpu-v6e", experts=True)
    assert time_range(runtime, on_tpus).why == ()
    of_experts, of_dense = (
        time_range(runtime, replace(on_tpus, experts=experts)) for experts in (True, False)
    )
    assert of_experts.above + of_experts.below > of_dense.above + of_dense.below
    framework = load_runtime("megatron")
    assert time_range(framework, ASKED).ends(1.0) == (
        1 - framework.time_spread[0],
        1 + framework.time_spread[1],
    )


def test_the_command_reads_several_files(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, row in zip(paths, (rows[0], rows[-6]), strict=True):
        path.write_text(json.dumps(row) + "\n")
    assert main(["--runs", *map(str, paths), "--tiers", "ABC", "--fit"]) == 0
    printed = capsys.readouterr().out
    assert "compiled programs, gpu large: 1 rows of 1 sources" in printed
    assert "source left out" in printed


def test_a_row_that_cannot_be_read_is_counted(rows: list[dict[str, Any]]) -> None:
    """Files are others': a row is left out with its reason, and the rest is priced."""
    row = next(r for r in rows if "GPT" in r["model"] and r["tp"] == 1)
    odd = [row | {"heads": 7}, row | {"layers": "many"}, row | {"hardware": "abacus"}]
    found, left = prepare_all([*odd, row])
    assert len(found) == 1
    assert sum(left.values()) == 3
    assert sum(why.startswith("cannot be read") for why in left) == 2


def test_two_of_one_machine(of_one_model: list[Prepared]) -> None:
    mine = of_one_model
    pairs, fraction = apart(mine)
    assert pairs >= 3
    assert 0 < fraction < 0.15
    assert apart(mine[:1]) == (0, 0.0)
    assert set(all_compiled(mine, False)) == {"gpu small"}
