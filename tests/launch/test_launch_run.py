"""Emitted training programs as they are launched: several processes, data, checkpoints read under
other plans, export. Long runs: benchmarks/launching.py."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.cli import main
from planner.emit.from_strategy import program
from planner.verify.numerics import load_program

GPT = "zoo:gpt-tiny,seq=16"
ROOT = Path(__file__).parents[2]


def strategy(model: str, devices: int, pins: str, precision: str = "fp32") -> planner.Strategy:
    return planner.plan(
        model,
        devices=devices,
        hardware="cpu",
        precision=precision,
        batch=16,
        pins=pins,
        baselines=False,
    )


def module(
    model: str, devices: int, pins: str, unroll: bool = False, precision: str = "fp32"
) -> types.ModuleType:
    compute = "bfloat16" if precision == "bf16-mixed" else "float32"
    return load_program(
        program(strategy(model, devices, pins, precision), model, unroll=unroll), compute=compute
    )


def state_of(m: types.ModuleType, seed: int) -> tuple[Any, Any, Any]:
    """(mesh, params, state) of a program, every value of them random and none the same."""
    import jax

    mesh = m.make_mesh()
    _, params, state = m.begin(types.SimpleNamespace(seed=seed), {}, mesh)
    rng = np.random.default_rng(seed)
    for key in m.PARAMS:
        state[key] = tuple(
            (
                jax.device_put(
                    np.where(np.asarray(x) == 0, 0, 1) + rng.random(x.shape, np.float32), x.sharding
                )
                if i < 2
                else x
            )
            for i, x in enumerate(state[key])
        )
    return mesh, params, state


def whole(m: types.ModuleType, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """label -> array without padding, repeats apart."""
    out = {}
    for key, row in m.PARAMS.items():
        value = np.asarray(arrays[key], np.float32)[tuple(slice(n) for n in row[0])]
        out |= dict(zip(m.labels_of(key, row), value if row[2] else [value], strict=True))
    return out


# --- export


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (GPT, "dp=4,tp=2,zero=1"),
        pytest.param("zoo:resnet-tiny", "pp=2,dp=4,micro=2", marks=pytest.mark.slow),
    ],
)
def test_trained_weights_are_exported_under_their_names(
    tmp_path: Path, model: str, pins: str
) -> None:
    """What a compiled step returns is in another order than the program's tables: after one step of
    1e-4 every weight is still near where it began."""
    import jax.numpy as jnp

    m = module(model, 8, pins)
    mesh = m.make_mesh()
    _, params, state = m.begin(types.SimpleNamespace(seed=3), {}, mesh)
    m.export(tmp_path / "before.safetensors", params, state)
    batch = m.place(m.synthetic_batch(0), m.specs_of(m.INPUTS), mesh)
    frozen = m.place(m.computed(m.initial_values(m.FROZEN, 3, {})), m.specs_of(m.FROZEN), mesh)
    params, state, _ = m.make_step(mesh)(params, state, frozen, batch, jnp.float32(1))
    m.export(tmp_path / "after.safetensors", params, state)
    before, after = (
        m.read_safetensors(tmp_path / f"{name}.safetensors") for name in ("before", "after")
    )
    assert before.keys() == after.keys() and len(before) >= 20
    for name, value in before.items():
        assert 0 < np.abs(after[name] - value).max() < 3e-4, name


# --- checkpoints


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saver", "reader"),
    [
        pytest.param(
            (8, "dp=4,tp=2,zero=1", False),
            (8, "pp=2,dp=4,micro=4", False),
            id="stages",
            marks=pytest.mark.slow,
        ),
        pytest.param((8, "pp=2,dp=2,tp=2,micro=4", False), (4, "dp=4,zero=3", True), id="unrolled"),
        pytest.param(
            (4, "tp=4", True), (8, "dp=8,zero=2", False), id="stacked", marks=pytest.mark.slow
        ),
    ],
)
def test_checkpoints_are_read_under_other_plans(
    tmp_path: Path, saver: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other meshes, device counts, padding, stages, and blocks stacked or apart: the same
    parameters and moments, bit for bit."""
    pytest.importorskip("orbax.checkpoint")
    import jax

    (n, pins, unroll), (n2, pins2, unroll2) = saver, reader
    every = jax.devices()
    model = f"{GPT},layers=3,vocab=67"  # divides by nothing
    monkeypatch.setattr(jax, "devices", lambda *a: every[:n])
    a = module(model, n, pins, unroll)
    _, params, state = state_of(a, 1)
    saved = a.open_checkpoints(str(tmp_path / "c"), 2)
    a.save(saved, 7, params, state)
    saved.close()
    monkeypatch.setattr(jax, "devices", lambda *a: every[:n2])
    b = module(model, n2, pins2, unroll2)
    mesh = b.make_mesh()
    saved = b.open_checkpoints(str(tmp_path / "c"), 2)
    done, params2, state2 = b.restore(saved, mesh)
    saved.close()
    assert done == 7
    for mine, theirs in (
        (whole(a, params), whole(b, params2)),
        *(
            (
                whole(a, {k: v[i] for k, v in state.items()}),
                whole(b, {k: v[i] for k, v in state2.items()}),
            )
            for i in (0, 1)
        ),
    ):
        assert mine.keys() == theirs.keys() and all(
            np.array_equal(mine[k], theirs[k]) for k in mine
        )
    for key, row in b.GRADIENTS.items():
        assert all(
            x.sharding.spec == row[-1] and x.shape == b.padded_shape(b.PARAMS[key][0], row[-1])
            for x in state2[key]
        )
        assert params2[key].sharding.spec == b.PARAMS[key][-1]


