"""Settings of other launchers: written and read back unchanged, priced through pins, unknown and
contradictory keys told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.execution.techniques import MAX_ZERO_STAGE
from planner.interop.keys import Keys
from planner.interop.launchers import hf, levanter, maxtext, megatron, torchtitan
from planner.interop.price import forms_of, hand_over, read_configuration
from planner.interop.settings import Facts, Rounds, Settings
from planner.interop.tables import load
from planner.machine.topology import for_devices
from planner.pins.launcher_space import SPACES
from planner.pins.pins import parse_pins
from planner.pricing.frameworks.selective import DENSE, LATENTS, NORMS, ROUTED, SHARED
from planner.strategy.diff import compare
from planner.strategy.strategy import Strategy

LLAMA = "zoo:llama-tiny"
ALONE = Settings(16, data=8)
"""Data parallelism alone: every form says it as it is, those that count tokens with a length."""
STYLES = (("q", min(hf.CUTS)),)
READERS = (hf, levanter, maxtext, megatron, torchtitan)
FORMS = [
    *((m, m.SUFFIX) for m in READERS),
    *((m, suffix) for m in READERS for suffix in forms_of(m)),
]


MODULES = ((), (NORMS, ROUTED), (NORMS, LATENTS), (NORMS, LATENTS, ROUTED, DENSE, SHARED))
"""Of dense models, of mixtures, with attention over latents or without."""


@st.composite
def plans(draw: st.DrawFn) -> tuple[Settings, int]:
    """Settings that a plan of the planner can have, and the blocks of its model."""
    stage, data, expert, sequence, model = (
        draw(st.sampled_from(sizes))
        for sizes in ((1, 2, 4), (1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2, 4, 8))
    )
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "interleaved"))) if stage > 1 else ""
    micro = draw(st.sampled_from((2, 3, 4, 8, 16) if stage > 1 else (1, 2, 3, 8)))
    batch = data * expert * micro * draw(st.integers(1, 3)) * draw(st.sampled_from((1, 4)))
    s = Settings(
        batch,
        stage,
        data,
        expert,
        sequence,
        model,
        micro,
        draw(st.integers(0, MAX_ZERO_STAGE[schedule] if schedule else 3)),
        draw(st.sampled_from(("none", "block", "block-keep"))),
        schedule,
        model > 1 and draw(st.booleans()),
        draw(st.sampled_from((0, 128))),
        draw(st.integers(2, 4)) if schedule == "interleaved" else 1,
        exchanges=draw(st.sampled_from(("waiting", "beside"))),
    )
    return s, stage * draw(st.integers(1, 3))


def through(
    launcher: ModuleType, s: Settings, facts: Facts, folder: Path, suffix: str = ""
) -> Settings:
    """Written to a file and read back; nothing is left unread."""
    path = folder / f"settings{suffix or launcher.SUFFIX}"
    text = forms_of(launcher).get(suffix, launcher.write)(s, facts)
    path.write_text(text)
    behind = text.partition("The program's: ")[2].partition("\n")[0].split()  # accelerate's
    found = read_configuration(path, s.devices, overrides=behind, layers=lambda: facts.layers)
    notes = tuple(n for n in found.notes if not (behind and n.startswith("no tp_plan")))
    assert (found.launcher, notes, found.unread) == (launcher.NAME, (), ())
    return found.settings


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("launcher", "suffix"), FORMS, ids=[f"{m.NAME}{suffix}" for m, suffix in FORMS]
)
def test_export_then_import_is_the_identity(
    launcher: ModuleType, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, seen = tmp_path_factory.mktemp("settings"), {"same": 0, "rounded": 0}

    @settings(max_examples=150, deadline=None)
    @example((ALONE, 4), STYLES, (), "looped")
    @example((replace(ALONE, length=128), 4), STYLES, (), "written-out")
    @given(
        plans(),
        st.dictionaries(st.text(min_size=1), st.sampled_from(sorted(hf.CUTS)), min_size=1).map(
            lambda d: tuple(d.items())
        ),
        st.sampled_from(MODULES),
        st.sampled_from(("looped", "written-out")),
    )
    def holds(
        drawn: tuple[Settings, int],
        styles: tuple[tuple[str, str], ...],
        modules: tuple[str, ...],
        blocks: str,
    ) -> None:
        s, layers = drawn
        s = replace(s, blocks=blocks) if SPACES[launcher.NAME].loops else s
        facts = Facts("model", for_devices("h100-sxm", s.devices), layers, modules=modules)
        rounds = Rounds(s)
        try:
            launcher.round_off(rounds, facts)
        except PlanError as e:
            assert e.code == "P192"
            return
        if launcher is hf and suffix == ".json" and s.tensor > 1:
            rounds.now = replace(rounds.now, styles=styles)
        try:
            last = through(launcher, rounds.now, facts, folder, suffix)
        except PlanError as e:  # a form may have no word for what another has
            assert e.code == "P192"
            return
        if rounds.now.blocks:
            way = "written-out" if rounds.now.written_out else "looped"
            rounds.now = replace(rounds.now, blocks=way)
        assert (
            last == rounds.now
            and last.pins() == rounds.now.pins()
            and last.devices == s.devices
            and last.batch == s.batch
        )
        seen["rounded" if rounds.steps else "same"] += 1
        again = Rounds(last)
        launcher.round_off(again, facts)
        assert again.steps == [], "what was rounded is rounded no further"

    holds()
    assert seen["same"] and seen["rounded"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("to", "key"), [("maxtext", "scan_layers"), ("levanter", "scan_layers")])
def test_layers_are_scanned_unless_a_file_says_otherwise(to: str, key: str, tmp_path: Path) -> None:
    """As these launchers do by themselves: plans for them loop, and so do prices of their files."""
    made = planner.plan(LLAMA, devices=8, batch=8, launcher=to, baselines=False)
    assert made.techniques.get("blocks", "looped") == "looped"
    apart = planner.plan(
        LLAMA, devices=8, batch=8, pins="dp=8,zero=0,blocks=written-out", baselines=False
    )
    handed = hand_over(apart, LLAMA, to)
    assert f"{key}: false" in handed.text.lower() and len(handed.rows) == 2
    planned, priced = (row.cost for row in handed.rows)
    assert planned is not None and priced is not None
    assert priced["step_time_s"] == pytest.approx(planned["step_time_s"])
    path = tmp_path / "c.yaml"
    path.write_text(handed.text)
    assert read_configuration(path, 8).settings.written_out
    path.write_text(handed.text.lower().replace(f"{key}: false", f"{key}: true"))
    assert not read_configuration(path, 8).settings.written_out
    again = hand_over(made, LLAMA, to)
    path.write_text(again.text.replace("none", "full") + f"{key}: false\n" * (to == "maxtext"))
    found = read_configuration(path, 8)
    assert not found.settings.written_out
    assert (to == "maxtext") == any("priced in a loop" in note for note in found.notes)


@pytest.mark.parametrize(
    ("called", "name"),
    [("accelerate", "hf"), ("NeMo", "megatron"), ("Megatron_Bridge", "megatron")],
)
def test_other_names_of_launchers_are_known(
    called: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (
        f"{LLAMA} --devices 8 --for {called}",
        f"import a.yml --model {LLAMA} --devices 8 --from {called}",
    ):
        assert main(line.split()) == 2
        assert f"did you mean {name!r}?" in capsys.readouterr().err
    assert main(f"{LLAMA} --devices 8 --for deepspeed".split()) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_pins_hold_every_degree_and_technique() -> None:
    s = Settings(64, 2, 4, 1, 1, 2, 4, 1, "block", "1f1b", True, 128)
    assert s.pins() == parse_pins(
        "pp=2,dp=4,tp=2,zero=1,recompute=block,micro=4,schedule=1f1b,tensor=megatron-sp,"
        "offload=none,copies=1,bucket=none,exchanges=waiting"
    )
    assert Settings(8).pins() == parse_pins(
        "dp=1,zero=0,recompute=none,micro=1,offload=none,copies=1,bucket=none,exchanges=waiting"
    )


@pytest.fixture(scope="module")
def planned() -> Strategy:
    return planner.plan(
        LLAMA,
        devices=8,
        batch=16,
        pins="tp=2,dp=4,zero=2,micro=2,recompute=block-keep,tensor=megatron",
        baselines=False,
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("megatron", ["recompute"]),
        ("maxtext", ["recompute", "ZeRO-1"]),
        ("torchtitan", ["recompute", "positions"]),
        ("hf", ["recompute"]),
    ],
)
def test_every_rounding_is_said_and_priced(to: str, said: list[str], planned: Strategy) -> None:
    made = hand_over(planned, LLAMA, to)
    assert made.rows[0].cost is not None and made.rows[0].cost["step_time_s"] == pytest.approx(
        planned.cost.step_time_s, rel=1e-5
    )
    assert [any(word in row.reason for row in made.rows[2:]) for word in said] == [True] * len(
        said
    ) and len(made.rows) == 2 + len(said)
    assert all(row.cost is not None and row.cost["step_time_s"] > 0 for row in made.rows)


@pytest.mark.slow
def test_a_weight_that_no_style_of_a_module_cuts_is_whole() -> None:
    """T5's head is its table, which has a style once."""
    model = "zoo:t5-tiny"
    pins = "tp=2,dp=4,zero=2,micro=2,tensor=megatron"
    made = hand_over(
        planner.plan(model, devices=8, batch=16, pins=pins, baselines=False), model, "hf"
    )
    assert "no style" in made.rows[-1].reason and made.rows[-1].cost is not None


