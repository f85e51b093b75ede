"""Serving: what is emitted generates the tokens of onnxruntime and of the model without a cache;
what is priced adds up; what cannot be is refused."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import models_zoo
from benchmarks.decode_bytes import CASES, apart
from costmodels.hardware.device import load_device
from planner.cache.folder import Cache
from planner.cli import main
from planner.commands.programs import write_files
from planner.errors import PlanError
from planner.pins.pins import Pins
from planner.search.build_request import make_request
from planner.search.to_strategy import compose
from planner.serving.cached import form_of
from planner.serving.joint import NO_TECHNIQUES, Joint, weight_pins
from planner.serving.result import Serving
from planner.serving.serve import program, reopened, serve
from planner.verify.targets import parse_target, require

LLAMA, GPT = (
    "zoo:llama-tiny,cache=1,weights=inline,kv_heads=4",
    "zoo:gpt-tiny,cache=1,weights=inline,seq=64",
)


def prompts(sequences: int, tokens: int) -> np.ndarray:
    """Token ids; the second sequence is shorter, padded with 0 on the left."""
    ids = np.random.default_rng(1).integers(1, 500, (sequences, tokens))
    ids[1, :3] = 0
    return ids


def greedy(model, ids: np.ndarray, count: int) -> np.ndarray:
    """Tokens that onnxruntime generates with the model's own cache, which grows."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    real = np.cumsum(ids != 0, 1).clip(0, 1)
    feed = {
        "input_ids": ids,
        "attention_mask": real,
        "position_ids": np.maximum(np.cumsum(real, 1) - 1, 0),
    }
    feed |= {
        i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past")
    }
    tokens: list[np.ndarray] = []
    names = [o.name for o in session.get_outputs()]
    for _ in range(count):
        out = dict(zip(names, session.run(None, feed), strict=True))
        tokens.append(out["logits"][:, -1].argmax(-1)[:, None])
        real = np.concatenate([real, np.ones((len(ids), 1), np.int64)], 1)
        feed = {
            "input_ids": tokens[-1],
            "attention_mask": real,
            "position_ids": real.sum(1, keepdims=True) - 1,
        }
        feed |= {
            n.replace("present", "past_key_values"): v
            for n, v in out.items()
            if n.startswith("present")
        }
    return np.concatenate(tokens, 1)


def generated(folder, name: str, ids: np.ndarray, *more: str, devices: int = 8) -> np.ndarray:
    """Tokens of an emitted program on virtual devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    np.save(folder / "ids.npy", ids)
    command = [
        sys.executable,
        str(folder / name),
        "--virtual-devices",
        str(devices),
        "--float32",
        "--prompts",
        str(folder / "ids.npy"),
        "--pad",
        "0",
        "--steps",
        "1",
    ]
    done = subprocess.run(
        [*command, "--output", str(folder / "out.npy"), *more],
        env={**os.environ, "XLA_FLAGS": flags},  # a number in the flags goes before the option
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(folder / "out.npy")


def emitted(folder, source: str, made: Serving) -> str:
    write_files(
        lambda weights, folder: program(made, source, weights_file=weights, model_folder=folder),
        lambda: reopened(made, source, quantized=False)[0],
        folder / "serve.py",
        True,
    )
    return "serve.py"


def cut_along_positions(source: str, attentions: str) -> Serving:
    """A plan of 8 + 8 tokens on eight devices whose steps cut the caches of some attentions along
    their positions in four. Pinned: no search of so small a model would choose it."""
    made = serve(source, prompt=8, generate=8, concurrency=4, devices=8)
    models, mesh = reopened(made, source), {"data": (2,), "tensor": (4,)}
    request = make_request(
        devices=8, hardware=None, topology=None, workload="infer", baselines=False
    )
    joint = Joint(models[0], models[1], request)
    cut = {attentions: {"split": {"t": ["tensor"]}}}
    step = joint.solve(models[1], Pins(mesh, NO_TECHNIQUES, nodes=cut))
    assert step is not None and step.best is not None
    weights = weight_pins(step.base, step.best.plan, models[0].graph(1))
    first = joint.solve(models[0], Pins(mesh, NO_TECHNIQUES, nodes=weights))
    assert first is not None
    return replace(
        made,
        prompts=compose(models[0], request, first, {}, ()),
        step=compose(models[1], request, step, {}, ()),
    )


def on_mesh(
    source: str,
    replicas: int,
    split: int,
    *,
    quantize: str = "none",
    label: str = "tp",
    prefill_tokens: int = 8192,
) -> Serving:
    """A plan of one mesh, the one by hand or (label "") another, where there is one; what is not of
    the mesh is that of a plan for one device."""
    made = serve(
        source,
        prompt=8,
        generate=6,
        concurrency=4,
        devices=1,
        quantize=quantize,
        prefill_tokens=prefill_tokens,
    )
    request = make_request(
        devices=8, hardware=None, topology=None, workload="infer", baselines=False
    )
    prompts_, step = reopened(made, source)
    joint = Joint(prompts_, step, request, prefill_tokens=prefill_tokens)
    pair = next(p for p in joint.candidates(replicas, split) if p.label.startswith(label))
    first, each = (
        compose(m, request, f, {}, ())
        for m, f in ((joint.prompts(replicas), pair.prompts), (step, pair.step))
    )
    return replace(made, figures=pair.figures(), prompts=first, step=each)


def test_a_llama_generates_what_onnxruntime_does(tmp_path) -> None:
    """Heads cut over four devices, two replicas, prompts passed two at once, one of them shorter;
    the file's plan is what is run."""
    on_mesh(LLAMA, 2, 4, prefill_tokens=8).save(tmp_path / "plan.json")
    made = Serving.load(tmp_path / "plan.json")
    assert {
        tuple(a)
        for t in made.step.tensors.values()
        if str(t.get("label", "")).endswith(".key")
        for a in t["layout"]
    } >= {("data",), ("tensor",)}
    assert main(["emit", str(tmp_path / "plan.json"), "-o", str(tmp_path / "serve.py")]) == 0
    # Layers are written out and their arrays are their own: nothing is cut out of stacks.
    text = (tmp_path / "serve.py").read_text()
    assert "lax.scan(" not in text and '"cache.*.key": ((4, 4, 14, 16), "float", 0, ' in text
    ids = prompts(4, 8)
    assert (generated(tmp_path, "serve.py", ids) == greedy(models_zoo.build(LLAMA), ids, 6)).all()


