"""Presets by the names that people know their models by: those of repositories on the Hugging Face
hub, and other spellings.

`meta-llama/Meta-Llama-3-8B-Instruct`, `Llama-3-8B` and `llama_3_8b` are `llama3-8b`: the owner,
capitals, dashes, and the endings that say how such weights were trained, not what shapes they have,
do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TRAINED = re.compile(
    r"[-_](hf|chat|instruct|base|it|pt|bf16|fp8|fp16|v0\.[12]|v1|\d{4}|uncased|thinking|original)$",
    re.I,
)
"""Endings of names that leave the shapes as they are."""
KNOWN_AS = {
    "gpt2": "gpt2-small",
    "llama-4-scout-17b-16e": "llama4-scout",
    "llama-4-maverick-17b-128e": "llama4-maverick",
    "mistral-nemo": "mistral-nemo-12b",
    "olmo-2-1124-7b": "olmo-2-7b",
    "olmo-2-1124-13b": "olmo-2-13b",
    "olmo-2-0325-32b": "olmo-2-32b",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1-distill-llama-8b": "llama3-8b",
    "deepseek-r1-distill-llama-70b": "llama3-70b",
    "nvidia-nemotron-3-nano-30b-a3b": "nemotron-3-nano-30b-a3b",
    "stable-diffusion-v1-5": "unet-sd15",
    "vit-base-patch16-224": "vit-b16",
    "vit-large-patch16-224": "vit-l16",
    "vit-huge-patch14-224-in21k": "vit-h14",
}
"""Names of repositories that no preset is spelled like."""


def preset_meant(name: str, presets: Iterable[str]) -> str:
    """The one preset that a name means, "" where none or several do."""
    spelled: dict[str, set[str]] = {}
    for preset in presets:
        spelled.setdefault(_letters(preset), set()).add(preset)
    for other, preset in KNOWN_AS.items():
        spelled.setdefault(_letters(other), set()).add(preset)
    word = name.strip().rstrip("/").rpartition("/")[2]
    while True:
        letters = _letters(word)
        those = spelled.get(letters) or spelled.get(letters.removeprefix("meta"), set())
        if those:
            return min(those) if len(those) == 1 else ""
        shorter = TRAINED.sub("", word)
        if shorter == word:
            return ""
        word = shorter


def _letters(name: str) -> str:
    """Its letters, digits and points: 2.5 is another model than 25."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())
