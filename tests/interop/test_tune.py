"""`plan tune`: what is promised of better settings is what importing them says."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.interop.launchers import maxtext, megatron, torchtitan
from planner.interop.price import LAUNCHERS, Configuration, hand_over, read_configuration
from planner.interop.settings import Facts, Settings
from planner.interop.tune import tune
from planner.machine.topology import for_devices
from planner.pins.launcher_space import SPACES, ends
from planner.pins.pins import Pins
from planner.search.build_request import build_request
from planner.search.options import MachineOptions, SearchOptions, StepOptions
from planner.search.search import Search
from planner.strategy.strategy import Strategy
from planner.workload.open import open_model

LLAMA = "zoo:llama-tiny,layers=4,seq=2048"
MACHINE = ("--devices", "8", "--hardware", "a100-80gb")
SLOW = Settings(batch=32, data=1, tensor=8, microbatches=32, length=2048, recompute="block")

OFTEN_HF = [pytest.param(name, marks=[pytest.mark.slow] * (name != "hf")) for name in SPACES]
"""Launchers, all but the one whose settings are the fewest in the long suites."""


def _written(tmp_path: Path, launcher: str, settings: Settings) -> Path:
    """A configuration file of some settings."""
    module = LAUNCHERS[launcher]
    path = tmp_path / f"mine{module.SUFFIX}"
    facts = Facts(LLAMA, for_devices("a100-80gb", 8), 4)
    path.write_text(module.write(settings, facts))
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict, Path]]:
    """Launcher -> what the command found for slow settings, as JSON, and the file that it wrote;
    asked once for all tests."""

    @functools.cache
    def found(launcher: str) -> tuple[dict, Path]:
        folder = tmp_path_factory.mktemp(launcher)
        config = _written(folder, launcher, SLOW)
        out, words = folder / f"tuned{config.suffix}", ("--model", LLAMA, *MACHINE, "--json")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main(["tune", str(config), *words, "-o", str(out)]) == 0
        return json.loads(said.getvalue()), out

    return found


@pytest.mark.slow
def test_what_changes_is_said_in_the_form_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, facts = tmp_path / "mine.toml", Facts(LLAMA, for_devices("a100-80gb", 2), 4)
    machine = ("--devices", "2", "--hardware", "a100-80gb")
    slow = Settings(batch=32, data=2, microbatches=2, length=2048, zero_stage=3, recompute="block")
    config.write_text(torchtitan.write_toml(slow, facts))
    out = tmp_path / "tuned.toml"
    assert main(["tune", str(config), "--model", LLAMA, *machine, "-o", str(out)]) == 0
    said = capsys.readouterr().out.partition("what changes:\n")[2].splitlines()
    added = [line.strip().removeprefix("+ ") for line in said if line.startswith("  + ")]
    assert added and set(added) <= set(out.read_text().splitlines())
    assert '  - mode = "full"' in said


@pytest.mark.parametrize("launcher", OFTEN_HF)
def test_what_is_promised_is_what_importing_it_says(
    launcher: str, tuned: Callable[[str], tuple[dict, Path]], tmp_path: Path
) -> None:
    table, written = tuned(launcher)
    best, yours = table["best"][0], table["yours"]
    assert best["step_time_s"] < yours["step_time_s"]
    assert table["left"]["share"] == pytest.approx(1 - best["step_time_s"] / yours["step_time_s"])
    steps = [row["step_time_s"] for row in table["best"]]
    assert steps == sorted(steps)
    made = tmp_path / "again.plan.json"
    code = main(
        [
            "import",
            str(written),
            "--model",
            LLAMA,
            *MACHINE,
            "--runtime",
            SPACES[launcher].runtime,
            "--quiet",
            "-o",
            str(made),
        ]
    )
    assert code == 0
    again = planner.Strategy.load(made)
    assert again.costs["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-5)
    assert again.costs["memory_per_device_bytes"] == best["memory_per_device_bytes"]


@pytest.mark.slow
def test_the_best_settings_are_left_as_they_are(
    tuned: Callable[[str], tuple[dict, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tuned("hf")[1]
    mine = tmp_path / f"best{written.suffix}"
    mine.write_text(written.read_text())
    assert main(["tune", str(mine), "--model", LLAMA, *MACHINE, "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "left on the table: nothing" in said
    assert not Path(f"best.tuned{written.suffix}").exists()


@pytest.mark.parametrize("launcher", OFTEN_HF)
def test_the_front_trades_time_for_memory(
    launcher: str, tuned: Callable[[str], tuple[dict, Path]]
) -> None:
    front = tuned(launcher)[0]["front"]
    steps = [t["step_time_s"] for t in front]
    sizes = [t["memory_per_device_bytes"] for t in front]
    assert steps == sorted(steps) and sizes == sorted(sizes, reverse=True)


def test_the_configuration_itself_is_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _written(tmp_path, "megatron", Settings(batch=8, data=8, length=2048))
    before = config.read_text()
    code = main(["tune", str(config), "--model", LLAMA, *MACHINE, "-o", str(config), "--force"])
    assert code == 2
    assert "P053" in capsys.readouterr().err
    assert config.read_text() == before


def test_names_of_values_are_those_of_maxtext() -> None:
    assert SPACES["maxtext"].names == tuple(maxtext.VALUES)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("launcher", SPACES)
def test_a_plan_for_a_launcher_exports_without_loss(launcher: str) -> None:
    made = planner.plan(
        LLAMA, devices=8, hardware="a100-80gb", batch=32, launcher=launcher, baselines=False
    )
    assert made.provenance["launcher"] == launcher and "pins" not in made.provenance
    rows = hand_over(made, LLAMA, launcher).rows
    planned, last = rows[0].cost, rows[-1].cost
    assert planned is not None and last is not None
    assert last["step_time_s"] <= planned["step_time_s"] * (1 + 1e-9)


@pytest.mark.parametrize("launcher", ["levanter", "torchtitan"])
def test_a_plan_for_a_launcher_is_one_that_it_can_say(launcher: str) -> None:
    """Baselines have ZeRO-1, which torchtitan has with stages alone, and no settings of a launcher
    say how its compiler fuses collectives: such a price would be one that no import has."""
    model = "zoo:gpt2-small,layers=2"
    made = planner.plan(model, devices=16, batch=64, launcher=launcher)
    planned, *said = [row.cost for row in hand_over(made, model, launcher).rows]
    assert planned is not None
    assert [cost and cost["step_time_s"] for cost in said] == [
        pytest.approx(planned["step_time_s"], rel=1e-9)
    ]


def test_what_a_launcher_can_say_is_no_faster_than_all_plans_of_its_runtime() -> None:
    """Virtual stages are tried under a framework's prices without its launcher, too."""
    options = {"devices": 16, "hardware": "a100-80gb", "batch": 64, "baselines": False}
    said, free = (
        planner.plan("zoo:gpt2-small", pins="pp=2", **options, **priced).costs["step_time_s"]
        for priced in ({"launcher": "megatron"}, {"runtime": "megatron"})
    )
    assert free <= said * (1 + 1e-6)


