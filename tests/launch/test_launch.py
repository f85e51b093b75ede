"""Launching: counts and host files refused before anything starts, nodes that join, processes that
fail, scripts and manifests. No program of a model runs here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from benchmarks.manifests import check_manifest
from planner.cli import main
from planner.errors import PlanError
from planner.launch.job import Job, check_count, node_slots, read_hosts
from planner.launch.join import Server, address_of, free_port, join, natural
from planner.launch.kubernetes import Asked, manifests
from planner.launch.processes import Process, alone, supervise
from planner.launch.scripts import clock, mpirun, plain_name, slurm

NASTY = [
    "a b",
    "$(touch pwned)",
    "'; touch pwned; '",
    '"`touch pwned`"',
    "\\",
    "-x",
    "${HOME}",
    "ü\n#",
]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def on_cpu() -> planner.Strategy:
    return planner.plan("zoo:mlp-tiny", devices=8, hardware="cpu", batch=8, baselines=False)


@pytest.fixture(scope="module")
def on_nodes() -> planner.Strategy:
    return planner.plan("zoo:mlp-tiny", devices=16, hardware="h100-sxm", batch=16, baselines=False)


# --- what does not fit is refused


def test_counts_that_do_not_fit_are_refused(
    on_cpu: planner.Strategy, on_nodes: planner.Strategy
) -> None:
    assert node_slots(on_nodes) == 8
    check_count(on_nodes, 2, False, "--nnodes 2")
    check_count(on_nodes, 16, True, "--local 16")
    with pytest.raises(
        PlanError,
        match=(
            "P200.*16 devices cannot be divided evenly among 3 processes\nhelp: one of 1, 2, 4,"
            " 8, 16"
        ),
    ):
        check_count(on_nodes, 3, True, "--local 3")
    with pytest.raises(PlanError, match="8 devices a node, so 16 devices are 2 nodes, not 4"):
        check_count(on_nodes, 4, False, "--nnodes 4")


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("b slots=8\na slots=8", "ba"),
        ("# two nodes\nb slots=8 rank=1\n\na slots=8 rank=0 # first", "ab"),
    ],
)
def test_host_files_give_the_order_of_ranks(
    on_nodes: planner.Strategy, tmp_path: Path, text: str, order: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert "".join(h.name for h in read_hosts(file, on_nodes, False)) == order


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a slots=8", "P200"),
        ("a slots=4\nb slots=12", "P200"),
        ("a slots=4\nb slots=4\nc slots=4\nd slots=4", "P200"),
        ("a slots=8 rank=0\nb slots=8 rank=0", "P201"),
        ("a slots=8 rank=0\nb slots=8", "P201"),
        ("-oProxyCommand=x slots=8\nb slots=8", "P201"),
        ("a slots=0\nb slots=16", "P201"),
        ("a 8", "P201"),
        ("", "P200"),
        ("a;b slots=16", "P201"),
    ],
)
def test_host_files_that_do_not_fit_are_refused(
    on_nodes: planner.Strategy, tmp_path: Path, text: str, code: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(PlanError) as e:
        read_hosts(file, on_nodes, False)
    assert e.value.code == code and e.value.help
    with pytest.raises(PlanError, match="P201"):
        read_hosts(tmp_path, on_nodes, False)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "P206"),
        (["--local", "2", "--to", "slurm"], "P206"),
        (["--nnodes", "2"], "P206"),
        (["--coordinator", "a:1", "--local", "2"], "P206"),
        (["--to", "pbs"], "P018"),
        (["--local", "3"], "P200"),
        (["--nnodes", "8", "--coordinator", "a:1"], "P200"),
        (["--to", "kubernetes"], "P206"),
        (["--to", "gke-tpu", "--image", "i", "--", "--steps", "3"], "P206"),
        (["--hostfile", "none"], "P201"),
        (["--nnodes", "1", "--coordinator", "nonsense", "--cpu"], "P202"),
        (["--nnodes", "1", "--coordinator", "a:99999", "--cpu"], "P202"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(
    on_cpu: planner.Strategy,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
    words: list[str],
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu.save("s.json")
    assert main(["launch", "s.json", *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err and not list(tmp_path.glob("*/rank-*"))


# --- processes end together


def scripts_of(folder: Path, *texts: str) -> list[Process]:
    made = []
    for i, text in enumerate(texts):
        (folder / f"p{i}.py").write_text(text)
        made.append(
            Process(i, (sys.executable, str(folder / f"p{i}.py")), folder / f"rank-{i}.log")
        )
    return made


WAIT = (
    "import time, pathlib,"
    " os\npathlib.Path(__file__).with_suffix('.pid').write_text(str(os.getpid()))\ntime.sleep(60)"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_of_the_first_is_passed_on_and_all_are_logged(tmp_path: Path) -> None:
    said: list[str] = []
    supervise(
        scripts_of(
            tmp_path,
            "print('[Gloo] noise'); print('one'); print('two')",
            "import os; print(os.environ['X'])",
        ),
        {"X": "y"},
        20,
        said.append,
    )
    assert said == ["one", "two"] and (tmp_path / "rank-1.log").read_text() == "y\n"


def test_a_failure_ends_the_others_and_names_the_log(tmp_path: Path) -> None:
    made = scripts_of(
        tmp_path, WAIT, "import time; time.sleep(1); print('reason'); raise SystemExit(3)"
    )
    start = time.monotonic()
    with pytest.raises(PlanError) as e:
        supervise(made, {}, 60, print)
    assert time.monotonic() - start < 20 and e.value.exit_code == 1
    assert (
        "rank 1 failed with exit code 3" in e.value.what
        and str(tmp_path / "rank-1.log") in e.value.detail[0]
        and "reason" in e.value.detail[1]
    )
    assert not alive(int((tmp_path / "p0.pid").read_text()))


def test_the_one_that_was_killed_is_the_cause(tmp_path: Path) -> None:
    """What aborts because a peer is gone may be seen first; the message names the peer."""
    wait = (
        "import os, pathlib, time\nwhile not pathlib.Path('PID').exists() or"
        " pathlib.Path('PID').read_text() == '': time.sleep(0.01)\n"
    )
    gone = (
        wait.replace("PID", str(tmp_path / "p1.pid"))
        + f"os.kill(int(pathlib.Path('{tmp_path}/p1.pid').read_text()), 9)\nos.abort()"
    )
    with pytest.raises(PlanError, match="rank 1 was killed by SIGKILL") as e:
        supervise(scripts_of(tmp_path, gone, WAIT), {}, 60, print)
    assert any("rank 0 ended after it: was killed by SIGABRT" in line for line in e.value.detail)


def test_silence_ends_a_job_and_another_node_does(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"P205.*no process has written anything for 1 s"):
        supervise(scripts_of(tmp_path, WAIT, WAIT), {}, 1, print)
    with pytest.raises(PlanError, match="node 1 is gone"):
        supervise(scripts_of(tmp_path, WAIT), {}, 60, print, lambda: "node 1 is gone")
    with pytest.raises(PlanError, match="P204.*cannot be started"):
        supervise([Process(0, ("/no/such/python",), tmp_path / "log")], {}, 60, print)


def test_processes_do_not_outlive_a_launcher_that_is_told_to_end(tmp_path: Path) -> None:
    scripts_of(tmp_path, WAIT)
    own = (
        f"from planner.launch.processes import *\nsupervise([Process(0, ({sys.executable!r},"
        f" {str(tmp_path / 'p0.py')!r}), Path({str(tmp_path / 'log')!r}))], {{}}, 60, print)"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        (tmp_path / "p0.pid").unlink(missing_ok=True)
        launcher = subprocess.Popen([sys.executable, "-c", own], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while (
            not ((tmp_path / "p0.pid").exists() and (tmp_path / "p0.pid").read_text())
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        pid = int((tmp_path / "p0.pid").read_text())
        launcher.send_signal(number)
        launcher.wait(20)
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(pid)


def test_hosts_are_reached_through_ssh_with_words_as_they_are(
    on_nodes: planner.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for ssh that does what it does with its words: hand the last to a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "ssh").write_text('#!/bin/bash\necho "$@" >> asked\nexec sh -c "${@: -1}"\n')
    (tmp_path / "py").write_text(
        f'#!/bin/bash\necho "$XLA_FLAGS"\nshift\nexec {sys.executable} -c "import json, sys;'
        ' print(json.dumps(sys.argv[1:]))" "$@"\n'
    )
    for name in ("ssh", "py"):
        (tmp_path / name).chmod(0o755)
    on_nodes.save("s.json")
    Path("hosts").write_text("me@far slots=8 rank=1\nlocalhost slots=8 rank=0\n")
    assert (
        main(
            [
                "launch",
                "s.json",
                "--hostfile",
                "hosts",
                "--python",
                str(tmp_path / "py"),
                "-o",
                "d",
                "--",
                *NASTY,
                "--steps",
                "3",
            ]
        )
        == 0
    )
    for rank in (0, 1):
        flags, words = (tmp_path / "d" / f"rank-{rank}.log").read_text().splitlines()
        assert "xla_gpu_enable_latency_hiding_scheduler" in flags
        given = json.loads(words)
        assert given[2:6] == ["--processes", "2", "--process", str(rank)] and given[6:] == [
            *NASTY,
            "--steps",
            "3",
        ]
    assert Path("asked").read_text().startswith("-tt -o BatchMode=yes me@far cd ") and not list(
        tmp_path.glob("**/pwned")
    )


# --- nodes join


def joined(
    coordinator: str, names: list[str], nodes: int, timeout_s: float = 10, program: str = "p"
) -> dict[str, Any]:
    """What each node gets: a Seat, or the PlanError."""
    out: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            out[name] = join(coordinator, nodes, program, timeout_s, name, lambda text: None)
        except PlanError as e:
            out[name] = e

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return out


def stop_of(seat: Any) -> str:
    deadline = time.monotonic() + 10
    while not seat.stopped() and time.monotonic() < deadline:
        time.sleep(0.02)
    return str(seat.stopped())


def test_ranks_follow_the_names_and_a_surplus_node_is_told() -> None:
    at = f"127.0.0.1:{free_port()}"
    seats = joined(at, ["n10", "n2", "n1"], 3)
    assert {name: seat.rank for name, seat in seats.items()} == {"n1": 0, "n2": 1, "n10": 2}
    assert len({seat.coordinator for seat in seats.values()}) == 1 and all(
        seat.stopped() == "" for seat in seats.values()
    )
    (late,) = joined(at, ["n11"], 3).values()
    assert late.code == "P203" and "all 3 nodes have joined already: n1, n2, n10" in late.what
    threading.Thread(
        target=seats["n2"].leave, args=("failed: rank 1 was killed by SIGKILL",)
    ).start()
    assert "node 1 (n2) failed: rank 1 was killed by SIGKILL" in stop_of(seats["n1"]) and stop_of(
        seats["n10"]
    )
    for seat in sorted(
        (seats["n10"], seats["n1"]), key=lambda seat: seat.server is not None
    ):  # the serving one waits for the others
        seat.leave()


def test_a_node_that_vanishes_ends_the_job() -> None:
    seats = joined(f"127.0.0.1:{free_port()}", ["a", "b"], 2)
    seats["b"].connection.close()
    assert "node 1 (b) is gone" in stop_of(seats["a"])
    seats["a"].leave()


def test_nodes_that_do_not_come_and_other_programs_are_named() -> None:
    at = f"127.0.0.1:{free_port()}"
    (alone,) = joined(at, ["a"], 2, timeout_s=0.6).values()
    assert alone.code == "P203" and "1 of 2 nodes joined within 1 s: a" in alone.what
    with pytest.raises(
        PlanError, match=r"P202.*nobody answers at 192\.0\.2\.1|P202.*nobody answers"
    ):
        join("192.0.2.1:9", 2, "p", 0.3, "a", print)
    at = f"127.0.0.1:{free_port()}"
    listener = socket.create_server(address_of(at))
    server = Server(listener, 2, "mine", 1)
    (other,) = joined(at, ["x"], 2, program="theirs").values()
    assert other.code == "P203" and "another program" in other.what and not server.members
    server.thread.join(10)


def test_strangers_at_the_port_are_sent_away() -> None:
    at = address_of(f"127.0.0.1:{free_port()}")
    server = Server(socket.create_server(at), 1, "p", 10)
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"rank": 1}\n',
        b"\xff" * 70000,
        b'{"program": "p", "host": "h", "port": "x"}\n',
    ):
        with socket.create_connection(at, timeout=5) as s:
            s.sendall(noise)
            s.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert s.recv(10) == b""
    assert server.thread.is_alive() and not server.members
    (seat,) = joined(f"{at[0]}:{at[1]}", ["a"], 1).values()
    assert seat.rank == 0
    seat.leave()
    server.thread.join(10)


@given(st.lists(st.text("ab0123456789-.", max_size=8), max_size=6))
@settings(max_examples=50, deadline=None)
def test_natural_order_is_total(names: list[str]) -> None:
    ordered = sorted(names, key=natural)
    assert sorted(ordered) == sorted(names) and sorted(
        ["n10", "n9", "n", "10", "9"], key=natural
    ) == ["9", "10", "n", "n9", "n10"]


# --- scripts and manifests


def job(tmp_path: Path, arguments: tuple[str, ...] = (), **other: Any) -> Job:
    program = tmp_path / "p.py"
    program.write_text("import sys, json\nprint(json.dumps(sys.argv[1:]))\n")
    return Job(
        **{
            "name": "gpt 'x' $(y)",
            "program": program,
            "device": "h100-sxm",
            "devices": 16,
            "processes": 2,
            "virtual": False,
            "arguments": arguments,
            **other,
        }
    )


def test_hostile_words_reach_the_program_as_they_are(tmp_path: Path) -> None:
    """The scripts run with stand-ins for srun and mpirun that do what those do with their words:
    start them, rank in the environment."""
    stand = tmp_path / "bin"
    stand.mkdir()
    (stand / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=1 "$@"\n'
    )
    (stand / "scontrol").write_text("#!/bin/bash\necho node0\necho node1\n")
    (stand / "mpirun").write_text(
        '#!/bin/bash\nwhile [[ $1 != bash ]]; do shift; done\nOMPI_COMM_WORLD_RANK=1 "$@"\n'
    )
    for file in stand.iterdir():
        file.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{stand}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "COORDINATOR": "node0",
    }
    for name, text in (
        ("job.sbatch", slurm([job(tmp_path, tuple(NASTY))], sys.executable)),
        ("mpirun.sh", mpirun(job(tmp_path, tuple(NASTY)), sys.executable)),
    ):
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["bash", name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        words = json.loads(done.stdout)
        assert words == [
            "--coordinator",
            "node0:8476",
            "--processes",
            "2",
            "--process",
            "1",
            *NASTY,
        ]
    assert not (tmp_path / "pwned").exists()
    short = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path,
        env={**environment, "SLURM_JOB_NUM_NODES": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert short.returncode == 1 and "for 2 nodes, the allocation has 3" in short.stderr


def test_scripts_hold_what_the_plan_says(tmp_path: Path) -> None:
    text = slurm([job(tmp_path)], "python3")
    assert (
        "#SBATCH --nodes=2\n" in text
        and "#SBATCH --gpus-per-node=8\n" in text
        and "--kill-on-bad-exit=1" in text
        and "xla_gpu_enable_latency_hiding_scheduler" in text
    )
    assert "gpus-per-node" not in slurm(
        [job(tmp_path, virtual=True)], "python3"
    ) and "--virtual-devices 8" in slurm([job(tmp_path, virtual=True)], "python3")
    assert "--map-by ppr:1:node" in mpirun(job(tmp_path), "python3")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    for name, text in (
        ("a.sh", slurm([job(tmp_path, tuple(NASTY))], "my python")),
        ("b.sh", mpirun(job(tmp_path, tuple(NASTY)), "python3")),
    ):
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            [str(SHELLCHECK), "-S", "style", name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


NODES = {
    "h100-sxm": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "mi300x": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"},
    "tpu-v5e": {"cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice"},
    "tpu-v5p": {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice"},
}


def of_kind(hardware: str, slots: int) -> dict[str, int]:
    """What a pod of several nodes holds of extended resources."""
    return (
        {"google.com/tpu": slots}
        if hardware.startswith("tpu")
        else {"amd.com/gpu" if hardware == "mi300x" else "nvidia.com/gpu": slots, "rdma/ib": 1}
    )


MACHINES = [("h100-sxm", 16, 2), ("mi300x", 64, 8), ("tpu-v5e", 16, 4), ("tpu-v5p", 64, 16)]


def documents(
    tmp_path: Path, hardware: str, devices: int, nodes: int
) -> list[list[dict[str, Any]]]:
    """The manifests of a small plan, read back."""
    import yaml

    strategy = planner.plan(
        "zoo:mlp-tiny", devices=devices, hardware=hardware, batch=devices, baselines=False
    )
    one = job(tmp_path, tuple(NASTY), device=hardware, devices=devices, processes=nodes)
    made = manifests(one, strategy, Asked("registry/image:1", "claim", hardware.startswith("tpu")))
    assert list(made) == ["job.yaml", "jobset.yaml"]
    return [list(yaml.safe_load_all(text)) for text in made.values()]


@pytest.mark.parametrize(("hardware", "devices", "nodes"), MACHINES)
def test_manifests_hold_what_the_plan_says(
    tmp_path: Path, hardware: str, devices: int, nodes: int
) -> None:
    tpu = hardware.startswith("tpu")
    for parts in documents(tmp_path, hardware, devices, nodes):
        assert parts[0]["data"]["p.py"] == (tmp_path / "p.py").read_text()
        last = parts[-1]["spec"]
        spec = (
            last["replicatedJobs"][0]["template"]["spec"] if parts[-1]["kind"] == "JobSet" else last
        )
        pod = spec["template"]["spec"]
        container = pod["containers"][0]
        assert spec["completions"] == spec["parallelism"] == nodes and container["resources"][
            "limits"
        ] == of_kind(hardware, devices // nodes)
        assert (
            container["resources"]["requests"].items() > container["resources"]["limits"].items()
        )  # of what is handed out whole, as many
        assert container["resources"]["requests"]["cpu"] == 4 * devices // nodes
        assert container["command"][-len(NASTY) :] == [w.replace("$", "$$") for w in NASTY]
        assert ("$(RANK)" in container["command"]) != tpu and pod["nodeSelector"].items() >= NODES[
            hardware
        ].items()
        (taint,) = pod["tolerations"]
        assert taint["key"] in container["resources"]["limits"] and (
            "securityContext" in container
        ) == (not tpu)
        again = (
            (3 * nodes, "Failed") if parts[-1]["kind"] == "Job" else (0, None)
        )  # a JobSet restarts all at once by itself
        assert (
            (spec["backoffLimit"], spec.get("podReplacementPolicy")) == again
            and pod["restartPolicy"] == "Never"
            and "activeDeadlineSeconds" not in spec
        )
        if not tpu:
            name = parts[-1]["metadata"]["name"]
            first = (
                f"{name}-0.{name}:8476"
                if parts[-1]["kind"] == "Job"
                else f"{name}-workers-0-0.{name}:8476"
            )
            assert container["command"][3] == first


def test_what_no_manifest_can_hold_is_refused(tmp_path: Path, on_nodes: planner.Strategy) -> None:
    with pytest.raises(PlanError, match="P206.*for h100-sxm, not for TPUs"):
        manifests(job(tmp_path), on_nodes, Asked("image", tpu=True))
    (tmp_path / "p.safetensors").write_bytes(b"x")
    with pytest.raises(PlanError, match=r"P207.*p.safetensors \(1 bytes\) lies beside it"):
        manifests(job(tmp_path), on_nodes, Asked("image"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_with_constants_beside_it_lies_on_the_volume(
    tmp_path: Path, on_nodes: planner.Strategy
) -> None:
    import yaml

    one = job(tmp_path)
    (tmp_path / "p.safetensors").write_bytes(b"x")
    for text in manifests(one, on_nodes, Asked("image", "claim")).values():
        parts = list(yaml.safe_load_all(text))
        assert "ConfigMap" not in [part["kind"] for part in parts] and "configMap" not in text
        for part in parts:
            check_manifest(part)
        assert {
            "name": "data",
            "mountPath": "/program",
            "subPath": plain_name(one.name),
        } in text_mounts(parts[-1])


def text_mounts(document: dict[str, Any]) -> list[dict[str, str]]:
    """Mounts of the first container."""
    spec = (
        document["spec"]
        if document["kind"] == "Job"
        else document["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    mounts: list[dict[str, str]] = spec["template"]["spec"]["containers"][0]["volumeMounts"]
    return mounts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("hardware", "devices", "nodes"), MACHINES)
def test_manifests_pass_the_official_schemas(
    tmp_path: Path, hardware: str, devices: int, nodes: int
) -> None:
    for parts in documents(tmp_path, hardware, devices, nodes):
        for document in parts:
            check_manifest(document)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("spec", "networks"), {}),
        (("spec", "failurePolicy", "maxRestarts"), "three"),
        (("spec", "replicatedJobs", 0, "replica"), 2),
        (("spec", "replicatedJobs", 0, "template", "spec", "completionmode"), "Indexed"),
        (("apiVersion",), "jobset.x-k8s.io/v1"),
    ],
)
def test_faults_of_a_jobset_are_seen(tmp_path: Path, way: tuple[Any, ...], value: object) -> None:
    jobset = next(
        d for parts in documents(tmp_path, *MACHINES[0]) for d in parts if d["kind"] == "JobSet"
    )
    check_manifest(jobset)
    place: Any = jobset
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    with pytest.raises(Exception, match=str(way[-1]) if way != ("apiVersion",) else "a JobSet of"):
        check_manifest(jobset)


@given(st.text(max_size=60))
@settings(max_examples=50, deadline=None)
def test_names_suit_kubernetes_and_slurm(name: str) -> None:
    assert (
        re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", plain_name(name))
        and len(plain_name(name)) <= 40
    )


@pytest.mark.parametrize(
    ("rdma", "given", "nodes", "limits", "selector"),
    [
        ("rdma/ib", (), 1, {"nvidia.com/gpu": 16}, NODES["h100-sxm"]),
        ("none", ("a=b", "c/d=e=f"), 2, {"nvidia.com/gpu": 8}, {"a": "b", "c/d": "e=f"}),
        (
            "rdma/hca_shared",
            ("pool=",),
            2,
            {"nvidia.com/gpu": 8, "rdma/hca_shared": 1},
            {"pool": ""},
        ),
    ],
)
def test_a_cluster_may_call_its_nodes_otherwise(
    on_nodes: planner.Strategy,
    tmp_path: Path,
    rdma: str,
    given: tuple[str, ...],
    nodes: int,
    limits: dict[str, int],
    selector: dict[str, str],
) -> None:
    import yaml

    text = manifests(
        job(tmp_path, processes=nodes),
        on_nodes,
        Asked("image", rdma=rdma, labels=given, time_s=7200),
    )["job.yaml"]
    *_, made = yaml.safe_load_all(text)
    check_manifest(made)
    pod = made["spec"]["template"]["spec"]
    assert (
        pod["containers"][0]["resources"]["limits"] == limits
        and pod["nodeSelector"] == selector
        and made["spec"]["activeDeadlineSeconds"] == 7200
    )
    with pytest.raises(PlanError, match="P206.*'pool' is no label"):
        manifests(job(tmp_path), on_nodes, Asked("image", labels=("pool",)))


def test_a_device_without_a_known_label_has_no_selector(
    on_nodes: planner.Strategy, tmp_path: Path
) -> None:
    assert (
        "nodeSelector"
        not in manifests(job(tmp_path, device="my-gpu"), on_nodes, Asked("image"))["job.yaml"]
    )
    virtual = manifests(job(tmp_path, virtual=True), on_nodes, Asked("image"))["job.yaml"]
    assert not any(
        word in virtual for word in ("nodeSelector", "resources", "tolerations", "IPC_LOCK")
    )


@pytest.mark.parametrize("to", [["slurm"], ["mpirun"], ["kubernetes", "--image", "i"]])
def test_no_cluster_trains_on_random_data_unasked(
    on_cpu: planner.Strategy, tmp_path: Path, capsys: Any, monkeypatch: Any, to: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu.save("s.json")
    for rest in ([], ["--", "--checkpoints", "ck"], ["--", "--data", "folder"]):
        assert main(["launch", "s.json", "--to", *to, "-o", "d", *rest]) == 2
        err = capsys.readouterr().err
        assert (
            "error[P214]" in err and "help: -- --steps 3" in err and not (tmp_path / "d").exists()
        )
    for rest in (["--steps", "3"], ["--steps=3"], ["--data", "folder", "--steps", "9"]):
        assert main(["launch", "s.json", "--to", *to, "-o", "d", "--", *rest]) == 0


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (["--nnodes", "2", "--coordinator", "a:1"], "random data"),
        (["--hostfile", "hosts"], "random data"),
        (["--hostfile", "hosts", "--", "--data", "folder"], "the data"),
        (["--local", "2", "--", "--data=folder"], "the data"),
    ],
)
def test_real_devices_and_data_of_ones_own_are_not_for_three_steps_unasked(
    on_nodes: planner.Strategy,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
    words: list[str],
    on: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    on_nodes.save("s.json")
    Path("hosts").write_text("far slots=8\nnear slots=8\n")
    assert main(["launch", "s.json", "-o", "d", *words]) == 2
    err = capsys.readouterr().err
    assert (
        f"error[P214]: {words[0]}: nothing behind -- says how far 16 devices would train, which"
        f" would be 3 steps on {on}"
        in err
        and not (tmp_path / "d").exists()
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--time", "90m", "--", "--steps", "9"], "0-01:30:00"),
        (["--time", "3d", "--", "--steps=9"], "3-00:00:00"),
        (["--", "--steps", "3"], None),
    ],
)
def test_sbatch_asks_for_a_time(
    on_cpu: planner.Strategy,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
    words: list[str],
    wanted: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    on_cpu.save("s.json")
    assert main(["launch", "s.json", "--to", "slurm", "-o", "d", *words]) == 0
    (found,) = re.findall(
        r"^#SBATCH --time=(\d-\d\d:\d\d:00)$", (tmp_path / "d" / "job.sbatch").read_text(), re.M
    )
    least = 1800 + 6 * on_cpu.costs["step_time_range_s"][1]
    assert (
        found == (wanted or clock(int(least)))
        and clock(59) == "0-00:01:00"
        and clock(90061) == "1-01:02:00"
    )


def test_one_job_at_a_time_runs_in_a_folder(tmp_path: Path) -> None:
    with alone(tmp_path):
        text = (
            "import pathlib\nfrom planner.launch.processes import alone\nwith"
            f" alone(pathlib.Path({str(tmp_path)!r})): pass"
        )
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
        assert (
            done.returncode == 1
            and "P209" in done.stderr
            and f"(process {os.getpid()})" in done.stderr
        )
    with alone(tmp_path):  # and again when the first has ended
        pass


def test_ctrl_c_says_what_is_left(
    on_cpu: planner.Strategy, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    on_cpu.save("s.json")
    monkeypatch.setattr("planner.launch.processes.supervise", pressed)
    assert main(["launch", "s.json", "--local", "2", "-o", "d"]) == 130
    err = capsys.readouterr().err
    assert (
        "interrupted: the job was ended   program and logs: d" in err
        and "nothing was written" not in err
    )


def test_servers_end_with_the_job_and_their_failure_ends_it(tmp_path: Path) -> None:
    def process(rank: int, text: str, role: str = "rank") -> Process:
        return Process(
            rank, (sys.executable, "-c", text), tmp_path / f"{role}-{rank}.log", role=role
        )

    forever = process(0, "import time; print('up', flush=True); time.sleep(600)", "server")
    supervise([process(0, "print('done')")], {}, 60, lambda _: None, servers=[forever])
    with pytest.raises(PlanError, match="server 0 failed with exit code 3"):
        supervise(
            [process(1, "import time; time.sleep(600)")],
            {},
            60,
            lambda _: None,
            servers=[process(0, "import sys; sys.exit(3)", "server")],
        )


def test_a_model_with_a_hostile_name_makes_plain_files(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Of a file's name only what shells, YAML and ConfigMaps take as it is comes into names."""
    import onnx
    import yaml

    import models_zoo

    monkeypatch.chdir(tmp_path)
    file = "ü $(touch pwned)'; x\".onnx"
    onnx.save(models_zoo.build("zoo:mlp-tiny"), file)
    planner.plan(file, devices=16, batch=16, baselines=False).save("s.json")
    for to in (["slurm"], ["mpirun"], ["kubernetes", "--image", "i", "--volume", "v"]):
        assert (
            main(
                [
                    "launch",
                    "s.json",
                    "--model",
                    file,
                    "--to",
                    *to,
                    "-o",
                    "d e",
                    "--",
                    "--steps",
                    "3",
                    "--checkpoints",
                    "a b'$(touch pwned)",
                ]
            )
            == 0
        )
    assert "next: cd 'd e' && sbatch job.sbatch" in capsys.readouterr().err
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", p.name) for p in (tmp_path / "d e").iterdir())
    for script in ("job.sbatch", "mpirun.sh"):
        assert (
            subprocess.run(["bash", "-n", script], cwd=tmp_path / "d e", check=False).returncode
            == 0
        )
    *_, made = yaml.safe_load_all((tmp_path / "d e" / "job.yaml").read_text())
    check_manifest(made)
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (
        re.fullmatch(r"/program/[A-Za-z0-9._-]+\.py", command[1])
        and command[-1] == "a b'$$(touch pwned)"
    )


