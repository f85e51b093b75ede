"""The zoo's graphs: valid, shaped, of the published sizes, and small to hold."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models_zoo
from models_zoo.builder import WEIGHTS_FILE
from planner.errors import PlanError

ROOT = Path(__file__).parents[2]

PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "megatron-530b": 529_600_819_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "bert-base": 109_482_240 + 768 * 2 + 2,  # the encoder and its pooler, and a classifier of two
    "bert-base,head=mlm": 109_514_298,
    "bert-large": 335_141_888 + 1024 * 2 + 2,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "unet-sd15": 859_520_964,
    "dit-s-2": 32_963_360,
    "dit-b-2": 130_512_416,
    "dit-l-2": 458_102_816,
    "dit-xl-2": 675_129_632,
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
}


def parameters(model: onnx.ModelProto) -> int:
    """Elements of all weights but running statistics."""
    return sum(
        math.prod(t.dims)
        for t in model.graph.initializer
        if "." in t.name and ".running_" not in t.name
    )


def checked(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Shapes of all tensors, after the checker and strict shape inference; absent weights are
    declared as inputs."""
    declared = copy.deepcopy(model)
    kept = [t for t in declared.graph.initializer if not t.external_data]
    absent = [t for t in declared.graph.initializer if t.external_data]
    declared.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in absent
    )
    del declared.graph.initializer[:]
    declared.graph.initializer.extend(kept)
    onnx.checker.check_model(declared)
    graph = onnx.shape_inference.infer_shapes(
        model, check_type=True, strict_mode=True, data_prop=True
    ).graph
    found = [
        v
        for v in (*graph.input, *graph.value_info, *graph.output)
        if v.type.tensor_type.HasField("shape")
    ]
    return {
        v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in found
    }


@pytest.mark.parametrize("spec", PUBLISHED)
def test_parameter_counts_are_the_published_ones(spec: str) -> None:
    assert parameters(models_zoo.build("zoo:" + spec)) == PUBLISHED[spec]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [n for family in models_zoo.families() for n in family.presets])
def test_every_preset_is_a_valid_shaped_model_without_weights(name: str) -> None:
    model = models_zoo.build(name)
    graph = model.graph
    shapes = checked(model)
    for node in graph.node:
        for out in node.output:
            assert all(type(dim) is int or dim == "batch" for dim in shapes[out]), (
                node.name,
                shapes[out],
            )
    assert all(dim != 0 for shape in shapes.values() for dim in shape)
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names) and all(n.startswith("/") for n in names)
    assert all(shapes[i.name][0] == "batch" for i in graph.input)
    assert graph.output[0].name == ("sample" if name.startswith(("unet", "dit-")) else "logits")
    assert int({p.key: p.value for p in model.metadata_props}["default_batch"]) >= 1
    end = 0
    for tensor in graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if not entries:
            assert len(tensor.raw_data) <= 1 << 18
            continue
        assert entries["location"] == WEIGHTS_FILE and tensor.data_type == onnx.TensorProto.FLOAT
        assert (int(entries["offset"]), int(entries["length"])) == (end, 4 * math.prod(tensor.dims))
        end += 4 * math.prod(tensor.dims)


@pytest.mark.parametrize("spec", ["mlp-tiny", "resnet50,training=1", "llama-tiny"])
def test_the_checker_accepts_the_file_beside_weights_of_that_length(
    spec: str, tmp_path: Path
) -> None:
    model = models_zoo.build(spec)
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(str(tmp_path / "model.onnx"))
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.truncate(
            4 * sum(math.prod(t.dims) for t in model.graph.initializer if t.external_data)
        )  # a hole: no disk is used
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_trillion_parameters_cost_little_time_and_memory() -> None:
    code = (
        "import json, re, time, onnx, models_zoo\n"
        "from math import prod\n"
        "start = time.process_time(); model = models_zoo.build('zoo:gpt-1t'); time_s ="
        " time.process_time() - start\n"
        "count = sum(prod(t.dims) for t in model.graph.initializer if '.' in t.name)\n"
        # unlike ru_maxrss, not the parent's
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())\n"
        "print(json.dumps([time_s, int(peak[1]) * 1024, count, model.ByteSize()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    time_s, peak_bytes, count, size_bytes = json.loads(done.stdout)
    assert count >= 1e12
    assert time_s < 2 and peak_bytes < 300e6 and size_bytes < 4e6


