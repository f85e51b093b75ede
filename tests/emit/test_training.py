"""What emitted programs train with: the learning rate's schedule, from step to step and when a run
goes on from a checkpoint."""

from __future__ import annotations

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
    with pytest.raises(SystemExit, match=f"{option} -1.* below 0"):
        run(f"{option}=-1")
