"""Programs in float16: their loss is scaled, steps whose gradients are not finite change nothing
but the scale, on all devices alike, and a run that is resumed goes on with the scale it had."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.precisions import TOLERANCES, begun, errors, program_of
from planner.verify.numerics import load_program, seeded_batch, seeded_values
from planner.verify.worker import verify

MLP, GPT, VIT = "zoo:mlp-tiny", "zoo:gpt-tiny", "zoo:vit-tiny"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("source", "pins", "backend"),
    [
        (MLP, "dp=2,tp=4,zero=1,micro=2", "shard_map"),
        pytest.param(GPT, "dp=2,tp=4,zero=1,micro=2", "shard_map", marks=slow),
        pytest.param(GPT, "dp=8,zero=3,micro=1", "shard_map", marks=slow),
        pytest.param(GPT, "pp=2,dp=2,tp=2,zero=1,micro=4", "shard_map", marks=slow),
        pytest.param(GPT, "dp=2,tp=4,zero=1,micro=1", "jit", marks=slow),
        pytest.param("zoo:bert-tiny", "dp=8,zero=1,micro=2", "shard_map", marks=slow),
        pytest.param(
            "zoo:resnet-tiny", "pp=4,dp=2,micro=4,widths=1+2+1,zero=1", "shard_map", marks=slow
        ),
    ],
)
def test_a_step_is_that_of_float32_but_for_rounding(source: str, pins: str, backend: str) -> None:
    """bert: the rows that count are a part of the data, and sums over them divide by their number:
    scaled, neither they nor means leave what float16 has numbers for."""
    found = errors(source, pins, backend, "fp16")
    assert found.within(TOLERANCES["fp16"]), found


class Run:
    """A program of a plan in float16, and its parameters and state from step to step."""

    def __init__(self, source: str, pins: str, compute: str = "float16", **constants: Any) -> None:
        strategy, made = program_of(source, pins, "shard_map", "fp16")
        assert strategy.graph is not None
        self.module = m = load_program(made, compute=compute)
        m.__dict__.update(constants)
        self.params, self.state, self.frozen = begun(m, made, seeded_values(strategy.graph, {}))
        self.compiled, self.count = m.make_step(m.make_mesh()), 0

    def step(self, seed: int = 0, **inputs: np.ndarray) -> tuple[float, ...]:
        """Numbers that a step on a seeded batch returns; with inputs in place of seeded ones."""
        import jax.numpy as jnp

        m, self.count = self.module, self.count + 1
        feeds = m.computed(seeded_batch(m, inputs, seed))
        data = m.place(feeds, m.specs_of(m.INPUTS), m.make_mesh())
        self.params, self.state, *seen = self.compiled(
            self.params, self.state, self.frozen, data, jnp.float32(self.count)
        )
        return tuple(map(float, seen))

    @property
    def scale(self) -> tuple[float, ...]:
        """The scale, the steps since it changed, and the steps that were skipped."""
        return tuple(map(float, self.state[self.module.SCALE]))

    def arrays(self) -> list[np.ndarray]:
        """Parameters and the optimizer's state of every device."""
        import jax

        kept = {key: row for key, row in self.state.items() if key != self.module.SCALE}
        return [
            np.asarray(shard.data)
            for array in jax.tree.leaves((self.params, kept))
            for shard in array.addressable_shards
        ]


def equal(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_step_that_overflows_changes_nothing_but_the_scale() -> None:
    """And is not counted: the steps after it are those of a run that began with the scale that is
    left."""
    run = Run(MLP, "dp=2,tp=4,zero=1,micro=1", LOSS_SCALE=2.0**24)
    before, skipped = run.arrays(), 0
    while not np.isfinite(run.step()[1]):
        skipped += 1
        assert equal(run.arrays(), before)
        assert run.scale == (2.0 ** (24 - skipped), 0, skipped)
    assert 0 < skipped < 15 and not equal(run.arrays(), before)
    seen = run.step(1)
    other = Run(MLP, "dp=2,tp=4,zero=1,micro=1", LOSS_SCALE=2.0 ** (24 - skipped))
    other.step()
    assert other.step(1) == seen and equal(other.arrays(), run.arrays())


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", ["dp=4,tp=2,zero=3,micro=1", pytest.param("pp=2,dp=2,tp=2,micro=4,zero=2", marks=slow)]
)
def test_one_sample_without_a_number_stops_the_update_of_all_devices(pins: str) -> None:
    run = Run(VIT, pins)
    run.step()
    before = run.arrays()
    name, (shape, *_) = next((n, row) for n, row in run.module.INPUTS.items() if row[1] == "float")
    images = np.zeros(shape, np.float32)
    images[(-1,) * len(shape)] = np.inf
    _, norm, scale = run.step(1, **{name: images})
    assert not np.isfinite(norm) and scale == 2.0**15
    assert equal(run.arrays(), before) and run.scale == (2.0**14, 0, 1)
    assert np.isfinite(run.step(2)[1]) and not equal(run.arrays(), before)


