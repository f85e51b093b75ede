"""The file that is meant where a model is named by its folder, or as the hub names it."""

from __future__ import annotations

import os

from planner.errors import PlanError
from planner.support.hub_cache import cached_config, is_hub_name


def model_file(source: str) -> str:
    """The file of a model that is named: of a folder the one model in it, its config.json or its
    ONNX file; of OWNER/MODEL[,key=value...] the config.json that the hub's tools keep here. Raises
    PlanError P101 where a folder has none, or several."""
    if not os.path.isdir(source):
        name, comma, sizes = source.partition(",")
        config = cached_config(name) if is_hub_name(name) else ""
        return config + comma + sizes if config else source
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