@pytest.mark.parametrize(
    ("inputs", "code", "says"),
    [("zoo:llama-tiny", "P220", "has no cache"), ("zoo:llama-tiny,cache=1", "", "")],
)
def test_the_form_of_a_cache_is_read_or_refused(inputs, code, says) -> None:
    if code:
        with pytest.raises(PlanError, match=says) as e:
            form_of(models_zoo.build(inputs), inputs)
        assert e.value.code == code
        return
    form = form_of(models_zoo.build(inputs), inputs)
    assert (
        form.pairs[:2]
        == (
            ("past_key_values.0.key", "present.0.key"),
            ("past_key_values.0.value", "present.0.value"),
        )
        and len(form.pairs) == 4
    )
    assert (form.ids, form.mask, form.positions, form.logits) == (
        "input_ids",
        "attention_mask",
        "position_ids",
        "logits",
    )


def test_a_model_without_positions_is_refused() -> None:
    model = models_zoo.build(LLAMA)
    kept = [i for i in model.graph.input if i.name != "position_ids"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    with pytest.raises(PlanError, match="no positions of tokens") as e:
        form_of(model, "m")
    assert e.value.code == "P221"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "8"], "--prompt is said of serving, and the workload is train"),
        (["--workload", "infer", "--prompt", "8"], "--prompt without --generate"),
        (["--workload", "infer", "--objective", "ttft"], "needs a prompt"),
        (["--workload", "infer", "--quantize", "int8"], "needs a prompt"),
        (
            [
                "--workload",
                "infer",
                "--prompt",
                "8",
                "--generate",
                "8",
                "--concurrency",
                "8",
                "--batch",
                "8",
            ],
            "does not take --batch",
        ),
        (
            [
                "--workload",
                "infer",
                "--prompt",
                "8",
                "--generate",
                "8",
                "--rate",
                "8",
                "--for",
                "megatron",
            ],
            "does not take --for",
        ),
        (
            [
                "--workload",
                "infer",
                "--prompt",
                "8",
                "--generate",
                "8",
                "--concurrency",
                "8",
                "--objective",
                "memory",
            ],
            "unknown",
        ),
    ],
)
def test_options_of_serving_go_together(options, says, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([LLAMA, "--devices", "8", *options]) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def uncached(model, ids: np.ndarray, count: int) -> np.ndarray:
    """Greedy tokens of a model without a cache, every prefix computed anew by onnxruntime."""
    import onnxruntime

    for _ in range(count):
        source = models_zoo.build(f"{model},seq={ids.shape[1]},batch={len(ids)}")
        logits = onnxruntime.InferenceSession(source.SerializeToString()).run(
            None, {"input_ids": ids}
        )[0]
        ids = np.concatenate([ids, logits[:, -1].argmax(-1)[:, None]], 1)
    return ids[:, -count:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "split", "label"),
    [(4, 2, "tp"), (1, 8, "tp"), (2, 4, "tp"), (2, 4, "layout of a step")],
)
def test_a_gpt_generates_what_the_model_without_a_cache_does(
    replicas, split, label, tmp_path
) -> None:
    made = on_mesh(GPT, replicas, split, label=label)
    ids = np.random.default_rng(2).integers(1, 500, (4, 8))
    tokens = generated(tmp_path, emitted(tmp_path, GPT, made), ids)
    assert (tokens == uncached("zoo:gpt-tiny,weights=inline,positions=64", ids, 6)).all() and (
        tokens == greedy(models_zoo.build(GPT), ids, 6)
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        LLAMA,
        "zoo:llama-tiny,cache=1,weights=inline,decomposed=1",
        "zoo:mixtral-tiny,cache=1,weights=inline",
    ],
)
def test_grouped_heads_spread_attention_and_experts_generate_alike(source, tmp_path) -> None:
    made, ids = on_mesh(source, 1, 8), prompts(4, 8)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids)
        == greedy(models_zoo.build(source), ids, 6)
    ).all()


