"""Where commands find the model of a plan, what they call files, and what they name next."""

from __future__ import annotations

import os
import re
from pathlib import Path

from costmodels.hardware.units import show_bytes
from planner.errors import PlanError
from planner.strategy.read import load
from planner.strategy.strategy import Strategy
from planner.support.hub_cache import hub_model

MOST_FILES, MOST_READ = 8, 1 << 28
"""How many files, and of how many bytes at most, are looked into for a model that is not where it
was."""

__all__ = ["load", "made_folder", "model_of", "next_steps", "renamed", "stem", "too_large"]


def stem(source: str) -> str:
    """`llama3-8b-seq4096` of zoo:llama3-8b,seq=4096, so that plans of two sizes lie side by side;
    `model` of folder/model.onnx; `folder` of folder/config.json, as all are called that, and MODEL
    of one that the hub's tools keep as OWNER/MODEL."""
    if source.startswith("zoo:"):
        name = source.removeprefix("zoo:").rpartition("/")[2]  # zoo:OWNER/MODEL, as the hub has it
        return re.sub(r"[^\w.-]", "", name.replace(",", "-"))
    path = Path(source)
    return (path.name == "config.json" and (hub_model(path) or path.parent.name)) or path.stem


def made_folder(path: str, *, parents: bool = False) -> Path:
    """A folder, made where there is none. parents: those around it, too. Raises PlanError P056."""
    folder = Path(path)
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except OSError as e:
        raise PlanError(
            "P056",
            f"cannot make the folder {str(folder)!r}: {e.strerror}",
            help=["-o a folder in one that exists and is writable"],
        ) from e
    return folder


def renamed(strategy: Strategy, path: str | Path) -> list[str]:
    """Files beside a path where there is none that hold the very model of a strategy, the most
    alike by name first: it was renamed."""
    import difflib

    from planner.whatif.reprice import open_recorded

    gone = Path(path)
    try:
        beside = [
            p
            for p in gone.parent.iterdir()
            if p.suffix == gone.suffix and p.is_file() and p.stat().st_size <= MOST_READ
        ]
    except OSError:
        return []
    same_model = []
    for other in sorted(
        beside, key=lambda p: -difflib.SequenceMatcher(None, p.name, gone.name).ratio()
    )[:MOST_FILES]:
        try:
            if open_recorded(strategy, other).sha256() == strategy.model["sha256"]:
                same_model.append(str(other))
        except PlanError:
            continue  # another kind of file, or a model that needs other options
    return same_model


def next_steps(path: str | Path, strategy: Strategy) -> str:
    """What to do with a plan that was just seen: one that is for a launcher goes there."""
    onward = "export" if strategy.provenance.get("launcher") else "emit"
    return f"next: plan explain {path} · plan {onward} {path}"


def too_large(strategy: Strategy) -> str:
    """What the program of a plan needs where this host is to be all of its devices, beside what the
    host has; "" where that is enough."""

    need = int(strategy.costs["memory_per_device_bytes"]) * int(strategy.topology["devices"])
    try:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # a system that does not say
        return ""
    return (
        f"all devices together hold {show_bytes(need)}, this host {show_bytes(have)}"
        if need > have
        else ""
    )


def model_of(strategy: Strategy, path: str | Path, typed: str | None) -> str:
    """Where the model of a strategy is: as given, as recorded, or beside the strategy. PlanError
    when it is nowhere."""
    if typed:
        return typed
    name, recorded = str(strategy.model["name"]), str(strategy.provenance.get("source", ""))
    if name.startswith("zoo:"):
        return name
    places = [Path(recorded)] if recorded else []
    places.append(Path(path).parent / name)
    for place in places:
        if place.is_file():
            return str(place)
    there = [
        f"{other} holds the same model: --model {other}"
        for other in renamed(strategy, places[-1])[:1]
    ]
    raise PlanError(
        "P058",
        f"the model {name!r} of {path} is not where it was",
        detail=[f"looked for {p}" for p in places],
        help=there or ["--model FILE"],
    )