def test_settings_that_fit_with_room_are_proposed_where_there_are_some() -> None:
    """As of `plan`: here a fifth faster and tight is within the range of what fits with room."""
    model = open_model("zoo:llama-tiny,layers=2,seq=2048", 2, batch=8)
    request = build_request(
        MachineOptions(2, "a100-80gb", None, 1110 * 2**20, 0),
        StepOptions(runtime="fsdp"),
        SearchOptions(baselines=False),
    )
    given = replace(SLOW, batch=8, data=2, tensor=1, microbatches=2, zero_stage=3)
    found = tune(model, request, Configuration("hf", given, (), ()))
    assert {c.strategy.costs["fit"] for c in found.best} == {"yes"}


@pytest.mark.slow
def test_the_search_for_a_launcher_finds_the_best_of_its_degrees() -> None:
    options = {"devices": 8, "hardware": "a100-80gb", "batch": 32, "baselines": False}
    free = planner.plan(LLAMA, launcher="megatron", **options)
    for pins in ("pp=2", "tp=2", "cp=2", "tp=4,dp=2", "pp=2,tp=2,vpp=2", "zero=3", "pp=4,dp=2"):
        pinned = planner.plan(LLAMA, launcher="megatron", pins=pins, **options)
        assert free.costs["step_time_s"] <= pinned.costs["step_time_s"] * 1.002, pins


