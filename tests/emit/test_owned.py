"""Programs as folders: model.py beside the runtime is the program in one file, bit for bit; the
runtime is the same for all of them; what somebody has edited is kept.

tests/golden/model_*.txt hold the texts of model.py. They are rewritten by MESHWRIGHT_UPDATE_GOLDEN=1
pytest tests/emit/test_owned.py -k golden; read the difference before committing it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import planner
from planner import cli
from planner.commands.programs import write_program
from planner.emit import runtime as parts
from planner.emit import writer
from planner.emit.from_strategy import program
from planner.emit.owned import MODEL, PACKAGE, is_as_emitted, is_as_vendored, vendored
from planner.emit.writer import Program
from planner.errors import PlanError
from planner.pins.pins import parse_pins
from planner.strategy.strategy import Strategy
from tests.emit.shared import assert_linted

GOLDEN = Path(__file__).parents[1].joinpath("golden")


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The vendored runtime, where it can be imported."""
    home = tmp_path_factory.mktemp("runtime")
    for name, text in vendored().items():
        path = home / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(home))
    yield home
    sys.path.remove(str(home))
    for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
        del sys.modules[name]


@cache
def plan(source: str, pins: str = "", devices: int = 8, **options: Any) -> Strategy:
    return planner.plan(
        source, devices=devices, baselines=False, pins=parse_pins(pins) if pins else None, **options
    )


def loaded(text: str, made: Program, **more: Any) -> types.ModuleType:
    """A program's text as a module, with its constants in place of the file it would read.
    more: what it is to have beside them."""
    module = types.ModuleType("emitted")
    module.__file__ = "emitted.py"
    module.__dict__["GIVEN"] = dict(made.constants)
    module.__dict__.update(more)
    lines = ["CONSTANTS = GIVEN" if x.startswith("CONSTANTS = ") else x for x in text.split("\n")]
    exec(compile("\n".join(lines), "emitted.py", "exec"), module.__dict__)
    return module


def ran(module: types.ModuleType, train: bool, run: bool) -> tuple[str, list[np.ndarray]]:
    """(what the compiler is given, what comes out: of two steps, or of one pass)."""
    args, mesh = SimpleNamespace(seed=0), module.make_mesh()
    own = module.__dict__
    frozen = own["place"](
        own["computed"](own["initial_values"](own["FROZEN"], 0, {})),
        own["specs_of"](own["FROZEN"]),
        mesh,
    )
    if not train:
        values = own["computed"](own["initial_values"](own["PARAMS"], 0, {}))
        params = own["place"](values, own["specs_of"](own["PARAMS"]), mesh)
        data = own["computed"](own["synthetic_batch"](0))
        batch = own["place"](data, own["specs_of"](own["INPUTS"]), mesh)
        forward = own["make_inference"](mesh)
        text = forward.lower(params, frozen, batch).as_text()
        return text, [np.asarray(x) for x in jax.tree.leaves(forward(params, frozen, batch))]
    _, params, state = own["begin"](args, {}, mesh)
    batch = own["next_batch"](own["open_data"](None), 0, 0, mesh)
    step = own["make_step"](mesh)
    text = step.lower(params, state, frozen, batch, jnp.float32(1)).as_text()
    losses = []
    for i in range(2 if run else 0):
        params, state, *seen = step(params, state, frozen, batch, jnp.float32(i + 1))
        losses += [np.asarray(x) for x in seen]
    return text, [*losses, *(np.asarray(x) for x in jax.tree.leaves((params, state)))]


