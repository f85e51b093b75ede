"""Emitted programs where they used to break: what pipelines begin with, attention in blocks,
options that no program has, files that are damaged, and what a failure says."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import types
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.cli import main
from planner.emit.from_strategy import program
from planner.emit.writer import Program
from planner.errors import PlanError
from planner.execution.stage_buffers import _keys
from planner.report.findings import findings
from planner.verify import failure, worker
from planner.verify.compiled import lowered
from planner.verify.numerics import load_program
from tests.verify.in_process import compared

MLP = "zoo:mlp-tiny"
CUT = 'mesh = { data = 2, model = 4 }\n["*Attention"]\nsplit = { b = ["data"], s = ["model"] }\n'
RING = CUT.replace("s =", "ring =")


def plan(source: str, pins: Any, **options: Any) -> planner.Strategy:
    return planner.plan(
        source,
        **{
            "devices": 8,
            "hardware": "cpu",
            "batch": 16,
            "pins": pins,
            "baselines": False,
            "cache": None,
            **options,
        },
    )


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight blocks that read angles: positions, a constant of floats, times the batch."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 4, 32]) for name in "xy")
    nodes = [
        helper.make_node("Mul", ["x", "positions"], ["angles"]),
        helper.make_node("Cos", ["angles"], ["cos"]),
        helper.make_node("MatMul", ["x", "in"], ["h"]),
    ]
    stored = {
        "positions": rng.random((4, 32), np.float32),
        "in": rng.normal(0, 0.1, (32, 32)).astype(np.float32),
    }
    for i in range(8):
        stored[f"layers.{i}.weight"] = rng.normal(0, 0.1, (32, 32)).astype(np.float32)
        before = f"h{i - 1}" if i else "h"
        nodes += [
            helper.make_node(
                "MatMul", [before, f"layers.{i}.weight"], [f"p{i}"], name=f"/layers.{i}/MatMul"
            ),
            helper.make_node("Mul", [f"p{i}", "cos"], [f"r{i}"], name=f"/layers.{i}/Mul"),
            helper.make_node("Add", [before, f"r{i}"], [f"h{i}"], name=f"/layers.{i}/Add"),
        ]
    nodes.append(helper.make_node("Relu", ["h7"], ["y"]))
    graph = helper.make_graph(
        nodes, "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in stored.items()]
    )
    path = tmp_path_factory.mktemp("rotary") / "rotary.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path
    )
    return str(path)


# --- pipelines


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_what_blocks_are_given_is_made_by_enter_alone(rotary: str, schedule: str) -> None:
    """The schedule calls `prologue` too, with nothing but parameters and the batch: angles of float
    positions were asked of the function around it."""
    strategy = plan(rotary, f"pp=2,dp=4,micro=4,schedule={schedule}", loss="mse")
    text = program(strategy, rotary).text
    assert "def prologue(params, frozen, batch):" in text and "jnp.cos(" in text
    if schedule != "interleaved":
        return
    found = compared(strategy, rotary, 4)
    assert found.outputs < 1e-5 and found.gradients < 1e-4


def test_buffers_of_stages_have_names_of_their_own() -> None:
    """Two kinds of which the second has neither cuts nor pending gradients were both `stage
    weights`, and the first one's weights were gone."""
    kinds = [
        (trained, dtype, axes, grad_partial)
        for trained in (True, False)
        for dtype in ("float", "int32")
        for axes in ((), ("data",))
        for grad_partial in ((), ("data",))
    ]
    for n in (1, 2, 3):
        for row in itertools.permutations(kinds, n):
            assert len(set(_keys(list(row)))) == n
    assert list(_keys([kinds[0]])) == ["stage weights"] and list(_keys([kinds[1], kinds[0]])) == [
        "stage weights pending data",
        "stage weights",
    ]


