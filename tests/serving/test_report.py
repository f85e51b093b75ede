"""What people see of a serving plan, and what they are told where none fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.serving.report import summary
from planner.serving.serve import serve
from tests.serving.test_windows import GEMMA


def test_what_a_file_has_and_the_plan_has_not_is_said(tmp_path: Path) -> None:
    """The plan of a quantized checkpoint was of other weights, and nothing said so."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GEMMA, "quantization_config": {"quant_method": "gptq"}}))
    made = serve(str(path), prompt=16, generate=4, concurrency=1, devices=1)
    text = summary(made)
    assert "finding weights are not in the file's type (gptq)" in text.replace("Weights", "weights")
    assert "serve 1 sequence at once, 16 + 4 tokens\n" in text
    assert "*.key [b, heads, 20, d]" in text and "*.key [b, heads, 6, d]" in text
    nearly = replace(made, service={**made.service, "gap": 2e-4})
    assert "can be more than 0.1 % better" in summary(nearly)


@pytest.mark.parametrize(
    ("model", "limit_bytes", "helps"),
    [
        ("zoo:mixtral-8x7b,layers=2,cache=1", 4 << 30, ["--precision fp8", "--devices 2"]),
        ("zoo:llama3-8b,layers=2,cache=1", 1 << 30, ["--devices 4"]),
        (
            "zoo:llama3-8b,layers=8,cache=1",
            int(5.5 * 2**30),
            ["fewer sequences", "--quantize int8", "--precision fp8", "--devices 2"],
        ),
    ],
)
def test_only_what_helps_is_said_where_nothing_fits(
    model: str, limit_bytes: int, helps: list[str]
) -> None:
    """int8 leaves experts as they are, and fewer sequences take no weights away."""
    with pytest.raises(PlanError, match="no plan fits") as e:
        serve(
            model, prompt=64, generate=8, concurrency=64, devices=1, memory_limit_bytes=limit_bytes
        )
    assert len(e.value.help) == len(helps), e.value.help
    assert all(part in said for part, said in zip(helps, e.value.help, strict=True)), e.value.help


def test_replicas_that_were_not_tried_are_said() -> None:
    """Seven sequences on four devices got one replica without a word."""
    options = {"prompt": 16, "generate": 4, "devices": 4}
    said = "2 and 4 replicas would have unequally many of 7 sequences and were not tried"
    text = " ".join(summary(serve("zoo:llama-tiny,cache=1", concurrency=7, **options)).split())
    assert f"{said}: --concurrency 8 tries them" in text
    assert "not tried" not in summary(serve("zoo:llama-tiny,cache=1", concurrency=8, **options))
