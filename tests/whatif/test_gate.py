"""What the repository offers to other repositories: the steps of the GitHub action, run by a shell
as a runner would, and the hook, installed and run by pre-commit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

import models_zoo
import planner

ROOT = Path(__file__).parents[2]
GH = Path(__file__).with_name("gh_comments.py")
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "plan-check" / "action.yml").read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository's models folder: a model that is as it was planned, and one that grew since."""
    at = tmp_path_factory.mktemp("project")
    (at / "models").mkdir()
    for name, spec in (("model", "zoo:mlp-tiny"), ("grown", "zoo:mlp-tiny,layers=8")):
        onnx.save(models_zoo.build(spec), at / "models" / f"{name}.onnx")
    planner.plan(str(at / "models" / "model.onnx"), devices=4, batch=16, baselines=False).save(
        at / "models" / "it's my.plan.json"
    )
    (at / "budget.toml").write_text('["*"]\nstep_time = "1 us"\n')
    return at


def step_runs(
    step: dict[str, Any],
    given: dict[str, str],
    project: Path,
    tmp_path: Path,
    contexts: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run a step's script with its environment filled in; what it wrote to the runner's files.
    contexts: what expressions other than inputs are, such as github.repository."""
    inputs = {
        name: str(given.get(name, spec.get("default", "")))
        for name, spec in ACTION["inputs"].items()
    }
    filled = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], value)
        for name, value in step.get("env", {}).items()
    }
    for name, value in (contexts or {}).items():
        filled = {k: v.replace(f"${{{{ {name} }}}}", value) for k, v in filled.items()}
    assert "${{" not in step["run"] and not any("${{" in value for value in filled.values())
    shims = tmp_path / "bin"
    shims.mkdir(exist_ok=True)
    (shims / "plan").write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m planner.cli "$@"\n'
    )
    (shims / "gh").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{GH}" "$@"\n')
    (shims / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for shim in shims.iterdir():
        shim.chmod(0o755)
    files = {"GITHUB_STEP_SUMMARY": tmp_path / "summary.md", "GITHUB_OUTPUT": tmp_path / "output"}
    environment = {
        **os.environ,
        **filled,
        **{k: str(v) for k, v in files.items()},
        "RUNNER_TEMP": str(tmp_path),
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
    }
    script = tmp_path / "step.sh"
    script.write_text(step["run"])
    command = [
        "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        str(script),
    ]  # how runners start `shell: bash`
    done = subprocess.run(
        command,
        env=environment,
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done, {k: v.read_text() if v.exists() else "" for k, v in files.items()}


CHECK, COMMENT = (
    next(s for s in ACTION["runs"]["steps"] if s.get("id") == name) for name in ("check", "comment")
)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"model": "models/model.onnx"}, 0, "::notice file="),
        ({"model": "models/grown.onnx"}, 1, "::error file="),
        ({"model": "models/model.onnx", "budget": "budget.toml"}, 1, "budget step time"),
        ({"model": "$(touch owned)`touch owned`"}, 2, ""),
    ],
    ids=["fine", "grown", "budget", "hostile"],
)
def test_the_action_checks_annotates_and_sums_up(
    given: dict[str, str], status: int, said: str, project: Path, tmp_path: Path
) -> None:
    done, files = step_runs(
        CHECK, {**given, "against": "models/it's my.plan.json"}, project, tmp_path
    )
    assert done.returncode == status and f"status={status}" in files["GITHUB_OUTPUT"].splitlines()
    assert said in done.stdout and not (project / "owned").exists()
    report = re.search(r"^report=(.+)$", files["GITHUB_OUTPUT"], re.M)
    if status < 2:
        assert files["GITHUB_STEP_SUMMARY"].startswith(
            f"### plan check: {Path(given['model']).name} {'✅' if status == 0 else '❌'}"
        )
        assert report and Path(report[1]).read_text() == files["GITHUB_STEP_SUMMARY"]
    else:
        assert "error[P" in done.stderr and not report


def test_the_action_writes_what_a_badge_reads(project: Path, tmp_path: Path) -> None:
    colours = []
    for model in ("model", "grown"):
        badge = tmp_path / f"{model}.json"
        given = {"model": f"models/{model}.onnx", "badge": str(badge)}
        step_runs(CHECK, {**given, "against": "models/it's my.plan.json"}, project, tmp_path)
        data = json.loads(badge.read_text())
        assert data["schemaVersion"] == 1 and data["label"] == "plan"
        colours.append((data["color"], bool(re.search(r"^step \+\d", data["message"]))))
    assert colours == [("brightgreen", False), ("red", True)]


def test_the_comment_is_written_once_and_then_changed(project: Path, tmp_path: Path) -> None:
    """What checks print, into the comments of a pull request: one a model and baseline, never a
    person's; without the permission the run goes on."""
    store = tmp_path / "comments.json"
    contexts = {
        "github.token": "t0ken",
        "github.repository": "someone/some-where",
        "github.event.pull_request.number": "7",
    }

    def comment(model: str, against: str) -> subprocess.CompletedProcess[str]:
        _, files = step_runs(CHECK, {"model": model, "against": against}, project, tmp_path)
        report = re.findall(r"^report=(.+)$", files["GITHUB_OUTPUT"], re.M)[-1]
        given = {"model": model, "against": against}
        done, _ = step_runs(
            COMMENT, given, project, tmp_path, {**contexts, "steps.check.outputs.report": report}
        )
        assert done.returncode == 0, done.stderr
        return done

    baseline = project / "models" / "it's my.plan.json"
    hostile = "models/$(touch owned) `touch owned` -->.onnx"
    shutil.copy(project / "models" / "grown.onnx", project / hostile)
    store.write_text("[]")
    comment("models/model.onnx", str(baseline))
    (first,) = json.loads(store.read_text())
    assert "✅" in first["body"] and first["body"].startswith("<!-- meshwright plan-check ")
    person = {"id": 3, "user": {"type": "User"}, "body": first["body"]}
    store.write_text(json.dumps([person, first]))
    shutil.copy(project / "models" / "model.onnx", tmp_path / "kept.onnx")
    shutil.copy(project / "models" / "grown.onnx", project / "models" / "model.onnx")
    try:
        comment("models/model.onnx", str(baseline))
    finally:
        shutil.copy(tmp_path / "kept.onnx", project / "models" / "model.onnx")
    same, changed = json.loads(store.read_text())
    assert same == person and changed["id"] == first["id"] and "❌" in changed["body"]
    comment(hostile, str(baseline))
    *_, other = json.loads(store.read_text())
    assert other["id"] != first["id"] and len(json.loads(store.read_text())) == 3
    assert other["body"].partition("\n")[0].endswith(" -->") and not (project / "owned").exists()
    store.unlink()  # what no token may write
    assert "::notice title=plan check::no comment" in comment(hostile, str(baseline)).stdout
    assert "github.event_name == 'pull_request'" in COMMENT["if"]


def test_the_action_installs_what_it_is_told_to(project: Path, tmp_path: Path) -> None:
    install = next(s for s in ACTION["runs"]["steps"] if "pip install" in s.get("run", ""))
    at = str(ROOT / ".github" / "actions" / "plan-check")  # the whole repository is around it
    for given, package in (
        ({}, f"{at}/../../.."),
        ({"package": "./wheel; touch owned"}, "./wheel; touch owned"),
    ):
        done, _ = step_runs(install, given, project, tmp_path, {"github.action_path": at})
        *words, last = done.stdout.split("\n")[:-1]
        assert words[:3] == ["-m", "pip", "install"] and last == package
    assert (Path(f"{at}/../../..") / "pyproject.toml").exists()
    assert ACTION["outputs"]["status"]["value"] == "${{ steps.check.outputs.status }}"
    for used in (s["uses"] for s in ACTION["runs"]["steps"] if "uses" in s):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), "a tag can be moved, a commit cannot"


