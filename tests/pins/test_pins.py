"""Pins: how they read, that they hold, and what is said of those that cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels.hardware.units import show_time
from planner.errors import PlanError
from planner.pins.pins import Pins, from_table, joined_pins, parse_pins
from planner.report.baselines import tuned_over
from planner.report.summary import summary
from planner.report.tables import comparison

GPT, TWO_LAYERS = "zoo:gpt2-small,layers=1", "zoo:gpt2-small,layers=2"


def test_short_form() -> None:
    pins = parse_pins("tp=8,dp=2,micro=4,zero=3,recompute=selective")
    assert pins.mesh == {"tensor": (8,), "data": (2,)}
    assert pins.techniques == {"microbatches": 4, "zero_stage": 3, "recompute": "block-keep"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("tp", "P020"),
        ("tp=x", "P020"),
        ("zero=7", "P020"),
        ("recompute=most", "P020"),
        ("micro=0", "P020"),
        ("a=b=c", "P020"),
        ("no/such/file.toml", "P020"),
    ],
)
def test_unreadable_pins(text: str, code: str) -> None:
    with pytest.raises(PlanError) as e:
        parse_pins(text)
    assert e.value.code == code


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mesh = 3", "mesh = 3 is no table"),
        ("techniques = []", "techniques = [] is no table"),
        ("forbid = 3", "forbid = 3 is no table"),
        ("[forbid]\nfactors = 's'", "no list of factors"),
        ("[mesh]\nmodel = true", "a size"),
        ("'*' = 3", "needs `split"),
        ("['*']\nsplit = 3", "needs `split"),
        ("['*']\nsplit = { n = 'model' }", "needs `split"),
        ("['*']\nlayout = ['model']", "needs `split"),
        ("['*']\nlayout = [[3]]", "needs `split"),
    ],
)
def test_files_of_another_shape_say_what_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    file.write_text(text)
    with pytest.raises(PlanError, match=re.escape(says)) as e:
        parse_pins(file)
    assert e.value.code == "P020"


@pytest.mark.parametrize("text", ["tp=4,tp=2", "tp=4,model=2", "micro=2,microbatches=4"])
def test_a_pin_has_one_value(text: str) -> None:
    with pytest.raises(PlanError, match="pinned twice"):
        parse_pins(text)
    with pytest.raises(PlanError, match="pinned twice"):
        parse_pins(joined_pins(text.split(",")))


def test_several_pins_are_one(tmp_path: Path) -> None:
    """In any order, short forms and files."""
    file = tmp_path / "pins.toml"
    file.write_text(
        '[mesh]\ntensor = 4\n[forbid]\nfactors = ["s"]\n["*.mlp"]\nlayout = [["data"]]\n'
    )
    both = joined_pins(["zero=1,micro=2", str(file), "tp=4"])
    assert isinstance(both, Pins) and both == joined_pins([str(file), "tp=4", "zero=1,micro=2"])
    assert both == replace(parse_pins(file), techniques=parse_pins("zero=1,micro=2").techniques)
    assert parse_pins(joined_pins(["tp=4", "sp=on", "tensor=4"])) == parse_pins("tp=4,sp=on")
    assert parse_pins(joined_pins(["recompute=save:q,k", "tp=2"])).mesh == {"tensor": (2,)}
    assert joined_pins([]) is None and joined_pins(["annotated"]) == "annotated"
    with pytest.raises(PlanError, match="tensor is pinned twice: 2, and 4 in .*pins.toml"):
        joined_pins(["tp=2", str(file)])


@pytest.mark.parametrize(
    ("text", "said"), [("stages=4", "did you mean 'stage'?"), ("mirco=2", "did you mean 'micro'?")]
)
def test_what_is_not_built_or_misspelt_makes_no_axis(text: str, said: str) -> None:
    with pytest.raises(PlanError) as e:
        parse_pins(text)
    assert e.value.code == "P020" and said in " ".join([str(e.value), *e.value.help])


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    file.write_text(
        "[mesh]\nmodel = { size = 2 }\n[techniques]\nzero_stage = 1\n[forbid]\nfactors ="
        ' ["s"]\n["*.mlp.*"]\nsplit = { n = ["tensor"] }\n'
    )
    pins = parse_pins(file)
    assert (
        pins.mesh == {"tensor": (2,)}
        and pins.forbidden_factors == {"s"}
        and list(pins.nodes) == ["*.mlp.*"]
    )
    file.write_text("[mesh\n")
    with pytest.raises(PlanError) as e:
        parse_pins(file)
    assert e.value.code == "P020"


def test_mesh_choices() -> None:
    pins = from_table({"mesh": {"tensor": [2, 4]}})
    assert pins.mesh_choices(8) == [{"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}]
    with pytest.raises(PlanError):
        pins.mesh_choices(7)


def node(text: str) -> str:
    """Id of the first node of the model that contains the text."""
    s = planner.plan(GPT, devices=4, batch=8, baselines=False)
    return next(i for i, row in s.nodes.items() if text in i and row["op"] == "MatMul")


def test_a_pinned_split_holds() -> None:
    name = node("mlp")
    split = {"n": ["tensor"]}
    s = planner.plan(
        GPT,
        devices=4,
        batch=8,
        mode="semi-auto",
        pins=from_table({"mesh": {"tensor": 2}, name: {"split": split}}),
        baselines=False,
    )
    assert s.nodes[name]["split"]["n"] == split["n"]
    assert {a["name"]: a["size"] for a in s.mesh} == {"data": 2, "tensor": 2}


@pytest.mark.slow
def test_axes_that_a_pin_does_not_name_are_free() -> None:
    """The pinned product shares its batch with the rest of the model instead of doing it twice."""
    name = node("mlp")
    free = planner.plan(GPT, devices=4, batch=8, pins="dp=2,tp=2", baselines=False)
    pinned = planner.plan(
        GPT,
        devices=4,
        batch=8,
        mode="semi-auto",
        pins=from_table({"mesh": {"tensor": 2}, name: {"split": {"n": ["tensor"]}}}),
        baselines=False,
    )
    assert [f for f, axes in pinned.nodes[name]["split"].items() if "data" in axes] == [
        f for f, axes in free.nodes[name]["split"].items() if "data" in axes
    ]
    assert pinned.cost.distinct_work == pytest.approx(free.cost.distinct_work)


def test_a_factor_pinned_whole_stays_whole() -> None:
    name = node("mlp")
    one = planner.plan(
        GPT,
        devices=4,
        batch=8,
        mode="semi-auto",
        pins=from_table({"mesh": {"tensor": 2}, name: {"split": {"n": ["tensor"]}}}),
        baselines=False,
    )
    factor = next(f for f, axes in one.nodes[name]["split"].items() if "data" in axes)
    table = {"mesh": {"tensor": 2}, name: {"split": {"n": ["tensor"], factor: []}}}
    s = planner.plan(
        GPT, devices=4, batch=8, mode="semi-auto", pins=from_table(table), baselines=False
    )
    assert factor not in s.nodes[name]["split"] and s.nodes[name]["split"]["n"] == ["tensor"]


def test_a_pin_may_say_something_else_than_the_axis_is_called() -> None:
    name = node("mlp")
    table = {"mesh": {"tensor": 2}, name: {"split": {"n": ["data"]}}}
    s = planner.plan(
        GPT, devices=4, batch=8, mode="semi-auto", pins=from_table(table), baselines=False
    )
    assert s.nodes[name]["split"]["n"] == ["data"]


def test_a_split_needs_only_one_mesh_that_can_follow_it() -> None:
    name = node("mlp")
    s = planner.plan(
        GPT,
        devices=4,
        batch=8,
        mode="semi-auto",
        pins=from_table({name: {"split": {"n": ["tensor"]}}}),
        baselines=False,
    )
    assert s.nodes[name]["split"]["n"] == ["tensor"]


def test_contradicting_pins_are_both_named() -> None:
    name = node("mlp")
    pins = from_table(
        {
            "mesh": {"tensor": 2},
            name: {"split": {"n": ["tensor"]}},
            name[:-1] + "*": {"split": {"k": ["tensor"]}},
        }
    )
    with pytest.raises(PlanError) as e:
        planner.plan(GPT, devices=4, batch=8, mode="semi-auto", pins=pins)
    assert e.value.code == "P024" and name in str(e.value) and name[:-1] + "*" in str(e.value)


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"no.such.node": {"split": {"n": ["tensor"]}}}, "P023"),
        ({"mesh": {"tensor": 3}}, "P022"),
        ({"techniques": {"microbatches": 3}}, "P035"),
    ],
)
def test_impossible_pins(table: dict, code: str) -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(GPT, devices=4, batch=8, mode="semi-auto", pins=from_table(table))
    assert e.value.code == code


def test_a_factor_that_does_not_exist() -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(
            GPT,
            devices=4,
            batch=8,
            mode="semi-auto",
            pins=from_table(
                {"mesh": {"tensor": 4}, node("mlp"): {"split": {"zz": ["other"], "n": ["tensor"]}}}
            ),
        )
    assert e.value.code == "P025"
    assert [h.partition(":")[0] for h in e.value.help] == [
        "the mesh has no axis 'other'",
        "the operator has no factor 'zz'",
    ]


@pytest.mark.parametrize(
    ("pins", "nodes", "help"),
    [
        (
            "sequence=4,dp=2",
            {"*Attention": {"split": {"g": ["sequence"]}}},
            "'g' is not cut into 4 by sequence: it is into 2",
        ),
        (
            "sequence=4,dp=2",
            {"*Attention": {"split": {"t": ["sequence"]}}},
            "'t' is not cut into 4 by sequence: it stays whole",
        ),
        (
            "tp=4,dp=2",
            {"*q_proj.weight": {"layout": [["tensor"], ["tensor"]]}},
            "`plan ops MODEL` prints the factors",
        ),
        (
            "tp=4,dp=2",
            {"zzz.qqq": {"split": {"n": ["tensor"]}}},
            "`plan ops MODEL` prints the names",
        ),
        ("dp=8,micro=3", {}, "--batch 33, or micro=1"),
        ("pp=2,micro=4,schedule=gpipe,zero=2", {}, "schedule=1f1b"),
        ("pp=2,fsdp=2,tp=2,micro=4", {}, "dp=2,zero=2"),
        ("pp=4,micro=1", {}, "micro=4"),
        ("pp=2,micro=1,virtual=2", {}, "micro=2"),
    ],
)
def test_what_cannot_be_comes_with_a_next_step(pins: str, nodes: dict, help: str) -> None:
    both = replace(parse_pins(pins), nodes=nodes)
    with pytest.raises(PlanError) as e:
        planner.plan("zoo:llama-tiny,layers=4", devices=8, batch=32, pins=both, baselines=False)
    assert any(help in h for h in e.value.help)


def test_tensor_pin_cuts_columns_and_rows_as_megatron_does() -> None:
    """Two all-reduces of [rows, positions, features] forward and two backward in each block; with
    positions they become gathers and scatters of the same bytes."""

    def traffic(kind: str) -> dict[str, dict[str, dict[str, float]]]:
        s = planner.plan(
            "zoo:llama3-8b,layers=2",
            devices=4,
            batch=16,
            baselines=False,
            pins=f"dp=2,tp=2,micro=4,zero=0,recompute=none,tensor={kind}",
        )
        cut = {
            row["label"]: row["layout"]
            for row in s.tensors.values()
            if row.get("label", "").startswith("model.layers.0.")
        }
        assert cut["model.layers.0.self_attn.q_proj.weight"] == [[], ["tensor"]] and cut[
            "model.layers.0.mlp.down_proj.weight"
        ] == [["tensor"], []]
        assert all(
            ["tensor"] not in row["layout"][1:-1] or kind == "megatron-sp"
            for row in s.tensors.values()
            if len(row["shape"]) == 3
        )
        found: dict[str, dict[str, dict[str, float]]] = s.costs["communication_bytes_per_device"]
        return found

    plain, positions = traffic("megatron"), traffic("megatron-sp")
    block = 16 // 2 * 8192 * 4096 * 2  # bfloat16: half of the rows, positions, features
    assert plain["all-reduce"]["tensor"]["payload"] >= 2 * 4 * block
    assert (
        positions["all-gather"]["tensor"]["payload"] >= 2 * 4 * block
        and positions["all-reduce"].get("tensor", {"payload": 0})["payload"] < block
    )


def test_tensor_pin_in_a_file_and_its_words(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    file.write_text('[mesh]\nmodel = 2\n[techniques]\ntensor = "megatron"\n')
    assert (
        parse_pins(file) == parse_pins("tp=2,tensor=megatron")
        and parse_pins(file).tensor == "megatron"
        and parse_pins("tp=2").tensor == "any"
    )
    with pytest.raises(PlanError, match="one of any, megatron, megatron-sp"):
        parse_pins("tp=2,tensor=columns")


def test_chunks_that_are_not_tried_are_named_where_they_divide() -> None:
    with pytest.raises(
        PlanError, match="do not divide into 2 stages of 2 or 4 virtual stages"
    ) as e:
        planner.plan(
            "zoo:gpt-tiny,layers=6",
            devices=2,
            batch=8,
            pins="pp=2,schedule=interleaved",
            baselines=False,
        )
    assert e.value.code == "P068" and e.value.help[0] == "virtual=3"


def test_experts_are_divided_of_a_model_that_has_some() -> None:
    options = {"devices": 2, "batch": 8, "baselines": False}
    with pytest.raises(PlanError, match="ep=2 divides experts, and the model has none") as e:
        planner.plan("zoo:gpt-tiny", pins="ep=2", **options)
    assert e.value.code == "P023" and e.value.help == ("tp=2 or dp=2 cuts what there is",)
    planner.plan("zoo:gpt-tiny", pins="ep=1,tp=2", **options)
    planner.plan("zoo:mixtral-tiny", pins="ep=2", **options)


def test_too_many_stages_come_with_as_many_as_there_may_be() -> None:
    with pytest.raises(PlanError, match="the model has 6 repeated blocks") as e:
        planner.plan("zoo:gpt-tiny,layers=6", devices=8, batch=8, pins="pp=8", baselines=False)
    assert e.value.code == "P068" and e.value.help[0] == "pp=4"
    planner.plan("zoo:gpt-tiny,layers=6", devices=8, batch=8, pins="pp=4", baselines=False)


def test_a_baseline_that_keeps_the_pins_may_be_the_plan() -> None:
    """Stages, columns and replicas of Megatron's kind keep these pins, and the search, content
    after so many tries, does not come to them by itself."""
    made = planner.plan(
        "zoo:ssm-tiny", devices=8, hardware="cpu", batch=8, pins="micro=4,recompute=block"
    )
    kept = {
        k: row
        for k, row in made.baselines.items()
        if row["microbatches"] == 4 and row["recompute"] == "block"
    }
    assert "megatron" in kept
    assert all(
        made.costs["step_time_s"] <= row["step_time_s"] * (1 + 1e-3) for row in kept.values()
    )
    assert "do not keep the pins" not in str(made)


def test_a_summary_says_that_faster_baselines_do_not_keep_the_pins() -> None:
    made = planner.plan("zoo:gpt-tiny", devices=2, batch=64, pins="sequence=2")
    assert made.baselines["data_parallel"]["step_time_s"] < made.costs[
        "step_time_s"
    ] and "do not keep the pins" in " ".join(str(made).split())
    assert "do not keep the pins" in " ".join(comparison([("dp", made)], 120, False).split())


def test_of_a_list_of_sizes_those_that_lie_on_the_links_are_left(tmp_path: Path) -> None:
    """Two nodes of six: an axis of 4 would lie across them, one of 6 does not."""
    path = tmp_path / "p.toml"
    path.write_text("[mesh]\nmodel = [4, 6]\n")
    assert dict(
        planner.plan("zoo:gpt-tiny", devices=12, batch=24, pins=path, baselines=False).mesh_shape
    ) == {"data": 2, "tensor": 6}
    path.write_text("[mesh]\nmodel = 4\n")
    with pytest.raises(PlanError, match="P015"):
        planner.plan("zoo:gpt-tiny", devices=12, batch=24, pins=path)


@pytest.mark.slow
def test_pinned_stages_leave_the_other_axes_to_the_search() -> None:
    assert parse_pins("pp=2").mesh_choices(8) == [
        {"stage": 2, "data": 4},
        {"stage": 2, "data": 2, "tensor": 2},
    ]
    assert parse_pins("pp=8").mesh_choices(8) == [{"stage": 8}]
    step = {
        pins: (
            planner.plan(TWO_LAYERS, devices=8, batch=16, pins=pins, baselines=False).costs[
                "step_time_s"
            ]
        )
        for pins in ("pp=2", "pp=2,dp=4", "pp=2,dp=2,tp=2")
    }
    assert step["pp=2"] <= min(step.values()) * (1 + 1e-3)


def test_a_pinned_schedule_means_stages() -> None:
    made = planner.plan("zoo:gpt-tiny,layers=4", devices=8, batch=16, pins="schedule=gpipe")
    assert made.techniques["schedule"] == "gpipe" and dict(made.mesh_shape)["stage"] > 1
    assert (
        "data_parallel" in made.baselines and "stage" not in made.baselines["data_parallel"]["mesh"]
    )


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (
            '[techniques]\nschedule = "gpipe"\n[mesh]\ndata = 8',
            {},
            ["schedule = 'gpipe'", "a mesh of data"],
        ),
        (
            "[techniques]\nvirtual = 2\n[mesh]\nstage = 1\ndata = 8",
            {},
            ["virtual = 2", "stage, data"],
        ),
        (
            '[techniques]\nschedule = "1f1b"',
            {"mode": "data-parallel"},
            ["schedule = '1f1b'", "leaves no pipeline stages"],
        ),
        ("[techniques]\nzero_stage = 0\nzero_group = 4", {}, ["zero_stage = 0", "zero_group = 4"]),
        (
            '[mesh]\nmodel = 8\n[forbid]\nfactors = ["n"]\n["*c_fc*"]\nsplit = { n = ["tensor"] }',
            {},
            ["[forbid] n", "'*c_fc*'"],
        ),
    ],
)
def test_pins_that_contradict_each_other_are_named(
    text: str, options: dict, says: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as e:
        planner.plan("zoo:gpt-tiny,layers=4", devices=8, batch=16, pins=path, **options)
    assert e.value.code == "P024" and all(s in str(e.value) for s in says)


@pytest.mark.parametrize(
    "pins", ["zero=3", "zero_group=4", "recompute=block", "micro=4", "virtual=2"]
)
def test_what_training_alone_does_is_no_pin_of_inference(pins: str) -> None:
    """Four microbatches used to price a quarter of the batch."""
    with pytest.raises(PlanError, match="P024.*inference has no backward pass"):
        planner.plan("zoo:gpt-tiny", devices=8, batch=16, workload="infer", pins=pins)
    neutral = "zero=0,recompute=none,micro=1"
    assert (
        planner.plan(
            "zoo:gpt-tiny", devices=2, batch=4, workload="infer", pins=neutral, baselines=False
        ).techniques["microbatches"]
        == 1
    )


def test_the_pin_that_stands_in_the_way_is_quoted_with_a_price_that_holds() -> None:
    """Replicas with all of the optimizer's state on each device do not fit; with the state cut they
    do."""
    common: dict[str, Any] = {"devices": 4, "batch": 8, "baselines": False}
    with_it, without = (
        planner.plan(GPT, **common, pins=f"dp=4,offload=none,zero={z}", objective="memory").costs[
            "memory_per_device_bytes"
        ]
        for z in (0, 2)
    )
    limit = (with_it + without) // 2
    assert without < limit < with_it
    with pytest.raises(PlanError, match="P021") as e:
        planner.plan(GPT, **common, pins="dp=4,offload=none,zero=0", memory_limit_bytes=limit)
    quoted = next(h for h in e.value.help if h.startswith("without pin"))
    pin = re.match(r"without pin (\w+) = (\S+) it fits", quoted)
    assert pin is not None
    left = {
        "data": "offload=none,zero=0",
        "offload": "dp=4,zero=0",
        "zero_stage": "dp=4,offload=none",
    }[pin[1]]
    fits = planner.plan(GPT, **common, pins=left, memory_limit_bytes=limit)
    assert (
        f"re-priced: {show_time(fits.costs['step_time_s'])}" in quoted
        and fits.costs["memory_per_device_bytes"] <= limit
    )


def test_short_names_of_axes_mean_the_same_in_a_file(tmp_path: Path) -> None:
    """`pp = 2` used to be an axis of that name, and data over it."""
    short, full = tmp_path / "short.toml", tmp_path / "full.toml"
    text = (
        '[mesh]\n{0} = 2\n{1} = 2\n{2} = {{ size = 2, level = "node" }}\n["*mlp*"]\nsplit = {{ n ='
        ' ["{2}"] }}\n["x"]\nlayout = [["{1}"], ["{2}"], []]\n'
    )
    short.write_text(text.format("pp", "dp", "tp"))
    full.write_text(text.format("stage", "data", "tensor"))
    assert parse_pins(short) == parse_pins(full) and parse_pins(full).mesh == {
        "stage": (2,),
        "data": (2,),
        "tensor": (2,),
    }
    short.write_text("[mesh]\npp = 2\ndp = 4\n")
    assert parse_pins(short) == parse_pins("pp=2,dp=4")
    assert planner.plan(
        TWO_LAYERS, devices=8, batch=16, pins=short, baselines=False
    ).mesh_shape == (("stage", 2), ("data", 4))
    for wrong, says in (
        ("[mesh]\ndp = 2\ndata = 4\n", "both 'dp' and 'data'"),
        ("[techniques]\nmicro = 2\n", "did you mean 'microbatches'"),
        ("mesh = 3\n", "no table"),
        ('[mesh]\ndp = 2\n["x"]\nsplit = 3\n', "'x' needs"),
        ('[mesh]\ndp = 2\n["x"]\nsplit = { n = "dp" }\n', "'x' needs"),
    ):
        short.write_text(wrong)
        with pytest.raises(PlanError, match="P020") as e:
            parse_pins(short)
        assert says in f"{e.value} {e.value.help}", wrong


@pytest.mark.parametrize(
    ("devices", "pins", "mesh"),
    [
        (4, "pp=1,tp=1,dp=4", {"data": 4, "tensor": 1}),
        (1, "pp=1", {"data": 1}),
        (4, "pp=1,dp=2", {"data": 2, "replicated": 2}),
    ],
)
def test_one_stage_is_no_pipeline(devices: int, pins: str, mesh: dict[str, int]) -> None:
    """It used to be an axis of one device, in files that nothing could read again."""
    made = planner.plan("zoo:gpt-tiny", devices=devices, batch=8, pins=pins, baselines=False)
    assert dict(made.mesh_shape) == mesh
    assert planner.emit(made, "zoo:gpt-tiny")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "each tuned over microbatches, recompute and ZeRO stage"),
        (
            {"pins": "micro=2"},
            "each tuned over recompute and ZeRO stage, with microbatches as pinned",
        ),
        (
            {"pins": "micro=2,recompute=block,zero=1"},
            "each tuned over ZeRO stage, with microbatches and recompute as pinned",
        ),
        (
            {"devices": 1, "batch": 2, "pins": "micro=2,recompute=none"},
            "with microbatches and recompute as pinned",
        ),
        ({"workload": "infer"}, ""),
    ],
)
def test_the_summary_says_what_baselines_were_tuned_over(
    options: dict[str, Any], says: str
) -> None:
    made = planner.plan(TWO_LAYERS, **{"devices": 4, "batch": 8, **options})
    assert tuned_over(made) == says
    assert "tie: too close" in summary(made, 200)
    pinned = made.provenance.get("pins", {}).get("techniques", {})
    for row in made.baselines.values():
        assert all(
            row[key] == pinned[key] for key in ("microbatches", "recompute") if key in pinned
        )


@pytest.mark.parametrize(
    ("text", "mesh", "techniques"),
    [
        ("tp=2,pp=2,dp=2", {"tensor": 2, "stage": 2, "data": 2}, {}),
        ("TP=2, Pipeline-Parallel-Size=2", {"tensor": 2, "stage": 2}, {}),
        (
            "tensor_model_parallel_size=2,context_parallel_size=4,expert_parallel=2",
            {"tensor": 2, "sequence": 4, "expert": 2},
            {},
        ),
        (
            "pp=2,virtual_pipeline_model_parallel_size=2,num_microbatches=4",
            {"stage": 2},
            {"virtual": 2, "microbatches": 4},
        ),
        ("tp=4,sequence_parallel=True", {"tensor": 4}, {"tensor": "megatron-sp"}),
        ("sequence_parallel_size=4", {"sequence": 4}, {}),
        (
            "data_parallel_shard_degree=4,data_parallel_replicate_degree=2",
            {"fsdp": 4, "data": 2},
            {"zero_stage": 3},
        ),
        ("tp=4,sp=ON", {"tensor": 4}, {"tensor": "megatron-sp"}),
        ("cp=4,ep=2", {"sequence": 4, "expert": 2}, {}),
        ("model=2,model2=4", {"tensor": 2, "tensor2": 4}, {}),
        ("fsdp=8", {"fsdp": 8}, {"zero_stage": 3}),
        ("fsdp=4,dp=2", {"fsdp": 4, "data": 2}, {"zero_stage": 3}),
        ("fsdp=4,ddp=2", {"fsdp": 4, "data": 2}, {"zero_stage": 3}),
        ("ddp=8", {"data": 8}, {"zero_stage": 0}),
        (
            "zero=2,micro=4,recompute=full",
            {},
            {"zero_stage": 2, "microbatches": 4, "recompute": "block"},
        ),
        ("pp=4,vpp=2", {"stage": 4}, {"virtual": 2}),
        ("tp=4,sp=on", {"tensor": 4}, {"tensor": "megatron-sp"}),
        ("tp=4,sp=4", {"tensor": 4}, {"tensor": "megatron-sp"}),
        ("sp=4", {"tensor": 4}, {"tensor": "megatron-sp"}),
        ("tp=4,sp=off", {"tensor": 4}, {"tensor": "megatron"}),
        ("tensor=4,tensor=megatron", {"tensor": 4}, {"tensor": "megatron"}),
    ],
)
def test_dialects(text: str, mesh: dict[str, int], techniques: dict[str, object]) -> None:
    pins = parse_pins(text)
    assert pins.mesh == {a: (n,) for a, n in mesh.items()} and pins.techniques == techniques
    assert from_table(pins.table()) == pins


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("fsdp=8,zero=1", "P024", ["fsdp = 8", "zero_stage = 1", "dp=8,zero=1"]),
        ("ddp=8,zero=3", "P024", ["ddp = 8", "zero_stage = 3", "dp=8,zero=3"]),
        ("tp=4,sp=2", "P024", ["sp = 2", "tensor = 4", "cp=2"]),
        ("tp=4,sp=on,tensor=megatron", "P024", ["sp = on", "tensor = 'megatron'"]),
        ("dp=4,ddp=4", "P020", ["ddp", "dp"]),
        ("sp=x", "P020", ["sp = 'x'", "on or off"]),
        ("tp=4,sp=1", "P020", ["sp=on or sp=off"]),
        ("cp=x", "P020", ["cp = 'x'", "number"]),
        ("tp=2.0", "P020", ["tp = '2.0'", "a number of devices"]),
        ("pp=2,vpp=2,schedule=1f1b", "P024", ["virtual = 2", "schedule = '1f1b'"]),
    ],
)
def test_dialects_that_contradict_each_other_name_both(
    text: str, code: str, said: list[str]
) -> None:
    with pytest.raises(PlanError) as e:
        parse_pins(text)
    assert e.value.code == code and all(s in str(e.value) for s in said), str(e.value)


@pytest.mark.parametrize("text", ["xp=2", "ab=2", "lr=2", "foobar=3", "zzz=1"])
def test_what_is_like_no_pin_gets_no_suggestion(text: str) -> None:
    with pytest.raises(PlanError) as e:
        parse_pins(text)
    assert "did you mean" not in str(
        e.value
    ) and "tp, dp, pp, cp, ep, sp, fsdp, ddp, zero, micro, vpp, recompute" in str(e.value)


def test_copies_of_fsdp_groups() -> None:
    """HSDP: parameters are cut inside a group, and each group has all of them."""
    s = planner.plan(GPT, devices=8, batch=16, pins="fsdp=4,dp=2,micro=1", baselines=False)
    assert (
        s.mesh_shape == (("data", 2), ("fsdp", 4))
        and s.techniques["zero_stage"] == 3
        and s.techniques["zero_group"] == ["fsdp"]
    )
    assert {
        axes
        for kind, rows in s.costs["communication_bytes_per_device"].items()
        if kind != "all-reduce"
        for axes in rows
    } == {"fsdp"}
    alone = planner.plan(GPT, devices=8, batch=16, pins="fsdp=4,micro=1", baselines=False)
    assert alone.mesh_shape == s.mesh_shape, "what is left are copies"


def test_pins_of_a_program_are_a_table_as_a_file_has_it() -> None:
    table = {
        "mesh": {"dp": 2, "tp": [2, 4]},
        "techniques": {"microbatches": 2},
        "*.up_proj": {"split": {"n": ["tp"]}},
    }
    pins = parse_pins(table)
    assert pins.mesh == {"data": (2,), "tensor": (2, 4)}
    assert pins.techniques == {"microbatches": 2}
    assert pins.nodes == {"*.up_proj": {"split": {"n": ["tensor"]}}}
    with pytest.raises(PlanError, match=r"pins are \['tp=8'\] \(list\)") as refused:
        parse_pins(["tp=8"])  # type: ignore[arg-type]
    assert refused.value.code == "P020"
