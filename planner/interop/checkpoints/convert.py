"""A checkpoint as the file that programs read with --weights, and what programs write with --export
as the checkpoint it came from.

Values are copied, turned, cut and stacked, never computed with: each keeps the type that it has in
the checkpoint. On the way back the checkpoint's own headers are written again, every tensor into
its old bytes, rounded to its old type (which is exact for what was not trained); what is no
parameter, or was not trained and so is not in the program's file, stays as it was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.interop.checkpoints.match import Match, Matching, Take
from planner.interop.checkpoints.store import (
    CONFIG,
    FLOATS,
    INDEX,
    TYPES,
    Shards,
    Stored,
    bytes_of,
    header_bytes,
    inside,
    new_header,
    read_header,
    width_bytes,
    write,
)

if TYPE_CHECKING:
    import numpy as np

LISTED = 20


@dataclass(frozen=True, slots=True)
class Returned:
    """What `back` wrote: how many tensors with values of the program's file, and how many as they
    were; labels that have no tensor."""

    written: int
    unchanged: int
    unmatched: tuple[str, ...]


def refuse(graph: Graph, shards: Shards, matching: Matching, partial: bool) -> None:
    """One PlanError P211 that names all that is missing (unless `partial`), all that does not fit,
    and ties that do not hold."""
    broken = [
        f"{tied} differs from {source}, and the graph has one parameter for both"
        for tied, source in matching.tied.items()
        if _shared(graph, matching, source)
        and not _same(shards.tensors[tied], shards.tensors[source])
    ]
    faults = [
        *matching.misfits,
        *broken,
        *([] if partial else [f"{label} is not in the checkpoint" for label in matching.missing]),
    ]
    if not faults:
        return
    and_more = [f"and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
    help = ["--partial leaves them to be drawn anew"] if matching.missing and not partial else []
    help += (
        [
            f"tensors that nothing reads: {', '.join(matching.unread[:6])}"
            + (" ..." if len(matching.unread) > 6 else "")
        ]
        if matching.unread
        else []
    )
    help += (
        ["rows are padded where config.json beside the shards gives the vocab_size that they have"]
        if matching.misfits and not (shards.folder / CONFIG).exists()
        else []
    )
    raise PlanError(
        "P211",
        f"{len(faults)} of {len(graph.weights)} parameters cannot be read from {shards.folder}",
        detail=[*faults[:LISTED], *and_more],
        help=help,
    )


def _shared(graph: Graph, matching: Matching, source: str) -> bool:
    """Whether the parameter read from a tensor is used twice: a table, and a head that the graph
    ties to it."""
    labels = {m.label for m in matching.matches if any(t.source == source for t in m.takes)}
    return any(
        len(graph.consumers.get(n, ())) > 1 for n in graph.weights if graph.labels[n] in labels
    )


def _same(a: Stored, b: Stored) -> bool:
    """Bit for bit."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        x == y for x, y in zip(bytes_of(a), bytes_of(b), strict=True)
    )


def to_program(
    graph: Graph, folder: Path | None, shards: Shards, matching: Matching, target: Path
) -> int:
    """Write every match by its label, as --weights reads it, and what only the model in `folder`
    has; returns the bytes. One tensor is in memory at a time."""
    words = {name: word for word, name in TYPES.items()}
    rows = [(m.label, m.dtype, m.shape) for m in matching.matches]
    rows += [
        (graph.labels[n], words[graph.tensors[n].dtype], graph.tensors[n].shape)
        for n in matching.from_model
    ]
    header = new_header(rows)
    size = len(header) + sum(prod(shape) * width_bytes(dtype) for _, dtype, shape in rows)
    write(target, header, _pieces(graph, folder, shards, matching), size)
    return size


def _pieces(
    graph: Graph, folder: Path | None, shards: Shards, matching: Matching
) -> Iterator[memoryview]:
    """The bytes of all, take by take."""
    import numpy as np

    from planner.workload.weights import load_one

    for m, take in [(match, take) for match in matching.matches for take in match.takes]:
        value = _part(shards.tensors[take.source].array(), take)
        if m.rows:
            value = np.pad(
                value,
                [
                    (0, m.shape[m.axis] - m.rows) if d == m.axis else (0, 0)
                    for d in range(value.ndim)
                ],
            )
        yield _memory(value)
    for name in matching.from_model:
        yield _memory(load_one(graph, name, folder))


def _part(array: np.ndarray, take: Take) -> np.ndarray:
    """What a take reads."""
    view = _place(array, take)
    if take.heads:
        view = view.reshape(take.size, *array.shape[1:])
    return view.swapaxes(-1, -2) if take.flip else view


def _place(array: np.ndarray, take: Take) -> np.ndarray:
    """The place of a part in an array: a view, with a dim of heads where they have their parts
    apart."""
    if take.heads:
        per_part = take.size // take.heads
        apart = array.reshape(take.heads, -1, *array.shape[1:])
        return apart[:, take.start : take.start + per_part]
    if not array.ndim:
        return array
    return array[(*[slice(None)] * take.axis, slice(take.start, take.start + take.size))]


