"""What is written for tools that bring machines up, SkyPilot and XPK, and for Kueue's queues:
goldens, fields, and words that a shell could take for its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import planner
from benchmarks.manifests import check_manifest
from planner.cli import main
from planner.errors import PlanError
from planner.launch.clouds import ACCELERATORS, PACKAGES, SLICES, skypilot, xpk
from planner.launch.job import TPU
from planner.launch.kubernetes import Asked, manifests
from tests.launch.test_launch import NASTY, SHELLCHECK, job

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def on_slices() -> planner.Strategy:
    return planner.plan("zoo:mlp-tiny", devices=64, hardware="tpu-v5p", batch=64, baselines=False)


def compared(name: str, text: str) -> None:
    """Hold a text to its golden file, or write that."""
    golden = GOLDEN / name
    if os.environ.get("MESHWRIGHT_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_golden_files(tmp_path: Path, on_slices: planner.Strategy) -> None:
    words = ("--steps", "100", "--checkpoints", "/data/it's here")
    one = job(tmp_path, words, name="zoo:gpt2")
    compared(
        "launch_skypilot.yaml", skypilot(one, Asked("", "s3://bucket/x", time_s=3600), "python3")
    )
    slices = job(tmp_path, words, name="zoo:gpt2", device="tpu-v5p", devices=64, processes=16)
    compared("launch_xpk.sh", xpk(slices, on_slices, Asked("gcr.io/p/jax:1", "bucket")))


def test_a_task_asks_for_what_was_planned(tmp_path: Path) -> None:
    task = yaml.safe_load(skypilot(job(tmp_path), Asked("r/image:1", "disk"), "python3"))
    assert task["num_nodes"] == 2 and task["volumes"] == {"/data": "disk"} and "setup" not in task
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["image_id"] == "docker:r/image:1"
    virtual = yaml.safe_load(skypilot(job(tmp_path, virtual=True), Asked(""), "python3"))
    assert "accelerators" not in virtual["resources"]
    assert "--virtual-devices 8" in virtual["run"] and "envs" not in virtual
    needed = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES:
        assert f'"{package.replace("[cuda12]", "")}"' in needed


def test_hostile_words_reach_the_program_under_skypilot(tmp_path: Path) -> None:
    """`run` is run by bash on every node, in the folder, with SkyPilot's variables."""
    task = yaml.safe_load(skypilot(job(tmp_path, tuple(NASTY)), Asked(""), sys.executable))
    environment = {
        **os.environ,
        **task["envs"],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
    }

    def run(**other: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", task["run"]],
            cwd=tmp_path,
            env={**environment, **other},
            capture_output=True,
            text=True,
            check=False,
        )

    own = ["--coordinator", "10.0.0.1:8476", "--processes", "2", "--process", "1"]
    assert json.loads(run().stdout) == [*own, *NASTY] and not (tmp_path / "pwned").exists()
    short = run(SKYPILOT_NUM_NODES="3")
    assert short.returncode == 1 and "for 2 nodes, there are 3" in short.stderr