@pytest.mark.slow
def test_the_price_of_a_handed_over_plan_is_that_of_its_import(
    planned: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file, mine, out = (
        str(tmp_path / "plan.json"),
        str(tmp_path / "mine.json"),
        str(tmp_path / "parallel.yaml"),
    )
    planned.save(plan_file)
    assert main(["export", plan_file, "--to", "megatron", "-o", out]) == 0
    shown = capsys.readouterr().out
    assert "as planned" in shown and "recompute runs a block's collectives again" in shown
    last = hand_over(planned, LLAMA, "megatron").rows[-1].cost
    assert main(["import", out, "--model", LLAMA, "--devices", "8", "-o", mine]) == 0
    told = capsys.readouterr()
    assert "configuration parallel.yaml of megatron" in told.out and "plan diff" in told.err
    found = Strategy.load(mine)
    assert (
        last is not None
        and found.cost.step_time_s == pytest.approx(last["step_time_s"], rel=1e-5)
        and found.solver["name"] == "import"
        and found.solver["status"] == "feasible"
    )
    assert (
        dict(found.mesh_shape) == {"data": 4, "tensor": 2}
        and found.techniques["recompute"] == "block"
        and found.techniques["microbatches"] == 2
    )
    best = planner.plan(LLAMA, devices=8, batch=16)
    difference = compare(found, best)
    assert difference.causes == ("search",)
    saved, parts = difference.gain
    assert saved > 0 and saved == pytest.approx(sum(f.before - f.after for f in parts), rel=1e-3)
    best.save(tmp_path / "best.json")
    assert main(["diff", mine, str(tmp_path / "best.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "faster by" in text and "ranges" in text and ("overlap" in text)
    assert main(["import", out, "--model", LLAMA, "--devices", "8", "-o", mine, "--quiet"]) == 2
    assert "P053" in capsys.readouterr().err


def test_hf_styles_follow_the_layouts(planned: Strategy) -> None:
    table = json.loads(hand_over(planned, LLAMA, "hf").text)
    plan = table["tp_plan"]
    assert (
        plan["model.layers.*.self_attn.q_proj"] == "colwise"
        and plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    )
    assert (
        plan["model.layers.*.mlp.gate_proj"] == "colwise"
        and plan["model.layers.*.mlp.down_proj"] == "rowwise"
        and plan["lm_head"] == "colwise_gather_output"
    )
    assert table["parallelism_config"] == {
        "dp_replicate_size": 1,
        "dp_shard_size": 4,
        "cp_size": 1,
        "tp_size": 2,
    }
    assert (
        table["training_arguments"]["gradient_accumulation_steps"] == 2
        and table["training_arguments"]["per_device_train_batch_size"] == 2
    )


def test_hf_has_no_stages_and_no_expert_axis() -> None:
    rounds = Rounds(
        Settings(
            64, stage=2, data=2, expert=2, tensor=2, microbatches=4, schedule="1f1b", positions=True
        )
    )
    hf.round_off(rounds, Facts("model", for_devices("h100-sxm", 16)))
    assert rounds.now == Settings(64, data=8, tensor=2, microbatches=4) and len(rounds.steps) == 3


LLAMA_PLAN = {
    f"layers.*.{m}": style
    for style, modules in (
        (
            "colwise",
            (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            ),
        ),
        ("rowwise", ("self_attn.o_proj", "mlp.down_proj")),
    )
    for m in modules
}
"""`base_model_tp_plan` of the library's Llama: named from below the base model, embedding and head
whole."""


def imported(folder: Path, table: dict[str, object], *options: str) -> Strategy:
    (folder / "tp.json").write_text(json.dumps(table))
    assert (
        main(
            [
                "import",
                str(folder / "tp.json"),
                "--model",
                LLAMA,
                "--devices",
                "8",
                "-o",
                str(folder / "mine.json"),
                "--force",
                "--quiet",
                *options,
            ]
        )
        == 0
    )
    return Strategy.load(folder / "mine.json")


def test_a_plan_by_module_cuts_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    table: dict[str, object] = {
        "base_model_tp_plan": LLAMA_PLAN,
        "distributed_config": {"tp_size": 2},
        "per_device_train_batch_size": 4,
    }
    own = imported(tmp_path, table)
    cut = {
        row["label"]: row["layout"]
        for row in own.tensors.values()
        if "label" in row and any(row["layout"])
    }
    assert cut == {
        f"model.layers.{k}.{p.removeprefix('layers.*.')}.weight": (
            [[], ["tensor"]] if style == "colwise" else [["tensor"], []]
        )
        for k in range(2)
        for p, style in LLAMA_PLAN.items()
    }
    assert (
        dict(own.mesh_shape) == {"data": 4, "tensor": 2}
        and own.workload["batch"] == 16
        and own.techniques["zero_stage"] == 0
    )
    whole = imported(
        tmp_path,
        {**table, "base_model_tp_plan": {p: s for p, s in LLAMA_PLAN.items() if "mlp" in p}},
    )
    assert not any(
        any(row["layout"]) for row in whole.tensors.values() if "attn" in row.get("label", "")
    )
    more = imported(
        tmp_path,
        {
            **table,
            "base_model_tp_plan": {
                **LLAMA_PLAN,
                "model.embed_tokens": "embedding_rowwise",
                "lm_head": "colwise_rep",
                "norm": "replicate",
            },
        },
    )
    assert {
        row["label"]: row["layout"]
        for row in more.tensors.values()
        if row.get("label") in ("model.embed_tokens.weight", "lm_head.weight")
    } == {"model.embed_tokens.weight": [["tensor"], []], "lm_head.weight": [[], ["tensor"]]}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.self_attn.q_prj": "colwise"}, "did you mean 'model.layers.*.self_attn.q_proj'"),
        ({"model.norm": "colwise"}, "no product"),
        ({"embed_tokens": "colwise"}, "is a table"),
        ({"layers.0.mlp.up_proj": "colwise"}, "a layer that is alike is not"),
        ({"self_attn": "colwise"}, "no module of the model"),
    ],
)
def test_a_plan_by_module_that_is_not_the_models(
    plan: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tp.json").write_text(json.dumps({"tp_plan": plan, "tp_size": 2}))
    assert (
        main(
            [
                "import",
                str(tmp_path / "tp.json"),
                "--model",
                LLAMA,
                "--devices",
                "8",
                "-o",
                str(tmp_path / "x.json"),
            ]
        )
        == 2
    )
    assert "error[P191]" in (err := capsys.readouterr().err) and said in err


PRICED = (
    "tp=2,dp=4,zero=2,micro=2,recompute=block-keep",
    "pp=2,tp=2,dp=2,micro=4,zero=1",
    "data=2,sequence=2,tensor=2,zero=3",
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("pins", PRICED)
@pytest.mark.parametrize("launcher", READERS, ids=lambda m: m.NAME)
def test_what_is_exported_is_imported_at_its_price(
    launcher: ModuleType, pins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The import is the last row of the export, and exported again the same text at the same
    price."""
    planned, text = str(tmp_path / "plan.json"), tmp_path / f"settings{launcher.SUFFIX}"
    planner.plan(LLAMA, devices=8, batch=16, pins=pins, baselines=False).save(planned)
    made = hand_over(Strategy.load(planned), LLAMA, launcher.NAME)
    text.write_text(made.text)
    assert (
        main(
            [
                "import",
                str(text),
                "--model",
                LLAMA,
                "--devices",
                "8",
                "-o",
                str(tmp_path / "mine.json"),
                "--quiet",
            ]
        )
        == 0
    )
    assert "note:" not in capsys.readouterr().err
    mine, last = Strategy.load(tmp_path / "mine.json"), made.rows[-1].cost
    assert last is not None and mine.costs == {
        **mine.costs,
        **{k: pytest.approx(v, rel=1e-5) for k, v in last.items() if isinstance(v, float)},
    }
    assert mine.costs["memory_per_device_bytes"] == last["memory_per_device_bytes"]
    again = hand_over(mine, LLAMA, launcher.NAME)
    assert again.text == made.text and again.rows[-1].cost is not None
    assert (
        again.rows[-1].cost["step_time_s"]
        == pytest.approx(last["step_time_s"], rel=1e-9)
        == again.rows[0].cost["step_time_s"]
    )  # type: ignore[index]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("launcher", "suffix"),
    [(m, suffix) for m, suffix in FORMS if suffix != m.SUFFIX and m is not hf],
    ids=[f"{m.NAME}{suffix}" for m, suffix in FORMS if suffix != m.SUFFIX and m is not hf],
)
def test_every_form_is_imported_at_its_price(
    launcher: ModuleType, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, from a file whose ending says the form."""
    planned, text = str(tmp_path / "plan.json"), str(tmp_path / f"settings{suffix}")
    planner.plan(LLAMA, devices=8, batch=16, pins=PRICED[1], baselines=False).save(planned)
    made = hand_over(Strategy.load(planned), LLAMA, launcher.NAME, suffix)
    last = made.rows[-1].cost
    Path(text).write_text(made.text)  # `plan export` refuses what costs so much more
    mine = str(tmp_path / "mine.json")
    assert main(["import", text, "--model", LLAMA, "--devices", "8", "-o", mine, "--quiet"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert last is not None
    assert Strategy.load(mine).cost.step_time_s == pytest.approx(last["step_time_s"], rel=1e-5)


def test_a_plan_of_inference_comes_back_from_hf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s = planner.plan(
        LLAMA,
        devices=4,
        batch=8,
        workload="infer",
        pins="tp=2,dp=2,tensor=megatron",
        baselines=False,
    )
    made = hand_over(s, LLAMA, "hf")
    (tmp_path / "tp.json").write_text(made.text)
    argv = [
        "import",
        str(tmp_path / "tp.json"),
        "--model",
        LLAMA,
        "--devices",
        "4",
        "-o",
        str(tmp_path / "x.json"),
        "--quiet",
        "--workload",
        "infer",
    ]
    assert main(argv) == 0
    last = made.rows[-1].cost
    assert last is not None and Strategy.load(
        tmp_path / "x.json"
    ).cost.step_time_s == pytest.approx(last["step_time_s"], rel=1e-5)
    table = json.loads(made.text)
    (tmp_path / "tp.json").write_text(
        json.dumps({**table, "gradient_checkpointing": True, "training_arguments": {}})
    )
    assert main([*argv, "--force"]) == 2 and "configuration of training" in capsys.readouterr().err


def test_degrees_within_and_between_domains() -> None:
    s = Settings(64, stage=2, data=4, tensor=4, microbatches=2, schedule="1f1b")
    text = maxtext.write(s, Facts("model", for_devices("h100-sxm", 32), 8))
    assert (
        "ici_tensor_parallelism: 4" in text
        and "ici_data_parallelism: 2" in text
        and "dcn_data_parallelism: 2" in text
        and "dcn_pipeline_parallelism: 2" in text
    )
    assert "num_layers_per_pipeline_stage: 4" in text


@pytest.mark.parametrize(
    ("launcher", "text", "note"),
    [
        (
            megatron,
            "micro_batch_size: 2\nrecompute_granularity: selective\n",
            "selective recompute is priced as none",
        ),
        (
            megatron,
            (
                "micro_batch_size: 2\npipeline_model_parallel_size: 2\nglobal_batch_size:"
                " 64\nnum_layers_per_virtual_pipeline_stage: 2\n"
            ),
            "interleaved",
        ),
        (
            megatron,
            "micro_batch_size: 2\ndata_parallel_sharding_strategy: optim\n",
            "says nothing without",
        ),
        (
            megatron,
            "micro_batch_size: 2\nrecompute_granularity: full\nrecompute_method: block\n",
            "every block",
        ),
        (megatron, "micro_batch_size: 2\nrampup_batch_size: [32, 32, 1000]\n", "rampup_batch_size"),
        (
            megatron,
            (
                "micro_batch_size: 2\npipeline_model_parallel_size: 2\nglobal_batch_size:"
                " 64\nuse_megatron_fsdp: true\ndata_parallel_sharding_strategy:"
                " optim_grads_params\n"
            ),
            "ZeRO-3 with stages",
        ),
        (megatron, "micro_batch_size: 2\noptimizer_cpu_offload: true\n", "left out: the state"),
        (megatron, "micro_batch_size: 2\nmtp_num_layers: 1\n", "multi-token prediction"),
        (
            megatron,
            (
                "micro_batch_size: 2\ntensor_model_parallel_size: 2\nexpert_model_parallel_size:"
                " 4\nexpert_tensor_parallel_size: 1\n"
            ),
            "expert_tensor_parallel_size 1 is priced as 2",
        ),
        (megatron, "micro_batch_size: 2\nrecompute_activations: true\n", "selective recompute"),
        (
            megatron,
            "micro_batch_size: 2\nrecompute_granularity: selective\nrecompute_modules: [moe]\n",
            "moe is priced as recompute of whole blocks",
        ),
        (
            megatron,
            (
                "micro_batch_size: 2\nnum_experts: 8\nrecompute_granularity:"
                " selective\nrecompute_modules: [layernorm, gdn_norm_out]\n"
            ),
            "gdn_norm_out has no price",
        ),
        (
            megatron,
            (
                "micro_batch_size: 2\nnum_experts: 8\nrecompute_granularity:"
                " selective\nrecompute_modules: [layernorm, gdn_norm_out]\n"
            ),
            "priced as with moe_act",
        ),
        *(
            (megatron, f"micro_batch_size: 2\noverlap_moe_expert_parallel_comm: true\n{more}", why)
            for more, why in (
                ("", "every rank has all experts"),
                ("expert_model_parallel_size: 4\nrecompute_granularity: full\n", "recomputed"),
                (
                    "expert_model_parallel_size: 4\npipeline_model_parallel_size: 2\n",
                    "do not interleave",
                ),
            )
        ),
        (
            maxtext,
            "ici_fsdp_parallelism: 8\noptimizer_memory_host_offload: true\ncustom_mesh: ''\n",
            "optimizer_memory_host_offload is left out",
        ),
        (torchtitan, "[training]\nlocal_batch_size = 4\nenable_cpu_offload = true\n", "left out"),
        (
            torchtitan,
            "[parallelism]\ndata_parallel_replicate_degree = 4\nexpert_parallel_degree = 4\n",
            "hybrid sharding",
        ),
        (
            torchtitan,
            (
                "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule ="
                " 'Interleaved1F1B'\npipeline_parallel_layers_per_stage = 4\n"
            ),
            "layers are not known: 2 virtual stages",
        ),
        (
            torchtitan,
            "[parallelism]\npipeline_parallel_degree = 2\nfsdp_reshard_after_forward = 'always'\n",
            "ZeRO-3 with stages",
        ),
        (
            torchtitan,
            (
                "[training]\nlocal_batch_size = 4\nglobal_batch_size ="
                " 32\n[parallelism]\npipeline_parallel_degree = 2\n"
            ),
            "2 rounds of the pipeline",
        ),
        (
            torchtitan,
            "[training]\nlocal_batch_size = 4\n[activation_checkpoint]\nmode = 'selective'\n",
            "selective recompute, option 2, is priced as none",
        ),
        (
            maxtext,
            "ici_fsdp_parallelism: 8\nremat_policy: custom\nmlpwo: disk\n",
            "mlpwo 'disk' is priced as 'remat'",
        ),
        (
            maxtext,
            "ici_tensor_parallelism: 2\nici_tensor_sequence_parallelism: 4\n",
            "tensor and tensor_sequence",
        ),
        (maxtext, "ici_fsdp_parallelism: 4\ndcn_pipeline_parallelism: 2\n", "ZeRO-3 with stages"),
        (hf, '{"tp_plan": "auto"}', "not as the library's plan"),
        (hf, '{"tp_size": 8, "per_device_train_batch_size": 1}', "no tp_plan by module"),
        (
            hf,
            '{"tp_plan": {"lm_head": "colwise"}, "tp_size": 1}',
            "says nothing where tp_size is 1",
        ),
    ],
)
def test_what_a_configuration_says_beyond_the_settings_is_a_note(
    launcher: ModuleType, text: str, note: str, tmp_path: Path
) -> None:
    path = tmp_path / f"c{'.toml' if launcher is torchtitan else launcher.SUFFIX}"
    path.write_text(text)
    assert any(note in said for said in read_configuration(path, 8, launcher.NAME).notes)


HYBRID = [
    (
        megatron,
        "micro_batch_size: 2\nuse_torch_fsdp2: true\nnum_distributed_optimizer_instances: 2\n",
        8,
    ),
    (torchtitan, "[parallelism]\ndata_parallel_replicate_degree = 2\n", 8),
    (
        torchtitan,
        (
            "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
            "context_parallel_degree = 2\ntensor_parallel_degree = 2\n"
        ),
        4,
    ),
    (maxtext, "ici_fsdp_parallelism: 8\ndcn_data_parallelism: 2\n", 8),
    (hf, '{"dp_replicate_size": 4, "dp_shard_size": 2, "tp_size": 2}', 4),
    (
        hf,
        (
            '{"distributed_type": "FSDP", "fsdp_sharding_strategy": "HYBRID_SHARD",'
            ' "per_device_train_batch_size": 1}'
        ),
        8,
    ),
    (
        levanter,
        (
            "trainer:\n  train_batch_size: 64\n  mesh:\n    axes: {replica: 2, data: -1}\n"
            "    param_mapping: {embed: data}\n"
        ),
        8,
    ),
]


@pytest.mark.parametrize(("launcher", "text", "group"), HYBRID)
def test_hybrid_sharding_is_sharding_in_groups(
    launcher: ModuleType, text: str, group: int, tmp_path: Path
) -> None:
    """Of 16 devices, eight a node: as many neighbours have one copy, tensor and context ranks among
    them."""
    path = tmp_path / f"c{'.toml' if launcher is torchtitan else launcher.SUFFIX}"
    path.write_text(text)
    found = read_configuration(path, 16, launcher.NAME, domain=8)
    assert found.settings.zero_group == group and found.settings.zero_stage > 0
    assert found.settings.pins().techniques["zero_group"] == group
    assert not any("hybrid" in note for note in found.notes)
    for suffix in (launcher.SUFFIX, *forms_of(launcher)):
        again = tmp_path / f"again{suffix}"
        said = replace(found.settings, length=found.settings.length or 8)
        facts = Facts("m", for_devices("h100-sxm", 16))
        again.write_text(forms_of(launcher).get(suffix, launcher.write)(said, facts))
        rows = ("per_device_train_batch_size=1",) if launcher is hf and suffix != ".json" else ()
        read = read_configuration(again, 16, launcher.NAME, domain=8, overrides=rows).settings
        assert (read.zero_group, read.zero_stage) == (group, found.settings.zero_stage), suffix


def test_a_group_keeps_its_copy_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the state of sharding over all 16, and of what is stored of parameters."""
    monkeypatch.chdir(tmp_path)
    text = "[training]\nlocal_batch_size = 2\n[parallelism]\ndata_parallel_replicate_degree = {}\n"

    def parts(copies: int) -> Mapping[str, float]:
        Path("c.toml").write_text(text.format(copies))
        call = ["import", "c.toml", "--model", "zoo:llama-tiny", "--devices", "16", "--quiet"]
        assert main([*call, "--runtime", "fsdp", "-o", "x.json", "--force"]) == 0
        return Strategy.load("x.json").costs["memory_breakdown_bytes"]

    whole, groups = parts(1), parts(2)
    assert groups["optimizer"] == pytest.approx(2 * whole["optimizer"], rel=0.02)
    assert groups["parameters"] == pytest.approx(2 * whole["parameters"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        (
            "c.yaml",
            "tensor_model_parallel_size: 3\nmicro_batch_size: 1\n",
            "P191",
            "does not divide 8 devices",
        ),
        ("c.yaml", "tensor_model_parallel_size: 2\n", "P191", "micro_batch_size is missing"),
        (
            "c.yaml",
            "a:\n  micro_batch_size: 1\nb:\n  micro-batch-size: 2\n",
            "P191",
            "contradict each other",
        ),
        ("c.yaml", "micro_batch_size: 1\nmicro_batch_size: 2\n", "P191", "is 1 and 2"),
        ("c.yaml", "micro_batch_size: 3\nglobal_batch_size: 32\n", "P191", "no multiple"),
        ("c.yaml", "micro_batch_size: yes\n", "P191", "no whole number"),
        ("c.yaml", "micro_batch_size: 1\nsequence_parallel: 3\n", "P191", "neither true nor false"),
        (
            "c.yaml",
            "micro_batch_size: 1\nexpert_model_parallel_size: 16\n",
            "P191",
            "does not divide the 8",
        ),
        (
            "c.yaml",
            "micro_batch_size: 1\nrecompute_granularity: all\n",
            "P191",
            "recompute_granularity",
        ),
        (
            "c.yaml",
            "micro_batch_size: 1\ndata_parallel_sharding_strategy: all\n",
            "P191",
            "data_parallel_sharding_strategy",
        ),
        ("c.yaml", "ici_fsdp_parallelism: 3\n", "P191", "do not multiply to 8 devices"),
        ("c.yaml", "ici_fsdp_parallelism: -1\nici_tensor_parallelism: -1\n", "P191", "are both -1"),
        (
            "c.yaml",
            "ici_fsdp_parallelism: 4\nici_autoregressive_parallelism: 2\n",
            "P191",
            "autoregressive_parallelism above 1",
        ),
        (
            "c.yaml",
            "ici_fsdp_parallelism: 8\nper_device_batch_size: none\n",
            "P191",
            "per_device_batch_size",
        ),
        ("c.yaml", "ici_fsdp_parallelism: 0\n", "P191", "= 0"),
        (
            "c.yaml",
            "ici_fsdp_parallelism: 8\nper_device_batch_size: 0.5\n",
            "P191",
            "does not divide",
        ),
        ("c.toml", "[parallelism]\ntensor_parallel_degree = 3\n", "P191", "is not 8 devices"),
        (
            "c.toml",
            "[training]\nlocal_batch_size = 3\nglobal_batch_size = 32\n",
            "P191",
            "no multiple",
        ),
        (
            "c.toml",
            "[parallelism]\nexpert_parallel_degree = 3\ntensor_parallel_degree = 1\n",
            "P191",
            "does not divide",
        ),
        (
            "c.toml",
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3\n",
            "P191",
            "no multiple",
        ),
        (
            "c.toml",
            "[parallelism]\ntensor_parallel_degree = 1\nfsdp_reshard_after_forward = 'maybe'\n",
            "P191",
            "fsdp_reshard_after_forward",
        ),
        (
            "c.toml",
            "[parallelism]\ntensor_parallel_degree = 1\n[activation_checkpoint]\nmode = 'some'\n",
            "P191",
            "mode",
        ),
        ("c.toml", "tensor_parallel_degree = \n", "P190", "is not TOML"),
        ("c.yaml", "a: [\n", "P190", "is not YAML"),
        ("c.yaml", "- 1\n", "P190", "no table"),
        ("c.yaml", "lr: 1\n", "P190", "torchtitan: it has 'lr'"),
        (
            "c.yaml",
            "micro_batch_size: 1\nici_fsdp_parallelism: 2\n",
            "P190",
            "keys of maxtext and megatron",
        ),
        ("none.yaml", "", "P190", "cannot read"),
        ("c.json", '{"tp_plan": {"a": "colwise"', "P190", "is not JSON"),
        ("c.json", "[" * 100_000, "P190", "is not JSON"),
        ("c.json", '["tp_plan"]', "P190", "no table"),
        ("c.json", '{"lr": 1}', "P190", "no key of"),
        (
            "c.json",
            '{"tp_plan": {"a": "colwise", "a": "rowwise"}}',
            "P191",
            "is 'colwise' and 'rowwise'",
        ),
        ("c.json", '{"tp_plan": {"a": "colwize"}}', "P191", "did you mean 'colwise'"),
        ("c.json", '{"tp_plan": {"a": "local_packed_rowwise"}}', "P191", "no layout for"),
        ("c.json", '{"tp_plan": {"a": {"style": ["colwise"]}}}', "P191", "no layout for"),
        ("c.json", '{"tp_plan": ["colwise"]}', "P191", "tp_plan is list"),
        (
            "c.json",
            '{"tp_plan": {"a": "colwise"}, "base_model_tp_plan": {"a": "rowwise"}}',
            "P191",
            "contradict each other",
        ),
        (
            "c.json",
            (
                '{"distributed_config": {"tp_size": 2}, "parallelism_config": {"tp_size": 4},'
                ' "tp_plan": {}}'
            ),
            "P191",
            "contradict each other",
        ),
        ("c.json", '{"tp_plan": {"a": "colwise"}, "tp_size": 3}', "P191", "is not 8 devices"),
        ("c.json", '{"tp_plan": {"a": "colwise"}, "tp_size": 16}', "P191", "is not 8 devices"),
        (
            "c.json",
            '{"dp_shard_size": 8, "reshard_after_forward": "maybe"}',
            "P191",
            "neither true nor false",
        ),
        (
            "c.json",
            '{"dp_shard_size": 8, "per_device_train_batch_size": NaN}',
            "P191",
            "no whole number",
        ),
        (
            "c.json",
            '{"dp_shard_size": 8, "gradient_accumulation_steps": 0}',
            "P191",
            "no whole number",
        ),
    ],
)
def test_contradictions_are_errors(
    name: str, text: str, code: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name != "none.yaml":
        path.write_text(text)
    with pytest.raises(PlanError) as e:
        read_configuration(path, 8)
    assert e.value.code == code and said in str(e.value)


@pytest.mark.parametrize(("kind", "text"), [("hf", "{}"), ("maxtext", '{"foo": 1, "bar": 2}')])
def test_a_file_of_which_nothing_is_read_is_no_configuration(
    kind: str, text: str, tmp_path: Path
) -> None:
    """Its launcher's defaults would be priced, as if the file said them."""
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="no key of .* is read") as e:
        read_configuration(path, 8, kind)
    assert e.value.code == "P190"


def test_a_pin_of_two_in_one_place_is_read_once_and_the_rest_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "MODEL_ARGS:\n  --tensor-model-parallel-size: 2\n  --micro-batch-size: 1\n  --lr: 1.0e-4\n "
        " --my-flag: true\nmicro_batch_size: 1\n"
    )
    found = read_configuration(path, 8)
    assert found.settings == Settings(4, data=4, tensor=2) and found.unread == (
        "MODEL_ARGS.--lr",
        "MODEL_ARGS.--my-flag",
    )


def test_each_network_of_maxtext_may_leave_one_axis_open(tmp_path: Path) -> None:
    """As base.yml does: fsdp within a node, data between nodes."""
    path = tmp_path / "c.yml"
    path.write_text(
        "dcn_data_parallelism: -1\nici_fsdp_parallelism: -1\nici_tensor_parallelism:"
        " 2\nper_device_batch_size: 1.0\nremat_policy: 'full'\n"
    )
    found = read_configuration(path, 64, domain=8)
    assert not found.notes and found.settings == Settings(
        64, data=32, tensor=2, zero_stage=3, zero_group=8, recompute="block", blocks="looped"
    )
    assert read_configuration(path, 8).notes == ()
    path.write_text("dcn_data_parallelism: 2\nici_fsdp_parallelism: 8\n")
    with pytest.raises(PlanError, match="12 of them on fast links"):
        read_configuration(path, 60, domain=12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("recompute", "lines"),
    [
        ("save_qkv_proj", "remat_policy: 'save_qkv_proj'\n"),
        ("minimal_with_context", "remat_policy: 'minimal_with_context'\n"),
        (
            "save:q,mlp_up",
            "remat_policy: 'custom'\nquery_proj: 'device'\nmlpwi_1: 'device'\nmlpwi: 'device'\n",
        ),
        ("none", "remat_policy: 'none'\n"),
        ("qkv_proj_offloaded", "remat_policy: 'qkv_proj_offloaded'\n"),
        ("minimal_offloaded", "remat_policy: 'minimal_offloaded'\n"),
        (
            "save:q,offload:context,mlp_up,offload=activations",
            "remat_policy: 'custom'\ndecoder_layer_input: 'offload'\nquery_proj: 'device'\n"
            "context: 'offload'\nmlpwi_1: 'offload'\nmlpwi: 'offload'\n",
        ),
    ],
)
def test_maxtext_saves_the_same_values(recompute: str, lines: str, tmp_path: Path) -> None:
    s = planner.plan(
        LLAMA, devices=8, batch=8, pins=f"dp=8,zero=3,recompute={recompute}", baselines=False
    )
    path = tmp_path / "c.yml"
    path.write_text(hand_over(s, LLAMA, "maxtext").text)
    assert lines in path.read_text()
    settings = read_configuration(path, 8).settings
    assert (settings.recompute, settings.offload) == (s.chosen.recompute, s.chosen.offload)
    assert settings.pins().techniques.get("offload", ()) == s.chosen.offload


def test_what_a_launcher_cannot_save_is_rounded_and_priced() -> None:
    s = planner.plan(
        LLAMA, devices=8, batch=8, pins="dp=8,zero=3,recompute=save:norm,q", baselines=False
    )
    there = {name: hand_over(s, LLAMA, name) for name in ("maxtext", "megatron")}
    assert "remat_policy: 'custom'\nquery_proj: 'device'\n" in there["maxtext"].text
    assert any("no value there is called as norm" in r.reason for r in there["maxtext"].rows)
    assert any("no value of them saved" in r.reason for r in there["megatron"].rows)


def test_aliases_and_depth_do_not_multiply(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(
        "a: &a {x: 1}\n"
        + "".join(
            f"{b}: &{b} {{p: *{a}, q: *{a}}}\n"
            for a, b in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst", strict=True)
        )
    )
    assert len(Keys(load(path)).names()) < 100


@pytest.mark.parametrize(
    ("to", "suffix", "others"),
    [
        ("torchtitan", ".yaml", ".py, .toml"),
        ("megatron", ".json", ".yaml, .yml, .sh, .args, .txt, .py"),
        ("maxtext", ".py", ".yaml, .yml, .sh"),
        ("hf", ".toml", ".json, .yaml, .yml"),
        ("levanter", ".sh", ".yaml, .yml"),
    ],
)
def test_an_ending_that_a_launcher_has_no_form_of_is_refused(
    to: str, suffix: str, others: str, planned: Strategy
) -> None:
    """Python in a file of YAML was read back as a configuration that says nothing."""
    with pytest.raises(PlanError, match=f"{to} has no settings in a file") as e:
        hand_over(planned, LLAMA, to, suffix)
    assert e.value.code == "P003"
    assert f"one of {others} " in e.value.help[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("to", "suffix"), [("maxtext", ".yaml"), ("levanter", ".yml")])
def test_yaml_ends_in_either_way(to: str, suffix: str, planned: Strategy) -> None:
    assert hand_over(planned, LLAMA, to, suffix).text == hand_over(planned, LLAMA, to).text


def test_a_plan_of_inference_goes_to_hf_alone() -> None:
    s = planner.plan(
        LLAMA, devices=4, batch=8, workload="infer", pins="tp=4,tensor=megatron", baselines=False
    )
    assert (
        json.loads(hand_over(s, LLAMA, "hf").text)["tp_plan"]["model.layers.*.mlp.down_proj"]
        == "rowwise"
    )
    with pytest.raises(PlanError, match="plan of inference"):
        hand_over(s, LLAMA, "megatron")


def test_a_plan_whose_devices_do_the_same_work_is_no_launcher_s() -> None:
    s = planner.plan(LLAMA, devices=4, batch=1, baselines=False)
    assert dict(s.mesh_shape) == {"replicated": 4}
    with pytest.raises(PlanError, match="its 4 devices do the same work") as e:
        hand_over(s, LLAMA, "megatron")
    assert e.value.code == "P192"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 30}, "every replica has as many rows"),
        ({"stage": 4, "microbatches": 2, "schedule": "1f1b"}, "only where they divide"),
    ],
)
def test_what_has_no_word_at_all(change: dict[str, object], said: str) -> None:
    s = replace(Settings(64, data=4), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=said) as e:
        maxtext.round_off(Rounds(s), Facts("model", for_devices("h100-sxm", s.devices), 6))
    assert e.value.code == "P192"


@pytest.mark.parametrize(
    ("argv", "text", "said"),
    [
        (["--batch", "64"], "", "leave --batch out"),
        (["--workload", "infer"], "", "configuration of training"),
        ([], "seq_length: 7\n", "rows of 7 tokens"),
        (["--from", "megatrn"], "", "did you mean 'megatron'"),
        (["--from", "maxtext"], "", "keys of megatron, none of maxtext"),
    ],
)
def test_import_says_what_does_not_go_together(
    argv: list[str], text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"micro_batch_size: 1\nglobal_batch_size: 16\n{text}")
    assert (
        main(
            [
                "import",
                str(path),
                "--model",
                LLAMA,
                "--devices",
                "8",
                "-o",
                str(tmp_path / "x.json"),
                *argv,
            ]
        )
        == 2
    )
    assert said in capsys.readouterr().err


def test_what_to_do_next_names_the_machine_and_the_runtime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hinted plan is held against this one: on the default hardware it would be another
    machine's."""
    path = tmp_path / "c.yaml"
    path.write_text("micro_batch_size: 1\nglobal_batch_size: 16\n")
    machine = ["--devices", "8", "--hardware", "a100", "--runtime", "megatron"]
    assert (
        main(
            [
                "import",
                str(path),
                "--model",
                LLAMA,
                "-o",
                str(tmp_path / "x.json"),
                "--quiet",
                *machine,
            ]
        )
        == 0
    )
    assert (
        "--devices 8 --hardware a100-80gb --batch 16 --runtime megatron" in capsys.readouterr().err
    )


def test_a_configuration_that_does_not_fit_is_priced_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("micro_batch_size: 1\nglobal_batch_size: 16\n")
    assert (
        main(
            [
                "import",
                str(path),
                "--model",
                LLAMA,
                "--devices",
                "8",
                "-o",
                str(tmp_path / "x.json"),
                "--memory-limit",
                "1MiB",
            ]
        )
        == 0
    )
    assert (
        "does not fit" in capsys.readouterr().err
        and Strategy.load(tmp_path / "x.json").cost.fit == "no"
    )


@pytest.mark.slow
def test_groups_of_a_plan_are_handed_over(tmp_path: Path) -> None:
    """Two copies, each over four neighbours: what MaxText and torchtitan say without rounding."""
    made = planner.plan(
        LLAMA, devices=8, batch=16, pins="dp=8,zero=3,zero_group=4,micro=1", baselines=False
    )
    for launcher in (maxtext, torchtitan, levanter, hf):
        suffix = ".toml" if launcher is torchtitan else launcher.SUFFIX
        rows = hand_over(made, LLAMA, launcher.NAME, suffix)
        path = tmp_path / f"c{suffix}"
        path.write_text(rows.text)
        assert read_configuration(path, 8, launcher.NAME).settings.zero_group == 4
        assert not any("groups" in row.reason for row in rows.rows)


@pytest.mark.parametrize(("optimizer", "said"), [("adamw", False), ("muon", True)])
def test_an_optimizer_that_is_not_written_is_said(optimizer: str, said: bool) -> None:
    """Settings are of layouts: who runs them with the launcher's own optimizer has another step
    and other bytes than the plan."""
    made = planner.plan(
        LLAMA, devices=4, batch=16, optimizer=optimizer, launcher="megatron", baselines=False
    )
    handed = hand_over(made, LLAMA, "megatron")
    assert bool(handed.to_set) == said
    assert (
        any(f"optimizer: the plan is priced with {optimizer}" in x for x in handed.to_set) == said
    )