@pytest.mark.slow
def test_a_cache_cut_along_positions_generates_alike(tmp_path) -> None:
    """Pinned: no search of so small a model would choose it."""
    made = serve(LLAMA, prompt=8, generate=8, concurrency=4, devices=8)
    models, mesh = reopened(made, LLAMA), {"data": (2,), "tensor": (4,)}
    request = make_request(
        devices=8, hardware=None, topology=None, workload="infer", baselines=False
    )
    joint = Joint(models[0], models[1], request)
    step = joint.solve(
        models[1],
        Pins(mesh, NO_TECHNIQUES, nodes={"*/self_attn/Attention": {"split": {"t": ["tensor"]}}}),
    )
    assert step is not None and step.best is not None
    first = joint.solve(
        models[0],
        Pins(mesh, NO_TECHNIQUES, nodes=weight_pins(step.base, step.best.plan, models[0].graph(1))),
    )
    assert first is not None
    made = replace(
        made,
        prompts=compose(models[0], request, first, {}, ()),
        step=compose(models[1], request, step, {}, ()),
    )
    assert [["data"], [], ["tensor"], []] in [
        t["layout"]
        for t in made.step.tensors.values()
        if str(t.get("label", "")).startswith("cache.")
    ]
    ids = prompts(4, 8)
    assert (
        generated(tmp_path, emitted(tmp_path, LLAMA, made), ids)
        == greedy(models_zoo.build(LLAMA), ids, 8)
    ).all()


MIXTRAL = "zoo:mixtral-tiny,cache=1,weights=inline"


def rounded(source: str, apart: str = "-"):
    """The model with Q * s in the place of each product's weight, but for those whose name has
    `apart` in it, and how many there are."""
    from onnx import numpy_helper

    model = models_zoo.build(source)
    read = {n.input[1] for n in model.graph.node if n.op_type == "MatMul"}
    changed = 0
    for t in model.graph.initializer:
        w = numpy_helper.to_array(t)
        if t.name in read and w.ndim == 2 and apart not in t.name:
            s = np.abs(w).max(0, keepdims=True) / 127
            t.CopyFrom(numpy_helper.from_array(np.round(w / s) * s, t.name))
            changed += 1
    return model, changed


@pytest.mark.parametrize("source", [LLAMA, GPT, MIXTRAL])
def test_int8_weights_are_near_float32(source) -> None:
    """Logits of a pass over prompts differ from those of the float32 model by 3 % of their norm at
    most (1.5 to 2.3 % were seen)."""
    import onnxruntime

    ids, logits = prompts(4, 8), []
    for model in (models_zoo.build(source), rounded(source)[0]):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feed["position_ids"] = np.broadcast_to(np.arange(8), ids.shape)
        feed |= {
            i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), np.float32)
            for i in session.get_inputs()
            if i.name.startswith("past")
        }
        logits.append(session.run(["logits"], feed)[0])
    exact, near = logits
    assert 0 < np.linalg.norm(near - exact) < 0.03 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("source", [LLAMA, GPT])