def _memory(value: np.ndarray) -> memoryview:
    """The bytes of an array, in order."""
    import numpy as np

    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def back(
    graph: Graph, shards: Shards, matching: Matching, exported: Path, target: Path
) -> Returned:
    """Write the checkpoint anew, as the folder `target`, with the values of `exported`, which a
    program's --export wrote.

    Raises PlanError P212 when `exported` is of another model, lacks parameters that train, or two
    values of one tensor differ; P053 when target exists.
    """
    if target.exists():
        raise PlanError("P053", f"{target} exists", help=["-o a folder that does not exist yet"])
    values, known = (
        read_header(inside(exported.parent, exported.name)),
        {m.label: m for m in matching.matches},
    )
    unmatched = _check_given(graph, values, matching, exported)
    into: dict[str, list[tuple[Match, int]]] = {}
    for m in known.values():
        for k, take in enumerate(m.takes) if m.label in values else ():
            into.setdefault(take.source, []).append((m, k))
    into |= {
        tied: into[source]
        for tied, source in matching.tied.items()
        if source in into and _same(shards.tensors[tied], shards.tensors[source])
    }
    _write_folder(shards, into, values, target)
    return Returned(len(into), len(shards.tensors) - len(into), unmatched)


def _check_given(
    graph: Graph, values: Mapping[str, Stored], matching: Matching, exported: Path
) -> tuple[str, ...]:
    """Labels of the file that have no tensor in the checkpoint; refuses a file of another model."""
    shapes = {graph.labels[n]: graph.tensors[n].shape for n in graph.weights}
    faults = [f"{label} is no parameter of the model" for label in values if label not in shapes]
    faults += [
        f"{label} is {list(t.shape)}, in the model {list(shapes[label])}"
        for label, t in values.items()
        if label in shapes and t.shape != shapes[label]
    ]
    faults += [
        f"{label} is {t.dtype}"
        for label, t in values.items()
        if label in shapes and t.dtype not in FLOATS
    ]
    faults += [
        f"{graph.labels[n]} trains and is not in the file"
        for n in graph.weights
        if n in graph.trainable and graph.labels[n] not in values
    ]
    if faults:
        and_more = [f"and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise PlanError(
            "P212",
            f"{exported} holds no export of this model",
            detail=[*faults[:LISTED], *and_more],
            help=[
                "what a program of the same model wrote with --export; --freeze and --trainable as"
                " it was planned"
            ],
        )
    missing = set(matching.missing)
    return tuple(label for label in values if label in missing)


def _write_folder(
    shards: Shards,
    into: Mapping[str, list[tuple[Match, int]]],
    values: Mapping[str, Stored],
    target: Path,
) -> None:
    """All shards, the index and the configuration, aside and then named."""
    need = sum(path.stat().st_size for path in shards.files)
    try:
        free = shutil.disk_usage(target.parent).free
        if free < need:
            raise PlanError(
                "P056",
                f"cannot write {str(target)!r}: it takes {need:,} bytes, and {free:,} are free",
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            aside = Path(temporary) / target.name
            aside.mkdir()
            for path in shards.files:
                rows = shards.of_file(path).items()
                pieces = (
                    piece
                    for name, t in rows
                    for piece in (
                        _returned(name, t, into[name], values) if name in into else bytes_of(t)
                    )
                )
                write(aside / path.name, header_bytes(path), pieces, path.stat().st_size)
            for name in (INDEX, CONFIG):
                if (shards.folder / name).exists():
                    shutil.copyfile(shards.folder / name, aside / name)
            aside.rename(target)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(target)!r}: {e.strerror}",
            help=["-o a folder in one that exists and is writable"],
        ) from e


def _returned(
    name: str, stored: Stored, writers: list[tuple[Match, int]], values: Mapping[str, Stored]
) -> Iterator[memoryview]:
    """A tensor of the checkpoint with the values that parameters have now."""
    import numpy as np

    array, done = np.array(stored.array()), dict[tuple[int, int], str]()
    for m, k in writers:
        take, value = m.takes[k], values[m.label].array()
        value = value[k] if m.stacked else value
        value = _rounded(
            value[(*[slice(None)] * m.axis, slice(m.rows))] if m.rows else value,
            stored.dtype,
            m.label,
        )
        place = _place(array, take)
        value = value.reshape(_part(array, take).shape)
        value = (value.swapaxes(-1, -2) if take.flip else value).reshape(place.shape)
        where = (take.start, take.size)
        if where in done and _memory(place) != _memory(value):
            raise PlanError(
                "P212",
                f"{m.label} and {done[where]} are one tensor of the checkpoint, {name}, and"
                " differ now",
                help=["plan with --tie, so that they stay one: --tie A=B"],
            )
        place[...] = value
        done[where] = m.label
    yield _memory(array)


def _rounded(value: np.ndarray, dtype: str, label: str) -> np.ndarray:
    """The value in a tensor's type, to the nearest; what was finite must stay so."""
    import numpy as np

    from planner.reader.draft.fold import numpy_dtype

    kind = numpy_dtype(TYPES[dtype])
    if value.dtype == kind:
        return value
    with np.errstate(over="ignore"):
        short = value.astype(kind)
    if not np.array_equal(np.isfinite(short), np.isfinite(value)):
        raise PlanError(
            "P212", f"{label} has values beyond {TYPES[dtype]}, the type of the checkpoint"
        )
    return short