def test_frequencies_of_rotary_angles_are_not_rounded(tmp_path: Path) -> None:
    """A stored `inv_freq` was a weight, and so in bfloat16, in which the positions 4,001 and 4,000
    are one."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 4, 32]) for name in "xy")
    stored = {
        "positions": np.arange(3999, 4003, dtype=np.float32).reshape(4, 1),
        "m.rotary_emb.inv_freq": np.linspace(0.1, 1, 32, dtype=np.float32).reshape(1, 32),
        "m.proj.weight": np.ones((32, 32), np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["positions", "m.rotary_emb.inv_freq"], ["a"]),
        helper.make_node("Cos", ["a"], ["c"]),
        helper.make_node("MatMul", ["x", "m.proj.weight"], ["h"]),
        helper.make_node("Mul", ["h", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in stored.items()]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        tmp_path / "m.onnx",
    )
    made = program(plan(str(tmp_path / "m.onnx"), "dp=8", loss="mse"), str(tmp_path / "m.onnx"))
    assert (
        "FROZEN = {}" in made.text
        and "jnp.float32)" in made.text
        and "astype(COMPUTE)" in made.text
    )
    angles = np.cos(stored["positions"] * stored["m.rotary_emb.inv_freq"])
    table = (
        load_program(made, compute="bfloat16").C0 if not made.constants else made.constants["c0"]
    )
    np.testing.assert_allclose(np.asarray(table), angles, atol=1e-6)


# --- attention in blocks of queries


def attention(pins: str, rows: int, folder: Path) -> types.ModuleType:
    """The program of a small Llama with blocks of so many queries."""
    source = "zoo:llama-tiny,layers=2,seq=64"
    if "\n" in pins:
        (folder / "pins.toml").write_text(pins)
        pins = str(folder / "pins.toml")
    made = program(plan(source, pins, batch=4, precision="fp32"), source)
    assert made.text.count("QUERY_BLOCK = 1024") == 1 and "lax.scan(lambda x, w" in made.text
    return load_program(
        Program(
            made.text.replace("QUERY_BLOCK = 1024", f"QUERY_BLOCK = {rows}"),
            made.constants,
            made.labels,
        )
    )


def loss_of(m: types.ModuleType) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of seeded parameters on a seeded batch."""
    mesh = m.make_mesh()
    params, frozen = (
        m.place(m.initial_values(t, 0, {}), m.specs_of(t), mesh) for t in (m.PARAMS, m.FROZEN)
    )
    loss, grads = m.make_gradients(mesh)(
        params, frozen, m.place(m.synthetic_batch(0), m.specs_of(m.INPUTS), mesh)
    )
    return float(loss), {key: np.asarray(g) for key, g in grads.items()}


def test_queries_that_are_cut_come_in_blocks_too(tmp_path: Path) -> None:
    """A cut and several blocks, inside scanned layers: each block has to know where the device's
    queries begin."""
    cut, whole = (
        loss_of(attention(pins, rows, tmp_path)) for pins, rows in ((CUT, 4), ("dp=4,tp=2", 1024))
    )
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    for key, g in whole[1].items():
        np.testing.assert_allclose(cut[1][key][tuple(slice(n) for n in g.shape)], g, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pins", "own"), [(CUT, 8), ("dp=4,tp=2", 2), (RING, 8)], ids=["cut", "whole", "ring"]
)
def test_masks_of_all_blocks_are_never_together(pins: str, own: int, tmp_path: Path) -> None:
    """jax takes what no loop carries out of loops: masks of every block, for every head, were one
    array that lived through the step. own: heads and samples of a device."""
    m = attention(pins, 4, tmp_path)
    masks = [
        [int(n) for n in dims.split("x") if n]
        for dims in re.findall(
            r"tensor<((?:\d+x)+)i1>", lowered(m, "train", m.make_mesh()).as_text()
        )
    ]
    masks = [dims for dims in masks if dims[-2:] == [4, 16 if pins == RING else 64]]
    assert masks and max(map(prod, masks)) <= own * prod(masks[0][-2:])


def test_gradients_of_logits_wait_as_rows() -> None:
    """Compilers give an activation the order of dims that its collective needs, and hand it on to
    whatever lies between two barriers: logits of [batch, positions, classes] were copied there into
    another order and back, and both copies were there at the peak."""
    source = "zoo:llama-tiny,layers=2,vocab=1000"
    made = program(plan(source, "dp=2,tp=4,zero=3,micro=1"), source)
    m = load_program(made)
    text = lowered(m, "train", m.make_mesh()).as_text()
    held = [
        [int(n) for n in dims.split("x") if n]
        for line in text.splitlines()
        if "optimization_barrier" in line
        for dims in re.findall(r"tensor<((?:\d+x)+)f32>", line)
    ]
    assert [8 * 16, 250] in held and [8, 16, 250] not in held


