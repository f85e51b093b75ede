"""What a backend's programs cannot do is refused before the search where it is pinned, and not
chosen where it is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.search.search import Search

GPT = "zoo:gpt-tiny"
PINS = [
    "copies=2,micro=4",
    "offload=optimizer",
    "offload=optimizer+activations,recompute=block",
    "recompute=save:q,offload:context",
    "pp=2",
    "pp=2,schedule=gpipe",
    "schedule=interleaved,virtual=2",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: Any, **__: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(Search, "run", unwanted)


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize("options", [{"backend": "jit"}, {"runtime": "jax-jit"}])
def test_pins_that_no_jit_program_keeps_are_refused_before_the_search(
    pins: str, options: dict[str, str]
) -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(GPT, devices=4, batch=8, pins=pins, **options)
    assert (
        e.value.code == "P024"
        and "written for shard_map only" in e.value.what
        and any("shard_map, or remove the pin" in h for h in e.value.help)
    )
    with pytest.raises(AssertionError, match="searched"):
        planner.plan(GPT, devices=4, batch=8, pins=pins, backend="shard_map")


@pytest.mark.usefixtures("no_search")
def test_the_command_line_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([GPT, "--devices", "4", "--pin", "copies=2", "--emit", "p.py", "--backend", "jit"])
        == 2
    )
    said = capsys.readouterr().err
    assert "error[P024]: pin copies = 2 contradicts --backend jit" in said and not list(
        Path().iterdir()
    )
    with pytest.raises(
        AssertionError, match="searched"
    ):  # no program, so nothing that cannot be written
        main([GPT, "--devices", "4", "--pin", "copies=2", "--backend", "jit"])


@pytest.mark.usefixtures("no_search")
def test_state_beside_hosted_tables_is_refused_before_the_search() -> None:
    with pytest.raises(PlanError, match="P076.*--tables host.*offload = optimizer"):
        planner.plan(
            "zoo:dlrm-tiny,rows=500-7-33-900",
            devices=4,
            hardware="cpu",
            batch=16,
            tables="host",
            pins="offload=optimizer",
        )


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {
            "source": "zoo:gpt2-small,layers=4,seq=64",
            "devices": 4,
            "batch": 16,
            "pins": "zero=3,micro=2",
        },  # two copies where they may be
        {
            "source": "zoo:gpt2-small,layers=4",
            "devices": 8,
            "hardware": "v100-16gb",
            "batch": 8,
            "pins": "micro=8",
        },
    ],
)
def test_an_open_search_finds_what_the_program_can_do(options: dict[str, Any]) -> None:
    source = options["source"]
    free, held = (planner.plan(**options, baselines=False, backend=b) for b in ("", "jit"))
    t = held.techniques
    assert (t.get("copies", 1), t["schedule"], t["offload"]) == (
        1,
        "none",
        [],
    ) and "stage" not in dict(held.mesh_shape)
    assert held.costs["step_time_s"] >= free.costs["step_time_s"] * (1 - 2e-3)
    assert "jit" in planner.emit(held, source, backend="jit")


def test_a_list_of_stages_leaves_the_one_without() -> None:
    pins = Path("p.toml")
    pins.write_text("[mesh]\nstage = [1, 2]\n")
    held = planner.plan(GPT, devices=4, batch=8, pins=pins, backend="jit", baselines=False)
    assert dict(held.mesh_shape).get("stage", 1) == 1 and planner.emit(held, GPT, backend="jit")


def test_nothing_goes_to_the_host_for_a_jit_program() -> None:
    asked: dict[str, Any] = {
        "devices": 1,
        "batch": 2,
        "memory_limit_bytes": 9 * 2**30,
        "baselines": False,
        "remedies": False,
    }
    assert planner.plan("zoo:gpt2-large", **asked).techniques["offload"]
    with pytest.raises(PlanError, match="P021"):
        planner.plan("zoo:gpt2-large", **asked, backend="jit")
