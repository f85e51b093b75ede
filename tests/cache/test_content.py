"""What plans follow from in a model: no name is part of it, everything else is; and a search gives
the same plan whatever things are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models_zoo
import planner
from benchmarks.otherwise import called_otherwise
from planner.cache.content_digest import file_content, graph_content
from planner.cache.folder import Cache
from planner.pins.pins import Pins, from_table
from planner.search.build_request import make_request
from planner.search.keys import model_key, search_key
from planner.workload.open import open_model
from tests.cache.test_cache import text
from tests.reader.control_models import branches, counted_loop, scan

MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"
TYPES = onnx.AttributeProto


def decided(strategy: planner.Strategy) -> tuple[Any, ...]:
    """What a strategy says without any name of the model."""
    found = json.loads(strategy.to_json())
    baselines = {k: row["step_time_s"] for k, row in found["baselines"].items()}
    return (
        found["mesh"],
        found["techniques"],
        found["cost"],
        baselines,
        [row["split"] for row in found["nodes"].values()],
        found["solver"],
    )


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{
        name: (lambda name=name: models_zoo.build(f"zoo:{name}"), {"devices": 8, "batch": 16})
        for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny")
    },  # type: ignore[misc]
    **{
        name: (lambda name=name: models_zoo.build(f"zoo:{name}"), {"devices": 4, "batch": 16})
        for name in ("mixtral-tiny", "deepseek-tiny", "resnet-tiny", "mlp-tiny")
    },  # type: ignore[misc]
    "branches": (branches, {"devices": 4, "workload": "infer"}),
    "three axes, stages": (
        lambda: models_zoo.build("zoo:gpt-tiny,layers=4"),
        {"devices": 16, "batch": 32, "pins": "pp=2"},
    ),
    "loop": (lambda: counted_loop(3), {"devices": 4, "workload": "infer"}),
    "scan": (scan, {"devices": 4, "loss": "mse"}),
}
FILES: dict[str, dict[str, Any]] = {
    "torch_lstm_legacy17.onnx": {},
    "torch_gpt2_tiny_dynamo.onnx": {"dims": {"seq": 16}},
    "torch_llama_tiny_op23_static_dynamo.onnx": {},
    "torch_mixtral_tiny_batched_mm_static_dynamo.onnx": {},
    "torch_vit_tiny_dynamo.onnx": {},
    "jax2onnx_flax_gpt_block.onnx": {},
}


def content(proto: Any, **options: Any) -> tuple[str, str]:
    model = open_model(proto, 4, **options)
    return file_content(proto, model.plain.trainable), graph_content(model.graph(1))


def same_whatever_it_is_called(proto: Any, options: dict[str, Any], folder: Path) -> None:
    other = called_otherwise(proto)
    alone, kept = planner.plan(other, **options), Cache(folder)
    assert decided(planner.plan(proto, **options, cache=kept)) == decided(alone)
    again = Cache(folder)
    assert text(planner.plan(other, **options, cache=again)) == text(alone)
    assert again.hits == again.lookups == kept.lookups >= 1


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", SOURCES)
def test_a_model_called_otherwise_is_not_searched_again(name: str, tmp_path: Path) -> None:
    """Its plan is the one that a search of it finds, and comes from the search of the model under
    its old names."""
    make, options = SOURCES[name]
    same_whatever_it_is_called(make(), options, tmp_path)


@pytest.mark.one_in(6)
@pytest.mark.skipif(not MODELS.is_dir(), reason="no exported models here")
@pytest.mark.parametrize("name", FILES)
def test_an_exported_model_called_otherwise_is_not_searched_again(
    name: str, tmp_path: Path
) -> None:
    same_whatever_it_is_called(
        onnx.load(MODELS / name, load_external_data=False), {"devices": 4, **FILES[name]}, tmp_path
    )


def small(proto: Any) -> tuple[Any, ...]:
    return decided(planner.plan(proto, devices=4, batch=8, baselines=False))


@cache
def usual() -> tuple[Any, ...]:
    return small(models_zoo.build("zoo:gpt-tiny,layers=1"))


@pytest.mark.parametrize("names", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_no_order_of_names_is_part_of_a_search(names: int) -> None:
    proto = models_zoo.build("zoo:gpt-tiny,layers=1")

    @given(st.integers(0, 10**6))
    @settings(max_examples=names, deadline=None)
    def same(seed: int) -> None:
        assert small(called_otherwise(proto, seed)) == usual()

    same()


def _attribute(proto: Any) -> None:
    next(a for n in proto.graph.node for a in n.attribute if a.type == TYPES.INT).i += 1


def _float(proto: Any) -> None:
    next(a for n in proto.graph.node for a in n.attribute if a.type == TYPES.FLOAT).f *= 2


def _operands(proto: Any) -> None:
    node = next(n for n in proto.graph.node if n.op_type == "MatMul")
    node.input[:] = node.input[::-1]


def _other_weight(proto: Any) -> None:
    """A product reads the weight of another of the same shape, which reads this one's."""
    a, b = [n for n in proto.graph.node if n.op_type == "MatMul"][:2]
    a.input[1], b.input[0] = b.input[1], a.input[0]


def _shape(proto: Any) -> None:
    proto.graph.initializer[0].dims[0] += 1


def _type(proto: Any) -> None:
    next(
        t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT
    ).data_type = onnx.TensorProto.FLOAT16


