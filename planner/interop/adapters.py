"""Adapters (LoRA) as the files of launchers ask for them: they are no part of a configuration's
price, which an option has."""

from __future__ import annotations

from planner.interop.keys import Keys

SECTIONS = ("peft", "lora")
"""Tables that are there where adapters are trained."""
ADAPTED = ("lora", "qlora", "dora", "oft")
"""Values of `finetuning_type` and `peft_scheme`."""
RANKS = ("lora_r", "lora_rank")


def notes_of(keys: Keys) -> list[str]:
    """What to say where a file trains adapters."""
    entries = [entry for name in keys.names() for entry in keys.entries(name)]
    sections = {where.partition(".")[0] for where, v in entries if v not in (None, False, "none")}
    adapter_keys = [
        f"{name}: {word}"
        for name in ("finetuning_type", "peft_scheme")
        if (word := keys.word("", name)) in ADAPTED
    ]
    if "enable_lora" not in keys:
        adapter_keys += [s for s in SECTIONS if s in sections]
    elif keys.flag(False, "enable_lora"):
        adapter_keys.append("enable_lora")
    adapter_keys += ["use_peft"] if keys.word("false", "use_peft") == "true" else []
    ranks = [rank for name in RANKS if (rank := keys.get(name)) is not None]
    if not adapter_keys:
        return []
    return [
        f"adapters ({adapter_keys[0]}) are left out, and all parameters priced as trained:"
        f" --lora rank={(*ranks, 'N')[0]},targets=GLOB prices adapters"
    ]
