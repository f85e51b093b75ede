"""Every element type that ONNX has, wherever a model may hold one, through the plain command with
the cache on: a plan, or one coded error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper as H

from planner.cache.folder import Cache
from planner.cli import main
from planner.graph.value_digest import value_bytes

TYPES = {name: code for name, code in T.DataType.items() if code}
node, value = H.make_node, H.make_tensor_value_info


def stored(name: str, code: int, dims: list[int], first: int = 0) -> onnx.TensorProto:
    """A tensor of zeros and ones, or the like."""
    n = int(np.prod(dims, dtype=int))
    values: list[Any] = [(first + i) % 2 for i in range(n)]
    if code == T.STRING:
        values = [f"a{v}".encode() for v in values]
    return H.make_tensor(
        name,
        code,
        dims,
        [complex(v, 1) for v in values] if code in (T.COMPLEX64, T.COMPLEX128) else values,
    )


def _branch(name: str, code: int, first: int) -> onnx.GraphProto:
    nodes = [
        node("Constant", [], [f"{name}c"], value=stored("", code, [16], first)),
        node("Cast", [f"{name}c"], [f"{name}f"], to=1),
        node("Add", ["m", f"{name}f"], [name]),
    ]
    return H.make_graph(nodes, name, [], [value(name, 1, [8, 16])])


def model(form: str, code: int, first: int = 0) -> onnx.ModelProto:
    """x @ w, and what a form does with a tensor `c` of a type."""
    inits, inputs, result = (
        [H.make_tensor("w", 1, [16, 16], [0.5] * 256)],
        [value("x", 1, [8, 16])],
        1,
    )
    read = [node("Cast", ["c"], ["f"], to=1), node("Add", ["m", "f"], ["y"])]
    match form:
        case "initializer" | "scalar":
            inits.append(stored("c", code, [16] if form == "initializer" else [], first))
        case "large":
            inits.append(stored("c", code, [16, 600], first))
            read = [node("Cast", ["c"], ["f"], to=1), node("MatMul", ["m", "f"], ["y"])]
        case "constant":
            read = [node("Constant", [], ["c"], value=stored("", code, [16], first)), *read]
        case "input":
            inputs.append(value("c", code, [8, 16]))
        case "unused":
            inits.append(stored("c", code, [16], first))
            read = [node("Relu", ["m"], ["y"])]
        case "filled":
            inits.append(H.make_tensor("s", 7, [1], [16]))
            read = [
                node("ConstantOfShape", ["s"], ["c"], value=stored("", code, [1], first)),
                *read,
            ]
        case "cast":
            read = [node("Cast", ["m"], ["c"], to=code), node("Cast", ["c"], ["y"], to=1)]
        case "output":
            read, result = [node("Cast", ["m"], ["y"], to=code)], code
        case "compared":
            inits += [stored("c", code, [16], first), stored("d", code, [16], first)]
            read = [node("Equal", ["c", "d"], ["e"]), node("Where", ["e", "m", "m"], ["y"])]
        case "joined":
            inits += [stored("d", code, [8], first), stored("e", code, [8], first)]
            read = [node("Concat", ["d", "e"], ["c"], axis=0), *read]
        case "twice":  # identical operations on identical constants, which are merged by digests
            inits += [stored("c", code, [16], first), stored("d", code, [16], first)]
            read = [
                *read[:1],
                node("Cast", ["d"], ["g"], to=1),
                node("Add", ["m", "f"], ["n"]),
                node("Add", ["n", "g"], ["y"]),
            ]
        case "dequantized":
            inits += [stored("c", code, [16, 16], first), H.make_tensor("s", 1, [], [1.0])]
            read = [node("DequantizeLinear", ["c", "s"], ["f"]), node("MatMul", ["m", "f"], ["y"])]
        case "attribute":
            inits.append(stored("c", code, [16], first))
            read[1].attribute.append(H.make_attribute("tag", stored("z", code, [3], first)))
        case "branches":
            inputs.append(value("b", T.BOOL, []))
            read = [
                node(
                    "If",
                    ["b"],
                    ["y"],
                    then_branch=_branch("p", code, first),
                    else_branch=_branch("q", code, first + 1),
                )
            ]
    graph = H.make_graph(
        [node("MatMul", ["x", "w"], ["m"]), *read], "g", inputs, [value("y", result, None)], inits
    )
    return H.make_model(graph, opset_imports=[H.make_opsetid("", 24)], ir_version=11)


FORMS = (
    "initializer",
    "scalar",
    "large",
    "constant",
    "input",
    "unused",
    "filled",
    "cast",
    "output",
    "compared",
    "joined",
    "twice",
    "dequantized",
    "attribute",
    "branches",
)


@given(st.sampled_from(FORMS), st.sampled_from(sorted(TYPES)), st.booleans(), st.integers(0, 1))
@settings(max_examples=30, derandomize=True)
def test_a_type_is_planned_or_refused(
    tmp_path_factory: pytest.TempPathFactory, form: str, name: str, training: bool, first: int
) -> None:
    planned_or_refused(tmp_path_factory.mktemp("types"), form, TYPES[name], training, first)


@pytest.mark.slow
@given(st.sampled_from(FORMS), st.sampled_from(sorted(TYPES)), st.booleans(), st.integers(0, 1))
@settings(max_examples=60, derandomize=True)
def test_more_types_are_planned_or_refused(
    tmp_path_factory: pytest.TempPathFactory, form: str, name: str, training: bool, first: int
) -> None:
    planned_or_refused(tmp_path_factory.mktemp("types"), form, TYPES[name], training, first)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["BFLOAT16", "STRING", "FLOAT8E4M3FN", "INT4"])
def test_types_that_exporters_write_are_planned_or_refused(
    tmp_path: Path, form: str, name: str
) -> None:
    planned_or_refused(tmp_path, form, TYPES[name], name != "INT4", 0)


def planned_or_refused(folder: Path, form: str, code: int, training: bool, first: int) -> None:
    import contextlib
    import io

    file, out = folder / "m.onnx", folder / "m.json"
    onnx.save(model(form, code, first), file)
    words = [
        str(file),
        "--devices",
        "2",
        "--workload",
        "train" if training else "infer",
        "-o",
        str(out),
        "--cache",
        str(folder / "cache"),
        "--quiet",
        "--time-limit",
        "20",
    ]
    texts = []
    for _ in range(2):  # searched, then recalled
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            done = main(words)
        assert (done, err.getvalue()) == (0, "") or (
            done == 2 and err.getvalue().startswith(("error[P130]", "error[P143]", "error[P033]"))
        ), (form, code, err.getvalue())
        texts.append(out.read_text().partition('"provenance"')[0] if done == 0 else err.getvalue())
    assert texts[0] == texts[1]


def test_equal_values_have_equal_bytes_whatever_their_type() -> None:
    for dtype in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e8m0fnu,
        ml_dtypes.int4,
        ml_dtypes.uint2,
        ml_dtypes.float4_e2m1fn,
        np.complex64,
        np.bool_,
    ):
        a = np.arange(2).astype(dtype)
        assert value_bytes(a) == value_bytes(a.copy()) != value_bytes(a[::-1].copy())
    texts = np.array(
        [b"one", b"two"], dtype=object
    )  # the buffer of an array of objects holds addresses
    assert value_bytes(texts) == value_bytes(
        np.array([bytes(bytearray(t)) for t in texts.tolist()], dtype=object)
    )


FAULTS = {
    "the key": ("planner.search.search.search_key", 0),
    "what was found": ("planner.search.search.recalled", 1),
    "tables": ("planner.search.search.machine_key", 0),
    "reading a table": ("planner.cache.reshard_tables.Tables._read", 0),
    "writing tables": ("planner.cache.reshard_tables.Tables.keep", 0),
    "an entry": ("planner.search.search.kept", 0),
    "the history": ("planner.search.search.remember", 0),
    "a plan before": ("planner.search.search.from_before", 0),
    "writing": ("planner.cache.folder.Cache.put", 0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_in_the_cache_costs_no_plan(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("nobody thought of this")

    where, earlier = FAULTS[place]
    words = ["zoo:mlp-tiny", "--devices", "4", "--json"]
    strict, soft = (
        [*words, "--cache", str(tmp_path / name)] + ["--incremental"] * (place == "a plan before")
        for name in ("strict", "soft")
    )
    assert main([*words, "--no-cache"]) == 0
    alone = capsys.readouterr().out
    if earlier:
        assert main(strict) == main(soft) == 0
        capsys.readouterr()
    monkeypatch.setattr(where, broken)
    with pytest.raises(RuntimeError):  # where MESHWRIGHT_DEBUG is set, as in all tests
        main(strict)
    monkeypatch.delenv("MESHWRIGHT_DEBUG")
    assert main(soft) == 0
    out, err = capsys.readouterr()
    assert out.partition('"provenance"')[0] == alone.partition('"provenance"')[0]
    assert (
        "RuntimeError: nobody thought of this" in out
        and "the cache failed and was left aside" in err
    )


def test_an_error_of_the_model_is_no_fault_of_the_cache(tmp_path: Path) -> None:
    from planner.errors import PlanError

    def refused() -> None:
        raise PlanError("P101", "there is no such file")

    with pytest.raises(PlanError):
        Cache(tmp_path).faults.spare("recalled", refused, None)
