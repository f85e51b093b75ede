"""Emitted programs: golden texts, what may stand in them, and that they run alone, with every back
end, scanned and unrolled.

The golden files hold what emission decides: tables, blocks and the model; of the functions every
program carries only the first line. They are rewritten by MESHWRIGHT_UPDATE_GOLDEN=1 pytest
tests/emit/test_emit.py; read the difference before committing it.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import models_zoo
import planner
from benchmarks.hand_plans import data_parallel, megatron, mlp_megatron
from planner.commands.programs import write_program
from planner.emit.program import emit
from planner.emit.source import _free_names, comment, literal
from planner.emit.text import array_table, counted, inlined, pattern, short_floats
from planner.emit.values import precise
from planner.emit.writer import Program
from planner.errors import PlanError
from planner.execution.layout_flow import derive
from planner.execution.loops import find_repeated_block
from planner.execution.plan import Plan
from planner.graph.ir import Graph, Node, Tensor
from planner.graph.repeats import find_runs, hoist
from planner.reader import read_model
from planner.sharding.rule import Split
from planner.strategy.strategy import Strategy
from planner.verify.numerics import load_program, seeded_values
from planner.workload.loss import add_loss
from tests.emit.shared import assert_linted

GOLDEN = Path(__file__).parents[1].joinpath("golden")
MESH = (("data", 2), ("model", 4))
OWN = re.compile(r"(block|part|stage)\d+|loss_of|forward")
"""Functions that are the model; the others are carried along."""


@cache
def graph(spec: str, train: bool = True) -> Graph:
    plain = read_model(models_zoo.build(spec), batch=8)
    return hoist(add_loss(plain) if train else plain)


@cache
def made(
    spec: str,
    backend: str,
    *,
    train: bool = True,
    unroll: bool = False,
    zero: int = 0,
    recompute: str = "none",
    compute: str = "float32",
) -> Program:
    g = graph(spec, train)
    splits = (
        mlp_megatron(g, MESH)
        if "mlp" in spec
        else megatron(g, MESH)
        if "gpt" in spec
        else data_parallel(g, MESH)
    )
    plan = Plan(
        MESH,
        splits,
        zero_stage=zero,
        zero_axes=("data",),
        recompute=recompute,
        microbatches=1,
        repeated_blocks=find_runs(g),
    )
    return emit(
        g,
        plan,
        workload="train" if train else "infer",
        backend=backend,
        unroll=unroll,
        compute=compute,
    )  # type: ignore[arg-type]


VARIETY = [
    ("zoo:mlp-tiny", "shard_map", {}),
    ("zoo:mlp-tiny", "jit", {}),
    ("zoo:gpt-tiny", "shard_map", {}),
    ("zoo:gpt-tiny", "jit", {}),
    ("zoo:gpt-tiny", "shard_map", {"unroll": True, "zero": 3}),
    ("zoo:gpt-tiny", "shard_map", {"train": False}),
    ("zoo:gpt-tiny", "jit", {"train": False}),
    ("zoo:gpt-tiny", "shard_map", {"recompute": "block-keep", "zero": 2}),
    ("zoo:llama-tiny", "shard_map", {"compute": "bfloat16"}),
    ("zoo:resnet-tiny", "shard_map", {}),
    ("zoo:lstm-tiny", "jit", {}),
    ("zoo:t5-tiny", "shard_map", {"unroll": True}),
]
IDS = [f"{spec[4:]}-{backend}-{'-'.join(options) or 'plain'}" for spec, backend, options in VARIETY]


# --- golden texts


def skeleton(text: str) -> str:
    """The program, with `...` for the bodies of functions it carries along."""
    lines, out, at = text.splitlines(), [], 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and not OWN.fullmatch(node.name):
            out += [*lines[at : node.body[0].lineno - 1], "    ..."]
            at = node.end_lineno or at
    return "\n".join([*out, *lines[at:]]) + "\n"


@pytest.mark.parametrize("backend", ["shard_map", "jit"])
@pytest.mark.parametrize("spec", ["zoo:mlp-tiny", "zoo:gpt-tiny"])
def test_golden_programs(spec: str, backend: str) -> None:
    path = GOLDEN / f"program_{spec[4:].replace('-', '_')}_{backend}.txt"
    text = skeleton(made(spec, backend).text)
    if os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


# --- what a program is made of


@pytest.mark.parametrize(("spec", "backend", "options"), VARIETY, ids=IDS)
def test_a_program_stands_alone_and_carries_nothing_idle(
    spec: str, backend: str, options: dict[str, Any]
) -> None:
    text = made(spec, backend, **options).text
    tree = ast.parse(text)
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {
        n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
    }
    assert {m.split(".")[0] for m in modules} - {"orbax"} <= sys.stdlib_module_names | {
        "jax",
        "numpy",
    }
    assert "orbax" not in {
        line.split()[1].split(".")[0]
        for line in text.splitlines()
        if line.startswith(("import ", "from "))
    }  # asked for where checkpoints are
    mentioned = [
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    ]
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} - {
        "make_gradients"
    }  # for checks by others
    defined |= {
        t.id
        for n in tree.body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    assert defined <= set(mentioned), defined - set(mentioned)
    assert max(len(line) for line in text.splitlines()) < 400


def test_linters_find_nothing(tmp_path: Path) -> None:
    for name, (spec, backend, options) in zip(IDS, VARIETY, strict=True):
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(made(spec, backend, **options).text)
    assert_linted(tmp_path, "--line-length", "400", "--select", "E,W,F,I,UP,B,C4,PIE,RUF,SIM")


def test_what_a_function_imports_itself_is_nothing_of_the_runtime() -> None:
    """Pieces of a ring import a module as `fused`, which is also what makes the compiler's options
    of a training step."""
    names = _free_names("def f(x):\n    import a.b as fused\n    return fused.g(x, other)")
    assert names == {"other"}


def test_tables_of_padded_vocabularies_are_not_masked() -> None:
    text = made("zoo:gpt-tiny,vocab=67", "shard_map").text
    assert "take_shard(params[" in text and "real_part" not in text


def test_layouts_and_collectives_are_told_in_comments() -> None:
    text = made("zoo:gpt-tiny", "shard_map").text
    block = text.split("def block0(")[1].split("\n\n\n")[0]
    assert "transformer.h.*, one of 2; carries x" in block and "[d0/data, d1, d2]" in block
    assert re.search(
        r'jnp\.matmul\(ln_2, w\["mlp\.c_fc\.weight"\]\)  # /transformer/h\.\*/mlp/c_fc/MatMul ->'
        r" \[b0/data, m, n/model\]",
        block,
    )
    assert re.search(r"mlp/c_proj/MatMul -> \[b0/data, m, n\] partial over model", block)
    assert re.search(
        r'lax\.psum\(mlp_down, "model"\)  # all-reduce over model: /transformer/h\.\*/mlp/c_proj',
        block,
    )
    assert (
        block.count("lax.psum(") == 2 and block.count("lax.pcast(") == 2
    )  # Megatron's two forward and two backward


# --- text that tries to be more than text

HOSTILE = (
    'a"; PWNED = 1; b = "',
    "a'; PWNED = 1; '",
    '"""\nPWNED = 1\n"""',
    "line\nPWNED = 1",
    "\\",
    '\\"); PWNED = 1 #',
    "{PWNED}",
    "{__import__('os').abort()}",
    "__import__('os').abort()",
    "# PWNED",
    "naïve ω \u202e \u2028PWNED = 1",
    "\r\nPWNED = 1",
    "\x00PWNED",
    "%(PWNED)s",
)


@given(st.text())
def test_literals_are_their_text_and_comments_one_plain_line(text: str) -> None:
    source = literal(text)
    assert source.isascii() and ast.literal_eval(source) == text
    tokens = [
        t
        for t in tokenize.generate_tokens(io.StringIO(source + "\n").readline)
        if t.type not in (tokenize.NEWLINE, tokenize.ENDMARKER)
    ]
    assert len(tokens) == 1 and tokens[0].type == tokenize.STRING
    for limit in (20, 100):
        line = comment(text, limit)
        assert (
            line.isascii()
            and line.isprintable()
            and len(line) <= limit
            and not set(line) & set("\"'\\#")
        )


def hostile_model() -> onnx.ModelProto:
    """Two products and additions whose every name is hostile."""
    name = iter(HOSTILE)
    x, w1, b1, w2, y, h, a = (next(name) for _ in range(7))
    values = [
        helper.make_tensor(n, TensorProto.FLOAT, s, np.ones(s, np.float32).tobytes(), raw=True)
        for n, s in ((w1, (8, 16)), (b1, (16,)), (w2, (16, 8)))
    ]
    nodes = [
        helper.make_node("MatMul", [x, w1], [h], name=next(name)),
        helper.make_node("Add", [h, b1], [a], name=next(name)),
        helper.make_node("MatMul", [a, w2], [y], name=next(name)),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, 8]) for n in (x, y)]
    return helper.make_model(
        helper.make_graph(nodes, 'graph """ PWNED', info[:1], info[1:], values),
        opset_imports=[helper.make_opsetid("", 18)],
    )


