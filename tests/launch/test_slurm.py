"""The sbatch script under SLURM itself: a controller and two node daemons on this machine, in a
folder of the test, with no users to tell apart."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import planner
from planner.cli import main
from planner.launch.join import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or shutil.which("slurmd") is None or os.getuid() != 0,
        reason="SLURM's daemons are not installed, or this is not root",
    ),
]

CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=one,two Default=YES State=UP
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that jobs are submitted in."""
    folder = tmp_path / "slurm"
    for part in ("state", "spool.one", "spool.two"):
        (folder / part).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            ports=[free_port() for _ in range(3)],
        )
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    daemons = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for words in (
            ["slurmctld", "-D", "-f", conf],
            ["slurmd", "-D", "-N", "one", "-f", conf],
            ["slurmd", "-D", "-N", "two", "-f", conf],
        )
    ]
    try:
        waited("sinfo -h -o %T -t idle", "idle", 30)
        yield tmp_path
    finally:
        subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def said(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=False).stdout


def waited(command: str, wanted: str, seconds: float) -> str:
    """What a command says once it says a word; AssertionError with the last it said."""
    until = time.monotonic() + seconds
    while wanted not in (text := said(command)):
        assert time.monotonic() < until, f"{command!r} never said {wanted!r} but {text!r}"
        time.sleep(0.2)
    return text


def submitted(folder: Path) -> str:
    return subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_job_trains_fails_with_its_rank_and_goes_on(cluster: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    planner.plan(
        "zoo:mlp-tiny",
        devices=16,
        hardware="h100-sxm",
        precision="fp32",
        batch=16,
        pins="dp=8,tp=2",
        baselines=False,
    ).save(cluster / "s.json")
    rest = ["--", "--steps", "400", "--checkpoints", "saved", "--save-every", "2"]
    assert (
        main(
            [
                "launch",
                "s.json",
                "--to",
                "slurm",
                "--cpu",
                "--python",
                sys.executable,
                "-o",
                "d",
                *rest,
            ]
        )
        == 0
    )
    folder = cluster / "d"
    script = folder / "job.sbatch"
    text = script.read_text()
    assert "head=$(scontrol" in text and "\nsrun" in text
    script.write_text(
        text.replace("\nsrun", "\nhead=127.0.0.1\nsrun")
    )  # no name service knows these nodes
    job = submitted(folder)
    waited(f"cat {folder / 'rank-0.log'}", "step 5 ", 200)
    assert (folder / "rank-1.log").exists()
    subprocess.run(
        ["pkill", "-9", "-n", "-f", "mlp_tiny.py --virtual-devices"], check=True
    )  # the newest: one of the two ranks
    waited(f"scontrol show job {job}", "JobState=FAILED", 60)
    last = max(int(p.name) for p in (folder / "saved").iterdir() if p.name.isdigit())
    script.write_text(script.read_text().replace("--steps 400", f"--steps {last + 2}"))
    again = submitted(folder)
    waited(f"scontrol show job {again}", "JobState=COMPLETED", 120)
    text = (folder / "rank-0.log").read_text()
    assert f"going on after step {last - 1}" in text and f"step {last + 1} " in text
