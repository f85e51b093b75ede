"""Emitted programs as files: the program, and the constants and weights that lie beside it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import irregular, opened
from planner.commands.program_folder import is_folder, refuse_folder, write_folder
from planner.emit.owned import MODEL
from planner.errors import PlanError
from planner.support import console
from planner.support.atomic_write import replacing

if TYPE_CHECKING:
    import numpy as np

    from planner.graph.ir import Graph
    from planner.strategy.strategy import Strategy


def write_program(
    strategy: Strategy,
    source: str,
    target: Path,
    backend: str,
    unroll: bool,
    force: bool,
    standalone: bool = False,
) -> list[str]:
    """Write the program and, when it has any, its constants and inline weights as `.safetensors`
    beside it. Returns the names written.

    It is written as a folder where `program_folder.is_folder` says so, else as one file. Each file
    is written whole or not at all, the program last. A file that is not an emitted program is kept
    unless forced.
    """
    from planner.emit.from_strategy import program
    from planner.strategy.reopen import reopen

    return write_files(
        lambda weights, folder: program(
            strategy,
            source,
            backend=backend,
            unroll=unroll,
            weights_file=weights,
            model_folder=folder,
        ),
        lambda: reopen(strategy, source),
        target,
        force,
        standalone,
    )


def write_files(
    make: Callable[[str, str], Any],
    open_model: Callable[[], Any],
    target: Path,
    force: bool,
    standalone: bool = False,
) -> list[str]:
    """Write a program, made for the name of the file of its weights and for the folder of the
    model's own data files, and beside it what of the model's weights it needs."""
    from planner.support.atomic_write import write_atomically

    refuse_other(target, force, standalone)
    folder = is_folder(target, standalone)
    weights = (target / MODEL if folder else target).with_suffix(".safetensors")
    model = open_model()
    emitted = make(weights.name, _from(target.parent, model))
    names = inline_weights(model.plain, model.folder)

    def write_weights(path: Path) -> None:
        _write_safetensors(path, emitted.constants, model.plain, names, model.folder)

    some = write_weights if emitted.constants or names else None
    if folder:
        written = write_folder(target, emitted.model, some)
    else:
        if some:
            some(weights)
        write_atomically(target, emitted.text)
        written = [str(target), *([str(weights)] if some else [])]
    for reason in emitted.unrolled_because:
        console.say(f"note: a repeated block is written out: {reason}")
    return written


def _from(program: Path, model: Any) -> str:
    """Where the model's data files lie, seen from the folder of a program that maps them; "." where
    it maps none."""
    from planner.emit.external import in_place

    if model.folder is None or not any(in_place(model.plain, n) for n in model.plain.weights):
        return "."
    try:
        path = os.path.relpath(model.folder.resolve(), program.resolve())
    except ValueError:  # another drive
        return "."
    return Path(path).as_posix()


def refuse_other(target: Path, force: bool, standalone: bool = False) -> None:
    """Refuse to write a program over a file that is none, or where none can be written."""
    if is_folder(target, standalone):
        return refuse_folder(target, force)
    if target.exists() and (what := irregular(target.stat().st_mode)):
        raise PlanError(
            "P056",
            f"cannot write {str(target)!r}",
            detail=[what],
            help=["a file in a folder that exists and is writable"],
        )
    if target.exists() and not force and not (target.is_file() and _ours(target)):
        raise PlanError(
            "P053",
            f"{target} exists and was not written by this command",
            help=["name another file, or --force"],
        )
    if not (target.parent.is_dir() and os.access(target.parent, os.W_OK)):
        raise PlanError(
            "P056",
            f"cannot write {str(target)!r}",
            detail=[f"{target.parent} is no folder one may write in"],
            help=["a file in a folder that exists and is writable"],
        )


def _ours(path: Path) -> bool:
    try:
        with opened(path) as file:
            return MARK in file.read(4000).decode(errors="replace")
    except OSError:
        return False


def inline_weights(graph: Graph, folder: Path | None) -> list[str]:
    """Weights whose bytes travel with the program: those inside the model, and external ones that a
    program cannot read in place."""
    from planner.emit.external import in_place
    from planner.workload.weights import missing

    away = set(missing(graph, folder))
    return [
        n for n in graph.weights if graph.labels.get(n, n) not in away and not in_place(graph, n)
    ]


def _write_safetensors(
    path: Path, constants: Mapping[str, Any], graph: Graph, weights: list[str], folder: Path | None
) -> None:
    """The .safetensors format: 8 bytes of header length, the header in JSON, the arrays. One array
    is in memory at a time."""
    from planner.workload.weights import load_one

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        import numpy as np

        for name, value in constants.items():
            yield f"constant/{name}", np.asarray(value)
        for name in weights:
            yield (
                graph.labels.get(name, name),
                np.asarray(load_one(graph, name, folder)),
            )  # numbers stay without dims

    header: dict[str, Any] = {}
    try:
        with tempfile.TemporaryFile(dir=path.parent) as body:
            for name, array in arrays():
                low = body.tell()
                body.write(array.tobytes())
                header[name] = {
                    "dtype": _TYPES[str(array.dtype)],
                    "shape": list(array.shape),
                    "data_offsets": [low, body.tell()],
                }
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with replacing(path) as file:
                file.write(len(text).to_bytes(8, "little") + text)
                body.seek(0)
                while chunk := body.read(1 << 24):
                    file.write(chunk)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot write {str(path)!r}: {e.strerror}",
            help=["-o a file in a folder that exists and is writable"],
        ) from e


MARK = "emitted by meshwright"


_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