# --- what no program does


def test_a_precision_that_is_only_priced_is_no_float32_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(tmp_path / "p.json")
    options = [
        MLP,
        "--devices",
        "8",
        "--workload",
        "infer",
        "--precision",
        "int8-weights",
        "-o",
        made,
    ]
    assert main([*options, "--emit", str(tmp_path / "p.py")]) == 2
    assert (
        "error[P077]: no program is written in int8-weights" in (said := capsys.readouterr().err)
        and "bf16-mixed or another" in said
    )
    assert not list(tmp_path.iterdir())  # before the search
    assert main(options) == 0
    assert any("priced, not emitted" in f for f in findings(planner.Strategy.load(made)))
    assert main(["emit", made, "-o", str(tmp_path / "p.py")]) == 2
    assert not (tmp_path / "p.py").exists()


def test_long_ranges_are_made_where_they_are_used() -> None:
    """Too long to be worked out by the reader: positions of 131,072 tokens."""
    source = "zoo:llama-tiny,layers=1,seq=131072"
    assert (
        "jnp.arange(131072, dtype=jnp." in program(plan(source, "sequence=8", batch=1), source).text
    )


@pytest.mark.parametrize("package", ["onnx", "numpy"])
def test_a_missing_package_is_named(
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)
    monkeypatch.setattr("planner.commands.make.run", lambda args: __import__(package))
    monkeypatch.setitem(sys.modules, package, None)
    assert main([MLP, "-o", str(tmp_path / "p.json")]) == 2
    assert (
        f"error[P078]: the package '{package}' is not installed"
        in (said := capsys.readouterr().err)
        and f"pip install {package}" in said
    )


def test_a_module_of_the_planner_that_is_missing_is_our_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)
    monkeypatch.setattr("planner.commands.make.run", lambda args: __import__("planner.no_such"))
    assert main([MLP]) == 2 and "error[P000]" in capsys.readouterr().err


# --- what a failure says


