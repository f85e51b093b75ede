"""`plan launch --devices auto`: which of several stored plans runs on what came up, and a run that
goes on with fewer devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.launch import join as joining
from planner.launch.elastic import Stored, choose, chosen, devices_here, table
from planner.launch.join import free_port, join
from planner.strategy.strategy import Strategy

ROOT = Path(__file__).parents[2]
GPT = Strategy.load(Path(__file__).parents[1].joinpath("golden") / "gpt.plan.json")


def stored(devices: int, node: int, name: str = "") -> Stored:
    """A plan for nodes of `node` devices, as far as choosing looks at it."""
    level = {**GPT.topology["levels"][0], "size": min(node, devices), "kind": "switch"}
    return Stored(
        Path(name or f"{devices}.plan.json"),
        replace(
            GPT,
            topology={**GPT.topology, "device": "h100-sxm", "devices": devices, "levels": [level]},
        ),
    )


@given(
    st.sets(st.integers(1, 64), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_plan_of_most_devices_that_fits_is_taken(
    counts: set[int], processes: int, slots: int, virtual: bool
) -> None:
    plans = [stored(n, 8) for n in sorted(counts)]

    def fits(n: int, p: int) -> bool:
        return n % p == 0 and n // p <= slots if virtual else n == p * slots == p * min(n, 8)

    every = [(n, -p) for n in counts for p in range(1, processes + 1) if fits(n, p)]
    found = choose(plans, processes, slots, virtual)
    assert (found and (found.stored.devices, -found.processes)) == (max(every) if every else None)
    if found:  # nodes that are left over when a few go on choose the same
        assert choose(plans, found.processes, slots, virtual) == found


def test_what_is_idle_is_said_and_what_does_not_fit_is_refused() -> None:
    plans = [stored(8, 8), stored(32, 8)]
    found, line = chosen(plans, 3, 8, False)
    assert (
        found.processes == 1
        and line
        == "3 processes of 8 devices came up: 8.plan.json, 8 devices in 1 process; 16 of them stay"
        " idle: plans are stored for 8, 32"
    )
    assert chosen(plans, 4, 8, False)[1].endswith("32.plan.json, 32 devices in 4 processes")
    with pytest.raises(
        PlanError,
        match=(
            r"P208.*2 processes of 7 devices came up, and no stored plan fits: they are for 8, 32"
            r" devices, nodes of 8"
        ),
    ):
        chosen(plans, 2, 7, False)


def test_tables_leave_no_choice() -> None:
    other = replace(GPT, workload={**GPT.workload, "batch": 1 + int(GPT.workload["batch"])})
    for wrong, message in (
        ([], "holds no stored plans"),
        ([stored(8, 8, "a"), stored(8, 8, "b")], "a and b are both for 8 devices"),
        ([stored(8, 8), Stored(Path("x"), other)], "differ in their"),
    ):
        with pytest.raises(PlanError, match=f"P208.*{message}"):
            table(Path("d"), wrong)
    assert [s.devices for s in table(Path("d"), [stored(16, 8), stored(8, 8)])] == [8, 16]


def test_devices_are_counted_by_what_drivers_show(tmp_path: Path) -> None:
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    for name in (
        "nvidia0",
        "nvidia1",
        "nvidia2",
        "nvidiactl",
        "nvidia-uvm",
        "vfio/0",
        "vfio/1",
        "vfio/vfio",
    ):
        (tmp_path / "dev" / name).touch()
    assert (
        devices_here("h100-sxm", {}, tmp_path) == 3
        and devices_here("h100-sxm", {"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    )
    assert (
        devices_here("h100-sxm", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        == 0
        == devices_here("mi300x", {}, tmp_path)
    )
    assert (
        devices_here("tpu-v5p", {}, tmp_path) == 2
        and devices_here("tpu-v4", {}, tmp_path / "none") == 0
    )


def test_nodes_that_suffice_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of at most eight join; the plan runs on two: the first two by name, and the third is
    told."""
    monkeypatch.setattr(joining, "LAST_CALL_S", 0.5)
    out: dict[str, Any] = {}

    def node(name: str) -> None:
        try:
            out[name] = join(
                at, 8, "p", 20, name, lambda line: None, lambda joined: 2 if joined >= 2 else 0
            )
        except PlanError as e:
            out[name] = e

    at = f"127.0.0.1:{free_port()}"
    threads = [threading.Thread(target=node, args=(name,)) for name in ("n2", "n10", "n1")]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert (out["n1"].rank, out["n2"].rank, out["n1"].joined) == (
        0,
        1,
        3,
    ) and "3 nodes joined, and the plan for them runs on 2" in out["n10"].what
    for seat in sorted(
        (out["n1"], out["n2"]), key=lambda seat: seat.server is not None
    ):  # the serving one waits for the others
        seat.leave()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans for 4 and 8 CPU devices, stored by the command."""
    folder = tmp_path_factory.mktemp("swept")
    assert (
        main(
            [
                "sweep",
                "zoo:mlp-tiny",
                "--devices",
                "4,8",
                "--hardware",
                "cpu",
                "--batch",
                "16",
                "--precision",
                "fp32",
                "-o",
                str(folder / "plans"),
            ]
        )
        == 0
    )
    return folder / "plans"


def test_sweeps_store_their_plans(swept: Path) -> None:
    assert sorted(p.name for p in swept.iterdir()) == [
        "mlp-tiny-cpu-4-batch16.plan.json",
        "mlp-tiny-cpu-8-batch16.plan.json",
    ]
    assert (
        planner.Strategy.load(swept / "mlp-tiny-cpu-8-batch16.plan.json").topology["devices"] == 8
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--devices", "8", "--local", "2"], "P206"),
        (["--devices", "auto"], "P206"),
        (["--devices", "auto", "--to", "mpirun"], "P206"),
        (["--local", "2", "--slots", "4"], "P054"),
        (["--devices", "auto", "--local", "3", "--slots", "1"], "P208"),
        (
            [
                "--devices",
                "auto",
                "--nnodes",
                "1..2",
                "--coordinator",
                "a:1",
                "--cpu",
                "--slots",
                "1",
            ],
            "P208",
        ),
        (["--devices", "auto", "--to", "slurm", "--slots", "3"], "P208"),
    ],
)
def test_the_command_refuses(
    swept: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, words: list[str], code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", str(swept), *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_one_plan_takes_no_range_of_nodes(
    swept: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    one = str(swept / "mlp-tiny-cpu-8-batch16.plan.json")
    for words in (["--nnodes", "1..2", "--coordinator", "a:1"], ["--local", "2", "--slots", "4"]):
        assert main(["launch", one, *words]) == 2 and "error[P206]" in capsys.readouterr().err
    assert (
        main(["launch", one, "--devices", "auto", "--local", "2"]) == 2
        and "error[P208]" in capsys.readouterr().err
    )


def test_the_script_for_slurm_picks_by_its_allocation(
    swept: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """With stand-ins for srun and scontrol; the programs are replaced by one that says how it was
    started."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "launch",
                str(swept),
                "--devices",
                "auto",
                "--to",
                "slurm",
                "--cpu",
                "--slots",
                "4",
                "-o",
                "d",
                "--python",
                sys.executable,
                "--",
                "--steps",
                "2",
            ]
        )
        == 0
    )
    programs = sorted(p.name for p in Path("d").glob("*.py"))
    assert (
        programs == ["mlp_tiny_4.py", "mlp_tiny_8.py"]
        and "#SBATCH --nodes=1-2\n" in Path("d/job.sbatch").read_text()
    )
    for name in programs:
        Path("d", name).write_text("import sys\nprint(*sys.argv)\n")
    Path("bin").mkdir()
    Path("bin/srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 "$@"\n'
    )
    Path("bin/scontrol").write_text("#!/bin/bash\necho node0\n")
    for file in Path("bin").iterdir():
        file.chmod(0o755)
    for nodes, devices, used in ((1, 4, 1), (2, 8, 2), (5, 8, 2)):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "x",
        }
        done = subprocess.run(
            ["bash", "job.sbatch"],
            cwd="d",
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == [
            f"{nodes} nodes came up: mlp_tiny_{devices}.py on {used} of them",
            (
                f"mlp_tiny_{devices}.py --virtual-devices 4 --coordinator node0:8476 --processes"
                f" {used} --process 0 --steps 2"
            ),
        ]


def started(folder: Path, plans: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT)
    }
    words = (
        sys.executable,
        "-m",
        "planner.cli",
        "launch",
        str(plans),
        "--devices",
        "auto",
        "--slots",
        "4",
        *words,
    )
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(folder: Path, plans: Path, *words: str) -> tuple[str, str]:
    """(stdout, stderr) of a job that ends well."""
    job = started(folder, plans, *words)
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    return out, err


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss (\S+)", text)]


