"""Requests as they arrive: drawn at a rate, or read from a trace.

A trace is CSV with a head, or a JSON object a line. Columns are when a request arrives, how many
tokens its prompt has and how many are generated, under the names of public traces (NAMES): Azure's
(TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's (timestamp in milliseconds, input_length,
output_length), BurstGPT's, or arrival_s, prompt, generate.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.hardware.intake import read_bytes
from planner.errors import PlanError
from planner.serving.lengths import MOST_TOKENS, Lengths

NAMES: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "timestamp", "arrival_time", "time"),
    "prompt": ("prompt", "contexttokens", "input_length", "request tokens", "prompt_tokens"),
    "generate": (
        "generate",
        "generatedtokens",
        "output_length",
        "response tokens",
        "output_tokens",
    ),
}
"""What a trace says -> how its column may be called, in small letters."""
MILLISECONDS = "input_length"
"""Traces with this column count milliseconds (Mooncake)."""
MOST_REQUESTS, MOST_BYTES = 1_000_000, 256 * 2**20
DRAWN = 4000
"""Requests that are drawn at a rate."""


@dataclass(frozen=True)
class Requests:
    """arrival_s [n], not falling; prompt, generate [n]: tokens, at least 1."""

    arrival_s: np.ndarray
    prompt: np.ndarray
    generate: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_s)

    def part(self, index: int, parts: int) -> Requests:
        """What one of several replicas gets, that are dealt requests in turn."""
        return Requests(*(a[index::parts] for a in (self.arrival_s, self.prompt, self.generate)))

    def at_once(self) -> Requests:
        """These requests, all there from the start."""
        return Requests(np.zeros(len(self)), self.prompt, self.generate)

    @property
    def rate(self) -> float:
        """Requests a second."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span > 0 else math.inf


def drawn(
    rate: float, prompt: Lengths, generate: Lengths, seed: int, count: int = DRAWN
) -> Requests:
    """Requests whose gaps are exponential, so many a second in the mean."""
    generator = np.random.default_rng(seed)
    arrival = np.cumsum(generator.exponential(1 / rate, count))
    return Requests(arrival, prompt.draw(count, generator), generate.draw(count, generator))


def traced(path: str | Path) -> Requests:
    """Requests of a file. Raises PlanError P226 where it is no trace."""
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
        rows = _json_lines(text) if text.lstrip()[:1] == "{" else _csv(text)
        requests = [_request(row) for row in rows]
        if not 2 <= len(requests) <= MOST_REQUESTS:
            raise ValueError(
                f"{len(requests):,} requests; from 2 to {MOST_REQUESTS:,} can be served"
            )
    except (OSError, ValueError, csv.Error, RecursionError) as e:
        raise PlanError(
            "P226",
            f"--rate {path}: neither requests a second nor a trace of requests",
            detail=[str(getattr(e, "strerror", None) or e)[:200]],
            help=["--rate 8", "CSV with the columns arrival_s,prompt,generate (docs/serving.md)"],
        ) from e
    arrival, prompt, generate = (np.array(column) for column in zip(*requests, strict=True))
    order = np.argsort(arrival, kind="stable")
    return Requests(arrival[order] - arrival.min(), prompt[order], generate[order])


def _json_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in filter(None, map(str.strip, text.splitlines())):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"{line[:40]!r} is no object")
        yield row


def _csv(text: str) -> Iterator[dict[str, Any]]:
    yield from csv.DictReader(text.splitlines())


def _request(row: Mapping[Any, Any]) -> tuple[float, int, int]:
    """(arrival in seconds, prompt, generated) of a row. Raises ValueError."""
    named = {str(k).strip().lower(): v for k, v in row.items()}
    columns = {}
    for what, names in NAMES.items():
        name = next((n for n in names if n in named), None)
        if name is None:
            raise ValueError(f"no column {' or '.join(names[:3])}: {', '.join(named)[:80]}")
        columns[what] = named[name]
    scale = 1e-3 if MILLISECONDS in named else 1.0
    prompt, generate = (_tokens(columns[k]) for k in ("prompt", "generate"))
    return _seconds(columns["arrival"]) * scale, prompt, generate


def _tokens(cell: Any) -> int:
    number = int(cell) if isinstance(cell, str) and len(cell) < 12 else cell
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_TOKENS:
        raise ValueError(f"{str(cell)[:40]!r} is no number of tokens")
    return number


def _seconds(cell: Any) -> float:
    """Seconds of a number, or of a date and time."""
    try:
        seconds = float(cell)
    except (TypeError, ValueError):
        # Seconds with more than six digits behind the point are cut: Azure's have seven.
        whole, _, digits = str(cell)[:40].partition(".")
        seconds = datetime.fromisoformat(f"{whole}.{digits[:6].ljust(6, '0')}+00:00").timestamp()
    if isinstance(cell, bool) or not abs(seconds) < 1e15:
        raise ValueError(f"{str(cell)[:40]!r} is no time")
    return seconds