@pytest.mark.slow
def test_sums_that_megatron_hides_are_in_no_bound() -> None:
    """Tensor parallelism's backward sums run under the products for weights: bounds that count
    them would leave out the mesh that is best here."""
    model = "zoo:gpt,layers=30,hidden=4096,heads=32,seq=4096,vocab=51200"
    options = {"devices": 96, "hardware": "h100-sxm", "batch": 192, "baselines": False}
    free = planner.plan(model, launcher="megatron", **options)
    pinned = planner.plan(model, launcher="megatron", pins="dp=48,tp=2,zero=1", **options)
    assert free.costs["step_time_s"] <= pinned.costs["step_time_s"] * 1.001
    assert free.solver["bound_s"] <= pinned.costs["step_time_s"] * (1 + 1e-9)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("launcher", "pins", "less"), [("megatron", "ep=8,micro=8", 4), ("maxtext", "pp=4,micro=2", 4)]
)
def test_pinned_microbatches_of_a_launcher_are_whole_rows(
    launcher: str, pins: str, less: int
) -> None:
    """32 rows on eight replicas are four microbatches of a row each, not eight of half a row."""
    model = LLAMA if launcher == "maxtext" else "zoo:mixtral-tiny,layers=4,experts=8"
    options = {"devices": 8, "hardware": "a100-80gb", "batch": 32, "baselines": False}
    with pytest.raises(PlanError) as e:
        planner.plan(model, launcher=launcher, pins=pins, **options)
    assert e.value.code == "P035" and e.value.help == (f"micro={less}",)
    fewer = pins.rpartition("=")[0] + f"={less}"
    made = planner.plan(model, launcher=launcher, pins=fewer, **options)
    rows = hand_over(made, model, launcher).rows
    assert not any("microbatches" in row.reason for row in rows)


@pytest.mark.slow
def test_torchtitan_scatters_gradients_once_a_step_with_stages() -> None:
    """Its stages turn FSDP's reduction off until the last microbatch: gradients are whole till
    then, which took an eighth of the room in plans, and were scattered for each microbatch."""
    options = {"devices": 8, "hardware": "a100-80gb", "batch": 32, "baselines": False}
    made = planner.plan(LLAMA, launcher="torchtitan", pins="pp=2,tp=1,cp=1,micro=8", **options)
    assert made.techniques["zero_stage"] == 1
    once = made.costs["communication_bytes_per_device"]["reduce-scatter"]["data"]["payload"]
    held = made.costs["memory_breakdown_bytes"]["parameters"]
    assert once == pytest.approx(held, rel=0.5)
    assert not any("ZeRO" in row.reason for row in hand_over(made, LLAMA, "torchtitan").rows)
    flat = planner.plan(LLAMA, launcher="torchtitan", pins="pp=1", **options)
    assert flat.techniques["zero_stage"] in (2, 3)
    for pins in ("pp=1,zero=1", "pp=2,zero=2"):
        with pytest.raises(PlanError, match="P024"):
            planner.plan(LLAMA, launcher="torchtitan", pins=pins, **options)


@pytest.mark.parametrize(
    ("launcher", "pins", "why"),
    [
        ("hf", "pp=2", "has no such degree"),
        ("megatron", "fsdp=8", "zero=3 says the same"),
        ("maxtext", "schedule=1f1b,pp=2", "has GPipe"),
        ("torchtitan", "recompute=save:q,k", "has none, block"),
        ("megatron", "offload=optimizer", "has none"),
    ],
)
def test_pins_that_a_launcher_cannot_say_are_refused(launcher: str, pins: str, why: str) -> None:
    with pytest.raises(planner.PlanError) as raised:
        planner.plan(LLAMA, devices=8, hardware="a100-80gb", launcher=launcher, pins=pins)
    assert raised.value.code == "P024"
    assert why in " ".join([raised.value.what, *raised.value.help])


def test_a_plan_whose_rounding_is_dear_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    made = planner.plan(LLAMA, devices=8, hardware="a100-80gb", batch=8, pins="tp=8,micro=8,zero=0")
    made.save(plan)
    monkeypatch.setattr("planner.interop.price.DEAR", -0.5)
    code = main(["export", str(plan), "--model", LLAMA, "--to", "hf", "-o", str(out)])
    said = capsys.readouterr().err
    assert code == 2 and "P194" in said and not out.exists()
    assert f"plan {LLAMA} --devices 8 --hardware a100-80gb --batch 8 --for hf finds" in said


def staged_for_megatron(spec: str, pins: str) -> planner.Strategy:
    """A plan in stages on eight H100 that Megatron can say."""
    return planner.plan(
        spec,
        devices=8,
        hardware="h100-sxm",
        batch=64,
        launcher="megatron",
        pins=pins,
        baselines=False,
    )