def test_hostile_words_reach_the_program_under_xpk(
    tmp_path: Path, on_slices: planner.Strategy
) -> None:
    """A stand-in for xpk runs --command as a container does, through a shell."""
    stand = tmp_path / "bin"
    stand.mkdir()
    (stand / "xpk").write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" > asked\n'
        'while [[ $1 != --command ]]; do shift; done\nexec bash -c "$2"\n'
    )
    (stand / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for file in stand.iterdir():
        file.chmod(0o755)
    tpus = job(tmp_path, tuple(NASTY), device="tpu-v5p", devices=64, processes=16)
    text = xpk(tpus, on_slices, Asked("image; touch pwned", "a $(touch pwned)", time_s=60))
    (tmp_path / "job.xpk.sh").write_text(text)
    environment = {**os.environ, "PATH": f"{stand}:{os.environ['PATH']}", "CLUSTER": "my cluster"}
    done = subprocess.run(
        ["bash", "job.xpk.sh", "--zone", "us-east5-a"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["--coordinator", "auto", *NASTY]
    asked = (tmp_path / "asked").read_text().split("\0")[:-1]
    options = dict(zip(asked[2::2], asked[3::2], strict=True))
    assert asked[:2] == ["workload", "create"] and options["--cluster"] == "my cluster"
    assert options["--tpu-type"] == "v5p-4x4x4" and options["--num-slices"] == "1"
    assert options["--base-docker-image"] == "image; touch pwned" and options["--script-dir"] == "."
    assert options["--zone"] == "us-east5-a" and options["--command"].startswith("timeout 60 ")
    assert not (tmp_path / "pwned").exists()
    if SHELLCHECK:
        found = subprocess.run(
            [str(SHELLCHECK), "-S", "style", "job.xpk.sh"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout
    del environment["CLUSTER"]
    unnamed = subprocess.run(
        ["bash", "job.xpk.sh"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert unnamed.returncode and b"the name of the GKE cluster" in unnamed.stderr


def test_devices_have_names_there_or_are_refused(
    tmp_path: Path, on_slices: planner.Strategy
) -> None:
    from costmodels.hardware.device import device_names, load_device

    assert set(ACCELERATORS) | set(SLICES) <= set(device_names())
    assert set(SLICES) == {n for n in device_names() if load_device(n).kubernetes == TPU}
    for device, told in (("tpu-v5p", "gke-tpu or xpk"), ("my-gpu", "slurm or kubernetes")):
        with pytest.raises(PlanError, match=f"P206.*no name of SkyPilot's is known.*\n.*{told}"):
            skypilot(job(tmp_path, device=device), Asked(""), "python3")
    with pytest.raises(PlanError, match="P206.*mi300x needs --image"):
        skypilot(job(tmp_path, device="mi300x"), Asked(""), "python3")
    on_gpus = planner.plan("zoo:mlp-tiny", devices=8, hardware="h100-sxm", batch=8, baselines=False)
    with pytest.raises(PlanError, match="P206.*for h100-sxm, not for TPUs"):
        xpk(job(tmp_path), on_gpus, Asked("image"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kueue_admits_jobs_of_a_queue(tmp_path: Path, on_slices: planner.Strategy) -> None:
    tpus = job(tmp_path, device="tpu-v5p", devices=64, processes=16)
    made = manifests(tpus, on_slices, Asked("image", tpu=True, queue="team-a"))
    last = [list(yaml.safe_load_all(text))[-1] for text in made.values()]
    for document in last:
        check_manifest(document)
        assert document["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
        assert document["spec"]["suspend"] is True
    assert [d["kind"] for d in last] == ["Job", "JobSet"]
    assert "suspend" not in "".join(manifests(tpus, on_slices, Asked("image", tpu=True)).values())
    with pytest.raises(PlanError, match="P206.*--queue 'a b' is no name"):
        manifests(tpus, on_slices, Asked("image", tpu=True, queue="a b"))


@pytest.mark.parametrize(
    ("to", "file", "submit"),
    [
        (["skypilot"], "job.sky.yaml", "sky jobs launch job.sky.yaml"),
        (["xpk", "--image", "i"], "job.xpk.sh", "CLUSTER=... bash"),
        (["gke-tpu", "--image", "i", "--queue", "q"], "job.yaml", "kubectl apply -f"),
    ],
)
def test_the_command_writes_them(
    on_slices: planner.Strategy,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    to: list[str],
    file: str,
    submit: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = on_slices
    if to[0] == "skypilot":
        plan = planner.plan(
            "zoo:mlp-tiny", devices=16, hardware="h100-sxm", batch=16, baselines=False
        )
    plan.save("s.json")
    assert main(["launch", "s.json", "--to", *to, "-o", "d", "--", "--steps", "3"]) == 0
    err = "".join(capsys.readouterr())
    assert (tmp_path / "d" / file).exists() and submit in err
    assert re.search(r"wrote d/mlp_tiny\.py", err)
