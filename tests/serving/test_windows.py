"""Layers with a sliding window keep the last tokens alone: programs generate what onnxruntime does,
and caches are as large as the window."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models_zoo
from models_zoo.hf_config import from_config
from planner.cli import main
from planner.emit.runtime.serve import serve as runtime
from planner.errors import PlanError
from planner.serving.continuous import BLOCK, Limits
from planner.serving.result import Serving
from planner.serving.serve import serve
from tests.serving.test_serving import (
    cut_along_positions,
    emitted,
    generated,
    greedy,
    on_mesh,
    prompts,
    uncached,
)

TINY = "zoo:llama-tiny,cache=1,weights=inline,kv_heads=4,full_every=2"
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "vocab_size": 512,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def tokens_of_caches(made: Serving) -> set[int]:
    """Tokens that the plan's caches have room for."""
    return {
        t["shape"][2]
        for t in made.step.tensors.values()
        if str(t.get("label", "")).startswith("cache.")
    }


@pytest.mark.slow  # test_a_config_is_served_as_it_is has another
@pytest.mark.parametrize("window", [3, 6, 11])
def test_a_window_generates_what_onnxruntime_does(window: int, tmp_path: Path) -> None:
    """Windows below the prompt's 8 tokens and above; every second layer sees all. Heads cut over
    four devices, one prompt shorter than the others."""
    source = f"{TINY},window={window}"
    made, ids = on_mesh(source, 2, 4), prompts(4, 8)
    assert tokens_of_caches(made) == {window, 14}
    model = models_zoo.build(source)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids) == greedy(model, ids, 6)
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "zoo:mixtral-tiny,cache=1,weights=inline,window=5",
        "zoo:llama-tiny,cache=1,weights=inline,decomposed=1,window=5,window_from=1",
    ],
)
def test_experts_and_spread_attention_have_windows_too(source: str, tmp_path: Path) -> None:
    made, ids = on_mesh(source, 1, 8), prompts(4, 8)
    model = models_zoo.build(source)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids) == greedy(model, ids, 6)
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 12])
def test_a_window_cut_along_positions_generates_alike(window: int, tmp_path: Path) -> None:
    """Pinned: no search of so small a model would choose it."""
    source = f"{TINY},window={window}"
    made = cut_along_positions(source, "*/layers.0/self_attn/Attention")
    assert [window, [["data"], [], ["tensor"], []]] in [
        [t["shape"][2], t["layout"]]
        for t in made.step.tensors.values()
        if str(t.get("label", "")).startswith("cache.")
    ]
    ids, model = prompts(4, 8), models_zoo.build(source)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids) == greedy(model, ids, 8)
    ).all()


def test_a_config_is_served_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word of a cache: two of four layers keep six tokens. What is emitted with the weights of
    the same graph generates what onnxruntime does."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(GEMMA))
    sizes = ["--prompt", "8", "--generate", "6", "--concurrency", "4", "--devices", "2"]
    command = ["config.json", "--workload", "infer", *sizes, "-o", "plan.json"]
    assert main([*command, "--emit", "program.py"]) == 0
    made = Serving.load("plan.json")
    assert tokens_of_caches(made) == {6, 14}
    by_hand = 2 * 2 * 2 * 16 * 2 * (6 + 14) * 4
    """Layers of a kind, keys and values, heads, features, bytes, tokens, sequences."""
    row = next(r for r in made.rows if r["label"] == "tp=2")
    assert row["cache_bytes"] == by_hand // 2 and Path("program.py").exists()
    model = from_config("config.json", {"cache": "1", "weights": "inline"})
    onnx.save(model, "model.onnx")
    assert main(["model.onnx", *command[1:-1], "of_file.json", "--emit", "of_file.py"]) == 0
    ids = prompts(4, 8)
    assert (generated(tmp_path, "of_file.py", ids, devices=2) == greedy(model, ids, 6)).all()


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
def test_experts_with_biases_are_routed_in_a_step_too(tmp_path: Path) -> None:
    """One token a sequence: their spread shares are turned round, which looks like a view."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS))
    onnx.save(from_config(path, {"cache": "1", "weights": "inline"}), tmp_path / "model.onnx")
    source = str(tmp_path / "model.onnx")
    made, ids = on_mesh(source, 2, 4), prompts(4, 8)
    assert tokens_of_caches(made) == {4, 14}
    kinds = [row["op"] for row in made.step.nodes.values()]
    assert "RoutedExperts" in kinds and "OneHot" not in kinds
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids)
        == greedy(onnx.load(source), ids, 6)
    ).all()


def test_zoo_models_are_served_with_a_cache_whether_or_not_it_is_said() -> None:
    assert models_zoo.with_cache("zoo:llama-tiny,layers=1") == "zoo:llama-tiny,layers=1,cache=1"
    for spec in ("zoo:llama-tiny,cache=1", "zoo:llama-tiny,cache=0", "zoo:resnet-tiny"):
        assert models_zoo.with_cache(spec) == spec
    assert models_zoo.with_cache("zoo:deepseek-v3") == "zoo:deepseek-v3,cache=1"


def test_a_plan_of_the_same_model_is_written_over(tmp_path: Path) -> None:
    """The cache that was added unasked is no other model."""
    file = str(tmp_path / "plan.json")
    sizes = ["--prompt", "8", "--generate", "4", "--concurrency", "4", "--devices", "1"]
    command = ["zoo:llama-tiny,layers=1", "--workload", "infer", *sizes, "--quiet", "-o", file]
    assert main(command) == main(command) == 0
    assert main(["zoo:gpt-tiny", *command[1:]]) == 2


@pytest.mark.parametrize(
    "chunk", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 11, 13))]
)
def test_chunks_generate_what_onnxruntime_does(chunk: int, tmp_path: Path) -> None:
    """Chunks that end within the prompt, with it, and behind; every second layer sees all. One
    prompt is shorter, and its chunks are counted from its own first token."""
    source = f"{TINY},chunk={chunk}"
    made, ids = on_mesh(source, 2, 4), prompts(4, 8)
    assert tokens_of_caches(made) == {chunk, 14}
    model = models_zoo.build(source)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids) == greedy(model, ids, 6)
    ).all()
    ids = np.random.default_rng(2).integers(1, 500, (4, 8))
    assert (greedy(model, ids, 6) == uncached(source.replace(",cache=1", ""), ids, 6)).all()


LLAMA4 = {
    "model_type": "llama4_text",
    "hidden_size": 64,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_chunk_size": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "vocab_size": 512,
    "no_rope_layers": [1, 1, 1, 0],
}


@pytest.mark.slow
def test_llama_4_keeps_its_chunks(tmp_path: Path) -> None:
    """Three of four layers keep five tokens."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA4))
    assert tokens_of_caches(serve(path, prompt=8, generate=6, concurrency=4, devices=2)) == {5, 14}
    onnx.save(from_config(path, {"cache": "1", "weights": "inline"}), tmp_path / "model.onnx")
    source = str(tmp_path / "model.onnx")
    made, ids = on_mesh(source, 2, 4), prompts(4, 8)
    assert (
        generated(tmp_path, emitted(tmp_path, source, made), ids)
        == greedy(onnx.load(source), ids, 6)
    ).all()