CASES = {
    "mlp": ("zoo:mlp-tiny", "", {}, {}),
    "mlp-jit": ("zoo:mlp-tiny", "", {}, {"backend": "jit"}),
    "llama": ("zoo:llama-tiny", "tp=2,dp=4", {}, {}),
    "llama-jit": ("zoo:llama-tiny", "tp=2,dp=4", {}, {"backend": "jit"}),
    "llama-zero-3": ("zoo:llama-tiny", "dp=8,zero=3,recompute=block", {"batch": 16}, {}),
    "llama-unrolled": ("zoo:llama-tiny", "dp=8,zero=3", {}, {"unroll": True}),
    "gpt-stages": (
        "zoo:gpt-tiny,layers=4",
        "pp=2,tp=2,dp=2,micro=4,schedule=1f1b",
        {"batch": 16},
        {},
    ),
    "resnet-uneven-stages": ("zoo:resnet-tiny", "pp=2,dp=4,micro=4,zero=2", {"batch": 32}, {}),
    "mixtral": ("zoo:mixtral-tiny", "", {}, {}),
    "gpt-infer": ("zoo:gpt-tiny", "tp=2,dp=4", {"workload": "infer"}, {}),
    "gpt-lion": ("zoo:gpt-tiny", "dp=8,micro=2", {"optimizer": "lion", "batch": 16}, {}),
}
RUN = ("mlp", "mixtral", "gpt-infer")
"""Whose steps are run; of the others it is enough that the compiler is given the same, and the same
values to begin with."""


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (c in ("gpt-stages", "mixtral", "llama-zero-3")))
        for c in CASES
    ],
)
def test_a_folder_is_the_program_in_one_file(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text for the compiler, so the same collectives, and the same bits; names of
    variables change nothing either."""
    source, pins, options, how = CASES[case]
    s = plan(source, pins, **options)
    made = program(s, source, **how)
    train = s.workload["kind"] == "train"
    (one, numbers), (other, same) = (
        ran(loaded(text, made), train, case in RUN) for text in (made.text, made.model)
    )
    assert one == other
    monkeypatch.setattr(writer, "renamed", lambda text, told: text)
    plain = program(s, source, **how)
    assert plain.text != made.text and ran(loaded(plain.text, plain), train, False)[0] == one
    assert len(numbers) == len(same)
    for a, b in zip(numbers, same, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_model_of_eight_billion_is_a_page_to_own() -> None:
    """At most 300 lines, of which no line is a runtime's."""
    looped = ["block0", "part0", "loss_of"]  # part0: the head, whose weight is gathered twice
    for blocks, functions in (("looped", looped), ("written-out", ["block0", "loss_of"])):
        s = planner.plan("zoo:llama3-8b", devices=64, baselines=False, pins=f"blocks={blocks}")
        text = program(s, "zoo:llama3-8b").model
        assert len(text.splitlines()) <= 300
        own = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        assert own == functions


@pytest.mark.parametrize("spec", ["zoo:mlp-tiny", "zoo:llama-tiny"])
def test_golden_models(spec: str) -> None:
    path = GOLDEN / f"model_{spec[4:].replace('-', '_')}.txt"
    text = program(plan(spec, "tp=2,dp=4"), spec).model
    if os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.slow
def test_linters_find_nothing(tmp_path: Path) -> None:
    for case, (source, pins, options, how) in CASES.items():
        made = program(plan(source, pins, **options), source, **how)
        (tmp_path / f"{case.replace('-', '_')}.py").write_text(made.model)
    assert_linted(tmp_path, "--select", "E,W,F,UP,B,C4,PIE,RUF,SIM", "--ignore", "E501")


# --- the runtime


@pytest.mark.slow
def test_the_runtime_is_the_same_for_all_programs_and_says_which_it_is(tmp_path: Path) -> None:
    for spec in ("zoo:mlp-tiny", "zoo:llama-tiny"):
        write_program(plan(spec), spec, tmp_path / spec[4:], "shard_map", False, False)
    one, other = (
        {p.relative_to(home): p.read_bytes() for p in (home / PACKAGE).rglob("*") if p.is_file()}
        for home in sorted(tmp_path.iterdir())
    )
    assert one == other and len(one) == len(vendored())
    texts = vendored()
    assert is_as_vendored(texts)
    assert not is_as_vendored(texts | {"step/adamw.py": texts["step/adamw.py"] + "\n"})
    assert not any("planner" in text.replace("planner/emit", "") for text in texts.values())


def test_files_of_the_runtime_go_by_names_of_their_own() -> None:
    """Parts are named without their folder."""
    home = Path(parts.__file__).parent
    assert len(parts.paths()) == len(list(home.rglob("[a-z]*.py")))


def test_a_part_that_is_none_is_refused() -> None:
    import meshwright_runtime  # type: ignore[import-not-found]

    for name in ("kernels", "adamwx"):
        with pytest.raises(ValueError, match=f"'{name}' is no part of {PACKAGE} "):
            meshwright_runtime.bind({}, [name])


def test_what_a_model_defines_stands_in_place_of_the_runtimes() -> None:
    """A learning rate of its own, and another decay: functions of the runtime read both."""
    s = plan("zoo:mlp-tiny")
    made = program(s, "zoo:mlp-tiny")
    own = "def learning_rate(count):\n    return 0.0\n\n\nWEIGHT_DECAY = 0.5\n"
    module = loaded(made.model.replace("\n\ndef loss_of", f"\n\n{own}\n\ndef loss_of"), made)
    assert module.WEIGHT_DECAY == 0.5 and module.BETA1 == 0.9
    mesh = module.make_mesh()
    _, params, state = module.begin(SimpleNamespace(seed=0), {}, mesh)
    before = {key: np.asarray(x) for key, x in params.items()}
    batch = module.next_batch(module.open_data(None), 0, 0, mesh)
    params, *_ = module.make_step(mesh)(params, state, {}, batch, jnp.float32(1))
    assert all(np.array_equal(before[key], x) for key, x in params.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("own", "other", "pins"),
    [
        ("adamw", "scale_by_adam", "dp=8,zero=2"),
        ("lion", "scale_by_lion", "tp=2,dp=4,micro=2"),
        pytest.param("adamw", "scale_by_adam", "tp=2,dp=4,micro=2", marks=pytest.mark.slow),
        pytest.param("lion", "scale_by_lion", "dp=8,zero=2", marks=pytest.mark.slow),
    ],
)
def test_transformations_of_optax_take_an_optimizers_place(own: str, other: str, pins: str) -> None:
    """Three steps of optax's are those of the runtime's own."""
    optax = pytest.importorskip("optax")
    s = plan("zoo:mlp-tiny", pins, batch=16, optimizer=own, precision="fp32")
    made = program(s, "zoo:mlp-tiny")
    first = loaded(made.model, made)
    text = made.model.replace(f'"{own}"', '"transform"')
    transform = getattr(optax, other)(first.BETA1, first.BETA2)
    second = loaded(text, made, TRANSFORM=transform, WEIGHT_DECAY=first.WEIGHT_DECAY)
    results = []
    for module in (first, second):
        mesh = module.make_mesh()
        _, params, state = module.begin(SimpleNamespace(seed=0), {}, mesh)
        batch = module.next_batch(module.open_data(None), 0, 0, mesh)
        step, losses = module.make_step(mesh), []
        for i in range(3):
            params, state, loss = step(params, state, {}, batch, jnp.float32(i + 1))
            losses.append(float(loss))
        results.append((losses, {key: np.asarray(x) for key, x in params.items()}))
    (losses, params), (same, others) = results
    assert losses == pytest.approx(same, rel=1e-6) and losses[0] > losses[2]
    assert all(np.allclose(params[key], others[key], atol=1e-6) for key in params)


def test_what_is_not_cut_like_its_parameter_is_refused() -> None:
    optax = pytest.importorskip("optax")
    s = plan("zoo:mlp-tiny")
    made = program(s, "zoo:mlp-tiny")
    rows = optax.GradientTransformation(lambda p: jnp.zeros(p.shape[:-1]), None)
    module = loaded(made.model.replace('"adamw"', '"transform"'), made, TRANSFORM=rows)
    with pytest.raises(SystemExit, match=r"TRANSFORM keeps float32\[\d+\] of a parameter"):
        module.begin(SimpleNamespace(seed=0), {}, module.make_mesh())


# --- folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "s.plan.json"
    plan("zoo:mlp-tiny", devices=4).save(path)
    return path


def emit(saved: Path, *options: str) -> int:
    return cli.main(["emit", str(saved), "--model", "zoo:mlp-tiny", *options])


def everything(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def losses(*command: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "PYTHONPATH")}
    flags = clean["XLA_FLAGS"].split()  # how many devices there are is for the program to say
    clean["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    done = subprocess.run(
        [sys.executable, "-W", "error", *command, "--virtual-devices", "4", "--steps", "2"],
        capture_output=True,
        text=True,
        env=clean,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [" ".join(line.split()[:4]) for line in done.stdout.splitlines()]


def test_a_folder_runs_by_its_name_and_by_its_models(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emit(saved, "-o", str(tmp_path / "own")) == 0
    assert f"python {tmp_path / 'own'} --virtual-devices 4" in capsys.readouterr().err
    assert emit(saved, "-o", str(tmp_path / "one.py")) == 0
    one = ["emit", str(saved), "--model", "zoo:mlp-tiny", "-o", f"{tmp_path}/one", "--standalone"]
    assert cli.main(one) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "one.py").read_bytes()
    runs = [losses(str(tmp_path / name)) for name in ("own", f"own/{MODEL}", "one.py")]
    assert runs[0] == runs[1] == runs[2] and runs[0][1].startswith("step 0 loss ")


@pytest.mark.slow
def test_a_folder_that_generates_makes_the_same_tokens(tmp_path: Path) -> None:
    source, home = "zoo:llama-tiny,cache=1", tmp_path / "s.json"
    how = [
        "--devices",
        "4",
        "--workload",
        "infer",
        "--prompt",
        "8",
        "--generate",
        "6",
        "--concurrency",
        "4",
        "--quiet",
    ]
    assert cli.main([source, *how, "-o", str(home)]) == 0
    for name in ("own", "one.py"):
        assert cli.main(["emit", str(home), "--model", source, "-o", str(tmp_path / name)]) == 0
        losses(str(tmp_path / name), "--output", str(tmp_path / f"{name}.npy"))
    one, other = (np.load(tmp_path / f"{name}.npy") for name in ("own", "one.py"))
    assert one.shape == (4, 6) and np.array_equal(one, other)


def test_an_edited_model_is_kept_unless_forced(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own"
    assert emit(saved, "-o", f"{folder}/") == 0
    (folder / "notes.txt").write_text("mine")
    as_made = everything(folder)
    assert is_as_emitted((folder / MODEL).read_text())
    assert emit(saved, "-o", str(folder)) == 0 and everything(folder) == as_made
    edited = (folder / MODEL).read_text().replace("WARMUP_STEPS = 0", "WARMUP_STEPS = 9")
    (folder / MODEL).write_text(edited)
    capsys.readouterr()
    assert emit(saved, "-o", str(folder)) == 2
    said = capsys.readouterr().err
    assert "error[P053]" in said and "somebody has edited it" in said and "--runtime-only" in said
    assert (folder / MODEL).read_text() == edited
    (folder / PACKAGE / "step" / "sgd.py").unlink()
    assert emit(saved, "-o", str(folder), "--runtime-only") == 2
    assert "are not as this command wrote them" in capsys.readouterr().err
    assert cli.main(["emit", str(saved), "-o", str(folder), "--runtime-only", "--force"]) == 0
    assert everything(folder) == as_made | {MODEL: edited.encode()}
    assert emit(saved, "-o", str(folder), "--force") == 0 and everything(folder) == as_made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "a.txt"], "exists and is no folder"),
        (["-o", "none/own"], "is no folder one may write in"),
        (["-o", "none", "--runtime-only"], "the runtime of a program that is there"),
        (["--runtime-only"], "the runtime of a program that is there"),
        (["-o", ".", "--standalone"], "cannot write"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: list[str],
    said: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("mine")
    before = everything(tmp_path)
    assert emit(saved, *options) == 2
    assert said in capsys.readouterr().err and everything(tmp_path) == before


def test_a_folder_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "zoo:mlp-tiny,weights=inline"
    s = plan(source)
    folder = tmp_path / "own"
    write_program(s, source, folder, "shard_map", False, False)
    before = everything(tmp_path)
    assert {f"own/{MODEL}", "own/model.safetensors", "own/__main__.py"} < set(before)
    from planner.workload import weights

    def failing(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "load_one", failing)
    for name, backend in (("own", "jit"), ("new", "shard_map")):
        with pytest.raises(PlanError, match="No space left"):
            write_program(s, source, tmp_path / name, backend, False, True)
    assert everything(tmp_path) == before and {p.name for p in tmp_path.iterdir()} == {"own"}


def test_what_the_runtime_defines_is_not_hidden_by_its_folders() -> None:
    """Importing a module of a folder makes the folder an attribute of the package."""
    home = Path(parts.__file__).parent
    defined = {
        n.name for n in ast.parse(Path(parts.__file__).read_text()).body if hasattr(n, "name")
    }
    assert defined and defined.isdisjoint(p.name for p in home.iterdir())
