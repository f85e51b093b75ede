"""What waits in the host's memory: chosen where nothing fits without it, pinned, priced, and the
program that does it."""

from __future__ import annotations

import ast
from math import prod
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.emit.from_strategy import program
from planner.errors import PlanError
from planner.machine.topology import for_devices
from planner.pins.pins import from_table, parse_pins
from planner.strategy.strategy import Strategy
from planner.verify.numerics import load_program

GPT = "zoo:gpt-tiny,seq=16,layers=4"
OPTIONS: dict[str, Any] = {
    "devices": 8,
    "batch": 16,
    "hardware": "cpu",
    "precision": "fp32",
    "baselines": False,
}


@pytest.fixture(scope="module")
def pair() -> tuple[Strategy, Strategy]:
    """The same plan with its optimizer state beside the parameters, and away from them."""
    here, away = (
        planner.plan(GPT, **OPTIONS, pins=f"dp=8,micro=1,zero=1,recompute=none,offload={what}")
        for what in ("none", "optimizer")
    )
    return here, away


def test_pins_name_what_is_sent_away() -> None:
    assert (
        parse_pins("offload=optimizer").techniques["offload"]
        == ("optimizer",)
        == from_table({"techniques": {"offload": ["optimizer"]}}).techniques["offload"]
    )
    assert (
        parse_pins("offload=none").techniques["offload"]
        == ()
        == from_table({"techniques": {"offload": []}}).techniques["offload"]
    )
    assert parse_pins("offload=activations+optimizer").techniques["offload"] == (
        "optimizer",
        "activations",
    )
    for wrong in ("weights", "optimizer+optimizer", "optimizer+none", "", "optimizer+disk"):
        with pytest.raises(PlanError, match="offload") as e:
            parse_pins(f"offload={wrong}")
        assert e.value.code == "P020" and any("disks" in line for line in e.value.help) is (
            "disk" in wrong
        )


def test_state_leaves_the_devices_and_pays_for_its_way(pair: tuple[Strategy, Strategy]) -> None:
    here, away = pair
    assert (here.techniques["offload"], away.techniques["offload"]) == ([], ["optimizer"])
    assert {k: v["split"] for k, v in here.nodes.items()} == {
        k: v["split"] for k, v in away.nodes.items()
    }
    state = here.costs["memory_breakdown_bytes"]["optimizer"]
    assert (
        away.costs["memory_breakdown_bytes"]["optimizer"] == 0 < state
    )  # what is on its way needs less than activations did
    assert here.costs["memory_per_device_bytes"] - away.costs["memory_per_device_bytes"] == state
    ways = 2 * state / for_devices("cpu", 8).device.host_bytes_per_s
    assert away.costs["optimizer_time_s"] - here.costs["optimizer_time_s"] == pytest.approx(
        ways, rel=1e-3
    )
    assert away.costs["step_time_s"] - here.costs["step_time_s"] == pytest.approx(ways, rel=1e-2)
    assert "optimizer state offloaded to host memory" in str(away) and "offloaded" not in str(here)


def test_the_search_sends_state_away_where_nothing_fits_without(
    pair: tuple[Strategy, Strategy],
) -> None:
    """On a mesh of data alone, with no other way to save memory."""
    limit, pins = (
        int(1.02 * pair[1].costs["memory_per_device_bytes"]),
        "dp=8,micro=1,zero=1,recompute=none",
    )
    with pytest.raises(PlanError) as e:
        planner.plan(
            GPT, **OPTIONS, pins=f"{pins},offload=none", memory_limit_bytes=limit, remedies=False
        )
    assert e.value.code == "P021"
    found = planner.plan(GPT, **OPTIONS, pins=pins, memory_limit_bytes=limit)
    assert (
        found.techniques["offload"] == ["optimizer"]
        and found.costs["memory_per_device_bytes"] <= limit
    )
    assert planner.plan(GPT, **OPTIONS, pins=pins).techniques["offload"] == []
    with pytest.raises(PlanError) as e:
        planner.plan(GPT, **OPTIONS, pins=pins, memory_limit_bytes=limit // 8, remedies=False)
    assert (
        "optimizer state and embedding tables offloaded to host memory" in e.value.detail[0]
    )  # all that goes there without recomputed blocks


def test_activations_leave_the_devices_and_pay_for_their_way() -> None:
    pins = "dp=4,tp=2,micro=2,recompute=block"
    here = planner.plan(GPT, **OPTIONS, pins=f"{pins},offload=none")
    same = {
        "mesh": {"data": 4, "tensor": 2},
        "techniques": {"microbatches": 2, "recompute": "block", "offload": "activations"},
        **{node: {"split": told["split"]} for node, told in here.nodes.items()},
    }
    away = planner.plan(GPT, **OPTIONS, pins=from_table(same))
    assert {k: v["split"] for k, v in here.nodes.items()} == {
        k: v["split"] for k, v in away.nodes.items()
    }
    graph = away.graph
    assert graph is not None
    first, period, repeats = away.plan.repeated_blocks[0]
    handed = next(
        n
        for n in graph.nodes[first].inputs
        if n in graph.producer
        and graph.tensors[n].shape
        == graph.tensors[graph.nodes[first + period - 1].outputs[0]].shape
    )
    pieces = [dict(away.mesh_shape)[a] for dim in away.layout(handed).dims for a in dim]
    entering = 4 * graph.tensors[handed].elements // prod(pieces)
    saved = (
        here.costs["memory_breakdown_bytes"]["activations"]
        - away.costs["memory_breakdown_bytes"]["activations"]
    )
    assert saved == pytest.approx((repeats - 2) * entering, rel=0.1)  # two are on their way
    ways = (
        2 * 2 * repeats * entering / for_devices("cpu", 8).device.host_bytes_per_s
    )  # of two microbatches, out and in
    assert away.costs["exposed_communication_time_s"] - here.costs[
        "exposed_communication_time_s"
    ] == pytest.approx(ways, rel=1e-3)
    with pytest.raises(PlanError) as e:
        planner.emit(away, GPT, unroll=True)
    assert e.value.code == "P076" and 'save_or_offload([], ["entering"])' in planner.emit(away, GPT)


@pytest.mark.parametrize("pins", ["pp=2,dp=4,micro=4", "recompute=none"])
def test_only_what_enters_recomputed_blocks_is_sent(pins: str) -> None:
    with pytest.raises(PlanError, match="contradict") as e:
        parse_pins(f"{pins},offload=activations")
    assert e.value.code == "P024"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workload": "infer"}, "no optimizer state"),
        ({"runtime": "megatron"}, "priced as that framework"),
    ],
)
def test_pins_that_contradict_the_request_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says) as e:
        planner.plan(GPT, **{**OPTIONS, **options}, pins="offload=optimizer")
    assert e.value.code == "P024"


