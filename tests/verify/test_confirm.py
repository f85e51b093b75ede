"""plan --confirm: plans compiled best first, the first that the compiler says fits is taken, and
what it said is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.strategy import schema
from planner.verify import confirm, targets, worker
from planner.verify.report import FLOPS, Figure, VerifyReport

SOURCE = "zoo:gpt2-small,layers=1,seq=128"
GIB = 2**30
Peak = Callable[[planner.Strategy, int], int]


@pytest.fixture
def compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Peak], list[planner.Strategy]]:
    """Puts a function of (plan, how many came before) -> bytes in the compiler's place; the plans
    it is asked about."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(confirm, "require", lambda target, option: None)

    def of(peak: Peak) -> list[planner.Strategy]:
        asked: list[planner.Strategy] = []

        def verify(
            plan: planner.Strategy,
            source: object,
            *,
            target: str,
            run: bool,
            named: bool,
            backend: str,
        ) -> VerifyReport:
            assert (target, run, named, backend) == ("gpu:h100", False, False, "shard_map") and str(
                source
            ) == SOURCE
            asked.append(plan)
            rows = (
                Figure("dot FLOPs", 1000, 1067, "FLOPs", of=FLOPS),
                Figure("peak", 1, peak(plan, len(asked) - 1)),
            )
            return VerifyReport("m", "shard_map", {}, "train", "from shapes", rows, asked=False)

        monkeypatch.setattr(worker, "verify", verify)
        return asked

    return of


def plan(*more: str) -> int:
    return main(
        [SOURCE, "--devices", "4", "--batch", "512", "--confirm", "gpu:h100", "-o", "c.json", *more]
    )