def test_int8_weights_are_what_the_page_says(source, tmp_path) -> None:
    """The model with Q * s in the place of each product's weight, run by onnxruntime, generates the
    program's tokens; the search counts a byte a weight."""
    model, changed = rounded(source)
    made, ids = on_mesh(source, 2, 4, quantize="int8"), prompts(4, 8)
    whole = on_mesh(source, 2, 4)
    assert changed > 8 and made.figures["weights_bytes"] < 0.8 * whole.figures["weights_bytes"]
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids) == greedy(model, ids, 6)
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    ["zoo:llama3-8b,layers=4", pytest.param("zoo:mixtral-8x7b,layers=2", marks=pytest.mark.slow)],
)
def test_a_byte_a_weight_is_read_as_such(source) -> None:
    """Priced alone: as products quantised to int8, and experts too; the cache stays as it is. A
    step is shorter by the time of the bytes that are not read, of which sequences of so few leave
    some experts' alone."""
    ask = {"prompt": 512, "generate": 64, "concurrency": 16, "devices": 4}
    wide, narrow, int8 = (
        {r["label"]: r for r in serve(source, **ask, **more).rows if r["label"].startswith("tp=")}
        for more in ({}, {"precision": "int8-weights"}, {"quantize": "int8"})
    )
    assert len(narrow) == 3
    for label, row in narrow.items():
        assert row["cache_bytes"] == wide[label]["cache_bytes"]
        assert row["tpot_s"] <= int8[label]["tpot_s"] <= wide[label]["tpot_s"]
    few = min(narrow)
    saved_bytes = wide[few]["weights_bytes"] - narrow[few]["weights_bytes"]
    assert saved_bytes > 0.49 * wide[few]["weights_bytes"]
    least_s = saved_bytes / load_device("h100-sxm").memory_bytes_per_s
    shorter_s = wide[few]["tpot_s"] - narrow[few]["tpot_s"]
    assert shorter_s > (0.75 if "mixtral" in source else 1.0) * least_s


def test_figures_add_up_and_the_cache_is_what_a_hand_counts() -> None:
    """Two layers of 4 heads of 16 features, keys and values, 32 tokens of 16 sequences in bf16; cut
    into replicas x heads."""
    made = serve(
        "zoo:llama-tiny,cache=1,kv_heads=4",
        prompt=24,
        generate=8,
        concurrency=16,
        devices=8,
        prefill_tokens=24,
    )
    total = 2 * 2 * 16 * 4 * 32 * 16 * 2
    assert {r["split"] for r in made.rows} == {1, 2, 4, 8} and len(
        [r for r in made.rows if r["label"].startswith("tp=")]
    ) == 4
    for r in made.rows:
        passes = 16 // r["wave"]
        assert r["wave"] == r["replicas"] and r["replicas"] * r["split"] == 8
        assert r["tokens_per_s_per_device"] == pytest.approx(
            16 * 8 / (passes * r["ttft_s"] + 7 * r["tpot_s"]) / 8
        )
        assert (
            total // 8 <= r["cache_bytes"] <= total // r["replicas"]
            and r["memory_bytes"] > r["cache_bytes"] + r["weights_bytes"]
        )
    by_hand = next(r for r in made.rows if r["label"] == "tp=4")
    assert by_hand["cache_bytes"] == total // 8
    best = max((r for r in made.rows if r["fits"]), key=lambda r: r["tokens_per_s_per_device"])
    assert (
        made.figures["tokens_per_s_per_device"]
        == pytest.approx(best["tokens_per_s_per_device"], rel=2e-3)
        and [r["chosen"] for r in made.rows].count(True) == 1
    )
    assert 0 <= made.service["gap"] < 1


def test_each_objective_gets_the_best_of_what_was_priced_and_the_front_holds_it(tmp_path) -> None:
    kept: dict[str, Serving] = {}
    for objective, figure, sign in (
        ("ttft", "ttft_s", 1),
        ("tpot", "tpot_s", 1),
        ("throughput", "tokens_per_s_per_device", -1),
    ):
        made = kept[objective] = serve(
            "zoo:llama3-8b,layers=2,cache=1",
            prompt=1024,
            generate=64,
            concurrency=32,
            devices=2,
            objective=objective,
            cache=Cache(tmp_path),  # of all three the searches are the same
        )
        least = min(sign * r[figure] for r in made.rows if r["fits"])
        assert sign * made.figures[figure] <= least + 2e-3 * abs(least)
        chosen = next(r for r in made.rows if r["chosen"])
        better = [
            r
            for r in made.rows
            if r["fits"]
            and r["ttft_s"] < chosen["ttft_s"] * 0.998
            and r["tpot_s"] < chosen["tpot_s"] * 0.998
        ]
        assert not better or objective == "throughput"
    assert (
        kept["tpot"].figures["split"] > kept["throughput"].figures["split"]
        or kept["tpot"].figures == kept["throughput"].figures
    )
    assert kept["ttft"].rows and [r["label"] for r in kept["ttft"].rows] == [
        r["label"] for r in kept["tpot"].rows
    ]