@pytest.mark.filterwarnings("ignore")
def test_short_types_are_saved_as_their_master_copies(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    a = module("zoo:mlp-tiny", 8, "dp=8,zero=1", precision="bf16-mixed")
    mesh, params, state = state_of(a, 2)
    saved = a.open_checkpoints(str(tmp_path / "c"), 2)
    a.save(saved, 3, params, state)
    _, params2, state2 = a.restore(saved, mesh)
    assert all(
        len(state2[k]) == 3
        and str(state2[k][2].dtype) == "float32"
        and str(params2[k].dtype) == "bfloat16"
        for k in params
    )
    assert all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for k in params
        for x, y in zip((params[k], *state[k]), (params2[k], *state2[k]), strict=True)
    )
    a.export(tmp_path / "w.safetensors", params, state)
    from safetensors.numpy import load_file

    exported = load_file(tmp_path / "w.safetensors")
    assert all(
        np.array_equal(exported[k], v)
        for k, v in whole(a, {k: v[2] for k, v in state.items()}).items()
    )
    assert a.read_safetensors(tmp_path / "w.safetensors").keys() == exported.keys() and not list(
        tmp_path.glob(".*")
    )
    with pytest.raises(SystemExit, match="another model"):
        module("zoo:mlp-tiny,layers=5", 8, "dp=8").restore(saved, mesh)
    b = load_program(
        program(
            planner.plan(
                "zoo:mlp-tiny",
                devices=8,
                hardware="cpu",
                batch=16,
                pins="dp=8",
                optimizer="sgd",
                baselines=False,
            ),
            "zoo:mlp-tiny",
        ),
        compute="bfloat16",
    )
    with pytest.raises(SystemExit, match="2 moments a parameter, this program's optimizer 0"):
        b.restore(saved, mesh)
    saved.close()
    shutil.rmtree(tmp_path / "c" / "3")
    saved = a.open_checkpoints(str(tmp_path / "c"), 2)
    assert a.restore(saved, mesh) is None and a.restore(None, mesh) is None
    saved.close()


# --- data


def samples(m: types.ModuleType, n: int) -> dict[str, np.ndarray]:
    """n samples of every input; sample i of an integer input begins with i."""
    out = {}
    for key, (shape, dtype, high, _) in m.INPUTS.items():
        sample = shape[m.leading(shape) :]
        rng = np.random.default_rng(3)
        out[key] = (
            rng.integers(0, high, (n, *sample)).astype(dtype)
            if high
            else rng.random((n, *sample), np.float32)
        )
        out[key].reshape(n, -1)[:, 0] = np.arange(n)
    return out


def write_shards(folder: Path, data: dict[str, np.ndarray], kind: str) -> None:
    folder.mkdir()
    pieces = [
        {k: v[low:high] for k, v in data.items()} for low, high in ((0, 11), (11, 12), (12, 40))
    ]
    for i, piece in enumerate(pieces):
        if kind == "safetensors":
            from safetensors.numpy import save_file

            save_file(
                {k: np.ascontiguousarray(v) for k, v in piece.items()},
                folder / f"{i:05}.safetensors",
            )
        else:
            for key, value in piece.items():
                np.save(folder / f"{key}-{i}.npy", value)