def test_the_first_plan_that_fits_is_taken_and_what_was_said_is_kept(
    compiler: Callable[[Peak], list[planner.Strategy]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = compiler(lambda plan, k: 1000 * GIB if k == 0 else 5 * GIB)
    usual = planner.plan(SOURCE, devices=4, batch=512)
    # What was too much is more than the whole plan: nothing would be better.
    assert plan("--no-cache") == 1 and len(asked) == 1 and asked[0] == usual
    limit = int(usual.costs["memory_limit_bytes"])
    asked = compiler(lambda plan, k: limit + 1000 if k < 2 else limit)
    assert plan("--no-cache") == 0 and len(asked) == 3 and asked[0] == usual
    memory = [p.costs["memory_per_device_bytes"] for p in asked]
    assert memory[1] <= memory[0] - 1000 and memory[2] <= memory[1] - 1000
    assert (
        asked[2] != asked[1] != asked[0]
        and asked[1].baselines == usual.baselines
        and asked[1].solver["bound_s"] == usual.solver["bound_s"]
    )
    assert asked[1].costs["step_time_s"] >= asked[0].costs["step_time_s"]
    out = capsys.readouterr().out
    assert (
        "gpu:h100 says that it fits: 76.0 GiB of 76.0 GiB as compiled, 6.7 % of products"
        in " ".join(out.split())
        and "2 before it did not" in " ".join(out.split())
    )
    assert (
        "optimizer level" not in out
        and "ZeRO" in out.partition("before it did not")[2].partition("verdict")[0]
    )
    kept = planner.Strategy.load("c.json")
    assert kept.decisions() == asked[2].decisions() and kept.provenance["confirm_s"] >= 0
    said = kept.confirmed
    assert (
        said["target"],
        said["fits"],
        said["peak_bytes"],
        said["limit_bytes"],
        said["flops_ratio"],
    ) == ("gpu:h100", True, limit, limit, 1.067)
    assert [row["peak_bytes"] for row in said["rejected"]] == [limit + 1000] * 2 and said[
        "rejected"
    ][0]["mesh"] == dict(usual.mesh_shape)
    data = json.loads(Path("c.json").read_text())
    jsonschema.validate(data, schema.schema())
    del data["confirmed"]["rejected"][0]["why"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema.schema())
    assert planner.Strategy.load("c.json").to_json() == kept.to_json()


@pytest.mark.slow
def test_a_recalled_search_chooses_as_a_new_one(
    compiler: Callable[[Peak], list[planner.Strategy]],
) -> None:
    limit = int(planner.plan(SOURCE, devices=8, batch=1024).costs["memory_limit_bytes"])
    answers = []
    for _ in range(2):
        asked = compiler(lambda plan, k: limit + 1 if k == 0 else limit)
        assert plan("--cache", "kept", "--quiet") == 0
        answers.append(asked)
    assert answers[0] == answers[1] and len(answers[0]) == 2


@pytest.mark.slow
def test_where_none_fits_the_best_is_written_and_said(
    compiler: Callable[[Peak], list[planner.Strategy]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = compiler(lambda plan, k: int(plan.costs["memory_limit_bytes"]) + 1)
    assert plan("--no-cache") == 1 and len(asked) == confirm.MOST
    kept = planner.Strategy.load("c.json")
    assert (
        kept.decisions() == asked[0].decisions()
        and not kept.confirmed["fits"]
        and len(kept.confirmed["rejected"]) == confirm.MOST
    )
    assert "gpu:h100 says that it does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_plan_of_the_search(
    compiler: Callable[[Peak], list[planner.Strategy]], capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(plan: planner.Strategy, k: int) -> int:
        if k:
            raise KeyboardInterrupt
        return int(plan.costs["memory_limit_bytes"]) + 1

    asked = compiler(peak)
    assert plan("--no-cache") == 130
    kept = planner.Strategy.load("c.json")
    assert (
        kept.decisions() == asked[0].decisions()
        and kept.confirmed["stopped"] == "interrupt"
        and len(kept.confirmed["rejected"]) == 1
    )
    assert "interrupted: wrote c.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_that_fails_to_compile_is_passed_over_and_where_all_do_it_is_said(
    compiler: Callable[[Peak], list[planner.Strategy]], capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(plan: planner.Strategy, k: int) -> int:
        if not k:
            raise PlanError(
                "P162", "compiling failed", detail=["RESOURCE_EXHAUSTED: out of memory"]
            )
        return 0

    compiler(peak)
    assert plan("--no-cache") == 0
    (row,) = planner.Strategy.load("c.json").confirmed["rejected"]
    assert (
        row["why"] == "compiling failed: RESOURCE_EXHAUSTED: out of memory"
        and row["peak_bytes"] == 0
    )

    def never(plan: planner.Strategy, k: int) -> int:
        raise PlanError("P161", "compiling did not end")

    compiler(never)
    assert plan("--no-cache") == 2 and "P161" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "more", "code"),
    [
        ("gpu:h9", (), "P164"),
        ("cpu", (), "P164"),
        ("tpu:v5e:2x4", (), "P165"),
        ("gpu:a100", (), "P165"),
        ("tpu:v5e:2x4", ("--hardware", "tpu-v5p"), "P165"),
        ("gpu:h100", ("--mode", "manual", "--pin", "c.json"), "P059"),
        (
            "gpu:h100",
            ("--workload", "infer", "--prompt", "8", "--generate", "4", "--concurrency", "4"),
            "P003",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_search(
    target: str,
    more: tuple[str, ...],
    code: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner.search.search.Search.run", None)
    spec = "zoo:llama-tiny,cache=1" if "--prompt" in more else SOURCE
    assert main([spec, "--devices", "8", "--confirm", target, *more]) == 2
    assert f"error[{code}]: --" in capsys.readouterr().err


def test_an_absent_compiler_is_said_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner.search.search.Search.run", None)
    monkeypatch.setattr(targets, "_found", lambda module: False)
    assert main([SOURCE, "--devices", "8", "--confirm", "gpu:h100"]) == 2
    err = capsys.readouterr().err
    assert (
        "error[P163]: --confirm gpu:h100 needs jax's CUDA plugin" in err
        and "meshwright[gpu-compiler]" in err
    )


def test_what_is_only_priced_is_not_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.search.search.Search.run", None)
    served = ["--workload", "infer", "--precision", "int8-weights"]
    assert main([SOURCE, "--devices", "8", "--confirm", "gpu:h100", *served]) == 2
    assert "error[P077]" in capsys.readouterr().err


def test_a_target_is_the_planned_device_or_one_that_no_compiler_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "_found", lambda module: True)
    for text, kind, device in (
        ("gpu:h100", "gpu", "h100-sxm"),
        ("gpu:h100", "gpu", "h20"),
        ("tpu:tpu7x:2x2", "tpu", "tpu-v7x"),
        ("tpu:v5e:2x4", "tpu", "tpu-v5e"),
    ):
        assert confirm.target_of(text, 8, kind, device).text == text


@pytest.mark.slow
def test_the_gpu_compiler_is_asked(tmp_path: Path) -> None:
    try:
        targets.require(targets.parse_target("gpu:h100", 8))
    except PlanError as e:
        pytest.skip(e.what)
    made = planner.plan(SOURCE, devices=8, batch=1024, confirm="gpu:h100")
    assert (
        made.confirmed["fits"]
        and made.confirmed["peak_bytes"] > 0
        and not made.confirmed["rejected"]
    )