@pytest.mark.slow
def test_memory_limits_the_sequences_and_what_does_not_fit_says_how_far_off_it_is() -> None:
    planned = partial(
        serve,
        "zoo:llama3-8b,layers=2,cache=1",
        prompt=512,
        generate=32,
        devices=2,
        hardware="a100-40gb",
    )
    made = planned(concurrency=8, memory_limit_bytes=8 << 30)
    most = made.service["most_sequences"]
    wave = made.figures["wave"]
    assert made.figures["fits"] and most % wave == 0 and most > 8
    with pytest.raises(PlanError, match="no plan fits") as e:
        planned(concurrency=8, memory_limit_bytes=1 << 30)
    assert e.value.code == "P021" and e.value.exit_code == 3 and "cache" in e.value.detail[0]
    more = planned(concurrency=most, memory_limit_bytes=8 << 30)
    assert more.figures["fits"] and more.figures["memory_bytes"] > made.figures["memory_bytes"]


def test_a_model_that_does_not_see_all_keys_is_refused() -> None:
    """A mask that hides the first seven keys of fifteen, whichever tokens they are."""
    from onnx import helper, numpy_helper

    model = models_zoo.build(LLAMA)
    at = next(i for i, n in enumerate(model.graph.node) if n.op_type == "And")
    node = model.graph.node[at]
    hidden = numpy_helper.from_array(np.array([False] * 7 + [True] * 8), "window")
    model.graph.initializer.append(hidden)
    made = helper.make_node("And", [node.output[0], "window"], ["windowed"])
    for other in model.graph.node:
        for k, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[k] = "windowed"
    model.graph.node.insert(at + 1, made)
    with pytest.raises(PlanError, match="sees neither every earlier token nor the last") as e:
        serve(model, prompt=8, generate=6, concurrency=4, devices=4)
    assert e.value.code == "P221"


def test_the_file_is_read_again_and_other_commands_say_what_it_is(tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    made = serve(LLAMA, prompt=8, generate=6, concurrency=4, devices=8)
    made.save(path)
    again = Serving.load(path)
    assert again.to_json() == made.to_json() == path.read_text() and again.shape == made.shape
    assert main(["show", str(path)]) == 0
    assert "tokens/s/device" in capsys.readouterr().out
    assert (
        main(["show", str(path), "--html", str(tmp_path / "x.html")]) == 0
        and "<!doctype html>" in (tmp_path / "x.html").read_text()
    )
    capsys.readouterr()
    assert main(["explain", str(path)]) == 2 and "P223" in capsys.readouterr().err
    assert main(["emit", str(path), "--backend", "jit"]) == 2 and "P224" in capsys.readouterr().err
    path.write_text(path.read_text().replace('"ttft_s"', '"ttft"'))
    assert main(["show", str(path)]) == 2 and "P057" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "apart"),
    [
        pytest.param("zoo:llama3-8b,layers=1,cache=1", False, marks=pytest.mark.slow),
        ("zoo:mixtral-8x7b,layers=1,cache=1", True),
    ],
)
def test_a_router_is_not_made_one_product_with_a_layer(source, apart) -> None:
    """Of eight columns beside thousands the GPU compiler copies both weights in every step."""
    made = serve(source, prompt=64, generate=8, concurrency=8, devices=2)
    assert f"PRODUCTS_APART = {apart} " in program(made, source).text


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.name)
def test_a_decode_step_reads_weights_and_cache_once(case) -> None:
    """As compiled for H100: at most 1.3 times weights and cache are moved, and no layer's weights
    or cache are copied."""
    target = parse_target("gpu:h100", 8)
    try:
        require(target)
    except PlanError as e:
        pytest.skip(e.what)
    found = apart(case, target, prefill=False)
    assert found["step"]["moved_bytes"] <= 1.3 * found["least_bytes"]
    assert found["step"]["copied_bytes"] < 10e6


@pytest.mark.slow
def test_meshes_lie_along_the_links_of_nodes_that_are_no_power_of_two() -> None:
    """Two heads of keys over 24 devices: a replica of 12 or 24 would cut a node in thirds."""
    made = serve("zoo:llama-tiny,cache=1", prompt=16, generate=4, concurrency=24, devices=24)
    assert {row["split"] for row in made.rows} == {1, 2, 4, 8}


def test_more_sequences_than_fit_by_far_are_no_plan_and_take_no_memory_here() -> None:
    with pytest.raises(PlanError) as e:
        serve(LLAMA, prompt=64, generate=8, concurrency=99_999_999, devices=2)
    assert e.value.code == "P021"