def test_the_scale_grows_after_steps_without_overflow() -> None:
    run = Run(MLP, "dp=8,micro=1", LOSS_SCALE=4.0, GROWS_AFTER=2)
    scales = [run.step(k)[2] for k in range(5)]
    assert scales == [4, 4, 8, 8, 16] and run.scale == (16, 1, 0)


@pytest.mark.slow
def test_in_float32_every_scale_gives_the_same_step() -> None:
    """Powers of two scale exactly: a loss that is not scaled and one that is are the same steps."""
    runs = [Run(MLP, "dp=2,tp=4,zero=1,micro=2", "float32", LOSS_SCALE=s) for s in (1.0, 2.0**15)]
    for k in range(2):
        (loss, norm, _), (other, other_norm, _) = (run.step(k) for run in runs)
        assert (loss, norm) == (other, other_norm)
    assert equal(runs[0].arrays(), runs[1].arrays())


@pytest.mark.slow
def test_a_clipped_step_is_clipped_by_the_norm_without_the_scale() -> None:
    free, clipped = (Run(MLP, "dp=8,micro=1", "float32", CLIP_NORM=c) for c in (0.0, 1e-3))
    _, norm, _ = free.step()
    assert norm > 1e-3 and clipped.step()[1] == pytest.approx(norm, rel=1e-6)
    key = next(iter(free.module.PARAMS))
    moments = [np.asarray(run.state[key][0]) for run in (free, clipped)]
    assert moments[1] == pytest.approx(moments[0] * 1e-3 / norm, rel=1e-5)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """main(precision, options...): runs the main of a program whose loss scale begins at 2**24."""

    def run(precision: str, *options: str) -> types.ModuleType:
        _, made = program_of(MLP, "dp=8,micro=1", "shard_map", precision)
        m = load_program(made, compute="float16" if precision == "fp16" else "float32")
        m.__dict__.update(LOSS_SCALE=2.0**24, __file__=str(tmp_path / "m.py"))
        monkeypatch.setattr(sys, "argv", ["m.py", "--lr", "1e-2", *options])
        m.main()
        return m

    return run


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_scale(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    log = tmp_path / "log.jsonl"
    main("fp16", "--steps", "12", "--export", str(tmp_path / "one"), "--log", str(log))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    skipped = sum(row["skipped"] for row in rows)
    assert 0 < skipped < 12
    assert [row["loss_scale"] for row in rows[: skipped + 1]] == [
        2.0 ** (24 - k) for k in range(skipped + 1)
    ]
    assert "loss scale 1.67772e+07; skipped: its gradients are not finite" in lines[0]
    saved = ["--checkpoints", str(tmp_path / "ck"), "--save-every", "1"]
    main("fp16", "--steps", "3", *saved)
    main("fp16", "--steps", "12", *saved, "--export", str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_is_read_in_another_precision(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Float32 values and moments are the same; a scale that a checkpoint lacks begins anew."""
    pytest.importorskip("orbax.checkpoint")
    for first, then in (("fp16", "fp32"), ("fp32", "fp16")):
        saved = ["--checkpoints", str(tmp_path / first)]
        main(first, "--steps", "2", *saved)
        main(then, "--steps", "3", *saved)
    text = capsys.readouterr().out
    assert text.count("going on after step 1") == 2 and "step 2" in text.splitlines()[-1]


@pytest.mark.slow
def test_what_is_verified_has_the_scale_and_the_agreement() -> None:
    """Bytes of the scale in arguments and results, and the one number that devices sum."""
    source = f"{MLP},layers=10"
    strategy, _ = program_of(source, "pp=2,dp=4,zero=1,micro=4", "shard_map", "fp16")
    report = verify(strategy, source, run=False)
    rows = {f.what: f for f in report.figures}
    assert all(f.distance == 0 for f in report.figures if f.judged)
    assert rows["all-reduce over stage+data"].predicted == 4
