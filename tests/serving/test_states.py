"""Serving of models that keep a state: what is emitted generates the tokens of the model without a
cache; what is kept counts by its own bytes; what is not planned for is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

import models_zoo
from planner.cli import main
from planner.errors import PlanError
from planner.serving.engines import hand_over
from planner.serving.pools import Apart, Pools
from planner.serving.result import Serving
from planner.serving.serve import program, serve
from tests.serving.test_serving import emitted, generated, on_mesh, prompts, uncached

SSM = "zoo:ssm-tiny,groups=2,weights=inline"
HYBRID = "zoo:hybrid-tiny,weights=inline"


def greedy(source: str, ids: np.ndarray, count: int) -> np.ndarray:
    """Tokens that onnxruntime generates with what the model keeps; 0 pads on the left."""
    session = onnxruntime.InferenceSession(models_zoo.build(source).SerializeToString())
    real = np.cumsum(ids != 0, 1).clip(0, 1)
    at = np.maximum(np.cumsum(real, 1) - 1, 0)
    given = {i.name: i.shape for i in session.get_inputs()}
    kept = {
        n: np.zeros([len(ids), *(d if isinstance(d, int) else 0 for d in shape[1:])], np.float32)
        for n, shape in given.items()
        if n.startswith("past")
    }
    names, tokens = [o.name for o in session.get_outputs()], [ids]
    for _ in range(count):
        feed = {"input_ids": tokens[-1], "attention_mask": real, "position_ids": at}
        feed = {n: v for n, v in feed.items() if n in given}
        out = dict(zip(names, session.run(None, feed | kept), strict=True))
        tokens.append(out["logits"][:, -1].argmax(-1)[:, None])
        real = np.concatenate([real, np.ones((len(ids), 1), np.int64)], 1)
        at = real.sum(1, keepdims=True) - 1
        present = {n.replace("present", "past", 1): v for n, v in out.items()}
        kept = {n: present[n.replace("past_key_values", "past", 1)] for n in kept}
    return np.concatenate(tokens[1:], 1)


def test_a_state_space_generates_what_the_model_without_a_cache_does(tmp_path) -> None:
    """Heads cut over four devices, two replicas, prompts passed two at once."""
    source = f"{SSM},cache=1"
    made, ids = on_mesh(source, 2, 4, prefill_tokens=8), np.random.default_rng(2)
    ids = ids.integers(1, 500, (4, 8))
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    assert (tokens == uncached(SSM, ids, 6)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "zoo:hybrid-tiny,kinds=DD*D",
        "zoo:hybrid-tiny,kinds=C*CC",
        "zoo:hybrid-tiny,kinds=H,decomposed=0",
    ],
)
def test_other_layers_that_keep_something_generate_alike(source, tmp_path) -> None:
    """The gated delta rule, short convolutions, a state space beside attention."""
    source, ids = f"{source},weights=inline,cache=1", prompts(4, 8)
    made = on_mesh(source, 2, 4)
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    assert (tokens == greedy(source, ids, 6)).all()


@pytest.mark.slow
def test_prompts_shorter_than_a_convolution_generate_alike(tmp_path) -> None:
    source = f"{HYBRID},cache=1"
    made = serve(source, prompt=2, generate=4, concurrency=4, devices=8)
    ids = np.random.default_rng(2).integers(1, 500, (4, 2))
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    assert (tokens == greedy(source, ids, 4)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "split", "label"), [(2, 4, "tp"), (1, 8, "tp"), (4, 2, "")])
def test_a_hybrid_generates_alike_behind_padding(replicas, split, label, tmp_path) -> None:
    source = f"{HYBRID},cache=1"
    made, ids = on_mesh(source, replicas, split, label=label), prompts(4, 8)
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    assert (tokens == greedy(source, ids, 6)).all()
    assert (tokens[2:] == uncached(HYBRID, ids[2:], 6)).all()


ASKED = {"prompt": 24, "generate": 8, "concurrency": 16, "devices": 2}
SEQUENCE = 3 * (8 * 8 * 16 * 4 + 3 * (128 + 32) * 2)
"""Bytes of hybrid-tiny: three layers of 8 heads of 8 x 16 in float32, and of three rows of 128 + 2 x
16 channels in bf16."""


@pytest.fixture(scope="module")
def hybrid() -> Serving:
    """The plan of a hybrid."""
    return serve("zoo:hybrid-tiny", **ASKED)


def test_states_count_by_their_own_bytes(hybrid: Serving) -> None:
    """Keys and values, two heads of 16 of 32 tokens, in bf16."""
    alone = next(r for r in hybrid.rows if r["label"] == "tp=1")
    assert alone["state_bytes"] == 16 * SEQUENCE // 2
    assert alone["cache_bytes"] == 16 * 2 * 2 * 32 * 16 * 2 // 2
    kept = sum(alone[k] for k in ("weights_bytes", "cache_bytes", "state_bytes"))
    assert alone["memory_bytes"] > kept


@pytest.mark.slow
def test_states_do_not_grow_with_the_length() -> None:
    short, long = (serve("zoo:ssm-tiny", **{**ASKED, "prompt": n}) for n in (24, 240))
    assert short.figures["state_bytes"] == long.figures["state_bytes"] > 0
    assert long.figures["cache_bytes"] == 0


@pytest.mark.slow
def test_a_step_is_priced_as_its_states_cross_memory() -> None:
    """Twice as many sequences take longer by what their states take to be read and written, and not
    by much more."""
    few, many = (
        serve("zoo:mamba2-130m", prompt=64, generate=8, concurrency=n, devices=1)
        for n in (512, 1024)
    )
    more = few.figures["state_bytes"]
    assert many.figures["state_bytes"] == 2 * more
    seconds = 2 * more / 3.35e12
    longer = many.figures["tpot_s"] - few.figures["tpot_s"]
    assert 0.9 * seconds < longer < 2 * seconds


def test_what_is_shown_and_kept_in_the_file(hybrid: Serving, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    hybrid.save(path)
    assert Serving.load(path).to_json() == hybrid.to_json()
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert ", state " in shown and "*.ssm [b/data, heads, v, k]" in shown


def test_engines_are_told_how_states_are_kept(hybrid: Serving) -> None:
    assert "--mamba-ssm-cache-dtype float32" in hand_over(hybrid, "vllm").text
    assert "--mamba-ssm-dtype float32" in hand_over(hybrid, "sglang").text
    rows_alone = serve("zoo:hybrid-tiny,kinds=C,layers=2", **ASKED)
    assert "mamba" not in hand_over(rows_alone, "vllm").text


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [pytest.param("zoo:hybrid-tiny", marks=pytest.mark.slow), "zoo:ssm-tiny"]
)
def test_requests_that_arrive_find_room_for_states(source, capsys) -> None:
    made = serve(source, prompt=24, generate=8, rate=50, devices=2)
    t = made.traffic
    assert t is not None and t["stable"] and made.figures["state_bytes"]
    assert made.service["most_sequences"] >= t["limits"]["sequences"]
    assert str(made)


@pytest.mark.slow
def test_states_go_to_the_replicas_that_generate(monkeypatch) -> None:
    """With each request's keys and values, whatever its length."""
    found: list[Apart] = []
    best = Pools.best

    def recorded(self: Pools, *args: Any) -> list[Apart]:
        found.extend(best(self, *args))
        return found

    monkeypatch.setattr(Pools, "best", recorded)
    serve("zoo:hybrid-tiny", prompt="8..64", generate=8, rate=50, devices=2, pools=True)
    (apart, *_) = found
    assert apart.decode.sequence_bytes == SEQUENCE
    assert apart.said()["pools"]["transfer"]["bytes_per_sequence"] == SEQUENCE
    keys = np.unique(apart.sent_s)
    assert len(keys) > 1 and keys[0] > SEQUENCE / 450e9