def _number(proto: Any) -> None:
    """A value that shapes are made of."""
    t = next(t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.INT64)
    t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t) + 1, t.name))


def _operator(proto: Any) -> None:
    next(n for n in proto.graph.node if n.op_type == "Gelu").op_type = "Relu"


def _less(proto: Any) -> None:
    del proto.graph.node[-1]


def _order(proto: Any) -> None:
    last = proto.graph.initializer.pop()
    proto.graph.initializer.insert(0, last)


def _size(proto: Any) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"


def _opset(proto: Any) -> None:
    proto.opset_import[0].version += 1


def _domain(proto: Any) -> None:
    proto.graph.node[0].domain = "mine"


def _output(proto: Any) -> None:
    proto.graph.output.append(
        onnx.helper.make_tensor_value_info(
            proto.graph.node[2].output[0], onnx.TensorProto.FLOAT, None
        )
    )


CHANGES = (
    _attribute,
    _float,
    _operands,
    _other_weight,
    _shape,
    _type,
    _number,
    _operator,
    _less,
    _order,
    _size,
    _opset,
    _domain,
    _output,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_what_may_change_a_plan_changes_the_content(change: Callable[[Any], None]) -> None:
    proto = models_zoo.build("zoo:gpt-tiny,layers=1")
    parameters = open_model(proto, 4, batch=8).plain.trainable
    before = file_content(proto, parameters)
    change(proto)
    assert file_content(proto, parameters) != before


def test_values_that_patterns_look_at_are_content() -> None:
    """A weight that is all ones may be one that the reader leaves out; so a graph says what values
    say of it."""
    small = onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [4], [1.0] * 4)
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Mul", ["x", "scale"], ["y"])], "g", [], [], [small]
        )
    )
    before = file_content(proto, ()), file_content(proto, {"scale"})
    proto.graph.initializer[0].float_data[0] = 2.0
    assert file_content(proto, ()) != before[0]
    assert file_content(proto, {"scale"}) == before[1]
    proto.graph.initializer[0].name = "other"
    assert file_content(proto, {"other"}) != before[1], "the node reads what nothing stores"


def test_values_too_large_to_be_folded_are_no_content() -> None:
    large = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [70_000], [1.0] * 70_000)
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Mul", ["x", "w"], ["y"])], "g", [], [], [large]
        )
    )
    before = file_content(proto, ())
    proto.graph.initializer[0].float_data[0] = 2.0
    assert file_content(proto, ()) == before
    proto.graph.initializer[0].dims[:] = [7, 10_000]
    assert file_content(proto, ()) != before


@pytest.mark.parametrize(
    "make", [branches, lambda: counted_loop(3), scan], ids=["branches", "loop", "scan"]
)
def test_bodies_are_content(make: Callable[[], Any]) -> None:
    proto = make()
    before = content(proto, workload="infer")
    assert content(called_otherwise(proto), workload="infer") == before
    node = next(n for n in proto.graph.node if any(a.type == TYPES.GRAPH for a in n.attribute))
    body = next(a.g for a in node.attribute if a.type == TYPES.GRAPH)
    inner = next(n for n in body.node if n.op_type in ("Relu", "Tanh"))
    inner.op_type = "Sigmoid"
    other = content(proto, workload="infer")
    assert other[0] != before[0] and other[1] != before[1]


def test_a_body_may_call_its_own_what_is_called_so_around_it() -> None:
    """A name that a body defines is another tensor than the one around it, whichever names both
    have."""

    def made(inner: str, read: str) -> Any:
        body = onnx.helper.make_graph(
            [
                onnx.helper.make_node("Relu", ["x"], [inner]),
                onnx.helper.make_node("Neg", [read], ["z"]),
            ],
            "b",
            [],
            [onnx.ValueInfoProto(name="z")],
        )
        nodes = [
            onnx.helper.make_node("Abs", ["x"], ["t"]),
            onnx.helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
        ]
        return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], []))

    assert file_content(made("t", "t"), ()) == file_content(made("u", "u"), ())
    assert file_content(made("u", "t"), ()) != file_content(made("u", "u"), ())


def test_pins_that_name_nodes_are_of_one_set_of_names(tmp_path: Path) -> None:
    """The same pattern may mean other nodes where they are called otherwise."""
    proto = models_zoo.build("zoo:gpt-tiny")
    other = called_otherwise(proto)

    def key(source: Any, pins: Pins) -> str:
        model, request = (
            open_model(source, 8, batch=16),
            make_request(devices=8, hardware=None, topology=None, pins=pins),
        )
        return search_key(model, model_key(model), request)

    by_name = from_table({"*mlp*": {"split": {"n": ["model"]}}})
    assert key(proto, by_name) != key(other, by_name)
    assert key(proto, from_table({"mesh": {"model": 2}})) == key(
        other, from_table({"mesh": {"model": 2}})
    )


def test_how_far_a_step_goes_costs_nothing(tmp_path: Path) -> None:
    """A learning rate is in the strategy, and no part of its search."""
    planner.plan("zoo:mlp-tiny", devices=2, batch=8, lr=1e-3, cache=tmp_path)
    known = Cache(tmp_path)
    made = planner.plan("zoo:mlp-tiny", devices=2, batch=8, lr=2e-4, cache=known)
    assert known.hits == known.lookups == 1
    assert json.loads(made.to_json())["workload"]["training"]["lr"] == 2e-4
