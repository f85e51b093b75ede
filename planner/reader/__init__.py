"""ONNX to `planner.graph.ir.Graph`: `read` a file, `read_model` a ModelProto.

    file       load and check the file; of external data tables alone are opened
    check      structure: single assignment, no cycles, functions counted before they are entered
    dims       every input dim becomes an integer
    lower      one pass over the nodes: canonical operators, shapes, constants folded on the way
    tidy, fuse views and no-ops removed; norms, activations, rotary embeddings and attention
    recognised
    rebatch    another batch traced through a static export
    params     which leaves are weights, which of them train, and what they are called

What comes out computes what the file computes (up to float rounding): tests run both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.graph.findings import Finding
from planner.graph.ir import Graph
from planner.reader.onnx.file import load

if TYPE_CHECKING:
    from planner.reader.onnx.check import Checked

__all__ = ["read", "read_model"]


def read(
    path: str | os.PathLike[str],
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    tokens_per_step: int | None = None,
    devices: int = 1,
) -> Graph:
    """Reads an ONNX file for planning.

    Args:
        batch: global batch per step; default the exported one, rounded up to a multiple of
        `devices` where another batch can be traced through the graph. dims: values of the other
        symbolic input dims, by name. shapes: whole shapes of inputs, by name, for inputs that
        declare none. tokens_per_step: instead of `batch`: tokens, divided by the sequence length.
        devices: number of devices, for the default batch only.

    Returns a Graph with every shape static. Raises PlanError for anything wrong with the file or
    the options.
    """
    from planner.reader.onnx.check import Checked

    path = Path(path)
    options: dict[str, Any] = {
        "batch": batch,
        "dims": dims,
        "shapes": shapes,
        "tokens_per_step": tokens_per_step,
        "devices": devices,
    }
    return _read(Checked.of(load(path), path.parent), path.parent, path.stem, **options)


def read_model(
    model: Any,
    folder: str | os.PathLike[str] | None = None,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    tokens_per_step: int | None = None,
    devices: int = 1,
) -> Graph:
    """Reads an in-memory onnx.ModelProto, or a `planner.reader.onnx.check.Checked` one where it is
    read more than once; `folder` is where its external data would be (None: nowhere). See
    `read`."""
    from planner.reader.onnx.check import Checked

    folder = None if folder is None else Path(folder)
    checked = model if isinstance(model, Checked) else Checked.of(model, folder)
    options: dict[str, Any] = {
        "batch": batch,
        "dims": dims,
        "shapes": shapes,
        "tokens_per_step": tokens_per_step,
        "devices": devices,
    }
    return _read(checked, folder, checked.model.graph.name or "model", **options)


def _read(model: Checked, folder: Path | None, name: str, **options: Any) -> Graph:
    from planner.reader.batch.rebatch import rebatch
    from planner.reader.draft.simplify import tidy
    from planner.reader.fuse.fuse import fuse
    from planner.reader.jax.trace import PRODUCER
    from planner.reader.onnx.finish import finish
    from planner.reader.onnx.start import start
    from planner.reader.onnx.weight_casts import drop_weight_casts

    draft, bound = start(model, folder, name, **options)
    drop_weight_casts(draft)
    tidy(draft)
    fuse(draft, as_written=model.model.producer_name == PRODUCER)
    drop_weight_casts(draft)  # of scales and biases, which are known now
    if bound.lowered is not None and bound.batch != bound.lowered:
        try:
            rebatch(draft, bound)
        except PlanError as e:
            if bound.exported is None:
                return _read(model, folder, name, **options, direct=True)
            if (
                e.code != "P146"
                or options["batch"] is not None
                or options["tokens_per_step"] is not None
            ):
                raise
            graph = _read(
                model, folder, name, **{**options, "batch": bound.exported}
            )  # the other batch was a default, which nobody asked for
            why = e.what.partition(": ")[2]
            note = Finding(
                "batch",
                f"batch {bound.exported}: the exported one, as another cannot be traced: {why};"
                " export with a dynamic batch to set it",
            )
            return replace(graph, notes=(note, *graph.notes))
    return finish(draft)