@pytest.mark.slow
def test_both_phases_keep_the_same_weights_in_float8() -> None:
    """Projections whose rows convolutions keep are no heads, in steps either."""
    made = serve("zoo:hybrid-tiny", **ASKED, precision="fp8")
    assert (
        '"model.layers.3.mamba.in_proj.x.weight": ((128, 64)'
        in program(made, "zoo:hybrid-tiny").text
    )


@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        ("zoo:hybrid-tiny", {"draft": 0.1}, "would have to be taken back"),
        ("zoo:llama-tiny", {"draft": "zoo:hybrid-tiny"}, "would have to be taken back"),
        ("zoo:ssm-tiny", {"cache_type": "fp8"}, "keeps no keys and values"),
    ],
)
def test_what_states_do_not_go_with_is_refused(source, more, says) -> None:
    with pytest.raises(PlanError, match=says) as e:
        serve(source, **ASKED, **more)
    assert e.value.code == "P222"


def test_a_state_that_is_used_otherwise_is_refused() -> None:
    model = models_zoo.build("zoo:ssm-tiny,cache=1")
    node = next(n for n in model.graph.node if n.op_type == "Concat")
    node.input[0], node.input[1] = node.input[1], node.input[0]
    with pytest.raises(PlanError, match="not used as a causal convolution") as e:
        serve(model, **ASKED)
    assert e.value.code == "P221"