def test_every_gpu_that_ships_has_its_label(tmp_path: Path) -> None:
    from costmodels.hardware.device import device_names, load_device
    from planner.launch.job import AMD, NVIDIA
    from planner.launch.nodes import accelerator

    kinds = {name: accelerator(job(tmp_path, device=name)) for name in device_names()}
    gpus = {name: kind for name, kind in kinds.items() if kind in (NVIDIA, AMD)}
    assert all(
        load_device(name).node_label and (kind == AMD) == ("AMD" in load_device(name).node_label)
        for name, kind in gpus.items()
    )
    assert (kinds["cpu"], kinds["trainium2"], kinds["ascend-910b"]) == (
        "",
        "aws.amazon.com/neuron",
        "huawei.com/Ascend910",
    )


def test_the_command_says_what_a_cluster_calls_things(
    on_nodes: planner.Strategy, tmp_path: Path, monkeypatch: Any
) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    on_nodes.save("s.json")
    assert (
        main(
            [
                "launch",
                "s.json",
                "--to",
                "kubernetes",
                "--image",
                "i",
                "--time",
                "2h",
                "--node-label",
                "pool=a",
                "--rdma",
                "rdma/x",
                "-o",
                "d",
                "--",
                "--steps",
                "3",
            ]
        )
        == 0
    )
    *_, made = yaml.safe_load_all((tmp_path / "d" / "job.yaml").read_text())
    pod = made["spec"]["template"]["spec"]
    assert made["spec"]["activeDeadlineSeconds"] == 7200 and pod["nodeSelector"] == {"pool": "a"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/x": 1}


@pytest.mark.parametrize(
    ("arguments", "volume", "lost"),
    [
        (("--steps", "9", "--checkpoints", "/data/ck"), "", ["--checkpoints /data/ck"]),
        (("--checkpoints", "/data/ck", "--log=/data/a.jsonl"), "claim", []),
        (("--checkpoints", "gs://b/ck", "--export=/tmp/a"), "claim", ["--export /tmp/a"]),
        (("--checkpoints", "/database/ck"), "claim", ["--checkpoints /database/ck"]),
    ],
)
def test_what_goes_with_a_pod_is_said(
    arguments: tuple[str, ...], volume: str, lost: list[str]
) -> None:
    from planner.commands.launching import lost_with_a_pod

    assert lost_with_a_pod(arguments, volume) == lost