@pytest.mark.slow
def test_a_run_goes_on_with_the_devices_that_are_left(swept: Path, tmp_path: Path) -> None:
    """Two processes of four devices take the plan for eight; then one process of four takes that
    for four, and goes on from the checkpoint."""
    pytest.importorskip("orbax.checkpoint")
    first, said = launched(
        tmp_path, swept, "--local", "2", "--", "--steps", "2", "--checkpoints", "saved"
    )
    assert (
        "2 processes of 4 devices came up: mlp-tiny-cpu-8-batch16.plan.json, 8 devices in 2"
        " processes\n" in said
    )
    second, said = launched(
        tmp_path, swept, "--local", "1", "--", "--steps", "4", "--checkpoints", "saved"
    )
    assert "1 process of 4 devices came up: mlp-tiny-cpu-4-batch16.plan.json" in said
    assert "going on after step 1" in second and len(losses(second)) == 2
    whole, _ = launched(tmp_path, swept, "--local", "1", "-o", "whole", "--", "--steps", "4")
    assert losses(first + second) == pytest.approx(losses(whole), abs=2e-6)


@pytest.mark.slow
def test_nodes_that_join_take_the_plan_for_them(swept: Path, tmp_path: Path) -> None:
    """Two launchers as two of at most two nodes: the plan for eight devices, four in each."""
    at = f"127.0.0.1:{free_port()}"
    nodes = [
        started(
            tmp_path,
            swept,
            "--nnodes",
            "1..2",
            "--coordinator",
            at,
            "--cpu",
            "--timeout",
            "200",
            "--",
            "--steps",
            "2",
        )
        for _ in range(2)
    ]
    said = [n.communicate(timeout=300) for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0] and sorted(
        len(losses(out)) for out, _ in said
    ) == [0, 2], said
    assert all(
        "2 processes of 4 devices came up: mlp-tiny-cpu-8-batch16.plan.json" in err
        for _, err in said
    )