def test_files_keep_it_and_refuse_what_is_not_known(
    pair: tuple[Strategy, Strategy], tmp_path: Path
) -> None:
    from planner.whatif.reprice import manual

    away = pair[1]
    away.save(tmp_path / "away.json")
    loaded = Strategy.load(tmp_path / "away.json")
    again = manual(loaded, GPT)
    assert again.techniques["offload"] == ["optimizer"] and again.costs[
        "step_time_s"
    ] == pytest.approx(away.costs["step_time_s"], rel=1e-12)
    loaded.techniques["offload"] = ["everything"]  # type: ignore[index]
    with pytest.raises(PlanError) as e:
        manual(loaded, GPT)
    assert e.value.code == "P060" and "everything" in str(e.value)


def test_programs_keep_state_where_the_plan_says(pair: tuple[Strategy, Strategy]) -> None:
    here, away = (program(s, GPT).text for s in pair)
    assert (
        'memory_kind="pinned_host"' in away and "Space.Host" in away and "pinned_host" not in here
    )
    with pytest.raises(PlanError) as e:
        program(pair[1], GPT, backend="jit")
    assert e.value.code == "P076"


def test_state_on_the_host_is_replaced_where_it_lies(pair: tuple[Strategy, Strategy]) -> None:
    """What a loop returns beside what it carries are stacks of their own in the host's memory: on
    an H100 the host took 2.8 of 3.3 s a step to copy them back."""
    import jax

    module = load_program(program(pair[1], GPT))
    repeats, p = 4, jax.ShapeDtypeStruct((4, 8, 8), "float32")
    change = module.update_at(jax.numpy.float32(1), 1.0)

    def step(p: Any, g: Any, state: Any) -> Any:
        away = jax.device_put(state, jax.memory.Space.Host)
        return module.update_offloaded(change, repeats, p, g, away, True)

    made = jax.make_jaxpr(step)(p, p, jax.eval_shape(module.start_state, {"": p})[""])
    loops = [e for e in made.jaxpr.eqns if e.primitive.name in ("scan", "while")]
    assert len(loops) == 1
    if loops[0].primitive.name == "scan":
        assert len(loops[0].outvars) == loops[0].params["num_carry"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("backend", "pins", "expected"),
    [
        ("shard_map", "", "fused(mesh)"),
        ("jit", "", "whole_products(mesh) | fused(mesh)"),
        ("shard_map", ",recompute=block,offload=optimizer+activations+parameters", "fused(mesh)"),
    ],
)
def test_step_and_gradients_are_compiled_with_the_same_options(
    backend: Any, pins: str, expected: str
) -> None:
    text = planner.emit(
        planner.plan(GPT, **OPTIONS, pins=f"dp=8,micro=1,zero=1{pins}"), GPT, backend=backend
    )
    options = {
        function.name: ast.unparse(keyword.value)
        for function in ast.parse(text).body
        if isinstance(function, ast.FunctionDef)
        for keyword in ast.walk(function)
        if isinstance(keyword, ast.keyword) and keyword.arg == "compiler_options"
    }
    assert options["make_step"] == options["make_gradients"] == expected
    assert ("dynamic-slice-annotator" in text) is bool(pins)


