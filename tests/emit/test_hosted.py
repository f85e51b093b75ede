"""Tables on hosts and servers: which can be, what a plan of them costs, and the advice."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import types
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import planner
from benchmarks.manifests import check_manifest
from costmodels.host_link import HOST_ROWS_BYTES_PER_S
from planner.cli import main
from planner.emit.writer import Program
from planner.errors import PlanError
from planner.launch.job import Job
from planner.launch.join import free_port
from planner.launch.kubernetes import Asked, manifests
from planner.machine.topology import device
from planner.report.summary import summary
from planner.verify.numerics import load_program
from planner.workload.host_tables import candidates, with_host_tables, worth
from planner.workload.model import Model, Workload

SPEC = "zoo:dlrm-tiny,rows=5000-7-33-9000"


def graph_of(spec: str, batch: int = 64) -> planner.Graph:
    return Model.open(spec, Workload(batch=batch), 4).plain


def test_tables_with_more_rows_than_ids_are_hosted() -> None:
    graph = graph_of(SPEC)
    found = candidates(graph)
    assert {n: (h.rows, h.ids) for n, h in found.items()} == {
        "embedding.0.weight": (5000, ("sparse_0",)),
        "embedding.3.weight": (9000, ("sparse_3",)),
    } and worth(graph)
    pieces = with_host_tables(graph, 1, "host")
    assert pieces.tensors["embedding.3.weight"].shape == (64, 16) and pieces.tensors[
        "embedding.2.weight"
    ].shape == (33, 16)
    assert candidates(graph, 100) == {
        "embedding.3.weight": found["embedding.3.weight"]
    }  # 6,400 ids a step
    assert with_host_tables(graph, 4, "host").tensors["embedding.0.weight"].shape == (256, 16)
    assert not worth(graph_of("zoo:gpt-tiny", 4)) and not candidates(
        replace(graph, trainable=frozenset())
    )


def test_tables_that_something_else_reads_stay() -> None:
    """A tied head, ids that are data too, and ids that two tables share."""
    rows, ids = (
        numpy_helper.from_array(np.zeros((50, 4), np.float32), "t"),
        helper.make_tensor_value_info("i", TensorProto.INT64, [8]),
    )
    other = numpy_helper.from_array(np.zeros((60, 4), np.float32), "u")
    look = helper.make_node("Gather", ["t", "i"], ["x"], axis=0)

    def read(nodes: list[onnx.NodeProto], out: str, shape: list[int]) -> dict[str, object]:
        y = helper.make_tensor_value_info(out, TensorProto.FLOAT, shape)
        model = helper.make_model(
            helper.make_graph(nodes, "g", [ids], [y], [rows, other]),
            opset_imports=[helper.make_opsetid("", 18)],
        )
        return dict(candidates(Model.open(model, Workload(), 1).plain))

    relu = helper.make_node("Relu", ["x"], ["y"])
    assert list(read([look, relu], "y", [8, 4])) == ["t"]
    assert not read(
        [
            look,
            helper.make_node("Transpose", ["t"], ["w"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "y",
        [8, 50],
    )
    as_data = [
        helper.make_node("Cast", ["i"], ["c"], to=1),
        helper.make_node("Constant", [], ["o"], value_ints=[1]),
        helper.make_node("Unsqueeze", ["c", "o"], ["d"]),
    ]
    assert not read([look, *as_data, helper.make_node("Mul", ["x", "d"], ["y"])], "y", [8, 4])
    assert not read(
        [
            look,
            helper.make_node("Gather", ["u", "i"], ["z"], axis=0),
            helper.make_node("Add", ["x", "z"], ["y"]),
        ],
        "y",
        [8, 4],
    )


@pytest.mark.parametrize("place", ["host", pytest.param("server", marks=pytest.mark.slow)])
def test_a_step_adds_pulling_and_pushing(place: str, tmp_path: Path) -> None:
    """By hand: two pieces [64, 16] with two moments in float32, on two nodes of eight."""
    s = planner.plan(
        SPEC,
        devices=16,
        hardware="h100-sxm",
        batch=64,
        precision="fp32",
        tables=place,
        baselines=False,
    )
    c, chip = s.costs, device("h100-sxm")
    shards = dict(s.mesh_shape)
    local = sum(
        12
        * prod(
            -(-n // prod([shards[a] for a in axes]))
            for n, axes in zip(row["shape"], row["layout"], strict=True)
        )
        for row in s.tensors.values()
        if row.get("label") in s.techniques["hosted"]
    )
    into, rate = (
        min(2 * 64 * 16 * 12, 8 * local),
        8 * chip.outer.bandwidth_bytes_per_s * chip.outer.efficiency,
    )
    network = into * (0.5 if place == "host" else 1) / rate + chip.outer.latency_s
    assert c["tables_time_s"] == pytest.approx(
        2 * (into / HOST_ROWS_BYTES_PER_S + network + local / chip.host_bytes_per_s), rel=1e-5
    )
    parts = sum(
        c[k]
        for k in (
            "compute_time_s",
            "exposed_communication_time_s",
            "optimizer_time_s",
            "bubble_time_s",
            "tables_time_s",
        )
    )
    assert c["step_time_s"] == pytest.approx(parts, rel=1e-5)
    assert (
        s.techniques["hosted"] == ["embedding.0.weight", "embedding.3.weight"]
        and c["host_memory_bytes"] == 14_000 * 16 * 12
    )
    s.save(tmp_path / "s.json")
    assert planner.Strategy.load(tmp_path / "s.json").workload["training"]["tables"] == place


@pytest.mark.slow
def test_the_summary_advises() -> None:
    s = planner.plan(SPEC.replace("5000", "500000"), devices=4, hardware="cpu", batch=64)
    rows = s.baselines
    assert (
        rows["tables_host"]["step_time_s"]
        < rows["tables_server"]["step_time_s"]
        < s.costs["step_time_s"]
    )
    text = " ".join(summary(s, 100, False).split())
    ratio = s.costs["step_time_s"] / rows["tables_host"]["step_time_s"]
    assert (
        f"tables on hosts would be {ratio:.2g} times as fast: plan again with --tables host" in text
        and "tables on hosts" in text.split("relative")[1]
    )
    assert (
        not {"tables_host", "tables_server"}
        & planner.plan("zoo:gpt-tiny", devices=4, hardware="cpu", batch=4).baselines.keys()
    )


def test_what_cannot_be_hosted_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code in (
        (["zoo:gpt-tiny", "--tables", "host"], "P029"),
        ([SPEC, "--tables", "moon"], "P018"),
        ([SPEC, "--tables", "host", "--workload", "infer"], "P028"),
    ):
        assert main([*words, "--devices", "4", "--hardware", "cpu", "--batch", "64"]) == 2
        assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.slow
def test_where_nothing_fits_hosting_is_named() -> None:
    with pytest.raises(PlanError, match=r"P021[\s\S]*--tables host fits \(re-priced: "):
        planner.plan("zoo:dlrm-tiny,rows=90000000-7-33-9000", devices=1, hardware="cpu", batch=64)


# --- programs


def emitted(
    tmp_path: Path, name: str, backend: str = "shard_map", **options: Any
) -> types.ModuleType:
    """A program of two tables of 500 and 900 rows beside small ones, on 8 virtual devices, in
    float32."""
    from planner.commands.programs import write_program

    spec = "zoo:dlrm-tiny,rows=500-7-33-900"
    s = planner.plan(
        spec,
        devices=8,
        hardware="cpu",
        batch=16,
        precision="fp32",
        lr=0.5,
        baselines=False,
        **options,
    )
    write_program(s, spec, tmp_path / f"{name}.py", backend, False, False)
    return load_program(Program((tmp_path / f"{name}.py").read_text(), {}, {}))


def stepped(m: types.ModuleType, tables: Any, steps: int) -> list[float]:
    """Losses of training with tables elsewhere, as `main` does it."""
    import jax.numpy as jnp

    mesh = m.make_mesh()
    pieces = {
        name: np.zeros(m.PARAMS[key][0], np.float32)
        for key in m.HOST_TABLES
        for name in m.labels_of(key, m.PARAMS[key])
    }
    _, params, state = m.begin(types.SimpleNamespace(seed=3), pieces, mesh)
    step, losses = m.make_step(mesh), []
    for i in range(steps):
        rows, places = m.places_of(m.ids_of(None, i, 3))
        batch = m.next_batch(None, i, 3, mesh) | m.place(
            places, {key: m.INPUTS[key][-1] for key in places}, mesh
        )
        params, state = m.pull(tables, rows, params, state, mesh)
        params, state, loss = step(params, state, {}, batch, jnp.float32(i + 1))
        m.push(tables, rows, params, state)
        losses.append(float(loss))
    return losses


PROGRAMS = [
    ("shard_map", "dp=8,micro=2", "sgd"),
    ("jit", "dp=4,tp=2,micro=1,zero=0", "sgd"),
    ("shard_map", "dp=8,zero=1", "adamw"),
]


@pytest.mark.parametrize(
    ("backend", "pins", "optimizer"),
    [PROGRAMS[0], *(pytest.param(*p, marks=pytest.mark.slow) for p in PROGRAMS[1:])],
)
def test_programs_with_hosted_tables_equal_those_without(
    tmp_path: Path, backend: str, pins: str, optimizer: str
) -> None:
    """With SGD all rows for several steps; with AdamW, which is lazy here, the rows of the first
    step."""
    import jax.numpy as jnp

    m = emitted(tmp_path, "hosted", backend, pins=pins, optimizer=optimizer, tables="host")
    dense = emitted(tmp_path, "dense", backend, pins=pins, optimizer=optimizer)
    steps = 4 if optimizer == "sgd" else 1
    tables = m.open_tables(types.SimpleNamespace(tables=None, seed=3), {})
    read = [m.places_of(m.ids_of(None, i, 3))[0] for i in range(steps)]
    before = {key: arrays[0].copy() for key, arrays in tables[0].items()}
    losses = stepped(m, tables, steps)
    mesh, expected = dense.make_mesh(), []
    _, params, state = dense.begin(types.SimpleNamespace(seed=3), {}, mesh)
    step = dense.make_step(mesh)
    for i in range(steps):
        params, state, loss = step(
            params, state, {}, dense.next_batch(None, i, 3, mesh), jnp.float32(i + 1)
        )
        expected.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-5) and [
        size for size, _ in m.HOST_TABLES.values()
    ] == [500, 33, 900]
    for key, (size, _) in m.HOST_TABLES.items():
        rows = np.arange(size) if optimizer == "sgd" else read[0][key]
        whole = np.asarray(params[key])[:size, : before[key].shape[1]]
        moved = np.abs(tables[0][key][0] - before[key]).max()
        assert moved > 1e-7 and np.abs(tables[0][key][0][rows] - whole[rows]).max() < 0.01 * moved
        unread = np.setdiff1d(np.arange(size), np.concatenate([r[key] for r in read]))
        assert (len(unread) or size < 50) and np.array_equal(
            tables[0][key][0][unread], before[key][unread]
        )


def test_parts_on_servers_give_the_same(tmp_path: Path) -> None:
    """Three servers in threads; what they hold together is the table, and training through them is
    training here."""
    m = emitted(tmp_path, "hosted", pins="dp=8", optimizer="adamw", tables="server")
    here = m.open_tables(types.SimpleNamespace(tables=None, seed=3), {})
    parts = [m.make_part(3, {}, i, 3) for i in range(3)]
    for key in m.HOST_TABLES:
        together = np.empty_like(here[0][key][0])
        for i, part in enumerate(parts):
            together[i::3] = part[key][0]
        assert np.array_equal(together, here[0][key][0]) and len(parts[0][key]) == 3
    ports = [free_port() for _ in parts]
    for i, port in enumerate(ports):
        threading.Thread(
            target=m.serve,
            args=(types.SimpleNamespace(serve=f"{i}/3", seed=3, port=port), {}),
            daemon=True,
        ).start()
    at = ",".join(f"127.0.0.1:{port}" for port in ports)
    tables = m.open_tables(types.SimpleNamespace(tables=at, tables_timeout=30.0, seed=3), {})
    assert stepped(m, tables, 3) == stepped(m, here, 3)
    for key, arrays in here[0].items():
        every = m.read_rows(tables, key, np.arange(len(arrays[0])))
        assert np.array_equal(every, np.stack(arrays))
    with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    for wire in tables:
        wire.close()


def test_a_server_that_never_comes_is_named(tmp_path: Path) -> None:
    m = emitted(tmp_path, "hosted", pins="dp=8", tables="server")
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"no server of tables at {nobody} within 0.5 s"):
        m.open_tables(types.SimpleNamespace(tables=nobody, tables_timeout=0.5, seed=3), {})


def test_manifests_have_three_roles(tmp_path: Path) -> None:
    import yaml

    s = planner.plan(
        SPEC,
        devices=16,
        hardware="h100-sxm",
        batch=64,
        tables="server",
        pins="dp=16",
        baselines=False,
    )
    (tmp_path / "p.py").write_text("")
    job = Job("dlrm", tmp_path / "p.py", "h100-sxm", 16, 2, False, ("--steps", "5"))
    files = manifests(job, s, Asked("image"))
    _, whole = yaml.safe_load_all(files["jobset.yaml"])
    check_manifest(whole)
    roles = {r["name"]: r["template"]["spec"] for r in whole["spec"]["replicatedJobs"]}
    assert list(files) == ["jobset.yaml"] and {k: v["completions"] for k, v in roles.items()} == {
        "servers": 2,
        "scheduler": 1,
        "workers": 1,
    }
    assert whole["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["scheduler", "workers"],
    }
    containers = {k: v["template"]["spec"]["containers"][0] for k, v in roles.items()}
    assert (
        containers["servers"]["command"]
        == ["python3", "/program/p.py", "--serve", "$(RANK)/2", "--port", "8477"]
        and "resources" not in containers["servers"]
    )
    pods = {k: v["template"]["spec"] for k, v in roles.items()}
    assert "nodeSelector" not in pods["servers"] and pods["workers"]["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"
    }
    tables = "dlrm-servers-0-0.dlrm:8477,dlrm-servers-0-1.dlrm:8477"
    words = [
        "--coordinator",
        "dlrm-scheduler-0-0.dlrm:8476",
        "--processes",
        "2",
        "--process",
        "$(RANK)",
        "--tables",
        tables,
        "--steps",
        "5",
    ]
    assert containers["scheduler"]["command"] == ["python3", "/program/p.py", *words]
    # what bash makes of it, once Kubernetes has put in RANK and turned $$ into $
    command = [
        w.replace("$(RANK)", "0").replace("$$", "$") for w in containers["workers"]["command"]
    ]
    said = subprocess.run(
        [*command[:4], "echo", *command[6:]],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[-2:] == ["--process", "1"] and tables in said


def test_launch_starts_the_servers_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as processes, which know of them; none where the user names their own."""
    started: list[tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "planner.launch.processes.supervise",
        lambda made, *_, servers: started.append(
            ([p.command for p in made], [p.command for p in servers])
        ),
    )
    planner.plan(SPEC, devices=4, hardware="cpu", batch=16, tables="server", baselines=False).save(
        "s.json"
    )
    for own in ([], ["--tables", "there:1"]):
        assert main(["launch", "s.json", "--local", "2", "-o", "d", "--", "--seed", "5", *own]) == 0
    (workers, servers), (others, none) = started
    ports = [words[words.index("--port") + 1] for words in servers]
    assert [words[words.index("--serve") + 1] for words in servers] == ["0/2", "1/2"] and all(
        words[-2:] == ("--seed", "5") for words in servers
    )
    assert (
        all(
            words[-2:] == ("--tables", ",".join(f"127.0.0.1:{port}" for port in ports))
            for words in workers
        )
        and len(set(ports)) == 2
    )
    assert none == [] and all(words[-2:] == ("--tables", "there:1") for words in others)


@pytest.mark.slow
def test_a_launch_with_servers_trains_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")  # which gives this process eight devices
    planner.plan(SPEC, devices=4, hardware="cpu", batch=16, tables="server", baselines=False).save(
        "s.json"
    )
    assert main(["launch", "s.json", "--local", "2", "-o", "d", "--", "--steps", "2"]) == 0
    assert "step 1 " in (tmp_path / "d" / "rank-0.log").read_text()
    ports = [
        re.findall(r"at port (\d+)", (tmp_path / "d" / f"server-{k}.log").read_text())[0]
        for k in range(2)
    ]
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), 5)
