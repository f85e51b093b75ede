"""Today's prices and peaks beside what one H100 took: sixteen programs whose kernels set the
device's figures (benchmarks/records/h100.json), and nine that set none (h100_unseen.json). Bounds
are what holds today, a little rounded up."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.measured import RECORD, by_part, priced
from planner.verify.clock import ATTENTION, COPIES, NORMS


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Programs that were timed, with their price and planned peak of today."""
    return timed(RECORD)


def timed(record: Path) -> list[dict[str, Any]]:
    """The programs of a record that were timed."""
    found = [row for row in json.loads(record.read_text()) if "plan" in row]
    for row in found:
        row["priced_s"], row["peak_bytes"] = priced(row)
    return found


def off(row: dict[str, Any]) -> float:
    return float(row["priced_s"] / row["in_a_row_s"] - 1)


def test_prices_are_those_of_a_gpu(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 16
    assert median(abs(off(row)) for row in rows) <= 0.03
    assert all(abs(off(row)) <= 0.09 for row in rows)
    llama = [row for row in rows if "train_llama3" in row["name"] and "fp8" not in row["name"]]
    assert len(llama) == 5
    assert all(abs(off(row)) <= 0.04 for row in llama)


def test_programs_that_set_no_figure_are_priced_as_well() -> None:
    rows = timed(RECORD.with_name("h100_unseen.json"))
    assert len(rows) == 9
    assert median(abs(off(row)) for row in rows) <= 0.015
    for row in rows:
        assert abs(off(row)) <= 0.06, row["name"]
        assert 0.95 <= row["allocated_bytes"] / row["peak_bytes"] <= 1.05, row["name"]


def test_no_program_takes_much_more_memory_than_planned(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["allocated_bytes"] <= 1.06 * row["peak_bytes"], row["name"]
    close = [abs(row["allocated_bytes"] / row["peak_bytes"] - 1) <= 0.02 for row in rows]
    assert sum(close) >= 12


def test_the_roofline_of_a_program_is_what_its_kernels_took(rows: list[dict[str, Any]]) -> None:
    """As the record has it: by the figures of the day that it was read."""
    for row in rows:
        if "parts" not in row or "offload" in row["name"]:
            continue
        roofline_s = sum(part["roofline_s"] for part in row["parts"].values())
        assert roofline_s / row["busy_s"] == pytest.approx(1, abs=0.08), row["name"]


def test_kernels_are_put_to_the_part_that_they_serve() -> None:
    kernels = {
        "command_buffer_1|loop_add.fusion": (1.0, 1.0),
        "command_buffer_1|loop_add_fusion": (2.0, 1.0),
        "fusion.3|some_kernel": (4.0, 1.0),
        "|cudnn_generated_sdpa_flash_fprop": (8.0, 1.0),
        "|nvjet_sm90_tst_128x128": (16.0, 1.0),
        "|memcpy128": (32.0, 1.0),
    }
    found = by_part({"loop_add.fusion": NORMS, "fusion.3": COPIES}, kernels)
    assert found == {NORMS: 3.0, COPIES: 36.0, ATTENTION: 8.0, "products, head and loss": 16.0}