def test_specs_and_presets_need_no_onnx() -> None:
    code = (
        "import sys, models_zoo as z; z.presets(); z.parse('zoo:gpt'); sys.exit('onnx' in"
        " sys.modules or 'jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


def test_parse_gives_family_preset_and_typed_overrides() -> None:
    assert models_zoo.parse("zoo:llama3-8b") == ("llama", "llama3-8b", {})
    assert models_zoo.parse("zoo:llama3-70b,layers=8,seq=4k") == (
        "llama",
        "llama3-70b",
        {"layers": 8, "seq": 4096},
    )
    spec = "zoo:gpt,layers=24,hidden=4096,heads=32,seq=1024,batch=64,ff=16384,vocab=51200,tied=0"
    family, preset, options = models_zoo.parse(spec)
    assert (family, preset, options["batch"], options["tied"]) == ("gpt", "gpt", 64, False)
    assert models_zoo.parse(" mlp-tiny , in=7, weights=inline ") == (
        "mlp",
        "mlp-tiny",
        {"in": 7, "weights": "inline"},
    )


ERRORS = [
    ("zoo:lama3-8b", "P070", "no zoo preset 'lama3-8b'", "did you mean 'llama3-8b'?"),
    ("zoo:llama", "P070", "no zoo preset 'llama'", "presets: llama-tiny, llama2-7b"),
    ("zoo:", "P070", "no zoo preset ''", "`python -m models_zoo` lists the"),
    ("zoo:falcon-7b", "P070", "no zoo preset 'falcon-7b'", "config.json of other models"),
    ("gpt,layer=3", "P071", "gpt has no option 'layer'", "did you mean 'layers'?"),
    ("gpt,layers", "P071", "'layers' is not OPTION=VALUE", "option=value"),
    ("gpt,layers=2,layers=3", "P071", "layers is given twice", ""),
    ("gpt,layers=0", "P071", "layers='0': a whole number from 1 to 10000", ""),
    ("gpt,hidden=1.5", "P071", "hidden='1.5': a whole number", ""),
    ("gpt,hidden=-4", "P071", "hidden='-4'", ""),
    ("gpt,hidden=\u0664", "P071", "a whole number", ""),
    ("gpt,tied=maybe", "P071", "0 or 1", ""),
    ("gpt,epsilon=nan", "P071", "a positive number", ""),
    ("gpt,weights=disk", "P071", "one of external, inline", ""),
    ("gpt,hidden=100,heads=7", "P073", "hidden=100 is not a multiple of heads=7", ""),
    ("gpt2-small,seq=2k", "P073", "longer than the position table of 1024", "positions=2048"),
    ("gpt2-small,embedding=0", "P073", "no table to tie", "add tied=0"),
    ("llama3-8b,kv_heads=5", "P073", "heads=32 is not a multiple of kv_heads=5", ""),
    ("mixtral-tiny,top=9", "P073", "top=9 is more than experts=4", ""),
    ("deepseek-tiny,top=5", "P073", "top=5 is more than the 4 experts of 2 groups", ""),
    ("deepseek-tiny,groups=3", "P073", "experts=8 is not a multiple of groups=3", ""),
    ("dit-tiny,patch=3", "P073", "side=8 is not a multiple of patch=3", ""),
    ("resnet50,blocks=3-x", "P073", "is not a list such as 3-4-6-3", ""),
    ("resnet50,image=16", "P073", "image=16 is smaller than 32", ""),
    ("unet-tiny,side=9", "P073", "side=9 is not a multiple of 2", ""),
    ("dlrm-tiny,width=8", "P073", "bottom=32-16 ends in 16", "end it in 8"),
    (
        "llama3-8b,weights=inline",
        "P072",
        "inline weights would pass 1073741824 bytes",
        "fewer layers",
    ),
    ("gpt,hidden=1000000000,heads=1,layers=10000", "P072", "the weight file would pass", ""),
]


@pytest.mark.parametrize(("spec", "code", "what", "help"), ERRORS)
def test_bad_specs_say_what_to_do(spec: str, code: str, what: str, help: str) -> None:
    with pytest.raises(PlanError) as caught:
        models_zoo.build(spec)
    assert (
        caught.value.code == code
        and what in caught.value.what
        and help in "\n".join(caught.value.help)
    )


@given(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(
            r"zoo:(gpt|mlp-tiny|t5-tiny)(,[a-z]{1,6}=[0-9a-zk\-]{0,5}){0,3}", fullmatch=True
        ),
    )
)
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_spec_or_a_plan_error(text: str) -> None:
    try:
        family, preset, _ = models_zoo.parse(text)
    except PlanError as error:
        assert re.fullmatch(r"P07[0-9]", error.code)
    else:
        assert preset in models_zoo.presets() and family in {f.name for f in models_zoo.families()}


def test_a_given_batch_is_static() -> None:
    for family in models_zoo.families():
        name = next(iter(n for n in family.presets if "tiny" in n))
        model = models_zoo.build(f"{name},batch=6")
        shapes = checked(model)
        assert all(type(d) is int for shape in shapes.values() for d in shape)
        assert {shapes[i.name][0] for i in model.graph.input} == {6} and shapes[
            model.graph.output[0].name
        ][0] == 6
    assert checked(models_zoo.build("gpt-tiny,embedding=0,tied=0"))["x"] == (4 * 16, 64)


@pytest.mark.parametrize(
    "name",
    [
        "gpt-tiny",
        "llama-tiny",
        "mixtral-tiny",
        "bert-tiny",
        "vit-tiny",
        "t5-tiny",
        "ssm-tiny",
        "lstm-tiny",
        "dit-tiny",
        "deepseek-tiny",
    ],
)
def test_one_more_layer_keeps_every_other_name_and_weight(name: str) -> None:
    small, large = (models_zoo.build(f"{name},weights=inline,layers={n}").graph for n in (2, 3))
    assert {n.name for n in small.node} < {n.name for n in large.node}
    weights = {t.name: t.raw_data for t in large.initializer if "." in t.name}
    assert all(weights[t.name] == t.raw_data for t in small.initializer if "." in t.name)


def test_names_carry_the_module() -> None:
    graph = models_zoo.build("llama-tiny").graph
    nodes, weights = (
        {n.name: n for n in graph.node},
        {t.name: tuple(t.dims) for t in graph.initializer},
    )
    assert (
        nodes["/model/layers.1/self_attn/k_proj/MatMul"].input[1]
        == "model.layers.1.self_attn.k_proj.weight"
    )
    assert weights["model.layers.1.self_attn.k_proj.weight"] == (64, 32)  # [in, out]


def test_live_batch_norm_has_three_outputs() -> None:
    for training, outputs in (("1", 3), ("0", 1)):
        norms = [
            n
            for n in models_zoo.build(f"resnet-tiny,training={training}").graph.node
            if n.op_type == "BatchNormalization"
        ]
        assert norms and all(len(n.output) == outputs for n in norms)
