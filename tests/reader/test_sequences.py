"""Sequences of tensors are known lists while a model is read; bags that a loop reduces one by one
are reduced together."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from tests.reader.canonical_onnx import difference, run, to_onnx
from tests.reader.reader_models import model, ops, rand, same

INDEX = {
    "i0": np.int64(0),
    "i1": np.int64(1),
    "i2": np.int64(-1),
    "two": np.int64(2),
    "sizes": np.array([1, 3, 2]),
}
PARTS = {
    "chunks": (
        "q = SplitToSequence <axis = 1> (x, two) a = SequenceAt(q, i0) b = SequenceAt(q, i2) y ="
        " Sub(a, b)"
    ),
    "sizes": (
        "q = SplitToSequence <axis = 1> (x, sizes) r = SequenceErase(q, i0) y = ConcatFromSequence"
        " <axis = 1> (r)"
    ),
    "single": "q = SplitToSequence <axis = 1, keepdims = 0> (x) a = SequenceAt(q, i1) y = Relu(a)",
    "made": (
        "a = Relu(x) q = SequenceConstruct(x, a) r = SequenceInsert(q, x, i1) y ="
        " ConcatFromSequence <axis = 0, new_axis = 1> (r)"
    ),
    "from behind": (
        "a = Relu(x) n = Neg(x) q = SequenceConstruct(x, a) r = SequenceInsert(q, n, i2) y ="
        " ConcatFromSequence <axis = 0, new_axis = 1> (r)"
    ),
    "length": (
        "e = SequenceEmpty() q = SequenceInsert(e, x) r = SequenceInsert(q, x) n ="
        " SequenceLength(r) f = Cast <to = 1> (n) y = Mul(x, f)"
    ),
}
SHAPES = {
    "chunks": "[4,2]",
    "sizes": "[4,5]",
    "single": "[4]",
    "made": "[3,4,6]",
    "from behind": "[3,4,6]",
    "length": "[4,6]",
}


@pytest.mark.parametrize("name", PARTS)
def test_operations_on_sequences(name: str) -> None:
    text = PARTS[name]
    known = {
        n: a
        for n, a in INDEX.items()
        if any(f"{before}{n}{after}" in text for before in "(, " for after in ",)")
    }
    graph = same(
        model(f"(float[4,6] x) => (float{SHAPES[name]} y) {{ {text} }}", **known), {"x": rand(4, 6)}
    )
    assert not any("Sequence" in op for op in ops(graph))


def bag_model(
    bags: int, length: int, *, mean: bool = True, direct: bool = False
) -> onnx.ModelProto:
    """A table's rows, gathered for all numbers (or bag by bag), reduced a bag at a time by a loop
    that appends to a sequence."""
    ints = {
        "start": np.arange(bags) * length,
        "stop": np.arange(1, bags + 1) * length,
        "flat": np.array([-1]),
        "zero": np.array([0]),
    }
    tensors = [
        onnx.numpy_helper.from_array(rand(20, 6), "bag.weight"),
        *(onnx.numpy_helper.from_array(np.asarray(a, np.int64), n) for n, a in ints.items()),
        onnx.numpy_helper.from_array(np.asarray(bags, np.int64), "bags"),
        onnx.numpy_helper.from_array(np.asarray(True), "go"),
    ]
    at = [helper.make_node("Gather", [bound, "k"], [f"{bound}_k"]) for bound in ("start", "stop")]
    at += [
        helper.make_node("Reshape", [f"{bound}_k", "flat"], [f"{bound}_1"])
        for bound in ("start", "stop")
    ]
    cut = [
        helper.make_node(
            "Slice",
            ["view" if direct else "rows", "start_1", "stop_1", "zero"],
            ["piece0" if direct else "piece"],
        )
    ]
    cut += [helper.make_node("Gather", ["bag.weight", "piece0"], ["piece"])] if direct else []
    one = helper.make_node(
        "ReduceMean" if mean else "ReduceSum", ["piece", "zero"], ["one"], keepdims=1
    )
    body = helper.make_graph(
        [
            *at,
            *cut,
            one,
            helper.make_node("SequenceInsert", ["seq", "one"], ["seq_out"]),
            helper.make_node("Identity", ["c"], ["c_out"]),
        ],
        "b",
        [
            helper.make_tensor_value_info("k", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("seq", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("c_out", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("seq_out", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("Reshape", ["i", "flat"], ["view"]),
        *([] if direct else [helper.make_node("Gather", ["bag.weight", "view"], ["rows"])]),
        helper.make_node("SequenceEmpty", [], ["empty"]),
        helper.make_node("Loop", ["bags", "go", "empty"], ["all"], body=body, name="n19"),
        helper.make_node("ConcatFromSequence", ["all"], ["y"], axis=0),
    ]
    ends = (
        [helper.make_tensor_value_info("i", TensorProto.INT64, [bags, length])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [bags, 6])],
    )
    return helper.make_model(
        helper.make_graph(nodes, "g", *ends, tensors),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


def check(made: onnx.ModelProto, bags: int, length: int) -> Graph:
    graph = read_model(made)
    feeds = {"i": np.random.default_rng(0).integers(0, 20, (bags, length))}
    assert difference(run(to_onnx(graph), feeds)[0], run(made, feeds)[0]) < 1e-6
    return graph


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_bags_of_one_length_are_reduced_together_and_take_another_batch(
    mean: bool, direct: bool
) -> None:
    made = bag_model(3, 5, mean=mean, direct=direct)
    graph = check(made, 3, 5)
    assert (
        graph.trainable == {"bag.weight"}
        and not {"Concat", "Slice"} & set(ops(graph))
        and ops(graph).count("ReduceMean" if mean else "ReduceSum") == 1
    )
    again = read_model(made, batch=7)
    assert again.tensors[again.outputs[0]].shape == (7, 6)


def test_bags_that_overlap_stay_as_they_are() -> None:
    made = bag_model(3, 5)
    starts = next(t for t in made.graph.initializer if t.name == "start")
    starts.CopyFrom(onnx.numpy_helper.from_array(np.array([0, 4, 10]), "start"))
    assert "Concat" in ops(check(made, 3, 5))


def test_what_cannot_be_unrolled_names_its_module() -> None:
    made = bag_model(3, 5)
    made.graph.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(np.asarray(True), "go"))
    made.graph.node[3].input[0] = "many"
    made.graph.input.append(helper.make_tensor_value_info("many", TensorProto.INT64, []))
    entry = made.graph.node[3].metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", "['', 'bag', 'embedding_bag']"
    with pytest.raises(PlanError, match=r"(?s)P130.*of module 'bag'.*sequence of tensors"):
        read_model(made)


def test_an_operation_that_takes_a_tensor_refuses_a_sequence() -> None:
    with pytest.raises(PlanError, match="P130"):
        read_model(
            model("(float[4,6] x) => (float[4,6] y) { q = SequenceConstruct(x, x) y = Relu(q) }")
        )
