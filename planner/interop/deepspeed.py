"""DeepSpeed's configuration, alone or named by another: its keys in the words of accelerate's.

    zero_optimization.stage                        zero_stage
    zero_optimization.offload_optimizer.device     offload_optimizer_device; offload_param likewise
    train_micro_batch_size_per_gpu                 per_device_train_batch_size
    train_batch_size, gradient_accumulation_steps  the same
    bf16.enabled, fp16.enabled                     bf16, fp16
    tensor_parallel.autotp_size                    tp_size
    sequence_parallel_size                         sp_size

What is "auto" is for the program that names the file to say. Source: docs/_pages/config-json.md of
deepspeedai/DeepSpeed, and the `deepspeed` argument of transformers' TrainingArguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.interop.nearby import nearby_file

OWN = ("zero_optimization", "train_micro_batch_size_per_gpu")
"""Keys that no other launcher's file has at its top."""
OTHERS = re.compile(r"(pipe|model)[-_]parallel[-_]size")
"""Keys of programs that have DeepSpeed's at their top beside degrees of their own: GPT-NeoX."""
NAMING = ("deepspeed", "deepspeed_config_file")
"""Keys by which other files name one, or hold its table."""
FSDP = "fsdp_config"
"""The key by which TrainingArguments name the table of FSDP, or hold it."""
DIRECT = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "train_batch_size",
    "sequence_parallel_size": "sp_size",
}
NESTED = {
    ("bf16", "enabled"): "bf16",
    ("fp16", "enabled"): "fp16",
    ("tensor_parallel", "autotp_size"): "tp_size",
    ("zero_optimization", "stage"): "zero_stage",
    ("zero_optimization", "offload_optimizer", "device"): "offload_optimizer_device",
    ("zero_optimization", "offload_param", "device"): "offload_param_device",
}


def in_words(overriding: Mapping[str, str]) -> dict[str, str]:
    """Values that go behind a file, `zero_optimization.stage=2`, by accelerate's words for them."""
    words = DIRECT | {".".join(path): other for path, other in NESTED.items()}
    return {words.get(name, name): value for name, value in overriding.items()}


def with_deepspeed(
    table: Mapping[str, Any], file: Path, load: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """A file's table with what DeepSpeed's configuration in it, or named by it, says. Raises
    PlanError P190 for one that cannot be read, P191 for one that is nowhere."""
    if any(key in table for key in OWN) and not any(map(OTHERS.fullmatch, table)):
        return _translated(table)
    return {key: _named(key, value, file, load) for key, value in table.items()}


def _named(key: str, value: Any, file: Path, load: Callable[[Path], Mapping[str, Any]]) -> Any:
    """A value of another file: of `deepspeed`, the table; of a section, what is in it."""
    name = key.lstrip("-").replace("-", "_")
    if name == FSDP and isinstance(value, str) and value.endswith(".json"):
        there = nearby_file(file, value)
        return value if there is None else dict(load(there))
    if name not in NAMING:
        inside = isinstance(value, Mapping) and any(name in value for name in NAMING)
        return {k: _named(k, v, file, load) for k, v in value.items()} if inside else value
    if isinstance(value, Mapping):
        return _translated(value)
    if not isinstance(value, str) or not value.endswith(".json"):
        return value  # Megatron-DeepSpeed's flag
    there = nearby_file(file, value)
    if there is None:
        raise PlanError(
            "P191",
            f"{file} names {value}, whose ZeRO stage decides the price, and it is not there",
            detail=["looked for it beside the file, in folders above, and from here"],
            help=[f"put it beside {file.name}"],
        )
    return _translated(load(there))


def _translated(table: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of DeepSpeed: keys that are known in other words, the rest as it is."""
    rest = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()
    }
    translated: dict[str, Any] = {"distributed_type": "DEEPSPEED", "zero_stage": 0}
    translated |= {other: rest.pop(name) for name, other in DIRECT.items() if name in rest}
    for path, other in NESTED.items():
        there, value = _taken(rest, path)
        if there:
            translated[other] = value
    return {name: value for name, value in (rest | translated).items() if value != "auto"}


def _taken(table: dict[str, Any], path: tuple[str, ...]) -> tuple[bool, Any]:
    """Whether there is a value at a path, which is taken out, and the value."""
    name, *rest = path
    if not rest:
        return name in table, table.pop(name, None)
    inner = table.get(name)
    if not isinstance(inner, Mapping):
        return False, None
    table[name] = dict(inner)
    return _taken(table[name], tuple(rest))
