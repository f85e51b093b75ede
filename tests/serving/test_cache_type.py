"""Caches in eight bits: half the bytes, tokens of a model whose cache is rounded so, near those of
one whose cache is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import models_zoo
from planner.cli import main
from planner.serving.engines import hand_over
from planner.serving.result import Serving
from planner.serving.serve import serve
from tests.serving.test_serving import GPT, LLAMA, emitted, generated, prompts

MODEL = "zoo:llama3-8b,layers=2,cache=1"
NEAR = 0.06
"""Of the norm of logits, what a rounded cache changes (docs/serving.md)."""


def run(model: Any, ids: np.ndarray, count: int, eight_bits: bool) -> tuple[np.ndarray, list[Any]]:
    """(greedy tokens, logits of each step) of onnxruntime, its cache rounded where that is asked.
    The new keys of a step are attended to as they are."""
    import onnxruntime

    def kept(x: np.ndarray) -> np.ndarray:
        if not eight_bits:
            return x
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    session = onnxruntime.InferenceSession(model.SerializeToString())
    real = np.ones_like(ids)
    feed = {"input_ids": ids, "attention_mask": real, "position_ids": np.cumsum(real, 1) - 1}
    feed |= {
        i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past")
    }
    names, tokens, logits = [o.name for o in session.get_outputs()], [], []
    for _ in range(count):
        out = dict(zip(names, session.run(None, feed), strict=True))
        logits.append(out["logits"][:, -1])
        tokens.append(logits[-1].argmax(-1)[:, None])
        real = np.concatenate([real, np.ones((len(ids), 1), np.int64)], 1)
        feed = {
            "input_ids": tokens[-1],
            "attention_mask": real,
            "position_ids": real.sum(1, keepdims=True) - 1,
        }
        feed |= {
            n.replace("present", "past_key_values"): kept(v)
            for n, v in out.items()
            if n.startswith("present")
        }
    return np.concatenate(tokens, 1), logits


@pytest.mark.parametrize("source", [LLAMA, GPT])
def test_logits_of_a_rounded_cache_are_near(source: str) -> None:
    ids = np.random.default_rng(2).integers(1, 500, (4, 8))
    model = models_zoo.build(source)
    rounded, exact = run(model, ids, 2, True)[1], run(model, ids, 2, False)[1]
    assert (rounded[0] == exact[0]).all()
    off = np.linalg.norm(rounded[1] - exact[1]) / np.linalg.norm(exact[1])
    assert 0 < off < NEAR


@pytest.mark.slow
@pytest.mark.parametrize("source", [LLAMA, GPT])
def test_a_program_generates_what_a_model_with_a_rounded_cache_does(
    source: str, tmp_path: Path
) -> None:
    made = serve(source, prompt=8, generate=6, concurrency=4, devices=8, cache_type="fp8")
    assert made.shape.cache_type == "fp8"
    ids = prompts(4, 8)
    ids[1, :3] = ids[2, :3]  # no padding here
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    text = (tmp_path / "serve.py").read_text()
    assert "CACHE_TYPE = jnp.float8_e4m3fn" in text
    assert (tokens == run(models_zoo.build(source), ids, 6, True)[0]).all()


@pytest.mark.slow
def test_half_the_bytes_are_kept_and_read() -> None:
    ask: dict[str, Any] = {"prompt": 2048, "generate": 64, "concurrency": 64, "devices": 4}
    wide, narrow = (serve(MODEL, cache_type=kind, **ask) for kind in ("compute", "fp8"))
    rows = [{(r["label"], r["split"]): r for r in made.rows} for made in (wide, narrow)]
    both = [(rows[0][k], rows[1][k]) for k in rows[0] if k in rows[1] and k[0].startswith("tp=")]
    assert len(both) == 3
    for a, b in both:
        assert (
            b["cache_bytes"] == a["cache_bytes"] // 2 and b["weights_bytes"] == a["weights_bytes"]
        )
        assert b["tpot_s"] < a["tpot_s"] and b["memory_bytes"] < a["memory_bytes"]
    assert narrow.service["most_sequences"] > 1.8 * wide.service["most_sequences"]
    assert "float8_e4m3fn" in str(narrow) and "float8" not in str(wide)
    assert "cache_type" not in wide.service


@pytest.mark.slow
def test_requests_find_twice_the_room(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"prompt": 512, "generate": 32, "rate": 40, "devices": 2}
    wide, narrow = (serve(MODEL, cache_type=kind, **ask) for kind in ("compute", "fp8"))
    assert wide.traffic is not None and narrow.traffic is not None
    assert narrow.traffic["most_per_s"] >= 0.99 * wide.traffic["most_per_s"]
    if narrow.figures["split"] == wide.figures["split"]:
        room = [t["limits"]["cache_tokens"] for t in (wide.traffic, narrow.traffic)]
        assert room[1] == pytest.approx(2 * room[0], rel=0.05)
    narrow.save(tmp_path / "p.json")
    assert Serving.load(tmp_path / "p.json").shape == narrow.shape
    by_hand = tuple({**r, "fits": True} for r in narrow.rows)
    for engine, word in (("vllm", "fp8"), ("sglang", "fp8_e4m3")):
        text = hand_over(replace(narrow, rows=by_hand), engine).text
        assert f"--kv-cache-dtype {word} " in text.replace("\\\n", " ")


def test_an_unknown_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["zoo:llama-tiny,cache=1", "--workload", "infer", "--devices", "2"]
    whole = ["--prompt", "8", "--generate", "4", "--concurrency", "4"]
    assert main([*ask, *whole, "--cache-type", "fp9"]) == 2
    assert "error[P018]" in capsys.readouterr().err
    assert main([*ask, "--cache-type", "fp8"]) == 2
    assert "error[P222]" in capsys.readouterr().err