def test_a_failed_compilation_says_what_and_where() -> None:
    import jax

    text = (
        "import jax\n\n\ndef step(x):\n    return jax.lax.scan(lambda c, _: (c + missing, None), x,"
        " None, length=2)  # the line\n"
    )
    space: dict[str, Any] = {}
    failure.remember("emitted.py", text)
    exec(compile(text, "emitted.py", "exec"), space)
    with pytest.raises(NameError) as error:
        jax.jit(space["step"])(1.0)
    found = failure.told(error.value, "compiling", "emitted.py")
    assert str(found).startswith(
        "error[P162]: compiling failed: NameError: name 'missing' is not defined\n  line 5 of the"
        " program: return jax.lax.scan("
    )
    assert "JAX has removed" not in str(found)
    log = (
        "Traceback:\nTypeError: enter() missing 't2'\n--------------------\nFor simplicity, JAX has"
        " removed its internal frames from the traceback.\n"
    )
    assert failure.last_words(log) == "TypeError: enter() missing 't2'"
    assert (
        str(worker._lost(False, 1.0, 1, log, "8 virtual devices"))
        == "error[P162]: compiling for 8 virtual devices failed: TypeError: enter() missing 't2'"
    )
    assert "ended by signal 11" in str(
        worker._lost(False, 1.0, -11, "", "x")
    ) and "most likely for memory" in str(worker._lost(False, 1.0, -9, "", "x"))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_worker_tells_an_exception(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a report it is the command's error, after it the reason why nothing was
    run."""

    def work(request: Any, write: Any) -> None:
        if compiled:
            write("compiled", types.SimpleNamespace(to_dict=lambda: {"figures": 1}))
        raise ValueError("two\nlines")

    monkeypatch.setattr(worker, "work", work)
    (tmp_path / "asked.json").write_text(json.dumps({"target": "cpu"}))
    assert worker.main([str(tmp_path / "asked.json"), str(tmp_path / "answer.json")]) == 0
    answer = json.loads((tmp_path / "answer.json").read_text())
    if compiled:
        assert answer == {
            "phase": "compiled",
            "report": {"figures": 1},
            "failed": "running failed: ValueError: two",
        }
    else:
        assert (
            answer["error"]["code"] == "P162"
            and answer["error"]["what"] == "compiling for virtual devices failed: ValueError: two"
        )


# --- damaged files


@pytest.fixture(scope="module")
def mlp() -> types.ModuleType:
    return load_program(program(plan(MLP, "dp=8", precision="fp32"), MLP))


def stored(table: Any, body: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + body


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"root:x:0:0:root:/root:/bin/bash\n", "bytes of header follow, and 24 do"),
        (b"", "empty file"),
        (b"abc", "bytes of header follow"),
        ((10**6).to_bytes(8, "little") + b"{}", "1000000 bytes of header follow, and 2 do"),
        (stored({"w": ROW}, b"1234"), "'w' ends 4 bytes behind the end"),
        ((2).to_bytes(8, "little") + b"{]", "JSONDecodeError"),
        (stored([1]), "AttributeError"),
        (stored({"w": {**ROW, "dtype": "X9"}}, bytes(8)), "KeyError: 'X9'"),
        (stored({"w": {**ROW, "shape": [3]}}, bytes(8)), "reshape"),
        (stored({"w": {**ROW, "data_offsets": [8, 0]}}, bytes(8)), "'w'"),
        (stored({"w": 1}), "TypeError"),
    ],
)
def test_a_file_that_holds_no_weights_ends_in_a_line(
    mlp: types.ModuleType, tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        mlp.read_safetensors(tmp_path / "w.safetensors")
    assert (
        str(end.value).startswith(f"{tmp_path}/w.safetensors cannot be read as .safetensors: ")
        and said in str(end.value)
        and "\n" not in str(end.value)
    )


def test_other_weights_files(mlp: types.ModuleType, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):  # a pipe is not waited for
        with pytest.raises(SystemExit, match="no plain file"):
            mlp.read_safetensors(path)
    with pytest.raises(SystemExit, match="there is no such file"):
        mlp.stored_weights(
            types.SimpleNamespace(weights=tmp_path / "typo.safetensors", model_folder=tmp_path),
            mlp.PARAMS,
        )
    name = mlp.labels_of(*next(iter(mlp.PARAMS.items())))[0]
    with pytest.raises(SystemExit, match=r"of another model: '.*' is \(3,\) in them"):
        mlp.initial_values(mlp.PARAMS, 0, {name: np.zeros(3, np.float32)})


def test_only_checkpoints_need_orbax(
    mlp: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    assert mlp.open_checkpoints(None, 3) is None and mlp.restore(None, mlp.make_mesh()) is None
    with pytest.raises(SystemExit, match="pip install orbax-checkpoint"):
        mlp.open_checkpoints("ck", 3)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_checkpoint_is_a_plain_tree(mlp: types.ModuleType, tmp_path: Path) -> None:
    """Orbax alone reads it, by the names of parameters; and a checkpoint as programs wrote them
    before, a numbered item a value, is read too."""
    ocp = pytest.importorskip("orbax.checkpoint")
    import jax

    mesh, saved = mlp.make_mesh(), mlp.open_checkpoints(str(tmp_path), 9)
    _, params, state = mlp.begin(types.SimpleNamespace(seed=0), {}, mesh)
    state = {key: (m + 1, v + 2, *rest) for key, (m, v, *rest) in state.items()}
    mlp.save(saved, 1, params, state)
    saved.wait_until_finished()
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(tmp_path / "1" / "params")
        about = reader.metadata(tmp_path / "1" / "opt_state").item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), about)
        moments = reader.restore(tmp_path / "1" / "opt_state", restore_args=plain)
    assert set(tree) == set(mlp.PARAMS) and set(moments) == {"mu", "nu"}
    for key, (mu, nu, *rest) in state.items():
        assert np.array_equal(tree[key], (rest or [params[key]])[0])
        assert np.array_equal(moments["mu"][key], mu) and np.array_equal(moments["nu"][key], nu)

    values = mlp.values_of(params, state)
    old = {
        f"value{k}": ocp.args.PyTreeSave({str(i): values[key][k] for i, key in enumerate(values)})
        for k in range(3)
    }
    rows = [[list(mlp.labels_of(k, r)), mlp.repeat_dims(r), r[0]] for k, r in mlp.PARAMS.items()]
    about = {"values": 3, "parameters": rows, "packed": {}}
    saved.save(2, args=ocp.args.Composite(about=ocp.args.JsonSave(about), **old))
    saved.wait_until_finished()
    for step in (2, 1):
        done, again, state_again = mlp.restored(saved, step, mesh)
        assert done == step and list(again) == list(mlp.PARAMS)
        assert all(np.array_equal(params[key], value) for key, value in again.items())
        assert all(all(map(np.array_equal, state[key], state_again[key])) for key in state)
    saved.close()


def test_names_in_checkpoints_are_names_of_files(mlp: types.ModuleType) -> None:
    names = mlp.saved_names(["a.*.weight", "..", "naïve", "", "x" * 300, "c-d_1"])
    assert names == ["a.*.weight", *(f"parameter+{i}" for i in range(1, 5)), "c-d_1"]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # orbax leaves coroutines behind when a read fails
@pytest.mark.parametrize("damage", ["cut in half", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_offers_the_last_whole_one(
    mlp: types.ModuleType, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh, saved = mlp.make_mesh(), mlp.open_checkpoints(str(tmp_path), 9)
    _, params, state = mlp.begin(types.SimpleNamespace(seed=0), {}, mesh)
    for step in (2, 4, 6):
        mlp.save(saved, step, params, state)
    saved.wait_until_finished()
    for step in (4, 6):
        # Every file of values: how many arrays share one, and which half of it is read, depends on
        # when each was written.
        values = [p for p in (tmp_path / str(step)).rglob("d/*") if p.is_file()]
        assert values
        for path in values:
            if damage == "gone":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        mlp.restore(saved, mesh)
    assert re.match(
        rf"the checkpoint {tmp_path}/6 cannot be read: --resume-from 2 goes on from the last whole"
        r" one.* Nothing was changed\.",
        str(end.value),
    )
    assert "\n" not in str(end.value) and sorted(str(p) for p in tmp_path.rglob("*")) == before
    with pytest.raises(SystemExit, match=r"--resume-from 3: .* has checkpoints \[2, 4, 6\]"):
        mlp.restore(saved, mesh, 3)
    capsys.readouterr()
    done, again, _ = mlp.restore(saved, mesh, 2)
    assert done == 2 and all(
        np.array_equal(np.asarray(again[k]), np.asarray(p)) for k, p in params.items()
    )
    assert {p.name for p in tmp_path.iterdir()} == {
        "2",
        "aside-4",
        "aside-6",
    } and "aside-6" in capsys.readouterr().out
    mlp.save(saved, 6, params, state)
    saved.wait_until_finished()
    assert mlp.restore(saved, mesh)[0] == 6
    saved.close()
    del end
    gc.collect()


def test_resuming_from_a_step_needs_a_folder(mlp: types.ModuleType) -> None:
    with pytest.raises(SystemExit, match="--resume-from 2: it goes with --checkpoints"):
        mlp.restore(None, mlp.make_mesh(), 2)


def test_a_loss_that_is_not_a_number_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With its step; and the checkpoints from before are not pushed out by later ones."""
    m = load_program(program(plan(MLP, "dp=8", precision="fp32"), MLP))
    monkeypatch.setitem(m.__dict__, "LEARNING_RATE", 1e38)
    monkeypatch.setitem(m.__dict__, "__file__", str(tmp_path / "m.py"))
    monkeypatch.setattr(
        sys,
        "argv",
        ["m.py", "--steps", "5", "--checkpoints", str(tmp_path / "ck"), "--save-every", "1"],
    )
    m.main()
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "not a number" in line]
    first = next(i for i in range(5) if f"step {i}  loss nan" in "\n".join(lines))
    assert (
        len(told) == 1
        and told[0].startswith(f"step {first}: the loss is not a number")
        and "no more checkpoints" in told[0]
    )
    assert sorted(int(p.name) for p in (tmp_path / "ck").iterdir()) == list(range(1, first + 1))


def test_integers_are_not_trained() -> None:
    """A plan of weights of a byte without gradients was made."""
    with pytest.raises(PlanError) as e:
        planner.plan(MLP, devices=8, precision="int8-weights")
    assert e.value.code == "P024" and e.value.help[0] == "--workload infer"


def test_the_error_for_a_precision_has_its_code() -> None:
    strategy = plan(MLP, "dp=8")
    with pytest.raises(PlanError) as e:
        program(replace(strategy, workload={**strategy.workload, "precision": "int8-weights"}), MLP)
    assert e.value.code == "P077"