def test_reports_say_where_host_memory_is_not_told_apart(pair: tuple[Strategy, Strategy]) -> None:
    from planner.verify.worker import offload_notes

    here, away = pair
    assert [
        [bool(offload_notes(s.plan, kind)) for kind in ("cpu", "tpu", "gpu")] for s in pair
    ] == [[False] * 3, [True, True, False]]
    assert "(optimizer)" in offload_notes(away.plan, "cpu")[0] and here.plan.offload == ()


@pytest.mark.slow
def test_programs_lowered_for_devices_without_named_memories_name_them(
    pair: tuple[Strategy, Strategy],
) -> None:
    """Over an abstract mesh, as for devices that are only compiled for: the text is that of devices
    whose memories have names."""
    import jax

    from planner.verify.ahead import lowered_for
    from planner.verify.compiled import lowered
    from planner.verify.numerics import load_program

    made = program(pair[1], GPT)
    module = load_program(made)
    text = str(lowered(module, "train", module.make_mesh()).as_text())
    assert text.count('mhlo.memory_kind = "pinned_host"') == 2 * 2 * len(
        module.GRADIENTS
    )  # two moments, given and returned
    assert str(lowered_for(load_program(made), "train", jax.devices()).as_text()) == text


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(
            "dp=4,tp=2,micro=2,zero=2,recompute=block-keep,offload=optimizer+activations",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pp=2,dp=2,tp=2,micro=4,zero=1,recompute=block,offload=optimizer",
            marks=pytest.mark.slow,
        ),
        pytest.param("dp=8,micro=1,zero=3,offload=optimizer", marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_those_of_the_unsharded_program(pins: str, tmp_path: Path) -> None:
    import json

    from benchmarks.technique_run import main

    source = GPT.replace("layers=4", "layers=2")
    planner.plan(source, **OPTIONS, pins=pins).save(tmp_path / "plan.json")
    main(str(tmp_path / "plan.json"), source, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert max(found["errors"].values()) < 1e-5 and not found["differs"] and found["judged"] > 0, (
        found
    )


def exchange_checkpoints(pair: tuple[Strategy, Strategy], source: str, folder: Path) -> None:
    """Each program of a pair saves after a step, and the other reads it: bit for bit, into its own
    kinds of memory, and training goes on."""
    import types

    import jax.numpy as jnp
    import numpy as np

    from planner.verify.numerics import load_program

    modules = [load_program(program(s, source)) for s in pair]
    for k, (writer, reader) in enumerate((modules, modules[::-1])):
        mesh = writer.make_mesh()
        _, params, state = writer.begin(types.SimpleNamespace(seed=1), {}, mesh)
        batch = writer.next_batch(None, 0, 0, mesh)
        params, state, _ = writer.make_step(mesh)(params, state, {}, batch, jnp.float32(1))
        saved = writer.open_checkpoints(str(folder / str(k)), 1)
        writer.save(saved, 1, params, state)
        saved.close()
        saved = reader.open_checkpoints(str(folder / str(k)), 1)
        done, params2, state2 = reader.restore(saved, mesh)
        saved.close()
        assert done == 1 and {x.sharding.memory_kind for row in state2.values() for x in row} == {
            reader.state_at(mesh, reader.P()).memory_kind
        }
        for key, row in state.items():
            assert all(
                np.array_equal(a, b)
                for a, b in zip((params[key], *row), (params2[key], *state2[key]), strict=True)
            )
        assert np.isfinite(reader.make_step(mesh)(params2, state2, {}, batch, jnp.float32(2))[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_state_that_is_away(tmp_path: Path, pair: tuple[Strategy, Strategy]) -> None:
    """Saved from the host's memory, read onto devices, and the other way round."""
    pytest.importorskip("orbax.checkpoint")
    exchange_checkpoints(pair, GPT, tmp_path)


@pytest.mark.slow
def test_the_gpu_compiler_keeps_on_the_host_what_the_plan_sends_there() -> None:
    from planner.verify import worker
    from planner.verify.targets import parse_target, require

    try:
        require(parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    pins = "dp=8,micro=1,zero=1,recompute=block"
    here, away = (
        planner.plan(GPT, **OPTIONS, pins=f"{pins},offload={what}")
        for what in ("none", "optimizer+activations+parameters")
    )
    plain, found = (
        {f.what: f for f in worker.verify(s, GPT, target="gpu:h100").figures} for s in (here, away)
    )
    parked = found["arguments on the host"]
    assert (
        parked.predicted == parked.compiled
        and parked.compiled > found["argument bytes"].compiled / 2
    )
    assert "arguments on the host" not in plain and found["temporaries on the host"].compiled > 0
    assert found["argument bytes"].ok and "arguments as stored" not in found
    assert found["peak"].compiled < plain["peak"].compiled - parked.compiled / 2