@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_names_reach_the_source_as_literals_only(backend: str) -> None:
    g = hoist(add_loss(read_model(hostile_model()), loss="mse"))
    plan = Plan((("data", 8),), data_parallel(g, (("data", 8),)))
    program = emit(
        g,
        plan,
        workload="train",
        backend=backend,
        header='"""\nPWNED = 1\n"""\nPWNED = 1',
        weights_file='"; PWNED = 1; "',
    )  # type: ignore[arg-type]
    assert program.text.isascii()
    for token in tokenize.generate_tokens(io.StringIO(program.text).readline):
        assert "PWNED" not in token.string or token.type in (tokenize.STRING, tokenize.COMMENT), (
            token
        )
    module = load_program(program)
    assert not hasattr(module, "PWNED") and set(module.PARAMS) == {g.labels[w] for w in g.weights}
    assert set(module.PARAMS) <= set(HOSTILE) and {n for n in module.INPUTS if n in HOSTILE} == set(
        g.inputs
    ) & set(HOSTILE)


# --- programs run


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return planner.plan("zoo:mlp-tiny", devices=4, batch=8, baselines=False, precision="fp32")


def run_alone(strategy: Strategy, backend: str, folder: Path) -> list[float]:
    """Losses of two steps of a program in a process of its own, as anybody would start it."""
    path = folder / f"{backend}.py"
    path.write_text(planner.emit(strategy, "zoo:mlp-tiny", backend=backend))
    clean = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "PYTHONPATH")
    }
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(path), "--virtual-devices", "4", "--steps", "2"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert re.fullmatch(
        r"mesh (\w+=\d+(, )?)+ on cpu, float32; parameters: 0 of 6 stored, 6 seeded normal", first
    )
    return [float(re.fullmatch(r"step \d  loss (\d+\.\d+)  \d+\.\d ms", line)[1]) for line in steps]  # type: ignore[index]


