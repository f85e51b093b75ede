"""What emitted programs train with: the learning rate's schedule, also when a run goes on from a
checkpoint; clipping and weight decay, beside optax on one device."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import planner
from planner.emit.from_strategy import program
from planner.verify.numerics import load_program

MLP = "zoo:mlp-tiny"


@pytest.fixture(scope="module")
def mlp() -> types.ModuleType:
    """The program of a small MLP under data parallelism."""
    strategy = planner.plan(MLP, devices=8, batch=8, precision="fp32", pins="dp=8", baselines=False)
    return load_program(program(strategy, MLP))


@pytest.fixture
def run(
    mlp: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> types.FunctionType:
    """Runs the program's main with options; its constants are as they were afterwards."""
    for name in [*(row[1] for row in mlp.SETTINGS), "STEPS", "__file__"]:
        if name in mlp.__dict__:
            monkeypatch.setitem(mlp.__dict__, name, mlp.__dict__[name])
    monkeypatch.setitem(mlp.__dict__, "__file__", str(tmp_path / "m.py"))

    def main(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["m.py", *options])
        mlp.main()

    return main  # type: ignore[return-value]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_learning_rate_is_that_of_optax(
    mlp: types.ModuleType, monkeypatch: pytest.MonkeyPatch, schedule: str, warmup: int
) -> None:
    """Counted from 1: the first step of a warm-up moves, and the last step has the last rate."""
    optax = pytest.importorskip("optax")
    import jax.numpy as jnp

    constants = {
        "LEARNING_RATE": 2.0,
        "WARMUP_STEPS": warmup,
        "SCHEDULE": schedule,
        "END_FRACTION": 0.25,
        "STEPS": 20,
    }
    for name, value in constants.items():
        monkeypatch.setitem(mlp.__dict__, name, value)
    after = {
        "constant": optax.constant_schedule(2.0),
        "cosine": optax.cosine_decay_schedule(2.0, 20 - warmup, 0.25),
        "linear": optax.linear_schedule(2.0, 0.5, 20 - warmup),
    }[schedule]
    wanted = optax.join_schedules([optax.linear_schedule(0.0, 2.0, warmup), after], [warmup])
    for count in range(1, 23):
        assert float(mlp.learning_rate(jnp.float32(count))) == pytest.approx(
            float(wanted(count) if warmup else after(count)), rel=1e-6
        )


def test_a_resumed_run_has_the_rates_of_one_that_was_not_interrupted(
    run: types.FunctionType, tmp_path: Path
) -> None:
    usual = ["--lr", "1e-2", "--schedule", "cosine", "--warmup", "2", "--steps", "6"]
    run(*usual, "--export", str(tmp_path / "one.safetensors"))
    saved = ["--checkpoints", str(tmp_path / "ck"), "--save-every", "3"]
    run(*usual, *saved)
    (tmp_path / "ck" / "6").rename(tmp_path / "ck" / "aside")
    run(*usual, *saved, "--export", str(tmp_path / "two.safetensors"))
    one, two = (
        np.fromfile(tmp_path / f"{name}.safetensors", np.uint8)[8:] for name in ("one", "two")
    )
    assert np.array_equal(one, two)


@pytest.mark.parametrize("option", ["--lr", "--warmup", "--lr-end-fraction"])
def test_settings_below_zero_are_refused(run: types.FunctionType, option: str) -> None:
    with pytest.raises(SystemExit, match=f"{option} -1.*: a finite number of at least 0"):
        run(f"{option}=-1")