@pytest.mark.parametrize("kind", ["safetensors", "npy"])
@pytest.mark.parametrize("pins", ["dp=8", "dp=2,tp=4,micro=4"])
def test_shards_are_read_once_an_epoch_in_an_order_of_their_own(
    tmp_path: Path, kind: str, pins: str
) -> None:
    m = module(GPT, 8, pins)
    data = samples(m, 40)
    write_shards(tmp_path / "d", data, kind)
    source, mesh, seen = m.open_data(str(tmp_path / "d")), m.make_mesh(), []
    for step in range(4):
        batch = m.next_batch(source, step, 5, mesh)
        ids = np.asarray(batch["input_ids"]).reshape(16, -1)
        assert np.array_equal(ids, data["input_ids"][ids[:, 0]]) and np.array_equal(
            np.asarray(batch["labels"]).reshape(16, -1), data["labels"][ids[:, 0]]
        )
        assert all(batch[k].sharding.spec == row[-1] for k, row in m.INPUTS.items())
        seen.append(ids[:, 0].tolist())
    assert (
        len({*seen[0], *seen[1]}) == 32 and seen[0] != seen[2]
    )  # 40 samples: two batches an epoch
    assert seen == [
        np.asarray(m.next_batch(source, step, 5, mesh)["input_ids"]).reshape(16, -1)[:, 0].tolist()
        for step in range(4)
    ]
    assert (
        seen[0]
        != np.asarray(m.next_batch(source, 0, 6, mesh)["input_ids"]).reshape(16, -1)[:, 0].tolist()
    )


def test_a_process_reads_only_its_devices_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make_array_from_callback asks for the pieces of this process's devices: here for those of two
    of eight."""
    import jax

    m = module(GPT, 8, "dp=8")
    write_shards(tmp_path / "d", samples(m, 40), "npy")
    count, sample, _ = m.open_data(str(tmp_path / "d"))
    read: list[int] = []

    def reading(n: int) -> Any:
        read.append(n)
        return sample(n)

    def first_two(shape: Any, sharding: Any, piece: Any) -> list[Any]:
        return [piece(index) for index in list(sharding.devices_indices_map(shape).values())[:2]]

    monkeypatch.setattr(jax, "make_array_from_callback", first_two)
    m.next_batch((count, reading, False), 1, 0, m.make_mesh())
    assert set(read) == {16, 17, 18, 19}


MINE = """
import pathlib
import numpy as np

def rows():
    read = lambda key: np.concatenate([np.load(p) for p in sorted((pathlib.Path(__file__).parent / "d").glob(key + "-*.npy"))])
    return [{"input_ids": a, "labels": b} for a, b in zip(read("input_ids"), read("labels"))]

def shuffled():
    import grain
    return grain.MapDataset.source(rows()).shuffle(seed=1).repeat()
