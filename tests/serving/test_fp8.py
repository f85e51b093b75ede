"""Serving in float8: weights of products and experts in a byte, rows made float8 as they come; near
float32, priced and handed over as such."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

import models_zoo
from planner.cli import main
from planner.emit.runtime.kernels import experts, grouped_experts
from planner.errors import PlanError
from planner.ops.lookup import rule_of
from planner.pins.pins import Pins
from planner.search.build_request import make_request
from planner.search.to_strategy import compose
from planner.serving.engines import hand_over
from planner.serving.joint import NO_TECHNIQUES, Joint
from planner.serving.quantize import routers, scales, turned
from planner.serving.result import Serving
from planner.serving.serve import reopened, serve
from tests.ops.test_expert_kernels import EXPERTS, NVIDIA, on, operands
from tests.serving.test_serving import LLAMA, emitted, generated, greedy, prompts

MIXTURE = "zoo:deepseek-tiny,cache=1,weights=inline"
NEAR = 0.1
"""Of the norm of what the last layer keeps, what float8 changes (docs/serving.md)."""
E4M3 = ml_dtypes.float8_e4m3fn


@cache
def planned(source: str, precision: str, devices: int = 8, **more: Any) -> Serving:
    ask: dict[str, Any] = {"prompt": 8, "generate": 6, "concurrency": 8, **more}
    return serve(source, devices=devices, precision=precision, **ask)


def rounded(w: np.ndarray, dim: int) -> np.ndarray:
    """A weight as a program keeps it, by numpy."""
    largest = np.abs(w).max(dim, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    return ((w / scale).astype(E4M3).astype(np.float32) * scale).astype(np.float32)


def with_rounded_weights(source: str, made: Serving) -> Any:
    """The model with the weights that the program keeps in the place of its own."""
    model = models_zoo.build(source)
    graph = reopened(made, source)[1].graph(1)
    kept = {graph.labels.get(name, name): dim for name, (_, dim) in scales(graph).items()}
    stored = {i.name: i for i in model.graph.initializer}
    changed = 0
    for name, (_, dim) in scales(graph).items():
        for known in (name, graph.labels.get(name, name)):
            if known in stored:
                values = numpy_helper.to_array(stored[known])
                around = name in turned(graph)
                assert values.shape == graph.tensors[name].shape[:: -1 if around else 1]
                values = rounded(values, values.ndim - 1 - dim if around else dim)
                stored[known].CopyFrom(numpy_helper.from_array(values, known))
                changed += 1
                break
    assert kept and changed == len(kept), (len(kept), changed)
    return model


KEPT = """
import importlib.util, sys
import numpy as np
path, ids, out, *argv = sys.argv[1:]
sys.argv = [path, "--virtual-devices", "8", *argv]
spec = importlib.util.spec_from_file_location("served", path)
served = importlib.util.module_from_spec(spec)
spec.loader.exec_module(served)
args = served.command_line([])
mesh, ids = served.make_mesh(), np.load(ids).astype(np.int32)
weights, caches = served.load_weights(args, mesh), served.make_caches(mesh)
_, caches = served.pass_prompts(
    served.make_prefill(mesh), weights, caches, ids, np.ones_like(ids)
)
np.savez(out, **{k: np.asarray(v.astype("float32")) for k, v in caches.items()})
"""


def caches_of(
    folder: Path, source: str, made: Serving, *more: str, devices: int = 8
) -> dict[str, np.ndarray]:
    """What a program keeps of its prompts."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    folder.mkdir()
    np.save(folder / "ids.npy", np.random.default_rng(3).integers(1, 500, (8, 8)))
    words = [folder / emitted(folder, source, made), folder / "ids.npy", folder / "out.npz", *more]
    done = subprocess.run(
        [sys.executable, "-c", KEPT, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(folder / "out.npz"))


@pytest.mark.parametrize("source", [LLAMA, pytest.param(MIXTURE, marks=pytest.mark.slow)])
def test_a_program_is_near_float32(source: str, tmp_path: Path) -> None:
    """Of what the last layer keeps of prompts, behind the rounding of all layers before it."""
    made, plain = (planned(source, precision, 2) for precision in ("fp8", "bf16-mixed"))
    near = caches_of(tmp_path / "fp8", source, made, devices=2)
    exact = caches_of(tmp_path / "exact", source, plain, "--float32", devices=2)
    text = (tmp_path / "fp8/serve.py").read_text()
    assert "WEIGHT_TYPE = jnp.float8_e4m3fn" in text and "rows8(" in text
    off = [
        float(np.linalg.norm(near[k] - exact[k]) / np.linalg.norm(exact[k])) for k in [*exact][-2:]
    ]
    assert all(0.005 < x < NEAR for x in off), off


@pytest.mark.slow
@pytest.mark.parametrize("source", [LLAMA, MIXTURE])
def test_weights_are_what_the_page_says(source: str, tmp_path: Path) -> None:
    """The model with Q * s in the place of each weight, run by onnxruntime, generates the tokens of
    the program in float32, which does not round rows."""
    made = planned(source, "fp8")
    ids = prompts(8, 8)
    tokens = generated(tmp_path, emitted(tmp_path, source, made), ids)
    assert (tokens == greedy(with_rounded_weights(source, made), ids, 6)).all()


def test_what_is_kept_in_float8() -> None:
    """Linear layers and experts, each with a power of two for every column; not the router, the
    head, what spreads latents, or a width that tensor cores do not take."""
    first, step = reopened(planned(MIXTURE, "fp8", devices=1), MIXTURE)
    for graph in (first.graph(1), step.graph(1)):
        found = scales(graph)
        assert {graph.tensors[w].dtype for w in found} == {"uint8"}
        assert {graph.nodes[i].inputs[1] for i in routers(graph)}.isdisjoint(found)
        assert routers(graph)
        wide = {n for n in graph.weights if graph.tensors[n].dtype == "uint8"}
        assert wide == set(found)
        names = " ".join(graph.labels.get(n, n) for n in wide)
        assert "o_proj" in names and "experts" in names and "mlp.down_proj" in names
        assert "kv_b_proj" not in names and "lm_head" not in names
        for w, (s, dim) in found.items():
            shape = graph.tensors[w].shape
            assert graph.tensors[s].shape == (*shape[:dim], *shape[dim + 1 :])


@pytest.mark.parametrize(
    ("way", "turned"),
    [
        ("blocks", False),
        ("one kernel", True),
        pytest.param("blocks", True, marks=pytest.mark.slow),
        pytest.param("one kernel", False, marks=pytest.mark.slow),
    ],
)
def test_experts_multiply_rounded_rows(
    way: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By blocks and by one kernel (in plain operations), beside products of operands that numpy
    rounded."""
    import jax
    import jax.numpy as jnp

    monkeypatch.setattr(experts, "takes_grouped", lambda *_: False)
    on(monkeypatch, NVIDIA)
    x, share, whole, _ = operands(turned, True, True)
    short = jnp.bfloat16
    x, share = x.astype(short), share.astype(short)
    dims = (2, 2, 2) if turned else (1, 1, 1)
    exact, kept, by = [], [], []
    for w, dim in zip(whole[:3], dims, strict=True):
        w = np.asarray(w)
        scale = 2.0 ** np.ceil(np.log2(np.abs(w).max(dim, keepdims=True) / 448))
        kept.append(jnp.asarray((w / scale).astype(E4M3)))
        by.append(jnp.asarray(scale.squeeze(dim), short))
        exact.append(rounded(w, dim))
    biases = [b.astype(short) for b in whole[3:]]
    ids = np.random.default_rng(3).integers(0, EXPERTS + 1, len(share))
    forms = ("rh,fh->rf", "rf,hf->rh") if turned else ("rh,hf->rf", "rf,fh->rh")
    how = (lambda g, u: jax.nn.silu(g) * u, *forms, 32, 3)
    run = grouped_experts.grouped_results if way == "one kernel" else experts.expert_results
    more = (True,) if way == "one kernel" else ()
    found = jax.jit(lambda *v: run(how, *v, *more))(
        x, jnp.asarray(ids), share, (*kept, *biases, *by)
    )

    def rows(v: np.ndarray) -> np.ndarray:
        scale = np.abs(v).max(-1, keepdims=True) / 448
        scale = np.where(scale == 0, 1, scale)
        return (v / scale).astype(E4M3).astype(np.float32) * scale

    def product(v: np.ndarray, k: int, e: int) -> np.ndarray:
        w = exact[k][e].T if turned else exact[k][e]
        return rows(v) @ w + np.asarray(biases[k][e], np.float32)

    want = np.zeros(x.shape, np.float32)
    for row, (e, part) in enumerate(zip(ids, np.asarray(share, np.float32), strict=True)):
        if e < EXPERTS:
            v = np.asarray(x, np.float32)[row // 2]
            g, u = product(v, 0, e), product(v, 1, e)
            want[row // 2] += part * product(np.asarray(jax.nn.silu(g) * u), 2, e)
    off = np.linalg.norm(np.asarray(found, np.float32) - want) / np.linalg.norm(want)
    assert off < 0.02  # hidden activations are rounded to bfloat16 before they are to float8


@pytest.mark.slow
def test_a_byte_a_weight_is_priced_and_its_products_are_faster() -> None:
    ask: dict[str, Any] = {"prompt": 512, "generate": 64, "concurrency": 64, "devices": 4}
    source = "zoo:mixtral-8x7b,layers=2"
    wide, short = (
        {r["label"]: r for r in serve(source, precision=p, **ask).rows}
        for p in ("bf16-mixed", "fp8")
    )
    for label in ("tp=1", "tp=4", "ep=4 tp=1"):
        assert short[label]["weights_bytes"] < 0.6 * wide[label]["weights_bytes"]
        least = 0.7 if label == "tp=1" else 0.85  # small kernels take their launch
        assert short[label]["tpot_s"] < least * wide[label]["tpot_s"]
        assert short[label]["ttft_s"] < 0.85 * wide[label]["ttft_s"]
        assert short[label]["cache_bytes"] == wide[label]["cache_bytes"]


def shared_experts(source: str, precision: str) -> Serving:
    """A plan of four replicas of two devices that share experts."""
    made = planned(source, precision)
    machine: dict[str, Any] = {"hardware": None, "topology": None, "workload": "infer"}
    request = make_request(devices=8, precision=precision, baselines=False, **machine)
    first, step = reopened(made, source)
    joint = Joint(first, step, request)
    solved = []
    for model in (joint.prompts(4), step):
        nodes = model.graph(1).nodes
        pinned: dict[str, Any] = {
            glob.escape(n.id): {"split": {"expert-b": ["expert"]}}
            for n in nodes
            if n.op == "RoutedExperts"
        }
        pins = Pins({"expert": (4,), "tensor": (2,)}, NO_TECHNIQUES, nodes=pinned)
        solved.append(joint.solve(model, pins))
    assert solved[0] is not None and solved[1] is not None, joint.refused
    pair = joint.price("ep=4", solved[0], solved[1], 4, 2)
    assert pair is not None
    prompts_, each = (
        compose(m, request, f, {}, ())
        for m, f in ((joint.prompts(4), pair.prompts), (step, pair.step))
    )
    return replace(made, figures=pair.figures(), prompts=prompts_, step=each)


@pytest.mark.slow
def test_rows_travel_in_float8(tmp_path: Path) -> None:
    """To their experts, with a scale each, which is priced; back as they are between products."""
    made = shared_experts(MIXTURE, "fp8")
    near = caches_of(tmp_path / "fp8", MIXTURE, made)
    alone = caches_of(tmp_path / "alone", MIXTURE, planned(MIXTURE, "fp8"))
    last = [*alone][-1]
    off = np.linalg.norm(near[last] - alone[last]) / np.linalg.norm(alone[last])
    assert off < NEAR
    assert "exchanged_experts(" in (tmp_path / "fp8/serve.py").read_text()
    graph = reopened(made, MIXTURE)[1].graph(1)
    i = next(i for i, n in enumerate(graph.nodes) if n.op == "RoutedExperts")
    rule = rule_of(graph.nodes[i], graph)[0]
    there = [k for k in rule.inner if k.over == ("h",)]
    assert [(k.forward, k.itemsize) for k in there] == [(1, 1), (1, 0)]


def test_both_ways_to_keep_weights_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--workload", "infer", "--prompt", "8", "--generate", "4", "--concurrency", "4"]
    more = ["--precision", "fp8", "--quantize", "int8"]
    assert main([LLAMA, "--devices", "2", *ask, *more]) == 2
    assert "P024" in (said := capsys.readouterr().err) and "--quantize int8 alone" in said


def test_devices_without_float8_are_told() -> None:
    ask: dict[str, Any] = {"prompt": 8, "generate": 4, "concurrency": 8, "devices": 1}
    for hardware, told in (("a100-80gb", True), ("h100", False)):
        made = serve(LLAMA, hardware=hardware, precision="fp8", **ask)
        text = " ".join(str(made).split())
        assert ("multiplies no float8: weights take a byte" in text) == told
        assert "fp8: weights of products and experts" in text and "2 bytes a parameter" not in text


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_engines_are_told(engine: str) -> None:
    made = planned("zoo:llama3-8b,layers=1", "fp8", devices=4, objective="tpot")
    rows = [{**r, "fits": True} for r in made.rows if r["label"].startswith("tp=")]
    best = min(rows, key=lambda r: r["tpot_s"])
    made = replace(made, rows=tuple(rows), figures={**made.figures, "tpot_s": best["tpot_s"]})
    text = " ".join(hand_over(made, engine).text.split())
    assert "--quantization fp8" in text and "--dtype bfloat16" in text


def test_a_file_says_it_again(tmp_path: Path) -> None:
    made = planned(LLAMA, "fp8", 2)
    made.save(tmp_path / "plan.json")
    again = Serving.load(tmp_path / "plan.json")
    assert again.shape.quantize == "fp8"
    with pytest.raises(PlanError):
        serve(LLAMA, prompt=8, generate=4, concurrency=4, devices=2, precision="fp9")
