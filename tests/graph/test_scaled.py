"""What a search derives instead of working it out again: graphs and bases at other batches, bounds
of meshes without their spaces."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import planner.search.workspace
import planner.workload.model
from planner.analysis.facts import STRUCTURE, GraphFacts
from planner.graph.ir import Graph, Node, Tensor, WeightRef
from planner.graph.rescale import Scaled, same
from planner.search.build_request import make_request
from planner.search.relaxation import Relaxation
from planner.search.search import Search
from planner.space.build import build_space
from planner.space.techniques import Techniques
from planner.space.variables import Space
from planner.workload.model import Model, Workload
from tests.reader.reader_models import model, rand

MODELS = (
    "mlp-tiny",
    "gpt-tiny",
    "llama-tiny",
    "mixtral-tiny",
    "bert-tiny",
    "t5-tiny",
    "vit-tiny",
    "resnet-tiny",
    "unet-tiny",
    "dlrm-tiny",
    "ssm-tiny",
    "lstm-tiny",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_derived_graphs_are_those_that_are_read(name: str) -> None:
    model = Model.open(f"zoo:{name}", Workload(batch=24), 1)
    for parts in (2, 3, 4, 6, 24):
        derived = model.sketch(parts)
        read = model.graph(parts)
        assert derived.nodes == read.nodes
        assert derived.tensors == read.tensors
        assert derived.dims == read.dims
        assert same(derived, read)
        assert model.confirm(parts)


def test_what_lengthens_weights_of_static_exports_is_derived(tmp_path: Path) -> None:
    """A mask beside the file, exported for two samples: it grows with the batch when it is loaded,
    and at two samples it is as it lies."""
    made = model(
        "(float[2,3,8] x) => (float[2,3,8] y) { h = MatMul(x, w) m = Add(h, mask) y = Relu(m) }",
        13,
        w=rand(8, 8),
    )
    mask = onnx.TensorProto(
        name="mask", data_type=1, dims=[2, 3, 8], data_location=onnx.TensorProto.EXTERNAL
    )
    mask.external_data.add(key="location", value="mask.bin")
    made.graph.initializer.append(mask)
    onnx.save(made, tmp_path / "m.onnx")
    found = Model.open(tmp_path / "m.onnx", Workload("infer", batch=24), 1)
    for parts in (2, 3, 4, 6, 12):
        derived, samples = found.sketch(parts), 24 // parts
        assert found.derived(parts) == (samples != 2 and parts != found.small)
        read = found.graph(parts)
        assert derived.weights == read.weights and same(derived, read) and found.confirm(parts)
        assert derived.weights["mask"].transform == (
            (("reshape", (2, 3, 8)), ("rebatch", (0, 1, 2, 1, samples))) if samples != 2 else ()
        )
    other = replace(
        found.sketch(2).weights["mask"],
        transform=(("reshape", (2, 3, 8)), ("transpose", (0, 1, 2))),
    )
    assert (
        Scaled.of(
            found.graph(1),
            replace(found.graph(2), weights={**found.graph(2).weights, "mask": other}),
        )
        is None
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", ["gpt-tiny", "llama-tiny", "mixtral-tiny", "t5-tiny", "unet-tiny", "lstm-tiny"]
)
def test_readings_of_one_file_leave_nothing_behind(name: str) -> None:
    model = Model.open(f"zoo:{name}", Workload(), 1)
    text = model.proto.SerializeToString(deterministic=True)
    for batch in (24, 4, 24, 6):
        again, fresh = model.read(batch), Model.open(f"zoo:{name}", Workload(), 1).read(batch)
        assert same(again, fresh) and again.notes == fresh.notes
    assert model.proto.SerializeToString(deterministic=True) == text


def test_a_count_in_the_loss_grows_with_the_batch() -> None:
    model = Model.open("zoo:gpt-tiny", Workload(batch=16, shift_labels=True), 1)
    assert model.sketch(2).nodes[-1].attrs["count"] == 4 * model.sketch(8).nodes[-1].attrs["count"]
    assert not same(model.sketch(2), model.sketch(4))


def graph(batch: int, *, rows: int, value: float = 0.5) -> Graph:
    """x [batch, 4] -> Reshape [rows, 4], with an attribute and two constants."""
    tensors = {
        t.name: t
        for t in (
            Tensor("x", (batch, 4), "float32", "input"),
            Tensor("y", (rows, 4), "float32"),
            Tensor("c", (2,), "int64", "constant"),
            Tensor("f", (1,), "float32", "constant"),
        )
    }
    constants = {"c": np.array([rows, 7]), "f": np.array([value], np.float32)}
    return Graph(
        "g",
        (Node("n", "Reshape", ("x",), ("y",), {"ends": (rows, -1), "scale": value}),),
        tensors,
        ("x",),
        ("y",),
        constants=constants,
        dims={"batch": batch},
    )


def test_only_what_is_proportional_is_derived() -> None:
    found = Scaled.of(graph(8, rows=24), graph(2, rows=6))
    assert found is not None
    four = found.at(4)
    assert (
        four is not None and same(four, graph(4, rows=12)) and four.nodes == graph(4, rows=12).nodes
    )
    assert Scaled.of(graph(8, rows=9), graph(2, rows=3)) is None  # batch + 1
    assert Scaled.of(graph(8, rows=8, value=0.25), graph(2, rows=2, value=0.5)) is None
    assert Scaled.of(graph(8, rows=8), graph(8, rows=8)) is None
    other = graph(2, rows=2)
    assert Scaled.of(graph(8, rows=8), replace(other, nodes=(*other.nodes, other.nodes[0]))) is None
    third = Scaled.of(graph(8, rows=4), graph(2, rows=1))
    assert third is not None and third.at(3) is None  # one and a half rows


def of_tokens(batch: int, tokens: int) -> Graph:
    """x [batch, tokens] -> Reshape [batch * tokens, 4], one more than these in a constant."""
    found = graph(batch, rows=batch * tokens)
    x = Tensor("x", (batch, tokens), "float32", "input")
    constants = {**found.constants, "c": np.array([tokens + 1, 7])}
    dims = {"batch": batch, "sequence": tokens}
    return replace(found, tensors={**found.tensors, "x": x}, constants=constants, dims=dims)


def test_three_readings_say_what_grows_with_the_batch_and_with_tokens() -> None:
    batches = Scaled.of(of_tokens(2, 8), of_tokens(4, 8))
    lengths = Scaled.along(of_tokens(2, 8), of_tokens(2, 32), (8, 32))
    assert batches is not None and lengths is not None
    for tokens in (8, 20, 32):
        found = lengths.at(tokens)
        assert found is not None and same(found, of_tokens(2, tokens))
        scaled = batches.on(found)
        assert scaled is not None
        for batch in (1, 3, 16):
            derived = scaled.at(batch)
            assert derived is not None and same(derived, of_tokens(batch, tokens))
    assert Scaled.along(of_tokens(2, 8), graph(2, rows=16), (8, 32)) is None


def test_constants_that_would_grow_by_a_part_are_not_derived() -> None:
    """As of extents: by half of three, from a batch of four to one of six."""
    four, six = graph(4, rows=4), graph(6, rows=6)
    scaled = Scaled.of(four, six)
    assert scaled is not None and scaled.on(four) is not None
    three = {**four.constants, "c": np.array([3, 7])}
    assert scaled.on(replace(four, constants=three)) is None


def searching(monkeypatch: pytest.MonkeyPatch, **workload: int) -> tuple[Search, list[int]]:
    """A search for a small model on eight devices, and the batches that are read for it."""
    read, batches = planner.workload.model.read_model, list[int]()

    def counted(*a: Any, **k: Any) -> Graph:
        batches.append(k["batch"])
        return read(*a, **k)

    monkeypatch.setattr(planner.workload.model, "read_model", counted)
    model = Model.open("zoo:gpt-tiny,layers=4", Workload(**workload), 8)  # type: ignore[arg-type]
    request = make_request(
        devices=8,
        hardware="a100-80gb",
        topology=None,
        memory_limit_bytes=20_000_000,
        pins="recompute=none",
        mode="semi-auto",
        baselines=False,
    )
    return Search(model, request), batches


@pytest.mark.slow
def test_a_search_reads_three_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    search, batches = searching(monkeypatch, batch=4096)
    found = search.run()
    assert found.best is not None and found.best.plan.microbatches == 8
    assert len(search._bases) > 4
    assert batches == [4096, 16, 512]  # the whole, a small part, and the one that was chosen


@pytest.mark.slow
def test_what_was_derived_wrongly_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = searching(monkeypatch, batch=4096)
    right, sketch = search.run(), Model.sketch

    def wrong(model: Model, parts: int) -> Graph:
        found = sketch(model, parts)
        if parts in model._sketches:
            found = model._sketches[parts] = replace(found, labels={})
        return found

    monkeypatch.setattr(Model, "sketch", wrong)
    search, _ = searching(monkeypatch, batch=4096)
    with pytest.warns(UserWarning, match="derived wrongly"):
        again = search.run()
    assert again.best is not None and right.best is not None and again.best.cost == right.best.cost
    assert again.base.graph.labels


def test_weights_that_repeat_a_value_are_compared_by_it() -> None:
    # 512 GiB if it were made whole.
    def filled(value: float) -> Graph:
        shape = (8, 1 << 36)
        tensors = {
            t.name: t
            for t in (
                Tensor("x", (4, 8), "float32", "input"),
                Tensor("w", shape, "float32", "weight"),
                Tensor("y", (4, 1 << 36), "float32"),
            )
        }
        weight = WeightRef("inline", proto=np.broadcast_to(np.float32(value), shape))
        return Graph(
            "g",
            (Node("n", "MatMul", ("x", "w"), ("y",)),),
            tensors,
            ("x",),
            ("y",),
            weights={"w": weight},
            labels={"w": "w"},
        )

    assert same(filled(0.5), filled(0.5))
    assert not same(filled(0.5), filled(0.25))


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "llama-tiny,layers=4", "mixtral-tiny", "unet-tiny", "lstm-tiny"]
)
def test_bases_of_other_batches_are_those_of_their_own(name: str) -> None:
    model = Model.open(f"zoo:{name}", Workload(batch=24), 1)
    graph = model.graph(4)
    moved, own = (
        GraphFacts.of(model.graph(1), training=True).at(graph),
        GraphFacts.of(graph, training=True),
    )
    for part in (
        "reasons",
        "grad",
        "runs",
        "shared",
        "times",
        *(p for p in STRUCTURE if p != "passing"),
        "kinds",
        "batch_factors",
        "backward",
        "model_flops",
    ):
        assert getattr(moved, part) == getattr(own, part), part
    np.testing.assert_equal(astuple(moved.passing), astuple(own.passing))  # of arrays
    assert [r.sizes for r in moved.rules] == [r.sizes for r in own.rules]
    assert [r.flops for r in moved.rules] == [r.flops for r in own.rules]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("source", ["zoo:gpt-tiny,layers=8", "zoo:mixtral-tiny,layers=4"])
def test_products_alone_are_below_every_bound(source: str) -> None:
    search = Search(
        Model.open(source, Workload(batch=64), 8),
        make_request(devices=8, hardware=None, topology=None),
    )
    checked = 0
    for mesh in search.offered.meshes():
        counts = search.offered.microbatches(mesh)
        space = search.space(mesh, math.gcd(*counts), None)
        if space is not None:
            relaxed = Relaxation(space)
            for micro in counts:
                assert search.floor(mesh, micro) <= relaxed.least((0, 1, 2, 3)) + relaxed.bubble_s(
                    micro
                )
                free = relaxed.free(Techniques(1, "block", micro), micro)
                assert free is None or relaxed.least((0, 1, 2)) + relaxed.recompute_adds_s(
                    "block"
                ) <= free[1] * (1 + 1e-9)
                checked += 1
    assert checked > 20


@pytest.mark.slow
def test_a_search_builds_few_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes that products alone rule out have none built, and only leaves that are priced have one
    of their own; memory binds. First bounds leave out attention: with all of its pairs, which no
    kernel computes under a causal mask, 6 meshes with stages were left of 20, and better ones were
    ruled out."""
    built = list[tuple]()

    def counted(*a: Any, **k: Any) -> Space:
        built.append((a[1].mesh.shape, k["parts"]))
        return build_space(*a, **k)

    monkeypatch.setattr(planner.search.workspace, "build_space", counted)
    search = Search(
        Model.open("zoo:llama3-8b,seq=16384", Workload(batch=256), 64),
        make_request(devices=64, hardware=None, topology=None, memory_reserve_bytes=12 * 2**30),
    )
    found = search.run()
    assert found.best is not None
    staged = search.offered.staged()
    assert len(staged) == 20
    assert len({mesh for mesh, _ in built} & {m.shape for m in staged}) <= 15
    leaves = [(m.shape, k) for m in search.offered.meshes() for k in search.offered.microbatches(m)]
    assert len(leaves) == 184 and len(built) <= 42