def test_stages_of_unlike_numbers_of_layers_are_planned_and_written_for_megatron() -> None:
    """As 126 layers on 16 stages, in small: six on four, the ends hold one each."""
    spec = "zoo:llama-tiny,layers=6"
    found = staged_for_megatron(spec, "pp=4,dp=2")
    handed = hand_over(found, spec, "megatron")
    assert not handed.inexpressible
    assert "decoder_first_pipeline_num_layers: 1\n" in handed.text
    assert "decoder_last_pipeline_num_layers: 1\n" in handed.text


def test_chunks_of_unlike_numbers_of_layers_are_laid_out_for_megatron(tmp_path: Path) -> None:
    """Ten layers in eight chunks: priced by the fullest stage, read back as as many chunks, and
    written by no program of ours."""
    spec = "zoo:llama-tiny,layers=10"
    found = staged_for_megatron(spec, "pp=4,dp=2,vpp=2,micro=8")
    handed = hand_over(found, spec, "megatron", ".args")
    assert "--pipeline-model-parallel-layout 'Ett|tt|(t|)*5tL'" in handed.text
    assert "--num-virtual-stages-per-pipeline-rank" not in handed.text
    assert handed.rows[-1].cost == handed.rows[0].cost
    path = tmp_path / "mine.args"
    path.write_text(handed.text)
    assert read_configuration(path, 8).settings.virtual_stages == 2
    with pytest.raises(PlanError, match="10 repeated blocks do not divide into 4 stages of 2"):
        planner.emit(found, spec)


@pytest.mark.slow
def test_modules_of_mixtures_are_recomputed_and_written_for_megatron(tmp_path: Path) -> None:
    """A model of dense layers has no such modules, and the search does not try it."""
    mixture = "zoo:deepseek-tiny,layers=4,dense_layers=1"
    made = planner.plan(
        mixture,
        devices=8,
        batch=16,
        hardware="a100-80gb",
        pins="dp=4,ep=2,recompute=selective",
        launcher="megatron",
        baselines=False,
    )
    handed = hand_over(made, mixture, "megatron", ".args")
    assert "--recompute-granularity selective\n" in handed.text
    written = "--recompute-modules layernorm mla_up_proj moe_act mlp shared_experts\n"
    assert written in handed.text
    assert handed.rows[-1].cost == handed.rows[0].cost
    (tmp_path / "mine.args").write_text(handed.text)
    again = read_configuration(tmp_path / "mine.args", 8)
    assert again.settings.recompute == "block-keep" and not again.notes and not again.unread

    tried = {}
    request = build_request(
        MachineOptions(devices=8, hardware="a100-80gb"),
        StepOptions(launcher="megatron"),
        SearchOptions(),
    )
    for spec in (mixture, LLAMA):
        search = Search(open_model(spec, 8, batch=16), request)
        base = search.base(1)
        assert base is not None
        tried[spec] = search.offered.recomputes(base, search.offered.meshes()[0])
    assert tried == {mixture: ("none", "block-keep", "block"), LLAMA: ("none", "block")}


