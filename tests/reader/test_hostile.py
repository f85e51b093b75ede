"""Malformed, tricky and malicious files: a plan-ready graph or one clear PlanError, never a
traceback, hang or allocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read, read_model
from planner.workload.weights import load
from tests.reader.reader_models import SHARED, model, rand

HOSTILE = SHARED / "hostile"
# file -> error code, or None when it must be read
SHARED_FILES = {
    "01": "P135",
    "03": None,
    "05": "P134",
    "07": "P112",
    "09": "P110",
    "11": "P111",
    "13": None,
    "15": "P133",
    "17": None,
    "19": "P144",
    "21": "P115",
    "23": "P105",
    "25": None,
    "27": None,
    "29": "P120",
    "31": None,
    "33": "P130",
    "35": "P102",
    "37": "P136",
    "39": None,
    "41": None,
    "43": None,
    "45": None,
    "47": "P102",
    "49": "P102",
    "51": "P104",
    "53": "P102",
    "55": None,
    "57": None,
    "59": None,
}


@pytest.mark.skipif(not HOSTILE.exists(), reason="needs the shared files")
@pytest.mark.parametrize("number", sorted(SHARED_FILES))
def test_shared_file(number: str) -> None:
    (path,) = HOSTILE.glob(f"{number}_*.onnx")
    start = time.process_time()
    if SHARED_FILES[number] is None:
        graph = read(path)
        assert graph.nodes
    else:
        with pytest.raises(PlanError) as caught:
            read(path)
        assert caught.value.code == SHARED_FILES[number]
        assert caught.value.exit_code == 2
    assert time.process_time() - start < 5


@pytest.mark.skipif(not HOSTILE.exists(), reason="needs the shared files")
def test_every_shared_file_is_expected() -> None:
    manifest = json.loads((HOSTILE / "manifest.json").read_text())
    assert {name[:2] for name in manifest} == set(SHARED_FILES)


def read_in_little_memory(path: Path) -> tuple[int, str]:
    """Exit status and output of reading a file with 1.5 GiB of address space."""
    code = (  # it limits itself: a function between fork and exec is not for tests beside jax's
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))\n"
        "from planner.reader import read\nfrom planner.errors import PlanError\n"
        "try: g = read(sys.argv[1]); print('nodes', len(g.nodes))\nexcept PlanError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def saved(made: onnx.ModelProto, tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def fails(made: onnx.ModelProto | Path | str, code: str, *parts: str, **options: object) -> str:
    with pytest.raises(PlanError) as caught:
        read(made, **options) if isinstance(made, (Path, str)) else read_model(made, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert caught.value.code == code, text
    assert all(p in text for p in parts), text
    return text


# files


def test_files_that_are_none(tmp_path: Path) -> None:
    fails(tmp_path / "absent.onnx", "P101", "absent.onnx")
    fails(tmp_path, "P101", "folder")  # the one in it is found before: commands/test_model_folder
    empty = tmp_path / "empty.onnx"
    empty.touch()
    fails(empty, "P102", "empty")
    huge = tmp_path / "huge.onnx"
    with huge.open("wb") as file:
        file.truncate(2**31 + 10)  # sparse: no bytes on disk
    fails(huge, "P103", "save_as_external_data")


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4),
)
def test_damaged_files_never_crash(
    tmp_path: Path, cut: float, flips: list[tuple[float, int]]
) -> None:
    made = model(
        "(float[2,4] x) => (float[2,3] y) { h = MatMul(x, w) y = Add(h, b) }",
        w=rand(4, 3),
        b=rand(3),
    )
    data = bytearray(made.SerializeToString())
    for where, value in flips:
        data[int(where * len(data))] = value
    path = tmp_path / "damaged.onnx"
    path.write_bytes(bytes(data[: int(cut * len(data))] if cut < 0.5 else data))
    try:
        assert isinstance(read(path), Graph)
    except PlanError as error:
        assert error.code.startswith("P1")


# structure


def test_unsorted_nodes_and_repeated_names_are_legal() -> None:
    made = model("(float[2,4] x) => (float[2,4] y) { y = Relu(b) b = Neg(a) a = Abs(x) }")
    for node in made.graph.node:
        node.name = "n"
    graph = read_model(made)
    assert [n.op for n in graph.nodes] == ["Abs", "Neg", "Relu"]
    assert len({n.id for n in graph.nodes}) == 3


def test_structure_errors_name_the_culprits() -> None:
    fails(model("(float[2] x) => (float[2] nowhere) { y = Relu(x) }"), "P113", "'nowhere'")
    fails(model("(float[2] x) => (float[2] y) { y = Add(x, ghost) }"), "P111", "'ghost'", "Add")
    fails(
        model("(float[2] x) => (float[2] y) { a = Add(x, b) b = Relu(a) y = Neg(b) }"),
        "P112",
        "'a'",
        "'b'",
    )
    fails(model("(float[2] x) => (float[2] x2) { x = Relu(x2) x2 = Relu(x) }"), "P110", "'x'")
    twice = model("(float[2] x) => (float[2] y) { y = Add(x, w) }", w=rand(2))
    twice.graph.initializer.append(twice.graph.initializer[0])
    fails(twice, "P110", "'w'")
    nothing = model("(float[2] x) => (float[2] y) { y = Relu(x) }")
    del nothing.graph.node[:]
    fails(nothing, "P114", "no nodes")
    del nothing.graph.output[:]
    fails(nothing, "P114")


def test_constant_model_has_nothing_to_plan() -> None:
    fails(model("(float[2,3] x) => (int64[2] y) { y = Shape(x) }"), "P114", "constant")


def test_opsets() -> None:
    old = model("(float[2] x) => (float[2] y) { y = Relu(x) }")
    old.opset_import[0].version = 9999
    fails(old, "P105", "9999")
    del old.opset_import[:]
    fails(old, "P105")


def test_wrong_operands_are_named() -> None:
    fails(model("(float[2,3] x) => (float[2] y) { y = MatMul(x) }"), "P116", "MatMul")
    fails(
        model("(float[2,3] x) => (float[2,3] y) { n = Softmax <axis = 7> (x) y = Relu(n) }"),
        "P115",
        "axis 7",
    )
    fails(
        model("(float[2,3] x) => (float[2] y) { y = Reshape(x, s) }", s=np.array([4, 4])),
        "P115",
        "[2, 3]",
        "[4, 4]",
    )
    fails(
        model("(float[2,3] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }"),
        "P130",
        "run-time data",
    )


def test_unsupported_operators_are_listed_together() -> None:
    made = model(
        "(float[2,3] x) => (float[2,3] y) { a = NoSuchOp(x) b = AlsoMissing(x) y = Add(a, b) }"
    )
    text = fails(made, "P130", "NoSuchOp", "AlsoMissing", "2 operator(s)")
    assert "Add" not in text and "write these parts otherwise; export again" in text


def test_what_picks_boxes_is_refused_with_what_can_be_planned() -> None:
    text = fails(model("(float[8] x) => (int64[a,b] y) { y = NonZero(x) }"), "P130", "NonZero")
    assert "leave backbone and head" in text


def test_a_loop_over_experts_is_refused_with_the_export_that_can_be_planned() -> None:
    made = model("(float[8] x) => (int64[a,b] y) { y = NonZero(x) }")
    assert "batched_mm" not in fails(made, "P130", "NonZero", "run-time data", "export again")
    made.graph.node[0].name = "/model/layers.0/mlp/experts/NonZero"
    fails(made, "P130", "NonZero", "batched_mm")


def test_custom_operator_with_declared_shape_is_kept() -> None:
    made = model("(float[2,3] x) => (float[2,3] y) { y = Relu(a) }")
    made.graph.node.insert(0, helper.make_node("Magic", ["x"], ["a"], domain="acme", power=3))
    made.opset_import.append(helper.make_opsetid("acme", 1))
    fails(made, "P130", "acme::Magic")
    made.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 3]))
    graph = read_model(made)
    assert graph.nodes[0].op == "acme::Magic" and graph.nodes[0].attrs == {"power": 3}


def test_sequences_strings_and_optionals() -> None:
    made = model(
        "(float[2,3] x) => (float[2,3] y) { s = SequenceConstruct(x) i = Constant <value_int = 0>"
        " () y = SequenceAt(s, i) }"
    )
    assert read_model(made).nodes
    fails(
        model("(float[2,3] x) => (float[2,3] y) { s = SequenceConstruct(x) y = Relu(s) }"),
        "P130",
        "sequence",
    )
    text = model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    text.graph.input.append(helper.make_tensor_value_info("words", TensorProto.STRING, [2]))
    fails(text, "P143", "'words'", "string")
    made = model("(float[2] x) => (float[2] y) { y = Relu(x) }")
    made.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = 1
    fails(made, "P143", "Sequence")


# resources


def test_function_bomb_and_recursion() -> None:
    made = model("(float[2] x) => (float[2] y) { y = local.f0(x) }")
    made.opset_import.append(helper.make_opsetid("local", 1))
    for k in range(30):
        inner = [
            helper.make_node(f"f{k + 1}", ["a"], ["b"], domain="local"),
            helper.make_node(f"f{k + 1}", ["b"], ["c"], domain="local"),
        ]
        made.functions.append(
            helper.make_function(
                "local", f"f{k}", ["a"], ["c"], inner, [helper.make_opsetid("local", 1)]
            )
        )
    last = [helper.make_node("Relu", ["a"], ["c"])]
    made.functions.append(
        helper.make_function("local", "f30", ["a"], ["c"], last, [helper.make_opsetid("", 20)])
    )
    made.graph.node[0].domain = "local"
    made.graph.node[0].op_type = "f0"
    fails(made, "P120", "1,073,741,824")
    made.functions[30].node[0].domain, made.functions[30].node[0].op_type = "local", "f0"
    fails(made, "P122", "calls itself")


def test_functions_are_inlined_with_their_attributes() -> None:
    made = model("(float[2,4] x) => (float[2,3] y) { y = Relu(h) }", w=rand(4, 3), b=rand(3))
    made.graph.node.insert(
        0, helper.make_node("Lin", ["x", "w", "b"], ["h"], name="lin", domain="local", slope=0.3)
    )
    made.opset_import.append(helper.make_opsetid("local", 1))
    leaky = helper.make_node("LeakyRelu", ["s"], ["out"])
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    body = [
        helper.make_node("MatMul", ["a", "w"], ["p"], name="mm"),
        helper.make_node("Add", ["p", "b"], ["s"]),
        leaky,
    ]
    made.functions.append(
        helper.make_function(
            "local", "Lin", ["a", "w", "b"], ["out"], body, [helper.make_opsetid("", 20)], ["slope"]
        )
    )
    made.functions.append(
        helper.make_function(
            "local", "Unused", ["a"], ["z"], [helper.make_node("Nonsense", ["q"], ["z"])], []
        )
    )
    graph = read_model(made)
    assert [n.op for n in graph.nodes] == ["MatMul", "Add", "LeakyRelu", "Relu"]
    assert graph.nodes[0].id == "lin/mm" and graph.nodes[2].attrs["alpha"] == pytest.approx(0.3)


def bombs() -> dict[str, onnx.ModelProto]:
    """Small files that ask for terabytes or ages."""
    big = np.array([1 << 20, 1 << 20, 1 << 10])
    made = {
        "constant_of_shape": model(
            "(float[2] x) => (float[a] y) { c = ConstantOfShape(s) r = ReduceSum(c) y = Add(x,"
            " r) }",
            s=big,
        ),
        "expand": model(
            "(float[2] x) => (float[a] y) { c = Expand(one, s) r = ReduceSum(c) y = Add(x, r) }",
            s=big,
            one=np.float32(1),
        ),
        "range": model(
            "(float[2] x) => (float[2] y) { r = Range(a, b, d) c = Cast <to = 1> (r) m ="
            " ReduceMax(c) y = Add(x, m) }",
            a=np.int64(0),
            b=np.int64(1 << 50),
            d=np.int64(1),
        ),
        "tile": model(
            "(float[2] x) => (float[a] y) { c = Tile(one, s) m = ReduceMax(c) y = Add(x, m) }",
            one=np.ones((1, 1, 1), np.float32),
            s=big,
        ),
        "pad": model("(float[2] x) => (float[a] y) { y = Pad(x, s) }", s=np.array([1 << 45, 0])),
        "onehot": model(
            "(int64[2] x) => (float[a,b] y) { y = OneHot(x, d, v) }",
            d=np.int64(1 << 45),
            v=np.array([0, 1], np.float32),
        ),
        "outer": model(
            "(float[2] x) => (float[2] y) { e = Einsum <equation = 'a,b,c->' > (u, u, u) y = Add(x,"
            " e) }".replace("'", '"'),
            u=np.ones(60_000, np.float32),
        ),
        "resize": model(
            '(float[1,1,4,4] x) => (float[a,b,c,d] y) { y = Resize <mode = "nearest"> (x, , s) }',
            s=np.array([1, 1, 1e6, 1e6], np.float32),
        ),
    }
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(bombs()))
def test_bombs_in_little_memory(name: str, tmp_path: Path) -> None:
    status, output = read_in_little_memory(saved(bombs()[name], tmp_path))
    assert status == 0 and ("nodes" in output or "error[P1" in output), output


@pytest.mark.parametrize("name", sorted(bombs()))
def test_bombs_are_quick(name: str) -> None:
    start = time.process_time()
    try:
        graph = read_model(bombs()[name])
        assert all(c.size <= 65536 for c in graph.constants.values())
    except PlanError:
        pass
    assert time.process_time() - start < 2


def test_loops_of_absurd_length_are_refused() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["v"], ["v2"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [2]),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v2", TensorProto.FLOAT, [2]),
        ],
    )
    made = model(
        "(float[2] x) => (float[2] y) { y = Relu(z) }", n=np.int64(1 << 62), go=np.array(True)
    )
    made.graph.node.insert(
        0, helper.make_node("Loop", ["n", "go", "x"], ["z"], name="loop", body=body)
    )
    fails(made, "P130", "Loop", "'loop'")


def branches(value: float) -> onnx.GraphProto:
    constant = helper.make_node("Constant", [], ["k"], value_float=value)
    out = helper.make_tensor_value_info("r", TensorProto.FLOAT, [2])
    return helper.make_graph(
        [constant, helper.make_node("Add", ["x", "k"], ["r"])], "branch", [], [out]
    )


def test_constant_if_takes_its_branch_and_others_keep_both() -> None:
    made = model("(float[2] x) => (float[2] y) { y = Relu(z) }", yes=np.array(True))
    made.graph.node.insert(
        0,
        helper.make_node(
            "If", ["yes"], ["z"], then_branch=branches(3.0), else_branch=branches(5.0)
        ),
    )
    graph = read_model(made)
    assert [n.op for n in graph.nodes] == ["Add", "Relu"]
    assert [float(c) for c in graph.constants.values()] == [3.0]
    del made.graph.initializer[:]
    made.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
    kept = read_model(made).nodes
    assert [n.op for n in kept] == ["If", "Relu"] and [
        [n.op for n in body.nodes] for body in kept[0].bodies
    ] == [["Add"], ["Add"]]


# tensors


def test_stored_tensors_are_checked() -> None:
    def with_tensor(**fields: object) -> onnx.ModelProto:
        made = model("(float[2,4] x) => (float[2,4] y) { y = Add(x, w) }")
        tensor = TensorProto(name="w", data_type=1, dims=[4])
        tensor.raw_data = b"\0" * 16
        for key, value in fields.items():
            if key == "dims":
                del tensor.dims[:]
                tensor.dims.extend(value)  # type: ignore[arg-type]
            else:
                setattr(tensor, key, value)
        made.graph.initializer.append(tensor)
        return made

    assert read_model(with_tensor()).nodes
    fails(with_tensor(raw_data=b"\0" * 12), "P131", "16 bytes", "12")
    fails(with_tensor(dims=[-4]), "P132", "'w'", "negative")
    fails(with_tensor(dims=[2**40, 2**40]), "P133", "1208925819614629174706176")
    fails(with_tensor(data_type=77), "P130", "'w'", "unknown type 77")


def test_absent_values_are_planned() -> None:
    made = model("(float[2,8] x) => (float[2,8] y) { y = MatMul(x, w) }")
    made.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[8, 8]))
    graph = read_model(made)
    assert graph.weights["w"].kind == "absent" and graph.trainable == {"w"}


def external(location: str, **entries: object) -> onnx.ModelProto:
    made = model("(float[2,8] x) => (float[2,8] y) { y = MatMul(x, w) }")
    tensor = TensorProto(name="w", data_type=1, dims=[8, 8], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    made.graph.initializer.append(tensor)
    return made


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../w.bin",
        "a/../../w.bin",
        "C:\\w.bin",
        "..\\w.bin",
        "\\\\host\\w.bin",
        "a\0b",
    ],
)
def test_external_data_may_not_leave_the_folder(location: str, tmp_path: Path) -> None:
    fails(saved(external(location), tmp_path), "P135", "'w'")


def test_external_data_is_looked_at_but_not_opened(tmp_path: Path) -> None:
    path = saved(external("w.bin", offset=0, length=256), tmp_path)
    assert read(path).weights["w"].kind == "external"  # absent: fine for planning
    (tmp_path / "w.bin").write_bytes(b"\0" * 100)
    fails(path, "P134", "256", "100")
    (tmp_path / "w.bin").write_bytes(b"\0" * 256)
    (tmp_path / "w.bin").chmod(0)
    assert read(path).nodes
    (tmp_path / "w.bin").unlink()
    (tmp_path / "w.bin").mkdir()
    fails(path, "P135", "regular file")
    (tmp_path / "w.bin").rmdir()
    (tmp_path / "w.bin").symlink_to("/etc/passwd")
    fails(path, "P135", "symbolic link")


@pytest.mark.parametrize(
    "entries",
    [{"length": 10**18}, {"length": 255}, {"offset": -1}, {"offset": "x"}, {"length": "1e3"}],
)
def test_external_ranges_must_fit_the_dims(entries: dict[str, object], tmp_path: Path) -> None:
    fails(saved(external("w.bin", **entries), tmp_path), "P134", "'w'")


def test_file_swapped_after_planning_is_caught(tmp_path: Path) -> None:
    path = saved(external("w.bin"), tmp_path)
    graph = read(path)
    (tmp_path / "w.bin").symlink_to("/etc/passwd")
    with pytest.raises(PlanError, match="P135"):
        load(graph, tmp_path)


def sparse(shape: list[int], indices: list[int]) -> onnx.ModelProto:
    made = model("(float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }")
    values = numpy_helper.from_array(np.arange(1, len(indices) + 1, dtype=np.float32), "w")
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            values, numpy_helper.from_array(np.array(indices, np.int64), "w_indices"), shape
        )
    )
    return made


def test_sparse_initializers() -> None:
    graph = read_model(sparse([4, 4], [0, 5, 10, 15]))
    assert np.array_equal(load(graph, None)["w"], np.diag([1, 2, 3, 4]).astype(np.float32))
    fails(sparse([2**31, 2**31], [0]), "P136", "4611686018427387904")
    fails(sparse([4, 4], [99]), "P136", "indices")


def test_names_are_never_trusted() -> None:
    evil = 'x"\n__import__("os").system("touch /tmp/pwned")\n#'
    made = model("(float[2] x) => (float[2] y) { y = Relu(x) }")
    made.graph.input[0].name = made.graph.node[0].input[0] = made.graph.node[0].name = evil
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = evil
    graph = read_model(made, batch=3)
    assert graph.tensors[evil].shape == (3,) and graph.nodes[0].id == evil


# what fuzzing found


def test_types_that_cannot_be_planned_are_named() -> None:
    fails(
        model("(float[2] x) => (float[2] y) { h = Cast <to = 20> (x) y = Cast <to = 1> (h) }"),
        "P130",
        "float8e5m2fnuz",
    )


def test_attributes_of_another_kind_are_refused() -> None:
    made = model("(float[2,3] x) => (float[2,3] y) { y = Gelu(x) }")
    made.graph.node[0].attribute.add(name="approximate", type=onnx.AttributeProto.INTS)
    fails(made, "P116", "Gelu", "approximate")
    made = model("(float[2,3,4,4] x) => (float[2,3,4,4] y) { y = LRN(x) }")
    fails(made, "P116", "LRN", "'size' is missing")


def test_operands_too_many_and_absent_ones() -> None:
    fails(
        model("(float[3] x, bool[3] c) => (float[3] y) { y = Where(c, x, x, x) }"),
        "P116",
        "4 inputs",
    )
    made = model('(int16[3] x) => (int16[3] y) { y = BitShift <direction = "LEFT"> (x, x) }')
    made.graph.node[0].input[1] = ""
    fails(made, "P116", "absent")


def test_declared_shapes_of_known_operators_are_not_believed() -> None:
    made = model('(uint8[113] x) => (uint8[3] y) { y = BitShift <direction = "LEFT"> (x, x) }')
    assert read_model(made, batch=113).tensors["y"].shape == (113,)


def test_an_output_without_a_name_and_a_function_without_its_operand() -> None:
    made = model(
        "(float[2,4] x) => (float[2,2] y, float[2,2] z) { y, z = Split <axis = 1, num_outputs = 2>"
        " (x) }"
    )
    made.graph.output[1].name = made.graph.node[0].output[1] = ""
    fails(made, "P113", "''")
    made = model("(float[2] x) => (float[2] y) { z = Relu(x) }")
    made.graph.node.append(helper.make_node("Hand", ["x"], ["y"], domain="local"))
    made.opset_import.append(helper.make_opsetid("local", 1))
    made.functions.append(
        helper.make_function(
            "local",
            "Hand",
            ["a", "b"],
            ["b"],
            [helper.make_node("Relu", ["a"], ["c"])],
            [helper.make_opsetid("", 20)],
        )
    )
    fails(made, "P130", "'y'")


@pytest.mark.parametrize("groups", [0, -1, 4])
def test_groups_must_divide_the_channels(groups: int) -> None:
    made = model(
        f"(float[2,6,3] x) => (float[2,6,3] y) {{ y = GroupNormalization <num_groups = {groups}>"
        " (x, s, b) }",
        opset=21,
        s=rand(6),
        b=rand(6),
    )
    fails(made, "P115", f"{groups} groups of 6 channels")


def test_a_batch_that_constants_cannot_follow_is_refused_at_once() -> None:
    made = model(
        "(float[4,3] x) => (float[4,3] y) { y = Add(x, c) }", c=np.ones((4, 3), np.float32)
    )
    fails(made, "P133", "batch", batch=1 << 52)


@pytest.mark.parametrize(
    "text",
    [
        "y = LeakyRelu <alpha = 0.5> (x)",
        "a = Identity(x) y = Clip(a, low, high)",
        "p = Pad(x, pads, high) y = Slice(p, one, last)",
        "y = Selu <alpha = 0.5> (x)",
    ],
)
def test_infinities_are_written_as_expressions(text: str) -> None:
    import ast

    from planner.emit.program import emit
    from planner.execution.plan import Plan

    made = model(
        f"(float[4] x) => (float[4] y) {{ {text} }}",
        low=np.float32("-inf"),
        high=np.float32("inf"),
        pads=np.array([1, 0]),
        one=np.array([1]),
        last=np.array([5]),
    )
    for attribute in made.graph.node[0].attribute:
        attribute.f = float("inf")
    program = emit(read_model(made), Plan((), {}), workload="infer").text
    names = {n.id for n in ast.walk(ast.parse(program)) if isinstance(n, ast.Name)}
    assert not names & {"inf", "nan"} and "inf" in program
    exec(
        compile(program.replace('if __name__ == "__main__":', "if False:"), "program", "exec"),
        {"__name__": "program", "__file__": "program.py"},
    )


def test_operators_without_a_kernel_are_planned_and_not_emitted() -> None:
    from planner.emit.program import emit
    from planner.execution.plan import Plan

    made = model("(float[2,3] x) => (float[2,3] y) { y = Relu(a) }")
    made.graph.node.insert(0, helper.make_node("Magic", ["x"], ["a"], domain="acme"))
    made.opset_import.append(helper.make_opsetid("acme", 1))
    made.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 3]))
    with pytest.raises(PlanError, match="P066.*") as caught:
        emit(read_model(made), Plan((), {}), workload="infer")
    assert "acme::Magic" in str(caught.value)


def test_a_weight_of_a_repeated_block_that_is_used_elsewhere() -> None:
    from planner.emit.program import emit
    from planner.execution.plan import Plan
    from planner.graph.repeats import find_runs

    layers = " ".join(
        f"m{k} = MatMul(h{k}, w{k}) a{k} = Add(m{k}, b{k}) r{k} = Relu(a{k}) s{k} = Mul(r{k}, c{k})"
        f" h{k + 1} = Add(h{k}, s{k})"
        for k in range(4)
    )
    made = model(
        f"(float[8,6] x) => (float[8,6] y) {{ h0 = Add(x, b2) {layers} y = Relu(h4) }}",
        **{f"w{k}": rand(6, 6, seed=k) for k in range(4)},
        **{f"{n}{k}": rand(6, seed=k) for k in range(4) for n in "bc"},
    )
    graph = read_model(made)
    runs = find_runs(graph)
    assert runs
    program = emit(graph, Plan((("data", 8),), {}, repeated_blocks=runs), workload="infer")
    assert program.unrolled_because and "used elsewhere" in program.unrolled_because[0]


def test_a_table_is_no_shape() -> None:
    start = time.process_time()
    for target in (np.full(2_000_000, 3), np.ones(3000, np.int64)):
        fails(
            model("(float[2,3] x) => (float[a,b] y) { y = Reshape(x, s) }", s=target),
            "P115",
            str(target.size),
        )
    assert time.process_time() - start < 5


def test_bodies_inside_bodies_are_bounded() -> None:
    """Both branches of an If nested alike: twice as many bodies with every level, of a few
    kilobytes each."""

    def nested(depth: int) -> onnx.GraphProto:
        made = (
            [helper.make_node("Relu", ["m"], ["y"])]
            if not depth
            else [
                helper.make_node(
                    "If", ["c"], ["y"], then_branch=nested(depth - 1), else_branch=nested(depth - 1)
                )
            ]
        )
        return helper.make_graph(made, "g", [], [helper.make_tensor_value_info("y", 1, [4, 8])])

    inputs = [
        helper.make_tensor_value_info("x", 1, [4, 8]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]

    def of(depth: int) -> onnx.ModelProto:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), *nested(depth).node]
        graph = helper.make_graph(
            nodes,
            "g",
            inputs,
            [helper.make_tensor_value_info("y", 1, [4, 8])],
            [numpy_helper.from_array(rand(8, 8), "w")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])

    started = time.process_time()
    fails(of(10), "P130", "more than 128 bodies inside bodies")
    assert len(read_model(of(3)).nodes) == 2
    assert time.process_time() - started < 30


def test_tensors_of_many_dims_are_bounded() -> None:
    """A dim more with every Expand: layouts, and pairs of them, are as many as dims to the power of
    the mesh's axes."""
    import tracemalloc

    import planner

    def of(last: int) -> onnx.ModelProto:
        sizes = {f"s{k}": np.array([2] * k) for k in range(1, last + 1)}
        steps = " ".join(f"e{k} = Expand(e{k - 1}, s{k})" for k in range(1, last + 1))
        text = (
            f"(float[8,16] x) => (float[a,b] y) {{ {steps} m = MatMul(x, w) r = ReduceSum <keepdims"
            f" = 0> (e{last}) y = Add(m, r) }}"
        )
        return model(text, **sizes, w=rand(16, 16), e0=np.ones(1, np.float32))

    fails(of(40), "P115", "a tensor with 33 dims")
    tracemalloc.start()
    try:
        planner.plan(of(20), devices=8, workload="infer")
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("y = Pad(m, p)", [-9, 0, 0, 0], r"pads \[-9, 0, 0, 0\] make \[-1, 8\]"),
        ("y = Tile(m, p)", [-2, 1], r"a tensor of shape \[-16, 8\]"),
        ("c = ConstantOfShape(p) y = Add(m, c)", [-3], r"a filled tensor of shape \[-3\]"),
        ("y = Reshape(m, p)", [-2, 8], r"cannot reshape"),
    ],
)
def test_sizes_below_nothing_are_refused(text: str, given: list[int], said: str) -> None:
    with pytest.raises(PlanError, match=f"P115.*{said}"):
        read_model(
            model(
                f"(float[8,8] x) => (float[a,b] y) {{ m = MatMul(x, w) {text} }}",
                p=np.array(given),
                w=rand(8, 8),
            )
        )


