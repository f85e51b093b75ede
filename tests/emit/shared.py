"""What several tests of emission share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GPT = "zoo:gpt-tiny"
_slow = pytest.mark.slow

STEPS = [
    (GPT, "dp=2,tp=4,zero=1,micro=1", "shard_map"),
    pytest.param(GPT, "dp=8,zero=3,micro=1", "shard_map", marks=_slow),
    pytest.param(GPT, "pp=2,dp=2,tp=2,zero=1,micro=4", "shard_map", marks=_slow),
    pytest.param(GPT, "dp=2,tp=4,zero=1,micro=1", "jit", marks=_slow),
]
"""(source, pins, backend) of a step in a precision that is held against float32."""


def assert_linted(folder: Path, *options: str) -> None:
    """Ruff finds nothing in the programs of a folder. options: which rules, and how."""
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated", *options, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