"""


def test_grain_datasets_and_lists_are_read_in_their_own_order(tmp_path: Path) -> None:
    m = module(GPT, 8, "dp=4,tp=2")
    write_shards(tmp_path / "d", samples(m, 40), "npy")
    (tmp_path / "mine.py").write_text(MINE)
    mesh = m.make_mesh()
    source = m.open_data(f"{tmp_path}/mine.py:rows")
    assert np.asarray(m.next_batch(source, 2, 0, mesh)["input_ids"])[:, 0].tolist() == [
        *range(32, 40),
        *range(8),
    ]
    pytest.importorskip("grain")
    source = m.open_data(f"{tmp_path}/mine.py:shuffled")
    seen = [
        np.asarray(m.next_batch(source, step, 0, mesh)["input_ids"])[:, 0].tolist()
        for step in range(5)
    ]
    assert sorted(i for batch in seen for i in batch) == sorted([*range(40)] * 2)


def test_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    m = module(GPT, 8, "dp=8")
    data = samples(m, 40)
    cases = {
        "short": ({k: v[:13] for k, v in data.items()}, "13 samples, a step reads 16"),
        "absent": ({"input_ids": data["input_ids"]}, "'labels'.*not among input_ids"),
        "shape": ({**data, "labels": data["labels"][:, :-1]}, r"'labels' of shape \(16,\)"),
        "none": ({}, "0 samples"),
    }
    for name, (wrong, message) in cases.items():
        write_shards(tmp_path / name, wrong, "npy")
        with pytest.raises(SystemExit, match=message):
            m.open_data(str(tmp_path / name))
    (tmp_path / "short" / "labels-2.npy").unlink()
    with pytest.raises(SystemExit, match="different numbers of files: input_ids 3, labels 2"):
        m.open_data(str(tmp_path / "short"))
    write_shards(tmp_path / "large", {**data, "input_ids": data["input_ids"] + 10_000}, "npy")
    with pytest.raises(SystemExit, match="the model's table ends at"):
        m.next_batch(m.open_data(str(tmp_path / "large")), 0, 0, m.make_mesh())


@pytest.mark.slow
def test_a_fresh_start_is_the_same_under_every_plan() -> None:
    a, b = module(GPT, 8, "pp=2,dp=4,micro=4"), module(GPT, 8, "tp=8", unroll=True)
    (_, x, _), (_, y, _) = (
        m.begin(types.SimpleNamespace(seed=4), {}, m.make_mesh()) for m in (a, b)
    )
    x, y = whole(a, x), whole(b, y)
    assert x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)


# --- the command


def launched(plan: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT)
    }
    words = (sys.executable, "-m", "planner.cli", "launch", str(plan), *words)
    return subprocess.run(
        words,
        cwd=plan.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss (\S+)", text)]


def test_two_processes_train_and_one_goes_on(tmp_path: Path) -> None:
    """Through the command: 2 x 2 devices, then 1 x 4 under the same plan from the checkpoint; as 1
    x 4 alone."""
    pytest.importorskip("orbax.checkpoint")
    from safetensors.numpy import load_file

    plan = tmp_path / "s.json"
    strategy("zoo:mlp-tiny", 4, "dp=2,tp=2").save(plan)
    first = launched(
        plan, "--local", "2", "--", "--steps", "3", "--checkpoints", "saved", "--save-every", "2"
    )
    assert (
        first.returncode == 0
        and len(losses(first.stdout)) == 3
        and "all 2 processes have ended" in first.stderr
    ), first.stderr
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"2", "3"} and (
        tmp_path / "mlp-tiny.launch" / "rank-1.log"
    ).exists()
    second = launched(
        plan,
        "--local",
        "1",
        "--",
        "--steps",
        "5",
        "--checkpoints",
        "saved",
        "--export",
        "a.safetensors",
    )
    assert "going on after step 2" in second.stdout and len(losses(second.stdout)) == 2
    alone = launched(plan, "--local", "1", "--", "--steps", "5", "--export", "b.safetensors")
    assert losses(first.stdout + second.stdout) == pytest.approx(losses(alone.stdout), abs=2e-6)
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert a.keys() == b.keys() and max(float(np.abs(a[k] - b[k]).max()) for k in a) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_the_mpirun_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy("zoo:mlp-tiny", 4, "dp=2,tp=2").save("s.json")
    Path("hosts").write_text("localhost slots=2\nlocalhost slots=2\n")
    assert (
        main(
            [
                "launch",
                "s.json",
                "--to",
                "mpirun",
                "--hostfile",
                "hosts",
                "--cpu",
                "--python",
                sys.executable,
                "-o",
                "d",
                "--",
                "--steps",
                "2",
            ]
        )
        == 0
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        ["bash", "d/mpirun.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0 and len(losses(done.stdout)) == 2, done.stderr


@pytest.mark.slow
def test_nodes_that_join_train_together(tmp_path: Path) -> None:
    """Two launchers on this machine, as two nodes: the same command twice."""
    plan = tmp_path / "s.json"
    strategy("zoo:mlp-tiny", 4, "dp=4").save(plan)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{s.getsockname()[1]}"
    words = [
        sys.executable,
        "-m",
        "planner.cli",
        "launch",
        str(plan),
        "--nnodes",
        "2",
        "--coordinator",
        at,
        "--cpu",
        "-o",
        "d",
        "--timeout",
        "200",
        "--",
        "--steps",
        "2",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT)
    }
    nodes = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [n.communicate(timeout=300) for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], said
    assert sorted(len(losses(out)) for out, _ in said) == [0, 2] and sorted(
        re.findall(r"this node is rank (\d)", "".join(err for _, err in said))
    ) == ["0", "1"]