def test_an_output_of_nothing_cannot_be_trained_on() -> None:
    import planner

    made = model(
        "(float[8,8] x) => (float[a,b] y) { m = MatMul(x, w) y = Slice(m, s, e) }",
        s=np.array([5]),
        e=np.array([2]),
        w=rand(8, 8),
    )
    with pytest.raises(PlanError, match=r"P033.*of shape \[0, 8\] has no elements"):
        planner.plan(made, devices=2)
    assert planner.plan(made, devices=2, workload="infer").tensors["y"]["shape"] == [0, 8]


def test_a_file_that_contradicts_itself_is_told() -> None:
    """Declared shapes are not believed, and where they are false that is a finding."""

    def notes(shape: str, inner: str = "", batch: str = "4") -> list[str]:
        made = model(
            f"(float[{batch},8] x) => (float[{shape}] y) {inner} {{ m = MatMul(x, w) y ="
            " Relu(m) }",
            w=rand(8, 8),
        )
        return [note for note in read_model(made).notes if "contradicts itself" in note]

    assert notes("5,9") == [
        "the file contradicts itself: 'y' is declared [5, 9] and made [4, 8]; planned as made"
    ]
    assert notes("b,9", batch="b")[0].startswith("the file contradicts itself: 'y' is declared")
    assert "'m' is declared [5, 9]" in notes("4,8", "<float[5,9] m>")[0]
    assert (
        not notes("4,8") + notes("a,b") + notes("b,8", batch="b") + notes("4,8", "<float[4,8] m>")
    )
