"""Programs that are written into another folder than their model's find its data files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A product with its weight in a data file beside it, in a folder with a quote in its name."""
    weight = numpy_helper.from_array(np.ones((16, 16), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 16])],
        [weight],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    path = tmp_path / 'my "model"' / "m.onnx"
    path.parent.mkdir()
    onnx.save(made, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


def folder_of(text: str) -> str:
    """What a program's MODEL_FOLDER is."""
    found: dict[str, str] = {}
    (line,) = (x for x in text.splitlines() if x.startswith("MODEL_FOLDER = "))
    exec(line, found)
    return found["MODEL_FOLDER"]


def test_a_program_elsewhere_finds_the_data_of_its_model(model: Path, tmp_path: Path) -> None:
    plan, elsewhere = tmp_path / "m.plan.json", tmp_path / "programs"
    elsewhere.mkdir()
    asked = [str(model), "--devices", "2", "--hardware", "cpu", "--workload", "infer"]
    assert main([*asked, "-o", str(plan)]) == 0
    emit = ["emit", str(plan), "--model", str(model), "-o"]
    for target, written in (
        (elsewhere / "m.py", elsewhere / "m.py"),
        (elsewhere / "m", elsewhere / "m" / "model.py"),
        (model.parent / "m.py", model.parent / "m.py"),
    ):
        assert main([*emit, str(target)]) == 0
        folder = written.parent / folder_of(written.read_text())
        assert (folder / "m.data").is_file()
    assert folder_of((model.parent / "m.py").read_text()) == "."