def test_a_log_has_a_line_for_each_step_and_each_evaluation(
    mlp: types.ModuleType, run: types.FunctionType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an evaluation is that of the parameters behind its step; nothing is moved by it,
    nor by reading the results of a step while the next one runs."""
    rng, log = np.random.default_rng(0), tmp_path / "log.jsonl"
    (tmp_path / "data").mkdir()
    for name, (shape, _, limit, _) in mlp.INPUTS.items():
        rows = (24, *shape[1:])
        array = rng.integers(0, limit, rows) if limit else rng.standard_normal(rows, np.float32)
        np.save(tmp_path / "data" / f"{name}.npy", array)
    for name in ("ITEMS", "ITEM", "MODEL_FLOPS", "NORM_LOGGED"):
        monkeypatch.setitem(mlp.__dict__, name, mlp.__dict__[name])
    usual = ["--steps", "7", "--lr", "1e-2", "--warmup", "4", "--data", str(tmp_path / "data")]
    run(*usual, "--export", str(tmp_path / "plain.safetensors"))
    watched = ["--eval-every", "3", "--eval-data", str(tmp_path / "data"), "--eval-batches", "9"]
    exported = ["--export", str(tmp_path / "watched.safetensors")]
    run(*usual, *watched, *exported, "--log", str(log), "--profile", str(tmp_path / "trace"))
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 5, 5, 6]
    assert [i for i, row in enumerate(rows) if "evaluation_loss" in row] == [3, 7]
    assert rows[7]["evaluation_loss"] < rows[3]["evaluation_loss"]
    steps = [row for row in rows if "loss" in row]
    assert [row["learning_rate"] for row in steps[:5]] == pytest.approx(
        [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2]
    )
    assert all(row["gradient_norm"] > 0 and row["samples_per_s"] > 0 for row in steps)
    assert 0 < steps[-1]["mfu"] < 1 and list((tmp_path / "trace").rglob("*.xplane.pb"))
    one, two = (
        np.fromfile(tmp_path / f"{name}.safetensors", np.uint8) for name in ("plain", "watched")
    )
    assert np.array_equal(one, two)


def test_an_evaluation_needs_data(run: types.FunctionType) -> None:
    with pytest.raises(SystemExit, match="--eval-every needs --eval-data"):
        run("--eval-every", "1")


def test_figures_count_half_of_causal_attention() -> None:
    """FLOPs of a step over all devices: three times those of the forward pass."""
    options = {"devices": 8, "batch": 16, "precision": "fp32", "baselines": False}
    source = "zoo:gpt-tiny"
    m = load_program(program(planner.plan(source, **options, pins="dp=2,tp=4,micro=2"), source))
    positions, width, vocabulary, layers = 16, 64, 512, 2
    products = 12 * width * width * layers + width * vocabulary  # parameters in products
    hidden = 2 * positions * width * layers  # of scores and their use, a token
    assert m.ITEM == "tokens" and 16 * positions == m.ITEMS
    flops = 3 * m.ITEMS * (2 * products + hidden)
    assert flops == pytest.approx(m.MODEL_FLOPS, rel=1e-4)
    assert m.PEAK_FLOPS > 1e9


# --- twenty steps beside those of optax on one device

GPT = "zoo:gpt-tiny,layers=2,vocab=509"  # 509 is cut with padding
TWENTY = 20
CUTS = [
    pytest.param("shard_map", "dp=8,zero=0,micro=2", marks=pytest.mark.slow),
    pytest.param("shard_map", "dp=2,tp=4,zero=1,micro=1", marks=pytest.mark.slow),
    ("shard_map", "dp=8,zero=3,micro=1"),
    pytest.param("shard_map", "pp=2,dp=2,tp=2,zero=1,micro=4", marks=pytest.mark.slow),
    pytest.param("jit", "dp=2,tp=4,zero=1,micro=1", marks=pytest.mark.slow),
]
CONSTANTS = {
    "LEARNING_RATE": 3e-3,
    "WARMUP_STEPS": 4,
    "SCHEDULE": "cosine",
    "STEPS": TWENTY,
    "CLIP_NORM": 0.7,
    "WEIGHT_DECAY": 0.3,
    "EPSILON": 1e-3,
}


def on_one_device(graph: planner.graph.ir.Graph, values: dict, batches: list) -> tuple:
    """(parameters by label, losses, norms of gradients) of optax's clipped AdamW."""
    import jax
    import optax

    from planner.emit.program import emit
    from planner.execution.plan import Plan

    made = emit(graph, Plan((), {}), workload="train", unroll=True)
    m = load_program(made, "unsharded")
    label_of = {key: names[0] for key, names in made.labels.items()}
    params, frozen = (
        {key: values[label_of[key]] for key in table} for table in (m.PARAMS, m.FROZEN)
    )
    spared = {key for key, p in params.items() if p.ndim < 2 or "wte" in key or "wpe" in key}
    rates = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, TWENTY, 3e-4)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.adamw(
            lambda k: rates(k + 1),
            eps=1e-3,
            weight_decay=0.3,
            mask={key: key not in spared for key in params},
        ),
    )
    state, losses, norms = optimizer.init(params), [], []
    gradients = jax.jit(jax.value_and_grad(lambda p, batch: m.loss_of(p, frozen, batch)))
    change = jax.jit(optimizer.update)
    for batch in batches:
        loss, grads = gradients(params, batch)
        losses.append(float(loss))
        norms.append(float(optax.tree.norm(grads)))
        updates, state = change(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {label_of[key]: np.asarray(p) for key, p in params.items()}, losses, norms


@pytest.fixture(scope="module")
def reference() -> tuple:
    """(values before the first step, batches, what they are after it)."""
    pytest.importorskip("optax")
    from planner.verify.numerics import seeded_values

    strategy = planner.plan(GPT, devices=1, batch=16, precision="fp32", baselines=False)
    graph = strategy.graph
    rng = np.random.default_rng(0)
    batches = [
        {name: rng.integers(0, 509, (16, 16), np.int32) for name in ("input_ids", "labels")}
        for _ in range(TWENTY)
    ]
    values = seeded_values(graph, {})
    return values, batches, on_one_device(graph, values, batches)


def assert_steps_are(
    strategy: planner.Strategy, source: str, backend: str, reference: tuple
) -> None:
    """Losses, norms of gradients, and parameters."""
    import jax.numpy as jnp

    from planner.verify.numerics import placed, unstacked

    values, batches, (wanted, losses, norms) = reference
    made = program(strategy, source, backend=backend)
    m = load_program(made)
    m.__dict__.update(CONSTANTS)
    mesh = m.make_mesh()
    params, frozen = (placed(m, made, table, values, mesh) for table in ("PARAMS", "FROZEN"))
    _, _, state = m.begin(types.SimpleNamespace(seed=0), {}, mesh)
    step = m.make_step(mesh)
    for k, batch in enumerate(batches):
        batch = {name: x.reshape(m.INPUTS[name][0]) for name, x in batch.items()}
        data = m.place(batch, m.specs_of(m.INPUTS), mesh)
        if not k and m.MICROBATCHES > 2:  # pipeline stages, whose loss has no program of its own
            alone = m.make_loss(mesh)(params, frozen, data)
            assert float(alone) == pytest.approx(losses[0], rel=1e-5)
        params, state, loss, norm = step(params, state, frozen, data, jnp.float32(k + 1))
        assert float(loss) == pytest.approx(losses[k], rel=1e-5)
        assert float(norm) == pytest.approx(norms[k], rel=1e-5)
    for label, p in unstacked(m, made, params, wanted).items():
        scale = np.abs(wanted[label]).max()
        assert np.abs(p - wanted[label]).max() < 1e-5 * scale, label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "pins"),
    [
        *CUTS,
        pytest.param(
            "shard_map", "dp=8,micro=2,zero=1,offload=optimizer+parameters", marks=pytest.mark.slow
        ),
    ],
)
def test_twenty_steps_are_those_of_optax(backend: str, pins: str, reference: tuple) -> None:
    """Warm-up and cosine, clipping that is at work, and decay of matrices alone."""
    strategy = planner.plan(GPT, devices=8, batch=16, precision="fp32", baselines=False, pins=pins)
    norms = reference[2][2]
    assert min(norms) < CONSTANTS["CLIP_NORM"] < max(norms)
    assert_steps_are(strategy, GPT, backend, reference)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("zero=1", marks=pytest.mark.slow),
        pytest.param("zero=0,offload=optimizer", marks=pytest.mark.slow),
    ],
)
def test_steps_of_uneven_stages_are_those_of_optax(more: str) -> None:
    """One of the three stages is at two places, whose gradients count once."""
    pytest.importorskip("optax")
    from planner.verify.numerics import seeded_values

    source, options = "zoo:resnet-tiny", {"batch": 16, "precision": "fp32", "baselines": False}
    strategy = planner.plan(
        source, devices=8, pins=f"pp=4,dp=2,micro=4,widths=1+2+1,{more}", **options
    )
    graph = planner.plan(source, devices=1, **options).graph
    assert graph is not None
    rng = np.random.default_rng(0)
    shapes = {name: graph.tensors[name].shape for name in graph.inputs}
    batches = [
        {
            name: (
                rng.standard_normal(shape, np.float32)
                if graph.tensors[name].is_float
                else rng.integers(0, 10, shape, np.int32)
            )
            for name, shape in shapes.items()
        }
        for _ in range(3)
    ]
    values = seeded_values(graph, {})
    assert_steps_are(
        strategy, source, "shard_map", (values, batches, on_one_device(graph, values, batches))
    )


@pytest.mark.parametrize(
    "pins",
    [
        "dp=2,tp=4,zero=1,micro=2",
        pytest.param(
            "dp=4,tp=2,zero=3,micro=1,offload=optimizer+parameters", marks=pytest.mark.slow
        ),
    ],
)
def test_clipping_is_one_sum_of_a_number_over_all_devices(pins: str) -> None:
    """Collectives of the compiled step with it and without, which is what is priced and verified;
    without, a step returns what it did before there was clipping."""
    from planner.verify.ahead import compiled_traffic
    from planner.verify.compiled import compile_module

    strategy = planner.plan(
        "zoo:mlp-tiny", devices=8, batch=16, precision="fp32", baselines=False, pins=pins
    )
    made, sent = program(strategy, "zoo:mlp-tiny"), []
    for norm in (0.0, 1.0):
        m = load_program(made)
        m.__dict__["CLIP_NORM"] = norm
        text = compile_module(m, "train").as_text()
        sent.append(compiled_traffic(text, strategy.plan, True))
    over = "all-reduce", "+".join(name for name, _ in strategy.mesh_shape)
    assert sent[1] == {**sent[0], over: sent[0].get(over, 0) + 4}
