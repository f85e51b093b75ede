"""A model by its name on the Hugging Face hub, where this machine has its config.json: the folder
that the hub's own tools keep their downloads in is read, and nothing is fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<model>[A-Za-z0-9][\w.-]*)")
_FILE = re.compile(r"\.(onnx|json|toml|ya?ml|pb|pt2?|pth|h5|py|safetensors|tflite|gguf|zip)$", re.I)
"""Endings of files, which no repository has."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_name(text: str) -> bool:
    """Whether a text reads as OWNER/MODEL of the hub and no folder of that owner's name is here."""
    name = _NAME.fullmatch(text)
    return bool(name and not _FILE.search(text) and not os.path.exists(name["owner"]))


def hub_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the hub's tools keep downloads: HF_HUB_CACHE, else `hub` in HF_HOME, else in
    ~/.cache/huggingface (huggingface_hub, environment variables)."""
    if folder := environment.get("HF_HUB_CACHE"):
        return Path(folder)
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(home) / "hub"


def cached_config(name: str) -> str:
    """The config.json of OWNER/MODEL as the branch main was downloaded, else of the newest download
    of it; "" where there is none."""
    folder = hub_folder() / ("models--" + name.replace("/", "--"))
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (config := snapshots / commit / "config.json").is_file():
        return str(config)
    try:
        configs = [
            (config.stat().st_mtime, str(config)) for config in snapshots.glob("*/config.json")
        ]
    except OSError:
        return ""
    return max(configs)[1] if configs else ""


def hub_model(path: Path) -> str:
    """MODEL of such a config.json's repository, "" for any other file."""
    repository = path.parent.parent.parent.name
    if path.parent.parent.name != "snapshots" or not repository.startswith("models--"):
        return ""
    return repository.rpartition("--")[2]
