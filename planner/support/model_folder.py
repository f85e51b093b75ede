"""The model that a folder stands for where one is named."""

from __future__ import annotations

import os

from planner.errors import PlanError


def model_file(source: str) -> str:
    """The file of a model that is named: of a folder the one model in it, its config.json or its
    ONNX file. Raises PlanError P101 where it has none, or several."""
    if not os.path.isdir(source):
        return source
    try:
        inside = sorted(
            os.path.join(source, name)
            for name in os.listdir(source)
            if name == "config.json" or name.endswith(".onnx")
        )
    except OSError as error:
        raise PlanError("P101", f"{source!r} cannot be read", detail=[str(error)]) from None
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise PlanError(
            "P101",
            f"{source!r} is a folder with {len(inside):,} models",
            help=[f"give one of them: {', '.join(inside[:3])}"],
        )
    raise PlanError(
        "P101",
        f"{source!r} is a folder without a model",
        help=["an ONNX file, zoo:NAME, or a Hugging Face config.json; there is none in it"],
    )