@pytest.mark.parametrize(
    ("modules", "recompute"),
    [
        ("[layernorm, moe_act]", "block-keep"),
        ("'moe_act,layernorm'", "block-keep"),
        ("[mlp, moe_act, layernorm]", "block-keep"),
        ("[mlp]", "block-keep"),
        ("[core_attn]", "none"),
        ("null", "none"),
        ("[]", "none"),
        ("[moe, layernorm]", "block"),
    ],
)
def test_modules_as_people_write_them(modules: str, recompute: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (
        "micro_batch_size: 2\nnum_moe_experts: 8\nrecompute_granularity: selective\n"
        f"recompute_modules: {modules}\n"
    )
    path.write_text(text)
    found = read_configuration(path, 8)
    assert found.settings.recompute == recompute and not found.unread
    path.write_text(text.replace("num_moe_experts: 8\n", ""))
    dense = read_configuration(path, 8).settings.recompute
    assert dense == ("block" if modules == "[mlp]" else recompute)
    path.write_text(
        "micro_batch_size: 2\nrecompute_granularity: selective\nrecompute_modules: layernorm\n"
    )
    assert read_configuration(path, 8).settings.recompute == "none"


def test_selective_recompute_is_priced_under_frameworks_alone(tmp_path: Path) -> None:
    """What emitted programs call so saves the results of collectives alone."""
    config, facts = tmp_path / "mine.toml", Facts(LLAMA, for_devices("a100-80gb", 8), 4)
    settings = Settings(batch=32, data=8, microbatches=2, length=2048, zero_stage=3)
    config.write_text(torchtitan.write_toml(replace(settings, recompute="block-keep"), facts))
    out = tmp_path / "x.json"
    call = ["import", str(config), "--model", LLAMA, *MACHINE, "--force", "-o", str(out)]
    assert main(call) == 0 and "selective recompute is priced as none" in out.read_text()
    assert Strategy.load(out).techniques["recompute"] == "none"
    assert main([*call, "--runtime", "fsdp"]) == 0
    assert Strategy.load(out).techniques["recompute"] == "block-keep"


def test_maxtext_is_planned_with_what_enters_blocks_on_the_host(tmp_path: Path) -> None:
    made = planner.plan(
        LLAMA,
        devices=8,
        batch=16,
        pins="dp=8,zero=3,recompute=block,offload=activations",
        launcher="maxtext",
        baselines=False,
    )
    handed = hand_over(made, LLAMA, "maxtext")
    assert "decoder_layer_input: 'offload'" in handed.text
    assert handed.rows[-1].cost == handed.rows[0].cost
    (tmp_path / "mine.yml").write_text(handed.text)
    assert read_configuration(tmp_path / "mine.yml", 8).settings.offload == ("activations",)
    with pytest.raises(PlanError, match="contradict"):
        planner.plan(LLAMA, devices=8, batch=16, pins="offload=optimizer", launcher="maxtext")


def test_ends_hold_what_full_stages_between_leave() -> None:
    """Megatron takes as many layers on all stages but the first and the last."""
    assert ends(126, 16) == (7, 7)
    assert ends(126, 8) == (15, 15)
    assert ends(61, 16) == (2, 3)
    assert ends(9, 8) is None  # six stages of two hold more than there are
    assert ends(7, 2) == (3, 4)


MIXTURE = "zoo:mixtral-8x7b,layers=2,hidden=256,heads=4,kv_heads=4,ff=512,vocab=1024,seq=512"
NODES = ("--devices", "8", "--hardware", "h100")


def _mixture(tmp_path: Path, exchanges: str) -> Path:
    """Megatron's file of a mixture whose experts are spread over all devices."""
    path, facts = tmp_path / "mine.yaml", Facts(MIXTURE, for_devices("h100", 8), 2)
    said = Settings(
        batch=32, data=1, expert=8, zero_stage=1, microbatches=1, length=512, exchanges=exchanges
    )
    path.write_text(megatron.write(said, facts))
    return path


@pytest.mark.parametrize(
    ("command", "runtime"),
    [
        ("import", "jax-shard_map"),
        ("import", "fsdp"),
        pytest.param("tune", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_exchanges_beside_kernels_are_priced_as_waiting_where_kernels_wait(
    command: str, runtime: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", MIXTURE, *NODES, "--runtime", runtime, "-o", str(tmp_path / "made.yaml"))
    assert main([command, str(_mixture(tmp_path, "beside")), *words]) == 0
    said = capsys.readouterr()
    assert "waiting for experts' rows: --runtime megatron has its price" in said.out + said.err
    assert "yours has no price" not in said.out


@pytest.mark.slow
def test_tune_finds_exchanges_beside_kernels_and_promises_their_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What differs in the overlap alone is found, and what is written says it either way: a file
    that it is merged into may have it on."""
    config, out = _mixture(tmp_path, "waiting"), tmp_path / "tuned.yaml"
    assert "overlap_moe_expert_parallel_comm: False" in config.read_text()
    assert main(["tune", str(config), "--model", MIXTURE, *NODES, "--json", "-o", str(out)]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert best["settings"].endswith("exchanges=beside")
    assert "overlap_moe_expert_parallel_comm: True" in out.read_text()
    made, runtime = tmp_path / "again.plan.json", ("--runtime", "megatron", "-o")
    assert main(["import", str(out), "--model", MIXTURE, *NODES, *runtime, str(made)]) == 0
    assert Strategy.load(made).costs["step_time_s"] == pytest.approx(best["step_time_s"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("launcher", ["hf", "levanter", "maxtext", "torchtitan"])
def test_exchanges_beside_kernels_are_rounded_and_each_rounding_is_priced(launcher: str) -> None:
    machine = {"devices": 8, "hardware": "h100", "batch": 32, "runtime": "megatron"}
    pins = Pins({"expert": (8,)}, {"exchanges": "beside"})
    made = hand_over(
        planner.plan(MIXTURE, pins=pins, baselines=False, **machine), MIXTURE, launcher
    )
    assert "kernels wait for experts' rows" in [row.reason for row in made.rows]
    assert all(row.cost is not None for row in made.rows)