@pytest.mark.slow
def test_pre_commit_installs_and_runs_the_hook(project: Path, tmp_path: Path) -> None:
    """The hook of this repository's last commit, in an environment of its own: it passes, then a
    model that grew fails it."""
    hooks, git = Path(sys.executable).with_name("pre-commit"), shutil.which("git")
    if not hooks.exists() or git is None:
        pytest.skip("pre-commit or git is not installed")
    revision = subprocess.run(
        [git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if revision.returncode:
        pytest.skip("not a checkout of the repository")
    other = tmp_path / "other"
    shutil.copytree(project, other)
    config = {
        "repo": str(ROOT),
        "rev": revision.stdout.strip(),
        "hooks": [
            {
                "id": "plan-check",
                "args": ["models/model.onnx", "--against", "models/it's my.plan.json"],
                "files": "^models/",
            }
        ],
    }
    (other / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [config]}))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PRE_COMMIT_HOME": str(tmp_path / "home")
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=other,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    run(git, "init", "--quiet")
    run(git, "add", "-A")
    passed = run(str(hooks), "run", "--verbose")
    if passed.returncode == 3 and "CalledProcessError" in passed.stdout:
        pytest.skip("the hook's environment cannot be installed here: no packages")
    assert passed.returncode == 0 and "ok: nothing changed" in passed.stdout, passed.stdout
    shutil.copy(other / "models" / "grown.onnx", other / "models" / "model.onnx")
    run(git, "add", "-A")
    failed = run(str(hooks), "run")
    assert failed.returncode == 1 and "the model changed" in failed.stdout
    run(git, "rm", "-r", "--cached", "--quiet", "models")
    assert "no files to check" in run(str(hooks), "run").stdout  # other changes do not start it