def test_programs_run_alone_and_both_back_ends_agree(strategy: Strategy, tmp_path: Path) -> None:
    first, second = (run_alone(strategy, backend, tmp_path) for backend in ("shard_map", "jit"))
    assert len(first) == 2 and first == pytest.approx(second, rel=1e-5)
    assert first == pytest.approx([np.log(16)] * 2, rel=0.05)  # sixteen classes, weights near zero


GIVEN = ({}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})


@pytest.mark.parametrize("given", GIVEN)
def test_on_gpus_jax_preallocates_what_the_plan_may_use(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py"])
    plan = planner.plan(
        "zoo:mlp-tiny",
        devices=4,
        batch=8,
        baselines=False,
        hardware="h100",
        memory_reserve_bytes=10 * 2**30,
    )
    capacity, gib = 81008 * 2**20, 2**30
    share = int(1e4 * (capacity - 600 * 2**20 - gib // 2 - 10 * gib) / capacity) / 1e4
    module = load_program(Program(planner.emit(plan, "zoo:mlp-tiny"), {}, {}))
    assert share == module.GPU_MEMORY == 0.8598
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(given))
        module.command_line()
        assert os.environ == (given or {"XLA_CLIENT_MEM_FRACTION": "0.8598"}), (
            "what a user says stays"
        )
    capped = planner.plan(
        "zoo:mlp-tiny",
        devices=4,
        batch=8,
        baselines=False,
        hardware="h100",
        memory_limit_bytes=40 * gib,
    )
    assert f"GPU_MEMORY = {int(1e4 * 40 * gib / capacity) / 1e4}  #" in planner.emit(
        capped, "zoo:mlp-tiny"
    )


def test_other_devices_are_left_as_jax_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py"])
    module = load_program(
        Program(
            planner.emit(
                planner.plan("zoo:mlp-tiny", devices=4, batch=8, baselines=False, hardware="v5e"),
                "zoo:mlp-tiny",
            ),
            {},
            {},
        )
    )
    monkeypatch.setattr(os, "environ", {})
    module.command_line()
    assert module.GPU_MEMORY is None and os.environ == {}


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [("bf16-mixed", [], None), ("bf16-mixed", ["--float32"], "highest"), ("fp32", [], "highest")],
)
def test_float32_is_no_shorter_type_on_accelerators(
    precision: str, options: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs would multiply in TF32, TPUs in one pass of bfloat16: JAX's default there."""
    asked: dict[str, str] = {}
    plan = planner.plan(
        "zoo:mlp-tiny", devices=4, batch=8, baselines=False, precision=precision, cache=None
    )
    module = load_program(Program(planner.emit(plan, "zoo:mlp-tiny"), {}, {}), compute="bfloat16")
    module.__dict__["COMPUTE"] = {"fp32": "float32"}.get(precision, "bfloat16")
    monkeypatch.setattr(sys, "argv", ["program.py", *options])
    monkeypatch.setattr("jax.config.update", asked.__setitem__)
    module.command_line()
    assert asked.get("jax_default_matmul_precision") == expected


def test_a_program_refuses_other_device_counts(strategy: Strategy) -> None:
    module = load_program(Program(planner.emit(strategy, "zoo:mlp-tiny"), {}, {}))
    with pytest.raises(SystemExit, match="planned for 4 devices and finds 8.*--devices 8"):
        module.make_mesh()


@pytest.mark.slow
def test_scanned_and_unrolled_are_one_model() -> None:
    values = seeded_values(graph("zoo:gpt-tiny"), {})
    found = []
    for unroll in (False, True):
        program = made("zoo:gpt-tiny", "shard_map", unroll=unroll)
        assert ("lax.scan(" in program.text) != unroll and (
            "for i in range(2):" in program.text
        ) == unroll
        module = load_program(program)
        mesh = module.make_mesh()
        params = module.place(
            module.initial_values(module.PARAMS, 0, values), module.specs_of(module.PARAMS), mesh
        )
        batch = module.place(module.synthetic_batch(0), module.specs_of(module.INPUTS), mesh)
        loss, grads = module.make_gradients(mesh)(params, {}, batch)
        found.append(
            (
                float(loss),
                {
                    k: float(np.square(np.asarray(g)).sum())
                    for k, g in grads.items()
                    if "*" not in k and ".h." not in k
                },
            )
        )
    assert (
        found[0][0] == pytest.approx(found[1][0], rel=1e-6)
        and found[0][1] == pytest.approx(found[1][1], rel=1e-4)
        and len(found[0][1]) == 4
    )


# --- files are written whole or not at all


def test_nothing_is_half_written(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "zoo:mlp-tiny,weights=inline"
    inline = planner.plan(source, devices=4, batch=8, baselines=False)
    target = tmp_path / "p.py"
    write_program(inline, source, target, "shard_map", False, False)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(before) == {"p.py", "p.safetensors"}
    from planner.workload import weights

    real, calls = weights.load_one, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(weights, "load_one", failing)
    with pytest.raises(PlanError, match="No space left"):
        write_program(inline, source, target, "jit", False, True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(PlanError, match="is another model"):
        write_program(
            strategy, "zoo:mlp-tiny,layers=4", tmp_path / "q.py", "shard_map", False, False
        )
    assert {p.name for p in tmp_path.iterdir()} == set(before)


# --- weights, constants, types


def test_stacked_weights_are_read_from_the_models_own_file(tmp_path: Path) -> None:
    spec = "zoo:gpt-tiny,layers=3"
    program = made(spec, "shard_map")
    assert '"transformer.h.*.mlp.c_fc.weight": ("weights.bin", "float32", range(' in program.text
    module, g = load_program(program), graph(spec)
    refs = {g.labels[n]: (ref.offset, g.tensors[n].shape) for n, ref in g.weights.items()}  # type: ignore[union-attr]
    data = np.arange(max(o // 4 + int(np.prod(s)) for o, s in refs.values()), dtype=np.float32)
    (tmp_path / "weights.bin").write_bytes(data.tobytes())
    found = module.read_external(tmp_path)
    assert found.keys() == refs.keys()
    for label, (offset, shape) in refs.items():
        assert np.array_equal(
            found[label], data[offset // 4 :][: int(np.prod(shape))].reshape(shape)
        )
    stacked = module.initial_values(module.PARAMS, 0, found)["transformer.h.*.mlp.c_fc.weight"]
    assert all(
        np.array_equal(stacked[i], found[f"transformer.h.{i}.mlp.c_fc.weight"]) for i in range(3)
    )
    (tmp_path / "weights.bin").write_bytes(data.tobytes()[:-4])
    with pytest.raises(SystemExit, match="too short for 'transformer.ln_f.bias'"):
        module.read_external(tmp_path)
    module.EXTERNAL = {"x": ("../weights.bin", "float32", (0,), (1,), ())}  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match="leads out of"):
        module.read_external(tmp_path)


def wave(rows: int) -> Graph:
    """y = w cos(position): positions are constants, angles need all of their digits."""
    shapes = {"at": (rows, 1), "angle": (rows, 1), "w": (rows, 8), "y": (rows, 8)}
    roles = {"at": "constant", "w": "weight"}
    tensors = {n: Tensor(n, s, "float32", roles.get(n, "activation")) for n, s in shapes.items()}  # type: ignore[arg-type]
    nodes = (Node("cos", "Cos", ("at",), ("angle",)), Node("mul", "Mul", ("w", "angle"), ("y",)))
    return Graph(
        "wave",
        nodes,
        tensors,
        (),
        ("y",),
        weights={"w": None},
        constants={"at": np.arange(rows, dtype=np.float32)[:, None]},
        labels={"w": "w"},
    )


@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_angles_keep_their_digits_in_short_types(backend: str) -> None:
    g = wave(4096)
    assert precise(g) == {"at", "angle"}
    plan = Plan(
        (("data", 8),), {"cos": Split.of({"d0": ["data"]}), "mul": Split.of({"d0": ["data"]})}
    )
    program = emit(g, plan, workload="infer", backend=backend, compute="bfloat16")  # type: ignore[arg-type]
    module = load_program(program, compute="bfloat16")
    mesh = module.make_mesh()
    weight = {"w": np.ones((4096, 8), np.float32)}
    out = module.make_inference(mesh)(
        {}, module.place(module.computed(weight), module.specs_of(module.FROZEN), mesh), {}
    )
    (y,) = out if isinstance(out, tuple | list) else (out,)
    assert str(y.dtype) == "bfloat16"
    assert (
        np.abs(np.asarray(y, np.float32)[:, 0] - np.cos(np.arange(4096))).max() < 2**-8
    )  # one rounding of a number up to 1


def test_tables_stand_in_the_text_while_they_are_short() -> None:
    text = made("zoo:llama-tiny", "shard_map", compute="bfloat16").text
    assert (
        "CONSTANTS" not in text
        and made("zoo:llama-tiny", "shard_map", compute="bfloat16").constants == {}
    )
    assert ".astype(COMPUTE)" in text
    assert inlined(np.zeros(256)) and not inlined(np.zeros(257))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_short_floats_are_the_same_float32(values: list[float]) -> None:
    short = short_floats(dict(enumerate(values)))  # type: ignore[arg-type]
    assert all(np.float32(short[i]) == np.float32(v) for i, v in enumerate(values))  # type: ignore[index]
    array, names = np.array(values, np.float32), {"np": np, "float": float}
    exec(array_table("T", array), names)
    assert names["T"].dtype == np.float32 and np.array_equal(names["T"], array)  # type: ignore[attr-defined]


@given(st.integers(-50, 50), st.integers(-5, 5), st.integers(1, 30), st.booleans())
def test_counted_arrays_are_those_of_arange(
    first: int, step: int, size: int, upright: bool
) -> None:
    value = first + step * np.arange(size)
    text = counted(value[:, None] if upright else value)
    assert bool(text) == (size > 2 and step != 0)
    if text:
        assert np.array_equal(np.arange(*map(int, text.split(", "))), value)
        assert (
            not counted(value + np.eye(1, size, 1, dtype=int)[0])
            and not counted(value + 0.5)
            and not counted(np.stack([value, value]))
        )


def test_patterns_star_what_counts() -> None:
    assert pattern(["/h.0/ln_1/Add", "/h.1/ln_1/Add"]) == "/h.*/ln_1/Add"
    assert pattern(["node_linear_3", "node_linear_10"]) == "node_linear_*"
    assert (
        pattern(["node_linear", "node_linear_7"]) == "node_linear" and pattern(["a1", "b1"]) == "a1"
    )


# --- what cannot be is refused


def test_a_value_made_in_one_repeat_is_no_argument_of_all() -> None:
    """A plan file edited by hand may call nodes repeats that are none."""
    tensors = {
        n: Tensor(n, (8, 8), "float32", "input" if n == "x" else "activation")
        for n in ("x", "a", "b", "c", "d")
    }
    nodes = (
        Node("a", "Relu", ("x",), ("a",)),
        Node("b", "Add", ("a", "a"), ("b",)),
        Node("c", "Relu", ("b",), ("c",)),
        Node("d", "Add", ("c", "a"), ("d",)),
    )
    g = Graph("g", nodes, tensors, ("x",), ("d",))
    flow = derive(g, Plan((), {}), training=False)
    assert find_repeated_block(flow, 0, 2, 2) == "a is made in one repeat and read by others"


def test_an_edited_strategy_is_checked_before_it_is_emitted(strategy: Strategy) -> None:
    node = next(n for n, row in strategy.nodes.items() if row["op"] == "MatMul")
    for split in ({"nothing": ["data"]}, {"n": ["nowhere"]}, {"n": ["data"], "k": ["data"]}):
        nodes = {**strategy.nodes, node: {**strategy.nodes[node], "split": split}}
        with pytest.raises(PlanError) as error:
            planner.emit(replace(strategy, nodes=nodes), "zoo:mlp-tiny")
        assert error.value.code == "P061" and node in str(error.value)
    for blocks in (
        [{"first": 0, "period": 0, "repeats": 2, "body": []}],
        [{"first": -1, "period": 1, "repeats": 2, "body": []}],
    ):
        with pytest.raises(PlanError) as error:
            planner.emit(replace(strategy, blocks=tuple(blocks)), "zoo:mlp-tiny")
        assert error.value.code == "P060"