def test_chunks_of_slots_are_refused() -> None:
    """A mask by chunks of four that are counted from the first slot of a cache, be it a token or
    padding: sequences of several lengths would have to lie elsewhere."""
    model = models_zoo.build("zoo:llama-tiny,cache=1,window=4")
    subtract = next(n for n in model.graph.node if n.op_type == "Sub" and "mask" in n.name)
    four = subtract.input[1]
    # key > query - 4 becomes key > query - query % 4 - 1.
    one = onnx.numpy_helper.from_array(np.array(1, np.int64), "one")
    model.graph.initializer.append(one)
    made = [
        onnx.helper.make_node("Mod", [subtract.input[0], four], ["into"]),
        onnx.helper.make_node("Sub", [subtract.input[0], "into"], ["start"]),
    ]
    at = list(model.graph.node).index(subtract)
    for k, node in enumerate(made):
        model.graph.node.insert(at + k, node)
    subtract.input[0], subtract.input[1] = "start", "one"
    with pytest.raises(PlanError, match="nor those of its own chunk") as e:
        serve(model, prompt=8, generate=6, concurrency=4, devices=4)
    assert e.value.code == "P221"


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_slots_hold_the_tokens_that_are_seen(examples: int) -> None:
    sizes = (st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 11))
    settings(max_examples=examples, deadline=None)(given(*sizes, st.booleans())(slots_hold))()


def slots_hold(size: int, prompt: int, generate: int, padding: int, by_chunks: bool) -> None:
    """Tokens are their numbers: what a prompt leaves in the slots, then one by one."""
    padding = min(padding, prompt - 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runtime, "PROMPT", prompt)
        whole = np.arange(prompt, dtype=float).reshape(1, 1, prompt, 1)
        laid = np.asarray(runtime.in_slots(whole, size))
    slots = np.full(size, -1.0)
    slots[: laid.shape[2]] = laid[0, 0, :size, 0]
    for token in range(prompt, prompt + generate):
        seen = np.asarray(runtime.seen_slots(size, token, np.array([[padding]]), by_chunks))[0]
        of_chunk = padding + (token - padding) // size * size
        first = of_chunk if by_chunks else max(padding, token - size + 1)
        assert {int(t) for t, s in zip(slots, seen, strict=True) if s} == set(range(first, token))
        slots[token % size] = token


@given(st.integers(1, 5000), st.integers(1, 4096), st.floats(0.1, 1.0))
def test_room_of_windows(tokens: int, window: int, part: float) -> None:
    """Never more than without windows, never less than the layers that keep all; as many where the
    sequence is shorter than the window."""
    asked = np.array([tokens])
    plain, limits = Limits(1, 1, 10**6), Limits(1, 1, 10**6, ((window, part),))
    (all_kept,), (room,) = plain.room(asked), limits.room(asked)
    assert all_kept == -(-tokens // BLOCK) * BLOCK
    assert (1 - part) * all_kept <= room + 1e-9 and room <= all_kept
    assert room == all_kept or all_kept > window


@pytest.mark.slow
def test_requests_that_arrive_find_more_room_where_layers_have_windows() -> None:
    """Half of the layers keep 32 of up to 320 tokens: a replica has room for more of them, and the
    steps of as many are no longer."""
    rate = {"rate": "200", "prompt": "64~256", "generate": "16~64", "devices": 1}
    source = "zoo:llama-tiny,layers=4,full_every=2"
    full, windows = (serve(s, **rate) for s in (source, f"{source},window=32"))
    assert windows.traffic is not None and full.traffic is not None
    assert windows.service["most_sequences"] > 1.4 * full.service["most_sequences"]
    assert windows.traffic["limits"]["cache_tokens"] == pytest.approx(
        full.traffic["limits"]["cache_tokens"], rel=0.02
    )
    assert windows.traffic["cache_taken"] < full.traffic["cache_taken"]
