"""What a step took, read from the files that programs and tools write.

    lines of JSON           an emitted program's --log ("seconds"), MaxText's metrics_file
    a history of W&B        as CSV (a chart's export, or run.history().to_csv()), a list or lines of
                            JSON: a column that a launcher logs as its step's time, else the clock
                            of the rows (_runtime, _timestamp) by their step
    xprof's overview        the JSON of its overview page: average step time of the devices

The first steps are left out (compilation, caches), the middle one of the others counts; xprof's
average is of the steps that were profiled. Where columns come from: megatron/training/training.py
of Megatron-LM, metric_logger.py of MaxText, components/metrics.py of torchtitan, Levanter's
callbacks, `wandb.Api().run(...).history()`, and xprof's performance summary.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.hardware.intake import read_text

WARM_UP = 2
"""Steps that are left out."""
SUFFIXES = (".jsonl", ".json", ".log", ".csv")
"""How such files end."""
COLUMNS = (
    "seconds",
    "iteration-time",
    "perf/step_time_seconds",
    "time_metrics/end_to_end(s)",
    "throughput/duration",
)
"""Seconds of a step: emitted programs, Megatron-LM, MaxText, torchtitan, Levanter."""
CLOCKS = ("_runtime", "_timestamp")
"""Seconds that W&B writes into every row of a history."""
COUNTS = ("train/global_step", "trainer/global_step", "global_step", "_step")
"""Steps of a row: Hugging Face's Trainer, Lightning, others, and W&B's own count of rows."""
AVERAGE = "steptime_ms_average"
"""Milliseconds in the tables of xprof's overview."""

Row = Mapping[str, Any]


def step_seconds(path: Path) -> float:
    """Seconds of a step. Raises OSError, and ValueError with what the file lacks."""
    text = read_text(path)
    if path.suffix == ".csv":
        try:
            return _middle(list(csv.DictReader(io.StringIO(text))))
        except csv.Error as e:
            raise ValueError(f"it is no CSV: {e}") from e
    try:
        data = json.loads(text)
    except RecursionError as e:
        raise ValueError("its JSON is nested too deep") from e
    except ValueError:
        return _middle([_object(line) for line in text.splitlines() if line.strip()])
    if (average := next(_averages(data), None)) is not None:
        if not average > 0:
            raise ValueError("its overview has no step: profile some whole ones")
        return average / 1e3
    return _middle([data] if isinstance(data, dict) else data if isinstance(data, list) else [])


def _object(line: str) -> Row:
    try:
        row = json.loads(line)
    except RecursionError as e:
        raise ValueError("its JSON is nested too deep") from e
    if not isinstance(row, dict):
        raise ValueError(f"{line[:40]!r} is no row")
    return row


def _averages(data: Any) -> Iterator[float]:
    """Step times of an overview in milliseconds: properties of its tables."""
    tables = data if isinstance(data, list) else [data]
    for table in tables:
        properties = table.get("p") if isinstance(table, dict) else None
        if isinstance(properties, dict) and AVERAGE in properties:
            number = _number(str(properties[AVERAGE]).removesuffix("ms"))
            yield 0.0 if number is None else number


def _middle(rows: Sequence[Any]) -> float:
    """The middle one of the steps of rows behind the first."""
    table = [row for row in rows if isinstance(row, dict)]
    logged = _logged(table)
    times = logged[WARM_UP:] if logged else _clocked(table)
    if not times:
        raise ValueError(f"it has {len(logged)} steps; the first {WARM_UP} do not count")
    return median(times)


def _logged(rows: Sequence[Row]) -> list[float]:
    """The first of COLUMNS that there is; a chart's export calls it "RUN - COLUMN"."""
    names = dict.fromkeys(str(name) for row in rows for name in row)
    for column in COLUMNS:
        columns = [n for n in names if n == column or n.endswith(f" - {column}")]
        if len(columns) > 1:
            raise ValueError(f"it has {len(columns)} runs: {', '.join(columns[:3])}; export one")
        if columns:
            return [x for row in rows if (x := _number(row.get(columns[0]))) is not None and x > 0]
    return []


def _clocked(rows: Sequence[Row]) -> list[float]:
    """Seconds a step between rows, which may be several steps apart, from the last of WARM_UP."""
    for clock in CLOCKS:
        for count in COUNTS:
            points = [
                (step, clock_time)
                for row in rows
                if (step := _number(row.get(count))) is not None
                and (clock_time := _number(row.get(clock))) is not None
            ]
            if len(points) > 1:
                return [
                    (b - a) / (n - m)
                    for (m, a), (n, b) in pairwise(points[WARM_UP - 1 :])
                    if n > m and b > a
                ]
    return []


def _number(value: Any) -> float | None:
    """A finite number, None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
